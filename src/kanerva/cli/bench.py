"""`kanerva bench`: how fast, as a table, a record and a picture."""

import os
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from kanerva.cli.options import (
    Parser,
    choose_device,
    find_run,
    get_data_root,
    require_at_least,
    spell_flag,
)
from kanerva.config import RowsConfig, RunConfig, model_config, option_names
from kanerva.config.run import Precision
from kanerva.errors import UserError
from kanerva.presets import preset, with_options

if TYPE_CHECKING:
    import torch

    from kanerva.training.step import Form

Measurement = Literal["throughput", "agreement", "quality", "evaluation"]
Rows = tuple[list[dict[str, Any]], dict[str, Any]]  # of a record, and what it is about
STEPS = {"cuda": 30, "cpu": 3}  # of a window
PRECISION = {"cuda": "bf16-mixed", "cpu": "32-true"}
MODEL_OPTIONS = {"reads": "memory.reads", "size": "memory.size", "capacity": "memory.capacity"}


def make_parser(words: list[str]) -> Parser:
    parser = Parser(
        "Measure speed. throughput: images/s, time by part, share of the chip's matrix rate. "
        "agreement: whether eager, compiled and captured steps compute the same. quality: seconds "
        "until a bound. evaluation: seconds to score a run. Options with several values take them "
        "joined by commas, and every combination is measured."
    )
    parser.add_option("what", type=Measurement, nargs="?", default="throughput")
    parser.add_option("--preset", type=str, default="mnist", help="one or several")
    parser.add_option("--model", type=str, default="kpp", help="one or several")
    parser.add_option("--variant", type=str | None, help="kpp's settings: store or generate")
    parser.add_option("--execution", type=str | None, help="one or several (all that run here)")
    parser.add_option("--episode-length", type=str | None, help="T: one or several")
    parser.add_option("--batch", type=str | None, help="episodes a step: one or several")
    parser.add_option("--images", type=int | None, help="images a step, whatever T")
    parser.add_option("--reads", type=str | None, help="K: one or several (kpp-paper)")
    parser.add_option("--size", type=str | None, help="side of the memory: one or several")
    parser.add_option(
        "--rows",
        type=str | None,
        help="of km, dkm, dnc: one or several; maps get as many floats",
    )
    parser.add_option("--capacity", type=str | None, help="cells of a memory (kpp)")
    parser.add_option("--precision", type=str | None, help="one or several (GPU: bf16-mixed)")
    parser.add_option("--steps", type=int | None, help="steps of a window (30), or to compare")
    parser.add_option("--until", type=float | None, help="quality: nats to reach (the paper's)")
    parser.add_option("--every", type=int, default=100, help="quality: steps between scores")
    parser.add_option("--note", type=str, default="", help="quality: a note beside the figure")
    parser.add_option("--run", type=str | None, help="evaluation: the run to score")
    parser.add_option("--iwae", type=int, default=0, help="evaluation: also with so many samples")
    parser.add_option("--results", type=str | None, help="file the record in this folder")
    parser.add_option("--name", type=str | None, help="of the record (WHAT-PRESET)")
    parser.add_device_options()
    return parser


def run(options: dict[str, Any], words: list[str]) -> int:
    """Measure, print a table, file a record."""
    require_at_least(options, 1, "images", "steps", "every")
    require_at_least(options, 0, "iwae")
    what = options["what"]
    if what == "evaluation" and options["run"] is None:
        raise UserError("bench evaluation needs --run: the run to score")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("bench measures one process: start it without torchrun")
    if what != "evaluation":
        configs = make_configs(options, "cpu")  # finds mistakes before torch is loaded
        if what == "quality":
            [bound_to_reach(options, config.preset) for config in configs]
    import torch

    from kanerva.lab.benchmark.report import draw, table
    from kanerva.lab.benchmark.timing import check_folder, measurement, write_measurement

    if options["results"] is not None:
        check_folder(Path(options["results"]))
    device = torch.device(choose_device(options))
    if device.type == "cuda" and what != "evaluation":
        torch.set_float32_matmul_precision("high")
    rows, about = MEASURES[what](options, device)
    kind = "evaluation-time" if what == "evaluation" else what
    record = measurement(kind, device, words, **about, rows=rows)
    print(table(record))
    if options["results"] is not None:
        name = options["name"] or f"{what}-{options['preset'].replace(',', '-')}"
        path = write_measurement(record, Path(options["results"]), name)
        print(f"\nrecord: {path}")
        if kind == "throughput":
            draw([record]).savefig(path.with_suffix(".png"), dpi=110)
            print(f"picture: {path.with_suffix('.png')}")
    return 0


