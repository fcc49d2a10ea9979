"""Beyond the paper: does a memory of drawings of a character help with another drawing of it?

Some drawings of a character are written. Another drawing of it is scored with that memory, and with
a memory of as many drawings of another character. All models are trained on the same kind of
episodes, many of them of a single character. Test characters do not occur in training.
`kpp-bits-empty` has the networks of `kpp-bits`, but nothing is ever written: its bound is what a
memory has to beat. One `kpp-bits` is trained without labels: in place of other drawings of a
character it sees copies of one image.

`kpp-bits` scores a drawing as new, and reads drawings that are stored as a whole, as images. Its
gists do not matter then, so they are not refined. On a CPU the full protocol measures the models
that are trained already, and names the others: to train them would take days.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kanerva.lab.experiments import sweep
from kanerva.lab.experiments.characters import AT_ONCE, Drawings, Pairs, Written, characters
from kanerva.lab.experiments.few_shot_views import COPIES, EMPTY, INDEPENDENT, OURS, draw, table
from kanerva.lab.experiments.measures import estimate
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.memory.heap import Memory
from kanerva.models.base import MemoryModel
from kanerva.models.kpp_bits import KppBits
from kanerva.models.kpp_bits_empty import KppBitsEmpty
from kanerva.models.terms import ElboTerms
from kanerva.plain_files import read_json
from kanerva.seeding import Noise

Bounds = dict[tuple[str, int], Float64[Tensor, "N 2"]]  # by decoder and drawings written
PerCharacter = Float64[Tensor, " N"]
Scores = dict[Any, PerCharacter]  # keys: "empty", (count, "own"), (count, "other")

WRITTEN = (1, 2, 5, 10, 19)  # drawings to write; a character needs one more to score
COMPANY = 8  # T of scored episodes: most posteriors were trained on mixed episodes
SEEDS = 3  # of our models in the full protocol; other models have one
MODELS = (OURS, EMPTY, COPIES, "dkm", "no-memory", "vae")
OTHERS = "strong"  # the variant of models that are not ours
COMPARED = ("characters", "rounds", "written", "others")  # the same in records of one protocol
OLDER = "An older record: its other models have the paper's optimiser and saw fewer images."
BY_SEED = ("own", "over_empty")  # scores that a record keeps for each seed


def shuffle(drawings: Drawings, generator: torch.Generator) -> Pairs:
    """Indices that shuffle each character's drawings separately."""
    order = torch.rand(drawings.shape[:2], generator=generator, device=drawings.device)
    rows = torch.arange(len(drawings), device=drawings.device)[:, None]
    return torch.stack([rows.expand(order.shape), order.argsort(dim=1)], dim=-1)


def options(lab: Lab, model: str) -> dict[str, Any]:
    """Changes to a model's preset: all models are trained on as many episodes of the same kind as
    `kpp-bits`, those of the paper by their variant `strong`."""
    if model == COPIES:
        return {"data": {"augment": "copies"}}
    if model in (OURS, EMPTY):
        return {}
    ours = lab.config(OURS)
    same = {name: getattr(ours, name) for name in ("data", "episode_length", "batch", "steps")}
    return {"variant": OTHERS} | same


def mix_episodes(
    targets: Float[Tensor, "N C H W"], company: int = COMPANY
) -> Float[Tensor, "N T C H W"]:
    """Put each target in the middle of an episode of other characters' targets."""
    around = torch.arange(company) - company // 2
    return targets[(torch.arange(len(targets))[:, None] + around) % len(targets)]


def memories(
    model: MemoryModel, written: Drawings, counts: list[int], noise: Noise
) -> Iterator[tuple[int, Memory | None]]:
    """Yield an empty memory, then for each count a memory of each row's first `count` drawings."""
    yield 0, model.empty(len(written)) if model.remembers else None
    for count in counts:
        few = written[:, :count]
        yield count, model.write(few, generator=noise) if model.remembers else None


