"""Configs, records and words that no parser expects: one line each, soon, and in little memory."""

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import kanerva
from kanerva.cli import main
from kanerva.config import KppConfig, RunConfig, model_from_dict, run_from_dict, to_dict
from kanerva.errors import UserError
from kanerva.evaluation.records import check_record, read_record
from kanerva.evaluation.report import table
from kanerva.models.loading import PRETRAINED, load
from kanerva.plain_files import MAX_YAML, read_json, read_yaml
from kanerva.runs import config_from_yaml


@pytest.fixture(autouse=True)
def soon_and_frugal():
    """Seconds, and kilobytes of the largest that the process has been."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert time.monotonic() - began < 30 and grown < 300_000


def refused(content: str, path: Path, use: Any) -> None:
    path.write_text(content)
    with pytest.raises(UserError) as error:
        use(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


# 8: sizes


def nested(**options: Any) -> dict[str, Any]:
    content = to_dict(KppConfig())
    for name, value in options.items():
        group, _, option = name.partition("__")
        content[group] = content[group] | {option: value} if option else value
    return content


SIZES = [
    {"memory__capacity": 10**18},
    {"memory__size": 10**12},
    {"memory__channels": 10**9},
    {"encoder__depth": 10**6},
    {"encoder__width": 10**9},
    {"decoder__neighbours": 10**6},
    {"decoder__base": 10**9},
    {"readout__prior_width": 10**9},
    {"image": [1, 10**6, 10**6]},
    {"image": [10**9, 1, 1]},
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_8_a_config_of_absurd_sizes_is_refused(sizes: dict[str, Any]):
    with pytest.raises(UserError):
        model_from_dict(nested(**sizes))


@pytest.mark.parametrize("option", ["encoder.width", "decoder.base", "memory.channels"])
def test_8_sizes_that_weights_do_not_have_take_no_memory(tmp_path: Path, option: str):
    """Within bounds, and still gigabytes: compared before anything is made of that size."""
    folder = PRETRAINED / "glyphs-1"
    content = json.loads((folder / "config.json").read_text())
    group, name = option.split(".")
    content[group][name] = 60_000
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"does not fit its config\.json"):
        load(tmp_path)


def test_8_every_model_can_be_measured_without_memory():
    import torch

    from kanerva.config import MODEL_CONFIGS
    from kanerva.models import build
    from kanerva.presets import preset

    for name in MODEL_CONFIGS:
        config = preset("glyphs", name).model
        with torch.device("meta"):
            expected = build(config).state_dict()
        real = build(config).state_dict()
        assert {k: v.shape for k, v in expected.items()} == {k: v.shape for k, v in real.items()}


LAUGHS = "- &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"- &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_8_aliases_do_not_multiply(tmp_path: Path):
    for content in (LAUGHS, f"model: kpp\npreset:\n{LAUGHS}", "model: &x kpp\npreset: *x\n"):
        refused(content, tmp_path / "config.yaml", config_from_yaml)


def test_8_a_message_shows_little_of_a_large_value():
    for value in ("x" * 10**6, ["x"] * 10**6, {str(n): n for n in range(10**5)}):
        for option in ("preset", "seed", "model", "optim"):
            with pytest.raises(UserError) as error:
                run_from_dict(to_dict(RunConfig()) | {option: value})
            assert len(str(error.value)) < 1000


# 12: JSON and YAML

ODD_JSON = {
    "deep": "[" * 100_000,
    "deep objects": '{"a":' * 100_000,
    "closed": "[" * 900 + "]" * 900,
    "digits": '{"schema": ' + "9" * 5000 + "}",
    "many digits": '{"schema": ' + "9" * 400 + "}",
    "no text": "\udcff",
    "nothing": "",
}
ODD_YAML = {
    "date": "a: 2001-99-99",
    "int": "a: !!int x",
    "empty int": "a: !!int ''",
    "bool": "a: !!bool x",
    "timestamp": "a: !!timestamp x",
    "float": "a: !!float x",
    "brackets": "[" * 20_000,
    "braces": "{" * 20_000,
    "nested": "[" * 300 + "]" * 300,
    "digits": f"optim: {{lr: {'9' * 400}}}",
    "more digits": f"steps: {'9' * 5000}",
    "python": "a: !!python/object/apply:os.system [id]",
    "long": "a: " + "x" * MAX_YAML,
    "binary": "a: !!binary x",
    "keys": "? [a]\n: b",
    "tab": "\ta: b",
    "nothing": "",
    "list": "- a",
}


@pytest.mark.parametrize("name", ODD_JSON)
def test_12_odd_json_is_one_line(tmp_path: Path, name: str):
    path = tmp_path / "config.json"
    path.write_bytes(ODD_JSON[name].encode(errors="surrogateescape"))
    with pytest.raises(UserError, match="config.json"):
        read_json(path)
    (tmp_path / "model.safetensors").touch()
    assert main(["compare", str(path), str(path)]) == 2
    assert main(["recall", str(tmp_path)]) == 2


@pytest.mark.parametrize("name", ODD_YAML)
def test_12_odd_yaml_is_one_line(tmp_path: Path, name: str, capsys):
    refused(ODD_YAML[name], tmp_path / "config.yaml", config_from_yaml)
    assert main(["train", "--preset", "glyphs", "--config", str(tmp_path / "config.yaml")]) == 2
    assert main(["train", "--resume", "--run", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 2
    if len(ODD_YAML[name]) < 100_000:
        assert main(["train", "--preset", "glyphs", f"--image={ODD_YAML[name]}"]) == 2


def test_12_other_files_than_text_are_one_line(tmp_path: Path):
    for name in ("folder", "missing"):
        if name == "folder":
            (tmp_path / name).mkdir()
        for read in (read_json, read_yaml):
            with pytest.raises(UserError, match=name):
                read(tmp_path / name)


@pytest.mark.parametrize("key", ["bound", "memory", "controls", "controls.own", "bound.recon"])
def test_12_a_record_without_a_nested_key_is_one_line(tmp_path: Path, key: str):
    record = json.loads((PRETRAINED / "mnist-1" / "evaluation.json").read_text())
    *groups, name = key.split(".")
    part = record
    for group in groups:
        part = part[group]
    for value in (None, [], {}, "x"):
        part[name] = value
        refused(json.dumps(record), tmp_path / "r.json", read_record)
    del part[name]
    refused(json.dumps(record), tmp_path / "r.json", read_record)


@pytest.mark.parametrize(
    "change",
    [
        {"familiarity": {}},
        {"places": {}},
        {"generation": {"a_nearest": 1.0}},
        {"full_bound": {"nll_nats": 1.0, "bits_per_dim": 1.0}},
        {"T": 0},
        {"other_binarizations": {"threshold": {}}},
        {"iwae": {}},
    ],
    ids=str,
)
def test_12_a_record_that_could_not_be_printed_is_one_line(tmp_path: Path, change: dict):
    record = json.loads((PRETRAINED / "mnist-1" / "evaluation.json").read_text())
    refused(json.dumps(record | change), tmp_path / "r.json", lambda p: table(read_record(p)))
    blank = {key: None for key in change if key != "T"}
    (tmp_path / "r.json").write_text(json.dumps(record | blank | {"steps": None}))
    table(read_record(tmp_path / "r.json"))


@pytest.mark.parametrize("group", ["memory", "readout", "decoder", "likelihood", "encoder"])
def test_12_a_config_of_version_1_that_is_not_whole_is_one_line(group: str):
    content: dict[str, Any] = {
        "model": "kpp",
        "likelihood": {"kind": "bernoulli", "components": 10},
    }
    for value in (None, 5, [], {}, "x"):
        with pytest.raises(UserError):
            model_from_dict(content | {group: value})


def test_12_an_empty_group_that_is_none_of_ours_is_one_line():
    for group in ("memory", "optim"):
        content = to_dict(RunConfig())
        content[group]["nothing"] = {}
        with pytest.raises(UserError, match="unknown option 'nothing'"):
            run_from_dict(content)


# 12: words and the environment


def test_12_a_number_of_processes_that_is_none_is_one_line(monkeypatch, tmp_path: Path, capsys):
    for value in ("abc", "", "-1", "0", "1.5", "9" * 5000):
        monkeypatch.setenv("WORLD_SIZE", value)
        words = ["train", "--preset", "glyphs", "--run", str(tmp_path / "run"), "--device", "cpu"]
        assert main(words) == 2
        assert "WORLD_SIZE" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        monkeypatch.setattr("os._exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
        monkeypatch.setattr("sys.argv", ["kanerva", "nothing"])
        kanerva.cli.entry()
    assert stop.value.code == 2


@pytest.mark.parametrize(
    "name", ["a" * 5000, "a" * 300 + "/b", "a/" + "b" * 5000, "a\0b", "\udcff"]
)
def test_12_names_that_no_system_takes_are_one_line(name: str, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError) as error:
        kanerva.load(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flag", ["--data-root", "--note", "--steps", "--precision"])
def test_12_two_dashes_are_no_value(flag: str, capsys):
    """argparse takes them out of the words, and an empty list is left."""
    assert main(["bench", f"{flag}=--"]) == 2
    assert f"{flag} needs a value" in capsys.readouterr().err


# 13: terminals


def test_13_escapes_in_names_do_not_reach_a_terminal(tmp_path: Path, capsys):
    name = "\x1b]0;owned\x07\x1b[2J"
    assert main(["recall", str(tmp_path / name)]) == 2
    assert main([name]) == 2
    assert main(["compare", str(tmp_path / name)]) == 2
    record = json.loads((PRETRAINED / "mnist-1" / "evaluation.json").read_text())
    with pytest.raises(UserError):
        check_record(record | {"model": name}, "a record")
    (tmp_path / "r.json").write_text(json.dumps(record | {"device": name}))
    assert main(["compare", str(tmp_path / "r.json")]) == 2
    shown = capsys.readouterr()
    assert "\x1b" not in shown.err + shown.out and "\x07" not in shown.err + shown.out


def test_yaml_that_we_write_is_read(tmp_path: Path):
    for config in (RunConfig(), RunConfig(preset="mnist", variant="store")):
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(to_dict(config)))
        assert config_from_yaml(tmp_path / "c.yaml") == config
