/* Kernel records of ROCm, through roctracer's activity interface: the same functions as kernel_records.c has for CUDA.
 *
 * Built on first use by aorta/device/native/build.py, without headers of ROCm; written from roctracer's documentation
 * and NOT RUN ON A DEVICE: its tests play records through a stand-in.
 *
 * roctracer gives each call of the runtime that is traced a number and its records the same; it is traced for the
 * calls that launch work, by a callback that notes the number. So it is known what was launched and has no record
 * yet, which CUPTI tells by its buffers: `buffer` of a record is the number of its launch, and all launches before
 * `settled` have their records. A launch that never gets one (in a graph's capture, of no bytes) is given up when a
 * mark launched later passed a while ago.
 *
 * A mark is a 32-bit set of a word of pinned host memory, as on CUDA; its record, that of a fill kernel, is known by
 * its launch's number.
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

/* -- ROCm's side ------------------------------------------------------------------------------------------------- */

enum { DOMAIN_HIP_OPS = 2, DOMAIN_HIP_API = 3 };
enum { OP_DISPATCH = 0, OP_COPY = 1, OP_BARRIER = 2 };
enum { PHASE_ENTER = 0 };

typedef struct { /* activity_record_t */
  uint32_t domain, kind, op;
  uint64_t correlation, begin_ns, end_ns;
  int device;
  uint64_t queue;
  const char *kernel_name; /* of a copy: its bytes */
} Activity;

typedef struct { /* what hip_api_data_t begins with */
  uint64_t correlation;
  uint32_t phase;
} ApiData;

typedef struct { /* roctracer_properties_t */
  uint32_t mode;
  size_t buffer_size;
  void *allocate, *allocate_argument;
  void (*completed)(const char *begin, const char *end, void *argument);
  void *completed_argument;
} Properties;

_Static_assert(offsetof(Activity, correlation) == 16, "layout of activity_record_t");
_Static_assert(offsetof(Activity, device) == 40, "layout of activity_record_t");
_Static_assert(offsetof(Activity, kernel_name) == 56, "layout of activity_record_t");
_Static_assert(offsetof(Properties, completed) == 32, "layout of roctracer_properties_t");

typedef void (*ApiCallback)(uint32_t domain, uint32_t op, const void *data, void *argument);

static struct {
  uint32_t (*version)(void);
  int (*open_pool)(const Properties *, void **);
  int (*enable_activity)(uint32_t, uint32_t, void *);
  int (*disable_activity)(uint32_t, uint32_t);
  int (*enable_callback)(uint32_t, uint32_t, ApiCallback, void *);
  int (*disable_callback)(uint32_t, uint32_t);
  int (*op_code)(uint32_t, const char *, uint32_t *, uint32_t *);
  int (*flush)(void *);
  int (*timestamp)(uint64_t *);
  int (*next_record)(const Activity *, const Activity **);
} tracer;

static struct {
  int (*alloc_host)(void **, size_t, unsigned);
  int (*set_word)(void *, int, size_t, void *);
} runtime;

/* Calls that launch work. Those that this ROCm does not have are left out. */
static const char *const LAUNCHES[] = {
    "hipLaunchKernel", "hipExtLaunchKernel", "hipModuleLaunchKernel", "hipExtModuleLaunchKernel",
    "hipHccModuleLaunchKernel", "hipLaunchCooperativeKernel", "hipModuleLaunchCooperativeKernel",
    "hipLaunchKernelExC", "hipDrvLaunchKernelEx", "hipGraphLaunch", "hipMemcpyAsync", "hipMemcpyWithStream",
    "hipMemcpy", "hipMemcpyDtoDAsync", "hipMemcpyHtoDAsync", "hipMemcpyDtoHAsync", "hipMemcpyPeerAsync",
    "hipMemcpy2DAsync", "hipMemsetAsync", "hipMemsetD8Async", "hipMemsetD16Async", "hipMemsetD32Async",
    "hipMemset2DAsync"};
#define NUM_LAUNCHES ((int)(sizeof(LAUNCHES) / sizeof(*LAUNCHES)))

/* -- what Python reads: as in kernel_records.c --------------------------------------------------------------------- */

enum { IS_KERNEL = 0, IS_COPY = 1, IS_SET = 2, IS_MARK = 3 };

