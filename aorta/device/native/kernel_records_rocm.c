/* Kernel records of ROCm, through rocprofiler-sdk: the same functions as kernel_records.c has for CUDA.
 *
 * Built on first use by aorta/device/native/build.py, without headers of ROCm: the few declarations below are ours,
 * from the documentation of versions 0.4 (ROCm 6.2) to 1.x (ROCm 7). NOT RUN ON A DEVICE: its tests play captures
 * through a stand-in.
 *
 * rocprofiler-sdk takes tools only until HIP initialises. So this library is a tool by itself, found by the
 * environment (ROCP_TOOL_LIBRARIES, as `aorta run --kernels on` sets it), or registers when it is opened; where that
 * is too late, the library says so and events serve.
 *
 * Every traced call has a number, and what it launches has it too. Calls that launch work are traced by a callback
 * that notes the number, so it is known what was launched and has no record yet, which CUPTI tells by its buffers:
 * `buffer` of a record is the number of its launch, and all launches before `settled` have their records. A launch
 * that never gets one (in a graph's capture, of no bytes) is given up when a mark launched later passed a while ago.
 *
 * Of a launch are noted its stream, where the library tells (1.x; else the hardware queue stands for it), and the
 * collective of RCCL that issued it: RCCL gives the kernels of all operations one name.
 */
#include "kernel_ring.h"

#include <link.h>

/* -- rocprofiler-sdk's side -------------------------------------------------------------------------------------- */

enum { CATEGORY_TRACING = 1, PHASE_NONE = 0, PHASE_ENTER = 1, PHASE_EXIT = 2 };
enum { POLICY_DISCARD = 1, KERNEL_SYMBOL_REGISTER = 2, CONFIGURATION_LOCKED = 16 };
#define MOST_KINDS 64
#define MOST_OPERATIONS 1024

typedef struct { uint64_t handle; } Id;

typedef struct {
  uint32_t category, kind;
  void *payload;
} Header;

typedef struct { /* what records of dispatches and of copies begin with */
  uint64_t size;
  uint32_t kind, operation;
  uint64_t correlation, external, thread;
  uint64_t start, end;
} Activity;

typedef struct {
  Activity activity;
  uint64_t info_size;
  Id agent, queue;
  uint64_t kernel, dispatch;
} Dispatch;

typedef struct {
  Activity activity;
  Id destination, source;
  uint64_t bytes;
} Copy;

typedef struct { /* rocprofiler_callback_tracing_record_t: in 1.x its correlation has a third word */
  uint64_t context, thread, correlation, external;
  uint64_t rest[4]; /* [ancestor,] kind and operation, phase, payload */
} CallRecord;

typedef struct {
  uint64_t size, kernel, code_object;
  const char *name;
} KernelSymbol;

typedef struct {
  uint64_t size;
  Id stream;
} StreamChange;

typedef struct {
  const char *name;
  uint32_t handle;
} Client;

typedef struct {
  size_t size;
  int (*initialize)(void (*finalize)(Client), void *);
  void (*finalize)(void *);
  void *data;
} Tool;

_Static_assert(offsetof(Activity, start) == 40, "layout of rocprofiler_buffer_tracing_kernel_dispatch_record_t");
_Static_assert(offsetof(Dispatch, agent) == 64, "layout of rocprofiler_kernel_dispatch_info_t");
_Static_assert(offsetof(Dispatch, kernel) == 80, "layout of rocprofiler_kernel_dispatch_info_t");
_Static_assert(offsetof(Copy, bytes) == 72, "layout of rocprofiler_buffer_tracing_memory_copy_record_t");

typedef void (*CallCallback)(CallRecord, uint64_t *user, void *argument);
typedef void (*BufferCallback)(Id context, Id buffer, Header **, size_t num, void *argument, uint64_t num_dropped);

static struct {
  int (*configure)(Tool *(*)(uint32_t, const char *, uint32_t, Client *));
  int (*get_version)(uint32_t *, uint32_t *, uint32_t *);
  int (*timestamp)(uint64_t *);
  int (*create_context)(Id *);
  int (*start_context)(Id);
  int (*stop_context)(Id);
  int (*create_buffer)(Id context, size_t, size_t watermark, int policy, BufferCallback, void *, Id *);
  int (*flush_buffer)(Id);
  int (*trace_calls)(Id context, uint32_t kind, const int32_t *, size_t, CallCallback, void *);
  int (*trace_work)(Id context, uint32_t kind, const int32_t *, size_t, Id buffer);
  int (*call_kind_name)(uint32_t kind, const char **, uint64_t *);
  int (*work_kind_name)(uint32_t kind, const char **, uint64_t *);
  int (*operation_name)(uint32_t kind, int32_t operation, const char **, uint64_t *);
} sdk;

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

