// decode_plan: divides the work of paged_decode.cu, its line of (sequence, item, page), among blocks and their warps:
// once a step, for all layers. Either
//
// * every item has blocks of its own, with equal ranges to a page: where there are no more items than blocks, and one
//   length of a range, at most `even_percent` longer than what all blocks alike would have, gives all of them enough; or
//   one block each, if the longest item is at most `uneven_pages` longer than that;
//
//     line     |        item 0       |        item 1       |    item 2    |
//     blocks   |   0  |   1  |   2   |   3  |   4  |   5   |   6  |   7   |   some are idle
//
// * or blocks have equal ranges; but a block's range begins at the edge of an item if one is at most `snap_pages` away,
//   and has at least `least_pages` pages, if there are so many.
//
// Either way what is merged between blocks, which costs one to three microseconds at the end of a launch, is little. A
// longer range costs only its pages, while the others leave it their bandwidth. The warps of a block have equal ranges, to
// a page.
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

// Where the k-th of `n` equal parts of `pages` begins: they differ by a page, and none is empty before one that is not
__device__ __forceinline__ int part_begin(int k, int n, int pages) { return k * (pages / n) + min(k, pages % n); }

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
            int least_pages, int even_percent, int uneven_pages, int snap_pages, int max_pages, int4* starts,
            int* first_parts, int4* sequences) {
  __shared__ int warp_totals[32];
  __shared__ int first[1025], begins[MAX_BLOCKS + 1];  // on the line: of sequences, of blocks
  __shared__ int first_block[1025];                    // of sequences whose items have blocks of their own
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  int4 mine = make_int4(0, 0, 0, 0);
  if (t < B && lengths[t]) {
    const int4 prefix = prefixes ? prefixes[t] : make_int4(0, 0, 0, 0);
    mine = make_int4(lengths[t] - prefix.x * PAGE_SIZE, rows[t] * max_pages + prefix.x, prefix.y, prefix.z);
  }
  if (t < B) sequences[t] = mine;
  auto sum_up_to = [&](int sum) {  // of all threads up to this one; the total is then in warp_totals[31]
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
    return warp ? sum + warp_totals[warp - 1] : sum;
  };
  const int my_pages = pages_of(mine.x), line_end = sum_up_to(my_pages * items), total = warp_totals[31];
  const int quota = max((total + blocks - 1) / blocks, least_pages), snap = min(snap_pages, quota / 2);
  if (t < B) first[t + 1] = line_end;
  if (t == 0) first[0] = first_block[0] = 0;
  const bool is_long = __syncthreads_or(my_pages > quota + uneven_pages);
  auto pages_of_sequence = [&](int sequence) { return (first[sequence + 1] - first[sequence]) / items; };

  int own = 0;  // the length of a range with which all items have enough blocks of their own; 0: there is none
  if (B * items <= blocks && !is_long) own = quota + uneven_pages;
  if (B * items <= blocks && is_long) {  // every warp tries one: the first with which they have
    const int length = quota + quota * even_percent / 100 * warp / 31;
    int wanted = 0;
    for (int sequence = lane; sequence < B; sequence += 32) {
      wanted += (pages_of_sequence(sequence) + length - 1) / length * items;
    }
    wanted = warp_sum(wanted);
    if (lane == 0) warp_totals[warp] = wanted <= blocks ? length : 0;
    __syncthreads();
    const int found = warp_totals[lane];
    const u32 enough = __ballot_sync(ALL_LANES, found > 0);
    if (enough) own = __shfl_sync(ALL_LANES, found, __ffs(enough) - 1);
    __syncthreads();
  }
  if (own) {
    const int end = sum_up_to((my_pages + own - 1) / own * items);
    if (t < B) first_block[t + 1] = end;
    __syncthreads();
  }
  for (int block = t; block <= blocks; block += 1024) {
    int line = total;
    if (own) {
      if (block < first_block[B]) {
        const int sequence = last_before(first_block, B, block), pages = pages_of_sequence(sequence);
        const int n = (first_block[sequence + 1] - first_block[sequence]) / items;
        const int place = block - first_block[sequence], item = place / n;
        line = first[sequence] + item * pages + part_begin(place - item * n, n, pages);
      }
    } else if (block * quota < total) {  // blocks * quota < 2^31: total is
      line = block * quota;
      const int sequence = last_before(first, B, line), pages = pages_of_sequence(sequence);
      const int down = (line - first[sequence]) % pages, up = pages - down;
      if (min(down, up) <= snap) line += down <= up ? -down : up;
    }
    begins[block] = line;
  }
  __syncthreads();
  for (int i = t; i < blocks * warps; i += 1024) {
    const int block = i / warps, warp_of_block = i - block * warps;
    const int begin = begins[block], all = begins[block + 1] - begin;
    const int line = begin + part_begin(warp_of_block, warps, all);
    const int count = begin + part_begin(warp_of_block + 1, warps, all) - line;
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
    const int holder = last_before(begins, blocks, item);
    first_parts[block] = 2 * holder + (begins[holder] == item ? 0 : 1);
  }
}
