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
// A side: a tile is 16 weight rows, x is B, with 8 of its rows a product. (The order of K within a product is free, as
// long as both sides keep the same one: a lane's fragment is 8 neighbours instead of the hardware's 2 + 2 + 2 + 2.) Two
// ways to bring them in, one for small matrices and one for large: thin_ring.cuh, thin_stream.cuh. In both the first
// weights are fetched before wait_for_previous_kernel().
//
// A tile's rows come in pairs that one thread ends up with: `distance` rows apart, 8 in a plain matrix; gate and up;
// the two halves of a head that rotate together. So every epilogue works on registers.
//
// Blocks hold their part of x in shared memory for all their tiles. Where it is too large, K is divided among `splits`
// blocks, which write float32 parts; the last of them to come adds the parts in order, for all tiles at once: asking
// who is last after every tile would take as long as reading one. Which numbers are added in which
// order depends on N, K, ROWS and the grid, never on M, x or time: a row's result is the same whoever else is there.
#include "thin_ring.cuh"
#include "thin_stream.cuh"

constexpr int STREAM = 0;  // as SHARE: by thin_stream.cuh
template <int SHARE> constexpr int THREADS = (SHARE == STREAM ? WARPS + 1 : WARPS) * 32;
// Blocks that a multiprocessor's registers must have room for: those of the kernels that wait behind this one, too
template <int ROWS, int SHARE> constexpr int RESIDENT = ROWS <= 8 && SHARE != STREAM ? 3 : 2;

template <class E, int ROWS, int STAGES, int SHARE, class Epilogue>
__device__ __forceinline__ void multiply(const Operands<E>& p, const int tiles, const Epilogue& epilogue) {
#ifdef HOPPER
  if constexpr (SHARE == STREAM) return multiply_stream<E, ROWS, STAGES>(p, tiles, epilogue);
#endif
  if constexpr (SHARE != STREAM) multiply_ring<E, ROWS, STAGES, SHARE>(p, tiles, epilogue);
}

// ---- kernels: the operands first, in the order of Operands -----------------------------------------------------------
#define OPERANDS(E) \
  const E *weight, const E *bias, const E *x, const int *picks, const E *norm, const float *squares, float *parts, \
      u32 *tickets, int M, int N, int K, int distance, int splits, int square_tiles, float epsilon
#define PACKED(E) \
  Operands<E> { \
    weight, bias, x, picks, norm, squares, parts, tickets, M, N, K, distance, splits, square_tiles, epsilon \
  }

template <class E, int ROWS, int STAGES, int SHARE>
__global__ void __launch_bounds__(THREADS<SHARE>, RESIDENT<ROWS, SHARE>) thin_product(OPERANDS(E), E* out) {
  const Operands<E> p = PACKED(E);
  multiply<E, ROWS, STAGES, SHARE>(p, (N + TILE - 1) / TILE, Store<E, E, true>{p, out});
}

template <class E, int ROWS, int STAGES, int SHARE>
__global__ void __launch_bounds__(THREADS<SHARE>, RESIDENT<ROWS, SHARE>) thin_logits(OPERANDS(E), float* out) {
  const Operands<E> p = PACKED(E);
  multiply<E, ROWS, STAGES, SHARE>(p, (N + TILE - 1) / TILE, Store<E, float, false>{p, out});
}

template <class E, int ROWS, int STAGES, int SHARE>
__global__ void __launch_bounds__(THREADS<SHARE>, RESIDENT<ROWS, SHARE>) thin_add(
    OPERANDS(E), E* residual, float* squares_out) {
  const Operands<E> p = PACKED(E);
  const int tiles = (N + TILE - 1) / TILE;
  multiply<E, ROWS, STAGES, SHARE>(p, tiles, Add<E>{p, residual, squares_out, tiles});
}

template <class E, int ROWS, int STAGES, int SHARE>
__global__ void __launch_bounds__(THREADS<SHARE>, RESIDENT<ROWS, SHARE>) thin_gate(
    OPERANDS(E), E* out) {  // distance = N / 2: gate, then up
  const Operands<E> p = PACKED(E);
  multiply<E, ROWS, STAGES, SHARE>(p, (distance + 7) / 8, Gate<E>{p, out});
}

template <class E, int ROWS, int STAGES, int SHARE, int D>
__global__ void __launch_bounds__(THREADS<SHARE>, ROWS == 1 && SHARE != STREAM ? 3 : 2) thin_append(
    // distance = D / 2; N = (H + 2 KH) D
    OPERANDS(E), E* queries, const float* cosines, const float* sines, const int* rows, const int* positions,
    const int* page_tables, char* layer_pool, int* failed, int H, int KH, int max_pages, i64 frame_stride) {
  const Operands<E> p = PACKED(E);
  const Append<E, D> append = {p, queries, cosines, sines, rows, positions, page_tables,
                               layer_pool, failed, H, KH, max_pages, frame_stride};
  multiply<E, ROWS, STAGES, SHARE>(p, N / TILE, append);
}

// residual [M, K] = rows `ids` of embedding [V, K], and the squares of each row's 16 columns. One block a row.
template <class E>
__global__ void __launch_bounds__(THREADS<WARPS>) thin_embed(
    const E* __restrict__ embedding, const int* ids, E* residual, float* squares, int K) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int m = blockIdx.x, tiles = (K + TILE - 1) / TILE;
  const E* const source = embedding + (i64)(int)load_ordered((const u32*)ids + m) * K;
  for (int tile = threadIdx.x; tile < tiles; tile += THREADS<WARPS>) {
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
