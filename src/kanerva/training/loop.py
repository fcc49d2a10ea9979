"""The training loop: run folder, steps, validation, checkpoints, and clean stops.

Step s is a function of (seed, s) and the weights before it: its episodes, its pixels and its noise
all come from streams named by step or epoch. So a run killed anywhere and resumed from its last
checkpoint ends with the same weights as one that was never stopped (same machine and threads).

Under `torchrun` several processes share each batch (`devices.py`); only rank 0 reports and writes.
The number of processes changes only rounding, so a run may resume with more or fewer.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning_fabric import Fabric

from kanerva.config import RunConfig, to_dict
from kanerva.data.episodes import FixedEpisodes, TrainingEpisodes
from kanerva.data.splits import fixed_episodes, load_split, training_episodes
from kanerva.errors import NumbersWentBad, UserError
from kanerva.evaluation.bound import validation_score
from kanerva.models.base import MemoryModel
from kanerva.pictures import write_picture
from kanerva.provenance import commit, device_name, versions
from kanerva.runs import check_same_run, locked, make_run, saved_config, write_run_config
from kanerva.seeding import derive_seed, stream
from kanerva.training.checkpoint import (
    Progress,
    recover,
    restore,
    run_state,
    save_best,
    save_last,
)
from kanerva.training.devices import make_fabric, on_rank_zero
from kanerva.training.loggers import LoggerName, make_logger, require_logger
from kanerva.training.reporting import Reporter
from kanerva.training.samples import sample_sheet
from kanerva.training.schedule import lr_factor, warmup_steps
from kanerva.training.signals import stop_signals
from kanerva.training.step import Step, StepResult, assemble, form_of

SAVE_EVERY = 300.0  # seconds; besides the save after each validation
FITTED = 2048  # training images for `fit_to_data`
PATIENCE = 10  # steps in a row without finite numbers before a run gives up


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    reason: str  # finished, bound, minutes, SIGINT or SIGTERM
    step: int
    total: int
    best_nll: float | None
    best_step: int = 0  # the step of the best checkpoint


def train(
    config: RunConfig,
    run: Path,
    *,
    resume: bool = False,
    minutes: float | None = None,
    until: float | None = None,
    data_root: Path | None = None,
    accelerator: str = "auto",
    logger: LoggerName | None = None,
    before: Callable[[torch.device], None] | None = None,
) -> Outcome:
    """Train until the schedule ends, the validation bound falls below `until`, `minutes` have
    passed or a signal arrives. Saves before it returns.

    All input is checked before anything is written. `before` is called once after these checks, for
    example to print a message. `logger` also gets the figures of metrics.csv.
    """
    require_logger(logger)
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    goal = -math.inf if until is None else until
    train_set = load_split(config, "train", data_root)
    validation_set = load_split(config, "validation", data_root)
    fabric = make_fabric(config, accelerator)
    if fabric.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 where float32 products remain
    share = {"rank": fabric.global_rank, "world_size": fabric.world_size}
    episodes = training_episodes(config, train_set, fabric.device, **share)
    validation = fixed_episodes(config, validation_set, fabric.device)
    with ExitStack() as stack:

        def lock() -> None:
            stack.enter_context(locked(run))

        there = resume and (run / "checkpoints").is_dir()
        on_rank_zero(fabric, lambda: lock() if there else None)  # before the first write
        on_rank_zero(fabric, lambda: check_run(run, config, resume))
        trainer = Trainer(config, run, fabric, episodes, validation, resume, logger)
        on_rank_zero(fabric, lambda: make_run(run, resume))
        on_rank_zero(fabric, lambda: None if there else lock())
        on_rank_zero(fabric, lambda: write_run_config(run, config))
        caught = stack.enter_context(stop_signals(trainer.compiling))
        if before is not None and fabric.global_rank == 0:
            before(fabric.device)
        try:
            return trainer.fit(caught, deadline, goal)
        except OSError as error:
            raise UserError(f"cannot write to run folder {run}: {error.strerror}") from error


def check_run(run: Path, config: RunConfig, resume: bool) -> None:
    """Refuse to start if that would damage a run that is already in the folder."""
    if not resume:
        return
    last, best = (run / "checkpoints" / name for name in ("last", "best"))
    recover(last)
    recover(best)
    if (saved := saved_config(last)) is not None:
        check_same_run(run, saved, config)


class Trainer:
    """One run: has what a step needs, and decides when to validate, save and stop."""

    def __init__(
        self,
        config: RunConfig,
        run: Path,
        fabric: Fabric,
        episodes: TrainingEpisodes,
        validation: FixedEpisodes,
        resume: bool,
        logger: LoggerName | None = None,
    ) -> None:
        self.config, self.run, self.fabric = config, run, fabric
        self.logger: LoggerName | None = logger if fabric.is_global_zero else None
        self.episodes, self.validation = episodes, validation
        self.total = config.steps
        self.warmup = warmup_steps(config.optim.warmup_epochs, episodes.steps_per_epoch, self.total)
        form = form_of(config.execution, fabric.device)
        self.last, self.best = (run / "checkpoints" / name for name in ("last", "best"))
        goes_on = fabric.broadcast(resume and self.last.exists())
        parts = assemble(config, fabric, form, None if goes_on else episodes.some(FITTED))
        self.model, self.average, self.optimizer = parts.model, parts.average, parts.optimizer
        self.progress = Progress()
        if goes_on:
            self.progress = restore(self.last, self.model, self.optimizer, self.average)
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
            "execution": form,
        }
        self.streak = 0  # skipped steps in a row
        self.clock = time.monotonic()  # when `wall_s` was last updated

    @property
    def judged(self) -> MemoryModel:
        """The weights that are validated and saved as best: the average if there is one."""
        return self.model if self.average is None else self.average

    def fit(self, caught: list[str], deadline: float, goal: float) -> Outcome:
        """Train from the current step to the end, or until stopped."""
        progress, reason = self.progress, "finished"
        self.reporter = Reporter(
            self.run,
            self.config,
            progress,
            steps_per_epoch=self.episodes.steps_per_epoch,
            compiles=self.step.form != "eager",
            quiet=not self.fabric.is_global_zero,
            logger=make_logger(self.logger, self.run, self.config, progress.step),
        )
        self.reporter.say(self._beginning())
        while progress.step < self.total and reason == "finished":
            self._step(progress.step)
            progress.step += 1
            progress.images_seen += self.config.batch * self.config.episode_length
            self.reporter.bar.update()
            step, at_end = progress.step, progress.step == self.total
            row = step % self.config.log_every == 0 or at_end  # write a row of metrics.csv
            line = self.reporter.line_due(step)
            validation = step % self.config.validate_every == 0 or at_end
            save = time.monotonic() - self.clock > SAVE_EVERY
            if row or line or validation or save or self.fabric.device.type == "cpu":
                result = self._look()  # on a GPU this waits for the step
                if line:
                    self.reporter.line(step, result)
                if row:
                    self.reporter.row(step, result, self._lr(step - 1))
            reached = validation and self._validate() < goal
            signalled, timed_out, save = self._any_process(
                bool(caught), time.monotonic() > deadline, save, ask=row or validation
            )
            if signalled or timed_out:
                stopped_by = caught[0] if caught else "SIGTERM"  # else another process got it
                reason = stopped_by if signalled else "minutes"
                self._look()
            elif reached:
                reason = "bound"
            stopped = reason != "finished"
            if validation or (save and not self.streak) or (stopped and self._healthy()):
                self._save()
            if validation:
                self.reporter.row_clock = self.reporter.clock(progress.step)  # rates of steps only
        return self._end(reason)

    def _end(self, reason: str) -> Outcome:
        progress = self.progress
        if progress.step == self.total and reason != "bound":
            reason = "finished"  # a signal during the last step did not stop anything
        self.reporter.close()
        self.reporter.say(f"{reason} at step {progress.step} of {self.total}: {self.run}")
        return Outcome(reason, progress.step, self.total, progress.best_nll, progress.best_step)

    def _beginning(self) -> str:
        """The first line of a run: what is trained, where, and what may take long."""
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
        """Whether the first step has not finished yet and is being compiled."""
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
        """Wait for the last step and return its figures; give up if too many were skipped."""
        result = self.step.look()
        self.streak, self.progress.skipped = result.streak, result.skipped
        if self.streak >= PATIENCE:
            self.reporter.close()
            raise NumbersWentBad(
                f"{self.run}: loss or gradient was not finite for {self.streak} steps in a row, "
                f"up to step {self.progress.step - 1}; {self._kept()}"
            )
        return result

    def _any_process(self, *mine: bool, ask: bool) -> list[bool]:
        """For each flag, whether it is set in any process.

        With several processes on GPUs this waits for all of them, so it communicates only if `ask`.
        Otherwise every flag counts as unset, so that no process acts alone.
        """
        if self.fabric.world_size == 1:
            return list(mine)
        if not (ask or self.fabric.device.type == "cpu"):
            return [False] * len(mine)
        answers = torch.tensor([float(one) for one in mine], device=self.fabric.device)
        total = self.fabric.all_reduce(answers, reduce_op="sum")
        assert isinstance(total, torch.Tensor)
        return (total > 0).tolist()

    def _lr(self, step: int) -> float:
        return self.config.optim.lr * lr_factor(step, self.total, self.warmup)

    def _validate(self) -> float:
        """Compute the validation bound, and save a sample grid and perhaps new `best` weights.

        The training objective decides what is best; it is the bound unless KL terms are weighted.
        """
        progress, config = self.progress, self.config
        judged = self.judged.eval()
        mine = validation_score(judged, self.validation, config.validate_episodes)
        score = self.fabric.broadcast(mine)  # running statistics differ: rank 0's score counts
        if not math.isfinite(score.nll_nats):
            self.reporter.close()
            raise NumbersWentBad(
                f"{self.run}: the validation bound at step {progress.step} is not finite; "
                f"{self._kept()}"
            )
        self.reporter.validation(progress.step, score)
        objective = score.objective(config.kl_weight)
        if progress.best_nll is None or objective < progress.best_nll:
            progress.best_nll, progress.best_step = objective, progress.step
            on_rank_zero(self.fabric, lambda: save_best(self.best, judged))
        episode = self.validation.batch(0, 1).images[0][:16]
        picture = sample_sheet(judged, episode, stream("samples", device=self.fabric.device))
        path = self.run / "samples" / f"step-{progress.step:07d}.png"
        on_rank_zero(self.fabric, lambda: write_picture(picture, path))
        return score.nll_nats

    def _kept(self) -> str:
        if not self.last.exists():
            return "nothing was saved yet"
        return f"{self.last} is the last good checkpoint"

    def _healthy(self) -> bool:
        """Whether the bound is still finite; checked only while steps are being skipped."""
        if self.streak == 0:
            return True
        mine = validation_score(self.model.eval(), self.validation, 1)
        return math.isfinite(self.fabric.broadcast(mine).nll_nats)

    def _save(self) -> None:
        """Save everything needed to resume."""
        now = time.monotonic()
        self.progress.wall_s += now - self.clock
        self.clock = now
        if not self.reporter.quiet:
            self.progress.metrics_bytes = self.reporter.keep_rows()
        state = run_state(self.model, self.optimizer, self.average)
        on_rank_zero(
            self.fabric, lambda: save_last(self.last, self.model, state, self.progress, self.about)
        )
