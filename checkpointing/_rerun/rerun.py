"""A rerun: the function is called again.

It gets back its arguments and the variables that it closes over, guarded by version; random and
ambient state; the buffers of modules in training mode, rewound in place while it runs; values given
to `keep`, and results of `forward_only` functions. Everything else that the function reads
(globals, attributes, the inside of your own objects) is as backward finds it.

Invariant: of the user's objects, a recompute changes only buffers, variables that the function
closes over, and random and ambient state, all in place, and puts them back. It may refuse other
changes, at the slot that needs them, but it never makes any.

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
    Frame,
    Generators,
    Held,
    Holding,
    Region,
    Request,
    Undo,
    has_rng,
    hold_argument,
    is_parameter,
    leaves_of,
    named,
    note_written,
    put_together,
    root_of,
    take_apart,
    tensors_in,
    thread,
    undo_all,
)
from .ambient import Ambient
from .buffers import Buffers
from .inputs import Cells, Fetched, Given, Inputs, contents_of, fill
from .pins import Pin, Repeated, Result, without_slots
from .slots import Calling, Leaves, Slots

PreserveRngState = bool | Literal["all"]


class Call(Inputs):
    """One call of a function: its inputs, and the state in which it runs."""

    _buffers = None
    _cpu_state: Tensor | None = None
    _rng: Generators | None = None
    _draws_python = False  # whether the generators of Python and NumPy are put back, too
    _written: Mapping[Held, int] = {}  # inputs that the function has written, with their storages

    def __init__(
        self, function: Any, args: Any, kwargs: Any, preserve_rng_state: PreserveRngState
    ) -> None:
        self._hooks = hooks = _torch.enclosing_hooks()
        while type(function) is partial:
            args = (*function.args, *args)
            kwargs, function = {**function.keywords, **kwargs}, function.func
        self._function = function
        if hooks is not None:
            self._given = {}
        met: dict[int, Any] = {}  # a container that is two arguments stays one
        self._args = []
        for i, value in enumerate(args):
            name = ("args", i)
            if type(value) is not Tensor:
                held = take_apart(value, self.hold, name, met)
            elif hooks is None and value.is_cpu:
                held = hold_argument(value, None, name)  # saves one call
            else:
                held = self.hold(value, name)
            self._args.append(held)
        self._kwargs = kwargs
        if kwargs:
            self._kwargs = {
                key: take_apart(value, self.hold, ("kwargs", key), met)
                for key, value in kwargs.items()
            }
        self._variables = self.capture(function)
        if self.modules:
            self._buffers = Buffers(self)
        self.ambient = Ambient()
        if preserve_rng_state:
            self._cpu_state = _torch.get_cpu_state()
            self._draws_python = preserve_rng_state == "all"
            if any([self.devices, self.generators, self._draws_python]):
                self._rng = self.random(cpu=False)

    def end(self) -> None:
        """The function has run."""
        if self._buffers is not None:
            self._buffers.end()
        if self._given is not None:
            self._note_writes(self._given.values())
            self._given = None

    def _note_writes(self, given: Collection[Given]) -> None:
        """Note the inputs in storages that the function has written: its recompute gets copies."""
        changed = [held for tensor, version, held in given if _torch.version(tensor) != version]
        if not changed:
            return
        storages = {
            held: _torch.storage_id(tensor)
            for tensor, _, held in given
            if _torch.has_storage(tensor)
        }
        written = {storages[held] for held in changed if held in storages}
        self._written = {held: storage for held, storage in storages.items() if storage in written}
        note_written(self._hooks, written)

    def random(self, cpu: bool) -> Generators:
        """The present states of the generators that a recompute puts back."""
        return Generators(cpu, filter(has_rng, self.devices), self.generators, self._draws_python)

    def restored(self, frame: object) -> tuple[Any, list[Any], dict[str, Any], Cells]:
        """The function, its arguments, and the variables that it closes over."""
        fetch: Any = partial(_fetch, frame)
        if self._is_shared or self._written:
            fetch = Fetched(frame, self._written)
        for default in self.defaults:
            default.fetch(frame)
        met: dict[int, Any] = {}
        args = [put_together(saved, fetch, met) for saved in self._args]
        kwargs = {key: put_together(saved, fetch, met) for key, saved in self._kwargs.items()}
        cells = [(cell, fetch(saved)) for cell, saved in self._variables]
        return self._function, args, kwargs, cells

    def go_back(self, frame: object, cells: Cells, undo: Undo) -> Context:
        """Enter the state of the forward; `undo` gets the functions that leave it. Returns the
        context to run in."""
        if cells:
            undo.append((fill, [(cell, contents_of(cell)) for cell, _ in cells]))
            fill(cells)  # in place: other functions may share them
        undo.append((_torch.set_grad_enabled, is_grad_enabled()))
        _torch.set_grad_enabled(True)
        if self._buffers is not None:
            self._buffers.enter(frame, undo)
        context = self.ambient.enter(undo)
        if self._cpu_state is not None:
            undo.append((_torch.set_cpu_state, _torch.get_cpu_state()))
            _torch.set_cpu_state(self._cpu_state)
        if self._rng is not None:
            self._rng.enter(undo)
        return context


def _fetch(frame: object, saved: Any) -> Any:
    return saved.fetch(frame) if isinstance(saved, Held) else saved


class Rerun(Region, Call, Slots):
    """A region whose function is called again."""

    _pins: tuple[Pin, ...] = ()
    _results: tuple[Result, ...] = ()

    def __init__(
        self, function: Any, args: Any, kwargs: Any, preserve_rng_state: Any, *about: Any
    ) -> None:
        Frame.__init__(self, *about)
        self.inner_inputs = {}
        self.policy = getattr(thread.region, "policy", None)
        Call.__init__(self, function, args, kwargs, preserve_rng_state)

    def keep(self, tensor: Tensor) -> Tensor:
        if is_parameter(root_of(tensor)):
            return tensor
        if isinstance(self.outer, Rerun | Repeated):
            # Its rerun enters this region again, which must then meet the same value.
            tensor = self.outer.keep(tensor)
        self._pins += (Pin.of(tensor, self._hooks, "a value given to keep()"),)
        return tensor

    def keep_for_inner(self, tensor: Tensor) -> None:
        """Do nothing: a rerun enters the inner region again, which keeps the value again."""

    def once(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = Result()
        self._results += (result,)  # now, since the function may call others
        before = None if self._cpu_state is None else self.random(cpu=True)
        value = without_slots(function, args, kwargs, self.outer)
        if before is not None and before.have_moved():
            result.after = self.random(cpu=True)
        result.save(value, args, kwargs, self._hooks)
        return value

    def recompute(self, request: Request) -> None:
        assert isinstance(request, Calling)
        function, args, kwargs, cells = self.restored(self)
        if self.context is not None:
            function = partial(call_within, self.context, function)
        undo: Undo = []
        rewound = set()
        changed = None
        try:
            if self._buffers is not None:
                if written := self._buffers.written(self):
                    inputs = tensors_in([args, kwargs, [value for _, value in cells]])
                    changed = Leaves(written, inputs)
                rewound = self._buffers.storages()
            context = self.go_back(self, cells, undo)
            if any([self._pins, self._results, self.policy, not self.complete]):
                thread.region = Repeated(self._pins, self._results, self.policy, self)
            request.call(partial(context.run, function, *args, **kwargs), rewound, changed)
        finally:
            undo_all(undo)

    def holdings(self) -> Iterable[Holding]:
        variables = [saved for _, saved in self._variables]
        inputs = leaves_of(*self._args, *self._kwargs.values(), *variables)
        pins = leaves_of(*self._pins, *[result.value for result in self._results])
        found = [("input", part) for part in inputs]
        found += [("kept", pin.held) for pin in pins if type(pin) is Pin]
        for kind, held in found:
            if isinstance(held, Held) and not held.is_parameter:
                yield Holding(kind, held, named(held.name))
        if self._cpu_state is not None:
            yield Holding("random state", self._cpu_state)
        if self._rng is not None:
            yield from [Holding("random state", state) for state in self._rng.states]
        if self._buffers is not None:
            yield from [Holding("buffers", copy) for copy in self._buffers.then.values]


def call_within(
    context: AbstractContextManager[Any], function: Any, *args: Any, **kwargs: Any
) -> Any:
    with context:
        return function(*args, **kwargs)
    raise errors.suppressed()
