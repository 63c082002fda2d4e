"""The number of CPU threads while a run trains: fewer where other programs use the cores.

A step ends when its slowest thread does. With one thread per core, another program that uses half
of one core makes the whole step take twice as long; with one thread less, that core is not used.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import torch

from regard.config import TrainConfig

THREADS_DIR = Path("/proc/self/task")  # Linux: a folder per thread
CORES = Path("/proc/stat")  # Linux: a line per core, with the time of each kind of work
WINDOW = 2.0  # seconds of steps that are timed with a number of threads
# The machine is busy if more than BUSY threads wait for a core, on average, and other programs use
# more than OTHER_LOAD cores: threads also wait for each other.
BUSY = 0.3
OTHER_LOAD = 0.2
SLOWER = 0.9  # a trial below this fraction of the speed before ends after MIN_TRIAL_SECONDS
MIN_TRIAL_SECONDS = 0.5
GAIN = 1.15  # how much faster another number of threads must be
WAIT, MAX_WAIT = 10.0, 160.0  # seconds between two trials; doubled after each without gain
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Threads:
    """Tries half or twice as many threads on a busy machine, and keeps what is faster.

    A number that is set by `train.threads` or `OMP_NUM_THREADS` is kept. Nothing is tried on a free
    machine, or where the system does not report how long threads wait for a core (Linux does).
    Another number of threads sums in another order, which changes the last bits of the results.
    """

    def __init__(self, settings: TrainConfig, device: torch.device, world_size: int) -> None:
        self.max_threads = torch.get_num_threads()
        given = settings.threads is not None or any(name in os.environ for name in VARIABLES)
        self.adapts = (
            not given and device.type == "cpu" and world_size == 1 and self.max_threads > 1
        )
        self.adapts = self.adapts and _wait_seconds() is not None
        self.before: tuple[int, float] | None = None  # threads and speed before a trial
        self.try_fewer = True  # whether the next trial on a busy machine is with fewer threads
        self.wait = WAIT
        self.next_trial = time.perf_counter() + 2 * WINDOW  # the first steps are slower
        self.start_clock(0)

    def start_clock(self, done: int) -> None:
        """Begin to time steps, after `done` of them."""
        self.clock, self.clock_step, self.clock_waited = time.perf_counter(), done, _wait_seconds()
        self.clock_cpu, self.clock_process = _cpu_seconds(), time.process_time()

    @property
    def current_threads(self) -> int:
        """The number of threads; during a trial, that before it."""
        return torch.get_num_threads() if self.before is None else self.before[0]

    def restore(self, threads: int | None) -> None:
        """Continue with the number of threads of a checkpoint."""
        if self.adapts and threads is not None and 1 <= threads <= self.max_threads:
            torch.set_num_threads(threads)

    def adapt(self, done: int) -> int | None:
        """Begin or end a trial if one is due; returns the number of threads if it changes."""
        now = time.perf_counter()
        seconds = now - self.clock
        if not self.adapts or seconds < MIN_TRIAL_SECONDS or done == self.clock_step:
            return None
        speed, threads = (done - self.clock_step) / seconds, torch.get_num_threads()
        slower = self.before is not None and speed < SLOWER * self.before[1]
        if seconds < WINDOW and not slower:
            return None
        is_busy = self._is_busy(seconds)
        self.start_clock(done)
        if self.before is not None:
            return self._end_trial(threads, speed)
        if now >= self.next_trial and (is_busy or threads < self.max_threads):
            self.try_fewer = (
                is_busy and threads > 1 and (self.try_fewer or threads == self.max_threads)
            )
            self.before = (threads, speed)
            torch.set_num_threads(
                threads // 2 if self.try_fewer else min(2 * threads, self.max_threads)
            )
        return None

    def _is_busy(self, seconds: float) -> bool:
        """Whether threads have waited for cores that other programs use, since the clock began."""
        waiting = ((_wait_seconds() or 0.0) - (self.clock_waited or 0.0)) / seconds
        cpu, process = _cpu_seconds(), time.process_time() - self.clock_process
        if cpu is None or self.clock_cpu is None or cpu - self.clock_cpu < process / 2:
            return waiting > BUSY  # it is not known what others use
        others = (cpu - self.clock_cpu - process) / seconds
        return waiting > BUSY and others > OTHER_LOAD

    def _end_trial(self, threads: int, speed: float) -> int | None:
        assert self.before is not None
        (threads_before, speed_before), self.before = self.before, None
        if speed >= GAIN * speed_before:
            self.wait = WAIT
            self.next_trial = time.perf_counter() + (
                0.0 if 1 < threads < self.max_threads else WAIT
            )
            return threads
        self.next_trial = time.perf_counter() + self.wait
        self.wait, self.try_fewer = min(2 * self.wait, MAX_WAIT), not self.try_fewer
        torch.set_num_threads(threads_before)
        return None


def _wait_seconds() -> float | None:
    """The seconds that all threads of this process have waited for a core; None if unknown."""
    waited = []
    with suppress(OSError):
        for thread in THREADS_DIR.iterdir():
            with suppress(OSError, IndexError, ValueError):  # the thread has ended
                waited.append(int((thread / "schedstat").read_text().split()[1]))
    return sum(waited) / 1e9 if waited else None


def _cpu_seconds() -> float | None:
    """The seconds for which any program has used the cores of this process; None if unknown."""
    used = 0
    with suppress(OSError, IndexError, ValueError, AttributeError):
        cores = os.sched_getaffinity(0)
        for line in CORES.read_text().splitlines():
            name, *counts = line.split()
            if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in cores:
                user, nice, system, _, _, irq, softirq, steal = map(int, counts[:8])
                used += user + nice + system + irq + softirq + steal
        return used / os.sysconf("SC_CLK_TCK")
    return None
