// Tiles of dot products, the inner loop of both the linear layer and attention.
//
// Every dot product is summed in one fixed order, which depends on its length only: lane by lane along the vectors, the
// last vector padded with zeros, then across the lanes. A row's result has the same bits for any number of rows in its
// tile and any position among them.
#pragma once

// at::vec reads these; they follow from -march.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define CPU_CAPABILITY AVX512
#define CPU_CAPABILITY_AVX512
#elif defined(__AVX2__) && defined(__FMA__)
#define CPU_CAPABILITY AVX2
#define CPU_CAPABILITY_AVX2
#else
#define CPU_CAPABILITY DEFAULT
#define CPU_CAPABILITY_DEFAULT
#endif
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
#define TANDEM_BF16_DOT
#endif

#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace tandem {

using Vec = at::vec::Vectorized<float>;
constexpr int LANES = Vec::size();
constexpr int COLS = 4;  // columns of a tile
constexpr int LINE = 64;  // bytes of a cache line
#ifdef CPU_CAPABILITY_AVX512
constexpr int ROWS = 6;  // rows of a tile at most: 24 sums, 4 columns and a row fit into 32 registers
#else
constexpr int ROWS = 2;
#endif

inline Vec load(const float* from) { return Vec::loadu(from); }
inline Vec load(const float* from, int count) { return Vec::loadu(from, count); }

inline Vec load(const c10::BFloat16* from) {
  Vec out;
  at::vec::load_fp32_from_bf16(from, out);
  return out;
}

inline Vec load(const c10::BFloat16* from, int count) {
  c10::BFloat16 padded[LANES] = {};
  std::memcpy(padded, from, count * sizeof(c10::BFloat16));
  return load(padded);
}

inline void put(const Vec& from, float* to, int64_t count) { from.store(to, static_cast<int>(count)); }

// VCVTNEPS2BF16 flushes denormals to zero; the other conversions keep them.
inline void put(const Vec& from, c10::BFloat16* to, int64_t count) {
#if defined(TANDEM_BF16_DOT)
  const __m256i narrow = (__m256i)_mm512_cvtneps_pbh(from);
  if (count >= LANES)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow);
  else
    _mm256_mask_storeu_epi16(to, static_cast<__mmask16>((1u << count) - 1), narrow);
#elif defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  const auto narrow = at::vec::cvtfp32_bf16(from);
  std::memcpy(to, &narrow, count * sizeof(c10::BFloat16));
#else
  at::vec::convert_float_bfloat16(from, Vec(0.0f)).store(to, static_cast<int>(count));
#endif
}

inline void put(const Vec& from, float* to) { from.store(to); }

inline void put(const Vec& from, c10::BFloat16* to) { put(from, to, LANES); }

template <typename T>
Vec rounded(const Vec& from) {
  if constexpr (std::is_same_v<T, float>) return from;
#if defined(TANDEM_BF16_DOT)
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(from)), 16));
#elif defined(CPU_CAPABILITY_AVX512)
  __m512 back;
  at::vec::cvtbf16_fp32(at::vec::cvtfp32_bf16(from), back);
  return back;
#elif defined(CPU_CAPABILITY_AVX2)
  __m256 back;
  at::vec::cvtbf16_fp32(at::vec::cvtfp32_bf16(from), back);
  return back;
#else
  T there[LANES];
  put(from, there, LANES);
  return load(there);
#endif
}

#ifdef CPU_CAPABILITY_AVX512
// 2 to the power of x - floor(x), to 2e-7. Exactly 1 for integers and infinities.
inline __m512 power_of_rest(__m512 x) {
  const __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // in [0, 1)
  __m512 p = _mm512_set1_ps(1.867130447e-3f);  // minimax of the relative error
  for (const float next : {9.01702952e-3f, 5.579991368e-2f, 2.4016445e-1f, 6.931513118e-1f, 1.0f})
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(next));
  return p;
}
#endif

// e to the power of x. If the result becomes bfloat16, a relative error of 3e-7 is far below its rounding.
template <typename T>
Vec exp_of(const Vec& x) {
#ifdef CPU_CAPABILITY_AVX512
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    return _mm512_scalef_ps(power_of_rest(power), power);
  }
#endif
  return x.exp();
}

// How a row x and a column w are multiplied: STEP elements at a time, into a vector of float32 sums.
template <typename W_>
struct Widened {  // both in float32; a bfloat16 column is widened as it is read
  using X = float;
  using W = W_;
  static constexpr int STEP = LANES;
  static constexpr int GROUP = 1;  // adjacent elements along k that one lane takes at once
  static Vec spread(const float* from, int64_t) { return Vec(*from); }
  template <typename T>
  static Vec get(const T* from) { return load(from); }
  template <typename T>
  static Vec get(const T* from, int count) { return load(from, count); }
  static Vec dot(Vec x, Vec w, Vec sum) { return at::vec::fmadd(x, w, sum); }
};

