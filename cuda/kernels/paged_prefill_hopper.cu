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
//   work, work_count       from prefill_plan
//   counters [2] u32       0 before and after: the next item, and blocks that have seen the end
//   the rest               as for paged_prefill
// Rows past a sequence's tokens repeat its last token's queries, pages past its end its last page: finite, not stored.
#include "common.cuh"

constexpr int ROWS = 128, GROUP_ROWS = 64, TILE = 128, TILE_PAGES = TILE / PAGE_SIZE, THREADS = 384;

struct __align__(16) Item {  // tiles 0: there is no more work
  int tiles, table_row, pages, kv_head;
  int first_row, first_token, tokens, cached;
};

enum Barrier { KEYS_FULL = 0, VALUES_FULL = 2, KEYS_FREE = 4, VALUES_FREE = 6, ITEM_FULL = 8, ITEM_FREE = 10,
               QUERIES_FULL = 12, BARRIERS = 16 };  // two each; QUERIES_FULL: for each warpgroup
constexpr int ITEM_READERS = 11;  // warps: 8 that compute, 3 that fetch

// Words 0 ... 3 of four neighbouring lanes become a 4 x 4 matrix transposed
__device__ __forceinline__ uint4 transpose_quad(u32 x0, u32 x1, u32 x2, u32 x3, int lane) {
  u32 t = lane & 1 ? x0 : x1, u = lane & 1 ? x2 : x3;
  t = __shfl_xor_sync(ALL_LANES, t, 1), u = __shfl_xor_sync(ALL_LANES, u, 1);
  if (lane & 1) x0 = t, x2 = u;
  else x1 = t, x3 = u;
  t = lane & 2 ? x0 : x2, u = lane & 2 ? x1 : x3;
  t = __shfl_xor_sync(ALL_LANES, t, 2), u = __shfl_xor_sync(ALL_LANES, u, 2);
  if (lane & 2) x0 = t, x1 = u;
  else x2 = t, x3 = u;
  return make_uint4(x0, x1, x2, x3);
}

template <class E, int D>
__global__ void __launch_bounds__(THREADS, 1) paged_prefill_hopper(
    const E* q, E* out, const char* layer_pool, const int* __restrict__ page_tables, const int* __restrict__ rows,
    const int* __restrict__ lengths, const int* __restrict__ query_starts, const int2* __restrict__ work,
    const int* __restrict__ work_count, u32* counters, float scale, int group, int kv_heads, int max_pages,
    i64 q_stride, i64 out_stride, i64 frame_stride) {
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
        const int* const table = page_tables + (i64)item.table_row * max_pages;
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
      const int mine = warp - 2, total = work_count[0];
      for (int n = 0;; ++n) {
        const int slot = n & 1;
        if (mine == 0) {
          barrier_wait(barrier(ITEM_FREE, slot), (n >> 1 & 1) ^ 1);
          if (lane == 0) {
            const u32 next = atomicAdd(counters, 1u);
            Item item = {};
            if (next < (u32)(total * kv_heads)) {
              item.kv_head = next / total;
              const int2 block = work[next - item.kv_head * total];
              item.first_row = block.y * ROWS;
              item.first_token = query_starts[block.x];
              item.tokens = query_starts[block.x + 1] - item.first_token;
              const int length = lengths[block.x];
              item.cached = length - item.tokens;
              item.pages = pages_of(length);
              item.table_row = rows[block.x];
              item.tiles = (item.cached + min((item.first_row + ROWS - 1) / group, item.tokens - 1)) / TILE + 1;
            } else if (atomicAdd(counters + 1, 1u) == gridDim.x - 1) {  // nobody asks any more: for the next launch
              counters[0] = counters[1] = 0;
            }
            items[slot] = item;
            barrier_arrive(barrier(ITEM_FULL, slot));
          }
          __syncwarp();
        }
        barrier_wait(barrier(ITEM_FULL, slot), n >> 1 & 1);
        const Item item = items[slot];
        if (item.tiles == 0) break;
        const u32 target = queries + (slot * 2 + mine) * QUERIES;
        constexpr int CHUNKS = D / 8;
        for (int i = lane; i < GROUP_ROWS * CHUNKS; i += 32) {
          const int row = i / CHUNKS, chunk = i % CHUNKS, packed = item.first_row + mine * GROUP_ROWS + row;
          const int token = packed / group, head = item.kv_head * group + packed - token * group;
          const i64 place = (i64)(item.first_token + min(token, item.tokens - 1)) * q_stride + head * D + chunk * 8;
          async_copy_16(target + blob_offset<D>(row, chunk), q + place);
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
    int token[2], position[2];  // of this lane's two rows
    E* target[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + warp * 16 + (lane >> 2) + i * 8;
      token[i] = row / group;
      position[i] = item.cached + token[i];
      const int head = item.kv_head * group + row - token[i] * group;
      target[i] = out + (item.first_token + token[i]) * out_stride + head * D;
    }
    const int first_masked = (item.cached + first_row / group + 1) / TILE;  // all rows see all of the tiles before
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
      const float scale_out = 1.f / warp_sum<4>(sum[i]);
#pragma unroll
      for (int j = 0; j < D / 32; ++j) {  // 32 columns: every lane stores 8 of them
        u32 word[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int place = (j * 4 + k) * 4 + 2 * i;
          word[k] = pack2<E>(o[place] * scale_out, o[place + 1] * scale_out);
        }
        const uint4 chunk = transpose_quad(word[0], word[1], word[2], word[3], lane);
        if (token[i] < item.tokens) *(uint4*)(target[i] + (j * 4 + pair) * 8) = chunk;
      }
    }
  }
}
