// finish, grid S: a token for every row of which few tokens matter, or whose masses weigh.cu has added up, by the
// definition of model/sampler.py; and what a step's end takes of all rows.
//
//   logits [S, V] float32, V <= 2^19; rows, samples, lengths [S] and settings [R] as scatter.cu writes them
//   maxima [S, stride], scans, candidates, queue: what scan.cu and weigh.cu leave. scans and the counts of queue are cleared
//   spans [S, parts * WARPS]: of weigh.cu
//   masked [S]: how many logits adjust.cu made minus infinity, negative if one was not finite; cleared
//   failed [R]: set by kv_append; reported for every sequence of the step, and cleared
//   last_tokens [R]: the new token. Its place in the row's history, if there is one, gets it too
//   outcome [2, capacity] int32: tokens and flags, until the last block brings them to the host. Of rows that a team of
//     sample.cu has worked on they are there already
//   results: page-locked host memory, slots of 16 + (2 + RECORD) * capacity words: the step number at word 0, written
//     last of all; tokens at word 16 (-1 where the sequence does not sample), failed at word 16 + capacity, and at word
//     16 + (2 + i) * capacity ... the records of the sequences that ask for log-probabilities
//   ticket: one u32, 0 before and after
#include "draws.cuh"

constexpr int FEW_TO_COMPARE = 128;  // candidates that are compared each with each
constexpr int MANY_SEGMENTS = sizeof(Shared::items) / sizeof(u32);

// What few rows come to is not inlined: a kernel that runs once waits for its code.
// A token out of the list
__device__ __noinline__ int draw_of_list(
    Shared& shared, const Settings& own, int count, bool has_k, u64 total, u64 random) {
  Team team(shared);
  __syncthreads();
  u64 best = 0;
  for (int i = threadIdx.x; i < count; i += BLOCK) best = max(best, shared.list[i]);
  best = team.block_max(best);
  const Rule rule(shared.edges, logit_of(best), own.temperature);
  return draw(team, List(shared.list, count), rule, own, best, has_k, total, random);
}

// The same out of all logits above a floor, of which there are more than the list holds
__device__ __noinline__ int draw_of_row(
    Shared& shared, const Settings& own, const float* row, int V, float floor, u64 random) {
  Team team(shared);
  __syncthreads();
  Slice<false> slice(team, row, V);
  slice.floor = floor;
  u64 best = 0;
  slice.each([&](float x, int id) { best = max(best, logit_key(x, id)); });
  best = team.block_max(best);
  const Rule rule(shared.edges, logit_of(best), own.temperature);
  return draw(team, slice, rule, own, best, has_top_k(own, V), 0, random);
}

// The choice of `draw` out of so few candidates that each is compared with all, by two threads or four
__device__ __forceinline__ int draw_of_few(
    Team& team, float largest, int count, const Settings& row, bool has_k, u64 random) {
  const Rule rule(team.shared.edges, largest, row.temperature);
  Item* const items = team.shared.items;
  const int each = count <= BLOCK / 4 ? 4 : 2, own = threadIdx.x / each, part = threadIdx.x % each;
  const bool is_one = own < count, is_first = is_one && part == 0;
  const u64 key = is_one ? team.shared.list[own] : 0;
  const float x = logit_of(key);
  u64 mass = is_one ? rule.mass(x) : 0;
  const auto show = [&](u64 order) {
    __syncthreads();
    if (is_first) items[own] = {order, mass};
    __syncthreads();
  };
  const auto sum = [&](u64 of_part) {  // over the threads of a candidate
    of_part += __shfl_xor_sync(ALL_LANES, of_part, 1);
    return each == 2 ? of_part : of_part + __shfl_xor_sync(ALL_LANES, of_part, 2);
  };
  const auto sum_of_larger = [&](u64 order, u32& rank) {  // and how many they are
    u64 above = 0;
    rank = 0;
    if (is_one) {
#pragma unroll 4
      for (int i = part; i < count; i += each) {
        const Item item = items[i];
        if (item.key <= order) continue;
        ++rank;
        above += item.weight;
      }
    }
    rank = (u32)sum(rank);
    return sum(above);
  };
  u32 rank;
  if (has_k || row.top_p < 1.) {
    show(key);
    const u64 above = sum_of_larger(key, rank);
    if (has_k && rank >= row.top_k) mass = 0;
    if (row.top_p < 1.) {
      const u64 total = team.block_sum(part ? 0 : mass);
      if (above >= wanted_of(row.top_p, total)) mass = 0;
    }
  }
  if (mass < row.least_mass) mass = 0;
  if (row.typical_p < 1.) {
    const u64 total = team.block_sum(part ? 0 : mass);
    const u64 surprise = team.block_sum(part || !mass ? 0 : (u64)__fmul_rn((float)mass, rule.distance(x)));
    if (threadIdx.x == 0) rule.edges.mean = (float)((double)surprise / (double)total);
    __syncthreads();
    const u64 order = rule.key(BY_DISTANCE, x, id_of(key));
    show(order);
    if (sum_of_larger(order, rank) >= wanted_of(row.typical_p, total)) mass = 0;
  }
  show(rule.key(BY_ID, x, id_of(key)));
  const u64 before = sum_of_larger(rule.key(BY_ID, x, id_of(key)), rank);
  const u64 threshold = __umul64hi(random, team.block_sum(part ? 0 : mass));
  if (is_first && before <= threshold && threshold - before < mass) team.shared.place = id_of(key);
  __syncthreads();
  return team.shared.place;
}