/* -- state --------------------------------------------------------------------------------------------------------- */

#define BUFFER_BYTES (1u << 22)
#define MOST_PENDING (1u << 17)
#define MOST_KERNELS (1u << 22)
#define MOST_AGENTS 64
#define DEEPEST 16
#define QUEUE_STREAMS 0x80000000u /* a hardware queue stands for the stream, which is not known */
#define GIVEN_UP_NS 1000000000    /* after a later mark's passing */

static pthread_mutex_t launch_lock = PTHREAD_MUTEX_INITIALIZER; /* taken in launches: held for a few words only */
static pthread_mutex_t kernels_lock = PTHREAD_MUTEX_INITIALIZER;

static uint32_t dispatch_kind, copy_kind; /* in this version */
static Id always, tracing, work_buffer; /* contexts: names of kernels; calls and work */
static int is_configured, is_finalized;

static struct {
  uint64_t correlation;   /* 0: its record has come */
  const char *collective; /* of RCCL, that issued it */
  uint32_t mark;          /* its number; 0: it is none */
  uint32_t stream;        /* + 1; 0: not known */
  uint32_t is_graph;
} launches[MOST_PENDING]; /* by number */
static uint64_t first_pending = 1, next_launch = 1;
static uint64_t passed_launch, old_launch; /* of a mark whose record came at passed_ns, and of one long ago */
static int64_t passed_ns;
static uint32_t graph_operation = ~0u, set_operation = 3;

static __thread struct {
  uint32_t mark;             /* that is about to be launched */
  uint64_t launch;           /* the innermost call that launches */
  uint32_t streams[DEEPEST]; /* + 1, of the calls around */
  int num_streams;
  int num_groups; /* ncclGroupStart without its end */
  const char *collective;
} thread;

static const char *several = "several collectives"; /* in one group: whose kernel it is, is not known */
static const char *rccl_names[MOST_OPERATIONS];

static const char **kernel_names; /* by the library's number; they outlive their code objects */
static uint64_t most_kernels;
static uint64_t agents[MOST_AGENTS]; /* of GPUs, in the order in which they ran something */
static int num_agents;
static int64_t clock_offset; /* monotonic less the tracer's */

/* -- calls ----------------------------------------------------------------------------------------------------------- */

typedef struct {
  uint32_t operation, phase;
  const void *payload;
} Call;

/* The fields behind the correlation, wherever this version has them; 0 where the record is of no known layout. A
 * kind of ours is above every phase, so one layout is never taken for the other. */
static int read_call(const CallRecord *record, uint32_t kind, Call *call) {
  for (int shift = 0; shift < 2; shift++) {
    const uint64_t *rest = record->rest + shift;
    if ((uint32_t)rest[0] != kind || (uint32_t)rest[1] > PHASE_EXIT) continue;
    call->operation = (uint32_t)(rest[0] >> 32), call->phase = (uint32_t)rest[1];
    call->payload = (const void *)(uintptr_t)rest[2];
    return 1;
  }
  return 0;
}

static uint32_t kind_of(void *argument) { return (uint32_t)(uintptr_t)argument; }

static void launched(CallRecord record, uint64_t *user, void *argument) {
  Call call;
  (void)user;
  if (!read_call(&record, kind_of(argument), &call) || !record.correlation) return;
  if (call.phase != PHASE_ENTER) {
    if (thread.launch == record.correlation) thread.launch = 0;
    return;
  }
  thread.launch = record.correlation;
  pthread_mutex_lock(&launch_lock);
  uint64_t place = record.correlation % MOST_PENDING;
  launches[place].correlation = record.correlation;
  launches[place].mark = thread.mark;
  launches[place].collective = thread.collective;
  launches[place].stream = thread.num_streams ? thread.streams[(thread.num_streams - 1) % DEEPEST] : 0;
  launches[place].is_graph = call.operation == graph_operation;
  if (record.correlation >= next_launch) next_launch = record.correlation + 1;
  pthread_mutex_unlock(&launch_lock);
}

