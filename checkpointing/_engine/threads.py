"""The state of a thread: its innermost region, and whether operators are recorded now."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, inference_mode, is_grad_enabled, is_inference_mode_enabled

from .._torch import set_grad_enabled

R = TypeVar("R")


class Region:
    """A region, as code inside it meets it. Calls that it does not handle go on to the region
    around it. A region of this very class keeps nothing, and has no results of `forward_only`
    functions."""

    outer: "Region | None" = None  # while the region runs
    is_noted = False  # for a report, as are regions inside
    policy = None  # also of inner regions without one

    def keep(self, tensor: Tensor) -> Tensor:
        """Hold a value: recompute starts from it."""
        return tensor

    def pin(self, tensor: Tensor) -> Tensor:
        """A rerun around enters this region again, which must then meet the same value."""
        return tensor if self.outer is None else self.outer.pin(tensor)

    def once(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call that a recompute must not repeat."""
        return None

    def tag(self, tensor: Tensor, name: str) -> Tensor:
        return tensor if self.outer is None else self.outer.tag(tensor, name)

    def keep_for_inner(self, tensor: Tensor) -> None:
        """An inner region keeps the tensor and saves it here: do not recompute it."""
        if self.outer is not None:
            self.outer.keep_for_inner(tensor)

    def look_away(self) -> None:
        """Memory may now change without any operator."""
        if self.outer is not None:
            self.outer.look_away()


class _Thread(threading.local):
    """`depth` counts nested recomputes and blocks that are not recorded, `aside` only the latter.

    Hot code goes through `thread.__dict__`, which is this thread's own: one slow access instead of
    many.
    """

    def __init__(self) -> None:
        # By history of a site: the blocks that `auto()` has planned there.
        self.blocks: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()
        self.depth = 0
        self.aside = 0
        self.region: Region | None = None


thread = _Thread()


class within(AbstractContextManager[None]):
    """Run a recompute, or what no region records (`aside`), with `region` as the innermost one."""

    def __init__(self, region: Region | None, aside: bool = False) -> None:
        self._region, self._aside = region, aside

    def __enter__(self) -> None:
        here = thread.__dict__
        self._before = before = here.copy()
        depth, aside = before["depth"] + 1, before["aside"] + self._aside
        here.update(region=self._region, depth=depth, aside=aside)

    def __exit__(self, *error: object) -> None:
        thread.__dict__.update(self._before)


def aside() -> AbstractContextManager[None]:
    """Suspend recording inside this block."""
    return within(thread.region, aside=True)


def without_recording(function: Callable[..., R], *values: Any) -> R:
    """Call a check, a copy or a hook of the user, whose operators are neither recorded nor part of
    a graph."""
    if is_inference_mode_enabled():  # autograd could not save a copy that is made in it
        with inference_mode(False):
            return without_recording(function, *values)
    here = thread.__dict__
    before, grad_mode = here.copy(), is_grad_enabled()
    here.update(region=None, depth=here["depth"] + 1, aside=here["aside"] + 1)
    set_grad_enabled(False)
    try:
        return function(*values)
    finally:
        here.update(before)
        set_grad_enabled(grad_mode)
