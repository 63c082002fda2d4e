"""GGUF files for llama.cpp and Ollama: tensors with llama.cpp's names and layouts, and settings.

The input is an exported Hugging Face folder, whose names and layouts llama.cpp's documentation
refers to. `gguf_tokenizer` writes the vocabulary.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from regard.errors import CheckpointError, ConfigError
from regard.files.safetensors import TensorReader, read_header
from regard.files.untrusted import quote, read_json
from regard.hub.chat_template_file import read_chat_template
from regard.hub.config_json import write_config
from regard.hub.gguf_q4_k import quantize_q4_k
from regard.hub.gguf_tokenizer import write_vocabulary
from regard.hub.model_type import ConfigDict
from regard.text import Tokenizer

TYPES = {"f32": "F32", "f16": "F16", "q8_0": "Q8_0", "q4_k": "Q4_K"}  # of weight matrices
FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0", "q4_k": "MOSTLY_Q4_K_S"}
# The largest error of a weight, as a fraction of the largest weight of its tensor.
ERROR_BOUNDS = {"F32": 0.0, "F16": 2**-10, "Q8_0": 1 / 127, "Q4_K": 0.1}
SILU, GELU = ("silu", "swish"), ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
# Layer counts by which llama.cpp recognizes the 27B models; it divides their scores by
# sqrt(dim / heads) instead of sqrt(head_dim).
LAYERS_27B = {"gemma2": 46, "gemma3_text": 62}
FLOAT32_TENSORS = ("position_embd", "token_types")  # prefixes of matrices that are never quantized
NOT_Q4_K = "the embedding, the output matrix, and those whose width is not a multiple of 256"

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of llama.cpp, and how to check and convert a Hugging Face model for it."""

    name: str
    activations: tuple[str, ...]
    eps_key: str = "rms_norm_eps"  # the setting of config.json with the epsilon of the norms
    check: Callable[[ConfigDict], None] = lambda hf: None  # raises for unsupported settings
    transform: Callable[[str, Array, ConfigDict], Array] = lambda name, weight, hf: weight
    ignored: tuple[str, ...] = ()  # prefixes of tensors that llama.cpp has no names for


def _check_window(hf: ConfigDict) -> None:
    kinds = hf.get("layer_types") or ["sliding_attention"]
    has_window = hf.get("use_sliding_window", True) and "sliding_attention" in kinds
    if hf.get("sliding_window") and has_window:
        _refuse("model.window", hf["sliding_window"])


def _refuse(
    setting: str, value: object, reason: str = "llama.cpp does not support it for this model"
) -> NoReturn:
    raise ConfigError(f"{setting}={quote(value)} cannot be exported as GGUF: {reason}")


def _check_gemma2_and_3(hf: ConfigDict) -> None:
    _check_gemma(hf)
    every = 2 if hf["model_type"] == "gemma2" else 6
    layers = range(hf["num_hidden_layers"])
    kinds = ["full_attention" if not (i + 1) % every else "sliding_attention" for i in layers]
    if hf["layer_types"] != kinds:
        reason = f"layers {every}, {2 * every}, … must have full attention, and no others"
        _refuse("model.global_every", hf["layer_types"], reason)
    is_27b = hf["num_hidden_layers"] == LAYERS_27B[hf["model_type"]]
    scale_dim = hf["hidden_size"] // hf["num_attention_heads"] if is_27b else hf["head_dim"]
    if hf["query_pre_attn_scalar"] != scale_dim:
        reason = f"for {hf['num_hidden_layers']} layers llama.cpp uses {scale_dim}"
        _refuse("model.score.scale_dim", hf["query_pre_attn_scalar"], reason)
    if hf["model_type"] == "gemma3_text" and hf.get("rope_local_base_freq") != 10_000.0:
        _refuse("model.position.window_base", hf.get("rope_local_base_freq"), "it must be 10000")


