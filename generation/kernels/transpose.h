// Transposes blocks of words.

#pragma once
#include "instructions.h"

// Transpose 8 rows of 8 words.
INLINE void transpose(__m256 tile[8])
{
    __m256 pairs[8], fours[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(tile[i], tile[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(tile[i], tile[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const int pair = i / 2 * 4 + i % 2;
        fours[2 * i] = _mm256_shuffle_ps(pairs[pair], pairs[pair + 2], 0x44);
        fours[2 * i + 1] = _mm256_shuffle_ps(pairs[pair], pairs[pair + 2], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        tile[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
        tile[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
    }
}
