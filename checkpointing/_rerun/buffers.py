"""Modules in a rerun: training flags, buffers, which the region writes only once, and parameters.

Invariant: a rerun finds the tensors and modules of the forward as they were then, and leaves them
as they are now.

Rejected: exchanging the buffers for copies. Aliases, views and caches keyed by a tensor would still
refer to the originals.
"""

from collections.abc import Collection, Set
from functools import partial
from itertools import compress, filterfalse, islice
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch, errors
from .._engine import Aliased, Field, Undo, is_another, named, without_recording
from .inputs import Inputs, items_of

_Numbers = dict[str, list[Any]]  # by attribute

_NUMERIC = {int, float, torch.Size}  # neither flags nor names
_MAY_HOLD_ONE = {torch.Generator, list, tuple, dict}
_OF_EVERY_MODULE = len(vars(nn.Module()))  # attributes, before its own
_SMALL = 1 << 16  # bytes: cheap to copy before every forward
_LEAVES_NO_TRACE = (_torch.Normalisation, torch.jit.ScriptModule)  # kernels bypass version counters


class Moment:
    """The values, sizes and versions of tensors at one moment: of their whole storages, if asked,
    or where they have gaps."""

    def __init__(self, tensors: list[Tensor], whole: bool = False) -> None:
        self.tensors = tensors
        self._versions = [tensor._version for tensor in tensors]
        memory = [_torch.bytes_of(t) if whole or not _is_dense(t) else t for t in tensors]
        self._memory = [*filterfalse(_torch.was_given_back, memory)]
        plain = [tensor for tensor in tensors if type(tensor) is Tensor]
        self.values, self._aliases = without_recording(
            lambda: ([*map(Tensor.clone, self._memory)], [(each, each.data) for each in plain])
        )

    def written(self) -> list[Tensor]:
        """Those that have been written since."""
        pairs = zip(self.tensors, self._versions, strict=True)
        return [tensor for tensor, version in pairs if tensor._version != version]

    def changed(self) -> list[Tensor]:
        """Those that have other values now."""
        pairs = zip(self._memory, self.values, strict=True)
        return [
            tensor
            for tensor, value in pairs
            if _torch.are_alike(tensor, value)
            and not without_recording(_torch.same_bits, tensor, value)
        ]

    def go_back(self) -> None:
        for tensor, alias in self._aliases:  # a function may have moved it (`buffer.data = ...`)
            if _torch.storage_id(tensor) != _torch.storage_id(alias):
                tensor.data = alias
        there = [not _torch.was_given_back(each) for each in self._memory]
        if any(there):
            memory, values = [*compress(self._memory, there)], [*compress(self.values, there)]
            without_recording(_torch.overwrite, memory, values)
        _torch.set_versions(self.tensors, self._versions)


