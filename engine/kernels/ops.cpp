// The operators `torch.ops.tandem.*`: what a step spends its time in, for float32 and bfloat16 on CPU.
//
// All sums are in float32 and in an order that depends on nothing but the token itself, so that a token's result does
// not depend on what else is in the step, nor on whether it comes there alone or in a chunk.
#include "ops.h"

#include "dots.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace tandem {
namespace {

using at::BFloat16;
using at::Tensor;

constexpr int64_t TASK_BYTES = 1 << 16;   // what one thread reads at least
constexpr int64_t PANEL_BYTES = 1 << 18;  // rows that stay in the second cache while all columns pass

Tensor rows_of(const Tensor& t) { return t.dim() > 0 && t.stride(-1) != 1 && t.size(-1) != 1 ? t.contiguous() : t; }

// ---- products

constexpr int64_t DISTANCE = 4;  // blocks of columns between the one in work and the one on its way from memory

// y [m, n] = x [m, k] times w [n, k] transposed, plus bias. The weight is read block by block of four columns, in the
// order in which it lies in memory, once for each panel of rows. The processor's own prefetching loses the thread at the
// end of every short column, so while there are few rows each tile fetches its share of a later block: this is worth a
// factor of two with one row.
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
      for (int c = 0; c < WIDE; ++c) put(sums[r][c] / Vec(total[r]), out + r * out_stride + d + c * LANES, LANES);
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
      by_columns<D>(rows.const_data_ptr<X>(), rows.stride(0), fit.const_data_ptr<T>(), fit.stride(1),
                    bias.defined() ? bias.const_data_ptr<T>() : nullptr, into, y.stride(0), m, k, n);
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

// Weights are packed once, into panels of PANEL columns: [n / PANEL][k / GROUP][PANEL][GROUP], the last panel filled up
// with zeros. A panel is read from front to back, so a decode step streams through memory in one direction. Every sum
// goes along k in order, in a lane of its own: its bits do not depend on the other rows, nor on how a tile is cut.
constexpr int64_t PANEL = COLS * LANES;
constexpr int64_t STREAM = 2048;  // bytes between what is in work and what is on its way from memory

template <typename D>
int64_t packed_size(int64_t n, int64_t k) {
  return (n + PANEL - 1) / PANEL * PANEL * ((k + D::GROUP - 1) / D::GROUP * D::GROUP);
}

template <typename D>
void pack_panels(const typename D::W* w, int64_t n, int64_t k, typename D::W* out) {
  const int64_t groups = (k + D::GROUP - 1) / D::GROUP;
  at::parallel_for(0, (n + PANEL - 1) / PANEL, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel)
      for (int64_t group = 0; group < groups; ++group)
        for (int64_t column = 0; column < PANEL; ++column)
          for (int64_t i = 0; i < D::GROUP; ++i) {
            const int64_t row = panel * PANEL + column, at = group * D::GROUP + i;
            out[((panel * groups + group) * PANEL + column) * D::GROUP + i] =
                row < n && at < k ? w[row * k + at] : typename D::W(0.0f);
          }
  });
}

// R rows of x times one panel.
template <typename D, int R, typename T>
void panel_tile(const typename D::X* x, int64_t k, const typename D::W* panel, const T* bias, T* y, int64_t stride,
                int64_t columns) {
  Vec sums[R][COLS];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < COLS; ++c) sums[r][c] = Vec(0.0f);
  const auto step = [&](int64_t group, int64_t count) {
    const typename D::W* at = panel + group * PANEL * D::GROUP;
    decltype(D::get(panel)) w[COLS];
    for (int c = 0; c < COLS; ++c) {
      w[c] = D::get(at + c * LANES * D::GROUP);
      __builtin_prefetch(reinterpret_cast<const char*>(at + c * LANES * D::GROUP) + STREAM, 0, 2);
    }
    for (int r = 0; r < R; ++r) {
      const auto value = D::spread(x + r * k + group * D::GROUP, count);
      for (int c = 0; c < COLS; ++c) sums[r][c] = D::dot(value, w[c], sums[r][c]);
    }
  };
  const int64_t whole = k / D::GROUP;
  for (int64_t group = 0; group < whole; ++group) step(group, D::GROUP);
  if (whole * D::GROUP < k) step(whole, k - whole * D::GROUP);
  for (int c = 0; c < COLS; ++c) {
    const int64_t count = std::min<int64_t>(LANES, columns - c * LANES);
    if (count <= 0) break;
    Vec add(0.0f);
    if (bias != nullptr) add = count == LANES ? load(bias + c * LANES) : load(bias + c * LANES, static_cast<int>(count));
    for (int r = 0; r < R; ++r) put(bias == nullptr ? sums[r][c] : sums[r][c] + add, y + r * stride + c * LANES, count);
  }
}

