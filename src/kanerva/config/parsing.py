"""Configs from plain JSON and YAML types: strictly, in one line for each mistake."""

import types
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from kanerva.config.models import MODEL_CONFIGS, ModelConfig, model_config
from kanerva.config.run import RunConfig
from kanerva.config.version1 import is_version1, upgrade
from kanerva.errors import UserError

C = TypeVar("C")


def model_from_dict(data: Any, where: str = "config") -> ModelConfig:
    """A checkpoint's config; one that version 0.1 wrote is brought up to date."""
    require_mapping(data, where)
    data = upgrade(data, where) if is_version1(data) else data
    options = {key: value for key, value in data.items() if key != "model"}
    return _build(model_config(data.get("model")), options, where)


def run_from_dict(data: Any, where: str = "config") -> RunConfig:
    """A run's config."""
    require_mapping(data, where)
    data = upgrade(data, where) if is_version1(data) else data
    cls = model_config(data.get("model"))
    own = {f.name for f in fields(RunConfig)} - {"model"}
    model = {k: v for k, v in data.items() if k not in own and k != "model"}
    rest = {k: v for k, v in data.items() if k in own}
    for key in model:
        if key not in {f.name for f in fields(cls)}:
            raise unknown_option(cls, key, where)
    return _build(RunConfig, rest, where, model=_build(cls, model, where))


def require_mapping(data: Any, where: str) -> None:
    if not isinstance(data, dict):
        raise UserError(f"{where} must be a mapping of options, got {data!r}")


def option_names(config: type[ModelConfig] | type[RunConfig]) -> list[str]:
    """Every option of a config by flat name."""
    names = []
    for name, hint in get_type_hints(config).items():
        if name == "model" or get_origin(hint) is not None or name not in _fields(config):
            names += [name] if name in _fields(config) and name != "model" else []
        elif is_dataclass(hint):
            names += [f"{name}.{inner}" for inner in _fields(hint)]
        else:
            names.append(name)
    return names


def _fields(config: Any) -> list[str]:
    return [f.name for f in fields(config)]


def unknown_option(cls: type[ModelConfig], option: str, where: str = "") -> UserError:
    """One line: which models use an option that this one does not; else the nearest there is."""
    own = [*option_names(cls), *option_names(RunConfig)]
    start = f"{where}: " if where else ""
    users = [
        name
        for name, other in MODEL_CONFIGS.items()
        if any(o == option or o.startswith(f"{option}.") for o in option_names(other))
    ]
    if users:
        return UserError(f"{start}{cls.name} does not use {option} ({', '.join(users)} do)")
    near = get_close_matches(option, own, n=1)
    groups = dict.fromkeys(name.split(".")[0] for name in own)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(groups)}"
    return UserError(f"{start}unknown option {option!r}; {hint}")


def _build(cls: type[C], data: dict[str, Any], where: str, **given: Any) -> C:
    """A dataclass from a mapping: an unknown or ill-typed key is an error that names it."""
    hints = get_type_hints(cls)
    known = _fields(cls)
    for key in data:
        if key not in known:
            if isinstance(cls, type) and issubclass(cls, ModelConfig):
                raise unknown_option(cls, key, where)
            raise UserError(f"{where}: unknown option {key!r}; known: {', '.join(known)}")
    return cls(**given, **{k: _coerce(hints[k], v, f"{where}: {k}") for k, v in data.items()})


def _coerce(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type, or an error; ints pass as floats, lists as tuples."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        *others, last = [a for a in args if a is not type(None)]
        for option in others:
            try:
                return _coerce(option, value, where)
            except UserError:
                continue
        return _coerce(last, value, where)
    if is_dataclass(hint):
        require_mapping(value, where)
        return _build(hint, value, where)  # pyright: ignore[reportArgumentType]
    if origin is Literal:
        if value not in args:
            raise UserError(f"{where} must be one of {', '.join(map(str, args))}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(args):
            raise UserError(f"{where} must be a list of {len(args)} values, got {value!r}")
        return tuple(_coerce(a, v, where) for a, v in zip(args, value, strict=True))
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-3 as a string
        except ValueError:
            pass
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"{where} must be {hint.__name__}, got {value!r}")
    return value
