// Adds low-rank adapters to the rows of a linear layer: y[row] += scale * (x[row] A^T) B^T, each row with the adapter
// of its own sequence, or with none.
//
// An adapter is stored in a slot of a pool [slots, words]; at a layer's offset are A, in panels of NARROW columns
// [rank / NARROW][in][NARROW] padded with zeros, and B, in panels of WIDE columns [out / WIDE][rank][WIDE]
// (engine/runner/lora.py packs them). Every sum runs along its length in one order, in its own lane, so a row's bits do
// not depend on the other rows and adapters.
#include "ops.h"

#include "dots.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

namespace tandem {
namespace {

using at::BFloat16;
using at::Tensor;

constexpr int64_t NARROW = 16, WIDE = 64;
constexpr int64_t CHUNK = 16 * ROWS;  // rows of one task at most
constexpr int FOUR = 4;
constexpr int64_t STREAM = 2048;  // prefetch distance in bytes
static_assert(NARROW % LANES == 0 && WIDE % (FOUR * LANES) == 0);

// out[r] = sum over t of p[r][t] * w[t], for R rows and W vectors of columns, in U interleaved partial sums.
template <int R, int W, int U, typename P, typename T>
[[gnu::always_inline]] inline void add_up(const P* const* p, int64_t length, const T* w, int64_t w_row,
                                          Vec (&out)[R][W]) {
  Vec sums[U][R][W];
  for (int u = 0; u < U; ++u)
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < W; ++c) sums[u][r][c] = Vec(0.0f);
  const auto step = [&](int64_t t, int u) {
    Vec values[W];
    for (int c = 0; c < W; ++c) {
      values[c] = load(w + t * w_row + c * LANES);
      __builtin_prefetch(reinterpret_cast<const char*>(w + t * w_row + c * LANES) + STREAM, 0, 2);
    }
    for (int r = 0; r < R; ++r) {
      const Vec one(static_cast<float>(p[r][t]));
      for (int c = 0; c < W; ++c) sums[u][r][c] = at::vec::fmadd(one, values[c], sums[u][r][c]);
    }
  };
  int64_t t = 0;
  for (; t + U <= length; t += U)
    for (int u = 0; u < U; ++u) step(t + u, u);
  for (int u = 0; t < length; ++t, ++u) step(t, u);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < W; ++c) {
      if constexpr (U == FOUR)
        out[r][c] = (sums[0][r][c] + sums[1][r][c]) + (sums[2][r][c] + sums[3][r][c]);
      else
        out[r][c] = sums[0][r][c];
    }
}

// u[r] = x[r] times one panel of A, for R rows.
template <int R = ROWS, typename T>
void down(int64_t rows, const T* const* x, int64_t k, const T* panel, float* const* u) {
  if (rows == R) {
    constexpr int W = NARROW / LANES;
    Vec sums[R][W];
    add_up<R, W, FOUR>(x, k, panel, NARROW, sums);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < W; ++c) put(sums[r][c], u[r] + c * LANES);
    return;
  }
  if constexpr (R > 1) down<R - 1>(rows, x, k, panel, u);
}

// y[r] += scale * u[r] times `columns` columns of one panel of B, for R rows.
template <int R = ROWS, typename T>
void up(int64_t rows, const float* const* u, int64_t rank, const T* panel, float scale, T* const* y, int64_t columns) {
  if (rows == R) {
    for (int64_t first = 0; first < columns; first += FOUR * LANES) {
      Vec sums[R][FOUR];
      add_up<R, FOUR, 1>(u, rank, panel + first, WIDE, sums);
      for (int c = 0; c < FOUR; ++c) {
        const int64_t at = first + c * LANES, count = std::min<int64_t>(LANES, columns - at);
        if (count <= 0) break;
        for (int r = 0; r < R; ++r) {
          const Vec before = count == LANES ? load(y[r] + at) : load(y[r] + at, static_cast<int>(count));
          put(before + Vec(scale) * sums[r][c], y[r] + at, count);
        }
      }
    }
    return;
  }
  if constexpr (R > 1) up<R - 1>(rows, u, rank, panel, scale, y, columns);
}

struct Task {
  int64_t slot, from, to, panel;  // rows [from, to) in adapter order
};

template <typename Work>
void share_out(const std::vector<Task>& tasks, int64_t bytes, const Work& work) {
  const int64_t grain = std::max<int64_t>(1, TASK_BYTES / std::max<int64_t>(1, bytes));
  at::parallel_for(0, static_cast<int64_t>(tasks.size()), grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) work(tasks[task]);
  });
}

