/* The queue and its threads, over transfers that end when the test lets them. */
#define _GNU_SOURCE
#include "check.h"
#include "copy.h"
#include "crc32.h"
#include "queue.h"
#include "transfer.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>

/* In place of transfer.c. A write says that it began, and ends when it is let; reads and flushes end at once. */
static sem_t began, may_end;
static const int faults[] = {SIGBUS, SIGFPE, SIGILL, SIGSEGV};

int64_t transfer_write(int fd, const void *data, uint64_t size, uint64_t offset)
{
    sigset_t mask;
    char name[16];
    (void)fd, (void)data, (void)offset;
    CHECK(pthread_sigmask(SIG_SETMASK, NULL, &mask) == 0 && sigismember(&mask, SIGINT) && sigismember(&mask, SIGTERM));
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        CHECK(!sigismember(&mask, faults[i])); /* blocked, they kill without a handler */
    CHECK(pthread_getname_np(pthread_self(), name, sizeof name) == 0 && strncmp(name, "pccheck-io-", 11) == 0);
    sem_post(&began);
    sem_wait(&may_end);
    return (int64_t)size;
}

int64_t transfer_read(int fd, void *data, uint64_t size, uint64_t offset)
{
    (void)fd;
    memset(data, (int)offset, size);
    return (int64_t)size;
}

int64_t transfer_flush(int fd)
{
    return fd < 0 ? -EBADF : 0;
}

int64_t transfer_unlock(int fd)
{
    return fd < 0 ? -EBADF : 0;
}

int64_t transfer_linked(int fd)
{
    return fd < 0 ? -ENOENT : 0;
}

static struct queue *open_queue(unsigned io_threads, unsigned copy_threads)
{
    struct queue *queue;
    CHECK(queue_open(io_threads, copy_threads, &queue) == 0);
    return queue;
}

static void submit(struct queue *queue, struct op *ops, size_t count)
{
    struct op_list list = {0};
    for (size_t i = 0; i < count; i++)
        op_list_push(&list, &ops[i]);
    queue_submit(queue, &list);
}

/* Wait on the eventfd until `count` completions came. */
static void reap(struct queue *queue, size_t count)
{
    while (count > 0) {
        struct pollfd p = {queue_fd(queue), POLLIN, 0};
        CHECK(poll(&p, 1, -1) == 1);
        const size_t got = queue_reap(queue).count;
        CHECK(got <= count);
        count -= got;
    }
}

static bool readable(const struct queue *queue)
{
    struct pollfd p = {queue_fd(queue), POLLIN, 0};
    return poll(&p, 1, 0) == 1;
}

static void test_completions_come_in_order_and_signal_once(void)
{
    struct queue *queue = open_queue(1, 1);
    struct op ops[] = {{.kind = OP_FLUSH}, {.kind = OP_FLUSH, .fd = -1}, {.kind = OP_FLUSH}, {.kind = OP_WRITE}};
    eventfd_t signals;
    CHECK(!readable(queue) && queue_reap(queue).count == 0);
    submit(queue, ops, 4);
    sem_wait(&began); /* the one thread is through with the flushes */
    CHECK(readable(queue) && eventfd_read(queue_fd(queue), &signals) == 0 && signals == 1);
    struct op_list reaped = queue_reap(queue);
    CHECK(reaped.count == 3 && reaped.first == &ops[0] && reaped.last == &ops[2] && ops[1].result == -EBADF);
    CHECK(!readable(queue) && queue_reap(queue).count == 0);

    queue_unreap(queue, &reaped); /* could not be delivered */
    CHECK(!reaped.first && readable(queue));
    reaped = queue_reap(queue);
    CHECK(reaped.count == 3 && reaped.first == &ops[0] && !readable(queue));
    sem_post(&may_end);
    reap(queue, 1);
    queue_close(queue);
    queue_free(queue);
}

