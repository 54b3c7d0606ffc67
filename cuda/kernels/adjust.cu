// adjust: penalties, biases and bans on logits, in place, before sample: step A of model/sampler.py.
//
// grid (blocks, parts): blocks (., 0) do all but the masks, each for rows of the step in turn; the others share the
// masks, a part of the vocabulary each. Who finds no row that asks ends at once. No two touch the same logit: under a
// mask there is nothing to penalize, bias or bar.
//
// How often a row has each token is counted anew in each step from its history, in a table of the block's own [V] that is
// zero before and after: whoever takes a token's count out first, applies it. So no row needs a table of the vocabulary,
// and nothing depends on an order.
//
//   logits [S, V] float32; rows, samples, lengths [S] and settings [R] as scatter.cu writes them
//   settings[row].history [...] int32: the row's tokens by position, lengths[s] of them
//   settings[row].lists: int32 words, or null. Words 0 ... 2: how many biases, barred ids and bad words; 3: whether there
//     is a mask; 4 ... 7: the word at which each of them begins:
//       biases: ids, values (float)        barred: ids
//       bad words: where each begins among the tokens, one entry more; the tokens
//       mask: ceil(V / 32) words, bit id % 32 of word id / 32 set where a token may come
//   mask_of [S]: which of `masks` says what a sequence may sample, beside its row's own lists; -1: none. Or null: nobody's
//   masks [., mask_words]: as the mask in a row's lists
//   counts [blocks, V]: zero before and after
//   masked [S]: zero before. Of rows that ask: how many logits are minus infinity now and were finite; the highest bit is
//     set if one was not finite
#include "settings.cuh"

constexpr int BLOCK = 512;
constexpr u32 IN_PROMPT = 0x80000000u, IS_BAD = 0x80000000u;

__device__ __forceinline__ float held(float x) { return fminf(fmaxf(x, -LARGEST_FLOAT), LARGEST_FLOAT); }

struct Adjusted {  // by one thread
  float* logits;
  const u32 *mask, *grammar;         // each may be null: all tokens may come by it
  int masked = 0;
  bool is_bad = false;

  __device__ __forceinline__ bool is_masked(int id) const { return lacks(mask, id) || lacks(grammar, id); }
  static __device__ __forceinline__ bool lacks(const u32* bits, int id) {
    return bits && !(bits[id >> 5] >> (id & 31) & 1);
  }
  // Change a logit; one that is not finite stays
  template <class Change> __device__ __forceinline__ void change(int id, const Change& change) {
    if (is_masked(id)) return;
    const float x = logits[id];
    if (is_finite(x)) logits[id] = held(change(x));
    else is_bad = true;
  }
  __device__ __forceinline__ void note(float before) {
    if (is_finite(before)) ++masked;
    else is_bad |= before != NEGATIVE_INFINITY;  // one that was so from the start: sample sees one too many
  }
  __device__ __forceinline__ void ban(int id) {  // others may ban it too
    if (!is_masked(id)) note(__uint_as_float(atomicExch((u32*)logits + id, __float_as_uint(NEGATIVE_INFINITY))));
  }
};

__device__ __forceinline__ void penalize(Adjusted& row, const Settings& own, u32* counts, int length, int V) {
  const float repetition = own.repetition;
  const int first = (repetition != 1.f ? 0 : own.prompt) + threadIdx.x;
  for (int i = first; i < length; i += BLOCK) {
    const int id = own.history[i];
    if ((u32)id >= V) continue;
    if (i < own.prompt) atomicOr(counts + id, IN_PROMPT);
    else atomicAdd(counts + id, 1u);
  }
  __syncthreads();
  for (int i = first; i < length; i += BLOCK) {
    const int id = own.history[i];
    const u32 seen = (u32)id < V ? atomicExch(counts + id, 0u) : 0;
    if (!seen) continue;
    const u32 count = seen & ~IN_PROMPT;
    row.change(id, [&](float x) {
      if (repetition != 1.f) x = x > 0.f ? x / repetition : x * repetition;
      if (count) x -= __fadd_rn(__fmul_rn(own.frequency, (float)count), own.presence);
      return x;
    });
  }
}

