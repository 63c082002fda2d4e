// Matrix-vector products by tensor cores, of a weight in the ring of stages and an input in shared
// memory.

// Stores four columns of an input as the sum of two 16-bit floats. Of the four words of eight
// columns, words 0 and 2 and words 1 and 3 are side by side (see `multiply_segment`).
template <class M>
DEVICE void store_input(u16* input, int column, const Vector& v) {
  const int place = column / 8 * 8 + column / 4 % 2 * 2;
  Vector rest = v;
  UNROLL
  for (int part = 0; part < 2; part++) {
    UNROLL
    for (int i = 0; i < 2; i++) {
      float low, high;
      const u32 pair = pack_pair<IS_BFLOAT16>(rest[2 * i], rest[2 * i + 1]);
      *(u32*)(input + part * M::SECOND_AT + place + 4 * i) = pair;
      unpack(pair, low, high);
      rest[2 * i] -= low;
      rest[2 * i + 1] -= high;
    }
  }
}
// The same for eight columns that are 16-bit floats already.
DEVICE void store_input(u16* input, int column, const uint4& v) {
  *(uint4*)(input + column) = {v.x, v.z, v.y, v.w};
}

// Part of the rows of a tile: two halves of a unit, for each set of eight rows.
//
// Lane 4 g + t has 16 bytes of row g of each set: four words, which are rows g and g + 8 of the
// first operand of a matrix product, words 0 and 2 of the former and words 1 and 3 of the latter.
// Rows with an odd g have the two halves in the other order, so that lanes read different banks.
template <class M>
struct UnitRows {
  uint4 words[2][M::ROW_SETS];

  DEVICE void load(const char* data, int unit) {
    const int g = thread_index() % 32 / 4, t = thread_index() % 4;
    UNROLL
    for (int half = 0; half < 2; half++) {
      UNROLL
      for (int i = 0; i < M::ROW_SETS; i++) {
        const int place = 128 * unit + 64 * (half ^ g % 2) + 16 * t;
        words[half][i] = *(const uint4*)(data + (g + 8 * i) * M::SEGMENT_BYTES + place);
      }
    }
  }

  // Adds the products with a unit of the input. The second operand has an input in each column for
  // all cases: its bit 0 is which vector of the input, bit 1 words 0 and 2 or 1 and 3, bit 2 the
  // halves in the other order.
  DEVICE void multiply(float (&sums)[M::ROW_SETS][4], const u16* input, int unit) const {
    const int g = thread_index() % 32 / 4, t = thread_index() % 4;
    const u16* x = input + unit * UNIT_COLUMNS + 8 * t + g / 2 % 2 * 4;
    if (M::PARTS == 2) x += g % 2 * M::SECOND_AT;
    UNROLL
    for (int half = 0; half < 2; half++) {
      uint2 v = *(const uint2*)(x + (half ^ g / 4) * HALF_COLUMNS);
      if (M::PARTS == 1 && g % 2) v = {0, 0};
      UNROLL
      for (int i = 0; i < M::ROW_SETS; i++) {
        const uint4 row = words[half][i];
        multiply_tiles<IS_BFLOAT16>(sums[i], row.x, row.y, row.z, row.w, v.x, v.y);
      }
    }
  }
};

// W x for the block's rows: what each warp has summed, in `partial`. Rows and units of a stage that
// were not copied have an old content; their results or inputs are not used or 0.
//
// While a segment is multiplied, the next one is loaded from shared memory to registers.
template <class M>
DEVICE void multiply(const u16* input, int rows, float (*partial)[BATCH_ROWS], Stage& stage) {
  const int warp = thread_index() / 32, lane = thread_index() % 32, g = lane / 4, t = lane % 4;
  int segments_left = ceil_div(rows, M::TILE_ROWS) * M::SEGMENTS;
  if (segments_left == 0) return;
  UnitRows<M> units[M::WARP_UNITS];
  wait(&shared().full[stage.index], stage.parity);
  UNROLL
  for (int u = 0; u < M::WARP_UNITS; u++) units[u].load(stage_data(stage), warp + u * WARPS);
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
        units[u].load(stage_data(stage), warp + u * WARPS);
      }
      sync_warp();
      if (lane == 0) arrive(empty);
    }
    UNROLL
    for (int i = 0; i < M::ROW_SETS; i++) {
      float sum = 0.f;
      UNROLL
      for (int u = 0; u < M::WARP_UNITS; u++)
        sum += t % 2 ? sums[u][i][2] + sums[u][i][3] : sums[u][i][0] + sums[u][i][1];
      sum += shuffle_xor(sum, 1);
      if (t == g % 2 * 2) partial[warp][tile + g + 8 * i] = sum;
    }
  }
}
