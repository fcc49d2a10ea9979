"""The parser that every verb uses, and options that several verbs share."""

import itertools
import re
from argparse import ArgumentError, ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin

from jsonargparse import ArgumentParser

from kanerva.config import coerce
from kanerva.errors import UserError, suggest
from kanerva.plain_files import parse_yaml

Device = Literal["auto", "cpu", "cuda"]
SHIPPED_RUN = "runs/pretrained/NAME"  # output of a shipped model: it has no run folder


class Parser(ArgumentParser):
    """jsonargparse's parser. Mistakes raise a `UserError` that names the flag."""

    def __init__(self, description: str | None = None, prog: str | None = None) -> None:
        super().__init__(
            prog=prog, description=description, exit_on_error=False, allow_abbrev=False
        )

    def add_option(self, *names: str, type: Any, **settings: Any) -> None:
        """Add a flag or a positional argument with a type."""
        add_option(self, *names, type=type, **settings)

    def add_device_options(self) -> None:
        """Add the options of every verb that runs a model."""
        self.add_option("--data-root", type=str | None, help="folder of the data sets")
        self.add_option("--device", type=Device, default="auto", help="auto: a GPU if there is one")

    def check_flags(self, words: list[str]) -> None:
        """Refuse unknown flags, and the value `--`, which argparse drops."""
        for word in words:
            flag, _, value = word.partition("=")
            if flag.startswith("--") and flag != "--" and flag not in self.flags:
                raise self.unknown_flag(flag)
            if flag.startswith("--") and value == "--":
                raise UserError(f"{flag} needs a value, got '--'")

    def words_first(self, words: list[str]) -> list[str]:
        """Move flags behind the positional words: argparse accepts a list of positionals in one
        place only."""
        switches = {f for a in self._actions if a.nargs == 0 for f in a.option_strings}
        plain, flagged, rest = list[str](), list[str](), iter(words)
        for word in rest:
            if word == "--":
                return [*plain, *flagged, word, *rest]
            if not word.startswith("-") or word == "-":
                plain.append(word)
            else:
                alone = "=" in word or word in switches
                flagged += [word] if alone else [word, *itertools.islice(rest, 1)]
        return [*plain, *flagged]

    @property
    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def unknown_flag(self, flag: str) -> UserError:
        hint = suggest(flag, self.flags)
        return UserError(f"unknown option {flag}; {hint}see `{self.prog} --help`")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(describe_argument_error(ex, message)) from ex


def add_option(section: Any, *names: str, type: Any, **settings: Any) -> None:
    """Add an option to a parser or to a section of its help."""
    metavar = choose_metavar(type) if names[0].startswith("-") else None
    section.add_argument(*names, type=Converter(type), metavar=metavar, **settings)


def describe_argument_error(error: object, message: str) -> str:
    """Format an error as the flag, then what is wrong with it."""
    if isinstance(error, ArgumentError) and error.argument_name is not None:
        return f"{error.argument_name}: {error.message}"
    start, required, names = message.partition("required: ")
    return start + required + re.sub(r"\b\w+\.", "", names)  # without the verb


def spell_flag(word: str) -> str:
    """Spell `--episode_length=8` as `--episode-length=8`; leave other words unchanged."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if word.startswith("--") else word


@dataclass(frozen=True)
class Converter:
    """Converts a word of the command line to a value of a type."""

    hint: Any

    def __call__(self, word: Any) -> Any:
        try:
            return coerce(self.hint, parse_word(word, self.hint), "")
        except UserError as error:
            raise ArgumentTypeError(str(error).strip()) from error

    def __repr__(self) -> str:
        return type_name(self.hint)  # shown in help


def parse_word(word: Any, hint: Any) -> Any:
    """Parse a word as YAML, unless its type is a string. `null` is None if the type allows None."""
    kinds = get_args(hint) if NoneType in get_args(hint) else (hint,)
    if not isinstance(word, str) or (word == "null" and NoneType in kinds):
        return None if word == "null" else word
    if str in kinds or get_origin(hint) is Literal:
        return word
    if get_origin(hint) in (list, tuple) and not word.startswith(("[", "-")):
        word = f"[{word}]"  # accept 3 and 3,4: some shells treat brackets as a pattern
    try:
        return parse_yaml(word)
    except Exception:  # of any kind: not YAML, so a plain word
        return word


def type_name(hint: Any) -> str:
    """A type's name in help texts: `int`, `int or null`."""
    if NoneType in get_args(hint):
        return " or ".join(type_name(kind) for kind in get_args(hint))
    if get_origin(hint) is Literal:
        return "name"
    return "null" if hint is NoneType else str(hint) if get_origin(hint) else hint.__name__


def choose_metavar(hint: Any) -> str | None:
    """The choices to show beside a flag in help texts, if its type lists any."""
    choices = list_choices(hint) if NoneType not in get_args(hint) else ()
    return f"{{{','.join(choices)}}}" if choices else None


def list_choices(hint: Any) -> tuple[str, ...]:
    """The words that a type allows, if it lists them."""
    kind = next((kind for kind in get_args(hint) if get_origin(kind) is Literal), hint)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    return ("true", "false") if kind is bool else choices


# Values of shared options


def require_at_least(options: dict[str, Any], least: int, *names: str) -> None:
    """Refuse numbers below `least`; the error names the flag."""
    for name in names:
        if options[name] is not None and options[name] < least:
            flag = spell_flag(f"--{name}")
            raise UserError(f"{flag} must be at least {least}, got {options[name]}")


def get_data_root(options: dict[str, Any]) -> Path | None:
    """`--data-root` as a path."""
    return None if options["data_root"] is None else Path(options["data_root"])


def choose_device(options: dict[str, Any]) -> str:
    """`--device`, checked against what this machine has."""
    import torch

    name = options["device"]
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device; use --device cpu")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def find_run(name: str) -> Path:
    """The folder with config and weights: a shipped model's if `name` is one, else the run's."""
    from kanerva.models.loading import shipped_folder

    return shipped_folder(name) or Path(name)


def output_folder(name: str) -> Path:
    """The folder for a model's records and pictures: its run folder, or SHIPPED_RUN."""
    from kanerva.models.loading import shipped_folder

    return Path(name if shipped_folder(name) is None else SHIPPED_RUN.replace("NAME", name))
