#include "queue.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static const struct engine *const engines[] = {&threads_engine};

struct queue {
    const struct engine *engine;

    pthread_mutex_t engine_mutex; /* guards these three; taken before the other one */
    void *state;
    struct op_list backlog; /* what the engine was too busy to take */
    bool closed;

    pthread_mutex_t mutex; /* guards these, and is never held while anything waits */
    bool closing;
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
    if (queue->eventfd >= 0)
        close(queue->eventfd);
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

static void cancel_all(struct queue *queue, struct op_list *list)
{
    for (struct op *op; (op = op_list_pop(list)) != NULL;) {
        op->result = -ECANCELED;
        queue_complete(queue, op);
    }
}

/* Under the engine's mutex: offer it the backlog, in order, until it is busy again. */
static void offer(struct queue *queue)
{
    while (queue->backlog.first) {
        /* Popped first: from the moment it is taken the operation belongs to the engine, its link included. */
        struct op *op = op_list_pop(&queue->backlog);
        const enum engine_verdict verdict = queue->engine->submit(queue->state, op);
        if (verdict == ENGINE_COMPLETED) {
            queue_complete(queue, op);
        } else if (verdict == ENGINE_BUSY) {
            op_list_push_front(&queue->backlog, op);
            break;
        }
    }
    queue->engine->commit(queue->state);
}

void queue_submit(struct queue *queue, struct op_list *batch)
{
    pthread_mutex_lock(&queue->engine_mutex);
    const bool behind_others = queue->backlog.first != NULL;
    op_list_append(&queue->backlog, batch);
    if (queue->closed)
        cancel_all(queue, &queue->backlog);
    else if (!behind_others)
        offer(queue);
    pthread_mutex_unlock(&queue->engine_mutex);
}

bool queue_cancel(struct queue *queue, uint64_t token)
{
    bool found = false;

    pthread_mutex_lock(&queue->engine_mutex);
    struct op *op = op_list_remove(&queue->backlog, token);
    if (op) {
        op->result = -ECANCELED;
        queue_complete(queue, op);
        found = true;
    } else if (!queue->closed) {
        found = queue->engine->cancel(queue->state, token);
    }
    pthread_mutex_unlock(&queue->engine_mutex);
    return found;
}

/* Take the engine's mutex, except from a queue_close() that holds it until everything has ended: that one collects and
 * cancels by itself what is left. */
static bool lock_unless_closing(struct queue *queue)
{
    if (pthread_mutex_trylock(&queue->engine_mutex) == 0)
        return true;
    pthread_mutex_lock(&queue->mutex);
    const bool closing = queue->closing;
    pthread_mutex_unlock(&queue->mutex);
    if (!closing)
        pthread_mutex_lock(&queue->engine_mutex);
    return !closing;
}

struct op_list queue_reap(struct queue *queue)
{
    const bool engine_is_ours = lock_unless_closing(queue);
    struct op_list completions;
    eventfd_t count;

    if (engine_is_ours && !queue->closed && queue->engine->collect)
        queue->engine->collect(queue->state);

    pthread_mutex_lock(&queue->mutex);
    if (queue->eventfd >= 0)
        (void)!eventfd_read(queue->eventfd, &count); /* EAGAIN where nothing had ended */
    completions = queue->completions;
    queue->completions = (struct op_list){0};
    pthread_mutex_unlock(&queue->mutex);

    if (engine_is_ours) {
        if (!queue->closed && queue->backlog.first && completions.first)
            offer(queue);
        pthread_mutex_unlock(&queue->engine_mutex);
    }
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
    pthread_mutex_lock(&queue->mutex);
    queue->closing = true;
    pthread_mutex_unlock(&queue->mutex);

    pthread_mutex_lock(&queue->engine_mutex);
    if (!queue->closed) {
        queue->closed = true;
        cancel_all(queue, &queue->backlog);
        queue->engine->close(queue->state);
        pthread_mutex_lock(&queue->mutex);
        close(queue->eventfd);
        queue->eventfd = -1;
        pthread_mutex_unlock(&queue->mutex);
    }
    pthread_mutex_unlock(&queue->engine_mutex);
}

void queue_free(struct queue *queue)
{
    pthread_mutex_destroy(&queue->mutex);
    pthread_mutex_destroy(&queue->engine_mutex);
    free(queue);
}

void queue_disown(struct queue *queue)
{
    if (queue->eventfd >= 0)
        close(queue->eventfd);
    queue->eventfd = -1;
}
