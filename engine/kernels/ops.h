// What the two source files share.
#pragma once

#include <ATen/core/Tensor.h>

namespace tandem {

// Types that the operators have.
bool served(at::ScalarType type);

// y [m, n] = x [m, k] times w [k, n], plus bias [n] where it is defined, all of one served type. `y` has its rows' elements
// side by side, and so has `bias`. Which order a sum has follows from the strides of w and from k alone. With bias, w must
// have its columns' elements side by side.
void product(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias, at::Tensor& y);

}  // namespace tandem
