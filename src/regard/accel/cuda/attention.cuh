// Attention of one KV head over a part of its keys, with the queries of all heads that share it.

struct Attention : Consumer {
  using Consumer::Consumer;

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
        for (int i = 0; i < HEAD_VECTORS; i++) {
          UNROLL
          for (int j = 0; j < 4; j++) v[i][j] *= inverse_rms * gain[i][j];
        }
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
      for (int n = 0; n < QUERY_TILES; n++) {
        UNROLL
        for (int i = 0; i < 2; i++) {
          const int query = 8 * n + 2 * t + i;
          float maximum = -1e30f;
          UNROLL
          for (int j = 0; j < 2; j++) {
            const int key = tile + g + 8 * j, distance = position - first - key;
            if (key >= count || query >= GROUP) continue;
            float score = scores[n][2 * j + i] * a.score_scale;
            if (HAS_CAP) score = a.score_cap * (2.f * sigmoid(2.f * score / a.score_cap) - 1.f);
            if (ALIBI) score = fmaf(-shared().slope[query], (float)distance, score);
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
        for (int j = 0; j < QUERY_TILES; j++) {
          const u16* weights = &shared().weights[g + 8 * j][tile + 2 * t];
          a[j] = *(const u32*)weights;
          a[2 + j] = *(const u32*)(weights + 8);
        }
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
      for (int offset = 1; offset < count; offset *= 2) {
        UNROLL
        for (int i = 0; i < 5; i++) sums[i] += shuffle_xor(sums[i], offset);
      }
      UNROLL
      for (int i = 0; i < 4; i++)
        if (base + lane < pairs && i % count == split)
          send(exchanged + ATTENTION_AT + column + i, sums[i] / sums[4], tag);
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
};
