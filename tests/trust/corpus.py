"""One sound file of every kind that the package reads, how it is read, and what that gives."""

import gzip
import hashlib
import io
import json
import shutil
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from kanerva.cli.train import read_options
from kanerva.config import (
    BitsMemoryConfig,
    CodeConfig,
    DataConfig,
    KppBitsConfig,
    KppConfig,
    KppDecoderConfig,
    KppEncoderConfig,
    KppMemoryConfig,
    KppReadoutConfig,
    RunConfig,
    to_dict,
)
from kanerva.data import celeba, cifar10, mazes
from kanerva.data.array_files import damage_named, read_npy
from kanerva.data.idx import load_idx_set
from kanerva.data.images import load_folder, load_images
from kanerva.data.loading import load as load_data
from kanerva.errors import UserError
from kanerva.evaluation.costs import gather_training_facts
from kanerva.evaluation.records import read_record
from kanerva.evaluation.report import table
from kanerva.lab.benchmark.timing import read_measurement
from kanerva.memory.heap import Memory
from kanerva.models import build, loading
from kanerva.models.kpp_bits import KppBits
from kanerva.models.loading import load
from kanerva.runs import FREE_ON_RESUME, read_run_config
from kanerva.training.checkpoint import restore
from kanerva.training.loop import train
from kanerva.training.optim import make_optimiser

Read = Callable[[Path], Any]  # a folder to what its files hold


@dataclass(frozen=True)
class Kind:
    """A file of one kind, with those it is read beside."""

    name: str
    folder: Path  # which holds it
    file: str
    read: Read
    sealed: bool = False  # a digest or checksum covers what `read` gives

    def copy(self, into: Path) -> Path:
        shutil.rmtree(into, ignore_errors=True)
        shutil.copytree(self.folder, into)
        return into / self.file

    def copy_folder(self, into: Path) -> Path:
        self.copy(into)
        return into


def fingerprint(value: Any) -> str:
    """What was read, so that two readings can be compared."""
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest() + str(value.shape)
    if isinstance(value, dict):
        return str({k: fingerprint(v) for k, v in sorted(value.items(), key=str)})
    if isinstance(value, list | tuple):
        return str([fingerprint(v) for v in value])
    return repr(value)


CONFIG = RunConfig(
    model=KppConfig(
        image=(1, 28, 28),
        encoder=KppEncoderConfig(width=2, depth=1),
        memory=KppMemoryConfig(channels=1, size=8, capacity=4),
        readout=KppReadoutConfig(size=2, channels=1, prior_width=4),
        decoder=KppDecoderConfig(base=4, depth=1),
    ),
    preset="mnist",
    data=DataConfig(set="mnist"),
    episode_length=4,
    batch=2,
    steps=6,
    log_every=1,
    validate_every=2,
    validate_episodes=1,
)


def make_mnist(root: Path) -> Path:
    """A data root with a little of MNIST's format."""
    place, random = root / "mnist", np.random.default_rng(0)
    place.mkdir(parents=True)
    for part, count in (("train", 48), ("t10k", 12)):
        pixels = random.integers(0, 256, (count, 28, 28), dtype=np.uint8).tobytes()
        images = struct.pack(">4I", 0x803, count, 28, 28) + pixels
        labels = struct.pack(">2I", 0x801, count) + bytes(n % 10 for n in range(count))
        (place / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images, mtime=0))
        (place / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels, mtime=0))
    return root


def picture(size: int = 16, colour: bool = True) -> Image.Image:
    random = np.random.default_rng(1)
    shape = (size, size, 3) if colour else (size, size)
    return Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8))


# How each is read


BITS = KppBitsConfig(
    encoder=KppEncoderConfig(width=4, depth=1),
    memory=BitsMemoryConfig(channels=2, size=8, capacity=4),
    readout=KppReadoutConfig(size=2, channels=1, prior_width=4),
    decoder=KppDecoderConfig(base=4, depth=1),
    code=CodeConfig(groups=4, radius=2, width=8, depth=1, maps=4),
)


