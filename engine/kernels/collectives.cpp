// Sums and concatenations over the ranks of one model: processes of one host that share a mapping.
//
//     header  | broken | a line for each rank: beat, turn, call |
//     room    | rank 0, even turns | rank 1, even turns | ... | rank 0, odd turns | ... |
//
// In a turn each rank writes a piece of its tensor to its own part of the room, publishes the turn, waits for the others
// to have published theirs, and reads all parts. A rank can be at most one turn ahead of another that still reads, so
// two rooms are enough. Each rank adds the parts in the order of ranks, in float32, and rounds once: all ranks have the
// same bits, which do not depend on how many rows there are.
//
// A rank that waits for one that has died, or that has been stopped, must not wait for ever: each process has a thread
// that counts up its beat, and a beat that stands still for STALE_S while the waiting rank itself runs breaks the group.
// Time in which the waiting rank did not run does not count. A broken group stays so, and every call raises.
//
// Each rank compares the call that it is in (which one of the forward, of which size and type) with those of the others,
// so that ranks that have lost step never add unrelated tensors.
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tandem {
namespace {

using at::Tensor;
using Clock = std::chrono::steady_clock;

constexpr int64_t LINE = 128, PAGE = 4096, MAX_RANKS = 16;
constexpr int64_t PIECE = 256 << 10;            // bytes of one rank in one turn
constexpr int64_t SPINS = 4000;                 // before the processor is given up
constexpr double STALE_S = 1.5;                 // without a beat, after the first: dead or stopped
constexpr double LONGEST_S = 900;               // that a living rank may be late: loading, from a slow disk
constexpr auto BEAT = std::chrono::milliseconds(50);
constexpr auto NAP = std::chrono::microseconds(50);
constexpr double LONGEST_NAP_S = 0.02;          // more of it the waiting rank has spent without running

struct Call {
  int64_t site, count, type;
};

struct alignas(LINE) Rank {
  std::atomic<uint64_t> beat, turn;
  Call calls[2];  // of the last even and the last odd turn
};

struct Header {
  std::atomic<uint64_t> broken;
  Rank ranks[MAX_RANKS];
};
static_assert(sizeof(Header) <= PAGE && std::atomic<uint64_t>::is_always_lock_free);

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

class Group {
 public:
  Group(int fd, int64_t rank, int64_t ranks) : rank_(rank), ranks_(ranks), bytes_(bytes(ranks)) {
    TORCH_CHECK(0 <= rank && rank < ranks && ranks <= MAX_RANKS, "tandem::open_group: rank ", rank, " of ", ranks);
    struct stat facts;
    TORCH_CHECK(fstat(fd, &facts) == 0 && facts.st_size == bytes_, "tandem::open_group: the file has another size");
    void* start = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    TORCH_CHECK(start != MAP_FAILED, "tandem::open_group: the file cannot be mapped");
    base_ = static_cast<char*>(start);
    header_ = reinterpret_cast<Header*>(base_);
    beating_ = std::thread([this] {
      while (!ended_.load(std::memory_order_relaxed)) {
        header_->ranks[rank_].beat.fetch_add(1, std::memory_order_relaxed);
        std::this_thread::sleep_for(BEAT);
      }
    });
  }

  ~Group() {
    ended_ = true;
    beating_.join();
    munmap(base_, bytes_);
  }

  static int64_t bytes(int64_t ranks) { return PAGE + 2 * ranks * PIECE; }

  void break_off() { header_->broken.store(1, std::memory_order_release); }

  bool broken() const { return header_->broken.load(std::memory_order_acquire) != 0; }

  std::vector<int64_t> beats() const {
    std::vector<int64_t> all(ranks_);
    for (int64_t r = 0; r < ranks_; ++r) all[r] = header_->ranks[r].beat.load(std::memory_order_relaxed);
    return all;
  }

  Tensor all_reduce(const Tensor& x, int64_t site) {
    const Tensor own = x.contiguous();
    Tensor out = own.new_empty(own.sizes());
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, own.scalar_type(), "all_reduce", [&] {
      constexpr int64_t MOST = PIECE / sizeof(scalar_t);
      const auto* from = own.const_data_ptr<scalar_t>();
      auto* to = out.data_ptr<scalar_t>();
      const int64_t count = own.numel();
      for (int64_t at = 0; at < count; at += MOST) {
        const int64_t some = std::min(MOST, count - at);
        exchange(from + at, some * sizeof(scalar_t), {site, count - at, static_cast<int64_t>(own.scalar_type())});
        add_up(to + at, some);
      }
    });
    return out;
  }

  Tensor all_gather(const Tensor& x, int64_t site) {
    const Tensor own = x.contiguous();
    const int64_t width = own.size(-1) * own.element_size(), rows = own.numel() / std::max<int64_t>(1, own.size(-1));
    auto sizes = own.sizes().vec();
    sizes.back() *= ranks_;
    Tensor out = own.new_empty(sizes);
    const auto* from = static_cast<const char*>(own.const_data_ptr());
    auto* to = static_cast<char*>(out.data_ptr());
    const int64_t count = rows * width;
    for (int64_t at = 0; at < count; at += PIECE) {
      const int64_t some = std::min(PIECE, count - at);
      exchange(from + at, some, {site, count - at, static_cast<int64_t>(own.scalar_type())});
      for (int64_t done = at; done < at + some;) {  // a piece may begin and end within a row
        const int64_t row = done / width, within = done % width, run = std::min(width - within, at + some - done);
        for (int64_t r = 0; r < ranks_; ++r)
          std::memcpy(to + (row * ranks_ + r) * width + within, part(r) + done - at, run);
        done += run;
      }
    }
    return out;
  }

  void barrier(int64_t site) { exchange(nullptr, 0, {site, 0, -1}); }

 private:
  char* part(int64_t rank) const { return base_ + PAGE + ((turn_ & 1) * ranks_ + rank) * PIECE; }

  // Returns when the parts of all ranks are there.
  void exchange(const void* piece, int64_t bytes, const Call& call) {
    std::lock_guard<std::mutex> one(mutex_);
    check_whole();
    ++turn_;
    if (bytes > 0) std::memcpy(part(rank_), piece, bytes);
    Rank& own = header_->ranks[rank_];
    own.calls[turn_ & 1] = call;
    own.turn.store(turn_, std::memory_order_release);
    for (int64_t r = 0; r < ranks_; ++r) {
      if (r == rank_) continue;
      wait_for(r);
      const Call& there = header_->ranks[r].calls[turn_ & 1];
      if (there.site != call.site || there.count != call.count || there.type != call.type) {
        break_off();
        TORCH_CHECK(false, "the ranks have lost step: rank ", rank_, " is at ", call.site, " with ", call.count,
                    " left, rank ", r, " at ", there.site, " with ", there.count);
      }
    }
  }

  void check_whole() const { TORCH_CHECK(!broken(), "the group of ranks is broken"); }

  void wait_for(int64_t other) {
    const Rank& there = header_->ranks[other];
    const auto arrived = [&] { return there.turn.load(std::memory_order_acquire) >= turn_; };
    for (int64_t spins = 0; spins < SPINS; ++spins) {
      if (arrived()) return;
      pause();
    }
    uint64_t beat = there.beat.load(std::memory_order_relaxed);
    double silent = 0, waited = 0;
    for (auto last = Clock::now(); !arrived();) {
      if (waited < 1e-3)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(NAP);
      const auto now = Clock::now();
      const double spent = std::min(LONGEST_NAP_S, std::chrono::duration<double>(now - last).count());
      last = now;
      waited += spent;
      const uint64_t seen = there.beat.load(std::memory_order_relaxed);
      silent = seen == beat && seen > 0 ? silent + spent : 0;  // without a first beat its process is starting
      beat = seen;
      check_whole();
      if (silent > STALE_S || waited > LONGEST_S) {
        break_off();
        TORCH_CHECK(false, "rank ", other, silent > STALE_S ? " has shown no sign of life for " : " is late by ",
                    silent > STALE_S ? silent : waited, " s");
      }
    }
  }

  template <typename T>
  void add_up(T* to, int64_t count) const {
    constexpr int64_t SOME = 512;
    float sums[SOME];
    for (int64_t at = 0; at < count; at += SOME) {
      const int64_t some = std::min(SOME, count - at);
      for (int64_t r = 0; r < ranks_; ++r) {
        const T* from = reinterpret_cast<const T*>(part(r)) + at;
        if (r == 0)
          for (int64_t i = 0; i < some; ++i) sums[i] = static_cast<float>(from[i]);
        else
          for (int64_t i = 0; i < some; ++i) sums[i] += static_cast<float>(from[i]);
      }
      for (int64_t i = 0; i < some; ++i) to[at + i] = static_cast<T>(sums[i]);
    }
  }

  const int64_t rank_, ranks_, bytes_;
  char* base_;
  Header* header_;
  uint64_t turn_ = 0;
  std::mutex mutex_;
  std::thread beating_;
  std::atomic<bool> ended_{false};
};

std::mutex groups_mutex;
std::vector<std::shared_ptr<Group>>& groups() {
  static auto* all = new std::vector<std::shared_ptr<Group>>();  // never destroyed: threads may beat until the end
  return *all;
}

std::shared_ptr<Group> group_of(int64_t number) {
  std::lock_guard<std::mutex> one(groups_mutex);
  TORCH_CHECK(0 <= number && number < static_cast<int64_t>(groups().size()) && groups()[number],
              "the group of ranks has ended");
  return groups()[number];
}

}  // namespace

