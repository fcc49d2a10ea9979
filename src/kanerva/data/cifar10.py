"""CIFAR-10 in its published binary layout: records of a label byte and 3 x 32 x 32 pixel bytes."""

import gzip
import tarfile
from pathlib import Path

import numpy as np
import torch

from kanerva.data.array_files import damage_named
from kanerva.data.download import published
from kanerva.data.image_set import ImageSet
from kanerva.errors import UserError
from kanerva.plain_files import open_regular, read_limited

HELD_OUT = 5_000  # the last training images are the validation set
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
MOST = 2 * 60_000 * RECORD  # bytes: twice what is published
FOLDER, ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
BATCHES = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("test_batch.bin",),
}
FILES = published(
    "https://www.cs.toronto.edu/~kriz/",
    {ARCHIVE: ("c32a1d4ab5d03f1284b67883e8d87530", 170_052_171)},
)


def find_batches(place: Path) -> Path | None:
    """The folder of batches, else their archive, in `place` or in the data root itself."""
    places = [place, place.parent]
    folders = [one / FOLDER for one in places if (one / FOLDER).is_dir()]
    archives = [one / ARCHIVE for one in places if (one / ARCHIVE).is_file()]
    return next(iter(folders + archives), None)


def load(split: str, place: Path) -> ImageSet | None:
    """Load one split; None if the set is missing. The test set is all of its file."""
    source = find_batches(place)
    if source is None:
        return None
    names = BATCHES["test" if split == "test" else "train"]
    raw = _read_archive(source, names) if source.is_file() else _read_folder(source, names)
    if missing := [name for name in names if name not in raw]:
        raise UserError(
            f"{source}: {', '.join(missing)} missing: remove it and fetch cifar10 again"
        )
    for name in names:
        if not raw[name] or len(raw[name]) % RECORD:
            raise UserError(
                f"{source}: {name} is truncated: {len(raw[name])} bytes, not a multiple of {RECORD}"
            )
    records = np.frombuffer(b"".join(raw[name] for name in names), np.uint8).reshape(-1, RECORD)
    if split != "test":
        cut = len(records) - min(HELD_OUT, len(records) // 10)
        records = records[:cut] if split == "train" else records[cut:]
    images = torch.from_numpy(records[:, 1:].reshape(-1, *SHAPE).copy())
    return ImageSet("cifar10", split, images, torch.from_numpy(records[:, 0].astype(np.int64)))


def is_present(place: Path) -> bool:
    return find_batches(place) is not None


def _read_folder(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    present = [name for name in names if (folder / name).is_file()]
    return {name: read_limited(folder / name, MOST) for name in present}


class Limited(gzip.GzipFile):
    """A gzipped file that refuses to unpack to more than MOST bytes."""

    left = MOST

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(size)
        self.left -= len(content)
        if self.left < 0:
            raise ValueError(f"it unpacks to more than {MOST} bytes")
        return content


def _read_archive(path: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """Read the named batches in one pass over the archive; nothing is unpacked to disk."""
    batches: dict[str, bytes] = {}
    remedy = ": remove it and fetch cifar10 again"
    with damage_named(path, "a complete archive", remedy), open_regular(path) as zipped:
        stream = Limited(fileobj=zipped)
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                name = Path(member.name).name
                file = archive.extractfile(member) if name in names else None
                if file is not None:
                    batches[name] = file.read()
        while stream.read(2**20):
            pass  # read to the end, where gzip checks its checksum: tar stops before
    return batches
