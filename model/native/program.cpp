// program: runs a step's operators in order, all threads together, one barrier after each.
//
// Python records the operators once (model/native_kernels.py) and calls `pagewalk_run` once a step, so no interpreter
// stands between two operators, and none of its locks. Within an operator, threads take work items from a counter: a
// thread whose core is shared with other work takes fewer.
#if defined(__linux__)
#include <malloc.h>
#endif

#include <algorithm>
#include <atomic>
#include <vector>

#include "attention.hpp"
#include "elementwise.hpp"
#include "matrix.hpp"
#include "network.hpp"
#include "threads.hpp"

namespace {

constexpr int64_t LINEAR_ROWS = 4 * TILE_ROWS;  // rows of one work item: its part of x stays in the cache

template <int ROWS>
struct LinearTile {
  // Rows x one panel; `width` outputs of it exist.
  template <class Scalar, class Result>
  static void run(const Scalar* x, const Scalar* panel, const int64_t& inputs, const Scalar* bias, Result* out,
                  const int64_t& stride, const int64_t& width) {
    Accumulators<ROWS> sums;
    for (auto& row : sums)
      for (auto& v : row) v = Vector{};
    add_products<ROWS>(x, inputs, panel, inputs, sums);
    for (int r = 0; r < ROWS; r++) {
      float wide[PANEL];
      for (int v = 0; v < TILE_VECTORS; v++) store(wide + v * LANES, sums[r][v]);
      if (bias != nullptr)
        for (int64_t i = 0; i < width; i++) wide[i] += widen(bias[i]);
      if (width == PANEL)
        narrow_all(wide, out + r * stride, PANEL);  // a constant length: a few instructions
      else
        narrow_all(wide, out + r * stride, width);
    }
  }
};

template <class Scalar>
class Program {
 public:
  Program(const Network& net, Threads& threads) : net_(net), threads_(threads) {}

  void run(const Operator* operators, int64_t count, const Step& step, int threads) {
    items_ = attention_items(net_, step);
    for (auto& next : next_) next.store(0);
    while (static_cast<int>(scratch_.size()) < threads) {
      scratch_.emplace_back(net_);
      wide_.emplace_back(std::max(net_.hidden, net_.head_dim));
    }
    threads_.run(threads, [&](int thread) {
      for (int64_t i = 0; i < count; i++) {
        run_operator(operators[i], step, thread, next_[i % COUNTERS]);
        threads_.barrier(thread, [&] { next_[(i + 1) % COUNTERS].store(0, std::memory_order_relaxed); });
      }
    });
  }

 private:
  static constexpr int COUNTERS = 2;  // one in use, one that was reset at the barrier before

  // Calls work(first, last) for pieces of [0, count) until none is left.
  template <class Work>
  static void share(std::atomic<int64_t>& next, int64_t count, int64_t piece, const Work& work) {
    while (true) {
      int64_t first = next.fetch_add(piece, std::memory_order_relaxed);
      if (first >= count) return;
      work(first, std::min(count, first + piece));
    }
  }

  void run_operator(const Operator& op, const Step& step, int thread, std::atomic<int64_t>& next) {
    auto in = static_cast<const Scalar*>(op.in);
    auto out = static_cast<Scalar*>(op.out);
    int64_t rows = op.of_samples ? step.samples : step.tokens, width = op.width;
    float* wide = wide_[thread].data();
    switch (op.kind) {
      case EMBED:
        return share(next, rows, 1, [&](int64_t row, int64_t) {
          auto weight = static_cast<const Scalar*>(op.weight);
          if (op.inputs)
            unpack_row(weight, step.token_ids[row], width, out + row * width);
          else
            memcpy(out + row * width, weight + step.token_ids[row] * width, width * sizeof(Scalar));
        });
      case LINEAR:
        return op.wide ? linear(op, rows, next, static_cast<float*>(op.out)) : linear(op, rows, next, out);
      case NORM:
        return share(next, rows, 4, [&](int64_t first, int64_t last) {
          auto residual = static_cast<Scalar*>(op.residual);
          for (int64_t row = first; row < last; row++)
            norm_row(in + row * width, residual == nullptr ? nullptr : residual + row * width,
                     static_cast<const float*>(op.weight), out + row * width, width, net_.norm_eps, wide);
        });
      case APPEND:
        return share(next, rows, 2, [&](int64_t first, int64_t last) {
          int64_t qkv_width = (net_.heads + 2 * net_.kv_heads) * net_.head_dim;
          for (int64_t row = first; row < last; row++)
            append_token(net_, step, op.layer, row, in + row * qkv_width, static_cast<const float*>(op.weight),
                         static_cast<const float*>(op.weight2), out + row * width, wide);
        });
      case ATTENTION:
        return share(next, static_cast<int64_t>(items_.size()) * net_.kv_heads, 1, [&](int64_t work, int64_t) {
          attend(net_, step, op.layer, items_[work / net_.kv_heads], work % net_.kv_heads, in, out, scratch_[thread]);
        });
      case SILU_MUL:
        return share(next, rows, 1, [&](int64_t row, int64_t) {
          silu_mul_row(in + row * 2 * width, in + row * 2 * width + width, out + row * width, width);
        });
      case CHECK:
        return share(next, rows, 8, [&](int64_t first, int64_t last) {
          for (int64_t row = first; row < last; row++)
            if (!all_finite(in + row * width, width)) step.failed[row] = 1;
        });
      case TAKE:
        return share(next, rows, 8, [&](int64_t first, int64_t last) {
          for (int64_t row = first; row < last; row++)
            memcpy(out + row * width, in + step.sampled[row] * width, width * sizeof(Scalar));
        });
    }
  }

