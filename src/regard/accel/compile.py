"""torch.compile for training, with faster versions of some functions and layers.

`nn` and `models` do not depend on this module. It changes what they run in a compiled step
(monkey-patching), in three ways:

- functions of `nn` with a faster version for compiled graphs are substituted during tracing;
- loops over time steps run eagerly inside a compiled step: unrolled, they would take minutes to
  compile;
- on CUDA, large matmuls are autotuned and large dropout masks drawn by a kernel
  (`accel.inductor_pass`), layers whose bias or activation can be fused into a matmul get a fused
  forward, and attention gets another kernel if it has a mask or bias that torch's fused kernel
  takes as a dense tensor, or a soft cap. Only compiled graphs use these.
"""

from collections.abc import Callable
from functools import cache, partial
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.accel import sparse_attention
from regard.accel.float8 import ATTACHED as FLOAT8_ATTACHED
from regard.accel.float8 import attach_float8
from regard.accel.float8_cross_entropy import ATTACHED as FLOAT8_LOSS_ATTACHED
from regard.accel.float8_cross_entropy import attach_float8_loss
from regard.accel.kernels import can_run_activation_matmul
from regard.accel.matmul import Activation, fused_mlp, is_large_in_graph, qkv_linear
from regard.accel.onednn_matmul import ATTACHED as ONEDNN_ATTACHED
from regard.models.seq2seq import RecurrentEncoderDecoder
from regard.models.soft_window import SoftWindowLM
from regard.nn.attention import Attention, AttentionInputs, split_heads
from regard.nn.block import FeedForward, Stack, gelu_tanh
from regard.nn.head import CRFHead
from regard.nn.norm import LayerNorm, RMSNorm
from regard.nn.position import ALiBi, Position, cos_sin, rotate_complex, rotate_pairs
from regard.nn.recurrent import RecurrentLayer

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


# Up to this width of norms, the compiler's combined kernel for the gradients of input and gain
# (`mix_order_reduction`, torch 2.11 to 2.13) takes at least four rows at a time and runs out of
# registers: two kernels are faster.
NARROW_NORM = 512


def compile_for_training(
    function: Callable[..., T], model: nn.Module, *, float8: bool = False
) -> Callable[..., T]:
    """Compile `function`, which runs `model`, with static shapes; `float8` enables FP8 matmuls.

    The backward pass runs in the calling thread: it is traced there, and other threads do not have
    the autocast dtype, which breaks indexing in bfloat16 (torch 2.11).
    """
    # imports the compiler: two seconds
    from regard.accel.inductor_pass import AutotunedMatmuls, DropoutMasks

    prepare_tracing()
    options: dict[str, Any] = {
        "post_grad_custom_post_pass": AutotunedMatmuls(),
        "joint_custom_post_pass": DropoutMasks(),
    }
    if is_on_gpu(model):
        attach_fused_layers(model)
        if float8:
            attach_float8(model)
            attach_float8_loss(model)
        if _norm_width(model) <= NARROW_NORM:
            options["triton.mix_order_reduction"] = False
    compiled = torch.compile(function, dynamic=False, options=options)

    def call(*args: Any, **kwargs: Any) -> T:
        with torch.autograd.set_multithreading_enabled(False):
            return compiled(*args, **kwargs)

    return call


def is_on_gpu(model: nn.Module) -> bool:
    """Whether a model has parameters on a GPU."""
    return any(parameter.is_cuda for parameter in model.parameters())


def _norm_width(model: nn.Module) -> int:
    """The width of the widest norm; 0 without norms."""
    norms = (module for module in model.modules() if isinstance(module, (LayerNorm, RMSNorm)))
    return max((norm.weight.numel() for norm in norms), default=0)


def run_eagerly(function: Function) -> Function:
    """Exclude a function from tracing if a compiled graph is being traced; else return it as is."""
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


@cache
def prepare_tracing() -> None:
    """Apply `SUBSTITUTES` and `EAGER_METHODS` wherever torch.compile traces, from now on."""
    for function, substitute in SUBSTITUTES.items():
        torch.compiler.substitute_in_graph(function)(substitute)
    for owner, name in EAGER_METHODS:
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))


# Methods that run eagerly inside a compiled step: loops over time steps, and torch's RNN kernels.
EAGER_METHODS = (
    (RecurrentLayer, "_loop_padded"),
    (RecurrentLayer, "_fused"),
    (RecurrentEncoderDecoder, "_decode_stepwise"),
    (SoftWindowLM, "_read"),
    (CRFHead, "_log_partition"),
)


def _gelu_with_sigmoid(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh u) = x sigmoid(2u): inductor's kernel of the right-hand side is faster."""
    return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


