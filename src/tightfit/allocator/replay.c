/* Replays layouts: the k-th request of a step gets its planned place in an arena.
 *
 * An arena is one mapping of memory; its plans say for each request of a step how large it was
 * and its offset (-1: outside, with the ordinary allocator). A thread enters an arena with
 * `begin` and leaves it with `end`; only its own requests in between are looked up. Blocks may be
 * freed in any order, by any thread, after the step and after the arena was closed.
 *
 * No address is ever handed out twice, whatever the program does:
 *   - While a step went as planned ("exact"), every earlier request of the step is in its place
 *     or was freed, and nothing else is in the arena. The bytes of request k can then only be held
 *     by the last earlier request planned over each of them: its predecessors. If one of them is
 *     alive, the request is served outside, and the step is no longer exact.
 *   - A request that is larger than planned is served outside, and the step is no longer exact.
 *     A smaller one is inside its place.
 *   - In a step that is not exact, or that began with blocks alive, a request gets its place only
 *     if no block that is alive in the arena shares a byte with it.
 * A flag per request says whether it is alive. It is cleared last when a block is freed, and read
 * before its bytes are handed out again.
 *
 * A step that goes astray, because many bytes of it are served outside, would hold the arena's
 * pages and as much again. From then on pages are given back as their blocks are freed, in the
 * arena and by the ordinary allocator, so that the process holds live memory only.
 */
#define _GNU_SOURCE
#include "replay.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define ARENAS 64
#define PLANS 32
#define NO_REQUEST (-1)
#define PAGE 4096
#define STRAY 32 /* one part in so many of an arena's height is served outside: a step is astray */
#define LARGE (256 << 10) /* bytes from which on blocks are given back at once while it is */

typedef struct {
    int64_t count;
    int64_t *sizes, *offsets; /* bytes of each request, and its place; -1: outside */
    int64_t *wanted; /* the largest request seen where one was larger than planned, else 0 */
    int64_t *first_predecessor; /* of request k: predecessors[first[k]] to [first[k + 1]] */
    int32_t *predecessors;
    atomic_uchar *is_alive;
    Entry *entries; /* of each request that is alive: the hook's record */
    int64_t *place; /* of each request: where its offset stands in the two tables */
    int64_t *offset_at; /* open addressing by offset; -1: empty */
    atomic_int *owner_at; /* the request that is alive at that offset, or NO_REQUEST */
    int64_t capacity; /* of the two tables, a power of two */
    atomic_int_fast64_t taken; /* places taken less those given back by the thread inside */
    atomic_int_fast64_t given; /* how often one was given back by another thread */
} Plan;

enum { REQUESTS, HITS, OUTSIDE, LARGER, LATE, OVER, STATISTICS };

typedef struct {
    char *base;
    int64_t height;
    int slot;
    Plan *plans[PLANS];
    atomic_int plan_count;
    atomic_bool is_closed; /* unmapped once nothing is alive in it and no thread inside */
    atomic_bool is_entered;
    atomic_bool is_astray;
    /* the rest belongs to the thread inside */
    Plan *current;
    int64_t next;
    _Bool is_exact;
    int64_t fallen_bytes; /* of the requests that fell back in the current step */
    int64_t statistics[STATISTICS]; /* of the current step */
} Arena;

static Arena *_Atomic arenas[ARENAS]; /* those that are mapped */
static atomic_int arenas_end;
static atomic_int_fast64_t live_bytes[ARENAS]; /* of the blocks that the thread inside has taken
                                                  and not given back; no other thread writes it, so
                                                  that no locked instruction is needed */
static pthread_mutex_t arenas_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool poisons;

static __thread Arena *inside; /* the arena this thread is in */
static __thread int interruptions;

/* ------------------------------------------------------------------ looking up */

static inline uint64_t hash_of(int64_t offset) {
    return ((uint64_t)offset / GRANULARITY) * 0x9E3779B97F4A7C15u >> 20;
}

/* Where an offset stands in a plan's tables, or where it would be entered. */
static inline int64_t find(const Plan *plan, int64_t offset) {
    int64_t slot = (int64_t)(hash_of(offset) & (uint64_t)(plan->capacity - 1));
    while (plan->offset_at[slot] != offset && plan->offset_at[slot] != -1)
        slot = (slot + 1) & (plan->capacity - 1);
    return slot;
}

static inline _Bool is_alive(Plan *plan, int64_t request) {
    return atomic_load_explicit(&plan->is_alive[request], memory_order_acquire);
}

