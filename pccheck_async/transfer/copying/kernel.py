"""The one kernel: it copies many pieces of device memory at once."""

from __future__ import annotations

from typing import Final

__all__ = ["MOVE_SOURCE"]

MOVE_SOURCE: Final = r"""
/* Block b copies row b of (destination, source, length): 16 bytes per thread and turn where both are aligned alike. */
extern "C" __global__ void pccheck_move(const unsigned long long *table)
{
    const unsigned long long *row = table + 3 * (unsigned long long)blockIdx.x;
    char *into = (char *)row[0];
    const char *from = (const char *)row[1];
    const unsigned long long length = row[2];
    unsigned long long head = length, wide = 0;

    if (((row[0] ^ row[1]) & 15) == 0) {
        head = (16 - (row[0] & 15)) & 15;
        if (head > length)
            head = length;
        wide = (length - head) / 16;
    }
    for (unsigned long long i = threadIdx.x; i < head; i += blockDim.x)
        into[i] = from[i];

    const uint4 *__restrict__ source = (const uint4 *)(from + head);
    uint4 *__restrict__ target = (uint4 *)(into + head);
#pragma unroll 4
    for (unsigned long long i = threadIdx.x; i < wide; i += blockDim.x)
        target[i] = source[i];

    for (unsigned long long i = head + 16 * wide + threadIdx.x; i < length; i += blockDim.x)
        into[i] = from[i];
}
"""
