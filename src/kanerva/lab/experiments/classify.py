"""Beyond the paper: classify drawings of characters by likelihood alone.

Each of a few unseen characters has a memory with one or five of its drawings. A new drawing is
assigned to the memory under which it is most likely as an unwritten image. Nothing is trained for
this. The baseline is the nearest drawing in pixels. The characters of a task are chosen from all,
or from one alphabet, where they look more alike.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kanerva.data.omniglot import alphabets_of
from kanerva.errors import UserError
from kanerva.evaluation.report import columns
from kanerva.lab.experiments.characters import Drawings, Written, characters
from kanerva.lab.experiments.measures import estimate
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.models.kpp_bits import KppBits

TASKS = ((5, 1), (5, 5), (20, 1), (20, 5))  # characters to choose from, drawings of each
AT_ONCE_SCORED = 6400  # pairs of memory and drawing that are scored together
ONE_WAY, BOTH_WAYS, NEAREST = "kpp-bits", "both ways", "nearest"
ALL, WITHIN = "all characters", "one alphabet"  # where the characters of a task come from
WANTED = {(5, 1): 0.88, (20, 1): 0.7}


def score(
    held: Written,
    written: Int[Tensor, "tasks ways shots 2"],
    targets: Int[Tensor, "tasks ways 2"],
) -> dict[str, Float[Tensor, "tasks ways ways"]]:
    """The scores of targets, one column each, in every memory, one row each.

    `kpp-bits` is ln p(target | memory, related to what is stored). The probability of being related
    is the same for each memory, so it is left out. `both ways` adds ln p(drawings | memory of the
    target alone) - ln p(drawings): the evidence that both show one character, predicted in the
    other direction (as in Lake et al., 2015).
    """
    model, (ways, shots) = held.model, written.shape[1:3]
    drawings = held.drawings
    kin = held.read(written.flatten(0, 1))
    asked = drawings[targets.unbind(-1)].repeat_interleave(ways, dim=0)
    forth = model.log_like(kin, asked).unflatten(0, (-1, ways))
    known = drawings[written.flatten(1, 2).unbind(-1)]  # (tasks, ways * shots, ...)
    alone = model.log_alone(known)
    kin = held.read(targets.flatten(0, 1)[:, None])
    back = model.log_like(kin, known.repeat_interleave(ways, dim=0)).unflatten(0, (-1, ways))
    gained = (back - alone[:, None]).unflatten(-1, (ways, shots)).mean(dim=-1)
    return {ONE_WAY: forth, BOTH_WAYS: forth + gained.mT}


def nearest(
    drawings: Drawings,
    written: Int[Tensor, "tasks ways shots 2"],
    targets: Int[Tensor, "tasks ways 2"],
) -> Float[Tensor, "tasks ways ways"]:
    """The baseline's score: the negative pixel distance to the nearest written drawing."""
    held, wanted = drawings[written.unbind(-1)], drawings[targets.unbind(-1)]
    distances = torch.cdist(wanted.flatten(2), held.flatten(1, 2).flatten(2))
    return -distances.unflatten(2, held.shape[1:3]).amin(dim=3).mT


def deal(
    groups: Int[Tensor, " characters"],
    each: int,
    kind: tuple[int, int],
    tasks: int,
    noise: torch.Generator,
) -> tuple[Int[Tensor, "tasks ways shots 2"], Int[Tensor, "tasks ways 2"]]:
    """Sample tasks. Each task has random characters of one random group. Each character has some
    drawings to write and one more to classify."""
    device, (ways, shots) = noise.device, kind
    sizes = groups.to(device).bincount()
    large = (sizes >= ways).nonzero()[:, 0]
    group = large[torch.randint(len(large), (tasks,), generator=noise, device=device)]
    chance = torch.rand(tasks, len(groups), generator=noise, device=device)
    chance = chance.masked_fill(groups.to(device) != group[:, None], 2)
    chosen = chance.argsort(dim=1)[:, :ways, None]
    order = torch.rand(tasks, ways, each, generator=noise, device=device).argsort(dim=2)
    pairs = torch.stack([chosen.expand(-1, -1, shots + 1), order[..., : shots + 1]], dim=-1)
    return pairs[:, :, :shots], pairs[:, :, shots]


