/* Hook in c10's CPU allocator: counts live bytes and peaks, keeps to limits, records lifetimes.
 *
 * Plain C, no torch headers, loaded by ctypes. `tightfit_hook_install` copies the vtable of
 * c10's default CPU allocator, replaces `allocate` and `raw_deleter`, and registers the copy.
 * Memory comes from the allocator that was there before, or from an arena (replay.c) while a
 * thread is inside one; both are counted alike. The hook is never uninstalled:
 * oneDNN keeps raw buffers and frees them through whatever allocator is registered then.
 *
 * Contracts of c10 that this file keeps:
 *   - the context of a DataPtr equals its data pointer (`raw_allocate` asserts it);
 *   - `allocate` attaches exactly the deleter that `raw_deleter` returns;
 *   - blocks may be freed by any thread, and memory allocated before the hook was installed may
 *     be freed through it: only blocks found in the size table are counted.
 *
 * Modes: counting always, tallies while they are open, recording between begin and end. A later
 * mode adds its own section and one call in `hook_allocate` or `hook_free`.
 */
#define _GNU_SOURCE
#include "replay.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define VERSION 11

/* ------------------------------------------------------------------ c10's binary interface */

typedef void (*Deleter)(void *);

typedef struct {
    void *data;
    Deleter deleter; /* libstdc++ stores a unique_ptr's deleter before its pointer */
    void *context;
    int8_t device_type, device_index;
} DataPtr;

enum { /* slots of c10::Allocator's vtable, from the address an object points to */
    SLOT_ALLOCATE = 2,
    SLOT_IS_SIMPLE = 3,
    SLOT_RAW_DELETER = 4,
    SLOT_COPY_DATA = 5,
    SLOTS = 6,
    SLOTS_BEFORE = 2, /* offset to top, type information */
};

typedef DataPtr (*Allocate)(void *self, size_t size);
typedef _Bool (*IsSimple)(const void *self, const DataPtr *block);
typedef Deleter (*RawDeleter)(const void *self);
typedef void (*CopyData)(const void *self, void *target, const void *source, size_t size);

static void *previous;
static Allocate previous_allocate;
static Deleter previous_free;
static void *own_table[SLOTS_BEFORE + SLOTS];
static struct {
    void **table;
} own_allocator;
static _Bool installed;

/* ------------------------------------------------------------------ size table */

/* Which blocks are ours and how large: open addressing, sharded by address, linear probing with
 * backward shift on removal. */

#define SHARD_BITS 6
#define SHARDS (1 << SHARD_BITS)

typedef struct {
    atomic_bool is_held;
    Entry *entries;
    uint64_t capacity, count; /* capacity: 0 or a power of two */
} Shard;

static Shard shards[SHARDS];

/* A shard is held for some ten instructions, so waiting threads spin; releasing it is a plain
 * store, at half the price of a mutex. */
static inline void hold(Shard *shard) {
    while (atomic_exchange_explicit(&shard->is_held, 1, memory_order_acquire))
        sched_yield();
}

static inline void release_shard(Shard *shard) {
    atomic_store_explicit(&shard->is_held, 0, memory_order_release);
}

static inline uint64_t hash_of(uintptr_t address) {
    return (uint64_t)(address >> 6) * 0x9E3779B97F4A7C15u;
}

static inline Shard *shard_of(uint64_t hash) { return &shards[hash >> (64 - SHARD_BITS)]; }

static inline uint64_t slot_of(const Shard *shard, uint64_t hash) {
    return (hash >> 20) & (shard->capacity - 1);
}

static void place(Shard *shard, Entry entry) {
    uint64_t slot = slot_of(shard, hash_of(entry.address));
    while (shard->entries[slot].address)
        slot = (slot + 1) & (shard->capacity - 1);
    shard->entries[slot] = entry;
}

