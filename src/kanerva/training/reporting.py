"""What a run reports while it trains: metrics.csv, log.txt, and a progress bar or lines."""

import csv
import io
import sys
import time
from pathlib import Path

from tqdm import tqdm

from kanerva.config import RunConfig
from kanerva.evaluation.bound import Score
from kanerva.plain_files import append, open_regular, sync, write_whole
from kanerva.training.step import StepResult

COLUMNS = [
    "step", "epoch", "split", "nll", "recon", "kl_z", "kl_y",
    "lr", "grad_norm", "images_per_s", "skipped",
]  # fmt: skip
LINE_EVERY = 10.0  # seconds between lines, where there is no bar


class Journal:
    """The files and the terminal a run reports to. Off a terminal, lines take the bar's place."""

    def __init__(
        self, run: Path, *, step: int, total: int, metrics_bytes: int, quiet: bool = False
    ) -> None:
        """`quiet`: one of several processes, of which another reports."""
        self.metrics, self.log, self.quiet = run / "metrics.csv", run / "log.txt", quiet
        self.last_line = 0.0
        self.bar = tqdm(total=total, initial=step, unit="step", disable=True if quiet else None)
        if quiet:
            return
        self._cut_rows(metrics_bytes if step else 0)

    def _cut_rows(self, length: int) -> None:
        """Leave the rows up to the last checkpoint: what lies beyond was not saved. If some are
        missing, say so and leave those that are whole."""
        header = ",".join(COLUMNS) + "\n"
        rows = b""
        if length and self.metrics.exists():
            with open_regular(self.metrics) as file:
                rows = file.read(length)
        whole = rows[: rows.rfind(b"\n") + 1]
        write_whole(self.metrics, whole or header)
        if len(whole) < length:
            lost = f"{length - len(whole)} bytes of {self.metrics} are gone"
            self.line(f"{lost}: it goes on after its last whole row")

    def keep_rows(self) -> int:
        """The length of metrics.csv, once all of it has reached the disk."""
        sync(self.metrics)
        return self.metrics.stat().st_size

    def row(self, split: str, step: int, epoch: float, **values: float) -> None:
        """One line of metrics.csv."""
        if self.quiet:
            return
        text = io.StringIO()
        numbers = {k: f"{v:.9g}" for k, v in values.items()}
        row = {"step": step, "epoch": f"{epoch:.4f}", "split": split} | numbers
        csv.DictWriter(text, COLUMNS, lineterminator="\n").writerow(row)
        append(self.metrics, text.getvalue())

    def line(self, text: str) -> None:
        """A line for log.txt and the terminal."""
        self.last_line = time.monotonic()
        if self.quiet:
            return
        append(self.log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        if self.bar.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self.bar.write(text, file=sys.stderr)


class StepClock:
    """Steps and seconds since it was last set."""

    def __init__(self, step: int) -> None:
        self.set(step)

    def set(self, step: int) -> None:
        self.step, self.time = step, time.monotonic()

    def elapsed(self, step: int) -> tuple[int, float]:
        return step - self.step, time.monotonic() - self.time


class Reporter:
    """Turns the figures of steps and validations into rows and lines, with rates."""

    def __init__(
        self,
        journal: Journal,
        config: RunConfig,
        *,
        step: int,
        steps_per_epoch: int,
        compiles: bool,
    ) -> None:
        self.journal, self.compiles = journal, compiles
        self.total, self.steps_per_epoch = config.steps, steps_per_epoch
        self.images = config.batch * config.episode_length  # of a step
        self.first = step + 1
        self.row_clock, self.line_clock = StepClock(step), StepClock(step)

    def line_due(self, step: int) -> bool:
        """Off a terminal: after the first step, then every few seconds."""
        if self.journal.quiet or not self.journal.bar.disable:
            return False
        return step == self.first or time.monotonic() - self.journal.last_line >= LINE_EVERY

    def line(self, step: int, result: StepResult) -> None:
        """How the last step went, how fast steps are, how long the rest takes."""
        done, seconds = self.line_clock.elapsed(step)
        line = f"step {step}/{self.total} {describe(vars(result))}"
        if step == self.first and self.compiles:
            self.journal.line(f"{line} compiled and run in {seconds:.0f} s")
            self.line_clock.set(step)  # rates without compilation
            return
        left = time.gmtime((self.total - step) * seconds / done)
        rate = done * self.images / seconds
        self.journal.line(f"{line} {rate:.0f} img/s, {time.strftime('%H:%M:%S', left)} left")

    def row(self, step: int, result: StepResult, lr: float) -> None:
        """One row of training metrics, and the bar's figures."""
        done, seconds = self.row_clock.elapsed(step)
        rate = done * self.images / seconds
        terms = {"nll": result.nll, "recon": result.recon, "kl_z": result.kl_z, "kl_y": result.kl_y}
        self.journal.row(
            "train",
            step,
            step / self.steps_per_epoch,
            **terms,
            lr=lr,
            grad_norm=result.grad_norm,
            images_per_s=rate,
            skipped=float(result.skipped),
        )
        self.journal.bar.set_postfix(
            {k: f"{v:.1f}" for k, v in terms.items()} | {"img/s": f"{rate:.0f}"}
        )
        self.row_clock.set(step)

    def validation(self, step: int, score: Score) -> None:
        """A row and a line."""
        terms = {
            "nll": score.nll_nats,
            "recon": score.recon,
            "kl_z": score.kl_z,
            "kl_y": score.kl_y,
        }
        self.journal.row("validation", step, step / self.steps_per_epoch, **terms)
        self.journal.line(f"step {step}/{self.total} validation {describe(terms)}")


def describe(terms: dict[str, float]) -> str:
    """The bound and its terms in a few words."""
    return (
        f"bound {terms['nll']:.2f} nats (recon {terms['recon']:.2f}, "
        f"KL z {terms['kl_z']:.2f}, KL y {terms['kl_y']:.2f})"
    )
