// paged_prefill_hopper: what paged_prefill.cu computes, by the tensor cores of Hopper (wgmma), for the same list of
// work. sm_90a only.
//
// A work item is a block of 128 packed rows of one sequence and kv head (paged_prefill.cu). The blocks of the grid stay;
// each begins with the item of its number and takes item after item from a counter, head after head, so that nobody waits for the longest and the heads' keys
// and values stay in the L2. Where few long items are left, they are cut into pieces (prefill_work.cuh), whose parts are
// joined by the block that has the item's beginning. 3 warpgroups of 4 warps in a block:
//
//     warp 0     keys, tiles of 128 (8 pages, one bulk copy each) ─┐
//     warp 1     values, likewise                                  ├─▶ warpgroups 1, 2: 64 rows each
//     warp 2     the next items       warp 3     their queries    ─┘
//
// Keys and values come by different warps because keys are waited for a tile earlier: one warp for both would wait for a
// consumer that waits for it. Tiles of all items are one stream. Per tile, from the diagonal backwards, a warpgroup sets
// S = Q K_i and O += P_(i-1) V_(i-1) going together and computes softmax(S) beside the second of them; then P is packed.
// Nothing keeps the two in step: while one computes its softmax, the tensor cores have the other's products.
//
// Where an item ends, the next one's first S is set going beside its last O, which is stored beside that one's softmax.
// What is taken from the scores before the exponential is seldom raised: only when a score is far above it, since
// float32 has room for more and P is as exact as before. Bound by tensor cores, and by the card's power.
//
// paged_prefill_hopper:
//   work, work_count       from prefill_plan
//   pieces                 likewise: how items are cut that few blocks would be left with
//   parts [grid, 256, D / 2 + 4] float32: workspace, what the threads have of items that are cut
//   counters [2 + 8 grid] u32  0 before and after: items taken beside the first ones, blocks that have seen the end; then
//                          of each piece's part and warp, whether it is there
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
// May begin before the kernel that writes q (and, of paged_prefill_hopper, keys and values) has ended: tables and work, and
// shared_prefix's pages, must come from kernels that ended before that began.
// Rows past the last token repeat its queries, pages past the end the last page: finite, not stored.
#include "prefill_items.cuh"

constexpr int GROUP_ROWS = 64, THREADS = 384;

constexpr int KEY_STAGES = 3, VALUE_STAGES = 2, QUERY_SLOTS = 2, ITEMS = 4;
constexpr int LONG_TILES = 5, NEAR_TILES = 3;  // behind an item of so many tiles the next is taken when so many are to be fetched
enum Barrier { KEYS_FULL = 0, VALUES_FULL = KEYS_FULL + KEY_STAGES, KEYS_FREE = VALUES_FULL + VALUE_STAGES,
               VALUES_FREE = KEYS_FREE + KEY_STAGES, ITEM_FULL = VALUES_FREE + VALUE_STAGES,
               ITEM_FREE = ITEM_FULL + ITEMS, QUERIES_FULL = ITEM_FREE + ITEMS,
               QUERIES_FREE = QUERIES_FULL + 2 * QUERY_SLOTS, NEAR_END = QUERIES_FREE + 2 * QUERY_SLOTS, BARRIERS };
constexpr int ITEM_READERS = 11;  // warps: 8 that compute, 3 that fetch
template <int D> constexpr int PART = 256 * (D / 2 + 4);  // floats of a part of an item
constexpr int KEPT = 40, WANTED = 232;  // registers of threads that fetch, that compute
static_assert(KEPT * 128 + WANTED * 256 <= 65536 / THREADS / 8 * 8 * THREADS, "else they wait for each other");
constexpr float MOST = 16384.f;  // that a thread's probabilities of a tile may add up to: any of them is a number in fp16

struct Place {  // in a ring
  int count, at = 0;
  u32 parity = 0;
  __device__ __forceinline__ Place(int count) : count(count) {}
  __device__ __forceinline__ void advance() {
    if (++at == count) at = 0, parity ^= 1;
  }
};

