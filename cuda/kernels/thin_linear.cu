// thin_linear: the network's matrix products for a few rows, with what stands before and after them fused in.
//
//   y [M, N] = x [M, K] weight^T [K, N] (+ bias [N])       M <= ROWS; 16-bit numbers, float32 sums
//
//   thin_embed     residual = rows of the embedding
//   thin_append    norm, qkv, rotate the queries, write keys and values into their frames
//   thin_product   norm, qkv, as it is: where queries and keys are normalized before they rotate (kv_append follows)
//   thin_add       residual += product                     the attention's and the feed-forward network's outputs
//   thin_gate      norm, gate and up, silu(gate) * up
//   thin_logits    product in float32, of the rows of x that `picks` names
//
// "norm" is RMS norm of the residual stream. Its sum of squares costs no pass of its own: who writes the residual
// leaves the sum of each row's 16 columns in `squares` [M][tiles], and who normalizes adds those up.
//
// Time is that of reading the weights once, so everything serves a steady stream of them. Weights are the tensor cores'
// A side: a tile is 16 weight rows, x is B, with 8 of its rows a product. SHARE warps of a block share a tile and
// divide K, in steps of 64 numbers (128 bytes of each row): all WARPS of them, so that a block's time is short; or,
// where every warp has tiles of its own to go through (logits), 1, and no warp waits for another. A warp fetches whole
// lines with cp.async, and puts the 16-byte pieces where the lane that they are a fragment of reads them: no bank
// conflict, no barrier but that of the warp, and STAGES steps a warp under way. (The order of K within a product is
// free, as long as both sides keep the same one: a lane's fragment is 8 neighbours instead of the hardware's 2 + 2 + 2
// + 2.) The ring runs on from one tile to the next, and its first STAGES steps are fetched before
// wait_for_previous_kernel(): a small matrix is in shared memory when its turn comes.
//
// A tile's rows come in pairs that one thread ends up with: `distance` rows apart, 8 in a plain matrix; gate and up;
// the two halves of a head that rotate together. So every epilogue works on registers.
//
// Blocks hold their part of x in shared memory for all their tiles. Where it is too large, K is divided among `splits`
// blocks, which write float32 parts; the last of them to come adds the parts in order, for all tiles at once: asking
// who is last after every tile would take as long as reading one. Which numbers are added in which
// order depends on N, K, ROWS and the grid, never on M, x or time: a row's result is the same whoever else is there.
#include "common.cuh"

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int STEP = 64;               // of K
constexpr int TILE = 16;               // weight rows
constexpr int STAGE = TILE * STEP * 2;  // bytes of a step
// Blocks that a multiprocessor's registers must have room for: those of the kernels that wait behind this one, too
template <int ROWS> constexpr int RESIDENT = ROWS <= 8 ? 3 : 2;

template <class E> struct Operands {
  const E *weight, *bias, *x;  // bias may be null
  const int* picks;            // [M] rows of x, or null: row m is m
  const E* norm;               // [K], where x is normalized: `NORM` of the epilogue
  const float* squares;        // [M][square_tiles], too
  float* parts;                // [splits][tiles][64 ROWS'][2], ROWS' = ROWS / 8 rounded up
  u32* tickets;                // [grid / splits], 0 between launches
  int M, N, K, distance, splits, square_tiles;
  float epsilon;
};

// The weight rows of a tile: 8 from `low`, and those `distance` further. Tiles go along `distance` rows, 8 at a time,
// then jump over their partners.
__device__ __forceinline__ int first_row(int tile, int distance) {
  const int per = (distance + 7) / 8, jump = tile / per;
  return jump * 2 * distance + (tile - jump * per) * 8;
}

