"""The page's server: who may ask, what it answers, and that nobody sees another's memory."""

import asyncio
import base64
import io
import re
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Pillow

pytest.importorskip("fastapi", reason="the page needs the extra `explore`")
pytest.importorskip("httpx", reason="in-process requests need httpx")

import httpx

import kanerva
from explore_client import HOST, PORT, TOKEN, VERBS, Client, guarded
from kanerva import data
from kanerva.cli import main
from kanerva.config import (
    BitsMemoryConfig,
    CodeConfig,
    KppBitsConfig,
    KppDecoderConfig,
    KppEncoderConfig,
    KppPaperConfig,
    KppReadoutConfig,
)
from kanerva.data.splits import load_split
from kanerva.explore import session as sessions
from kanerva.explore import upload
from kanerva.explore.app import PAGE, Service
from kanerva.explore.guard import HEADERS, MOST_JSON
from kanerva.explore.library import Library
from kanerva.explore.pixels import Damage, from_text, moved, to_text
from kanerva.explore.session import Sessions
from kanerva.models.base import MemoryModel
from kanerva.models.loading import load
from kanerva.runs import write_run_config
from test_contract import NAMES, config_of

Draw = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def glyphs() -> MemoryModel:
    return load("glyphs-1").requires_grad_(False).eval()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    """Twelve binary characters."""
    chosen = torch.randperm(3000, generator=torch.Generator().manual_seed(3))[:12]
    pixels = data.load("glyphs", "test").images[chosen]
    return data.to_float(data.binarize(pixels, "threshold"), binarized=True)


@pytest.fixture(scope="module")
def shared(glyphs: MemoryModel) -> Iterator[Service]:
    service = Service(Library("glyphs-1", model=glyphs), Sessions())
    yield service
    service.close()


@pytest.fixture
def service(shared: Service) -> Service:
    """Without sessions of other tests."""
    shared.sessions._all.clear()
    return shared


@pytest.fixture
def client(service: Service) -> Client:
    return Client(service).start()


@pytest.fixture
def full(client: Client, images: torch.Tensor) -> Client:
    """A client whose memory holds the twelve."""
    client.ask("write", images=[to_text(image) for image in images])
    return client


def half_hidden() -> str:
    hidden = torch.zeros(28, 28)
    hidden[14:] = 1
    return to_text(hidden)


# Who may ask


@pytest.mark.parametrize("path", ["/", "/app.js", "/style.css", "/nothing", "/api/about"])
def test_every_answer_has_the_headers_that_keep_others_out(client: Client, path: str):
    for headers in ({}, {"host": "evil.example"}):
        answer = client.send("GET", path, headers=headers)
        for name, value in HEADERS.items():
            assert answer.headers.get_list(name) == [value]
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy and "http" not in policy and "default-src 'none'" in policy


def test_the_page_is_whole_small_and_has_nothing_inline(client: Client):
    total = 0
    for name in PAGE:
        answer = client.send("GET", f"/{name}", headers={"authorization": None})
        assert answer.status_code == 200
        total += len(answer.content)
    assert total <= 300_000
    page = client.send("GET", "/").text
    assert not re.search(r"<script(?![^>]*src)|<style|\sstyle=|\son\w+=|https?://", page)
    for name in set(re.findall(r'(?:src|href)="([^"#]+)"', page)):
        assert name in PAGE
    code = {name: client.send("GET", f"/{name}").text for name in PAGE if name.endswith(".js")}
    for text in code.values():
        assert set(re.findall(r'from "\./([^"]+)"', text)) <= PAGE.keys()
        assert not re.search(r"https?://|innerHTML|eval\(", text)
    named = set(re.findall(r'\$\("([^"]+)"\)', "".join(code.values())))
    assert named <= set(re.findall(r'\bid="([^"]+)"', page))


@pytest.mark.parametrize(
    "host",
    ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:80", f"127.0.0.1.evil:{PORT}",
     f"localhost:{PORT}:{PORT}", f"10.0.0.7:{PORT}", "", f"[::2]:{PORT}"],
)  # fmt: skip
def test_another_host_is_refused(client: Client, host: str):
    for path in ("/", "/api/about"):
        assert client.send("GET", path, headers={"host": host}).status_code == 421


