// batch_linear: the network's matrix products for a batch of tens of tokens, where reading the weights takes longer than
// the arithmetic. sm_90a only.
//
//   out [M, N] = x [M, K] weight^T [K, N] (+ bias [N])                M <= TOKENS; 16-bit numbers, float32 sums
//   GATE: weight is [2 N, K], gate before up, and out [M, N] = silu(gate) * up
//
// Weights are the tensor cores' A side, tokens their columns, so that no arithmetic is for rows that are not there. A
// tile is 128 weight rows. A gate's has 8 rows of the gate, then the 8 of up that belong to them, and so on: a thread has
// both sums of an output.
//
//     warp 8     64 numbers of K at a time: a box of weights and one of x a stage, STAGES ahead, on from tile to
//                tile ──▶ warpgroups 0, 1: 64 rows of the tile each, straight from shared memory
//
// Work is a line of (tile, step of K). If there are blocks enough for several a tile, K is divided among `splits` of
// them; each hands its sums over, and adds up, in their order, those of some tokens. Otherwise the line is cut evenly, so
// that every multiprocessor has weights to fetch until the end: a tile may begin in a block, which then waits for the sums
// of its end from the next one; they were computed first there. So a row's result depends on no other row, and on TOKENS
// neither.
//
//   weight_map, x_map    tensor maps, boxes of 64 columns: a tile of the weights, TOKENS rows of x (cuda/batch_linear.py)
//   parts [grid, TOKENS / 8, 256, 4] float32    workspace: what each thread hands over. UNWRITTEN before and after, so
//                        no flag or fence is needed: whoever has read a word takes it away
// Blocks of a tile with splits wait for each other: the grid must fit the device at once, with nothing beside it that
// waits likewise (a second executor, or process under MPS, on one device).
//
// May begin before the kernel that writes x has ended (dependent launch): the first STAGES boxes of weights are under way
// by then. Weights, bias and maps must come from work that ended before that kernel began. Bound by the bytes of the
// weights.
#include "common.cuh"

constexpr int TILE = 128;                 // weight rows
constexpr int STEP = 64, ROW = 2 * STEP;  // of K; bytes
constexpr int COMPUTING = 256;            // threads

__device__ __forceinline__ bool is_unwritten(const float4& v) {
  return is_unwritten(v.x) || is_unwritten(v.y) || is_unwritten(v.z) || is_unwritten(v.w);
}

// Never UNWRITTEN, whatever NaN the tensor cores give
__device__ __forceinline__ float written(float x) { return __uint_as_float(min(__float_as_uint(x), 0xfffffffeu)); }

// What others hand over at place(i), as it comes, for those i that are wanted
template <int COUNT, class Place, class Wanted>
__device__ __forceinline__ void take(float4 (&v)[COUNT], Place place, Wanted is_wanted) {
  bool is_missing;
  do {
    is_missing = false;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if (is_wanted(i)) v[i] = load_handed(place(i));
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) is_missing |= is_wanted(i) && is_unwritten(v[i]);
  } while (__any_sync(ALL_LANES, is_missing));
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if (is_wanted(i)) hand(place(i), make_float4(UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN));
  }
}

// Where a block's range of the line begins
__device__ __forceinline__ int begin_of(int block, int blocks, int tiles, int steps, int splits) {
  if (splits == 1) return tiles * steps * block / blocks;  // under 2^31, up to 10^11 weights
  return block / splits * steps + steps * (block % splits) / splits;
}

