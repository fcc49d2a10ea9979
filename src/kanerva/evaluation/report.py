"""Format records as text, for `kanerva evaluate` and `kanerva compare`."""

import math
import statistics
from typing import Any

from kanerva.evaluation.records import is_early

CONTROLS = ("own", "left_out", "other", "zeroed", "permuted")


def table(record: dict[str, Any]) -> str:
    """Format a record as the table that `kanerva evaluate` prints."""
    part = f", {record['n_episodes']} episodes only" if record["partial"] else ""
    memory = record["memory"]
    steps = ""
    if record.get("steps") is not None:
        steps = f" of step {record.get('best_step')}, run at {record['steps']}"
    lines = [
        f"{record['model']} on {record['preset']} {record['split']} "
        f"({record['n_images']} images{part}), T={record['T']}, K={record['K']}, "
        f"pixels: {record['binarization']}",
        f"memory {'x'.join(map(str, memory['shape']))} {memory['dtype']}: "
        f"{memory['floats_per_image']:g} floats, {memory['bits_per_image']:g} bits per image "
        f"(free: not charged in any figure)",
        f"checkpoint: {record.get('checkpoint', 'best')}{steps}",
        "",
        f"{'nats per image':<22}{'total':>9}{'recon':>9}{'KL z':>9}{'KL y':>9}{'bits/dim':>10}",
    ]

    def row(name: str, entry: dict[str, float] | None) -> None:
        if entry is None:
            lines.append(f"{name:<22}{'none':>9}")
            return
        figures = "".join(f" {entry[k]:8.2f}" for k in ("nll_nats", "recon", "kl_z", "kl_y"))
        lines.append(f"{name:<22}{figures} {entry['bits_per_dim']:9.4f}")

    row("bound", record["bound"])
    if full := record.get("full_bound"):
        lines.append(
            f"{'  with KL(M) charged':<22}{full['nll_nats']:9.2f}{'KL(M)/T':>18} "
            f"{record['bound']['kl_m']:8.2f} {full['bits_per_dim']:9.4f}"
        )
    if tighter := record.get("iwae"):
        lines.append(f"{'iwae_' + str(tighter['k']):<22}{tighter['nll_nats']:9.2f}")
    row("paper_style (no bound)", record["paper_style"])
    for how, entry in (record.get("other_binarizations") or {}).items():
        row(f"bound, {how}", entry)
    lines.append(f"given another memory, on {record['controls']['n_images']} images:")
    for name in CONTROLS:
        if name in record["controls"]:
            row(f"  {name}", record["controls"][name])
    lines += uses(record)
    lines += [
        "",
        f"bound ± {record['bound']['ci95']:.2f} (95 % over images); floor ln T = "
        f"{math.log(record['T']):.2f}",
    ]
    return "\n".join(lines)


def uses(record: dict[str, Any]) -> list[str]:
    """One line for each measured use of a memory of blocks."""
    lines = []
    if measured := record.get("familiarity"):
        lines.append(
            f"familiarity: AUROC {measured['auroc']:.4f} of written against unwritten images "
            f"({measured['n_written']} and {measured['n_unwritten']})"
        )
    if places := record.get("places"):
        lines.append(
            f"places: mean distance within a class, relative to all pairs: {places['ratio']:.3f}"
        )
    if made := record.get("generation"):
        names = [name.removesuffix("_nearest") for name in made if name.endswith("_nearest")]
        apart = ", ".join(f"{name} {made[f'{name}_nearest']:.3f}" for name in names)
        grey = ", ".join(f"{name} {made[f'{name}_grey']:.3f}" for name in names)
        lines += [f"distance to the nearest written image: {apart}", f"greyness: {grey}"]
    return ["", *lines] if lines else []


