/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "transfer.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

_Static_assert(sizeof(off_t) == 8, "build with 64-bit file offsets");

/* Most bytes of one call. Linux moves at most 2 GiB less a page; a power of two below that keeps the next call aligned
 * for direct I/O. */
#ifndef TRANSFER_MOST_BYTES
#define TRANSFER_MOST_BYTES (UINT64_C(1) << 30)
#endif

/* No direct I/O is aligned to less. */
#define SMALLEST_SECTOR 512

/* Busy answers in a row, a millisecond apart, before they are reported. */
#ifndef TRANSFER_MOST_RETRIES
#define TRANSFER_MOST_RETRIES 1000
#endif

/* Whether a call that failed with `error` deserves another try. EAGAIN is rare on files: a filesystem or a driver out
 * of requests for a moment. Files always poll as ready, so there is nothing to wait for but time. */
static int retriable(int error, unsigned *retries)
{
    if (error == EINTR)
        return 1;
    if (error != EAGAIN || ++*retries > TRANSFER_MOST_RETRIES)
        return 0;
    poll(NULL, 0, 1);
    return 1;
}

static int64_t move(bool reading, int fd, uint8_t *data, uint64_t size, uint64_t offset)
{
    if (size > INT64_MAX || offset > INT64_MAX - size)
        return -EINVAL;
    unsigned retries = 0;
    uint64_t done = 0;
    while (done < size) {
        const size_t part = size - done < TRANSFER_MOST_BYTES ? size - done : TRANSFER_MOST_BYTES;
        const ssize_t n = reading ? pread(fd, data + done, part, (off_t)(offset + done))
                                  : pwrite(fd, data + done, part, (off_t)(offset + done));
        if (n > 0) {
            done += (uint64_t)n;
            retries = 0;
        } else if (n == 0) {
            if (!reading)
                return -EIO; /* a write that moves nothing would be repeated for ever */
            break;
        } else if (!retriable(errno, &retries)) {
            if (reading && errno == EINVAL && done % SMALLEST_SECTOR != 0)
                break; /* a direct read ended inside a sector: the end of the file, and some refuse to read on there */
            return -errno;
        }
    }
    return (int64_t)done;
}

int64_t transfer_write(int fd, const void *data, uint64_t size, uint64_t offset)
{
    return move(false, fd, (uint8_t *)(uintptr_t)data, size, offset);
}

int64_t transfer_read(int fd, void *data, uint64_t size, uint64_t offset)
{
    return move(true, fd, data, size, offset);
}

int64_t transfer_flush(int fd)
{
    while (fdatasync(fd) != 0) {
        if (errno != EINTR) /* nothing else may be retried: the kernel reports a lost write once (fsyncgate) */
            return -errno;
    }
    return 0;
}

int64_t transfer_unlock(int fd)
{
    return flock(fd, LOCK_UN) == 0 ? 0 : -errno; /* it waits for nobody */
}

int64_t transfer_linked(int fd)
{
    /* Only the link count is requested: after a query of its times, the next write to a file stores new ones, which is a
     * journal transaction as slow as a flush (multigrain timestamps, Linux 6.13). */
    struct statx status;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_NLINK, &status) == 0)
        return (status.stx_mask & STATX_NLINK) != 0 && status.stx_nlink == 0 ? -ENOENT : 0;
    struct stat old;
    return fstat(fd, &old) == 0 && old.st_nlink == 0 ? -ENOENT : 0;
}

/* Linux 6.1; older headers lack the names but leave room where the fields are. */
#define DIOALIGN_MASK 0x2000u
#define DIOALIGN_MEMORY_AT 152
#define DIOALIGN_OFFSET_AT 156

int transfer_alignment(int fd, uint32_t *memory, uint32_t *offset)
{
    struct statx status;
    _Static_assert(sizeof status >= DIOALIGN_OFFSET_AT + sizeof *offset, "struct statx has 256 bytes");
    memset(&status, 0, sizeof status);
    if (statx(fd, "", AT_EMPTY_PATH, DIOALIGN_MASK, &status) != 0) {
        /* EPERM: by a seccomp filter that is older than the call; an open file may always be asked. */
        return errno == ENOSYS || errno == EINVAL || errno == EPERM ? -ENODATA : -errno;
    }
    if ((status.stx_mask & DIOALIGN_MASK) == 0)
        return -ENODATA;
    memcpy(memory, (const uint8_t *)&status + DIOALIGN_MEMORY_AT, sizeof *memory);
    memcpy(offset, (const uint8_t *)&status + DIOALIGN_OFFSET_AT, sizeof *offset);
    return 0;
}