static _Bool grow(Shard *shard) {
    Shard larger = *shard;
    larger.capacity = shard->capacity ? 2 * shard->capacity : 64;
    larger.entries = calloc(larger.capacity, sizeof(Entry));
    if (!larger.entries)
        return 0;
    for (uint64_t slot = 0; slot < shard->capacity; slot++)
        if (shard->entries[slot].address)
            place(&larger, shard->entries[slot]);
    free(shard->entries);
    shard->entries = larger.entries;
    shard->capacity = larger.capacity;
    return 1;
}

static _Bool table_insert(Entry entry) {
    Shard *shard = shard_of(hash_of(entry.address));
    hold(shard);
    _Bool fits = 2 * (shard->count + 1) <= shard->capacity || grow(shard);
    if (fits) {
        place(shard, entry);
        shard->count++;
    }
    release_shard(shard);
    return fits;
}

/* Closes the gap at `hole` so that no later entry becomes unreachable. */
static void close_gap(Shard *shard, uint64_t hole) {
    uint64_t mask = shard->capacity - 1;
    for (uint64_t slot = (hole + 1) & mask; shard->entries[slot].address; slot = (slot + 1) & mask) {
        uint64_t home = slot_of(shard, hash_of(shard->entries[slot].address));
        if (((slot - home) & mask) >= ((slot - hole) & mask)) {
            shard->entries[hole] = shard->entries[slot];
            hole = slot;
        }
    }
    shard->entries[hole].address = 0;
}

/* Returns the slot of an address in a shard that has slots; the entry there is empty if the
 * address is not in the table. */
static uint64_t slot_with(const Shard *shard, uintptr_t address, uint64_t hash) {
    uint64_t slot = slot_of(shard, hash);
    while (shard->entries[slot].address && shard->entries[slot].address != address)
        slot = (slot + 1) & (shard->capacity - 1);
    return slot;
}

/* Returns the entry of a block; one with address 0 if it is not ours. */
static Entry table_find(uintptr_t address) {
    uint64_t hash = hash_of(address);
    Shard *shard = shard_of(hash);
    Entry found = {0};
    hold(shard);
    if (shard->capacity)
        found = shard->entries[slot_with(shard, address, hash)];
    release_shard(shard);
    return found;
}

/* Removes a block; an entry with address 0 if it is not ours. */
static Entry table_remove(void *address) {
    uint64_t hash = hash_of((uintptr_t)address);
    Shard *shard = shard_of(hash);
    Entry found = {0};
    hold(shard);
    if (shard->capacity) {
        uint64_t slot = slot_with(shard, (uintptr_t)address, hash);
        found = shard->entries[slot];
        if (found.address) {
            close_gap(shard, slot);
            shard->count--;
        }
    }
    release_shard(shard);
    return found;
}

/* ------------------------------------------------------------------ counting */

static atomic_int_fast64_t live_bytes, lost_blocks; /* blocks in arenas: replay.c counts them */

/* One peak per meter. A closed slot holds INT64_MAX, so that no level is above it; slots from
 * `slots_end` on were never open or are closed again. */
#define PEAK_SLOTS 1024
static atomic_int_fast64_t peak_bytes[PEAK_SLOTS];
static atomic_int slots_end;
static pthread_mutex_t slots_lock = PTHREAD_MUTEX_INITIALIZER;

static inline int64_t all_live_bytes(void) {
    return atomic_load(&live_bytes) + replay_live_bytes();
}

/* `live`: of the blocks outside arenas. */
static inline void note_peak(int64_t live) {
    int end = atomic_load_explicit(&slots_end, memory_order_acquire);
    live += end ? replay_live_bytes() : 0;
    for (int slot = 0; slot < end; slot++) {
        int_fast64_t peak = atomic_load(&peak_bytes[slot]);
        while (live > peak && !atomic_compare_exchange_weak(&peak_bytes[slot], &peak, live)) {
        }
    }
}

static inline void count_free(uint64_t size) { atomic_fetch_sub(&live_bytes, rounded(size)); }

/* ------------------------------------------------------------------ tallies */

/* A tally counts the blocks allocated since it was opened, as long as they live, and may have a
 * limit that they keep to. Memory from before that counts against the limit all the same (the parameters
 * of a model) is set from outside, in bytes. The owner of the limit may be asked to make
 * room, in the thread that allocates. A request that would exceed a limit all the same is refused
 * by an exception of c10, as if memory had run out. */
