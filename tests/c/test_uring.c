/* The engine on io_uring, over real files, and over eventfds: a read of one is in the kernel until the test writes. */
#define _GNU_SOURCE
#include "check.h"

#define TRANSFER_MOST_BYTES UINT64_C(4096) /* so that transfers take several requests */
#include "uring.c"

#include <fcntl.h>
#include <sched.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#ifdef __has_include
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

enum { SKIPPED = 77, MOST = 16 };

static char folder[] = "/tmp/pccheck-uring-XXXXXX";
static int stuck[MOST];        /* eventfds: a read of 8 bytes is stuck until the test writes */
static uint64_t into[MOST][2]; /* where those go */

static struct uring *opened; /* behind the newest queue */

static int open_and_note(struct queue *queue, const struct engine_options *options, void **state)
{
    const int error = uring_open(queue, options, state);
    opened = *state;
    return error;
}

static struct queue *open_queue(unsigned depth)
{
    static struct engine engine;
    struct queue *queue;
    engine = uring_engine;
    engine.open = open_and_note;
    CHECK(queue_open(&engine, &(struct engine_options){depth, 1}, &queue) == 0);
    return queue;
}

/* Wait until an operation is in the kernel, and `done` bytes of it are done. */
static void wait_until_done(uint64_t token, uint64_t done)
{
    for (bool found = false; !found; sched_yield()) {
        pthread_mutex_lock(&opened->mutex);
        for (unsigned i = 0; i < opened->most; i++) {
            const struct flight *flight = &opened->flights[i];
            found = found || (flight->op && flight->op->token == token && flight->done == done);
        }
        pthread_mutex_unlock(&opened->mutex);
    }
}

static void finish(struct queue *queue)
{
    queue_close(queue);
    queue_free(queue);
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
        CHECK(poll(&p, 1, 60000) == 1);
        const size_t got = queue_reap(queue).count;
        CHECK(got <= count);
        count -= got;
    }
}

static int64_t perform(struct op op)
{
    struct queue *queue = open_queue(2);
    submit(queue, &op, 1);
    reap(queue, 1);
    finish(queue);
    return op.result;
}

static int new_file(int flags)
{
    const int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
    CHECK(fd >= 0);
    return fd;
}

static struct op stuck_read(unsigned i)
{
    return (struct op){.token = i, .kind = OP_READ, .fd = stuck[i], .data = into[i], .size = 8};
}

static void let_go(unsigned i)
{
    CHECK(eventfd_write(stuck[i], i + 1) == 0);
}

/* ---- What is said to the kernel ---- */

