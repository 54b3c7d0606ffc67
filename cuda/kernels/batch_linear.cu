// batch_linear: the network's matrix products for a batch of tens of tokens, where reading the weights takes longer than
// the arithmetic. sm_90a only.
//
//   sums [splits, M, N] float32 = x [M, K] weight^T [K, N] (+ bias [N])      M <= TOKENS; x, weight, bias of 16 bits
//   GATE: weight is [2 N, K], gate before up, and out [M, N] = silu(gate) * up, rounded once
//
// Weights are the tensor cores' A side, tokens their columns, so that no arithmetic is for rows that are not there. A
// tile is 128 weight rows. A gate's has 8 rows of the gate, then the 8 of up that belong to them, and so on: a thread has
// both sums of an output.
//
//     warp 8     64 numbers of K at a time: a box of weights and one of x a stage, STAGES ahead, on from tile to
//                tile ──▶ warpgroups 0, 1: 64 rows of the tile each, straight from shared memory
//
// Work is a line of (tile, step of K). Without GATE K is divided among `splits` parts of a tile, which stay apart: the
// kernel that goes on from here adds them up (load_summed), so no block waits at its end while the memory has nothing to
// do. A gate needs whole sums: its line is cut evenly, so that every multiprocessor has weights to fetch until the end. A
// tile may begin in a block, which then waits for the sums of its end from the next one; they were computed first there.
// So a row's result depends on no other row, and on TOKENS neither.
//
//   weight_map, x_map    tensor maps, boxes of 64 columns: a tile of the weights, TOKENS rows of x (cuda/batch_linear.py)
//   handed [grid, TOKENS / 8, 256, 4] float32, flags [grid, 8]    workspace of GATE: what each thread hands over, and which
//                        warps have. Flags are 0 before and after: whoever has read one takes it back
// A gate's blocks wait for each other: the grid must fit the device at once, with nothing beside it that waits likewise
// (a second executor, or process under MPS, on one device).
//
// May begin before the kernel that writes x has ended (dependent launch): the first STAGES boxes of weights are under way
// by then. Weights, bias and maps must come from work that ended before that kernel began. Bound by the bytes of the
// weights.
#include "common.cuh"

constexpr int TILE = 128;                  // weight rows
constexpr int STEP = 64, ROW = 2 * STEP;   // of K; bytes
constexpr int COMPUTING = 256, WARPS = 8;  // threads that compute, their warps
constexpr int LEFT_FREE = 352;             // threads whose registers are left to the norms around it, which overlap

