"""`kanerva store`: keep images in one file, find them from damaged pieces, forget them."""

import json
import sys
from glob import glob
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kanerva.cli.options import Parser, require_at_least
from kanerva.errors import UserError, printable
from kanerva.plain_files import shown

if TYPE_CHECKING:
    from torch import Tensor

    from kanerva.memory.search import Hits
    from kanerva.models.base import MemoryModel
    from kanerva.shapes import Pixels
    from kanerva.store.store import Receipt, Store

Action = Literal["add", "find", "get", "free", "info", "verify"]
Noise = Literal["none", "salt_pepper", "gaussian"]
_BATCH = 1024  # pictures read at once
_USED_BY = {  # other options serve every action
    "--resize": ("add", "find"),
    "--observed": ("find",),
    "--noise": ("find",),
    "--shifts": ("find",),
    "--k": ("find",),
    "--out": ("find", "get"),
}


def make_parser(words: list[str]) -> Parser:
    parser = Parser("Keep images in one file; find them from damaged pieces; forget them.")
    parser.add_option("action", type=Action)
    parser.add_option("store", type=str, help="the store's file, NAME.kanerva")
    parser.add_option(
        "words",
        type=str,
        nargs="*",
        default=[],
        help="add, find: image files, folders, globs, or - for a list on stdin; get, free: ids",
    )
    parser.add_option("--model", type=str | None, help="add: the model of a new store")
    parser.add_argument("--resize", action="store_true", help="add, find: crop and resize images")
    parser.add_option("--observed", type=str | None, help="find: a mask, white where cues are seen")
    parser.add_option("--noise", type=Noise | None, help="find: the cues' noise, if it is known")
    parser.add_option("--shifts", type=int, default=0, help="find: most pixels a cue is shifted by")
    parser.add_option("--k", type=int, default=5, help="find: how many hits to show")
    parser.add_option("--out", type=str | None, help="find, get: PNG to write")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    return parser


def run(options: dict[str, Any], words: list[str]) -> int:
    """Run one action on one store."""
    refuse_unused(options, words)
    require_at_least(options, 1, "k")
    require_at_least(options, 0, "shifts")
    from kanerva.models.loading import load
    from kanerva.store.store import Store

    action, path = options["action"], Path(options["store"])
    if action != "add" and not path.is_file():
        how = f"kanerva store add {path} IMAGES --model NAME"
        raise UserError(f"no store at {path}: make one with `{how}`")
    if action == "add" and options["model"] is None and not path.is_file():
        raise UserError(f"no store at {path}: name the model of a new one, --model NAME")
    if action in ("add", "find"):
        options = options | {"words": [str(file) for file in list_files(options["words"])]}
        if gone := [name for name in options["words"] if not Path(name).exists()]:
            raise UserError(f"{shown(gone[0])}: no such file")
        if not path.is_file():  # `add` makes one, but a mistake must not leave it behind empty
            first = [Path(name) for name in options["words"][:_BATCH]]
            problems: dict[str, str] = {}
            if not read(first, load(options["model"]), options, problems)[0]:
                report_skipped(path, first, problems)
    with Store(path, model=options["model"]) as store:
        return ACTIONS[action](store, options)


def refuse_unused(options: dict[str, Any], words: list[str]) -> None:
    """Refuse flags and words that the action would ignore."""
    action = options["action"]
    for word in takewhile(lambda word: word != "--", words):
        flag = word.partition("=")[0]
        if action not in (actions := _USED_BY.get(flag, ACTIONS)):
            raise UserError(f"{flag} is for {' and '.join(actions)}; {action} does not use it")
    if action in ("info", "verify") and options["words"]:
        raise UserError(f"{action} takes only a store, got also {shown(options['words'][0])}")


