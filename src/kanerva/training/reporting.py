"""What a run reports while it trains: metrics.csv, log.txt, an optional logger, and a progress bar
or lines."""

import csv
import io
import sys
import time
from datetime import timedelta
from pathlib import Path

from lightning_fabric.loggers import Logger
from tqdm import tqdm

from kanerva.config import RunConfig
from kanerva.evaluation.bound import Score
from kanerva.plain_files import append, open_regular, sync, write_whole
from kanerva.training.checkpoint import Progress
from kanerva.training.step import StepResult

TERMS = ["nll", "recon", "kl_z", "kl_y"]
COLUMNS = ["step", "epoch", "split", *TERMS, "lr", "grad_norm", "images_per_s", "skipped"]
LINE_EVERY = 10.0  # seconds between lines when there is no bar


class Reporter:
    """Writes the figures and rates of steps and validations to files and to the terminal. If the
    output is not a terminal, lines replace the progress bar."""

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        progress: Progress,
        *,
        steps_per_epoch: int,
        compiles: bool,
        quiet: bool,
        logger: Logger | None = None,
    ) -> None:
        """`quiet`: report nothing, because another process does."""
        self.logger = logger
        self.metrics, self.log, self.quiet = run / "metrics.csv", run / "log.txt", quiet
        self.total, self.steps_per_epoch, self.compiles = config.steps, steps_per_epoch, compiles
        self.images = config.batch * config.episode_length  # per step
        step = progress.step
        self.first, self.last_line = step + 1, 0.0
        self.row_clock = self.line_clock = self.clock(step)
        hidden = True if quiet else None
        self.bar = tqdm(total=self.total, initial=step, unit="step", disable=hidden)
        if quiet:
            return
        self._cut_rows(progress.metrics_bytes if step else 0)

    def _cut_rows(self, length: int) -> None:
        """Cut metrics.csv to the rows before the last checkpoint: later steps were not saved. If
        rows are missing, say so and keep the complete ones."""
        header = ",".join(COLUMNS) + "\n"
        rows = b""
        if length and self.metrics.exists():
            with open_regular(self.metrics) as file:
                rows = file.read(length)
        complete = rows[: rows.rfind(b"\n") + 1]
        write_whole(self.metrics, complete or header)
        if len(complete) < length:
            lost = f"{length - len(complete)} bytes of {self.metrics} are gone"
            self.say(f"{lost}: it continues after its last complete row")

    def keep_rows(self) -> int:
        """Sync metrics.csv to disk and return its length."""
        sync(self.metrics)
        return self.metrics.stat().st_size

    def clock(self, step: int) -> tuple[int, float]:
        """A step and the current time, as the start of a rate."""
        return step, time.monotonic()

    def say(self, text: str) -> None:
        """Write a line to log.txt and the terminal."""
        self.last_line = time.monotonic()
        if self.quiet:
            return
        append(self.log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        if self.bar.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self.bar.write(text, file=sys.stderr)

    def line_due(self, step: int) -> bool:
        """Whether to print a line now: without a bar, at the first step and every few seconds."""
        if self.quiet or not self.bar.disable:
            return False
        return step == self.first or time.monotonic() - self.last_line >= LINE_EVERY

    def line(self, step: int, result: StepResult) -> None:
        """Print the last step's figures, the rate, and the time left."""
        since, start = self.line_clock
        done, seconds = step - since, time.monotonic() - start
        line = f"step {step}/{self.total} {describe(vars(result))}"
        if step == self.first and self.compiles:
            self.say(f"{line} compiled and run in {seconds:.0f} s")
            self.line_clock = self.clock(step)  # rates without compilation
            return
        left = timedelta(seconds=round((self.total - step) * seconds / done))
        rate = done * self.images / seconds
        self.say(f"{line} {rate:.0f} img/s, {left} left")

    def row(self, step: int, result: StepResult, lr: float) -> None:
        """Write one row of training metrics, and update the bar."""
        since, start = self.row_clock
        rate = (step - since) * self.images / (time.monotonic() - start)
        figures = vars(result)
        self._write_row("train", step, figures | {"lr": lr, "images_per_s": rate})
        shown = {name: f"{figures[name]:.1f}" for name in TERMS}
        self.bar.set_postfix(shown | {"img/s": f"{rate:.0f}"})
        self.row_clock = self.clock(step)

    def validation(self, step: int, score: Score) -> None:
        """Write a row of metrics and a line for a validation."""
        terms = {"nll": score.nll_nats} | {name: getattr(score, name) for name in TERMS[1:]}
        self._write_row("validation", step, terms)
        self.say(f"step {step}/{self.total} validation {describe(terms)}")

    def _write_row(self, split: str, step: int, values: dict[str, float]) -> None:
        """Append one row to metrics.csv, and pass it to the logger."""
        if self.quiet:
            return
        text = io.StringIO()
        numbers = {name: f"{values[name]:.9g}" for name in COLUMNS if name in values}
        epoch = f"{step / self.steps_per_epoch:.4f}"
        row = {"step": step, "epoch": epoch, "split": split} | numbers
        csv.DictWriter(text, COLUMNS, lineterminator="\n").writerow(row)
        append(self.metrics, text.getvalue())
        if self.logger is not None:
            named = {f"{split}/{name}": float(values[name]) for name in numbers}
            self.logger.log_metrics(named, step)

    def close(self) -> None:
        """Close the bar, and flush the logger."""
        self.bar.close()
        if self.logger is not None:
            self.logger.finalize("finished")


def describe(terms: dict[str, float]) -> str:
    """Format the bound and its terms."""
    return (
        f"bound {terms['nll']:.2f} nats (recon {terms['recon']:.2f}, "
        f"KL z {terms['kl_z']:.2f}, KL y {terms['kl_y']:.2f})"
    )