#ifdef IO_URING_OP_SUPPORTED
#define SAME_PLACE(ours, our_field, theirs, their_field)                                                               \
    _Static_assert(offsetof(struct ours, our_field) == offsetof(struct theirs, their_field) &&                         \
                       sizeof((struct ours){0}.our_field) == sizeof((struct theirs){0}.their_field), #our_field)

SAME_PLACE(ring_request, operation, io_uring_sqe, opcode);
SAME_PLACE(ring_request, flags, io_uring_sqe, flags);
SAME_PLACE(ring_request, fd, io_uring_sqe, fd);
SAME_PLACE(ring_request, offset, io_uring_sqe, off);
SAME_PLACE(ring_request, address, io_uring_sqe, addr);
SAME_PLACE(ring_request, length, io_uring_sqe, len);
SAME_PLACE(ring_request, operation_flags, io_uring_sqe, fsync_flags);
SAME_PLACE(ring_request, user_data, io_uring_sqe, user_data);
SAME_PLACE(ring_completion, user_data, io_uring_cqe, user_data);
SAME_PLACE(ring_completion, result, io_uring_cqe, res);
SAME_PLACE(ring_parameters, request_entries, io_uring_params, sq_entries);
SAME_PLACE(ring_parameters, completion_entries, io_uring_params, cq_entries);
SAME_PLACE(ring_parameters, features, io_uring_params, features);
SAME_PLACE(ring_parameters, requests.head, io_uring_params, sq_off.head);
SAME_PLACE(ring_parameters, requests.tail, io_uring_params, sq_off.tail);
SAME_PLACE(ring_parameters, requests.array, io_uring_params, sq_off.array);
SAME_PLACE(ring_parameters, completions.head, io_uring_params, cq_off.head);
SAME_PLACE(ring_parameters, completions.tail, io_uring_params, cq_off.tail);
SAME_PLACE(ring_parameters, completions.completions, io_uring_params, cq_off.cqes);
SAME_PLACE(ring_probe, count, io_uring_probe, ops_len);
_Static_assert(offsetof(struct ring_probe, operations) == offsetof(struct io_uring_probe, ops) &&
                   offsetof(struct ring_probe, operations[1].flags) == offsetof(struct io_uring_probe, ops[1].flags) &&
                   sizeof(struct ring_request) == sizeof(struct io_uring_sqe) &&
                   sizeof(struct ring_completion) == sizeof(struct io_uring_cqe) &&
                   sizeof(struct ring_parameters) == sizeof(struct io_uring_params),
               "structures");
_Static_assert((int)RING_FSYNC == IORING_OP_FSYNC && (int)RING_ASYNC_CANCEL == IORING_OP_ASYNC_CANCEL &&
                   (int)RING_READ == IORING_OP_READ && (int)RING_WRITE == IORING_OP_WRITE,
               "operations");
_Static_assert(RING_REQUEST_ASYNC == IOSQE_ASYNC && RING_FSYNC_DATASYNC == IORING_FSYNC_DATASYNC &&
                   RING_FEATURE_SINGLE_MAPPING == IORING_FEAT_SINGLE_MMAP &&
                   RING_FEATURE_NO_DROP == IORING_FEAT_NODROP &&
                   RING_REGISTER_PROBE == (int)IORING_REGISTER_PROBE && RING_PROBE_SUPPORTED == IO_URING_OP_SUPPORTED &&
                   RING_MAP_RINGS == IORING_OFF_SQ_RING && RING_MAP_REQUESTS == IORING_OFF_SQES,
               "flags");
#endif

/* ---- Transfers ---- */

static void test_what_is_written_is_read(void)
{
    enum { PIECES = 300, MOST_BYTES = 20000 };
    static struct op writes[PIECES], reads[PIECES], flush;
    uint64_t seed = 1, size = 0;
    struct queue *queue = open_queue(3);
    const int fd = new_file(0);

    for (int i = 0; i < PIECES; i++) {
        const uint64_t bytes = random_below(&seed, MOST_BYTES);
        writes[i] = (struct op){.kind = OP_WRITE, .fd = fd, .offset = size, .size = bytes,
                                .data = random_bytes(&seed, bytes)};
        reads[i] = writes[i];
        reads[i].kind = OP_READ;
        reads[i].data = calloc(1, bytes + 1);
        CHECK(reads[i].data);
        size += bytes;
    }
    submit(queue, writes, PIECES); /* many more than the kernel is given at a time */
    reap(queue, PIECES);
    flush = (struct op){.kind = OP_FLUSH, .fd = fd};
    submit(queue, &flush, 1);
    submit(queue, reads, PIECES);
    reap(queue, PIECES + 1);
    CHECK(flush.result == 0);
    for (int i = 0; i < PIECES; i++) {
        CHECK(writes[i].result == (int64_t)writes[i].size && reads[i].result == writes[i].result);
        CHECK(memcmp(writes[i].data, reads[i].data, reads[i].size) == 0);
        free(writes[i].data);
        free(reads[i].data);
    }
    close(fd);
    finish(queue);
}

static void test_reads_are_short_only_at_the_end(void)
{
    static uint8_t memory[3 * 4096] __attribute__((aligned(4096)));
    const int fd = new_file(0);
    struct op read = {.kind = OP_READ, .fd = fd, .data = memory, .size = sizeof memory};
    CHECK(ftruncate(fd, 5000) == 0);
    CHECK(perform(read) == 5000);
    read.offset = 4999;
    CHECK(perform(read) == 1);
    read.offset = 5000;
    CHECK(perform(read) == 0);
    read.offset = UINT64_C(1) << 40;
    CHECK(perform(read) == 0);
    close(fd);

    const int direct = open(folder, O_TMPFILE | O_RDWR | O_DIRECT, 0600);
    if (direct < 0)
        return; /* a filesystem without */
    struct op write = {.kind = OP_WRITE, .fd = direct, .data = memory, .size = sizeof memory};
    CHECK(perform(write) == sizeof memory);
    CHECK(ftruncate(direct, 4096 + 700) == 0); /* ends inside a sector */
    read = write;
    read.kind = OP_READ;
    CHECK(perform(read) == 4096 + 700);
    close(direct);
}

static void test_errors(void)
{
    uint8_t byte = 0;
    int ends[2];
    const int full = open("/dev/full", O_RDWR), parent = open(folder, O_RDONLY), closed = 1000;
    CHECK(pipe(ends) == 0);
    CHECK(perform((struct op){.kind = OP_WRITE, .fd = closed, .data = &byte, .size = 1}) == -EBADF);
    CHECK(perform((struct op){.kind = OP_FLUSH, .fd = closed}) == -EBADF);
    CHECK(perform((struct op){.kind = OP_WRITE, .fd = full, .data = &byte, .size = 1}) == -ENOSPC);
    CHECK(perform((struct op){.kind = OP_READ, .fd = parent, .data = &byte, .size = 1}) == -EISDIR);
    CHECK(perform((struct op){.kind = OP_WRITE, .fd = parent, .data = &byte, .size = 1}) == -EBADF);
    CHECK(perform((struct op){.kind = OP_READ, .fd = ends[0], .data = &byte, .size = 1}) == -ESPIPE);
    CHECK(perform((struct op){.kind = OP_FLUSH, .fd = ends[1]}) == -EINVAL);
    CHECK(perform((struct op){.kind = OP_READ, .fd = full, .data = &byte, .size = 1, .offset = -1ULL}) == -EINVAL);
    CHECK(perform((struct op){.kind = OP_WRITE, .fd = closed, .data = &byte, .size = 0}) == 0);
    CHECK(perform((struct op){.kind = OP_CHECKSUM, .data = &byte, .size = 1}) == 0);
    close(full);
    close(parent);
    close(ends[0]);
    close(ends[1]);
}

/* The kernel writes up to the limit, and the rest is asked for, and refused. */
static void test_a_short_write_is_continued(void)
{
    static uint8_t memory[4096 * 3];
    struct rlimit before, small;
    const int fd = new_file(0);
    struct op write = {.kind = OP_WRITE, .fd = fd, .data = memory, .size = sizeof memory};
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
    small = before;
    small.rlim_cur = 5000;
    signal(SIGXFSZ, SIG_IGN);
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
    CHECK(perform(write) == -EFBIG);
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK(lseek(fd, 0, SEEK_END) == 5000);
    close(fd);
}

/* ---- In the kernel until the test says so ---- */

static void test_a_short_read_is_continued(void)
{
    struct queue *queue = open_queue(1);
    struct op read = stuck_read(0);
    read.size = 16; /* two of the numbers that an eventfd gives */
    submit(queue, &read, 1);
    let_go(0);
    wait_until_done(0, 8);
    CHECK(queue_reap(queue).count == 0);
    let_go(0);
    reap(queue, 1);
    CHECK(read.result == 16 && into[0][0] == 1 && into[0][1] == 1);
    finish(queue);
}

static void test_only_so_many_transfers_are_in_the_kernel(void)
{
    struct queue *queue = open_queue(2);
    uint8_t byte = 0;
    struct op reads[4], others[] = {{.token = 10, .kind = OP_FLUSH, .fd = -1},
                                    {.token = 11, .kind = OP_CHECKSUM, .data = &byte, .size = 1}};
    for (unsigned i = 0; i < 4; i++)
        reads[i] = stuck_read(i);
    submit(queue, reads, 4);
    submit(queue, others, 2);
    reap(queue, 2); /* neither flushes nor memory wait behind transfers */
    let_go(2);
    let_go(3);
    CHECK(queue_reap(queue).count == 0); /* those are not in the kernel */
    let_go(1);
    reap(queue, 3);
    CHECK(reads[1].result == 8 && reads[2].result == 8 && reads[3].result == 8 && into[2][0] == 3);
    let_go(0);
    reap(queue, 1);
    finish(queue);
}

/* The kernel misses what is on its way from one of its threads to another: so ask until it lets go. */
static void cancel_in_the_kernel(struct queue *queue, uint64_t token)
{
    struct pollfd p = {queue_fd(queue), POLLIN, 0};
    wait_until_done(token, token * 8);
    do
        CHECK(!queue_cancel(queue, token));
    while (poll(&p, 1, 1) == 0);
    CHECK(queue_reap(queue).count == 1);
}

static void test_cancelling(void)
{
    struct queue *queue = open_queue(3);
    struct op reads[5];
    for (unsigned i = 0; i < 5; i++)
        reads[i] = stuck_read(i);
    reads[1].size = 16;
    submit(queue, reads, 5);

    CHECK(queue_cancel(queue, 3)); /* waits for room */
    reap(queue, 1);
    CHECK(reads[3].result == -ECANCELED && !queue_cancel(queue, 3) && !queue_cancel(queue, 99));

    cancel_in_the_kernel(queue, 0);
    CHECK(reads[0].result == -ECANCELED);

    let_go(1);
    cancel_in_the_kernel(queue, 1); /* when it is done in part */
    CHECK(reads[1].result == -ECANCELED && into[1][0] == 2);

    let_go(2);
    let_go(4);
    reap(queue, 2);
    CHECK(reads[2].result == 8 && reads[4].result == 8);
    finish(queue);
}

/* Let the read end once something completed: that is what close() cancels before it waits. */
static void *let_first_go(void *eventfd)
{
    struct pollfd p = {*(const int *)eventfd, POLLIN, 0};
    CHECK(poll(&p, 1, 60000) == 1);
    let_go(0);
    return NULL;
}

static void test_close_cancels_and_waits(void)
{
    struct queue *queue = open_queue(1);
    struct op reads[] = {stuck_read(0), stuck_read(1), stuck_read(2)};
    int eventfd = queue_fd(queue);
    pthread_t other;
    submit(queue, reads, 3);
    wait_until_done(0, 0);
    CHECK(pthread_create(&other, NULL, let_first_go, &eventfd) == 0);
    queue_close(queue);
    pthread_join(other, NULL);
    CHECK(queue_reap(queue).count == 3);
    CHECK(reads[0].result == 8 && reads[1].result == -ECANCELED && reads[2].result == -ECANCELED);
    queue_free(queue);
}

struct submission {
    struct queue *queue;
    struct op *ops;
    size_t count;
};

static void *submit_and_end(void *argument)
{
    const struct submission *submission = argument;
    submit(submission->queue, submission->ops, submission->count);
    return NULL;
}

/* The kernel would cancel what waits for one of its threads. */
static void test_requests_outlive_the_thread_that_asked(void)
{
    enum { WRITES = 64, BYTES = 64 << 10 };
    static uint8_t memory[BYTES];
    static struct op ops[WRITES + 2];
    struct queue *queue = open_queue(WRITES);
    struct submission submission = {queue, ops, WRITES + 2};
    const int fd = new_file(0);
    pthread_t other;

    for (unsigned i = 0; i < WRITES; i++)
        ops[i] = (struct op){.token = 100 + i, .kind = OP_WRITE, .fd = fd, .data = memory, .size = BYTES,
                             .offset = (uint64_t)i * BYTES};
    ops[WRITES] = stuck_read(0);
    ops[WRITES + 1] = (struct op){.token = 1, .kind = OP_FLUSH, .fd = fd};
    CHECK(pthread_create(&other, NULL, submit_and_end, &submission) == 0);
    pthread_join(other, NULL);
    reap(queue, WRITES + 1);
    let_go(0);
    reap(queue, 1);
    for (unsigned i = 0; i < WRITES; i++)
        CHECK(ops[i].result == BYTES);
    CHECK(ops[WRITES].result == 8 && ops[WRITES + 1].result == 0);
    close(fd);
    finish(queue);
}

/* ---- Forked children ---- */

static unsigned descriptors_of(const char *kind)
{
    unsigned count = 0;
    for (int fd = 0; fd < 1024; fd++) {
        char link[32], target[64] = "";
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        if (readlink(link, target, sizeof target - 1) > 0 && strstr(target, kind))
            count++;
    }
    return count;
}

static bool rings_are_mapped(void)
{
    char line[512];
    bool found = false;
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps);
    while (fgets(line, sizeof line, maps))
        found = found || strstr(line, "[io_uring]");
    fclose(maps);
    return found;
}

