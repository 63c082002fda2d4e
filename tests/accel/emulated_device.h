// The operations of src/regard/accel/cuda/device.cuh on a CPU, and a driver, to test CUDA code.
//
// Every thread of every block is a coroutine. One of them runs at a time, until it waits. The order
// of warps is random, and one warp at a time is held back until all others wait for it. Bulk copies
// are executed some time after they were started, stores for other blocks in any order, and memory
// without a value is NaN. So missing barriers and waits show up as wrong results.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstring>
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

struct TransactionBarrier;

// What the lanes of a warp exchange in an operation.
union Lanes {
  float values[32];  // of a shuffle
  struct {
    float a[16][16], b[8][16];
  } tiles;  // operands of a matrix product
  u32 pairs[32];  // of a tile that is transposed
};

struct Warp {
  Barrier barrier;
  Lanes lanes[2];  // of an operation and of the next one, which a lane may begin before others
};

struct Block {
  std::vector<char> memory;
  Barrier all, consumers;
  std::vector<Warp> warps;
};

struct Thread {
  jmp_buf context;
  std::vector<char> stack;
  int block, index;
  bool started, ended;
  u32 operations;  // that exchanged values with other lanes
  // What it waits for: the end of a generation, or of a phase with a parity.
  const Barrier* barrier;
  u64 generation;
  const TransactionBarrier* transactions;
  u32 parity;
};

struct Copy {
  void* to;
  const void* from;
  u32 bytes;
  u64* barrier;
};

struct Store {
  u32* to;
  u32 value;
};

constexpr size_t STACK_BYTES = 1 << 16;
static std::vector<Block> blocks;
static std::vector<Thread> threads;
static std::vector<Copy> copies;
static std::vector<Store> stores;
static u32 random_state;
static jmp_buf scheduler;
static Thread* current;
static u64 waits = 0;  // since something happened
constexpr u64 MAX_WAITS = 10 * 1000 * 1000;
static const char* failure = nullptr;

// A random number (Marsaglia 2003).
inline u32 random_number() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  random_state ^= random_state << 5;
  return random_state;
}

inline int thread_index() { return current->index; }
inline int block_index() { return current->block; }
inline Block& block() { return blocks[current->block]; }
inline Warp& warp() { return block().warps[current->index / 32]; }
inline char* shared_memory() { return (char*)(((u64)block().memory.data() + 127) / 128 * 128); }

// Not swapcontext, which makes two system calls.
inline void let_others_run() {
  if (!_setjmp(current->context)) _longjmp(scheduler, 1);
}
// Ends the run with an error.
inline void fail(const char* message) {
  failure = message;
  let_others_run();
}

inline void synchronize(Barrier& barrier, int count) {
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    barrier.generation++;
    waits = 0;
  } else {
    current->barrier = &barrier;
    current->generation = barrier.generation;
    let_others_run();
    current->barrier = nullptr;
  }
}
inline void sync_block() { synchronize(block().all, THREADS); }
inline void sync_consumers() { synchronize(block().consumers, WARPS * 32); }
inline void sync_warp() { synchronize(warp().barrier, 32); }

inline Lanes& next_lanes() { return warp().lanes[current->operations++ % 2]; }

inline void release_registers() {}
inline void request_registers() {}

inline float shuffle_xor(float x, int mask) {
  Lanes& lanes = next_lanes();
  lanes.values[thread_index() % 32] = x;
  sync_warp();
  return lanes.values[(thread_index() % 32) ^ mask];
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
inline void fence_barriers() {}
inline void fence_stores() {}
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
  current->transactions = (TransactionBarrier*)p;
  current->parity = parity;
  if (current->transactions->phase % 2 == parity) let_others_run();
  current->transactions = nullptr;
}
// The bytes that are expected at a barrier and have not arrived.
inline int missing_bytes(const u64& barrier) { return ((const TransactionBarrier&)barrier).bytes; }

static void check_copies();  // of this block, when another one starts

inline void copy_bulk(void* to, const void* from, u32 bytes, u64* barrier) {
  if (((u64)to | (u64)from | bytes) % 16 || bytes == 0) fail("a bulk copy is not aligned");
  memset(to, 0xFF, bytes);  // NaN until it arrives
  copies.push_back({to, from, bytes, barrier});
  check_copies();
}
inline void copy_bulk_once(void* to, const void* from, u32 bytes, u64* barrier) {
  copy_bulk(to, from, bytes, barrier);
}

inline uint4 load_exchanged4(const void* p) {
  if (random_number() % 4) let_others_run();
  return *(const uint4*)p;
}
inline u32 load_exchanged(const void* p) {
  if (random_number() % 4) let_others_run();
  return *(const u32*)p;
}
inline void store_exchanged(void* p, u32 v) { stores.push_back({(u32*)p, v}); }
inline u32 add_one(u32* p) { return (*p)++; }

