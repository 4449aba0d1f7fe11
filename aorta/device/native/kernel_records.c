/* Kernel records of the CUDA driver, through CUPTI: start, end, stream and name of every kernel, copy and set.
 *
 * Built on first use by aorta/device/native/build.py, without headers of CUDA or CUPTI: their functions are looked
 * up at run time, and the few fields that are read are laid out below. CUPTI delivers full buffers on a thread of
 * its own; `completed` reduces them to `Record` in a ring, and Python copies whole stretches out of it. Nothing
 * here takes the interpreter lock, waits for the device or blocks a launch.
 *
 * Marks: a 32-bit set of a word of pinned host memory, whose value is the mark's number. Its record says when the
 * stream reached the mark, and the word tells the host how far the device has got.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

/* -- the driver's side ----------------------------------------------------------------------------------------- */

enum { KIND_MEMCPY = 1, KIND_MEMSET = 2, KIND_CONCURRENT_KERNEL = 10, KIND_MEMCPY2 = 22 };
static const int KINDS[] = {KIND_CONCURRENT_KERNEL, KIND_MEMCPY, KIND_MEMSET, KIND_MEMCPY2};
#define NUM_KINDS ((int)(sizeof(KINDS) / sizeof(*KINDS)))

enum { ATTRIBUTE_PER_THREAD_BUFFER = 9, FLUSH_FORCED = 1 };

/* CUpti_ActivityKernel9 (12.x) and CUpti_ActivityKernel10 (13.x): the same as far as they are read here. */
typedef struct {
  uint32_t kind;
  uint8_t before_start[12];
  uint64_t start, end;
  uint64_t completed;
  uint32_t device, context, stream;
  uint8_t before_correlation[40];
  uint32_t correlation;
  int64_t grid;
  const char *name;
  uint8_t before_graph_node[32];
  uint64_t graph_node;
} KernelActivity;

/* CUpti_ActivityMemcpy5/6 and CUpti_ActivityMemset4 agree in these; the second word is the set's value. Of a copy
 * between devices (CUpti_ActivityMemcpyPtoP4) only the fields up to `stream` are read. */
typedef struct {
  uint32_t kind;
  uint32_t value;
  uint64_t bytes;
  uint64_t start, end;
  uint32_t device, context, stream, correlation;
  uint8_t before_graph_node[16];
  uint64_t graph_node;
} CopyActivity;

_Static_assert(offsetof(KernelActivity, stream) == 48, "layout of CUpti_ActivityKernel9");
_Static_assert(offsetof(KernelActivity, correlation) == 92, "layout of CUpti_ActivityKernel9");
_Static_assert(offsetof(KernelActivity, name) == 104, "layout of CUpti_ActivityKernel9");
_Static_assert(offsetof(KernelActivity, graph_node) == 144, "layout of CUpti_ActivityKernel9");
_Static_assert(offsetof(CopyActivity, stream) == 40, "layout of CUpti_ActivityMemset4");
_Static_assert(offsetof(CopyActivity, graph_node) == 64, "layout of CUpti_ActivityMemset4");

typedef void (*RequestFunction)(uint8_t **, size_t *, size_t *);
typedef void (*CompleteFunction)(void *, uint32_t, uint8_t *, size_t, size_t);

static struct {
  int (*get_version)(uint32_t *);
  int (*register_callbacks)(RequestFunction, CompleteFunction);
  int (*register_clock)(uint64_t (*)(void));
  int (*enable)(int);
  int (*disable)(int);
  int (*flush)(uint32_t);
  int (*next_record)(uint8_t *, size_t, void **);
  int (*num_dropped)(void *, uint32_t, size_t *);
  int (*set_attribute)(int, size_t *, void *);
} cupti;

static struct {
  int (*alloc_host)(void **, size_t);
  int (*set_word)(uint64_t, uint32_t, size_t, void *);
} driver;

/* -- what Python reads ----------------------------------------------------------------------------------------- */

enum { IS_KERNEL = 0, IS_COPY = 1, IS_SET = 2, IS_MARK = 3, IS_PEER_COPY = 4 };

typedef struct {
  int64_t start, end;   /* monotonic ns */
  uint32_t correlation; /* of the call that launched it: counts up with every call */
  uint32_t stream;
  uint32_t name;   /* index into the names; of a mark its number */
  uint32_t buffer; /* the buffer that it came in */
  uint16_t device;
  uint8_t what;     /* IS_... */
  uint8_t in_graph; /* a node of a graph */
  uint32_t unused;
} Record;

