/* A profiler plugin of NCCL and RCCL: what the library itself knows of every collective, send and receive.
 *
 * Built on first use by aorta/device/native/build.py, without headers of NCCL: the few fields that are read are laid
 * out below, by version of the profiler interface. NCCL loads this file by the path in NCCL_PROFILER_PLUGIN; Python
 * opens the same path, so both have the same memory, and Python copies events out of it.
 *
 * Nothing is recorded until Python asks for it (aorta_collectives_record). NCCL calls from the threads that launch and
 * from its proxy threads; nothing here takes a lock of theirs or the interpreter's, waits, or dereferences a handle:
 * handles are numbers, so a stale one is recognised.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

/* -- NCCL's side ------------------------------------------------------------------------------------------------ */

enum { TYPE_GROUP = 1, TYPE_COLLECTIVE = 2, TYPE_POINT_TO_POINT = 4, TYPE_KERNEL_CHANNEL = 64 };
enum { STATE_KERNEL_CHANNEL_STOP = 22 };

/* What all versions begin with; `type` has one byte before version 5. */
typedef struct {
  uint64_t type;
  void *parent;
  int rank;
} Head;

typedef struct { /* version 2 (NCCL 2.24, 2.25) and 3 (2.26); `traffic` is in version 2 alone */
  Head head;
  const char *name;
  uint64_t communicator, sequence;
  const char *func;
  const void *send;
  void *receive;
  size_t count;
  int root;
  const char *datatype;
  size_t traffic;
  uint8_t num_channels, num_warps;
  const char *algorithm, *protocol;
} Collective2;

typedef struct {
  Head head;
  const char *name;
  uint64_t communicator, sequence;
  const char *func;
  const void *send;
  void *receive;
  size_t count;
  int root;
  const char *datatype;
  uint8_t num_channels, num_warps;
  const char *algorithm, *protocol;
} Collective3;

typedef struct { /* versions 2 and 3 */
  Head head;
  const char *name;
  uint64_t communicator;
  const char *func;
  void *buffer;
  const char *datatype;
  size_t count;
  int peer;
} PointToPoint2;

typedef struct { /* version 4 (NCCL 2.27) and, with the group at its end, 5 (2.28 and later) */
  Head head;
  uint64_t sequence;
  const char *func;
  const void *send;
  void *receive;
  size_t count;
  int root;
  const char *datatype;
  uint8_t num_channels, num_warps;
  const char *algorithm, *protocol;
  void *group;
} Collective5;

typedef struct {
  Head head;
  const char *func;
  void *buffer;
  const char *datatype;
  size_t count;
  int peer;
  uint8_t num_channels;
  void *group;
} PointToPoint5;

typedef struct { /* from version 3 on; `timer` from version 4 on */
  Head head;
  uint8_t channel;
  uint64_t timer;
} KernelChannel;

_Static_assert(sizeof(Head) == 24, "layout of ncclProfilerEventDescr");
_Static_assert(offsetof(Collective2, num_channels) == 104, "layout of ncclProfilerEventDescr_v2_t");
_Static_assert(offsetof(Collective3, num_channels) == 96, "layout of ncclProfilerEventDescr_v3_t");
_Static_assert(offsetof(Collective5, num_channels) == 80, "layout of ncclProfilerEventDescr_v4_t");
_Static_assert(offsetof(Collective5, group) == 104, "layout of ncclProfilerEventDescr_v5_t");
_Static_assert(offsetof(PointToPoint5, num_channels) == 60, "layout of ncclProfilerEventDescr_v4_t");
_Static_assert(offsetof(PointToPoint5, group) == 64, "layout of ncclProfilerEventDescr_v5_t");
_Static_assert(offsetof(KernelChannel, timer) == 32, "layout of ncclProfilerEventDescr_v4_t");

typedef struct { /* versions 2 to 5 differ in `init` and in what `start` is given */
  const char *name;
  void *init;
  int (*start)(void *context, void **handle, const void *event);
  int (*stop)(void *handle);
  int (*state)(void *handle, int state, const uint64_t *arguments);
  int (*finalize)(void *context);
} Plugin;

/* -- what Python reads ------------------------------------------------------------------------------------------- */

