"""Candidates: which pictures have the largest inner products with a cue's queries.

Up to 50,000 all of them, exactly. Beyond, faiss's product quantisation, half a byte for every
eight numbers, searched with fast scan. No inverted lists: a partial cue falls into the wrong one.
The codes lie in a file beside the store, where freed rows become zeros.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.memory.evidence import Cue, Pictures
from kanerva.memory.ranking import Candidates, Features

EXACT = 50_000  # pictures. ours
_TRAIN, _CHUNK = 20_000, 8192


class Index:
    """Over rows 0 .. n - 1, row r being id r + 1; rows that were freed are never given back."""

    def __init__(
        self,
        path: Path,
        image: tuple[int, int, int],
        fetch: Callable[[np.ndarray], Pictures],
    ) -> None:
        """`path` of the codes' file; `fetch` gives the pictures of ids, each an `image`."""
        self.path, self._image, self._fetch = path, image, fetch
        self._ids = np.zeros(0, dtype=np.int64)
        self._features: Features | None = None
        self._fast: Any = None  # faiss has no types
        self._codes: Any = None

    def update(self, ids: np.ndarray, last: int) -> None:
        """Index what is held now: `ids`, in order, of ids up to `last`."""
        if ids is self._ids:
            return
        if len(ids) <= EXACT:
            self._update_exact(ids)
            self._ids = ids
        else:
            self._ids = ids
            self._update_codes(last)

    @property
    def bytes(self) -> int:
        """In memory."""
        exact = 0 if self._features is None else self._features.vectors.numel() * 4
        return exact if self._fast is None else self._fast.ntotal * self._fast.code_size

    def _update_exact(self, ids: np.ndarray) -> None:
        kept, new = np.isin(self._ids, ids), ids[~np.isin(ids, self._ids)]
        parts = [] if self._features is None else [self._features.vectors[torch.from_numpy(kept)]]
        for start in range(0, len(new), _CHUNK):
            parts.append(self._fetch(new[start : start + _CHUNK]).features)
        self._features = Features(torch.cat(parts), self._image) if parts else None

    def _update_codes(self, last: int) -> None:
        import faiss

        self._load()
        codes = self._codes
        if codes is None or codes.ntotal > last:
            sample = np.random.default_rng(0).choice(last, min(_TRAIN, last), replace=False) + 1
            vectors = self._vectors(np.sort(sample))
            codes = faiss.IndexPQ(
                vectors.shape[1], vectors.shape[1] // 8, 4, faiss.METRIC_INNER_PRODUCT
            )
            codes.train(vectors)
        before = codes.ntotal
        for start in range(before + 1, last + 1, _CHUNK):
            codes.add(self._vectors(np.arange(start, min(start + _CHUNK, last + 1))))
        if codes.ntotal > before:
            self._codes = codes
            self._save()
        elif self._fast is None:
            self._fast = faiss.IndexPQFastScan(codes)  # pyright: ignore[reportArgumentType]
        self._features = None

    def _vectors(self, ids: np.ndarray) -> np.ndarray:
        vectors = self._fetch(ids).features.numpy()
        return np.pad(vectors, ((0, 0), (0, -vectors.shape[1] % 8)))

    def _save(self) -> None:
        """The codes, zeros where nothing is held: another process may have freed it."""
        import faiss

        codes = self._codes
        table = faiss.vector_to_array(codes.codes).reshape(codes.ntotal, -1)
        gone = np.ones(codes.ntotal, dtype=bool)
        gone[self._ids[self._ids <= codes.ntotal] - 1] = False
        table[gone] = 0
        faiss.copy_array_to_vector(table.ravel(), codes.codes)
        self._fast = faiss.IndexPQFastScan(codes)
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        faiss.write_index(codes, str(temporary))
        os.replace(temporary, self.path)

    def erase(self, held: np.ndarray) -> None:
        """Forget all but what is held, in memory and in the file."""
        if self.path.is_file():
            self._ids = held
            self._load()
            if self._codes is not None:
                self._save()
        elif self._features is not None:
            self.update(held, int(held[-1]) if len(held) else 0)

    def _load(self) -> None:
        import faiss

        if self._codes is None and self.path.is_file():
            try:
                self._codes = faiss.read_index(str(self.path))
            except RuntimeError:  # damaged: made anew
                self.path.unlink()

    def rank(self, cues: Sequence[Cue], count: int) -> list[Candidates]:
        """For each cue, pairs of a row, a position among the ids held, and a shift."""
        if self._fast is None:
            assert self._features is not None
            return Candidates.rank(cues, self._features, count)
        return [self._rank_codes(cue.queries(), count) for cue in cues]

    def _rank_codes(
        self, queries: Float[Tensor, "groups shifts features"], count: int
    ) -> Candidates:
        groups, shifts = queries.shape[:2]
        flat = queries.flatten(0, 1).numpy()
        flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 8)))
        products, rows = self._fast.search(np.ascontiguousarray(flat), count)
        products, rows = (v.reshape(groups, shifts * count) for v in (products, rows))
        best = np.argsort(-products, axis=1)[:, :count]  # over all shifts
        pairs = np.stack([np.take_along_axis(rows, best, 1), best // count]).reshape(2, -1)
        ids, shift = np.unique(pairs[:, pairs[0] >= 0], axis=1) + np.array([[1], [0]])
        place = np.searchsorted(self._ids, ids).clip(max=len(self._ids) - 1)
        held = self._ids[place] == ids
        return Candidates(torch.from_numpy(place[held]), torch.from_numpy(shift[held]))