def test_names_of_this_machine_are_taken(client: Client, service: Service):
    for host in (f"localhost:{PORT}", f"127.0.0.1:{PORT}", f"[::1]:{PORT}", f"LOCALHOST:{PORT}"):
        assert client.send("GET", "/api/about", headers={"host": host}).status_code == 200
    client.app = guarded(service, "*", "box")
    for host, status in (("10.0.0.7", 200), ("box", 200), ("rebound.example", 421)):
        found = client.send("GET", "/api/about", headers={"host": f"{host}:{PORT}"})
        assert found.status_code == status


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", f"https://{HOST}", "http://127.0.0.1"]
)
def test_another_origin_is_refused(client: Client, origin: str):
    for verb in VERBS:
        answer = client.send("POST", f"/api/{verb}", json={}, headers={"origin": origin})
        assert answer.status_code == 403
    mine = client.send("GET", "/api/about", headers={"origin": f"http://{HOST}"})
    assert mine.status_code == 200


def test_requests_that_other_sites_caused_are_refused(client: Client):
    for value, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        answer = client.send("GET", "/api/about", headers={"sec-fetch-site": value})
        assert answer.status_code == status


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"]
)
def test_without_the_token_nothing_is_answered(client: Client, given: str | None):
    for path in ("/api/about", "/docs", "/openapi.json", "/redoc", "/../pyproject.toml", "/x"):
        assert client.send("GET", path, headers={"authorization": given}).status_code == 401
    for verb in VERBS:
        answer = client.send("POST", f"/api/{verb}", json={}, headers={"authorization": given})
        assert answer.status_code == 401


def test_there_is_no_documentation_of_the_interface(client: Client):
    for path in ("/docs", "/redoc", "/openapi.json", "/static/app.js", "/app.py", "/%2e%2e/app.py"):
        assert client.send("GET", path).status_code == 404


def test_bodies_have_limits(client: Client):
    big = b" " * (MOST_JSON + 1)
    assert client.send("POST", "/api/write", content=big).status_code == 413

    async def endless() -> Any:
        for _ in range(10_000):
            yield b" " * 65536

    assert client.send("POST", "/api/write", content=endless()).status_code == 413
    lying = {"content-length": "99999999999999999999999999"}
    assert client.send("POST", "/api/write", content=b"{}", headers=lying).status_code == 413


