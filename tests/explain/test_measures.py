"""Measures against their formulas, worked by hand or computed another way."""

import math

import pytest
import torch
import torch.nn.functional as F

from regard.errors import RegardError
from regard.explain import (
    ablate,
    attention_distance,
    attention_entropy,
    attention_rollout,
    copying_scores,
    direct_logit_attribution,
    duplicate_token_score,
    find_heads,
    gradient_times_attention,
    head_effects,
    induction_score,
    integrated_gradients,
    logit_lens,
    pca,
    position_similarity,
    previous_token_score,
    probe,
    token_score,
    trace,
    tsne,
    tune_lens,
)
from regard.explain.attribution import attribute
from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.attention import Attention
from regard.nn.position import POSITIONS
from regard.text import train_tokenizer

IDS = torch.tensor([[1, 5, 3, 1, 5, 2]])


def decoder(**choices):
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "dim": 16, "layers": 2, "heads": 4, "context": 16}
    model = Transformer(TransformerConfig(**(sizes | choices))).double().eval()
    for parameter in model.parameters():  # far from the small initial values
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def one_hot(columns, seen):
    return F.one_hot(torch.tensor(columns), seen).double()


def test_entropy_and_distance_of_weights_worked_by_hand():
    weights = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4])
    expected = torch.tensor([0.0, math.log(2), math.log(4)])
    torch.testing.assert_close(attention_entropy(weights), expected)
    torch.testing.assert_close(
        attention_distance(weights), torch.tensor([0.0, 0.5, (2 + 1 + 0 + 1) / 4])
    )


def test_heads_that_do_one_thing_have_its_score_only():
    ids = torch.tensor([4, 7, 2, 4, 7, 2])
    before = one_hot([0, 0, 1, 2, 3, 4], 6)
    same = one_hot([0, 1, 2, 0, 1, 2], 6)
    after = one_hot([0, 1, 2, 1, 2, 3], 6)  # the token that followed the same token
    weights = torch.stack([before, same, after])
    assert previous_token_score(weights)[0] == 1.0
    assert duplicate_token_score(weights, ids).tolist() == [0.0, 1.0, 0.0]
    assert induction_score(weights, ids).tolist() == [0.0, 0.0, 1.0]
    assert induction_score(weights[:, :3, :3], ids[:3]).tolist() == [0.0] * 3  # nothing repeats


@pytest.mark.parametrize("norm", ["layer", "rms", "rms_plus_one"])
@torch.no_grad()
def test_copying_scores_are_those_of_the_whole_matrix(norm):
    model = decoder(kv_heads=2, norm=norm, bias=False)
    block, stack = model.decoder.blocks[1], model.decoder
    value = block.attention.value.weight.unflatten(0, (2, 4))[[0, 0, 1, 1]]
    out = block.attention.out.weight.unflatten(1, (4, 4))
    table = model.embed.token.weight
    first, last = (n.weight + (norm == "rms_plus_one") for n in (block.attention_norm, stack.norm))
    for head in range(4):
        through = out[:, head] @ value[head] @ torch.diag(first)
        whole = table @ torch.diag(last) @ through @ table.T
        values = torch.linalg.eigvals(whole)
        expected = float(values.real.sum() / values.abs().sum())
        score = copying_scores(model)["decoder.blocks.1.attention"][head]
        assert float(score) == pytest.approx(expected, abs=1e-5)


@torch.no_grad()
def test_copying_scores_include_the_gain_of_every_norm_on_the_path():
    branch_norms = decoder(norm_placement="sandwich", embed_norm=True, norm="rms", bias=False)
    stream_norms = decoder(norm_placement="post", embed_norm=True, norm="rms", bias=False)
    for model in (branch_norms, stream_norms):
        stack, (lower, upper) = model.decoder, model.decoder.blocks
        before = [stack.embed_norm, lower.attention_norm, lower.ffn_norm]
        after = [upper.attention_norm, upper.ffn_norm]
        if model is branch_norms:
            before = [stack.embed_norm, upper.attention_norm]
            after = [upper.attention_post_norm, stack.norm]
        table, attention = model.embed.token.weight, upper.attention
        embed, unembed = table.T, table
        for norm in before:
            embed = torch.diag(norm.weight) @ embed
        for norm in after:
            unembed = unembed @ torch.diag(norm.weight)
        scores = copying_scores(model)["decoder.blocks.1.attention"]
        for head in range(4):
            value = attention.value.weight.unflatten(0, (4, 4))[head]
            out = attention.out.weight.unflatten(1, (4, 4))[:, head]
            values = torch.linalg.eigvals(unembed @ out @ value @ embed)
            expected = float(values.real.sum() / values.abs().sum())
            assert float(scores[head]) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(RegardError, match="copying scores need residual connections"):
        copying_scores(decoder(norm_placement="no_residual"))