enum { UNTIMED = 0, BY_HOST = 1, BY_DEVICE = 2 };

typedef struct {
  uint64_t number;              /* from 1 */
  int64_t launched_ns;          /* monotonic: when NCCL had launched it */
  uint64_t start, end;          /* of its first and last channel, by the device's timer; by the host's: monotonic ns */
  uint64_t last_start, first_end; /* of its other channels */
  int64_t start_seen_ns, end_seen_ns; /* monotonic: when NCCL's proxy thread saw the two */
  uint64_t communicator;        /* NCCL's hash of it */
  uint64_t plan;                /* those of one kernel have the same */
  uint64_t sequence;            /* NCCL counts by communicator and function */
  uint64_t count;
  int32_t peer;                 /* -1: a collective */
  uint32_t num_ranks;           /* 0: this version does not tell */
  uint16_t func, datatype, algorithm, protocol; /* indices of names */
  uint16_t num_channels, num_started, num_stopped;
  uint8_t timed_by, flags;
} Event;

/* NCCL 2.27 to 2.30 does not count a send to the own rank where it looks for a channel's times, and the device does:
 * from then on, times of some of the communicator's channels are those of earlier launches. */
enum { TO_ITSELF = 1, AFTER_ONE_TO_ITSELF = 2 };

typedef struct {
  uint64_t num_taken;
  uint64_t num_lost;         /* found the ring full, since the process began */
  int64_t complete_ns;       /* all that was launched before has been taken */
  uint32_t num_names;
  uint32_t num_communicators; /* made since the process began */
  uint32_t version;          /* of the interface that NCCL chose; 0: it has not loaded this */
  uint32_t is_recording;
} Taken;

/* -- state -------------------------------------------------------------------------------------------------------- */

#define CAPACITY (1u << 15)
#define MOST_NAMES 256
#define NAME_BYTES 48
#define MOST_COMMUNICATORS 4096
#define OUT_OF_TURN 2 /* plans of a communicator that have ended after one which therefore has ended */

typedef struct {
  Event event;
  uint64_t ready; /* the number of the event that is in it, with TAKEN once Python has it */
} Slot;

#define TAKEN (1ull << 63)

typedef struct {
  uint64_t hash;
  uint32_t num_ranks;
  uint64_t ended_plan; /* the newest of which a task has all its ends */
  uint32_t has_sent_to_itself;
} Communicator;

static Slot ring[CAPACITY];
static uint64_t head, tail; /* of numbers - 1 */
static uint64_t num_lost, num_plans;
static char names[MOST_NAMES][NAME_BYTES]; /* 0: the empty one */
static uint32_t num_names = 1;
static Communicator communicators[MOST_COMMUNICATORS]; /* 0: of those that have no place here */
static uint32_t num_communicators;
static uint32_t version;
static int *volatile mask; /* NCCL's own, which it reads at every call */
static int is_recording;
static pthread_mutex_t names_lock = PTHREAD_MUTEX_INITIALIZER, reader_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t communicators_lock = PTHREAD_MUTEX_INITIALIZER;

#define LOAD(x) __atomic_load_n(&(x), __ATOMIC_ACQUIRE)
#define STORE(x, value) __atomic_store_n(&(x), value, __ATOMIC_RELEASE)
#define ADD(x, n) __atomic_add_fetch(&(x), n, __ATOMIC_ACQ_REL)

static int64_t monotonic_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Handles: a number and, in the lowest two bits, of what. */
enum { OF_PLAN = 1, OF_TASK = 2, OF_CHANNEL = 3 };

static void *handle_of(uint64_t number, int what) { return (void *)(uintptr_t)(number << 2 | (uint64_t)what); }
static int kind_of(const void *handle) { return (int)((uintptr_t)handle & 3); }
static uint64_t number_of(const void *handle) { return (uint64_t)(uintptr_t)handle >> 2; }

static Slot *slot_of(uint64_t number) {
  Slot *slot = ring + (number - 1) % CAPACITY;
  return number && LOAD(slot->ready) == number ? slot : NULL;
}

