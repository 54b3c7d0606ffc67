// paged_decode: attention of one new query token per sequence over its paged keys and values, grouped queries.
//
// Work. All (sequence, item, page) triples lie on one line, in that order; an item is a kv head with up to GP of its
// query heads. The line is cut into equal ranges, one a block, and a block's range among its warps, so any raggedness
// balances to a page; items may be cut:
//
//     line     | seq 0 item 0 | seq 0 item 1 | seq 1 item 0        | ...
//     warps    |  0  |  1  |  2  |  3  |  0  |  1  |  2  |  3  |  0 ...
//     blocks   |        block 0        |        block 1        |   block 2 ...
//
// A warp runs through its range alone and writes an item that lies in it whole; nobody waits for anybody until the end
// of the range. Then a block joins the parts of each item that its warps have cut, once; the parts of an item that is
// cut between blocks go to `parts`, and the block that holds the end of the item merges them in their order on the line,
// so two runs of one batch agree bit for bit. Where an item is cut depends on the whole batch: not batch-invariant.
//
// A word of `parts` that is UNWRITTEN has not come yet, so no flag, fence or atomic is needed; whoever has read a word
// takes it away. Blocks wait for blocks of lower numbers only: those have begun before, and wait for nobody else.
// Merging still costs one to three microseconds at the end of a launch: decode_plan.cu, which divides the line, avoids
// it where it can.
//
// Sequences may begin with pages whose attention was computed before, for many of them at once (shared_prefix in
// paged_prefill_hopper.cu): those are not on the line, and the warp that holds the first page after them begins with
// their parts in place of nothing.
//
// Sequences of length 0 (padding) cost nothing and their output is not touched.
//
// paged_decode:
//   q, out [B, H, D] E       token b at q + b * q_stride, out + b * out_stride
//   layer_pool               frame f of this layer at layer_pool + f * frame_stride bytes: [kv head][K, V][blob]
//   page_tables [R, max_pages] int32 entries (common.cuh): those past a sequence's last page are not read
//   starts, first_parts, sequences  what decode_plan wrote, for this grid
//   prefix_parts [any, H, D + 8] float32: one row of a part for each query head, its dims in the fragments' order
//   parts [2 grid, GP, D + 4] float32: workspace, UNWRITTEN before and after
//   scale                    1 / sqrt(D) * log2(e)
// Each warp has its own ring of STAGES pages. On Hopper one thread fetches a page's K and V by one bulk copy; elsewhere
// 32 lanes by cp.async. Bound by bandwidth (4 flop a byte).
//
// A page that one sequence alone reads is read once a launch, so it makes way in the L2 for those that several read,
// for the queries and for what blocks hand over: its table entry lacks the bit SHARED. One that several read must not:
// it would be gone before the next of them comes (without the bit 16 % slower, with it 3 % faster: docs/decisions/0013).
//
// Overlap with the kernel before (dependent launch): that one may write q, prefix parts and the sequences' last pages,
// nothing else that is read here; plan and tables must come from kernels that ended before that one began. The
// kernel after is let in at once; by long ranges not before a warp's last page is under way, so that it takes no
// bandwidth from the blocks that come last.
#include "common.cuh"

struct Cursor {  // a place on the work line, counted from where the warp begins; item = head * splits + split
  int line, sequence, head, split, page;  // head: of keys and values; page: of those on the line
  int4 facts;                             // of the sequence, as decode_plan writes them
  __device__ __forceinline__ int pages() const { return pages_of(facts.x); }
};

struct Line {  // what moving a cursor needs
  const int4* sequences;
  int kv_heads, splits, end;

  // n: not past the end of the cursor's item
  __device__ __forceinline__ void advance(Cursor& c, int n) const {
    c.line += n;
    if (c.line >= end) return;
    c.page += n;
    if (c.page < c.pages()) return;
    c.page = 0;
    if (++c.split < splits) return;
    c.split = 0;
    if (++c.head < kv_heads) return;
    c.head = 0;
    do {
      c.facts = sequences[++c.sequence];
    } while (c.facts.x == 0);
  }
};

// One part of an item: unnormalized output, and per query head maximum (in log2 units) and sum, at [D] and [D + 1]. In
// shared memory the parts of a block's warps, in global memory those of blocks, and of shared prefixes. Rows are padded
// so that a warp that stores fragments meets no bank twice.
template <int D> constexpr int PART_ROW = D + 4;

