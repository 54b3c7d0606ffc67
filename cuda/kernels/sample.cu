// sample: rows that need several looks at all of their logits, by the definition of model/sampler.py: those that ask for
// log-probabilities, a top-k beyond MANY, typical-p alone, and those with too many candidates. A team of blocks (a cluster)
// has a row; sampling.cuh says how it works. Some 3 to 12 passes over the logits, in shared memory if RESIDENT.
//
// sample<RESIDENT>, grid teams: rows that need a team, in turn; most often there is none. The others: finish.cu.
// log_probs<RESIDENT>, grid N teams: log-probabilities of given tokens, of logits as they are.
//
//   logits [S, V] float32, V <= 2^19; rows, lengths [S] and settings [R] as scatter.cu writes them
//   queue: what scan.cu and weigh.cu leave
//   header: the upload. Word 7: how many of the likeliest are reported for each sequence that asks
//   masked [S]: how many logits adjust.cu made minus infinity, negative if one was not finite
//   outcome [2, capacity] int32: tokens and flags, for finish.cu
//   results: as in finish.cu; the records of the sequences that ask for log-probabilities are written
//   a record: 2 + 2 * MAX_LOG_PROBS words: log-probability of the token (float), its rank, ids of the likeliest, theirs
#include "draws.cuh"

// What all blocks of a team know of a row after one pass
struct Seen {
  u64 best;                          // key of the largest logit
  bool is_bad;                       // not finite, or nothing left
  bool fits;                         // the candidates for the k largest are in the list,
  int listed;                        // so many in the part of it that this warp shares
  __device__ __forceinline__ float largest() const { return logit_of(best); }
};

// Bring the candidates, logits of at least `floor` and keys of at least `edge`, to the team's first block. Returns how
// many there are in this block, also if that is more than LIST. They are there after the next exchange.
template <bool RESIDENT>
__device__ __forceinline__ int collect(Team& team, const Slice<RESIDENT>& slice, float floor, u64 edge) {
  int& count = team.shared.list_count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  u64* const list = of_block(&team.shared.list[0], 0) + team.rank * LIST;
#pragma unroll 4
  for (int q = slice.begin + team.lane; q < slice.end; q += 32) {
    const float4 four = slice.quad(q);
    if (fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)) < floor) continue;
    const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u64 key = logit_key(x[i], slice.id_at(q) + i);
      if (!(x[i] >= floor) || key < edge) continue;
      const int place = (int)atomicAdd((u32*)&count, 1u);
      if (place < LIST) list[place] = key;
    }
  }
  __syncthreads();
  return count;
}

// The first pass: the largest logit, the count of those that are not finite, and candidates for the k largest (k > 0).
// `masked`: how many may be minus infinity.
template <bool RESIDENT>
__device__ __forceinline__ Seen look(Team& team, const Slice<RESIDENT>& slice, int k, int masked) {
  float best = NEGATIVE_INFINITY, zero = 0.f;
  int at = -1;
#pragma unroll 4
  for (int q = slice.begin + team.lane; q < slice.end; q += 32) {
    const float4 x = slice.quad(q);
    zero = fmaf(x.x, 0.f, fmaf(x.y, 0.f, fmaf(x.z, 0.f, fmaf(x.w, 0.f, zero))));  // NaN if one is not finite
    const float most = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
    if (most > best) {
      best = most;
      at = q;
    }
  }
  u64 own = 0;
  if (at >= 0) {
    const float4 x = slice.quad(at);
    const int place = x.x == best ? 0 : x.y == best ? 1 : x.z == best ? 2 : 3;
    own = logit_key(best, slice.id_at(at) + place);
  }
  u64 infinite = 0;
  if (__syncthreads_or(!(zero == 0.f))) {  // rare: padding, masks, or a network that went wrong
    u32 count = 0;
    for (int q = slice.begin + team.lane; q < slice.end; q += 32) {
      const float4 x = slice.quad(q);
      count += !(fabsf(x.x) <= LARGEST_FLOAT);
      count += !(fabsf(x.y) <= LARGEST_FLOAT);
      count += !(fabsf(x.z) <= LARGEST_FLOAT);
      count += !(fabsf(x.w) <= LARGEST_FLOAT);
    }
    infinite = team.block_sum(count);
  }
  const u64 best_of_block = team.block_max(own);
  u64 found = 0;
  if (k > 0) found = collect(team, slice, floor_of_largest(best, k, extremes_of_block(best, team.shared.extremes)), 0);
  const u64 (*const all)[2] = team.exchange(best_of_block, found | infinite << 32);
  Seen seen = {0, false, true, List::part(team, all)};
  u64 infinities = 0;
  for (int i = 0; i < team.size; ++i) {
    seen.best = max(seen.best, all[i][0]);
    infinities += all[i][1] >> 32;
    seen.fits &= (u32)all[i][1] <= LIST;
  }
  seen.is_bad = is_bad_row(slice, seen.best == 0, infinities, masked);
  return seen;
}

