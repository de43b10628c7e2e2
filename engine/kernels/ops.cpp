// The operators `torch.ops.tandem.*`: what a decode step spends its time in, for float32 and bfloat16 on CPU.
//
// All sums are in float32 and in an order that depends on nothing but the row itself, so that a sequence's result does
// not depend on what else is in the batch.
#include "dots.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
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

constexpr int64_t TASK_BYTES = 1 << 16;  // what one thread reads at least

bool served(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16; }

Tensor rows_of(const Tensor& t) { return t.dim() > 0 && t.stride(-1) != 1 && t.size(-1) != 1 ? t.contiguous() : t; }

// ---- linear

constexpr int64_t DISTANCE = 4;  // blocks of columns between the one in work and the one on its way from memory

// The weight is read once, block by block of four columns, in the order in which it lies in memory. The processor's own
// prefetching loses the thread at the end of every short column, so each tile of rows fetches its share of a later
// block: this is worth a factor of two with one row.
template <typename D, typename T>
void linear_rows(const typename D::X* x, const typename D::W* w, const T* bias, T* y, int64_t m, int64_t k, int64_t n) {
  const int64_t tiles = (m + ROWS - 1) / ROWS, height = (m + tiles - 1) / tiles;
  const int64_t block_bytes = COLS * k * sizeof(typename D::W), share = (block_bytes / tiles + LINE - 1) / LINE * LINE;
  const int64_t grain = std::max<int64_t>(1, TASK_BYTES / block_bytes), lines = (COLS + tiles - 1) / tiles;
  at::parallel_for(0, (n + COLS - 1) / COLS, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * COLS;
      const int count = static_cast<int>(std::min<int64_t>(COLS, n - first));
      const typename D::W* columns[COLS];
      for (int c = 0; c < COLS; ++c) columns[c] = w + (first + std::min(c, count - 1)) * k;
      for (int64_t row = 0; row < m; row += height) {
        const int rows = static_cast<int>(std::min(height, m - row));
        float sums[ROWS][COLS];
        const char* later = reinterpret_cast<const char*>(w) + (block + DISTANCE) * block_bytes + row / height * share;
        dot_rows<D>(rows, x + row * k, k, columns, k, {later, lines}, sums);
        for (int r = 0; r < rows; ++r)
          for (int c = 0; c < count; ++c) {
            const float add = bias == nullptr ? 0.0f : static_cast<float>(bias[first + c]);
            y[(row + r) * n + first + c] = static_cast<T>(sums[r][c] + add);
          }
      }
    }
  });
}

// x [..., k] times weight [n, k] transposed, plus bias [n]. More than `limit` rows, and types that are not served, go to
// torch's own.
Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t limit) {
  const int64_t n = weight.size(0), k = weight.size(1);
  const int64_t m = k == 0 ? 0 : x.numel() / k;
  const bool plain = !bias.has_value() || (bias->scalar_type() == weight.scalar_type() && bias->is_contiguous());
  if (m == 0 || m > limit || n == 0 || !served(weight.scalar_type()) || x.scalar_type() != weight.scalar_type() ||
      x.size(-1) != k || !weight.is_contiguous() || !plain)
    return at::linear(x, weight, bias);
  const Tensor rows = x.contiguous();
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = n;
  Tensor y = at::empty(sizes, x.options());
  if (weight.scalar_type() == at::kFloat) {
    linear_rows<Widened<float>>(rows.const_data_ptr<float>(), weight.const_data_ptr<float>(),
                                bias.has_value() ? bias->const_data_ptr<float>() : nullptr, y.data_ptr<float>(), m, k,
                                n);
  } else {
    const Tensor fit = rows.to(c10::CppTypeToScalarType<Bf16::X>::value);
    linear_rows<Bf16>(fit.const_data_ptr<Bf16::X>(), weight.const_data_ptr<BFloat16>(),
                      bias.has_value() ? bias->const_data_ptr<BFloat16>() : nullptr, y.data_ptr<BFloat16>(), m, k, n);
  }
  return y;
}

// ---- attention

constexpr int64_t AHEAD = 16;  // tokens between the one in work and the one on its way from memory

template <typename T>
void prefetch(const T* from, int64_t count) {
  const char* line = reinterpret_cast<const char*>(from);
  for (int64_t at = 0; at < count * static_cast<int64_t>(sizeof(T)); at += LINE) __builtin_prefetch(line + at, 0, 2);
}

