"""The number of CPU threads while a run trains: fewer where other programs use the cores.

A step ends when its slowest thread ends. With one thread per core, another program that uses half
of one core makes the whole step take twice as long; with fewer threads, no thread shares a core.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import torch

from regard.config import TrainConfig

THREADS_DIR = Path("/proc/self/task")  # Linux: a folder per thread
CPU_STAT = Path("/proc/stat")  # Linux: a line per core, with the time spent in each mode
WINDOW_SECONDS = 2.0  # for which steps are timed with one number of threads
# The machine is busy if more than BUSY_THREADS threads wait for a core, on average, and other
# programs use more than OTHER_LOAD cores: threads also wait for each other.
BUSY_THREADS = 0.3
OTHER_LOAD = 0.2
MIN_RELATIVE_SPEED = 0.9  # a slower trial ends after MIN_TRIAL_SECONDS
MIN_TRIAL_SECONDS = 0.5
MIN_SPEEDUP = 1.15  # another number of threads is kept if steps are faster by this factor
# seconds between trials; doubled after a trial without speedup
TRIAL_INTERVAL, MAX_TRIAL_INTERVAL = 10.0, 160.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Threads:
    """Tries half or twice as many threads on a busy machine; keeps the number with faster steps.

    On an idle machine only a number that was lowered before is raised again. A number that is set
    by `train.threads` or `OMP_NUM_THREADS` is kept, and so is any number where the system does not
    report how long threads wait for a core (Linux does).
    With another number of threads, sums are computed in another order, which changes the last bits
    of the results.
    """

    def __init__(self, settings: TrainConfig, device: torch.device, world_size: int) -> None:
        self.max_threads = torch.get_num_threads()
        is_set = settings.threads is not None or any(
            name in os.environ for name in THREAD_VARIABLES
        )
        self.adapts = (
            not is_set and device.type == "cpu" and world_size == 1 and self.max_threads > 1
        )
        self.adapts = self.adapts and _wait_seconds() is not None
        self.before_trial: tuple[int, float] | None = None  # threads and speed before a trial
        self.try_fewer = True  # whether the next trial on a busy machine is with fewer threads
        self.trial_interval = TRIAL_INTERVAL
        self.next_trial = time.perf_counter() + 2 * WINDOW_SECONDS  # the first steps are slower
        self.start_clock(0)

    def start_clock(self, step: int) -> None:
        """Begin to time steps, after `step` of them."""
        self.clock, self.clock_step, self.clock_waited = time.perf_counter(), step, _wait_seconds()
        self.clock_cpu, self.clock_process = _cpu_seconds(), time.process_time()

    @property
    def current_threads(self) -> int:
        """The number of threads; during a trial, the number before the trial."""
        return torch.get_num_threads() if self.before_trial is None else self.before_trial[0]

    def restore(self, threads: int | None) -> None:
        """Continue with the number of threads of a checkpoint."""
        if self.adapts and threads is not None and 1 <= threads <= self.max_threads:
            torch.set_num_threads(threads)

    def adapt(self, step: int) -> int | None:
        """Begin or end a trial if one is due; return the new number of threads if it changes."""
        now = time.perf_counter()
        seconds = now - self.clock
        if not self.adapts or seconds < MIN_TRIAL_SECONDS or step == self.clock_step:
            return None
        speed, threads = (step - self.clock_step) / seconds, torch.get_num_threads()
        slower = self.before_trial is not None and speed < MIN_RELATIVE_SPEED * self.before_trial[1]
        if seconds < WINDOW_SECONDS and not slower:
            return None
        is_busy = self._is_busy(seconds)
        self.start_clock(step)
        if self.before_trial is not None:
            return self._end_trial(threads, speed)
        if now >= self.next_trial and (is_busy or threads < self.max_threads):
            self.try_fewer = (
                is_busy and threads > 1 and (self.try_fewer or threads == self.max_threads)
            )
            self.before_trial = (threads, speed)
            torch.set_num_threads(
                threads // 2 if self.try_fewer else min(2 * threads, self.max_threads)
            )
        return None

    def _is_busy(self, seconds: float) -> bool:
        """Whether threads have waited for cores that other programs use, since the clock began."""
        waiting = ((_wait_seconds() or 0.0) - (self.clock_waited or 0.0)) / seconds
        cpu, process = _cpu_seconds(), time.process_time() - self.clock_process
        if cpu is None or self.clock_cpu is None or cpu - self.clock_cpu < process / 2:
            return waiting > BUSY_THREADS  # the load of other programs is unknown
        other_load = (cpu - self.clock_cpu - process) / seconds
        return waiting > BUSY_THREADS and other_load > OTHER_LOAD

    def _end_trial(self, threads: int, speed: float) -> int | None:
        assert self.before_trial is not None
        (threads_before, speed_before), self.before_trial = self.before_trial, None
        if speed >= MIN_SPEEDUP * speed_before:
            self.trial_interval = TRIAL_INTERVAL
            self.next_trial = time.perf_counter() + (
                0.0 if 1 < threads < self.max_threads else TRIAL_INTERVAL
            )
            return threads
        self.next_trial = time.perf_counter() + self.trial_interval
        self.trial_interval, self.try_fewer = (
            min(2 * self.trial_interval, MAX_TRIAL_INTERVAL),
            not self.try_fewer,
        )
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
    ticks = 0
    with suppress(OSError, IndexError, ValueError, AttributeError):
        cores = os.sched_getaffinity(0)
        for line in CPU_STAT.read_text().splitlines():
            name, *counts = line.split()
            if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in cores:
                user, nice, system, _, _, irq, softirq, steal = map(int, counts[:8])
                ticks += user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK")
    return None