// A token of a row that is weighed
__device__ __forceinline__ int draw_weighed(
    Team& team, const Settings& own, const Settings& stored, const float* row, int V, const Scan& scan,
    const Span* spans, int parts, const u64* candidates, u64 random) {
  Shared& shared = team.shared;
  u64 total = 0;
  const u64 mass = threadIdx.x < parts * WARPS ? spans[threadIdx.x].mass : 0;
  const u64 until = team.running_sum(mass, total);
  if (own.top_p >= 1.) {
    const u64 threshold = __umul64hi(random, total);
    if (until > threshold && until - mass <= threshold) {  // the span that has it
      shared.place = threadIdx.x;
      shared.found_edge = threshold - (until - mass);
    }
    __syncthreads();
    const Rule rule(shared.edges, logit_of(scan.best), own.temperature);
    const Quads quads(row, V, shared.place / WARPS, parts);
    return walk(team, quads, quads.span_of(shared.place % WARPS), rule, shared.found_edge);
  }
  for (int i = threadIdx.x; i < scan.found; i += BLOCK) shared.list[i] = candidates[i];
  return draw_of_list(shared, stored, (int)scan.found, false, total, random);
}

// A row's maxima by segment: most of them, of most rows, are in registers from the start
struct Maxima {
  static constexpr int EARLY = 10;
  const float* maxima;
  const int count;
  float early[EARLY];

  __device__ __forceinline__ Maxima(const float* maxima, int count) : maxima(maxima), count(count) {
#pragma unroll
    for (int i = 0; i < EARLY; ++i) {
      const int segment = i * BLOCK + threadIdx.x;
      early[i] = segment < count ? maxima[segment] : NEGATIVE_INFINITY;
    }
  }
  template <class Use> __device__ __forceinline__ void each(const Use& use) const {
#pragma unroll
    for (int i = 0; i < EARLY; ++i) use(early[i], i * BLOCK + threadIdx.x);
#pragma unroll 1
    for (int i = EARLY * BLOCK + threadIdx.x; i < count; i += BLOCK) use(maxima[i], i);
  }
};

// The largest logits of a row, all of at least `floor`, into the list. Returns how many, also if that is more than it
// holds.
__device__ __forceinline__ int collect(Team& team, const Quads& row, const Maxima& maxima, float floor) {
  constexpr int OF_SEGMENT = STRIP / SEGMENTS;
  Shared& shared = team.shared;
  u32* const segments = (u32*)shared.items;
  if (threadIdx.x == 0) shared.list_count = shared.few_count = 0;
  __syncthreads();
  maxima.each([&](float most, int segment) {
    if (!(most >= floor)) return;
    const u32 place = atomicAdd((u32*)&shared.few_count, 1u);
    if (place < MANY_SEGMENTS) segments[place] = segment;
  });
  __syncthreads();
  if (shared.few_count > MANY_SEGMENTS) return CANDIDATES + 1;
  const int quads = shared.few_count * OF_SEGMENT;
#pragma unroll 1
  for (int base = threadIdx.x; base < quads; base += AT_ONCE * BLOCK) {
    float4 four[AT_ONCE];
    int ids[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int place = base + i * BLOCK;
      if (place >= quads) break;
      const int quad = quad_of_segment(segments[place / OF_SEGMENT], place % OF_SEGMENT);
      four[i] = row.fetch(quad);
      ids[i] = row.id_at(quad);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (base + i * BLOCK >= quads) break;
      const float x[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
      if (!(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])) >= floor)) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!(x[j] >= floor)) continue;
        const u32 place = atomicAdd((u32*)&shared.list_count, 1u);
        if (place < CANDIDATES) shared.list[place] = logit_key(x[j], ids[i] + j);
      }
    }
  }
  __syncthreads();
  return shared.list_count;
}

