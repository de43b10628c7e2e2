// Products with weights of 4, 8 or 16 bits, which are widened as they are read.
//
// A weight is the value of its code times a scale: one per row, or one per `group` of adjacent elements along k. Codes
// are stored in panels, [n / PANEL][k / 2][STEP_BYTES], padded with zeros, and scales separately,
// [n / PANEL][groups][PANEL]. The value of every code is exact in bfloat16, so the products are those of bfloat16 (or
// float32) weights; a group is summed in float32 along k, in order, and its sum is scaled once. Each column has its own
// lane: a row's bits do not depend on the other rows, nor on whether a panel is widened as it is read or before.
#include "ops.h"

#include "capture.h"
#include "code_tiles.h"
#include "codes.h"
#include "dots.h"
#include "functions.h"

#include <ATen/Parallel.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <type_traits>
#include <vector>

namespace tandem {
namespace {

using at::BFloat16;
using at::Tensor;

constexpr int64_t WIDEN_FROM = 3 * ROWS;  // rows; with more, the panel is widened first

struct Scales {
  const float* of_panel;
  int64_t count, pairs;  // groups, and pairs in each
};

// Adds R rows of x times one panel to `totals`, group by group. Not inlined, and with the totals in memory, or the
// compiler runs out of registers for the sums.
template <typename D, int R, typename S>
__attribute__((noinline)) void group_tiles(const typename D::X* x, int64_t k, const uint8_t* panel, const Scales& scales,
                                           float (*totals)[PANEL]) {
  const S source(panel);
  const int64_t whole = k / 2;
  const float* of_group = scales.of_panel;
  for (int64_t begin = 0, group = 0; group < scales.count; ++group, of_group += PANEL) {
    Vec sums[R][COLS];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < COLS; ++c) sums[r][c] = Vec(0.0f);
    const int64_t end = std::min(whole, begin + scales.pairs);
    for (; begin < end; ++begin) D::template step<2>(x + 2 * begin, k, source(begin), sums);
    if (2 * end + 1 == k && group == scales.count - 1) D::template step<1>(x + 2 * end, k, source(end), sums);
    asm volatile("" ::: "memory");  // keeps the totals in memory
    for (int c = 0; c < COLS; ++c) {
      const Vec scale = load(of_group + c * LANES);
      for (int r = 0; r < R; ++r) {
        float* total = totals[r] + c * LANES;
        at::vec::fmadd(sums[r][c], scale, load(total)).store(total);
      }
    }
    asm volatile("" ::: "memory");
  }
}

// R rows of x times one panel.
template <typename D, int R, typename S, typename T>
void tile(const typename D::X* x, int64_t k, const uint8_t* panel, const Scales& scales, const T* bias, T* y,
          int64_t stride, int64_t columns) {
  alignas(LINE) float totals[R][PANEL] = {};
  group_tiles<D, R, S>(x, k, panel, scales, totals);
  for (int c = 0; c < COLS; ++c) {
    const int64_t count = std::min<int64_t>(LANES, columns - c * LANES);
    if (count <= 0) break;
    Vec add(0.0f);
    if (bias != nullptr) add = count == LANES ? load(bias + c * LANES) : load(bias + c * LANES, static_cast<int>(count));
    for (int r = 0; r < R; ++r) {
      const Vec total = load(totals[r] + c * LANES);
      put(bias == nullptr ? total : total + add, y + r * stride + c * LANES, count);
    }
  }
}

template <typename D, typename S, int R = ROWS, typename T>
void tiles(int64_t rows, const typename D::X* x, int64_t k, const uint8_t* panel, const Scales& scales, const T* bias,
           T* y, int64_t stride, int64_t columns) {
  if (rows == R) return tile<D, R, S>(x, k, panel, scales, bias, y, stride, columns);
  if constexpr (R > 1) tiles<D, S, R - 1>(rows, x, k, panel, scales, bias, y, stride, columns);
}

template <typename F, typename D, typename T>
void linear_rows(const typename D::X* x, const uint8_t* codes, const float* scales, int64_t groups, int64_t group,
                 const T* bias, T* y, int64_t m, int64_t k, int64_t n) {
  const int64_t panels = panels_of(n), pairs = pairs_of(k);
  // If there are few panels, their rows are split too, so that every thread has work.
  const int64_t parts = parts_of(m, panels, 4 * ROWS);
  const int64_t part = (m + parts - 1) / parts;
  const int64_t grain =
      std::max<int64_t>(1, TASK_BYTES / (pairs * STEP_BYTES<F> + part * k * static_cast<int64_t>(sizeof(float))));
  at::parallel_for(0, panels * parts, grain, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> kept;
    int64_t held = -1;  // the panel in `kept`
    for (int64_t task = begin; task < end; ++task) {
      const int64_t panel = task / parts, first = panel * PANEL, from = task % parts * part;
      const int64_t rows = std::min(part, m - from);
      if (rows <= 0) continue;
      const uint8_t* own = codes + panel * pairs * STEP_BYTES<F>;
      const Scales scale{scales + panel * groups * PANEL, groups, group / 2};
      const int64_t height = (rows + (rows + ROWS - 1) / ROWS - 1) / ((rows + ROWS - 1) / ROWS);
      if (rows > WIDEN_FROM && held != panel) {
        kept.resize(pairs * D::BYTES);
        widen<F, D>(own, pairs, kept.data());
        held = panel;
      }
      const auto run = rows > WIDEN_FROM ? tiles<D, AsKept<D>, ROWS, T> : tiles<D, AsCodes<F>, ROWS, T>;
      for (int64_t row = from; row < from + rows; row += height)
        run(std::min(height, from + rows - row), x + row * k, k, rows > WIDEN_FROM ? kept.data() : own, scale,
            bias == nullptr ? nullptr : bias + first, y + row * n + first, n, n - first);
    }
  });
}

