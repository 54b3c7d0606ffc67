// common.cuh: what several kernels share. Pages and blobs: docs/kv-layout.md.
#include "ptx.cuh"

#define NEGATIVE_INFINITY __int_as_float(0xff800000)  // NVRTC has no INFINITY
#define LARGEST_FLOAT 3.4028234663852886e38f
#define ALL_LANES 0xffffffffu

constexpr int PAGE_SIZE = 16;  // tokens in a page

// ---- pages ---------------------------------------------------------------------------------------------------------
// A layer's part of a frame is [kv head][K, V][page]. Pages of 16-bit numbers are blobs, stored as the tensor cores
// want them in shared memory: atoms of 8 tokens x 64 dims (1 KB), their 16-byte chunks permuted by the token. float32
// is plain.
template <class E, int D> constexpr int PAGE_BYTES = PAGE_SIZE * D * (int)sizeof(E);

// Byte offset in a blob of chunk `chunk` (8 dims, 16 bytes) of token `token` of the page
template <int D> __device__ __forceinline__ int blob_offset(int token, int chunk) {
  return (token >> 3) * (16 * D) + (chunk >> 3) * 1024 + (token & 7) * 128 + (((chunk & 7) ^ (token & 7)) << 4);
}
__device__ __forceinline__ int pages_of(int tokens) { return (tokens + PAGE_SIZE - 1) / PAGE_SIZE; }

// Byte offset in a page of dim d of token `token`; d + 1 lies beside an even d
template <class E, int D> __device__ __forceinline__ int page_offset(int token, int d) {
  if constexpr (sizeof(E) == 4) return (token * D + d) * 4;
  else return blob_offset<D>(token, d >> 3) + (d & 7) * 2;
}

// An entry of the page tables on the device is a frame, and SHARED beside it where the host knew of several sequences with
// that page when it sent the entry: a hint, for what stays in the L2 (paged_decode.cu). cuda/frames.py has the bit, too
constexpr int SHARED = 1 << 30;
__device__ __forceinline__ int frame_of(int entry) { return entry & ~SHARED; }

// ---- the NaN rule: only finite keys and values are ever written (docs/kv-layout.md) ---------------------------------
template <class E> constexpr float LARGEST = 0.f;
template <> constexpr float LARGEST<bf16> = 3.3895313892515355e38f;
template <> constexpr float LARGEST<fp16> = 65504.f;
template <> constexpr float LARGEST<float> = 3.4028234663852886e38f;

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= LARGEST<float>; }
template <class E> __device__ __forceinline__ float clamp_finite(float x) {
  return x != x ? 0.f : fminf(fmaxf(x, -LARGEST<E>), LARGEST<E>);
}

// ---- one number of 16 bits ------------------------------------------------------------------------------------------
template <class E> __device__ __forceinline__ float load_number(const E* p) {
  return unpack2<E>(load_ordered((const u16*)p)).x;
}
template <class E> __device__ __forceinline__ void store_number(E* p, float x) {
  *(u16*)p = (u16)pack2<E>(x, 0.f);
}

// ---- 16 bytes at a time: 8 numbers of 16 bits, or 4 of float32 -----------------------------------------------------
template <class E> constexpr int CHUNK = 16 / (int)sizeof(E);