/* The library tells the stream around a call that launches, or within it. */
static void on_stream(CallRecord record, uint64_t *user, void *argument) {
  Call call;
  (void)user;
  if (!read_call(&record, kind_of(argument), &call) || call.operation != set_operation) return;
  if (call.phase == PHASE_EXIT) {
    if (thread.num_streams) thread.num_streams--;
  } else if (call.phase == PHASE_ENTER && call.payload) {
    uint32_t stream = (uint32_t)((const StreamChange *)call.payload)->stream.handle + 1;
    thread.streams[thread.num_streams++ % DEEPEST] = stream;
    if (!thread.launch) return;
    pthread_mutex_lock(&launch_lock);
    uint64_t place = thread.launch % MOST_PENDING;
    if (launches[place].correlation == thread.launch) launches[place].stream = stream;
    pthread_mutex_unlock(&launch_lock);
  }
}

static void in_rccl(CallRecord record, uint64_t *user, void *argument) {
  Call call;
  (void)user;
  if (!read_call(&record, kind_of(argument), &call) || call.operation >= MOST_OPERATIONS) return;
  const char *name = rccl_names[call.operation];
  if (!name) return;
  if (!strcmp(name, "ncclGroupStart")) {
    if (call.phase == PHASE_ENTER) thread.num_groups++;
  } else if (!strcmp(name, "ncclGroupEnd")) { /* launches what its group holds */
    if (call.phase == PHASE_EXIT && thread.num_groups && !--thread.num_groups) thread.collective = NULL;
  } else if (call.phase == PHASE_ENTER) {
    thread.collective = !thread.num_groups || !thread.collective || !strcmp(thread.collective, name) ? name : several;
  } else if (!thread.num_groups) {
    thread.collective = NULL;
  }
}

static void kernel_loaded(CallRecord record, uint64_t *user, void *argument) {
  Call call;
  (void)user;
  if (!read_call(&record, kind_of(argument), &call) || call.operation != KERNEL_SYMBOL_REGISTER) return;
  const KernelSymbol *symbol = call.payload;
  if (call.phase != PHASE_ENTER || !symbol || !symbol->name || symbol->kernel >= MOST_KERNELS) return;
  size_t length = strlen(symbol->name);
  if (length > 3 && !strcmp(symbol->name + length - 3, ".kd")) length -= 3; /* the descriptor's suffix */
  pthread_mutex_lock(&kernels_lock);
  if (symbol->kernel >= most_kernels) {
    uint64_t most = symbol->kernel + 4096;
    const char **grown = realloc(kernel_names, most * sizeof *grown);
    if (grown) {
      memset(grown + most_kernels, 0, (most - most_kernels) * sizeof *grown);
      kernel_names = grown, most_kernels = most;
    }
  }
  if (symbol->kernel < most_kernels && !kernel_names[symbol->kernel])
    kernel_names[symbol->kernel] = strndup(symbol->name, length);
  pthread_mutex_unlock(&kernels_lock);
}

/* The first launch that has no record yet; all before it have. With the launch lock. */
static uint64_t first_without_record(void) {
  if (first_pending + MOST_PENDING < next_launch) first_pending = next_launch - MOST_PENDING;
  if (passed_launch && (int64_t)monotonic_ns() - passed_ns > GIVEN_UP_NS) old_launch = passed_launch, passed_launch = 0;
  while (first_pending < next_launch && (launches[first_pending % MOST_PENDING].correlation != first_pending ||
                                         first_pending < old_launch))
    first_pending++;
  return first_pending;
}

/* -- records ------------------------------------------------------------------------------------------------------- */

/* The number of a GPU; `ran`: it has just run something, so it is one. -1 of an agent that is not known. */
static int number_of_agent(uint64_t handle, int ran) {
  for (int i = 0; i < num_agents; i++)
    if (agents[i] == handle) return i;
  if (!ran || num_agents == MOST_AGENTS) return -1;
  agents[num_agents] = handle;
  return num_agents++;
}

