// Elementwise functions of models, shared by the replacements of torch's operators and by the fused operators, so that
// both give the same bits.
#pragma once

#include "dots.h"

#include <c10/util/Exception.h>
#include <c10/util/string_view.h>

namespace tandem {

template <typename T>
Vec sigmoid_of(Vec x) {
  return Vec(1.0f) / (Vec(1.0f) + exp_of<T>(x.neg()));
}

struct Silu {
  template <typename T>
  static Vec of(Vec x) {
    return x / (Vec(1.0f) + exp_of<T>(x.neg()));
  }
};

struct Gelu {
  template <typename T>
  static Vec of(Vec x) {
    return Vec(0.5f) * x * (Vec(1.0f) + (x * Vec(0.70710678118654752f)).erf());
  }
};

struct TanhGelu {
  template <typename T>
  static Vec of(Vec x) {
    const Vec inner = Vec(0.79788456080286536f) * (x + Vec(0.044715f) * x * x * x);
    return Vec(0.5f) * x * (Vec(1.0f) + inner.tanh());
  }
};

// y[0..count) = act(gate) * up, each rounded; y may alias gate or up. `Act` is a struct above.
template <typename T, typename Act>
void gate(const T* gate, const T* up, T* y, int64_t count, const Act&) {
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES)
    put(rounded<T>(Act::template of<T>(load(gate + at))) * load(up + at), y + at);
  const int rest = static_cast<int>(count - at);
  if (rest > 0) put(rounded<T>(Act::template of<T>(load(gate + at, rest))) * load(up + at, rest), y + at, rest);
}

// Calls f with the function of this name: "silu", "gelu" or "gelu_tanh".
template <typename F>
void with_act(c10::string_view name, const F& f) {
  if (name == "silu")
    f(Silu());
  else if (name == "gelu")
    f(Gelu());
  else if (name == "gelu_tanh")
    f(TanhGelu());
  else
    TORCH_CHECK(false, "tandem: unknown function ", name);
}

}  // namespace tandem
