"""What a training step on a CPU gains from memory that is kept and from a pixel code in parts.

    python benchmarks/cpu_training.py results/bench/cpu-training.json [ROUNDS]

Each measurement is a process of its own with one thread, and counts processor time, because
machines are shared. Those of a model run in turn, round after round; the record has medians. Images
are random.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from kanerva.processor import keep_memory

RUNS = {  # preset and model: images in a step
    ("omniglot", "kpp-bits"): 256,
    ("mnist", "kpp-paper"): 512,
    ("mnist", "vae"): 512,
    ("glyphs", "kpp"): 64,
}
STEPS, WARM = 3, 2


def measure(preset: str, model: str, images: int, kept: bool, parts: bool) -> dict[str, Any]:
    """Time some steps in this process."""
    assert keep_memory() if kept else True
    from kanerva.cli.train import read_config
    from kanerva.lab.benchmark.throughput import random_episodes
    from kanerva.memory import pixel_code
    from kanerva.training.devices import make_fabric
    from kanerva.training.step import Step, assemble

    if not parts:
        pixel_code._TRAINED_AT_ONCE = images
    config = read_config(["--preset", preset, "--model", model])
    config = replace(config, batch=images // config.episode_length)
    fabric = make_fabric(config, "cpu")
    episodes = random_episodes(config, fabric.device)
    step = Step(fabric, assemble(config, fabric, "eager"), clip=config.optim.clip, form="eager")
    for number in range(WARM + STEPS):
        if number == WARM:
            before = resource.getrusage(resource.RUSAGE_SELF)
        step(episodes.batch_at(number), seed=number, lr=1e-3, decay=0.9)
        step.look()
    after = resource.getrusage(resource.RUSAGE_SELF)
    count = STEPS * config.batch * config.episode_length
    took = sum(getattr(after, part) - getattr(before, part) for part in ("ru_utime", "ru_stime"))
    return {
        "images_per_cpu_s": count / took,
        "faults_per_image": (after.ru_minflt - before.ru_minflt) / count,
        "peak_gib": after.ru_maxrss / 2**20,
        "T": config.episode_length,
    }


def main(path: Path, rounds: int) -> None:
    """Run all measurements and save the record."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    environment["OMP_NUM_THREADS"] = "1"
    rows = []
    for (preset, model), images in RUNS.items():
        arms = [(False, False), (True, False), (False, True), (True, True)]
        arms = arms if model == "kpp-bits" else arms[:2]
        found: dict[tuple[bool, bool], list[dict[str, Any]]] = {arm: [] for arm in arms}
        for _ in range(rounds):
            for arm in arms:
                words = [preset, model, images, *(int(one) for one in arm)]
                out = subprocess.run(
                    [sys.executable, __file__, *map(str, words)],
                    env=environment,
                    capture_output=True, text=True, check=True,
                ).stdout  # fmt: skip
                found[arm].append(json.loads(out.splitlines()[-1]))
        base = statistics.median(one["images_per_cpu_s"] for one in found[arms[0]])
        for (kept, parts), each in found.items():
            row = {key: statistics.median(one[key] for one in each) for key in each[0]}
            row |= {"preset": preset, "model": model, "images": images, "kept": kept}
            rows.append(row | {"parts": parts, "speed_up": row["images_per_cpu_s"] / base})
            print(rows[-1], flush=True)
    import torch

    from kanerva.provenance import commit, device_name, versions

    about = {
        "schema": 2,
        "kind": "bench",
        "command": f"python benchmarks/cpu_training.py {path} {rounds}",
        "rounds": rounds,
        "steps": STEPS,
        "threads": 1,
        "device": device_name(torch.device("cpu")),
        "commit": commit(),
        "versions": versions(),
    }
    path.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 3:
        preset, model, images, kept, parts = sys.argv[1:]
        print(json.dumps(measure(preset, model, int(images), kept == "1", parts == "1")))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3)
