// Runs CUDA kernels on a CPU, so that tests can check their arithmetic, indices and synchronization without a GPU.
//
// A thread is a fiber; the fibers of a block take turns, and switch only where they wait for each other: at a warp's
// exchange (shuffles, votes, ldmatrix, mma), at __syncthreads and at a cluster's barrier. The blocks of a cluster take
// turns like the warps of one; clusters, and blocks without one, run one after the other, but a block whose threads all
// wait for words of a later one takes turns with that. What cannot be seen here: speed, races between other blocks, and
// data races that the order of the fibers happens to hide (the order is shuffled by seed). __shared__ variables are one
// for all blocks that take turns, so theirs are barriers at most, of which only the addresses matter. Strict where
// hardware is not: an exchange needs all 32 lanes; asynchronous copies move their bytes only when somebody waits for
// them, until then the target holds junk; wgmma reads its operands and writes its results only when its own warp waits
// for it, until then the results are NaN; misaligned copies abort; what a block hands over comes late and in pieces.
#pragma once
#define PTX_CUH  // this file takes the place of ptx.cuh

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define DYNAMIC_SHARED(name) unsigned char* const name = emulator::shared
#if __CUDA_ARCH__ >= 900
#define HOPPER 1
#endif

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
struct bf16 { u16 bits; };
struct fp16 { u16 bits; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
template <class A, class B> auto min(A a, B b) -> std::common_type_t<A, B> { return b < a ? b : a; }
template <class A, class B> auto max(A a, B b) -> std::common_type_t<A, B> { return a < b ? b : a; }
template <class To, class From> To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;

extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

namespace emulator {

constexpr int STACK = 256 * 1024, SHARED = 232448, LANE_BYTES = 48, CLUSTER = 8;
alignas(1024) static unsigned char all_shared[CLUSTER][(SHARED + 1023) / 1024 * 1024];
static unsigned char* shared = all_shared[0];  // of the block that has its turn

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "emulator: %s (block %u,%u thread %u)\n", what, blockIdx.x, blockIdx.y, threadIdx.x);
  abort();
}

struct TensorMap {  // EmulatedLoader.tensor_map
  const unsigned char* matrix;  // [rows, columns] numbers of 16 bits
  i64 rows, columns;
  int box_rows, box_columns, is_interleaved;
  unsigned char unused[92];
};
static_assert(sizeof(TensorMap) == 128);
struct Copy {
  unsigned char* target;
  const void* source;
  u32 bytes;
  const TensorMap* map = nullptr;  // of a box, instead of a source: where it begins
  int column = 0, row = 0;
};
struct Group { int number; Copy copy; };  // of cp.async
struct Barrier { int block; u32 address; int arrivals, pending; long bytes; u32 phase; int waiters; std::vector<Copy> copies; };
struct Product {  // one wgmma, by one thread
  int group;  // the open one is `Fiber::product_group`
  float* d;
  int columns;
  bool accumulate, is_fp16;
  u64 a, b;         // descriptors
  const u32* registers[4];  // a, if it is not in shared memory
  std::vector<float> saved;  // d before the first product under way
  bool along_k;              // b lies along k
};

struct Warp {
  u32 generation = 0;
  int arrived = 0;
  alignas(16) unsigned char lanes[2][32][LANE_BYTES];
};
struct Fiber {
  void* stack = nullptr;
  void* pointer = nullptr;
  const u32* waits_on = nullptr;  // runs again when *waits_on differs from `seen`
  u32 seen = 0;
  bool done = false;
  std::vector<Group> copies;  // cp.async, by group, not yet carried out
  int group = 0;              // the open one
  std::vector<Product> products;  // wgmma, not yet carried out
  int product_group = 0;
  bool has_begun = false;  // wgmma_begin() since the last wait
  u32 cluster_turn = 0;  // arrivals at the cluster's barrier
  std::vector<const void*> missed;  // what it looked for and was not handed yet
};
struct Block {
  int alive, arrived, vote, result;
  u32 generation = 0;
  bool has_allowed = false, has_waited = false;  // of the kernels behind and in front
};