int64_t group_bytes(int64_t ranks) { return Group::bytes(ranks); }

int64_t open_group(int64_t fd, int64_t rank, int64_t ranks) {
  auto group = std::make_shared<Group>(static_cast<int>(fd), rank, ranks);
  std::lock_guard<std::mutex> one(groups_mutex);
  groups().push_back(std::move(group));
  return static_cast<int64_t>(groups().size()) - 1;
}

void close_group(int64_t number) {
  std::shared_ptr<Group> group = group_of(number);  // ends after the calls that are in it
  group->break_off();
  std::lock_guard<std::mutex> one(groups_mutex);
  groups()[number].reset();
}

void break_group(int64_t number) { group_of(number)->break_off(); }

bool group_broken(int64_t number) { return group_of(number)->broken(); }

std::vector<int64_t> group_beats(int64_t number) { return group_of(number)->beats(); }

void group_barrier(int64_t number, int64_t site) { group_of(number)->barrier(site); }

Tensor all_reduce(const Tensor& x, int64_t number, int64_t site) { return group_of(number)->all_reduce(x, site); }

Tensor all_gather(const Tensor& x, int64_t number, int64_t site) { return group_of(number)->all_gather(x, site); }

}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("group_bytes(int ranks) -> int", &tandem::group_bytes);
  m.def("open_group(int fd, int rank, int ranks) -> int", &tandem::open_group);
  m.def("close_group(int group) -> ()", &tandem::close_group);
  m.def("break_group(int group) -> ()", &tandem::break_group);
  m.def("group_broken(int group) -> bool", &tandem::group_broken);
  m.def("group_beats(int group) -> int[]", &tandem::group_beats);
  m.def("group_barrier(int group, int site) -> ()", &tandem::group_barrier);
  m.def("all_reduce(Tensor x, int group, int site) -> Tensor");
  m.def("all_gather(Tensor x, int group, int site) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("all_reduce", &tandem::all_reduce);
  m.impl("all_gather", &tandem::all_gather);
}
