// The products of a mixture of experts: each row of x with the weight of the expert that was chosen for it.
#include "ops.h"

#include "capture.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tandem {
namespace {

using at::Tensor;

constexpr int64_t COPIED_BYTES = 1 << 15;  // that one task copies at least

// The places of `chosen`, expert by expert, in order within each; those of expert e begin at starts[e].
struct ByExpert {
  std::vector<int64_t> places, starts;

  ByExpert(const Tensor& chosen, int64_t experts) : places(chosen.numel()), starts(experts + 1) {
    const int64_t* of = chosen.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < chosen.numel(); ++i) {
      TORCH_CHECK_INDEX(of[i] >= 0 && of[i] < experts, "tandem::experts: there is no expert ", of[i]);
      ++starts[of[i] + 1];
    }
    for (int64_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t i = 0; i < chosen.numel(); ++i) places[next[of[i]]++] = i;
  }
};

// Copies rows of `bytes` bytes: row from(i) to row to(i), for each i below `count`.
template <typename From, typename To>
void copy_rows(const Tensor& source, const Tensor& target, int64_t count, int64_t bytes, const From& from, const To& to) {
  const auto* read = static_cast<const char*>(source.const_data_ptr());
  auto* written = static_cast<char*>(target.data_ptr());
  at::parallel_for(0, count, std::max<int64_t>(1, COPIED_BYTES / std::max<int64_t>(1, bytes)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) std::memcpy(written + to(i) * bytes, read + from(i) * bytes, bytes);
  });
}

std::optional<Tensor> of_expert(const std::optional<Tensor>& all, int64_t expert) {
  return all.has_value() ? std::optional<Tensor>(all->select(0, expert)) : std::nullopt;
}

// The weights [n, k] of all experts and which of them are chosen; it owns its tensors. Each row of x has as many places
// in `chosen`, one after another.
struct Weights {
  Tensor chosen, packed;  // packed[e]: panels, or codes
  std::optional<Tensor> scales, bias;
  int64_t n, k, group;  // group and format are those of codes
  std::string format;

  void check(const Tensor& x) const {
    TORCH_CHECK(x.dim() == 2 && x.size(1) == k && chosen.scalar_type() == at::kLong && packed.dim() == 2,
                "tandem::experts: x is ", x.sizes(), ", the weights' rows have ", k, " elements");
    TORCH_CHECK(x.size(0) == 0 ? chosen.numel() == 0 : chosen.numel() % x.size(0) == 0, "tandem::experts: ",
                chosen.numel(), " experts for ", x.size(0), " rows");
    for (const std::optional<Tensor>* each : {&scales, &bias})
      TORCH_CHECK(!each->has_value() || ((*each)->is_contiguous() && (*each)->dim() == 2 && (*each)->size(0) == packed.size(0)),
                  "tandem::experts wants scales and biases for each expert");
  }

  // y [chosen, n] from x [rows, k], both contiguous.
  void multiply(const Tensor& x, const Tensor& y) const {
    const int64_t count = chosen.numel(), experts = packed.size(0), each = count / std::max<int64_t>(1, x.size(0));
    const ByExpert order(chosen, experts);
    const auto place = [&](int64_t i) { return order.places[i]; };
    const auto same = [](int64_t i) { return i; };
    const Tensor rows = at::empty({count, k}, x.options()), results = at::empty({count, n}, x.options());
    copy_rows(x, rows, count, k * x.element_size(), [&](int64_t i) { return place(i) / each; }, same);
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t first = order.starts[e], some = order.starts[e + 1] - first;
      if (some == 0) continue;
      const Tensor from = rows.narrow(0, first, some), to = results.narrow(0, first, some);
      if (scales.has_value())
        linear_codes_into(from, packed.select(0, e), scales->select(0, e), of_expert(bias, e), n, k, group, format, to);
      else
        linear_into(from, packed.select(0, e), of_expert(bias, e), n, k, to);
    }
    copy_rows(results, y, count, n * x.element_size(), same, place);
  }
};

Tensor multiplied(const Tensor& x, const Weights& weights) {
  weights.check(x);
  Tensor y = at::empty({weights.chosen.numel(), weights.n}, x.options());
  weights.multiply(x.contiguous(), y);
  return y;
}

// Rows of x [rows, k], each of them with as many of the experts `chosen` [chosen], one after another: row i of the
// result [chosen, n] is that of x times the packed weight [n, k] of expert chosen[i], `packed[chosen[i]]`, transposed,
// plus its bias.
Tensor experts(const Tensor& x, const Tensor& chosen, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n,
               int64_t k) {
  return multiplied(x, {chosen.contiguous(), packed, std::nullopt, bias, n, k, 0, ""});
}

// The same with weights as codes and scales.
Tensor experts_codes(const Tensor& x, const Tensor& chosen, const Tensor& codes, const Tensor& scales,
                     const std::optional<Tensor>& bias, int64_t n, int64_t k, int64_t group, c10::string_view format) {
  return multiplied(x, {chosen.contiguous(), codes, scales, bias, n, k, group, std::string(format)});
}

using torch::jit::Stack;

std::optional<Tensor> if_any(const c10::IValue& value) {
  return value.isNone() ? std::nullopt : std::optional<Tensor>(value.toTensor());
}

Replay replay_of(const Stack& in, const Stack& out, Weights weights) {
  const Tensor x = in[0].toTensor();
  if (!x.is_contiguous() || !weights.chosen.is_contiguous()) return {};
  return [x, y = out[0].toTensor(), own = std::move(weights)] { own.multiply(x, y); };
}

const bool replayed = register_replay("experts", [](const Stack& in, const Stack& out) {
  return replay_of(in, out, {in[1].toTensor(), in[2].toTensor(), {}, if_any(in[3]), in[4].toInt(), in[5].toInt(), 0, ""});
});
const bool codes_replayed = register_replay("experts_codes", [](const Stack& in, const Stack& out) {
  return replay_of(in, out, {in[1].toTensor(), in[2].toTensor(), in[3].toTensor(), if_any(in[4]), in[5].toInt(),
                             in[6].toInt(), in[7].toInt(), in[8].toStringRef()});
});

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("experts(Tensor x, Tensor chosen, Tensor packed, Tensor? bias, int n, int k) -> Tensor");
  m.def("experts_codes(Tensor x, Tensor chosen, Tensor codes, Tensor scales, Tensor? bias, int n, int k, int group,"
        " str format) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("experts", &tandem::experts);
  m.impl("experts_codes", &tandem::experts_codes);
}