def _check_gemma(hf: ConfigDict) -> None:
    if not hf["tie_word_embeddings"]:
        _refuse("model.tied", False, "Gemma's output matrix is its embedding")


def _check_phi(hf: ConfigDict) -> None:
    if hf.get("qk_layernorm"):
        _refuse("model.qk_norm", True)


def _interleave(name: str, weight: Array, hf: ConfigDict) -> Array:
    """Reorder the rows of q and k: llama.cpp's RoPE for LLaMA is interleaved, not half-split."""
    if name.split(".")[-2] not in ("q_proj", "k_proj"):
        return weight
    heads = hf["num_attention_heads"]
    if ".k_proj." in name:
        heads = hf.get("num_key_value_heads") or heads
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _plus_one(name: str, weight: Array, hf: ConfigDict) -> Array:
    return weight + 1 if name.endswith("norm.weight") else weight  # Gemma's norms: 1 + weight


def _transpose(name: str, weight: Array, hf: ConfigDict) -> Array:
    """Transpose the weights of GPT-2's Conv1D layers, which are stored as (in, out)."""
    return weight.T if ".c_" in name and weight.ndim == 2 else weight


ARCHITECTURES: Mapping[str, Architecture] = {  # by model_type
    "llama": Architecture(name="llama", activations=SILU, transform=_interleave),
    "mistral": Architecture(
        name="llama", activations=SILU, transform=_interleave, check=_check_window
    ),
    "qwen2": Architecture(name="qwen2", activations=SILU, check=_check_window),
    "qwen3": Architecture(name="qwen3", activations=SILU, check=_check_window),
    "gemma": Architecture(name="gemma", activations=GELU, transform=_plus_one, check=_check_gemma),
    "gemma2": Architecture(
        name="gemma2", activations=GELU, transform=_plus_one, check=_check_gemma2_and_3
    ),
    "gemma3_text": Architecture(
        name="gemma3", activations=GELU, transform=_plus_one, check=_check_gemma2_and_3
    ),
    "phi": Architecture(name="phi2", activations=GELU, eps_key="layer_norm_eps", check=_check_phi),
    "phi3": Architecture(name="phi3", activations=SILU, check=_check_window),
    "gpt2": Architecture(
        name="gpt2", activations=GELU, eps_key="layer_norm_epsilon", transform=_transpose
    ),
    "bert": Architecture(
        name="bert",
        activations=("gelu",),
        eps_key="layer_norm_eps",
        ignored=("cls.", "pooler.", "bert.pooler.", "classifier.", "qa_outputs."),
    ),
}


def write_gguf(folder: Path, tokenizer: Tokenizer, path: Path, type: str) -> float:
    """Write an exported Hugging Face folder as a GGUF file, and read it again.

    Returns the largest difference of a weight, as a fraction of the largest weight of its tensor.
    """
    hf = read_json(folder / "config.json")
    architecture = architecture_of(hf)
    gguf = import_gguf()
    expected = dict(_tensors(gguf, architecture, hf, folder))
    writer = gguf.GGUFWriter(path, architecture.name)
    _write_settings(writer, gguf, architecture, hf, type)
    size = expected["token_embd.weight"].shape[0]
    write_vocabulary(writer, tokenizer, size, architecture.name)
    if (template := read_chat_template(folder)) is not None:
        writer.add_chat_template(template)
    for name, weight in expected.items():
        kind = _tensor_type(name, weight, TYPES[type])
        quantized = getattr(gguf.GGMLQuantizationType, kind)
        data = quantize_q4_k(weight) if kind == "Q4_K" else gguf.quants.quantize(weight, quantized)
        writer.add_tensor(name, data, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _compare_weights(gguf, path, expected)


def describe_other_types(path: Path, type: str) -> str | None:
    """How many matrices of a file are not of the type `type`, and the reason; None if all are."""
    tensors = import_gguf().GGUFReader(path).tensors
    kinds = Counter(
        tensor.tensor_type.name.lower()
        for tensor in tensors
        if len(tensor.shape) > 1 and not tensor.name.startswith(FLOAT32_TENSORS)
    )
    total = kinds.total()
    if not (others := {kind: count for kind, count in kinds.items() if kind != type}):
        return None
    counts = " and ".join(
        f"{count} of {total} matrices as {kind}" for kind, count in others.items()
    )
    reason = NOT_Q4_K if type == "q4_k" else "their width is not a multiple of 32"
    return f"stored {counts}: {reason}"


def architecture_of(hf: ConfigDict) -> Architecture:
    """The architecture of llama.cpp for a config.json; raises if it does not support the model."""
    kind = hf["model_type"]
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"model_type={kind!r} cannot be exported as GGUF; supported: {known}")
    architecture = ARCHITECTURES[kind]
    activation = (
        hf.get("hidden_act") or hf.get("hidden_activation") or hf.get("activation_function")
    )
    if activation not in architecture.activations:
        only = architecture.activations[0]
        _refuse("model.ffn", activation, f"llama.cpp's {architecture.name} has {only}")
    model_class = str(hf["architectures"][0])
    if architecture.name != "bert" and not model_class.endswith(("ForCausalLM", "LMHeadModel")):
        _refuse("model.head", model_class, "llama.cpp supports causal language models only")
    architecture.check(hf)
    return architecture


