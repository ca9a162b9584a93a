/* SPDX-License-Identifier: Apache-2.0 */
#include "persist.h"

#include <pthread.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#ifndef HWCAP_DCPOP
#define HWCAP_DCPOP (1 << 16)
#endif
#endif

#if defined(__x86_64__)

/* The shortest that some processor has; lines of 128 bytes are written back twice. */
#define LINE ((uintptr_t)64)

static bool has_leaf_7(unsigned bit)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b >> bit & 1) != 0;
}

static bool has_clwb(void)
{
    return has_leaf_7(24);
}

static bool has_clflushopt(void)
{
    return has_leaf_7(23);
}

static bool always(void)
{
    return true; /* clflush is part of x86-64 */
}

/* In assembler: then no function needs a target of its own. */
#define WRITE_BACK(name, instruction)                                                                                  \
    static void write_back_##name(uintptr_t begin, uintptr_t end)                                                      \
    {                                                                                                                  \
        for (uintptr_t line = begin & ~(LINE - 1); line < end; line += LINE)                                           \
            __asm__ volatile(instruction " (%0)" ::"r"(line) : "memory");                                              \
    }

WRITE_BACK(clwb, "clwb")
WRITE_BACK(clflushopt, "clflushopt")
WRITE_BACK(clflush, "clflush")

/* clwb and clflushopt are ordered by a fence alone, and so are stores past the caches. */
static void fence(void)
{
    __asm__ volatile("sfence" ::: "memory");
}

const struct persist_variant persist_variants[] = {
    {"clwb", has_clwb, write_back_clwb, fence},
    {"clflushopt", has_clflushopt, write_back_clflushopt, fence},
    {"clflush", always, write_back_clflush, fence},
};

/* Whole lines past the caches, of SSE2, which every x86-64 has; their ends as usual. */
static void copy(uint8_t *to, const uint8_t *from, size_t size)
{
    const size_t head = -(uintptr_t)to & (LINE - 1);
    if (size < head + LINE) {
        memcpy(to, from, size);
        return;
    }
    memcpy(to, from, head);
    size_t at = head;
    for (; size - at >= LINE; at += LINE) {
        const __m128i *source = (const __m128i *)(const void *)(from + at);
        __m128i *target = (__m128i *)(void *)(to + at);
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    memcpy(to + at, from + at, size - at);
}

#elif defined(__aarch64__) && defined(__linux__)

/* CTR_EL0 says it, from user space too: log2 of the words of the shortest line. */
static uintptr_t line_bytes(void)
{
    uint64_t type;
    __asm__("mrs %0, ctr_el0" : "=r"(type));
    return (uintptr_t)4 << (type >> 16 & 15);
}

static bool has_cvap(void)
{
    return (getauxval(AT_HWCAP) & HWCAP_DCPOP) != 0;
}

static bool always(void)
{
    return true;
}

/* dc cvap, to the point of persistence, by its encoding: assemblers without ARMv8.2 do not know its name. */
static void write_back_cvap(uintptr_t begin, uintptr_t end)
{
    const uintptr_t step = line_bytes();
    for (uintptr_t line = begin & ~(step - 1); line < end; line += step)
        __asm__ volatile("sys #3, c7, c12, #1, %0" ::"r"(line) : "memory");
}

/* To the point of coherency, which is that of persistence on machines that have no other. */
static void write_back_cvac(uintptr_t begin, uintptr_t end)
{
    const uintptr_t step = line_bytes();
    for (uintptr_t line = begin & ~(step - 1); line < end; line += step)
        __asm__ volatile("dc cvac, %0" ::"r"(line) : "memory");
}

static void fence(void)
{
    __asm__ volatile("dsb sy" ::: "memory");
}

const struct persist_variant persist_variants[] = {
    {"dc cvap", has_cvap, write_back_cvap, fence},
    {"dc cvac", always, write_back_cvac, fence},
};

static void copy(uint8_t *to, const uint8_t *from, size_t size)
{
    memcpy(to, from, size);
}

#else

static bool never(void)
{
    return false;
}

static void write_nothing_back(uintptr_t begin, uintptr_t end)
{
    (void)begin;
    (void)end;
}

static void no_fence(void)
{
}

/* A processor whose instructions nobody wrote down here: files are flushed by the kernel. */
const struct persist_variant persist_variants[] = {{"", never, write_nothing_back, no_fence}};

static void copy(uint8_t *to, const uint8_t *from, size_t size)
{
    memcpy(to, from, size);
}

#endif

const size_t persist_variant_count = sizeof persist_variants / sizeof *persist_variants;

static const struct persist_variant *selected;

static void select_variant(void)
{
    for (size_t i = 0; i < persist_variant_count && !selected; i++) {
        if (persist_variants[i].supported())
            selected = &persist_variants[i];
    }
}

const struct persist_variant *persist_select(void)
{
    /* Once: to ask the processor takes microseconds in a virtual machine. */
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, select_variant);
    return selected;
}

void persist_copy(void *to, const void *from, size_t size)
{
    copy(to, from, size);
}
