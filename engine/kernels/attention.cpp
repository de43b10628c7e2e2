// Attention over K and V in their pages, and writing new K and V into them.
#include "ops.h"

#include "attention.h"
#include "capture.h"
#include "dots.h"
#include "tiles.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace tandem {
namespace {

using at::BFloat16;
using at::Tensor;

// A task is some queries of one sequence with one KV head. It packs K of KEYS tokens at a time into a panel with one
// token per lane, so each logit is summed along the dimensions in a lane of its own. Then the logits of each query
// become weights, and V is packed into panels with one element per lane and summed along the tokens. So every sum goes
// in the order of the dimensions or of the positions, whatever else the task contains.
constexpr int64_t PANEL = COLS * LANES;  // columns
constexpr int64_t KEYS = PANEL;
constexpr int64_t QUERIES = 8 * ROWS;     // per task at most
constexpr int64_t LOGIT_BYTES = 1 << 19;  // per task, if that allows ROWS queries or more

int64_t aligned(int64_t position) { return position / LANES * LANES; }

// e to the power of x, as accurate as weights of type W need.
template <typename W>
Vec power(Vec x) {
  if constexpr (std::is_same_v<W, float>) return x.exp();
  return x.exp_u20();
}

void put_weights(Vec weights, float* to) { weights.store(to); }

void put_weights(Vec weights, BFloat16* to) {
#ifdef TANDEM_BF16_DOT
  const __m256bh narrow = _mm512_cvtneps_pbh(weights);
  std::memcpy(to, &narrow, sizeof(narrow));
#else
  put(weights, to);
#endif
}

// Computes `weights` from logits[from..to) and returns their sum; `from` and `to` count from a multiple of LANES tokens
// into the sequence. The rest of the first and last vector becomes zero. A token's position determines its lane, so the
// order of the sum does not depend on what else the task contains. For quantised tokens, `by_key` holds the scales of
// K, not yet applied to the logits, and `by_value` those of V, applied to the weights but not to the sum.
template <bool SCALED, typename W>
float softmax(float* logits, W* weights, int64_t from, int64_t to, float scaling, std::optional<double> softcap,
              const float* sink, const float* by_key, const float* by_value) {
  constexpr float NONE = -std::numeric_limits<float>::infinity();
  const int64_t begin = aligned(from), end = aligned(to + LANES - 1);
  if constexpr (SCALED)
    for (int64_t t = begin; t < end; t += LANES) (load(logits + t) * load(by_key + t)).store(logits + t);
  if (softcap.has_value()) {
    const Vec cap(static_cast<float>(*softcap));
    for (int64_t t = begin; t < end; t += LANES) ((load(logits + t) * Vec(scaling) / cap).tanh() * cap).store(logits + t);
    scaling = 1.0f;
  }
  std::fill(logits + begin, logits + from, NONE);
  std::fill(logits + to, logits + end, NONE);
  Vec highest(NONE);
  for (int64_t t = begin; t < end; t += LANES) highest = at::vec::maximum(highest, load(logits + t));
  float lanes[LANES];
  (highest * Vec(scaling)).store(lanes);
  float top = sink == nullptr ? NONE : *sink;
  for (int i = 0; i < LANES; ++i) top = std::isnan(lanes[i]) ? lanes[i] : std::max(top, lanes[i]);
  Vec sums(0.0f);
  for (int64_t t = begin; t < end; t += LANES) {
    const Vec weight = power<W>(at::vec::fmsub(load(logits + t), Vec(scaling), Vec(top)));
    put_weights(SCALED ? weight * load(by_value + t) : weight, weights + t);
    sums = sums + weight;
  }
  sums.store(lanes);
  float total = sink == nullptr ? 0.0f : std::exp(*sink - top);
  for (int i = 0; i < LANES; ++i) total += lanes[i];
  return total;
}

#ifdef TANDEM_BF16_DOT
using Narrow = Pairs;
#else
using Narrow = Widened<float>;  // bfloat16 is widened when packed into panels
#endif

#ifdef TANDEM_BF16_DOT
// Interleaves the elements of rows a and b: their first halves into `first`, their second halves into `second`.
[[gnu::always_inline]] inline void pair(__m512i a, __m512i b, __m512i& first, __m512i& second) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                       36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  first = _mm512_permutex2var_epi16(a, low, b);
  second = _mm512_permutex2var_epi16(a, _mm512_add_epi16(low, _mm512_set1_epi16(16)), b);
}
#endif