/* Run in a child; true where it returned. */
static bool passes_in_a_child(void (*check)(struct queue *queue), struct queue *queue)
{
    int status;
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        check(queue);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    return status == 0;
}

static void disown(struct queue *queue)
{
    CHECK(descriptors_of("[io_uring]") == 1 && !rings_are_mapped());
    queue_disown(queue);
    CHECK(descriptors_of("[io_uring]") == 0 && descriptors_of("[eventfd]") == MOST);
    queue_disown(queue);
}

static void test_a_forked_child_lets_go(void)
{
    struct queue *queue = open_queue(2);
    struct op read = stuck_read(0);
    submit(queue, &read, 1);
    CHECK(rings_are_mapped());
    CHECK(passes_in_a_child(disown, queue));
    let_go(0);
    reap(queue, 1);
    CHECK(read.result == 8);
    finish(queue);
    CHECK(descriptors_of("[io_uring]") == 0 && !rings_are_mapped());
}

/* ---- What the kernel does not do ---- */

static void refuse(int call, int error)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

static void open_where_it_is_refused(struct queue *queue)
{
    refuse(__NR_io_uring_setup, EPERM);
    CHECK(queue_open(&uring_engine, &(struct engine_options){1, 1}, &queue) == -EPERM);
}

static void open_where_registering_is_refused(struct queue *queue)
{
    refuse(__NR_io_uring_register, EINVAL); /* as a kernel does that knows no probes */
    CHECK(queue_open(&uring_engine, &(struct engine_options){1, 1}, &queue) == -ENOSYS);
    CHECK(descriptors_of("[io_uring]") == 0 && descriptors_of("[eventfd]") == MOST && !rings_are_mapped());
}

