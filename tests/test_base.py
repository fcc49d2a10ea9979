"""Weights as two plain files: what was saved comes back, and damage is one line of error."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kanerva.config import KppPaperConfig, ModelConfig, to_dict
from kanerva.errors import UserError
from kanerva.models import build, checkpoint_io, model_class
from kanerva.models.kpp_paper import KppPaper
from kanerva.models.loading import load
from kanerva.models.terms import ElboTerms, JointDensity


def test_a_saved_model_comes_back_the_same(model: KppPaper, draw, tmp_path: Path):
    model.save_pretrained(tmp_path)
    back = KppPaper.from_pretrained(tmp_path)
    assert back.config == model.config and not back.training
    for name, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name
    images = draw(model.config, 2, 3)
    ours, theirs = (
        m.elbo(images, generator=torch.Generator().manual_seed(1)) for m in (model, back)
    )
    assert torch.equal(ours.elbo, theirs.elbo)


def test_weights_of_a_version_with_fewer_options_load(
    model: KppPaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def older(config: ModelConfig) -> dict:
        written = to_dict(config)
        del written["likelihood"]
        return written

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_io, "to_dict", older)
        model.save_pretrained(tmp_path)
    assert KppPaper.from_pretrained(tmp_path).config == model.config
    written = json.loads((tmp_path / "config.json").read_text())
    written["optional"] = written.pop("keys")
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(UserError, match="optional"):
        KppPaper.from_pretrained(tmp_path)


def test_saving_says_nothing(model: KppPaper, tmp_path: Path, capfd):
    """No message, and (warnings being errors here) no warning."""
    model.save_pretrained(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_checkpoint_is_tensors_and_a_config_and_no_pickle(model: KppPaper, tmp_path: Path):
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == to_dict(model.config)
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    names = {p.name for p in tmp_path.iterdir()}
    assert names - {"README.md"} == {"config.json", "model.safetensors"}  # the Hub adds a card


def test_a_saved_model_can_be_saved_over(model: KppPaper, wake, tiny, tmp_path: Path):
    model.save_pretrained(tmp_path)
    other = wake(replace(tiny, memory=replace(tiny.memory, reads=3)))
    other.save_pretrained(tmp_path)
    assert load(tmp_path).config.memory.reads == 3


def test_a_colour_model_comes_back_too(wake, tiny_colour: KppPaperConfig, tmp_path: Path):
    wake(tiny_colour).save_pretrained(tmp_path)
    assert load(tmp_path).config == tiny_colour


@pytest.mark.parametrize("inner", ["", "checkpoints/best", "checkpoints/last"])
def test_load_finds_the_checkpoint_of_a_run(model: KppPaper, tmp_path: Path, inner: str):
    model.save_pretrained(tmp_path / inner)
    back = load(str(tmp_path))
    assert type(back) is KppPaper and not back.training
    assert torch.equal(back.decoder.project.weight, model.decoder.project.weight)


def test_load_prefers_the_best_checkpoint_to_the_last(wake, tiny: KppPaperConfig, tmp_path: Path):
    for name in ("last", "best"):
        config = replace(tiny, memory=replace(tiny.memory, reads=1 if name == "best" else 2))
        wake(config).save_pretrained(tmp_path / "checkpoints" / name)
    assert load(tmp_path).config.memory.reads == 1


def test_the_model_of_a_config_is_built_by_name(tiny: KppPaperConfig):
    assert type(build(tiny)) is model_class("kpp-paper") is KppPaper


def damage(folder: Path, kind: str) -> str:
    """Spoil a checkpoint; what the message must name."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, options = weights.read_bytes(), json.loads(config.read_text())
    tensors = {k: v.clone() for k, v in load_file(weights).items()}  # load_file maps the file
    match kind:
        case "no weights":
            weights.unlink()
        case "no config":
            config.unlink()
            return str(folder)
        case "truncated weights":
            weights.write_bytes(whole[: len(whole) // 2])
        case "short header":
            weights.write_bytes(whole[:20])
        case "empty weights":
            weights.write_bytes(b"")
        case "pickled weights":
            torch.save(tensors, weights)
        case "missing tensor":
            del tensors["decoder.project.bias"]
            save_file(tensors, weights)
            return "decoder.project.bias"
        case "extra tensor":
            save_file({**tensors, "spare": torch.zeros(1)}, weights)
            return "spare"
        case "wrong shape":
            tensors["decoder.project.bias"] = torch.zeros(3)
            save_file(tensors, weights)
            return "(3,)"
        case "another config":
            options["readout"]["size"] = 6
            config.write_text(json.dumps(options))
            return "model.safetensors"
        case "truncated config":
            config.write_text(config.read_text()[:40])
        case "empty config":
            config.write_text("")
        case "binary config":
            config.write_bytes(whole)
        case "list config":
            config.write_text("[]")
        case "unknown key":
            config.write_text(json.dumps({**options, "spare": 1}))
            return "unknown option spare"
        case "unknown model":
            config.write_text(json.dumps({**options, "model": "kpp-9"}))
            return "'kpp-9'"
    return str(config if "config" in kind else weights)


@pytest.mark.parametrize(
    "kind",
    ["no weights", "no config", "truncated weights", "short header", "empty weights"]
    + ["pickled weights", "missing tensor", "extra tensor", "wrong shape", "another config"]
    + ["truncated config", "empty config", "binary config", "list config", "unknown key"]
    + ["unknown model"],
)
def test_a_damaged_checkpoint_is_one_line_of_error_that_names_the_damage(
    model: KppPaper, tmp_path: Path, kind: str
):
    model.save_pretrained(tmp_path)
    named = damage(tmp_path, kind)
    with pytest.raises(UserError) as error:
        load(tmp_path)
    assert named in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_folder_that_is_not_there_is_an_error_that_names_it(tmp_path: Path):
    with pytest.raises(UserError, match="nowhere"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        load(tmp_path / "file")


@pytest.fixture
def hub(model: KppPaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """A Hub with one repository, owner/name, and a record of what was asked of it."""
    model.save_pretrained(tmp_path / "hub")
    asked: list[dict] = []

    def download(repo: str, file: str, **options: object) -> str:
        asked.append({"repo": repo, "file": file, **options})
        if repo != "owner/name":
            raise LocalEntryNotFoundError("Cannot find it.\nA second line\nand a third.")
        return str(tmp_path / "hub" / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    return asked


def test_a_hub_id_loads_like_a_folder(model: KppPaper, hub: list[dict]):
    back = load("owner/name")
    assert torch.equal(back.decoder.project.weight, model.decoder.project.weight)
    assert {a["file"] for a in hub} == {"config.json", "model.safetensors"}


def test_a_revision_is_passed_on(hub: list[dict]):
    KppPaper.from_pretrained("owner/name", revision="v2", local_files_only=True)
    assert all(a["revision"] == "v2" and a["local_files_only"] for a in hub)


def test_a_hub_id_that_cannot_be_reached_is_one_line_of_error(hub: list[dict]):
    with pytest.raises(UserError) as error:
        load("owner/other")
    assert "owner/other" in str(error.value) and "Cannot find it." in str(error.value)
    assert "\n" not in str(error.value)


def random_terms(*shape: int) -> ElboTerms:
    return ElboTerms(torch.randn(shape), torch.rand(shape), torch.rand(shape))


def test_the_bound_is_likelihood_less_both_divergences():
    terms = random_terms(2, 3)
    expected = terms.log_likelihood - terms.readout_kl - terms.key_kl
    torch.testing.assert_close(terms.elbo, expected)
    torch.testing.assert_close(terms.nll_nats, -expected)
    torch.testing.assert_close(terms.loss, -expected.mean())  # a mean: no KL is divided by T again
    assert torch.equal(terms[1].elbo, expected[1])


def test_a_joint_density_is_the_sum_of_its_pieces():
    joint = JointDensity(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([4.0]))
    assert joint.total.item() == 7


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_images_of_another_type_are_errors_that_name_it(
    model: KppPaper, draw: Callable[..., Tensor], dtype: torch.dtype
):
    with pytest.raises(UserError, match=str(dtype)):
        model.write(draw(model.config, 3).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_floats_of_another_precision_are_taken_as_they_are_meant(
    model: KppPaper, draw: Callable[..., Tensor], dtype: torch.dtype
):
    images = draw(model.config, 3)
    torch.testing.assert_close(model.write(images.to(dtype)).map, model.write(images).map)


def test_bytes_are_levels_of_255(tiny_colour: KppPaperConfig):
    levels = torch.randint(256, (3, *tiny_colour.image), dtype=torch.uint8)
    torch.testing.assert_close(build(tiny_colour).as_episodes(levels), levels.float()[None] / 255)


def test_bytes_are_refused_where_pixels_are_bits(model: KppPaper):
    """Bits drawn by `binarize` are bytes 0 and 1: dividing them by 255 would lose them silently."""
    with pytest.raises(UserError, match="got torch.uint8"):
        model.write(torch.ones(3, *model.config.image, dtype=torch.uint8))
