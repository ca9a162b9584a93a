/* The engine that works everywhere: one lane for storage and one for memory. */
#include <errno.h>
#include <stdlib.h>

#include "lane.h"

enum { LANE_IO, LANE_COPY, LANES };

struct pools {
    struct lane lanes[LANES];
};

static void pools_close(void *state)
{
    struct pools *pools = state;
    for (int i = 0; i < LANES; i++)
        lane_stop(&pools->lanes[i]);
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
        free(pools);
        return io < 0 ? io : copy;
    }
    *state = pools;
    return 0;
}

static void pools_submit(void *state, struct op *op)
{
    struct pools *pools = state;
    lane_stage(&pools->lanes[op_is_io(op) ? LANE_IO : LANE_COPY], op);
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
    return lane_cancel(&pools->lanes[LANE_IO], token) || lane_cancel(&pools->lanes[LANE_COPY], token);
}

const struct engine threads_engine = {
    .name = "threads",
    .open = pools_open,
    .submit = pools_submit,
    .commit = pools_commit,
    .cancel = pools_cancel,
    .close = pools_close,
};
