// The warp that copies weights, keys and values to the ring of stages, in the order of the
// consumers.

struct Producer {
  const Arguments& a;
  const int position, lane;
  Stage stage{1}, oldest{0};  // of those whose bytes are on their way
  int in_flight = 0;

  DEVICE Producer(const Arguments& a, int position)
      : a(a), position(position), lane(thread_index() % 32) {}

  // The address of a free stage, in which `bytes` will arrive. Few stages are on their way at a
  // time: more are not copied faster, and everything that blocks exchange waits behind them.
  DEVICE char* start(u32 bytes) {
    if (lane == 0) {
      if (in_flight == IN_FLIGHT) {
        wait(&shared().full[oldest.index], oldest.parity);
        oldest.advance();
      } else {
        in_flight++;
      }
      wait(&shared().empty[stage.index], stage.parity);
      expect_bytes(&shared().full[stage.index], bytes);
    }
    sync_warp();
    return stage_data(stage);
  }

  // Copies rows of a weight, in tiles of segments: `rows` from `weight` on, without the bytes
  // before row `gap`, which are skipped.
  NOINLINE void stream(const char* weight, int rows, int row_bytes, int tile_rows,
                       int segment_bytes, int gap, i64 skipped_bytes) {
    NO_UNROLL
    for (int row = 0; row < rows; row += tile_rows) {
      const int count = min_of(tile_rows, rows - row);
      const bool contiguous = row >= gap || row + count <= gap;
      NO_UNROLL
      for (int begin = 0; begin < row_bytes; begin += segment_bytes) {
        const int bytes = min_of(segment_bytes, row_bytes - begin);
        char* data = start(count * bytes);
        u64* full = &shared().full[stage.index];
        const char* from = weight + (i64)row * row_bytes + begin;
        if (bytes == row_bytes && contiguous) {
          if (row >= gap) from += skipped_bytes;
          if (lane == 0) copy_bulk_once(data, from, count * row_bytes, full);
        } else if (lane < count) {
          from += (i64)lane * row_bytes + (row + lane >= gap ? skipped_bytes : 0);
          copy_bulk_once(data + lane * segment_bytes, from, bytes, full);
        }
        stage.advance();
      }
    }
  }

  template <class M>
  DEVICE void stream(const Linear& linear, const Rows& rows) {
    stream(linear.weight + (i64)rows.begin * M::ROW_BYTES, rows.count, M::ROW_BYTES, M::TILE_ROWS,
           M::SEGMENT_BYTES, rows.count, 0);
  }

  // The rows of the gate, then those of the up layer.
  DEVICE void stream_gate_up(const Linear& linear) {
    const Rows rows = hidden_rows();
    stream(linear.weight + (i64)rows.begin * Stream::ROW_BYTES, (1 + GATED) * rows.count,
           Stream::ROW_BYTES, Stream::TILE_ROWS, Stream::SEGMENT_BYTES, rows.count,
           (i64)(FFN - rows.count) * Stream::ROW_BYTES);
  }

  DEVICE void stream_cache(int layer, const Unit& unit) {
    i64 begin = (i64)unit.head * a.capacity + unit.first;
    const u16 *keys = a.keys[layer] + begin * HEAD_DIM,
              *values = a.values[layer] + begin * HEAD_DIM;
    NO_UNROLL
    for (int key = 0; key < unit.cached; key += STAGE_KEYS) {
      u32 bytes = min_of(STAGE_KEYS, unit.cached - key) * HEAD_DIM * 2;
      char* data = start(2 * bytes);
      u64* full = &shared().full[stage.index];
      if (lane == 0) {
        copy_bulk(data, keys + key * HEAD_DIM, bytes, full);
        copy_bulk(data + STAGE_KEYS * HEAD_DIM * 2, values + key * HEAD_DIM, bytes, full);
      }
      stage.advance();
    }
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
      stream<Stream>(layer.qkv, Rows(QKV_WIDTH));
      if (IS_PARALLEL) stream_gate_up(layer.gate_up);
      if (layer.window != splits.window) splits = KeySplits(position, layer.window);
      stream_cache(i, Unit(splits));
      stream<Out>(layer.out, Rows(DIM));
      if (!IS_PARALLEL) stream_gate_up(layer.gate_up);
      stream<Down>(layer.down, Rows(DIM));
    }
    if (HAS_HEAD) stream<Stream>(a.head, Rows(VOCAB));
  }
};
