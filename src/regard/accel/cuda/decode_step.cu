// A decode step of a Transformer decoder for one row, as one kernel that stays on the GPU.
//
// A matrix-vector product takes as long as its weights take to read. With a kernel for each of
// them, nothing is read while one kernel ends, the next begins, and activations are exchanged. Here
// one block per multiprocessor runs all layers. Its producer warp copies the block's rows of all
// weights, in the order in which they are needed, to a ring of stages in shared memory, and waits
// for nothing but a free stage. Its consumer warps multiply, and exchange activations with the
// other blocks. So weights are also read while the consumers wait for each other.
//
// Every block computes some outputs of each linear layer and needs all outputs of the previous one.
// They are exchanged through global memory without barriers: the lowest bit of each word is a tag,
// which alternates from layer to layer. A reader repeats its loads until all tags are those of its
// layer. Every exchanged value has an address of its split, which is written at most once in a
// layer: few addresses, which stay in the L2 cache. A block writes for the next layer only when it
// has the outputs of this one, to which all blocks have contributed after they had read what they
// need.
//
// Every block holds the whole residual stream in registers, four columns per thread, and adds the
// output of each branch to it. Attention of a KV head is split over several blocks, which read
// different keys (Flash-Decoding).
//
// The files of this folder are compiled as one text, this one last (accel/persistent_step.py).

struct Step : Attention {
  using Attention::Attention;

  DEVICE void project_qkv(const Layer& layer) {
    Rows rows(QKV_WIDTH);
    Output output;
    if (thread < rows.count) output = Output(layer.qkv, rows.begin + thread);
    multiply_into<FromStream>(buffer, shared().input, rows.count);
    sync_consumers();
    if (thread < rows.count) {
      const Moments m = moments<INPUT_NORM>(layer.eps, layer.gain_scale);
      send(a.exchange + QKV_AT + rows.begin + thread, output.complete(total(thread, buffer), m),
           tag);
    }
    buffer ^= 1;
  }

  DEVICE void project_gate_up(const Layer& layer, const u16* input) {
    const Rows rows = hidden_rows();
    Output output, up;
    const int row = rows.begin + thread;
    if (thread < rows.count) {
      output = Output(layer.gate_up, row);
      if (GATED) up = Output(layer.gate_up, FFN + row);
    }
    multiply_into<FromStream>(buffer, input, (1 + GATED) * rows.count);
    sync_consumers();
    if (thread < ceil_div(rows.count, 32) * 32) {  // whole warps
      float hidden = 0.f;
      if (thread < rows.count) {
        const Moments m = moments<INPUT_NORM>(layer.ffn_eps, layer.ffn_gain_scale);
        hidden = activate(output.complete(total(thread, buffer), m));
        if (GATED) hidden *= up.complete(total(rows.count + thread, buffer), m);
      }
      const float next = shuffle_xor(hidden, 1);
      if (thread % 2 == 0 && thread < rows.count)
        send(a.exchange + HIDDEN_AT + row / 2, pack_pair<IS_BFLOAT16>(hidden, next), tag);
    }
    buffer ^= 1;
  }

  template <class M>
  DEVICE void project_branch(const Linear& linear, const u16* input, int at) {
    Rows rows(DIM);
    Output output;
    if (thread < rows.count) output = Output(linear, rows.begin + thread);
    multiply_into<M>(buffer, input, rows.count);
    sync_consumers();
    if (thread < rows.count)
      send(a.exchange + at + rows.begin + thread,
           output.complete(total(thread, buffer), {0.f, 1.f}), tag);
    buffer ^= 1;
  }

  // Output projection and down layer of parallel branches: their sum.
  DEVICE void project_both_branches(const Layer& layer) {
    Rows rows(DIM);
    Output output, down;
    if (thread < rows.count) {
      output = Output(layer.out, rows.begin + thread);
      down = Output(layer.down, rows.begin + thread);
    }
    multiply_into<Out>(buffer, shared().input, rows.count);
    multiply_into<Down>(buffer ^ 1, shared().second_input, rows.count);
    sync_consumers();
    if (thread < rows.count) {
      float sum = output.complete(total(thread, buffer), {0.f, 1.f});
      sum += down.complete(total(thread, buffer ^ 1), {0.f, 1.f});
      send(a.exchange + FFN_AT + rows.begin + thread, sum, tag);
    }
    sync_consumers();  // both buffers may be written again
  }

  // The description of a layer, in shared memory from its start to that of the next layer.
  DEVICE const Layer& layer_at(int index) const { return shared().layers[index % LAYER_SLOTS]; }

