// Rows times panels of a weight, by tiles.
//
// x is packed in tiles [m / 16][k / 32][16][32], with rows and k padded with zeros, or read in place. A panel is
// [k / 32][3][16 pairs][16][2]: three tiles of B for each step, in the order of reading. Up to 32 rows read the weight
// once, panel by panel from front to back. More rows take DEEP steps of k of some panels, which stay in L2. Up to BY_PANELS
// rows, which wait for memory, pass one panel after another; of more, each 32 rows pass them all, and so write whole cache
// lines of y. Partial sums are stored in memory, which changes no bits. The sums of 32 rows and a panel leave while the
// next are computed: tiles and vectors are different units of the processor.
#pragma once

#include "ops.h"
#include "tiles.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <vector>

#ifdef TANDEM_TILES

namespace tandem {

constexpr int64_t TILES_WIDE = 3;                               // of a panel
constexpr int64_t STEP = TILES_WIDE * TILE;                     // elements of a panel that a step of k reads
constexpr int64_t DEEP = 48;                                    // at most: 144 KiB of each panel
constexpr int64_t TOGETHER = 4;                                 // panels that share a reading of x
constexpr int64_t HIGH = 512;                                   // rows of a task at most
constexpr int64_t BY_PANELS = 192;                              // rows up to which panels are read one after another
constexpr int64_t OWN_ROWS = 128;                               // rows per thread from which each thread has its own

inline int64_t steps_of(int64_t k) { return (k + TILE_K - 1) / TILE_K; }
inline int64_t steps_of(int64_t k, int64_t group) { return k / group * steps_of(group) + steps_of(k % group); }
inline __mmask32 mask_of(int64_t left) { return left >= TILE_K ? ~__mmask32(0) : (__mmask32(1) << left) - 1; }
inline int64_t high_of(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

// Scratch memory of the calling thread, aligned to a cache line, grown and reused; each `ID` has its own.
template <int ID, typename T>
T* own_memory(int64_t count) {
  static thread_local std::vector<char> memory;
  const size_t bytes = count * sizeof(T) + LINE;
  if (memory.size() < bytes) memory = std::vector<char>(bytes);
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.data()) + LINE - 1) / LINE * LINE);
}

// Packs x [m, k] in tiles, in memory of the calling thread. Each `group` of elements along k begins a new step.
inline const c10::BFloat16* tiles_of(const c10::BFloat16* x, int64_t m, int64_t k, int64_t group) {
  const int64_t steps = steps_of(k, group), high = high_of(m);
  auto* to = own_memory<0, c10::BFloat16>(high * steps * TILE);
  const auto fill = [=](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile)
      for (int64_t r = 0; r < TILE_ROWS; ++r) {
        const int64_t row = tile * TILE_ROWS + r;
        auto* into = to + (tile * steps * TILE_ROWS + r) * TILE_K;
        for (int64_t first = 0; first < k; first += group) {
          const int64_t end = std::min(k, first + group);
          for (int64_t at = first; at < end; at += TILE_K, into += TILE)
            _mm512_store_si512(into, _mm512_maskz_loadu_epi16(row < m ? mask_of(end - at) : 0, x + row * k + at));
        }
      }
  };
  at::parallel_for(0, high, std::max<int64_t>(1, TASK_BYTES / (steps * TILE * 2)), fill);
  return to;
}

// Rows of x in memory, with strides in elements: of rows, of steps of k, and of 16 rows.
struct TileRows {
  const c10::BFloat16* at;
  int64_t row, step, tile;
};

// Rows of x: the first `count` in place, further ones, or all, packed in tiles.
struct ManyRows {
  TileRows packed;
  TileRows in_place = {};
  int64_t count = 0;  // a multiple of 32, or all

  // The rows from `first` on, a multiple of 32: up to 32 of them.
  TileRows from(int64_t first) const {
    const TileRows& rows = first < count ? in_place : packed;
    const int64_t skipped = first < count ? first : first - count;
    return {rows.at + skipped / TILE_ROWS * rows.tile, rows.row, rows.step, rows.tile};
  }
};