static uint16_t name_index(const char *text) {
  if (!text || !*text) return 0;
  uint32_t n = LOAD(num_names);
  for (uint32_t i = 1; i < n; i++)
    if (!strncmp(names[i], text, NAME_BYTES - 1)) return (uint16_t)i;
  pthread_mutex_lock(&names_lock); /* a handful of times in a process */
  uint32_t index = 0;
  for (uint32_t i = n; i < num_names && !index; i++)
    if (!strncmp(names[i], text, NAME_BYTES - 1)) index = i;
  if (!index && num_names < MOST_NAMES) {
    strncpy(names[num_names], text, NAME_BYTES - 1);
    index = num_names;
    STORE(num_names, index + 1);
  }
  pthread_mutex_unlock(&names_lock);
  return (uint16_t)index;
}

static Communicator *communicator_of(uint64_t hash, uint32_t num_ranks) {
  uint32_t n = LOAD(num_communicators);
  for (uint32_t i = n < MOST_COMMUNICATORS ? n : MOST_COMMUNICATORS - 1; i > 0; i--) /* the newest of a hash */
    if (communicators[i].hash == hash && (!num_ranks || communicators[i].num_ranks == num_ranks))
      return communicators + i;
  pthread_mutex_lock(&communicators_lock);
  uint32_t index = n + 1 < MOST_COMMUNICATORS ? n + 1 : 0;
  communicators[index].hash = hash;
  communicators[index].num_ranks = num_ranks;
  STORE(num_communicators, n + 1);
  pthread_mutex_unlock(&communicators_lock);
  return communicators + index;
}

/* -- events ------------------------------------------------------------------------------------------------------- */

static void apply_mask(void) {
  int *nccl = mask;
  int wanted = TYPE_GROUP | TYPE_COLLECTIVE | TYPE_POINT_TO_POINT;
  if (LOAD(version) > 2) wanted |= TYPE_KERNEL_CHANNEL;
  if (nccl) __atomic_store_n(nccl, LOAD(is_recording) ? wanted : 0, __ATOMIC_RELAXED);
}

static int opened(uint32_t of_version, void **context, int *activation_mask, Communicator *communicator) {
  STORE(version, of_version);
  mask = activation_mask;
  *context = communicator ? communicator : communicators; /* NULL would mean: no plugin */
  apply_mask();
  return 0;
}