typedef struct {
  uint64_t num_taken;    /* records copied out by this call */
  uint64_t num_lost;     /* records that found the ring full, since the start */
  int64_t lost_start;    /* the stretch of time they cover */
  int64_t lost_end;
  uint64_t num_dropped;  /* records that CUPTI had no room for, since the start */
  uint32_t settled;      /* every buffer before this one has come back */
  uint32_t num_names;
  uint64_t num_no_time;  /* records without times, since the start */
} Taken;

/* -- state ------------------------------------------------------------------------------------------------------ */

#define MOST_NAMES 65536
#define NAME_SLOTS (2 * MOST_NAMES)
#define MOST_BUFFERS 4096
#define MOST_SPARE 64
#define MARK_VALUES 0xA0000000u /* the upper four bits of a mark's number: sets of others rarely have them */

static pthread_mutex_t ring_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t buffers_lock = PTHREAD_MUTEX_INITIALIZER; /* taken in launches: held for a few words only */
static Record *ring;
static uint64_t capacity, head, tail;
static Taken totals;

static const char **names;
static uint32_t num_names;
static struct { const char *address; uint32_t index; } recent[4096]; /* by the upper bits of its hash */
static uint32_t *name_slots; /* index + 1 of a name, by the hash of its text */

static size_t buffer_bytes;
static uint8_t *spare[MOST_SPARE];
static int num_spare;
static struct { uint8_t *data; uint32_t number; } lent[MOST_BUFFERS];
static int num_lent;
static uint32_t next_buffer;

static volatile uint32_t *progress;
static char error_text[256];

static uint64_t monotonic_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

/* -- buffers ---------------------------------------------------------------------------------------------------- */

static void requested(uint8_t **buffer, size_t *size, size_t *max_records) {
  uint8_t *data = NULL;
  *size = buffer_bytes;
  *max_records = 0;
  pthread_mutex_lock(&buffers_lock);
  if (num_lent < MOST_BUFFERS) {
    if (num_spare) data = spare[--num_spare];
    else if (posix_memalign((void **)&data, 64, buffer_bytes)) data = NULL;
    if (data) {
      lent[num_lent].data = data;
      lent[num_lent++].number = next_buffer++;
    }
  }
  pthread_mutex_unlock(&buffers_lock);
  if (!data) *size = 0; /* CUPTI then drops the record and counts it */
  *buffer = data;
}

/* The number of a buffer that is ours; -1 of one that another client had handed out. */
static int64_t number_of(const uint8_t *data) {
  int64_t number = -1;
  pthread_mutex_lock(&buffers_lock);
  for (int i = 0; i < num_lent; i++)
    if (lent[i].data == data) number = lent[i].number;
  pthread_mutex_unlock(&buffers_lock);
  return number;
}

static void give_back(uint8_t *data) {
  pthread_mutex_lock(&buffers_lock);
  for (int i = 0; i < num_lent; i++)
    if (lent[i].data == data) {
      lent[i] = lent[--num_lent];
      break;
    }
  if (num_spare < MOST_SPARE) spare[num_spare++] = data, data = NULL;
  pthread_mutex_unlock(&buffers_lock);
  free(data);
}

/* Buffers come back out of order: everything before the oldest that is out has come. */
static uint32_t settled(void) {
  pthread_mutex_lock(&buffers_lock);
  uint32_t oldest = next_buffer;
  for (int i = 0; i < num_lent; i++)
    if (lent[i].number < oldest) oldest = lent[i].number;
  pthread_mutex_unlock(&buffers_lock);
  return oldest;
}

/* -- records ---------------------------------------------------------------------------------------------------- */

static uint32_t index_by_text(const char *text) {
  uint64_t hash = 1469598103934665603ull;
  for (const char *c = text; *c; c++) hash = (hash ^ (uint8_t)*c) * 1099511628211ull;
  uint32_t slot = (uint32_t)(hash % NAME_SLOTS);
  while (name_slots[slot]) {
    if (!strcmp(names[name_slots[slot] - 1], text)) return name_slots[slot] - 1;
    slot = (slot + 1) % NAME_SLOTS;
  }
  if (num_names == MOST_NAMES) return 0; /* the empty name */
  char *copy = strdup(text);
  if (!copy) return 0;
  names[num_names] = copy;
  name_slots[slot] = ++num_names;
  return num_names - 1;
}

/* The index of a name. A kernel's name has one address as a rule, which may be given away again: it is looked up
 * by the address, and the text decides. */
static uint32_t index_of_name(const char *text) {
  if (!text) return 0;
  uint64_t key = (uint64_t)(uintptr_t)text * 0x9E3779B97F4A7C15ull;
  uint32_t slot = (uint32_t)(key >> 52);
  if (recent[slot].address != text || strcmp(names[recent[slot].index], text)) {
    recent[slot].index = index_by_text(text);
    recent[slot].address = text;
  }
  return recent[slot].index;
}

