"""`kanerva bench`: measure speed; print a table, and save a record and a picture."""

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

Measurement = Literal["throughput", "agreement", "quality", "latency"]
Options = dict[str, Any]
Row = dict[str, Any]  # of a record
STEPS = {"cuda": 30, "cpu": 3}  # timed steps
PRECISION = {"cuda": "bf16-mixed", "cpu": "32-true"}
SWEPT = {  # flags that take several values, and the option that one of the models must have
    "episode_length": None,
    "size": "memory.size",
    "capacity": "memory.capacity",
    "rows": None,
}


def make_parser(words: list[str]) -> Parser:
    parser = Parser(
        "Measure speed. throughput: images/s, time of each part, fraction of the chip's peak "
        "matrix rate. agreement: whether eager, compiled and captured steps compute the same. "
        "quality: seconds until the validation bound reaches a value. latency: one call of each "
        "method of a shipped model. Several values are joined by commas, and every combination is "
        "measured."
    )
    parser.add_option("what", type=Measurement, nargs="?", default="throughput")
    parser.add_option("--preset", type=str, default="mnist", help="one or several presets")
    parser.add_option("--model", type=str | None, help="one or several models; default: kpp")
    execution = "one or several forms of a step; default: all that run on this machine"
    parser.add_option("--execution", type=str | None, help=execution)
    parser.add_option("--episode-length", type=str | None, help="T, one or several values")
    parser.add_option("--images", type=int | None, help="images per step, for every T")
    parser.add_option("--size", type=str | None, help="side of the memory, one or several values")
    rows = "rows of km, dkm and dnc, one or several values; other models get as many floats"
    parser.add_option("--rows", type=str | None, help=rows)
    parser.add_option("--capacity", type=str | None, help="kpp: cells of the memory")
    precision = "one or several; default: 32-true, on a GPU bf16-mixed"
    parser.add_option("--precision", type=str | None, help=precision)
    steps = "steps to time (throughput), compare (agreement) or train (quality); calls (latency)"
    parser.add_option("--steps", type=int | None, help=steps)
    held = "latency: images in memory, one or several values"
    parser.add_option("--held", type=str, default="32,1024", help=held)
    until = "quality: nats to reach; default: the paper's"
    parser.add_option("--until", type=float | None, help=until)
    parser.add_option("--every", type=int, default=100, help="quality: steps between validations")
    parser.add_option("--note", type=str, default="", help="quality: a note for the record")
    parser.add_option("--results", type=str | None, help="save the record in this folder")
    parser.add_option("--name", type=str | None, help="name of the record; default: WHAT-PRESET")
    parser.add_device_options()
    return parser


def run(options: Options, words: list[str]) -> int:
    """Measure, print a table, save a record."""
    require_at_least(options, 1, "images", "steps", "every")
    what = options["what"]
    if what == "latency" and options["model"] is not None:
        raise UserError(
            f"--model {options['model']}: bench latency measures the model shipped for each "
            "--preset; leave out --model"
        )
    options = options | {"model": options["model"] or "kpp"}
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("bench measures one process: start it without torchrun")
    for config in make_configs(options, "cpu"):  # find mistakes before torch is loaded
        if what == "quality":
            bound_to_reach(options, config.preset)
    from kanerva.evaluation.records import make_folder, write_record

    if options["results"] is not None:
        make_folder(Path(options["results"]))
    import torch

    from kanerva.lab.benchmark.report import draw, table
    from kanerva.lab.benchmark.timing import measurement
    from kanerva.pictures import write_picture

    device = torch.device(choose_device(options))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    rows = [
        row
        for config in make_configs(options, device.type)
        for row in MEASURES[what](options, device, config)
    ]
    model = options["model"]
    if what == "latency":  # not asked for, but what was shipped
        model = ",".join(dict.fromkeys(row["model"] for row in rows))
    about = {"preset": options["preset"], "model": model, "rows": rows}
    record = measurement(what, device, words, **about)
    print(table(record))
    if options["results"] is not None:
        name = options["name"] or f"{what}-{options['preset'].replace(',', '-')}"
        path = Path(options["results"]) / f"{name}.json"
        write_record(record, path)
        print(f"\nrecord: {path}")
        if what == "throughput":
            write_picture(draw([record]), path.with_suffix(".png"))
            print(f"picture: {path.with_suffix('.png')}")
    return 0


