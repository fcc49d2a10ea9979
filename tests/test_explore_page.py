"""The page in a real browser: Debian's chromium, driven by playwright."""

import json
import shutil
import subprocess
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("uvicorn", reason="the page needs the extra `explore`")
pytest.importorskip("playwright", reason="a browser is driven by playwright")

import uvicorn
from PIL import Image as Pillow
from playwright.sync_api import expect

import kanerva
from kanerva import data
from kanerva.config import (
    BitsMemoryConfig,
    CodeConfig,
    KppBitsConfig,
    KppDecoderConfig,
    KppEncoderConfig,
    KppReadoutConfig,
)
from kanerva.explore.app import PAGE, make_app
from kanerva.explore.guard import Guard
from kanerva.explore.server import listen, open_service

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
AXE = "axe-core@4"
expect.set_options(timeout=20_000)  # a busy machine is no fault of the page


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args: dict[str, Any]) -> dict[str, Any]:
    return browser_type_launch_args | {"executable_path": CHROMIUM, "args": ["--no-sandbox"]}


def serve(target: str) -> Iterator[str]:
    """The address of a page, served by a thread of this process."""
    with listen("127.0.0.1", 0) as bound:
        service, port = open_service(target), bound.getsockname()[1]
        app = Guard(make_app(service), "token", port, [f"/{name}" for name in PAGE])
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{port}/#token"
        server.should_exit = True
        thread.join(10)
        service.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    yield from serve("glyphs")


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    pixels = data.load("glyphs", "test").images[5:3000:130]
    return data.to_float(data.binarize(pixels, "threshold"), binarized=True)


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Open the page; in the end there were no errors, and nothing came from elsewhere."""
    contexts, problems = [], []
    home = address.partition("#")[0]

    def go(url: str = address, **options: Any) -> Any:
        size = {"width": 1280, "height": 900}
        context = browser.new_context(**{"viewport": size} | options)
        contexts.append(context)
        page = context.new_page()
        base = url.partition("#")[0]
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console",
            lambda m: m.type == "error" and "400" not in m.text and problems.append(m.text),
        )
        page.on(
            "request",
            lambda r: None if r.url.startswith((base, home, "blob:")) else problems.append(r.url),
        )
        page.goto(url)
        page.wait_for_selector("html[data-ready]", timeout=60_000)
        return page

    yield go
    for context in contexts:
        context.close()
    assert problems == []


def drag(page: Any, selector: str, points: list[tuple[float, float]]) -> None:
    """A stroke over an element, at shares of its width and height."""
    box = page.locator(selector).bounding_box()
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=6)
    page.mouse.up()


SEVEN = [(0.25, 0.22), (0.75, 0.22), (0.45, 0.82)]
CROSS = [(0.2, 0.8), (0.8, 0.2)]


def write_examples(page: Any) -> None:
    page.click("#write-all")
    expect(page.locator("#held button")).to_have_count(12)


def verdict(page: Any, text: str) -> None:
    expect(page.locator("#verdict")).to_contain_text(text)


def test_a_first_visit_in_four_steps(visit: Callable[..., Any]):
    page = visit()
    expect(page.locator("#tour li")).to_have_count(4)
    expect(page.locator("#tour li.done")).to_have_count(0)
    verdict(page, "Nothing is written yet")
    page.click("#tour-write")
    expect(page.locator("#held button")).to_have_count(12)
    page.click("#tour-damage")
    verdict(page, "It is image")
    drag(page, "#map", [(0.3, 0.3), (0.6, 0.6)])
    expect(page.locator("#tour li.done")).to_have_count(4)
    page.click("#tour-close")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    expect(page.locator("#tour")).to_be_hidden()
    expect(page.locator("#held button")).to_have_count(12)  # the session goes on


def test_draw_write_erase_recall_free_undo(visit: Callable[..., Any]):
    page = visit()
    drag(page, "#canvas", SEVEN)
    page.click("#write")
    expect(page.locator("#held button")).to_have_count(1)
    verdict(page, "It is image 0")
    page.click("#blank")
    drag(page, "#canvas", CROSS)
    verdict(page, "It is not here")
    page.click("#write")
    verdict(page, "It is image 1")
    page.click("#held button[data-handle='0']")
    verdict(page, "It is image 0")
    page.click(".segments >> text=Hide")  # brush the lower part away
    for height in (0.65, 0.75, 0.85):
        drag(page, "#canvas", [(0.1, height), (0.9, height)])
    verdict(page, "It is image 0")
    expect(page.locator("#bars li")).to_have_count(3)
    expect(page.locator("#bars .none")).to_contain_text("not here")
    expect(page.locator("#details")).to_contain_text("familiarity")
    page.click("#held button[data-handle='0']")
    page.click("#free")
    expect(page.locator("#held button")).to_have_count(1)
    expect(page.locator("#changed")).to_contain_text("1 cell changed; the other 35 are the same")
    verdict(page, "It is not here")
    page.click("#undo")
    expect(page.locator("#held button")).to_have_count(2)
    verdict(page, "It is image 0")
    page.click("#redo")
    expect(page.locator("#held button")).to_have_count(1)


def test_noise_and_moves(visit: Callable[..., Any]):
    page = visit()
    write_examples(page)
    page.click("#held button[data-handle='4']")
    page.locator("#right").fill("2")
    verdict(page, "It is image 4, moved 2 px right")
    page.locator("#noise").fill("10")
    verdict(page, "It is image 4")
    expect(page.locator("#noise-out")).to_have_text("10 %")
    page.click("[data-hide=right]")
    page.uncheck("#mask-given")
    expect(page.locator("#verdict")).to_contain_text("image")


def test_save_and_open(visit: Callable[..., Any], tmp_path: Path):
    page = visit()
    write_examples(page)
    with page.expect_download() as waiting:
        page.click("#save")
    path = tmp_path / waiting.value.suggested_filename
    waiting.value.save_as(path)
    assert (
        path.name == "memory.kanerva"
        and len(kanerva.Memory.load(path, kanerva.load("glyphs"))) == 12
    )
    page.click("#empty")
    expect(page.locator("#held button")).to_have_count(0)
    page.set_input_files("#memory-file", path)
    expect(page.locator("#held button")).to_have_count(12)
    (tmp_path / "bad.kanerva").write_bytes(b"nonsense")
    page.set_input_files("#memory-file", tmp_path / "bad.kanerva")
    expect(page.locator("#toast")).to_contain_text("this file")
    expect(page.locator("#held button")).to_have_count(12)


def test_image_files_are_written(visit: Callable[..., Any], tmp_path: Path):
    page = visit()
    files = []
    for name, box in (("a", (60, 20, 90, 180)), ("b", (20, 80, 180, 120))):
        picture = Pillow.new("L", (200, 200), 255)
        picture.paste(0, box)
        picture.save(tmp_path / f"{name}.png")
        files.append(tmp_path / f"{name}.png")
    page.set_input_files("#image-files", files)
    expect(page.locator("#held button")).to_have_count(2)
    verdict(page, "It is image 1")


def test_keyboard_only(visit: Callable[..., Any]):
    page = visit()

    def tab_to(selector: str) -> None:
        for _ in range(80):
            page.keyboard.press("Tab")
            if page.evaluate("s => document.activeElement.matches(s)", selector):
                return
        raise AssertionError(f"{selector} is not reached by Tab")

    tab_to("#canvas")
    for key in ["ArrowUp"] * 6 + ["Shift+ArrowDown"] * 14 + ["Shift+ArrowRight"] * 6:
        page.keyboard.press(key)
    page.keyboard.press("Space")
    page.keyboard.press("w")
    expect(page.locator("#held button")).to_have_count(1)
    tab_to("#write-all")
    page.keyboard.press("Enter")
    expect(page.locator("#held button")).to_have_count(13)
    tab_to("#held button")
    page.keyboard.press("Enter")
    page.evaluate("document.activeElement.blur()")
    tab_to("[data-hide=lower]")
    page.keyboard.press("Enter")
    verdict(page, "image")
    tab_to("#map")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#dream-at")).to_contain_text("reading at")
    tab_to("#held button")
    page.keyboard.press("Delete")
    expect(page.locator("#held button")).to_have_count(12)
    page.keyboard.press("Control+z")
    expect(page.locator("#held button")).to_have_count(13)
    page.keyboard.press("Control+Shift+z")
    expect(page.locator("#held button")).to_have_count(12)
    page.keyboard.press("?")
    expect(page.locator("#about")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#about")).to_be_hidden()


def test_a_phone(visit: Callable[..., Any]):
    page = visit(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wide) <= 0
    box = page.locator("#canvas").bounding_box()
    for x, y in ((0.3, 0.3), (0.4, 0.4), (0.5, 0.5), (0.6, 0.6)):
        page.touchscreen.tap(box["x"] + x * box["width"], box["y"] + y * box["height"])
    page.tap("#write")
    expect(page.locator("#held button")).to_have_count(1)
    verdict(page, "It is image 0")
    page.evaluate("scrollTo(0, 0)")
    expect(page.locator("#mini")).to_contain_text("It is image 0")  # the answer is out of sight
    page.tap("#mini")
    expect(page.locator("#verdict")).to_be_in_viewport()
    expect(page.locator("#mini")).to_be_hidden()
    page.tap("#write-all")
    expect(page.locator("#held button")).to_have_count(13)
    assert page.evaluate(wide) <= 0
    small = page.evaluate(
        "[...document.querySelectorAll('button, select, summary')].filter(e => e.offsetParent "
        "&& !e.matches('.link, .held *') && Math.min(e.offsetWidth, e.offsetHeight) < 24)"
        ".map(e => e.id)"
    )
    assert small == []


def test_reading_step_by_step_plays(visit: Callable[..., Any]):
    page = visit()
    write_examples(page)
    page.click("#held button[data-handle='2']")
    page.click("[data-hide=lower]")
    page.click("#reading summary")
    expect(page.locator("#steps canvas")).to_have_count(9)
    expect(page.locator("#scrub-out")).to_have_text("step 8")
    page.click("#play")
    expect(page.locator("#play")).to_have_text("Pause")
    expect(page.locator("#play")).to_have_text("Play", timeout=20_000)
    expect(page.locator("#scrub-out")).to_have_text("step 8")
    page.locator("#scrub").fill("0")
    expect(page.locator("#recalled-caption")).to_have_text("the cue")


def test_dreams(visit: Callable[..., Any]):
    page = visit()
    write_examples(page)
    shown = "document.getElementById('dream-here').painted?.join()"

    def read_at(handle: int) -> None:
        cells = "[...document.querySelectorAll('#held > *')].map(e => e.dataset.handle)"
        cell = page.evaluate(cells).index(str(handle))
        x, y = (cell % 6 + 0.5) / 6, (cell // 6 + 0.5) / 6
        drag(page, "#map", [(x, y), (x + 0.02, y)])
        expect(page.locator("#dream-at")).to_contain_text(f": image {handle}")

    read_at(0)
    expect(page.locator("#dream-around canvas")).to_have_count(16)
    page.wait_for_function(f"() => {shown}")
    first = page.evaluate(shown)
    read_at(1)
    page.wait_for_function(f"old => {shown} !== old", arg=first)
    page.locator("#spread").fill("60")
    expect(page.locator("#spread-out")).to_have_text("0.60")
    expect(page.locator("#dream-note")).to_contain_text("This model replays")
    around = "[...document.querySelectorAll('#dream-around canvas')].map(e => e.painted?.join())"
    page.wait_for_function(f"() => {around}.every(Boolean)")

    def without_place(answer: Any) -> bool:
        return answer.url.endswith("api/dream") and "x" not in answer.request.post_data_json

    with page.expect_response(without_place) as waiting:
        page.click("#dream-like")
    like = [",".join(map(str, b64decode(image))) for image in waiting.value.json()["images"]]
    page.wait_for_function(f"like => {around}.join() === like.join()", arg=like)


def test_the_python_is_shown_and_runs(visit: Callable[..., Any]):
    page = visit()
    write_examples(page)
    page.click("#held button[data-handle='3']")
    page.click("[data-hide=lower]")
    verdict(page, "It is image 3")
    page.click("#python")
    expect(page.locator("#code")).to_be_visible()
    names: dict[str, Any] = {}
    exec(compile(page.inner_text("#code-text"), "page", "exec"), names)
    assert names["hits"][0].id == 3 and len(names["memory"]) == 12


def test_other_models_and_sets(visit: Callable[..., Any]):
    served = serve("glyphs-1")
    page = visit(next(served))
    write_examples(page)
    expect(page.locator("#shrink")).to_be_hidden()  # blocks of numbers
    page.select_option("#model", "mnist")
    expect(page.locator("#held button")).to_have_count(0)
    page.click("#write-all")
    expect(page.locator("#held button")).to_have_count(12)
    expect(page.locator("#shrink")).to_be_visible()  # blocks of bits
    expect(page.locator("#shelf")).to_be_hidden()
    page.close()
    next(served, None)


def test_a_store(visit: Callable[..., Any], images: torch.Tensor, tmp_path: Path):
    with kanerva.Store(tmp_path / "some.kanerva", model="glyphs") as store:
        store.add(images, [f"glyph {n}" for n in range(len(images))])
    served = serve(str(tmp_path / "some.kanerva"))
    page = visit(next(served))
    expect(page.locator("#shelf-size")).to_have_text(f"{len(images)} images")
    expect(page.locator("#shelf-hits button")).to_have_count(12)
    page.click("#shelf-hits button >> nth=3")
    verdict(page, "It is no. 4")
    page.click("[data-hide=lower]")
    verdict(page, "It is no. 4")
    expect(page.locator("#shelf-hits button").first).to_contain_text("glyph 3")
    page.click("#shelf-next")
    expect(page.locator("#shelf-page")).to_contain_text("likeliest, page 2")
    page.click("#shelf-browse")
    expect(page.locator("#shelf-page")).to_have_text("page 1")
    page.click("#source >> text=memory")
    verdict(page, "Nothing is written yet")
    page.click("#write")
    verdict(page, "It is image 0")
    page.select_option("#model", "mnist")
    expect(page.locator("#shelf")).to_be_hidden()
    page.close()
    next(served, None)


def test_bits_are_dropped_by_a_slider(visit: Callable[..., Any], tmp_path: Path):
    """A small untrained model, whose images are not square and belong to no set."""
    config = KppBitsConfig(
        image=(1, 12, 9),
        encoder=KppEncoderConfig(width=8, depth=1),
        memory=BitsMemoryConfig(channels=2, size=12, capacity=9),
        readout=KppReadoutConfig(size=4, channels=2, prior_width=8),
        decoder=KppDecoderConfig(base=8, depth=1),
        code=CodeConfig(groups=4, radius=2, width=12, depth=1, maps=8),
    )
    kanerva.build(config).save_pretrained(tmp_path / "bits")
    served = serve(str(tmp_path / "bits"))
    page = visit(next(served))
    expect(page.locator("#write-all")).to_be_disabled()
    drag(page, "#canvas", SEVEN)
    page.click("#write")
    expect(page.locator("#held button")).to_have_count(1)
    size = page.inner_text("#memory-size")
    page.locator("#bits").fill("40")
    expect(page.locator("#bits-out")).to_have_text("15")
    expect(page.locator("#memory-size")).not_to_have_text(size)
    page.locator("#bits").fill("100")
    expect(page.locator("#memory-size")).to_have_text(size)
    page.locator("#bits").fill("40")
    expect(page.locator("#memory-size")).not_to_have_text(size)
    page.click("#undo")
    expect(page.locator("#memory-size")).to_have_text(size)
    expect(page.locator("#bits-out")).to_have_text("all")
    expect(page.locator("#dream-note")).to_be_hidden()
    page.click("#dream-like")
    page.wait_for_function("() => document.querySelector('#dream-around canvas').painted")
    page.close()
    next(served, None)


def test_a_model_in_colour_that_writes_as_a_whole(
    visit: Callable[..., Any], tiny_colour: Any, wake: Callable[..., Any], tmp_path: Path
):
    wake(tiny_colour).save_pretrained(tmp_path / "colour")
    served = serve(str(tmp_path / "colour"))
    page = visit(next(served))
    for stroke in (SEVEN, CROSS):
        drag(page, "#canvas", stroke)
        page.click("#write")
    expect(page.locator("#held button")).to_have_count(2)
    verdict(page, "Recalled")
    expect(page.locator("#free")).to_be_hidden()
    expect(page.locator("#bars li")).to_have_count(0)
    expect(page.locator("#spread")).to_be_hidden()
    page.click("#dream-like")
    page.click("#undo")
    expect(page.locator("#held button")).to_have_count(1)
    page.close()
    next(served, None)


def test_an_address_without_its_token_says_so(browser: Any, address: str):
    page = browser.new_page()
    page.goto(address.partition("#")[0])
    verdict(page, "whole address")
    page.close()


@pytest.fixture(scope="session")
def axe(request: pytest.FixtureRequest) -> str:
    """The accessibility checker, from npm; kept in pytest's cache."""
    npm, folder = shutil.which("npm"), Path(request.config.cache.mkdir("axe"))
    script = folder / "node_modules" / "axe-core" / "axe.min.js"
    if not script.is_file() and npm is not None:
        words = [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder, AXE]
        try:
            subprocess.run(words, capture_output=True, timeout=60)
        except subprocess.TimeoutExpired:
            pass
    if not script.is_file():
        pytest.skip("axe-core is not there, and npm did not bring it")
    return script.read_text()


def test_no_serious_accessibility_fault_in_both_themes(visit: Callable[..., Any], axe: str):
    page = visit(color_scheme="dark", reduced_motion="reduce")

    def check() -> None:
        for scheme in ("light", "dark"):
            page.evaluate("name => document.documentElement.dataset.theme = name", scheme)
            found = page.evaluate(f"async () => {{ {axe}; return (await axe.run()).violations }}")
            faults = [
                f"{scheme}, {v['id']}: {v['help']}: {n['target']} {json.dumps(n['any'])[:200]}"
                for v in found
                for n in v["nodes"]
                if v["impact"] in ("serious", "critical")
            ]
            assert faults == []

    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    check()
    write_examples(page)
    page.click("#held button[data-handle='2']")
    page.click("[data-hide=lower]")
    verdict(page, "It is image 2")
    page.click("#reading summary")
    drag(page, "#map", [(0.3, 0.3), (0.4, 0.4)])
    expect(page.locator("#steps canvas")).to_have_count(9)
    check()
    page.click("#python")
    check()