static void submit_where_that_is_refused(struct queue *queue)
{
    refuse(__NR_io_uring_enter, EPERM);
    (void)queue;
    test_what_is_written_is_read();
    test_errors();
    test_reads_are_short_only_at_the_end();
}

static void test_refusals(void)
{
    CHECK(passes_in_a_child(open_where_it_is_refused, NULL));
    CHECK(passes_in_a_child(open_where_registering_is_refused, NULL));
    CHECK(passes_in_a_child(submit_where_that_is_refused, NULL));
}

static void test_what_a_result_means(void)
{
    enum { GOES_ON, ENDS, CANCELLED, BY_HAND };
    static const struct {
        enum op_kind kind;
        bool unwanted;
        int32_t result;
        int outcome;
        int64_t reported;
    } cases[] = {
        {OP_WRITE, false, 100, ENDS, 100},       {OP_WRITE, true, 100, ENDS, 100},
        {OP_WRITE, false, 60, GOES_ON, 0},       {OP_WRITE, true, 60, CANCELLED, 0},
        {OP_WRITE, false, 0, ENDS, -EIO},        {OP_READ, false, 0, ENDS, 0},
        {OP_WRITE, false, -EIO, ENDS, -EIO},     {OP_WRITE, true, -EIO, ENDS, -EIO},
        {OP_WRITE, false, -EINTR, BY_HAND, 0},   {OP_WRITE, true, -EINTR, CANCELLED, 0},
        {OP_READ, false, -EAGAIN, BY_HAND, 0},   {OP_READ, true, -EAGAIN, CANCELLED, 0},
        {OP_READ, false, -ECANCELED, BY_HAND, 0}, {OP_READ, true, -ECANCELED, CANCELLED, 0},
        {OP_FLUSH, false, 0, ENDS, 0},           {OP_FLUSH, false, -EIO, ENDS, -EIO},
        {OP_FLUSH, false, -EAGAIN, ENDS, -EAGAIN}, /* the kernel may tell of a lost write only once */
        {OP_FLUSH, false, -EINTR, BY_HAND, 0},   {OP_FLUSH, false, -ECANCELED, BY_HAND, 0},
    };
    struct queue *queue = open_queue(1);
    struct uring *uring = calloc(1, sizeof *uring + sizeof uring->flights[0]); /* without a pilot */
    CHECK(uring && ring_open(&uring->ring, 4) == 0);
    uring->queue = queue;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct op op = {.kind = cases[i].kind, .size = 100};
        struct flight *flight = &uring->flights[0];
        *flight = (struct flight){.op = &op, .wish = cases[i].unwanted ? UNWANTED : WANTED};
        settle(uring, flight, cases[i].result);
        const bool by_hand = op_list_pop(&uring->by_hand) != NULL, goes_on = ring_take_back(&uring->ring) != NULL;
        const bool reported = queue_reap(queue).count == 1;
        CHECK(by_hand == (cases[i].outcome == BY_HAND) && goes_on == (cases[i].outcome == GOES_ON));
        CHECK(reported == !(by_hand || goes_on));
        CHECK(!reported || op.result == (cases[i].outcome == CANCELLED ? -ECANCELED : cases[i].reported));
        CHECK((flight->op == &op) == goes_on && (!goes_on || flight->done == 60));
    }
    ring_close(&uring->ring);
    free(uring);
    finish(queue);
}

