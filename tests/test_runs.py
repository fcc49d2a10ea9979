"""Run folders: one trainer at a time, always as they were started."""

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kanerva import processor
from kanerva.config import RunConfig, flatten
from kanerva.errors import UserError
from kanerva.presets import PRESETS, preset
from kanerva.provenance import commit, versions
from kanerva.runs import check_same_run, locked, read_run_config
from kanerva.training.loop import train

_FINISHED: list[Path] = []  # trained by the first test that asks


@pytest.fixture
def finished(
    tmp_path: Path,
    small_run: RunConfig,
    mnist_root: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A copy of `small_run`, trained to its end."""
    if not _FINISHED:
        run = tmp_path_factory.mktemp("finished") / "run"
        train(small_run, run, data_root=mnist_root)
        _FINISHED.append(run)
    return shutil.copytree(_FINISHED[0], tmp_path / "run")


def test_a_run_reads_back_its_config(finished: Path, small_run: RunConfig):
    assert read_run_config(finished) == small_run


def test_only_the_length_may_change_on_resume(tmp_path: Path, small_run: RunConfig):
    was = small_run
    check_same_run(tmp_path, was, replace(small_run, steps=99, log_every=5))
    with pytest.raises(UserError, match="optim.lr=0.005, not 0.1"):
        check_same_run(tmp_path, was, replace(small_run, optim=replace(small_run.optim, lr=0.1)))


def test_a_checkpoint_remembers_its_options_though_config_yaml_was_edited(
    finished: Path, small_run: RunConfig, mnist_root: Path
):
    run = finished
    before = (run / "config.yaml").read_text()
    with pytest.raises(UserError, match="was started with seed=0, not 3"):
        train(replace(small_run, seed=3), run, resume=True, data_root=mnist_root)
    assert (run / "config.yaml").read_text() == before


def test_a_run_cannot_end_before_it_stands(finished: Path, small_run: RunConfig, mnist_root: Path):
    with pytest.raises(UserError, match="already at step 12, past 4"):
        train(replace(small_run, steps=4), finished, resume=True, data_root=mnist_root)


def test_a_second_process_is_kept_out(tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    program = (
        "import sys; from pathlib import Path; from kanerva.runs import locked\n"
        "with locked(Path(sys.argv[1])): print('in')"
    )
    argv = [sys.executable, "-c", program, str(tmp_path)]
    with locked(tmp_path):
        second = subprocess.run(argv, capture_output=True, text=True)
        assert second.returncode != 0 and "another process is training" in second.stderr
    with locked(tmp_path):  # free again
        pass


def test_a_full_disk_is_one_line(
    finished: Path, small_run: RunConfig, mnist_root: Path, monkeypatch: pytest.MonkeyPatch
):
    """The last checkpoint stays, and nothing half-written is left."""
    run = finished
    before = (run / "checkpoints" / "last" / "state.json").read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        train(replace(small_run, steps=16), run, resume=True, data_root=mnist_root)
    assert (run / "checkpoints" / "last" / "state.json").read_bytes() == before
    assert not list((run / "checkpoints").glob(".*tmp"))


def test_a_missing_metrics_file_does_not_stop_a_resume(
    finished: Path, small_run: RunConfig, mnist_root: Path
):
    run = finished
    (run / "metrics.csv").unlink()
    assert train(replace(small_run, steps=16), run, resume=True, data_root=mnist_root).step == 16
    assert (run / "metrics.csv").read_text().startswith("step,epoch,split")


@pytest.mark.skipif(torch.cuda.is_available(), reason="bf16 runs on the GPU")
@pytest.mark.parametrize("value", ["ALL", "avx512_core_amx", "DEFAULT"])
def test_bf16_on_a_cpu_is_refused_where_amx_is_admitted(
    value: str, tmp_path: Path, small_run: RunConfig, mnist_root: Path, monkeypatch
):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", value)
    with pytest.raises(UserError, match=f"ONEDNN_MAX_CPU_ISA={value} allows AMX"):
        train(replace(small_run, precision="bf16-mixed"), tmp_path / "run", data_root=mnist_root)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value, after", [(None, "AVX512_CORE_BF16"), ("AVX2", "AVX2")])
def test_importing_kanerva_keeps_onednn_off_amx(value: str | None, after: str):
    """Before torch is loaded; what the environment says already is left as it is."""
    code = (
        "import os, sys, kanerva.processor\n"
        "print(os.environ['ONEDNN_MAX_CPU_ISA'], kanerva.processor.admits_amx())"
    )
    known = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    known |= {} if value is None else {"ONEDNN_MAX_CPU_ISA": value}
    done = subprocess.run([sys.executable, "-c", code], env=known, capture_output=True, text=True)
    assert done.stdout.split() == [after, "False"], done.stderr


TENSORS = """
import resource, sys
from kanerva.processor import keep_memory

kept = keep_memory() if sys.argv[1] == "keep" else None
import torch

def fill():
    for _ in range(10):
        torch.ones(16 * 2**20)  # 64 MiB: glibc returns each to the system

fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
fill()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="options of glibc")
def test_commands_keep_freed_memory_unless_the_environment_says_how():
    """Ten tensors of 16,384 pages each fault almost none of them in again."""

    def run(how: str, **extra: str) -> tuple[str, int]:
        known = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
        done = subprocess.run(
            [sys.executable, "-c", TENSORS, how], env=known | extra, capture_output=True, text=True
        )
        kept, faults = done.stdout.split()
        return kept, int(faults)

    kept, faults = run("keep")
    assert kept == "True" and faults < 16_384
    assert run("plain")[1] > 4 * faults
    assert run("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
    assert run("keep", GLIBC_TUNABLES="glibc.malloc.mmap_max=65536")[0] == "False"


def test_without_glibc_memory_is_as_it_was(monkeypatch: pytest.MonkeyPatch):
    for name in processor._ALLOCATION:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processor.ctypes, "CDLL", lambda name: object())
    assert not processor.keep_memory()


BF16 = """
import torch  # before kanerva, as many would: oneDNN has not been used yet
from kanerva.models import build
from kanerva.presets import preset

torch.manual_seed(0)
model = build(preset("glyphs", "kpp-paper").model).eval()
images = torch.ones(1, 4, 1, 28, 28)
plain = model.elbo(images, sample=False)
with torch.autocast("cpu", dtype=torch.bfloat16):
    mixed = model.elbo(images, sample=False)
for name in ("log_likelihood", "readout_kl", "key_kl"):
    ours, theirs = getattr(mixed, name), getattr(plain, name)
    assert ours.dtype == torch.float32 and not torch.equal(ours, theirs), name
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.3)
"""


def test_bf16_keeps_likelihood_and_divergences_in_float32():
    """As a user's first lines would run it: a fresh process, nothing set beforehand."""
    known = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    done = subprocess.run([sys.executable, "-c", BF16], env=known, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_names_itself_and_builds(name: str):
    config = preset(name)
    assert config.preset == name and config.data.set == name
    assert (config.model.likelihood == "bernoulli") == (config.data.binarization != "none")


def test_nested_options_flatten():
    assert flatten({"a": 1, "b": {"c": 2, "d": {"e": None}}}) == {"a": 1, "b.c": 2, "b.d.e": None}


def test_provenance_names_a_commit_and_versions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KANERVA_COMMIT", "abc123")
    assert commit() == "abc123"
    monkeypatch.delenv("KANERVA_COMMIT")
    assert commit() and versions()["torch"] == torch.__version__
