"""`kanerva bench`: how fast, as a table, a record and a picture."""

import os
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from kanerva.cli.options import Parser, at_least, device_of, files_of, root_of
from kanerva.config import ROWED, RunConfig
from kanerva.data import TrainingEpisodes
from kanerva.errors import UserError
from kanerva.evaluation.record import flop_per_image
from kanerva.lab.benchmark.agreement import agreement
from kanerva.lab.benchmark.quality import evaluation_time, time_to_bound
from kanerva.lab.benchmark.report import draw, table
from kanerva.lab.benchmark.throughput import throughput
from kanerva.lab.benchmark.timing import check_folder, matrix_rate, measurement, write_measurement
from kanerva.models import build
from kanerva.presets import preset
from kanerva.runs import load_split, read_run_config
from kanerva.training.devices import make_fabric
from kanerva.training.step import Form, form_of

WHAT = Literal["throughput", "agreement", "quality", "evaluation"]


def bench(argv: list[str]) -> int:
    """Measure, print a table, file a record."""
    parser = Parser(
        "bench",
        "Measure speed. throughput: images/s, time by part, share of the chip's matrix rate. "
        "agreement: whether eager, compiled and captured steps compute the same. quality: seconds "
        "until a bound. evaluation: seconds to score a run. Options with several values take them "
        "joined by commas, and every combination is measured.",
    )
    parser.add_argument("what", type=WHAT, nargs="?", default="throughput")
    parser.add_argument("--preset", type=str, default="mnist", help="one or several")
    parser.add_argument("--model", type=str, default="kpp", help="one or several")
    parser.add_argument("--variant", type=str | None, help="kpp's settings: store or generate")
    parser.add_argument("--step", type=str | None, help="forms; all that run here unless given")
    parser.add_argument("--episode_length", type=str | None, help="T: one or several")
    parser.add_argument("--batch", type=str | None, help="episodes a step: one or several")
    parser.add_argument("--images", type=int | None, help="images a step, whatever T")
    parser.add_argument("--reads", type=str | None, help="K: one or several (kpp-paper)")
    parser.add_argument("--size", type=str | None, help="side of the memory: one or several")
    parser.add_argument(
        "--rows",
        type=str | None,
        help="of km, dkm, dnc: one or several; maps get as many floats",
    )
    parser.add_argument("--capacity", type=int | None, help="kpp: places in the memory")
    parser.add_argument("--precision", type=str | None, help="bf16-mixed on a GPU unless given")
    parser.add_argument("--steps", type=int | None, help="steps of a window (30), or to compare")
    parser.add_argument("--until", type=float, default=41.58, help="quality: nats to pass below")
    parser.add_argument("--every", type=int, default=100, help="quality: steps between scores")
    parser.add_argument("--note", type=str, default="", help="quality: said beside the figure")
    parser.add_argument("--run", type=str | None, help="evaluation: the run to score")
    parser.add_argument("--iwae", type=int, default=0, help="evaluation: also with so many samples")
    parser.add_argument("--results", type=str | None, help="file the record in this folder")
    parser.add_argument("--name", type=str | None, help="of the record; WHAT-PRESET unless given")
    parser.add_place()
    options = parser.read(argv)
    at_least(options, 1, "images", "capacity", "steps", "every")
    at_least(options, 0, "iwae")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("bench measures one process: start it without torchrun")
    if options["results"] is not None:
        check_folder(Path(options["results"]))
    device = torch.device(device_of(options))
    if device.type == "cuda" and options["what"] != "evaluation":
        torch.set_float32_matmul_precision("high")
    rows, about = MEASURES[options["what"]](options, device)
    kind = "evaluation-time" if options["what"] == "evaluation" else options["what"]
    record = measurement(kind, device, argv, **about, rows=rows)
    print(table(record))
    if options["results"] is not None:
        name = options["name"] or f"{options['what']}-{options['preset'].replace(',', '-')}"
        path = write_measurement(record, Path(options["results"]), name)
        print(f"\nrecord: {path}")
        if kind == "throughput":
            draw([record]).savefig(path.with_suffix(".png"), dpi=110)
            print(f"picture: {path.with_suffix('.png')}")
    return 0


