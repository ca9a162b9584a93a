#define _GNU_SOURCE
#include "lane.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "copy.h"
#include "crc32.h"
#include "queue.h"
#include "transfer.h"

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* What a chain is for: one thread goes from step to step, where as many operations would each wake up a thread, and
 * whoever waits for it. */
static int64_t perform_chain(struct op *chain)
{
    for (struct op *step = chain->steps; step; step = step->next) {
        lane_perform(step);
        step->ended_at = now();
        chain->steps_ended++;
        if (step->result < 0)
            return step->result; /* what comes after it must not happen: a flush would vouch for a write that failed */
    }
    return 0;
}

void lane_perform(struct op *op)
{
    switch (op->kind) {
    case OP_WRITE:
        op->result = transfer_write(op->fd, op->data, op->size, op->offset);
        return;
    case OP_READ:
        op->result = transfer_read(op->fd, op->data, op->size, op->offset);
        return;
    case OP_FLUSH:
        op->result = transfer_flush(op->fd);
        return;
    case OP_GATHER:
        op->result = copy_gather(op->segments, op->segment_count, op->data, op->size, &op->checksum);
        return;
    case OP_SCATTER:
        op->result = copy_scatter(op->segments, op->segment_count, op->data, op->size, op->checksum);
        return;
    case OP_CHECKSUM:
        op->checksum = crc32_update(0, op->data, op->size);
        op->result = 0;
        return;
    case OP_CHAIN:
        op->result = perform_chain(op);
        return;
    case OP_UNLOCK:
        op->result = transfer_unlock(op->fd);
        return;
    case OP_LINKED:
        op->result = transfer_linked(op->fd);
        return;
    }
    op->result = -ENOSYS;
}

static void *work(void *argument)
{
    struct lane *lane = argument;

    pthread_mutex_lock(&lane->mutex);
    while (lane->waiting.first || !lane->stopping) {
        struct op *op = op_list_pop(&lane->waiting);
        if (!op) {
            lane->idle++;
            pthread_cond_wait(&lane->work_or_stop, &lane->mutex);
            lane->idle--;
            continue;
        }
        pthread_mutex_unlock(&lane->mutex);
        lane_perform(op);
        queue_complete(lane->queue, op); /* it may be freed from here on */
        pthread_mutex_lock(&lane->mutex);
    }
    pthread_mutex_unlock(&lane->mutex);
    return NULL;
}

int lane_thread(pthread_t *thread, const char *name, unsigned number, void *(*body)(void *), void *argument)
{
    sigset_t blocked, before;
    char title[32]; /* the kernel keeps 15 characters, enough for three digits */

    /* The process's signals belong to threads that know what to do about them; new threads inherit the mask. A fault of
     * the thread's own (a mapped file that was cut off, as a source) is told to whoever handles it: blocked, it kills. */
    static const int faults[] = {SIGBUS, SIGFPE, SIGILL, SIGSEGV};
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(&blocked, faults[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    const int error = -pthread_create(thread, NULL, body, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error == 0) {
        snprintf(title, sizeof title, "pccheck-%s-%u", name, number % 1000);
        pthread_setname_np(*thread, title);
    }
    return error;
}

int lane_start(struct lane *lane, struct queue *queue, const char *name, unsigned threads)
{
    int error = 0;

    lane->queue = queue;
    pthread_mutex_init(&lane->mutex, NULL);
    pthread_cond_init(&lane->work_or_stop, NULL);
    lane->threads = calloc(threads, sizeof *lane->threads);
    if (!lane->threads)
        return -ENOMEM;
    while (lane->started < threads && error == 0) {
        error = lane_thread(&lane->threads[lane->started], name, lane->started, work, lane);
        if (error == 0)
            lane->started++;
    }
    return error;
}

void lane_commit(struct lane *lane)
{
    if (!lane->staged.first)
        return;
    pthread_mutex_lock(&lane->mutex);
    size_t wake = lane->staged.count < lane->idle ? lane->staged.count : lane->idle;
    op_list_append(&lane->waiting, &lane->staged);
    pthread_mutex_unlock(&lane->mutex);
    while (wake-- > 0)
        pthread_cond_signal(&lane->work_or_stop);
}

bool lane_cancel(struct lane *lane, uint64_t token)
{
    pthread_mutex_lock(&lane->mutex);
    struct op *op = op_list_remove(&lane->waiting, token);
    pthread_mutex_unlock(&lane->mutex);
    if (!op)
        return false;
    queue_complete_cancelled(lane->queue, op);
    return true;
}

void lane_stop(struct lane *lane)
{
    struct op_list unstarted;
    struct op *op;

    pthread_mutex_lock(&lane->mutex);
    lane->stopping = true;
    unstarted = lane->waiting;
    lane->waiting = (struct op_list){0};
    pthread_cond_broadcast(&lane->work_or_stop);
    pthread_mutex_unlock(&lane->mutex);

    while ((op = op_list_pop(&unstarted)) != NULL)
        queue_complete_cancelled(lane->queue, op);
    for (unsigned i = 0; i < lane->started; i++)
        pthread_join(lane->threads[i], NULL);
    pthread_cond_destroy(&lane->work_or_stop);
    pthread_mutex_destroy(&lane->mutex);
    free(lane->threads);
}
