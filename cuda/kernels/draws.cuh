// draws.cuh: what sample.cu and finish.cu share: a row is filtered, and a token drawn, out of a slice or a list.
#include "sampling.cuh"

constexpr int MAX_LOG_PROBS = 32, RECORD = 2 + 2 * MAX_LOG_PROBS;  // words

// Whether a logit was not finite, or nothing is left
__device__ __forceinline__ bool is_bad_row(const Quads& quads, bool is_empty, u64 infinite, int masked) {
  return is_empty || masked < 0 || infinite != (u64)(4 * quads.all() - quads.V + masked);
}

__device__ __forceinline__ int id_of_best(u64 best, int V) {
  const int id = id_of(best);
  return id < 0 || id >= V ? 0 : id;  // nothing was finite
}

template <bool RESIDENT>
__device__ __forceinline__ u64 mass_of_span(const Slice<RESIDENT>& slice, const Rule& rule) {  // of this thread's quads
  u32 high = 0, low = 0;
#pragma unroll 2
  for (int q = slice.begin + slice.lane; q < slice.end; q += 32) {
    const float4 x = slice.quad(q);
    add_mass(rule.weight(x.x), high, low);
    add_mass(rule.weight(x.y), high, low);
    add_mass(rule.weight(x.z), high, low);
    add_mass(rule.weight(x.w), high, low);
  }
  return joined(high, low);
}

// The token in whose interval `threshold` lies, among the quads of a span that has that much kept mass. By one block.
template <class Places>
__device__ __forceinline__ int walk(Team& team, const Places& quads, int2 span, const Rule& rule, u64 threshold) {
#pragma unroll 1
  for (int begin = span.x;; begin += BLOCK) {  // a quad for each thread
    const int q = begin + threadIdx.x;
    u64 mass[4] = {0, 0, 0, 0};
    if (q < span.y) {
      const float4 four = quads.quad(q);
      const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) mass[i] = rule.kept_mass(x[i], quads.id_at(q) + i);
    }
    const u64 own = mass[0] + mass[1] + mass[2] + mass[3];
    u64 all;
    const u64 until = team.running_sum(own, all);
    if (threshold < all) {
      if (until > threshold && until - own <= threshold) {
        u64 left = threshold - (until - own);
        int place = 0;
        while (place < 3 && left >= mass[place]) left -= mass[place++];
        team.shared.list_count = quads.id_at(q) + place;
      }
      __syncthreads();
      return team.shared.list_count;
    }
    threshold -= all;
  }
}

// The token of the slice, of kept mass, in whose interval `threshold` lies; -1 in the blocks that do not have it
template <bool RESIDENT>
__device__ __forceinline__ int locate(
    Team& team, const Slice<RESIDENT>& slice, const Rule& rule, u64 mass_of_thread, u64 random) {
  Shared& shared = team.shared;
  const u64 span = warp_sum_u64(mass_of_thread);
  if (team.lane == 0) shared.spans[team.warp] = span;
  __syncthreads();
  const u64 running = warp_running_sum(team.lane < WARPS ? shared.spans[team.lane] : 0, team.lane);
  const u64 own = __shfl_sync(ALL_LANES, running, WARPS - 1);
  const u64 (*const blocks)[2] = team.exchange(own, 0);
  u64 total = 0, before = 0;
  for (int i = 0; i < team.size; ++i) {
    if (i < team.rank) before += blocks[i][0];
    total += blocks[i][0];
  }
  u64 threshold = __umul64hi(random, total);
  if (threshold < before || threshold - before >= own) return -1;
  threshold -= before;
  const int index = __ffs(__ballot_sync(ALL_LANES, running > threshold)) - 1;  // the warp whose span has it
  if (index) threshold -= __shfl_sync(ALL_LANES, running, index - 1);
  if (team.warp == index && team.lane == 0) {
    shared.few_count = slice.begin;
    shared.place = slice.end;
  }
  __syncthreads();
  return walk(team, slice, {shared.few_count, shared.place}, rule, threshold);
}

template <bool RESIDENT>
__device__ __forceinline__ int locate(Team& team, const Slice<RESIDENT>& slice, const Rule& rule, u64 random) {
  u64 mass = 0;
  slice.each([&](float x, int id) { mass += rule.kept_mass(x, id); });
  return locate(team, slice, rule, mass, random);
}
__device__ __forceinline__ int locate(Team& team, const List& list, const Rule& rule, u64 random) {
  u64 mass = 0;
  list.each([&](float x, int id) { mass += rule.kept_mass(x, id); });
  const u64 threshold = __umul64hi(random, team.block_sum(mass));
  const u64 key = select(team, list, {rule, BY_ID, false}, {0x80000000u, 0xffffffffu, threshold + 1});
  return id_of(key);
}

// Filter and draw among the items. has_k: top_k keeps fewer than all. total: mass of all tokens, of rows with top_p but
// no top_k; else unused. -1 in the blocks that do not know the token.
template <class Items>
__device__ __forceinline__ int draw(
    Team& team, const Items& items, const Rule& rule, const Settings& row, u64 best, bool has_k, u64 total,
    u64 random) {
  Edges& edges = team.shared.edges;
  const u64 lowest = items.lowest_key(team);
  const auto keep = [](u64& edge, u64 found) {
    if (threadIdx.x == 0) edge = found;
    __syncthreads();
  };
  if (has_k) keep(edges.logit, select(team, items, {rule, BY_LOGIT, true}, {lowest, best, (u64)row.top_k}));
  if (row.top_p < 1.) {
    if (has_k) {
      u64 mass = 0;
      items.each([&](float x, int id) { mass += rule.kept_mass(x, id); });
      total = team.sum<Items::ALONE>(mass);
    }
    const Window window = {max(lowest, edges.logit), best, wanted_of(row.top_p, total)};
    const u64 edge = max(edges.logit, select(team, items, {rule, BY_LOGIT, false}, window));
    __syncthreads();  // all have seen the one before
    keep(edges.logit, edge);
  }
  keep(edges.least, row.least_mass);
  if (row.typical_p < 1.) {
    u64 mass = 0, surprise = 0;
    items.each([&](float x, int id) {
      mass += rule.kept_mass(x, id);
      surprise += rule.surprise(x, id);
    });
    total = team.sum<Items::ALONE>(mass);
    surprise = team.sum<Items::ALONE>(surprise);
    if (threadIdx.x == 0) edges.mean = (float)((double)surprise / (double)total);
    __syncthreads();
    const Window window = {(u64)~0x7f800000u << 32, ~0ull, wanted_of(row.typical_p, total)};
    keep(edges.typical, select(team, items, {rule, BY_DISTANCE, false}, window));
  }
  return locate(team, items, rule, random);
}
