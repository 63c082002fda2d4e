"""Sample the next token of each row; every row has its own samplers and random numbers."""

from array import array
from collections import abc
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.errors import RegardError
from regard.generate.chain import NOT_FAILED, Chain, at_least_float32
from regard.generate.sampling_state import RowGenerators, SamplingState
from regard.serve.request import TokenScore
from regard.serve.sequences import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """The next id of each row."""

    ids: Tensor
    tokens: list[int | None]  # None: the row has failed
    scores: list[TokenScore | None]
    errors: dict[int, RegardError]  # of the rows that have failed


def sample_rows(
    sequences: abc.Sequence[Sequence], chain: Chain, logits: Tensor, sampling: SamplingState
) -> SampledTokens:
    """Sample the next id of each sequence; a sequence whose tokens are all masked fails alone."""
    masked_logits = logits
    if any(sequence.request.constraints for sequence in sequences):
        masked_logits = at_least_float32(logits).clone()
        for row, sequence in enumerate(sequences):
            if sequence.request.constraints:
                constraint = sequence.request.constraints[sequence.index]
                masked_logits[row] = constraint.mask(masked_logits[row])
    ids = chain.sample(masked_logits, sampling, use_kernel=True)
    tokens: list[int | None] = ids.tolist()
    errors = {}
    for row, length in enumerate(sampling.row_states["failed"].tolist()):
        if length != NOT_FAILED:
            if _all_masked(logits[row], masked_logits[row]):
                errors[row] = RegardError(
                    "response_format: no token of the model's vocabulary continues the JSON; use "
                    "a model whose tokenizer has all characters of JSON, or another schema"
                )
            else:
                cause = chain.failure_cause(masked_logits[row : row + 1], sampling, row, length)
                errors[row] = RegardError(f"no token is left to sample: {cause}")
            sampling.row_states["failed"][row] = NOT_FAILED
            tokens[row] = None
    sampling.append(ids)
    scores: list[TokenScore | None] = [None] * len(sequences)
    scored = [
        row for row, sequence in enumerate(sequences) if sequence.request.logprobs is not None
    ]
    if scored:
        top = max(cast(int, sequences[row].request.logprobs) for row in scored)
        sampled = ids[scored].tolist()
        for row, score in zip(scored, score_tokens(logits[scored], sampled, top), strict=True):
            scores[row] = score
    return SampledTokens(ids, tokens, scores, errors)


def _all_masked(logits: Tensor, masked_logits: Tensor) -> bool:
    """Whether a constraint has masked every token of a row."""
    return bool(logits.amax().isfinite()) and float(masked_logits.amax()) == -torch.inf


def join_sampling_states(first: SamplingState, second: SamplingState) -> SamplingState:
    """Two states as one, with the rows of the first before those of the second.

    Where only one has the state of a sampler, the other's rows do not use that sampler.
    """
    width = max(first.history.shape[1], second.history.shape[1])
    history = torch.cat(
        [pad(part.history, (0, width - part.history.shape[1])) for part in (first, second)]
    )
    state = {}
    for key in first.row_states.keys() | second.row_states.keys():
        like = first.row_states.get(key, second.row_states.get(key))
        assert like is not None
        state[key] = torch.cat(
            [
                part.row_states.get(key, like.new_zeros(len(part.lengths), *like.shape[1:]))
                for part in (first, second)
            ]
        )
    return SamplingState(
        history,
        torch.cat([first.lengths, second.lengths]),
        torch.cat([first.prompt_lengths, second.prompt_lengths]),
        RowGenerators(
            torch.cat([first.generators.keys, second.generators.keys]),
            torch.cat([first.generators.counters, second.generators.counters]),
        ),
        first.stop,
        state,
        first.constants,
    )


def score_tokens(logits: Tensor, tokens: abc.Sequence[int], top: int) -> list[TokenScore]:
    """The log-probability of a token in each row of logits, and the `top` most probable."""
    log_probs = at_least_float32(logits).log_softmax(-1)
    index = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    chosen = log_probs.gather(1, index).squeeze(1).tolist()
    if not top:
        return [TokenScore(*pair) for pair in zip(tokens, chosen, strict=True)]
    best = log_probs.topk(min(top, log_probs.shape[1]))
    return [
        TokenScore(token, logprob, array("q", ids), array("d", values))
        for token, logprob, ids, values in zip(
            tokens, chosen, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
