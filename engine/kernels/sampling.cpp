// The next token of each row of logits, by the rules of engine/decoding/sampler.py, without a copy of the row.
//
// A row is read in pieces, shared out among the threads: once for each piece's largest logit, and once for the sum of
// its weights. After that only the piece with the drawn token is read again; with top-k or top-p, the pieces with a
// large enough logit, whose tokens are the candidates.
#include "ops.h"

#include "dots.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace tandem {
namespace {

using at::Tensor;
using Doubles = at::vec::Vectorized<double>;

constexpr int64_t PIECE = 256;  // logits
constexpr int64_t PIECES = 16;  // pieces that a thread takes at once
constexpr int DOUBLES = Doubles::size();
constexpr double INFINITE = std::numeric_limits<double>::infinity();
constexpr int64_t FEW = 64;  // logits; more are bisected before they are sorted
constexpr double CUTS[] = {-4.0, -8.0, -16.0};  // log weights: cutoffs that top-p tries first

// One row and its sampling parameters. With `temperature` 0 only its largest logit counts.
struct Row {
  const float* logits;
  int64_t vocab;
  double temperature, top_p, min_p, number;
  int64_t top_k;
  const float* tops;    // largest logit of each piece
  const double* sums;   // sum of weights of each piece; null for greedy and top-k
  double top;

  bool first_k() const { return top_k > 0 && top_k < vocab; }
  bool narrowed() const { return first_k() || top_p < 1.0; }
  int64_t pieces() const { return (vocab + PIECE - 1) / PIECE; }
};

// f(weights, at, count) for logits [0, count), DOUBLES at once: exp((logit - top) / temperature), 1 for the row's
// largest; 0 below min-p and past the last logit.
template <typename F>
void each_weight(const Row& row, const float* logits, int64_t count, double min_p, const F& f) {
  const Doubles top(row.top), over(row.temperature), least(min_p), nothing(0.0);
  const auto some = [&](int64_t at, int64_t size) {
    double part[DOUBLES];
    for (int64_t i = 0; i < DOUBLES; ++i) part[i] = i < size ? logits[at + i] : -INFINITE;
    const Doubles weights = ((Doubles::loadu(part) - top) / over).exp();
    f(Doubles::blendv(weights, nothing, weights < least), at, static_cast<int>(size));
  };
  int64_t at = 0;
  for (; at + DOUBLES <= count; at += DOUBLES) some(at, DOUBLES);
  if (at < count) some(at, count - at);
}

double sum_of(const Row& row, const float* logits, int64_t count) {
  Doubles sum(0.0);
  const double min_p = row.narrowed() ? 0.0 : row.min_p;
  each_weight(row, logits, count, min_p, [&](Doubles part, int64_t, int) { sum = sum + part; });
  double lanes[DOUBLES], total = 0.0;
  sum.store(lanes);
  for (const double lane : lanes) total += lane;
  return total;
}

// NaN if any logit is NaN.
float largest(const float* logits, int64_t count) {
  Vec most(-std::numeric_limits<float>::infinity());
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) most = at::vec::maximum(most, load(logits + at));
  float lanes[LANES];
  most.store(lanes);
  float top = lanes[0];
  const auto take = [&](float one) { top = one > top || std::isnan(one) ? one : top; };
  for (const float one : lanes) take(one);
  for (; at < count; ++at) take(logits[at]);
  return top;
}

int64_t greedy(const Row& row) {
  const auto top = static_cast<float>(row.top);
  const int64_t from = (std::find(row.tops, row.tops + row.pieces(), top) - row.tops) * PIECE;
  return std::find(row.logits + from, row.logits + row.vocab, top) - row.logits;
}

// ---- top-k and top-p

constexpr int CELL_BITS = 5;  // of a weight's fraction: 32 cells per power of two
constexpr int64_t CELLS = (80 << CELL_BITS) + 1;  // weights below 2^-80 share the last cell

// The smaller the weight (0 to 1), the later its cell.
int64_t cell_of(double weight) {
  const int64_t below = std::bit_cast<int64_t>(1.0) - std::bit_cast<int64_t>(weight);
  return std::clamp<int64_t>(below >> (52 - CELL_BITS), 0, CELLS - 1);
}

