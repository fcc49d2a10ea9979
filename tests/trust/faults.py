"""Every operation of every save fails once: what was there stays, or what is new is whole."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from children import Outcome
from corpus import CONFIG, fingerprint, picture
from shim import Act, Shim, cut_short, fail, half, watching

from kanerva.data.cache import cached_arrays
from kanerva.errors import UserError
from kanerva.evaluation.records import write_record
from kanerva.memory.heap import Memory
from kanerva.models import build
from kanerva.pictures import write_picture
from kanerva.plain_files import append, read_json
from kanerva.runs import config_from_yaml, write_run_config
from kanerva.training.checkpoint import (
    Progress,
    recover,
    restore,
    run_state,
    save_best,
    save_last,
)
from kanerva.training.optim import make_optimiser

FAULTS: dict[str, Act] = {
    "ENOSPC": fail(errno.ENOSPC),
    "EIO": fail(errno.EIO),
    "EDQUOT": fail(errno.EDQUOT),
    "short": cut_short,
    "half": half,
}


@dataclass(frozen=True)
class Save:
    """Something that is saved twice, and how it is read."""

    name: str
    write: Callable[[Path, int], object]  # into a folder: the first or the second content
    read: Callable[[Path], Any]


def _model(number: int) -> Any:
    torch.manual_seed(number)
    return build(CONFIG.model)


def _write_last(folder: Path, number: int) -> None:
    model = _model(number)
    state = run_state(model, make_optimiser(CONFIG.optim, model), None)
    save_last(folder / "last", model, state, Progress(step=number), {})


def _read_last(folder: Path) -> Any:
    recover(folder / "last")
    model = _model(9)
    progress = restore(folder / "last", model, make_optimiser(CONFIG.optim, model), None)
    return [progress.step, dict(model.state_dict())]


def _read_best(folder: Path) -> Any:
    recover(folder / "best")
    return dict(type(_model(0)).from_pretrained(folder / "best").state_dict())


def _write_rows(folder: Path, number: int) -> None:
    if number == 1:
        (folder / "rows").write_text("")
    append(folder / "rows", f"{number},row\n")


def _read_rows(folder: Path) -> str:
    """As a resume does: up to the last whole row."""
    return (folder / "rows").read_text().rpartition("\n")[0]


def _write_cached(folder: Path, number: int) -> None:
    os.environ["KANERVA_CACHE"] = str(folder)
    cached_arrays("a", f"{number}", lambda: {"a": torch.full((3,), number).numpy()})


SAVES = [
    Save("memory", lambda f, n: Memory(torch.full((1, 4, 4), float(n))).save(f / "m"),
         lambda f: Memory.load(f / "m").map),
    Save("weights", lambda f, n: _model(n).save_pretrained(f),
         lambda f: dict(type(_model(0)).from_pretrained(f).state_dict())),
    Save("last", _write_last, _read_last),
    Save("best", lambda f, n: save_best(f / "best", _model(n)), _read_best),
    Save("record", lambda f, n: write_record({"n": n}, f / "sub" / "r.json"),
         lambda f: read_json(f / "sub" / "r.json")),
    Save("config", lambda f, n: write_run_config(f, CONFIG),
         lambda f: config_from_yaml(f / "config.yaml")),
    Save("picture", lambda f, n: write_picture(picture(4 + n), f / "a.png"),
         lambda f: hash((f / "a.png").read_bytes())),
    Save("rows", _write_rows, _read_rows),
    Save("cache", _write_cached, lambda f: None),
]  # fmt: skip


def run_faults(place: Path, most: int | None = None) -> list[Outcome]:
    """Each operation of the second save of each kind, each fault; or `most` of them in all."""
    found: list[Outcome] = []
    for save in SAVES:
        before, after = (_state(save, place, numbers) for numbers in ((1,), (1, 2)))
        with watching(Shim(place)) as shim:
            shim.count = 0
            _again(save, place, shim)
        for name, act in FAULTS.items():
            for number in range(1, shim.count + 1):
                if most is not None and (number * 7 + len(name)) % max(1, 600 // most):
                    continue
                found.append(_strike(save, place, name, act, number, {before, after}))
    shutil.rmtree(place, ignore_errors=True)
    return found


def _state(save: Save, place: Path, numbers: tuple[int, ...]) -> str:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for number in numbers:
        save.write(place, number)
    return fingerprint(save.read(place))


def _again(save: Save, place: Path, shim: Shim) -> None:
    real_count, shim.number = shim.number, 0
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    save.write(place, 1)
    shim.count, shim.number = 0, real_count
    save.write(place, 2)


def _strike(save: Save, place: Path, name: str, act: Act, number: int, known: set[str]) -> Outcome:
    case = f"{save.name}: {name} at operation {number}"
    with watching(Shim(place, number, act)) as shim:
        try:
            _again(save, place, shim)
            status = "carried on"
        except (UserError, OSError) as error:
            status = (
                "refused" if isinstance(error, UserError) or save.name == "rows" else "traceback"
            )
            case += f": {error}"
        except Exception as error:
            return Outcome(number, "traceback", f"{case}: {error!r}")
    try:
        whole = fingerprint(save.read(place)) in known
    except Exception as error:
        return Outcome(number, "lost", f"{case}: {error!r}")
    if shim.struck == "unlink" and status != "traceback":  # what could not be removed may be left
        status = "refused"
    elif left := [path.name for path in place.rglob("*.tmp") if shim.struck not in ("rmdir",)]:
        return Outcome(number, "lost", f"{case} left {left}")
    return Outcome(number, status if whole else "lost", case)