#define TALLIES 64
#define NEVER UINT64_MAX

typedef int (*MakeRoom)(int64_t lacking); /* returns whether anything was freed */

typedef struct {
    _Atomic(MakeRoom) make_room;
    atomic_uint_fast64_t opened; /* the least stamp that counts; NEVER: closed */
    atomic_int_fast64_t given, peak, before, limit;
    atomic_int_fast64_t advised; /* the least budget to name; 0: not known */
    atomic_int_fast64_t coming;  /* bytes that will be held in addition to a refused request */
    _Atomic(const char *) origin, ways; /* where requests come from; further ways out */
    atomic_int_fast64_t refusals, refused_size, held_then; /* of the last refused request */
} Tally;

static Tally tallies[TALLIES];
static atomic_int tallies_end;
static atomic_uint_fast64_t tallies_opened;
static pthread_mutex_t tallies_lock = PTHREAD_MUTEX_INITIALIZER;
static void (*fail)(const char *function, const char *file, uint32_t line, const char *message);

static inline void tally_free(uint64_t stamp, int64_t size) {
    int end = atomic_load_explicit(&tallies_end, memory_order_acquire);
    for (int slot = 0; slot < end; slot++)
        if (stamp >= atomic_load_explicit(&tallies[slot].opened, memory_order_relaxed))
            atomic_fetch_sub(&tallies[slot].given, size);
}

static inline void note_peak_of(Tally *tally) {
    int64_t given = atomic_load(&tally->given);
    int_fast64_t peak = atomic_load(&tally->peak);
    while (given > peak && !atomic_compare_exchange_weak(&tally->peak, &peak, given)) {
    }
}

/* Counts a block in every open tally; in none, if it exceeds the limit of one: returns that. */
static inline Tally *tally_allocation(uint64_t stamp, int64_t size) {
    Tally *exceeded = NULL;
    int end = atomic_load_explicit(&tallies_end, memory_order_acquire);
    for (int slot = 0; slot < end; slot++) {
        Tally *tally = &tallies[slot];
        if (stamp < atomic_load_explicit(&tally->opened, memory_order_relaxed))
            continue;
        int64_t given = atomic_fetch_add(&tally->given, size) + size;
        if (given + atomic_load(&tally->before) > atomic_load(&tally->limit))
            exceeded = tally;
    }
    if (exceeded) {
        tally_free(stamp, size);
        return exceeded;
    }
    for (int slot = 0; slot < end; slot++)
        if (stamp >= atomic_load_explicit(&tallies[slot].opened, memory_order_relaxed))
            note_peak_of(&tallies[slot]);
    return NULL;
}

/* Python's collector of cycles: a fitted model that is unreachable must not limit
 * those that come after it. Found in the process; none of them in a process without Python. */
static struct {
    int (*is_initialized)(void);
    void *(*thread_state)(void);
    int (*take_lock)(void);
    void (*give_lock)(int);
    long (*collect)(void);
} python;
typedef void (*BeforeRefusal)(int64_t lacking); /* frees memory, and counts some again */
static _Atomic(BeforeRefusal) before_refusals;
static __thread _Bool collecting, making_room;

static void find_python(void) {
    python.is_initialized = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    python.thread_state = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
    python.take_lock = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    python.give_lock = (void (*)(int))dlsym(RTLD_DEFAULT, "PyGILState_Release");
    python.collect = (long (*)(void))dlsym(RTLD_DEFAULT, "PyGC_Collect");
}

/* Returns the bytes by which a request would exceed the limit of a tally now. */
static int64_t lacking(Tally *tally, int64_t size) {
    int64_t held = atomic_load(&tally->given) + atomic_load(&tally->before);
    return held + size - atomic_load(&tally->limit);
}

/* Frees objects that only cycles hold and what Python code can do without, and counts memory from
 * before again. In threads that Python knows: others may be waited for by one that holds its lock.
 * Returns whether it ran. */