#ifdef TANDEM_BF16_DOT
struct Pairs {  // pairs of bfloat16 by one instruction
  using X = c10::BFloat16;
  using W = c10::BFloat16;
  static constexpr int STEP = 2 * LANES;
  static constexpr int GROUP = 2;
  static __m512bh spread(const c10::BFloat16* from, int64_t count) {
    uint32_t pair = 0;
    std::memcpy(&pair, from, count * sizeof(c10::BFloat16));
    return (__m512bh)_mm512_set1_epi32(static_cast<int>(pair));
  }
  static __m512bh get(const c10::BFloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static __m512bh get(const c10::BFloat16* from, int count) {
    return (__m512bh)_mm512_maskz_loadu_epi16((1u << count) - 1, from);
  }
  static Vec dot(__m512bh x, __m512bh w, Vec sum) { return Vec(_mm512_dpbf16_ps(sum, x, w)); }
};
#endif

// How bfloat16 columns are multiplied in this build.
#ifdef TANDEM_BF16_DOT
using Bf16 = Pairs;
#else
using Bf16 = Widened<c10::BFloat16>;
#endif

// The sums of the lanes of four vectors.
inline void sum_lanes(const Vec (&v)[COLS], float* out) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  const __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 abcd = _mm512_add_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));  // a b c d in each quarter
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
  const __m256d lo = _mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
  const __m256d hi = _mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
  const __m256 abcd = _mm256_add_ps(_mm256_castpd_ps(lo), _mm256_castpd_ps(hi));  // a b c d in each half
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
#else
  for (int c = 0; c < COLS; ++c) {
    float lanes[LANES];
    v[c].store(lanes);
    for (int width = LANES / 2; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    out[c] = lanes[0];
  }
#endif
}

// Stores the first `count` of the four sums of a tile's row.
inline void put_row(const float* sums, int count, float* to) { std::memcpy(to, sums, count * sizeof(float)); }

inline void put_row(const float* sums, int count, c10::BFloat16* to) {
#ifdef TANDEM_BF16_DOT
  const __m128bh four = _mm_cvtneps_pbh(_mm_loadu_ps(sums));
  std::memcpy(to, &four, count * sizeof(c10::BFloat16));
#else
  for (int c = 0; c < count; ++c) to[c] = sums[c];
#endif
}

// What a tile prefetches while it computes: `lines` cache lines per vector of a column. The memory need not exist.
struct Ahead {
  const char* from = nullptr;
  int64_t lines = 0;
};

// out[r][c] = x[r] . w[c] for R rows and four columns of `length` elements.
template <typename D, int R>
void dot_tile(const typename D::X* x, int64_t x_stride, const typename D::W* const* w, int64_t length, Ahead ahead,
              float (*out)[COLS]) {
  Vec sums[R][COLS];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < COLS; ++c) sums[r][c] = Vec(0.0f);
  int64_t k = 0;
  for (; k + D::STEP <= length; k += D::STEP) {
    decltype(D::get(w[0])) columns[COLS];
    for (int c = 0; c < COLS; ++c) columns[c] = D::get(w[c] + k);
    for (int64_t line = 0; line < ahead.lines; ++line, ahead.from += LINE) __builtin_prefetch(ahead.from, 0, 2);
    for (int r = 0; r < R; ++r) {
      const auto row = D::get(x + r * x_stride + k);
      for (int c = 0; c < COLS; ++c) sums[r][c] = D::dot(row, columns[c], sums[r][c]);
    }
  }
  if (k < length) {
    const int rest = static_cast<int>(length - k);
    for (int r = 0; r < R; ++r) {
      const auto row = D::get(x + r * x_stride + k, rest);
      for (int c = 0; c < COLS; ++c) sums[r][c] = D::dot(row, D::get(w[c] + k, rest), sums[r][c]);
    }
  }
  for (int r = 0; r < R; ++r) sum_lanes(sums[r], out[r]);
}

// The same for any number of rows up to ROWS.
template <typename D, int R = ROWS>
void dot_rows(int rows, const typename D::X* x, int64_t x_stride, const typename D::W* const* w, int64_t length,
              Ahead ahead, float (*out)[COLS]) {
  if (rows == R) return dot_tile<D, R>(x, x_stride, w, length, ahead, out);
  if constexpr (R > 1) dot_rows<D, R - 1>(rows, x, x_stride, w, length, ahead, out);
}