static uint32_t index_of_kernel(uint64_t kernel, const char *collective) {
  char text[4096];
  pthread_mutex_lock(&kernels_lock);
  const char *name = kernel < most_kernels ? kernel_names[kernel] : NULL; /* is never freed */
  pthread_mutex_unlock(&kernels_lock);
  if (!name || !collective || collective == several || !strstr(name, "nccl")) return index_of_name(name);
  /* One name for all operations: the call that launched it says which. */
  const char *operation = !strcmp(collective, "ncclSend") || !strcmp(collective, "ncclRecv") ? "ncclSendRecv" : collective;
  snprintf(text, sizeof text, "%s for %s", name, operation);
  return index_by_text(text);
}

static void add(const Header *header) {
  const Activity *activity = header->payload;
  const char *collective = NULL;
  uint32_t mark = 0, stream = 0;
  if (header->category != CATEGORY_TRACING || (header->kind != dispatch_kind && header->kind != copy_kind)) return;
  Record record = {.correlation = (uint32_t)activity->correlation, .buffer = (uint32_t)activity->correlation};
  if (activity->start) /* else it has no times */
    record.start = (int64_t)activity->start + clock_offset, record.end = (int64_t)activity->end + clock_offset;
  pthread_mutex_lock(&launch_lock);
  uint64_t place = activity->correlation % MOST_PENDING;
  if (launches[place].correlation == activity->correlation) {
    record.in_graph = (uint8_t)launches[place].is_graph;
    mark = launches[place].mark, stream = launches[place].stream, collective = launches[place].collective;
    if (mark && !passed_launch) passed_launch = activity->correlation, passed_ns = (int64_t)monotonic_ns();
    if (!record.in_graph) launches[place].correlation = 0; /* a graph has many records: it is given up */
  }
  pthread_mutex_unlock(&launch_lock);
  int device;
  if (header->kind == dispatch_kind) {
    const Dispatch *dispatch = (const Dispatch *)activity;
    device = number_of_agent(dispatch->agent.handle, 1);
    record.what = IS_KERNEL;
    record.stream = stream ? stream - 1 : QUEUE_STREAMS | (uint32_t)dispatch->queue.handle;
    if (!mark) record.name = index_of_kernel(dispatch->kernel, collective);
  } else {
    const Copy *copy = (const Copy *)activity;
    int source = number_of_agent(copy->source.handle, 0), destination = number_of_agent(copy->destination.handle, 0);
    device = destination >= 0 ? destination : source;
    record.what = source >= 0 && destination >= 0 && source != destination ? IS_PEER_COPY : IS_COPY;
    record.stream = stream ? stream - 1 : QUEUE_STREAMS;
  }
  record.device = (uint16_t)(device < 0 ? 0 : device);
  if (mark) record.what = IS_MARK, record.name = mark;
  keep(&record);
}

static void completed(Id context, Id buffer, Header **headers, size_t num, void *argument, uint64_t num_dropped) {
  (void)context, (void)buffer, (void)argument;
  pthread_mutex_lock(&ring_lock);
  for (size_t i = 0; ring && i < num; i++) add(headers[i]);
  if (num_dropped > totals.num_dropped) totals.num_dropped = num_dropped; /* of this buffer since it was made */
  pthread_mutex_unlock(&ring_lock);
}

/* -- the tool, before HIP initialises -------------------------------------------------------------------------------- */

/* The number of a kind, which differs between versions, by its name; 0 where this version has none. */
static uint32_t kind_named(int (*query)(uint32_t, const char **, uint64_t *), const char *name) {
  for (uint32_t kind = 1; kind < MOST_KINDS; kind++) {
    const char *text = NULL;
    uint64_t length = 0;
    if (!query(kind, &text, &length) && text && !strcmp(text, name)) return kind;
  }
  return 0;
}

static const char *name_of_operation(uint32_t kind, int32_t operation) {
  const char *text = NULL;
  uint64_t length = 0;
  return sdk.operation_name(kind, operation, &text, &length) ? NULL : text;
}

static int trace_launches(void) {
  int32_t operations[NUM_LAUNCHES];
  size_t num = 0;
  uint32_t kind = kind_named(sdk.call_kind_name, "HIP_RUNTIME_API");
  for (int32_t operation = 0; kind && operation < MOST_OPERATIONS; operation++) {
    const char *name = name_of_operation(kind, operation);
    for (int i = 0; name && i < NUM_LAUNCHES; i++) {
      if (strcmp(name, LAUNCHES[i]) || num == NUM_LAUNCHES) continue;
      if (!strcmp(name, "hipGraphLaunch")) graph_operation = (uint32_t)operation;
      operations[num++] = operation;
    }
  }
  if (!num) return fail("rocprofiler-sdk knows none of the calls that launch kernels", 0);
  int code = sdk.trace_calls(tracing, kind, operations, num, launched, (void *)(uintptr_t)kind);
  return code ? fail("rocprofiler_configure_callback_tracing_service of HIP calls", code) : 0;
}

