// attention: causal attention of some query tokens of one row over the frames that its page table names.
//
// A work item is (row, kv head, up to some query tokens); its queries are the heads that share the kv head, of all its
// tokens. Keys are taken CHUNK at a time, out of their frames into two small panels (matrix.hpp's packed form: keys as
// outputs of the first product, dims as outputs of the second), so that both products run through the same tile as the
// linears. Softmax is online, in float32 (Milakov 2018; Dao 2022, Alg. 1): the sums so far are scaled when a larger
// score comes.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "matrix.hpp"
#include "network.hpp"

struct AttentionItem {
  int32_t row, first, last;  // query tokens of the step
};

constexpr int CHUNK = 64;       // keys: two panels or more
constexpr int ITEM_ROWS = 42;   // queries of an item, about: three full tiles

// Heavy items first: the last ones to be taken are short, so the threads end together.
inline std::vector<AttentionItem> attention_items(const Network& net, const Step& step) {
  int64_t group = net.heads / net.kv_heads;
  int32_t most = static_cast<int32_t>(ITEM_ROWS / group > 1 ? ITEM_ROWS / group : 1);
  std::vector<AttentionItem> items;
  for (int32_t row = 0; row < step.rows; row++)
    for (int32_t last = step.query_starts[row + 1]; last > step.query_starts[row]; last -= most)
      items.push_back({row, last - most > step.query_starts[row] ? last - most : step.query_starts[row], last});
  auto cost = [&](const AttentionItem& item) {
    return static_cast<int64_t>(step.lengths[item.row]) * (item.last - item.first + 2);
  };
  std::stable_sort(items.begin(), items.end(), [&](auto& a, auto& b) { return cost(a) > cost(b); });
  return items;
}

// What one thread works in.
template <class Scalar>
struct AttentionScratch {
  int64_t rows, dims;  // with padding
  Buffer<Scalar> queries, keys, values, weights;
  Buffer<float> scores, sums, largest, scale;
  Buffer<Vector> totals;

  explicit AttentionScratch(const Network& net)
      : rows(std::max<int64_t>(net.heads / net.kv_heads, ITEM_ROWS)),
        dims(round_up(net.head_dim, PANEL)),
        queries(rows * dims),
        keys(packed_size<Scalar>(CHUNK, net.head_dim)),
        values(packed_size<Scalar>(net.head_dim, CHUNK)),
        weights(rows * CHUNK),
        scores(rows * CHUNK),
        sums(rows * dims),
        largest(rows),
        scale(rows),
        totals(rows) {}
};

// scores = queries * keys, one panel of keys
template <int ROWS>
struct ScoreTile {
  template <class Scalar>
  static void run(const Scalar* queries, const int64_t& stride, const Scalar* panel, const int64_t& dims,
                  float* scores) {
    Accumulators<ROWS> sums;
    for (auto& row : sums)
      for (auto& v : row) v = Vector{};
    add_products<ROWS>(queries, stride, panel, dims, sums);
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < TILE_VECTORS; v++) store(scores + r * CHUNK + v * LANES, sums[r][v]);
  }
};

// sums = sums * scale + weights * values, one panel of dims
template <int ROWS>
struct ValueTile {
  template <class Scalar>
  static void run(const Scalar* weights, const Scalar* panel, float* out, const int64_t& stride, const float* scale) {
    Accumulators<ROWS> sums;
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] = load(out + r * stride + v * LANES) * scale[r];
    add_products<ROWS>(weights, CHUNK, panel, CHUNK, sums);
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < TILE_VECTORS; v++) store(out + r * stride + v * LANES, sums[r][v]);
  }
};