def measure_throughput(options: dict[str, Any], device: "torch.device") -> Rows:
    from kanerva.evaluation.costs import flop_per_image
    from kanerva.lab.benchmark.throughput import throughput
    from kanerva.lab.benchmark.timing import matrix_rate
    from kanerva.models import build
    from kanerva.training.devices import make_fabric

    rows: list[dict[str, Any]] = []
    rates: dict[str, float] = {}
    for config in make_configs(options, device.type):
        fabric = make_fabric(config, device.type)
        if config.precision not in rates:
            rates[config.precision] = matrix_rate(device, config.precision)
        work, first = flop_per_image(build(config.model).eval(), config), None
        for form in choose_forms(options, device):
            report_progress(config, [form])
            row = throughput(config, form, fabric, steps=options["steps"] or STEPS[device.type])
            first = first or row["images_per_s"]
            done = work * row["images_per_s"]
            row |= {
                "flop_per_image": work,
                "flop_per_s": done,
                "matrix_rate": rates[config.precision],
                "matrix_share": done / rates[config.precision],
                "times_first": row["images_per_s"] / first,
            }
            rows.append(row)
    return rows, {"preset": options["preset"], "model": options["model"]}


def measure_agreement(options: dict[str, Any], device: "torch.device") -> Rows:
    import torch

    from kanerva.data import TrainingEpisodes
    from kanerva.data.splits import load_split
    from kanerva.lab.benchmark.agreement import agreement
    from kanerva.training.devices import make_fabric

    rows = []
    for config in make_configs(options, device.type):
        episodes = TrainingEpisodes(
            load_split(config, "train", get_data_root(options)),
            episode_length=config.episode_length,
            batch=config.batch,
            seed=config.seed,
            binarization=config.data.binarization,
            device=device,
        )
        forms, fabric = choose_forms(options, device), make_fabric(config, device.type)
        report_progress(config, forms)
        if config.precision == "32-true":  # without TF32
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = False
        rows += agreement(config, forms, fabric, episodes, options["steps"] or 100)
    return rows, {"preset": options["preset"], "model": options["model"]}


def measure_quality(options: dict[str, Any], device: "torch.device") -> Rows:
    from kanerva.lab.benchmark.quality import time_to_bound
    from kanerva.training.step import form_of

    rows = []
    for config in make_configs(options, device.type):
        config = replace(
            config,
            steps=options["steps"] or config.steps,
            execution=options["execution"] or config.execution,
        )
        form = form_of(config.execution, device)
        with tempfile.TemporaryDirectory() as folder:
            row = time_to_bound(
                config,
                Path(folder) / "run",
                bound_to_reach(options, config.preset),
                every=options["every"],
                data_root=get_data_root(options),
                accelerator=device.type,
            )
        note = ", ".join(part for part in (form, config.precision, options["note"]) if part)
        rows.append(row | {"form": form, "note": note})
    return rows, {"preset": options["preset"], "model": options["model"]}


def measure_evaluation(options: dict[str, Any], device: "torch.device") -> Rows:
    from kanerva.lab.benchmark.quality import evaluation_time
    from kanerva.runs import read_run_config

    folder = find_run(options["run"])
    rows = evaluation_time(
        folder, samples=options["iwae"], data_root=get_data_root(options), device=device.type
    )
    config = read_run_config(folder)
    return rows, {"preset": config.preset, "model": config.model.name}


