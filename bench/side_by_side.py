"""Processes that prepare their jobs concurrently and then run them one at a time.

Compiling for a GPU takes minutes of one CPU core and seconds of the GPU. Here every job compiles in
a separate process; when all are ready, each in turn runs alone on the GPU.
"""

import fcntl
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

LOCK = Path(tempfile.gettempdir(), "side_by_side.lock")
Prepare = Callable[..., Callable[..., Any]]  # prepares a job and returns a function that runs it


@contextmanager
def exclusive() -> Iterator[None]:
    """A context that only one process at a time enters."""
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Worker:
    """A process that prepares a job, `job = prepare(*args)`, and then runs it at every `call`."""

    def __init__(self, name: str, prepare: Prepare, *args: Any) -> None:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("spawn")
        self.name, self.ready = name, False
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_work, args=(prepare, args, other))
        self.process.start()
        other.close()

    def wait(self, until: float) -> None:
        """Wait until the worker has prepared its job, at most until the time `until`."""
        in_time = self.pipe.poll(max(0.0, until - time.perf_counter()))
        answer = self._receive() if in_time else "was not ready before the time limit"
        self.ready = isinstance(answer, float)
        if isinstance(answer, float):
            print(f"{self.name}: ready after {answer:.0f} s", flush=True)
        else:
            self._fail(answer)

    def call(self, *args: Any) -> Any:
        """The result of the job; None if it fails, or has failed before."""
        if not self.ready:
            return None
        self.pipe.send(args)
        answer = self._receive()
        if isinstance(answer, str):
            return self._fail(answer)
        return answer[0]

    def end(self) -> None:
        self.process.kill()
        self.process.join()

    def _receive(self) -> Any:
        try:
            return self.pipe.recv()
        except EOFError:
            return "the process ended"

    def _fail(self, answer: str) -> None:
        print(f"{self.name}: {answer}", flush=True)
        self.ready = False
        self.end()


def wait_for_all(workers: Sequence[Worker], until: float) -> None:
    """Wait until all workers are ready; end those that are not ready at the time `until`."""
    for worker in workers:
        worker.wait(until)


def _work(prepare: Prepare, args: tuple[Any, ...], pipe: Connection) -> None:
    try:
        start = time.perf_counter()
        _configure_concurrent_compilation()
        job = prepare(*args)
        free_memory()
        pipe.send(time.perf_counter() - start)
        while True:
            result = job(*pipe.recv())
            free_memory()
            pipe.send((result,))
    except EOFError:
        pass
    except Exception:
        pipe.send(traceback.format_exc())


def _configure_concurrent_compilation() -> None:
    """Set up torch for compiling while other processes compile on the same GPU.

    The backward pass is compiled before the forward pass runs, so that no activations are held
    meanwhile; and only one process at a time autotunes a kernel.
    """
    from torch._functorch import config
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    torch.set_float32_matmul_precision("high")
    if hasattr(config, "force_non_lazy_backward_lowering"):
        config.force_non_lazy_backward_lowering = True
    autotune = CachingAutotuner.autotune_to_one_config

    def autotune_exclusively(self: Any, *args: Any, **kwargs: Any) -> Any:
        with exclusive():
            return autotune(self, *args, **kwargs)

    CachingAutotuner.autotune_to_one_config = autotune_exclusively


def retry_when_out_of_memory(run: Callable[[], None]) -> None:
    """Call `run`; when out of memory, call it again until other processes have freed theirs."""
    with suppress(torch.OutOfMemoryError):
        return run()
    free_memory()  # here, where the exception no longer refers to the tensors of `run`
    with exclusive():
        for _ in range(20):
            with suppress(torch.OutOfMemoryError):
                return run()
            free_memory()
            time.sleep(3)
        return run()


def free_memory() -> None:
    """Release the memory of tensors in reference cycles, and the cache of torch's allocator."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
