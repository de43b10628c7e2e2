// Weight codes of 4, 8 or 16 bits: their values, their layout in a panel, and how a step of a panel is widened and
// multiplied.
#pragma once

#include "dots.h"

#include <bit>
#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VBMI__)
#define TANDEM_TABLES  // codes are widened by permuting a table of bytes
#endif
#define TANDEM_INLINE inline __attribute__((always_inline))  // the inner loop keeps its vectors in registers

namespace tandem {

constexpr int64_t PANEL = COLS * LANES;
constexpr int64_t AHEAD = 4096;  // prefetch distance in bytes

// ---- formats: the value of a code

inline float with_sign(float magnitude, uint32_t code) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | (code & 0x80u) << 24);
}

struct Int8 {  // two's complement
  static constexpr int BITS = 8;
  static float value(uint32_t code) { return static_cast<float>(static_cast<int8_t>(code)); }
};

struct Fp8 {  // e4m3fn, without its NaN
  static constexpr int BITS = 8;
  static float value(uint32_t code) { return with_sign(std::bit_cast<float>((code & 0x7fu) << 20) * 0x1p120f, code); }
};

struct Int4 {  // two's complement
  static constexpr int BITS = 4;
  static float value(uint32_t code) { return static_cast<float>(static_cast<int32_t>(code ^ 8u) - 8); }
};

struct Bf16Code {
  static constexpr int BITS = 16;
  static float value(uint32_t code) { return std::bit_cast<float>(code << 16); }
};

// Bytes of one step: the codes of two adjacent elements along k for every column of a panel.
template <typename F>
constexpr int64_t STEP_BYTES = 2 * PANEL * F::BITS / 8;

inline int64_t panels_of(int64_t n) { return (n + PANEL - 1) / PANEL; }
inline int64_t pairs_of(int64_t k) { return (k + 1) / 2; }

// ---- one step, widened

#ifdef TANDEM_TABLES

struct Wide {
  __m512i columns[COLS];  // per column, its two elements along k as bfloat16
};

inline Vec even(const Wide& w, int c) { return Vec(_mm512_castsi512_ps(_mm512_slli_epi32(w.columns[c], 16))); }
inline Vec odd(const Wide& w, int c) {
  return Vec(_mm512_castsi512_ps(_mm512_and_si512(w.columns[c], _mm512_set1_epi32(static_cast<int>(0xffff0000u)))));
}
#ifdef TANDEM_BF16_DOT
inline __m512bh both(const Wide& w, int c) { return (__m512bh)w.columns[c]; }
#endif

// The bytes of a code's value in bfloat16; for 8 bits, without the sign.
template <typename F>
struct Table {
  static constexpr int SIZE = F::BITS == 4 ? 16 : 128;
  alignas(64) uint8_t low[128], high[128];
  Table() {
    for (int i = 0; i < 128; ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(F::value(i % SIZE));
      low[i] = bits >> 16 & 0xff;
      high[i] = bits >> 24;
    }
  }
};

template <typename F>
inline const Table<F> table{};

// Index of a code among the 64 of two vectors: unpacking gives the low 8 bytes of each 16 to one vector, the high 8 to
// the other.
inline int64_t place_of_64(int64_t column, int64_t i) {
  const int64_t vector = column / LANES % 2, element = column % LANES * 2 + i;
  return element / 8 * 16 + vector * 8 + element % 8;
}

template <typename F>
struct Reader {
  __m512i low[2], high[2];

  Reader() {
    if constexpr (F::BITS == 8)
      for (int i = 0; i < 2; ++i) {
        low[i] = _mm512_load_si512(table<F>.low + 64 * i);
        high[i] = _mm512_load_si512(table<F>.high + 64 * i);
      }
    if constexpr (F::BITS == 4) {
      low[0] = _mm512_load_si512(table<F>.low);
      high[0] = _mm512_load_si512(table<F>.high);
    }
  }

