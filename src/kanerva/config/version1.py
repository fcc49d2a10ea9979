"""Upgrade configs that kanerva 0.1 wrote: one flat set of options for all models.

Options that the model ignored are dropped: they had no effect. Options that it used and that no
longer exist are refused.
"""

from dataclasses import fields
from typing import Any, get_type_hints

from kanerva.config.models import model_config
from kanerva.errors import UserError

# Options that became constants, with their values.
_CONSTANTS: dict[tuple[str, str], Any] = {
    ("encoder", "blocks"): [2, 2, 2, 2],
    ("keys", "layers"): 3,
    ("readout", "layers"): 3,
    ("decoder", "near_depth"): 4,
    ("decoder", "sketch"): 1.0,
    ("likelihood", "components"): 10,
    ("optim", "betas"): [0.9, 0.999],
}
_RUN_GROUPS = ("data", "optim", "likelihood")  # the same for every model


def is_version1(data: dict[str, Any]) -> bool:
    """Whether version 0.1 wrote this: it wrote every group, also the likelihood's."""
    likelihood = data.get("likelihood")
    return isinstance(likelihood, dict) and "components" in likelihood


def upgrade(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the same config with today's options."""
    name = data.get("model")
    cls = model_config(name)
    if name == "kpp":
        _refuse_retired_kpp(data, where)
    likelihood = _known_options(cls, "likelihood", data["likelihood"], where)
    new: dict[str, Any] = {"model": name, "likelihood": likelihood.get("kind")}
    groups = {f.name for f in fields(cls)}
    for key, value in data.items():
        if key in ("model", "likelihood", "epochs", "strategy"):
            continue
        if key == "step":
            new["execution"] = value
        elif isinstance(value, dict) and (key in groups or key in _RUN_GROUPS):
            new[key] = _known_options(cls, key, value, where)
        elif not isinstance(value, dict):
            new[key] = value
    if name == "kpp" and not data["decoder"].get("neighbours"):
        new["decoder"].pop("near_width", None)
    if "steps" in new and new["steps"] is None:
        raise UserError(f"{where} counts epochs, as kanerva 0.1 did: give it steps instead")
    return new


def _known_options(cls: type, group: str, options: dict[str, Any], where: str) -> dict[str, Any]:
    """Return those of a group's options that still exist. One that became a constant must have its
    value."""
    for (owner, option), constant in _CONSTANTS.items():
        if owner == group and option in options and options[option] != constant:
            _retired(f"{group}.{option}={options[option]}", where)
    if group in _RUN_GROUPS:
        return {k: v for k, v in options.items() if (group, k) not in _CONSTANTS}
    known = {f.name for f in fields(get_type_hints(cls)[group])}
    return {k: v for k, v in options.items() if k in known}


def _refuse_retired_kpp(data: dict[str, Any], where: str) -> None:
    memory, readout = data["memory"], data["readout"]
    for option, today in (("placement", "cells"), ("read", "hard")):
        if memory[option] != today:
            _retired(f"memory.{option}={memory[option]}", where)
    if readout["posterior"] != "residual":
        _retired(f"readout.posterior={readout['posterior']}", where)
    if memory["unwritten"] == 1:
        _retired("memory.unwritten=1 (today the model kpp-empty)", where)


def _retired(option: str, where: str) -> None:
    raise UserError(f"{where}: {option} was retired after kanerva 0.1; use that version for it")
