/* A stand-in for rocprofiler-sdk, RCCL and HIP: plays calls and records that a test gives it, in the layout of
 * rocprofiler-sdk 1.x, or, after play_old, of 0.5, which knows no streams. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct { uint64_t handle; } Id;
typedef struct { uint64_t context, thread, internal, external, ancestor; uint32_t kind, op, phase, pad; void *payload; } Call;
typedef struct { uint64_t context, thread, internal, external; uint32_t kind, op, phase, pad; void *payload; } OldCall;
typedef void (*Callback)(Call, uint64_t *, void *);
typedef void (*OldCallback)(OldCall, uint64_t *, void *);
typedef struct { uint32_t category, kind; void *payload; } Header;
typedef void (*Completed)(Id, Id, Header **, size_t, void *, uint64_t);
typedef struct { const char *name; uint32_t handle; } Client;
typedef struct { size_t size; int (*initialize)(void *, void *); void (*finalize)(void *); void *data; } Tool;
typedef Tool *(*Configure)(uint32_t, const char *, uint32_t, Client *);

enum { HIP = 5, LOADS = 10, RCCL = 14, STREAM = 20, COPIES = 10, KERNELS = 11 };
static const char *const HIP_CALLS[] = {"hipFree", "hipLaunchKernel", "hipMemcpyAsync", "hipMemsetD32Async", "hipGraphLaunch"};
static const char *const RCCL_CALLS[] = {"ncclAllGather", "ncclAllReduce", "ncclGroupStart", "ncclGroupEnd", "ncclSend", "ncclRecv"};
static const char *const STREAM_CALLS[] = {"HIP_STREAM_NONE", "HIP_STREAM_CREATE", "HIP_STREAM_DESTROY", "HIP_STREAM_SET"};

static Callback callbacks[64];
static void *arguments[64];
static uint64_t context_of[64], num_contexts;
static int active[8], traced[64], is_old, is_locked, refuses, within;
static uint32_t shift; /* of all kinds: versions number them differently */
static uint64_t last_correlation, num_dropped;
static int64_t ahead_ns;
static Completed completed;

int rocprofiler_get_version(uint32_t *a, uint32_t *b, uint32_t *c) { *a = is_old ? 0 : 1, *b = is_old ? 5 : 0, *c = 0; return 0; }
int rocprofiler_get_timestamp(uint64_t *ns) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  *ns = (uint64_t)((int64_t)now.tv_sec * 1000000000 + now.tv_nsec + ahead_ns);
  return 0;
}
static int configure(Configure tool_of) {
  Client client = {0};
  if (is_locked) return 16;
  Tool *tool = tool_of(10000, "1.0", 0, &client);
  if (tool && tool->initialize(NULL, tool->data)) return 0; /* the library goes on without it */
  is_locked = 1;
  return 0;
}
int rocprofiler_force_configure(Configure tool_of) { return configure(tool_of); }
int rocprofiler_create_context(Id *id) { id->handle = num_contexts++; return is_locked ? 16 : refuses; }
int rocprofiler_start_context(Id id) { active[id.handle] = 1; return 0; }
int rocprofiler_stop_context(Id id) { active[id.handle] = 0; return 0; }
int rocprofiler_create_buffer(Id context, size_t size, size_t mark, int policy, Completed f, void *data, Id *id) {
  (void)context, (void)data;
  id->handle = 7, completed = f;
  return policy == 1 && mark < size ? 0 : -1;
}
int rocprofiler_flush_buffer(Id id) { return id.handle == 7 ? 0 : -1; }
int rocprofiler_configure_callback_tracing_service(Id context, uint32_t kind, const int32_t *ops, size_t num, Callback f, void *a) {
  kind -= shift, callbacks[kind] = f, arguments[kind] = a, context_of[kind] = context.handle;
  for (size_t i = 0; i < num; i++) traced[ops[i]] = 1;
  return is_locked ? 16 : 0;
}
int rocprofiler_configure_buffer_tracing_service(Id context, uint32_t kind, const int32_t *ops, size_t num, Id buffer) {
  (void)context, (void)kind, (void)ops, (void)num;
  return buffer.handle == 7 ? 0 : -1;
}
static int named(const char *name, const char **out, uint64_t *length) { return name ? (*out = name, *length = strlen(name), 0) : 4; }
int rocprofiler_query_callback_tracing_kind_name(uint32_t kind, const char **name, uint64_t *length) {
  kind -= shift;
  return named(kind == HIP ? "HIP_RUNTIME_API" : kind == LOADS ? "CODE_OBJECT" : kind == RCCL ? "RCCL_API" :
               kind == STREAM && !is_old ? "HIP_STREAM" : NULL, name, length);
}
int rocprofiler_query_buffer_tracing_kind_name(uint32_t kind, const char **name, uint64_t *length) {
  kind -= shift;
  return named(kind == COPIES ? "MEMORY_COPY" : kind == KERNELS ? "KERNEL_DISPATCH" : NULL, name, length);
}
int rocprofiler_query_callback_tracing_kind_operation_name(uint32_t kind, int32_t op, const char **name, uint64_t *length) {
  kind -= shift;
  return named(kind == HIP && op < 5 ? HIP_CALLS[op] : kind == RCCL && op < 6 ? RCCL_CALLS[op] :
               kind == STREAM && op < 4 ? STREAM_CALLS[op] : NULL, name, length);
}

