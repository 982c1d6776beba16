// Copies weights to panels.

#include "transpose.h"

// Number of outputs in a panel of weights.
EXPORT int panel_width(void) { return PANEL; }

// Copy rows of a weight (rows, words) to panels (out / PANEL, words, PANEL), from output `first` on.
// A word is a float, two bfloat16 or four int8.
EXPORT void pack_rows(const char *weight, int64_t rows, int64_t words, int32_t *panels,
                      int64_t first, int threads)
{
    enum { FEW = 1 << 14 }; // words; with fewer, starting threads takes longer
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * words > FEW)
    for (int64_t panel = first / PANEL; panel <= (first + rows - 1) / PANEL; panel++) {
        const int64_t begin = first > panel * PANEL ? first : panel * PANEL;
        const int64_t end = first + rows < (panel + 1) * PANEL ? first + rows : (panel + 1) * PANEL;
        const int64_t lanes = end - begin, whole_lanes = lanes / 8 * 8;
        const int64_t whole_words = words / 8 * 8;
        const char *source = weight + (begin - first) * words * 4;
        int32_t *place = panels + panel * PANEL * words + begin % PANEL;
        for (int64_t word = 0; word < whole_words; word += 8)
            for (int64_t lane = 0; lane < whole_lanes; lane += 8) {
                __m256 tile[8];
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++)
                    tile[i] = _mm256_loadu_ps(
                        (const float *)(source + ((lane + i) * words + word) * 4));
                transpose(tile);
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++)
                    _mm256_storeu_ps((float *)(place + (word + i) * PANEL + lane), tile[i]);
            }
        for (int64_t lane = 0; lane < lanes; lane++)
            for (int64_t word = lane < whole_lanes ? whole_words : 0; word < words; word++)
                memcpy(place + word * PANEL + lane, source + (lane * words + word) * 4, 4);
    }
}
