// decode_plan: divides the work of paged_decode.cu, its line of (sequence, item, page), among blocks and their warps:
// once a step, for all layers. Blocks have equal ranges, and so have the warps of a block, to a page; but
//
// * a block's range begins at the edge of an item if one is at most `snap_pages` away: then nothing of that item is
//   merged between blocks, which costs one to three microseconds at the end of a launch. A longer range costs only its
//   pages, while the others leave it their bandwidth;
// * if there is a block for each item, and the longest item is at most `uneven_pages` longer than an even range, every
//   block takes one item;
// * a range has at least `least_pages` pages, if there are so many.
//
//   lengths [B] int32     keys of each sequence, the new token counted; 0: padding, not on the line. B is at most 1024
//   rows [B] int32        of the page tables
//   prefixes [B] int4     or null: (pages at its beginning that are not on the line, first prefix part, number of them,
//                         0); the new token's page is on the line
//   sequences [B] int4    result: (tokens on the line, place of its first page on the line in the page tables, first
//                         prefix part, prefix parts)
//   starts [2 blocks * warps] int4: at 2 w (sequence, item, page, number of pages) of warp w, then its entry of
//                         `sequences`. Sequence -1: the whole block is idle
//   first_parts [blocks] int32: where the first block of the item that a block begins in puts its part of it: 2 block if
//                         it begins with the item, else 2 block + 1. Not written for idle blocks
// One block of 1024 threads; at most MAX_BLOCKS blocks are given work. Some 2 us.
#include "common.cuh"

// Where the range of warp `warp` begins when a block's warps share `pages`: they differ by a page, and none is empty
// before one that is not
__device__ __forceinline__ int warp_begin(int warp, int warps, int pages) {
  return warp * (pages / warps) + min(warp, pages % warps);
}

constexpr int MAX_BLOCKS = 1024;

// The last of `count` places that is at or before `x`. places[0] is; they ascend
__device__ __forceinline__ int last_before(const int* places, int count, int x) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) >> 1;
    if (places[middle] <= x) low = middle;
    else high = middle;
  }
  return low;
}

extern "C" __global__ void __launch_bounds__(1024)
decode_plan(const int* lengths, const int* rows, const int4* prefixes, int B, int items, int blocks, int warps,
            int least_pages, int uneven_pages, int snap_pages, int max_pages, int4* starts,
            int* first_parts, int4* sequences) {
  __shared__ int warp_totals[32], first[1025], begins[MAX_BLOCKS + 1];  // on the line: of sequences, of blocks
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  int4 mine = make_int4(0, 0, 0, 0);
  if (t < B && lengths[t]) {
    const int4 prefix = prefixes ? prefixes[t] : make_int4(0, 0, 0, 0);
    mine = make_int4(lengths[t] - prefix.x * PAGE_SIZE, rows[t] * max_pages + prefix.x, prefix.y, prefix.z);
  }
  if (t < B) sequences[t] = mine;
  int sum = pages_of(mine.x) * items;
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const int other = __shfl_up_sync(ALL_LANES, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == 31) warp_totals[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    int total = warp_totals[lane];
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const int other = __shfl_up_sync(ALL_LANES, total, offset);
      if (lane >= offset) total += other;
    }
    warp_totals[lane] = total;
  }
  __syncthreads();
  if (warp) sum += warp_totals[warp - 1];
  const int total = warp_totals[31];
  const int quota = max((total + blocks - 1) / blocks, least_pages), snap = min(snap_pages, quota / 2);
  if (t < B) first[t + 1] = sum;
  if (t == 0) first[0] = 0;
  const bool is_long = __syncthreads_or(pages_of(mine.x) > quota + uneven_pages);
  const bool item_a_block = B * items <= blocks && !is_long;
  auto pages_of_sequence = [&](int sequence) { return (first[sequence + 1] - first[sequence]) / items; };
  for (int block = t; block <= blocks; block += 1024) {
    int line;
    if (item_a_block) {
      const int sequence = min(block / items, B);
      line = first[sequence];
      if (sequence < B) line += (block - sequence * items) * pages_of_sequence(sequence);
    } else {
      line = min(block * quota, total);  // blocks * quota < 2^31: total is
      if (line < total) {
        const int sequence = last_before(first, B, line), pages = pages_of_sequence(sequence);
        const int down = (line - first[sequence]) % pages, up = pages - down;
        if (min(down, up) <= snap) line += down <= up ? -down : up;
      }
    }
    begins[block] = line;
  }
  __syncthreads();
  for (int i = t; i < blocks * warps; i += 1024) {
    const int block = i / warps, warp_of_block = i - block * warps;
    const int begin = begins[block], all = begins[block + 1] - begin;
    const int line = begin + warp_begin(warp_of_block, warps, all);
    const int count = begin + warp_begin(warp_of_block + 1, warps, all) - line;
    if (count == 0) {
      starts[2 * i] = make_int4(all ? 0 : -1, 0, 0, 0);
      continue;
    }
    const int sequence = last_before(first, B, line), pages = pages_of_sequence(sequence);
    const int rest = line - first[sequence];
    starts[2 * i] = make_int4(sequence, rest / pages, rest % pages, count);
    starts[2 * i + 1] = sequences[sequence];  // by a thread of this block, before the barriers
  }
  for (int block = t; block < blocks; block += 1024) {
    const int begin = begins[block];
    if (begin == begins[block + 1]) continue;
    const int sequence = last_before(first, B, begin);
    const int item = begin - (begin - first[sequence]) % pages_of_sequence(sequence);
    const int first_block = last_before(begins, blocks, item);
    first_parts[block] = 2 * first_block + (begins[first_block] == item ? 0 : 1);
  }
}
