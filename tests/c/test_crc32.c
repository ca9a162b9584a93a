/* Every implementation that this processor runs, against the definition of the CRC. */
#include "check.h"
#include "crc32.h"

#include <string.h>

static uint32_t by_definition(uint32_t state, const uint8_t *data, size_t size)
{
    while (size-- > 0) {
        state ^= *data++;
        for (int bit = 0; bit < 8; bit++)
            state = state >> 1 ^ (state & 1 ? 0xedb88320u : 0);
    }
    return state;
}

static void test_known_value(void)
{
    CHECK(crc32_update(0, "123456789", 9) == 0xcbf43926u);
    CHECK(crc32_update(0, NULL, 0) == 0);
    CHECK(crc32_update(crc32_update(0, "1234", 4), "56789", 5) == 0xcbf43926u);
}

static void test_every_byte_in_every_place_of_a_word(const struct crc32_variant *crc)
{
    for (unsigned place = 0; place < 8; place++) {
        for (unsigned value = 0; value < 256; value++) {
            uint8_t word[8] = {0};
            word[place] = (uint8_t)value;
            CHECK(crc->update(0, word, sizeof word) == by_definition(0, word, sizeof word));
        }
    }
}

static void test_every_length_and_alignment(const struct crc32_variant *crc)
{
    uint64_t seed = 1;
    for (size_t length = 0; length < 1200; length += length < 300 ? 1 : 13) {
        const size_t skip = length % 67; /* all alignments to 64, each at many lengths */
        uint8_t *data = random_bytes(&seed, skip + length);
        const uint32_t start = (uint32_t)random_below(&seed, UINT64_C(1) << 32);
        CHECK(crc->update(start, data + skip, length) == by_definition(start, data + skip, length));
        free(data);
    }
}

static void test_long_and_split(const struct crc32_variant *crc)
{
    uint64_t seed = 2;
    for (int round = 0; round < 20; round++) {
        const size_t size = 30000 + random_below(&seed, 40000), split = random_below(&seed, size);
        uint8_t *data = random_bytes(&seed, size);
        const uint32_t whole = by_definition(~UINT32_C(0), data, size);
        CHECK(crc->update(~UINT32_C(0), data, size) == whole);
        CHECK(crc->update(crc->update(~UINT32_C(0), data, split), data + split, size - split) == whole);
        free(data);
    }
}

/* Guards around the destination: sanitizers do not see streaming stores. */
static void check_copy(const struct crc32_variant *crc, uint64_t *seed, size_t to, size_t from, size_t size)
{
    uint8_t *const data = random_bytes(seed, from + size), *const into = aligned_alloc(64, (size + 255) / 64 * 64);
    const uint32_t start = (uint32_t)random_below(seed, UINT64_C(1) << 32);
    CHECK(into && to < 128);
    memset(into, 0xa5, (size + 255) / 64 * 64);
    CHECK(crc->copy(start, into + to, data + from, size) == by_definition(start, data + from, size));
    CHECK(memcmp(into + to, data + from, size) == 0);
    for (size_t i = 0; i < to; i++)
        CHECK(into[i] == 0xa5);
    for (size_t i = to + size; i < (size + 255) / 64 * 64; i++)
        CHECK(into[i] == 0xa5);
    free(into);
    free(data);
}

static void test_copies(const struct crc32_variant *crc)
{
    uint64_t seed = 5;
    for (size_t to = 0; to < 64; to++) {
        for (size_t from = 0; from < 64; from++)
            check_copy(crc, &seed, to, from, 700 + random_below(&seed, 300));
    }
    for (size_t size = 0; size < 1200; size++)
        check_copy(crc, &seed, size % 67, size % 61, size);
    for (size_t size = 4 * 4096 - 2; size < 4 * 4096 + 70; size++) /* four pages: a copy's stride on some processors */
        check_copy(crc, &seed, size % 67, size % 61, size * (1 + size % 3));
    for (int round = 0; round < 20; round++)
        check_copy(crc, &seed, random_below(&seed, 128), random_below(&seed, 128), random_below(&seed, 70000));
}

/* Lengths around those that have one piece more, in bytes and in blocks. */
static void test_tables_of_pieces(void)
{
    static const size_t sizes[] = {0, 1, 511, 512, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 512, 4 << 20, 5000001};
    uint64_t seed = 11;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint8_t *const data = random_bytes(&seed, sizes[i]), sums[4 * 5];
        CHECK(crc32_piece_count(sizes[i]) <= 5);
        crc32_pieces(data, sizes[i], sums);
        for (size_t at = 0, n = 0; at < sizes[i]; at += CRC32_PIECE, n++) {
            const size_t part = sizes[i] - at < CRC32_PIECE ? sizes[i] - at : CRC32_PIECE;
            CHECK(crc32_load_sum(sums + 4 * n) == crc32_update(0, data + at, part));
        }
        CHECK(crc32_combine(sums, sizes[i]) == crc32_update(0, data, sizes[i]));
        free(data);
    }
}

int main(void)
{
    test_known_value();
    test_tables_of_pieces();
    for (size_t i = 0; i < crc32_variant_count; i++) {
        const struct crc32_variant *crc = &crc32_variants[i];
        if (!crc->supported()) {
            printf("%zu, %s: not on this processor\n", i, crc->name);
            continue;
        }
        test_every_byte_in_every_place_of_a_word(crc);
        test_every_length_and_alignment(crc);
        test_long_and_split(crc);
        if (crc->copy)
            test_copies(crc);
        printf("%zu, %s: passed\n", i, crc->name);
    }
    return 0;
}
