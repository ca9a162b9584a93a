/* SPDX-License-Identifier: Apache-2.0 */
#include "copy.h"

#include <errno.h>
#include <string.h>

#include "crc32.h"

/* Bytes copied before they are checksummed: few enough that they are still in the second-level cache (the source passes
 * through it too), enough that the prefetching of the source pays. Measured: 64 KiB beats 16, and 128 is no better. */
#define BLOCK ((uint64_t)64 << 10)

/* From how many bytes on a segment is copied and checksummed in one pass. Measured: at 4 KiB that is 1.5 times as fast
 * as a block, which matters with many small tensors; at 10 MiB twice. */
#define LONG ((uint64_t)4 << 10)

static inline struct copy_segment segment_at(const void *segments, size_t index)
{
    struct copy_segment segment;
    memcpy(&segment, (const uint8_t *)segments + index * sizeof segment, sizeof segment);
    return segment;
}

static inline uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

int copy_check(const void *segments, size_t count, uint64_t size, bool ordered, size_t *bad)
{
    uint64_t filled = 0;
    for (size_t i = 0; i < count; i++) {
        const struct copy_segment s = segment_at(segments, i);
        const bool inside = s.offset <= size && s.length <= size - s.offset;
        const bool addressable = s.length == 0 || (s.address != 0 && s.address <= UINTPTR_MAX - (s.length - 1));
        if (!inside || !addressable || (ordered && s.offset < filled)) {
            *bad = i;
            return -EINVAL;
        }
        filled = s.offset + s.length;
    }
    return 0;
}

int copy_gather(const void *segments, size_t count, void *buffer, uint64_t size, uint8_t *sums)
{
    const struct crc32_variant *crc = crc32_select();
    uint8_t *const base = buffer;
    struct copy_segment next = {0, size, 0}; /* as if a segment began where the buffer ends */
    uint32_t state = ~UINT32_C(0);
    uint64_t piece = smaller(CRC32_PIECE, size); /* where the MiB ends that is being filled */
    size_t taken = 0;

    if (taken < count)
        next = segment_at(segments, taken++);
    for (uint64_t done = 0, summed = 0; done < size;) {
        const uint64_t end = summed + smaller(BLOCK, piece - summed);
        if (next.length == 0 && next.offset <= done) {
            next = taken < count ? segment_at(segments, taken++) : (struct copy_segment){0, size, 0};
        } else if (next.offset > done) {
            const uint64_t gap = smaller(next.offset, end) - done;
            memset(base + done, 0, gap);
            done += gap;
        } else {
            const bool at_once = crc->copy && next.length >= LONG;
            const uint64_t part = smaller(next.length, (at_once ? piece : end) - done);
            const uint8_t *const from = (const uint8_t *)(uintptr_t)next.address;
            if (at_once) {
                state = crc->update(state, base + summed, done - summed);
                state = crc->copy(state, base + done, from, part);
                summed = done + part;
            } else {
                memcpy(base + done, from, part);
            }
            done += part;
            next.address += part;
            next.offset += part;
            next.length -= part;
        }
        if (done == end) {
            state = crc->update(state, base + summed, done - summed);
            summed = done;
        }
        if (summed == piece) {
            crc32_store_sum(sums, ~state);
            sums += 4;
            state = ~UINT32_C(0);
            piece += smaller(CRC32_PIECE, size - piece);
        }
    }
    return 0;
}

int copy_scatter(const void *segments, size_t count, const void *buffer, uint64_t size, uint32_t checksum)
{
    if (crc32_update(0, buffer, size) != checksum)
        return -EBADMSG;
    for (size_t i = 0; i < count; i++) {
        const struct copy_segment s = segment_at(segments, i);
        if (s.length > 0)
            memcpy((void *)(uintptr_t)s.address, (const uint8_t *)buffer + s.offset, s.length);
    }
    return 0;
}
