"""Read the atom mapping of chemical reactions from one attention head (Schwaller et al. 2021).

    REGARD_DATA=DATA python bench/atom_mapping.py [--out FOLDER]

DATA/weights/rxnmapper_albert has the published weights, an ALBERT that reads a reaction as SMILES,
and golden.json, reactions with their published confidences. Head 5 of layer 10 attends from each
atom of the product to the corresponding atom of the reactants. Prints each reaction with its atoms
numbered, and its confidence with the published one; --out writes the attention of all
layers and heads as pages.
"""

import argparse
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch

from regard.explain import AttentionMap, AttentionMaps, attention_maps
from regard.hub.external_checkpoint import open_checkpoint

LAYER, HEAD = 10, 5
NEIGHBOUR_FACTOR = 90  # multiplies the weights between the neighbours of two mapped atoms
SMILES = re.compile(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|.")
ATOM = re.compile(r"\[?\d*([A-Z][a-z]?|[a-z])(?:[^:]*:(\d+)\])?")


@dataclass
class Molecules:
    """The atoms of one side of a reaction, and the bonds between them."""

    elements: list[str] = field(default_factory=list)
    numbers: list[str | None] = field(default_factory=list)  # in a SMILES with atom numbers
    positions: list[int] = field(default_factory=list)  # indices of the atoms' tokens
    bonds: set[frozenset[int]] = field(default_factory=set)

    def neighbours(self, atom):
        """The atoms that have a bond with an atom."""
        return [other for bond in self.bonds if atom in bond for other in bond - {atom}]


def parse(tokens):
    """Molecules from SMILES: an atom is bonded to the one before, or by branches and rings."""
    side, before, branches, rings = Molecules(), None, [], {}
    for position, token in enumerate(tokens):
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
            side.positions.append(position)
            if before is not None:
                side.bonds.add(frozenset((before, atom)))
            before = atom
    return side


def split_reaction(reaction):
    """The tokens of a reaction, its reactants and products, and the index of the arrow."""
    tokens = SMILES.findall(reaction)
    arrow = tokens.index(">>")
    return tokens, parse(tokens[:arrow]), parse(tokens[arrow + 1 :]), arrow


def map_atoms(weights, reactants, products):
    """The reactant atom of each product atom, and the confidence; greedy, most probable pair first.

    `weights` (products, reactants) is the attention in both directions, added. After each pair, the
    weights between its neighbours are multiplied by `NEIGHBOUR_FACTOR`.
    """
    same = [[element == other for other in reactants.elements] for element in products.elements]
    weights = weights.double() * torch.tensor(same)
    pairs, confidence = {}, 1.0
    for _ in products.elements:
        probabilities = weights / weights.sum(1, keepdim=True).clamp_min(1e-300)
        product, reactant = divmod(int(probabilities.argmax()), len(reactants.elements))
        pairs[product] = reactant
        confidence *= float(probabilities[product, reactant])
        for neighbour in products.neighbours(product):
            weights[neighbour, reactants.neighbours(reactant)] *= NEIGHBOUR_FACTOR
        weights[product], weights[:, reactant] = 0, 0
    return pairs, confidence


def atom_weights(model, vocabulary, reaction):
    """The attention between product and reactant atoms, in both directions, added."""
    tokens, reactants, products, arrow = split_reaction(reaction)
    ids = torch.tensor([[vocabulary[token] for token in ("[CLS]", *tokens, "[SEP]")]])
    # all layers share one block, so that `call` is the index of the layer
    (maps,) = attention_maps(model, lambda: model(ids), call=LAYER, heads=[HEAD]).values()
    weights = maps[0, 0, 1:-1, 1:-1]  # without [CLS] and [SEP]
    after = [arrow + 1 + position for position in products.positions]
    before = reactants.positions
    return weights[after][:, before] + weights[before][:, after].T


def number_atoms(reaction, pairs):
    """The reaction with the numbers of its mapped atoms, as in [C:1]; without hydrogen counts."""
    tokens, reactants, products, arrow = split_reaction(reaction)
    for product, reactant in pairs.items():
        number = product + 1
        for side, atom, start in ((products, product, arrow + 1), (reactants, reactant, 0)):
            tokens[start + side.positions[atom]] = f"[{side.elements[atom]}:{number}]"
    return "".join(tokens)


def read_vocabulary(folder):
    """The id of each token."""
    tokens = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
    return {token: id for id, token in enumerate(tokens)}


@torch.no_grad()
def main():
    """Map the published reactions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    folder = Path(os.environ["REGARD_DATA"]) / "weights" / "rxnmapper_albert"
    model, vocabulary = open_checkpoint(folder).load().eval(), read_vocabulary(folder)
    for number, published in enumerate(json.loads((folder / "golden.json").read_text())):
        reaction = published["rxn"]
        tokens, reactants, products, _ = split_reaction(reaction)
        weights = atom_weights(model, vocabulary, reaction)
        pairs, confidence = map_atoms(weights, reactants, products)
        print(number_atoms(reaction, pairs))
        print(f"confidence {confidence:.7f}, published {published['confidence']:.7f}\n")
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            labels = ["[CLS]", *tokens, "[SEP]"]
            ids = torch.tensor([[vocabulary[token] for token in labels]])
            maps = attention_maps(model, lambda ids=ids: model(ids), call=None)
            shown = {name: AttentionMap(labels, labels, w[0]) for name, w in maps.items()}
            AttentionMaps(shown).save(out / f"reaction-{number}.html")


if __name__ == "__main__":
    main()