// ---- log-probabilities ---------------------------------------------------------------------------------------------
__device__ __forceinline__ float log_probability(float x, double norm) { return (float)((double)x - norm); }

// The likeliest `count` of the row, written by the team's first block. Returns the norm: logit - norm is the logarithm
// of the probability. If the candidates of `seen` were too many, others are collected.
template <bool RESIDENT>
__device__ __forceinline__ void write_likeliest(
    Team& team, const Slice<RESIDENT>& slice, const Seen& seen, int count, int* record) {
  const Rule rule(team.shared.edges, seen.largest(), 1.f);
  const u64 total = team.sum<false>(mass_of_span(slice, rule));
  const double norm = (double)rule.largest + log((double)total / 1099511627776.);
  if (threadIdx.x == 0) team.shared.norm = norm;
  if (count == 0) return;
  int listed = seen.listed;
  u64 edge = 0;
  if (!seen.fits) {
    edge = select(team, slice, {rule, BY_LOGIT, true}, {slice.lowest_key(team), seen.best, (u64)count});
    const int found = collect(team, slice, -LARGEST_FLOAT, edge);
    listed = List::part(team, team.exchange(0, found));
  }
  if (team.rank == 0) {
    const List list(team, listed);
    if (seen.fits)
      edge = select(team, list, {rule, BY_LOGIT, true}, {list.lowest_key(team), seen.best, (u64)count});
    int& few = team.shared.few_count;
    __syncthreads();
    if (threadIdx.x == 0) few = 0;
    __syncthreads();
    list.each([&](float x, int id) {
      const u64 key = logit_key(x, id);
      if (key >= edge) team.shared.few[min((int)atomicAdd((u32*)&few, 1u), FEW - 1)].key = key;
    });
    __syncthreads();
    if (team.warp == 0) {
      int found = min(few, FEW), rank = 0;
      const u64 own = team.lane < found ? team.shared.few[team.lane].key : 0;
      for (int i = 0; i < found; ++i) rank += __shfl_sync(ALL_LANES, own, i) > own;
      if (team.lane < found) {
        record[2 + rank] = id_of(own);
        record[2 + MAX_LOG_PROBS + rank] = __float_as_int(log_probability(logit_of(own), norm));
      }
      // Fewer can come than are wanted: masked tokens follow, the lowest ids first
      for (int i = team.lane; found < count && i - team.lane < slice.V; i += 32) {
        const u32 masked = __ballot_sync(ALL_LANES, i < slice.V && slice.row[i] == NEGATIVE_INFINITY);
        const int place = found + __popc(masked & ((1u << team.lane) - 1));
        if ((masked >> team.lane & 1) && place < count) {
          record[2 + place] = i;
          record[2 + MAX_LOG_PROBS + place] = __float_as_int(NEGATIVE_INFINITY);
        }
        found += __popc(masked);
      }
    }
  }
  team.sync();  // the list may be used anew
}

// Value and rank of one token
template <bool RESIDENT>
__device__ __forceinline__ void write_chosen(
    Team& team, const Slice<RESIDENT>& slice, int token, int* record) {
  const float chosen = slice.row[token];
  u32 larger = 0;
#pragma unroll 4
  for (int q = slice.begin + slice.lane; q < slice.end; q += 32) {
    const float4 x = slice.quad(q);
    larger += (x.x > chosen) + (x.y > chosen) + (x.z > chosen) + (x.w > chosen);
  }
  const u64 rank = 1 + team.sum<false>(larger);
  if (team.rank == 0 && threadIdx.x == 0) {
    record[0] = __float_as_int(log_probability(chosen, team.shared.norm));
    record[1] = (int)rank;
  }
}

__device__ __forceinline__ void write_meaningless(const Team& team, int* record) {
  const int nan = 0x7fc00000;
  if (team.rank == 0 && threadIdx.x < RECORD)
    record[threadIdx.x] = threadIdx.x == 0 || threadIdx.x >= 2 + MAX_LOG_PROBS ? nan : 0;
}