  TANDEM_INLINE Wide operator()(const uint8_t* at) const {
    Wide w;
    if constexpr (F::BITS == 16) {
      for (int c = 0; c < COLS; ++c) w.columns[c] = _mm512_loadu_si512(at + 64 * c);
    } else {
      for (int half = 0; half < 2; ++half) {
        __m512i lows, highs;
        if constexpr (F::BITS == 8) {
          const __m512i codes = _mm512_loadu_si512(at + 64 * half);
          lows = _mm512_permutex2var_epi8(low[0], codes, low[1]);
          highs = _mm512_permutex2var_epi8(high[0], codes, high[1]);
          highs = _mm512_ternarylogic_epi32(highs, codes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);  // a | b & c
        } else {
          __m512i codes = _mm512_loadu_si512(at);
          if (half == 1) codes = _mm512_srli_epi16(codes, 4);
          codes = _mm512_and_si512(codes, _mm512_set1_epi8(0x0f));
          lows = _mm512_shuffle_epi8(low[0], codes);
          highs = _mm512_shuffle_epi8(high[0], codes);
        }
        w.columns[2 * half] = _mm512_unpacklo_epi8(lows, highs);
        w.columns[2 * half + 1] = _mm512_unpackhi_epi8(lows, highs);
      }
    }
    return w;
  }
};

// int8 has its own conversion instruction, to float32; the upper half of a float32 is the bfloat16.
struct Apart {
  Vec evens[COLS], odds[COLS];
};

inline Vec even(const Apart& w, int c) { return w.evens[c]; }
inline Vec odd(const Apart& w, int c) { return w.odds[c]; }
#ifdef TANDEM_BF16_DOT
inline __m512bh both(const Apart& w, int c) {
  return (__m512bh)_mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(w.evens[c]), 16), _mm512_castps_si512(w.odds[c]));
}
#endif

template <>
struct Reader<Int8> {
  TANDEM_INLINE Apart operator()(const uint8_t* at) const {
    const auto get = [](const uint8_t* from) {
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      return Vec(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)));
    };
    Apart w;
    for (int c = 0; c < COLS; ++c) {
      w.evens[c] = get(at + c * LANES);
      w.odds[c] = get(at + PANEL + c * LANES);
    }
    return w;
  }
};

// Position of the code of (column, i) in a step: its byte, and its shift within the byte.
template <typename F>
std::pair<int64_t, int> place(int64_t column, int64_t i) {
  if constexpr (F::BITS == 16) return {(2 * column + i) * 2, 0};
  if constexpr (std::is_same_v<F, Int8>) return {i * PANEL + column, 0};
  const int64_t at = place_of_64(column, i), half = column / LANES / 2;
  if constexpr (F::BITS == 4) return {at, static_cast<int>(4 * half)};
  return {64 * half + at, 0};
}

#else

struct Wide {
  float evens[PANEL], odds[PANEL];
};

inline Vec even(const Wide& w, int c) { return load(w.evens + c * LANES); }
inline Vec odd(const Wide& w, int c) { return load(w.odds + c * LANES); }
#ifdef TANDEM_BF16_DOT
inline __m512bh both(const Wide& w, int c) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even(w, c)), 16);
  return (__m512bh)_mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_castps_si512(odd(w, c)));
}
#endif

template <typename F>
struct Reader {
  TANDEM_INLINE Wide operator()(const uint8_t* at) const {
    Wide w;
    for (int64_t column = 0; column < PANEL; ++column) {
      if constexpr (F::BITS == 4) {
        w.evens[column] = F::value(at[column] & 0x0fu);
        w.odds[column] = F::value(at[column] >> 4);
      } else if constexpr (F::BITS == 8) {
        w.evens[column] = F::value(at[column]);
        w.odds[column] = F::value(at[PANEL + column]);
      } else {
        w.evens[column] = F::value(reinterpret_cast<const uint16_t*>(at)[column]);
        w.odds[column] = F::value(reinterpret_cast<const uint16_t*>(at)[PANEL + column]);
      }
    }
    return w;
  }
};

template <typename F>
std::pair<int64_t, int> place(int64_t column, int64_t i) {
  if constexpr (F::BITS == 4) return {column, static_cast<int>(4 * i)};
  return {(i * PANEL + column) * F::BITS / 8, 0};
}

#endif

// ---- a step of a tile

