/* The engine on io_uring: the kernel does what goes to storage, a lane of threads what stays in memory. Chains have a
 * lane of their own: they are short and many wait for them, and a thread is through with one before the pilot would
 * have been woken up for each of its steps.
 *
 * One thread, the pilot, is all that touches the ring. So what waits for room in the kernel follows at once, however
 * long the thread that reaps (an event loop in Python) has to wait for its turn; and requests do not end with the
 * thread that asked for them, as they may in the kernel. */
#define _GNU_SOURCE
#include "ring.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "lane.h"
#include "queue.h"
#include "transfer.h"

/* Flushes in the kernel at a time, beside the transfers: there is one per checkpoint in flight, if that. */
#define MOST_FLUSHES 16

/* What a request to cancel another one is named; the others are named by the index of their flight. */
#define CANCELLATION UINT64_MAX

enum { TRANSFER, FLUSH, CLASSES };

/* An operation in the kernel. */
struct flight {
    struct op *op; /* NULL: none, this one is free */
    uint64_t done; /* bytes, by earlier requests */
    enum { WANTED, UNWANTED, CANCELLING } wish;
};

struct uring {
    struct queue *queue;
    struct lane copy;
    struct lane chains;
    struct op_list staged[CLASSES]; /* taken, and not committed; touched by the submitting thread only */
    pthread_t pilot;
    int wake; /* an eventfd: a reason to look other than a completion */

    struct ring ring;       /* touched by the pilot only, as is */
    struct op_list by_hand; /* what the kernel does not do */

    pthread_mutex_t mutex; /* guards all below */
    bool asleep;
    bool stopping;
    struct op_list waiting[CLASSES];
    unsigned room[CLASSES]; /* for more of them in the kernel */
    unsigned flying;
    unsigned most; /* flights */
    struct flight flights[];
};

static int class_of(const struct op *op)
{
    return op->kind == OP_FLUSH ? FLUSH : TRANSFER;
}

/* ---- The pilot, under the mutex ---- */

static bool is_direct(int fd)
{
    const int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT) != 0;
}

/* Ask for all of an operation, or for the rest of it. Buffers and files are not registered with the ring: transfers of
 * megabytes in huge pages gain nothing from it. What goes through the page cache is left to threads of the kernel: else
 * this one would copy, one transfer after the other. */
static void ask_for(struct uring *uring, const struct flight *flight)
{
    const struct op *op = flight->op;
    struct ring_request *request = ring_request(&uring->ring);
    request->user_data = (uint64_t)(flight - uring->flights);
    request->fd = op->fd;
    if (op->kind == OP_FLUSH) {
        request->operation = RING_FSYNC;
        request->operation_flags = RING_FSYNC_DATASYNC;
    } else {
        request->operation = op->kind == OP_READ ? RING_READ : RING_WRITE;
        request->flags = is_direct(op->fd) ? 0 : RING_REQUEST_ASYNC;
        request->address = (uintptr_t)op->data + flight->done;
        request->length = transfer_part(op->size - flight->done);
        request->offset = op->offset + flight->done;
    }
}

static void ask_to_cancel(struct uring *uring, struct flight *flight)
{
    struct ring_request *request = ring_request(&uring->ring);
    request->operation = RING_ASYNC_CANCEL;
    request->address = (uint64_t)(flight - uring->flights);
    request->user_data = CANCELLATION;
    flight->wish = CANCELLING;
}

static void take_off(struct uring *uring, struct op *op)
{
    struct flight *flight = uring->flights;
    while (flight->op)
        flight++; /* as many flights as there is room for, so that one is free */
    *flight = (struct flight){.op = op};
    uring->room[class_of(op)]--;
    uring->flying++;
    ask_for(uring, flight);
}

static struct op *land(struct uring *uring, struct flight *flight)
{
    struct op *op = flight->op;
    flight->op = NULL;
    uring->room[class_of(op)]++;
    uring->flying--;
    return op;
}

/* Whether the kernel gave up rather than failed. */
static bool gave_up(const struct op *op, int32_t result)
{
    return result == -EINTR || result == -ECANCELED || (result == -EAGAIN && op->kind != OP_FLUSH);
}

