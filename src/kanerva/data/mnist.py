"""MNIST: 70,000 handwritten digits (LeCun et al. 1998)."""

from functools import partial

from kanerva.data.download import published
from kanerva.data.idx import has_test_images, load_idx_set

load = partial(load_idx_set, "mnist")
is_present = has_test_images
FILES = published(
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    {
        "train-images-idx3-ubyte.gz": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
        "train-labels-idx1-ubyte.gz": ("d53e105ee54ea40749a09fcbcd1e9432", 28_881),
        "t10k-images-idx3-ubyte.gz": ("9fb629c4189551a2d022fa330f9573f3", 1_648_877),
        "t10k-labels-idx1-ubyte.gz": ("ec29112dd5afa0611ce80d1b7f02629c", 4_542),
    },
)
