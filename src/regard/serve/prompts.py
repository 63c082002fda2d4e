"""Read the prompts: short ones together, long ones in chunks between the decode steps."""

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
from regard.models.base import Language, State
from regard.nn.state import Source, TransformerState
from regard.serve.prefix_cache import PrefixCache, read_row
from regard.serve.prompt_graphs import PromptGraphs
from regard.serve.rows import to_device
from regard.serve.sampling import score_tokens
from regard.serve.texts import Prefill

MULTIPLE = 16  # of ids: Triton compiles other kernels for other sizes
CHUNK_SECONDS = 0.25  # that all rows wait for a chunk of a prompt
PATIENCE = 16  # decode steps that a prompt waits for others
# cuDNN's attention makes a plan for each new shape, which takes as long as many steps.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class PromptReader:
    """Reads prompts with the model, at most about `chunk` ids at a time.

    `join` gets prompts that were read, the logits after each and their state, or None where
    `graphs` have read them into the rows; `fail` gets a prompt that cannot be read and the error.
    With `patient`, a prompt waits for others to be read with.
    """

    def __init__(
        self,
        language: Language,
        chunk: int,
        max_chunk: int,
        prefixes: PrefixCache | None,
        *,
        patient: bool,
        graphs: PromptGraphs | None,
        join: Callable[[list[Prefill], Tensor, State | None], None],
        fail: Callable[[Prefill, Exception], None],
    ) -> None:
        self.language, self.prefixes, self.patient = language, prefixes, patient
        self.graphs = graphs
        self.chunk, self.max_chunk = chunk, max_chunk
        self.join, self.fail = join, fail
        self.jobs: deque[Prefill] = deque()
        self.tokens = 0  # that were read since the start
        self.steps_waited = 0  # since prompts could have been read

    @property
    def ids(self) -> int:
        """The ids of the prompts that are being read: their states need memory."""
        return sum(len(job.ids) for job in self.jobs)

    def read(self, rows: int) -> None:
        """Read the next chunk: of one long prompt, or several short prompts together.

        Long prompts take turns, so that short ones need not wait for the end of a long one. `rows`
        are decoded meanwhile.
        """
        if not self.jobs or not self._reads_now(rows):
            return
        job, reads_graph = self.jobs[0], self._suits_graph(self.jobs[0])
        group = self._next_group()
        began = time.perf_counter()
        try:
            with sdpa_kernel(BACKENDS):
                if reads_graph:
                    self._read_by_graph(group)
                elif len(group) > 1 or self._is_short(job):
                    self._read_together(group)
                else:
                    self._read_chunk(job)
        except torch.AcceleratorError:  # nothing can be computed on the device any more
            raise
        except Exception as error:
            self._fail(group, error)
        seconds = time.perf_counter() - began
        if seconds > 2 * CHUNK_SECONDS and self.chunk > 16:  # a large model on a slow machine
            self.chunk //= 2
        elif seconds < CHUNK_SECONDS:
            self.chunk = min(2 * self.chunk, self.max_chunk)

    def _next_group(self) -> list[Prefill]:
        """The next prompt, and others that are read together with it."""
        group = [self.jobs.popleft()]
        by_graph, longest = self._suits_graph(group[0]), len(group[0].ids)
        if not by_graph and not self._is_short(group[0]):
            return group
        for other in list(self.jobs):
            longest = max(longest, len(other.ids))
            if by_graph:
                fits = self.graphs.fits([len(job.ids) for job in [*group, other]])
            else:
                fits = longest * (len(group) + 1) <= self.chunk
            if not fits:
                break
            if self._is_short(other) and self._suits_graph(other) == by_graph:
                group.append(other)
                self.jobs.remove(other)
        return group

    def _suits_graph(self, job: Prefill) -> bool:
        """Whether a CUDA graph can read a prompt: of one text, and of which nothing is known."""
        if self.graphs is None or len(job.texts) > 1 or not self._is_short(job):
            return False
        known = self.prefixes is not None and self.prefixes.knows(job.ids)
        return not known and self.graphs.fits([len(job.ids)])

    def _reads_now(self, rows: int) -> bool:
        """Whether to read prompts in this step.

        On a GPU, reading one short prompt takes as long as reading several, and all rows wait for
        it: a prompt waits up to `PATIENCE` steps for others.
        """
        few = len(self.jobs) * 16 < rows
        begun = any(job.state is not None for job in self.jobs)
        if self.patient and few and not begun and self.steps_waited < PATIENCE:
            self.steps_waited += 1
            return False
        self.steps_waited = 0
        return True

    def _is_short(self, job: Prefill) -> bool:
        short = len(job.ids) <= self.chunk
        return job.state is None and short and job.request.prompt_logprobs is None

    def _fail(self, group: list[Prefill], error: Exception) -> None:
        """Several prompts together: try each alone. One: its request has failed."""
        if len(group) == 1:
            self.fail(group[0], error)
            return
        for job in group:
            job.state, job.read = None, 0
            try:
                self._read_together([job])
            except torch.AcceleratorError:
                raise
            except Exception as own:
                self.fail(job, own)

    def _start(self, group: list[Prefill]) -> tuple[State, list[int]]:
        """The state before the prompts are read, with what is known of them; how much is known."""
        capacity = self._width(group)
        source = None
        if group[0].request.source is not None:
            sources = [list(cast(Sequence[int], job.request.source)) for job in group]
            source = Source(*pad_prompts(sources, self.language.device))
            capacity = max(job.need(self.language.context) for job in group)
        state = self.language.start(len(group), capacity, source)
        known = [0] * len(group)
        if self.prefixes is not None and group[0].request.prompt_logprobs is None:
            state = cast(TransformerState, state)
            for row, job in enumerate(group):
                known[row] = self.prefixes.load(job.ids, state, row)
            if any(known):
                lengths = to_device(known, state.lengths.device)
                state = replace(state, lengths=lengths, max_length=max(known), equal_lengths=False)
        return state, known

    def _width(self, group: list[Prefill]) -> int:
        """The ids of the longest prompt; on a GPU padded, so that fewer kernels are compiled."""
        longest = max(len(job.ids) for job in group)
        padded = -(-longest // MULTIPLE) * MULTIPLE if self.patient else longest
        return min(padded, self.language.context or padded)

    def _read_together(self, group: list[Prefill]) -> None:
        state, known = self._start(group)
        rows = [job.ids[length:] for job, length in zip(group, known, strict=True)]
        width = max(map(len, rows)) if any(known) else self._width(group)
        ragged = min(map(len, rows)) < width
        if ragged and max(known) + width > self._width(group):
            # a short rest after a long known beginning would be padded beyond the capacity
            for job in group:
                try:
                    self._read_together([job])
                except torch.AcceleratorError:
                    raise
                except Exception as error:
                    self.fail(job, error)
            return
        device = state.lengths.device
        ids = to_device(pad_rows(rows, width), device)
        counts = to_device([len(row) for row in rows], device)
        if self.patient and not any(known):  # the lengths are not read back from the device
            state = replace(cast(TransformerState, state), static=True)
        logits, state = self.language.step(ids, state, counts=counts if ragged else None)
        self.tokens += sum(map(len, rows))
        self._complete(group, logits[:, -1], state)

    def _read_by_graph(self, group: list[Prefill]) -> None:
        graphs = cast(PromptGraphs, self.graphs)
        first, ids = len(graphs.rows.lengths), [job.ids for job in group]
        logits = graphs.read(ids)
        self.tokens += sum(map(len, ids))
        if self.prefixes is not None:
            self.prefixes.lookups += sum(map(len, ids))
            for row, prompt in enumerate(ids, first):
                self.prefixes.save(prompt, partial(graphs.rows.read, row))
        self.join(group, logits, None)

    def _read_chunk(self, job: Prefill) -> None:
        if job.state is None:
            job.state, (job.read,) = self._start([job])
        ids = job.ids[job.read : job.read + self.chunk]
        scored = job.request.prompt_logprobs is not None
        tensor = to_device(ids, job.state.lengths.device).unsqueeze(0)
        logits, job.state = self.language.step(tensor, job.state, all_logits=scored)
        self.tokens += len(ids)
        job.read += len(ids)
        if scored and job.texts[0].count == 0:
            following = job.ids[job.read - len(ids) + 1 : job.read + 1]
            if following:
                scores = score_tokens(
                    logits[0, : len(following)], following, cast(int, job.request.prompt_logprobs)
                )
                job.request.prompt_scores += scores
        if job.read < len(job.ids):
            self.jobs.append(job)
        else:
            self._complete([job], logits[:, -1], job.state)

    def _complete(self, group: list[Prefill], logits: Tensor, state: State) -> None:
        if self.prefixes is not None:
            for row, job in enumerate(group):
                self.prefixes.save(job.ids, partial(read_row, cast(TransformerState, state), row))
        self.join(group, logits, state)
