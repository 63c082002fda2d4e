import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data.loader import (
    PairLoader,
    TextLoader,
    _bucket_lengths,
    prefetch,
    sequential_blocks,
    sliding_windows,
)
from regard.data.token_store import PairStore, TokenStore
from regard.errors import ConfigError, DataError
from regard.seeds import permute


def text_of(length: int) -> TokenStore:
    return TokenStore(np.arange(length, dtype=np.uint32), length, "f")


def pairs_of(sources, targets) -> PairStore:
    def flat(lengths):
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return np.zeros(offsets[-1], np.uint16), offsets

    return PairStore(*flat(sources), *flat(targets), "f")


def random_pairs(count: int, max_length: int = 60, seed: int = 0) -> PairStore:
    random = np.random.default_rng(seed)
    return pairs_of(random.integers(1, max_length, count), random.integers(1, max_length, count))


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4097])
@pytest.mark.parametrize("key", [0, 1, 2**63 + 5])
def test_permute_visits_everything_once(size, key):
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@settings(max_examples=50)
@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection_for_any_size_and_key(size, key):
    assert len(set(permute(np.arange(size), size, key).tolist())) == size


def test_permute_of_one_index_does_not_depend_on_the_others():
    every = permute(np.arange(1000), 1000, 7)
    assert [int(permute(np.array([i]), 1000, 7)[0]) for i in range(0, 1000, 97)] == every[
        ::97
    ].tolist()


def test_permute_reaches_sizes_that_would_never_fit_in_memory():
    size = 10**13
    places = permute(np.arange(1000), size, 3)
    assert len(set(places.tolist())) == 1000
    assert places.max() < size
    assert 0.4 < places.mean() / size < 0.6


def test_permute_looks_shuffled():
    size = 20_000
    for key in range(3):
        places = permute(np.arange(size), size, key)
        assert abs(np.corrcoef(np.arange(size), places)[0, 1]) < 0.03
        assert (np.abs(np.diff(places)) == 1).sum() < 20
    moved = permute(np.arange(size), size, 1) != permute(np.arange(size), size, 2)
    assert moved.mean() > 0.99


def test_every_block_of_a_text_is_visited_once_an_epoch():
    loader = TextLoader(text_of(1003), context=10, batch=9, seed=1)
    assert loader.blocks == 99
    assert loader.steps_per_epoch == 11
    offsets, orders = set(), set()
    for epoch in range(20):
        rows = np.concatenate([loader.examples(epoch * 11 + i) for i in range(11)])
        assert rows.shape == (99, 11)
        assert rows.dtype == np.int64
        assert np.array_equal(rows, rows[:, :1] + np.arange(11))
        starts = np.sort(rows[:, 0])
        offsets.add(int(starts[0]))
        orders.add(tuple(rows[:, 0] - starts[0]))
        assert np.array_equal(starts, starts[0] + 10 * np.arange(99))
    assert min(offsets) >= 0
    assert max(offsets) <= 9
    assert len(offsets) > 5
    assert len(orders) == 20


def test_a_batch_may_run_on_into_the_next_epochs():
    loader = TextLoader(text_of(35), context=10, batch=7, seed=1)
    assert loader.blocks == 2
    numbers = np.concatenate([loader.examples(step) for step in range(2)])[:, 0]
    for epoch in range(7):
        first, second = sorted(numbers[2 * epoch : 2 * epoch + 2])
        assert second - first == 10


@pytest.mark.parametrize("length", [11, 12, 20, 21, 29, 30, 31])
def test_the_shortest_texts_stay_inside(length):
    loader = TextLoader(text_of(length), context=10, batch=4, seed=1)
    seen = np.concatenate([loader.examples(step) for step in range(100)])
    assert seen.max() <= length - 1
    if length > 11:
        assert seen.min() == 0
        assert seen.max() == min(length - 1, loader.blocks * 10 + 9)


def test_a_step_is_a_pure_function_of_seed_and_number():
    one, two = (TextLoader(text_of(500), 8, 5, seed=3) for _ in range(2))
    for step in (40, 2, 17):
        assert np.array_equal(one.examples(step), two.examples(np.int64(step)))
    other = TextLoader(text_of(500), 8, 5, seed=4)
    assert not np.array_equal(one.examples(2), other.examples(2))


def test_a_text_shorter_than_a_block_says_what_would_fit():
    with pytest.raises(DataError, match=r"10 tokens(.|\n)*model.context=9"):
        TextLoader(text_of(10), context=10, batch=2, seed=1)
    TextLoader(text_of(10), context=9, batch=2, seed=1).examples(0)