template <typename T>
void add_adapters(T* y, const T* x, const int64_t* rows, const int64_t* starts, const T* pool, int64_t slots,
                  int64_t words, const int* ranks, const float* scales, int64_t modules, int64_t module, int64_t a,
                  int64_t b, int64_t k, int64_t n) {
  const int64_t count = starts[slots];
  int64_t widest = 0;
  std::vector<Task> narrow, wide;
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t rank = ranks[slot * modules + module], panels = (rank + NARROW - 1) / NARROW;
    if (rank == 0) continue;
    widest = std::max(widest, panels * NARROW);
    for (int64_t from = starts[slot]; from < starts[slot + 1]; from += CHUNK) {
      const int64_t to = std::min(from + CHUNK, starts[slot + 1]);
      for (int64_t panel = 0; panel < panels; ++panel) narrow.push_back({slot, from, to, panel});
      for (int64_t panel = 0; panel < (n + WIDE - 1) / WIDE; ++panel) wide.push_back({slot, from, to, panel});
    }
  }
  if (narrow.empty()) return;
  thread_local std::vector<float> kept;
  kept.resize(std::max<size_t>(kept.size(), count * widest));
  float* const u = kept.data();  // [count, widest]
  share_out(narrow, k * NARROW * sizeof(T), [&](const Task& task) {
    const T* from[ROWS];
    float* to[ROWS];
    for (int64_t row = task.from; row < task.to; row += ROWS) {
      const int64_t here = std::min<int64_t>(ROWS, task.to - row);
      for (int64_t r = 0; r < here; ++r) {
        from[r] = x + rows[row + r] * k;
        to[r] = u + (row + r) * widest + task.panel * NARROW;
      }
      down(here, from, k, pool + task.slot * words + a + task.panel * k * NARROW, to);
    }
  });
  share_out(wide, WIDE * NARROW * sizeof(T), [&](const Task& task) {
    const int64_t rank = ranks[task.slot * modules + module], first = task.panel * WIDE;
    const T* const panel = pool + task.slot * words + b + first * rank;
    const float* from[ROWS];
    T* to[ROWS];
    for (int64_t row = task.from; row < task.to; row += ROWS) {
      const int64_t here = std::min<int64_t>(ROWS, task.to - row);
      for (int64_t r = 0; r < here; ++r) {
        from[r] = u + (row + r) * widest;
        to[r] = y + rows[row + r] * n + first;
      }
      up(here, from, rank, panel, scales[task.slot * modules + module], to, std::min(WIDE, n - first));
    }
  });
}

// Adds to y [..., n] in place and returns it; x is [..., k], pool [slots, words], ranks and scales [slots, modules].
// `rows` has every row of x once: those of slot 0, of slot 1 and so on, then those without an adapter; slot s has
// rows[starts[s]] to rows[starts[s + 1] - 1]. `module` is the layer's column in ranks and scales, `a` and `b` are the
// offsets of its matrices in a slot.
Tensor lora_(Tensor y, const Tensor& x, const Tensor& rows, const Tensor& starts, const Tensor& pool,
             const Tensor& ranks, const Tensor& scales, int64_t module, int64_t a, int64_t b) {
  const int64_t k = x.size(-1), n = y.size(-1), total = rows.numel(), slots = pool.size(0);
  TORCH_CHECK(served(pool.scalar_type()) && x.scalar_type() == pool.scalar_type() &&
                  y.scalar_type() == pool.scalar_type() && y.is_contiguous() && pool.is_contiguous(),
              "tandem::lora_ wants x, y and the pool in one type, float32 or bfloat16");
  TORCH_CHECK(rows.scalar_type() == at::kLong && rows.is_contiguous() && x.numel() == total * k && y.numel() == total * n,
              "tandem::lora_: ", total, " packed tokens, x is ", x.sizes(), ", y ", y.sizes());
  TORCH_CHECK(starts.scalar_type() == at::kLong && starts.is_contiguous() && starts.numel() == slots + 1 &&
                  ranks.scalar_type() == at::kInt && ranks.is_contiguous() && ranks.dim() == 2 &&
                  ranks.size(0) == slots && scales.scalar_type() == at::kFloat && scales.is_contiguous() &&
                  scales.sizes() == ranks.sizes() && module >= 0 && module < ranks.size(1),
              "tandem::lora_: the tables do not fit ", slots, " slots");
  const int64_t* const bounds = starts.const_data_ptr<int64_t>();
  TORCH_CHECK(bounds[0] == 0 && bounds[slots] <= total, "tandem::lora_: more rows of adapters than rows");
  if (bounds[slots] == 0) return y;
  const Tensor from = x.contiguous();
  const auto run = [&](auto* into) {
    using T = std::remove_pointer_t<decltype(into)>;
    add_adapters<T>(into, from.const_data_ptr<T>(), rows.const_data_ptr<int64_t>(), bounds, pool.const_data_ptr<T>(),
                    slots, pool.size(1), ranks.const_data_ptr<int>(), scales.const_data_ptr<float>(), ranks.size(1),
                    module, a, b, k, n);
  };
  y.scalar_type() == at::kFloat ? run(y.data_ptr<float>()) : run(y.data_ptr<BFloat16>());
  return y;
}

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "lora_(Tensor(a!) y, Tensor x, Tensor rows, Tensor starts, Tensor pool, Tensor ranks, Tensor scales, int module, "
      "int a, int b) -> Tensor(a!)");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) { m.impl("lora_", &tandem::lora_); }
