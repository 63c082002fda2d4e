"""Adapters in PEFT's files: read and written, with the logits that PEFT computes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import regard
from hub import small_encoders
from hub.small import small
from regard.errors import CheckpointError, ConfigError
from regard.hub.external_checkpoint import open_checkpoint
from regard.hub.peft import CONFIG, MODEL, read_adapter, write_adapter
from regard.models.build import load_weights, weights
from regard.nn.lora import Adapter, LoRALinear, add_lora
from regard.nn.state import Source
from regard.training.import_export import imported_model_type

pytestmark = pytest.mark.parity

IDS = torch.arange(22).view(2, 11) + 3
MODELS = {
    "gpt2": None,
    "gpt_neox": None,
    "llama": None,
    "phi3": None,
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
}
MORE = {
    "bloom": None,
    "opt": None,
    "qwen3": None,
    "gemma2": None,
    "roberta": "RobertaForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "albert": "AlbertForMaskedLM",
    "marian": "MarianMTModel",
}
NEAR = 1e-5  # the order of float32 sums differs


@pytest.fixture(autouse=True)
def _quiet():
    pytest.importorskip("peft")
    pytest.importorskip("transformers").utils.logging.disable_progress_bar()


def checkpoint(folder, name):
    """A small model of transformers, and the same here."""
    architecture = (MODELS | MORE)[name]
    theirs = small_encoders.small(name, architecture) if architecture else small(name)
    theirs.save_pretrained(folder)
    opened = open_checkpoint(folder)
    return theirs.eval(), opened.load().eval(), opened.config


def logits(model, config):
    source = (
        None if config.architecture != "encoder-decoder" else Source(IDS, torch.tensor([11, 11]))
    )
    return model.head(model(IDS, **({} if source is None else {"source": source})))


def their_logits(model, config):
    pair = {"decoder_input_ids": IDS} if config.architecture == "encoder-decoder" else {}
    with torch.no_grad():
        return model(input_ids=IDS, **pair).logits


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT on Conv1D, and on tied weights
@pytest.mark.parametrize(
    "name", [*MODELS, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)]
)
def test_peft_computes_our_logits_and_we_theirs(name, tmp_path):
    import peft

    base = str(tmp_path / "base")
    theirs, ours, config = checkpoint(tmp_path / "base", name)
    before = {n: t.clone() for n, t in weights(ours).items()}
    add_lora(ours, ["*.query", "*.value", "*.down"], rank=2, alpha=6.0)
    for layer in ours.modules():
        if isinstance(layer, LoRALinear):
            nn.init.normal_(layer.lora_B, std=0.3)
    adapter = Adapter.of(weights(ours), 6.0)
    (tmp_path / "ours").mkdir()
    write_adapter(
        tmp_path / "ours", adapter, config, base="base", model_type=imported_model_type(base)
    )
    adapted = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "ours")).eval()
    expected = logits(ours, config)
    difference = (their_logits(adapted, config) - expected).abs().max().item()
    assert difference < NEAR
    again = read_adapter(tmp_path / "ours", config)
    assert set(adapter.layers) <= set(again.layers)  # q and v of one matrix: k is 0
    plain = open_checkpoint(tmp_path / "base").load().eval()
    load_weights(plain, again.merge(before), "adapter")
    assert (logits(plain, config) - expected).abs().max().item() < NEAR

    unloaded = adapted.unload()
    linear = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", use_rslora=True)
    trained = peft.get_peft_model(unloaded, linear)
    for n, p in trained.named_parameters():
        if "lora_B" in n:
            nn.init.normal_(p, std=0.2)
    trained.eval().save_pretrained(str(tmp_path / "theirs"))
    load_weights(plain, read_adapter(tmp_path / "theirs", config).merge(before), "adapter")
    wanted = their_logits(trained, config)
    assert (logits(plain, config) - wanted).abs().max().item() < NEAR
    assert (wanted - expected).abs().max().item() > 0.01


def test_a_pattern_that_begins_with_a_caret_is_that_of_the_whole_name(tmp_path):
    from peft.utils.other import get_pattern_key

    _, ours, config = checkpoint(tmp_path / "base", "gpt2")
    add_lora(ours, ["*.out"], rank=2, alpha=6.0)
    (tmp_path / "ours").mkdir()
    write_adapter(tmp_path / "ours", Adapter.of(weights(ours), 6.0), config, base="x")
    settings = json.loads((tmp_path / "ours" / CONFIG).read_text())
    full = "transformer.h.0.attn.c_proj"
    for pattern, matches in ((f"^{full}", True), ("^attn.c_proj", False), ("attn.c_proj", True)):
        settings["alpha_pattern"] = {pattern: 60.0}
        (tmp_path / "ours" / CONFIG).write_text(json.dumps(settings))
        *_, scale = read_adapter(tmp_path / "ours", config).layers["decoder.blocks.0.attention.out"]
        assert scale == (30.0 if matches else 3.0)
        assert (get_pattern_key([pattern], full) == pattern) == matches


def test_what_is_not_understood_is_refused_with_what_was_seen(tmp_path):
    _, ours, config = checkpoint(tmp_path / "base", "gpt2")
    add_lora(ours, ["*.query"], rank=2, alpha=6.0)
    adapter = Adapter.of(weights(ours), 6.0)
    (tmp_path / "ours").mkdir()
    write_adapter(tmp_path / "ours", adapter, config, base="x")
    settings = json.loads((tmp_path / "ours" / CONFIG).read_text())
    assert (settings["r"], settings["lora_alpha"], settings["fan_in_fan_out"]) == (2, 6.0, True)
    for change, message in (
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not supported"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"lora_alpha": None}, "'lora_alpha' must be a number up to 1,000,000, not None"),
        ({"lora_alpha": float("nan")}, "not nan"),
        ({"lora_alpha": 10**400}, "not 1000"),
        ({"alpha_pattern": ["c_attn"]}, "alpha_pattern must be an object, not"),
        ({"alpha_pattern": {"c_attn": "z"}}, "'c_attn' must be a number up to 1,000,000, not 'z'"),
        ({"alpha_pattern": {"(a*)*": 1}}, "alpha_pattern"),
        ({"alpha_pattern": {".*" * 12 + "x": 1}}, r"alpha_pattern: '\.\*.* is not supported"),
        ({"alpha_pattern": {"(a": 1}}, "is not a regular expression"),
    ):
        (tmp_path / "ours" / CONFIG).write_text(json.dumps(settings | change))
        with pytest.raises(ConfigError, match=message):
            read_adapter(tmp_path / "ours", config)
    (tmp_path / "ours" / CONFIG).write_text(json.dumps(settings))
    sound = load_file(tmp_path / "ours" / MODEL)
    a, b = (f"base_model.model.transformer.h.0.attn.c_attn.lora_{part}.weight" for part in "AB")
    wrong = (torch.zeros(()), torch.zeros(0, 32), torch.zeros(2, 31), sound[a].T.contiguous())
    whole = {"base_model.model.transformer.wte.weight": torch.zeros(3)}
    for change, message in (
        *(({a: tensor}, "lora_A of .* does not fit the model") for tensor in wrong),
        *(({b: tensor}, "lora_B of .* does not fit the model") for tensor in wrong[:2]),
        ({b: sound[b] + float("inf")}, "lora_B.weight' has values that are not finite"),
        (whole, "the weight of .* does not fit the model"),
    ):
        save_file(sound | change, tmp_path / "ours" / MODEL)
        with pytest.raises(CheckpointError, match=message):
            read_adapter(tmp_path / "ours", config)
    (tmp_path / "ours" / MODEL).unlink()
    (tmp_path / "ours" / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin is a pickle"):
        read_adapter(tmp_path / "ours", config)
    save_file(sound, tmp_path / "ours" / MODEL)
    _, _, llama = checkpoint(tmp_path / "llama", "llama")
    with pytest.raises(CheckpointError, match=r"weight of the model: 'transformer\.h\.0\.attn"):
        read_adapter(tmp_path / "ours", llama)


@pytest.mark.long
def test_the_adapter_of_a_model_trained_here_says_which_base_it_fits(tmp_path):
    """The RoPE of the default model is interleaved, that of its export half-split."""
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 50)
    tiny = {"preset": "tiny-decoder", "dim": 8, "layers": 1, "heads": 2, "context": 16}
    tiny["position"] = {"kind": "rotary", "interleaved": True}
    options = {"steps": 1, "batch": 2, "quiet": True, "baseline": False}
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    regard.train(tmp_path / "a.txt", model=tiny, out=base, **options)
    regard.train(tmp_path / "a.txt", start=str(base), tune="lora", out=tuned, **options)
    note = regard.export(tuned, tmp_path / "adapter").unchecked
    assert f"to export its base model for PEFT: regard export {base} BASE" in note
    assert "with regard, use this adapter on the exported base" in note
    with pytest.raises(
        ConfigError, match=r"is interleaved[\s\S]*regard export RUN BASE, then regard import"
    ):
        regard.load(base, adapter=tmp_path / "adapter")
    regard.export(base, tmp_path / "exported")
    regard.import_model(tmp_path / "exported", tmp_path / "imported")
    adapted = regard.load(tmp_path / "imported", adapter=tmp_path / "adapter")
    ids = IDS % 9
    expected = regard.load(tuned).model
    difference = adapted.model.head(adapted.model(ids)) - expected.head(expected(ids))
    assert difference.abs().max() < NEAR
