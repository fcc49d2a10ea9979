"""The plot and the table of bits say what records say, beside what those bits could do."""

from math import log
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kanerva.errors import UserError
from kanerva.evaluation.records import read_record
from kanerva.lab.capacity import Point, collect, draw, efficiency, limit, main, table
from kanerva.lab.tables import keys, samples

RECORDS = Path(__file__).parents[1] / "results" / "mnist"
EXPERIMENTS = RECORDS.parent / "reproduce"
PATTERNS = ("kpp-store*-s0.json", "kpp-bits-bits*-s0.json", "kpp-empty-s?.json")
PATHS = [path for pattern in PATTERNS for path in sorted(RECORDS.glob(pattern))]
PATHS += [EXPERIMENTS / "gist-mnist.json", EXPERIMENTS / "lossless-mnist.json"]


@pytest.fixture
def points() -> list[Point]:
    return collect(PATHS)


def test_every_record_is_a_point_in_both_panels(points: list[Point]):
    bound, total = draw(points).axes
    for axes, of_bound in ((bound, 1.0), (total, 0.0)):
        drawn = np.concatenate([np.asarray(line.get_xydata()) for line in axes.lines])
        shown = {(round(float(x), 4), round(float(y), 4)) for x, y in drawn}
        for path in PATHS[: len(PATHS) - 2]:
            record = read_record(path)
            bits, nats = record["memory"]["bits_per_image"], record["bound"]["nll_nats"]
            if record["model"] != "kpp-empty":
                y = nats if of_bound else nats + bits * log(2)
                assert (round(bits, 4), round(y, 4)) in shown


def test_no_memory_is_better_than_its_limit(points: list[Point]):
    """A figure below it would be a mistake of counting."""
    assert {"kpp", "kpp-bits", "prefix", "lossless", "kpp-empty"} <= {p.family for p in points}
    for point in points:
        assert point.bound >= limit(points, point.bits, point.length) - 1e-6, point


def test_limit_and_efficiency_by_hand():
    points = [
        Point("a", "kpp", 20.0, 70.0),
        Point("b", "kpp-empty", 0.0, 80.0),
        Point("c", "kpp-bits-empty", 0.0, 75.0),
    ]
    assert limit(points, 20.0) == pytest.approx(75 - 20 * log(2))
    assert limit(points, 2000.0) == pytest.approx(log(32))
    assert efficiency(points, points[0]) == pytest.approx(10 / (20 * log(2)))
    assert efficiency(points, points[1]) is None  # nothing is written
    assert points[0].sum == pytest.approx(70 + 20 * log(2))


def test_the_prefix_code_pays_for_its_key(points: list[Point]):
    key = min(p.bound for p in points if p.family == "kpp-bits")
    assert key == pytest.approx(log(2) + log(32), abs=0.01)  # held or new, and which
    prefix = [p for p in points if p.family == "prefix"]
    alone = next(p for p in points if p.family == "kpp-bits-empty")
    assert all(p.sum == pytest.approx(alone.bound + key, abs=0.2) for p in prefix)
    with pytest.raises(UserError, match="add a record"):
        collect(PATHS[-2:])


def test_rows_are_sorted_and_add_up(points: list[Point]):
    lines = table(points).splitlines()
    assert len(lines) == len(points) + 1
    bits = [point.bits for point in points]
    assert bits == sorted(bits, reverse=True) and bits[-1] == 0


def test_it_is_written_as_a_picture(tmp_path: Path):
    main([str(tmp_path / "a.png"), *map(str, PATHS)])
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.width > picture.height > 400


def test_keys_and_samples_quote_their_records():
    generate = read_record(RECORDS / "kpp-generate-s0.json")
    paper = read_record(RECORDS / "kpp-paper-s0.json")  # an older record, without permuted keys
    table = keys([paper, generate]).splitlines()
    assert table[1].startswith("mnist kpp-generate") and table[2].startswith("mnist kpp-paper")
    assert f"{generate['controls']['permuted']['nll_nats']:.1f}" in table[1]
    assert f"{generate['places']['ratio']:.3f}" in table[1] and table[2].split()[-1] == "-"
    made = read_record(RECORDS / "kpp-samples-generate-s0.json")
    head, near, grey = samples([made]).splitlines()
    names = head.split()[2:]
    assert names[0] == "recalled" and {"held", "free", "vae", "unwritten"} < set(names)
    assert near.split()[4:] == [f"{made['generation'][f'{name}_nearest']:.3f}" for name in names]
    assert grey.split()[3] == "grey"
