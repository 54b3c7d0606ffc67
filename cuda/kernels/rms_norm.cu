// rms_norm: add the residual, then normalize each row by its root mean square.
//   x [T, N] E           row t starts at x + t * N. Or, with parts > 0, their sum is x: [parts, T, N] float32
//   residual [T, N] E    or null. With it: the sum x + residual, rounded to E, is normalized, and replaces residual
//   weight [N] E
//   out [T, N] E         sum / sqrt(mean(sum^2) + epsilon) * weight, rounded once; may be x if that is of E
// One block a row; the row stays in registers, CHUNKS pieces of 16 bytes a thread: N <= threads * CHUNKS * CHUNK<E>,
// N a multiple of CHUNK<E>. Bound by bandwidth: each number is read once and written once.
#include "common.cuh"

// So many that all loads are under way at once; with one chunk so few that 512 threads fit beside a block of batch_linear
template <int CHUNKS> constexpr int REGISTERS = CHUNKS == 1 ? 56 : CHUNKS == 2 ? 80 : 128;

template <class E, int CHUNKS>
__global__ void __maxnreg__(REGISTERS<CHUNKS>) rms_norm(
    const void* x, E* residual, const E* weight, E* out, int N, int parts, float epsilon) {
  constexpr int C = CHUNK<E>;
  __shared__ float sums[32];
  const i64 row = (i64)blockIdx.x * N;
  const int chunks = N / C;
  allow_next_kernel();
  uint4 scale[CHUNKS];  // weights: written long before, so they need not wait
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const int c = threadIdx.x + i * blockDim.x;
    if (c < chunks) scale[i] = *(const uint4*)(weight + c * C);
  }
  wait_for_previous_kernel();

  float value[CHUNKS][C], squares = 0.f;
  uint4 other[CHUNKS];
  i64 places[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {  // whoever has no chunk has the row's last one, and leaves it alone
    places[i] = row + min(threadIdx.x + i * blockDim.x, chunks - 1) * C;
    if (residual) other[i] = load_ordered((const uint4*)(residual + places[i]));
  }
  load_summed<E>(x, places, parts, (i64)gridDim.x * N, value);
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    if (threadIdx.x + i * blockDim.x >= chunks) continue;
    if (residual) {
      float more[C];
      unpack_chunk<E>(other[i], more);
#pragma unroll
      for (int k = 0; k < C; ++k) value[i][k] = round_to<E>(value[i][k] + more[k]);
      *(uint4*)(residual + places[i]) = pack_chunk<E>(value[i]);
    }
#pragma unroll
    for (int k = 0; k < C; ++k) squares += value[i][k] * value[i][k];
  }
  squares = warp_sum(squares);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = squares;
  __syncthreads();
  const int lane = threadIdx.x & 31;
  squares = warp_sum(lane < blockDim.x >> 5 ? sums[lane] : 0.f);
  const float factor = 1.f / sqrtf(squares / N + epsilon);

#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const int c = threadIdx.x + i * blockDim.x;
    if (c >= chunks) continue;
    float w[C];
    unpack_chunk<E>(scale[i], w);
#pragma unroll
    for (int k = 0; k < C; ++k) w[k] *= value[i][k] * factor;
    *(uint4*)(out + row + c * C) = pack_chunk<E>(w);
  }
}
