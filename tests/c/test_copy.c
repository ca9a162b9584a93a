/* Gather and scatter against a byte-by-byte model. */
#include "check.h"
#include "copy.h"
#include "crc32.h"

#include <errno.h>
#include <string.h>

#define MOST_SEGMENTS 40

struct layout {
    size_t size, count;
    struct copy_segment segments[MOST_SEGMENTS];
    uint8_t *memory[MOST_SEGMENTS];
};

/* Segments with and without gaps, empty ones, some longer than the block that is copied at once. */
static struct layout random_layout(uint64_t *seed)
{
    struct layout layout = {0};
    layout.count = random_below(seed, MOST_SEGMENTS + 1);
    for (size_t i = 0; i < layout.count; i++) {
        struct copy_segment *segment = &layout.segments[i];
        layout.size += random_below(seed, 3) ? 0 : random_below(seed, 20000);
        segment->offset = layout.size;
        segment->length = random_below(seed, 4) ? random_below(seed, 600) : random_below(seed, 150000);
        layout.memory[i] = random_bytes(seed, segment->length);
        segment->address = segment->length ? (uintptr_t)layout.memory[i] : 0;
        layout.size += segment->length;
    }
    layout.size += random_below(seed, 2) ? 0 : random_below(seed, 40000);
    return layout;
}

/* Whether a table has the checksums of each MiB of `data`. */
static bool are_sums_of(const uint8_t *sums, const uint8_t *data, size_t size)
{
    for (size_t at = 0; at < size; at += CRC32_PIECE, sums += 4) {
        if (crc32_load_sum(sums) != crc32_update(0, data + at, size - at < CRC32_PIECE ? size - at : CRC32_PIECE))
            return false;
    }
    return true;
}

static void free_layout(struct layout *layout)
{
    for (size_t i = 0; i < layout->count; i++)
        free(layout->memory[i]);
}

static void test_round_trips(void)
{
    uint64_t seed = 3;
    for (int round = 0; round < 60; round++) {
        struct layout layout = random_layout(&seed);
        uint8_t *buffer = random_bytes(&seed, layout.size), *model = calloc(1, layout.size + 1);
        uint8_t *table = malloc(sizeof layout.segments + 1); /* at an odd address: tables come from anywhere */
        uint8_t *sums = malloc(4 * crc32_piece_count(layout.size) + 1);
        size_t bad;
        CHECK(model && table && sums);
        memcpy(table + 1, layout.segments, sizeof layout.segments);
        for (size_t i = 0; i < layout.count; i++)
            memcpy(model + layout.segments[i].offset, layout.memory[i], layout.segments[i].length);

        CHECK(copy_check(table + 1, layout.count, layout.size, true, &bad) == 0);
        CHECK(copy_gather(table + 1, layout.count, buffer, layout.size, sums) == 0);
        CHECK(memcmp(buffer, model, layout.size) == 0);
        CHECK(are_sums_of(sums, model, layout.size));
        const uint32_t checksum = crc32_combine(sums, layout.size);
        CHECK(checksum == crc32_update(0, model, layout.size));

        for (size_t i = 0; i < layout.count; i++)
            memset(layout.memory[i], 0xa5, layout.segments[i].length);
        CHECK(copy_scatter(table + 1, layout.count, buffer, layout.size, checksum ^ 1) == -EBADMSG);
        for (size_t i = 0; i < layout.count; i++) {
            for (size_t k = 0; k < layout.segments[i].length; k++)
                CHECK(layout.memory[i][k] == 0xa5);
        }
        CHECK(copy_scatter(table + 1, layout.count, buffer, layout.size, checksum) == 0);
        for (size_t i = 0; i < layout.count; i++)
            CHECK(memcmp(layout.memory[i], model + layout.segments[i].offset, layout.segments[i].length) == 0);
        free(table);
        free(sums);
        free(model);
        free(buffer);
        free_layout(&layout);
    }
}

