// paged_prefill_hopper: what paged_prefill.cu computes, by the tensor cores of Hopper (wgmma), for the same list of
// work. sm_90a only.
//
// A work item is a block of 128 packed rows of one sequence and kv head (paged_prefill.cu). The blocks of the grid stay
// and take item after item from a counter, head after head, so that nobody waits for the longest and the heads' keys
// and values stay in the L2. 3 warpgroups of 4 warps in a block; everything they hand over lies in two stages:
//
//     warp 0     keys, tiles of 128 (8 pages, one bulk copy each) ─┐
//     warp 1     values, likewise                                  ├─▶ warpgroups 1, 2: 64 rows each
//     warps 2, 3 the next item, and its queries, as blobs         ─┘
//
// So the next item's queries and first tiles arrive while this one is computed. Keys and values come by different warps
// because keys are waited for a tile earlier: one warp for both would wait for a consumer that waits for it.
//
// Per tile i, from the diagonal backwards: S = Q K_i and O += P_(i-1) V_(i-1) are set going together; softmax(S) runs
// beside the second of them; then O is rescaled and P packed. Bound by tensor cores.
//
// paged_prefill_hopper:
//   work, work_count       from prefill_plan
//   counters [2] u32       0 before and after: the next item, and blocks that have seen the end
//   the rest               as for paged_prefill
// shared_prefix: the same for decoding sequences that begin with the same frames. Their tokens are the rows, every row
// sees every key, and what comes out is a part, for paged_decode to go on from. Cascade inference (Juravsky 2024).
//   q [B, H, D] E          token b at q + b * q_stride
//   parts [any, H, D + 8] float32: output (not normalized; dims in the order of fragments), maximum in log2 units, sum
//   page_tables            as they lie on the device
//   prefix_work            the number of items, then 8 int32 each: row of the page tables, first page, pages, first
//                          member, members, block of 128 rows, first part, parts of a member (cuda/shared_prefix.py).
//                          Pages are full: no token of this step is in them
//   members [any]          places in the batch; member m of an item has its part at first part + m * parts
// May begin before the kernel that writes q has ended: pages, tables and work must come from kernels that ended before.
// Rows past the last token repeat its queries, pages past the end the last page: finite, not stored.
#include "common.cuh"

constexpr int ROWS = 128, GROUP_ROWS = 64, TILE = 128, TILE_PAGES = TILE / PAGE_SIZE, THREADS = 384;

struct __align__(16) Item {  // tiles 0: there is no more work
  int tiles, table, pages, kv_head;            // table: place of its first page in the page tables
  int first_row, first_token, tokens, cached;  // shared_prefix: tokens are members, first_token is the first of them
  int first_part, parts, unused[2];            // shared_prefix only
};

enum Barrier { KEYS_FULL = 0, VALUES_FULL = 2, KEYS_FREE = 4, VALUES_FREE = 6, ITEM_FULL = 8, ITEM_FREE = 10,
               QUERIES_FULL = 12, BARRIERS = 16 };  // two each; QUERIES_FULL: for each warpgroup
constexpr int ITEM_READERS = 11;  // warps: 8 that compute, 3 that fetch

// Where items come from: the n-th of this block, of all kv heads together
struct CausalWork {
  const int* rows;
  const int* lengths;
  const int* query_starts;
  const int2* work;
  const int* work_count;
  u32* counters;

  __device__ __forceinline__ Item take(int n, int group, int kv_heads, int max_pages) const {
    Item item = {};
    const int total = work_count[0];
    const u32 next = atomicAdd(counters, 1u);
    if (next < (u32)(total * kv_heads)) {
      item.kv_head = next / total;
      const int2 block = work[next - item.kv_head * total];
      item.first_row = block.y * ROWS;
      item.first_token = query_starts[block.x];
      item.tokens = query_starts[block.x + 1] - item.first_token;
      const int length = lengths[block.x];
      item.cached = length - item.tokens;
      item.pages = pages_of(length);
      item.table = rows[block.x] * max_pages;
      item.tiles = (item.cached + min((item.first_row + ROWS - 1) / group, item.tokens - 1)) / TILE + 1;
    } else if (atomicAdd(counters + 1, 1u) == gridDim.x - 1) {  // nobody asks any more: for the next launch
      counters[0] = counters[1] = 0;
    }
    return item;
  }
};
struct SharedWork {
  const int* work;
  const int* members;
  float* parts;

