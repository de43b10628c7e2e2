// Rows times panels whose tiles are made as the weight is read: widened from codes, or copied from contiguous columns.
//
// A step of k of a panel is four tiles, one after another. Each group of steps has a sum of its own. x is packed in tiles
// [m / 16][steps][16][64 bytes]. Up to 16 rows take a step at a time, which stays in L1; more rows take MADE_DEEP steps of
// two panels at a time, which stay in L2: each 32 rows pass them, two by two tiles.
#pragma once

#include "tile_panels.h"

#include <algorithm>
#include <utility>

#ifdef TANDEM_TILES

namespace tandem {

constexpr int64_t MADE_TILES = 4;                             // of a step
constexpr int64_t MADE_COLUMNS = MADE_TILES * LANES;
constexpr int64_t MADE = MADE_TILES * TILE;                   // elements of a step
constexpr int64_t MADE_STRIDE = MADE_TILES * WIDTH_BYTES;     // bytes between rows of its sums
constexpr int64_t MADE_SUMS = TILE_ROWS * MADE_COLUMNS;       // of 16 rows and a panel
constexpr int64_t MADE_DEEP = 48;                             // steps at a time, 192 KiB, where many rows share them
constexpr int64_t MADE_ABREAST = 2;                           // panels that share a reading of x
constexpr int64_t MADE_TOGETHER = 8;                          // panels of a task

// Which operand the weight is: B, whose rows are pairs along k, or A, whose rows are columns of the weight. With A the
// sums are [column][row of x].
enum class Weight { A, B };

// Register SUM += register X, which holds rows of x, times register OWN, a tile of the weight.
template <Weight W, int SUM, int X, int OWN, typename M>
[[gnu::always_inline]] inline void dot_made(M& tiles) {
  W == Weight::A ? tiles.template dot<SUM, OWN, X>() : tiles.template dot<SUM, X, OWN>();
}

// The four tiles of sums += 16 rows of x times one step.
template <Weight W, typename M>
[[gnu::always_inline]] inline void add_made(M& tiles, const c10::BFloat16* x, const c10::BFloat16* made) {
  tiles.template load<4>(x, WIDTH_BYTES);
  tiles.template load<5>(made, WIDTH_BYTES);
  dot_made<W, 0, 4, 5>(tiles);
  tiles.template load<6>(made + TILE, WIDTH_BYTES);
  dot_made<W, 1, 4, 6>(tiles);
  tiles.template load<7>(made + 2 * TILE, WIDTH_BYTES);
  dot_made<W, 2, 4, 7>(tiles);
  tiles.template load<5>(made + 3 * TILE, WIDTH_BYTES);
  dot_made<W, 3, 4, 5>(tiles);
}

// Two by two tiles of sums += the rows of x at `upper` and `lower` times two of the four tiles of `steps` steps.
// Registers: 0 and 1 the upper rows' sums, 2 and 3 the lower rows'. Calls beside(step) in each step.
template <Weight W, typename M, typename B>
[[gnu::always_inline]] inline void add_pair(M& tiles, const c10::BFloat16* upper, const c10::BFloat16* lower,
                                            const c10::BFloat16* made, int64_t steps, const B& beside) {
  for (int64_t s = 0; s < steps; ++s, upper += TILE, lower += TILE, made += MADE) {
    tiles.template load<4>(upper, WIDTH_BYTES);
    tiles.template load<6>(made, WIDTH_BYTES);
    dot_made<W, 0, 4, 6>(tiles);
    tiles.template load<7>(made + TILE, WIDTH_BYTES);
    dot_made<W, 1, 4, 7>(tiles);
    tiles.template load<5>(lower, WIDTH_BYTES);
    dot_made<W, 2, 5, 6>(tiles);
    dot_made<W, 3, 5, 7>(tiles);
    beside(s);
  }
}

template <typename M>
void zero_four(M& tiles) {
  tiles.template zero<0>();
  tiles.template zero<1>();
  tiles.template zero<2>();
  tiles.template zero<3>();
}

// Stores four tiles of sums; the second, third and fourth so many floats after `to`.
template <typename M>
void store_four(M& tiles, float* to, int64_t second, int64_t third, int64_t fourth) {
  tiles.template store<0>(to, MADE_STRIDE);
  tiles.template store<1>(to + second, MADE_STRIDE);
  tiles.template store<2>(to + third, MADE_STRIDE);
  tiles.template store<3>(to + fourth, MADE_STRIDE);
}

// Sums of up to 32 rows, a panel and a group of steps, [32][64]. They leave some rows at a time.
struct MadeSums {
  const float* sums = nullptr;
  int64_t panel = 0, group = 0, row = 0, rows = 0;