template <class E> __device__ __forceinline__ void unpack_chunk(const uint4& raw, float (&x)[CHUNK<E>]) {
  const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(E) == 4) {
      x[i] = __uint_as_float(words[i]);
    } else {
      const float2 pair = unpack2<E>(words[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
}
template <class E> __device__ __forceinline__ uint4 pack_chunk(const float (&x)[CHUNK<E>]) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(E) == 4) words[i] = __float_as_uint(x[i]);
    else words[i] = pack2<E>(x[2 * i], x[2 * i + 1]);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
// The chunks from at[...] on of the sum of PARTS float32 arrays that lie `stride` numbers apart, added to x. All are asked
// for before the first is added
template <class E, int PARTS, int COUNT>
__device__ __forceinline__ void add_parts(
    const float* p, const i64 (&at)[COUNT], i64 stride, float (&x)[COUNT][CHUNK<E>]) {
  constexpr int WORDS = CHUNK<E> / 4;
  uint4 raw[PARTS][COUNT][WORDS];
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
#pragma unroll
    for (int i = 0; i < COUNT * WORDS; ++i) {
      raw[part][i / WORDS][i % WORDS] = load_ordered((const uint4*)(p + part * stride + at[i / WORDS] + i % WORDS * 4));
    }
  }
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
#pragma unroll
    for (int i = 0; i < COUNT * WORDS; ++i) {
      const uint4& v = raw[part][i / WORDS][i % WORDS];
      float* const sum = x[i / WORDS] + i % WORDS * 4;
      sum[0] += __uint_as_float(v.x), sum[1] += __uint_as_float(v.y);
      sum[2] += __uint_as_float(v.z), sum[3] += __uint_as_float(v.w);
    }
  }
}
// The chunks from at[...] on of numbers of E, or (parts > 0) of such a sum. Not hoisted above wait_for_previous_kernel()
template <class E, int COUNT>
__device__ __forceinline__ void load_summed(
    const void* p, const i64 (&at)[COUNT], int parts, i64 stride, float (&x)[COUNT][CHUNK<E>]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if (parts == 0) unpack_chunk<E>(load_ordered((const uint4*)((const E*)p + at[i])), x[i]);
    else for (int k = 0; k < CHUNK<E>; ++k) x[i][k] = 0.f;
  }
  const float* rest = (const float*)p;
  constexpr int AT_ONCE = COUNT >= 4 ? 1 : 4 / COUNT;
  for (; parts >= AT_ONCE; parts -= AT_ONCE, rest += AT_ONCE * stride) add_parts<E, AT_ONCE>(rest, at, stride, x);
  for (; parts > 0; --parts, rest += stride) add_parts<E, 1>(rest, at, stride, x);
}
template <class E> __device__ __forceinline__ float round_to(float x) {  // what storing x as E and loading it gives
  if constexpr (sizeof(E) == 4) return x;
  else return unpack2<E>(pack2<E>(x, 0.f)).x;
}

// ---- what blocks hand to each other in global memory ----------------------------------------------------------------
// Not there yet. A NaN that arithmetic does not give (all of its have the bits 0x7fffffff)
#define UNWRITTEN __uint_as_float(0xffffffffu)
__device__ __forceinline__ bool is_unwritten(float x) { return __float_as_uint(x) == 0xffffffffu; }

// ---- what the gate of a feed-forward network does to its number -----------------------------------------------------
__device__ __forceinline__ float silu(float x) { return x / (1.f + expf(-x)); }

// ---- sums over a warp ----------------------------------------------------------------------------------------------
template <int LANES = 32, class T> __device__ __forceinline__ T warp_sum(T x) {  // over groups of LANES neighbours
#pragma unroll
  for (int offset = LANES / 2; offset; offset >>= 1) x += __shfl_xor_sync(ALL_LANES, x, offset);
  return x;
}
template <int LANES = 32> __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = LANES / 2; offset; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, offset));
  return x;
}

// ---- fragments: how results lie in the lanes of a warp -------------------------------------------------------------
// Words 0 ... 3 of four neighbouring lanes become a 4 x 4 matrix transposed
__device__ __forceinline__ uint4 transpose_quad(u32 x0, u32 x1, u32 x2, u32 x3, int lane) {
  u32 t = lane & 1 ? x0 : x1, u = lane & 1 ? x2 : x3;
  t = __shfl_xor_sync(ALL_LANES, t, 1), u = __shfl_xor_sync(ALL_LANES, u, 1);
  if (lane & 1) x0 = t, x2 = u;
  else x1 = t, x3 = u;
  t = lane & 2 ? x0 : x2, u = lane & 2 ? x1 : x3;
  t = __shfl_xor_sync(ALL_LANES, t, 2), u = __shfl_xor_sync(ALL_LANES, u, 2);
  if (lane & 2) x0 = t, x1 = u;
  else x2 = t, x3 = u;
  return make_uint4(x0, x1, x2, x3);
}
// A row of a part (attention over some of a row's keys, not normalized) that another kernel goes on from: D dims,
// maximum, sum, and nothing up to 32 bytes. A dim's place is such that whoever has fragments of mma's c or of its
// transpose moves 4 numbers a lane, and neighbouring lanes whole sectors of 32 bytes. Place of dim 8 j + d; those of
// j + 1 to j | 3 are next to it
template <int D> constexpr int PREFIX_ROW = D + 8;
__device__ __forceinline__ int fragment_place(int d, int j) {
  return (j >> 2) * 32 + ((d & 1) * 4 + (d >> 1)) * 4 + (j & 3);
}
