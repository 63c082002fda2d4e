"""How good a trained model is, by its loss and by what it writes."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from regard.data.batch import PairBatch, TextBatch
from regard.data.pairs import Pairs, Row
from regard.data.sources import Images, LabelledText, Series
from regard.explain.neighbours import WordVectors
from regard.generate import BeamSearch, Search, generate, parse_chain
from regard.models.base import Language
from regard.pipelines import images, labels, series
from regard.pipelines.base import EvalData
from regard.pipelines.by_length import ByLength, by_length
from regard.tasks.cbow import CBOWTask
from regard.tasks.masked import Masked
from regard.tasks.metrics import bleu, chrf, exact_match
from regard.tasks.scheduled import free_running
from regard.tasks.seq2seq import Seq2Seq
from regard.text import PairTokenizers, Tokenizer

logger = logging.getLogger(__name__)


def losses(
    exam: EvalData, model: nn.Module, device: torch.device, limit: int | None = None
) -> dict[str, float]:
    """The task's own metrics on the held-out data."""
    batches = (batch.to(device) for batch in exam.validation_batches(limit))
    return exam.task.metrics(model, batches)


def own_loss(exam: EvalData, model: nn.Module, device: torch.device) -> float:
    """The loss of a model that reads its own words in place of the truth: its exposure bias.

    It is above the plain loss by what the model has not learned about its own mistakes.
    """

    def free(batch: PairBatch) -> PairBatch:
        own = torch.ones_like(batch.ids, dtype=torch.bool)
        return replace(batch, ids=free_running(model, batch.ids, own, batch.source))

    model.eval()
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(1)
        batches = (
            free(cast(PairBatch, batch).to(device)) for batch in exam.validation_batches(None)
        )
        return exam.task.metrics(model, batches)["loss"]


def translate(
    model: nn.Module,
    task: Seq2Seq,
    tokenizers: PairTokenizers,
    sentences: Sequence[str],
    *,
    search: Search,
    tokens: int | None = None,
    rows: int = 64,
) -> Iterator[tuple[int, str]]:
    """Write each sentence in the other language; yields (number, text), shortest sources first."""
    device = next(model.parameters()).device
    language = cast(Language, model)
    room = None if language.context is None else language.context - 1 - task.wider  # 1 for STOP
    ids = [np.asarray(each, dtype=np.int64) for each in tokenizers.source.encode_batch(sentences)]
    for number, sentence in enumerate(ids):
        if room is not None and len(sentence) > room:
            logger.warning(
                "sentence %d has %d tokens; the model reads %d", number + 1, len(sentence), room
            )
            ids[number] = sentence[:room]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    model.eval()
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        source = task.source([ids[i] for i in chosen]).to(device)
        limit = 2 * int(source.lengths.max()) + 20 if tokens is None else tokens
        found = search(
            language,
            [task.prompt] * len(chosen),
            tokens=limit,
            stop={task.stop_id},
            source=source,
        )
        for i, hypotheses in zip(chosen, found, strict=True):
            yield i, tokenizers.target.decode(hypotheses[0].ids)


def written(
    exam: EvalData,
    model: nn.Module,
    pairs: Pairs,
    *,
    width: int = 5,
    length_penalty: float = 1.0,
    limit: int | None = None,
) -> dict[str, Any]:
    """BLEU, chrF and exact match of what the model writes for `pairs`, with their signatures."""
    rows = list(pairs.rows())[:limit]
    ours = _answers(exam, model, rows, BeamSearch(width, length_penalty))
    return _judged(ours, [target for _, target in rows])


def written_by_length(
    exam: EvalData, model: nn.Module, pairs: Pairs, *, width: int = 5, length_penalty: float = 1.0
) -> ByLength:
    """The same by the length of the source; BLEU only where some text has its four words."""
    rows = list(pairs.rows())
    ours = _answers(exam, model, rows, BeamSearch(width, length_penalty))
    phrases = any(len(target.split()) >= 4 for _, target in rows)
    metrics = ("exact_match", "bleu", "bleu_lower", "chrf") if phrases else ("exact_match", "chrf")

    def judge(numbers: Sequence[int]) -> dict[str, float]:
        found = _judged([ours[i] for i in numbers], [rows[i][1] for i in numbers])
        return {name: found[name] for name in metrics}

    return by_length([source for source, _ in rows], judge)


def _answers(exam: EvalData, model: nn.Module, rows: Sequence[Row], search: Search) -> list[str]:
    """What the model writes for each source, in their order."""
    assert isinstance(exam.task, Seq2Seq)
    assert isinstance(exam.tokenizers, PairTokenizers)
    sources = [source for source, _ in rows]
    found = dict(translate(model, exam.task, exam.tokenizers, sources, search=search))
    return [found[i] for i in range(len(rows))]


def _judged(ours: Sequence[str], wanted: Sequence[str]) -> dict[str, Any]:
    bleu_score, bleu_signature = bleu(ours, wanted)
    lower_score, lower_signature = bleu(ours, wanted, lower=True)
    chrf_score, chrf_signature = chrf(ours, wanted)
    return {
        "exact_match": exact_match(ours, wanted),
        "bleu": bleu_score,
        "bleu_lower": lower_score,
        "chrf": chrf_score,
        "signatures": {
            "bleu": bleu_signature,
            "bleu_lower": lower_signature,
            "chrf": chrf_signature,
        },
    }


def sample(exam: EvalData, model: nn.Module, seed: int) -> str:
    """A little of what the model does now: text, a translation, blanks filled in, classes."""
    model.eval()
    language = cast(Language, model)
    data, tokenizers = exam.validation_data, exam.tokenizers
    if isinstance(data, Images):
        return images.sample(exam, model)
    if isinstance(data, Series):
        return series.sample(exam, model)
    if isinstance(data, LabelledText):
        return labels.sample(exam, model)
    if isinstance(data, Pairs) and isinstance(tokenizers, PairTokenizers):
        source, target = next(data.rows())
        assert isinstance(exam.task, Seq2Seq)
        found = translate(model, exam.task, tokenizers, [source], search=BeamSearch(1))
        return f"{source}\n→ {next(found)[1]}\n= {target}"
    if isinstance(exam.task, Masked):
        return exam.task.sample(model, exam.validation_batches(exam.model.context))
    assert isinstance(tokenizers, Tokenizer)
    if isinstance(exam.task, CBOWTask):
        beginning = cast(TextBatch, next(iter(exam.validation_batches(exam.model.context))))
        return WordVectors.of(model, tokenizers).sample(beginning.ids[0].tolist())
    batch = cast(TextBatch, next(iter(exam.validation_batches(1))))
    first = np.asarray(batch.ids)[0, :1].tolist()
    chain = parse_chain()
    (ids,) = generate(language, [first], chain, tokens=160, seed=seed)
    return tokenizers.decode(first + ids)
