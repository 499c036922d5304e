"""Waiting is announced, and Ctrl-C is noted whoever catches it."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from tightfit.progress import Interrupts, Pace, PrintedProgress, said_while_waiting


def lines_in(capsys: pytest.CaptureFixture[str], count: int) -> list[str]:
    """Wait until that many lines were said; return them."""
    said = ""
    deadline = time.monotonic() + 60
    while said.count("\n") < count:
        assert time.monotonic() < deadline, said
        time.sleep(0.01)
        said += capsys.readouterr().err
    return said.splitlines()


def test_long_waits_are_announced_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with said_while_waiting(lambda: "searching a plan", every_s=0.01):
        lines = lines_in(capsys, 2)
    assert all(text.startswith("tightfit: searching a plan (0 s so far)") for text in lines[:2])


def test_short_waiting_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with said_while_waiting(lambda: "searching a plan", every_s=60):
        pass
    spoken = PrintedProgress(every_s=60)
    spoken.start("plan")
    spoken.stop()
    assert capsys.readouterr().err == ""


def test_where_nothing_can_be_drawn_tasks_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    spoken = PrintedProgress(every_s=0.01)
    spoken.start("proving gpt2", 2)
    spoken.start("plan")
    spoken.update(3, "overhead +2.0 %")
    lines_in(capsys, 1)
    assert "tightfit: proving gpt2: plan: overhead +2.0 %" in "\n".join(lines_in(capsys, 2))
    spoken.stop()
    spoken.close()
    while any(thread.name == "tightfit progress" for thread in threading.enumerate()):
        time.sleep(0.01)


def test_how_long_a_task_may_last_is_told_from_its_steps_and_its_limit() -> None:
    seconds = 0.0
    pace, endless = Pace(4, 25.0, lambda: seconds), Pace(4, None, lambda: seconds)
    seconds = 10.0
    assert pace.remaining() == "at most 15 s left"
    assert endless.remaining() == ""
    pace.reached(1), endless.reached(1)
    assert pace.remaining() == "about 15 s left"  # by its steps 30 s: the limit comes first
    assert endless.remaining() == "about 30 s left"
    seconds = 24.0
    assert pace.remaining() == "about 1 s left"
    assert endless.remaining() == "about 16 s left"
    seconds = 50.0
    assert pace.remaining() == "at most 0 s left"
    assert endless.remaining() == ""  # unknown: this step takes longer than the first


def test_an_interrupt_is_noted_though_somebody_catches_it() -> None:
    found = signal.signal(signal.SIGINT, signal.default_int_handler)  # a script may ignore it
    try:
        with Interrupts() as interrupts:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            assert interrupts.seen
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, found)


def test_interrupts_in_another_thread_are_not_noted() -> None:
    seen: list[bool] = []

    def listen() -> None:
        with Interrupts() as interrupts:
            seen.append(interrupts.seen)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [False]
