"""What every model promises, asked of every preset and of every single choice."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.config import kind_of
from regard.data.batch import TextBatch
from regard.errors import CheckpointError, ConfigError, ShapeError
from regard.models.bag_of_words import BagOfWordsConfig
from regard.models.base import Language
from regard.models.build import (
    build_model,
    config_table,
    load_weights,
    resolve,
    weights,
)
from regard.models.captioner import CaptionerConfig, RecurrentCaptionerConfig
from regard.models.cbow import CBOWConfig
from regard.models.convolution import ConvolutionConfig
from regard.models.feedforward import FeedForwardConfig
from regard.models.hmm import HMMConfig
from regard.models.ngram import NGramConfig
from regard.models.presets import PRESETS
from regard.models.recurrent import RecurrentConfig
from regard.models.seq2seq import Seq2SeqConfig
from regard.models.transformer import TransformerConfig
from regard.models.vision import VisionConfig
from regard.nn.attention import Mask
from regard.nn.block import FFNS
from regard.nn.norm import NORMS
from regard.nn.position import POSITIONS
from regard.nn.score import SCORES
from regard.nn.state import ImageSource, Source

VOCAB = 23
TINY = TransformerConfig(vocab_size=VOCAB, dim=16, layers=2, heads=4, context=16)

VARIATIONS = [
    *({"position": name} for name in POSITIONS),
    {"position": {"kind": "rotary", "partial_rotary_factor": 0.5, "interleaved": True}},
    {"position": {"kind": "rotary", "scaling": {"kind": "linear", "factor": 2.0}}},
    {"position": {"kind": "sinusoidal", "each_layer": True}},
    {"position": {"kind": "learned", "each_layer": True}},
    {"position": {"kind": "sinusoidal", "each_layer": True, "after_projection": True}},
    *({"score": name} for name in SCORES if name != "location"),  # it meets no keys
    *({"norm": name} for name in NORMS if name != "batch"),  # that one is for encoders
    *({"ffn": name} for name in (*FFNS, None)),
    *({"norm_placement": name} for name in ("pre", "post", "sandwich", "deepnorm")),
    {
        "norm_placement": "no_residual",
        "init": {"kind": "normal", "std": 0.3},
    },  # small weights leave no signal
    {"kv_heads": 1},
    {"kv_heads": 2},
    {"head_dim": 6},
    {"window": 1},
    {"window": 3},
    {"tied": False},
    {"bias": False},
    {"init": "xavier"},
    {"embed_norm": True},
    {"embed_scaled": True},
]
RECURRENT = [  # beside those of the presets
    {"cell": {"kind": "gru", "reset": "after"}},
    {"cell": {"kind": "elman", "activation": "relu"}, "layers": 1, "one_hot": True},
    {"cell": "elman", "input_skip": True},
    {"cell": "lstm", "input_skip": True, "one_hot": True},
    {"cell": {"kind": "lstm", "input_gate": False}},
    {"cell": {"kind": "lstm", "forget_gate": False, "output_gate": False}},
    *({"cell": name} for name in ("mut1", "mut2", "mut3")),
]
LOOKS = [  # beside those of the presets
    {"score": "location", "hops": 2, "reversed_source": True},
    {"score": "dot", "bidirectional": False, "source_vocab_size": VOCAB + 2},
    {"score": "general", "hard_attention": "straight_through"},
    {"score": "additive", "attention_placement": "bahdanau", "cell": "mut1"},
    {"cell": "mut2", "layers": 2},
    {
        "score": "cosine",
        "attention_placement": "between",
        "heads": 4,
        "layers": 2,
        "encoder_layers": 1,
        "bridge": False,
    },
]
CAPTIONERS = [  # beside those of the presets
    {
        "features": "patches",
        "encoder_layers": 0,
        "attention_placement": "luong",
        "heads": 2,
        "hops": 2,
    },
    {
        "hard_attention": "straight_through",
        "layers": 2,
        "attention_placement": "between",
        "channels": 1,
    },
    {"score": "general", "attention_placement": "luong", "input_feeding": True},
]
# what cross-attention depends on; test_combinations.py has every choice with every architecture
CROSS_FIELDS = {"position", "score", "norm_placement", "kv_heads", "head_dim", "bias"}
PAIRS_ONLY = [{"source_vocab_size": VOCAB + 2}, {"encoder_layers": 1}]


def shrink(config):
    """The same choices at about ten thousand parameters, and without dropout."""
    if isinstance(config, NGramConfig):
        return replace(config, vocab_size=VOCAB)
    if isinstance(config, HMMConfig):
        return replace(config, vocab_size=VOCAB, states=6, iterations=10)
    if isinstance(config, RecurrentConfig):
        return replace(config, vocab_size=VOCAB, dim=24, dropout=0.0)
    if isinstance(config, Seq2SeqConfig):
        sizes = {"vocab_size": VOCAB, "source_vocab_size": None, "dim": 16, "context": 16}
        return replace(config, **sizes, layers=min(config.layers, 2), dropout=0.0)
    if isinstance(config, FeedForwardConfig):
        return replace(config, vocab_size=VOCAB, dim=8, hidden_dim=16, order=5)
    if isinstance(config, ConvolutionConfig):
        return replace(config, vocab_size=VOCAB, dim=16, layers=3, dropout=0.0)
    if isinstance(config, RecurrentCaptionerConfig):
        sizes = {"vocab_size": VOCAB, "dim": 16, "image_size": 12, "patch_size": 4, "context": 16}
        return replace(config, **sizes, dropout=0.0)
    if isinstance(config, CaptionerConfig):
        config = replace(config, image_size=12, patch_size=4)
    kind, options = kind_of(config.position)
    options.pop("base", None)
    score = config.score
    if isinstance(score, dict) and "position_projections" in score:
        score = {**score, "max_distance": 8}
    narrow = {None: None, config.heads: None, 1: 1}  # all share one head of keys, some, or none
    return replace(
        config,
        vocab_size=VOCAB,
        dim=16,
        layers=2,
        heads=4,
        kv_heads=narrow.get(config.kv_heads, 2),
        head_dim=_head_dim(options["partial_rotary_factor"])
        if "partial_rotary_factor" in options
        else None,
        ffn_dim=None,
        context=16,
        position={"kind": kind, **options} if options else kind,
        score=score,
        window=None if config.window is None else 3,
        norm_eps=1e-5,
        residual_scale=None if config.residual_scale is None else 2.0,
        embed_dim=None if config.embed_dim is None else 8,
        dropout=0.0,
        attention_dropout=0.0,
        ffn_dropout=0.0,
    )


def _head_dim(fraction):
    """The smallest width of a head whose rotated part consists of pairs."""
    return next(d for d in range(4, 99) if int(d * fraction) and not int(d * fraction) % 2)


def _presets():
    """One preset of all that differ only in size, by the first one's name."""
    kept = {}
    for name, preset in PRESETS.items():
        config = preset()
        if not isinstance(config, VisionConfig | BagOfWordsConfig | CBOWConfig):  # no languages
            config = shrink(config)
            if config not in kept.values():
                kept[name] = config
    return kept


