"""`kanerva denoise`: write clean images, read them back from cues with each of three noises."""

from typing import TYPE_CHECKING, Any

from kanerva.cli.episode import load_model_and_images, make_picture_parser, save_picture
from kanerva.cli.options import Parser, require_at_least

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_parser(words: list[str]) -> Parser:
    parser = make_picture_parser("denoise", "Write clean images, then clean noisy ones by reading.")
    parser.add_option("--steps", type=int, default=10, help="of iterative reading")
    return parser


def run(options: dict[str, Any], words: list[str]) -> int:
    """Draw what is read from each noise, and the curve of its error."""
    require_at_least(options, 1, "steps")
    from kanerva.evaluation.noise import NOISES, make_cue
    from kanerva.pictures import as_picture, sheet, stacked
    from kanerva.seeding import stream

    model, images = load_model_and_images(options)
    noise = stream(options["seed"], "write", device=model.device)
    memory = model.write(images, generator=noise)
    steps, columns = options["steps"], min(len(images), 16)
    parts, curves = [("written", images[:columns])], {}
    for name in NOISES:
        cue = make_cue(name, images, stream(options["seed"], "cue", name, device=model.device))
        recalled = model.recall(memory, cue, steps=steps)
        label = name.replace("_", " & ")
        parts.append((f"{label}: the cue", cue[:columns]))
        parts += [(f"{label}: step {n}", recalled[n - 1, :columns]) for n in sorted({1, steps})]
        errors = [float((picture - images).square().mean()) for picture in (cue, *recalled)]
        curves[label] = errors
    curve = as_picture(draw_error_curves(curves))
    save_picture(stacked([sheet(parts, columns), curve]), options, "denoise.png")
    for label, errors in curves.items():
        later = ", ".join(f"step {n} {errors[n]:.4f}" for n in sorted({1, steps}))
        print(f"{label}: mean squared pixel error, cue {errors[0]:.4f}, {later}")
    return 0


def draw_error_curves(curves: dict[str, list[float]]) -> "Figure":
    """Pixel error against reading steps; step 0 is the cue."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.2), layout="constrained")
    axes = figure.subplots()
    for label, errors in curves.items():
        axes.plot(range(len(errors)), errors, "o-", markersize=4, label=label)
    axes.set_xlabel("steps of reading (0: the cue)")
    axes.set_ylabel("mean squared pixel error")
    axes.set_ylim(bottom=0)
    axes.grid(True, color="#eeeeee")
    axes.legend(frameon=False)
    return figure