static _Bool free_in_python(Tally *tally, int64_t size) {
    if (collecting || !python.is_initialized || !python.thread_state || !python.take_lock ||
        !python.give_lock || !python.collect || !python.is_initialized() || !python.thread_state())
        return 0;
    collecting = 1;
    int lock = python.take_lock();
    python.collect();
    BeforeRefusal free_more = atomic_load(&before_refusals);
    if (free_more)
        free_more(lacking(tally, size));
    python.give_lock(lock);
    collecting = 0;
    return 1;
}

/* Lets the owner of an exceeded limit free something. Returns whether it did. */
static _Bool make_room(Tally *tally, int64_t size) {
    MakeRoom ask = atomic_load(&tally->make_room);
    if (!ask || making_room)
        return 0;
    making_room = 1;
    int freed = ask(lacking(tally, size));
    making_room = 0;
    return freed != 0;
}

/* Writes a size as people read it. */
static const char *in_units(char text[32], int64_t size) {
    if (size >= 1 << 20)
        snprintf(text, 32, "%.2f MiB", (double)size / (1 << 20));
    else
        snprintf(text, 32, "%.2f KiB", (double)size / (1 << 10));
    return text;
}

/* Throws c10's exception for a request that was taken back. */
static void refuse(Tally *tally, int64_t size) {
    char message[800], limit_text[32], size_text[32], held_text[32], try_text[32];
    int64_t held = atomic_load(&tally->given) + atomic_load(&tally->before);
    int64_t limit = atomic_load(&tally->limit);
    /* Later requests are not known: as much again, or an eighth of what is held. */
    int64_t try = held + size + (size > held / 8 ? size : held / 8);
    try += atomic_load(&tally->coming);
    int64_t advised = atomic_load(&tally->advised);
    if (advised >= held + size)
        try = advised;
    atomic_store(&tally->refused_size, size);
    atomic_store(&tally->held_then, held);
    atomic_fetch_add(&tally->refusals, 1);
    snprintf(message, sizeof message,
             "tightfit: the budget of %lld bytes (%s) has no room for a further %lld bytes "
             "(%s): %lld bytes (%s) are held. %s. Try a budget of %lld bytes (%s), "
             "or hold less%s; tightfit.unfit ends the limit of a model",
             (long long)limit, in_units(limit_text, limit), (long long)size,
             in_units(size_text, size), (long long)held, in_units(held_text, held),
             atomic_load(&tally->origin), (long long)try, in_units(try_text, try),
             atomic_load(&tally->ways));
    if (fail)
        fail("allocate", "tightfit", 0, message);
    previous_allocate(previous, (size_t)1 << 62); /* no memory is that large: c10 throws */
}

/* ------------------------------------------------------------------ recording */

typedef struct {
    int64_t lower, upper, size, thread; /* half-open lifetime in ticks; upper 0: still alive;
                                       thread -1: of a region that was interrupted */
} Lifetime;

static pthread_mutex_t record_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool recording;
static uint64_t recording_number; /* which recording, from 1; guards against ids of older ones */
static Lifetime *lifetimes;
static int64_t lifetime_count, lifetime_capacity, tick, foreign_frees, thread_count;
static __thread uint64_t thread_recording;
static __thread int64_t thread_number;

static int64_t number_of_thread(void) {
    if (thread_recording != recording_number) {
        thread_recording = recording_number;
        thread_number = thread_count++;
    }
    return thread_number;
}

/* Returns the record of a new block, 0 if it cannot be recorded. */
static uint64_t record_allocation(uint64_t size) {
    uint64_t record = 0;
    pthread_mutex_lock(&record_lock);
    if (atomic_load(&recording)) {
        if (lifetime_count == lifetime_capacity) {
            int64_t capacity = lifetime_capacity ? 2 * lifetime_capacity : 4096;
            Lifetime *larger = realloc(lifetimes, (size_t)capacity * sizeof(Lifetime));
            if (larger) {
                lifetimes = larger;
                lifetime_capacity = capacity;
            }
        }
        if (lifetime_count < lifetime_capacity) {
            int64_t thread = replay_is_interrupted() ? -1 : number_of_thread();
            lifetimes[lifetime_count] = (Lifetime){tick++, 0, (int64_t)size, thread};
            record = (recording_number << 40) + (uint64_t)lifetime_count++;
        } else {
            atomic_fetch_add(&lost_blocks, 1);
        }
    }
    pthread_mutex_unlock(&record_lock);
    return record;
}