// Candidate tokens, in order of id.
struct Kept {
  std::vector<int64_t> ids;
  std::vector<float> logits;
  std::vector<double> weights;

  Kept(const Row& row, double cut) {
    const auto has = [&](float top) { return top >= cut; };
    resize(std::count_if(row.tops, row.tops + row.pieces(), has) * PIECE);
    int64_t to = 0;
    for (int64_t piece = 0; piece < row.pieces(); ++piece) {
      if (!has(row.tops[piece])) continue;
      for (int64_t id = piece * PIECE, end = std::min(row.vocab, id + PIECE); id < end; ++id) {
        ids[to] = id, logits[to] = row.logits[id];  // in any case: a branch would be mispredicted half of the time
        to += has(row.logits[id]);
      }
    }
    resize(to);
    each_weight(row, logits.data(), size(), 0.0,
                [&](Doubles part, int64_t at, int count) { part.store(weights.data() + at, count); });
  }

  int64_t size() const { return static_cast<int64_t>(ids.size()); }

  void resize(int64_t count) { ids.resize(count), logits.resize(count), weights.resize(count); }

  double mass() const {
    double total = 0.0;
    for (const double weight : weights) total += weight;
    return total;
  }

  // Keeps the tokens with a logit of at least `least` and a weight of at least `min_p`.
  void keep(float least, double min_p) {
    int64_t to = 0;
    for (int64_t i = 0; i < size(); ++i) {
      const bool stays = logits[i] >= least && weights[i] >= min_p;
      ids[to] = ids[i], logits[to] = logits[i], weights[to] = weights[i];
      to += stays;
    }
    resize(to);
  }

  // The smallest logit in the smallest set of largest logits whose weights reach `mass`.
  float border(double mass) const {
    std::vector<double> masses(CELLS);
    for (const double weight : weights) masses[cell_of(weight)] += weight;
    double before = 0.0;
    int64_t cell = 0;
    while (cell + 1 < CELLS && before + masses[cell] < mass) before += masses[cell++];
    std::vector<int64_t> order;  // indices of the tokens in the border's cell
    for (int64_t i = 0; i < size(); ++i)
      if (cell_of(weights[i]) == cell) order.push_back(i);
    if (order.empty()) return *std::min_element(logits.begin(), logits.end());  // rounding: all tokens are needed
    const auto larger = [&](int64_t a, int64_t b) { return logits[a] > logits[b]; };
    auto first = order.begin(), last = order.end();
    while (last - first > FEW) {  // keep the half with the border
      const auto middle = first + (last - first) / 2;
      std::nth_element(first, middle, last, larger);
      double upper = before;
      for (auto one = first; one < middle; ++one) upper += weights[*one];
      if (upper < mass) {
        before = upper;
        first = middle;
      } else {
        last = middle;
      }
    }
    std::sort(first, last, larger);
    for (; first + 1 < last; ++first)
      if ((before += weights[*first]) >= mass) break;
    return logits[*first];
  }
};

// The k-th largest value.
float ranked(std::vector<float> values, int64_t k) {
  std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<>());
  return values[k - 1];
}

// The candidates left by top-k, then top-p, then min-p; equal logits are kept or dropped together.
Kept narrow(const Row& row) {
  if (row.first_k()) {
    // At least top_k pieces have a logit no smaller than this cutoff.
    const bool sure = row.top_k <= row.pieces();
    Kept kept(row, sure ? ranked({row.tops, row.tops + row.pieces()}, row.top_k) : -INFINITE);
    kept.keep(ranked(kept.logits, row.top_k), 0.0);
    if (row.top_p < 1.0) kept.keep(kept.border(row.top_p * kept.mass()), 0.0);
    kept.keep(-std::numeric_limits<float>::infinity(), row.min_p);
    return kept;
  }
  double mass = 0.0;
  for (int64_t piece = 0; piece < row.pieces(); ++piece) mass += row.sums[piece];
  mass *= row.top_p;
  for (const double cut : {CUTS[0], CUTS[1], CUTS[2], -INFINITE}) {
    Kept kept(row, row.top + row.temperature * cut);
    if (cut != -INFINITE && kept.mass() < mass) continue;
    kept.keep(kept.border(mass), row.min_p);
    return kept;
  }
  TORCH_CHECK(false, "tandem::sample: unreachable");
}

