"""Parameters, FLOPs and memory of a model, estimated on the meta device: nothing is allocated."""

from dataclasses import dataclass

from torch import nn

from regard.models.build import build_on_meta
from regard.models.cost.activations import activation_bytes
from regard.models.cost.flops import decode_flops, forward_flops
from regard.models.cost.parts import BFLOAT16_BYTES, FLOAT32_BYTES, decoder_stack, stacks
from regard.models.cost.state_memory import state_size
from regard.models.presets import ModelConfig
from regard.nn.block import Block
from regard.nn.head import LMHead
from regard.nn.hook_point import HookPoint

ADAMW_MOMENTS = 2  # AdamW's moments per parameter
BACKWARD_FLOPS_RATIO = 2  # FLOPs of backward relative to forward: dL/dx and dL/dW


@dataclass(frozen=True, slots=True)
class Cost:
    r"""Parameters, FLOPs and memory of a model for one row of T tokens, T the context.

    Bytes are for float32 unless stated otherwise; a multiply-add is two FLOPs. A source is assumed
    to be as long as its target. d is the width of the model, h the number of heads, d_h their
    width, k the number of KV heads.

        forward FLOPs     = 2 N + 4 A T h d_h    per token: N weights of matmuls, A attention layers
        training FLOPs    = 3 forward            backward takes twice the FLOPs of forward
        decoding FLOPs    = forward of one token that attends to T positions, its own included;
                            the source is already encoded
        KV cache          = 2 A k d_h            values per token
        training memory   = 4 + 4 + 8            bytes per parameter: weights, gradients, moments

    A sliding window of w < T replaces T. A causal mask does not halve the FLOPs, as in Chowdhery
    et al. 2022. A layer with shared weights counts every time it runs; an embedding lookup
    counts as 0.

    Activations are the tensors that autograd saves for T tokens, without dropout, as eager torch
    does on a CPU. Values per token:

        norm            d + 2, RMSNorm 2 d + 1, and d for its output
        attention       2 h d_h + 2 k d_h + h;  with RoPE (2 h + k) d_h more
        feed-forward    2 f;  ReLU f, gated 4 f;  f its width

    Values per token that grow with T: T for the mask of a sliding window, h T for the biases of T5,
    2 h T to 4 h T for scores without a fused kernel, h d_h T more for the additive score.
    Every layer also saves the concatenated matrix of queries, keys and values once. The loss saves
    d more, never the logits.
    With activation checkpointing only the input of each layer is saved, and one layer in full.

    Mixed precision, compiled, saves less: in bfloat16 the inputs of each matmul and of the
    attention kernel, in float32 the residual stream before each norm; the rest is recomputed.
    Bytes per token:

        norm            4 d + 8, and 2 d for its output
        attention       4 h d_h + 4 k d_h + 4 h
        feed-forward    4 f, gated 6 f
    """

    parts: dict[str, int]  # parameters of each part
    parameters: int
    context: int | None
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int  # AdamW's moments, always float32
    training_bytes: int  # weights, gradients and moments
    mixed_training_bytes: int  # the same, with a bfloat16 copy of the weights of matmuls
    activation_bytes: int
    checkpointed_bytes: int  # activations with activation checkpointing
    mixed_activation_bytes: int  # in bfloat16, compiled
    mixed_checkpointed_bytes: int
    logits_per_token: int  # in the loss, which computes them in chunks; 0 without a vocabulary
    attention_layers: int  # cross-attention counts as one; 0 without a Transformer
    qk_norms: int  # layers with norms of queries and keys
    branch_norms: int  # norms that follow a branch, of its output or of the sum with it
    biased_layers: int  # layers with a bias, in a linear layer or a norm
    parallel_layers: int  # layers whose attention and feed-forward network run in parallel
    layer_parameters: int  # of the largest layer
    non_layer_parameters: int  # outside the layers: embeddings, head, final norm
    decoder_layer_weights: list[int]  # of linear layers, in each layer; empty unless decoder-only
    decoder_weights: int  # the same in all layers, shared ones counted once
    state_bytes_per_token: int  # of the KV cache; 0 for a state of fixed size
    state_bytes: int  # of a row of the whole context, keys and values of the source included
    window_bytes: int  # the part of `state_bytes` that sliding windows still attend to
    flops_per_token: int
    training_flops_per_token: int
    decode_flops_per_token: int
    hook_points: list[str]


