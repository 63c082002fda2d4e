// What decode_step.cu computes and where it keeps it: sizes, arguments, shared and global memory.
//
// The constants in front of this file describe the model (accel/persistent_step.py).

constexpr int CONSUMERS = WARPS * 32;
static_assert(THREADS == CONSUMERS + 128, "those that do not multiply must be one warp group");
constexpr int GROUP = HEADS / KV_HEADS;  // query heads per KV head
constexpr int Q_WIDTH = HEADS * HEAD_DIM, KV_WIDTH = KV_HEADS * HEAD_DIM;
constexpr int QKV_WIDTH = Q_WIDTH + 2 * KV_WIDTH;
constexpr bool IS_PARALLEL = PLACEMENT == PARALLEL || PLACEMENT == PARALLEL_NORMS;
constexpr bool HAS_OUTPUT_NORMS = PLACEMENT == SANDWICH || PLACEMENT == POST;
constexpr int INPUT_NORM = PLACEMENT == POST ? NO_NORM : NORM;
constexpr float LOG2_E = 1.4426950408889634f;

struct Linear {
  const char* weight;
  const float* scale;        // of int8 weights, per output; of int4 weights, [output][group]
  const float* bias;         // null: none
  const float* mean_weight;  // W g, of a LayerNorm
};

struct OutputNorm {
  const float *gain, *bias;
};

struct alignas(16) Layer {
  Linear qkv, out, gate_up, down;
  const float *gain, *ffn_gain;  // of the norms of the inputs
  OutputNorm output_norm[2];     // after attention and feed-forward network
  const float *q_gain, *k_gain;
  float eps, ffn_eps, output_eps[2], qk_eps;
  int window;                        // keys that a query may attend to
  float gain_scale, ffn_gain_scale;  // by which the gains were divided
};

// The tags of the next values that are exchanged. `attention` and `parts` have a bit for each
// split, which changes only in layers that have this split.
struct Tags {
  u32 layer, attention, parts;
};

struct Arguments {
  const Layer* layers;
  Linear head;
  const float* head_gain;
  const u16* x;  // the embedding of the id
  float* out;    // the logits; without a head, the residual stream
  float* exchange;
  Tags* tags;     // of the first layer
  u32* finished;  // blocks that have finished this step
  const i64* length;
  const float *cos, *sin;                        // [position][frequency]
  const int *partner, *frequency_index, *signs;  // of each column of a head
  const float* slopes;                           // ALiBi, of each query head
  float head_eps, head_gain_scale, score_scale, score_cap, residual_scale;
  int num_frequencies, capacity;       // of rotary embeddings; positions of the KV cache
  u16 *keys[LAYERS], *values[LAYERS];  // the KV cache: [KV head][position][column]
};

HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
HOST_DEVICE constexpr int max_of(int a, int b) { return a > b ? a : b; }
HOST_DEVICE constexpr int min_of(int a, int b) { return a < b ? a : b; }
HOST_DEVICE constexpr int floor_power_of_2(int n) {
  return n < 2 ? 1 : 2 * floor_power_of_2(n / 2);
}

struct Vector {
  float v[4];
  DEVICE float& operator[](int i) { return v[i]; }
  DEVICE const float& operator[](int i) const { return v[i]; }
};

DEVICE Vector load_vector(const float* p) {
  float4 a = *(const float4*)p;
  return {{a.x, a.y, a.z, a.w}};
}
DEVICE void store_vector(float* p, const Vector& a) { *(float4*)p = {a[0], a[1], a[2], a[3]}; }

constexpr bool IS_BFLOAT16 = DTYPE == BFLOAT16;

DEVICE float to_float(u16 x) { return IS_BFLOAT16 ? as_float((u32)x << 16) : half_to_float(x); }
// The two 16-bit floats of a word.
DEVICE void unpack(u32 word, float& low, float& high) {
  if (IS_BFLOAT16) {
    low = as_float(word << 16);
    high = as_float(word & 0xFFFF0000);
  } else {
    low = half_to_float((u16)word);
    high = half_to_float((u16)(word >> 16));
  }
}