// The scores of one query against `visible` of CHUNK keys -> weights, and the new largest, totals (a lane each) and
// scale. A score that is NaN makes the query's weights, totals and result NaN.
template <class Scalar>
inline void soften(float* scores, int visible, float factor, Scalar* weights, float& largest, Vector& totals,
                   float& scale) {
  Integers lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  Vector s[CHUNK / LANES], most = Vector{} + largest;
  for (int k = 0; k < CHUNK / LANES; k++) {
    s[k] = load(scores + k * LANES) * factor;
    s[k] = lane + k * LANES < visible ? s[k] : Vector{} - INFINITY;
    most = s[k] > most ? s[k] : most;
  }
  float now = largest_of(most);
  scale = exp2_of(largest - now);
  totals *= scale;
  for (int k = 0; k < CHUNK / LANES; k++) {
    s[k] = exp2_of(s[k] - now);
    s[k] = lane + k * LANES < visible ? s[k] : Vector{};
    totals += s[k];
    store(scores + k * LANES, s[k]);
  }
  narrow_all(scores, weights, CHUNK);
  largest = now;
}

// Where keys of one head and page are; its values lie KH pages further on.
template <class Scalar>
inline const Scalar* keys_of(const Network& net, int64_t frame, int64_t layer, int64_t kv_head) {
  return static_cast<const Scalar*>(net.pool) +
         ((frame * net.layers + layer) * 2 * net.kv_heads + kv_head) * net.page_size * net.head_dim;
}

inline void ask_for(const void* memory, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(memory) + i, 0, 2);
}

// Values of `run` keys, row after row -> their places in the panels, from key number `key` of the chunk on. Pairs
// are written whole; the partner of a last even key is zero, as is all that lies past the keys.
template <class Scalar>
inline void pack_values(const Scalar* values, int64_t D, int64_t key, int64_t run, Scalar* packed) {
  constexpr int G = GROUP<Scalar>;
  for (int64_t i = 0; i < run;) {
    bool is_even = (key + i) % G == 0, has_partner = i + 1 < run;
    for (int64_t first = 0; first < D; first += PANEL) {
      int64_t width = D - first < PANEL ? D - first : PANEL;
      const Scalar* from = values + i * D + first;
      Scalar* to = packed + first * CHUNK + (key + i) / G * (G * PANEL);
      if constexpr (G == 1) {
        memcpy(to, from, width * sizeof(Scalar));
      } else if (is_even) {
        auto pairs = reinterpret_cast<uint32_t*>(to);
        auto low = reinterpret_cast<const uint16_t*>(from), high = has_partner ? low + D : nullptr;
        if (high == nullptr)
          for (int64_t d = 0; d < width; d++) pairs[d] = low[d];
        else if (width == PANEL)
          for (int64_t d = 0; d < PANEL; d++) pairs[d] = low[d] | static_cast<uint32_t>(high[d]) << 16;
        else
          for (int64_t d = 0; d < width; d++) pairs[d] = low[d] | static_cast<uint32_t>(high[d]) << 16;
      } else {  // pages of an odd size: the partner came with the page before
        for (int64_t d = 0; d < width; d++) to[d * G + 1] = from[d];
      }
    }
    i += G == 2 && is_even && has_partner ? 2 : 1;
  }
}

// Keys [start, start + count) of one kv head -> both panels. Values past `count` are zero; keys there may be anything,
// since their scores are replaced. `limit`: of all keys.
template <class Scalar>
inline void pack_keys(const Network& net, const Step& step, int64_t layer, int32_t row, int64_t kv_head, int64_t start,
                      int64_t count, int64_t limit, AttentionScratch<Scalar>& scratch) {
  int64_t D = net.head_dim, padded = round_up(D, GROUP<Scalar>), page_size = net.page_size;
  int64_t to_values = net.kv_heads * page_size * D;
  if (count < CHUNK) scratch.values.clear();
  const int32_t* table = step.page_tables + row * step.pages;
  for (int64_t key = 0; key < count;) {
    int64_t page = (start + key) / page_size, offset = (start + key) % page_size, run = page_size - offset;
    run = run < count - key ? run : count - key;
    run = run < PANEL - key % PANEL ? run : PANEL - key % PANEL;
    if ((page + 1) * page_size < limit) {  // frames are scattered: no processor guesses where the next one is
      const Scalar* next = keys_of<Scalar>(net, table[page + 1], layer, kv_head);
      ask_for(next + offset * D, run * D * sizeof(Scalar));
      ask_for(next + to_values + offset * D, run * D * sizeof(Scalar));
    }
    const Scalar* keys = keys_of<Scalar>(net, table[page], layer, kv_head) + offset * D;
    int64_t there = std::min(page_size - offset, PANEL - key % PANEL);  // a whole vector of keys is cheaper than a few
    pack_rows(keys, D, static_cast<int>(std::min(round_up(run, LANES), there)), D,
              scratch.keys.data() + key / PANEL * PANEL * padded + key % PANEL * GROUP<Scalar>);
    pack_values(keys + to_values, D, key, run, scratch.values.data());
    key += run;
  }
}

