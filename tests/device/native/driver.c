/* A stand-in for CUPTI and the driver: plays records that a test gives it, in the layout of CUPTI 13. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  uint32_t kind, value, stream, device, correlation, in_graph;
  uint64_t start, end, bytes;
  const char *name;
} Planned;

#define SIZE 216
static void (*request)(uint8_t **, size_t *, size_t *);
static void (*complete)(void *, uint32_t, uint8_t *, size_t, size_t);
static uint8_t *buffers[4096];
static size_t filled[4096];
static int num_buffers, num_enabled;
static uint32_t version = 130001;
static int refuses;
static size_t dropped; /* since it was last asked */
static uint64_t (*now)(void);

int cuptiGetVersion(uint32_t *v) { *v = version; return 0; }
int cuptiActivityRegisterCallbacks(void *r, void *c) { request = r, complete = c; return refuses; }
int cuptiActivityRegisterTimestampCallback(uint64_t (*f)(void)) { now = f; return 0; }
int cuptiActivityEnable(int kind) { (void)kind; num_enabled++; return 0; }
int cuptiActivityDisable(int kind) { (void)kind; num_enabled--; return 0; }
int cuptiActivityGetNumDroppedRecords(void *c, uint32_t s, size_t *n) { (void)c, (void)s; *n = dropped, dropped = 0; return 0; }
int cuptiActivitySetAttribute(int a, size_t *n, void *v) { (void)a, (void)n, (void)v; return 0; }
int cuptiActivityGetNextRecord(uint8_t *b, size_t valid, void **r) {
  uint8_t *next = *r ? (uint8_t *)*r + SIZE : b;
  if (next >= b + valid) return 1;
  *r = next;
  return 0;
}
int cuptiActivityFlushAll(uint32_t flag) {
  (void)flag;
  return 0;
}
int cuMemAllocHost_v2(void **p, size_t n) { *p = calloc(1, n); return 0; }
int cuMemsetD32Async(uint64_t p, uint32_t value, size_t n, void *stream) {
  (void)n, (void)stream;
  *(uint32_t *)(uintptr_t)p = value;
  return 0;
}

void play_version(uint32_t v) { version = v; }
void play_refusal(int code) { refuses = code; }
void play_dropped(size_t num) { dropped = num; }
int play_num_enabled(void) { return num_enabled; }
uint64_t play_now(void) { return now(); }

/* Fills a buffer of the library's with records; its number among those that are out. */
int play_buffer(const Planned *records, int num) {
  size_t size = 0, most = 0;
  uint8_t *data = NULL;
  request(&data, &size, &most);
  if (!data || size < (size_t)num * SIZE) return -1;
  memset(data, 0, size);
  for (int i = 0; i < num; i++) {
    uint8_t *r = data + i * SIZE;
    const Planned *p = records + i;
    memcpy(r, &p->kind, 4), memcpy(r + 16, &p->start, 8), memcpy(r + 24, &p->end, 8);
    if (p->kind == 10) {
      uint64_t node = p->in_graph;
      memcpy(r + 40, &p->device, 4), memcpy(r + 48, &p->stream, 4), memcpy(r + 92, &p->correlation, 4);
      memcpy(r + 104, &p->name, 8), memcpy(r + 144, &node, 8);
    } else {
      memcpy(r + 4, &p->value, 4), memcpy(r + 8, &p->bytes, 8), memcpy(r + 32, &p->device, 4);
      memcpy(r + 40, &p->stream, 4), memcpy(r + 44, &p->correlation, 4);
    }
  }
  buffers[num_buffers] = data, filled[num_buffers] = (size_t)num * SIZE;
  return num_buffers++;
}

/* When the only record of a buffer that is out began and ended. */
void play_times(int buffer, uint64_t start, uint64_t end) {
  memcpy(buffers[buffer] + 16, &start, 8), memcpy(buffers[buffer] + 24, &end, 8);
}
void play_return(int buffer) { complete(NULL, 0, buffers[buffer], filled[buffer], filled[buffer]); }
void play_foreign(uint8_t *data, size_t n) { complete(NULL, 0, data, n, n); }
