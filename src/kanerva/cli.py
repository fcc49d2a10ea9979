"""The command line. Each verb is a thin layer over the library; mistakes get one line, exit 2.

Exit codes: 0 done; 2 bad input or environment; 3 numbers went bad, last good checkpoint kept;
130 and 143 stopped by Ctrl-C and SIGTERM after saving.
"""

import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser

import kanerva
from kanerva.errors import NumbersWentBad, UserError

EXIT = {"finished": 0, "minutes": 0, "SIGINT": 130, "SIGTERM": 143}
Device = Literal["auto", "cpu", "cuda"]


class Parser(ArgumentParser):
    """jsonargparse with dashes: `--episode-length` sets `episode_length`."""

    def __init__(self, verb: str, description: str) -> None:
        super().__init__(
            prog=f"kanerva {verb}".strip(), description=description, exit_on_error=False
        )

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        text = super().format_help(*args, **kwargs)
        return re.sub(r"--[\w.]+", lambda found: found.group().replace("_", "-"), text)

    def read(self, argv: list[str]) -> dict[str, Any]:
        """Parsed options as a plain dictionary; nested options are nested."""
        flags = [_underscore(a) if a.startswith("--") else a for a in argv]
        return self.parse_args(flags).as_dict()


def _underscore(flag: str) -> str:
    name, equals, value = flag[2:].partition("=")
    return "--" + name.replace("-", "_") + equals + value


def _device(name: str) -> str:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine shows no CUDA device; use --device cpu")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


# train


def _field_notes(config: type) -> dict[str, str]:
    """What `config.py` says beside each field, for --help."""
    notes = {}
    for owner in reversed(config.__mro__[:-1]):
        found = re.findall(r"^    (\w+): [^#\n]*# (.*)$", inspect.getsource(owner), re.MULTILINE)
        notes |= dict(found)
    return notes


def _train_parser(base: dict[str, Any] | None) -> Parser:
    from dataclasses import fields, is_dataclass
    from typing import get_type_hints

    from kanerva.config import RunConfig
    from kanerva.presets import PRESETS

    parser = Parser("train", "Train a model on a preset, or go on with a run.")
    parser.add_argument("--run", type=str | None, help="run folder (runs/PRESET-MODEL-sSEED)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--minutes", type=float | None, help="stop and save after so long")
    parser.add_argument("--config", type=str | None, help="YAML file of the options below")
    parser.add_argument("--data_root", type=str | None, help="where data sets lie ($KANERVA_DATA)")
    parser.add_argument("--device", type=Device, default="auto", help="auto: a GPU if there is one")
    parser.add_class_arguments(RunConfig)
    if base is not None:
        parser.set_defaults({k: v for k, v in _flatten(base).items()})
    notes = _field_notes(RunConfig)
    notes["preset"] = f"one of {', '.join(PRESETS)}"
    for name, hint in get_type_hints(RunConfig).items():
        if is_dataclass(hint):
            notes |= {f"{name}.{f.name}": "" for f in fields(hint)}
            notes |= {f"{name}.{k}": v for k, v in _field_notes(hint).items()}  # pyright: ignore
    for action in parser._actions:
        if notes.get(action.dest):
            action.help = notes[action.dest].replace("%", "%%")
    return parser


def _flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    both = {k for k in base.keys() & change.keys() if isinstance(base[k], dict)}
    inner = {k: _merge(base[k], change[k]) for k in both if isinstance(change[k], dict)}
    return base | change | inner


def _given(argv: list[str], flag: str) -> str | None:
    """The value a flag has on the command line, before the parser knows its defaults."""
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name == flag:
            return value if equals else (argv[index + 1] if index + 1 < len(argv) else None)
    return None


FREE_ON_RESUME = {"steps", "epochs", "log_every", "validate_every", "validate_episodes"}


def _train_base(argv: list[str]) -> dict[str, Any] | None:
    """Where options start from: the run being resumed, else the preset, with --config on top."""
    from kanerva.config import RunConfig, from_dict, to_dict
    from kanerva.presets import preset
    from kanerva.runs import read_run_config, read_yaml

    run, file = _given(argv, "--run"), _given(argv, "--config")
    if "--resume" in argv and run is not None and (Path(run) / "config.yaml").is_file():
        base = to_dict(read_run_config(Path(run)))
    else:
        content = read_yaml(Path(file)) if file else {}
        named = content.get("preset") if isinstance(content, dict) else None
        name = _given(argv, "--preset") or named
        if name is None:
            if "--resume" in argv and run is not None:
                raise UserError(f"nothing to resume at {run}")
            raise UserError("say what to train on: --preset glyphs needs no data (see --help)")
        base = to_dict(preset(str(name)))
    if file:
        content = read_yaml(Path(file))
        if not isinstance(content, dict):
            raise UserError(f"{file} must hold options, as `kanerva train` writes to config.yaml")
        merged = _merge(base, content)
        from_dict(RunConfig, merged, where=file)  # names unknown and ill-typed keys
        base = merged
    return base


