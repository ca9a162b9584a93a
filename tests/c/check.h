/* What the tests in C share: a check that stops with file and line, and repeatable random numbers. */
#ifndef PCCHECK_TESTS_CHECK_H
#define PCCHECK_TESTS_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                    \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* xorshift64* */
static inline uint64_t random_below(uint64_t *state, uint64_t limit)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return (*state * UINT64_C(2685821657736338717) >> 11) % limit;
}

/* Exactly `size` bytes, so that a sanitizer sees one byte too many. */
static inline uint8_t *random_bytes(uint64_t *state, size_t size)
{
    uint8_t *bytes = malloc(size ? size : 1);
    CHECK(bytes);
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)random_below(state, 256);
    return bytes;
}

#endif
