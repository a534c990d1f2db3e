"""What a rerun gives back of modules: their training flags, and their buffers, which are written once.

Invariant: a rerun finds the very tensors and modules of the forward, as they were then, and leaves them as they are
now. Both directions are one operation: go to a moment.

Rejected: copies in the place of the buffers. Aliases, views and caches keyed by a tensor would part from them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from . import _torch, errors
from ._ambient import Undo
from ._engine import named
from ._region import without_recording
from ._tree import Field

_parts_of, _has_storage, _version = _torch.parts_of_module, _torch.has_storage, _torch.version
_Generator = torch.Generator
_OF_EVERY_MODULE = len(vars(nn.Module()))  # attributes, before its own
_SMALL = 1 << 16  # bytes: up to that a copy before every forward costs little
_LEAVES_NO_TRACE = (_torch.Normalisation, torch.jit.ScriptModule)  # its kernels write past the version counter


class Buffers:
    """The modules that a region runs, as they were before it.

    Buffers of modules in training mode are copied, and rewound in place while the function is called again: so they
    are written once (rule 7), and aliases, views and what is keyed by the tensor stay what they are. Larger ones and
    those of modules in evaluation mode are guarded by version.
    """

    __slots__ = ("_entries", "_flags", "_guarded", "_then")

    def __init__(self, inputs: Any) -> None:
        """Of `inputs.modules`; their devices and generators are added to the others of `inputs`."""
        flags: dict[nn.Module, bool | None] = {}  # None: frozen TorchScript, which has no flag
        entries: list[Entry] = []
        guarded: list[tuple[nn.Module, str, Tensor, int]] = []
        small: list[Tensor] = []  # what shares memory is rewound twice, to the same
        stack: list[Any] = [*inputs.modules]
        while stack:
            module = stack.pop()
            if module is None or module in flags:
                continue
            is_training = flags[module] = getattr(module, "training", None)
            children, parameters, buffers = _parts_of(module)
            if children:
                stack += children.values()
            for parameter in parameters.values():
                if parameter is not None and not parameter.is_cpu:
                    inputs.devices |= {parameter.device}
            # Dropout of one's own, reproducible on its own. No module of torch has one: they need not be searched.
            if type(module).__module__[:6] != "torch.":
                own = islice(vars(module).values(), _OF_EVERY_MODULE, None)
                inputs.generators += tuple([part for part in own if type(part) is _Generator])
            if not buffers:
                continue
            entries.append((module, dict(buffers)))
            most = math.inf if isinstance(module, _LEAVES_NO_TRACE) else _SMALL
            for name, tensor in buffers.items():
                can_be_rewound = (
                    (type(tensor) is Tensor or _is_whole(tensor)) and _has_storage(tensor) and not tensor.is_inference()
                )
                if is_training and can_be_rewound and tensor.nbytes <= most:
                    small.append(tensor)
                elif tensor is not None:
                    guarded.append((module, name, tensor, _version(tensor)))
        self._flags = flags
        self._entries, self._guarded = entries or (), guarded or ()  # few objects for the garbage collector
        self._then = _Moment.of(small) if small else _NOTHING

    def __bool__(self) -> bool:
        """Whether there is anything to rewind."""
        return self._then is not _NOTHING

    def storages(self) -> set[int]:
        """Those that are rewound."""
        tensors = self._then.tensors
        if {*map(type, tensors)} != _PLAIN:
            tensors = [part for tensor in tensors for part in _torch.plain_parts(tensor)]
        return set(map(_torch.storage_id, tensors))

    def copies(self) -> list[Tensor]:
        return self._then.values

    def enter(self, where: object, undo: Undo) -> None:
        """Go back; `undo` is given the way out."""
        for module, name, tensor, version in self._guarded:
            if _version(tensor) != version:
                what = named((type(module).__name__, Field(name)), tensor)
                raise errors.changed(where, what, version, _version(tensor))
        flags = [getattr(module, "training", None) for module in self._flags]
        if flags != [*self._flags.values()]:
            undo.append((_set_flags, [*zip(self._flags, flags, strict=True)]))
            _set_flags(self._flags.items())
        if not self._entries:
            return
        undo.append((_set, [(module, dict(_torch.buffers_of_module(module)[0])) for module, _ in self._entries]))
        _set(self._entries)
        if self:
            undo.append((_Moment.go_back, self._then.exchange()))


def _is_whole(tensor: Tensor | None) -> bool:
    """Of what is no plain tensor: whether it is one, of a size that numbers tell."""
    return tensor is not None and not _torch.is_lazy(tensor) and not tensor.is_nested


def _set_flags(flags: Iterable[tuple[nn.Module, bool | None]]) -> None:
    for module, is_training in flags:
        if is_training is not None:
            module.training = is_training


Entry = tuple[nn.Module, dict[str, Any]]  # with the buffers that it had


def _set(entries: Iterable[Entry]) -> None:
    """Buffers may have been set to other tensors. What is not persistent is a cache, with something beside it that says
    what is in it (the length that rotary embeddings have grown to): it stays as it is."""
    for module, then in entries:
        store, caches = _torch.buffers_of_module(module)
        now = dict(store)
        if now.keys() == then.keys() and all(map(operator.is_, now.values(), then.values())):
            continue
        if isinstance(store, dict):  # that of a scripted module has no other names
            store.clear()
        for name, tensor in {**then, **{name: now[name] for name in caches if name in now}}.items():
            store[name] = tensor


_PLAIN = {Tensor}


class _Moment:
    """What tensors hold at one moment, their sizes and their versions."""

    __slots__ = ("_memory", "_versions", "tensors", "values")

    def __init__(self, tensors: list[Tensor], memory: list[Tensor], values: list[Tensor]) -> None:
        self.tensors = tensors
        self._memory = memory
        self.values = values
        self._versions = [tensor._version for tensor in tensors]

    @classmethod
    def of(cls, tensors: list[Tensor]) -> _Moment:
        # Where elements have gaps between them, share their memory or stand for others: all of the storage.
        memory = [
            t if type(t) is not Tensor or (t.is_contiguous() and not t.is_complex()) else _torch.bytes_of(t)
            for t in tensors
        ]
        return cls(tensors, memory, without_recording(_torch.clones, memory))

    def exchange(self) -> _Moment:
        """Go back; returns how it is now."""
        values = without_recording(_torch.exchange, (self._memory, self.values))
        now = _Moment(self.tensors, self._memory, values)
        _torch.set_versions(self.tensors, self._versions)
        return now

    def go_back(self) -> None:
        without_recording(_torch.overwrite, (self._memory, self.values))
        _torch.set_versions(self.tensors, self._versions)


_NOTHING = _Moment([], [], [])