inline void assume_changed(int&) {}
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
inline u32 subtract_pairs(u32 a, u32 b) {
  return pack_pair<IS_BFLOAT16>(
      unpack_half<IS_BFLOAT16>((u16)a) - unpack_half<IS_BFLOAT16>((u16)b),
      unpack_half<IS_BFLOAT16>((u16)(a >> 16)) - unpack_half<IS_BFLOAT16>((u16)(b >> 16)));
}
inline u32 select_bits(u32 a, u32 mask, u32 b) { return (a & mask) | b; }
inline u32 permute_bytes(u32 word, u32 selector) {
  u32 result = 0;
  for (int i = 0; i < 4; i++)
    result |= (u32)((u64)word >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}

template <bool IS_BFLOAT16>
inline void multiply_tiles(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
  auto& [a, b] = next_lanes().tiles;
  const u32 words[6] = {a0, a1, a2, a3, b0, b1};
  for (int i = 0; i < 6; i++) {
    float* row = i < 4 ? a[g + i % 2 * 8] + i / 2 * 8 : b[g] + i % 2 * 8;
    row[2 * t] = unpack_half<IS_BFLOAT16>((u16)words[i]);
    row[2 * t + 1] = unpack_half<IS_BFLOAT16>((u16)(words[i] >> 16));
  }
  sync_warp();
  for (int i = 0; i < 4; i++) {
    const float *row = a[g + i / 2 * 8], *column = b[2 * t + i % 2];
    for (int k = 0; k < 16; k++) c[i] += row[k] * column[k];
  }
}

inline u32 transpose_tile(u32 pair) {
  const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
  u32* pairs = next_lanes().pairs;
  pairs[lane] = pair;
  sync_warp();
  u32 rows[2];  // column g of rows 2 t and 2 t + 1
  for (int i = 0; i < 2; i++) rows[i] = pairs[4 * (2 * t + i) + g / 2] >> g % 2 * 16 & 0xFFFF;
  return rows[0] | rows[1] << 16;
}

static void run_thread();  // of the kernel

static bool is_waiting(const Thread& t) {
  return t.ended || (t.barrier && t.barrier->generation == t.generation) ||
         (t.transactions && t.transactions->phase % 2 == t.parity);
}

// Runs the current thread until it waits.
static void resume() {
  if (_setjmp(scheduler)) return;
  if (current->started) _longjmp(current->context, 1);
  current->started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = current->stack.data();
  context.uc_stack.ss_size = STACK_BYTES;
  makecontext(&context, run_thread, 0);
  setcontext(&context);
}

template <class T>
static T take_random(std::vector<T>& values) {
  std::swap(values[random_number() % values.size()], values.back());
  const T value = values.back();
  values.pop_back();
  return value;
}

// Executes one of the bulk copies that were started.
static void execute_copy() {
  const Copy copy = take_random(copies);
  memcpy(copy.to, copy.from, copy.bytes);
  auto& b = *(TransactionBarrier*)copy.barrier;
  b.bytes -= copy.bytes;
  complete_phase(b);
}

// Executes one of the stores to exchanged values.
static void execute_store() {
  const Store store = take_random(stores);
  *store.to = store.value;
  waits = 0;
}

// Runs the kernel to its end; returns an error message or null.
static const char* run_blocks(int num_blocks, int shared_bytes, u32 seed) {
  const int size = THREADS;
  random_state = seed | 1;
  failure = nullptr;
  waits = 0;
  copies.clear();
  stores.clear();
  blocks = std::vector<Block>(num_blocks);
  threads.resize(num_blocks * size);
  for (auto& b : blocks) {
    b.memory.assign(shared_bytes + 128, (char)0xFF);  // NaN: it is not initialized on a GPU
    b.warps.resize(size / 32);
  }
  for (int i = 0; i < (int)threads.size(); i++) {
    Thread& t = threads[i];
    t.stack.resize(STACK_BYTES);
    t.block = i / size;
    t.index = i % size;
    t.started = t.ended = false;
    t.operations = 0;
    t.barrier = nullptr;
    t.transactions = nullptr;
  }
  std::vector<Thread*> running;  // the first threads of warps
  for (u32 i = 0; i < threads.size(); i += 32) running.push_back(&threads[i]);
  Thread* held = running[0];  // a warp
  while (!running.empty() && !failure) {
    const u32 index = random_number() % running.size();
    Thread* const lanes = running[index];
    if (lanes != held || running.size() == 1) {
      const u32 first = random_number() % 32;
      int num_ended = 0;
      for (u32 i = 0; i < 32 && !failure; i++) {
        current = &lanes[(first + i) % 32];
        waits++;
        if (!is_waiting(*current)) resume();
        num_ended += current->ended;
      }
      if (num_ended == 32) {
        running[index] = running.back();
        running.pop_back();
      }
    }
    while (!stores.empty() && (random_number() % 8 || running.empty())) execute_store();
    const bool all_wait = waits > 4 * threads.size();
    if (all_wait && random_number() % 2 && !running.empty())
      held = running[random_number() % running.size()];
    // late: mostly when everyone waits
    else if (!copies.empty() && (all_wait || random_number() % 64 == 0))
      execute_copy();
    if (waits > MAX_WAITS) failure = "deadlock";
  }
  return failure;
}
