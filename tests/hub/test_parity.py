"""Decoders of every family compute what `transformers` computes, and come back as they went."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hub import small_encoders
from hub.small import NAMES, READERS, SETTINGS, small
from regard.accel import decoding_path
from regard.generate import generate, parse_chain
from regard.hub import MODEL_TYPES
from regard.hub.external_checkpoint import open_checkpoint
from regard.training.import_export import export_run, import_run

pytestmark = pytest.mark.parity

LENGTHS = torch.tensor([11, 7, 4])
REAL = torch.arange(11) < LENGTHS.unsqueeze(1)
NEAR = 1e-5  # of logits of a size of about 4: the order of float32 sums differs
each_model = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _no_bars():
    logging = pytest.importorskip("transformers").utils.logging
    logging.disable_progress_bar()


@pytest.fixture
def ids():
    return torch.randint(1, 61, (3, 11)).masked_fill(~REAL, 0)


def both(folder, name, architecture=None):
    """Their model and ours, with their weights."""
    theirs = small(name, architecture)
    theirs.save_pretrained(folder)
    return theirs, open_checkpoint(folder).load().eval()


def furthest(one, two):
    return (one - two).abs().max().item()


def test_every_family_has_a_small_model():
    known = {
        model_type for model_type, _ in (*SETTINGS.values(), *small_encoders.SETTINGS.values())
    }
    assert known | {"vit"} == set(MODEL_TYPES)


@each_model
def test_logits_are_those_of_transformers(name, ids, tmp_path, record_property):
    theirs, ours = both(tmp_path, name)
    with torch.no_grad():
        wanted = theirs(ids, attention_mask=REAL.long()).logits
        actual = ours.head(ours(ids))
    record_property("difference", furthest(actual[REAL], wanted[REAL]))
    assert furthest(actual[REAL], wanted[REAL]) < NEAR


@pytest.mark.parametrize(("name", "architecture"), READERS)
def test_heads_that_write_nothing_read_the_same(name, architecture, ids, tmp_path):
    theirs, ours = both(tmp_path, name, architecture)
    with torch.no_grad():
        output, x = theirs(ids, attention_mask=REAL.long()), ours(ids)
        if architecture.endswith("ForSequenceClassification"):
            assert furthest(output.logits, ours.head(x, LENGTHS)) < NEAR
        elif architecture.endswith("ForTokenClassification"):
            assert furthest(output.logits[REAL], ours.head(x)[REAL]) < NEAR
        else:
            assert furthest(output.last_hidden_state[REAL], ours.head(x)[REAL]) < NEAR


@each_model
def test_steps_with_a_state_equal_their_forward_and_their_cache(name, tmp_path):
    theirs, ours = both(tmp_path, name)
    ids = torch.randint(1, 61, (2, 11))
    with torch.no_grad():
        wanted = theirs(ids).logits
        state = ours.start(2, 11)
        cached = None
        for start, stop in ((0, 5), (5, 6), (6, 9), (9, 10), (10, 11)):
            part = ids[:, start:stop]
            actual, state = ours.step(part, state, all_logits=True)
            output = theirs(part, past_key_values=cached, use_cache=True)
            cached = output.past_key_values
            assert furthest(actual, wanted[:, start:stop]) < NEAR
            assert furthest(actual, output.logits) < NEAR


@each_model
def test_a_model_comes_back_bit_for_bit_and_writes_the_same(name, tmp_path):
    theirs = small(name)
    theirs.save_pretrained(tmp_path / "theirs")
    import_run(tmp_path / "theirs", tmp_path / "run")
    done = export_run(tmp_path / "run", tmp_path / "ours", SETTINGS[name][0])
    assert done.difference < NEAR

    before, after = (load_file(tmp_path / who / "model.safetensors") for who in ("theirs", "ours"))
    assert set(before) == set(after)
    assert all(torch.equal(before[part], after[part]) for part in before)
    first, second = (
        open_checkpoint(tmp_path / "theirs"),
        open_checkpoint(tmp_path / "ours"),
    )
    assert without_dropout(first.config) == without_dropout(second.config)

    prompt = [3, 14, 15, 9]
    again = type(theirs).from_pretrained(tmp_path / "ours").eval()
    wanted = again.generate(
        torch.tensor([prompt]),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    (actual,) = generate(second.load().eval(), [prompt], parse_chain(["greedy"]), max_new_tokens=12)
    assert actual == wanted[0, len(prompt) :].tolist()


def without_dropout(config):
    return replace(config, dropout=0.0, attention_dropout=0.0)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "phi3", "bloom"])
def test_gradients_are_those_of_transformers(name, ids, tmp_path):
    theirs, ours = both(tmp_path, name)
    targets = torch.where(REAL[:, 1:], ids[:, 1:], -1)
    scored = REAL[:, 1:].sum()
    labels = torch.where(REAL, ids, -100)
    theirs(ids, attention_mask=REAL.long(), labels=labels).loss.backward()
    (ours.head.loss(ours(ids[:, :-1]), targets) / scored).backward()

    checkpoint = open_checkpoint(tmp_path)
    gradients = {part: weight.grad for part, weight in ours.named_parameters()}
    wanted = {part: weight.grad for part, weight in theirs.named_parameters()}
    for mapping in checkpoint.plan.mappings:
        joined = mapping.layout.join([gradients[part] for part in mapping.internal])
        assert furthest(joined, wanted[mapping.external]) < NEAR
    assert all(part.abs().max() > 0 for part in gradients.values())


@pytest.mark.parametrize("name", ["mistral", "qwen2-windowed", "phi3-windowed", "gemma2"])
def test_the_window_is_felt(name, ids, tmp_path):
    theirs, _ = both(tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    blind = replace(checkpoint, config=replace(checkpoint.config, window=None, global_every=None))
    ours = blind.load().eval()
    with torch.no_grad():
        assert furthest(ours.head(ours(ids))[REAL], theirs(ids).logits[REAL]) > 100 * NEAR


@pytest.mark.parametrize(("name", "length"), [("phi3-long", 20), ("llama-dynamic", 48)])
@torch.no_grad()
def test_texts_longer_than_the_original_context_are_scaled_as_theirs(name, length, tmp_path):
    theirs, _ = both(tmp_path, name)
    ours = open_checkpoint(tmp_path).with_settings({"context": 64}).load().eval()
    for time in (length, 9, length):  # the scaling follows the length of each text
        ids = torch.randint(1, 61, (2, time))
        assert furthest(ours.head(ours(ids)), theirs(ids).logits) < NEAR
    assert decoding_path(ours).name == "plain"  # the fast decoders have fixed tables


def test_half_precision_stays_what_it_is(tmp_path):
    theirs = small("llama").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    import_run(tmp_path / "theirs", tmp_path / "run")
    assert {t.dtype for t in load_file(tmp_path / "run" / "model.safetensors").values()} == {
        torch.bfloat16
    }
    export_run(tmp_path / "run", tmp_path / "ours")
    before, after = (load_file(tmp_path / who / "model.safetensors") for who in ("theirs", "ours"))
    assert all(torch.equal(before[part], after[part]) for part in before)
    assert '"dtype": "bfloat16"' in Path(tmp_path, "ours", "config.json").read_text()
