// Shared by both attention kernels: which tokens a query sees, where their K and V are, and the split into tasks.
#pragma once

#include "dots.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Float8_e4m3fn.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

namespace tandem {

using Fp8 = c10::Float8_e4m3fn;

constexpr int64_t BLOCKS_AHEAD = 4;  // from the block whose scales are read to the one whose scales are prefetched

// Prefetches into L2. In assembler, because GCC 12 takes __builtin_prefetch to have no side effects and removes
// functions that do nothing else.
template <typename T>
void prefetch(const T* from, int64_t count) {
  const char *line = reinterpret_cast<const char*>(from), *end = line + count * sizeof(T);
#pragma GCC unroll 8
  for (; line < end; line += LINE) asm volatile("prefetcht1 %0" : : "m"(*line));
}

inline int64_t rounded_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// The tokens that a query sees: all up to its own, the last `window` of those, or those in its chunk of `chunk` tokens.
struct Reach {
  int64_t window, chunk;  // 0 for none
  int64_t first(int64_t position) const {
    if (window > 0) return std::max<int64_t>(0, position - window + 1);
    return chunk > 0 ? position / chunk * chunk : 0;
  }
  int64_t last(int64_t key) const {  // the last query position that sees `key`
    if (window > 0) return key + window - 1;
    return chunk > 0 ? key / chunk * chunk + chunk - 1 : std::numeric_limits<int64_t>::max();
  }
};

// Whether T is the element type of quantised K or V.
template <typename T>
constexpr bool QUANTISED = sizeof(T) == 1;

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#define TANDEM_WORDS
#endif

#ifdef CPU_CAPABILITY_AVX512
// Whether words_of loads rows of T as vectors of W. bfloat16 as float, in a build without VCVTNE2PS2BF16, has compiled
// and has not run.
template <typename T, typename W>
constexpr bool LOADED = sizeof(T) <= sizeof(W);

using WordVec = __m512i;  // LANES words of 32 bits

inline void put_words(WordVec from, void* to) { _mm512_storeu_si512(to, from); }

inline __m512i widened_to(float, __m128i bytes, int8_t) { return (__m512i)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }

// Stored fp8 is never subnormal (engine/kv/kv_quantization.py). The exponent bias is 7 in fp8 and 127 in float and
// bfloat16, so widening adds 120 to the exponent of all but zero.
inline __m512i widened_to(float, __m128i bytes, Fp8) {
  const __m512i bits =
      _mm512_and_si512(_mm512_slli_epi32(_mm512_cvtepi8_epi32(bytes), 20), _mm512_set1_epi32(0x87f00000));
  const __mmask16 some = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7fffffff));
  return _mm512_mask_add_epi32(bits, some, bits, _mm512_set1_epi32(120 << 23));
}

#ifdef TANDEM_BF16_DOT
inline __m512i widened_to(c10::BFloat16, __m256i bytes, int8_t) {
  const auto half = [](__m128i b) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b)); };
  return (__m512i)_mm512_cvtne2ps_pbh(half(_mm256_extracti128_si256(bytes, 1)), half(_mm256_castsi256_si128(bytes)));
}

inline __m512i widened_to(c10::BFloat16, __m256i bytes, Fp8) {
  const __m512i bits = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 4),
                                        _mm512_set1_epi16(static_cast<int16_t>(0x87f0)));
  const __mmask32 some = _mm512_test_epi16_mask(bits, _mm512_set1_epi16(0x7fff));
  return _mm512_mask_add_epi16(bits, some, bits, _mm512_set1_epi16(120 << 7));
}
#endif

// Elements [at, at + count) of a row as W, then zeros; all zeros if the row is null.
template <typename W, typename T>
WordVec words_of(const T* row, int64_t at, int64_t count) {
  if (row == nullptr || count <= 0) return _mm512_setzero_si512();
  if constexpr (QUANTISED<T> && sizeof(W) == 4)
    return widened_to(W(), _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << count) - 1), row + at), T());
  else if constexpr (QUANTISED<T>)
    return widened_to(W(), _mm256_maskz_loadu_epi8(static_cast<__mmask32>((1ull << count) - 1), row + at), T());
  else if constexpr (sizeof(T) == 4)
    return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1), row + at);
  else if constexpr (sizeof(W) == 4)
    return _mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), row + at)), 16);
  else
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << count) - 1), row + at);
}

