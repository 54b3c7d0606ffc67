// sampling.cuh: how scan.cu, weigh.cu, sample.cu and finish.cu look at a row of logits, by the definition of
// model/sampler.py.
//
// A row is worked on by a TEAM: the blocks of a cluster, each with a slice of the row that it brings into its shared
// memory once (Hopper), or one block that reads global memory. A block's warps own contiguous spans of its slice.
//
// Everything is chosen by `select`: order the tokens by a 64-bit key (no two are equal, so there are no ties left), give
// each an integer weight, and find the key at which the weights, largest key first, reach what is wanted:
//     top-k     key (logit, lowest id first)        weight 1
//     top-p     the same                            mass
//     typical   (distance from the mean, lowest id)  mass
//     the draw  lowest id first                     mass
// It looks at BINS ranges of keys at a time, by histogram, until the range that holds the edge has FEW tokens; a list
// that is short begins there. So nothing is sorted and nothing depends on an order of additions.
//
// A pass over all logits costs what reading them costs, and exp five times that. So a block first collects CANDIDATES,
// the tokens above a floor under which nothing can be kept, and if they fit into its list, it does the rest alone. The
// floor of a top-k: what k of the threads reach with the largest logit of each. That of a top-p: tokens lighter than
// (1 - p) total / V are less than 1 - p of it together. min-p is a floor by itself.
#include "settings.cuh"

constexpr int BLOCK = 256, WARPS = BLOCK / 32, MAX_TEAM = 8;
constexpr int BINS = 1024;
constexpr int LIST = 384;            // candidates of one block
constexpr int MANY = 128;            // a top-k beyond could overflow the list: it looks at the slices
constexpr int FEW = 32;              // a team's edge is among so many; a block's alone among BLOCK
constexpr float GREEDY_BELOW = 1e-5f;

