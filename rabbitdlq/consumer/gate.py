"""What a delivery has to pass before it is begun: the breaker, the speed limit, and a slot among other consumers."""

import asyncio
from collections.abc import Callable

from rabbitdlq.broker import Delivery
from rabbitdlq.consumer.breaker import Circuit
from rabbitdlq.consumer.rate import Pacer
from rabbitdlq.consumer.slots import Share

__all__ = ["Gate"]


class Gate:
    """Lets deliveries in one by one; nobody waits here: who is refused is called when it is worth asking again."""

    def __init__(
        self,
        wants: Callable[[], bool],
        nudge: Callable[[], object],
        *,
        circuit: Circuit | None = None,
        pacer: Pacer | None = None,
        share: Share | None = None,
    ) -> None:
        """``wants``: whether anybody waits for it to open; ``nudge`` is called when it is worth asking again."""
        self._wants = wants
        self._nudge = nudge
        self._circuit = circuit
        self._pacer = pacer
        self._share: Share | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: called when what was to be a probe came to nothing
        self.on_probe_gone: Callable[[], object] = nudge
        if share is not None:
            self.join(share)

    def join(self, share: Share) -> None:
        """Take slots of what others take of, too."""
        self._share = share
        share.wants, share.nudge = self._wants_slot, self._nudge

    @property
    def always_open(self) -> bool:
        """Whether there is nothing to pass but the breaker."""
        return self._pacer is None and self._share is None

    def enter(self, delivery: Delivery) -> bool:
        """Whether the delivery may be begun; then :meth:`begun` and :meth:`leave` have to follow."""
        if self._circuit is not None and self._circuit.blocked:
            return False
        if self._pacer is not None and (wait := self._pacer.wait):
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(wait, self._in_turn)
            return False
        if self._share is not None and not self._share.enter():
            return False
        if self._pacer is not None:
            self._pacer.begin()
        if self._circuit is not None:
            self._circuit.begin(delivery)
        return True

    def begun(self) -> None:
        """What entered does not wait any more; or it will not enter, as it was taken back."""
        if self._share is not None:
            self._share.slots.nudge_next()

    def leave(self, delivery: Delivery) -> None:
        """What was begun has come to its end."""
        if self._circuit is not None and self._circuit.gone(delivery):
            self.on_probe_gone()
        if self._share is not None:
            self._share.leave()

    def close(self) -> None:
        """Call nobody any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _wants_slot(self) -> bool:
        if (self._circuit is not None and self._circuit.blocked) or not self._wants():
            return False
        return self._pacer is None or not self._pacer.wait

    def _in_turn(self) -> None:
        self._timer = None
        self._nudge()