template <typename D, typename T, int R = ROWS>
void panel_rows(int64_t rows, const typename D::X* x, int64_t k, const typename D::W* panel, const T* bias, T* y,
                int64_t stride, int64_t columns) {
  if (rows == R) return panel_tile<D, R, T>(x, k, panel, bias, y, stride, columns);
  if constexpr (R > 1) panel_rows<D, T, R - 1>(rows, x, k, panel, bias, y, stride, columns);
}

template <typename D, typename T>
void linear_rows(const typename D::X* x, const typename D::W* packed, const T* bias, T* y, int64_t m, int64_t k,
                 int64_t n) {
  const int64_t panels = (n + PANEL - 1) / PANEL, threads = at::get_num_threads();
  const int64_t panel_size = PANEL * ((k + D::GROUP - 1) / D::GROUP * D::GROUP);
  // Few panels are shared out with their rows, so that every thread has work.
  const int64_t parts = panels >= 4 * threads ? 1 : std::max<int64_t>(1, std::min(4 * threads, m / (4 * ROWS)));
  const int64_t part = (m + parts - 1) / parts;
  const int64_t grain = std::max<int64_t>(1, TASK_BYTES / (panel_size * static_cast<int64_t>(sizeof(typename D::W)) +
                                                           part * k * static_cast<int64_t>(sizeof(float))));
  at::parallel_for(0, panels * parts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t panel = task / parts, first = panel * PANEL, from = task % parts * part;
      const int64_t rows = std::min(part, m - from);
      if (rows <= 0) continue;
      const int64_t tiles = (rows + ROWS - 1) / ROWS, height = (rows + tiles - 1) / tiles;
      for (int64_t row = from; row < from + rows; row += height)
        panel_rows<D, T>(std::min(height, from + rows - row), x + row * k, k, packed + panel * panel_size,
                         bias == nullptr ? nullptr : bias + first, y + row * n + first, n, n - first);
    }
  });
}

// weight [n, k] in panels, to be used by `linear`; flat.
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

// x [..., k] times a packed weight [n, k] transposed, plus bias [n].
Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n, int64_t k) {
  TORCH_CHECK(x.size(-1) == k && x.scalar_type() == packed.scalar_type() && served(packed.scalar_type()),
              "tandem::linear: x is ", x.sizes(), " of ", x.scalar_type(), ", the weight ", n, " x ", k, " of ",
              packed.scalar_type());
  TORCH_CHECK(!bias.has_value() || (bias->scalar_type() == packed.scalar_type() && bias->is_contiguous()),
              "tandem::linear wants a bias of the weight's type");
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = n;
  Tensor y = at::empty(sizes, x.options());
  const int64_t m = n == 0 ? 0 : y.numel() / n;
  const Tensor rows = x.contiguous();
  if (packed.scalar_type() == at::kFloat) {
    TORCH_CHECK(packed.numel() == packed_size<Widened<float>>(n, k), "tandem::linear: not packed for this size");
    linear_rows<Widened<float>>(rows.const_data_ptr<float>(), packed.const_data_ptr<float>(),
                                bias.has_value() ? bias->const_data_ptr<float>() : nullptr, y.data_ptr<float>(), m, k,
                                n);
  } else {
    TORCH_CHECK(packed.numel() == packed_size<Bf16>(n, k), "tandem::linear: not packed for this size");
    const Tensor fit = rows.to(c10::CppTypeToScalarType<Bf16::X>::value);
    linear_rows<Bf16>(fit.const_data_ptr<Bf16::X>(), packed.const_data_ptr<BFloat16>(),
                      bias.has_value() ? bias->const_data_ptr<BFloat16>() : nullptr, y.data_ptr<BFloat16>(), m, k, n);
  }
  return y;
}

// ---- attention