// Rows of x [m, k] for a product with `columns` columns. To pack them takes some tenth of a product with as many columns
// as k. In place, tiles are read a little more slowly, and much more slowly where rows begin at multiples of 4 KiB: their
// lines have one place in a first-level cache.
inline ManyRows rows_for(const c10::BFloat16* x, int64_t m, int64_t k, int64_t columns) {
  const auto packed = [&](int64_t first) -> TileRows {
    return {tiles_of(x + first * k, m - first, k, k), TILE_K, TILE, steps_of(k) * TILE};
  };
  const TileRows in_place = {x, k, TILE_K, TILE_ROWS * k};
  if (k % TILE_K != 0) return {packed(0)};
  if (m <= TILE_ROWS) return {{}, in_place, m};
  if (m <= 2 * TILE_ROWS || k * 2 % 4096 == 0 || columns >= 2 * k) return {packed(0)};
  const int64_t whole = m / (2 * TILE_ROWS) * 2 * TILE_ROWS;
  return {whole < m ? packed(whole) : TileRows{}, in_place, whole};
}

// Two by three tiles of sums += the rows of x at `upper` and `lower`, with the strides of `x`, times `steps` steps of a
// panel. Registers: 0 to 2 the upper rows' sums, 3 to 5 the lower rows'. Before each tile of the panel it prefetches LINES
// lines, from `soon` on. Calls beside(step) in each step.
template <int LINES, typename M, typename B>
[[gnu::always_inline]] inline void add_steps(M& tiles, const TileRows& x, const c10::BFloat16* upper,
                                             const c10::BFloat16* lower, const c10::BFloat16* panel, int64_t steps,
                                             const c10::BFloat16* soon, const B& beside) {
  const int64_t row = x.row * 2, step = x.step;
  const char* line = reinterpret_cast<const char*>(soon);
  const auto fetch = [&] {
#pragma GCC unroll 16
    for (int64_t i = 0; i < LINES; ++i) asm volatile("prefetcht1 %0" : : "m"(line[i * LINE]));
    line += LINES * LINE;
  };
  for (int64_t s = 0; s < steps; ++s, panel += STEP, upper += step, lower += step) {
    tiles.template load<6>(upper, row);
    fetch();
    tiles.template load<7>(panel, WIDTH_BYTES);
    tiles.template dot<0, 6, 7>();
    fetch();
    tiles.template load<7>(panel + TILE, WIDTH_BYTES);
    tiles.template dot<1, 6, 7>();
    fetch();
    tiles.template load<7>(panel + 2 * TILE, WIDTH_BYTES);
    tiles.template dot<2, 6, 7>();
    tiles.template load<6>(lower, row);
    tiles.template dot<5, 6, 7>();
    tiles.template load<7>(panel + TILE, WIDTH_BYTES);
    tiles.template dot<4, 6, 7>();
    tiles.template load<7>(panel, WIDTH_BYTES);
    tiles.template dot<3, 6, 7>();
    beside(s);
  }
}

// Prefetches a tile of a panel. In assembler: see `prefetch` in attention.h.
inline void fetch_tile(const c10::BFloat16* tile) {
  const char* from = reinterpret_cast<const char*>(tile);
#pragma GCC unroll 16
  for (int64_t line = 0; line < TILE_ROWS; ++line) asm volatile("prefetcht1 %0" : : "m"(from[line * LINE]));
}

