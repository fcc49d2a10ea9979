"""Access control, and the security headers of every answer.

Another site can make a browser send requests here (cross-site posts), or let its own name resolve
to our address (DNS rebinding). So the Host header must be ours, and so must Origin if present.
Everything but the page itself needs the token in the printed address. Bodies are limited in bytes
and seconds, and are read before anything else is done.
"""

import asyncio
import hmac
import ipaddress
import json
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kanerva.explore.upload import MOST_BYTES

MOST_JSON = 4_000_000  # bytes
SECONDS = 20.0  # in which a body must arrive
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
LARGE = ("/api/decode", "/api/open")  # these take files

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class Refused(Exception):
    """Refuse a request with a status and one line."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        port: int,
        page: Iterable[str] = (),
        hosts: Iterable[str] = (),
    ) -> None:
        """`page`: paths that need no token. `hosts`: names allowed besides this machine's loopback.
        "*" allows every numeric address: unlike a name, no other site can claim one."""
        self.app, self.token, self.port = app, token.encode(), port
        self.page, self.hosts = frozenset(page), {*LOOPBACK, *hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # there are no web sockets here
            return await send({"type": "websocket.close", "code": 1008})

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                ours = {name for name, _ in _HEADERS} | {b"server"}
                kept = [h for h in message.get("headers", []) if h[0].lower() not in ours]
                message = {**message, "headers": [*kept, *_HEADERS]}
            await send(message)

        try:
            self._check(scope)
            body = await read_body(scope, receive)
        except Refused as refused:
            return await answer(refused, sealed)
        await self.app(scope, replay(body, receive), sealed)

    def _check(self, scope: Scope) -> None:
        """Refuse requests that do not come from our page."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        host = headers.get(b"host", [])
        if len(host) != 1 or not self._is_ours(host[0].decode("latin-1")):
            raise Refused(421, "the Host header names another host")
        origin = headers.get(b"origin", [])
        if origin and origin != [b"http://" + host[0]]:
            raise Refused(403, "requests of other sites are refused")
        if scope["path"] in self.page:
            return
        if headers.get(b"sec-fetch-site", [b"none"]) not in ([b"none"], [b"same-origin"]):
            raise Refused(403, "requests of other sites are refused")
        sent = headers.get(b"authorization", [b""])
        if not hmac.compare_digest(sent[0], b"Bearer " + self.token) or len(sent) != 1:
            raise Refused(401, "open the printed address: it contains a token")

    def _is_ours(self, host: str) -> bool:
        name, colon, port = host.rpartition(":")
        if not colon or name.endswith(":") or (host.startswith("[") and host.endswith("]")):
            name, port = host, "80"  # the default port
        if port != str(self.port):
            return False
        return name.lower() in self.hosts or ("*" in self.hosts and is_address(name))


def is_address(name: str) -> bool:
    """Whether a host is a numeric address."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """Read the whole body, within the limits."""
    most = MOST_BYTES if scope["path"] in LARGE else MOST_JSON
    for name, value in scope["headers"]:
        if name == b"content-length" and (not value.isdigit() or int(value[:20]) > most):
            raise Refused(413, f"at most {most} bytes")
    parts, size = [], 0
    try:
        async with asyncio.timeout(SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "the request broke off")
                size += len(message.get("body", b""))
                if size > most:
                    raise Refused(413, f"at most {most} bytes")
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError as error:
        raise Refused(408, "the request took too long") from error


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that first returns the body that was already read."""
    waiting = [body]

    async def receive_again() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return receive_again


async def answer(refused: Refused, send: Send) -> None:
    body = json.dumps({"error": str(refused)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
