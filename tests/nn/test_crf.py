"""The conditional random field against sums and maxima over all sequences of tags."""

import itertools
import math

import pytest
import torch

from regard.errors import ConfigError
from regard.nn.crf import Transitions, log_partition, marginals, path_score, viterbi
from regard.nn.head import CRFHead

TAGS, LENGTHS = 3, torch.tensor([4, 1, 3, 2])


@pytest.fixture
def texts():
    """Scores of the tags of texts of several lengths, with padding that must not matter."""
    draw = torch.Generator().manual_seed(0)
    u = 2 * torch.randn(len(LENGTHS), 4, TAGS, generator=draw, dtype=torch.float64)
    shapes = (TAGS,), (TAGS, TAGS), (TAGS,)
    transitions = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    return u, LENGTHS, Transitions(*transitions)


def scores(u, a):
    """The score of every sequence of tags of one text, by its definition."""
    scored = {}
    for y in itertools.product(range(TAGS), repeat=len(u)):
        total = (
            a.start_transitions[y[0]]
            + a.end_transitions[y[-1]]
            + sum(u[t, tag] for t, tag in enumerate(y))
        )
        total += sum(a.transitions[i, j] for i, j in itertools.pairwise(y))
        scored[y] = total.item()
    return scored


def test_sums_and_maxima_are_those_over_all_sequences(texts):
    u, lengths, a = texts
    log_z, best, probabilities = (f(u, lengths, a) for f in (log_partition, viterbi, marginals))
    for row, length in enumerate(lengths.tolist()):
        every = scores(u[row, :length], a)
        z = sum(math.exp(score) for score in every.values())
        assert log_z[row].item() == pytest.approx(math.log(z), rel=1e-12)
        assert tuple(best[row, :length].tolist()) == max(every, key=every.get)
        assert not best[row, length:].any()
        assert not probabilities[row, length:].any()
        for t, tag in itertools.product(range(length), range(TAGS)):
            share = sum(math.exp(score) for y, score in every.items() if y[t] == tag) / z
            assert probabilities[row, t, tag].item() == pytest.approx(share, rel=1e-9)
        for y, score in every.items():
            tags = torch.zeros_like(best)
            tags[row, :length] = torch.tensor(y)
            assert path_score(u, tags, lengths, a)[row].item() == pytest.approx(score, rel=1e-12)


def crf_head():
    head = CRFHead(5, classes=TAGS).double()
    draw = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, generator=draw)
    return head, torch.randn(3, 6, 5, generator=draw, dtype=torch.float64)


def test_a_head_reads_the_tagged_tokens_only():
    head, x = crf_head()
    targets = torch.tensor([[-1, 2, -1, 0, 1, -1], [1, -1, -1, -1, -1, -1], [-1] * 6])
    expected = 0.0
    for row in range(2):
        tagged = (targets[row] != -1).nonzero().squeeze(1)
        every = scores(head.out(x[row, tagged]), head.transition_scores)
        log_z = math.log(sum(map(math.exp, every.values())))
        expected += log_z - every[tuple(targets[row, tagged].tolist())]
        tags, log_probs = (f(x, targets != -1) for f in (head.decode, head.log_probs))
        assert tuple(tags[row, tagged].tolist()) == max(every, key=every.get)
        torch.testing.assert_close(
            log_probs[row, tagged].exp().sum(1).detach(), torch.ones(len(tagged)).double()
        )
    assert head.loss(x, targets).item() == pytest.approx(expected, rel=1e-12)
    head.loss(x, targets).backward()
    assert all(parameter.grad.isfinite().all() for parameter in head.parameters())


def test_without_transitions_every_word_is_tagged_by_itself():
    head, x = crf_head()
    for parameter in (head.start_transitions, head.transitions, head.end_transitions):
        torch.nn.init.zeros_(parameter)
    targets = torch.randint(0, TAGS, (3, 6), generator=torch.Generator().manual_seed(0))
    alone = super(CRFHead, head).loss(x, targets)
    assert head.loss(x, targets).item() == pytest.approx(alone.item(), rel=1e-12)
    tags, log_probs = (f(x, targets >= 0) for f in (head.decode, head.log_probs))
    torch.testing.assert_close(tags, head(x).argmax(-1))
    torch.testing.assert_close(log_probs, head(x).log_softmax(-1).detach())


def test_label_smoothing_is_refused():
    head, x = crf_head()
    with pytest.raises(ConfigError, match=r"label_smoothing=0\.1 needs a head"):
        head.loss(x, torch.ones(3, 6).long(), label_smoothing=0.1)