// ---- keys, masses --------------------------------------------------------------------------------------------------
__device__ __forceinline__ u32 key_of(float x) {  // larger floats have larger keys; -0 and 0 have one
  const u32 bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float logit_of(u64 key) {
  const u32 bits = (u32)(key >> 32);
  return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}
__device__ __forceinline__ u64 logit_key(float x, int id) { return (u64)key_of(x) << 32 | (u32)~id; }
__device__ __forceinline__ int id_of(u64 key) { return (int)~(u32)key; }

// floor(weight * 2^40) in halves of 20 bits, each added to its sum: adding a power of two cuts off what lies under its
// last bit, so no conversion is needed. weight <= 1; the sums hold 4,095 of them.
__device__ __forceinline__ void add_mass(float weight, u32& high, u32& low) {
  const float upper = __fadd_rz(weight, 8.f);                           // last bit 2^-20
  const float rest = __fadd_rz(weight - (upper - 8.f), 0x1p-17f);       // last bit 2^-40
  high += __float_as_uint(upper) - __float_as_uint(8.f);
  low += __float_as_uint(rest) - __float_as_uint(0x1p-17f);
}
__device__ __forceinline__ u64 joined(u32 high, u32 low) { return ((u64)high << 20) + low; }

enum Order { BY_LOGIT, BY_DISTANCE, BY_ID };

// ---- what the kernels leave to each other --------------------------------------------------------------------------
constexpr int CANDIDATES = MAX_TEAM * LIST;
constexpr int LEVELS = 6;            // of Span

struct alignas(16) Scan {            // of a row
  u64 best;                          // key of the largest logit, if it is greedy or weighed
  u32 infinite, found;               // logits that are not finite; candidates of gather, also if they are too many
};
struct alignas(16) Span {            // what a warp of weigh.cu has seen
  u64 mass;
  float above[LEVELS];               // weights of the tokens no further from the largest logit than each level
};
struct Queue {
  u32 count, weighed;                // sequences for teams; 1: weigh.cu has something to do, 2: its gather too
  int sequences[1];
};
__device__ __forceinline__ void leave_to_team(Queue* queue, int s) { queue->sequences[atomicAdd(&queue->count, 1u)] = s; }

// Room for so many more candidates of a row: the place of the first. Who finds that they are too many tells a team.
__device__ __forceinline__ u32 reserve(Scan& scan, Queue* queue, int s, u32 more) {
  const u32 place = atomicAdd(&scan.found, more);
  if (place <= CANDIDATES && place + more > CANDIDATES) leave_to_team(queue, s);
  return place;
}

__device__ __forceinline__ bool has_top_k(const Settings& own, int V) { return own.top_k > 0 && own.top_k < V; }

// Whether a row draws among all its tokens, or among those that a share of their mass leaves: weigh.cu adds it up
__device__ __forceinline__ bool is_weighed(const Settings& own, int V) {
  if (own.log_probs >= 0 || own.temperature < GREEDY_BELOW || has_top_k(own, V)) return false;
  return own.top_p < 1. || (own.least_mass == 0 && own.typical_p >= 1.);
}

// Whether a row is left to a team of sample.cu from the start
__device__ __forceinline__ bool needs_team(const Settings& own, int V) {
  if (own.log_probs >= 0) return true;
  if (own.temperature < GREEDY_BELOW || is_weighed(own, V)) return false;
  return has_top_k(own, V) ? own.top_k > MANY : own.least_mass == 0;
}
__device__ __forceinline__ u64 wanted_of(double share, u64 total) {
  return max((u64)ceil(share * (double)total), (u64)1);
}

// ---- a draw --------------------------------------------------------------------------------------------------------
// What has been decided of a row so far, in shared memory: registers are few. All threads write the same.
struct Edges {
  u64 logit, typical, least;  // keys by logit and by distance from the mean, and masses, that are kept at least
  float mean;
};

// What a row draws by
struct Rule {
  Edges& edges;
  float largest, inverse, inverse_rest, last;  // last: logits further from the largest have no mass

  __device__ __forceinline__ Rule(Edges& edges, float largest, float temperature) : edges(edges), largest(largest) {
    inverse = 1.f / temperature;
    inverse_rest = fmaf(-inverse, temperature, 1.f) / temperature;
    last = 32.f * temperature;  // exp(-32) * 2^40 < 1
  }
  __device__ __forceinline__ float distance(float x) const {  // (largest - x) / temperature
    const float y = largest - x;
    return fmaf(y, inverse, y * inverse_rest);
  }
  __device__ __forceinline__ float weight(float x) const {
    return largest - x < last ? expf(-distance(x)) : 0.f;
  }
  __device__ __forceinline__ u64 mass(float x) const {
    u32 high = 0, low = 0;
    add_mass(weight(x), high, low);
    return joined(high, low);
  }
  __device__ __forceinline__ u64 key(Order order, float x, int id) const {
    if (order == BY_LOGIT) return logit_key(x, id);
    if (order == BY_ID) return (u32)~id;
    return (u64)~__float_as_uint(fabsf(distance(x) - edges.mean)) << 32 | (u32)~id;
  }
  __device__ __forceinline__ u64 kept_mass(float x, int id) const {
    if (logit_key(x, id) < edges.logit) return 0;
    const u64 own = mass(x);
    if (own < edges.least || (edges.typical && key(BY_DISTANCE, x, id) < edges.typical)) return 0;
    return own;
  }
  __device__ __forceinline__ u64 surprise(float x, int id) const {  // what a token adds to the entropy
    const u64 own = kept_mass(x, id);
    return own ? (u64)__fmul_rn((float)own, distance(x)) : 0;
  }
  // A logit that every token of `mass` or more reaches; with room for all rounding
  __device__ __forceinline__ float floor_of(u64 mass) const { return floor_under(largest, reach_of(mass, last / 32.f)); }
  static __device__ __forceinline__ float reach_of(u64 mass, float temperature) {
    return temperature * (27.7259f - logf((float)mass) + 1e-3f);
  }
  static __device__ __forceinline__ float floor_under(float largest, float reach) {
    return fmaxf(largest - reach - 1e-6f * (fabsf(largest) + reach), -LARGEST_FLOAT);
  }
};

// The first 64 bits of Philox4x32-10 (Salmon 2011) with counter (position, 0, 0, 0)
__device__ inline u64 random_word(u64 seed, u32 position) {
  u32 x0 = position, x1 = 0, x2 = 0, x3 = 0, k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll 1
  for (int round = 0; round < 10; ++round) {
    const u64 a = (u64)x0 * 0xD2511F53u, b = (u64)x2 * 0xCD9E8D57u;
    x0 = (u32)(b >> 32) ^ x1 ^ k0;
    x1 = (u32)b;
    x2 = (u32)(a >> 32) ^ x3 ^ k1;
    x3 = (u32)a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return (u64)x1 << 32 | x0;
}

// ---- teams ---------------------------------------------------------------------------------------------------------
struct Item { u64 key, weight; };

struct alignas(16) Shared {  // of each block; no __shared__ variable beside it: blocks of a team reach into it
  u64 list[MAX_TEAM * LIST];         // candidates as logit_key; those of the whole team, in its first block
  union {
    struct { u32 low[BINS], high[BINS]; };  // 64-bit sums in two words
    Item items[BLOCK];
  };
  Item few[FEW];
  u64 inbox[2][MAX_TEAM][2];
  u64 partial[2][WARPS];
  float2 extremes[WARPS];
  u64 spans[WARPS];                  // a sum of each warp's span
  u64 loaded[WARPS];                 // mbarriers
  Edges edges;
  u64 found_above, found_edge;
  double norm;
  int found_bin, few_count, list_count, place, is_last;
};
static_assert(sizeof(Shared) == 33936);

__device__ __forceinline__ u64 warp_max_u64(u64 x) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x = max(x, __shfl_xor_sync(ALL_LANES, x, offset));
  return x;
}
__device__ __forceinline__ u64 warp_sum_u64(u64 x) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x += __shfl_xor_sync(ALL_LANES, x, offset);
  return x;
}
__device__ __forceinline__ u64 warp_running_sum(u64 x, int lane) {  // inclusive
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const u64 other = __shfl_up_sync(ALL_LANES, x, offset);
    if (lane >= offset) x += other;
  }
  return x;
}

