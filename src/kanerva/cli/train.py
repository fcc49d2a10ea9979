"""`kanerva train`: options come from a preset or the run to resume, then --config, then flags.

Which options exist depends on the model, so a first small parser finds the model.
"""

import argparse
import inspect
import os
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import docstring_parser

from kanerva.cli.options import (
    Converter,
    Parser,
    add_option,
    choose_device,
    get_data_root,
    parse_word,
    spell_flag,
)
from kanerva.config import (
    MODEL_CONFIGS,
    ModelConfig,
    RunConfig,
    flatten,
    model_config,
    option_groups,
    run_from_dict,
    to_dict,
    unknown_option,
)
from kanerva.errors import UserError
from kanerva.presets import OWN, preset

if TYPE_CHECKING:
    import torch

EXIT = {"finished": 0, "minutes": 0, "SIGINT": 130, "SIGTERM": 143}
NOT_CONFIG = ("run", "resume", "minutes", "config", "logger", "data_root", "device", "size")
LONG = 100  # steps; a CPU run of at least this many starts with an estimate of its duration
HELP_PRESET = "mnist"  # whose defaults --help shows, unless a preset is given


class TrainParser(Parser):
    """The options of one model."""

    def __init__(self, model: type[ModelConfig]) -> None:
        super().__init__(
            "Train a model on a preset, or resume a run. The options and defaults below are those "
            "of the --preset, --model and --variant given with --help; otherwise those of "
            f"{HELP_PRESET} and kpp."
        )
        self.model = model
        run = "run folder; default: runs/PRESET-MODEL-sSEED. torchrun has its own --run: there use "
        self.add_option("--run", "--run-folder", dest="run", type=str | None,
                          help=run + "--run-folder")  # fmt: skip
        self.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
        self.add_option("--minutes", type=float | None, help="save and stop after this time")
        self.add_option("--config", type=str | None, help="YAML file with the options below")
        logger = "tensorboard or wandb: log the figures of metrics.csv there too"
        self.add_option("--logger", type=Literal["tensorboard", "wandb"] | None, help=logger)
        self.add_device_options()
        size = "--preset images: small takes minutes on a CPU, and is the default there"
        self.add_option("--size", type=Literal["small", "full"] | None, help=size)
        self.add_option("--model", type=str, help=f"one of {', '.join(MODEL_CONFIGS)}")
        self.add_config(RunConfig)
        self.add_config(model)

    def add_config(self, config: type[ModelConfig] | type[RunConfig]) -> None:
        """Add every option of a config as a flag; each group gets its own section."""
        section = self.add_argument_group(read_summary(config))
        for name, group in option_groups(config).items():
            if group is None:
                add_field(section, config, name)
        for prefix, group in option_groups(config).items():
            if group is not None:
                section = self.add_argument_group(prefix, read_summary(group))
                for field in fields(group):
                    add_field(section, group, field.name, f"{prefix}.")

    def unknown_flag(self, flag: str) -> UserError:
        known = [name.removeprefix("--").replace("-", "_") for name in self.flags]
        option = flag.removeprefix("--").replace("-", "_")
        return unknown_option(self.model, option, known=known, spell=to_flag)


def add_field(section: Any, config: type, name: str, prefix: str = "") -> None:
    """Add a field of a dataclass as a flag."""
    hint, text = get_type_hints(config)[name], read_docstrings(config).get(name, "")
    add_option(section, to_flag(prefix + name), type=hint, help=text.replace("%", "%%"))


@cache
def read_docstrings(config: type) -> dict[str, str]:
    """The docstrings under the fields of a dataclass and its bases."""
    parsed = [docstring_parser.parse_from_object(cls) for cls in reversed(config.__mro__[:-1])]
    return {p.arg_name: p.description or "" for text in parsed for p in text.params}


def read_summary(config: type) -> str:
    """A dataclass's docstring in one line."""
    return " ".join(inspect.cleandoc(config.__doc__ or "").split()).rstrip(".")


def to_flag(option: str) -> str:
    """Spell an option as a flag: `memory.size` as `--memory.size`."""
    return spell_flag(f"--{option}")


def make_parser(words: list[str]) -> TrainParser:
    """Make the parser for the model that the words name, with the defaults of its preset or run."""
    start = starting_options(peek(words))
    parser = TrainParser(model_config(start["model"]))
    parser.set_defaults(flatten(start))
    return parser


def read_config(words: list[str]) -> RunConfig:
    """The run that the words of a command describe."""
    parser = make_parser(words)
    parser.check_flags(words)
    return make_config(parser.parse_args(words).as_dict())


def make_config(options: dict[str, Any]) -> RunConfig:
    """The run that parsed options describe."""
    content = {name: value for name, value in options.items() if name not in NOT_CONFIG}
    config = run_from_dict(content, where="options")
    if config.data.set != config.preset:
        raise UserError(f"preset {config.preset} is not for data.set={config.data.set}")
    return config


