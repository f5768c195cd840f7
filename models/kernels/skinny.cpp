// y[rows, outputs] = x[rows, inputs] @ W[outputs, inputs]^T * scale + bias, in float32, for 1 to a few dozen rows; W in
// float32, or in 8 bits, which are widened as they are read.
//
// Such a product should take as long as reading W once. W is stored in blocks of WIDTH outputs, block by block, inputs
// outermost within a block: a thread reads its blocks from the first byte to the last, and every vector that is read is
// used for up to MOST rows at once, whose sums stay in registers. More rows are divided into tiles, which share each
// part of W in the first cache. Each sum adds its inputs in order, whatever the number of rows: a row's result does not
// depend on the rows beside it.
//
// Attention of a few queries, and of whole prompts, follows below. compiled.py builds both for the CPU at hand and calls
// them.

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <omp.h>
#include <utility>
#include <vector>
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

// Attention in float32: of a few queries to all keys of a cache, softmax(q k^T * scale + mask) v, and of all tokens of
// a text to themselves and earlier ones. A query's result does not depend on the others.

// {a[0] + a[1], a[2] + a[3], ..., b[0] + b[1], ...}
template <int... I>
static inline Vector sums_of_pairs(Vector a, Vector b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, 2 * I...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
#else
    return __builtin_shuffle(a, b, Ints{2 * I...}) + __builtin_shuffle(a, b, Ints{(2 * I + 1)...});
#endif
}

// {sum(a[0]), sum(a[1]), ...} of LANES vectors
static inline Vector sums_of(Vector* a) {
    for (int count = LANES / 2; count > 0; count /= 2)
        for (int i = 0; i < count; i++)
            a[i] = sums_of_pairs(a[2 * i], a[2 * i + 1], std::make_integer_sequence<int, LANES>());
    return a[0];
}

static inline Vector choose(Ints condition, Vector yes, Vector no) {
    return (Vector)((condition & (Ints)yes) | (~condition & (Ints)no));
}

// e^x for x <= 0, with a relative error of about 2e-7; 0 below -87 (Cephes' expf)
static inline Vector exponential(Vector x) {
    const Ints low = x < Vector{} - 87.0f;
    x = choose(low, Vector{}, x);
    const Ints power = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints); // the nearest, because x <= 0
    const Vector whole = __builtin_convertvector(power, Vector), r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Vector p = Vector{} + 1.9875691500e-4f;
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = p * r + c;
    return choose(low, Vector{}, (p * r * r + r + 1.0f) * (Vector)((power + 127) << 23));
}

struct Strided {
    const float* data;
    int64_t row, head, step; // distance of rows of the batch, of heads, and of queries or keys
    const float* at(int64_t n, int64_t h, int64_t i) const { return data + n * row + h * head + i * step; }
};

// Replace a query's scores, of `size` keys, by e^(score - largest); return their sum.
static inline float exponentials(float* scores, int64_t size, Vector largest) {
    float top = largest[0], sum = 0;
    for (int i = 1; i < LANES; i++) top = largest[i] > top ? largest[i] : top;
    Vector total = {};
    for (int64_t j = 0; j < size; j += LANES) {
        const Vector weight = exponential(read(scores + j) - top);
        std::memcpy(scores + j, &weight, sizeof(weight));
        total += weight;
    }
    for (int i = 0; i < LANES; i++) sum += total[i];
    return sum;
}

// The weights [queries, stride] of one head before division by their sums [queries]; keys beyond the last have none.
template <int COUNT>
static void weigh(
    const float* q, int64_t q_step, const float* k, int64_t k_step, const float* mask, int64_t mask_step,
    int64_t queries, int64_t keys, float scale, float* weights, float* totals
) {
    const int64_t stride = (keys + LANES - 1) / LANES * LANES;
    for (int64_t t = 0; t < queries; t++) {
        Vector query[COUNT], largest = Vector{} - INFINITY;
        for (int c = 0; c < COUNT; c++) query[c] = read(q + t * q_step + c * LANES) * scale;
        const auto score = [&](int64_t j, int64_t count) __attribute__((always_inline)) {
            Vector dots[LANES], seen = {};
            for (int i = 0; i < LANES; i++) {
                const float* key = k + (j + (i < count ? i : 0)) * k_step;
                dots[i] = query[0] * read(key);
                for (int c = 1; c < COUNT; c++) dots[i] += query[c] * read(key + c * LANES);
            }
            if (mask) std::memcpy(&seen, mask + t * mask_step + j, count * sizeof(float));
            for (int i = count; i < LANES; i++) seen[i] = -INFINITY;
            const Vector scores = sums_of(dots) + seen;
            std::memcpy(weights + t * stride + j, &scores, sizeof(scores));
            largest = choose(scores > largest, scores, largest);
        };
        const int64_t whole = keys / LANES * LANES;
        for (int64_t j = 0; j < whole; j += LANES) score(j, LANES);
        if (whole < keys) score(whole, keys - whole);
        totals[t] = exponentials(weights + t * stride, keys, largest);
    }
}

