"""Episodes: the T images that are written into one memory together.

Training samples new episodes and pixels each epoch. Evaluation uses one fixed sample of both, the
same for every run and model. In a set with groups (paths), an episode is a run of neighbours.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kanerva.data.augment import move_copies, random_affine
from kanerva.data.binarization import binarize, to_float
from kanerva.data.image_set import ImageSet, pixel_hash
from kanerva.data.registry import Augment, Binarization
from kanerva.errors import UserError
from kanerva.seeding import stream
from kanerva.shapes import Counted, Episode, Labels, Pixels

Order = Int[Tensor, "n"]  # positions in the image set
Runs = Int[Tensor, "n T"]  # positions in the image set, one row per episode
Numbers = Int[Tensor, "total"]


class TrainingEpisodes:
    """Batches of disjoint episodes. Each is a pure function of (seed, step), in any order of steps.

    An epoch is one shuffle of the set and one sample of its pixels; images that do not fill a last
    batch are left out. `batch` counts the episodes of all processes together; each process gets its
    own part. The order is the same on every device; sampled pixels are the same on all devices of a
    type. In a set with paths, an epoch cuts each path into as many episodes as fit, from a random
    start, and shuffles those.

    The set is kept on the device if it fits, so that only lists of positions are transferred.
    """

    def __init__(
        self,
        image_set: ImageSet,
        *,
        episode_length: int,
        batch: int,
        seed: int,
        binarization: Binarization,
        augment: Augment = "none",
        kin: float = 0.0,
        kin_labels: int = 1,
        device: str | torch.device = "cpu",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _check_length(episode_length, image_set)
        _check_batch(batch, episode_length, image_set, world_size)
        self.image_set = image_set
        self.episode_length = episode_length
        self.batch = batch
        self.seed = seed
        self.binarization: Binarization = binarization
        self.steps_per_epoch = _holds(image_set, episode_length) // batch
        self._share = slice(rank * batch // world_size, (rank + 1) * batch // world_size)
        self._device = torch.device(device)
        self._grey = image_set.images.to(home(image_set.images, self._device))
        self.augment: Augment = augment
        self.kin, self.kin_labels = kin, kin_labels
        if kin and augment != "copies" and image_set.labels is None:
            raise UserError(
                f"data.kin needs labels, and {image_set.name} has none: data.augment=copies makes "
                "kin without them"
            )
        self._is_binary = binarization not in ("sample", "none") and augment == "none"
        if self._is_binary:  # the same pixels every epoch
            self._grey = binarize(self._grey, binarization, self._draws(0))
        self._epoch: tuple[int, Order, Pixels] | None = None

    def batch_at(self, step: int) -> Episode:
        """This process's episodes of one step."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        order, pixels = self._draw(epoch)
        count = self.batch * self.episode_length
        start = step_of_epoch * count
        chosen = order[start : start + count].view(self.batch, self.episode_length)[self._share]
        batch = pixels[chosen].to(self._device, non_blocking=True)
        return to_float(batch, self.binarization != "none")

    def some(self, count: int) -> Float[Tensor, "N C H W"]:
        """Evenly spaced images of the set, the same for every process. Grey, unless the binarized
        pixels never change."""
        size = len(self._grey)
        count = min(count, size)
        images = self._grey[torch.arange(count, device=self._grey.device) * size // count]
        return to_float(images.to(self._device), self._is_binary)

    def _draw(self, epoch: int) -> tuple[Order, Pixels]:
        """Sample the order and pixels of an epoch; the latest is kept."""
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = None  # free the last one's memory before the next is made
            device = self._grey.device
            shuffle = stream(self.seed, "order", epoch)  # on the CPU: the same on every device
            count, length = self.steps_per_epoch * self.batch, self.episode_length
            if self.augment == "copies":
                order = mix_copies(len(self.image_set), length, count, self.kin, shuffle)
                order = order.flatten().to(device)
            elif self.kin and self.image_set.labels is not None:
                how = count, self.kin, shuffle, self.kin_labels
                order = mix_kin(self.image_set.labels, length, *how)
                order = order.flatten().to(device)
            elif self.image_set.groups is None:
                order = torch.randperm(len(self.image_set), generator=shuffle).to(device)
            else:
                order = cut_paths(self.image_set.groups, self.episode_length, shuffle)
                order = order.flatten().to(device)
            pixels = self._grey
            noise = stream(self.seed, "augment", epoch, device=device)
            if self.augment == "copies":
                pixels = move_copies(pixels[order], noise)
                order = torch.arange(len(order), device=device)
            elif self.augment == "affine":
                labels = self.image_set.labels if self.kin else None
                pixels = random_affine(pixels, noise, None if labels is None else labels.to(device))
            if self.augment != "none" or self.binarization == "sample":
                pixels = binarize(pixels, self.binarization, self._draws(epoch))
            self._epoch = epoch, order, pixels
        return self._epoch[1:]

    def _draws(self, epoch: int) -> torch.Generator:
        """The generator that binarizes pixels: new each epoch, or with `static` always the same,
        whatever the run's seed."""
        static = self.binarization == "static"
        names = (
            ("binarize", self.image_set.name, "train") if static else (self.seed, "binarize", epoch)
        )
        return stream(*names, device=self._grey.device)


def home(images: Pixels, device: torch.device) -> torch.device:
    """The device to keep a set on: `device`, unless the set and a sample of its pixels would take
    more than a quarter of its memory. What else is in that memory does not count, because the
    device that samples pixels must not change from run to run."""
    if device.type != "cuda":
        return device
    room = torch.cuda.get_device_properties(device).total_memory
    return device if 2 * images.numel() <= room // 4 else torch.device("cpu")


@dataclass(frozen=True)
class EpisodeBatch:
    """Some of the fixed episodes: pixels, which images count, and their positions in the set."""

    images: Episode
    counted: Counted
    indices: Int[Tensor, "B T"]


class FixedEpisodes:
    """The episodes that a split is scored on, the same for every run.

    One permutation and one sample of pixels, which depend only on the names of set and split, give
    disjoint episodes of T images. The last episode is padded with images from the start, which are
    not counted. In a set with paths, the last episode of each path is padded with the frames before
    it.
    """

    def __init__(
        self,
        image_set: ImageSet,
        *,
        episode_length: int,
        binarization: Binarization,
        device: str | torch.device = "cpu",
    ) -> None:
        _check_length(episode_length, image_set)
        self.image_set = image_set
        self.episode_length = episode_length
        self.binarization: Binarization = binarization
        name, split, size = image_set.name, image_set.split, len(image_set)
        draws = stream("binarize", name, split)  # on the CPU: the same pixels everywhere
        self._pixels = binarize(image_set.images, binarization, draws).to(device)
        shuffle = stream("episodes", name, split)
        if image_set.groups is None:
            order = torch.randperm(size, generator=shuffle)
            places = torch.arange(-(-size // episode_length) * episode_length)
            indices = order[places % size].view(-1, episode_length)
            counted = (places < size).view(-1, episode_length)
        else:
            shortest = int(_paths(image_set.groups)[1].min())
            if episode_length > shortest:
                raise UserError(
                    f"episode_length={episode_length} is longer than a path of {name} {split}: "
                    f"{shortest} frames"
                )
            indices, counted = cover_paths(image_set.groups, episode_length)
            order = torch.randperm(len(indices), generator=shuffle)
            indices, counted = indices[order], counted[order]
        self.indices = indices.to(device)
        self.counted: Counted = counted.to(device)

    def __len__(self) -> int:
        return self.indices.shape[0]

    def batch(self, start: int, stop: int) -> EpisodeBatch:
        """The episodes in range(start, stop)."""
        indices = self.indices[start:stop]
        images = to_float(self._pixels[indices], self.binarization != "none")
        return EpisodeBatch(images, self.counted[start:stop], indices)

    def fingerprint(self, limit: int | None = None) -> str:
        """SHA-256 of the scored pixels, in an order that does not depend on T. With `limit`, only
        the first episodes count."""
        scored = self.indices[:limit][self.counted[:limit]]
        if self.image_set.groups is not None:
            scored = scored.sort().values  # with paths the order would depend on T
        return pixel_hash(self._pixels[scored])


def mix_kin(
    labels: Labels,
    length: int,
    count: int,
    share: float,
    shuffle: torch.Generator,
    most_labels: int = 1,
) -> Runs:
    """Sample `count` episodes. A fraction `share` of them have images of one label each, fewer if
    labels have too few images; the others have any images. With `most_labels` = 2, half of that
    fraction have images of two labels, shuffled."""
    labels = labels.cpu()
    shuffled = torch.randperm(len(labels), generator=shuffle)
    sorted_by_label = shuffled[labels[shuffled].argsort(stable=True)]
    kin = sorted_by_label[cut_paths(labels[sorted_by_label], length, shuffle)]
    kin = kin[: round(share * count)]
    if most_labels == 2:
        kin = pair_up(kin, len(kin) // 4, shuffle)
    mixed = torch.randperm(len(labels), generator=shuffle)[: len(labels) // length * length]
    runs = torch.cat([kin, mixed.view(-1, length)[: count - len(kin)]])
    return runs[torch.randperm(len(runs), generator=shuffle)]


def pair_up(runs: Runs, pairs: int, shuffle: torch.Generator) -> Runs:
    """Shuffle the images of each of the first `pairs` pairs of runs."""
    some, others = runs.tensor_split([2 * pairs])
    joined = some.reshape(pairs, -1)
    order = torch.rand(joined.shape, generator=shuffle).argsort(dim=1)
    return torch.cat([joined.gather(1, order).view_as(some), others])


def mix_copies(size: int, length: int, count: int, share: float, shuffle: torch.Generator) -> Runs:
    """Sample `count` episodes. A fraction `share` of them repeat one image each; the others have
    any images."""
    kin = torch.randperm(size, generator=shuffle)[: round(share * count)]
    mixed = torch.randperm(size, generator=shuffle)[: (count - len(kin)) * length]
    runs = torch.cat([kin[:, None].expand(-1, length), mixed.view(-1, length)])
    return runs[torch.randperm(count, generator=shuffle)]


def cut_paths(groups: Labels, length: int, shuffle: torch.Generator) -> Runs:
    """Cut paths into disjoint runs of neighbours, as many as fit, from a random start; shuffled."""
    starts, sizes = _paths(groups)
    fit = sizes // length
    spare = sizes - fit * length
    offset = torch.rand(len(sizes), generator=shuffle, dtype=torch.float64)
    starts = starts + (offset * (spare + 1)).long()
    first = starts.repeat_interleave(fit) + length * _counting(fit)
    runs = first[:, None] + torch.arange(length)
    return runs[torch.randperm(len(runs), generator=shuffle)]


def cover_paths(groups: Labels, length: int) -> tuple[Runs, Counted]:
    """Cut paths into runs of neighbours such that every frame counts once. A path's last run ends
    with the path; its first frames may have counted before."""
    starts, sizes = _paths(groups)
    needed = -(-sizes // length)
    new = starts.repeat_interleave(needed) + length * _counting(needed)  # first frame that counts
    last = (starts + sizes - length).repeat_interleave(needed)
    runs = torch.minimum(new, last)[:, None] + torch.arange(length)
    return runs, runs >= new[:, None]


def _paths(groups: Labels) -> tuple[Order, Order]:
    """Where each path starts in the set, and how many frames it has."""
    sizes = torch.unique_consecutive(groups.cpu(), return_counts=True)[1]
    return sizes.cumsum(0) - sizes, sizes


def _counting(counts: Order) -> Numbers:
    """0, 1, ... for each count in turn: [2, 3] gives [0, 1, 0, 1, 2]."""
    before = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.arange(len(before)) - before


def _holds(image_set: ImageSet, length: int) -> int:
    """How many disjoint episodes a set holds."""
    if image_set.groups is None:
        return len(image_set) // length
    return int((_paths(image_set.groups)[1] // length).sum())


def _check_length(episode_length: int, image_set: ImageSet) -> None:
    if episode_length < 1:
        raise UserError(f"episode_length={episode_length}: use 1 or more")
    if episode_length > len(image_set):
        raise UserError(
            f"episode_length={episode_length} is larger than the data: {image_set.name} "
            f"{image_set.split} holds {len(image_set)} images; use --episode-length "
            f"{len(image_set)}, or more images"
        )


def _check_batch(batch: int, length: int, image_set: ImageSet, world_size: int) -> None:
    if batch < 1:
        raise UserError(f"batch={batch}: use 1 or more episodes")
    holds = _holds(image_set, length)
    if batch > holds:  # with paths fewer fit, because no episode crosses from one to the next
        along = "" if image_set.groups is None else " along its paths"
        raise UserError(
            f"batch={batch} episodes of {length}, and {image_set.name} {image_set.split} holds "
            f"{holds}{along}: use batch {holds} or less, or a shorter episode_length"
        )
    if batch % world_size:
        raise UserError(
            f"batch={batch} does not divide among {world_size} processes: use a multiple"
        )