// ---- the draw

// The index of the first of `count` weights with which the sum exceeds the target; the last positive weight if rounding
// made the sum smaller.
int64_t reached(const double* weights, int64_t count, double before, double target) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (weights[i] <= 0.0) continue;
    found = i;
    if ((before += weights[i]) > target) break;
  }
  return found;
}

// Strictly below the total: a token of weight 0 cannot be chosen, whatever the number is.
double target_of(double total, double number) { return std::min(total * number, std::nextafter(total, 0.0)); }

int64_t drawn(const Row& row) {
  if (row.narrowed()) {
    const Kept kept = narrow(row);
    return kept.ids[reached(kept.weights.data(), kept.size(), 0.0, target_of(kept.mass(), row.number))];
  }
  double total = 0.0, before = 0.0;
  for (int64_t i = 0; i < row.pieces(); ++i) total += row.sums[i];
  const double target = target_of(total, row.number);
  int64_t piece = 0;
  while (piece + 1 < row.pieces() && before + row.sums[piece] <= target) before += row.sums[piece++];
  const int64_t from = piece * PIECE, count = std::min(PIECE, row.vocab - from);
  double weights[PIECE];
  each_weight(row, row.logits + from, count, row.min_p,
              [&](Doubles part, int64_t at, int size) { part.store(weights + at, size); });
  return from + reached(weights, count, before, target);
}

// [rows]: a token for each row of logits [rows, vocab], or -1 where the largest logit is not finite. The lists have a
// value for each row; `number` is in [0, 1).
Tensor sample(const Tensor& logits, at::ArrayRef<double> temperature, at::IntArrayRef top_k, at::ArrayRef<double> top_p,
              at::ArrayRef<double> min_p, at::ArrayRef<double> number) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.is_contiguous() && logits.size(1) > 0,
              "tandem::sample wants contiguous float32 logits [rows, vocab], not ", logits.sizes());
  const int64_t rows = logits.size(0), vocab = logits.size(1), pieces = (vocab + PIECE - 1) / PIECE;
  for (const size_t count : {temperature.size(), top_k.size(), top_p.size(), min_p.size(), number.size()})
    TORCH_CHECK(static_cast<int64_t>(count) == rows, "tandem::sample: ", count, " values for ", rows, " rows");
  const float* from = logits.const_data_ptr<float>();
  std::vector<float> tops(rows * pieces);
  share_out(rows * pieces, PIECES, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t begin = task % pieces * PIECE;
      tops[task] = largest(from + task / pieces * vocab + begin, std::min(PIECE, vocab - begin));
    }
  });
  Tensor tokens = at::empty({rows}, logits.options().dtype(at::kLong));
  auto* token = tokens.data_ptr<int64_t>();
  std::vector<Row> all;
  std::vector<int64_t> open, summed;  // rows to be drawn, and those of them that need sums of weights
  for (int64_t i = 0; i < rows; ++i) {
    const float* first = tops.data() + i * pieces;
    all.push_back({from + i * vocab, vocab, temperature[i], top_p[i], min_p[i], number[i], top_k[i], first, nullptr,
                   largest(first, pieces)});
    const Row& row = all.back();
    token[i] = std::isfinite(row.top) && row.temperature <= 0.0 ? greedy(row) : -1;
    if (!std::isfinite(row.top) || row.temperature <= 0.0) continue;
    open.push_back(i);
    if (!row.first_k()) summed.push_back(i);
  }
  std::vector<double> sums(summed.size() * pieces);
  share_out(static_cast<int64_t>(sums.size()), PIECES, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const Row& row = all[summed[task / pieces]];
      const int64_t begin = task % pieces * PIECE;
      sums[task] = sum_of(row, row.logits + begin, std::min(PIECE, vocab - begin));
    }
  });
  for (size_t i = 0; i < summed.size(); ++i) all[summed[i]].sums = sums.data() + i * pieces;
  share_out(static_cast<int64_t>(open.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) token[open[i]] = drawn(all[open[i]]);
  });
  return tokens;
}

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "sample(Tensor logits, float[] temperature, int[] top_k, float[] top_p, float[] min_p, float[] number) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) { m.impl("sample", &tandem::sample); }