typedef struct {
  int64_t start, end;   /* monotonic ns */
  uint32_t correlation; /* of the call that launched it: counts up with every launch */
  uint32_t stream;
  uint32_t name; /* index into the names; of a mark its number */
  uint32_t buffer;
  uint16_t device;
  uint8_t what;
  uint8_t in_graph;
  uint32_t unused;
} Record;

typedef struct {
  uint64_t num_taken, num_lost;
  int64_t lost_start, lost_end;
  uint64_t num_dropped;
  uint32_t settled, num_names;
  uint64_t num_no_time;
} Taken;

/* -- state --------------------------------------------------------------------------------------------------------- */

#define MOST_NAMES 65536
#define NAME_SLOTS (2 * MOST_NAMES)
#define MOST_PENDING (1u << 17)
#define MARK_BITS 0x0FFFFFFFu
#define MARK_VALUES 0xA0000000u
#define GIVEN_UP_NS 1000000000 /* after a later mark's passing */

static pthread_mutex_t ring_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t launch_lock = PTHREAD_MUTEX_INITIALIZER; /* taken in launches: held for a few words only */
static Record *ring;
static uint64_t capacity, head, tail;
static Taken totals;
static const char **names;
static uint32_t num_names;
static uint32_t *name_slots; /* index + 1 of a name, by the hash of its text */

static struct {
  uint64_t correlation; /* 0: its record has come */
  uint32_t mark;        /* its number; 0: it is none */
  uint32_t is_graph;
} launches[MOST_PENDING];  /* by number */
static uint64_t first_pending = 1, next_launch = 1;
static uint64_t passed_launch, old_launch; /* of a mark whose record came at passed_ns, and of one long ago */
static int64_t passed_ns;
static __thread uint32_t marking; /* the mark that this thread is about to launch */

static void *pool;
static uint32_t launch_ops[NUM_LAUNCHES], graph_op = ~0u;
static int num_launch_ops;
static size_t pool_bytes;
static int64_t clock_offset; /* monotonic less the tracer's */
static volatile uint32_t *progress;
static char error_text[256];

static int64_t monotonic_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* -- launches ------------------------------------------------------------------------------------------------------ */

static void launched(uint32_t domain, uint32_t op, const void *data, void *argument) {
  const ApiData *call = data;
  (void)domain, (void)argument;
  if (call->phase != PHASE_ENTER || !call->correlation) return;
  pthread_mutex_lock(&launch_lock);
  uint64_t place = call->correlation % MOST_PENDING;
  launches[place].correlation = call->correlation;
  launches[place].mark = marking;
  launches[place].is_graph = op == graph_op;
  if (call->correlation >= next_launch) next_launch = call->correlation + 1;
  pthread_mutex_unlock(&launch_lock);
}

/* The first launch that has no record yet; all before it have. With the launch lock. */
static uint64_t first_without_record(void) {
  if (first_pending + MOST_PENDING < next_launch) first_pending = next_launch - MOST_PENDING;
  if (passed_launch && monotonic_ns() - passed_ns > GIVEN_UP_NS) old_launch = passed_launch, passed_launch = 0;
  while (first_pending < next_launch && (launches[first_pending % MOST_PENDING].correlation != first_pending ||
                                         first_pending < old_launch))
    first_pending++;
  return first_pending;
}

/* -- records ------------------------------------------------------------------------------------------------------- */