struct ByFloats {
  using X = float;
  static constexpr int64_t BYTES = 2 * PANEL * sizeof(float);  // of a widened step
  template <int COUNT, int R, typename W>
  TANDEM_INLINE static void step(const X* x, int64_t stride, const W& w, Vec (&sums)[R][COLS]) {
    for (int r = 0; r < R; ++r) {
      const Vec first(x[r * stride]), second(COUNT == 2 ? x[r * stride + 1] : 0.0f);
      for (int c = 0; c < COLS; ++c)
        sums[r][c] = at::vec::fmadd(second, odd(w, c), at::vec::fmadd(first, even(w, c), sums[r][c]));
    }
  }
  template <typename W>
  TANDEM_INLINE static void keep(const W& w, uint8_t* to) {
    float* at = reinterpret_cast<float*>(to);
    for (int c = 0; c < COLS; ++c) {
      even(w, c).store(at + c * LANES);
      odd(w, c).store(at + PANEL + c * LANES);
    }
  }
  template <int COUNT, int R>
  TANDEM_INLINE static void step(const X* x, int64_t stride, const uint8_t* kept, Vec (&sums)[R][COLS]) {
    const float* at = reinterpret_cast<const float*>(kept);
    for (int i = 0; i < COUNT; ++i) {
      Vec w[COLS];
      for (int c = 0; c < COLS; ++c) w[c] = load(at + i * PANEL + c * LANES);
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < COLS; ++c) sums[r][c] = at::vec::fmadd(Vec(x[r * stride + i]), w[c], sums[r][c]);
    }
  }
};

#ifdef TANDEM_BF16_DOT
struct ByPairs {
  using X = c10::BFloat16;
  static constexpr int64_t BYTES = 2 * PANEL * sizeof(c10::BFloat16);
  template <int COUNT, int R, typename W>
  TANDEM_INLINE static void step(const X* x, int64_t stride, const W& w, Vec (&sums)[R][COLS]) {
    for (int r = 0; r < R; ++r) {
      const auto pair = Pairs::spread(x + r * stride, COUNT);
      for (int c = 0; c < COLS; ++c) sums[r][c] = Pairs::dot(pair, both(w, c), sums[r][c]);
    }
  }
  template <typename W>
  TANDEM_INLINE static void keep(const W& w, uint8_t* to) {
    for (int c = 0; c < COLS; ++c) _mm512_storeu_si512(to + 64 * c, (__m512i)both(w, c));
  }
  template <int COUNT, int R>
  TANDEM_INLINE static void step(const X* x, int64_t stride, const uint8_t* kept, Vec (&sums)[R][COLS]) {
    __m512bh w[COLS];
    for (int c = 0; c < COLS; ++c) w[c] = Pairs::get(reinterpret_cast<const c10::BFloat16*>(kept + 64 * c));
    for (int r = 0; r < R; ++r) {
      const auto pair = Pairs::spread(x + r * stride, COUNT);
      for (int c = 0; c < COLS; ++c) sums[r][c] = Pairs::dot(pair, w[c], sums[r][c]);
    }
  }
};
using ForBf16 = ByPairs;
#else
using ForBf16 = ByFloats;
#endif

// Source of a tile's steps: codes, widened as they are read, or a panel widened before.
template <typename F>
struct AsCodes {
  explicit AsCodes(const uint8_t* panel) : panel(panel) {}
  const uint8_t* panel;
  const Reader<F> read{};
  TANDEM_INLINE auto operator()(int64_t pair) const {
    const uint8_t* at = panel + pair * STEP_BYTES<F>;
    for (int64_t line = 0; line < STEP_BYTES<F>; line += LINE)
      __builtin_prefetch(reinterpret_cast<const char*>(at) + AHEAD + line, 0, 2);
    return read(at);
  }
};

template <typename D>
struct AsKept {
  explicit AsKept(const uint8_t* panel) : panel(panel) {}
  const uint8_t* panel;
  TANDEM_INLINE const uint8_t* operator()(int64_t pair) const { return panel + pair * D::BYTES; }
};

template <typename F, typename D>
__attribute__((noinline)) void widen(const uint8_t* panel, int64_t pairs, uint8_t* to) {
  const AsCodes<F> source(panel);
  for (int64_t pair = 0; pair < pairs; ++pair) D::keep(source(pair), to + pair * D::BYTES);
}

}  // namespace tandem