// The least and the largest of a block's x. scratch: one a warp
__device__ __forceinline__ float2 extremes_of_block(float x, float2* scratch) {
  const float2 own = {-warp_max(-x), warp_max(x)};
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = own;
  __syncthreads();
  float low_of_block = scratch[0].x, high_of_block = scratch[0].y;
#pragma unroll
  for (int i = 1; i < WARPS; ++i) {
    low_of_block = fminf(low_of_block, scratch[i].x);
    high_of_block = fmaxf(high_of_block, scratch[i].y);
  }
  return {low_of_block, high_of_block};
}

// A floor that k threads of a block, and hardly more, reach with the logit each has; or all do
__device__ __forceinline__ float floor_of_largest(float x, int k, float2 extremes) {
  const u32 key = key_of(x);
  u32 low = key_of(extremes.x), high = key_of(extremes.y);  // k reach low; fewer reach high + 1
#pragma unroll 1
  for (int step = 0; step < 20 && (step == 0 || low < high); ++step) {
    const u32 middle = high - (high - low) / 2;
    const int reach = __syncthreads_count(key >= middle);
    if (reach < k) high = middle - 1;
    else low = middle;
    if (reach >= k && reach <= k + k / 8) break;
  }
  return fmaxf(logit_of((u64)low << 32), -LARGEST_FLOAT);
}

// All functions are called by all threads of the blocks that they are about.
struct Team {
  Shared& shared;
  const int rank, size, lane, warp;
  int flip = 0, turn = 0;  // buffers alternate: who writes one has passed the barrier after which all had read it

  __device__ __forceinline__ explicit Team(Shared& shared)
      : shared(shared), rank(cluster_rank()), size(cluster_size()), lane(threadIdx.x & 31), warp(threadIdx.x >> 5) {}

  template <bool ALONE = false> __device__ __forceinline__ void sync() const {
    if constexpr (ALONE) {
      __syncthreads();
    } else {
      cluster_arrive();
      cluster_wait();
    }
  }
  __device__ __forceinline__ u64 block_max(u64 x) {
    x = warp_max_u64(x);
    flip ^= 1;
    if (lane == 0) shared.partial[flip][warp] = x;
    __syncthreads();
    return warp_max_u64(shared.partial[flip][lane & (WARPS - 1)]);
  }
  __device__ __forceinline__ u64 block_sum(u64 x) {
    x = warp_sum_u64(x);
    flip ^= 1;
    if (lane == 0) shared.partial[flip][warp] = x;
    __syncthreads();
    return warp_sum_u64(lane < WARPS ? shared.partial[flip][lane] : 0);
  }
  // Of x over the threads of the block, this one included; all: over all of them
  __device__ __forceinline__ u64 running_sum(u64 x, u64& all) {
    x = warp_running_sum(x, lane);
    flip ^= 1;
    if (lane == 31) shared.partial[flip][warp] = x;
    __syncthreads();
    const u64 warps = warp_running_sum(lane < WARPS ? shared.partial[flip][lane] : 0, lane);
    const u64 before = __shfl_sync(ALL_LANES, warps, max(warp - 1, 0));
    all = __shfl_sync(ALL_LANES, warps, WARPS - 1);
    return warp ? x + before : x;
  }
  // Each block gives two words, the same in all its threads, and sees those of all: valid until the exchange after next
  __device__ __forceinline__ const u64 (*exchange(u64 a, u64 b))[2] {
    turn ^= 1;
    if (threadIdx.x < size) {
      u64* const target = of_block(&shared.inbox[turn][rank][0], threadIdx.x);
      target[0] = a;
      target[1] = b;
    }
    sync();
    return shared.inbox[turn];
  }
  template <bool ALONE> __device__ __forceinline__ u64 sum(u64 x) {
    x = block_sum(x);
    if constexpr (ALONE) return x;
    const u64 (*const all)[2] = exchange(x, 0);
    x = 0;
    for (int i = 0; i < size; ++i) x += all[i][0];
    return x;
  }
};

