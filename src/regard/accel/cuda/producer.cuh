// The warp that copies weights, keys and values to the ring of stages, in the order of the
// consumers.

struct Producer {
  const Arguments& a;
  const int position, lane;
  Stage stage{1}, oldest{0};  // of those whose bytes are on their way
  int in_flight = 0;

  DEVICE Producer(const Arguments& a, int position)
      : a(a), position(position), lane(thread_index() % 32) {}

  DEVICE void wait_for_oldest() {
    wait(&shared().full[oldest.index], oldest.parity);
    oldest.advance();
  }

  // The address of a free stage, in which `bytes` will arrive. At most `limit` stages are on their
  // way at a time: more are not copied faster, and everything that blocks exchange waits behind
  // them.
  DEVICE char* start(u32 bytes, int limit) {
    if (lane == 0) {
      if (in_flight == limit) {
        wait_for_oldest();
      } else {
        in_flight++;
      }
      wait(&shared().empty[stage.index], stage.parity);
      expect_bytes(&shared().full[stage.index], bytes);
    }
    sync_warp();
    return stage_data(stage);
  }

  // Copies `count` rows of a weight, in tiles of segments: those from `begin` on, without `skipped`
  // rows before the one with index `gap`.
  template <class M>
  DEVICE void copy_rows(const Linear& linear, int begin, int count, int gap, int skipped,
                        int limit = LAYER_IN_FLIGHT) {
    NO_UNROLL
    for (int first = 0; first < count; first += M::TILE_ROWS) {
      const int tile_rows = min_of(M::TILE_ROWS, count - first);
      const bool contiguous = first >= gap || first + tile_rows <= gap;
      const i64 row = begin + first + lane + (first + lane >= gap ? skipped : 0);
      const char *from = linear.weight + row * M::ROW_BYTES,
                 *scale = (const char*)linear.scale + row * M::SCALE_BYTES;
      NO_UNROLL
      for (int segment = 0; segment < M::SEGMENTS; segment++) {
        const int bytes = min_of(M::SEGMENT_BYTES, M::ROW_BYTES - segment * M::SEGMENT_BYTES);
        const int scale_bytes = M::BITS == 4 ? bytes / 16 : 0;
        char* data = start(tile_rows * (bytes + scale_bytes), limit);
        u64* full = &shared().full[stage.index];
        char* scales = data + M::SCALES_AT;
        if (M::SEGMENTS == 1 && contiguous) {
          if (lane == 0) {
            copy_bulk_once(data, from, tile_rows * bytes, full);
            if (M::BITS == 4) copy_bulk_once(scales, scale, tile_rows * scale_bytes, full);
          }
        } else if (lane < tile_rows) {
          copy_bulk_once(data + lane * M::SEGMENT_BYTES, from, bytes, full);
          if (M::BITS == 4)
            copy_bulk_once(scales + lane * M::SEGMENT_SCALE_BYTES, scale, scale_bytes, full);
        }
        from += M::SEGMENT_BYTES;
        scale += M::SEGMENT_SCALE_BYTES;
        stage.advance();
      }
    }
  }

  template <class M>
  DEVICE void copy_rows(const Linear& linear, const Rows& rows, int limit = LAYER_IN_FLIGHT) {
    copy_rows<M>(linear, rows.begin, rows.count, rows.count, 0, limit);
  }

  // The rows of the gate, then those of the up layer.
  DEVICE void copy_gate_up(const Linear& linear) {
    const Rows rows = hidden_rows();
    copy_rows<FromStream>(linear, rows.begin, (1 + GATED) * rows.count, rows.count,
                          FFN - rows.count);
  }

  DEVICE void copy_cache(int layer, const HeadSplit& split) {
    i64 begin = (i64)split.head * a.capacity + split.first;
    const u16 *keys = a.keys[layer] + begin * HEAD_DIM,
              *values = a.values[layer] + begin * HEAD_DIM;
    NO_UNROLL
    for (int key = 0; key < split.cached; key += STAGE_KEYS) {
      u32 bytes = min_of(STAGE_KEYS, split.cached - key) * HEAD_DIM * 2;
      char* data = start(2 * bytes, IN_FLIGHT);
      u64* full = &shared().full[stage.index];
      if (lane == 0) {
        copy_bulk(data, keys + key * HEAD_DIM, bytes, full);
        copy_bulk(data + STAGE_KEYS * HEAD_DIM * 2, values + key * HEAD_DIM, bytes, full);
      }
      stage.advance();
    }
    // weights, whose limit may be lower, come next
    if (LAYER_IN_FLIGHT == IN_FLIGHT || lane != 0) return;
    for (; in_flight > LAYER_IN_FLIGHT; in_flight--) wait_for_oldest();
  }

  // Copies the description of a layer.
  DEVICE void fetch_layer(int index) {
    if (index >= LAYERS || lane != 0) return;
    const int slot = index % LAYER_SLOTS;
    wait(&shared().layer_empty[slot], 1 ^ index / LAYER_SLOTS & 1);
    expect_bytes(&shared().layer_full[slot], sizeof(Layer));
    copy_bulk(&shared().layers[slot], a.layers + index, sizeof(Layer), &shared().layer_full[slot]);
  }

  DEVICE void run() {
    KeySplits splits(position, NO_WINDOW);
    fetch_layer(0);
    NO_UNROLL
    for (int i = 0; i < LAYERS; i++) {
      fetch_layer(i + 1);
      const Layer& layer = shared().layers[i % LAYER_SLOTS];
      wait(&shared().layer_full[i % LAYER_SLOTS], i / LAYER_SLOTS & 1);
      copy_rows<FromStream>(layer.qkv, Rows(QKV_WIDTH));
      if (IS_PARALLEL) copy_gate_up(layer.gate_up);
      if (layer.window != splits.window) splits = KeySplits(position, layer.window);
      copy_cache(i, HeadSplit(splits));
      copy_rows<Out>(layer.out, Rows(DIM));
      if (!IS_PARALLEL) copy_gate_up(layer.gate_up);
      copy_rows<Down>(layer.down, Rows(DIM));
    }
    if (HAS_HEAD) copy_rows<Head>(a.head, Rows(VOCAB), IN_FLIGHT);
  }
};
