// network: what a program runs over. These structs are mirrored in model/native_kernels.py, field by field.
#pragma once
#include <cstdint>

// The sizes of the network and where its memory is. Constant.
struct Network {
  int64_t layers, heads, kv_heads, head_dim, hidden, page_size;
  float norm_eps, score_scale;
  void* pool;  // [frame][layer][keys, values][kv head][page_size][head_dim] Scalar
};

// One step: T tokens of S rows. Decodes are rows of one token like all others.
struct Step {
  int64_t tokens, rows, samples;
  const int64_t* token_ids;    // (T,)
  const int64_t* frames;       // (T,) where each token's keys and values go
  const int64_t* offsets;      // (T,) in the page
  const float* cosines;        // (T, D / 2)
  const float* sines;          // (T, D / 2)
  const int32_t* page_tables;  // (S, pages)
  int64_t pages;
  const int32_t* lengths;       // (S,) keys after this step
  const int32_t* query_starts;  // (S + 1,)
  const int64_t* sampled;       // (N,) tokens whose logits are wanted
  uint8_t* failed;              // (T,) set where a key, a value or the last hidden state is not finite
};

enum Kind : int32_t { EMBED, LINEAR, NORM, APPEND, ATTENTION, SILU_MUL, CHECK, TAKE };

// One operator. `in` and `out` are buffers (T, width) Scalar, but of those after TAKE: (N, width).
struct Operator {
  Kind kind;
  int32_t layer;
  int32_t of_samples;  // rows are those that sample (N), not the tokens (T)
  int32_t wide;        // LINEAR: out is float32
  int64_t width;       // of out
  int64_t inputs;      // LINEAR: of in. EMBED: 1 if the weight is packed
  const void* in;
  void* out;
  const void* weight;   // LINEAR: packed; EMBED; NORM: float32; APPEND: the queries' norm or null, float32
  const void* weight2;  // LINEAR: bias or null; APPEND: the keys' norm or null, float32
  void* residual;       // NORM: null, or added to `in`; the sum is left there
};
