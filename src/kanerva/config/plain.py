"""Configs as plain JSON and YAML types.

A run is one mapping, as on the command line: the model's options are on the same level as the
run's own, and `model` is the model's name.
"""

import json
from dataclasses import asdict, fields, is_dataclass
from typing import Any


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a model's or run's config to a mapping; tuples become lists."""
    model = getattr(config, "model", config)
    content = {"model": model.name} | asdict(model)
    if model is not config:
        own = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "model"}
        content |= {k: asdict(v) if is_dataclass(v) else v for k, v in own.items()}  # pyright: ignore
    return json.loads(json.dumps(content))


def flatten(nested: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """{"memory": {"size": 8}} as {"memory.size": 8}."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        inner = flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else None
        flat |= {f"{prefix}{key}": value} if inner is None else inner
    return flat
