"""The sample grid that a run saves at each validation."""

import torch
from PIL import Image

from kanerva.models.base import Images, MemoryModel
from kanerva.pictures import sheet


@torch.no_grad()
def sample_sheet(model: MemoryModel, episode: Images, generator: torch.Generator) -> Image.Image:
    """Rows of true images, their reconstructions, their recall, and samples from random keys."""
    rows = [("written", episode), (model.reconstructed, model.reconstruct(episode))]
    memory = model.write(episode) if model.remembers else None
    if memory is not None and model.recalls:
        recalled = model.recall(memory, episode, steps=1)[0]
        rows.append(("recalled from the image itself", recalled))
    name = "random keys" if model.remembers else "samples"
    rows.append((name, model.generate(memory, len(episode), generator=generator)))
    return sheet(rows, columns=len(episode))
