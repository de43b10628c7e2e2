// State space layers and the short convolution before them: a sequence's tokens in order, from its state.
#include "recurrences.h"

#include "functions.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <vector>

namespace tandem {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ---- the short convolution: of each channel with its own `width` taps, over a token and those before it

// y[c] = act(bias[c] + sum over w of taps[w][c] x[w][c]), for `count` channels: one chain in ascending order, in float32.
// `x` are the rows of `width` tokens, null for one before the first. `taps` is [width, channels].
template <typename T>
void convolve(const T* const* x, const float* taps, const float* bias, int64_t width, int64_t channels, int64_t first,
              int64_t count, bool silu, T* y) {
  for (int64_t c = first; c < first + count; c += LANES) {
    const int some = static_cast<int>(std::min<int64_t>(LANES, first + count - c));
    Vec sum = bias ? load(bias + c, some) : Vec(0.0f);
    for (int64_t w = 0; w < width; ++w)
      if (x[w]) sum = at::vec::fmadd(load(taps + w * channels + c, some), load(x[w] + c, some), sum);
    if (silu) sum = Silu::of<T>(rounded<T>(sum));
    put(sum, y + c, some);
  }
}

// As one lane of at::vec::fmadd.
inline float fused(float a, float b, float c) {
#ifdef CPU_CAPABILITY_DEFAULT
  return a * b + c;
#else
  return std::fma(a, b, c);
#endif
}

// `weight` [channels, width] of any floating type as taps [width, channels] in float32.
std::vector<float> taps_of(const Tensor& weight) {
  const Tensor w = weight.to(at::kFloat).contiguous();
  const int64_t channels = w.size(0), width = w.size(1);
  const float* from = w.const_data_ptr<float>();
  std::vector<float> taps(channels * width);
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t i = 0; i < width; ++i) taps[i * channels + c] = from[c * width + i];
  return taps;
}

void check_taps(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t channels) {
  TORCH_CHECK(served(x.scalar_type()), "tandem: the short convolution has no such type");
  TORCH_CHECK(weight.dim() == 2 && weight.size(0) == channels, "tandem: taps of another number of channels");
  TORCH_CHECK(!bias || bias->numel() == channels, "tandem: a bias of another number of channels");
}

template <typename F>
void with_type(at::ScalarType type, const F& f) {
  if (type == at::kFloat)
    f(float());
  else
    f(at::BFloat16());
}

// x [n, tokens, channels] with adjacent channels, all tokens of each sequence; zeros come before the first.
Tensor short_convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool silu) {
  TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1, "tandem: short_convolution wants [n, tokens, channels]");
  const int64_t n = x.size(0), tokens = x.size(1), channels = x.size(2), width = weight.size(1);
  check_taps(x, weight, bias, channels);
  const std::vector<float> taps = taps_of(weight);
  const Tensor bias32 = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  const float* biases = bias ? bias32.const_data_ptr<float>() : nullptr;
  Tensor y = at::empty({n, tokens, channels}, x.options());
  with_type(x.scalar_type(), [&]<typename T>(T) {
    const T* from = x.const_data_ptr<T>();
    T* to = y.data_ptr<T>();
    share_out(n * tokens, 16, [&](int64_t at, int64_t end) {
      std::vector<const T*> rows(width);
      for (; at < end; ++at) {
        const int64_t sequence = at / tokens, token = at % tokens;
        for (int64_t w = 0; w < width; ++w) {
          const int64_t t = token - width + 1 + w;
          rows[w] = t < 0 ? nullptr : from + sequence * x.stride(0) + t * x.stride(1);
        }
        convolve(rows.data(), taps.data(), biases, width, channels, 0, channels, silu, to + at * channels);
      }
    });
  });
  return y;
}

