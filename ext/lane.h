/* A lane: threads that perform operations, first come, first served, and report each to a queue. */
#ifndef PCCHECK_LANE_H
#define PCCHECK_LANE_H

#include <pthread.h>

#include "engine.h"

struct lane {
    struct queue *queue;
    struct op_list staged; /* taken, and not committed; touched by the submitting thread only */
    pthread_t *threads;
    unsigned started;

    pthread_mutex_t mutex; /* guards all below */
    pthread_cond_t work_or_stop;
    struct op_list waiting;
    unsigned idle;
    bool stopping;
};

/* Start the threads, 0, or -errno. lane_stop() undoes it in either case. */
int lane_start(struct lane *lane, struct queue *queue, const char *name, unsigned threads);

/* Take an operation, which may start at the next lane_commit(). */
static inline void lane_stage(struct lane *lane, struct op *op)
{
    op_list_push(&lane->staged, op);
}

/* Perform an operation at once, on the calling thread: its result. */
void lane_perform(struct op *op);

/* Start a thread named pccheck-<name>-<number> that handles no signals but for faults of its own: 0, or -errno. */
int lane_thread(pthread_t *thread, const char *name, unsigned number, void *(*body)(void *), void *argument);

/* Let what was staged start. */
void lane_commit(struct lane *lane);

/* Report an operation that has not started as cancelled; false where there is none of that token. */
bool lane_cancel(struct lane *lane, uint64_t token);

/* Report what has not started as cancelled, wait for what has, end the threads. */
void lane_stop(struct lane *lane);

#endif