/* Streams and RCCL: without them queues stand for streams, and RCCL's kernels keep their one name. */
static void trace_streams_and_collectives(void) {
  uint32_t kind = kind_named(sdk.call_kind_name, "HIP_STREAM");
  for (int32_t operation = 0; kind && operation < 16; operation++) {
    const char *name = name_of_operation(kind, operation);
    if (name && strstr(name, "SET")) set_operation = (uint32_t)operation;
  }
  if (kind) sdk.trace_calls(tracing, kind, NULL, 0, on_stream, (void *)(uintptr_t)kind);
  kind = kind_named(sdk.call_kind_name, "RCCL_API");
  for (int32_t operation = 0; kind && operation < MOST_OPERATIONS; operation++)
    rccl_names[operation] = name_of_operation(kind, operation);
  if (kind) sdk.trace_calls(tracing, kind, NULL, 0, in_rccl, (void *)(uintptr_t)kind);
}

static int initialize(void (*finalize)(Client), void *data) {
  int code;
  (void)finalize, (void)data;
  uint32_t loads = kind_named(sdk.call_kind_name, "CODE_OBJECT");
  dispatch_kind = kind_named(sdk.work_kind_name, "KERNEL_DISPATCH");
  copy_kind = kind_named(sdk.work_kind_name, "MEMORY_COPY");
  if (!loads || !dispatch_kind || !copy_kind) return fail("rocprofiler-sdk does not record kernels and copies", 0);
  if ((code = sdk.create_context(&always)) || (code = sdk.create_context(&tracing)))
    return fail("rocprofiler_create_context", code);
  if ((code = sdk.trace_calls(always, loads, NULL, 0, kernel_loaded, (void *)(uintptr_t)loads)))
    return fail("rocprofiler_configure_callback_tracing_service of code objects", code);
  if (trace_launches()) return 1;
  /* A full buffer drops records and counts them: it must not hold up a launch. */
  code = sdk.create_buffer(tracing, BUFFER_BYTES, BUFFER_BYTES / 4, POLICY_DISCARD, completed, NULL, &work_buffer);
  if (code) return fail("rocprofiler_create_buffer", code);
  if ((code = sdk.trace_work(tracing, dispatch_kind, NULL, 0, work_buffer)) ||
      (code = sdk.trace_work(tracing, copy_kind, NULL, 0, work_buffer)))
    return fail("rocprofiler_configure_buffer_tracing_service", code);
  trace_streams_and_collectives();
  if ((code = sdk.start_context(always))) return fail("rocprofiler_start_context", code);
  is_configured = 1;
  return 0;
}

static void finalized(void *data) { (void)data, is_finalized = 1; }

static int sdk_path_of(struct dl_phdr_info *info, size_t size, void *path) {
  (void)size;
  const char *file = info->dlpi_name ? strrchr(info->dlpi_name, '/') : NULL;
  if (!file || strncmp(file + 1, "librocprofiler-sdk.so", 21)) return 0;
  snprintf(path, 4096, "%s", info->dlpi_name);
  return 1;
}

static int load_sdk(const char *path) {
  char loaded[4096] = "";
  dl_iterate_phdr(sdk_path_of, loaded); /* the copy that the runtime uses, where there is one */
  void *library = open_library(*loaded ? loaded : path);
  if (!library) return 1;
  return look_up(library, "rocprofiler_force_configure", &sdk.configure) ||
         look_up(library, "rocprofiler_get_version", &sdk.get_version) ||
         look_up(library, "rocprofiler_get_timestamp", &sdk.timestamp) ||
         look_up(library, "rocprofiler_create_context", &sdk.create_context) ||
         look_up(library, "rocprofiler_start_context", &sdk.start_context) ||
         look_up(library, "rocprofiler_stop_context", &sdk.stop_context) ||
         look_up(library, "rocprofiler_create_buffer", &sdk.create_buffer) ||
         look_up(library, "rocprofiler_flush_buffer", &sdk.flush_buffer) ||
         look_up(library, "rocprofiler_configure_callback_tracing_service", &sdk.trace_calls) ||
         look_up(library, "rocprofiler_configure_buffer_tracing_service", &sdk.trace_work) ||
         look_up(library, "rocprofiler_query_callback_tracing_kind_name", &sdk.call_kind_name) ||
         look_up(library, "rocprofiler_query_buffer_tracing_kind_name", &sdk.work_kind_name) ||
         look_up(library, "rocprofiler_query_callback_tracing_kind_operation_name", &sdk.operation_name);
}

