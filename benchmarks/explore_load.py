"""Many people on one page's server: how long they wait, and whether it grows.

    python benchmarks/explore_load.py [--clients 32] [--seconds 300] [--think 1.0] [--model mnist]

Starts `kanerva explore` as a process of its own and measures how long its page takes to answer, and
how long `import torch` does. Then each client has a session: it writes an image, looks for it from
its upper half, asks for details, frees and dreams now and then, and pauses for `think` seconds on
average. Every answer is checked against what that client itself wrote.
"""

import argparse
import asyncio
import base64
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np

SIZE = 28 * 28
HIDDEN = base64.b64encode(bytes(SIZE // 2) + b"\xff" * (SIZE // 2)).decode()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--think", type=float, default=1.0, help="0: as fast as it answers")
    parser.add_argument("--model", default="mnist")
    options = parser.parse_args()
    torch_s = min(timed([sys.executable, "-c", "import torch"]) for _ in range(3))
    begin = time.perf_counter()
    words = [sys.executable, "-m", "kanerva", "explore", options.model, "--no-open", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url, _, token = server.stdout.readline().strip().partition("#")
        try:
            asyncio.run(measure(server.pid, url, token, begin, torch_s, options))
        finally:
            server.send_signal(signal.SIGINT)
            code = server.wait(20)
    print(f"Ctrl-C: exit code {code}")


def timed(words: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(words, check=True)
    return time.perf_counter() - begin


async def measure(
    pid: int, url: str, token: str, begin: float, torch_s: float, options: argparse.Namespace
) -> None:
    headers = {"authorization": f"Bearer {token}"}
    limits = httpx.Limits(max_connections=options.clients + 1)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, limits=limits) as web:
        await ask(web, "start", {})
        ready = time.perf_counter() - begin
        allowed = 2 * torch_s + 2
        print(f"usable after {ready:.2f} s; import torch {torch_s:.2f} s, so {allowed:.2f} allowed")
        waits: dict[str, list[float]] = {}
        sizes, used = [resident(pid)], cpu_seconds(pid)
        end = time.perf_counter() + options.seconds
        people = [
            asyncio.create_task(person(web, number, end, options.think, waits))
            for number in range(options.clients)
        ]
        while not all(one.done() for one in people):
            await asyncio.sleep(min(5.0, options.seconds / 10))
            sizes.append(resident(pid))
        await asyncio.gather(*people)
        used = cpu_seconds(pid) - used
    print(f"{options.clients} clients, {options.seconds:.0f} s, {options.think} s of thought")
    print(f"{'':10}{'count':>8}{'p50 ms':>10}{'p95 ms':>10}{'most':>10}")
    for verb, times in sorted(waits.items()):
        cuts = statistics.quantiles(times, n=20)
        row = f"{verb:10}{len(times):>8}"
        print(row + "".join(f"{1e3 * t:>10.0f}" for t in (cuts[9], cuts[18], max(times))))
    count = sum(map(len, waits.values()))
    print(f"{count} answers, {1e3 * used / count:.1f} ms of the server's processor time for each")
    each = max(1, len(sizes) // 10)
    print("resident MB, in ten steps: " + " ".join(f"{max(part):.0f}" for part in cut(sizes, each)))


def cut(values: list[float], each: int) -> list[list[float]]:
    return [values[start : start + each] for start in range(0, len(values), each)]


def resident(pid: int) -> float:
    """MB of memory that a process has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has taken: the same however busy its machine is."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def ask(web: httpx.AsyncClient, verb: str, body: dict, session: str = "") -> dict:
    answer = await web.post(f"api/{verb}", json=body, headers={"x-session": session})
    assert answer.status_code == 200, (verb, answer.status_code, answer.text)
    return answer.json()


async def person(
    web: httpx.AsyncClient, number: int, end: float, think: float, waits: dict[str, list[float]]
) -> None:
    """One client; it fails if an answer is not about its own memory."""
    chance, held = random.Random(number), dict[int, str]()
    begun = await ask(web, "start", {})
    session, sets = begun["session"], begun["about"]["sets"]
    pool = (await ask(web, "examples", {"set": sets[0], "count": 64, "seed": number}, session))[
        "images"
    ]

    async def timed_ask(verb: str, body: dict) -> dict:
        await asyncio.sleep(think * chance.expovariate(1) if think else 0)
        before = time.perf_counter()
        answer = await ask(web, verb, body, session)
        waits.setdefault(verb, []).append(time.perf_counter() - before)
        if "held" in answer:
            assert {one["handle"] for one in answer["held"]} == set(held) | set(
                answer.get("new", [])
            )
        return answer

    while time.perf_counter() < end:
        if len(held) >= 20:
            gone = chance.sample(sorted(held), 10)
            for handle in gone:
                held.pop(handle)
            await timed_ask("free", {"handles": gone})
        image = chance.choice([image for image in pool if image not in held.values()])
        state = await timed_ask("write", {"images": [image]})
        held[state["new"][0]] = image
        wanted = chance.choice(sorted(held))
        cue = {"image": held[wanted], "hidden": HIDDEN}
        hits = (await timed_ask("find", cue))["hits"]
        assert {hit["handle"] for hit in hits} == set(held)
        best = held[hits[0]["handle"]]
        same = np.frombuffer(base64.b64decode(best), np.uint8)[: SIZE // 2]
        mine = np.frombuffer(base64.b64decode(held[wanted]), np.uint8)[: SIZE // 2]
        assert hits[0]["handle"] == wanted or np.abs(same / 255 - mine / 255).sum() < 60
        if chance.random() < 0.3:
            await timed_ask("details", cue)
        if chance.random() < 0.2:
            await timed_ask("dream", {"x": chance.uniform(-1, 1), "y": chance.uniform(-1, 1)})


if __name__ == "__main__":
    main()