// One more token of `count` channels: their sums over the taps, before the activation, and the tokens that are kept from
// here on in `after`, which may be `before`. WIDTH and KEPT: these numbers where they are known, otherwise 0.
template <int64_t WIDTH, int64_t KEPT, typename T, typename W>
void next_token(const T* before, const T* now, T* after, const W* taps, const float* bias, float* sums, int64_t count,
                int64_t any_width, int64_t any_kept) {
  const int64_t width = WIDTH > 0 ? WIDTH : any_width, kept = KEPT > 0 ? KEPT : any_kept;
  for (int64_t c = 0; c < count; ++c, taps += width, after += kept) {
    const T* old = before ? before + c * kept : nullptr;
    float sum = bias ? bias[c] : 0.0f;
    for (int64_t w = 0; old && w < width - 1; ++w) sum = fused(taps[w], old[kept - width + 1 + w], sum);
    sums[c] = fused(taps[width - 1], now[c], sum);
    for (int64_t k = 0; k < kept - 1; ++k) after[k] = old ? old[k + 1] : T(0.0f);
    after[kept - 1] = now[c];
  }
}

// One token of each sequence: x [n, channels]. A row of `states` has the `kept` tokens before it, [channels, kept].
Tensor short_convolution_step(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool silu,
                              Tensor states, const Tensor& numbers) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "tandem: short_convolution_step wants [n, channels]");
  const int64_t n = x.size(0), channels = x.size(1), width = weight.size(1), kept = states.size(-1);
  check_taps(x, weight, bias, channels);
  TORCH_CHECK(states.scalar_type() == x.scalar_type() && kept >= width - 1 && kept > 0, "tandem: too few tokens are kept");
  const Tensor taps = (served(weight.scalar_type()) ? weight : weight.to(at::kFloat)).contiguous();
  const Tensor bias32 = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  const float* biases = bias ? bias32.const_data_ptr<float>() : nullptr;
  Tensor y = at::empty({n, channels}, x.options());
  constexpr int64_t PART = 512;  // channels of a task
  const int64_t parts = (channels + PART - 1) / PART;
  const auto run = [&]<typename T, typename W>(T, W) {
    const RowsOf<T> rows = rows_of_states<T>(states, {channels, kept}, numbers, n);
    const auto next = width == 4 && kept == 4 ? next_token<4, 4, T, W> : next_token<0, 0, T, W>;
    share_out(n * parts, 1, [&](int64_t task, int64_t end) {
      float sums[PART];
      for (; task < end; ++task) {
        const int64_t sequence = task / parts, first = task % parts * PART, count = std::min(PART, channels - first);
        const T* before = rows.from(sequence);
        T* out = y.data_ptr<T>() + sequence * channels + first;
        next(before ? before + first * kept : nullptr, x.const_data_ptr<T>() + sequence * channels + first,
             rows.to(sequence) + first * kept, taps.const_data_ptr<W>() + first * width,
             biases ? biases + first : nullptr, sums, count, width, kept);
        for (int64_t i = 0; i < count; i += LANES) {
          const int some = static_cast<int>(std::min<int64_t>(LANES, count - i));
          const Vec sum = load(sums + i, some);
          put(silu ? Silu::of<T>(rounded<T>(sum)) : sum, out + i, some);
        }
      }
    });
  };
  with_type(x.scalar_type(), [&](auto of_x) {
    with_type(taps.scalar_type(), [&](auto of_taps) { run(of_x, of_taps); });
  });
  return y;
}

// ---- the scan of a state space: of each channel d a state S [state size], over the tokens

// Of each channel:    S = decay S + (dt x) B;  y = C S + D x
//
// With OWN (Mamba: Gu and Dao 2023, arXiv 2312.00752) the decay is exp(dt A[d]), of each element; otherwise (Mamba-2:
// Dao and Gu 2024, arXiv 2405.21060) exp(dt A), one number of the channel's head. Each sum C S is taken lane by lane over
// the state and then across the lanes, so a token has the same bits in a chunk of any length and in any company.
struct Scan {
  const float *x, *dt, *b, *c;  // of the first token
  const float *a, *skip;        // A: [channels, state size] if OWN, else of each head; D of each channel, or null
  float *state, *y;             // [channels, state size]; of the first token
  int64_t tokens, size, of_x, of_dt, of_bc, of_y;
};

