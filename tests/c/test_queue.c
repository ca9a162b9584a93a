/* The queue over an engine whose operations end when the test says so. */
#include "check.h"
#include "queue.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>

struct held {
    struct queue *queue;
    unsigned commits;
    bool disowned;
    struct op_list waiting;
    struct op_list inside;
};

static struct held *held;

static int held_open(struct queue *queue, const struct engine_options *options, void **state)
{
    if (options->io_threads == 0)
        return -EPERM;
    CHECK(queue_fd(queue) >= 0);
    held = *state = calloc(1, sizeof *held);
    CHECK(held);
    held->queue = queue;
    return 0;
}

static void held_submit(void *state, struct op *op)
{
    CHECK(state == held);
    op_list_push(op->fd < 0 ? &held->waiting : &held->inside, op);
}

static void held_commit(void *state)
{
    CHECK(state == held);
    held->commits++;
}

static bool held_cancel(void *state, uint64_t token)
{
    CHECK(state == held);
    struct op *op = op_list_remove(&held->waiting, token);
    if (op)
        queue_complete_cancelled(held->queue, op);
    return op != NULL;
}

static void held_close(void *state)
{
    CHECK(state == held);
    for (struct op *op; (op = op_list_pop(&held->waiting)) != NULL;)
        queue_complete_cancelled(held->queue, op);
    for (struct op *op; (op = op_list_pop(&held->inside)) != NULL;)
        queue_complete(held->queue, op);
}

static void held_disown(void *state)
{
    CHECK(state == held);
    held->disowned = true;
}

static const struct engine held_engine = {
    .name = "held",
    .open = held_open,
    .submit = held_submit,
    .commit = held_commit,
    .cancel = held_cancel,
    .close = held_close,
    .disown = held_disown,
};
static const struct engine_options options = {1, 1};

static struct queue *open_queue(void)
{
    struct queue *queue;
    CHECK(queue_open(&held_engine, &options, &queue) == 0);
    return queue;
}

static void finish_oldest(void)
{
    struct op *op = op_list_pop(&held->inside);
    CHECK(op);
    op->result = 1;
    queue_complete(held->queue, op);
}

static bool readable(const struct queue *queue)
{
    struct pollfd p = {queue_fd(queue), POLLIN, 0};
    return poll(&p, 1, 0) == 1;
}

/* Those with a descriptor start at once. */
static struct op_list list_of(struct op *ops, size_t count, int fd)
{
    struct op_list list = {0};
    for (size_t i = 0; i < count; i++) {
        ops[i] = (struct op){.token = i, .kind = OP_FLUSH, .fd = fd};
        op_list_push(&list, &ops[i]);
    }
    return list;
}

static void test_completions_come_in_order_and_signal_once(void)
{
    struct queue *queue = open_queue();
    struct op ops[3];
    struct op_list batch = list_of(ops, 3, 0);
    queue_submit(queue, &batch);
    CHECK(!batch.first && held->inside.count == 3 && held->commits == 1 && !readable(queue));
    for (int i = 0; i < 3; i++)
        finish_oldest();
    CHECK(readable(queue));
    struct op_list reaped = queue_reap(queue);
    CHECK(reaped.count == 3 && reaped.first == &ops[0] && reaped.last == &ops[2] && ops[1].result == 1);
    CHECK(!readable(queue) && queue_reap(queue).count == 0);

    queue_unreap(queue, &reaped); /* could not be delivered */
    CHECK(!reaped.first && readable(queue));
    reaped = queue_reap(queue);
    CHECK(reaped.count == 3 && reaped.first == &ops[0] && !readable(queue));
    queue_close(queue);
    queue_close(queue);
    CHECK(queue_fd(queue) == -1);
    queue_free(queue);
}

static void test_the_engine_knows_what_can_be_cancelled(void)
{
    struct queue *queue = open_queue();
    struct op runs[1], waits[3];
    struct op_list batch = list_of(runs, 1, 0), more = list_of(waits, 3, -1);
    queue_submit(queue, &batch);
    queue_submit(queue, &more);
    CHECK(held->commits == 2);
    CHECK(queue_cancel(queue, 2) && !queue_cancel(queue, 2) && !queue_cancel(queue, 7));
    CHECK(readable(queue));
    struct op_list reaped = queue_reap(queue);
    CHECK(reaped.count == 1 && reaped.first == &waits[2] && waits[2].result == -ECANCELED);
    queue_close(queue);
    CHECK(queue_reap(queue).count == 3);
    queue_free(queue);
}

static void test_closing_ends_everything(void)
{
    struct queue *queue = open_queue();
    struct op runs[2], waits[1], late[2];
    struct op_list batch = list_of(runs, 2, 0), more = list_of(waits, 1, -1);
    queue_submit(queue, &batch);
    queue_submit(queue, &more);
    queue_close(queue);
    CHECK(queue_reap(queue).count == 3);
    CHECK(runs[0].result == 0 && runs[1].result == 0 && waits[0].result == -ECANCELED);

    batch = list_of(late, 2, 0);
    queue_submit(queue, &batch);
    CHECK(!batch.first && queue_reap(queue).count == 2);
    CHECK(late[0].result == -ECANCELED && late[1].result == -ECANCELED);
    CHECK(!queue_cancel(queue, 0) && held->commits == 2);
    queue_free(queue);
}

static void test_disowned(void)
{
    struct queue *queue = open_queue();
    const int fd = queue_fd(queue);
    queue_disown(queue);
    CHECK(held->disowned && queue_fd(queue) == -1);
    CHECK(fcntl(fd, F_GETFD) < 0 && errno == EBADF);
    queue_disown(queue);
    queue_close(queue);
    queue_free(queue);
}

static void test_an_engine_that_does_not_open(void)
{
    struct queue *queue = NULL;
    CHECK(queue_open(&held_engine, &(struct engine_options){0, 1}, &queue) == -EPERM && !queue);
}

static void test_names(void)
{
    CHECK(queue_engine("threads") == &threads_engine);
    CHECK(queue_engine("io_uring") == &uring_engine);
    CHECK(!queue_engine("held"));
}

int main(void)
{
    test_completions_come_in_order_and_signal_once();
    test_the_engine_knows_what_can_be_cancelled();
    test_closing_ends_everything();
    test_disowned();
    test_an_engine_that_does_not_open();
    test_names();
    return 0;
}
