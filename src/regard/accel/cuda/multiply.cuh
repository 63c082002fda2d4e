// Matrix-vector products by tensor cores, of a weight in the ring of stages and an input in shared
// memory.
// Stores four columns of an input as the sum of two 16-bit floats. Of the four words of eight
// columns, words 0 and 2 and words 1 and 3 are side by side (see `multiply_segment`). Pairs of int4
// weights that are unpacked together are 4 columns apart; so are the columns of a word of their
// input.

template <class M>
DEVICE void store_input(u16* input, int column, const Vector& v) {
  const int first = column / 8 * 8, upper = column / 4 % 2;
  Vector rest = v;
  UNROLL
  for (int part = 0; part < 2; part++) {
    u16* to = input + part * M::SECOND_AT + first;
    UNROLL
    for (int i = 0; i < 2; i++) {
      float low, high;
      const u32 pair = pack_pair<IS_BFLOAT16>(rest[2 * i], rest[2 * i + 1]);
      unpack(pair, low, high);
      rest[2 * i] -= low;
      rest[2 * i + 1] -= high;
      if (M::BITS == 4) {  // columns 2 i and 2 i + 1 of the vector are in words 2 i and 2 i + 1
        to[2 * i + upper] = (u16)pair;
        to[2 * i + upper + 4] = (u16)(pair >> 16);
      } else {
        *(u32*)(to + 4 * i + 2 * upper) = pair;
      }
    }
  }
}
// The same for eight columns that are 16-bit floats already.
template <class M>
DEVICE void store_input(u16* input, int column, const uint4& v) {
  uint4 words = {v.x, v.z, v.y, v.w};
  if (M::BITS == 4)
    words = {(v.x & 0xFFFF) | v.z << 16, (v.y & 0xFFFF) | v.w << 16, v.x >> 16 | (v.z & 0xFFFF0000),
             v.y >> 16 | (v.w & 0xFFFF0000)};
  *(uint4*)(input + column) = words;
}

// Integer weights become 16-bit floats times these units.
constexpr float INT8_UNIT = IS_BFLOAT16 ? 1.f / 64 : 1.f;

// Four int8 as two pairs of 16-bit floats. Each plus 128 becomes the lowest bits of a float: in
// bfloat16 u is u * 2^-133, and times 2^127 minus 2 it is v / 64; in float16 it is 1024 + u.
DEVICE void unpack_int8(u32 word, u32& first, u32& second) {
  word ^= 0x80808080;
  first = (word & 0xFF) | (word & 0xFF00) << 8;
  second = (word >> 16 & 0xFF) | (word >> 8 & 0xFF0000);
  if (IS_BFLOAT16) {
    first = multiply_add_pair<true>(first, 0x7F007F00, 0xC000C000);
    second = multiply_add_pair<true>(second, 0x7F007F00, 0xC000C000);
  } else {
    first = multiply_add_pair<false>(first | 0x64006400, 0x3C003C00, 0xE480E480);
    second = multiply_add_pair<false>(second | 0x64006400, 0x3C003C00, 0xE480E480);
  }
}
// Two int4, stored plus 8, that are 4 columns apart, as a pair: 128 + u or 1024 + u, minus 136 or
// 1032.
DEVICE u32 unpack_int4(u32 word, int index) {
  u32 pair = word >> 4 * index & 0x000F000F;
  if (IS_BFLOAT16) return multiply_add_pair<true>(pair | 0x43004300, 0x3F803F80, 0xC308C308);
  return multiply_add_pair<false>(pair | 0x64006400, 0x3C003C00, 0xE408E408);
}

// Adds the product of 8 rows and one half of a unit to `sums`. `x` are the words of the input in
// `multiply_segment`'s order.
template <int BITS>
DEVICE void multiply_half(float (&sums)[4], const uint4& row, const uint2 (&x)[16 / BITS]) {
  const u32 words[4] = {row.x, row.y, row.z, row.w};
  if (BITS == 16) {
    multiply_tiles<IS_BFLOAT16>(sums, row.x, row.y, row.z, row.w, x[0].x, x[0].y);
  } else if (BITS == 8) {
    UNROLL
    for (int i = 0; i < 2; i++) {
      u32 a[4];
      unpack_int8(words[2 * i], a[0], a[1]);
      unpack_int8(words[2 * i + 1], a[2], a[3]);
      multiply_tiles<IS_BFLOAT16>(sums, a[0], a[1], a[2], a[3], x[i].x, x[i].y);
    }
  } else {
    UNROLL
    for (int i = 0; i < 4; i++)
      multiply_tiles<IS_BFLOAT16>(sums, unpack_int4(words[i], 0), unpack_int4(words[i], 1),
                                  unpack_int4(words[i], 2), unpack_int4(words[i], 3), x[i].x,
                                  x[i].y);
  }
}