template <class E, int D>
__device__ __forceinline__ void store_output(E* target, const float (&x)[D / 32], float factor) {
  const u32 low = pack2<E>(x[0] * factor, x[1] * factor);
  if constexpr (D == 128) *(uint2*)target = make_uint2(low, pack2<E>(x[2] * factor, x[3] * factor));
  else *(u32*)target = low;
}
// A lane's dims of a part in global memory
template <int D> __device__ __forceinline__ void load_part(const float* source, float (&x)[D / 32]) {
  if constexpr (D == 128) {
    const float4 v = load_handed((const float4*)source);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  } else {
    const float2 v = load_handed((const float2*)source);
    x[0] = v.x, x[1] = v.y;
  }
}
template <int D> __device__ __forceinline__ void store_part(float* target, const float (&x)[D / 32]) {
  if constexpr (D == 128) hand((float4*)target, make_float4(x[0], x[1], x[2], x[3]));
  else hand((float2*)target, make_float2(x[0], x[1]));
}

// Merge the parts of one query head of an item that is cut between blocks, as they come, and write its output: one warp.
// part(k): the k-th of n, PART_ROW floats
template <class E, int D, class Part> __device__ __forceinline__ void merge_parts(E* out, int n, int lane, Part part) {
  constexpr int V = D / 32, AT_ONCE = 8;
  float top = NEGATIVE_INFINITY, sum = 0.f, x[V] = {}, nothing[V];
#pragma unroll
  for (int d = 0; d < V; ++d) nothing[d] = UNWRITTEN;
  for (int k0 = 0; k0 < n; k0 += AT_ONCE) {
    float v[AT_ONCE][V], new_top = top;
    float2 top_sum[AT_ONCE];
    bool is_missing;
    do {
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {  // past the end, the last one once more
        load_part<D>(part(min(k0 + i, n - 1)) + lane * V, v[i]);
        top_sum[i] = load_handed((const float2*)(part(min(k0 + i, n - 1)) + D));
      }
      is_missing = false;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        is_missing |= is_unwritten(top_sum[i].x) || is_unwritten(top_sum[i].y);
#pragma unroll
        for (int d = 0; d < V; ++d) is_missing |= is_unwritten(v[i][d]);
      }
    } while (__any_sync(ALL_LANES, is_missing));
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) new_top = fmaxf(new_top, top_sum[i].x);
    const float factor = exp2_fast(top - new_top);
    sum *= factor;
#pragma unroll
    for (int d = 0; d < V; ++d) x[d] *= factor;
    top = new_top;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (k0 + i >= n) continue;
      const float weight = exp2_fast(top_sum[i].x - top);
      sum += weight * top_sum[i].y;
#pragma unroll
      for (int d = 0; d < V; ++d) x[d] += weight * v[i][d];
      store_part<D>(part(k0 + i) + lane * V, nothing);
      if (lane == 0) hand((float2*)(part(k0 + i) + D), make_float2(UNWRITTEN, UNWRITTEN));
    }
  }
  store_output<E, D>(out + lane * V, x, 1.f / sum);
}

// The state of one warp over one item: attention of 8 rows (query heads), in tensor core fragments. Scores and output
// are computed transposed, keys x queries and dims x queries, since the tensor cores' other side takes 8 columns: none
// is wasted. This lane has queries 2 (lane % 4) and the next one; of 16 tokens or dims it has lane / 4 and that + 8.
template <class E, int D> struct Attention {
  u32 q[D / 16][2];
  float o[D / 16][4];
  float top[2], sum[2];  // by query, in units of log2; the sums of the lanes that have the same query belong together

  __device__ __forceinline__ void begin(const u32 (&query)[D / 16][2]) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) q[k][0] = query[k][0], q[k][1] = query[k][1];
