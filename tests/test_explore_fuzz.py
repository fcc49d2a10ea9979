"""Whatever is sent to the page's server is answered: no 5xx, nothing written but drafts of its own.

`make trust` sends 10,000 requests; here are some hundred.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="the page needs the extra `explore`")
pytest.importorskip("httpx", reason="in-process requests need httpx")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from explore_client import VERBS, Client
from kanerva.explore.app import Service
from kanerva.explore.library import Library
from kanerva.explore.pixels import to_text
from kanerva.explore.session import Sessions
from kanerva.models.loading import load

PICTURE = to_text((torch.arange(784).view(1, 28, 28) % 5 == 0).float())
NUMBERS = st.one_of(
    st.integers(-10, 70), st.integers(), st.floats(), st.sampled_from([2**31, 2**53, 2**63, -1])
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=20), st.just(PICTURE)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner)),
    max_leaves=6,
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "image": st.just(PICTURE),
    "images": st.lists(st.just(PICTURE), max_size=3),
    "hidden": st.one_of(st.none(), st.just(PICTURE)),
    "handles": st.lists(st.integers(-1, 6), max_size=3),
    "noise": st.sampled_from(["none", "salt_pepper", "gaussian", "fog"]),
    "amount": st.floats(-0.5, 2.5),
    "down": st.integers(-8, 8),
    "right": st.integers(-8, 8),
    "mask_given": st.booleans(),
    "seed": st.integers(-1, 2**31),
    "count": st.integers(-1, 30),
    "sample": st.booleans(),
    "x": st.floats(-1.1, 1.1),
    "y": st.floats(-1.1, 1.1),
    "spread": st.floats(-0.1, 3),
    "bits": st.integers(-1, 70_000),
    "again": st.booleans(),
    "page": st.integers(-1, 40),
    "set": st.sampled_from(["glyphs", "mnist", "images", "../x", ""]),
    "model": st.sampled_from(["glyphs", "/etc", "runs/x", "", None]),
    "cue": st.just({"image": PICTURE, "down": 1}),
}
BODIES = st.one_of(
    st.fixed_dictionaries({}, optional=LIKELY),
    st.fixed_dictionaries({}, optional=LIKELY),
    st.dictionaries(st.sampled_from(sorted(LIKELY)), ANYTHING),
    ANYTHING,
    st.binary(max_size=300),
    st.sampled_from([b"[" * 50_000, b'{"x":' * 9000, b"1" * 9000, b'{"x": 1e999}', b"\xff\xfe"]),
)
HEADERS = st.dictionaries(
    st.sampled_from(["content-type", "x-session", "accept", "content-encoding", "range", "origin"]),
    st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126), max_size=30),
    max_size=2,
)
METHODS = st.sampled_from(["POST"] * 12 + ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
PATHS = st.one_of(
    st.sampled_from([f"/api/{verb}" for verb in VERBS if verb != "decode"]),
    st.sampled_from([f"/api/{verb}" for verb in VERBS if verb != "decode"]),
    st.text(st.characters(codec="ascii", min_codepoint=33, max_codepoint=126), max_size=30).map(
        lambda text: "/" + text.lstrip("/").replace("?", "").replace("#", "")
    ),
)
_watching, _written = False, list[str]()  # paths opened for writing while a request is answered


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event == "open":
        path, _, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            _written.append(str(path))
    elif _watching and event in ("os.mkdir", "os.rename", "os.link", "os.symlink"):
        _written.append(str(arguments[0]))


def answered(client: Client, method: str, path: str, **options: Any) -> Any:
    """The answer to a request, while the hook looks."""
    global _watching
    _watching = True
    try:
        return client.send(method, path, **options)
    finally:
        _watching = False


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    model = load("glyphs").requires_grad_(False).eval()
    service = Service(Library("glyphs", model=model), Sessions())
    client = Client(service).start()
    client.ask("examples", set="glyphs")  # the set, and matplotlib's own folder, are made once
    yield client
    service.close()


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is opened for writing, anywhere but in the folder of drafts."""
    drafts = tmp_path / "drafts"
    drafts.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(drafts))
    if not getattr(sys, "_kanerva_watched", False):
        sys.addaudithook(_watch)  # hooks stay: one is enough
        setattr(sys, "_kanerva_watched", True)  # noqa: B010
    _written.clear()
    yield _written
    assert [path for path in _written if not path.startswith(str(drafts))] == []
    assert sorted(tmp_path.iterdir()) == [drafts] and list(drafts.iterdir()) == []


def send(client: Client, method: str, path: str, body: Any, headers: dict[str, str]) -> None:
    if path == "/api/end":
        headers = {"x-session": "someone"} | headers  # ours goes on
    options = {"content": body} if isinstance(body, bytes) else {"json": replace(body)}
    answer = answered(client, method, path, headers=headers, **options)
    assert answer.status_code < 500, (method, path, body, answer.text)
    assert "Traceback" not in answer.text and 'File "' not in answer.text
    if len(client.app.app.state.sessions) > 40:
        mine = client.app.app.state.sessions.get(client.session)
        client.app.app.state.sessions._all = {client.session: mine}


def replace(value: Any) -> Any:
    """Without numbers that JSON has no words for."""
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return None
    if isinstance(value, dict):
        return {key: replace(inner) for key, inner in value.items()}
    return [replace(inner) for inner in value] if isinstance(value, list) else value


CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(
    max_examples=250, deadline=None, database=None, derandomize=True, suppress_health_check=CHECKS
)
@given(method=METHODS, path=PATHS, body=BODIES, headers=HEADERS)
def test_some_hundred_requests_are_all_answered(
    client: Client, written: list[str], method: str, path: str, body: Any, headers: dict[str, str]
):
    send(client, method, path, body, headers)


@pytest.mark.trust
@settings(max_examples=10_000, deadline=None, database=None, suppress_health_check=CHECKS)
@given(method=METHODS, path=PATHS, body=BODIES, headers=HEADERS)
def test_ten_thousand_requests_are_all_answered(
    client: Client, written: list[str], method: str, path: str, body: Any, headers: dict[str, str]
):
    send(client, method, path, body, headers)


def test_damaged_memory_files_are_refused(client: Client, written: list[str]):
    """Bytes changed here and there: refused, or a memory that is shown."""
    client.ask("clear")
    client.ask("write", images=[PICTURE, PICTURE])
    sound = client.send("POST", "/api/save", json={}).content
    chance = torch.Generator().manual_seed(0)
    for _ in range(40):
        broken = bytearray(sound)
        for at in torch.randint(0, min(600, len(sound)), (3,), generator=chance).tolist():
            broken[at] ^= 1 << int(torch.randint(0, 8, (1,), generator=chance))
        answer = answered(client, "POST", "/api/open", content=bytes(broken))
        assert answer.status_code in (200, 400)
        assert answer.status_code == 400 or len(answer.json()["held"]) == 2
    assert len(written) >= 40  # the hook does see drafts