  DEVICE void run_layer(int index) {
    wait(&shared().layer_full[index % LAYER_SLOTS], index / LAYER_SLOTS & 1);
    const Layer& layer = layer_at(index);
    Vector gain[STREAM_VECTORS];
    load_columns(gain, layer.gain);
    if (layer.window != splits.window) splits = KeySplits(position, layer.window);
    const HeadSplit split(splits);
    if (index > 0) {
      const Layer& previous = layer_at(index - 1);
      add_branch(FFN_AT, previous.output_norm[1], previous.output_eps[1]);
      tag ^= 1;
      sync_warp();
      if (lane == 0) arrive(&shared().layer_empty[(index - 1) % LAYER_SLOTS]);
    }
    if (PLACEMENT == PARALLEL_NORMS) {
      Vector ffn_gain[STREAM_VECTORS];
      load_columns(ffn_gain, layer.ffn_gain);
      UNROLL
      for (int i = 0; i < STREAM_VECTORS; i++) {
        Vector v = x[i];
        UNROLL
        for (int j = 0; j < 4; j++) v[j] *= ffn_gain[i][j];
        if (column(i) < DIM) store_input<FromStream>(shared().second_input, column(i), v);
      }
      write_padding<FromStream>(shared().second_input);
    }
    write_stream<FromStream, INPUT_NORM>(shared().input, gain);
    project_qkv(layer);
    if (IS_PARALLEL) {
      const u16* input = PLACEMENT == PARALLEL ? shared().input : shared().second_input;
      project_gate_up(layer, input);
    }
    if (split.active) {
      attend(layer, index, split);
      if (!splits.are_direct()) combine(split);
    }
    if (IS_PARALLEL) write_pairs<Down>(shared().second_input, HIDDEN_AT);
    write_attention(shared().input);
    sync_consumers();
    if (IS_PARALLEL) return project_both_branches(layer);
    project_branch<Out>(layer.out, shared().input, BRANCH_AT);
    load_columns(gain, layer.ffn_gain);
    add_branch(BRANCH_AT, layer.output_norm[0], layer.output_eps[0]);
    write_stream<FromStream, INPUT_NORM>(shared().input, gain);
    project_gate_up(layer, shared().input);
    write_pairs<Down>(shared().input, HIDDEN_AT);
    sync_consumers();
    project_branch<Down>(layer.down, shared().input, FFN_AT);
  }

  DEVICE void run_head() {
    Vector gain[STREAM_VECTORS];
    load_columns(gain, a.head_gain);
    const Layer& last = layer_at(LAYERS - 1);
    add_branch(FFN_AT, last.output_norm[1], last.output_eps[1]);
    if (!HAS_HEAD) {
      UNROLL
      for (int i = 0; i < STREAM_VECTORS; i++)
        if (block_index() == 0 && column(i) < DIM) store_vector(a.out + column(i), x[i]);
      return;
    }
    write_stream<Head, HEAD_NORM>(shared().input, gain);
    const Moments m = moments<HEAD_NORM>(a.head_eps, a.head_gain_scale);
    Rows rows(VOCAB);
    for (int first = 0; first < rows.count; first += BATCH_ROWS, buffer ^= 1) {
      const int count = min_of(BATCH_ROWS, rows.count - first);
      multiply_into<Head>(buffer, shared().input, count);
      sync_consumers();
      for (int row = thread; row < count; row += CONSUMERS) {
        int output = rows.begin + first + row;
        a.out[output] = Output(a.head, output, HEAD_BITS).complete(total(row, buffer), m);
      }
    }
  }

  DEVICE void run() {
    UNROLL
    for (int i = 0; i < STREAM_VECTORS; i++) {
      UNROLL
      for (int j = 0; j < 4; j++) x[i][j] = column(i) < DIM ? to_float(a.x[column(i) + j]) : 0.f;
    }
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
    for (int i = 0; i < LAYERS; i++) {
      // otherwise addresses are computed once, before the loop, and kept in registers
      assume_changed(thread), assume_changed(warp), assume_changed(lane);
      run_layer(i);
    }
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
    fence_barriers();
  }
  for (int i = thread_index(); i < STAGES * STAGE_BYTES / 16; i += THREADS)
    ((uint4*)(shared_memory() + RING_AT))[i] = {0, 0, 0, 0};  // finite, see `multiply`
  fence_stores();
  sync_block();
  if (thread_index() >= CONSUMERS) {
    release_registers();  // the consumers need them, or would keep values in local memory
    if (thread_index() < CONSUMERS + 32) Producer(a, (int)a.length[0]).run();
  } else {
    request_registers();
    Step step(a, *a.tags, (int)a.length[0]);
    step.run();
    sync_consumers();
    if (thread_index() == 0 && add_one(a.finished) == NUM_BLOCKS - 1) {
      *a.tags = {step.tag ^ 1, step.tags.attention, step.tags.parts};
      *a.finished = 0;
    }
  }
}
