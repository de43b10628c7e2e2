// Matrix products: of linear layers, whose weights are packed into panels once, and of any other two matrices.
#include "ops.h"

#include "capture.h"
#include "dots.h"
#include "functions.h"
#include "tile_blocks.h"

#include <ATen/Parallel.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace tandem {
namespace {

using at::BFloat16;
using at::Tensor;

constexpr int64_t PANEL_BYTES = 1 << 18;  // rows that stay in the L2 cache while all columns are read

// ---- any two matrices

constexpr int64_t DISTANCE = 4;  // prefetch distance in blocks of columns

// y [m, n] = x [m, k] times w [n, k] transposed, plus bias. The weight is read in blocks of four columns, in memory
// order, once for each panel of rows. The hardware prefetcher loses track at the end of every short column, so with few
// rows each tile prefetches its share of a later block: twice as fast with one row.
template <typename D, typename T>
void by_columns(const typename D::X* x, int64_t x_row, const typename D::W* w, int64_t w_row, const T* bias, T* y,
                int64_t y_row, int64_t m, int64_t k, int64_t n) {
  const int64_t row_bytes = std::max<int64_t>(1, k) * sizeof(typename D::X), block_bytes = COLS * w_row * sizeof(*w);
  const int64_t panel = std::max<int64_t>(1, PANEL_BYTES / row_bytes / ROWS) * ROWS;
  const int64_t grain = std::max<int64_t>(1, TASK_BYTES / std::max<int64_t>(1, block_bytes * ((m + ROWS - 1) / ROWS)));
  at::parallel_for(0, (n + COLS - 1) / COLS, grain, [&](int64_t begin, int64_t end) {
    for (int64_t top = 0; top < m; top += panel) {
      const int64_t bottom = std::min(m, top + panel), tiles = (bottom - top + ROWS - 1) / ROWS;
      const int64_t height = (bottom - top + tiles - 1) / tiles;
      const int64_t lines = tiles > COLS ? 0 : (COLS + tiles - 1) / tiles;
      const int64_t share = (block_bytes / tiles + LINE - 1) / LINE * LINE;
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * COLS;
        const int count = static_cast<int>(std::min<int64_t>(COLS, n - first));
        const typename D::W* columns[COLS];
        float add[COLS] = {};
        for (int c = 0; c < COLS; ++c) {
          columns[c] = w + (first + std::min(c, count - 1)) * w_row;
          if (bias != nullptr) add[c] = static_cast<float>(bias[first + std::min(c, count - 1)]);
        }
        const char* later = reinterpret_cast<const char*>(w) + (block + DISTANCE) * block_bytes;
        for (int64_t row = top; row < bottom; row += height, later += share) {
          const int rows = static_cast<int>(std::min(height, bottom - row));
          float sums[ROWS][COLS];
          dot_rows<D>(rows, x + row * x_row, x_row, columns, k, {later, lines}, sums);
          for (int r = 0; r < rows; ++r) {
            for (int c = 0; c < COLS; ++c) sums[r][c] += add[c];
            put_row(sums[r], count, y + (row + r) * y_row + first);
          }
        }
      }
    }
  });
}

#ifdef TANDEM_TILES

// Swaps rows[i][j] and rows[j][i].
[[gnu::always_inline]] inline void transpose(__m512i (&rows)[16]) {
  __m512i pairs[16], fours[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + 2 + j]);
      fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + 2 + j]);
    }
  for (int j = 0; j < 4; ++j) {  // quarter q of fours[i + j] has column 4 q + j of the rows i to i + 3
    const __m512i even = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88), odd = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd);
    const __m512i evens = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88), odds = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd);
    rows[j] = _mm512_shuffle_i32x4(even, evens, 0x88);
    rows[4 + j] = _mm512_shuffle_i32x4(odd, odds, 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(even, evens, 0xdd);
    rows[12 + j] = _mm512_shuffle_i32x4(odd, odds, 0xdd);
  }
}

// x [m, k] in tiles of pairs, [m / 16][k / 32][16 pairs][16 rows][2], in the calling thread's memory.
const BFloat16* pairs_of(const BFloat16* x, int64_t x_row, int64_t m, int64_t k) {
  const int64_t steps = steps_of(k), high = high_of(m);
  auto* to = own_memory<0, BFloat16>(high * steps * TILE);
  at::parallel_for(0, high, std::max<int64_t>(1, TASK_BYTES / (steps * TILE * 2)), [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile)
      for (int64_t s = 0; s < steps; ++s) {
        __m512i rows[TILE_ROWS];
        for (int64_t r = 0; r < TILE_ROWS; ++r) {
          const int64_t row = tile * TILE_ROWS + r, at = s * TILE_K;
          rows[r] = _mm512_maskz_loadu_epi16(row < m ? mask_of(k - at) : 0, x + row * x_row + at);
        }
        transpose(rows);
        for (int64_t r = 0; r < TILE_ROWS; ++r) _mm512_store_si512(to + (tile * steps + s) * TILE + r * TILE_K, rows[r]);
      }
  });
  return to;
}

