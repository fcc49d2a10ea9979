"""Options that models no longer have, each with the one value that today's code stands for.

Files of earlier versions name them: configs of runs, weights and records. The fingerprint of a
model's weights covers them too, so that memories and stores of earlier versions can still be read.
"""

from typing import Any

from kanerva.config.plain import flatten
from kanerva.errors import UserError
from kanerva.plain_files import shown

_KEYS = {"keys": {"hidden": 256}}  # of a key network that only memory.placement=transport had
RETIRED: dict[str, dict[str, dict[str, Any]]] = {
    "kpp": {"memory": {"placement": "cells", "locality": 0.0}} | _KEYS,
    "kpp-bits": _KEYS,
}
NAMES = {name for groups in RETIRED.values() for name in flatten(groups)}


def without_retired(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a model's or run's options without the retired ones. Their other values are
    refused."""
    new = dict(data)
    for group, options in retired_options(data.get("model")).items():
        if not isinstance(held := data.get(group), dict):
            continue
        for name, value in options.items():
            if name in held and held[name] != value:
                raise UserError(
                    f"{where}: {group}.{name}={shown(held[name])} was retired with kpp's variant "
                    "generate; kpp-bits makes new images"
                )
        new[group] = {name: value for name, value in held.items() if name not in options}
        if not new[group]:
            del new[group]
    return new


def with_retired(data: dict[str, Any]) -> dict[str, Any]:
    """Return a model's options together with the retired ones."""
    groups = retired_options(data["model"])
    return data | {group: data.get(group, {}) | options for group, options in groups.items()}


def retired_options(model: object) -> dict[str, dict[str, Any]]:
    return RETIRED.get(model, {}) if isinstance(model, str) else {}
