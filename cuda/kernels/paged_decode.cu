// paged_decode: attention of one new query token per sequence over its paged keys and values, grouped queries.
//
// Work. All (sequence, item, page) triples lie on one line, in that order; an item is a kv head with up to GP of its
// query heads. The line is cut into equal ranges, one a block, so any raggedness balances to a page; items may be cut:
//
//     line     | seq 0 item 0 | seq 0 item 1 | seq 1 item 0        | ...
//     blocks   |    block 0        |    block 1        |   block 2 ...
//
// The parts of a cut item go to `parts`; the last block to deliver one (a ticket) merges them in their order on the
// line, so two runs of one batch agree bit for bit. Where an item is cut depends on the whole batch: not
// batch-invariant.
//
// decode_plan, once a step for all layers: the prefix sum of pages, and where each block begins. Sequences of length 0
// (padding) cost nothing and their output is not touched. At most 1024 sequences.
//
// paged_decode:
//   q, out [B, H, D] E       token b at q + b * q_stride, out + b * out_stride
//   layer_pool               frame f of this layer at layer_pool + f * frame_stride bytes: [kv head][K, V][blob]
//   page_tables [R, max_pages], rows [B], lengths [B] int32: lengths count the new token; entries past it are not read
//   plan, starts             from decode_plan, for the same lengths and this grid
//   parts [2 grid, GP, D + 4] float32, tickets [B * items] u32: workspace; tickets are 0 before and after
//   scale                    1 / sqrt(D) * log2(e)
// Each warp has its own ring of STAGES pages, runs over every WARPS-th page of the block's range and needs no block
// barrier within an item. On Hopper one thread fetches a page's K and V by one bulk copy; elsewhere 32 lanes by
// cp.async. Bound by bandwidth (4 flop a byte); the tensor cores multiply 16 rows of which GP <= 8 are in use.
//
// Overlap with the kernel before (dependent launch): that one may write q and the sequences' last pages, nothing else
// that is read here; plan, tables and lengths must come from kernels that ended before that one began.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(1024)
decode_plan(const int* lengths, const int* rows, int B, int items, int blocks, int least_pages, int* plan,
            int4* starts) {
  // plan[0] pages on the line, plan[1] pages a block, plan[2 + b] first page of sequence b (b <= B)
  // starts[2 c] (sequence, item, page, pages of the sequence) of block c, starts[2 c + 1].x its row; sequence -1: idle
  __shared__ int warp_totals[32], first[1025];
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  int sum = t < B ? pages_of(lengths[t]) * items : 0;
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
  const int quota = max((total + blocks - 1) / blocks, least_pages);
  if (t < B) first[t + 1] = plan[3 + t] = sum;
  if (t == 0) {
    first[0] = plan[2] = 0;
    plan[0] = total;
    plan[1] = quota;
  }
  __syncthreads();
  for (int block = t; block < blocks; block += 1024) {
    const int line = block * quota;  // blocks * quota < 2^31: total is
    if (line >= total) {
      starts[2 * block] = make_int4(-1, 0, 0, 1);
      continue;
    }
    int low = 0, high = B;  // the last sequence that begins at or before `line`
    while (high - low > 1) {
      const int middle = (low + high) >> 1;
      if (first[middle] <= line) low = middle;
      else high = middle;
    }
    const int pages = (first[low + 1] - first[low]) / items, rest = line - first[low];
    starts[2 * block] = make_int4(low, rest / pages, rest % pages, pages);
    starts[2 * block + 1] = make_int4(rows[low], 0, 0, 0);
  }
}

struct Cursor {  // a place on the work line; item = head * splits + split
  int line, sequence, head, split, page, pages, row;  // head: of keys and values; pages: of the sequence
};

struct Line {  // what moving a cursor needs
  const int* lengths;
  const int* rows;
  int kv_heads, splits, end;

  __device__ __forceinline__ void advance(Cursor& c, int n) const {
    c.line += n;
    if (c.line >= end) return;
    c.page += n;
    while (c.page >= c.pages) {
      c.page -= c.pages;
      if (++c.split < splits) continue;
      c.split = 0;
      if (++c.head < kv_heads) continue;
      c.head = 0;
      do {
        c.pages = pages_of(lengths[++c.sequence]);
      } while (c.pages == 0);
      c.row = rows[c.sequence];
    }
  }
};

// One part of an item: unnormalized output, and per query head maximum (in log2 units) and sum. In shared memory the
// parts of a block's warps, in global memory those of blocks. Rows are padded so that 8 rows of float2 meet no bank
// twice.
template <int D> constexpr int PART_ROW = D + 4;

