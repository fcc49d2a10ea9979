"""Published files: downloaded once, and checked against the MD5 of their publisher's copy."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from kanerva.errors import UserError


@dataclass(frozen=True)
class RemoteFile:
    """A published file: where it is, and the MD5 of its publisher's copy."""

    name: str
    url: str
    md5: str


def published(base: str, md5s: dict[str, str]) -> tuple[RemoteFile, ...]:
    """Files that lie side by side on a server, by their names."""
    return tuple(RemoteFile(name, base + name, md5) for name, md5 in md5s.items())


def download(files: tuple[RemoteFile, ...], place: Path) -> list[Path]:
    """The files, in `place`; those already there and right are left alone."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{place}: cannot be made ({error.strerror})") from error
    return [_download_file(file, place) for file in files]


def _download_file(file: RemoteFile, place: Path) -> Path:
    path = place / file.name
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
        raise UserError("downloads need pooch: pip install 'kanerva[train]'") from error
    try:
        pooch.retrieve(file.url, f"md5:{file.md5}", file.name, place, progressbar=True)
    except Exception as error:  # whatever the network, the server or the disk came up with
        unreached = "Connection" in type(error).__name__ or "Timeout" in type(error).__name__
        reason = "no connection" if unreached else " ".join(str(error).split())[:200]
        raise UserError(
            f"could not fetch {file.url}: {reason}: try again, or put the file in {place}"
        ) from error
    return path


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