constexpr int64_t AHEAD = 16;            // tokens between the one in work and the one on its way from memory
constexpr int64_t QUERIES = 4 * ROWS;    // of a tile at most
constexpr int64_t LOGIT_BYTES = 1 << 18;  // of a tile, while that leaves ROWS queries

template <typename T>
void prefetch(const T* from, int64_t count) {
  const char* line = reinterpret_cast<const char*>(from);
  for (int64_t at = 0; at < count * static_cast<int64_t>(sizeof(T)); at += LINE) __builtin_prefetch(line + at, 0, 2);
}

// What a token sees: everything before it, the last `window` tokens, or its own part of `chunk` tokens.
struct Reach {
  int64_t window, chunk;  // 0 for none
  int64_t first(int64_t position) const {
    if (window > 0) return std::max<int64_t>(0, position - window + 1);
    return chunk > 0 ? position / chunk * chunk : 0;
  }
  int64_t last(int64_t key) const {  // the last position that sees it
    if (window > 0) return key + window - 1;
    return chunk > 0 ? key / chunk * chunk + chunk - 1 : std::numeric_limits<int64_t>::max();
  }
};

int64_t aligned(int64_t position) { return position / LANES * LANES; }

// Turns logits[from..to) into weights, whose sum it returns; `from` and `to` count from a multiple of LANES tokens into
// the sequence. The rest of the first and last vector becomes zero. A token's place in its vector is that of its
// position, so that the order of the sum does not depend on what else the tile holds.
float softmax(float* logits, int64_t from, int64_t to, float scaling, std::optional<double> softcap,
              const float* sink) {
  constexpr float NONE = -std::numeric_limits<float>::infinity();
  const int64_t begin = aligned(from), end = aligned(to + LANES - 1);
  if (softcap.has_value()) {
    const Vec cap(static_cast<float>(*softcap));
    for (int64_t t = begin; t < end; t += LANES) ((load(logits + t) * Vec(scaling) / cap).tanh() * cap).store(logits + t);
    scaling = 1.0f;
  }
  std::fill(logits + begin, logits + from, NONE);
  std::fill(logits + to, logits + end, NONE);
  Vec highest(NONE);
  for (int64_t t = begin; t < end; t += LANES) {
    const Vec scaled = load(logits + t) * Vec(scaling);
    scaled.store(logits + t);
    highest = at::vec::maximum(highest, scaled);
  }
  float lanes[LANES];
  highest.store(lanes);
  float top = sink == nullptr ? NONE : *sink;
  for (int i = 0; i < LANES; ++i) top = std::isnan(lanes[i]) ? lanes[i] : std::max(top, lanes[i]);
  Vec sums(0.0f);
  for (int64_t t = begin; t < end; t += LANES) {
    const Vec weight = (load(logits + t) - Vec(top)).exp();
    weight.store(logits + t);
    sums = sums + weight;
  }
  sums.store(lanes);
  float total = sink == nullptr ? 0.0f : std::exp(*sink - top);
  for (int i = 0; i < LANES; ++i) total += lanes[i];
  return total;
}

struct Tile {  // consecutive queries of one sequence
  int64_t sequence, row, position, queries;
};

// The tiles of each sequence from both of its ends, so that a run of them costs about the same wherever it begins.
std::vector<Tile> tiles_of(const Tensor& starts, const Tensor& lengths, int64_t groups) {
  const auto *start = starts.const_data_ptr<int32_t>(), *length = lengths.const_data_ptr<int32_t>();
  std::vector<Tile> tiles;
  for (int64_t i = 0; i < lengths.size(0); ++i) {
    const int64_t queries = start[i + 1] - start[i], position = length[i] - queries;
    const int64_t fit = LOGIT_BYTES / (groups * (length[i] + LANES) * sizeof(float)) / ROWS * ROWS;
    const int64_t height = std::clamp<int64_t>(fit, ROWS, QUERIES), count = (queries + height - 1) / height;
    for (int64_t n = 0; n < count; ++n) {
      const int64_t at = (n % 2 == 0 ? n / 2 : count - 1 - n / 2) * height;
      tiles.push_back({i, start[i] + at, position + at, std::min(height, queries - at)});
    }
  }
  return tiles;
}