static void test_memory_does_not_wait_behind_storage(void)
{
    struct queue *queue = open_queue(1, 1);
    uint8_t buffer[100], source[60];
    struct copy_segment segment = {(uintptr_t)source, 20, sizeof source};
    struct op write = {.token = 1, .kind = OP_WRITE, .size = 10};
    uint8_t sums[2][4];
    struct op gather = {.token = 2, .kind = OP_GATHER, .data = buffer, .size = sizeof buffer, .sums = sums[0],
                        .segments = &segment, .segment_count = 1};
    memset(source, 9, sizeof source);
    submit(queue, &write, 1);
    sem_wait(&began);
    submit(queue, &gather, 1);
    reap(queue, 1);
    CHECK(buffer[19] == 0 && buffer[20] == 9 && buffer[79] == 9 && buffer[80] == 0);

    struct op checksum = {.kind = OP_CHECKSUM, .data = buffer, .size = sizeof buffer, .sums = sums[1]};
    submit(queue, &checksum, 1);
    reap(queue, 1);
    CHECK(memcmp(sums[0], sums[1], sizeof sums[0]) == 0 && checksum.result == 0);

    struct op scatter = gather;
    scatter.kind = OP_SCATTER;
    scatter.checksum = crc32_load_sum(sums[0]);
    memset(source, 0, sizeof source);
    submit(queue, &scatter, 1);
    reap(queue, 1);
    CHECK(scatter.result == 0 && source[0] == 9 && source[59] == 9);
    scatter.checksum++;
    submit(queue, &scatter, 1);
    reap(queue, 1);
    CHECK(scatter.result == -EBADMSG);

    sem_post(&may_end);
    reap(queue, 1);
    CHECK(write.result == 10);
    queue_close(queue);
    queue_free(queue);
}

static void test_cancel_spares_what_runs(void)
{
    struct queue *queue = open_queue(1, 1);
    struct op ops[] = {{.token = 1, .kind = OP_WRITE, .size = 1},
                       {.token = 2, .kind = OP_FLUSH},
                       {.token = 3, .kind = OP_FLUSH, .fd = -1}};
    submit(queue, ops, 3);
    sem_wait(&began);
    CHECK(!queue_cancel(queue, 1) && queue_cancel(queue, 2) && !queue_cancel(queue, 4));
    reap(queue, 1);
    CHECK(ops[1].result == -ECANCELED);
    sem_post(&may_end);
    reap(queue, 2);
    CHECK(ops[0].result == 1 && ops[2].result == -EBADF);
    queue_close(queue);
    queue_free(queue);
}

/* Let the write end once something completed: that is what close() cancels before it waits. */
static void *let_it_end(void *eventfd)
{
    struct pollfd p = {*(const int *)eventfd, POLLIN, 0};
    CHECK(poll(&p, 1, -1) == 1);
    sem_post(&may_end);
    return NULL;
}

static void test_close_cancels_and_waits(void)
{
    struct queue *queue = open_queue(1, 2);
    struct op ops[] = {{.kind = OP_WRITE, .size = 5}, {.kind = OP_WRITE}, {.kind = OP_FLUSH}};
    int eventfd = queue_fd(queue);
    pthread_t other;
    submit(queue, ops, 3);
    sem_wait(&began);
    CHECK(pthread_create(&other, NULL, let_it_end, &eventfd) == 0);
    queue_close(queue);
    pthread_join(other, NULL);
    CHECK(queue_reap(queue).count == 3);
    CHECK(ops[0].result == 5 && ops[1].result == -ECANCELED && ops[2].result == -ECANCELED);
    queue_close(queue);
    CHECK(queue_fd(queue) == -1);

    struct op late[] = {{.kind = OP_FLUSH}, {.kind = OP_CHECKSUM}};
    submit(queue, late, 2);
    CHECK(queue_reap(queue).count == 2 && late[0].result == -ECANCELED && late[1].result == -ECANCELED);
    CHECK(!queue_cancel(queue, 0));
    queue_free(queue);
}

static void test_disowning_closes_the_eventfd_alone(void)
{
    struct queue *queue = open_queue(1, 1);
    struct op flush = {.kind = OP_FLUSH};
    const int fd = queue_fd(queue);
    queue_disown(queue);
    CHECK(queue_fd(queue) == -1 && fcntl(fd, F_GETFD) < 0 && errno == EBADF);
    queue_disown(queue);
    submit(queue, &flush, 1);
    queue_close(queue);
    CHECK(queue_reap(queue).count == 1);
    queue_free(queue);
}

