// Attention over the pages by tiles, in the order tile32.
//
// A task is some queries of one sequence with one head of K and V. Each query and head of it is a row; 16 rows are a
// tile. The task takes the context KEYS tokens at a time, once: each row has its largest logit so far, and the sums of
// its weights and of the values that they weigh, which are scaled down when a larger logit comes (Milakov and
// Gimelshein, Online normalizer calculation for softmax, 2018). Steps of KEYS and of TILE_K tokens begin at multiples
// of these from the sequence's first token, and a token that a row does not see has weight zero there. So a row has the
// same bits in any task: what the other rows see besides adds zeros.
#include "ops.h"

#include "attention.h"
#include "tile_panels.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#ifdef TANDEM_TILES

namespace tandem {
namespace {

using at::BFloat16;
using at::Tensor;

constexpr int64_t KEYS = 256;                // tokens that share a largest logit: part of the order
constexpr int64_t STEPS = KEYS / TILE_K;
constexpr int64_t KEY_TILES = KEYS / LANES;
constexpr int64_t AHEAD = 64;                // tokens of few rows between what is in work and what is on its way
constexpr int64_t V_TILES = 4;               // of few rows, at once
constexpr int64_t LEAST_ROWS = 96, MOST_ROWS = 768;  // of a task of several queries: they share the packing of K and V
constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr float LOWEST = -3e38f;             // a largest logit before there is one: finite, for the difference of two
constexpr float LOG2_E = 1.44269504f;

// 2 to the power of x, to 2e-7; zero below the least normal number. Exactly 1 of 0.
__m512 power_of_two(__m512 x) {
  const __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // in [0, 1]
  __m512 p = _mm512_set1_ps(1.867130447e-3f);  // minimax of the relative error
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(9.01702952e-3f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(5.579991368e-2f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(2.4016445e-1f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(6.931513118e-1f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), p, x);
}

struct Shape {
  int64_t groups, k_dim, v_dim, k_steps, v_tiles;  // v_tiles: 16 elements of V each, an even number
};

struct Softmax {
  float by;                   // of the logits, which are to the base of two then
  std::optional<float> soft;  // what tanh takes them by, before
};

// KEYS tokens of a task, from `start` on.
template <typename T>
struct Stretch {
  int64_t task, start, from, to;       // steps [from, to) have tokens that a query of the task sees
  const T *keys[KEYS], *values[KEYS];  // null for those that none sees
};

// Fetches what few rows read, in that order: K of a stretch, V by V_TILES tiles of its elements, and what the next
// stretch begins with. In small portions, for a core waits for so many lines at once, and then for all else too; and
// not far ahead: a sequence's blocks often lie apart by a multiple of the size of a cache's way, and share its sets.
template <typename T>
struct Ahead {
  const Shape& shape;
  const Stretch<T>*here, *next;  // null behind the last
  int64_t d, token;              // element of V, or -1 for K

  Ahead(const Shape& shape, const Stretch<T>& from, const Stretch<T>* next)
      : shape(shape), here(&from), next(next), d(-1), token(std::min(from.from * TILE_K + AHEAD, from.to * TILE_K)) {}

  void fetch(int64_t count) {
    while (count > 0 && here != nullptr) {
      const int64_t end = here->to * TILE_K, stop = std::min(token + count, end);
      const T* const* rows = d < 0 ? here->keys : here->values;
      const int64_t first = std::max<int64_t>(d, 0);
      const int64_t elements = d < 0 ? shape.k_dim : std::min(V_TILES * LANES, shape.v_dim - d);
      count -= stop - token;
      for (; token < stop; ++token)
        if (rows[token] != nullptr) prefetch(rows[token] + first, elements);
      if (token < end) return;
      d = d < 0 ? 0 : d + V_TILES * LANES;
      if (d >= shape.v_dim) here = next, next = nullptr, d = -1;
      if (here != nullptr) token = here->from * TILE_K;
    }
  }
};

// 32 elements of a row [dim] as bfloat16; zeros behind its end, and without a row.
template <typename T>
__m512i words_at(const T* row, int64_t at, int64_t dim) {
  return at + TILE_K <= dim ? words_of<BFloat16>(row, at, TILE_K) : words_of<BFloat16>(row, at, dim - at);
}

// 16 rows [k_dim] into tiles [k_steps][16][32]; zeros where a row is null.
template <typename T>
void tiles_from(const T* const* rows, int64_t k_dim, BFloat16* to) {
  for (int64_t r = 0; r < TILE_ROWS; ++r)
    for (int64_t at = 0; at < k_dim; at += TILE_K)
      _mm512_store_si512(to + at * TILE_ROWS + r * TILE_K, words_at(rows[r], at, k_dim));
}

// A tile of A [16][32] into one of B [16 pairs][16][2].
void turn(const BFloat16* from, BFloat16* to) {
  __m512i words[LANES];
  for (int64_t r = 0; r < LANES; ++r) words[r] = _mm512_load_si512(from + r * TILE_K);
  transpose(words);
  for (int64_t r = 0; r < LANES; ++r) _mm512_store_si512(to + r * TILE_K, words[r]);
}

// Columns [r, r + 4) of a tile of sums as rows.
void turn_four(const float (*from)[LANES], int64_t r, float* to) {
  __m512 fours[4];  // of tokens i, 4 + i, 8 + i and 12 + i
  for (int i = 0; i < 4; ++i) {
    const auto four = [&](int64_t token) { return _mm_load_ps(from[token] + r); };
    fours[i] = _mm512_castps128_ps512(four(i));
    fours[i] = _mm512_mask_broadcast_f32x4(fours[i], 0x00f0, four(4 + i));
    fours[i] = _mm512_mask_broadcast_f32x4(fours[i], 0x0f00, four(8 + i));
    fours[i] = _mm512_mask_broadcast_f32x4(fours[i], 0xf000, four(12 + i));
  }
  const auto pairs = [&](int i, bool upper) {
    const __m512 a = fours[i], b = fours[i + 1];
    return _mm512_castps_pd(upper ? _mm512_unpackhi_ps(a, b) : _mm512_unpacklo_ps(a, b));
  };
  _mm512_store_pd(to, _mm512_unpacklo_pd(pairs(0, false), pairs(2, false)));
  _mm512_store_pd(to + LANES, _mm512_unpackhi_pd(pairs(0, false), pairs(2, false)));
  _mm512_store_pd(to + 2 * LANES, _mm512_unpacklo_pd(pairs(0, true), pairs(2, true)));
  _mm512_store_pd(to + 3 * LANES, _mm512_unpackhi_pd(pairs(0, true), pairs(2, true)));
}

// K of 16 tokens into tiles of B [k_steps][16 pairs][16 tokens][2].
template <typename T>
void keys_panel(const T* const* rows, int64_t k_dim, BFloat16* to) {
  for (int64_t at = 0; at < k_dim; at += TILE_K, to += TILE) {
    __m512i words[LANES];
    for (int64_t r = 0; r < LANES; ++r) words[r] = words_at(rows[r], at, k_dim);
    transpose(words);
    for (int64_t r = 0; r < LANES; ++r) _mm512_store_si512(to + r * TILE_K, words[r]);
  }
}

// Elements [from, to) of V of 32 tokens into tiles of B [16 pairs of tokens][16][2], `from` a multiple of 32. Of 32
// elements the even fours are in the first of two tiles and the odd fours in the second: so 128 bits at a time
// interleave. fetch() is called for each pair.
template <typename T, typename F>
void values_panel(const T* const* rows, int64_t from, int64_t to, BFloat16* panel, const F& fetch) {
  for (int64_t pair = 0; pair < TILE_ROWS; ++pair, panel += TILE_K) {
    fetch();
    BFloat16* into = panel;
    for (int64_t at = from; at < to; at += TILE_K, into += 2 * TILE) {
      const __m512i a = words_at(rows[2 * pair], at, to), b = words_at(rows[2 * pair + 1], at, to);
      _mm512_store_si512(into, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(into + TILE, _mm512_unpackhi_epi16(a, b));
    }
  }
}

// Logits [H][KEY_TILES][16][16] of H tiles of rows, in steps [from, to) of 32 tokens.
template <int H, typename M>
void logits_of(M& tiles, const BFloat16* q, const BFloat16* panel, int64_t k_steps, int64_t from, int64_t to,
               float* logits) {
  for (int64_t step = from; step < to; ++step) {
    const BFloat16 *upper = q, *lower = q + k_steps * TILE;
    const BFloat16 *left = panel + 2 * step * k_steps * TILE, *right = left + k_steps * TILE;
    tiles.template zero<0>();
    tiles.template zero<1>();
    if constexpr (H == 2) {
      tiles.template zero<2>();
      tiles.template zero<3>();
    }
    for (int64_t k = 0; k < k_steps; ++k, upper += TILE, lower += TILE, left += TILE, right += TILE) {
      tiles.template load<4>(upper, WIDTH_BYTES);
      tiles.template load<6>(left, WIDTH_BYTES);
      tiles.template dot<0, 4, 6>();
      tiles.template load<7>(right, WIDTH_BYTES);
      tiles.template dot<1, 4, 7>();
      if constexpr (H == 2) {
        tiles.template load<5>(lower, WIDTH_BYTES);
        tiles.template dot<2, 5, 6>();
        tiles.template dot<3, 5, 7>();
      }
    }
    float* out = logits + 2 * step * SUMS;
    tiles.template store<0>(out, WIDTH_BYTES);
    tiles.template store<1>(out + SUMS, WIDTH_BYTES);
    if constexpr (H == 2) {
      tiles.template store<2>(out + KEY_TILES * SUMS, WIDTH_BYTES);
      tiles.template store<3>(out + KEY_TILES * SUMS + SUMS, WIDTH_BYTES);
    }
  }
}

// The same bits for up to 16 rows and one or two steps, with K as it lies in the pages: tokens are the rows of A, and
// `whole` says that neither blocks nor elements end within a tile. fetch() is called for each 16 tokens and 32
// elements, and for each 16 tokens.
template <typename M, typename T, typename F>
void logits_of_few(M& tiles, int64_t rows, const BFloat16* turned_q, const T* const* keys, int64_t steps, int64_t token,
                   bool whole, const Shape& shape, BFloat16* copies, float* logits, const F& fetch) {
  alignas(LINE) float sums[4][TILE_ROWS][LANES];
  const char* from[4];
  int64_t stride[4], apart[4];  // bytes between tokens, and between steps of elements
  for (int64_t i = 0; i < 2 * steps; ++i) {
    const T* const* here = keys + i * TILE_ROWS;
    if (!QUANTISED<T> && whole && here[0] != nullptr && here[TILE_ROWS - 1] != nullptr) {
      from[i] = reinterpret_cast<const char*>(here[0]), stride[i] = token * sizeof(T), apart[i] = WIDTH_BYTES;
    } else {
      BFloat16* copy = copies + i * shape.k_steps * TILE;
      tiles_from(here, shape.k_dim, copy);
      from[i] = reinterpret_cast<const char*>(copy), stride[i] = WIDTH_BYTES, apart[i] = TILE * sizeof(BFloat16);
    }
  }
  tiles.template zero<0>();
  tiles.template zero<1>();
  tiles.template zero<2>();
  tiles.template zero<3>();
  for (int64_t k = 0; k < shape.k_steps; ++k) {
    fetch();
    tiles.template load<6>(turned_q + k * TILE, WIDTH_BYTES);
    tiles.template load<4>(from[0] + k * apart[0], stride[0]);
    tiles.template dot<0, 4, 6>();
    fetch();
    tiles.template load<5>(from[1] + k * apart[1], stride[1]);
    tiles.template dot<1, 5, 6>();
    if (steps == 1) continue;
    fetch();
    tiles.template load<4>(from[2] + k * apart[2], stride[2]);
    tiles.template dot<2, 4, 6>();
    fetch();
    tiles.template load<5>(from[3] + k * apart[3], stride[3]);
    tiles.template dot<3, 5, 6>();
  }
  tiles.template store<0>(sums[0], WIDTH_BYTES);
  tiles.template store<1>(sums[1], WIDTH_BYTES);
  tiles.template store<2>(sums[2], WIDTH_BYTES);
  tiles.template store<3>(sums[3], WIDTH_BYTES);
  for (int64_t i = 0; i < 2 * steps; ++i) {
    fetch();
    for (int64_t r = 0; r < rows; r += 4) turn_four(sums[i], r, logits + i * SUMS + r * LANES);
  }
}

// What is kept of 16 rows between one stretch and the next.
struct alignas(LINE) Kept {
  float top[TILE_ROWS];            // the largest logit, to the base of two
  float lanes[TILE_ROWS][LANES];   // sums of the weights by position modulo 16
};

// Turns logits [KEY_TILES][16][16] of up to 16 rows, of which row r sees the tokens [seen[r], past[r]) of the stretch,
// into weights of the steps [from, to): tiles of A [16][32], each in the place of the first of two. Returns the rows
// whose sums so far are to be multiplied by `factors`. Of quantised tokens, `by_key` are the scales of K, which the
// logits lack yet, and `by_value` those of V, which the weights get and their sum does not.
template <bool SCALED>
__mmask16 weigh(int64_t rows, const int64_t* seen, const int64_t* past, int64_t from, int64_t to,
                const Softmax& softmax, const float* by_key, const float* by_value, float* logits, Kept& kept,
                float* factors) {
  alignas(LINE) float highest[TILE_ROWS][LANES];
  int64_t begin[TILE_ROWS], end[TILE_ROWS];  // in steps
  for (int64_t r = 0; r < rows; ++r) {
    float* row = logits + r * LANES;
    const int64_t first = std::max(seen[r], from * TILE_K), last = std::min(past[r], to * TILE_K);
    __m512 high = _mm512_set1_ps(NONE), other = high;
    begin[r] = end[r] = from;
    if (first < last) {
      begin[r] = first / TILE_K, end[r] = (last + TILE_K - 1) / TILE_K;
      if constexpr (SCALED)
        for (int64_t t = 2 * begin[r]; t < 2 * end[r]; ++t)
          (load(row + t * SUMS) * load(by_key + t * LANES)).store(row + t * SUMS);
      if (softmax.soft.has_value())
        for (int64_t t = 2 * begin[r]; t < 2 * end[r]; ++t)
          (load(row + t * SUMS) * Vec(*softmax.soft)).tanh().store(row + t * SUMS);
      const auto hide = [&](int64_t t, __mmask16 hidden) {
        _mm512_mask_store_ps(row + t * SUMS, hidden, _mm512_set1_ps(NONE));
      };
      for (int64_t t = 2 * begin[r]; t * LANES < first; ++t)
        hide(t, static_cast<__mmask16>((1u << std::min<int64_t>(LANES, first - t * LANES)) - 1));
      for (int64_t t = 2 * end[r] - 1; (t + 1) * LANES > last; --t)
        hide(t, static_cast<__mmask16>(0xffffu << std::max<int64_t>(0, last - t * LANES)));
      for (int64_t t = 2 * begin[r]; t < 2 * end[r]; t += 2) {
        high = _mm512_max_ps(high, _mm512_load_ps(row + t * SUMS));
        other = _mm512_max_ps(other, _mm512_load_ps(row + t * SUMS + SUMS));
      }
    }
    _mm512_store_ps(highest[r], _mm512_max_ps(high, other));
  }
  __m512i columns[LANES];
  for (int64_t r = 0; r < TILE_ROWS; ++r)
    columns[r] = r < rows ? _mm512_load_si512(highest[r]) : _mm512_castps_si512(_mm512_set1_ps(NONE));
  transpose(columns);
  __m512 high = _mm512_castsi512_ps(columns[0]);
  for (int64_t i = 1; i < LANES; ++i) high = _mm512_max_ps(high, _mm512_castsi512_ps(columns[i]));
  const __m512 by = _mm512_set1_ps(softmax.by), before = _mm512_load_ps(kept.top);
  const __m512 top = _mm512_max_ps(before, _mm512_mul_ps(high, by));
  const __m512 factor = power_of_two(_mm512_sub_ps(before, top));
  _mm512_store_ps(kept.top, top);
  _mm512_store_ps(factors, factor);

  for (int64_t r = 0; r < rows; ++r) {
    float* row = logits + r * LANES;
    const __m512 own = _mm512_set1_ps(kept.top[r]);
    __m512 sums = _mm512_mul_ps(_mm512_load_ps(kept.lanes[r]), _mm512_set1_ps(factors[r]));
    const __m512i none = _mm512_setzero_si512();
    for (int64_t step = from; step < begin[r]; ++step) _mm512_store_si512(row + 2 * step * SUMS, none);
    for (int64_t step = begin[r]; step < end[r]; ++step) {
      float* at = row + 2 * step * SUMS;
      __m512 first = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(at), by, own));
      __m512 second = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(at + SUMS), by, own));
      sums = _mm512_add_ps(_mm512_add_ps(sums, first), second);
      if constexpr (SCALED) {
        first = _mm512_mul_ps(first, _mm512_load_ps(by_value + step * TILE_K));
        second = _mm512_mul_ps(second, _mm512_load_ps(by_value + step * TILE_K + LANES));
      }
      _mm512_store_si512(at, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
    for (int64_t step = end[r]; step < to; ++step) _mm512_store_si512(row + 2 * step * SUMS, none);
    _mm512_store_ps(kept.lanes[r], sums);
  }
  return _mm512_cmp_ps_mask(factor, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) & static_cast<__mmask16>((1u << rows) - 1);
}

// Sums [H][v_tiles][16][16] += the weights of steps [from, to) times V's panel; the `first` replace what is there.
template <int H, typename M>
void add_values(M& tiles, const float* weights, const BFloat16* panel, int64_t v_tiles, int64_t from, int64_t to,
                bool first, float* sums) {
  for (int64_t d = 0; d < v_tiles; d += 2) {
    float *upper = sums + d * SUMS, *lower = upper + v_tiles * SUMS;
    if (first) {
      tiles.template zero<0>();
      tiles.template zero<1>();
      if constexpr (H == 2) {
        tiles.template zero<2>();
        tiles.template zero<3>();
      }
    } else {
      tiles.template load<0>(upper, WIDTH_BYTES);
      tiles.template load<1>(upper + SUMS, WIDTH_BYTES);
      if constexpr (H == 2) {
        tiles.template load<2>(lower, WIDTH_BYTES);
        tiles.template load<3>(lower + SUMS, WIDTH_BYTES);
      }
    }
    for (int64_t step = from; step < to; ++step) {
      tiles.template load<4>(weights + 2 * step * SUMS, WIDTH_BYTES);
      tiles.template load<6>(panel + (step * v_tiles + d) * TILE, WIDTH_BYTES);
      tiles.template dot<0, 4, 6>();
      tiles.template load<7>(panel + (step * v_tiles + d + 1) * TILE, WIDTH_BYTES);
      tiles.template dot<1, 4, 7>();
      if constexpr (H == 2) {
        tiles.template load<5>(weights + (KEY_TILES + 2 * step) * SUMS, WIDTH_BYTES);
        tiles.template dot<2, 5, 6>();
        tiles.template dot<3, 5, 7>();
      }
    }
    tiles.template store<0>(upper, WIDTH_BYTES);
    tiles.template store<1>(upper + SUMS, WIDTH_BYTES);
    if constexpr (H == 2) {
      tiles.template store<2>(lower, WIDTH_BYTES);
      tiles.template store<3>(lower + SUMS, WIDTH_BYTES);
    }
  }
}

// The same for up to 16 rows, with V as it lies in the pages: what is interleaved stays in the first cache. `panels`
// has room for two times V_TILES tiles; fetch() is called for each pair of tokens and V_TILES tiles.
template <typename M, typename T, typename F>
void add_values_of_few(M& tiles, const float* weights, const T* const* values, const Shape& shape, int64_t from,
                       int64_t to, bool first, BFloat16* panels, float* sums, const F& fetch) {
  static_assert(V_TILES == 4);
  for (int64_t d = 0; d < shape.v_tiles; d += V_TILES, sums += V_TILES * SUMS) {
    const bool four = d + V_TILES <= shape.v_tiles;
    const auto interleave = [&](int64_t step) {
      values_panel(values + step * TILE_K, d * LANES, std::min((d + V_TILES) * LANES, shape.v_dim),
                   panels + step % 2 * V_TILES * TILE, fetch);
    };
    if (first) {
      tiles.template zero<0>();
      tiles.template zero<1>();
      tiles.template zero<2>();
      tiles.template zero<3>();
    } else {
      tiles.template load<0>(sums, WIDTH_BYTES);
      tiles.template load<1>(sums + SUMS, WIDTH_BYTES);
      if (four) tiles.template load<2>(sums + 2 * SUMS, WIDTH_BYTES);
      if (four) tiles.template load<3>(sums + 3 * SUMS, WIDTH_BYTES);
    }
    interleave(from);
    for (int64_t step = from; step < to; ++step) {
      if (step + 1 < to) interleave(step + 1);
      const BFloat16* panel = panels + step % 2 * V_TILES * TILE;
      tiles.template load<4>(weights + 2 * step * SUMS, WIDTH_BYTES);
      tiles.template load<6>(panel, WIDTH_BYTES);
      tiles.template dot<0, 4, 6>();
      tiles.template load<7>(panel + TILE, WIDTH_BYTES);
      tiles.template dot<1, 4, 7>();
      if (!four) continue;
      tiles.template load<6>(panel + 2 * TILE, WIDTH_BYTES);
      tiles.template dot<2, 4, 6>();
      tiles.template load<7>(panel + 3 * TILE, WIDTH_BYTES);
      tiles.template dot<3, 4, 7>();
    }
    tiles.template store<0>(sums, WIDTH_BYTES);
    tiles.template store<1>(sums + SUMS, WIDTH_BYTES);
    if (four) tiles.template store<2>(sums + 2 * SUMS, WIDTH_BYTES);
    if (four) tiles.template store<3>(sums + 3 * SUMS, WIDTH_BYTES);
  }
}

// Row `r` of sums [v_tiles][16][16] through `total`, as bfloat16. What is below the least normal number is +0: a tile
// that zeros are added to flushes it, and how many are added depends on the task.
void put_mean(const float* sums, int64_t r, float total, int64_t v_dim, BFloat16* to) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const auto mean = [&](const float* from) {
    const __m512 quotient = _mm512_div_ps(_mm512_load_ps(from + r * LANES), _mm512_set1_ps(total));
    const __mmask16 normal =
        _mm512_cmp_ps_mask(_mm512_abs_ps(quotient), _mm512_set1_ps(std::numeric_limits<float>::min()), _CMP_NLT_UQ);
    return _mm512_maskz_mov_ps(normal, quotient);
  };
  for (int64_t at = 0; at < v_dim; at += TILE_K, sums += 2 * SUMS) {
    const __m512 even = mean(sums), odd = mean(sums + SUMS);
    const __m512i narrow = (__m512i)_mm512_cvtne2ps_pbh(_mm512_permutex2var_ps(even, high, odd),
                                                       _mm512_permutex2var_ps(even, low, odd));
    const int64_t count = std::min(TILE_K, v_dim - at);
    _mm512_mask_storeu_epi16(to + at, static_cast<__mmask32>((1ull << count) - 1), narrow);
  }
}

template <typename T>
void attend_tasks(Tensor& out, const Tensor& query, const Tensor& k_pages, const Tensor& v_pages, const Tensor& starts,
                  const Tensor& lengths, const Tensor& blocks, Reach reach, const Softmax& softmax, const float* sinks,
                  const std::optional<Tensor>& k_scales, const std::optional<Tensor>& v_scales) {
  const int64_t kv_heads = k_pages.size(2), groups = query.size(1) / kv_heads, size = k_pages.size(1);
  const int64_t k_dim = k_pages.size(3), v_dim = v_pages.size(3);
  const Shape shape{groups, k_dim, v_dim, steps_of(k_dim), 2 * steps_of(v_dim)};
  const int64_t threads = at::get_num_threads(), each = query.size(0) * query.size(1) / (threads * TURNS);
  const int64_t wanted = threads == 1 ? MOST_ROWS : std::clamp(each, LEAST_ROWS, MOST_ROWS);
  const int64_t height = std::max<int64_t>(1, wanted / groups);
  const std::vector<Task> tasks = tasks_of(starts, lengths, [&](int64_t) { return height; });
  int64_t most = 0;
  for (const Task& task : tasks) most = std::max(most, task.queries * groups);
  const int64_t high = rounded_up(high_of(most), 2);

  const int64_t count = static_cast<int64_t>(tasks.size()) * kv_heads;
  // Several at a time: of the next one the first keys are fetched.
  share_out(count, std::max<int64_t>(1, count / (threads * TURNS)), [&](int64_t begin, int64_t end) {
    auto* q = own_memory<16, BFloat16>((high + 1) * shape.k_steps * TILE);  // of few rows, turned behind as they lie
    auto* key_panel = own_memory<17, BFloat16>(KEY_TILES * shape.k_steps * TILE);
    auto* value_panel = own_memory<18, BFloat16>(STEPS * shape.v_tiles * TILE);
    auto* logits = own_memory<19, float>(2 * KEY_TILES * SUMS);
    auto* sums = own_memory<21, float>(high * shape.v_tiles * SUMS);
    auto* kept = own_memory<22, Kept>(high);
    auto* bounds = own_memory<23, int64_t>(2 * high * TILE_ROWS);
    auto* stretches = own_memory<24, Stretch<T>>(2);
    alignas(LINE) float by_key[KEYS], by_value[KEYS], factors[TILE_ROWS];

    const auto place = [&](const Tensor& pages, int64_t n) {
      return Place<T>{pages.const_data_ptr<T>() + n % kv_heads * pages.stride(2),
                      blocks.const_data_ptr<int32_t>() + tasks[n / kv_heads].sequence * blocks.size(1), size,
                      pages.stride(0), pages.stride(1)};
    };
    const auto first_of = [&](int64_t n) { return reach.first(tasks[n / kv_heads].position); };
    const auto last_of = [&](int64_t n) { return tasks[n / kv_heads].position + tasks[n / kv_heads].queries; };
    const auto locate = [&](int64_t n, int64_t start, Stretch<T>& into) {
      into.task = n, into.start = start;
      into.from = std::max<int64_t>(0, first_of(n) - start) / TILE_K;
      into.to = (std::min(KEYS, last_of(n) - start) + TILE_K - 1) / TILE_K;
      place(k_pages, n).locate(start, KEYS, first_of(n), last_of(n), into.keys);
      place(v_pages, n).locate(start, KEYS, first_of(n), last_of(n), into.values);
    };
    const auto work = [&](auto& tiles, const Stretch<T>& here, const Stretch<T>* soon) {
      const Task& task = tasks[here.task / kv_heads];
      const int64_t head = here.task % kv_heads, rows = task.queries * groups, start = here.start;
      const int64_t first = first_of(here.task), last = last_of(here.task);
      const bool few = rows <= TILE_ROWS;
      auto* turned_q = q + shape.k_steps * TILE;
      if (start <= first) {
        for (int64_t r = 0; r < rounded_up(rows, TILE_ROWS); r += TILE_ROWS) {
          const BFloat16* from[TILE_ROWS] = {};
          for (int64_t i = 0; i < std::min(TILE_ROWS, rows - r); ++i)
            from[i] = query.const_data_ptr<BFloat16>() + (task.row + (r + i) / groups) * query.stride(0) +
                      (head * groups + (r + i) % groups) * query.stride(1);
          tiles_from(from, k_dim, q + r * shape.k_steps * TILE_K);
        }
        if (few)
          for (int64_t k = 0; k < shape.k_steps; ++k) turn(q + k * TILE, turned_q + k * TILE);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t position = task.position + r / groups;
          bounds[2 * (r - r % TILE_ROWS) + r % TILE_ROWS] = reach.first(position);
          bounds[2 * (r - r % TILE_ROWS) + TILE_ROWS + r % TILE_ROWS] = position + 1;
          Kept& own = kept[r / TILE_ROWS];
          own.top[r % TILE_ROWS] = sinks == nullptr ? LOWEST : sinks[head * groups + r % groups] * LOG2_E;
          std::fill(own.lanes[r % TILE_ROWS], own.lanes[r % TILE_ROWS] + LANES, 0.0f);
        }
      }
      if constexpr (QUANTISED<T>) {
        const auto read = [&](const Tensor& scales, float* to) {
          const auto* bits = reinterpret_cast<const uint16_t*>(scales.const_data_ptr<BFloat16>());
          const int64_t low = std::max(start, first);
          std::fill(to, to + KEYS, 0.0f);
          scales_into(bits + head * scales.stride(2), scales.stride(0), place(k_pages, here.task).table, size, low,
                      std::min(start + KEYS, last), to + low - start);
        };
        read(*k_scales, by_key);
        read(*v_scales, by_value);
      }
      if (!few)
        for (int64_t t = 2 * here.from; t < 2 * here.to; ++t)
          keys_panel(here.keys + t * LANES, k_dim, key_panel + t * shape.k_steps * TILE);
      if (!few)
        for (int64_t step = here.from; step < here.to; ++step)
          values_panel(here.values + step * TILE_K, 0, v_dim, value_panel + step * shape.v_tiles * TILE, [] {});

      Ahead<T> ahead(shape, here, soon);
      const int64_t tiles_high = high_of(rows), units = (tiles_high + 1) / 2;
      for (int64_t unit = 0; unit < units; ++unit) {
        const int64_t tile = 2 * unit, row = tile * TILE_ROWS, both = std::min<int64_t>(2, tiles_high - tile);
        const int64_t until = std::min(rows, row + both * TILE_ROWS);
        const int64_t lowest = reach.first(task.position + row / groups) - start;
        const int64_t past = task.position + (until - 1) / groups + 1 - start;
        const int64_t from = std::max<int64_t>(0, lowest) / TILE_K, to = (std::min(KEYS, past) + TILE_K - 1) / TILE_K;
        if (!few && soon != nullptr)
          for (int64_t t = KEYS * unit / units; t < KEYS * (unit + 1) / units; ++t) {
            if (soon->keys[t] != nullptr) prefetch(soon->keys[t], k_dim);
            if (soon->values[t] != nullptr) prefetch(soon->values[t], v_dim);
          }
        if (lowest >= KEYS || past <= 0) continue;
        const BFloat16* own_q = q + tile * shape.k_steps * TILE;
        if (few) {
          const int64_t each = (TILE_ROWS + shape.k_steps) / (shape.k_steps + 1);
          for (int64_t step = from; step < to; step += 2) {
            const int64_t steps = std::min<int64_t>(2, to - step), at = (start + step * TILE_K) % size;
            const bool whole = k_dim % TILE_K == 0 && (size % TILE_ROWS == 0 || at + steps * TILE_K <= size);
            logits_of_few(tiles, rows, turned_q, here.keys + step * TILE_K, steps, k_pages.stride(1), whole, shape,
                          key_panel, logits + 2 * step * SUMS, [&] { ahead.fetch(each); });
          }
        } else if (both == 2) {
          logits_of<2>(tiles, own_q, key_panel, shape.k_steps, from, to, logits);
        } else {
          logits_of<1>(tiles, own_q, key_panel, shape.k_steps, from, to, logits);
        }
        float* own_sums = sums + tile * shape.v_tiles * SUMS;
        for (int64_t half = 0; half < both; ++half) {
          int64_t seen[TILE_ROWS], ends[TILE_ROWS];
          const int64_t here_rows = std::min(TILE_ROWS, rows - row - half * TILE_ROWS);
          const int64_t* own = bounds + 2 * (row + half * TILE_ROWS);
          for (int64_t r = 0; r < here_rows; ++r) seen[r] = own[r] - start, ends[r] = own[TILE_ROWS + r] - start;
          const __mmask16 changed = weigh<QUANTISED<T>>(here_rows, seen, ends, from, to, softmax, by_key, by_value,
                                                        logits + half * KEY_TILES * SUMS, kept[tile + half], factors);
          if (lowest < 0)
            for (int64_t r = 0; r < here_rows; ++r)
              if (changed >> r & 1)
                for (int64_t d = 0; d < shape.v_tiles; ++d) {
                  float* at = own_sums + ((half * shape.v_tiles + d) * TILE_ROWS + r) * LANES;
                  _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(factors[r])));
                }
        }
        if (few) {
          add_values_of_few(tiles, logits, here.values, shape, from, to, lowest >= 0, value_panel, own_sums,
                            [&] { ahead.fetch(2); });
          continue;
        }
        if (both == 2)
          add_values<2>(tiles, logits, value_panel, shape.v_tiles, from, to, lowest >= 0, own_sums);
        else
          add_values<1>(tiles, logits, value_panel, shape.v_tiles, from, to, lowest >= 0, own_sums);
      }
      if (start + KEYS < last) return;
      for (int64_t r = 0; r < rows; ++r) {
        const Kept& own = kept[r / TILE_ROWS];
        float total = 0.0f;
        if (sinks != nullptr) total = std::exp2(sinks[head * groups + r % groups] * LOG2_E - own.top[r % TILE_ROWS]);
        for (const float lane : own.lanes[r % TILE_ROWS]) total += lane;
        put_mean(sums + r / TILE_ROWS * shape.v_tiles * SUMS, r % TILE_ROWS, total, v_dim,
                 out.data_ptr<BFloat16>() + (task.row + r / groups) * out.stride(0) +
                     (head * groups + r % groups) * out.stride(1));
      }
    };
    with_tiles([&](auto& tiles) {
      Stretch<T>*here = stretches, *soon = stretches + 1;
      locate(begin, first_of(begin) / KEYS * KEYS, *here);
      for (bool more = true; more; std::swap(here, soon)) {
        if (here->start + KEYS < last_of(here->task))
          locate(here->task, here->start + KEYS, *soon);
        else if (here->task + 1 < end)
          locate(here->task + 1, first_of(here->task + 1) / KEYS * KEYS, *soon);
        else
          more = false;
        work(tiles, *here, more ? soon : nullptr);
      }
    });
  });
}

}  // namespace

void attend_by_tiles(Tensor& out, const Tensor& query, const Tensor& k_pages, const Tensor& v_pages,
                     const Tensor& starts, const Tensor& lengths, const Tensor& blocks, Reach reach, double scaling,
                     std::optional<double> softcap, const float* sinks, const std::optional<Tensor>& k_scales,
                     const std::optional<Tensor>& v_scales) {
  Softmax softmax{static_cast<float>(scaling * M_LOG2E), std::nullopt};
  if (softcap.has_value())
    softmax = {static_cast<float>(*softcap * M_LOG2E), static_cast<float>(scaling / *softcap)};
  const auto over = [&](auto element) {
    attend_tasks<decltype(element)>(out, query, k_pages, v_pages, starts, lengths, blocks, reach, softmax, sinks,
                                    k_scales, v_scales);
  };
  if (k_pages.scalar_type() == at::kChar) return over(int8_t());
  if (k_pages.scalar_type() == at::kFloat8_e4m3fn) return over(Fp8());
  over(BFloat16());
}

}  // namespace tandem

#endif
