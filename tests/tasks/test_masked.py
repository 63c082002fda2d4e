"""Masked language modelling: what is hidden, who sees whom, how it is scored."""

import math
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

import regard
from regard.data.batch import pin_memory
from regard.errors import ConfigError, DataError
from regard.models.build import build_model, preset
from regard.nn.attention import Mask
from regard.tasks import Masked
from regard.tasks.masked import unigram_metrics
from regard.tasks.vocab_info import CONTINUATION_RULES, VocabInfo
from regard.text import SPECIAL_TOKENS, TOKENIZERS, train_tokenizer
from regard.training.loop import Objective

TEXT = (
    "Assert statements are a convenient way to insert debugging assertions into a program. "
    "The simple form is equivalent to raising an exception! Is it? Formatting 12345 numbers, "
    "un-believable étymologies and other embeddings are shown below.\n"
) * 4
SIZES = {"char": {}, "word": {}, "bpe": {"vocab_size": 300}, "wordpiece": {"vocab_size": 110}}
SIZES["unigram"] = {"vocab_size": 80}
KINDS = {kind: train_tokenizer({"kind": kind, **size}, [TEXT]) for kind, size in SIZES.items()}
TOKENIZER = KINDS["wordpiece"]
SPECIAL = len(SPECIAL_TOKENS)


def masked(kind="wordpiece", **options):
    return Masked(tokenizer=KINDS[kind], **options)


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


def blocks(rows, width, seed=0, size=TOKENIZER.vocab_size):
    """Random ordinary ids, as a loader gives them."""
    ids = np.random.default_rng(seed).integers(SPECIAL, size, (rows, width))
    return ids, ids


def of_text(kind, rows=8, width=60):
    """Stretches of the text."""
    ids = np.array(KINDS[kind].encode(TEXT))
    starts = np.arange(rows) * 7 % (len(ids) - width)
    block = ids[starts[:, None] + np.arange(width)]
    return block, block


def originals(batch):
    """The ids as they were before anything was hidden."""
    ids = batch.ids.clone()
    for row, places, targets in zip(ids, batch.masked_positions, batch.targets, strict=True):
        row[places[targets != -1]] = targets[targets != -1]
    return ids


def model(**fields):
    """An encoder to which it matters where in a row a token stands."""
    torch.manual_seed(1)
    sizes = {"vocab_size": TOKENIZER.vocab_size, "dim": 16, "layers": 2, "heads": 2, "context": 64}
    return build_model(preset("tiny-encoder", **{**sizes, "position": "learned", **fields})).eval()


PAIRED = {"head": {"kind": "masked", "next_sentence": True}, "segments": 2}


def test_of_the_chosen_eight_tenths_are_masked_one_tenth_replaced_and_one_tenth_stays():
    batch = masked().collate(blocks(600, 128), generator())
    scored = batch.targets != -1
    now, was = batch.ids.gather(1, batch.masked_positions)[scored], batch.targets[scored]
    count, size = len(now), TOKENIZER.vocab_size - SPECIAL
    hidden = (now == TOKENIZER.mask_id).sum() / count
    same = (now == was).sum() / count
    spread = 4 * math.sqrt(0.16 / count)  # four standard deviations
    assert count > 10_000
    assert abs(hidden - 0.8) < spread
    assert abs(same - (0.1 + 0.1 / size)) < spread  # one of `size` is replaced by itself
    others = now[(now != was) & (now != TOKENIZER.mask_id)]
    assert len(others.unique()) == size  # any token may come in


def test_what_is_not_chosen_is_left_alone():
    block, following = blocks(20, 50)
    batch = masked().collate((block, following), generator())
    framing = [TOKENIZER.cls_id], [TOKENIZER.sep_id]
    rows = [[*framing[0], *row, *framing[1]] for row in block.tolist()]
    assert originals(batch).tolist() == rows


@pytest.mark.parametrize("share", [0.01, 0.15, 0.5, 0.9])
def test_exactly_mask_fraction_is_chosen_in_every_row(share):
    block, following = blocks(10, 61)
    block[3:, 5:25] = TOKENIZER.unk_id
    batch = masked(mask_fraction=share).collate((block, following), generator())
    counts = (batch.targets != -1).sum(1).tolist()
    assert counts == [round(share * 61)] * 3 + [max(1, round(share * 41))] * 7
    assert batch.masked_positions.shape == (10, max(1, round(share * 63)))


