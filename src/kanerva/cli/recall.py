"""`kanerva recall`: write images, then read them back from noisy or partial cues."""

from typing import TYPE_CHECKING, Any, Literal, cast

from kanerva.cli.episode import (
    load_model_and_images,
    make_picture_parser,
    read_back,
    save_picture,
    write_memory,
)
from kanerva.cli.options import Parser, require_at_least

if TYPE_CHECKING:
    from torch import Tensor

    from kanerva.memory.heap import Memory
    from kanerva.models.kpp import Kpp

FEW = 8  # up to this many cues, print a line for each
Cue = Literal[  # the keys of kanerva.evaluation.noise.CUES, which imports torch
    "salt_pepper", "speckle", "poisson", "lower_half_hidden", "clean"
]


def make_parser(words: list[str]) -> Parser:
    parser = make_picture_parser("recall", "Write images, then read them back from damaged cues.")
    parser.add_option("--cue", type=Cue, default="salt_pepper", help="how cues are damaged")
    parser.add_option("--steps", type=int, default=10, help="steps of iterative reading")
    parser.add_option("--save-memory", type=str | None, help="save the memory to this file")
    parser.add_option("--memory", type=str | None, help="read from this saved memory instead")
    return parser


def run(options: dict[str, Any], words: list[str]) -> int:
    """Write images, read them back, print the pixel error."""
    require_at_least(options, 1, "steps")
    from kanerva.memory.heap import Memory
    from kanerva.pictures import sheet

    model, images = load_model_and_images(options)
    if options["memory"]:
        memory = Memory.load(options["memory"], model).to(model.device)
        if model.has_blocks and memory.owners is not None:  # it may have more cells than the model
            model = model.with_capacity(memory.capacity)
    else:
        memory = write_memory(model, images, options)
    if options["save_memory"]:
        memory.save(options["save_memory"])
    shown, _ = read_back(model, memory, images, options["cue"], options)
    answers, held = [], [True] * len(images)
    if model.has_blocks:
        shown, answers, held = answer(cast("Kpp", model), memory, images, options, shown)
    origin = "asked for" if options["memory"] else "written"
    save_picture(sheet([(origin, images), *shown], min(len(images), 16)), options, "recall.png")
    for line in answers:
        print(line)
    if any(held):  # the others are left blank
        names = ["cue", *(f"step {step}" for step in sorted({1, options["steps"]}))]
        errors = [float((picture - images)[held].square().mean()) for _, picture in shown]
        listed = ", ".join(f"{name} {e:.4f}" for name, e in zip(names, errors, strict=True))
        print(f"mean squared pixel error against what was {origin}: {listed}")
    return 0


def answer(
    model: "Kpp",
    memory: "Memory",
    images: "Tensor",
    options: dict[str, Any],
    shown: "list[tuple[str, Tensor]]",
) -> "tuple[list[tuple[str, Tensor]], list[str], list[bool]]":
    """Search the memory for each cue. Return the pictures, blank for cues that are not held; lines
    that name what each cue shows, with probabilities; and which cues are held."""
    import torch

    from kanerva.evaluation.noise import observed

    label, cue = shown[0]
    found = model.find(memory, cue, observed=observed(options["cue"], images))
    assert isinstance(found, list)
    absent = [hits.none > 0.5 for hits in found]
    lines = []
    for number, hits in enumerate(found if len(found) <= FEW else []):
        result = f"not held (probability {hits.none:.3f})"
        if not absent[number]:
            result = f"handle {hits[0].id} (probability {hits[0].probability:.3f})"
        lines.append(f"cue {number}: {result}")
    lines.append(f"{len(cue) - sum(absent)} of {len(cue)} cues found, {sum(absent)} not held")
    blank = torch.tensor(absent, device=cue.device)[:, None, None, None]
    pictures = [(name, picture.masked_fill(blank, 0.5)) for name, picture in shown[1:]]
    return [(label, cue), *pictures], lines, [not gone for gone in absent]
