"""Fast paths: packed weights, CPU and Triton decoding, CUDA graphs; attached from outside."""
