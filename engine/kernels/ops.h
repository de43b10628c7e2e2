// What the source files share.
//
// Sums of the operators `torch.ops.tandem.*` are in float32, in an order that depends on nothing but the token itself: a
// token's result does not depend on what else is in the step, nor on whether it comes there alone or in a chunk.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <memory>

namespace tandem {

constexpr int64_t TASK_BYTES = 1 << 16;  // what one thread reads at least

// What one thread still has to do: of its own part of some tasks, or of another one's.
struct alignas(64) Share {
  std::atomic<uint64_t> left{0};  // begin << 32 | end, half open

  // Up to `most` of them, from the front or from the back; false when there are none.
  bool take(int64_t most, bool front, int64_t& begin, int64_t& end) {
    for (uint64_t seen = left.load(std::memory_order_relaxed);;) {
      const int64_t first = seen >> 32, last = seen & 0xffffffff, some = std::min(most, last - first);
      if (some <= 0) return false;
      const uint64_t rest = front ? seen + (static_cast<uint64_t>(some) << 32) : seen - some;
      if (!left.compare_exchange_weak(seen, rest, std::memory_order_relaxed)) continue;
      begin = front ? first : last - some;
      end = begin + some;
      return true;
    }
  }
};

// f(begin, end) over [0, count), `grain` at a time. Each thread begins with an equal part, neighbours one after another,
// for what comes next is read ahead; whoever is done takes from the end of another one's. So a thread that has to share
// its core with another process does less, and nobody waits long for it. Work stealing as in Blumofe and Leiserson (1999).
template <typename F>
void share_out(int64_t count, int64_t grain, const F& f) {
  const int64_t turns = (count + grain - 1) / grain;
  const int64_t threads = at::in_parallel_region() ? 1 : std::min<int64_t>(at::get_num_threads(), turns);
  if (threads <= 1) {
    if (count > 0) f(int64_t{0}, count);
    return;
  }
  const auto bound = [&](int64_t thread) { return static_cast<uint64_t>(count * thread / threads); };
  const std::unique_ptr<Share[]> shares(new Share[threads]);
  for (int64_t i = 0; i < threads; ++i) shares[i].left.store(bound(i) << 32 | bound(i + 1), std::memory_order_relaxed);
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t own = first; own < last; ++own)  // one, unless there are fewer threads than were promised
      for (int64_t i = 0, begin, end; i < threads; ++i)
        while (shares[(own + i) % threads].take(grain, i == 0, begin, end)) f(begin, end);
  });
}

constexpr int64_t TURNS = 8;  // of each thread, at least, so that all end together

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
