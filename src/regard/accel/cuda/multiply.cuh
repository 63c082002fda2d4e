// Matrix-vector products by tensor cores, of a weight in the ring of stages and an input in shared
// memory.

// An input has eight columns in four words, words 0 and 2 and words 1 and 3 side by side (see
// `UnitRows`). Word i has columns 2 i and 2 i + 1; of int4 weights, columns i and i + 4.

// Of the eight columns that this lane and its neighbor have, those of words 0 and 2 in the even
// lane, and of words 1 and 3 in the odd one, for int4 weights.
DEVICE Vector exchange_columns(const Vector& v) {
  const bool odd = thread_index() % 2;
  const float first = shuffle_xor(odd ? v[0] : v[1], 1), second = shuffle_xor(odd ? v[2] : v[3], 1);
  return odd ? Vector{{first, v[1], second, v[3]}} : Vector{{v[0], first, v[2], second}};
}
// Stores the sum of a group of an input, of which LANES neighboring lanes have a part each.
template <class M, int LANES>
DEVICE void store_group_sum(u16* input, int column, float sum) {
  UNROLL
  for (int offset = 1; offset < LANES; offset *= 2) sum += shuffle_xor(sum, offset);
  if (thread_index() % LANES == 0) M::group_sums(input)[column / GROUP_COLUMNS] = sum;
}
// Stores four columns of an input as the sum of two 16-bit floats; all lanes of a warp together.
template <class M>
DEVICE void store_input(u16* input, int column, const Vector& v) {
  const int odd = column / 4 % 2, stride = M::BITS == 4 ? 2 : 4;
  u16* to = input + M::place(column) + odd * (6 - stride);
  Vector rest = M::BITS == 4 ? exchange_columns(v) : v;
  float sum = 0.f;
  UNROLL
  for (int part = 0; part < 2; part++) {
    UNROLL
    for (int i = 0; i < 2; i++) {
      float low, high;
      const u32 pair = pack_pair<IS_BFLOAT16>(rest[2 * i], rest[2 * i + 1]);
      *(u32*)(to + part * M::SECOND_AT + stride * i) = pair;
      unpack(pair, low, high);
      rest[2 * i] -= low;
      rest[2 * i + 1] -= high;
      sum += low + high;
    }
  }
  if (M::BITS == 4) store_group_sum<M, GROUP_COLUMNS / 4>(input, column, sum);
}
// The same for eight columns that are 16-bit floats already.
template <class M>
DEVICE void store_input(u16* input, int column, const uint4& v) {
  uint4 words = {v.x, v.z, v.y, v.w};
  if (M::BITS == 4) {
    words = {v.x & 0xFFFF | v.z << 16, v.y & 0xFFFF | v.w << 16, v.x >> 16 | v.z & 0xFFFF0000,
             v.y >> 16 | v.w & 0xFFFF0000};
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
    float sum = 0.f;
    UNROLL
    for (int i = 0; i < 4; i++) {
      float low, high;
      unpack(pairs[i], low, high);
      sum += low + high;
    }
    store_group_sum<M, GROUP_COLUMNS / 8>(input, column, sum);
  }
  *(uint4*)(input + M::place(column)) = words;
}

// Two int8, bytes `first` and `first + 1` of a word, as a pair of 16-bit floats.
template <bool IS_BFLOAT16>
DEVICE u32 int8_pair(u32 word, int first) {
  const u32 bytes = permute_bytes(word, 0x4140 + 0x101 * first);
  if (IS_BFLOAT16)  // 128 + the lower seven bits, minus 128 or, of negative ones, 256
    return subtract_pairs<true>(select_bits(bytes, 0x7F007F, 0x43004300),
                                select_bits(bytes, 0x800080, 0x43004300));
  return subtract_pairs<false>(bytes ^ 0x64806480, 0x64806480);  // 1,152 + these integers
}
// Two int4, stored plus 8 in bits 0 to 3 and 16 to 19 of a word, as a pair of 16-bit floats, plus
// INT4_OFFSET.
constexpr float INT4_OFFSET = IS_BFLOAT16 ? 128 + 8 : 1024 + 8;
DEVICE u32 int4_pair(u32 word) {
  return select_bits(word, 0xF000F, IS_BFLOAT16 ? 0x43004300 : 0x64006400);
}
// The 16-bit floats of eight weights, in the order of an input; of int4 weights, plus INT4_OFFSET.
template <int BITS>
DEVICE uint4 to_floats(const uint4& row, int chunk) {
  if (BITS == 16) return row;
  const u32 words[4] = {row.x, row.y, row.z, row.w};
  if (BITS == 8)
    return {int8_pair<IS_BFLOAT16>(words[2 * chunk], 0),
            int8_pair<IS_BFLOAT16>(words[2 * chunk], 2),
            int8_pair<IS_BFLOAT16>(words[2 * chunk + 1], 0),
            int8_pair<IS_BFLOAT16>(words[2 * chunk + 1], 2)};
  const u32 word = words[chunk];
  return {int4_pair(word), int4_pair(word >> 4), int4_pair(word >> 8), int4_pair(word >> 12)};
}

// Part of the rows of a tile: two halves of a unit, for each set of eight rows.
//
// Lane 4 g + t has 16 bytes of row g of each set. As 16-bit floats, eight weights are four words,
// which are rows g and g + 8 of the first operand of a matrix product, words 0 and 2 of the former
// and words 1 and 3 of the latter. Rows with an odd g have the two halves in the other order, so
// that lanes read different banks.
template <class M>
struct UnitRows {
  uint4 words[2][M::ROW_SETS];
  float scales[2][M::ROW_SETS];