template <typename D>
void attend_tiles(Tensor& out, const Tensor& query, const Tensor& k_pages, const Tensor& v_pages, const Tensor& starts,
                  const Tensor& lengths, const Tensor& blocks, Reach reach, double scaling,
                  std::optional<double> softcap, const float* sinks) {
  using T = typename D::W;
  const int64_t kv_heads = k_pages.size(2), groups = query.size(1) / kv_heads;
  const int64_t size = k_pages.size(1), k_dim = k_pages.size(3), v_dim = v_pages.size(3);
  const auto* q = query.const_data_ptr<typename D::X>();
  const auto* k = k_pages.const_data_ptr<T>();
  const auto* v = v_pages.const_data_ptr<T>();
  const auto* table = blocks.const_data_ptr<int32_t>();
  T* result = out.data_ptr<T>();
  const int64_t q_row = query.stride(0), q_head = query.stride(1), width = blocks.size(1);
  const int64_t o_row = out.stride(0), o_head = out.stride(1);
  const int64_t k_block = k_pages.stride(0), k_token = k_pages.stride(1), k_head = k_pages.stride(2);
  const int64_t v_block = v_pages.stride(0), v_token = v_pages.stride(1), v_head = v_pages.stride(2);
  const std::vector<Tile> tiles = tiles_of(starts, lengths, groups);

  at::parallel_for(0, static_cast<int64_t>(tiles.size()) * kv_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<const T*> keys, values;
    std::vector<float> logits, totals;
    for (int64_t task = begin; task < end; ++task) {
      const Tile& tile = tiles[task / kv_heads];
      const int64_t head = task % kv_heads, first = reach.first(tile.position), base = aligned(first);
      const int64_t last = tile.position + tile.queries;  // one past the last key
      const int64_t room = aligned(last - base + LANES - 1);
      // Keys and logits are counted from `base`, a multiple of LANES tokens into the sequence.
      keys.assign(last - base, nullptr);
      values.assign(last - base, nullptr);
      for (int64_t at = first, in = at / size; at < last; ++in) {
        const int64_t block = table[tile.sequence * width + in], stop = std::min((in + 1) * size, last);
        for (int64_t slot = at - in * size; at < stop; ++at, ++slot) {
          keys[at - base] = k + block * k_block + slot * k_token + head * k_head;
          values[at - base] = v + block * v_block + slot * v_token + head * v_head;
        }
      }
      for (int64_t t = first; t < std::min(first + AHEAD, last); ++t) prefetch(keys[t - base], k_dim);
      logits.resize(groups * tile.queries * room);
      totals.resize(groups * tile.queries);
      const auto* own = q + tile.row * q_row + head * groups * q_head;
      // One query has its heads as the rows of a tile of dots; several have one head after the other.
      const bool single = tile.queries == 1;
      const int64_t outer = single ? 1 : groups, inner = single ? groups : tile.queries;
      for (int64_t t = first; t < last; t += COLS) {
        const int count = static_cast<int>(std::min<int64_t>(COLS, last - t));
        const T* columns[COLS];
        for (int c = 0; c < COLS; ++c) {
          columns[c] = keys[t - base + std::min(c, count - 1)];
          if (t + c + AHEAD < last) prefetch(keys[t - base + c + AHEAD], k_dim);
          if (t + c < last) prefetch(values[t - base + c], v_dim);  // wanted once the logits are complete
        }
        const int64_t skip = single ? 0 : std::max<int64_t>(0, t - tile.position) / ROWS * ROWS;
        const int64_t stop = single ? inner : std::min(inner - 1, reach.last(t + count - 1) - tile.position) + 1;
        for (int64_t o = 0; o < outer; ++o)
          for (int64_t i = skip; i < stop; i += ROWS) {
            const int height = static_cast<int>(std::min<int64_t>(ROWS, inner - i));
            float sums[ROWS][COLS];
            dot_rows<D>(height, own + o * q_head + i * (single ? q_head : q_row), single ? q_head : q_row, columns,
                        k_dim, {}, sums);
            for (int r = 0; r < height; ++r) std::copy(sums[r], sums[r] + count, &logits[(o * inner + i + r) * room + t - base]);
          }
      }
      for (int64_t o = 0; o < outer; ++o)
        for (int64_t i = 0; i < inner; ++i) {
          const int64_t row = o * inner + i, position = tile.position + (single ? 0 : i), seen = reach.first(position);
          const float* sink = sinks == nullptr ? nullptr : sinks + head * groups + (single ? i : o);
          float* there = &logits[row * room];
          totals[row] = softmax(there, seen - base, position + 1 - base, static_cast<float>(scaling), softcap, sink);
          std::fill(there, there + aligned(seen - base), 0.0f);
          std::fill(there + aligned(position - base) + LANES, there + room, 0.0f);
        }
      const auto value = [&](int64_t t) { return values[t]; };
      for (int64_t o = 0; o < outer; ++o)
        for (int64_t i = 0; i < inner; i += ROWS) {
          const int64_t height = std::min<int64_t>(ROWS, inner - i), row = o * inner + i;
          const int64_t from = reach.first(tile.position + (single ? 0 : i)) - base;
          const int64_t to = tile.position + (single ? 0 : i + height - 1) + 1 - base;
          T* into = result + (tile.row + (single ? 0 : i)) * o_row + (head * groups + (single ? i : o)) * o_head;
          weighted_sums<T>(height, &logits[row * room], room, value, from, to, v_dim, &totals[row], into,
                           single ? o_head : o_row);
        }
    }
  });
}