// Transposes a matrix of 16 by 16 words of 32 bits.
[[gnu::always_inline]] inline void transpose(__m512i (&m)[LANES]) {
  __m512i n[LANES];
  for (int i = 0; i < LANES; i += 2) {
    n[i] = _mm512_unpacklo_epi32(m[i], m[i + 1]);
    n[i + 1] = _mm512_unpackhi_epi32(m[i], m[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int half = 0; half < 2; ++half) {
      m[i + 2 * half] = _mm512_unpacklo_epi64(n[i + half], n[i + 2 + half]);
      m[i + 2 * half + 1] = _mm512_unpackhi_epi64(n[i + half], n[i + 2 + half]);
    }
  for (int i = 0; i < LANES; i += 8)
    for (int at = 0; at < 4; ++at) {
      n[i + at] = _mm512_shuffle_i32x4(m[i + at], m[i + 4 + at], 0x88);
      n[i + 4 + at] = _mm512_shuffle_i32x4(m[i + at], m[i + 4 + at], 0xdd);
    }
  for (int at = 0; at < 8; ++at) {
    m[at] = _mm512_shuffle_i32x4(n[at], n[8 + at], 0x88);
    m[8 + at] = _mm512_shuffle_i32x4(n[at], n[8 + at], 0xdd);
  }
}
#elif defined(CPU_CAPABILITY_AVX2)
template <typename T, typename W>
constexpr bool LOADED = true;  // W is float

using WordVec = __m256i;  // LANES words of 32 bits

inline void put_words(WordVec from, void* to) { _mm256_storeu_si256(static_cast<__m256i*>(to), from); }

inline WordVec widened(const float* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

inline WordVec widened(const c10::BFloat16* from) {
  return _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16);
}

inline WordVec widened(const int8_t* from) {
  return (__m256i)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}

// As with AVX-512 above: adds 120 to the exponent of all but zero.
inline WordVec widened(const Fp8* from) {
  const __m256i codes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  const __m256i bits = _mm256_and_si256(_mm256_slli_epi32(codes, 20), _mm256_set1_epi32(static_cast<int>(0x87f00000)));
  const __m256i none = _mm256_cmpeq_epi32(_mm256_slli_epi32(bits, 1), _mm256_setzero_si256());
  return _mm256_add_epi32(bits, _mm256_andnot_si256(none, _mm256_set1_epi32(120 << 23)));
}

// Elements [at, at + count) of a row as float, then zeros; all zeros if the row is null.
template <typename W, typename T>
WordVec words_of(const T* row, int64_t at, int64_t count) {
  static_assert(std::is_same_v<W, float>);
  if (row == nullptr || count <= 0) return _mm256_setzero_si256();
  if (count >= LANES) return widened(row + at);
  T padded[LANES] = {};
  std::memcpy(padded, row + at, count * sizeof(T));
  return widened(padded);
}

// Transposes a matrix of 8 by 8 words of 32 bits.
[[gnu::always_inline]] inline void transpose(__m256i (&m)[LANES]) {
  __m256i n[LANES];
  for (int i = 0; i < LANES; i += 2) {
    n[i] = _mm256_unpacklo_epi32(m[i], m[i + 1]);
    n[i + 1] = _mm256_unpackhi_epi32(m[i], m[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int half = 0; half < 2; ++half) {
      m[i + 2 * half] = _mm256_unpacklo_epi64(n[i + half], n[i + 2 + half]);
      m[i + 2 * half + 1] = _mm256_unpackhi_epi64(n[i + half], n[i + 2 + half]);
    }
  for (int at = 0; at < 4; ++at) {
    n[at] = _mm256_permute2x128_si256(m[at], m[4 + at], 0x20);
    n[4 + at] = _mm256_permute2x128_si256(m[at], m[4 + at], 0x31);
  }
  for (int i = 0; i < LANES; ++i) m[i] = n[i];
}
#endif

// Locates the rows of K or V of one sequence and KV head.
template <typename T>
struct Place {
  const T* base;
  const int32_t* table;        // the sequence's blocks
  int64_t size, block, token;  // tokens per block; strides of blocks and tokens

  // rows[i] = the row of token start + i for i < count; null for tokens outside [from, to).
  void locate(int64_t start, int64_t count, int64_t from, int64_t to, const T** rows) const {
    std::fill(rows, rows + count, nullptr);
    const int64_t end = std::min(start + count, to);
    for (int64_t at = std::max(start, from), in = at / size; at < end; ++in) {
      const T* row = base + table[in] * block + (at - in * size) * token;
      for (const int64_t stop = std::min((in + 1) * size, end); at < stop; ++at, row += token) rows[at - start] = row;
    }
  }
};

// Widens the bfloat16 scales of tokens [first, last) to float. In `from`, a head's scales are contiguous in each block;
// `blocks` is the stride of blocks.
inline void scales_into(const uint16_t* from, int64_t blocks, const int32_t* table, int64_t size, int64_t first, int64_t last,
                 float* scales) {
  const int64_t end = (last + size - 1) / size;
  for (int64_t at = first, in = at / size; at < last; ++in) {
    if (in + BLOCKS_AHEAD < end) __builtin_prefetch(from + table[in + BLOCKS_AHEAD] * blocks, 0, 2);
    const uint16_t* here = from + table[in] * blocks + (at - in * size);
    for (const int64_t stop = std::min((in + 1) * size, last); at < stop; ++at, ++here, ++scales) {
      const uint32_t bits = static_cast<uint32_t>(*here) << 16;
      std::memcpy(scales, &bits, sizeof bits);
    }
  }
}

struct Task {  // consecutive queries of one sequence
  int64_t sequence, row, position, queries;
};

// Splits each sequence into tasks, taken alternately from its start and its end so that any run of tasks costs about
// the same. most(length) is the maximum number of queries per task.
template <typename F>
std::vector<Task> tasks_of(const at::Tensor& starts, const at::Tensor& lengths, const F& most) {
  const auto *start = starts.const_data_ptr<int32_t>(), *length = lengths.const_data_ptr<int32_t>();
  std::vector<Task> tasks;
  for (int64_t i = 0; i < lengths.size(0); ++i) {
    const int64_t queries = start[i + 1] - start[i], position = length[i] - queries;
    const int64_t height = most(length[i]), count = (queries + height - 1) / height;
    for (int64_t n = 0; n < count; ++n) {
      const int64_t at = (n % 2 == 0 ? n / 2 : count - 1 - n / 2) * height;
      tasks.push_back({i, start[i] + at, position + at, std::min(height, queries - at)});
    }
  }
  return tasks;
}

// The operator `attend` for bfloat16 queries by tiles (tile_attention.cpp), with sums in the order tile32.
void attend_by_tiles(at::Tensor& out, const at::Tensor& query, const at::Tensor& k_pages, const at::Tensor& v_pages,
                     const at::Tensor& starts, const at::Tensor& lengths, const at::Tensor& blocks, Reach reach,
                     double scaling, std::optional<double> softcap, const float* sinks,
                     const std::optional<at::Tensor>& k_scales, const std::optional<at::Tensor>& v_scales);

}  // namespace tandem
