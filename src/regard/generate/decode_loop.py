"""Decode loops: feed the last ids to the model and sample the next; eager or as a CUDA graph."""

from collections.abc import Callable
from typing import Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.generate.chain import Chain
from regard.generate.samplers.logits_processor import PerRow
from regard.generate.sampling_state import SamplingState
from regard.models.base import Capturable, Language, State, is_prefix_lm
from regard.nn.state import ImageSource, Source

TOKENS_PER_SYNC = 16  # tokens that a CUDA graph decodes before the host reads them
SOURCE_MULTIPLE = 32  # sources are padded to a multiple of this length


@runtime_checkable
class DecodeLoop(Protocol):
    """Runs decode steps for a batch of rows: feeds the last ids to the model, samples the next."""

    tokens_per_sync: int  # tokens to decode between two host synchronizations
    sampling: SamplingState
    state: State
    last: Int[Tensor, " rows"]  # the ids sampled last, not yet fed to the model

    def decode(self, steps: int) -> Int[Tensor, "rows steps"]:
        """The next `steps` ids of each row."""

    def raise_if_failed(self) -> None:
        """Raise if a row had no token left to sample from."""

    def select(self, rows: Int[Tensor, " selected"], chain: Chain) -> "DecodeLoop":
        """A loop for a subset of the rows, with their chain."""


class EagerLoop:
    """A decode loop that calls the model and the chain token by token."""

    tokens_per_sync = 1

    def __init__(
        self, model: Language, chain: Chain, sampling: SamplingState, state: State, last: Tensor
    ) -> None:
        self.model, self.chain, self.sampling = model, chain, sampling
        self.state, self.last = state, last

    def decode(self, steps: int) -> Int[Tensor, "rows steps"]:
        """The next `steps` ids of each row."""
        decoded = []
        for _ in range(steps):
            logits, self.state = self.model.step(self.last.unsqueeze(1), self.state)
            self.last = self.chain(logits[:, -1], self.sampling)
            self.sampling.append(self.last)
            decoded.append(self.last)
        return self.last.unsqueeze(1) if steps == 1 else torch.stack(decoded, 1)

    def raise_if_failed(self) -> None:
        """Do nothing: the chain already raises at every token."""

    def select(self, rows: Int[Tensor, " selected"], chain: Chain) -> "EagerLoop":
        """A loop for a subset of the rows, with their chain."""
        sampling, state = self.sampling.select(rows), self.state.select(rows)
        return EagerLoop(self.model, chain, sampling, state, self.last[rows])


class CudaGraphLoop:
    """Captures one decode step as a CUDA graph after its first run, and replays it.

    Replaying needs no host synchronization. All tensors keep their addresses, so that the loop
    can be reused for another batch of the same size. On a CPU it runs the same steps uncaptured.
    """

    tokens_per_sync = TOKENS_PER_SYNC

    def __init__(
        self,
        model: Language,
        chain: Chain,
        sampling: SamplingState,
        state: State,
        last: Tensor,
        source: Source | None = None,
    ) -> None:
        self.model, self.chain, self.sampling, self.source = model, chain, sampling, source
        self.state, self.last = cast(Capturable, state).with_static_shapes(), last.clone()
        self.replay_step: Callable[[], None] | None = None
        self.replay_prefill: Callable[[], None] | None = None
        self.prompt_ids = self.prompt_lengths = self.prefill_logits = last  # set by `prefill`
        self.prefill_state = state

    def decode(self, steps: int) -> Int[Tensor, "rows steps"]:
        """The next `steps` ids of each row."""
        for _ in range(steps):
            if self.replay_step is not None:
                self.replay_step()
            else:
                self._decode_step()
                self.replay_step = _capture(self._decode_step, self.last.device)
        recent = torch.arange(-steps, 0, device=self.last.device)
        return self.sampling.history.gather(1, self.sampling.lengths.unsqueeze(1) + recent)

    def raise_if_failed(self) -> None:
        """Raise if a row had no token left to sample from."""
        self.chain.raise_if_failed(self.sampling, self._logits_after)

    def prefill(
        self,
        ids: Int[Tensor, "rows time"],
        counts: Int[Tensor, " rows"],
        source: Source | None = None,
    ) -> Float[Tensor, "rows vocab"]:
        """Prefill the state with the prompts of another batch; return the logits after them."""
        self.source, initial = source, None
        if source is not None:
            initial = self.model.start(len(ids), 1, source)
        self.prefill_state = cast(Capturable, self.state).reset(initial)
        if self.replay_prefill is None or self.prompt_ids.shape != ids.shape:
            self.prompt_ids, self.prompt_lengths = ids.clone(), counts.clone()
            self.replay_prefill = _capture(self._prefill, ids.device)
        self.prompt_ids.copy_(ids)
        self.prompt_lengths.copy_(counts)
        self.replay_prefill()
        return self.prefill_logits

    def select(self, rows: Int[Tensor, " selected"], chain: Chain) -> "CudaGraphLoop":
        """A loop for a subset of the rows, with their chain; its step is captured anew."""
        sampling, state = self.sampling.select(rows), self.state.select(rows)
        source = self.source and self.source.select(rows)
        return CudaGraphLoop(self.model, chain, sampling, state, self.last[rows], source)

    def load(self, sampling: SamplingState, last: Tensor) -> None:
        """Copy the sampling state of the prefilled batch into the captured tensors."""
        self.last.copy_(last)
        for captured, new in zip(_tensors(self.sampling), _tensors(sampling), strict=True):
            captured.copy_(new)

    def can_reuse(
        self, chain: Chain, sampling: SamplingState, capacity: int, source: Source | None
    ) -> bool:
        """Whether another batch has the same chain, number of rows, capacity and source length."""
        captured = self.sampling
        return (
            (chain is self.chain or (not _has_per_row_settings(chain) and chain == self.chain))
            and cast(Capturable, self.state).matches_capacity(capacity)
            and (source and source.ids.shape) == (self.source and self.source.ids.shape)
            and sampling.history.shape == captured.history.shape
            and sampling.stop == captured.stop
        )

    def _logits_after(self, row: int, length: int) -> Float[Tensor, "rows vocab"]:
        """The model's logits after the first `length` ids of a row, computed again."""
        ids = self.sampling.history[row : row + 1, :length][:, -(self.model.context or length) :]
        index = torch.tensor([row], device=ids.device)
        state = self.model.start(1, ids.shape[1], self.source and self.source.select(index))
        logits, _ = self.model.step(ids, state)
        return logits[:, -1]

    def _decode_step(self) -> None:
        logits, self.state = self.model.step(self.last.unsqueeze(1), self.state)
        self.last.copy_(self.chain.sample(logits[:, -1], self.sampling, use_kernel=True))
        self.sampling.append(self.last)

    def _prefill(self) -> None:
        state, counts = self.prefill_state, self.prompt_lengths
        logits, _ = self.model.step(self.prompt_ids, state, counts=counts)
        self.prefill_logits = logits[:, -1]