// Contiguous columns of a weight, k elements each; sum_made's tiles are copies, and nothing past k is read.
struct Columns {
  const BFloat16* first;
  int64_t stride, k, n;

  int64_t pieces(int64_t) const { return MADE_COLUMNS; }

  void make(int64_t panel, int64_t step, int64_t steps, int64_t column, int64_t end, BFloat16* to) const {
    const int64_t begin = panel * MADE_COLUMNS, count = std::min(MADE_COLUMNS, n - begin);
    for (; column < end; ++column) {
      const BFloat16* from = first + (begin + column) * stride + step * TILE_K;
      BFloat16* into = to + column / TILE_ROWS * TILE + column % TILE_ROWS * TILE_K;
      for (int64_t s = 0; s < steps; ++s, into += MADE) {
        const __mmask32 there = column < count ? mask_of(k - (step + s) * TILE_K) : 0;
        _mm512_store_si512(into, _mm512_maskz_loadu_epi16(there, from + s * TILE_K));
        __builtin_prefetch(from + MADE_COLUMNS * stride + s * TILE_K, 0, 2);  // of the next panel
      }
    }
  }

  int64_t lines(int64_t) const { return 0; }
  void fetch(int64_t, int64_t, int64_t, int64_t) const {}
};

// Stores up to 16 rows' sums with 64 columns, [16][4][16] of (column, block, row), plus bias, rounded, as rows of y.
void leave_turned(const float* sums, int64_t rows, const BFloat16* bias, BFloat16* y, int64_t stride, int64_t columns) {
  for (int64_t block = 0; block < MADE_TILES; block += 2) {
    const int64_t first = block * LANES;
    if (first >= columns) break;
    const auto narrow = [&](int64_t column) {
      Vec sum = load(sums + column % TILE_ROWS * MADE_COLUMNS + column / TILE_ROWS * LANES);
      if (bias != nullptr) sum = sum + Vec(static_cast<float>(bias[std::min(column, columns - 1)]));
      return _mm512_cvtepu16_epi32(at::vec::cvtfp32_bf16(sum));
    };
    __m512i pairs[TILE_ROWS];
    for (int64_t i = 0; i < TILE_ROWS; ++i)
      pairs[i] = _mm512_or_si512(narrow(first + 2 * i), _mm512_slli_epi32(narrow(first + 2 * i + 1), 16));
    transpose(pairs);
    for (int64_t r = 0; r < rows; ++r)
      _mm512_mask_storeu_epi16(y + r * stride + first, mask_of(columns - first), pairs[r]);
  }
}

// The same as by_columns, by tiles: the weight's columns are the rows of A.
void by_column_tiles(const BFloat16* x, int64_t x_row, const BFloat16* w, int64_t w_row, const BFloat16* bias, BFloat16* y,
                     int64_t y_row, int64_t m, int64_t k, int64_t n) {
  const int64_t steps = steps_of(k), panels = (n + MADE_COLUMNS - 1) / MADE_COLUMNS;
  const BFloat16* tiled = pairs_of(x, x_row, m, k);
  share_tiles(m, steps, panels, MADE_TOGETHER, steps * MADE * 2, TILE_ROWS,
              [&](auto& tiles, int64_t panel, int64_t count, int64_t from, int64_t rows) {
    const Columns source{w + panel * MADE_COLUMNS * w_row, w_row, k, n - panel * MADE_COLUMNS};
    sum_made<Weight::A>(tiles, tiled + from * steps * TILE_K, rows, steps, steps, source, count,
                        [&](int64_t p, int64_t, int64_t row, int64_t some, const float* sums) {
      const int64_t first = (panel + p) * MADE_COLUMNS;
      leave_turned(sums, some, bias == nullptr ? nullptr : bias + first,
                   y + (from + row) * y_row + first, y_row, n - first);
    });
  });
}

#endif

