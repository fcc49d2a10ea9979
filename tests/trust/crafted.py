"""Files made on purpose: odd ones, which are to be one line of error, and hostile ones, which are
to run nothing and write nowhere else."""

import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from children import Outcome, run_cases
from corpus import CONFIG, Kind
from PIL import EpsImagePlugin, Image
from test_findings_data import EPS, bomb
from test_findings_memory import FORGED, forged, parts
from test_findings_store import ALTERED, alter, hot_journal
from test_findings_words import LAUGHS, ODD_JSON, ODD_YAML, SIZES, nested

from kanerva.data import cifar10
from kanerva.files import write_tensors
from kanerva.training.loop import train

MEGABYTE = 2**20
TRAPS = [
    "!!python/object/apply:os.system ['touch {mark}']",
    "!!python/object/new:os.system ['touch {mark}']",
    "!!python/name:os.system ''",
    "!!python/module:os ''",
    "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{mark}']]",
    "!!python/object:os._wrap_close {{}}",
]
NAMES = ["/x", "../../x", "..", "a/../../../x", "\\\\x", "~/x", "x\0y", "\x1b]0;x\x07", "."]


@dataclass(frozen=True)
class Case:
    """A file to be put in the place of a sound one, or a change to the folder it lies in."""

    name: str
    kind: Kind
    make: Callable[[Path, Path], object]  # the file, and a mark that no code may make


