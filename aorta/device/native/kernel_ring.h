/* What both sources of kernel records share: the record, the ring that Python copies out of, and names.
 *
 * A source calls `open_ring` once, `index_of_name` and `keep` with the ring's lock, and `take_from_ring`. One ring
 * per process.
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

/* -- what Python reads ----------------------------------------------------------------------------------------- */

enum { IS_KERNEL = 0, IS_COPY = 1, IS_SET = 2, IS_MARK = 3, IS_PEER_COPY = 4 };

typedef struct {
  int64_t start, end;   /* monotonic ns */
  uint32_t correlation; /* of the call that launched it: counts up with every call */
  uint32_t stream;
  uint32_t name;   /* index into the names; of a mark its number; of a copy COPY_BITS of its kinds, 0: unknown */
  uint32_t buffer; /* the buffer that it came in, or the number of its launch: what `settled` counts */
  uint16_t device;
  uint8_t what;     /* IS_... */
  uint8_t in_graph; /* a node of a graph */
  uint32_t unused;
} Record;

typedef struct {
  uint64_t num_taken;   /* records copied out by this call */
  uint64_t num_lost;    /* records that found the ring full, since the start */
  int64_t lost_start;   /* the stretch of time they cover */
  int64_t lost_end;
  uint64_t num_dropped; /* records that the vendor's library had no room for, since the start */
  uint32_t settled;     /* everything before this number has come back */
  uint32_t num_names;
  uint64_t num_no_time; /* records without times, since the start */
} Taken;

/* -- state ------------------------------------------------------------------------------------------------------ */

#define MOST_NAMES 65536
#define NAME_SLOTS (2 * MOST_NAMES)
#define MARK_BITS 0x0FFFFFFFu
#define COPY_BITS 0x00FFFFFFu /* of CUPTI's words: kind of copy, of the memory it is from, and it is to */
#define MARK_VALUES 0xA0000000u /* the upper four bits of a mark's number: sets of others rarely have them */

static pthread_mutex_t ring_lock = PTHREAD_MUTEX_INITIALIZER;
static Record *ring;
static uint64_t capacity, head, tail;
static Taken totals;

static const char **names;
static uint32_t num_names;
static struct { const char *address; uint32_t index; } recent[4096]; /* by the upper bits of its hash */
static uint32_t *name_slots; /* index + 1 of a name, by the hash of its text */

static volatile uint32_t *progress; /* pinned: the value of the last mark that the device has passed */
static char error_text[256];

static uint64_t monotonic_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static int fail(const char *what, int code) {
  snprintf(error_text, sizeof error_text, "%s (error %d)", what, code);
  return 1;
}

static void *open_library(const char *path) {
  void *library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
  if (!library) snprintf(error_text, sizeof error_text, "%s", dlerror());
  return library;
}

static int look_up(void *library, const char *name, void *function) {
  *(void **)function = dlsym(library, name);
  if (*(void **)function) return 0;
  snprintf(error_text, sizeof error_text, "%s is not in the library", name);
  return 1;
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

/* 0, or 1 and a text in error_text. */
static int open_ring(uint64_t num_records) {
  Record *records = calloc(num_records, sizeof *records);
  names = calloc(MOST_NAMES, sizeof *names);
  name_slots = calloc(NAME_SLOTS, sizeof *name_slots);
  if (!records || !names || !name_slots) return fail("no memory for the ring", 0);
  index_by_text("");
  capacity = num_records;
  ring = records;
  return 0;
}

static void keep(const Record *record) {
  if (!record->start || record->end < record->start) {
    totals.num_no_time++;
  } else if (head - tail == capacity) {
    if (!totals.num_lost++ || record->start < totals.lost_start) totals.lost_start = record->start;
    if (record->end > totals.lost_end) totals.lost_end = record->end;
  } else {
    ring[head++ % capacity] = *record;
  }
}

/* Copies up to `most` records out of the ring, oldest first. settled: what was settled before this call. */
static void take_from_ring(Record *out, uint64_t most, Taken *taken, uint32_t settled) {
  pthread_mutex_lock(&ring_lock);
  uint64_t n = head - tail < most ? head - tail : most;
  uint64_t at = tail % capacity, first = n < capacity - at ? n : capacity - at;
  memcpy(out, ring + at, first * sizeof *out);
  memcpy(out + first, ring, (n - first) * sizeof *out);
  tail += n;
  if (head != tail) settled = 0; /* not all that has come was taken */
  else head = tail = 0;          /* the same pages again: a run that keeps up never touches the whole ring */
  *taken = totals;
  taken->num_taken = n;
  taken->num_names = num_names;
  taken->settled = settled;
  pthread_mutex_unlock(&ring_lock);
}

/* -- calls from Python ------------------------------------------------------------------------------------------- */

EXPORT const char *aorta_kernels_error(void) { return error_text; }

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

/* The number of the last mark that the device has passed; 0 before the first. */
EXPORT uint32_t aorta_kernels_passed(void) { return progress ? *progress & MARK_BITS : 0; }

EXPORT size_t aorta_kernels_record_bytes(void) { return sizeof(Record); }
EXPORT size_t aorta_kernels_taken_bytes(void) { return sizeof(Taken); }
EXPORT uint64_t aorta_kernels_now(void) { return monotonic_ns(); }
