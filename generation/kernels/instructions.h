// Vectors of the CPU that the kernels are compiled for, and short functions of them.

#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

// A lane has 32 bits: a float, an integer, four int8 or two bfloat16. `dot` adds the four products
// of int8 to an integer. `dot_halves` adds the two products of bfloat16 to a float. The sums of
// ROWS_AT_ONCE rows stay in registers.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
typedef __m512i vector;
typedef __m512 floats;
enum { ROWS_AT_ONCE = 12, INT8_ROWS_AT_ONCE = 12 };
#define dot(sum, states, weight) _mm512_dpbusd_epi32(sum, states, weight)
#define in_all_lanes(number) _mm512_set1_epi32(number)
#define multiply_add(left, right, sum) _mm512_fmadd_ps(left, right, sum)
#define float_in_all_lanes(number) _mm512_set1_ps(number)
#define larger(left, right) _mm512_max_ps(left, right)
#define sum_of_lanes(floats) _mm512_reduce_add_ps(floats)
#define largest_lane(floats) _mm512_reduce_max_ps(floats)
#define first_halves(words) _mm512_castsi512_ps(_mm512_slli_epi32(words, 16))
#define second_halves(words) _mm512_castsi512_ps(_mm512_and_si512(words, in_all_lanes(~0xffff)))
#elif defined(__AVX2__) && defined(__FMA__)
typedef __m256i vector;
typedef __m256 floats;
enum { ROWS_AT_ONCE = 6 };
#if defined(__AVXVNNI__)
enum { INT8_ROWS_AT_ONCE = 6 };
#define dot(sum, states, weight) _mm256_dpbusd_avx_epi32(sum, states, weight)
#else
enum { INT8_ROWS_AT_ONCE = 4 }; // products in 16 bits take registers too
// Pairs of products are added in 16 bits first. States of 7 bits do not overflow there.
#define dot(sum, states, weight)                                                                   \
    _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(states, weight),                  \
                                            _mm256_set1_epi16(1)))
#endif
#define in_all_lanes(number) _mm256_set1_epi32(number)
#define multiply_add(left, right, sum) _mm256_fmadd_ps(left, right, sum)
#define float_in_all_lanes(number) _mm256_set1_ps(number)
#define larger(left, right) _mm256_max_ps(left, right)
#define first_halves(words) _mm256_castsi256_ps(_mm256_slli_epi32(words, 16))
#define second_halves(words) _mm256_castsi256_ps(_mm256_and_si256(words, in_all_lanes(~0xffff)))
INLINE float sum_of_lanes(floats lanes)
{
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
INLINE float largest_lane(floats lanes)
{
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
#else
#error "the kernels need AVX2 and FMA"
#endif
#if !defined(__AES__)
#error "the fingerprints of weights need AES"
#endif

#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512VNNI__)
#define dot_halves(sum, states, weight) _mm512_dpbf16_ps(sum, (__m512bh)(states), (__m512bh)(weight))
#else
INLINE floats dot_halves(floats sum, vector states, vector weight)
{
    sum = multiply_add(second_halves(states), second_halves(weight), sum);
    return multiply_add(first_halves(states), first_halves(weight), sum);
}
#endif

enum { LANES = sizeof(vector) / 4, PANEL = 2 * LANES };

// Read one vector. GCC copies arrays of vectors through the stack, and reading them there waits for
// the copy.
INLINE floats read_floats(const float *values)
{
    floats lanes;
    memcpy(&lanes, values, sizeof(lanes));
    return lanes;
}

// Read two vectors from memory once. GCC would read them again for each use, which takes longer than
// the products on some CPUs.
#define IN_REGISTERS(left, right) __asm__("" : "+v"(left), "+v"(right))

// Fetch a row of a panel of weights before its use. Otherwise, a CPU waits for memory at each new page.
INLINE void fetch(const void *weights)
{
    enum { AHEAD = 2048, LINE = 64 }; // bytes
    for (int line = 0; line < 4 * PANEL; line += LINE)
        __builtin_prefetch((const char *)weights + AHEAD + line);
}

// e^x of -87 <= x <= 0, to the last bit or two: 2^n e^r with |r| <= ln(2) / 2. A lower x, even
// -inf, gives e^-87. NaN stays NaN.
INLINE float exponential(float x)
{
    x = x < -87 ? -87 : x;
    const float n = __builtin_rintf(x * 1.44269504f);
    float r = __builtin_fmaf(n, -0.693359375f, x);
    r = __builtin_fmaf(n, 2.12194440e-4f, r);
    float power = 1.9875691500e-4f;
    power = __builtin_fmaf(power, r, 1.3981999507e-3f);
    power = __builtin_fmaf(power, r, 8.3334519073e-3f);
    power = __builtin_fmaf(power, r, 4.1665795894e-2f);
    power = __builtin_fmaf(power, r, 1.6666665459e-1f);
    power = __builtin_fmaf(power, r, 5.0000001201e-1f);
    power = __builtin_fmaf(power * r, r, r) + 1;
    const int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return power * scale;
}

#define LOWEST (-3e38f)    // nearly the lowest float
#define NEGLIGIBLE (-60.f) // values further below the highest do not count: e^-60 is 1e-26

// The largest value, and at least LOWEST. NaN is overlooked.
INLINE float maximum(const float *values, int64_t count)
{
    floats parts = float_in_all_lanes(LOWEST);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        parts = larger(read_floats(values + i), parts);
    float lanes[LANES], highest = LOWEST;
    memcpy(lanes, &parts, sizeof(parts));
    for (int lane = 0; lane < LANES; lane++)
        highest = lanes[lane] > highest ? lanes[lane] : highest;
    for (; i < count; i++)
        highest = values[i] > highest ? values[i] : highest;
    return highest;
}

// The largest absolute value of floats, and at least 1e-30, so that zeros can be divided by it. The
// result is NaN if a float is NaN or infinite.
INLINE float largest_magnitude(const float *values, int64_t count)
{
    const uint32_t infinity = 0x7f800000;
    uint32_t bits, highest = 0; // bits of sizes are ordered as the sizes are, and NaN comes last
    for (int64_t i = 0; i < count; i++) {
        memcpy(&bits, values + i, 4);
        bits &= 0x7fffffff;
        highest = bits > highest ? bits : highest;
    }
    if (highest >= infinity)
        return __builtin_nanf("");
    float size;
    memcpy(&size, &highest, 4);
    return size > 1e-30f ? size : 1e-30f;
}

// Round a row of floats to bfloat16, ties to even.
INLINE void halve_row(const float *values, int64_t count, uint16_t *halves)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, 4);
        const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        halves[i] = (uint16_t)(values[i] == values[i] ? nearest : 0x7fc0); // else NaN
    }
}

// Convert a row of bfloat16 to floats.
INLINE void widen_row(const uint16_t *halves, int64_t count, float *values)
{
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = (uint32_t)halves[i] << 16;
        memcpy(values + i, &bits, 4);
    }
}
