"""A small store of a small model: what is added to it, and what of it stands in its files."""

import random
from functools import cache
from pathlib import Path

import numpy as np
import torch
from corpus import CONFIG

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


def open_store(path: Path, coded: bool = False) -> Store:
    """`coded`: with an index in a file, as large stores have it; from 17 images on."""
    index.EXACT = 16 if coded else 50_000
    return Store(path, model=model())


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
