"""The prefix LM: bidirectional within the prompt, causal after it."""

import pytest
import torch

from regard.accel.description import UnsupportedModelError, inspect_decoder
from regard.data.batch import TextBatch
from regard.errors import ConfigError
from regard.explain.attention import attention_maps
from regard.explain.labelled_maps import self_attention
from regard.generate import (
    CudaGraphDecoder,
    PromptLookup,
    generate,
    generate_speculative,
    parse_chain,
)
from regard.generate.decode import prefill
from regard.hub.config_json import write_config
from regard.models.build import build_model, preset
from regard.nn.attention import Mask
from regard.nn.loss import IGNORE_INDEX
from regard.tasks import Causal
from regard.text import train_tokenizer


@pytest.fixture
def model():
    config = preset(
        "tiny-decoder", vocab_size=11, dim=16, layers=2, heads=2, context=16, prefix=True
    )
    return build_model(config).eval()


def test_a_prompt_is_read_bidirectionally_and_what_follows_causally(model):
    rows = [[1, 2, 3, 4], [5, 6]]
    logits, state = prefill(model, rows, 8, None)
    for row, prompt in enumerate(rows):
        ids = torch.tensor([prompt])
        hidden = model(ids, mask=Mask.prefix(torch.tensor([len(prompt)])))
        torch.testing.assert_close(logits[row], model.head(hidden)[0, -1], rtol=0, atol=1e-5)
        causal = model.head(model(ids))[0, -1]
        assert len(prompt) < 3 or not torch.allclose(logits[row], causal, atol=1e-4)
    new = torch.tensor([[7], [8]])
    logits, _ = model.step(new, state)
    ids = torch.tensor([[*rows[0], 7]])
    hidden = model(ids, mask=Mask.prefix(torch.tensor([4])))
    torch.testing.assert_close(logits[0, -1], model.head(hidden)[0, -1], rtol=0, atol=1e-5)
    (first,) = generate(model, [rows[0]], parse_chain(["greedy"]), max_new_tokens=3, seed=1)
    (second,) = generate(model, [rows[0]], parse_chain(["greedy"]), max_new_tokens=3, seed=1)
    assert first == second


def test_the_attention_of_a_text_is_that_of_a_prompt(model):
    ids = [1, 2, 3, 4]
    maps = self_attention(model, train_tokenizer("char", ["abcd"]), ids, layers=[1])
    path = "decoder.blocks.1.attention"
    generated = attention_maps(model, lambda: prefill(model, [ids], 8, None), pattern=path)
    torch.testing.assert_close(maps[path].weights, generated[path][0, :, :, :4])
    assert (maps[path].weights > 0).all()


def test_training_scores_what_follows_a_random_prefix(model):
    ids = torch.arange(48).view(3, 16) % 11
    block = ids.numpy()
    batch = Causal().collate_with_prefixes(
        (block[:, :-1], block[:, 1:]), torch.Generator().manual_seed(1)
    )
    assert batch.prefix_lengths.unique().numel() > 1
    for row in range(3):
        scored = (batch.targets[row] != IGNORE_INDEX).nonzero().flatten()
        assert scored.tolist() == list(range(int(batch.prefix_lengths[row]) - 1, 15))
    hidden = model(batch.ids, mask=Mask.prefix(batch.prefix_lengths))
    expected = model.head.loss(hidden, batch.targets)
    torch.testing.assert_close(Causal().loss(model, batch), expected)
    window = TextBatch(batch.ids, ids[:, 1:][:, -4:])  # of an evaluation: 4 tokens are scored
    hidden = model(batch.ids, mask=Mask.prefix(torch.full((3,), 12)))[:, -4:]
    torch.testing.assert_close(
        Causal().loss(model, window), model.head.loss(hidden, window.targets)
    )


def test_glm_is_a_prefix_lm_and_what_cannot_express_it_says_so(model):
    assert preset("glm-130b").prefix
    with pytest.raises(UnsupportedModelError, match="bidirectionally"):
        inspect_decoder(model)
    with pytest.raises(ConfigError):
        write_config(model.config)
    with pytest.raises(ConfigError, match="prefix=true is for a decoder"):
        preset("tiny-encoder", prefix=True)
    for language in (model, CudaGraphDecoder(model)):
        with pytest.raises(ConfigError, match="does not support a prefix LM"):
            generate_speculative(
                language, [[1, 2]], parse_chain(["greedy"]), draft=PromptLookup(), max_new_tokens=3
            )