/* How many requests of a plan are in their places. */
static inline int64_t alive_of(const Plan *plan) {
    int64_t given = atomic_load_explicit(&plan->given, memory_order_acquire);
    return atomic_load_explicit(&plan->taken, memory_order_relaxed) - given;
}

/* How many blocks are alive in an arena. */
static int64_t alive_in(const Arena *arena) {
    int plans = atomic_load_explicit(&arena->plan_count, memory_order_acquire);
    int64_t alive = 0;
    for (int number = 0; number < plans; number++)
        alive += alive_of(arena->plans[number]);
    return alive;
}

static _Bool is_occupied(Arena *arena, int64_t offset, int64_t size) {
    int plans = atomic_load(&arena->plan_count);
    for (int number = 0; number < plans; number++) {
        Plan *plan = arena->plans[number];
        if (!alive_of(plan))
            continue;
        for (int64_t other = 0; other < plan->count; other++)
            if (is_alive(plan, other) && plan->offsets[other] < offset + size &&
                offset < plan->offsets[other] + plan->sizes[other])
                return 1;
    }
    return 0;
}

/* ------------------------------------------------------------------ giving pages back */

typedef struct {
    int64_t begin, end;
} Range;

static int by_begin(const void *a, const void *b) {
    const Range *left = a, *right = b;
    return (left->begin > right->begin) - (left->begin < right->begin);
}

/* Gives back the whole pages that no living block touches. */
static void drop_free_pages(Arena *arena) {
    int64_t most = 1, count = 0;
    int plans = atomic_load(&arena->plan_count);
    for (int number = 0; number < plans; number++)
        most += arena->plans[number]->count;
    Range *living = calloc((size_t)most, sizeof *living);
    if (!living)
        return;
    for (int number = 0; number < plans; number++)
        for (int64_t request = 0; request < arena->plans[number]->count; request++)
            if (is_alive(arena->plans[number], request)) {
                int64_t begin = arena->plans[number]->offsets[request];
                living[count++] = (Range){begin, begin + arena->plans[number]->sizes[request]};
            }
    living[count++] = (Range){arena->height, arena->height};
    qsort(living, (size_t)count, sizeof *living, by_begin);
    int64_t free_from = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t first = (free_from + PAGE - 1) / PAGE * PAGE, last = living[i].begin / PAGE * PAGE;
        if (first < last)
            madvise(arena->base + first, (size_t)(last - first), MADV_DONTNEED);
        if (living[i].end > free_from)
            free_from = living[i].end;
    }
    free(living);
}

/* ------------------------------------------------------------------ taking and giving back */

static inline _Bool has_predecessor(Plan *plan, int64_t request) {
    for (int64_t i = plan->first_predecessor[request]; i < plan->first_predecessor[request + 1]; i++)
        if (is_alive(plan, plan->predecessors[i]))
            return 1;
    return 0;
}

/* Whether a request can have its planned place; if not, why not is counted. */
static inline _Bool may_lie(Arena *arena, Plan *plan, int64_t request, size_t size) {
    if (request >= plan->count) {
        arena->statistics[OVER]++;
        return 0;
    }
    if (plan->offsets[request] < 0) {
        arena->statistics[OUTSIDE]++;
        if ((int64_t)size > plan->sizes[request] && (int64_t)size > plan->wanted[request])
            plan->wanted[request] = (int64_t)size;
        return 0;
    }
    if ((int64_t)size > plan->sizes[request]) {
        arena->statistics[LARGER]++;
        if ((int64_t)size > plan->wanted[request])
            plan->wanted[request] = (int64_t)size;
        arena->is_exact = 0;
        return 0;
    }
    if (arena->is_exact ? has_predecessor(plan, request)
                        : is_occupied(arena, plan->offsets[request], plan->sizes[request])) {
        arena->statistics[LATE]++;
        arena->is_exact = 0;
        return 0;
    }
    return 1;
}

/* Counts a request that falls back; notices when the step is another one than was planned. */
static void fall_back(Arena *arena, int64_t size) {
    arena->fallen_bytes += size;
    if (arena->fallen_bytes <= arena->height / STRAY || atomic_load(&arena->is_astray))
        return;
    atomic_store(&arena->is_astray, 1);
    drop_free_pages(arena);
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, LARGE);
    mallopt(M_TRIM_THRESHOLD, LARGE);
#endif
}

