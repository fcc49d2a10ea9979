"""Images per second of a training step, and where its time goes.

Images are random bytes: the cost of a step does not depend on their content, and no data set is
needed. A whole step is timed as in training, including the sampling of batches on the device. Its
parts are timed one by one, in the same form (eager, compiled or captured) as the step.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning_fabric import Fabric

from kanerva.config import RunConfig
from kanerva.data import ImageSet, TrainingEpisodes
from kanerva.data.splits import training_episodes
from kanerva.evaluation.record import count_reads
from kanerva.lab.benchmark.timing import Timing, replayed, timed, wait
from kanerva.seeding import derive_seed, stream
from kanerva.training.step import WARM, Form, Step, assemble


def random_episodes(config: RunConfig, device: torch.device) -> TrainingEpisodes:
    """Episodes of random bytes, enough for a few steps; labels make episodes of one label."""
    shape = (4 * config.batch * config.episode_length, *config.model.image)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=stream("benchmark"))
    labels = torch.arange(len(pixels)) // config.episode_length
    return training_episodes(config, ImageSet("random", "train", pixels, labels), device)


def throughput(config: RunConfig, form: Form, fabric: Fabric, *, steps: int) -> dict[str, Any]:
    """Measure a step: images per second, time of each part, peak memory, time of the first step."""
    device = fabric.device
    on_gpu = device.type == "cuda"
    gc.collect()
    others = 0  # bytes allocated on the device before this measurement
    torch._dynamo.reset()  # earlier shapes must not make this graph dynamic
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        others = torch.cuda.memory_allocated(device)
    episodes = random_episodes(config, device)
    step = Step(fabric, assemble(config, fabric, form), clip=config.optim.clip, form=form)
    step.model.train()
    count = 0

    def whole() -> None:
        nonlocal count
        seed = derive_seed(config.seed, "step", count)
        step(episodes.batch_at(count), seed=seed, lr=config.optim.lr, decay=config.optim.ema)
        count += 1

    began = time.perf_counter()
    whole()
    wait(device)
    first = time.perf_counter() - began
    for _ in range(WARM + 1):
        whole()
    total = timed(whole, device, calls=steps)
    peak = (torch.cuda.max_memory_allocated(device) - others) / 2**30 if on_gpu else None
    parts = _parts(step, episodes, config, steps)
    parts["rest"] = total.ms - sum(ms for part, ms in parts.items() if part != "read")
    images = config.batch * config.episode_length
    memory = getattr(config.model, "memory", None)  # km, dkm and dnc have rows instead
    return {
        "model": config.model.name,
        "preset": config.preset,
        "variant": config.variant,
        "config_hash": config.config_hash(),
        "precision": config.precision,
        "T": config.episode_length,
        "batch": config.batch,
        "K": count_reads(config),
        "side": getattr(memory, "size", None),
        "memory": list(step.model.memory_shape(config.episode_length)),
        "capacity": getattr(memory, "capacity", None),
        "form": form,
        "images_per_s": 1e3 * images / total.ms,
        "images_per_s_range": [1e3 * images / total.most, 1e3 * images / total.least],
        "ms_per_step": total.ms,
        "ms_by_part": parts,
        "peak_gib": peak,
        "first_step_s": first,
        "finite": step.look().skipped == 0,
    }


def _parts(
    step: Step, episodes: TrainingEpisodes, config: RunConfig, steps: int
) -> dict[str, float]:
    """Milliseconds of a step's parts: the next batch, forward, backward, and the update (clipping,
    optimiser, weight average). Also of `read`, the memory's part of the forward pass."""
    device = step.fabric.device
    episode = episodes.batch_at(0)
    counted = iter(range(10**9))
    data = timed(lambda: episodes.batch_at(next(counted)), device, calls=steps)

    def forward() -> torch.Tensor:
        return step.forward(episode)[1]

    def both() -> None:
        step.fabric.backward(forward())
        step.optimizer.zero_grad(set_to_none=True)

    def clock(call: Callable[[], object]) -> Timing:
        return timed(replayed(call, device, step.form), device, calls=steps)

    ahead, there_and_back = clock(forward), clock(both)
    whole = clock(lambda: step.once(episode))
    found = {
        "data": data.ms,
        "forward": ahead.ms,
        "backward": there_and_back.ms - ahead.ms,
        "update": whole.ms - there_and_back.ms,
        "read": 0.0,
    }
    if not hasattr(step.model, "traces"):
        return found
    with torch.no_grad():
        one = step.model.memory_shape(config.episode_length)
        maps = torch.randn(config.batch, *one, device=device)
        shape = (config.batch, config.episode_length, *step.model.key_shape)
        keys = torch.randn(shape, device=device)
        traces: Any = step.model.traces
        read = traces if step.form == "eager" else torch.compile(traces, dynamic=False)
        return found | {"read": clock(lambda: read(maps, keys)).ms}