def _rotate_without_complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate_complex` with real numbers: inductor has no kernels for complex numbers."""
    return rotate_pairs(x, cos, sin, interleaved=True)


@torch.library.custom_op("regard::cos_sin", mutates_args=())
def _cos_sin_operator(angle: Tensor) -> tuple[Tensor, Tensor]:
    return angle.cos(), angle.sin()


@_cos_sin_operator.register_fake
def _(angle: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(angle), torch.empty_like(angle)


def _opaque_cos_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin as one opaque operator: inductor would recompute them in every layer."""
    cos, sin = _cos_sin_operator(angle)
    return cos, sin


SUBSTITUTES: dict[Callable[..., Any], Callable[..., Any]] = {
    gelu_tanh: _gelu_with_sigmoid,
    rotate_complex: _rotate_without_complex,
    cos_sin: _opaque_cos_sin,
}


def attach_fused_layers(model: nn.Module) -> None:
    """Replace the forward of layers by a fused one, used in compiled graphs only.

    GELU and ReLU and their gradients become epilogues of the matmuls of a feed-forward layer. On
    GPUs other than Hopper this applies to the tanh form of GELU only. The gradients of q, k and v
    are not concatenated if they come directly from the attention kernel, without a rotation or a
    norm between them. Attention skips keys that the mask of a sliding window, of a prefix LM or of
    packed documents excludes (`accel.sparse_attention`). Outside a compiled graph, and for small
    inputs, the original methods run.
    """
    for module in model.modules():
        if _can_fuse_activation(module):
            module.forward = MethodType(_fused_feed_forward, module)
        if isinstance(module, Stack) and type(module.position).rotation is Position.rotation:
            for block in module.layers:
                if block.attention.q_norm is None and block.attention.can_fuse_qkv:
                    block.attention._fused_qkv = MethodType(  # type: ignore[method-assign]
                        _split_gradient_qkv, block.attention
                    )
        if isinstance(module, Stack):
            for block in module.layers:
                if sparse_attention.supports(block.attention, module.position):
                    method = "_fused" if block.attention.score.fused else "_explicit"
                    attend = partial(_sparse_attention, block.attention, module.position)
                    setattr(block.attention, method, attend)


FUSIBLE_ACTIVATIONS: dict[Any, Activation] = {
    F.relu: "relu",
    F.gelu: "gelu",
    gelu_tanh: "gelu_tanh",
}


def _can_fuse_activation(module: nn.Module) -> bool:
    if type(module).forward is not FeedForward.forward:
        return False
    up, down = module.up, module.down
    if not isinstance(up, nn.Linear) or not isinstance(down, nn.Linear):
        return False  # with LoRA
    activation = FUSIBLE_ACTIVATIONS.get(module.activation)
    return activation is not None and (
        activation == "gelu_tanh" or can_run_activation_matmul(up.weight)
    )


def _fused_feed_forward(ffn: FeedForward, x: Tensor) -> Tensor:
    if (ffn.dropout and ffn.training) or not is_large_in_graph(x, ffn.up.weight):
        return FeedForward.forward(ffn, x)
    up, down, activation = ffn.up, ffn.down, FUSIBLE_ACTIVATIONS[ffn.activation]
    return fused_mlp(x, up.weight, up.bias, down.weight, down.bias, activation)


def _split_gradient_qkv(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v by `qkv_linear`, which does not concatenate their gradients."""
    if not is_large_in_graph(x, attention.query.weight):
        return Attention._fused_qkv(attention, x)
    layers = (attention.query, attention.key, attention.value)
    q, k, v = qkv_linear(x, [layer.weight for layer in layers], attention.qkv_bias())
    kv_heads = attention.kv_heads
    return split_heads(q, attention.heads), split_heads(k, kv_heads), split_heads(v, kv_heads)


def _sparse_attention(
    attention: Attention,
    position: Position,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: AttentionInputs,
) -> Tensor:
    in_training_graph = torch.compiler.is_compiling() and attention.training and q.is_cuda
    if in_training_graph and sparse_attention.needs_sparse_attention(
        inputs, attention.score.cap is not None
    ):
        slopes = position.slope if isinstance(position, ALiBi) else None
        return sparse_attention.attend(attention, slopes, q, k, v, inputs)
    original = Attention._fused if attention.score.fused else Attention._explicit
    return original(attention, q, k, v, inputs)


# The methods that fast paths attach to modules; outside a compiled step, each gives the results of
# the original.
ATTACHED = (
    *FLOAT8_ATTACHED,
    *FLOAT8_LOSS_ATTACHED,
    *ONEDNN_ATTACHED,
    _fused_feed_forward,
    _split_gradient_qkv,
    _sparse_attention,
    sparse_attention.attend_in_blocks,
)
