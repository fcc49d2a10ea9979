"""Errors a user can act on. The command line prints their message as one line and no traceback."""


class UserError(ValueError):
    """Bad input or environment: the message names the thing received and what to do (exit 2)."""


class NumbersWentBad(ArithmeticError):
    """Training met non-finite numbers ten steps in a row (exit 3)."""
