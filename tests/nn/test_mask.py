import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from regard.errors import ShapeError
from regard.nn.attention import Mask

LENGTHS = torch.tensor([5, 2, 0])
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 3], [4, 4, 4, 4, 4]])
AT = torch.arange(5).unsqueeze(0)

KINDS = {
    "none": (Mask.none(), reference.everything),
    "causal": (Mask.causal(), reference.causal),
    "prefix": (Mask.prefix(LENGTHS), reference.prefix(LENGTHS.tolist())),
    "window": (Mask.window(2), reference.window(2)),
    "lengths": (Mask.lengths(LENGTHS), reference.lengths(LENGTHS.tolist())),
    "documents": (Mask.documents(DOCUMENTS), reference.documents(DOCUMENTS.tolist())),
}


def dense(mask):
    allowed = mask.dense(AT, AT)
    allowed = torch.ones(3, 1, 5, 5, dtype=torch.bool) if allowed is None else allowed
    return allowed.expand(3, 1, 5, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_allows_what_its_definition_says(kind):
    mask, allowed = KINDS[kind]
    assert torch.equal(dense(mask), reference.dense(allowed, 3, 5, 5))


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_two_masks_allow_what_both_allow(first, second):
    if first == second == "documents":
        with pytest.raises(ShapeError, match="two document masks"):
            KINDS[first][0] & KINDS[second][0]
        return
    mask = KINDS[first][0] & KINDS[second][0]
    rule = reference.both(KINDS[first][1], KINDS[second][1])
    assert torch.equal(dense(mask), reference.dense(rule, 3, 5, 5))


rows = st.lists(st.integers(0, 6), min_size=3, max_size=3).map(torch.tensor)
simple = st.one_of(
    st.just(Mask.none()),
    st.just(Mask.causal()),
    rows.map(Mask.prefix),
    st.integers(1, 6).map(Mask.window),
    rows.map(Mask.lengths),
)


@given(st.lists(simple, min_size=1, max_size=5), st.booleans())
def test_any_masks_compose_to_the_logical_and(masks, packed):
    masks = [*masks, Mask.documents(DOCUMENTS)] if packed else masks
    whole = masks[0]
    expected = dense(masks[0])
    for mask in masks[1:]:
        whole = whole & mask
        expected = expected & dense(mask)
    assert torch.equal(dense(whole), expected)


def test_a_mask_goes_by_absolute_positions_not_by_indices():
    query_positions, key_positions = torch.tensor([[3], [1]]), torch.arange(5).unsqueeze(0)
    allowed = (Mask.causal() & Mask.window(2)).dense(query_positions, key_positions)
    assert allowed[0, 0, 0].tolist() == [False, False, True, True, False]
    assert allowed[1, 0, 0].tolist() == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("mask", "only_causal", "allows_all"),
    [
        (Mask.none(), False, True),
        (Mask.causal(), True, False),
        (Mask.causal() & Mask.none(), True, False),
        (Mask.causal() & Mask.window(3), False, False),
        (Mask.causal() & Mask.lengths(LENGTHS), False, False),
        (Mask.prefix(LENGTHS), False, False),
        (Mask.prefix(LENGTHS) & Mask.causal(), True, False),
        (Mask.documents(DOCUMENTS), False, False),
    ],
)
def test_a_mask_knows_when_the_kernel_can_do_without_it(mask, only_causal, allows_all):
    assert mask.only_causal is only_causal
    assert mask.allows_all is allows_all


def test_a_window_must_hold_the_token_itself():
    with pytest.raises(ShapeError, match="window=0 must be at least 1"):
        Mask.window(0)


def test_documents_are_told_apart_by_place_where_positions_begin_anew():
    at = torch.tensor([[0, 1, 2, 0, 1]])
    mask = Mask.causal() & Mask.documents(torch.tensor([[0, 0, 0, 1, 1]]))
    allowed = mask.dense(at, at)[0, 0]
    assert allowed[3:, :3].sum() == 0
    assert allowed[3:, 3:].tolist() == [[True, False], [True, True]]
