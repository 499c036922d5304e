/* What the hook asks of the replay layer (replay.c). */
#ifndef TIGHTFIT_REPLAY_H
#define TIGHTFIT_REPLAY_H

#include <stddef.h>

/* Memory at its planned place; NULL: the ordinary allocator serves this request. */
void *replay_take(size_t size);

/* Whether a block lay in an arena; it is given back then. Any thread, any time. */
_Bool replay_give(void *address);

/* Whether the calling thread's requests are nobody's for now. */
_Bool replay_is_interrupted(void);

/* A forked child takes nothing from the arena of its parent. */
void replay_stop_in_child(void);

#endif
