"""Runs and checkpoint folders for tests, without training and without another library."""

import json

import torch
from safetensors.torch import save_file

from regard.config import RunConfig
from regard.files.directory import Directory
from regard.hub.config_json import write_config
from regard.hub.external_checkpoint import prefixed_rules
from regard.hub.weight_mapping import plan_export
from regard.models.build import build_model, config_table, preset, weights
from regard.pipelines import tokenizer_fingerprint
from regard.text import train_tokenizer
from regard.training.storage.checkpoint import write_tensors
from regard.training.storage.run_folder import RunFolder

TEXT = ["the cat sat on the mat, and the dog sat beside the cat"] * 3
SMALL = {"dim": 16, "layers": 2, "heads": 2, "context": 32}


def tokenizer(kind="bpe"):
    return train_tokenizer({"kind": kind, "vocab_size": 280} if kind == "bpe" else kind, TEXT)


def model_config(name="modern", **fields):
    vocabulary = fields.pop("vocab_size", tokenizer().vocab_size)
    kv_heads = {"kv_heads": 1} if name == "modern" else {}
    return preset(name, vocab_size=vocabulary, **{**SMALL, **kv_heads, **fields})


def make_run(path, config=None, task="causal", tokenizers=None, dtype=torch.float32):
    """A run folder with random weights in which no two tensors are alike."""
    config = model_config() if config is None else config
    tokenizers = tokenizer() if tokenizers is None else tokenizers
    model = random_model(config, dtype)
    run = RunConfig(name=path.name, task=task, model=config_table(config))
    facts = {"data": None, "tokenizer": tokenizer_fingerprint(tokenizers)}

    def write(file, metadata):
        write_tensors(Directory(file.parent), file.name, weights(model), metadata)

    RunFolder(path).create(run, facts, tokenizers, write)
    return model


def random_model(config, dtype=torch.float32):
    model = build_model(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
    return model.to(dtype)


def make_checkpoint(path, config=None, model_type=None, change=None, **settings):
    """A checkpoint folder with random weights; `change` may spoil the tensors first."""
    config = model_config() if config is None else config
    chosen, table = write_config(config, model_type)
    model = random_model(config)
    ours = weights(model)
    mappings = plan_export(prefixed_rules(chosen, config), ours).mappings
    tensors = {
        m.external: m.layout.join([ours[n] for n in m.internal]).contiguous() for m in mappings
    }
    if change is not None:
        tensors = change(tensors)
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**table, **settings}))
    return model
