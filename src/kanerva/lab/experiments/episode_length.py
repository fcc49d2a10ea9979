"""Fig. 10, left (§4.3): the bound against the length T of an episode."""

from kanerva.lab.experiments import sweep
from kanerva.lab.experiments.sweep import Setting
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.lab.paper_figures import EPISODE_LENGTH_STD

LENGTHS = (5, 16, 32, 64)
CELLS = 36  # of kpp's preset; an episode that needs more gets 64, in a map of the same size


def setting(model: str, length: int, lab: Lab) -> Setting:
    """A run at T: as many images a step as at any other."""
    parts: dict = sweep.in_episodes_of(length, lab)
    if model == "kpp" and length > CELLS:
        parts["memory"] = {"capacity": 64}
    return Setting(f"{model} T={length}", model, parts=parts)


def verdict(figures: Figures) -> str:
    """Does T matter? By the deviation and the trend of the means."""
    words = [
        f"{model}'s bound goes from {found['first']:.1f} at the shortest T to {found['last']:.1f} "
        f"at the longest (std over T {found['std']:.2f})"
        for model, found in figures["over_T"].items()
    ]
    return sweep.judge_sweep(
        figures["over_T"]["kpp-paper"],
        EPISODE_LENGTH_STD,
        "As in the paper, T does not matter to kpp-paper",
        "T matters more to kpp-paper",
        words,
    )


def run(lab: Lab) -> Finding:
    lengths = list(lab.pick(LENGTHS[:3], LENGTHS))
    by_model = {
        model: [
            sweep.train_and_score(
                sweep.equal_runs(lab, quick), setting(model, length, lab), sweep.seeds(lab)
            )
            for length in lengths
        ]
        for model, quick in (("kpp-paper", 250), ("kpp", 350))
    }
    over = {model: sweep.over_values(found, "nll_nats") for model, found in by_model.items()}
    figures = {
        "paper_std": EPISODE_LENGTH_STD,
        "T": lengths,
        "entries": by_model,
        "over_T": over,
    }
    picture = sweep.draw_sweep(lab, "episode length T", lengths, by_model)
    return Finding(figures, table(figures), picture)


def table(figures: Figures) -> list[str]:
    lines = []
    for entries in figures["entries"].values():
        lines += [*sweep.rows(entries), ""]
    for model, found in figures["over_T"].items():
        lines.append(
            f"{model}: std of the bound over T {found['std']:.2f}, range {found['range']:.2f} "
            f"nats; the paper's std {EPISODE_LENGTH_STD}"
        )
    longest = figures["T"][-1]
    if longest > CELLS:
        lines.append(f"kpp has {CELLS} cells, and 64 smaller ones at T={longest}, in one map")
    return lines


ABOUT = About(
    paper="Fig. 10, left",
    shows="the bound and its divergences against T",
    claim="The bound does not depend on the length of episodes: trained with T from 5 to 64, it "
    f"varies by one standard deviation of {EPISODE_LENGTH_STD} nats per image.",
    full="3 h on a GPU",
    presets=("mnist",),
)