// ---- the operators

template <typename Do>
void with_format(c10::string_view format, const Do& go) {
  if (format == "int8") return go(Int8{});
  if (format == "fp8") return go(Fp8{});
  if (format == "int4") return go(Int4{});
  if (format == "bf16") return go(Bf16Code{});
  TORCH_CHECK(false, "tandem: no format ", format, " of quantised weights");
}

int64_t groups_of(int64_t k, int64_t group) { return std::max<int64_t>(1, (k + group - 1) / group); }

void check_sizes(const Tensor& codes, const Tensor& scales, int64_t n, int64_t k, int64_t group, int64_t step_bytes) {
  TORCH_CHECK(n > 0 && k > 0 && group > 0 && group % 2 == 0, "tandem: a weight of ", n, " x ", k, " in groups of ", group);
  TORCH_CHECK(codes.scalar_type() == at::kByte && codes.is_contiguous() &&
                  codes.numel() == panels_of(n) * pairs_of(k) * step_bytes,
              "tandem: the codes are not packed for this size");
  TORCH_CHECK(scales.scalar_type() == at::kFloat && scales.is_contiguous() &&
                  scales.numel() == panels_of(n) * groups_of(k, group) * PANEL,
              "tandem: the scales are not packed for this size");
}

// Packs codes [n, k], the low bits of int16, into panels for `linear_codes`; flat bytes.
Tensor pack_codes(const Tensor& codes, c10::string_view format) {
  TORCH_CHECK(codes.dim() == 2 && codes.scalar_type() == at::kShort, "tandem::pack_codes wants a matrix of int16");
  const Tensor from = codes.contiguous();
  const int64_t n = from.size(0), k = from.size(1), pairs = pairs_of(k);
  Tensor packed;
  with_format(format, [&](auto kind) {
    using F = decltype(kind);
    packed = at::zeros({panels_of(n) * pairs * STEP_BYTES<F>}, from.options().dtype(at::kByte));
    const int16_t* code = from.const_data_ptr<int16_t>();
    uint8_t* out = packed.data_ptr<uint8_t>();
    at::parallel_for(0, panels_of(n), 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * PANEL; row < std::min(n, end * PANEL); ++row)
        for (int64_t at = 0; at < k; ++at) {
          const auto [byte, shift] = place<F>(row % PANEL, at % 2);
          uint8_t* to = out + (row / PANEL * pairs + at / 2) * STEP_BYTES<F> + byte;
          const auto bits = static_cast<uint16_t>(code[row * k + at]);
          if constexpr (F::BITS == 16)
            std::memcpy(to, &bits, sizeof(bits));
          else
            *to |= static_cast<uint8_t>((bits & ((1u << F::BITS) - 1)) << shift);
        }
    });
  });
  return packed;
}

// Packs scales [n, groups] float32 likewise.
Tensor pack_scales(const Tensor& scales) {
  TORCH_CHECK(scales.dim() == 2 && scales.scalar_type() == at::kFloat, "tandem::pack_scales wants a matrix of float32");
  const Tensor from = scales.contiguous();
  const int64_t n = from.size(0), groups = from.size(1);
  Tensor packed = at::zeros({panels_of(n) * groups * PANEL}, from.options());
  const float* scale = from.const_data_ptr<float>();
  float* out = packed.data_ptr<float>();
  for (int64_t row = 0; row < n; ++row)
    for (int64_t group = 0; group < groups; ++group)
      out[(row / PANEL * groups + group) * PANEL + row % PANEL] = scale[row * groups + group];
  return packed;
}

