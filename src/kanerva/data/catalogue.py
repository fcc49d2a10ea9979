"""Which data sets there are, where they are looked for, and where they are fetched from."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from kanerva.data.binarize import Binarization
from kanerva.data.cache import cache_dir
from kanerva.data.celeba import find_celeba, load_celeba
from kanerva.data.cifar import find_cifar10, load_cifar10
from kanerva.data.glyphs import load_glyphs
from kanerva.data.idx import find_idx, load_idx_set
from kanerva.data.image_set import ImageSet
from kanerva.data.imagenet import SIZES, find_imagenet, load_imagenet
from kanerva.data.images import load_folder
from kanerva.data.mazes import fetch_mazes, find_arrays, find_mazes, load_mazes
from kanerva.data.omniglot import find_omniglot, load_omniglot
from kanerva.errors import UserError

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class RemoteFile:
    """A published file: where it is, and the MD5 of its publisher's copy."""

    name: str
    url: str
    md5: str


@dataclass(frozen=True)
class DatasetInfo:
    """What a set is, in a line, and how it is used unless asked otherwise."""

    name: str
    description: str
    image_shape: tuple[int, int, int]
    binarization: Binarization
    files: tuple[RemoteFile, ...] = ()
    by_hand: str = ""  # which files to put into its folder, where none can be fetched


def _published(base: str, md5s: dict[str, str]) -> tuple[RemoteFile, ...]:
    return tuple(RemoteFile(name, base + name, md5) for name, md5 in md5s.items())


