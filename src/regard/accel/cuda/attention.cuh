// Attention of one KV head over a part of its keys, with the queries of all heads that share it.

struct Attention : Consumer {
  using Consumer::Consumer;

  // Receives q, k and v of its KV head, normalizes and rotates them, and rounds them.
  DEVICE void prepare_heads(const Layer& layer, const HeadSplit& split, const float* qkv) {
    NO_UNROLL
    for (int row = warp; row < GROUP + 2; row += WARPS) {
      const bool is_query = row < GROUP, is_value = row == GROUP + 1;
      const float* from =
          qkv + (is_query ? (split.head * GROUP + row) * HEAD_DIM
                          : Q_WIDTH + (row - GROUP) * KV_WIDTH + split.head * HEAD_DIM);
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
      if (lane == 0) wait_for_tag(from, tag);
      sync_warp();
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
  DEVICE void store_new_key(int layer, const HeadSplit& split) const {
    constexpr int CHUNKS = HEAD_DIM / 8;
    if (thread >= 2 * CHUNKS) return;
    const bool is_key = thread < CHUNKS;
    const int chunk = is_key ? thread : thread - CHUNKS;
    u16* to =
        (is_key ? a.keys : a.values)[layer] + ((i64)split.head * a.capacity + position) * HEAD_DIM;
    ((uint4*)to)[chunk] = ((const uint4*)(is_key ? shared().new_key : shared().new_value))[chunk];
  }

  // What a warp has summed over its keys, in its part of the columns. Lane 4 g + t has queries
  // 8 n + 2 t and the next one (i = 1): the largest score, its part of the sum of the weights
  // relative to this score, and the weighted values. Of column 8 (g / 2) + 2 j + g % 2 of a set of
  // 32, they are `values[n][2 set + j / 2][2 (j % 2) + i]`.
  struct Sums {
    float values[QUERY_TILES][2 * CHUNK_SETS][4], maximum[QUERY_TILES][2], total[QUERY_TILES][2];
  };

  // Eight columns of a row, or zeros after its end.
  DEVICE static uint4 load_chunk(const u16* row, int chunk) {
    return chunk < HEAD_DIM / 8 ? ((const uint4*)row)[chunk] : uint4{0, 0, 0, 0};
  }

  // Adds up to 16 keys and values of a stage, `tile` the first of them. Of the `count` keys of the
  // stage, the last is the new one if `has_new_key`.
  DEVICE void add_keys(Sums& sums, const char* data, int tile, int count, bool has_new_key,
                       int first) {
    const int g = lane / 4, t = lane % 4;
    const u16 *keys = (const u16*)data, *values = keys + STAGE_KEYS * HEAD_DIM;
    const u16 *key_rows[2], *value_rows[2];
    UNROLL
    for (int i = 0; i < 2; i++) {
      const int key = min_of(tile + g + 8 * i, count - 1);
      const bool is_new = has_new_key && key == count - 1;
      key_rows[i] = is_new ? shared().new_key : keys + key * HEAD_DIM;
      value_rows[i] = is_new ? shared().new_value : values + key * HEAD_DIM;
    }
    float scores[2][QUERY_TILES][4] = {};  // two sums, so that products do not wait for each other
    UNROLL
    for (int chunk = t; chunk - t < HEAD_DIM / 8; chunk += 4) {
      const uint4 k0 = load_chunk(key_rows[0], chunk), k1 = load_chunk(key_rows[1], chunk);
      UNROLL
      for (int n = 0; n < QUERY_TILES; n++) {
        const uint4 q = load_chunk(shared().queries + (8 * n + g) * HEAD_DIM, chunk);
        multiply_tiles<IS_BFLOAT16>(scores[0][n], k0.x, k1.x, k0.y, k1.y, q.x, q.y);
        multiply_tiles<IS_BFLOAT16>(scores[1][n], k0.z, k1.z, k0.w, k1.w, q.z, q.w);
      }
    }
    // The columns of the values as rows, before the softmax, on which they do not depend.
    u32 columns[CHUNK_SETS][4][2];
    UNROLL
    for (int set = 0; set < CHUNK_SETS; set++) {
      UNROLL
      for (int j = 0; j < 2; j++) {
        const int chunk = 4 * (warp % COLUMN_PARTS * CHUNK_SETS + set) + t;
        const uint4 v = load_chunk(value_rows[j], chunk);
        const u32 words[4] = {v.x, v.y, v.z, v.w};
        UNROLL
        for (int i = 0; i < 4; i++) columns[set][i][j] = transpose_tile(words[i]);
      }
    }
    u32 weights[QUERY_TILES][2];  // of query 8 n + g and keys 2 t and 2 t + 1, or 8 more
    UNROLL
    for (int n = 0; n < QUERY_TILES; n++) {
      float rescale[2];
      UNROLL
      for (int i = 0; i < 2; i++) {
        const int query = 8 * n + 2 * t + i;
        float maximum = sums.maximum[n][i];
        UNROLL
        for (int j = 0; j < 2; j++) {
          const int key = tile + g + 8 * j;
          float& sum = scores[0][n][2 * j + i];
          float score = (sum + scores[1][n][2 * j + i]) * a.score_scale;
          if (HAS_CAP) score = a.score_cap * (2.f * sigmoid(2.f * score / a.score_cap) - 1.f);
          if (ALIBI && query < GROUP)
            score = fmaf(-shared().slope[query], (float)(position - first - key), score);
          score = key < count ? score * LOG2_E : -1e30f;
          sum = score;
          maximum = fmaxf(maximum, score);
        }
        UNROLL
        for (int offset = 4; offset < 32; offset *= 2)
          maximum = fmaxf(maximum, shuffle_xor(maximum, offset));
        rescale[i] = exp2f(sums.maximum[n][i] - maximum);
        sums.maximum[n][i] = maximum;
        sums.total[n][i] *= rescale[i];
        UNROLL
        for (int j = 0; j < 2; j++) {
          float& score = scores[0][n][2 * j + i];
          score = exp2f(score - maximum);
          sums.total[n][i] += score;
        }
      }
      UNROLL
      for (int j = 0; j < 2; j++)
        weights[n][j] =
            transpose_tile(pack_pair<IS_BFLOAT16>(scores[0][n][2 * j], scores[0][n][2 * j + 1]));
      UNROLL
      for (int c = 0; c < 2 * CHUNK_SETS; c++) {
        UNROLL
        for (int i = 0; i < 4; i++) sums.values[n][c][i] *= rescale[i % 2];
      }
    }
    UNROLL
    for (int set = 0; set < CHUNK_SETS; set++) {
      UNROLL
      for (int i = 0; i < 2; i++) {
        const u32 *low = columns[set][2 * i], *high = columns[set][2 * i + 1];
        UNROLL
        for (int n = 0; n < QUERY_TILES; n++)
          multiply_tiles<IS_BFLOAT16>(sums.values[n][2 * set + i], low[0], high[0], low[1], high[1],
                                      weights[n][0], weights[n][1]);
      }
    }
  }

  // Attention of the queries of its KV head over its keys. Warps take turns at 16 keys, as many of
  // them together as there are parts of the columns.
  DEVICE void attend(const Layer& layer, int index, const HeadSplit& split) {
    prepare_heads(layer, split, a.exchange + QKV_AT);
    sync_consumers();
    const int keys = split.cached + split.has_new_key;
    Sums sums = {};
    UNROLL
    for (int n = 0; n < QUERY_TILES; n++) sums.maximum[n][0] = sums.maximum[n][1] = -1e30f;
    constexpr int TILES_AT_ONCE = WARPS / COLUMN_PARTS;
    int tile_index = warp / COLUMN_PARTS;
    NO_UNROLL
    for (int first = 0; first < keys; first += STAGE_KEYS) {
      const int cached = min_of(STAGE_KEYS, split.cached - first);
      const int count = min_of(STAGE_KEYS, keys - first);
      if (cached) wait(&shared().full[stage.index], stage.parity);
      NO_UNROLL
      for (int tile = 16 * (tile_index % TILES_AT_ONCE); tile < count; tile += 16 * TILES_AT_ONCE)
        add_keys(sums, stage_data(stage), tile, count, count > cached, split.first + first);
      tile_index += KEY_TILES;
      if (cached) {
        sync_warp();
        if (lane == 0) arrive(&shared().empty[stage.index]);
        stage.advance();
      }
    }
    merge(sums, split);
    if (split.has_new_key) store_new_key(index, split);
  }

  // Merges the sums of all warps, and sends attention: the result, or a part of it with its log
  // sum.
  DEVICE void merge(const Sums& sums, const HeadSplit& split) {
    constexpr int MAX_COLUMNS = 2 * BATCH_ROWS;
    constexpr int QUERIES = min_of(GROUP, MAX_COLUMNS / HEAD_DIM);  // merged at once
    constexpr bool HAS_WHOLE_SETS = HEAD_DIM == 32 * CHUNK_SETS * COLUMN_PARTS;
    const int g = lane / 4, t = lane % 4;
    float(*merged)[MAX_COLUMNS] = (float(*)[MAX_COLUMNS])shared().partial_sums;
    UNROLL
    for (int n = 0; n < QUERY_TILES; n++) {
      UNROLL
      for (int i = 0; i < 2; i++) {
        const int query = 8 * n + 2 * t + i;
        float total = sums.total[n][i];
        UNROLL
        for (int offset = 4; offset < 32; offset *= 2) total += shuffle_xor(total, offset);
        if (lane >= 4 || query >= GROUP) continue;
        shared().maximum[warp][query] = sums.maximum[n][i];
        shared().total[warp][query] = total;
      }
    }
    NO_UNROLL
    for (int begin = 0; begin < GROUP; begin += QUERIES) {
      if (begin) sync_consumers();
      const int count = min_of(QUERIES, GROUP - begin);
      UNROLL
      for (int n = 0; n < QUERY_TILES; n++) {
        UNROLL
        for (int i = 0; i < 2; i++) {
          const int query = 8 * n + 2 * t + i - begin;
          if (query < 0 || query >= count) continue;
          UNROLL
          for (int set = 0; set < CHUNK_SETS; set++) {
            const int column = 32 * (warp % COLUMN_PARTS * CHUNK_SETS + set) + g / 2 * 8;
            if (!HAS_WHOLE_SETS && column >= HEAD_DIM) continue;
            // in an order that depends on t: lanes store to different banks
            float* to = merged[warp] + query * HEAD_DIM + column + g % 2;
            UNROLL
            for (int j = 0; j < 4; j++)
              to[2 * (j ^ t)] = sums.values[n][2 * set + j / 2][j % 2 * 2 + i];
          }
        }
      }
      sync_consumers();
      NO_UNROLL
      for (int place = 2 * thread; place < count * HEAD_DIM; place += 2 * CONSUMERS) {
        const int query = begin + place / HEAD_DIM, column = place % HEAD_DIM;
        const int first_warp = column / (32 * CHUNK_SETS), from = place ^ query / 2 % 4 * 2;
        float maximum = -1e30f, total = 0.f, low = 0.f, high = 0.f;
        UNROLL
        for (int i = 0; i < WARPS; i += COLUMN_PARTS)
          maximum = fmaxf(maximum, shared().maximum[first_warp + i][query]);
        UNROLL
        for (int i = 0; i < WARPS; i += COLUMN_PARTS) {
          const int w = first_warp + i;
          const float rescale = exp2f(shared().maximum[w][query] - maximum);
          const float2 v = *(const float2*)(merged[w] + from);
          total = fmaf(rescale, shared().total[w][query], total);
          low = fmaf(rescale, v.x, low);
          high = fmaf(rescale, v.y, high);
        }
        const float scale = total > 0.f ? 1.f / total : 0.f;  // a split may have no keys
        low *= scale, high *= scale;
        const float log_sum = total > 0.f ? maximum + log2f(total) : -1e30f;
        const int head = split.head * GROUP + query, output = head * HEAD_DIM + column;
        if (splits.are_direct()) {
          const u32 tag = tags.attention >> split.index & 1;
          send(a.exchange + ATTENTION_AT + split.index * ATTENTION_WORDS + output / 2,
               pack_pair<IS_BFLOAT16>(low, high), tag);
          if (column == 0) send(a.exchange + LOG_SUM_AT + 4 * head + split.index, log_sum, tag);
        } else {
          const u32 tag = tags.parts >> split.index & 1;
          float* part = a.exchange + PART_AT + split.index * Q_WIDTH + output;
          send(part, low, tag);
          send(part + 1, high, tag);
          if (column == 0)
            send(a.exchange + PART_LOG_SUM_AT + head * LOG_SUMS + split.index, log_sum, tag);
        }
      }
    }
  }

  // Combines the parts of some columns of its KV head, and sends them as those of the only
  // split: a vector of four columns of one split per lane.
  DEVICE void combine(const HeadSplit& split) {
    constexpr int VECTORS = GROUP * HEAD_DIM / 4;
    const int count = splits.count, begin = VECTORS * split.index / count;
    const int pairs = (VECTORS * (split.index + 1) / count - begin) * count;
    NO_UNROLL
    for (int base = warp * 32; base < pairs; base += CONSUMERS) {
      const int pair = min_of(base + lane, pairs - 1), part = pair % count;
      const int column = split.head * GROUP * HEAD_DIM + 4 * (begin + pair / count);
      const int head = column / HEAD_DIM;
      const float* from = a.exchange + PART_AT + part * Q_WIDTH + column;
      const float* log_sum_at = a.exchange + PART_LOG_SUM_AT + head * LOG_SUMS + part;
      const u32 part_tag = tags.parts >> part & 1;
      u32 log_sum;
      uint4 bits;
      do {
        log_sum = load_exchanged(log_sum_at);
        bits = load_exchanged4(from);
      } while ((log_sum ^ part_tag) & 1 || lacks_tag(bits, part_tag));
      const Vector v = as_vector(bits);
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
      if (base + lane >= pairs || part >= 2) continue;
      const float low = part ? sums[2] : sums[0], high = part ? sums[3] : sums[1];
      send(a.exchange + ATTENTION_AT + column / 2 + part,
           pack_pair<IS_BFLOAT16>(low / sums[4], high / sums[4]), tags.attention & 1);
      if (part == 0 && column % HEAD_DIM == 0)
        send(a.exchange + LOG_SUM_AT + 4 * head, 0.f, tags.attention & 1);
    }
  }

  // Writes the attention of all heads as an input, from all splits or from the combined one. A
  // barrier must follow.
  DEVICE void write_attention(u16* input) {
    const int count = splits.are_direct() ? splits.count : 1;
    const float* attention = received(ATTENTION_AT, tags.attention & 1);
    NO_UNROLL
    for (int column = 8 * thread; column < Q_WIDTH; column += 8 * CONSUMERS) {
      uint4 log_sums, parts[DIRECT_SPLITS];
      u32 missing = ~0u;
      do {
        UNROLL
        for (int s = 0; s < DIRECT_SPLITS; s++)
          if (missing >> s & 1 && s < count)
            parts[s] = load_exchanged4(attention + s * ATTENTION_WORDS + column / 2);
        log_sums = load_exchanged4(a.exchange + LOG_SUM_AT + 4 * (column / HEAD_DIM));
        missing = 0;
        const u32 words[4] = {log_sums.x, log_sums.y, log_sums.z, log_sums.w};
        UNROLL
        for (int s = 0; s < DIRECT_SPLITS; s++) {
          const u32 tag = tags.attention >> s & 1;
          if (s < count && (lacks_tag(parts[s], tag) || (words[s] ^ tag) & 1)) missing |= 1 << s;
        }
      } while (missing);
      const Vector log_sum = as_vector(log_sums);
      float maximum = log_sum[0], total = 0.f, sums[8] = {};
      UNROLL
      for (int s = 1; s < DIRECT_SPLITS; s++)
        if (s < count) maximum = fmaxf(maximum, log_sum[s]);
      UNROLL
      for (int s = 0; s < DIRECT_SPLITS; s++) {
        if (s >= count) continue;
        const float weight = exp2f(log_sum[s] - maximum);
        const u32 words[4] = {parts[s].x, parts[s].y, parts[s].z, parts[s].w};
        total += weight;
        UNROLL
        for (int i = 0; i < 4; i++) {
          float low, high;
          unpack(words[i] & ~1u, low, high);
          sums[2 * i] = fmaf(weight, low, sums[2 * i]);
          sums[2 * i + 1] = fmaf(weight, high, sums[2 * i + 1]);
        }
      }
      u32 pairs[4];
      UNROLL
      for (int i = 0; i < 4; i++)
        pairs[i] = pack_pair<IS_BFLOAT16>(sums[2 * i] / total, sums[2 * i + 1] / total);
      store_input<Out>(input, column, uint4{pairs[0], pairs[1], pairs[2], pairs[3]});
    }
    write_padding<Out>(input);
    tags.attention ^= (1u << count) - 1;
    if (!splits.are_direct()) tags.parts ^= (u32)((1ull << splits.count) - 1);
  }
};
