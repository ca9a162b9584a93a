/* SPDX-License-Identifier: Apache-2.0 */
/* A queue of operations: batches go in, completions come out, and an eventfd tells when. Any thread may call these
 * functions at any time, except queue_free() and queue_disown(). */
#ifndef PCCHECK_QUEUE_H
#define PCCHECK_QUEUE_H

#include "operation.h"

#define QUEUE_MOST_THREADS 256

struct queue;

/* Start a queue: 0 and *queue, or -errno. `io_threads` (1 to QUEUE_MOST_THREADS) perform writes, reads, flushes and
 * chains; `copy_threads` (as many) perform gathers, scatters and checksums. So neither waits behind the other. */
int queue_open(unsigned io_threads, unsigned copy_threads, struct queue **queue);

/* Readable while completions wait to be reaped; written once per transition from none to some. -1 once closed. */
int queue_fd(const struct queue *queue);

/* Submit a batch, and empty the list. A closed queue reports all of it as cancelled. */
void queue_submit(struct queue *queue, struct op_list *batch);

/* Cancel an operation that has not started: true if there was one; it completes with -ECANCELED. */
bool queue_cancel(struct queue *queue, uint64_t token);

/* Return all completions, oldest first. Does not wait for a queue_close() that runs, and still works after it. */
struct op_list queue_reap(struct queue *queue);

/* Put back completions that could not be delivered: the next queue_reap() returns them first. */
void queue_unreap(struct queue *queue, struct op_list *completions);

/* Cancel what has not started, wait for what has, end the threads, close the eventfd. Every caller waits for that. */
void queue_close(struct queue *queue);

/* Free a closed queue. Completions that nobody reaped stay with the owners of their memory. */
void queue_free(struct queue *queue);

/* In a forked child, which has neither the threads nor the locks they may hold: close the child's copy of the eventfd.
 * Nothing else may be called there. */
void queue_disown(struct queue *queue);

/* For the threads: report that an operation has ended, its result set. */
void queue_complete(struct queue *queue, struct op *op);

/* The same with -ECANCELED as its result. */
void queue_complete_cancelled(struct queue *queue, struct op *op);

#endif
