/* SPDX-License-Identifier: Apache-2.0 */
/* Transfers between memory and files at an offset, whole or not at all where the file has the bytes. */
#ifndef PCCHECK_TRANSFER_H
#define PCCHECK_TRANSFER_H

#include <stdint.h>

/* Write all `size` bytes at `offset`: `size`, or -errno (-EIO where the device takes no bytes). */
int64_t transfer_write(int fd, const void *data, uint64_t size, uint64_t offset);

/* Read up to `size` bytes from `offset`: how many there were, fewer only at the end of the file; or -errno. */
int64_t transfer_read(int fd, void *data, uint64_t size, uint64_t offset);

/* Make what was written durable (fdatasync: data, and the metadata that is needed to read it): 0, or -errno. */
int64_t transfer_flush(int fd);

/* Release the lock (flock) that the open file holds: 0, or -errno. */
int64_t transfer_unlock(int fd);

/* Whether the open file still has a name, so that what is written to it can be found: 0, or -ENOENT. 0 also if that
 * cannot be told. */
int64_t transfer_linked(int fd);

/* What direct I/O on `fd` needs, by statx: the alignment of memory and that of offsets and lengths, in bytes; both 0
 * where the file does not support it. -ENODATA where the kernel or the filesystem does not say; else 0, or -errno. */
int transfer_alignment(int fd, uint32_t *memory, uint32_t *offset);

#endif