constexpr int MOST_VECTORS = 32;  // of a channel's state
constexpr int64_t CHANNELS = 16;  // of a task: a line of x
constexpr int64_t STRETCH = 16;   // tokens, whose B and C stay in the first-level cache

// R adjacent channels, whose states of V vectors are in registers. WHOLE: no vector is partly filled.
template <int R, int V, bool OWN, bool WHOLE>
void scan(const Scan& s, int64_t first, int64_t tokens) {
  Vec state[R][V], a[R][OWN ? V : 1];
  const auto part = [&](const float* from, int v) {
    if constexpr (WHOLE) return load(from + v * LANES);
    return load(from + v * LANES, static_cast<int>(std::clamp<int64_t>(s.size - v * LANES, 0, LANES)));
  };
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      state[r][v] = part(s.state + (first + r) * s.size, v);
      if constexpr (OWN) a[r][v] = part(s.a + (first + r) * s.size, v);
    }
  for (int64_t t = 0; t < tokens; ++t) {
    Vec sums[COLS] = {Vec(0.0f), Vec(0.0f), Vec(0.0f), Vec(0.0f)}, falls(0.0f);
    if constexpr (!OWN) falls = (Vec(s.dt[t * s.of_dt]) * Vec(*s.a)).exp();
    for (int r = 0; r < R; ++r) {
      const float dt = s.dt[t * s.of_dt + (OWN ? first + r : 0)], x = s.x[t * s.of_x + first + r];
      const Vec step(dt), in(dt * x);
      for (int v = 0; v < V; ++v) {
        if constexpr (OWN) falls = (step * a[r][v]).exp();
        state[r][v] = at::vec::fmadd(in, part(s.b + t * s.of_bc, v), state[r][v] * falls);
        sums[r] = at::vec::fmadd(state[r][v], part(s.c + t * s.of_bc, v), sums[r]);
      }
    }
    float y[COLS];
    sum_lanes(sums, y);
    for (int r = 0; r < R; ++r)
      s.y[t * s.of_y + first + r] = y[r] + (s.skip ? s.skip[first + r] * s.x[t * s.of_x + first + r] : 0.0f);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V && v * LANES < s.size; ++v)
      put(state[r][v], s.state + (first + r) * s.size + v * LANES, std::min<int64_t>(LANES, s.size - v * LANES));
}

template <int R, int V, bool OWN>
void scan_channels(Scan s, int64_t count) {
  const bool whole = s.size == V * LANES;
  for (int64_t done = 0; done < s.tokens; done += STRETCH) {
    const int64_t tokens = std::min(STRETCH, s.tokens - done);
    int64_t r = 0;
    for (; r + R <= count; r += R) whole ? scan<R, V, OWN, true>(s, r, tokens) : scan<R, V, OWN, false>(s, r, tokens);
    for (; r < count; ++r) scan<1, V, OWN, false>(s, r, tokens);
    s.x += tokens * s.of_x, s.dt += tokens * s.of_dt, s.b += tokens * s.of_bc, s.c += tokens * s.of_bc;
    s.y += tokens * s.of_y;
  }
}

template <bool OWN>
void scan_all(const Scan& s, int64_t count) {
  const int64_t vectors = (s.size + LANES - 1) / LANES;
  if (vectors <= 1)
    scan_channels<4, 1, OWN>(s, count);
  else if (vectors <= 2)
    scan_channels<4, 2, OWN>(s, count);
  else if (vectors <= 4)
    scan_channels<4, 4, OWN>(s, count);
  else if (vectors <= 8)
    scan_channels<2, 8, OWN>(s, count);
  else if (vectors <= 16)
    scan_channels<1, 16, OWN>(s, count);
  else
    scan_channels<1, MOST_VECTORS, OWN>(s, count);
}