static void record_free(uint64_t record) {
    pthread_mutex_lock(&record_lock);
    if (atomic_load(&recording)) {
        if (record >> 40 == recording_number)
            lifetimes[record & ((1ull << 40) - 1)].upper = tick++;
        else
            foreign_frees++;
    }
    pthread_mutex_unlock(&record_lock);
}

/* ------------------------------------------------------------------ the two replaced slots */

static void hook_free(void *address);

/* `entry` is set where the block is in an arena. */
static inline DataPtr take(size_t size, Entry **entry) {
    void *planned = replay_take(size, entry);
    if (planned)
        return (DataPtr){planned, hook_free, planned, 0, -1};
    return previous_allocate(previous, size); /* a C++ exception may pass through here */
}

static inline void forget(const Entry *entry) {
    if (entry->address)
        tally_free(entry->stamp, rounded(entry->size));
    if (atomic_load_explicit(&recording, memory_order_relaxed))
        record_free(entry->record);
}

static void hook_free(void *address) {
    Placed placed;
    if (!address)
        return;
    if (replay_find(address, &placed)) {
        if (!placed.is_own)
            count_free(placed.entry->size);
        forget(placed.entry);
        replay_give(&placed);
        return;
    }
    Entry entry = table_remove(address);
    if (entry.address)
        count_free(entry.size);
    forget(&entry);
    previous_free(address);
}

/* Counts a block in every tally, asking for room where a limit would be exceeded; returns the
 * tally that refuses it all the same. */
static inline Tally *tallied(uint64_t stamp, int64_t size) {
    Tally *exceeded = tally_allocation(stamp, size);
    while (exceeded && make_room(exceeded, size))
        exceeded = tally_allocation(stamp, size);
    if (exceeded && free_in_python(exceeded, size))
        exceeded = tally_allocation(stamp, size);
    return exceeded;
}

static DataPtr hook_allocate(void *self, size_t size) {
    (void)self;
    Entry *planned = NULL;
    DataPtr block = take(size, &planned);
    block.deleter = hook_free;
    if (!block.data)
        return block;
    uint64_t stamp = atomic_load_explicit(&tallies_opened, memory_order_acquire);
    Entry entry = {(uintptr_t)block.data, size, stamp, 0};
    Tally *exceeded = tallied(stamp, rounded(size));
    if (exceeded) {
        Placed placed;
        if (planned) {
            *planned = entry;
            if (replay_find(block.data, &placed))
                replay_give(&placed);
        } else {
            previous_free(block.data);
        }
        refuse(exceeded, rounded(size));
    }
    if (atomic_load_explicit(&recording, memory_order_relaxed))
        entry.record = record_allocation(size);
    if (planned) {
        *planned = entry;
        note_peak(atomic_load(&live_bytes));
    } else if (table_insert(entry)) {
        note_peak(atomic_fetch_add(&live_bytes, rounded(size)) + rounded(size));
    } else {
        tally_free(entry.stamp, rounded(size));
        atomic_fetch_add(&lost_blocks, 1);
    }
    return block;
}

static Deleter hook_raw_deleter(const void *self) {
    (void)self;
    return hook_free;
}

/* ------------------------------------------------------------------ fork */

static void lock_all(void) {
    pthread_mutex_lock(&slots_lock);
    pthread_mutex_lock(&tallies_lock);
    pthread_mutex_lock(&record_lock);
    for (int shard = 0; shard < SHARDS; shard++)
        hold(&shards[shard]);
}

static void unlock_all(void) {
    for (int shard = SHARDS - 1; shard >= 0; shard--)
        release_shard(&shards[shard]);
    pthread_mutex_unlock(&record_lock);
    pthread_mutex_unlock(&tallies_lock);
    pthread_mutex_unlock(&slots_lock);
}

