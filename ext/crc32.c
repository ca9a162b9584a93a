/* SPDX-License-Identifier: Apache-2.0 */
#include "crc32.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__) && !defined(__AARCH64EB__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define CRC32_ARM64 1
#endif

#define POLYNOMIAL 0xedb88320u

/* ---- Everywhere: eight bytes per step, table k giving the register's change for a byte that k more bytes follow.
 *
 * The CRC is linear, so the entry of a byte is the xor of the entries of its bits: the eight powers of two define a
 * table, and the macros expand them to all 256 entries when compiling. */

#define T0(x) (x)
#define T1(x, a) T0(x), T0((x) ^ (a))
#define T2(x, a, b) T1(x, a), T1((x) ^ (b), a)
#define T3(x, a, b, c) T2(x, a, b), T2((x) ^ (c), a, b)
#define T4(x, a, b, c, d) T3(x, a, b, c), T3((x) ^ (d), a, b, c)
#define T5(x, a, b, c, d, e) T4(x, a, b, c, d), T4((x) ^ (e), a, b, c, d)
#define T6(x, a, b, c, d, e, f) T5(x, a, b, c, d, e), T5((x) ^ (f), a, b, c, d, e)
#define T7(x, a, b, c, d, e, f, g) T6(x, a, b, c, d, e, f), T6((x) ^ (g), a, b, c, d, e, f)
#define ROW(a, b, c, d, e, f, g, h) {T7(0u, a, b, c, d, e, f, g), T7(h, a, b, c, d, e, f, g)}

static const uint32_t table[8][256] = {
    ROW(0x77073096, 0xee0e612c, 0x076dc419, 0x0edb8832, 0x1db71064, 0x3b6e20c8, 0x76dc4190, 0xedb88320),
    ROW(0x191b3141, 0x32366282, 0x646cc504, 0xc8d98a08, 0x4ac21251, 0x958424a2, 0xf0794f05, 0x3b83984b),
    ROW(0x01c26a37, 0x0384d46e, 0x0709a8dc, 0x0e1351b8, 0x1c26a370, 0x384d46e0, 0x709a8dc0, 0xe1351b80),
    ROW(0xb8bc6765, 0xaa09c88b, 0x8f629757, 0xc5b428ef, 0x5019579f, 0xa032af3e, 0x9b14583d, 0xed59b63b),
    ROW(0x3d6029b0, 0x7ac05360, 0xf580a6c0, 0x30704bc1, 0x60e09782, 0xc1c12f04, 0x58f35849, 0xb1e6b092),
    ROW(0xcb5cd3a5, 0x4dc8a10b, 0x9b914216, 0xec53826d, 0x03d6029b, 0x07ac0536, 0x0f580a6c, 0x1eb014d8),
    ROW(0xa6770bb4, 0x979f1129, 0xf44f2413, 0x33ef4e67, 0x67de9cce, 0xcfbd399c, 0x440b7579, 0x8816eaf2),
    ROW(0xccaa009e, 0x4225077d, 0x844a0efa, 0xd3e51bb5, 0x7cbb312b, 0xf9766256, 0x299dc2ed, 0x533b85da),
};

/* Compilers make one load of it (and a byte swap where the machine is big-endian). */
static inline uint64_t load_le64(const uint8_t *p)
{
    return (uint64_t)p[0] | (uint64_t)p[1] << 8 | (uint64_t)p[2] << 16 | (uint64_t)p[3] << 24 | (uint64_t)p[4] << 32 |
           (uint64_t)p[5] << 40 | (uint64_t)p[6] << 48 | (uint64_t)p[7] << 56;
}

static uint32_t update_table(uint32_t state, const uint8_t *data, size_t size)
{
    for (; size >= 8; data += 8, size -= 8) {
        const uint64_t word = load_le64(data) ^ state;
        state = table[7][word & 0xff] ^ table[6][word >> 8 & 0xff] ^ table[5][word >> 16 & 0xff] ^
                table[4][word >> 24 & 0xff] ^ table[3][word >> 32 & 0xff] ^ table[2][word >> 40 & 0xff] ^
                table[1][word >> 48 & 0xff] ^ table[0][word >> 56];
    }
    for (; size > 0; data++, size--)
        state = state >> 8 ^ table[0][(state ^ *data) & 0xff];
    return state;
}

static bool always(void)
{
    return true;
}

/* The product of two remainders: of polynomials of degree below 32, mod P, reflected. */
static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (; a != 0; a <<= 1) {
        if (a & 0x80000000u)
            product ^= b;
        b = b >> 1 ^ (POLYNOMIAL & (0u - (b & 1u)));
    }
    return product;
}

#if defined(__x86_64__)