  // Calls f(panel, group, row, some, sums) for the share of the rows that step `s` takes: `each`, which divides 32.
  template <typename F>
  void share(int64_t s, int64_t each, const F& f) const {
    const int64_t end = std::min(rows, (s + 1) * each);
    for (int64_t r = s * each; r < end; r += TILE_ROWS)
      f(panel, group, row + r, std::min(end - r, TILE_ROWS), sums + r * MADE_COLUMNS);
  }
};

// `each` pieces of each of some panels, handed out over so many turns.
struct Pieces {
  Pieces(int64_t panels, int64_t each, int64_t turns)
      : panels_(each > 0 ? panels : 0), each_(each), some_((panels * each + turns - 1) / turns) {}

  // Calls f(panel, from, to) with some pieces of one panel, unless none are left.
  template <typename F>
  bool next(const F& f) {
    if (panel_ == panels_) return false;
    const int64_t from = std::exchange(piece_, std::min(each_, piece_ + some_));
    f(panel_, from, piece_);
    if (piece_ == each_) ++panel_, piece_ = 0;
    return true;
  }

 private:
  int64_t panels_, each_, some_, panel_ = 0, piece_ = 0;
};

// Rows of x times `count` panels of `steps` steps. source.make(panel, step, steps, from, to, made) makes some of the
// source.pieces(steps) pieces of the tiles of some steps; source.fetch(panel, step, from, to) prefetches some of the
// source.lines(steps) lines that this reads into L2. Calls leave(panel, group, row, some, sums) for each panel, each group
// of `of_group` steps in order, and each row once, up to 16 at a time: sums [some][64] of float. With Weight::A it is all
// rows of a tile, and sums [16][4][16] of (column, block of columns, row). With more than 16 rows, pieces of the next
// block are made, and the sums before leave, while tiles are computed: tiles and vectors are different units.
template <Weight W, typename M, typename S, typename L>
void sum_made(M& tiles, const c10::BFloat16* x, int64_t rows, int64_t steps, int64_t of_group, const S& source,
              int64_t count, const L& leave) {
  const int64_t high = high_of(rows);
  if (high == 1) {  // each step is made one step early, so that its stores are complete when a tile loads it
    alignas(LINE) float out[MADE_SUMS];
    alignas(LINE) c10::BFloat16 made[2][MADE];
    for (int64_t p = 0; p < count; ++p) {
      source.make(p, 0, 1, 0, source.pieces(1), made[0]);
      for (int64_t s = 0, group = 0, left = 0; s < steps; ++s) {
        if (left == 0) zero_four(tiles), left = std::min(of_group, steps - s);
        if (s + 1 < steps) source.make(p, s + 1, 1, 0, source.pieces(1), made[(s + 1) % 2]);
        add_made<W>(tiles, x + s * TILE, made[s % 2]);
        if (--left > 0) continue;
        store_four(tiles, out, LANES, 2 * LANES, 3 * LANES);
        leave(p, group++, int64_t{0}, rows, out);
      }
    }
    return;
  }
  constexpr int64_t SIZE = 2 * MADE_SUMS;  // of 32 rows' sums
  const int64_t pairs = (high + 1) / 2;
  const int64_t parts = (of_group + MADE_DEEP - 1) / MADE_DEEP;
  const int64_t most = parts == 1 ? MADE_DEEP / of_group * of_group : (of_group + parts - 1) / parts;
  constexpr int64_t BLOCK = MADE_ABREAST * MADE_DEEP * MADE;
  auto* made = own_memory<3, c10::BFloat16>(2 * BLOCK);
  float* waiting = own_memory<1, float>(parts == 1 ? 0 : count * pairs * SIZE);
  alignas(LINE) float out[2][SIZE];
  int turn = 0;
  MadeSums before;
  struct Block {
    int64_t panel, panels, from, deep;  // whole groups of steps, or a part of one; no panels after the last block
  };
  const auto block_at = [&](int64_t panel, int64_t from) -> Block {
    const int64_t end = parts == 1 ? steps : std::min(steps, (from / of_group + 1) * of_group);
    return {panel, from < steps ? std::min(MADE_ABREAST, count - panel) : 0, from, std::min(most, end - from)};
  };
  const auto after = [&](const Block& block) {
    const int64_t panel = block.panel + block.panels;
    return panel < count ? block_at(panel, block.from) : block_at(0, block.from + block.deep);
  };
  Block here = block_at(0, 0);
  for (int64_t p = 0; p < here.panels; ++p)
    source.make(p, 0, here.deep, 0, source.pieces(here.deep), made + p * MADE_DEEP * MADE);
  for (bool odd = false; here.panels > 0; odd = !odd) {
    const c10::BFloat16* own = made + (odd ? BLOCK : 0);
    const Block next = after(here);
    c10::BFloat16* other = made + (odd ? 0 : BLOCK);
    // What the next block but one reads, or the first block of the panels after these, which another task reads.
    Block then = next.panels > 0 ? after(next) : next;
    if (next.panels > 0 && then.panels == 0) then = {count, MADE_ABREAST, 0, block_at(0, 0).deep};
    const int64_t turns = here.panels * pairs * 2 * here.deep;
    Pieces unmade(next.panels, source.pieces(next.deep), turns);
    Pieces unfetched(then.panels, source.lines(then.deep), turns);
    const auto make = [&](int64_t p, int64_t from, int64_t to) {
      source.make(next.panel + p, next.from, next.deep, from, to, other + p * MADE_DEEP * MADE);
    };
    const auto fetch = [&](int64_t p, int64_t from, int64_t to) { source.fetch(then.panel + p, then.from, from, to); };
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t row = pair * 2 * TILE_ROWS;
      const auto* upper = x + row * steps * TILE_K;
      const auto* lower = 2 * pair + 1 < high ? upper + steps * TILE : upper;
      for (int64_t p = 0; p < here.panels; ++p) {
        float* kept = waiting + ((here.panel + p) * pairs + pair) * SIZE;
        for (int64_t s = here.from, group = s / of_group, some; s < here.from + here.deep; s += some, ++group) {
          const int64_t end = std::min((group + 1) * of_group, steps);
          some = std::min(end, here.from + here.deep) - s;
          const bool begins = s == group * of_group, ends = s + some == end;
          float* sums = ends ? out[turn ^= 1] : kept;
          const int64_t each = W == Weight::A ? TILE_ROWS : share_of_rows(2 * some);
          for (int64_t side = 0; side < 2; ++side) {
            if (begins) {
              zero_four(tiles);
            } else {
              const float* from = kept + side * 2 * LANES;
              tiles.template load<0>(from, MADE_STRIDE);
              tiles.template load<1>(from + LANES, MADE_STRIDE);
              tiles.template load<2>(from + MADE_SUMS, MADE_STRIDE);
              tiles.template load<3>(from + MADE_SUMS + LANES, MADE_STRIDE);
            }
            const auto beside = [&](int64_t step) {
              before.share(side * some + step, each, leave);
              unmade.next(make);
              unfetched.next(fetch);
            };
            const auto* tile = own + (p * MADE_DEEP + s - here.from) * MADE + side * 2 * TILE;
            add_pair<W>(tiles, upper + s * TILE, lower + s * TILE, tile, some, beside);
            store_four(tiles, sums + side * 2 * LANES, LANES, MADE_SUMS, MADE_SUMS + LANES);
          }
          before = ends ? MadeSums{sums, here.panel + p, group, row, std::min(2 * TILE_ROWS, rows - row)} : MadeSums{};
        }
      }
    }
    while (unmade.next(make)) {
    }
    here = next;
  }
  before.share(0, 2 * TILE_ROWS, leave);
}

}  // namespace tandem

#endif
