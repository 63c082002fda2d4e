"""The models that a server offers: loaded at their first request, unloaded when idle."""

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from regard.accel import pack
from regard.api.generation import SMALL_MODEL, chain_for
from regard.api.run import Run, load
from regard.errors import CheckpointError, ConfigError
from regard.generate.chain import Chain
from regard.generate.sampling_state import SamplingState
from regard.models.base import Language
from regard.serve.constraint import JsonSchemas
from regard.serve.engine import BatchEngine, EngineConfig
from regard.serve.worker import EngineThread
from regard.text import PairTokenizers, Tokenizer
from regard.training.setup.device import free_memory, usable_cores
from regard.training.storage.initial_weights import ADAPTERS, adapter_names

MAX_CHAINS = 256  # sampler chains that a model caches


@dataclass(eq=False)
class ServedModel:
    """A model in memory, with its engine if it generates."""

    name: str
    run: Run
    engine: BatchEngine | None
    last_used: float = field(default_factory=time.monotonic)  # when its last request ended
    active_requests: int = 0
    chains: dict[Any, Chain] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the generated text."""
        return self.run.tokenizer

    @property
    def takes_source(self) -> bool:
        """Whether it is an encoder-decoder: it reads a source and writes a target."""
        return isinstance(self.run.tokenizers, PairTokenizers)

    @property
    def context(self) -> int | None:
        """The largest number of ids that the model reads; None: no limit."""
        return cast(int | None, getattr(self.run.model, "context", None))

    @property
    def fingerprint(self) -> str:
        """Equal for the same tokenizer, even if the weights of two runs differ."""
        return f"fp_{self.run.tokenizer.fingerprint()[:12]}"

    def piece(self, token: int) -> str:
        """The text of one token."""
        return self.tokenizer.piece(token)

    @cached_property
    def schemas(self) -> JsonSchemas:
        """Makes JSON constraints for its vocabulary; created when first used."""
        return JsonSchemas(self.tokenizer)

    @cached_property
    def run_copy(self) -> Run:
        """The run with a copy of the model: hooks on it do not see what the engine computes."""
        with torch.inference_mode(False):  # inference tensors have no gradients and no versions
            return replace(self.run, model=deepcopy(self.run.model))

    def chain(self, specs: tuple[str, ...] | None, order: str | None) -> Chain:
        """The chain of these samplers; equal samplers give the same object."""
        key = (specs, order)
        chain = self.chains.get(key)  # several threads call this, and one may clear the dict
        if chain is None:
            if len(self.chains) >= MAX_CHAINS:
                self.chains.clear()
            chain = self._check_chain(chain_for(self.tokenizer, specs, order))
            chain = self.chains.setdefault(key, chain)
        return chain

    def _check_chain(self, chain: Chain) -> Chain:
        """Sample once: some settings are checked against the vocabulary only then."""
        with torch.inference_mode():
            sampling = SamplingState.from_prompts([[0]], 1, seed=0, stop=self.tokenizer.stop_ids)
            chain.sample(torch.zeros(1, cast(Language, self.run.model).vocab_size), sampling)
        return chain


class Models:
    """The models of a server by name."""

    preload = True  # load the first one when the server starts

    def __init__(
        self,
        paths: Sequence[Path],
        worker: EngineThread,
        config: EngineConfig,
        *,
        device: str = "auto",
        idle: float | None = None,
    ) -> None:
        self.worker, self.config, self.device, self.idle = worker, config, device, idle
        self.paths = _name_paths(paths)
        self.adapters: dict[str, Path] = {}  # of models that are called BASE:ADAPTER
        for base, path in list(self.paths.items()):
            for adapter in adapter_names(path):
                self._add_adapter(base, adapter, path / ADAPTERS / adapter)
        self.loaded: dict[str, ServedModel] = {}
        self._unloaded_totals: dict[str, Counter[str]] = {}  # counters of unloaded engines
        self._locks: dict[str, asyncio.Lock] = {}
        self.created = int(time.time())
        self.threads = min(torch.get_num_threads(), usable_cores())

    def add_adapter(self, name: str, path: Path) -> None:
        """Offer a model with an adapter; `name` is BASE:ADAPTER, or ADAPTER for the first run."""
        base, separator, adapter = name.rpartition(":")
        base = base if separator else self.default
        if base not in self.paths or base in self.adapters:
            raise ConfigError(
                f"--adapter {name}: no run {base!r} is served; available: {', '.join(self.paths)}"
            )
        if not path.is_dir():
            raise ConfigError(f"--adapter {name}: no adapter at {path}")
        self._add_adapter(base, adapter, path)

    def _add_adapter(self, base: str, adapter: str, path: Path) -> None:
        name = f"{base}:{adapter}"
        if name in self.paths:
            raise ConfigError(f"two models are called {name!r}; rename the adapter at {path}")
        self.paths[name], self.adapters[name] = self.paths[base], path

    @property
    def default(self) -> str:
        """The name of the model for requests that name none."""
        return next(iter(self.paths))

    def refresh(self) -> None:
        """Update `paths`, if the models can change while they are served."""

    async def get(self, name: str | None) -> ServedModel:
        """The model of this name, loaded if it is not yet; raise `KeyError` if there is none.

        It stays in memory until it is released.
        """
        name = name or self.default
        if name not in self.paths:
            raise KeyError(name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name not in self.loaded:
                self.loaded[name] = await asyncio.to_thread(self._load, name)
            model = self.loaded[name]
            model.active_requests += 1
            return model

    def release(self, model: ServedModel) -> None:
        """Release a model obtained by `get`."""
        model.active_requests -= 1
        model.last_used = time.monotonic()

    def _load(self, name: str) -> ServedModel:
        run = load(self.paths[name], self.device, adapter=self.adapters.get(name))
        engine = None
        if isinstance(run.model, Language) and run.tokenizers is not None and _generates(run):
            with torch.inference_mode():
                language = pack(run.model, free_memory=free_memory(run.model.device))
            engine = BatchEngine(language, self.config, stop=run.tokenizer.stop_ids)
            self.worker.add(name, engine, 1 if run.parameters < SMALL_MODEL else self.threads)
        model = ServedModel(name, run, engine)
        _freeze_gc()
        return model

    async def unload_idle(self) -> None:
        """Unload models without a request for `idle` seconds; runs until it is cancelled."""
        if self.idle is None:
            return
        while True:
            await asyncio.sleep(min(1.0, self.idle / 2))
            names = [name for name, model in self.loaded.items() if self._is_idle(model)]
            for name in names:
                self.unload(name)
            if names:
                _freeze_gc()

    def _is_idle(self, model: ServedModel) -> bool:
        busy = model.active_requests or (model.engine is not None and model.engine.busy)
        return not busy and time.monotonic() - model.last_used > cast(float, self.idle)

    def unload(self, name: str) -> None:
        """Unload a model; the next request loads it again from its folder."""
        self.worker.remove(name)
        engine = self.loaded.pop(name).engine
        if engine is not None:
            self._unloaded_totals.setdefault(name, Counter()).update(engine.totals())
        gc.unfreeze()  # so that `_freeze_gc` can collect the objects of the model

    def engines(self) -> dict[str, BatchEngine]:
        """The engines of the loaded models."""
        return {
            name: model.engine for name, model in self.loaded.items() if model.engine is not None
        }

    def totals(self) -> dict[str, Counter[str]]:
        """The counters of every model since the start, also of those that are unloaded."""
        totals = {name: Counter(counts) for name, counts in self._unloaded_totals.items()}
        for name, engine in self.engines().items():
            totals.setdefault(name, Counter()).update(engine.totals())
        return totals


def _freeze_gc() -> None:
    """Collect garbage, and exempt all objects that are left from later collections.

    torch has 200,000 of them: a collection would stop requests and the engine for 0.2 s.
    """
    gc.collect()
    gc.freeze()


def _generates(run: Run) -> bool:
    return "generate" in run.methods or "translate" in run.methods


def _name_paths(paths: Sequence[Path]) -> dict[str, Path]:
    """The paths of runs by folder name; a folder that is not a run stands for the runs in it."""
    named: dict[str, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise CheckpointError(f"no run at {path}; `regard train` or `regard import` writes one")
        runs = [path] if _is_run(path) else sorted(p for p in path.iterdir() if _is_run(p))
        if not runs:
            raise CheckpointError(
                f"{path} is not a run and has no run in it; `regard train` or `regard import` "
                "writes one"
            )
        for run in runs:
            name = run.resolve().name
            if name in named and named[name].resolve() != run.resolve():
                raise ConfigError(
                    f"{named[name]} and {run} would both be called {name!r}; rename a folder"
                )
            named[name] = run
    return named


def _is_run(path: Path) -> bool:
    return (path / "config.json").is_file()
