"""The plot of the bound against memory, and the tables that go with it, say what records say."""

from math import log
from pathlib import Path

import pytest
from PIL import Image

from kanerva.evaluation.records import read_record
from kanerva.lab.capacity import draw, main
from kanerva.lab.tables import keys, samples, sizes

RECORDS = Path(__file__).parents[1] / "results" / "mnist"


@pytest.fixture
def records() -> list[dict]:
    return [read_record(path) for path in sorted(RECORDS.glob("kpp-store*-s0.json"))]


def test_every_record_is_a_point_with_its_floor(records: list[dict]):
    floats, bits = draw(records).axes
    for axes, unit in ((floats, "floats"), (bits, "bits")):
        data = [line.get_xydata()[0] for line in axes.lines if len(line.get_xdata()) == 1]
        points = {(round(float(x), 6), round(float(y), 6)) for x, y in data}
        for record in records:
            x = round(record["memory"][f"{unit}_per_image"], 6)
            assert (x, round(record["bound"]["nll_nats"], 6)) in points
            assert (x, round(log(record["T"]), 6)) in points


def test_it_is_written_as_a_picture(tmp_path: Path):
    main([str(tmp_path / "a.png"), *map(str, RECORDS.glob("kpp-store-T*.json"))])
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.width > picture.height > 400


def test_sizes_are_sorted_and_add_up(records: list[dict]):
    lines = sizes(records).splitlines()[1:]
    rows = [
        dict(zip(("name", "T", "shape", "type"), line.split()[:4], strict=True)) for line in lines
    ]
    assert len(rows) == len(records) and rows[0]["T"] in ("8", "32")
    for line in lines:
        words = line.split()
        assert float(words[-1]) == pytest.approx(
            float(words[5]) * log(2) + float(words[6]), rel=1e-3, abs=0.2
        )


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
