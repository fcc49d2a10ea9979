"""The search index: which pictures have the largest inner products with a cue's queries.

Up to 50,000 pictures, all inner products are computed exactly. Beyond that, faiss's product
quantisation is used, with half a byte for every eight numbers and fast scan. There are no inverted
lists, because a partial cue would fall into the wrong one. The codes are cached in a file beside
the store, where freed rows become zeros.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.errors import UserError
from kanerva.files import read_tensors, require_tensor, write_tensors
from kanerva.memory.evidence import Cue, Pictures
from kanerva.memory.ranking import Candidates, Features
from kanerva.plain_files import remove_leftovers

EXACT = 50_000  # ours: largest number of pictures that are searched exactly
_TRAIN, _CHUNK = 20_000, 8192  # pictures that the quantiser is trained on; pictures per batch


class Index:
    """An index over the stored ids. Row r of the file of codes is id r + 1; the search in memory
    has the codes of stored ids alone, because freed rows, all zeros, would crowd out others."""

    def __init__(
        self,
        path: Path,
        image: tuple[int, int, int],
        seal: str,
        fetch: Callable[[np.ndarray], Pictures],
        alone: Callable[[], AbstractContextManager[np.ndarray]],
    ) -> None:
        """`path`: the file of the codes. `image`: the shape of pictures. `seal`: identifies the
        store and the model. `fetch`: returns the pictures of ids. `alone`: a context that locks out
        other writers and returns the stored ids."""
        self.path, self._image = path, image
        self._seal, self._fetch, self._alone = seal, fetch, alone
        self._ids = np.zeros(0, dtype=np.int64)
        self._features: Features | None = None
        self._fast: Any = None  # faiss has no type annotations
        self._codes: Any = None

    def update(self, ids: np.ndarray, last: int) -> None:
        """Index the stored `ids`, in order; `last` is the last id ever issued."""
        if not np.array_equal(ids, self._ids):
            if len(ids) <= EXACT:
                self._update_exact(ids)
            else:
                self._update_codes(ids, last)
        self._ids = ids

    @property
    def bytes(self) -> int:
        """Bytes of the index in memory."""
        exact = 0 if self._features is None else self._features.vectors.numel() * 4
        return exact if self._fast is None else self._fast.ntotal * self._fast.code_size

    def _update_exact(self, ids: np.ndarray) -> None:
        old = ids[:0] if self._features is None else self._ids
        kept, new = np.isin(old, ids), ids[~np.isin(ids, old)]
        parts = [] if self._features is None else [self._features.vectors[torch.from_numpy(kept)]]
        for start in range(0, len(new), _CHUNK):
            parts.append(self._fetch(new[start : start + _CHUNK]).features)
        self._features = Features(torch.cat(parts), self._image) if parts else None
        self._fast = None

    def _update_codes(self, ids: np.ndarray, last: int) -> None:
        import faiss

        self._load()
        codes = self._codes
        if codes is None or codes.ntotal > last:
            sample = np.random.default_rng(0).choice(ids, min(_TRAIN, len(ids)), replace=False)
            vectors = self._vectors(np.sort(sample))
            codes = faiss.IndexPQ(
                vectors.shape[1], vectors.shape[1] // 8, 4, faiss.METRIC_INNER_PRODUCT
            )
            codes.pq.cp.min_points_per_centroid = 1  # no warning for a small store
            codes.train(vectors)
        before = codes.ntotal
        for start in range(before + 1, last + 1, _CHUNK):
            codes.add(self._vectors(np.arange(start, min(start + _CHUNK, last + 1))))
        self._codes = codes
        if codes.ntotal > before:
            with suppress(UserError):  # no disk space, or another writer: it is saved later
                self._save()
        self._features = self._fast = None  # before another is made, to save memory
        self._fast = self._fast_scan(ids)

    def _fast_scan(self, ids: np.ndarray) -> Any:
        """A search over the codes of these ids alone."""
        import faiss

        every = self._codes
        if len(ids) == every.ntotal:
            return faiss.IndexPQFastScan(every)
        table = faiss.rev_swig_ptr(every.codes.data(), every.codes.size())  # not a copy
        codes: Any = faiss.IndexPQ(every.d, every.pq.M, 4, faiss.METRIC_INNER_PRODUCT)
        codes.pq = every.pq
        faiss.copy_array_to_vector(table.reshape(every.ntotal, -1)[ids - 1].ravel(), codes.codes)
        codes.ntotal, codes.is_trained = len(ids), True
        return faiss.IndexPQFastScan(codes)

    def _vectors(self, ids: np.ndarray) -> np.ndarray:
        vectors = self._fetch(ids).features.numpy()
        return np.pad(vectors, ((0, 0), (0, -vectors.shape[1] % 8)))

    def _save(self) -> None:
        """Write the codes to the file, with zeros for freed rows, which another process may have
        freed in the meantime."""
        import faiss

        codes = self._codes
        with self._alone() as held:
            table = faiss.vector_to_array(codes.codes).reshape(codes.ntotal, -1)
            freed = np.ones(codes.ntotal, dtype=bool)
            freed[held[held <= codes.ntotal] - 1] = False
            table[freed] = 0
            faiss.copy_array_to_vector(table.ravel(), codes.codes)
            centres = faiss.vector_to_array(codes.pq.centroids).reshape(codes.pq.M, -1)
            tensors = {"centres": torch.from_numpy(centres), "codes": torch.from_numpy(table)}
            write_tensors(self.path, tensors, {"store": self._seal})

    def erase(self, held: np.ndarray) -> None:
        """Forget everything but the stored ids `held`, in memory and in the file."""
        remove_leftovers(self.path)
        self._load()
        if self._codes is not None:  # the store is large, or was
            self._save()
        if self._fast is not None:
            self._ids, self._fast = self._ids[:0], None  # the next `update` makes it again
        elif self._features is not None:
            self.update(held, int(held[-1]) if len(held) else 0)

    def _load(self) -> None:
        """Load the codes from the file; if it is damaged or belongs to another store, remove it.
        faiss's own reader is not used, because it trusts its input."""
        if self._codes is not None or not self.path.is_file():
            return
        import faiss

        try:
            tensors, about = read_tensors(self.path, lambda about: True)
            parts = self._vectors(np.zeros(0, dtype=np.int64)).shape[1] // 8
            shape = (parts, 16 * 8)
            centres = require_tensor(tensors, "centres", self.path, [torch.float32], shape)
            shape = (len(tensors.get("codes", ())), -(-parts // 2))
            table = require_tensor(tensors, "codes", self.path, [torch.uint8], shape)
            if about.get("store") != self._seal:
                raise UserError(f"{self.path} belongs to another store")
        except UserError:
            self.path.unlink(missing_ok=True)
            return
        codes = faiss.IndexPQ(8 * parts, parts, 4, faiss.METRIC_INNER_PRODUCT)
        faiss.copy_array_to_vector(centres.numpy().ravel(), codes.pq.centroids)
        faiss.copy_array_to_vector(table.numpy().ravel(), codes.codes)
        codes.ntotal, codes.is_trained = len(table), True
        self._codes = codes

    def rank(self, cues: Sequence[Cue], count: int) -> list[Candidates]:
        """The best candidates for each cue. Their rows are positions among the stored ids."""
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
        place, shift = np.unique(pairs[:, pairs[0] >= 0], axis=1)
        return Candidates(torch.from_numpy(place), torch.from_numpy(shift))