  // In turn, without a counter: the list is even, and nothing of the launch before need have ended
  __device__ __forceinline__ Item take(int n, int group, int kv_heads, int max_pages) const {
    Item item = {};
    const int total = work[0], next = blockIdx.x + n * gridDim.x;
    if (next < total * kv_heads) {
      item.kv_head = next / total;
      const int* const entry = work + 4 + (next - item.kv_head * total) * 8;
      item.table = entry[0] * max_pages + entry[1];
      item.pages = entry[2];
      item.first_token = entry[3];
      item.tokens = entry[4];
      item.first_row = entry[5] * ROWS;
      item.first_part = entry[6];
      item.parts = entry[7];
      item.tiles = (item.pages + TILE_PAGES - 1) / TILE_PAGES;
    }
    return item;
  }
};

template <class E, int D, bool SHARED, class Work> __device__ __forceinline__ void attend_items(
    const E* q, E* out, const char* layer_pool, const int* __restrict__ page_tables, const Work source_of_work,
    float scale, int group, int kv_heads, int max_pages, i64 q_stride, i64 out_stride, i64 frame_stride) {
  constexpr int PAGE = PAGE_BYTES<E, D>, STAGE = TILE_PAGES * PAGE, QUERIES = GROUP_ROWS * D * (int)sizeof(E);
  constexpr int EIGHT_ROWS = 16 * D, K_STEPS = D / 16;
  DYNAMIC_SHARED(shared);  // queries [2][warpgroup], keys [2], values [2]; wgmma wants multiples of 1024
  __shared__ __align__(8) u64 barriers[BARRIERS];
  __shared__ Item items[2];
  const u32 queries = (shared_address(shared) + 1023u) & ~1023u;
  const u32 keys = queries + 4 * QUERIES, values = keys + 2 * STAGE;
  const u32 first_barrier = shared_address(barriers);
  auto barrier = [&](int name, int stage) { return first_barrier + (name + stage) * 8; };
  const int lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int i = 0; i < BARRIERS; ++i) {
      const bool by_tile = i >= KEYS_FREE && i < ITEM_FULL, by_item = i >= ITEM_FREE && i < QUERIES_FULL;
      barrier_init(first_barrier + i * 8, by_tile ? 8 : by_item ? ITEM_READERS : 1);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (threadIdx.x < 128) {  // ---- warps that fetch
    keep_registers<40>();
    const int warp = threadIdx.x >> 5;
    if (warp < 2) {  // keys or values
      const int full = warp ? VALUES_FULL : KEYS_FULL, free = warp ? VALUES_FREE : KEYS_FREE;
      const u32 target = (warp ? values : keys) + (lane & 7) * PAGE;
      for (int n = 0, fetched = 0;; ++n) {
        barrier_wait(barrier(ITEM_FULL, n & 1), n >> 1 & 1);
        const Item item = items[n & 1];
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier(ITEM_FREE, n & 1));
        if (item.tiles == 0) break;
        const int* const table = page_tables + item.table;
        const char* const source = layer_pool + (item.kv_head * 2 + warp) * PAGE;
        auto frame_of = [&](int tile) { return table[min(tile * TILE_PAGES + (lane & 7), item.pages - 1)]; };
        int frame = frame_of(item.tiles - 1);
        for (int tile = item.tiles - 1; tile >= 0; --tile, ++fetched) {
          const int stage = fetched & 1;
          const u32 arrived = barrier(full, stage);
          barrier_wait(barrier(free, stage), (fetched >> 1 & 1) ^ 1);
          if (lane == 0) barrier_arrive_expecting(arrived, STAGE);
          __syncwarp();
          if (lane < TILE_PAGES) bulk_copy(target + stage * STAGE, source + frame * frame_stride, PAGE, arrived);
          if (tile) frame = frame_of(tile - 1);
        }
      }
    } else {  // items, and the queries of warpgroup `mine`
      const int mine = warp - 2;
      for (int n = 0;; ++n) {
        const int slot = n & 1;
        if (mine == 0) {
          barrier_wait(barrier(ITEM_FREE, slot), (n >> 1 & 1) ^ 1);
          if (lane == 0) {
            items[slot] = source_of_work.take(n, group, kv_heads, max_pages);
            barrier_arrive(barrier(ITEM_FULL, slot));
          }
          __syncwarp();
        }
        barrier_wait(barrier(ITEM_FULL, slot), n >> 1 & 1);
        if (SHARED && n == 0) wait_for_previous_kernel();  // for the queries; by now keys and values are on their way
        const Item item = items[slot];
        if (item.tiles == 0) break;
        const u32 target = queries + (slot * 2 + mine) * QUERIES;
        constexpr int CHUNKS = D / 8;
        for (int i = lane; i < GROUP_ROWS * CHUNKS; i += 32) {
          const int row = i / CHUNKS, chunk = i % CHUNKS, packed = item.first_row + mine * GROUP_ROWS + row;
          const int token = packed / group, head = item.kv_head * group + packed - token * group;
          int query = item.first_token + min(token, item.tokens - 1);
          if constexpr (SHARED) query = source_of_work.members[query];
          async_copy_16(target + blob_offset<D>(row, chunk), q + query * q_stride + head * D + chunk * 8);
        }
        async_copy_commit();
        async_copy_wait<0>();
        show_to_tensor_cores();
        __syncwarp();
        if (lane == 0) {
          barrier_arrive(barrier(QUERIES_FULL, slot * 2 + mine));
          if (mine == 1) barrier_arrive(barrier(ITEM_FREE, slot));
        }
      }
    }
    return;
  }

  // ---- warpgroups that compute
  want_registers<232>();
  const int mine = __shfl_sync(ALL_LANES, (int)(threadIdx.x >> 7), 0) - 1, warp = threadIdx.x >> 5 & 3, pair = lane & 3;
  float s[64], o[D / 2];  // as mma's c: 8 columns are 4 numbers, of rows 0, 0, 1, 1
  u32 p[32];              // probabilities of the tile before, as mma's a
  const u64 key_matrix = matrix_descriptor(keys, 0, EIGHT_ROWS);
  const u64 value_matrix = matrix_descriptor(values, 1024, EIGHT_ROWS);
  for (int n = 0, seen = 0;; ++n) {  // seen: tiles of all items
    const int slot = n & 1;
    barrier_wait(barrier(ITEM_FULL, slot), n >> 1 & 1);
    const Item item = items[slot];
    if (item.tiles == 0) break;
    const int first_row = item.first_row + mine * GROUP_ROWS;
    int token[2], position[2], head[2];  // of this lane's two rows
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + warp * 16 + (lane >> 2) + i * 8;
      token[i] = row / group;
      position[i] = SHARED ? item.pages * PAGE_SIZE - 1 : item.cached + token[i];
      head[i] = item.kv_head * group + row - token[i] * group;
    }
    // all rows see all of the tiles before
    const int first_masked = (SHARED ? item.pages * PAGE_SIZE : item.cached + first_row / group + 1) / TILE;
    float top[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, sum[2] = {}, factor[2];

    const u64 query_matrix = matrix_descriptor(queries + (slot * 2 + mine) * QUERIES, 0, EIGHT_ROWS);
    auto scores = [&](int stage) {
#pragma unroll
      for (int k = 0; k < K_STEPS; ++k) {
        const u32 step = (k >> 2) * 1024 + (k & 3) * 32;
        wgmma_shared<E>(s, query_matrix + step / 16, key_matrix + (stage * STAGE + step) / 16, k > 0);
      }
      wgmma_commit();
    };
    auto outputs = [&](int stage) {
#pragma unroll
      for (int k = 0; k < TILE_PAGES; ++k) {
        const u64 matrix = value_matrix + (stage * STAGE + k * PAGE) / 16;
        wgmma_registers<E>(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], matrix);
      }
      wgmma_commit();
    };
    auto softmax = [&](int tile) {  // scores become probabilities; factor: what older sums and outputs are worth now
      if (tile >= first_masked) {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          if (tile * TILE + (i >> 2) * 8 + pair * 2 + (i & 1) > position[i >> 1 & 1]) s[i] = NEGATIVE_INFINITY;
        }
      }
      float shift[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float new_top = top[i];
#pragma unroll
        for (int j = 2 * i; j < 64; j += 4) new_top = fmaxf(new_top, fmaxf(s[j], s[j + 1]));
        new_top = warp_max<4>(new_top);
        shift[i] = new_top == NEGATIVE_INFINITY ? 0.f : new_top * scale;  // no key of this tile is seen by the row
        factor[i] = exp2_fast(fmaf(top[i], scale, -shift[i]));
        top[i] = new_top;
        sum[i] *= factor[i];
      }
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        s[i] = exp2_fast(fmaf(s[i], scale, -shift[i >> 1 & 1]));
        sum[i >> 1 & 1] += s[i];
      }
    };
    auto pack = [&] {
#pragma unroll
      for (int i = 0; i < 32; ++i) p[i] = pack2<E>(s[2 * i], s[2 * i + 1]);
    };