template <class E, int D>
__device__ __forceinline__ void store_output(E* target, const float (&x)[D / 32], float factor) {
  const u32 low = pack2<E>(x[0] * factor, x[1] * factor);
  if constexpr (D == 128) *(uint2*)target = make_uint2(low, pack2<E>(x[2] * factor, x[3] * factor));
  else *(u32*)target = low;
}
template <int D> __device__ __forceinline__ void load_part(const float* source, float (&x)[D / 32]) {
  if constexpr (D == 128) {
    const float4 v = __ldcg((const float4*)source);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  } else {
    const float2 v = __ldcg((const float2*)source);
    x[0] = v.x, x[1] = v.y;
  }
}

// Merge the parts of one query head of a cut item and write its output: one warp. part(k): the k-th of n, PART_ROW
// floats
template <class E, int D, class Part> __device__ __forceinline__ void merge_parts(E* out, int n, int lane, Part part) {
  constexpr int V = D / 32;
  float top = NEGATIVE_INFINITY, sum = 0.f, x[V] = {};
  for (int k = lane; k < n; k += 32) top = fmaxf(top, __ldcg(part(k) + D));
  top = warp_max(top);
  for (int k0 = 0; k0 < n; k0 += 32) {
    float weight = 0.f;
    if (k0 + lane < n) {
      const float2 top_sum = __ldcg((const float2*)(part(k0 + lane) + D));
      weight = exp2_fast(top_sum.x - top);
      sum += weight * top_sum.y;
    }
    const int count = min(n - k0, 32);
#pragma unroll 8
    for (int k = 0; k < count; ++k) {
      float v[V];
      load_part<D>(part(k0 + k) + lane * V, v);
      const float w = __shfl_sync(ALL_LANES, weight, k);
#pragma unroll
      for (int i = 0; i < V; ++i) x[i] += w * v[i];
    }
  }
  store_output<E, D>(out + lane * V, x, 1.f / warp_sum(sum));
}

// The state of one warp over one item: 8 rows (query heads) of attention, in tensor core fragments
template <class E, int D> struct Attention {
  u32 q[D / 16][2];
  float o[D / 8][4];  // the tensor core's rows 8-15 (o[.][2], o[.][3]) stay 0
  float top, sum;     // of row lane / 4, in units of log2

  __device__ __forceinline__ void begin(const u32 (&query)[D / 16][2]) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) q[k][0] = query[k][0], q[k][1] = query[k][1];
#pragma unroll
    for (int i = 0; i < D / 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
    top = NEGATIVE_INFINITY;
    sum = 0.f;
  }

  // Attend to one page: keys and values are blobs in shared memory, of which the first `tokens` tokens count
  __device__ __forceinline__ void attend(u32 keys, u32 values, int tokens, float scale, int lane) {
    const int matrix = lane >> 3, matrix_row = lane & 7, column = (lane & 3) * 2;
    float low[4] = {}, high[4] = {};  // scores of tokens 0-7 and 8-15
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      u32 b[4];
      load_matrices(b, keys + blob_offset<D>((matrix >> 1) * 8 + matrix_row, k * 2 + (matrix & 1)));
      mma<E>(low, q[k][0], 0u, q[k][1], 0u, b[0], b[1]);
      mma<E>(high, q[k][0], 0u, q[k][1], 0u, b[2], b[3]);
    }
    float x[4] = {low[0] * scale, low[1] * scale, high[0] * scale, high[1] * scale};
    if (tokens < PAGE_SIZE) {
      if (column >= tokens) x[0] = NEGATIVE_INFINITY;
      if (column + 1 >= tokens) x[1] = NEGATIVE_INFINITY;
      if (column + 8 >= tokens) x[2] = NEGATIVE_INFINITY;
      if (column + 9 >= tokens) x[3] = NEGATIVE_INFINITY;
    }
    const float page_top = warp_max<4>(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])));
    if (__any_sync(ALL_LANES, page_top > top)) {  // rarely, after the first pages
      const float new_top = fmaxf(top, page_top), factor = exp2_fast(top - new_top);
      top = new_top;
      sum *= factor;
#pragma unroll
      for (int i = 0; i < D / 8; ++i) o[i][0] *= factor, o[i][1] *= factor;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = exp2_fast(x[i] - top);
    sum += (x[0] + x[1]) + (x[2] + x[3]);
    const u32 p0 = pack2<E>(x[0], x[1]), p1 = pack2<E>(x[2], x[3]);
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
      u32 b[4];
      load_matrices_transposed(b, values + blob_offset<D>((matrix & 1) * 8 + matrix_row, j * 2 + (matrix >> 1)));
      mma<E>(o[2 * j], p0, 0u, p1, 0u, b[0], b[1]);
      mma<E>(o[2 * j + 1], p0, 0u, p1, 0u, b[2], b[3]);
    }
  }
};

