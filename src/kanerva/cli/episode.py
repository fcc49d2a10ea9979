"""Shared by the verbs that draw pictures: options, the images of one episode, saving a picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kanerva.cli.options import (
    SHIPPED_RUN,
    Parser,
    choose_device,
    find_run,
    get_data_root,
    output_folder,
)
from kanerva.errors import UserError

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from kanerva.data import FixedEpisodes
    from kanerva.memory.heap import Memory
    from kanerva.models.base import MemoryModel
    from kanerva.models.kpp import Kpp


def make_picture_parser(verb: str, description: str) -> Parser:
    parser = Parser(description)
    parser.add_option(
        "run",
        type=str,
        help="run folder, checkpoint folder or Hub id; or a shipped model's name, whose output "
        f"goes to {SHIPPED_RUN}",
    )
    parser.add_option(
        "images", type=str, nargs="*", default=[], help="image files or folders to write to memory"
    )
    parser.add_argument("--resize", action="store_true", help="crop and resize images to fit")
    parser.add_option("--out", type=str | None, help=f"PNG to write; default: RUN/{verb}.png")
    parser.add_option("--seed", type=int, default=0, help="seed of noise and samples")
    parser.add_device_options()
    return parser


def load_model_and_images(options: dict[str, Any]) -> "tuple[MemoryModel, Tensor]":
    """Load the model and the images to write: the given files, else the first test episode of the
    run's data."""
    from kanerva import data
    from kanerva.models.loading import load
    from kanerva.models.pixels import prepare

    model = load(options["run"], device=choose_device(options)).requires_grad_(False)
    if not options["images"]:
        run = find_run(options["run"])
        if not (run / "config.yaml").is_file():
            raise UserError(f"{run} is not a run folder, so it has no data: name image files")
        episodes = load_test_episodes(run, model, get_data_root(options))
        return model, episodes.batch(0, 1).images[0]
    paths = [Path(path) for path in options["images"]]
    # `prepare` binarizes by a threshold, so that a file gives the same image each time it is read
    images = prepare(data.load_images(paths, model.config.image, resize=options["resize"]), model)
    return with_room(model, len(images)), images


def with_room(model: "MemoryModel", count: int) -> "MemoryModel":
    """Return the model with enough cells for `count` images."""
    full = model.has_blocks and count > cast("Kpp", model).capacity
    return model.with_capacity(count) if full else model


def load_test_episodes(run: Path, model: "MemoryModel", root: Path | None) -> "FixedEpisodes":
    """The test episodes of a run's data."""
    from kanerva.data.splits import fixed_episodes, load_split
    from kanerva.runs import read_run_config

    config = read_run_config(run)
    return fixed_episodes(config, load_split(config, "test", root), model.device)


def write_memory(model: "MemoryModel", images: "Tensor", options: dict[str, Any]) -> "Memory":
    """Write the images to a memory, with the noise of `--seed`."""
    from kanerva.seeding import stream

    return model.write(images, generator=stream(options["seed"], "write", device=model.device))


def read_back(
    model: "MemoryModel", memory: "Memory", images: "Tensor", name: str, options: dict[str, Any]
) -> "tuple[list[tuple[str, Tensor]], list[float]]":
    """Read images back from cues of the kind `name`. Return labelled pictures (cue, first and last
    step), and the mean squared pixel errors of the cue and of every step."""
    from kanerva.evaluation.noise import make_cue, observed
    from kanerva.seeding import stream

    cue = make_cue(name, images, stream(options["seed"], "cue", name, device=model.device))
    steps, seen = options["steps"], observed(name, images)
    recalled = model.recall(memory, cue, steps=steps, observed=seen)
    shown = [(f"cue, {name.replace('_', ' ')}", cue)]
    shown += [(f"recalled, step {n}", recalled[n - 1]) for n in sorted({1, steps})]
    return shown, [float((p - images).square().mean()) for p in (cue, *recalled)]


def save_picture(picture: "Image.Image", options: dict[str, Any], name: str) -> None:
    """Save to `--out`, else to the run folder, or for a Hub id to this folder. Print the path."""
    from kanerva.errors import printable
    from kanerva.models.loading import shipped_folder
    from kanerva.pictures import write_picture

    folder = output_folder(options["run"])
    here = not folder.is_dir() and shipped_folder(options["run"]) is None
    path = Path(options["out"] or (Path(".") if here else folder) / name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_picture(picture, path)
    print(printable(str(path)))