#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] = 0.f;
    barrier_wait(barrier(QUERIES_FULL, slot * 2 + mine), n >> 1 & 1);
    barrier_wait(barrier(KEYS_FULL, seen & 1), seen >> 1 & 1);
    wgmma_begin();
    scores(seen & 1);
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(barrier(KEYS_FREE, seen & 1));
    softmax(item.tiles - 1);
    pack();
    const int before = seen, end = seen + item.tiles;
    if (seen + 1 < end) barrier_wait(barrier(KEYS_FULL, (seen + 1) & 1), (seen + 1) >> 1 & 1);
    for (int i = seen + 1; i < end; ++i) {
      const int stage = i & 1, last = (i - 1) & 1;
      wgmma_begin();
      scores(stage);
      barrier_wait(barrier(VALUES_FULL, last), (i - 1) >> 1 & 1);
      wgmma_begin();
      outputs(last);
      wgmma_wait<1>();
      if (lane == 0) barrier_arrive(barrier(KEYS_FREE, stage));
      softmax(item.tiles - 1 - (i - before));
      // The branch here keeps the compiler from waiting for the outputs above the exponentials
      if (i + 1 < end) barrier_wait(barrier(KEYS_FULL, (i + 1) & 1), (i + 1) >> 1 & 1);
      wgmma_wait<0>();
      if (lane == 0) barrier_arrive(barrier(VALUES_FREE, last));
      if (factor[0] != 1.f || factor[1] != 1.f) {
#pragma unroll
        for (int j = 0; j < D / 2; ++j) o[j] *= factor[j >> 1 & 1];
      }
      pack();
    }
    seen = end;
    if (lane == 0) barrier_arrive(barrier(ITEM_FREE, slot));  // its queries are read
    const int last = (seen - 1) & 1;
    barrier_wait(barrier(VALUES_FULL, last), (seen - 1) >> 1 & 1);
    wgmma_begin();
    outputs(last);
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(barrier(VALUES_FREE, last));