/* Take a request's result. */
static void settle(struct uring *uring, struct flight *flight, int32_t result)
{
    struct op *op = flight->op;
    bool ends = true;
    if (op->kind == OP_FLUSH)
        op->result = result;
    else
        ends = transfer_ends(op->kind == OP_READ, op->size, result, &flight->done, &op->result);

    if (flight->wish != WANTED && (!ends || gave_up(op, result)))
        queue_complete_cancelled(uring->queue, land(uring, flight));
    else if (gave_up(op, result))
        op_list_push(&uring->by_hand, land(uring, flight)); /* all of it: nobody has seen what was done */
    else if (!ends)
        ask_for(uring, flight);
    else
        queue_complete(uring->queue, land(uring, flight));
}

static void settle_all(struct uring *uring)
{
    struct ring_completion completion;
    while (ring_next(&uring->ring, &completion)) {
        if (completion.user_data != CANCELLATION)
            settle(uring, &uring->flights[completion.user_data], completion.result);
    }
}

static void ask_for_more(struct uring *uring)
{
    for (unsigned i = 0; i < uring->most; i++) {
        if (uring->flights[i].op && uring->flights[i].wish == UNWANTED)
            ask_to_cancel(uring, &uring->flights[i]);
    }
    for (int class = 0; class < CLASSES; class++) {
        while (uring->room[class] > 0 && uring->waiting[class].first)
            take_off(uring, op_list_pop(&uring->waiting[class]));
    }
}

/* What the kernel refuses, for lack of memory or altogether. */
static void take_back(struct uring *uring)
{
    pthread_mutex_lock(&uring->mutex);
    for (const struct ring_request *request; (request = ring_take_back(&uring->ring)) != NULL;) {
        if (request->user_data != CANCELLATION)
            op_list_push(&uring->by_hand, land(uring, &uring->flights[request->user_data]));
    }
    pthread_mutex_unlock(&uring->mutex);
}

/* ---- The pilot ---- */

static void sleep_until_needed(const struct uring *uring)
{
    struct pollfd reasons[] = {{uring->ring.fd, POLLIN, 0}, {uring->wake, POLLIN, 0}};
    eventfd_t count;
    poll(reasons, 2, -1); /* whatever it returns, the pilot looks */
    (void)!eventfd_read(uring->wake, &count);
}

static void *fly(void *argument)
{
    struct uring *uring = argument;

    pthread_mutex_lock(&uring->mutex);
    for (;;) {
        settle_all(uring);
        ask_for_more(uring);
        if (uring->stopping && uring->flying == 0 && !uring->by_hand.first)
            break;
        uring->asleep = true; /* as good as */
        pthread_mutex_unlock(&uring->mutex);

        if (ring_submit(&uring->ring) < 0)
            take_back(uring);
        if (!uring->by_hand.first)
            sleep_until_needed(uring);
        for (struct op *op; (op = op_list_pop(&uring->by_hand)) != NULL;) {
            lane_perform(op);
            queue_complete(uring->queue, op);
        }
        pthread_mutex_lock(&uring->mutex);
        uring->asleep = false;
    }
    pthread_mutex_unlock(&uring->mutex);
    return NULL;
}

/* ---- The table ---- */

static void wake_up(struct uring *uring)
{
    if (uring->asleep)
        eventfd_write(uring->wake, 1);
    uring->asleep = false;
}

static void uring_submit(void *state, struct op *op)
{
    struct uring *uring = state;
    if (!op_is_io(op) || op->kind == OP_CHAIN) {
        lane_stage(op_is_io(op) ? &uring->chains : &uring->copy, op);
        return;
    }
    if (op->kind != OP_FLUSH) {
        op->result = 0;
        if (transfer_out_of_range(op->size, op->offset))
            op->result = -EINVAL;
        else if (op->size > 0 && lseek(op->fd, 0, SEEK_CUR) < 0)
            op->result = -errno; /* on pipes and sockets io_uring would ignore the offset, where pwrite() refuses */
        if (op->result < 0 || op->size == 0) {
            queue_complete(uring->queue, op);
            return;
        }
    }
    op_list_push(&uring->staged[class_of(op)], op);
}

