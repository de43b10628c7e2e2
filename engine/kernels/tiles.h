// Sums of bfloat16 products in the order `tile32`, which is that of Intel's TDPBF16PS:
//
//     C [16][16] += A [16][32] times B [16 pairs][16][2]       C in float32, A and B in bfloat16
//     each element: one FMA chain from zero over the even k, one over the odd k, and C += even + odd
//     rounded to nearest even; denormals, read or made, are zero
//
// (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS.) The sum of a row does not depend
// on the other rows of A, so a token's bits do not depend on its batch. AMX computes a product of tiles by one
// instruction; processors with AVX512_BF16 compute the same bits by FMA. Kernels are written once, for either machine.
#pragma once

#include "dots.h"

#include <cstdint>
#include <cstring>

#ifdef TANDEM_BF16_DOT  // rounding to bfloat16 by VCVTNEPS2BF16 is part of the order's bits
#define TANDEM_TILES
#endif

namespace tandem {

constexpr int64_t TILE_ROWS = 16;                     // of A, and pairs along k of B
constexpr int64_t TILE_K = 32;                        // elements along k
constexpr int64_t TILE = TILE_ROWS * TILE_K;          // elements of A or B
constexpr int64_t SUMS = TILE_ROWS * LANES;           // elements of C
constexpr int64_t WIDTH_BYTES = 64;                   // of a row of any tile

// Whether bfloat16 sums go in the order tile32. Chosen before weights are packed, for the whole process (tiles.cpp).
bool by_tiles();

#ifdef TANDEM_TILES

// Whether AMX computes the tiles; else FMA does.
bool by_amx();

// Low registers have the number of rows that a machine is made with, which may be less than 16: for A and C.
constexpr bool is_low(int tile) { return tile != 7; }

// Eight registers of one tile each, which belong to the thread for the lifetime of the object and are undefined at
// first. Low registers have `rows` rows; the other rows of a tile in memory are neither read nor written.
class Amx {
 public:
  explicit Amx(int64_t rows = TILE_ROWS) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, unused[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; ++i) {
      shape.bytes[i] = WIDTH_BYTES;
      shape.rows[i] = static_cast<uint8_t>(is_low(i) ? rows : TILE_ROWS);
    }
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }
  ~Amx() { asm volatile("tilerelease"); }
  Amx(const Amx&) = delete;
  Amx& operator=(const Amx&) = delete;

  template <int TO>
  void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(TO));
  }
  // Loads rows of 64 bytes, `stride` bytes apart.
  template <int TO>
  void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TO) : "memory");
  }
  template <int FROM>
  void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(FROM) : "memory");
  }
  template <int C, int A, int B>
  void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};

// During its lifetime the thread rounds and treats denormals as tiles do. It covers only arithmetic on values that are
// loaded and stored in between, as its barriers order memory accesses alone.
class AsInTiles {
 public:
  AsInTiles() {
    constexpr uint32_t DENORMALS_ARE_ZERO = 0x8040, ROUNDING = 0x6000;
    _mm_setcsr((before_ & ~ROUNDING) | DENORMALS_ARE_ZERO);
    asm volatile("" ::: "memory");
  }
  ~AsInTiles() {
    asm volatile("" ::: "memory");
    _mm_setcsr(before_);
  }
  AsInTiles(const AsInTiles&) = delete;
  AsInTiles& operator=(const AsInTiles&) = delete;

 private:
  const uint32_t before_ = _mm_getcsr();
};

using Words = uint32_t[TILE_ROWS][LANES];  // a tile: pairs of bfloat16, or floats

// c += a times b by FMA, in the order tile32, for `rows` rows, rounded up to a multiple of four.
void dot_by_fma(Words& c, const Words& a, const Words& b, int64_t rows);

// The same interface as Amx, with its registers in memory.
class Fma {
 public:
  explicit Fma(int64_t rows = TILE_ROWS) : low_(rows) {}
  template <int TO>
  void zero() {
    std::memset(tiles_[TO], 0, sizeof(Words));
  }
  template <int TO>
  void load(const void* from, int64_t stride) {
    for (int64_t row = 0; row < rows(TO); ++row)
      std::memcpy(tiles_[TO][row], static_cast<const char*>(from) + row * stride, WIDTH_BYTES);
  }
  template <int FROM>
  void store(void* to, int64_t stride) {
    for (int64_t row = 0; row < rows(FROM); ++row)
      std::memcpy(static_cast<char*>(to) + row * stride, tiles_[FROM][row], WIDTH_BYTES);
  }
  template <int C, int A, int B>
  void dot() {
    dot_by_fma(tiles_[C], tiles_[A], tiles_[B], rows(C));
  }

 private:
  int64_t rows(int tile) const { return is_low(tile) ? low_ : TILE_ROWS; }

  alignas(64) Words tiles_[8] = {};
  int64_t low_;
};

// Calls f(machine) with Amx or Fma, whichever this process uses; its low registers have `rows` rows.
template <typename F>
void with_tiles(int64_t rows, const F& f) {
  if (by_amx()) {
    Amx amx(rows);
    f(amx);
  } else {
    Fma fma(rows);
    f(fma);
  }
}

template <typename F>
void with_tiles(const F& f) {
  with_tiles(TILE_ROWS, f);
}

#endif

}  // namespace tandem
