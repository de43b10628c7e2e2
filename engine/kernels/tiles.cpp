// Chooses the order of bfloat16 sums, and whether AMX or FMA computes tiles.
#include "tiles.h"

#include <c10/util/Exception.h>
#include <c10/util/string_view.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#ifdef TANDEM_TILES
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tandem {

#ifdef TANDEM_TILES

namespace {

constexpr int FOUR = 4;  // rows at a time, for which each row of b is widened once

[[gnu::noinline]] void add_products(Words& c, const Words& a, const Words& b, int64_t rows) {
  const auto even = [](__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); };
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const auto odd = [&](__m512i pairs) { return _mm512_castsi512_ps(_mm512_and_si512(pairs, upper)); };
  for (int64_t row = 0; row < rows; row += FOUR) {
    __m512 evens[FOUR], odds[FOUR];
    for (int r = 0; r < FOUR; ++r) evens[r] = odds[r] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < TILE_ROWS; ++pair) {
      const __m512i columns = _mm512_load_si512(b[pair]);
      for (int r = 0; r < FOUR; ++r) {
        const __m512i x = _mm512_set1_epi32(static_cast<int>(a[row + r][pair]));
        evens[r] = _mm512_fmadd_ps(even(x), even(columns), evens[r]);
        odds[r] = _mm512_fmadd_ps(odd(x), odd(columns), odds[r]);
      }
    }
    for (int r = 0; r < FOUR; ++r) {
      const __m512 before = _mm512_castsi512_ps(_mm512_load_si512(c[row + r]));
      _mm512_store_si512(c[row + r], _mm512_castps_si512(_mm512_add_ps(before, _mm512_add_ps(evens[r], odds[r]))));
    }
  }
}

// Whether the processor has the instructions (cpuid) and the system saves the tile registers (xgetbv).
bool has_amx() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr uint32_t KEPT = 3u << 17, BF16 = 1u << 22, TILES = 1u << 24;
  return (low & KEPT) == KEPT && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & BF16) && (d & TILES);
}

// Linux grants a process the tile registers on request (Documentation/arch/x86/xstate.rst). Without it, the first tile
// instruction raises SIGILL.
bool permitted() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// Whether both machines compute the same bits, also from denormals.
bool agree() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-140, 20);
  alignas(64) Words a, b, c, by_fma, by_registers;
  const auto narrow = [&](int scale) {
    const float value = std::ldexp(normal(random), scale);
    return c10::BFloat16(value).x;
  };
  for (int turn = 0; turn < 8; ++turn) {
    for (int64_t row = 0; row < TILE_ROWS; ++row)
      for (int64_t at = 0; at < LANES; ++at) {
        const int scale = turn % 2 == 0 ? 0 : exponent(random);
        a[row][at] = narrow(scale) | static_cast<uint32_t>(narrow(scale)) << 16;
        b[row][at] = narrow(0) | static_cast<uint32_t>(narrow(0)) << 16;
        const float before = turn < 2 ? 0.0f : std::ldexp(normal(random), scale);
        std::memcpy(&c[row][at], &before, sizeof before);
      }
    std::memcpy(by_fma, c, sizeof c);
    dot_by_fma(by_fma, a, b, TILE_ROWS);
    {
      Amx tiles;
      tiles.load<0>(c, WIDTH_BYTES);
      tiles.load<1>(a, WIDTH_BYTES);
      tiles.load<2>(b, WIDTH_BYTES);
      tiles.dot<0, 1, 2>();
      tiles.store<0>(by_registers, WIDTH_BYTES);
    }
    if (std::memcmp(by_fma, by_registers, sizeof c) != 0) return false;
  }
  return true;
}

bool amx_serves() {
  static const bool serves = has_amx() && permitted() && agree();
  return serves;
}

bool emulated = false;

}  // namespace

void dot_by_fma(Words& c, const Words& a, const Words& b, int64_t rows) {
  const AsInTiles as_in_tiles;
  add_products(c, a, b, rows);
}

bool by_amx() { return amx_serves() && !emulated; }

#endif

namespace {

std::vector<std::string> orders() {
#if defined(TANDEM_TILES)
  return amx_serves() ? std::vector<std::string>{"tile32", "pairs"} : std::vector<std::string>{"pairs", "tile32"};
#elif defined(CPU_CAPABILITY_AVX512)
  return {"chain16"};
#elif defined(CPU_CAPABILITY_AVX2)
  return {"chain8"};
#else
  return {"chain" + std::to_string(LANES)};
#endif
}

std::string chosen = orders().front();
bool in_tiles = chosen == "tile32";

std::string order() { return chosen; }

void use_order(c10::string_view wanted) {
  const std::vector<std::string> here = orders();
  const std::string name(wanted);
  TORCH_CHECK(std::find(here.begin(), here.end(), name) != here.end(), "tandem::use_order: no order ", name, " here");
  chosen = name;
  in_tiles = chosen == "tile32";
}

std::string tiles() {
#ifdef TANDEM_TILES
  return by_tiles() ? by_amx() ? "amx" : "fma" : "";
#else
  return "";
#endif
}

// Sets whether FMA replaces AMX, for tests; returns the previous setting.
bool emulate([[maybe_unused]] bool now) {
#ifdef TANDEM_TILES
  return std::exchange(emulated, now);
#else
  return false;
#endif
}

}  // namespace

bool by_tiles() { return in_tiles; }

}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("orders() -> str[]", &tandem::orders);
  m.def("order() -> str", &tandem::order);
  m.def("use_order(str order) -> ()", &tandem::use_order);
  m.def("tiles() -> str", &tandem::tiles);
  m.def("emulate(bool now) -> bool", &tandem::emulate);
}
