// What the source files share.
//
// Sums of the operators `torch.ops.tandem.*` are in float32, in an order that depends on nothing but the token itself: a
// token's result does not depend on what else is in the step, nor on whether it comes there alone or in a chunk.
#pragma once

#include <ATen/core/Tensor.h>

namespace tandem {

constexpr int64_t TASK_BYTES = 1 << 16;  // what one thread reads at least

inline at::Tensor rows_of(const at::Tensor& t) {
  return t.dim() > 0 && t.stride(-1) != 1 && t.size(-1) != 1 ? t.contiguous() : t;
}

// Types that the operators have.
bool served(at::ScalarType type);

// y [m, n] = x [m, k] times w [k, n], plus bias [n] where it is defined, all of one served type. `y` has its rows' elements
// side by side, and so has `bias`. Which order a sum has follows from the strides of w and from k alone. With bias, w must
// have its columns' elements side by side.
void product(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias, at::Tensor& y);

}  // namespace tandem
