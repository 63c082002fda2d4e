"""Former names of settings, of their values and of tensors, and names in other libraries.

Run folders with former names are read with the current ones. Messages about an unknown name suggest
the current one, also for names that PyTorch, transformers or nanoGPT use.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

# Former names of settings in run folders of earlier versions → current names.
SETTINGS = {
    "model.characters": "model.char_dim",
    "model.hard": "model.hard_attention",
    "model.direct": "model.direct_connections",
    "model.inputs": "model.input_dim",
    "model.rounds": "model.iterations",
    "model.position.fraction": "model.position.partial_rotary_factor",
    "model.position.halves": "model.position.interleaved",
    "model.position.projected": "model.position.after_projection",
    "model.score.width": "model.score.scale_dim",
    "model.width": "model.kernel_size",
    "model.score.norm_distances": "model.score.norm_relative_embeddings",
    "model.position.scaling.low": "model.position.scaling.low_freq_factor",
    "model.position.scaling.high": "model.position.scaling.high_freq_factor",
    "model.position.scaling.short": "model.position.scaling.short_factor",
    "model.position.scaling.long": "model.position.scaling.long_factor",
    "model.cell.forget": "model.cell.forget_gate",
    "model.patch": "model.patch_size",
    "model.factored": "model.factorize_positions",
    "model.curves": "model.components",
    "model.norm_order": "model.norm_placement",
    "model.head.steps": "model.head.horizon",
    "model.stream_scale": "model.residual_scale",
    "model.shape": "model.architecture",
    "model.placement": "model.attention_placement",
    "data.tokenizer.size": "data.tokenizer.vocab_size",
    "data.path.colours": "data.path.types",
    "data.path.errors": "data.path.error_rate",
    "data.path.shortest": "data.path.min_length",
    "data.path.longest": "data.path.max_length",
    "data.path.highest": "data.path.max_number",
    "train.clip": "train.max_grad_norm",
    "train.keep": "train.keep_checkpoints",
    "train.best": "train.best_metric",
    "train.schedule.floor": "train.schedule.min_lr_factor",
    "train.evaluate_tokens": "train.evaluate_targets",
    "train.optimizer.decay": "train.optimizer.weight_decay",
    "train.schedule.decay": "train.schedule.decay_fraction",
    "task.points": "task.max_points",
    "task.season": "task.seasonal_period",
    "best.since": "best.num_bad_evaluations",  # of state.json, as the next three
    "time_plan.at": "time_plan.step",
    "time_plan.evaluated": "time_plan.last_evaluation",
    "time_plan.saved": "time_plan.last_save",
    "evaluation.evaluated": "evaluation.evaluated_on",  # of evaluation.json
    "task.names": "task.class_names",
    "task.crop": "task.crop_padding",
    "task.template": "task.chat_template",
    "task.patch": "task.patch_length",
    "task.stride": "task.patch_stride",
    "task.inputs": "task.covariates",
    "task.independent": "task.channel_independent",
    "task.scheduled_sampling.most": "task.scheduled_sampling.max_probability",
    "task.scheduled_sampling.over": "task.scheduled_sampling.ramp_fraction",
}
INVERTED = ("model.position.halves",)  # the new setting is true where this was false
ONLY_OF_KIND = {"task.stride": "forecast"}  # in tables of another kind, the name is current
VALUES: dict[str, dict[str | bool, str | bool]] = {
    "data.path": {"nested": "dyck"},
    "task": {"label": "text_classification", "classify": "image_classification"},
    "model.cell": {"gated": "update_gate"},
    "model.score": {"content": "cosine"},
    "model.smoothing": {"interpolated": "witten_bell"},
    "model.factorize_positions": {"tables": True, "tokens": False},
    "model.norm_placement": {"none": "no_residual"},
    "model.head": {"classify": "classification"},
    "model.init": {"zero_out": "zero_init_residual"},
    "train.schedule": {"stable_decay": "warmup_stable_decay"},
    "train.tune": {"last": "last_layers", "gradual": "gradual_unfreezing"},
}

# Patterns of former names of tensors in model.safetensors and in checkpoints → current names.
TENSORS = {
    r"\b(attention|cross|ffn)_after\b": r"\1_post_norm",
    r"\bahead\.(?=input|hidden)": "forward_layer.",
    r"\bback\.(?=input|hidden)": "backward_layer.",
    r"^cell_positions\b": "region_positions",
    r"^join\b": "direction_projection",
    r"^(encoder|decoder)\.distances\b": r"\1.relative_embedding",
    r"^log_first$": "log_initial",
    r"^log_move$": "log_transition",
    r"^log_write$": "log_emission",
    r"norm\.mean$": "norm.running_mean",
    r"norm\.variance$": "norm.running_var",
    r"^head\.first\b": "head.start_transitions",
    r"^head\.between\b": "head.transitions",
    r"^head\.last\b": "head.end_transitions",
    r"^head\.follows\b": "head.seq_relationship",
    r"\bscore\.weigh\b": "score.energy",
    r"\bscore\.place\b": "score.location",
}

# Former names that no supported run folder contains; for messages only.
MESSAGES = {
    "m": "p",  # of the sampler min_p
    "min_length": "min_new_tokens",  # a sampler
    "tokens": "max_new_tokens",  # of the figure beam-tree
    "rate": "lr",
    "average": "ema",
    "recompute": "activation_checkpointing",
    "watch": "trackers",
    "held_out": "validation_fraction",
    "order": "norm_placement",
    "both_ways": "bidirectional",
    "feeding": "input_feeding",
    "attention": "score",
    "smoothing": "label_smoothing",
    "sampled": "scheduled_sampling",
    "share": "mask_fraction",
    "reach": "max_distance",
    "max_answer": "max_answer_length",
    "classify": "text_classification",  # or image_classification, in VALUES
    "label": "image_classification",  # or text_classification, in VALUES
}

# Names of settings in PyTorch, transformers and nanoGPT → here; for messages only.
OTHER_LIBRARIES = {
    "learning_rate": "lr",
    "weight_decay": "optimizer.weight_decay",
    "batch_size": "batch",
    "per_device_train_batch_size": "batch",
    "gradient_accumulation_steps": "accumulate",
    "max_steps": "steps",
    "max_iters": "steps",
    "epochs": "steps",
    "num_train_epochs": "steps",
    "lr_scheduler_type": "schedule",
    "warmup_steps": "schedule.warmup",
    "warmup_iters": "schedule.warmup",
    "warmup": "schedule.warmup",
    "grad_clip": "max_grad_norm",
    "gradient_checkpointing": "activation_checkpointing",
    "early_stopping_patience": "patience",
    "eval_steps": "evaluate_every",
    "eval_interval": "evaluate_every",
    "save_steps": "save_every",
    "label_smoothing_factor": "label_smoothing",
    "vocab": "vocab_size",
    "hidden_size": "dim",
    "d_model": "dim",
    "n_embd": "dim",
    "num_layers": "layers",
    "num_hidden_layers": "layers",
    "n_layer": "layers",
    "num_heads": "heads",
    "num_attention_heads": "heads",
    "nhead": "heads",
    "n_head": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn_dim",
    "dim_feedforward": "ffn_dim",
    "d_ff": "ffn_dim",
    "hidden_act": "ffn",
    "activation": "ffn",
    "activation_function": "ffn",
    "max_position_embeddings": "context",
    "n_positions": "context",
    "block_size": "context",
    "max_seq_len": "context",
    "rope_theta": "position.base",
    "rope_scaling": "position.scaling",
    "partial_rotary_factor": "position.partial_rotary_factor",
    "sliding_window": "window",
    "layer_norm_eps": "norm_eps",
    "rms_norm_eps": "norm_eps",
    "norm_first": "norm_placement",
    "tie_word_embeddings": "tied",
    "attn_pdrop": "attention_dropout",
}


def current_names(name: str) -> list[str]:
    """The current names of all settings and values that were called `name`, without their tables.

    >>> current_names("inputs"), current_names("gated"), current_names("lr")
    (['input_dim', 'covariates'], ['update_gate'], [])
    """
    settings = (pair for pair in SETTINGS.items() if pair[0] not in INVERTED)
    values = (pair for table in VALUES.values() for pair in table.items())
    pairs = (*settings, *values, *MESSAGES.items())
    return [
        _last_part(new)
        for old, new in pairs
        if isinstance(new, str) and _last_part(str(old)) == name
    ]


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def current_settings(table: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Rename settings and values to the current names; `table` is nested or has dotted keys.

    >>> current_settings({"model": {"characters": 3}, "model.characters": 4})
    {'model': {'char_dim': 3}, 'model.char_dim': 4}
    """
    renamed = {}
    for key, value in table.items():
        old = f"{where}{key}"
        kind = table.get(f"{old.rpartition('.')[0]}.kind".removeprefix(where))
        name = _current_name(old) if ONLY_OF_KIND.get(old) in (None, kind) else old
        value = not value if old in INVERTED else value
        if isinstance(value, Mapping):
            value = current_settings(value, f"{name}.")
        elif isinstance(value, str | bool):
            value = VALUES.get(name.removesuffix(".kind"), {}).get(value, value)
        renamed[name.removeprefix(where)] = value
    return renamed


def _current_name(name: str) -> str:
    """The current dotted name of a setting, in its table under the table's current name."""
    table, dot, last = name.rpartition(".")
    name = f"{_current_name(table)}.{last}" if dot else name
    return SETTINGS.get(name, name)


def current_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Rename tensors, or other values by tensor name, to the current names.

    >>> current_tensors({"blocks.0.ffn_after.weight": 1})
    {'blocks.0.ffn_post_norm.weight': 1}
    """
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, new in TENSORS.items():
            name = re.sub(pattern, new, name)
        renamed[name] = tensor
    return renamed
