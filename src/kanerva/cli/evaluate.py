"""`kanerva evaluate`: score a run; save a record, and a picture of its reconstructions."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kanerva.cli.options import (
    SHIPPED_RUN,
    Parser,
    choose_device,
    find_run,
    get_data_root,
    output_folder,
    require_at_least,
)

if TYPE_CHECKING:
    from kanerva.models.base import MemoryModel

# The same names as in kanerva.memory.quantise, which imports torch
MemoryDtype = Literal["float32", "bfloat16", "int8", "int4"]


def make_parser(words: list[str]) -> Parser:
    parser = Parser("Score a run's best checkpoint; writes RUN/evaluation.json.")
    parser.add_option(
        "run",
        type=str,
        help=f"run folder; or a shipped model's name, whose output goes to {SHIPPED_RUN}",
    )
    parser.add_option("--split", type=Literal["validation", "test"], default="test")
    parser.add_option("--episodes", type=int | None, help="score only this many episodes")
    iwae = "also compute the importance-weighted bound with this many samples"
    parser.add_option("--iwae", type=int, default=0, help=iwae)
    parser.add_option("--controls", type=int, default=1024, help="images to score per control")
    parser.add_option("--results", type=str | None, help="also save the record under this folder")
    parser.add_option("--variant", type=str | None, help="a name for this configuration")
    parser.add_option(
        "--memory-dtype", type=MemoryDtype, default="float32", help="quantise memories"
    )
    parser.add_option("--bits", type=int | None, help="kpp-bits: shrink memories to this many bits")
    resized = "kpp: score the same weights with a memory of another size: "
    parser.add_option("--episode-length", type=int | None, help=resized + "images per episode")
    parser.add_option("--capacity", type=int | None, help=resized + "number of cells")
    parser.add_option("--size", type=int | None, help=resized + "side of the map")
    parser.add_device_options()
    return parser


def run(options: dict[str, Any], words: list[str]) -> int:
    """Score a run's best checkpoint; write its record and a picture of reconstructions."""
    require_at_least(options, 1, "episodes", "controls", "episode_length", "capacity", "size")
    require_at_least(options, 0, "iwae", "bits")
    from kanerva.evaluation.record import evaluate
    from kanerva.evaluation.records import file_record, run_record_name, write_record
    from kanerva.evaluation.report import table
    from kanerva.evaluation.resized import ResizedMemory
    from kanerva.models.loading import load

    name, root = options["run"], get_data_root(options)
    folder, output = find_run(name), output_folder(name)
    model = load(name, device=choose_device(options))
    resized = ResizedMemory(options["episode_length"], options["capacity"], options["size"])
    record = evaluate(
        folder,
        model,
        split=options["split"],
        episodes=options["episodes"],
        iwae_samples=options["iwae"],
        control_images=options["controls"],
        variant=options["variant"],
        memory_dtype=options["memory_dtype"],
        bits=options["bits"],
        resized=None if resized == ResizedMemory() else resized,
        data_root=root,
        results=None if options["results"] is None else Path(options["results"]),
    )
    record |= shipped_training(name)
    print(table(record))
    path = output / run_record_name(record)
    write_record(record, path)
    print(f"\nrecord: {path}")
    if options["results"] is not None:
        print(f"record: {file_record(record, Path(options['results']))}")
    print(f"reconstructions: {draw_reconstructions(folder, output, model, root)}")
    return 0


def shipped_training(name: str) -> dict[str, Any]:
    """How a shipped model was trained, from the record shipped with it: its run is not."""
    from kanerva.evaluation.records import about_training, read_record
    from kanerva.models.loading import shipped_folder

    folder = shipped_folder(name)
    return {} if folder is None else about_training(read_record(folder))


def draw_reconstructions(
    run: Path, output: Path, model: "MemoryModel", data_root: Path | None
) -> Path:
    """Draw rows of test images, each above its reconstructions (App. D), to a file in `output`."""
    import torch

    from kanerva.cli.episode import load_test_episodes
    from kanerva.pictures import sheet, write_picture

    episodes = load_test_episodes(run, model, data_root)
    images = episodes.batch(0, -(-32 // episodes.episode_length)).images
    rebuilt = model.reconstruct(images).flatten(0, 1)[:32]
    pairs = zip(images.flatten(0, 1)[:32].split(16), rebuilt.split(16), strict=True)
    rows = torch.cat([row for pair in pairs for row in pair])
    label = f"test images, and below each row the same {model.reconstructed}"
    path = output / "reconstructions.png"
    write_picture(sheet([(label, rows)], columns=min(len(rebuilt), 16)), path)
    return path
