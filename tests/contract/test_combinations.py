"""Any two choices of a Transformer work together, or are refused with the reason."""

import inspect
import json
import math
from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from choices import (
    COMPANIONS,
    FACTS,
    OPTIONS,
    SIZES,
    TABLES,
    VALUES,
    VOCAB,
    config_of,
    kind,
    reason,
    said,
)
from pairwise import Covering, all_pairs, pairs_of
from regard.errors import ConfigError
from regard.models.build import build_model, config_table, load_weights, resolve, weights
from regard.models.compatibility import option
from regard.models.transformer import TransformerConfig
from regard.nn.attention import Mask
from regard.nn.head import HEADS, LMHead
from regard.nn.norm import BatchNorm
from regard.nn.position import SCALINGS
from regard.nn.score import RELATIVE_SCORES, SCORES
from regard.nn.state import Source

ROWS, TIME = 3, 7
FACTORS = {name: list(values) for name, values in VALUES.items()}
COVERING = Covering(FACTORS, lambda a, b: reason(a, b) is not None)

every_row = pytest.mark.parametrize("row", COVERING.rows, ids=range(len(COVERING.rows)))


def test_every_field_is_a_size_or_a_choice_with_at_least_two_values():
    for field in fields(TransformerConfig):
        if field.name not in SIZES and field.name not in COMPANIONS:
            assert len(VALUES[field.name]) > 1, field.name
            assert said(field.default) in VALUES[field.name], field.name


def _options(part):
    """The names of what a part takes; a module that takes nothing would show *args."""
    own = inspect.isclass(part) and "__init__" not in vars(part)
    return set() if own else set(inspect.signature(part).parameters)


@pytest.mark.parametrize("field", ["score", "position", "init", "head"])
def test_every_option_of_every_entry_is_tried(field):
    for name, part in TABLES[field].items():
        tried = {option for options in OPTIONS.get(name, []) for option in options}
        assert tried == _options(part) - FACTS, name
    scaled = [options for options in OPTIONS["rotary"] if "scaling" in options]
    kinds = {options["scaling"]["kind"] for options in scaled}
    assert kinds == set(SCALINGS) - {"yarn", "dynamic", "longrope"}  # see tests/hub/test_parity.py


def test_every_two_choices_meet_in_some_row_or_cannot():
    met = {pair for row in COVERING.rows for pair in pairs_of(row)}
    for pair in all_pairs(FACTORS):
        assert (pair in met) != (pair in COVERING.impossible), sorted(pair)
    assert len(COVERING.rows) <= 200


@pytest.mark.parametrize("pair", sorted(map(sorted, COVERING.refused)), ids=str)
def test_what_does_not_go_together_is_refused_with_the_reason(pair):
    with pytest.raises(ConfigError, match=reason(*pair)) as caught:
        config_of(dict(pair))
    assert len(str(caught.value).splitlines()) <= 5


@pytest.mark.parametrize(
    "pair", sorted(map(sorted, COVERING.impossible - COVERING.refused)), ids=str
)
def test_where_one_needs_what_the_other_forbids_no_architecture_helps(pair):
    (one, label), other = pair
    for row in (row for row in COVERING.rows if row[one] == label):
        for architecture in VALUES["architecture"]:
            with pytest.raises(ConfigError):
                config_of({**row, "architecture": architecture, **dict([other])})


class Subject:
    """A small model with something to read and something to learn."""

    def __init__(self, config):
        self.config, self.model = config, build_model(config)
        torch.manual_seed(1)
        self.ids = torch.randint(0, VOCAB, (ROWS, TIME))
        self.lengths = torch.tensor([TIME, 4, 2])
        self.source = None
        if config.architecture == "encoder-decoder":
            size = config.source_vocab_size or VOCAB
            self.source = Source(torch.randint(0, size, (ROWS, 6)), torch.tensor([6, 4, 1]))
        self.segments = torch.randint(0, 2, (ROWS, TIME)) if config.segments else None
        self.wanted = {
            "ids": torch.randint(0, VOCAB, (ROWS, TIME)),
            "class": torch.tensor([0, 2, 1]),
            "tags": torch.randint(0, 3, (ROWS, TIME)),
            "span": torch.randint(0, TIME, (ROWS, 2)),
        }

    def hidden(self):
        mask = Mask.lengths(self.lengths) if self.config.architecture == "encoder" else Mask()
        return self.model(self.ids, source=self.source, mask=mask, segments=self.segments)

    def read(self):
        return self.model.head(self.hidden())

    def loss(self):
        head, x, wanted = self.model.head, self.hidden(), self.wanted
        losses = {
            "linear": lambda: head.loss(x, wanted["ids"]),
            "masked": lambda: head.loss(x, wanted["ids"]) + self._next_sentence(x),
            "classification": lambda: head.loss(x, wanted["class"], lengths=self.lengths),
            "tag": lambda: head.loss(x, wanted["tags"]),
            "crf": lambda: head.loss(x, wanted["tags"]),
            "span": lambda: head.loss(x, wanted["span"]),
        }
        return losses.get(kind(self.config.head), lambda: _far_from_waves(head(x)))()

    def _next_sentence(self, x):
        if not option(self.config.head, HEADS, "next_sentence"):
            return 0
        return F.cross_entropy(self.model.head.next_sentence(x), torch.tensor([0, 1, 1]))


def _far_from_waves(y):
    """A loss for vectors of any shape, for heads without one of their own."""
    return (y - torch.arange(y.numel(), dtype=y.dtype).sin().view_as(y)).square().sum()


