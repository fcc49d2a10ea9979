"""Records: every figure with how it was made, and never one in another's place."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kanerva.config import OptimConfig, RunConfig, run_from_dict, to_dict
from kanerva.data import FixedEpisodes
from kanerva.data.splits import load_split
from kanerva.errors import NumbersWentBad, UserError
from kanerva.evaluation import record as module
from kanerva.evaluation.bound import bound
from kanerva.evaluation.costs import flop_per_image, gather_training_facts
from kanerva.evaluation.record import evaluate
from kanerva.evaluation.records import (
    Record,
    check_record,
    file_record,
    read_record,
    read_records,
    run_record_name,
)
from kanerva.evaluation.report import compare, over_seeds, table
from kanerva.evaluation.resized import ResizedMemory
from kanerva.models import build
from kanerva.models.checkpoint_io import save_weights
from kanerva.models.loading import load
from kanerva.presets import preset, with_options
from kanerva.provenance import command
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
def record(place: Path, run: Path, mnist_root: Path) -> dict:
    """Its record, made once."""
    kept = place / "record.json"
    if not kept.exists():
        made = evaluate(run, load(run), iwae_samples=2, data_root=mnist_root)
        assert json.loads(json.dumps(made)) == made
        kept.write_text(json.dumps(made))
    return json.loads(kept.read_text())


@pytest.fixture
def heap_run(place: Path) -> Path:
    """A `kpp` of random weights, as a run folder that was never trained; made once."""
    start = preset("mnist")
    model = with_options(
        start.model,
        encoder={"width": 4, "depth": 1},
        memory={"size": 12, "capacity": 9},
        readout={"size": 2, "channels": 2, "prior_width": 4},
        decoder={"base": 8, "depth": 1},
    )
    config, folder = replace(start, model=model, episode_length=8), place / "heap"
    if not folder.exists():
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
        torch.manual_seed(0)
        save_weights(build(model), folder)
    return folder


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
    assert run_from_dict(record["config"]) == small_run and record["schema"] == 2
    assert set(record["other_binarizations"]) == {"threshold"}
    memory, dims = record["memory"], 28 * 28
    assert memory["bits_per_dim"] == memory["bits_per_image"] / dims
    total = memory["bits_per_dim"] + record["bound"]["bits_per_dim"]
    assert memory["sum_bits_per_dim"] == pytest.approx(total)
    assert (record["K"], record["z_shape"], record["resized"]) == (2, [5], False)


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
    with pytest.raises(UserError, match="a partial record does not replace it"):
        file_record(record | {"partial": True}, tmp_path)
    for other in ({"dtype": "int8"}, {"shape": [3, 16, 16]}, {"cap": 51}):
        with pytest.raises(UserError, match="another memory"):
            file_record(record | {"memory": record["memory"] | other}, tmp_path)
    again = record["memory"] | {"sum_bits_per_dim": 9.0}  # the same memory, another day's bound
    assert file_record(record | {"memory": again}, tmp_path) == path
    file_record(record, tmp_path)
    assert read_record(path) == record
    named = file_record(record | {"config_hash": "other", "variant": "wide"}, tmp_path)
    assert named.name == "kpp-paper-wide-s0.json"


def test_a_part_is_replaced_by_as_large_a_part_or_the_whole_split(record: dict, tmp_path: Path):
    part = record | {"partial": True, "n_episodes": 4}
    path = file_record(part, tmp_path)
    with pytest.raises(UserError, match="covers 4 episodes; a record of 3 does not replace it"):
        file_record(part | {"n_episodes": 3}, tmp_path)
    for larger in (part, part | {"n_episodes": 5}, record):
        assert read_record(file_record(larger, tmp_path)) == larger == read_record(path)


def test_a_record_that_could_not_be_saved_is_refused_before_scoring(
    record: dict, run: Path, mnist_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("it was scored")

    monkeypatch.setattr(module, "score_headline", fail)
    file_record(record, tmp_path)
    model, where = load(run), {"data_root": mnist_root, "results": tmp_path}
    with pytest.raises(UserError, match="another memory: give this one a --variant name"):
        evaluate(run, model, memory_dtype="int8", **where)
    with pytest.raises(UserError, match="covers the whole split"):
        evaluate(run, model, episodes=1, **where)
    file_record(record | {"config_hash": "other"}, tmp_path / "other")
    with pytest.raises(UserError, match="another configuration"):
        evaluate(run, model, **where | {"results": tmp_path / "other"})
    for folder in ("file", "half"):  # the folder itself, and that of its preset, cannot be made
        (tmp_path / "half").mkdir(exist_ok=True)
        (tmp_path / ("file" if folder == "file" else "half/mnist")).touch()
        with pytest.raises(UserError, match="cannot write to folder"):
            evaluate(run, model, **where | {"results": tmp_path / folder})
    for how in ({"variant": "rounded", "memory_dtype": "int8"}, {}):  # these could be saved
        with pytest.raises(AssertionError, match="it was scored"):
            evaluate(run, model, **how, **where)


def test_an_edited_run_config_is_noticed(
    run: Path, small_run: RunConfig, tmp_path: Path, mnist_root
):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    other = replace(small_run, model=with_options(small_run.model, memory={"reads": 5}))
    (copy / "config.yaml").write_text(yaml.safe_dump(to_dict(other)))
    with pytest.raises(UserError, match="was altered: memory.reads"):
        evaluate(copy, load(copy), data_root=mnist_root)


def test_a_bound_that_is_not_finite_is_no_result(run: Path, mnist_root: Path):
    model = load(run)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(NumbersWentBad, match="nan"):
        evaluate(run, model, data_root=mnist_root)


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
    nothing = {"images_seen": None, "images_per_s": None, "wall_s": None}
    assert gather_training_facts(tmp_path) == nothing
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "metrics.csv").unlink()  # brought home without its log
    facts = gather_training_facts(copy)
    assert facts["steps"] == 12 and facts["images_per_s"] is None
    (copy / "metrics.csv").write_bytes(b"\xff\xfe,\n1,2\n")
    with pytest.raises(UserError, match="metrics.csv"):
        gather_training_facts(copy)


# Nothing is moved


def test_scoring_leaves_the_model_and_torchs_generator_alone(heap_run: Path, mnist_root: Path):
    model, before = load(heap_run), torch.get_rng_state()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    evaluate(heap_run, model, memory_dtype="int8", control_images=8, data_root=mnist_root)
    assert torch.equal(before, torch.get_rng_state())
    assert model.memory_dtype == "float32" and not model.training
    assert torch.equal(first.grad, torch.ones_like(first))
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize("step", ["score_headline", "measure_uses", "flop_per_image"])
def test_a_failing_evaluation_leaves_the_model_as_it_was(
    heap_run: Path, mnist_root: Path, monkeypatch: pytest.MonkeyPatch, step: str
):
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, step, fail)
    model = load(heap_run)
    with pytest.raises(KeyboardInterrupt):
        evaluate(heap_run, model, memory_dtype="int4", control_images=8, data_root=mnist_root)
    assert model.memory_dtype == "float32"


def test_two_evaluations_of_one_model_at_once_do_not_meet(heap_run: Path, mnist_root: Path):
    model, types = load(heap_run), ("float32", "int4")

    def score(dtype: str) -> dict:
        options: dict[str, Any] = {"memory_dtype": dtype, "control_images": 8}
        return evaluate(heap_run, model, data_root=mnist_root, **options)

    alone = [score(dtype) for dtype in types]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(score, types))
    assert together == alone
    assert alone[0]["bound"] != alone[1]["bound"]


def test_operations_are_counted_without_touching_gradients(small_run: RunConfig):
    model = build(small_run.model).eval()
    before = torch.get_rng_state()
    assert flop_per_image(model, small_run) == flop_per_image(model, small_run) > 0
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(before, torch.get_rng_state())


# Other memories, other runs


def test_a_heap_is_measured_and_may_have_another_size(heap_run: Path, mnist_root: Path):
    options: dict[str, Any] = {"control_images": 8, "data_root": mnist_root}
    own = evaluate(heap_run, load(heap_run), **options)
    assert {"familiarity", "generation"} <= own.keys() and own["K"] == 1
    assert own["z_shape"] == [[2], [2, 7, 7]] and own["images_seen"] is None
    room = ResizedMemory(episode_length=12, capacity=16, size=16)
    other = evaluate(heap_run, load(heap_run), resized=room, memory_dtype="int8", **options)
    assert other["resized"] and not own["resized"] and other["T"] == 12
    assert other["memory"]["shape"] == [3, 16, 16] and other["memory"]["dtype"] == "int8"
    assert other["config"]["memory"]["capacity"] == 16
    assert other["config_hash"] == run_from_dict(other["config"]).config_hash()
    assert other["config_hash"] != own["config_hash"]
    assert run_record_name(other) == "evaluation-int8-T12-side16.json"
    old = {key: value for key, value in other.items() if key != "resized"} | {"elsewhere": True}
    assert run_record_name(old) == run_record_name(other)


def test_the_papers_accounting_is_of_runs_trained_by_it(
    run: Path, tmp_path: Path, mnist_root: Path
):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    config = run_from_dict(yaml.safe_load((copy / "config.yaml").read_text()))
    config = replace(config, optim=replace(config.optim, kl_weight="1/T"))
    assert OptimConfig().kl_weight == 1
    (copy / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    shutil.rmtree(copy / "checkpoints" / "last")  # which says how the run was trained
    record = evaluate(copy, load(copy), control_images=8, data_root=mnist_root)
    style = record["paper_style"]
    expected = style["recon"] + (style["kl_z"] + style["kl_y"]) / 8
    assert record["kl_over_T"]["nll_nats"] == pytest.approx(expected)
    assert record["kl_over_T"]["bits_per_dim"] < style["bits_per_dim"]


@pytest.mark.parametrize("name", ["dkm", "dkm-tsm", "km"])
def test_the_papers_accounting_divides_the_kl_of_m_too(name: str, tmp_path: Path, mnist_root: Path):
    start = preset("mnist", name)
    sizes = {"encoder": {"width": 4}, "rows": {"count": 4, "width": 5}, "decoder": {"base": 8}}
    config = replace(start, model=with_options(start.model, **sizes), episode_length=8)
    config = replace(config, optim=replace(config.optim, kl_weight="1/T"))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    torch.manual_seed(0)
    save_weights(build(config.model), tmp_path)
    record = evaluate(tmp_path, load(tmp_path), episodes=4, control_images=8, data_root=mnist_root)
    style, kl_m = record["paper_style"], record["bound"]["kl_m"]
    expected = style["recon"] + (style["kl_z"] + style["kl_y"]) / 8 + kl_m
    assert kl_m > 0 and record["kl_over_T"]["nll_nats"] == pytest.approx(expected)
    assert 0 < record["kl_over_T"]["ci95"] < expected
    check_record(record, "x")


# Reading


def test_a_record_has_types(record: dict):
    typed = check_record(record | {"unheard_of": 1}, "here")
    assert typed.bound.nll_nats == record["bound"]["nll_nats"]
    assert typed.controls.left_out is not None and typed.memory.shape == [3, 12, 12]
    assert typed.iwae is not None and typed.iwae.k == 2 and typed.retired is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "bench"}', '{"kind": "evaluation"}'])
def test_what_is_no_record_is_named(tmp_path: Path, text: str):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UserError, match="r.json"):
        read_record(tmp_path / "r.json")


@pytest.mark.parametrize("name", [f.name for f in fields(Record)])
def test_each_field_is_checked(record: dict, name: str):
    """None may be of another type; and what has no default may not be missing."""
    with pytest.raises(UserError) as told:
        check_record(record | {name: object()}, "r.json")
    assert "r.json" in str(told.value) and "\n" not in str(told.value)
    without = {key: value for key, value in record.items() if key != name}
    if name in record and name in REQUIRED:
        with pytest.raises(UserError, match="r.json"):
            check_record(without, "r.json")
    else:
        check_record(without, "r.json")


REQUIRED = {f.name for f in fields(Record) if f.default is not None}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema": 1}, "r.json has schema 1, not 2: another version"),
        ({"T": True}, "r.json: T must be int, got True"),
        ({"T": 8.5}, "r.json: T must be int, got 8.5"),
        ({"flop_per_image": "many"}, "r.json: flop_per_image must be float, got 'many'"),
        ({"image": [1, 28, "28"]}, "r.json: image must be int, got '28'"),
        ({"versions": {"torch": 2}}, "r.json: versions.torch must be str, got 2"),
        ({"controls": {"n_images": 3}}, "r.json: controls is not a complete record: own missing"),
        ({"bound": 4.5}, "r.json: bound must be a mapping, got 4.5"),
        ({"config": None}, "r.json: a record needs either `config` or `retired`"),
        ({"retired": "abc"}, "r.json: a record needs either `config` or `retired`"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(record: dict, change: dict, told: str):
    with pytest.raises(UserError) as error:
        check_record(record | change, "r.json")
    assert str(error.value).startswith(told) and "\n" not in str(error.value)


def test_a_whole_number_passes_as_a_float_and_a_retired_record_has_no_config(record: dict):
    assert check_record(record | {"wall_s": 3}, "r.json").wall_s == 3.0
    retired = record | {"config": None, "retired": "abc"}
    assert check_record(retired, "r.json").config is None


# Tables


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
    assert over_seeds([*three, three[1]]) == over_seeds(three)  # the same file, given twice


@pytest.mark.parametrize(
    "other",
    [
        {"memory": {"cap": 51}},
        {"memory": {"shape": [3, 16, 16]}},
        {"memory": {"dtype": "int8"}},
        {"split_hash": "other"},
        {"config_hash": "other"},
    ],
)
def test_only_the_seed_may_differ_in_a_mean_over_seeds(record: dict, other: dict):
    memory = record["memory"] | other.get("memory", {})
    unlike = record | other | {"memory": memory, "seed": 1}
    assert len(over_seeds([record, record | {"seed": 1}]).splitlines()) == 2
    assert len(over_seeds([record, unlike]).splitlines()) == 3


def test_a_folder_of_records_is_read_whole(record: dict, tmp_path: Path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(json.dumps(record | {"variant": name}))
    assert [r["variant"] for r in read_records(tmp_path)] == ["a", "b"]
    (tmp_path / "evaluation.json").write_text(json.dumps(record | {"variant": "own"}))
    assert [r["variant"] for r in read_records(tmp_path)] == ["own"]  # a run's folder
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="evaluate"):
        read_records(tmp_path / "empty")