// One of `parts` parts of a row's mask
__device__ __forceinline__ void apply_mask(Adjusted& row, int part, int parts, int V) {
  constexpr int AT_ONCE = 8;
  const int share = (V + parts - 1) / parts, end = min((part + 1) * share, V);
  for (int base = part * share + threadIdx.x; base < end; base += AT_ONCE * BLOCK) {
    bool bans[AT_ONCE];
    float before[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) bans[i] = base + i * BLOCK < end && row.is_masked(base + i * BLOCK);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (bans[i]) before[i] = row.logits[base + i * BLOCK];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (!bans[i]) continue;
      row.note(before[i]);
      row.logits[base + i * BLOCK] = NEGATIVE_INFINITY;
    }
  }
}

__device__ __forceinline__ void apply_lists(Adjusted& row, const Settings& own, int length) {
  const int* const lists = own.lists;
  const int biases = lists[0], barred = lists[1], words = lists[2];
  for (int i = threadIdx.x; i < biases; i += BLOCK) {
    const int* const bias = lists + lists[4] + i;
    row.change(bias[0], [&](float x) { return x + __int_as_float(bias[biases]); });
  }
  __syncthreads();
  if (length - own.prompt < own.min_tokens)
    for (int i = threadIdx.x; i < barred; i += BLOCK) row.ban(lists[lists[5] + i]);
  for (int i = threadIdx.x; i < words; i += BLOCK) {
    const int *const starts = lists + lists[6], *const tokens = starts + words + 1;
    const int last = starts[i + 1] - 1, before = last - starts[i];  // tokens that must be the row's last ones
    bool fits = before <= length;
    for (int j = 1; fits && j <= before; ++j) fits = own.history[length - j] == tokens[last - j];
    if (fits) row.ban(tokens[last]);
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK) adjust(
    float* logits, const int* rows, const int* samples, const int* lengths, const Settings* settings,
    const int* mask_of, const u32* masks, u32* counts, int* masked, int S, int V, int mask_words) {
  __shared__ u32 masked_of_block;
  if (threadIdx.x == 0) masked_of_block = 0;
  allow_next_kernel();
  wait_for_previous_kernel();
  const int lane = threadIdx.x & 31;
  for (int base = blockIdx.x; base < S; base += 32 * gridDim.x) {
    const int candidate = base + lane * gridDim.x;  // all warps look at the same 32
    bool asks = candidate < S && rows[candidate] >= 0 && samples[candidate];
    if (asks) asks = settings[rows[candidate]].adjusts || (mask_of && mask_of[candidate] >= 0);
    for (u32 asking = __ballot_sync(ALL_LANES, asks); asking; asking &= asking - 1) {
      const int s = base + (__ffs(asking) - 1) * gridDim.x;
      const Settings& own = settings[rows[s]];
      Adjusted row = {logits + (i64)s * V, own.lists && own.lists[3] ? (const u32*)own.lists + own.lists[7] : nullptr,
                      mask_of && mask_of[s] >= 0 ? masks + (i64)mask_of[s] * mask_words : nullptr};
      __syncthreads();
      if (blockIdx.y) {
        if (!row.mask && !row.grammar) continue;
        apply_mask(row, blockIdx.y - 1, gridDim.y - 1, V);
      } else {
        if (own.repetition != 1.f || own.presence != 0.f || own.frequency != 0.f)
          penalize(row, own, counts + (i64)blockIdx.x * V, lengths[s], V);
        __syncthreads();
        if (own.lists) apply_lists(row, own, lengths[s]);
      }
      if (row.masked) atomicAdd(&masked_of_block, (u32)row.masked);
      const bool is_bad = __syncthreads_or(row.is_bad);
      if (threadIdx.x) continue;
      const u32 all = atomicExch(&masked_of_block, 0u);  // taken and zeroed in one: all threads would do a plain load
      if (all) atomicAdd((u32*)masked + s, all);
      if (is_bad) atomicOr((u32*)masked + s, IS_BAD);
    }
  }
}
