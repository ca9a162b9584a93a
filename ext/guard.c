/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "guard.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>

/* Where this thread goes on after a fault; NULL outside a guarded copy. In the memory that every thread has from its
 * start: a handler may not allocate any. */
static _Thread_local __attribute__((tls_model("initial-exec"))) sigjmp_buf *volatile active;
static struct sigaction before;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void on_fault(int number, siginfo_t *info, void *context)
{
    sigjmp_buf *const back = active;
    if (back) {
        active = NULL;
        siglongjmp(*back, 1);
    }
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    } else {
        signal(number, SIG_DFL);
        raise(number); /* ends the process, as it would have without this handler */
    }
}

static void install(void)
{
    /* SA_NODEFER: a copy is left by a jump, and the signal would stay blocked. */
    struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, &before);
}

int64_t guard_run(void (*body)(void *argument), void *argument)
{
    sigjmp_buf back, *const outer = active;
    pthread_once(&once, install);
    if (sigsetjmp(back, 0) != 0) {
        active = outer;
        return -EIO;
    }
    active = &back;
    body(argument);
    active = outer;
    return 0;
}
