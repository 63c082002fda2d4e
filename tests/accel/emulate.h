// Runs the kernel that was included before for the emulated device.
#pragma once

static const Arguments* arguments;

static void run_thread() {
  decode_step(*arguments);
  current->ended = true;
  let_others_run();
}

static void check_copies() {
  int in_flight = 0;
  for (int i = 0; i < STAGES; i++) in_flight += missing_bytes(shared().full[i]) > 0;
  if (in_flight > IN_FLIGHT) fail("more stages than IN_FLIGHT are copied at a time");
}

extern "C" const char* run(const Arguments* a, u32 seed) {
  arguments = a;
  return run_blocks(NUM_BLOCKS, SHARED_BYTES, seed);
}

extern "C" float apply_activation(float x) { return activate(x); }