// A token of a row of which few logits matter, the largest
__device__ __forceinline__ int choose(
    Team& team, const Settings& own, const Settings& stored, const Quads& row, const Maxima& maxima, float most,
    float2 extremes, u64 random) {
  const bool has_k = has_top_k(own, row.V);
  const float floor = has_k ? floor_of_largest(most, own.top_k, extremes)
                            : Rule::floor_under(extremes.y, Rule::reach_of(own.least_mass, own.temperature));
  const int count = collect(team, row, maxima, floor);
  if (count <= FEW_TO_COMPARE) return draw_of_few(team, extremes.y, count, own, has_k, random);
  if (count > CANDIDATES) return draw_of_row(team.shared, stored, row.row, row.V, floor, random);
  return draw_of_list(team.shared, stored, count, has_k, 0, random);
}

__global__ void __launch_bounds__(BLOCK, 2) finish(
    const float* logits, const int* rows, const int* samples, const int* lengths, const Settings* settings,
    Scan* scans, const float* maxima, const Span* spans, const u64* candidates, Queue* queue, int* masked, int* failed,
    int* last_tokens, const int* header, int* outcome, int* results, u32* ticket, int V, int capacity, int parts,
    int stride) {
  DYNAMIC_SHARED(memory);
  Team team(*(Shared*)memory);
  if (threadIdx.x == 0) team.shared.edges = {0, 0, 0, 0.f};
  allow_next_kernel();
  wait_for_previous_kernel();
  const int s = blockIdx.x, row = rows[s], is_sampling = samples[s], length = lengths[s], banned = masked[s];
  const int slot = header[6], step = header[0];
  const Scan scan = scans[s];
  const Quads quads(logits + (i64)s * V, V, 0, 1);
  const Maxima all(maxima + (i64)s * stride, strips_of(quads) * SEGMENTS);  // beside what says whether it is of use
  const Settings& stored = settings[max(row, 0)];
  const Settings own = stored;       // all at once
  int token = -1, has_failed = row < 0 ? 0 : failed[row];
  __syncthreads();                   // all have read what is cleared below
  if (row >= 0 && is_sampling) {
    const bool weighs = is_weighed(own, V), is_greedy = own.temperature < GREEDY_BELOW;
    if (needs_team(own, V) || scan.found > CANDIDATES) {
      token = outcome[s];
      has_failed |= outcome[capacity + s];
    } else {
      float most = NEGATIVE_INFINITY;
      float2 extremes = {0.f, logit_of(scan.best)};
      if (!weighs && !is_greedy) {
        all.each([&](float x, int) { most = fmaxf(most, x); });
        extremes = extremes_of_block(most, team.shared.extremes);
      }
      const bool is_empty = weighs || is_greedy ? scan.best == 0 : extremes.y == NEGATIVE_INFINITY;
      const bool is_bad = is_bad_row(quads, is_empty, scan.infinite, banned);
      has_failed |= is_bad;
      if (is_bad || is_greedy) token = id_of_best(scan.best, V);
      else if (const u64 random = random_word(own.seed, (u32)length); !weighs)
        token = choose(team, own, stored, quads, all, most, extremes, random);
      else
        token = draw_weighed(team, own, stored, quads.row, V, scan, spans + (i64)s * parts * WARPS, parts,
                             candidates + (i64)s * CANDIDATES, random);
    }
  }
  if (row >= 0) {
    int* const history = own.history;
    if (threadIdx.x == 0) {
      outcome[s] = token;
      outcome[capacity + s] = has_failed;
      failed[row] = 0;
      if (is_sampling) {
        last_tokens[row] = token;
        if (history) history[length] = token;
        scans[s] = {0, 0, 0};
        masked[s] = 0;
      }
    }
  }
  // Who is last brings all to the host, in whole lines, and the step's number after them
  if (threadIdx.x == 0) {
    __threadfence();
    team.shared.is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!team.shared.is_last) return;
  __threadfence();
  int* const result = results + (i64)slot * (16 + (2 + RECORD) * capacity);
  for (int i = threadIdx.x; i < gridDim.x; i += BLOCK) {
    result[16 + i] = __ldcg(outcome + i);
    result[16 + capacity + i] = __ldcg(outcome + capacity + i);
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    *(volatile int*)result = step;
    *ticket = queue->count = queue->weighed = 0;
  }
}
