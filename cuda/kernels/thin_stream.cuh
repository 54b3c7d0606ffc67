// thin_stream.cuh: a matrix by bulk copies (Hopper). For matrices that are larger than what the multiprocessors hold.
//
// One warp of a block does nothing but ask for weights: for a piece of K of all 16 rows of a tile at a time, through
// STAGES stages that run on from one tile to the next. The others divide each piece among themselves, and meet in
// sums at the end of a tile; those that add these up and end the tile wait for the rest, the rest wait for nobody. Rows
// of a stage lie 64 bytes further than whole lines, so that 8 of them use all banks. K is a multiple of 32.
#include "thin.cuh"

#ifdef HOPPER
constexpr int PIECE = 1024;  // of K. A copy costs about 44 ns whatever its size: with half of this, that is the limit
constexpr int PIECE_PITCH = PIECE * 2 + 64, PIECE_STAGE = TILE * PIECE_PITCH;

template <class E, int ROWS, int STAGES, class Epilogue>
__device__ __forceinline__ void multiply_stream(const Operands<E>& p, const int tiles, const Epilogue& epilogue) {
  constexpr int NT = (ROWS + 7) / 8, PAIRS = 64 * NT;
  constexpr int CHAINS = NT <= 2 ? 2 : 1;  // sums side by side: a product waits for the one before it in its chain
  constexpr int ENDING = PAIRS / 32;       // warps that end a tile
  constexpr int OWN = PIECE / WARPS;       // of a piece, each warp's
  static_assert(ENDING <= WARPS);
  DYNAMIC_SHARED(shared);  // [STAGES] stages, [2][WARPS][PAIRS] sums, [ROWS][pitch] x
  __shared__ __align__(8) u64 barriers[2 * STAGES + 4];
  allow_next_kernel();
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, row = lane >> 2, quarter = lane & 3;
  const int split = blockIdx.x % p.splits, group = blockIdx.x / p.splits, groups = gridDim.x / p.splits;
  const int steps = (p.K + STEP - 1) / STEP;
  const int first = steps * split / p.splits, last = steps * (split + 1) / p.splits;
  const int begin = first * STEP, end = min(last * STEP, p.K), pieces = (end - begin + PIECE - 1) / PIECE;
  float2* const sums = (float2*)(shared + STAGES * PIECE_STAGE);
  unsigned char* const rows = (unsigned char*)(sums + 2 * WARPS * PAIRS);
  const int pitch = (last - first) * STEP * 2 + 64;
  // Stages are full; empty. Sums are written; read: two turns, one is read while the next tile's is written
  const u32 full = shared_address(barriers), empty = full + STAGES * 8;
  const u32 written = empty + STAGES * 8, read = written + 16;

  if (warp == WARPS) {
    if (lane == 0) {
#pragma unroll
      for (int s = 0; s < STAGES; ++s) barrier_init(full + s * 8, 1), barrier_init(empty + s * 8, WARPS);
#pragma unroll
      for (int t = 0; t < 2; ++t) barrier_init(written + t * 8, WARPS), barrier_init(read + t * 8, ENDING);
      barrier_init_fence();
    }
    __syncwarp();
    int filled = 0, stage = 0, phase = 1;
    for (int tile = group; tile < tiles; tile += groups) {
      const int i = lane % TILE, n = first_row(tile, p.distance) + i % 8 + (i < 8 ? 0 : p.distance);
      const E* const source = p.weight + (i64)min(n, p.N - 1) * p.K;  // past the end of a ragged matrix: its last row
      for (int k = begin; k < end; k += PIECE, ++filled) {
        if (filled == STAGES) __syncthreads();  // from here on the others know the barriers, and have x
        if (filled >= STAGES) barrier_wait(empty + stage * 8, phase);
        const u32 bytes = min(PIECE, end - k) * 2;
        if (lane == 0) barrier_arrive_expecting(full + stage * 8, TILE * bytes);
        __syncwarp();
        const u32 target = shared_address(shared + stage * PIECE_STAGE + i * PIECE_PITCH);
        if (lane < TILE) bulk_copy(target, source + k, bytes, full + stage * 8);
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
    }
    if (filled <= STAGES) __syncthreads();
  } else {
    const int my_m = tid / 8;  // of the pair that this thread ends in every tile, if it does
    int low, high;
    columns(group, tid % 8, p.distance, low, high);
    typename Epilogue::Fetched fetched = {};
    load_x<E, ROWS, Epilogue::NORM>(p, rows, pitch, first, last, [&] {
      if (warp < ENDING && p.splits == 1) fetched = epilogue.fetch(my_m, low, high);
    });
    __syncthreads();

    const unsigned char* x_rows[NT];
#pragma unroll
    for (int t = 0; t < NT; ++t) x_rows[t] = rows + min(t * 8 + row, p.M - 1) * pitch + quarter * 16 + warp * OWN * 2;
    const unsigned char* const weights = shared + row * PIECE_PITCH + quarter * 16 + warp * OWN * 2;
    int stage = 0, phase = 0, turn = 0, turn_phase = 0;
    for (int tile = group; tile < tiles; tile += groups) {
      float c[CHAINS][NT][4] = {};
      for (int piece = 0; piece < pieces; ++piece) {
        barrier_wait(full + stage * 8, phase);
        const unsigned char* const mine = weights + stage * PIECE_STAGE;
        const int at = piece * PIECE, left = end - begin - at - warp * OWN;
#pragma unroll
        for (int j = 0; j < OWN / 32; ++j) {
          if (j * 32 >= left) break;
          const uint4 a = *(const uint4*)(mine + j * 64), b = *(const uint4*)(mine + 8 * PIECE_PITCH + j * 64);
#pragma unroll
          for (int t = 0; t < NT; ++t) {
            const uint4 x = *(const uint4*)(x_rows[t] + (at + j * 32) * 2);
            mma<E>(c[j % CHAINS][t], a.x, b.x, a.y, b.y, x.x, x.y);
            mma<E>(c[j % CHAINS][t], a.z, b.z, a.w, b.w, x.z, x.w);
          }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + stage * 8);
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
      if (tile >= group + 2 * groups) barrier_wait(read + turn * 8, turn_phase ^ 1);
      float2* const parts = sums + turn * WARPS * PAIRS;
#pragma unroll
      for (int t = 0; t < NT; ++t) {
#pragma unroll
        for (int chain = 1; chain < CHAINS; ++chain) {
#pragma unroll
          for (int i = 0; i < 4; ++i) c[0][t][i] += c[chain][t][i];
        }
        float2* const target = parts + warp * PAIRS + (t * 8 + quarter * 2) * 8 + row;
        target[0] = make_float2(c[0][t][0], c[0][t][2]);
        target[8] = make_float2(c[0][t][1], c[0][t][3]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(written + turn * 8);
      if (warp < ENDING) {
        barrier_wait(written + turn * 8, turn_phase);
        float2 sum = parts[tid];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) {
          sum.x += parts[w * PAIRS + tid].x;
          sum.y += parts[w * PAIRS + tid].y;
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(read + turn * 8);
        if (p.splits > 1) {
          ((float2*)p.parts)[((i64)split * tiles + tile) * PAIRS + tid] = sum;
        } else {
          epilogue.finish(fetched, my_m, low, high, tile, sum.x, sum.y);
          columns(tile + groups, tid % 8, p.distance, low, high);
          if (tile + groups < tiles) fetched = epilogue.fetch(my_m, low, high);
        }
      }
      turn ^= 1;
      turn_phase ^= turn == 0;
    }
  }
  if (ROWS > 1 && p.splits > 1) join_splits<E, PAIRS, (WARPS + 1) * 32>(p, tiles, group, groups, epilogue);
}
#endif
