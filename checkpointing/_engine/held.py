"""Tensors that a recompute starts from: inputs and kept values, each held in one of six ways.

| class | of which tensors | the object held | guarded by (rule 8) |
|---|---|---|---|
| `Aliased` | leaves and their views (rule 2); others without hooks | an alias | its version |
| `AsOperand` | other arguments of a rerun | autograd's saved tensor | autograd |
| `Packed` | any, with hooks of the user around | their object | its version, else the tensor's |
| `InSlot` | any, with a region of ours around | a slot of that region | that region |
| `NoGradView` | such arguments of a rerun, with hooks | one of the others | as that is |
| `Moved` | any, with a `Mover` around | a copy | nothing: nobody can write it |

Invariant: a tensor comes back with its strides and gaps, since kernels look at them.
"""

import weakref
from collections.abc import Callable, Set
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .. import _torch, errors
from .._torch import Hooks, save_input
from .frames import identity, is_internal
from .offload import Mover
from .tensors import (
    Held,
    Name,
    carries_nothing,
    is_parameter,
    is_referenced,
    named,
    root_of,
)
from .threads import thread, without_recording
from .tree import tensors_in

# Takes the tensors that are held: the hooks around the region, a mover, or nobody.
Saver = Hooks | Mover | None


class Aliased(Held):
    """The tensor itself, or an alias, at one version."""

    def __init__(self, packed: Tensor, name: Name, is_parameter: bool = False) -> None:
        self.packed, self.name, self.is_parameter = packed, name, is_parameter
        self._version = _torch.version(packed)

    def fetch(self, frame: object) -> Tensor:
        if self.is_stale:
            raise errors.changed(frame, named(self.name, self.packed))
        return self.packed  # type: ignore[no-any-return]

    @property
    def is_stale(self) -> bool:  # type: ignore[override]
        """Whether it has been written since."""
        return _torch.version(self.packed) != self._version

    @property
    def is_shared(self) -> bool:  # type: ignore[override]
        return _torch.is_shared(self.packed)

    def renew(self) -> None:
        self._version = _torch.version(self.packed)

    def freeze(self, live: Tensor | None = None) -> None:
        if _torch.was_given_back(self.packed):
            return  # who fetches it is told
        self.packed, self.is_parameter = without_recording(_torch.copy, self.packed), False
        self.renew()


class AsOperand(Held):
    """A tensor that autograd saves, as it saves an operand."""

    def fetch(self, frame: object) -> Tensor:
        try:
            return self.packed.unpack()  # type: ignore[no-any-return]
        except RuntimeError as error:
            if type(error) is RuntimeError and "modified by an inplace" in str(error):
                raise errors.changed(frame, named(self.name)) from error
            raise


class Packed(Held):
    """An object that hooks of the user have made. Guarded is the tensor, if the object shares
    memory with it, else the copy in the object."""

    def __init__(self, tensor: Tensor, hooks: Hooks, name: Name, packed: Any) -> None:
        super().__init__(packed, name)
        self._hooks, self._layout = hooks, _torch.layout_of(tensor)
        made = tensors_in(packed.data if type(packed) is _torch.SavedTensor else packed)[:1]
        storages = {_torch.storage_of(tensor)}
        # Below autograd, an alias of theirs counts versions of its own.
        shared = [_alias(tensor) for part in made if _torch.is_on(part, storages)]
        self._guards = [Aliased(each, name) for each in shared or made]

    def fetch(self, frame: object) -> Tensor:
        for guard in self._guards:
            guard.fetch(frame)
        tensor = self._hooks[1](self.packed)
        laid_out = without_recording(_torch.laid_out, tensor, self._layout)
        return tensor if laid_out is tensor else _torch.in_place_of(tensor, laid_out)

    def renew(self) -> None:
        for guard in self._guards:
            guard.renew()

    def freeze(self, live: Tensor | None = None) -> None:
        pack, unpacked = self._hooks
        if live is None:
            live = without_recording(unpacked, self.packed)
        copy = without_recording(_torch.copy, live)
        self.packed, self._layout = without_recording(pack, copy), _torch.layout_of(copy)
        self._guards = []


