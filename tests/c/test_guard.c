/* Copies to and from a mapped file that somebody truncated, and faults of others.
 *
 * With a folder as argument: of files there, mapped with MAP_SYNC; else of a file in memory. */
#define _GNU_SOURCE
#include "check.h"
#include "guard.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef MAP_SYNC
#define MAP_SYNC 0x80000
#endif
#ifndef MAP_SHARED_VALIDATE
#define MAP_SHARED_VALIDATE 0x03
#endif

enum { PAGES = 4, THREADS = 8, ROUNDS = 200 };

static const char *folder;
static size_t page;

struct copy {
    uint8_t *to;
    const uint8_t *from;
    size_t size;
};

static void copy(void *argument)
{
    const struct copy *work = argument;
    memcpy(work->to, work->from, work->size);
}

/* The handler that the thread sanitizer puts before every other one blocks all signals, whatever mask was asked for; a
 * jump out of it leaves them blocked. */
static int64_t guarded(void (*body)(void *argument), void *argument)
{
    const int64_t result = guard_run(body, argument);
    sigset_t blocked;
#ifdef __SANITIZE_THREAD__
    sigemptyset(&blocked);
    CHECK(pthread_sigmask(SIG_SETMASK, &blocked, NULL) == 0);
#endif
    CHECK(pthread_sigmask(SIG_BLOCK, NULL, &blocked) == 0 && !sigismember(&blocked, SIGBUS));
    return result;
}

/* A file of PAGES pages, mapped, of which `left` are left. */
static uint8_t *truncated(size_t left)
{
    const int fd = folder ? open(folder, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600) : memfd_create("guard", MFD_CLOEXEC);
    CHECK(fd >= 0 && posix_fallocate(fd, 0, (off_t)(PAGES * page)) == 0);
    const int flags = folder ? MAP_SHARED_VALIDATE | MAP_SYNC : MAP_SHARED;
    uint8_t *const memory = mmap(NULL, PAGES * page, PROT_READ | PROT_WRITE, flags, fd, 0);
    CHECK(memory != MAP_FAILED);
    memset(memory, 7, PAGES * page);
    CHECK(ftruncate(fd, (off_t)(left * page)) == 0 && close(fd) == 0);
    return memory;
}

static void drop(uint8_t *memory)
{
    CHECK(munmap(memory, PAGES * page) == 0);
}

static void test_truncated(void)
{
    uint8_t *const data = calloc(PAGES, page), *const memory = truncated(1);
    CHECK(data);
    struct copy whole = {memory, data, page}, behind = {memory + page, data, 1}, across = {memory, data, PAGES * page};
    struct copy read = {data, memory + 2 * page, page};
    for (int round = 0; round < ROUNDS; round++) {
        memset(data, round & 0x7f, page);
        CHECK(guarded(copy, &whole) == 0 && memcmp(memory, data, page) == 0);
        CHECK(guarded(copy, &behind) == -EIO);
        CHECK(guarded(copy, &across) == -EIO);
        CHECK(guarded(copy, &read) == -EIO);
        CHECK(memcmp(memory, data, page) == 0);
    }
    drop(memory);
    free(data);
}

static void *fail_and_copy(void *argument)
{
    (void)argument;
    test_truncated();
    return NULL;
}

/* A thread whose fault is caught while the one that started it is in a guarded call, which faults only then. */
static void start_another(void *argument)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, fail_and_copy, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    copy(argument);
}

static void test_threads(void)
{
    pthread_t threads[THREADS];
    uint8_t byte = 1, *const memory = truncated(0);
    struct copy fails = {memory, &byte, 1};
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, fail_and_copy, NULL) == 0);
    CHECK(guarded(start_another, &fails) == -EIO);
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    drop(memory);
}

static sigjmp_buf back;
static volatile sig_atomic_t called;
static void *volatile where;

static void old_handler(int number)
{
    called = number;
    siglongjmp(back, 1);
}

static void new_handler(int number, siginfo_t *info, void *context)
{
    CHECK(context);
    called = number;
    where = info->si_addr;
    siglongjmp(back, 1);
}

/* In a process of its own, for the first call of all is what looks at the handler from before: `before` is that, a fault
 * inside a guarded call is caught, and one outside goes to it. */
static int status_of_a_fault_outside(const struct sigaction *before)
{
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        uint8_t byte = 1, *const memory = truncated(1);
        struct copy fails = {memory + page, &byte, 1}, works = {memory, &byte, 1};
        CHECK(sigaction(SIGBUS, before, NULL) == 0);
        for (int round = 0; round < 2; round++) {
            called = 0;
            where = NULL;
            /* What either leaves behind must not take the next fault. */
            CHECK(round ? guarded(copy, &works) == 0 : guarded(copy, &fails) == -EIO);
            CHECK(!called);
            if (sigsetjmp(back, 1) == 0) {
                *(volatile uint8_t *)(memory + 2 * page) = 1;
                _exit(2); /* no fault */
            }
            CHECK(called == SIGBUS);
            CHECK(!(before->sa_flags & SA_SIGINFO) || where == memory + 2 * page);
        }
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

static void test_handlers_from_before(void)
{
    const struct sigaction informed = {.sa_sigaction = new_handler, .sa_flags = SA_SIGINFO};
    const struct sigaction plain = {.sa_handler = old_handler};
    const struct sigaction none = {.sa_handler = SIG_DFL}, ignored = {.sa_handler = SIG_IGN};
    CHECK(status_of_a_fault_outside(&informed) == 0);
    CHECK(status_of_a_fault_outside(&plain) == 0);
    for (int i = 0; i < 2; i++) {
        const int status = status_of_a_fault_outside(i ? &ignored : &none);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
    }
}

/* A thread that handles its signals on a stack of its own is as good after a fault as before. */
static void test_signal_stack(void)
{
    stack_t stack = {.ss_size = 1 << 16}, old;
    stack.ss_sp = malloc(stack.ss_size);
    CHECK(stack.ss_sp && sigaltstack(&stack, &old) == 0);
    test_truncated();
    CHECK(sigaltstack(&old, NULL) == 0);
    free(stack.ss_sp);
}

/* Pages of a hole come with the first store to them, while the filesystem has any. */
static void test_full(void)
{
    enum { SIZE = 1 << 30 };
    const int fd = open(folder, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && ftruncate(fd, SIZE) == 0);
    uint8_t byte = 1, *const memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0);
    CHECK(memory != MAP_FAILED);
    struct copy next = {memory, &byte, 1};
    while (guarded(copy, &next) == 0) {
        next.to += page;
        CHECK(next.to < memory + SIZE); /* the folder has to be on a smaller filesystem */
    }
    CHECK(guarded(copy, &next) == -EIO);
    next.to = memory;
    CHECK(guarded(copy, &next) == 0);
    CHECK(munmap(memory, SIZE) == 0 && close(fd) == 0);
}

int main(int count, char **arguments)
{
    folder = count > 1 ? arguments[1] : NULL;
    page = (size_t)sysconf(_SC_PAGESIZE);
    test_handlers_from_before();
    test_truncated();
    test_threads();
    test_signal_stack();
    if (folder) {
        test_full();
        printf("MAP_SYNC accepted; a fault is -EIO: truncated, filesystem full\n");
    }
    return 0;
}