def _cases():
    cases = _presets()
    for architecture in ("decoder", "encoder-decoder", "encoder"):
        fields = {
            "decoder": VARIATIONS,
            "encoder-decoder": [v for v in VARIATIONS if v.keys() & CROSS_FIELDS] + PAIRS_ONLY,
            "encoder": [{}, {"norm": "batch"}],
        }
        for change in fields[architecture]:
            said = ",".join(f"{key}={value}" for key, value in change.items())
            cases[f"{architecture}:{said}"] = replace(TINY, architecture=architecture, **change)
    for change in RECURRENT:
        said = ",".join(f"{key}={value}" for key, value in change.items())
        cases[f"recurrent:{said}"] = RecurrentConfig(vocab_size=VOCAB, dim=16, **change)
    for change in LOOKS:
        said = ",".join(f"{key}={value}" for key, value in change.items())
        cases[f"seq2seq:{said}"] = Seq2SeqConfig(vocab_size=VOCAB, dim=16, context=16, **change)
    for change in CAPTIONERS:
        said = ",".join(f"{key}={value}" for key, value in change.items())
        cases[f"captioner:{said}"] = replace(cases["show-attend-tell"], **change)
    cases["captioner:patches"] = replace(cases["tiny-captioner"], features="patches")
    return cases


CASES = _cases()
LANGUAGES = [
    name for name, config in CASES.items() if getattr(config, "architecture", "") != "encoder"
]
PAIRS = [
    name for name in LANGUAGES if getattr(CASES[name], "architecture", "") == "encoder-decoder"
]
IMAGES = [name for name in PAIRS if hasattr(CASES[name], "input_kind")]
ENCODERS = [name for name in CASES if name not in LANGUAGES]
TRANSFORMERS = [name for name in LANGUAGES if isinstance(CASES[name], TransformerConfig)]
OBJECTIVES = [name for name in CASES if not isinstance(CASES[name], NGramConfig | HMMConfig)]

