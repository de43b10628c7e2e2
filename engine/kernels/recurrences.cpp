// The delta rules of recurrent layers: a sequence's tokens in order, from its state.
#include "recurrences.h"

#include "dots.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstring>
#include <vector>

namespace tandem {
namespace {

using at::Tensor;

constexpr int WIDE = 4;  // vectors of adjacent columns of a state that one task has in the first-level cache

// One head's gated delta rule over `count` columns of its state S [dk, dv], for all tokens:
//
//     S = decay S;  u = beta (v - k S);  S = S + k' u;  out = q S
//
// (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464). With CHANNELS the decay is a diagonal over dk, one
// number of each row of S (Kimi Team 2025, "Kimi Linear", arXiv 2510.26692), otherwise one number of the head. Each
// element of k S and q S is one chain over dk in ascending order, in one lane: a token has the same bits in a chunk of
// any length, beside any sequence and on any number of threads. Strides are in elements, from token to token.
struct Head {
  const float *q, *k, *v, *decay, *beta;
  const float* from;  // null: from zeros
  float *to, *out;
  int64_t tokens, dk, dv, of_qk, of_v, of_decay, of_beta;
};

template <int V, bool CHANNELS>
void columns(const Head& h, int64_t first, int count, std::vector<float>& kept) {
  constexpr int W = V * LANES;
  kept.assign(h.dk * W, 0.0f);
  for (int64_t i = 0; h.from && i < h.dk; ++i)
    std::memcpy(&kept[i * W], h.from + i * h.dv + first, count * sizeof(float));
  float row[W] = {};
  for (int64_t t = 0; t < h.tokens; ++t) {
    const float *k = h.k + t * h.of_qk, *q = h.q + t * h.of_qk;
    const float* decays = h.decay + t * h.of_decay;
    const Vec beta(h.beta[t * h.of_beta]), decay(*decays);
    std::memcpy(row, h.v + t * h.of_v + first, count * sizeof(float));
    Vec u[V], o[V];
    for (int c = 0; c < V; ++c) u[c] = o[c] = Vec(0.0f);
    for (int64_t i = 0; i < h.dk; ++i)
      for (int c = 0; c < V; ++c) {
        const Vec s = load(&kept[i * W + c * LANES]) * (CHANNELS ? Vec(decays[i]) : decay);
        put(s, &kept[i * W + c * LANES]);
        u[c] = at::vec::fmadd(Vec(k[i]), s, u[c]);
      }
    for (int c = 0; c < V; ++c) u[c] = (load(row + c * LANES) - u[c]) * beta;
    for (int64_t i = 0; i < h.dk; ++i)
      for (int c = 0; c < V; ++c) {
        const Vec s = at::vec::fmadd(Vec(k[i]), u[c], load(&kept[i * W + c * LANES]));
        put(s, &kept[i * W + c * LANES]);
        o[c] = at::vec::fmadd(Vec(q[i]), s, o[c]);
      }
    for (int c = 0; c < V; ++c) put(o[c], row + c * LANES);
    std::memcpy(h.out + t * h.of_v + first, row, count * sizeof(float));
  }
  for (int64_t i = 0; i < h.dk; ++i) std::memcpy(h.to + i * h.dv + first, &kept[i * W], count * sizeof(float));
}

constexpr int ONE = LANES == 16 ? 8 : 4;  // as many as leave registers for both sums

// The same for one token and ONE vectors of columns from `first` on, in two passes over the state's rows where they are: they are read
// once from memory and once from the second-level cache. `next`: what the next call reads, fetched meanwhile.
template <bool CHANNELS>
void one_token(const Head& h, int64_t first, const float* next) {
  const float *from = h.from + first, *k = h.k, *q = h.q;
  float* to = h.to + first;
  const Vec beta(*h.beta), decay(*h.decay);
  Vec u[ONE], o[ONE];
  for (int c = 0; c < ONE; ++c) u[c] = o[c] = Vec(0.0f);
  for (int64_t i = 0; i < h.dk; ++i)
    for (int c = 0; c < ONE; ++c) {
      const Vec s = load(from + i * h.dv + c * LANES) * (CHANNELS ? Vec(h.decay[i]) : decay);
      u[c] = at::vec::fmadd(Vec(k[i]), s, u[c]);
    }
  for (int c = 0; c < ONE; ++c) u[c] = (load(h.v + first + c * LANES) - u[c]) * beta;
  for (int64_t i = 0; i < h.dk; ++i)
    for (int c = 0; c < ONE; ++c) {
      const int64_t at = i * h.dv + c * LANES;
      __builtin_prefetch(next + at, 0, 2);
      const Vec decayed = load(from + at) * (CHANNELS ? Vec(h.decay[i]) : decay);
      const Vec s = at::vec::fmadd(Vec(k[i]), u[c], decayed);
      put(s, to + at);
      o[c] = at::vec::fmadd(Vec(q[i]), s, o[c]);
    }
  for (int c = 0; c < ONE; ++c) put(o[c], h.out + first + c * LANES);
}

// q, k [n, tokens, k heads, dk]; v [n, tokens, v heads, dv]; decay [n, tokens, v heads] or [n, tokens, v heads, dk];
// beta [n, tokens, v heads]: float32 and contiguous. Each k head serves the same number of v heads, in order. `states`
// [all rows, v heads, dk, dv] and `numbers` [2, n] are as `rows_of_states` wants them: sequence i goes on from row
// numbers[0, i], or from zeros if that is negative, and the state after its tokens becomes row numbers[1, i]. Returns [n,
// tokens, v heads, dv].
Tensor gated_delta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& decay, const Tensor& beta,
                   Tensor states, const Tensor& numbers) {
  for (const Tensor& each : {q, k, v, decay, beta})
    TORCH_CHECK(each.scalar_type() == at::kFloat && each.is_contiguous(), "tandem: gated_delta wants contiguous float32");
  TORCH_CHECK(q.dim() == 4 && q.sizes() == k.sizes() && v.dim() == 4, "tandem: q and k of unlike shapes");
  const int64_t n = q.size(0), tokens = q.size(1), k_heads = q.size(2), dk = q.size(3);
  const int64_t heads = v.size(2), dv = v.size(3);
  TORCH_CHECK(v.size(0) == n && v.size(1) == tokens && heads % k_heads == 0, "tandem: v of other tokens or heads");
  const bool channels = decay.dim() == 4;
  TORCH_CHECK(beta.dim() == 3 && beta.numel() == n * tokens * heads, "tandem: beta of another shape");
  TORCH_CHECK(decay.numel() == n * tokens * heads * (channels ? dk : 1), "tandem: decay of another shape");
  const StateRows rows = rows_of_states(states, {heads, dk, dv}, numbers, n);
  Tensor out = at::empty_like(v);
  float* outs = out.data_ptr<float>();
  const bool one = tokens == 1 && dv % (ONE * LANES) == 0;
  const int64_t wide = (one ? ONE : WIDE) * LANES, parts = (dv + wide - 1) / wide, of_decay = channels ? dk : 1;
  share_out(n * heads * parts, 1, [&](int64_t task, int64_t end) {
    std::vector<float> kept;
    for (; task < end; ++task) {
      const int64_t first = task % parts * wide, head = task / parts % heads, sequence = task / parts / heads;
      const int64_t token = sequence * tokens, group = head / (heads / k_heads);
      const float* before = rows.from(sequence);
      const Head h{q.const_data_ptr<float>() + (token * k_heads + group) * dk,
                   k.const_data_ptr<float>() + (token * k_heads + group) * dk,
                   v.const_data_ptr<float>() + (token * heads + head) * dv,
                   decay.const_data_ptr<float>() + (token * heads + head) * of_decay,
                   beta.const_data_ptr<float>() + token * heads + head,
                   before ? before + head * dk * dv : nullptr,
                   rows.to(sequence) + head * dk * dv,
                   outs + (token * heads + head) * dv,
                   tokens, dk, dv, k_heads * dk, heads * dv, heads * of_decay, heads};
      if (one && h.from) {
        const float* next = first + wide < dv ? h.from + first + wide : h.from + (head + 1 < heads ? dk * dv : 0);
        channels ? one_token<true>(h, first, next) : one_token<false>(h, first, next);
        continue;
      }
      for (int64_t at = 0, left = std::min(wide, dv - first); left > 0;) {
        const bool whole = left >= WIDE * LANES;
        const int count = static_cast<int>(whole ? WIDE * LANES : std::min<int64_t>(LANES, left));
        if (whole)
          channels ? columns<WIDE, true>(h, first + at, count, kept) : columns<WIDE, false>(h, first + at, count, kept);
        else
          channels ? columns<1, true>(h, first + at, count, kept) : columns<1, false>(h, first + at, count, kept);
        at += count, left -= count;
      }
    }
  });
  return out;
}

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "gated_delta(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor(a!) states, Tensor rows) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) { m.impl("gated_delta", &tandem::gated_delta); }