// `epilogue`: `fetch(m, low, high)` loads what it needs besides sums, before they are there;
// `finish(fetched, m, low, high, tile, x, y)` has the sums x and y of row m and the columns low and high. The threads
// of 8 neighbouring `low` are neighbours; m may be M or more. NORM: whether x is normalized first.
template <class E, int ROWS, int STAGES, int SHARE, class Epilogue>
__device__ __forceinline__ void multiply(const Operands<E>& p, const int tiles, const Epilogue& epilogue) {
  constexpr int NT = (ROWS + 7) / 8, PAIRS = 64 * NT;
  constexpr bool NORM = Epilogue::NORM;
  constexpr bool SPLITS = ROWS > 1 && SHARE == WARPS;  // without the joining a block takes fewer registers
  constexpr int CHAINS = NT <= 2 ? 2 : 1;  // sums side by side: a product waits for the one before it in its chain
  constexpr int PER_ROW = ROWS >= WARPS ? 1 : WARPS / ROWS;  // warps that load and normalize a row of x together
  constexpr int OWN_ROWS = (ROWS + WARPS - 1) / WARPS;       // or rows of a warp
  constexpr int BATCH = ROWS == 1 ? 2 : ROWS < WARPS ? 4 : 8;  // pieces of the norm's weight that a lane has under way
  DYNAMIC_SHARED(shared);  // [WARPS][STAGES] steps, [2][WARPS][PAIRS] sums, [ROWS][pitch] x
  __shared__ u32 ticket;
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

  // ---- x: this split's columns of all rows into shared memory, all copies at once. A lane normalizes what it copied
  const int chunks = (last - first) * (STEP / 8), own_row = warp / PER_ROW;
  const int own_chunk = warp % PER_ROW * 32 + lane;
  auto load_norm = [&](int c) {
    const int k = first * STEP + c * 8;
    return c < chunks && k < p.K ? *(const uint4*)(p.norm + k) : make_uint4(0, 0, 0, 0);
  };
  uint4 scale[BATCH];
  auto load_norms = [&](int begin) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) scale[b] = load_norm(begin + b * PER_ROW * 32);
  };
  if constexpr (NORM) load_norms(own_chunk);  // written long before
  wait_for_previous_kernel();
