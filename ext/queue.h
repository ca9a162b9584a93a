/* A queue of operations: batches go in, completions come out, one eventfd says when. Any thread may call anything but
 * queue_free() and queue_disown() at any time. */
#ifndef PCCHECK_QUEUE_H
#define PCCHECK_QUEUE_H

#include "engine.h"

/* The engine of that name, or NULL. */
const struct engine *queue_engine(const char *name);

/* 0 and *queue, or -errno. */
int queue_open(const struct engine *engine, const struct engine_options *options, struct queue **queue);

/* Readable while completions wait to be reaped; written once per transition from none to some. -1 once closed. */
int queue_fd(const struct queue *queue);

/* Submit a batch, and empty the list. A closed queue reports all of it as cancelled. */
void queue_submit(struct queue *queue, struct op_list *batch);

/* Cancel an operation that has not started: true where there was one; it completes with -ECANCELED. */
bool queue_cancel(struct queue *queue, uint64_t token);

/* Take all completions, oldest first. Does not wait for a queue_close() that runs, and still works after it. */
struct op_list queue_reap(struct queue *queue);

/* Put completions back that could not be delivered: the next queue_reap() returns them first. */
void queue_unreap(struct queue *queue, struct op_list *completions);

/* Cancel what has not started, wait for what has, stop the engine, close the eventfd. Every caller waits for that. */
void queue_close(struct queue *queue);

/* Free a closed queue. Completions that nobody reaped stay with those who own their memory. */
void queue_free(struct queue *queue);

/* In a forked child, where the engine's threads do not exist and its locks may be held for ever: close the child's
 * copies of descriptors. Nothing else may be called there. */
void queue_disown(struct queue *queue);

/* For engines: report that an operation has ended, its result set. From any thread. */
void queue_complete(struct queue *queue, struct op *op);

/* The same with -ECANCELED as its result. */
void queue_complete_cancelled(struct queue *queue, struct op *op);

#endif