def test_every_head_of_a_decoder_is_scored_with_the_same_numbers_each_time():
    model = decoder().float()
    scores = find_heads(model)
    assert {name: tuple(table.shape) for name, table in scores.scores.items()} == dict.fromkeys(
        ("previous_token", "induction", "duplicate_token", "entropy", "distance", "copying"), (2, 4)
    )
    assert torch.equal(find_heads(model).scores["induction"], scores.scores["induction"])
    (layer, head, best), *_ = scores.top("induction")
    assert best == scores.scores["induction"].max() == scores.scores["induction"][layer, head]
    assert len(scores.to_pandas()) == 8
    with pytest.raises(RegardError, match="no scores of 'name_mover'; available: previous_token"):
        scores.top("name_mover")
    with pytest.raises(RegardError, match="needs a decoder"):
        find_heads(decoder(architecture="encoder"))


def test_rollout_multiplies_the_layers_with_their_residuals():
    first, second = torch.rand(2, 3, 4, 4), torch.rand(2, 3, 4, 4)
    layers = [weights.softmax(-1)[0] for weights in (first, second)]
    a, b = (0.5 * torch.eye(4) + 0.5 * weights.mean(0) for weights in layers)
    torch.testing.assert_close(attention_rollout(layers), b @ a)
    torch.testing.assert_close(attention_rollout(layers).sum(-1), torch.ones(4))


def test_gradient_times_attention_is_that_of_the_open_path(monkeypatch):
    model, opened = decoder(kv_heads=2), {}
    original = Attention.weights

    def weights(self, q, k, inputs):
        out = original(self, q, k, inputs)
        if out.requires_grad:
            opened[self] = out
        return out

    def score():
        return model.head(model(IDS))[0, -1, 3]

    ours = gradient_times_attention(model, score)
    for block in model.decoder.blocks:
        block.attention.score.fused = False
    monkeypatch.setattr(Attention, "weights", weights)
    total = score()
    for number, block in enumerate(model.decoder.blocks):
        w = opened[block.attention]
        (gradient,) = torch.autograd.grad(total, w, retain_graph=True)
        expected = (w * gradient).detach().float()
        torch.testing.assert_close(ours[f"decoder.blocks.{number}.attention"], expected)
        assert expected.abs().max() > 1e-4


def test_integrated_gradients_add_up_and_are_exact_for_a_linear_model():
    model = decoder()
    values, missing = integrated_gradients(model, IDS, token_score(model, 3), steps=200)
    with torch.no_grad():
        logit = model.head(model(IDS))[0, -1, 3]
        with trace(model, (), edit={"embed": lambda x: 0 * x}):
            base = model.head(model(IDS))[0, -1, 3]
    assert float(values.sum()) == pytest.approx(float(logit - base), abs=1e-3)
    assert missing == pytest.approx(float(logit - base - values.sum()), abs=1e-4)
    linear = torch.nn.Sequential(torch.nn.Embedding(9, 4))
    vector = torch.randn(6, 4)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    cudnn = []

    def score(x):
        cudnn.append(torch.backends.cudnn.enabled)
        return (x * vector).sum((1, 2))

    values, missing = integrated_gradients(linear, ids, score, embed="0", baseline=0, steps=3)
    assert cudnn == [False, True]  # it has no gradients of recurrent layers in eval mode
    expected = ((linear[0](ids) - linear[0].weight[0])[0] * vector).sum(-1)
    torch.testing.assert_close(values, expected.detach())
    assert abs(missing) < 1e-5


