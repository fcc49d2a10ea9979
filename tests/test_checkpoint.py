"""Checkpoints: whole or not at all, checked before they are trusted, enough to go on exactly."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from kanerva.config import ModelConfig, OptimConfig
from kanerva.errors import UserError
from kanerva.models import build
from kanerva.models.base import MemoryModel
from kanerva.training import checkpoint
from kanerva.training.checkpoint import (
    Progress,
    optimizer_tensors,
    recover,
    restore,
    restore_optimizer,
    run_state,
    save_best,
    save_last,
)
from kanerva.training.optim import make_optimiser


@pytest.fixture(params=["lars_adam", "adamw", "muon"])
def trained(request: pytest.FixtureRequest, tiny: ModelConfig, draw):
    """A model some steps into training, its optimiser, and a function for more steps."""
    model = build(tiny)
    options = OptimConfig(optimiser=request.param)

    def steps(model: MemoryModel, optimizer: torch.optim.Optimizer, count: int) -> None:
        torch.manual_seed(3)
        for _ in range(count):
            optimizer.zero_grad()
            model.elbo(draw(tiny, 2, 3)).loss.backward()
            optimizer.step()

    optimizer = make_optimiser(options, model)
    steps(model, optimizer, 3)
    return model, optimizer, steps, lambda m: make_optimiser(options, m)


def test_a_restored_run_goes_on_exactly(tmp_path: Path, trained, tiny: ModelConfig):
    model, optimizer, steps, fresh_optimizer = trained
    average = copy.deepcopy(model)
    progress = Progress(step=3, best_nll=12.5, best_step=2, images_seen=18, metrics_bytes=44)
    state = run_state(model, optimizer, average)
    save_last(tmp_path / "last", model, state, progress, {"commit": "abc"})
    torch.manual_seed(99)
    other, other_average = build(tiny), build(tiny)
    other_optimizer = fresh_optimizer(other)
    assert restore(tmp_path / "last", other, other_optimizer, other_average) == progress
    steps(model, optimizer, 3)
    steps(other, other_optimizer, 3)
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(
        average.state_dict().values(), other_average.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)


@pytest.fixture
def saved(tmp_path: Path, tiny: ModelConfig) -> Path:
    model = build(tiny)
    optimizer = make_optimiser(OptimConfig(), model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save_last(tmp_path / "last", model, run_state(model, optimizer, None), Progress(step=1), {})
    return tmp_path / "last"


def resume(folder: Path, config: ModelConfig) -> None:
    model = build(config)
    restore(folder, model, make_optimiser(OptimConfig(), model), None)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "config.json"])
@pytest.mark.parametrize("damage", ["truncated", "altered", "gone"])
def test_a_damaged_file_is_named(saved: Path, tiny: ModelConfig, name: str, damage: str):
    path = saved / name
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "altered":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        path.unlink()
    with pytest.raises(UserError, match=name):
        resume(saved, tiny)


def test_an_edited_state_is_noticed(saved: Path, tiny: ModelConfig):
    path = saved / "state.json"
    state = json.loads(path.read_text())
    state["progress"]["step"] = 500
    path.write_text(json.dumps(state))
    with pytest.raises(UserError, match="state.json was altered"):
        resume(saved, tiny)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"seal": 1}'])
def test_a_state_that_is_no_state_is_named(saved: Path, tiny: ModelConfig, content: str):
    (saved / "state.json").write_text(content)
    with pytest.raises(UserError, match="state.json"):
        resume(saved, tiny)


def test_a_kill_between_the_two_renames_loses_nothing(saved: Path, tiny: ModelConfig, monkeypatch):
    """The folder stands under its old name for a moment; recovery puts it back."""
    before = (saved / "state.json").read_bytes()
    real, calls = checkpoint.os.rename, []

    def rename(a, b):
        calls.append(a)
        if len(calls) == 2:
            raise KeyboardInterrupt  # as if killed here
        real(a, b)

    model = build(tiny)
    monkeypatch.setattr(checkpoint.os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        state = run_state(model, make_optimiser(OptimConfig(), model), None)
        save_last(saved, model, state, Progress(step=2), {})
    monkeypatch.undo()
    assert not saved.exists()
    recover(saved)
    assert (saved / "state.json").read_bytes() == before
    resume(saved, tiny)


def test_leftovers_of_a_killed_save_are_cleared_by_the_next(saved: Path, tiny: ModelConfig):
    shutil.copytree(saved, saved.with_name(".last.tmp"))
    shutil.copytree(saved, saved.with_name(".last.old"))
    (saved.with_name(".last.tmp") / "stray").write_text("half")
    recover(saved)
    model = build(tiny)
    state = run_state(model, make_optimiser(OptimConfig(), model), None)
    save_last(saved, model, state, Progress(step=2), {})
    assert sorted(p.name for p in saved.parent.iterdir()) == ["last"]
    assert not (saved / "stray").exists()


def test_best_holds_weights_and_config_only(tmp_path: Path, tiny: ModelConfig):
    model = build(tiny)
    save_best(tmp_path / "best", model)
    assert sorted(p.name for p in (tmp_path / "best").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    same = type(model).from_pretrained(tmp_path / "best")
    for a, b in zip(model.state_dict().values(), same.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("optimiser", ["adamw", "lars_adam", "muon"])
def test_moments_come_back_in_the_order_of_their_weights(optimiser: str):
    """Compiled steps keep convolutions channels-last, files do not; a fused optimiser walks through
    weight and moments at once, and takes them for one another if their orders differ."""

    def steps(net: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            noise = torch.Generator().manual_seed(number)
            optimizer.zero_grad()
            net(torch.randn(2, 3, 6, 6, generator=noise)).square().sum().backward()
            optimizer.step()

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Conv2d(3, 16, 3).to(memory_format=torch.channels_last)  # 16: for muon
        return net, make_optimiser(OptimConfig(optimiser=optimiser, lr=0.1), net)  # pyright: ignore

    net, optimizer = fresh()
    steps(net, optimizer, range(3))
    saved = {name: value.clone() for name, value in optimizer_tensors(optimizer).items()}
    weights = copy.deepcopy(net.state_dict())
    steps(net, optimizer, range(3, 6))
    other, resumed = fresh()
    other.load_state_dict(weights)
    restore_optimizer(resumed, saved)
    for parameter, entries in resumed.state.items():
        assert all(v.ndim == 0 or v.stride() == parameter.stride() for v in entries.values())
        assert all(v.device == parameter.device for v in entries.values())
    steps(other, resumed, range(3, 6))
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