def compare(records: list[dict[str, Any]]) -> str:
    """Format records side by side, the best bound of each preset first. `seen` counts images up to
    the scored step."""
    first = "preset,model,pixels,seed,T,bound,± ci95,bits/dim,paper_style,"
    first += ",".join(CONTROLS)
    last = "floats/img,bits/img,params,seen,img/s,minutes,images"  # minutes of training
    rows = [[*first.split(","), *last.split(",")]]
    charged = any(r.get("full_bound") for r in records)  # models with a distribution over memories
    if charged:
        rows[0].insert(9, "with KL(M)")
    for r in sorted(records, key=lambda r: (r["preset"], r["bound"]["nll_nats"])):
        tried = [r["controls"].get(name) for name in CONTROLS]
        rows.append(
            [where(r), named(r), r["binarization"], str(r["seed"]), str(r["T"])]
            + [f"{r['bound'][key]:.2f}" for key in ("nll_nats", "ci95")]
            + [f"{r['bound']['bits_per_dim']:.4f}", f"{r['paper_style']['nll_nats']:.2f}"]
            + ["-" if entry is None else f"{entry['nll_nats']:.2f}" for entry in tried]
            + [f"{r['memory'][key]:g}" for key in ("floats_per_image", "bits_per_image")]
            + [f"{r['params']:,}", seen_by(r)]
            + ["-" if r["images_per_s"] is None else f"{r['images_per_s']:.0f}"]
            + ["-" if r["wall_s"] is None else f"{r['wall_s'] / 60:.1f}"]
            + [f"{r['n_images']}{' (part)' if r['partial'] else ''}"]
        )
        if charged:
            full = r.get("full_bound")
            rows[-1].insert(9, "-" if full is None else f"{full['nll_nats']:.2f}")
    return columns(rows, left=3)


def over_seeds(records: list[dict[str, Any]]) -> str:
    """Mean and standard deviation over runs of one configuration that differ only in their seed."""
    by_seed: dict[tuple[object, ...], dict[int, dict[str, Any]]] = {}
    for r in records:
        memory = (r["memory"]["dtype"], r["memory"].get("cap"), *r["memory"]["shape"])
        group = (where(r), named(r), r["config_hash"], r["split_hash"], memory)
        by_seed.setdefault(group, {})[r["seed"]] = r  # one record of each seed
    groups = {group: list(runs.values()) for group, runs in by_seed.items()}
    head = "preset,model,T,seen,seeds,bound,± std,bits/dim,paper_style,± std,KL z,KL y,floats"
    rows = [list[str](head.split(","))]

    def mean(group: list[dict[str, Any]], how: str, term: str) -> float:
        return statistics.fmean(r[how][term] for r in group)

    def deviation(group: list[dict[str, Any]], how: str) -> str:
        values = [r[how]["nll_nats"] for r in group]
        return f"{statistics.stdev(values):.2f}" if len(values) > 1 else "-"

    ordered = sorted(groups.items(), key=lambda one: (one[0][0], mean(one[1], "bound", "nll_nats")))
    for (what, name, *_), group in ordered:
        first, seen = group[0], group[0].get("images_seen")  # None: weights without their run
        rows.append(
            [what, name, str(first["T"]), f"{seen:,}" if seen else "-", str(len(group))]
            + [f"{mean(group, 'bound', 'nll_nats'):.2f}", deviation(group, "bound")]
            + [f"{mean(group, 'bound', 'bits_per_dim'):.4f}"]
            + [f"{mean(group, 'paper_style', 'nll_nats'):.2f}", deviation(group, "paper_style")]
            + [f"{mean(group, 'bound', term):.2f}" for term in ("kl_z", "kl_y")]
            + [f"{first['memory']['floats_per_image']:g}"]
        )
    return columns(rows, left=2)


def seen_by(record: dict[str, Any]) -> str:
    """Images seen up to the scored step; if that is early in its run, also the total."""
    seen, steps = record["images_seen"], record.get("steps") or 1
    if seen is None:  # weights without their run
        return "-"
    early = f" early, of {seen:,}" if is_early(record) else ""
    return f"{seen * (record.get('best_step') or steps) // steps:,}{early}"


def named(record: dict[str, Any]) -> str:
    """A model and its variant."""
    return record["model"] + (f"-{record['variant']}" if record["variant"] else "")


def where(record: dict[str, Any]) -> str:
    """The data set, and the split unless it is test."""
    return record["preset"] + ("" if record["split"] == "test" else f" {record['split']}")


def columns(rows: list[list[str]], left: int) -> str:
    """Format rows as aligned text. The first `left` columns are left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
