/* What the kernel and a ring say to each other (io_uring as of Linux 5.6; it never changes). Written down here, since
 * the headers that wheels are built with are older, and a header that is there may still lack what is needed. */
#ifndef PCCHECK_RING_ABI_H
#define PCCHECK_RING_ABI_H

#include <stdint.h>
#include <sys/syscall.h>

#ifndef __NR_io_uring_setup /* the same on every architecture that is newer than the call, and on x86 */
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#define __NR_io_uring_register 427
#endif

enum { RING_FSYNC = 3, RING_ASYNC_CANCEL = 14, RING_READ = 22, RING_WRITE = 23 };

#define RING_REQUEST_ASYNC (1u << 4)  /* in flags: do not try without a thread of the kernel first */
#define RING_FSYNC_DATASYNC (1u << 0) /* in operation_flags */

struct ring_request {
    uint8_t operation;
    uint8_t flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset;
    uint64_t address; /* to cancel: the user_data of the other request */
    uint32_t length;
    uint32_t operation_flags;
    uint64_t user_data;
    uint64_t unused[3];
};

struct ring_completion {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
};

/* Where things lie in the memory that is shared. */
struct ring_request_offsets {
    uint32_t head, tail, mask, entries, flags, dropped, array, unused;
    uint64_t address;
};

struct ring_completion_offsets {
    uint32_t head, tail, mask, entries, overflow, completions, flags, unused;
    uint64_t address;
};

#define RING_FEATURE_SINGLE_MAPPING (1u << 0)
#define RING_FEATURE_NO_DROP (1u << 1)

struct ring_parameters {
    uint32_t request_entries, completion_entries, flags, thread_cpu, thread_idle, features, workers, unused[3];
    struct ring_request_offsets requests;
    struct ring_completion_offsets completions;
};

#define RING_MAP_RINGS 0
#define RING_MAP_REQUESTS 0x10000000

#define RING_REGISTER_PROBE 8
#define RING_PROBE_SUPPORTED (1u << 0)
#define RING_PROBED (RING_WRITE + 1) /* operations, from the first one on */

struct ring_probe {
    uint8_t last, count;
    uint16_t unused[7];
    struct {
        uint8_t operation, unused_byte;
        uint16_t flags;
        uint32_t unused;
    } operations[RING_PROBED];
};

_Static_assert(sizeof(struct ring_request) == 64 && sizeof(struct ring_completion) == 16, "as the kernel has them");
_Static_assert(sizeof(struct ring_parameters) == 120 && sizeof(struct ring_probe) == 16 + 8 * RING_PROBED, "so, too");

#endif
