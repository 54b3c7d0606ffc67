// numbers: the two number formats, vectors of float32 lanes, and the functions that elementwise loops need.
//
// A value is stored as Scalar (float, or bf16: the upper half of a float) and computed as float32. Loops over plain
// arrays are left to the compiler, which vectorises them for the machine it runs on. NaN and infinity behave as IEEE
// says: no -ffast-math, because the failed flag of a row depends on them (model/kv_pool.py, NaN rule).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

struct bf16 {
  uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int TILE_ROWS = 14;  // 14 x 2 accumulators, 2 vectors of weights, 1 of inputs: of 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int TILE_ROWS = 6;  // 6 x 2, 2, 1: of 16 registers
#else
constexpr int LANES = 4;
constexpr int TILE_ROWS = 8;  // NEON: 8 x 4, of 32 registers, less the weights
#endif
// Outputs that one tile computes. Memory that is packed for the tile is in panels of this many columns.
constexpr int PANEL = LANES >= 8 ? 2 * LANES : 8;
constexpr int TILE_VECTORS = PANEL / LANES;

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));

inline Vector load(const float* from) {
  Vector v;
  memcpy(&v, from, sizeof v);
  return v;
}
inline void store(float* to, Vector v) { memcpy(to, &v, sizeof v); }

inline float sum_of(Vector v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float sum = 0;
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
#endif
}
inline float largest_of(Vector v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float largest = v[0];
  for (int i = 1; i < LANES; i++) largest = v[i] > largest ? v[i] : largest;
  return largest;
#endif
}

inline float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t as_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

inline float widen(float value) { return value; }
inline float widen(bf16 value) { return as_float(static_cast<uint32_t>(value.bits) << 16); }

// To the nearest, ties to even; a NaN stays one (rounding its bits could carry it to infinity or zero).
inline void narrow(float value, float& to) { to = value; }
inline void narrow(float value, bf16& to) {
  uint32_t bits = as_bits(value);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  uint32_t quiet = (bits >> 16) | 0x40;
  to.bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

template <class Scalar>
inline void widen_all(const Scalar* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = widen(from[i]);
}
template <class Scalar>
inline void narrow_all(const float* __restrict from, Scalar* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; i++) narrow(from[i], to[i]);
}

#if defined(__AVX512BF16__)
// The instruction does the same, but takes numbers under 2^-126 for zero.
inline void narrow_all(const float* __restrict from, bf16* __restrict to, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    __m256bh halves = _mm512_cvtneps_pbh(_mm512_loadu_ps(from + i));
    memcpy(to + i, &halves, sizeof halves);
  }
  for (; i < n; i++) narrow(from[i], to[i]);
}
#endif

template <class Scalar>
constexpr float LARGEST = 3.4028234663852886e38f;
template <>
constexpr float LARGEST<bf16> = 3.3895313892515355e38f;

inline bool is_finite(float value) { return (as_bits(value) & 0x7f800000) != 0x7f800000; }

// The NaN rule of the pool: NaN becomes 0, infinity the largest number.
template <class Scalar>
inline float made_finite(float value) {
  if (is_finite(value)) return value;
  if ((as_bits(value) & 0x7fffffff) > 0x7f800000) return 0.0f;
  return value > 0 ? LARGEST<Scalar> : -LARGEST<Scalar>;
}

// 2^x for x <= 127, to 2 units in the last place: x = n + r with |r| <= 1/2, a polynomial for 2^r, n into the exponent.
// Under -126 it is 2^-126, which is as good as 0 where it is used; NaN stays NaN. No branch, so loops vectorise.
inline float exp2_of(float x) {
  constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers, into the low bits
  x = x < -126.0f ? -126.0f : x;
  x = x > 127.0f ? 127.0f : x;
  float shifted = x + SHIFT;
  float r = x - (shifted - SHIFT);
  float p = 1.5353362e-4f;
  p = p * r + 1.3398874e-3f;
  p = p * r + 9.6184373e-3f;
  p = p * r + 5.5503324e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  return p * as_float((as_bits(shifted) + 127u) << 23);
}
inline Vector exp2_of(Vector x) {
  constexpr float SHIFT = 12582912.0f;
  x = x < -126.0f ? Vector{} - 126.0f : x;
  x = x > 127.0f ? Vector{} + 127.0f : x;
  Vector shifted = x + SHIFT;
  Vector r = x - (shifted - SHIFT);
  Vector p = Vector{} + 1.5353362e-4f;
  p = p * r + 1.3398874e-3f;
  p = p * r + 9.6184373e-3f;
  p = p * r + 5.5503324e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  return p * (Vector)(((Integers)shifted + 127) << 23);
}
constexpr float LOG2_E = 1.4426950408889634f;

// Memory of a thread, in whole cache lines: vectors that lie across two lines cost twice.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : lines_((count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line)) {}
  T* data() { return reinterpret_cast<T*>(lines_.data()); }
  T& operator[](int64_t i) { return data()[i]; }
  void clear() { memset(static_cast<void*>(lines_.data()), 0, lines_.size() * sizeof(Line)); }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> lines_;
};

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