/* ---- x86-64: folding with carry-less multiplication (Gopal et al., "Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ Instruction", Intel 2009).
 *
 * A message's remainder does not change when 128 of its bits are replaced by their product with x^D mod P, added D bits
 * further on. Several accumulators hide the latency of the multiplication. What is left, congruent to the message so
 * far, goes through the next slower variant: no reduction of its own, and nothing that the tests of that do not cover.
 *
 * FOLD(D) is the pair for a distance of D bits: x^(D+32) and x^(D-32) mod P, reflected, shifted left by one. */

#define FOLD_128 0x1751997d0, 0x0ccaa009e
#define FOLD_512 0x154442bd4, 0x1c6e41596
#define FOLD_2048 0x11542778a, 0x1322d1430
#define FOLD_1_PAGE 0x05ad8a92c, 0x1b3b1a484
#define FOLD_2_PAGES 0x0b566f6e2, 0x1f848d714
#define FOLD_3_PAGES 0x08c7515be, 0x19f01c668
#define PAGE ((size_t)4096)

#define TARGET_PCLMUL __attribute__((target("pclmul,sse4.1")))
#define TARGET_VPCLMUL __attribute__((target("vpclmulqdq,pclmul,sse4.1,avx512f,avx512vl")))

TARGET_PCLMUL static inline __m128i pair(long long low, long long high)
{
    return _mm_set_epi64x(high, low);
}

TARGET_PCLMUL static inline __m128i fold(__m128i sum, __m128i next, __m128i by)
{
    const __m128i low = _mm_clmulepi64_si128(sum, by, 0x00);
    const __m128i high = _mm_clmulepi64_si128(sum, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

TARGET_PCLMUL static inline __m128i load(const uint8_t *data)
{
    return _mm_loadu_si128((const __m128i *)(const void *)data);
}

static bool has_pclmul(void)
{
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

TARGET_PCLMUL static uint32_t update_pclmul(uint32_t state, const uint8_t *data, size_t size)
{
    if (size < 64)
        return update_table(state, data, size);

    const __m128i by_128 = pair(FOLD_128), by_512 = pair(FOLD_512);
    __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128((int)state));
    __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
        a = fold(a, load(data), by_512);
        b = fold(b, load(data + 16), by_512);
        c = fold(c, load(data + 32), by_512);
        d = fold(d, load(data + 48), by_512);
    }
    a = fold(fold(fold(a, b, by_128), c, by_128), d, by_128);
    for (; size >= 16; data += 16, size -= 16)
        a = fold(a, load(data), by_128);

    uint8_t rest[16];
    _mm_storeu_si128((__m128i *)(void *)rest, a);
    return update_table(update_table(0, rest, sizeof rest), data, size);
}

static bool has_vpclmul(void)
{
    return has_pclmul() && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512vl");
}

TARGET_VPCLMUL static inline __m512i wide_load(const uint8_t *data)
{
    return _mm512_loadu_si512((const void *)data);
}

TARGET_VPCLMUL static inline __m512i wide_fold(__m512i sum, __m512i next, __m512i by)
{
    const __m512i low = _mm512_clmulepi64_epi128(sum, by, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(sum, by, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96); /* the xor of all three */
}

TARGET_VPCLMUL static inline __m512i wide_state(uint32_t state)
{
    return _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state));
}

/* How far ahead of its loads a copy asks for its source where it does: measured, with the hint that keeps the data out
 * of the last cache. */
#define AHEAD ((uintptr_t)1024)

/* The next line of the data, stored in `to` (aligned to a line) unless that is NULL. */
TARGET_VPCLMUL static inline __m512i wide_next(bool ask, uint8_t *to, const uint8_t *data, size_t at)
{
    const __m512i line = wide_load(data + at);
    if (ask)
        _mm_prefetch((const char *)((uintptr_t)data + at + AHEAD), _MM_HINT_NTA); /* behind the end too: never faults */
    if (to)
        _mm512_stream_si512((__m512i *)(void *)(to + at), line);
    return line;
}

/* `size` is a multiple of 256, and not 0. Inlined for the choices of `ask` and `to` to be made when compiling. */
TARGET_VPCLMUL __attribute__((always_inline)) static inline uint32_t
wide_update(bool ask, uint32_t state, uint8_t *to, const uint8_t *data, size_t size)
{
    const __m512i by_2048 = _mm512_broadcast_i32x4(pair(FOLD_2048));
    __m512i a = wide_next(ask, to, data, 0), b = wide_next(ask, to, data, 64);
    __m512i c = wide_next(ask, to, data, 128), d = wide_next(ask, to, data, 192);
    a = _mm512_xor_si512(a, wide_state(state));
    for (size_t at = 256; at < size; at += 256) {
        a = wide_fold(a, wide_next(ask, to, data, at), by_2048);
        b = wide_fold(b, wide_next(ask, to, data, at + 64), by_2048);
        c = wide_fold(c, wide_next(ask, to, data, at + 128), by_2048);
        d = wide_fold(d, wide_next(ask, to, data, at + 192), by_2048);
    }

    uint8_t rest[256];
    _mm512_storeu_si512(rest, a);
    _mm512_storeu_si512(rest + 64, b);
    _mm512_storeu_si512(rest + 128, c);
    _mm512_storeu_si512(rest + 192, d);
    return update_pclmul(0, rest, sizeof rest);
}

