"""Milliseconds per call: each method of a model with one image or cue, and nearest neighbour in
numpy."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.lab.benchmark.timing import timed, wait
from kanerva.lab.experiments.damage import nearest_alone
from kanerva.memory.heap import Memory
from kanerva.models.kpp import Kpp

STEPS = 10


def latency(
    model: Kpp, images: Float[Tensor, "n C H W"], held: int, *, calls: int
) -> list[dict[str, Any]]:
    """Time each method with `held` images in memory. A cue shows the upper half of an image."""
    model = cast(Kpp, model.with_capacity(held + 1)).requires_grad_(False)
    memory, image, new = model.write(images[:held]), images[:1], images[held : held + 1]
    seen = torch.ones(images.shape[-2:], device=images.device)
    seen[len(seen) // 2 :] = 0
    cue = image * seen
    verbs: dict[str, Callable[[Memory], object]] = {
        "write one image": lambda m: model.write(image),
        "append one image": lambda m: model.append(m, new),
        "append, then recall": lambda m: model.recall(model.append(m, new), cue, observed=seen),
        "free": lambda m: m.free(0),
        "get": lambda m: model.get(m, [0]),
        "recall, 1 step": lambda m: model.recall(m, cue, steps=1, observed=seen),
        f"recall, {STEPS} steps": lambda m: model.recall(m, cue, steps=STEPS, observed=seen),
        "recall": lambda m: model.recall(m, cue, observed=seen),
        "find": lambda m: model.find(m, cue[0], observed=seen),
        "familiarity": lambda m: model.familiarity(m, image),
        "elbo": lambda m: model.elbo(image, m),
        "generate one image": lambda m: model.generate(m, 1),
    }
    rows = [
        {"verb": name, "held": held} | _times(call, memory, images.device, calls)
        for name, call in verbs.items()
    ]
    pixels, query, visible = (
        part.flatten(1).cpu().numpy() for part in (images[:held], cue, seen.expand_as(cue))
    )
    nearest = {"verb": "nearest neighbour, numpy", "held": held}
    times = _times(
        lambda _: nearest_alone(pixels, query[0], visible[0]), memory, images.device, calls
    )
    return [*rows, nearest | times]


def _times(
    call: Callable[[Memory], object], memory: Memory, device: torch.device, calls: int
) -> dict[str, float]:
    """Time the first call, on a memory with empty caches, and later calls."""
    fresh = replace(memory, kept={})
    start = time.perf_counter()
    call(fresh)
    wait(device)
    first = 1e3 * (time.perf_counter() - start)
    later = timed(lambda: call(fresh), device, calls=calls)
    return {"first_ms": first, "ms": later.ms, "least_ms": later.least, "most_ms": later.most}
