"""A decode step of one row as one CUDA kernel that runs all layers (`cuda/decode_step.cu`)."""

import ctypes
import math
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.accel.description import NORM_NAMES
from regard.accel.nvrtc import CudaKernel, CudaKernelError, compile_cuda
from regard.accel.packed import FusedNormLinear
from regard.accel.support import GPUProperties
from regard.models.plan import PERSISTENT_SMALL_LAYER_BYTES
from regard.nn.state import TransformerState

if TYPE_CHECKING:
    from regard.accel.triton_decoder import TritonDecoder, TritonLayer

# constants that were chosen by measurements on an H200
SIZES = {
    "WARPS": 8,  # of each block, which multiply
    "STAGE_BYTES": 1 << 15,  # of weights that are copied to shared memory at once
    "IN_FLIGHT": 3,  # stages that are copied at the same time
    "LAYER_BYTES_IN_FLIGHT": 3 << 15,  # bytes of a layer's weights, copied at the same time
    "SPLIT_KEYS": 128,  # keys of a split of attention
    "DIRECT_SPLITS": 4,  # splits of attention up to which every block combines them itself
}
OTHER_WARPS = 4  # a warp group: one of them copies, the others only release their registers
INT4_STAGE_BYTES = 36 << 10  # of int4 weights and their scales
# A small layer takes as long as its exchange of activations, which copies of weights slow down.
SMALL_LAYER_BYTES_IN_FLIGHT = 24 << 10
LINEARS = ("qkv", "out", "gate_up", "down")  # of a layer
SOURCES = files("regard.accel").joinpath("cuda")
# of this folder, in this order
FILES = [
    "layout.cuh",
    "producer.cuh",
    "multiply.cuh",
    "consumer.cuh",
    "attention.cuh",
    "decode_step.cu",
]
NO_WINDOW = (1 << 31) - 1  # a length that no sequence has
ALIGNMENT = 16  # bytes, of what bulk copies read
KINDS = """
enum { NO_NORM, RMS_NORM, LAYER_NORM };
enum { PRE, PARALLEL, PARALLEL_NORMS, SANDWICH, POST };
enum { BFLOAT16, FLOAT16 };
enum { NONE, RELU, RELU2, GELU, GELU_TANH, SILU };
"""
NORMS = {None: "NO_NORM", "rms": "RMS_NORM", "rms_plus_one": "RMS_NORM", "layer": "LAYER_NORM"}
DTYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}


class _Linear(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("weight", "scale", "bias", "mean_weight"))


class _OutputNorm(ctypes.Structure):
    _fields_ = (("gain", ctypes.c_void_p), ("bias", ctypes.c_void_p))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Linear) for name in LINEARS),
        *((name, ctypes.c_void_p) for name in ("gain", "ffn_gain")),
        ("output_norm", _OutputNorm * 2),
        *((name, ctypes.c_void_p) for name in ("q_gain", "k_gain")),
        *((name, ctypes.c_float) for name in ("eps", "ffn_eps")),
        ("output_eps", ctypes.c_float * 2),
        ("qk_eps", ctypes.c_float),
        ("window", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("gain_scale", "ffn_gain_scale")),
    )


@cache
def _arguments_type(layers: int) -> type[ctypes.Structure]:
    """The arguments of the kernel, as a structure of C."""
    pointers = ("head_gain", "x", "out", "exchange", "tags", "finished", "length", "cos", "sin")
    of_heads = ("partner", "frequency_index", "signs", "slopes")
    numbers = ("head_eps", "head_gain_scale", "score_scale", "score_cap", "residual_scale")

    class Arguments(ctypes.Structure):
        _fields_ = (
            ("layers", ctypes.c_void_p),
            ("head", _Linear),
            *((name, ctypes.c_void_p) for name in (*pointers, *of_heads)),
            *((name, ctypes.c_float) for name in numbers),
            *((name, ctypes.c_int32) for name in ("num_frequencies", "capacity")),
            *((name, ctypes.c_void_p * layers) for name in ("keys", "values")),
        )

    return Arguments


