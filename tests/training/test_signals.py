"""Being asked to stop."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from regard.errors import TrainingStopped
from regard.training.signals import STOP_SIGNALS, Interrupted, Interrupts, stoppable
from storm.shell import on_terminal


@pytest.mark.parametrize("asked", STOP_SIGNALS)
def test_the_first_signal_is_noted_and_the_handlers_come_back(asked):
    before = {each: signal.getsignal(each) for each in STOP_SIGNALS}
    with Interrupts() as interrupts:
        assert interrupts.received is None
        signal.raise_signal(asked)
        assert interrupts.received == asked
        assert interrupts.exit_code == (130 if asked == signal.SIGINT else 75)
    assert {each: signal.getsignal(each) for each in STOP_SIGNALS} == before


def test_a_second_ctrl_c_ends_at_once():
    with Interrupts():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_scheduler_that_asks_twice_still_gets_a_saved_run():
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert interrupts.exit_code == 75


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no terminals that hang up")
def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
            assert interrupts.received is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_of_the_main_thread_nothing_is_handled():
    failed = []

    def work():
        try:
            with Interrupts():
                pass
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed


@pytest.mark.parametrize("asked", STOP_SIGNALS)
def test_where_there_is_haste_a_signal_is_noted_and_ends_what_is_done(asked):
    with Interrupts() as interrupts:
        with pytest.raises(Interrupted), interrupts.raise_on_signal():
            signal.raise_signal(asked)
        assert interrupts.received == asked
        with (
            pytest.raises(Interrupted),
            interrupts.raise_on_signal(),
        ):  # as it came before
            raise AssertionError
        if asked != signal.SIGINT:
            signal.raise_signal(asked)  # no more haste


@pytest.mark.parametrize("asked", [each for each in STOP_SIGNALS if each != signal.SIGINT])
def test_what_does_not_train_yet_is_stopped_and_can_be_tried_again(asked):
    before = signal.getsignal(asked)
    said = f"stopped by {asked.name} before or after training"
    with pytest.raises(TrainingStopped, match=said) as raised, stoppable():
        signal.raise_signal(asked)
    assert raised.value.exit_code == 75
    assert signal.getsignal(asked) == before


def test_under_torchrun_a_signal_ends_even_a_process_that_waits(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGTERM)
    with stoppable():
        assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_ctrl_c_is_heard_inside_a_long_call():
    program = (
        "import hashlib, sys\n"
        "from regard.training.signals import Interrupts\n"
        "with Interrupts():\n"
        "    print('ready', flush=True)\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)  # many minutes, and deaf\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            for _ in range(2):
                process.send_signal(signal.SIGINT)
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.2)
            assert process.wait(60) == 130
        finally:
            process.kill()


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals that hang up")
def test_a_terminal_that_hangs_up_can_still_be_written_to():
    program = (
        "import sys, time\n"
        "from regard.training.signals import Interrupts\n"
        "with Interrupts() as interrupts:\n"
        "    print('ready', flush=True)\n"
        "    while interrupts.received is None:\n"
        "        time.sleep(0.01)\n"
        "    for stream in (sys.stdout, sys.stderr):\n"
        "        print('saved', file=stream, flush=True)\n"
        "sys.exit(interrupts.exit_code)\n"
    )
    process, terminal = on_terminal("-c", program)
    with process, open(terminal) as ours:  # which hangs up at its end
        assert ours.readline() == "ready\n"
    assert process.returncode == 75


def test_a_signal_whose_exception_was_discarded_stops_the_run_that_starts_afterwards():
    with stoppable():
        with contextlib.suppress(Exception):  # as code does that is imported
            os.kill(os.getpid(), signal.SIGTERM)
        with Interrupts() as interrupts:
            assert interrupts.received == signal.SIGTERM
    with stoppable(), Interrupts() as interrupts:
        assert interrupts.received is None
