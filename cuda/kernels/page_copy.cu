// page_copy: copy whole frames inside the pool, all layers: the copies of copy-on-write.
//   pool                   frame f is frame_bytes bytes at pool + f * frame_bytes; a multiple of 16
//   sources, targets [N]   int32; targets are distinct and none is a source
// Grid (N, slices): block (i, s) copies every slices-th piece of 16 KB of pair i. Whole frames, also past the last
// token written: that part is finite and masked. Bound by bandwidth: 1 us for a frame of 2 MB.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
page_copy(char* pool, const int* sources, const int* targets, i64 frame_bytes) {
  const uint4* source = (const uint4*)(pool + sources[blockIdx.x] * frame_bytes);
  uint4* target = (uint4*)(pool + targets[blockIdx.x] * frame_bytes);
  const i64 words = frame_bytes / 16;
  for (i64 start = (i64)blockIdx.y * 1024; start < words; start += (i64)gridDim.y * 1024) {
    uint4 piece[4];  // four loads under way before the first store
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const i64 w = start + i * 256 + threadIdx.x;
      if (w < words) piece[i] = source[w];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const i64 w = start + i * 256 + threadIdx.x;
      if (w < words) target[w] = piece[i];
    }
  }
}
