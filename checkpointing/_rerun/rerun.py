"""A rerun: the function is called again.

It gets back its arguments and the variables that it closes over, guarded by version; random and
ambient state; the buffers of modules in training mode, rewound in place while it runs; values given
to `keep`, and results of `forward_only` functions. Everything else that the function reads
(globals, attributes, the inside of your own objects) is as backward finds it.

Invariant: of the user's objects, a recompute changes only buffers, variables that the function
closes over, the `requires_grad` of arguments for which the function has changed it, and random and
ambient state, all in place, and puts them back. It may refuse other changes, at the slot that needs
them, but it never makes any.

Rejected: a search for everything that a function may read or write. It has no end in Python, costs
more than the region, and exchanges objects that belong to others (FSDP's shards, caches).
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import Context
from functools import partial
from typing import Any, Literal

from torch import Tensor, is_grad_enabled

from .. import _torch, errors
from .._engine import (
    CPU_RNG,
    Frame,
    Generators,
    Held,
    Holder,
    Holding,
    Region,
    Task,
    Undo,
    is_parameter,
    name_of,
    named,
    note_written,
    put_together,
    rngs_of,
    take_apart,
    tensors_in,
    thread,
    undo_all,
    without_recording,
)
from .ambient import Ambient
from .buffers import Buffers, Moment
from .inputs import Cells, Inputs, contents_of, fill
from .pins import Pin, Repeated, Result, given_to, without_slots
from .slots import Calling, Slots

PreserveRngState = bool | Literal["all"]


class Call(Inputs):
    """One call of a function: its inputs, and the state in which it runs."""

    _written: Mapping[Held, int | None] = {}  # inputs that the function writes; their storages
    _asked: Collection[Held] = ()  # inputs of which it changes `requires_grad` itself

    def __init__(
        self, function: Any, args: Any, kwargs: Any, preserve_rng_state: PreserveRngState
    ) -> None:
        super().__init__()
        self._hooks = _torch.enclosing_hooks()
        while type(function) is partial:
            args = (*function.args, *args)
            kwargs, function = {**function.keywords, **kwargs}, function.func
        self._function = function
        met: dict[int, Any] = {}  # a container that is two arguments stays one
        self._args = [take_apart(v, self.hold, ("args", i), met) for i, v in enumerate(args)]
        self._kwargs = {k: take_apart(v, self.hold, ("kwargs", k), met) for k, v in kwargs.items()}
        self._variables = self.capture(function)
        self._buffers = Buffers(self)
        self.ambient = Ambient()
        self._preserve_rng_state = preserve_rng_state
        self._rng = self.random()

    def random(self) -> Generators:
        """The present states of the generators that a recompute puts back."""
        if not self._preserve_rng_state:
            return Generators([])
        rngs = [CPU_RNG, *rngs_of(self.devices, self.generators)]
        return Generators(rngs, self._preserve_rng_state == "all")

    def end(self) -> None:
        """The function has run. Note the inputs in storages that it has written: its recompute gets
        copies."""
        self._buffers.end()
        given = self._given.values()
        self._asked = [
            held
            for tensor, version, held in given
            if tensor.requires_grad is not self.inputs[held] and _torch.version(tensor) == version
        ]
        changed = [tensor for tensor, version, _ in given if _torch.version(tensor) != version]
        if changed:
            written = {*map(_torch.storage_of, changed)} - {None}
            self._written = {
                held: storage
                for tensor, _, held in given
                if (storage := _torch.storage_of(tensor)) in written
            }
            note_written(self._hooks, written)
        self._given = {}

    def restored(self, frame: object, undo: Undo) -> tuple[partial[Any], Cells]:
        """The function with its arguments, and the variables that it closes over; `undo` gets the
        functions that undo what that takes."""
        copies = _torch.Copies()  # of what it writes, since others may read the fetched tensor
        storages: dict[int | None, int] = {}  # by the storage in the forward
        fetched: dict[Held, Tensor] = {}
        for held, required_grad in self.inputs.items():
            tensor = held.fetch(frame)
            if tensor.requires_grad is not required_grad:
                # For a backward inside, too, the function may have changed that itself.
                if not (self._given or held in self._asked):
                    raise errors.changed(frame, f"`requires_grad` of {named(held.name, tensor)}")
                undo.append((tensor.requires_grad_, tensor.requires_grad))
                tensor.requires_grad_(required_grad)
            if held in self._written:
                storage = _torch.storage_id(tensor)
                if storages.setdefault(self._written[held], storage) != storage:
                    # Hooks have made two storages of one.
                    raise errors.changed(frame, named(held.name, tensor))
                tensor = _torch.in_place_of(tensor, without_recording(copies.of, tensor))
            fetched[held] = tensor

        def fetch(saved: Any) -> Any:
            return fetched[saved] if isinstance(saved, Held) else saved

        met: dict[int, Any] = {}
        args = [put_together(saved, fetch, met) for saved in self._args]
        kwargs = {key: put_together(saved, fetch, met) for key, saved in self._kwargs.items()}
        cells = [(cell, fetch(saved)) for cell, saved in self._variables]
        return partial(self._function, *args, **kwargs), cells

    def go_back(self, frame: object, cells: Cells, undo: Undo) -> Context:
        """Enter the state of the forward; `undo` gets the functions that leave it. Returns the
        context to run in."""
        if cells:
            undo.append((fill, [(cell, contents_of(cell)) for cell, _ in cells]))
            fill(cells)  # in place: other functions may share them
        undo.append((_torch.set_grad_enabled, is_grad_enabled()))
        _torch.set_grad_enabled(True)
        self._buffers.enter(frame, undo)
        context = self.ambient.enter(undo)
        self._rng.enter(undo)
        return context


class Rerun(Region, Call, Slots):
    """A region whose function is called again."""

    pins: tuple[Pin, ...] = ()
    results: tuple[Result, ...] = ()
    _is_aside = False  # in a `forward_only` function, by which no recompute comes

    def __init__(
        self, function: Any, args: Any, kwargs: Any, preserve_rng_state: Any, *about: Any
    ) -> None:
        Frame.__init__(self, *about)
        self.inner_inputs = {}
        self.policy = getattr(thread.region, "policy", None)
        Call.__init__(self, function, args, kwargs, preserve_rng_state)
        if preserve_rng_state and "cuda" in {device.type for device in self.devices}:
            self._buffers.refuse_unseen_dropout(self)

    def keep(self, tensor: Tensor) -> Tensor:
        if self._is_aside or is_parameter(tensor):
            return tensor
        tensor = super().pin(tensor)
        self.pins += (Pin(tensor, self._hooks, "a value given to keep()"),)
        return tensor

    pin = keep

    def keep_for_inner(self, tensor: Tensor) -> None:
        """Do nothing: a rerun enters the inner region again, which keeps the value again."""

    def once(self, function: Any, args: Any, kwargs: Any) -> Any:
        if self._is_aside:
            return without_slots(function, args, kwargs, self.outer)
        result, before = Result(name_of(function)), self.random()
        self.results += (result,)
        given = given_to(args, kwargs)
        tensors = [
            (place, part, _torch.version(part))
            for place, part in given.items()
            if isinstance(part, Tensor)
        ]
        present = self._buffers.present()
        self._is_aside = True
        try:
            value = without_slots(function, args, kwargs, self.outer)
        finally:
            self._is_aside = False
        if before.have_moved():
            result.after = self.random()
        for place, tensor, version in tensors:
            if _torch.version(tensor) != version:
                result.note_written(place, tensor)
        result.buffers = Moment(self._buffers.then.tensors)
        for key, buffer in self._buffers.present().items():
            if key not in present:
                result.note_set(*key[:2], buffer)
        result.save(value, given, self._hooks)
        return value

    def recompute(self, holder: Holder, task: Task) -> None:
        calling = Calling(self, holder, task)
        undo: Undo = []
        try:
            call, cells = self.restored(self, undo)
            self._buffers.check_parameters(self, trained=False)
            if written := self._buffers.written():
                inputs = call.args, call.keywords, [value for _, value in cells]
                calling.refuse(written, tensors_in(inputs))
            context = self.go_back(self, cells, undo)
            calling.rewound = self._buffers.rewound
            if any([self.pins, self.results, self.policy, not self.complete]):
                thread.region = Repeated(self)
            if self.context is not None:
                call = partial(call_within, self.context, call)
            calling.call(partial(context.run, call))
            self._buffers.check_parameters(self, trained=True)
        finally:
            # Its hooks live as long as the graph of the call, perhaps in an attribute of a module.
            vars(calling).clear()
            undo_all(undo)

    def holdings(self) -> Iterable[Holding]:
        pins = [*self.pins, *[pin for result in self.results for pin in result.pins]]
        for kind, found in (("input", self.inputs), ("kept", [pin.held for pin in pins])):
            for held in found:
                if not held.is_parameter:
                    yield Holding(kind, held, named(held.name))
        yield from [Holding("random state", state) for state in self._rng.states]
        for moment in [self._buffers.then, *[result.buffers for result in self.results]]:
            yield from [Holding("buffers", copy) for copy in moment.values]


def call_within(
    context: AbstractContextManager[Any], function: Any, /, *args: Any, **kwargs: Any
) -> Any:
    with context:
        return function(*args, **kwargs)
    raise errors.suppressed()