// Adds the products of 16 rows of a segment with an input, from the input's unit `first` on.
//
// Lane 4 g + t reads 16 bytes of row g: four words, which are rows g and g + 8 of the first operand
// of a matrix product, words 0 and 2 of the former and words 1 and 3 of the latter. Rows with an
// odd g have the two halves of a unit in the other order, so that lanes read different banks. The
// second operand has an input in each column for all cases: its bit 0 is which vector of the input,
// bit 1 words 0 and 2 or 1 and 3, bit 2 the halves in the other order.
template <class M>
DEVICE void multiply_segment(float (&sums)[M::WARP_UNITS][2][4], const char* data, const u16* input,
                             int first) {
  const int warp = thread_index() / 32, g = thread_index() % 32 / 4, t = thread_index() % 4;
  uint4 rows[M::WARP_UNITS][2][2];
  UNROLL
  for (int u = 0; u < M::WARP_UNITS; u++) UNROLL
  for (int half = 0; half < 2; half++) UNROLL
  for (int i = 0; i < 2; i++) {
    const int place = 128 * (warp + u * WARPS) + 64 * (half ^ g % 2) + 16 * t;
    rows[u][half][i] = *(const uint4*)(data + (g + 8 * i) * M::SEGMENT_BYTES + place);
  }
  const u16* x = input + t * M::LANE_COLUMNS + g / 2 % 2 * 4;
  if (M::PARTS == 2) x += g % 2 * M::SECOND_AT;
  UNROLL
  for (int u = 0; u < M::WARP_UNITS; u++) {
    const int unit = first + warp + u * WARPS;
    UNROLL
    for (int half = 0; half < 2; half++) {
      uint2 v[16 / M::BITS];
      UNROLL
      for (int i = 0; i < 16 / M::BITS; i++) {
        v[i] = *(const uint2*)(x + (unit * 2 + (half ^ g / 4)) * M::HALF_COLUMNS + 8 * i);
        if (M::PARTS == 1 && g % 2) v[i] = {0, 0};
      }
      UNROLL
      for (int i = 0; i < 2; i++) {
        if (M::BITS != 4) {
          multiply_half<M::BITS>(sums[u][i], rows[u][half][i], v);
          continue;
        }
        float products[4] = {};
        multiply_half<M::BITS>(products, rows[u][half][i], v);
        const char* scales = data + 16 * M::SEGMENT_BYTES + (g + 8 * i) * M::SCALE_BYTES;
        const int group = unit * 2 + (half ^ g % 2);
        const float scale = group < 2 * M::UNITS ? to_float(((const u16*)scales)[group]) : 0.f;
        UNROLL
        for (int j = 0; j < 4; j++) sums[u][i][j] = fmaf(scale, products[j], sums[u][i][j]);
      }
    }
  }
}

// W x for the block's rows: what each warp has summed, in `partial`. Rows and units of a stage that
// were not copied have an old content; their results or inputs are not used or 0.
template <class M>
DEVICE void multiply(const u16* input, int rows, float (*partial)[BATCH_ROWS], Stage& stage) {
  const int warp = thread_index() / 32, lane = thread_index() % 32, g = lane / 4, t = lane % 4;
  NO_UNROLL
  for (int tile = 0; tile < rows; tile += 16) {
    float sums[M::WARP_UNITS][2][4] = {};
    NO_UNROLL
    for (int first = 0; first < M::UNITS; first += M::SEGMENT_UNITS) {
      wait(&shared().full[stage.index], stage.parity);
      multiply_segment<M>(sums, stage_data(stage), input, first);
      sync_warp();
      if (lane == 0) arrive(&shared().empty[stage.index]);
      stage.advance();
    }
    UNROLL
    for (int i = 0; i < 2; i++) {
      float sum = 0.f;
      UNROLL
      for (int u = 0; u < M::WARP_UNITS; u++)
        sum += t % 2 ? sums[u][i][2] + sums[u][i][3] : sums[u][i][0] + sums[u][i][1];
      sum += shuffle_xor(sum, 1);
      if (t == g % 2 * 2) partial[warp][tile + g + 8 * i] = sum;
    }
  }
}