@pytest.mark.parametrize("length", [2, 9, 10, 11, 12, 41, 47, 80])
@pytest.mark.parametrize("limit", [None, 1, 10, 25])
def test_in_order_every_token_after_the_first_is_a_target_once(length, limit):
    tokens = text_of(length).tokens
    seen = []
    for ids, targets in sequential_blocks(tokens, 10, 3, limit):
        assert ids.shape == targets.shape
        assert ids.shape[0] <= 3
        assert ids.shape[1] == 10
        scored = targets >= 0
        assert np.array_equal(ids[scored] + 1, targets[scored])
        assert (ids[~scored] == 0).all()
        seen += targets[scored].tolist()
    assert seen == list(range(1, min(length, 10**9 if limit is None else limit + 1)))


@pytest.mark.parametrize("stride", [1, 3, 5, 9])
@pytest.mark.parametrize(
    ("length", "limit"), [(100, None), (100, 57), (11, None), (5, None), (2, 1)]
)
def test_windows_score_every_token_once_with_the_context_that_the_stride_leaves(
    length, limit, stride
):
    tokens, context, scored = text_of(length).tokens, 10, []
    for ids, targets in sliding_windows(tokens, context, stride, 3, limit):
        assert ids.shape[1] == context
        assert len(ids) <= 3
        for row, ends in zip(ids.tolist(), targets.tolist(), strict=True):
            for place, target in enumerate(ends, context - len(ends)):
                if target == -1:
                    continue
                (position,) = (i for i in range(1, length) if tokens[i] == target)
                scored.append(position)
                assert row[: place + 1] == tokens[position - place - 1 : position].tolist()
                assert place + 1 >= min(position, context - stride + 1)
    assert sorted(scored) == list(range(1, (limit or length - 1) + 1))


def test_the_loader_gives_its_text_in_order():
    loader = TextLoader(text_of(48), context=10, batch=3, seed=1)
    batches = list(loader.sequential())
    assert [ids.shape for ids, _ in batches] == [(3, 10), (2, 10)]
    assert batches[1][1][1, 6:].tolist() == [47, -1, -1, -1]
    with pytest.raises(DataError, match="at least 2 are needed"):
        list(sequential_blocks(text_of(1).tokens, 10, 3))


def test_the_list_of_bucket_lengths_is_fixed():
    assert _bucket_lengths(200) == [8, 16, 24, 32, 40, 56, 72, 96, 120, 152, 192, 200]
    assert _bucket_lengths(8) == [8]
    assert _bucket_lengths(5) == [5]
    long = _bucket_lengths(4096)
    assert all(big / small <= 1.5 for small, big in pairwise(long[2:]))


@pytest.mark.parametrize("options", [{"tokens": 256}, {"tokens": None, "batch": 12}])
def test_every_pair_is_visited_once_an_epoch(options):
    store = random_pairs(1000)
    loader = PairLoader(store, seed=1, max_length=64, **options)
    needed = np.maximum(store.source_lengths, store.target_lengths) + 1
    lengths, batches = set(), set()
    for epoch in range(3):
        counts, shapes, order = np.zeros(1000, int), set(), []
        for step in range(loader.steps_per_epoch):
            rows = loader.examples(epoch * loader.steps_per_epoch + step)
            assert (needed[rows.indices] <= rows.length).all()
            shapes.add((len(rows.indices), rows.length))
            np.add.at(counts, rows.indices, 1)
            order.append(rows.length)
            batches.add(frozenset(rows.indices.tolist()))
        assert counts.min() == 1
        narrowest = loader.buckets[0]
        assert counts.sum() - 1000 < narrowest.rows  # only what fills the narrowest bucket
        assert len(shapes) == len(loader.buckets)
        lengths.add(tuple(order))
    assert len(lengths) == 3  # another order of buckets …
    assert (
        len(batches) > 2 * loader.steps_per_epoch
    )  # … and of the pairs inside them in every epoch


def test_a_bucket_has_as_many_rows_as_fill_the_tokens():
    loader = PairLoader(random_pairs(1000), 256, 1, max_length=64)
    assert {bucket.length: bucket.rows for bucket in loader.buckets} == {
        length: 256 // length for length in (8, 16, 24, 32, 40, 56, 64)
    }
    wide = PairLoader(pairs_of([100, 100], [3, 3]), 10, 1, max_length=200)
    assert len(wide.examples(0).indices) == 1


def test_pairs_of_like_length_stand_together():
    store = random_pairs(5000)
    loader = PairLoader(store, 512, 1, max_length=64)
    needed = np.maximum(store.source_lengths, store.target_lengths) + 1
    used = total = 0
    for step in range(loader.steps_per_epoch):
        rows = loader.examples(step)
        used += needed[rows.indices].sum()
        total += len(rows.indices) * rows.length
    assert used / total > 0.85


