"""Compiled code in a recorded block: what inductor's code does past the dispatcher.

Inductor's code allocates and writes memory itself, and calls some operators in between. Those are passed through
unseen: kernels that nobody sees write to what they make. What compiled code returns comes from outside. What it writes
in place shows in version counters alone, so a run compares the version of whatever it has made with what recorded
operators have left there, whenever it is read or saved.

Where torch shows a compiled region as one operator (`torch._inductor.config.wrap_inductor_compiled_regions`), that
operator is a step like any other.

Invariant: a run costs nothing more while inductor is not loaded. It becomes another kind of run when it is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from . import _torch
from ._ops import COMMUNICATION, Info, tensors_of

_Run: Any = object  # a run, by the time that an instance is made

INDUCTOR = "torch._inductor.output_code"  # the module that is loaded before anything that it has compiled runs
WRITTEN_UNSEEN = "written by compiled code"  # an event

_SHOWN = "inductor_compiled_code"
_REGIONS: WeakKeyDictionary[Any, Info] = WeakKeyDictionary()


class BesideCompiledCode(_Run):  # type: ignore[misc]
    """A run in a process that may run compiled code: a class that is put before that of the run."""

    sees_compiled_code = True
    _versions: dict[int, int]  # by storage: what recorded operators have left there, at most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._here["depth"] != self._depth and not self._wakes_up(func, args):
            return func(*args, **(kwargs or {}))
        if not torch.is_grad_enabled() and _torch.inductor_runs():
            if getattr(func, "__name__", "") != _SHOWN:
                return func(*args, **(kwargs or {}))
            args = args[0], *args[1]
        self._look_for_writes((*args, *(kwargs or {}).values()))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._note_versions(args, kwargs or {}, result)
        return result

    def save(self, tensor: Tensor) -> Any:
        self._look_for_writes((tensor if self._announced is None else self._announced,))
        return super().save(tensor)

    def info_of(self, func: Any, args: Any) -> Info:
        info = super().info_of(func, args)
        return info_of_region(info, args[0]) if info.name == _SHOWN else info

    def _look_for_writes(self, values: Iterable[Any]) -> None:
        for tensor in tensors_of(tuple(values)):
            if type(tensor) is not Tensor or not _torch.has_storage(tensor):
                continue
            version = _torch.version(tensor)
            place = _torch.storage_id(tensor)
            if version > self._versions.get(place, 0):
                self._versions[place] = version
                if self.has_made(tensor):
                    self._event(WRITTEN_UNSEEN, (tensor,))

    def _note_versions(self, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        made = () if self.step.is_view else tensors_of(result)  # below autograd, a view counts anew
        for tensor in made:
            if _torch.has_storage(tensor):
                self._versions[_torch.storage_id(tensor)] = _torch.version(tensor)
        info = self.step.info
        for place in () if info is None else info.targets:
            target = kwargs.get(place) if type(place) is str else args[place]
            for tensor in tensors_of(target):
                if _torch.has_storage(
                    tensor
                ):  # whose version is counted up when the operator has returned
                    self._versions[_torch.storage_id(tensor)] = _torch.version(tensor) + 1


@functools.cache
def _beside_compiled_code(kind: Any) -> Any:
    return type(kind.__name__, (BesideCompiledCode, kind), {})


def see_compiled_code(run: Any) -> None:
    """From here on the run looks at what compiled code does."""
    run.__class__ = _beside_compiled_code(run.__class__)
    run._versions = {}


# ---- compiled regions that torch shows as one operator


def info_of_region(info: Info, region: Any) -> Info:
    """What recording needs to know of a compiled region: called with its inputs one by one, it is like any other
    operator."""
    found = _REGIONS.get(region)
    if found is None:
        found = _REGIONS[region] = copy(info)
        written, spaces = effects_of_region(region)
        found.run, found.overwrites = run_region, False
        found.targets = found.writes = tuple(1 + i for i in written)
        found.communicates = not COMMUNICATION.isdisjoint(spaces)
    return found


def run_region(region: Any, *inputs: Any, **kwargs: Any) -> Any:
    """It empties the list that it is given."""
    return torch.ops.higher_order.inductor_compiled_code(region, list(inputs), **kwargs)


def effects_of_region(region: Any) -> tuple[set[int], set[str]]:
    """Which inputs a compiled region writes in place, and the name spaces of its operators. What it returns are no
    views of inputs: torch makes these outside of it."""
    nodes = region.original_gm.graph.nodes
    inputs = [node for node in nodes if node.op == "placeholder"]
    written: set[int] = set()
    spaces: set[str] = set()
    for node in nodes:
        if isinstance(node.target, _torch.OpOverload):
            spaces.add(node.target.namespace)
        for target in _written_by(node):
            while (
                target.op == "call_function" and target.all_input_nodes
            ):  # a view of an input, maybe
                target = target.all_input_nodes[0]
            if target in inputs:
                written.add(inputs.index(target))
    return written, spaces


def _written_by(node: Any) -> Iterable[Any]:
    """The nodes whose results a node writes in place."""
    if not isinstance(
        node.target, _torch.OpOverload
    ):  # a user's Triton kernel may write all of its arguments
        return node.all_input_nodes if "mutation" in str(node.target) else ()
    arguments = node.target._schema.arguments
    given = {**dict(zip((a.name for a in arguments), node.args, strict=False)), **node.kwargs}
    writes = [
        given[a.name]
        for a in arguments
        if a.name in given and a.alias_info and a.alias_info.is_write
    ]
    return [target for each in writes for target in (each if isinstance(each, list) else [each])]