def test_the_attribution_of_a_next_token_needs_exactly_one():
    model, tokenizer = decoder(), train_tokenizer("char", ["abcd"])
    for output, message in (("ab", "it has 2: 'a', 'b'"), ("", "it has 0")):
        with pytest.raises(RegardError, match=f"must be one token, the next one; {message}$"):
            attribute(model, tokenizer, [1, 2, 3], output)


@pytest.mark.parametrize("position", ["rotary", "learned"])
def test_attributions_add_up_where_the_score_is_steep_at_the_baseline(position):
    model, tokenizer = decoder(position=position), train_tokenizer("char", ["abcd"])
    assert tokenizer.vocab_size >= model.vocab_size
    ids = [1, 2, 3, 4, 5, 6]
    result = attribute(model, tokenizer, ids)
    row = torch.tensor([ids])
    with torch.no_grad():
        at_ids = model.head(model(row))[0, -1]
        with trace(model, (), edit={"embed": torch.zeros_like}):
            at_zero = model.head(model(row))[0, -1]
    difference = float((at_ids - at_zero)[at_ids.argmax()])
    assert sum(result.values) == pytest.approx(difference, rel=0.01)
    assert result.convergence_delta == pytest.approx(difference - sum(result.values), abs=1e-5)


@torch.no_grad()
def test_the_last_layer_of_the_logit_lens_is_the_model_itself():
    for choices in (
        {},
        {"norm_placement": "post"},
        {"shared_layers": True},
        {"architecture": "encoder"},
    ):
        model = decoder(**choices)
        logits = logit_lens(model, IDS)
        assert logits.shape == (3, 1, 6, 9)
        torch.testing.assert_close(logits[-1].double(), model.head(model(IDS)), rtol=0, atol=1e-4)
        some = logit_lens(model, IDS, positions=[4])
        torch.testing.assert_close(some, logits[:, :, [4]])


def test_a_tuned_lens_is_nearer_to_the_last_layer_than_the_logit_lens():
    model = decoder().float()
    ids = torch.randint(0, 9, (40, 8, 12))
    lens = tune_lens(model, ids, lr=1e-2)
    assert all(parameter.requires_grad for parameter in model.parameters())
    fresh = torch.randint(0, 9, (16, 12))

    def divergence(logits):
        last = logits[-1].log_softmax(-1)
        return (last.exp() * (last - logits[1].log_softmax(-1))).sum(-1).mean()

    tuned = divergence(logit_lens(model, fresh, lens=lens))
    assert tuned < 0.7 * divergence(logit_lens(model, fresh))
    with pytest.raises(RegardError, match="lens of 2 layers cannot translate the states of 3"):
        logit_lens(decoder(layers=3).float(), fresh, lens=lens)


@torch.no_grad()
def test_the_parts_of_a_logit_add_up_to_it():
    for choices in (
        {},
        {"norm": "rms", "bias": False, "position": "rotary", "kv_heads": 2},
        {"norm": "rms_plus_one", "norm_placement": "parallel", "tied": False},
    ):
        model = decoder(**choices)
        logits = model.head(model(IDS))[0]
        parts = direct_logit_attribution(model, IDS, 3, position=2)
        assert sum(parts.values()) == pytest.approx(float(logits[2, 3]), abs=1e-9)
        parts = direct_logit_attribution(model, IDS, 3, against=4)
        assert sum(parts.values()) == pytest.approx(float(logits[-1, 3] - logits[-1, 4]), abs=1e-9)
        assert "decoder.blocks.1.attention.3" in parts
    with pytest.raises(RegardError, match="this model has 'post'"):
        direct_logit_attribution(decoder(norm_placement="post"), IDS, 3)


@torch.no_grad()
def test_the_effect_of_a_head_is_the_loss_without_it():
    model = decoder()

    def loss():
        return F.cross_entropy(model.head(model(IDS[:, :-1]))[0], IDS[0, 1:])

    effects = head_effects(model, loss, pattern="*.1.attention")
    with trace(model, (), edit={"decoder.blocks.1.attention.heads_hook": ablate(heads=[2])}):
        without = loss()
    expected = pytest.approx(float(without - loss()), abs=1e-6)
    assert effects["decoder.blocks.1.attention"][2] == expected


