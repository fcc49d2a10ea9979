"""Configs and command lines that hypothesis makes up: an exit code and a line, no traceback."""

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from children import Outcome, run_cases
from corpus import CONFIG
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import kanerva.data
from kanerva.cli import VERBS, main
from kanerva.cli.store import ACTIONS
from kanerva.config import flatten, run_from_dict, to_dict
from kanerva.errors import UserError

CODES = (0, 2, 3, 130, 143)
SLOW = ("--steps", "--iwae", "--images", "--every", "--minutes", "--controls")  # what is asked for
ODD = [
    "",
    "x",
    "-1",
    "0",
    "1",
    "2",
    "nan",
    "1e999",
    "null",
    "[]",
    "[1,2]",
    "{a: 1}",
    "true",
    "--",
    "-",
]
ODD += [
    "2001-99-99",
    "!!int x",
    "[" * 500,
    "9" * 400,
    "9" * 5000,
    "\x1b[2J",
    "a" * 5000,
    "..",
    "/",
    "~",
]
ODD += [
    "\udcff",
    "é",
    "0x10",
    "1_000",
    "*a",
    "&a b",
    "../../x",
    "/dev/null",
    "/dev/zero",
    "kpp",
    "mnist",
]
LARGE = ["1000000000", str(2**63), str(10**18)]


def gather(strategy: st.SearchStrategy[Any], count: int, number: int) -> list[Any]:
    """So many examples of a strategy, the same each time."""
    found: list[Any] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found[:count]


def command_lines(place: Path) -> st.SearchStrategy[list[str]]:
    """A verb, what it may be given, and flags: its own as a rule."""
    run = str(place / "run")
    things = st.sampled_from(
        [run, run, run, str(place), str(place / "a.png"), "a/b", "nothing", *ODD]
    )

    def of_verb(verb: str) -> st.SearchStrategy[list[str]]:
        flags, first, words = known_flags(verb), st.just(list[str]()), things
        if verb == "store":
            actions = st.sampled_from([*ACTIONS, *ACTIONS, "nothing", ""])
            stores = st.sampled_from([str(place / "s.kanerva")] * 3 + [run, "none.kanerva"])
            first = st.tuples(actions, stores).map(list)
            words = things.filter(lambda word: word not in ("/", "~"))  # every picture there is
        flag = st.sampled_from(flags).flatmap(
            lambda name: st.tuples(st.just(name), values(name, place))
        )
        stray = st.tuples(
            st.sampled_from(["--nothing", "--run", "-x", "--help", "--config"]),
            st.sampled_from(ODD),
        )
        some = st.lists(st.one_of(flag, flag, flag, flag, stray), max_size=4)
        joined = some.map(lambda pairs: [w for pair in pairs for w in join(pair)])
        rest = st.tuples(first, st.lists(words, max_size=2), joined)
        return rest.map(lambda t: [verb, *t[0], *t[1], *t[2]])

    return st.one_of(
        st.sampled_from([*VERBS, "store", "store"]).flatmap(of_verb),
        st.lists(st.sampled_from(ODD), max_size=3),
    )


def known_flags(verb: str) -> list[str]:
    parser = import_module(f"kanerva.cli.{verb}").make_parser(["--preset", "glyphs"])
    return [flag for flag in parser.flags if flag.startswith("--")]


def values(flag: str, place: Path) -> st.SearchStrategy[str]:
    if flag in SLOW:
        return st.sampled_from(["0", "1", "2", "-1", "x", "nan"])
    if flag in ("--out", "--save-memory", "--results", "--runs", "--run", "--run-folder"):
        return st.sampled_from(
            [str(place / "out" / "a.png"), str(place), "", "a\0b", str(place / "a.png" / "b")]
        )
    return st.one_of(st.sampled_from(ODD), st.sampled_from(LARGE), st.text(max_size=8))


def join(pair: tuple[str, str]) -> list[str]:
    return [pair[0]] if pair[1] == "" else [f"{pair[0]}={pair[1]}"]


def run_lines(place: Path, data: Path, count: int, number: int = 0) -> list[Outcome]:
    """`place` holds a run, a store and a picture. Nothing is trained, fetched or measured."""
    lines = gather(command_lines(place), count, number)
    main(["train", "--help"])  # imports are no case's time
    environment = {
        "HF_HUB_OFFLINE": "1",
        "KANERVA_DATA": str(data),
        "KANERVA_CACHE": str(place / "cache"),
    }

    def work(case: int) -> str:
        os.environ.update(environment)
        os.chdir(place)
        stub()
        with warnings.catch_warnings():
            code = main(list(lines[case]))
        return f"exit {code}" if code in CODES else "traceback"

    return [named(o, lines) for o in run_cases(work, count)]


def named(outcome: Outcome, examples: list[Any]) -> Outcome:
    return replace(outcome, detail=f"{str(examples[outcome.case])[:300]}: {outcome.detail}")


def stub() -> None:
    """Leave out what takes minutes or a network: words are what is tried."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise UserError("left out")

    import_module("huggingface_hub.constants").HF_HUB_OFFLINE = True  # else it tries for seconds
    kanerva.data.fetch = refuse
    loop = import_module("kanerva.training.loop")
    loop.train = lambda *_, **__: loop.Outcome("finished", 1, 1, None)
    import_module("kanerva.lab.harness").perform = refuse
    with suppress(ImportError):  # its packages are an extra
        import_module("kanerva.explore.server")._serve = refuse
    bench = import_module("kanerva.cli.bench")
    bench.MEASURES = dict.fromkeys(bench.MEASURES, refuse)


# Configs


def json_values() -> st.SearchStrategy[Any]:
    leaves = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
        st.integers(1, 16), st.integers(1, 16), st.floats(0, 1), st.sampled_from(["kpp", "mnist"]),
        st.sampled_from([10**18, -(10**30), 2**63, "1/T", "kpp", "..", 1e308, 10**400]),
    )  # fmt: skip
    return st.recursive(leaves, lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ), max_leaves=8)  # fmt: skip


def configs() -> st.SearchStrategy[dict[str, Any]]:
    """A run's config with some options replaced, whole groups among them."""
    content = to_dict(CONFIG)
    names = [
        *content,
        *(name for name in flatten(content) if "." in name),
        "nothing",
        "memory.nothing",
    ]
    change = st.tuples(st.sampled_from(names), json_values())

    def apply(changes: list[tuple[str, Any]]) -> dict[str, Any]:
        changed = {k: dict(v) if isinstance(v, dict) else v for k, v in content.items()}
        for name, value in changes:
            group, _, option = name.partition(".")
            if option and isinstance(changed.get(group), dict):
                changed[group][option] = value
            else:
                changed[group] = value
        return changed

    return st.lists(change, min_size=1, max_size=3).map(apply)


def run_configs(count: int, number: int = 0) -> list[Outcome]:
    examples = gather(configs(), count, number)
    read: Callable[[dict[str, Any]], object] = run_from_dict

    def work(case: int) -> str:
        read(examples[case])
        return "read"

    return [named(o, examples) for o in run_cases(work, count)]