def model_type_for_gguf(config: Any, model_type: str | None) -> str:
    """The model type to export a model as: the given one, or the first that llama.cpp supports."""
    for name in ARCHITECTURES if model_type is None else ():
        with contextlib.suppress(ConfigError):
            architecture_of(write_config(config, name)[1])
            return name
    chosen, hf = write_config(config, model_type)
    architecture_of(hf)
    return chosen.name


def import_gguf() -> Any:
    """Import the gguf package; if it is missing, raise an error that says how to install it."""
    try:
        import gguf
    except ImportError:
        raise ConfigError("export --format gguf needs gguf: pip install 'regard[gguf]'") from None
    return gguf


def _tensors(
    gguf: Any, architecture: Architecture, hf: ConfigDict, folder: Path
) -> list[tuple[str, Array]]:
    """The tensors in float32, with the names and layouts of llama.cpp."""
    tensors: dict[str, Array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with TensorReader(read_header(file)) as opened:
            tensors |= {name: opened.read(name).float().numpy() for name in opened.entries}
    layers = hf.get("num_hidden_layers") or hf["n_layer"]
    names = gguf.get_tensor_name_map(_model_arch(gguf, architecture), layers)
    gguf_tensors = []
    tied = hf.get("tie_word_embeddings", True)
    for name, weight in tensors.items():
        if name.startswith(architecture.ignored) or (name == "lm_head.weight" and tied):
            continue
        gguf_name = names.get_name(name.removeprefix("bert."), try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise ConfigError(
                f"the tensor {name} cannot be exported as GGUF: llama.cpp has no name for it"
            )
        gguf_tensors.append(
            (gguf_name, np.ascontiguousarray(architecture.transform(name, weight, hf)))
        )
    if factors := _rope_factors(hf):
        gguf_tensors.append(("rope_freqs.weight", np.array(factors, np.float32)))
    return gguf_tensors


def _model_arch(gguf: Any, architecture: Architecture) -> Any:
    """The `MODEL_ARCH` of the gguf package."""
    return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)


def _tensor_type(name: str, weight: Array, kind: str) -> str:
    """The type of a tensor: F32 for vectors and position tables, F16 if its width fits no block."""
    if weight.ndim < 2 or name.startswith(FLOAT32_TENSORS):
        return "F32"
    if kind == "Q4_K" and (weight.shape[1] % 256 or name.startswith(("token_embd", "output."))):
        kind = "Q8_0"
    return "F16" if kind == "Q8_0" and weight.shape[1] % 32 else kind


def _write_settings(
    writer: Any, gguf: Any, architecture: Architecture, hf: ConfigDict, type: str
) -> None:
    def first(*keys: str) -> Any:
        return next((hf[key] for key in keys if hf.get(key) is not None), None)

    dim, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head")
    head_dim = first("head_dim") or dim // heads
    writer.add_file_type(getattr(gguf.LlamaFileType, FILE_TYPES[type]))
    writer.add_context_length(first("max_position_embeddings", "n_positions"))
    writer.add_embedding_length(dim)
    writer.add_block_count(first("num_hidden_layers", "n_layer"))
    writer.add_feed_forward_length(first("intermediate_size", "n_inner") or 4 * dim)
    writer.add_head_count(heads)
    writer.add_vocab_size(hf["vocab_size"])
    eps = hf[architecture.eps_key]
    if architecture.eps_key == "rms_norm_eps":
        writer.add_layer_norm_rms_eps(eps)
    else:
        writer.add_layer_norm_eps(eps)
    if architecture.name == "bert":
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        writer.add_token_type_count(hf["type_vocab_size"])
        return
    if architecture.name == "gpt2":
        return
    writer.add_head_count_kv(first("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = _full_attention(hf.get("rope_parameters"))
    writer.add_rope_freq_base(float(first("rope_theta") or rope.get("rope_theta", 10_000.0)))
    rotary_factor = first("partial_rotary_factor") or rope.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(rotary_factor * head_dim))
    scaling = _rope_scaling(hf)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(scaling["factor"]))
    elif kind not in ("default", "llama3"):
        _refuse("model.position.scaling", kind, "only linear and llama3 are supported")
    if architecture.name in ("gemma2", "gemma3"):
        writer.add_sliding_window(hf["sliding_window"])
    for key, setting, add in (
        ("attn_logit_softcapping", "model.score.cap", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", "model.head.cap", writer.add_final_logit_softcapping),
    ):
        cap = hf.get(key)
        if architecture.name == "gemma2":
            if not cap:
                _refuse(setting, cap, "llama.cpp always soft-caps the scores and logits of Gemma 2")
            add(float(cap))
        elif cap:  # llama.cpp would ignore it
            _refuse(setting, cap)


def _rope_scaling(hf: ConfigDict) -> ConfigDict:
    return _full_attention(hf.get("rope_scaling") or hf.get("rope_parameters"))


def _full_attention(settings: ConfigDict | None) -> ConfigDict:
    """The RoPE settings of layers without a sliding window, if those with one have others."""
    return {} if settings is None else cast(ConfigDict, settings.get("full_attention", settings))


def _rope_factors(hf: ConfigDict) -> list[float]:
    """The divisors of the RoPE frequencies of LLaMA 3.1; empty for other models."""
    scaling = _rope_scaling(hf)
    if scaling.get("rope_type", scaling.get("type")) != "llama3":
        return []
    dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    base = hf.get("rope_theta") or scaling.get("rope_theta", 10_000.0)
    factor, context = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for index in range(0, dim, 2):
        rotations = context / (2 * math.pi * base ** (index / dim))  # within the original context
        smooth = min(1.0, max(0.0, (rotations - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _compare_weights(gguf: Any, path: Path, expected: Mapping[str, Array]) -> float:
    """Read the file again, and return the largest relative difference of a weight."""
    max_difference = 0.0
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    if stored.keys() != expected.keys():
        raise CheckpointError(f"{path} does not hold all tensors; nothing was written")
    for name, weight in expected.items():
        kind = stored[name].tensor_type
        dequantized = gguf.quants.dequantize(stored[name].data, kind).reshape(weight.shape)
        difference = float(np.abs(dequantized - weight).max() / max(1e-30, np.abs(weight).max()))
        if not difference <= ERROR_BOUNDS[kind.name]:
            raise CheckpointError(
                f"{name} differs by {difference:.2g} of its largest weight after it was stored as "
                f"{kind.name}; nothing was written"
            )
        max_difference = max(max_difference, difference)
    return max_difference
