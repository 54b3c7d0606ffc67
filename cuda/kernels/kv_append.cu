// kv_append: rotate one step's queries and keys by their positions, and write its keys and values into their frames.
//   qkv [T, H + 2 KH, D] E      the fused projection; token t starts at qkv + t * qkv_stride. Or, with parts > 0, their
//                               sum is it: [parts, T, H + 2 KH, D] float32
//   q_out [T, H, D] E           the rotated queries, token t at q_out + t * q_stride; may be their place in qkv
//   q_weight, k_weight [D] E    weights of the queries' and keys' RMS norm before the rotation, or null: no norm
//   cosines, sines [P, D / 2]   float32, by position; dims d and d + D / 2 turn together (GPT-NeoX order)
//   rows, positions [T] int32   the token's row of the page tables (-1: padding, nothing is written) and its position
//   page_tables [R, max_pages]  int32 entries
//   layer_pool                  this layer's part of frame 0; frame f lies f * frame_stride bytes further
//   failed [R] int32            set to 1 if the row's q, k or v was not finite, or its page is not there
// Only finite keys and values are ever written (NaN becomes 0, the rest is clamped to E's range): attention multiplies
// what lies past a sequence's end by 0, and 0 * NaN is NaN.
// Lane l of a head holds chunk l of either half, 16 bytes each: dims W l ... and D / 2 + W l ..., so that a rotation stays
// in its lane. Heads of 64 dims in 16 bits: four lanes each, eight heads a warp.
#include "common.cuh"

#ifdef HOPPER  // with 56 registers two blocks fit beside one of batch_linear; what converts to fp16 takes more
template <class E> constexpr int REGISTERS = 64;
template <> constexpr int REGISTERS<bf16> = 56;
#define AT_MOST __maxnreg__(REGISTERS<E>)
#else
#define AT_MOST __launch_bounds__(256)
#endif

template <class E, int D> struct Lane {
  static constexpr int W = CHUNK<E>, COUNT = D / (2 * W);  // numbers in a half; lanes of a head
  float halves[2][W];
};

template <int W> __device__ __forceinline__ void load_floats(const float* p, float (&x)[W]) {
#pragma unroll
  for (int i = 0; i < W; i += 4) {
    const float4 four = *(const float4*)(p + i);
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
  }
}
template <class E, int D>
__global__ void AT_MOST kv_append(
    const void* qkv, E* q_out, const E* q_weight, const E* k_weight, const float* __restrict__ cosines,
    const float* __restrict__ sines, const int* __restrict__ rows, const int* __restrict__ positions,
    const int* __restrict__ page_tables, char* layer_pool, int* failed, int T, int H, int KH, int max_pages,
    int parts, i64 qkv_stride, i64 q_stride, i64 frame_stride, float epsilon) {
  constexpr int W = Lane<E, D>::W, LANES = Lane<E, D>::COUNT;
  allow_next_kernel();
  const u32 heads = H + 2 * KH, unit = blockIdx.x * (256 / LANES) + threadIdx.x / LANES;
  const int at = threadIdx.x % LANES * W, t = (int)(unit / heads), head = (int)(unit % heads);
  const int row = t < T ? rows[t] : -1;
  const int position = row >= 0 ? positions[t] : 0;
  const bool is_query = head < H, is_value = head >= H + KH;
  int frame = 0;
  if (row >= 0 && !is_query) frame = frame_of(page_tables[(i64)row * max_pages + position / PAGE_SIZE]);
  Lane<E, D> x = {};
  wait_for_previous_kernel();
  if (row >= 0) {
    const i64 place = t * qkv_stride + head * D + at;
    load_summed<E>(qkv, {place, place + D / 2}, parts, T * qkv_stride, x.halves);
  }
  bool good = true;
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < W; ++i) {
    good = good && is_finite(round_to<E>(x.halves[0][i])) && is_finite(round_to<E>(x.halves[1][i]));  // a sum may not fit E
    squares += x.halves[0][i] * x.halves[0][i] + x.halves[1][i] * x.halves[1][i];
  }
  squares = warp_sum<LANES>(squares);  // every lane of the warp takes part, also those of padding
  if (row < 0) return;
  if (!is_value) {
    const E* weight = is_query ? q_weight : k_weight;
    if (weight) {
      const float factor = 1.f / sqrtf(squares / D + epsilon);
      Lane<E, D> w;
      unpack_chunk<E>(load_ordered((const uint4*)(weight + at)), w.halves[0]);
      unpack_chunk<E>(load_ordered((const uint4*)(weight + D / 2 + at)), w.halves[1]);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        x.halves[0][i] *= factor * w.halves[0][i];
        x.halves[1][i] *= factor * w.halves[1][i];
      }
    }
    float c[W], s[W];
    load_floats<W>(cosines + (i64)position * (D / 2) + at, c);
    load_floats<W>(sines + (i64)position * (D / 2) + at, s);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const float first = x.halves[0][i], second = x.halves[1][i];
      x.halves[0][i] = first * c[i] - second * s[i];
      x.halves[1][i] = second * c[i] + first * s[i];
    }
  }
  if (is_query) {
    E* target = q_out + (i64)t * q_stride + head * D + at;
    *(uint4*)target = pack_chunk<E>(x.halves[0]);
    *(uint4*)(target + D / 2) = pack_chunk<E>(x.halves[1]);
  } else if (frame >= 0) {
    const int slot = position % PAGE_SIZE, pair = head - H - (is_value ? KH : 0);
    char* page = layer_pool + frame * frame_stride + (i64)(2 * pair + (is_value ? 1 : 0)) * PAGE_BYTES<E, D>;
#pragma unroll
    for (int i = 0; i < W; ++i) {
      x.halves[0][i] = clamp_finite<E>(x.halves[0][i]);
      x.halves[1][i] = clamp_finite<E>(x.halves[1][i]);
    }
    *(uint4*)(page + page_offset<E, D>(slot, at)) = pack_chunk<E>(x.halves[0]);
    *(uint4*)(page + page_offset<E, D>(slot, D / 2 + at)) = pack_chunk<E>(x.halves[1]);
  } else {
    good = false;
  }
  if (!good) failed[row] = 1;
}