// out[r] = sum over tokens of p[r][token] * v[token], for R heads and `dim` elements.
template <typename T, int R>
void weighted_sum(const float* p, int64_t p_stride, const std::vector<const T*>& v, int64_t dim, T* out,
                  int64_t out_stride) {
  const int64_t tokens = static_cast<int64_t>(v.size());
  constexpr int WIDE = 4;
  int64_t d = 0;
  for (; d + WIDE * LANES <= dim; d += WIDE * LANES) {
    Vec sums[R][WIDE];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < WIDE; ++c) sums[r][c] = Vec(0.0f);
    for (int64_t t = 0; t < tokens; ++t) {
      Vec values[WIDE];
      for (int c = 0; c < WIDE; ++c) values[c] = load(v[t] + d + c * LANES);
      for (int r = 0; r < R; ++r) {
        const Vec weight(p[r * p_stride + t]);
        for (int c = 0; c < WIDE; ++c) sums[r][c] = at::vec::fmadd(weight, values[c], sums[r][c]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < WIDE; ++c) put(sums[r][c], out + r * out_stride + d + c * LANES, LANES);
  }
  for (; d < dim; d += LANES) {
    const int count = static_cast<int>(std::min<int64_t>(LANES, dim - d));
    Vec sums[R];
    for (int r = 0; r < R; ++r) sums[r] = Vec(0.0f);
    for (int64_t t = 0; t < tokens; ++t) {
      const Vec value = count == LANES ? load(v[t] + d) : load(v[t] + d, count);
      for (int r = 0; r < R; ++r) sums[r] = at::vec::fmadd(Vec(p[r * p_stride + t]), value, sums[r]);
    }
    for (int r = 0; r < R; ++r) put(sums[r], out + r * out_stride + d, count);
  }
}

template <typename T, int R = 4>
void weighted_sums(int64_t rows, const float* p, int64_t p_stride, const std::vector<const T*>& v, int64_t dim, T* out,
                   int64_t out_stride) {
  for (; rows >= R; rows -= R, p += R * p_stride, out += R * out_stride)
    weighted_sum<T, R>(p, p_stride, v, dim, out, out_stride);
  if constexpr (R > 1)
    if (rows > 0) weighted_sums<T, R - 1>(rows, p, p_stride, v, dim, out, out_stride);
}

// Turns the logits of one head, padded with room to a multiple of LANES, into weights that sum to one (less the sink).
void softmax(float* logits, int64_t count, float scaling, std::optional<double> softcap, const float* sink) {
  const int64_t padded = (count + LANES - 1) / LANES * LANES;
  const float cap = softcap.has_value() ? static_cast<float>(*softcap) : 0.0f;
  Vec highest(-std::numeric_limits<float>::infinity());
  std::fill(logits + count, logits + padded, 0.0f);
  for (int64_t t = 0; t < padded; t += LANES) {
    Vec scaled = load(logits + t) * Vec(scaling);
    if (softcap.has_value()) scaled = (scaled / Vec(cap)).tanh() * Vec(cap);
    scaled.store(logits + t);
    if (t + LANES > count) break;
    highest = at::vec::maximum(highest, scaled);
  }
  std::fill(logits + count, logits + padded, -std::numeric_limits<float>::infinity());
  if (count % LANES != 0) highest = at::vec::maximum(highest, load(logits + padded - LANES));
  float lanes[LANES];
  highest.store(lanes);
  float top = sink == nullptr ? -std::numeric_limits<float>::infinity() : *sink;
  for (int i = 0; i < LANES; ++i) top = std::isnan(lanes[i]) ? lanes[i] : std::max(top, lanes[i]);
  Vec sums(0.0f);
  for (int64_t t = 0; t < padded; t += LANES) {
    const Vec weight = (load(logits + t) - Vec(top)).exp();
    weight.store(logits + t);
    sums = sums + weight;
  }
  sums.store(lanes);
  float total = sink == nullptr ? 0.0f : std::exp(*sink - top);
  for (int i = 0; i < LANES; ++i) total += lanes[i];
  for (int64_t t = 0; t < padded; t += LANES) (load(logits + t) / Vec(total)).store(logits + t);
}

template <typename D>
void attend_rows(Tensor& out, const Tensor& query, const Tensor& k_pages, const Tensor& v_pages, const Tensor& rows,
                 const Tensor& blocks, const Tensor& skip, const Tensor& length, double scaling,
                 std::optional<double> softcap, const float* sinks) {
  using T = typename D::W;
  const int64_t kv_heads = k_pages.size(2), groups = query.size(1) / kv_heads;
  const int64_t size = k_pages.size(1), k_dim = k_pages.size(3), v_dim = v_pages.size(3);
  const auto* q = query.const_data_ptr<typename D::X>();
  const auto* k = k_pages.const_data_ptr<T>();
  const auto* v = v_pages.const_data_ptr<T>();
  const auto *row_of = rows.const_data_ptr<int64_t>(), *skip_of = skip.const_data_ptr<int64_t>();
  const auto *length_of = length.const_data_ptr<int64_t>(), *table = blocks.const_data_ptr<int64_t>();
  T* result = out.data_ptr<T>();
  const int64_t q_row = query.stride(0), q_head = query.stride(1), width = blocks.size(1);
  const int64_t k_block = k_pages.stride(0), k_token = k_pages.stride(1), k_head = k_pages.stride(2);
  const int64_t v_block = v_pages.stride(0), v_token = v_pages.stride(1), v_head = v_pages.stride(2);

  at::parallel_for(0, rows.size(0) * kv_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<const T*> keys, values;
    std::vector<float> logits;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t i = task / kv_heads, head = task % kv_heads, tokens = length_of[i];
      keys.clear();
      values.clear();
      const int64_t last = skip_of[i] + tokens;
      for (int64_t at = skip_of[i], in = at / size; at < last; ++in) {
        const int64_t block = table[i * width + in], end = std::min((in + 1) * size, last);
        for (int64_t slot = at - in * size; at < end; ++at, ++slot) {
          keys.push_back(k + block * k_block + slot * k_token + head * k_head);
          values.push_back(v + block * v_block + slot * v_token + head * v_head);
        }
      }
      for (int64_t t = 0; t < std::min(AHEAD, tokens); ++t) prefetch(keys[t], k_dim);
      const int64_t padded = (tokens + LANES - 1) / LANES * LANES;
      logits.resize(groups * padded);
      const auto* own = q + row_of[i] * q_row + head * groups * q_head;
      for (int64_t t = 0; t < tokens; t += COLS) {
        const int count = static_cast<int>(std::min<int64_t>(COLS, tokens - t));
        const T* columns[COLS];
        for (int c = 0; c < COLS; ++c) {
          columns[c] = keys[t + std::min(c, count - 1)];
          if (t + c + AHEAD < tokens) prefetch(keys[t + c + AHEAD], k_dim);
          if (t + c < tokens) prefetch(values[t + c], v_dim);  // wanted once the logits are complete
        }
        for (int64_t g = 0; g < groups; g += ROWS) {
          const int height = static_cast<int>(std::min<int64_t>(ROWS, groups - g));
          float sums[ROWS][COLS];
          dot_rows<D>(height, own + g * q_head, q_head, columns, k_dim, {}, sums);
          for (int r = 0; r < height; ++r) std::copy(sums[r], sums[r] + count, &logits[(g + r) * padded + t]);
        }
      }
      for (int64_t g = 0; g < groups; ++g)
        softmax(&logits[g * padded], tokens, static_cast<float>(scaling), softcap,
                sinks == nullptr ? nullptr : sinks + head * groups + g);
      T* into = result + row_of[i] * out.stride(0) + head * groups * out.stride(1);
      weighted_sums<T>(groups, logits.data(), padded, values, v_dim, into, out.stride(1));
    }
  });
}

