"""Mistakes that users make, and what they are told: run as a script, it prints them.

Each call here is wrong, and each must end in one line that says what to do: a `UserError`, never an
error of torch's or of Python's.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import kanerva
from kanerva.cli import main

IMAGES = torch.bernoulli(
    torch.full((4, 1, 28, 28), 0.2), generator=torch.Generator().manual_seed(0)
)
GREYS = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))


def library() -> dict[str, Callable[[], object]]:
    """Calls, and how they are written."""
    model = kanerva.load("glyphs")
    memory = model.write(IMAGES)
    array, nothing = IMAGES.numpy(), None
    store = kanerva.Store("mistakes.kanerva", model=model)  # in the folder this runs in
    ids = store.add(IMAGES)
    kanerva.Store("other.kanerva", model=kanerva.build(kanerva.preset("glyphs").model).eval())
    bad: dict[str, Callable[..., object]] = {
        "model.write(numpy array)": lambda: model.write(array),
        "model.write(list)": lambda: model.write(list(IMAGES)),
        "model.write(None)": lambda: model.write(nothing),
        "model.write(one image)": lambda: model.write(IMAGES[0]),
        "model.write(uint8)": lambda: model.write((GREYS * 255).byte()),
        "model.write(greys)": lambda: model.write(GREYS),
        "model.write(NaN)": lambda: model.write(IMAGES / 0),
        "model.write(too many)": lambda: model.write(IMAGES.repeat(10, 1, 1, 1)),
        "kanerva.load('glyphs', capacity='many')": lambda: kanerva.load("glyphs", capacity="many"),
        "model.append(None, images)": lambda: model.append(nothing, IMAGES),
        "model.recall(cue, memory)": lambda: model.recall(IMAGES, memory),
        "model.recall(memory, numpy array)": lambda: model.recall(memory, array),
        "model.recall(memory, cue, steps='3')": lambda: model.recall(memory, IMAGES, steps="3"),
        "model.find(memory, numpy array)": lambda: model.find(memory, array[0]),
        "model.find(memory, cue, observed=NaN)": lambda: model.find(
            memory, IMAGES[0], observed=torch.full((28, 28), torch.nan)
        ),
        "model.find(memory, cue, k=0)": lambda: model.find(memory, IMAGES[0], k=0),
        "model.find(memory, cue, prior_none='a')": lambda: model.find(
            memory, IMAGES[0], prior_none="a"
        ),
        "model.find(memory, bytes as floats)": lambda: model.find(memory, (GREYS[0] * 255).round()),
        "model.recall(memory, bytes as floats)": lambda: model.recall(
            memory, (GREYS * 255).round()
        ),
        "store.find(bytes as floats)": lambda: store.find((GREYS[0] * 255).round()),
        "model.find(empty memory, cue).images": lambda: model.find(model.empty(), IMAGES[0]).images,
        "kanerva.show(hits)": lambda: kanerva.show(model.find(memory, IMAGES[0])),
        "model.familiarity(memory, greys)": lambda: model.familiarity(memory, GREYS),
        "model.read(memory, handles='a')": lambda: model.read(memory, handles="a"),
        "model.elbo(images, memory, handles=[0])": lambda: model.elbo(IMAGES, memory, handles=[0]),
        "memory.free('3')": lambda: memory.free("3"),
        "memory.free(1.5)": lambda: memory.free(1.5),
        "model.generate(memory, 6.5)": lambda: model.generate(memory, 6.5),
        "model.generate(memory, 4, generator=0)": lambda: model.generate(memory, 4, generator=0),
        "memory.to('cuda:99')": lambda: memory.to("cuda:99"),
        "kanerva.load('glyphs', device='cuda:99')": lambda: kanerva.load(
            "glyphs", device="cuda:99"
        ),
        "kanerva.load('glyphs', device='vulkan')": lambda: kanerva.load("glyphs", device="vulkan"),
        "kanerva.load('glpyhs')": lambda: kanerva.load("glpyhs"),
        "kanerva.load(None)": lambda: kanerva.load(nothing),
        "kanerva.build('kpp')": lambda: kanerva.build("kpp"),
        "kanerva.Memory.load(None)": lambda: kanerva.Memory.load(nothing),
        "kanerva.Store(None)": lambda: kanerva.Store(nothing),
        "kanerva.Store('missing.kanerva')": lambda: kanerva.Store("missing.kanerva"),
        "store.add(None)": lambda: store.add(nothing),
        "store.add(numpy array)": lambda: store.add(array),
        "store.add(one image)": lambda: store.add(IMAGES[0]),
        "store.add(images, [1, 2, 3, 4])": lambda: store.add(IMAGES, [1, 2, 3, 4]),
        "kanerva.Store(made with a model, opened without)": lambda: kanerva.Store("other.kanerva"),
        "store.find(numpy array)": lambda: store.find(array[0]),
        "store.get('a')": lambda: store.get("a"),
        "store.get(99)": lambda: store.get(99),
        "store.add(images, 'a')": lambda: store.add(IMAGES, "abcd"),
        "kanerva.load('GLYPHS')": lambda: kanerva.load("GLYPHS"),
        "kanerva.prepare(rows of numbers, model)": lambda: kanerva.prepare(
            IMAGES.flatten(1), model
        ),
        "store.free('a')": lambda: store.free("a"),
        "store.free([1, 1])": lambda: store.free([ids[0], ids[0]]),
        "kanerva.prepare(greys above 1, model)": lambda: kanerva.prepare(GREYS * 255, model),
        "kanerva.prepare('photo.png', model)": lambda: kanerva.prepare("photo.png", model),
    }
    return bad


COMMANDS = [
    "recal glyphs",
    "recall glpyhs",
    "recall runs/none",
    "recall glyphs --stepz 3",
    "recall glyphs missing.png",
    "recall glyphs --memory missing.safetensors",
    "memory glyphs --free 99",
    "memory glyphs --free three",
    "train --preset glyph",
    "train",
]


def answers() -> dict[str, str]:
    """What each mistake is told; an error of another kind by its class."""
    said: dict[str, str] = {}
    for name, call in library().items():
        try:
            said[name] = f"nothing: it gave {type(call()).__name__}"
        except kanerva.UserError as error:
            said[name] = str(error)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    for command in COMMANDS:
        lines = io.StringIO()
        with contextlib.redirect_stderr(lines), contextlib.redirect_stdout(lines):
            code = main(command.split())
        text = lines.getvalue().strip()
        said[f"kanerva {command}"] = text if code == 2 else f"exit {code}: {text}"
    return said


def works() -> dict[str, bool]:
    """Calls that look like mistakes and are none."""
    model = kanerva.load("glyphs")
    memory = model.write(IMAGES)
    rest = [
        memory.free(kind).handles for kind in (range(2), torch.tensor([0, 1]), np.array([0, 1]))
    ]
    seen = np.ones((28, 28), dtype=bool)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        out = ["--out", str(Path(folder) / "memory.png")]
        freed = main(["memory", "glyphs", "--free", "3", *out])
        freed_two = main(["memory", "--free", "3,4", "glyphs", *out])
    return {
        "handles as a range, a tensor, an array": rest == [[2, 3]] * 3,
        "a mask as an array": model.recall(memory, IMAGES, observed=seen, steps=1).shape[1] == 4,
        "--free 3, and flags before the run": freed == freed_two == 0,
    }


if __name__ == "__main__":
    told = answers()
    for name, text in told.items():
        print(f"{name:45s} {text}", file=sys.stderr)
    print(json.dumps({"said": told, "works": works()}))
