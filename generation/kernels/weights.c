// Copies weights to panels, and tells whether weights have changed since.

#include "instructions.h"

#include <omp.h>

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

enum {
    STREAMS = 4,  // parts that are read in turn: waits for memory in several places overlap
    STRIDE = 512, // bytes of a part that are read at a time
};

// Digest up to STREAMS parts of a weight. The last one may be shorter. Returns their number.
static int digest_parts(const char *bytes, int64_t count, const char *key,
                        struct digest digests[STREAMS])
{
    const int parts = (int)(count < STREAMS * PART ? (count + PART - 1) / PART : STREAMS);
    int64_t sizes[STREAMS];
    for (int part = 0; part < parts; part++) {
        const int64_t left = count - part * PART;
        sizes[part] = left < PART ? left : PART;
        memcpy(&digests[part], key, DIGEST_BYTES);
        digests[part].lanes[0] =
            _mm_xor_si128(digests[part].lanes[0], _mm_set_epi64x(0, sizes[part]));
    }
    for (int64_t start = 0; start < PART; start += STRIDE)
        for (int part = 0; part < parts; part++) {
            if (start + STRIDE > sizes[part])
                continue;
            struct digest digest = digests[part]; // in registers
            for (int64_t i = start; i < start + STRIDE; i += DIGEST_BYTES)
                mix(&digest, bytes + part * PART + i);
            digests[part] = digest;
        }
    for (int part = 0; part < parts; part++) {
        const char *own = bytes + part * PART;
        int64_t i = sizes[part] / STRIDE * STRIDE;
        for (; i + DIGEST_BYTES <= sizes[part]; i += DIGEST_BYTES)
            mix(&digests[part], own + i);
        char rest[DIGEST_BYTES] = {0};
        memcpy(rest, own + i, (size_t)(sizes[part] - i));
        mix(&digests[part], rest);
    }
    return parts;
}

// Values, and where their fingerprint is: a digest of each part.
//
// A change of one block always shows, because rounds of AES map digests one to one. A later change
// in the same lane hides it only if all 16 bytes have the values that cancel it. The values depend
// on the key.
struct fingerprint {
    const char *values;
    int64_t count; // bytes
    char *digests; // (parts, DIGEST_BYTES)
};

// Write fingerprints, or return whether one differs.
//
// key: DIGEST_BYTES random bytes, which are the same whenever fingerprints are compared.
INLINE int visit(const int writes, const struct fingerprint *fingerprints, int64_t count,
                 const char *key, int threads)
{
    int differ = 0;
#pragma omp parallel num_threads(threads) reduction(| : differ)                                    \
    if (count > 1 || fingerprints->count > STREAMS * PART)
    {
        int64_t turn = omp_get_thread_num(); // threads take turns
        for (int64_t i = 0; i < count && !differ; i++) {
            const struct fingerprint *own = fingerprints + i;
            for (int64_t first = 0; first < own->count; first += STREAMS * PART) {
                if (turn++ % omp_get_num_threads() != 0)
                    continue;
                struct digest digests[STREAMS];
                const int64_t left = own->count - first;
                const int parts = digest_parts(own->values + first, left, key, digests);
                char *place = own->digests + first / PART * DIGEST_BYTES;
                if (writes)
                    memcpy(place, digests, (size_t)parts * DIGEST_BYTES);
                else
                    differ |= memcmp(place, digests, (size_t)parts * DIGEST_BYTES) != 0;
            }
        }
    }
    return differ;
}

EXPORT void take_fingerprint(const struct fingerprint *fingerprint, const char *key, int threads)
{
    visit(1, fingerprint, 1, key, threads);
}

EXPORT int have_fingerprints(const struct fingerprint *fingerprints, int64_t count, const char *key,
                             int threads)
{
    return !visit(0, fingerprints, count, key, threads);
}
