// sample: from logits to tokens, by the definition of model/sampler.py, whatever else is in the batch.
//
// sample_scan, grid (SLICES, S): the largest logit of each slice (lowest id among equals), and whether all are finite.
// sample_finish, grid S, a block a sequence: greedy rows (temperature < 1e-5) are done with the largest logit. Others:
//     mass = floor(exp((logit - largest) / temperature) * 2^40), an integer: sums are the same in any order
//     top-k keeps the k largest logits; top-p the fewest largest whose mass reaches ceil(p * total); ties: lowest ids
//     the token is the first, in id order, whose running sum of kept mass exceeds floor(r * total / 2^64), where r is
//     64 bits of Philox4x32-10 with key = seed and counter = (position of the new token, 0)
//   The edge of top-k and top-p is a key (a float's bits, ordered as unsigned), found 11 bits at a time from histograms
//   of count or mass: 3 reads of the row each, no sort. Reads of a row: 1 greedy, 2 with a temperature, 9 with all.
//
//   logits [S, V] float32; rows, samples, lengths [S] and settings as scatter.cu writes them; header: the upload
//   partials [S, SLICES] (u64 best, then int not_finite [S, SLICES])
//   failed [R]: set by kv_append; reported for every sequence of the step, and cleared
//   last_tokens [R]: the new token
//   outcome [2, capacity] int32: tokens and flags, until the last block brings them to the host
//   results: page-locked host memory, slots of 16 + 2 * capacity words: the step number at word 0, written last of all;
//     tokens at word 16 (-1 where the sequence does not sample), failed at word 16 + capacity
//   ticket: one u32, 0 before and after
#include "common.cuh"

constexpr int SLICES = 8, BINS = 2048, BLOCK = 1024, WARPS = BLOCK / 32;
constexpr float GREEDY_BELOW = 1e-5f;

