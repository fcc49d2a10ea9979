"""The list of data sets, one entry each. Nothing heavy is imported here.

How to add a data set: write a module, `kanerva/data/NAME.py`, and add an entry to `_ENTRIES`.
Nothing else changes. `place` below is the set's own folder, `<data root>/NAME`. A module has

    load(split, place, **options) -> ImageSet | None   # a split of SPLITS; None if it is missing
    is_present(place) -> bool                          # whether `load` would find the test split
    FILES: tuple[RemoteFile, ...]                      # what to download to `place`; or instead
    fetch(place) -> list[Path]                         # another way to get the files

If the files cannot be downloaded, leave out the last two and set `by_hand` in the entry: which
files a user should get. An entry also names the options that `load` takes, so that the error for an
option of another set can name the sets that take it. `mnist.py` is a short example.
"""

from dataclasses import dataclass
from typing import Literal

from kanerva.errors import UserError, suggest

Binarization = Literal["sample", "static", "threshold", "dither", "none"]
Augment = Literal["none", "affine", "copies"]
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class DatasetInfo:
    """A data set: its description, and its defaults."""

    name: str
    description: str
    image_shape: tuple[int, int, int]  # channels, height, width
    binarization: Binarization
    module: str = ""  # its module, imported on first use; the default is `kanerva.data.NAME`
    options: tuple[str, ...] = ()  # options of its `load`, besides split and place
    needs: str = ""  # an option that is required
    by_hand: str = ""  # which files to put into its folder, if they cannot be downloaded


_IMAGENET = (
    "train_data_batch_*.npz and val_data.npz from image-net.org, or train/ and val/ of images"
)
_ENTRIES = (
    DatasetInfo("glyphs", "characters of matplotlib's fonts; no download", (1, 28, 28), "sample"),
    DatasetInfo("mnist", "handwritten digits (LeCun et al. 1998)", (1, 28, 28), "sample"),
    DatasetInfo(
        "omniglot",
        "handwritten characters, tested on unseen alphabets (Lake et al. 2015)",
        (1, 28, 28),
        "sample",
    ),
    DatasetInfo("fashion_mnist", "grey clothes (Xiao et al. 2017)", (1, 28, 28), "none"),
    DatasetInfo("cifar10", "small colour photographs (Krizhevsky 2009)", (3, 32, 32), "none"),
    DatasetInfo(
        "mazes",
        "walks in DeepMind Lab's mazes and textures, rendered by MuJoCo: not DeepMind Lab itself",
        (3, 64, 64),
        "none",
    ),
    DatasetInfo(
        "celeba",
        "faces at 64 x 64 (Liu et al. 2015)",
        (3, 64, 64),
        "none",
        options=("crop",),
        by_hand="img_align_celeba/ and list_eval_partition.txt from mmlab.ie.cuhk.edu.hk",
    ),
    DatasetInfo(
        "imagenet32",
        "ImageNet at 32 x 32 (Chrabaszcz et al. 2017)",
        (3, 32, 32),
        "none",
        by_hand=_IMAGENET,
    ),
    DatasetInfo(
        "imagenet64",
        "ImageNet at 64 x 64 (Chrabaszcz et al. 2017)",
        (3, 64, 64),
        "none",
        by_hand=_IMAGENET,
    ),
    DatasetInfo(
        "images",
        "any folder of images of your own",
        (3, 32, 32),
        "none",
        options=("folder", "size", "channels"),
        needs="folder",
    ),
)
DATASETS: dict[str, DatasetInfo] = {entry.name: entry for entry in _ENTRIES}


def info(name: str) -> DatasetInfo:
    """The entry of a data set by name."""
    if name not in DATASETS:
        hint = suggest(str(name), DATASETS)
        raise UserError(f"unknown data set {name!r}; {hint}there are {', '.join(DATASETS)}")
    return DATASETS[name]