static void test_a_flush_is_not_cancelled_in_the_kernel(void)
{
    struct uring *uring = calloc(1, sizeof *uring + 2 * sizeof uring->flights[0]); /* without a pilot */
    struct op ops[] = {{.kind = OP_WRITE, .token = 1}, {.kind = OP_FLUSH, .token = 2}};
    CHECK(uring);
    uring->most = 2;
    for (unsigned i = 0; i < 2; i++) {
        uring->flights[i].op = &ops[i];
        mark_unwanted(uring, ops[i].token);
    }
    CHECK(uring->flights[0].wish == UNWANTED && uring->flights[1].wish == WANTED);
    free(uring);
}

/* ---- Many threads on one queue, for the thread sanitizer ---- */

enum { SUBMITTERS = 3, ROUNDS = 40, BATCH = 8 };

struct submitter {
    struct queue *queue;
    int fd;
    struct op ops[ROUNDS * BATCH];
    uint8_t memory[ROUNDS * BATCH][64];
};

static void *submit_many(void *argument)
{
    struct submitter *s = argument;
    for (size_t i = 0; i < ROUNDS * BATCH; i++) {
        s->ops[i] = (struct op){.token = i, .kind = (enum op_kind[]){OP_READ, OP_CHECKSUM, OP_WRITE, OP_FLUSH}[i % 4],
                                .fd = s->fd, .data = s->memory[i], .size = sizeof s->memory[i], .offset = i * 64};
    }
    for (size_t round = 0; round < ROUNDS; round++) {
        submit(s->queue, &s->ops[round * BATCH], BATCH);
        queue_cancel(s->queue, round * BATCH + 4);
        queue_cancel(s->queue, round * BATCH + 7);
    }
    return NULL;
}