__device__ __forceinline__ u32 key_of(float x) {  // larger floats have larger keys; -0 and 0 have one
  const u32 bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float logit_of(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

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

extern "C" __global__ void __launch_bounds__(256)
sample_scan(const float* logits, const int* samples, u64* partials, int* not_finite, int V) {
  __shared__ u64 best_of_warp[8];
  allow_next_kernel();
  wait_for_previous_kernel();
  const int s = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (!samples[s]) return;
  const float* row = logits + (i64)s * V;
  const int per_slice = (V + SLICES - 1) / SLICES, begin = blockIdx.x * per_slice, end = min(begin + per_slice, V);
  u64 best = 0;  // (key, ~id): the maximum is the largest logit, and of equals the lowest id
  int bad = 0;
#pragma unroll 8
  for (int i = begin + threadIdx.x; i < end; i += 256) {
    const float x = row[i];
    bad |= !(fabsf(x) <= 3.4028234663852886e38f);
    best = max(best, (u64)key_of(x) << 32 | (u32)~i);
  }
  best = warp_max_u64(best);
  if (lane == 0) best_of_warp[warp] = best;
  const int any_bad = __syncthreads_or(bad);
  if (warp) return;
  best = warp_max_u64(lane < 8 ? best_of_warp[lane] : 0);
  if (lane == 0) {
    partials[s * SLICES + blockIdx.x] = best;
    not_finite[s * SLICES + blockIdx.x] = any_bad;
  }
}

// The first 64 bits of Philox4x32-10 (Salmon 2011) with counter (position, 0, 0, 0)
__device__ u64 random_word(u64 seed, u32 position) {
  u32 x0 = position, x1 = 0, x2 = 0, x3 = 0, k0 = (u32)seed, k1 = (u32)(seed >> 32);
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

// One block's view of one row. All its functions are called by all threads of the block.
struct RowDraw {
  const float* logits;
  int V;
  float largest, temperature;
  u32 edge = 0;              // kept: keys above the edge, and of those equal to it ids up to edge_id
  int edge_id = 0x7fffffff;
  u64* sums;                 // [WARPS] in shared memory
  u32 *bins_low, *bins_high; // [BINS] each, in shared memory: 64-bit sums in two words

  __device__ __forceinline__ u64 mass(float logit) const {
    return (u64)(expf((logit - largest) / temperature) * 1099511627776.f);  // 2^40: exact; the conversion rounds down
  }
  __device__ __forceinline__ bool is_kept(u32 key, int id) const {
    return key > edge || (key == edge && id <= edge_id);
  }
  __device__ __forceinline__ u64 kept_mass(int id) const {
    const float logit = logits[id];
    return is_kept(key_of(logit), id) ? mass(logit) : 0;
  }

  // sums[w] = weight of the w-th of WARPS equal spans of [begin, begin + size); returns the span of a warp
  template <class Weight> __device__ __forceinline__ int sum_spans(int begin, int size, Weight weight) {
    const int span = (size + WARPS - 1) / WARPS, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int first = begin + warp * span, last = min(first + span, begin + size);
    u64 sum = 0;
#pragma unroll 4
    for (int i = first + lane; i < last; i += 32) sum += weight(i);
    sum = warp_sum_u64(sum);
    __syncthreads();  // the sums of the time before are read
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    return span;
  }
  __device__ __forceinline__ u64 total() const { return warp_sum_u64(sums[threadIdx.x & 31]); }

  // The first id whose running sum of weights exceeds `threshold`, which is less than their total. Call after
  // span = sum_spans(0, V, weight).
  template <class Weight> __device__ __forceinline__ int locate(int span, u64 threshold, Weight weight) {
    int begin = 0, size = V;
    while (true) {
      const u64 own = sums[threadIdx.x & 31], running = warp_running_sum(own, threadIdx.x & 31);
      const int index = __ffs(__ballot_sync(ALL_LANES, running > threshold)) - 1;
      threshold -= __shfl_sync(ALL_LANES, running - own, index);
      begin += index * span;
      if (span == 1) return begin;
      size = min(span, size - index * span);
      span = sum_spans(begin, size, weight);
    }
  }

  // Move the edge up: keep, of what is kept now, the fewest largest whose weights reach `wanted` (1 <= wanted <= their
  // total). weight(id, logit): 1 for a count, the mass for a share
  template <class Weight> __device__ __forceinline__ void keep_largest(u64 wanted, Weight weight) {
    __shared__ u32 found_bin;
    __shared__ u64 found_above, found_weight;
    u32 prefix = 0;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 1
    for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift - 10) {  // bits 31-21, 20-10, 9-0
      for (int i = threadIdx.x; i < BINS; i += BLOCK) bins_low[i] = bins_high[i] = 0;
      __syncthreads();
      const int width = shift ? 11 : 10;
      const u32 mask = (1u << width) - 1;
#pragma unroll 4
      for (int i = threadIdx.x; i < V; i += BLOCK) {
        const float logit = logits[i];
        const u32 key = key_of(logit);
        if (shift != 21 && key >> (shift + width) != prefix) continue;
        if (!is_kept(key, i)) continue;
        const u64 w = weight(logit);
        if (w == 0) continue;
        const u32 bin = key >> shift & mask, low = (u32)w, old = atomicAdd(&bins_low[bin], low);
        const u32 high = (u32)(w >> 32) + (old + low < old);  // the carry, counted once by whoever caused it
        if (high) atomicAdd(&bins_high[bin], high);
      }
      __syncthreads();
      // thread t: bins BINS-1-2t and BINS-2-2t, so that threads go from large keys to small ones
      const int bin = BINS - 1 - 2 * threadIdx.x;
      const u64 a = (u64)bins_high[bin] << 32 | bins_low[bin], b = (u64)bins_high[bin - 1] << 32 | bins_low[bin - 1];
      u64 running = warp_running_sum(a + b, lane);
      if (lane == 31) sums[warp] = running;
      __syncthreads();
      const u64 warps = warp_running_sum(sums[lane], lane);
      const u64 before = __shfl_sync(ALL_LANES, warps, max(warp - 1, 0));
      if (warp) running += before;
      if (running >= wanted && running - a - b < wanted) {  // one thread: wanted is at most the total
        const bool in_first = running - b >= wanted;
        found_bin = in_first ? bin : bin - 1;
        found_above = running - b - (in_first ? a : 0);
        found_weight = in_first ? a : b;
      }
      __syncthreads();
      prefix = prefix << width | found_bin;
      wanted -= found_above;
    }
    const u64 equal_weight = found_weight;
    int last = 0x7fffffff;
    if (wanted < equal_weight) {  // not all of the equals at the edge: the lowest ids
      auto equals = [&](int id) {
        const float logit = logits[id];
        const u32 key = key_of(logit);
        return key == prefix && is_kept(key, id) ? weight(logit) : (u64)0;
      };
      const int span = sum_spans(0, V, equals);
      last = locate(span, wanted - 1, equals);
    } else if (prefix == edge) {
      last = edge_id;
    }
    edge = prefix;
    edge_id = last;
    __syncthreads();
  }

  __device__ __forceinline__ int draw(int top_k, double top_p, u64 random) {
    auto kept = [&](int id) { return kept_mass(id); };
    if (top_k > 0 && top_k < V) keep_largest(top_k, [](float) { return (u64)1; });
    int span = sum_spans(0, V, kept);
    u64 all = total();
    if (top_p < 1.0) {
      const u64 wanted = max((u64)ceil(top_p * (double)all), (u64)1);
      keep_largest(wanted, [&](float logit) { return mass(logit); });
      span = sum_spans(0, V, kept);
      all = total();
    }
    return locate(span, __umul64hi(random, all), kept);
  }
};

extern "C" __global__ void __launch_bounds__(BLOCK, 1) sample_finish(
    const float* logits, const int* rows, const int* samples, const int* lengths, const float* temperatures,
    const int* top_ks, const double* top_ps, const u64* seeds, const u64* partials, const int* not_finite, int* failed,
    int* last_tokens, const int* header, int* outcome, int* results, u32* ticket, int V, int capacity) {
  __shared__ u64 sums[WARPS];
  __shared__ u32 bins_low[BINS], bins_high[BINS];
  allow_next_kernel();
  wait_for_previous_kernel();
  __shared__ bool is_last;
  const int s = blockIdx.x, row = rows[s];
  if (row >= 0) {
    int token = -1, bad = 0;
    if (samples[s]) {
      u64 best = 0;
#pragma unroll
      for (int i = 0; i < SLICES; ++i) {
        best = max(best, partials[s * SLICES + i]);
        bad |= not_finite[s * SLICES + i];
      }
      token = (int)~(u32)best;
      if (temperatures[row] >= GREEDY_BELOW && !bad) {
        RowDraw view = {logits + (i64)s * V, V, logit_of((u32)(best >> 32)), temperatures[row]};
        view.sums = sums;
        view.bins_low = bins_low;
        view.bins_high = bins_high;
        token = view.draw(top_ks[row], top_ps[row], random_word(seeds[row], (u32)lengths[s]));
      }
    }
    if (threadIdx.x == 0) {
      if (token >= 0) last_tokens[row] = token;
      outcome[s] = token;
      outcome[capacity + s] = bad | failed[row];
      failed[row] = 0;
    }
  }
  // The last block brings all to the host, in whole lines, and the step's number after them
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  int* const result = results + (i64)header[6] * (16 + 2 * capacity);
  for (int i = threadIdx.x; i < gridDim.x; i += BLOCK) {
    result[16 + i] = __ldcg(outcome + i);
    result[16 + capacity + i] = __ldcg(outcome + capacity + i);
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    *ticket = 0;
    __threadfence_system();
    *(volatile int*)result = header[0];
  }
}