TARGET_VPCLMUL static uint32_t update_vpclmul(uint32_t state, const uint8_t *data, size_t size)
{
    const size_t wide = size & ~(size_t)255;
    if (size < 512)
        return update_pclmul(state, data, size);
    return update_pclmul(wide_update(false, state, NULL, data, wide), data + wide, size - wide);
}

/* A copy that is too short for whole lines, or an end of one. The checksum is of what was stored. */
static uint32_t copy_short(uint32_t state, uint8_t *to, const uint8_t *from, size_t size)
{
    memcpy(to, from, size);
    return update_pclmul(state, to, size);
}

TARGET_VPCLMUL __attribute__((always_inline)) static inline uint32_t wide_copy(bool ask, uint32_t state, uint8_t *to,
                                                                               const uint8_t *from, size_t size)
{
    const size_t head = -(uintptr_t)to & 63;
    if (size < head + 256)
        return copy_short(state, to, from, size);

    const size_t wide = (size - head) & ~(size_t)255, tail = head + wide;
    state = copy_short(state, to, from, head);
    state = wide_update(ask, state, to + head, from + head, wide);
    _mm_sfence(); /* streaming stores are ordered by nothing else: not by the lock that hands the buffer on */
    return copy_short(state, to + tail, from + tail, size - tail);
}

TARGET_VPCLMUL static uint32_t copy_vpclmul(uint32_t state, uint8_t *to, const uint8_t *from, size_t size)
{
    return wide_copy(true, state, to, from, size);
}

/* Four pages side by side: `size` is a multiple of that, and not 0; `to` is aligned to a line. */
TARGET_VPCLMUL static uint32_t copy_pages(uint32_t state, uint8_t *to, const uint8_t *from, size_t size)
{
    const __m512i by_512 = _mm512_broadcast_i32x4(pair(FOLD_512));
    const __m512i by_1_page = _mm512_broadcast_i32x4(pair(FOLD_1_PAGE));
    const __m512i by_2_pages = _mm512_broadcast_i32x4(pair(FOLD_2_PAGES));
    const __m512i by_3_pages = _mm512_broadcast_i32x4(pair(FOLD_3_PAGES));
    __m512i sum = _mm512_setzero_si512(), before = wide_state(state);
    for (size_t at = 0; at < size; at += 4 * PAGE) {
        __m512i a = wide_fold(sum, wide_next(false, to, from, at), by_512);
        __m512i b = wide_next(false, to, from, at + PAGE);
        __m512i c = wide_next(false, to, from, at + 2 * PAGE);
        __m512i d = wide_next(false, to, from, at + 3 * PAGE);
        a = _mm512_xor_si512(a, before);
        before = _mm512_setzero_si512();
        for (size_t line = at + 64; line < at + PAGE; line += 64) {
            a = wide_fold(a, wide_next(false, to, from, line), by_512);
            b = wide_fold(b, wide_next(false, to, from, line + PAGE), by_512);
            c = wide_fold(c, wide_next(false, to, from, line + 2 * PAGE), by_512);
            d = wide_fold(d, wide_next(false, to, from, line + 3 * PAGE), by_512);
        }
        sum = wide_fold(a, wide_fold(b, wide_fold(c, d, by_1_page), by_2_pages), by_3_pages);
    }

    uint8_t rest[64];
    _mm512_storeu_si512(rest, sum);
    return update_pclmul(0, rest, sizeof rest);
}

static bool is_intel_with_vpclmul(void)
{
    return has_vpclmul() && __builtin_cpu_is("intel");
}

/* Intel's processors fetch ahead within a page, so four pages at once come faster than one after the other. Measured:
 * twice as fast as the copy above, whose hint keeps only few fetches under way there. */
TARGET_VPCLMUL static uint32_t copy_vpclmul_intel(uint32_t state, uint8_t *to, const uint8_t *from, size_t size)
{
    const size_t head = -(uintptr_t)to & 63, pages = size < head ? 0 : (size - head) & ~(4 * PAGE - 1);
    if (pages > 0) {
        state = copy_short(state, to, from, head);
        state = copy_pages(state, to + head, from + head, pages);
        _mm_sfence();
        to += head + pages;
        from += head + pages;
        size -= head + pages;
    }
    return wide_copy(false, state, to, from, size);
}