template <bool RESIDENT> __global__ void __launch_bounds__(BLOCK, 2)
log_probs(const float* logits, const int* targets, int* records, int count, int V) {
  DYNAMIC_SHARED(memory);
  Team team(*(Shared*)memory);
  allow_next_kernel();
  Slice<RESIDENT>::prepare(team);
  wait_for_previous_kernel();
  const int n = blockIdx.x / team.size;
  Slice<RESIDENT> slice(team, logits + (i64)n * V, V);
  slice.load(team, 0);
  const Seen seen = look(team, slice, count, 0);
  int* const record = records + (i64)n * RECORD;
  if (seen.is_bad) {
    write_meaningless(team, record);
    return;
  }
  write_likeliest(team, slice, seen, count, record);
  write_chosen(team, slice, targets[n], record);
}

// ---- draws ---------------------------------------------------------------------------------------------------------
// A token for a row that draws; -1 in the blocks that do not know it
template <bool RESIDENT>
__device__ __forceinline__ int choose(
    Team& team, Slice<RESIDENT>& slice, const Settings& row, const Seen& seen, u64 random) {
  const Rule rule(team.shared.edges, seen.largest(), row.temperature);
  const bool has_k = has_top_k(row, slice.V), has_p = row.top_p < 1.;
  if (has_k && row.top_k <= MANY && seen.fits) {
    if (team.rank) return -1;
    return draw(team, List(team, seen.listed), rule, row, seen.best, true, 0, random);
  }
  u64 mass = 0, total = 0, lightest = 1;  // lighter ones are not kept
  if (!has_k) {
    const bool is_plain = !has_p && row.least_mass == 0 && row.typical_p >= 1.;
    if (has_p || is_plain) mass = mass_of_span(slice, rule);
    if (is_plain) return locate(team, slice, rule, mass, random);
    lightest = max(row.least_mass, (u64)1);
    if (has_p) {
      total = team.sum<false>(mass);
      const u64 rest = total - min(total, wanted_of(row.top_p, total));
      lightest = max(lightest, rest / slice.V + 1);
    }
  }
  slice.floor = rule.floor_of(lightest);
  if (!has_k && lightest > 1) {
    const int found = collect(team, slice, slice.floor, 0);
    const u64 (*const counts)[2] = team.exchange(0, found);
    bool fit = true;
    for (int i = 0; i < team.size; ++i) fit &= counts[i][1] <= LIST;
    if (fit) {
      if (team.rank) return -1;
      return draw(team, List(team, List::part(team, counts)), rule, row, seen.best, false, total, random);
    }
  }
  return draw(team, slice, rule, row, seen.best, has_k, total, random);
}

template <bool RESIDENT> __global__ void __launch_bounds__(BLOCK, 2) sample(
    const float* logits, const int* rows, const int* lengths, const Settings* settings, const Queue* queue,
    const int* masked, const int* header, int* outcome, int* results, int V, int capacity) {
  DYNAMIC_SHARED(memory);
  Team team(*(Shared*)memory);
  allow_next_kernel();
  Slice<RESIDENT>::prepare(team);
  wait_for_previous_kernel();
  const int count = (int)queue->count;
  int turn = 0;
#pragma unroll 1
  for (int i = blockIdx.x / team.size; i < count; i += gridDim.x / team.size, ++turn) {
    const int s = queue->sequences[i];
    const Settings& own = settings[rows[s]];
    Slice<RESIDENT> slice(team, logits + (i64)s * V, V);
    slice.load(team, turn);
    const bool is_greedy = own.temperature < GREEDY_BELOW;
    const int likeliest = own.log_probs < 0 ? -1 : min(header[7], V);
    const int top_k = is_greedy || own.top_k > MANY || !has_top_k(own, V) ? 0 : own.top_k;
    const Seen seen = look(team, slice, max(top_k, likeliest), masked[s]);
    int* const record = results + (i64)header[6] * (16 + (2 + RECORD) * capacity) + 16 + 2 * capacity + s * RECORD;
    const bool wants_record = likeliest >= 0 && !seen.is_bad;
    if (wants_record) write_likeliest(team, slice, seen, likeliest, record);
    int token = -1;                  // known to one block of the team
    if (!is_greedy && !seen.is_bad) token = choose(team, slice, own, seen, random_word(own.seed, (u32)lengths[s]));
    else if (team.rank == 0) token = id_of_best(seen.best, V);
    if (wants_record) {
      const u64 (*const known)[2] = team.exchange((u64)(token + 1), 0);
      for (int j = 0; j < team.size; ++j) token = max(token, (int)known[j][0] - 1);
      write_chosen(team, slice, token, record);
    } else if (likeliest >= 0) {
      write_meaningless(team, record);
    }
    if (token >= 0 && threadIdx.x == 0) {  // if several know it, all write the same
      outcome[s] = token;
      outcome[capacity + s] = seen.is_bad;
    }
  }
}
