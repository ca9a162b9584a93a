/* Copies past the caches, and lines written back, by every variant that this processor has.
 *
 * With a folder as argument: in a file of it, which has to be mapped with MAP_SYNC. Says then what it did. */
#define _GNU_SOURCE
#include "check.h"
#include "persist.h"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MAP_SYNC
#define MAP_SYNC 0x80000
#endif
#ifndef MAP_SHARED_VALIDATE
#define MAP_SHARED_VALIDATE 0x03
#endif

enum { LINE = 64, MOST = 5 * LINE };

static sigjmp_buf back;

static void on_fault(int number)
{
    (void)number;
    siglongjmp(back, 1);
}

/* As it is used: stored, written back, fenced. Without a variant: stored. */
static void make_durable(const struct persist_variant *variant, uint8_t *to, const uint8_t *from, size_t size)
{
    persist_copy(to, from, size);
    if (variant) {
        variant->write_back((uintptr_t)to, (uintptr_t)to + size);
        variant->fence();
    }
}

/* One copy into `memory` at `to`, from an allocation that ends with it; all around has to stay. */
static void check_copy(const struct persist_variant *variant, uint64_t *seed, uint8_t *memory, size_t to, size_t from,
                       size_t size)
{
    uint8_t *const source = random_bytes(seed, from + size);
    memset(memory, 0xa5, to + size + LINE);
    make_durable(variant, memory + to, source + from, size);
    CHECK(memcmp(memory + to, source + from, size) == 0);
    for (size_t i = 0; i < to; i++)
        CHECK(memory[i] == 0xa5);
    for (size_t i = to + size; i < to + size + LINE; i++)
        CHECK(memory[i] == 0xa5);
    free(source);
}

static void test_copies(const struct persist_variant *variant, uint8_t *memory)
{
    uint64_t seed = 11;
    for (size_t to = 0; to < LINE; to++) {
        for (size_t size = 0; size <= MOST; size++)
            check_copy(variant, &seed, memory, to, random_below(&seed, LINE), size);
        for (size_t from = 0; from < LINE; from++)
            check_copy(variant, &seed, memory, to, from, LINE + random_below(&seed, 2000));
    }
}

/* Whether writing [begin, end) back reaches memory that cannot be read. */
static bool faults(const struct persist_variant *variant, const uint8_t *begin, const uint8_t *end)
{
    if (sigsetjmp(back, 1) != 0)
        return true;
    variant->write_back((uintptr_t)begin, (uintptr_t)end);
    variant->fence();
    return false;
}

/* Which lines are written back: the instructions fault on a page that must not be read, so that each end of a range is
 * seen from both sides. Emulators leave the instructions out, and nothing is seen. */
static bool test_ranges(const struct persist_variant *variant)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *const memory = mmap(NULL, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const struct sigaction ours = {.sa_handler = on_fault};
    struct sigaction before;
    CHECK(memory != MAP_FAILED);
    CHECK(mprotect(memory, page, PROT_NONE) == 0 && mprotect(memory + 2 * page, page, PROT_NONE) == 0);
    CHECK(sigaction(SIGSEGV, &ours, &before) == 0);
    uint8_t *const begin = memory + page, *const end = memory + 2 * page;
    memset(begin, 1, page);
    const bool seen = faults(variant, memory, begin);
    for (size_t inside = 0; seen && inside <= MOST; inside++) {
        CHECK(!faults(variant, begin, begin + inside));
        CHECK(!faults(variant, end - inside, end));
        CHECK(faults(variant, begin - 1, begin + inside));
        for (size_t beyond = 1; beyond <= LINE; beyond++)
            CHECK(faults(variant, end - inside, end + beyond));
    }
    CHECK(!faults(variant, begin, end));
    CHECK(!faults(variant, end, end)); /* nothing is no line */
    CHECK(sigaction(SIGSEGV, &before, NULL) == 0);
    CHECK(munmap(memory, 3 * page) == 0);
    return seen;
}

static void test_selection(void)
{
    const struct persist_variant *first = NULL;
    for (size_t i = persist_variant_count; i-- > 0;) {
        if (persist_variants[i].supported())
            first = &persist_variants[i];
    }
    CHECK(persist_variant_count > 0 && persist_select() == first);
#if defined(__x86_64__) || defined(__aarch64__)
    CHECK(persist_variants[persist_variant_count - 1].supported());
#endif
}

/* In a file: what was stored is what reading it gives, and what another mapping of it holds. */
static void test_file(const char *folder)
{
    enum { SIZE = 1 << 20 };
    const int fd = open(folder, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && posix_fallocate(fd, 0, SIZE) == 0);
    uint8_t *const memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0);
    if (memory == MAP_FAILED) {
        perror("MAP_SYNC");
        exit(1);
    }
    printf("MAP_SYNC accepted\n");
    uint64_t seed = 5;
    uint8_t *const data = random_bytes(&seed, SIZE), *const seen = malloc(SIZE);
    CHECK(seen);
    for (size_t i = 0; i < persist_variant_count; i++) {
        const struct persist_variant *const variant = &persist_variants[i];
        if (!variant->supported())
            continue;
        data[0] ^= 0xff;
        data[SIZE - 1] ^= 0xff;
        test_copies(variant, memory);
        make_durable(variant, memory, data, SIZE);
        CHECK(pread(fd, seen, SIZE, 0) == SIZE && memcmp(seen, data, SIZE) == 0);
        printf("%s: right\n", variant->name);
    }
    free(seen);
    free(data);
    CHECK(munmap(memory, SIZE) == 0 && close(fd) == 0);
}

int main(int count, char **arguments)
{
    static uint8_t memory[4 * MOST + 2048];
    test_selection();
    if (count > 1) {
        test_file(arguments[1]);
        return 0;
    }
    test_copies(NULL, memory);
    for (size_t i = 0; i < persist_variant_count; i++) {
        if (persist_variants[i].supported()) {
            test_copies(&persist_variants[i], memory);
            if (!test_ranges(&persist_variants[i]))
                printf("%s: not seen which lines are written back\n", persist_variants[i].name);
        }
    }
    return 0;
}
