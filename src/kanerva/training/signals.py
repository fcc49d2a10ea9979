"""Stopping well: signals are collected, and obeyed between two steps."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals(compiling: Callable[[], bool]) -> Iterator[list[str]]:
    """Collect Ctrl-C and SIGTERM instead of dying of them; a second Ctrl-C is obeyed at once.

    So is any while the first step compiles: there is nothing to save, and the compiler's helpers
    may have died of the same signal, for which it would wait for ever.
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
