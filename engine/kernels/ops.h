// What the source files share.
//
// Sums of the operators `torch.ops.tandem.*` are in float32, in an order that depends on nothing but the token itself: a
// token's result does not depend on what else is in the step, nor on whether it comes there alone or in a chunk.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>

namespace tandem {

constexpr int64_t TASK_BYTES = 1 << 16;  // what one thread reads at least

// f(begin, end) over [0, count), at least `grain` at a time. Each thread takes what comes next when it is done: whoever
// has to share its core with another process takes less, and nobody waits long for it. at::parallel_for gives all an
// equal part beforehand, which is better where neighbours are read ahead.
constexpr int64_t TURNS = 8;  // of each thread

template <typename F>
void share_out(int64_t count, int64_t grain, const F& f) {
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const int64_t turn = std::max(grain, count / (threads * TURNS)), turns = (count + turn - 1) / turn;
  if (threads == 1 || turns <= 1) {
    if (count > 0) f(int64_t{0}, count);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min(threads, turns), 1, [&](int64_t, int64_t) {
    for (int64_t at; (at = next.fetch_add(turn, std::memory_order_relaxed)) < count;)
      f(at, std::min(at + turn, count));
  });
}

// Into how many parts the rows of a product are cut, so that there are turns enough for the threads to end together:
// nine panels alone are five for one thread of two and four for the other. No part has fewer than `least` rows.
inline int64_t parts_of(int64_t rows, int64_t panels, int64_t least) {
  const int64_t threads = at::get_num_threads(), wanted = (threads * TURNS + panels - 1) / std::max<int64_t>(1, panels);
  return threads == 1 ? 1 : std::max<int64_t>(1, std::min(wanted, rows / least));
}

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
