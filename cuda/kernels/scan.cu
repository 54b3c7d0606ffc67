// scan: the first look at rows of which few tokens matter, at the speed of memory, each logit read once.
//
// grid (parts, S): a part of a row by a block, its next quads under way while it looks at some. A part keeps the logits
// above a floor that at least so many reach as are wanted; the floor rises whenever twice as much has been seen, so only
// some hundred are kept, and at the end those above the last floor go to the row's candidates. Rows that do not sample
// are not read, but for their first places.
//
//   logits [S, V] float32, V <= 2^19; rows, samples [S] and settings [R] as scatter.cu writes them
//   scans [S]: zero before, and after finish.cu
//   candidates [S, CANDIDATES]: keys by logit, in any order, of all tokens that may be kept, if they are not too many
//   queue: the sequences that need a team of sample.cu, and whether weigh.cu is needed. Its counts are zero before, and
//     after finish.cu
#include "parts.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK, 4) scan(
    const float* logits, const int* rows, const int* samples, const Settings* settings, Scan* scans, u64* candidates,
    Queue* queue, int V) {
  __shared__ u64 list[CANDIDATES_OF_PART], maxima[WARPS];
  __shared__ float2 extremes[WARPS];
  __shared__ u32 listed, infinite;
  const int s = blockIdx.y, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) listed = infinite = 0;
  allow_next_kernel();
  wait_for_previous_kernel();
  const Quads quads(logits + (i64)s * V, V, blockIdx.x, gridDim.x);
  float4 next[AT_ONCE];
  const auto load = [&](int base) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (base + i * BLOCK < quads.count) next[i] = quads.fetch(base + i * BLOCK);
  };
  load(threadIdx.x);                 // beside the settings
  const int row = rows[s];
  if (row < 0 || !samples[s]) return;
  const Settings& own = settings[row];
  const int wanted = wanted_of_scan(own, V);
  if (wanted < 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0) leave_to_team(queue, s);
    return;
  }
  if (wanted == 0 && blockIdx.x == 0 && threadIdx.x == 0 && is_weighed(own, V))
    atomicOr(&queue->weighed, own.top_p < 1. ? 3u : 1u);
  const float reach = wanted == 0 || has_top_k(own, V) ? 0.f : Rule::reach_of(own.least_mass, own.temperature);
  float best = NEGATIVE_INFINITY, floor = 0.f;
  int best_id = -1;
  u32 own_infinite = 0;
  const auto raise_floor = [&] {
    floor = floor_of_largest(best, wanted, extremes);
    if (reach > 0.f) floor = Rule::floor_under(floor, reach);
  };
  __syncthreads();                   // the counts are zero
#pragma unroll 1
  for (int base = threadIdx.x, turn = 1; base - (int)threadIdx.x < quads.count; base += AT_ONCE * BLOCK, ++turn) {
    float4 now[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) now[i] = next[i];
    load(base + AT_ONCE * BLOCK);
    float most[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const float4 x = now[i];
      most[i] = NEGATIVE_INFINITY;
      if (base + i * BLOCK >= quads.count) continue;
      most[i] = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
      if (!(fmaf(x.x, 0.f, fmaf(x.y, 0.f, fmaf(x.z, 0.f, x.w * 0.f))) == 0.f))
        own_infinite += !(fabsf(x.x) <= LARGEST_FLOAT) + !(fabsf(x.y) <= LARGEST_FLOAT) +
                        !(fabsf(x.z) <= LARGEST_FLOAT) + !(fabsf(x.w) <= LARGEST_FLOAT);
      if (most[i] > best) {
        best = most[i];
        best_id = quads.id_at(base + i * BLOCK) + (x.x == best ? 0 : x.y == best ? 1 : x.z == best ? 2 : 3);
      }
    }
    if (wanted == 0) continue;
    if ((turn & (turn - 1)) == 0) raise_floor();
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (!(most[i] >= floor)) continue;
      const float x[4] = {now[i].x, now[i].y, now[i].z, now[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!(x[j] >= floor)) continue;
        const u32 place = atomicAdd(&listed, 1u);
        if (place < CANDIDATES_OF_PART) list[place] = logit_key(x[j], quads.id_at(base + i * BLOCK) + j);
      }
    }
  }
  Scan& scan = scans[s];
  const u64 key = warp_max_u64(best_id < 0 ? 0 : logit_key(best, best_id));
  if (lane == 0) maxima[threadIdx.x >> 5] = key;
  if (own_infinite) atomicAdd(&infinite, own_infinite);
  __syncthreads();
  if (threadIdx.x == 0) {
    u64 most = 0;
    for (int i = 0; i < WARPS; ++i) most = max(most, maxima[i]);
    atomicMax(&scan.best, most);
    if (infinite) atomicAdd(&scan.infinite, infinite);
  }
  if (wanted == 0) return;
  if (threadIdx.x == 0 && listed > CANDIDATES_OF_PART) reserve(scan, queue, s, CANDIDATES + 1);
  raise_floor();
  const int count = min(listed, (u32)CANDIDATES_OF_PART);
  for (int base = 0; base < count; base += BLOCK) {
    const u64 candidate = base + threadIdx.x < count ? list[base + threadIdx.x] : 0;
    const bool stays = candidate && logit_of(candidate) >= floor;
    const u32 lanes = __ballot_sync(ALL_LANES, stays);
    u32 place = 0;
    if (lane == 0 && lanes) place = reserve(scan, queue, s, __popc(lanes));
    place = __shfl_sync(ALL_LANES, place, 0) + __popc(lanes & ((1u << lane) - 1));
    if (stays && place < CANDIDATES) candidates[(i64)s * CANDIDATES + place] = candidate;
  }
}