def measure_throughput(options: Options, device: "torch.device", config: RunConfig) -> list[Row]:
    from kanerva.evaluation.costs import flop_per_image
    from kanerva.lab.benchmark.throughput import throughput
    from kanerva.lab.benchmark.timing import matrix_rate
    from kanerva.models import build
    from kanerva.training.devices import make_fabric

    fabric, rate = make_fabric(config, device.type), matrix_rate(device, config.precision)
    work, rows = flop_per_image(build(config.model).eval(), config), []
    for form in choose_forms(options, device):
        report_progress(config, [form])
        row = throughput(config, form, fabric, steps=options["steps"] or STEPS[device.type])
        done = work * row["images_per_s"]
        rows.append(row)
        row |= {
            "flop_per_image": work,
            "flop_per_s": done,
            "matrix_rate": rate,
            "matrix_share": done / rate,
            "times_first": row["images_per_s"] / rows[0]["images_per_s"],
        }
    return rows


def measure_agreement(options: Options, device: "torch.device", config: RunConfig) -> list[Row]:
    import torch

    from kanerva.data.splits import load_split, training_episodes
    from kanerva.lab.benchmark.agreement import agreement
    from kanerva.training.devices import make_fabric

    images = load_split(config, "train", get_data_root(options))
    episodes = training_episodes(config, images, device)
    forms, fabric = choose_forms(options, device), make_fabric(config, device.type)
    report_progress(config, forms)
    if config.precision == "32-true":  # without TF32
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    return agreement(config, forms, fabric, episodes, options["steps"] or 100)


def measure_quality(options: Options, device: "torch.device", config: RunConfig) -> list[Row]:
    from kanerva.lab.benchmark.quality import since_start, time_to_bound
    from kanerva.training.step import form_of

    # the first row includes the start of the process, as a user who trains one model sees it
    first = config == make_configs(options, device.type)[0]
    since = 0.0 if first else since_start()
    steps, execution = options["steps"] or config.steps, options["execution"] or config.execution
    config = replace(config, steps=steps, execution=execution)
    form = form_of(execution, device)
    with tempfile.TemporaryDirectory() as folder:
        row = time_to_bound(
            config,
            Path(folder) / "run",
            bound_to_reach(options, config.preset),
            every=options["every"],
            data_root=get_data_root(options),
            accelerator=device.type,
            since=since,
        )
    note = ", ".join(part for part in (form, config.precision, options["note"]) if part)
    return [row | {"form": form, "note": note}]


def bound_to_reach(options: Options, preset_name: str) -> float:
    """`--until`, else the paper's figure for its model, if that is in nats."""
    from kanerva.lab.paper_figures import BITS_PER_DIM, KANERVA_PP

    if options["until"] is not None:
        return options["until"]
    if preset_name not in KANERVA_PP or preset_name in BITS_PER_DIM:
        raise UserError(f"bench quality on {preset_name} needs --until: nats per image to reach")
    return KANERVA_PP[preset_name]


