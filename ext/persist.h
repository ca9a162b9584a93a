/* SPDX-License-Identifier: Apache-2.0 */
/* Stores to memory that keeps them: bytes are durable once their cache lines were written back, and a fence came after.
 *
 * That holds where a file is mapped with MAP_SYNC (a DAX filesystem). Anywhere else these are copies like others. */
#ifndef PCCHECK_PERSIST_H
#define PCCHECK_PERSIST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct persist_variant {
    const char *name;
    bool (*supported)(void);
    void (*write_back)(uintptr_t begin, uintptr_t end); /* the lines that hold [begin, end); their order is open */
    void (*fence)(void);                                /* what was written back before is durable before what follows */
};

/* From the best to the most general one; the last is supported wherever any is. */
extern const struct persist_variant persist_variants[];
extern const size_t persist_variant_count;

/* The first one that this processor supports, NULL where there is none. */
const struct persist_variant *persist_select(void);

/* Copy, past the caches where that is possible. Volatile until written back. */
void persist_copy(void *to, const void *from, size_t size);

#endif
