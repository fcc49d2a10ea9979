"""Bring evaluation records of kanerva 0.1 to schema 2: each with its whole config.

    python benchmarks/migrate_records.py results src/kanerva/pretrained

A record of schema 1 holds the hash of its config, and no config. `version1_configs.json` holds the
configs that its hashes name: found by running the commands of RESULTS.md through kanerva 0.1, and
six of kpp-paper through the commits that scored them. That they are those configs needs no old code
to see: `hash_as_version1` is kanerva 0.1's. Each is brought up to date as any config file is; where
its options are gone the record has none, is marked `retired`, and keeps its hash.

Records of schema 2 stay as they are, byte for byte, and so does every figure of the others.
"""

import hashlib
import json
import math
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

from kanerva.config import run_from_dict, to_dict
from kanerva.errors import UserError
from kanerva.evaluation.records import SCHEMA, check_record, write_record

CONFIGS = Path(__file__).with_name("version1_configs.json")
NOT_HASHED = ("seed", "log_every", "preset", "variant", "step", "strategy")
NEIGHBOURLY = ("neighbours", "near_width", "near_depth", "sketch")
Config = dict[str, Any]


def read_configs() -> dict[str, Config]:
    """Configs of kanerva 0.1 by the hash they had, with seed 0."""
    stored = json.loads(CONFIGS.read_text())
    found = {}
    for key, entry in stored["configs"].items():
        flat = stored["usual"] | entry["changes"]
        for option in entry.get("absent", []):  # older than the option
            del flat[option]
        found[key] = unflatten(flat)
    return found


def unflatten(flat: Config) -> Config:
    """{"memory.size": 8} as {"memory": {"size": 8}}."""
    nested: Config = {}
    for key, value in flat.items():
        *group, option = key.split(".")
        (nested.setdefault(group[0], {}) if group else nested)[option] = value
    return nested


def hash_as_version1(config: Config) -> str:
    """What kanerva 0.1 called a config. An option that came later was left out while unused, so
    that older hashes stayed as they were."""
    content = deepcopy(config)
    for name in NOT_HASHED:
        content.pop(name, None)
    content["data"].pop("folder", None)
    if content["data"].get("crop") is None:
        content["data"].pop("crop", None)
    if not content["decoder"].get("neighbours"):
        for name in NEIGHBOURLY:
            content["decoder"].pop(name, None)
    if not content["memory"].get("outline"):
        content["memory"].pop("outline", None)
    if content["model"] not in ("km", "dkm", "dkm-tsm", "dnc"):
        content.pop("rows", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def migrate(record: Config, configs: dict[str, Config], where: str) -> Config:
    """A record of schema 1 as one of schema 2."""
    old = record["config_hash"]
    if old not in configs:
        raise UserError(f"{where}: no config is known of the hash {old}")
    new: Config = {}
    for key, value in record.items():
        if key == "config_hash":
            new |= name_config(configs[old] | {"seed": record["seed"]}, record, where)
        else:
            new[key] = value
    new["schema"] = SCHEMA
    pixels = math.prod(record["image"])
    bits_per_dim = record["memory"]["bits_per_image"] / pixels
    both = bits_per_dim + record["bound"]["bits_per_dim"]
    new["memory"] = record["memory"] | {"bits_per_dim": bits_per_dim, "sum_bits_per_dim": both}
    check_record(new, where)
    return new


def name_config(config: Config, record: Config, where: str) -> Config:
    """A config of today and its hash; or neither, and the commit at which there was one."""
    try:
        run = run_from_dict(config, where)
    except UserError as error:
        if "was retired" not in str(error):
            raise
        kept = record["config_hash"]
        return {"config": None, "retired": record["commit"], "config_hash": kept}
    return {"config": to_dict(run), "config_hash": run.config_hash()}


def main(folders: list[str]) -> None:
    configs = read_configs()
    for path in sorted(p for folder in folders for p in Path(folder).rglob("*.json")):
        record = json.loads(path.read_text())
        if record.get("kind") == "evaluation" and record["schema"] == 1:
            new = migrate(record, configs, str(path))
            write_record(new, path)
            print(path, f"retired at {new['retired']}" if new["config"] is None else "migrated")


if __name__ == "__main__":
    main(sys.argv[1:] or ["results", "src/kanerva/pretrained"])