static void uring_commit(void *state)
{
    struct uring *uring = state;
    lane_commit(&uring->copy);
    lane_commit(&uring->chains);
    if (!uring->staged[TRANSFER].first && !uring->staged[FLUSH].first)
        return;
    pthread_mutex_lock(&uring->mutex);
    for (int class = 0; class < CLASSES; class++)
        op_list_append(&uring->waiting[class], &uring->staged[class]);
    wake_up(uring);
    pthread_mutex_unlock(&uring->mutex);
}

/* Mark what is in the kernel: the kernel is asked to hurry, and the operation ends as it will. Not with a flush: how
 * that ends must be known, since the kernel tells of a lost write once. */
static void mark_unwanted(struct uring *uring, uint64_t token)
{
    for (unsigned i = 0; i < uring->most; i++) {
        struct flight *flight = &uring->flights[i];
        if (flight->op && flight->op->token == token && flight->op->kind != OP_FLUSH) {
            flight->wish = UNWANTED; /* once more, too: the kernel misses what is just changing hands */
            wake_up(uring);
        }
    }
}

static bool uring_cancel(void *state, uint64_t token)
{
    struct uring *uring = state;
    struct op *op = NULL;

    pthread_mutex_lock(&uring->mutex);
    for (int class = 0; class < CLASSES && !op; class++)
        op = op_list_remove(&uring->waiting[class], token);
    if (!op)
        mark_unwanted(uring, token);
    pthread_mutex_unlock(&uring->mutex);
    if (!op)
        return lane_cancel(&uring->copy, token) || lane_cancel(&uring->chains, token);
    queue_complete_cancelled(uring->queue, op);
    return true;
}

static void uring_close(void *state)
{
    struct uring *uring = state;
    struct op_list unstarted = {0};

    pthread_mutex_lock(&uring->mutex);
    uring->stopping = true;
    for (int class = 0; class < CLASSES; class++)
        op_list_append(&unstarted, &uring->waiting[class]);
    wake_up(uring);
    pthread_mutex_unlock(&uring->mutex);

    for (struct op *op; (op = op_list_pop(&unstarted)) != NULL;)
        queue_complete_cancelled(uring->queue, op);
    pthread_join(uring->pilot, NULL);
    lane_stop(&uring->copy);
    lane_stop(&uring->chains);
    ring_close(&uring->ring);
    close_fd(&uring->wake);
    pthread_mutex_destroy(&uring->mutex);
}

/* A copy of the ring's descriptor would keep the ring, and with it files in use, beyond the parent's death. */
static void uring_disown(void *state)
{
    struct uring *uring = state;
    close_fd(&uring->ring.fd);
    close_fd(&uring->wake);
}

static int uring_open(struct queue *queue, const struct engine_options *options, void **state)
{
    const unsigned most = options->io_threads + MOST_FLUSHES;
    struct uring *uring = calloc(1, sizeof *uring + most * sizeof uring->flights[0]);
    if (!uring)
        return -ENOMEM;
    uring->queue = queue;
    uring->room[TRANSFER] = options->io_threads;
    uring->room[FLUSH] = MOST_FLUSHES;
    uring->most = most;
    uring->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int error = uring->wake < 0 ? -errno : 0;
    if (error < 0)
        goto fail;
    error = ring_open(&uring->ring, 2 * most); /* each flight's request, and one to cancel it */
    if (error < 0)
        goto fail_wake;
    error = lane_start(&uring->copy, queue, "mem", options->copy_threads);
    if (error < 0)
        goto fail_copy;
    error = lane_start(&uring->chains, queue, "io", options->io_threads);
    if (error < 0)
        goto fail_chains;
    pthread_mutex_init(&uring->mutex, NULL);
    error = lane_thread(&uring->pilot, "ring", 0, fly, uring);
    if (error < 0)
        goto fail_pilot;
    *state = uring;
    return 0;

fail_pilot:
    pthread_mutex_destroy(&uring->mutex);
fail_chains:
    lane_stop(&uring->chains);
fail_copy:
    lane_stop(&uring->copy);
    ring_close(&uring->ring);
fail_wake:
    close_fd(&uring->wake);
fail:
    free(uring);
    return error;
}

const struct engine uring_engine = {
    .name = "io_uring",
    .open = uring_open,
    .submit = uring_submit,
    .commit = uring_commit,
    .cancel = uring_cancel,
    .close = uring_close,
    .disown = uring_disown,
};
