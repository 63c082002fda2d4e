"""Fast paths for the modules of `nn` and `models`, which do not import this package.

`decoding_path` and `training_path` choose the fastest one that supports a model on its device.
"""

from regard.accel import cross_entropy as cross_entropy  # registers the kernels of the loss
from regard.accel.compile import compile_for_training, run_eagerly
from regard.accel.fingerprint import ModelFingerprint
from regard.accel.onednn_matmul import attach_onednn_linear
from regard.accel.select import (
    DecodingPath,
    TrainingPath,
    decoding_path,
    pack,
    training_path,
)
from regard.accel.sparse_attention import attach_window_blocks

__all__ = [
    "DecodingPath",
    "ModelFingerprint",
    "TrainingPath",
    "attach_onednn_linear",
    "attach_window_blocks",
    "compile_for_training",
    "decoding_path",
    "pack",
    "run_eagerly",
    "training_path",
]