class PersistentStep:
    """Runs all layers of a decoder, and its head, for the next id of one row.

    `support.persistent_unsupported_reason` must return None for the model. Two steps must not run
    at the same time, as on two streams: the blocks exchange values through one buffer.
    """

    def __init__(
        self,
        decoder: "TritonDecoder",
        num_blocks: int,
        shared_bytes: int,
        make_kernel: Callable[[str], Any],
        **sizes: int,
    ) -> None:
        self.tensors: list[Tensor] = []  # converted ones, whose addresses are in `arguments`
        self.num_blocks, self.dtype = num_blocks, decoder.model.embed.token.weight.dtype
        self.has_head = not decoder.head_needs_preparation
        self.outputs = len(decoder.head.weight) if self.has_head else decoder.model.config.dim
        sizes = SIZES | self._sizes_of_layer(decoder.triton_layers[0]) | sizes
        self.threads = 32 * (sizes["WARPS"] + OTHER_WARPS)
        constants = sizes | self._constants(decoder)
        constants |= {"SHARED_BYTES": shared_bytes, "THREADS": self.threads}
        lines = [f"constexpr int {name} = {value};" for name, value in constants.items()]
        self.kernel = make_kernel("\n".join([KINDS, *lines]))
        self.arguments = _arguments_type(len(decoder.layers))()
        expected_bytes = [ctypes.sizeof(_Layer), ctypes.sizeof(self.arguments)]
        assert self.kernel.read_constants("struct_bytes", 2) == expected_bytes
        (exchange_bytes,) = self.kernel.read_constants("exchange_bytes", 1)
        device = decoder.device
        self.exchange = torch.zeros(exchange_bytes // 4, device=device)
        self.tags = torch.tensor([1, -1, -1], dtype=torch.int32, device=device)
        self.finished = torch.zeros(1, dtype=torch.int32, device=device)
        self._fill(decoder)

    @classmethod
    def on_gpu(cls, decoder: "TritonDecoder", sources: Traversable = SOURCES) -> "PersistentStep":
        """The step on the GPU of the model; a benchmark passes another version of the sources."""
        gpu, device = GPUProperties.of(decoder.device), decoder.device

        def make_kernel(constants: str) -> CudaKernel:
            operations = sources.joinpath("device.cuh").read_text()
            source = constants + kernel_source(operations, sources)
            return _make_kernel(source, device, gpu.shared_bytes)

        with torch.cuda.device(device):
            step = cls(decoder, gpu.multiprocessors, gpu.shared_bytes, make_kernel)
            if step.kernel.max_blocks_per_multiprocessor(step.threads) == 0:
                raise CudaKernelError("the blocks do not fit on the GPU")
        return step

    def __call__(
        self, x: Float[Tensor, "1 dim"], state: TransformerState
    ) -> Float[Tensor, "1 outputs"]:
        """The logits of an embedded id; without a head, the residual stream."""
        x = x.to(self.dtype).contiguous()
        out = torch.empty(1, self.outputs, dtype=torch.float32, device=x.device)
        arguments = type(self.arguments).from_buffer_copy(self.arguments)
        arguments.x, arguments.out = x.data_ptr(), out.data_ptr()
        arguments.length = state.lengths.data_ptr()
        arguments.capacity = state.layers[0].keys.shape[2]
        for index, layer in enumerate(state.layers):
            arguments.keys[index] = layer.keys.data_ptr()
            arguments.values[index] = layer.values.data_ptr()
        with torch.cuda.device_of(x):
            self.kernel.launch(self.num_blocks, self.threads, arguments)
        return out

    @staticmethod
    def _sizes_of_layer(layer: "TritonLayer") -> dict[str, int]:
        """What differs from `SIZES` for layers like this one."""
        sizes, linears = {}, [getattr(layer, name).layer for name in LINEARS]
        if layer.qkv.layer.bits == 4:
            sizes["STAGE_BYTES"] = INT4_STAGE_BYTES
        if sum(linear.weight.nbytes for linear in linears) < PERSISTENT_SMALL_LAYER_BYTES:
            sizes["LAYER_BYTES_IN_FLIGHT"] = SMALL_LAYER_BYTES_IN_FLIGHT
        return sizes

    def _constants(self, decoder: "TritonDecoder") -> dict[str, Any]:
        """What the kernel is compiled for."""
        layer = decoder.triton_layers[0]
        attention, options, config = layer.packed.attention, layer.options, decoder.model.config
        placement = layer.packed.block.norm_placement.kind
        final_norm = decoder.stack.norm
        return {
            "NUM_BLOCKS": self.num_blocks,
            "LAYERS": len(decoder.layers),
            "DIM": config.dim,
            "HEADS": attention.heads,
            "KV_HEADS": attention.kv_heads,
            "HEAD_DIM": attention.head_dim,
            "FFN": layer.packed.ffn.up.out_features,
            "VOCAB": self.outputs if self.has_head else 8,
            "DTYPE": DTYPES[self.dtype],
            "WEIGHT_BITS": layer.packed.qkv.bits,
            "HEAD_BITS": decoder.head.bits,
            "NORM": NORMS[NORM_NAMES[type(layer.packed.block.attention_norm)]],
            "HEAD_NORM": NORMS[None if final_norm is None else NORM_NAMES[type(final_norm)]],
            "PLACEMENT": {"deepnorm": "POST"}.get(placement, placement.upper()),
            "ACTIVATION": layer.activation.name.upper(),
            "GATED": int(layer.activation.gated),
            "QK_NORM": int(options.qk_gains is not None),
            "ROTARY": int(options.rotary is not None),
            "ALIBI": int(options.slopes is not None),
            "HAS_CAP": int(options.cap is not None),
            "HAS_HEAD": int(self.has_head),
            "NO_WINDOW": NO_WINDOW,
        }

    def _fill(self, decoder: "TritonDecoder") -> None:
        """Set the arguments that are the same in every step."""
        arguments, first = self.arguments, decoder.triton_layers[0]
        layers = (_Layer * len(decoder.layers))()
        for target, layer in zip(layers, decoder.triton_layers, strict=True):
            self._fill_layer(target, layer)
        table = torch.frombuffer(bytearray(layers), dtype=torch.uint8).to(decoder.device)
        arguments.layers = self._address(table)
        head = decoder.normed_head
        if self.has_head:
            arguments.head_gain_scale = scale = _gain_scale(head)
            self._fill_linear(arguments.head, head)
            arguments.head_gain, arguments.head_eps = self._address(head.gain, scale), head.eps
        arguments.exchange = self.exchange.data_ptr()
        arguments.tags, arguments.finished = self.tags.data_ptr(), self.finished.data_ptr()
        options = first.options
        if options.rotary is not None:
            pairs, (cos, sin) = options.rotary
            arguments.cos, arguments.sin = self._address(cos), self._address(sin)
            arguments.partner = self._address(pairs.partner)
            arguments.frequency_index = self._address(pairs.column_frequency_index)
            arguments.signs, arguments.num_frequencies = self._address(pairs.signs), cos.shape[1]
        arguments.slopes = self._address(options.slopes)
        arguments.score_scale, arguments.score_cap = options.scale, options.cap or 0.0
        arguments.residual_scale = first.packed.block.norm_placement.residual_scale

    def _fill_layer(self, target: Any, layer: "TritonLayer") -> None:
        for name in LINEARS:
            self._fill_linear(getattr(target, name), getattr(layer, name))
        target.gain_scale, target.ffn_gain_scale = map(_gain_scale, (layer.qkv, layer.gate_up))
        target.gain = self._address(layer.qkv.gain, target.gain_scale)
        target.ffn_gain = self._address(layer.gate_up.gain, target.ffn_gain_scale)
        target.eps, target.ffn_eps = layer.qkv.eps, layer.gate_up.eps
        for number, norm in enumerate(layer.output_norms or ()):
            target.output_norm[number].gain = self._address(norm.gain)
            target.output_norm[number].bias = self._address(norm.bias)
            target.output_eps[number] = norm.eps
        if layer.options.qk_gains is not None:
            target.q_gain, target.k_gain = map(self._address, layer.options.qk_gains)
            target.qk_eps = layer.options.qk_eps
        window = layer.options.window
        target.window = NO_WINDOW if window is None else window

    def _fill_linear(self, target: Any, linear: FusedNormLinear) -> None:
        weight = linear.layer.weight
        if linear.layer.scale is None and weight.dtype != self.dtype:
            raise CudaKernelError(f"a weight is {weight.dtype}, the embedding {self.dtype}")
        if weight.data_ptr() % ALIGNMENT or not weight.is_contiguous():
            raise CudaKernelError(
                f"a weight is not contiguous, or not aligned to {ALIGNMENT} bytes"
            )
        target.weight, target.scale = weight.data_ptr(), self._address(linear.layer.scale)
        target.bias, target.mean_weight = map(self._address, (linear.bias, linear.mean_weight))

    def _address(self, tensor: Tensor | None, scale: float = 1.0) -> int | None:
        """The address of a tensor of integers, or of floats in float32, divided by a scale."""
        if tensor is None:
            return None
        tensor = tensor.detach()
        if tensor.is_floating_point():
            tensor = tensor.float() if scale == 1.0 else tensor.float() / scale
        self.tensors.append(tensor.contiguous())
        return self.tensors[-1].data_ptr()


def kernel_source(operations: str, sources: Traversable = SOURCES) -> str:
    """The text of the kernel behind its constants, with the operations of a device."""
    return "\n".join([operations, *(sources.joinpath(name).read_text() for name in FILES)])


def _gain_scale(linear: FusedNormLinear) -> float:
    """The power of two by which the gain of a norm is divided, so that no element exceeds 1.

    A norm's input times its gain could be infinite in float16.
    """
    if linear.gain is None:
        return 1.0
    largest = float(linear.gain.abs().max())
    return 2.0 ** math.ceil(math.log2(largest)) if 0 < largest < math.inf else 1.0


@cache
def _make_kernel(source: str, device: torch.device, shared_bytes: int) -> CudaKernel:
    binary = compile_cuda(source, ("--use_fast_math",), device)
    return CudaKernel(binary, "decode_step", shared_bytes=shared_bytes)