/* A worker of a data loader keeps no budget of its parent's. */
static void keep_to_no_limit(void) {
    for (int slot = 0; slot < TALLIES; slot++) {
        atomic_store(&tallies[slot].make_room, NULL);
        atomic_store(&tallies[slot].limit, INT64_MAX);
    }
}

static void stop_recording_in_child(void) {
    atomic_store(&recording, 0);
    keep_to_no_limit();
    replay_stop_in_child();
    unlock_all();
}

/* ------------------------------------------------------------------ installation */

/* The interface must be the one described above; nothing is called before the table's name and
 * length have been compared. Returns NULL, or a difference. */
static const char *check_interface(void *library) {
    void **table = *(void ***)previous;
    Dl_info where;
    const ElfW(Sym) *symbol = NULL;
    if (!dladdr1(table, &where, (void **)&symbol, RTLD_DL_SYMENT) || !where.dli_sname || !symbol)
        return "the registered CPU allocator has no named vtable: another library replaced it";
    if (strcmp(where.dli_sname, "_ZTVN3c1019DefaultCPUAllocatorE"))
        return "the registered CPU allocator is not c10's default one: another library replaced it";
    if (symbol->st_size != (SLOTS_BEFORE + SLOTS) * sizeof(void *))
        return "the vtable of c10's CPU allocator has another length";
    if ((void *)(table - SLOTS_BEFORE) != dlsym(library, where.dli_sname))
        return "the CPU allocator does not point to the start of its vtable";

    Deleter deleter = ((RawDeleter)table[SLOT_RAW_DELETER])(previous);
    if (!deleter)
        return "c10's CPU allocator offers no raw deleter";
    DataPtr block = ((Allocate)table[SLOT_ALLOCATE])(previous, GRANULARITY);
    if (!block.data || block.deleter != deleter || block.context != block.data ||
        block.device_type != 0)
        return "c10's DataPtr has another layout"; /* the block leaks: its deleter is unknown */
    const char *problem = NULL;
    char text[8] = "tightfi";
    ((CopyData)table[SLOT_COPY_DATA])(previous, block.data, text, sizeof text);
    if (memcmp(block.data, text, sizeof text))
        problem = "copy_data of c10's CPU allocator does not copy";
    else if (!((IsSimple)table[SLOT_IS_SIMPLE])(previous, &block))
        problem = "is_simple_data_ptr of c10's CPU allocator denies its own block";
    deleter(block.data);
    return problem;
}

/* Installs the hook once per process. `library` is the path of libc10. Returns NULL, or why the
 * hook cannot be installed (nothing has been changed then). */
EXPORT const char *tightfit_hook_install(const char *library) {
    if (installed)
        return NULL;
    void *handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    if (!handle)
        return "libc10 is not loaded from torch's folder";
    void *(*get)(void) = (void *(*)(void))dlsym(handle, "_ZN3c1015GetCPUAllocatorEv");
    void (*set)(void *, uint8_t) =
        (void (*)(void *, uint8_t))dlsym(handle, "_ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh");
    if (!get || !set)
        return "libc10 exports no GetCPUAllocator or SetCPUAllocator";
    fail = (void (*)(const char *, const char *, uint32_t, const char *))dlsym(
        handle, "_ZN3c106detail14torchCheckFailEPKcS2_jS2_");
    find_python();
    previous = get();
    const char *problem = check_interface(handle);
    if (problem)
        return problem;

    void **table = *(void ***)previous;
    previous_allocate = (Allocate)table[SLOT_ALLOCATE];
    previous_free = ((RawDeleter)table[SLOT_RAW_DELETER])(previous);
    memcpy(own_table, table - SLOTS_BEFORE, sizeof own_table);
    own_table[SLOTS_BEFORE + SLOT_ALLOCATE] = (void *)hook_allocate;
    own_table[SLOTS_BEFORE + SLOT_RAW_DELETER] = (void *)hook_raw_deleter;
    own_allocator.table = own_table + SLOTS_BEFORE;
    for (int slot = 0; slot < TALLIES; slot++)
        atomic_store(&tallies[slot].opened, NEVER);
    if (pthread_atfork(lock_all, unlock_all, stop_recording_in_child))
        return "pthread_atfork failed";
    set(&own_allocator, 200);
    if (get() != (void *)&own_allocator)
        return "c10 refused the hook: an allocator of higher priority is registered";
    *(void ***)previous = own_table + SLOTS_BEFORE; /* torch.UntypedStorage(n) asks it by name */
    installed = 1;
    return NULL;
}

