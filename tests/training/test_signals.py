"""Being asked to stop."""

import signal
import threading

import pytest

from regard.training.signals import ASKING, Interrupts


@pytest.mark.parametrize("asked", ASKING)
def test_the_first_signal_is_noted_and_the_handlers_come_back(asked):
    before = {each: signal.getsignal(each) for each in ASKING}
    with Interrupts() as interrupts:
        assert interrupts.received is None
        signal.raise_signal(asked)
        assert interrupts.received == asked
        assert interrupts.exit_code == (130 if asked == signal.SIGINT else 75)
    assert {each: signal.getsignal(each) for each in ASKING} == before


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