// Attends packed queries over pages. Sequence i adds the rows starts[i] to starts[i + 1] of query [total, heads, k_dim];
// they are the last of its lengths[i] tokens, which lie in blocks[i]. k_pages and v_pages are [blocks, block_size,
// kv_heads, dim]; sinks is [heads] in float32. A token sees those before it, no more than `window`, or those of its
// `chunk`, where these are not 0. Writes out [total, heads, v_dim].
void attend(Tensor& out, const Tensor& query, const Tensor& k_pages, const Tensor& v_pages, const Tensor& starts,
            const Tensor& lengths, const Tensor& blocks, int64_t window, int64_t chunk, double scaling,
            std::optional<double> softcap, const std::optional<Tensor>& sinks) {
  TORCH_CHECK(served(k_pages.scalar_type()) && k_pages.scalar_type() == v_pages.scalar_type() &&
                  out.scalar_type() == k_pages.scalar_type() && query.scalar_type() == k_pages.scalar_type(),
              "tandem::attend wants one type, float32 or bfloat16");
  TORCH_CHECK(k_pages.stride(3) == 1 && v_pages.stride(3) == 1 && out.stride(2) == 1,
              "tandem::attend wants whole heads in a row");
  TORCH_CHECK(query.size(1) % k_pages.size(2) == 0 && query.size(2) == k_pages.size(3) && scaling > 0,
              "tandem::attend: shape of the query, or scaling");
  TORCH_CHECK(!sinks.has_value() || (sinks->scalar_type() == at::kFloat && sinks->is_contiguous()),
              "tandem::attend wants sinks in float32");
  TORCH_CHECK(blocks.is_contiguous() && starts.size(0) == lengths.size(0) + 1 && blocks.size(0) == lengths.size(0),
              "tandem::attend: starts, lengths and blocks");
  const float* sink = sinks.has_value() ? sinks->const_data_ptr<float>() : nullptr;
  const Tensor q = rows_of(query);
  const Reach reach{window, chunk};
  if (k_pages.scalar_type() == at::kFloat)
    attend_tiles<Widened<float>>(out, q, k_pages, v_pages, starts, lengths, blocks, reach, scaling, softcap, sink);
  else
    attend_tiles<Bf16>(out, q.to(c10::CppTypeToScalarType<Bf16::X>::value), k_pages, v_pages, starts, lengths, blocks,
                       reach, scaling, softcap, sink);
}

// Copies new [total, kv_heads, dim] into the slots of pages [blocks, block_size, kv_heads, dim], of the same type.
void write(Tensor& pages, const Tensor& fresh, const Tensor& slot_block, const Tensor& slot_offset) {
  TORCH_CHECK(pages.scalar_type() == fresh.scalar_type() && pages.stride(3) == 1, "tandem::write: types or strides");
  const Tensor from = rows_of(fresh);
  const auto *block = slot_block.const_data_ptr<int64_t>(), *offset = slot_offset.const_data_ptr<int64_t>();
  const int64_t item = pages.element_size(), bytes = pages.size(3) * item;
  char* base = static_cast<char*>(pages.data_ptr());
  const char* source = static_cast<const char*>(from.const_data_ptr());
  for (int64_t t = 0; t < from.size(0); ++t)
    for (int64_t h = 0; h < from.size(1); ++h)
      std::memcpy(base + (block[t] * pages.stride(0) + offset[t] * pages.stride(1) + h * pages.stride(2)) * item,
                  source + (t * from.stride(0) + h * from.stride(1)) * item, bytes);
}