// y [m, n] = x [m, k] times w [k, n].
template <typename T>
void by_rows(const float* x, int64_t x_row, const T* w, int64_t w_row, T* y, int64_t y_row, int64_t m, int64_t k,
             int64_t n) {
  constexpr int64_t WIDTH = 4 * LANES;
  const std::vector<float> one(ROWS, 1.0f);
  const int64_t grain = std::max<int64_t>(1, TASK_BYTES / std::max<int64_t>(1, WIDTH * k * sizeof(T)));
  at::parallel_for(0, (n + WIDTH - 1) / WIDTH, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      for (int64_t row = 0; row < m; row += ROWS) {
        const int64_t first = block * WIDTH;
        const auto line = [&](int64_t t) { return w + t * w_row + first; };
        weighted_sums<T>(std::min<int64_t>(ROWS, m - row), x + row * x_row, x_row, line, 0, k,
                         std::min(WIDTH, n - first), one.data(), y + row * y_row + first, y_row);
      }
  });
}

}  // namespace

bool served(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16; }

void product(const Tensor& x, const Tensor& w, const Tensor& bias, Tensor& y) {
  const int64_t m = x.size(0), k = x.size(1), n = w.size(1);
  if (m == 0 || n == 0) return;
  const bool columns = w.stride(0) == 1 || k == 1, lines = !columns && w.stride(1) == 1;
  const Tensor fit = columns || lines ? w : w.contiguous();
  const auto run = [&](auto* into) {
    using T = std::remove_pointer_t<decltype(into)>;
    using D = std::conditional_t<std::is_same_v<T, float>, Widened<float>, Bf16>;
    using X = typename D::X;
    if (columns) {
      const Tensor rows = rows_of(x).to(c10::CppTypeToScalarType<X>::value);
      const auto multiply = [&](const auto& by) {
        by(rows.const_data_ptr<X>(), rows.stride(0), fit.const_data_ptr<T>(), fit.stride(1),
           bias.defined() ? bias.const_data_ptr<T>() : nullptr, into, y.stride(0), m, k, n);
      };
#ifdef TANDEM_TILES
      if constexpr (std::is_same_v<D, Pairs>)
        if (by_tiles() && k > 0) return multiply(by_column_tiles);
#endif
      multiply(by_columns<D, T>);
    } else {
      const Tensor rows = rows_of(x).to(at::kFloat);
      by_rows(rows.const_data_ptr<float>(), rows.stride(0), fit.const_data_ptr<T>(), fit.stride(0), into, y.stride(0), m,
              k, n);
    }
  };
  y.scalar_type() == at::kFloat ? run(y.data_ptr<float>()) : run(y.data_ptr<BFloat16>());
}

namespace {

// ---- linear layers

// A tile has eight rows with AVX-512, so that a decode step of eight streams reads each weight once.
constexpr int COLUMNS = 3;  // vectors of a tile
#ifdef CPU_CAPABILITY_AVX512
constexpr int HEIGHT = 8;  // rows of a tile at most: 24 sums, 3 columns and a row fit into 32 registers
#else
constexpr int HEIGHT = 4;  // 12, 3 and a row into 16
#endif
constexpr int64_t PANEL = COLUMNS * LANES;

// Weights are packed once, into panels: [n / PANEL][k / GROUP][PANEL][GROUP], or, in the order tile32, whole tiles one
// after another (tile_panels.h). The last panel and, where GROUP is 2, k are padded with zeros. A panel is read from
// front to back, so a decode step streams through memory in one direction. The bits of a sum do not depend on the other
// rows, nor on the height of the tile.
template <typename D>
int64_t panel_size(int64_t k) {
  constexpr int64_t MULTIPLE = D::GROUP == 1 ? 1 : TILE_K;
  return PANEL * ((k + MULTIPLE - 1) / MULTIPLE * MULTIPLE);
}

template <typename D>
int64_t packed_size(int64_t n, int64_t k) {
  return (n + PANEL - 1) / PANEL * panel_size<D>(k);
}

// Where a column's group is in a panel.
template <typename D>
int64_t place_of(bool tiled, int64_t group, int64_t column) {
  if (!tiled) return group * PANEL + column;
  return (group / TILE_ROWS * COLUMNS + column / LANES) * SUMS + group % TILE_ROWS * LANES + column % LANES;
}

template <typename D>
void pack_panels(const typename D::W* w, int64_t n, int64_t k, typename D::W* out) {
  const int64_t groups = panel_size<D>(k) / PANEL / D::GROUP;
  const bool tiled = D::GROUP == 2 && by_tiles();
  at::parallel_for(0, (n + PANEL - 1) / PANEL, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel)
      for (int64_t group = 0; group < groups; ++group)
        for (int64_t column = 0; column < PANEL; ++column)
          for (int64_t i = 0; i < D::GROUP; ++i) {
            const int64_t row = panel * PANEL + column, at = group * D::GROUP + i;
            out[(panel * groups * PANEL + place_of<D>(tiled, group, column)) * D::GROUP + i] =
                row < n && at < k ? w[row * k + at] : typename D::W(0.0f);
          }
  });
}

