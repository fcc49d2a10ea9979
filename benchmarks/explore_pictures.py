"""The pictures of docs/explore.md and of the README, taken of the page itself.

    python benchmarks/explore_pictures.py [--model mnist] [--out docs]

Needs chromium and playwright. Writes explore.png, explore-dark.png, explore-phone.png and the
animation explore.gif.
"""

import argparse
import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

WIDE = {"width": 1280, "height": 820}
WIDTH = 880  # of the animation


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="mnist")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    options = parser.parse_args()
    words = [sys.executable, "-m", "kanerva", "explore", options.model, "--no-open", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        try:
            with sync_playwright() as driver:
                chromium = shutil.which("chromium")
                browser = driver.chromium.launch(
                    executable_path=chromium, args=["--no-sandbox", "--hide-scrollbars"]
                )
                stills(browser, address, options.out)
                film(browser, address, options.out / "explore.gif")
                browser.close()
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(20)


def visit(browser: Browser, address: str, **options: object) -> Page:
    page = browser.new_context(**options).new_page()  # pyright: ignore[reportArgumentType]
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    return page


def stills(browser: Browser, address: str, out: Path) -> None:
    """Half of an image found: light, dark, and on a phone."""
    kinds = {
        "explore": {"viewport": WIDE},
        "explore-dark": {"viewport": WIDE, "color_scheme": "dark"},
        "explore-phone": {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 1.5},
    }
    for name, options in kinds.items():
        page = visit(browser, address, **options)
        page.click("#tour-close")
        page.click("#write-all")
        page.wait_for_selector("#held button >> nth=11")
        page.click("#held button >> nth=3")
        page.click("[data-hide=lower]")
        page.wait_for_timeout(600)
        stroke(page, "#map", [(0.2, 0.2), (0.25, 0.22)])
        page.wait_for_timeout(1200)
        page.evaluate("scrollTo(0, 0)")
        page.wait_for_timeout(300)
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        small = picture.quantize(palette=choose_palette(picture), dither=Image.Dither.NONE)
        small.save(out / f"{name}.png", optimize=True)
        page.context.close()


def stroke(page: Page, selector: str, points: list[tuple[float, float]], each=None) -> None:
    """Drag over an element; `each` is called on the way."""
    box = page.locator(selector).bounding_box()
    assert box is not None
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=4)
        if each is not None:
            each()
    page.mouse.up()


def film(browser: Browser, address: str, path: Path) -> None:
    """Write examples, draw a digit and write it, hide most of it, find it, free it, undo, dream."""
    page = visit(browser, address, viewport={"width": 1180, "height": 760})
    frames: list[tuple[Image.Image, int]] = []

    def shoot(milliseconds: int) -> None:
        page.wait_for_timeout(90)
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        height = round(WIDTH * picture.height / picture.width)
        frames.append((picture.resize((WIDTH, height), Image.Resampling.LANCZOS), milliseconds))

    shoot(900)
    page.click("#tour-write")
    page.wait_for_selector("#held button >> nth=11")
    page.click("#tour-close")
    page.wait_for_timeout(900)
    shoot(900)
    three = [(.3, .2), (.5, .14), (.66, .24), (.6, .4), (.45, .47), (.64, .52), (.7, .7), (.5, .84),
             (.28, .76)]  # fmt: skip
    stroke(page, "#canvas", three, lambda: shoot(90))
    page.wait_for_timeout(500)
    shoot(1300)
    page.click("#write")
    page.wait_for_timeout(1000)
    shoot(1100)
    page.click(".segments >> text=Hide")
    for row in (0.58, 0.7, 0.82, 0.93):
        stroke(page, "#canvas", [(0.08, row), (0.5, row), (0.92, row)], lambda: shoot(80))
    page.wait_for_timeout(600)
    shoot(1900)
    page.click("#free")
    page.wait_for_timeout(800)
    shoot(1900)
    page.click("#undo")
    page.wait_for_timeout(800)
    shoot(1100)
    page.evaluate("document.getElementById('dream').scrollIntoView({block: 'end'})")
    walk = [(0.1 + 0.08 * n, 0.25 + 0.05 * (n % 4)) for n in range(10)]
    stroke(page, "#map", walk, lambda: shoot(140))
    page.wait_for_timeout(900)
    shoot(2000)
    pictures = [frame for frame, _ in frames]
    sheet = Image.new("RGB", (WIDTH, 3 * pictures[0].height))
    for row, index in enumerate((1, 10, -1)):
        sheet.paste(pictures[index], (0, row * pictures[0].height))
    palette = choose_palette(sheet)
    drawn = [p.quantize(palette=palette, dither=Image.Dither.NONE) for p in pictures]
    drawn[0].save(
        path,
        save_all=True,
        append_images=drawn[1:],
        duration=[milliseconds for _, milliseconds in frames],
        loop=0,
        optimize=True,
    )
    print(path, path.stat().st_size, "bytes,", len(drawn), "frames")


def choose_palette(sheet: Image.Image) -> Image.Image:
    """For all frames one, so that they differ in little: the commonest colours as they are, the
    rest by how far apart they lie, so that rare ones are there too."""
    found = sheet.getcolors(sheet.width * sheet.height) or []
    common = [colour for _, colour in sorted(found, reverse=True)[:128]]
    spread = sheet.quantize(127, Image.Quantize.MAXCOVERAGE).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for colour in common for part in colour] + spread[: 3 * 127])
    return palette


if __name__ == "__main__":
    main()
