// Shared by both forms of attention by tiles, many rows and few rows. Sums go in the order tile32.
//
// A unit is some queries of one sequence with one KV head. Each pair of a query and a query head is a row; 16 rows are
// a tile. The unit reads the context once, in stretches of KEYS tokens, with online softmax: each row keeps its largest
// logit so far, the sum of its weights and the weighted sum of V, and scales both sums down when a larger logit comes
// (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018). Stretches of KEYS and steps of TILE_K
// tokens begin at multiples of these from the sequence's first token, and a token that a row does not see has weight
// zero. So a row has the same bits in any unit: tokens that only other rows see add zeros.
#pragma once

#include "attention.h"
#include "tile_panels.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#ifdef TANDEM_TILES

namespace tandem {

using at::BFloat16;

constexpr int64_t KEYS = 256;                // tokens per update of the largest logit: part of the order
constexpr int64_t STEPS = KEYS / TILE_K;
constexpr int64_t KEY_TILES = KEYS / LANES;
constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr float LOWEST = -3e38f;             // initial largest logit: finite, as -inf minus -inf is NaN
constexpr float LOG2_E = 1.44269504f;

// 2 to the power of x, to a relative 2e-7; zero below the least normal number, exactly 1 for x = 0.
inline __m512 power_of_two(__m512 x) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), power_of_rest(x), x);
}

struct Shape {
  int64_t kv_heads, groups, k_dim, v_dim;
  int64_t k_steps, v_tiles;  // steps of TILE_K elements of K; tiles of 16 elements of V, an even number
};

struct Softmax {
  float by;                   // factor of the logits; then they are exponents of two
  std::optional<float> soft;  // with softcap: factor of the logits before tanh, which comes first
};

// Locates the elements of a head in a row.
template <typename T>
struct Heads {
  T* data;
  int64_t row, head;  // strides
  T* at(int64_t r, int64_t h) const { return data + r * row + h * head; }
};

// Softmax state of 16 rows between stretches.
struct alignas(LINE) Kept {
  float top[TILE_ROWS];            // the largest logit, as an exponent of two
  float lanes[TILE_ROWS][LANES];   // sums of the weights by position modulo 16
};

// Elements [at, at + 32) of a row [dim] as bfloat16; zeros past its end, or if the row is null.
template <typename T>
__m512i words_at(const T* row, int64_t at, int64_t dim) {
  return at + TILE_K <= dim ? words_of<BFloat16>(row, at, TILE_K) : words_of<BFloat16>(row, at, dim - at);
}

// Packs 16 rows [k_dim] into tiles [k_steps][16][32]; zeros where a row is null.
template <typename T>
void tiles_from(const T* const* rows, int64_t k_dim, BFloat16* to) {
  for (int64_t r = 0; r < TILE_ROWS; ++r)
    for (int64_t at = 0; at < k_dim; at += TILE_K)
      _mm512_store_si512(to + at * TILE_ROWS + r * TILE_K, words_at(rows[r], at, k_dim));
}

// Interleaves 32 elements of V of two tokens into one row each of two tiles of B. The first tile has the even groups of
// four elements and the second the odd ones, because unpacklo and unpackhi work within 128-bit lanes.
inline void interleave_pair(__m512i a, __m512i b, BFloat16* to) {
  _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
  _mm512_store_si512(to + TILE, _mm512_unpackhi_epi16(a, b));
}

// Converts logits [KEY_TILES][16][16] of up to 16 rows, of which row r sees the tokens [seen[r], past[r]) of the
// stretch, in place into weights of steps [from, to): tiles of A [16][32], each over the first of its step's two logit
// tiles. Returns a mask of the rows whose sums need scaling by `factors`. For quantised tokens, `by_key` holds the
// scales of K, not yet applied to the logits, and `by_value` those of V, applied to the weights but not to their sum.
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

