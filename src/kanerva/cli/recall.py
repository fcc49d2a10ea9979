"""`kanerva recall`: write images, then read them back from noisy or partial cues."""

from typing import Any, Literal

from kanerva.cli.episode import load_model_and_images, make_picture_parser, save_picture
from kanerva.cli.options import Parser, require_at_least

Cue = Literal[  # the keys of kanerva.evaluation.noise.CUES, which imports torch
    "salt_pepper", "speckle", "poisson", "lower_half_hidden", "clean"
]


def make_parser(words: list[str]) -> Parser:
    parser = make_picture_parser("recall", "Write images, then read them back from damaged cues.")
    parser.add_option("--cue", type=Cue, default="salt_pepper")
    parser.add_option("--steps", type=int, default=10, help="of iterative reading")
    parser.add_option("--save-memory", type=str | None, help="keep the memory in this file")
    parser.add_option("--memory", type=str | None, help="read from this saved memory instead")
    return parser


def run(options: dict[str, Any], words: list[str]) -> int:
    """Write images, read them back, print the pixel error."""
    require_at_least(options, 1, "steps")
    from kanerva.evaluation.noise import make_cue, observed
    from kanerva.memory.heap import Memory
    from kanerva.pictures import sheet
    from kanerva.seeding import stream

    model, images = load_model_and_images(options)
    cue = make_cue(options["cue"], images, stream(options["seed"], "cue", device=model.device))
    if options["memory"]:
        memory = Memory.load(options["memory"]).to(model.device)
    else:
        noise = stream(options["seed"], "write", device=model.device)
        memory = model.write(images, generator=noise)
    if options["save_memory"]:
        memory.save(options["save_memory"])
    steps, seen = options["steps"], observed(options["cue"], images)
    recalled = model.recall(memory, cue, steps=steps, observed=seen)
    asked = "asked for" if options["memory"] else "written"
    shown = [(f"step {n}", recalled[n - 1]) for n in sorted({1, steps})]
    parts = [(asked, images), (f"cue: {options['cue'].replace('_', ' ')}", cue)]
    parts += [(f"recalled, {name}", pictures) for name, pictures in shown]
    save_picture(sheet(parts, columns=min(len(images), 16)), options, "recall.png")
    errors = [f"{name} {(p - images).square().mean():.4f}" for name, p in [("cue", cue), *shown]]
    print(f"mean squared pixel error against what was {asked}: {', '.join(errors)}")
    return 0