#pragma unroll
    for (int i = 0; i < D / 16; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
    top[0] = top[1] = NEGATIVE_INFINITY;
    sum[0] = sum[1] = 0.f;
  }

  // Query i's part of chunk j: dim 8 j + lane / 4
  __device__ __forceinline__ float& output(int j, int i) { return o[j >> 1][(j & 1) * 2 + i]; }

  // After begin(): go on from n parts of earlier tokens. first: of the first part, the row of each of the two queries;
  // those of the others are `stride` floats apart
  __device__ __forceinline__ void resume(const float* const (&first)[2], int n, int stride, int lane) {
    constexpr int AT_ONCE = 4;  // parts whose numbers are on their way, of one query
    const int mine = lane >> 2;  // of 8 parts, the one whose weight this lane finds
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      for (int k = mine; k < n; k += 8) top[i] = fmaxf(top[i], __ldcg(first[i] + k * stride + D));
#pragma unroll
      for (int offset = 4; offset < 32; offset <<= 1) {
        top[i] = fmaxf(top[i], __shfl_xor_sync(ALL_LANES, top[i], offset));
      }
    }
    for (int k0 = 0; k0 < n; k0 += 8) {
      float weight[2] = {};
      if (k0 + mine < n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 top_sum = __ldcg((const float2*)(first[i] + (k0 + mine) * stride + D));
          weight[i] = exp2_fast(top_sum.x - top[i]);
          sum[i] += weight[i] * top_sum.y;
        }
      }
      for (int k1 = 0; k1 < 8 && k0 + k1 < n; k1 += AT_ONCE) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float4 v[AT_ONCE][D / 32];
#pragma unroll
          for (int k = 0; k < AT_ONCE; ++k) {
            const float* const part = first[i] + (k0 + k1 + k) * stride;
            const bool is_there = k0 + k1 + k < n;
#pragma unroll
            for (int j = 0; j < D / 32; ++j) {
              v[k][j] = make_float4(0.f, 0.f, 0.f, 0.f);
              if (is_there) v[k][j] = __ldcg((const float4*)(part + fragment_place(lane >> 2, 4 * j)));
            }
          }
#pragma unroll
          for (int k = 0; k < AT_ONCE; ++k) {
            const float w = __shfl_sync(ALL_LANES, weight[i], (k1 + k) * 4 + (lane & 3));  // 0 past the end
#pragma unroll
            for (int j = 0; j < D / 32; ++j) {
              output(4 * j, i) += w * v[k][j].x;
              output(4 * j + 1, i) += w * v[k][j].y;
              output(4 * j + 2, i) += w * v[k][j].z;
              output(4 * j + 3, i) += w * v[k][j].w;
            }
          }
        }
      }
    }
  }

  // Attend to one page: keys and values are blobs in shared memory, of which the first `tokens` tokens count
  __device__ __forceinline__ void attend(u32 keys, u32 values, int tokens, float scale, int lane) {
    const int matrix = lane >> 3, matrix_row = lane & 7;
    float x[4] = {}, odd[4] = {};  // scores; two sums, so that each product need not wait for the one before
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      u32 a[4];
      load_matrices(a, keys + blob_offset<D>((matrix & 1) * 8 + matrix_row, k * 2 + (matrix >> 1)));
      mma<E>(k & 1 ? odd : x, a[0], a[1], a[2], a[3], q[k][0], q[k][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = (x[i] + odd[i]) * scale;
    if (tokens < PAGE_SIZE) {
      if ((lane >> 2) >= tokens) x[0] = x[1] = NEGATIVE_INFINITY;
      if ((lane >> 2) + 8 >= tokens) x[2] = x[3] = NEGATIVE_INFINITY;
    }
    float page_top[2] = {fmaxf(x[0], x[2]), fmaxf(x[1], x[3])};
    if (__any_sync(ALL_LANES, page_top[0] > top[0] || page_top[1] > top[1])) {  // rarely, after the first pages
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int offset = 4; offset < 32; offset <<= 1) {
          page_top[i] = fmaxf(page_top[i], __shfl_xor_sync(ALL_LANES, page_top[i], offset));
        }
        const float new_top = fmaxf(top[i], page_top[i]), factor = exp2_fast(top[i] - new_top);
        top[i] = new_top;
        sum[i] *= factor;
#pragma unroll
        for (int j = 0; j < D / 8; ++j) output(j, i) *= factor;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = exp2_fast(x[i] - top[i & 1]);
    sum[0] += x[0] + x[2];
    sum[1] += x[1] + x[3];
    const u32 p0 = transpose_matrix(pack2<E>(x[0], x[1])), p1 = transpose_matrix(pack2<E>(x[2], x[3]));
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
      u32 a[4];
      load_matrices_transposed(a, values + blob_offset<D>((matrix >> 1) * 8 + matrix_row, j * 2 + (matrix & 1)));
      mma<E>(o[j], a[0], a[1], a[2], a[3], p0, p1);
    }
  }

  // The whole row's sums, in every lane
  __device__ __forceinline__ void total(float (&sums)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[i] = sum[i];
#pragma unroll
      for (int offset = 4; offset < 32; offset <<= 1) sums[i] += __shfl_xor_sync(ALL_LANES, sums[i], offset);
    }
  }

  // Write the result of the first `heads` rows, D numbers each, one after the other
  __device__ __forceinline__ void write(E* out, int heads, int lane) {
    float sums[2];
    total(sums);
    const float factor[2] = {1.f / sums[0], 1.f / sums[1]};
#pragma unroll
    for (int j = 0; j < D / 8; j += 4) {  // 32 dims of a row: every lane stores 8 of them
      u32 word[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        word[k] = transpose_matrix(pack2<E>(output(j + k, 0) * factor[0], output(j + k, 1) * factor[1]));
      }
      const uint4 chunk = transpose_quad(word[0], word[1], word[2], word[3], lane);
      if ((lane >> 2) < heads) *(uint4*)(out + (lane >> 2) * D + (j + (lane & 3)) * 8) = chunk;
    }
  }

  // Write the first ROWS rows as a part, to shared memory
  template <int ROWS> __device__ __forceinline__ void write_part(float* part, int lane) {
    float sums[2];
    total(sums);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = (lane & 3) * 2 + i;
      if (row >= ROWS) continue;
      float* const target = part + row * PART_ROW<D>;
#pragma unroll
      for (int j = 0; j < D / 8; ++j) target[j * 8 + (lane >> 2)] = output(j, i);
      if (lane < 4) *(float2*)(target + D) = make_float2(top[i], sums[i]);
    }
  }
};