@cache
def bits_model() -> KppBits:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return KppBits(BITS).eval()


def read_bits(folder: Path) -> Any:
    memory = Memory.load(folder / "m", bits_model())
    return [memory.map, memory.owners, memory.issued, memory.bits]


def read_memory(folder: Path) -> Any:
    memory = Memory.load(folder / "m")
    return [memory.map, memory.owners, memory.issued]


def read_model(folder: Path) -> Any:
    return load(folder).state_dict()


def read_resumable(folder: Path) -> Any:
    model = build(CONFIG.model)
    optimizer = make_optimiser(CONFIG.optim, model)
    progress = restore(folder / "checkpoints" / "last", model, optimizer, None)
    return [vars(progress), dict(model.state_dict())]


def read_config(folder: Path) -> Any:
    content = to_dict(read_run_config(folder))
    return {key: value for key, value in content.items() if key not in FREE_ON_RESUME}


def read_shipped(folder: Path) -> Any:
    shelf, loading.PRETRAINED = loading.PRETRAINED, folder
    try:
        return [load("glyphs").state_dict(), to_dict(read_run_config(folder / "glyphs-1"))]
    finally:
        loading.PRETRAINED = shelf


def read_set(name: str, folder: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = load_data(name, "test", folder, **options)
    return [found.images.clone(), found.labels]


def read_array(folder: Path) -> Any:
    with damage_named(folder / "a.npy", "an array"):
        found = read_npy(folder / "a.npy")
        return [str(found.dtype), found.shape, found.tobytes()]


def read_cached(name: str, source: Path, cache: Path) -> Any:
    """From the cache if it is sound, else again from the source, which stays where it is: a cache
    is of the files of one place."""
    return with_cache(cache, partial(read_set, name, source))


def with_cache(cache: Path, work: Callable[[], Any]) -> Any:
    import os

    before = os.environ.get("KANERVA_CACHE")
    os.environ["KANERVA_CACHE"] = str(cache)
    try:
        return work()
    finally:
        os.environ.pop("KANERVA_CACHE")
        if before is not None:
            os.environ["KANERVA_CACHE"] = before


def uncached(name: str, folder: Path) -> Any:
    cache = folder / "fresh-cache"
    shutil.rmtree(cache, ignore_errors=True)
    return with_cache(cache, partial(read_set, name, folder))


# The files themselves


def make_corpus(root: Path) -> list[Kind]:
    """Everything, below `root`."""
    torch.manual_seed(0)
    data = make_mnist(root / "data")
    run = root / "run" / "run"
    train(CONFIG, run, data_root=data, accelerator="cpu")
    kinds = [*_memories(root), *_runs(root, run), *_sets(root, data), *_pictures(root)]
    return kinds


def _memories(root: Path) -> list[Kind]:
    model, kinds = build(CONFIG.model).eval(), []
    memory = model.write(torch.rand(3, 1, 28, 28).round())
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        place = root / f"memory-{dtype}"
        place.mkdir()
        memory.save(place / "m", dtype)
        kinds.append(Kind(f"memory, {dtype}", place, "m", read_memory, sealed=True))
    place = root / "memory-bits"
    place.mkdir()
    bits_model().write(torch.rand(3, 1, 28, 28).round()).shrink(200).save(place / "m")
    kinds.append(Kind("bits of a memory", place, "m", read_bits, sealed=True))
    return kinds


def _runs(root: Path, run: Path) -> list[Kind]:
    kinds = []
    for file in ("model.safetensors", "config.json"):
        kinds.append(Kind(f"best {file}", run, f"checkpoints/best/{file}", read_model, sealed=True))
    for file in ("model.safetensors", "config.json", "optimizer.safetensors", "state.json"):
        name = f"checkpoints/last/{file}"
        kinds.append(Kind(f"last {file}", run, name, read_resumable, sealed=True))
    kinds.append(Kind("config.yaml", run, "config.yaml", read_config, sealed=True))
    kinds.append(Kind("metrics.csv", run, "metrics.csv", gather_training_facts))
    options = root / "options"
    options.mkdir()
    shutil.copy(run / "config.yaml", options / "o.yaml")
    kinds.append(Kind("options.yaml", options, "o.yaml", lambda f: read_options(f / "o.yaml")))
    shelf = root / "shelf"
    shutil.copytree(loading.PRETRAINED / "glyphs-1", shelf / "glyphs-1")
    for file in ("model.safetensors", "config.json", "config.yaml"):
        kinds.append(Kind(f"shipped {file}", shelf, f"glyphs-1/{file}", read_shipped, sealed=True))
    kinds.append(Kind("shipped evaluation.json", shelf, "glyphs-1/evaluation.json", read_shipped))
    record = root / "record"
    shutil.copytree(shelf / "glyphs-1", record)
    kinds.append(
        Kind(
            "record", record, "evaluation.json", lambda f: table(read_record(f / "evaluation.json"))
        )
    )
    bench = root / "bench"
    bench.mkdir()
    (bench / "b.json").write_text(
        json.dumps({"kind": "throughput", "rows": [{"images_per_s": 5.0}]})
    )
    kinds.append(Kind("measurement", bench, "b.json", lambda f: read_measurement(f / "b.json")))
    return kinds


def _sets(root: Path, data: Path) -> list[Kind]:
    random, kinds = np.random.default_rng(2), []
    mnist = partial(load_idx_set, "mnist", "test")

    def read_idx_set(folder: Path) -> Any:
        found = mnist(folder)
        if found is None:
            raise UserError("not there")
        return [found.images, found.labels]

    for kind in ("images-idx3", "labels-idx1"):
        name = f"t10k-{kind}-ubyte"
        kinds.append(
            Kind(f"idx.gz {kind}", data / "mnist", f"{name}.gz", read_idx_set, sealed=True)
        )
    plain = root / "idx"
    plain.mkdir()
    for file in (data / "mnist").glob("t10k*"):
        (plain / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    kinds.append(Kind("idx", plain, "t10k-images-idx3-ubyte", read_idx_set))
    batch = random.integers(0, 256, 5 * cifar10.RECORD, dtype=np.uint8).tobytes()
    for form in ("archive", "folder"):
        place = root / f"cifar-{form}" / "cifar10"
        place.mkdir(parents=True)
        read = partial(read_set, "cifar10")
        if form == "archive":
            with tarfile.open(place / cifar10.ARCHIVE, "w:gz") as archive:
                about = tarfile.TarInfo(f"{cifar10.FOLDER}/test_batch.bin")
                about.size = len(batch)
                archive.addfile(about, io.BytesIO(batch))
            file = f"cifar10/{cifar10.ARCHIVE}"
        else:
            (place / cifar10.FOLDER).mkdir()
            file = f"cifar10/{cifar10.FOLDER}/test_batch.bin"
            (place.parent / file).write_bytes(batch)
        kinds.append(Kind(f"cifar10 {form}", place.parent, file, read, sealed=form == "archive"))
    kinds += _omniglot(root, random)
    kinds += _imagenet(root, random)
    faces = root / "faces" / "celeba"
    (faces / celeba.IMAGES).mkdir(parents=True)
    for number in range(3):
        picture(80).save(faces / celeba.IMAGES / f"{number:06d}.jpg")
    lines = "".join(f"{number:06d}.jpg {number % 3}\n" for number in range(3))
    (faces / celeba.PARTITION).write_text(lines)
    name = f"celeba/{celeba.PARTITION}"
    kinds.append(Kind("celeba partition", faces.parent, name, partial(uncached, "celeba")))
    arrays = root / "arrays"
    arrays.mkdir()
    np.save(arrays / "a.npy", random.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8))
    kinds.append(Kind("npy", arrays, "a.npy", read_array))
    drawn = root / "drawn" / "mazes"
    drawn.mkdir(parents=True)
    from kanerva.data.maze_rendering import pack

    frames = [random.integers(0, 256, (2, 64, 64, 3), dtype=np.uint8) for _ in range(2)]
    path = drawn / f"rendered-{mazes.RECIPE}.safetensors"
    mazes.write_mazes(path, {"test": [pack(one) for one in frames]}, 0)
    name = f"mazes/{path.name}"
    kinds.append(
        Kind("rendered mazes", drawn.parent, name, partial(read_set, "mazes"), sealed=True)
    )
    return kinds


def _omniglot(root: Path, random: np.random.Generator) -> list[Kind]:
    paper = random.integers(0, 2, (2, 2, 20, 20)).astype(bool)
    kinds = []
    for form in ("npz", "zip", "folder"):
        place = root / f"omniglot-{form}" / "omniglot"
        place.mkdir(parents=True)
        names = [f"{965 + c:04d}_{d + 1:02d}.png" for c in range(2) for d in range(2)]
        raws = []
        for drawing in paper.reshape(-1, 20, 20):
            raw = io.BytesIO()
            Image.fromarray(drawing).save(raw, "png")
            raws.append(raw.getvalue())
        if form == "npz":
            np.savez_compressed(place / "images_evaluation.npz", images=paper)
        elif form == "zip":
            with zipfile.ZipFile(place / "images_evaluation.zip", "w") as archive:
                for name, raw in zip(names, raws, strict=True):
                    archive.writestr(f"images_evaluation/{name}", raw)
        else:
            (place / "images_evaluation").mkdir()
            for name, raw in zip(names, raws, strict=True):
                (place / "images_evaluation" / name).write_bytes(raw)
        file = f"images_evaluation.{form}" if form != "folder" else f"images_evaluation/{names[0]}"
        sealed = form == "npz"  # a zip's names are covered by nothing, and are labels
        kinds.append(
            Kind(
                f"omniglot {form}",
                place.parent,
                f"omniglot/{file}",
                partial(uncached, "omniglot"),
                sealed,
            )
        )
    kept, read = root / "kept", partial(read_cached, "omniglot", root / "omniglot-zip")
    read(kept)
    file = next(kept.rglob("*.npz")).relative_to(kept)
    kinds.append(Kind("cached arrays", kept, str(file), read, sealed=True))
    return kinds


def _imagenet(root: Path, random: np.random.Generator) -> list[Kind]:
    place = root / "imagenet" / "imagenet32"
    place.mkdir(parents=True)
    pixels = random.integers(0, 256, (6, 3 * 32 * 32), dtype=np.uint8)
    np.savez(place / "val_data.npz", data=pixels, labels=np.arange(6) + 1)
    kinds = [
        Kind(
            "imagenet npz",
            place.parent,
            "imagenet32/val_data.npz",
            partial(uncached, "imagenet32"),
            sealed=True,
        )
    ]
    kept, read = root / "packed", partial(read_cached, "imagenet32", place.parent)
    read(kept)
    for file in sorted(kept.rglob("*")):
        if file.suffix in (".npy", ".json"):
            name = str(file.relative_to(kept))
            kinds.append(Kind(f"packed {file.name}", kept, name, read))
    return kinds


def _pictures(root: Path) -> list[Kind]:
    kinds = []
    for suffix in (".png", ".jpg", ".webp", ".bmp", ".gif", ".tif", ".ppm"):
        place = root / f"picture{suffix}"
        place.mkdir()
        picture().save(place / f"a{suffix}")

        def read(folder: Path, name: str = f"a{suffix}") -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return load_images([folder / name], (3, 16, 16), resize=True)

        kinds.append(Kind(f"picture {suffix}", place, f"a{suffix}", read))
    place = root / "folder"
    place.mkdir()
    for number in range(4):
        picture(12 + number).save(place / f"{number}.png")

    def read_folder(folder: Path) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [load_folder(folder, split, (8, 8), 3).images for split in ("train", "test")]

    kinds.append(Kind("folder of pictures", place, "2.png", read_folder))
    return kinds
