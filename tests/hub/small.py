"""Small random decoders of every family, as `transformers` makes them."""

import torch

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
OPT = {key: value for key, value in SIZES.items() if key != "intermediate_size"} | {"ffn_dim": 40}
NAMED = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0}
LLAMA3 = NAMED | {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 8}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}
GEMMA3 = {"head_dim": 12, "sliding_window": 4, "query_pre_attn_scalar": 6}
GEMMA3 |= {"sliding_window_pattern": 2}

SETTINGS = {  # a name of ours: the family, and what differs from the family's defaults
    "gpt2": (
        "gpt2",
        {
            "vocab_size": 61,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 32,
            "pad_token_id": 0,
        },
    ),
    "gpt_neox": ("gpt_neox", SIZES | {"rotary_pct": 0.5}),
    "gpt_neox-pre": ("gpt_neox", SIZES | {"use_parallel_residual": False, "rotary_pct": 1.0}),
    "opt": ("opt", OPT),
    "gpt_neox-unbiased": ("gpt_neox", SIZES | {"attention_bias": False}),
    "opt-post": ("opt", OPT | {"do_layer_norm_before": False}),
    "opt-350m": ("opt", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 10}),
    "bloom": (
        "bloom",
        {"vocab_size": 61, "hidden_size": 32, "n_layer": 3, "n_head": 4, "pad_token_id": 0},
    ),
    "bloom-odd": (
        "bloom",
        {"vocab_size": 61, "hidden_size": 36, "n_layer": 2, "n_head": 6, "pad_token_id": 0},
    ),
    "llama": ("llama", GROUPED),
    "llama-biased": ("llama", SIZES | {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama-3": ("llama", GROUPED | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": (
        "llama",
        GROUPED | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama-attention-biased": ("llama", GROUPED | {"attention_bias": True}),
    "llama-mlp-biased": ("llama", GROUPED | {"mlp_bias": True}),
    "llama-yarn": ("llama", GROUPED | {"rope_parameters": YARN}),
    "llama-yarn-scaled": (
        "llama",
        GROUPED
        | {
            "rope_parameters": YARN
            | {"beta_fast": 2.0, "beta_slow": 0.5, "mscale": 2.0, "mscale_all_dim": 0.5}
        },
    ),
    "llama-dynamic": (
        "llama",
        GROUPED | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "mistral": ("mistral", GROUPED | {"sliding_window": 4}),
    "mistral-whole": ("mistral", GROUPED | {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("qwen2", GROUPED | {"tie_word_embeddings": True}),
    "qwen2-windowed": (
        "qwen2",
        GROUPED | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    ),
    "qwen3": ("qwen3", GROUPED | {"head_dim": 12}),
    "qwen3-biased": ("qwen3", GROUPED | {"attention_bias": True}),
    "qwen3-layers": (
        "qwen3",
        GROUPED
        | {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma": ("gemma", GROUPED | {"head_dim": 12}),
    "gemma2": (
        "gemma2",
        GROUPED | {"head_dim": 12, "sliding_window": 4, "query_pre_attn_scalar": 6},
    ),
    "gemma2-uncapped": (
        "gemma2",
        GROUPED
        | {
            "head_dim": 12,
            "sliding_window": 4,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3": ("gemma3_text", GROUPED | GEMMA3),
    "gemma3-scaled": (
        "gemma3_text",
        GROUPED
        | GEMMA3
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
            },
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "phi": ("phi", GROUPED | {"partial_rotary_factor": 0.5}),
    "phi-normed": ("phi", SIZES | {"qk_layernorm": True, "partial_rotary_factor": 1.0}),
    "phi3": ("phi3", GROUPED | {"bos_token_id": 1, "eos_token_id": 2}),
    "phi3-long": (
        "phi3",
        GROUPED
        | {
            "eos_token_id": 2,
            "original_max_position_embeddings": 16,
            "rope_parameters": LONGROPE,
        },
    ),
    "phi3-windowed": (
        "phi3",
        GROUPED | {"sliding_window": 4, "eos_token_id": 2, "partial_rotary_factor": 0.75},
    ),
}
STEMS = {
    "gpt2": "GPT2",
    "gpt_neox": "GPTNeoX",
    "opt": "OPT",
    "bloom": "Bloom",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "phi": "Phi",
    "phi3": "Phi3",
}
NAMES = list(SETTINGS)
READERS = [  # classes that write nothing
    (name, f"{STEMS[name]}{kind}")
    for name in STEMS
    for kind in ("Model", "ForSequenceClassification", "ForTokenClassification")
    if name != "gemma3_text" and (kind != "ForTokenClassification" or name != "opt")
]
READERS += [("gemma3", "Gemma3TextModel"), ("gemma3", "Gemma3TextForSequenceClassification")]


def writer(name):
    """The class of a family that writes tokens."""
    stem = STEMS[SETTINGS[name][0]]
    return "GPT2LMHeadModel" if stem == "GPT2" else f"{stem}ForCausalLM"


def small(name, architecture=None, seed=0):
    """A model of `transformers` in which no two tensors are alike, norms and biases included."""
    import transformers

    family, settings = SETTINGS[name]
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **settings)
    model = getattr(transformers, architecture or writer(name))(config).eval()
    with torch.no_grad():
        for part, values in model.named_parameters():
            norm = part.endswith("weight") and ("norm" in part.lower() or "ln_" in part)
            values.normal_(1.0 if norm and "gemma" not in name else 0.0, 0.2)
    return model