// Scratch memory of a thread, grown and reused; its contents are undefined.
template <typename T>
T* scratch(std::vector<T>& memory, int64_t count) {
  if (static_cast<int64_t>(memory.size()) < count) memory = std::vector<T>(count);
  return memory.data();
}

// The rows of K or V of one sequence and KV head, KEYS at a time. Work on `here` prefetches `next` at an even rate: a
// core stalls when too many cache misses are outstanding.
template <typename T>
struct Rows : Place<T> {
  int64_t dim, first, last;  // elements of a row; tokens [first, last) are seen
  const T* here[KEYS];         // null for tokens that are not seen
  const T* next[KEYS];

  // Advances to the tokens from `start` on; calls are in order of `start`. After the last tokens, the first rows of
  // `then` are next.
  void move(int64_t start, const Rows& then) {
    std::copy(next, next + KEYS, here);
    if (start + KEYS < last)
      locate(start + KEYS);
    else
      std::copy(then.next, then.next + KEYS, next);
  }

  // Prefetches the cache line of element `at` of next[t].
  void fetch_line(int64_t t, int64_t at) const {
    if (next[t] != nullptr) __builtin_prefetch(next[t] + at, 0, 2);
  }

  void fetch(int64_t from, int64_t to) const {
    for (int64_t t = from; t < to; ++t)
      if (next[t] != nullptr) prefetch(next[t], dim);
  }

  void locate(int64_t start) { Place<T>::locate(start, KEYS, first, last, next); }
};

// Packs KEYS rows [dim] into a panel [dim / GROUP][KEYS][GROUP]; zeros where a row is null.
template <typename D, typename T>
void keys_panel(const Rows<T>& keys, typename D::W* panel) {
  using W = typename D::W;
  const auto& rows = keys.here;
  const int64_t dim = keys.dim;
#ifdef TANDEM_WORDS
  if constexpr (LOADED<T, W>) {  // LANES rows of LANES words at a time; a word is the GROUP elements of a lane
    const int64_t words = (dim + D::GROUP - 1) / D::GROUP;
    for (int64_t t = 0; t < KEYS; t += LANES) {
      keys.fetch(t, t + LANES);
      for (int64_t word = 0; word < words; word += LANES) {
        WordVec in[LANES];
        const int64_t count = std::min<int64_t>(LANES * D::GROUP, dim - word * D::GROUP);
        for (int i = 0; i < LANES; ++i) in[i] = words_of<W>(rows[t + i], word * D::GROUP, count);
        transpose(in);
        const int64_t valid = std::min<int64_t>(LANES, words - word);
        for (int64_t i = 0; i < valid; ++i) put_words(in[i], panel + ((word + i) * KEYS + t) * D::GROUP);
      }
    }
    return;
  }
#endif
  keys.fetch(0, KEYS);
  for (int64_t at = 0; at < rounded_up(dim, D::GROUP); ++at)
    for (int64_t t = 0; t < KEYS; ++t)
      panel[(at / D::GROUP * KEYS + t) * D::GROUP + at % D::GROUP] =
          rows[t] != nullptr && at < dim ? static_cast<W>(static_cast<float>(rows[t][at])) : W(0.0f);
}

