"""docs/results/commands.md says how each record was made: its lines give the records' configs."""

import importlib.util
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from kanerva.config import RunConfig, run_from_dict, to_dict
from kanerva.evaluation.records import SCHEMA, is_resized, read_record
from kanerva.presets import preset, with_options

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "results" / "commands.md").read_text()
NOW, RETIRED = TEXT.split("## Retired options")
NOT_OPTIONS = ("--preset", "--model", "--variant", "--run")
RECORDS = {
    f"{path.parent.name}/{path.stem}": read_record(path)
    for path in sorted((ROOT / "results").glob("*/*.json"))
    if json.loads(path.read_text())["kind"] == "evaluation"
}
SHIPPED = sorted((ROOT / "src/kanerva/pretrained").glob("*/evaluation.json"))
KEPT = [name for name, record in RECORDS.items() if record["config"] is not None]


def lines_of(text: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line for b in blocks for line in b.splitlines() if line.startswith("kanerva")]


def options_of(words: list[str]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))


def config_of(options: dict[str, str]) -> RunConfig:
    """What `kanerva train` with these options trains."""
    start = preset(options["--preset"], options.get("--model", "kpp"), options.get("--variant"))
    plain = to_dict(start)
    for flag, value in options.items():
        if flag not in NOT_OPTIONS:
            *group, name = flag.removeprefix("--").replace("-", "_").split(".")
            place: dict[str, Any] = plain[group[0]] if group else plain
            assert name in place, f"there is no {flag}"
            place[name] = yaml.safe_load(value)
    return run_from_dict(plain)


def resized_by(options: dict[str, str], run: RunConfig) -> RunConfig:
    """What `kanerva evaluate` with these options scores."""
    kept = {"--capacity": "capacity", "--size": "size"}
    memory = {name: int(options[flag]) for flag, name in kept.items() if flag in options}
    length = int(options.get("--episode-length", run.episode_length))
    return replace(run, model=with_options(run.model, memory=memory), episode_length=length)


def configs_told() -> dict[str, list[RunConfig]]:
    """For each record that a line names, the configs that lines make of it."""
    told: dict[str, list[RunConfig]] = {}
    runs: dict[str, dict[str, str]] = {}
    for line in lines_of(NOW):
        command, _, names = line.partition("#")
        _, verb, *words = shlex.split(command)
        options = options_of(words if verb == "train" else words[1:])
        trained = options if verb == "train" else runs[words[0]]
        if verb == "train" and "--run" in options:
            runs[options["--run"]] = options
        for record, held in RECORDS.items():
            folder, name = record.split("/")
            meant = {"PRESET": folder, "MODEL": held["model"]}
            full = {flag: meant.get(value, value) for flag, value in trained.items()}
            if full["--preset"] == folder and re.sub(r"-s\d+$", "", name) in names.split():
                config = config_of(full)
                made = config if verb == "train" else resized_by(options, config)
                told.setdefault(record, []).append(replace(made, seed=held["seed"]))
    return told


TOLD = configs_told()


@pytest.mark.parametrize("name", KEPT)
def test_a_line_of_results_makes_the_config_that_a_record_holds(name: str):
    held = run_from_dict(RECORDS[name]["config"], name)
    assert name in TOLD, f"commands.md does not say how to train {name}"
    assert held in TOLD[name], f"commands.md trains another {name}"


def test_retired_records_stand_under_their_heading_and_nowhere_else():
    retired = {name for name, record in RECORDS.items() if record["config"] is None}
    told = {
        f"{options_of(shlex.split(command)[2:])['--preset']}/{name}-s0"
        for command, _, names in (line.partition("#") for line in lines_of(RETIRED))
        for name in names.split()
    }
    assert told == retired and not retired & TOLD.keys()
    assert all(RECORDS[name]["retired"] == RECORDS[name]["commit"] for name in retired)


def test_a_records_hash_is_that_of_its_config():
    shipped = {path.parent.name: read_record(path) for path in SHIPPED}
    for name, record in (RECORDS | shipped).items():
        if record["config"] is not None:
            config = run_from_dict(record["config"], name)
            assert record["config_hash"] == config.config_hash(), name
            assert (record["model"], record["preset"]) == (config.model.name, config.preset), name
            assert (record["seed"], record["T"]) == (config.seed, config.episode_length), name


# How records of kanerva 0.1 came by their configs


@pytest.fixture(scope="module")
def migration() -> ModuleType:
    path = ROOT / "benchmarks" / "migrate_records.py"
    spec = importlib.util.spec_from_file_location("migrate_records", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_config_of_version_1_has_the_hash_it_is_kept_under(migration: ModuleType):
    configs = migration.read_configs()
    assert len(configs) > 60
    assert {migration.hash_as_version1(config) for config in configs.values()} == configs.keys()


def test_migration_makes_the_records_that_are_here(migration: ModuleType):
    """Back to schema 1 and forth again, every record is as it is in the repository. Options that
    came since stand in no record, and have their defaults."""
    configs, by_config = migration.read_configs(), {}
    for old, config in configs.items():
        named = migration.name_config(config, {"config_hash": old, "commit": ""}, old)
        by_config[named["config_hash"]] = old
    paths = [ROOT / "results" / f"{name}.json" for name in RECORDS] + SHIPPED
    migrated = 0
    for path in paths:
        record = read_record(path)
        if "resized" in record:  # written since
            continue
        old = record | {"schema": 1, "config_hash": by_config[record["config_hash"]]}
        old = {k: v for k, v in old.items() if k not in ("config", "retired")}
        added = ("bits_per_dim", "sum_bits_per_dim")
        old["memory"] = {k: v for k, v in record["memory"].items() if k not in added}
        again = migration.migrate(old, configs, str(path))
        assert list(again) == list(record), path
        ours, theirs = (one.pop("config") for one in (again, record))
        assert again == record, path
        assert (ours is None) == (theirs is None), path
        assert ours is None or run_from_dict(ours) == run_from_dict(theirs), path
        migrated += 1
    assert migrated >= 112


def test_migration_leaves_records_of_today_alone(migration: ModuleType, tmp_path: Path):
    path = tmp_path / "evaluation.json"
    path.write_text(SHIPPED[0].read_text() + "\n\n")
    migration.main([str(tmp_path)])
    assert path.read_text() == SHIPPED[0].read_text() + "\n\n"
    assert json.loads(path.read_text())["schema"] == SCHEMA


def test_a_memory_of_another_size_is_known_by_either_name():
    assert is_resized({"resized": True}) and is_resized({"elsewhere": True})
    assert not is_resized({"resized": False, "elsewhere": True}) and not is_resized({})