def test_slow_bodies_are_given_up(client: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kanerva.explore.guard.SECONDS", 0.05)

    async def slow() -> Any:
        yield b"{"
        await asyncio.sleep(0.5)
        yield b"}"

    assert client.send("POST", "/api/write", content=slow()).status_code == 408


# A memory's life


def test_what_is_written_has_a_cell_a_handle_bits_and_a_picture(
    client: Client, images: torch.Tensor
):
    state = client.ask("write", images=[to_text(image) for image in images[:3]])
    assert state["new"] == [0, 1, 2] == [one["handle"] for one in state["held"]]
    assert len({one["cell"] for one in state["held"]}) == 3 and len(state["changed"]) == 3
    assert set(map(int, state["blocks"])) == {one["cell"] for one in state["held"]}
    assert state["bits"] == sum(one["bits"] for one in state["held"]) > 0
    for one, image in zip(state["held"], images, strict=False):
        error = (from_text(one["image"], (1, 28, 28)) / 255 - image).abs().mean()
        assert error < 0.03


def test_half_of_an_image_is_found_and_a_stranger_is_not(full: Client, images: torch.Tensor):
    for handle in (1, 6):
        cue = {"image": to_text(images[handle]), "hidden": half_hidden()}
        for mask_given in (True, False):
            found = full.ask("find", **cue, mask_given=mask_given)
            assert found["hits"][0]["handle"] == handle and found["hits"][0]["p"] > 0.9
            total = found["none"] + sum(hit["p"] for hit in found["hits"])
            assert total == pytest.approx(1, abs=1e-3) and len(found["hits"]) == 12
    seen = from_text(found["cue"], (1, 28, 28))
    assert bool((seen[:, 14:] == 0).all())
    stranger = torch.zeros(1, 28, 28)
    stranger[:, 3:25:4, 2:26] = 1
    assert full.ask("find", image=to_text(stranger))["none"] > 0.9


def test_a_moved_and_noisy_image_is_found(full: Client, images: torch.Tensor):
    cue = {
        "image": to_text(images[4]),
        "noise": "salt_pepper",
        "amount": 0.1,
        "down": 2,
        "right": -1,
    }
    best = full.ask("find", **cue)["hits"][0]
    assert best["handle"] == 4 and best["shift"] == [2, -1]
    grain = full.ask("find", image=to_text(images[4]), noise="gaussian", amount=0.4)
    assert grain["hits"][0]["handle"] == 4


def test_details_tell_what_was_written_from_what_was_not(full: Client, images: torch.Tensor):
    known = full.ask("details", image=to_text(images[2]))
    stranger = full.ask("details", image=to_text(images[2].flip(-1).roll(3, -2)))
    assert known["familiarity"] > 0 > stranger["familiarity"]
    assert known["nearest"] == {"handle": 2, "distance": 0}
    bound = known["bound"]
    assert bound["total"] < stranger["bound"]["total"]
    parts = bound["log_likelihood"] + bound["readout_kl"] + bound["key_kl"]
    assert bound["total"] == pytest.approx(parts, abs=1e-3)


def test_freeing_changes_one_cell_and_undo_brings_it_back(full: Client):
    before = full.ask("resume")["state"]
    cells = {one["handle"]: one["cell"] for one in before["held"]}
    after = full.ask("free", handles=[5])
    assert after["changed"] == [cells[5]] and len(after["held"]) == 11
    rest = [one for one in before["held"] if one["handle"] != 5]
    assert after["held"] == rest
    assert after["blocks"] == {c: b for c, b in before["blocks"].items() if int(c) != cells[5]}
    undone = full.ask("undo")
    assert undone["held"] == before["held"] and undone["changed"] == [cells[5]]
    assert full.ask("redo")["held"] == rest
    assert "not held" in full.ask("free", 400, handles=[5])["error"]
    assert "redo" in full.ask("redo", 400)["error"]


def test_clear_empties_and_a_full_memory_says_so(full: Client, images: torch.Tensor):
    texts = [to_text(image) for image in images]
    full.ask("write", images=texts)
    full.ask("write", images=texts)
    assert "36" in full.ask("write", 400, images=texts[:1])["error"]
    assert full.ask("clear")["held"] == []
    assert full.ask("find", image=texts[0]) == {"cue": texts[0], "none": 1.0, "hits": []}
    assert full.ask("details", image=texts[0])["familiarity"] is None


def test_a_saved_memory_opens_as_it_was(full: Client, service: Service, tmp_path: Path):
    full.ask("free", handles=[3])
    saved = full.send("POST", "/api/save", json={})
    assert 'filename="memory.kanerva"' in saved.headers["content-disposition"]
    path = tmp_path / "memory.kanerva"
    path.write_bytes(saved.content)
    (held,) = (s.memory for s in service.sessions._all.values())
    assert torch.equal(kanerva.Memory.load(path).map, held.map)
    other = Client(service).start()
    opened = other.send("POST", "/api/open", content=saved.content).json()
    assert opened["held"] == full.ask("resume")["state"]["held"]
    for bad in (b"", b"nonsense", saved.content[:-9], b"\0" * 10_000_000):
        refused = other.send("POST", "/api/open", content=bad)
        assert refused.status_code == 400 and "/tmp" not in refused.text
    assert other.ask("resume")["state"]["held"] == opened["held"]


def test_reading_step_by_step_and_dreams(full: Client, images: torch.Tensor):
    cue = {"image": to_text(images[7]), "hidden": half_hidden()}
    read = full.ask("steps", **cue, count=3)
    last = from_text(read["steps"][-1], (1, 28, 28)) / 255
    assert len(read["steps"]) == 3 and (last - images[7]).abs().mean() < 0.03
    cell = full.ask("resume")["state"]["held"][7]["cell"]
    x, y = 2 * (cell % 6 + 0.5) / 6 - 1, 2 * (cell // 6 + 0.5) / 6 - 1
    there = full.ask("dream", x=x, y=y, spread=0.0, count=4)["images"]
    assert (
        len(there) == 4 and (from_text(there[0], (1, 28, 28)) / 255 - images[7]).abs().mean() < 0.1
    )
    assert len(full.ask("dream", count=6)["images"]) == 6


def test_a_model_of_bits_dreams_of_the_image_at_that_place(images: torch.Tensor):
    """The stored image itself, then new ones like it."""
    service = Service(Library("glyphs", model=load("glyphs")), Sessions())
    client = Client(service).start()
    client.ask("write", images=[to_text(image) for image in images[:6]])
    cell = client.ask("resume")["state"]["held"][2]["cell"]
    place = {"x": 2 * (cell % 6 + 0.5) / 6 - 1, "y": 2 * (cell // 6 + 0.5) / 6 - 1}
    seen = client.ask("dream", **place, spread=0.1, count=4)["images"]
    assert len(seen) == 4 and seen[0] == to_text(images[2]) and seen[1] != seen[2]
    assert client.ask("dream", **place, spread=0.1, count=1)["images"] == seen[:1]
    service.close()


def test_the_python_it_shows_makes_the_same_memory_and_answer(
    full: Client, service: Service, images: torch.Tensor, capsys: pytest.CaptureFixture[str]
):
    full.ask("free", handles=[2, 5])
    full.ask("write", images=[to_text(images[5])])
    cue = {"image": to_text(images[8]), "hidden": half_hidden(), "noise": "gaussian", "amount": 0.2,
           "down": 1}  # fmt: skip
    names: dict[str, Any] = {}
    text = full.ask("python", cue=cue)["text"]
    assert "\n\n\n\n" not in text
    exec(compile(text, "page", "exec"), names)
    (held,) = (s.memory for s in service.sessions._all.values())
    assert torch.equal(names["memory"].map, held.map)
    assert torch.equal(names["memory"].owners, held.owners)
    found = full.ask("find", **cue)
    assert names["hits"][0].id == found["hits"][0]["handle"] == 8
    assert names["hits"].none == pytest.approx(found["none"], abs=1e-5)
    assert "none of these" in capsys.readouterr().out
    for given in (True, False):
        cue = {"image": to_text(images[8]), "mask_given": given}
        text, found = full.ask("python", cue=cue)["text"], full.ask("find", **cue)
        assert "cue = image" in text and ("observed" in text) is given
        exec(compile(text, "page", "exec"), names)
        assert names["hits"].none == pytest.approx(found["none"], abs=1e-6)


def test_the_python_of_an_opened_memory_begins_with_its_file(
    full: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: torch.Tensor
):
    saved = full.send("POST", "/api/save", json={}).content
    full.send("POST", "/api/open", content=saved)
    full.ask("free", handles=[0])
    (tmp_path / "memory.kanerva").write_bytes(saved)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(full.ask("python")["text"], "page", "exec"), names)
    assert names["memory"].handles == list(range(1, 12))


def test_a_long_history_is_bounded(
    client: Client, service: Service, images: torch.Tensor, monkeypatch
):
    monkeypatch.setattr(sessions, "MOST_CALLS", 6)
    for handle in range(8):
        client.ask("write", images=[to_text(images[0])])
        state = client.ask("free", handles=[handle])
    (session,) = service.sessions._all.values()
    assert len(session.state.calls) <= 6 and session.state.calls[0].verb == "open"
    assert state["undo"] <= sessions.MOST_UNDO


# Other models


def test_models_offer_what_they_can(client: Client):
    assert client.about["can"] == {
        "find": True, "free": True, "shrink": False, "recall": True, "place": True,
    }  # fmt: skip
    assert client.about["sets"][0] == "glyphs" and client.about["binary"]
    assert client.about["replays"]  # and the page says so
    assert "floats" in client.ask("shrink", 400, bits=5)["error"]
    assert client.ask("start", 400, model="../../etc")["error"] == "no model of that name"
    examples = client.ask("examples", set="glyphs", count=5)["images"]
    assert len(examples) == 5 and set(base64.b64decode(examples[0])) <= {0, 255}
    client.ask("examples", 400, set="../data", count=5)


def test_few_models_are_kept_and_the_first_always(
    glyphs: MemoryModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kanerva.explore.library._LOADED", 2)
    library = Library("glyphs-1", model=glyphs)
    mnist = library.model("mnist")
    assert library.model("mnist") is mnist
    library.model("omniglot")
    assert library.model("glyphs-1") is glyphs and library.model("mnist") is not mnist


def test_a_run_on_images_of_ones_own_offers_them(tmp_path: Path):
    folder, run = tmp_path / "photos", tmp_path / "run"
    folder.mkdir()
    for n in range(8):
        Pillow.new("RGB", (20, 20), (30 * n, 90, 255 - 30 * n)).save(folder / f"{n}.png")
    config = kanerva.preset("images", image=(3, 8, 8))
    config = replace(config, data=replace(config.data, folder=str(folder)))
    kanerva.build(config.model).save_pretrained(run / "checkpoints" / "best")
    write_run_config(run, config)
    library = Library(str(run))
    assert library.describe(str(run))["sets"] == ["images"]
    found = library.examples(str(run), "images", 5, 0)
    expected = load_split(config, "test", None).images
    assert 1 <= len(found) == min(5, len(expected))
    assert {base64.b64decode(text) for text in found} <= {i.numpy().tobytes() for i in expected}
    folder.rename(tmp_path / "gone")
    assert library.describe(str(run))["sets"] == []


def test_a_model_of_bits_forgets_by_degrees(
    draw: Draw,
):
    config = KppBitsConfig(
        image=(1, 10, 7),
        encoder=KppEncoderConfig(width=8, depth=1),
        memory=BitsMemoryConfig(channels=2, size=12, capacity=9),
        readout=KppReadoutConfig(size=4, channels=2, prior_width=8),
        decoder=KppDecoderConfig(base=8, depth=1),
        code=CodeConfig(groups=4, radius=2, width=12, depth=1, maps=8),
    )
    model = kanerva.build(config).requires_grad_(False).eval()
    client = Client(Service(Library("tiny", model=model), Sessions())).start()
    assert client.about["can"]["shrink"]
    pictures = draw(model.config, 3)
    state = client.ask("write", images=[to_text(p) for p in pictures])
    assert [one["image"] for one in state["held"]] == [to_text(p) for p in pictures]  # exactly
    most = state["bits"]
    less = client.ask("shrink", bits=30)
    assert less["bits"] < most and less["undo"] == 2
    least = client.ask("shrink", bits=5, again=True)  # a slider moves on
    assert least["bits"] < less["bits"] and least["undo"] == 2
    assert client.ask("shrink", bits=30, again=True)["bits"] == less["bits"]
    names: dict[str, Any] = {"given": model}
    text = client.ask("python")["text"].replace("kanerva.load('tiny')", "given")
    exec(compile(text, "page", "exec"), names)
    assert round(float(names["memory"].bits.sum())) == less["bits"]
    assert client.ask("undo")["bits"] == most
    saved = client.send("POST", "/api/save", json={}).content
    client.ask("clear")
    assert client.send("POST", "/api/open", content=saved).json()["bits"] == most


def test_a_model_that_writes_as_a_whole_has_no_blocks_to_free(
    tiny_colour: KppPaperConfig, wake: Callable[..., MemoryModel], draw: Draw
):
    model = wake(tiny_colour).requires_grad_(False)
    client = Client(Service(Library("tiny", model=model), Sessions())).start()
    assert client.about["can"]["free"] is client.about["can"]["find"] is False
    pictures = [to_text(p) for p in draw(model.config, 3)]
    client.ask("write", images=pictures[:2])
    state = client.ask("write", images=pictures[2:])
    assert [one["image"] for one in state["held"]] == pictures and state["capacity"] is None
    assert len(client.ask("steps", image=pictures[0], count=2)["steps"]) == 2
    assert client.ask("details", image=pictures[0])["nearest"]["handle"] == 0
    assert len(client.ask("dream", count=2)["images"]) == 2
    bodies = {"free": {"handles": [0]}, "find": {"image": pictures[0]}, "dream": {"x": 0, "y": 0}}
    for verb, body in bodies.items():
        client.ask(verb, 400, **body)
    names = {"given": model}
    text = client.ask("python", cue={"image": pictures[1]})["text"]
    exec(compile(text.replace("kanerva.load('tiny')", "given"), "page", "exec"), names)
    assert names["steps"].shape[1:] == (1, *model.config.image)
    saved = client.send("POST", "/api/save", json={}).content
    assert client.send("POST", "/api/open", content=saved).status_code == 200


def test_a_store_is_searched_and_looked_through(
    glyphs: MemoryModel, images: torch.Tensor, tmp_path: Path
):
    from kanerva.explore.server import open_service

    path = tmp_path / "some.kanerva"
    with kanerva.Store(path, model="glyphs-1") as store:
        store.add(torch.cat([images, images.flip(-1)]), [f"glyph {n}" for n in range(24)])
    service = open_service(str(path))
    client = Client(service).start()
    assert service.shelf is not None
    assert client.send("GET", "/api/about").json()["store"]["images"] == 24
    found = client.ask("search", image=to_text(images[5]), hidden=half_hidden())
    assert found["hits"][0]["text"] == "glyph 5" and found["hits"][0]["p"] > 0.8
    assert len(found["hits"]) == 12
    names: dict[str, Any] = {}
    cue = {"image": to_text(images[5]), "hidden": half_hidden()}
    exec(compile(client.ask("python", cue=cue, store=True)["text"], "page", "exec"), names)
    assert names["hits"].ids[0] == found["hits"][0]["id"]
    assert names["hits"].none == pytest.approx(found["none"], abs=1e-5)
    names["store"].close()
    pages = [client.ask("browse", page=page)["hits"] for page in range(3)]
    assert [hit["id"] for page in pages for hit in page] == list(range(1, 25))
    other = Client(service).start(model="mnist")
    assert "another model" in other.ask("search", 400, image=to_text(images[5]))["error"]
    service.close()


def test_without_a_store_there_is_none_to_search(client: Client, images: torch.Tensor):
    assert "no store" in client.ask("search", 400, image=to_text(images[0]))["error"]
    assert "no store" in client.ask("python", 400, store=True)["error"]


# Many clients


def test_clients_see_their_own_memory_only(service: Service, images: torch.Tensor):
    one, two = Client(service).start(), Client(service).start()
    one.ask("write", images=[to_text(images[0])])
    two.ask("write", images=[to_text(images[1]), to_text(images[2])])
    assert len(one.ask("resume")["state"]["held"]) == 1
    assert len(two.ask("resume")["state"]["held"]) == 2
    assert one.ask("find", image=to_text(images[1]))["none"] > 0.5
    two.ask("end")
    assert "ended" in two.ask("find", 410, image=to_text(images[1]))["error"]
    for session in ("", "x", one.session[:-1]):
        one.session = session
        one.ask("resume", 410)


def test_there_are_at_most_so_many_sessions(glyphs: MemoryModel, monkeypatch: pytest.MonkeyPatch):
    service = Service(Library("glyphs-1", model=glyphs), Sessions(most=3))
    clients = [Client(service).start() for _ in range(3)]
    assert "3 pages are open" in clients[0].ask("start", 400)["error"]
    monkeypatch.setattr(sessions, "IDLE", 0.0)
    clients[0].ask("resume")
    Client(service).start()  # in the place of the one that was idle longest
    assert len(service.sessions) == 3
    clients[0].ask("resume")
    clients[1].ask("resume", 410)
    monkeypatch.setattr(sessions, "IDLE", 900.0)
    clients[0].ask("leave")  # its page was closed
    clients[0].ask("resume")  # no: loaded again
    assert "3 pages" in clients[0].ask("start", 400)["error"]
    clients[0].ask("leave")
    Client(service).start()
    clients[0].ask("resume", 410)
    assert sessions.MOST_SESSIONS == 64


# Files of others


def png(width: int, height: int, rows: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def test_an_image_file_becomes_ink(client: Client):
    drawn = Pillow.new("RGB", (200, 100), "white")
    drawn.paste("black", (80, 20, 120, 80))
    file = io.BytesIO()
    drawn.save(file, "JPEG")
    answer = client.send("POST", "/api/decode", content=file.getvalue())
    levels = from_text(answer.json()["image"], (1, 28, 28))
    assert levels[0, 14, 14] == 255 and levels[0, 1, 1] == 0
    assert set(levels.unique().tolist()) == {0, 255}


def test_image_bombs_are_refused_in_time(client: Client):
    bombs = {
        "claims": png(60_000, 60_000, b""),
        "unpacks": png(30_000, 30_000, b"\0" * 40_000_000),
        "broken": png(28, 28, b"\1" * 10),
        "text": b"GIF89a" + b"x" * 1000,
        "empty": b"",
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='/etc/passwd'/></svg>",
    }
    for name, content in bombs.items():
        begin = time.monotonic()
        answer = client.send("POST", "/api/decode", content=content)
        assert answer.status_code == 400, name
        assert time.monotonic() - begin < upload.SECONDS + 5
    too_big = client.send("POST", "/api/decode", content=b"\0" * (upload.MOST_BYTES + 1))
    assert too_big.status_code == 413


def test_a_file_that_takes_long_is_given_up(client: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(upload, "SECONDS", 0.01)
    answer = client.send("POST", "/api/decode", content=png(28, 28, b"\0" * 29 * 28))
    assert "took more than" in answer.json()["error"]


# Cues


def test_damage_moves_hides_and_is_the_same_again():
    image = torch.zeros(1, 5, 6)
    image[0, 1, 2] = 1
    for down, right in ((2, 1), (-1, -2), (0, 3), (0, 0)):
        assert moved(image, down, right)[0, 1 + down, 2 + right] == 1
        assert moved(image, down, right).sum() == 1
    assert moved(image, 5, 0).sum() == moved(image, 0, -6).sum() == 0
    hidden = torch.zeros(5, 6, dtype=torch.bool)
    hidden[0] = True
    damage = Damage(hidden, "salt_pepper", 0.5, seed=4)
    assert torch.equal(damage.apply(image), damage.apply(image))
    assert bool((damage.apply(image)[:, 0] == 0).all()) and damage.apply(image).sum() > 1


# The command


def test_mistakes_on_the_command_line_get_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = {
            ("--port", port): "is in use",
            ("--port", "70000"): "65535",
            ("no-such-model", "--port", "0"): "shipped models",
            (str(tmp_path / "no.kanerva"), "--port", "0"): "no run folder",
            ("--host", "256.1.1.1", "--port", "0"): "cannot listen",
            ("--host", "", "--port", "0"): "the host is empty",
        }
        for words, reason in cases.items():
            assert main(["explore", "--no-open", *words]) == 2
            out, err = capsys.readouterr()
            assert reason in err and len(err.strip().splitlines()) == 1 and not out


def test_it_prints_one_address_answers_and_ends_by_ctrl_c(tmp_path: Path):
    words = [sys.executable, "-m", "kanerva", "explore", "glyphs", "--no-open", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*words, "--host", "0.0.0.0"], cwd=tmp_path, **pipes) as server:
        assert server.stdout is not None and server.stderr is not None
        found = re.fullmatch(r"http://[^/]+:(\d+)/#([\w-]{32})\n", server.stdout.readline())
        assert found is not None
        url = f"http://127.0.0.1:{found[1]}"
        assert httpx.get(url, timeout=30).status_code == 200
        assert httpx.get(f"{url}/api/about", timeout=30).status_code == 401
        headers = {"authorization": f"Bearer {found[2]}"}
        assert httpx.get(f"{url}/api/about", headers=headers, timeout=30).status_code == 200
        foreign = headers | {"host": f"rebound.example:{found[1]}"}
        assert httpx.get(f"{url}/api/about", headers=foreign, timeout=30).status_code == 421
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=30)
    assert server.returncode == 130 and out == "" and list(tmp_path.iterdir()) == []
    assert "Traceback" not in err and "open to others" in err.splitlines()[0]


@pytest.mark.parametrize("name", [*NAMES, "kpp outline", "dnc colour"])
def test_whatever_model_there_is_answers_or_says_why_not(name: str, draw: Draw):
    """Every request that a page makes, at the smallest sizes of each model."""
    model = kanerva.build(config_of(name)).requires_grad_(False).eval()
    client = Client(Service(Library("tiny", model=model), Sessions()))
    if not model.remembers:
        assert "no memory" in client.ask("start", 400)["error"]
        return
    client.start()
    pictures = [to_text(picture) for picture in draw(model.config, 3)]
    bodies = {
        "write": {"images": pictures},
        "find": {"image": pictures[0]},
        "details": {"image": pictures[0]},
        "steps": {"image": pictures[0], "count": 2},
        "dream": {"count": 2},
        "python": {"cue": {"image": pictures[0]}},
        "save": {},
        "free": {"handles": [0]},
        "undo": {},
    }
    for verb, body in bodies.items():
        answer = client.send("POST", f"/api/{verb}", json=body)
        refusable = set() if model.has_blocks else {"find", "free"}
        refusable |= set() if model.recalls else {"steps"}
        assert answer.status_code == 200 or verb in refusable, (verb, answer.text)
        assert answer.status_code in (200, 400)