template <class E, int D, int GP, int WARPS, int STAGES>
__global__ void __launch_bounds__(WARPS * 32) paged_decode(
    const E* q, E* out, const char* layer_pool, const int* __restrict__ page_tables, const int* __restrict__ rows,
    const int* __restrict__ lengths, const int* __restrict__ plan, const int4* __restrict__ starts, float* parts,
    u32* tickets, float scale, int kv_heads, int splits, int group, int per_item, int max_pages, i64 q_stride,
    i64 out_stride, i64 frame_stride) {
  // group = H / KH query heads share a kv head; an item takes per_item = ceil(group / splits) <= GP of them
  constexpr int PAGE = PAGE_BYTES<E, D>, STAGE = 2 * PAGE, ROW = PART_ROW<D>, V = D / 32;
  DYNAMIC_SHARED(shared);  // [WARPS][STAGES] pages, then [WARPS][GP] part rows
  __shared__ float tops[WARPS][8], sums[WARPS][8];
  __shared__ u32 ticket;
  allow_next_kernel();
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int4 start = starts[2 * blockIdx.x];
  const int start_row = starts[2 * blockIdx.x + 1].x;
  const int total = plan[0], quota = plan[1];
  const u32 ring = shared_address(shared) + warp * STAGES * STAGE;
  float* const block_parts = (float*)(shared + WARPS * STAGES * STAGE);
#ifdef HOPPER
  __shared__ __align__(8) u64 barriers[WARPS][STAGES];
  if (lane == 0) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s) barrier_init(shared_address(&barriers[warp][s]), 1);
    barrier_init_fence();
  }
  __syncwarp();
#endif
  if (start.x < 0) {
    wait_for_previous_kernel();
    return;
  }
  const int first_line = blockIdx.x * quota;
  const Line line = {lengths, rows, kv_heads, splits, min(first_line + quota, total)};

  // ---- the ring: `next` runs STAGES pages of this warp ahead; its frame is looked up one page before it is fetched
  auto fetch = [&](const Cursor& c, int frame, int stage) {
    const char* source = layer_pool + frame * frame_stride + (i64)c.head * STAGE;
    const u32 target = ring + stage * STAGE;
#ifdef HOPPER
    if (lane == 0) {
      const u32 barrier = shared_address(&barriers[warp][stage]);
      barrier_arrive_expecting(barrier, STAGE);
      bulk_copy(target, source, STAGE, barrier);
    }
#else
#pragma unroll
    for (int i = lane * 16; i < STAGE; i += 512) async_copy_16(target + i, source + i);
#endif
  };
  auto commit = [] {  // every stage is one group, also an empty one
#ifndef HOPPER
    async_copy_commit();
#endif
  };
  auto frame_of = [&](const Cursor& c) { return c.line < line.end ? page_tables[(i64)c.row * max_pages + c.page] : 0; };

  const int start_head = start.y / splits;
  Cursor current = {first_line, start.x, start_head, start.y - start_head * splits, start.z, start.w, start_row};
  Cursor next = current;
  line.advance(next, warp);
  Cursor ahead[STAGES];
  int frames[STAGES];
#pragma unroll
  for (int s = 0; s < STAGES; ++s) {  // all look-ups are under way before the first fetch waits for one
    ahead[s] = next;
    frames[s] = frame_of(next);
    line.advance(next, WARPS);
  }
  int next_frame = frame_of(next);
