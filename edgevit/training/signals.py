"""Ctrl-C and SIGTERM as a wish that the loop reads between two steps, not an exception in the middle of one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """The training was asked to stop; its state is saved, and `--resume` goes on from there."""


class StopWish:
    """`with StopWish() as stop:` — `stop.wished` turns true at the first signal; a second acts as it always does.

    Outside the main thread, where Python takes no signals, nothing is caught.
    """

    def __init__(self) -> None:
        self.wished = False
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> StopWish:
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.wished = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