static void *start_task(const Event *from, const void *group) {
  uint64_t number = LOAD(head);
  do {
    if (number - LOAD(tail) >= CAPACITY) {
      ADD(num_lost, 1);
      return NULL;
    }
  } while (!__atomic_compare_exchange_n(&head, &number, number + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  Slot *slot = ring + number % CAPACITY;
  slot->event = *from;
  slot->event.number = ++number;
  slot->event.launched_ns = monotonic_ns();
  slot->event.plan = kind_of(group) == OF_PLAN ? number_of(group) : 0;
  STORE(slot->ready, number);
  return handle_of(number, OF_TASK);
}

static void channel_started(Slot *slot, uint64_t time, int64_t seen_ns) {
  Event *event = &slot->event;
  ADD(event->num_started, 1);
  if (!event->start || time < event->start) event->start = time, event->start_seen_ns = seen_ns;
  if (time > event->last_start) event->last_start = time;
}

static void channel_stopped(Slot *slot, uint64_t time, int64_t seen_ns, uint8_t timed_by) {
  Event *event = &slot->event;
  if (time > event->end) event->end = time, event->end_seen_ns = seen_ns;
  if (!event->first_end || time < event->first_end) event->first_end = time;
  event->timed_by = timed_by;
  if (ADD(event->num_stopped, 1) < event->num_channels) return;
  uint32_t n = LOAD(num_communicators);
  for (uint32_t i = n < MOST_COMMUNICATORS ? n : MOST_COMMUNICATORS - 1; i > 0; i--)
    if (communicators[i].hash == event->communicator) {
      if (event->plan > LOAD(communicators[i].ended_plan)) STORE(communicators[i].ended_plan, event->plan);
      return;
    }
}

static void *start_channel(const KernelChannel *channel, int has_timer) {
  uint64_t number = kind_of(channel->head.parent) == OF_TASK ? number_of(channel->head.parent) : 0;
  Slot *slot = slot_of(number);
  if (!slot) return NULL;
  int64_t now = monotonic_ns();
  channel_started(slot, has_timer ? channel->timer : (uint64_t)now, now);
  return handle_of(number, OF_CHANNEL);
}

static int start(void **handle, const void *described, uint64_t type, int of_version, Communicator *communicator) {
  const Head *head_of_it = described;
  const void *group = head_of_it->parent;
  Event event = {.peer = -1};
  *handle = NULL;
  if (type == TYPE_GROUP) {
    *handle = handle_of(ADD(num_plans, 1), OF_PLAN); /* one for each kernel */
    return 0;
  }
  if (type == TYPE_KERNEL_CHANNEL) {
    *handle = start_channel(described, of_version > 3);
    return 0;
  }
#define COPY_COLLECTIVE(c)                                                                                  \
  event.sequence = (c)->sequence, event.count = (c)->count, event.func = name_index((c)->func),             \
  event.datatype = name_index((c)->datatype), event.algorithm = name_index((c)->algorithm),                 \
  event.protocol = name_index((c)->protocol), event.num_channels = (c)->num_channels
#define COPY_POINT_TO_POINT(p)                                                                              \
  event.count = (p)->count, event.func = name_index((p)->func), event.datatype = name_index((p)->datatype), \
  event.peer = (p)->peer
  if (type == TYPE_COLLECTIVE && of_version == 2) {
    const Collective2 *c = described;
    COPY_COLLECTIVE(c), event.communicator = c->communicator;
  } else if (type == TYPE_COLLECTIVE && of_version == 3) {
    const Collective3 *c = described;
    COPY_COLLECTIVE(c), event.communicator = c->communicator;
  } else if (type == TYPE_COLLECTIVE) {
    const Collective5 *c = described;
    COPY_COLLECTIVE(c);
    if (of_version > 4) group = c->group;
  } else if (type == TYPE_POINT_TO_POINT && of_version < 4) {
    const PointToPoint2 *p = described;
    COPY_POINT_TO_POINT(p), event.communicator = p->communicator;
  } else if (type == TYPE_POINT_TO_POINT) {
    const PointToPoint5 *p = described;
    COPY_POINT_TO_POINT(p), event.num_channels = p->num_channels;
    if (of_version > 4) group = p->group;
  } else {
    return 0;
  }
  if (of_version < 4) communicator = communicator_of(event.communicator, 0);
  if (event.peer >= 0 && event.peer == head_of_it->rank) {
    event.flags = TO_ITSELF;
    STORE(communicator->has_sent_to_itself, 1);
  }
  if (LOAD(communicator->has_sent_to_itself)) event.flags |= AFTER_ONE_TO_ITSELF;
  event.communicator = communicator->hash, event.num_ranks = communicator->num_ranks;
  *handle = start_task(&event, group);
  return 0;
}

static uint64_t short_type(const void *described) { return *(const uint8_t *)described; }

static int start2(void *context, void **handle, const void *described) {
  (void)context;
  return start(handle, described, short_type(described), 2, NULL);
}

static int start3(void *context, void **handle, const void *described) {
  (void)context;
  return start(handle, described, short_type(described), 3, NULL);
}

static int start4(void *context, void **handle, const void *described) {
  return start(handle, described, short_type(described), 4, context);
}

static int start5(void *context, void **handle, const void *described) {
  return start(handle, described, ((const Head *)described)->type, 5, context);
}

static int stop3(void *handle) { /* without a timer of the device: the host's time is all there is */
  Slot *slot = kind_of(handle) == OF_CHANNEL ? slot_of(number_of(handle)) : NULL;
  int64_t now = monotonic_ns();
  if (slot) channel_stopped(slot, (uint64_t)now, now, BY_HOST);
  return 0;
}

static int stop_nothing(void *handle) {
  (void)handle;
  return 0;
}

static int state_nothing(void *handle, int state, const uint64_t *arguments) {
  (void)handle, (void)state, (void)arguments;
  return 0;
}

static int state4(void *handle, int state, const uint64_t *arguments) {
  if (state != STATE_KERNEL_CHANNEL_STOP || !arguments || kind_of(handle) != OF_CHANNEL) return 0;
  Slot *slot = slot_of(number_of(handle));
  if (slot) channel_stopped(slot, *arguments, monotonic_ns(), BY_DEVICE);
  return 0;
}

static int init2(void **context, int *activation_mask) { return opened(2, context, activation_mask, NULL); }
static int init3(void **context, int *activation_mask) { return opened(3, context, activation_mask, NULL); }

static int init4(void **context, int *activation_mask, const char *name, uint64_t hash, int num_nodes, int num_ranks,
                 int rank, void *log) {
  (void)name, (void)num_nodes, (void)rank, (void)log;
  return opened(4, context, activation_mask, communicator_of(hash, (uint32_t)num_ranks));
}

static int init5(void **context, uint64_t hash, int *activation_mask, const char *name, int num_nodes, int num_ranks,
                 int rank, void *log) {
  (void)name, (void)num_nodes, (void)rank, (void)log;
  return opened(5, context, activation_mask, communicator_of(hash, (uint32_t)num_ranks));
}

static int finalize(void *context) {
  (void)context;
  return 0;
}

/* NCCL takes the newest that it knows. */
EXPORT const Plugin ncclProfiler_v2 = {"aorta", init2, start2, stop_nothing, state_nothing, finalize};
EXPORT const Plugin ncclProfiler_v3 = {"aorta", init3, start3, stop3, state_nothing, finalize};
EXPORT const Plugin ncclProfiler_v4 = {"aorta", init4, start4, stop_nothing, state4, finalize};
EXPORT const Plugin ncclProfiler_v5 = {"aorta", init5, start5, stop_nothing, state4, finalize};

/* -- calls from Python --------------------------------------------------------------------------------------------- */

/* Events of what is launched from now on: wanted or not. Takes effect at NCCL's next call. */
EXPORT void aorta_collectives_record(int wanted) {
  STORE(is_recording, wanted);
  apply_mask();
}

static int has_ended(const Slot *slot, int64_t given_up_ns) {
  const Event *event = &slot->event;
  if (event->launched_ns < given_up_ns || LOAD(version) < 3) return 1;
  if (event->num_channels && LOAD(event->num_stopped) >= event->num_channels) return 1;
  uint32_t n = LOAD(num_communicators);
  for (uint32_t i = n < MOST_COMMUNICATORS ? n : MOST_COMMUNICATORS - 1; i > 0; i--)
    if (communicators[i].hash == event->communicator)
      return LOAD(communicators[i].ended_plan) >= event->plan + OUT_OF_TURN;
  return 0;
}

/* Copies up to `most` events that have ended out of the ring, oldest first; those launched before `given_up_ns`
 * whether they have ended or not. */
EXPORT void aorta_collectives_take(Event *out, uint64_t most, int64_t given_up_ns, Taken *taken) {
  pthread_mutex_lock(&reader_lock);
  int64_t complete_ns = monotonic_ns(); /* asked first: what was launched by then is below `last` */
  uint64_t n = 0, last = LOAD(head);
  for (uint64_t number = tail; number < last; number++) {
    Slot *slot = ring + number % CAPACITY;
    uint64_t ready = LOAD(slot->ready);
    if (ready == (TAKEN | (number + 1))) continue;
    if (ready != number + 1) { /* being written */
      complete_ns = 0;
    } else if (n < most && has_ended(slot, given_up_ns)) {
      out[n++] = slot->event;
      STORE(slot->ready, TAKEN | (number + 1));
    } else if (slot->event.launched_ns < complete_ns) {
      complete_ns = slot->event.launched_ns;
    }
  }
  while (tail < last && LOAD(ring[tail % CAPACITY].ready) == (TAKEN | (tail + 1))) STORE(tail, tail + 1);
  taken->num_taken = n;
  taken->complete_ns = complete_ns;
  taken->num_lost = LOAD(num_lost);
  taken->num_names = LOAD(num_names);
  taken->num_communicators = LOAD(num_communicators);
  taken->version = LOAD(version);
  taken->is_recording = (uint32_t)LOAD(is_recording);
  pthread_mutex_unlock(&reader_lock);
}

EXPORT const char *aorta_collectives_name(uint32_t index) { return index < LOAD(num_names) ? names[index] : ""; }
EXPORT size_t aorta_collectives_event_bytes(void) { return sizeof(Event); }
