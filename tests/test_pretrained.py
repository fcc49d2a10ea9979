"""Models that ship: loaded by name, small, scored as they are, and used by every verb."""

import json
import math
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from importlib import resources
from pathlib import Path

import pytest
import torch

import kanerva
from kanerva.cli import main
from kanerva.config import VaeConfig
from kanerva.data.splits import fixed_episodes, load_split
from kanerva.errors import UserError
from kanerva.evaluation.bound import bound
from kanerva.evaluation.records import read_record
from kanerva.files import read_tensors, write_tensors
from kanerva.lab import ship as shipping
from kanerva.lab.card import card
from kanerva.lab.quote import quoted
from kanerva.lab.ship import CARD, MOST, RECORD, save_rounded, ship
from kanerva.models import build, loading
from kanerva.models.base import MemoryModel
from kanerva.models.checkpoint_io import CONFIG, WEIGHTS
from kanerva.models.eight_bits import from_eight_bits, in_eight_bits
from kanerva.models.kpp_bits import KppBits
from kanerva.models.loading import PRETRAINED, load, shipped, shipped_folder, shipped_versions
from kanerva.presets import preset, with_options
from kanerva.runs import read_run_config
from kanerva.training.checkpoint import file_digest
from kanerva.training.loop import train
from test_bits import CONFIG as BITS

ROOT = Path(__file__).parents[1]
NAMES = shipped_versions()
FILES = {WEIGHTS, CONFIG, "config.yaml", RECORD, CARD}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, mnist_root: Path) -> Path:
    """A `kpp` of four steps."""
    run = tmp_path_factory.mktemp("pretrained") / "run"
    start = preset("mnist")
    model = with_options(
        start.model,
        encoder={"width": 4},
        memory={"size": 16},
        readout={"size": 4, "prior_width": 4},
        decoder={"base": 8},
    )
    config = replace(start, model=model, episode_length=8, batch=2, steps=4, validate_episodes=2)
    train(config, run, data_root=mnist_root, accelerator="cpu")
    return run


@pytest.fixture(scope="module")
def shelf(run: Path, tmp_path_factory: pytest.TempPathFactory, mnist_root: Path) -> Path:
    """A folder with that run in it, shipped as `tiny`."""
    shelf = tmp_path_factory.mktemp("shelf")
    ship(run, "tiny", into=shelf, data_root=mnist_root, control_images=8)
    return shelf


