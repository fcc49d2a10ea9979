"""Beyond the paper: what drawings of a character tell of another drawing of it.

Some drawings of one character are written, and one that was not is scored under that memory, and
under memories of as many drawings of another character. The models never saw such episodes: they
were trained on mixed ones. The references train on sets of one character, so theirs is another
task: SCHA-VAE (Giannone and Winther 2022), Neural Statistician (Edwards and Storkey 2017).
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Float64
from matplotlib.figure import Figure
from torch import Tensor

from kanerva import data
from kanerva.data.splits import load_split
from kanerva.errors import UserError
from kanerva.lab.experiments.sweep import equal_runs
from kanerva.lab.harness import Experiment, Figures, Finding, Lab
from kanerva.memory.heap import Memory
from kanerva.models.base import MemoryModel
from kanerva.pictures import MODEL_COLOURS
from kanerva.presets import preset
from kanerva.seeding import stream

Drawings = Float[Tensor, "N drawings C H W"]  # by character
PerCharacter = Float64[Tensor, " N"]

WRITTEN = (1, 2, 4, 8, 11, 19)  # drawings of a character, as far as it has one more
MOST = 20  # drawings of a character that are used
COMPANY = 8  # images that are scored together: q is used to neighbours of all kinds
AT_ONCE = 32  # characters scored together
REFERENCES = {"SCHA-VAE": 86.0, "Neural Statistician": 94.4}  # nats at 20, about; their protocol
MODELS: dict[str, tuple[str, str | None, int]] = {  # label: model, variant, steps of a quick run
    "kpp generate": ("kpp", "generate", 600),
    "kpp store": ("kpp", None, 600),
    "kpp-paper": ("kpp-paper", None, 400),
    "dkm": ("dkm", None, 400),
    "no-memory": ("no-memory", None, 400),
    "vae": ("vae", None, 400),
}
OFF = 1000  # nats: far beyond anything a model says of what it knows
LINES = {"kpp generate": "-", "kpp store": ":"}


def characters(lab: Lab, count: int | None) -> Drawings:
    """Test characters that have as many drawings as any, 20 at most; one draw of their pixels."""
    config = preset(lab.preset)
    found = load_split(config, "test", lab.data_root)
    if found.labels is None:
        raise UserError(f"{lab.preset} says of no image what it shows: few-shot needs labels")
    labels, counts = found.labels.unique(return_counts=True)
    each = min(MOST, int(counts.max()))
    kept = labels[counts >= each]
    kept = kept[torch.randperm(len(kept), generator=stream("few-shot", lab.preset))][:count]
    if each < 2 or len(kept) < 2:
        raise UserError(f"{lab.preset} has {len(kept)} labels with {each} images: too few")
    chosen = torch.stack([(found.labels == label).nonzero()[:each, 0] for label in kept])
    how = config.data.binarization
    pixels = data.binarize(found.images[chosen.flatten()], how, stream("few-shot", "pixels"))
    return data.to_float(pixels, how != "none").to(lab.device).unflatten(0, chosen.shape)


def shuffle(drawings: Drawings, generator: torch.Generator) -> Drawings:
    """Each character's drawings in an order of their own."""
    order = torch.rand(drawings.shape[:2], generator=generator, device=drawings.device)
    rows = torch.arange(len(drawings), device=drawings.device)[:, None]
    return drawings[rows, order.argsort(dim=1)]


def mix_episodes(targets: Float[Tensor, "N C H W"]) -> Float[Tensor, "N T C H W"]:
    """Each target in the middle of an episode of other characters' targets, as in training."""
    around = torch.arange(COMPANY) - COMPANY // 2
    return targets[(torch.arange(len(targets))[:, None] + around) % len(targets)]


