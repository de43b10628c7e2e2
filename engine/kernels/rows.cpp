// Operators on single rows, and operators about the machine: memory and instruction set.
#include "ops.h"

#include "capture.h"
#include "dots.h"
#include "functions.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

namespace tandem {
namespace {

using at::BFloat16;
using at::Tensor;

// R rows at once: each is one dependent chain of sums, and a core can run several in parallel.
template <int R, typename T>
void rms_of(const T* x, const T* weight, T* y, int64_t n, float eps, float offset, bool round_first) {
  const auto get = [n](const T* row, int64_t at) {
    return at + LANES <= n ? load(row + at) : load(row + at, static_cast<int>(n - at));
  };
  Vec squares[R];
  for (Vec& sum : squares) sum = Vec(0.0f);
  for (int64_t at = 0; at < n; at += LANES)
    for (int r = 0; r < R; ++r) {
      const Vec part = get(x + r * n, at);
      squares[r] = at::vec::fmadd(part, part, squares[r]);
    }
  float lanes[R][LANES], totals[R] = {};
  for (int r = 0; r < R; ++r) squares[r].store(lanes[r]);
  for (int i = 0; i < LANES; ++i)
    for (int r = 0; r < R; ++r) totals[r] += lanes[r][i];
  Vec scales[R];
  for (int r = 0; r < R; ++r) scales[r] = Vec(1.0f / std::sqrt(totals[r] / static_cast<float>(n) + eps));
  for (int64_t at = 0; at < n; at += LANES) {
    const Vec by = get(weight, at) + Vec(offset);
    for (int r = 0; r < R; ++r) {
      const Vec part = get(x + r * n, at) * scales[r], normed = (round_first ? rounded<T>(part) : part) * by;
      at + LANES <= n ? put(normed, y + r * n + at) : put(normed, y + r * n + at, n - at);
    }
  }
}

template <typename T>
void rms_rows(const T* x, const T* weight, T* y, int64_t m, int64_t n, float eps, float offset, bool round_first) {
  constexpr int TOGETHER = 4;
  at::parallel_for(0, m, std::max<int64_t>(1, TASK_BYTES / (n * sizeof(T))), [&](int64_t row, int64_t end) {
    for (; row + TOGETHER <= end; row += TOGETHER)
      rms_of<TOGETHER>(x + row * n, weight, y + row * n, n, eps, offset, round_first);
    for (; row < end; ++row) rms_of<1>(x + row * n, weight, y + row * n, n, eps, offset, round_first);
  });
}

void rms_into(const Tensor& rows, const Tensor& weight, Tensor& y, double eps, double offset, bool round_first) {
  const int64_t n = weight.numel(), m = n == 0 ? 0 : rows.numel() / n;
  const auto run = [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    rms_rows(rows.const_data_ptr<T>(), weight.const_data_ptr<T>(), to, m, n, static_cast<float>(eps),
             static_cast<float>(offset), round_first);
  };
  rows.scalar_type() == at::kFloat ? run(y.data_ptr<float>()) : run(y.data_ptr<BFloat16>());
}

// x over its root mean square, times (weight + offset): [..., n] and [n], of one type. `round_first` rounds to
// that type before the product, as some models do.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, double offset, bool round_first) {
  TORCH_CHECK(served(x.scalar_type()) && x.scalar_type() == weight.scalar_type() && weight.is_contiguous() &&
                  x.size(-1) == weight.numel(),
              "tandem::rms_norm wants one type, float32 or bfloat16, and a weight for each element of a row");
  const Tensor rows = x.contiguous();
  Tensor y = at::empty(x.sizes(), x.options());
  rms_into(rows, weight, y, eps, offset, round_first);
  return y;
}

const bool rms_norm_replayed = register_replay("rms_norm", [](const torch::jit::Stack& in, const torch::jit::Stack& out) -> Replay {
  if (!in[0].toTensor().is_contiguous()) return {};
  return [x = in[0].toTensor(), weight = in[1].toTensor(), eps = in[2].toDouble(), offset = in[3].toDouble(),
          round_first = in[4].toBool(), y = out[0].toTensor()]() mutable {
    rms_into(x, weight, y, eps, offset, round_first);
  };
});

// ---- fused operators of a recording, each operation rounded separately

// Rotary embedding of x [..., d]: x * cos + (-x2, x1) * sin, with x1 and x2 the halves of a row and cos and sin
// [..., d] of x's type, which may be broadcast.
template <typename T>
void rotate_rows(const Tensor& x, const Tensor& cos, const Tensor& sin, Tensor& y) {
  const int64_t d = x.size(3), half = d / 2, rows = x.size(0) * x.size(1) * x.size(2);
  const auto *from = x.const_data_ptr<T>(), *c = cos.const_data_ptr<T>(), *s = sin.const_data_ptr<T>();
  T* to = y.data_ptr<T>();
  // Offset of a row in each tensor; `next` moves along the third dimension. Dimensions of size 1 are broadcast.
  struct Walk {
    int64_t strides[3] = {}, at = 0;
    explicit Walk(const Tensor& t) {
      for (int64_t i = 4 - t.dim(); i < 3; ++i)
        if (t.size(i + t.dim() - 4) != 1) strides[i] = t.stride(i + t.dim() - 4);
    }
    void start(int64_t i0, int64_t i1, int64_t i2) { at = i0 * strides[0] + i1 * strides[1] + i2 * strides[2]; }
    void next() { at += strides[2]; }
  };
  at::parallel_for(0, rows, std::max<int64_t>(1, TASK_BYTES / (d * sizeof(T))), [&](int64_t begin, int64_t end) {
    Walk in(x), co(cos), si(sin), out(y);
    int64_t left = 0;  // rows left in the third dimension
    for (int64_t row = begin; row < end; ++row) {
      if (left == 0) {
        const int64_t i2 = row % x.size(2), i1 = row / x.size(2) % x.size(1), i0 = row / x.size(2) / x.size(1);
        for (Walk* each : {&in, &co, &si, &out}) each->start(i0, i1, i2);
        left = x.size(2) - i2;
      }
      const auto pair = [&](int64_t i, const auto& get, const auto& store) {
        const Vec first = get(from + in.at + i), second = get(from + in.at + half + i);
        const auto turned = [&](int64_t at, Vec straight, Vec across) {
          store(rounded<T>(straight * get(c + co.at + at)) + rounded<T>(across * get(s + si.at + at)), to + out.at + at);
        };
        turned(i, first, second.neg());
        turned(half + i, second, first);
      };
      int64_t i = 0;
      for (; i + LANES <= half; i += LANES)
        pair(i, [](const T* p) { return load(p); }, [](Vec v, T* p) { put(v, p); });
      const int rest = static_cast<int>(half - i);
      if (rest > 0)
        pair(i, [rest](const T* p) { return load(p, rest); }, [rest](Vec v, T* p) { put(v, p, rest); });
      for (Walk* each : {&in, &co, &si, &out}) each->next();
      --left;
    }
  });
}

void rotate_into(const Tensor& x, const Tensor& cos, const Tensor& sin, Tensor& y) {
  x.scalar_type() == at::kFloat ? rotate_rows<float>(x, cos, sin, y) : rotate_rows<BFloat16>(x, cos, sin, y);
}

Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  TORCH_CHECK(served(x.scalar_type()) && x.dim() == 4 && x.size(3) % 2 == 0 && x.stride(3) == 1,
              "tandem::rotate wants rows of an even number of float32 or bfloat16");
  for (const Tensor* each : {&cos, &sin}) {
    bool fits = each->scalar_type() == x.scalar_type() && each->dim() <= 4 && each->size(-1) == x.size(3) &&
                each->stride(-1) == 1;
    for (int64_t i = 2; fits && i <= each->dim(); ++i) fits = each->size(-i) == 1 || each->size(-i) == x.size(4 - i);
    TORCH_CHECK(fits, "tandem::rotate: angles of ", each->sizes(), " for rows of ", x.sizes());
  }
  Tensor y = at::empty_like(x);
  TORCH_CHECK(y.stride(3) == 1, "tandem::rotate: strides of x");
  rotate_into(x, cos, sin, y);
  return y;
}