def train(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        _train_parser(None).print_help()
        return 0
    resume = "--resume" in argv
    argv = _default_run(argv) if resume else argv
    base = _train_base(argv)
    options = _train_parser(base).read(argv)
    run, minutes = options.pop("run"), options.pop("minutes")
    root, device = options.pop("data_root"), options.pop("device")
    del options["resume"], options["config"]
    if _given(argv, "--epochs") is not None:
        if _given(argv, "--steps") is not None:
            raise UserError("--steps and --epochs both say how long to train: give one")
        options["steps"] = None

    from kanerva.config import RunConfig, from_dict

    config = from_dict(RunConfig, options, where="options")
    run = Path(run or f"runs/{config.preset}-{config.model}-s{config.seed}")
    if minutes is not None and minutes <= 0:
        raise UserError(f"--minutes must be positive, got {minutes}")
    if resume and (run / "config.yaml").is_file():
        _check_same(config, run)

    from kanerva.training.loop import train as fit

    outcome = fit(
        config,
        run,
        resume=resume,
        minutes=minutes,
        data_root=None if root is None else Path(root),
        accelerator=_device(device),
    )
    best = (
        "" if outcome.best_nll is None else f", best validation bound {outcome.best_nll:.2f} nats"
    )
    print(f"{run}: step {outcome.step} of {outcome.total}{best}")
    if outcome.step < outcome.total:
        print(f"go on with: kanerva train --run {run} --resume")
    return EXIT[outcome.reason]


def _default_run(argv: list[str]) -> list[str]:
    """`--resume` without `--run` means the folder the same flags would have made."""
    if _given(argv, "--run") is not None or _given(argv, "--preset") is None:
        return argv
    preset, seed = _given(argv, "--preset"), _given(argv, "--seed") or "0"
    model = _given(argv, "--model") or "kpp-paper"
    return [*argv, "--run", f"runs/{preset}-{model}-s{seed}"]


def _check_same(config: Any, run: Path) -> None:
    """Going on with other options would be another run: refuse, and name the option."""
    from kanerva.config import to_dict
    from kanerva.runs import read_run_config

    was, now = _flatten(to_dict(read_run_config(run))), _flatten(to_dict(config))
    for key in was:
        if was[key] != now[key] and key not in FREE_ON_RESUME:
            raise UserError(
                f"{run} was started with {key}={was[key]}, not {now[key]}: resume it as it was, "
                "or start another --run"
            )


# evaluate, compare


def evaluate(argv: list[str]) -> int:
    parser = Parser("evaluate", "Score a run's best checkpoint; writes RUN/evaluation.json.")
    parser.add_argument("run", type=str, help="run folder")
    parser.add_argument("--split", type=Literal["validation", "test"], default="test")
    parser.add_argument("--episodes", type=int | None, help="score only the first so many")
    parser.add_argument("--iwae", type=int, default=0, help="also the k-sample bound")
    parser.add_argument("--controls", type=int, default=1024, help="images scored by each control")
    parser.add_argument("--results", type=str | None, help="also file the record under this folder")
    parser.add_argument("--data_root", type=str | None, help="where data sets lie ($KANERVA_DATA)")
    parser.add_argument("--device", type=Device, default="auto")
    options = parser.read(argv)
    for name in ("episodes", "controls"):
        if options[name] is not None and options[name] < 1:
            raise UserError(f"--{name} must be at least 1, got {options[name]}")
    if options["iwae"] < 0:
        raise UserError(f"--iwae must not be negative, got {options['iwae']}")
    run = Path(options["run"])

    from kanerva.evaluation import record as records

    root = options["data_root"]
    record = records.evaluate(
        run,
        split=options["split"],
        episodes=options["episodes"],
        iwae_samples=options["iwae"],
        control_images=options["controls"],
        data_root=None if root is None else Path(root),
        device=_device(options["device"]),
    )
    records.write_record(record, run / "evaluation.json")
    print(records.table(record))
    print(f"\nrecord: {run / 'evaluation.json'}")
    print(f"reconstructions: {_reconstructions(run, options)}")
    if options["results"] is not None:
        path = Path(options["results"]) / records.record_name(record)
        records.write_record(record, path)
        print(f"record: {path}")
    return 0


def _reconstructions(run: Path, options: dict[str, Any]) -> Path:
    """Test images over their reconstructions (App. D), as a picture in the run folder."""
    import torch

    from kanerva.pictures import tile

    model = _load(str(run), options["device"])
    episodes = _test_episodes(run, options, model)
    images = episodes.batch(0, -(-32 // episodes.episode_length)).images
    drawn = model.reconstruct(images).flatten(0, 1)[:32]
    pairs = zip(images.flatten(0, 1)[:32].split(16), drawn.split(16), strict=True)
    path = run / "reconstructions.png"
    tile(torch.cat([row for pair in pairs for row in pair]), min(len(drawn), 16)).save(path)
    return path


def compare(argv: list[str]) -> int:
    parser = Parser("compare", "Evaluation records side by side.")
    parser.add_argument("runs", type=str, nargs="+", help="run folders or record files")
    options = parser.read(argv)

    from kanerva.evaluation import record as records

    print(records.compare([records.read_record(Path(run)) for run in options["runs"]]))
    return 0


# generate, recall


def _load(name: str, device: str) -> kanerva.MemoryModel:
    return kanerva.load(name, device=_device(device))


def _pixels_for(model: kanerva.MemoryModel, options: dict[str, Any]) -> Any:
    """Images to write: the files named, else the first test episode of the run's own data."""
    from kanerva import data
    from kanerva.seeding import stream

    bernoulli = model.config.likelihood.kind == "bernoulli"
    if options["images"]:
        paths = [Path(p) for p in options["images"]]
        pixels = data.load_images(paths, model.config.image, resize=options["resize"])
        how = "sample" if bernoulli else "none"
        drawn = data.binarize(pixels, how, stream(options["seed"], "binarize"))
        return data.to_float(drawn, bernoulli).to(model.device)
    run = Path(options["run"])
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is no run folder with data of its own: name image files")
    return _test_episodes(run, options, model).batch(0, 1).images[0]


def _test_episodes(run: Path, options: dict[str, Any], model: kanerva.MemoryModel) -> Any:
    """The test episodes of a run's own data."""
    from kanerva.data import FixedEpisodes
    from kanerva.runs import load_split, read_run_config

    config, root = read_run_config(run), options["data_root"]
    return FixedEpisodes(
        load_split(config, "test", None if root is None else Path(root)),
        episode_length=config.episode_length,
        binarization=config.data.binarization,
        device=model.device,
    )


def _picture_options(parser: Parser, out: str) -> None:
    parser.add_argument("run", type=str, help="run folder, checkpoint folder or Hub id")
    parser.add_argument("images", type=str, nargs="*", help="files or folders to write to memory")
    parser.add_argument("--resize", action="store_true", help="crop and resize images to fit")
    parser.add_argument("--out", type=str | None, help=f"PNG to write ({out})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data_root", type=str | None, help="where data sets lie ($KANERVA_DATA)")
    parser.add_argument("--device", type=Device, default="auto")


def _save_picture(picture: Any, given: str | None, run: str, name: str) -> None:
    inside = Path(run) if Path(run).is_dir() else Path(".")
    path = Path(given) if given else inside / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write picture {path}: {error}") from error
    print(path)


def generate(argv: list[str]) -> int:
    parser = Parser("generate", "Random-key and key-perturbed samples from one episode's memory.")
    _picture_options(parser, "RUN/generate.png")
    parser.add_argument("--num", type=int, default=32, help="samples of each kind")
    parser.add_argument("--spread", type=float, default=0.1, help="of the perturbed keys (§4.1.1)")
    options = parser.read(argv)
    if options["num"] < 1:
        raise UserError(f"--num must be at least 1, got {options['num']}")

    import torch

    from kanerva.pictures import sheet
    from kanerva.seeding import stream

    model = _load(options["run"], options["device"])
    images = _pixels_for(model, options)
    noise = stream(options["seed"], "generate", device=model.device)
    with torch.no_grad():
        memory = model.write(images)
        random = model.generate(memory, options["num"], generator=noise)
        shape = (model.config.memory.reads, 3)
        key = torch.randn(shape, generator=noise, device=model.device)
        near = model.generate(
            memory, options["num"], near=(key, options["spread"]), generator=noise
        )
    parts = [
        ("written", images),
        ("random keys", random),
        (f"keys within {options['spread']:g} of one", near),
    ]
    _save_picture(sheet(parts, columns=16), options["out"], options["run"], "generate.png")
    return 0


def recall(argv: list[str]) -> int:
    from kanerva.evaluation.noise import CUES, make_cue

    parser = Parser("recall", "Write images, then read them back from noisy or partial cues.")
    _picture_options(parser, "RUN/recall.png")
    parser.add_argument("--cue", type=Literal[tuple(CUES)], default="salt_pepper")
    parser.add_argument("--steps", type=int, default=10, help="of iterative reading")
    parser.add_argument("--save_memory", type=str | None, help="keep the memory in this file")
    parser.add_argument("--memory", type=str | None, help="read from this saved memory instead")
    options = parser.read(argv)
    if options["steps"] < 1:
        raise UserError(f"--steps must be at least 1, got {options['steps']}")

    import torch

    from kanerva.pictures import sheet
    from kanerva.seeding import stream

    model = _load(options["run"], options["device"])
    images = _pixels_for(model, options)
    cue = make_cue(options["cue"], images, stream(options["seed"], "cue", device=model.device))
    with torch.no_grad():
        if options["memory"]:
            memory = kanerva.Memory.load(options["memory"]).to(model.device)
        else:
            memory = model.write(images)
        if options["save_memory"]:
            memory.save(options["save_memory"])
        recalled = model.recall(memory, cue, steps=options["steps"])
    errors = (recalled - images).square().mean(dim=(1, 2, 3, 4)).tolist()
    cue_error = (cue - images).square().mean().item()
    last = options["steps"]
    shown = [("written", images), (f"cue: {options['cue']}", cue), ("step 1", recalled[0])]
    if last > 1:
        shown.append((f"step {last}", recalled[-1]))
    _save_picture(
        sheet(shown, columns=min(len(images), 16)), options["out"], options["run"], "recall.png"
    )
    print(
        f"mean squared pixel error against what was written: cue {cue_error:.4f}, "
        f"step 1 {errors[0]:.4f}, step {last} {errors[-1]:.4f}"
    )
    return 0


# data


def data(argv: list[str]) -> int:
    from kanerva import data as sets

    parser = Parser("data", "List the data sets, or download one.")
    parser.add_argument("action", type=Literal["list", "fetch"])
    parser.add_argument("name", type=str | None, nargs="?", default=None)
    parser.add_argument("--data_root", type=str | None, help="where data sets lie ($KANERVA_DATA)")
    options = parser.read(argv)
    root = None if options["data_root"] is None else Path(options["data_root"])
    if options["action"] == "list":
        print(f"data root: {sets.data_root(root)}")
        for name, info in sets.DATASETS.items():
            if name == "images":
                state = "--data.folder"
            else:
                state = "here" if sets.is_present(name, root) else "not here"
            print(f"{name:<14}{state:<14}{info.description}")
        return 0
    if options["name"] is None:
        raise UserError("say which: kanerva data fetch NAME (see `kanerva data list`)")
    for path in sets.fetch(options["name"], root):
        print(path)
    return 0


VERBS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (train, "train a model, or --resume a run"),
    "evaluate": (evaluate, "the bound, its terms and controls; writes evaluation.json"),
    "generate": (generate, "random-key and key-perturbed pictures"),
    "recall": (recall, "write images, read them back from noisy or partial cues"),
    "compare": (compare, "evaluation records side by side"),
    "data": (data, "list the data sets, or fetch one"),
}


def usage() -> str:
    lines = ["usage: kanerva VERB [options]    (kanerva VERB --help)", ""]
    lines += [f"  {name:<10} {text}" for name, (_, text) in VERBS.items()]
    return "\n".join([*lines, "", "  --version"])


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(kanerva.__version__)
        return 0
    warnings.showwarning = lambda message, *_, **__: print(f"kanerva: {message}", file=sys.stderr)
    try:
        if argv[0] not in VERBS:
            raise UserError(f"unknown verb {argv[0]!r}; there are {', '.join(VERBS)}")
        return VERBS[argv[0]][0](argv[1:])
    except UserError as error:
        return _complain(error, 2)
    except ArgumentError as error:
        return _complain(_plain(str(error)), 2)
    except NumbersWentBad as error:
        return _complain(error, 3)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _complain("stopped", 130)


def _plain(message: str) -> str:
    """jsonargparse's words in ours: `--memory.size: expected int, got hello`."""
    key = re.match(r'Parser key "(.*?)"', message)
    value = re.search(r"(?:Got value|Given value): (.*)", message)
    wanted = [w for w in re.findall(r"Expected an? (.*?)(?:\. Got|$)", message, re.MULTILINE)]
    if key is None or value is None or not wanted:
        return message
    kind = re.sub(r"<class '(\w+)'>", r"\1", wanted[0])
    kind = re.sub(r"typing\.Literal\[(.*)\]", r"one of \1", kind).replace("'", "")
    return f"--{key.group(1).replace('_', '-')}: expected {kind}, got {value.group(1)}"


def _complain(error: object, code: int) -> int:
    print(f"kanerva: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def entry() -> None:
    """The console script."""
    sys.exit(main())
