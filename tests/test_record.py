"""Records: every figure with how it was made, and never one in another's place."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from kanerva.config import RunConfig, to_dict
from kanerva.data import FixedEpisodes
from kanerva.errors import NumbersWentBad, UserError
from kanerva.evaluation.bound import bound
from kanerva.evaluation.record import (
    evaluate,
    file_record,
    read_record,
    read_records,
    run_record_name,
    training_facts,
)
from kanerva.evaluation.report import compare, over_seeds, table
from kanerva.lab.quote import quoted
from kanerva.models import load
from kanerva.models.base import save_weights
from kanerva.provenance import command
from kanerva.runs import load_split
from kanerva.training.loop import train


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("record")


@pytest.fixture
def run(place: Path, small_run: RunConfig, mnist_root: Path) -> Path:
    """A trained run, made once; damage copies of it."""
    if not (place / "run").exists():
        train(small_run, place / "run", data_root=mnist_root)
    return place / "run"


@pytest.fixture
def record(run: Path, mnist_root: Path) -> dict:
    return evaluate(run, load(run), iwae_samples=2, data_root=mnist_root)


def test_it_holds_what_the_protocol_asks(record: dict, run: Path, small_run: RunConfig):
    assert set(record) >= {
        "schema", "kind", "model", "preset", "variant", "split", "n_images", "n_episodes",
        "partial", "seed", "T", "K", "memory", "z_shape", "binarization", "bound", "iwae",
        "paper_style", "controls", "params", "flop_per_image", "images_seen", "images_per_s",
        "wall_s", "split_hash", "config_hash", "commit", "versions", "device", "command",
    }  # fmt: skip
    assert record["n_images"] == 50 and record["n_episodes"] == 7 and not record["partial"]
    assert record["memory"]["floats_per_image"] == 3 * 12 * 12 / 8
    assert record["images_seen"] == 12 * 16 and record["steps"] == 12
    assert record["config_hash"] == small_run.config_hash()
    assert json.loads(json.dumps(record)) == record
    assert set(record["other_binarizations"]) == {"threshold"}


def test_its_bound_is_the_bound(record: dict, run: Path, small_run: RunConfig, mnist_root: Path):
    images = load_split(small_run, "test", mnist_root)
    episodes = FixedEpisodes(images, episode_length=8, binarization="sample")
    again = bound(load(run), episodes)
    assert record["bound"]["nll_nats"] == again.nll_nats
    assert record["bound"]["bits_per_dim"] == again.bits_per_dim((1, 28, 28))
    assert record["split_hash"] == episodes.fingerprint()


def test_flop_are_counted_forward_and_backward(record: dict, run: Path):
    """By hand for one layer: a linear map of a by b costs 2ab forward and 4ab backward."""
    model, flop = load(run), record["flop_per_image"]
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model.elbo(torch.zeros(1, 8, 1, 28, 28))
    assert 2.5 < flop / (forward.get_total_flops() / 8) < 3.1


def test_parts_and_other_splits_have_names_of_their_own(record: dict):
    assert run_record_name(record) == "evaluation.json"
    assert run_record_name(record | {"partial": True}) == "evaluation-partial.json"
    assert run_record_name(record | {"split": "validation"}) == "evaluation-validation.json"


def test_a_record_is_not_replaced_by_another_configuration_or_a_part(record: dict, tmp_path: Path):
    path = file_record(record, tmp_path)
    assert path == tmp_path / "mnist" / "kpp-paper-s0.json"
    with pytest.raises(UserError, match="--variant"):
        file_record(record | {"config_hash": "other"}, tmp_path)
    with pytest.raises(UserError, match="a part does not replace it"):
        file_record(record | {"partial": True}, tmp_path)
    assert read_record(path) == record
    named = file_record(record | {"config_hash": "other", "variant": "wide"}, tmp_path)
    assert named.name == "kpp-paper-wide-s0.json"


def test_an_edited_run_config_is_noticed(
    run: Path, small_run: RunConfig, tmp_path: Path, mnist_root
):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    other = replace(small_run, memory=replace(small_run.memory, reads=5))
    (copy / "config.yaml").write_text(yaml.safe_dump(to_dict(other)))
    with pytest.raises(UserError, match="does not describe the checkpoint"):
        evaluate(copy, load(copy), data_root=mnist_root)


def test_a_bound_that_is_not_finite_is_no_result(run: Path, tmp_path: Path, mnist_root: Path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    model = load(copy)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    save_weights(model, copy / "checkpoints" / "best")
    with pytest.raises(NumbersWentBad, match="nan"):
        evaluate(copy, load(copy), data_root=mnist_root)


def test_a_half_replaced_best_is_still_found(run: Path, tmp_path: Path):
    """Killed between two renames, the best checkpoint stands under its old name."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    best = copy / "checkpoints" / "best"
    best.rename(best.with_name(".best.old"))
    for a, b in zip(load(copy).state_dict().values(), load(run).state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_facts_of_a_damaged_run_are_an_error_and_of_bare_weights_are_none(
    run: Path, tmp_path: Path
):
    assert training_facts(tmp_path) == {"images_seen": None, "images_per_s": None, "wall_s": None}
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "metrics.csv").unlink()  # brought home without its log
    facts = training_facts(copy)
    assert facts["steps"] == 12 and facts["images_per_s"] is None
    (copy / "metrics.csv").write_bytes(b"\xff\xfe,\n1,2\n")
    with pytest.raises(UserError, match="metrics.csv"):
        training_facts(copy)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "bench"}', '{"kind": "evaluation"}'])