// The rows `ids` of the weight [n, k] that was packed; out [ids, k].
template <typename D>
void unpack_rows(const Tensor& ids, const Tensor& packed, int64_t n, int64_t k, Tensor& out) {
  using W = typename D::W;
  TORCH_CHECK(packed.numel() == packed_size<D>(n, k), "tandem::look_up: not packed for this size or type");
  const int64_t groups = panel_size<D>(k) / PANEL / D::GROUP;
  const bool tiled = D::GROUP == 2 && by_tiles();
  const W* panels = packed.const_data_ptr<W>();
  const int64_t* wanted = ids.const_data_ptr<int64_t>();
  W* rows = out.mutable_data_ptr<W>();
  for (int64_t i = 0; i < ids.numel(); ++i)
    TORCH_CHECK_INDEX(wanted[i] >= 0 && wanted[i] < n, "index out of range in tandem::look_up");
  at::parallel_for(0, ids.numel(), 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const W* panel = panels + wanted[i] / PANEL * groups * PANEL * D::GROUP;
      for (int64_t group = 0; group * D::GROUP < k; ++group) {
        const W* from = panel + place_of<D>(tiled, group, wanted[i] % PANEL) * D::GROUP;
        for (int64_t at = group * D::GROUP; at < std::min(k, (group + 1) * D::GROUP); ++at, ++from)
          rows[i * k + at] = *from;
      }
    }
  });
}

// The product with one weight: y [m, n] = x times the weight, plus bias [n], rounded, plus beside [m, n]. `bias` and
// `beside` may be null.
template <typename W, typename T>
struct Product {
  const W* packed;
  const T* bias;
  const T* beside;
  T* y;
  int64_t n;
  int64_t panels() const { return (n + PANEL - 1) / PANEL; }
};

// R rows of x times one panel; bias, beside and y point to its first row and column.
template <typename D, Fetch FETCH, int R, typename T>
void panel_tile(const typename D::X* x, int64_t k, const typename D::W* panel, const char* later, const T* bias,
                const T* beside, T* y, int64_t stride, int64_t columns) {
  Vec sums[R][COLUMNS];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < COLUMNS; ++c) sums[r][c] = Vec(0.0f);
  add_panel<D, R, FETCH>(x, k, k, panel, later, sums);
  for (int c = 0; c < COLUMNS; ++c) {
    const int64_t count = std::min<int64_t>(LANES, columns - c * LANES);
    if (count <= 0) break;
    Vec add(0.0f);
    if (bias != nullptr) add = count == LANES ? load(bias + c * LANES) : load(bias + c * LANES, static_cast<int>(count));
    for (int r = 0; r < R; ++r) {
      const int64_t at = r * stride + c * LANES;
      Vec sum = bias == nullptr ? sums[r][c] : sums[r][c] + add;
      if (beside != nullptr)
        sum = rounded<T>(sum) + (count == LANES ? load(beside + at) : load(beside + at, static_cast<int>(count)));
      put(sum, y + at, count);
    }
  }
}

template <typename D, Fetch FETCH, typename T, int R = HEIGHT>
void panel_rows(int64_t rows, const typename D::X* x, int64_t k, const typename D::W* panel, const char* later,
                const T* bias, const T* beside, T* y, int64_t stride, int64_t columns) {
  if (rows == R) return panel_tile<D, FETCH, R, T>(x, k, panel, later, bias, beside, y, stride, columns);
  if constexpr (R > 1) panel_rows<D, FETCH, T, R - 1>(rows, x, k, panel, later, bias, beside, y, stride, columns);
}

constexpr int64_t FEW = 2 * HEIGHT;  // rows up to which reading the weight, panel after panel, bounds a product

// x [m, k] times weights of `panels` panels in total: shares run(panel, from, rows), for each panel and each part of
// the rows, out to the threads.
template <typename D, typename F>
void share_panels(int64_t m, int64_t k, int64_t panels, const F& run) {
  const int64_t parts = parts_of(m, panels, 4 * HEIGHT);
  const int64_t part = (m + parts - 1) / parts;
  const int64_t grain = std::max<int64_t>(1, TASK_BYTES / (panel_size<D>(k) * static_cast<int64_t>(sizeof(typename D::W)) +
                                                           part * k * static_cast<int64_t>(sizeof(float))));
  const auto run_tasks = [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t from = task % parts * part, rows = std::min(part, m - from);
      if (rows > 0) run(task / parts, from, rows);
    }
  };
  share_out(panels * parts, grain, run_tasks);
}

