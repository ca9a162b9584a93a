/* A ring of requests to the kernel and one of their completions (io_uring), by its system calls alone. */
#ifndef PCCHECK_RING_H
#define PCCHECK_RING_H

#include <stdbool.h>
#include <stddef.h>

#include "ring_abi.h"

struct ring {
    int fd;        /* readable while there are completions */
    uint32_t tail; /* of the requests, those included that the kernel was not told of yet */

    /* Shared with the kernel; a forked child does not have them. */
    uint32_t *request_head, *request_tail, request_mask;
    uint32_t *completion_head, *completion_tail, completion_mask;
    struct ring_request *requests;
    struct ring_completion *completions;
    void *rings;
    size_t rings_size, requests_size;
};

/* A ring for `requests` requests at a time and twice as many completions: 0, or -errno (-ENOSYS where the kernel is
 * older than 5.6). */
int ring_open(struct ring *ring, unsigned requests);

/* Free a ring; nothing is in the kernel. */
void ring_close(struct ring *ring);

/* The next request, all zeros. No more than the ring was made for may be open at a time. */
struct ring_request *ring_request(struct ring *ring);

/* Hand the requests to the kernel: 0, or -errno, and then those it refused stay, to be tried again or taken back. */
int ring_submit(struct ring *ring);

/* Take back the newest request that was not handed over; NULL where there is none. */
const struct ring_request *ring_take_back(struct ring *ring);

/* Take the oldest completion; false where there is none. */
bool ring_next(struct ring *ring, struct ring_completion *completion);

#endif
