/* SPDX-License-Identifier: Apache-2.0 */
/* Copies between scattered memory and one buffer, with checksums of all of the buffer. */
#ifndef PCCHECK_COPY_H
#define PCCHECK_COPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* `length` bytes at `address` correspond to `offset` of the buffer. Tables are arrays of these, maybe unaligned. */
struct copy_segment {
    uint64_t address;
    uint64_t offset;
    uint64_t length;
};

/* Check a table against a buffer of `size` bytes: 0, or -EINVAL where a segment leaves the buffer or the address space,
 * or, with `ordered`, overlaps the one before it or comes before it. *bad is the index of the offender. */
int copy_check(const void *segments, size_t count, uint64_t size, bool ordered, size_t *bad);

/* Fill all of `buffer`: the segments (checked, ordered), and zeros between and behind them. Fills `sums`, the
 * table of the CRC-32 of each MiB of it (see crc32.h).
 *
 * The checksums are computed from the stored bytes; each is read from the source once. So they hold for what will be
 * written even if the source changes meanwhile. Always 0. */
int copy_gather(const void *segments, size_t count, void *buffer, uint64_t size, uint8_t *sums);

/* Copy the segments (checked) out of `buffer` if its CRC-32 is `checksum`; else -EBADMSG, and nothing is copied. */
int copy_scatter(const void *segments, size_t count, const void *buffer, uint64_t size, uint32_t checksum);

#endif