#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float total = warp_sum<4>(sum[i]);
      if constexpr (SHARED) {
        if (token[i] >= item.tokens) continue;
        const i64 part = item.first_part + token[i] * item.parts;
        float* const target = source_of_work.parts + (part * kv_heads * group + head[i]) * PREFIX_ROW<D>;
#pragma unroll
        for (int k = 2 * i; k < 2 * i + 2; ++k) {
#pragma unroll
          for (int j = 0; j < D / 8; j += 4) {
            const float4 v = make_float4(o[4 * j + k], o[4 * j + 4 + k], o[4 * j + 8 + k], o[4 * j + 12 + k]);
            *(float4*)(target + fragment_place(pair * 2 + k - 2 * i, j)) = v;
          }
        }
        if (pair == 0) *(float2*)(target + D) = make_float2(top[i] * scale, total);
      } else {
        E* const target = out + (item.first_token + token[i]) * out_stride + head[i] * D;
#pragma unroll
        for (int j = 0; j < D / 32; ++j) {  // 32 columns: every lane stores 8 of them
          u32 word[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int place = (j * 4 + k) * 4 + 2 * i;
            word[k] = pack2<E>(o[place] * (1.f / total), o[place + 1] * (1.f / total));
          }
          const uint4 chunk = transpose_quad(word[0], word[1], word[2], word[3], lane);
          if (token[i] < item.tokens) *(uint4*)(target + (j * 4 + pair) * 8) = chunk;
        }
      }
    }
  }
}

template <class E, int D>
__global__ void __launch_bounds__(THREADS, 1) paged_prefill_hopper(
    const E* q, E* out, const char* layer_pool, const int* __restrict__ page_tables, const int* __restrict__ rows,
    const int* __restrict__ lengths, const int* __restrict__ query_starts, const int2* __restrict__ work,
    const int* __restrict__ work_count, u32* counters, float scale, int group, int kv_heads, int max_pages,
    i64 q_stride, i64 out_stride, i64 frame_stride) {
  const CausalWork items = {rows, lengths, query_starts, work, work_count, counters};
  attend_items<E, D, false>(q, out, layer_pool, page_tables, items, scale, group, kv_heads, max_pages, q_stride,
                            out_stride, frame_stride);
}

template <class E, int D>
__global__ void __launch_bounds__(THREADS, 1) shared_prefix(
    const E* q, float* parts, const char* layer_pool, const int* __restrict__ page_tables,
    const int* __restrict__ prefix_work, const int* __restrict__ members, float scale, int group, int kv_heads,
    int max_pages, i64 q_stride, i64 frame_stride) {
  allow_next_kernel();
  const SharedWork items = {prefix_work, members, parts};
  attend_items<E, D, true>(q, (E*)nullptr, layer_pool, page_tables, items, scale, group, kv_heads, max_pages, q_stride,
                           0, frame_stride);
}
