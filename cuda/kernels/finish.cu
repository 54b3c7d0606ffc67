// finish, grid S: a token for every row of which few tokens matter, or whose masses weigh.cu has added up, by the
// definition of model/sampler.py; and what a step's end takes of all rows.
//
//   logits [S, V] float32, V <= 2^19; rows, samples, lengths [S] and settings [R] as scatter.cu writes them
//   scans, candidates, queue: what scan.cu and weigh.cu leave. scans and the counts of queue are cleared
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

// A token out of the candidates. total: as for draw
__device__ __forceinline__ int choose(
    Team& team, const Settings& row, u64 best, const u64* candidates, int count, bool has_k, u64 total,
    u64 random) {
  constexpr int OF_THREAD = CANDIDATES / BLOCK;
  u64 keys[OF_THREAD], most = 0;
#pragma unroll
  for (int i = 0; i < OF_THREAD; ++i) {
    const int place = i * BLOCK + threadIdx.x;
    keys[i] = place < count ? candidates[place] : 0;
    most = max(most, keys[i]);
  }
  int& kept = team.shared.list_count;
  if (threadIdx.x == 0) kept = 0;
  __syncthreads();
  // The floors of the parts are lower than one under all
  const float own = most ? logit_of(most) : NEGATIVE_INFINITY;
  const float floor = has_k ? floor_of_largest(own, row.top_k, team.shared.extremes) : -LARGEST_FLOAT;
#pragma unroll
  for (int i = 0; i < OF_THREAD; ++i)
    if (keys[i] && logit_of(keys[i]) >= floor) team.shared.list[atomicAdd((u32*)&kept, 1u)] = keys[i];
  __syncthreads();
  const Rule rule(team.shared.edges, logit_of(best), row.temperature);
  return draw(team, List(team.shared.list, kept), rule, row, best, has_k, total, random);
}

// A token for a row that draws, by one block: out of all, if that is what it draws among, or out of the candidates
__device__ __forceinline__ int drawn(
    Team& team, const Settings& own, const float* row, int V, const Scan& scan, const Span* spans, int parts,
    const u64* candidates, u64 random) {
  Shared& shared = team.shared;
  u64 total = 0;
  if (is_weighed(own, V)) {
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
  }
  return choose(team, own, scan.best, candidates, (int)scan.found, has_top_k(own, V), total, random);
}

__global__ void __launch_bounds__(BLOCK, 2) finish(
    const float* logits, const int* rows, const int* samples, const int* lengths, const Settings* settings,
    Scan* scans, const Span* spans, const u64* candidates, Queue* queue, int* masked, int* failed, int* last_tokens,
    const int* header, int* outcome, int* results, u32* ticket, int V, int capacity, int parts) {
  DYNAMIC_SHARED(memory);
  Team team(*(Shared*)memory);
  if (threadIdx.x == 0) team.shared.edges = {0, 0, 0, 0.f};
  allow_next_kernel();
  wait_for_previous_kernel();
  const int s = blockIdx.x, row = rows[s], is_sampling = samples[s], length = lengths[s], banned = masked[s];
  const int slot = header[6], step = header[0];
  const Scan scan = scans[s];
  int token = -1, has_failed = 0;
  if (row >= 0) {
    has_failed = failed[row];
    const Settings& own = settings[row];
    int* const history = own.history;
    if (is_sampling) {
      if (wanted_of_scan(own, V) < 0 || scan.found > CANDIDATES) {
        token = outcome[s];
        has_failed |= outcome[capacity + s];
      } else {
        const bool is_bad =
            is_bad_row(Quads(logits + (i64)s * V, V, 0, 1), scan.best, scan.infinite, banned);
        if (is_bad || own.temperature < GREEDY_BELOW) token = id_of_best(scan.best, V);
        else token = drawn(team, own, logits + (i64)s * V, V, scan, spans + (i64)s * parts * WARPS, parts,
                           candidates + (i64)s * CANDIDATES, random_word(own.seed, (u32)length));
        has_failed |= is_bad;
      }
    }
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
