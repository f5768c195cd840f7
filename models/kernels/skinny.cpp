// y[rows, outputs] = x[rows, inputs] @ W[outputs, inputs]^T + bias, in float32, for 1 to a few dozen rows.
//
// Such a product should take as long as reading W once. W is stored in blocks of WIDTH outputs, block by block, inputs
// outermost within a block: a thread reads its blocks from the first byte to the last, and every vector that is read is
// used for up to MOST rows at once, whose sums stay in registers. Each sum adds its inputs in order, whatever the number
// of rows, so that a row's result does not depend on the rows beside it.
//
// compiled.py builds this for the CPU at hand and calls it.

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 4; // 6 x 4 sums and 4 weights in 32 registers
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2; // 6 x 2 and 2 in 16
#else
constexpr int LANES = 4, VECTORS = 4; // NEON: 32
#endif
constexpr int WIDTH = LANES * VECTORS, MOST = 6;
constexpr int AHEAD = 16 * WIDTH; // floats to fetch ahead: past the page that the CPU's own prefetcher stops at
constexpr int LINE = 16;          // floats of a cache line

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

template <int ROWS>
static void tile(const float* x, const float* w, const float* bias, float* y, int64_t inputs, int64_t outputs, int64_t valid) {
    Vector sums[ROWS][VECTORS];
    for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECTORS; v++) sums[m][v] = *(const Vector*)(bias + v * LANES);
    for (int64_t k = 0; k < inputs; k++, w += WIDTH) {
        for (int line = 0; line < WIDTH; line += LINE) __builtin_prefetch(w + AHEAD + line);
        Vector weights[VECTORS];
        for (int v = 0; v < VECTORS; v++) weights[v] = *(const Vector*)(w + v * LANES);
        for (int m = 0; m < ROWS; m++) {
            const float input = x[m * inputs + k];
            for (int v = 0; v < VECTORS; v++) sums[m][v] += weights[v] * input;
        }
    }
    for (int m = 0; m < ROWS; m++) std::memcpy(y + m * outputs, sums[m], valid * sizeof(float));
}

using Tile = void (*)(const float*, const float*, const float*, float*, int64_t, int64_t, int64_t);
static constexpr Tile TILES[MOST + 1] = {nullptr, tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

extern "C" int64_t width() { return WIDTH; }

// packed: [ceil(outputs / WIDTH), inputs, WIDTH]; bias: [ceil(outputs / WIDTH) * WIDTH]
extern "C" void product(
    const float* x, const float* packed, const float* bias, float* y, int64_t rows, int64_t inputs, int64_t outputs
) {
    const int64_t blocks = (outputs + WIDTH - 1) / WIDTH, tiles = (rows + MOST - 1) / MOST;
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * WIDTH, valid = outputs - first < WIDTH ? outputs - first : WIDTH;
        for (int64_t t = 0, row = 0; t < tiles; t++) { // in tiles of nearly the same size
            const int64_t count = (rows - row) / (tiles - t);
            TILES[count](
                x + row * inputs, packed + first * inputs, bias + first, y + row * outputs + first, inputs, outputs, valid
            );
            row += count;
        }
    }
}