DEVICE float sigmoid(float x) { return 1.f / (1.f + exp2f(-LOG2_E * x)); }
DEVICE float activate(float x) {
  if (ACTIVATION == SILU) return x * sigmoid(x);
  if (ACTIVATION == GELU_TANH)
    return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
  if (ACTIVATION == GELU) return 0.5f * x * (1.f + erff(0.7071067811865476f * x));
  if (ACTIVATION == RELU) return x > 0.f ? x : 0.f;
  if (ACTIVATION == RELU2) return x > 0.f ? x * x : 0.f;
  return x;
}

constexpr int GROUP_COLUMNS = 128;  // inputs that share a scale of int4 weights

// A weight with COLUMNS inputs, multiplied by tensor cores: a tile of rows at a time, in segments
// of their columns, each of which is a stage. The warps of a block share the units of a segment:
// two halves of 64 bytes of each row. The last segment may have fewer units; the input of the
// others is 0. The input is the sum of PARTS vectors of 16-bit floats. Behind the rows of a stage
// are their scales, if they are int4: a half has one of them; and behind the input are the sums of
// its groups, because int4 weights are multiplied with an offset (see `int4_pair`).
template <int BITS_, int COLUMNS_, int PARTS_, int TILE_ROWS_>
struct Matrix {
  static constexpr int BITS = BITS_, COLUMNS = COLUMNS_, PARTS = PARTS_, TILE_ROWS = TILE_ROWS_;
  static constexpr int ROW_SETS = TILE_ROWS / 8;
  static constexpr int UNIT_COLUMNS = 128 * 8 / BITS, HALF_COLUMNS = UNIT_COLUMNS / 2;
  static constexpr int LANE_CHUNKS = HALF_COLUMNS / 32;  // eight columns each, of a lane in a half
  static constexpr int ROW_BYTES = BITS * COLUMNS / 8, UNITS = ROW_BYTES / 128;
  static constexpr int SCALE_BYTES = BITS == 4 ? COLUMNS / GROUP_COLUMNS * 4 : 0;  // of a row
  static constexpr int UNIT_BYTES = 128 + (BITS == 4 ? 8 : 0);
  static constexpr int MAX_WARP_UNITS = STAGE_BYTES / (TILE_ROWS * UNIT_BYTES * WARPS);
  static_assert(ROW_BYTES % 128 == 0, "a row must consist of whole units");
  static_assert(SCALE_BYTES % 16 == 0, "bulk copies read whole 16 bytes");
  static_assert(MAX_WARP_UNITS > 0, "a stage must have a unit for each warp");
  static_assert(BITS != 4 || HALF_COLUMNS == GROUP_COLUMNS, "a half must have one scale");
  static constexpr int SEGMENTS = ceil_div(UNITS, WARPS* MAX_WARP_UNITS);
  static constexpr int WARP_UNITS = ceil_div(UNITS, WARPS* SEGMENTS);
  static constexpr int SEGMENT_UNITS = WARP_UNITS * WARPS;
  static constexpr int SEGMENT_BYTES = min_of(ROW_BYTES, SEGMENT_UNITS * 128);  // of each row
  static constexpr int SEGMENT_SCALE_BYTES = BITS == 4 ? SEGMENT_BYTES / 16 : 0;
  static constexpr int SCALES_AT = TILE_ROWS * SEGMENT_BYTES;
  static_assert(SCALES_AT + TILE_ROWS * SEGMENT_SCALE_BYTES <= STAGE_BYTES, "a stage is too small");
  static constexpr int INPUT_COLUMNS = SEGMENTS * SEGMENT_UNITS * UNIT_COLUMNS;
  // The second vector begins 64 bytes after the end of the first, in other banks.
  static constexpr int SECOND_AT = INPUT_COLUMNS + 32, SUMS_AT = PARTS * SECOND_AT;
  static constexpr int GROUPS = BITS == 4 ? INPUT_COLUMNS / GROUP_COLUMNS : 0;
  static constexpr int INPUT_SIZE = SUMS_AT + 2 * GROUPS;
  DEVICE static float* group_sums(const u16* input) { return (float*)(input + SUMS_AT); }

  // Where the eight columns from `column` on are in the input: the chunks that the lanes read at a
  // time are side by side.
  HOST_DEVICE static constexpr int place(int column) {
    const int chunk = column % HALF_COLUMNS / 8;
    return column / HALF_COLUMNS * HALF_COLUMNS +
           8 * (chunk % LANE_CHUNKS * 4 + chunk / LANE_CHUNKS);
  }
};

