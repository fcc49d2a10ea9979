"""Figures in prose: made from records, and found where typed."""

import json
import math
import re
from pathlib import Path

import pytest

from kanerva.errors import UserError
from kanerva.evaluation.records import read_record
from kanerva.evaluation.report import compare
from kanerva.lab import paper_figures
from kanerva.lab.experiments.table1 import format_cost, headline
from kanerva.lab.quote import BLOCK, OTHERS, VALUE, evaluate_expression, main, quoted

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT / "docs", ROOT / "docs" / "results", ROOT / "benchmarks"]
PAGES = [ROOT / f"{name}.md" for name in ("README", "RESULTS", "SECURITY")]
PAGES += [page for folder in FOLDERS for page in folder.glob("*.md")]
NAMES = sorted(str(page.relative_to(ROOT)) for page in PAGES)
RECORDS = sorted(p for p in (ROOT / "results").glob("*/*.json") if p.parent.name not in OTHERS)


# Values


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with three records, and one below it where a page may lie."""
    (tmp_path / "results" / "set").mkdir(parents=True)
    (tmp_path / "docs" / "results").mkdir(parents=True)  # of pages, not of records
    for seed, nats in enumerate((4.0, 6.0)):
        record = {"bound": {"nll_nats": nats, "kl_y": 3.5}, "wall_s": 90, "rows": [{"ms": 2.5}]}
        record |= {"name": "a", "partial": False, "controls": {"left_out": {"nll_nats": 90.25}}}
        (tmp_path / "results" / "set" / f"a-s{seed}.json").write_text(json.dumps(record))
    (tmp_path / "results" / "set" / "b-1-s0.json").write_text('{"bound": {"nll_nats": 2.0}}')
    return tmp_path


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("set/a-s0", 4.0),
        ("set/a-s?", 5.0),  # the mean over seeds
        ("set/a-s0:bound.kl_y", 3.5),
        ("set/a-s0:controls.left_out", 90.25),  # of a score its nats
        ("set/a-s0:rows.0.ms", 2.5),
        ("set/a-s0:wall_s / 60", 1.5),
        ("set/a-s1 - set/b-1-s0", 4.0),
        ("set/a-s1 / set/b-1-s0 * 100 - 100", 200.0),
        ("1 - set/b-1-s0 / set/a-s0 + 2e1", 20.5),
    ],
)
def test_a_value_is_a_figure_a_mean_or_what_arithmetic_makes_of_them(
    place: Path, expression: str, value: float
):
    assert evaluate_expression(expression, place) == pytest.approx(value)
    for folder in (place / "docs", place / "docs" / "results"):  # results/ lies above
        assert evaluate_expression(expression, folder) == pytest.approx(value)


def test_values_are_printed_as_asked_and_nothing_else_is_touched(place: Path):
    text = "a <!-- value: set/a-s* -->old<!-- end -->, <!-- value: set/a-s0:wall_s as .0f -->"
    text += "<!-- end --> s, <!-- value: set/a-s0 / set/a-s1 as .0% -->1<!-- end -->; 7.5\n"
    made = quoted(text, place)
    assert re.sub("<!--.*?-->", "", made) == "a 5.00, 90 s, 67%; 7.5\n"
    assert quoted(made, place) == made
    page = place / "docs" / "page.md"
    page.write_text(text)
    main([str(page)])
    assert page.read_text() == made


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("set/none-s0", "no record matches set/none-s0"),
        ("set/a-s0:bound.kl_z", "has no figure bound.kl_z"),
        ("set/a-s0:rows.3.ms", "has no figure"),
        ("set/a-s0:name", "is not a number"),
        ("set/a-s0:partial", "is not a number"),
        ("set/a-s0:bound - ", "no record matches"),
    ],
)
def test_a_value_that_is_not_there_is_named(place: Path, expression: str, words: str):
    with pytest.raises(UserError, match=re.escape(words)):
        evaluate_expression(expression, place)


# Tables


def records(pattern: str) -> list[dict]:
    return [read_record(path) for path in RECORDS if path.match(f"results/{pattern}.json")]


def test_table_1_and_the_headline_keep_the_papers_figures_and_ours_apart():
    text = "<!-- table1: results/*/*.json -->\n<!-- end -->\n"
    lines = quoted(text, ROOT).splitlines()
    printed = next(line for line in lines if "Kanerva++: kpp-paper" in line and "41.58" in line)
    (own,) = records("mnist/kpp-paper-s0")
    likely = [r["kl_over_T"]["nll_nats"] for r in records("mnist/kpp-paper-kl-over-T-s?")]
    mean = f"{sum(likely) / len(likely):.2f}"
    assert printed.split()[-4:-2] == ["≤41.58", mean]
    assert printed.split()[-1] == f"{own['bound']['nll_nats']:.2f}"
    assert mean not in headline(records("*/*")) and "no bound" in "".join(lines)
    every = records("*/*")
    table = [line.split(" | ") for line in headline(every).split("\n")]
    assert len({len(row) for row in table}) == 1
    assert "MNIST, nats" in table[0][2] and table[2][2] == "≤ 41.58"
    seeds = [r["bound"]["nll_nats"] for r in records("omniglot/kpp-store-s?")]
    ours = next(row for row in table if row[1] == "12,288" and "384 numbers" in row[0])
    assert ours[4] == f"**{sum(seeds) / len(seeds):.2f}**"
    total = sum(seeds) / len(seeds) + 12_288 * math.log(2)
    assert ours[5] == f"{total:,.0f}"
    colour = records("cifar10/kpp-store-int8-s0")[0]
    int8 = next(row for row in table if "int8" in row[0] and row[1] == "3,073")
    assert int8[9].rstrip(" |") == f"{colour['memory']['sum_bits_per_dim']:.2f}"
    unwritten = [r["controls"]["left_out"]["nll_nats"] for r in records("mnist/kpp-store-s?")]
    assert any(row[2] == f"{sum(unwritten) / len(unwritten):.2f}" for row in table)
    apart = {"each": [122.0, 168.0, 179.0], "mean": 156.3}
    assert format_cost(apart, "left_out") == "122 to 179"  # two kinds of runs have no mean
    assert format_cost(apart, "bound") == "156.30"
    mine = records("omniglot/kpp-store-s?")
    again = mine[0] | {"bound": mine[0]["bound"] | {"nll_nats": 1e6}}
    other = again | {"config_hash": "another"}
    assert headline([*mine, other]) == headline(mine)  # seeds of one configuration
    assert headline([*mine, again]) != headline(mine)
    assert headline(records("mnist/kpp-bits-empty-s0")).count("\n") == 3


def test_compare_says_how_long_a_run_trained():
    (stored,) = records("mnist/kpp-store-s0")
    head, row = (line.split() for line in compare([stored]).splitlines())
    assert head[-2:] == ["minutes", "images"] and row[-2] == f"{stored['wall_s'] / 60:.1f}"
    assert compare([stored | {"wall_s": None}]).splitlines()[1].split()[-2] == "-"


def test_compare_marks_what_was_scored_before_its_run_ended():
    (stored,) = records("mnist/kpp-store-s0")
    early = stored | {"best_step": 1000, "steps": 9000, "images_seen": 9_216_000}
    assert " 1,024,000 early, of 9,216,000 " in compare([early])
    late = compare([early | {"best_step": 7200}])
    assert " 7,372,800 " in late and "early" not in late
    unknown = {"steps": None, "best_step": None, "images_seen": None}
    assert "early" not in compare([early | unknown])
    text = "<!-- early: results/omniglot/k*-s0.json -->\n<!-- end -->\n"
    listed = [line.split()[1] for line in quoted(text, ROOT).splitlines()[3:-2]]
    assert listed == [
        f"{r['model']}-{r['variant']}" if r["variant"] else r["model"]
        for r in records("omniglot/k*-s0")
        if r["best_step"] < 0.8 * r["steps"]
    ]


def test_what_make_trust_tried_is_a_table(place: Path):
    part = {"what": "kills", "bad_is": "lost", "at_least": 1000, "tried": 1002, "bad": 0}
    part |= {"slowest_s": 0.0, "most_mb": 12.0, "wall_s": 90.4}
    record = {"parts": {"kills": part}, "wall_s": 930.0, "cores": 2}
    (place / "results" / "trust.json").write_text(json.dumps(record))
    made = quoted("<!-- trust: results/trust.json -->\n<!-- end -->\n", place).splitlines()
    assert made[3].split() == ["kills", "lost", "1000", "1002", "0", "-", "12", "90"]
    assert made[4] == "15.5 minutes on 2 cores"
    assert evaluate_expression("trust:parts.kills.tried", place) == 1002


# The pages


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_those_of_the_records(name: str):
    text = (ROOT / name).read_text()
    assert quoted(text, (ROOT / name).parent) == text, f"{name} is old: run `make docs`"


UNRECORDED = re.compile(r"<!-- not from records -->\n.*?<!-- end -->", re.DOTALL)


@pytest.mark.parametrize("name", NAMES)
def test_every_mark_is_understood(name: str):
    text = (ROOT / name).read_text()
    marks = len(BLOCK.findall(text)) + len(VALUE.findall(text)) + len(UNRECORDED.findall(text))
    assert text.count("<!-- end -->") == marks == len(re.findall("<!--", text)) - marks
    assert name.startswith("benchmarks/") or not UNRECORDED.search(text)
    # at the start of a line or an item a comment would end the paragraph in Markdown
    assert not re.search(r"^[ >]*(?:[-*+] +|\d+\. +)?<!-- value", text, re.MULTILINE)


ALLOWED = {figure for column in paper_figures.TABLE1.values() for figure in column.values()} | {
    paper_figures.SHIFT_GAIN, paper_figures.MEMORY_GAIN, paper_figures.KEY_NOISE,
    paper_figures.EPISODE_LENGTH_STD, paper_figures.READS_KL_STD, *paper_figures.WINDOW,
    0.125, 0.25,  # its temporal shift; our example of a window
    3.47, 3.58,  # ln 32, ln 36
    0.003, 0.01, 0.05,  # values of --memory.noise
    2.3, 2.8,  # aims, bits/dim
    0.9, 0.999,  # Adam's betas
}  # fmt: skip
WORDS = {  # whole numbers beside a unit that are no measurement: aims, levels, numbers of the paper
    "10 nats", "9 nats", "95 %", "100 %", "41.58 nats",
}  # fmt: skip


def typed(text: str) -> list[str]:
    """Decimal numbers, and whole ones of nats, per cent and milliseconds, that no record fills."""
    for made in (BLOCK, VALUE, UNRECORDED, re.compile(r"```.*?```", re.DOTALL)):
        text = made.sub(" ", text)
    text = re.sub(r"^ {4}\S.*$", "", text, flags=re.MULTILINE)  # indented code
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)  # code in a line, where links lead
    text = re.sub(r"(?:§§?|Sections? |App\. [A-E]?|Python |Apache-)\d+(?:\.\d+)*", " ", text)
    found = re.findall(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?:[  ](?:nats|ms|%)(?!\w))?", text)
    bare = [(words, float(words.split()[0].replace(",", "").rstrip(" ,"))) for words in found]
    return [
        words
        for words, number in bare
        if words not in WORDS and number not in ALLOWED and re.search(r"\.\d|nats|ms|%", words)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_no_figure_is_typed(name: str):
    found = typed((ROOT / name).read_text())
    assert not found, f"{name} has figures of no record: {found}; see src/kanerva/lab/quote.py"


def test_a_typed_figure_is_found():
    text = "It costs 4.44 nats, 8 % or 17 ms more (the paper: 41.58), at T = 32, `0.77`, §4.3.\n"
    text += "\n    kanerva train --optim.lr 0.07\n\n"
    text += "a <!-- value: a -->5.55<!-- end --> 1,234.5 [a](b-6.6)\n"
    assert typed(text) == ["4.44 nats", "8 %", "17 ms", "1,234.5"]


def test_every_data_set_with_records_has_a_page_that_results_names():
    text = (ROOT / "RESULTS.md").read_text()
    for folder in {path.parent.name for path in RECORDS}:
        page = ROOT / "docs" / "results" / f"{folder}.md"
        assert f"docs/results/{folder}.md" in text, f"RESULTS.md does not link {page}"
        assert f"results/{folder}/" in page.read_text(), f"{page} has no table"


def test_make_docs_writes_every_page():
    (line,) = re.findall(r"kanerva\.lab\.quote (.*)", (ROOT / "Makefile").read_text())
    named = {page for pattern in line.split() for page in ROOT.glob(pattern)}
    assert named == set(PAGES)