template <int COUNT, int ROWS>
static void add_values(
    const float* weights, int64_t stride, const float* v, int64_t step, int64_t keys, const float* totals,
    float* out, int64_t out_step
) {
    Vector sums[ROWS][COUNT] = {};
    for (int64_t j = 0; j < keys; j++)
        for (int m = 0; m < ROWS; m++)
            for (int c = 0; c < COUNT; c++) sums[m][c] += read(v + j * step + c * LANES) * weights[m * stride + j];
    for (int m = 0; m < ROWS; m++)
        for (int c = 0; c < COUNT; c++) {
            const Vector mean = sums[m][c] / totals[m];
            std::memcpy(out + m * out_step + c * LANES, &mean, sizeof(mean));
        }
}

template <int COUNT, int... LESS>
static constexpr auto adders_of(std::integer_sequence<int, LESS...>) {
    return std::array<decltype(&add_values<COUNT, 1>), sizeof...(LESS)>{add_values<COUNT, LESS + 1>...};
}

// Write the means [queries, width] of the values of one head by their weights.
template <int COUNT>
static void average(
    const float* weights, int64_t stride, const float* totals, const float* v, int64_t step,
    int64_t queries, int64_t keys, float* out, int64_t out_step
) {
    constexpr int WIDE = COUNT > 4 && COUNT % 2 == 0 ? COUNT / 2 : COUNT, ROWS = MOST * VECTORS / WIDE;
    static constexpr auto ADDERS = adders_of<WIDE>(std::make_integer_sequence<int, ROWS>());
    for (int part = 0; part < COUNT * LANES; part += WIDE * LANES) {
        const int64_t tiles = (queries + ROWS - 1) / ROWS;
        for (int64_t tile = 0, t = 0; tile < tiles; tile++) { // of nearly the same size
            const int64_t count = (queries - t) / (tiles - tile);
            ADDERS[count - 1](weights + t * stride, stride, v + part, step, keys, totals + t, out + t * out_step + part,
                              out_step);
            t += count;
        }
    }
}

template <int COUNT>
static void attend_with(
    Strided q, Strided k, Strided v, Strided mask, float* out,
    int64_t batch, int64_t heads, int64_t groups, int64_t queries, int64_t keys, float scale
) {
    const int64_t stride = (keys + LANES - 1) / LANES * LANES, size = COUNT * LANES;
#pragma omp parallel
    {
        static thread_local std::vector<float> weights, totals;
        weights.resize(queries * stride);
        totals.resize(queries);
#pragma omp for
        for (int64_t n = 0; n < batch * heads; n++) {
            const int64_t row = n / heads, head = n % heads, group = head * groups / heads;
            const float* seen = mask.data ? mask.at(row, 0, 0) : nullptr;
            weigh<COUNT>(q.at(row, head, 0), q.step, k.at(row, group, 0), k.step, seen, mask.step, queries, keys, scale,
                         weights.data(), totals.data());
            average<COUNT>(weights.data(), stride, totals.data(), v.at(row, group, 0), v.step, queries, keys,
                           out + (row * queries * heads + head) * size, heads * size);
        }
    }
}