// x [n, tokens, heads, head size]; dt [n, tokens, heads], or [n, tokens, heads, head size] with A [heads, head size,
// state size] in place of A [heads]; B, C [n, tokens, groups, state size]: of the heads in order; D [heads, head size]
// or none. All are float32 and contiguous, but for A and D of any strides. `states` [all rows, heads, head size, state
// size], of any shape with as many elements, and `numbers` [2, n]: see rows_of_states. Returns as x.
Tensor state_space_scan(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c,
                        const OptionalTensor& d, Tensor states, const Tensor& numbers) {
  for (const Tensor& each : {x, dt, a, b, c})
    TORCH_CHECK(each.scalar_type() == at::kFloat && each.is_contiguous(), "tandem: a scan wants contiguous float32");
  TORCH_CHECK(x.dim() == 4 && b.dim() == 4 && b.sizes() == c.sizes(), "tandem: x, B or C of another shape");
  const int64_t n = x.size(0), tokens = x.size(1), heads = x.size(2), dim = x.size(3);
  const int64_t groups = b.size(2), size = b.size(3);
  const bool own = dt.dim() == 4;
  TORCH_CHECK(b.size(0) == n && b.size(1) == tokens && heads % groups == 0, "tandem: B and C of other tokens or heads");
  TORCH_CHECK(dt.numel() == n * tokens * heads * (own ? dim : 1), "tandem: dt of another shape");
  TORCH_CHECK(a.numel() == heads * (own ? dim * size : 1), "tandem: A of another shape");
  TORCH_CHECK(size <= MOST_VECTORS * LANES, "tandem: a state of more than ", MOST_VECTORS * LANES, " numbers for each channel");
  const Tensor skip = d ? d->to(at::kFloat).expand({heads, dim}).contiguous() : Tensor();
  const StateRows rows = rows_of_states(states, states.sizes().slice(1).vec(), numbers, n);
  TORCH_CHECK(states[0].numel() == heads * dim * size, "tandem: states of another size");
  Tensor y = at::empty(x.sizes(), x.options());
  const int64_t parts = (dim + CHANNELS - 1) / CHANNELS;
  share_out(n * heads * parts, 1, [&](int64_t task, int64_t end) {
    std::vector<float> kept(CHANNELS * size);
    for (; task < end; ++task) {
      const int64_t sequence = task / parts / heads, head = task / parts % heads, first = task % parts * CHANNELS;
      const int64_t count = std::min(CHANNELS, dim - first), token = sequence * tokens, at = head * dim + first;
      const int64_t group = head / (heads / groups);
      const float* before = rows.from(sequence);
      if (before)
        std::memcpy(kept.data(), before + at * size, count * size * sizeof(float));
      else
        std::fill(kept.begin(), kept.end(), 0.0f);
      const Scan s{x.const_data_ptr<float>() + token * heads * dim + at,
                   dt.const_data_ptr<float>() + (own ? token * heads * dim + at : token * heads + head),
                   b.const_data_ptr<float>() + (token * groups + group) * size,
                   c.const_data_ptr<float>() + (token * groups + group) * size,
                   a.const_data_ptr<float>() + (own ? at * size : head),
                   d ? skip.const_data_ptr<float>() + at : nullptr,
                   kept.data(), y.data_ptr<float>() + token * heads * dim + at,
                   tokens, size, heads * dim, own ? heads * dim : heads, groups * size, heads * dim};
      own ? scan_all<true>(s, count) : scan_all<false>(s, count);
      std::memcpy(rows.to(sequence) + at * size, kept.data(), count * size * sizeof(float));
    }
  });
  return y;
}

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("short_convolution(Tensor x, Tensor weight, Tensor? bias, bool silu) -> Tensor");
  m.def(
      "short_convolution_step(Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor(a!) states, Tensor rows) -> Tensor");
  m.def(
      "state_space_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor(a!) states, Tensor rows)"
      " -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("short_convolution", &tandem::short_convolution);
  m.impl("short_convolution_step", &tandem::short_convolution_step);
  m.impl("state_space_scan", &tandem::state_space_scan);
}