static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::vector<Barrier*> barriers;
static Block blocks[CLUSTER];
static int current, block, alive;  // fiber, its block of those that take turns; threads of these that have not ended
static int cluster_blocks;         // of the launch
static int cluster_missing;        // of these, those that have not come to the cluster's barrier
static u32 cluster_generation;     // times that it has opened
static void* scheduler;
static void (*entry)(void*);
static void* entry_argument;

inline void yield_until_changed(const u32* word, u32 seen) {
  Fiber& fiber = fibers[current];
  fiber.waits_on = word;
  fiber.seen = seen;
  emulator_switch(&fiber.pointer, scheduler);
}
inline void give_turn() { emulator_switch(&fibers[current].pointer, scheduler); }
inline void cluster_opens() {
  if (cluster_missing) return;
  ++cluster_generation;
  cluster_missing = alive;
}
inline void thread_main() {
  entry(entry_argument);
  fibers[current].done = true;
  --alive;
  const Block& mine = blocks[block];
  if (--blocks[block].alive == 0 && mine.has_allowed && !mine.has_waited) fail("the kernel behind may overtake that in front");
  if (fibers[current].cluster_turn == cluster_generation) {
    --cluster_missing;
    cluster_opens();
  }
  void* unused;
  emulator_switch(&unused, scheduler);
}

// Every lane gives `bytes` bytes and sees all lanes' in return
inline unsigned char (*exchange(const void* mine, int bytes))[LANE_BYTES] {
  Warp& warp = warps[current / 32];
  const u32 generation = warp.generation;
  auto* lanes = warp.lanes[generation & 1];
  memcpy(lanes[threadIdx.x % 32], mine, bytes);
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    ++warp.generation;
  } else {
    yield_until_changed(&warp.generation, generation);
  }
  return lanes;
}
template <class T> T lane_value(unsigned char (*lanes)[LANE_BYTES], int lane) {
  T value;
  memcpy(&value, lanes[lane], sizeof value);
  return value;
}
inline void block_opens(Block& b) {
  b.arrived = 0;
  b.result = b.vote;
  b.vote = 0;
  ++b.generation;
}
inline int block_sync(int vote) {
  Block& b = blocks[block];
  b.vote += vote;
  const u32 generation = b.generation;
  if (++b.arrived >= b.alive) block_opens(b);
  else yield_until_changed(&b.generation, generation);
  return b.result;
}

inline void carry_out(const Copy& copy) {
  if (!copy.map) {
    memcpy(copy.target, copy.source, copy.bytes);
    return;
  }
  const TensorMap& map = *copy.map;
  for (int r = 0; r < map.box_rows; ++r)
    for (int c = 0; c < map.box_columns; ++c) {
      const i64 column = copy.column + c, rows = map.is_interleaved ? map.rows / 2 : map.rows;
      const i64 row = copy.row + (map.is_interleaved ? r / 16 * 8 + r % 8 : r), half = map.is_interleaved ? r / 8 % 2 : 0;
      u16 bits = 0;
      if (row >= 0 && row < rows && column >= 0 && column < map.columns)
        memcpy(&bits, map.matrix + ((half * rows + row) * map.columns + column) * 2, 2);
      memcpy(copy.target + ((r * 128 + c * 2) ^ (r & 7) << 4), &bits, 2);  // the target is a multiple of 1024
    }
}
inline void settle(Barrier& b) {
  if (b.pending || b.bytes) return;
  b.pending = b.arrivals;
  ++b.phase;
}
inline bool deliver(Barrier& b) {  // the bytes of copies that were ordered; false if there were none
  if (b.copies.empty()) return false;
  for (const Copy& copy : b.copies) {
    b.bytes -= copy.bytes;
    carry_out(copy);
  }
  b.copies.clear();
  settle(b);
  return true;
}

