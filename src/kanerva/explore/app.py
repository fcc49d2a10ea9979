"""The routes. Each checks its request, does one thing to one session, and answers in JSON."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

import kanerva
from kanerva.errors import UserError
from kanerva.explore import answers
from kanerva.explore.asked import (
    Browse,
    Cue,
    Dream,
    Examples,
    Handles,
    Screen,
    Search,
    Shrink,
    Start,
    Steps,
    Write,
)
from kanerva.explore.library import Library
from kanerva.explore.pixels import as_ink, to_image
from kanerva.explore.script import SAVED, script
from kanerva.explore.session import IDLE, Session, Sessions
from kanerva.explore.shelf import Shelf
from kanerva.explore.upload import decode_file

WORKERS = 2  # threads that run models; as many more load models and decode uploads
MOST_WAITING = 256
PAGE = {  # static files by name: no path from a request ever reaches the disk
    "": ("index.html", "text/html; charset=utf-8"),
    "style.css": ("style.css", "text/css; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
    **{
        f"{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in ("app", "api", "paint", "canvas", "memory", "answer", "dream", "shelf", "tour")
    },
}
Result = TypeVar("Result")


class Missing(UserError):
    """A session that has ended."""


class Busy(UserError):
    """Too many requests are waiting."""


async def the_session(
    request: Request, x_session: Annotated[str, Header(max_length=100)] = ""
) -> Session:
    """The session that a request names."""
    session = request.app.state.sessions.get(x_session)
    if session is None:
        raise Missing("this page's session has ended")
    return session


Mine = Annotated[Session, Depends(the_session)]


@dataclass(eq=False)
class Service:
    """What the routes share."""

    library: Library
    sessions: Sessions
    shelf: Shelf | None = None

    def __post_init__(self) -> None:
        self.pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="model")
        self.slow = ThreadPoolExecutor(WORKERS, thread_name_prefix="slow")
        self.waiting = 0

    def close(self) -> None:
        """Close the store and the threads, without waiting for requests."""
        if self.shelf is not None:
            self.shelf.close()
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.slow.shutdown(wait=False, cancel_futures=True)

    async def work(
        self, do: Callable[[], Result], pool: ThreadPoolExecutor | None = None
    ) -> Result:
        """Run `do` in a thread, so that the event loop can answer others meanwhile."""
        if self.waiting >= MOST_WAITING:
            raise Busy("too many requests at once: try again")
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(pool or self.pool, do)
        finally:
            self.waiting -= 1

    async def change(self, session: Session, do: Callable[[], object]) -> dict[str, Any]:
        """Change a session's memory. Return its new state, and which cells changed."""

        def both() -> dict[str, Any]:
            before = session.memory
            extra = do()
            state = answers.describe(session)
            state["changed"] = answers.changed_cells(before, session.memory)
            return state | ({"new": extra} if isinstance(extra, list) else {})

        async with session.lock:
            return await self.work(both)

    async def ask(self, session: Session, do: Callable[[], Result]) -> Result:
        """Run a query on a session's memory."""
        async with session.lock:
            return await self.work(do)


