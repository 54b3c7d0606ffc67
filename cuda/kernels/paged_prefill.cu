// paged_prefill: causal attention of chunks of new tokens over their sequences' paged keys and values, cached ones and
// new ones alike (kv_append has written the chunk's own before). mma.sync and cp.async: the same code from sm_80 on.
//
// A work item is a block of 128 packed rows of one sequence and kv head. Packed row r = token * group + g: the query
// heads that share a kv head are rows beside each other, so its keys and values are read once for all of them.
//
// prefill_plan, once a step for all layers: the list of (sequence, block), those first that see most keys, so that what
// is taken last is short. Equal ones in any order.
//   tokens [S] int32       query tokens of each sequence; 0: none of this kernel's business. At most 1024 sequences
//   lengths [S] int32      keys of each sequence, those of its query tokens too
//   work [capacity]        (sequence, block), then (-1, 0) to the end. Blocks past the capacity would be lost:
//                          the caller gives sum(ceil(tokens * group / 128)) or more
//   work_count [1]         how many of them are work
//   pieces                 null: the items are not cut. Else PrefillPieces (prefill_work.cuh): how those are cut that
//                          would leave multiprocessors without work at the end, or from the start. kv_heads, blocks: of
//                          the grid that takes them
// paged_prefill: grid (work items, kv heads)
//   q, out [T, H, D] E     token t at q + t * q_stride, out + t * out_stride
//   query_starts [S + 1]   first token of each sequence in q
//   layer_pool, page_tables, rows, lengths, scale     as for paged_decode; lengths count the chunk
// A block: 8 warps of 16 rows; tiles of 64 keys (4 pages) in two stages. Bound by tensor cores and shared memory.
// Pages past a sequence's end repeat its last one: finite numbers, masked.
#include "prefill_work.cuh"

constexpr int ROWS = 128, TILE = 64, TILE_PAGES = TILE / PAGE_SIZE, THREADS = 256;
constexpr int PLAN_THREADS = 1024;
constexpr int LENGTHS = 1024;  // blocks are told apart by the tiles of Hopper that they see
constexpr int LEAST_TILES = 4, COST_TILES = 3;  // of a piece; what leaving and joining a part costs, in tiles
constexpr int MANY_ROUNDS = 8, LONG_TILES = 16;
constexpr int UNEVEN = 40;  // multiprocessors differ by one part of so many from their average, each way