// A panel is C vectors of adjacent columns, [k / GROUP][C * LANES][GROUP]: each sum runs along k in order, in one lane.

// What is prefetched while a panel is multiplied: with one pass over the panel the bytes that come soon (SOON), with
// several passes the next panel, MOST of it in the first and the REST in the second.
enum class Fetch { NOTHING, SOON, MOST, REST };

// Prefetch distance in bytes with R rows. With few rows the hardware prefetcher keeps pace, and a prefetch from far
// ahead only disturbs it; with more rows a tile waits for memory unless the bytes are requested long before. Measured:
// docs/lab-notes/prefill-and-decode.md.
template <int R>
constexpr int64_t SOON_BYTES = R < 6 ? 1536 : 6144;

// sums[r] += x[r] times a panel, for R rows of `k` elements. Always inline, so that the sums stay in registers.
template <typename D, int R, Fetch FETCH, int C>
[[gnu::always_inline]] inline void add_panel(const typename D::X* x, int64_t stride, int64_t k,
                                             const typename D::W* panel, const char* later, Vec (&sums)[R][C]) {
  const auto step = [&](int64_t group, int64_t count) {
    const typename D::W* at = panel + group * C * LANES * D::GROUP;
    decltype(D::get(panel)) w[C];
    for (int c = 0; c < C; ++c) {
      w[c] = D::get(at + c * LANES * D::GROUP);
      if constexpr (FETCH == Fetch::SOON)
        __builtin_prefetch(reinterpret_cast<const char*>(at + c * LANES * D::GROUP) + SOON_BYTES<R>, 0, 2);
    }
    if constexpr (FETCH == Fetch::MOST || FETCH == Fetch::REST)
      for (int line = 0; line < (FETCH == Fetch::MOST ? C - C / 2 : C / 2); ++line, later += LINE)
        __builtin_prefetch(later, 0, 2);
    for (int r = 0; r < R; ++r) {
      const auto value = D::spread(x + r * stride + group * D::GROUP, count);
      for (int c = 0; c < C; ++c) sums[r][c] = D::dot(value, w[c], sums[r][c]);
    }
  };
  const int64_t whole = k / D::GROUP;
  for (int64_t group = 0; group < whole; ++group) step(group, D::GROUP);
  if (whole * D::GROUP < k) step(whole, k - whole * D::GROUP);
}

// out[r] = (sum over t of p[r][t] * v(t)) / total[r], for R rows and `dim` elements of v(t).
template <typename T, int R, typename V>
void weighted_sum(const float* p, int64_t p_stride, const V& v, int64_t from, int64_t to, int64_t dim,
                  const float* total, T* out, int64_t out_stride) {
  constexpr int WIDE = 4;
  int64_t d = 0;
  for (; d + WIDE * LANES <= dim; d += WIDE * LANES) {
    Vec sums[R][WIDE];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < WIDE; ++c) sums[r][c] = Vec(0.0f);
    for (int64_t t = from; t < to; ++t) {
      Vec values[WIDE];
      const T* value = v(t) + d;
      for (int c = 0; c < WIDE; ++c) values[c] = load(value + c * LANES);
      for (int r = 0; r < R; ++r) {
        const Vec weight(p[r * p_stride + t]);
        for (int c = 0; c < WIDE; ++c) sums[r][c] = at::vec::fmadd(weight, values[c], sums[r][c]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < WIDE; ++c) put(sums[r][c] / Vec(total[r]), out + r * out_stride + d + c * LANES);
  }
  for (; d < dim; d += LANES) {
    const int count = static_cast<int>(std::min<int64_t>(LANES, dim - d));
    Vec sums[R];
    for (int r = 0; r < R; ++r) sums[r] = Vec(0.0f);
    for (int64_t t = from; t < to; ++t) {
      const Vec value = count == LANES ? load(v(t) + d) : load(v(t) + d, count);
      for (int r = 0; r < R; ++r) sums[r] = at::vec::fmadd(Vec(p[r * p_stride + t]), value, sums[r]);
    }
    for (int r = 0; r < R; ++r) put(sums[r] / Vec(total[r]), out + r * out_stride + d, count);
  }
}

template <typename T, int R = ROWS, typename V>
void weighted_sums(int64_t rows, const float* p, int64_t p_stride, const V& v, int64_t from, int64_t to, int64_t dim,
                   const float* total, T* out, int64_t out_stride) {
  if (rows == R) return weighted_sum<T, R>(p, p_stride, v, from, to, dim, total, out, out_stride);
  if constexpr (R > 1) weighted_sums<T, R - 1>(rows, p, p_stride, v, from, to, dim, total, out, out_stride);
}

}  // namespace tandem
