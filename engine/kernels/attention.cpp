// Attention over the pages as they lie, and the writing of new K and V into them.
#include "ops.h"

#include "dots.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

namespace tandem {
namespace {

using at::BFloat16;
using at::Tensor;

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

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "attend(Tensor(a!) out, Tensor query, Tensor k_pages, Tensor v_pages, Tensor starts, Tensor lengths, Tensor"
      " blocks, int window, int chunk, float scaling, float? softcap, Tensor? sinks) -> ()");
  m.def("write(Tensor(a!) pages, Tensor fresh, Tensor slot_block, Tensor slot_offset) -> ()");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("attend", &tandem::attend);
  m.impl("write", &tandem::write);
}
