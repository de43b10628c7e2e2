// Products with quantised weights by tiles: codes are widened into tiles as they are read. One row is multiplied by FMA
// instead, with the same bits. Denormals are zero, as in tiles, up to the stored results.
#pragma once

#include "codes.h"
#include "functions.h"
#include "tile_blocks.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace tandem {

// Rows of x prepared by one product by tiles and reused by the next product of the same rows.
struct Prepared {
  const c10::BFloat16* tiles = nullptr;
  int64_t group = 0;            // elements along k per group; each group begins a new step
  const float* wide = nullptr;  // a single row, in float32
};

#ifdef TANDEM_TILES

namespace code_tiles {

using c10::BFloat16;

static_assert(PANEL == MADE_COLUMNS);

// Widens `count` pairs of a panel into the first of `rows` rows of four tiles; the others are zeros. Prefetches, as
// AsCodes does: with up to 16 rows nothing else would.
template <typename F>
[[gnu::always_inline]] inline void widen_rows(const uint8_t* codes, int64_t count, int64_t rows, BFloat16* to) {
  const AsCodes<F> source(codes);
  for (int64_t row = 0; row < count; ++row, to += TILE_K) {
    const auto w = source(row);
    for (int c = 0; c < COLS; ++c) _mm512_store_si512(to + c * TILE, (__m512i)both(w, c));
  }
  for (int64_t row = count; row < rows; ++row, to += TILE_K)
    for (int c = 0; c < COLS; ++c) _mm512_store_si512(to + c * TILE, _mm512_setzero_si512());
}

// Panels of codes that sum_made widens: of one weight, or of two weights alternately. No step spans two groups; a
// group's last step may be partial.
template <typename F>
struct Codes {
  const uint8_t* first[2];
  int64_t weights, pairs, of_group;  // pairs per panel and per group
  int64_t steps_of_group = steps_of(2 * of_group);

  const uint8_t* at(int64_t panel) const {
    return first[panel % weights] + panel / weights * pairs * STEP_BYTES<F>;
  }

  int64_t pieces(int64_t steps) const { return steps * TILE_ROWS; }

  void make(int64_t panel, int64_t step, int64_t, int64_t row, int64_t last, BFloat16* to) const {
    const uint8_t* own = at(panel);
    for (int64_t end; row < last; row = end) {
      end = std::min(last, (row / TILE_ROWS + 1) * TILE_ROWS);
      const int64_t at = step + row / TILE_ROWS, group = at < steps_of_group ? 0 : at / steps_of_group;
      const int64_t within = (at - group * steps_of_group) * TILE_ROWS + row % TILE_ROWS;
      const int64_t begin = group * of_group + within;
      const int64_t there = std::min(of_group - within, pairs - begin);
      widen_rows<F>(own + begin * STEP_BYTES<F>, std::clamp<int64_t>(there, 0, end - row), end - row,
                    to + row / TILE_ROWS * MADE + row % TILE_ROWS * TILE_K);
    }
  }

  int64_t lines(int64_t steps) const { return steps * TILE_ROWS * STEP_BYTES<F> / LINE; }

  void fetch(int64_t panel, int64_t step, int64_t line, int64_t last) const {
    const int64_t pair = step / steps_of_group * of_group + step % steps_of_group * TILE_ROWS;
    const char* from = reinterpret_cast<const char*>(at(panel)) + pair * STEP_BYTES<F>;
    for (; line < last; ++line) __builtin_prefetch(from + line * LINE, 0, 2);
  }
};

struct Packed {
  const uint8_t* codes;
  const float* scales;
  const BFloat16* bias;  // may be null
};

// y[0..count) = act(y), rounded; whole vectors.
using Act = void (*)(BFloat16* y, int64_t count);

inline Act act_of(c10::string_view name) {
  Act found = nullptr;
  with_act(name, [&](const auto& f) {
    using F = std::decay_t<decltype(f)>;
    found = [](BFloat16* y, int64_t count) {
      for (int64_t at = 0; at < count; at += LANES) put(F::template of<BFloat16>(load(y + at)), y + at);
    };
  });
  return found;
}

// y [m, n] = x times one weight, plus `beside`, which may be null; or act(x times one weight) times (x times a second).
struct Product {
  Packed weights[2];
  int64_t groups, group, m, k, n;
  const BFloat16* beside;
  Act act;  // null with one weight
  BFloat16* y;

