// silu_mul: the gate of the feed-forward network.
//   x [T, 2N] E     the gate's N numbers, then the up projection's N
//   out [T, N] E    gate * sigmoid(gate) * up, in float32, rounded once
// One chunk of 16 bytes a thread; N a multiple of CHUNK<E>. `chunks` = T * N / CHUNK<E>. Bound by bandwidth.
#include "common.cuh"

template <class E>
__global__ void __launch_bounds__(256) silu_mul(const E* x, E* out, int N, int chunks) {
  constexpr int C = CHUNK<E>;
  allow_next_kernel();
  wait_for_previous_kernel();
  const u32 i = blockIdx.x * 256 + threadIdx.x;
  if (i >= (u32)chunks) return;
  const u32 per_row = N / C, quotient = i / per_row;  // 32 bits: a division of 64 takes as long as the reads
  const i64 row = quotient, column = (i - quotient * per_row) * C;
  float gate[C], up[C];
  unpack_chunk<E>(load_ordered((const uint4*)(x + row * 2 * N + column)), gate);
  unpack_chunk<E>(load_ordered((const uint4*)(x + row * 2 * N + N + column)), up);
#pragma unroll
  for (int k = 0; k < C; ++k) up[k] *= silu(gate[k]);
  *(uint4*)(out + row * N + column) = pack_chunk<E>(up);
}