def add(store: "Store", options: dict[str, Any]) -> int:
    """Add each image with its path as payload. Unreadable files, and those of another size, are
    skipped and reported."""
    from kanerva.models.pixels import prepare

    files, ids = [Path(name) for name in options["words"]], []  # listed by `run`
    problems: dict[str, str] = {}
    before = len(store)
    try:
        for start in range(0, len(files), _BATCH):
            kept, pixels = read(files[start : start + _BATCH], store.model, options, problems)
            if kept:
                images, names = prepare(pixels, store.model), [str(file) for file in kept]
                ids += store.add(images, names, progress=sys.stderr.isatty())
    except KeyboardInterrupt:
        note = f"the first {len(store) - before} images were added; to add them again makes copies"
        print(f"kanerva: {note}", file=sys.stderr)
        raise
    report_skipped(store.path, files, problems)
    show({"added": len(ids), "ids": [ids[0], ids[-1]], "images": len(store)}, options)
    return 0


def find(store: "Store", options: dict[str, Any]) -> int:
    """Print ranked ids, probabilities and payloads for each cue."""
    from kanerva import data
    from kanerva.models.pixels import prepare

    named, image = [Path(name) for name in options["words"]], store.model.config.image
    problems: dict[str, str] = {}
    files, pixels = read(named, store.model, options, problems)
    report_skipped(store.path, named, problems)
    # Binarize cues like the images that were added: grey pixels would count as Gaussian noise
    grey = options["noise"] == "gaussian" or not store.model.pixels.binary
    cues = pixels.float() / 255 if grey else prepare(pixels, store.model)
    seen = None
    if options["observed"]:
        masks = data.load_images([Path(options["observed"])], (1, *image[1:]), resize=False)
        if len(masks) != 1:
            raise UserError(f"--observed is one picture, got {len(masks)}: {options['observed']}")
        seen = masks[0, 0] >= 128
    results = store.find(
        cues, observed=seen, noise=options["noise"], shifts=options["shifts"], k=options["k"]
    )
    assert isinstance(results, list)
    answers = [describe(str(file), hits) for file, hits in zip(files, results, strict=True)]
    if options["json"]:
        print(json.dumps(answers))
    else:
        for answer in answers:
            print(f"{printable(answer['cue'])}: none of these {answer['none']:.4f}")
            for hit in answer["hits"]:
                payload = printable(hit["payload"])
                print(f"{hit['id']:>10}  {hit['probability']:.4f}  {payload}")
    if options["out"]:
        draw(list(zip(cues, results, strict=True)), options["out"])
    return 0


def describe(cue: str, hits: "Hits") -> dict[str, Any]:
    """Convert one answer to plain values for JSON."""
    rows = [
        {"id": h.id, "probability": h.probability, "shift": list(h.shift), "payload": h.payload}
        for h in hits
    ]
    return {"cue": cue, "none": hits.none, "left_out": hits.left_out, "hits": rows}


def draw(answers: "list[tuple[Tensor, Hits]]", path: str) -> None:
    """Draw each cue and beside it its hits, the most probable first."""
    import torch

    from kanerva.pictures import sheet

    parts = []
    for cue, hits in answers:
        chances = "  ".join(f"{hit.id}: {hit.probability:.2f}" for hit in hits)
        rows = torch.stack([cue, *(hit.image for hit in hits)])
        parts.append((f"cue, then {chances}; none of these: {hits.none:.2f}", rows))
    save(sheet(parts, max(len(rows) for _, rows in parts)), path)


def save(picture: Any, path: str) -> None:
    from kanerva.pictures import write_picture

    write_picture(picture, Path(path))
    print(printable(path), file=sys.stderr)


def get(store: "Store", options: dict[str, Any]) -> int:
    """Print the payloads of ids, and draw their images if `--out` is given."""
    ids = read_ids(options["words"])
    rows = [{"id": i, "payload": p} for i, p in zip(ids, store.payloads(ids), strict=True)]
    if options["json"]:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(f"{row['id']:>10}  {printable(row['payload'])}")
    if options["out"]:
        from kanerva.pictures import tile

        save(tile(store.get(ids), min(len(ids), 16)), options["out"])
    return 0


