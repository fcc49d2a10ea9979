"""Serve the page: open a socket, print an address with a token, open a browser, stop on Ctrl-C."""

import errno
import secrets
import socket
import sys
import threading
import webbrowser
from pathlib import Path

import torch
import uvicorn

from kanerva.errors import UserError
from kanerva.explore.answers import warm
from kanerva.explore.app import PAGE, Service, make_app
from kanerva.explore.guard import LOOPBACK, Guard, is_address
from kanerva.explore.library import Library
from kanerva.explore.session import Sessions
from kanerva.explore.shelf import Shelf
from kanerva.plain_files import reason


def open_service(target: str, root: Path | None = None) -> Service:
    """Make the service for a model's name, a run folder, or a store's file."""
    target, path = target.rstrip("/") or target, Path(target)
    if path.is_file():
        shelf = Shelf(path)
        library = Library(shelf.model_name, root, shelf.store.model)
        return Service(library, Sessions(), shelf)
    library = Library(target, root)
    library.model(target)  # refuse a wrong name now
    return Service(library, Sessions())


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket; an error says in one line why that failed."""
    if not host:  # sockets take it for every address
        raise UserError("the host is empty: name an address, such as 127.0.0.1 (this machine)")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(128)  # from now on browsers can connect, and wait
        return bound
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} is in use: name another with --port, or any free one with --port 0"
            ) from error
        raise UserError(f"cannot listen on {host} port {port}: {reason(error)}") from error


def serve(target: str, host: str, port: int, browser: bool, root: Path | None = None) -> None:
    """Serve until Ctrl-C. The address is the only line on standard output."""
    torch.set_num_threads(1)  # requests run in parallel threads
    with listen(host, port) as bound:
        service = open_service(target, root)
        try:
            _serve(service, bound, host, browser)
        finally:
            service.close()


def _serve(service: Service, bound: socket.socket, host: str, browser: bool) -> None:
    port, token = bound.getsockname()[1], secrets.token_urlsafe(24)
    name = f"[{host}]" if ":" in host else host
    hosts: list[str] = []
    if name not in LOOPBACK:
        print(
            f"kanerva: {host} is open to others: whoever has the address below can use this page, "
            "and it is not encrypted. Safer: the default host, and `ssh -L` from elsewhere.",
            file=sys.stderr,
        )
        name = socket.gethostname() if host in ("0.0.0.0", "::") else name
        hosts = [name, "*"] if is_address(host) else [name]
    app = Guard(make_app(service), token, port, [f"/{name}" for name in PAGE], hosts)
    address = f"http://{name}:{port}/#{token}"
    print(address, flush=True)
    service.pool.submit(warm, service.library.model(service.library.first))
    if browser:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=30,
        limit_concurrency=512,
        ws="none",
    )
    server = uvicorn.Server(config)
    server.run(sockets=[bound])
    if server.started:  # only a signal ends it; on a busy machine uvicorn may return without it
        raise KeyboardInterrupt