  // Loads them from a stage; `is_valid`: whether the rows have this unit.
  DEVICE void load(const char* data, int unit, bool is_valid) {
    const int g = thread_index() % 32 / 4, t = thread_index() % 4;
    UNROLL
    for (int half = 0; half < 2; half++) {
      UNROLL
      for (int i = 0; i < M::ROW_SETS; i++) {
        const int row = g + 8 * i, at = 2 * unit + (half ^ g % 2);
        words[half][i] = *(const uint4*)(data + row * M::SEGMENT_BYTES + 64 * at + 16 * t);
        if (M::BITS != 4) continue;
        const char* row_scales = data + M::SCALES_AT + row * M::SEGMENT_SCALE_BYTES;
        scales[half][i] = is_valid ? ((const float*)row_scales)[at] : 0.f;
      }
    }
  }

  // Adds the products with a unit of the input: of int4 weights, the lane's row in `sums[i][0]`.
  // The second operand has an input in each column for all cases: its bit 0 is which vector of the
  // input, bit 1 words 0 and 2 or 1 and 3, bit 2 the halves in the other order.
  DEVICE void multiply(float (&sums)[M::ROW_SETS][4], const u16* input, int unit) const {
    const int g = thread_index() % 32 / 4, t = thread_index() % 4;
    const u16* x = input + unit * M::UNIT_COLUMNS + 8 * t + g / 2 % 2 * 4;
    if (M::PARTS == 2) x += g % 2 * M::SECOND_AT;
    UNROLL
    for (int half = 0; half < 2; half++) {
      float products[M::ROW_SETS][4] = {};
      UNROLL
      for (int chunk = 0; chunk < M::LANE_CHUNKS; chunk++) {
        uint2 v = *(const uint2*)(x + (half ^ g / 4) * M::HALF_COLUMNS + 32 * chunk);
        if (M::PARTS == 1 && g % 2) v = {0, 0};
        UNROLL
        for (int i = 0; i < M::ROW_SETS; i++) {
          const uint4 row = to_floats<M::BITS>(words[half][i], chunk);
          multiply_tiles<IS_BFLOAT16>(M::BITS == 4 ? products[i] : sums[i], row.x, row.y, row.z,
                                      row.w, v.x, v.y);
        }
      }
      if (M::BITS != 4) continue;
      // two lanes have a part of the product of a row each; one of them subtracts the offset
      const float group_sum = t % 2 ? 0.f : M::group_sums(input)[2 * unit + (half ^ g % 2)];
      UNROLL
      for (int i = 0; i < M::ROW_SETS; i++) {
        const float product = fmaf(-INT4_OFFSET, group_sum, row_product(products[i]));
        sums[i][0] = fmaf(scales[half][i], product, sums[i][0]);
      }
    }
  }

  // The lane's part of the product of its row, from the result of a matrix product.
  DEVICE static float row_product(const float (&c)[4]) {
    return thread_index() % 2 ? c[2] + c[3] : c[0] + c[1];
  }
};

// W x for the block's rows: what each warp has summed, in `partial_sums`. Rows and units of a
// stage that were not copied have an old content: the results of such rows are not used; of such
// units, the input and the scale are 0.
//
// While a segment is multiplied, the next one is loaded from shared memory to registers.
template <class M>
DEVICE void multiply(const u16* input, int rows, float (*partial_sums)[BATCH_ROWS], Stage& stage) {
  const int warp = thread_index() / 32, lane = thread_index() % 32, g = lane / 4, t = lane % 4;
  int segments_left = ceil_div(rows, M::TILE_ROWS) * M::SEGMENTS;
  if (segments_left == 0) return;
  UnitRows<M> units[M::WARP_UNITS];
  wait(&shared().full[stage.index], stage.parity);
  UNROLL
  for (int u = 0; u < M::WARP_UNITS; u++) {
    const int unit = warp + u * WARPS;
    units[u].load(stage_data(stage), unit, unit < M::UNITS);
  }
  NO_UNROLL
  for (int tile = 0; tile < rows; tile += M::TILE_ROWS) {
    float sums[M::WARP_UNITS][M::ROW_SETS][4] = {};
    NO_UNROLL
    for (int first = warp; first < M::SEGMENTS * M::SEGMENT_UNITS; first += M::SEGMENT_UNITS) {
      u64* empty = &shared().empty[stage.index];
      stage.advance();
      const bool has_next = --segments_left > 0;
      UNROLL
      for (int u = 0; u < M::WARP_UNITS; u++) {
        units[u].multiply(sums[u], input, first + u * WARPS);
        if (!has_next) continue;
        if (u == 0) wait(&shared().full[stage.index], stage.parity);
        const int next = first + M::SEGMENT_UNITS < M::SEGMENTS * M::SEGMENT_UNITS
                             ? first + M::SEGMENT_UNITS
                             : warp;
        units[u].load(stage_data(stage), warp + u * WARPS, next + u * WARPS < M::UNITS);
      }
      sync_warp();
      if (lane == 0) arrive(empty);
    }
    UNROLL
    for (int i = 0; i < M::ROW_SETS; i++) {
      float sum = 0.f;
      UNROLL
      for (int u = 0; u < M::WARP_UNITS; u++)
        sum += M::BITS == 4 ? sums[u][i][0] : UnitRows<M>::row_product(sums[u][i]);
      sum += shuffle_xor(sum, 1);
      if (t == g % 2 * 2) partial_sums[warp][tile + g + 8 * i] = sum;
    }
  }
}
