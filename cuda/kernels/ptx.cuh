// ptx.cuh: every instruction that CUDA C++ has no word for, one small function each. Nothing else holds inline PTX,
// so the tests can put another file in this one's place and run the kernels on a CPU.
// Needs sm_80; what needs sm_90 (bulk copies, mbarriers, dependent launch) is inside HOPPER, wgmma stands at the end.
#ifndef PTX_CUH
#define PTX_CUH

#if __CUDA_ARCH__ >= 900
#define HOPPER 1
#endif

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 { u16 bits; };  // storage types: arithmetic is float32 throughout
struct fp16 { u16 bits; };

#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

// ---- numbers -------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float exp2_fast(float x) {  // 2 ulp; denormal results become 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
template <class E> __device__ __forceinline__ u32 pack2(float low, float high);  // two numbers, rounded to nearest even
template <> __device__ __forceinline__ u32 pack2<bf16>(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <> __device__ __forceinline__ u32 pack2<fp16>(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <class E> __device__ __forceinline__ float2 unpack2(u32 pair);
template <> __device__ __forceinline__ float2 unpack2<bf16>(u32 pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 unpack2<fp16>(u32 pair) {
  float2 r;
  asm("{\n.reg .f16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
      : "=f"(r.x), "=f"(r.y) : "r"(pair));
  return r;
}

// ---- memory --------------------------------------------------------------------------------------------------------
// A plain or __restrict__ load may be hoisted above wait_for_previous_kernel(); this one may not.
__device__ __forceinline__ u16 load_ordered(const u16* p) {
  u16 r;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(r) : "l"(p) : "memory");
  return r;
}
__device__ __forceinline__ u32 load_ordered(const u32* p) {
  u32 r;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
__device__ __forceinline__ uint4 load_ordered(const uint4* p) {
  uint4 r;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p) : "memory");
  return r;
}
// What is read once: it need not stay in the L1. Not hoisted either
__device__ __forceinline__ float4 load_passing(const float4* p) {
  float4 r;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "l"(p));
  return r;
}
// Numbers that a block hands to another while both run. Each is seen whole, in no order
__device__ __forceinline__ void hand(float4* p, float4 x) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(__float_as_uint(x.x)),
               "r"(__float_as_uint(x.y)), "r"(__float_as_uint(x.z)), "r"(__float_as_uint(x.w)) : "memory");
}
__device__ __forceinline__ void hand(float2* p, float2 x) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};"
               ::"l"(p), "r"(__float_as_uint(x.x)), "r"(__float_as_uint(x.y)) : "memory");
}
__device__ __forceinline__ float4 load_handed(const float4* p) {
  float4 r;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "l"(p) : "memory");
  return r;
}
__device__ __forceinline__ float2 load_handed(const float2* p) {
  float2 r;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "l"(p) : "memory");
  return r;
}
// One thread of a warp says that what the warp wrote before is there; whoever has read 1 may read that, and takes it back
__device__ __forceinline__ void raise_flag(u32* p) {
  asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.u32 [%0], 1;" ::"l"(p) : "memory");
}
__device__ __forceinline__ u32 load_flag(const u32* p) {
  u32 r;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes from global to shared memory, asynchronously; groups complete in order
__device__ __forceinline__ void async_copy_16(u32 target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}
__device__ __forceinline__ void async_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void async_copy_wait() {  // until at most LEFT groups are under way
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// ---- tensor cores --------------------------------------------------------------------------------------------------
// Four 8 x 8 matrices of 16-bit numbers: lanes 8i ... 8i+7 name the rows (16 bytes each) of matrix i; r[i] is its
// fragment
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
// An 8 x 8 matrix of 16-bit numbers, given as fragments (lane has row lane / 4, columns 2 (lane % 4) and the next),
// transposed
__device__ __forceinline__ u32 transpose_matrix(u32 x) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}
// c += a b: a 16 x 16 (rows lane/4 and +8, columns 2(lane%4) and +8), b 16 x 8, c 16 x 8 float32
template <class E> __device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
template <>
__device__ __forceinline__ void mma<bf16>(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<fp16>(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- programmatic dependent launch (no effect without it, and before Hopper) ----------------------------------------
// The next kernel in the stream may start once every block of this one has
// said so, or ended.
__device__ __forceinline__ void allow_next_kernel() {
#ifdef HOPPER
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Returns when the kernel before has ended and its writes are visible. EVERY block runs it before it returns: a grid
// that ends without it lets the kernel after it overtake the one before it.
__device__ __forceinline__ void wait_for_previous_kernel() {
#ifdef HOPPER
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- Hopper: blocks of a cluster, which see each other's shared memory (before it, every block is alone) -------------
#ifdef HOPPER
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ int cluster_size() {
  int size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
// A barrier of all threads of the cluster in two halves; a thread that ends counts as arrived. Between them a thread may
// do what concerns no other block.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// Where `p`, in this block's shared memory, lies in that of block `rank`, which must not have ended
template <class T> __device__ __forceinline__ T* of_block(T* p, int rank) {
  u64 there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"((u64)p), "r"(rank));
  return (T*)there;
}
#else
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ int cluster_size() { return 1; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() { __syncthreads(); }
template <class T> __device__ __forceinline__ T* of_block(T* p, int) { return p; }
#endif

// ---- Hopper: bulk copies that report to an mbarrier in shared memory ------------------------------------------------
#ifdef HOPPER
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile("{\n.reg .pred done;\n"
               "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra end;\nbra again;\nend:\n}"
               ::"r"(barrier), "r"(parity) : "memory");
}
// addresses and size are multiples of 16
__device__ __forceinline__ void bulk_copy(u32 target, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(target), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}
// The same of what is read once: in the L2 it makes way for anything else
__device__ __forceinline__ u64 read_once_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void bulk_copy(u32 target, const void* source, u32 bytes, u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(target), "l"(source), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
// Between seeing what others wrote to global memory, and a bulk copy of it
__device__ __forceinline__ void fence_before_bulk() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Before the first box of a map in global memory: another may have lain at its address
__device__ __forceinline__ void read_map_anew(const void* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}
// A box of a matrix by a tensor map (cuda/batch_linear.py), from column and row; what lies outside is zeros. Shared
// memory gets it as atoms of 8 rows of 128 bytes, swizzled
__device__ __forceinline__ void box_copy(u32 target, const void* map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(target), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}
__device__ __forceinline__ void box_copy(u32 target, const void* map, int column, int row, u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%2, %3}], [%4], %5;"
               ::"r"(target), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy) : "memory");
}
// A box of 8 rows of a matrix's first half, 8 of its second, and so on; row: of the half, a multiple of 8
__device__ __forceinline__ void box_copy_interleaved(
    u32 target, const void* map, int column, int row, u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%2, 0, 0, %3}], [%4], %5;"
               ::"r"(target), "l"(map), "r"(column), "r"(row / 8), "r"(barrier), "l"(policy) : "memory");
}
// Arrives when all that this thread copied by async_copy_16 is there
__device__ __forceinline__ void async_copy_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
#endif