#pragma unroll
  for (int s = 0; s < STAGES; ++s) {
    if (ahead[s].line < line.end) {
      if (ahead[s].page + 1 == ahead[s].pages) wait_for_previous_kernel();  // it may be writing this page
      fetch(ahead[s], frames[s], s);
    }
    commit();
  }
  wait_for_previous_kernel();

  const int row = lane >> 2, pair = lane & 3;
  u32 query[D / 16][2];  // of the next item: loaded before the merge of this one
  auto load_query = [&](const Cursor& c) {
    const int member = c.split * per_item + row;  // of the group
    const bool used = row < per_item && member < group;
    const u32* source = (const u32*)(q + c.sequence * q_stride + (c.head * group + member) * D);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      query[k][0] = used ? load_ordered(source + k * 8 + pair) : 0u;
      query[k][1] = used ? load_ordered(source + k * 8 + 4 + pair) : 0u;
    }
  };
  load_query(current);

  int stage = 0, parity = 0, page_line = first_line + warp;  // page_line: this warp's next page
  Attention<E, D> attention;
  for (int segment = first_line; segment < line.end;) {  // a segment is what the block holds of one item
    const int length = lengths[current.sequence];
    const int segment_end = min(segment + current.pages - current.page, line.end);
    attention.begin(query);
    for (; page_line < segment_end; page_line += WARPS) {
#ifdef HOPPER
      barrier_wait(shared_address(&barriers[warp][stage]), parity);
#else
      async_copy_wait<STAGES - 1>();
      __syncwarp();
#endif
      const u32 page = ring + stage * STAGE;
      attention.attend(page, page + PAGE, length - (current.page + page_line - segment) * PAGE_SIZE, scale, lane);
      __syncwarp();  // all lanes have read the stage
      if (next.line < line.end) {
        fetch(next, next_frame, stage);
        line.advance(next, WARPS);
        next_frame = frame_of(next);
      }
      commit();
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    Cursor following = current;
    if (segment_end < line.end) {
      line.advance(following, segment_end - segment);
      load_query(following);
    }

    // ---- the block's warps join their parts
    const float warp_total = warp_sum<4>(attention.sum);
    if (pair == 0) tops[warp][row] = attention.top, sums[warp][row] = warp_total;
    if (row < GP) {
      float* target = block_parts + (warp * GP + row) * ROW + pair * 2;
#pragma unroll
      for (int i = 0; i < D / 8; ++i) *(float2*)(target + i * 8) = make_float2(attention.o[i][0], attention.o[i][1]);
    }
    __syncthreads();
    const bool whole = current.page == 0 && segment + current.pages == segment_end;
    const int part = 2 * blockIdx.x + (segment == first_line ? 0 : 1);  // a block holds at most two cut items: its ends
    const int member = current.split * per_item, heads = min(per_item, group - member);
    E* const item_out = out + current.sequence * out_stride + (current.head * group + member) * D;
    for (int i = tid; i < heads * 32; i += WARPS * 32) {
      const int r = i >> 5, d = (i & 31) * V;
      float top = tops[0][r], sum = 0.f, x[V] = {};
#pragma unroll
      for (int w = 1; w < WARPS; ++w) top = fmaxf(top, tops[w][r]);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float weight = exp2_fast(tops[w][r] - top);
        const float* source = block_parts + (w * GP + r) * ROW + d;
        sum += weight * sums[w][r];
#pragma unroll
        for (int v = 0; v < V; ++v) x[v] += weight * source[v];
      }
      if (whole) {
        store_output<E, D>(item_out + r * D + d, x, 1.f / sum);
      } else {
        float* target = parts + ((i64)part * GP + r) * ROW;
#pragma unroll
        for (int v = 0; v < V; v += 2) *(float2*)(target + d + v) = make_float2(x[v], x[v + 1]);
        if (d == 0) *(float2*)(target + D) = make_float2(top, sum);
      }
    }
    if (!whole) {  // ---- the last block that holds a part of this item joins the blocks' parts
      const int item = current.head * splits + current.split;
      const int item_line = plan[2 + current.sequence] + item * current.pages;
      const int first_block = item_line / quota, last_block = (item_line + current.pages - 1) / quota;
      u32* const counter = tickets + current.sequence * kv_heads * splits + item;
      __threadfence();
      __syncthreads();
      if (tid == 0) ticket = atomicAdd(counter, 1u);
      __syncthreads();
      if (ticket == (u32)(last_block - first_block)) {
        __threadfence();
        // the item begins inside its first block (then it is that block's second part) or at its edge
        const int first_part = 2 * first_block + (item_line == first_block * quota ? 0 : 1);
        for (int r = warp; r < heads; r += WARPS) {
          merge_parts<E, D>(item_out + r * D, last_block - first_block + 1, lane, [&](int k) {
            return parts + ((i64)(k == 0 ? first_part : 2 * (first_block + k)) * GP + r) * ROW;
          });
        }
        if (tid == 0) *counter = 0;  // for the next launch
      }
    }
    segment = segment_end;
    current = following;
    __syncthreads();  // the parts in shared memory are read before the next item's are written
  }
}
