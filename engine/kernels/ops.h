// Declarations shared by the source files.
//
// The operators `torch.ops.tandem.*` sum in float32, in an order that depends on the token alone: its result does not
// depend on the other tokens of the step, nor on whether it is computed alone or in a chunk.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string_view>

namespace tandem {

constexpr int64_t TASK_BYTES = 1 << 16;  // that one task reads at least

// The tasks left in one thread's part; other threads take from it, too.
struct alignas(64) Share {
  std::atomic<uint64_t> left{0};  // begin << 32 | end, half open

  // Takes up to `most` tasks from the front or the back; false if none are left.
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

// Runs f(begin, end) over [0, count), `grain` at a time. Each thread begins with an equal part and takes it in order,
// since the next task's memory is prefetched; when it is done, it takes from the end of another thread's part. A thread
// that shares its core with another process thus does less and delays the others little. Work stealing as in Blumofe
// and Leiserson (1999).
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
    for (int64_t own = first; own < last; ++own)  // one part, unless fewer threads run than were requested
      for (int64_t i = 0, begin, end; i < threads; ++i)
        while (shares[(own + i) % threads].take(grain, i == 0, begin, end)) f(begin, end);
  });
}

constexpr int64_t TURNS = 8;  // tasks per thread, at least, so that all threads end together

// The number of parts into which the rows of a product are cut, so that there are enough tasks for the threads to end
// together: of nine panels alone, one of two threads takes five and the other four. Parts have `least` rows or more,
// but for the last.
inline int64_t parts_of(int64_t rows, int64_t panels, int64_t least) {
  const int64_t threads = at::get_num_threads(), wanted = (threads * TURNS + panels - 1) / std::max<int64_t>(1, panels);
  return threads == 1 ? 1 : std::max<int64_t>(1, std::min(wanted, rows / least));
}

inline at::Tensor rows_of(const at::Tensor& t) {
  return t.dim() > 0 && t.stride(-1) != 1 && t.size(-1) != 1 ? t.contiguous() : t;
}

// Whether the operators support this type.
bool served(at::ScalarType type);

// y [m, n] = x [m, k] times w [k, n], plus bias [n] if defined, all of one supported type. The rows of y and `bias` are
// contiguous. The order of a sum depends on the strides of w and on k alone. With bias, the columns of w must be
// contiguous.
void product(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias, at::Tensor& y);

// y [m, n] = x [m, k] times a packed weight [n, k] transposed, plus bias [n]; x and y are contiguous.
void linear_into(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t n,
                 int64_t k, const at::Tensor& y);

// The same with a weight as codes and scales.
void linear_codes_into(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales,
                       const std::optional<at::Tensor>& bias, int64_t n, int64_t k, int64_t group,
                       std::string_view format, const at::Tensor& y);

}  // namespace tandem
