// Fingerprints of values in memory, which show later whether any bit has changed.

#include "instructions.h"
#include "written.h"

#include <omp.h>
#include <stdlib.h>

enum { PART = 1 << 14 }; // bytes that a thread compares at a time

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
    int64_t held;  // number of the scan before the last comparison without a change, or a state
};
enum {
    NOT_COMPARED = 0, // since the fingerprint was taken
    COMPARED = -1,    // once, without a scan
    UNWATCHED = -2,   // the system reports no writes to this memory
};
enum { FEWEST_WATCHED = 2 * PART }; // bytes; comparing fewer takes less time than a scan

INLINE struct span span_of(const struct fingerprint *own, int64_t first, int64_t end)
{
    const uint64_t start = (uintptr_t)own->values;
    return (struct span){start + (uint64_t)first, start + (uint64_t)end};
}

// Write the digests of up to STREAMS parts, or return whether one differs.
INLINE int visit_parts(const int writes, const struct fingerprint *own, int64_t first, int64_t end,
                       const char *key)
{
    struct digest digests[STREAMS];
    const int parts = digest_parts(own->values + first, end - first, key, digests);
    char *place = own->digests + first / PART * DIGEST_BYTES;
    if (writes)
        memcpy(place, digests, (size_t)parts * DIGEST_BYTES);
    return !writes && memcmp(place, digests, (size_t)parts * DIGEST_BYTES) != 0;
}

// Write fingerprints, or return whether one differs.
//
// watched: 1 for each fingerprint whose memory was scanned; NULL without a scan.
// key: DIGEST_BYTES random bytes, which are the same whenever fingerprints are compared.
INLINE int visit(const int writes, const struct fingerprint *fingerprints, int64_t count,
                 const char *watched, const char *key, int threads)
{
    int differ = 0;
#pragma omp parallel num_threads(threads) reduction(| : differ)                                    \
    if (count > 1 || fingerprints->count > STREAMS * PART)
    {
        int64_t turn = omp_get_thread_num(); // threads take turns
        for (int64_t i = 0; i < count && !differ; i++) {
            const struct fingerprint *own = fingerprints + i;
            const int is_watched = watched && watched[i];
            const int64_t step = is_watched ? PART : STREAMS * PART;
            for (int64_t first = 0; first < own->count; first += step) {
                const int64_t end = first + step < own->count ? first + step : own->count;
                if (turn++ % omp_get_num_threads() != 0)
                    continue;
                if (is_watched && !is_written_after(own->held, span_of(own, first, end)))
                    continue;
                differ |= visit_parts(writes, own, first, end, key);
            }
        }
    }
    return differ;
}

EXPORT void take_fingerprint(const struct fingerprint *fingerprint, const char *key, int threads)
{
    visit(1, fingerprint, 1, NULL, key, threads);
}

// Scan values that were compared before for writes: `watched` gets 1 for each that was scanned.
// Returns the number of the scan, or 0.
//
// Watching starts at the second comparison. Weights in training change before that.
static int64_t scan_values(struct fingerprint *fingerprints, int64_t count, char *watched)
{
    struct span *spans = calloc((size_t)count, sizeof *spans);
    int64_t scan = 0;
    if (spans) {
        for (int64_t i = 0; i < count; i++) {
            const struct fingerprint *own = fingerprints + i;
            if (own->count >= FEWEST_WATCHED && (own->held > 0 || own->held == COMPARED))
                spans[i] = span_of(own, 0, own->count);
        }
        scan = scan_for_writes(count, spans, watched);
        for (int64_t i = 0; i < count && scan; i++)
            if (!watched[i])
                fingerprints[i].held = spans[i].end ? UNWATCHED : fingerprints[i].held;
    }
    free(spans);
    return scan;
}

// Tell whether all values have their fingerprints.
EXPORT int have_fingerprints(struct fingerprint *fingerprints, int64_t count, const char *key,
                             int threads)
{
    if (!count)
        return 1;
    char *watched = calloc((size_t)count, 1);
    const int64_t scan = watched ? scan_values(fingerprints, count, watched) : 0;
    const int differ = visit(0, fingerprints, count, scan ? watched : NULL, key, threads);
    for (int64_t i = 0; i < count && !differ; i++) {
        struct fingerprint *own = fingerprints + i;
        if (own->held == NOT_COMPARED)
            own->held = COMPARED;
        else if (scan && watched[i])
            own->held = scan;
    }
    free(watched);
    return !differ;
}