// P by three tiles of sums += up to 16 rows of x times `steps` steps of each of P panels; panels[P] and on come next.
// Registers: 0 to 2 the first panel's sums, 3 to 5 the second's. Prefetches each panel's next tile. Two panels at a
// time are read 5 % faster than one: the hardware prefetcher follows both.
template <int P, typename M>
[[gnu::always_inline]] inline void read_steps(M& tiles, TileRows x, const c10::BFloat16* const* panels, int64_t steps) {
  const c10::BFloat16 *first = panels[0], *second = panels[P - 1];
  const auto add = [&]<int SUM>(const c10::BFloat16* tile, const c10::BFloat16* later) {
    fetch_tile(later);
    tiles.template load<7>(tile, WIDTH_BYTES);
    tiles.template dot<SUM, 6, 7>();
  };
  for (int64_t s = 0; s < steps; ++s, first += STEP, second += STEP, x.at += x.step) {
    const bool last = s + 1 == steps;
    tiles.template load<6>(x.at, x.row * 2);
    add.template operator()<0>(first, first + TILE);
    if constexpr (P == 2) add.template operator()<3>(second, second + TILE);
    add.template operator()<1>(first + TILE, first + 2 * TILE);
    if constexpr (P == 2) add.template operator()<4>(second + TILE, second + 2 * TILE);
    add.template operator()<2>(first + 2 * TILE, last ? panels[P] : first + STEP);
    if constexpr (P == 2) add.template operator()<5>(second + 2 * TILE, last ? panels[P + 1] : second + STEP);
  }
}

template <int H, typename M>
[[gnu::always_inline]] inline void zero_sums(M& tiles) {
  tiles.template zero<0>();
  tiles.template zero<1>();
  tiles.template zero<2>();
  if constexpr (H == 2) {
    tiles.template zero<3>();
    tiles.template zero<4>();
    tiles.template zero<5>();
  }
}

template <int H, typename M>
[[gnu::always_inline]] inline void store_sums(M& tiles, float* to) {
  tiles.template store<0>(to, WIDTH_BYTES);
  tiles.template store<1>(to + SUMS, WIDTH_BYTES);
  tiles.template store<2>(to + 2 * SUMS, WIDTH_BYTES);
  if constexpr (H == 2) {
    tiles.template store<3>(to + 3 * SUMS, WIDTH_BYTES);
    tiles.template store<4>(to + 4 * SUMS, WIDTH_BYTES);
    tiles.template store<5>(to + 5 * SUMS, WIDTH_BYTES);
  }
}

// `sum_panels` for up to 16 rows, which are bound by reading the weight: P panels at a time.
template <int P, typename M, typename L>
void read_panels(M& tiles, const TileRows& x, int64_t steps, const c10::BFloat16* const* panels, int64_t count,
                 const L& leave) {
  alignas(LINE) float out[P * TILES_WIDE * SUMS];
  int64_t p = 0;
  for (; p + P <= count; p += P) {
    zero_sums<P>(tiles);
    read_steps<P>(tiles, x, panels + p, steps);
    store_sums<P>(tiles, out);
    for (int64_t i = 0; i < P; ++i) leave(p + i, int64_t{0}, TILE_ROWS, out + i * TILES_WIDE * SUMS);
  }
  if constexpr (P > 1)
    read_panels<1>(tiles, x, steps, panels + p, count - p, [&](int64_t at, int64_t row, int64_t some, const float* sums) {
      leave(p + at, row, some, sums);
    });
}

// The same for 17 to 32 rows.
template <typename M, typename L>
void read_panels_twice(M& tiles, const TileRows& x, int64_t steps, const c10::BFloat16* const* panels, int64_t count,
                       const L& leave) {
  alignas(LINE) float out[2 * TILES_WIDE * SUMS];
  for (int64_t p = 0; p < count; ++p) {
    zero_sums<2>(tiles);
    add_steps<TILE_ROWS>(tiles, x, x.at, x.at + x.tile, panels[p], steps, panels[p] + 2 * TILE, [](int64_t) {});
    store_sums<2>(tiles, out);
    leave(p, int64_t{0}, TILE_ROWS, out);
    leave(p, TILE_ROWS, TILE_ROWS, out + TILES_WIDE * SUMS);
  }
}

// A power of two: of 32 rows, how many leave in each of so many steps.
inline int64_t share_of_rows(int64_t steps) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>((2 * TILE_ROWS + steps - 1) / steps)));
}

// Sums of up to 32 rows and one panel: two by three tiles. They leave row by row.
struct Leaving {
  const float* sums = nullptr;
  int64_t panel = 0, row = 0, rows = 0;

