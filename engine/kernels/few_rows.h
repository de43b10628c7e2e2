// Attention by tiles for few rows: units of at most one tile of rows, such as single queries.
//
// They are bound by memory. So K is not packed: its tokens are the rows of A, read in place if they are bfloat16 in
// whole steps and else converted, and the queries are B. V is interleaved by pairs of tokens into panels that stay in
// L1. Work on K of a stretch prefetches its V, and work on V the next K: tens of KiB ahead, enough to keep memory busy
// while tiles are computed. Data stored for or by a tile is loaded a step later, to hide the store's latency.
#pragma once

#include "tile_attention.h"

#ifdef TANDEM_TILES

namespace tandem {

constexpr int64_t V_TILES = 4;   // of V in a panel
constexpr int64_t PER_TILE = 4;  // prefetch calls per tile of K

// Transposes columns [r, r + 4) of a tile of sums into rows.
inline void turn_four(const float (*from)[LANES], int64_t r, float* to) {
  __m512 fours[4];  // of tokens i, 4 + i, 8 + i and 12 + i
  for (int i = 0; i < 4; ++i) {
    const auto four = [&](int64_t token) { return _mm_loadu_ps(from[token] + r); };
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

// Groups of 16 tokens of K or V: the row of each group's first token, and the stride of rows.
template <typename T>
struct Sixteens {
  const T* rows[KEY_TILES];
  int64_t apart;
};

// Prefetches K or V during other work, a few lines at a time: a core stalls when too many cache misses are outstanding.
// The lines of four groups of 16 tokens alternate: pages read in parallel arrive faster than one after another.
template <typename T>
class KvPrefetcher {
 public:
  // The next `calls` calls of advance() prefetch the tokens [16 from, 16 to) of `side`.
  void begin(const Sixteens<T>& side, int64_t from, int64_t to, int64_t dim, int64_t calls) {
    rows_ = side.rows + from, left_ = to - from, bytes_ = TILE_ROWS * dim * sizeof(T), at_ = 0;
    if (side.apart != dim) left_ = 0;  // never in the engine's KV layout
    const int64_t turns = (left_ + ABREAST - 1) / ABREAST * ((bytes_ + LINE - 1) / LINE);
    turns_per_call_ = (turns + calls - 1) / calls;
    if (left_ > 0) open();
  }

  void stop() { left_ = 0; }

  [[gnu::always_inline]] void advance() {
    for (int64_t n = turns_per_call_; n > 0 && left_ > 0; --n) {
      for (const char* group : groups_) prefetch(group + at_, 1);
      at_ += LINE;
      if (at_ < bytes_) continue;
      rows_ += ABREAST, left_ -= ABREAST, at_ = 0;
      if (left_ > 0) open();
    }
  }

 private:
  static constexpr int64_t ABREAST = 4;  // groups whose lines alternate

  void open() {
    for (int64_t i = 0; i < ABREAST; ++i) groups_[i] = reinterpret_cast<const char*>(rows_[std::min(i, left_ - 1)]);
  }

  const T* const* rows_ = nullptr;  // the groups that are left
  int64_t left_ = 0, bytes_ = 0, at_ = 0, turns_per_call_ = 0;
  const char* groups_[ABREAST];  // the ones being prefetched; at the end the last one, repeated
};

// Attention of units of few rows, one after another, by one thread.
template <typename T>
class FewRows {
 public:
  explicit FewRows(const Call<T>& call)
      : call_(call),
        shape_(call.shape),
        q_(own_memory<24, BFloat16>(shape_.k_steps * TILE)),
        key_copies_(own_memory<25, BFloat16>(4 * shape_.k_steps * TILE)),
        panels_(own_memory<26, BFloat16>(2 * V_TILES * TILE)),
        logits_(own_memory<27, float>(KEY_TILES * SUMS)),
        sums_(own_memory<28, float>(rounded_up(shape_.v_tiles, V_TILES) * SUMS)) {
    if (keys_fit()) return;
    const int64_t tokens = KEYS * (shape_.k_dim + shape_.v_dim);
    auto* copies = own_memory<29, T>(2 * tokens);
    here_->copies = copies, soon_->copies = copies + tokens;
  }

  // Computes unit n and prefetches the first K of unit `next`, also of few rows, unless that is negative.
  template <typename M>
  void attend(M& tiles, int64_t n, int64_t next) {
    const Unit unit = call_.unit(n);
    const int64_t first = call_.first(unit) / KEYS * KEYS;
    if (here_->unit != n || here_->start != first) locate(n, unit, first, *here_);
    put_queries(n, unit);
    for (int64_t r = 0; r < unit.rows; ++r) call_.begin(unit, r, kept_);
    for (bool more = true; more; std::swap(here_, soon_)) {
      more = here_->start + KEYS < call_.last(unit);
      if (more)
        locate(n, unit, here_->start + KEYS, *soon_);
      else if (next >= 0)
        locate(next, call_.unit(next), call_.first(call_.unit(next)) / KEYS * KEYS, *soon_);
      else
        soon_->unit = -1, soon_->from = soon_->to = 0;
      add_stretch(tiles, unit, here_->start == first);
    }
    for (int64_t r = 0; r < unit.rows; ++r) call_.finish(unit, r, kept_, sums_);
  }

 private:
  // KEYS tokens from `start` on; some query sees those in [low, high), which are in steps [from, to).
  struct Stretch {
    int64_t unit = -1, start = 0, low = 0, high = 0, from = 0, to = 0;
    Sixteens<T> keys, values;
    T* copies = nullptr;  // of the tokens, if the block size is not a multiple of 16
  };

  bool keys_fit() const { return call_.keys.size % TILE_ROWS == 0; }

  void locate(int64_t n, const Unit& unit, int64_t start, Stretch& into) const {
    const Place<T> keys = call_.keys_of(unit), values = call_.values_of(unit);
    into.unit = n, into.start = start;
    into.low = std::max<int64_t>(0, call_.first(unit) - start), into.high = std::min(KEYS, call_.last(unit) - start);
    into.from = into.low / TILE_K, into.to = steps_of(into.high);
    if (!keys_fit()) {
      copy(keys, shape_.k_dim, into, into.copies, into.keys);
      copy(values, shape_.v_dim, into, into.copies + KEYS * shape_.k_dim, into.values);
      return;
    }
    into.keys.apart = keys.token, into.values.apart = values.token;
    const int64_t from = into.low / TILE_ROWS, to = high_of(into.high);
    int64_t block = (start + from * TILE_ROWS) / keys.size, in = (start + from * TILE_ROWS) % keys.size;
    for (int64_t i = from; i < to; ++i) {
      into.keys.rows[i] = keys.base + keys.table[block] * keys.block + in * keys.token;
      into.values.rows[i] = values.base + keys.table[block] * values.block + in * values.token;
      in += TILE_ROWS;
      if (in == keys.size) in = 0, ++block;
    }
    // Steps are whole: a half that no query sees points to the other half.
    for (auto* side : {&into.keys, &into.values}) {
      if (from % 2 == 1) side->rows[from - 1] = side->rows[from];
      if (to % 2 == 1) side->rows[to] = side->rows[to - 1];
    }
  }

  static void copy(const Place<T>& place, int64_t dim, const Stretch& of, T* to, Sixteens<T>& into) {
    const T* rows[KEYS];
    place.locate(of.start, KEYS, of.start + of.low, of.start + of.high, rows);
    for (int64_t t = of.low; t < of.high; ++t) std::copy(rows[t], rows[t] + dim, to + t * dim);
    for (int64_t i = 0; i < KEY_TILES; ++i) into.rows[i] = to + i * TILE_ROWS * dim;
    into.apart = dim;
  }

  // Packs the queries of unit n as columns of B, and those of the task's next KV heads while they fit: all columns are
  // computed anyway, and each unit reads its own.
  void put_queries(int64_t n, const Unit& unit) {
    if (n < put_from_ || n >= put_to_) {
      put_from_ = n, put_to_ = n + std::min(TILE_ROWS / unit.rows, shape_.kv_heads - unit.head);
      const BFloat16* rows[TILE_ROWS] = {};
      for (int64_t other = n; other < put_to_; ++other)
        for (int64_t r = 0; r < unit.rows; ++r)
          rows[(other - n) * unit.rows + r] = call_.query_of(call_.unit(other), r);
      for (int64_t k = 0; k < shape_.k_steps; ++k) {
        __m512i words[LANES];
        for (int64_t r = 0; r < LANES; ++r) words[r] = words_at(rows[r], k * TILE_K, shape_.k_dim);
        transpose(words);
        for (int64_t r = 0; r < LANES; ++r) _mm512_store_si512(q_ + k * TILE + r * TILE_K, words[r]);
      }
    }
    column_ = (n - put_from_) * unit.rows;
  }

  // The next `calls` calls of advance() prefetch the groups of 16 tokens of a stretch that some query sees.
  void begin_prefetch(const Stretch& stretch, const Sixteens<T>& side, int64_t dim, int64_t calls) {
    prefetcher_.begin(side, stretch.low / TILE_ROWS, high_of(stretch.high), dim, calls);
  }

  template <typename M>
  void add_stretch(M& tiles, const Unit& unit, bool first) {
    const int64_t start = here_->start, rows = unit.rows;
    alignas(LINE) float by_key[KEYS], by_value[KEYS], factors[TILE_ROWS];
    if constexpr (QUANTISED<T>) {
      call_.scales_of(call_.key_scales, unit, start, by_key);
      call_.scales_of(call_.value_scales, unit, start, by_value);
    }
    put_logits(tiles, rows);
    int64_t seen[TILE_ROWS], past[TILE_ROWS];
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = call_.position(unit, r);
      seen[r] = call_.reach.first(position) - start, past[r] = position + 1 - start;
    }
    const __mmask16 changed = weigh<QUANTISED<T>>(rows, seen, past, here_->from, here_->to, call_.softmax, by_key,
                                                  by_value, logits_, kept_, factors);
    if (!first) scale(sums_, shape_.v_tiles, changed, factors);
    prefetcher_.stop();
    if (soon_->unit >= 0)
      begin_prefetch(*soon_, soon_->keys, shape_.k_dim,
            rounded_up(shape_.v_tiles, V_TILES) / V_TILES * (here_->to - here_->from) * TILE_ROWS);
    for (int64_t d = 0; d < shape_.v_tiles; d += V_TILES)
      if (d + V_TILES <= shape_.v_tiles)
        add_values<V_TILES>(tiles, d, first);
      else
        add_values<V_TILES / 2>(tiles, d, first);
  }

  // Logits [KEY_TILES][16 rows][16 tokens] of the steps.
  template <typename M>
  void put_logits(M& tiles, int64_t rows) {
    alignas(LINE) float sums[5][TILE_ROWS][LANES];  // of two steps; turn_four reads past the last column
    const auto turned = [&](int64_t step) {
      for (int64_t i = 2 * step; i < 2 * step + 2; ++i)
        for (int64_t r = 0; r < rows; r += 4) turn_four(sums[i % 4], column_ + r, logits_ + i * SUMS + r * LANES);
    };
    if (!as_they_lie()) widen(here_->from);
    begin_prefetch(*here_, here_->values, shape_.v_dim, 2 * PER_TILE * shape_.k_steps * (here_->to - here_->from));
    for (int64_t step = here_->from; step < here_->to; ++step) {
      if (!as_they_lie() && step + 1 < here_->to) widen(step + 1);
      dot_keys(tiles, step, sums[2 * step % 4][0]);
      if (step > here_->from) turned(step - 1);
    }
    turned(here_->to - 1);
  }

  bool as_they_lie() const { return !QUANTISED<T> && shape_.k_dim % TILE_K == 0; }

  BFloat16* key_copies(int64_t i) { return key_copies_ + i % 4 * shape_.k_steps * TILE; }

  // Converts K of a step to bfloat16, padded to whole steps of elements.
  void widen(int64_t step) {
    for (int64_t i = 2 * step; i < 2 * step + 2; ++i) {
      const T* row = here_->keys.rows[i];
      for (int64_t r = 0; r < TILE_ROWS; ++r, row += here_->keys.apart)
        for (int64_t at = 0; at < shape_.k_dim; at += TILE_K)
          _mm512_store_si512(key_copies(i) + at * TILE_ROWS + r * TILE_K, words_at(row, at, shape_.k_dim));
    }
  }

  // Dot products of a step's two tiles of tokens with all columns of queries.
  template <typename M>
  void dot_keys(M& tiles, int64_t step, float* sums) {
    const auto *left = reinterpret_cast<const char*>(here_->keys.rows[2 * step]),
               *right = reinterpret_cast<const char*>(here_->keys.rows[2 * step + 1]);
    int64_t row = here_->keys.apart * sizeof(T), next = WIDTH_BYTES;
    if (!as_they_lie()) {
      left = reinterpret_cast<const char*>(key_copies(2 * step));
      right = reinterpret_cast<const char*>(key_copies(2 * step + 1));
      row = WIDTH_BYTES, next = TILE * sizeof(BFloat16);
    }
    tiles.template zero<0>();
    tiles.template zero<1>();
    for (int64_t k = 0; k < shape_.k_steps; ++k, left += next, right += next) {
      tiles.template load<6>(q_ + k * TILE, WIDTH_BYTES);
      tiles.template load<4>(left, row);
      for (int64_t i = 0; i < PER_TILE; ++i) prefetcher_.advance();
      tiles.template dot<0, 4, 6>();
      tiles.template load<5>(right, row);
      for (int64_t i = 0; i < PER_TILE; ++i) prefetcher_.advance();
      tiles.template dot<1, 5, 6>();
    }
    tiles.template store<0>(sums, WIDTH_BYTES);
    tiles.template store<1>(sums + SUMS, WIDTH_BYTES);
  }

  // Sums of COUNT tiles from tile `d` on += weights times V; `first` overwrites the sums.
  template <int COUNT, typename M>
  void add_values(M& tiles, int64_t d, bool first) {
    static_assert(COUNT == 2 || COUNT == 4);
    float* sums = sums_ + d * SUMS;
    if (first) {
      tiles.template zero<0>();
      tiles.template zero<1>();
      if constexpr (COUNT == 4) tiles.template zero<2>();
      if constexpr (COUNT == 4) tiles.template zero<3>();
    } else {
      tiles.template load<0>(sums, WIDTH_BYTES);
      tiles.template load<1>(sums + SUMS, WIDTH_BYTES);
      if constexpr (COUNT == 4) tiles.template load<2>(sums + 2 * SUMS, WIDTH_BYTES);
      if constexpr (COUNT == 4) tiles.template load<3>(sums + 3 * SUMS, WIDTH_BYTES);
    }
    interleave<COUNT>(here_->from, d);
    for (int64_t step = here_->from; step < here_->to; ++step) {
      if (step + 1 < here_->to) interleave<COUNT>(step + 1, d);
      const BFloat16* panel = panel_of(step);
      tiles.template load<4>(logits_ + 2 * step * SUMS, WIDTH_BYTES);
      tiles.template load<6>(panel, WIDTH_BYTES);
      tiles.template dot<0, 4, 6>();
      tiles.template load<7>(panel + TILE, WIDTH_BYTES);
      tiles.template dot<1, 4, 7>();
      if constexpr (COUNT == 4) {
        tiles.template load<6>(panel + 2 * TILE, WIDTH_BYTES);
        tiles.template dot<2, 4, 6>();
        tiles.template load<7>(panel + 3 * TILE, WIDTH_BYTES);
        tiles.template dot<3, 4, 7>();
      }
    }
    tiles.template store<0>(sums, WIDTH_BYTES);
    tiles.template store<1>(sums + SUMS, WIDTH_BYTES);
    if constexpr (COUNT == 4) tiles.template store<2>(sums + 2 * SUMS, WIDTH_BYTES);
    if constexpr (COUNT == 4) tiles.template store<3>(sums + 3 * SUMS, WIDTH_BYTES);
  }

  BFloat16* panel_of(int64_t step) { return panels_ + step % 2 * V_TILES * TILE; }

  // Interleaves V of a step, COUNT tiles of 16 elements from `d` on, into the step's panel.
  template <int COUNT>
  void interleave(int64_t step, int64_t d) {
    const bool all = here_->low <= step * TILE_K && (step + 1) * TILE_K <= here_->high;
    if (all && (d + COUNT) * LANES <= shape_.v_dim)
      interleave<COUNT, true>(step, d);
    else
      interleave<COUNT, false>(step, d);
  }

  // WHOLE: all tokens of the step are in [low, high), and all elements in v_dim.
  template <int COUNT, bool WHOLE>
  void interleave(int64_t step, int64_t d) {
    const int64_t apart = here_->values.apart, low = here_->low, high = here_->high, dim = shape_.v_dim;
    BFloat16* into = panel_of(step);
    for (int64_t i = 2 * step; i < 2 * step + 2; ++i) {
      const T* row = here_->values.rows[i];
      for (int64_t r = 0; r < TILE_ROWS; r += 2, row += 2 * apart, into += TILE_K) {
        prefetcher_.advance();
        for (int64_t t = 0; t < COUNT; t += 2) {
          const int64_t at = (d + t) * LANES, token = i * TILE_ROWS + r;
          const auto words = [&](int64_t token, const T* row) {
            if constexpr (WHOLE) return words_of<BFloat16>(row, at, TILE_K);
            return words_at(token >= low && token < high ? row : nullptr, at, dim);
          };
          interleave_pair(words(token, row), words(token + 1, row + apart), into + t * TILE);
        }
      }
    }
  }

  const Call<T>& call_;
  const Shape& shape_;
  BFloat16* q_;           // [k_steps][16 pairs][16 rows][2]
  BFloat16* key_copies_;  // of two steps
  BFloat16* panels_;      // of two steps
  float *logits_, *sums_;
  Kept kept_;
  KvPrefetcher<T> prefetcher_;
  Stretch stretches_[2], *here_ = stretches_, *soon_ = stretches_ + 1;
  int64_t put_from_ = 0, put_to_ = 0, column_ = 0;  // units whose queries are in q_; this unit's first column
};

}  // namespace tandem

#endif
