// paged_attention_f32: causal attention in float32, decode and prefill alike: one query token and head a warp. Made for
// token-for-token tests on the card, not for speed.
//   q, out [T, H, D] float32        token t at q + t * q_stride, out + t * out_stride
//   token_rows, positions [T]       row of the page tables (-1: padding, not touched); keys 0 ... position count
//   page_tables, layer_pool         as for paged_decode, but pages are plain: [kv head][K, V][16 tokens][D] float32
//   scale                           1 / sqrt(D)
#include "common.cuh"

template <int D>
__global__ void __launch_bounds__(128) paged_attention_f32(
    const float* q, float* out, const char* layer_pool, const int* page_tables, const int* token_rows,
    const int* positions, float scale, int T, int H, int group, int max_pages, i64 q_stride, i64 out_stride,
    i64 frame_stride) {
  constexpr int V = D / 32;
  __shared__ float queries[4][D];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int unit = blockIdx.x * 4 + warp, t = unit / H, head = unit - t * H;
  const int row = t < T ? token_rows[t] : -1;
  if (row < 0) return;  // the whole warp
  float* const query = queries[warp];
#pragma unroll
  for (int i = 0; i < V; ++i) query[lane + 32 * i] = q[t * q_stride + head * D + lane + 32 * i];
  __syncwarp();
  const int keys = positions[t] + 1;
  const int* const table = page_tables + (i64)row * max_pages;
  auto page_of = [&](int key, int kind) {  // where the key (kind 0) or value (1) of one token lies
    const char* frame = layer_pool + frame_of(table[key / PAGE_SIZE]) * frame_stride;
    return (const float*)(frame + (i64)(2 * (head / group) + kind) * PAGE_BYTES<float, D>) + key % PAGE_SIZE * D;
  };
  float top = NEGATIVE_INFINITY, sum = 0.f, o[V] = {};
  for (int first = 0; first < keys; first += 32) {
    float score = NEGATIVE_INFINITY;
    if (first + lane < keys) {
      const float4* key = (const float4*)page_of(first + lane, 0);
      float dot = 0.f;
      for (int d = 0; d < D / 4; ++d) {
        const float4 k = key[d], x = *(const float4*)(query + 4 * d);
        dot += k.x * x.x + k.y * x.y + k.z * x.z + k.w * x.w;
      }
      score = dot * scale;
    }
    const float new_top = fmaxf(top, warp_max(score));
    const float weight = expf(score - new_top), factor = expf(top - new_top);
    top = new_top;
    sum = sum * factor + warp_sum(weight);
#pragma unroll
    for (int i = 0; i < V; ++i) o[i] *= factor;
    const int count = min(keys - first, 32);
    for (int k = 0; k < count; ++k) {
      const float w = __shfl_sync(ALL_LANES, weight, k);
      const float* value = page_of(first + k, 1);
#pragma unroll
      for (int i = 0; i < V; ++i) o[i] += w * value[lane + 32 * i];
    }
  }
#pragma unroll
  for (int i = 0; i < V; ++i) out[t * out_stride + head * D + lane + 32 * i] = o[i] / sum;
}
