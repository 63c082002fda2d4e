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
from regard.serve.request import TokenLogprobs
from regard.serve.sequences import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """The next id of each row."""

    ids: Tensor
    tokens: list[int | None]  # None: the row has failed
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, RegardError]  # of the rows that have failed


def sample_rows(
    sequences: abc.Sequence[Sequence], chain: Chain, logits: Tensor, sampling: SamplingState
) -> SampledTokens:
    """Sample the next id of each sequence.

    If all tokens of a sequence are masked, only that sequence fails.
    """
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
    logprobs: list[TokenLogprobs | None] = [None] * len(sequences)
    rows_with_logprobs = [
        row for row, sequence in enumerate(sequences) if sequence.request.logprobs is not None
    ]
    if rows_with_logprobs:
        top = max(cast(int, sequences[row].request.logprobs) for row in rows_with_logprobs)
        sampled = ids[rows_with_logprobs].tolist()
        computed = compute_logprobs(logits[rows_with_logprobs], sampled, top)
        for row, token_logprobs in zip(rows_with_logprobs, computed, strict=True):
            requested = cast(int, sequences[row].request.logprobs)
            logprobs[row] = token_logprobs.truncate(requested)
    return SampledTokens(ids, tokens, logprobs, errors)


def _all_masked(logits: Tensor, masked_logits: Tensor) -> bool:
    """Whether a constraint has masked every token of a row."""
    return bool(logits.amax().isfinite()) and float(masked_logits.amax()) == -torch.inf


def concatenate_sampling_states(first: SamplingState, second: SamplingState) -> SamplingState:
    """Concatenate two states along the rows.

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


def compute_logprobs(logits: Tensor, tokens: abc.Sequence[int], top: int) -> list[TokenLogprobs]:
    """The log-probability of a token in each row of logits, and the `top` most probable."""
    log_probs = at_least_float32(logits).log_softmax(-1)
    index = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    token_logprobs = log_probs.gather(1, index).squeeze(1).tolist()
    if not top:
        return [TokenLogprobs(*pair) for pair in zip(tokens, token_logprobs, strict=True)]
    best = log_probs.topk(min(top, log_probs.shape[1]))
    return [
        TokenLogprobs(token, logprob, array("q", ids), array("d", values))
        for token, logprob, ids, values in zip(
            tokens, token_logprobs, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