// Packs KEYS rows [dim] into a panel [KEYS / GROUP][wide][GROUP]; zeros where a row is null, and from dim to wide.
template <typename D, typename T>
void values_panel(const Rows<T>& values, int64_t wide, typename D::W* panel) {
  using W = typename D::W;
  const auto& rows = values.here;
  const int64_t dim = values.dim;
  if constexpr (std::is_same_v<T, W> && D::GROUP == 1) {
    for (int64_t t = 0; t < KEYS; ++t) {
      values.fetch(t, t + 1);
      if (rows[t] != nullptr) std::copy(rows[t], rows[t] + dim, panel + t * wide);
      std::fill(panel + t * wide + (rows[t] == nullptr ? 0 : dim), panel + (t + 1) * wide, W(0.0f));
    }
    return;
  }
#ifdef TANDEM_WORDS
  if constexpr (LOADED<T, W> && D::GROUP == 1) {
    for (int64_t t = 0; t < KEYS; ++t) {
      values.fetch(t, t + 1);
      for (int64_t d = 0; d < wide; d += LANES)
        put_words(words_of<W>(rows[t], d, std::clamp<int64_t>(dim - d, 0, LANES)), panel + t * wide + d);
    }
    return;
  }
#endif
#ifdef TANDEM_BF16_DOT
  if constexpr (D::GROUP == 2) {
    for (int64_t t = 0; t < KEYS; t += 2) {
      values.fetch(t, t + 2);
      for (int64_t d = 0; d < wide; d += 2 * LANES) {
        const int64_t count = std::clamp<int64_t>(dim - d, 0, 2 * LANES);
        __m512i first, second;
        pair(words_of<W>(rows[t], d, count), words_of<W>(rows[t + 1], d, count), first, second);
        W* to = panel + (t / 2 * wide + d) * 2;
        _mm512_storeu_si512(to, first);
        if (d + LANES < wide) _mm512_storeu_si512(to + 2 * LANES, second);
      }
    }
    return;
  }
#endif
  values.fetch(0, KEYS);
  for (int64_t t = 0; t < KEYS; ++t)
    for (int64_t d = 0; d < wide; ++d)
      panel[(t / D::GROUP * wide + d) * D::GROUP + t % D::GROUP] =
          rows[t] != nullptr && d < dim ? static_cast<W>(static_cast<float>(rows[t][d])) : W(0.0f);
}

// out[r][0..KEYS) = x[r] . the panel's columns.
template <typename D, int R = ROWS>
void logits_of(int64_t rows, const typename D::X* x, int64_t dim, int64_t stride, const typename D::W* panel, float* out,
               int64_t room) {
  if (rows < R) {
    if constexpr (R > 1) logits_of<D, R - 1>(rows, x, dim, stride, panel, out, room);
    return;
  }
  Vec sums[R][COLS];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < COLS; ++c) sums[r][c] = Vec(0.0f);
  add_panel<D, R, Fetch::NOTHING>(x, stride, dim, panel, nullptr, sums);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < COLS; ++c) sums[r][c].store(out + r * room + c * LANES);
}

