"""Fast paths: packed weights, CPU and Triton decoding, CUDA graphs; attached from outside."""

from regard.accel import cross_entropy as cross_entropy  # registers the CUDA kernel of the loss
