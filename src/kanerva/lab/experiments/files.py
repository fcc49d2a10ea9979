"""Beyond the paper: are memory files as small as their claimed bits?

Memories of whole images and of shrunk ones are saved. Each is loaded with one and with two threads,
on the CPU, and on a GPU if there is one. Every symbol must come back unchanged. A GPU also codes
them itself, and must make the same bytes. Entropy coding, including the prior, is timed separately
from the networks of the pixel code.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kanerva.data.splits import fixed_episodes, load_split
from kanerva.errors import UserError
from kanerva.evaluation.report import columns
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.memory.codec import BlockCodec
from kanerva.memory.container import SIZE, Container
from kanerva.memory.detail import symbol_digest
from kanerva.memory.heap import Memory
from kanerva.memory.pixel_code import PixelCode
from kanerva.models.kpp_bits import KppBits

COUNTS = (32, 1000, 10_000)
CAPS = (None, 56, 24)  # bits per image: no cap; a gist and some pixels; part of a gist
AT_ONCE = 256
CLOSE = 0.01  # fraction by which a file may exceed its claim


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def write_all(model: KppBits, images: Float[Tensor, "N C H W"]) -> Memory:
    memory = model.empty()
    for part in images.split(AT_ONCE):
        memory = model.append(memory, part)
    return memory


def count_differences(one: Memory, other: Memory) -> int:
    """Count blocks that differ in any symbol."""
    pairs = [memory._in_order() for memory in (one, other)]
    if one.handles != other.handles:
        return max(len(one.handles), len(other.handles))
    digests = [
        [
            symbol_digest(gists[i : i + 1], detail.apply(lambda x, i=i: x[i : i + 1]))
            for i in range(len(gists))
        ]
        for gists, detail in pairs
    ]
    return sum(a != b for a, b in zip(*digests, strict=True))


def measure(model: KppBits, memory: Memory, folder: Path, others: list[str]) -> dict[str, Any]:
    """Measure a memory's file, coded on the CPU: its size, its speed, whether all blocks come back,
    and whether `others`, devices beside the CPU, code it to the same bytes."""
    path, count, home = folder / "memory", len(memory.handles), model.device
    held = memory.to("cpu")
    model.to("cpu")
    with threads(2):
        start = time.perf_counter()
        held.save(path)
        saved = time.perf_counter() - start
    content = path.read_bytes()
    readers = {"1 thread": (1, "cpu"), "2 threads": (2, "cpu")}
    readers |= {device: (2, device) for device in others}
    differences, seconds, same_bytes = {}, {}, {}
    for name, (number, device) in readers.items():
        model.to(device)
        with threads(number):
            start = time.perf_counter()
            loaded = Memory.load(path, model)
            seconds[name] = time.perf_counter() - start
        differences[name] = count_differences(held, loaded.to("cpu"))
        if device in others:
            memory.to(device).save(folder / device)
            same_bytes[device] = (folder / device).read_bytes() == content
    model.to(home)
    claim = float(memory.bits.sum()) / 8
    stream = len(Container.unpack(content, path.name).stream)
    return {
        "images": count,
        "bits_per_image": 8 * claim / count,
        "claim": claim,
        "header": SIZE,
        "handles": len(content) - SIZE - stream,
        "bytes": len(content),
        "save_s": saved,
        "load_s": seconds,
        "differences": differences,
        "same_bytes": same_bytes,
    }


class KnownTables(PixelCode):
    """A pixel code with precomputed tables, so that timing excludes its networks."""

    def __init__(self, code: PixelCode, counts: Int[Tensor, "N n"]) -> None:
        torch.nn.Module.__init__(self)
        self.height, self.width, self.place = code.height, code.width, code.place
        self.left = counts

    def table(self, traces: Tensor, pixels: Tensor, beside: Tensor | None = None) -> Tensor:
        part, self.left = self.left.tensor_split([len(traces)])
        return part

    def follow(
        self,
        traces: Tensor,
        choose: Callable[[int, Int[Tensor, " N"]], Tensor | None],
        beside: Tensor | None = None,
    ) -> Tensor:
        part = self.table(traces, traces)
        for i, counts in enumerate(part.T.contiguous()):
            if choose(i, counts) is None:
                break
        return part


def time_coding(memory: Memory) -> dict[str, float]:
    """Seconds to encode symbols to bytes, to decode them, and of the pixel code's networks alone.

    Coding includes the prior but not these networks. The memory must hold whole images.
    """
    codec = memory.codec
    assert isinstance(codec, BlockCodec)
    gists, detail = memory.to("cpu")._in_order()
    codec = replace(codec, prior=deepcopy(codec.prior).cpu(), pixels=deepcopy(codec.pixels).cpu())
    with threads(2):
        start = time.perf_counter()
        counts = codec.pixels.table(codec._traces(gists), codec._as_images(detail.pixels))
        networks = time.perf_counter() - start
        codes = [KnownTables(codec.pixels, counts) for _ in range(2)]
        encoder, decoder = (replace(codec, pixels=code) for code in codes)
        start = time.perf_counter()
        stream = encoder.encode(gists, detail)
        encoded = time.perf_counter() - start
        start = time.perf_counter()
        symbols, stored = decoder.decode(stream, len(gists))
        decoded = time.perf_counter() - start
    assert torch.equal(symbols, gists) and torch.equal(stored.pixels, detail.pixels)
    return {"encode": encoded, "decode": decoded, "networks": networks}


def run(lab: Lab) -> Finding:
    model, config = lab.trained("kpp-bits"), lab.config("kpp-bits")
    if not isinstance(model, KppBits):
        raise UserError("files needs a model with blocks of bits, such as kpp-bits")
    episodes = fixed_episodes(config, load_split(config, "test", lab.data_root), lab.device)
    counts = lab.pick(COUNTS[:1], COUNTS)
    needed = -(-max(counts) // config.episode_length)
    images = episodes.batch(0, min(needed, len(episodes))).images.flatten(0, 1)
    large = model.with_capacity(min(max(counts), len(images)))
    assert isinstance(large, KppBits)
    rows, coding = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            written = write_all(large, images[:count])
            coding = {"images": count} | time_coding(written)
            for cap in CAPS:
                held = written if cap is None else written.shrink(bits=cap)
                lab.say(f"{count} images, {'all bits' if cap is None else f'{cap} bits'}")
                others = ["cuda"] if torch.cuda.is_available() else []
                rows.append({"cap": cap} | measure(large, held, Path(folder), others))
    figures: Figures = {"rows": rows, "coding": coding, "processors": torch.get_num_threads()}
    return Finding(figures, table(figures))


def table(figures: Figures) -> list[str]:
    """A table with a row for each file."""
    rows = [["images", "bits each", "claim", "header", "handles", "bytes", "over", "save/s",
             "load/s", "differ"]]  # fmt: skip
    for row in figures["rows"]:
        count = row["images"]
        rows.append([
            str(count), f"{row['bits_per_image']:.1f}", f"{row['claim']:.0f}", str(row["header"]),
            str(row["handles"]), str(row["bytes"]), f"{excess(row):+.2%}",
            f"{count / row['save_s']:.0f}", f"{count / row['load_s']['2 threads']:.0f}",
            str(sum(row["differences"].values())),
        ])  # fmt: skip
    readers = ", ".join(figures["rows"][0]["differences"])
    return [
        *columns(rows, left=0).splitlines(),
        "claim: memory.bits in bytes; over: what a file takes beyond claim, header and handles; "
        "save/s, load/s: images a",
        f"second, networks included; differ: blocks that were read otherwise, by {readers}",
        describe_coding(figures["coding"]),
    ]


def describe_coding(coding: dict[str, Any]) -> str:
    """Coding speed in images per second."""
    rates = {name: coding["images"] / coding[name] for name in ("encode", "decode", "networks")}
    return (
        f"symbols to bytes {rates['encode']:,.0f} images/s, back {rates['decode']:,.0f}, prior "
        f"included; networks of pixels, which are timed apart, {rates['networks']:,.0f}"
    )


def excess(row: dict[str, Any]) -> float:
    """By how much a file exceeds its claim, as a fraction of it."""
    return (row["bytes"] - row["header"] - row["handles"]) / row["claim"] - 1


def verdict(figures: Figures) -> str:
    """Whether file sizes match their claims, and all blocks come back unchanged."""
    rows = figures["rows"]
    wrong = sum(sum(row["differences"].values()) for row in rows)
    same = [same for row in rows for same in row.get("same_bytes", {}).values()]
    few = [abs(excess(row)) for row in rows if row["images"] <= COUNTS[0]]
    many = [abs(excess(row)) for row in rows if row["images"] > COUNTS[0]]
    small, large = max(few, default=0.0), max(many, default=0.0)
    return (
        f"{wrong} blocks were read otherwise than written. "
        + (f"{same.count(False)} of {len(same)} files differ if a GPU codes them. " if same else "")
        + f"Files differ from what they claim by at most {large:.2%} where they hold "
        f"{COUNTS[1]:,} images or more, {'as' if large <= CLOSE else 'more than'} hoped; with "
        f"{COUNTS[0]} images, by at most {small:.2%}."
    )


ABOUT = About(
    paper="beyond",
    shows="memories as files: bytes, speed, what comes back",
    claim="A file takes the bits that its memory claims and a header, and every machine reads the "
    "same from it.",
    quick="about 1 min on two cores",
    full="about 20 min on two cores",
)
