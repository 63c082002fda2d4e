"""Sequence to sequence: padding, start and stop, by hand-checked examples."""

import numpy as np
import pytest
import torch

from regard.models.build import build_model, preset
from regard.tasks import Seq2Seq

TASK = Seq2Seq(label_smoothing=0.1, bos_id=1, eos_id=2, source_eos_id=3)


def ids(*sentences):
    return [np.array(sentence, dtype=np.uint16) for sentence in sentences]


def collate(sources, targets, width):
    return TASK.collate((ids(*sources), ids(*targets), width), torch.Generator())


def model():
    torch.manual_seed(1)
    return build_model(
        preset("tiny-encoder-decoder", vocab_size=20, dim=8, layers=1, heads=2, dropout=0.2)
    )


def test_a_batch_is_padded_and_the_target_is_read_one_behind():
    batch = collate([[7, 8, 9], [5]], [[11, 12], [13, 14, 15]], 5)
    assert batch.source.ids.tolist() == [[7, 8, 9, 3, 0], [5, 3, 0, 0, 0]]
    assert batch.source.lengths.tolist() == [4, 2]
    assert batch.ids.tolist() == [[1, 11, 12, 0, 0], [1, 13, 14, 15, 0]]
    assert batch.targets.tolist() == [[11, 12, 2, -1, -1], [13, 14, 15, 2, -1]]
    assert batch.ids.dtype == batch.targets.dtype == batch.source.ids.dtype == torch.int64
    assert int(TASK.count(batch)) == 3 + 4


def test_sentences_may_be_empty_or_fill_the_width():
    batch = collate([[], [7, 8]], [[11, 12], []], 3)
    assert batch.source.ids.tolist() == [[3, 0, 0], [7, 8, 3]]
    assert batch.ids.tolist() == [[1, 11, 12], [1, 0, 0]]
    assert batch.targets.tolist() == [[11, 12, 2], [2, -1, -1]]


def test_a_source_alone_is_as_wide_as_its_longest():
    source = TASK.source(ids([7], [5, 6, 7]))
    assert source.ids.tolist() == [[7, 3, 0, 0], [5, 6, 7, 3]]
    assert source.lengths.tolist() == [2, 4]


def test_the_loss_is_the_sum_over_targets_and_stops():
    batch = collate([[7, 8, 9], [5]], [[11, 12], [13, 14, 15]], 5)
    net = model().eval()
    logp = net.head(net(batch.ids, source=batch.source)).log_softmax(-1)
    wanted = [(0, 0, 11), (0, 1, 12), (0, 2, 2), (1, 0, 13), (1, 1, 14), (1, 2, 15), (1, 3, 2)]
    by_hand = -sum(logp[at].item() for at in wanted)
    assert TASK.loss(net, batch).item() == pytest.approx(by_hand, 1e-5)
    assert TASK.metrics(net, [batch])["loss"] == pytest.approx(by_hand / 7, 1e-5)


def test_padding_changes_nothing():
    net = model().eval()
    narrow, wide = (collate([[7, 8]], [[11, 12, 13]], width) for width in (4, 9))
    assert TASK.loss(net, narrow).item() == pytest.approx(TASK.loss(net, wide).item(), 1e-6)


def test_label_smoothing_is_for_training_and_not_for_evaluation():
    batch = collate([[7, 8]], [[11, 12, 13]], 6)
    net, plain = model(), Seq2Seq(label_smoothing=0.0, bos_id=1, eos_id=2, source_eos_id=3)
    net.train()
    losses = []
    for task in (TASK, plain):
        torch.manual_seed(2)
        losses.append(task.loss(net, batch).item())
    assert losses[0] != pytest.approx(losses[1], 1e-4)
    assert TASK.metrics(net, [batch]) == plain.metrics(net, [batch])
