// Runs the kernel that was included before for the emulated device.
#pragma once

static void run_thread() {
  decode_step(*arguments);
  current->ended = true;
  num_ended++;
}

extern "C" const char* run(const Arguments* a, u32 seed) {
  arguments = a;
  return run_blocks(NUM_BLOCKS, SHARED_BYTES, seed);
}
