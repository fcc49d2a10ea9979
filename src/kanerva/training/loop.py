"""The training loop: run folder, steps, validation, checkpoints, and stopping well.

Step s is a function of (seed, s) and the weights before it: its episodes, its pixels and its noise
all come from streams named by step or epoch. So a run killed anywhere and resumed from its last
checkpoint ends with the same weights as one that was never stopped (same machine and threads).

Under `torchrun` several processes share each batch (`devices.py`); the first alone speaks and
writes. How many there are changes rounding and nothing else, so a run may go on with more or fewer.
"""

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning_fabric import Fabric

from kanerva.config import RunConfig, to_dict
from kanerva.data.episodes import FixedEpisodes, TrainingEpisodes
from kanerva.errors import NumbersWentBad, UserError
from kanerva.evaluation.bound import bound
from kanerva.models.base import MemoryModel
from kanerva.provenance import commit, device_name, versions
from kanerva.runs import (
    Journal,
    check_same_run,
    fixed_episodes,
    load_split,
    locked,
    open_run,
)
from kanerva.seeding import derive_seed, stream
from kanerva.training.checkpoint import (
    Progress,
    read_state,
    recover,
    restore,
    run_state,
    save_best,
    save_last,
)
from kanerva.training.devices import make_fabric, on_rank_zero
from kanerva.training.samples import sample_sheet
from kanerva.training.schedule import lr_factor, warmup_steps
from kanerva.training.signals import stop_signals
from kanerva.training.step import Step, StepResult, assemble, form_of

SAVE_EVERY = 300.0  # seconds; besides the save after each validation
FITTED = 2048  # training images that a model may take statistics of
PATIENCE = 10  # steps in a row without finite numbers before a run gives up


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    reason: str  # finished, bound, minutes, SIGINT or SIGTERM
    step: int
    total: int
    best_nll: float | None


def train(
    config: RunConfig,
    run: Path,
    *,
    resume: bool = False,
    minutes: float | None = None,
    until: float | None = None,
    data_root: Path | None = None,
    accelerator: str = "auto",
) -> Outcome:
    """Train until the schedule ends, the validation bound passes below `until`, `minutes` pass or
    a signal comes; saves before it goes.

    Everything that can be wrong with the input is found before anything is written.
    """
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    train_set = load_split(config, "train", data_root)
    validation_set = load_split(config, "validation", data_root)
    fabric = make_fabric(config, accelerator)
    if fabric.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 where float32 products remain
    episodes = TrainingEpisodes(
        train_set,
        episode_length=config.episode_length,
        batch=config.batch,
        seed=config.seed,
        binarization=config.data.binarization,
        device=fabric.device,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
    )
    validation = fixed_episodes(config, validation_set, fabric.device)
    on_rank_zero(fabric, lambda: check_run(run, config, resume))
    trainer = Trainer(config, run, fabric, episodes, validation, resume)
    on_rank_zero(fabric, lambda: open_run(run, config, resume))
    with ExitStack() as stack:
        on_rank_zero(fabric, lambda: stack.enter_context(locked(run)))
        caught = stack.enter_context(stop_signals(trainer.compiling))
        try:
            return trainer.fit(caught, deadline, until)
        except OSError as error:
            raise UserError(f"cannot write to run folder {run}: {error.strerror}") from error


def check_run(run: Path, config: RunConfig, resume: bool) -> None:
    """Nothing is trained, and nothing written, that would spoil a run that is already there."""
    if not resume:
        return
    last = run / "checkpoints" / "last"
    recover(last)
    recover(run / "checkpoints" / "best")
    if last.exists():
        check_same_run(run, read_state(last)["about"]["config"], config)


