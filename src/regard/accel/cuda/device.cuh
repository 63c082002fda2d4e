// The operations of a GPU that decode_step.cu uses, for Hopper (sm_90a) and later; `setmaxnreg`
// needs the "a".
//
// tests/accel/emulated_device.h implements the same operations on a CPU.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)
#define KERNEL_ARGUMENT const __grid_constant__
#define DEVICE_CONSTANT __device__ const
#define HOST_DEVICE __host__ __device__
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_index() { return blockIdx.x; }

DEVICE char* shared_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Barriers: of all threads of a block, of its consumer warps, of a warp.
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory"); }
DEVICE void sync_warp() { __syncwarp(); }

// Registers of each thread of the warp groups that multiply, and of the other one. A request waits
// until enough registers were released; all warps of a group must call these functions.
constexpr int CONSUMER_REGISTERS = 224, PRODUCER_REGISTERS = 56;
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;  // which the compiler gives each thread
static_assert(WARPS % 4 == 0, "registers are moved between whole warp groups");
static_assert(CONSUMER_REGISTERS * WARPS * 32 + PRODUCER_REGISTERS * (THREADS - WARPS * 32) <=
                  LAUNCH_REGISTERS * THREADS,
              "the request would wait forever");
DEVICE void request_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
}
DEVICE void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
}

DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }

// c += a b, with rows of 16-bit floats of a (16 x 16) and columns of b (16 x 8) over the lanes of a
// warp: lane 4 g + t has, as pairs of k, rows g and g + 8 of a and column g of b at k = 2 t and
// 2 t + 8, and rows g and g + 8 of c in columns 2 t and 2 t + 1.
template <bool IS_BFLOAT16>
DEVICE void multiply_tiles(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (IS_BFLOAT16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
        " {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
        " {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Transposes 8 x 8 16-bit values over the lanes of a warp: before and after, lane 4 g + t has
// columns 2 t and 2 t + 1 of row g.
DEVICE u32 transpose_tile(u32 pair) {
  u32 transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// mbarrier: a phase ends when `count` threads have arrived and all expected bytes were copied.
DEVICE void init_barrier(u64* barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(count));
}
DEVICE void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Bulk copies that start after the next barrier come after the stores of this thread.
DEVICE void fence_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void expect_bytes(u64* barrier, u32 bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
DEVICE void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// Waits for the end of the current phase if its parity is `parity`; else returns at once.
DEVICE void wait(u64* barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Bulk copies to shared memory, which arrive at a barrier; addresses and sizes are multiples of 16.
DEVICE void copy_bulk(void* to, const void* from, u32 bytes, u64* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
// The same for data that is read once per step: the L2 cache gives it up first.
DEVICE void copy_bulk_once(void* to, const void* from, u32 bytes, u64* barrier) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Loads and stores of single words that other blocks write and read while they run.
DEVICE uint4 load_exchanged4(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEVICE u32 load_exchanged(const void* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void store_exchanged(void* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// Adds 1; returns the value before. What this block did before is visible after the last arrival.
DEVICE u32 add_one(u32* p) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
  return before;
}

// Makes the compiler assume that x has changed, so that it computes what depends on x again.
DEVICE void assume_changed(int& x) { asm volatile("" : "+r"(x)); }
DEVICE float as_float(u32 x) { return __uint_as_float(x); }
DEVICE u32 as_bits(float x) { return __float_as_uint(x); }
// 16-bit floats
template <bool IS_BFLOAT16>
DEVICE u32 pack_pair(float low, float high) {
  u32 pair;
  if (IS_BFLOAT16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <bool IS_BFLOAT16>
DEVICE u32 subtract_pairs(u32 a, u32 b) {
  u32 difference;
  if (IS_BFLOAT16)
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  else
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}
// (a & mask) | b as one instruction, which needs two of them in registers.
DEVICE u32 select_bits(u32 a, u32 mask, u32 b) {
  u32 c;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(c) : "r"(a), "r"(mask), "r"(b));
  return c;
}
// Bytes of a word, or 0, as the nibbles of `selector` say: 0 to 3, or 4.
DEVICE u32 permute_bytes(u32 word, u32 selector) { return __byte_perm(word, 0, selector); }
DEVICE float half_to_float(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