@pytest.fixture
def tiny(
    shelf: Path, mnist_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """An empty working directory, and a package that ships `tiny` alone; not a byte of it may
    change."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KANERVA_DATA", str(mnist_root))
    monkeypatch.setattr(loading, "PRETRAINED", shelf)
    before = {path: path.read_bytes() for path in (shelf / "tiny").iterdir()}
    yield shelf / "tiny"
    assert {path: path.read_bytes() for path in (shelf / "tiny").iterdir()} == before


# What ships


def test_three_models_ship():
    assert {"glyphs", "mnist", "omniglot"} <= set(shipped())
    assert all(re.fullmatch(r"[a-z0-9_]+-[1-9]\d*", name) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_is_small_rounded_and_whole(name: str):
    folder = PRETRAINED / name
    assert {path.name for path in folder.iterdir()} == FILES
    assert (folder / WEIGHTS).stat().st_size <= MOST
    stored, _ = read_tensors(folder / WEIGHTS)
    model = load(name)
    assert {stored[key].dtype for key, _ in model.named_parameters()} <= {torch.float16, torch.int8}
    assert not model.training and {p.dtype for p in model.parameters()} == {torch.float32}
    for key, value in model.state_dict().items():
        if stored[key].dtype != torch.int8:
            assert torch.equal(value, stored[key].to(value.dtype)), key
            continue
        scale = stored.get(f"{key}.scale", torch.tensor([1 / 64]))  # 1/64: layers of integers
        assert torch.equal(value, stored[key] * scale.view(-1, *[1] * (value.ndim - 1))), key


@pytest.mark.parametrize(
    "name, whole, blocks",
    [
        ("glyphs-1", "e25115210807dc85", "52d14188f8fc1708"),
        ("mnist-1", "09af3b1c4d889b4d", "8001529e736b4307"),
    ],
)
def test_files_written_before_options_were_retired_are_still_read(
    name: str, whole: str, blocks: str
):
    """Memories and stores name the fingerprint of the model that wrote them."""
    model = load(name)
    assert model.fingerprint().startswith(whole) and model.block_fingerprint().startswith(blocks)


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_its_record_and_the_record_is_of_these_files(name: str):
    folder = PRETRAINED / name
    record, text = read_record(folder), (folder / CARD).read_text()
    assert text == card(record, read_run_config(folder))
    assert f"{record['bound']['nll_nats']:.2f} ± {record['bound']['ci95']:.2f} nats" in text
    assert record["commit"] in text and record["shipped"]["trained"]["commit"] in text
    assert record["split"] == "test" and not record["partial"]
    assert record["shipped"]["name"] == name
    for file, sha256 in record["shipped"]["sha256"].items():
        assert file_digest(folder / file) == sha256, file


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_scores_as_recorded(name: str):
    """The bound of the first images, which the record holds as `own`."""
    record, config = read_record(PRETRAINED / name), read_run_config(PRETRAINED / name)
    try:
        images = load_split(config, "test", None)
    except UserError as error:
        if config.data.set == "glyphs":  # always there
            raise
        pytest.skip(str(error))
    episodes = fixed_episodes(config, images, torch.device("cpu"))
    count = math.ceil(record["controls"]["n_images"] / config.episode_length)
    found = bound(load(name), episodes, limit=count)
    assert found.nll_nats == pytest.approx(record["controls"]["own"]["nll_nats"], abs=0.05)
    assert abs(found.nll_nats - record["bound"]["nll_nats"]) < record["bound"]["ci95"] + found.ci95


@pytest.mark.parametrize("name", ["glyphs", "glyphs-1"])
def test_evaluate_agrees_with_the_record(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    part = ["--episodes", "3", "--controls", "32", "--device", "cpu"]
    assert main(["evaluate", name, *part]) == 0
    folder = shipped_folder(name)
    assert folder is not None
    record = read_record(folder)
    again = read_record(tmp_path / "runs" / "pretrained" / name)
    apart = abs(again["bound"]["nll_nats"] - record["bound"]["nll_nats"])
    assert apart < again["bound"]["ci95"] + record["bound"]["ci95"] + 1e-3
    assert again["n_images"] == 3 * record["T"] and again["steps"] == record["steps"]
    bits = again["memory"]["bits_per_image"] / record["memory"]["bits_per_image"]
    assert 0.8 < bits < 1.25  # those of other images, where blocks are bits


# By name


def test_a_name_gives_the_runs_weights_rounded(run: Path, tiny: Path):
    rounded = load(run)
    rounded.load_state_dict(from_eight_bits(in_eight_bits(rounded), run))
    images = torch.bernoulli(torch.full((8, 1, 28, 28), 0.4))

    def score(model: MemoryModel) -> torch.Tensor:
        return model.elbo(images, generator=torch.Generator().manual_seed(3)).nll_nats

    assert torch.equal(score(kanerva.load("tiny")), score(rounded))
    assert not torch.equal(score(load(run)), score(rounded))


def test_a_name_means_the_newest_version(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By number: the tenth is newer than the ninth."""
    for name in ("tiny-9", "tiny-10", "tiny_too-11", "tiny-old-12"):
        shutil.copytree(shelf / "tiny", tmp_path / "shelf" / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "PRETRAINED", tmp_path / "shelf")
    assert shipped() == ["tiny", "tiny-old", "tiny_too"]
    named = ("tiny", "tiny-9", "tiny-10", "tiny-8", "tiny-", "old")
    found = [shipped_folder(name) for name in named]
    assert [folder and folder.name for folder in found] == [
        "tiny-10", "tiny-9", "tiny-10", None, None, None,
    ]  # fmt: skip


def test_an_unknown_name_is_one_line_that_lists_what_ships(
    tiny: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(UserError, match=r"no run folder at tinny .* shipped models: tiny$"):
        load("tinny")
    assert main(["generate", "tinny"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.endswith("shipped models: tiny")


def test_a_run_here_comes_before_a_shipped_model_and_another_folder_does_not(
    run: Path, tiny: Path, tmp_path: Path
):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "data.gz").write_text("a folder of data, say")
    first = load("tiny").state_dict()
    with pytest.raises(UserError, match="no checkpoint in tiny"):
        load("./tiny")
    with pytest.raises(UserError, match="no checkpoint in tiny"):
        load(Path("tiny"))
    shutil.rmtree(tmp_path / "tiny")
    shutil.copytree(run, tmp_path / "tiny")
    here = load("tiny").state_dict()
    own = load(run).state_dict()
    assert all(torch.equal(here[key], own[key]) for key in own)
    assert any(not torch.equal(here[key], first[key]) for key in own)


def test_what_shipped_loads_though_options_were_added_since(tiny: Path, tmp_path: Path):
    """As seen from a config that lacks one, which then has its default."""
    old = shutil.copytree(tiny, tmp_path / "old")
    config = json.loads((old / CONFIG).read_text())
    del config["decoder"]["neighbours"]
    (old / CONFIG).write_text(json.dumps(config))
    assert load(old).config == load("tiny").config


def test_every_verb_takes_a_name_and_writes_beside_runs(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    home = Path("runs/pretrained/tiny")
    verbs = {"generate": [], "recall": ["--steps", "2"], "denoise": ["--steps", "2"], "memory": []}
    for verb, less in verbs.items():
        assert main([verb, "tiny", "--device", "cpu", *less]) == 0
        assert capsys.readouterr().out.splitlines()[0] == str(home / f"{verb}.png")
    assert main(["evaluate", "tiny", "--controls", "8", "--device", "cpu"]) == 0
    assert f"record: {home / RECORD}" in capsys.readouterr().out
    shown, filed = read_record(home), read_record(tiny)
    assert shown["bound"]["nll_nats"] == pytest.approx(filed["bound"]["nll_nats"], abs=1e-3)
    assert shown["images_seen"] == filed["images_seen"] == 64
    assert main(["compare", "tiny", str(home)]) == 0
    assert main(["compare", "tiny", str(home), "--over-seeds"]) == 0
    assert "kpp-store" in capsys.readouterr().out
    pictures = {f"{name}.png" for name in (*verbs, "reconstructions")}
    assert {path.name for path in home.iterdir()} == pictures | {RECORD}
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


# Shipping


def test_what_is_too_large_is_refused_in_one_line(
    run: Path, tmp_path: Path, mnist_root: Path, monkeypatch: pytest.MonkeyPatch
):
    large = build(preset("mnist", "kpp-paper").model)
    with pytest.raises(UserError, match=r"^\d+\.\d MB in 8 bits.* at most 6: .* 6 million"):
        save_rounded(large, tmp_path)
    shelf = tmp_path / "shelf"
    (shelf / "tiny").mkdir(parents=True)
    (shelf / "tiny" / "kept").write_text("the one before")
    monkeypatch.setattr(shipping, "MOST", 1000)
    with pytest.raises(UserError, match="in 8 bits"):
        ship(run, "tiny", into=shelf, data_root=mnist_root)
    assert [path.name for path in shelf.rglob("*")] == ["tiny", "kept"]


def test_numbers_beyond_half_precision_are_refused():
    layer = torch.nn.Linear(2, 1)
    layer.register_buffer("count", torch.tensor(70000.0))
    kept = in_eight_bits(layer)
    assert kept["bias"].dtype == torch.float16 and kept["count"] == 70000
    with torch.no_grad():
        layer.bias.fill_(70000)
    with pytest.raises(UserError, match="bias has numbers out of half precision"):
        in_eight_bits(layer)
    with torch.no_grad():
        layer.bias.fill_(0)
        layer.weight[0, 1] = torch.inf
    with pytest.raises(UserError, match="weight has numbers out of half precision"):
        in_eight_bits(layer)


def test_each_row_is_rounded_to_a_scale_of_its_own():
    layer = torch.nn.ConvTranspose2d(5, 7, 3)
    with torch.no_grad():
        layer.weight *= 10.0 ** torch.arange(-3, 2)[:, None, None, None]
        layer.weight[1] = 0
    kept = in_eight_bits(layer)
    rows, largest = kept["weight"].flatten(1), layer.weight.flatten(1).abs().amax(dim=1)
    assert kept["weight"].dtype == torch.int8 and kept["weight"].shape == layer.weight.shape
    assert rows.abs().amax(dim=1).tolist() == [127, 0, 127, 127, 127]
    found = from_eight_bits(kept, "here")
    assert found.keys() == layer.state_dict().keys()
    apart = (found["weight"] - layer.weight).flatten(1).abs().amax(dim=1)
    assert (apart <= 0.51 * largest / 127).all()


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1)])
def test_a_forged_scale_is_refused_in_one_line(shape: tuple[int, ...], tmp_path: Path):
    model = build(BITS)
    save_rounded(model, tmp_path)
    stored, about = read_tensors(tmp_path / WEIGHTS)
    stored["kin.see.weight.scale"] = torch.ones(shape)
    write_tensors(tmp_path / WEIGHTS, stored, about)
    with pytest.raises(UserError, match=r"kin\.see\.weight\.scale is \("):
        load(tmp_path)


def test_integer_layers_ship_as_the_bytes_that_they_use(tmp_path: Path):
    """No number changes."""
    model = build(BITS)
    assert isinstance(model, KppBits)
    with torch.no_grad():  # beyond what 8 bits hold, too
        model.pixel_code.mix.weight.mul_(40)
    save_rounded(model, tmp_path)
    stored, other = read_tensors(tmp_path / WEIGHTS)[0], load(tmp_path)
    assert isinstance(other, KppBits)
    pairs = [(model.pixel_code.mix, other.pixel_code.mix), (model.prior.first, other.prior.first)]
    assert stored["prior.first.weight"].dtype == torch.int8
    assert int(stored["pixel_code.mix.weight"].abs().max()) == 127
    for ours, theirs in pairs:
        assert torch.equal(ours.whole()[0], theirs.whole()[0])


def test_a_model_of_bits_ships_with_the_tables_that_code(tmp_path: Path):
    """They are counts up to 2^16: rounded, files could not be read."""
    model = build(BITS)
    save_rounded(model, tmp_path)
    other = load(tmp_path)
    assert isinstance(other, KppBits)
    for name in ("prior.powers", "pixel_code.counts"):
        assert torch.equal(other.state_dict()[name], model.state_dict()[name])
    images = (torch.rand(3, *BITS.image) < 0.3).float()
    other.write(images).save(tmp_path / "memory")
    again = kanerva.Memory.load(tmp_path / "memory", other)
    assert torch.equal(other.get(again), images)


def test_the_command_ships_a_run_over_an_older_one(
    run: Path, tmp_path: Path, mnist_root: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "left_over").write_text("")
    words = ["--into", str(tmp_path), "--data-root", str(mnist_root)]
    assert shipping.main([str(run), "mine", *words]) == 0
    assert {path.name for path in (tmp_path / "mine").iterdir()} == FILES
    assert (tmp_path / "mine" / CARD).read_text() in capsys.readouterr().out
    for run_given, name, said in (
        (run, "../mine", "a word such as mnist"),
        (run / "nowhere", "mine", "no run at"),
    ):
        assert shipping.main([str(run_given), name, *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def test_what_a_stopped_command_leaves_is_no_shipped_model(
    run: Path, tmp_path: Path, mnist_root: Path, monkeypatch: pytest.MonkeyPatch
):
    def fill(source: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / CONFIG).write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loading, "PRETRAINED", tmp_path)
    monkeypatch.setattr(shutil, "copytree", fill)
    with pytest.raises(UserError, match="No space left"):
        ship(run, "mine-1", into=tmp_path, data_root=mnist_root)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space left"):
        fill(tmp_path, tmp_path / ".mine-1.tmp")  # as a kill would leave it
    assert shipped_versions() == []


def test_a_shipped_model_is_scored_again_with_the_same_weights(
    shelf: Path, tmp_path: Path, mnist_root: Path
):
    ship(shelf / "tiny", "tiny", into=tmp_path, data_root=mnist_root, control_images=8)
    for name in (WEIGHTS, CONFIG, "config.yaml"):
        assert file_digest(tmp_path / "tiny" / name) == file_digest(shelf / "tiny" / name), name
    before, after = (json.loads((at / "tiny" / RECORD).read_text()) for at in (shelf, tmp_path))
    assert after["shipped"] == before["shipped"] and after["bound"] == before["bound"]
    assert {k: after[k] for k in ("steps", "images_seen")} == {
        k: before[k] for k in ("steps", "images_seen")
    }


def test_a_run_that_cannot_be_traced_is_refused(run: Path, tmp_path: Path):
    bare = shutil.copytree(run, tmp_path / "bare")
    shutil.rmtree(bare / "checkpoints" / "last")
    with pytest.raises(UserError, match="it says how"):
        ship(bare, "bare", into=tmp_path)
    text = (bare / "config.yaml").read_text().replace("set: mnist", "set: images")
    (bare / "config.yaml").write_text(text)
    with pytest.raises(UserError, match="which others lack"):
        ship(bare, "bare", into=tmp_path)


def test_a_card_says_only_what_applies(tiny: Path):
    record, config = read_record(tiny), read_run_config(tiny)
    text = card(record, config)
    assert "at most 36 images" in text and "kpp-bits" in text
    other = record | {"model": "vae", "variant": None, "controls": {"n_images": 8}}
    other["controls"] |= {"own": record["controls"]["own"]}
    text = card(other, replace(config, model=VaeConfig(), variant=None))
    assert "at most 36 images" not in text and "kpp-bits" not in text and "left_out`" not in text


# The package


@pytest.mark.parametrize("name", NAMES)
def test_the_installed_package_and_its_recipe_have_the_files(name: str):
    there = resources.files("kanerva").joinpath("pretrained", name)
    assert {path.name for path in there.iterdir()} == FILES
    recipe = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = recipe["tool"]["setuptools"]["package-data"]["kanerva"]
    for file in FILES:
        assert any(fnmatch(f"pretrained/{name}/{file}", pattern) for pattern in patterns), file


def test_a_wheel_and_an_sdist_have_the_files(tmp_path: Path):
    pytest.importorskip("setuptools", "77")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    code = "from setuptools import build_meta as b; b.build_wheel('.'); b.build_sdist('.')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.split("/", 1)[-1] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        for inner in (f"kanerva/pretrained/{name}/{file}" for name in NAMES for file in FILES):
            assert archive.read(inner) == (PRETRAINED.parents[1] / inner).read_bytes()
            assert f"src/{inner}" in packed


# The page


def test_the_page_quotes_the_records_and_its_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = ROOT / "docs" / "pretrained.md"
    text = page.read_text()
    assert "<!-- end -->" in text and quoted(text, page.parent) == text
    for target in re.findall(r"\]\((?!http|#)([^)]+)\)", text):
        assert (page.parent / target.split("#")[0]).exists(), target
    for name in NAMES:
        assert f"pretrained/{name}/{CARD}" in text
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "pretrained.md", "exec"), {})
    assert re.fullmatch(r"\d+\.\d nats per image\n", capsys.readouterr().out)
