"""Silences converters that write progress and warnings wherever they like."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing reaches the terminal meanwhile: not Python's streams, warnings and loggers, nor C++ libraries.

    The file descriptors themselves are turned away, since the MLIR converters log from C++. Exceptions pass through.
    """
    level = logging.root.manager.disable
    with contextlib.ExitStack() as stack:
        devnull = stack.enter_context(open(os.devnull, "w"))
        for descriptor in (1, 2):
            stack.enter_context(_turned_away(descriptor, devnull.fileno()))
        stack.enter_context(contextlib.redirect_stdout(_Nowhere()))
        stack.enter_context(contextlib.redirect_stderr(_Nowhere()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.callback(logging.disable, level)
        logging.disable(logging.CRITICAL)
        yield


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What is printed meanwhile, by Python, C++ or worker processes, goes to stderr: stdout is kept for a result."""
    with _turned_away(1, 2), contextlib.redirect_stdout(sys.stderr):
        yield


class _Nowhere(io.TextIOBase):
    """A stream that stays open: a library first imported here may keep it for its log handler."""

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def _turned_away(descriptor: int, to: int) -> Iterator[None]:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    kept = os.dup(descriptor)
    try:
        os.dup2(to, descriptor)
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)
