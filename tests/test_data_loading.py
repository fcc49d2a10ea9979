"""Where sets are looked for, what is said when they are missing, and fetching from a server."""

import hashlib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from kanerva.data import mnist
from kanerva.data.download import RemoteFile
from kanerva.data.loading import data_root, fetch, is_present, load
from kanerva.errors import UserError


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A web server of `tmp_path/web`; its address."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "web").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "web")))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def published(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three test images, as the only file of a small 'mnist' on that server."""
    images = np.arange(3 * 4 * 4, dtype=np.uint8)
    raw = bytes([0, 0, 8, 3, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 4]) + images.tobytes()
    name = "t10k-images-idx3-ubyte"
    (tmp_path / "web" / name).write_bytes(raw)
    file = RemoteFile(name, server + name, hashlib.md5(raw).hexdigest())
    monkeypatch.setattr(mnist, "FILES", (file,))
    return tmp_path / "web" / name


def test_the_root_is_as_told_else_the_variable_else_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KANERVA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KANERVA_DATA", str(tmp_path / "data"))
    assert data_root(tmp_path / "told") == tmp_path / "told"
    assert data_root(None) == tmp_path / "data"
    monkeypatch.delenv("KANERVA_DATA")
    assert data_root(None) == tmp_path / "cache"


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "omniglot", "cifar10"])
def test_a_missing_set_says_where_it_was_looked_for_and_what_to_do(tmp_path: Path, name: str):
    assert not is_present(name, tmp_path)
    with pytest.raises(UserError) as error:
        load(name, "test", root=tmp_path)
    assert str(error.value) == (
        f"{name} not found in {tmp_path}: run `kanerva data fetch {name}`, or point --data-root "
        f"or $KANERVA_DATA at a folder that holds {name}/"
    )


def test_unknown_names_and_misplaced_options_are_named(tmp_path: Path):
    with pytest.raises(UserError, match="unknown data set 'minst'; did you mean mnist. there are"):
        load("minst", "train")
    with pytest.raises(UserError, match="unknown split 'dev'"):
        load("mnist", "dev")
    with pytest.raises(UserError, match="images needs the option folder"):
        load("images", "train")
    with pytest.raises(UserError, match="channels=3 is for the data set images"):
        load("mnist", "train", root=tmp_path, channels=3)
    with pytest.raises(UserError, match="images cannot be fetched"):
        fetch("images", tmp_path)


def test_what_is_fetched_is_found_and_fetched_once(tmp_path: Path, published: Path):
    root = tmp_path / "root"
    assert not is_present("mnist", root)
    (path,) = fetch("mnist", root)
    assert path.parent == root / "mnist" and is_present("mnist", root)
    assert load("mnist", "test", root=root).images[2, 0, 3, 3] == 47
    published.unlink()  # a second download would fail now
    assert fetch("mnist", root) == [path]


def test_a_wrong_file_in_the_way_is_reported_and_kept(tmp_path: Path, published: Path):
    path = tmp_path / "root" / "mnist" / published.name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"mine")
    with pytest.raises(UserError, match="is not the published file"):
        fetch("mnist", tmp_path / "root")
    assert path.read_bytes() == b"mine"


def test_a_download_with_the_wrong_hash_is_not_kept(tmp_path: Path, published: Path):
    published.write_bytes(b"<html>moved</html>")
    with pytest.raises(UserError, match="could not fetch .*hash") as error:
        fetch("mnist", tmp_path / "root")
    assert "\n" not in str(error.value)
    assert list((tmp_path / "root" / "mnist").iterdir()) == []


def test_no_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    file = RemoteFile("a.gz", "http://127.0.0.1:9/a.gz", "0" * 32)  # nobody listens there
    monkeypatch.setattr(mnist, "FILES", (file,))
    with pytest.raises(UserError) as error:
        fetch("mnist", tmp_path)
    assert str(error.value).startswith("could not fetch http://127.0.0.1:9/a.gz: no connection")