  template <class Result>
  void linear(const Operator& op, int64_t rows, std::atomic<int64_t>& next, Result* out) {
    auto x = static_cast<const Scalar*>(op.in), bias = static_cast<const Scalar*>(op.weight2);
    auto packed = static_cast<const Scalar*>(op.weight);
    int64_t inputs = op.inputs, width = op.width;
    int64_t panels = (width + PANEL - 1) / PANEL, panel_size = PANEL * round_up(inputs, GROUP<Scalar>);
    int64_t parts = std::max<int64_t>(1, (rows + LINEAR_ROWS / 2) / LINEAR_ROWS);
    if (rows == 0) return;
    share(next, panels * parts, 1, [&](int64_t item, int64_t) {  // all rows of a panel follow each other
      int64_t panel = item / parts, part = item % parts;
      int64_t first = rows * part / parts, last = rows * (part + 1) / parts;
      int64_t pieces = (last - first + TILE_ROWS - 1) / TILE_ROWS;
      int64_t columns = std::min<int64_t>(PANEL, width - panel * PANEL);
      for (int64_t piece = 0; piece < pieces; piece++) {
        int64_t from = first + (last - first) * piece / pieces, to = first + (last - first) * (piece + 1) / pieces;
        with_rows<LinearTile>(to - from, x + from * inputs, packed + panel * panel_size, inputs,
                              bias == nullptr ? nullptr : bias + panel * PANEL, out + from * width + panel * PANEL,
                              width, columns);
      }
    });
  }

  Network net_;
  Threads& threads_;
  std::atomic<int64_t> next_[COUNTERS];
  std::vector<AttentionItem> items_;
  std::vector<AttentionScratch<Scalar>> scratch_;
  std::vector<std::vector<float>> wide_;
};

template <class Scalar>
struct Engine {
  Threads threads;
  Program<Scalar> program;
  explicit Engine(const Network& net) : program(net, threads) {}
};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int64_t pagewalk_struct_bytes(int which) {
  return which == 0 ? sizeof(Network) : which == 1 ? sizeof(Step) : sizeof(Operator);
}
EXPORT int64_t pagewalk_packed_scalars(int is_bf16, int64_t outputs, int64_t inputs) {
  return is_bf16 ? packed_size<bf16>(outputs, inputs) : packed_size<float>(outputs, inputs);
}
EXPORT void pagewalk_pack(int is_bf16, const void* weight, int64_t outputs, int64_t inputs, void* packed) {
  int64_t panels = (outputs + PANEL - 1) / PANEL;
  if (is_bf16)
    pack_matrix(static_cast<const bf16*>(weight), outputs, inputs, static_cast<bf16*>(packed), 0, panels);
  else
    pack_matrix(static_cast<const float*>(weight), outputs, inputs, static_cast<float*>(packed), 0, panels);
}
// Give freed memory back to the system: of plain weights, the C library would keep about 150 MB for later.
EXPORT void pagewalk_trim() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}
EXPORT void* pagewalk_open(int is_bf16, const Network* net) {
  return is_bf16 ? static_cast<void*>(new Engine<bf16>(*net)) : static_cast<void*>(new Engine<float>(*net));
}
EXPORT void pagewalk_run(int is_bf16, void* engine, const Operator* operators, int64_t count, const Step* step,
                         int threads) {
  if (is_bf16)
    static_cast<Engine<bf16>*>(engine)->program.run(operators, count, *step, threads);
  else
    static_cast<Engine<float>*>(engine)->program.run(operators, count, *step, threads);
}
EXPORT void pagewalk_close(int is_bf16, void* engine) {
  if (is_bf16)
    delete static_cast<Engine<bf16>*>(engine);
  else
    delete static_cast<Engine<float>*>(engine);
}
