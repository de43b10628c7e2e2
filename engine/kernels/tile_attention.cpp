// Attention over pages by tiles: units of many rows, and splitting a call into units. Few rows: few_rows.h.
#include "ops.h"

#include "few_rows.h"
#include "tile_attention.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#ifdef TANDEM_TILES

namespace tandem {
namespace {

using at::Tensor;

constexpr int64_t LEAST_ROWS = 96, MOST_ROWS = 768;  // of a task of several queries: they share the packed K and V

// Packs K of 16 tokens into tiles of B [k_steps][16 pairs][16 tokens][2].
template <typename T>
void keys_panel(const T* const* rows, int64_t k_dim, BFloat16* to) {
  for (int64_t at = 0; at < k_dim; at += TILE_K, to += TILE) {
    __m512i words[LANES];
    for (int64_t r = 0; r < LANES; ++r) words[r] = words_at(rows[r], at, k_dim);
    transpose(words);
    for (int64_t r = 0; r < LANES; ++r) _mm512_store_si512(to + r * TILE_K, words[r]);
  }
}

// Packs V of 32 tokens into tiles of B [v_tiles][16 pairs of tokens][16][2].
template <typename T>
void values_panel(const T* const* rows, int64_t v_dim, BFloat16* panel) {
  for (int64_t pair = 0; pair < TILE_ROWS; ++pair, panel += TILE_K)
    for (int64_t at = 0; at < v_dim; at += TILE_K)
      interleave_pair(words_at(rows[2 * pair], at, v_dim), words_at(rows[2 * pair + 1], at, v_dim),
                      panel + at / LANES * TILE);
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

// Sums [H][v_tiles][16][16] += the weights of steps [from, to) times V's panel; `first` overwrites the sums.
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

// Attention of units of many rows, one after another, by one thread. The rows of a unit share the packed K and V.
template <typename T>
class Chunks {
 public:
  // For units of up to `most` rows.
  Chunks(const Call<T>& call, int64_t most)
      : call_(call), shape_(call.shape) {
    const int64_t high = rounded_up(high_of(most), 2);
    q_ = own_memory<16, BFloat16>(high * shape_.k_steps * TILE);
    key_panel_ = own_memory<17, BFloat16>(KEY_TILES * shape_.k_steps * TILE);
    value_panel_ = own_memory<18, BFloat16>(STEPS * shape_.v_tiles * TILE);
    logits_ = own_memory<19, float>(2 * KEY_TILES * SUMS);
    sums_ = own_memory<21, float>(high * shape_.v_tiles * SUMS);
    kept_ = own_memory<22, Kept>(high);
    bounds_ = own_memory<23, int64_t>(2 * high * TILE_ROWS);
  }

  // Computes unit n and prefetches the first K and V of unit `next`, unless that is negative.
  template <typename M>
  void attend(M& tiles, int64_t n, int64_t next) {
    const Unit unit = call_.unit(n);
    const int64_t first = call_.first(unit) / KEYS * KEYS;
    if (here_->unit != n || here_->start != first) locate(n, unit, first, *here_);
    begin(unit);
    for (bool more = true; more; std::swap(here_, soon_)) {
      more = here_->start + KEYS < call_.last(unit);
      if (more)
        locate(n, unit, here_->start + KEYS, *soon_);
      else if (next >= 0)
        locate(next, call_.unit(next), call_.first(call_.unit(next)) / KEYS * KEYS, *soon_);
      else
        soon_->unit = -1;
      add_stretch(tiles, unit);
    }
    for (int64_t r = 0; r < unit.rows; ++r)
      call_.finish(unit, r, kept_[r / TILE_ROWS], sums_ + r / TILE_ROWS * shape_.v_tiles * SUMS);
  }

 private:
  // KEYS tokens from `start` on; steps [from, to) contain the tokens that some query of the unit sees.
  struct Stretch {
    int64_t unit = -1, start = 0, from = 0, to = 0;
    const T *keys[KEYS], *values[KEYS];  // null for tokens that no query sees
  };

  void locate(int64_t n, const Unit& unit, int64_t start, Stretch& into) const {
    const int64_t first = call_.first(unit), last = call_.last(unit);
    into.unit = n, into.start = start;
    into.from = std::max<int64_t>(0, first - start) / TILE_K;
    into.to = steps_of(std::min(KEYS, last - start));
    call_.keys_of(unit).locate(start, KEYS, first, last, into.keys);
    call_.values_of(unit).locate(start, KEYS, first, last, into.values);
  }

  void begin(const Unit& unit) {
    for (int64_t r = 0; r < unit.rows; r += TILE_ROWS) {
      const BFloat16* from[TILE_ROWS] = {};
      for (int64_t i = 0; i < std::min(TILE_ROWS, unit.rows - r); ++i) from[i] = call_.query_of(unit, r + i);
      tiles_from(from, shape_.k_dim, q_ + r * shape_.k_steps * TILE_K);
    }
    for (int64_t r = 0; r < unit.rows; ++r) {
      int64_t* own = bounds_ + 2 * (r - r % TILE_ROWS) + r % TILE_ROWS;
      own[0] = call_.reach.first(call_.position(unit, r));
      own[TILE_ROWS] = call_.position(unit, r) + 1;
      call_.begin(unit, r, kept_[r / TILE_ROWS]);
    }
  }

  template <typename M>
  void add_stretch(M& tiles, const Unit& unit) {
    const int64_t start = here_->start, rows = unit.rows;
    alignas(LINE) float by_key[KEYS], by_value[KEYS], factors[TILE_ROWS];
    if constexpr (QUANTISED<T>) {
      call_.scales_of(call_.key_scales, unit, start, by_key);
      call_.scales_of(call_.value_scales, unit, start, by_value);
    }
    for (int64_t t = 2 * here_->from; t < 2 * here_->to; ++t)
      keys_panel(here_->keys + t * LANES, shape_.k_dim, key_panel_ + t * shape_.k_steps * TILE);
    for (int64_t step = here_->from; step < here_->to; ++step)
      values_panel(here_->values + step * TILE_K, shape_.v_dim, value_panel_ + step * shape_.v_tiles * TILE);

    const int64_t tiles_high = high_of(rows), turns = (tiles_high + 1) / 2;
    for (int64_t turn = 0; turn < turns; ++turn) {
      const int64_t tile = 2 * turn, row = tile * TILE_ROWS, both = std::min<int64_t>(2, tiles_high - tile);
      const int64_t until = std::min(rows, row + both * TILE_ROWS);
      const int64_t lowest = call_.reach.first(call_.position(unit, row)) - start;
      const int64_t past = call_.position(unit, until - 1) + 1 - start;
      const int64_t from = std::max<int64_t>(0, lowest) / TILE_K, to = steps_of(std::min(KEYS, past));
      if (soon_->unit >= 0) fetch_next(turn, turns);
      if (lowest >= KEYS || past <= 0) continue;
      const BFloat16* own_q = q_ + tile * shape_.k_steps * TILE;
      if (both == 2)
        logits_of<2>(tiles, own_q, key_panel_, shape_.k_steps, from, to, logits_);
      else
        logits_of<1>(tiles, own_q, key_panel_, shape_.k_steps, from, to, logits_);
      float* own_sums = sums_ + tile * shape_.v_tiles * SUMS;
      for (int64_t half = 0; half < both; ++half) {
        int64_t seen[TILE_ROWS], ends[TILE_ROWS];
        const int64_t here_rows = std::min(TILE_ROWS, rows - row - half * TILE_ROWS);
        const int64_t* own = bounds_ + 2 * (row + half * TILE_ROWS);
        for (int64_t r = 0; r < here_rows; ++r) seen[r] = own[r] - start, ends[r] = own[TILE_ROWS + r] - start;
        const __mmask16 changed =
            weigh<QUANTISED<T>>(here_rows, seen, ends, from, to, call_.softmax, by_key, by_value,
                                logits_ + half * KEY_TILES * SUMS, kept_[tile + half], factors);
        if (lowest < 0) scale(own_sums + half * shape_.v_tiles * SUMS, shape_.v_tiles, changed, factors);
      }
      if (both == 2)
        add_values<2>(tiles, logits_, value_panel_, shape_.v_tiles, from, to, lowest >= 0, own_sums);
      else
        add_values<1>(tiles, logits_, value_panel_, shape_.v_tiles, from, to, lowest >= 0, own_sums);
    }
  }

  // Prefetches part `turn` of `turns` of the next stretch.
  void fetch_next(int64_t turn, int64_t turns) const {
    for (int64_t t = KEYS * turn / turns; t < KEYS * (turn + 1) / turns; ++t) {
      if (soon_->keys[t] != nullptr) prefetch(soon_->keys[t], shape_.k_dim);
      if (soon_->values[t] != nullptr) prefetch(soon_->values[t], shape_.v_dim);
    }
  }

  const Call<T>& call_;
  const Shape& shape_;
  BFloat16 *q_, *key_panel_, *value_panel_;
  float *logits_, *sums_;
  Kept* kept_;       // one for each tile of rows
  int64_t* bounds_;  // [tiles][first, end][16]: the tokens that a row sees
  Stretch stretches_[2], *here_ = stretches_, *soon_ = stretches_ + 1;
};

template <typename T>
Call<T> call_of(Tensor& out, const Tensor& query, const Tensor& k_pages, const Tensor& v_pages, const Tensor& blocks,
                Reach reach, const Softmax& softmax, const float* sinks, const std::optional<Tensor>& k_scales,
                const std::optional<Tensor>& v_scales) {
  const int64_t kv_heads = k_pages.size(2), k_dim = k_pages.size(3), v_dim = v_pages.size(3);
  const auto place = [&](const Tensor& pages) {
    return Place<T>{pages.const_data_ptr<T>(), blocks.const_data_ptr<int32_t>(), pages.size(1), pages.stride(0),
                    pages.stride(1)};
  };
  Call<T> call{{kv_heads, query.size(1) / kv_heads, k_dim, v_dim, steps_of(k_dim), 2 * steps_of(v_dim)},
               softmax,
               reach,
               sinks,
               {query.const_data_ptr<BFloat16>(), query.stride(0), query.stride(1)},
               {out.data_ptr<BFloat16>(), out.stride(0), out.stride(1)},
               place(k_pages),
               place(v_pages),
               k_pages.stride(2),
               v_pages.stride(2),
               blocks.size(1)};
  if constexpr (QUANTISED<T>) {
    call.key_scales = {reinterpret_cast<const uint16_t*>(k_scales->const_data_ptr<BFloat16>()), k_scales->stride(0),
                       k_scales->stride(2)};
    call.value_scales = {reinterpret_cast<const uint16_t*>(v_scales->const_data_ptr<BFloat16>()), v_scales->stride(0),
                         v_scales->stride(2)};
  }
  return call;
}

template <typename T>
void attend_units(Call<T>& call, const Tensor& starts, const Tensor& lengths, int64_t queries) {
  const Shape& shape = call.shape;
  const int64_t threads = at::get_num_threads(), rows = queries * shape.kv_heads * shape.groups;
  const int64_t wanted = threads == 1 ? MOST_ROWS : std::clamp(rows / (threads * TURNS), LEAST_ROWS, MOST_ROWS);
  const int64_t height = std::max<int64_t>(1, wanted / shape.groups);
  call.tasks = tasks_of(starts, lengths, [&](int64_t) { return height; });
  int64_t most = 0;
  for (const Task& task : call.tasks) most = std::max(most, task.queries * shape.groups);

  const int64_t count = call.count();
  const auto few = [&](int64_t n) { return call.unit(n).rows <= TILE_ROWS; };
  // Each unit prefetches the next one's first rows, past `end` too: the thread goes on there unless another steals it.
  share_out(count, std::max<int64_t>(1, count / (threads * TURNS)), [&](int64_t begin, int64_t end) {
    FewRows<T> few_rows(call);
    Chunks<T> chunks(call, most);
    with_tiles([&](auto& tiles) {
      for (int64_t n = begin; n < end; ++n) {
        const int64_t next = n + 1 < count && few(n + 1) == few(n) ? n + 1 : -1;
        if (few(n))
          few_rows.attend(tiles, n, next);
        else
          chunks.attend(tiles, n, next);
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
    auto call =
        call_of<decltype(element)>(out, query, k_pages, v_pages, blocks, reach, softmax, sinks, k_scales, v_scales);
    attend_units(call, starts, lengths, query.size(0));
  };
  if (k_pages.scalar_type() == at::kChar) return over(int8_t());
  if (k_pages.scalar_type() == at::kFloat8_e4m3fn) return over(Fp8());
  over(BFloat16());
}

}  // namespace tandem

#endif