// sums[r][0..C * LANES) += weights[r][0..KEYS) times C * LANES columns of V's panel.
template <typename D, int C, int R = ROWS>
void add_values(int64_t rows, const typename D::W* weights, int64_t room, const typename D::W* panel, int64_t wide,
                float* sums) {
  if (rows < R) {
    if constexpr (R > 1) add_values<D, C, R - 1>(rows, weights, room, panel, wide, sums);
    return;
  }
  Vec here[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) here[r][c] = Vec::loadu(sums + r * wide + c * LANES);
  for (int64_t t = 0; t < KEYS; t += D::GROUP) {
    decltype(D::get(panel)) values[C];
    for (int c = 0; c < C; ++c) values[c] = D::get(panel + t * wide + c * LANES * D::GROUP);
    for (int r = 0; r < R; ++r) {
      const auto weight = D::spread(weights + r * room + t, D::GROUP);
      for (int c = 0; c < C; ++c) here[r][c] = D::dot(weight, values[c], here[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) here[r][c].store(sums + r * wide + c * LANES);
}

#ifdef CPU_CAPABILITY_AVX512
template <typename D>
auto column_of(__m512i words) {
  if constexpr (std::is_same_v<typename D::W, float>)
    return Vec(_mm512_castsi512_ps(words));
  else
    return (decltype(D::get(std::declval<const typename D::W*>())))words;
}

// The same bits as keys_panel and logits_of, for few rows: each part of K is multiplied as soon as it is transposed,
// and is never stored.
template <typename D, typename T, int R = ROWS>
void logits_from(int64_t rows, const Rows<T>& keys, const typename D::X* x, int64_t stride, float* out, int64_t room) {
  if (rows < R) {
    if constexpr (R > 1) logits_from<D, T, R - 1>(rows, keys, x, stride, out, room);
    return;
  }
  const int64_t words = (keys.dim + D::GROUP - 1) / D::GROUP;
  for (int64_t t = 0; t < KEYS; t += LANES) {
    Vec sums[R];
    for (int r = 0; r < R; ++r) sums[r] = Vec(0.0f);
    for (int64_t word = 0; word < words; word += LANES) {
      const int64_t at = word * D::GROUP, count = std::min<int64_t>(LANES * D::GROUP, keys.dim - at);
      __m512i in[LANES];
      for (int i = 0; i < LANES; ++i) {
        in[i] = words_of<typename D::W>(keys.here[t + i], at, count);
        keys.fetch_line(t + i, at);
      }
      transpose(in);
      const auto add = [&](int i) {
        for (int r = 0; r < R; ++r)
          sums[r] = D::dot(D::spread(x + r * stride + at + i * D::GROUP, D::GROUP), column_of<D>(in[i]), sums[r]);
      };
      if (words - word >= LANES)
        for (int i = 0; i < LANES; ++i) add(i);
      else
        for (int i = 0; i < words - word; ++i) add(i);
    }
    for (int r = 0; r < R; ++r) sums[r].store(out + r * room + t);
  }
}

// The same bits as values_panel and add_values, likewise. `wide` is a multiple of PANEL.
template <typename D, typename T, int R = ROWS>
void add_from(int64_t rows, const Rows<T>& values, const typename D::W* weights, int64_t room, int64_t wide,
              float* sums) {
  if (rows < R) {
    if constexpr (R > 1) add_from<D, T, R - 1>(rows, values, weights, room, wide, sums);
    return;
  }
  using W = typename D::W;
  constexpr int64_t LOADED_AT_ONCE = LANES * D::GROUP;
  for (int64_t d = 0; d < wide; d += PANEL) {
    Vec here[R][COLS];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < COLS; ++c) here[r][c] = Vec::loadu(sums + r * wide + d + c * LANES);
    for (int64_t t = 0; t < KEYS; t += D::GROUP) {
      __m512i columns[COLS];
      for (int c = 0; c < COLS; c += D::GROUP) {
        const int64_t at = d + c * LANES, count = std::clamp<int64_t>(values.dim - at, 0, LOADED_AT_ONCE);
        columns[c] = words_of<W>(values.here[t], at, count);
        for (int g = 0; g < D::GROUP; ++g) values.fetch_line(t + g, at);
        if constexpr (D::GROUP == 2) pair(columns[c], words_of<W>(values.here[t + 1], at, count), columns[c], columns[c + 1]);
      }
      for (int r = 0; r < R; ++r) {
        const auto weight = D::spread(weights + r * room + t, D::GROUP);
        for (int c = 0; c < COLS; ++c) here[r][c] = D::dot(weight, column_of<D>(columns[c]), here[r][c]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < COLS; ++c) here[r][c].store(sums + r * wide + d + c * LANES);
  }
}
#endif

template <typename D, typename T, typename Q>
void attend_tasks(Tensor& out, const Tensor& query, const Tensor& k_pages, const Tensor& v_pages, const Tensor& starts,
                  const Tensor& lengths, const Tensor& blocks, Reach reach, double scaling,
                  std::optional<double> softcap, const float* sinks, const std::optional<Tensor>& k_scales,
                  const std::optional<Tensor>& v_scales) {
  using W = typename D::W;
  const int64_t kv_heads = k_pages.size(2), groups = query.size(1) / kv_heads, size = k_pages.size(1);
  const int64_t k_dim = k_pages.size(3), v_dim = v_pages.size(3), wide = rounded_up(v_dim, LANES);
  const int64_t q_dim = rounded_up(k_dim, D::GROUP);
  const std::vector<Task> tasks = tasks_of(starts, lengths, [&](int64_t length) {
    return std::clamp<int64_t>(LOGIT_BYTES / (groups * (length + KEYS) * sizeof(float)), ROWS, QUERIES);
  });

  const int64_t count = static_cast<int64_t>(tasks.size()) * kv_heads, threads = at::get_num_threads();
  // Several tasks at a time: each prefetches the first keys of the next.
  share_out(count, std::max<int64_t>(1, count / (threads * TURNS)), [&](int64_t begin, int64_t end) {
    static thread_local std::vector<W> query_memory, panel_memory, weight_memory;
    static thread_local std::vector<float> logit_memory, sum_memory, scale_memory;
    W* panel = scratch(panel_memory, KEYS * std::max(q_dim, wide));
    // K or V of the n-th task, with its first KEYS rows located in `next`.
    const auto rows_in = [&](const Tensor& pages, int64_t n) {
      const Task& task = tasks[n / kv_heads];
      Rows<T> rows{{pages.const_data_ptr<T>() + n % kv_heads * pages.stride(2),
                    blocks.const_data_ptr<int32_t>() + task.sequence * blocks.size(1), size, pages.stride(0),
                    pages.stride(1)},
                   pages.size(3),
                   reach.first(task.position),
                   task.position + task.queries,
                   {},
                   {}};
      rows.locate(aligned(rows.first));
      return rows;
    };
    Rows<T> keys = rows_in(k_pages, begin);
    keys.fetch(0, KEYS);
    for (int64_t n = begin; n < end; ++n) {
      const Task& task = tasks[n / kv_heads];
      const int64_t head = n % kv_heads, count = task.queries * groups;  // a row for each query and query head
      const int64_t first = keys.first, last = keys.last;  // tokens [first, last) are seen
      const int64_t base = aligned(first), room = rounded_up(last - base, KEYS);
      [[maybe_unused]] const bool few = task.queries == 1 && count <= ROWS;
      const int32_t* table = keys.table;
      Rows<T> values = rows_in(v_pages, n);
      Rows<T> later = n + 1 < end ? rows_in(k_pages, n + 1) : Rows<T>{};

      W* q = scratch(query_memory, count * q_dim);
      for (int64_t r = 0; r < count; ++r) {
        const Q* from = query.const_data_ptr<Q>() + (task.row + r / groups) * query.stride(0) +
                        (head * groups + r % groups) * query.stride(1);
        W* to = q + r * q_dim;
        if constexpr (std::is_same_v<W, Q>)
          std::memcpy(to, from, k_dim * sizeof(W));
        else
          for (int64_t d = 0; d < k_dim; ++d) to[d] = static_cast<W>(from[d]);
        std::fill(to + k_dim, to + q_dim, W(0.0f));
      }
      // Rows [from_row, to_row) see some of the KEYS tokens from `start` on.
      const auto from_row = [&](int64_t start) { return std::max<int64_t>(0, start - task.position) * groups; };
      const auto to_row = [&](int64_t start) {
        return std::min(task.queries - 1, reach.last(std::min(start + KEYS, last) - 1) - task.position) * groups + groups;
      };

      float* logits = scratch(logit_memory, count * room);
      for (int64_t start = base; start < last; start += KEYS) {
        keys.move(start, values);
#ifdef CPU_CAPABILITY_AVX512
        if constexpr (LOADED<T, W>)
          if (few) {
            logits_from<D>(count, keys, q, q_dim, logits + start - base, room);
            continue;
          }
#endif
        keys_panel<D>(keys, panel);
        for (int64_t r = from_row(start), stop = to_row(start); r < stop; r += ROWS)
          logits_of<D>(std::min<int64_t>(ROWS, stop - r), q + r * q_dim, k_dim, q_dim, panel,
                       logits + r * room + start - base, room);
      }
      float *by_key = nullptr, *by_value = nullptr;
      if constexpr (QUANTISED<T>) {
        const auto read = [&](const Tensor& scales, float* to) {
          const auto* bits = reinterpret_cast<const uint16_t*>(scales.const_data_ptr<BFloat16>());
          std::fill(to, to + room, 0.0f);
          scales_into(bits + head * scales.stride(2), scales.stride(0), table, size, first, last, to + first - base);
        };
        by_key = scratch(scale_memory, 2 * room);
        by_value = by_key + room;
        read(*k_scales, by_key);
        read(*v_scales, by_value);
      }

      W* weights;
      if constexpr (std::is_same_v<W, float>)
        weights = logits;
      else
        weights = scratch(weight_memory, count * room);
      float* sums = scratch(sum_memory, count * wide + count);
      float* totals = sums + count * wide;
      std::fill(sums, totals, 0.0f);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t position = task.position + r / groups, seen = reach.first(position) - base;
        const int64_t past = position + 1 - base;
        const float* sink = sinks == nullptr ? nullptr : sinks + head * groups + r % groups;
        W* there = weights + r * room;
        totals[r] = softmax<QUANTISED<T>>(logits + r * room, there, seen, past, static_cast<float>(scaling), softcap, sink,
                                          by_key, by_value);
        std::fill(there, there + aligned(seen), W(0.0f));
        std::fill(there + aligned(past + LANES - 1), there + room, W(0.0f));
      }

      for (int64_t start = base; start < last; start += KEYS) {
        values.move(start, later);
#ifdef CPU_CAPABILITY_AVX512
        if constexpr (LOADED<T, W>)
          if (few && wide % PANEL == 0) {
            add_from<D>(count, values, weights + start - base, room, wide, sums);
            continue;
          }
#endif
        values_panel<D>(values, wide, panel);
        for (int64_t r = from_row(start), stop = to_row(start); r < stop; r += ROWS) {
          const int64_t height = std::min<int64_t>(ROWS, stop - r);
          const W* weight = weights + r * room + start - base;
          int64_t d = 0;
          for (; d + PANEL <= wide; d += PANEL)
            add_values<D, COLS>(height, weight, room, panel + d * D::GROUP, wide, sums + r * wide + d);
          for (; d < wide; d += LANES)
            add_values<D, 1>(height, weight, room, panel + d * D::GROUP, wide, sums + r * wide + d);
        }
      }
      for (int64_t r = 0; r < count; ++r) {
        Q* to = out.data_ptr<Q>() + (task.row + r / groups) * out.stride(0) + (head * groups + r % groups) * out.stride(1);
        const auto mean = [&](int64_t d) { return Vec::loadu(sums + r * wide + d) / Vec(totals[r]); };
        int64_t d = 0;
        for (; d + LANES <= v_dim; d += LANES) put(mean(d), to + d);
        if (d < v_dim) put(mean(d), to + d, v_dim - d);
      }
      keys = later;
    }
  });
}

bool scales_of(const Tensor& scales, const Tensor& pages) {
  return scales.scalar_type() == at::kBFloat16 && scales.sizes() == pages.sizes().slice(0, 3) &&
         (scales.stride(1) == 1 || scales.size(1) == 1);
}

// Attention of packed queries over pages. Sequence i has rows [starts[i], starts[i + 1]) of query [total, heads,
// k_dim]; they are the last of its lengths[i] tokens, whose KV blocks are blocks[i]. k_pages and v_pages are [blocks,
// block_size, kv_heads, dim] of the query's type, or int8 or fp8 with k_scales and v_scales [blocks, block_size,
// kv_heads]; sinks is [heads] in float32. A query sees all tokens up to its own, or only the last `window`, or only
// those in its own chunk of `chunk` tokens, if these are not 0. Writes out [total, heads, v_dim].
void attend(Tensor& out, const Tensor& query, const Tensor& k_pages, const Tensor& v_pages, const Tensor& starts,
            const Tensor& lengths, const Tensor& blocks, int64_t window, int64_t chunk, double scaling,
            std::optional<double> softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& k_scales,
            const std::optional<Tensor>& v_scales) {
  const at::ScalarType kept = k_pages.scalar_type();
  const bool scaled = k_scales.has_value();
  TORCH_CHECK(served(query.scalar_type()) && kept == v_pages.scalar_type() && out.scalar_type() == query.scalar_type() &&
                  (scaled ? kept == at::kChar || kept == at::kFloat8_e4m3fn : kept == query.scalar_type()),
              "tandem::attend wants one type, float32 or bfloat16, or int8 or fp8 pages with scales");
  TORCH_CHECK(scaled == v_scales.has_value() &&
                  (!scaled || (scales_of(*k_scales, k_pages) && scales_of(*v_scales, v_pages))),
              "tandem::attend wants bfloat16 scales of K and of V, those of a head side by side");
  TORCH_CHECK(k_pages.stride(3) == 1 && v_pages.stride(3) == 1 && out.stride(2) == 1,
              "tandem::attend wants whole heads in a row");
  TORCH_CHECK(query.size(1) % k_pages.size(2) == 0 && query.size(2) == k_pages.size(3) && scaling > 0,
              "tandem::attend: shape of the query, or scaling");
  TORCH_CHECK(!sinks.has_value() || (sinks->scalar_type() == at::kFloat && sinks->is_contiguous()),
              "tandem::attend wants sinks in float32");
  TORCH_CHECK(blocks.is_contiguous() && starts.size(0) == lengths.size(0) + 1 && blocks.size(0) == lengths.size(0),
              "tandem::attend: starts, lengths and blocks");
  const float* sink = sinks.has_value() ? sinks->const_data_ptr<float>() : nullptr;
  const Tensor q = rows_of(query);
  const auto over = [&](auto dots, auto element, auto row) {
    attend_tasks<decltype(dots), decltype(element), decltype(row)>(out, q, k_pages, v_pages, starts, lengths, blocks,
                                                                   {window, chunk}, scaling, softcap, sink, k_scales,
                                                                   v_scales);
  };
  if (query.scalar_type() == at::kFloat) {
    if (kept == at::kChar) return over(Widened<float>(), int8_t(), float());
    if (kept == at::kFloat8_e4m3fn) return over(Widened<float>(), Fp8(), float());
    return over(Widened<float>(), float(), float());
  }
#ifdef TANDEM_TILES
  if (by_tiles())
    return attend_by_tiles(out, q, k_pages, v_pages, starts, lengths, blocks, {window, chunk}, scaling, softcap, sink,
                           k_scales, v_scales);
#endif
  if (kept == at::kChar) return over(Narrow(), int8_t(), BFloat16());
  if (kept == at::kFloat8_e4m3fn) return over(Narrow(), Fp8(), BFloat16());
  over(Narrow(), BFloat16(), BFloat16());
}

template <typename T>
std::optional<T> if_any(const c10::IValue& value) {
  return value.isNone() ? std::nullopt : std::optional<T>(value.to<T>());
}

const bool attend_replayed = register_replay("attend", [](const torch::jit::Stack& in, const torch::jit::Stack&) -> Replay {
  return [out = in[0].toTensor(), query = in[1].toTensor(), k_pages = in[2].toTensor(), v_pages = in[3].toTensor(),
          starts = in[4].toTensor(), lengths = in[5].toTensor(), blocks = in[6].toTensor(), window = in[7].toInt(),
          chunk = in[8].toInt(), scaling = in[9].toDouble(), softcap = if_any<double>(in[10]), sinks = if_any<Tensor>(in[11]),
          k_scales = if_any<Tensor>(in[12]), v_scales = if_any<Tensor>(in[13])]() mutable {
    attend(out, query, k_pages, v_pages, starts, lengths, blocks, window, chunk, scaling, softcap, sinks, k_scales, v_scales);
  };
});

// Copies new [total, kv_heads, dim] into the slots of pages [blocks, block_size, kv_heads, dim], of the same type.
void write(Tensor& pages, const Tensor& fresh, const Tensor& slot_block, const Tensor& slot_offset) {
  TORCH_CHECK(pages.scalar_type() == fresh.scalar_type() && pages.stride(3) == 1, "tandem::write: types or strides");
  const Tensor from = rows_of(fresh);
  const auto *block = slot_block.const_data_ptr<int64_t>(), *offset = slot_offset.const_data_ptr<int64_t>();
  const int64_t item = pages.element_size(), bytes = pages.size(3) * item;
  char* base = static_cast<char*>(pages.data_ptr());
  const char* source = static_cast<const char*>(from.const_data_ptr());
  const int64_t heads = from.size(1);
  at::parallel_for(0, from.size(0), std::max<int64_t>(1, TASK_BYTES / (heads * bytes)), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < heads; ++h)
        std::memcpy(base + (block[t] * pages.stride(0) + offset[t] * pages.stride(1) + h * pages.stride(2)) * item,
                    source + (t * from.stride(0) + h * from.stride(1)) * item, bytes);
  });
}

const bool write_replayed = register_replay("write", [](const torch::jit::Stack& in, const torch::jit::Stack&) -> Replay {
  return [pages = in[0].toTensor(), fresh = in[1].toTensor(), block = in[2].toTensor(), offset = in[3].toTensor()]() mutable {
    write(pages, fresh, block, offset);
  };
});

// ---- quantising, bit for bit as engine/kv/kv_quantization.py

template <typename E>
constexpr float LARGEST = std::is_same_v<E, int8_t> ? 127.0f : 448.0f;
constexpr float NOTHING = 0x1p-100f, SMALLEST_FP8 = 0x1p-6f;

int8_t element(float y, int8_t) { return static_cast<int8_t>(std::nearbyint(y)); }

uint8_t element(float y, Fp8) {  // |y| is at most 448, up to rounding
  uint32_t bits;
  std::memcpy(&bits, &y, sizeof bits);
  const uint32_t sign = bits >> 31 << 7, size = bits & 0x7fffffff;
  const uint32_t nearest = (size + 0x7ffff + (size >> 20 & 1)) >> 20;  // 3 mantissa bits, ties to even
  return static_cast<uint8_t>(std::abs(y) < SMALLEST_FP8 ? 0 : sign | (nearest - (120 << 3)));
}

template <typename T>
float absolute_largest(const T* from, int64_t dim) {  // NaN if an element is NaN
  float top = 0.0f;
  bool nan = false;
  for (int64_t d = 0; d < dim; ++d) {
    const float size = std::abs(static_cast<float>(from[d]));
    nan |= std::isnan(size);
    top = std::max(top, size);
  }
  return nan ? std::numeric_limits<float>::quiet_NaN() : top;
}

template <typename E, typename T>
void quantise_row(const T* from, int64_t dim, E* elements, uint16_t* scale) {
  const float top = absolute_largest(from, dim);
  const bool finite = top < std::numeric_limits<float>::infinity();
  const float wanted = top < NOTHING ? 0.0f : top / LARGEST<E>;
  uint32_t bits = 0x7fc00000;  // NaN
  if (finite) {
    std::memcpy(&bits, &wanted, sizeof bits);
    bits = (bits + 0xffff) & 0xffff0000;
  }
  *scale = static_cast<uint16_t>(bits >> 16);
  float by;
  std::memcpy(&by, &bits, sizeof by);
  auto* to = reinterpret_cast<uint8_t*>(elements);
  if (!(by > 0.0f)) {
    std::memset(to, 0, dim);
    return;
  }
  for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<uint8_t>(element(static_cast<float>(from[d]) / by, E()));
}

template <typename E, typename T>
void quantise_rows(Tensor& pages, Tensor& scales, const Tensor& from, const int64_t* block, const int64_t* offset) {
  E* elements = pages.data_ptr<E>();
  auto* scale = reinterpret_cast<uint16_t*>(scales.data_ptr<BFloat16>());
  const T* source = from.const_data_ptr<T>();
  for (int64_t t = 0; t < from.size(0); ++t)
    for (int64_t h = 0; h < from.size(1); ++h)
      quantise_row(source + t * from.stride(0) + h * from.stride(1), from.size(2),
                   elements + block[t] * pages.stride(0) + offset[t] * pages.stride(1) + h * pages.stride(2),
                   scale + block[t] * scales.stride(0) + offset[t] * scales.stride(1) + h * scales.stride(2));
}

// Like `write`, into pages of int8 or fp8 and their scales [blocks, block_size, kv_heads] in bfloat16.
void write_quantised(Tensor& pages, Tensor& scales, const Tensor& fresh, const Tensor& slot_block,
                     const Tensor& slot_offset) {
  TORCH_CHECK(served(fresh.scalar_type()) && pages.stride(3) == 1 && fresh.size(2) == pages.size(3) &&
                  scales_of(scales, pages),
              "tandem::write_quantised: types, shapes or strides");
  const Tensor from = rows_of(fresh);
  const auto *block = slot_block.const_data_ptr<int64_t>(), *offset = slot_offset.const_data_ptr<int64_t>();
  const bool single = fresh.scalar_type() == at::kFloat;
  if (pages.scalar_type() == at::kChar)
    return single ? quantise_rows<int8_t, float>(pages, scales, from, block, offset)
                  : quantise_rows<int8_t, BFloat16>(pages, scales, from, block, offset);
  TORCH_CHECK(pages.scalar_type() == at::kFloat8_e4m3fn, "tandem::write_quantised wants pages of int8 or fp8");
  single ? quantise_rows<Fp8, float>(pages, scales, from, block, offset)
         : quantise_rows<Fp8, BFloat16>(pages, scales, from, block, offset);
}

const bool write_quantised_replayed = register_replay("write_quantised", [](const torch::jit::Stack& in, const torch::jit::Stack&) -> Replay {
  return [pages = in[0].toTensor(), scales = in[1].toTensor(), fresh = in[2].toTensor(), block = in[3].toTensor(),
          offset = in[4].toTensor()]() mutable { write_quantised(pages, scales, fresh, block, offset); };
});

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "attend(Tensor(a!) out, Tensor query, Tensor k_pages, Tensor v_pages, Tensor starts, Tensor lengths, Tensor"
      " blocks, int window, int chunk, float scaling, float? softcap, Tensor? sinks, Tensor? k_scales=None,"
      " Tensor? v_scales=None) -> ()");
  m.def("write(Tensor(a!) pages, Tensor fresh, Tensor slot_block, Tensor slot_offset) -> ()");
  m.def(
      "write_quantised(Tensor(a!) pages, Tensor(b!) scales, Tensor fresh, Tensor slot_block, Tensor slot_offset) ->"
      " ()");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("attend", &tandem::attend);
  m.impl("write", &tandem::write);
  m.impl("write_quantised", &tandem::write_quantised);
}
