"""Checks that options share. Each failure is one line that names the option and its value."""

import math

from kanerva.errors import UserError
from kanerva.plain_files import shown

SIZE = 2**16  # the most of anything: no config is to take hours or gigabytes before it is refused
DEPTH = 256  # of layers, which are built one by one
LENGTH = 2**40  # of a run


def label(config: object, option: str) -> str:
    """An option as it is typed: `memory.size`, or `batch` where it stands in no group."""
    group = getattr(config, "group", "")
    return f"{group}.{option}" if group else option


def require_positive(config: object, *options: str, most: int = SIZE) -> None:
    for option in options:
        if not 0 < (value := getattr(config, option)) < math.inf:  # NaN fails too
            raise UserError(f"{label(config, option)} must be positive, got {shown(value)}")
        require_at_most(config, option, most)


def require_not_negative(config: object, *options: str, most: int = SIZE) -> None:
    for option in options:
        if not 0 <= (value := getattr(config, option)) < math.inf:
            raise UserError(f"{label(config, option)} must not be negative, got {shown(value)}")
        require_at_most(config, option, most)


def require_at_most(config: object, option: str, most: int) -> None:
    value = getattr(config, option)
    if isinstance(value, int) and value > most:
        raise UserError(f"{label(config, option)} must be at most {most}, got {shown(value)}")


def require_share(config: object, option: str, most: float = 1.0) -> None:
    if not 0 <= (value := getattr(config, option)) <= most:
        raise UserError(f"{label(config, option)} must lie in [0, {most:g}], got {value}")
