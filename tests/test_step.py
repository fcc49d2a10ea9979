"""One step: its forms agree, bad numbers change nothing, and nothing waits for the device."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kanerva.config import MODEL_CONFIGS, OptimConfig, RunConfig
from kanerva.data import ImageSet, TrainingEpisodes
from kanerva.lab.benchmark.agreement import agreement
from kanerva.presets import preset, with_options
from kanerva.seeding import stream
from kanerva.training.optim import LarsAdam, make_optimiser, parameter_groups, set_rate
from kanerva.training.step import Step, assemble

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def little(model: str = "kpp", **changes) -> RunConfig:
    """A run of a model whose every size is small; options that it lacks are left out."""
    start = preset("glyphs", model)
    kpp = model.startswith("kpp") and model != "kpp-paper"
    options = with_options(
        start.model,
        encoder={"width": 8, "depth": 1},
        decoder={"base": 16, "depth": 1},
        keys={} if kpp else {"hidden": 32},
        readout={"size": 4 if kpp else 8, "channels": 2, "hidden": 32, "prior_width": 8},
        rows={"count": 4, "width": 40, "address": 8},
    )
    return replace(start, model=options, episode_length=4, **changes)


def random_episodes(config: RunConfig, device: torch.device) -> TrainingEpisodes:
    """Episodes of random bytes, enough for a few steps."""
    shape = (4 * config.batch * config.episode_length, *config.model.image)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=stream("episodes"))
    return TrainingEpisodes(
        ImageSet("random", "train", pixels),
        episode_length=config.episode_length,
        batch=config.batch,
        seed=config.seed,
        binarization=config.data.binarization,
        device=device,
    )


def fabric(precision: str = "32-true", accelerator: str = "cpu") -> Fabric:
    return Fabric(accelerator=accelerator, devices=1, precision=precision)  # pyright: ignore


# The shape checks of a test run cannot be compiled: forms are compared in a process of their own.
COMPARE = """
import json, sys
import torch
from lightning_fabric import Fabric
sys.path.insert(0, {tests!r})
from test_step import little, random_episodes
from kanerva.lab.benchmark.agreement import agreement
config = little({model!r}, precision={precision!r})
fabric = Fabric(accelerator={device!r}, devices=1, precision={precision!r})
episodes = random_episodes(config, fabric.device)
print(json.dumps(agreement(config, {forms!r}, fabric, episodes, {steps})))
"""


def compared(
    forms: list[str], steps: int, device: str, precision: str, model: str = "kpp"
) -> list[dict]:
    code = COMPARE.format(
        tests=str(Path(__file__).parent),
        forms=forms,
        steps=steps,
        device=device,
        precision=precision,
        model=model,
    )
    # One thread: on a busy machine two wait for each other in every kernel.
    one = os.environ | {"OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=one, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow  # compiling takes a minute or two
def test_a_compiled_step_agrees_with_an_eager_one():
    """100 steps in float32: in lockstep within 1e-5, left alone losses within 1e-4 and weights
    within 1 % of their way."""
    eager, compiled = compared(["eager", "compiled"], 100, "cpu", "32-true")
    assert eager["lockstep_loss"] == eager["alone_loss"] == eager["alone_weights"] == 0
    assert compiled["lockstep_loss"] < 1e-5 and compiled["lockstep_gradient"] < 1e-4
    assert compiled["lockstep_update"] < 0.02
    assert compiled["alone_loss"] < 1e-4 and compiled["alone_weights"] < 0.01
    assert compiled["last_loss"] < compiled["first_loss"] - 5  # noise is learned to be noise


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in MODEL_CONFIGS if name != "kpp"])
def test_rivals_compile(model: str):
    """Also those whose images are written in turn, a loop that is left out of the compiled part."""
    eager, compiled = compared(["eager", "compiled"], 10, "cpu", "32-true", model)
    assert eager["alone_loss"] == 0
    assert compiled["lockstep_loss"] < 1e-5 and compiled["lockstep_gradient"] < 1e-3


def test_lockstep_sees_the_arithmetic_of_one_step_alone():
    """A form whose losses are a thousandth too high is off by that in lockstep, however long."""
    config, one = little(), fabric()
    episodes = random_episodes(config, one.device)
    real = Step.look
    walks: list[Step] = []

    def biased(self: Step):
        if self not in walks:
            walks.append(self)
        seen = real(self)
        return replace(seen, nll=seen.nll * 1.001) if len(walks) > 1 else seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "look", biased)
        (row,) = agreement(config, ["eager"], one, episodes, 12)
    assert row["lockstep_loss"] == pytest.approx(1e-3, rel=1e-3)
    assert row["lockstep_gradient"] == row["lockstep_update"] == row["alone_weights"] == 0


def test_lockstep_sees_a_step_that_moves_nothing(monkeypatch):
    config, one = little(), fabric()
    episodes = random_episodes(config, one.device)
    real, seen = Step._update, []

    def idle(self: Step) -> None:
        if self not in seen:
            seen.append(self)
        if len(seen) == 1:
            real(self)
        else:
            self.figures[:4] = self.seen

    monkeypatch.setattr(Step, "_update", idle)
    (row,) = agreement(config, ["eager"], one, episodes, 4)
    assert row["lockstep_loss"] == 0 and row["lockstep_update"] == pytest.approx(1, rel=0.05)


@needs_gpu
@pytest.mark.parametrize("precision, near", [("32-true", 1e-4), ("bf16-mixed", 2e-2)])
def test_a_captured_step_agrees_with_an_eager_one(precision: str, near: float):
    rows = compared(["eager", "compiled", "captured"], 50, "cuda", precision)
    assert all(row["lockstep_loss"] < near for row in rows)
    assert all(row["lockstep_update"] < 0.5 and row["alone_weights"] < 0.8 for row in rows)


def state_of(step: Step) -> list[Tensor]:
    assert step.average is not None
    tensors = [*step.model.state_dict().values(), *step.average.state_dict().values()]
    tensors += [v for s in step.optimizer.state.values() for v in s.values()]
    return [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize("model", ["kpp", "kpp-paper"])
@pytest.mark.parametrize("at", [0, 2], ids=["at once", "later"])
def test_bad_numbers_change_nothing(model: str, at: int):
    """AdamW and LARS, weights, moments, counts, average, running statistics: bit for bit."""
    config = little(model)
    config = replace(config, optim=replace(config.optim, ema=0.9))
    one = fabric()
    step = Step(one, assemble(config, one, "eager"), clip=10.0, form="eager")
    step.model.train()
    episodes = random_episodes(config, one.device)
    for number in range(at):
        step(episodes.batch_at(number), seed=number, lr=1e-3, decay=0.9)
    before = state_of(step)
    for count in (1, 2):
        step(episodes.batch_at(at) * torch.nan, seed=at, lr=1e-3, decay=0.9)
        assert (step.look().skipped, step.look().streak) == (count, count)
        after = state_of(step)
        if before and len(after) == len(before):
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        else:  # the optimiser's state came into being: at zero
            assert at == 0 and not any(t.count_nonzero() for t in after[len(before) :])
    step(episodes.batch_at(at), seed=at, lr=1e-3, decay=0.9)
    assert (step.look().skipped, step.look().streak) == (2, 0)
    assert torch.isfinite(torch.cat([p.flatten() for p in step.model.parameters()])).all()
    changed = state_of(step)
    assert any(not torch.equal(a, b) for a, b in zip(changed, before, strict=False))


class Waits(TorchDispatchMode):
    """Every look at a value, for which a GPU would have to be waited."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"):
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", list(MODEL_CONFIGS))
def test_a_step_waits_for_nothing(model: str):
    """Else it could not be captured, by either optimiser."""
    config, one = little(model), fabric()
    step = Step(one, assemble(config, one, "eager"), clip=10.0, form="eager")
    step.model.train()
    episode = random_episodes(config, one.device).batch_at(0)
    step(episode, seed=0, lr=1e-3, decay=0.9)  # the optimiser's state comes into being
    with Waits() as waits:
        step.once(episode)
    assert waits.seen == []
    with waits:
        torch._foreach_add_([torch.zeros(())], step.figures[0])
    assert waits.seen  # the spy does see: one tensor is taken as a number