// Attends single queries over pages: row rows[i] of query [total, heads, k_dim] over the length[i] tokens that follow
// the first skip[i] ones in blocks[i]. k_pages and v_pages are [blocks, block_size, kv_heads, dim]; sinks is [heads] in
// float32. Writes those rows of out [total, heads, v_dim].
void attend(Tensor& out, const Tensor& query, const Tensor& k_pages, const Tensor& v_pages, const Tensor& rows,
            const Tensor& blocks, const Tensor& skip, const Tensor& length, double scaling,
            std::optional<double> softcap, const std::optional<Tensor>& sinks) {
  TORCH_CHECK(served(k_pages.scalar_type()) && k_pages.scalar_type() == v_pages.scalar_type() &&
                  out.scalar_type() == k_pages.scalar_type() && query.scalar_type() == k_pages.scalar_type(),
              "tandem::attend wants one type, float32 or bfloat16");
  TORCH_CHECK(k_pages.stride(3) == 1 && v_pages.stride(3) == 1 && out.stride(2) == 1, "tandem::attend wants whole heads in a row");
  TORCH_CHECK(query.size(1) % k_pages.size(2) == 0 && query.size(2) == k_pages.size(3), "tandem::attend: query shape");
  TORCH_CHECK(!sinks.has_value() || (sinks->scalar_type() == at::kFloat && sinks->is_contiguous()),
              "tandem::attend wants sinks in float32");
  const float* sink = sinks.has_value() ? sinks->const_data_ptr<float>() : nullptr;
  const Tensor q = rows_of(query);
  if (k_pages.scalar_type() == at::kFloat)
    attend_rows<Widened<float>>(out, q, k_pages, v_pages, rows, blocks, skip, length, scaling, softcap, sink);
  else
    attend_rows<Bf16>(out, q.to(c10::CppTypeToScalarType<Bf16::X>::value), k_pages, v_pages, rows, blocks, skip, length,
                      scaling, softcap, sink);
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
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, int limit) -> Tensor");
  m.def(
      "attend(Tensor(a!) out, Tensor query, Tensor k_pages, Tensor v_pages, Tensor rows, Tensor blocks, Tensor skip,"
      " Tensor length, float scaling, float? softcap, Tensor? sinks) -> ()");
  m.def("huge_pages(Tensor t) -> ()");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, float offset, bool round_first) -> Tensor");
  m.def("write(Tensor(a!) pages, Tensor fresh, Tensor slot_block, Tensor slot_offset) -> ()");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("linear", &tandem::linear);
  m.impl("attend", &tandem::attend);
  m.impl("huge_pages", &tandem::huge_pages);
  m.impl("rms_norm", &tandem::rms_norm);
  m.impl("write", &tandem::write);
}
