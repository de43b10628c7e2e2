// Rows times panels whose tiles are made as the weight is read: widened from codes, or copied from contiguous columns.
//
// A step of k of a panel is [16][4][64 bytes], four tiles with interleaved rows; steps are made in L1. Each group of
// steps has a sum of its own. x is packed in tiles [m / 16][steps][16][64 bytes].
#pragma once

#include "tile_panels.h"

#ifdef TANDEM_TILES

namespace tandem {

constexpr int64_t MADE_TILES = 4;                             // of a step
constexpr int64_t MADE_COLUMNS = MADE_TILES * LANES;
constexpr int64_t MADE = MADE_TILES * TILE;                   // elements of a step
constexpr int64_t MADE_STRIDE = MADE_TILES * WIDTH_BYTES;     // bytes between rows of its tiles
constexpr int64_t MADE_SUMS = TILE_ROWS * MADE_COLUMNS;       // of 16 rows and a panel
constexpr int64_t MADE_DEEP = 6;                              // steps at a time, 24 KiB, where many rows share them
constexpr int64_t MADE_TOGETHER = 4;                          // panels that share a reading of x

// Which operand the weight is: B, whose rows are pairs along k, or A, whose rows are columns of the weight. With A the
// sums are [column][row of x].
enum class Weight { A, B };

// The four tiles of sums += x times `steps` steps. fetch(step) prefetches.
template <Weight W, typename M, typename F>
[[gnu::always_inline]] inline void add_made(M& tiles, const c10::BFloat16* x, const c10::BFloat16* made, int64_t steps,
                                            const F& fetch) {
  for (int64_t s = 0; s < steps; ++s, x += TILE, made += MADE) {
    tiles.template load<4>(x, WIDTH_BYTES);
    fetch(s);
    tiles.template load<5>(made, MADE_STRIDE);
    W == Weight::A ? tiles.template dot<0, 5, 4>() : tiles.template dot<0, 4, 5>();
    tiles.template load<6>(made + 32, MADE_STRIDE);
    W == Weight::A ? tiles.template dot<1, 6, 4>() : tiles.template dot<1, 4, 6>();
    tiles.template load<7>(made + 64, MADE_STRIDE);
    W == Weight::A ? tiles.template dot<2, 7, 4>() : tiles.template dot<2, 4, 7>();
    tiles.template load<5>(made + 96, MADE_STRIDE);
    W == Weight::A ? tiles.template dot<3, 5, 4>() : tiles.template dot<3, 4, 5>();
  }
}

template <typename M>
void zero_made(M& tiles) {
  tiles.template zero<0>();
  tiles.template zero<1>();
  tiles.template zero<2>();
  tiles.template zero<3>();
}

template <typename M>
void load_made(M& tiles, const float* from) {
  tiles.template load<0>(from, MADE_STRIDE);
  tiles.template load<1>(from + LANES, MADE_STRIDE);
  tiles.template load<2>(from + 2 * LANES, MADE_STRIDE);
  tiles.template load<3>(from + 3 * LANES, MADE_STRIDE);
}

template <typename M>
void store_made(M& tiles, float* to) {
  tiles.template store<0>(to, MADE_STRIDE);
  tiles.template store<1>(to + LANES, MADE_STRIDE);
  tiles.template store<2>(to + 2 * LANES, MADE_STRIDE);
  tiles.template store<3>(to + 3 * LANES, MADE_STRIDE);
}

// Rows of x times `count` panels of `steps` steps. source.make(panel, step, steps, part, parts, to) makes a part of the
// tiles of some steps; source.fetch(panel, step, steps, part, parts) prefetches a part of what that reads into L2.
// Calls leave(panel, group, row, sums), with sums [16][64] of float, for each panel, each group of `of_group` steps in
// order and each 16 rows. With more than 16 rows, each 16 make a part of the next block while tiles are computed.
template <Weight W, typename M, typename S, typename L>
void sum_made(M& tiles, const c10::BFloat16* x, int64_t rows, int64_t steps, int64_t of_group, const S& source,
              int64_t count, const L& leave) {
  const int64_t high = high_of(rows);
  alignas(LINE) float out[MADE_SUMS];
  if (high == 1) {  // each step is made one step early, so that its stores are complete when a tile loads it
    alignas(LINE) c10::BFloat16 made[2][MADE];
    for (int64_t p = 0; p < count; ++p) {
      source.make(p, 0, 1, 0, 1, made[0]);
      for (int64_t s = 0, group = 0, left = 0; s < steps; ++s) {
        if (left == 0) zero_made(tiles), left = std::min(of_group, steps - s);
        if (s + 1 < steps) source.make(p, s + 1, 1, 0, 1, made[(s + 1) % 2]);
        add_made<W>(tiles, x + s * TILE, made[s % 2], 1, [](int64_t) {});
        if (--left > 0) continue;
        store_made(tiles, out);
        leave(p, group++, int64_t{0}, out);
      }
    }
    return;
  }
  auto* made = own_memory<3, c10::BFloat16>(2 * MADE_DEEP * MADE);
  float* waiting = own_memory<1, float>(count * high * MADE_SUMS);
  struct Block {
    int64_t panel, from, deep;  // steps: whole groups, or a part of one; 0 after the last block
  };
  const auto block_at = [&](int64_t panel, int64_t from) -> Block {
    const int64_t most = of_group > MADE_DEEP ? std::min(MADE_DEEP, of_group - from % of_group)
                                              : MADE_DEEP / of_group * of_group;
    return {panel, from, std::min(most, steps - from)};
  };
  const auto after = [&](const Block& block) {
    return block.panel + 1 < count ? Block{block.panel + 1, block.from, block.deep} : block_at(0, block.from + block.deep);
  };
  Block here = block_at(0, 0), next = after(here);
  source.make(0, 0, here.deep, 0, 1, made);
  for (bool odd = false; here.deep > 0; odd = !odd, here = next, next = next.deep > 0 ? after(next) : next) {
    const c10::BFloat16* own = made + (odd ? MADE_DEEP * MADE : 0);
    c10::BFloat16* other = made + (odd ? 0 : MADE_DEEP * MADE);
    Block then = next.deep > 0 ? after(next) : next;
    if (next.deep > 0 && then.deep == 0) then = block_at(count, 0);  // another task reads the panel after these
    const int64_t first = here.from / of_group;
    for (int64_t tile = 0; tile < high; ++tile) {
      if (next.deep > 0) source.make(next.panel, next.from, next.deep, tile, high, other);
      if (then.deep > 0) source.fetch(then.panel, then.from, then.deep, tile, high);
      float* kept = waiting + (here.panel * high + tile) * MADE_SUMS;
      for (int64_t s = here.from, group = first, some; s < here.from + here.deep; s += some, ++group) {
        const int64_t end = std::min((group + 1) * of_group, steps);
        some = std::min(end, here.from + here.deep) - s;
        const bool waited = s != group * of_group;
        waited ? load_made(tiles, kept) : zero_made(tiles);
        add_made<W>(tiles, x + (tile * steps + s) * TILE, own + (s - here.from) * MADE, some, [=](int64_t step) {
          if (!waited) return;
          constexpr int64_t SHARE = (MADE_SUMS * 4 / LINE + MADE_DEEP - 1) / MADE_DEEP;  // lines of the next rows' sums
          for (int64_t line = step * SHARE; line < (step + 1) * SHARE; ++line)
            __builtin_prefetch(reinterpret_cast<const char*>(kept + MADE_SUMS) + line * LINE, 0, 3);
        });
        if (s + some < end) {
          store_made(tiles, kept);
        } else {
          store_made(tiles, out);
          leave(here.panel, group, tile * TILE_ROWS, out);
        }
      }
    }
  }
}

}  // namespace tandem

#endif