// Rows of x times one panel, tile by tile. The next panel, to be prefetched, is at `later`; y and beside, which may be
// null, point to the first row and column.
template <typename D, typename T>
void multiply_panel(const typename D::X* x, int64_t rows, int64_t k, const typename D::W* panel,
                    const typename D::W* later, const T* bias, const T* beside, T* y, int64_t stride, int64_t columns) {
  const int64_t tiles = (rows + HEIGHT - 1) / HEIGHT, height = (rows + tiles - 1) / tiles;
  const char* next = reinterpret_cast<const char*>(later);
  const int64_t most = panel_size<D>(k) * sizeof(typename D::W) * (COLUMNS - COLUMNS / 2) / COLUMNS;
  for (int64_t row = 0; row < rows; row += height) {
    const auto run = [&](auto fetch, const char* from) {
      panel_rows<D, decltype(fetch)::value, T>(std::min(height, rows - row), x + row * k, k, panel, from, bias,
                                               beside == nullptr ? nullptr : beside + row * stride, y + row * stride,
                                               stride, columns);
    };
    if (tiles == 1)
      run(std::integral_constant<Fetch, Fetch::SOON>(), nullptr);
    else if (row == 0)
      run(std::integral_constant<Fetch, Fetch::MOST>(), next);
    else if (row == height)
      run(std::integral_constant<Fetch, Fetch::REST>(), next + most);
    else
      run(std::integral_constant<Fetch, Fetch::NOTHING>(), nullptr);
  }
}

// x [m, k] times several weights.
template <typename D, typename T>
void multiply(const typename D::X* x, int64_t m, int64_t k, const std::vector<Product<typename D::W, T>>& products) {
  int64_t panels = 0;
  for (const auto& each : products) panels += each.panels();
  share_panels<D>(m, k, panels, [&](int64_t panel, int64_t from, int64_t rows) {
    const auto* to = products.data();
    for (; panel >= to->panels(); ++to) panel -= to->panels();
    const int64_t first = panel * PANEL, at = from * to->n + first;
    const auto* here = to->packed + panel * panel_size<D>(k);
    multiply_panel<D, T>(x + from * k, rows, k, here, here + panel_size<D>(k),
                         to->bias == nullptr ? nullptr : to->bias + first,
                         to->beside == nullptr ? nullptr : to->beside + at, to->y + at, to->n, to->n - first);
  });
}

// y [m, n] = act(x times one weight) times (x times another), each rounded separately. Both weights have n columns.
template <typename D, typename T, typename F>
void multiply_gated(const typename D::X* x, int64_t m, int64_t k, const Product<typename D::W, T>& gated,
                    Product<typename D::W, T> up, const F& act) {
  if (m <= FEW) {  // one weight after the other, each read in one direction
    std::vector<T> memory(m * up.n);
    up.y = memory.data();
    multiply<D, T>(x, m, k, {gated, up});
    return gate(gated.y, up.y, gated.y, m * up.n, act);
  }
  share_panels<D>(m, k, gated.panels(), [&](int64_t panel, int64_t from, int64_t rows) {
    static thread_local std::vector<T> memory;  // results of `up` for this panel
    if (static_cast<int64_t>(memory.size()) < rows * PANEL) memory.resize(rows * PANEL);
    const int64_t n = gated.n, first = panel * PANEL, columns = std::min<int64_t>(PANEL, n - first);
    const auto *here = gated.packed + panel * panel_size<D>(k), *there = up.packed + panel * panel_size<D>(k);
    const auto bias = [&](const auto& of) { return of.bias == nullptr ? nullptr : of.bias + first; };
    T* y = gated.y + from * n + first;
    multiply_panel<D, T>(x + from * k, rows, k, here, there, bias(gated), nullptr, y, n, columns);
    multiply_panel<D, T>(x + from * k, rows, k, there, here + panel_size<D>(k), bias(up), nullptr, memory.data(), PANEL,
                         columns);
    for (int64_t row = 0; row < rows; ++row)
      gate(y + row * n, memory.data() + row * PANEL, y + row * n, columns, act);
  });
}

#ifdef TANDEM_TILES

static_assert(PANEL == TILES_WIDE * LANES);

// The sums of a panel of tiles.
RowSums of_panel(const float* sums) { return {sums, LANES, SUMS}; }

using TileProduct = Product<BFloat16, BFloat16>;