def make_app(service: Service) -> FastAPI:
    """Make the application; `guard.Guard` wraps it."""
    app = FastAPI(title="kanerva explore", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(UserError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_request)
    app.add_exception_handler(HTTPException, _refuse_route)

    app.state.sessions = service.sessions
    folder = files("kanerva.explore") / "static"
    page = {n: ((folder / file).read_bytes(), kind) for n, (file, kind) in PAGE.items()}

    def the_shelf() -> Shelf:
        if service.shelf is None:
            raise UserError("there is no store: start `kanerva explore STORE`")
        return service.shelf

    @app.get("/")
    @app.get("/{name}")
    async def static(name: str = "") -> Response:
        if name not in page:
            raise HTTPException(404)
        content, kind = page[name]
        return Response(content, media_type=kind)

    @app.get("/api/about")
    async def about() -> dict[str, Any]:
        shelf = None if service.shelf is None else service.shelf.describe()
        library = service.library
        content = {"models": library.names, "first": library.first, "store": shelf}
        return content | {"version": kanerva.__version__}

    @app.post("/api/start")
    async def start(body: Start) -> dict[str, Any]:
        name = service.library.first if body.model is None else body.model
        model = await service.work(lambda: service.library.model(name), service.slow)
        about = await service.work(lambda: service.library.describe(name), service.slow)
        session = service.sessions.start(name, model)
        state = await service.ask(session, lambda: answers.describe(session))
        return {"session": session.id, "about": about, "state": state}

    @app.post("/api/end")
    async def end(session: Mine) -> dict[str, Any]:
        service.sessions.end(session.id)
        return {}

    @app.post("/api/leave")
    async def leave(session: Mine) -> dict[str, Any]:
        """A page is closed or reloaded. Its session is kept while there is room."""
        session.used -= IDLE
        return {}

    @app.post("/api/resume")
    async def resume(session: Mine) -> dict[str, Any]:
        about = await service.work(lambda: service.library.describe(session.name), service.slow)
        state = await service.ask(session, lambda: answers.describe(session))
        return {"session": session.id, "about": about, "state": state}

    # Changes of a memory

    @app.post("/api/write")
    async def write(body: Write, session: Mine) -> dict[str, Any]:
        config = session.model.config
        binary = config.likelihood == "bernoulli"
        images = [to_image(text, config.image, binary) for text in body.images]
        return await service.change(session, lambda: session.write(images))

    @app.post("/api/free")
    async def free(body: Handles, session: Mine) -> dict[str, Any]:
        return await service.change(session, lambda: session.free(body.handles))

    @app.post("/api/shrink")
    async def shrink(body: Shrink, session: Mine) -> dict[str, Any]:
        return await service.change(
            session, lambda: session.shrink(body.bits, body.handles, body.again)
        )

    @app.post("/api/clear")
    async def clear(session: Mine) -> dict[str, Any]:
        return await service.change(session, session.clear)

    @app.post("/api/undo")
    async def undo(session: Mine) -> dict[str, Any]:
        return await service.change(session, session.undo)

    @app.post("/api/redo")
    async def redo(session: Mine) -> dict[str, Any]:
        return await service.change(session, session.redo)

    @app.post("/api/open")
    async def open_file(request: Request, session: Mine) -> dict[str, Any]:
        content = await request.body()
        if len(content) > session.most_bytes():
            raise UserError("this file is larger than any memory of this model")
        return await service.change(session, lambda: session.open(content))

    @app.post("/api/save")
    async def save(session: Mine) -> Response:
        content = await service.ask(session, session.save)
        disposition = f'attachment; filename="{SAVED}"'
        headers = {"content-disposition": disposition}
        return Response(content, media_type="application/octet-stream", headers=headers)

    # Queries

    @app.post("/api/find")
    async def find(body: Cue, session: Mine) -> dict[str, Any]:
        image, damage = body.parts(session)
        return await service.ask(
            session, lambda: answers.find(session, image, damage, body.mask_given)
        )

    @app.post("/api/details")
    async def details(body: Cue, session: Mine) -> dict[str, Any]:
        image, damage = body.parts(session)
        return await service.ask(session, lambda: answers.details(session, image, damage))

    @app.post("/api/steps")
    async def steps(body: Steps, session: Mine) -> dict[str, Any]:
        image, damage = body.parts(session)
        return await service.ask(
            session,
            lambda: answers.steps(session, image, damage, body.mask_given, body.count, body.sample),
        )

    @app.post("/api/dream")
    async def dream(body: Dream, session: Mine) -> dict[str, Any]:
        at = None if body.x is None or body.y is None else (body.x, body.y)
        return await service.ask(
            session, lambda: answers.dream(session, at, body.spread, body.count, body.seed)
        )

    @app.post("/api/python")
    async def python(body: Screen, session: Mine) -> dict[str, Any]:
        image, damage = (None, None) if body.cue is None else body.cue.parts(session)
        mask_given = body.cue is not None and body.cue.mask_given
        store = str(the_shelf().path) if body.store else None
        return {"text": script(session, image, damage, mask_given, store)}

    # Images

    @app.post("/api/examples")
    async def examples(body: Examples, session: Mine) -> dict[str, Any]:
        images = await service.work(
            lambda: service.library.examples(session.name, body.set, body.count, body.seed),
            service.slow,
        )
        return {"images": images}

    @app.post("/api/decode")
    async def decode(request: Request, session: Mine) -> dict[str, Any]:
        content, config = await request.body(), session.model.config
        pixels = await service.work(lambda: decode_file(content, config.image), service.slow)
        return {"image": as_ink(pixels, config.likelihood == "bernoulli")}

    # A store

    @app.post("/api/search")
    async def search(body: Search, session: Mine) -> dict[str, Any]:
        shelf = the_shelf()
        if session.model is not shelf.store.model:
            raise UserError("the store belongs to another model: choose that one")
        image, damage = body.parts(session)
        return await service.work(
            lambda: shelf.search(image, damage, body.mask_given, body.page), shelf.pool
        )

    @app.post("/api/browse")
    async def browse(body: Browse, session: Mine) -> dict[str, Any]:
        shelf = the_shelf()
        return await service.work(lambda: shelf.browse(body.page), shelf.pool)

    return app


def _refuse(_: Request, error: Exception) -> Response:
    """Answer a `UserError` with its one line."""
    status = 410 if isinstance(error, Missing) else 429 if isinstance(error, Busy) else 400
    return JSONResponse({"error": str(error)[:500]}, status)


def _refuse_request(_: Request, error: Exception) -> Response:
    """Answer a malformed request: name the wrong part, without quoting it."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part)[:40] for part in first["loc"][1:3])
    return JSONResponse({"error": f"{where or 'the request'}: {first['msg'][:200]}"}, 422)


def _refuse_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": "no such thing here"}, error.status_code)
