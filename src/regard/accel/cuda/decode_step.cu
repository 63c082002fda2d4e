// A decode step of a Transformer decoder for one row, as one kernel that stays on the GPU.
//
// A matrix-vector product takes as long as its weights take to read. With a kernel for each of
// them, nothing is read while one kernel ends, the next begins, and activations are exchanged. Here
// one block per multiprocessor runs all layers. Its producer thread copies the block's rows of all
// weights, in the order in which they are needed, to a ring of stages in shared memory, and waits
// for nothing but a free stage. Its consumer warps multiply, and exchange activations with the
// other blocks. So weights are also read while the consumers wait for each other.
//
// Every block computes some outputs of each linear layer and needs all outputs of the previous one.
// They are exchanged through global memory without barriers: the lowest bit of each float32 is a
// tag, which alternates from layer to layer. A reader repeats its loads until all tags are those of
// its layer. Every exchanged value has an address of its own, which is written once in every layer:
// few addresses, which stay in the L2 cache. A block writes for the next layer only when it has the
// outputs of this one, so after all blocks have read what they need.
//
// Every block holds the whole residual stream in registers, four columns per thread, and adds the
// output of each branch to it. Attention of a KV head is split over several blocks, which read
// different keys (Flash-Decoding).
//
// The files of this folder are compiled as one text, this one last (accel/persistent_step.py).

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
// Loads N vectors at `p + i * stride`, without those that are not before `end`, as soon as they
// have this layer's tag.
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
  const int position, thread, warp, lane;
  u32 tag;  // of the current layer
  Stage stage{0};
  int buffer = 0;  // of `partial`
  KeySplits splits;
  Vector x[STREAM_VECTORS];  // the residual stream: columns 4 (thread + i CONSUMERS) to + 3

  DEVICE Consumer(const Arguments& a, u32 tag, int position)
      : a(a),
        position(position),
        thread(thread_index()),
        warp(thread / 32),
        lane(thread % 32),
        tag(tag),
        splits(position, NO_WINDOW) {}

  DEVICE int column(int i) const { return 4 * (thread + i * CONSUMERS); }

  // ---- linear layers

  template <class M>
  DEVICE void multiply_into(int buffer, const u16* input, int rows) {
    multiply<M>(input, rows, shared().partial[buffer], stage);
  }

  DEVICE float product(int row, int buffer) const {
    float sums[4] = {};
    UNROLL
    for (int w = 0; w < WARPS; w++) sums[w % 4] += shared().partial[buffer][w][row];
    return sums[0] + sums[1] + (sums[2] + sums[3]);
  }

  // What is needed to complete an output, loaded before the product is there.
  struct Output {
    float scale = 1.f, bias = 0.f, mean_weight = 0.f;
    DEVICE Output() {}
    DEVICE Output(const Linear& linear, int bits, int row) {
      if (bits == 8) scale = ((const float*)linear.scale)[row] / INT8_UNIT;
      if (linear.bias) bias = linear.bias[row];
      if (linear.mean_weight) mean_weight = linear.mean_weight[row];
    }
    DEVICE float complete(float product, const Moments& m) const {
      return fmaf(-m.mean, mean_weight, product * scale) * m.inverse_deviation + bias;
    }
  };

  // ---- inputs of linear layers

  // Mean and standard deviation of the columns of all threads, from the sums of `add_moments`.
  template <int KIND>
  DEVICE Moments moments(float eps) const {
    if (KIND == NO_NORM) return {0.f, 1.f};
    float sums[2] = {};
    UNROLL
    for (int k = 0; k < (KIND == LAYER_NORM ? 2 : 1); k++) UNROLL
    for (int w = 0; w < WARPS; w++) sums[k] += shared().moments[k][w];
    float mean = sums[1] / DIM;
    return {mean, rsqrtf(sums[0] / DIM - mean * mean + eps)};
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
      if (KIND != NO_NORM) UNROLL
      for (int j = 0; j < 4; j++) {
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

  DEVICE void load_gain(Vector (&gain)[STREAM_VECTORS], const float* from) const {
    UNROLL
    for (int i = 0; i < STREAM_VECTORS; i++)
      if (from && column(i) < DIM) gain[i] = load_vector(from + column(i));
  }

  // Writes zeros after the end of an input, where its last segment has fewer units.
  template <class M>
  DEVICE void write_padding(u16* input) const {
    UNROLL
    for (int part = 0; part < M::PARTS; part++)
      for (int i = M::COLUMNS + 8 * thread; i < M::INPUT_COLUMNS; i += 8 * CONSUMERS)
        *(uint4*)(input + part * M::SECOND_AT + i) = {0, 0, 0, 0};
  }

  // Writes the attention's output as an input. A barrier must follow.
  DEVICE void write_attention(u16* input, const float* exchanged) {
    constexpr int N = ceil_div(Q_WIDTH / 4, CONSUMERS);
    uint4 v[N];
    receive(v, exchanged + ATTENTION_AT + column(0), 4 * CONSUMERS,
            exchanged + ATTENTION_AT + Q_WIDTH, tag);
    UNROLL
    for (int i = 0; i < N; i++)
      if (column(i) < Q_WIDTH) store_input<Out>(input, column(i), as_vector(v[i]));
    write_padding<Out>(input);
  }

  // Writes the hidden vector of the feed-forward network as an input. A barrier must follow.
  DEVICE void write_hidden(u16* input, const float* exchanged) {
    constexpr int N = ceil_div(FFN / 8, CONSUMERS);
    uint4 v[N];
    receive(v, exchanged + HIDDEN_AT + column(0), 4 * CONSUMERS, exchanged + HIDDEN_AT + FFN / 2,
            tag);
    UNROLL
    for (int i = 0; i < N; i++) {
      v[i].x &= ~1u, v[i].y &= ~1u, v[i].z &= ~1u, v[i].w &= ~1u;  // without the tag
      if (2 * column(i) < FFN) store_input<Down>(input, 2 * column(i), v[i]);
    }
    write_padding<Down>(input);
  }

  // Adds the output of a branch to the residual stream.
  DEVICE void add_branch(const float* exchanged, const OutputNorm& norm, float eps) {
    Vector y[STREAM_VECTORS], gain[STREAM_VECTORS], bias[STREAM_VECTORS];
    if (HAS_OUTPUT_NORMS) {
      load_gain(gain, norm.gain);
      load_gain(bias, norm.bias);
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

  // ---- attention

  // Receives q, k and v of the unit's KV head, normalizes and rotates them, and rounds them.
  DEVICE void prepare_heads(const Layer& layer, const Unit& unit, const float* qkv) {
    NO_UNROLL
    for (int row = warp; row < GROUP + 2; row += WARPS) {
      const bool is_query = row < GROUP, is_value = row == GROUP + 1;
      const float* from =
          qkv + (is_query ? (unit.head * GROUP + row) * HEAD_DIM
                          : Q_WIDTH + (row - GROUP) * KV_WIDTH + unit.head * HEAD_DIM);
      u16* to = is_query   ? shared().queries + row * HEAD_DIM
                : is_value ? shared().new_value
                           : shared().new_key;
      Vector gain[HEAD_VECTORS], v[HEAD_VECTORS];
      UNROLL
      for (int i = 0; i < HEAD_VECTORS; i++) {
        int first = 4 * (lane + 32 * i);
        if (QK_NORM && !is_value && first < HEAD_DIM)
          gain[i] = load_vector((is_query ? layer.q_gain : layer.k_gain) + first);
      }
      uint4 bits[HEAD_VECTORS];
      receive(bits, from + 4 * lane, 128, from + HEAD_DIM, tag);
      float squares = 0.f;
      UNROLL
      for (int i = 0; i < HEAD_VECTORS; i++) {
        if (4 * (lane + 32 * i) >= HEAD_DIM) continue;
        v[i] = as_vector(bits[i]);
        UNROLL
        for (int j = 0; j < 4; j++) squares = fmaf(v[i][j], v[i][j], squares);
      }
      if (QK_NORM && !is_value) {
        for (int offset = 16; offset; offset /= 2) squares += shuffle_xor(squares, offset);
        float inverse_rms = rsqrtf(squares / HEAD_DIM + layer.qk_eps);
        UNROLL
        for (int i = 0; i < HEAD_VECTORS; i++) UNROLL
        for (int j = 0; j < 4; j++) v[i][j] *= inverse_rms * gain[i][j];
      }
      if (ROTARY && !is_value) {
        float* rotated = shared().rotated + row * HEAD_DIM;
        UNROLL
        for (int i = 0; i < HEAD_VECTORS; i++) {
          int first = 4 * (lane + 32 * i);
          if (first < HEAD_DIM) store_vector(rotated + first, v[i]);
        }
        sync_warp();
        UNROLL
        for (int i = 0; i < HEAD_VECTORS; i++) {
          int first = 4 * (lane + 32 * i);
          if (first >= HEAD_DIM) continue;
          UNROLL
          for (int j = 0; j < 4; j++) {
            float partner = rotated[shared().partner[first + j]];
            v[i][j] = fmaf(v[i][j], shared().cos[first + j], partner * shared().sin[first + j]);
          }
        }
      }
      UNROLL
      for (int i = 0; i < HEAD_VECTORS; i++) {
        int first = 4 * (lane + 32 * i);
        if (first >= HEAD_DIM) continue;
        *(uint2*)(to + first) = {pack_pair<IS_BFLOAT16>(v[i][0], v[i][1]),
                                 pack_pair<IS_BFLOAT16>(v[i][2], v[i][3])};
      }
    }
  }

  // Stores the new key and value in the KV cache.
  DEVICE void store_new_key(int layer, const Unit& unit) const {
    constexpr int CHUNKS = HEAD_DIM / 8;
    if (thread >= 2 * CHUNKS) return;
    const bool is_key = thread < CHUNKS;
    const int chunk = is_key ? thread : thread - CHUNKS;
    u16* to =
        (is_key ? a.keys : a.values)[layer] + ((i64)unit.head * a.capacity + position) * HEAD_DIM;
    ((uint4*)to)[chunk] = ((const uint4*)(is_key ? shared().new_key : shared().new_value))[chunk];
  }

  // The scores of `count` keys, the last of which is the new one if `has_new_key`: 16 keys per warp
  // and matrix product, times 8 queries.
  DEVICE void score(const Unit& unit, const char* keys, int count, bool has_new_key, int first) {
    const int g = lane / 4, t = lane % 4;
    NO_UNROLL
    for (int tile = 16 * warp; tile < count; tile += 16 * WARPS) {
      const char* rows[2];
      UNROLL
      for (int i = 0; i < 2; i++) {
        int key = min_of(tile + g + 8 * i, count - 1);
        bool is_new = has_new_key && key == count - 1;
        rows[i] = is_new ? (const char*)shared().new_key : keys + key * HEAD_DIM * 2;
      }
      float scores[QUERY_TILES][4] = {};
      UNROLL
      for (int chunk = t; chunk - t < HEAD_DIM / 8; chunk += 4) {
        uint4 k0 = {0, 0, 0, 0}, k1 = k0;
        if (chunk < HEAD_DIM / 8) {
          k0 = ((const uint4*)rows[0])[chunk];
          k1 = ((const uint4*)rows[1])[chunk];
        }
        UNROLL
        for (int n = 0; n < QUERY_TILES; n++) {
          uint4 q = {0, 0, 0, 0};
          if (chunk < HEAD_DIM / 8)
            q = ((const uint4*)(shared().queries + (8 * n + g) * HEAD_DIM))[chunk];
          multiply_tiles<IS_BFLOAT16>(scores[n], k0.x, k1.x, k0.y, k1.y, q.x, q.y);
          multiply_tiles<IS_BFLOAT16>(scores[n], k0.z, k1.z, k0.w, k1.w, q.z, q.w);
        }
      }
      UNROLL
      for (int n = 0; n < QUERY_TILES; n++) UNROLL
      for (int i = 0; i < 2; i++) {
        const int query = 8 * n + 2 * t + i;
        float maximum = -1e30f;
        UNROLL
        for (int j = 0; j < 2; j++) {
          const int key = tile + g + 8 * j;
          if (key >= count || query >= GROUP) continue;
          float score = scores[n][2 * j + i] * a.score_scale;
          if (HAS_CAP) score = a.score_cap * (2.f * sigmoid(2.f * score / a.score_cap) - 1.f);
          if (ALIBI) score = fmaf(-shared().slope[query], (float)(position - first - key), score);
          score *= LOG2_E;
          shared().scores[query][key] = score;
          maximum = fmaxf(maximum, score);
        }
        UNROLL
        for (int offset = 4; offset < 32; offset *= 2)
          maximum = fmaxf(maximum, shuffle_xor(maximum, offset));
        if (g == 0 && query < GROUP) shared().maxima[tile / 16][query] = maximum;
      }
    }
  }

  // The largest score of a query in a stage of keys.
  DEVICE float stage_maximum(int query, int count) const {
    float maximum = -1e30f;
    UNROLL
    for (int tile = 0; tile < KEY_TILES; tile++)
      if (16 * tile < count) maximum = fmaxf(maximum, shared().maxima[tile][query]);
    return maximum;
  }

  // Attention of the unit's queries over its keys, a stage of keys at a time. A warp computes the
  // scores of 16 keys, then the sums of 8 columns of the values: of lane 4 g + t, those of queries
  // g and g + 8 in columns 2 t and 2 t + 1.
  DEVICE void attend(const Layer& layer, int index, const Unit& unit, float* exchanged) {
    prepare_heads(layer, unit, exchanged + QKV_AT);
    sync_consumers();
    const int g = lane / 4, t = lane % 4, keys = unit.cached + unit.has_new_key;
    const u32 one = pack_pair<IS_BFLOAT16>(1.f, 1.f);
    float sums[COLUMN_TILES][4] = {}, totals[4] = {}, maximum[2] = {-1e30f, -1e30f};
    NO_UNROLL
    for (int first = 0; first < keys; first += STAGE_KEYS) {
      const int cached = min_of(STAGE_KEYS, unit.cached - first);
      const int count = min_of(STAGE_KEYS, keys - first);
      const char *data = stage_data(stage), *values = data + STAGE_KEYS * HEAD_DIM * 2;
      if (cached) wait(&shared().full[stage.index], stage.parity);
      score(unit, data, count, count > cached, unit.first + first);
      sync_consumers();
      NO_UNROLL
      for (int i = thread; i < 16 * ceil_div(count, 16) * GROUP; i += CONSUMERS) {
        const int query = i % GROUP, key = i / GROUP;
        float largest = stage_maximum(query, count), weight = 0.f;
        if (first) largest = fmaxf(largest, shared().maximum[query]);
        if (key < count) weight = exp2f(shared().scores[query][key] - largest);
        shared().weights[query][key] = (u16)pack_pair<IS_BFLOAT16>(weight, 0.f);
      }
      sync_consumers();
      UNROLL
      for (int i = 0; i < QUERY_TILES; i++) {
        const int query = g + 8 * i;
        if (query >= GROUP) continue;
        const float largest = fmaxf(maximum[i], stage_maximum(query, count));
        const float rescale = exp2f(maximum[i] - largest);
        maximum[i] = largest;
        if (warp == 0 && t == 0) shared().maximum[query] = largest;  // for the next stage
        UNROLL
        for (int j = 0; j < 2; j++) {
          totals[2 * i + j] *= rescale;
          UNROLL
          for (int n = 0; n < COLUMN_TILES; n++) sums[n][2 * i + j] *= rescale;
        }
      }
      NO_UNROLL
      for (int tile = 0; tile < count; tile += 16) {
        u32 a[4] = {};
        UNROLL
        for (int i = 0; i < 2; i++) UNROLL
        for (int j = 0; j < QUERY_TILES; j++)
          a[2 * i + j] = *(const u32*)&shared().weights[g + 8 * j][tile + 2 * t + 8 * i];
        multiply_tiles<IS_BFLOAT16>(totals, a[0], a[1], a[2], a[3], one, one);
        UNROLL
        for (int n = 0; n < COLUMN_TILES; n++) {
          const int column = 8 * (warp + n * WARPS) + g;
          if (column - g >= HEAD_DIM) continue;
          u32 b[2] = {};
          UNROLL
          for (int i = 0; i < 4; i++) {
            const int key = tile + 2 * t + i % 2 + i / 2 * 8;
            const u16* row = (const u16*)values + key * HEAD_DIM;
            if (key >= cached) row = shared().new_value;
            if (key < count) b[i / 2] |= (u32)row[column] << 16 * (i % 2);
          }
          multiply_tiles<IS_BFLOAT16>(sums[n], a[0], a[1], a[2], a[3], b[0], b[1]);
        }
      }
      if (cached) {
        sync_warp();
        if (lane == 0) arrive(&shared().empty[stage.index]);
        stage.advance();
      }
      if (first + STAGE_KEYS < keys) sync_consumers();  // scores and weights are written again
    }
    UNROLL
    for (int i = 0; i < QUERY_TILES; i++) {
      if (g + 8 * i >= GROUP) continue;
      const int head = unit.head * GROUP + g + 8 * i;
      float* to =
          exchanged + (splits.splits == 1 ? ATTENTION_AT : PARTIAL_AT + unit.split * Q_WIDTH);
      const float total = totals[2 * i];  // a split may have no keys
      UNROLL
      for (int n = 0; n < COLUMN_TILES; n++) {
        const int column = 8 * (warp + n * WARPS) + 2 * t;
        if (column >= HEAD_DIM) continue;
        UNROLL
        for (int j = 0; j < 2; j++)
          send(to + head * HEAD_DIM + column + j, total > 0.f ? sums[n][2 * i + j] / total : 0.f,
               tag);
      }
      if (splits.splits > 1 && warp == 0 && t == 0)
        send(exchanged + LOG_SUM_AT + head * LOG_SUMS + unit.split,
             total > 0.f ? maximum[i] + log2f(total) : -1e30f, tag);
    }
    if (unit.has_new_key) store_new_key(index, unit);
  }

  // Combines the splits of some columns of the unit's KV head, and sends them: a vector of four
  // columns of one split per lane.
  DEVICE void combine(const Unit& unit, float* exchanged) {
    constexpr int VECTORS = GROUP * HEAD_DIM / 4;
    const int count = splits.splits, begin = VECTORS * unit.split / count;
    const int pairs = (VECTORS * (unit.split + 1) / count - begin) * count;
    NO_UNROLL
    for (int base = warp * 32; base < pairs; base += CONSUMERS) {
      const int pair = min_of(base + lane, pairs - 1), split = pair % count;
      const int column = unit.head * GROUP * HEAD_DIM + 4 * (begin + pair / count);
      const float* from = exchanged + PARTIAL_AT + split * Q_WIDTH + column;
      const float* log_sum_at = exchanged + LOG_SUM_AT + column / HEAD_DIM * LOG_SUMS + split;
      u32 log_sum;
      uint4 part;
      do {
        log_sum = load_exchanged(log_sum_at);
        part = load_exchanged4(from);
      } while ((log_sum ^ tag) & 1 || lacks_tag(part, tag));
      const Vector v = as_vector(part);
      log_sum &= ~1u;
      float maximum = as_float(log_sum);
      NO_UNROLL
      for (int offset = 1; offset < count; offset *= 2)
        maximum = fmaxf(maximum, shuffle_xor(maximum, offset));
      const float weight = exp2f(as_float(log_sum) - maximum);
      float sums[5] = {weight * v[0], weight * v[1], weight * v[2], weight * v[3], weight};
      NO_UNROLL
      for (int offset = 1; offset < count; offset *= 2) UNROLL
      for (int i = 0; i < 5; i++) sums[i] += shuffle_xor(sums[i], offset);
      if (base + lane < pairs) UNROLL
      for (int i = 0; i < 4; i++)
        if (i % count == split) send(exchanged + ATTENTION_AT + column + i, sums[i] / sums[4], tag);
    }
  }

  // Sends zeros to the addresses of the unit that this layer does not use, so that all tags
  // alternate.
  DEVICE void send_unused(const Unit& unit, float* exchanged) const {
    if (unit.split >= MAX_SPLITS || unit.active && splits.splits > 1) return;
    const int first = unit.head * GROUP * HEAD_DIM;
    for (int i = thread; i < GROUP * HEAD_DIM; i += CONSUMERS)
      send(exchanged + PARTIAL_AT + unit.split * Q_WIDTH + first + i, 0.f, tag);
    if (thread < GROUP)
      send(exchanged + LOG_SUM_AT + (unit.head * GROUP + thread) * LOG_SUMS + unit.split, 0.f, tag);
  }

  // ---- the step

  DEVICE void project_qkv(const Layer& layer, float* exchanged) {
    Rows rows(QKV_WIDTH);
    Output output;
    if (thread < rows.count) output = Output(layer.qkv, BITS, rows.begin + thread);
    multiply_into<Qkv>(buffer, shared().input, rows.count);
    sync_consumers();
    if (thread < rows.count) {
      const Moments m = moments<INPUT_NORM>(layer.eps);
      send(exchanged + QKV_AT + rows.begin + thread, output.complete(product(thread, buffer), m),
           tag);
    }
    buffer ^= 1;
  }

  DEVICE void project_gate_up(const Layer& layer, const u16* input, float* exchanged, float eps) {
    const Rows rows = hidden_rows();
    Output output, up;
    const int row = rows.begin + thread;
    if (thread < rows.count) {
      output = Output(layer.gate_up, BITS, row);
      if (GATED) up = Output(layer.gate_up, BITS, FFN + row);
    }
    multiply_into<GateUp>(buffer, input, rows.count);
    if (GATED) {
      if (IS_PARALLEL) sync_consumers();  // the other buffer may still be read
      multiply_into<GateUp>(buffer ^ 1, input, rows.count);
    }
    sync_consumers();
    if (thread < ceil_div(rows.count, 32) * 32) {  // whole warps
      const Moments m = moments<INPUT_NORM>(eps);
      float hidden = activate(output.complete(product(thread, buffer), m));
      if (GATED) hidden *= up.complete(product(thread, buffer ^ 1), m);
      const float next = shuffle_xor(hidden, 1);
      if (thread % 2 == 0 && thread < rows.count)
        send(exchanged + HIDDEN_AT + row / 2, pack_pair<IS_BFLOAT16>(hidden, next), tag);
    }
    if (!GATED) buffer ^= 1;
  }

  template <class M>
  DEVICE void project_branch(const Linear& linear, const u16* input, float* to) {
    Rows rows(DIM);
    Output output;
    if (thread < rows.count) output = Output(linear, BITS, rows.begin + thread);
    multiply_into<M>(buffer, input, rows.count);
    sync_consumers();
    if (thread < rows.count)
      send(to + rows.begin + thread, output.complete(product(thread, buffer), {0.f, 1.f}), tag);
    buffer ^= 1;
  }

  // Output projection and down layer of parallel branches: their sum.
  DEVICE void project_both_branches(const Layer& layer, float* exchanged) {
    Rows rows(DIM);
    Output output, down;
    if (thread < rows.count) {
      output = Output(layer.out, BITS, rows.begin + thread);
      down = Output(layer.down, BITS, rows.begin + thread);
    }
    multiply_into<Out>(buffer, shared().input, rows.count);
    multiply_into<Down>(buffer ^ 1, shared().second_input, rows.count);
    sync_consumers();
    if (thread < rows.count) {
      float sum = output.complete(product(thread, buffer), {0.f, 1.f});
      sum += down.complete(product(thread, buffer ^ 1), {0.f, 1.f});
      send(exchanged + FFN_AT + rows.begin + thread, sum, tag);
    }
    sync_consumers();  // both buffers may be written again
  }

  // The description of a layer, in shared memory from its start to that of the next layer.
  DEVICE const Layer& layer_at(int index) const { return shared().layers[index % LAYER_SLOTS]; }

  DEVICE void run_layer(int index) {
    wait(&shared().layer_full[index % LAYER_SLOTS], index / LAYER_SLOTS & 1);
    const Layer& layer = layer_at(index);
    float* exchanged = a.exchange;
    Vector gain[STREAM_VECTORS];
    load_gain(gain, layer.gain);
    if (layer.window != splits.window) splits = KeySplits(position, layer.window);
    const Unit unit(splits);
    if (index > 0) {
      const Layer& previous = layer_at(index - 1);
      add_branch(exchanged + FFN_AT, previous.output_norm[1], previous.output_eps[1]);
      tag ^= 1;
      sync_warp();
      if (lane == 0) arrive(&shared().layer_empty[(index - 1) % LAYER_SLOTS]);
    }
    if (PLACEMENT == PARALLEL_NORMS) {
      Vector ffn_gain[STREAM_VECTORS];
      load_gain(ffn_gain, layer.ffn_gain);
      UNROLL
      for (int i = 0; i < STREAM_VECTORS; i++) {
        Vector v = x[i];
        UNROLL
        for (int j = 0; j < 4; j++) v[j] *= ffn_gain[i][j];
        if (column(i) < DIM) store_input<GateUp>(shared().second_input, column(i), v);
      }
      write_padding<GateUp>(shared().second_input);
    }
    write_stream<Qkv, INPUT_NORM>(shared().input, gain);
    project_qkv(layer, exchanged);
    if (IS_PARALLEL) {
      const u16* input = PLACEMENT == PARALLEL ? shared().input : shared().second_input;
      project_gate_up(layer, input, exchanged, layer.eps);
    }
    if (unit.active) {
      attend(layer, index, unit, exchanged);
      if (splits.splits > 1) combine(unit, exchanged);
    }
    send_unused(unit, exchanged);
    if (IS_PARALLEL) write_hidden(shared().second_input, exchanged);
    write_attention(shared().input, exchanged);
    sync_consumers();
    if (IS_PARALLEL) return project_both_branches(layer, exchanged);
    project_branch<Out>(layer.out, shared().input, exchanged + BRANCH_AT);
    load_gain(gain, layer.ffn_gain);
    add_branch(exchanged + BRANCH_AT, layer.output_norm[0], layer.output_eps[0]);
    write_stream<GateUp, INPUT_NORM>(shared().input, gain);
    project_gate_up(layer, shared().input, exchanged, layer.ffn_eps);
    write_hidden(shared().input, exchanged);
    sync_consumers();
    project_branch<Down>(layer.down, shared().input, exchanged + FFN_AT);
  }

  DEVICE void run_head() {
    Vector gain[STREAM_VECTORS];
    load_gain(gain, a.head_gain);
    const Layer& last = layer_at(LAYERS - 1);
    add_branch(a.exchange + FFN_AT, last.output_norm[1], last.output_eps[1]);
    if (!HAS_HEAD) {
      UNROLL
      for (int i = 0; i < STREAM_VECTORS; i++)
        if (block_index() == 0 && column(i) < DIM) store_vector(a.out + column(i), x[i]);
      return;
    }
    write_stream<Head, HEAD_NORM>(shared().input, gain);
    const Moments m = moments<HEAD_NORM>(a.head_eps);
    Rows rows(VOCAB);
    for (int first = 0; first < rows.count; first += BATCH_ROWS, buffer ^= 1) {
      const int count = min_of(BATCH_ROWS, rows.count - first);
      multiply_into<Head>(buffer, shared().input, count);
      sync_consumers();
      for (int row = thread; row < count; row += CONSUMERS) {
        int output = rows.begin + first + row;
        a.out[output] = Output(a.head, HEAD_BITS, output).complete(product(row, buffer), m);
      }
    }
  }

  DEVICE void run() {
    UNROLL
    for (int i = 0; i < STREAM_VECTORS; i++) UNROLL
    for (int j = 0; j < 4; j++) x[i][j] = column(i) < DIM ? to_float(a.x[column(i) + j]) : 0.f;
    if (ROTARY)
      for (int d = thread; d < HEAD_DIM; d += CONSUMERS) {
        int index = a.frequency_index[d];
        i64 at = (i64)position * a.num_frequencies + index;
        shared().cos[d] = index < 0 ? 1.f : a.cos[at];
        shared().sin[d] = index < 0 ? 0.f : a.signs[d] * a.sin[at];
        shared().partner[d] = a.partner[d];
      }
    for (int i = GROUP * HEAD_DIM + thread; i < QUERY_TILES * 8 * HEAD_DIM; i += CONSUMERS)
      shared().queries[i] = 0;  // rows of the last tile without a query
    if (ALIBI && thread < GROUP)
      shared().slope[thread] = a.slopes[block_index() % KV_HEADS * GROUP + thread];
    NO_UNROLL
    for (int i = 0; i < LAYERS; i++) run_layer(i);
    run_head();
  }
};

KERNEL decode_step(KERNEL_ARGUMENT Arguments a) {
  if (thread_index() == 0) {
    for (int i = 0; i < STAGES; i++) {
      init_barrier(&shared().full[i], 1);
      init_barrier(&shared().empty[i], WARPS);
    }
    for (int i = 0; i < LAYER_SLOTS; i++) {
      init_barrier(&shared().layer_full[i], 1);
      init_barrier(&shared().layer_empty[i], WARPS);
    }
    publish_barriers();
  }
  for (int i = thread_index(); i < STAGES * STAGE_PITCH / 16; i += CONSUMERS + 32)
    ((uint4*)(shared_memory() + RING_AT))[i] = {0, 0, 0, 0};  // finite, see `multiply`
  publish_stores();
  const u32 layers = a.counters[0];
  const int position = (int)a.length[0];
  sync_block();
  if (thread_index() >= CONSUMERS) {
    Producer(a, position).run();
  } else {
    Consumer(a, layers & 1, position).run();
    sync_consumers();
    if (thread_index() == 0 && add_one(a.counters + 1) == NUM_BLOCKS - 1) {
      a.counters[0] = layers + LAYERS;
      a.counters[1] = 0;
    }
  }
}
