// Copies weights to panels, and tells whether weights have changed since.

#include "instructions.h"

// Number of outputs in a panel of weights.
EXPORT int panel_width(void) { return PANEL; }

enum { PART = 1 << 16 }; // bytes that a thread compares at a time

// Tell whether two arrays have the same bytes.
EXPORT int same_bytes(const char *left, const char *right, int64_t count, int threads)
{
    int differ = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : differ)               \
    if (count > 4 * PART)
    for (int64_t first = 0; first < count; first += PART) {
        const int64_t size = count - first < PART ? count - first : PART;
        differ |= !differ && memcmp(left + first, right + first, (size_t)size) != 0;
    }
    return !differ;
}

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

// Copy rows of a weight (rows, words) to panels (out / PANEL, words, PANEL), from output `first` on.
// A word is a float, two bfloat16 or four int8.
EXPORT void pack_rows(const char *weight, int64_t rows, int64_t words, int32_t *panels,
                      int64_t first, int threads)
{
    enum { FEW = 1 << 14 }; // words, for which several threads are not worth it
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

// A fingerprint of a weight has a digest of each part. Its lanes start from a secret key, because
// otherwise a change could be constructed that no digest shows.
enum { DIGEST_BYTES = 128 };
struct digest {
    __m128i lanes[DIGEST_BYTES / 16];
};

// Mix 128 bytes into a digest: each block of 16 is added in its lane between two rounds of AES. After
// a single round, one guess in 64 would find the next block that cancels a change of one byte.
INLINE void mix(struct digest *digest, const char *bytes)
{
#pragma GCC unroll 8
    for (int lane = 0; lane < DIGEST_BYTES / 16; lane++) {
        const __m128i block = _mm_loadu_si128((const __m128i *)(bytes + 16 * lane));
        const __m128i added = _mm_aesenc_si128(digest->lanes[lane], block);
        digest->lanes[lane] = _mm_aesenc_si128(added, _mm_setzero_si128());
    }
}

INLINE struct digest digest_of(const char *bytes, int64_t count, const char *key)
{
    enum { AHEAD = 1 << 12 }; // bytes
    struct digest digest;
    memcpy(&digest, key, DIGEST_BYTES);
    digest.lanes[0] = _mm_xor_si128(digest.lanes[0], _mm_set_epi64x(0, count));
    int64_t i = 0;
    for (; i + DIGEST_BYTES <= count; i += DIGEST_BYTES) {
        for (int64_t line = 0; line < DIGEST_BYTES; line += 64)
            __builtin_prefetch(bytes + i + AHEAD + line, 0, 2); // it may pass the end
        mix(&digest, bytes + i);
    }
    char rest[DIGEST_BYTES] = {0};
    memcpy(rest, bytes + i, (size_t)(count - i));
    mix(&digest, rest);
    return digest;
}

// Write the fingerprint (parts, DIGEST_BYTES) of a weight, or return whether it differs.
//
// key: DIGEST_BYTES random bytes, which are the same whenever fingerprints are compared.
//
// A change of one block always shows, because rounds of AES map digests one to one. A later change
// in the same lane hides it only if all 16 bytes have the values that cancel it. The values depend
// on the key.
INLINE int visit_parts(const int writes, const char *weight, int64_t count, const char *key,
                       char *digests, int threads)
{
    int differ = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : differ)               \
    if (count > 4 * PART)
    for (int64_t first = 0; first < count; first += PART) {
        const int64_t size = count - first < PART ? count - first : PART;
        const struct digest digest = digest_of(weight + first, size, key);
        char *place = digests + first / PART * DIGEST_BYTES;
        if (writes)
            memcpy(place, &digest, DIGEST_BYTES);
        else
            differ |= memcmp(place, &digest, DIGEST_BYTES) != 0;
    }
    return differ;
}

EXPORT void take_fingerprint(const char *weight, int64_t count, const char *key, char *digests,
                             int threads)
{
    visit_parts(1, weight, count, key, digests, threads);
}

EXPORT int has_fingerprint(const char *weight, int64_t count, const char *key, char *digests,
                           int threads)
{
    return !visit_parts(0, weight, count, key, digests, threads);
}