// ---- Hopper only (sm_90a): tensor cores that read shared memory by themselves, for a warpgroup of 128 threads -------
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Threads of a block hand registers to others: every warp of a warpgroup says how many it keeps, or wants
template <int COUNT> __device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void want_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// A matrix of 16-bit numbers in shared memory, in atoms of 8 rows of 128 bytes, swizzled (blobs; atoms begin at
// multiples of 1024). rows: bytes from 8 rows to the next 8. columns: bytes from 64 columns to the next 64; of no
// meaning for a matrix that lies along k, where a k-step is 32 bytes further in the atom. The fields count 16 bytes.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 columns, u32 rows) {
  return (u64)((address & 0x3ffffu) >> 4) | (u64)(columns >> 4) << 16 | (u64)(rows >> 4) << 32 | (u64)1 << 62;
}
// Before the first wgmma, and where registers that one uses were written since the last
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wgmma_wait() {  // until at most LEFT groups are under way
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Behind the wait for them: the compiler reads them no earlier
template <int N> __device__ __forceinline__ void keep_behind(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define REGISTERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGISTERS_16 REGISTERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_24 REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define REGISTERS_32 REGISTERS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_40 REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define REGISTERS_48 REGISTERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_64 REGISTERS_48 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define RESULTS_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define RESULTS_16(i) RESULTS_8(i), RESULTS_8(i + 8)
#define RESULTS_32(i) RESULTS_16(i), RESULTS_16(i + 16)

// d = a b, or d += a b: a 64 x 16 in registers as for mma, b 16 x 128 that lies along k (a transposed matrix of rows).
// Warp w has rows 16w ...; d as mma's c, for 8 columns at a time. Asynchronous: d and what is read are not touched before
// wgmma_wait.
template <class E> __device__ __forceinline__ void wgmma_along_k(
    float (&d)[64], const u32 (&a)[4], u64 b, int accumulate);
// d += a b: a 64 x 16 in registers as for mma, b 16 x 128 or 16 x 64, rows along its columns
template <class E> __device__ __forceinline__ void wgmma_registers(
    float (&d)[64], const u32& a0, const u32& a1, const u32& a2, const u32& a3, u64 b);
template <class E> __device__ __forceinline__ void wgmma_registers(
    float (&d)[32], const u32& a0, const u32& a1, const u32& a2, const u32& a3, u64 b);

#define DEFINE_WGMMA(E, NAME) \
  template <> __device__ __forceinline__ void wgmma_along_k<E>( \
      float (&d)[64], const u32 (&a)[4], u64 b, int accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME \
                 " {" REGISTERS_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}" \
                 : RESULTS_32(0), RESULTS_32(32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), \
                   "r"(accumulate)); \
  } \
  template <> __device__ __forceinline__ void wgmma_registers<E>( \
      float (&d)[64], const u32& a0, const u32& a1, const u32& a2, const u32& a3, u64 b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME \
                 " {" REGISTERS_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;" \
                 : RESULTS_32(0), RESULTS_32(32) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)); \
  } \
  template <> __device__ __forceinline__ void wgmma_registers<E>( \
      float (&d)[32], const u32& a0, const u32& a1, const u32& a2, const u32& a3, u64 b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME \
                 " {" REGISTERS_32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;" \
                 : RESULTS_32(0) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)); \
  }
DEFINE_WGMMA(bf16, "bf16")
DEFINE_WGMMA(fp16, "f16")

// d += a b: a 64 x 16 and b 16 x COLUMNS, both in shared memory along k; d has COLUMNS / 2 numbers
template <class E> __device__ __forceinline__ void wgmma_shared(float (&d)[8], u64 a, u64 b);
template <class E> __device__ __forceinline__ void wgmma_shared(float (&d)[16], u64 a, u64 b);
template <class E> __device__ __forceinline__ void wgmma_shared(float (&d)[24], u64 a, u64 b);
template <class E> __device__ __forceinline__ void wgmma_shared(float (&d)[32], u64 a, u64 b);
template <class E> __device__ __forceinline__ void wgmma_shared(float (&d)[40], u64 a, u64 b);
template <class E> __device__ __forceinline__ void wgmma_shared(float (&d)[48], u64 a, u64 b);
template <class E> __device__ __forceinline__ void wgmma_shared(float (&d)[64], u64 a, u64 b);

#define DEFINE_WGMMA_SHARED(E, NAME, COLUMNS, COUNT, A, B, ...) \
  template <> __device__ __forceinline__ void wgmma_shared<E>(float (&d)[COUNT], u64 a, u64 b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." NAME "." NAME \
                 " {" REGISTERS_##COUNT "}, %" #A ", %" #B ", 1, 1, 1, 0, 0;" \
                 : __VA_ARGS__ : "l"(a), "l"(b)); \
  }
#define DEFINE_ALL_SHARED(E, NAME) \
  DEFINE_WGMMA_SHARED(E, NAME, 16, 8, 8, 9, RESULTS_8(0)) \
  DEFINE_WGMMA_SHARED(E, NAME, 32, 16, 16, 17, RESULTS_16(0)) \
  DEFINE_WGMMA_SHARED(E, NAME, 48, 24, 24, 25, RESULTS_16(0), RESULTS_8(16)) \
  DEFINE_WGMMA_SHARED(E, NAME, 64, 32, 32, 33, RESULTS_32(0)) \
  DEFINE_WGMMA_SHARED(E, NAME, 80, 40, 40, 41, RESULTS_32(0), RESULTS_8(32)) \
  DEFINE_WGMMA_SHARED(E, NAME, 96, 48, 48, 49, RESULTS_32(0), RESULTS_16(32)) \
  DEFINE_WGMMA_SHARED(E, NAME, 128, 64, 64, 65, RESULTS_32(0), RESULTS_32(32))
DEFINE_ALL_SHARED(bf16, "bf16")
DEFINE_ALL_SHARED(fp16, "f16")
#endif
#endif  // PTX_CUH
