"""LoRA: the formula, merging, and what it does to the models of every family."""

import pytest
import torch
from torch import nn

from contract.test_models import _presets
from regard.errors import ConfigError
from regard.models.build import FAMILIES, build_model, load_weights, preset, weights
from regard.models.seq2seq import Seq2SeqConfig
from regard.models.soft_window import SoftWindowConfig
from regard.models.vision import VisionConfig
from regard.nn.lora import Adapter, LoRALinear, add_lora, linear_layers
from regard.nn.loss import linear_cross_entropy
from regard.nn.state import ImageSource, Source


def test_a_layer_computes_the_formula_and_begins_as_its_base():
    base = nn.Linear(3, 4).double()
    layer = LoRALinear(base, rank=2, alpha=6.0).double()
    x = torch.randn(5, 3).double()
    assert torch.equal(layer(x), base(x))
    nn.init.normal_(layer.lora_B)
    expected = base(x) + 3.0 * x @ layer.lora_A.T @ layer.lora_B.T
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        nn.functional.linear(x, layer.weight, layer.bias), expected, rtol=0, atol=1e-12
    )


def test_dropout_is_of_the_update_only_and_in_training_only():
    layer = LoRALinear(nn.Linear(3, 4), rank=2, alpha=2.0, dropout=0.99)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(1, 3)
    assert not torch.equal(layer(x), layer.eval()(x))
    assert torch.equal(layer.train().base(x), layer.eval().base(x))


def _logits(model, config):
    ids = torch.arange(12).view(2, 6) % 7
    if isinstance(config, VisionConfig):
        images = torch.linspace(-1, 1, 2 * config.channels * config.image_size**2)
        shape = (2, config.channels, config.image_size, config.image_size)
        return model.head(model(images.view(shape)))
    source = None
    if isinstance(config, SoftWindowConfig):
        points = torch.linspace(-1, 1, 60).view(2, 6, 5)
        return model.head(model(points, source=Source(ids[:, :3] % 4, torch.tensor([3, 2]))))
    if hasattr(config, "image_size"):
        images = torch.ones(2, config.channels, config.image_size, config.image_size)
        source = ImageSource.of(images, config.regions)
    elif (
        isinstance(config, Seq2SeqConfig)
        or getattr(config, "architecture", "") == "encoder-decoder"
    ):
        source = Source(ids, torch.tensor([6, 4]))
    options = {} if source is None else {"source": source}
    return model.head(model(ids, **options))


def test_merged_equals_unmerged_for_the_models_of_every_family():
    seen = set()
    others = {
        "tiny-vit": preset("tiny-vit", dim=16, layers=1, heads=2),
        "soft window": SoftWindowConfig(vocab_size=4, dim=8),
    }
    for name, config in (_presets() | others).items():
        model = build_model(config).eval()
        if not linear_layers(model):
            continue
        before = {n: t.clone() for n, t in weights(model).items()}
        chosen = add_lora(model, ["*"], rank=2, alpha=3.0)
        assert len(chosen) == len(set(chosen)) > 0
        for part in model.modules():
            if isinstance(part, LoRALinear):
                nn.init.normal_(part.lora_B, std=0.1)
        assert set(weights(model)) == {f"{n}.lora_{p}" for n in chosen for p in "AB"}, name
        unmerged = _logits(model, config)
        adapter = Adapter.of(weights(model), alpha=3.0)
        other = build_model(config).eval()
        load_weights(other, adapter.merge(before), name)
        torch.testing.assert_close(_logits(other, config), unmerged, rtol=0, atol=1e-5)
        unmerged.square().sum().backward()
        for n, p in model.named_parameters():
            assert (p.grad is not None) == p.requires_grad, (name, n)
        seen.add(type(config).__name__)
    without = {"ngram", "hmm", "autoregression", "linear", "bag", "cbow"}  # no linear layers
    assert seen == {FAMILIES[name][0].__name__ for name in set(FAMILIES) - without}


def test_targets_are_globs_and_those_that_match_nothing_are_an_error():
    model = build_model(preset("tiny-decoder", vocab_size=9))
    with pytest.raises(ConfigError, match=r"targets='\*\.q_proj'; this model has \*\.query"):
        add_lora(model, ["*.query", "*.q_proj"], rank=2, alpha=2.0)
    with pytest.raises(ConfigError, match="rank=0"):
        add_lora(model, ["*"], rank=0, alpha=2.0)
    for alpha in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"lora: alpha={alpha} must be more than 0"):
            add_lora(model, ["*"], rank=2, alpha=alpha)
    with pytest.raises(ConfigError, match=r"targets=\[\] chooses no linear layer"):
        add_lora(model, [], rank=2, alpha=2.0)
    chosen = add_lora(model, ["*.blocks.0.*.query"], rank=2, alpha=2.0)
    assert chosen == ["decoder.blocks.0.attention.query"]
    with pytest.raises(ConfigError, match="use the adapter with the model that it was trained on"):
        Adapter.of({"x.lora_A": torch.ones(2, 3), "x.lora_B": torch.ones(4, 2)}, 1.0).merge({})
    with pytest.raises(ConfigError, match="is 4 × 3, but the weight is 4 × 4"):
        Adapter.of({"x.lora_A": torch.ones(2, 3), "x.lora_B": torch.ones(4, 2)}, 1.0).merge(
            {"x.weight": torch.ones(4, 4)}
        )


def test_the_loss_of_a_frozen_output_matrix_has_the_same_gradient_of_x(monkeypatch):
    monkeypatch.setattr("regard.nn.loss.UNCHUNKED_ELEMENTS", 0)
    weight, targets = nn.Parameter(torch.randn(11, 4)), torch.tensor([1, 2, -1])
    gradients = []
    for frozen in (False, True):
        weight.requires_grad_(not frozen)
        x = torch.ones(3, 4).requires_grad_()
        linear_cross_entropy(x, weight, None, targets).backward()
        gradients.append(x.grad)
        assert frozen or weight.grad is not None
    assert torch.equal(*gradients)