def bound_to_reach(options: dict[str, Any], preset_name: str) -> float:
    """`--until`, or what the paper reports for its model, where it does so in nats."""
    from kanerva.lab.paper_figures import BITS_PER_DIM, KANERVA_PP

    if options["until"] is not None:
        return options["until"]
    if preset_name not in KANERVA_PP or preset_name in BITS_PER_DIM:
        raise UserError(f"bench quality on {preset_name} needs --until: nats per image to reach")
    return KANERVA_PP[preset_name]


MEASURES = {
    "throughput": measure_throughput,
    "agreement": measure_agreement,
    "quality": measure_quality,
    "evaluation": measure_evaluation,
}


def make_configs(options: dict[str, Any], device: str) -> list[RunConfig]:
    """Every combination of what was asked for, each once."""
    models = options["model"].split(",")
    require_used(options, models)
    precisions = (options["precision"] or PRECISION[device]).split(",")
    found: list[RunConfig] = []
    for name, model, precision in product(options["preset"].split(","), models, precisions):
        start = preset(name, model, options["variant"] if model == "kpp" else None)
        if precision not in get_args(Precision):
            raise UserError(f"--precision: must be 32-true or bf16-mixed, got {precision}")
        for length, batch, reads, size, capacity, rows in product(
            parse_numbers(options, "episode_length") or [start.episode_length],
            parse_numbers(options, "batch") or [start.batch],
            *(parse_numbers(options, option) or [None] for option in (*MODEL_OPTIONS, "rows")),
        ):
            if options["images"] is not None:
                batch = max(1, options["images"] // length)
            if rows is not None and size is None:
                size = equal_side(start, rows)
            memory = {"reads": reads, "size": size, "capacity": capacity}
            changes = {
                "memory": {key: value for key, value in memory.items() if value is not None},
                "rows": {} if rows is None else {"count": rows},
            }
            config = replace(
                start,
                model=with_options(start.model, **changes),
                batch=batch,
                episode_length=length,
                precision=precision,
            )
            found += [config] if config not in found else []
    return found


def require_used(options: dict[str, Any], models: list[str]) -> None:
    """Refuse an option that none of the models has."""
    for option, name in MODEL_OPTIONS.items():
        if options[option] is not None:
            if not any(name in option_names(model_config(model)) for model in models):
                raise UserError(f"--{option}: {', '.join(models)} has no {name}")


def equal_side(config: RunConfig, rows: int) -> int | None:
    """The side of a map with as many floats as so many rows of the rivals' width."""
    memory = getattr(config.model, "memory", None)
    return None if memory is None else round((rows * RowsConfig.width / memory.channels) ** 0.5)


def parse_numbers(options: dict[str, Any], name: str) -> list[int] | None:
    """The whole numbers of an option, or None if it was not given."""
    text = options[name]
    if text is None:
        return None
    parts = str(text).split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        flag = spell_flag(f"--{name}")
        raise UserError(f"{flag}: must be whole numbers joined by commas, got {text}")
    return [int(part) for part in parts]


def choose_forms(options: dict[str, Any], device: "torch.device") -> "list[Form]":
    """The forms asked for, or all that run here. Eager comes first: the others are compared to
    it."""
    from kanerva.training.step import form_of

    if options["execution"] is not None:
        return [form_of(name, device) for name in options["execution"].split(",")]
    return ["eager", "compiled", "captured"] if device.type == "cuda" else ["eager", "compiled"]


def report_progress(config: RunConfig, forms: "list[Form]") -> None:
    """A line on stderr while a long measurement runs."""
    model: Any = config.model
    sizes = {"K": "memory.reads", "side": "memory.size", "rows": "rows.count"}
    has = {label: name.split(".") for label, name in sizes.items()
           if name in option_names(type(model))}  # fmt: skip
    shown = "".join(f" {k}={getattr(getattr(model, g), o)}" for k, (g, o) in has.items())
    print(
        f"measuring {config.preset} {model.name} T={config.episode_length} batch={config.batch}"
        f"{shown} {config.precision}: {', '.join(forms)}",
        file=sys.stderr,
        flush=True,
    )