  // Calls f(panel, row, some, sums) for the share of the rows that step `s` takes: `each`, a power of two.
  template <typename F>
  void share(int64_t s, int64_t each, const F& f) const {
    const int64_t end = std::min(rows, (s + 1) * each);
    for (int64_t r = s * each; r < end; r += TILE_ROWS)
      f(panel, row + r, std::min(end - r, TILE_ROWS), sums + r / TILE_ROWS * TILES_WIDE * SUMS + r % TILE_ROWS * LANES);
  }
};

// `rows` rows of x, from `first` on, times `count` panels of equal length; `panels` names as many more, to be prefetched.
// Calls leave(panel, row, some, sums) for each panel and each row once, up to 16 at a time, and for each BY_PANELS rows
// panel after panel; vector c of a row is LANES floats at sums + c * SUMS, the next row LANES further.
template <typename M, typename L>
void sum_panels(M& tiles, const ManyRows& x, int64_t first, int64_t rows, int64_t steps,
                const c10::BFloat16* const* panels, int64_t count, const L& leave) {
  const int64_t high = high_of(rows);
  if (high == 1) return read_panels<2>(tiles, x.from(first), steps, panels, count, leave);
  if (high == 2) return read_panels_twice(tiles, x.from(first), steps, panels, count, leave);
  constexpr int64_t SIZE = 2 * TILES_WIDE * SUMS;
  alignas(LINE) float out[2][SIZE];
  int turn = 0;
  const bool by_panels = high <= BY_PANELS / TILE_ROWS;
  Leaving before;  // complete, and leaves while the next are computed
  const int64_t pairs = (high + 1) / 2;
  const int64_t blocks = (steps + DEEP - 1) / DEEP;
  float* waiting = own_memory<1, float>(blocks == 1 ? 0 : count * pairs * SIZE);
  for (int64_t block = 0, from = 0, deep; block < blocks; ++block, from += deep) {
    deep = steps * (block + 1) / blocks - from;
    const int64_t each = share_of_rows(deep);
    const bool begins = from == 0, last = from + deep == steps;
    for (int64_t i = 0; i < pairs * count; ++i) {
      const int64_t pair = by_panels ? i % pairs : i / count, p = by_panels ? i / pairs : i % count;
      const int64_t row = pair * 2 * TILE_ROWS;
      const TileRows own = x.from(first + row);
      const auto* upper = own.at + from * own.step;
      const auto* lower = 2 * pair + 1 < high ? upper + own.tile : upper;
      const auto* panel = panels[p] + from * STEP;
      const auto* next = by_panels && p + 1 < count ? panels[p + 1] + from * STEP
                         : by_panels                ? panels[last ? count : 0] + (last ? 0 : from + deep) * STEP
                         : last                     ? panels[count + p]
                                                    : panel + deep * STEP;
      float* kept = waiting + (p * pairs + pair) * SIZE;
      if (begins) {
        zero_sums<2>(tiles);
      } else {
        tiles.template load<0>(kept, WIDTH_BYTES);
        tiles.template load<1>(kept + SUMS, WIDTH_BYTES);
        tiles.template load<2>(kept + 2 * SUMS, WIDTH_BYTES);
        tiles.template load<3>(kept + 3 * SUMS, WIDTH_BYTES);
        tiles.template load<4>(kept + 4 * SUMS, WIDTH_BYTES);
        tiles.template load<5>(kept + 5 * SUMS, WIDTH_BYTES);
      }
      const auto beside = [&](int64_t s) { before.share(s, each, leave); };
      // Each pair of tiles of rows prefetches an equal share of the next block, to limit outstanding cache misses.
      const auto add = [&]<int LINES>() {
        constexpr int64_t SHARE = TILES_WIDE * LINES * LINE / sizeof(c10::BFloat16);  // elements per step
        add_steps<LINES>(tiles, own, upper, lower, panel, deep, next + pair * deep * SHARE, beside);
      };
      if (pairs >= TILE_ROWS)
        add.template operator()<1>();
      else if (pairs >= TILE_ROWS / 2)
        add.template operator()<2>();
      else if (pairs >= TILE_ROWS / 4)
        add.template operator()<4>();
      else
        add.template operator()<8>();
      float* sums = last ? out[turn ^= 1] : kept;
      store_sums<2>(tiles, sums);
      if (last) before = {sums, p, row, std::min(2 * TILE_ROWS, rows - row)};
    }
  }
  before.share(0, 2 * TILE_ROWS, leave);
}