#pragma unroll
  for (int r = 0; r < OWN_ROWS; ++r) {
    const int m = own_row + r * WARPS;
    if (m >= p.M) break;
    const E* const source = p.x + (i64)(p.picks ? (int)load_ordered((const u32*)p.picks + m) : m) * p.K;
#pragma unroll 4
    for (int c = own_chunk; c < chunks; c += PER_ROW * 32) {
      unsigned char* const target = rows + m * pitch + c * 16;
      const int k = first * STEP + c * 8;
      if (k < p.K) async_copy_16(shared_address(target), source + k);
      else *(uint4*)target = make_uint4(0, 0, 0, 0);
    }
  }
  async_copy_commit();
  auto columns = [&](int tile, int in_tile, int& low, int& high) {
    low = first_row(tile, p.distance) + in_tile;
    high = low + p.distance;
  };
  const int my_m = tid / 8;  // of the pair that this thread finishes, in every tile that all warps share
  int low, high;
  columns(group, tid % 8, low, high);
  typename Epilogue::Fetched fetched = {};
  if (SHARE == WARPS && tid < PAIRS && (!SPLITS || p.splits == 1)) fetched = epilogue.fetch(my_m, low, high);
  if constexpr (NORM) {
    float factors[OWN_ROWS] = {};
#pragma unroll 4
    for (int i = lane; i < p.square_tiles; i += 32) {
#pragma unroll
      for (int r = 0; r < OWN_ROWS; ++r) {  // a row past the end repeats the last one
        const int m = min(own_row + r * WARPS, p.M - 1);
        factors[r] += __uint_as_float(load_ordered((const u32*)(p.squares + m * p.square_tiles + i)));
      }
    }
#pragma unroll
    for (int r = 0; r < OWN_ROWS; ++r) factors[r] = 1.f / sqrtf(warp_sum(factors[r]) / p.K + p.epsilon);
    async_copy_wait<0>();  // the ring's first steps, too: they were on their way before x was there
    for (int begin = own_chunk; begin < chunks; begin += BATCH * PER_ROW * 32) {
      if (begin != own_chunk) load_norms(begin);
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        const int c = begin + b * PER_ROW * 32;
        if (c >= chunks) break;
        float weight[8];
        unpack_chunk<E>(scale[b], weight);
#pragma unroll
        for (int r = 0; r < OWN_ROWS; ++r) {
          const int m = own_row + r * WARPS;
          if (m >= p.M) break;
          uint4* const place = (uint4*)(rows + m * pitch + c * 16);
          float value[8];
          unpack_chunk<E>(*place, value);
#pragma unroll
          for (int k = 0; k < 8; ++k) value[k] = weight[k] * (value[k] * factors[r]);
          *place = pack_chunk<E>(value);
        }
      }
    }
  }
  async_copy_wait<0>();
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
        columns(tile, i % 8, low, high);
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
          columns(tile + groups, tid % 8, low, high);
          fetched = epilogue.fetch(my_m, low, high);
        }
      } else {
        ((float2*)p.parts)[((i64)split * tiles + tile) * PAIRS + tid] = sum;
      }
    }
  }

  // ---- the last block of a group joins the splits, for all their tiles
  if (!SPLITS || p.splits == 1) return;
  __threadfence();
  __syncthreads();
  if (tid == 0) ticket = atomicAdd(p.tickets + group, 1u);
  __syncthreads();
  if (ticket != (u32)(p.splits - 1)) return;
  __threadfence();
  constexpr int JOIN = 2;  // pairs that a thread has under way
  for (int begin = tid; group + begin / PAIRS * groups < tiles; begin += JOIN * THREADS) {
    typename Epilogue::Fetched early[JOIN] = {};
    float2 sum[JOIN] = {};
    int pairs[JOIN], join_tiles[JOIN];
#pragma unroll
    for (int j = 0; j < JOIN; ++j) {
      const int i = begin + j * THREADS;
      pairs[j] = i % PAIRS;
      join_tiles[j] = group + i / PAIRS * groups;
      columns(join_tiles[j], pairs[j] % 8, low, high);
      if (join_tiles[j] < tiles) early[j] = epilogue.fetch(pairs[j] / 8, low, high);
    }
#pragma unroll 2
    for (int s = 0; s < p.splits; ++s) {
#pragma unroll
      for (int j = 0; j < JOIN; ++j) {
        if (join_tiles[j] >= tiles) continue;
        const float2 part = __ldcg((const float2*)p.parts + ((i64)s * tiles + join_tiles[j]) * PAIRS + pairs[j]);
        sum[j].x += part.x;
        sum[j].y += part.y;
      }
    }
#pragma unroll
    for (int j = 0; j < JOIN; ++j) {
      if (join_tiles[j] >= tiles) continue;  // whole warps: PAIRS is a multiple of 32
      columns(join_tiles[j], pairs[j] % 8, low, high);
      epilogue.finish(early[j], pairs[j] / 8, low, high, join_tiles[j], sum[j].x, sum[j].y);
    }
  }
  if (tid == 0) p.tickets[group] = 0;  // for the next launch
}

// ---- epilogues -----------------------------------------------------------------------------------------------------
template <class E> __device__ __forceinline__ float2 load_bias(const Operands<E>& p, int low, int high) {
  if (!p.bias) return make_float2(0.f, 0.f);
  return make_float2(load_number(p.bias + min(low, p.N - 1)), load_number(p.bias + min(high, p.N - 1)));
}

template <class E, class T, bool NORMALIZED> struct Store {  // T: E or float
  static constexpr bool NORM = NORMALIZED;
  typedef float2 Fetched;
  const Operands<E>& p;
  T* out;  // [M, N]
  __device__ __forceinline__ float2 fetch(int m, int low, int high) const { return load_bias(p, low, high); }
  __device__ __forceinline__ void put(T* target, float x) const {
    if constexpr (sizeof(T) == 4) *target = x;
    else store_number<E>(target, x);
  }
  __device__ __forceinline__ void finish(float2 bias, int m, int low, int high, int tile, float x, float y) const {
    if (m >= p.M) return;
    if (low < p.N) put(out + (i64)m * p.N + low, x + bias.x);
    if (high < p.N) put(out + (i64)m * p.N + high, y + bias.y);
  }
};