// Let a thread go on until it waits; false if it has ended, or what it waits for has not come
inline bool resume(int fiber_index) {
  Fiber& fiber = fibers[fiber_index];
  if (fiber.done || (fiber.waits_on && *fiber.waits_on == fiber.seen)) return false;
  fiber.waits_on = nullptr;
  current = fiber_index;
  blockIdx.x += current / blockDim.x - block;
  block = current / blockDim.x;
  threadIdx.x = current % blockDim.x;
  shared = all_shared[block];
  emulator_switch(&scheduler, fiber.pointer);
  return true;
}

template <class Call>
void run(const unsigned* grid, unsigned cluster, unsigned threads, unsigned shared_bytes, unsigned seed, Call call) {
  if (shared_bytes > SHARED) fail("too much shared memory");
  if (cluster > CLUSTER || grid[0] % cluster) fail("a grid that is not made of clusters");
  // Blocks without a cluster begin beside others only where these wait for them
  const unsigned most = cluster > 1 ? cluster : min((unsigned)CLUSTER, grid[0]);
  cluster_blocks = cluster;
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {threads, 1, 1};
  entry = [](void* argument) { (*(Call*)argument)(); };
  entry_argument = &call;
  if (fibers.size() < most * threads) fibers.resize(most * threads);
  warps.assign(most * threads / 32, Warp());
  unsigned begun;
  std::vector<int> order;
  auto begin_block = [&] {
    memset(all_shared[begun], 0xff, shared_bytes);  // NaN
    blocks[begun] = {(int)threads, 0, 0, 0, 0};
    alive += threads;
    cluster_missing += threads;
    for (unsigned i = begun * threads; i < (begun + 1) * threads; ++i) {
      Fiber& fiber = fibers[i];
      const int access = PROT_READ | PROT_WRITE, kind = MAP_PRIVATE | MAP_ANONYMOUS;
      if (!fiber.stack) fiber.stack = mmap(nullptr, STACK, access, kind, -1, 0);
      void** top = (void**)((char*)fiber.stack + STACK - 64);
      top[0] = (void*)thread_main;
      fiber.pointer = top - 6;
      fiber.waits_on = nullptr;
      fiber.done = false;
      fiber.copies.clear();
      fiber.group = 0;
      fiber.products.clear();
      fiber.product_group = 0;
      fiber.has_begun = false;
      fiber.cluster_turn = 0;
      fiber.missed.clear();
      if (i % 32 == 0) order.push_back(i / 32);
    }
    ++begun;
  };
  for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
      for (unsigned first = 0; first < grid[0]; first += begun) {
        blockIdx.x = first;
        block = 0;
        for (Barrier* barrier : barriers) delete barrier;
        barriers.clear();
        alive = cluster_missing = 0;
        cluster_generation = 0;
        order.clear();
        begun = 0;
        while (begun < cluster) begin_block();
        auto random = [&seed] { return (seed = seed * 1664525u + 1013904223u) >> 8; };
        while (alive) {
          bool moved = false;
          for (unsigned w = order.size() - 1; w > 0; --w) std::swap(order[w], order[random() % (w + 1)]);
          for (int w : order) {
            // from 0 to 7 turns, so that warps run apart as far as barriers let them
            for (int turn = random() % 8, idle = 0; turn > 0 && !idle; --turn) {
              idle = 1;
              for (int lane = 0; lane < 32; ++lane) idle &= !resume(w * 32 + lane);
              moved |= !idle;
            }
          }
          if (!moved)  // perhaps only because nobody had a turn
            for (unsigned i = 0; i < begun * threads; ++i) moved |= resume(i);
          if (!moved)  // everybody waits: copies arrive no later than now
            for (Barrier* barrier : barriers) moved |= barrier->waiters && deliver(*barrier);
          // a thread that ended may have been the last one that a barrier waits for
          for (unsigned b = 0; b < begun; ++b)
            if (blocks[b].arrived && blocks[b].arrived >= blocks[b].alive) {
              block_opens(blocks[b]);
              moved = true;
            }
          if (moved || !alive) continue;
          if (begun == most || first + begun == grid[0]) fail("deadlock: threads wait for each other");
          begin_block();
        }
        for (const Warp& warp : warps) if (warp.arrived) fail("a warp ended inside an exchange");
      }
}

