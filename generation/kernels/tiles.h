// Products with the tiles of AMX, on CPUs that have it.

#pragma once
#include "finish.h"

#include <sys/syscall.h>
#include <unistd.h>

// Tiles of AMX are registers of 16 rows of 64 bytes. A tile of weights has 16 outputs.
#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) &&                     \
    defined(__AVX512VNNI__) && !defined(NO_TILES)
#define HAS_TILES
enum { TILE_BYTES = 64, FEW_ROWS = 8 };

static int has_tiles;

// Linux gives a process tiles when it asks for them.
__attribute__((constructor)) static void ask_for_tiles(void)
{
    const long request = 0x1023, tiles = 18;
    has_tiles = syscall(SYS_arch_prctl, request, tiles) == 0;
}

// Begin to use tiles. The last `weights` of eight are for weights, and the others have this many rows.
INLINE void set_tiles(int rows, int weights)
{
    struct {
        uint8_t palette, unused[15];
        uint16_t bytes[16];
        uint8_t rows[16];
    } sizes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        sizes.bytes[i] = TILE_BYTES;
        sizes.rows[i] = (uint8_t)(i < 8 - weights ? rows : TILE_ROWS);
    }
    // GCC's own function declares that it reads 8 bytes, so GCC may drop the other sizes.
    __asm__ volatile("ldtilecfg %0" : : "m"(sizes));
}

// Begin to multiply rows of states in tiles. Returns the rows of a tile, or 0 to multiply without.
//
// A few rows of integers are faster without tiles. Rows of bfloat16 always use them, because sums
// without tiles are rounded differently.
INLINE int begin_tiles(const struct product *by, int64_t rows, int64_t row_bytes)
{
    const int tile = rows < TILE_ROWS ? (int)rows : TILE_ROWS;
    const int few = by->sums ? FEW_ROWS : 0;
    if (!has_tiles || rows <= few || row_bytes % TILE_BYTES != 0)
        return 0; // tiles without rows would be an error
    set_tiles(tile, 2); // 0 to 3 have sums, 4 and 5 states, 6 and 7 weights
    return tile;
}

INLINE void end_tiles(void) { _tile_release(); }

#define dot_tiles(halves, sums, states, weight)                                                    \
    if (halves)                                                                                    \
        _tile_dpbf16ps(sums, states, weight);                                                      \
    else                                                                                           \
        _tile_dpbusd(sums, states, weight)

// Multiply one or two tiles of states, with rows of `row_bytes`, by a panel: sums of each tile.
//
// The first product with a panel fetches the weights. Later ones find them in the cache.
INLINE void multiply_tiles(const int tiles, const int halves, const int fetches, const char *first,
                           const char *second, int64_t row_bytes, const char *panel,
                           union sums sums[2])
{
    enum { ROW = 4 * PANEL }; // bytes of a row of the panel, or of the sums
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < row_bytes; i += TILE_BYTES) {
        for (int64_t row = i; fetches && row < i + TILE_BYTES; row += 4)
            fetch(panel + row * PANEL);
        _tile_loadd(6, (panel + i * PANEL), ROW);
        _tile_loadd(7, (panel + i * PANEL + TILE_BYTES), ROW);
        _tile_loadd(4, (first + i), row_bytes);
        dot_tiles(halves, 0, 4, 6);
        dot_tiles(halves, 1, 4, 7);
        if (tiles == 2) {
            _tile_loadd(5, (second + i), row_bytes);
            dot_tiles(halves, 2, 5, 6);
            dot_tiles(halves, 3, 5, 7);
        }
    }
    _tile_stored(0, sums[0].integers, ROW);
    _tile_stored(1, (sums[0].integers + LANES), ROW); // early versions of GCC need the brackets
    if (tiles == 2) {
        _tile_stored(2, sums[1].integers, ROW);
        _tile_stored(3, (sums[1].integers + LANES), ROW);
    }
}

// Multiply rows of states by a panel: output (R, out), at the panel's outputs.
INLINE void multiply_rows_in_tiles(const int halves, const int tile, const struct finish *finish,
                                   const struct rounded *by, int64_t rows, int64_t row_bytes,
                                   const char *panel, float *output)
{
    union sums sums[2];
    const char *states = by->states;
    for (int64_t first = 0; first < rows; first += 2 * tile) {
        // Every tile is whole. The last one may therefore repeat rows of another.
        const int64_t second = first + 2 * tile <= rows ? first + tile : rows - tile;
        const int tiles = first < second ? 2 : 1;
        const int64_t starts[2] = {tiles == 2 ? first : second, second};
        const char *left = states + first * row_bytes, *right = states + second * row_bytes;
        if (tiles == 2)
            multiply_tiles(2, halves, first == 0, left, right, row_bytes, panel, sums);
        else
            multiply_tiles(1, halves, first == 0, right, NULL, row_bytes, panel, sums);
        for (int i = 0; i < tiles; i++)
            finish_rows(finish, tile, &sums[i], halves ? NULL : by->scales + starts[i],
                        output + starts[i] * finish->out);
    }
}
#else
INLINE int begin_tiles(const struct product *by, int64_t rows, int64_t row_bytes) { return 0; }
INLINE void end_tiles(void) {}
INLINE void multiply_rows_in_tiles(const int halves, const int tile, const struct finish *finish,
                                   const struct rounded *by, int64_t rows, int64_t row_bytes,
                                   const char *panel, float *output)
{
}
#endif