def enlarge_weights(model):
    """Weights so large that every part of a model shows in what it says."""
    for parameter in model.parameters():
        mean, std = (0.0, 0.3) if parameter.dim() > 1 else (parameter.mean().item(), 0.1)
        torch.nn.init.normal_(parameter, mean=mean, std=std)
    return model


def settle_averages(model, hidden):
    """The averages of every BatchNorm are those of the input, as after training."""
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        hidden()
    return model


@every_row
@pytest.mark.usefixtures("float64")  # one small step after another shows
def test_a_combination_learns(row):
    subject = Subject(config_of(row))
    if subject.config.norm_placement == "no_residual":
        enlarge_weights(subject.model)  # without a residual, nothing arrives through small weights
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=1e-4, weight_decay=0.0)
    losses = []
    for training in (True, *[False] * 6):  # with dropout, what is learned may not show at once
        subject.model.train(training)
        loss = subject.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[1]


@every_row
def test_every_parameter_of_a_combination_receives_a_gradient(row):
    subject = Subject(config_of(row))
    settle_averages(enlarge_weights(subject.model), subject.hidden).eval()
    subject.loss().backward()
    for name, parameter in subject.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # what all keys, or all ends of a span, have in common moves no softmax
        common = ["key.bias", "k_norm.bias"]
        common += ["head.out.bias", "coder.norm.bias"] if row["head"] == "span" else []
        common += ["bias"] if (row["head"], row["norm"]) == ("span", "batch") else []  # a shift too
        # the additive score of a query cancels too, but for the curvature of its tanh
        curved = row["score"] == "additive" and (
            "query" in name
            or "q_norm" in name
            or row["norm_placement"] == "no_residual"  # weak signals
        )
        least = 1e-9 if curved else 1e-6
        assert name.endswith(tuple(common)) or parameter.grad.abs().max() > least, name


@every_row
def test_a_combination_survives_the_way_through_files(row, tmp_path):
    config = config_of(row)
    subject = Subject(config)
    enlarge_weights(subject.model).eval()
    save_file(weights(subject.model), tmp_path / "model.safetensors")
    again = resolve(json.loads(json.dumps(config_table(config))))
    assert again == config
    torch.manual_seed(2)
    twin = Subject(again)
    twin.model.eval()
    load_weights(twin.model, load_file(tmp_path / "model.safetensors"), "model.safetensors")
    assert torch.equal(twin.read(), subject.read())


def reads_ids(row):
    return issubclass(HEADS[kind(VALUES["head"][row["head"]])], LMHead)


WRITERS = [row for row in COVERING.rows if reads_ids(row) and row["architecture"] != "encoder"]


@pytest.mark.parametrize("row", WRITERS, ids=map(COVERING.rows.index, WRITERS))
def test_stepping_through_a_combination_equals_one_forward_pass(row):
    subject = Subject(config_of(row))
    enlarge_weights(subject.model).eval()
    expected, seen = subject.read(), 0
    state = subject.model.start(ROWS, TIME, subject.source)
    for piece in (3, 1, 1, 2):
        ids = subject.ids[:, seen : seen + piece]
        logits, state = subject.model.step(ids, state, all_logits=True)
        # float32, through two layers, summed in another order
        torch.testing.assert_close(logits, expected[:, seen : seen + piece], rtol=1e-5, atol=1e-5)
        seen += piece


@pytest.mark.parametrize("score", sorted(RELATIVE_SCORES))
def test_a_score_by_distance_is_for_self_attention_only(score):
    row = {"score": "scaled_dot", "architecture": "encoder-decoder"}
    model = build_model(replace(config_of(row), score=score))
    assert type(model.decoder.blocks[0].cross.score) is SCORES["scaled_dot"]
    assert type(model.decoder.blocks[0].attention.score) is SCORES[score]


def test_pairs_within_an_odd_head_are_turned_too():
    position = {"kind": "rotary", "partial_rotary_factor": 0.8, "interleaved": True}
    subject = Subject(TransformerConfig(**SIZES, head_dim=5, position=position))
    narrow = subject.read()
    subject.model.double()
    torch.testing.assert_close(narrow.double(), subject.read(), rtol=1e-5, atol=1e-5)


def everything_about(config):
    """How a model begins, what it says, and what it says in training, all from the same seeds."""
    torch.manual_seed(0)
    subject = Subject(config)
    begun = {name: tensor.clone() for name, tensor in weights(subject.model).items()}
    torch.manual_seed(0)
    enlarge_weights(subject.model)
    with torch.no_grad():
        logits = [subject.model.train(training) and subject.read() for training in (False, True)]
    return begun | dict(enumerate(logits))


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def changes(row, field):
    """The same row with each other value of a field that goes together with the rest."""
    rows = [{**row, field: label} for label in VALUES[field] if label != row[field]]
    return [each for each in rows if not pairs_of(each) & COVERING.refused]


def shows(row, field):
    """Whether a field means something in a row; heads without a matrix of ids have none to tie."""
    return field != "tied" or reads_ids(row)


@every_row
def test_no_choice_is_ignored_in_silence(row):
    """In each row another field is changed, and with it what the model is or says."""
    number = COVERING.rows.index(row)
    names = [name for name in VALUES if changes(row, name) and shows(row, name)]
    field = names[number % len(names)]
    changed = changes(row, field)[number % len(changes(row, field))]
    one, two = everything_about(config_of(row)), everything_about(config_of(changed))
    assert not equal(one, two), field