/* Gives back the whole pages of a block that is about to be freed. */
static void drop_pages_of(Arena *arena, const Plan *plan, int64_t request) {
    int64_t begin = plan->offsets[request], end = begin + plan->sizes[request];
    begin = (begin + PAGE - 1) / PAGE * PAGE, end = end / PAGE * PAGE;
    if (begin < end)
        madvise(arena->base + begin, (size_t)(end - begin), MADV_DONTNEED);
}

static void leave(Arena *arena) {
    inside = NULL;
    atomic_store_explicit(&arena->is_entered, 0, memory_order_release);
}

static inline void add_live(const Arena *arena, int64_t bytes) {
    int64_t live = atomic_load_explicit(&live_bytes[arena->slot], memory_order_relaxed);
    atomic_store_explicit(&live_bytes[arena->slot], live + bytes, memory_order_relaxed);
}

void *replay_take(size_t size, Entry **entry) {
    Arena *arena = inside;
    if (!arena || interruptions || !size)
        return NULL;
    if (atomic_load_explicit(&arena->is_closed, memory_order_relaxed)) {
        leave(arena);
        return NULL;
    }
    Plan *plan = arena->current;
    int64_t request = arena->next++;
    if (!may_lie(arena, plan, request, size)) {
        if (request >= plan->count || plan->offsets[request] >= 0)
            fall_back(arena, (int64_t)size);
        return NULL;
    }
    arena->statistics[HITS]++;
    int64_t taken = atomic_load_explicit(&plan->taken, memory_order_relaxed);
    atomic_store_explicit(&plan->taken, taken + 1, memory_order_relaxed);
    atomic_store_explicit(&plan->owner_at[plan->place[request]], (int)request,
                          memory_order_relaxed);
    atomic_store_explicit(&plan->is_alive[request], 1, memory_order_release);
    char *address = arena->base + plan->offsets[request];
    *entry = &plan->entries[request];
    add_live(arena, rounded(size));
    if (atomic_load_explicit(&poisons, memory_order_relaxed))
        memset(address, 0xFF, (size_t)plan->sizes[request]);
    return address;
}

int64_t replay_live_bytes(void) {
    int end = atomic_load_explicit(&arenas_end, memory_order_acquire);
    int64_t live = 0;
    for (int slot = 0; slot < end; slot++)
        live += atomic_load_explicit(&live_bytes[slot], memory_order_relaxed);
    return live;
}

_Bool replay_find(void *address, Placed *placed) {
    int end = atomic_load_explicit(&arenas_end, memory_order_acquire);
    for (int slot = 0; slot < end; slot++) {
        Arena *arena = atomic_load_explicit(&arenas[slot], memory_order_acquire);
        if (!arena || (char *)address < arena->base ||
            (char *)address >= arena->base + arena->height)
            continue;
        int64_t offset = (char *)address - arena->base;
        int plans = atomic_load_explicit(&arena->plan_count, memory_order_acquire);
        for (int number = 0; number < plans; number++) {
            Plan *plan = arena->plans[number];
            int64_t place = find(plan, offset);
            if (plan->offset_at[place] == -1)
                continue;
            int request = atomic_load_explicit(&plan->owner_at[place], memory_order_relaxed);
            if (request == NO_REQUEST)
                continue;
            *placed = (Placed){&plan->entries[request], arena, plan, request, place, inside == arena};
            return 1;
        }
        return 0;
    }
    return 0;
}

void replay_give(const Placed *placed) {
    Arena *arena = placed->arena;
    Plan *plan = placed->plan;
    if (placed->is_own) /* before another request may take the place */
        add_live(arena, -rounded(placed->entry->size));
    if (atomic_load_explicit(&poisons, memory_order_relaxed))
        memset(arena->base + plan->offsets[placed->request], 0xFF,
               (size_t)plan->sizes[placed->request]);
    if (atomic_load_explicit(&arena->is_astray, memory_order_relaxed) &&
        plan->sizes[placed->request] >= LARGE)
        drop_pages_of(arena, plan, placed->request);
    atomic_store_explicit(&plan->owner_at[placed->place], NO_REQUEST, memory_order_relaxed);
    atomic_store_explicit(&plan->is_alive[placed->request], 0, memory_order_release);
    if (placed->is_own) {
        int64_t taken = atomic_load_explicit(&plan->taken, memory_order_relaxed);
        atomic_store_explicit(&plan->taken, taken - 1, memory_order_relaxed);
    } else {
        atomic_fetch_add_explicit(&plan->given, 1, memory_order_release);
    }
}

_Bool replay_is_interrupted(void) { return interruptions > 0; }

void replay_stop_in_child(void) {
    inside = NULL;
    interruptions = 0;
    pthread_mutex_init(&arenas_lock, NULL);
}