class CudaGraphDecoder:
    """A `Language` that decodes with a CUDA graph, and reuses the graph for the next batch.

    On a CPU it decodes eagerly, unless `capture` is set.
    """

    def __init__(self, model: Language, *, capture: bool | None = None) -> None:
        self.model = model
        self._capture = capture  # None: on a GPU
        self.loop: CudaGraphLoop | None = None

    @property
    def context(self) -> int | None:
        """The maximum number of ids of a row."""
        return self.model.context

    @property
    def vocab_size(self) -> int:
        """The number of logits per position."""
        return self.model.vocab_size

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    def start(self, rows: int, capacity: int, source: Source | None = None) -> State:
        """Call `start` of the model."""
        return self.model.start(rows, capacity, source)

    def step(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
        all_logits: bool = False,
    ) -> tuple[Float[Tensor, "rows scored vocab"], State]:
        """Call `step` of the model."""
        return self.model.step(ids, state, counts=counts, all_logits=all_logits)

    def can_capture(self, chain: Chain) -> bool:
        """Whether a decode step with this chain may be captured as a CUDA graph."""
        enabled = self.model.device.type == "cuda" if self._capture is None else self._capture
        # the prompt of a prefix LM and the ids after it have different masks
        return enabled and chain.capturable and not is_prefix_lm(self.model)

    def start_loop(
        self,
        chain: Chain,
        sampling: SamplingState,
        ids: Int[Tensor, "rows time"],
        counts: Int[Tensor, " rows"],
        capacity: int,
        source: Source | None = None,
    ) -> DecodeLoop:
        """Prefill the prompts, sample the first ids, and return the loop for the others.

        The cached loop is reused if it fits. It is not cached while it is in use, so that no two
        generations share it. A state that cannot be captured is decoded eagerly.
        """
        loop, self.loop = self.loop, None
        source = source and _pad_source(source, self.model)
        if loop is not None and loop.can_reuse(chain, sampling, capacity, source):
            self._require_unchanged()
            logits = loop.prefill(ids, counts, source)
        else:
            loop, state = None, self.model.start(len(ids), capacity, source)
            scored, state = self.model.step(ids, state, counts=counts)
            logits = scored[:, -1]
            if not isinstance(state, Capturable):
                last = chain(logits, sampling)
                sampling.append(last)
                return EagerLoop(self.model, chain, sampling, state, last)
        last = chain.sample(logits, sampling, use_kernel=True)
        sampling.append(last)
        if loop is None:
            return CudaGraphLoop(self.model, chain, sampling, state, last, source)
        loop.load(sampling, last)
        return loop

    def _require_unchanged(self) -> None:
        """Raise if the weights of a packed model have changed.

        `start` checks this too, but a loop that is reused does not call `start`.
        """
        if check := getattr(self.model, "require_unchanged", None):
            check(contents=True)


def _pad_source(source: Source, model: Language) -> Source:
    """The source with a padded length, so that others of a similar length can reuse a loop."""
    if isinstance(source, ImageSource):
        return source
    length = source.ids.shape[1]
    padded = length + -length % SOURCE_MULTIPLE
    limit = getattr(getattr(model, "config", None), "context", None) or padded
    padding = max(0, min(padded, limit) - length)
    return Source(F.pad(source.ids, (0, padding)), source.lengths)


def _has_per_row_settings(chain: Chain) -> bool:
    """Whether its settings are tensors, which `==` compares elementwise."""
    return any(isinstance(sampler, PerRow) for sampler in chain.samplers)


def _capture(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Capture a function as a CUDA graph and return its replay; on a CPU, return the function."""
    if device.type != "cuda":
        return function
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def _tensors(sampling: SamplingState) -> list[Tensor]:
    """The tensors of a sampling state except its constants, in a fixed order."""
    generators = sampling.generators
    fixed = [
        sampling.history,
        sampling.lengths,
        sampling.prompt_lengths,
        generators.keys,
        generators.counters,
    ]
    return [*fixed, *(sampling.row_states[key] for key in sorted(sampling.row_states, key=str))]
