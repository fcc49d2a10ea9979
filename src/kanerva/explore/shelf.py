"""A store on the page: search it with a cue, or browse it page by page."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kanerva.explore.answers import number
from kanerva.explore.pixels import Damage, Image, to_text
from kanerva.memory.search import Hits
from kanerva.store.store import Store

EACH = 12  # images on a page


class Shelf:
    """One store, read in one thread; the page never writes to it."""

    def __init__(self, path: Path) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="store")
        self.store = self.pool.submit(Store, path).result()
        self.path, self.name = path, path.name
        self.count = self.pool.submit(len, self.store).result()
        self.model_name = str(self.pool.submit(self.store.info).result()["model"])

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "images": self.count, "each": EACH}

    def search(self, image: Image, damage: Damage, mask_given: bool, page: int) -> dict[str, Any]:
        """A page of hits, the most probable first."""
        cue = damage.apply(image)
        seen, most = damage.observed if mask_given else None, EACH * (page + 1)
        hits = self.store.find(cue, observed=seen, shifts=damage.shifts, k=most)
        assert isinstance(hits, Hits)
        rows = [
            {
                "id": h.id,
                "p": number(h.probability),
                "shift": list(h.shift),
                "text": h.payload[:200],
                "image": to_text(h.image),
            }
            for h in hits[EACH * page :]
        ]
        return {"cue": to_text(cue), "none": number(hits.none), "hits": rows, "page": page}

    def browse(self, page: int) -> dict[str, Any]:
        """A page of stored images, in order of id."""
        every = list(self.store)
        ids = every[EACH * page : EACH * (page + 1)]
        rows = []
        if ids:
            each = zip(ids, self.store.payloads(ids), self.store.get(ids), strict=True)
            rows = [{"id": i, "text": t[:200], "image": to_text(p)} for i, t, p in each]
        return {"hits": rows, "page": page, "images": len(every)}

    def close(self) -> None:
        self.pool.submit(self.store.close).result()
        self.pool.shutdown()
