"""Tab completion, asked as a shell asks."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kanerva.cli import VERBS, main
from kanerva.cli.completion import complete
from kanerva.config import MODEL_CONFIGS
from kanerva.data.registry import DATASETS


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("tr", ["train"]),
        ("train --memory.ou", ["--memory.outline"]),
        ("train --model dkm --rows.no", ["--rows.noise"]),
        ("train --model d", [name for name in MODEL_CONFIGS if name.startswith("d")]),
        ("train --preset ", [*DATASETS]),
        ("train --logger ", ["tensorboard", "wandb"]),
        ("train --optim.name a", []),
        ("recall --cue low", ["lower_half_hidden"]),
        ("recall runs/x --cue low", ["lower_half_hidden"]),
        ("store fi", ["find"]),
        ("store add --model ", []),  # a run folder, or any model that ships: files
        ("evaluate ", []),
        ("train --model nothing --mem", []),
        ("nothing --mem", []),
    ],
)  # fmt: skip
def test_what_may_follow(typed: str, found: list[str]):
    assert complete(VERBS, typed.split(" ")) == found


def test_every_verb_has_its_flags():
    assert complete(VERBS, [""]) == [*VERBS, "--help", "--version"]
    for verb in VERBS:
        assert "--help" in complete(VERBS, [verb, "--he"])


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_once_it_is_turned_on(shell: str, tmp_path: Path):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} on this machine")
    command = tmp_path / "kanerva"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kanerva "$@"\n')
    command.chmod(0o755)
    typed = 'COMP_WORDS=(kanerva train --prec); COMP_CWORD=2; _kanerva; echo "${COMPREPLY[@]}"'
    script = f'PATH={tmp_path}:$PATH; eval "$(kanerva --completion)"; {typed}'
    done = subprocess.run([shell, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--precision"] and not done.stderr


def test_help_says_how_to_turn_it_on(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    assert 'eval "$(kanerva --completion)"' in capsys.readouterr().out