// ---- what select looks at ------------------------------------------------------------------------------------------
// A part of a row in quads (4 logits, aligned in memory). Places of the first and last quad that are not the row's hold
// minus infinity, which nobody keeps.
struct Quads {
  const float* row;
  int V, lead, first, count;         // lead: places of the row's quad 0 before it begins. first: quad of the row

  __device__ __forceinline__ Quads(const float* row, int V, int part, int parts) : row(row), V(V) {
    lead = (int)((u64)row >> 2 & 3);
    const int share = (all() + parts - 1) / parts;
    first = part * share;
    count = max(0, min(share, all() - first));
  }
  __device__ __forceinline__ int all() const { return (V + lead + 3) >> 2; }
  __device__ __forceinline__ int id_at(int quad) const { return 4 * (first + quad) - lead; }
  __device__ __forceinline__ int2 span_of(int warp) const {  // first quad, and the one after the last
    const int span = (count + WARPS - 1) / WARPS, begin = min(warp * span, count);
    return {begin, min(begin + span, count)};
  }
  __device__ __forceinline__ float4 quad(int quad) const { return fetch(quad); }
  __device__ __forceinline__ float4 fetch(int quad) const {
    const int id = id_at(quad);
    return id >= 0 && id + 4 <= V ? *(const float4*)(row + id) : edge(id);
  }
  __device__ __forceinline__ float4 pass(int quad) const {  // that is read once
    const int id = id_at(quad);
    return id >= 0 && id + 4 <= V ? load_passing((const float4*)(row + id)) : edge(id);
  }
  __device__ __forceinline__ float4 edge(int id) const {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = id + i >= 0 && id + i < V ? row[id + i] : NEGATIVE_INFINITY;
    return make_float4(x[0], x[1], x[2], x[3]);
  }
};

// What a warp reads at a time of a row: a strip, of which lane l has quads 32 i + l. Four lanes have a segment.
constexpr int AT_ONCE = 4;           // quads of a lane
constexpr int STRIP = AT_ONCE * 32, SEGMENTS = 8;
__device__ __forceinline__ int strips_of(const Quads& row) { return (row.all() + STRIP - 1) / STRIP; }
__device__ __forceinline__ int quad_of_segment(int segment, int i) {  // its ith
  return segment / SEGMENTS * STRIP + i / 4 * 32 + segment % SEGMENTS * 4 + i % 4;
}

