"""Ship a run: its best weights in 8 bits, scored as they ship, with record and card.

    python -m kanerva.lab.ship runs/mnist-kpp-bits-s0 mnist-3

writes a folder of that name into the package: model.safetensors, config.json, config.yaml,
evaluation.json and card.md. `kanerva.load` then finds it, and wheels include it. A shipped model's
folder can be given as the run: its weights stay the same, and are scored again.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from kanerva.config import to_dict
from kanerva.data.splits import fixed_episodes, load_split
from kanerva.errors import UserError
from kanerva.evaluation.bound import bound
from kanerva.evaluation.record import evaluate
from kanerva.evaluation.records import about_training, read_record, write_record
from kanerva.files import write_tensors
from kanerva.lab.card import card
from kanerva.models.base import MemoryModel
from kanerva.models.checkpoint_io import CONFIG, WEIGHTS
from kanerva.models.eight_bits import in_eight_bits
from kanerva.models.loading import PRETRAINED, check_shipped, load
from kanerva.plain_files import file_digest, write_whole
from kanerva.runs import read_run_config, write_run_config
from kanerva.training.checkpoint import STATE, read_state

MOST = 6_000_000  # bytes of weights, so that the package stays a quick download
RECORD, CARD, RUN = "evaluation.json", "card.md", "config.yaml"


def ship(
    run: Path,
    name: str,
    *,
    into: Path = PRETRAINED,
    data_root: Path | None = None,
    control_images: int = 1024,
) -> Path:
    """Make `into/name` from a run's best checkpoint. It is scored on a CPU, so that any user can
    repeat the score. An existing folder of that name is replaced at the end."""
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
        raise UserError(f"a shipped model's name is a word such as mnist, got {name!r}")
    config = read_run_config(run)
    if config.data.set == "images":
        raise UserError(f"{run} was trained on a private folder of images, which others lack")
    earlier = _earlier_record(run)
    before = earlier.get("shipped", {})
    if before:
        check_shipped(run)
    trained = before["trained"] if before else _training(run)
    with tempfile.TemporaryDirectory() as place:
        made = Path(place) / name
        made.mkdir()
        model = load(run)
        if before:
            for file in (WEIGHTS, CONFIG):
                shutil.copyfile(run / file, made / file)
        else:
            save_rounded(model, made)
        write_run_config(made, config)
        record = evaluate(run, load(made), data_root=data_root, control_images=control_images)
        record |= about_training(earlier)
        record |= {"command": f"python -m kanerva.lab.ship RUN {name}"}
        record["shipped"] = {
            "name": name,
            "dtype": before.get("dtype", "int8"),
            "bytes": (made / WEIGHTS).stat().st_size,
            "sha256": {file: file_digest(made / file) for file in (WEIGHTS, CONFIG, RUN)},
            "trained": trained,
        }
        if not model.is_exact:  # else the bound is that of the key, however weights are rounded
            nats = before.get("unrounded_nll_nats")
            if nats is None:
                split = load_split(config, "test", data_root)
                episodes = fixed_episodes(config, split, model.device)
                nats = bound(model, episodes, title="unrounded").nll_nats
            record["shipped"]["unrounded_nll_nats"] = nats
        write_record(record, made / RECORD)
        write_whole(made / CARD, card(record, config))
        beside = into / f".{name}.tmp"  # a full disk must not cost the model that is there
        shutil.rmtree(beside, ignore_errors=True)
        try:
            shutil.copytree(made, beside)
            shutil.rmtree(into / name, ignore_errors=True)
            beside.rename(into / name)
        except OSError as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise UserError(f"cannot write {into / name}: {error.strerror}") from error
    return into / name


def save_rounded(model: MemoryModel, folder: Path) -> None:
    """Save weights and config for `load`; refuse weights that are too large to ship.

    Unlike a run's weights, these do not contain a hash of their config: the record beside them has
    the hashes of both files.
    """
    write_tensors(folder / WEIGHTS, in_eight_bits(model), {"format": "pt"})
    write_whole(folder / CONFIG, json.dumps(to_dict(model.config), indent=2) + "\n")
    size = (folder / WEIGHTS).stat().st_size
    if size > MOST:
        raise UserError(
            f"{size / 1e6:.1f} MB in 8 bits, but a shipped model has at most "
            f"{MOST / 1e6:g}: train one with fewer than {MOST / 1e6:g} million parameters"
        )


def _earlier_record(folder: Path) -> dict[str, Any]:
    """The record in a shipped model's folder; empty if the folder is that of a run."""
    # the weights of a run are in its checkpoints
    if not ((folder / WEIGHTS).is_file() and (folder / RECORD).is_file()):
        return {}
    record = read_record(folder)
    return record if "shipped" in record else {}


def _training(run: Path) -> dict[str, Any]:
    """How a run was trained: commit, device, versions."""
    last = run / "checkpoints" / "last"
    if not (last / STATE).is_file():
        raise UserError(f"{last / STATE} is missing: it says how {run} was trained")
    about = read_state(last)["about"]
    return {key: about[key] for key in ("commit", "device", "versions")}


def main(words: list[str]) -> int:
    """Ship the run that the command line names. A user's error is reported in one line."""
    parser = argparse.ArgumentParser(
        prog="python -m kanerva.lab.ship",
        description="Round a run's best weights to 8 bits, score them, put them into the package.",
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("name", help="its name for kanerva.load")
    parser.add_argument("--into", type=Path, default=PRETRAINED, help="folder to put it into")
    parser.add_argument("--data-root", type=Path, help="folder of the data sets")
    options = parser.parse_args(words)
    try:
        folder = ship(options.run, options.name, into=options.into, data_root=options.data_root)
    except UserError as error:
        print(f"kanerva: {error}", file=sys.stderr)
        return 2
    print((folder / CARD).read_text())
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
