"""Episodes: the T images that are written into one memory together.

Training draws episodes and pixels afresh each epoch; evaluation has one fixed draw of both, the
same for every run and model.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from kanerva.data.binarize import Binarization, binarize, to_float
from kanerva.data.image_set import ImageSet, pixel_hash
from kanerva.errors import UserError
from kanerva.seeding import stream
from kanerva.shapes import Counted, Episode, Pixels

Order = Int[Tensor, "N"]  # positions in the image set


class TrainingEpisodes:
    """Batches of disjoint episodes, each a pure function of (seed, step), in whatever order asked.

    An epoch is one shuffle of the set and one draw of its pixels; the images that do not fill a
    last batch wait for the next shuffle. `batch` counts the episodes of all processes together:
    each gets its own run of them. The order is the same on every device, sampled pixels are the
    same on every device of a kind.

    The set lives on the device, where it fits: a batch is then a list of positions, and nothing
    but that list ever travels.
    """

    def __init__(
        self,
        image_set: ImageSet,
        *,
        episode_length: int,
        batch: int,
        seed: int,
        binarization: Binarization,
        device: str | torch.device = "cpu",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _check_length(episode_length, image_set)
        _check_batch(batch, episode_length, image_set, rank, world_size)
        self.image_set = image_set
        self.episode_length = episode_length
        self.batch = batch
        self.seed = seed
        self.binarization: Binarization = binarization
        self.steps_per_epoch = len(image_set) // (episode_length * batch)
        self._share = slice(rank * batch // world_size, (rank + 1) * batch // world_size)
        self._device = torch.device(device)
        self._grey = image_set.images.to(home(image_set.images, self._device))
        if binarization != "sample":  # nothing is drawn: the same pixels every epoch
            self._grey = binarize(self._grey, binarization)
        self._epoch: tuple[int, Order, Pixels] | None = None

    def batch_at(self, step: int) -> Episode:
        """The episodes of one step, for this process."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        order, pixels = self._draw(epoch)
        count = self.batch * self.episode_length
        start = step_of_epoch * count
        chosen = order[start : start + count].view(self.batch, self.episode_length)[self._share]
        batch = pixels[chosen].to(self._device, non_blocking=True)
        return to_float(batch, self.binarization != "none")

    def _draw(self, epoch: int) -> tuple[Order, Pixels]:
        """The order and pixels of an epoch; the latest is kept."""
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = None  # let the last one go before the next takes its room
            device = self._grey.device
            shuffle = stream(self.seed, "order", epoch)  # on the CPU: the same on every device
            order = torch.randperm(len(self.image_set), generator=shuffle).to(device)
            pixels = self._grey
            if self.binarization == "sample":
                draws = stream(self.seed, "binarize", epoch, device=device)
                pixels = binarize(self._grey, "sample", draws)
            self._epoch = epoch, order, pixels
        return self._epoch[1:]


def home(images: Pixels, device: torch.device) -> torch.device:
    """Where a set is kept: on the device, unless it and a draw of its pixels would take more than a
    quarter of its memory. What else is there does not count: where pixels are drawn must not
    change from run to run."""
    if device.type != "cuda":
        return device
    room = torch.cuda.get_device_properties(device).total_memory
    return device if 2 * images.numel() <= room // 4 else torch.device("cpu")


@dataclass(frozen=True)
class EpisodeBatch:
    """Some of the fixed episodes: pixels, which of them count, and where they are in the set."""

    images: Episode
    counted: Counted
    indices: Int[Tensor, "B T"]


class FixedEpisodes:
    """The episodes that a split is scored on, the same for every run.

    One permutation and one draw of pixels, from the names of set and split alone; disjoint episodes
    of T. The last is filled by wrapping round, and what fills it is not counted.
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
        order = torch.randperm(size, generator=stream("episodes", name, split))
        places = torch.arange(-(-size // episode_length) * episode_length)
        self.indices = order[places % size].view(-1, episode_length).to(device)
        self.counted: Counted = (places < size).view(-1, episode_length).to(device)

    def __len__(self) -> int:
        return self.indices.shape[0]

    def batch(self, start: int, stop: int) -> EpisodeBatch:
        """Episodes start to stop, less one."""
        indices = self.indices[start:stop]
        images = to_float(self._pixels[indices], self.binarization != "none")
        return EpisodeBatch(images, self.counted[start:stop], indices)

    def fingerprint(self, limit: int | None = None) -> str:
        """SHA-256 of the pixels that are scored, in order, whatever T; of the first episodes."""
        scored = self.indices[:limit][self.counted[:limit]]
        return pixel_hash(self._pixels[scored])


def _check_length(episode_length: int, image_set: ImageSet) -> None:
    if episode_length < 1:
        raise UserError(f"episode_length={episode_length}: use 1 or more")
    if episode_length > len(image_set):
        raise UserError(
            f"episode_length={episode_length} is larger than the data: {image_set.name} "
            f"{image_set.split} holds {len(image_set)} images"
        )


def _check_batch(batch: int, length: int, image_set: ImageSet, rank: int, world_size: int) -> None:
    if batch < 1:
        raise UserError(f"batch={batch}: use 1 or more episodes")
    if batch * length > len(image_set):
        raise UserError(
            f"batch={batch} episodes of {length} are {batch * length} images, and "
            f"{image_set.name} {image_set.split} holds {len(image_set)}: "
            f"use batch {len(image_set) // length} or less"
        )
    if not 0 <= rank < world_size:
        raise UserError(f"rank={rank} of world_size={world_size}: use 0 to {world_size - 1}")
    if batch % world_size:
        raise UserError(
            f"batch={batch} does not divide among {world_size} processes: use a multiple"
        )
