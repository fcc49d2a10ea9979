"""`kanerva generate`, `recall`, `denoise` and `memory`: pictures from one episode's memory."""

from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from PIL import Image

from kanerva import data
from kanerva.cli.evaluate import own_episodes
from kanerva.cli.options import (
    HOME,
    Parser,
    at_least,
    device_of,
    files_of,
    home_of,
    root_of,
)
from kanerva.distributions import as_normal
from kanerva.errors import UserError
from kanerva.evaluation.noise import CUES, NOISES, make_cue, observed
from kanerva.memory.heap import Memory
from kanerva.models import Kpp, MemoryModel, load, shipped_folder
from kanerva.models.base import Images
from kanerva.pictures import as_picture, map_with_thumbnails, sheet, stacked
from kanerva.seeding import stream


def picture_parser(verb: str, description: str) -> Parser:
    parser = Parser(verb, description)
    parser.add_argument(
        "run",
        type=str,
        help="run folder, checkpoint folder or Hub id; or a shipped model's name, then RUN is "
        + HOME,
    )
    parser.add_argument(
        "images", type=str, nargs="*", default=[], help="files or folders to write to memory"
    )
    parser.add_argument("--resize", action="store_true", help="crop and resize images to fit")
    parser.add_argument("--out", type=str | None, help=f"PNG to write (RUN/{verb}.png)")
    parser.add_argument("--seed", type=int, default=0, help="of noise and samples")
    parser.add_place()
    return parser


def images_to_write(model: MemoryModel, options: dict[str, Any]) -> Images:
    """The files named, else the first test episode of the run's own data."""
    if not options["images"]:
        run = files_of(options["run"])
        if not (run / "config.yaml").is_file():
            raise UserError(f"{run} is no run folder with data of its own: name image files")
        return own_episodes(run, model, root_of(options)).batch(0, 1).images[0]
    paths = [Path(path) for path in options["images"]]
    pixels = data.load_images(paths, model.config.image, resize=options["resize"])
    bits = model.config.likelihood.kind == "bernoulli"
    noise = stream(options["seed"], "binarize")
    drawn = data.binarize(pixels, "sample" if bits else "none", noise)
    return data.to_float(drawn, bits).to(model.device)


def save_picture(picture: Image.Image, options: dict[str, Any], name: str) -> None:
    """Save where `--out` says, else into the run folder (here, for a Hub id); print the path."""
    home = home_of(options["run"])
    here = not home.is_dir() and shipped_folder(options["run"]) is None
    path = Path(options["out"] or (Path(".") if here else home) / name)
    try:
        if path.suffix.lower() not in Image.registered_extensions():
            raise ValueError("unknown kind of picture; name it .png")
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write picture {path}: {error}") from error
    print(path)


@torch.no_grad()
def generate(argv: list[str]) -> int:
    """Random-key and key-perturbed samples from one episode's memory."""
    parser = picture_parser("generate", "Random-key and key-perturbed samples from a memory.")
    parser.add_argument("--num", type=int, default=32, help="samples of each kind")
    parser.add_argument("--spread", type=float, default=0.1, help="of perturbed keys (§4.1.1)")
    parser.add_argument(
        "--drawn", action="store_true", help="kpp: draw pixels, do not show what is expected"
    )
    options = parser.read(argv)
    at_least(options, 1, "num")
    at_least(options, 0, "spread")
    model = load(options["run"], device=device_of(options))
    images = images_to_write(model, options)
    noise = stream(options["seed"], "generate", device=model.device)
    memory = model.write(images, generator=noise) if model.remembers else None
    how: dict[str, Any] = {"generator": noise}
    if options["drawn"]:
        if not isinstance(model, Kpp):
            raise UserError(f"--drawn is for kpp, {options['run']} is {model.config.model}")
        how["drawn"] = True
    random = model.generate(memory, options["num"], **how)
    parts = [("written", images), ("random keys", random)]
    if not model.has_keys:
        parts = [("images", images), ("samples", random)]
    elif isinstance(model, Kpp):
        assert memory is not None
        keys = as_normal(memory.places)
        for spread in (options["spread"], 5 * options["spread"]):
            moved = keys + spread * torch.randn(keys.shape, generator=noise, device=keys.device)
            made = model.generate_at(memory, moved, **how)
            parts.append((f"the written keys, each moved by {spread:g} * noise", made))
    else:
        key = torch.randn(model.key_shape, generator=noise, device=model.device)
        near = (key, options["spread"])
        made = model.generate(memory, options["num"], near=near, generator=noise)
        parts.append((f"keys around one, standard deviation {options['spread']:g}", made))
    save_picture(sheet(parts, columns=16), options, "generate.png")
    return 0


