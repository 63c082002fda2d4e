"""Encoders and encoder–decoders read from a folder compute what `transformers` does from it."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from hub.small_encoders import ENCODERS, LENGTHS, READERS, WRITERS, pair, results, small
from regard.errors import CheckpointError, ConfigError
from regard.generate import generate, parse_chain
from regard.hub import MODEL_TYPES
from regard.hub.config_json import read_config_as, write_config
from regard.hub.external_checkpoint import open_checkpoint
from regard.models.build import weights
from regard.models.presets import PRESETS
from regard.training.import_export import export_run, import_run

pytestmark = pytest.mark.parity

PAIRS = WRITERS + READERS
FAMILIES = ["bert", "roberta", "distilbert", "albert", "t5", "bart", "marian"]
OLD = {"weight": "gamma", "bias": "beta"}
NEAR = 1e-5  # of results of a size of about 4: the order of float32 sums differs


@pytest.fixture
def opened(tmp_path):
    """A small model of theirs, and ours from the folder that it was saved to."""

    def both(name, architecture):
        theirs = small(name, architecture)
        theirs.save_pretrained(tmp_path)
        return theirs, open_checkpoint(tmp_path).load().eval()

    return both


def furthest(one, two):
    return float((one - two).abs().max())


@pytest.mark.parametrize(("name", "architecture"), ENCODERS + PAIRS)
@torch.no_grad()
def test_a_padded_batch_is_read_as_theirs_is(opened, name, architecture):
    compared = {what: furthest(*both) for what, *both in results(*opened(name, architecture))}
    assert compared
    assert max(compared.values()) < NEAR


@pytest.mark.parametrize(("name", "architecture"), WRITERS)
@torch.no_grad()
def test_steps_with_a_state_give_the_logits_of_the_whole(opened, name, architecture):
    theirs, ours = opened(name, architecture)
    given, target, source = pair(theirs.config)
    wanted = theirs(**given).logits
    state = ours.start(len(target), target.shape[1], source)
    for start, stop in ((0, 4), (4, 5), (5, 8), (8, 9)):
        actual, state = ours.step(target[:, start:stop], state, all_logits=True)
        assert furthest(actual, wanted[:, start:stop]) < NEAR


@pytest.mark.parametrize(("name", "architecture"), WRITERS)
def test_greedy_tokens_are_those_of_their_generate(opened, name, architecture):
    theirs, ours = opened(name, architecture)
    given, _, source = pair(theirs.config)
    start = theirs.config.decoder_start_token_id
    expected = theirs.generate(
        given["input_ids"],
        attention_mask=given["attention_mask"],
        do_sample=False,
        num_beams=1,
        max_new_tokens=20,
        eos_token_id=None,
        forced_eos_token_id=None,
        use_cache=False,  # transformers 5.22 makes it for as many layers as the encoder has
    )
    prompts = [[start]] * len(LENGTHS)
    actual = generate(ours, prompts, parse_chain(["greedy"]), max_new_tokens=20, source=source)
    assert actual == expected[:, 1:].tolist()


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("bert", "BertForMaskedLM"),
        ("albert", "AlbertForMaskedLM"),
        ("t5", "T5ForConditionalGeneration"),
    ],
)
def test_gradients_are_theirs(tmp_path, name, architecture):
    theirs = small(name, architecture)
    theirs.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    ours = checkpoint.load().eval()
    for _, wanted, actual in results(theirs, ours):
        wanted.square().mean().backward()
        actual.square().mean().backward()
    parameters = dict(theirs.named_parameters())
    for mapping in checkpoint.plan.mappings:
        gradients = [ours.get_parameter(part).grad for part in mapping.internal]
        assert furthest(mapping.layout.join(gradients), parameters[mapping.external].grad) < NEAR


@pytest.mark.parametrize(
    ("name", "architecture"),
    [case for case in ENCODERS + PAIRS if case[1] != "BertForNextSentencePrediction"],
)
def test_what_was_read_is_written_bit_for_bit(tmp_path, name, architecture):
    import transformers

    old, run, new = tmp_path / "old", tmp_path / "run", tmp_path / "new"
    small(name, architecture).save_pretrained(old)
    checkpoint = import_run(old, run)
    done = export_run(run, new, checkpoint.model_type.name)
    assert done.architecture == architecture
    if architecture != "BartForSequenceClassification":  # which wants a token of its own at the end
        assert done.difference < NEAR

    before, after = load_file(old / "model.safetensors"), load_file(new / "model.safetensors")
    if architecture == "MarianModel":  # without a head they also save the sines
        before = {part: values for part, values in before.items() if "embed_pos" not in part}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[part], before[part]) for part in before)
    again = open_checkpoint(new)
    assert again.config == checkpoint.config
    assert all(
        map(torch.equal, weights(again.load()).values(), weights(checkpoint.load()).values())
    )
    _, report = getattr(transformers, architecture).from_pretrained(new, output_loading_info=True)
    assert not {part for parts in report.values() for part in parts if "embed_pos" not in part}


def _rewrite(folder, **settings):
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | settings))


def test_the_first_files_of_bert_are_read_as_todays(tmp_path):
    """Norms with gamma and beta, buffers, copies of what is tied, and heads nobody asked for."""
    theirs = small("bert", "BertForPreTraining")
    theirs.save_pretrained(tmp_path)
    before = open_checkpoint(tmp_path).load()
    tensors = load_file(tmp_path / "model.safetensors")
    old = {
        re.sub(
            r"LayerNorm\.(weight|bias)$", lambda match: f"LayerNorm.{OLD[match[1]]}", name
        ): tensor
        for name, tensor in tensors.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(32).unsqueeze(0)
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"].clone()
    save_file(old, tmp_path / "model.safetensors")
    _rewrite(tmp_path, architectures=["BertForMaskedLM"])
    after = weights(open_checkpoint(tmp_path).load())
    assert not {name for name in after if name.startswith(("head.pool", "head.seq_relationship"))}
    assert all(torch.equal(values, weights(before)[name]) for name, values in after.items())


@pytest.mark.parametrize(
    ("name", "architecture", "part", "copy"),
    [
        (
            "bert",
            "BertForMaskedLM",
            "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.weight",
        ),
        ("albert", "AlbertForMaskedLM", "predictions.bias", "predictions.decoder.bias"),
        ("t5", "T5ForConditionalGeneration", "shared.weight", "encoder.embed_tokens.weight"),
        ("bart", "BartForConditionalGeneration", "model.shared.weight", "lm_head.weight"),
        ("marian", "MarianMTModel", "model.shared.weight", "model.decoder.embed_tokens.weight"),
    ],
)
def test_a_copy_of_a_tied_tensor_must_be_equal(tmp_path, name, architecture, part, copy):
    small(name, architecture).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = weights(open_checkpoint(tmp_path).load())
    save_file(tensors | {copy: tensors[part].clone()}, tmp_path / "model.safetensors")
    actual = weights(open_checkpoint(tmp_path).load())
    assert all(torch.equal(actual[part], values) for part, values in expected.items())
    save_file(tensors | {copy: tensors[part] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="should be the same tensor"):
        open_checkpoint(tmp_path).load()


def test_the_sines_in_a_file_of_marian_are_ignored(tmp_path):
    small("marian", "MarianMTModel").save_pretrained(tmp_path)
    expected = weights(open_checkpoint(tmp_path).load())
    tensors = load_file(tmp_path / "model.safetensors")
    for side in ("encoder", "decoder"):
        tensors[f"model.{side}.embed_positions.weight"] = torch.zeros(32, 24)
    save_file(tensors, tmp_path / "model.safetensors")
    actual = weights(open_checkpoint(tmp_path).load())
    assert all(torch.equal(actual[part], values) for part, values in expected.items())


def test_a_t5_saved_by_transformers_5_keeps_its_own_output_matrix(tmp_path):
    """It writes `tie_word_embeddings: true` for every T5, and version 1.1 has two matrices."""
    small("t5-gated", "T5ForConditionalGeneration").save_pretrained(tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    assert table["tie_word_embeddings"] is True
    assert not open_checkpoint(tmp_path).config.tied
    table.pop("scale_decoder_outputs")
    (tmp_path / "config.json").write_text(json.dumps(table | {"tie_word_embeddings": False}))
    assert not open_checkpoint(tmp_path).config.tied  # as the published files say it


@pytest.mark.parametrize("name", FAMILIES)
def test_what_config_json_leaves_out_is_as_in_their_class(name):
    import transformers

    model_type = MODEL_TYPES[name]
    given = {"architectures": [next(iter(model_type.heads))]}
    whole = transformers.AutoConfig.for_model(name).to_dict() | given
    assert read_config_as(model_type, given) == read_config_as(model_type, whole)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_preset_is_of_its_family_and_of_no_other(name):
    model_type, table = write_config(PRESETS[name]())
    assert model_type.name == name
    assert table["architectures"] == [next(iter(model_type.heads))]


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("bert", "is_decoder", True),
        ("bert", "position_embedding_type", "relative_key"),
        ("bert", "tie_word_embeddings", False),
        ("bert", "hidden_act", "mish"),
        ("bert", "type_vocab_size", 0),
        ("roberta", "add_cross_attention", True),
        ("distilbert", "activation", "tanh"),
        ("albert", "num_hidden_groups", 2),
        ("albert", "inner_group_num", 2),
        ("albert", "embedding_size", 4096),
        ("t5", "feed_forward_proj", "gated-tanh"),
        ("bart", "normalize_before", True),
        ("mbart", "normalize_before", False),
        ("deberta-v2", "conv_kernel_size", 3),
        ("deberta-v2", "norm_rel_ebd", "batch_norm"),
        ("deberta-v2", "embedding_size", 128),
        ("deberta-v2", "pos_att_type", "p2c"),
        ("marian", "static_position_embeddings", False),
    ],
)
def test_a_setting_that_has_no_counterpart_is_refused_by_name(name, setting, value):
    shown = str(value).removeprefix("gated-")
    with pytest.raises(ConfigError, match=f"({setting}=|activation ).*{shown}"):
        read_config_as(MODEL_TYPES[name], {setting: value})
