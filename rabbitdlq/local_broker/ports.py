"""Free ports on loopback for one node."""

import random
import socket
from dataclasses import astuple, dataclass
from typing import Self

from rabbitdlq.errors import LocalBrokerError

__all__ = ["LOOPBACK", "Ports", "is_free"]

LOOPBACK = "127.0.0.1"
#: below the range from which Linux serves outgoing connections, so that a port stays free while a node restarts
_RANGE = range(20_000, 32_000)


@dataclass(frozen=True, slots=True)
class Ports:
    """The five ports of a node."""

    amqp: int
    management: int
    prometheus: int
    distribution: int
    epmd: int

    @classmethod
    def choose(cls) -> Self:
        """Pick five ports on which nothing listens on loopback."""
        free = [port for port in random.sample(_RANGE, 200) if is_free(port)]
        if len(free) < 5:
            raise LocalBrokerError(f"no five free ports between {_RANGE.start} and {_RANGE.stop} on {LOOPBACK}")
        return cls(*free[:5])

    def free(self) -> bool:
        """Tell whether nothing listens on any of them."""
        return all(map(is_free, astuple(self)))


def is_free(port: int) -> bool:
    """Tell whether a server could listen on this port of loopback."""
    with socket.socket() as probe:
        # as servers do: what is left of closed connections keeps no port
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True