template <class E> struct Gate {
  static constexpr bool NORM = true;
  typedef float2 Fetched;
  const Operands<E>& p;
  E* out;  // [M, N / 2]
  __device__ __forceinline__ float2 fetch(int m, int low, int high) const { return load_bias(p, low, high); }
  __device__ __forceinline__ void finish(float2 bias, int m, int low, int high, int tile, float x, float y) const {
    if (m >= p.M || low >= p.distance) return;
    const float gate = x + bias.x, up = y + bias.y;
    store_number<E>(out + (i64)m * p.distance + low, up * (gate / (1.f + expf(-gate))));
  }
};

template <class E> struct Add {
  static constexpr bool NORM = false;
  typedef float2 Fetched;
  const Operands<E>& p;
  E* residual;     // [M, N]
  float* squares;  // [M][tiles]
  int tiles;
  __device__ __forceinline__ float2 fetch(int m, int low, int high) const {
    float2 sum = load_bias(p, low, high);
    if (m < p.M && low < p.N) sum.x += load_number(residual + (i64)m * p.N + low);
    if (m < p.M && high < p.N) sum.y += load_number(residual + (i64)m * p.N + high);
    return sum;
  }
  __device__ __forceinline__ void finish(float2 before, int m, int low, int high, int tile, float x, float y) const {
    x = low < p.N ? round_to<E>(x + before.x) : 0.f;
    y = high < p.N ? round_to<E>(y + before.y) : 0.f;
    const float sum = warp_sum<8>(x * x + y * y);  // every lane takes part
    if (m >= p.M) return;
    if (low < p.N) store_number<E>(residual + (i64)m * p.N + low, x);
    if (high < p.N) store_number<E>(residual + (i64)m * p.N + high, y);
    if (threadIdx.x % 8 == 0) squares[m * tiles + tile] = sum;
  }
};

template <class E, int D> struct Append {  // as kv_append does
  static constexpr bool NORM = true;
  struct Fetched {
    float2 bias;
    int row, position, frame;
    float c, s;
  };
  const Operands<E>& p;
  E* queries;  // [M, H, D]
  const float *cosines, *sines;
  const int *rows, *positions, *page_tables;
  char* layer_pool;
  int* failed;
  int H, KH, max_pages;
  i64 frame_stride;
  __device__ __forceinline__ Fetched fetch(int m, int low, int high) const {
    Fetched f = {load_bias(p, low, high), -1, 0, 0, 1.f, 0.f};
    if (m >= p.M) return f;
    f.row = (int)load_ordered((const u32*)rows + m);
    f.position = (int)load_ordered((const u32*)positions + m);  // at once: padding has one, too
    if (f.row < 0) return f;
    const int head = low / D;
    if (head >= H) {
      const i64 entry = (i64)f.row * max_pages + f.position / PAGE_SIZE;
      f.frame = (int)load_ordered((const u32*)page_tables + entry);
    }
    if (head < H + KH) {
      f.c = cosines[(i64)f.position * (D / 2) + low % D];
      f.s = sines[(i64)f.position * (D / 2) + low % D];
    }
    return f;
  }
  __device__ __forceinline__ void finish(
      const Fetched& f, int m, int low, int high, int tile, float x, float y) const {
    if (f.row < 0) return;
    const int head = low / D, d = low % D;
    x = round_to<E>(x + f.bias.x);
    y = round_to<E>(y + f.bias.y);
    bool good = is_finite(x) && is_finite(y);
    if (head < H + KH) {
      const float turned = x * f.c - y * f.s;
      y = y * f.c + x * f.s;
      x = turned;
    }
    if (head < H) {
      E* const target = queries + ((i64)m * H + head) * D + d;
      store_number<E>(target, x);
      store_number<E>(target + D / 2, y);
    } else if (f.frame >= 0) {
      const bool is_value = head >= H + KH;
      const int pair = head - H - (is_value ? KH : 0), slot = f.position % PAGE_SIZE;
      char* const page = layer_pool + f.frame * frame_stride + (i64)(2 * pair + (is_value ? 1 : 0)) * PAGE_BYTES<E, D>;
      store_number<E>((E*)(page + page_offset<E, D>(slot, d)), clamp_finite<E>(x));
      store_number<E>((E*)(page + page_offset<E, D>(slot, d + D / 2)), clamp_finite<E>(y));
    } else {
      good = false;
    }
    if (!good) failed[f.row] = 1;
  }
};