class Buffers:
    """The modules that a region runs, as they were before it.

    Buffers of up to 64 KiB are copied, and rewound in place during the rerun. So the region writes
    them once (rule 7), and aliases, views and caches keyed by the tensor stay valid. Larger ones,
    and those of torch's normalisations in evaluation mode, are guarded by version.
    """

    then = Moment([])  # the buffers that are rewound
    _with_graph: Collection[Tensor] = ()  # those that the region has written with a gradient
    rewound: Set[int] = frozenset()  # their storages, in a rerun
    _has_ended = False

    def __init__(self, inputs: Inputs) -> None:
        """Capture `inputs.modules` and their children; add their devices and generators to
        `inputs`."""
        flags: dict[nn.Module, Any] = {}  # None: frozen TorchScript, which has no flag
        # With the buffers they had, and the numbers beside these.
        self._entries: list[tuple[nn.Module, dict[str, Any], _Numbers]] = []
        # By module and name; also tensors in the place of parameters.
        self._parameters: list[tuple[nn.Module, str, Tensor]] = []
        modules: list[nn.Module | None] = [*inputs.modules]
        for module in modules:
            if module is None or module in flags:
                continue
            flags[module] = getattr(module, "training", None)
            children, own, buffers = _torch.parts_of_module(module)
            if children:
                modules += children.values()
            for name, tensor in own.items():
                if tensor is not None:
                    self._parameters.append((module, name, tensor))
            if type(module).__module__[:6] != "torch.":  # no module of torch has a generator
                inputs.generators += _generators_of(module)
            if buffers:
                self._entries.append((module, dict(buffers), _numbers_of(module)))
        self._flags = flags
        tensors = [tensor for *_, tensor in self._parameters]
        inputs.devices |= {tensor.device for tensor in tensors if not tensor.is_cpu}
        self._states = [(each, each.requires_grad, _torch.version(each)) for each in tensors]
        self._own: list[Tensor] = []  # parameters that the region has written
        self._guarded: list[Aliased] = []
        if self._entries:
            self._capture()

    def refuse_unseen_dropout(self, frame: object) -> None:
        """Raise for random numbers that come from no generator: cuDNN has a state of its own for
        dropout between recurrent layers."""
        for module in self._flags:
            if isinstance(module, nn.RNNBase):
                draws = module.training and module.dropout
                if draws and module.num_layers > 1:
                    raise errors.unseen_dropout(frame, module)

    def _capture(self) -> None:
        """Copy the buffers that can be rewound, and note the versions of the others."""
        small = []  # two that share memory are rewound twice, to the same values
        for module, buffers, _ in self._entries:
            for name, tensor in buffers.items():
                if tensor is None:
                    continue
                if _can_be_rewound(module, tensor):
                    small.append(tensor)
                else:
                    full_name = type(module).__name__, Field(name)
                    self._guarded.append(Aliased(tensor, full_name))
        if small:
            self.then = Moment(small)

    def present(self) -> dict[tuple[nn.Module, str, int, int], Tensor | None]:
        """The present buffers: by module, name, id, and the version of those that are not
        rewound. So one that is set or written has another key than before."""
        rewound = {id(None), *map(id, self.then.tensors)}
        found = {}
        for module, *_ in self._entries:
            for name, tensor in _torch.buffers_of_module(module)[0].items():
                version = 0 if id(tensor) in rewound else _torch.version(tensor)
                found[module, name, id(tensor), version] = tensor
        return found

    def end(self) -> None:
        """The region has run. Parameters that it has written or set itself are not guarded."""
        states, self._states = self._states, []
        for tensor, required_grad, version in states:
            if _torch.version(tensor) != version:
                self._own.append(tensor)
            elif required_grad or not tensor.requires_grad:
                self._states.append((tensor, required_grad, version))
        self._parameters = [each for each in self._parameters if _is_there(*each)]
        self._see_what_has_grown()
        self._with_graph = [each for each in self.then.written() if not each.is_leaf]
        self._has_ended = True

    def _see_what_has_grown(self) -> None:
        """Where a number has changed, a buffer that is not persistent and has been set anew is a
        cache that the number describes (the length of rotary embeddings): a rerun finds the one
        that the region has left."""
        for module, buffers, numbers in self._entries:
            buffers.update(_grown(module, numbers, buffers))

    def written(self) -> list[tuple[Tensor, str]]:
        """The parameters that train, and have been written since the forward or were frozen in it;
        with what of each has changed, for messages."""
        changes = [(each[0], _change_of(*each)) for each in self._states]
        return [(tensor, what) for tensor, what in changes if what is not None]

    def check_parameters(self, frame: object, trained: bool) -> None:
        """Raise if another tensor is in the place of a parameter; `trained`: of those that train,
        which the recompute tells apart where it saves them.

        Tensors in the place of parameters must be there still, and other parameters must have the
        same values. (Hooks may gather parameters, or bring them in for each call.)
        """
        for module, name, tensor in self._parameters:
            if _is_there(module, name, tensor):
                continue
            other: Any = getattr(module, name, None)
            is_parameter = isinstance(tensor, nn.Parameter)
            if (is_parameter and tensor.requires_grad) is not trained:
                continue
            if is_parameter:
                # One that looks different may be a placeholder, until a hook brings a weight in.
                is_wrong = is_another(tensor, other) and _torch.are_alike(tensor, other)
            else:
                now = [each for owner in self._flags for each in owner._parameters.values()]
                # FSDP1 makes it an attribute for backward.
                is_wrong = other is not tensor and id(tensor) not in map(id, now)
            if is_wrong:
                full_name = f"the parameter {type(module).__name__}.{name}"
                raise errors.exchanged(frame, named(full_name, tensor))

    def enter(self, frame: object, undo: Undo) -> None:
        """Go back to the forward; `undo` gets the functions that return."""
        if not self._has_ended:
            self._see_what_has_grown()
        for buffer in self._guarded:
            buffer.fetch(frame)
        for tensor in self._with_graph:  # which no rerun could put back
            raise errors.changed(frame, named("a buffer, with a gradient,", tensor))
        statistics = [*filter(_may_be_statistics, [buffer.packed for buffer in self._guarded])]
        if statistics:
            undo.append((Moment.go_back, Moment(statistics)))
        flags = {module: getattr(module, "training", None) for module in self._flags}
        undo.append((_set_flags, flags))  # the function may set them, too, and be stopped
        _set_flags(self._flags)
        for module, buffers, _ in self._entries:
            now = dict(_torch.buffers_of_module(module)[0])
            undo.append((partial(_put_back, module, _numbers_of(module), buffers), now))
            _set(module, buffers)
        if self._own:
            undo.append((partial(_leave_own, frame), Moment(self._own)))
        if self.then.tensors:
            parts = [part for each in self.then.tensors for part in _torch.plain_parts(each)]
            self.rewound = {*map(_torch.storage_id, parts)}
            undo.append((Moment.go_back, Moment(self.then.tensors)))
            self.then.go_back()