/* Steps run one after the other, what follows a failure does not, and the chain is told of once. */
static void test_a_chain_ends_with_its_first_failure(void)
{
    struct queue *queue = open_queue(2, 1);
    struct op steps[] = {{.kind = OP_WRITE, .size = 7}, {.kind = OP_FLUSH}, {.kind = OP_FLUSH, .fd = -1}, {.kind = OP_FLUSH}};
    struct op chain = {.token = 1, .kind = OP_CHAIN, .steps = steps};
    for (size_t i = 0; i + 1 < sizeof steps / sizeof *steps; i++)
        steps[i].next = &steps[i + 1];
    submit(queue, &chain, 1);
    sem_wait(&began);
    CHECK(!queue_cancel(queue, 1) && queue_reap(queue).count == 0); /* it goes on: a thread has it */
    sem_post(&may_end);
    reap(queue, 1);
    CHECK(chain.result == -EBADF && chain.steps_ended == 3);
    CHECK(steps[0].result == 7 && steps[1].result == 0 && steps[2].result == -EBADF && steps[3].ended_at == 0);
    CHECK(0 < steps[0].ended_at && steps[0].ended_at <= steps[1].ended_at && steps[1].ended_at <= steps[2].ended_at);

    struct op unlocks[] = {{.kind = OP_UNLOCK}, {.kind = OP_UNLOCK, .fd = -1}};
    struct op whole = {.token = 2, .kind = OP_CHAIN, .steps = &steps[3]};
    steps[3].next = unlocks;
    submit(queue, &whole, 1);
    reap(queue, 1);
    CHECK(whole.result == 0 && whole.steps_ended == 2);

    struct op refused = {.token = 3, .kind = OP_CHAIN, .steps = &unlocks[1]};
    submit(queue, &refused, 1);
    reap(queue, 1);
    CHECK(refused.result == -EBADF && refused.steps_ended == 1);

    struct op links[] = {{.kind = OP_LINKED}, {.kind = OP_LINKED, .fd = -1}};
    struct op removed = {.token = 4, .kind = OP_CHAIN, .steps = links};
    links[0].next = &links[1];
    submit(queue, &removed, 1);
    reap(queue, 1);
    CHECK(removed.result == -ENOENT && removed.steps_ended == 2);
    queue_close(queue);
    queue_free(queue);
}

static void test_a_chain_that_has_not_started_is_cancelled_whole(void)
{
    struct queue *queue = open_queue(1, 1);
    struct op write = {.token = 1, .kind = OP_WRITE, .size = 1}, step = {.kind = OP_FLUSH};
    struct op chain = {.token = 2, .kind = OP_CHAIN, .steps = &step};
    submit(queue, &write, 1);
    sem_wait(&began);
    submit(queue, &chain, 1);
    CHECK(queue_cancel(queue, 2));
    reap(queue, 1);
    CHECK(chain.result == -ECANCELED && chain.steps_ended == 0);
    sem_post(&may_end);
    reap(queue, 1);
    queue_close(queue);
    queue_free(queue);
}

/* Several threads submit and cancel while one reaps: for the thread sanitizer. */
enum { SUBMITTERS = 3, ROUNDS = 60, BATCH = 8 };

struct submitter {
    struct queue *queue;
    struct op ops[ROUNDS * BATCH];
    uint8_t memory[ROUNDS * BATCH][64], sums[ROUNDS * BATCH][4];
};

static void *submit_many(void *argument)
{
    struct submitter *s = argument;
    for (size_t i = 0; i < ROUNDS * BATCH; i++) {
        s->ops[i] = (struct op){.token = i, .kind = i % 3 ? OP_READ : OP_CHECKSUM, .data = s->memory[i],
                                .size = sizeof s->memory[i], .offset = i % 256, .sums = s->sums[i]};
    }
    for (size_t round = 0; round < ROUNDS; round++) {
        submit(s->queue, &s->ops[round * BATCH], BATCH);
        queue_cancel(s->queue, round * BATCH + 3);
    }
    return NULL;
}

static void test_many_threads_on_one_queue(void)
{
    static struct submitter submitters[SUBMITTERS];
    struct queue *queue = open_queue(3, 2);
    pthread_t threads[SUBMITTERS];
    for (size_t i = 0; i < SUBMITTERS; i++) {
        submitters[i].queue = queue;
        CHECK(pthread_create(&threads[i], NULL, submit_many, &submitters[i]) == 0);
    }
    reap(queue, SUBMITTERS * ROUNDS * BATCH);
    for (size_t i = 0; i < SUBMITTERS; i++) {
        pthread_join(threads[i], NULL);
        for (size_t k = 0; k < ROUNDS * BATCH; k++) {
            const struct op *op = &submitters[i].ops[k];
            CHECK(op->result == (op->kind == OP_READ ? 64 : 0) || op->result == -ECANCELED);
            if (op->kind == OP_READ && op->result == 64)
                CHECK(submitters[i].memory[k][63] == (uint8_t)op->offset);
        }
    }
    queue_close(queue);
    queue_free(queue);
}

int main(void)
{
    sem_init(&began, 0, 0);
    sem_init(&may_end, 0, 0);
    test_completions_come_in_order_and_signal_once();
    test_memory_does_not_wait_behind_storage();
    test_cancel_spares_what_runs();
    test_a_chain_ends_with_its_first_failure();
    test_a_chain_that_has_not_started_is_cancelled_whole();
    test_close_cancels_and_waits();
    test_disowning_closes_the_eventfd_alone();
    test_many_threads_on_one_queue();
    return 0;
}