// Sums of the values of all threads up to each
__device__ __forceinline__ int block_scan(int value, int* warp_totals) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const int other = __shfl_up_sync(ALL_LANES, value, offset);
    if (lane >= offset) value += other;
  }
  if (lane == 31) warp_totals[warp] = value;
  __syncthreads();
  for (int w = 0; w < warp; ++w) value += warp_totals[w];
  return value;
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS)
prefill_plan(const int* tokens, const int* lengths, int S, int group, int2* work, int* work_count, int capacity,
             int kv_heads, int blocks, PrefillPieces* pieces) {
  __shared__ int warp_totals[2][32], first[1025];
  __shared__ u32 places[LENGTHS];  // of each length, the longest first: its blocks, then the place of the next
  const int t = threadIdx.x;
  places[t] = 0;
  first[t + 1] = block_scan(t < S ? (tokens[t] * group + ROWS - 1) / ROWS : 0, warp_totals[0]);
  if (t == 0) first[0] = 0;
  __syncthreads();
  const int count = min(first[1024], capacity);
  auto block_of = [&](int i) {  // the i-th of all: (sequence, block)
    int low = 0, high = 1024;   // the last sequence whose blocks begin at or before i
    while (high - low > 1) {
      const int middle = (low + high) >> 1;
      if (first[middle] <= i) low = middle;
      else high = middle;
    }
    return make_int2(low, i - first[low]);
  };
  auto tiles_before_last = [&](int2 block) {  // that a block sees
    const int last = min((block.y * ROWS + ROWS - 1) / group, tokens[block.x] - 1);  // of its tokens
    return (lengths[block.x] - tokens[block.x] + last) / HOPPER_TILE;
  };
  auto length_of = [&](int2 block) {  // 0: the longest, and all that are longer
    return LENGTHS - 1 - min(tiles_before_last(block), LENGTHS - 1);
  };
  for (int i = t; i < count; i += PLAN_THREADS) atomicAdd(&places[length_of(block_of(i))], 1u);
  __syncthreads();
  const int mine = places[t];
  const int end = block_scan(mine, warp_totals[1]);
  places[t] = end - mine;
  __syncthreads();
  for (int i = t; i < count; i += PLAN_THREADS) {
    const int2 block = block_of(i);
    work[atomicAdd(&places[length_of(block)], 1u)] = block;
  }
  for (int i = count + t; i < capacity; i += PLAN_THREADS) work[i] = make_int2(-1, 0);
  if (t == 0) *work_count = count;
  if (!pieces) return;

  // ---- the items after the last full round of the grid, as one line of tiles in equal pieces
  __shared__ int line[PLAN_THREADS];  // where each of them ends
  const int items = count * kv_heads, rest = items % blocks;  // blocks <= PLAN_THREADS
  __syncthreads();
  auto tiles_of = [&](int item) { return tiles_before_last(work[item % count]) + 1; };
  const int tiles = t < rest ? tiles_of(items - rest + t) : 0;
  line[t] = block_scan(tiles, warp_totals[0]);
  __syncthreads();
  const int total = line[PLAN_THREADS - 1], size = max((total + blocks - 1) / blocks, LEAST_TILES);
  // Worth it where few items are left to even out what the grid's blocks have to do, and these take long
  bool is_cut = false;
  if (rest && items < blocks) is_cut = __syncthreads_or(tiles > size + COST_TILES);
  else if (rest && items < MANY_ROUNDS * blocks) is_cut = tiles_of(count - 1) >= LONG_TILES;
  if (!is_cut) {
    if (t == 0) *pieces = {items, 0, 0, total};
    return;
  }
  // What blocks do before these they do not do in the same time
  const int before = (items - rest) / blocks * tiles_of(0), number = (total + size - 1) / size;
  const PrefillPieces cut = {items - rest, number, number > 1 ? min(before / UNEVEN, size / 2) : 0, total};
  if (t == 0) *pieces = cut;
  if (t < cut.count) {
    const int begin = cut.begin(t);
    int low = -1, high = rest - 1;  // line[low] <= begin < line[high]
    while (high - low > 1) {
      const int middle = (low + high) >> 1;
      if (line[middle] <= begin) low = middle;
      else high = middle;
    }
    pieces->starts()[t] = make_int2(items - rest + high, begin - (high ? line[high - 1] : 0));
  }
}