static uint32_t index_of_name(const char *text) {
  if (!text) return 0;
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

static void keep(const Record *record) {
  if (record->end < record->start || record->start == clock_offset) {
    totals.num_no_time++;
  } else if (head - tail == capacity) {
    if (!totals.num_lost++ || record->start < totals.lost_start) totals.lost_start = record->start;
    if (record->end > totals.lost_end) totals.lost_end = record->end;
  } else {
    ring[head++ % capacity] = *record;
  }
}

static void add(const Activity *activity) {
  if (activity->domain != DOMAIN_HIP_OPS || (activity->op != OP_DISPATCH && activity->op != OP_COPY)) return;
  Record record = {.start = (int64_t)activity->begin_ns + clock_offset, .end = (int64_t)activity->end_ns + clock_offset};
  record.correlation = record.buffer = (uint32_t)activity->correlation;
  record.stream = (uint32_t)activity->queue, record.device = (uint16_t)activity->device;
  record.what = activity->op == OP_COPY ? IS_COPY : IS_KERNEL;
  uint32_t mark = 0;
  pthread_mutex_lock(&launch_lock);
  uint64_t place = activity->correlation % MOST_PENDING;
  if (launches[place].correlation == activity->correlation) {
    record.in_graph = (uint8_t)launches[place].is_graph;
    mark = launches[place].mark;
    if (mark && !passed_launch) passed_launch = activity->correlation, passed_ns = monotonic_ns();
    if (!record.in_graph) launches[place].correlation = 0; /* a graph has many records: it is given up */
  }
  pthread_mutex_unlock(&launch_lock);
  if (mark) record.what = IS_MARK, record.name = mark;
  else if (record.what == IS_KERNEL) record.name = index_of_name(activity->kernel_name);
  keep(&record);
}

static void completed(const char *begin, const char *end, void *argument) {
  const Activity *activity = (const Activity *)begin;
  (void)argument;
  pthread_mutex_lock(&ring_lock);
  while ((const char *)activity < end) {
    add(activity);
    if (tracer.next_record(activity, &activity)) break;
  }
  pthread_mutex_unlock(&ring_lock);
}

/* -- calls from Python ----------------------------------------------------------------------------------------------- */

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

/* Loads roctracer and HIP's runtime; 0, or 1 and a text in aorta_kernels_error. */
EXPORT int aorta_kernels_open(const char *tracer_path, const char *hip_path, uint64_t num_records, size_t bytes) {
  if (ring) return 0;
  void *library = dlopen(tracer_path, RTLD_LAZY | RTLD_LOCAL);
  void *hip = library ? dlopen(hip_path, RTLD_LAZY | RTLD_LOCAL) : NULL;
  if (!library || !hip) {
    snprintf(error_text, sizeof error_text, "%s", dlerror());
    return 1;
  }
  if (look_up(library, "roctracer_version_major", &tracer.version) ||
      look_up(library, "roctracer_open_pool_expl", &tracer.open_pool) ||
      look_up(library, "roctracer_enable_op_activity_expl", &tracer.enable_activity) ||
      look_up(library, "roctracer_disable_op_activity", &tracer.disable_activity) ||
      look_up(library, "roctracer_enable_op_callback", &tracer.enable_callback) ||
      look_up(library, "roctracer_disable_op_callback", &tracer.disable_callback) ||
      look_up(library, "roctracer_op_code", &tracer.op_code) ||
      look_up(library, "roctracer_flush_activity_expl", &tracer.flush) ||
      look_up(library, "roctracer_get_timestamp", &tracer.timestamp) ||
      look_up(library, "roctracer_next_record", &tracer.next_record) ||
      look_up(hip, "hipHostMalloc", &runtime.alloc_host) || look_up(hip, "hipMemsetD32Async", &runtime.set_word))
    return 1;
  for (int i = 0; i < NUM_LAUNCHES; i++) {
    uint32_t op;
    if (tracer.op_code(DOMAIN_HIP_API, LAUNCHES[i], &op, NULL)) continue;
    if (!strcmp(LAUNCHES[i], "hipGraphLaunch")) graph_op = op;
    launch_ops[num_launch_ops++] = op;
  }
  if (!num_launch_ops) return fail("roctracer knows none of the calls that launch kernels", 0);
  Record *records = calloc(num_records, sizeof *records);
  names = calloc(MOST_NAMES, sizeof *names);
  name_slots = calloc(NAME_SLOTS, sizeof *name_slots);
  if (!records || !names || !name_slots) return fail("no memory for the ring", 0);
  index_of_name("");
  capacity = num_records, pool_bytes = bytes;
  ring = records;
  return 0;
}

EXPORT uint32_t aorta_kernels_version(void) { return tracer.version(); }

/* Pinned memory for marks, which the current device can write. */
EXPORT int aorta_kernels_prepare_marks(void) {
  void *word = NULL;
  if (progress) return 0;
  int code = runtime.alloc_host(&word, 64, 0);
  if (code) return fail("hipHostMalloc", code);
  progress = word;
  *progress = 0;
  return 0;
}

static int find_clock_offset(void) {
  int64_t narrowest = INT64_MAX;
  for (int i = 0; i < 9; i++) {
    uint64_t traced;
    int64_t before = monotonic_ns();
    int code = tracer.timestamp(&traced);
    int64_t after = monotonic_ns();
    if (code) return fail("roctracer_get_timestamp", code);
    if (after - before < narrowest) narrowest = after - before, clock_offset = before + narrowest / 2 - (int64_t)traced;
  }
  return 0;
}

/* Opens our pool of buffers, once: another client of the tracer has one of its own. */
EXPORT int aorta_kernels_claim(void) {
  int code;
  Properties properties = {.buffer_size = pool_bytes, .completed = completed};
  if (!pool && (code = tracer.open_pool(&properties, &pool))) return fail("roctracer_open_pool_expl", code);
  return 0;
}

/* Work launched from now on is recorded. */
EXPORT int aorta_kernels_start(void) {
  int code;
  if (find_clock_offset()) return 1;
  for (int i = 0; i < num_launch_ops; i++)
    if ((code = tracer.enable_callback(DOMAIN_HIP_API, launch_ops[i], launched, NULL)))
      return fail("roctracer_enable_op_callback", code);
  for (uint32_t op = OP_DISPATCH; op <= OP_COPY; op++)
    if ((code = tracer.enable_activity(DOMAIN_HIP_OPS, op, pool)))
      return fail("roctracer_enable_op_activity_expl", code);
  return 0;
}

/* Work launched from now on is not recorded. */
EXPORT void aorta_kernels_stop(void) {
  for (int i = 0; i < num_launch_ops; i++) tracer.disable_callback(DOMAIN_HIP_API, launch_ops[i]);
  for (uint32_t op = OP_DISPATCH; op <= OP_COPY; op++) tracer.disable_activity(DOMAIN_HIP_OPS, op);
}

/* Asks for the records that there are; forced: and waits for no more of what was launched before. */
EXPORT int aorta_kernels_flush(int forced) {
  int code = pool ? tracer.flush(pool) : 0;
  if (forced) {
    pthread_mutex_lock(&launch_lock);
    first_pending = next_launch;
    pthread_mutex_unlock(&launch_lock);
  }
  return code;
}

/* Copies up to `most` records out of the ring, oldest first. */
EXPORT void aorta_kernels_take(Record *out, uint64_t most, Taken *taken) {
  pthread_mutex_lock(&launch_lock);
  uint64_t settled = first_without_record(); /* asked first: what is settled by then is in the ring, or was taken */
  pthread_mutex_unlock(&launch_lock);
  pthread_mutex_lock(&ring_lock);
  uint64_t n = head - tail < most ? head - tail : most;
  uint64_t at = tail % capacity, first = n < capacity - at ? n : capacity - at;
  memcpy(out, ring + at, first * sizeof *out);
  memcpy(out + first, ring, (n - first) * sizeof *out);
  tail += n;
  *taken = totals;
  taken->num_taken = n;
  taken->num_names = num_names;
  taken->settled = head == tail ? (uint32_t)settled : 0; /* not all that has come was taken */
  if (head == tail) head = tail = 0; /* the same pages again: a run that keeps up never touches the whole ring */
  pthread_mutex_unlock(&ring_lock);
}

/* A name as C++ spells it, where the C++ library of the process can demangle it. */
EXPORT const char *aorta_kernels_name(uint32_t index) {
  static char *(*demangle)(const char *, char *, size_t *, int *);
  static int looked;
  static char *last; /* until the next call */
  int status = 1;
  if (index >= num_names) return "";
  if (!looked++) {
    *(void **)&demangle = dlsym(RTLD_DEFAULT, "__cxa_demangle");
    void *library = demangle ? NULL : dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_LOCAL);
    if (library) *(void **)&demangle = dlsym(library, "__cxa_demangle");
  }
  free(last);
  last = demangle && names[index][0] == '_' ? demangle(names[index], NULL, NULL, &status) : NULL;
  return last && !status ? last : names[index];
}

/* Puts mark `number` (below 2^28) on a stream; 0 or an error of the runtime. */
EXPORT int aorta_kernels_mark(void *stream, uint32_t number) {
  marking = number;
  int code = runtime.set_word((void *)progress, (int)(MARK_VALUES | number), 1, stream);
  marking = 0;
  return code;
}

/* The number of the last mark that the device has passed; 0 before the first. */
EXPORT uint32_t aorta_kernels_passed(void) { return progress ? *progress & MARK_BITS : 0; }

/* Launches that have no record yet. */
EXPORT int aorta_kernels_num_lent(void) {
  pthread_mutex_lock(&launch_lock);
  int pending = first_without_record() < next_launch;
  pthread_mutex_unlock(&launch_lock);
  return pending;
}

EXPORT size_t aorta_kernels_record_bytes(void) { return sizeof(Record); }
EXPORT size_t aorta_kernels_taken_bytes(void) { return sizeof(Taken); }
EXPORT uint64_t aorta_kernels_now(void) { return (uint64_t)monotonic_ns(); }