// q and out: (T, H, D).
template <class Scalar>
inline void attend(const Network& net, const Step& step, int64_t layer, const AttentionItem& item, int64_t kv_head,
                   const Scalar* q, Scalar* out, AttentionScratch<Scalar>& scratch) {
  int64_t D = net.head_dim, padded = round_up(D, GROUP<Scalar>), group = net.heads / net.kv_heads;
  int64_t tokens = item.last - item.first, rows = tokens * group, dims = scratch.dims;
  int64_t position = step.lengths[item.row] - (step.query_starts[item.row + 1] - item.first);  // of its first token
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t g = 0; g < group; g++)
      memcpy(scratch.queries.data() + (t * group + g) * D, q + ((item.first + t) * net.heads + kv_head * group + g) * D,
             D * sizeof(Scalar));
  for (int64_t r = 0; r < rows; r++) scratch.largest[r] = -3e38f, scratch.totals[r] = Vector{};
  memset(scratch.sums.data(), 0, rows * dims * sizeof(float));
  int64_t keys = position + tokens, pieces = (rows + TILE_ROWS - 1) / TILE_ROWS;
  for (int64_t start = 0; start < keys; start += CHUNK) {
    int64_t count = keys - start < CHUNK ? keys - start : CHUNK;
    pack_keys(net, step, layer, item.row, kv_head, start, count, keys, scratch);
    for (int64_t piece = 0; piece < pieces; piece++) {
      int64_t first = rows * piece / pieces, last = rows * (piece + 1) / pieces;
      for (int64_t key = 0; key < count; key += PANEL)
        with_rows<ScoreTile>(last - first, scratch.queries.data() + first * D, D,
                             static_cast<const Scalar*>(scratch.keys.data() + key * padded), D,
                             scratch.scores.data() + first * CHUNK + key);
      for (int64_t r = first; r < last; r++) {
        int64_t visible = position + r / group + 1 - start;
        visible = visible < 0 ? 0 : visible < CHUNK ? visible : CHUNK;
        soften(scratch.scores.data() + r * CHUNK, static_cast<int>(visible), net.score_scale * LOG2_E,
               scratch.weights.data() + r * CHUNK, scratch.largest[r], scratch.totals[r], scratch.scale[r]);
      }
      for (int64_t first_dim = 0; first_dim < dims; first_dim += PANEL)
        with_rows<ValueTile>(last - first, static_cast<const Scalar*>(scratch.weights.data() + first * CHUNK),
                             static_cast<const Scalar*>(scratch.values.data() + first_dim * CHUNK),
                             scratch.sums.data() + first * dims + first_dim, dims,
                             static_cast<const float*>(scratch.scale.data() + first));
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    float* sums = scratch.sums.data() + r * dims;
    float factor = 1.0f / sum_of(scratch.totals[r]);
    for (int64_t d = 0; d < D; d++) sums[d] *= factor;
    narrow_all(sums, out + ((item.first + r / group) * net.heads + kv_head * group + r % group) * D, D);
  }
}
