"""Checks that options share. Each failure is one line that names the option and its value."""

import math

from kanerva.errors import UserError


def label(config: object, option: str) -> str:
    """An option as it is typed: `memory.size`, or `batch` where it stands in no group."""
    group = getattr(config, "group", "")
    return f"{group}.{option}" if group else option


def require_positive(config: object, *options: str) -> None:
    for option in options:
        if not 0 < (value := getattr(config, option)) < math.inf:  # NaN fails too
            raise UserError(f"{label(config, option)} must be positive, got {value}")


def require_not_negative(config: object, *options: str) -> None:
    for option in options:
        if not 0 <= (value := getattr(config, option)) < math.inf:
            raise UserError(f"{label(config, option)} must not be negative, got {value}")


def require_share(config: object, option: str, most: float = 1.0) -> None:
    if not 0 <= (value := getattr(config, option)) <= most:
        raise UserError(f"{label(config, option)} must lie in [0, {most:g}], got {value}")
