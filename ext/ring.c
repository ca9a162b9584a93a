#define _GNU_SOURCE
#include "ring.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine.h"

/* One mapping for both rings; and completions are never dropped, though there is room for all of them anyway. */
#define NEEDED_FEATURES (RING_FEATURE_SINGLE_MAPPING | RING_FEATURE_NO_DROP)

static int probe(int fd)
{
    static const uint8_t needed[] = {RING_FSYNC, RING_ASYNC_CANCEL, RING_READ, RING_WRITE};
    struct ring_probe probe;

    memset(&probe, 0, sizeof probe);
    if (syscall(__NR_io_uring_register, fd, RING_REGISTER_PROBE, &probe, RING_PROBED) < 0)
        return errno == EINVAL ? -ENOSYS : -errno; /* EINVAL: a kernel older than the question */
    for (size_t i = 0; i < sizeof needed; i++) {
        if (needed[i] >= probe.count || !(probe.operations[needed[i]].flags & RING_PROBE_SUPPORTED))
            return -ENOSYS;
    }
    return 0;
}

static void *map(int fd, size_t size, off_t what)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    if (memory == MAP_FAILED)
        return NULL;
    madvise(memory, size, MADV_DONTFORK);
    return memory;
}

static int map_rings(struct ring *ring, const struct ring_parameters *found)
{
    const size_t to_requests = found->requests.array + found->request_entries * sizeof(uint32_t);
    const size_t to_completions =
        found->completions.completions + found->completion_entries * sizeof(struct ring_completion);

    ring->rings_size = to_requests > to_completions ? to_requests : to_completions;
    ring->requests_size = found->request_entries * sizeof(struct ring_request);
    ring->rings = map(ring->fd, ring->rings_size, RING_MAP_RINGS);
    ring->requests = map(ring->fd, ring->requests_size, RING_MAP_REQUESTS);
    if (!ring->rings || !ring->requests)
        return -ENOMEM;

    uint8_t *rings = ring->rings;
    ring->request_head = (uint32_t *)(rings + found->requests.head);
    ring->request_tail = (uint32_t *)(rings + found->requests.tail);
    ring->request_mask = found->request_entries - 1;
    ring->completion_head = (uint32_t *)(rings + found->completions.head);
    ring->completion_tail = (uint32_t *)(rings + found->completions.tail);
    ring->completion_mask = found->completion_entries - 1;
    ring->completions = (struct ring_completion *)(rings + found->completions.completions);
    uint32_t *order = (uint32_t *)(rings + found->requests.array);
    for (uint32_t i = 0; i < found->request_entries; i++)
        order[i] = i;
    return 0;
}

int ring_open(struct ring *ring, unsigned requests)
{
    struct ring_parameters parameters;
    int error;

    memset(ring, 0, sizeof *ring);
    memset(&parameters, 0, sizeof parameters);
    ring->fd = (int)syscall(__NR_io_uring_setup, requests, &parameters); /* close-on-exec by itself */
    if (ring->fd < 0)
        return -errno;
    error = (parameters.features & NEEDED_FEATURES) == NEEDED_FEATURES ? probe(ring->fd) : -ENOSYS;
    if (error == 0)
        error = map_rings(ring, &parameters);
    if (error < 0)
        ring_close(ring);
    return error;
}

void ring_close(struct ring *ring)
{
    if (ring->rings)
        munmap(ring->rings, ring->rings_size);
    if (ring->requests)
        munmap(ring->requests, ring->requests_size);
    close_fd(&ring->fd);
}

struct ring_request *ring_request(struct ring *ring)
{
    struct ring_request *request = &ring->requests[ring->tail++ & ring->request_mask];
    memset(request, 0, sizeof *request);
    return request;
}

static uint32_t not_handed_over(const struct ring *ring)
{
    return ring->tail - __atomic_load_n(ring->request_head, __ATOMIC_ACQUIRE);
}

int ring_submit(struct ring *ring)
{
    __atomic_store_n(ring->request_tail, ring->tail, __ATOMIC_RELEASE);
    for (uint32_t left; (left = not_handed_over(ring)) > 0;) {
        const long taken = syscall(__NR_io_uring_enter, ring->fd, left, 0, 0, NULL, 0);
        if (taken == 0)
            return -EAGAIN;
        if (taken < 0 && errno != EINTR)
            return -errno;
    }
    return 0;
}

const struct ring_request *ring_take_back(struct ring *ring)
{
    if (not_handed_over(ring) == 0)
        return NULL;
    ring->tail--;
    __atomic_store_n(ring->request_tail, ring->tail, __ATOMIC_RELEASE);
    return &ring->requests[ring->tail & ring->request_mask];
}

bool ring_next(struct ring *ring, struct ring_completion *completion)
{
    const uint32_t head = *ring->completion_head; /* written by this side only */
    if (head == __atomic_load_n(ring->completion_tail, __ATOMIC_ACQUIRE))
        return false;
    *completion = ring->completions[head & ring->completion_mask];
    __atomic_store_n(ring->completion_head, head + 1, __ATOMIC_RELEASE);
    return true;
}
