// What is done to each row by itself, and what the library says of the machine.
#include "ops.h"

#include "dots.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <string>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

namespace tandem {
namespace {

using at::BFloat16;
using at::Tensor;

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

// ---- the machine

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

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("isa() -> str", &tandem::isa);
  m.def("huge_pages(Tensor t) -> ()");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, float offset, bool round_first) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("huge_pages", &tandem::huge_pages);
  m.impl("rms_norm", &tandem::rms_norm);
}
