"""Tensors that wait elsewhere, usually on the host: copies out while the region runs, and back when it is recomputed.

Where the device has streams, copies run beside the computation, on streams of their own: one out, one back. Memory
that such a copy reads or writes must not be used anew before it is done, and the allocator knows nothing of it. So a
tensor on its way out is referred to until the computation's stream has been told to wait for the copy (a few are on
their way at once, and none after the region's end), and one on its way back until it is waited for.

Invariant: what is brought back is what was sent, whichever is asked for when: order is a matter of time only.

Rejected: `Tensor.record_stream`. Memory would come back when the host finds out that the copy is done, and the host
runs ahead, so that nearly nothing would be saved.
"""

from __future__ import annotations

import weakref
from collections import deque
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _torch


class Destination(NamedTuple):
    """Where tensors wait, and which."""

    device: torch.device
    pin_memory: bool
    min_bytes: int  # smaller storages stay where they are


class Mover:
    """One region's tensors on their way out."""

    __slots__ = ("_leaving", "destination")

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self._leaving: deque[tuple[Tensor, Any, Any]] = deque()  # and the copy's end, and the computation's stream

    def takes(self, tensor: Tensor) -> bool:
        """Whether it is worth the way."""
        if type(tensor) is not Tensor or tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested:
            return False
        return _torch.has_storage(tensor) and tensor.untyped_storage().nbytes() >= self.destination.min_bytes

    def send(self, tensor: Tensor) -> Moved:
        """Copy it; it can be written, and its memory used anew, as soon as that is in order on its device."""
        there, home, layout = self.destination.device, tensor.device, _torch.layout_of(tensor)
        streams = _torch.streams_of(home)
        values = _torch.one_each(tensor)
        if streams is None:
            return Moved(torch.empty_like(values, device=there).copy_(values), home, layout, None, None)
        away = torch.empty_like(values, device=there, pin_memory=self.destination.pin_memory and there.type == "cpu")
        here = streams.current_stream(home)
        side = _side_stream(streams, home, "out")
        side.wait_stream(here)
        with streams.stream(side):
            _copy(away, values)
            done = side.record_event()
        while len(self._leaving) >= _AT_ONCE:
            self._let_go()
        self._leaving.append((tensor, done, here))
        return Moved(away, home, layout, streams, done)

    def _let_go(self) -> None:
        _, done, here = self._leaving[0]
        here.wait_event(done)
        self._leaving.popleft()

    def settle(self) -> None:
        """From here on nothing refers to what was sent."""
        while self._leaving:
            self._let_go()

    def holds(self, storage: int) -> int:
        """How often it refers to a storage at the moment."""
        return sum(_torch.storage_id(tensor) == storage for tensor, _, _ in self._leaving)


_AT_ONCE = 4
_AHEAD = 2  # how many are on their way back before they are asked for


class Moved:
    """A tensor that waits elsewhere."""

    __slots__ = ("__weakref__", "_away", "_coming", "_home", "_layout", "_sent", "_streams", "last_reader", "rank")

    def __init__(self, away: Tensor, home: torch.device, layout: Any, streams: Any, sent: Any) -> None:
        self._away = away
        self._home = home
        self._layout = layout  # as which it comes back
        self._streams = streams
        self._sent = sent
        self._coming: _Coming | None = None
        self.rank = -1  # where it comes in the order in which backward is likely to want such tensors
        self.last_reader: Any = None  # a weak reference to the holder that is likely to be the last to want it

    @property
    def away(self) -> Tensor:
        return self._away

    def settle(self) -> None:
        """The original is about to be written."""
        if self._sent is not None:
            self._streams.current_stream(self._home).wait_event(self._sent)

    def prefetch(self) -> None:
        """It will be wanted soon."""
        if self._coming is None and self._streams is not None:
            self._coming = _Coming(self._away, self._home, self._streams)

    def bring(self) -> Tensor:
        if self._streams is None:
            return _torch.laid_out(self._away.to(self._home), self._layout)
        self.prefetch()
        coming, self._coming = self._coming, None
        assert coming is not None  # `prefetch` made it
        return _torch.laid_out(coming.wait(), self._layout)


class _Coming:
    """A tensor on its way back."""

    __slots__ = ("__weakref__", "_give_back", "_tensor")

    def __init__(self, away: Tensor, home: torch.device, streams: Any) -> None:
        here = streams.current_stream(home)  # whose memory it is
        self._tensor = torch.empty_like(away, device=home)
        side = _side_stream(streams, home, "back")
        side.wait_stream(here)  # which may still use this memory for what was in it before
        side.wait_stream(_side_stream(streams, home, "out"))
        with streams.stream(side):
            _copy(self._tensor, away)
            done = side.record_event()
        # Called at the latest when nobody has asked for it and its memory is about to be free.
        self._give_back = weakref.finalize(self, here.wait_event, done)
        self._give_back.atexit = False

    def wait(self) -> Tensor:
        self._give_back()
        return self._tensor


def prefetch(order: list[Any], after: int) -> None:
    """Start to bring back what will be wanted next; `order` holds weak references to `Moved`s."""
    waiting = (moved for i in range(after + 1, len(order)) if (moved := order[i]()) is not None)
    for moved in islice(waiting, _AHEAD):
        moved.prefetch()


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


_SIDE_STREAMS: dict[tuple[torch.device, str], Any] = {}


def _side_stream(streams: Any, device: torch.device, way: str) -> Any:
    side = _SIDE_STREAMS.get((device, way))
    if side is None:
        side = _SIDE_STREAMS[device, way] = streams.Stream(device)
    return side