static void call(uint32_t kind, uint32_t op, uint32_t phase, uint64_t correlation, void *payload) {
  uint64_t user = 0;
  if (!callbacks[kind] || !active[context_of[kind]]) return;
  if (is_old) {
    OldCall record = {0, 1, correlation, 0, kind + shift, op, phase, 0, payload};
    ((OldCallback)(void *)callbacks[kind])(record, &user, arguments[kind]);
  } else {
    Call record = {0, 1, correlation, 0, kind + shift, kind + shift, op, phase, 0, payload}; /* its ancestor misleads */
    callbacks[kind](record, &user, arguments[kind]);
  }
}

void play_old(void) { is_old = 1; }
void play_shift(uint32_t by) { shift = by; }
void play_locked(void) { is_locked = 1; }
void play_refusal(int code) { refuses = code; }
void play_within(void) { within = 1; }
void play_ahead(int64_t ns) { ahead_ns = ns; }
void play_dropped(uint64_t num) { num_dropped = num; }
uint64_t play_last(void) { return last_correlation; }
int play_num_active(void) { return active[0] + 2 * active[1]; }

/* HIP initialises: tools of the environment register, and no more after that. */
void play_initialisation(void) {
  const char *path = getenv("ROCP_TOOL_LIBRARIES");
  void *library = path ? dlopen(path, RTLD_LAZY | RTLD_LOCAL) : NULL;
  Configure tool_of;
  *(void **)&tool_of = library ? dlsym(library, "rocprofiler_configure") : NULL;
  if (tool_of) configure(tool_of);
  is_locked = 1;
}

/* A call of HIP on a stream: its number, 0 where it is not traced. */
uint64_t play_call(uint32_t op, uint64_t stream) {
  struct { uint64_t size; Id id; uint64_t value; } change = {24, {stream}, 0};
  uint64_t number = active[1] && traced[op] ? ++last_correlation : 0;
  if (!within) call(STREAM, 3, 1, 0, &change);
  if (number) call(HIP, op, 1, number, NULL);
  if (within) call(STREAM, 3, 1, 0, &change), call(STREAM, 3, 2, 0, &change);
  if (number) call(HIP, op, 2, number, NULL);
  if (!within) call(STREAM, 3, 2, 0, &change);
  return number;
}
void play_rccl(uint32_t op, uint32_t phase) { call(RCCL, op, phase, ++last_correlation, NULL); }
void play_symbol(uint64_t kernel, char *name) {
  struct { uint64_t size, kernel, code; char *name; } symbol = {32, kernel, 1, name};
  call(LOADS, 2, 1, 0, &symbol);
}

int hipHostMalloc(void **memory, size_t size, unsigned flags) { (void)flags; *memory = calloc(1, size); return 0; }
int hipMemsetD32Async(void *memory, int value, size_t count, void *stream) {
  (void)count;
  play_call(3, (uint64_t)(uintptr_t)stream);
  *(int *)memory = value;
  return 0;
}

typedef struct {
  uint64_t is_copy, correlation, start, end, agent, queue, kernel;
} Planned;

/* Records as the library's thread brings them. */
void play_work(const Planned *planned, int num) {
  uint64_t *rows = calloc((size_t)num, 192), *row = rows;
  Header *headers = calloc((size_t)num, sizeof *headers), **pointers = calloc((size_t)num, sizeof *pointers);
  for (int i = 0; i < num; i++, row += 24) {
    const Planned *p = planned + i;
    row[0] = 192, row[1] = (p->is_copy ? COPIES : KERNELS) + shift, row[2] = p->correlation, row[4] = 99;
    row[5] = p->start, row[6] = p->end;
    if (p->is_copy) row[7] = p->agent, row[8] = 1234, row[9] = 64;
    else row[7] = 64, row[8] = p->agent, row[9] = p->queue, row[10] = p->kernel;
    headers[i].category = 1, headers[i].kind = (uint32_t)row[1], headers[i].payload = row, pointers[i] = headers + i;
  }
  completed((Id){1}, (Id){7}, pointers, (size_t)num, NULL, num_dropped);
  memset(rows, 0xEE, (size_t)num * 192);
  free(rows), free(headers), free(pointers);
}
