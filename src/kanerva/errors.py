"""Errors a user can act on. The command line prints their message as one line and no traceback."""


def printable(text: str) -> str:
    """A text that is safe to show: names of files may hold sequences that steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class UserError(ValueError):
    """Bad input or environment: the message names the thing received and what to do (exit 2)."""

    def __init__(self, message: object) -> None:
        """One line, whatever it quotes."""
        super().__init__(printable(" ".join(str(message).splitlines())))


class NumbersWentBad(ArithmeticError):
    """Training met non-finite numbers ten steps in a row (exit 3)."""
