/* SPDX-License-Identifier: Apache-2.0 */
/* CRC-32 (IEEE 802.3, reflected, polynomial 0xedb88320): the values of zlib's crc32(). */
#ifndef PCCHECK_CRC32_H
#define PCCHECK_CRC32_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One way to compute it. `update` works on the raw register: the caller inverts before the first and after the last.
 *
 * `copy` (NULL if a variant has none) does the same while it copies. It loads each byte once, so the checksum is of the
 * bytes it stores even if the source changes meanwhile. It stores past the caches, so that no line is read from memory
 * only to be overwritten: for destinations that are not read at once. The stores are ordered when it returns, as those
 * of any other function are. */
struct crc32_variant {
    const char *name;
    bool (*supported)(void);
    uint32_t (*update)(uint32_t state, const uint8_t *data, size_t size);
    uint32_t (*copy)(uint32_t state, uint8_t *to, const uint8_t *from, size_t size);
};

/* All that this build contains, fastest first; the last one runs everywhere. */
extern const struct crc32_variant crc32_variants[];
extern const size_t crc32_variant_count;

/* Return the fastest that this processor runs. Cheap, and not cached: there is no state to initialise or race for. */
const struct crc32_variant *crc32_select(void);

/* CRC-32 of `data`, continuing from `value` (0 to begin). */
uint32_t crc32_update(uint32_t value, const void *data, size_t size);

/* ---- Tables of the CRC-32 of each MiB of some bytes, the last one maybe shorter: four bytes each, little-endian. */

#define CRC32_PIECE (UINT64_C(1) << 20)

/* How many a table for `size` bytes has. */
static inline uint64_t crc32_piece_count(uint64_t size)
{
    return size / CRC32_PIECE + (size % CRC32_PIECE != 0);
}

static inline void crc32_store_sum(uint8_t *sum, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        sum[i] = (uint8_t)(value >> 8 * i);
}

static inline uint32_t crc32_load_sum(const uint8_t *sum)
{
    return (uint32_t)sum[0] | (uint32_t)sum[1] << 8 | (uint32_t)sum[2] << 16 | (uint32_t)sum[3] << 24;
}

/* Fill a table. */
void crc32_pieces(const void *data, uint64_t size, uint8_t *sums);

/* The CRC-32 of all `size` bytes, from their table alone: a remainder moves over the bytes behind it by a multiplication
 * with x^(8 * bytes) mod P, as zlib's crc32_combine() does it. */
uint32_t crc32_combine(const uint8_t *sums, uint64_t size);

#endif
