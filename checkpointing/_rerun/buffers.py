"""Modules in a rerun: their training flags, and their buffers, which the region writes only once.

Invariant: a rerun finds the tensors and modules of the forward as they were then, and leaves them
as they are now. Both directions are one operation: go to a moment.

Rejected: exchanging the buffers for copies. Aliases, views and caches keyed by a tensor would still
refer to the originals.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch, errors
from .._engine import Field, Undo, named, without_recording

_parts_of, _has_storage, _version = _torch.parts_of_module, _torch.has_storage, _torch.version
_Generator, _Parameter = torch.Generator, nn.Parameter
_version_of: Any = operator.attrgetter("_version")
_MAY_HOLD_ONE = {torch.Generator, list, tuple, dict}
_MOST_ITEMS = 100  # of a list or dict
_OF_EVERY_MODULE = len(vars(nn.Module()))  # attributes, before its own
_SMALL = 1 << 16  # bytes: cheap to copy before every forward
_NONE = -1  # bytes: not even empty buffers
_LEAVES_NO_TRACE = (_torch.Normalisation, torch.jit.ScriptModule)  # kernels bypass version counters


class Buffers:
    """The modules that a region runs, as they were before it.

    Buffers of modules in training mode are copied, and rewound in place during the rerun. So the
    region writes them once (rule 7), and aliases, views and caches keyed by the tensor stay valid.
    Larger buffers, and those of modules in evaluation mode, are guarded by version.
    """

    def __init__(self, inputs: Any) -> None:
        """Capture `inputs.modules` and their children; add their devices and generators to
        `inputs`."""
        flags: dict[nn.Module, bool | None] = {}  # None: frozen TorchScript, which has no flag
        entries: list[Entry] = []
        stack: list[Any] = [*inputs.modules]
        while stack:
            module = stack.pop()
            if module is None or module in flags:
                continue
            flags[module] = getattr(module, "training", None)
            children, parameters, buffers = _parts_of(module)
            stack += children.values()
            for parameter in parameters.values():
                if parameter is not None and not parameter.is_cpu:
                    inputs.devices |= {parameter.device}
            if type(module).__module__[:6] != "torch.":  # no module of torch has a generator
                inputs.generators += _generators_of(module)
            if buffers:
                entries.append((module, dict(buffers)))
        self._flags = flags
        self._parameters = _parameters_of(flags)
        self._trained = [tensor for tensor in self._parameters if tensor.requires_grad]
        self._versions = _versions_of(self._trained)
        self._entries: Sequence[Entry] = ()  # few objects for the garbage collector
        self._guarded: Sequence[Guarded] = ()
        self._then = _NOTHING
        if entries:
            self._capture(entries)

    def _capture(self, entries: list[Entry]) -> None:
        """Copy the buffers that can be rewound, and note the versions of the others."""
        guarded: list[Guarded] = []
        small: list[Tensor] = []  # two that share memory are rewound twice, to the same values
        for module, buffers in entries:
            limit: float = _SMALL
            if isinstance(module, _LEAVES_NO_TRACE):
                limit = math.inf if self._flags[module] else _NONE
            for name, tensor in buffers.items():
                if tensor is None:
                    continue
                if _can_be_rewound(tensor) and tensor.nbytes <= limit:
                    small.append(tensor)
                else:
                    guarded.append((module, name, tensor, _version(tensor)))
        self._entries = entries
        self._guarded = guarded or ()
        if small:
            self._then = Moment.of(small)

    def end(self) -> None:
        """The region has run: the parameters that it has not written stay as they are from here
        on."""
        if self._versions != _versions_of(self._trained):
            pairs = zip(self._trained, self._versions, strict=True)
            self._trained = [tensor for tensor, version in pairs if _version(tensor) == version]
            self._versions = _versions_of(self._trained)

    def written(self, frame: object) -> list[Tensor]:
        """The parameters that train and have been written since the forward."""
        now = _parameters_of(self._flags)
        if len(now) != len(self._parameters) or not all(map(operator.is_, now, self._parameters)):
            self._check_places(now, frame)
        trained, versions = self._trained, self._versions
        if versions == _versions_of(trained):
            return []
        pairs = zip(trained, versions, strict=True)
        return [tensor for tensor, version in pairs if _version(tensor) != version]

    def _check_places(self, now: list[Tensor], frame: object) -> None:
        """Tensors in the place of parameters must be there still, and frozen parameters must have
        the same values. (Hooks may gather parameters, or bring them in for each call.)"""
        present = {*map(id, now)}
        for tensor, other in zip(self._parameters, now, strict=False):
            is_gone = not isinstance(tensor, _Parameter) and id(tensor) not in present
            if is_gone or (tensor is not other and _is_another(tensor, other)):
                raise errors.exchanged(frame, named("a parameter", tensor))

    def __bool__(self) -> bool:
        """Whether there is anything to rewind."""
        return self._then is not _NOTHING

    def storages(self) -> set[int]:
        """The storages of the buffers that are rewound."""
        tensors = self._then.tensors
        if {*map(type, tensors)} != _PLAIN:
            tensors = [part for tensor in tensors for part in _torch.plain_parts(tensor)]
        return set(map(_torch.storage_id, tensors))

    def copies(self) -> list[Tensor]:
        return self._then.values

    def enter(self, frame: object, undo: Undo) -> None:
        """Go back to the forward; `undo` gets the functions that return."""
        for module, name, tensor, version in self._guarded:
            if _version(tensor) != version:
                buffer = named((type(module).__name__, Field(name)), tensor)
                raise errors.changed(frame, buffer, version, _version(tensor))
        flags = {module: getattr(module, "training", None) for module in self._flags}
        if flags != self._flags:
            undo.append((_set_flags, flags))
            _set_flags(self._flags)
        if not self._entries:
            return
        now = [(module, dict(_torch.buffers_of_module(module)[0])) for module, _ in self._entries]
        undo.append((_set, now))
        _set(self._entries)
        if self:
            then = self._then
            undo.append((Moment.go_back, Moment(then.tensors, then.memory)))
            then.go_back()


def _parameters_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    found = []
    for module in modules:
        stored = _parts_of(module)[1]
        if stored:
            found += [tensor for tensor in stored.values() if tensor is not None]
    return found


def _is_another(tensor: Tensor, other: Tensor) -> bool:
    """Whether a frozen parameter is in the place of another frozen one, with other values."""
    if not type(tensor) is type(other) is _Parameter or tensor.requires_grad:
        return False
    if not _torch.memory_size(tensor) or not _torch.are_alike(tensor, other):
        return False
    return not _torch.same_bits(tensor, other)


def _versions_of(tensors: list[Tensor]) -> tuple[int, ...]:
    try:
        return tuple(map(_version_of, tensors))
    except RuntimeError:  # some are made in inference mode
        return tuple(map(_version, tensors))


def _generators_of(module: nn.Module) -> tuple[torch.Generator, ...]:
    """The generators in attributes of a module, and in lists and dicts there."""
    parts = [*islice(vars(module).values(), _OF_EVERY_MODULE, None)]
    if _MAY_HOLD_ONE.isdisjoint(map(type, parts)):
        return ()
    for part in tuple(parts):
        if type(part) in (list, tuple, dict):
            items = part.values() if type(part) is dict else part
            parts += islice(items, _MOST_ITEMS)
    return tuple([part for part in parts if type(part) is _Generator])


def _can_be_rewound(tensor: Tensor) -> bool:
    if tensor.is_nested or _torch.is_lazy(tensor):
        return False
    return _has_storage(tensor) and not tensor.is_inference()


def _set_flags(flags: dict[nn.Module, bool | None]) -> None:
    for module, is_training in flags.items():
        if is_training is not None:
            module.training = is_training


Entry = tuple[nn.Module, dict[str, Any]]  # a module, with the buffers that it had
Guarded = tuple[nn.Module, str, Tensor, int]  # a module, the name of a buffer, it, and its version


def _set(entries: Iterable[Entry]) -> None:
    """Give the modules these buffers, where others have been set. A buffer that is not persistent
    is a cache that an attribute describes (the length of rotary embeddings): it stays as it is."""
    for module, then in entries:
        store, caches = _torch.buffers_of_module(module)
        now = dict(store)
        if now.keys() == then.keys() and all(map(operator.is_, now.values(), then.values())):
            continue
        if isinstance(store, dict):  # a scripted module can have no other names
            store.clear()
        for name, tensor in {**then, **{name: now[name] for name in caches & now.keys()}}.items():
            store[name] = tensor


_PLAIN = {Tensor}


class Moment:
    """The values, sizes and versions of tensors at one moment."""

    def __init__(self, tensors: list[Tensor], memory: list[Tensor]) -> None:
        self.tensors = tensors
        self.memory = memory
        self.values: list[Tensor] = without_recording(lambda: [*map(_torch.copy, memory)])
        self._versions = [tensor._version for tensor in tensors]

    @classmethod
    def of(cls, tensors: list[Tensor]) -> Moment:
        return cls(tensors, [t if _is_dense(t) else _torch.bytes_of(t) for t in tensors])

    def go_back(self) -> None:
        without_recording(_torch.overwrite, self.memory, self.values)
        _torch.set_versions(self.tensors, self._versions)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory, without gaps. Else the whole storage counts."""
    if type(tensor) is not Tensor:
        return True
    return tensor.is_contiguous() and not tensor.is_complex()


_NOTHING = Moment([], [])