def test_a_probe_finds_what_is_there_and_nothing_where_there_is_nothing():
    labels = torch.arange(200) % 2
    x = torch.randn(200, 5)
    nothing = probe(x, labels)
    assert nothing.low < 0.5 < nothing.high
    assert nothing.majority == 0.5
    x[:, 3] += 6 * labels
    found = probe(x, labels)
    assert found.accuracy > 0.97
    assert found.low < found.accuracy < found.high
    with pytest.raises(RegardError, match="at least 2 classes"):
        probe(x, torch.zeros(200, dtype=torch.long))
    for same in (labels.int(), labels.bool()):
        assert probe(x, same) == found
    assert probe(x[:4], labels[:4], folds=2).majority == 0.5


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.zeros(9, 2), torch.ones(9, dtype=torch.long)), {}, "9 examples of 1 class"),
        ((torch.zeros(9, 2), torch.arange(9) % 2), {"folds": 1}, "folds=1 must be at least 2"),
        ((torch.zeros(3, 2), torch.arange(3) % 2), {"folds": 2}, "and 4 examples"),
        ((torch.zeros(9, 2), torch.arange(8) % 2), {}, "9 activations do not match 8 labels"),
        ((torch.zeros(9, 2), torch.arange(9) - 1), {}, "integers of at least 0"),
        ((torch.full((9, 2), torch.nan), torch.arange(9) % 2), {}, "contain NaN or infinity"),
    ],
)
def test_what_cannot_be_probed_is_refused(arguments, options, message):
    with pytest.raises(RegardError, match=message):
        probe(*arguments, **options)


def test_heads_are_found_on_distinct_tokens_of_the_vocabulary():
    model = decoder()
    scores, again = find_heads(model, tokens=[1, 2, 3]), find_heads(model, tokens=[1, 2, 2, 3, 1])
    assert torch.equal(scores.scores["induction"], again.scores["induction"])
    for options, message in (
        ({"tokens": [1, 2, 9]}, "token 9: there are 9 tokens, 0 to 8"),
        ({"rows": 0}, "rows=0 must be at least 1"),
        ({"length": 1}, "length=1, 9 tokens or context=16 is too few"),
    ):
        with pytest.raises(RegardError, match=message):
            find_heads(model, **options)


def test_tsne_needs_a_positive_perplexity():
    with pytest.raises(RegardError, match="perplexity=0 must be above 0"):
        tsne(torch.randn(9, 3), perplexity=0)


def test_pca_and_tsne_keep_groups_apart():
    groups = torch.arange(60) % 3
    x = 0.3 * torch.randn(60, 10) + 4 * F.one_hot(groups, 10)
    points, share = pca(x)
    centred = x - x.mean(0)
    torch.testing.assert_close(
        points.T @ points, torch.diag(torch.linalg.svdvals(centred)[:2] ** 2), atol=1e-3, rtol=1e-4
    )
    assert 0.9 < float(share.sum()) < 1
    y = tsne(x, perplexity=8)
    assert torch.equal(y, tsne(x, perplexity=8))
    for flat in (points, y):
        far = torch.cdist(flat, flat)
        far.fill_diagonal_(math.inf)
        assert (groups[far.argmin(1)] == groups).all()


def test_similarities_of_positions_depend_on_their_distance():
    sinusoidal = position_similarity(POSITIONS["sinusoidal"](dim=8), 5)[0]
    torch.testing.assert_close(sinusoidal.diagonal(1), sinusoidal[0, 1].expand(4))
    rotary = position_similarity(POSITIONS["rotary"](head_dim=8), 5)[0]
    angles = 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(
        rotary[0], torch.stack([(angles * t).cos().mean() for t in range(5)])
    )
    assert position_similarity(POSITIONS["alibi"](heads=4), 5).shape == (4, 5, 5)
    learned = position_similarity(POSITIONS["learned"](dim=8, context=9), 5)
    assert learned.shape == (1, 5, 5)
    with pytest.raises(RegardError, match="no vectors, rotation or bias to compare"):
        position_similarity(POSITIONS["none"](), 5)