/* ------------------------------------------------------------------ called by Python */

EXPORT int tightfit_hook_version(void) { return VERSION; }
/* -1: blocks were lost, and counts are incomplete. */
EXPORT int64_t tightfit_hook_live_bytes(void) {
    return atomic_load(&lost_blocks) ? -1 : all_live_bytes();
}

/* Opens a peak that starts from bytes live now. Returns its slot, or -1 if all are open. */
EXPORT int tightfit_hook_peak_open(void) {
    pthread_mutex_lock(&slots_lock);
    int end = atomic_load(&slots_end), slot = 0;
    while (slot < end && atomic_load(&peak_bytes[slot]) != INT64_MAX)
        slot++;
    if (slot == PEAK_SLOTS) {
        slot = -1;
    } else {
        atomic_store(&peak_bytes[slot], all_live_bytes());
        if (slot == end)
            atomic_store(&slots_end, end + 1);
    }
    pthread_mutex_unlock(&slots_lock);
    return slot;
}

EXPORT void tightfit_hook_peak_close(int slot) {
    pthread_mutex_lock(&slots_lock);
    atomic_store(&peak_bytes[slot], INT64_MAX);
    int end = atomic_load(&slots_end);
    while (end && atomic_load(&peak_bytes[end - 1]) == INT64_MAX)
        end--;
    atomic_store(&slots_end, end);
    pthread_mutex_unlock(&slots_lock);
}

EXPORT int64_t tightfit_hook_peak_bytes(int slot) { return atomic_load(&peak_bytes[slot]); }
/* Returns the peak, and lets it start again. */
EXPORT int64_t tightfit_hook_peak_take(int slot) {
    return atomic_exchange(&peak_bytes[slot], all_live_bytes());
}
EXPORT void tightfit_hook_peak_reset(int slot) {
    atomic_store(&peak_bytes[slot], all_live_bytes());
}

/* Opens a tally without a limit. Returns its slot, or -1 if all are open. */
EXPORT int tightfit_hook_tally_open(void) {
    pthread_mutex_lock(&tallies_lock);
    int end = atomic_load(&tallies_end), slot = 0;
    while (slot < end && atomic_load(&tallies[slot].opened) != NEVER)
        slot++;
    if (slot == TALLIES) {
        slot = -1;
    } else {
        Tally *tally = &tallies[slot];
        atomic_store(&tally->given, 0);
        atomic_store(&tally->peak, 0);
        atomic_store(&tally->before, 0);
        atomic_store(&tally->limit, INT64_MAX);
        atomic_store(&tally->make_room, NULL);
        atomic_store(&tally->refusals, 0);
        atomic_store(&tally->advised, 0);
        atomic_store(&tally->coming, 0);
        atomic_store(&tally->origin, "");
        atomic_store(&tally->ways, "");
        atomic_store(&tally->opened, atomic_fetch_add(&tallies_opened, 1) + 1);
        if (slot == end)
            atomic_store(&tallies_end, end + 1);
    }
    pthread_mutex_unlock(&tallies_lock);
    return slot;
}

EXPORT void tightfit_hook_tally_close(int slot) {
    pthread_mutex_lock(&tallies_lock);
    atomic_store(&tallies[slot].limit, INT64_MAX);
    atomic_store(&tallies[slot].make_room, NULL);
    atomic_store(&tallies[slot].opened, NEVER);
    int end = atomic_load(&tallies_end);
    while (end && atomic_load(&tallies[end - 1].opened) == NEVER)
        end--;
    atomic_store(&tallies_end, end);
    pthread_mutex_unlock(&tallies_lock);
}