#elif defined(CRC32_ARM64)

/* ---- arm64: the CRC instructions, on three stretches at once because each waits for the one before it.
 *
 * Registers add up like remainders do: that of a stretch moves over the bytes behind it by a multiplication with
 * x^(8 * bytes) mod P. LANE is long enough to make its cost small. */

#define LANE ((size_t)4096)
#define X_8_LANE 0x09fe548fu    /* x^(8 * LANE) mod P, reflected */
#define X_16_LANE 0x83852d0fu   /* x^(16 * LANE) mod P, reflected */

static bool has_crc(void)
{
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}

/* In assembler: what compilers call these instructions, and how a function may use them, differs and changed. */
static inline uint32_t crc_of_8(uint32_t state, uint64_t data)
{
    __asm__(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(state) : "r"(data));
    return state;
}

static inline uint32_t crc_of_1(uint32_t state, uint8_t data)
{
    __asm__(".arch_extension crc\n\tcrc32b %w0, %w0, %w1" : "+r"(state) : "r"(data));
    return state;
}

static uint32_t update_arm64(uint32_t state, const uint8_t *data, size_t size)
{
    for (; size >= 3 * LANE; data += 3 * LANE, size -= 3 * LANE) {
        uint32_t a = state, b = 0, c = 0;
        for (size_t i = 0; i < LANE; i += 8) {
            a = crc_of_8(a, load_le64(data + i));
            b = crc_of_8(b, load_le64(data + LANE + i));
            c = crc_of_8(c, load_le64(data + 2 * LANE + i));
        }
        state = multiply(X_16_LANE, a) ^ multiply(X_8_LANE, b) ^ c;
    }
    for (; size >= 8; data += 8, size -= 8)
        state = crc_of_8(state, load_le64(data));
    for (; size > 0; data++, size--)
        state = crc_of_1(state, *data);
    return state;
}

#endif

const struct crc32_variant crc32_variants[] = {
#if defined(__x86_64__)
    {"vpclmulqdq", is_intel_with_vpclmul, update_vpclmul, copy_vpclmul_intel},
    {"vpclmulqdq", has_vpclmul, update_vpclmul, copy_vpclmul},
    {"vpclmulqdq", has_vpclmul, update_vpclmul, copy_vpclmul_intel}, /* never selected: for the tests */
    {"pclmulqdq", has_pclmul, update_pclmul, NULL},
#elif defined(CRC32_ARM64)
    {"arm64", has_crc, update_arm64, NULL},
#endif
    {"table", always, update_table, NULL},
};

const size_t crc32_variant_count = sizeof crc32_variants / sizeof *crc32_variants;

const struct crc32_variant *crc32_select(void)
{
    const struct crc32_variant *variant = crc32_variants;
    while (!variant->supported())
        variant++;
    return variant;
}

uint32_t crc32_update(uint32_t value, const void *data, size_t size)
{
    return ~crc32_select()->update(~value, data, size);
}

void crc32_pieces(const void *data, uint64_t size, uint8_t *sums)
{
    const struct crc32_variant *variant = crc32_select();
    const uint8_t *from = data;
    for (uint64_t done = 0; done < size; done += CRC32_PIECE, sums += 4) {
        const uint64_t part = size - done < CRC32_PIECE ? size - done : CRC32_PIECE;
        crc32_store_sum(sums, ~variant->update(~UINT32_C(0), from + done, part));
    }
}

#define X_0 0x80000000u       /* x^0, reflected */
#define X_8 0x00800000u       /* x^8 */
#define X_8_PIECE 0x5fde7a4eu /* x^(8 * CRC32_PIECE) mod P */

/* x^(8 * size) mod P, by squaring. */
static uint32_t power_of_bytes(uint64_t size)
{
    uint32_t power = X_0;
    for (uint32_t factor = X_8; size > 0; size >>= 1, factor = multiply(factor, factor)) {
        if (size & 1)
            power = multiply(power, factor);
    }
    return power;
}

uint32_t crc32_combine(const uint8_t *sums, uint64_t size)
{
    uint32_t value = 0;
    for (; size >= CRC32_PIECE; size -= CRC32_PIECE, sums += 4)
        value = multiply(X_8_PIECE, value) ^ crc32_load_sum(sums);
    if (size == 0)
        return value;
    if (value != 0) /* else it may be the only one, and the power takes longer than all the rest */
        value = multiply(power_of_bytes(size), value);
    return value ^ crc32_load_sum(sums);
}