def test_the_average_takes_its_share():
    config, one = little(), fabric()
    step = Step(one, assemble(config, one, "eager"), clip=10.0, form="eager")
    assert step.average is not None
    old = [p.clone() for p in step.average.parameters()]
    step.model.train()
    step(random_episodes(config, one.device).batch_at(0), seed=0, lr=1e-2, decay=0.75)
    for mine, new, was in zip(step.average.parameters(), step.model.parameters(), old, strict=True):
        torch.testing.assert_close(mine.detach(), 0.75 * was + 0.25 * new.detach())


def test_figures_are_means_over_images_and_the_gradient_is_clipped():
    config, one = little(), fabric()
    parts = assemble(config, one, "eager")
    twin = copy.deepcopy(parts.model)
    episode = random_episodes(config, one.device).batch_at(0)
    step = Step(one, parts, clip=0.5, form="eager")
    parts.model.train()
    step(episode, seed=7, lr=0.0, decay=0.0)
    seen = step.look()
    twin.train()
    torch.manual_seed(7)
    terms = twin(episode)
    loss = (terms["readout_kl"] + terms["key_kl"] - terms["log_likelihood"]).mean()
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in twin.parameters() if p.grad is not None])
    assert seen.nll == pytest.approx(loss.item(), rel=1e-6)
    assert seen.recon + seen.kl_z + seen.kl_y == pytest.approx(seen.nll, rel=1e-5)
    assert seen.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    moments = [s["exp_avg"].square().sum() for s in step.optimizer.state.values()]
    assert torch.stack(moments).sum().sqrt().item() == pytest.approx(0.1 * 0.5, rel=1e-3)


@pytest.mark.parametrize("optimiser", ["adamw", "lars_adam", "muon"])
def test_the_rate_is_changed_where_it_is(optimiser: str):
    """A captured step reads it there: the tensor stays, its value changes."""
    model = nn.Linear(3, 2)
    optimizer = make_optimiser(OptimConfig(optimiser=optimiser, lr=0.5), model)  # pyright: ignore
    held = [group["lr"] for group in optimizer.param_groups]
    set_rate(optimizer, 0.0)
    before = [p.clone() for p in model.parameters()]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(group["lr"] is old for group, old in zip(optimizer.param_groups, held, strict=True))


def test_lars_skips_a_step_it_is_told_to():
    model = nn.Linear(3, 2)
    optimizer = LarsAdam(parameter_groups(model, 1e-3), lr=0.1)
    for bad in (1.0, 0.0, 1.0):
        before = [p.clone() for p in model.parameters()]
        for parameter in model.parameters():
            value = torch.inf if bad else 1.0
            parameter.grad = torch.full_like(parameter, value)
        optimizer.found_inf = torch.tensor(bad)
        optimizer.step()
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(same) if bad else not any(same)
    assert all(s["step"] == 1 for s in optimizer.state.values())
