"""Translations: each depends on its own sentence only."""

import pytest
import torch

from regard.config import RunConfig
from regard.generate import BeamSearch, ContrastiveSearch
from regard.models.build import build_model
from regard.models.transformer import TransformerConfig
from regard.pipelines.pairs import pair_task, translate
from regard.text import train_pair

SENTENCES = ["ab", "b a b a b a b a b a b a", "", "a", "bab aab", "aaaaaaaaaaaaaaaaaaaa"]


@pytest.fixture(scope="module")
def translator():
    """An untrained model: its translations end at their limits."""
    tokenizers = train_pair("char", lambda: iter([("ab ", "abcdef ")]))
    torch.manual_seed(1)
    config = TransformerConfig(
        vocab_size=tokenizers.target.vocab_size,
        source_vocab_size=None if tokenizers.shares_ids else tokenizers.source.vocab_size,
        dim=16,
        layers=1,
        heads=2,
        context=64,
        architecture="encoder-decoder",
    )
    model = build_model(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return model, pair_task(RunConfig(name="pairs", task="seq2seq"), tokenizers), tokenizers


@pytest.mark.parametrize(
    "search",
    [BeamSearch(1), BeamSearch(4), ContrastiveSearch(2)],
    ids=["greedy", "beam", "contrastive"],
)
def test_a_translation_does_not_depend_on_its_neighbours(translator, search):
    one_by_one = translate(*translator, SENTENCES, search=search, rows=1)
    assert len({len(text) for text in one_by_one}) > 2
    assert translate(*translator, SENTENCES, search=search) == one_by_one
    backwards = translate(*translator, SENTENCES[::-1], search=search, rows=4)
    assert backwards[::-1] == one_by_one
