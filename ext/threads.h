/* SPDX-License-Identifier: Apache-2.0 */
/* A group of threads that perform operations, first come, first served, and report each to a queue. */
#ifndef PCCHECK_THREADS_H
#define PCCHECK_THREADS_H

#include <pthread.h>

#include "operation.h"

struct queue;

struct threads {
    struct queue *queue;
    struct op_list staged; /* submitted and not committed; touched by the submitting thread only */
    pthread_t *started;
    unsigned count;

    pthread_mutex_t mutex; /* guards all below */
    pthread_cond_t work_or_stop;
    struct op_list waiting;
    unsigned idle;
    bool stopping;
};

/* Start `count` threads named pccheck-<name>-<number>: 0, or -errno. threads_stop() undoes it in either case. */
int threads_start(struct threads *threads, struct queue *queue, const char *name, unsigned count);

/* Accept an operation; it may start at the next threads_commit(). */
static inline void threads_stage(struct threads *threads, struct op *op)
{
    op_list_push(&threads->staged, op);
}

/* Let the staged operations start. */
void threads_commit(struct threads *threads);

/* Report an operation that has not started as cancelled; false if none of that token waits. */
bool threads_cancel(struct threads *threads, uint64_t token);

/* Report the operations that have not started as cancelled, wait for those that have, end the threads. */
void threads_stop(struct threads *threads);

#endif