def free(store: "Store", options: dict[str, Any]) -> int:
    """Free ids, and report what was overwritten. Exit code 2 if freed bytes are left in a file."""
    receipt = store.free(read_ids(options["words"]))
    sizes = {"bytes overwritten": receipt.bytes, "found afterwards": receipt.found}
    show({"freed": len(receipt.ids), **sizes, "pending": receipt.pending}, options)
    require_erased(receipt, options)
    if receipt.found:
        raise UserError(
            f"{options['store']}: {receipt.found} freed pieces are still in a file; "
            "`kanerva store verify` erases them again"
        )
    return 0


def verify(store: "Store", options: dict[str, Any]) -> int:
    """Check the whole store, and finish pending frees."""
    receipt = store.verify()
    show({"freed": len(receipt.ids), "pending": receipt.pending}, options)
    require_erased(receipt, options)
    return 0


def info(store: "Store", options: dict[str, Any]) -> int:
    """Print how many images the store holds, and its size."""
    show(store.info(), options)
    return 0


def require_erased(receipt: "Receipt", options: dict[str, Any]) -> None:
    """Raise an error if freed bytes are not yet overwritten everywhere."""
    if receipt.pending:
        raise UserError(
            f"{options['store']}: another process still reads the log; `kanerva store verify` "
            "finishes this"
        )


def show(values: dict[str, Any], options: dict[str, Any]) -> None:
    """Print names and values, or JSON."""
    if options["json"]:
        print(json.dumps(values))
        return
    for name, value in values.items():
        print(f"{name:<20}{printable(str(value))}")


def read(
    files: list[Path], model: "MemoryModel", options: dict[str, Any], problems: dict[str, str]
) -> "tuple[list[Path], Pixels]":
    """Read image files. Return those that can be used, and their pixels; add the others to
    `problems`."""
    import torch

    from kanerva import data

    shape, pixels = model.config.image, list["Pixels"]()
    for file in files:
        try:
            pixels.append(data.load_images([file], shape, options["resize"], problems))
        except UserError as error:  # of another size, or gone by now: the others can still be used
            problems[str(file)] = str(error).removeprefix(f"{file}: ")
    kept = [file for file in files if str(file) not in problems]
    return kept, torch.cat(pixels) if kept else torch.zeros(0, *shape, dtype=torch.uint8)


def report_skipped(store: Path, files: list[Path], problems: dict[str, str]) -> None:
    """Print which files cannot be used. Raises an error if none can."""
    from kanerva.data.picture_files import skipped

    if note := skipped(store, problems, len({*files})):
        print(f"kanerva: {printable(note)}", file=sys.stderr)


def list_files(words: list[str]) -> list[Path]:
    """List image files from the words: files, folders, globs, or - for a list on stdin."""
    from kanerva.data.picture_files import image_files

    names = [n for w in words for n in (sys.stdin.read().split("\n") if w == "-" else [w]) if n]
    files: list[Path] = []
    for name in names:
        if Path(name).is_dir():
            files += [file for _, file in image_files(Path(name))]
        else:
            found = [] if Path(name).exists() else sorted(glob(name))  # photo[1].png is a name
            files += map(Path, found or [name])
    if not files:
        raise UserError("no images given: name image files, folders or globs")
    return files


def read_ids(words: list[str]) -> list[int]:
    """Parse ids from the words, or from stdin for -."""
    names = [n for w in words for n in (sys.stdin.read().split() if w == "-" else [w])]
    bad = [name for name in names if not name.isdecimal() or len(name) > 19]
    if bad or not names:
        raise UserError(f"ids are numbers, got {shown(bad[0])}" if bad else "no ids given")
    return [int(name) for name in names]


ACTIONS = {
    "add": add,
    "find": find,
    "get": get,
    "free": free,
    "info": info,
    "verify": verify,
}
