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

#endif
