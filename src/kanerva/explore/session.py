"""One client's memory, its history, and how many clients there may be."""

import asyncio
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kanerva.errors import UserError
from kanerva.explore.pixels import Image
from kanerva.memory.heap import Memory
from kanerva.models.base import MemoryModel
from kanerva.plain_files import write_whole

MOST_SESSIONS = 64
IDLE = 900.0  # seconds after which a new session may replace an unused one
MOST_UNDO = 20
MOST_PAST = 32_000_000  # bytes of memories kept for undo
MOST_CALLS = 64  # a longer script starts from a saved memory instead
MOST_CALLED = 1000  # images in a script's calls
MOST_WHOLE = 64  # images of a model that writes all of them at once
_LARGEST = 2**53  # integers up to here are exact in JavaScript


@dataclass(frozen=True)
class Call:
    """One call that changed a memory."""

    verb: Literal["append", "write", "free", "shrink", "open"]
    images: tuple[Image, ...] = ()
    handles: tuple[int, ...] = ()
    number: int = 0  # a seed, or bits


@dataclass(frozen=True)
class State:
    """A memory, the original images written to it, and the calls that made it."""

    memory: Memory
    images: dict[int, Image] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()

    def after(self, call: Call, memory: Memory, images: dict[int, Image]) -> "State":
        """The state after a call. A long history is replaced by opening the saved memory."""
        calls = (*self.calls, call)
        short = len(calls) <= MOST_CALLS and sum(len(c.images) for c in calls) <= MOST_CALLED
        return State(memory, images, calls if short else (Call("open"),))

    def at_rest(self) -> "State":
        """A copy without what models have cached on the memory."""
        return replace(self, memory=replace(self.memory))


class Session:
    """One client's memory. States are immutable, so undo is a list of them."""

    def __init__(self, name: str, model: MemoryModel) -> None:
        self.id = secrets.token_urlsafe(24)
        self.name, self.model = name, model
        self.state = State(model.empty())
        self.past: list[State] = []
        self.future: list[State] = []
        self.used = time.monotonic()
        self.lock = asyncio.Lock()
        self.scale: float | None = None  # of the map's colours, set by the first blocks

    @property
    def memory(self) -> Memory:
        return self.state.memory

    def _go(self, state: State) -> None:
        most = min(MOST_UNDO, 1 + MOST_PAST // (4 * max(1, state.memory.floats)))
        self.past = [*self.past, self.state.at_rest()][-most:]
        self.future, self.state = [], state

    def write(self, images: list[Image]) -> list[int]:
        """Write images and return their handles. A model without blocks rewrites all images, and
        numbers them."""
        if not images:
            raise UserError("no images were given")
        old = self.state
        if not self.model.has_blocks:
            every = [*old.images.values(), *images]
            if len(every) > MOST_WHOLE:
                raise UserError(f"at most {MOST_WHOLE} images are written together")
            memory = self.model.write(torch.stack(every), generator=_seeded(len(every)))
            handles = list(range(len(old.images), len(every)))
            call = Call("write", tuple(every), number=len(every))
            self._go(State(memory, dict(enumerate(every)), (call,)))
            return handles
        seed = old.memory.issued
        memory = self.model.append(old.memory, torch.stack(images), generator=_seeded(seed))
        handles = list(range(seed, memory.issued))
        new = old.images | dict(zip(handles, images, strict=True))
        self._go(old.after(Call("append", tuple(images), number=seed), memory, new))
        return handles

    def free(self, handles: list[int]) -> None:
        """Free some images."""
        old = self.state
        memory = old.memory.free(*handles)
        kept = {handle: image for handle, image in old.images.items() if handle not in handles}
        self._go(old.after(Call("free", handles=tuple(handles)), memory, kept))

    def shrink(self, bits: int, handles: list[int], again: bool = False) -> None:
        """Shrink images. With `again`, replace the last call if it shrank the same handles."""
        last = self.state.calls[-1] if self.state.calls else None
        if again and self.past and last and (last.verb, last.handles) == ("shrink", tuple(handles)):
            self.state = self.past.pop()
        old = self.state
        memory = old.memory.shrink(bits, *handles)
        call = Call("shrink", handles=tuple(handles), number=bits)
        self._go(old.after(call, memory, old.images))

    def clear(self) -> None:
        """Start with an empty memory."""
        self._go(State(self.model.empty()))

    def undo(self) -> None:
        if not self.past:
            raise UserError("there is nothing to undo")
        self.future = [*self.future, self.state.at_rest()]
        self.state = self.past.pop()

    def redo(self) -> None:
        if not self.future:
            raise UserError("there is nothing to redo")
        self.past = [*self.past, self.state.at_rest()]
        self.state = self.future.pop()

    # Files. Their names are ours: a client only sends and receives bytes.

    def save(self) -> bytes:
        """The bytes that `Memory.save` writes."""
        with _draft() as path:
            self.memory.save(path)
            return path.read_bytes()

    def open(self, content: bytes) -> None:
        """Open the bytes of a file that `Memory.save` wrote; refuse one of another model."""
        with _draft() as path:
            write_whole(path, content)
            try:
                memory = Memory.load(path, self.model)
            except UserError as error:
                raise UserError(str(error).replace(str(path), "this file")) from error
        if memory.is_batch or (memory.owners is None) == self.model.has_blocks:
            raise UserError("this file holds a memory of another kind of model")
        if memory.issued >= _LARGEST:
            raise UserError("this file's handles are too large to be shown")
        self.model.as_maps(memory)
        self._go(State(memory, {}, (Call("open"),)))

    def most_bytes(self) -> int:
        """The largest file that can be a memory of this model."""
        return 65_536 + 16 * self.memory.floats

    def colour_scale(self, blocks: Tensor) -> float:
        """The session's scale of colours. It stays, so that freeing a block recolours no other."""
        if self.scale is None:
            self.scale = max(2.0 * float(blocks.std()), 1e-3) if blocks.numel() > 1 else 1.0
        return self.scale


class Sessions:
    """At most `most` sessions; a new one replaces one that was idle for long."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self.most = most
        self._all: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._all)

    def start(self, name: str, model: MemoryModel) -> Session:
        if len(self._all) >= self.most:
            oldest = min(self._all.values(), key=lambda session: session.used)
            if time.monotonic() - oldest.used < IDLE:
                raise UserError(f"{self.most} pages are open, the limit: close one")
            self.end(oldest.id)
        session = Session(name, model)
        self._all[session.id] = session
        return session

    def get(self, id: str) -> Session | None:
        session = self._all.get(id)
        if session is not None:
            session.used = time.monotonic()
        return session

    def end(self, id: str) -> None:
        self._all.pop(id, None)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@contextmanager
def _draft() -> Iterator[Path]:
    """A file in a temporary folder, deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="kanerva-explore-") as folder:
        yield Path(folder) / "memory"