static void test_many_threads_on_one_queue(void)
{
    static struct submitter submitters[SUBMITTERS];
    struct queue *queue = open_queue(3);
    pthread_t threads[SUBMITTERS];
    for (size_t i = 0; i < SUBMITTERS; i++) {
        submitters[i].queue = queue;
        submitters[i].fd = new_file(0);
        CHECK(ftruncate(submitters[i].fd, ROUNDS * BATCH * 64) == 0);
        CHECK(pthread_create(&threads[i], NULL, submit_many, &submitters[i]) == 0);
    }
    reap(queue, SUBMITTERS * ROUNDS * BATCH);
    for (size_t i = 0; i < SUBMITTERS; i++) {
        pthread_join(threads[i], NULL);
        for (size_t k = 0; k < ROUNDS * BATCH; k++) {
            const struct op *op = &submitters[i].ops[k];
            const bool moves = op->kind == OP_READ || op->kind == OP_WRITE;
            CHECK(op->result == (moves ? 64 : 0) || op->result == -ECANCELED);
        }
        close(submitters[i].fd);
    }
    finish(queue);
}

int main(void)
{
    struct queue *queue;
    const int error = queue_open(&uring_engine, &(struct engine_options){1, 1}, &queue);
    if (error == -EPERM || error == -ENOSYS || error == -ENOMEM) {
        printf("the kernel refuses io_uring: %s\n", strerror(-error));
        return SKIPPED;
    }
    CHECK(error == 0);
    finish(queue);

    CHECK(mkdtemp(folder));
    for (unsigned i = 0; i < MOST; i++)
        CHECK((stuck[i] = eventfd(0, EFD_CLOEXEC)) >= 0);
    test_refusals(); /* while there are no threads, which sanitizers do not like to fork beside */
    test_what_is_written_is_read();
    test_reads_are_short_only_at_the_end();
    test_errors();
    test_a_short_write_is_continued();
    test_a_short_read_is_continued();
    test_only_so_many_transfers_are_in_the_kernel();
    test_cancelling();
    test_close_cancels_and_waits();
    test_requests_outlive_the_thread_that_asked();
    test_a_forked_child_lets_go();
    test_what_a_result_means();
    test_a_flush_is_not_cancelled_in_the_kernel();
    test_many_threads_on_one_queue();
    CHECK(rmdir(folder) == 0);
    return 0;
}
