"""App. D: true images and their reconstructions, for every data set."""

import torch

from kanerva.evaluation.report import columns
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.pictures import sheet

MODELS = ("kpp", "kpp-paper")
MEASURES = {"reconstructed": "reconstructed", "recalled": "recalled", "blank": "blank page"}


@torch.no_grad()
def run(lab: Lab) -> Finding:
    count = 32
    images = lab.images(count)
    parts = [("true, test images", images[:16])]
    figures: Figures = {}
    for name in MODELS:
        model = lab.trained(name)
        made = model.reconstruct(images)
        memory = model.write(images, generator=lab.noise("write", name))
        read = model.recall(memory, images, steps=1)[0]
        figures[name] = {
            "images": count,
            "reconstructed": float((made - images).square().mean()),
            "recalled": float((read - images).square().mean()),
            "blank": float(images.square().mean()),
        }
        parts.append((f"{name}, {model.reconstructed}", made[:16]))
        parts.append((f"{name}, recalled from the memory of all {count}, one step", read[:16]))
    rows = [["mean squared pixel error", *MEASURES.values()]]
    for name, found in figures.items():
        rows.append([name, *(f"{found[what]:.4f}" for what in MEASURES)])
    lines = columns(rows, left=1).splitlines()
    return Finding(figures, lines, sheet(parts, columns=16))


def verdict(figures: Figures) -> str:
    """Whether kpp's recall from memory alone is better than that of the paper's model."""
    ours, theirs = figures["kpp"]["recalled"], figures["kpp-paper"]["recalled"]
    better = "kpp brings them back from memory alone" if ours < theirs else "kpp does NOT do better"
    return (
        f"{better}: error {ours:.4f} against {theirs:.4f} of kpp-paper, whose reconstructions "
        f"({figures['kpp-paper']['reconstructed']:.4f}) are those of its readout's posterior."
    )


ABOUT = About(
    paper="App. D",
    shows="true images over reconstructed ones, every set",
    claim="Reconstructions of test images resemble them on every data set.",
    full="2 min each on a GPU",
    presets=("mnist", "omniglot", "fashion_mnist", "cifar10", "mazes"),
)
