// The warps that multiply: what they exchange with other blocks, and the inputs of linear layers.

DEVICE bool lacks_tag(const uint4& bits, u32 tag) {
  return ((bits.x ^ tag) | (bits.y ^ tag) | (bits.z ^ tag) | (bits.w ^ tag)) & 1;
}
DEVICE Vector as_vector(const uint4& bits) {
  const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
  Vector v;
  UNROLL
  for (int i = 0; i < 4; i++) v[i] = as_float(words[i] & ~1u);  // without the tag
  return v;
}
DEVICE void wait_for_tag(const float* p, u32 tag) {
  while ((load_exchanged(p) ^ tag) & 1) {
  }
}
// Loads N vectors at `p + i * stride`, those before `end`, as soon as they have a tag.
template <int N>
DEVICE void receive(uint4 (&bits)[N], const float* p, int stride, const float* end, u32 tag) {
  u32 missing = ~0u;
  do {
    UNROLL
    for (int i = 0; i < N; i++)
      if (missing >> i & 1 && p + i * stride < end) bits[i] = load_exchanged4(p + i * stride);
    missing = 0;
    UNROLL
    for (int i = 0; i < N; i++)
      if (p + i * stride < end && lacks_tag(bits[i], tag)) missing |= 1 << i;
  } while (missing);
}
DEVICE void send(float* p, u32 bits, u32 tag) { store_exchanged(p, (bits & ~1u) | tag); }
DEVICE void send(float* p, float value, u32 tag) { send(p, as_bits(value), tag); }

// Sums each of two values over the 32 lanes: lanes 0 to 15 get the sum of the first.
DEVICE float sum_lanes(float a, float b) {
  const bool upper = thread_index() & 16;
  float sum = (upper ? b : a) + shuffle_xor(upper ? a : b, 16);
  UNROLL
  for (int offset = 8; offset; offset /= 2) sum += shuffle_xor(sum, offset);
  return sum;
}

struct Moments {
  float mean, inverse_deviation;
};

struct Consumer {
  const Arguments& a;
  const int position;
  int thread, warp, lane;
  Tags tags;
  u32 tag;  // of the current layer
  Stage stage{0};
  int buffer = 0;  // of `partial_sums`
  KeySplits splits;
  Vector x[STREAM_VECTORS];  // the residual stream: columns 4 (thread + i CONSUMERS) to + 3

  DEVICE Consumer(const Arguments& a, const Tags& tags, int position)
      : a(a),
        position(position),
        thread(thread_index()),
        warp(thread / 32),
        lane(thread % 32),
        tags(tags),
        tag(tags.layer),
        splits(position, NO_WINDOW) {}

  DEVICE int column(int i) const { return 4 * (thread + i * CONSUMERS); }

  template <class M>
  DEVICE void multiply_into(int buffer, const u16* input, int rows) {
    multiply<M>(input, rows, shared().partial_sums[buffer], stage);
  }

  DEVICE float total(int row, int buffer) const {
    float sums[4] = {};
    UNROLL
    for (int w = 0; w < WARPS; w++) sums[w % 4] += shared().partial_sums[buffer][w][row];
    return sums[0] + sums[1] + (sums[2] + sums[3]);
  }

  // What is needed to complete an output, loaded before the product is there.
  struct Output {
    float scale = 1.f, bias = 0.f, mean_weight = 0.f;
    DEVICE Output() {}
    DEVICE Output(const Linear& linear, int row, int bits = WEIGHT_BITS) {
      if (bits == 8) scale = linear.scale[row];
      if (linear.bias) bias = linear.bias[row];
      if (linear.mean_weight) mean_weight = linear.mean_weight[row];
    }
    DEVICE float complete(float product, const Moments& m) const {
      return fmaf(-m.mean, mean_weight, product * scale) * m.inverse_deviation + bias;
    }
  };

  // Mean and inverse standard deviation of the columns of all threads, from the sums of
  // `add_moments`. The former is divided and the latter multiplied by the scale of the gains.
  template <int KIND>
  DEVICE Moments moments(float eps, float gain_scale = 1.f) const {
    if (KIND == NO_NORM) return {0.f, 1.f};
    float squares = 0.f, sum = 0.f;
    UNROLL
    for (int w = 0; w < WARPS; w++) {
      squares += shared().moments[0][w];
      if (KIND == LAYER_NORM) sum += shared().moments[1][w];
    }
    const float mean = sum / DIM;
    const float inverse_deviation = rsqrtf(squares / DIM - mean * mean + eps);
    return {mean / gain_scale, inverse_deviation * gain_scale};
  }
  template <int KIND>
  DEVICE void add_moments(float squares, float sum) {
    if (KIND == NO_NORM) return;
    float reduced = sum_lanes(squares, sum);
    if (lane % 16 == 0) shared().moments[lane / 16][warp] = reduced;
  }