const bool rotate_replayed = register_replay("rotate", [](const torch::jit::Stack& in, const torch::jit::Stack& out) -> Replay {
  return [x = in[0].toTensor(), cos = in[1].toTensor(), sin = in[2].toTensor(), y = out[0].toTensor()]() mutable {
    rotate_into(x, cos, sin, y);
  };
});

void gate_into(const Tensor& a, const Tensor& b, c10::string_view act, Tensor& y) {
  with_act(act, [&](const auto& f) {
    const auto run = [&](auto* to) {
      using T = std::remove_pointer_t<decltype(to)>;
      const T *from = a.const_data_ptr<T>(), *beside = b.const_data_ptr<T>();
      at::parallel_for(0, y.numel(), 1 << 14, [&](int64_t at, int64_t end) {
        tandem::gate(from + at, beside + at, to + at, end - at, f);
      });
    };
    y.scalar_type() == at::kFloat ? run(y.data_ptr<float>()) : run(y.data_ptr<BFloat16>());
  });
}

// act(gate) * up, elementwise; act is "silu", "gelu" or "gelu_tanh".
Tensor gated(const Tensor& gate, const Tensor& up, c10::string_view act) {
  TORCH_CHECK(served(gate.scalar_type()) && gate.scalar_type() == up.scalar_type() && gate.sizes() == up.sizes(),
              "tandem::gated: ", gate.sizes(), " and ", up.sizes());
  const Tensor a = gate.contiguous(), b = up.contiguous();
  Tensor y = at::empty(gate.sizes(), gate.options());
  gate_into(a, b, act, y);
  return y;
}

