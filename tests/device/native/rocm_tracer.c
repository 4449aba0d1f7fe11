/* A stand-in for roctracer and HIP: plays calls and records that a test gives it, in the layout of roctracer 4.1. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void (*Callback)(uint32_t, uint32_t, const void *, void *);
typedef void (*Completed)(const char *, const char *, void *);

static Callback callbacks[64];
static int enabled[3], refuses;
static uint64_t last_correlation;
static Completed completed;
static int64_t ahead_ns; /* of the tracer's clock */
static const char *const NAMES[] = {"hipLaunchKernel", "hipMemcpyAsync", "hipMemsetD32Async", "hipGraphLaunch"};

uint32_t roctracer_version_major(void) { return 4; }
int roctracer_open_pool_expl(const void *properties, void **pool) {
  memcpy(&completed, (const char *)properties + 32, sizeof completed);
  *pool = (void *)1;
  return refuses;
}
int roctracer_enable_op_activity_expl(uint32_t domain, uint32_t op, void *pool) {
  return domain != 2 || !pool || op > 1 ? -1 : (enabled[op] = 1, 0);
}
int roctracer_disable_op_activity(uint32_t domain, uint32_t op) { return domain != 2 ? -1 : (enabled[op] = 0, 0); }
int roctracer_enable_op_callback(uint32_t domain, uint32_t op, Callback callback, void *argument) {
  (void)argument;
  return domain != 3 ? -1 : (callbacks[op] = callback, 0);
}
int roctracer_disable_op_callback(uint32_t domain, uint32_t op) { return domain != 3 ? -1 : (callbacks[op] = NULL, 0); }
int roctracer_op_code(uint32_t domain, const char *name, uint32_t *op, uint32_t *kind) {
  (void)kind;
  for (uint32_t i = 0; i < 4; i++)
    if (domain == 3 && !strcmp(name, NAMES[i])) return *op = i + 10, 0;
  return -3;
}
int roctracer_flush_activity_expl(void *pool) { return pool ? 0 : -3; }
int roctracer_get_timestamp(uint64_t *ns) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  *ns = (uint64_t)((int64_t)now.tv_sec * 1000000000 + now.tv_nsec + ahead_ns);
  return 0;
}
int roctracer_next_record(const char *record, const char **next) { return *next = record + 64, 0; }

/* A call of the runtime: its number, 0 where it is not traced. */
uint64_t play_call(int which) {
  struct { uint64_t correlation; uint32_t phase; uint64_t arguments[8]; } data = {0};
  Callback callback = callbacks[which + 10];
  if (!callback) return 0;
  data.correlation = ++last_correlation;
  callback(3, (uint32_t)which + 10, &data, NULL);
  data.phase = 1;
  callback(3, (uint32_t)which + 10, &data, NULL);
  return data.correlation;
}

int hipHostMalloc(void **memory, size_t size, unsigned flags) { (void)flags; *memory = calloc(1, size); return 0; }
int hipMemsetD32Async(void *memory, int value, size_t count, void *stream) {
  (void)stream, (void)count;
  play_call(2);
  *(int *)memory = value;
  return 0;
}

void play_refusal(int code) { refuses = code; }
void play_ahead(int64_t ns) { ahead_ns = ns; }
uint64_t play_last(void) { return last_correlation; }
int play_enabled(void) { return enabled[0] + enabled[1] + (callbacks[10] != NULL); }

typedef struct {
  uint32_t op;
  uint64_t correlation, begin, end;
  int device;
  uint64_t queue;
  const char *name;
} Planned;

/* Records as the tracer's thread brings them. */
void play_records(const Planned *planned, int num) {
  char *buffer = calloc((size_t)num, 64), *at = buffer;
  uint32_t domain = 2;
  for (int i = 0; i < num; i++, at += 64) {
    memcpy(at, &domain, 4), memcpy(at + 8, &planned[i].op, 4), memcpy(at + 16, &planned[i].correlation, 8);
    memcpy(at + 24, &planned[i].begin, 8), memcpy(at + 32, &planned[i].end, 8), memcpy(at + 40, &planned[i].device, 4);
    memcpy(at + 48, &planned[i].queue, 8), memcpy(at + 56, &planned[i].name, 8);
  }
  completed(buffer, at, NULL);
  memset(buffer, 0xEE, (size_t)num * 64);
  free(buffer);
}
