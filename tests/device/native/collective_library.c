/* A stand-in for NCCL: loads a profiler plugin by its path, as NCCL does, and plays NCCL's calls of one version of the
 * interface. The layouts are written down by byte, apart from those of the plugin. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {
  const char *name;
  void *init;
  int (*start)(void *, void **, void *);
  int (*stop)(void *);
  int (*state)(void *, int, void *);
  int (*finalize)(void *);
} Table;

static Table *table;
static int version, mask;
static void *contexts[16];

int play_load(const char *path, int of_version) {
  char symbol[32];
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  snprintf(symbol, sizeof symbol, "ncclProfiler_v%d", of_version);
  table = library ? dlsym(library, symbol) : NULL;
  version = of_version;
  return table == NULL;
}

int play_communicator(int place, uint64_t hash, int ranks) {
  if (version < 4) return ((int (*)(void **, int *))table->init)(contexts + place, &mask);
  if (version == 4)
    return ((int (*)(void **, int *, const char *, uint64_t, int, int, int, void *))table->init)(
        contexts + place, &mask, "pg", hash, 1, ranks, 0, NULL);
  return ((int (*)(void **, uint64_t, int *, const char *, int, int, int, void *))table->init)(
      contexts + place, hash, &mask, "pg", 1, ranks, 0, NULL);
}

int play_mask(void) { return mask; }

static void put(uint8_t *event, int at, const void *value, int size) { memcpy(event + at, value, (size_t)size); }
#define PUT(at, type, value) put(event, at, &(type){(type)(value)}, sizeof(type))

static void *started(int communicator, uint8_t *event, uint64_t type, const void *parent) {
  void *handle = (void *)0x1; /* NCCL keeps what was there */
  if (version < 5) event[0] = (uint8_t)type, event[1] = 0xEE; /* the byte is followed by anything */
  else PUT(0, uint64_t, type);
  PUT(8, const void *, parent);
  if (table->start(contexts[communicator], &handle, event)) return NULL;
  return handle;
}

void *play_group(int communicator) {
  uint8_t event[256] = {0};
  if (version >= 5) {
    void *api = started(communicator, event, 256, NULL); /* calls of the interface: not asked for, started anyway */
    if (api) table->stop(api);
  }
  memset(event, 0, sizeof event);
  return started(communicator, event, 1, NULL);
}

void *play_collective(int communicator, void *group, uint64_t hash, const char *func, uint64_t sequence, uint64_t count,
                      const char *algorithm, const char *protocol, int channels) {
  uint8_t event[256] = {0};
  if (version < 4) {
    int more = version == 2 ? 8 : 0;
    PUT(32, uint64_t, hash), PUT(40, uint64_t, sequence), PUT(48, const char *, func), PUT(72, uint64_t, count);
    PUT(88, const char *, "ncclBfloat16"), PUT(96 + more, uint8_t, channels);
    PUT(104 + more, const char *, algorithm), PUT(112 + more, const char *, protocol);
  } else {
    PUT(24, uint64_t, sequence), PUT(32, const char *, func), PUT(56, uint64_t, count);
    PUT(72, const char *, "ncclBfloat16"), PUT(80, uint8_t, channels);
    PUT(88, const char *, algorithm), PUT(96, const char *, protocol);
    if (version >= 5) PUT(104, void *, group);
  }
  return started(communicator, event, 2, version >= 5 ? NULL : group);
}

void *play_send(int communicator, void *group, uint64_t hash, uint64_t count, int peer, int channels) {
  uint8_t event[256] = {0};
  if (version < 4) {
    PUT(32, uint64_t, hash), PUT(40, const char *, "Send"), PUT(56, const char *, "ncclInt8");
    PUT(64, uint64_t, count), PUT(72, int, peer);
  } else {
    PUT(24, const char *, "Send"), PUT(40, const char *, "ncclInt8"), PUT(48, uint64_t, count), PUT(56, int, peer);
    PUT(60, uint8_t, channels);
    if (version >= 5) PUT(64, void *, group);
  }
  return started(communicator, event, 4, version >= 5 ? NULL : group);
}

void *play_channel_start(int communicator, void *task, int channel, uint64_t timer) {
  uint8_t event[256] = {0};
  if (version < 3) return NULL;
  PUT(24, uint8_t, channel);
  if (version > 3) PUT(32, uint64_t, timer);
  return started(communicator, event, 64, task);
}

void play_channel_stop(void *channel, uint64_t timer) {
  uint64_t arguments[4] = {timer};
  if (version > 3) table->state(channel, 22, arguments);
  table->stop(channel);
}

void play_stop(void *handle) { table->stop(handle); }
int play_end(int communicator) { return table->finalize(contexts[communicator]); }