_MNIST = _published(
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
)
_FASHION_MNIST = _published(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
)
_OMNIGLOT = _published(
    "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/",
    {
        "images_background.zip": "68d2efa1b9178cc56df9314c21c6e718",
        "images_evaluation.zip": "6b91aef0f799c5bb55b94e3f2daec811",
    },
)
_CIFAR10 = _published(
    "https://www.cs.toronto.edu/~kriz/",
    {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
)
_GREY, _COLOUR, _PHOTOGRAPH = (1, 28, 28), (3, 32, 32), (3, 64, 64)
_ALL = (
    DatasetInfo("glyphs", "characters drawn from matplotlib's fonts; no download", _GREY, "sample"),
    DatasetInfo("mnist", "handwritten digits (LeCun et al. 1998)", _GREY, "sample", _MNIST),
    DatasetInfo(
        "omniglot",
        "handwritten characters, tested on unseen alphabets (Lake et al. 2015)",
        _GREY,
        "sample",
        _OMNIGLOT,
    ),
    DatasetInfo("fashion_mnist", "grey clothes (Xiao et al. 2017)", _GREY, "none", _FASHION_MNIST),
    DatasetInfo("cifar10", "small colour photographs (Krizhevsky 2009)", _COLOUR, "none", _CIFAR10),
    DatasetInfo(
        "mazes",
        "walks in DeepMind Lab's mazes and textures, drawn by MuJoCo: not DeepMind Lab itself",
        _PHOTOGRAPH,
        "none",
    ),
    DatasetInfo(
        "celeba",
        "faces at 64 x 64 (Liu et al. 2015)",
        _PHOTOGRAPH,
        "none",
        by_hand="img_align_celeba/ and list_eval_partition.txt from mmlab.ie.cuhk.edu.hk",
    ),
    *(
        DatasetInfo(
            name,
            f"ImageNet at {size} x {size} (Chrabaszcz et al. 2017)",
            (3, size, size),
            "none",
            by_hand="train_data_batch_*.npz and val_data.npz from image-net.org, or train/ and "
            "val/ of images",
        )
        for name, size in SIZES.items()
    ),
    DatasetInfo("images", "any folder of images of your own", _PHOTOGRAPH, "none"),
)
DATASETS: dict[str, DatasetInfo] = {known.name: known for known in _ALL}


def info(name: str) -> DatasetInfo:
    """What is known of the set of that name."""
    if name not in DATASETS:
        raise UserError(f"unknown data set {name!r}: choose one of {', '.join(DATASETS)}")
    return DATASETS[name]


def data_root(explicit: Path | None = None) -> Path:
    """Where data are looked for and fetched to: as told, else `$KANERVA_DATA`, else the cache."""
    if explicit is not None:
        return explicit.expanduser()
    chosen = os.environ.get("KANERVA_DATA")
    return Path(chosen).expanduser() if chosen else cache_dir()


def load(
    name: str,
    split: str,
    root: Path | None = None,
    folder: Path | None = None,
    size: tuple[int, int] | None = None,
    channels: int | None = None,
    crop: int | None = None,
) -> ImageSet:
    """One split of a set: train, validation or test. Folder, size and channels are for `images`,
    crop is for `celeba`."""
    _, height, width = info(name).image_shape
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
    if crop is not None and name != "celeba":
        raise UserError(f"crop={crop} is for the data set celeba, not for {name}")
    if name == "images":
        if folder is None:
            raise UserError("images needs a folder of images: say which")
        return load_folder(
            folder.expanduser(), split, size or (height, width), 3 if channels is None else channels
        )
    for option, value in {"folder": folder, "size": size, "channels": channels}.items():
        if value is not None:
            raise UserError(f"{option}={value} is for the data set images, not for {name}")
    if name == "glyphs":
        return load_glyphs(split)
    place = data_root(root)
    if name == "mazes":
        return load_mazes(split, place / name)
    if name == "omniglot":
        found = load_omniglot(split, place / name)
    elif name == "cifar10":
        found = load_cifar10(split, place)
    elif name == "celeba":
        found = load_celeba(split, place / name, crop)
    elif name in SIZES:
        found = load_imagenet(name, split, place / name)
    else:
        found = load_idx_set(name, split, place / name)
    if found is None:
        by_hand = DATASETS[name].by_hand
        remedy = f"put {by_hand} into {name}/" if by_hand else f"run `kanerva data fetch {name}`"
        raise UserError(
            f"{name} not found in {place}: {remedy}, or point --data-root "
            f"or $KANERVA_DATA at a folder that holds {name}/"
        )
    return found


def is_present(name: str, root: Path | None = None) -> bool:
    """Whether `load` would find the set's test split. `images` depends on the folder: never."""
    place = data_root(root)
    if info(name).name == "omniglot":
        return find_omniglot(place / name, "evaluation") is not None
    if name == "cifar10":
        return find_cifar10(place) is not None
    if name == "mazes":
        return find_mazes(place / name) is not None or bool(find_arrays(place / name))
    if name == "celeba":
        return find_celeba(place / name) is not None
    if name in SIZES:
        return find_imagenet(name, "val", place / name) is not None
    return name == "glyphs" or find_idx(place / name, "t10k", "images") is not None


def fetch(name: str, root: Path | None = None) -> list[Path]:
    """Put the files of a set into `<root>/<name>/`; those already there and right are left alone.

    `glyphs` and `mazes` are drawn, not downloaded: this draws them now instead of on first use.
    """
    known = info(name)
    if name == "glyphs":
        load("glyphs", "train")
        return []
    folder = data_root(root) / name
    if name == "mazes":
        return [fetch_mazes(folder)]
    if known.by_hand:
        raise UserError(f"{name} cannot be fetched: put {known.by_hand} into {folder}/")
    if not known.files:
        raise UserError(f"{name} cannot be fetched: it is {known.description}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror})") from error
    return [_fetch_file(file, folder) for file in known.files]


def _fetch_file(file: RemoteFile, folder: Path) -> Path:
    path = folder / file.name
    if path.exists():
        found = _md5(path)
        if found != file.md5:
            raise UserError(
                f"{path} is not the published file (md5 {found}, not {file.md5}): "
                "move it away and fetch again"
            )
        return path
    try:
        import pooch
    except ImportError as error:
        raise UserError("downloads need pooch: pip install pooch") from error
    try:
        pooch.retrieve(file.url, f"md5:{file.md5}", file.name, folder, progressbar=True)
    except Exception as error:  # whatever the network, the server or the disk came up with
        unreached = "Connection" in type(error).__name__ or "Timeout" in type(error).__name__
        reason = "no connection" if unreached else " ".join(str(error).split())[:200]
        raise UserError(
            f"could not fetch {file.url}: {reason}: try again, or put the file in {folder}"
        ) from error
    return path


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