/* A segment between gaps: lengths around the one from which segments are copied in one pass, all alignments. */
static void test_long_segments(void)
{
    enum { AROUND = 300, MOST = 4096 + AROUND };
    static uint8_t model[2 * MOST], buffer[2 * MOST + 64];
    uint64_t seed = 6;
    uint8_t *const source = random_bytes(&seed, MOST + 64);
    for (size_t round = 0; round < 64 * 64; round++) {
        const size_t to = round % 64, from = round / 64, before = random_below(&seed, 100);
        const size_t length = MOST - random_below(&seed, 2 * AROUND);
        const size_t size = before + length + random_below(&seed, 100);
        const struct copy_segment segments[] = {{(uintptr_t)(source + from), before, length / 100},
                                                {(uintptr_t)(source + from) + length / 100, before + length / 100,
                                                 length - length / 100}};
        uint8_t sums[4];
        memset(model, 0, size);
        memcpy(model + before, source + from, length);
        memset(buffer, 0xa5, sizeof buffer);
        CHECK(copy_gather(segments, 2, buffer + to, size, sums) == 0);
        CHECK(memcmp(buffer + to, model, size) == 0);
        CHECK(crc32_load_sum(sums) == crc32_update(0, model, size));
        for (size_t i = 0; i < to; i++)
            CHECK(buffer[i] == 0xa5);
        for (size_t i = to + size; i < sizeof buffer; i++)
            CHECK(buffer[i] == 0xa5);
    }
    free(source);
}

/* Segments and gaps over the borders of MiBs, to and from all alignments. */
static void test_pieces(void)
{
    enum { MOST = (4 << 20) + 700, SEGMENTS = 5 };
    uint8_t *const model = malloc(MOST), *const buffer = malloc(MOST + 64);
    uint64_t seed = 9;
    uint8_t *const source = random_bytes(&seed, MOST + 64);
    CHECK(model && buffer);
    for (size_t round = 0; round < 40; round++) {
        const size_t to = random_below(&seed, 64), size = random_below(&seed, 4) ? random_below(&seed, MOST) : 3 << 20;
        struct copy_segment segments[SEGMENTS];
        uint8_t sums[4 * 5];
        size_t filled = 0;
        memset(model, 0, size);
        for (size_t i = 0; i < SEGMENTS; i++) {
            const size_t offset = filled + (random_below(&seed, 2) ? 0 : random_below(&seed, (size - filled) / 2 + 1));
            const size_t length = random_below(&seed, 3) ? random_below(&seed, size - offset + 1) : size - offset;
            const uint8_t *const from = source + random_below(&seed, 64);
            segments[i] = (struct copy_segment){(uintptr_t)from, offset, length};
            memcpy(model + offset, from, length);
            filled = offset + length;
        }
        memset(buffer, 0xa5, MOST + 64);
        CHECK(copy_gather(segments, SEGMENTS, buffer + to, size, sums) == 0);
        CHECK(memcmp(buffer + to, model, size) == 0);
        CHECK(are_sums_of(sums, model, size));
        CHECK(crc32_combine(sums, size) == crc32_update(0, model, size));
    }
    free(model);
    free(buffer);
    free(source);
}

static void test_refusals(void)
{
    static const struct {
        struct copy_segment segments[2];
        bool ordered;
        size_t bad; /* 2: all fine */
    } cases[] = {
        {{{1, 0, 50}, {1, 50, 50}}, true, 2},
        {{{1, 0, 50}, {1, 49, 50}}, true, 1},
        {{{1, 0, 50}, {1, 49, 50}}, false, 2},
        {{{1, 50, 50}, {1, 0, 50}}, true, 1},
        {{{1, 50, 50}, {1, 0, 50}}, false, 2},
        {{{1, 0, 101}, {1, 0, 0}}, false, 0},
        {{{1, 100, 0}, {0, 100, 0}}, true, 2},
        {{{1, 101, 0}, {1, 0, 0}}, false, 0},
        {{{1, UINT64_MAX, 2}, {1, 0, 0}}, false, 0},
        {{{1, 2, UINT64_MAX}, {1, 0, 0}}, false, 0},
        {{{0, 0, 1}, {1, 0, 0}}, false, 0},
        {{{1, 0, 1}, {UINT64_MAX - 1, 2, 3}}, true, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t bad = 2;
        CHECK(copy_check(cases[i].segments, 2, 100, cases[i].ordered, &bad) == (cases[i].bad == 2 ? 0 : -EINVAL));
        CHECK(bad == cases[i].bad);
    }
}

int main(void)
{
    test_round_trips();
    test_long_segments();
    test_pieces();
    test_refusals();
    return 0;
}
