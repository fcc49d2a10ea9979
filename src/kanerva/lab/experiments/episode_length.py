"""Fig. 10, left (§4.3): the bound against the length T of an episode."""

from kanerva.lab.experiments import sweep
from kanerva.lab.experiments.sweep import Setting
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.lab.paper_figures import EPISODE_LENGTH_STD
from kanerva.presets import preset

LENGTHS = (5, 16, 32, 64)
CELLS = 36  # capacity of kpp's preset; longer episodes get 64 cells, in a map of the same size


def setting(model: str, length: int, lab: Lab) -> Setting:
    """The setting of a run at T, with the same number of images per step at every T."""
    parts: dict = sweep.in_episodes_of(length, lab)
    label = f"{model} T={length}"
    if model != "kpp":
        own = preset(lab.preset, model).episode_length
        return sweep.of_paper(label, model, "" if length == own else f"-T{length}", **parts)
    if length > CELLS:
        parts["memory"] = {"capacity": 64}
    return Setting(label, model, parts=parts)


def verdict(figures: Figures) -> str:
    """Whether T matters: the standard deviation and the trend of the bound over T."""
    words = [
        f"{model}'s bound goes from {found['first']:.1f} at the shortest T to {found['last']:.1f} "
        f"at the longest (std over T {found['std']:.2f})"
        for model, found in figures["over_T"].items()
    ]
    likely = figures["likely_over_T"]
    words.append(
        f"its kl_over_T, no bound, goes from {likely['first']:.1f} to {likely['last']:.1f} "
        f"(std {likely['std']:.2f})"
    )
    return sweep.judge_sweep(
        figures["over_T"]["kpp-paper"],
        EPISODE_LENGTH_STD,
        "As in the paper, T does not matter to kpp-paper",
        "T matters more to kpp-paper",
        words,
    )


def run(lab: Lab) -> Finding:
    lengths = list(lab.pick(LENGTHS[:3], LENGTHS))
    by_model = read_all(lab, lengths) or {
        model: [
            sweep.train_and_score(
                sweep.equal_runs(lab, quick), setting(model, length, lab), sweep.seeds(lab, 1)
            )
            for length in lengths
        ]
        for model, quick in (("kpp-paper", 150), ("kpp", 250))
    }
    figures = {
        "paper_std": EPISODE_LENGTH_STD,
        "T": lengths,
        "entries": by_model,
        "over_T": {m: sweep.over_values(found, "nll_nats") for m, found in by_model.items()},
        "likely_over_T": sweep.over_values(by_model["kpp-paper"], "nll_nats", "kl_over_T"),
    }
    picture = sweep.draw_sweep(lab, "episode length T", lengths, by_model)
    return Finding(figures, table(figures), picture)


def read_all(lab: Lab, lengths: list[int]) -> dict[str, list[dict]] | None:
    """Read kpp-paper's entries from records; None unless every T is there."""
    wanted = [setting("kpp-paper", length, lab) for length in lengths]
    entries = None if lab.quick else sweep.read_entries(wanted, lab.preset, least=1)
    return None if entries is None else {"kpp-paper": entries}


def table(figures: Figures) -> list[str]:
    lines = []
    for entries in figures["entries"].values():
        lines += [*sweep.rows(entries), ""]
    over = {f"{model}: std of the bound": one for model, one in figures["over_T"].items()}
    over["kpp-paper: std of kl_over_T"] = figures["likely_over_T"]
    for what, found in over.items():
        lines.append(
            f"{what} over T {found['std']:.2f}, range {found['range']:.2f} nats; the paper's std "
            f"{EPISODE_LENGTH_STD}"
        )
    longest = figures["T"][-1]
    if longest > CELLS and "kpp" in figures["entries"]:
        lines.append(f"kpp has {CELLS} cells, and 64 smaller ones at T={longest}, in one map")
    return lines


ABOUT = About(
    paper="Fig. 10, left",
    shows="the bound and its divergences against T",
    claim="The bound does not depend on the length of episodes: trained with T from 5 to 64, it "
    f"varies by one standard deviation of {EPISODE_LENGTH_STD} nats per image (MNIST).",
    full="seconds from records, else 1 h on a GPU",
    presets=("omniglot",),
)
