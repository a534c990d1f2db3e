"""Offloaded tensors: copied out, usually to the host, while the region runs, and back for a
recompute.

On a device with streams, copies overlap with the computation on two streams of their own, one out
and one back. The allocator knows nothing of these copies, and must not reuse their memory. So a
tensor on its way out is referenced until the computation's stream has been told to wait for the
copy (a few at a time, and none after the end of the region), and a tensor on its way back until
somebody waits for it.

Invariant: `fetch` returns exactly the tensor that was sent; the order of prefetching affects timing
only.

Rejected: `Tensor.record_stream`. Memory would be free again when the host notices the end of the
copy. The host runs ahead, so nearly nothing would be saved.
"""

import functools
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .tensors import Held, Name


class Destination(NamedTuple):
    """Where offloaded tensors wait."""

    device: torch.device
    pin_memory: bool
    min_bytes: int  # smaller storages are not offloaded


class Mover:
    """The tensors of one region on their way out."""

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        # Each with the event at the end of its copy, and the stream of the computation.
        self._leaving: deque[Any] = deque()

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is to be offloaded."""
        if _torch.layout_of(tensor) is None:
            return False
        return _torch.memory_size(tensor) >= self.destination.min_bytes

    def send(self, tensor: Tensor, name: Name) -> "Moved":
        """Copy a tensor out. Later work on its device may write it and reuse its memory."""
        there, home = self.destination.device, tensor.device
        streams, values = _torch.streams_of(home), _torch.one_each(tensor, tensor)
        is_on_host = streams is not None and there.type == "cpu"
        pin_memory = is_on_host and self.destination.pin_memory
        away = torch.empty_like(values, device=there, pin_memory=pin_memory)
        moved = Moved(away, name, tensor, streams)
        if streams is None:
            away.copy_(values)
            return moved
        moved.sent = _copy_beside(streams, home, "out", away, values)
        self.settle(_AT_ONCE - 1)
        self._leaving.append((tensor, moved.sent, streams.current_stream(home)))
        return moved

    def settle(self, most: int = 0) -> None:
        """Drop the references to tensors that were sent, but for this many of the last."""
        while len(self._leaving) > most:
            _sent, done, here = self._leaving.popleft()
            here.wait_event(done)


_AT_ONCE = 4


class Moved(Held):
    """An offloaded tensor: a copy that waits elsewhere. Nobody can write it."""

    sent: Any = None  # the end of the copy
    _coming: Tensor | None = None  # on its way back

    def __init__(self, away: Tensor, name: Name, tensor: Tensor, streams: Any) -> None:
        super().__init__(away, name)
        self._home, self._layout, self._streams = tensor.device, _torch.layout_of(tensor), streams

    def freeze(self, live: Tensor | None = None) -> None:
        """Let the computation wait for the copy: the original is about to be written."""
        if self.sent is not None:
            self._streams.current_stream(self._home).wait_event(self.sent)

    def prefetch(self) -> None:
        """Start to copy it back."""
        streams, home = self._streams, self._home
        if streams is None or self._coming is not None:
            return
        self._coming = torch.empty_like(self.packed, device=home)
        done = _copy_beside(streams, home, "back", self._coming, self.packed)
        # If nobody asks for the tensor, this runs before its memory is free.
        self._wait = weakref.finalize(self, streams.current_stream(home).wait_event, done)
        self._wait.atexit = False

    def fetch(self, frame: object) -> Tensor:
        self.prefetch()
        back, self._coming = self._coming, None
        if back is None:
            back = self.packed.to(self._home)
        else:
            self._wait()
        return _torch.laid_out(back, self._layout)


def _copy_beside(
    streams: Any, device: torch.device, way: str, target: Tensor, source: Tensor
) -> Any:
    """Copy on the side stream of this way, after what the computation and copies out have to do
    with the memory. Returns the end of the copy."""
    side = _side_stream(streams, device, way)
    side.wait_stream(streams.current_stream(device))
    side.wait_stream(_side_stream(streams, device, "out"))
    with streams.stream(side):
        _copy(target, source)
        return side.record_event()


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


@functools.cache
def _side_stream(streams: Any, device: torch.device, way: str) -> Any:
    """The one stream of a device for copies out, or back."""
    return streams.Stream(device)
