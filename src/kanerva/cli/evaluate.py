"""`kanerva evaluate` and `kanerva compare`: figures, and where they are filed."""

from pathlib import Path
from typing import Any, Literal

import torch

from kanerva.cli.options import (
    HOME,
    Parser,
    at_least,
    device_of,
    files_of,
    home_of,
    root_of,
)
from kanerva.data import FixedEpisodes
from kanerva.evaluation.record import (
    evaluate as make_record,
)
from kanerva.evaluation.record import (
    file_record,
    read_record,
    read_records,
    run_record_name,
    write_record,
)
from kanerva.evaluation.report import compare as side_by_side
from kanerva.evaluation.report import over_seeds, table
from kanerva.evaluation.resized import Elsewhere
from kanerva.memory.quantise import MemoryType
from kanerva.models import MemoryModel, load, shipped_folder
from kanerva.pictures import sheet
from kanerva.runs import fixed_episodes, load_split, read_run_config

TRAINING = (
    "checkpoint",
    "images_seen",
    "images_per_s",
    "wall_s",
    "steps",
    "best_step",
    "skipped_steps",
)


def evaluate(argv: list[str]) -> int:
    """Score a run's best checkpoint; write its record and a picture of reconstructions."""
    parser = Parser("evaluate", "Score a run's best checkpoint; writes RUN/evaluation.json.")
    parser.add_argument(
        "run", type=str, help="run folder; or a shipped model's name, then RUN is " + HOME
    )
    parser.add_argument("--split", type=Literal["validation", "test"], default="test")
    parser.add_argument("--episodes", type=int | None, help="score only the first so many")
    parser.add_argument("--iwae", type=int, default=0, help="also the bound of so many samples")
    parser.add_argument("--controls", type=int, default=1024, help="images scored by each control")
    parser.add_argument("--results", type=str | None, help="also file the record under this folder")
    parser.add_argument("--variant", type=str | None, help="a name for this configuration")
    parser.add_argument("--memory_dtype", type=MemoryType, default="float32", help="round memories")
    other = "kpp: score the same weights in another memory, "
    parser.add_argument("--episode_length", type=int | None, help=other + "of so many images")
    parser.add_argument("--capacity", type=int | None, help=other + "of so many cells")
    parser.add_argument("--size", type=int | None, help=other + "of this side")
    parser.add_place()
    options = parser.read(argv)
    at_least(options, 1, "episodes", "controls", "episode_length", "capacity", "size")
    at_least(options, 0, "iwae")
    name, root = options["run"], root_of(options)
    run, home = files_of(name), home_of(name)
    model = load(name, device=device_of(options))
    place = Elsewhere(options["episode_length"], options["capacity"], options["size"])
    record = make_record(
        run,
        model,
        split=options["split"],
        episodes=options["episodes"],
        iwae_samples=options["iwae"],
        control_images=options["controls"],
        variant=options["variant"],
        memory_dtype=options["memory_dtype"],
        elsewhere=None if place == Elsewhere() else place,
        data_root=root,
    )
    record |= training_of(name)
    print(table(record))
    path = home / run_record_name(record)
    write_record(record, path)
    print(f"\nrecord: {path}")
    if options["results"] is not None:
        print(f"record: {file_record(record, Path(options['results']))}")
    print(f"reconstructions: {draw_reconstructions(run, home, model, root)}")
    return 0


def training_of(name: str) -> dict[str, Any]:
    """How a shipped model was trained, from the record it ships with: its run stayed at home."""
    folder = shipped_folder(name)
    record = {} if folder is None else read_record(folder)
    return {key: record[key] for key in TRAINING if key in record}


def own_episodes(run: Path, model: MemoryModel, root: Path | None) -> FixedEpisodes:
    """The test episodes of a run's own data."""
    config = read_run_config(run)
    return fixed_episodes(config, load_split(config, "test", root), model.device)


def draw_reconstructions(run: Path, home: Path, model: MemoryModel, root: Path | None) -> Path:
    """Test images, each row above its reconstructions (App. D), as a picture in `home`."""
    episodes = own_episodes(run, model, root)
    images = episodes.batch(0, -(-32 // episodes.episode_length)).images
    drawn = model.reconstruct(images).flatten(0, 1)[:32]
    pairs = zip(images.flatten(0, 1)[:32].split(16), drawn.split(16), strict=True)
    rows = torch.cat([row for pair in pairs for row in pair])
    label = f"test images, and below each row the same {model.reconstructed}"
    path = home / "reconstructions.png"
    sheet([(label, rows)], columns=min(len(drawn), 16)).save(path)
    return path


def compare(argv: list[str]) -> int:
    """Evaluation records side by side."""
    parser = Parser("compare", "Evaluation records side by side.")
    parser.add_argument(
        "runs",
        type=str,
        nargs="+",
        help="run folders, records, folders of records, or names of shipped models",
    )
    parser.add_argument(
        "--over_seeds",
        action="store_true",
        help="mean and deviation over runs that differ by seed alone",
    )
    options = parser.read(argv)
    records = [record for run in options["runs"] for record in read_records(files_of(run))]
    print(over_seeds(records) if options["over_seeds"] else side_by_side(records))
    return 0
