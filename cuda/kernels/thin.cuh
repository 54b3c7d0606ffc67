// thin.cuh: what both ways to multiply a few rows share (thin_ring.cuh, thin_stream.cuh): the operands, x in shared
// memory, the sums of a divided K, and what happens to a sum in the end. thin_linear.cu says what it is all for.
#ifndef THIN_CUH
#define THIN_CUH
#include "common.cuh"

constexpr int WARPS = 8;  // that multiply
constexpr int STEP = 64;  // of K: what splits are counted in
constexpr int TILE = 16;  // weight rows

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
__device__ __forceinline__ void columns(int tile, int in_tile, int distance, int& low, int& high) {
  low = first_row(tile, distance) + in_tile;
  high = low + distance;
}

// ---- x -------------------------------------------------------------------------------------------------------------
// K from step `first` to `last` of all rows into shared memory, normalized (NORM) or as it is; the caller's barrier
// follows. Waits for the kernel before; `meanwhile` runs when x is on its way. Threads below 32 WARPS come here.
template <class E, int ROWS, bool NORM, class Meanwhile> __device__ __forceinline__ void load_x(
    const Operands<E>& p, unsigned char* const rows, const int pitch, const int first, const int last,
    const Meanwhile& meanwhile) {
  constexpr int PER_ROW = ROWS >= WARPS ? 1 : WARPS / ROWS;  // warps that load and normalize a row of x together
  constexpr int OWN_ROWS = (ROWS + WARPS - 1) / WARPS;       // or rows of a warp
  constexpr int BATCH = ROWS == 1 ? 2 : ROWS < WARPS ? 4 : 8;  // pieces of the norm's weight that a lane has under way
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
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
  meanwhile();
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
    async_copy_wait<0>();  // a ring's first steps, too: they were on their way before x was there
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
}

// ---- sums of a divided K -------------------------------------------------------------------------------------------
// The last block of a group to come adds the splits, for all their tiles. All threads of the block come here
template <class E, int PAIRS, int THREADS, class Epilogue> __device__ __forceinline__ void join_splits(
    const Operands<E>& p, const int tiles, const int group, const int groups, const Epilogue& epilogue) {
  __shared__ u32 ticket;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) ticket = atomicAdd(p.tickets + group, 1u);
  __syncthreads();
  if (ticket != (u32)(p.splits - 1)) return;
  __threadfence();
  int low, high;
  constexpr int JOIN = 2;  // pairs that a thread has under way
  for (int begin = threadIdx.x; group + begin / PAIRS * groups < tiles; begin += JOIN * THREADS) {
    typename Epilogue::Fetched early[JOIN] = {};
    float2 sum[JOIN] = {};
    int pairs[JOIN], join_tiles[JOIN];
#pragma unroll
    for (int j = 0; j < JOIN; ++j) {
      const int i = begin + j * THREADS;
      pairs[j] = i % PAIRS;
      join_tiles[j] = group + i / PAIRS * groups;
      columns(join_tiles[j], pairs[j] % 8, p.distance, low, high);
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
      columns(join_tiles[j], pairs[j] % 8, p.distance, low, high);
      epilogue.finish(early[j], pairs[j] / 8, low, high, join_tiles[j], sum[j].x, sum[j].y);
    }
  }
  if (threadIdx.x == 0) p.tickets[group] = 0;  // for the next launch
}

// ---- epilogues -----------------------------------------------------------------------------------------------------
// `fetch(m, low, high)` loads what an epilogue needs besides sums, before they are there;
// `finish(fetched, m, low, high, tile, x, y)` has the sums x and y of row m and the columns low and high. The threads
// of 8 neighbouring `low` are neighbours; m may be M or more. NORM: whether x is normalized first.
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
    store_number<E>(out + (i64)m * p.distance + low, up * silu(gate));
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
      f.frame = frame_of((int)load_ordered((const u32*)page_tables + entry));
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
#endif  // THIN_CUH
