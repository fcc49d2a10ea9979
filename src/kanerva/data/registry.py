"""Which data sets there are: one entry each. Nothing heavy is imported here.

How to add a data set: write a module, `kanerva/data/NAME.py`, and add an entry to `_ENTRIES`.
Nothing else changes. `place` below is the set's own folder, `<data root>/NAME`. A module offers

    load(split, place, **options) -> ImageSet | None   # a split of SPLITS; None: it is not there
    is_present(place) -> bool                          # whether `load` would find the test split
    FILES: tuple[RemoteFile, ...]                      # what to download into `place`, or else
    fetch(place) -> list[Path]                         # its own way to get the files; their paths

and of the last two neither, where the entry says which files to get `by_hand`. An entry names the
options that `load` takes: whoever gives one to another set learns which sets take it. `mnist.py`
is a short example.
"""

from dataclasses import dataclass
from typing import Literal

from kanerva.errors import UserError, suggest

Binarization = Literal["sample", "static", "threshold", "dither", "none"]
Augment = Literal["none", "affine", "copies"]
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class DatasetInfo:
    """What a set is, in a line, and how it is used unless asked otherwise."""

    name: str
    description: str
    image_shape: tuple[int, int, int]  # channels, height, width
    binarization: Binarization
    module: str = ""  # what loads it, imported when asked for; `kanerva.data.NAME` if not said
    options: tuple[str, ...] = ()  # what its `load` takes beside split and place
    needs: str = ""  # the option without which there is nothing to load
    by_hand: str = ""  # which files to put into its folder, where none can be fetched


_IMAGENET = (
    "train_data_batch_*.npz and val_data.npz from image-net.org, or train/ and val/ of images"
)
_ENTRIES = (
    DatasetInfo(
        "glyphs", "characters drawn from matplotlib's fonts; no download", (1, 28, 28), "sample"
    ),
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
        "walks in DeepMind Lab's mazes and textures, drawn by MuJoCo: not DeepMind Lab itself",
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
    """What is known of the set of that name."""
    if name not in DATASETS:
        hint = suggest(str(name), DATASETS)
        raise UserError(f"unknown data set {name!r}; {hint}there are {', '.join(DATASETS)}")
    return DATASETS[name]