// The part of a block of a team
template <bool RESIDENT> struct Slice : Quads {
  static constexpr bool ALONE = false;
  int begin, end, lane;              // of the block's quads, those of this warp
  float4* quads;                     // of the block, in shared memory
  float floor = -LARGEST_FLOAT;

  __device__ __forceinline__ Slice(const Team& team, const float* row, int V)
      : Quads(row, V, team.rank, team.size), lane(team.lane) {
    const int2 span = span_of(team.warp);
    begin = span.x;
    end = span.y;
    quads = (float4*)(&team.shared + 1);
  }
  __device__ __forceinline__ float4 quad(int quad) const {
    if constexpr (RESIDENT) return quads[quad];
    else return fetch(quad);
  }
  // prepare() once. load(): bring the warp's span into shared memory, for the `turn`th row; no edges yet.
  static __device__ __forceinline__ void prepare(const Team& team) {
#ifdef HOPPER
    if constexpr (RESIDENT) {
      if (team.lane == 0) barrier_init(shared_address(&team.shared.loaded[team.warp]), 1);
      barrier_init_fence();
    }
#endif
  }
  __device__ __forceinline__ void load(const Team& team, int turn) {
    team.sync();  // all have begun, and are done with the row before
    if (threadIdx.x == 0) team.shared.edges = {0, 0, 0, 0.f};
#ifdef HOPPER
    if constexpr (RESIDENT) {
      const u32 barrier = shared_address(&team.shared.loaded[team.warp]);
      const bool is_first = begin < end && id_at(begin) < 0, is_last = begin < end && id_at(end) > V;
      const int from = begin + is_first, to = max(from, end - is_last);
      if (lane == 0) {
        const u32 bytes = (to - from) * 16;
        barrier_arrive_expecting(barrier, bytes);
        if (bytes) bulk_copy(shared_address(quads + from), row + id_at(from), bytes, barrier);
      }
      if (lane == 1 && is_first) quads[begin] = fetch(begin);
      if (lane == 2 && to < end) quads[to] = fetch(to);
      __syncwarp();
      barrier_wait(barrier, turn & 1);
    }
#endif
  }
  template <class Use> __device__ __forceinline__ void each(const Use& use) const {
#pragma unroll 1
    for (int q = begin + lane; q < end; q += 32) {
      const float4 four = quad(q);
      const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (x[i] >= floor) use(x[i], id_at(q) + i);
    }
  }
  __device__ __forceinline__ u64 lowest_key(Team&) const { return (u64)key_of(floor) << 32; }
};

// Candidates of a row in one block: all in a line, or those of a team in its first block, where warps share the parts of
// the blocks.
struct List {
  static constexpr bool ALONE = true;
  const u64* keys;
  int count, start, stride;

  // How many candidates are in the part of this warp, out of an exchange in which all blocks said how many they have
  static __device__ __forceinline__ int part(const Team& team, const u64 (*counts)[2]) {
    return (int)counts[team.warp / (WARPS / team.size)][1];
  }
  __device__ __forceinline__ List(const u64* keys, int count)
      : keys(keys), count(count), start(threadIdx.x), stride(BLOCK) {}
  __device__ __forceinline__ List(const Team& team, int count) : count(count) {
    const int warps = WARPS / team.size;
    keys = team.shared.list + team.warp / warps * LIST;
    start = (team.warp % warps) * 32 + team.lane;
    stride = warps * 32;
  }
  template <class Use> __device__ __forceinline__ void each(const Use& use) const {
#pragma unroll 1
    for (int i = start; i < count; i += stride) use(logit_of(keys[i]), id_of(keys[i]));
  }
  __device__ __forceinline__ u64 lowest_key(Team& team) const {
    u64 lowest = ~0ull;
#pragma unroll 1
    for (int i = start; i < count; i += stride) lowest = min(lowest, keys[i]);
    return ~team.block_max(~lowest);
  }
};

// ---- select --------------------------------------------------------------------------------------------------------
struct Measure {
  const Rule& rule;
  Order order;
  bool counts;  // weights are 1, not masses
  __device__ __forceinline__ u64 key(float x, int id) const { return rule.key(order, x, id); }
  __device__ __forceinline__ u64 weight(float x, int id) const { return counts ? 1 : rule.kept_mass(x, id); }
};
struct Window { u64 low, high, wanted; };  // among keys from low to high, the largest of weight `wanted` together