// ---- norm

template <typename T>
void rms_rows(const T* x, const T* weight, T* y, int64_t m, int64_t n, float eps, float offset, bool round_first) {
  at::parallel_for(0, m, std::max<int64_t>(1, TASK_BYTES / (n * sizeof(T))), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = x + row * n;
      const auto get = [n](const T* base, int64_t at) {
        return at + LANES <= n ? load(base + at) : load(base + at, static_cast<int>(n - at));
      };
      Vec squares(0.0f);
      for (int64_t at = 0; at < n; at += LANES) {
        const Vec part = get(from, at);
        squares = at::vec::fmadd(part, part, squares);
      }
      float lanes[LANES], total = 0.0f;
      squares.store(lanes);
      for (int i = 0; i < LANES; ++i) total += lanes[i];
      const Vec scale(1.0f / std::sqrt(total / static_cast<float>(n) + eps));
      for (int64_t at = 0; at < n; at += LANES) {
        Vec normed = get(from, at) * scale;
        if (round_first) normed = rounded<T>(normed);
        put(normed * (get(weight, at) + Vec(offset)), y + row * n + at, std::min<int64_t>(LANES, n - at));
      }
    }
  });
}

// x over the root of its mean square, times (weight + offset): [..., n] and [n], of one type. `round_first` rounds to
// that type before the product, as some models do.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, double offset, bool round_first) {
  TORCH_CHECK(served(x.scalar_type()) && x.scalar_type() == weight.scalar_type() && weight.is_contiguous() &&
                  x.size(-1) == weight.numel(),
              "tandem::rms_norm wants one type, float32 or bfloat16, and a weight for each element of a row");
  const Tensor rows = x.contiguous();
  Tensor y = at::empty(x.sizes(), x.options());
  const int64_t n = weight.numel(), m = n == 0 ? 0 : x.numel() / n;
  const auto eps_ = static_cast<float>(eps), offset_ = static_cast<float>(offset);
  if (x.scalar_type() == at::kFloat)
    rms_rows(rows.const_data_ptr<float>(), weight.const_data_ptr<float>(), y.data_ptr<float>(), m, n, eps_, offset_,
             round_first);
  else
    rms_rows(rows.const_data_ptr<BFloat16>(), weight.const_data_ptr<BFloat16>(), y.data_ptr<BFloat16>(), m, n, eps_,
             offset_, round_first);
  return y;
}

// ---- memory

// Asks for large pages behind what lies in whole ones of t; before anything is written there. A wish, not a need.
void huge_pages(const Tensor& t) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t HUGE = 2 << 20;
  const auto start = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  const uintptr_t first = (start + HUGE - 1) / HUGE * HUGE, last = (start + t.nbytes()) / HUGE * HUGE;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

std::string isa() {
#if defined(TANDEM_BF16_DOT)
  return "avx512_bf16";
#elif defined(CPU_CAPABILITY_AVX512)
  return "avx512";
#elif defined(CPU_CAPABILITY_AVX2)
  return "avx2";
#else
  return "portable";
#endif
}

}  // namespace
}  // namespace tandem

TORCH_LIBRARY(tandem, m) {
  m.def("isa() -> str", &tandem::isa);
  m.def("pack(Tensor weight) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, Tensor? bias, int n, int k) -> Tensor");
  m.def(
      "attend(Tensor(a!) out, Tensor query, Tensor k_pages, Tensor v_pages, Tensor starts, Tensor lengths, Tensor"
      " blocks, int window, int chunk, float scaling, float? softcap, Tensor? sinks) -> ()");
  m.def("huge_pages(Tensor t) -> ()");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, float offset, bool round_first) -> Tensor");
  m.def("write(Tensor(a!) pages, Tensor fresh, Tensor slot_block, Tensor slot_offset) -> ()");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("pack", &tandem::pack);
  m.impl("linear", &tandem::linear);
  m.impl("attend", &tandem::attend);
  m.impl("huge_pages", &tandem::huge_pages);
  m.impl("rms_norm", &tandem::rms_norm);
  m.impl("write", &tandem::write);
}