/* Called by rocprofiler-sdk while HIP initialises, or by force_configure: once, whoever comes first. */
EXPORT Tool *rocprofiler_configure(uint32_t version, const char *text, uint32_t priority, Client *client) {
  static Tool tool = {.size = sizeof(Tool), .initialize = initialize, .finalize = finalized};
  static int was_asked;
  (void)version, (void)text, (void)priority;
  if (was_asked++ || load_sdk("librocprofiler-sdk.so")) return NULL;
  client->name = "aorta";
  return &tool;
}

/* -- calls from Python ----------------------------------------------------------------------------------------------- */

/* Registers where the environment did not, and loads HIP's runtime; 0, or 1 and a text in aorta_kernels_error. */
EXPORT int aorta_kernels_open(const char *sdk_path, const char *hip_path, uint64_t num_records, size_t bytes) {
  (void)bytes; /* the buffers were made when the tool was registered */
  if (ring) return 0;
  if (!is_configured) {
    if (load_sdk(sdk_path)) return 1;
    int code = sdk.configure(rocprofiler_configure);
    if (code == CONFIGURATION_LOCKED) return fail("HIP has initialised, and rocprofiler-sdk takes no tool after that", code);
    if (code) return fail("rocprofiler_force_configure", code);
    if (!is_configured) return *error_text ? 1 : fail("rocprofiler-sdk did not initialise the tool", 0);
  }
  void *hip = open_library(hip_path);
  if (!hip || look_up(hip, "hipHostMalloc", &runtime.alloc_host) || look_up(hip, "hipMemsetD32Async", &runtime.set_word)) return 1;
  return open_ring(num_records);
}

/* 10000 * major + 100 * minor + patch. */
EXPORT uint32_t aorta_kernels_version(void) {
  uint32_t major = 0, minor = 0, patch = 0;
  return sdk.get_version(&major, &minor, &patch) ? 0 : 10000 * major + 100 * minor + patch;
}

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
    int64_t before = (int64_t)monotonic_ns();
    int code = sdk.timestamp(&traced);
    int64_t after = (int64_t)monotonic_ns();
    if (code) return fail("rocprofiler_get_timestamp", code);
    if (after - before < narrowest) narrowest = after - before, clock_offset = before + narrowest / 2 - (int64_t)traced;
  }
  return 0;
}

/* Nothing to claim: each tool has buffers of its own. */
EXPORT int aorta_kernels_claim(void) { return 0; }

/* Work launched from now on is recorded. */
EXPORT int aorta_kernels_start(void) {
  if (is_finalized) return fail("rocprofiler-sdk has been finalized", 0);
  if (find_clock_offset()) return 1;
  int code = sdk.start_context(tracing);
  return code ? fail("rocprofiler_start_context", code) : 0;
}

/* Work launched from now on is not recorded; what was launched before still arrives. */
EXPORT void aorta_kernels_stop(void) {
  if (!is_finalized) sdk.stop_context(tracing);
}

/* Asks for the records that there are; forced: and waits for no more of what was launched before. */
EXPORT int aorta_kernels_flush(int forced) {
  int code = is_finalized ? 0 : sdk.flush_buffer(work_buffer);
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
  take_from_ring(out, most, taken, (uint32_t)settled);
}

/* Puts mark `number` (below 2^28) on a stream; 0 or an error of the runtime. */
EXPORT int aorta_kernels_mark(void *stream, uint32_t number) {
  thread.mark = number;
  int code = runtime.set_word((void *)progress, (int)(MARK_VALUES | number), 1, stream);
  thread.mark = 0;
  return code;
}

/* Launches that have no record yet. */
EXPORT int aorta_kernels_num_lent(void) {
  pthread_mutex_lock(&launch_lock);
  int pending = first_without_record() < next_launch;
  pthread_mutex_unlock(&launch_lock);
  return pending;
}
