// y[rows, outputs] = x[rows, inputs] @ W[outputs, inputs]^T * scale + bias, in float32, for 1 to a few dozen rows; W in
// float32, or in 8 bits, which are widened as they are read.
//
// Such a product should take as long as reading W once. W is stored in blocks of WIDTH outputs, block by block, inputs
// outermost within a block: a thread reads its blocks from the first byte to the last, and every vector that is read is
// used for up to MOST rows at once, whose sums stay in registers. More rows are divided into tiles, which share each
// part of W in the first cache. Each sum adds its inputs in order, whatever the number of rows: a row's result does not
// depend on the rows beside it.
//
// compiled.py builds this for the CPU at hand and calls it.

#include <array>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 2, MOST = 12; // 12 x 2 sums, 2 weights and an input in 32 registers
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2, MOST = 6; // 6 x 2, 2 and 1 in 16
#else
constexpr int LANES = 4, VECTORS = 4, MOST = 6; // NEON: 6 x 4, 4 and 1 in 32
#endif
constexpr int WIDTH = LANES * VECTORS;
// Bytes of weights to fetch ahead, into the second cache and from there into the first: past the page that the CPU's
// own prefetcher stops at. Straight into the first, the sums of many rows leave too few loads under way.
constexpr int FAR = 8192, NEAR = 4096, LINE = 64;
constexpr int PART = 128, GROUP = 48; // inputs and rows for which tiles take turns: they fit into the first cache

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

// A tile ALONE has all rows. Otherwise tiles take turns at each part of the weights, which the FIRST reads from memory,
// and each fetches its share of the next part, so that memory is busy while they compute.
enum Pass { ALONE, FIRST, LATER };

template <int CACHE, typename Weight> // the first cache is 3, the second 2
static inline void fetch(const Weight* w, int64_t bytes) {
    for (int line = 0; line < int(WIDTH * sizeof(Weight)); line += LINE)
        __builtin_prefetch((const char*)w + bytes + line, 0, CACHE);
}

// Add `count` inputs to the `sums` of ROWS rows of a block: those of earlier inputs, unless `fresh`. This is tile
// `number` of `tiles`.
template <typename Weight, Pass PASS, int ROWS>
static void tile(
    const float* x, const Weight* w, float* sums, int64_t inputs, int64_t count,
    int64_t tiles, int64_t number, bool fresh
) {
    Vector values[ROWS][VECTORS];
    for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECTORS; v++) values[m][v] = fresh ? Vector{} : read(sums + m * WIDTH + v * LANES);
    const auto add = [&](int64_t k) {
        if (PASS != LATER) fetch<3>(w, NEAR);
        Vector weights[VECTORS];
        for (int v = 0; v < VECTORS; v++) weights[v] = read(w + v * LANES);
        for (int m = 0; m < ROWS; m++) {
            const float input = x[m * inputs + k];
            for (int v = 0; v < VECTORS; v++) values[m][v] += weights[v] * input;
        }
        w += WIDTH;
    };
    if (PASS == ALONE) {
        for (int64_t k = 0; k < count; k++) {
            fetch<2>(w, FAR);
            add(k);
        }
    } else {
        for (int64_t start = 0; start < count; start += tiles) {
            fetch<2>(w + (PART + number) * WIDTH, 0);
            const int64_t end = start + tiles < count ? start + tiles : count;
            for (int64_t k = start; k < end; k++) add(k);
        }
    }
    for (int m = 0; m < ROWS; m++) std::memcpy(sums + m * WIDTH, values[m], sizeof(values[m]));
}

template <typename Weight, Pass PASS, int... LESS>
static constexpr auto tiles_of(std::integer_sequence<int, LESS...>) {
    return std::array<decltype(&tile<Weight, PASS, 1>), MOST>{tile<Weight, PASS, LESS + 1>...};
}

template <typename Weight, Pass PASS>
static constexpr auto TILES = tiles_of<Weight, PASS>(std::make_integer_sequence<int, MOST>());

template <typename Weight> // up to GROUP rows of a block
static void block(
    const float* x, const Weight* w, const float* scale, const float* bias, float* y,
    int64_t rows, int64_t inputs, int64_t outputs, int64_t valid
) {
    float sums[GROUP * WIDTH];
    const int64_t tiles = (rows + MOST - 1) / MOST;
    if (tiles == 1) TILES<Weight, ALONE>[rows - 1](x, w, sums, inputs, inputs, 1, 0, true);
    for (int64_t k = 0; tiles > 1 && k < inputs; k += PART) {
        const int64_t count = inputs - k < PART ? inputs - k : PART;
        for (int64_t t = 0, row = 0; t < tiles; t++) { // of nearly the same size
            const int64_t size = (rows - row) / (tiles - t);
            const auto part = t == 0 ? TILES<Weight, FIRST>[size - 1] : TILES<Weight, LATER>[size - 1];
            part(x + row * inputs + k, w + k * WIDTH, sums + row * WIDTH, inputs, count, tiles, t, k == 0);
            row += size;
        }
    }
    for (int64_t m = 0; m < rows; m++) {
        Vector out[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            out[v] = read(sums + m * WIDTH + v * LANES) * read(scale + v * LANES) + read(bias + v * LANES);
        std::memcpy(y + m * outputs, out, valid * sizeof(float));
    }
}

template <typename Weight>
static void multiply(
    const float* x, const Weight* packed, const float* scale, const float* bias, float* y,
    int64_t rows, int64_t inputs, int64_t outputs
) {
    const int64_t blocks = (outputs + WIDTH - 1) / WIDTH;
#pragma omp parallel
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        for (int64_t n = blocks * thread / threads; n < blocks * (thread + 1) / threads; n++) {
            const int64_t first = n * WIDTH, valid = outputs - first < WIDTH ? outputs - first : WIDTH;
            for (int64_t row = 0; row < rows; row += GROUP) {
                const int64_t size = rows - row < GROUP ? rows - row : GROUP;
                block(x + row * inputs, packed + first * inputs, scale + first, bias + first, y + row * outputs + first,
                      size, inputs, outputs, valid);
            }
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