/* ------------------------------------------------------------------ arenas and plans */

static void free_plan(Plan *plan) {
    if (!plan)
        return;
    free(plan->sizes);
    free(plan->offsets);
    free(plan->wanted);
    free(plan->first_predecessor);
    free(plan->predecessors);
    free(plan->is_alive);
    free(plan->entries);
    free(plan->place);
    free(plan->offset_at);
    free(plan->owner_at);
    free(plan);
}

static void unmap(int slot) {
    Arena *arena = atomic_exchange(&arenas[slot], NULL);
    int plans = atomic_load(&arena->plan_count);
    for (int number = 0; number < plans; number++)
        free_plan(arena->plans[number]);
    munmap(arena->base, (size_t)arena->height);
    free(arena);
}

/* Unmaps closed arenas in which nothing is alive. Called with the lock. */
static void unmap_closed(void) {
    int end = atomic_load(&arenas_end);
    for (int slot = 0; slot < end; slot++) {
        Arena *arena = atomic_load(&arenas[slot]);
        if (arena && atomic_load(&arena->is_closed) && !atomic_load(&arena->is_entered) &&
            !alive_in(arena))
            unmap(slot);
    }
}

/* Maps an arena. Returns its number; -1: there are too many; -2: there is no memory. */
EXPORT int tightfit_replay_open(int64_t height) {
    pthread_mutex_lock(&arenas_lock);
    unmap_closed();
    int end = atomic_load(&arenas_end), slot = 0;
    while (slot < end && atomic_load(&arenas[slot]))
        slot++;
    if (slot == ARENAS) {
        pthread_mutex_unlock(&arenas_lock);
        return -1;
    }
    Arena *arena = calloc(1, sizeof *arena);
    void *base = mmap(NULL, (size_t)height, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                      -1, 0);
    if (!arena || base == MAP_FAILED) {
        free(arena);
        if (base != MAP_FAILED)
            munmap(base, (size_t)height);
        pthread_mutex_unlock(&arenas_lock);
        return -2;
    }
    arena->base = base;
    arena->height = height;
    arena->slot = slot;
    atomic_store(&arenas[slot], arena);
    if (slot == end)
        atomic_store(&arenas_end, end + 1);
    pthread_mutex_unlock(&arenas_lock);
    return slot;
}

/* Gives the pages back: those that no living block touches now, the others once nothing is alive
 * in the arena. A thread that is inside leaves at its next request. */
EXPORT void tightfit_replay_close(int number) {
    pthread_mutex_lock(&arenas_lock);
    Arena *arena = atomic_load(&arenas[number]);
    atomic_store(&arena->is_closed, 1);
    if (!atomic_load(&arena->is_entered) &&
        alive_in(arena))
        drop_free_pages(arena);
    unmap_closed();
    pthread_mutex_unlock(&arenas_lock);
}

/* Returns the bytes of the pages of an arena that are in memory. */
EXPORT int64_t tightfit_replay_resident(int number) {
    enum { AT_ONCE = 4096 }; /* pages that are asked about in one call */
    Arena *arena = atomic_load(&arenas[number]);
    unsigned char pages[AT_ONCE];
    int64_t resident = 0;
    for (int64_t begin = 0; begin < arena->height; begin += (int64_t)AT_ONCE * PAGE) {
        int64_t left = arena->height - begin, most = (int64_t)AT_ONCE * PAGE;
        int64_t size = left < most ? left : most;
        if (mincore(arena->base + begin, (size_t)size, pages))
            continue;
        for (int64_t page = 0; page * PAGE < size; page++)
            resident += (pages[page] & 1) * (int64_t)PAGE;
    }
    return resident;
}

/* Gives back the pages that no living block touches, of an arena that no thread is in. */
EXPORT void tightfit_replay_drop_pages(int number) {
    pthread_mutex_lock(&arenas_lock);
    Arena *arena = atomic_load(&arenas[number]);
    if (arena && !atomic_load(&arena->is_entered))
        drop_free_pages(arena);
    pthread_mutex_unlock(&arenas_lock);
}

static void *copy(const void *source, size_t size) {
    void *target = malloc(size ? size : 1);
    if (target)
        memcpy(target, source, size);
    return target;
}