// Writes row `r` of sums [v_tiles][16][16] divided by `total`, as bfloat16. Results below the least normal number
// become +0: adding zeros in a tile flushes such sums, and how often that happens depends on the task.
inline void put_mean(const float* sums, int64_t r, float total, int64_t v_dim, BFloat16* to) {
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

// Scales of K or V: those of the first head, and strides.
struct Scales {
  const uint16_t* bits;
  int64_t block, head;
};

// Multiplies the `changed` rows of sums [v_tiles][16][16] by their factors.
inline void scale(float* sums, int64_t v_tiles, __mmask16 changed, const float* factors) {
  for (unsigned left = changed; left != 0; left &= left - 1) {
    const int64_t r = __builtin_ctz(left);
    for (int64_t d = 0; d < v_tiles; ++d) {
      float* at = sums + d * SUMS + r * LANES;
      _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(factors[r])));
    }
  }
}

// A task with one KV head. Row r is query r / groups of the task.
struct Unit {
  Task task;
  int64_t head, rows;
};

// A call of the operator `attend`.
template <typename T>
struct Call {
  Shape shape;
  Softmax softmax;
  Reach reach;
  const float* sinks;  // null for none
  Heads<const BFloat16> query;
  Heads<BFloat16> out;
  Place<T> keys, values;  // of the first sequence and head
  int64_t key_head, value_head, table;  // strides of KV heads, and of sequences in the block table
  Scales key_scales = {}, value_scales = {};  // if quantised
  std::vector<Task> tasks = {};

  int64_t count() const { return static_cast<int64_t>(tasks.size()) * shape.kv_heads; }
  Unit unit(int64_t n) const {
    const Task& task = tasks[n / shape.kv_heads];
    return {task, n % shape.kv_heads, task.queries * shape.groups};
  }

  // Tokens [first, last) are seen by some query.
  int64_t first(const Unit& unit) const { return reach.first(unit.task.position); }
  int64_t last(const Unit& unit) const { return unit.task.position + unit.task.queries; }
  int64_t position(const Unit& unit, int64_t r) const { return unit.task.position + r / shape.groups; }

  Place<T> keys_of(const Unit& unit) const { return place(keys, key_head, unit); }
  Place<T> values_of(const Unit& unit) const { return place(values, value_head, unit); }
  Place<T> place(const Place<T>& of, int64_t by_head, const Unit& unit) const {
    return {of.base + unit.head * by_head, of.table + unit.task.sequence * table, of.size, of.block, of.token};
  }

  const BFloat16* query_of(const Unit& unit, int64_t r) const {
    return query.at(unit.task.row + r / shape.groups, query_head_of(unit, r));
  }
  int64_t query_head_of(const Unit& unit, int64_t r) const { return unit.head * shape.groups + r % shape.groups; }

  // Initialises row `r` before the unit's first stretch.
  void begin(const Unit& unit, int64_t r, Kept& into) const {
    into.top[r % TILE_ROWS] = sinks == nullptr ? LOWEST : sinks[query_head_of(unit, r)] * LOG2_E;
    _mm512_store_ps(into.lanes[r % TILE_ROWS], _mm512_setzero_ps());
  }

  // After the last stretch: writes the result of row `r` from its tile of sums.
  void finish(const Unit& unit, int64_t r, const Kept& kept, const float* sums) const {
    float total = 0.0f;
    if (sinks != nullptr) total = std::exp2(sinks[query_head_of(unit, r)] * LOG2_E - kept.top[r % TILE_ROWS]);
    for (const float lane : kept.lanes[r % TILE_ROWS]) total += lane;
    put_mean(sums, r % TILE_ROWS, total, shape.v_dim,
             out.at(unit.task.row + r / shape.groups, query_head_of(unit, r)));
  }

  // Reads the scales of the tokens of a stretch that some query sees; zeros for the others.
  void scales_of(const Scales& scales, const Unit& unit, int64_t start, float* to) const {
    const int64_t low = std::max(start, first(unit)), high = std::min(start + KEYS, last(unit));
    std::fill(to, to + KEYS, 0.0f);
    scales_into(scales.bits + unit.head * scales.head, scales.block, keys_of(unit).table, keys.size, low, high,
                to + low - start);
  }
};

}  // namespace tandem

#endif
