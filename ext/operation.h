/* SPDX-License-Identifier: Apache-2.0 */
/* Operations, and lists of them. */
#ifndef PCCHECK_OPERATION_H
#define PCCHECK_OPERATION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "copy.h"

enum op_kind { OP_WRITE, OP_READ, OP_FLUSH, OP_GATHER, OP_SCATTER, OP_CHECKSUM, OP_CHAIN, OP_UNLOCK, OP_LINKED };
#define OP_KINDS 9

/* One operation. Its submitter owns the memory, and leaves it and all it points to unchanged until it is reaped. */
struct op {
    struct op *next;       /* in the list that holds the operation at the moment */
    uint64_t token;        /* names it to the submitter; never interpreted */
    enum op_kind kind;
    int fd;                /* write, read, flush, unlock, linked */
    uint64_t offset;       /* write, read: in the file */
    void *data;            /* written to by read and gather only */
    uint64_t size;         /* of data */
    const void *segments;  /* gather, scatter: a checked table of struct copy_segment */
    size_t segment_count;
    uint32_t checksum;     /* scatter: expected */
    uint8_t *sums;         /* gather, checksum: where the table of the CRC-32 of each MiB of data goes (see crc32.h) */
    struct op *steps;      /* chain: the first, others by `next`; each is performed after the one before it succeeded */
    size_t steps_ended;    /* chain: how many were performed; if the chain failed, the last of these failed */
    int64_t ended_at;      /* step of a chain: nanoseconds of CLOCK_MONOTONIC */
    int64_t result;        /* bytes moved, or 0, or -errno */
};

/* Whether the operation accesses storage, and not memory alone. */
static inline bool op_is_io(const struct op *op)
{
    return op->kind == OP_WRITE || op->kind == OP_READ || op->kind == OP_FLUSH || op->kind == OP_CHAIN;
}

/* Perform a gather: for guard_run(), as the buffer may be part of a mapped file. */
static inline void op_gather(void *argument)
{
    const struct op *op = argument;
    copy_gather(op->segments, op->segment_count, op->data, op->size, op->sums);
}

/* Perform a scatter: for guard_run(), as the data may be part of a mapped file. */
static inline void op_scatter(void *argument)
{
    struct op *op = argument;
    op->result = copy_scatter(op->segments, op->segment_count, op->data, op->size, op->checksum);
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

/* Remove and return the operation named `token`; NULL if the list does not hold it. */
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

#endif
