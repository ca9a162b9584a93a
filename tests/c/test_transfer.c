/* The transfer loops against a file that answers in every way a file may. */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A file in memory, and a script of answers: a number of bytes at most, -errno, or ALL. */
enum { ALL = 1 << 20, FILE_BYTES = 5000, OTHER_FD = 1000 };
static uint8_t file[FILE_BYTES];
static const int *script;
static size_t calls, largest;

static int next_answer(size_t size)
{
    const int answer = *script == 0 ? ALL : *script++;
    calls++;
    if (size > largest)
        largest = size;
    if (answer < 0)
        errno = -answer;
    return answer;
}

static ssize_t scripted(uint8_t *to, const uint8_t *from, size_t size, size_t limit)
{
    const int answer = next_answer(size);
    if (answer < 0)
        return -1;
    if (size > (size_t)answer)
        size = (size_t)answer;
    if (size > limit)
        size = limit;
    memcpy(to, from, size);
    return (ssize_t)size;
}

static ssize_t fake_pwrite(int fd, const void *data, size_t size, off_t offset)
{
    CHECK(fd == OTHER_FD);
    return scripted(file + offset, data, size, FILE_BYTES - (size_t)offset);
}

static ssize_t fake_pread(int fd, void *data, size_t size, off_t offset)
{
    CHECK(fd == OTHER_FD);
    return scripted(data, file + offset, size, FILE_BYTES - (size_t)offset);
}

static int fake_fdatasync(int fd)
{
    CHECK(fd == OTHER_FD);
    return next_answer(0) < 0 ? -1 : 0;
}

static int fake_statx(int fd, const char *path, int flags, unsigned mask, struct statx *status)
{
    return next_answer(0) < 0 ? -1 : statx(fd, path, flags, mask, status);
}

static int fake_poll(void)
{
    return 0;
}

#include <poll.h>
#define pwrite fake_pwrite
#define pread fake_pread
#define fdatasync fake_fdatasync
#define poll(...) fake_poll()
#define statx(...) fake_statx(__VA_ARGS__)
#define TRANSFER_MOST_BYTES UINT64_C(1024)
#define TRANSFER_MOST_RETRIES 3
#include "transfer.c"
#undef pwrite
#undef pread
#undef fdatasync
#undef poll
#undef statx

#define SCRIPT(...) (script = (const int[]){__VA_ARGS__, 0}, calls = 0, largest = 0)

static void test_writes(const uint8_t *data)
{
    SCRIPT(ALL);
    CHECK(transfer_write(OTHER_FD, data, 4000, 100) == 4000 && calls == 4 && largest == 1024);
    CHECK(memcmp(file + 100, data, 4000) == 0);
    memset(file, 0, sizeof file);
    SCRIPT(1, -EINTR, 512, -EAGAIN, -EAGAIN, -EAGAIN, 7, -EAGAIN);
    CHECK(transfer_write(OTHER_FD, data, 3000, 0) == 3000);
    CHECK(memcmp(file, data, 3000) == 0 && file[3000] == 0);
    SCRIPT(-EAGAIN, -EAGAIN, -EAGAIN, -EAGAIN);
    CHECK(transfer_write(OTHER_FD, data, 10, 0) == -EAGAIN && calls == 4);
    SCRIPT(100, -ENOSPC);
    CHECK(transfer_write(OTHER_FD, data, 200, 0) == -ENOSPC);
    SCRIPT(ALL);
    CHECK(transfer_write(OTHER_FD, data, 10, FILE_BYTES) == -EIO); /* takes no bytes: not for ever */
    CHECK(transfer_write(OTHER_FD, data, 0, 0) == 0 && calls == 1);
    CHECK(transfer_write(OTHER_FD, data, 10, UINT64_MAX) == -EINVAL);
    CHECK(transfer_write(OTHER_FD, data, UINT64_MAX, 0) == -EINVAL);
}

static void test_reads(const uint8_t *data)
{
    uint8_t into[FILE_BYTES + 100];
    memcpy(file, data, sizeof file);
    SCRIPT(3, -EINTR, -EAGAIN, 1000);
    CHECK(transfer_read(OTHER_FD, into, 4000, 50) == 4000 && largest == 1024);
    CHECK(memcmp(into, data + 50, 4000) == 0);
    SCRIPT(ALL);
    CHECK(transfer_read(OTHER_FD, into, sizeof into, 0) == FILE_BYTES);
    CHECK(transfer_read(OTHER_FD, into, 10, FILE_BYTES) == 0);
    SCRIPT(700, -EINVAL); /* a direct read that met the end of the file inside a sector */
    CHECK(transfer_read(OTHER_FD, into, 4000, 0) == 700);
    SCRIPT(512, -EINVAL);
    CHECK(transfer_read(OTHER_FD, into, 4000, 0) == -EINVAL);
    SCRIPT(-EINVAL);
    CHECK(transfer_read(OTHER_FD, into, 4000, 1) == -EINVAL);
    SCRIPT(512, -EIO);
    CHECK(transfer_read(OTHER_FD, into, 4000, 0) == -EIO);
    CHECK(transfer_read(OTHER_FD, into, UINT64_MAX, 1) == -EINVAL);
}

static void test_flushes(void)
{
    SCRIPT(-EINTR, -EINTR, ALL);
    CHECK(transfer_flush(OTHER_FD) == 0 && calls == 3);
    SCRIPT(-EIO);
    CHECK(transfer_flush(OTHER_FD) == -EIO && calls == 1); /* asking again would get a lie */
    SCRIPT(-EAGAIN);
    CHECK(transfer_flush(OTHER_FD) == -EAGAIN && calls == 1); /* and so it may where the kernel failed so */
}

static void test_alignment(void)
{
    uint32_t memory = 1, offset = 1;
    char name[] = "/tmp/pccheck-test-XXXXXX";
    const int fd = mkstemp(name);
    CHECK(fd >= 0);
    unlink(name);
    SCRIPT(-ENOSYS, -EINVAL, -EPERM, -EIO); /* an old kernel; a filter that knows of no such call; a device */
    CHECK(transfer_alignment(fd, &memory, &offset) == -ENODATA && transfer_alignment(fd, &memory, &offset) == -ENODATA);
    CHECK(transfer_alignment(fd, &memory, &offset) == -ENODATA && transfer_alignment(fd, &memory, &offset) == -EIO);
    const int found = transfer_alignment(fd, &memory, &offset);
    CHECK(found == 0 || found == -ENODATA);
    if (found == 0)
        CHECK((memory & (memory - 1)) == 0 && (offset & (offset - 1)) == 0);
    close(fd);
    CHECK(transfer_alignment(fd, &memory, &offset) == -EBADF);
}

static void test_links(void)
{
    char name[] = "/tmp/pccheck-test-XXXXXX";
    const int fd = mkstemp(name);
    CHECK(fd >= 0);
    SCRIPT(ALL, -ENOSYS, ALL, -ENOSYS); /* where the kernel has no such call, an older one says the same */
    CHECK(transfer_linked(fd) == 0 && transfer_linked(fd) == 0);
    unlink(name);
    CHECK(transfer_linked(fd) == -ENOENT && transfer_linked(fd) == -ENOENT && calls == 4);
    close(fd);
    CHECK(transfer_linked(fd) == 0);
}

int main(void)
{
    uint64_t seed = 4;
    uint8_t *data = random_bytes(&seed, FILE_BYTES);
    test_writes(data);
    test_reads(data);
    test_flushes();
    test_alignment();
    test_links();
    free(data);
    return 0;
}