template <class E, int TOKENS, int STAGES, bool GATE>
__global__ void __launch_bounds__(COMPUTING + 32, 1) batch_linear(
    const void* weight_map, const void* x_map, const E* bias, E* out, float4* parts, int M, int N, int K, int splits) {
  constexpr int STAGE = (TILE + TOKENS) * ROW, GROUPS = TOKENS / 8;
  constexpr int OUTPUTS = GATE ? TILE / 2 : TILE;  // of a tile
  static_assert(GROUPS % 2 == 0, "groups are stored in twos");
  DYNAMIC_SHARED(shared);  // [STAGES] stages, multiples of 1024
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  allow_next_kernel();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 stages = (shared_address(shared) + 1023u) & ~1023u;
  const u32 full = shared_address(barriers), empty = full + STAGES * 8;
  const int steps = (K + STEP - 1) / STEP, tiles = (N + OUTPUTS - 1) / OUTPUTS;
  // Who waits for another's sums waits for a block that has begun before. By the first lane, so that the compiler sees
  // that these are a warp's
  const int on_line = splits > 1 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  const int from = __shfl_sync(ALL_LANES, begin_of(on_line, gridDim.x, tiles, steps, splits), 0);
  const int to = __shfl_sync(ALL_LANES, begin_of(on_line + 1, gridDim.x, tiles, steps, splits), 0);

  if (warp == COMPUTING / 32) {
    const u64 policy = read_once_policy();
    struct Place {  // counted on, since a division takes as long as a fetch
      int output, column;
    };
    auto advance = [&](Place& p) {
      p.column += STEP;
      if (p.column >= steps * STEP) p.column = 0, p.output += OUTPUTS;
    };
    auto fetch_weights = [&](const Place& p, u32 stage) {
      const u32 target = stages + stage * STAGE, barrier = full + stage * 8;
      barrier_arrive_expecting(barrier, STAGE);
      if (GATE) box_copy_interleaved(target, weight_map, p.column, p.output, barrier, policy);
      else box_copy(target, weight_map, p.column, p.output, barrier, policy);
    };
    auto fetch_x = [&](const Place& p, u32 stage) {
      box_copy(stages + stage * STAGE + TILE * ROW, x_map, p.column, 0, full + stage * 8);
    };
    const Place start = {from / steps * OUTPUTS, from % steps * STEP};
    Place next = start;
    const int ahead = min(to - from, STAGES);
    if (lane == 0) {
      for (int s = 0; s < STAGES; ++s) barrier_init(full + s * 8, 1), barrier_init(empty + s * 8, COMPUTING / 32);
      barrier_init_fence();
      read_map_anew(weight_map), read_map_anew(x_map);
      for (int s = 0; s < ahead; ++s, advance(next)) fetch_weights(next, s);
    }
    __syncthreads();
    if (lane == 0) {
      wait_for_previous_kernel();
      next = start;
      for (int s = 0; s < ahead; ++s, advance(next)) fetch_x(next, s);
      u32 stage = 0, parity = 0;
      for (int left = to - from - ahead; left; --left, advance(next)) {
        barrier_wait(empty + stage * 8, parity);
        fetch_weights(next, stage);
        fetch_x(next, stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    }
    return;
  }

  __syncthreads();
  // Of the tile's weight rows a thread has the sums of two: `row` and 8 more
  const int warpgroup = __shfl_sync(ALL_LANES, warp >> 2, 0), row = warp * 16 + (lane >> 2);
  const u64 weights = matrix_descriptor(stages + warpgroup * 64 * ROW, 0, 8 * ROW);
  const u64 x = matrix_descriptor(stages + TILE * ROW, 0, 8 * ROW);
  constexpr i64 PART = GROUPS * COMPUTING;
  float4* const part = parts + blockIdx.x * PART + threadIdx.x;
  u32 stage = 0, parity = 0;
  auto free_stage = [&](u32 s) {
    if (lane == 0) barrier_arrive(empty + s * 8);
  };
  for (int at = from, count; at < to; at += count) {
    float d[TOKENS / 2] = {};  // as mma's c: of 8 tokens 4 numbers, of rows `row`, `row`, `row` + 8, `row` + 8
    const int begin = at % steps, first = at / steps * OUTPUTS;
    count = min(steps - begin, to - at);
    u32 before = 0;
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
      barrier_wait(full + stage * 8, parity);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < STEP / 16; ++k) {
        const u32 in_ring = (stage * STAGE + k * 32) / 16;
        wgmma_shared<E>(d, weights + in_ring, x + in_ring);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0) free_stage(before);
      before = stage;
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    keep_behind(d);
    free_stage(before);

    float added[2] = {0.f, 0.f};
    if (bias) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int output = first + (GATE ? warp * 8 + (lane >> 2) : row + 8 * i);
        if (output < N) added[i] = load_number(bias + output + (GATE ? i * N : 0));
      }
    }
    auto of = [&](int j) { return make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]); };
    auto add = [](float4& sum, const float4& v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; };
    // What mma gives of 8 tokens and 8 outputs, four times, in pieces of 16 bytes
    auto store = [&](u32 x0, u32 x1, u32 x2, u32 x3, int token, int output) {
      const uint4 chunk = transpose_quad(
          transpose_matrix(x0), transpose_matrix(x1), transpose_matrix(x2), transpose_matrix(x3), lane);
      if (token < M && output < N) *(uint4*)(out + (i64)token * N + output) = chunk;
    };
    auto store_two = [&](int j, const float4& low, const float4& high) {  // groups of tokens, from j on
      store(pack2<E>(low.x, low.y), pack2<E>(low.z, low.w), pack2<E>(high.x, high.y), pack2<E>(high.z, high.w),
            (j + (lane >> 1 & 1)) * 8 + (lane >> 2), first + warp * 16 + (lane & 1) * 8);
    };

    if (splits > 1 || begin > 0) {
#pragma unroll
      for (int j = 0; j < GROUPS; ++j) {
        const float4 v = of(j);
        if (j * 8 < M) hand(part + j * COMPUTING, make_float4(written(v.x), written(v.y), written(v.z), written(v.w)));
      }
      if (splits == 1) continue;  // the block before it on the line ends this tile
      const int split = blockIdx.x % splits, twos = (M + 15) / 16;
      float4* const of_first = part - split * PART;
      for (int two = twos * split / splits; two < twos * (split + 1) / splits; ++two) {
        const int j = 2 * two, wanted = j * 8 + 8 < M ? 2 : 1;
        float4 sum[2] = {make_float4(added[0], added[0], added[1], added[1])};
        sum[1] = sum[0];
        for (int s = 0; s < splits; s += 2) {
          auto is_wanted = [&](int i) { return i % 2 < wanted && s + i / 2 < splits; };
          float4 v[4];
          take(v, [&](int i) { return of_first + (s + i / 2) * PART + (j + i % 2) * COMPUTING; }, is_wanted);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (is_wanted(i)) add(sum[i % 2], v[i]);
          }
        }
        store_two(j, sum[0], sum[1]);
      }
      continue;
    }

    if (count < steps) {  // the block that is next on the line has the sums of the tile's end
      constexpr int AT_ONCE = GROUPS <= 8 ? GROUPS : GROUPS / 2;
#pragma unroll
      for (int j0 = 0; j0 < GROUPS; j0 += AT_ONCE) {
        float4 v[AT_ONCE];
        take(v, [&](int i) { return part - PART + (j0 + i) * COMPUTING; }, [&](int i) { return (j0 + i) * 8 < M; });
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
          if ((j0 + j) * 8 >= M) continue;
          d[4 * (j0 + j)] += v[j].x, d[4 * (j0 + j) + 1] += v[j].y;
          d[4 * (j0 + j) + 2] += v[j].z, d[4 * (j0 + j) + 3] += v[j].w;
        }
      }
    }
    if (bias) {
#pragma unroll
      for (int j = 0; j < TOKENS / 2; ++j) d[j] += added[j >> 1 & 1];
    }
    if (!GATE) {
#pragma unroll
      for (int j = 0; j < GROUPS; j += 2) {
        if (j * 8 < M) store_two(j, of(j), of(j + 1));
      }
      continue;
    }
    auto gated = [&](int j) {
      if (j >= GROUPS) return 0u;
      const float4 v = of(j);
      return pack2<E>(v.z * silu(v.x), v.w * silu(v.y));
    };
#pragma unroll
    for (int j = 0; j < GROUPS; j += 4) {
      if (j * 8 >= M) continue;
      store(gated(j), gated(j + 1), gated(j + 2), gated(j + 3), (j + (lane & 3)) * 8 + (lane >> 2), first + warp * 8);
    }
  }
}