every_model = pytest.mark.parametrize("case", CASES)
every_language = pytest.mark.parametrize("case", LANGUAGES)
every_transformer = pytest.mark.parametrize("case", TRANSFORMERS)
every_learner = pytest.mark.parametrize("case", OBJECTIVES)

ROWS, TIME = 3, 9


@dataclass
class Subject:
    """A small model with something to read."""

    model: torch.nn.Module
    ids: torch.Tensor
    source: Source | ImageSource | None

    def hidden(self, ids=None, **more):
        given = {} if self.source is None else {"source": self.source}
        return self.model(self.ids if ids is None else ids, **given, **more)

    def logits(self, ids=None):
        return self.model.head(self.hidden(ids))

    def start(self, capacity=TIME):
        return self.model.start(ROWS, capacity, self.source)


def make(case):
    """A model whose weights are large enough for every part of it to show in the result."""
    config = CASES[case]
    model = build_model(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
        else:
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.1)
    ids = torch.randint(0, VOCAB, (ROWS, TIME))
    source = None
    if case in IMAGES:
        images = torch.randn(ROWS, config.channels, config.image_size, config.image_size)
        source = ImageSource.of(images, config.regions)
    elif case in PAIRS:
        source = Source(torch.randint(0, VOCAB, (ROWS, 7)), torch.tensor([7, 4, 2]))
    if hasattr(model, "fit"):
        text = torch.randint(0, VOCAB, (20, 12))
        model.fit([TextBatch(text[:, :-1], text[:, 1:]), TextBatch(ids[:, :-1], ids[:, 1:])])
    return Subject(model, ids, source)


