"""What pages print: their code and their commands, and a folder in which these run."""

import re
import shlex
import shutil
from pathlib import Path

from PIL import Image

from kanerva.cli import main

ROOT = Path(__file__).parents[1]
TOY = [  # options that every model has
    "--steps", "3", "--encoder.width", "4", "--decoder.base", "8", "--validate-episodes", "2",
    "--device", "cpu",
]  # fmt: skip


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """The command lines of a page that start with `kanerva`, as words after it."""
    lines = "\n".join(blocks(page, "sh")).splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in found if words and words[0] == "kanerva"]


def run_code(page: str) -> dict:
    """The Python of a page, block after block; the names that it leaves."""
    names: dict = {}
    for code in blocks(page, "python"):
        exec(compile(code, page, "exec"), names)
    return names


def run_commands(page: str) -> None:
    """Each command as printed; training is cut to three steps and scoring to two episodes."""
    for words in commands(page):
        toy = TOY if words[0] == "train" and "--resume" not in words else []
        less = ["--episodes", "2"] if words[0] == "evaluate" else []
        assert main([*words, *toy, *less]) == 0, words


def make_place(folder: Path) -> Path:
    """A demo run, trained for three steps instead of two thousand, and two folders of images."""
    folder.mkdir(exist_ok=True)
    assert main(["train", "--preset", "glyphs", "--run", str(folder / "runs/demo"), *TOY]) == 0
    (folder / "scans").mkdir()
    for number in range(120):
        picture = Image.new("L", (28, 28), 0)
        corner = number % 10, number // 10
        picture.paste(255, (*corner, corner[0] + 12, corner[1] + 14))
        picture.save(folder / "scans" / f"{number}.png")
    shutil.copytree(folder / "scans", folder / "photos")
    return folder