def cost(config: ModelConfig) -> Cost:
    """Estimate the parameters, FLOPs and memory of a model."""
    model = build_on_meta(config)
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = _part(name)
        parts[part] = parts.get(part, 0) + parameter.numel()
    parameters = sum(parts.values())
    context: int | None = getattr(config, "context", None)
    time = context or 1
    forward = forward_flops(model, time)
    state = state_size(model, time)
    full, checkpointed = activation_bytes(model, time, mixed=False)
    mixed, mixed_checkpointed = activation_bytes(model, time, mixed=True)
    layers = {
        id(block): sum(weight.numel() for weight in block.parameters())
        for stack in stacks(model)
        for block in stack.layers
    }
    head = getattr(model, "head", None)
    training = training_bytes(parameters)
    return Cost(
        parts=parts,
        parameters=parameters,
        context=context,
        weight_bytes=FLOAT32_BYTES * parameters,
        gradient_bytes=FLOAT32_BYTES * parameters,
        optimizer_bytes=ADAMW_MOMENTS * FLOAT32_BYTES * parameters,
        training_bytes=training,
        mixed_training_bytes=training + BFLOAT16_BYTES * _matmul_weights(model),
        activation_bytes=full,
        checkpointed_bytes=checkpointed,
        mixed_activation_bytes=mixed,
        mixed_checkpointed_bytes=mixed_checkpointed,
        logits_per_token=len(head.matrix) if isinstance(head, LMHead) else 0,
        attention_layers=sum(
            1 + (block.cross is not None) for stack in stacks(model) for block in stack.layers
        ),
        qk_norms=sum(
            block.attention.q_norm is not None for stack in stacks(model) for block in stack.layers
        ),
        branch_norms=sum(_branch_norms(block) for stack in stacks(model) for block in stack.layers),
        biased_layers=sum(
            any("bias" in name for name, _ in block.named_parameters())
            for stack in stacks(model)
            for block in stack.layers
        ),
        parallel_layers=sum(
            block.norm_placement.parallel for stack in stacks(model) for block in stack.layers
        ),
        layer_parameters=max(layers.values(), default=0),
        non_layer_parameters=parameters - sum(layers.values()),
        decoder_layer_weights=[linear_weights(block) for block in _decoder_layers(model)],
        decoder_weights=sum(linear_weights(block) for block in {*_decoder_layers(model)}),
        state_bytes_per_token=FLOAT32_BYTES * state.per_token,
        state_bytes=FLOAT32_BYTES * state.full,
        window_bytes=FLOAT32_BYTES * state.in_window,
        flops_per_token=forward,
        training_flops_per_token=(1 + BACKWARD_FLOPS_RATIO) * forward,
        decode_flops_per_token=decode_flops(model, time),
        hook_points=[
            name for name, module in model.named_modules() if isinstance(module, HookPoint)
        ],
    )


def _branch_norms(block: Block) -> int:
    """The number of norms that follow a branch of a block."""
    norms = [block.attention_post_norm, block.ffn_post_norm]
    if block.norm_placement.kind in ("post", "deepnorm"):
        norms += [block.attention_norm, block.ffn_norm]
    return sum(norm is not None for norm in norms)


def _decoder_layers(model: nn.Module) -> list[Block]:
    """The layers of a decoder-only language model, else none.

    A prefix LM is not one: it reads its prompt bidirectionally.
    """
    decoder, prefix = decoder_stack(model), getattr(getattr(model, "config", None), "prefix", False)
    if decoder is None or stacks(model) != [decoder] or prefix:
        return []
    return decoder.layers


def linear_weights(block: Block) -> int:
    """The weights of the linear layers of a block."""
    return sum(layer.weight.numel() for layer in block.modules() if isinstance(layer, nn.Linear))


def training_bytes(parameters: int, *, ema: bool = False) -> int:
    """Bytes of float32 weights, gradients and AdamW's moments, and of the EMA of the weights."""
    return (2 + ADAMW_MOMENTS + ema) * FLOAT32_BYTES * parameters


def _matmul_weights(model: nn.Module) -> int:
    """The number of weights in matmuls, with the output matrix, without embedding tables."""
    sizes = {
        id(module.weight): module.weight.numel()
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d)
    }
    head = getattr(model, "head", None)
    if isinstance(head, LMHead):
        sizes[id(head.matrix)] = head.matrix.numel()
    return sum(sizes.values())


def _part(name: str) -> str:
    """The part of the model that a parameter of this name belongs to."""
    path = name.split(".")
    if any("norm" in module for module in path):
        return "norms"
    parts = {
        "cross": "cross-attention",
        "attention": "attention",
        "ffn": "feed-forward",
        "position": "position",
        "relative_embedding": "position",  # of DeBERTa
        "head": "head",
        "project": "embedding",
    }
    for module in path:
        if module in parts:
            return parts[module]
    return "embedding" if "embed" in path[0] else path[0]