const bool gated_replayed = register_replay("gated", [](const torch::jit::Stack& in, const torch::jit::Stack& out) -> Replay {
  if (!in[0].toTensor().is_contiguous() || !in[1].toTensor().is_contiguous()) return {};
  return [a = in[0].toTensor(), b = in[1].toTensor(), act = std::string(in[2].toStringRef()),
          y = out[0].toTensor()]() mutable { gate_into(a, b, act, y); };
});

// ---- the machine

// New memory, uint8 [bytes], aligned to a huge page (if smaller, to a page); huge pages are requested, not required.
// Tiles whose cache lines span pages are read up to a tenth slower.
Tensor fresh_memory(int64_t bytes) {
  constexpr int64_t PAGE = 1 << 12, LARGE = 1 << 21;
  TORCH_CHECK(bytes >= 0, "tandem::fresh_memory: ", bytes, " bytes");
  void* start = nullptr;
  TORCH_CHECK_WITH(OutOfMemoryError, posix_memalign(&start, bytes < LARGE ? PAGE : LARGE, std::max<int64_t>(1, bytes)) == 0,
                   "tandem::fresh_memory: no memory for ", bytes, " bytes");
#ifdef MADV_HUGEPAGE
  if (bytes >= LARGE) madvise(start, bytes / LARGE * LARGE, MADV_HUGEPAGE);
#endif
  return at::from_blob(start, {bytes}, std::free, at::TensorOptions().dtype(at::kByte));
}

// The sum of t (float32, contiguous), read once: each thread reads the four quarters of its part at once. This is as
// fast as memory can be read, the reference for steps of few rows. With one accumulator, without prefetching, or as one
// stream, reading is up to a fifth slower.
double stream_read(const Tensor& t) {
  TORCH_CHECK(t.scalar_type() == at::kFloat && t.is_contiguous(), "tandem::stream_read wants contiguous float32");
  constexpr int64_t STREAMS = 4, SUMS = 4, AHEAD = 512 / sizeof(float), TURN = SUMS * LANES;
  const auto* all = t.const_data_ptr<float>();
  const int64_t count = t.numel(), parts = at::get_num_threads();
  std::vector<double> sums(parts);
  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      const float *from = all + count * part / parts, *end = all + count * (part + 1) / parts;
      const int64_t stream = (end - from) / (STREAMS * TURN) * TURN;
      Vec sum[SUMS] = {Vec(0.0f), Vec(0.0f), Vec(0.0f), Vec(0.0f)};
      const auto add = [&](const float* at) {
        for (int64_t i = 0; i < TURN; i += LINE / int64_t(sizeof(float))) __builtin_prefetch(at + AHEAD + i);
        for (int64_t i = 0; i < SUMS; ++i) sum[i] = sum[i] + load(at + i * LANES);
      };
      for (int64_t at = 0; at < stream; at += TURN)
        for (int64_t i = 0; i < STREAMS; ++i) add(from + i * stream + at);
      float lanes[LANES];
      ((sum[0] + sum[1]) + (sum[2] + sum[3])).store(lanes);
      for (int i = 0; i < LANES; ++i) sums[part] += lanes[i];
      for (from += STREAMS * stream; from < end; ++from) sums[part] += *from;
    }
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
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

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("isa() -> str", &tandem::isa);
  m.def("fresh_memory(int bytes) -> Tensor", &tandem::fresh_memory);
  m.def("stream_read(Tensor t) -> float");
  m.def("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor");
  m.def("gated(Tensor gate, Tensor up, str act) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, float offset, bool round_first) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("stream_read", &tandem::stream_read);
  m.impl("rotate", &tandem::rotate);
  m.impl("gated", &tandem::gated);
  m.impl("rms_norm", &tandem::rms_norm);
}
