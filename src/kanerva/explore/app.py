"""The routes. Each checks what came, does one thing to one session, and answers in JSON."""

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

WORKERS = 2  # threads that run models; as many load them, and read files of others
MOST_WAITING = 256
PAGE = {  # what is served beside the answers, by name: no path is ever looked up
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
    """More is asked for than can wait."""


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
        """Wait for nobody."""
        if self.shelf is not None:
            self.shelf.close()
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.slow.shutdown(wait=False, cancel_futures=True)

    async def work(
        self, do: Callable[[], Result], pool: ThreadPoolExecutor | None = None
    ) -> Result:
        """Off the event loop: it goes on answering others."""
        if self.waiting >= MOST_WAITING:
            raise Busy("too much is asked for at once: try again")
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(pool or self.pool, do)
        finally:
            self.waiting -= 1

    async def change(self, session: Session, do: Callable[[], object]) -> dict[str, Any]:
        """Do something to a memory; what it is afterwards, and which cells are not as before."""

        def both() -> dict[str, Any]:
            before = session.memory
            extra = do()
            state = answers.describe(session)
            state["changed"] = answers.changed_cells(before, session.memory)
            return state | ({"new": extra} if isinstance(extra, list) else {})

        async with session.lock:
            return await self.work(both)

    async def ask(self, session: Session, do: Callable[[], Result]) -> Result:
        """Ask something of a memory."""
        async with session.lock:
            return await self.work(do)


def make_app(service: Service) -> FastAPI:
    """The application; `guard.Guard` goes around it."""
    app = FastAPI(title="kanerva explore", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(UserError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_request)
    app.add_exception_handler(HTTPException, _refuse_route)

    app.state.sessions = service.sessions
    folder = files("kanerva.explore") / "static"
    page = {n: ((folder / file).read_bytes(), kind) for n, (file, kind) in PAGE.items()}

    def the_shelf() -> Shelf:
        if service.shelf is None:
            raise UserError("no store was named: kanerva explore STORE")
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
        found = {"models": library.names, "first": library.first, "store": shelf}
        return found | {"version": kanerva.__version__}

    @app.post("/api/start")
    async def start(asked: Start) -> dict[str, Any]:
        name = service.library.first if asked.model is None else asked.model
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
        """A page is closed, or loaded again: its session stays while there is room."""
        session.used -= IDLE
        return {}

    @app.post("/api/resume")
    async def resume(session: Mine) -> dict[str, Any]:
        about = await service.work(lambda: service.library.describe(session.name), service.slow)
        state = await service.ask(session, lambda: answers.describe(session))
        return {"session": session.id, "about": about, "state": state}

    # What changes a memory

    @app.post("/api/write")
    async def write(asked: Write, session: Mine) -> dict[str, Any]:
        config = session.model.config
        binary = config.likelihood == "bernoulli"
        images = [to_image(text, config.image, binary) for text in asked.images]
        return await service.change(session, lambda: session.write(images))

    @app.post("/api/free")
    async def free(asked: Handles, session: Mine) -> dict[str, Any]:
        return await service.change(session, lambda: session.free(asked.handles))

    @app.post("/api/shrink")
    async def shrink(asked: Shrink, session: Mine) -> dict[str, Any]:
        return await service.change(
            session, lambda: session.shrink(asked.bits, asked.handles, asked.again)
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

    # What asks a memory

    @app.post("/api/find")
    async def find(asked: Cue, session: Mine) -> dict[str, Any]:
        image, damage = asked.parts(session)
        return await service.ask(
            session, lambda: answers.find(session, image, damage, asked.mask_given)
        )

    @app.post("/api/details")
    async def details(asked: Cue, session: Mine) -> dict[str, Any]:
        image, damage = asked.parts(session)
        return await service.ask(session, lambda: answers.details(session, image, damage))

    @app.post("/api/steps")
    async def steps(asked: Steps, session: Mine) -> dict[str, Any]:
        image, damage = asked.parts(session)
        return await service.ask(
            session,
            lambda: answers.steps(
                session, image, damage, asked.mask_given, asked.count, asked.sample
            ),
        )

    @app.post("/api/dream")
    async def dream(asked: Dream, session: Mine) -> dict[str, Any]:
        at = None if asked.x is None or asked.y is None else (asked.x, asked.y)
        return await service.ask(
            session, lambda: answers.dream(session, at, asked.spread, asked.count, asked.seed)
        )

    @app.post("/api/python")
    async def python(asked: Screen, session: Mine) -> dict[str, Any]:
        image, damage = (None, None) if asked.cue is None else asked.cue.parts(session)
        mask_given = asked.cue is not None and asked.cue.mask_given
        store = str(the_shelf().path) if asked.store else None
        return {"text": script(session, image, damage, mask_given, store)}

    # Images

    @app.post("/api/examples")
    async def examples(asked: Examples, session: Mine) -> dict[str, Any]:
        found = await service.work(
            lambda: service.library.examples(session.name, asked.set, asked.count, asked.seed),
            service.slow,
        )
        return {"images": found}

    @app.post("/api/decode")
    async def decode(request: Request, session: Mine) -> dict[str, Any]:
        content, config = await request.body(), session.model.config
        pixels = await service.work(lambda: decode_file(content, config.image), service.slow)
        return {"image": as_ink(pixels, config.likelihood == "bernoulli")}

    # A store

    @app.post("/api/search")
    async def search(asked: Search, session: Mine) -> dict[str, Any]:
        shelf = the_shelf()
        if session.model is not shelf.store.model:
            raise UserError("the store belongs to another model: choose that")
        image, damage = asked.parts(session)
        return await service.work(
            lambda: shelf.search(image, damage, asked.mask_given, asked.page), shelf.pool
        )

    @app.post("/api/browse")
    async def browse(asked: Browse, session: Mine) -> dict[str, Any]:
        shelf = the_shelf()
        return await service.work(lambda: shelf.browse(asked.page), shelf.pool)

    return app


def _refuse(_: Request, error: Exception) -> Response:
    """One line, as everywhere."""
    status = 410 if isinstance(error, Missing) else 429 if isinstance(error, Busy) else 400
    return JSONResponse({"error": str(error)[:500]}, status)


def _refuse_request(_: Request, error: Exception) -> Response:
    """Which part of a request is wrong, without quoting it."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part)[:40] for part in first["loc"][1:3])
    return JSONResponse({"error": f"{where or 'the request'}: {first['msg'][:200]}"}, 422)


def _refuse_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": "no such thing here"}, error.status_code)
