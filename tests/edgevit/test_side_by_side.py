"""Jobs side by side: order of results, progress told in this process, errors, an interrupt that reaches all."""

import multiprocessing
import os
import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from converters.errors import EdgeVitError
from edgevit.side_by_side import side_by_side


def square(number, progress):
    progress(f"{number} in {os.getpid()}")
    return number**2


def fail(progress):
    raise EdgeVitError("no such thing")


def die(progress):
    os._exit(1)


def wait_for_interrupt(folder, progress):
    """Tells that it has begun, then waits; leaves a file only where it was interrupted and could tidy up."""
    try:
        progress("begun")
        for _ in range(1000):  # in short turns: a signal that comes just before a wait is seen after it
            threading.Event().wait(0.02)
    finally:
        Path(folder, str(os.getpid())).touch()


def test_results_keep_their_order_and_progress_comes_from_other_processes():
    lines = []
    assert side_by_side([partial(square, n) for n in (3, 1, 2)], 2, lines.append) == [9, 1, 4]
    assert sorted(line.split()[0] for line in lines) == ["1", "2", "3"]
    assert not any(line.endswith(f" {os.getpid()}") for line in lines)


def test_one_process_is_this_one():
    lines = []
    assert side_by_side([partial(square, n) for n in (3, 1)], 1, lines.append) == [9, 1]
    assert all(line.endswith(f" {os.getpid()}") for line in lines)


def test_an_error_comes_through_as_itself():
    with pytest.raises(EdgeVitError, match="no such thing"):
        side_by_side([partial(square, 2), fail], 2, lambda line: None)


def test_a_worker_that_dies_is_one_clear_line():
    with pytest.raises(EdgeVitError, match="worker process died"):
        side_by_side([partial(square, 2), die], 2, lambda line: None)


def test_an_interrupt_of_this_process_alone_reaches_the_workers(tmp_path):
    begun = []

    def progress(line):
        begun.append(line)
        if len(begun) == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        side_by_side([partial(wait_for_interrupt, str(tmp_path))] * 3, 2, progress)
    assert len(begun) == len(list(tmp_path.iterdir())) == 2
    assert not multiprocessing.active_children()
