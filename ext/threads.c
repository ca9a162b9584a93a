/* The engine that works everywhere: two pools of threads, one for storage and one for memory. */
#define _GNU_SOURCE

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "copy.h"
#include "crc32.h"
#include "queue.h"
#include "transfer.h"

struct lane {
    struct queue *queue;
    struct op_list staged; /* submitted, and not committed; touched by the submitting thread only */
    pthread_t *threads;
    unsigned started;

    pthread_mutex_t mutex; /* guards all below */
    pthread_cond_t work_or_stop;
    struct op_list waiting;
    unsigned idle;
    bool stopping;
};

enum { LANE_IO, LANE_COPY, LANES };

struct pools {
    struct lane lanes[LANES];
};

static void perform(struct op *op)
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
        perform(op);
        queue_complete(lane->queue, op); /* it may be freed from here on */
        pthread_mutex_lock(&lane->mutex);
    }
    pthread_mutex_unlock(&lane->mutex);
    return NULL;
}

static void lane_stop(struct lane *lane)
{
    struct op_list unstarted;
    struct op *op;

    pthread_mutex_lock(&lane->mutex);
    lane->stopping = true;
    unstarted = lane->waiting;
    lane->waiting = (struct op_list){0};
    pthread_cond_broadcast(&lane->work_or_stop);
    pthread_mutex_unlock(&lane->mutex);

    while ((op = op_list_pop(&unstarted)) != NULL) {
        op->result = -ECANCELED;
        queue_complete(lane->queue, op);
    }
    for (unsigned i = 0; i < lane->started; i++)
        pthread_join(lane->threads[i], NULL);
    pthread_cond_destroy(&lane->work_or_stop);
    pthread_mutex_destroy(&lane->mutex);
    free(lane->threads);
}

/* 0, or -errno; lane_stop() undoes it in either case. */
static int lane_start(struct lane *lane, struct queue *queue, const char *name, unsigned threads)
{
    sigset_t all, before;
    int error = 0;

    lane->queue = queue;
    pthread_mutex_init(&lane->mutex, NULL);
    pthread_cond_init(&lane->work_or_stop, NULL);
    lane->threads = calloc(threads, sizeof *lane->threads);
    if (!lane->threads)
        return -ENOMEM;

    /* The process's signals belong to threads that know what to do about them; new threads inherit the mask. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (lane->started < threads && error == 0) {
        error = -pthread_create(&lane->threads[lane->started], NULL, work, lane);
        if (error == 0) {
            char title[32]; /* the kernel keeps 15 characters, enough for three digits */
            snprintf(title, sizeof title, "pccheck-%s-%u", name, lane->started % 1000);
            pthread_setname_np(lane->threads[lane->started++], title);
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

static void pools_close(void *state)
{
    struct pools *pools = state;
    for (int i = 0; i < LANES; i++)
        lane_stop(&pools->lanes[i]);
    free(pools);
}

static int pools_open(struct queue *queue, const struct engine_options *options, void **state)
{
    struct pools *pools = calloc(1, sizeof *pools);
    if (!pools)
        return -ENOMEM;
    const int io = lane_start(&pools->lanes[LANE_IO], queue, "io", options->io_threads);
    const int copy = lane_start(&pools->lanes[LANE_COPY], queue, "mem", options->copy_threads);
    if (io < 0 || copy < 0) {
        pools_close(pools);
        return io < 0 ? io : copy;
    }
    *state = pools;
    return 0;
}

static enum engine_verdict pools_submit(void *state, struct op *op)
{
    struct pools *pools = state;
    const bool io = op->kind == OP_WRITE || op->kind == OP_READ || op->kind == OP_FLUSH;
    op_list_push(&pools->lanes[io ? LANE_IO : LANE_COPY].staged, op);
    return ENGINE_QUEUED;
}

static void lane_commit(struct lane *lane)
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

static void pools_commit(void *state)
{
    struct pools *pools = state;
    for (int i = 0; i < LANES; i++)
        lane_commit(&pools->lanes[i]);
}

static bool pools_cancel(void *state, uint64_t token)
{
    struct pools *pools = state;
    for (int i = 0; i < LANES; i++) {
        struct lane *lane = &pools->lanes[i];
        pthread_mutex_lock(&lane->mutex);
        struct op *op = op_list_remove(&lane->waiting, token);
        pthread_mutex_unlock(&lane->mutex);
        if (op) {
            op->result = -ECANCELED;
            queue_complete(lane->queue, op);
            return true;
        }
    }
    return false;
}

const struct engine threads_engine = {
    .name = "threads",
    .open = pools_open,
    .submit = pools_submit,
    .commit = pools_commit,
    .cancel = pools_cancel,
    .collect = NULL,
    .close = pools_close,
};
