// The elementwise functions of models, for the replacements of torch's operators and for the fused ones alike: the same
// bits from both.
#pragma once

#include "dots.h"

namespace tandem {

inline Vec sigmoid_of(Vec x) { return Vec(1.0f) / (Vec(1.0f) + x.neg().exp()); }
inline Vec silu_of(Vec x) { return x / (Vec(1.0f) + x.neg().exp()); }
inline Vec gelu_of(Vec x) { return Vec(0.5f) * x * (Vec(1.0f) + (x * Vec(0.70710678118654752f)).erf()); }
inline Vec tanh_gelu_of(Vec x) {
  const Vec inner = Vec(0.79788456080286536f) * (x + Vec(0.044715f) * x * x * x);
  return Vec(0.5f) * x * (Vec(1.0f) + inner.tanh());
}

}  // namespace tandem