// Narrow the window to the bin that holds the edge. False if all weights together are less than wanted.
template <class Items>
__device__ __forceinline__ bool narrow(Team& team, const Items& items, const Measure& measure, Window& window) {
  Shared& shared = team.shared;
  const int shift = max(0, 54 - __clzll((i64)(window.high - window.low)));  // at most BINS bins
  __syncthreads();  // what the time before was found is read
#pragma unroll
  for (int i = threadIdx.x; i < BINS; i += BLOCK) shared.low[i] = shared.high[i] = 0;
  if (threadIdx.x == 0) {
    shared.found_bin = -1;
    shared.few_count = 0;
  }
  __syncthreads();
  items.each([&](float x, int id) {
    const u64 key = measure.key(x, id);
    if (key < window.low || key > window.high) return;
    const u64 weight = measure.weight(x, id);
    if (weight == 0) return;
    const int bin = (int)((window.high - key) >> shift);
    const u32 low = (u32)weight, old = atomicAdd(&shared.low[bin], low);
    const u32 high = (u32)(weight >> 32) + (old + low < old);  // the carry, counted once by whoever caused it
    if (high) atomicAdd(&shared.high[bin], high);
  });
  team.sync<Items::ALONE>();
  static_assert(BINS == 4 * BLOCK);
  u64 bins[4] = {0, 0, 0, 0};  // 4t ... 4t + 3
  for (int i = 0; i < (Items::ALONE ? 1 : team.size); ++i) {
    const uint4 low = ((const uint4*)(Items::ALONE ? shared.low : of_block(shared.low, i)))[threadIdx.x];
    const uint4 high = ((const uint4*)(Items::ALONE ? shared.high : of_block(shared.high, i)))[threadIdx.x];
    bins[0] += (u64)high.x << 32 | low.x;
    bins[1] += (u64)high.y << 32 | low.y;
    bins[2] += (u64)high.z << 32 | low.z;
    bins[3] += (u64)high.w << 32 | low.w;
  }
  const u64 sum = bins[0] + bins[1] + bins[2] + bins[3];
  u64 running = warp_running_sum(sum, team.lane);
  team.flip ^= 1;
  if (team.lane == 31) shared.partial[team.flip][team.warp] = running;
  team.sync<Items::ALONE>();  // also: nobody reads the others' bins any more
  const u64 warps = warp_running_sum(team.lane < WARPS ? shared.partial[team.flip][team.lane] : 0, team.lane);
  const u64 before = __shfl_sync(ALL_LANES, warps, max(team.warp - 1, 0));
  if (team.warp) running += before;
  if (running >= window.wanted && running - sum < window.wanted) {
    u64 above = running - sum;
    int place = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (place == i && above + bins[i] < window.wanted) above += bins[i], ++place;
    shared.found_bin = 4 * threadIdx.x + place;
    shared.found_above = above;
  }
  __syncthreads();
  if (shared.found_bin < 0) return false;
  window.wanted -= shared.found_above;
  window.high -= (u64)shared.found_bin << shift;
  const u64 width = ((u64)1 << shift) - 1;
  if (window.high - window.low > width) window.low = window.high - width;
  return true;
}

// The key at which the weights, from the largest key of the window down, reach `wanted`: the fewest tokens that do have
// this key or a larger one. 0 if all together do not.
template <class Items>
__device__ __forceinline__ u64 select(Team& team, const Items& items, const Measure& measure, Window window) {
  Shared& shared = team.shared;
  constexpr int MOST = Items::ALONE ? BLOCK : FEW;
  Item* const few = Items::ALONE ? shared.items : shared.few;
  if constexpr (Items::ALONE) {  // few as they are, most often
    __syncthreads();
    if (threadIdx.x == 0) shared.few_count = 0;
    __syncthreads();
  } else if (!narrow(team, items, measure, window)) {
    return 0;
  }
#pragma unroll 1
  do {
    if (window.low == window.high) return window.low;
    items.each([&](float x, int id) {
      const u64 key = measure.key(x, id);
      if (key < window.low || key > window.high) return;
      const u64 weight = measure.weight(x, id);
      if (weight == 0) return;
      const int place = (int)atomicAdd((u32*)&shared.few_count, 1u);
      if (place < MOST) few[place] = {key, weight};
    });
    if (threadIdx.x == 0) shared.found_edge = 0;
    __syncthreads();
    int all = shared.few_count, owner = 0, place = team.lane;  // this lane's item is owner's few[place]
    if constexpr (!Items::ALONE) {
      const u64 (*const counts)[2] = team.exchange(all, 0);
      all = 0;
      for (int i = 0; i < team.size; ++i) {
        const int count = (int)counts[i][0];
        if (team.lane >= all && team.lane < all + count) owner = i, place = team.lane - all;
        all += count;
      }
    }
    if (all > MOST) continue;
    Item item = {0, 0};
    u64 sum = 0;
    if constexpr (Items::ALONE) {
      if (threadIdx.x < all) {
        item = few[threadIdx.x];
#pragma unroll 8
        for (int i = 0; i < all; ++i) sum += few[i].key >= item.key ? few[i].weight : 0;
      }
    } else if (team.warp == 0) {
      if (team.lane < all) item = *of_block(&few[place], owner);
      for (int i = 0; i < all; ++i) {
        const u64 key = __shfl_sync(ALL_LANES, item.key, i), weight = __shfl_sync(ALL_LANES, item.weight, i);
        if (key >= item.key) sum += weight;
      }
    }
    if (item.weight && sum >= window.wanted && sum - item.weight < window.wanted) shared.found_edge = item.key;
    __syncthreads();
    return shared.found_edge;
  } while (narrow(team, items, measure, window));
  return 0;
}
