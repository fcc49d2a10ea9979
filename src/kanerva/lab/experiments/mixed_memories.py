"""Beyond the paper: does a memory of many characters help with new drawings of them?

A memory holds a few drawings of each of many unseen characters. Another drawing of one of them is
scored as new. No label is given: which blocks are read together depends on the memory alone. To
compare: an empty memory; the latest 32 blocks read together, not in groups; and a memory of the
drawing's own character only, which a label would have to name. Drawings of characters that are not
in the memory show what a large memory costs them.
"""

from typing import Any

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from kanerva.errors import UserError
from kanerva.evaluation.report import columns
from kanerva.lab.experiments.characters import Pairs, Written, characters
from kanerva.lab.experiments.measures import estimate
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.models.kpp_bits import KppBits
from kanerva.models.reads_kin import Kin

Others = Int[Tensor, "N 1 2"]  # (character, drawing), one drawing of each of N other characters

SIZES = ((20, 2), (20, 5), (50, 5))  # characters in a memory, drawings of each
QUICK = ((8, 5),)
LATEST = 32
HOW = {  # score: its title in the table
    "groups": "groups",
    "together": f"latest {LATEST} together",
    "own": "own character only",
    "unrelated": "character not in memory",
}


def deal(held: Written, size: tuple[int, int], noise: torch.Generator) -> tuple[Pairs, Others]:
    """Pairs (character, drawing) of a random memory, a row for each character: those to write,
    then one more. After them as many other characters, one drawing each."""
    many, each = size
    count, most = held.drawings.shape[:2]
    if 2 * many > count or each >= most:
        raise UserError(f"{count} characters of {most} drawings are too few for {many} x {each}")
    device = held.drawings.device
    chosen = torch.randperm(count, generator=noise, device=device)[: 2 * many, None]
    order = torch.rand(2 * many, most, generator=noise, device=device).argsort(dim=1)
    pairs = torch.stack([chosen.expand(-1, each + 1), order[:, : each + 1]], dim=-1)
    return pairs[:many], pairs[many:, :1]


def score(
    held: Written, own: Pairs, others: Others, noise: torch.Generator
) -> dict[str, Float64[Tensor, " N"]]:
    """Nats of each character's next drawing, the key included; of `unrelated`, of the others'."""
    model, written = held.model, own[:, :-1]
    targets, strangers = (held.drawings[pairs[:, -1].unbind(-1)] for pairs in (own, others))
    order = torch.randperm(len(written) * written.shape[1], generator=noise, device=noise.device)
    memory = written.flatten(0, 1)[None]
    latest = memory[:, order[-LATEST:]]
    asked = {
        "groups": (memory, targets[None]),
        "own": (written, targets[:, None]),
        "unrelated": (memory, strangers[None]),
    }
    said = {name: held.say(*each) for name, each in asked.items()}
    together = held.read(latest)[:, None].expand(len(targets), -1, -1, -1, -1)
    said["together"] = Kin(together, 1, said["groups"].held)
    found = {}
    for name, kin in said.items():
        images = (strangers if name == "unrelated" else targets)[:, None]
        found[name] = model.terms_beside(kin, images).nll_nats[:, 0].double().cpu()
        found[f"{name} empty"] = -model.log_alone(images)[:, 0].double().cpu()
    return found


@torch.no_grad()
def run(lab: Lab) -> Finding:
    model = lab.trained("kpp-bits")
    if not isinstance(model, KppBits):
        raise UserError("mixed-memories needs a model that reads kin for unwritten images")
    held = Written(model, characters(lab, lab.pick(48, None))[0])
    rows: list[dict[str, Any]] = []
    for many, each in lab.pick(QUICK, SIZES):
        noise = lab.noise("mixed-memories", many, each)
        parts: dict[str, list[Tensor]] = {}
        for _ in range(lab.pick(4, 20)):
            found = score(held, *deal(held, (many, each), noise), noise)
            for name in HOW:
                parts.setdefault(name, []).append((found[name] - found[f"{name} empty"]).mean())
            parts.setdefault("empty", []).append(found["groups empty"].mean())
        row: dict[str, Any] = {"characters": many, "each": each, "memories": len(parts["own"])}
        row |= {name: estimate(torch.stack(each), "error") for name, each in parts.items()}
        rows.append(row)
        lab.say(f"{many} characters, {each} drawings of each: {row['groups']['mean']:+.2f} nats")
    figures: Figures = {"characters": len(held.drawings), "rows": rows}
    return Finding(figures, table(figures))


def table(figures: Figures) -> list[str]:
    """A row for each kind of memory."""
    rows = [["characters", "drawings of each", "empty", *HOW.values()]]
    for row in figures["rows"]:
        cells = [f"{row[n]['mean']:+.2f} ± {row[n]['error']:.2f}" for n in HOW]
        rows.append(
            [str(row["characters"]), str(row["each"]), f"{row['empty']['mean']:.2f}", *cells]
        )
    return [
        *columns(rows, left=0).splitlines(),
        "nats of a drawing that is not written, the key included, less those of an empty memory; "
        "below zero: the memory helps",
        f"± standard error over {figures['rows'][0]['memories']} memories; one seed; "
        f"{figures['characters']} characters of unseen alphabets; pixels sampled once",
        "own character only: a memory without the other characters, so the choice is not charged",
    ]


def verdict(figures: Figures) -> str:
    """Whether a mixed memory helps."""
    said = []
    for row in figures["rows"]:
        found = row["groups"]
        clear = abs(found["mean"]) > 2 * found["error"]
        helps = ("helps" if found["mean"] < 0 else "costs") if clear else "makes no difference"
        together, own = row["together"]["mean"], row["own"]["mean"]
        said.append(
            f"{row['characters']} characters, {row['each']} drawings of each: {helps} "
            f"({found['mean']:+.2f} ± {found['error']:.2f} nats; latest {LATEST} together "
            f"{together:+.2f}, own character only {own:+.2f})"
        )
    return f"A memory of many characters, for a new drawing of one of them: {'; '.join(said)}."


ABOUT = About(
    paper="beyond",
    shows="nats gained on unwritten drawings in a memory of many characters",
    claim="A memory of many characters makes new drawings of them cheaper, and nobody says of "
    "which one they are.",
    quick="about 5 min on two cores",
    full="15 min on two cores with the model of the package",
    presets=("omniglot",),
)