// x [m, k] times several weights, whose panels are shared out together.
void multiply_tiles(const ManyRows& x, int64_t m, int64_t k, const std::vector<TileProduct>& products) {
  const int64_t steps = steps_of(k), size = steps * STEP;
  int64_t all = 0;
  for (const TileProduct& to : products) all += to.panels();
  share_tiles(m, steps, all, TOGETHER, size * 2, std::min(m, TILE_ROWS),
              [&](auto& tiles, int64_t panel, int64_t count, int64_t from, int64_t rows) {
    const TileProduct* of[2 * TOGETHER];
    const BFloat16* panels[2 * TOGETHER];
    int64_t first[2 * TOGETHER];  // first column of the panel
    for (int64_t p = 0; p < 2 * count; ++p) {
      int64_t at = std::min(panel + p, all - 1);
      for (of[p] = products.data(); at >= of[p]->panels(); ++of[p]) at -= of[p]->panels();
      panels[p] = of[p]->packed + at * size, first[p] = at * PANEL;
    }
    const auto put_rows = [&](int64_t p, int64_t row, int64_t some, const float* sums) {
      const TileProduct& to = *of[p];
      const int64_t at = (from + row) * to.n + first[p], height = std::min(some, rows - row);
      const BFloat16* bias = to.bias == nullptr ? nullptr : to.bias + first[p];
      if (to.beside == nullptr)
        return leave_rows<TILES_WIDE>(of_panel(sums), height, to.n - first[p], nullptr, bias, nullptr, 0, to.y + at, to.n,
                                      [](Vec sum, Vec) { return sum; });
      leave_rows<TILES_WIDE>(of_panel(sums), height, to.n - first[p], nullptr, bias, to.beside + at, to.n, to.y + at, to.n,
                             [](Vec sum, Vec beside) { return rounded<BFloat16>(sum) + beside; });
    };
    sum_panels(tiles, x, from, rows, steps, panels, count, put_rows);
  });
}

// gated.y = act(x times one weight) times (x times another), each rounded separately.
template <typename F>
void multiply_gated_tiles(const ManyRows& x, int64_t m, int64_t k, const TileProduct& gated, TileProduct up,
                          const F& act) {
  if (m > TILE_ROWS && m <= 2 * TILE_ROWS) {  // one weight after the other, each read in one direction
    up.y = own_memory<2, BFloat16>(m * up.n);
    multiply_tiles(x, m, k, {gated, up});
    return gate(gated.y, up.y, gated.y, m * up.n, act);
  }
  const int64_t steps = steps_of(k), size = steps * STEP, n = gated.n;
  const TileProduct* both[] = {&gated, &up};
  share_tiles(m, steps, gated.panels(), TOGETHER / 2, size * 2, std::min(m, TILE_ROWS),
              [&](auto& tiles, int64_t panel, int64_t count, int64_t from, int64_t rows) {
    const BFloat16* panels[2 * TOGETHER];
    for (int64_t p = 0; p < 4 * count; ++p)
      panels[p] = both[p % 2]->packed + std::min(panel + p / 2, gated.panels() - 1) * size;
    // act(x times a panel of the first weight) for some rows, until the sums of the second weight's panel leave.
    alignas(LINE) BFloat16 gate_rows[BY_PANELS * PANEL];
    const auto put_rows = [&](int64_t p, int64_t row, int64_t some, const float* sums) {
      const int64_t first = (panel + p / 2) * PANEL, height = std::min(some, rows - row);
      const TileProduct& of = *both[p % 2];
      const BFloat16* bias = of.bias == nullptr ? nullptr : of.bias + first;
      BFloat16* gate = gate_rows + row % BY_PANELS * PANEL;
      if (p % 2 == 0)
        return leave_rows<TILES_WIDE>(of_panel(sums), height, n - first, nullptr, bias, nullptr, 0, gate, PANEL,
                                      [](Vec sum, Vec) { return F::template of<BFloat16>(rounded<BFloat16>(sum)); });
      leave_rows<TILES_WIDE>(of_panel(sums), height, n - first, nullptr, bias, gate, PANEL,
                             gated.y + (from + row) * n + first, n,
                             [](Vec sum, Vec gate) { return gate * rounded<BFloat16>(sum); });
    };
    sum_panels(tiles, x, from, rows, steps, panels, 2 * count, put_rows);
  });
}

#endif

// Packs weight [n, k] into panels for `linear`; flat.
Tensor pack(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && served(weight.scalar_type()), "tandem::pack wants a matrix of float32 or bfloat16");
  const Tensor from = weight.contiguous();
  const int64_t n = from.size(0), k = from.size(1);
  if (from.scalar_type() == at::kFloat) {
    Tensor out = at::empty({packed_size<Widened<float>>(n, k)}, from.options());
    pack_panels<Widened<float>>(from.const_data_ptr<float>(), n, k, out.data_ptr<float>());
    return out;
  }
  Tensor out = at::empty({packed_size<Bf16>(n, k)}, from.options());
  pack_panels<Bf16>(from.const_data_ptr<BFloat16>(), n, k, out.data_ptr<BFloat16>());
  return out;
}