constexpr int BRANCH_TILE_ROWS = DIM > 8 * NUM_BLOCKS ? 16 : 8;
// Those whose input is the residual stream: qkv, gate and up; the head.
using FromStream = Matrix<WEIGHT_BITS, DIM, 2, WEIGHT_BITS == 4 ? 32 : 16>;
using Head = Matrix<HEAD_BITS, DIM, 2, 16>;
using Out = Matrix<WEIGHT_BITS, Q_WIDTH, 1, BRANCH_TILE_ROWS>;
using Down = Matrix<WEIGHT_BITS, FFN, 1, BRANCH_TILE_ROWS>;
// How many stages with weights of a layer are copied at the same time.
constexpr int LAYER_IN_FLIGHT =
    min_of(IN_FLIGHT, ceil_div(LAYER_BYTES_IN_FLIGHT, FromStream::TILE_ROWS* FromStream::ROW_BYTES /
                                                          FromStream::SEGMENTS));

// The outputs of a linear layer that this block computes.
struct Rows {
  int begin, count;
  DEVICE explicit Rows(int rows) {
    begin = (int)((i64)rows * block_index() / NUM_BLOCKS);
    count = (int)((i64)rows * (block_index() + 1) / NUM_BLOCKS) - begin;
  }
};

// The hidden values of the feed-forward network that this block computes: whole pairs.
DEVICE Rows hidden_rows() {
  Rows rows(FFN / 2);
  rows.begin *= 2;
  rows.count *= 2;
  return rows;
}

constexpr int STAGE_KEYS = STAGE_BYTES / (4 * HEAD_DIM);  // with their values
constexpr int KEY_TILES = ceil_div(STAGE_KEYS, 16);
constexpr int QUERY_TILES = ceil_div(GROUP, 8);
// The columns of wide heads are split over two warps, so that the sums of a warp fit in registers.
constexpr int COLUMN_PARTS = HEAD_DIM > 128 ? 2 : 1;
static_assert(WARPS % COLUMN_PARTS == 0, "every part must have as many warps");
constexpr int CHUNK_SETS = ceil_div(HEAD_DIM, 32 * COLUMN_PARTS);  // of 32 columns, of a part
static_assert(GROUP <= 16 && KV_HEADS <= NUM_BLOCKS, "too many heads");

// A power of two, so that the lanes of a warp combine whole groups of splits.
constexpr int MAX_SPLITS =
    floor_power_of_2(min_of(32, min_of(NUM_BLOCKS / KV_HEADS, GROUP* HEAD_DIM / 4)));

// The keys that a query attends to, in splits of the same size; the last key is the new one.
struct KeySplits {
  int window, first, keys, count = 1, split_keys;
  DEVICE KeySplits(int position, int window) : window(window) {
    first = position + 1 > window ? position + 1 - window : 0;
    keys = position + 1 - first;
    while (count < MAX_SPLITS && keys > count * SPLIT_KEYS) count *= 2;
    split_keys = ceil_div(keys, count);
  }
  // Whether all blocks receive the attention of each split; else it is combined first.
  DEVICE bool are_direct() const { return count <= DIRECT_SPLITS; }
};

// The split of a KV head that this block computes.
struct HeadSplit {
  int head, index, first, cached;  // the first key, and the number of keys in the cache
  bool active, has_new_key;
  DEVICE HeadSplit(const KeySplits& s) {
    head = block_index() % KV_HEADS;
    index = block_index() / KV_HEADS;
    active = index < s.count;
    const int begin = min_of(index * s.split_keys, s.keys);
    const int end = min_of(begin + s.split_keys, s.keys);
    first = s.first + begin;
    has_new_key = active && begin < end && end == s.keys;
    cached = active ? end - begin - has_new_key : 0;
  }
};