template <class E, int D, bool SHARED, class Work> __device__ __forceinline__ void attend_items(
    const E* q, E* out, float* parts, u32* part_flags, const char* layer_pool, const int* __restrict__ page_tables, const Work source_of_work,
    float scale, int group, int kv_heads, int max_pages, i64 q_stride, i64 out_stride, i64 frame_stride) {
  constexpr int PAGE = PAGE_BYTES<E, D>, STAGE = TILE_PAGES * PAGE, QUERY = D * (int)sizeof(E);
  constexpr int EIGHT_ROWS = 16 * D, K_STEPS = D / 16;
  DYNAMIC_SHARED(shared);  // keys [KEY_STAGES], values [VALUE_STAGES], queries [QUERY_SLOTS]; wgmma wants multiples of 1024
  __shared__ __align__(8) u64 barriers[BARRIERS];
  __shared__ Item items[ITEMS];
  const u32 keys = (shared_address(shared) + 1023u) & ~1023u, values = keys + KEY_STAGES * STAGE;
  const u32 queries = values + VALUE_STAGES * STAGE;
  const u32 first_barrier = shared_address(barriers);
  auto barrier = [&](int name, int stage) { return first_barrier + (name + stage) * 8; };
  const int lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int i = 0; i < BARRIERS; ++i) {
      const bool by_tile = i >= KEYS_FREE && i < ITEM_FULL, by_item = i >= ITEM_FREE && i < QUERIES_FULL;
      barrier_init(first_barrier + i * 8, by_tile ? 8 : by_item ? ITEM_READERS : i == NEAR_END ? 1 : i >= QUERIES_FREE ? 4 : i >= QUERIES_FULL ? 32 : 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
  u32 seen = 0;  // items, by this thread
  auto next_item = [&] {  // its slot
    const int slot = (int)(seen % ITEMS);
    barrier_wait(barrier(ITEM_FULL, slot), seen / ITEMS & 1);
    ++seen;
    return slot;
  };
  auto free_item = [&](int slot) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier(ITEM_FREE, slot));
  };
  auto read_item = [&] {
    const int slot = next_item();
    const Item item = items[slot];
    free_item(slot);
    return item;
  };

  // Of a row of an item: its token, and which head of the group. Row + block_head < ROWS + group, so this divides exactly
  const int reciprocal = 65536 / group + 1;
  auto token_of = [&](const Item& item, int row, int& head) {
    const int within = item.block_head + row, tokens = within * reciprocal >> 16;
    head = within - tokens * group;
    return item.block_token + tokens;
  };

  if (threadIdx.x < 128) {  // ---- warps that fetch
    keep_registers<KEPT>();
    const int warp = threadIdx.x >> 5;
    auto fetch_tiles = [&](Place place, int full, int free, u32 target, int which) {
      for (int fetched = 0;;) {
        const Item item = read_item();
        if (item.tiles == 0) break;
        const int* const table = page_tables + item.table;
        const char* const source = layer_pool + (item.kv_head * 2 + which) * PAGE;
        auto frame_in = [&](int tile) { return frame_of(table[min(tile * TILE_PAGES + (lane & 7), item.pages - 1)]); };
        int frame = frame_in(item.last_tile + item.tiles - 1);
        if (!SHARED) wait_for_previous_kernel();  // which wrote this step's keys and values
        for (int tile = item.last_tile + item.tiles - 1; tile >= item.last_tile; --tile, ++fetched) {
          // Pages that nobody sees may be those of any tile before, but not what was there before the first
          const int pages = fetched < place.count ? TILE_PAGES : min(item.pages - tile * TILE_PAGES, TILE_PAGES);
          const u32 arrived = barrier(full, place.at);
          barrier_wait(barrier(free, place.at), place.parity ^ 1);
          if (lane == 0) barrier_arrive_expecting(arrived, pages * PAGE);
          __syncwarp();
          if (lane < pages) {
            bulk_copy(target + place.at * STAGE + lane * PAGE, source + frame * frame_stride, PAGE, arrived);
          }
          place.advance();
          if (tile > item.last_tile) frame = frame_in(tile - 1);
          if (which == 0 && lane == 0 && tile == item.last_tile + NEAR_TILES && item.tiles >= LONG_TILES) {
            barrier_arrive(barrier(NEAR_END, 0));
          }
        }
      }
    };
    if (warp == 0) {
      fetch_tiles(Place(KEY_STAGES), KEYS_FULL, KEYS_FREE, keys, 0);
    } else if (warp == 1) {
      fetch_tiles(Place(VALUE_STAGES), VALUES_FULL, VALUES_FREE, values, 1);
    } else if (warp == 2) {  // items
      Left left;
      int tiles = 0;         // of the last one
      u32 near_parity = 0;
      for (; lane == 0; ++seen) {
        if (seen >= ITEMS) barrier_wait(barrier(ITEM_FREE, seen % ITEMS), seen / ITEMS - 1 & 1);
        // Short ones are taken ahead, since it takes microseconds until one's queries are there; what comes behind a
        // long one not long before it is begun, so that it goes to the block that comes to it first
        if (tiles >= LONG_TILES) {
          barrier_wait(barrier(NEAR_END, 0), near_parity);
          near_parity ^= 1;
        }
        const Item item = source_of_work.take(left, group, kv_heads, max_pages);
        items[seen % ITEMS] = item;
        barrier_arrive(barrier(ITEM_FULL, seen % ITEMS));
        tiles = item.tiles;
        if (tiles == 0) break;
      }
    } else {  // queries
      for (;;) {
        const u32 slot = seen % QUERY_SLOTS, parity = seen / QUERY_SLOTS & 1;
        const Item item = read_item();
        if (item.tiles == 0) {
          wait_for_previous_kernel();  // a block without items, too
          break;
        }
        for (int mine = 0; mine < 2; ++mine) {
          constexpr int CHUNKS = D / 8, AT_ONCE = 32 / CHUNKS;  // rows
          int sources[2];  // of rows `lane`, `lane + 32`, in chunks: found once, since this warp must keep up with short items
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            int head;
            const int token = token_of(item, mine * GROUP_ROWS + i * 32 + lane, head);
            int query = item.first_token + min(token, item.tokens - 1);
            if constexpr (SHARED) query = source_of_work.members[query];
            sources[i] = query * (int)(q_stride / 8) + (item.kv_head * group + head) * CHUNKS;
          }
          wait_for_previous_kernel();
          barrier_wait(barrier(QUERIES_FREE, slot * 2 + mine), parity ^ 1);
          const u32 target = queries + (slot * 2 + mine) * GROUP_ROWS * QUERY;
          const int chunk = lane % CHUNKS;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll 4
            for (int first = 0; first < 32; first += AT_ONCE) {
              const int row = first + lane / CHUNKS;
              const int source = __shfl_sync(ALL_LANES, sources[i], row);
              async_copy_16(target + blob_offset<D>(i * 32 + row, chunk), (const uint4*)q + source + chunk);
            }
          }
          async_copy_arrive(barrier(QUERIES_FULL, slot * 2 + mine));
        }
      }
    }
    return;
  }

  // ---- warpgroups that compute
  want_registers<WANTED>();
  const int mine = __shfl_sync(ALL_LANES, (int)(threadIdx.x >> 7), 0) - 1, warp = threadIdx.x >> 5 & 3, pair = lane & 3;
  auto my_row = [] { return (int)(threadIdx.x >> 5) * 16 - 64; };  // of an item, the warp's first
  float s[64], o[D / 2];  // as mma's c: 8 columns are 4 numbers, of rows 0, 0, 1, 1
  u32 p[32];              // probabilities of the tile before, as mma's a
  u32 query[K_STEPS][4];
  float shift[2], sum[2], factor[2];  // shift: what is taken from the scores, in log2 units
  int first_masked;
  bool has_moved;
  const u64 key_matrix = matrix_descriptor(keys, 0, EIGHT_ROWS);
  const u64 value_matrix = matrix_descriptor(values, 1024, EIGHT_ROWS);
  Place k_place(KEY_STAGES), v_place(VALUE_STAGES);
  auto begin = [&](const Item& item) {
    int head;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shift[i] = NEGATIVE_INFINITY;
      sum[i] = 0.f;
    }
    // all rows see all of the tiles before
    first_masked = (SHARED ? item.pages * PAGE_SIZE : item.cached + token_of(item, mine * GROUP_ROWS, head) + 1) / TILE;
    const u32 item_number = seen - 1;
    const int slot = (int)(item_number % QUERY_SLOTS) * 2 + mine, row = warp * 16 + (lane & 15);
    barrier_wait(barrier(QUERIES_FULL, slot), item_number / QUERY_SLOTS & 1);
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
      load_matrices(query[k], queries + slot * GROUP_ROWS * QUERY + blob_offset<D>(row, 2 * k + (lane >> 4)));
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier(QUERIES_FREE, slot));
  };
  auto wait_keys = [&] { barrier_wait(barrier(KEYS_FULL, k_place.at), k_place.parity); };
  auto scores = [&] {
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
      const u32 step = (k >> 2) * 1024 + (k & 3) * 32;
      wgmma_along_k<E>(s, query[k], key_matrix + (k_place.at * STAGE + step) / 16, k > 0);
    }
    wgmma_commit();
  };
  auto wait_values = [&] { barrier_wait(barrier(VALUES_FULL, v_place.at), v_place.parity); };
  auto outputs = [&] {
#pragma unroll
    for (int k = 0; k < TILE_PAGES; ++k) {
      const u64 matrix = value_matrix + (v_place.at * STAGE + k * PAGE) / 16;
      wgmma_registers<E>(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], matrix);
    }
    wgmma_commit();
  };
  auto free_keys = [&] {
    if (lane == 0) barrier_arrive(barrier(KEYS_FREE, k_place.at));
    k_place.advance();
  };
  auto free_values = [&] {
    if (lane == 0) barrier_arrive(barrier(VALUES_FREE, v_place.at));
    v_place.advance();
  };
  // By the first lane, so that the compiler sees that the loop's numbers, and with them descriptors, are a warp's
  auto of_warp = [&](int x) { return __shfl_sync(ALL_LANES, x, 0); };
  // The first COUNT scores of a row's lane: all, or those of the first half of the tile
  auto mask = [&](const int count, int tile, const Item& item) {
    if (tile < first_masked) return;
    int last[2];  // column that is seen
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int head;
      const int token = token_of(item, my_row() + (lane >> 2) + i * 8, head);
      last[i] = (SHARED ? item.pages * PAGE_SIZE - 1 : item.cached + token) - tile * TILE - pair * 2;
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if ((i >> 2) * 8 + (i & 1) > last[i >> 1 & 1]) s[i] = NEGATIVE_INFINITY;
    }
  };
  auto exponentials = [&](const int count, const float (&taken)[2], float (&total)[2]) {
    total[0] = total[1] = 0.f;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      s[i] = exp2_fast(fmaf(s[i], scale, -taken[i >> 1 & 1]));
      total[i >> 1 & 1] += s[i];
    }
  };
  // What is taken rises to the largest score. factor: what older sums and outputs are worth then
  auto raised_softmax = [&](const int count) {
    float taken[2], total[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float highest = fmaxf(s[2 * i], s[2 * i + 1]);
#pragma unroll
      for (int j = 2 * i + 4; j < count; j += 4) highest = fmaxf(highest, fmaxf(s[j], s[j + 1]));
      const float top = fmaxf(shift[i], warp_max<4>(highest * scale));
      // no key of the tiles so far is seen by the row: of minus infinity nothing is taken
      taken[i] = top == NEGATIVE_INFINITY ? 0.f : top;
      factor[i] = exp2_fast(shift[i] - taken[i]);
      shift[i] = top;
    }
    exponentials(count, taken, total);
#pragma unroll
    for (int i = 0; i < 2; ++i) sum[i] = fmaf(sum[i], factor[i], total[i]);
  };
  auto scores_again = [&](int pages) {  // by this warp alone. Of pages past the end nothing is left by mask
    const int matrix = lane >> 3, matrix_row = lane & 7;
#pragma unroll
    for (int page = 0; page < TILE_PAGES; ++page) {
      if (page >= pages) break;
      float c[2][4] = {};
#pragma unroll
      for (int k = 0; k < K_STEPS; ++k) {
        u32 b[4];
        const int place = blob_offset<D>((matrix >> 1) * 8 + matrix_row, 2 * k + (matrix & 1));
        load_matrices(b, keys + k_place.at * STAGE + page * PAGE + place);
        mma<E>(c[0], query[k][0], query[k][1], query[k][2], query[k][3], b[0], b[1]);
        mma<E>(c[1], query[k][0], query[k][1], query[k][2], query[k][3], b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) s[8 * page + i] = c[i >> 2][i & 3];
    }
  };
  // Scores become probabilities. Their largest is not looked for: a sum shows if one is far above what is taken (or if
  // nothing was to take, or one is NaN), and then the scores, which are gone, are computed once more
  auto softmax = [&](int tile, const Item& item) {
    mask(64, tile, item);
    float total[2];
    exponentials(64, shift, total);
    has_moved = __any_sync(ALL_LANES, !(total[0] <= MOST && total[1] <= MOST));
    if (has_moved) {
      scores_again(of_warp(item.pages - tile * TILE_PAGES));
      mask(64, tile, item);
      raised_softmax(64);
    } else {
      sum[0] += total[0];
      sum[1] += total[1];
    }
  };
  auto first_softmax = [&](int tile, const Item& item) {
    if (of_warp(item.pages - tile * TILE_PAGES) > TILE_PAGES / 2) {
      mask(64, tile, item);
      raised_softmax(64);
    } else {  // nobody sees more
      mask(32, tile, item);
      raised_softmax(32);
#pragma unroll
      for (int i = 32; i < 64; ++i) s[i] = 0.f;
    }
  };
  auto is_done = [&] { return __any_sync(ALL_LANES, sum[0] + sum[1] < 0.f); };
  auto pack = [&] {
#pragma unroll
    for (int i = 0; i < 32; ++i) p[i] = pack2<E>(s[2 * i], s[2 * i + 1]);
  };
  // A part in global memory: what its lanes have, 4 numbers at a time, those of the block's threads beside each other
  auto part_at = [&](int part, int i) {
    return (float4*)(parts + (i64)part * PART<D>) + i * 256 + (threadIdx.x - 128);
  };
  auto leave_part = [&](int part, const float (&item_shift)[2], const float (&item_sum)[2]) {
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
      *part_at(part, i) = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
    }
    *part_at(part, D / 8) = make_float4(item_shift[0], item_shift[1], item_sum[0], item_sum[1]);
    __syncwarp();
    if (lane == 0) raise_flag(part_flags + part * 8 + (threadIdx.x >> 5) - 4);
  };
  auto join_parts = [&](int first, int count, float (&item_shift)[2], float (&item_sum)[2]) {
    for (int part = first; part < first + count; ++part) {
      u32* const flag = part_flags + part * 8 + (threadIdx.x >> 5) - 4;
      while (__any_sync(ALL_LANES, load_flag(flag) == 0)) {  // all lanes: a branch of one costs descriptors their place
      }
      if (lane == 0) *flag = 0;
      const float4 other = __ldcg(part_at(part, D / 8));
      const float other_shift[2] = {other.x, other.y}, other_sum[2] = {other.z, other.w};
      float mine_counts[2], other_counts[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float top = fmaxf(item_shift[i], other_shift[i]), taken = top == NEGATIVE_INFINITY ? 0.f : top;
        mine_counts[i] = exp2_fast(item_shift[i] - taken);
        other_counts[i] = exp2_fast(other_shift[i] - taken);
        item_sum[i] = item_sum[i] * mine_counts[i] + other_sum[i] * other_counts[i];
        item_shift[i] = top;
      }
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        const float4 v = __ldcg(part_at(part, i));
        o[4 * i] = o[4 * i] * mine_counts[0] + v.x * other_counts[0];
        o[4 * i + 1] = o[4 * i + 1] * mine_counts[0] + v.y * other_counts[0];
        o[4 * i + 2] = o[4 * i + 2] * mine_counts[1] + v.z * other_counts[1];
        o[4 * i + 3] = o[4 * i + 3] * mine_counts[1] + v.w * other_counts[1];
      }
    }
  };
  auto store = [&](const Item& item, float (&item_shift)[2], float (&item_sum)[2]) {
    if constexpr (!SHARED) {
      const int own_part = of_warp(item.own_part);
      if (own_part >= 0) {
        leave_part(own_part, item_shift, item_sum);
        return;
      }
      join_parts(of_warp(item.first_part), of_warp(item.parts), item_shift, item_sum);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int head;
      const int token = token_of(item, my_row() + (lane >> 2) + i * 8, head);
      head += item.kv_head * group;
      const float total = warp_sum<4>(item_sum[i]);
      if constexpr (SHARED) {
        if (token >= item.tokens) continue;
        const i64 part = item.first_part + token * item.parts;
        float* const target = source_of_work.parts + (part * kv_heads * group + head) * PREFIX_ROW<D>;
#pragma unroll
        for (int k = 2 * i; k < 2 * i + 2; ++k) {
#pragma unroll
          for (int j = 0; j < D / 8; j += 4) {
            const float4 v = make_float4(o[4 * j + k], o[4 * j + 4 + k], o[4 * j + 8 + k], o[4 * j + 12 + k]);
            *(float4*)(target + fragment_place(pair * 2 + k - 2 * i, j)) = v;
          }
        }
        if (pair == 0) *(float2*)(target + D) = make_float2(item_shift[i], total);
      } else {
        E* const target = out + (item.first_token + token) * out_stride + head * D;
        const float factor = 1.f / total;
#pragma unroll
        for (int j = 0; j < D / 32; ++j) {  // 32 columns: every lane stores 8 of them
          u32 word[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int place = (j * 4 + k) * 4 + 2 * i;
            word[k] = pack2<E>(o[place] * factor, o[place + 1] * factor);
          }
          const uint4 chunk = transpose_quad(word[0], word[1], word[2], word[3], lane);
          if (token < item.tokens) *(uint4*)(target + (j * 4 + pair) * 8) = chunk;
        }
      }
    }
  };

  int slot = next_item(), last_tile = of_warp(items[slot].last_tile);
  int tile = of_warp(last_tile + items[slot].tiles - 1);
  if (tile >= last_tile) {
    begin(items[slot]);
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] = 0.f;
    wait_keys();
    scores();
    wgmma_wait<0>();
    first_softmax(tile, items[slot]);
    free_keys();
    pack();
    if (tile > last_tile) wait_keys();
    for (;;) {
      while (--tile >= last_tile) {
        wait_values();
        scores();
        outputs();
        wgmma_wait<1>();
        softmax(tile, items[slot]);  // its branch keeps the compiler from waiting for the outputs above the exponentials
        free_keys();
        if (tile > last_tile) wait_keys();
        wgmma_wait<0>();
        free_values();
        if (has_moved) {
#pragma unroll
          for (int j = 0; j < D / 2; ++j) o[j] *= factor[j >> 1 & 1];
        }
        pack();
      }
      const int next = next_item();
      last_tile = of_warp(items[next].last_tile);
      tile = of_warp(last_tile + items[next].tiles - 1);
      if (tile < last_tile) break;
      float item_shift[2] = {shift[0], shift[1]}, item_sum[2] = {sum[0], sum[1]};
      begin(items[next]);
      wait_keys();
      wait_values();
      scores();
      outputs();
      wgmma_wait<1>();
      first_softmax(tile, items[next]);
      free_keys();
      if (is_done() | (tile > last_tile)) wait_keys();
      wgmma_wait<0>();
      free_values();
      store(items[slot], item_shift, item_sum);
      free_item(slot);
#pragma unroll
      for (int i = 0; i < D / 2; ++i) o[i] = 0.f;
      pack();
      slot = next;
    }
    wait_values();
    wgmma_begin();
    outputs();
    wgmma_wait<0>();
    free_values();
    store(items[slot], shift, sum);
  }
}