def near(actual, expected):
    """Equal but for the order in which float32 sums were added up."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def other(ids):
    """Ids that differ everywhere."""
    return (ids + 1 + torch.randint(0, VOCAB - 1, ids.shape)) % VOCAB


@every_model
def test_logits_are_finite_and_one_for_each_id_of_the_vocabulary(case):
    subject = make(case)
    assert sum(p.numel() for p in subject.model.parameters()) < 20_000  # shrunk enough to be quick
    logits = subject.logits()
    assert logits.shape == (ROWS, TIME, VOCAB)
    assert logits.isfinite().all()


@every_learner
def test_every_parameter_receives_a_gradient(case):
    subject = make(case)
    subject.model.head.loss(subject.hidden(), other(subject.ids)).backward()
    for name, parameter in subject.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # what all keys have in common moves no softmax, so this gradient is 0 but for rounding;
        # and where a token sees only itself there is nothing to weigh
        alone = CASES[case].window == 1 if isinstance(CASES[case], TransformerConfig) else False
        idle = name.endswith("key.bias") or (
            alone and ".attention." in name and "value" not in name and "out" not in name
        )
        assert idle or parameter.grad.any(), name


@every_language
def test_no_leak_from_the_future(case):
    subject = make(case)
    before = subject.hidden()
    for t in (1, 4, TIME - 1):
        ids = subject.ids.clone()
        ids[:, t] = other(ids[:, t])
        after = subject.hidden(ids)
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.equal(before[:, t], after[:, t])


@pytest.mark.parametrize("case", [name for name in PAIRS if name not in IMAGES])
def test_padding_of_the_source_changes_nothing(case):
    subject = make(case)
    whole = subject.hidden()
    ids, lengths = subject.source.ids.clone(), subject.source.lengths
    padding = torch.arange(7) >= lengths.unsqueeze(1)
    ids[padding] = other(ids[padding])
    subject.source = Source(ids, lengths)
    assert torch.equal(subject.hidden(), whole)
    for row, length in enumerate(lengths.tolist()):
        alone = Source(ids[row : row + 1, :length], lengths[row : row + 1])
        near(subject.model(subject.ids[row : row + 1], source=alone), whole[row : row + 1])


@pytest.mark.parametrize("case", ENCODERS)
def test_padding_of_an_encoder_changes_nothing(case):
    subject = make(case)
    lengths = torch.tensor([9, 5, 1])
    whole = subject.hidden(mask=Mask.lengths(lengths))
    for row, length in enumerate(lengths.tolist()):
        near(subject.model(subject.ids[row : row + 1, :length]), whole[row : row + 1, :length])


@pytest.mark.parametrize("case", ENCODERS)
def test_an_encoder_sees_both_ways(case):
    subject = make(case)
    ids = subject.ids.clone()
    ids[:, -1] = other(ids[:, -1])
    assert not torch.equal(subject.hidden()[:, 0], subject.hidden(ids)[:, 0])


@pytest.mark.parametrize("case", ENCODERS)
def test_an_encoder_does_not_generate(case):
    with pytest.raises(ConfigError, match="an encoder does not generate"):
        make(case).model.start(1, 4)


@every_transformer
def test_documents_packed_into_a_row_do_not_see_each_other(case):
    subject = make(case)
    mask = Mask.documents(torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]]).expand(ROWS, -1))
    ids = subject.ids.clone()
    ids[:, :4] = other(ids[:, :4])
    before, after = subject.hidden(mask=mask), subject.hidden(ids, mask=mask)
    assert torch.equal(before[:, 4:], after[:, 4:])
    near(before[:, :4], subject.hidden(subject.ids[:, :4]))


@every_language
def test_a_language_model_keeps_the_protocol(case):
    subject = make(case)
    assert isinstance(subject.model, Language)
    last, state = subject.model.step(subject.ids, subject.start())
    every, _ = subject.model.step(subject.ids, subject.start(), all_logits=True)
    assert last.shape == (ROWS, 1, VOCAB)
    assert every.shape == (ROWS, TIME, VOCAB)
    near(last, every[:, -1:])
    assert state.lengths.tolist() == [TIME] * ROWS


@every_language
def test_stepping_equals_one_forward_pass(case):
    subject = make(case)
    expected = subject.logits()
    for pieces in ([1] * TIME, [4, 3, 2], [TIME]):
        state, seen = subject.start(), 0
        for piece in pieces:
            ids = subject.ids[:, seen : seen + piece]
            logits, state = subject.model.step(ids, state, all_logits=True)
            near(logits, expected[:, seen : seen + piece])
            seen += piece
            assert state.lengths.tolist() == [seen] * ROWS


def ragged(ids, begin, counts):
    """The next `counts` ids of each row, right-padded."""
    taken = torch.zeros(ROWS, max(counts), dtype=torch.long)
    for row, (first, count) in enumerate(zip(begin, counts, strict=True)):
        taken[row, :count] = ids[row, first : first + count]
    return taken


@every_language
def test_rows_may_take_in_different_numbers_of_ids(case):
    subject = make(case)
    expected, state, begin = subject.logits(), subject.start(12), [0] * ROWS
    for number, counts in enumerate(([4, 2, 1], [1, 3, 2], [2, 2, 4])):
        ids, all_logits = ragged(subject.ids, begin, counts), number == 1
        logits, state = subject.model.step(
            ids, state, counts=torch.tensor(counts), all_logits=all_logits
        )
        for row, (first, count) in enumerate(zip(begin, counts, strict=True)):
            if all_logits:
                near(logits[row, :count], expected[row, first : first + count])
            else:
                near(logits[row, 0], expected[row, first + count - 1])
        begin = [first + count for first, count in zip(begin, counts, strict=True)]
        assert state.lengths.tolist() == begin


@every_language
def test_select_reorders_and_repeats_rows(case):
    subject = make(case)
    _, state = subject.model.step(
        subject.ids[:, :5], subject.start(), counts=torch.tensor([5, 3, 4])
    )
    rows = torch.tensor([2, 0, 0, 1])
    after = torch.randint(0, VOCAB, (4, 3))
    chosen = state.select(rows)
    assert chosen.lengths.tolist() == [4, 5, 5, 3]
    logits, _ = subject.model.step(after, chosen, all_logits=True)
    if subject.source is not None:
        subject.source = subject.source.select(rows)
    for number, (row, length) in enumerate(zip(rows.tolist(), [4, 5, 5, 3], strict=True)):
        whole = torch.cat([subject.ids[row, :length], after[number]])
        expected = subject.logits(whole.expand(4, -1))
        near(logits[number], expected[number, length:])


@every_language
def test_a_rewound_state_goes_on_as_if_it_had_never_seen_more(case):
    subject = make(case)
    _, state = subject.model.step(subject.ids[:, :3], subject.start(12))
    _, state = subject.model.step(subject.ids[:, 3:8], state)
    lengths = torch.tensor([8, 5, 3])
    state = state.rewind(lengths)
    assert state.lengths.tolist() == [8, 5, 3]
    after = torch.randint(0, VOCAB, (ROWS, 4))
    logits, state = subject.model.step(after, state, all_logits=True)
    assert state.lengths.tolist() == [12, 9, 7]
    for row, length in enumerate(lengths.tolist()):
        whole = torch.cat([subject.ids[row, :length], after[row]])
        near(logits[row], subject.logits(whole.expand(ROWS, -1))[row, length:])


@every_transformer
def test_a_transformer_can_be_rewound_to_the_beginning(case):
    subject = make(case)
    _, state = subject.model.step(subject.ids[:, :6], subject.start(8))
    _, state = subject.model.step(subject.ids[:, 6:8], state)
    ids = other(subject.ids)[:, :8]
    again, _ = subject.model.step(ids, state.rewind(torch.zeros(ROWS).long()))
    fresh, _ = subject.model.step(ids, subject.start(8))
    near(again, fresh)


@every_transformer
def test_more_ids_than_the_state_has_room_for_are_refused(case):
    subject = make(case)
    _, state = subject.model.step(subject.ids[:, :3], subject.start(4))
    with pytest.raises(ShapeError, match="3 ids and 2 more do not fit the KV cache"):
        subject.model.step(subject.ids[:, 3:5], state)


@every_transformer
def test_more_tokens_than_the_context_are_refused(case):
    subject = make(case)
    with pytest.raises(ShapeError, match="17 tokens exceed context=16"):
        subject.hidden(torch.zeros(ROWS, 17, dtype=torch.long))


@every_learner
def test_a_model_runs_in_half_precision(case):
    subject = make(case)
    expected = subject.logits()
    subject.model.half()  # of the two halves, the one that every CPU can do
    logits = subject.logits()
    assert logits.dtype == torch.float16
    # eleven bits, through two layers
    torch.testing.assert_close(logits.float(), expected, rtol=0.05, atol=0.05)


@every_model
def test_a_configuration_survives_the_way_through_json(case):
    config = CASES[case]
    table = json.loads(json.dumps(config_table(config)))
    assert resolve(table) == config


@every_model
def test_weights_survive_the_way_through_a_file(case, tmp_path):
    subject = make(case)
    save_file(weights(subject.model), tmp_path / "model.safetensors")
    torch.manual_seed(1)
    again = build_model(CASES[case]).eval()
    load_weights(again, load_file(tmp_path / "model.safetensors"), "model.safetensors")
    expected = subject.logits()
    subject.model = again
    assert torch.equal(subject.logits(), expected)


@every_model
def test_a_missing_tensor_and_one_of_another_model_are_named(case):
    model = make(case).model
    tensors = weights(model) | {"extra": torch.zeros(1)}
    name = next(iter(tensors))
    del tensors[name]
    message = (
        rf"a.safetensors do not fit.*\n  {name} is missing\n  extra is not a weight of this model"
    )
    with pytest.raises(CheckpointError, match=message):
        load_weights(model, tensors, "a.safetensors")


@every_learner
def test_a_tensor_of_another_shape_is_named_and_nothing_is_loaded(case):
    model = make(case).model
    tensors = {name: torch.zeros_like(tensor) for name, tensor in weights(model).items()}
    name = list(tensors)[-1]
    tensors[name] = torch.zeros(3, 1, 2)
    with pytest.raises(
        CheckpointError, match=rf"{name} has shape \(3, 1, 2\), but the model has \("
    ):
        load_weights(model, tensors, "a.safetensors")
    assert any(tensor.any() for tensor in weights(model).values())


@every_learner
def test_the_same_seed_makes_the_same_weights(case):
    made = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        made.append(weights(build_model(CASES[case])))
    first, same, another = made
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], another[name]) for name in first)


# Without a residual, all that a decoder's position knows of itself is how it mixes the source:
# two words of it do not tell six targets apart.
FORGETFUL = [name for name in PAIRS if getattr(CASES[name], "norm_placement", "") == "no_residual"]


@pytest.mark.parametrize(
    "case",
    [  # test_combinations.py trains every choice in an encoder-decoder
        name
        for name in OBJECTIVES
        if name not in FORGETFUL and not name.startswith("encoder-decoder:")
    ],
)
def test_a_model_overfits_one_batch(case):
    subject = make(case)
    subject.model = build_model(CASES[case])  # from the weights that training begins with
    ids = torch.randperm(VOCAB)[: ROWS * 6].view(ROWS, 6)  # no id twice: to see it is enough
    targets = torch.randint(0, VOCAB, (ROWS, 6))
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=2e-2, weight_decay=0.0, fused=True)
    for _ in range(600):
        loss = subject.model.head.loss(subject.hidden(ids), targets) / targets.numel()
        if loss.item() < 0.3:  # chance: 3.1
            return
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(subject.model.parameters(), 1.0)
        optimizer.step()
    pytest.fail(f"the loss is still {loss.item():.3f}")


def test_a_counted_model_knows_the_text_it_was_fitted_to():
    subject = make("ngram")
    logp = subject.logits()[:, 3:-1].log_softmax(-1)
    right = logp.argmax(-1) == subject.ids[:, 4:]
    assert right.float().mean() > 0.9  # three ids before it were seen once, and then this one