def test_every_place_is_as_likely_to_be_chosen_as_any_other():
    batch = masked().collate(blocks(4000, 20), generator())
    scored = batch.targets != -1
    counts = torch.bincount(batch.masked_positions[scored], minlength=22)
    assert counts[0] == counts[21] == 0  # <cls> and <sep>
    expected = 4000 * 3 / 20
    assert (counts[1:21] - expected).abs().max() < 5 * math.sqrt(expected)


def test_special_tokens_are_neither_chosen_nor_put_in():
    block, following = blocks(300, 40)
    block[:, ::2] = np.arange(SPECIAL)[np.arange(20) % SPECIAL]
    before = masked(mask_fraction=0.9).collate((block, following), generator())
    assert (before.targets[before.targets != -1] >= SPECIAL).all()
    now = before.ids.gather(1, before.masked_positions)[before.targets != -1]
    assert ((now >= SPECIAL) | (now == TOKENIZER.mask_id)).all()
    alone = np.full((2, 8), TOKENIZER.unk_id)
    assert (masked().collate((alone, alone), generator()).targets == -1).all()


def spans(kind, ids):
    """Which tokens make a word, found in the text that the pieces make rather than in pairs."""
    pieces = [KINDS[kind].piece(id) for id in ids]
    if kind == "wordpiece":
        text = "".join(
            piece.removeprefix("##") if "##" in piece else f" {piece}" for piece in pieces
        )
        lengths = [len(piece) - 2 if "##" in piece else len(piece) + 1 for piece in pieces]
    else:
        text, lengths = "".join(pieces), [len(piece) for piece in pieces]
    owner = np.repeat(np.arange(len(ids)), lengths)
    if kind == "wordpiece":
        return [set(owner[slice(*found.span())]) for found in re.finditer(r"\S+", text)]
    return [set(owner[slice(*found.span())]) for found in re.finditer(r" ?[^\W_]+|<0x..>", text)]


def test_every_tokenizer_says_where_its_words_begin():
    assert CONTINUATION_RULES.keys() == SIZES.keys() == TOKENIZERS.keys()


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_whole_words_are_whole(kind):
    whole, broken = 0, 0
    for whole_words in (True, False):
        task = masked(kind, whole_words=whole_words, mask_fraction=0.3)
        batch = task.collate(of_text(kind), generator())
        for row, places, targets in zip(
            originals(batch), batch.masked_positions, batch.targets, strict=True
        ):
            chosen = set((places[targets != -1] - 1).tolist())
            for word in spans(kind, row[1:-1].tolist()):
                partly = bool(word & chosen) and not word <= chosen
                assert not (whole_words and partly)
                broken += partly
                whole += whole_words and len(word) > 1 and word <= chosen
    assert whole > 10
    assert broken > 10  # else the test would say nothing


def test_a_word_that_does_not_fit_leaves_its_place_to_others():
    task = masked("wordpiece", whole_words=True, mask_fraction=0.15)
    batch = task.collate(of_text("wordpiece", rows=30), generator())
    counts = (batch.targets != -1).sum(1)
    assert (counts <= round(0.15 * 60)).all()
    assert counts.float().mean() > 0.9 * round(0.15 * 60)


@pytest.mark.parametrize("kind", ["char", "word"])
def test_every_character_or_word_is_a_word(kind):
    words = VocabInfo.from_tokenizer(KINDS[kind])
    ids, _ = of_text(kind)
    assert words.begins_word(ids).all()


def test_punctuation_and_spaces_begin_words():
    tokenizer = KINDS["bpe"]
    ids = np.array([tokenizer.encode("are, shown\nbelow 12345x")])
    pieces = [tokenizer.piece(id) for id in ids[0]]
    begins = VocabInfo.from_tokenizer(tokenizer).begins_word(ids)[0]
    words = [0, *np.flatnonzero(begins)[1:], len(pieces)]
    joined = ["".join(pieces[a:b]) for a, b in pairwise(words)]
    assert joined == ["are", ",", " shown", "\n", "below", " 12345x"]


def by_hand(model, batch, row):
    """The hidden states of a row, its documents one by one, each as if it were alone."""
    states = torch.zeros(batch.ids.shape[1], model.config.dim, dtype=torch.float64)
    for document in set(batch.documents[row].tolist()) - {0}:
        here = batch.documents[row] == document
        segments = None if batch.segments is None else batch.segments[row, here].unsqueeze(0)
        states[here] = model(batch.ids[row, here].unsqueeze(0), segments=segments)[0]
    return states


