// Replacements, while a step runs (`torch.ops.tandem.stepping`), for torch's operators whose result for an element
// depends on the tensor's other elements.
//
// Torch sums a matrix product in an order that depends on its number of rows. It computes an elementwise function by a
// vector function in the body of a tensor and by another, scalar one in its tail; where the tail begins depends on the
// shape and on the number of threads. The replacements do neither. They serve float32 and bfloat16, for modules that
// call these operators themselves (experts of a mixture, Conv1D, activations); other types and calls, and all calls
// outside a step, go to torch's kernels.
#include "ops.h"

#include "dots.h"
#include "functions.h"

#include <ATen/Parallel.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/cos_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/erf_cpu_dispatch.h>
#include <ATen/ops/exp_cpu_dispatch.h>
#include <ATen/ops/gelu_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/sigmoid_cpu_dispatch.h>
#include <ATen/ops/silu_cpu_dispatch.h>
#include <ATen/ops/sin_cpu_dispatch.h>
#include <ATen/ops/softplus_cpu_dispatch.h>
#include <ATen/ops/tanh_cpu_dispatch.h>
#include <torch/library.h>

#include <cmath>
#include <memory>
#include <string_view>

namespace tandem {
namespace {

using at::BFloat16;
using at::Scalar;
using at::Tensor;

thread_local bool in_step = false;

// ---- products

bool ours(const Tensor& a, const Tensor& b) {
  return in_step && served(a.scalar_type()) && a.scalar_type() == b.scalar_type() && a.size(-1) > 0 &&
         a.size(-1) == b.size(-2);
}

Tensor mm(const Tensor& a, const Tensor& b) {
  if (!ours(a, b)) return at::cpu::mm(a, b);
  Tensor y = at::empty({a.size(0), b.size(1)}, a.options());
  product(a, b, {}, y);
  return y;
}

Tensor& mm_out(const Tensor& a, const Tensor& b, Tensor& out) {
  if (!ours(a, b)) return at::cpu::mm_out(out, a, b);
  const Tensor y = mm(a, b);
  out.resize_(y.sizes());
  return out.copy_(y);
}

Tensor addmm(const Tensor& add, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  if (!ours(a, b) || add.scalar_type() != a.scalar_type() || beta.toDouble() != 1.0 || alpha.toDouble() != 1.0)
    return at::cpu::addmm(add, a, b, beta, alpha);
  return mm(a, b).add_(add);
}

Tensor bmm(const Tensor& a, const Tensor& b) {
  if (!ours(a, b)) return at::cpu::bmm(a, b);
  Tensor y = at::empty({a.size(0), a.size(1), b.size(2)}, a.options());
  for (int64_t i = 0; i < a.size(0); ++i) {
    Tensor into = y[i];
    product(a[i], b[i], {}, into);
  }
  return y;
}

// ---- elementwise: every element goes through the vector function, the last ones padded with zeros

template <typename T, typename F>
void each(const Tensor& from, Tensor& to, const F& f) {
  const T* x = from.const_data_ptr<T>();
  T* y = to.data_ptr<T>();
  at::parallel_for(0, from.numel(), 1 << 14, [&](int64_t at, int64_t end) {
    for (; at + LANES <= end; at += LANES) put(f(load(x + at), T()), y + at);
    if (at < end) put(f(load(x + at, static_cast<int>(end - at)), T()), y + at, end - at);
  });
}

bool ours(const Tensor& x) { return in_step && served(x.scalar_type()); }

template <typename F>
Tensor elementwise(const Tensor& x, const F& f) {
  const Tensor from = x.contiguous();
  Tensor to = at::empty(x.sizes(), x.options());
  x.scalar_type() == at::kFloat ? each<float>(from, to, f) : each<BFloat16>(from, to, f);
  return to;
}

// Not Vec's own sine and cosine: one large angle changes their range reduction of the whole vector.
template <typename F>
Vec one_by_one(Vec x, const F& f) {
  float lanes[LANES];
  x.store(lanes);
  for (float& lane : lanes) lane = f(lane);
  return Vec::loadu(lanes);
}

// F is an expression of a vector v of elements of type T.
#define TANDEM_ELEMENTWISE(NAME, F)                                                    \
  Tensor NAME(const Tensor& x) {                                                       \
    if (!ours(x)) return at::cpu::NAME(x);                                             \
    return elementwise(x, [](Vec v, auto type) {                                       \
      using T [[maybe_unused]] = decltype(type);                                       \
      return F;                                                                        \
    });                                                                                \
  }                                                                                    \
  Tensor& NAME##_(Tensor& x) { return ours(x) ? x.copy_(NAME(x)) : at::cpu::NAME##_(x); }

TANDEM_ELEMENTWISE(cos, one_by_one(v, [](float a) { return std::cos(a); }))
TANDEM_ELEMENTWISE(erf, v.erf())
TANDEM_ELEMENTWISE(exp, exp_of<T>(v))
TANDEM_ELEMENTWISE(sigmoid, sigmoid_of<T>(v))
TANDEM_ELEMENTWISE(silu, Silu::of<T>(v))
TANDEM_ELEMENTWISE(sin, one_by_one(v, [](float a) { return std::sin(a); }))
TANDEM_ELEMENTWISE(tanh, v.tanh())
#undef TANDEM_ELEMENTWISE

Tensor gelu(const Tensor& x, c10::string_view approximate) {
  if (!ours(x)) return at::cpu::gelu(x, approximate);
  const auto by = [&](auto act) {
    return elementwise(x, [](Vec v, auto type) { return decltype(act)::template of<decltype(type)>(v); });
  };
  return approximate == "tanh" ? by(TanhGelu()) : by(Gelu());
}

Tensor softplus(const Tensor& x, const Scalar& beta, const Scalar& threshold) {
  if (!ours(x)) return at::cpu::softplus(x, beta, threshold);
  const Vec factor(beta.toFloat()), limit(threshold.toFloat());
  return elementwise(x, [=](Vec v, auto) {
    const Vec scaled = v * factor;
    return Vec::blendv(scaled.exp().log1p() / factor, v, scaled > limit);
  });
}

// ---- the switch

class Silent : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Registers the functions above in torch's dispatcher for good, without torch's warning about replaced kernels.
void install() {
  static std::unique_ptr<torch::Library> library;
  if (library) return;
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  library->impl("mm", &mm);
  library->impl("mm.out", &mm_out);
  library->impl("addmm", &addmm);
  library->impl("bmm", &bmm);
  library->impl("cos", &cos);
  library->impl("erf", &erf);
  library->impl("exp", &exp);
  library->impl("exp_", &exp_);
  library->impl("gelu", &gelu);
  library->impl("sigmoid", &sigmoid);
  library->impl("sigmoid_", &sigmoid_);
  library->impl("silu", &silu);
  library->impl("silu_", &silu_);
  library->impl("sin", &sin);
  library->impl("softplus", &softplus);
  library->impl("tanh", &tanh);
  library->impl("tanh_", &tanh_);
}

// Sets whether a step runs on this thread; returns the previous value.
bool stepping(bool now) {
  install();
  const bool before = in_step;
  in_step = now;
  return before;
}

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) { m.def("stepping(bool now) -> bool", &tandem::stepping); }
