"""What is read off a model, against what other libraries read off the same weights."""

import re

import pytest
import torch

from regard.explain import (
    attention_maps,
    direct_logit_attribution,
    integrated_gradients,
    logit_lens,
    token_score,
)
from regard.hub.external_checkpoint import open_checkpoint
from regard.nn.state import Source

pytestmark = pytest.mark.parity

DECODER = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
CASES = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", DECODER | {"num_key_value_heads": 2}),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "mistral": ("MistralForCausalLM", DECODER | {"num_key_value_heads": 2, "sliding_window": 3}),
    "bert": ("BertForMaskedLM", DECODER),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 61, "d_model": 24, "d_kv": 10, "d_ff": 40, "num_layers": 2, "num_heads": 4},
    ),
}
CASES["albert"] = ("AlbertForMaskedLM", DECODER | {"embedding_size": 16})
CASES["vit"] = (
    "ViTForImageClassification",
    {"image_size": 8, "patch_size": 4, "num_channels": 3}
    | {key: DECODER[key] for key in DECODER if "size" in key or "num" in key},
)
IDS = torch.tensor([[5, 17, 3, 44, 5, 17, 9]])
SOURCE = torch.tensor([[8, 2, 60, 33, 12]])


def saved(path, name):
    """A small random model of `transformers` with eager attention, and ours from its folder."""
    import transformers

    architecture, settings = CASES[name]
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**settings, pad_token_id=0)
    config._attn_implementation = "eager"
    theirs = model_class(config).eval()
    for parameter in theirs.parameters():  # larger than the initial weights; T5's are not small
        parameter.data.mul_(1.0 if name == "t5" else 3.0)
    theirs.save_pretrained(path)
    return theirs, open_checkpoint(path).load().eval()


@pytest.mark.parametrize("name", list(CASES))
@torch.no_grad()
def test_attention_maps_are_those_of_eager_transformers(tmp_path, name):
    theirs, ours = saved(tmp_path, name)
    if name == "t5":
        source = Source(SOURCE, torch.tensor([5]))
        maps = attention_maps(ours, lambda: ours(IDS, source=source))
        given = theirs(input_ids=SOURCE, decoder_input_ids=IDS, output_attentions=True)
        expected = {
            "encoder.blocks.{}.attention": given.encoder_attentions,
            "decoder.blocks.{}.attention": given.decoder_attentions,
            "decoder.blocks.{}.cross": given.cross_attentions,
        }
    else:
        inputs = IDS
        if name == "vit":
            inputs = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        maps = attention_maps(ours, lambda: ours(inputs), call=None)
        path = "decoder.blocks.{}.attention"
        if name in ("bert", "vit"):
            path = "encoder.blocks.{}.attention"
        elif name == "albert":  # all layers share one block
            path = "encoder.blocks.0.attention#{}"
        expected = {path: theirs(inputs, output_attentions=True).attentions}
    assert len(maps) == sum(map(len, expected.values()))
    for path, layers in expected.items():
        for number, weights in enumerate(layers):
            assert (maps[path.format(number)] - weights).abs().max() < 1e-5


def test_integrated_gradients_are_captums(tmp_path):
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    theirs, ours = saved(tmp_path, "gpt2")
    position = torch.arange(IDS.shape[1]).unsqueeze(0)

    def logit(embeddings):
        hidden = theirs(inputs_embeds=embeddings, position_ids=position).logits
        return hidden[:, -1, 9]

    x = theirs.transformer.wte(IDS)
    expected = captum.IntegratedGradients(logit).attribute(
        x, torch.zeros_like(x), n_steps=20, internal_batch_size=20
    )
    values, _ = integrated_gradients(ours, IDS, token_score(ours, 9), steps=20)
    assert (values - expected.sum(-1)[0]).abs().max() < 1e-5 * float(values.abs().max().clamp(1))


@torch.no_grad()
def test_the_logit_lens_and_the_parts_of_a_logit_are_those_of_transformer_lens(tmp_path):
    bridges = pytest.importorskip(
        "transformer_lens.model_bridge", reason="transformer_lens is not installed"
    )
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    theirs, _ = saved(tmp_path, "gpt2")
    theirs.transformer.ln_f.weight.fill_(1.0)  # they do not apply it to the parts of a logit
    theirs.transformer.ln_f.bias.zero_()
    theirs.save_pretrained(tmp_path)
    ours = open_checkpoint(tmp_path).load().eval()
    vocabulary = {f"w{n}": n for n in range(61)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0")),
        eos_token="w1",
        pad_token="w0",
    )
    bridge = bridges.TransformerBridge.boot_transformers(
        str(tmp_path), hf_model=theirs, tokenizer=tokenizer
    )
    _, cache = bridge.run_with_cache(IDS)
    streams = cache.accumulated_resid(apply_ln=True)  # (layers + 1, batch, time, dim)
    expected = theirs.lm_head(streams)
    assert (logit_lens(ours, IDS) - expected).abs().max() < 1e-4  # logits of a size of about 20
    components, labels = cache.decompose_resid(return_labels=True)
    scaled = cache.apply_ln_to_stack(components, layer=-1)[:, 0, -1]
    wanted = dict(zip(labels, (scaled @ theirs.lm_head.weight[9]).tolist(), strict=True))
    parts = direct_logit_attribution(ours, IDS, 9)
    assert parts["embedding"] == pytest.approx(wanted["embed"] + wanted["pos_embed"], abs=1e-4)
    by_head, labels = cache.stack_head_results(layer=-1, return_labels=True)
    scaled = cache.apply_ln_to_stack(by_head, layer=-1)[:, 0, -1]
    for label, value in zip(labels, (scaled @ theirs.lm_head.weight[9]).tolist(), strict=True):
        layer, head = re.fullmatch(r"L(\d+)H(\d+)", label).groups()
        expected = pytest.approx(value, abs=1e-4)
        assert parts[f"decoder.blocks.{layer}.attention.{head}"] == expected
    for layer in range(2):
        heads = [v for name, v in parts.items() if name.startswith(f"decoder.blocks.{layer}.att")]
        assert sum(heads) == pytest.approx(wanted[f"{layer}_attn_out"], abs=1e-4)
        assert parts[f"decoder.blocks.{layer}.ffn"] == pytest.approx(
            wanted[f"{layer}_mlp_out"], abs=1e-4
        )