/* Enters the distinct offsets of a plan into its tables. */
static void enter_offsets(Plan *plan) {
    for (int64_t slot = 0; slot < plan->capacity; slot++) {
        plan->offset_at[slot] = -1;
        atomic_init(&plan->owner_at[slot], NO_REQUEST);
    }
    for (int64_t request = 0; request < plan->count; request++) {
        plan->place[request] = NO_REQUEST;
        if (plan->offsets[request] < 0)
            continue;
        plan->place[request] = find(plan, plan->offsets[request]);
        plan->offset_at[plan->place[request]] = plan->offsets[request];
    }
}

/* Adds a plan to an arena that holds it. Returns its number; -1: there are too many; -2: there is
 * no memory. */
EXPORT int tightfit_replay_add(int number, int64_t count, const int64_t *sizes,
                               const int64_t *offsets, const int64_t *first_predecessor,
                               const int32_t *predecessors) {
    Arena *arena = atomic_load(&arenas[number]);
    int plans = atomic_load(&arena->plan_count);
    if (plans == PLANS)
        return -1;
    Plan *plan = calloc(1, sizeof *plan);
    if (!plan)
        return -2;
    size_t rows = (size_t)count;
    plan->count = count;
    for (plan->capacity = 16; plan->capacity < 4 * count; plan->capacity *= 2) {
    }
    plan->sizes = copy(sizes, rows * sizeof *sizes);
    plan->offsets = copy(offsets, rows * sizeof *offsets);
    plan->first_predecessor = copy(first_predecessor, (rows + 1) * sizeof *first_predecessor);
    plan->predecessors =
        copy(predecessors, (size_t)first_predecessor[count] * sizeof *predecessors);
    plan->wanted = calloc(rows + 1, sizeof *plan->wanted);
    plan->is_alive = calloc(rows + 1, sizeof *plan->is_alive);
    plan->entries = calloc(rows + 1, sizeof *plan->entries);
    plan->place = calloc(rows + 1, sizeof *plan->place);
    plan->offset_at = calloc((size_t)plan->capacity, sizeof *plan->offset_at);
    plan->owner_at = calloc((size_t)plan->capacity, sizeof *plan->owner_at);
    if (!plan->sizes || !plan->offsets || !plan->first_predecessor || !plan->predecessors ||
        !plan->wanted || !plan->is_alive || !plan->entries || !plan->place || !plan->offset_at || !plan->owner_at) {
        free_plan(plan);
        return -2;
    }
    enter_offsets(plan);
    arena->plans[plans] = plan;
    atomic_store(&arena->plan_count, plans + 1);
    return plans;
}

/* ------------------------------------------------------------------ steps */

/* Enters an arena with the calling thread. Returns 0, or 1 if the thread is in one already or
 * another thread in this one. */
EXPORT int tightfit_replay_begin(int number, int plan) {
    Arena *arena = atomic_load(&arenas[number]);
    if (inside && atomic_load(&inside->is_closed))
        leave(inside);
    if (inside || atomic_load(&arena->is_entered))
        return 1;
    arena->current = arena->plans[plan];
    arena->next = 0;
    arena->is_exact = !alive_in(arena);
    arena->fallen_bytes = 0;
    atomic_store(&arena->is_astray, 0);
    memset(arena->statistics, 0, sizeof arena->statistics);
    atomic_store(&arena->is_entered, 1);
    inside = arena;
    return 0;
}

/* Leaves the arena; its counts since `begin` are copied to `statistics`. */
EXPORT void tightfit_replay_end(int64_t *statistics) {
    Arena *arena = inside;
    memset(statistics, 0, sizeof arena->statistics);
    if (!arena)
        return;
    arena->statistics[REQUESTS] = arena->next;
    memcpy(statistics, arena->statistics, sizeof arena->statistics);
    leave(arena);
}

/* Requests between these two belong to no step: they differ from step to step. */
EXPORT void tightfit_replay_interrupt(void) { interruptions++; }
EXPORT void tightfit_replay_resume(void) { interruptions -= interruptions > 0; }

EXPORT int64_t tightfit_replay_alive(int number) {
    return alive_in(atomic_load(&arenas[number]));
}

/* Copies, for each request of a plan, the largest size seen that was larger than planned, or 0. */
EXPORT void tightfit_replay_wanted(int number, int plan, int64_t *sizes) {
    const Plan *wanting = atomic_load(&arenas[number])->plans[plan];
    memcpy(sizes, wanting->wanted, (size_t)wanting->count * sizeof *sizes);
}

/* Fills blocks of arenas with 0xFF when they are taken and given back: code that reads memory
 * that is not its own gets NaNs. For tests. */
EXPORT void tightfit_replay_poison(int on) { atomic_store(&poisons, (_Bool)on); }
