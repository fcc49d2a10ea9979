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
SHIPPED_RUN = "runs/pretrained/NAME"  # where output of a shipped model goes: it has no run folder


class Parser(ArgumentParser):
    """jsonargparse's parser. A mistake is a `UserError` that names the flag."""

    def __init__(self, description: str | None = None, prog: str | None = None) -> None:
        super().__init__(
            prog=prog, description=description, exit_on_error=False, allow_abbrev=False
        )

    def add_option(self, *names: str, type: Any, **settings: Any) -> None:
        """A flag or a positional whose value has a type."""
        add_option(self, *names, type=type, **settings)

    def add_device_options(self) -> None:
        """Options of every verb that runs a model."""
        self.add_option("--data-root", type=str | None, help="folder of the data sets")
        self.add_option("--device", type=Device, default="auto", help="auto: a GPU if any")

    def check_flags(self, words: list[str]) -> None:
        """Refuse flags that this parser does not have, and a value that argparse drops."""
        for word in words:
            flag, _, value = word.partition("=")
            if flag.startswith("--") and flag != "--" and flag not in self.flags:
                raise self.unknown_flag(flag)
            if flag.startswith("--") and value == "--":
                raise UserError(f"{flag} needs a value, got '--'")

    def words_first(self, words: list[str]) -> list[str]:
        """The same command with flags after its other words, of which there may be many: argparse
        takes those of a list in one place only."""
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
    """The flag, then what is wrong with it."""
    if isinstance(error, ArgumentError) and error.argument_name is not None:
        return f"{error.argument_name}: {error.message}"
    start, required, names = message.partition("required: ")
    return start + required + re.sub(r"\b\w+\.", "", names)  # without the verb


def spell_flag(word: str) -> str:
    """`--episode_length=8` as `--episode-length=8`; other words stay as they are."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if word.startswith("--") else word


@dataclass(frozen=True)
class Converter:
    """From a word of the command line to a value of a type."""

    hint: Any

    def __call__(self, word: Any) -> Any:
        try:
            return coerce(self.hint, parse_word(word, self.hint), "")
        except UserError as error:
            raise ArgumentTypeError(str(error).strip()) from error

    def __repr__(self) -> str:
        return type_name(self.hint)  # shown in help


def parse_word(word: Any, hint: Any) -> Any:
    """A word as YAML, unless the type is of strings; null stands for None where that is allowed."""
    kinds = get_args(hint) if NoneType in get_args(hint) else (hint,)
    if not isinstance(word, str) or (word == "null" and NoneType in kinds):
        return None if word == "null" else word
    if str in kinds or get_origin(hint) is Literal:
        return word
    if get_origin(hint) in (list, tuple) and not word.startswith(("[", "-")):
        word = f"[{word}]"  # 3, and 3,4: some shells take brackets for a pattern
    try:
        return parse_yaml(word)
    except Exception:  # of every kind: no YAML, so a word
        return word


def type_name(hint: Any) -> str:
    """For help: `int`, `int or null`."""
    if NoneType in get_args(hint):
        return " or ".join(type_name(kind) for kind in get_args(hint))
    if get_origin(hint) is Literal:
        return "name"
    return "null" if hint is NoneType else str(hint) if get_origin(hint) else hint.__name__


def choose_metavar(hint: Any) -> str | None:
    """Choices are shown beside a flag."""
    choices = list_choices(hint) if NoneType not in get_args(hint) else ()
    return f"{{{','.join(choices)}}}" if choices else None


def list_choices(hint: Any) -> tuple[str, ...]:
    """The words that a type admits, where it names them."""
    kind = next((kind for kind in get_args(hint) if get_origin(kind) is Literal), hint)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    return ("true", "false") if kind is bool else choices


# Values of shared options


def require_at_least(options: dict[str, Any], least: int, *names: str) -> None:
    """Refuse numbers below a limit, naming the flag."""
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
        raise UserError("--device cuda: this machine shows no CUDA device; use --device cpu")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def find_run(name: str) -> Path:
    """The folder of config and weights: of a shipped model by its name, else the run itself."""
    from kanerva.models.loading import shipped_folder

    return shipped_folder(name) or Path(name)


def output_folder(name: str) -> Path:
    """Where records and pictures of a model go: into its run folder, or that of a shipped model."""
    from kanerva.models.loading import shipped_folder

    return Path(name if shipped_folder(name) is None else SHIPPED_RUN.replace("NAME", name))