// Rows of a packed weight [n, k], as an embedding that is tied to it looks them up: [*ids, k], the weight's bits.
Tensor look_up(const Tensor& ids, const Tensor& packed, int64_t n, int64_t k) {
  TORCH_CHECK(ids.scalar_type() == at::kLong && served(packed.scalar_type()), "tandem::look_up: another type");
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(k);
  Tensor out = at::empty(shape, packed.options());
  if (packed.scalar_type() == at::kFloat)
    unpack_rows<Widened<float>>(ids.contiguous(), packed, n, k, out);
  else
    unpack_rows<Bf16>(ids.contiguous(), packed, n, k, out);
  return out;
}

using Biases = std::vector<std::optional<Tensor>>;

// x [m, k] times packed weights into `out`, plus `beside` if defined, or gated by `act` if not empty.
template <typename D, typename T>
struct Multiplication {
  Tensor x, beside;
  std::vector<Tensor> weights, out;
  Biases biases;
  int64_t k;
  std::string act;
  std::vector<Product<typename D::W, T>> products = {};  // pointers into the tensors above

  void prepare() {
    for (size_t i = 0; i < out.size(); ++i) {
      const std::optional<Tensor>& bias = biases[i];
      const int64_t n = out[i].size(-1);
      TORCH_CHECK(weights[i].scalar_type() == x.scalar_type() && weights[i].numel() == packed_size<D>(n, k),
                  "tandem::linear: not packed for this size or type");
      TORCH_CHECK(!bias.has_value() ||
                      (bias->scalar_type() == x.scalar_type() && bias->is_contiguous() && bias->numel() == n),
                  "tandem::linear wants a bias of the weight's type and size");
      products.push_back({weights[i].const_data_ptr<T>(), bias.has_value() ? bias->const_data_ptr<T>() : nullptr,
                          beside.defined() ? beside.const_data_ptr<T>() : nullptr, out[i].data_ptr<T>(), n});
    }
  }

  void run() const {
    const int64_t m = x.numel() / std::max<int64_t>(1, k);
    const auto type = c10::CppTypeToScalarType<typename D::X>::value;
    const Tensor rows = x.scalar_type() == type ? x : x.to(type);
    const auto* from = rows.const_data_ptr<typename D::X>();
#ifdef TANDEM_TILES
    if constexpr (std::is_same_v<D, Pairs>)
      if (by_tiles()) {
        if (m == 0) return;
        int64_t columns = 0;
        for (const auto& each : products) columns += each.n;
        const ManyRows tiled = rows_for(from, m, k, columns);
        if (act.empty()) return multiply_tiles(tiled, m, k, products);
        return with_act(act, [&](const auto& f) { multiply_gated_tiles(tiled, m, k, products[0], products[1], f); });
      }
#endif
    if (act.empty()) return multiply<D, T>(from, m, k, products);
    with_act(act, [&](const auto& f) { multiply_gated<D, T>(from, m, k, products[0], products[1], f); });
  }
};

template <typename F>
void with_multiplication(const Tensor& x, const F& f) {
  x.scalar_type() == at::kFloat ? f(Multiplication<Widened<float>, float>{}) : f(Multiplication<Bf16, BFloat16>{});
}

std::vector<Tensor> multiply_all(const Tensor& x, at::TensorList packed, Biases biases, at::IntArrayRef n, int64_t k,
                                 const Tensor& beside, c10::string_view act = "") {
  TORCH_CHECK(x.size(-1) == k && served(x.scalar_type()) && packed.size() == n.size() && biases.size() == n.size(),
              "tandem::linear: x is ", x.sizes(), " of ", x.scalar_type(), ", the weights' rows have ", k, " elements");
  std::vector<int64_t> sizes = x.sizes().vec();
  std::vector<Tensor> out;
  for (const int64_t columns : n) {
    sizes.back() = columns;
    out.push_back(!act.empty() && !out.empty() ? out[0] : at::empty(sizes, x.options()));
  }
  with_multiplication(x, [&](auto of_type) {
    of_type = {x.contiguous(), beside, packed.vec(), out, std::move(biases), k, std::string(act)};
    of_type.prepare();
    of_type.run();
  });
  return out;
}

