"""Errors a user can act on. The command line prints their message as one line and no traceback."""

from collections.abc import Iterable
from difflib import get_close_matches


def printable(text: str) -> str:
    """Escape a text so that it is safe to print: file names may contain terminal control codes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def suggest(word: str, known: Iterable[str]) -> str:
    """Return "did you mean X? " for the closest known word, or "" if none is close. It ends in a
    space, so the rest of a message can follow."""
    near = get_close_matches(word.lower(), list(known), n=1)
    return f"did you mean {near[0]}? " if near else ""


class UserError(ValueError):
    """Bad input or environment: the message names the thing received and what to do (exit 2)."""

    def __init__(self, message: object) -> None:
        """Make the message one printable line, whatever it quotes."""
        super().__init__(printable(" ".join(str(message).splitlines())))


class NumbersWentBad(ArithmeticError):
    """Training met non-finite numbers ten steps in a row (exit 3)."""
