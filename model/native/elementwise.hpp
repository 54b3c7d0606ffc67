// elementwise: norms, the rotation with the write into the pool, and SiLU; one row at a time, float32 inside.
#pragma once
#include <cmath>

#include "network.hpp"
#include "numbers.hpp"

// 1 / rms(x)
inline float inverse_rms(const float* x, int64_t n, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
  return 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
}

// residual += x; out = weight * residual / rms(residual). wide: n floats to work in.
template <class Scalar>
inline void norm_row(const Scalar* x, Scalar* residual, const float* weight, Scalar* out, int64_t n, float eps,
                     float* wide) {
  widen_all(x, wide, n);
  if (residual != nullptr) {
    for (int64_t i = 0; i < n; i++) {
      narrow(wide[i] + widen(residual[i]), residual[i]);
      wide[i] = widen(residual[i]);
    }
  }
  float factor = inverse_rms(wide, n, eps);
  for (int64_t i = 0; i < n; i++) narrow(wide[i] * factor * weight[i], out[i]);
}

// One head, normed (if asked for) and rotated: dimension i turns with i + D / 2. wide: D floats; the result is in it.
template <class Scalar>
inline void rotate_head(const Scalar* head, const float* norm, float eps, const float* cosines, const float* sines,
                        int64_t D, float* wide) {
  widen_all(head, wide, D);
  if (norm != nullptr) {
    float factor = inverse_rms(wide, D, eps);
    for (int64_t d = 0; d < D; d++) {
      Scalar rounded;  // as the network was trained: the norm's result is a Scalar
      narrow(wide[d] * factor * norm[d], rounded);
      wide[d] = widen(rounded);
    }
  }
  int64_t half = D / 2;
  float* __restrict low = wide;
  float* __restrict high = wide + half;
  for (int64_t d = 0; d < half; d++) {
    float a = low[d], b = high[d];
    low[d] = a * cosines[d] - b * sines[d];
    high[d] = b * cosines[d] + a * sines[d];
  }
}

// Values that stay finite as Scalars; returns whether all were.
template <class Scalar>
inline bool narrow_finite(const float* from, Scalar* to, int64_t n) {
  uint32_t worst = 0;
  for (int64_t i = 0; i < n; i++) {
    narrow(from[i], to[i]);
    uint32_t exponent = as_bits(widen(to[i])) & 0x7f800000;
    worst = worst > exponent ? worst : exponent;
  }
  if (worst != 0x7f800000) return true;
  for (int64_t i = 0; i < n; i++) narrow(made_finite<Scalar>(widen(to[i])), to[i]);
  return false;
}

// One token: qkv (H + 2 KH, D) -> queries (H, D), and keys and values into the pool.
template <class Scalar>
inline void append_token(const Network& net, const Step& step, int64_t layer, int64_t token, const Scalar* qkv,
                         const float* q_norm, const float* k_norm, Scalar* queries, float* wide) {
  int64_t D = net.head_dim, page_scalars = net.page_size * D;
  const float *cosines = step.cosines + token * (D / 2), *sines = step.sines + token * (D / 2);
  for (int64_t head = 0; head < net.heads; head++) {
    rotate_head(qkv + head * D, q_norm, net.norm_eps, cosines, sines, D, wide);
    narrow_all(wide, queries + head * D, D);
  }
  Scalar* keys = static_cast<Scalar*>(net.pool) +
                 (step.frames[token] * net.layers + layer) * 2 * net.kv_heads * page_scalars + step.offsets[token] * D;
  bool finite = true;
  for (int64_t head = 0; head < net.kv_heads; head++, keys += page_scalars) {
    rotate_head(qkv + (net.heads + head) * D, k_norm, net.norm_eps, cosines, sines, D, wide);
    finite &= narrow_finite(wide, keys, D);
    widen_all(qkv + (net.heads + net.kv_heads + head) * D, wide, D);
    finite &= narrow_finite(wide, keys + net.kv_heads * page_scalars, D);
  }
  if (!finite) step.failed[token] = 1;
}

// silu(gate) * up, n of each; silu(x) = x / (1 + e^-x)
template <class Scalar>
inline void silu_mul_row(const Scalar* __restrict gate, const Scalar* __restrict up, Scalar* __restrict out,
                         int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    float x = widen(gate[i]);
    float silu = x / (1.0f + exp2_of(-LOG2_E * x));
    narrow(silu * widen(up[i]), out[i]);
  }
}

template <class Scalar>
inline bool all_finite(const Scalar* x, int64_t n) {
  uint32_t worst = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t exponent = as_bits(widen(x[i])) & 0x7f800000;
    worst = worst > exponent ? worst : exponent;
  }
  return worst != 0x7f800000;
}
