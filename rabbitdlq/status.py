"""The status of a process over HTTP: ``/live``, ``/health`` and ``/metrics``, for probes, Prometheus and people.

It answers from threads of its own, so it answers also while the event loop is blocked, and says so.
"""

import json
import socket
import socketserver
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import structlog

from rabbitdlq.consumer import Consumer
from rabbitdlq.consumer.health import Health, worst
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.metrics import CONTENT_TYPE, exposition

__all__ = ["StatusServer"]

log = structlog.stdlib.get_logger(__name__)

LOOPBACK = "127.0.0.1"
#: seconds for a client to say what it wants; a thread is kept busy by it as long
_PATIENCE = 10.0


class StatusServer:
    """Serves the status of these consumers, from :meth:`start` to :meth:`close`, or for the length of a ``with`` block.

    - ``/live``: 200 while the process is worth keeping, 503 when only a new one can help: the event loop has been
      blocked for half a minute, or a consumer has ended. A broker that is away is no reason, nor a consumer that has
      drained its queue.
    - ``/health``: 200 while all consumers take messages, 503 else; JSON with everything that is not well in both.
    - ``/metrics``: Prometheus' text format, 501 without the extra ``metrics``.
    """

    def __init__(self, consumers: Sequence[Consumer], port: int, host: str = LOOPBACK) -> None:
        """``port`` 0 takes a free one, see :attr:`port`. Anybody who reaches it may read: there is no account."""
        self._consumers = list(consumers)
        self._host = host
        self._port = port
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        """Listen. Raises :class:`ConfigurationError` where that cannot be done, for instance on a port in use."""
        status = self

        class Handler(_Handler):
            consumers = status._consumers

        try:
            self._server = _Server((self._host, self._port), Handler)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigurationError(
                f"status server: cannot listen on {self._host}:{self._port}: {why}; choose another port or host"
            ) from error
        self._port = int(self._server.server_address[1])
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="rabbitdlq-status", daemon=True
        ).start()
        log.info("status_served", url=f"http://{self._host}:{self._port}", paths=["/live", "/health", "/metrics"])

    @property
    def port(self) -> int:
        """The port it listens on, once it does."""
        return self._port

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> "StatusServer":
        self.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # a client that never asks must not keep the process from ending
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """As the base class of the base class: the one between asks the DNS for a name that nobody needs."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is nobody's fault; anything else is told in one line."""
        log.debug("status_request_failed", client=str(client_address), exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    consumers: Sequence[Consumer] = ()
    server_version = "rabbitdlq"
    sys_version = ""
    timeout = _PATIENCE

    def do_GET(self) -> None:
        """Answer one question."""
        path = self.path.partition("?")[0].rstrip("/") or "/"
        match path:
            case "/live":
                found = [consumer.health() for consumer in self.consumers]
                live = all(health.live for health in found)
                self._json(200 if live else 503, {"live": live, "consumers": [_brief(health) for health in found]})
            case "/health":
                found = [consumer.health() for consumer in self.consumers]
                status = worst([health.status for health in found])
                body = {"status": status, "consumers": [health.as_json() for health in found]}
                self._json(503 if status == "down" else 200, body)
            case "/metrics":
                try:
                    body_of_metrics = exposition(self.consumers)
                except ConfigurationError as error:
                    self._send(501, "text/plain; charset=utf-8", f"{error}\n".encode())
                else:
                    self._send(200, CONTENT_TYPE, body_of_metrics)
            case _:
                self._send(404, "text/plain; charset=utf-8", b"there is /live, /health and /metrics\n")

    do_HEAD = do_GET  # noqa: N815 - the name is the protocol's

    def _json(self, code: int, body: dict[str, Any]) -> None:
        self._send(code, "application/json", json.dumps(body, ensure_ascii=False, indent=1).encode() + b"\n")

    def _send(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds: they are not worth a line."""


def _brief(health: Health) -> dict[str, Any]:
    return {"queue": health.queue, "worker": health.worker, "live": health.live, "status": health.status}
