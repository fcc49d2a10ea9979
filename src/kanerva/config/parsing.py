"""Build configs from plain JSON and YAML types. Parsing is strict; each mistake is one line."""

import types
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from kanerva.config.models import MODEL_CONFIGS, ModelConfig, model_config
from kanerva.config.plain import flatten
from kanerva.config.retired import NAMES, without_retired
from kanerva.config.run import RunConfig
from kanerva.config.version1 import is_version1, upgrade
from kanerva.errors import UserError
from kanerva.plain_files import reason, shown

C = TypeVar("C")


RENAMED = {"epochs": "steps", "step": "execution", "likelihood.kind": "likelihood"}  # since 0.1


def model_from_dict(data: Any, where: str = "config") -> ModelConfig:
    """Build a checkpoint's config; one that an earlier version wrote is upgraded."""
    data = upgraded(data, where)
    cls = model_config(data.get("model"))
    options = {key: value for key, value in data.items() if key != "model"}
    require_known(cls, options, option_names(cls), where)
    return _build(cls, options, where)


def run_from_dict(data: Any, where: str = "config") -> RunConfig:
    """Build a run's config; one that an earlier version wrote is upgraded."""
    data = upgraded(data, where)
    cls = model_config(data.get("model"))
    options = {key: value for key, value in data.items() if key != "model"}
    require_known(cls, options, [*option_names(cls), *option_names(RunConfig)], where)
    own = _fields(RunConfig)
    model = _build(cls, {k: v for k, v in options.items() if k not in own}, where)
    return _build(RunConfig, {k: v for k, v in options.items() if k in own}, where, model=model)


def upgraded(data: Any, where: str) -> dict[Any, Any]:
    """Return a mapping of options; those that an earlier version wrote are upgraded."""
    require_mapping(data, where)
    try:
        return upgrade(data, where) if is_version1(data) else without_retired(data, where)
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{where} is not a whole config of kanerva 0.1: {reason(error)}") from error


def require_known(
    cls: type[ModelConfig], options: dict[Any, Any], known: list[str], where: str
) -> None:
    """Refuse unknown options. The name of a group stands for all of its options."""
    groups = {name.partition(".")[0] for name in known}
    for name in flatten(options):
        if name not in known and name not in groups:
            raise unknown_option(cls, name, where, known)


def require_mapping(data: Any, where: str) -> None:
    if not isinstance(data, dict):
        raise UserError(f"{where} must be a mapping of options, got {shown(data)}")


def option_names(config: type[ModelConfig] | type[RunConfig]) -> list[str]:
    """Every option of a config by flat name."""
    names = []
    for name, group in option_groups(config).items():
        names += [name] if group is None else [f"{name}.{inner}" for inner in _fields(group)]
    return names


def option_groups(config: type[ModelConfig] | type[RunConfig]) -> dict[str, type | None]:
    """Map each top-level option to its dataclass if it is a group, else None. A run's `model` is
    left out."""
    hints = get_type_hints(config)
    names = [name for name in _fields(config) if name != "model"]
    return {name: hints[name] if is_dataclass(hints[name]) else None for name in names}


def _fields(config: Any) -> list[str]:
    return [f.name for f in fields(config)]


def unknown_option(
    cls: type[ModelConfig],
    option: str,
    where: str = "",
    known: Sequence[str] | None = None,
    spell: Callable[[str], str] = str,
) -> UserError:
    """The error for an unknown option: it names the models that use it, or the closest name.

    `spell` turns an option's name into what the user typed, such as a flag.
    """
    known = [*option_names(cls), *option_names(RunConfig)] if known is None else known
    start = f"{where}: " if where else ""
    if members := [name for name in known if name.startswith(f"{option}.")]:
        return UserError(f"{start}{spell(option)} is a group: {', '.join(map(spell, members))}")
    users = [
        name
        for name, other in MODEL_CONFIGS.items()
        if any(o == option or o.startswith(f"{option}.") for o in option_names(other))
    ]
    if users:
        use = f"{', '.join(users)} {'does' if len(users) == 1 else 'do'}"
        return UserError(f"{start}{cls.name} does not use {spell(option)} ({use})")
    if option in RENAMED:
        hint = f"use {spell(RENAMED[option])}"
    elif option in NAMES:
        hint = "it was retired"
    elif close := get_close_matches(option, known, n=1):
        hint = f"did you mean {spell(close[0])}?"
    else:
        groups = dict.fromkeys(name.split(".")[0] for name in known)
        hint = f"known: {', '.join(map(spell, groups))}"
    return UserError(f"{start}unknown option {spell(option)}; {hint}")


def _build(cls: type[C], data: dict[str, Any], where: str, **fixed: Any) -> C:
    """Build a dataclass from a mapping of options. Errors name a value of the wrong type."""
    hints = get_type_hints(cls)
    for name in data.keys() - set(_fields(cls)):  # such as an empty group, which has no flat name
        raise UserError(f"{where}: unknown option {shown(name)}")
    return cls(**fixed, **{k: coerce(hints[k], v, f"{where}: {k}") for k, v in data.items()})


def coerce(hint: Any, value: Any, where: str) -> Any:
    """Convert `value` to the annotated type or raise. Accepts ints as floats, lists as tuples."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        reasons = []
        for option in (a for a in args if a is not type(None)):
            try:
                return coerce(option, value, where)
            except UserError as error:
                reasons.append(str(error).removeprefix(f"{where} must be ").split(", got")[0])
        raise UserError(f"{where} must be {', or '.join(reasons)}, got {shown(value)}")
    if is_dataclass(hint) and isinstance(hint, type):
        require_mapping(value, where)
        return _build(hint, value, where)  # pyright: ignore[reportArgumentType]
    if origin is Literal:
        if value not in args:
            raise UserError(
                f"{where} must be one of {', '.join(map(str, args))}, got {shown(value)}"
            )
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(args):
            raise UserError(f"{where} must be a list of {len(args)} values, got {shown(value)}")
        return tuple(coerce(a, v, where) for a, v in zip(args, value, strict=True))
    if origin is list:
        if not isinstance(value, list):
            raise UserError(f"{where} must be a list, got {shown(value)}")
        return [coerce(args[0], v, where) for v in value]
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-3 as a string
        except (ValueError, OverflowError):
            pass
    assert isinstance(hint, type)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"{where} must be {hint.__name__}, got {shown(value)}")
    return value
