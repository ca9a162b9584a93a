/* Operations, and the table of functions that an engine which performs them fills in. */
#ifndef PCCHECK_ENGINE_H
#define PCCHECK_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

struct queue;

enum op_kind { OP_WRITE, OP_READ, OP_FLUSH, OP_GATHER, OP_SCATTER, OP_CHECKSUM, OP_CHAIN, OP_UNLOCK, OP_LINKED };
#define OP_KINDS 9

/* One operation. Whoever submits it owns the memory, and leaves that and all it points to alone until it is reaped. */
struct op {
    struct op *next;       /* in the one list that holds the operation at the moment */
    uint64_t token;        /* names it to the submitter; never interpreted */
    enum op_kind kind;
    int fd;                /* write, read, flush, unlock, linked */
    uint64_t offset;       /* write, read: in the file */
    void *data;            /* written to by read and gather only */
    uint64_t size;         /* of data */
    const void *segments;  /* gather, scatter: a checked table of struct copy_segment */
    size_t segment_count;
    uint32_t checksum;     /* scatter: what to expect; gather, checksum: what was found */
    struct op *steps;      /* chain: all but copies, checksums and reads, by `next`, each once the one before it succeeded */
    size_t steps_ended;    /* chain: how many were performed; where it failed, the last of them did */
    int64_t ended_at;      /* step of a chain: nanoseconds of CLOCK_MONOTONIC */
    int64_t result;        /* bytes moved, or 0, or -errno */
};

/* Whether it goes to storage; else it stays in memory. */
static inline bool op_is_io(const struct op *op)
{
    return op->kind == OP_WRITE || op->kind == OP_READ || op->kind == OP_FLUSH || op->kind == OP_CHAIN;
}

/* First in, first out. */
struct op_list {
    struct op *first;
    struct op *last;
    size_t count;
};

static inline void op_list_push(struct op_list *list, struct op *op)
{
    op->next = NULL;
    if (list->last)
        list->last->next = op;
    else
        list->first = op;
    list->last = op;
    list->count++;
}

static inline struct op *op_list_pop(struct op_list *list)
{
    struct op *op = list->first;
    if (op) {
        list->first = op->next;
        if (!list->first)
            list->last = NULL;
        list->count--;
        op->next = NULL;
    }
    return op;
}

/* Move all of `from` to the end of `list`. */
static inline void op_list_append(struct op_list *list, struct op_list *from)
{
    if (!from->first)
        return;
    if (list->last)
        list->last->next = from->first;
    else
        list->first = from->first;
    list->last = from->last;
    list->count += from->count;
    *from = (struct op_list){0};
}

/* Take out the operation named `token`; NULL where it is not there. */
static inline struct op *op_list_remove(struct op_list *list, uint64_t token)
{
    struct op *before = NULL;
    for (struct op *op = list->first; op; before = op, op = op->next) {
        if (op->token != token)
            continue;
        if (before)
            before->next = op->next;
        else
            list->first = op->next;
        if (list->last == op)
            list->last = before;
        list->count--;
        op->next = NULL;
        return op;
    }
    return NULL;
}

#define ENGINE_MOST_THREADS 256

/* 1 to ENGINE_MOST_THREADS each. What goes to storage never waits behind what stays in memory, nor the other way. */
struct engine_options {
    unsigned io_threads;   /* for write, read, flush and chain; io_uring: writes and reads in the kernel at a time */
    unsigned copy_threads; /* for gather, scatter and checksum */
};

/* Forget a descriptor, then close it: a child forked in between keeps it, but does not close another of that number. */
static inline void close_fd(int *fd)
{
    const int closing = *fd;
    *fd = -1;
    if (closing >= 0)
        close(closing);
}

/* Called by one thread at a time. Operations are reported with queue_complete(), from any thread. */
struct engine {
    const char *name;

    /* 0 and *state, or -errno. */
    int (*open)(struct queue *queue, const struct engine_options *options, void **state);

    /* Take an operation. It need not start before commit(), which follows every batch. */
    void (*submit)(void *state, struct op *op);
    void (*commit)(void *state);

    /* True where the operation had not started: it is reported, with -ECANCELED. Else it ends as it will. */
    bool (*cancel)(void *state, uint64_t token);

    /* Report what has not started as cancelled, wait for what has, report it. The queue frees the state, by free(). */
    void (*close)(void *state);

    /* In a forked child: close its copies of descriptors. NULL where there are none. It may have been forked in the
     * middle of anything. */
    void (*disown)(void *state);
};

extern const struct engine threads_engine;
extern const struct engine uring_engine;

#endif