Replay replay_of_products(const Tensor& x, std::vector<Tensor> packed, Biases biases, int64_t k, const Tensor& beside,
                     std::vector<Tensor> out, const std::string& act = "") {
  if (!x.is_contiguous() || (beside.defined() && !beside.is_contiguous())) return {};
  Replay replay;
  with_multiplication(x, [&](auto of_type) {
    of_type = {x, beside, std::move(packed), std::move(out), std::move(biases), k, act};
    of_type.prepare();
    replay = [own = std::move(of_type)] { own.run(); };
  });
  return replay;
}

std::optional<Tensor> if_any(const c10::IValue& value) {
  return value.isNone() ? std::nullopt : std::optional<Tensor>(value.toTensor());
}

using torch::jit::Stack;

const bool linear_replayed = register_replay("linear", [](const Stack& in, const Stack& out) {
  return replay_of_products(in[0].toTensor(), {in[1].toTensor()}, {if_any(in[2])}, in[4].toInt(), {}, {out[0].toTensor()});
});
const bool linear_add_replayed = register_replay("linear_add", [](const Stack& in, const Stack& out) {
  return replay_of_products(in[0].toTensor(), {in[1].toTensor()}, {if_any(in[2])}, in[4].toInt(), in[5].toTensor(),
                        {out[0].toTensor()});
});
const bool linears_replayed = register_replay("linears", [](const Stack& in, const Stack& out) {
  return replay_of_products(in[0].toTensor(), in[1].toTensorVector(), in[2].to<c10::List<std::optional<Tensor>>>().vec(),
                        in[4].toInt(), {}, out[0].toTensorVector());
});
const bool linears_gated_replayed = register_replay("linears_gated", [](const Stack& in, const Stack& out) {
  const Tensor y = out[0].toTensor();
  return replay_of_products(in[0].toTensor(), in[1].toTensorVector(), in[2].to<c10::List<std::optional<Tensor>>>().vec(),
                        in[4].toInt(), {}, {y, y}, in[5].toStringRef());
});

// x [..., k] times a packed weight [n, k] transposed, plus bias [n].
Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n, int64_t k) {
  return multiply_all(x, {packed}, {bias}, {n}, k, {})[0];
}

// beside [..., n] plus `linear`, rounded as by two operators.
Tensor linear_add(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n, int64_t k,
                  const Tensor& beside) {
  TORCH_CHECK(beside.scalar_type() == x.scalar_type() && beside.size(-1) == n && beside.numel() * k == x.numel() * n,
              "tandem::linear_add: ", beside.sizes(), " is added to ", x.sizes(), " x ", n);
  return multiply_all(x, {packed}, {bias}, {n}, k, beside.contiguous())[0].view(beside.sizes());
}

// `linear` of the same x with several weights.
std::vector<Tensor> linears(const Tensor& x, at::TensorList packed, const c10::List<std::optional<Tensor>>& biases,
                            at::IntArrayRef n, int64_t k) {
  return multiply_all(x, packed, biases.vec(), n, k, {});
}

// act(`linear` with the first weight) times `linear` with the second, rounded as by three operators.
Tensor linears_gated(const Tensor& x, at::TensorList packed, const c10::List<std::optional<Tensor>>& biases,
                     at::IntArrayRef n, int64_t k, c10::string_view act) {
  TORCH_CHECK(n.size() == 2 && n[0] == n[1], "tandem::linears_gated wants two weights of one size");
  return multiply_all(x, packed, biases.vec(), n, k, {}, act)[0];
}

}  // namespace

void linear_into(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n, int64_t k,
                 const Tensor& y) {
  TORCH_CHECK(served(x.scalar_type()) && x.size(-1) == k && y.size(-1) == n, "tandem::linear_into: x is ", x.sizes());
  with_multiplication(x, [&](auto of_type) {
    of_type = {x, {}, {packed}, {y}, {bias}, k, ""};
    of_type.prepare();
    of_type.run();
  });
}

}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("pack(Tensor weight) -> Tensor");
  m.def("look_up(Tensor ids, Tensor packed, int n, int k) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, Tensor? bias, int n, int k) -> Tensor");
  m.def("linear_add(Tensor x, Tensor packed, Tensor? bias, int n, int k, Tensor beside) -> Tensor");
  m.def("linears(Tensor x, Tensor[] packed, Tensor?[] biases, int[] n, int k) -> Tensor[]");
  m.def("linears_gated(Tensor x, Tensor[] packed, Tensor?[] biases, int[] n, int k, str act) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("pack", &tandem::pack);
  m.impl("look_up", &tandem::look_up);
  m.impl("linear", &tandem::linear);
  m.impl("linear_add", &tandem::linear_add);
  m.impl("linears", &tandem::linears);
  m.impl("linears_gated", &tandem::linears_gated);
}
