// weigh, gather: the masses of rows that draw among all their tokens, and the candidates of a top-p without top-k. Each
// reads such a row once, at the speed of memory; of other rows nothing. scan.cu has found the largest logit.
//
//   weigh[parts, S]    spans: the mass of each warp's span, and how much of the row is near the largest logit
//   gather[parts, S]   candidates: all tokens above a floor, under which there is less than 1 - p of the mass
//
// gather's floor is the highest it can be sure of. Tokens lighter than (1 - p) total / V are less than 1 - p of the mass
// together; but a network's row has thousands of heavier ones. So weigh adds up, in floats, the weights above some
// LEVELS. Each such sum is of at most 2^11 additions in a thread and eight more: it is right but for 2^-12 of it. If it
// has the mass that is wanted and 2^-9 more, the tokens above that level have it.
//
//   grid: of scan.cu. logits, rows, samples, settings, scans, candidates, queue: as there
//   spans [S, parts * WARPS]
#include "parts.cuh"

struct Levels {
  static __device__ __forceinline__ float distance(int i) { return i < 4 ? 1.5f + 1.5f * i : 2.f * i; }  // 1.5 ... 6, 8, 10
  static __device__ __forceinline__ float weight(int i) {  // exp(-distance), in full precision
    const float weights[LEVELS] = {0.22313016f, 0.049787068f, 0.011108997f, 0.0024787522f, 3.3546263e-4f, 4.5399930e-5f};
    return weights[i];
  }
};

extern "C" __global__ void __launch_bounds__(BLOCK, 4) weigh(
    const float* logits, const int* rows, const int* samples, const Settings* settings, const Scan* scans, Span* spans,
    const Queue* queue, int V) {
  const int s = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  allow_next_kernel();
  wait_for_previous_kernel();
  if (!queue->weighed) return;  // most steps: an idle kernel costs one look
  const int row = rows[s];
  if (row < 0 || !samples[s]) return;
  const Settings& own = settings[row];
  if (!is_weighed(own, V)) return;
  Edges none = {0, 0, 0, 0.f};
  const Rule rule(none, logit_of(scans[s].best), own.temperature);
  const bool has_p = own.top_p < 1.;
  const Quads quads(logits + (i64)s * V, V, blockIdx.x, gridDim.x);
  const int2 span = quads.span_of(warp);
  u32 high = 0, low = 0;
  float above[LEVELS] = {};
#pragma unroll 1
  for (int base = span.x + lane; base < span.y; base += AT_ONCE * 32) {
    float4 now[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      now[i] = make_float4(NEGATIVE_INFINITY, NEGATIVE_INFINITY, NEGATIVE_INFINITY, NEGATIVE_INFINITY);
      if (base + i * 32 < span.y) now[i] = quads.pass(base + i * 32);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const float x[4] = {now[i].x, now[i].y, now[i].z, now[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float weight = rule.weight(x[j]);
        add_mass(weight, high, low);
        if (!has_p) continue;
#pragma unroll
        for (int level = 0; level < LEVELS; ++level)
          if (weight >= Levels::weight(level)) above[level] += weight;
      }
    }
  }
  Span& target = spans[((i64)s * gridDim.x + blockIdx.x) * WARPS + warp];
  const u64 mass = warp_sum_u64(joined(high, low));
  if (lane == 0) target.mass = mass;
  if (!has_p) return;
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) {
    const float sum = warp_sum(above[level]);
    if (lane == 0) target.above[level] = sum;
  }
}

// A logit under which a row has less than the share of its mass that its top-p leaves. By one block.
__device__ __forceinline__ float floor_of_share(
    const Span* spans, int count, const Rule& rule, const Settings& own, int V) {
  __shared__ Span of_warps[WARPS];
  const int lane = threadIdx.x & 31;
  Span sum = {0, {}};
  if (threadIdx.x < count) sum = spans[threadIdx.x];
  sum.mass = warp_sum_u64(sum.mass);
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) sum.above[level] = warp_sum(sum.above[level]);
  if (lane == 0) of_warps[threadIdx.x >> 5] = sum;
  __syncthreads();
  sum = {0, {}};
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    sum.mass += of_warps[i].mass;
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) sum.above[level] += of_warps[i].above[level];
  }
  const u64 wanted = wanted_of(own.top_p, sum.mass), rest = sum.mass - min(sum.mass, wanted);
  const float enough = (float)wanted * (0x1p-40f * (1.f + 0x1p-9f));
  float floor = rule.floor_of(max(own.least_mass, rest / V + 1));
#pragma unroll
  for (int level = 0; level < LEVELS; ++level)
    if (sum.above[level] >= enough)
      floor = fmaxf(floor, Rule::floor_under(rule.largest, own.temperature * (Levels::distance(level) + 1e-3f)));
  return floor;
}

extern "C" __global__ void __launch_bounds__(BLOCK, 4) gather(
    const float* logits, const int* rows, const int* samples, const Settings* settings, Scan* scans, const Span* spans,
    u64* candidates, Queue* queue, int V) {
  __shared__ u64 list[CANDIDATES_OF_PART];
  __shared__ u32 listed, first;
  const int s = blockIdx.y;
  if (threadIdx.x == 0) listed = 0;
  allow_next_kernel();
  wait_for_previous_kernel();
  if (!(queue->weighed & 2)) return;
  const int row = rows[s];
  if (row < 0 || !samples[s]) return;
  const Settings& own = settings[row];
  if (!is_weighed(own, V) || own.top_p >= 1.) return;
  Edges none = {0, 0, 0, 0.f};
  const Rule rule(none, logit_of(scans[s].best), own.temperature);
  const int count = gridDim.x * WARPS;
  const float floor = floor_of_share(spans + (i64)s * count, count, rule, own, V);
  const Quads quads(logits + (i64)s * V, V, blockIdx.x, gridDim.x);
#pragma unroll 1
  for (int base = threadIdx.x; base < quads.count; base += AT_ONCE * BLOCK) {
    float4 now[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (base + i * BLOCK < quads.count) now[i] = quads.pass(base + i * BLOCK);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (base + i * BLOCK >= quads.count) continue;
      const float x[4] = {now[i].x, now[i].y, now[i].z, now[i].w};
      if (!(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])) >= floor)) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!(x[j] >= floor)) continue;
        const u32 place = atomicAdd(&listed, 1u);
        if (place < CANDIDATES_OF_PART) list[place] = logit_key(x[j], quads.id_at(base + i * BLOCK) + j);
      }
    }
  }
  __syncthreads();
  if (listed == 0) return;
  if (threadIdx.x == 0) first = reserve(scans[s], queue, s, listed > CANDIDATES_OF_PART ? CANDIDATES + 1 : listed);
  __syncthreads();
  if (first + listed > CANDIDATES || listed > CANDIDATES_OF_PART) return;  // a team does it
  for (int i = threadIdx.x; i < listed; i += BLOCK) candidates[(i64)s * CANDIDATES + first + i] = list[i];
}
