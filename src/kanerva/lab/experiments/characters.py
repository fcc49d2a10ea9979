"""Characters that are not trained on: their drawings, and what memories of these say.

Drawings are encoded once, and any set of them is then read as a memory of whole images. Gists do
not matter to it, so nothing is written, and no gist is refined.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kanerva import data
from kanerva.data.splits import load_split
from kanerva.errors import UserError
from kanerva.lab.harness import Lab
from kanerva.memory.kin import GROUP
from kanerva.models.kpp_bits import KppBits
from kanerva.models.reads_kin import Kin
from kanerva.presets import preset
from kanerva.seeding import stream
from kanerva.shapes import Labels

Drawings = Float[Tensor, "N drawings C H W"]  # by character
Pairs = Int[Tensor, "N drawings 2"]  # of each drawing: the character, and which of its drawings

MOST = 20  # drawings of a character that are used
AT_ONCE = 64  # characters scored together


def characters(lab: Lab, count: int | None) -> tuple[Drawings, Labels]:
    """The test characters with the largest number of drawings (at most 20 are used), and their
    labels. Pixels are sampled once."""
    config = preset(lab.preset)
    image_set = load_split(config, "test", lab.data_root)
    if image_set.labels is None:
        raise UserError(f"this needs labels, and {lab.preset} has none")
    labels, counts = image_set.labels.unique(return_counts=True)
    each = min(MOST, int(counts.max()))
    kept = labels[counts >= each]
    kept = kept[torch.randperm(len(kept), generator=stream("few-shot", lab.preset))][:count]
    if each < 2 or len(kept) < 2:
        raise UserError(f"{lab.preset} has {len(kept)} labels with {each} images: too few")
    chosen = torch.stack([(image_set.labels == label).nonzero()[:each, 0] for label in kept])
    how = config.data.binarization
    pixels = data.binarize(image_set.images[chosen.flatten()], how, stream("few-shot", "pixels"))
    drawings = data.to_float(pixels, how != "none").to(lab.device)
    return drawings.unflatten(0, chosen.shape), kept


class Written:
    """All drawings, encoded once. Any set of them can then be read as a memory of whole images."""

    def __init__(self, model: KppBits, drawings: Drawings) -> None:
        self.model, self.drawings = model, drawings
        self.features = torch.cat([model.encoder(part) for part in drawings.split(AT_ONCE)])
        self.nothing = torch.zeros(model.writer.shape, device=model.device)

    def read(self, written: Int[Tensor, "B n 2"]) -> Float[Tensor, "B maps Hq Wq"]:
        """What a memory of these (character, drawing) says about a new image."""
        features = self.features[written.unbind(-1)]
        every = torch.ones(features.shape[:2], dtype=torch.bool, device=self.model.device)
        gists = self.nothing.expand(*features.shape[:2], -1, -1, -1)
        return self.model.ask_kin(gists, features, every, every)

    def say(self, written: Int[Tensor, "B n 2"], images: Float[Tensor, "B T C H W"]) -> Kin:
        """What a memory of each row of drawings says about each of the row's new images."""
        if written.shape[1] <= GROUP:
            maps = self.read(written)[:, None].repeat_interleave(images.shape[1], dim=0)
            return Kin(maps, 1, torch.full((len(maps),), written.shape[1], device=maps.device))
        said = []
        for pairs, asked in zip(written, images, strict=True):
            every = torch.ones(len(pairs), dtype=torch.bool, device=self.model.device)
            gists = self.nothing.expand(len(pairs), -1, -1, -1)
            memory = self.model.readable(gists, self.features[pairs.unbind(-1)], every)
            said.append(self.model.read_groups(memory, asked))
        return Kin.cat(said)
