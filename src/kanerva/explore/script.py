"""Copy as Python: a script that reproduces what is on the screen."""

import base64

import numpy as np
import torch
from torch import Tensor

from kanerva.explore.pixels import Damage, Image
from kanerva.explore.session import Call, Session

SAVED = "memory.kanerva"  # name of the file that the page saves
_START = """\
import base64

import kanerva  # before torch: idle threads then sleep
import numpy as np
import torch
"""
_BITS = '''

def images(text: str) -> torch.Tensor:
    """Binary images as they were written on the page."""
    bits = np.unpackbits(np.frombuffer(base64.b64decode(text), dtype=np.uint8))
    count = len(bits) // {size}
    return torch.from_numpy(bits[: count * {size}].reshape(count, {shape})).float()
'''
_BYTES = '''

def images(text: str) -> torch.Tensor:
    """Images as they were written on the page."""
    pixels = np.frombuffer(base64.b64decode(text), dtype=np.uint8)
    return torch.from_numpy(pixels.reshape(-1, {shape}).copy()).float() / 255
'''


def script(
    session: Session,
    image: Image | None,
    damage: Damage | None,
    mask_given: bool,
    store: str | None = None,
) -> str:
    """Write the calls that make the session's memory, or open the store, and then search for the
    image on the screen, if there is one."""
    shape, binary = session.model.config.image, session.model.config.likelihood == "bernoulli"
    sides = ", ".join(map(str, shape))
    reader = (_BITS if binary else _BYTES).format(size=int(np.prod(shape)), shape=sides)
    lines = [_START + reader, ""]
    if store is not None:
        lines.append(f"store = kanerva.Store({store!r})")
    else:
        calls = session.state.calls
        lines.append(f"model = kanerva.load({session.name!r})")
        if not calls or calls[0].verb not in ("open", "write"):
            lines.append("memory = model.empty()")
        lines += [_line(call, binary) for call in calls]
    if image is not None and damage is not None:
        lines += _make_cue(image, damage, mask_given, binary)
        options = ", observed=observed" if mask_given else ""
        options += f", shifts={damage.shifts}" if damage.shifts else ""
        lines += _search(session, options, store)
    return "\n".join(lines) + "\n"


def _line(call: Call, binary: bool) -> str:
    """One call as a line of Python."""
    if call.verb in ("append", "write"):
        start = "memory, " if call.verb == "append" else ""
        return (
            f"memory = model.{call.verb}(\n    {start}images({_pack(call.images, binary)!r}),\n"
            f"    generator=torch.Generator().manual_seed({call.number}),\n)"
        )
    handles = ", ".join(map(str, call.handles))
    if call.verb == "free":
        return f"memory = memory.free({handles})"
    if call.verb == "shrink":
        return f"memory = memory.shrink({call.number}{', ' if handles else ''}{handles})"
    return f"memory = kanerva.Memory.load({SAVED!r}, model)  # Save, on the page"


def _make_cue(image: Image, damage: Damage, mask_given: bool, binary: bool) -> list[str]:
    """Lines that make the cue, and which of its pixels are visible."""
    lines = ["", f"image = images({_pack((image,), binary)!r})[0]"]
    cue = damage.apply(image)
    if torch.equal(cue, image):
        lines.append("cue = image")
    elif bool(((cue == 0) | (cue == 1)).all()) and binary:
        lines.append(f"cue = images({_pack((cue,), binary)!r})[0]")
    else:
        numbers = base64.b64encode(cue.contiguous().numpy().astype("<f4").tobytes()).decode()
        lines += [
            f"numbers = np.frombuffer(base64.b64decode({numbers!r}), dtype='<f4')",
            "cue = torch.from_numpy(numbers.copy()).view(image.shape)",
        ]
    if mask_given and not bool(damage.hidden.any()):
        lines.append(f"observed = torch.ones{tuple(damage.hidden.shape)}  # nothing is hidden")
    elif mask_given:
        seen = np.packbits((~damage.hidden).numpy().astype(np.uint8))
        text, shape = base64.b64encode(seen.tobytes()).decode(), tuple(damage.hidden.shape)
        lines += [
            f"seen = np.unpackbits(np.frombuffer(base64.b64decode({text!r}), dtype=np.uint8))",
            f"observed = torch.from_numpy(seen[: {damage.hidden.numel()}].reshape({shape}).copy())",
        ]
    return lines


def _search(session: Session, options: str, store: str | None) -> list[str]:
    """Lines that search the memory or the store."""
    if store is None and not session.model.has_blocks:
        return ["steps = model.recall(memory, cue[None], steps=8)"]
    call = "model.find(memory, cue" if store is None else "store.find(cue"
    return [
        f"hits = {call}{options})",
        "for hit in hits:",
        '    print(f"{hit.id}: {hit.probability:.4f}")',
        'print(f"none of these: {hits.none:.4f}")',
    ]


def _pack(images: tuple[Image, ...], binary: bool) -> str:
    """Pixels in base64; binary ones are packed eight to a byte."""
    every: Tensor = torch.stack(images)
    if binary:
        return base64.b64encode(np.packbits(every.numpy().astype(np.uint8)).tobytes()).decode()
    levels = (every * 255).round().to(torch.uint8)
    return base64.b64encode(levels.numpy().tobytes()).decode()