// Values that the blocks exchange, as 32-bit words. Some are for few blocks.
constexpr int QKV_AT = 0;
constexpr int PART_AT = QKV_AT + QKV_WIDTH;                      // attention of each split
constexpr int PART_LOG_SUM_AT = PART_AT + MAX_SPLITS * Q_WIDTH;  // of each head and split
constexpr int LOG_SUMS = 32;                                     // of a head: a cache line
// The others are for all blocks, which wait for the same ones at a time.
constexpr int ATTENTION_AT = PART_LOG_SUM_AT + LOG_SUMS * HEADS;  // pairs of 16-bit floats
constexpr int ATTENTION_WORDS = Q_WIDTH / 2;                      // of a split
constexpr int LOG_SUM_AT = ATTENTION_AT + DIRECT_SPLITS * ATTENTION_WORDS;  // four of each head
constexpr int BRANCH_AT = LOG_SUM_AT + ceil_div(4 * HEADS, 32) * 32;        // output of attention
constexpr int HIDDEN_AT = BRANCH_AT + DIM;   // pairs of 16-bit floats
constexpr int FFN_AT = HIDDEN_AT + FFN / 2;  // the output of the feed-forward network
constexpr int EXCHANGE_WORDS = FFN_AT + DIM;
static_assert(MAX_SPLITS <= LOG_SUMS, "the log sums of a head are in one cache line");
static_assert(DIRECT_SPLITS <= 4, "the log sums of a head are loaded at once");

constexpr int INPUT_SIZE = max_of(max_of(FromStream::INPUT_SIZE, Head::INPUT_SIZE),
                                  max_of(Out::INPUT_SIZE, IS_PARALLEL ? 0 : Down::INPUT_SIZE));
constexpr int SECOND_INPUT_SIZE =
    IS_PARALLEL ? max_of(Down::INPUT_SIZE, FromStream::INPUT_SIZE) : 8;
constexpr int MAX_BLOCK_ROWS = 2 + max_of(max_of(QKV_WIDTH, DIM), FFN) / NUM_BLOCKS;
// that are summed at once; of hidden values, gate and up
constexpr int BATCH_ROWS =
    ceil_div(max_of(MAX_BLOCK_ROWS, (1 + GATED) * (2 + FFN / NUM_BLOCKS)), 128) * 128;
constexpr int STREAM_VECTORS = ceil_div(DIM / 4, CONSUMERS);  // of the residual stream, per thread
constexpr int HEAD_VECTORS = ceil_div(HEAD_DIM / 4, 32);      // of a head, per lane
constexpr int LAYER_SLOTS = 4;  // descriptions of layers in shared memory
static_assert(MAX_BLOCK_ROWS <= CONSUMERS, "a thread completes at most one output");
static_assert(DIM >= NUM_BLOCKS, "every block must compute an output of every branch");
static_assert(!IS_PARALLEL || max_of(QKV_WIDTH, FFN / 2) >= NUM_BLOCKS,
              "every block must send something that depends on the previous layer");

struct SharedMemory {
  alignas(128) u16 input[INPUT_SIZE];
  alignas(128) u16 second_input[SECOND_INPUT_SIZE];
  alignas(16) float partial_sums[2][WARPS][BATCH_ROWS];  // of each warp, in two buffers
  alignas(16) float rotated[(GROUP + 1) * HEAD_DIM];     // queries and key, before their rotation
  alignas(16) u16 queries[QUERY_TILES * 8 * HEAD_DIM];
  alignas(16) u16 new_key[HEAD_DIM], new_value[HEAD_DIM];
  float maximum[WARPS][GROUP], total[WARPS][GROUP];  // of each query
  float cos[HEAD_DIM], sin[HEAD_DIM];
  int partner[HEAD_DIM];
  float slope[GROUP];
  alignas(16) float moments[2][WARPS];
  Layer layers[LAYER_SLOTS];
  alignas(8) u64 full[32], empty[32], layer_full[LAYER_SLOTS], layer_empty[LAYER_SLOTS];
};
constexpr int RING_AT = ceil_div((int)sizeof(SharedMemory), 128) * 128;
constexpr int STAGES = min_of(32, (SHARED_BYTES - RING_AT) / STAGE_BYTES);
static_assert(STAGES > IN_FLIGHT, "too little shared memory");

extern "C" {
DEVICE_CONSTANT u64 exchange_bytes = (u64)EXCHANGE_WORDS * 4;
DEVICE_CONSTANT u64 struct_bytes[2] = {sizeof(Layer), sizeof(Arguments)};
}

// A position in the ring of stages.
struct Stage {
  int index = 0;
  u32 parity;
  DEVICE explicit Stage(u32 parity) : parity(parity) {}
  DEVICE void advance() {
    if (++index == STAGES) {
      index = 0;
      parity ^= 1;
    }
  }
};

DEVICE SharedMemory& shared() { return *(SharedMemory*)shared_memory(); }
DEVICE char* stage_data(const Stage& stage) {
  return shared_memory() + RING_AT + stage.index * STAGE_BYTES;
}