  int64_t count() const { return act == nullptr ? 1 : 2; }
};

// Stores up to 16 rows' totals of one weight's panel, [rows][PANEL], from `row` on. With two weights, `gates`,
// [rows][PANEL], keeps act(x times the first).
inline void leave(const float* totals, int64_t rows, const float* scales, const Product& of, int64_t weight, int64_t row,
                  int64_t panel, BFloat16* gates) {
  const int64_t first = panel * PANEL, columns = of.n - first, at = row * of.n + first;
  const BFloat16* bias = of.weights[weight].bias == nullptr ? nullptr : of.weights[weight].bias + first;
  const RowSums sums{totals, PANEL, LANES};
  if (of.act != nullptr && weight == 0) {
    leave_rows<COLS>(sums, rows, columns, scales, bias, nullptr, 0, gates, PANEL, [](Vec sum, Vec) { return sum; });
    return of.act(gates, rows * PANEL);
  }
  if (of.act != nullptr)
    return leave_rows<COLS>(sums, rows, columns, scales, bias, gates, PANEL, of.y + at, of.n,
                            [](Vec sum, Vec gate) { return gate * rounded<BFloat16>(sum); });
  if (of.beside != nullptr)
    return leave_rows<COLS>(sums, rows, columns, scales, bias, of.beside + at, of.n, of.y + at, of.n,
                            [](Vec sum, Vec beside) { return rounded<BFloat16>(sum) + beside; });
  leave_rows<COLS>(sums, rows, columns, scales, bias, nullptr, 0, of.y + at, of.n, [](Vec sum, Vec) { return sum; });
}

// totals [PANEL] = a row of x, in float32, times one panel: by FMA, with the chains of a tile for each column and step.
template <typename F>
[[gnu::noinline]] void sum_row(const float* x, const uint8_t* panel, int64_t pairs, int64_t of_group, const float* scales,
                               int64_t groups, float* totals) {
  const AsCodes<F> source(panel);
  for (int64_t begin = 0, group = 0; group < groups; ++group, scales += PANEL) {
    Vec sums[COLS];
    for (Vec& sum : sums) sum = Vec(0.0f);
    for (const int64_t end = std::min(pairs, (group + 1) * of_group); begin < end;) {
      Vec evens[COLS], odds[COLS];
      for (int c = 0; c < COLS; ++c) evens[c] = odds[c] = Vec(0.0f);
      for (const int64_t step_end = std::min(end, begin + TILE_ROWS); begin < step_end; ++begin) {
        const auto w = source(begin);
        const Vec first(x[2 * begin]), second(x[2 * begin + 1]);
        for (int c = 0; c < COLS; ++c) {
          evens[c] = at::vec::fmadd(first, even(w, c), evens[c]);
          odds[c] = at::vec::fmadd(second, odd(w, c), odds[c]);
        }
      }
      for (int c = 0; c < COLS; ++c) sums[c] = sums[c] + (evens[c] + odds[c]);
    }
    for (int c = 0; c < COLS; ++c) {
      float* total = totals + c * LANES;
      at::vec::fmadd(sums[c], load(scales + c * LANES), group == 0 ? Vec(0.0f) : load(total)).store(total);
    }
  }
}

// One row would use each tile once, so no tiles are made.
template <typename F>
void linear_row(const BFloat16* x, Prepared& prepared, const Product& of) {
  const int64_t pairs = pairs_of(of.k), bytes = pairs * STEP_BYTES<F>, panels = panels_of(of.n);
  if (prepared.wide == nullptr) {
    float* wide = own_memory<0, float>(2 * pairs);
    for (int64_t at = 0; at < of.k; ++at) wide[at] = static_cast<float>(x[at]);
    if (of.k < 2 * pairs) wide[of.k] = 0.0f;
    prepared.wide = wide;
  }
  const float* wide = prepared.wide;  // the calling thread's memory, read by all threads
  share_out(panels, std::max<int64_t>(1, TASK_BYTES / (bytes + pairs * 8)), [&](int64_t begin, int64_t end) {
    const AsInTiles as_in_tiles;
    alignas(LINE) BFloat16 gates[PANEL];
    alignas(LINE) float totals[PANEL];
    for (int64_t panel = begin; panel < end; ++panel)
      for (int64_t i = 0; i < of.count(); ++i) {
        const auto& [codes, scales, _] = of.weights[i];
        sum_row<F>(wide, codes + panel * bytes, pairs, of.group / 2, scales + panel * of.groups * PANEL, of.groups, totals);
        leave(totals, 1, nullptr, of, i, 0, panel, gates);
      }
  });
}

template <typename F>
void linear_tiles(const BFloat16* x, Prepared& prepared, Product of) {
  if (of.m == 0) return;
  if (of.groups == 1) of.group = of.k + of.k % 2;
  if (of.m == 1) return linear_row<F>(x, prepared, of);
  const int64_t steps = steps_of(of.k, of.group), pairs = pairs_of(of.k), weights = of.count(), groups = of.groups;
  if (prepared.tiles == nullptr || prepared.group != of.group) prepared = {tiles_of(x, of.m, of.k, of.group), of.group};
  const BFloat16* tiled = prepared.tiles;
  share_tiles(of.m, steps, panels_of(of.n), MADE_TOGETHER / weights, weights * pairs * STEP_BYTES<F>, TILE_ROWS,
              [&](auto& tiles, int64_t panel, int64_t count, int64_t from, int64_t rows) {
    const AsInTiles as_in_tiles;
    const int64_t skip = panel * pairs * STEP_BYTES<F>, size = high_of(rows) * MADE_SUMS;  // sums of all rows, per panel
    const Codes<F> source{{of.weights[0].codes + skip, of.weights[1].codes + skip}, weights, pairs, of.group / 2};
    float* totals = own_memory<4, float>(groups == 1 ? 0 : count * weights * size);
    BFloat16* gates = own_memory<2, BFloat16>(weights == 1 ? 0 : count * size);
    const auto add_group = [&](int64_t p, int64_t at, int64_t row, int64_t some, const float* sums) {
      const int64_t weight = p % weights, own = panel + p / weights;
      const float* scale = of.weights[weight].scales + (own * groups + at) * PANEL;
      const auto go = [&](const float* sums, const float* by) {
        leave(sums, some, by, of, weight, from + row, own, gates + p / weights * size + row * PANEL);
      };
      if (groups == 1) return go(sums, scale);
      float* total = totals + p * size + row * PANEL;
      for (int64_t c = 0; c < COLS; ++c) {
        const Vec of_column = load(scale + c * LANES);
        for (int64_t i = c * LANES; i < some * PANEL; i += PANEL)
          at::vec::fmadd(load(sums + i), of_column, at == 0 ? Vec(0.0f) : load(total + i)).store(total + i);
      }
      if (at == groups - 1) go(total, nullptr);
    };
    sum_made<Weight::B>(tiles, tiled + from * steps * TILE_K, rows, steps, source.steps_of_group, source, count * weights,
                        add_group);
  });
}

}  // namespace code_tiles

#endif

}  // namespace tandem