EXPORT int64_t tightfit_hook_tally_allocated_bytes(int slot) {
    return atomic_load(&tallies[slot].given);
}

/* Returns the most that was allocated at once and lets the peak start again from now. */
EXPORT int64_t tightfit_hook_tally_take_peak(int slot) {
    return atomic_exchange(&tallies[slot].peak, atomic_load(&tallies[slot].given));
}

/* What the error of a refused request says; the texts must live as long as the tally. */
EXPORT void tightfit_hook_tally_describe(int slot, int64_t budget, int64_t coming,
                                     const char *origin, const char *ways) {
    atomic_store(&tallies[slot].advised, budget);
    atomic_store(&tallies[slot].coming, coming);
    atomic_store(&tallies[slot].origin, origin);
    atomic_store(&tallies[slot].ways, ways);
}

/* Limits bytes allocated, plus `before` bytes. */
EXPORT void tightfit_hook_tally_set_limit(int slot, int64_t limit, int64_t before) {
    atomic_store(&tallies[slot].before, before);
    atomic_store(&tallies[slot].limit, limit);
}

/* Lets a function make room where the limit would be exceeded, before a request is refused. */
EXPORT void tightfit_hook_tally_make_room(int slot, MakeRoom function) {
    atomic_store(&tallies[slot].make_room, function);
}

/* Calls a function before a request is refused, in a thread that Python knows and with its lock. */
EXPORT void tightfit_hook_before_refusals(BeforeRefusal function) {
    atomic_store(&before_refusals, function);
}

/* Returns how often a request was refused; of the last its size and bytes held then. */
EXPORT int64_t tightfit_hook_tally_refusals(int slot, int64_t *size, int64_t *held) {
    *size = atomic_load(&tallies[slot].refused_size);
    *held = atomic_load(&tallies[slot].held_then);
    return atomic_load(&tallies[slot].refusals);
}

/* Returns the rounded bytes of those of some distinct blocks that a tally counts. */
EXPORT int64_t tightfit_hook_tally_counted_bytes(int slot, const uintptr_t *blocks, int64_t count) {
    uint64_t opened = atomic_load(&tallies[slot].opened);
    int64_t bytes = 0;
    for (int64_t index = 0; index < count; index++) {
        Placed placed;
        Entry found = replay_find((void *)blocks[index], &placed) ? *placed.entry
                                                                 : table_find(blocks[index]);
        if (found.address && found.stamp >= opened)
            bytes += rounded(found.size);
    }
    return bytes;
}

/* Blocks that could not be counted or recorded because memory for the tables ran out. */
EXPORT int64_t tightfit_hook_lost_blocks(void) { return atomic_load(&lost_blocks); }

/* Starts a recording; the calling thread gets number 0. Returns 0, or 1 if one is running. */
EXPORT int tightfit_hook_record_begin(void) {
    pthread_mutex_lock(&record_lock);
    _Bool busy = atomic_load(&recording);
    if (!busy) {
        recording_number++;
        lifetime_count = foreign_frees = thread_count = 0;
        tick = 1;
        number_of_thread();
        atomic_store(&recording, 1);
    }
    pthread_mutex_unlock(&record_lock);
    return busy;
}

/* Ends the recording and returns its number of lifetimes. The last tick is the end of every
 * block that is still alive. */
EXPORT int64_t tightfit_hook_record_end(int64_t *last_tick, int64_t *frees_of_older_blocks) {
    pthread_mutex_lock(&record_lock);
    atomic_store(&recording, 0);
    *last_tick = tick;
    *frees_of_older_blocks = foreign_frees;
    int64_t count = lifetime_count;
    pthread_mutex_unlock(&record_lock);
    return count;
}

/* Copies the lifetimes of the ended recording: rows of lower, upper, size, thread. */
EXPORT void tightfit_hook_record_read(int64_t *rows) {
    pthread_mutex_lock(&record_lock);
    memcpy(rows, lifetimes, (size_t)lifetime_count * sizeof(Lifetime));
    pthread_mutex_unlock(&record_lock);
}