// The dequantised weights, [n, k] float32.
Tensor unpack_codes(const Tensor& codes, const Tensor& scales, int64_t n, int64_t k, int64_t group,
                    c10::string_view format) {
  Tensor out = at::empty({n, k}, scales.options());
  with_format(format, [&](auto kind) {
    using F = decltype(kind);
    check_sizes(codes, scales, n, k, group, STEP_BYTES<F>);
    const int64_t groups = groups_of(k, group), pairs = pairs_of(k);
    const uint8_t* from = codes.const_data_ptr<uint8_t>();
    const float* scale = scales.const_data_ptr<float>();
    float* to = out.data_ptr<float>();
    at::parallel_for(0, n, 16, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t at = 0; at < k; ++at) {
          const auto [byte, shift] = place<F>(row % PANEL, at % 2);
          const uint8_t* where = from + (row / PANEL * pairs + at / 2) * STEP_BYTES<F> + byte;
          uint16_t bits = *where;
          if constexpr (F::BITS == 16) std::memcpy(&bits, where, sizeof(bits));
          if constexpr (F::BITS < 16) bits = bits >> shift & ((1u << F::BITS) - 1);
          to[row * k + at] = F::value(bits) * scale[(row / PANEL * groups + at / group) * PANEL + row % PANEL];
        }
    });
  });
  return out;
}

struct Coded {
  const Tensor &codes, &scales;
  const std::optional<Tensor>& bias;
  int64_t n, k, group;
  c10::string_view format;
};

// Whether x is multiplied by tiles; in the other orders sums and gates are computed after the products, separately.
bool by_tiles(const Tensor& x) {
#ifdef TANDEM_TILES
  return tandem::by_tiles() && x.scalar_type() == at::kBFloat16;
#else
  return false;
#endif
}

void check(const Tensor& x, const Coded& w) {
  TORCH_CHECK(served(x.scalar_type()) && x.dim() > 0 && x.size(-1) == w.k, "tandem::linear_codes: x is ", x.sizes(),
              " of ", x.scalar_type(), ", the weight ", w.n, " x ", w.k);
  TORCH_CHECK(!w.bias.has_value() ||
                  (w.bias->scalar_type() == x.scalar_type() && w.bias->is_contiguous() && w.bias->numel() == w.n),
              "tandem::linear_codes wants a bias of x's type");
  with_format(w.format, [&](auto kind) { check_sizes(w.codes, w.scales, w.n, w.k, w.group, STEP_BYTES<decltype(kind)>); });
}

// x [..., k], float32 or bfloat16, times the packed weight [n, k] transposed, plus bias [n]; by tiles also plus
// `beside`, or, given `second`, act(that) times the product with `second`. Written into `into` if defined.
Tensor multiply_codes(const Tensor& x, Prepared& prepared, const Coded& w, const Tensor& beside = {},
                      const Coded* second = nullptr, c10::string_view act = {}, const Tensor& into = {}) {
  check(x, w);
  if (second != nullptr) check(x, *second);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = w.n;
  Tensor y = into.defined() ? into : at::empty(sizes, x.options());
  const int64_t m = x.numel() / w.k, groups = groups_of(w.k, w.group);
  const auto run = [&](auto* into) {
    using T = std::remove_pointer_t<decltype(into)>;
    using D = std::conditional_t<std::is_same_v<T, float>, ByFloats, ForBf16>;
    using X = typename D::X;
    const auto type = c10::CppTypeToScalarType<X>::value;
    const Tensor rows = x.scalar_type() == type ? x.contiguous() : x.contiguous().to(type);
    const X* from = rows.const_data_ptr<X>();
    with_format(w.format, [&](auto kind) {
      using F = decltype(kind);
      const auto bias = [](const Coded& of) { return of.bias.has_value() ? of.bias->const_data_ptr<T>() : nullptr; };
#ifdef TANDEM_TILES
      if constexpr (std::is_same_v<D, ByPairs>)
        if (by_tiles(x)) {
          const auto packed = [&](const Coded& of) {
            return code_tiles::Packed{of.codes.const_data_ptr<uint8_t>(), of.scales.const_data_ptr<float>(), bias(of)};
          };
          const T* along = beside.defined() ? beside.const_data_ptr<T>() : nullptr;
          const code_tiles::Act apply = second == nullptr ? nullptr : code_tiles::act_of(act);
          return code_tiles::linear_tiles<F>(from, prepared, {{packed(w), packed(second == nullptr ? w : *second)}, groups,
                                                              w.group, m, w.k, w.n, along, apply, into});
        }
#endif
      linear_rows<F, D, T>(from, w.codes.const_data_ptr<uint8_t>(), w.scales.const_data_ptr<float>(), groups, w.group,
                           bias(w), into, m, w.k, w.n);
    });
  };
  x.scalar_type() == at::kFloat ? run(y.data_ptr<float>()) : run(y.data_ptr<BFloat16>());
  return y;
}

