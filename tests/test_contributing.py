"""CONTRIBUTING.md, followed to the letter in a copy of the package."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import kanerva

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()

TRY = """
import numpy as np, kanerva
from pathlib import Path
from kanerva import data
from kanerva.cli import main

place = Path("data/stamps")
place.mkdir(parents=True)
for split in ("train", "validation", "test"):
    np.save(place / f"{split}.npy", np.arange(256 * 784, dtype=np.uint8).reshape(256, 1, 28, 28))
assert data.load("stamps", "test", Path("data")).images.shape == (256, 1, 28, 28)
np.save(place / "validation.npy", np.zeros((9, 28, 28), np.float32))
try:
    data.load("stamps", "validation", Path("data"))
except kanerva.UserError as error:
    assert "holds float32 (9, 28, 28); images are uint8 (N, C, H, W)" in str(error)
else:
    raise AssertionError("floats were taken")
np.save(place / "validation.npy", np.zeros((256, 1, 28, 28), np.uint8))
path = place / "validation.npy"
whole = path.read_bytes()
path.write_bytes(whole[:-1])
try:
    data.load("stamps", "validation", Path("data"))
except kanerva.UserError as error:
    assert "validation.npy" in str(error)
else:
    raise AssertionError("a file that ends early was read")
path.write_bytes(whole)
few = (
    "--steps 1 --batch 1 --episode-length 4 --validate-episodes 1 --device cpu --memory.size 16 "
    "--encoder.width 4 --readout.prior-width 4 --decoder.base 8"
)
assert main(["data", "list", "--data-root", "data"]) == 0
words = ["--preset", "stamps", "--data-root", "data", *few.split()]
assert main(["train", *words, "--run", "runs/stamps"]) == 0
plain = ["--preset", "glyphs", "--model", "kpp-plain", *few.split()]
assert main(["train", *plain, "--run", "runs/plain"]) == 0
assert main(["evaluate", "runs/plain", "--episodes", "1", "--controls", "4"]) == 0
print("both work")
"""


def blocks() -> dict[str, list[str]]:
    """The blocks of code of each section, whole files and lines of one."""
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    return {
        text.splitlines()[0]: re.findall(r"```(?:python|text)\n(.*?)```", text, re.DOTALL)
        for text in sections
    }


def insert(path: Path, before: str, text: str) -> None:
    """Put text before the only place where a file says so."""
    content = path.read_text()
    assert content.count(before) == 1, (path, before)
    path.write_text(content.replace(before, text + before))


def test_a_data_set_and_a_model_are_added_as_the_page_says(tmp_path: Path):
    package = tmp_path / "src" / "kanerva"
    shutil.copytree(kanerva.__path__[0], package, ignore=shutil.ignore_patterns("__pycache__"))
    found = blocks()

    module, entry, _ = found["A data set"]
    (package / "data" / "stamps.py").write_text(module)
    insert(package / "data" / "registry.py", '    DatasetInfo(\n        "images"', entry)

    config, module, entry, sizes = found["A model"]
    configs = package / "config" / "models.py"
    insert(
        configs, "\n\n@dataclass(frozen=True, kw_only=True)\nclass KppPaperConfig", "\n\n" + config
    )
    insert(configs, "KppPaperConfig,\n", "KppPlainConfig, ")
    (package / "models" / "kpp_plain.py").write_text(module)
    insert(package / "models" / "__init__.py", '    "kpp-paper": (', entry)

    contract = (Path(__file__).parent / "test_contract.py").read_text()
    assert sizes.replace("kpp-plain", "kpp-empty") in contract

    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", TRY],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "src"), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("both work\n"), done.stdout + done.stderr
    assert "stamps" in done.stdout
