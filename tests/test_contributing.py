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
import numpy as np, torch, kanerva
from pathlib import Path
from kanerva import data
from kanerva.cli import main
from kanerva.memory.placement import InOrder
from kanerva.presets import with_options

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
config = with_options(kanerva.preset("glyphs").model, memory={"placement": "in_order"})
model = kanerva.build(config).eval()
assert isinstance(model.placement, InOrder)
memory = model.write(torch.zeros(5, 1, 28, 28))
assert memory.cells.tolist() == [0, 1, 2, 3, 4]
assert len(model.append(memory.free(2), torch.ones(1, 1, 28, 28))) == 5
print("all three work")
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


def test_a_data_set_a_model_and_a_placement_are_added_as_the_page_says(tmp_path: Path):
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

    placement, choice = found["A placement"]
    insert(package / "memory" / "placement.py", "class Transport(Placement)", placement + "\n\n")
    insert(package / "memory" / "placement.py", '    if config.placement == "transport"', choice)
    (names,) = re.findall(r"`(Placement = Literal\[.*?\])`", PAGE)
    groups = package / "config" / "groups.py"
    groups.write_text(re.sub(r"^Placement = .*$", names, groups.read_text(), flags=re.MULTILINE))

    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", TRY],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "src"), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("all three work\n"), done.stdout + done.stderr
    assert "stamps" in done.stdout
