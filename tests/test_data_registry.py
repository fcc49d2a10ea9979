"""A data set is one module and one entry; the registry is read without anything heavy."""

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kanerva
from kanerva import data
from kanerva.cli import main
from kanerva.data.registry import DATASETS, DatasetInfo
from kanerva.errors import UserError

HEAVY = {"torch", "numpy", "matplotlib", "PIL", "pooch", "tqdm", "jaxtyping"}

ALONE = f"""
import sys, types
kanerva = types.ModuleType("kanerva")  # without what its own __init__ imports
kanerva.__path__ = {list(kanerva.__path__)!r}
sys.modules["kanerva"] = kanerva
from kanerva.data import registry
assert registry.info("mnist").image_shape == (1, 28, 28)
print(*sorted(sys.modules.keys() & {HEAVY!r}))
"""

TOY = """
import torch

from kanerva.data.image_set import ImageSet


def load(split, place, shade=7):
    path = place / "count.txt"
    if not path.is_file():
        return None
    images = torch.full((int(path.read_text()), 1, 4, 4), shade, dtype=torch.uint8)
    return ImageSet("toy", split, images)


def is_present(place):
    return (place / "count.txt").is_file()


def fetch(place):
    place.mkdir(parents=True)
    (place / "count.txt").write_text("5")
    return [place / "count.txt"]
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of one module and one entry; the data root it may be fetched to."""
    (tmp_path / "toy_set.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "toy_set", raising=False)  # of the test before
    entry = DatasetInfo(
        "toy", "grey squares", (1, 4, 4), "none", module="toy_set", options=("shade",)
    )
    monkeypatch.setitem(DATASETS, "toy", entry)
    return tmp_path / "root"


def test_the_registry_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_entry_has_a_module_with_the_interface():
    for name, entry in DATASETS.items():
        module = import_module(entry.module or f"kanerva.data.{name}")
        taken = tuple(inspect.signature(module.load).parameters)
        assert taken == ("split", "place", *entry.options), name
        assert tuple(inspect.signature(module.is_present).parameters) == ("place",), name
        means = [hasattr(module, "FILES"), hasattr(module, "fetch"), bool(entry.by_hand)]
        assert sum(means) == (0 if entry.needs else 1), name
        assert not entry.needs or entry.needs in entry.options


def test_a_new_set_is_fetched_and_loaded(toy: Path):
    assert not data.is_present("toy", toy)
    with pytest.raises(UserError, match="toy not found in .*: run `kanerva data fetch toy`"):
        data.load("toy", "train", toy)
    assert data.fetch("toy", toy) == [toy / "toy" / "count.txt"]
    assert data.is_present("toy", toy)
    assert data.load("toy", "test", toy).images.tolist() == [[[[7] * 4] * 4]] * 5
    assert data.load("toy", "test", toy, shade=9).images.unique().tolist() == [9]


def test_a_new_set_is_listed(toy: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["data", "list", "--data-root", str(toy)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "toy           not here      grey squares" in lines
    assert any(line.startswith("images        --data.folder ") for line in lines)
    with pytest.raises(UserError, match="did you mean toy. there are glyphs, .*, images, toy$"):
        data.info("toys")


def test_an_option_of_another_set_is_refused_in_a_line(toy: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(name: str, **options: object) -> str:
        with pytest.raises(UserError) as error:
            data.load(name, "train", toy, **options)  # pyright: ignore[reportArgumentType]
        return str(error.value)

    assert refused("toy", crop=3) == "crop=3 is for the data set celeba, not for toy"
    assert refused("mnist", shade=3) == "shade=3 is for the data set toy, not for mnist"
    assert refused("toy", shades=3) == "no data set takes shades=3: toy takes shade"
    assert refused("mnist", shades=3) == "no data set takes shades=3: mnist takes no options"
    other = DatasetInfo("other", "", (1, 4, 4), "none", options=("shade",))
    monkeypatch.setitem(DATASETS, "other", other)
    assert refused("mnist", shade=3) == "shade=3 is for the data sets toy, other, not for mnist"


def test_public_names_are_there_and_no_module_hides_one():
    modules = {path.stem for path in Path(inspect.getfile(data)).parent.glob("*.py")}
    assert not modules & set(data.__all__)
    assert set(data.__all__) <= set(dir(data))
    for name in data.__all__:
        assert getattr(data, name) is not None
    assert callable(data.binarize) and callable(data.load)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = data.lode  # pyright: ignore[reportAttributeAccessIssue]