class Trap:
    """Makes the mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.mark}",)


def put(content: bytes | str) -> Callable[[Path, Path], object]:
    raw = content.encode(errors="surrogateescape") if isinstance(content, str) else content
    return lambda file, mark: file.write_bytes(raw)


# Odd files


def odd_cases(kinds: list[Kind], store: Path | None) -> list[Case]:
    """Those that unpack to gigabytes are made in `store`, where one is given."""
    cases: list[Case] = []
    for kind in kinds:
        if kind.file.endswith(".json"):
            cases += [Case(f"JSON, {name}", kind, put(text)) for name, text in ODD_JSON.items()]
        if kind.file.endswith(".yaml"):
            cases += [Case(f"YAML, {name}", kind, put(text)) for name, text in ODD_YAML.items()]
            cases.append(Case("YAML, aliases", kind, put(f"model: kpp\npreset:\n{LAUGHS}")))
        if kind.file == "a.kanerva":
            cases += [Case(f"SQL: {change[:40]}", kind, _altered(change)) for change in ALTERED]
        if kind.name.startswith("memory"):
            cases += [Case(f"forged: {change[:24]}", kind, _forge(change)) for change in FORGED]
    by_name = {kind.name: kind for kind in kinds}
    best = by_name["best config.json"]
    cases += [Case(f"sizes {sizes}", best, put(json.dumps(nested(**sizes)))) for sizes in SIZES]
    for shape in ("(-1,)", "(99999999999, 64, 64, 3)", "(True,)", "(1, 64, 64, '3')", "()", "[1]"):
        head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".encode()
        content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head) + 1) + head + b"\n"
        cases.append(Case(f"npy {shape}", by_name["npy"], put(content)))
    return cases if store is None else cases + _bombs(by_name, store)


def _forge(change: str) -> Callable[[Path, Path], object]:
    def make(file: Path, mark: Path) -> None:
        tensors, about = parts(file)
        del about["sha256"]
        if change == "nan" and not tensors["map"].is_floating_point():
            tensors["map"] = tensors["map"].float()
        forged(change, tensors, about)
        write_tensors(file, tensors, about)

    return make


def _altered(change: str) -> Callable[[Path, Path], object]:
    return lambda file, mark: alter(file, change)


def _bombs(kinds: dict[str, Kind], store: Path) -> list[Case]:
    """Made once, in `store`; a case copies them."""
    store.mkdir(parents=True, exist_ok=True)
    zeros = bomb(1200 * MEGABYTE)
    head = struct.pack(">4B3I", 0, 0, 8, 3, 1200 * MEGABYTE // 784, 28, 28)
    bombs = {"idx.gz images-idx3": _gzip(head) + zeros, "idx.gz labels-idx1": zeros}
    with tarfile.open(store / "tar", "w:gz", compresslevel=1) as archive:
        for name in ("padding", "test_batch.bin"):
            about = tarfile.TarInfo(name)
            about.size = 600 * MEGABYTE
            with open("/dev/zero", "rb") as file:
                archive.addfile(about, file)
    bombs["cifar10 archive"] = (store / "tar").read_bytes()
    with zipfile.ZipFile(store / "npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("images.npy", "w", force_zip64=True) as member:
            about = {"descr": "|b1", "fortran_order": False, "shape": (1200, 1, 1024, 1024)}
            np.lib.format.write_array_header_1_0(member, about)
            for _ in range(1200):
                member.write(bytes(MEGABYTE))
    bombs["omniglot npz"] = (store / "npz").read_bytes()
    for mode in ("1", "L", "I;16", "RGBA"):
        raw = io.BytesIO()
        Image.new(mode, (7000, 7000)).save(raw, "png", compress_level=1)
        bombs[f"picture .png {mode}"] = raw.getvalue()
    drawing = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(drawing, "png")
    with zipfile.ZipFile(store / "zip", "w") as archive:
        for number in range(20):
            archive.writestr(f"0965_{number:02d}.png", drawing.getvalue())
    bombs["omniglot zip"] = (store / "zip").read_bytes()
    bombs["picture .gif"] = drawing.getvalue()
    bombs["best config.json"] = b"[" + b"1," * 9_000_000 + b"1]"
    cases = []
    for name, content in bombs.items():
        (store / name).write_bytes(content)
        kind = kinds[" ".join(name.split()[:2])] if name.startswith("picture") else kinds[name]
        copy = store / name
        cases.append(Case(f"bomb {name}", kind, lambda f, m, copy=copy: shutil.copy(copy, f)))
    return cases


def _gzip(content: bytes) -> bytes:
    import gzip

    return gzip.compress(content)


# Hostile files


def hostile_cases(kinds: list[Kind], data: Path) -> list[Case]:
    cases: list[Case] = []
    for kind in kinds:
        cases.append(Case("a pipe", kind, _replaced(os.mkfifo)))
        cases.append(
            Case("an endless device", kind, _replaced(lambda f: f.symlink_to("/dev/zero")))
        )
        cases.append(Case("a pickle", kind, lambda f, m: f.write_bytes(pickle.dumps(Trap(m)))))
        if kind.file.endswith(".yaml"):
            cases += [Case(f"YAML {trap[:30]}", kind, _trap(trap)) for trap in TRAPS]
        if kind.file.endswith((".png", ".jpg", ".webp", ".bmp", ".gif", ".tif", ".ppm")):
            cases.append(Case("an EPS", kind, put(EPS)))
            cases.append(
                Case("an EPS with a preview", kind, put(b"\xc5\xd0\xd3\xc6" + bytes(28) + EPS))
            )
    by_name = {kind.name: kind for kind in kinds}
    for name, key in (
        ("omniglot npz", "images"),
        ("imagenet npz", "data"),
        ("cached arrays", "images"),
    ):
        cases.append(Case("pickled objects", by_name[name], _objects(key)))
    cases.append(Case("pickled objects", by_name["npy"], _objects(None)))
    cases.append(Case("a pickle of torch", by_name["best model.safetensors"], _torch))
    cases.append(Case("an EPS in a zip", by_name["omniglot zip"], _zipped("0965_01.png", EPS)))
    cases.append(
        Case("a zip that leads out", by_name["omniglot zip"], _zipped("../../0965_01.png", b""))
    )
    for form in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
        cases.append(Case(f"tar {form!r}", by_name["cifar10 archive"], _tarred(form)))
    config = by_name["config.yaml"]
    for name in NAMES:
        for option in ("preset", "variant"):
            cases.append(Case(f"{option} {name!r}", config, _named(option, name)))
    run = Kind("run", config.folder, "config.yaml", lambda f: train(
        replace(CONFIG, steps=8), f, resume=True, data_root=data, accelerator="cpu"))  # fmt: skip
    links = [
        "checkpoints",
        "metrics.csv",
        "log.txt",
        "config.yaml",
        "samples",
        "checkpoints/last",
        "checkpoints/best",
    ]
    links += [".config.yaml.tmp", "checkpoints/.last.tmp", "checkpoints/.last.old"]
    cases += [Case(f"a link at {name}", run, _linked(name)) for name in links]
    store = by_name["store in use"]
    for name in ("-wal", "-shm", "-levels", "-index", "-journal"):
        cases.append(Case(f"a link at {name}", store, _linked(f"a.kanerva{name}")))
    return [*cases, Case("a journal that names a file to delete", store, _journal)]


def _replaced(make: Callable[[Path], object]) -> Callable[[Path, Path], object]:
    def replace(file: Path, mark: Path) -> None:
        file.unlink()
        make(file)

    return replace


def _trap(trap: str) -> Callable[[Path, Path], object]:
    return lambda file, mark: file.write_text(f"preset: {trap.format(mark=mark)}\n")


def _objects(key: str | None) -> Callable[[Path, Path], object]:
    def make(file: Path, mark: Path) -> None:
        trap = np.array([Trap(mark)] * 3, dtype=object)
        with file.open("wb") as target:
            if key is None:
                np.save(target, trap, allow_pickle=True)
            else:
                np.savez(target, allow_pickle=True, **{key: trap, "labels": trap})

    return make


def _torch(file: Path, mark: Path) -> None:
    torch.save({"a": Trap(mark)}, file)


def _zipped(name: str, content: bytes) -> Callable[[Path, Path], object]:
    def make(file: Path, mark: Path) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(name, content)

    return make


def _tarred(form: bytes) -> Callable[[Path, Path], object]:
    def make(file: Path, mark: Path) -> None:
        with tarfile.open(file, "w:gz") as archive:
            about = tarfile.TarInfo(f"../../{cifar10.FOLDER}/test_batch.bin")
            about.type, about.linkname = form, "/etc/passwd"
            archive.addfile(about)

    return make


def _named(option: str, name: str) -> Callable[[Path, Path], object]:
    def make(file: Path, mark: Path) -> None:
        shutil.rmtree(file.parent / "checkpoints" / "last")  # the seal would tell
        lines = [line for line in file.read_text().splitlines() if not line.startswith(option)]
        file.write_text("\n".join([*lines, f"{option}: {json.dumps(name)}"]) + "\n")

    return make


def _linked(name: str) -> Callable[[Path, Path], object]:
    """The thing itself is moved out of the run, and a link put in its place."""

    def make(file: Path, mark: Path) -> None:
        place, outside = file.parent / name, mark.parent / "outside"
        moved = outside / name.replace("/", "-")
        if place.exists():
            shutil.move(place, moved)
        else:
            moved.write_text("kept")
        place.symlink_to(moved)

    return make


def _journal(file: Path, mark: Path) -> None:
    victim = mark.parent / "outside" / "precious"
    victim.write_text("kept")
    hot_journal(file, victim)


def run_crafted(cases: list[Case], place: Path) -> list[Outcome]:
    def work(number: int) -> str:
        case, root = cases[number], place / str(number % 2)
        shutil.rmtree(root, ignore_errors=True)
        outside, mark = root / "outside", root / "mark"
        outside.mkdir(parents=True)
        file = case.kind.copy(root / "inside" / "folder")
        case.make(file, mark)
        EpsImagePlugin.Ghostscript = lambda *_, **__: mark.touch()
        before = _snapshot(root)
        try:
            case.kind.read(root / "inside" / "folder")
            status = "read"
        finally:
            if mark.exists():
                status = "code run"
            elif _snapshot(root) != before:
                status = "written outside"
            else:
                status = ""
            if status:
                return status  # noqa: B012  worse than any error
        return "read"

    try:
        found = run_cases(work, len(cases))
        return [
            replace(o, detail=f"{cases[o.case].name}, {cases[o.case].kind.name}: {o.detail}")
            for o in found
        ]
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _snapshot(root: Path) -> dict[str, bytes | str]:
    """All but the folder that the case is about."""
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if name.startswith("inside/folder"):
            continue
        found[name] = path.read_bytes() if path.is_file() else "folder"
    return found
