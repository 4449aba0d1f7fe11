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
#include "kernel_ring.h"

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

/* CUpti_ActivityMemcpy5/6 and CUpti_ActivityMemset4 agree in these; the second word is the set's value, or the
 * copy's kind, the kinds of memory that it is from and to, and flags, a byte each. Of a copy between devices
 * (CUpti_ActivityMemcpyPtoP4) only the fields up to `stream` are read. */
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

/* -- state ------------------------------------------------------------------------------------------------------ */

#define MOST_BUFFERS 4096
#define MOST_SPARE 64

static pthread_mutex_t buffers_lock = PTHREAD_MUTEX_INITIALIZER; /* taken in launches: held for a few words only */
static size_t buffer_bytes;
static uint8_t *spare[MOST_SPARE];
static int num_spare;
static struct { uint8_t *data; uint32_t number; } lent[MOST_BUFFERS];
static int num_lent;
static uint32_t next_buffer;

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
        if (kind == KIND_MEMCPY) record.name = copy->value & COPY_BITS;
        if (kind == KIND_MEMSET && copy->bytes == 4 && (copy->value & 0xF0000000u) == MARK_VALUES)
          record.what = IS_MARK, record.name = copy->value & MARK_BITS;
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

/* Loads CUPTI and the driver; 0, or 1 and a text in aorta_kernels_error. */
EXPORT int aorta_kernels_open(const char *cupti_path, const char *driver_path, uint64_t num_records, size_t bytes) {
  if (ring) return 0;
  void *library = open_library(cupti_path);
  void *cuda = library ? open_library(driver_path) : NULL;
  if (!cuda) return 1;
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
  buffer_bytes = bytes;
  return open_ring(num_records);
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
  take_from_ring(out, most, taken, settled()); /* what is settled now is in the ring, or was taken */
}

/* Puts mark `number` (below 2^28) on a stream; 0 or an error of the driver. */
EXPORT int aorta_kernels_mark(void *stream, uint32_t number) {
  return driver.set_word((uint64_t)(uintptr_t)progress, MARK_VALUES | number, 1, stream);
}

EXPORT int aorta_kernels_num_lent(void) { return num_lent; }
