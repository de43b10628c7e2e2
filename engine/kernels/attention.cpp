// Attention over the pages as they lie, and the writing of new K and V into them.
#include "ops.h"

#include "dots.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

namespace tandem {
namespace {

using at::BFloat16;
using at::Tensor;

constexpr int64_t AHEAD = 16;            // tokens between the one in work and the one on its way from memory
constexpr int64_t BLOCKS_AHEAD = 4;      // likewise of blocks, while their scales are read
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

bool scales_of(const Tensor& scales, const Tensor& pages) {
  return scales.scalar_type() == at::kBFloat16 && scales.sizes() == pages.sizes().slice(0, 3) &&
         (scales.stride(1) == 1 || scales.size(1) == 1);
}

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

// What the elements of one token's K or V are multiplied with, by token and head; none where they are not quantised.
struct Scales {
  const uint16_t* bits = nullptr;  // bfloat16, those of one head and block side by side
  int64_t block = 0, head = 0;
  explicit Scales(const std::optional<Tensor>& t) {
    if (!t.has_value()) return;
    bits = reinterpret_cast<const uint16_t*>(t->const_data_ptr<BFloat16>());
    block = t->stride(0);
    head = t->stride(2);
  }
  const uint16_t* of(int64_t in_block, int64_t of_head) const { return bits + in_block * block + of_head * head; }
};

void widen(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
    std::memcpy(to + i, &bits, sizeof bits);
  }
}

// row[from..to) times by[from..to), in whole vectors. What it makes of the lanes around them is nothing to anybody.
void multiply(float* row, const float* by, int64_t from, int64_t to) {
  for (int64_t t = aligned(from); t < to; t += LANES) (load(row + t) * load(by + t)).store(row + t);
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

template <typename D, typename R>
void attend_tiles(Tensor& out, const Tensor& query, const Tensor& k_pages, const Tensor& v_pages, const Tensor& starts,
                  const Tensor& lengths, const Tensor& blocks, Reach reach, double scaling,
                  std::optional<double> softcap, const float* sinks, Scales k_scales, Scales v_scales) {
  using T = typename D::W;
  constexpr bool SCALED = sizeof(T) == 1;
  const int64_t kv_heads = k_pages.size(2), groups = query.size(1) / kv_heads;
  const int64_t size = k_pages.size(1), k_dim = k_pages.size(3), v_dim = v_pages.size(3);
  const auto* q = query.const_data_ptr<typename D::X>();
  const auto* k = k_pages.const_data_ptr<T>();
  const auto* v = v_pages.const_data_ptr<T>();
  const auto* table = blocks.const_data_ptr<int32_t>();
  R* result = out.data_ptr<R>();
  const int64_t q_row = query.stride(0), q_head = query.stride(1), width = blocks.size(1);
  const int64_t o_row = out.stride(0), o_head = out.stride(1);
  const int64_t k_block = k_pages.stride(0), k_token = k_pages.stride(1), k_head = k_pages.stride(2);
  const int64_t v_block = v_pages.stride(0), v_token = v_pages.stride(1), v_head = v_pages.stride(2);
  const std::vector<Tile> tiles = tiles_of(starts, lengths, groups);

  at::parallel_for(0, static_cast<int64_t>(tiles.size()) * kv_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<const T*> keys, values;
    std::vector<float> logits, totals, by_key, by_value;
    for (int64_t task = begin; task < end; ++task) {
      const Tile& tile = tiles[task / kv_heads];
      const int64_t head = task % kv_heads, first = reach.first(tile.position), base = aligned(first);
      const int64_t last = tile.position + tile.queries;  // one past the last key
      const int64_t room = aligned(last - base + LANES - 1);
      // Keys and logits are counted from `base`, a multiple of LANES tokens into the sequence.
      keys.assign(last - base, nullptr);
      values.assign(last - base, nullptr);
      if constexpr (SCALED) {
        by_key.assign(room, 0.0f);
        by_value.assign(room, 0.0f);
      }
      for (int64_t at = first, in = at / size; at < last; ++in) {
        const int64_t block = table[tile.sequence * width + in], stop = std::min((in + 1) * size, last);
        if constexpr (SCALED) {
          if (in + BLOCKS_AHEAD < width) {
            const int64_t next = table[tile.sequence * width + in + BLOCKS_AHEAD];
            __builtin_prefetch(k_scales.of(next, head), 0, 2);
            __builtin_prefetch(v_scales.of(next, head), 0, 2);
          }
          widen(k_scales.of(block, head) + at - in * size, stop - at, &by_key[at - base]);
          widen(v_scales.of(block, head) + at - in * size, stop - at, &by_value[at - base]);
        }
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
          if constexpr (SCALED) multiply(there, by_key.data(), seen - base, position + 1 - base);
          totals[row] = softmax(there, seen - base, position + 1 - base, static_cast<float>(scaling), softcap, sink);
          if constexpr (SCALED) multiply(there, by_value.data(), seen - base, position + 1 - base);
          std::fill(there, there + aligned(seen - base), 0.0f);
          std::fill(there + aligned(position - base) + LANES, there + room, 0.0f);
        }
      const auto value = [&](int64_t t) { return values[t]; };
      for (int64_t o = 0; o < outer; ++o)
        for (int64_t i = 0; i < inner; i += ROWS) {
          const int64_t height = std::min<int64_t>(ROWS, inner - i), row = o * inner + i;
          const int64_t from = reach.first(tile.position + (single ? 0 : i)) - base;
          const int64_t to = tile.position + (single ? 0 : i + height - 1) + 1 - base;
          R* into = result + (tile.row + (single ? 0 : i)) * o_row + (head * groups + (single ? i : o)) * o_head;
          weighted_sums<R>(height, &logits[row * room], room, value, from, to, v_dim, &totals[row], into,
                           single ? o_head : o_row);
        }
    }
  });
}

// Attends packed queries over pages. Sequence i adds the rows starts[i] to starts[i + 1] of query [total, heads, k_dim];
// they are the last of its lengths[i] tokens, which lie in blocks[i]. k_pages and v_pages are [blocks, block_size,
// kv_heads, dim] of the query's type, or int8 or fp8 with k_scales and v_scales [blocks, block_size, kv_heads]; sinks is
// [heads] in float32. A token sees those before it, no more than `window`, or those of its `chunk`, where these are not
// 0. Writes out [total, heads, v_dim].
void attend(Tensor& out, const Tensor& query, const Tensor& k_pages, const Tensor& v_pages, const Tensor& starts,
            const Tensor& lengths, const Tensor& blocks, int64_t window, int64_t chunk, double scaling,
            std::optional<double> softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& k_scales,
            const std::optional<Tensor>& v_scales) {
  const at::ScalarType kept = k_pages.scalar_type();
  const bool scaled = k_scales.has_value();
  TORCH_CHECK(served(query.scalar_type()) && kept == v_pages.scalar_type() && out.scalar_type() == query.scalar_type() &&
                  (scaled ? kept == at::kChar || kept == at::kFloat8_e4m3fn : kept == query.scalar_type()),
              "tandem::attend wants one type, float32 or bfloat16, or int8 or fp8 pages with scales");
  TORCH_CHECK(scaled == v_scales.has_value() &&
                  (!scaled || (scales_of(*k_scales, k_pages) && scales_of(*v_scales, v_pages))),
              "tandem::attend wants bfloat16 scales of K and of V, those of a head side by side");
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
  const auto over = [&](auto dots, auto result) {
    using D = decltype(dots);
    attend_tiles<D, decltype(result)>(out, q.to(c10::CppTypeToScalarType<typename D::X>::value), k_pages, v_pages,
                                      starts, lengths, blocks, {window, chunk}, scaling, softcap, sink,
                                      Scales(k_scales), Scales(v_scales));
  };
  if (query.scalar_type() == at::kFloat) {
    if (kept == at::kChar) return over(Widened<int8_t>(), float());
    if (kept == at::kFloat8_e4m3fn) return over(Widened<Fp8>(), float());
    return over(Widened<float>(), float());
  }
  if (kept == at::kChar) return over(Bf16With<int8_t>(), BFloat16());
  if (kept == at::kFloat8_e4m3fn) return over(Bf16With<Fp8>(), BFloat16());
  over(Bf16(), BFloat16());
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

// ---- quantising, to the bits of engine/quantised.py

template <typename E>
constexpr float LARGEST = std::is_same_v<E, int8_t> ? 127.0f : 448.0f;
constexpr float NOTHING = 0x1p-100f, SMALLEST_FP8 = 0x1p-6f;

int8_t element(float y, int8_t) { return static_cast<int8_t>(std::nearbyint(y)); }

uint8_t element(float y, Fp8) {  // |y| is at most 448, but for the last bit
  uint32_t bits;
  std::memcpy(&bits, &y, sizeof bits);
  const uint32_t sign = bits >> 31 << 7, size = bits & 0x7fffffff;
  const uint32_t nearest = (size + 0x7ffff + (size >> 20 & 1)) >> 20;  // 3 bits behind the exponent, ties to even
  return static_cast<uint8_t>(std::abs(y) < SMALLEST_FP8 ? 0 : sign | (nearest - (120 << 3)));
}

template <typename T>
float absolute_largest(const T* from, int64_t dim) {  // NaN where there is one
  float top = 0.0f;
  bool nan = false;
  for (int64_t d = 0; d < dim; ++d) {
    const float size = std::abs(static_cast<float>(from[d]));
    nan |= std::isnan(size);
    top = std::max(top, size);
  }
  return nan ? std::numeric_limits<float>::quiet_NaN() : top;
}

template <typename E, typename T>
void quantise_row(const T* from, int64_t dim, E* elements, uint16_t* scale) {
  const float top = absolute_largest(from, dim);
  const bool finite = top < std::numeric_limits<float>::infinity();
  const float wanted = top < NOTHING ? 0.0f : top / LARGEST<E>;
  uint32_t bits = 0x7fc00000;  // NaN
  if (finite) {
    std::memcpy(&bits, &wanted, sizeof bits);
    bits = (bits + 0xffff) & 0xffff0000;
  }
  *scale = static_cast<uint16_t>(bits >> 16);
  float by;
  std::memcpy(&by, &bits, sizeof by);
  auto* to = reinterpret_cast<uint8_t*>(elements);
  if (!(by > 0.0f)) {
    std::memset(to, 0, dim);
    return;
  }
  for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<uint8_t>(element(static_cast<float>(from[d]) / by, E()));
}

template <typename E, typename T>
void quantise_rows(Tensor& pages, Tensor& scales, const Tensor& from, const int64_t* block, const int64_t* offset) {
  E* elements = pages.data_ptr<E>();
  auto* scale = reinterpret_cast<uint16_t*>(scales.data_ptr<BFloat16>());
  const T* source = from.const_data_ptr<T>();
  for (int64_t t = 0; t < from.size(0); ++t)
    for (int64_t h = 0; h < from.size(1); ++h)
      quantise_row(source + t * from.stride(0) + h * from.stride(1), from.size(2),
                   elements + block[t] * pages.stride(0) + offset[t] * pages.stride(1) + h * pages.stride(2),
                   scale + block[t] * scales.stride(0) + offset[t] * scales.stride(1) + h * scales.stride(2));
}

// Like `write`, into pages of int8 or fp8 and their scales [blocks, block_size, kv_heads] in bfloat16.
void write_quantised(Tensor& pages, Tensor& scales, const Tensor& fresh, const Tensor& slot_block,
                     const Tensor& slot_offset) {
  TORCH_CHECK(served(fresh.scalar_type()) && pages.stride(3) == 1 && fresh.size(2) == pages.size(3) &&
                  scales_of(scales, pages),
              "tandem::write_quantised: types, shapes or strides");
  const Tensor from = rows_of(fresh);
  const auto *block = slot_block.const_data_ptr<int64_t>(), *offset = slot_offset.const_data_ptr<int64_t>();
  const bool single = fresh.scalar_type() == at::kFloat;
  if (pages.scalar_type() == at::kChar)
    return single ? quantise_rows<int8_t, float>(pages, scales, from, block, offset)
                  : quantise_rows<int8_t, BFloat16>(pages, scales, from, block, offset);
  TORCH_CHECK(pages.scalar_type() == at::kFloat8_e4m3fn, "tandem::write_quantised wants pages of int8 or fp8");
  single ? quantise_rows<Fp8, float>(pages, scales, from, block, offset)
         : quantise_rows<Fp8, BFloat16>(pages, scales, from, block, offset);
}

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "attend(Tensor(a!) out, Tensor query, Tensor k_pages, Tensor v_pages, Tensor starts, Tensor lengths, Tensor"
      " blocks, int window, int chunk, float scaling, float? softcap, Tensor? sinks, Tensor? k_scales=None,"
      " Tensor? v_scales=None) -> ()");
  m.def("write(Tensor(a!) pages, Tensor fresh, Tensor slot_block, Tensor slot_offset) -> ()");
  m.def(
      "write_quantised(Tensor(a!) pages, Tensor(b!) scales, Tensor fresh, Tensor slot_block, Tensor slot_offset) ->"
      " ()");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("attend", &tandem::attend);
  m.impl("write", &tandem::write);
  m.impl("write_quantised", &tandem::write_quantised);
}
