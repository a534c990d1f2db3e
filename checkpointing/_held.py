"""What a recompute starts from: tensors from outside of a region, or kept inside, each held in one of a few ways.

| kind | of what | what is held | whose version is guarded (rule 8) |
|---|---|---|---|
| `Aliased` | leaves and views of them (rule 2); others where no hooks are | the tensor, or an alias | its own |
| `Saved` | an argument of a rerun | what autograd saves, with its graph | its own, by autograd |
| `Packed` | with hooks of the user around | what they made | what they made; else the tensor's while it lives |
| `InSlot` | with a region of ours around | a slot there | nobody's: a region tells versions apart |
| `Elsewhere` | with a `Mover` around | a copy | nobody's |

Invariant: what comes back lies in memory as the tensor did, since kernels look at strides.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

from torch import Tensor

from . import _torch, errors
from ._engine import (
    Name,
    identity,
    is_internal,
    is_parameter,
    is_referenced,
    named,
    root_of,
    unpack,
)
from ._offload import Moved, Mover
from ._region import without_recording

# What tensors are held by: the hooks around the region, the way to somewhere else, or nothing.
Saver = _torch.Hooks | Mover | None

_save_input = _torch.save_input


def check_version(where: object, name: Name, tensor: Tensor, version: int) -> None:
    """A tensor that recompute reads must be at the version that the forward read."""
    now = _torch.version(tensor)
    if now != version:
        raise errors.changed(where, named(name, tensor), version, now)


class Held:
    """One such tensor."""

    __slots__ = ("is_parameter", "name", "packed")

    packed: Any
    is_packed = True  # whether fetching it may cost a copy or a recompute

    def __init__(self, packed: Any, name: Name) -> None:
        self.packed = packed
        self.name = name
        self.is_parameter = False  # whether it is referenced rather than saved

    @property
    def moved(self) -> Moved | None:
        """What it is, if it waits elsewhere."""
        return None

    @property
    def is_stale(self) -> bool:
        """Whether it is referenced, and has been written since."""
        return False

    def fetch(self, where: object) -> Tensor:
        """The tensor as it was. Where it is one that others read, too, it must not be written."""
        raise NotImplementedError

    def freeze(self, copied: Callable[[], Tensor] | None = None) -> None:
        """The tensor is about to be written by the region itself: hold a copy from here on. `copied` makes one of a
        live tensor: hooks of others may be slow, or recompute."""


class Aliased(Held):
    """The tensor itself, or an alias, at one version."""

    __slots__ = ("_version",)

    is_packed = False

    def __init__(
        self, packed: Tensor, name: Name, is_parameter: bool = False, version: int | None = None
    ) -> None:
        super().__init__(packed, name)
        self.is_parameter = is_parameter
        self._version = _torch.version(packed) if version is None else version

    def fetch(self, where: object) -> Tensor:
        check_version(where, self.name, self.packed, self._version)
        return self.packed  # type: ignore[no-any-return]

    @property
    def is_stale(self) -> bool:
        """Whether it has been written since."""
        return _torch.version(self.packed) != self._version

    def freeze(self, copied: Callable[[], Tensor] | None = None) -> None:
        self.packed, self.is_parameter = without_recording(_torch.clone_storage, self.packed), False
        self._version = _torch.version(self.packed)


class Saved(Held):
    """What autograd saves for an operator, where no hooks of the user see it."""

    __slots__ = ()

    def fetch(self, where: object) -> Tensor:
        try:
            return self.packed.unpack()  # type: ignore[no-any-return]
        except RuntimeError as error:
            if isinstance(error, errors.CheckpointError) or "modified by an inplace" not in str(
                error
            ):
                raise
            raise errors.changed(where, named(self.name)) from error


class Packed(Held):
    """What hooks of the user have made. It may lie on the memory of the tensor, and outlive it."""

    __slots__ = ("_hooks", "_layout", "_live", "_version")

    def __init__(self, tensor: Tensor, hooks: _torch.Hooks, name: Name, packed: Any) -> None:
        super().__init__(packed, name)
        self._hooks = hooks
        self._layout = _torch.layout_of(tensor)
        made = packed.data if type(packed) is _torch.SavedTensor else packed
        parts = made if type(made) is tuple else (made,)
        live = next((part for part in parts if isinstance(part, Tensor)), tensor)
        self._live: Callable[[], Tensor | None] = weakref.ref(live)
        self._version = _torch.version(live)

    def fetch(self, where: object) -> Tensor:
        live = self._live()
        if live is not None:
            check_version(where, self.name, live, self._version)
        tensor: Tensor = self._hooks[1](self.packed)
        laid_out = without_recording(partial(_torch.laid_out, layout=self._layout), tensor)
        return tensor if laid_out is tensor else _torch.in_place_of(tensor, laid_out)

    def freeze(self, copied: Callable[[], Tensor] | None = None) -> None:
        pack, unpacked = self._hooks
        copy = without_recording(
            lambda packed: copied() if copied else _torch.copy(unpacked(packed)), self.packed
        )
        self.packed, self._layout = without_recording(pack, copy), _torch.layout_of(copy)
        self._live = lambda: None


class InSlot(Held):
    """A slot of the region around: its holder, or in a recompute of it what was delivered there."""

    __slots__ = ("_owner", "_unpack")

    def __init__(
        self, alias: Tensor, hooks: _torch.Hooks, name: Name, role: object, tensor: Tensor
    ) -> None:
        announce(hooks, role, tensor)
        pack, self._unpack = hooks
        owner = _owner_of(hooks)
        self._owner: Any = None if owner is None else weakref.ref(owner)
        super().__init__(pack(alias), name)

    def fetch(self, where: object) -> Tensor:
        return self._unpack(self.packed)

    def freeze(self, copied: Callable[[], Tensor] | None = None) -> None:
        if self._unpack is identity:
            # To pack once more would be a slot that the forward did not have: what was delivered becomes the copy.
            copy = without_recording(_torch.clone_storage, self.packed)
            _torch.set_versions((copy,), (_torch.version(self.packed),))
            recompute = self._owner and self._owner()
            if recompute is not None:
                recompute.replace(self.packed, copy)
            self.packed = copy


class Elsewhere(Held):
    """A copy that waits elsewhere."""

    __slots__ = ()

    @property
    def moved(self) -> Moved:
        return self.packed  # type: ignore[no-any-return]

    def fetch(self, where: object) -> Tensor:
        return self.packed.bring()  # type: ignore[no-any-return]

    def freeze(self, copied: Callable[[], Tensor] | None = None) -> None:
        self.packed.settle()


def hold(tensor: Tensor, saver: Saver, name: Name, role: object = None) -> Held:
    """Hold a tensor without its graph. `role` says which input of a region it is, the same in each run; None: the name
    does."""
    if _is_referenced_beside(tensor, saver):
        return Aliased(tensor if tensor._base is None else _alias(tensor), name, True)
    alias = _alias(tensor)
    if saver is None or tensor.is_meta or _torch.is_cast_of_parameter(root_of(tensor)):
        return Aliased(alias, name)
    if isinstance(saver, Mover):
        moved = without_recording(saver.send, alias) if saver.takes(alias) else None
        return Aliased(alias, name) if moved is None else Elsewhere(moved, name)
    if _is_users(saver):
        return Packed(alias, saver, name, without_recording(saver[0], alias))
    if getattr(
        _owner_of(saver), "complete", False
    ):  # a block around that has ended before this one
        return Aliased(alias, name)
    return InSlot(alias, saver, name, role or name, tensor)


def _alias(tensor: Tensor) -> Tensor:
    """An alias without graph. A subclass runs operators for it, which nobody must see."""
    if type(tensor) is Tensor:
        return _torch.alias(tensor)
    return without_recording(_torch.alias, tensor)  # type: ignore[no-any-return]


def hold_argument(tensor: Tensor, hooks: _torch.Hooks | None, name: Name) -> Held:
    """Hold a tensor of which a rerun wants the graph, too: as an operator would save it."""
    if hooks is None and type(tensor) is Tensor and tensor._base is None and tensor.requires_grad:
        return Saved(_save_input(tensor, False), name)  # past the following questions
    if _is_referenced_beside(tensor, hooks):
        return Aliased(tensor, name, True)
    if tensor.is_inference():
        return hold(tensor, hooks, name)
    if _is_users(hooks):
        return Packed(tensor, (hooks[0], _unpack_saved), name, _save_input(tensor, False))
    if hooks is not None:
        announce(hooks, name, tensor)
    return Saved(_save_input(tensor, False), name)


_unpack_saved = _torch.SavedTensor.unpack


def _is_users(saver: Saver) -> TypeGuard[_torch.Hooks]:
    return type(saver) is tuple and not is_internal(saver)


def _is_referenced_beside(tensor: Tensor, saver: Saver) -> bool:
    root = root_of(tensor)
    return (
        is_parameter(root) if _is_users(saver) else is_referenced(root)
    )  # users' hooks may look at other leaves


def _owner_of(hooks: _torch.Hooks | None) -> Any:
    """The region, or the recompute of one, that hooks belong to; None where these are none of ours."""
    pack: Any = None if hooks is None or hooks[1] not in (unpack, identity) else hooks[0]
    return getattr(pack, "__self__", None) or getattr(getattr(pack, "func", None), "__self__", None)


def announce(hooks: _torch.Hooks, role: object, tensor: Tensor) -> None:
    """What is packed next is no operator's."""
    owner = _owner_of(hooks)
    if owner is not None:
        owner.announce(role, tensor)


def note_written(hooks: _torch.Hooks | None, storages: set[int]) -> None:
    """A region inside of these hooks has written what was there before it."""
    owner = _owner_of(hooks)
    if owner is not None:
        owner.written |= storages
