"""Checks that options share. Each failure is one line that names the option and its value."""

import math
from dataclasses import dataclass, fields
from typing import ClassVar

from kanerva.errors import UserError


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Options that stand together. Numbers are positive, or not negative where `may_be_zero` names
    them."""

    group: ClassVar[str]
    may_be_zero: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                check = require_not_negative if f.name in self.may_be_zero else require_positive
                check(self, f.name)


def label(config: object, option: str) -> str:
    """An option as it is typed: `memory.size`, or `batch` where it stands in no group."""
    group = getattr(config, "group", "")
    return f"{group}.{option}" if group else option


def require_positive(config: object, *options: str) -> None:
    for option in options:
        if not 0 < (value := getattr(config, option)) < math.inf:  # NaN fails too
            raise UserError(f"{label(config, option)} must be positive, got {value}")


def require_not_negative(config: object, option: str) -> None:
    if not 0 <= (value := getattr(config, option)) < math.inf:
        raise UserError(f"{label(config, option)} must not be negative, got {value}")
