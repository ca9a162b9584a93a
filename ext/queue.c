#include "queue.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

static const struct engine *const engines[] = {&threads_engine, &uring_engine};

struct queue {
    const struct engine *engine;

    pthread_mutex_t engine_mutex; /* guards these two; taken before the other one */
    void *state;
    bool closed;

    pthread_mutex_t mutex; /* guards these, and is never held while anything waits */
    int eventfd;
    struct op_list completions;
};

const struct engine *queue_engine(const char *name)
{
    for (size_t i = 0; i < sizeof engines / sizeof *engines; i++) {
        if (strcmp(engines[i]->name, name) == 0)
            return engines[i];
    }
    return NULL;
}

int queue_open(const struct engine *engine, const struct engine_options *options, struct queue **opened)
{
    int error = -ENOMEM;
    struct queue *queue = calloc(1, sizeof *queue);
    if (!queue)
        return error;
    queue->engine = engine;
    pthread_mutex_init(&queue->engine_mutex, NULL);
    pthread_mutex_init(&queue->mutex, NULL);
    queue->eventfd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (queue->eventfd < 0) {
        error = -errno;
        goto fail;
    }
    error = engine->open(queue, options, &queue->state);
    if (error < 0)
        goto fail;
    *opened = queue;
    return 0;

fail:
    close_fd(&queue->eventfd);
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
    pthread_mutex_lock(&queue->engine_mutex);
    for (struct op *op; (op = op_list_pop(batch)) != NULL;) {
        if (queue->closed)
            queue_complete_cancelled(queue, op);
        else
            queue->engine->submit(queue->state, op);
    }
    if (!queue->closed)
        queue->engine->commit(queue->state);
    pthread_mutex_unlock(&queue->engine_mutex);
}

bool queue_cancel(struct queue *queue, uint64_t token)
{
    pthread_mutex_lock(&queue->engine_mutex);
    const bool found = !queue->closed && queue->engine->cancel(queue->state, token);
    pthread_mutex_unlock(&queue->engine_mutex);
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
    pthread_mutex_lock(&queue->engine_mutex);
    if (!queue->closed) {
        queue->closed = true;
        queue->engine->close(queue->state);
        pthread_mutex_lock(&queue->mutex);
        close_fd(&queue->eventfd);
        pthread_mutex_unlock(&queue->mutex);
    }
    pthread_mutex_unlock(&queue->engine_mutex);
}

void queue_free(struct queue *queue)
{
    pthread_mutex_destroy(&queue->mutex);
    pthread_mutex_destroy(&queue->engine_mutex);
    free(queue->state);
    free(queue);
}

void queue_disown(struct queue *queue)
{
    close_fd(&queue->eventfd);
    if (queue->engine->disown)
        queue->engine->disown(queue->state);
}