// Causal attention of all `tokens`. The keys of a group are stored as weights of a product, [blocks, width, WIDTH], and
// QUERIES at a time are multiplied by those that the last of them sees.
template <int COUNT>
static void attend_causally(
    Strided q, Strided k, Strided v, float* out,
    int64_t batch, int64_t heads, int64_t groups, int64_t tokens, float scale
) {
    constexpr int QUERIES = 24; // a multiple of MOST
    constexpr int64_t SIZE = COUNT * LANES;
    const int64_t blocks = (tokens + WIDTH - 1) / WIDTH, spans = (tokens + QUERIES - 1) / QUERIES;
    const std::unique_ptr<float[]> memory(new float[batch * groups * blocks * SIZE * WIDTH]);
    float* const packed = memory.get();
#pragma omp parallel
    {
#pragma omp for
        for (int64_t n = 0; n < batch * groups * blocks; n++) {
            const int64_t group = n / blocks, first = n % blocks * WIDTH;
            for (int64_t j = 0; j < WIDTH; j++) {
                const bool exists = first + j < tokens;
                const float* key = k.at(group / groups, group % groups, exists ? first + j : 0);
                for (int64_t c = 0; c < SIZE; c++) packed[(n * SIZE + c) * WIDTH + j] = exists ? key[c] : 0;
            }
        }
        static thread_local std::vector<float> weights, queries;
        weights.resize(QUERIES * blocks * WIDTH);
        queries.resize(QUERIES * SIZE);
        float sums[MOST * WIDTH], totals[QUERIES];
#pragma omp for schedule(dynamic)
        for (int64_t n = 0; n < batch * heads * spans; n++) {
            const int64_t head = n % heads, row = n / heads % batch, group = head * groups / heads;
            const int64_t first = (spans - 1 - n / (batch * heads)) * QUERIES; // the longest spans first
            const int64_t count = tokens - first < QUERIES ? tokens - first : QUERIES, seen = first + count;
            const int64_t used = (seen + WIDTH - 1) / WIDTH, stride = used * WIDTH;
            for (int64_t t = 0; t < count; t++)
                for (int64_t c = 0; c < SIZE; c++) queries[t * SIZE + c] = q.at(row, head, first + t)[c] * scale;
            for (int64_t b = 0; b < used; b++)
                for (int64_t t = 0; t < count; t += MOST) {
                    const int64_t size = count - t < MOST ? count - t : MOST;
                    const float* key = packed + ((row * groups + group) * blocks + b) * SIZE * WIDTH;
                    TILES<float, LATER>[size - 1](queries.data() + t * SIZE, key, sums, SIZE, SIZE, SIZE, 0, true);
                    float* scores = weights.data() + t * stride + b * WIDTH;
                    for (int64_t m = 0; m < size; m++)
                        std::memcpy(scores + m * stride, sums + m * WIDTH, WIDTH * sizeof(float));
                }
            for (int64_t t = 0; t < count; t++) {
                float* scores = weights.data() + t * stride;
                Vector largest = Vector{} - INFINITY;
                for (int64_t j = first + t + 1; j < stride; j++) scores[j] = -INFINITY;
                for (int64_t j = 0; j < stride; j += LANES) {
                    const Vector score = read(scores + j);
                    largest = choose(score > largest, score, largest);
                }
                totals[t] = exponentials(scores, stride, largest);
            }
            average<COUNT>(weights.data(), stride, totals, v.at(row, group, 0), v.step, count, seen,
                           out + ((row * tokens + first) * heads + head) * SIZE, heads * SIZE);
        }
    }
}

// out: [batch, queries, heads, width]. `strides`: of rows, heads and queries or keys, of q, k, v and mask; the last
// dimension of each is contiguous. mask is added to the scores, null: none. With `causal`, queries and keys are of the
// same tokens, without a mask. Returns 0 if this width is not supported.
extern "C" int64_t attend(
    const float* q, const float* k, const float* v, const float* mask, float* out, const int64_t* strides,
    int64_t batch, int64_t heads, int64_t groups, int64_t queries, int64_t keys, int64_t width, float scale,
    int64_t causal
) {
    const float* data[] = {q, k, v, mask};
    std::array<Strided, 4> given;
    for (int i = 0; i < 4; i++) given[i] = {data[i], strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]};
    const auto run = [&](auto count) {
        constexpr int COUNT = decltype(count)::value;
        const auto [query, key, value, seen] = given;
        if (causal) attend_causally<COUNT>(query, key, value, out, batch, heads, groups, queries, scale);
        else attend_with<COUNT>(query, key, value, seen, out, batch, heads, groups, queries, keys, scale);
        return 1;
    };
    switch (width % LANES ? 0 : width / LANES) {
        case 1: return run(std::integral_constant<int, 1>());
        case 2: return run(std::integral_constant<int, 2>());
        case 4: return run(std::integral_constant<int, 4>());
        case 5: return run(std::integral_constant<int, 5>());
        case 6: return run(std::integral_constant<int, 6>());
        case 8: return run(std::integral_constant<int, 8>());
        case 16: return run(std::integral_constant<int, 16>());
    }
    return 0;
}