template <class E, int D>
__global__ void __launch_bounds__(THREADS, 1) paged_prefill(
    const E* q, E* out, const char* layer_pool, const int* __restrict__ page_tables, const int* __restrict__ rows,
    const int* __restrict__ lengths, const int* __restrict__ query_starts, const int2* __restrict__ work, float scale,
    int group, int max_pages, i64 q_stride, i64 out_stride, i64 frame_stride) {
  constexpr int PAGE = PAGE_BYTES<E, D>, STAGE = TILE_PAGES * 2 * PAGE, K_STEPS = D / 16;
  DYNAMIC_SHARED(shared);  // two stages of [page][K, V][blob]
  const int2 item = work[blockIdx.x];
  if (item.x < 0) return;
  const int sequence = item.x, kv_head = blockIdx.y;
  const int first_token = query_starts[sequence], tokens = query_starts[sequence + 1] - first_token;
  const int length = lengths[sequence], cached = length - tokens, pages = pages_of(length);
  const int* const table = page_tables + (i64)rows[sequence] * max_pages;
  const char* const head_pool = layer_pool + (i64)kv_head * 2 * PAGE;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, pair = lane & 3;

  // rows r[0], r[1] of this lane: query token, query head, position
  int token[2], position[2];
  i64 head_offset[2];
  u32 query[K_STEPS][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = item.y * ROWS + warp * 16 + (lane >> 2) + i * 8;
    token[i] = r / group;
    head_offset[i] = (i64)(kv_head * group + r - token[i] * group) * D;
    position[i] = cached + token[i];
    const bool used = token[i] < tokens;
    const u32* source = (const u32*)(q + (first_token + token[i]) * q_stride + head_offset[i]);
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
      query[k][i] = used ? source[k * 8 + pair] : 0u;
      query[k][2 + i] = used ? source[k * 8 + 4 + pair] : 0u;
    }
  }
  const int last_token = min((item.y * ROWS + ROWS - 1) / group, tokens - 1);
  const int tiles = (cached + last_token) / TILE + 1;
  const int first_masked = (cached + (item.y * ROWS + warp * 16) / group) / TILE;  // this warp sees earlier tiles whole

  auto fetch = [&](int tile) {
    const u32 target = shared_address(shared) + (tile & 1) * STAGE + tid * 16;
#pragma unroll
    for (int p = 0; p < TILE_PAGES; ++p) {
      const int frame = frame_of(table[min(tile * TILE_PAGES + p, pages - 1)]);
      const char* source = head_pool + frame * frame_stride + tid * 16;
#pragma unroll
      for (int i = 0; i < 2 * PAGE; i += THREADS * 16) async_copy_16(target + p * 2 * PAGE + i, source + i);
    }
    async_copy_commit();
  };

  float o[D / 8][4] = {}, top[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, sum[2] = {};
  const int matrix = lane >> 3, matrix_row = lane & 7;
  fetch(0);
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) {
      fetch(tile + 1);
      async_copy_wait<1>();
    } else {
      async_copy_wait<0>();
    }
    __syncthreads();
    const u32 stage = shared_address(shared) + (tile & 1) * STAGE;

    float s[TILE / 8][4] = {};  // scores: rows 0, 0, 1, 1 and columns 0, 1, 0, 1 of 8 keys
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
#pragma unroll
      for (int p = 0; p < TILE_PAGES; ++p) {
        u32 b[4];
        load_matrices(b, stage + p * 2 * PAGE + blob_offset<D>((matrix >> 1) * 8 + matrix_row, k * 2 + (matrix & 1)));
        mma<E>(s[2 * p], query[k][0], query[k][1], query[k][2], query[k][3], b[0], b[1]);
        mma<E>(s[2 * p + 1], query[k][0], query[k][1], query[k][2], query[k][3], b[2], b[3]);
      }
    }
    if (tile >= first_masked) {
#pragma unroll
      for (int j = 0; j < TILE / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (tile * TILE + j * 8 + pair * 2 + (i & 1) > position[i >> 1]) s[j][i] = NEGATIVE_INFINITY;
        }
      }
    }
    // every row sees key 0, so after the first tile its maximum is a number
    float shift[2], factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float tile_top = NEGATIVE_INFINITY;
#pragma unroll
      for (int j = 0; j < TILE / 8; ++j) tile_top = fmaxf(tile_top, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
      const float new_top = fmaxf(top[i], warp_max<4>(tile_top));
      factor[i] = exp2_fast((top[i] - new_top) * scale);
      shift[i] = new_top * scale;
      top[i] = new_top;
      sum[i] *= factor[i];
    }
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[j][i] = exp2_fast(fmaf(s[j][i], scale, -shift[i >> 1]));
        sum[i >> 1] += s[j][i];
      }
    }
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[j][i] *= factor[i >> 1];
    }
#pragma unroll
    for (int p = 0; p < TILE_PAGES; ++p) {
      const u32 a0 = pack2<E>(s[2 * p][0], s[2 * p][1]), a1 = pack2<E>(s[2 * p][2], s[2 * p][3]);
      const u32 a2 = pack2<E>(s[2 * p + 1][0], s[2 * p + 1][1]), a3 = pack2<E>(s[2 * p + 1][2], s[2 * p + 1][3]);
#pragma unroll
      for (int j = 0; j < K_STEPS; ++j) {
        u32 b[4];
        const int place = blob_offset<D>((matrix & 1) * 8 + matrix_row, j * 2 + (matrix >> 1));
        load_matrices_transposed(b, stage + (p * 2 + 1) * PAGE + place);
        mma<E>(o[2 * j], a0, a1, a2, a3, b[0], b[1]);
        mma<E>(o[2 * j + 1], a0, a1, a2, a3, b[2], b[3]);
      }
    }
    __syncthreads();  // the stage is read before the next fetch overwrites it
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float factor = 1.f / warp_sum<4>(sum[i]);  // by all lanes, also those of rows past the chunk
    if (token[i] >= tokens) continue;
    u32* target = (u32*)(out + (first_token + token[i]) * out_stride + head_offset[i]);
#pragma unroll
    for (int j = 0; j < D / 8; ++j) target[j * 4 + pair] = pack2<E>(o[j][2 * i] * factor, o[j][2 * i + 1] * factor);
  }
}
