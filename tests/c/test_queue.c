/* The queue over an engine whose every verdict the test decides: the shape that a ring in the kernel has. */
#include "check.h"
#include "queue.h"

#include <errno.h>
#include <poll.h>
#include <string.h>

struct ring {
    struct queue *queue;
    size_t room; /* operations it takes before it is busy */
    bool at_once;
    unsigned commits;
    struct op_list inside;
    struct op_list finished; /* to be collected */
};

static struct ring *ring;

static int ring_open(struct queue *queue, const struct engine_options *options, void **state)
{
    if (options->io_threads == 0)
        return -EPERM;
    ring = *state = calloc(1, sizeof *ring);
    CHECK(ring);
    ring->queue = queue;
    ring->room = 2;
    return 0;
}

static enum engine_verdict ring_submit(void *state, struct op *op)
{
    CHECK(state == ring);
    if (ring->at_once) {
        op->result = 7;
        return ENGINE_COMPLETED;
    }
    if (ring->inside.count == ring->room)
        return ENGINE_BUSY;
    op_list_push(&ring->inside, op);
    return ENGINE_QUEUED;
}

static void ring_commit(void *state)
{
    CHECK(state == ring);
    ring->commits++;
}

static bool ring_cancel(void *state, uint64_t token)
{
    CHECK(state == ring);
    (void)token; /* all that is inside has started */
    return false;
}

static void ring_collect(void *state)
{
    CHECK(state == ring);
    for (struct op *op; (op = op_list_pop(&ring->finished)) != NULL;)
        queue_complete(ring->queue, op);
}

static void ring_close(void *state)
{
    CHECK(state == ring);
    op_list_append(&ring->finished, &ring->inside);
    ring_collect(state);
    free(ring);
}

static const struct engine ring_engine = {
    .name = "ring",
    .open = ring_open,
    .submit = ring_submit,
    .commit = ring_commit,
    .cancel = ring_cancel,
    .collect = ring_collect,
    .close = ring_close,
};
static const struct engine_options options = {1, 1};

static void finish_oldest(void)
{
    struct op *op = op_list_pop(&ring->inside);
    CHECK(op);
    op->result = 1;
    op_list_push(&ring->finished, op);
}

static bool readable(const struct queue *queue)
{
    struct pollfd p = {queue_fd(queue), POLLIN, 0};
    return poll(&p, 1, 0) == 1;
}

static struct op_list list_of(struct op *ops, size_t count)
{
    struct op_list list = {0};
    for (size_t i = 0; i < count; i++) {
        ops[i] = (struct op){.token = i, .kind = OP_FLUSH};
        op_list_push(&list, &ops[i]);
    }
    return list;
}

static void test_a_busy_engine_gets_the_rest_later_in_order(void)
{
    struct queue *queue;
    struct op ops[5], *op;
    CHECK(queue_open(&ring_engine, &options, &queue) == 0);
    struct op_list batch = list_of(ops, 5);
    queue_submit(queue, &batch);
    CHECK(!batch.first && ring->inside.count == 2 && ring->commits == 1);

    CHECK(!queue_cancel(queue, 0)); /* runs */
    CHECK(queue_cancel(queue, 3));  /* never reached the engine */
    CHECK(!queue_cancel(queue, 3));
    CHECK(readable(queue));
    struct op_list reaped = queue_reap(queue);
    CHECK(reaped.count == 1 && reaped.first == &ops[3] && ops[3].result == -ECANCELED);
    CHECK(!readable(queue) && queue_reap(queue).count == 0);

    uint64_t expected[] = {0, 1, 2, 4};
    for (size_t i = 0; i < 4; i++) {
        finish_oldest();
        reaped = queue_reap(queue); /* collects one, and makes room for the next */
        op = op_list_pop(&reaped);
        CHECK(op && op->token == expected[i] && op->result == 1 && !reaped.first);
    }
    CHECK(ring->inside.count == 0);
    queue_close(queue);
    queue_close(queue);
    CHECK(queue_fd(queue) == -1);
    queue_free(queue);
}

static void test_results_at_once_signal_once(void)
{
    struct queue *queue;
    struct op ops[3];
    CHECK(queue_open(&ring_engine, &options, &queue) == 0);
    ring->at_once = true;
    struct op_list batch = list_of(ops, 3);
    queue_submit(queue, &batch);
    CHECK(readable(queue));
    struct op_list reaped = queue_reap(queue);
    CHECK(reaped.count == 3 && reaped.first == &ops[0] && reaped.last == &ops[2] && ops[1].result == 7);
    CHECK(!readable(queue));

    queue_unreap(queue, &reaped); /* could not be delivered */
    CHECK(!reaped.first && readable(queue));
    reaped = queue_reap(queue);
    CHECK(reaped.count == 3 && reaped.first == &ops[0] && !readable(queue));
    queue_close(queue);
    queue_free(queue);
}

static void test_closing_ends_everything(void)
{
    struct queue *queue;
    struct op ops[5], late[1];
    CHECK(queue_open(&ring_engine, &options, &queue) == 0);
    struct op_list batch = list_of(ops, 5);
    queue_submit(queue, &batch);
    queue_close(queue);
    CHECK(queue_reap(queue).count == 5); /* the backlog as cancelled, what was inside as it ended */
    CHECK(ops[0].result == 0 && ops[1].result == 0);
    CHECK(ops[2].result == -ECANCELED && ops[3].result == -ECANCELED && ops[4].result == -ECANCELED);

    batch = list_of(late, 1);
    queue_submit(queue, &batch);
    CHECK(queue_reap(queue).count == 1 && late[0].result == -ECANCELED);
    CHECK(!queue_cancel(queue, 0));
    queue_free(queue);
}

static void test_an_engine_that_does_not_open(void)
{
    struct queue *queue = NULL;
    CHECK(queue_open(&ring_engine, &(struct engine_options){0, 1}, &queue) == -EPERM && !queue);
}

static void test_names(void)
{
    CHECK(queue_engine("threads") == &threads_engine);
    CHECK(!queue_engine("ring"));
}

int main(void)
{
    test_a_busy_engine_gets_the_rest_later_in_order();
    test_results_at_once_signal_once();
    test_closing_ends_everything();
    test_an_engine_that_does_not_open();
    test_names();
    return 0;
}