def _throughput(options: dict[str, Any], device: torch.device) -> tuple[list, dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    rates: dict[str, float] = {}
    for config in _configs(options, device):
        fabric = make_fabric(config, device.type)
        if config.precision not in rates:
            rates[config.precision] = matrix_rate(device, config.precision)
        work, first = flop_per_image(build(config.model_config()).eval(), config), None
        for form in _forms(options, device):
            _say(config, form)
            row = throughput(config, form, fabric, steps=options["steps"] or _STEPS[device.type])
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


_STEPS = {"cuda": 30, "cpu": 3}


def _agreement(options: dict[str, Any], device: torch.device) -> tuple[list, dict[str, Any]]:
    rows = []
    configs = _configs(options, device)
    for config in configs:
        episodes = TrainingEpisodes(
            load_split(config, "train", root_of(options)),
            episode_length=config.episode_length,
            batch=config.batch,
            seed=config.seed,
            binarization=config.data.binarization,
            device=device,
        )
        forms, fabric = _forms(options, device), make_fabric(config, device.type)
        _say(config, forms)
        if config.precision == "32-true":  # float32 in earnest
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = False
        rows += agreement(config, forms, fabric, episodes, options["steps"] or 100)
    return rows, {"preset": options["preset"], "model": options["model"]}


def _quality(options: dict[str, Any], device: torch.device) -> tuple[list, dict[str, Any]]:
    rows = []
    for config in _configs(options, device):
        config = replace(config, steps=options["steps"] or config.steps)
        if options["step"] is not None:
            config = replace(config, step=options["step"])
        form = form_of(config.step, device)
        with tempfile.TemporaryDirectory() as folder:
            row = time_to_bound(
                config,
                Path(folder) / "run",
                options["until"],
                every=options["every"],
                data_root=root_of(options),
                accelerator=device.type,
            )
        note = ", ".join(part for part in (form, config.precision, options["note"]) if part)
        rows.append(row | {"form": form, "note": note})
    return rows, {"preset": options["preset"], "model": options["model"]}


def _evaluation(options: dict[str, Any], device: torch.device) -> tuple[list, dict[str, Any]]:
    if options["run"] is None:
        raise UserError("say which run to score: --run RUN")
    run = files_of(options["run"])
    rows = evaluation_time(
        run, samples=options["iwae"], data_root=root_of(options), device=device.type
    )
    config = read_run_config(run)
    return rows, {"preset": config.preset, "model": config.model}


MEASURES = {
    "throughput": _throughput,
    "agreement": _agreement,
    "quality": _quality,
    "evaluation": _evaluation,
}


def _configs(options: dict[str, Any], device: torch.device) -> list[RunConfig]:
    """Every combination of what was asked for."""
    precisions = (options["precision"] or _PRECISION[device.type]).split(",")
    found = []
    for name, model, precision in product(
        options["preset"].split(","), options["model"].split(","), precisions
    ):
        start = preset(name, model, options["variant"] if model == "kpp" else None)
        if precision not in get_args(RunConfig.__annotations__["precision"]):
            raise UserError(f"--precision: expected 32-true or bf16-mixed, got {precision}")
        start = replace(start, precision=precision)
        for length, batch, reads, size, rows in product(
            _numbers(options, "episode_length", start.episode_length),
            _numbers(options, "batch", start.batch),
            _numbers(options, "reads", start.memory.reads),
            _numbers(options, "size", start.memory.size),
            _numbers(options, "rows", start.rows.count),
        ):
            capacity = options["capacity"] or start.memory.capacity
            if options["rows"] is not None and options["size"] is None:
                size = round((rows * start.rows.width / start.memory.channels) ** 0.5)
            memory = replace(start.memory, reads=reads, size=size, capacity=capacity)
            if options["images"] is not None:
                batch = max(1, options["images"] // length)
            matrix = replace(start.rows, count=rows)
            found.append(
                replace(start, memory=memory, rows=matrix, batch=batch, episode_length=length)
            )
    return found


_PRECISION = {"cuda": "bf16-mixed", "cpu": "32-true"}


def _numbers(options: dict[str, Any], name: str, default: int) -> list[int]:
    text = options[name]
    if text is None:
        return [default]
    parts = str(text).split(",")
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag}: expected whole numbers joined by commas, got {text}")
    return [int(part) for part in parts]


def _forms(options: dict[str, Any], device: torch.device) -> list[Form]:
    """The forms asked for, or all that run here: eager first, as what the others are held to."""
    if options["step"] is not None:
        return [form_of(name, device) for name in options["step"].split(",")]
    return ["eager", "compiled", "captured"] if device.type == "cuda" else ["eager", "compiled"]


def _say(config: RunConfig, forms: object) -> None:
    """A line on stderr while a long measurement runs."""
    of = f"rows={config.rows.count}" if config.model in ROWED else f"side={config.memory.size}"
    print(
        f"measuring {config.preset} {config.model} T={config.episode_length} batch={config.batch} "
        f"K={config.memory.reads} {of} {config.precision}: {forms}",
        file=sys.stderr,
        flush=True,
    )