@torch.no_grad()
def recall(argv: list[str]) -> int:
    """Write images, then read them back from noisy or partial cues."""
    parser = picture_parser("recall", "Write images, then read them back from damaged cues.")
    parser.add_argument("--cue", type=Literal[tuple(CUES)], default="salt_pepper")
    parser.add_argument("--steps", type=int, default=10, help="of iterative reading")
    parser.add_argument("--save_memory", type=str | None, help="keep the memory in this file")
    parser.add_argument("--memory", type=str | None, help="read from this saved memory instead")
    options = parser.read(argv)
    at_least(options, 1, "steps")
    model = load(options["run"], device=device_of(options))
    images = images_to_write(model, options)
    cue = make_cue(options["cue"], images, stream(options["seed"], "cue", device=model.device))
    if options["memory"]:
        memory = Memory.load(options["memory"]).to(model.device)
    else:
        noise = stream(options["seed"], "write", device=model.device)
        memory = model.write(images, generator=noise)
    if options["save_memory"]:
        memory.save(options["save_memory"])
    steps, seen = options["steps"], observed(options["cue"], images)
    recalled = model.recall(memory, cue, steps=steps, observed=seen)
    asked = "asked for" if options["memory"] else "written"
    parts = [(asked, images), (f"cue: {options['cue'].replace('_', ' ')}", cue)]
    parts += [(f"recalled, step {n}", recalled[n - 1]) for n in sorted({1, steps})]
    save_picture(sheet(parts, columns=min(len(images), 16)), options, "recall.png")
    shown = [("cue", cue), *((f"step {n}", recalled[n - 1]) for n in sorted({1, steps}))]
    errors = [f"{name} {(p - images).square().mean():.4f}" for name, p in shown]
    print(f"mean squared pixel error against what was {asked}: {', '.join(errors)}")
    return 0


@torch.no_grad()
def denoise(argv: list[str]) -> int:
    """Write clean images, read them back from cues with each of the paper's noises."""
    parser = picture_parser("denoise", "Write clean images, then clean noisy ones by reading.")
    parser.add_argument("--steps", type=int, default=10, help="of iterative reading")
    options = parser.read(argv)
    at_least(options, 1, "steps")
    model = load(options["run"], device=device_of(options))
    images = images_to_write(model, options)
    noise = stream(options["seed"], "write", device=model.device)
    memory = model.write(images, generator=noise)
    steps, columns = options["steps"], min(len(images), 16)
    parts, curves = [("written", images[:columns])], {}
    for name in NOISES:
        cue = make_cue(name, images, stream(options["seed"], "cue", name, device=model.device))
        recalled = model.recall(memory, cue, steps=steps)
        label = name.replace("_", " & ")
        parts.append((f"{label}: the cue", cue[:columns]))
        parts += [(f"{label}: step {n}", recalled[n - 1, :columns]) for n in sorted({1, steps})]
        errors = [float((picture - images).square().mean()) for picture in (cue, *recalled)]
        curves[label] = errors
    curve = as_picture(error_curves(curves))
    save_picture(stacked([sheet(parts, columns), curve]), options, "denoise.png")
    for label, errors in curves.items():
        later = ", ".join(f"step {n} {errors[n]:.4f}" for n in sorted({1, steps}))
        print(f"{label}: mean squared pixel error, cue {errors[0]:.4f}, {later}")
    return 0


def error_curves(curves: dict[str, list[float]]) -> Figure:
    """Pixel error against reading steps; step 0 is the cue."""
    figure = Figure(figsize=(6.5, 3.2), layout="constrained")
    axes = figure.subplots()
    for label, errors in curves.items():
        axes.plot(range(len(errors)), errors, "o-", markersize=4, label=label)
    axes.set_xlabel("steps of reading (0: the cue)")
    axes.set_ylabel("mean squared pixel error")
    axes.set_ylim(bottom=0)
    axes.grid(True, color="#eeeeee")
    axes.legend(frameon=False)
    return figure


@torch.no_grad()
def memory(argv: list[str]) -> int:
    """The memory itself, and each image written drawn where its block lies."""
    parser = picture_parser("memory", "Draw a memory: its map, and what was written where it lies.")
    parser.add_argument("--free", type=list[int], default=[], help="free these handles first")
    options = parser.read(argv)
    model = load(options["run"], device=device_of(options))
    if not isinstance(model, Kpp):
        raise UserError(f"{options['run']}: {model.config.model} has no blocks to draw")
    images = images_to_write(model, options)
    noise = stream(options["seed"], "write", device=model.device)
    held = model.write(images, generator=noise).free(*options["free"])
    grid = model.placer.grid
    picture = map_with_thumbnails(
        held.to_image(),
        held.places,
        images[held.handles],
        held.handles,
        cells=None if grid is None else (grid.rows, grid.columns),
        title=f"the map, {'x'.join(map(str, held.map.shape))}: colours are "
        + ("its channels" if len(held.map) == 3 else "its three principal components"),
    )
    save_picture(picture, options, "memory.png")
    print(
        f"{len(held)} of {held.capacity} blocks held; handles {', '.join(map(str, held.handles))}"
    )
    return 0