def test_few_long_pairs_are_joined_by_shorter_ones_not_repeated():
    loader = PairLoader(
        pairs_of([4] * 100 + [30], [4] * 100 + [30]), None, 1, max_length=64, batch=10
    )
    steps = [loader.examples(step) for step in range(loader.steps_per_epoch)]
    wide = next(rows for rows in steps if 100 in rows.indices)
    assert wide.length == 32
    assert len(set(wide.indices.tolist())) == 10
    assert loader.steps_per_epoch == 11  # 101 pairs


def test_a_step_of_pairs_is_a_pure_function_of_seed_and_number():
    one, two = (PairLoader(random_pairs(300), 200, 3, max_length=64) for _ in range(2))
    for step in (400, 2, 17):
        first, second = one.examples(step), two.examples(np.int64(step))
        assert first.length == second.length
        assert np.array_equal(first.indices, second.indices)
    other = PairLoader(random_pairs(300), 200, 4, max_length=64)
    assert any(
        not np.array_equal(one.examples(step).indices, other.examples(step).indices)
        for step in range(3)
    )


def test_pairs_too_long_are_dropped_and_counted():
    loader = PairLoader(pairs_of([3, 15, 16, 9], [3, 3, 3, 16]), None, 1, max_length=16, batch=2)
    assert loader.dropped == 2
    assert len(loader) == 2
    seen = {int(i) for step in range(10) for i in loader.examples(step).indices}
    assert seen == {0, 1}
    with pytest.raises(DataError, match=r"all 2 pairs need more than 8 positions.*needs 10"):
        PairLoader(pairs_of([9, 20], [1, 1]), None, 1, max_length=8, batch=2)
    with pytest.raises(ConfigError, match="no batch size"):
        PairLoader(pairs_of([9], [1]), None, 1, max_length=16)


def test_fewer_pairs_than_rows_fill_a_batch_by_beginning_again():
    loader = PairLoader(pairs_of([3, 3, 3], [3, 3, 3]), None, 1, max_length=16, batch=7)
    indices = loader.examples(0).indices.tolist()
    assert len(indices) == 7
    assert indices[:3] == indices[3:6]
    assert sorted(indices[:3]) == [0, 1, 2]


def test_in_order_every_pair_comes_once_by_length():
    store = random_pairs(100)
    loader = PairLoader(store, 128, 1, max_length=64)
    batches = list(loader.sequential())
    assert sorted(int(i) for rows in batches for i in rows.indices) == list(range(100))
    lengths = [rows.length for rows in batches]
    assert lengths == sorted(lengths)


def test_in_order_with_a_limit_is_a_fixed_sample_of_all_lengths():
    store = random_pairs(1000)
    sample = [
        int(i)
        for rows in PairLoader(store, 128, 1, max_length=64).sequential(50)
        for i in rows.indices
    ]
    again = [
        int(i)
        for rows in PairLoader(store, 128, 1, max_length=64).sequential(50)
        for i in rows.indices
    ]
    assert sample == again
    assert len(set(sample)) == 50
    needed = np.maximum(store.source_lengths, store.target_lengths)
    assert abs(needed[sample].mean() - needed.mean()) < 5


@pytest.fixture
def prefetching():
    """How many threads prefetch that did not when the test began."""
    before = threading.enumerate()
    return lambda: sum(t.name == "prefetch" and t not in before for t in threading.enumerate())


def test_prefetch_hands_out_in_order_from_another_thread(prefetching):
    makers = set()

    def make(step):
        makers.add(threading.current_thread().name)
        return step * step

    assert list(prefetch(make, 3, 50)) == [step * step for step in range(3, 50)]
    assert makers == {"prefetch"}
    assert prefetching() == 0
    assert list(prefetch(make, 5, 5)) == []


def test_prefetch_stays_only_so_far_ahead():
    made = threading.Semaphore(0)
    steps = []

    def make(step):
        steps.append(step)
        made.release()
        return step

    stream = prefetch(make, 0, 100, ahead=3)
    assert next(stream) == 0
    for _ in range(4):  # the one handed out and three waiting
        assert made.acquire(timeout=5)
    assert not made.acquire(timeout=0.05)
    assert steps == [0, 1, 2, 3]
    stream.close()


def test_prefetch_raises_what_make_raised_in_its_turn(prefetching):
    def make(step):
        if step == 2:
            raise DataError("step 2 is bad")
        return step

    stream = prefetch(make, 0, 10)
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(DataError, match="step 2 is bad"):
        next(stream)
    assert prefetching() == 0


def test_prefetch_ends_its_thread_when_left_early(prefetching):
    for _ in prefetch(lambda step: step, 0, 10**9):
        break
    stream = prefetch(lambda step: step, 0, 10**9)
    next(stream)
    stream.close()
    assert prefetching() == 0
    prefetch(lambda step: step, 0, 10)  # never begun, so no thread either
    assert prefetching() == 0