// ---- kernels: the operands first, in the order of Operands -----------------------------------------------------------
#define OPERANDS(E) \
  const E *weight, const E *bias, const E *x, const int *picks, const E *norm, const float *squares, float *parts, \
      u32 *tickets, int M, int N, int K, int distance, int splits, int square_tiles, float epsilon
#define PACKED(E) \
  Operands<E> { \
    weight, bias, x, picks, norm, squares, parts, tickets, M, N, K, distance, splits, square_tiles, epsilon \
  }

template <class E, int ROWS, int STAGES>
__global__ void __launch_bounds__(THREADS, RESIDENT<ROWS>) thin_product(OPERANDS(E), E* out) {
  const Operands<E> p = PACKED(E);
  multiply<E, ROWS, STAGES, WARPS>(p, (N + TILE - 1) / TILE, Store<E, E, true>{p, out});
}

template <class E, int ROWS, int STAGES, int SHARE>
__global__ void __launch_bounds__(THREADS, RESIDENT<ROWS>) thin_logits(OPERANDS(E), float* out) {
  const Operands<E> p = PACKED(E);
  multiply<E, ROWS, STAGES, SHARE>(p, (N + TILE - 1) / TILE, Store<E, float, false>{p, out});
}

template <class E, int ROWS, int STAGES>
__global__ void __launch_bounds__(THREADS, RESIDENT<ROWS>) thin_add(
    OPERANDS(E), E* residual, float* squares_out) {
  const Operands<E> p = PACKED(E);
  const int tiles = (N + TILE - 1) / TILE;
  multiply<E, ROWS, STAGES, WARPS>(p, tiles, Add<E>{p, residual, squares_out, tiles});
}

template <class E, int ROWS, int STAGES>
__global__ void __launch_bounds__(THREADS, RESIDENT<ROWS>) thin_gate(
    OPERANDS(E), E* out) {  // distance = N / 2: gate, then up
  const Operands<E> p = PACKED(E);
  multiply<E, ROWS, STAGES, WARPS>(p, (distance + 7) / 8, Gate<E>{p, out});
}

template <class E, int ROWS, int STAGES, int D>
__global__ void __launch_bounds__(THREADS, ROWS == 1 ? 3 : 2) thin_append(  // distance = D / 2; N = (H + 2 KH) D
    OPERANDS(E), E* queries, const float* cosines, const float* sines, const int* rows, const int* positions,
    const int* page_tables, char* layer_pool, int* failed, int H, int KH, int max_pages, i64 frame_stride) {
  const Operands<E> p = PACKED(E);
  multiply<E, ROWS, STAGES, WARPS>(p, N / TILE, Append<E, D>{p, queries, cosines, sines, rows, positions, page_tables,
                                                      layer_pool, failed, H, KH, max_pages, frame_stride});
}

// residual [M, K] = rows `ids` of embedding [V, K], and the squares of each row's 16 columns. One block a row.
template <class E>
__global__ void __launch_bounds__(THREADS) thin_embed(
    const E* __restrict__ embedding, const int* ids, E* residual, float* squares, int K) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int m = blockIdx.x, tiles = (K + TILE - 1) / TILE;
  const E* const source = embedding + (i64)(int)load_ordered((const u32*)ids + m) * K;
  for (int tile = threadIdx.x; tile < tiles; tile += THREADS) {
    float sum = 0.f;
#pragma unroll
    for (int k = tile * TILE; k < tile * TILE + TILE; k += 8) {
      if (k >= K) continue;
      const uint4 raw = *(const uint4*)(source + k);
      *(uint4*)(residual + (i64)m * K + k) = raw;
      float value[8];
      unpack_chunk<E>(raw, value);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += value[i] * value[i];
    }
    squares[m * tiles + tile] = sum;
  }
}
