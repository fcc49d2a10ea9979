"""Errors a user can act on. The command line prints their message as one line and no traceback."""

from collections.abc import Iterable
from difflib import get_close_matches


def printable(text: str) -> str:
    """A text that is safe to show: names of files may hold sequences that steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def suggest(word: str, known: Iterable[str]) -> str:
    """The known word that may have been meant, as a question; nothing where none is near. The
    rest of a message follows at once."""
    near = get_close_matches(word.lower(), list(known), n=1)
    return f"did you mean {near[0]}? " if near else ""


class UserError(ValueError):
    """Bad input or environment: the message names the thing received and what to do (exit 2)."""

    def __init__(self, message: object) -> None:
        """One line, whatever it quotes."""
        super().__init__(printable(" ".join(str(message).splitlines())))


class NumbersWentBad(ArithmeticError):
    """Training met non-finite numbers ten steps in a row (exit 3)."""
