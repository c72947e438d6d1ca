"""Independent jobs in processes of their own, their progress told in ours."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from typing import Any, TypeVar

from converters.errors import EdgeVitError

T = TypeVar("T")
Progress = Callable[[str], None]
Job = Callable[[Progress], T]

# In a worker: where its progress goes, whether it was told to stop, and whether it is at a job.
_lines: SimpleQueue[str | None] | None = None
_interrupted = False
_working = False


def side_by_side(jobs: Sequence[Job[T]], processes: int, progress: Progress) -> list[T]:
    """Results in the order of `jobs`, which can be pickled and are begun in that order, `processes` at a time.

    An exception of one job is raised when all have ended; of several, the first job's. An interrupt is passed on to
    the workers, which are waited for, so that each can tidy up. Raises EdgeVitError when a worker dies.
    """
    if processes < 2 or len(jobs) < 2:
        return [job(progress) for job in jobs]
    spawn = multiprocessing.get_context("spawn")
    lines: SimpleQueue[str | None] = spawn.SimpleQueue()
    teller = threading.Thread(target=_tell, args=(lines, progress), daemon=True)
    teller.start()
    try:
        with ProcessPoolExecutor(min(processes, len(jobs)), spawn, _begin, (lines,)) as pool:
            try:
                futures = [pool.submit(_work, job) for job in jobs]
                return [future.result() for future in futures]
            except BrokenProcessPool as error:
                raise EdgeVitError("a worker process died, out of memory perhaps; the rest is as it was") from error
            except KeyboardInterrupt:
                for worker in multiprocessing.active_children():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.pid or 0, signal.SIGINT)
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        lines.put(None)
        teller.join()


def _tell(lines: SimpleQueue[str | None], progress: Progress) -> None:
    while (line := lines.get()) is not None:
        progress(line)


def _begin(lines: SimpleQueue[str | None]) -> None:
    global _lines
    _lines = lines
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, _interrupt_once)


def _interrupt_once(_signal: int, _frame: object) -> None:
    """A terminal's Ctrl-C reaches a worker too, before the one passed on: the second must not stop the tidying up."""
    global _interrupted
    first, _interrupted = not _interrupted, True
    if first and _working:  # else it is between jobs, or loading the first one, and `_work` will see it
        raise KeyboardInterrupt


def _work(job: Job[Any]) -> Any:
    global _working
    assert _lines is not None
    _working = True
    try:
        if _interrupted:  # the pool hands a worker its next job before the last is over
            raise KeyboardInterrupt
        return job(_lines.put)
    finally:
        _working = False
