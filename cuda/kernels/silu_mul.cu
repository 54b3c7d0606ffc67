// silu_mul: the gate of the feed-forward network.
//   x [T, 2N] E     the gate's N numbers, then the up projection's N
//   out [T, N] E    gate * sigmoid(gate) * up, in float32, rounded once
// One chunk of 16 bytes a thread; N a multiple of CHUNK<E>. `chunks` = T * N / CHUNK<E>. Bound by bandwidth.
#include "common.cuh"

template <class E>
__global__ void __launch_bounds__(256) silu_mul(const E* x, E* out, int N, i64 chunks) {
  constexpr int C = CHUNK<E>;
  allow_next_kernel();
  wait_for_previous_kernel();
  const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
  if (i >= chunks) return;
  const int per_row = N / C;
  const i64 row = i / per_row, column = (i - row * per_row) * C;
  float gate[C], up[C];
  unpack_chunk<E>(load_ordered((const uint4*)(x + row * 2 * N + column)), gate);
  unpack_chunk<E>(load_ordered((const uint4*)(x + row * 2 * N + N + column)), up);
#pragma unroll
  for (int k = 0; k < C; ++k) up[k] *= gate[k] / (1.f + expf(-gate[k]));
  *(uint4*)(out + row * N + column) = pack_chunk<E>(up);
}