// A warp's range is long from here on: 24 pages of 128 dims. Measured: docs/decisions/0013
constexpr int LONG_BYTES = 192 << 10;

// BLOCKS: that a multiprocessor holds; without this bound ptxas aims for more, and spills
template <class E, int D, int GP, int WARPS, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS) paged_decode(
    const E* q, E* out, const char* layer_pool, const int* __restrict__ page_tables, const int4* __restrict__ starts,
    const int* __restrict__ first_parts, const int4* __restrict__ sequences, const float* prefix_parts, float* parts,
    float scale, int kv_heads, int splits, int group, int per_item, i64 q_stride, i64 out_stride, i64 frame_stride) {
  // group = H / KH query heads share a kv head; an item takes per_item = ceil(group / splits) <= GP of them
  constexpr int PAGE = PAGE_BYTES<E, D>, STAGE = 2 * PAGE, ROW = PART_ROW<D>, V = D / 32;
  static_assert(GP * ROW * 4 <= STAGES * STAGE, "a warp's last part lies in its ring");
  static_assert(WARPS >= 2 && WARPS <= 16, "a lane for each part of a block, a warp for each item that it has cut");
  DYNAMIC_SHARED(shared);  // [WARPS][STAGES] pages, then [WARPS][GP] part rows
  // of a warp's parts: (sequence, item, first page, pages behind); sequence -1: none
  __shared__ __align__(16) int4 cuts[WARPS][2];
  __shared__ int first_part;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int4 start = starts[2 * (blockIdx.x * WARPS + warp)];
  const int4 start_facts = starts[2 * (blockIdx.x * WARPS + warp) + 1];
  const int my_first_part = first_parts[blockIdx.x];
  const u32 ring = shared_address(shared) + warp * STAGES * STAGE;
  // the part that begins a warp's range has its own place; the one that ends it comes when the ring is empty
  auto part_of = [&](int w, int which) {
    return (float*)(which ? shared + w * STAGES * STAGE : shared + WARPS * STAGES * STAGE + w * GP * ROW * 4);
  };
#ifdef HOPPER
  const u64 read_once = read_once_policy();
  __shared__ __align__(8) u64 barriers[WARPS][STAGES];
  if (lane == 0) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s) barrier_init(shared_address(&barriers[warp][s]), 1);
    barrier_init_fence();
  }
