"""Evaluation records: their required fields, and their files.

A record is a plain mapping, as in its JSON file. `check_record` makes sure that it has all fields
of `Record`; any others are kept as they are.
"""

import json
import types
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from kanerva.errors import UserError
from kanerva.plain_files import read_json, reason, require_name, shown, write_whole

SCHEMA = 2
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Terms:
    """A score: nats per image, the three terms that add up to it, and its confidence interval."""

    nll_nats: float
    recon: float
    kl_z: float
    kl_y: float
    ci95: float
    bits_per_dim: float
    kl_m: float | None = None  # KL(M) / T, which only `full_bound` includes


@dataclass(frozen=True, kw_only=True)
class Total:
    """A score with only its total."""

    nll_nats: float
    bits_per_dim: float
    ci95: float | None = None


@dataclass(frozen=True, kw_only=True)
class Iwae:
    """The importance-weighted bound with k samples, which is tighter."""

    k: int
    nll_nats: float
    ci95: float


@dataclass(frozen=True, kw_only=True)
class MemorySize:
    """The size of all that p reads of an episode. No bound charges for it, so each states it."""

    shape: list[int]
    dtype: str
    floats_per_image: float
    bits_per_image: float
    cap: int | None = None  # bits that blocks were shrunk to, for kpp-bits
    bits_per_dim: float
    sum_bits_per_dim: float  # memory and bound together: a code length, as a VAE's bound is


@dataclass(frozen=True, kw_only=True)
class Controls:
    """Bounds with another memory, and `own`, the bound on the same images. None if there is no such
    memory."""

    n_images: int
    own: Terms
    left_out: Terms | None = None
    other: Terms | None = None
    zeroed: Terms | None = None
    permuted: Terms | None = None


@dataclass(frozen=True, kw_only=True)
class Familiarity:
    """How well written images are distinguished from others."""

    auroc: float
    n_written: int
    n_unwritten: int


@dataclass(frozen=True, kw_only=True)
class Places:
    """Whether images of one class lie close together: of kpp's variant generate, now retired."""

    ratio: float


@dataclass(frozen=True, kw_only=True)
class Record:
    """An evaluation. Fields with a default may be missing from a file."""

    schema: int
    kind: str
    # What was scored
    model: str
    preset: str
    variant: str | None
    seed: int
    config: dict[str, Any] | None  # the run's; None if its options no longer exist: see `retired`
    config_hash: str
    params: int
    flop_per_image: float
    z_shape: list[Any]  # a list of shapes if z has several parts
    K: int
    # On which images
    split: str
    n_images: int
    n_episodes: int
    partial: bool
    T: int
    binarization: str
    image: list[int]
    split_hash: str
    memory: MemorySize
    # Scores
    bound: Terms
    paper_style: Terms
    controls: Controls
    full_bound: Total | None = None
    iwae: Iwae | None = None
    kl_over_T: Total | None = None
    other_binarizations: dict[str, Terms] | None = None
    familiarity: Familiarity | None = None
    places: Places | None = None
    generation: dict[str, float] | None = None
    # How it was trained; None for weights without their run
    images_seen: int | None
    images_per_s: float | None
    wall_s: float | None
    steps: int | None = None
    best_step: int | None = None
    skipped_steps: int | None = None
    # How it was made
    commit: str
    versions: dict[str, str]
    device: str
    command: str
    data: str | None = None
    checkpoint: str | None = None
    resized: bool | None = None  # scored with a memory of another size than in training
    elsewhere: bool | None = None  # the name of `resized` in kanerva 0.1
    retired: str | None = None  # the last commit that could train this


def check_record(record: Any, where: str) -> Record:
    """Check a record and return it with its types; an error says in one line what is wrong."""
    if not isinstance(record, dict) or record.get("kind") != "evaluation":
        raise UserError(f"{where} is not the record of an evaluation")
    if record.get("schema") != SCHEMA:
        raise UserError(
            f"{where} has schema {record.get('schema')}, not {SCHEMA}: another version of kanerva "
            "wrote it; repeat `kanerva evaluate` on its run"
        )
    typed = _build(Record, record, where)
    if (typed.config is None) != (typed.retired is not None):
        raise UserError(f"{where}: a record needs either `config` or `retired`")
    nearest = {name for name in typed.generation or {} if name.endswith("_nearest")}
    grey = {name.replace("_nearest", "_grey") for name in nearest} - (typed.generation or {}).keys()
    if typed.T < 1 or grey or (typed.full_bound is not None and typed.bound.kl_m is None):
        raise UserError(f"{where} is not a complete record: check T, generation and bound.kl_m")
    return typed


def _build(cls: type[R], data: Any, where: str) -> R:
    """Build a dataclass from a mapping that has at least its fields."""
    if not isinstance(data, dict):
        raise UserError(f"{where} must be a mapping, got {shown(data)}")
    expected, hints = fields(cls), get_type_hints(cls)  # pyright: ignore[reportArgumentType]
    if missing := [f.name for f in expected if f.default is MISSING and f.name not in data]:
        raise UserError(f"{where} is not a complete record: {', '.join(missing)} missing")
    names = [f.name for f in expected if f.name in data]
    return cls(**{name: _check(hints[name], data[name], f"{where}: {name}") for name in names})


