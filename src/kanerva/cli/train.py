"""`kanerva train`: options start from a preset or the run to resume; then --config, then flags."""

import inspect
import os
import re
import sys
from argparse import SUPPRESS
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from kanerva.cli.options import Parser, device_of, root_of
from kanerva.config import RunConfig, from_dict, to_dict
from kanerva.errors import UserError
from kanerva.presets import PRESETS, preset
from kanerva.runs import check_same_run, flatten, read_run_config, read_yaml
from kanerva.training.loop import train as fit

EXIT = {"finished": 0, "minutes": 0, "SIGINT": 130, "SIGTERM": 143}


def train(argv: list[str]) -> int:
    """Train a model on a preset, or go on with a run."""
    if "-h" in argv or "--help" in argv:
        name = given(argv, "--preset") or "mnist"
        make_parser(to_dict(named(name, argv))).print_help()
        return 0
    resume = "--resume" in argv
    argv = with_default_run(argv) if resume else argv
    options = make_parser(starting_point(argv)).read(argv)
    if given(argv, "--epochs") is not None:
        if given(argv, "--steps") is not None:
            raise UserError("--steps and --epochs both say how long to train: give one")
        options["steps"] = None
    if options["minutes"] is not None and options["minutes"] <= 0:
        raise UserError(f"--minutes must be positive, got {options['minutes']}")
    own = {f: options.pop(f) for f in ("run", "resume", "minutes", "config", "data_root", "device")}
    config = from_dict(RunConfig, options, where="options")
    if config.data.set != preset(config.preset).data.set:
        raise UserError(f"preset {config.preset} is not for data.set={config.data.set}")
    run = Path(own["run"] or run_name(config.preset, config.model, config.variant, config.seed))
    first = os.environ.get("RANK", "0") == "0"  # of several processes the first speaks
    if resume and first and not (run / "config.yaml").is_file():
        print(f"nothing to resume at {run}: starting anew", file=sys.stderr)
    if resume and (run / "config.yaml").is_file():
        check_same_run(run, to_dict(read_run_config(run)), config)
    outcome = fit(
        config,
        run,
        resume=resume,
        minutes=own["minutes"],
        data_root=root_of(own),
        accelerator=device_of(own),
    )
    if not first:
        return EXIT[outcome.reason]
    best = (
        "" if outcome.best_nll is None else f", best validation bound {outcome.best_nll:.2f} nats"
    )
    print(f"{run}: step {outcome.step} of {outcome.total}{best}")
    if outcome.step < outcome.total:
        print(f"go on with: kanerva train --run {run} --resume")
    return EXIT[outcome.reason]


def make_parser(base: dict[str, Any]) -> Parser:
    """Every field of `RunConfig` as a flag; `base` holds the defaults."""
    parser = Parser(
        "train",
        "Train a model on a preset, or go on with a run. Defaults shown are those of the preset, "
        "model and variant given beside --help, else of mnist.",
    )
    parser.add_argument("--run", type=str | None, help="run folder (runs/PRESET-MODEL-sSEED)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--minutes", type=float | None, help="stop and save after so long")
    parser.add_argument("--config", type=str | None, help="YAML file of the options below")
    parser.add_place()
    parser.add_class_arguments(RunConfig)
    parser.set_defaults(flatten(base))
    notes = field_notes(RunConfig) | {"preset": f"one of {', '.join(PRESETS)}; required"}
    for action in parser._actions:
        if action.dest in notes:
            action.help = notes[action.dest].replace("%", "%%")
        elif is_group(action.dest):
            action.help = SUPPRESS
    return parser


def is_group(name: str) -> bool:
    """Whether a field of `RunConfig` holds further options: those have flags of their own."""
    return is_dataclass(get_type_hints(RunConfig).get(name))


def field_notes(config: type, prefix: str = "") -> dict[str, str]:
    """What `config.py` says beside each field, for --help."""
    notes: dict[str, str] = {}
    for owner in reversed(config.__mro__[:-1]):
        found = re.findall(r"^    (\w+): [^#\n]*# (.*)$", inspect.getsource(owner), re.MULTILINE)
        notes |= {prefix + name: note for name, note in found}
    for name, hint in get_type_hints(config).items():
        if is_dataclass(hint) and isinstance(hint, type):
            notes |= field_notes(hint, f"{name}.")
    return notes


def given(argv: list[str], flag: str) -> str | None:
    """The value a flag has on the command line, before the parser knows its defaults."""
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name == flag:
            return value if equals else (argv[index + 1] if index + 1 < len(argv) else None)
    return None


def with_default_run(argv: list[str]) -> list[str]:
    """`--resume` without `--run` means the folder the same flags would have made."""
    name = given(argv, "--preset")
    if given(argv, "--run") is not None or name is None:
        return argv
    start, seed = named(name, argv), given(argv, "--seed") or "0"
    return [*argv, "--run", run_name(name, start.model, start.variant, seed)]


def named(name: str, argv: list[str], content: dict[str, Any] | None = None) -> RunConfig:
    """The preset that flags, and then a file, ask for."""
    model = given(argv, "--model") or (content or {}).get("model") or "kpp"
    variant = given(argv, "--variant") or (content or {}).get("variant")
    image = as_value(given(argv, "--image")) or (content or {}).get("image")
    if not (isinstance(image, list) and len(image) == 3 and all(type(n) is int for n in image)):
        image = None  # not given, or wrong: then the parser says so
    return preset(name, str(model), variant, None if image is None else tuple(image))


def as_value(word: str | None) -> object:
    """What a word on the command line stands for."""
    try:
        return None if word is None else yaml.safe_load(word)
    except yaml.YAMLError:
        return None


def run_name(name: str, model: str, variant: str | None, seed: object) -> str:
    """Where a run lies unless `--run` says otherwise."""
    return f"runs/{name}-{model}{f'-{variant}' if variant else ''}-s{seed}"


def starting_point(argv: list[str]) -> dict[str, Any]:
    """What flags start from: the run being resumed, else the preset; then --config on top."""
    run, file = given(argv, "--run"), given(argv, "--config")
    content = {} if file is None else read_yaml(Path(file))
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold options, as `kanerva train` writes to config.yaml")
    if "--resume" in argv and run is not None and (Path(run) / "config.yaml").is_file():
        base = to_dict(read_run_config(Path(run)))
    else:
        name = given(argv, "--preset") or content.get("preset")
        if name is None and "--resume" in argv and run is not None:
            raise UserError(f"nothing to resume at {run}")
        if name is None:
            raise UserError("say what to train on: --preset glyphs needs no data (see --help)")
        base = to_dict(named(str(name), argv, content))
    merged = merge(base, content)
    if file is not None:
        from_dict(RunConfig, merged, where=file)  # names unknown and ill-typed keys
    return merged


def merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Nested options with some replaced."""
    merged = base | change
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = merge(base[key], value)
    return merged