static void keep(const Record *record) {
  if (!record->start || record->end < record->start) {
    totals.num_no_time++;
    return;
  }
  if (head - tail == capacity) {
    if (!totals.num_lost++ || record->start < totals.lost_start) totals.lost_start = record->start;
    if (record->end > totals.lost_end) totals.lost_end = record->end;
    return;
  }
  ring[head++ % capacity] = *record;
}

static void read_buffer(uint8_t *data, size_t size, uint32_t number) {
  void *next = NULL;
  while (cupti.next_record(data, size, &next) == 0) {
    uint32_t kind = *(uint32_t *)next;
    Record record = {.buffer = number};
    if (kind == KIND_CONCURRENT_KERNEL) {
      const KernelActivity *kernel = next;
      record.start = (int64_t)kernel->start, record.end = (int64_t)kernel->end;
      record.correlation = kernel->correlation, record.stream = kernel->stream;
      record.device = (uint16_t)kernel->device, record.in_graph = kernel->graph_node != 0;
      record.what = IS_KERNEL, record.name = index_of_name(kernel->name);
    } else if (kind == KIND_MEMCPY || kind == KIND_MEMSET || kind == KIND_MEMCPY2) {
      const CopyActivity *copy = next;
      record.start = (int64_t)copy->start, record.end = (int64_t)copy->end;
      record.stream = copy->stream, record.device = (uint16_t)copy->device;
      if (kind == KIND_MEMCPY2) {
        record.what = IS_PEER_COPY;
      } else {
        record.correlation = copy->correlation, record.in_graph = copy->graph_node != 0;
        record.what = kind == KIND_MEMCPY ? IS_COPY : IS_SET;
        if (kind == KIND_MEMSET && copy->bytes == 4 && (copy->value & 0xF0000000u) == MARK_VALUES)
          record.what = IS_MARK, record.name = copy->value & 0x0FFFFFFFu;
      }
    } else {
      continue;
    }
    keep(&record);
  }
}

static void completed(void *context, uint32_t stream, uint8_t *data, size_t size, size_t valid) {
  (void)size;
  int64_t number = number_of(data);
  if (number < 0) return; /* of the client before us, which may still own it */
  size_t dropped = 0;
  pthread_mutex_lock(&ring_lock);
  if (valid) read_buffer(data, valid, (uint32_t)number);
  if (cupti.num_dropped(context, stream, &dropped) == 0) totals.num_dropped += dropped;
  pthread_mutex_unlock(&ring_lock);
  give_back(data); /* only now: until then the buffer is not settled */
}

/* -- calls from Python ------------------------------------------------------------------------------------------- */

static int fail(const char *what, int code) {
  snprintf(error_text, sizeof error_text, "%s (error %d)", what, code);
  return 1;
}

static int look_up(void *library, const char *name, void *function) {
  *(void **)function = dlsym(library, name);
  if (*(void **)function) return 0;
  snprintf(error_text, sizeof error_text, "%s is not in the library", name);
  return 1;
}

EXPORT const char *aorta_kernels_error(void) { return error_text; }

/* Loads CUPTI and the driver; 0, or 1 and a text in aorta_kernels_error. */
EXPORT int aorta_kernels_open(const char *cupti_path, const char *driver_path, uint64_t num_records, size_t bytes) {
  if (ring) return 0;
  void *library = dlopen(cupti_path, RTLD_LAZY | RTLD_LOCAL);
  void *cuda = dlopen(driver_path, RTLD_LAZY | RTLD_LOCAL);
  if (!library || !cuda) {
    snprintf(error_text, sizeof error_text, "%s", dlerror());
    return 1;
  }
  if (look_up(library, "cuptiGetVersion", &cupti.get_version) ||
      look_up(library, "cuptiActivityRegisterCallbacks", &cupti.register_callbacks) ||
      look_up(library, "cuptiActivityRegisterTimestampCallback", &cupti.register_clock) ||
      look_up(library, "cuptiActivityEnable", &cupti.enable) ||
      look_up(library, "cuptiActivityDisable", &cupti.disable) ||
      look_up(library, "cuptiActivityFlushAll", &cupti.flush) ||
      look_up(library, "cuptiActivityGetNextRecord", &cupti.next_record) ||
      look_up(library, "cuptiActivityGetNumDroppedRecords", &cupti.num_dropped) ||
      look_up(library, "cuptiActivitySetAttribute", &cupti.set_attribute) ||
      look_up(cuda, "cuMemAllocHost_v2", &driver.alloc_host) ||
      look_up(cuda, "cuMemsetD32Async", &driver.set_word))
    return 1;
  Record *records = calloc(num_records, sizeof *records);
  names = calloc(MOST_NAMES, sizeof *names);
  name_slots = calloc(NAME_SLOTS, sizeof *name_slots);
  if (!records || !names || !name_slots) return fail("no memory for the ring", 0);
  index_by_text("");
  capacity = num_records, buffer_bytes = bytes;
  ring = records;
  return 0;
}

