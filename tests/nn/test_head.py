import pytest
import torch
from torch import nn

import reference
from regard.config import make
from regard.errors import ConfigError
from regard.nn.head import HEADS, ClassificationHead, LMHead, LogProbHead, MaskedLMHead, SpanHead
from regard.nn.norm import LayerNorm


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_a_head_takes_any_leading_axes(label_smoothing):
    layer = LMHead(5, 11, bias=True).double()
    torch.nn.init.normal_(layer.bias)
    x, targets = torch.randn(2, 3, 5).double(), torch.randint(0, 11, (2, 3))
    expected = reference.cross_entropy(layer(x).flatten(0, 1), targets.flatten(), label_smoothing)
    assert layer.loss(x, targets, label_smoothing=label_smoothing).item() == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_an_identity_head_scores_log_probabilities(label_smoothing):
    logp = torch.randn(2, 3, 11).double().log_softmax(-1)
    targets = torch.tensor([[1, -1, 10], [0, -1, 4]])
    expected = reference.cross_entropy(logp.flatten(0, 1), targets.flatten(), label_smoothing)
    layer = LogProbHead()
    assert layer(logp) is logp
    assert layer.loss(logp, targets, label_smoothing=label_smoothing).item() == pytest.approx(
        expected
    )


def test_a_masked_head_applies_activation_and_norm_before_its_matrix():
    embed = nn.Embedding(11, 3).double()
    head = MaskedLMHead(5, 11, norm=LayerNorm, embed_dim=3, tied=embed).double()
    nn.init.normal_(head.bias)
    x = torch.randn(2, 4, 5).double()
    inner = head.norm(nn.functional.gelu(x @ head.dense.weight.T + head.dense.bias))
    torch.testing.assert_close(head(x), inner @ embed.weight.T + head.bias)
    targets = torch.randint(0, 11, (2, 4))
    expected = reference.cross_entropy(head(x).flatten(0, 1), targets.flatten())
    assert head.loss(x, targets).item() == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ConfigError, match="next_sentence"):
        head.next_sentence(x)


def test_a_masked_head_predicts_the_next_sentence_from_the_first_vector():
    head = MaskedLMHead(5, 11, norm=LayerNorm, next_sentence=True)
    x = torch.randn(2, 4, 5)
    other = x.clone()
    other[:, 1:] = 0
    assert head.next_sentence(x).shape == (2, 2)
    torch.testing.assert_close(head.next_sentence(x), head.next_sentence(other))


@pytest.mark.parametrize("pool", ["first", "last", "mean", "max", "ends"])
def test_a_class_head_sees_no_padding(pool):
    head = ClassificationHead(5, classes=3, pool=pool, hidden="tanh")
    x, lengths = torch.randn(3, 6, 5), torch.tensor([6, 2, 1])
    for row, length in enumerate(lengths.tolist()):
        alone = head(x[row : row + 1, :length])
        torch.testing.assert_close(head(x, lengths)[row : row + 1], alone)


def test_a_class_head_pools_as_configured():
    x, lengths = torch.randn(2, 4, 6).double(), torch.tensor([4, 2])
    for row, length in enumerate(lengths.tolist()):
        real = x[row, :length]
        pooled = {
            "first": real[0],
            "last": real[-1],
            "mean": sum(real) / length,
            "max": torch.stack([real[:, each].max() for each in range(6)]),
            "ends": torch.cat([real[-1, :3], real[0, 3:]]),
        }
        for pool, y in pooled.items():
            head = ClassificationHead(6, classes=3, pool=pool).double()
            expected = head.out.weight @ y + head.out.bias
            torch.testing.assert_close(head(x, lengths)[row], expected)
    with pytest.raises(ConfigError, match="relu=true and hidden cannot be combined"):
        ClassificationHead(6, classes=3, hidden="tanh", relu=True)


def test_a_span_head_scores_the_first_and_the_last_token():
    head = SpanHead(5).double()
    x, targets = torch.randn(2, 4, 5).double(), torch.tensor([[0, 3], [2, -1]])
    logits = head(x)
    expected = sum(reference.cross_entropy(logits[:, :, end], targets[:, end]) for end in range(2))
    assert head.loss(x, targets).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", HEADS)
def test_every_head_gives_a_gradient(name):
    options = {"classes": 3} if name in ("classification", "tag", "crf") else {}
    given = {"dim": 6, "vocab_size": 11, "norm": LayerNorm, "tied": None, "embed_dim": None}
    given |= {"positions": 4}
    head = make({"kind": name, **options}, HEADS, "head", **given)
    x = torch.randn(2, 4, 6, requires_grad=True)
    loss = head.loss(x, torch.ones(2, 4).long()) if name == "crf" else head(x).square().sum()
    loss.backward()
    assert x.grad.abs().sum() > 0
    assert all(p.grad is not None for p in head.parameters())