def _check(hint: Any, value: Any, where: str) -> Any:
    """Return `value` if it has the annotated type; an int passes as a float."""
    origin, args = get_origin(hint), get_args(hint)
    plain: Any = origin or hint
    if origin in (Union, types.UnionType):
        kind = next(a for a in args if a is not type(None))
        return None if value is None else _check(kind, value, where)
    if is_dataclass(hint):
        return _build(hint, value, where)  # pyright: ignore[reportArgumentType]
    if hint is Any:
        return value
    if not _is_of(plain, value) or (plain is str and not value.isprintable()):
        raise UserError(f"{where} must be {plain.__name__}, got {shown(value)}")
    if plain is list:
        return [_check(args[0], one, where) for one in value]
    if plain is dict:
        return {name: _check(args[1], one, f"{where}.{name}") for name, one in value.items()}
    return float(value) if plain is float else value


def _is_of(kind: Any, value: Any) -> bool:
    if isinstance(value, bool):  # an int in Python, but not a number here
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def is_resized(record: dict[str, Any]) -> bool:
    """Whether the weights were scored with a memory of another size than in training."""
    return bool(record.get("resized", record.get("elsewhere", False)))


def about_training(record: dict[str, Any]) -> dict[str, Any]:
    """What a record says about the training of its model."""
    keys = ("checkpoint", "images_seen", "images_per_s", "wall_s")
    keys += ("steps", "best_step", "skipped_steps")
    return {key: record[key] for key in keys if key in record}


def is_early(record: dict[str, Any]) -> bool:
    """Whether the scored step lies well before the run's end, before the learning rate decayed."""
    return 0 < (record.get("best_step") or 0) < 0.8 * (record.get("steps") or 0)


# Files


def record_name(record: dict[str, Any]) -> str:
    """A record's path under `results/`."""
    variant = f"-{record['variant']}" if record["variant"] else ""
    name = f"{record['model']}{variant}-s{record['seed']}{_split_suffix(record)}.json"
    for part in (record["preset"], name):  # a record may come from someone else
        require_name(part, "a record's name")
    return f"{record['preset']}/{name}"


_MEMORY = ("shape", "dtype", "cap")  # if these differ, it is another memory


def run_record_name(record: dict[str, Any]) -> str:
    """A record's file name in its run folder. A partial score, fewer bits or another memory never
    replace the full record."""
    memory = record["memory"]
    other = "" if memory["dtype"] in ("float32", "bits") else f"-{memory['dtype']}"
    if memory.get("cap") is not None:
        other = f"-bits{memory['cap']}"
    if is_resized(record):
        other += f"-T{record['T']}-side{memory['shape'][-1]}"
    part = "-partial" if record["partial"] else ""
    return f"evaluation{_split_suffix(record)}{other}{part}.json"


def _split_suffix(record: dict[str, Any]) -> str:
    return "" if record["split"] == "test" else f"-{record['split']}"


def place_record(record: dict[str, Any], results: Path) -> Path:
    """A record's path under `results/`. It may not replace one of another configuration or a fuller
    one. Needs no score of the record, so it can be asked before scoring."""
    path = results / record_name(record)
    if path.exists():
        there = read_record(path)
        if there["config_hash"] != record["config_hash"]:
            raise UserError(f"{path} is of another configuration: give this one a --variant name")
        same = (there["memory"].get(key) == record["memory"].get(key) for key in _MEMORY)
        if not all(same):
            raise UserError(f"{path} is of another memory: give this one a --variant name")
        if record["partial"] and not there["partial"]:
            raise UserError(f"{path} covers the whole split; a partial record does not replace it")
        if record["partial"] and there["n_episodes"] > record["n_episodes"]:
            raise UserError(
                f"{path} covers {there['n_episodes']} episodes; a record of "
                f"{record['n_episodes']} does not replace it"
            )
    return path


def file_record(record: dict[str, Any], results: Path) -> Path:
    """Save a record under `results/`, where `place_record` says."""
    path = place_record(record, results)
    write_record(record, path)
    return path


def make_folder(folder: Path) -> None:
    """Make a folder for records, with an error of one line. Commands do so before they compute."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to folder {folder}: {reason(error)}") from error


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a record as JSON, atomically."""
    make_folder(path.parent)
    write_whole(path, json.dumps(record, indent=2) + "\n")


def read_record(path: Path) -> dict[str, Any]:
    """Read a record file, or the record in a run folder, that of the whole test set if present."""
    files = [path]
    if path.is_dir():
        files = [path / f"evaluation{part}.json" for part in ("", "-partial")]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        what = f"run `kanerva evaluate {path}` first" if path.is_dir() else "no such file"
        raise UserError(f"no evaluation record at {files[0]}: {what}")
    record = read_json(file)
    check_record(record, str(file))
    return record


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the record of a run folder or a file; or all records in another folder."""
    if path.is_dir() and not any(path.glob("evaluation*.json")) and any(path.glob("*.json")):
        return [read_record(file) for file in sorted(path.glob("*.json"))]
    return [read_record(path)]
