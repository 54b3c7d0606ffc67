// scan: the first look at rows, at the speed of memory, each logit read once. It keeps the largest logit of each segment,
// 64 logits of a strip; finish.cu finds in these where a row's largest are, and reads those segments again.
//
// grid (parts, S): a part of a row's strips by a block, one at a time by a warp. Rows that do not sample, or are
// left to a team, are not read, but for their first places.
//
//   logits [S, V] float32, V <= 2^19; rows, samples [S] and settings [R] as scatter.cu writes them
//   maxima [S, stride]: by segment
//   scans [S]: how many logits are not finite and, of rows that are greedy or weighed, the largest. Zero before, and after finish.cu
//   queue: the sequences that need a team of sample.cu, and whether weigh.cu is needed. Its counts are zero before, and
//     after finish.cu
#include "sampling.cuh"

struct Look {  // of a lane
  const bool wants_best;
  float best = NEGATIVE_INFINITY;
  int best_id = -1;
  u32 infinite = 0;

  __device__ __forceinline__ void at(const float4 (&x)[AT_ONCE], const Quads& row, int strip, float* maxima) {
    const int lane = threadIdx.x & 31, first = strip * STRIP + lane;
    float most = NEGATIVE_INFINITY, zero = 0.f;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      most = fmaxf(most, fmaxf(fmaxf(x[i].x, x[i].y), fmaxf(x[i].z, x[i].w)));
      zero = fmaf(x[i].x, 0.f, fmaf(x[i].y, 0.f, fmaf(x[i].z, 0.f, fmaf(x[i].w, 0.f, zero))));  // NaN if one is not finite
    }
    if (!(zero == 0.f)) {
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (first + i * 32 < row.count)
          infinite += !(fabsf(x[i].x) <= LARGEST_FLOAT) + !(fabsf(x[i].y) <= LARGEST_FLOAT) +
                      !(fabsf(x[i].z) <= LARGEST_FLOAT) + !(fabsf(x[i].w) <= LARGEST_FLOAT);
    }
    if (wants_best && most > best) {
      best = most;
#pragma unroll
      for (int i = AT_ONCE - 1; i >= 0; --i) {
        const int place = x[i].x == most ? 0 : x[i].y == most ? 1 : x[i].z == most ? 2 : x[i].w == most ? 3 : -1;
        if (place >= 0) best_id = row.id_at(first + i * 32) + place;
      }
    }
    most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
    most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
    if ((lane & 3) == 0) maxima[strip * SEGMENTS + (lane >> 2)] = most;
  }
};

__device__ __forceinline__ void load_strip(float4 (&x)[AT_ONCE], const Quads& row, int strip) {
  const int first = strip * STRIP + (threadIdx.x & 31);
  if (row.id_at(strip * STRIP) >= 0 && row.id_at(strip * STRIP + STRIP) <= row.V) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) x[i] = load_passing((const float4*)(row.row + row.id_at(first + i * 32)));
  } else {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) x[i] = row.fetch(first + i * 32);
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 6) scan(
    const float* logits, const int* rows, const int* samples, const Settings* settings, Scan* scans, float* maxima,
    Queue* queue, int V, int stride) {
  const int s = blockIdx.y;
  allow_next_kernel();
  wait_for_previous_kernel();
  const Quads quads(logits + (i64)s * V, V, 0, 1);
  const int strips = strips_of(quads), share = (strips + gridDim.x - 1) / gridDim.x;
  const int end = min((int)(blockIdx.x + 1) * share, strips);
  int strip = blockIdx.x * share + (threadIdx.x >> 5);
  float4 now[AT_ONCE];
  if (strip < end) load_strip(now, quads, strip);  // beside the settings
  const int row = rows[s];
  if (row < 0 || !samples[s]) return;
  const Settings& own = settings[row];
  const bool is_first = blockIdx.x == 0 && threadIdx.x == 0, weighs = is_weighed(own, V);
  if (needs_team(own, V)) {
    if (is_first) leave_to_team(queue, s);
    return;
  }
  if (is_first && weighs) atomicOr(&queue->weighed, own.top_p < 1. ? 3u : 1u);
  Look look = {weighs || own.temperature < GREEDY_BELOW};
#pragma unroll 1
  while (strip < end) {
    look.at(now, quads, strip, maxima + (i64)s * stride);
    strip += WARPS;
    if (strip < end) load_strip(now, quads, strip);
  }
  const bool is_lane_0 = (threadIdx.x & 31) == 0;
  if (__any_sync(ALL_LANES, look.infinite != 0)) {
    const u32 infinite = (u32)warp_sum_u64(look.infinite);
    if (is_lane_0) atomicAdd(&scans[s].infinite, infinite);
  }
  if (!look.wants_best) return;
  const u64 best = warp_max_u64(look.best_id < 0 ? 0 : logit_key(look.best, look.best_id));
  if (is_lane_0 && best) atomicMax(&scans[s].best, best);
}