def _change_of(tensor: Tensor, required_grad: bool, version: int) -> str | None:
    """What of a parameter has changed that a function may notice, for messages."""
    if tensor.requires_grad and not required_grad:
        return "`requires_grad` of "
    return "" if required_grad and _torch.version(tensor) != version else None


def _is_there(module: nn.Module, name: str, tensor: Tensor) -> bool:
    """Whether a tensor is still in the place of a parameter."""
    there = module._parameters
    return name in there and there[name] is tensor


def _generators_of(module: nn.Module) -> tuple[torch.Generator, ...]:
    """The generators in attributes of a module, and in lists and dicts there."""
    parts = [*islice(vars(module).values(), _OF_EVERY_MODULE, None)]
    if _MAY_HOLD_ONE.isdisjoint(map(type, parts)):
        return ()
    return tuple(
        [
            each
            for part in parts
            for each in (part, *items_of(part))
            if type(each) is torch.Generator
        ]
    )


def _can_be_rewound(module: nn.Module, tensor: Tensor) -> bool:
    if tensor.is_nested or _torch.is_lazy(tensor):
        return False
    if tensor.is_inference() or not _torch.has_storage(tensor):
        return False
    if isinstance(module, _LEAVES_NO_TRACE):
        return bool(getattr(module, "training", None))
    if not _is_dense(tensor):
        return _torch.memory_size(tensor) <= _SMALL
    is_there = type(tensor) is not Tensor or not _torch.was_given_back(tensor)
    return tensor.nbytes <= _SMALL and is_there


def _may_be_statistics(tensor: Tensor) -> bool:
    """Whether `F.batch_norm` may write a large buffer, which no version shows."""
    if type(tensor) is not Tensor or tensor.is_inference() or _torch.memory_size(tensor) <= _SMALL:
        return False
    return tensor.dim() == 1 and tensor.is_floating_point() and _is_dense(tensor)


def _leave_own(frame: object, entered: Moment) -> None:
    """Put back parameters that the region has written in the forward. A rerun begins with what that
    has left, and must not write anything else: whatever it has read of them would be wrong."""
    changed = entered.changed()
    entered.go_back()
    for tensor in changed:
        raise errors.changed(frame, named("a parameter that the function writes", tensor))


def _set_flags(flags: dict[nn.Module, Any]) -> None:
    for module, is_training in flags.items():
        if getattr(module, "training", None) is not is_training:
            module.training = is_training


def _numbers_of(module: nn.Module) -> _Numbers:
    """Numbers and sizes in the attributes of a module that has caches."""
    if not _torch.buffers_of_module(module)[1]:
        return {}
    found = {
        name: [part] if type(part) in _NUMERIC else [*items_of(part)]
        for name, part in vars(module).items()
    }
    return {
        name: parts
        for name, parts in found.items()
        if parts and _NUMERIC.issuperset(map(type, parts))
    }


def _grown(module: nn.Module, numbers: _Numbers, then: dict[str, Any]) -> dict[str, Any]:
    """The caches that a module has set anew, and described by other numbers, since it had these."""
    if numbers == _numbers_of(module):
        return {}
    now, caches = _torch.buffers_of_module(module)
    return {name: now[name] for name in caches & now.keys() if now[name] is not then.get(name)}


def _put_back(
    module: nn.Module, numbers: _Numbers, entered: dict[str, Any], before: dict[str, Any]
) -> None:
    """Give a module the buffers that it had before the rerun, which it entered with others; but
    caches that the rerun has grown stay."""
    _set(module, {**before, **_grown(module, numbers, entered)})


def _set(module: nn.Module, buffers: dict[str, Any]) -> None:
    """Give a module these buffers, if others have been set."""
    store = _torch.buffers_of_module(module)[0]
    now = dict(store)
    if now.keys() == buffers.keys() and all(map(is_, now.values(), buffers.values())):
        return
    if isinstance(store, dict):  # a scripted module can have no other names
        store.clear()
    for name, tensor in buffers.items():
        store[name] = tensor


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory, without gaps. Else the whole storage counts."""
    if type(tensor) is not Tensor:
        return True
    return tensor.is_contiguous() and not tensor.is_complex()