  // Writes g x, the input of a linear layer without the norm's division, and its moments.
  template <class M, int KIND>
  DEVICE void write_stream(u16* input, const Vector (&gain)[STREAM_VECTORS]) {
    float sum = 0.f, squares = 0.f;
    UNROLL
    for (int i = 0; i < STREAM_VECTORS; i++) {
      if (column(i) >= DIM) continue;
      Vector v = x[i];
      UNROLL
      for (int j = 0; j < 4; j++) {
        if (KIND == NO_NORM) continue;
        sum += v[j];
        squares = fmaf(v[j], v[j], squares);
        v[j] *= gain[i][j];
      }
      store_input<M>(input, column(i), v);
    }
    write_padding<M>(input);
    add_moments<KIND>(squares, sum);
    sync_consumers();
  }

  DEVICE void load_columns(Vector (&v)[STREAM_VECTORS], const float* from) const {
    UNROLL
    for (int i = 0; i < STREAM_VECTORS; i++)
      if (from && column(i) < DIM) v[i] = load_vector(from + column(i));
  }

  // Writes zeros after the end of an input, where its last segment has fewer units.
  template <class M>
  DEVICE void write_padding(u16* input) const {
    UNROLL
    for (int part = 0; part < M::PARTS; part++)
      for (int i = M::COLUMNS + 8 * thread; i < M::INPUT_COLUMNS; i += 8 * CONSUMERS)
        *(uint4*)(input + part * M::SECOND_AT + i) = {0, 0, 0, 0};
    for (int i = M::COLUMNS / GROUP_COLUMNS + thread; i < M::GROUPS; i += CONSUMERS)
      M::group_sums(input)[i] = 0.f;
  }

  // Values that are for all blocks, as soon as the first of them is there: by then most of the
  // others have been sent. If all threads repeated their loads, they would delay what they wait
  // for.
  DEVICE const float* received(int at, u32 tag) {
    if (thread == 0) wait_for_tag(a.exchange + at, tag);
    sync_consumers();
    return a.exchange + at;
  }

  // Writes an input that is exchanged as pairs of 16-bit floats. A barrier must follow.
  template <class M>
  DEVICE void write_pairs(u16* input, int at) {
    const float* from = received(at, tag);
    constexpr int N = ceil_div(M::COLUMNS / 8, CONSUMERS);
    uint4 v[N];
    receive(v, from + column(0), 4 * CONSUMERS, from + M::COLUMNS / 2, tag);
    UNROLL
    for (int i = 0; i < N; i++) {
      v[i].x &= ~1u, v[i].y &= ~1u, v[i].z &= ~1u, v[i].w &= ~1u;  // without the tag
      if (2 * column(i) < M::COLUMNS) store_input<M>(input, 2 * column(i), v[i]);
    }
    write_padding<M>(input);
  }

  // Adds the output of a branch to the residual stream.
  DEVICE void add_branch(int at, const OutputNorm& norm, float eps) {
    const float* exchanged = received(at, tag);
    Vector y[STREAM_VECTORS], gain[STREAM_VECTORS], bias[STREAM_VECTORS];
    if (HAS_OUTPUT_NORMS) {
      load_columns(gain, norm.gain);
      load_columns(bias, norm.bias);
    }
    float sum = 0.f, squares = 0.f;
    uint4 bits[STREAM_VECTORS];
    receive(bits, exchanged + column(0), 4 * CONSUMERS, exchanged + DIM, tag);
    UNROLL
    for (int i = 0; i < STREAM_VECTORS; i++) {
      if (column(i) >= DIM) continue;
      y[i] = as_vector(bits[i]);
      UNROLL
      for (int j = 0; j < 4; j++) {
        if (PLACEMENT == POST) y[i][j] = fmaf(a.residual_scale, x[i][j], y[i][j]);
        if (!HAS_OUTPUT_NORMS) x[i][j] += y[i][j];
        sum += y[i][j];
        squares = fmaf(y[i][j], y[i][j], squares);
      }
    }
    if (!HAS_OUTPUT_NORMS) return;
    add_moments<NORM>(squares, sum);
    sync_consumers();
    const Moments m = moments<NORM>(eps);
    UNROLL
    for (int i = 0; i < STREAM_VECTORS; i++) {
      if (column(i) >= DIM) continue;
      UNROLL
      for (int j = 0; j < 4; j++) {
        float normed = (y[i][j] - m.mean) * m.inverse_deviation * gain[i][j];
        if (norm.bias) normed += bias[i][j];
        x[i][j] = PLACEMENT == POST ? normed : x[i][j] + normed;
      }
    }
    sync_consumers();  // `moments` may be written again
  }
};