EXPORT uint32_t aorta_kernels_version(void) {
  uint32_t version = 0;
  return cupti.get_version(&version) ? 0 : version;
}

/* Pinned memory for marks in the calling thread's current context. */
EXPORT int aorta_kernels_prepare_marks(void) {
  void *word = NULL;
  if (progress) return 0;
  int code = driver.alloc_host(&word, 64);
  if (code) return fail("cuMemAllocHost", code);
  progress = word;
  *progress = 0;
  return 0;
}

/* The buffers of the process become ours: at first, and after another client had them. Not at every start: a
 * buffer that is half full when callbacks are registered need not come back. */
EXPORT int aorta_kernels_claim(void) {
  int code;
  uint8_t no = 0;
  size_t size = sizeof no;
  /* One sequence of buffers for all threads: what is settled is then what was launched before. With a sequence
   * for each thread calls and kernels were not matched one to one, and a launch was not cheaper. Older versions
   * have no such attribute and only ever had that one sequence. */
  cupti.set_attribute(ATTRIBUTE_PER_THREAD_BUFFER, &size, &no);
  if ((code = cupti.register_clock(monotonic_ns))) return fail("cuptiActivityRegisterTimestampCallback", code);
  if ((code = cupti.register_callbacks(requested, completed))) return fail("cuptiActivityRegisterCallbacks", code);
  return 0;
}

/* Kernels launched from now on are recorded. */
EXPORT int aorta_kernels_start(void) {
  int code;
  for (int i = 0; i < NUM_KINDS; i++)
    if ((code = cupti.enable(KINDS[i])) && KINDS[i] != KIND_MEMCPY2) return fail("cuptiActivityEnable", code);
  return 0;
}

/* Kernels launched from now on are not recorded; those launched before still arrive. */
EXPORT void aorta_kernels_stop(void) {
  for (int i = 0; i < NUM_KINDS; i++) cupti.disable(KINDS[i]);
}

/* Asks for the buffers whose kernels have all ended; forced: for all. */
EXPORT int aorta_kernels_flush(int forced) { return cupti.flush(forced ? FLUSH_FORCED : 0); }

/* Copies up to `most` records out of the ring, oldest first. */
EXPORT void aorta_kernels_take(Record *out, uint64_t most, Taken *taken) {
  uint32_t before = settled(); /* asked first: what is settled by then is in the ring */
  pthread_mutex_lock(&ring_lock);
  uint64_t n = head - tail < most ? head - tail : most;
  uint64_t at = tail % capacity, first = n < capacity - at ? n : capacity - at;
  memcpy(out, ring + at, first * sizeof *out);
  memcpy(out + first, ring, (n - first) * sizeof *out);
  tail += n;
  if (head != tail) before = 0; /* not all that has come was taken */
  else head = tail = 0;         /* the same pages again: a run that keeps up never touches the whole ring */
  *taken = totals;
  taken->num_taken = n;
  taken->num_names = num_names;
  pthread_mutex_unlock(&ring_lock);
  taken->settled = before;
}

/* A name as C++ spells it, where the C++ library of the process can demangle it. */
EXPORT const char *aorta_kernels_name(uint32_t index) {
  static char *(*demangle)(const char *, char *, size_t *, int *);
  static int looked;
  if (index >= num_names) return "";
  if (!looked++) {
    *(void **)&demangle = dlsym(RTLD_DEFAULT, "__cxa_demangle");
    void *library = demangle ? NULL : dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_LOCAL);
    if (library) *(void **)&demangle = dlsym(library, "__cxa_demangle");
  }
  static char *last; /* until the next call */
  int status = 1;
  free(last);
  last = demangle && names[index][0] == '_' ? demangle(names[index], NULL, NULL, &status) : NULL;
  return last && !status ? last : names[index];
}

/* Puts mark `number` (below 2^28) on a stream; 0 or an error of the driver. */
EXPORT int aorta_kernels_mark(void *stream, uint32_t number) {
  return driver.set_word((uint64_t)(uintptr_t)progress, MARK_VALUES | number, 1, stream);
}

/* The number of the last mark that the device has passed; 0 before the first. */
EXPORT uint32_t aorta_kernels_passed(void) { return progress ? *progress & 0x0FFFFFFFu : 0; }

EXPORT size_t aorta_kernels_record_bytes(void) { return sizeof(Record); }
EXPORT int aorta_kernels_num_lent(void) { return num_lent; }
EXPORT uint64_t aorta_kernels_now(void) { return monotonic_ns(); }
