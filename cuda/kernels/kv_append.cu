// kv_append: rotate one step's queries and keys by their positions, and write its keys and values into their frames.
//   qkv [T, H + 2 KH, D] E      the fused projection; token t starts at qkv + t * qkv_stride
//   q_out [T, H, D] E           the rotated queries, token t at q_out + t * q_stride; may be their place in qkv
//   q_weight, k_weight [D] E    weights of the queries' and keys' RMS norm before the rotation, or null: no norm
//   cosines, sines [P, D / 2]   float32, by position; dims d and d + D / 2 turn together (GPT-NeoX order)
//   rows, positions [T] int32   the token's row of the page tables (-1: padding, nothing is written) and its position
//   page_tables [R, max_pages]  int32 frames
//   layer_pool                  this layer's part of frame 0; frame f lies f * frame_stride bytes further
//   failed [R] int32            set to 1 if the row's q, k or v was not finite, or its page is not there
// Only finite keys and values are ever written (NaN becomes 0, the rest is clamped to E's range): attention multiplies
// what lies past a sequence's end by 0, and 0 * NaN is NaN.
// D / 4 lanes a head: lane l holds dims 2l, 2l + 1 and D / 2 + 2l, + 1, so a rotation stays in its lane. D = 64: two
// heads a warp.
#include "common.cuh"

struct Quad {  // four numbers of one lane: the pair (2l, 2l + 1) of the first half, and that of the second
  float first[2], second[2];
};

template <class E> __device__ __forceinline__ void load_pair(const E* p, float (&x)[2]) {
  if constexpr (sizeof(E) == 4) {
    x[0] = __uint_as_float(load_ordered((const u32*)p));
    x[1] = __uint_as_float(load_ordered((const u32*)p + 1));
  } else {
    const float2 pair = unpack2<E>(load_ordered((const u32*)p));
    x[0] = pair.x;
    x[1] = pair.y;
  }
}
template <class E> __device__ __forceinline__ void store_pair(void* p, const float (&x)[2]) {
  if constexpr (sizeof(E) == 4) *(float2*)p = make_float2(x[0], x[1]);
  else *(u32*)p = pack2<E>(x[0], x[1]);
}
template <class E, int D>
__global__ void __launch_bounds__(256) kv_append(
    const E* qkv, E* q_out, const E* q_weight, const E* k_weight, const float* __restrict__ cosines,
    const float* __restrict__ sines, const int* __restrict__ rows, const int* __restrict__ positions,
    const int* __restrict__ page_tables, char* layer_pool, int* failed, int T, int H, int KH, int max_pages,
    i64 qkv_stride, i64 q_stride, i64 frame_stride, float epsilon) {
  constexpr int LANES = D / 4;
  allow_next_kernel();
  const int heads = H + 2 * KH;
  const i64 unit = (i64)blockIdx.x * (256 / LANES) + threadIdx.x / LANES;
  const int l = threadIdx.x % LANES, t = (int)(unit / heads), head = (int)(unit - (i64)t * heads);
  const int row = t < T ? rows[t] : -1;
  const int position = row >= 0 ? positions[t] : 0;
  const bool is_query = head < H, is_value = head >= H + KH;
  int frame = 0;
  if (row >= 0 && !is_query) frame = page_tables[(i64)row * max_pages + position / PAGE_SIZE];
  Quad x = {{0.f, 0.f}, {0.f, 0.f}};
  wait_for_previous_kernel();
  if (row >= 0) {
    const E* source = qkv + t * qkv_stride + head * D;
    load_pair<E>(source + 2 * l, x.first);
    load_pair<E>(source + D / 2 + 2 * l, x.second);
  }
  bool good = is_finite(x.first[0]) && is_finite(x.first[1]) && is_finite(x.second[0]) && is_finite(x.second[1]);

  // every lane of the warp takes part in the sum, also those of padding
  const float squares = warp_sum<LANES>(x.first[0] * x.first[0] + x.first[1] * x.first[1] +
                                        x.second[0] * x.second[0] + x.second[1] * x.second[1]);
  if (row < 0) return;
  if (!is_value) {
    const E* weight = is_query ? q_weight : k_weight;
    if (weight) {
      const float factor = 1.f / sqrtf(squares / D + epsilon);
      float w[2], v[2];
      load_pair<E>(weight + 2 * l, w);
      load_pair<E>(weight + D / 2 + 2 * l, v);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x.first[i] *= factor * w[i];
        x.second[i] *= factor * v[i];
      }
    }
    const float2 c = *(const float2*)(cosines + (i64)position * (D / 2) + 2 * l);
    const float2 s = *(const float2*)(sines + (i64)position * (D / 2) + 2 * l);
    const Quad y = x;
    x.first[0] = y.first[0] * c.x - y.second[0] * s.x;
    x.first[1] = y.first[1] * c.y - y.second[1] * s.y;
    x.second[0] = y.second[0] * c.x + y.first[0] * s.x;
    x.second[1] = y.second[1] * c.y + y.first[1] * s.y;
  }
  if (is_query) {
    E* target = q_out + t * q_stride + head * D;
    store_pair<E>(target + 2 * l, x.first);
    store_pair<E>(target + D / 2 + 2 * l, x.second);
  } else if (frame >= 0) {
    const int slot = position % PAGE_SIZE, pair = head - H - (is_value ? KH : 0);
    char* page = layer_pool + frame * frame_stride + (i64)(2 * pair + (is_value ? 1 : 0)) * PAGE_BYTES<E, D>;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x.first[i] = clamp_finite<E>(x.first[i]);
      x.second[i] = clamp_finite<E>(x.second[i]);
    }
    store_pair<E>(page + page_offset<E, D>(slot, 2 * l), x.first);
    store_pair<E>(page + page_offset<E, D>(slot, D / 2 + 2 * l), x.second);
  } else {
    good = false;
  }
  if (!good) failed[row] = 1;
}
