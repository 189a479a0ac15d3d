"""``rabbitdlq broker run`` with a broker of one's own: what the command is told of it."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

ACCOUNT = "Basic " + base64.b64encode(b"anna:s/cret").decode()


class Management(BaseHTTPRequestHandler):
    """Answers as the management API does, to one account."""

    def do_GET(self) -> None:
        known = self.path == "/api/overview" and self.headers["Authorization"] == ACCOUNT
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"rabbitmq_version": "4.3.0"} if known else {"error": "not_authorised"}).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class Website(Management):
    """Somebody else's, with a page for everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<h1>Welcome</h1>")


@contextmanager
def serving(kind: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """On a port of which the number less 10,000 is that of an AMQP port."""
    with HTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def told(url: str, home: Path) -> tuple[str, str]:
    """What the command is told, and what is said."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("RABBITDLQ_")}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "rabbitdlq",
            "broker",
            "run",
            "--",
            "sh",
            "-c",
            'echo "${RABBITDLQ_MANAGEMENT_URL-none}"',
        ],
        env={**environment, "RABBITDLQ_URL": url, "RABBITDLQ_BROKER_HOME": str(home)},
        cwd=home.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "s/cret" not in done.stderr
    return done.stdout.strip(), done.stderr


def test_a_command_is_given_a_management_url_only_where_the_management_api_answers(tmp_path: Path) -> None:
    """It was given the port of AMQP and 10,000, whatever was there."""
    home = tmp_path / "home"
    with serving(Management) as port:
        url = f"amqp://anna:s%2Fcret@127.0.0.1:{port - 10_000}/"
        found, said = told(url, home)
        refused, _ = told(url.replace("anna", "bert"), home)
    nobody, said_nobody = told(url, home)
    with serving(Website) as other_port:
        other, _ = told(f"amqp://anna:s%2Fcret@127.0.0.1:{other_port - 10_000}/", home)

    assert found == f"http://anna:s%2Fcret@127.0.0.1:{port}"
    assert (refused, nobody, other) == ("none", "none", "none")
    assert "RABBITDLQ_MANAGEMENT_URL may name it" in said_nobody
    assert "RABBITDLQ_MANAGEMENT_URL" not in said