def measure_latency(options: Options, device: "torch.device", config: RunConfig) -> list[Row]:
    """Measure latency with each number of images in memory that `--held` lists."""
    import torch

    from kanerva.data.splits import fixed_episodes, load_split
    from kanerva.lab.benchmark.latency import latency
    from kanerva.models.kpp import Kpp
    from kanerva.models.loading import load

    model = load(config.preset, device=device)
    if not isinstance(model, Kpp):
        raise UserError(f"bench latency measures models with blocks, not {model.config.name}")
    split = load_split(config, "test", get_data_root(options))
    episodes = fixed_episodes(config, split, device)
    counts = [number or 0 for number in parse_numbers(options, "held")]
    count = -(-(max(counts) + 1) // config.episode_length)
    if count > len(episodes):
        raise UserError(f"--held {max(counts)}: {config.preset} has {len(split)} test images")
    images = episodes.batch(0, count).images.flatten(0, 1)
    calls, threads = options["steps"] or 10, torch.get_num_threads()
    rows = [row for held in counts for row in latency(model, images, held, calls=calls)]
    about = {"preset": config.preset, "model": model.config.name, "threads": threads}
    return [row | about for row in rows]


MEASURES = {
    "latency": measure_latency,
    "throughput": measure_throughput,
    "agreement": measure_agreement,
    "quality": measure_quality,
}


def make_configs(options: Options, device: str) -> list[RunConfig]:
    """Every combination of the option values, without duplicates."""
    models = options["model"].split(",")
    for option, name in SWEPT.items():
        used = [name in option_names(model_config(model)) for model in models]
        if name and options[option] is not None and not any(used):
            raise UserError(f"--{option}: {', '.join(models)} has no {name}")
    precisions = (options["precision"] or PRECISION[device]).split(",")
    configs: list[RunConfig] = []
    for name, model, precision, length, size, capacity, rows in product(
        options["preset"].split(","),
        models,
        precisions,
        *(parse_numbers(options, option) for option in SWEPT),
    ):
        if precision not in get_args(Precision):
            raise UserError(f"--precision: must be 32-true or bf16-mixed, got {precision}")
        start = preset(name, model)
        length = length or start.episode_length
        if rows is not None and size is None:
            size = equal_side(start, rows)
        memory = {"size": size, "capacity": capacity}
        changes = {
            "memory": {key: value for key, value in memory.items() if value is not None},
            "rows": {} if rows is None else {"count": rows},
        }
        config = replace(
            start,
            model=with_options(start.model, **changes),
            batch=max(1, options["images"] // length) if options["images"] else start.batch,
            episode_length=length,
            precision=precision,
        )
        configs += [config] if config not in configs else []
    return configs


def equal_side(config: RunConfig, rows: int) -> int | None:
    """The side of a map with as many floats as `rows` rows of the baselines' width."""
    memory = getattr(config.model, "memory", None)
    return None if memory is None else round((rows * RowsConfig.width / memory.channels) ** 0.5)


def parse_numbers(options: Options, name: str) -> list[int | None]:
    """Parse an option's comma-separated integers; [None] if it was not given."""
    text = options[name]
    if text is None:
        return [None]
    parts = str(text).split(",")
    if not all(part.isdecimal() and len(part) < 10 and int(part) > 0 for part in parts):
        flag = spell_flag(f"--{name}")
        raise UserError(f"{flag}: must be whole numbers joined by commas, got {text}")
    return [int(part) for part in parts]


def choose_forms(options: Options, device: "torch.device") -> "list[Form]":
    """The forms in `--execution`, or all that run on this machine. Eager comes first: the others
    are compared to it."""
    from kanerva.training.step import form_of

    if options["execution"] is not None:
        return [form_of(name, device) for name in options["execution"].split(",")]
    return ["eager", "compiled", "captured"] if device.type == "cuda" else ["eager", "compiled"]


def report_progress(config: RunConfig, forms: "list[Form]") -> None:
    """Print a line on stderr before a long measurement."""
    model: Any = config.model
    sizes = {"side": ("memory", "size"), "rows": ("rows", "count")}
    has = {label: getattr(getattr(model, g, None), o, None) for label, (g, o) in sizes.items()}
    shown = "".join(f" {label}={size}" for label, size in has.items() if size is not None)
    print(
        f"measuring {config.preset} {model.name} T={config.episode_length} batch={config.batch}"
        f"{shown} {config.precision}: {', '.join(forms)}",
        file=sys.stderr,
        flush=True,
    )
