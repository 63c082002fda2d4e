// The operations of src/regard/accel/cuda/device.cuh on a CPU, and a driver, to test CUDA code.
//
// Every thread of every block is a coroutine. One of them runs at a time, in a random order, until
// it waits; bulk copies are executed some time after they were started. So missing barriers and
// waits show up as wrong results.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct uint4 {
  u32 x, y, z, w;
};
struct uint2 {
  u32 x, y;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};

#define DEVICE inline
#define HOST_DEVICE
#define DEVICE_CONSTANT extern const
#define KERNEL void
#define KERNEL_ARGUMENT const
#define UNROLL
#define NO_UNROLL

struct Barrier {
  int arrived = 0;
  u64 generation = 0;
};

struct Block {
  std::vector<char> memory;
  Barrier all, consumers;
  std::vector<Barrier> warps;
  std::vector<float> lanes;   // values of a shuffle
  std::vector<u32> tiles[6];  // operands of a matrix product
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  int block, index;
  bool ended = false;
};

struct Copy {
  void* to;
  const void* from;
  u32 bytes;
  u64* barrier;
};

constexpr size_t STACK_BYTES = 1 << 18;
static std::vector<Block> blocks;
static std::vector<Thread> threads;
static std::vector<Copy> copies;
static std::mt19937 generator;
static ucontext_t scheduler;
static Thread* current;
static u64 waits = 0;  // since something happened
constexpr u64 MAX_WAITS = 20 * 1000 * 1000;
static const char* failure = nullptr;
static int num_ended = 0;

inline int thread_index() { return current->index; }
inline int block_index() { return current->block; }
inline Block& block() { return blocks[current->block]; }
inline char* shared_memory() { return (char*)(((u64)block().memory.data() + 127) / 128 * 128); }

inline void let_others_run() { swapcontext(&current->context, &scheduler); }
// Ends the run with an error.
inline void fail(const char* message) {
  failure = message;
  let_others_run();
}
inline void wait_for_others() {
  if (++waits > MAX_WAITS) fail("deadlock");
  let_others_run();
}

inline void synchronize(Barrier& barrier, int count) {
  u64 generation = barrier.generation;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    barrier.generation++;
    waits = 0;
  } else {
    while (barrier.generation == generation) wait_for_others();
  }
}
inline void sync_block() { synchronize(block().all, (WARPS + 1) * 32); }
inline void sync_consumers() { synchronize(block().consumers, WARPS * 32); }
inline void sync_warp() { synchronize(block().warps[thread_index() / 32], 32); }

inline float shuffle_xor(float x, int mask) {
  float* lanes = block().lanes.data() + thread_index() / 32 * 32;
  lanes[thread_index() % 32] = x;
  sync_warp();
  float y = lanes[(thread_index() % 32) ^ mask];
  sync_warp();
  return y;
}

// A barrier of transactions: completed phases, threads that must still arrive, their number, bytes.
struct TransactionBarrier {
  unsigned phase : 8, missing : 12, count : 12;
  int bytes;
};
static_assert(sizeof(TransactionBarrier) == 8, "the size of an mbarrier");

inline void complete_phase(TransactionBarrier& b) {
  if (b.missing == 0 && b.bytes == 0) {
    b.phase++;
    b.missing = b.count;
    waits = 0;
  }
}
inline void init_barrier(u64* p, u32 count) {
  auto& b = *(TransactionBarrier*)p;
  b.phase = 0;
  b.missing = b.count = count;
  b.bytes = 0;
}
inline void publish_barriers() {}
inline void publish_stores() {}
inline void arrive(u64* p) {
  auto& b = *(TransactionBarrier*)p;
  if (b.missing == 0) fail("too many threads arrive at a barrier");
  b.missing--;
  complete_phase(b);
}
inline void expect_bytes(u64* p, u32 bytes) {
  ((TransactionBarrier*)p)->bytes += bytes;
  arrive(p);
}
inline void wait(u64* p, u32 parity) {
  while ((((TransactionBarrier*)p)->phase & 1) == parity) wait_for_others();
}

inline void copy_bulk(void* to, const void* from, u32 bytes, u64* barrier) {
  if (((u64)to | (u64)from | bytes) % 16 || bytes == 0) fail("a bulk copy is not aligned");
  copies.push_back({to, from, bytes, barrier});
}
inline void copy_bulk_once(void* to, const void* from, u32 bytes, u64* barrier) {
  copy_bulk(to, from, bytes, barrier);
}

inline uint4 load_exchanged4(const void* p) {
  if (generator() % 4) wait_for_others();
  return *(const uint4*)p;
}
inline u32 load_exchanged(const void* p) {
  if (generator() % 4) wait_for_others();
  return *(const u32*)p;
}
inline void store_exchanged(void* p, u32 v) {
  *(u32*)p = v;
  waits = 0;
}
inline u32 add_one(u32* p) { return (*p)++; }