def test_what_is_no_record_is_named(tmp_path: Path, text: str):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UserError, match="r.json"):
        read_record(tmp_path / "r.json")


def test_tables_say_what_the_record_says(record: dict):
    text = table(record)
    for entry in ("bound", "paper_style"):
        assert f"{record[entry]['nll_nats']:.2f}" in text
    for name in ("own", "left_out", "other", "zeroed"):
        assert f"{record['controls'][name]['nll_nats']:.2f}" in text
    assert "no bound" in text and "50 images" in text
    huge = json.loads(json.dumps(record))
    huge["controls"]["zeroed"]["nll_nats"] = 123456789.0
    rows = [line.split() for line in compare([record, huge]).splitlines()]
    assert rows[2][12] == "123456789.00" and rows[0][3:5] == ["seed", "T"]


def test_blocks_are_made_from_records(record: dict, tmp_path: Path):
    file_record(record, tmp_path / "results")
    text = "a\n<!-- table: results/mnist/kpp-paper-s0.json -->\nold\n<!-- end -->\nb\n"
    assert quoted(text, tmp_path) == text.replace("old", f"```text\n{table(record)}\n```")
    with pytest.raises(UserError, match="no record matches"):
        quoted(text, tmp_path / "elsewhere")


def test_a_command_is_told_without_the_machines_places():
    typed = ["evaluate", "runs/a", "--results", "/somewhere", "--data_root=/else", "--iwae", "2"]
    assert command(typed) == "kanerva evaluate runs/a --iwae 2"


def test_seeds_are_averaged_and_configurations_are_not(record: dict):
    def again(seed: int, nats: float, **other: object) -> dict:
        bound = record["bound"] | {"nll_nats": nats}
        return record | {"seed": seed, "bound": bound} | other

    three = [again(seed, nats) for seed, nats in enumerate((10.0, 12.0, 17.0))]
    rows = over_seeds([*three, again(0, 5.0, config_hash="other")]).splitlines()
    assert len(rows) == 3
    alone, mean = rows[1].split(), rows[2].split()
    assert alone[4:7] == ["1", "5.00", "-"]
    assert mean[4:7] == ["3", "13.00", f"{13**0.5:.2f}"]  # of 9 + 1 + 16 over two
    unknown = over_seeds([again(0, 5.0, images_seen=None)]).splitlines()[1].split()
    assert unknown[3] == "-"  # weights that came without their run


def test_a_folder_of_records_is_read_whole(record: dict, tmp_path: Path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(json.dumps(record | {"variant": name}))
    assert [r["variant"] for r in read_records(tmp_path)] == ["a", "b"]
    (tmp_path / "evaluation.json").write_text(json.dumps(record | {"variant": "own"}))
    assert [r["variant"] for r in read_records(tmp_path)] == ["own"]  # a run's folder
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="evaluate"):
        read_records(tmp_path / "empty")
