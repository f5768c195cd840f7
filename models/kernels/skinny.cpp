// y[rows, outputs] = x[rows, inputs] @ W[outputs, inputs]^T * scale + bias, in float32, for 1 to a few dozen rows; W in
// float32, or in 8 bits, which are widened as they are read.
//
// Such a product should take as long as reading W once. W is stored in blocks of WIDTH outputs, block by block, inputs
// outermost within a block: a thread reads its blocks from the first byte to the last, and every vector that is read is
// used for up to MOST rows at once, whose sums stay in registers. Each sum adds its inputs in order, whatever the number
// of rows, so that a row's result does not depend on the rows beside it.
//
// compiled.py builds this for the CPU at hand and calls it.

#include <cstdint>
#include <cstring>
#include <omp.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 4; // 6 x 4 sums and 4 weights in 32 registers
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2; // 6 x 2 and 2 in 16
#else
constexpr int LANES = 4, VECTORS = 4; // NEON: 32
#endif
constexpr int WIDTH = LANES * VECTORS, MOST = 6;
// Weights to fetch ahead, into the second cache and from there into the first: past the page that the CPU's own prefetcher
// stops at. Straight into the first, six rows took a tenth longer: their sums leave too few loads under way.
constexpr int FAR = 32 * WIDTH, NEAR = 8 * WIDTH;
constexpr int LINE = 16;          // weights of a cache line, in float32

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(int32_t))));

static inline Vector read(const float* w) { return *(const Vector*)w; }
#if defined(__AVX512F__) // in vector types, GCC 12 widens one number after the other
static inline Vector read(const int8_t* w) {
    return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)w)));
}
#elif defined(__AVX2__)
static inline Vector read(const int8_t* w) {
    return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)w)));
}
#else
static inline Vector read(const int8_t* w) {
    return __builtin_convertvector(__builtin_convertvector(*(const Bytes*)w, Ints), Vector);
}
#endif

template <typename Weight, int ROWS, int COUNT> // COUNT vectors of a block
static void tile(
    const float* x, const Weight* w, const float* scale, const float* bias, float* y,
    int64_t inputs, int64_t outputs, int64_t valid
) {
    Vector sums[ROWS][COUNT] = {};
    for (int64_t k = 0; k < inputs; k++, w += WIDTH) {
        for (int line = 0; line < COUNT * LANES; line += LINE) {
            __builtin_prefetch(w + FAR + line, 0, 2);
            __builtin_prefetch(w + NEAR + line, 0, 3);
        }
        Vector weights[COUNT];
        for (int v = 0; v < COUNT; v++) weights[v] = read(w + v * LANES);
        for (int m = 0; m < ROWS; m++) {
            const float input = x[m * inputs + k];
            for (int v = 0; v < COUNT; v++) sums[m][v] += weights[v] * input;
        }
    }
    for (int m = 0; m < ROWS; m++) {
        for (int v = 0; v < COUNT; v++) sums[m][v] = sums[m][v] * read(scale + v * LANES) + read(bias + v * LANES);
        std::memcpy(y + m * outputs, sums[m], valid * sizeof(float));
    }
}

template <typename Weight, int COUNT>
static void all_rows(
    const float* x, const Weight* w, const float* scale, const float* bias, float* y,
    int64_t rows, int64_t inputs, int64_t outputs, int64_t valid
) {
    using Tile = decltype(&tile<Weight, 1, COUNT>);
    static constexpr Tile TILES[MOST + 1] = {
        nullptr, tile<Weight, 1, COUNT>, tile<Weight, 2, COUNT>, tile<Weight, 3, COUNT>,
        tile<Weight, 4, COUNT>, tile<Weight, 5, COUNT>, tile<Weight, 6, COUNT>,
    };
    const int64_t tiles = (rows + MOST - 1) / MOST;
    for (int64_t t = 0, row = 0; t < tiles; t++) { // of nearly the same size
        const int64_t count = (rows - row) / (tiles - t);
        TILES[count](x + row * inputs, w, scale, bias, y + row * outputs, inputs, outputs, valid);
        row += count;
    }
}

template <typename Weight>
static void multiply(
    const float* x, const Weight* packed, const float* scale, const float* bias, float* y,
    int64_t rows, int64_t inputs, int64_t outputs
) {
    constexpr int64_t HALF = WIDTH / 2;
    const int64_t halves = (outputs + HALF - 1) / HALF;
#pragma omp parallel
    { // A thread may get half a block, or two threads would share nine as five and four.
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const int64_t end = halves * (thread + 1) / threads;
        for (int64_t half = halves * thread / threads; half < end;) {
            const bool whole = half % 2 == 0 && half + 1 < end;
            const int64_t first = half * HALF, wide = whole ? WIDTH : HALF;
            const int64_t valid = outputs - first < wide ? outputs - first : wide;
            const auto product = whole ? all_rows<Weight, VECTORS> : all_rows<Weight, VECTORS / 2>;
            const Weight* w = packed + first / WIDTH * WIDTH * inputs + first % WIDTH;
            product(x, w, scale + first, bias + first, y + first, rows, inputs, outputs, valid);
            half += whole ? 2 : 1;
        }
    }
}

extern "C" int64_t width() { return WIDTH; }

// packed: [ceil(outputs / WIDTH), inputs, WIDTH]; scale and bias: [ceil(outputs / WIDTH) * WIDTH]
extern "C" void product(
    const float* x, const float* packed, const float* scale, const float* bias, float* y,
    int64_t rows, int64_t inputs, int64_t outputs
) {
    multiply(x, packed, scale, bias, y, rows, inputs, outputs);
}

extern "C" void product_int8(
    const float* x, const int8_t* packed, const float* scale, const float* bias, float* y,
    int64_t rows, int64_t inputs, int64_t outputs
) {
    multiply(x, packed, scale, bias, y, rows, inputs, outputs);
}