template <class E, int D>
__global__ void __launch_bounds__(THREADS, 1) paged_prefill_hopper(
    const E* q, E* out, const char* layer_pool, const int* __restrict__ page_tables, const int* __restrict__ rows,
    const int* __restrict__ lengths, const int* __restrict__ query_starts, const int2* __restrict__ work,
    const int* __restrict__ work_count, const PrefillPieces* pieces, float* parts, u32* counters, float scale, int group, int kv_heads, int max_pages,
    i64 q_stride, i64 out_stride, i64 frame_stride) {
  allow_next_kernel();  // short prompts leave most multiprocessors to it
  const CausalWork items = {rows, lengths, query_starts, work, work_count, pieces, counters};
  attend_items<E, D, false>(q, out, parts, counters + 2, layer_pool, page_tables, items, scale, group, kv_heads, max_pages, q_stride,
                            out_stride, frame_stride);
}

template <class E, int D>
__global__ void __launch_bounds__(THREADS, 1) shared_prefix(
    const E* q, float* parts, const char* layer_pool, const int* __restrict__ page_tables,
    const int* __restrict__ prefix_work, const int* __restrict__ members, float scale, int group, int kv_heads,
    int max_pages, i64 q_stride, i64 frame_stride) {
  allow_next_kernel();
  const SharedWork items = {prefix_work, members, parts};
  attend_items<E, D, true>(q, (E*)nullptr, (float*)nullptr, (u32*)nullptr, layer_pool, page_tables, items, scale, group, kv_heads, max_pages, q_stride,
                           0, frame_stride);
}
