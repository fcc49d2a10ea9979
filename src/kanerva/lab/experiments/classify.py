"""Beyond the paper: which character a drawing is of, by likelihood alone.

A memory for each of some unseen characters, one drawing or five written into each; a further
drawing belongs to the memory under which it costs least as an image that is new. Nothing is trained
for this. Beside it the nearest drawing, pixel by pixel.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kanerva.errors import UserError
from kanerva.evaluation.report import columns
from kanerva.lab.experiments.few_shot import Drawings, characters
from kanerva.lab.experiments.measures import estimate
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.models.kpp_bits import KppBits

TASKS = ((5, 1), (5, 5), (20, 1), (20, 5))  # characters to choose from, drawings of each
AT_ONCE = 64  # characters whose drawings are written together
WANTED = {(5, 1): 0.88, (20, 1): 0.7}


class Written:
    """Every drawing as a memory would hold it, whole: read in any company without writing again."""

    def __init__(self, model: KppBits, drawings: Drawings) -> None:
        self.model, self.drawings = model, drawings
        blocks, features = [], []
        for part in drawings.split(AT_ONCE):
            features.append(model.encoder(part))
            blocks.append(model.blocks(part, features[-1]))
        self.blocks, self.features = torch.cat(blocks), torch.cat(features)

    def score(
        self, written: Int[Tensor, "ways shots 2"], targets: Int[Tensor, "ways 2"]
    ) -> Float[Tensor, "ways ways"]:
        """ln p(target | memory), a row for each memory; pairs say character and drawing."""
        model, at = self.model, written.unbind(-1)
        whole = torch.ones(written.shape[:2], dtype=torch.bool, device=model.device)
        kin = model._ask_kin(self.blocks[at], self.features[at], whole, whole)
        images = self.drawings[targets.unbind(-1)].expand(len(written), -1, -1, -1, -1)
        return model._terms_beside(kin, whole.sum(dim=1), images).log_likelihood


def nearest(
    drawings: Drawings, written: Int[Tensor, "ways shots 2"], targets: Int[Tensor, "ways 2"]
) -> Float[Tensor, "ways ways"]:
    """The same by pixels: less the distance of the nearest drawing written."""
    held, asked = drawings[written.unbind(-1)], drawings[targets.unbind(-1)]
    distances = torch.cdist(asked.flatten(1), held.flatten(0, 1).flatten(1))
    return -distances.unflatten(1, held.shape[:2]).amin(dim=2).T


def deal(
    count: int, each: int, ways: int, shots: int, noise: torch.Generator
) -> tuple[Int[Tensor, "ways shots 2"], Int[Tensor, "ways 2"]]:
    """Some characters at random, of each some drawings to write and another to ask for."""
    device = noise.device
    chosen = torch.randperm(count, generator=noise, device=device)[:ways]
    order = torch.rand(ways, each, generator=noise, device=device).argsort(dim=1)[:, : shots + 1]
    pairs = torch.stack([chosen[:, None].expand_as(order), order], dim=-1)
    return pairs[:, :shots], pairs[:, shots]


def measure(
    lab: Lab, model: KppBits, drawings: Drawings, tasks: int, kinds: tuple[tuple[int, int], ...]
) -> list[dict[str, Any]]:
    """Shares of drawings that were given to their own character's memory."""
    held, rows = Written(model, drawings), []
    count, each = drawings.shape[:2]
    for ways, shots in kinds:
        noise, shares = lab.noise("classify", ways, shots), {"kpp-bits": [], "nearest": []}
        for _ in range(tasks):
            written, targets = deal(count, each, ways, shots, noise)
            scores = {
                "kpp-bits": held.score(written, targets),
                "nearest": nearest(drawings, written, targets),
            }
            own = torch.arange(ways, device=drawings.device)
            for name, score in scores.items():
                shares[name].append((score.argmax(dim=0) == own).double().mean().cpu())
        found = {name: estimate(torch.stack(values), "error") for name, values in shares.items()}
        rows.append({"ways": ways, "shots": shots, "tasks": tasks} | found)
        lab.say(f"{ways} characters, {shots} drawings: {found['kpp-bits']['mean']:.1%}")
    return rows


@torch.no_grad()
def run(lab: Lab) -> Finding:
    model = lab.trained("kpp-bits")
    if not isinstance(model, KppBits):
        raise UserError("classify needs a model that reads for what is new")
    drawings = characters(lab, lab.pick(24, None))
    kinds = tuple(kind for kind in TASKS if kind[0] <= len(drawings))
    rows = measure(lab, model, drawings, lab.pick(10, 1000), kinds)
    figures: Figures = {"characters": len(drawings), "rows": rows}
    return Finding(figures, table(figures))


def table(figures: Figures) -> list[str]:
    """A row for each kind of task."""
    rows = [["characters", "drawings of each", "kpp-bits", "nearest by pixels"]]
    for row in figures["rows"]:
        cells = [f"{row[n]['mean']:.1%} ± {row[n]['error']:.1%}" for n in ("kpp-bits", "nearest")]
        rows.append([str(row["ways"]), str(row["shots"]), *cells])
    tasks = figures["rows"][0]["tasks"]
    return [
        *columns(rows, left=0).splitlines(),
        f"share of drawings given to their own character, ± standard error over {tasks} tasks; "
        f"characters at random from {figures['characters']}",
        "of unseen alphabets, one further drawing of each asked for; pixels sampled once; one seed",
    ]


def verdict(figures: Figures) -> str:
    """Whether likelihood alone tells characters apart."""
    rows = {(row["ways"], row["shots"]): row for row in figures["rows"]}
    said = []
    for kind, wanted in WANTED.items():
        if kind in rows:
            mean, near = (rows[kind][name]["mean"] for name in ("kpp-bits", "nearest"))
            hoped = "as hoped" if mean >= wanted else f"below the {wanted:.0%} hoped for"
            said.append(f"of {kind[0]}, one drawing each, {mean:.1%} ({hoped}; nearest {near:.1%})")
    return f"A drawing goes to its own character: {'; '.join(said)}."


ABOUT = About(
    paper="beyond",
    shows="characters told apart by what a memory makes cheap",
    claim="A character's memory explains its own drawings best, so that memories classify without "
    "being trained to.",
    quick="about 3 min on two cores",
    full="minutes on a GPU",
    presets=("omniglot",),
)