def packed(rows=4, width=40, seed=0):
    """Blocks in which documents end."""
    block, following = blocks(rows, width, seed)
    for row in range(rows):
        for end in (9 + row, 25):
            block[row, end : end + 2] = TOKENIZER.sep_id, TOKENIZER.cls_id
    return block, following


@pytest.mark.parametrize("next_sentence", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_the_slow_formula_over_all_logits(next_sentence, smoothing):
    task = masked(label_smoothing=smoothing, next_sentence=next_sentence)
    batch = task.collate(blocks(6, 40) if next_sentence else packed(), generator())
    net = model(**PAIRED).double().train()
    total = 0.0
    for row in range(len(batch.ids)):
        states = by_hand(net, batch, row)
        logp = net.head(states).log_softmax(-1)
        for place, target in zip(batch.masked_positions[row], batch.targets[row], strict=True):
            if target != -1:
                total -= (1 - smoothing) * logp[place, target] + smoothing * logp[place].mean()
        if next_sentence:
            pooled = torch.tanh(net.head.pool(states[0]))
            guess = net.head.seq_relationship(pooled).log_softmax(-1)
            total -= batch.targets.shape[1] * guess[batch.next_sentence_targets[row]]
    assert task.loss(net, batch).item() == pytest.approx(total.item(), rel=1e-12)
    assert int(task.count(batch)) == int((batch.targets != -1).sum())


def test_only_the_chosen_positions_reach_the_vocabulary(monkeypatch):
    seen = []
    for name in ("linear_cross_entropy", "F.linear"):
        where = "regard.nn.head." + name
        before = eval(name, vars(regard.nn.head))

        def spy(x, *rest, _before=before, **options):
            seen.append(x.shape[:-1].numel())
            return _before(x, *rest, **options)

        monkeypatch.setattr(where, spy)
    task, net = masked(), model().train()
    batch = task.collate(blocks(8, 62), generator())
    task.loss(net, batch)
    assert seen[-1] == batch.masked_positions.numel() == 8 * round(0.15 * 64)


def test_documents_do_not_see_each_other():
    task, net = masked(), model().double()
    block, following = packed()
    batch = task.collate((block, following), generator())
    mask = Mask.documents(batch.documents)
    before = net(batch.ids, mask=mask, positions=batch.positions)
    changed = batch.ids.clone()
    second = batch.documents == 2
    changed[second] = SPECIAL + (changed[second] + 1 - SPECIAL) % (TOKENIZER.vocab_size - SPECIAL)
    after = net(changed, mask=mask, positions=batch.positions)
    assert torch.equal(before[~second], after[~second])
    assert not torch.isclose(before[second], after[second]).all()
    for row in range(len(block)):
        torch.testing.assert_close(before[row], by_hand(net, batch, row), rtol=0, atol=1e-12)


def test_every_document_is_framed_and_counts_its_own_positions():
    batch = masked().collate(packed(), generator())
    for row in range(len(batch.ids)):
        assert set(batch.documents[row].tolist()) == {1, 2, 3}
        for document in (1, 2, 3):
            here = batch.documents[row] == document
            ids = batch.ids[row, here].tolist()
            assert (ids[0], ids[-1]) == (TOKENIZER.cls_id, TOKENIZER.sep_id)
            assert batch.positions[row, here].tolist() == list(range(len(ids)))


def test_the_padding_of_the_last_row_is_not_seen_and_not_chosen():
    block, following = blocks(2, 30)
    following = following.copy()
    following[1, 11:] = -1
    block[1, 11:] = 0
    task = masked(mask_fraction=0.9, packs_documents=False)
    ordinary = np.arange(TOKENIZER.vocab_size) >= SPECIAL
    ordinary[0] = True  # as in vocabularies that fill up with another id
    vars(task)["vocab"] = replace(task.vocab, ordinary=ordinary)
    batch = task.collate((block, following), generator())
    assert batch.ids[1, 12] == TOKENIZER.sep_id
    assert batch.documents[1].tolist() == [1] * 13 + [0] * 19
    assert int((batch.targets[1] != -1).sum()) == round(0.9 * 11)
    assert batch.masked_positions[1].max() < 12
    assert task.tokens_read(batch, 32) == 32 + 13
    assert task.evaluation_count(batch) == 30 + 11
    net = model().double()
    states = net(batch.ids, mask=Mask.documents(batch.documents), positions=batch.positions)
    alone = net(batch.ids[1:, :13])
    torch.testing.assert_close(states[1, :13], alone[0], rtol=0, atol=1e-12)


def test_rows_of_one_document_each_need_no_mask():
    task, net = masked(), model().double()
    batch = replace(task, packs_documents=False).collate(blocks(3, 30), generator())
    with_mask = task.collate(blocks(3, 30), generator())
    assert batch.documents is None
    assert (with_mask.documents == 1).all()
    torch.testing.assert_close(task.loss(net, batch), task.loss(net, with_mask), rtol=1e-12, atol=0)
    for each in (batch, with_mask):
        assert task.tokens_read(each, 32) == 3 * 32
        assert task.evaluation_count(each) == 3 * 30


def test_half_of_the_pairs_belong_together():
    block, following = blocks(3000, 30)
    task = masked(next_sentence=True)
    batch = task.collate((block, following), generator())
    assert batch.ids.shape == (3000, 33)
    assert abs(batch.next_sentence_targets.float().mean() - 0.5) < 4 * 0.5 / math.sqrt(3000)
    known = {tuple(row) for row in block.tolist()}
    ids = originals(batch)
    for row in range(3000):
        first, second, *rest = (ids[row] == TOKENIZER.sep_id).nonzero().flatten().tolist()
        assert not rest
        assert second == 32
        a, b = ids[row, 1:first].tolist(), ids[row, first + 1 : second].tolist()
        assert ((*a, *b) in known) == (batch.next_sentence_targets[row] == 0)
        assert a == block[row, : len(a)].tolist()
        assert batch.segments[row].tolist() == [0] * (first + 1) + [1] * (32 - first)
    assert (batch.documents == 1).all()


def test_both_parts_of_a_pair_are_whole_sentences_where_there_are_any():
    task = masked("wordpiece", next_sentence=True)
    ends_sentence = task.vocab.ends_sentence
    assert [TOKENIZER.piece(int(id)) for id in np.flatnonzero(ends_sentence)] == ["!", ".", "?"]
    ends = np.flatnonzero(ends_sentence)
    block, following = blocks(400, 40)
    block[np.isin(block, ends)] = SPECIAL + 10
    for number, row in enumerate(block):
        row[number % 5 :: 5] = ends[0]
    ids = originals(task.collate((block, following), generator()))
    for row in ids.tolist():
        middle = row.index(TOKENIZER.sep_id)
        assert row[middle - 1] == ends[0]
        assert all(id != ends[0] for id in row[middle + 1 : middle + 5])  # begins behind one


def test_no_pair_takes_its_second_part_from_padding():
    block, following = blocks(3, 30)
    following = following.copy()
    following[2, 11:] = -1
    block[2, 11:] = 0
    for seed in range(20):
        batch = masked(next_sentence=True).collate((block, following), generator(seed))
        ids = originals(batch)
        assert (ids[:2] != 0).all()
        assert batch.next_sentence_targets[2] == 0
        assert ids[2, 1:14][ids[2, 1:14] != TOKENIZER.sep_id].tolist() == block[2, :11].tolist()


def test_a_batch_is_a_function_of_the_generator():
    for task in (masked(), masked(whole_words=True), masked(next_sentence=True)):
        one, two, other = (task.collate(blocks(4, 40), generator(seed)) for seed in (1, 1, 2))
        for name in (
            "ids",
            "masked_positions",
            "targets",
            "documents",
            "positions",
            "segments",
            "next_sentence_targets",
        ):
            a, b = getattr(one, name), getattr(two, name)
            assert a is b is None or torch.equal(a, b)
        assert not torch.equal(one.ids, other.ids)


def test_how_rows_are_batched_does_not_change_what_is_masked():
    block, following = blocks(8, 40)
    whole = masked().collate((block, following), generator())
    drawn = generator()
    parts = [
        masked().collate((block[i : i + 2], following[i : i + 2]), drawn) for i in (0, 2, 4, 6)
    ]
    for name in ("ids", "masked_positions", "targets"):
        joined = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(joined, getattr(whole, name))


def test_metrics_are_those_of_all_masked_tokens_and_of_unigrams():
    task, net = masked(next_sentence=True), model(**PAIRED)
    batches = [task.collate(blocks(rows, 20, seed=rows), generator(rows)) for rows in (2, 7)]
    loss, right, pairs, goals = 0.0, 0, 0, []
    with torch.no_grad():
        for batch in batches:
            for row in range(len(batch.ids)):
                states = net(batch.ids[row : row + 1], segments=batch.segments[row : row + 1])
                logp = net.head(states[0]).double().log_softmax(-1)
                for place, target in zip(
                    batch.masked_positions[row], batch.targets[row], strict=True
                ):
                    if target != -1:
                        loss -= float(logp[place, target])
                        right += int(logp[place].argmax() == target)
                        goals.append(int(target))
                pairs += int(
                    net.head.next_sentence(states).argmax() == batch.next_sentence_targets[row]
                )
    shares = [count / len(goals) for count in Counter(goals).values()]
    metrics = task.metrics(net.train(), batches)
    assert net.training
    assert metrics["loss"] == pytest.approx(loss / len(goals), rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert metrics["accuracy"] == pytest.approx(right / len(goals))
    assert metrics["unigram_loss"] == pytest.approx(-sum(p * math.log(p) for p in shares))
    assert metrics["unigram_accuracy"] == pytest.approx(max(shares))
    assert metrics["next_sentence_accuracy"] == pytest.approx(pairs / 9)
    assert set(Masked.metric_names) <= set(metrics)


def test_many_logits_are_scored_in_chunks(monkeypatch):
    task, net = masked(), model()
    batches = [task.collate(blocks(5, 30), generator())]
    whole = task.metrics(net, batches)
    monkeypatch.setattr("regard.tasks.masked.CHUNK_ELEMENTS", 3 * TOKENIZER.vocab_size)
    assert task.metrics(net, batches) == pytest.approx(whole, rel=1e-6)


def test_unigrams_of_equally_frequent_tokens_are_as_good_as_chance():
    result = unigram_metrics(torch.tensor([3, 9, 4, 7] * 5))
    assert result["unigram_loss"] == pytest.approx(math.log(4))
    assert result["unigram_accuracy"] == 0.25


def test_nothing_masked_is_nothing_to_evaluate():
    alone = np.full((2, 8), TOKENIZER.unk_id)
    with pytest.raises(DataError, match="nothing to evaluate"):
        masked().metrics(model(), [masked().collate((alone, alone), generator())])


@pytest.mark.parametrize("next_sentence", [False, True])
def test_a_tiny_model_learns_one_batch_by_heart(next_sentence):
    task = masked(next_sentence=next_sentence)
    net = model(**PAIRED, dim=32).train()
    batch = task.collate(of_text("wordpiece", rows=4, width=30), generator())
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        (task.loss(net, batch) / task.count(batch)).backward()
        optimizer.step()
    metrics = task.metrics(net, [batch])
    assert metrics["loss"] < 0.05
    assert metrics["accuracy"] == 1.0
    assert metrics.get("next_sentence_accuracy", 1.0) == 1.0


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("next_sentence", [False, True])
def test_one_compiled_graph_serves_every_batch(next_sentence):
    torch._dynamo.reset()
    task = masked(next_sentence=next_sentence, whole_words=True)
    objective = Objective(model(**PAIRED), task).train()
    counter = CompileCounter()
    compiled = torch.compile(objective, dynamic=False, backend=counter, fullgraph=True)
    for seed in range(4):
        given = blocks(4, 40, seed) if next_sentence or seed % 2 else packed(seed=seed)
        batch = task.collate(given, generator(seed))
        torch.testing.assert_close(compiled(batch), objective(batch))
    assert counter.frame_count == 1


def test_a_batch_moves_to_another_device_whole():
    for task in (masked(), masked(next_sentence=True)):
        moved = task.collate(blocks(2, 20), generator()).to("meta")
        tensors = [getattr(moved, name) for name in moved.__slots__]
        assert {each.device.type for each in tensors if each is not None} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU has pinned memory")
def test_a_batch_is_pinned_whole():
    assert pin_memory(masked().collate(blocks(2, 20), generator())).masked_positions.is_pinned()


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, math.nan])
def test_a_mask_fraction_of_nothing_or_everything_is_refused(share):
    with pytest.raises(ConfigError, match="must lie between 0 and 1"):
        Masked(mask_fraction=share)


def test_where_every_word_is_too_long_a_part_of_one_is_masked():
    task = masked("bpe", whole_words=True, mask_fraction=0.15)
    ids = np.array([task.tokenizer.encode("unbelievableetymologiesandotherembeddings")[:12]] * 3)
    batch = task.collate((ids, ids), generator())
    assert task.count(batch) > 0
    assert (originals(batch)[:, 1:-1] == torch.from_numpy(ids)).all()
