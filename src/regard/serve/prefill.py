"""Chunked prefill: short prompts together, long ones in chunks between the decode steps."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.generate.decode import pad_prompts
from regard.generate.sampling_state import pad_rows
from regard.models.base import Language, State, mark_prompt_as_prefix
from regard.nn.state import Source, TransformerState
from regard.serve.prefill_graphs import PrefillGraphs
from regard.serve.prefix_cache import PrefixCache, read_row
from regard.serve.rows import to_device
from regard.serve.sampling import compute_logprobs
from regard.serve.sequences import Prefill

LENGTH_MULTIPLE = 16  # prompts are padded to it: Triton compiles kernels for each length
CHUNK_SECONDS = 0.25  # target time of a chunk; all sequences wait for it
MAX_WAIT = 16  # decode steps that a prompt waits for others
# cuDNN's attention builds a plan for each new shape, which takes as long as many decode steps.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Prefiller:
    """Prefills prompts, at most about `chunk` tokens at a time.

    `join` is called with prefilled prompts, the logits after each and their state, which is None if
    `graphs` have prefilled them in the rows of the engine; `fail` is called with a failed prefill
    and the error. With `uses_graph_rows`, on a GPU, a prompt may wait until others can be prefilled
    with it, and lengths are padded. A prefix LM prefills each prompt alone and in one chunk, since
    all its ids attend to each other.
    """

    def __init__(
        self,
        language: Language,
        chunk: int,
        max_chunk: int,
        prefix_cache: PrefixCache | None,
        *,
        uses_graph_rows: bool,
        graphs: PrefillGraphs | None,
        is_prefix_lm: bool,
        join: Callable[[list[Prefill], Tensor, State | None], None],
        fail: Callable[[Prefill, Exception], None],
    ) -> None:
        self.language, self.prefix_cache = language, prefix_cache
        self.uses_graph_rows = uses_graph_rows
        self.graphs, self.is_prefix_lm = graphs, is_prefix_lm
        self.chunk, self.max_chunk = chunk, max_chunk
        self.join, self.fail = join, fail
        self.queue: deque[Prefill] = deque()
        self.tokens = 0  # prefilled since the start
        self.steps_waited = 0  # since a prefill could have begun

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompts in prefill, whose states need memory."""
        return sum(len(prefill.ids) for prefill in self.queue)

    def step(self, running: int) -> None:
        """Prefill the next chunk: of one long prompt, or several short prompts together.

        Long prompts alternate, so that short ones need not wait for the end of a long one.
        `running` sequences are decoded between two steps.
        """
        if not self.queue or not self._is_due(running):
            return
        by_graph = self._suits_graph(self.queue[0])
        group = self._next_group(by_graph)
        start_time = time.perf_counter()
        try:
            with sdpa_kernel(BACKENDS):
                if by_graph:
                    self._prefill_by_graph(group)
                elif self.is_prefix_lm:
                    self._prefill_prefix_lm(group[0])
                elif len(group) > 1 or self._is_batchable(group[0]):
                    self._prefill_together(group)
                else:
                    self._prefill_chunk(group[0])
        except torch.AcceleratorError:  # a sticky error: all later calls on the device fail
            raise
        except Exception as error:
            self._fail(group, error)
        seconds = time.perf_counter() - start_time
        if seconds > 2 * CHUNK_SECONDS and self.chunk > 16:  # a large model on a slow machine
            self.chunk //= 2
        elif seconds < CHUNK_SECONDS:
            self.chunk = min(2 * self.chunk, self.max_chunk)

    def _next_group(self, by_graph: bool) -> list[Prefill]:
        """The next prompt, and others that are prefilled together with it."""
        group = [self.queue.popleft()]
        if not self._is_batchable(group[0]):
            return group
        for other in list(self.queue):
            lengths = [len(prefill.ids) for prefill in (*group, other)]
            if by_graph and not cast(PrefillGraphs, self.graphs).fits(lengths):
                break
            if not by_graph and max(lengths) * len(lengths) > self.chunk:
                break
            if self._is_batchable(other) and self._suits_graph(other) == by_graph:
                group.append(other)
                self.queue.remove(other)
        return group

    def _suits_graph(self, prefill: Prefill) -> bool:
        """Whether a CUDA graph can prefill it: one sequence, and no cached prefix."""
        if self.graphs is None or len(prefill.sequences) > 1 or not self._is_batchable(prefill):
            return False
        cached = self.prefix_cache is not None and self.prefix_cache.has_prefix(prefill.ids)
        return not cached and self.graphs.fits([len(prefill.ids)])

    def _is_due(self, running: int) -> bool:
        """Whether to prefill in this step.

        On a GPU, one short prompt takes as long as several, and all sequences wait for it: a
        prompt waits up to `MAX_WAIT` steps for others.
        """
        is_small = len(self.queue) * 16 < running
        has_begun = any(prefill.state is not None for prefill in self.queue)
        if self.uses_graph_rows and is_small and not has_begun and self.steps_waited < MAX_WAIT:
            self.steps_waited += 1
            return False
        self.steps_waited = 0
        return True

    def _is_batchable(self, prefill: Prefill) -> bool:
        """Whether a prompt can be prefilled in one step, together with others."""
        fits = len(prefill.ids) <= self.chunk and not self.is_prefix_lm
        return prefill.state is None and fits and prefill.request.prompt_logprobs is None

    def _fail(self, group: list[Prefill], error: Exception) -> None:
        """Retry a failed group one prompt at a time; a failed single prompt fails its request."""
        if len(group) == 1:
            self.fail(group[0], error)
            return
        self._prefill_one_by_one(group)

    def _prefill_one_by_one(self, group: list[Prefill]) -> None:
        for prefill in group:
            prefill.state, prefill.prefilled = None, 0
            try:
                self._prefill_together([prefill])
            except torch.AcceleratorError:
                raise
            except Exception as error:
                self.fail(prefill, error)

    def _start(self, group: list[Prefill]) -> tuple[State, list[int]]:
        """The state before prefill, with cached prefixes loaded, and the length of each prefix."""
        capacity = self._padded_length(group)
        source = None
        if group[0].request.source is not None:
            sources = [list(cast(Sequence[int], prefill.request.source)) for prefill in group]
            source = Source(*pad_prompts(sources, self.language.device))
            capacity = max(prefill.max_length(self.language.context) for prefill in group)
        state = self.language.start(len(group), capacity, source)
        cached = [0] * len(group)
        if self.prefix_cache is not None and group[0].request.prompt_logprobs is None:
            state = cast(TransformerState, state)
            for row, prefill in enumerate(group):
                cached[row] = self.prefix_cache.load(prefill.ids, state, row)
            if any(cached):
                lengths = to_device(cached, state.lengths.device)
                state = replace(state, lengths=lengths, max_length=max(cached), equal_lengths=False)
        return state, cached

    def _padded_length(self, group: list[Prefill]) -> int:
        """The length of the longest prompt; on a GPU padded, so that fewer kernels are compiled."""
        longest = max(len(prefill.ids) for prefill in group)
        padded = (
            -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE if self.uses_graph_rows else longest
        )
        return min(padded, self.language.context or padded)

    def _prefill_together(self, group: list[Prefill]) -> None:
        state, cached = self._start(group)
        rows = [prefill.ids[length:] for prefill, length in zip(group, cached, strict=True)]
        width = max(map(len, rows)) if any(cached) else self._padded_length(group)
        ragged = min(map(len, rows)) < width
        if ragged and max(cached) + width > self._padded_length(group):
            # a short suffix after a long cached prefix would be padded beyond the capacity
            self._prefill_one_by_one(group)
            return
        device = state.lengths.device
        ids = to_device(pad_rows(rows, width), device)
        counts = to_device([len(row) for row in rows], device)
        if self.uses_graph_rows and not any(cached):
            # the lengths are not read back from the device
            state = replace(cast(TransformerState, state), static=True)
        logits, state = self.language.step(ids, state, counts=counts if ragged else None)
        self.tokens += sum(map(len, rows))
        self._complete(group, logits[:, -1], state)

    def _prefill_by_graph(self, group: list[Prefill]) -> None:
        graphs = cast(PrefillGraphs, self.graphs)
        first, ids = len(graphs.rows.lengths), [prefill.ids for prefill in group]
        logits = graphs.prefill(ids)
        self.tokens += sum(map(len, ids))
        if self.prefix_cache is not None:
            self.prefix_cache.lookups += sum(map(len, ids))
            for row, prompt in enumerate(ids, first):
                self.prefix_cache.save(prompt, partial(graphs.rows.read, row))
        self.join(group, logits, None)

    def _prefill_chunk(self, prefill: Prefill) -> None:
        if prefill.state is None:
            prefill.state, (prefill.prefilled,) = self._start([prefill])
            if prefill.sequences[0].new_tokens == 0:  # of an attempt that ran out of memory
                prefill.request.prompt_token_logprobs.clear()
        ids = prefill.ids[prefill.prefilled : prefill.prefilled + self.chunk]
        needs_logprobs = prefill.request.prompt_logprobs is not None
        tensor = to_device(ids, prefill.state.lengths.device).unsqueeze(0)
        logits, prefill.state = self.language.step(tensor, prefill.state, all_logits=needs_logprobs)
        self.tokens += len(ids)
        prefill.prefilled += len(ids)
        if needs_logprobs and prefill.sequences[0].new_tokens == 0:
            targets = prefill.ids[prefill.prefilled - len(ids) + 1 : prefill.prefilled + 1]
            if targets:
                prefill.request.prompt_token_logprobs += compute_logprobs(
                    logits[0, : len(targets)],
                    targets,
                    cast(int, prefill.request.prompt_logprobs),
                )
        if prefill.prefilled < len(prefill.ids):
            self.queue.append(prefill)
        else:
            self._complete([prefill], logits[:, -1], prefill.state)

    def _prefill_prefix_lm(self, prefill: Prefill) -> None:
        """Prefill the prompt bidirectionally, then the ids that were generated after it."""
        state, _ = self._start([prefill])
        state = mark_prompt_as_prefix(self.language, state)
        prefix_length = prefill.sequences[0].prefix_length
        for ids in (prefill.ids[:prefix_length], prefill.ids[prefix_length:]):
            if ids:
                tensor = to_device(ids, state.lengths.device).unsqueeze(0)
                logits, state = self.language.step(tensor, state)
        self.tokens += len(prefill.ids)
        self._complete([prefill], logits[:, -1], state)

    def _complete(self, group: list[Prefill], logits: Tensor, state: State) -> None:
        if self.prefix_cache is not None:
            for row, prefill in enumerate(group):
                self.prefix_cache.save(
                    prefill.ids, partial(read_row, cast(TransformerState, state), row)
                )
        self.join(group, logits, state)