template <class E, int TOKENS, int STAGES, bool GATE>
__global__ void __launch_bounds__(COMPUTING + 32 + LEFT_FREE, 1) batch_linear(
    const void* weight_map, const void* x_map, const E* bias, void* out, float4* handed, u32* flags, int M, int N, int K,
    int splits) {
  constexpr int STAGE = (TILE + TOKENS) * ROW, GROUPS = TOKENS / 8;
  constexpr int OUTPUTS = GATE ? TILE / 2 : TILE;     // of a tile
  constexpr i64 HANDED = GROUPS * COMPUTING;          // by a block, four sums each
  constexpr int IN_STAGE = STAGE / (COMPUTING * 16);  // groups of them that a stage has room for
  // [STAGES] stages, then barriers. Nothing else, so it begins at a multiple of 1024, and a norm's block fits beside it
  DYNAMIC_SHARED(shared);
  allow_next_kernel();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 stages = shared_address(shared), full = stages + STAGES * STAGE, empty = full + STAGES * 8;
  const int steps = (K + STEP - 1) / STEP, tiles = (N + OUTPUTS - 1) / OUTPUTS;
  // A block's pieces of the line. Who waits for another's sums waits for a block that has begun before
  const int on_line = GATE ? gridDim.x - 1 - blockIdx.x : blockIdx.x, pieces = GATE ? tiles * steps : tiles * splits;
  auto piece_begin = [&](int piece) {
    return GATE ? piece : piece / splits * steps + steps * (piece % splits) / splits;
  };
  auto first_piece = [&](int block) { return (int)((i64)pieces * block / gridDim.x); };
  // By the first lane, so that the compiler sees that these are a warp's
  int piece = __shfl_sync(ALL_LANES, first_piece(on_line), 0);
  const int from = __shfl_sync(ALL_LANES, piece_begin(piece), 0);
  const int to = __shfl_sync(ALL_LANES, piece_begin(first_piece(on_line + 1)), 0);

  if (warp == WARPS) {
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
      for (int s = 0; s < STAGES; ++s) barrier_init(full + s * 8, 1), barrier_init(empty + s * 8, WARPS);
      barrier_init_fence();
      read_map_anew(weight_map), read_map_anew(x_map);
      for (int s = 0; s < ahead; ++s, advance(next)) fetch_weights(next, s);
    }
    __syncthreads();
    u32 stage = ahead % STAGES, parity = ahead < STAGES;
    if (lane == 0) {
      wait_for_previous_kernel();
      next = start;
      for (int s = 0; s < ahead; ++s, advance(next)) fetch_x(next, s);
      for (int left = to - from - ahead; left; --left, advance(next)) {
        barrier_wait(empty + stage * 8, parity);
        fetch_weights(next, stage);
        fetch_x(next, stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    }
    __syncwarp();  // the kernel before has ended, for all lanes
    // Behind the last step what the next block hands over, if the tile ends there: it was computed long ago
    if (GATE && to % steps > 0 && to - to % steps >= from) {
      const int giver = blockIdx.x - 1;
      u32* const flag = flags + giver * WARPS + lane % WARPS;
      while (__any_sync(ALL_LANES, load_flag(flag) == 0)) {}
      if (lane < WARPS) *flag = 0;
      __syncwarp();
      if (lane == 0) {
        fence_before_bulk();
        for (int j = 0; j < GROUPS; j += IN_STAGE) {
          const int count = min(IN_STAGE, GROUPS - j) * COMPUTING;
          if (to - from + j / IN_STAGE >= STAGES) barrier_wait(empty + stage * 8, parity);
          barrier_arrive_expecting(full + stage * 8, count * 16);
          bulk_copy(stages + stage * STAGE, handed + giver * HANDED + j * COMPUTING, count * 16, full + stage * 8);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    }
    return;
  }

  __syncthreads();
  // Of the tile's weight rows a thread has the sums of two: `row` and 8 more
  const int warpgroup = __shfl_sync(ALL_LANES, warp >> 2, 0), row = warp * 16 + (lane >> 2);
  const u64 weights = matrix_descriptor(stages + warpgroup * 64 * ROW, 0, 8 * ROW);
  const u64 x = matrix_descriptor(stages + TILE * ROW, 0, 8 * ROW);
  u32 stage = 0, parity = 0;
  auto free_stage = [&](u32 s) {
    if (lane == 0) barrier_arrive(empty + s * 8);
  };
  for (int at = from, count; at < to; at += count, ++piece) {
    float d[TOKENS / 2] = {};  // as mma's c: of 8 tokens 4 numbers, of rows `row`, `row`, `row` + 8, `row` + 8
    const int begin = at % steps, first = at / steps * OUTPUTS;
    count = GATE ? min(steps - begin, to - at) : piece_begin(piece + 1) - at;
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

    if (GATE && begin > 0) {  // the block before it on the line ends this tile
#pragma unroll
      for (int j = 0; j < GROUPS; ++j) {
        const float* const v = d + 4 * j;
        handed[blockIdx.x * HANDED + j * COMPUTING + threadIdx.x] = make_float4(v[0], v[1], v[2], v[3]);
      }
      __syncwarp();
      if (lane == 0) raise_flag(flags + blockIdx.x * WARPS + warp);
      continue;
    }
    if (GATE && count < steps) {  // the next block has the sums of its end
#pragma unroll
      for (int j = 0; j < GROUPS; ++j) {
        if (j % IN_STAGE == 0) {
          if (j > 0 && ++stage == STAGES) stage = 0, parity ^= 1;
          barrier_wait(full + stage * 8, parity);
        }
        const float4 v = ((const float4*)(shared + stage * STAGE))[j % IN_STAGE * COMPUTING + threadIdx.x];
        d[4 * j] += v.x, d[4 * j + 1] += v.y, d[4 * j + 2] += v.z, d[4 * j + 3] += v.w;
      }
    }
    if (bias && begin == 0) {
      float added[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int output = first + (GATE ? warp * 8 + (lane >> 2) : row + 8 * i);
        if (output < N) added[i] = load_number(bias + output + (GATE ? i * N : 0));
      }
#pragma unroll
      for (int j = 0; j < TOKENS / 2; ++j) d[j] += added[j >> 1 & 1];
    }
    if (!GATE) {
      const int output = first + row, token = (lane & 3) * 2;
      float* const sums = (float*)out + ((i64)(piece % splits) * M + token) * N + output;
#pragma unroll
      for (int j = 0; j < TOKENS / 2; ++j) {
        const int t = (j >> 2) * 8 + (j & 1), o = (j & 2) * 4;
        if (token + t < M && output + o < N) sums[(i64)t * N + o] = d[j];
      }
      continue;
    }
    auto gated = [&](int j) {
      if (j >= GROUPS) return 0u;
      return pack2<E>(d[4 * j + 2] * silu(d[4 * j]), d[4 * j + 3] * silu(d[4 * j + 1]));
    };
    // What mma gives of 8 tokens and 8 outputs, four times, in pieces of 16 bytes
#pragma unroll
    for (int j = 0; j < GROUPS; j += 4) {
      if (j * 8 >= M) continue;
      const uint4 chunk = transpose_quad(transpose_matrix(gated(j)), transpose_matrix(gated(j + 1)),
                                         transpose_matrix(gated(j + 2)), transpose_matrix(gated(j + 3)), lane);
      const int token = (j + (lane & 3)) * 8 + (lane >> 2), output = first + warp * 8;
      if (token < M && output < N) *(uint4*)((E*)out + (i64)token * N + output) = chunk;
    }
  }
}