@torch.no_grad()
def score(
    lab: Lab,
    model: MemoryModel,
    targets: Float[Tensor, "N C H W"],
    written: Drawings | None,
    name: int,
) -> PerCharacter:
    """The bound of each target under a memory of its row of `written`; None: an empty memory."""
    episodes, found = mix_episodes(targets), []
    for start in range(0, len(targets), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        images, noise = episodes[part], lab.noise("few-shot", name, start)
        memory: Memory | None = None
        if model.remembers:
            memory = (
                model.empty(len(images))
                if written is None
                else model.write(written[part], generator=lab.noise("write", name, start))
            )
        terms = model.elbo(images, memory, generator=noise)
        found.append(terms.nll_nats[:, COMPANY // 2].double().cpu())
    return torch.cat(found)


def with_error(values: PerCharacter) -> dict[str, float]:
    """Mean over characters, and its standard error."""
    return {
        "mean": float(values.mean()),
        "error": float(values.std() / math.sqrt(len(values))),
    }


def measure(
    lab: Lab, model: MemoryModel, drawings: Drawings, counts: list[int], rounds: int
) -> dict[str, Any]:
    """Bounds on drawings that are not written, for each number that is; `gain` is what the own
    character's memory saves against another's, `over_empty` against an empty one."""
    found: dict[int, list[PerCharacter]] = {count: [] for count in counts}
    empty: list[PerCharacter] = []
    others: dict[int, list[PerCharacter]] = {count: [] for count in counts}
    for number in range(rounds):
        mixed = shuffle(drawings, lab.noise("deal", number))
        targets, rest = mixed[:, 0], mixed[:, 1:]
        empty.append(score(lab, model, targets, None, number))
        for count in counts:
            some = rest[:, :count]
            found[count].append(score(lab, model, targets, some, number))
            others[count].append(score(lab, model, targets, some.roll(1, 0), number))
    nothing = torch.stack(empty).mean(dim=0)
    result: dict[str, Any] = {"empty": with_error(nothing), "written": []}
    for count in counts:
        own = torch.stack(found[count]).mean(dim=0)
        other = torch.stack(others[count]).mean(dim=0)
        result["written"].append(
            {
                "count": count,
                "own": with_error(own),
                "other": with_error(other),
                "gain": with_error(other - own),
                "over_empty": with_error(nothing - own),
            }
        )
    return result


def gains_in_words(name: str, last: dict[str, Any]) -> str:
    """What most drawings save a model: against another character's, and an empty memory."""
    gain, over = last["gain"], last["over_empty"]
    return (
        f"{name} {gain['mean']:+.2f} ± {gain['error']:.2f} "
        f"({over['mean']:+.2f} ± {over['error']:.2f})"
    )


def verdict(figures: Figures) -> str:
    """Which models profit from other drawings of a character."""
    by_model = figures["models"]
    helped, not_helped = [], []
    for name, found in by_model.items():
        if name == "vae":
            continue
        last = found["written"][-1]
        gain, over = last["gain"], last["over_empty"]
        clear = min(gain["mean"] - 2 * gain["error"], over["mean"] - 2 * over["error"]) > 0
        (helped if clear else not_helped).append(gains_in_words(name, last))
    count = next(iter(by_model.values()))["written"][-1]["count"]
    best = min(by_model, key=lambda name: by_model[name]["written"][-1]["own"]["mean"])
    return (
        f"What {count} drawings of a character tell of another, in nats against as many of another "
        f"character (against an empty memory): {'; '.join(helped) or 'nothing to any model'}. "
        + (f"No clear use to {'; '.join(not_helped)}. " if not_helped else "")
        + f"Cheapest there: {best}. All were trained on mixed episodes, and there is no sampler "
        "of one-character episodes here: figures of models so trained are not comparable."
    )


def run(lab: Lab) -> Finding:
    drawings = characters(lab, lab.pick(48, None))
    counts = [count for count in WRITTEN if count < drawings.shape[1]]
    rounds = lab.pick(2, 4)
    by_model = {}
    for label, (name, variant, steps) in MODELS.items():
        # kpp's own run sees as many images, in fewer and larger steps
        model = (lab if name == "kpp" else equal_runs(lab, steps)).trained(
            name, variant, steps=steps
        )
        by_model[label] = measure(lab, model, drawings, counts, rounds)
    figures = {
        "characters": len(drawings),
        "rounds": rounds,
        "written": counts,
        "references": REFERENCES,
        "models": by_model,
    }
    return Finding(figures, table(figures), {"": draw(lab, figures)})


TITLES = {
    "own": "bound of a drawing that is not written, under drawings of its character",
    "gain": "gain: the same under as many drawings of another character, less that",
    "over_empty": "the same under an empty memory, less that",
}


def table(figures: Figures) -> list[str]:
    """Three blocks, a row for each model and a column for each number of drawings."""
    counts = figures["written"]
    lines = [f"{'drawings written':<17}{'none':>9}" + "".join(f"{c:>14}" for c in counts)]
    for key, title in TITLES.items():
        lines.append(title)
        for label, found in figures["models"].items():
            start = f"{found['empty']['mean']:>9.2f}" if key == "own" else f"{'':>9}"
            cells = [nats(row[key]) for row in found["written"]]
            lines.append(f"  {label:<15}{start}" + "".join(f"{cell:>14}" for cell in cells))
    return lines + [
        f"nats per image ± standard error over {figures['characters']} characters, "
        f"{figures['rounds']} drawings of each left out in turn; one seed",
        "in the literature, models trained on sets of one character, another protocol, at 20 (not "
        "comparable):",
        "  " + ", ".join(f"{name} about {cost} nats" for name, cost in REFERENCES.items()),
    ]


def nats(value: dict[str, float]) -> str:
    """With its error; shorter where a model does not know what it sees."""
    mean, error = value["mean"], value["error"]
    known = max(abs(mean), 10 * error) < OFF
    return f"{mean:.2f}±{error:.2f}" if known else f"{mean:.0e}±{error:.0e}"


def draw(lab: Lab, figures: Figures) -> Figure:
    counts = figures["written"]
    figure = Figure(figsize=(15.2, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for label, found in figures["models"].items():
        how = {
            "color": MODEL_COLOURS[label.split()[0]],
            "ls": LINES.get(label, "-"),
            "label": label,
        }
        rows = found["written"]
        for axes, key in ((left, "gain"), (middle, "over_empty"), (right, "own")):
            if label == "vae" and axes is not right:
                continue
            means, errors = ([row[key][part] for row in rows] for part in ("mean", "error"))
            shown = None if axes is right else errors  # characters differ more than models
            axes.errorbar(range(len(counts)), means, yerr=shown, capsize=3, marker="o", **how)
    for axes, title in (
        (left, "gained against another character's drawings"),
        (middle, "gained against an empty memory"),
        (right, "what it costs (its ± is in the table)"),
    ):
        axes.set_xticks(range(len(counts)), [str(count) for count in counts])
        axes.set_xlabel("drawings of its character that are written")
        axes.set_title(title, fontsize=10)
        if max(abs(end) for end in axes.get_ylim()) > OFF:  # a model far off hides the others
            axes.set_yscale("log" if axes is right else "symlog")
        if axes is not right:
            axes.axhline(0, color="black", lw=1)
    left.set_ylabel("nats per drawing that is not written")
    right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(
        f"{lab.preset}: a drawing that is not written; {figures['characters']} unseen characters, "
        "± standard error over them; models trained on mixed episodes",
        fontsize=10,
    )
    return figure


EXPERIMENT = Experiment(
    name="few-shot",
    paper="beyond",
    shows="nats gained on unwritten drawings of a written character",
    claim="A memory of some drawings of a character makes other drawings of it cheaper, the more "
    "the more were written.",
    run=run,
    verdict=verdict,
    quick="about 4 min on two cores",
    full="2 h on a GPU",
    presets=("omniglot",),
)