template <class... A, size_t... I> void invoke(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*(A*)arguments[I]...);
}
template <class... A> void invoke(void (*kernel)(A...), void** arguments) {
  invoke(kernel, arguments, std::index_sequence_for<A...>());
}
template <class... A> int parameter_sizes(void (*)(A...), int* sizes) {
  const int all[] = {(int)sizeof(A)...};
  memcpy(sizes, all, sizeof all);
  return sizeof...(A);
}
inline unsigned char* at(u32 address) {
  return shared + (int)(address - 1024);  // shared addresses are offsets from `shared`, and never 0
}
inline Barrier& barrier_at(u32 address) {
  for (Barrier* barrier : barriers) if (barrier->block == block && barrier->address == address) return *barrier;
  fail("a barrier that was not initialized");
}

}  // namespace emulator

// ---- what CUDA C++ provides ----------------------------------------------------------------------------------------
inline void __syncthreads() { emulator::block_sync(0); }
inline int __syncthreads_or(int vote) { return emulator::block_sync(vote != 0) != 0; }
inline int __syncthreads_count(int vote) { return emulator::block_sync(vote != 0); }
inline void __syncwarp() {
  const char nothing = 0;
  emulator::exchange(&nothing, 1);
}
template <class T> T __shfl_sync(u32, T value, int lane) {
  return emulator::lane_value<T>(emulator::exchange(&value, sizeof value), lane & 31);
}
template <class T> T __shfl_xor_sync(u32, T value, int offset) {
  return emulator::lane_value<T>(emulator::exchange(&value, sizeof value), (threadIdx.x ^ offset) & 31);
}
template <class T> T __shfl_up_sync(u32, T value, int offset) {
  const int lane = threadIdx.x & 31;
  return emulator::lane_value<T>(emulator::exchange(&value, sizeof value), lane >= offset ? lane - offset : lane);
}
inline u32 __ballot_sync(u32, bool vote) {
  auto* lanes = emulator::exchange(&vote, 1);
  u32 all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= (u32)emulator::lane_value<bool>(lanes, lane) << lane;
  return all;
}
inline int __any_sync(u32 mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __clzll(i64 x) { return x ? __builtin_clzll(x) : 64; }
inline u64 __umul64hi(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline float __uint_as_float(u32 x) { return bits_as<float>(x); }
inline u32 __float_as_uint(float x) { return bits_as<u32>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fadd_rz(float x, float y) {  // exact in double, for what the kernels add; then cut off
  const double sum = (double)x + y;
  const float nearest = (float)sum;
  return std::fabs((double)nearest) > std::fabs(sum) ? std::nextafterf(nearest, 0.f) : nearest;
}
inline double __hiloint2double(int high, int low) { return bits_as<double>((u64)(u32)high << 32 | (u32)low); }
template <class T> T __ldcg(const T* p) { return *p; }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline u32 atomicAdd(u32* p, u32 x) {
  const u32 old = *p;
  *p += x;
  return old;
}
inline u64 atomicMax(u64* p, u64 x) {
  const u64 old = *p;
  *p = max(old, x);
  return old;
}
inline u32 atomicOr(u32* p, u32 x) {
  const u32 old = *p;
  *p |= x;
  return old;
}
inline u32 atomicExch(u32* p, u32 x) { return std::exchange(*p, x); }

// ---- what ptx.cuh provides -----------------------------------------------------------------------------------------
inline float exp2_fast(float x) { return exp2f(x); }
template <class E> u16 round_number(float x);
template <> inline u16 round_number<bf16>(float x) {
  const u32 bits = bits_as<u32>(x);
  if (x != x) return 0x7fff;
  return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
template <> inline u16 round_number<fp16>(float x) { return bits_as<u16>((_Float16)x); }
template <class E> float number(u16 bits);
template <> inline float number<bf16>(u16 bits) { return bits_as<float>((u32)bits << 16); }
template <> inline float number<fp16>(u16 bits) { return (float)bits_as<_Float16>(bits); }
template <class E> u32 pack2(float low, float high) { return round_number<E>(low) | (u32)round_number<E>(high) << 16; }
template <class E> float2 unpack2(u32 pair) { return {number<E>((u16)pair), number<E>((u16)(pair >> 16))}; }
inline u16 load_ordered(const u16* p) { return *p; }
inline u32 load_ordered(const u32* p) { return *p; }
inline uint4 load_ordered(const uint4* p) { return *p; }
// Of the words that are handed over one comes before the others, another in each warp; those that are not there yet have
// all bits set. Who looks for them gets what is there, and from the second time on waits for another first
template <class V> u32 word_of(int i) { return (threadIdx.x / 32 + i) % (sizeof(V) / 4); }
template <class V> void hand(V* p, V x) {
  for (int i = 0; i < sizeof(V) / 4; ++i) {
    if (i == 1) emulator::give_turn();
    memcpy((u32*)p + word_of<V>(i), (u32*)&x + word_of<V>(i), 4);
  }
}
template <class V> V load_handed(const V* p) {
  auto missing = [&] {
    for (int i = 0; i < sizeof(V) / 4; ++i)
      if (const u32* const word = (const u32*)p + word_of<V>(i); *word == ~0u) return word;
    return (const u32*)nullptr;
  };
  auto& missed = emulator::fibers[emulator::current].missed;
  const auto place = std::find(missed.begin(), missed.end(), p);
  const bool again = place != missed.end();
  if (again && missing()) emulator::yield_until_changed(missing(), ~0u);
  if (!again && missing()) missed.push_back(p);
  if (again && !missing()) missed.erase(place);
  return *p;
}
inline float4 load_passing(const float4* p) { return *p; }
inline void raise_flag(u32* p) { *p = 1; }
inline void fence_before_bulk() {}
inline u32 load_flag(const u32* p) {
  while (*p == 0) emulator::yield_until_changed(p, 0);
  return *p;
}
inline u32 shared_address(const void* p) { return (u32)((const unsigned char*)p - emulator::shared) + 1024; }

inline void async_copy_16(u32 target, const void* source) {
  unsigned char* const t = emulator::at(target);
  if ((uintptr_t)t % 16 || (uintptr_t)source % 16) emulator::fail("misaligned async copy");
  memset(t, 0xff, 16);
  auto& fiber = emulator::fibers[emulator::current];
  fiber.copies.push_back({fiber.group, {t, source, 16}});
}
inline void async_copy_commit() { ++emulator::fibers[emulator::current].group; }
template <int LEFT> void async_copy_wait() {
  auto& fiber = emulator::fibers[emulator::current];
  size_t done = 0;
  for (; done < fiber.copies.size() && fiber.copies[done].number < fiber.group - LEFT; ++done)
    emulator::carry_out(fiber.copies[done].copy);
  fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + done);
}

inline void load_matrices(u32 (&r)[4], u32 address) {
  if (address % 16) emulator::fail("misaligned ldmatrix");
  auto* lanes = emulator::exchange(&address, 4);
  const int lane = threadIdx.x & 31;
  for (int i = 0; i < 4; ++i) {
    const u32 row = emulator::lane_value<u32>(lanes, 8 * i + lane / 4);
    memcpy(&r[i], emulator::at(row) + lane % 4 * 4, 4);
  }
}
inline void load_matrices_transposed(u32 (&r)[4], u32 address) {
  if (address % 16) emulator::fail("misaligned ldmatrix");
  auto* lanes = emulator::exchange(&address, 4);
  const int lane = threadIdx.x & 31;
  for (int i = 0; i < 4; ++i) {
    u16 pair[2];
    for (int h = 0; h < 2; ++h) {
      const u32 row = emulator::lane_value<u32>(lanes, 8 * i + lane % 4 * 2 + h);
      memcpy(&pair[h], emulator::at(row) + lane / 4 * 2, 2);
    }
    r[i] = pair[0] | (u32)pair[1] << 16;
  }
}
inline u32 transpose_matrix(u32 x) {
  auto* lanes = emulator::exchange(&x, 4);
  const int lane = threadIdx.x & 31;
  u32 result = 0;
  for (int h = 0; h < 2; ++h) {  // row lane / 4, column 2 (lane % 4) + h of the result
    const int row = lane % 4 * 2 + h, column = lane / 4;
    const u32 word = emulator::lane_value<u32>(lanes, row * 4 + column / 2);
    result |= (word >> column % 2 * 16 & 0xffff) << h * 16;
  }
  return result;
}
template <class E> void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
  float numbers[12];  // a0 low, a0 high, a1 low, ...
  for (int i = 0; i < 6; ++i) {
    numbers[2 * i] = number<E>((u16)mine[i]);
    numbers[2 * i + 1] = number<E>((u16)(mine[i] >> 16));
  }
  auto* lanes = emulator::exchange(numbers, sizeof numbers);
  const int lane = threadIdx.x & 31;
  float a[2][16], b[2][16];  // this lane's two rows and two columns
  for (int k = 0; k < 16; ++k) {
    const int owner = k % 8 / 2, upper = k / 8, high = k & 1;
    const float* row = (const float*)lanes[lane / 4 * 4 + owner];
    a[0][k] = row[2 * (2 * upper) + high];
    a[1][k] = row[2 * (2 * upper + 1) + high];
    for (int j = 0; j < 2; ++j) b[j][k] = ((const float*)lanes[(lane % 4 * 2 + j) * 4 + owner])[2 * (4 + upper) + high];
  }
  for (int i = 0; i < 4; ++i) {
    float sum = 0;
    for (int k = 0; k < 16; ++k) sum += a[i >> 1][k] * b[i & 1][k];
    c[i] += sum;
  }
}

#ifdef HOPPER
inline int cluster_rank() { return emulator::block; }
inline int cluster_size() { return emulator::cluster_blocks; }
inline void cluster_arrive() {
  auto& fiber = emulator::fibers[emulator::current];
  if (fiber.cluster_turn++ != emulator::cluster_generation) emulator::fail("cluster_arrive() twice without a wait");
  --emulator::cluster_missing;
  emulator::cluster_opens();
}
inline void cluster_wait() {
  const u32 turn = emulator::fibers[emulator::current].cluster_turn;
  if (emulator::cluster_generation < turn) emulator::yield_until_changed(&emulator::cluster_generation, turn - 1);
}
template <class T> T* of_block(T* p, int rank) {
  return (T*)(emulator::all_shared[rank] + ((unsigned char*)p - emulator::shared));
}
#else
inline int cluster_rank() { return 0; }
inline int cluster_size() { return 1; }
inline void cluster_arrive() {}
inline void cluster_wait() { __syncthreads(); }
template <class T> T* of_block(T* p, int) { return p; }
#endif
inline void allow_next_kernel() { emulator::blocks[emulator::block].has_allowed = true; }
inline void wait_for_previous_kernel() { emulator::blocks[emulator::block].has_waited = true; }
#ifdef HOPPER
inline void barrier_init(u32 barrier, u32 arrivals) {
  emulator::barriers.push_back(new emulator::Barrier{emulator::block, barrier, (int)arrivals, (int)arrivals, 0, 0, 0, {}});
}
inline void barrier_init_fence() {}
inline void barrier_arrive_expecting(u32 barrier, u32 bytes) {
  auto& b = emulator::barrier_at(barrier);
  if (--b.pending < 0) emulator::fail("too many arrivals at a barrier");
  b.bytes += bytes;
  emulator::settle(b);
}
inline void barrier_arrive(u32 barrier) { barrier_arrive_expecting(barrier, 0); }
inline void async_copy_arrive(u32 barrier) {
  async_copy_commit();
  async_copy_wait<0>();
  barrier_arrive(barrier);
}
inline void bulk_copy(u32 target, const void* source, u32 bytes, u32 barrier) {
  unsigned char* const t = emulator::at(target);
  if ((uintptr_t)t % 16 || (uintptr_t)source % 16 || bytes % 16) emulator::fail("misaligned bulk copy");
  memset(t, 0xff, bytes);
  emulator::barrier_at(barrier).copies.push_back({t, source, bytes});
}
inline u64 read_once_policy() { return 1; }
inline void bulk_copy(u32 target, const void* source, u32 bytes, u32 barrier, u64 policy) {
  if (policy != read_once_policy()) emulator::fail("a bulk copy with a policy that nobody made");
  bulk_copy(target, source, bytes, barrier);
}
namespace emulator {

inline void order_box(u32 target, const void* map, int column, int row, u32 barrier, bool is_interleaved) {
  const auto& m = *(const TensorMap*)map;
  unsigned char* const t = at(target);
  if ((uintptr_t)map % 64) fail("misaligned tensor map");
  if ((uintptr_t)t % 1024) fail("a box that begins in the middle of the swizzle's pattern");
  if (m.is_interleaved != is_interleaved) fail("a box by a map of another kind");
  if (is_interleaved && row % 8) fail("an interleaved box that begins between its groups of rows");
  const u32 bytes = m.box_rows * m.box_columns * 2;  // what lies outside counts, too
  memset(t, 0xff, bytes);
  barrier_at(barrier).copies.push_back({t, nullptr, bytes, &m, column, row});
}

}  // namespace emulator

inline void read_map_anew(const void*) {}
inline void box_copy(u32 target, const void* map, int column, int row, u32 barrier) {
  emulator::order_box(target, map, column, row, barrier, false);
}
inline void box_copy(u32 target, const void* map, int column, int row, u32 barrier, u64 policy) {
  if (policy != read_once_policy()) emulator::fail("a box with a policy that nobody made");
  emulator::order_box(target, map, column, row, barrier, false);
}
inline void box_copy_interleaved(u32 target, const void* map, int column, int row, u32 barrier, u64 policy) {
  if (policy != read_once_policy()) emulator::fail("a box with a policy that nobody made");
  emulator::order_box(target, map, column, row, barrier, true);
}
inline void barrier_wait(u32 barrier, u32 parity) {
  auto& b = emulator::barrier_at(barrier);
  if ((b.phase & 1) != parity) return;
  emulator::deliver(b);
  ++b.waiters;
  while ((b.phase & 1) == parity) emulator::yield_until_changed(&b.phase, b.phase);
  --b.waiters;
}

template <int COUNT> void keep_registers() {}
template <int COUNT> void want_registers() {}
inline u64 matrix_descriptor(u32 address, u32 columns, u32 rows) {
  if (address >= 1 << 18 || (address | columns | rows) % 16) emulator::fail("a matrix that no descriptor can name");
  return (u64)(address >> 4) | (u64)(columns >> 4) << 16 | (u64)(rows >> 4) << 32 | (u64)1 << 62;
}
inline void wgmma_begin() { emulator::fibers[emulator::current].has_begun = true; }
inline void wgmma_commit() { ++emulator::fibers[emulator::current].product_group; }

namespace emulator {

// Element of a matrix in shared memory, by the address arithmetic of the hardware: swizzled in units of 16 bytes by the
// number of the 128-byte row within 1024. `along`: the direction in which elements lie beside each other.
inline u16 matrix_element(u64 descriptor, int across, int along) {
  const u32 start = (u32)(descriptor & 0x3fff) << 4, columns = (u32)(descriptor >> 16 & 0x3fff) << 4;
  const u32 rows = (u32)(descriptor >> 32 & 0x3fff) << 4;
  u32 address = start + across / 8 * rows + across % 8 * 128 + along / 64 * columns + along % 64 * 2;
  address ^= (address >> 7 & 7) << 4;
  u16 bits;
  memcpy(&bits, at(address), 2);
  return bits;
}
inline float number_of(bool is_fp16, u16 bits) { return is_fp16 ? number<fp16>(bits) : number<bf16>(bits); }

// One wgmma for this lane's two rows; all lanes of the warp come here together
inline void carry_out(const Product& p) {
  const int lane = threadIdx.x & 31, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  float a[2][16];
  if (p.registers[0]) {
    u32 mine[4];
    for (int i = 0; i < 4; ++i) mine[i] = *p.registers[i];
    auto* lanes = exchange(mine, sizeof mine);
    for (int i = 0; i < 2; ++i)
      for (int k = 0; k < 16; ++k) {
        const u32 pair = ((const u32*)lanes[lane / 4 * 4 + k % 8 / 2])[k / 8 * 2 + i];
        a[i][k] = number_of(p.is_fp16, (u16)(pair >> (k & 1) * 16));
      }
  } else {
    const char nothing = 0;
    exchange(&nothing, 1);
    for (int i = 0; i < 2; ++i)
      for (int k = 0; k < 16; ++k) a[i][k] = number_of(p.is_fp16, matrix_element(p.a, row + 8 * i, k));
  }
  for (int j = 0; j < p.columns; j += 8)
    for (int c = 0; c < 2; ++c) {
      const int column = j + lane % 4 * 2 + c;
      float sums[2] = {};
      for (int k = 0; k < 16; ++k) {
        const u16 bits = !p.along_k ? matrix_element(p.b, k, column) : matrix_element(p.b, column, k);
        const float b = number_of(p.is_fp16, bits);
        sums[0] += a[0][k] * b;
        sums[1] += a[1][k] * b;
      }
      for (int i = 0; i < 2; ++i) {
        float& d = p.d[j / 2 + 2 * i + c];
        d = p.accumulate ? d + sums[i] : sums[i];
        if (d != d) d = bits_as<float>(~0u);  // the manual says nothing of a NaN's bits
      }
    }
}
// d is under way
inline void take_away(Product& product) {
  product.saved.assign(product.d, product.d + product.columns / 2);
  for (int i = 0; i < product.columns / 2; ++i) product.d[i] = NAN;
}
inline void order(Product product) {
  Fiber& fiber = fibers[current];
  if (!fiber.has_begun) fail("wgmma without wgmma_begin");
  product.group = fiber.product_group;
  bool is_first = true;
  for (const Product& other : fiber.products) is_first &= other.d != product.d;
  if (is_first) take_away(product);
  fiber.products.push_back(std::move(product));
}

}  // namespace emulator

template <int LEFT> void wgmma_wait() {
  auto& fiber = emulator::fibers[emulator::current];
  size_t done = 0;
  for (; done < fiber.products.size() && fiber.products[done].group < fiber.product_group - LEFT; ++done) {
    const auto& product = fiber.products[done];
    if (!product.saved.empty()) memcpy(product.d, product.saved.data(), product.saved.size() * 4);
    emulator::carry_out(product);
  }
  for (size_t i = done; i < fiber.products.size(); ++i) {  // what a later one goes on from is not there yet
    bool was_there = false;
    for (size_t j = 0; j < i; ++j) was_there |= j >= done && fiber.products[i].d == fiber.products[j].d;
    if (!was_there && fiber.products[i].saved.empty()) emulator::take_away(fiber.products[i]);
  }
  fiber.products.erase(fiber.products.begin(), fiber.products.begin() + done);
  fiber.has_begun = false;
}
template <int N> void keep_behind(float (&d)[N]) {
  for (const auto& product : emulator::fibers[emulator::current].products)
    if (product.d == d) emulator::fail("results before their wgmma_wait");
}
template <class E> void wgmma_along_k(float (&d)[64], const u32 (&a)[4], u64 b, int accumulate) {
  emulator::order({0, d, 128, accumulate != 0, std::is_same_v<E, fp16>, 0, b, {&a[0], &a[1], &a[2], &a[3]}, {}, true});
}
template <class E, int N>
void wgmma_registers(float (&d)[N], const u32& a0, const u32& a1, const u32& a2, const u32& a3, u64 b) {
  emulator::order({0, d, 2 * N, true, std::is_same_v<E, fp16>, 0, b, {&a0, &a1, &a2, &a3}, {}, false});
}
template <class E, int N> void wgmma_shared(float (&d)[N], u64 a, u64 b) {
  emulator::order({0, d, 2 * N, true, std::is_same_v<E, fp16>, a, b, {}, {}, true});
}
#endif