def measure(
    lab: Lab,
    model: KppBits,
    drawings: Drawings,
    tasks: int,
    kinds: tuple[tuple[int, int], ...],
    groups: dict[str, Int[Tensor, " characters"]],
) -> list[dict[str, Any]]:
    """The share of drawings assigned to their own character: for each kind of task, with
    characters from each of `groups`."""
    held, rows = Written(model, drawings), []
    for name, group in groups.items():
        for ways, shots in kinds:
            noise = lab.noise("classify", name, ways, shots)
            written, targets = deal(group, drawings.shape[1], (ways, shots), tasks, noise)
            shares: dict[str, list[Tensor]] = {by: [] for by in (ONE_WAY, BOTH_WAYS, NEAREST)}
            chunk = max(1, AT_ONCE_SCORED // (ways**2 * shots))  # tasks scored together
            for pair in zip(written.split(chunk), targets.split(chunk), strict=True):
                scores = score(held, *pair) | {NEAREST: nearest(drawings, *pair)}
                own = torch.arange(ways, device=drawings.device)
                for by, values in scores.items():
                    shares[by].append((values.argmax(dim=1) == own).double().mean(dim=1).cpu())
            found = {by: estimate(torch.cat(parts), "error") for by, parts in shares.items()}
            rows.append({"from": name, "ways": ways, "shots": shots, "tasks": tasks} | found)
            lab.say(f"{ways} of {name}, {shots} drawings: {found[ONE_WAY]['mean']:.1%}")
    return rows


@torch.no_grad()
def run(lab: Lab) -> Finding:
    model = lab.trained("kpp-bits")
    if not isinstance(model, KppBits):
        raise UserError("classify needs a model that reads kin for unwritten images")
    drawings, labels = characters(lab, lab.pick(24, None))
    kinds = tuple(kind for kind in TASKS if kind[0] <= len(drawings))
    groups = {ALL: torch.zeros_like(labels)}
    if lab.preset == "omniglot":
        groups[WITHIN] = alphabets_of(labels)
    rows = measure(lab, model, drawings, lab.pick(10, 1000), kinds, groups)
    figures: Figures = {"characters": len(drawings), "rows": rows}
    return Finding(figures, table(figures))


def table(figures: Figures) -> list[str]:
    """A row for each kind of task."""
    by = (ONE_WAY, BOTH_WAYS, NEAREST)
    titles = (ONE_WAY, BOTH_WAYS, "nearest by pixels")
    rows = [["chosen from", "characters", "drawings of each", *titles]]
    for row in figures["rows"]:
        cells = [f"{row[n]['mean']:.1%} ± {row[n]['error']:.1%}" for n in by]
        rows.append([row["from"], str(row["ways"]), str(row["shots"]), *cells])
    tasks = figures["rows"][0]["tasks"]
    return [
        *columns(rows, left=1).splitlines(),
        f"share of drawings given to their own character, ± standard error over {tasks} tasks; "
        f"{figures['characters']} characters",
        "of unseen alphabets, one further drawing of each asked for; pixels sampled once; one seed",
        "both ways: and the written drawings, given the one asked for",
    ]


def verdict(figures: Figures) -> str:
    """Whether likelihood alone distinguishes characters."""
    rows = {(row["ways"], row["shots"]): row for row in figures["rows"] if row["from"] == ALL}
    said = []
    for kind, wanted in WANTED.items():
        if kind in rows:
            mean, near = (rows[kind][name]["mean"] for name in ("kpp-bits", "nearest"))
            hoped = "as hoped" if mean >= wanted else f"below the {wanted:.0%} hoped for"
            said.append(f"of {kind[0]}, one drawing each, {mean:.1%} ({hoped}; nearest {near:.1%})")
    return f"A drawing goes to its own character: {'; '.join(said)}."


ABOUT = About(
    paper="beyond",
    shows="characters classified by what a memory makes cheap",
    claim="A character's memory explains its own drawings best, so that memories classify, though "
    "the model is trained on episodes of one character and not to classify.",
    quick="about 3 min on two cores",
    full="minutes on a GPU",
    presets=("omniglot",),
)
