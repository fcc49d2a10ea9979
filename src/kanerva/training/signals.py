"""Clean stops: signals are collected, and acted on between two steps."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals(compiling: Callable[[], bool]) -> Iterator[list[str]]:
    """Collect Ctrl-C and SIGTERM instead of exiting. A second Ctrl-C stops at once.

    Any signal stops at once while the first step compiles: there is nothing to save, and the
    compiler might wait for ever for its worker processes, which the same signal may have killed.
    """
    caught: list[str] = []

    def handler(number: int, _: object) -> None:
        if compiling():
            os.write(2, b"kanerva: stopped before the first step, nothing to save\n")
            os._exit(128 + number)
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(signal.Signals(number).name)

    previous = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
