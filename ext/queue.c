/* SPDX-License-Identifier: Apache-2.0 */
#include "queue.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "threads.h"

struct queue {
    pthread_mutex_t submit_mutex; /* guards these, and is taken before the other one */
    struct threads io, copy;
    bool closed;

    pthread_mutex_t mutex; /* guards these, and is never held while anything waits */
    int eventfd;
    struct op_list completions;
};

/* Forget the descriptor, then close it: a child forked in between then does not close another one of that number. */
static void close_eventfd(struct queue *queue)
{
    const int closing = queue->eventfd;
    queue->eventfd = -1;
    if (closing >= 0)
        close(closing);
}

int queue_open(unsigned io_threads, unsigned copy_threads, struct queue **opened)
{
    int error;
    struct queue *queue = calloc(1, sizeof *queue);
    if (!queue)
        return -ENOMEM;
    pthread_mutex_init(&queue->submit_mutex, NULL);
    pthread_mutex_init(&queue->mutex, NULL);
    queue->eventfd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (queue->eventfd < 0) {
        error = -errno;
        goto fail;
    }
    error = threads_start(&queue->io, queue, "io", io_threads);
    if (error < 0)
        goto fail_io;
    error = threads_start(&queue->copy, queue, "mem", copy_threads);
    if (error < 0)
        goto fail_copy;
    *opened = queue;
    return 0;

fail_copy:
    threads_stop(&queue->copy);
fail_io:
    threads_stop(&queue->io);
    close_eventfd(queue);
fail:
    queue_free(queue);
    return error;
}

int queue_fd(const struct queue *queue)
{
    return queue->eventfd;
}

/* Under the mutex. The counter cannot overflow (one write per transition), so that the write cannot fail. */
static void signal_readable(struct queue *queue)
{
    if (queue->eventfd >= 0)
        eventfd_write(queue->eventfd, 1);
}

void queue_complete(struct queue *queue, struct op *op)
{
    pthread_mutex_lock(&queue->mutex);
    op_list_push(&queue->completions, op);
    if (queue->completions.count == 1)
        signal_readable(queue);
    pthread_mutex_unlock(&queue->mutex);
}

void queue_complete_cancelled(struct queue *queue, struct op *op)
{
    op->result = -ECANCELED;
    queue_complete(queue, op);
}

void queue_submit(struct queue *queue, struct op_list *batch)
{
    pthread_mutex_lock(&queue->submit_mutex);
    for (struct op *op; (op = op_list_pop(batch)) != NULL;) {
        if (queue->closed)
            queue_complete_cancelled(queue, op);
        else
            threads_stage(op_is_io(op) ? &queue->io : &queue->copy, op);
    }
    if (!queue->closed) {
        threads_commit(&queue->io);
        threads_commit(&queue->copy);
    }
    pthread_mutex_unlock(&queue->submit_mutex);
}

bool queue_cancel(struct queue *queue, uint64_t token)
{
    pthread_mutex_lock(&queue->submit_mutex);
    const bool found = !queue->closed && (threads_cancel(&queue->io, token) || threads_cancel(&queue->copy, token));
    pthread_mutex_unlock(&queue->submit_mutex);
    return found;
}

struct op_list queue_reap(struct queue *queue)
{
    eventfd_t count;

    pthread_mutex_lock(&queue->mutex);
    if (queue->eventfd >= 0)
        (void)!eventfd_read(queue->eventfd, &count); /* EAGAIN where nothing had ended */
    const struct op_list completions = queue->completions;
    queue->completions = (struct op_list){0};
    pthread_mutex_unlock(&queue->mutex);
    return completions;
}

void queue_unreap(struct queue *queue, struct op_list *completions)
{
    pthread_mutex_lock(&queue->mutex);
    op_list_append(completions, &queue->completions);
    op_list_append(&queue->completions, completions);
    if (queue->completions.first)
        signal_readable(queue);
    pthread_mutex_unlock(&queue->mutex);
}

void queue_close(struct queue *queue)
{
    pthread_mutex_lock(&queue->submit_mutex);
    if (!queue->closed) {
        queue->closed = true;
        threads_stop(&queue->io);
        threads_stop(&queue->copy);
        pthread_mutex_lock(&queue->mutex);
        close_eventfd(queue);
        pthread_mutex_unlock(&queue->mutex);
    }
    pthread_mutex_unlock(&queue->submit_mutex);
}

void queue_free(struct queue *queue)
{
    pthread_mutex_destroy(&queue->mutex);
    pthread_mutex_destroy(&queue->submit_mutex);
    free(queue);
}

void queue_disown(struct queue *queue)
{
    close_eventfd(queue);
}
