/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "threads.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "copy.h"
#include "crc32.h"
#include "guard.h"
#include "queue.h"
#include "transfer.h"

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void perform(struct op *op);

/* One thread performs all steps of a chain: as separate operations, each would wake up a thread and then its waiter. */
static int64_t perform_chain(struct op *chain)
{
    for (struct op *step = chain->steps; step; step = step->next) {
        perform(step);
        step->ended_at = now();
        chain->steps_ended++;
        if (step->result < 0)
            return step->result; /* the steps behind it must not happen: a record would name what was never written */
    }
    return 0;
}

static void op_checksum(void *argument)
{
    struct op *op = argument;
    crc32_pieces(op->data, op->size, op->sums);
}

static void perform(struct op *op)
{
    int64_t fault;
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
        op->result = guard_run(op_gather, op);
        return;
    case OP_SCATTER:
        fault = guard_run(op_scatter, op);
        if (fault < 0)
            op->result = fault;
        return;
    case OP_CHECKSUM:
        op->result = guard_run(op_checksum, op);
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
    struct threads *threads = argument;

    pthread_mutex_lock(&threads->mutex);
    while (threads->waiting.first || !threads->stopping) {
        struct op *op = op_list_pop(&threads->waiting);
        if (!op) {
            threads->idle++;
            pthread_cond_wait(&threads->work_or_stop, &threads->mutex);
            threads->idle--;
            continue;
        }
        pthread_mutex_unlock(&threads->mutex);
        perform(op);
        queue_complete(threads->queue, op); /* it may be freed from here on */
        pthread_mutex_lock(&threads->mutex);
    }
    pthread_mutex_unlock(&threads->mutex);
    return NULL;
}

int threads_start(struct threads *threads, struct queue *queue, const char *name, unsigned count)
{
    /* Signals of the process belong to threads that can handle them; new threads inherit the mask. The exception are
     * faults of the thread itself (SIGBUS from a truncated mapped file): blocked, they kill without a handler. */
    static const int faults[] = {SIGBUS, SIGFPE, SIGILL, SIGSEGV};
    sigset_t blocked, before;
    int error = 0;

    threads->queue = queue;
    pthread_mutex_init(&threads->mutex, NULL);
    pthread_cond_init(&threads->work_or_stop, NULL);
    threads->started = calloc(count, sizeof *threads->started);
    if (!threads->started)
        return -ENOMEM;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(&blocked, faults[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    while (threads->count < count) {
        pthread_t *thread = &threads->started[threads->count];
        char title[32]; /* the kernel keeps 15 characters, enough for three digits */
        error = -pthread_create(thread, NULL, work, threads);
        if (error < 0)
            break;
        snprintf(title, sizeof title, "pccheck-%s-%u", name, threads->count % 1000);
        pthread_setname_np(*thread, title);
        threads->count++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

void threads_commit(struct threads *threads)
{
    if (!threads->staged.first)
        return;
    pthread_mutex_lock(&threads->mutex);
    size_t wake = threads->staged.count < threads->idle ? threads->staged.count : threads->idle;
    op_list_append(&threads->waiting, &threads->staged);
    pthread_mutex_unlock(&threads->mutex);
    while (wake-- > 0)
        pthread_cond_signal(&threads->work_or_stop);
}

bool threads_cancel(struct threads *threads, uint64_t token)
{
    pthread_mutex_lock(&threads->mutex);
    struct op *op = op_list_remove(&threads->waiting, token);
    pthread_mutex_unlock(&threads->mutex);
    if (!op)
        return false;
    queue_complete_cancelled(threads->queue, op);
    return true;
}

void threads_stop(struct threads *threads)
{
    pthread_mutex_lock(&threads->mutex);
    threads->stopping = true;
    struct op_list unstarted = threads->waiting;
    threads->waiting = (struct op_list){0};
    pthread_cond_broadcast(&threads->work_or_stop);
    pthread_mutex_unlock(&threads->mutex);

    for (struct op *op; (op = op_list_pop(&unstarted)) != NULL;)
        queue_complete_cancelled(threads->queue, op);
    for (unsigned i = 0; i < threads->count; i++)
        pthread_join(threads->started[i], NULL);
    pthread_cond_destroy(&threads->work_or_stop);
    pthread_mutex_destroy(&threads->mutex);
    free(threads->started);
}
