"""A small store of a small model: what is added to it, and what of it stands in its files."""

import random
import shutil
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import CONFIG, Kind, bits_model

from kanerva.models import build
from kanerva.models.kpp import Kpp
from kanerva.store import index
from kanerva.store.store import Store


@cache
def model() -> Kpp:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = build(CONFIG.model).eval()
    assert isinstance(made, Kpp)
    return made


def image(number: int) -> torch.Tensor:
    """One of its own for each number; no two are decoded alike."""
    return torch.rand(1, 28, 28, generator=torch.Generator().manual_seed(number)).round()


def open_store(path: Path, coded: bool = False, bits: bool = False) -> Store:
    """`coded`: with an index in a file, as large stores have it; from 17 images on. `bits`: whose
    blocks are bits."""
    index.EXACT = 16 if coded else 50_000
    return Store(path, model=bits_model() if bits else model())


def payload(number: int) -> str:
    """A string of its own, of a few bytes or of several pages."""
    dice = random.Random(number)
    return f"{dice.randbytes(dice.choice((8, 60, 500, 5000))).hex()} {number}"


def add(store: Store, numbers: list[int]) -> list[int]:
    return store.add(torch.stack([image(n) for n in numbers]), [payload(n) for n in numbers])


def content(store: Store) -> dict[int, tuple[str, bytes]]:
    """All that is held: payloads and pictures."""
    ids = list(store)
    pictures = dict(zip(ids, store.get(ids) if ids else [], strict=True))
    texts = store.payloads(ids)
    return {id: (text, pictures[id].numpy().tobytes()) for id, text in zip(ids, texts, strict=True)}


def traces(store: Store, ids: list[int]) -> dict[int, list[bytes]]:
    """What each of some ids has in the files: block, payload, and its picture in the cache."""
    rows = store._db.rows(ids)
    pictures = store._pictures(np.array(ids, dtype=np.int64)).levels.numpy()
    return {
        id: [block, text, picture.tobytes()]
        for id, (_, block, text), picture in zip(ids, rows, pictures, strict=True)
    }


def raw(path: Path) -> bytes:
    """Every file beside a store, whatever it is called."""
    files = sorted(path.parent.rglob("*"))
    return b"\n".join(file.read_bytes() for file in files if file.is_file())


# Kinds of file


def read_store(folder: Path, coded: bool = False, bits: bool = False) -> Any:
    """All that is held, after a look at everything."""
    with open_store(folder / "a.kanerva", coded, bits) as store:
        store.verify()
        return [content(store), store.find(image(3), k=3).ids]


def use_store(folder: Path) -> Any:
    """As those do who never look: they add, find and free."""
    with open_store(folder / "a.kanerva") as store:
        store.find(image(3))
        held = list(store)
        store.free(held[:2])
        return [content(store), add(store, [90, 91])]


def read_log(folder: Path) -> Any:
    """A log that is cut short, or damaged, ends at some commit: what is there is whole."""
    found = read_store(folder)
    assert len(found[0]) in (0, 4, 8), found
    return found


def store_kinds(root: Path) -> list[Kind]:
    """A store, its log as a kill leaves it, and its caches."""
    kinds, plain, large, exact = [], root / "store", root / "store-coded", root / "store-bits"
    for place, coded in ((plain, False), (large, True), (exact, False)):
        place.mkdir(parents=True)
        with open_store(place / "a.kanerva", coded, bits=place is exact) as store:
            add(store, list(range(20 if coded else 8)))
            store.find(image(3))
            store.free(3)
    logged, open_folder = root / "store-log", root / "store-open"
    open_folder.mkdir()
    with open_store(open_folder / "a.kanerva") as store:
        add(store, [0, 1, 2, 3])
        add(store, [4, 5, 6, 7])
        shutil.copytree(open_folder, logged)
    read_coded, read_bits = partial(read_store, coded=True), partial(read_store, bits=True)
    for name, folder, file, read, sealed in (
        ("store", plain, "a.kanerva", read_store, True),
        ("store in use", plain, "a.kanerva", use_store, False),
        ("store's log", logged, "a.kanerva-wal", read_log, False),
        ("store's table of its log", logged, "a.kanerva-shm", read_store, True),
        ("store's pictures", plain, "a.kanerva-levels", read_store, True),
        ("store's index", large, "a.kanerva-index", read_coded, True),
        ("store of bits", exact, "a.kanerva", read_bits, True),
    ):
        kinds.append(Kind(name, folder, file, read, sealed))
    return kinds