Tensor linear_codes(const Tensor& x, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& bias,
                    int64_t n, int64_t k, int64_t group, c10::string_view format) {
  Prepared prepared;
  return multiply_codes(x, prepared, {codes, scales, bias, n, k, group, format});
}

// beside [..., n] plus `linear_codes`, rounded as by two operators.
Tensor linear_codes_add(const Tensor& x, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& bias,
                        int64_t n, int64_t k, int64_t group, c10::string_view format, const Tensor& beside) {
  TORCH_CHECK(beside.scalar_type() == x.scalar_type() && beside.size(-1) == n && beside.numel() * k == x.numel() * n,
              "tandem::linear_codes_add: ", beside.sizes(), " is added to ", x.sizes(), " x ", n);
  Prepared prepared;
  const Coded weight{codes, scales, bias, n, k, group, format};
  if (by_tiles(x)) return multiply_codes(x, prepared, weight, beside.contiguous()).view(beside.sizes());
  return multiply_codes(x, prepared, weight).view(beside.sizes()).add_(beside);
}

// `linear_codes` of the same x with several weights.
std::vector<Tensor> linears_codes(const Tensor& x, at::TensorList codes, at::TensorList scales,
                                  const c10::List<std::optional<Tensor>>& biases, at::IntArrayRef n,
                                  at::IntArrayRef group, const c10::List<std::string>& formats, int64_t k) {
  const size_t count = codes.size();
  TORCH_CHECK(scales.size() == count && biases.size() == count && n.size() == count && group.size() == count &&
                  formats.size() == count,
              "tandem::linears_codes wants as many of each");
  Prepared prepared;
  std::vector<Tensor> out;
  for (size_t i = 0; i < count; ++i) {
    const std::optional<Tensor> bias = biases.get(i);
    const std::string format = formats.get(i);
    out.push_back(multiply_codes(x, prepared, {codes[i], scales[i], bias, n[i], k, group[i], format}));
  }
  return out;
}

// act(`linear_codes` with the first weight) times `linear_codes` with the second, rounded as by three operators.
Tensor linears_codes_gated(const Tensor& x, at::TensorList codes, at::TensorList scales,
                           const c10::List<std::optional<Tensor>>& biases, at::IntArrayRef n, at::IntArrayRef group,
                           const c10::List<std::string>& formats, int64_t k, c10::string_view act) {
  TORCH_CHECK(codes.size() == 2 && scales.size() == 2 && biases.size() == 2 && n.size() == 2 && group.size() == 2 &&
                  formats.size() == 2 && n[0] == n[1],
              "tandem::linears_codes_gated wants two weights of one size");
  if (by_tiles(x) && group[0] == group[1] && formats.get(0) == formats.get(1)) {
    const std::optional<Tensor> bias[] = {biases.get(0), biases.get(1)};
    const std::string format = formats.get(0);
    const Coded second{codes[1], scales[1], bias[1], n[1], k, group[1], format};
    Prepared prepared;
    return multiply_codes(x, prepared, {codes[0], scales[0], bias[0], n[0], k, group[0], format}, {}, &second, act);
  }
  const std::vector<Tensor> both = linears_codes(x, codes, scales, biases, n, group, formats, k);
  const auto run = [&](auto* y, const auto* up) {
    with_act(act, [&](const auto& f) {
      at::parallel_for(0, both[0].numel(), 1 << 14,
                       [&](int64_t at, int64_t end) { gate(y + at, up + at, y + at, end - at, f); });
    });
  };
  x.scalar_type() == at::kFloat ? run(both[0].data_ptr<float>(), both[1].const_data_ptr<float>())
                                : run(both[0].data_ptr<BFloat16>(), both[1].const_data_ptr<BFloat16>());
  return both[0];
}

// ---- captured steps

// A quantised weight among an operator's arguments; it owns its tensors.
struct OwnedWeight {
  Tensor codes, scales;
  std::optional<Tensor> bias;
  int64_t n, k, group;
  std::string format;

