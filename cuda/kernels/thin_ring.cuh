// thin_ring.cuh: a matrix through rings of 16-byte copies, one a warp. For matrices that are under way entirely, and for
// GPUs before Hopper. (thin_stream.cuh is the other way.)
//
// SHARE warps of a block share a tile and divide K, in steps of 64 numbers (128 bytes of each row): all WARPS of them, so
// that a block's time is short; or, where every warp has tiles of its own to go through (logits), 1, and no warp waits
// for another. A warp fetches whole lines with cp.async, and puts the 16-byte pieces where the lane that they are a
// fragment of reads them: no bank conflict, no barrier but that of the warp, and STAGES steps a warp under way. The ring
// runs on from one tile to the next.
#include "thin.cuh"

template <class E, int ROWS, int STAGES, int SHARE, class Epilogue>
__device__ __forceinline__ void multiply_ring(const Operands<E>& p, const int tiles, const Epilogue& epilogue) {
  constexpr int STAGE = TILE * STEP * 2;  // bytes of a step
  constexpr int NT = (ROWS + 7) / 8, PAIRS = 64 * NT;
  constexpr bool SPLITS = ROWS > 1 && SHARE == WARPS;  // without the joining a block takes fewer registers
  constexpr int CHAINS = NT <= 2 ? 2 : 1;  // sums side by side: a product waits for the one before it in its chain
  DYNAMIC_SHARED(shared);  // [WARPS][STAGES] steps, [2][WARPS][PAIRS] sums, [ROWS][pitch] x
  allow_next_kernel();
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, row = lane >> 2, quarter = lane & 3;
  const int split = blockIdx.x % p.splits, group = blockIdx.x / p.splits, groups = gridDim.x / p.splits;
  const int share = warp % SHARE, first_tile = group + warp / SHARE * groups, stride = groups * (WARPS / SHARE);
  const int steps = (p.K + STEP - 1) / STEP;
  const int first = steps * split / p.splits, last = steps * (split + 1) / p.splits;
  const int own = max(0, (last - first - share + SHARE - 1) / SHARE);  // steps of this warp in a tile
  unsigned char* const ring = shared + warp * STAGES * STAGE + lane * 16;
  float2* const sums = (float2*)(shared + WARPS * STAGES * STAGE);
  unsigned char* const rows = (unsigned char*)(sums + 2 * WARPS * PAIRS);
  const int pitch = (last - first) * STEP * 2 + 64;  // 64 more than whole lines: two rows use all banks

  // ---- weights: the ring runs STAGES steps ahead, through all tiles of the block
  int next_tile = own ? first_tile : tiles, next_step = 0;
  const int line = lane >> 3, piece = lane & 7;  // 8 lanes copy the 128 bytes of a row
  unsigned char* const slots = shared + warp * STAGES * STAGE + piece / 4 * 1024 + line * 64 + piece % 4 * 16;
  const E* lines[4];
  auto aim = [&] {  // rows past the end of a ragged matrix repeat its last one
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = first_row(next_tile, p.distance) + line + i % 2 * 4 + (i < 2 ? 0 : p.distance);
      lines[i] = p.weight + (i64)min(n, p.N - 1) * p.K;
    }
  };
  auto fetch = [&](int stage) {
    if (next_tile < tiles) {
      const u32 target = shared_address(slots + stage * STAGE);
      const int k = (first + share + next_step * SHARE) * STEP + piece * 8;
      const int at = min(k, p.K - 8);  // past the end of K: x is 0 there
#pragma unroll
      for (int i = 0; i < 4; ++i) async_copy_16(target + i * 256, lines[i] + at);
      if (++next_step == own) {
        next_step = 0;
        next_tile += stride;
        if (next_tile < tiles) aim();
      }
    }
    async_copy_commit();
  };
  if (next_tile < tiles) aim();
#pragma unroll
  for (int s = 0; s < STAGES; ++s) fetch(s);

  const int my_m = tid / 8;  // of the pair that this thread finishes, in every tile that all warps share
  int low, high;
  columns(group, tid % 8, p.distance, low, high);
  typename Epilogue::Fetched fetched = {};
  load_x<E, ROWS, Epilogue::NORM>(p, rows, pitch, first, last, [&] {
    if (SHARE == WARPS && tid < PAIRS && (!SPLITS || p.splits == 1)) fetched = epilogue.fetch(my_m, low, high);
  });
  __syncthreads();

  // ---- the tiles
  const unsigned char* x_rows[NT];
#pragma unroll
  for (int t = 0; t < NT; ++t) x_rows[t] = rows + min(t * 8 + row, p.M - 1) * pitch + quarter * 16;
  int stage = 0, turn = 0;
  for (int tile = first_tile; tile < tiles; tile += stride, turn ^= 1) {
    float c[CHAINS][NT][4] = {};
    for (int i = 0; i < own; ++i) {
      async_copy_wait<STAGES - 1>();
      __syncwarp();
      const unsigned char* const mine = ring + stage * STAGE;
      const int at = (share + i * SHARE) * STEP * 2;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 a = *(const uint4*)(mine + h * 1024), b = *(const uint4*)(mine + h * 1024 + 512);
#pragma unroll
        for (int t = 0; t < NT; ++t) {
          const uint4 x = *(const uint4*)(x_rows[t] + at + h * 64);
          mma<E>(c[h % CHAINS][t], a.x, b.x, a.y, b.y, x.x, x.y);
          mma<E>(c[h % CHAINS][t], a.z, b.z, a.w, b.w, x.z, x.w);
        }
      }
      __syncwarp();
      fetch(stage);  // after the products: all lanes have the step in registers
      if (++stage == STAGES) stage = 0;
    }
    float2* const parts = sums + turn * WARPS * PAIRS;  // two turns: one is read while the next tile's is written
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
    if constexpr (SHARE == 1) {
      __syncwarp();
#pragma unroll
      for (int i = lane; i < PAIRS; i += 32) {
        columns(tile, i % 8, p.distance, low, high);
        const float2 sum = parts[warp * PAIRS + i];
        epilogue.finish(epilogue.fetch(i / 8, low, high), i / 8, low, high, tile, sum.x, sum.y);
      }
      continue;  // the other turn's sums are the next tile's
    }
    __syncthreads();
    if (tid < PAIRS) {
      float2 sum = parts[tid];
#pragma unroll
      for (int w = 1; w < WARPS; ++w) {
        sum.x += parts[w * PAIRS + tid].x;
        sum.y += parts[w * PAIRS + tid].y;
      }
      if (!SPLITS || p.splits == 1) {
        epilogue.finish(fetched, my_m, low, high, tile, sum.x, sum.y);
        if (tile + groups < tiles) {
          columns(tile + groups, tid % 8, p.distance, low, high);
          fetched = epilogue.fetch(my_m, low, high);
        }
      } else {
        ((float2*)p.parts)[((i64)split * tiles + tile) * PAIRS + tid] = sum;
      }
    }
  }

  if (SPLITS && p.splits > 1) join_splits<E, PAIRS, WARPS * 32>(p, tiles, group, groups, epilogue);
}