inline float as_float(u32 x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
inline u32 as_bits(float x) {
  u32 y;
  memcpy(&y, &x, 4);
  return y;
}
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float half_to_float(u16 x) {
  _Float16 y;
  memcpy(&y, &x, 2);
  return (float)y;
}
template <bool IS_BFLOAT16>
inline float unpack_half(u16 x) {
  return IS_BFLOAT16 ? as_float((u32)x << 16) : half_to_float(x);
}
template <bool IS_BFLOAT16>
inline u16 round_to_half(double x) {
  if (!IS_BFLOAT16) {
    _Float16 y = (_Float16)x;
    u16 bits;
    memcpy(&bits, &y, 2);
    return bits;
  }
  u32 bits = as_bits((float)x);
  return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);  // to nearest even
}
template <bool IS_BFLOAT16>
inline u32 pack_pair(float low, float high) {
  return round_to_half<IS_BFLOAT16>(low) | (u32)round_to_half<IS_BFLOAT16>(high) << 16;
}
template <bool IS_BFLOAT16>
inline u32 int8_pair(u32 word, int first) {
  return pack_pair<IS_BFLOAT16>((signed char)(word >> 8 * first),
                                (signed char)(word >> 8 * (first + 1)));
}
template <bool IS_BFLOAT16>
inline u32 int4_pair(u32 word) {
  return pack_pair<IS_BFLOAT16>((int)(word & 15) - 8, (int)(word >> 16 & 15) - 8);
}

template <bool IS_BFLOAT16>
inline void multiply_tiles(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const int lane = thread_index() % 32, first = thread_index() - lane;
  const u32 words[6] = {a0, a1, a2, a3, b0, b1};
  for (int i = 0; i < 6; i++) block().tiles[i][first + lane] = words[i];
  sync_warp();
  auto half = [&](int operand, int lane, int k) {
    return unpack_half<IS_BFLOAT16>((u16)(block().tiles[operand][first + lane] >> 16 * (k % 2)));
  };
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      float a = half(row / 8 + k / 8 * 2, row % 8 * 4 + k % 8 / 2, k);
      float b = half(4 + k / 8, column * 4 + k % 8 / 2, k);
      c[i] += a * b;
    }
  }
  sync_warp();
}

struct Arguments;
void decode_step(const Arguments a);
static const Arguments* arguments;

static void run_thread();

// Runs the kernel to its end; returns an error message or null.
static const char* run_blocks(int num_blocks, int shared_bytes, u32 seed) {
  const int size = (WARPS + 1) * 32;
  generator.seed(seed);
  failure = nullptr;
  waits = num_ended = 0;
  copies.clear();
  blocks = std::vector<Block>(num_blocks);
  threads = std::vector<Thread>(num_blocks * size);
  for (auto& b : blocks) {
    b.memory.assign(shared_bytes + 128, (char)0xCD);  // not initialized, as on a GPU
    b.warps.resize(WARPS + 1);
    b.lanes.resize(size);
    for (auto& words : b.tiles) words.resize(size);
  }
  for (int i = 0; i < (int)threads.size(); i++) {
    Thread& t = threads[i];
    t.block = i / size;
    t.index = i % size;
    t.stack.reset(new char[STACK_BYTES]);
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.get();
    t.context.uc_stack.ss_size = STACK_BYTES;
    t.context.uc_link = &scheduler;
    makecontext(&t.context, run_thread, 0);
  }
  std::vector<Thread*> running;
  for (auto& t : threads) running.push_back(&t);
  while (!running.empty() && !failure) {
    // whole warps, in a random order: threads of a warp mostly run together
    u32 start = generator() % running.size();
    for (u32 i = 0; i < 64 && i < running.size(); i++) {
      Thread* t = running[(start + i) % running.size()];
      current = t;
      swapcontext(&scheduler, &t->context);
      if (failure) break;
    }
    for (u32 i = 0; num_ended && i < running.size();) {
      if (running[i]->ended) {
        num_ended--;
        running[i] = running.back();
        running.pop_back();
      } else {
        i++;
      }
    }
    // late: mostly when everyone waits
    if (!copies.empty() && (generator() % 64 == 0 || waits > 2 * running.size())) {
      u32 i = generator() % copies.size();
      Copy copy = copies[i];
      copies[i] = copies.back();
      copies.pop_back();
      memcpy(copy.to, copy.from, copy.bytes);
      auto& b = *(TransactionBarrier*)copy.barrier;
      b.bytes -= copy.bytes;
      complete_phase(b);
    }
  }
  return failure;
}
