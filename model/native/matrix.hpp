// matrix: products with packed weights. One tile for everything: linears of any batch, and both products of attention.
//
//   packed [N / PANEL][K / 2][PANEL][2] bf16     the pair of inputs that one dot-product instruction takes lies together
//   packed [N / PANEL][K][PANEL]        float    N is filled up with zeros to whole panels, K (bf16) to an even number
//
// A tile is up to TILE_ROWS rows of x times one panel: accumulators stay in registers, each weight is read once for all
// rows, in one run of addresses. At one row that is bound by memory, at TILE_ROWS by the multipliers.
#pragma once
#include "numbers.hpp"

template <class Scalar>
constexpr int GROUP = 1;  // inputs that lie together
template <>
constexpr int GROUP<bf16> = 2;

template <class Scalar>
inline int64_t packed_size(int64_t outputs, int64_t inputs) {  // in Scalars
  return round_up(outputs, PANEL) * round_up(inputs, GROUP<Scalar>);
}

// --- packing

#if defined(__AVX512F__)
// 16 rows of 16 dwords, `from_bytes` apart -> 16 columns, `to_stride` dwords apart.
inline void transpose_16(const void* from, int64_t from_bytes, uint32_t* to, int64_t to_stride) {
  __m512i r[16], s[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(static_cast<const char*>(from) + i * from_bytes);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    s[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    s[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {  // r[4 i + j]: column j of each group of four, rows 4 i ... 4 i + 3
    r[4 * i] = _mm512_unpacklo_epi64(s[4 * i], s[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(s[4 * i], s[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(s[4 * i + 1], s[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(s[4 * i + 1], s[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    __m512i a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), b = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    __m512i c = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd), d = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    _mm512_storeu_si512(to + j * to_stride, _mm512_shuffle_i32x4(a, b, 0x88));
    _mm512_storeu_si512(to + (4 + j) * to_stride, _mm512_shuffle_i32x4(c, d, 0x88));
    _mm512_storeu_si512(to + (8 + j) * to_stride, _mm512_shuffle_i32x4(a, b, 0xdd));
    _mm512_storeu_si512(to + (12 + j) * to_stride, _mm512_shuffle_i32x4(c, d, 0xdd));
  }
}
#endif

// `rows` (at most PANEL) rows of `inputs` values, row after row -> columns [0, rows) of a panel. Others are not touched.
template <class Scalar>
inline void pack_rows(const Scalar* from, int64_t stride, int rows, int64_t inputs, Scalar* panel) {
  constexpr int G = GROUP<Scalar>;
  int row = 0;
#if defined(__AVX512F__)
  constexpr int WIDE = 64 / sizeof(Scalar);  // values in 16 dwords
  static_assert(G * sizeof(Scalar) == 4, "a group is a dword");
  int64_t whole = inputs / WIDE * WIDE;
  for (; row + 16 <= rows; row += 16) {
    for (int64_t k = 0; k < whole; k += WIDE)
      transpose_16(from + row * stride + k, stride * sizeof(Scalar),
                   reinterpret_cast<uint32_t*>(panel + k * PANEL) + row, PANEL);
    for (int r = row; r < row + 16; r++)
      for (int64_t k = whole; k < inputs; k++)
        panel[k / G * (G * PANEL) + r * G + k % G] = from[r * stride + k];
  }
#endif
  for (; row < rows; row++)
    for (int64_t k = 0; k < inputs; k++) panel[k / G * (G * PANEL) + row * G + k % G] = from[row * stride + k];
}

// A whole matrix (outputs, inputs), panels [first, last). The memory is zero before.
template <class Scalar>
inline void pack_matrix(const Scalar* weight, int64_t outputs, int64_t inputs, Scalar* packed, int64_t first,
                        int64_t last) {
  int64_t panel_size = PANEL * round_up(inputs, GROUP<Scalar>);
  for (int64_t panel = first; panel < last; panel++) {
    int64_t rows = outputs - panel * PANEL;
    pack_rows(weight + panel * PANEL * inputs, inputs, static_cast<int>(rows < PANEL ? rows : PANEL), inputs,
              packed + panel * panel_size);
  }
}

// One row of the matrix out of its packed form.
template <class Scalar>
inline void unpack_row(const Scalar* packed, int64_t row, int64_t inputs, Scalar* to) {
  constexpr int G = GROUP<Scalar>;
  const Scalar* panel = packed + row / PANEL * PANEL * round_up(inputs, G) + row % PANEL * G;
  for (int64_t k = 0; k < inputs; k++) to[k] = panel[k / G * (G * PANEL) + k % G];
}

// --- the tile

template <int ROWS>
using Accumulators = Vector[ROWS][TILE_VECTORS];

constexpr int64_t AHEAD_BYTES = 4096;  // how far ahead weights are asked for; measured at one row

template <int ROWS>
inline void add_products(const float* x, int64_t x_stride, const float* panel, int64_t inputs,
                         Accumulators<ROWS>& sums) {
  for (int64_t k = 0; k < inputs; k++, panel += PANEL) {
    Vector w[TILE_VECTORS];
    for (int v = 0; v < TILE_VECTORS; v++) {
      w[v] = load(panel + v * LANES);
      if (v * LANES % 16 == 0) __builtin_prefetch(reinterpret_cast<const char*>(panel + v * LANES) + AHEAD_BYTES);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] += w[v] * x[r * x_stride + k];
  }
}

// One pair of inputs of each row, `pair(r)`, times PANEL pairs of weights.
template <int ROWS, class Pair>
inline void add_pair(Pair pair, const bf16* panel, Accumulators<ROWS>& sums) {
#if defined(__AVX512BF16__)
  __m512i w[TILE_VECTORS];
#pragma GCC unroll 4
  for (int v = 0; v < TILE_VECTORS; v++) {
    w[v] = _mm512_loadu_si512(panel + v * 2 * LANES);
    __builtin_prefetch(reinterpret_cast<const char*>(panel + v * 2 * LANES) + AHEAD_BYTES);
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    __m512bh x = (__m512bh)_mm512_set1_epi32(pair(r));
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECTORS; v++)
      sums[r][v] = (Vector)_mm512_dpbf16_ps((__m512)sums[r][v], x, (__m512bh)w[v]);
  }
#else
  for (int v = 0; v < TILE_VECTORS; v++) {
    Integers w;
    memcpy(&w, panel + v * 2 * LANES, sizeof w);
    if (v * LANES % 16 == 0) __builtin_prefetch(reinterpret_cast<const char*>(panel + v * 2 * LANES) + AHEAD_BYTES);
    Vector low = (Vector)(w << 16), high = (Vector)(w & static_cast<int32_t>(0xffff0000));
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      uint32_t x = static_cast<uint32_t>(pair(r));
      sums[r][v] += low * as_float(x << 16);
      sums[r][v] += high * as_float(x & 0xffff0000);
    }
  }
#endif
}

template <int ROWS>
inline void add_products(const bf16* x, int64_t x_stride, const bf16* panel, int64_t inputs, Accumulators<ROWS>& sums) {
  for (int64_t k = 0; k + 1 < inputs; k += 2, panel += 2 * PANEL)
    add_pair<ROWS>(
        [&](int r) {
          int32_t pair;
          memcpy(&pair, x + r * x_stride + k, sizeof pair);
          return pair;
        },
        panel, sums);
  if (inputs % 2)
    add_pair<ROWS>([&](int r) { return static_cast<int32_t>(x[r * x_stride + inputs - 1].bits); }, panel, sums);
}

// Calls body<ROWS>(first row, further arguments) over [0, rows) in as few pieces of nearly equal size as can be.
template <template <int> class Body, int ROWS = TILE_ROWS, class... Arguments>
inline void with_rows(int64_t rows, const Arguments&... arguments) {
  if (rows == ROWS) return Body<ROWS>::run(arguments...);
  if constexpr (ROWS > 1) with_rows<Body, ROWS - 1>(rows, arguments...);
}
