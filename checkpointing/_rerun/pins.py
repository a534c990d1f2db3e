"""Values that a rerun takes over from the forward: those given to `keep`, and the results of
`forward_only` functions.

The forward saves them in order, and the function meets them in the same order when it is called
again. Where a `forward_only` function returned its arguments, or views of them, the recompute gets
its own arguments, or the same views of them.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch, errors
from .._engine import (
    ATOMS,
    Aliased,
    Frame,
    Generators,
    Name,
    Region,
    hold,
    identity,
    is_parameter,
    name_of,
    named,
    put_together,
    take_apart,
    tensors_in,
    within,
    without_recording,
)
from .buffers import Moment

Place = tuple[int, int]  # of an argument, and of a tensor in it


class Pin:
    """A value of the forward that the rerun takes over."""

    def __init__(self, tensor: Tensor, hooks: _torch.Hooks | None, name: Name) -> None:
        self.held = hold(tensor, hooks, name)
        self.in_graph = tensor.requires_grad and not tensor.is_leaf
        self.live = weakref.ref(tensor)

    def restored(self, tensor: Tensor) -> Tensor:
        """A fetched tensor that the recompute may write. (The forward did not write one that is no
        copy.)"""
        if tensor.requires_grad:  # a leaf
            return tensor
        copy = _torch.alias if type(self.held) is Aliased else _torch.copy
        data = without_recording(copy, tensor)
        if not self.in_graph:
            return data
        with torch.enable_grad():
            node = data.new_zeros((), requires_grad=True).clone()
        return _torch.in_place_of(node, data)


class Passed:
    """An argument that a `forward_only` function returned, or a view of it: its geometry."""

    layout: Any = None

    def __init__(self, place: Place, argument: Any, part: Any) -> None:
        self.place = place
        if part is not argument:
            offset = part.storage_offset() - argument.storage_offset()
            self.layout = part.shape, part.stride(), offset
            self.in_graph = part.requires_grad

    def of(self, given: dict[Place, Any]) -> Any:
        argument = given[self.place]
        if self.layout is None:
            return argument
        size, stride, offset = self.layout
        with torch.enable_grad():
            base = argument if self.in_graph else argument.detach()
            return base.as_strided(size, stride, offset + base.storage_offset())


class Result:
    """The result of one call of a `forward_only` function."""

    value: Any  # once it has returned
    after: Generators | None = None  # the generators after the call, if it drew numbers
    buffers = Moment([])  # rewound ones after the call

    def __init__(self, name: str) -> None:
        self.name = name  # of the function
        self.pins: list[Pin] = []
        # Tensors in its arguments that it wrote: their places, memory, and what it left in them.
        self.written: list[tuple[Place, weakref.ref[Any], Pin]] = []
        # Buffers that it set: their modules, names, and copies.
        self.set: list[tuple[nn.Module, str, Pin | None]] = []

    def note_written(self, place: Place, tensor: Tensor) -> None:
        """The call has written a tensor in its arguments."""
        self.written.append((place, weakref.ref(_torch.memory_of(tensor)), self._pinned(tensor)))

    def note_set(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        """The call has set or written a buffer."""
        self.set.append((module, name, None if tensor is None else self._pinned(tensor)))

    def _pinned(self, tensor: Tensor) -> Pin:
        # No hooks: a rerun around this region may write nothing here.
        pin = Pin(_copied(tensor), None, "what a forward_only function wrote")
        pin.in_graph = tensor.requires_grad
        self.pins.append(pin)
        return pin

    def write_again(self, frame: Frame, given: dict[Place, Any]) -> None:
        """Leave in buffers, and in these tensors of the arguments, what the call left there."""
        self.buffers.go_back()
        for module, name, pin in self.set:
            copy = None if pin is None else pin.restored(_copied(pin.held.fetch(frame)))
            _torch.buffers_of_module(module)[0][name] = copy
        for place, there, pin in self.written:
            tensor = given[place]
            if there() is _torch.memory_of(tensor):  # it is from outside: it stays
                continue
            value = pin.held.fetch(frame)
            if pin.in_graph and not tensor.requires_grad:
                with torch.enable_grad():
                    tensor.copy_(pin.restored(value))
            else:
                without_recording(Tensor.copy_, tensor, value)

    def save(self, value: Any, given: dict[Place, Any], hooks: _torch.Hooks | None) -> None:
        passed = {id(v): Passed(i, v, v) for i, v in given.items() if type(v) not in ATOMS}

        def save(part: Any, _: Name) -> Any:
            if id(part) in passed:  # the recompute has its own
                return passed[id(part)]
            if not isinstance(part, Tensor):
                return part
            for place, value in given.items():
                if not isinstance(value, Tensor) or value.requires_grad < part.requires_grad:
                    continue  # a gradient would come from elsewhere
                if _torch.lies_in(part, value):
                    return Passed(place, value, part)
            pin = Pin(part, hooks, "the result of a forward_only function")
            self.pins.append(pin)
            return pin

        self.value = passed.get(id(value)) or take_apart(value, save)


class Repeated(Region):
    """The region of a rerun: returns the kept values of the forward, in order."""

    def __init__(self, frame: Any) -> None:
        self._pins, self._results = iter(frame.pins), iter(frame.results)
        self.policy = frame.policy  # regions inside must keep the same values as in the forward
        self._frame: Frame = frame

    def keep(self, tensor: Tensor) -> Tensor:
        if is_parameter(tensor):
            return tensor
        pin: Pin | None = next(self._pins, None)
        if pin is None:  # the forward still runs, and has not come so far
            return tensor
        with within(None):  # hooks may call functions again (rule 3)
            value = pin.held.fetch(self._frame)
        ours, theirs = _torch.plain_parts(tensor), _torch.plain_parts(value)
        if not all(map(_torch.are_alike, ours, theirs)):
            return pin.restored(value)
        for one, other in zip(ours, theirs, strict=True):
            if without_recording(_torch.same_bits, one, other):
                continue
            if pin.live() is tensor:  # it existed before the recompute, and has been changed
                raise errors.changed(self._frame, named(pin.held.name, tensor))
            without_recording(_torch.write, one, other)
        return tensor

    pin = keep

    def once(self, function: Any, args: Any, kwargs: Any) -> Any:
        name = name_of(function)
        result = next(self._results, Result(name))
        if result.name != name:
            raise errors.not_recorded(self._frame, name)
        if not hasattr(result, "value"):
            if not self._frame.complete:  # a rerun for a backward inside the region
                return without_slots(function, args, kwargs)
            raise errors.not_recorded(self._frame, name)
        if result.after is not None:
            result.after.enter([])
        given = given_to(args, kwargs)

        def restore(saved: Any) -> Any:
            if type(saved) is Passed:
                return saved.of(given)
            if type(saved) is Pin:
                return saved.restored(saved.held.fetch(self._frame))
            return saved

        with within(None):
            result.write_again(self._frame, given)
            return put_together(result.value, restore)


def given_to(args: Any, kwargs: Any) -> dict[Place, Any]:
    """The arguments, and the tensors in them. (By place, since a list may have grown meanwhile.)"""
    found: dict[Place, Any] = {}
    for number, argument in enumerate([*args, *kwargs.values()]):
        found[number, -1] = argument
        if not isinstance(argument, Tensor):
            found |= {(number, i): tensor for i, tensor in enumerate(tensors_in(argument))}
    return found


def _copied(tensor: Tensor) -> Tensor:
    return without_recording(_torch.copy, tensor)


def without_slots(function: Any, args: Any, kwargs: Any, outer: Region | None = None) -> Any:
    """Call a function that recomputes skip: tensors saved in it are no slots."""
    # A graph that owned a live output would be a cycle.
    _torch.push_hooks(Tensor.detach, identity)
    try:
        if outer is not None:
            return outer.once(function, args, kwargs)
        return function(*args, **kwargs)
    finally:
        _torch.pop_hooks()
