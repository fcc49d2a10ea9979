"""Flags: jsonargparse with dashes, and its complaints in our words."""

import re
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser

from kanerva.errors import UserError
from kanerva.models import shipped_folder

Device = Literal["auto", "cpu", "cuda"]
HOME = "runs/pretrained/NAME"  # of what is made with a shipped model: no run of `kanerva train`


class Parser(ArgumentParser):
    """jsonargparse with dashes: `--episode-length` sets `episode_length`."""

    def __init__(self, verb: str, description: str) -> None:
        super().__init__(
            prog=f"kanerva {verb}",
            description=description,
            exit_on_error=False,
            allow_abbrev=False,
        )

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        return _with_dashes(super().format_help(*args, **kwargs))

    def add_place(self) -> None:
        """Where data lie and where to compute: options of every verb that runs a model."""
        self.add_argument("--data_root", type=str | None, help="where data sets lie")
        self.add_argument("--device", type=Device, default="auto", help="auto: a GPU if any")

    def read(self, argv: list[str]) -> dict[str, Any]:
        """Parsed options as a plain dictionary; nested options are nested."""
        flags = [_underscore(word) if word.startswith("--") else word for word in argv]
        return self.parse_args(flags).as_dict()


def _with_dashes(text: str) -> str:
    """Flags as users type them."""
    return re.sub(r"--[\w.]+", lambda flag: flag.group().replace("_", "-"), text)


def _underscore(flag: str) -> str:
    name, equals, value = flag[2:].partition("=")
    return "--" + name.replace("-", "_") + equals + value


def root_of(options: dict[str, Any]) -> Path | None:
    """`--data-root` as a path, if it was given."""
    return None if options["data_root"] is None else Path(options["data_root"])


def files_of(name: str) -> Path:
    """Where the config and weights of a run lie, or those of a model that ships."""
    return shipped_folder(name) or Path(name)


def home_of(name: str) -> Path:
    """Where what is made with a model goes: its run folder, or the one a shipped model gets."""
    return Path(name if shipped_folder(name) is None else HOME.replace("NAME", name))


def device_of(options: dict[str, Any]) -> str:
    """`--device`, checked against what this machine has."""
    name = options["device"]
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine shows no CUDA device; use --device cpu")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def at_least(options: dict[str, Any], least: int, *names: str) -> None:
    """Refuse numbers below a limit, naming the flag."""
    for name in names:
        if options[name] is not None and options[name] < least:
            raise UserError(f"--{name} must be at least {least}, got {options[name]}")


def in_our_words(message: str) -> str:
    """jsonargparse's complaint as `--memory.size: expected int, got hello`."""
    key = re.match(r'Parser key "(.*?)"', message)
    value = re.search(r"(?:Got value|Given value): (.*)", message)
    wanted = re.findall(r"Expected an? (.*?)(?:\. Got|$)", message, re.MULTILINE)
    if key is None or value is None or not wanted:
        return _with_dashes(message)
    kind = re.sub(r"<class '(\w+)'>", r"\1", wanted[0])
    kind = re.sub(r"typing\.Literal\[(.*)\]", r"one of \1", kind).replace("'", "")
    name = key.group(1).replace("_", "-")
    flag = name if name in ("action", "name", "run", "runs", "images") else f"--{name}"
    return f"{flag}: expected {kind}, got {value.group(1)}"