class Trainer:
    """One run: holds what a step needs, and knows when to validate, save and stop."""

    def __init__(
        self,
        config: RunConfig,
        run: Path,
        fabric: Fabric,
        episodes: TrainingEpisodes,
        validation: FixedEpisodes,
        resume: bool,
    ) -> None:
        self.config, self.run, self.fabric = config, run, fabric
        self.episodes, self.validation = episodes, validation
        self.total = config.steps
        self.warmup = warmup_steps(config.optim.warmup_epochs, episodes.steps_per_epoch, self.total)
        form = form_of(config.execution, fabric.device)
        last = run / "checkpoints" / "last"
        goes_on = fabric.broadcast(resume and last.exists())
        parts = assemble(config, fabric, form, None if goes_on else episodes.some(FITTED))
        self.model, self.average, self.optimizer = parts.model, parts.average, parts.optimizer
        self.progress = Progress()
        if goes_on:
            self.progress = restore(last, self.model, self.optimizer, self.average)
        if self.progress.step > self.total:
            raise UserError(f"{run} is already at step {self.progress.step}, past {self.total}")
        self.step = Step(
            fabric, parts, clip=config.optim.clip, form=form, kl_weight=config.kl_weight
        )
        self.step.carry_on(self.progress.skipped)
        self.about = {
            "config": to_dict(config),
            "commit": commit(),
            "versions": versions(),
            "device": device_name(fabric.device),
            "processes": fabric.world_size,
            "step": form,
        }
        self.streak = 0  # steps in a row that were skipped
        self.clock = time.monotonic()  # when `wall_s` was last brought up to date

    @property
    def judged(self) -> MemoryModel:
        """The weights that are validated and shipped: the average where there is one."""
        return self.model if self.average is None else self.average

    def fit(self, caught: list[str], deadline: float | None, until: float | None) -> Outcome:
        """Go from where the run stands to its end, or until told to stop."""
        config, progress = self.config, self.progress
        self.journal = Journal(
            self.run,
            step=progress.step,
            total=self.total,
            metrics_bytes=progress.metrics_bytes,
            quiet=not self.fabric.is_global_zero,
        )
        images = config.batch * config.episode_length
        self.journal.say(self._beginning())
        reason = "finished"
        logged, since = progress.step, time.monotonic()
        start, begun, began = progress.step, progress.step, time.monotonic()
        while progress.step < self.total and reason == "finished":
            self._step(progress.step)
            progress.step += 1
            progress.images_seen += images
            self.journal.bar.update()
            last = progress.step == self.total
            validated = progress.step % config.validate_every == 0 or last
            logging = progress.step % config.log_every == 0 or last
            talking = self._to_speak(first=progress.step == start + 1)
            late = time.monotonic() - self.clock > SAVE_EVERY
            if self.fabric.device.type == "cpu" or validated or logging or talking or late:
                result = self._look()
                if talking:
                    self._speak(result, progress.step - begun, time.monotonic() - began)
                if progress.step == start + 1 and self.step.form != "eager":
                    begun, began = progress.step, time.monotonic()  # rates without compilation
                if logging:
                    rate = images * (progress.step - logged) / (time.monotonic() - since)
                    self._log(result, rate)
                    logged, since = progress.step, time.monotonic()
            if validated and self._validate() < (-math.inf if until is None else until):
                reason = "bound"
            over = deadline is not None and time.monotonic() > deadline
            stop, over, late = self._agreed(bool(caught), over, late, now=logging or validated)
            if stop or over:
                reason = "minutes" if not stop else caught[0] if caught else "SIGTERM"
                self._look()
            late = late and self.streak == 0
            if validated or late or (reason != "finished" and self._healthy()):
                self._save()
            if validated:
                logged, since = progress.step, time.monotonic()
        if progress.step == self.total and reason != "bound":
            reason = "finished"
        self.journal.bar.close()
        self.journal.say(f"{reason} at step {progress.step} of {self.total}: {self.run}")
        return Outcome(reason, progress.step, self.total, progress.best_nll)

    def _beginning(self) -> str:
        """What is about to happen, and what may take a while."""
        config, world = self.config, self.fabric.world_size
        size = sum(p.numel() for p in self.model.parameters())
        many = f" and {world - 1} more" if world > 1 else ""
        slow = "" if self.step.form == "eager" else "; the first step compiles, about a minute"
        return (
            f"{config.preset}, {config.model.name}: {size:,} parameters on "
            f"{device_name(self.fabric.device)}{many}; steps {self.progress.step} to {self.total} "
            f"of {config.batch} episodes of {config.episode_length}, {self.step.form}{slow}"
        )

    def compiling(self) -> bool:
        """Whether the first step is still to come, and takes long."""
        return self.step.form != "eager" and self.step.taken == 0

    def _step(self, step: int) -> None:
        """Step `step` of the schedule: a function of (seed, step) and the weights before it."""
        config = self.config
        self.model.train()
        self.step(
            self.episodes.batch_at(step),
            seed=derive_seed(config.seed, "step", step),
            lr=self._lr(step),
            decay=min(config.optim.ema, (step + 1) / (step + 10)),  # early weights fade quickly
        )

    def _look(self) -> StepResult:
        """Wait for the last step and see how it went."""
        result = self.step.look()
        self.streak, self.progress.skipped = result.streak, result.skipped
        if self.streak >= PATIENCE:
            self.journal.bar.close()
            raise NumbersWentBad(
                f"{self.run}: loss or gradient was not finite for {self.streak} steps in a row, "
                f"up to step {self.progress.step - 1}; {self._kept()}"
            )
        return result

    def _agreed(self, *mine: bool, now: bool) -> list[bool]:
        """What any process says, of each question. Several ask each other only now and then:
        they wait for the answer, and must not act on their own."""
        if self.fabric.world_size == 1:
            return list(mine)
        if not (now or self.fabric.device.type == "cpu"):
            return [False] * len(mine)
        said = torch.tensor([float(one) for one in mine], device=self.fabric.device)
        total = self.fabric.all_reduce(said, reduce_op="sum")
        assert isinstance(total, torch.Tensor)
        return (total > 0).tolist()

    def _lr(self, step: int) -> float:
        return self.config.optim.lr * lr_factor(step, self.total, self.warmup)

    def _log(self, result: StepResult, rate: float) -> None:
        """One row of training metrics, the bar's figures, and now and then a line."""
        step = self.progress.step
        terms = {"nll": result.nll, "recon": result.recon, "kl_z": result.kl_z, "kl_y": result.kl_y}
        self.journal.row(
            "train",
            step,
            step / self.episodes.steps_per_epoch,
            **terms,
            lr=self._lr(step - 1),
            grad_norm=result.grad_norm,
            images_per_s=rate,
            skipped=float(self.progress.skipped),
        )
        self.journal.bar.set_postfix(
            {k: f"{v:.1f}" for k, v in terms.items()} | {"img/s": f"{rate:.0f}"}
        )

    def _to_speak(self, first: bool) -> bool:
        """Off a terminal: a line after the first step and then every ten seconds."""
        if self.journal.quiet or not self.journal.bar.disable:
            return False
        return first or time.monotonic() - self.journal.spoken >= 10.0

    def _speak(self, result: StepResult, done: int, seconds: float) -> None:
        line = f"step {self.progress.step}/{self.total} {describe(vars(result))}"
        if done == 1 and self.step.form != "eager":
            self.journal.say(f"{line} compiled and run in {seconds:.0f} s")
            return
        left = time.gmtime((self.total - self.progress.step) * seconds / done)
        rate = done * self.config.batch * self.config.episode_length / seconds
        self.journal.say(f"{line} {rate:.0f} img/s, {time.strftime('%H:%M:%S', left)} left")

    def _validate(self) -> float:
        """The bound on validation episodes, which decides what weights are `best`; a sample grid
        too."""
        progress, config = self.progress, self.config
        judged = self.judged.eval()
        mine = bound(judged, self.validation, limit=config.validate_episodes)
        score = self.fabric.broadcast(mine)  # running statistics differ: one figure decides for all
        if not math.isfinite(score.nll_nats):
            self.journal.bar.close()
            raise NumbersWentBad(
                f"{self.run}: the validation bound at step {progress.step} is not finite; "
                f"{self._kept()}"
            )
        terms = {
            "nll": score.nll_nats,
            "recon": score.recon,
            "kl_z": score.kl_z,
            "kl_y": score.kl_y,
        }
        self.journal.row(
            "validation", progress.step, progress.step / self.episodes.steps_per_epoch, **terms
        )
        self.journal.say(f"step {progress.step}/{self.total} validation {describe(terms)}")
        objective = score.objective(config.kl_weight)
        if progress.best_nll is None or objective < progress.best_nll:
            progress.best_nll, progress.best_step = objective, progress.step
            best = self.run / "checkpoints" / "best"
            on_rank_zero(self.fabric, lambda: save_best(best, judged))
        episode = self.validation.batch(0, 1).images[0][:16]
        picture = sample_sheet(judged, episode, stream("samples", device=self.fabric.device))
        path = self.run / "samples" / f"step-{progress.step:07d}.png"
        on_rank_zero(self.fabric, lambda: picture.save(path))
        return score.nll_nats

    def _kept(self) -> str:
        last = self.run / "checkpoints" / "last"
        return f"{last} is the last good checkpoint" if last.exists() else "nothing was saved yet"

    def _healthy(self) -> bool:
        """Whether the weights are worth keeping: while steps are being skipped, look first."""
        if self.streak == 0:
            return True
        mine = bound(self.model.eval(), self.validation, limit=1)
        return math.isfinite(self.fabric.broadcast(mine).nll_nats)

    def _save(self) -> None:
        """Everything needed to go on."""
        now = time.monotonic()
        self.progress.wall_s += now - self.clock
        self.clock = now
        if not self.journal.quiet:
            self.progress.metrics_bytes = self.journal.metrics.stat().st_size
        state = run_state(self.model, self.optimizer, self.average)
        last = self.run / "checkpoints" / "last"
        on_rank_zero(
            self.fabric, lambda: save_last(last, self.model, state, self.progress, self.about)
        )


def describe(terms: dict[str, float]) -> str:
    """The bound and its terms in a few words."""
    return (
        f"bound {terms['nll']:.2f} nats (recon {terms['recon']:.2f}, "
        f"KL z {terms['kl_z']:.2f}, KL y {terms['kl_y']:.2f})"
    )