def run(options: dict[str, Any], words: list[str]) -> int:
    """Train a model on a preset, or resume a run."""
    if options["minutes"] is not None and not options["minutes"] > 0:  # NaN too
        raise UserError(f"--minutes must be positive, got {options['minutes']}")
    config, resume = make_config(options), options["resume"]
    folder = Path(options["run"] or default_run(config))
    from kanerva.evaluation.records import is_early
    from kanerva.runs import check_same_run, read_run_config
    from kanerva.training.loop import train

    rank_zero = os.environ.get("RANK", "0") == "0"  # of several processes only this one prints
    if resume and rank_zero and not (folder / "config.yaml").is_file():
        print(f"nothing to resume at {folder}: starting a new run", file=sys.stderr)
    if resume and (folder / "config.yaml").is_file():
        check_same_run(folder, read_run_config(folder), config)
    outcome = train(
        config,
        folder,
        resume=resume,
        minutes=options["minutes"],
        data_root=get_data_root(options),
        accelerator=choose_device(options),
        logger=options["logger"],
        before=None if resume else lambda device: announce(config, device, options["size"]),
    )
    if rank_zero:
        best = outcome.best_nll
        bound = "" if best is None else f", best validation bound {best:.2f} nats"
        print(f"{folder}: step {outcome.step} of {outcome.total}{bound}")
        if outcome.step < outcome.total:
            print(f"resume with: kanerva train --run {folder} --resume")
        elif is_early({"best_step": outcome.best_step, "steps": outcome.total}):
            print(
                f"best at step {outcome.best_step}, before the learning rate had decayed: a run of "
                f"about --steps {5 * outcome.best_step // 4} may end lower"
            )
    return EXIT[outcome.reason]


def announce(config: RunConfig, device: "torch.device", size: str | None) -> None:
    """Print what will be trained and about how long it takes; only for long runs on a CPU."""
    if device.type != "cpu" or config.steps < LONG:
        return
    import torch

    from kanerva.training.estimate import seconds_left, spell_time

    sizes = "x".join(map(str, config.model.image))
    chosen = config.preset == OWN and config.model.name == "kpp" and size is None
    why = ", --size small because there is no GPU" if chosen else ""
    took = spell_time(seconds_left(config, device))
    print(
        f"{config.preset}{why}: {config.steps} steps of {config.batch} x {config.episode_length} "
        f"images {sizes}, about {took} here ({torch.get_num_threads()} threads)",
        file=sys.stderr,
    )


# The options that flags then change


def peek(words: list[str]) -> argparse.Namespace:
    """Read the few flags that determine which options exist."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("preset", "model", "variant", "image", "seed", "config", "size", "device"):
        parser.add_argument(f"--{name}", type=Converter(str | None))
    parser.add_argument("--run", "--run-folder", dest="run")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    return parser.parse_known_args(words)[0]


def starting_options(flags: argparse.Namespace) -> dict[str, Any]:
    """The options before flags: those of the run to resume, else of the preset; then --config."""
    content = {} if flags.config is None else read_options(Path(flags.config))
    base = resumed_options(flags) if flags.resume and not flags.help else None
    if base is None:
        name = flags.preset or content.get("preset") or (HELP_PRESET if flags.help else None)
        if name is None and flags.resume and flags.run is not None:
            raise UserError(f"nothing to resume at {flags.run}")
        if name is None:
            raise UserError("name a preset: --preset glyphs needs no download (see --help)")
        base = to_dict(named_preset(str(name), flags, content))
    merged = merge(base, content)
    if flags.config is not None:
        run_from_dict(merged, where=flags.config)  # names unknown options and wrong types
    return merged


def read_options(file: Path) -> dict[str, Any]:
    """Read the options in a YAML file; those that an earlier version wrote are upgraded."""
    from kanerva.config.parsing import upgraded
    from kanerva.plain_files import read_yaml

    content = read_yaml(file)
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold options, as `kanerva train` writes to config.yaml")
    return upgraded(content, str(file))


def resumed_options(flags: argparse.Namespace) -> dict[str, Any] | None:
    """The options of the run to resume; None if there is no such run."""
    folder = flags.run
    if folder is None and flags.preset is not None:  # the folder that the same flags would make
        folder = default_run(named_preset(flags.preset, flags, {}), flags.seed)
    if folder is None or not (Path(folder) / "config.yaml").is_file():
        return None
    from kanerva.runs import read_run_config

    options = to_dict(read_run_config(Path(folder)))
    if flags.model not in (None, options["model"]):
        raise UserError(
            f"{folder} was started with model={options['model']}, not {flags.model}: resume it as "
            "it was, or start another --run"
        )
    return options


def named_preset(name: str, flags: argparse.Namespace, content: dict[str, Any]) -> RunConfig:
    """The preset with the model, variant and image size of the flags, else of the file."""
    model = flags.model or content.get("model") or "kpp"
    variant = flags.variant or content.get("variant")
    image = parse_image(flags.image) or parse_image(content.get("image"))
    return preset(name, str(model), variant, image, choose_size(name, str(model), flags))


def choose_size(name: str, model: str, flags: argparse.Namespace) -> str | None:
    """`--size`, else the size that fits the device. Only kpp on `images` has a choice."""
    if flags.size is not None or flags.help or (name, model) != (OWN, "kpp"):
        return flags.size
    return "small" if choose_device({"device": flags.device or "auto"}) == "cpu" else "full"


def parse_image(value: object) -> tuple[int, int, int] | None:
    """Parse an image's shape; None if absent, or if wrong, which the full parser reports."""
    value = parse_word(value, tuple[int, int, int])
    if not isinstance(value, list) or [type(n) for n in value] != [int, int, int]:
        return None
    return value[0], value[1], value[2]


def default_run(config: RunConfig, seed: str | None = None) -> str:
    """The default run folder."""
    variant = f"-{config.variant}" if config.variant else ""
    return f"runs/{config.preset}-{config.model.name}{variant}-s{seed or config.seed}"


def merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Merge nested options; those in `change` win."""
    merged = base | change
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = merge(base[key], value)
    return merged