#endif
  if (lane < 2) cuts[warp][lane] = make_int4(-1, 0, 0, 0);
  __syncwarp();
  if (start.x < 0) {
    wait_for_previous_kernel();
    return;
  }
  const Line line = {sequences, kv_heads, splits, start.w};
  const bool is_long = start.w >= LONG_BYTES / STAGE;
  if (!is_long) allow_next_kernel();

  // ---- the ring: `next` runs STAGES pages ahead; its entry is looked up one page before it is fetched
  auto fetch = [&](const Cursor& c, int entry, int stage) {
    const char* source = layer_pool + frame_of(entry) * frame_stride + (i64)c.head * STAGE;
    const u32 target = ring + stage * STAGE;
#ifdef HOPPER
    const u32 barrier = shared_address(&barriers[warp][stage]);
    const int tokens = c.facts.x - c.page * PAGE_SIZE;
    const bool is_read_once = splits == 1 && !(entry & SHARED);
    if (tokens >= PAGE_SIZE || c.line < STAGES) {  // the ring's first pages whole: then what is not copied is finite
      if (lane == 0) {
        barrier_arrive_expecting(barrier, STAGE);
        if (is_read_once) bulk_copy(target, source, STAGE, barrier, read_once);
        else bulk_copy(target, source, STAGE, barrier);
      }
    } else {  // what a sequence's last tokens have of each atom: of keys, then of values, those of 8 tokens together
      constexpr int ATOM = 1024, ATOMS = PAGE / ATOM;
      if (lane == 0) barrier_arrive_expecting(barrier, tokens * (STAGE / PAGE_SIZE));
      __syncwarp();
      const int mine = min(tokens - lane / (ATOMS / 2) % 2 * 8, 8), place = lane * ATOM;
      if (lane < 2 * ATOMS && mine > 0) {
        if (is_read_once) bulk_copy(target + place, source + place, mine * (ATOM / 8), barrier, read_once);
        else bulk_copy(target + place, source + place, mine * (ATOM / 8), barrier);
      }
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
  auto entry_of = [&](const Cursor& c) { return c.line < line.end ? page_tables[c.facts.y + c.page] : 0; };

  const int start_head = start.y / splits;
  Cursor current = {0, start.x, start_head, start.y - start_head * splits, start.z, start_facts};
  Cursor next = current;
  Cursor ahead[STAGES];
  int entries[STAGES];
#pragma unroll
  for (int s = 0; s < STAGES; ++s) {  // all look-ups are under way before the first fetch waits for one
    ahead[s] = next;
    entries[s] = entry_of(next);
    line.advance(next, 1);
  }
  int next_entry = entry_of(next);
#pragma unroll
  for (int s = 0; s < STAGES; ++s) {
    if (ahead[s].line < line.end) {
      if (ahead[s].page + 1 == ahead[s].pages()) wait_for_previous_kernel();  // it may be writing this page
#ifdef HOPPER
      // One after the other: all at once would hold up what the kernel before still hands over
      if (D == 128 && s) barrier_wait(shared_address(&barriers[warp][s - 1]), 0);
#endif
      fetch(ahead[s], entries[s], s);
    }
    commit();
  }
  if (tid == 0) first_part = my_first_part;
  wait_for_previous_kernel();

  const int row = lane >> 2, pair = lane & 3;
  u32 query[D / 16][2];  // of the next item: loaded while this one is computed
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
  if (line.end > 0) load_query(current);

  int stage = 0, parity = 0;
  Attention<E, D> attention;
  while (current.line < line.end) {  // a turn is what the warp holds of one item
    const int end_page = min(current.pages(), current.page + line.end - current.line);
    const int member = current.split * per_item, heads = min(per_item, group - member);
    attention.begin(query);
    if (current.page == 0 && current.facts.w) {
      const int stride = kv_heads * group * PREFIX_ROW<D>;  // of all parts together: under 2^31 floats
      const int last = heads - 1, first_head = current.head * group + member;
      const float* const first = prefix_parts + (i64)current.facts.z * stride + first_head * PREFIX_ROW<D>;
      const float* const mine[2] = {first + min(pair * 2, last) * PREFIX_ROW<D>,
                                    first + min(pair * 2 + 1, last) * PREFIX_ROW<D>};
      attention.resume(mine, current.facts.w, stride, lane);
    }
    Cursor following = current;
    line.advance(following, end_page - current.page);
    if (following.line < line.end) load_query(following);
    for (int page = current.page; page < end_page; ++page) {
#ifdef HOPPER
      barrier_wait(shared_address(&barriers[warp][stage]), parity);
#else
      async_copy_wait<STAGES - 1>();
      __syncwarp();
#endif
      const u32 keys = ring + stage * STAGE;
      attention.attend(keys, keys + PAGE, current.facts.x - page * PAGE_SIZE, scale, lane);
      __syncwarp();  // all lanes have read the stage
      if (next.line < line.end) {
        fetch(next, next_entry, stage);
        line.advance(next, 1);
        next_entry = entry_of(next);
        if (is_long && next.line >= line.end) allow_next_kernel();
      }
      commit();
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }

    if (current.page == 0 && end_page == current.pages()) {
      attention.write(out + current.sequence * out_stride + (current.head * group + member) * D, heads, lane);
    } else {
      const int which = current.line == 0 ? 0 : 1;
      attention.template write_part<GP>(part_of(warp, which), lane);
      const int item = current.head * splits + current.split;
      if (lane == 0) {
        cuts[warp][which] = make_int4(current.sequence, item, current.page, current.pages() - end_page);
      }
    }
    current = following;
  }
  __syncthreads();

  // ---- the block joins its warps' parts, by items. Lane 2 w + which has a part, in their order on the line; it is the
  // first of its item unless it goes on from the warp before, and then those up to the next first one are the item's
  const int4 cut = lane < 2 * WARPS ? cuts[lane >> 1][lane & 1] : make_int4(-1, 0, 0, 0);
  const u32 present = __ballot_sync(ALL_LANES, cut.x >= 0);
  const u32 firsts = __ballot_sync(ALL_LANES, cut.x >= 0 && (lane == 0 || (lane & 1) || cut.z == 0));
  int turn = warp, ending = -1;  // the item that ends here and began in a block before
  for (u32 left = firsts; left; left &= left - 1, turn += GP) {
    const int begin = __ffs(left) - 1, w = begin >> 1;
    const u32 behind = left & (left - 1), until = behind ? (behind & -behind) - 1 : ALL_LANES;
    const int n = __popc(present & until & ~((1u << begin) - 1)), end = n == 1 ? begin : 2 * (w + n - 1);
    const int sequence = __shfl_sync(ALL_LANES, cut.x, begin), item = __shfl_sync(ALL_LANES, cut.y, begin);
    const int before = __shfl_sync(ALL_LANES, cut.z, begin), after = __shfl_sync(ALL_LANES, cut.w, end);
    const int head = item / splits, member = (item - head * splits) * per_item, heads = min(per_item, group - member);
    const bool whole = before == 0 && after == 0, is_early = begin == 0;
    if (before && !after) ending = sequence * kv_heads * splits + item;
    for (int r = turn % WARPS; r < heads; r += WARPS) {  // the items' rows are spread over the warps
      float2 top_sum[WARPS];
      float v[WARPS][V], top = NEGATIVE_INFINITY, sum = 0.f, x[V] = {};
#pragma unroll
      for (int k = 0; k < WARPS; ++k) {
        if (k >= n) continue;
        const float* const source = part_of(w + k, k ? 0 : begin & 1) + r * ROW;
        top_sum[k] = *(const float2*)(source + D);
        top = fmaxf(top, top_sum[k].x);
#pragma unroll
        for (int i = 0; i < V; ++i) v[k][i] = source[lane * V + i];
      }
#pragma unroll
      for (int k = 0; k < WARPS; ++k) {
        if (k >= n) continue;
        const float weight = exp2_fast(top_sum[k].x - top);
        sum += weight * top_sum[k].y;
#pragma unroll
        for (int i = 0; i < V; ++i) x[i] += weight * v[k][i];
      }
      if (whole) {
        E* const item_out = out + sequence * out_stride + (head * group + member) * D;
        store_output<E, D>(item_out + r * D + lane * V, x, 1.f / sum);
      } else {
        float* const target = parts + ((i64)(2 * blockIdx.x + (is_early ? 0 : 1)) * GP + r) * ROW;
        store_part<D>(target + lane * V, x);
        if (lane == 0) hand((float2*)(target + D), make_float2(top, sum));
      }
    }
  }
  if (ending < 0) return;

  // ---- and merges the blocks' parts of the item that ends in it
  const int sequence = ending / (kv_heads * splits), head = ending % (kv_heads * splits) / splits;
  const int member = ending % splits * per_item, heads = min(per_item, group - member);
  const int first_block = first_part >> 1, n = blockIdx.x - first_block + 1;
  for (int r = warp; r < heads; r += WARPS) {
    merge_parts<E, D>(out + sequence * out_stride + (head * group + member + r) * D, n, lane, [&](int k) {
      return parts + ((i64)(k == 0 ? first_part : 2 * (first_block + k)) * GP + r) * ROW;
    });
  }
}
