"""Store: images in one file. They are found from a damaged part, with probabilities, and freed.

    store = kanerva.Store("digits.kanerva", model="mnist")
    ids = store.add(images, payloads)            # durable when it returns
    hits = store.find(cue, observed=mask)        # hits[0].id, .probability, .image;  hits.none
    receipt = store.free(ids[:2])                # erased from the file, not only from the index

One process can write at a time, and any number can read; each sees all finished writes of the
others. Caches beside the file are made from it: pictures and, for large stores, an index.

If the model's blocks are bits, images are stored exactly; `model=model.within(56)` stores at most
56 bits of each. Unlike in a memory, gists are not refined: blocks take a few bits more, and adding
is many times faster.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import index
from pathlib import Path
from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from kanerva.errors import UserError
from kanerva.inputs import as_chance, as_count, as_mask, as_path, require_tensor_images
from kanerva.memory.channels import Noise, Picture
from kanerva.memory.evidence import Pictures, to_logits
from kanerva.memory.search import Held, Hits, Named, search
from kanerva.models.base import Images, MemoryModel
from kanerva.models.content import show_stored
from kanerva.models.finding import Cues, Visible, as_cues, log_none
from kanerva.models.kpp import Kpp
from kanerva.models.loading import load, shipped_folder, shipped_versions
from kanerva.plain_files import open_regular, shown
from kanerva.store.codec import codec_of
from kanerva.store.database import Database, about_model, live_ids
from kanerva.store.index import Index
from kanerva.store.levels import LevelsFile
from kanerva.store.raw import search as search_bytes

_BATCH = 64  # images encoded, decoded and committed at once
_SHORT = 8  # bytes: shorter blocks and payloads may occur elsewhere by chance


def as_ids(value: object) -> list[int]:
    """Convert an id, or any sequence of ids, to a list of integers."""
    try:
        one = isinstance(value, int) or getattr(value, "ndim", 1) == 0
        return [index(id) for id in ([value] if one else value)]  # pyright: ignore
    except TypeError:
        raise UserError(f"ids are integers, such as add returns, got {shown(value)}") from None


@dataclass(frozen=True)
class Receipt:
    """The result of `free`. `found` counts freed items whose bytes are still in a file: 0, unless
    `pending`. That means that a reader in another process still needs the log: call `verify` later.
    """

    ids: list[int]
    bytes: int  # of the blocks and payloads that were overwritten
    found: int
    pending: bool


class Store:
    """Images on disk, by id. Ids count from 1 and are never reused."""

    def __init__(self, path: str | Path, model: str | Path | MemoryModel | None = None) -> None:
        """Open the store at `path`, or make a new one, written by `model`: a name, or a model of
        type `kpp` or `kpp-bits`. An existing store opens only with the weights it was written with;
        without `model`, the model named in the file is loaded."""
        named = as_path(path)
        self.path = Path(os.path.realpath(named)) if os.path.islink(named) else named
        source = self._written_with() if model is None else model
        if isinstance(source, MemoryModel):
            name, model = source.config.name, source
        else:
            folder = shipped_folder(source)
            name = str(source) if folder is None else folder.name
            try:
                model = load(source)
            except UserError as error:
                if model is not None:
                    raise
                model = self._shipped()
                if model is None:
                    raise UserError(
                        f"{path} was written with {shown(name)}, which is not found: say which "
                        f"model that is, Store(path, model=...) or --model; {error}"
                    ) from error
        if not model.has_blocks:
            raise UserError(f"{model.config.name} writes memories as a whole: a store needs blocks")
        if model.device.type != "cpu":
            raise UserError(f"a store's model runs on the CPU, this one is on {model.device}")
        if model.training:
            raise UserError("a store's model is not in training: call model.eval() first")
        self.model = cast(Kpp, model)
        self._codec = codec_of(self.model)
        seal, image = self.model.fingerprint(), self.model.config.image
        self._db = Database(self.path, about_model(name, seal, image))
        if self._db.about["fingerprint"] != seal:
            raise UserError(
                f"{path} was written with other weights, those of {self._db.about['model']}: "
                f"open it with them, not with {name}"
            )
        if self._db.about["image"] != json.dumps(list(image)):
            raise UserError(f"{path} is damaged: its images are not {image}")
        seal = hashlib.sha256(f"{seal} {self._db.about['store']}".encode()).hexdigest()
        self._levels = LevelsFile(self._beside("levels"), int(np.prod(image)), seal)
        self._index = Index(self._beside("index"), image, seal, self._pictures, self._alone)
        self._ids, self._freed, self._version = np.zeros(0, dtype=np.int64), set[int](), None
        self._last = 0  # the last id ever issued
        self._sync()

    def _written_with(self, what: str = "model") -> str:
        """The name of the model that writes this store, or its fingerprint."""
        database = Database(self.path)
        database.close()
        return database.about[what]

    def _shipped(self) -> MemoryModel | None:
        """The shipped model with the weights of this store, which a store made with a model object
        cannot name."""
        wanted = self._written_with("fingerprint")
        models = (load(name) for name in shipped_versions())
        return next((model for model in models if model.fingerprint() == wanted), None)

    def _beside(self, kind: str) -> Path:
        return self.path.with_name(f"{self.path.name}-{kind}")

    def _sync(self) -> None:
        """Update the ids if this or another process has written."""
        if (version := self._db.version()) != self._version:
            self._last, freed = self._db.state()
            self._freed, self._ids = set(freed), live_ids(self._last, freed)
            self._version = version

    @torch.no_grad()
    def _mend(self, ids: list[int]) -> np.ndarray:
        """Decode pictures that are missing in the cache, and write them to it; zeros for freed
        ids."""
        held = [n for n, id in enumerate(ids) if id not in self._freed]
        made = np.zeros((len(ids), *self.model.config.image), dtype=np.uint8)
        for start in range(0, len(held), _BATCH):
            places = held[start : start + _BATCH]
            part = [ids[n] for n in places]
            levels = self._codec.read([row[:2] for row in self._db.rows(part)]).levels.numpy()
            made[places] = levels
            with suppress(UserError), self._db.writing():  # disk full or busy: cached another time
                freed = self._db.freed_of(part)  # in the meantime, and erased from the cache
                kept = [n for n, id in enumerate(part) if id not in freed]
                self._levels.write([part[n] for n in kept], levels[kept])
        return made

    @contextmanager
    def _alone(self) -> Iterator[np.ndarray]:
        """Lock out other writers; gives the stored ids."""
        with self._db.writing():
            yield live_ids(*self._db.state())

    def _pictures(self, ids: np.ndarray) -> Pictures:
        with self._db.plain_errors():
            rows = self._levels.read(ids, self._mend)
        levels = torch.from_numpy(rows.reshape(len(ids), *self.model.config.image).copy())
        return Pictures(levels, self.model.config.likelihood == "bernoulli")

    # Add

    @torch.no_grad()
    def add(
        self, images: Images, payloads: Sequence[str] | None = None, *, progress: bool = False
    ) -> list[int]:
        """Add images (T, C, H, W), each with its own string (payload); return their ids. Images are
        on disk when this returns. An interrupted call leaves complete batches."""
        if require_tensor_images(images).ndim != 4:
            raise UserError(f"add takes images (T, C, H, W), got {tuple(images.shape)}")
        pixels = self.model.as_pixels(images)[0]
        if isinstance(payloads, str):
            raise UserError("payloads are a list, a string for each image")
        texts = [""] * len(pixels) if payloads is None else list(payloads)
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise UserError(f"payloads are strings, got {shown(wrong[0])}")
        if len(texts) != len(pixels):
            raise UserError(f"{len(pixels)} images came with {len(texts)} payloads")
        ids: list[int] = []
        starts = range(0, len(pixels), _BATCH)
        # No disabled bar: even that takes tqdm's lock, which forked processes share. If one of them
        # were killed while it holds the lock, all others would hang.
        for start in tqdm(starts, "add", unit="batch") if progress else starts:
            ids += self._add(pixels[start : start + _BATCH], texts[start : start + _BATCH])
        self._sync()
        return ids

    def _add(self, pixels: Float[Tensor, "T C H W"], payloads: list[str]) -> list[int]:
        blocks, pictures = self._codec.write(pixels)
        levels = pictures.levels.numpy()
        texts = [payload.encode(errors="surrogateescape") for payload in payloads]
        rows = [(self._codec.id, block, text) for block, text in zip(blocks, texts, strict=True)]
        return self._db.insert(rows, lambda ids: self._levels.write(ids, levels))

    # Find and get

    @torch.no_grad()
    def find(
        self,
        cue: Cues,
        *,
        observed: Visible | None = None,
        noise: Noise = None,
        shifts: int = 0,
        k: int = 5,
        prior_none: float = 0.5,
    ) -> Hits | list[Hits]:
        """Find the `k` stored images that a cue most likely shows, and `.none`: see `Kpp.find`."""
        k, prior_none = as_count("k", k), as_chance("prior_none", prior_none)
        seen = None if observed is None else as_mask(observed)
        cues = as_cues(self.model, require_tensor_images(cue, "cue"), seen, noise, shifts)
        while True:
            self._sync()
            freed = self._freed
            try:
                self._index.update(self._ids, self._last)
                hits = search(cues, self._held(), k=k, prior_none=prior_none)
                return hits if cue.ndim == 4 else hits[0]
            except UserError:
                self._sync()
                if self._freed == freed:  # else retry: another process freed a candidate
                    raise

    def _held(self) -> Held:
        return Held(
            len(self._ids),
            self._index.rank,
            lambda rows: self._pictures(self._ids[rows.numpy()]),
            partial(log_none, self.model),
            self._name,
        )

    def _name(self, rows: list[int]) -> list[Named]:
        ids = self._ids[rows].tolist()
        texts = self._db.payloads(ids)
        return [(id, partial(self._picture, id), t) for id, t in zip(ids, texts, strict=True)]

    def _picture(self, id: int) -> Picture:
        return self.get([id])[0]

    def get(self, ids: int | Sequence[int]) -> Float[Tensor, "n C H W"]:
        """Decode images by id: expected pixels on [0, 1]; pixels that a block stores are exact."""
        self._sync()
        named = as_ids(ids)
        self._db.rows(named)  # refuses ids that are not stored
        pictures = self._pictures(np.asarray(named, dtype=np.int64))
        return show_stored(to_logits(pictures.levels)) if self.model.has_code else pictures.means

    def pictures(self, ids: np.ndarray) -> Pictures:
        """The same pictures as bytes, in the format in which they are compared."""
        self._sync()
        return self._pictures(ids)

    def payloads(self, ids: Sequence[int]) -> list[str]:
        """The strings that were added with images."""
        return self._db.payloads(as_ids(ids))

    def __len__(self) -> int:
        self._sync()
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        self._sync()
        return iter(self._ids.tolist())

    def __contains__(self, id: object) -> bool:
        self._sync()
        try:
            number = index(id)  # pyright: ignore[reportArgumentType]
        except TypeError:
            return False
        return 0 < number <= self._last and number not in self._freed

    # Free

    def free(self, ids: int | Sequence[int]) -> Receipt:
        """Erase images: overwrite them in file, log and caches, then search these for remains."""
        named = as_ids(ids)
        if len(set(named)) != len(named):
            raise UserError(f"an id is named twice: {named}")
        with self._db.plain_errors():
            return self._free(named)

    def _free(self, named: list[int]) -> Receipt:
        rows = self._db.rows(named)
        size = self._db.erase(named)
        self._scrub(named)
        emptied = self._db.checkpoint()
        needles = [value for row in rows for value in row[1:] if len(value) >= _SHORT]
        found = self._search_files(needles)
        left = len(found - self._db.shares(list(found))) + self._levels.holds(named)
        if emptied and not left:
            self._db.confirm_erased(named)
            self._db.checkpoint()
        return Receipt(named, size, left, not emptied)

    def _scrub(self, ids: Sequence[int]) -> None:
        with self._alone():
            self._levels.erase(ids)
            self._levels.cut_after(self._db.state()[0])
        self._sync()
        self._index.erase(self._ids)

    @property
    def files(self) -> list[Path]:
        """All files of this store."""
        kinds = ("wal", "shm", "levels", "index")
        return [p for p in (self.path, *map(self._beside, kinds)) if p.is_file()]

    def _search_files(self, needles: Sequence[bytes]) -> set[bytes]:
        """Which of these byte strings occur in any file of this store."""
        found = self._db.search(needles)
        for path in map(self._beside, ("wal", "levels", "index")):  # the shm has page numbers only
            with suppress(FileNotFoundError), open_regular(path) as file:
                found |= search_bytes(file.fileno(), needles)
        return found

    def verify(self) -> Receipt:
        """Read everything: refuse a damaged file, repair caches, finish pending erasures. These
        were searched for when they were freed; here nothing is, so `found` is 0."""
        with self._db.plain_errors():
            self._db.check()
            self._sync()
            for start in range(0, len(self._ids), 8192):
                self._pictures(self._ids[start : start + 8192])
            pending = self._db.pending()
            if not pending:
                return Receipt([], 0, 0, False)
            self._scrub(pending)
            if emptied := self._db.checkpoint():
                self._db.confirm_erased(pending)
                self._db.checkpoint()
            return Receipt(pending, 0, 0, not emptied)

    def info(self) -> dict[str, object]:
        """The model, the number of images, and the bytes on disk and in memory."""
        sizes = {path.name: path.stat().st_size for path in self.files}
        about: dict[str, object] = {n: self._db.about[n] for n in ("model", "fingerprint", "image")}
        return about | {"images": len(self), "files": sizes, "index_bytes": self._index.bytes}

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r}, {self._db.about['model']}, {len(self)} images)"