class InSlot(Held):
    """A slot of the region around: a holder, or in a recompute the delivered tensor."""

    def __init__(
        self, packed: Any, name: Name, unpack: Callable[[Any], Tensor], owner: Any
    ) -> None:
        super().__init__(packed, name)
        self._unpack = unpack
        self._owner: Any = None if owner is None else weakref.ref(owner)

    def fetch(self, frame: object) -> Tensor:
        return self._unpack(self.packed)

    def freeze(self, live: Tensor | None = None) -> None:
        if self._unpack is not identity:  # the region around tells versions apart, if it looks
            if thread.aside and live is not None:
                self.packed, self._unpack = without_recording(_torch.copy, live), identity
                self._owner = None
            return
        # Packing again would be a slot that the forward did not have: deliver the copy instead.
        copy = without_recording(_torch.copy, self.packed)
        request = self._owner and self._owner()
        if request is not None:
            request.replace(self.packed, copy)
        self.packed = copy


class NoGradView(Held):
    """A view made under `no_grad`, which hooks would bring back as a leaf; `packed`: its data."""

    def fetch(self, frame: object) -> Tensor:
        base = self.packed.fetch(frame).detach().requires_grad_()
        with torch.no_grad():
            return base.view_as(base)  # type: ignore[no-any-return]


def hold(tensor: Tensor, saver: Saver, name: Name) -> Held:
    """Hold a tensor without its graph."""
    if _is_referenced(tensor, saver):
        parameter = tensor if tensor._base is None else _alias(tensor)
        return Aliased(parameter, name, True)
    alias = _alias(tensor)
    # To hold a cast that autocast caches costs nothing.
    if saver is None or tensor.is_meta or _torch.is_cast_of_parameter(root_of(tensor)):
        return Aliased(alias, name)
    if isinstance(saver, Mover):
        takes = saver.takes(alias)
        return without_recording(saver.send, alias, name) if takes else Aliased(alias, name)
    pack, unpacked = saver
    if _is_users(saver):
        return Packed(alias, saver, name, without_recording(pack, alias))
    owner = _owner_of(saver)
    # These hooks are nobody's, as in a `forward_only` function, or of a block that has been left.
    if owner is None or getattr(owner, "complete", False):
        return Aliased(alias, name)
    owner.announce(name, tensor)
    return InSlot(pack(alias), name, unpacked, owner)


def _alias(tensor: Tensor) -> Tensor:
    """An alias without graph. A subclass runs operators for it, which must not be recorded, and
    may forget attributes."""
    if type(tensor) is Tensor:
        return _torch.alias(tensor)
    alias = without_recording(_torch.alias, tensor)
    vars(alias).update({**vars(tensor), **vars(alias)})
    return alias


def hold_argument(tensor: Tensor, hooks: Hooks | None, name: Name) -> Held:
    """Hold a tensor with its graph, for a rerun, as an operator would save it."""
    if _is_referenced(tensor, hooks):
        return Aliased(tensor, name, True)
    if tensor.is_inference():
        return hold(tensor, hooks, name)
    if hooks is not None and carries_nothing(tensor):
        return NoGradView(hold(tensor, hooks, name), name)
    if _is_users(hooks):
        hooks = hooks[0], _torch.SavedTensor.unpack
        return Packed(tensor, hooks, name, save_input(tensor, False))
    owner = _owner_of(hooks)
    if owner is not None:
        owner.announce(name, tensor)
    elif hooks is not None:  # nobody's: autograd would not look at the version
        return Aliased(tensor, name)
    return AsOperand(save_input(tensor, False), name)


def _is_users(saver: Saver) -> TypeGuard[Hooks]:
    return type(saver) is tuple and not is_internal(saver)


def _is_referenced(tensor: Tensor, saver: Saver) -> bool:
    """Whether a tensor is referenced, not saved. (Hooks of the user get leaves. A view of one may
    come back from them as a tensor of its own, so it is saved in any case.)"""
    return is_parameter(tensor) if _is_users(saver) else is_referenced(tensor)


def _owner_of(hooks: Hooks | None) -> Any:
    """The region, or the recompute, that hooks belong to; None for hooks of others. It is told
    which tensors that it packs are inputs of a region inside, and which memory that writes."""
    if hooks is None or not is_internal(hooks):
        return None
    pack = getattr(hooks[0], "func", hooks[0])  # inside of a partial
    return getattr(pack, "__self__", None)


def note_written(hooks: Hooks | None, storages: Set[int | None]) -> None:
    """Tell the region around, or its recompute, that an inner region writes to these storages."""
    owner = _owner_of(hooks)
    if owner is not None:
        owner.note_written(storages - {None})