  Coded coded() const { return {codes, scales, bias, n, k, group, format}; }
};

using torch::jit::Stack;

Replay replay_of_codes(const Stack& in, const Tensor& beside, const Tensor& y) {
  const Tensor x = in[0].toTensor();
  if (!by_tiles(x) || (beside.defined() && !beside.is_contiguous())) return {};
  const std::optional<Tensor> bias = in[3].isNone() ? std::nullopt : std::optional<Tensor>(in[3].toTensor());
  const OwnedWeight weight{in[1].toTensor(), in[2].toTensor(), bias,         in[4].toInt(),
                           in[5].toInt(),    in[6].toInt(),    in[7].toStringRef()};
  return [x, y, beside, weight] {
    Prepared prepared;
    multiply_codes(x, prepared, weight.coded(), beside, nullptr, {}, y);
  };
}

std::vector<OwnedWeight> weights_of(const Stack& in) {
  const std::vector<Tensor> codes = in[1].toTensorVector(), scales = in[2].toTensorVector();
  const auto biases = in[3].to<c10::List<std::optional<Tensor>>>();
  const std::vector<int64_t> n = in[4].toIntVector(), group = in[5].toIntVector();
  const auto formats = in[6].to<c10::List<std::string>>();
  std::vector<OwnedWeight> weights;
  for (size_t i = 0; i < codes.size(); ++i)
    weights.push_back({codes[i], scales[i], biases.get(i), n[i], in[7].toInt(), group[i], formats.get(i)});
  return weights;
}

const bool linear_replayed = register_replay("linear_codes", [](const Stack& in, const Stack& out) {
  return replay_of_codes(in, {}, out[0].toTensor());
});
const bool linear_add_replayed = register_replay("linear_codes_add", [](const Stack& in, const Stack& out) {
  return replay_of_codes(in, in[8].toTensor(), out[0].toTensor());
});
const bool linears_replayed = register_replay("linears_codes", [](const Stack& in, const Stack& out) -> Replay {
  return [x = in[0].toTensor(), weights = weights_of(in), y = out[0].toTensorVector()] {
    Prepared prepared;
    for (size_t i = 0; i < weights.size(); ++i) multiply_codes(x, prepared, weights[i].coded(), {}, nullptr, {}, y[i]);
  };
});
const bool linears_gated_replayed = register_replay("linears_codes_gated", [](const Stack& in, const Stack& out) -> Replay {
  const Tensor x = in[0].toTensor();
  const std::vector<OwnedWeight> weights = weights_of(in);
  if (!by_tiles(x) || weights[0].group != weights[1].group || weights[0].format != weights[1].format) return {};
  return [x, weights, act = std::string(in[8].toStringRef()), y = out[0].toTensor()] {
    Prepared prepared;
    const Coded second = weights[1].coded();
    multiply_codes(x, prepared, weights[0].coded(), {}, &second, act, y);
  };
});

}  // namespace

void linear_codes_into(const Tensor& x, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& bias,
                       int64_t n, int64_t k, int64_t group, std::string_view format, const Tensor& y) {
  Prepared prepared;
  multiply_codes(x, prepared, {codes, scales, bias, n, k, group, format}, {}, nullptr, {}, y);
}

}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("pack_codes(Tensor codes, str format) -> Tensor");
  m.def("pack_scales(Tensor scales) -> Tensor");
  m.def("unpack_codes(Tensor codes, Tensor scales, int n, int k, int group, str format) -> Tensor");
  m.def("linear_codes(Tensor x, Tensor codes, Tensor scales, Tensor? bias, int n, int k, int group, str format)"
        " -> Tensor");
  m.def("linear_codes_add(Tensor x, Tensor codes, Tensor scales, Tensor? bias, int n, int k, int group, str format,"
        " Tensor beside) -> Tensor");
  m.def("linears_codes(Tensor x, Tensor[] codes, Tensor[] scales, Tensor?[] biases, int[] n, int[] group,"
        " str[] formats, int k) -> Tensor[]");
  m.def("linears_codes_gated(Tensor x, Tensor[] codes, Tensor[] scales, Tensor?[] biases, int[] n, int[] group,"
        " str[] formats, int k, str act) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("pack_codes", &tandem::pack_codes);
  m.impl("pack_scales", &tandem::pack_scales);
  m.impl("unpack_codes", &tandem::unpack_codes);
  m.impl("linear_codes", &tandem::linear_codes);
  m.impl("linear_codes_add", &tandem::linear_codes_add);
  m.impl("linears_codes", &tandem::linears_codes);
  m.impl("linears_codes_gated", &tandem::linears_codes_gated);
}
