"""A client of the page's server, in this process."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import httpx

from kanerva.explore.app import PAGE, Service, make_app
from kanerva.explore.guard import Guard

TOKEN, PORT = "secret-of-this-test", 7410
HOST = f"127.0.0.1:{PORT}"
VERBS = ("write", "free", "shrink", "clear", "undo", "redo", "open", "save", "find", "details",
         "steps", "dream", "python", "examples", "decode", "search", "browse", "start", "end",
         "resume", "leave")  # fmt: skip


# A thread of their own: where a browser is driven, this one has a loop that is running already.
_LOOP = ThreadPoolExecutor(1, thread_name_prefix="client")


@cache
def guarded(service: Service, *hosts: str) -> Guard:
    """The whole application: made once, for that takes a third of a second."""
    return Guard(make_app(service), TOKEN, PORT, [f"/{name}" for name in PAGE], hosts)


class Client:
    """One tab: requests in this process, a session of its own."""

    def __init__(self, service: Service) -> None:
        self.app = guarded(service)
        self.session, self.about = "", {}

    def send(self, method: str, path: str, **options: Any) -> Any:
        headers = {"host": HOST, "authorization": f"Bearer {TOKEN}", "x-session": self.session}
        headers |= options.pop("headers", {})
        headers = {name: value for name, value in headers.items() if value is not None}

        async def go() -> Any:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
                return await client.request(method, path, headers=headers, **options)

        return _LOOP.submit(asyncio.run, go()).result()

    def ask(self, verb: str, status: int = 200, **body: Any) -> Any:
        answer = self.send("POST", f"/api/{verb}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def start(self, **body: Any) -> "Client":
        begun = self.ask("start", **body)
        self.session, self.about = begun["session"], begun["about"]
        return self
