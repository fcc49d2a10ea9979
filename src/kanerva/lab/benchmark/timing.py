"""Timing that waits for the device, the device's peak rate, and the record of a measurement."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kanerva.errors import UserError
from kanerva.plain_files import read_json
from kanerva.provenance import command, commit, device_name, versions
from kanerva.training.step import Form


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: the median over several windows, the fastest and the slowest."""

    ms: float
    least: float
    most: float


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(
    call: Callable[[], object], device: torch.device, *, calls: int, windows: int = 5
) -> Timing:
    """Time `windows` windows of `calls` calls each, after a few warm-up calls."""
    for _ in range(min(calls, 3)):
        call()
    times = []
    for _ in range(windows):
        wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait(device)
        times.append(1e3 * (time.perf_counter() - start) / calls)
    return Timing(statistics.median(times), min(times), max(times))


def replayed(call: Callable[[], object], device: torch.device, form: Form) -> Callable[[], object]:
    """Return the call as a CUDA graph if the form is `captured`, else unchanged."""
    if form != "captured":
        return call
    side = _side()  # shared, because every stream keeps its own workspace
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@lru_cache(maxsize=1)
def _side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def matrix_rate(device: torch.device, precision: str) -> float:
    """FLOP/s of a large matrix product, in the dtype that a run of this precision multiplies in."""
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 1024
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    ms = timed(lambda: a @ b, device, calls=20 if on_gpu else 5).ms
    return 2 * size**3 / (ms / 1e3)


def measurement(
    kind: str, device: torch.device, flags: list[str], **content: Any
) -> dict[str, Any]:
    """Make a record: what was measured, on which device, by which code and command."""
    return {
        "schema": 1,
        "kind": kind,
        "command": command(["bench", *flags]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "versions": versions(),
        "device": device_name(device),
    } | content


def read_measurement(path: Path) -> dict[str, Any]:
    """Read the record of a measurement."""
    record = read_json(path)
    kinds = ("throughput", "agreement", "quality", "latency")
    if not isinstance(record, dict) or record.get("kind") not in kinds:
        raise UserError(f"{path} is not a record of kanerva bench")
    return record
