/* Transfers between memory and files at an offset, whole or not at all where the file has the bytes. */
#ifndef PCCHECK_TRANSFER_H
#define PCCHECK_TRANSFER_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Most bytes of one call. Linux moves at most 2 GiB less a page; a power of two below that keeps what follows aligned
 * for direct I/O. */
#ifndef TRANSFER_MOST_BYTES
#define TRANSFER_MOST_BYTES (UINT64_C(1) << 30)
#endif

/* No direct I/O is aligned to less. */
#define TRANSFER_SMALLEST_SECTOR 512

static inline uint32_t transfer_part(uint64_t left)
{
    return (uint32_t)(left < TRANSFER_MOST_BYTES ? left : TRANSFER_MOST_BYTES);
}

static inline bool transfer_out_of_range(uint64_t size, uint64_t offset)
{
    return size > INT64_MAX || offset > INT64_MAX - size;
}

/* One call of a transfer returned `n` (bytes, or -errno): add to `done`. True: it was the last one, and `result` is the
 * result of the transfer; false: another call is to move the rest. */
static inline bool transfer_ends(bool reading, uint64_t size, int64_t n, uint64_t *done, int64_t *result)
{
    if (n > 0) {
        *done += (uint64_t)n;
        *result = (int64_t)*done;
        return *done >= size;
    }
    if (n == 0)
        *result = reading ? (int64_t)*done : -EIO; /* a write that moves nothing would be repeated for ever */
    else if (reading && n == -EINVAL && *done % TRANSFER_SMALLEST_SECTOR != 0)
        *result = (int64_t)*done; /* a direct read ended inside a sector: the file's end, and some go no further */
    else
        *result = n;
    return true;
}

/* Write all `size` bytes at `offset`: `size`, or -errno (-EIO where the device takes no bytes). */
int64_t transfer_write(int fd, const void *data, uint64_t size, uint64_t offset);

/* Read up to `size` bytes from `offset`: how many there were, fewer only at the end of the file; or -errno. */
int64_t transfer_read(int fd, void *data, uint64_t size, uint64_t offset);

/* Make what was written durable (fdatasync: data, and the metadata that is needed to read it): 0, or -errno. */
int64_t transfer_flush(int fd);

/* Let go of the lock (flock) that its open file holds: 0, or -errno. */
int64_t transfer_unlock(int fd);

/* Whether a name still leads to an open file, so that what is written to it can be found: 0, or -ENOENT. 0 also where
 * that cannot be told. */
int64_t transfer_linked(int fd);

/* What direct I/O on `fd` needs, by statx: the alignment of memory and that of offsets and lengths, in bytes; both 0
 * where the file does not support it. -ENODATA where the kernel or the filesystem does not say; else 0, or -errno. */
int transfer_alignment(int fd, uint32_t *memory, uint32_t *offset);

#endif
