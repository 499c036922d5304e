/* Calls of the hook into the replay layer (replay.c). */
#ifndef TIGHTFIT_REPLAY_H
#define TIGHTFIT_REPLAY_H

#include <stddef.h>
#include <stdint.h>

#define GRANULARITY 64 /* c10 aligns CPU memory to 64 bytes; each request is rounded up to it */

/* The hook's record of a block that was allocated. */
typedef struct {
    uintptr_t address; /* 0: none */
    uint64_t size;
    uint64_t stamp; /* how many tallies had been opened when it was allocated */
    uint64_t record; /* 0, or (recording << 40) + index of its lifetime */
} Entry;

/* A block in an arena: its record, and the place of that. */
typedef struct {
    Entry *entry;
    void *arena, *plan;
    int64_t request, place;
    _Bool is_own; /* of the thread that is inside: `replay_give` counts it out */
} Placed;

/* Memory at its planned place, and where to write its record; NULL: the ordinary allocator
 * serves this request. */
void *replay_take(size_t size, Entry **entry);

/* Whether a living block is in an arena, and which it is. Any thread, any time. */
_Bool replay_find(void *address, Placed *placed);

/* Gives a block back: its place may be taken again at once. */
void replay_give(const Placed *placed);

/* Bytes of the blocks in arenas, less those that other threads than the one inside gave
 * back. */
int64_t replay_live_bytes(void);

static inline int64_t rounded(uint64_t size) {
    return (int64_t)((size + GRANULARITY - 1) & ~(uint64_t)(GRANULARITY - 1));
}

/* Whether the calling thread's requests belong to no step for now. */
_Bool replay_is_interrupted(void);

/* A forked child takes nothing from the arena of its parent. */
void replay_stop_in_child(void);

#endif