// Sums of some rows and a panel in memory, with strides in floats: of rows, and of a row's vectors.
struct RowSums {
  const float* at;
  int64_t row, vector;
};

// Stores WIDE vectors, of which there are `columns` columns, of `rows` rows: y = finish(sum, other), where the sum is
// multiplied by scales, plus bias. `scales`, `bias` and `other` may be null.
template <int WIDE, typename F>
[[gnu::always_inline]] inline void leave_rows(RowSums sums, int64_t rows, int64_t columns, const float* scales,
                                              const c10::BFloat16* bias, const c10::BFloat16* other, int64_t other_row,
                                              c10::BFloat16* y, int64_t y_row, const F& finish) {
  const auto go = [&](const auto& get, const auto& set) {
    for (int64_t r = 0; r < rows; ++r, sums.at += sums.row, y += y_row)
#pragma GCC unroll 4
      for (int64_t c = 0; c < WIDE; ++c) {
        Vec sum = load(sums.at + c * sums.vector);
        if (scales != nullptr) sum = at::vec::fmadd(sum, load(scales + c * LANES), Vec(0.0f));
        if (bias != nullptr) sum = sum + get(bias + c * LANES, c);
        set(finish(sum, other == nullptr ? Vec(0.0f) : get(other + r * other_row + c * LANES, c)), y + c * LANES, c);
      }
  };
  if (columns >= WIDE * LANES)
    return go([](const c10::BFloat16* from, int64_t) { return load(from); },
              [](const Vec& v, c10::BFloat16* to, int64_t) { put(v, to); });
  const auto left = [=](int64_t c) { return static_cast<int>(std::clamp<int64_t>(columns - c * LANES, 0, LANES)); };
  go([&](const c10::BFloat16* from, int64_t c) { return load(from, left(c)); },
     [&](const Vec& v, c10::BFloat16* to, int64_t c) { put(v, to, left(c)); });
}

// Shares out run(tiles, panel, count, from, rows) over groups of `together` adjacent panels, of `panel_bytes` each, and
// parts of the rows. The low registers have `low` rows. With many rows each thread begins with rows of its own: those
// of x that it made, and those of y that it will need, are in its L2 and not in another core's. With fewer rows reading
// the weight takes longer, and each thread begins with panels of its own.
template <typename F>
void share_tiles(int64_t m, int64_t steps, int64_t panels, int64_t together, int64_t panel_bytes, int64_t low,
                 const F& run) {
  const bool few = m <= 2 * TILE_ROWS;  // they read the weight from front to back
  if (few) together = 2;
  const int64_t groups = (panels + together - 1) / together, threads = at::get_num_threads();
  const auto pieces = [](int64_t count, int64_t size) { return (count + size - 1) / size; };
  const int64_t slabs = m >= OWN_ROWS * threads ? threads : 1;  // of rows, one for each thread
  int64_t parts = pieces(m, slabs * HIGH);                      // of a slab
  if (slabs == 1 && !few) parts = std::max(parts, parts_of(m, groups, 2 * TILE_ROWS));
  const int64_t part = pieces(pieces(m, slabs * parts), 2 * TILE_ROWS) * 2 * TILE_ROWS;  // rows
  const int64_t grain = std::max<int64_t>(1, TASK_BYTES / (together * panel_bytes + part * steps * TILE_K * 4));
  share_out(slabs * groups * parts, grain, [&](int64_t begin, int64_t end) {
    with_tiles(low, [&](auto& tiles) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t slab = task / (groups * parts), panel = task / parts % groups * together;
        const int64_t from = (slab * parts + task % parts) * part, rows = std::min(part, m - from);
        if (rows > 0) run(tiles, panel, std::min(together, panels - panel), from, rows);
      }
    });
  });
}

}  // namespace tandem

#endif