@torch.no_grad()
def score(
    lab: Lab,
    model: MemoryModel,
    targets: Float[Tensor, "N C H W"],
    written: Drawings,
    counts: list[int],
    name: int,
) -> Bounds:
    """Score two targets with each row's memory: the row's own, and that of the row before."""
    is_empty = isinstance(model, KppBitsEmpty)
    company = 2 if is_empty else COMPANY  # with a pixel code, q(z|x) sees one image at a time
    episodes, middle, found = mix_episodes(targets, company), company // 2, {}
    for start in range(0, len(targets), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        images, how = episodes[part], lab.noise("write", name, start)
        for count, memory in memories(model, written[part], counts, how):
            noise = lab.noise("few-shot", name, start)
            terms = {"": model.elbo(images, memory, generator=noise)}
            if is_empty:
                terms[INDEPENDENT] = model.independent_terms(images, generator=noise)
            collect(found, count, terms, [middle, middle - 1])
    return {key: torch.cat(parts) for key, parts in found.items()}


@torch.no_grad()
def score_kin(lab: Lab, held: Written, mixed: Pairs, counts: list[int], name: int) -> Bounds:
    """The same for `kpp-bits`. A row's first drawing is its target, the next are written."""
    model, found = held.model, {}
    episodes = mix_episodes(held.drawings[mixed[:, 0].unbind(-1)], 2)
    for start in range(0, len(mixed), AT_ONCE):
        images = episodes[start : start + AT_ONCE]
        for count in (0, *counts):
            noise = lab.noise("few-shot", name, start)
            written = mixed[start : start + AT_ONCE, 1 : 1 + max(count, 1)]
            kin, one = held.say(written, images), images.flatten(0, 1)[:, None]
            if not count:  # what an empty memory says does not matter
                kin = replace(kin, held=torch.zeros_like(kin.held))
            terms = {
                "": model.terms_beside(kin, one),
                INDEPENDENT: model.independent_beside(kin, one, noise),
            }
            shape = tuple(images.shape[:2])
            terms = {decoder: each.view(shape) for decoder, each in terms.items()}
            collect(found, count, terms, [1, 0])
    return {key: torch.cat(parts) for key, parts in found.items()}


def collect(
    into: dict[tuple[str, int], list[Tensor]],
    count: int,
    terms: dict[str, ElboTerms],
    at: list[int],
) -> None:
    """Append the bounds of the images `at` these positions."""
    for decoder, each in terms.items():
        into.setdefault((decoder, count), []).append(each.nll_nats[:, at].double().cpu())


def measure(
    lab: Lab, model: MemoryModel, drawings: Drawings, counts: list[int], rounds: int
) -> dict[str, Scores]:
    """Bounds on unwritten drawings, averaged over those of a character.

    They are scored with an empty memory and, for each number of written drawings, with a memory of
    their own character and of another. The result maps a decoder to scores; "" is the model's
    default decoder.
    """
    scores: dict[str, dict[Any, list[PerCharacter]]] = {}
    held = Written(model, drawings) if isinstance(model, KppBits) else None
    for number in range(rounds):
        mixed = shuffle(drawings, lab.noise("deal", number))
        if held is not None:
            found = score_kin(lab, held, mixed, counts, number)
        else:
            images = drawings[mixed.unbind(-1)]
            found = score(lab, model, images[:, 0], images[:, 1:], counts, number)
        for (decoder, count), nats in found.items():
            own, before = nats.unbind(dim=1)
            other = before.roll(-1) if model.remembers else own
            into = scores.setdefault(decoder, {})
            named = {(count, "own"): own, (count, "other"): other} if count else {"empty": own}
            for name, value in named.items():
                into.setdefault(name, []).append(value)
    return {
        decoder: {name: torch.stack(each).mean(dim=0) for name, each in found.items()}
        for decoder, found in scores.items()
    }


def summarise(seeds: list[Scores], empty: list[PerCharacter], counts: list[int]) -> dict[str, Any]:
    """Summarise bounds with a memory of the own character, of another, and with an empty one.

    `gain` is other minus own. `over_empty` is empty minus own. `other_over` is other minus empty.
    All are nats per drawing, averaged over seeds; errors are over characters.
    """
    start = torch.stack([each["empty"] for each in seeds]).mean(dim=0)
    result: dict[str, Any] = {"empty": estimate(start, "error"), "written": []}
    for count in counts:
        own, other = (
            torch.stack([each[count, whose] for each in seeds]) for whose in ("own", "other")
        )
        nothing = torch.stack(empty)
        values = {"own": own, "other": other, "gain": other - own}
        values |= {"over_empty": nothing - own, "other_over": other - nothing}
        row: dict[str, Any] = {
            name: estimate(value.mean(dim=0), "error") for name, value in values.items()
        }
        by_seed = {f"{name}_by_seed": values[name].mean(dim=1).tolist() for name in BY_SEED}
        result["written"].append({"count": count} | row | by_seed)
    return result


@torch.no_grad()
def block_bits(model: MemoryModel, drawings: Drawings) -> float:
    """Average bits of a drawing that is written whole."""
    memory = model.write(drawings[:AT_ONCE, :1])
    return float(torch.cat([memory[b].bits for b in range(len(memory.map))]).mean())


def verdict(figures: Figures) -> str:
    """Which models benefit from other drawings of a character."""
    last = {name: found["written"][-1] for name, found in figures["models"].items()}
    helped, not_helped = [], []
    for name, row in last.items():
        if name == "vae":
            continue
        gain, over = row["gain"], row["over_empty"]
        clear = min(one["mean"] - 2 * one["error"] for one in (gain, over)) > 0
        words = [f"{one['mean']:+.2f} ± {one['error']:.2f}" for one in (gain, over)]
        (helped if clear else not_helped).append(f"{name} {words[0]} ({words[1]})")
    count = next(iter(last.values()))["count"]
    return (
        f"What {count} drawings of a character tell of another, in nats against as many of another "
        f"character (against an empty memory): {'; '.join(helped) or 'nothing to any model'}. "
        + (f"No clear use to {'; '.join(not_helped)}. " if not_helped else "")
        + ("" if "others" in figures else OLDER)
    )


def is_missing(lab: Lab, name: str) -> bool:
    """Whether a model is left out: not trained yet, and this machine could not train it."""
    if lab.quick or lab.device.type != "cpu" or name in (OURS, EMPTY):
        return False
    return not lab.is_trained(name.split(",")[0], **options(lab, name))


def add_earlier(lab: Lab, figures: Figures) -> None:
    """Take the figures of other models that are missing from the record in results/, if it scored
    the same drawings. Their code and training do not depend on ours."""
    path = sweep.RESULTS / "reproduce" / f"few-shot-{lab.preset}.json"
    names = [name for name in figures["missing"] if name != COPIES]
    if lab.seed or not names or not path.exists():
        return
    record = read_json(path)
    earlier: Figures = record["figures"]
    same = all(earlier.get(key) == figures[key] for key in COMPARED)
    there = [name for name in names if name in earlier["models"]]
    if not (same and there):
        return
    figures["models"] |= {name: earlier["models"][name] for name in there}
    figures["missing"] = [name for name in figures["missing"] if name not in there]
    source = {key: record[key] for key in ("commit", "device")}
    figures["earlier"] = {name: earlier.get("earlier", {}).get(name, source) for name in there}


@torch.no_grad()
def run(lab: Lab) -> Finding:
    drawings = characters(lab, lab.pick(48, None))[0]
    counts = [count for count in WRITTEN if count < drawings.shape[1]]
    rounds, seeds = lab.pick(2, 4), lab.pick(1, SEEDS)
    figures: Figures = {
        "characters": len(drawings),
        "rounds": rounds,
        "written": counts,
        "others": OTHERS,
        "seeds": seeds,
    }
    found: dict[str, list[Scores]] = {}
    figures["missing"] = [name for name in MODELS if is_missing(lab, name)]
    for name in MODELS:
        if name in figures["missing"]:
            continue
        for seed in range(seeds if name in (OURS, EMPTY) else 1):
            real, parts = name.split(",")[0], options(lab, name)
            model = lab.trained(real, seed=lab.seed + seed, **parts)
            lab.say(f"scoring {name}, seed {lab.seed + seed}")
            if name == OURS and not seed:
                figures["bits_per_drawing"] = block_bits(model, drawings)
            written = [] if name == EMPTY else counts
            for decoder, scores in measure(lab, model, drawings, written, rounds).items():
                label = f"{name}, {decoder}" if decoder else name
                found.setdefault(label, []).append(scores)
    figures["models"], figures["empty"] = {}, {}
    for label, each in found.items():
        if EMPTY in label:
            twin = torch.stack([scores["empty"] for scores in each]).mean(dim=0)
            figures["empty"][label.replace(EMPTY, OURS)] = estimate(twin, "error")
            continue
        twin = found[f"{EMPTY}, {INDEPENDENT}" if INDEPENDENT in label else EMPTY]
        source = twin[: len(each)] if OURS in label else each
        empty = [scores["empty"] for scores in source]
        figures["models"][label] = summarise(each, empty, counts)
    add_earlier(lab, figures)
    return Finding(figures, table(figures), draw(lab.preset, figures))


ABOUT = About(
    paper="beyond",
    shows="nats gained on unwritten drawings of a written character",
    claim="A memory of some drawings of a character makes other drawings of it cheaper, the more "
    "the more were written.",
    quick="about 15 min on one core",
    full="2 h on a GPU; trained models, 1 h on two cores",
    presets=("omniglot",),
)
