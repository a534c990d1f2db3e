"""The slots of a function that is called again: the tensors that autograd saves in it, in order.

The forward and its recompute save the same tensors, so the place in the order tells which is which.
A region inside takes its inputs as slots of the one around, and says so, on both sides:

    forward: `Slots`                           recompute: `Calling`
    pack(t)           a new slot               pack(t)    the next slot: compared and delivered
    announce(role, t) the next slot is the     announce   the next slot must be the same input
                      input `role` of a
                      region inside
    note_written(s)   inputs in these          note_written
                      storages will be                    those that come next are
                      delivered as copies                 delivered as new copies
    --                                         replace    such a region is about to write a
                                                          delivered tensor: a copy replaces it
    modules           their buffers change     rewound    tensors on them are delivered as copies

Invariant: a tensor is delivered to the slot of the tensor that it repeats, or backward raises.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any
from weakref import ref as _ref

import torch
from torch import Tensor, nn

from .. import _torch, errors
from .._engine import (
    Frame,
    Holder,
    Stop,
    Task,
    identity,
    is_another,
    named,
    reader,
    user_line,
    without_recording,
)
from .._torch import node_count, pop_hooks, push_hooks


class Calling:
    """The recompute: each saved tensor is compared with its slot, and delivered."""

    rewound: Set[int]  # storages that have older values until the call ends
    _passed = 0  # slots so far
    _stop_at: int  # the slot at which to stop
    # The last node that has saved memory which its operator may still fill (the noise of RReLU),
    # and the shape of that memory.
    _filling: Any = None
    _stopped = False
    _role = None  # of the tensor that is packed next: None if an operator saves it

    def __init__(self, frame: Slots, holder: Holder, task: Task) -> None:
        self.frame, self.holder, self.task = frame, holder, task
        self._count = len(frame.holders)  # the slots of the forward
        self._versions: dict[int, int] = {}  # by slot: of the tensors that are delivered
        self._copies = _torch.Copies()
        # By id: parameters, and what of them has changed.
        self._refused: dict[int, tuple[Tensor, str]] = {}
        self._around = _torch.graph_task_id()
        # By the graph task of a backward in the function: the first and the last node that saved
        # tensors in it.
        self._backwards: dict[int, tuple[int, int]] = {}

    def refuse(self, written: list[tuple[Tensor, str]], inputs: list[Tensor]) -> None:
        """The function must not read these parameters, but for what `inputs` depend on."""
        self._refused = {id(parameter): (parameter, what) for parameter, what in written}
        # Nodes that depend on none of them.
        self._met = {None, *[tensor.grad_fn for tensor in inputs]}

    def call(self, function: Callable[[], Any]) -> None:
        """Call the function until the last slot that is wanted (rule 5). The function may catch
        `Stop` and raise something else instead."""
        frame = self.frame
        self._is_watched = any([frame.inner_inputs, self._refused, frame.devices])
        self._stop_at = self._count
        if frame.early_stop:
            self._stop_at = next(frame.wanted(self.task, reversed)).slot
        push_hooks(self.pack, identity)
        try:
            function()
        except (Exception, SystemExit, Stop) as error:
            if not self._stopped:
                if errors.is_about_sizes(error):
                    raise errors.other_sizes(frame) from error
                raise
        finally:
            pop_hooks()
        if not self.task.mismatches:
            self._check_outcome()

    def pack(self, given: Tensor) -> Tensor:
        """Autograd's pack hook during the call. It returns a tensor for the graph of the call, so
        that backward inside it works (rule 6); detached, because a graph must not own itself."""
        slot, frame = self._passed, self.frame
        self._passed = slot + 1
        tensor = given
        if given.requires_grad and type(given) is not nn.Parameter:
            tensor = given.detach()
        is_saved = self._role is None  # by an operator
        if not is_saved:  # the operator before has returned
            self._filling = None
        if self._is_watched:
            tensor = self._watch(slot, given, tensor)
        if self.rewound and _torch.is_on(tensor, self.rewound):
            tensor = without_recording(_torch.unseen, _torch.copy, tensor)
        holder = frame.holders[slot]() if slot < self._count else None
        if holder is not None:
            shows_none = type(given) is Tensor and given._base is None and holder.saved is None
            if (shows_none or not self._is_at_hand(holder, given)) and slot not in self.task:
                check = frame.check
                if check is not None and (now := check(tensor)) != holder.metadata:
                    more = f"; saved in the recompute at {user_line()}"
                    frame.note_mismatch(holder, now, given, self.task, more)
                self.task[slot] = tensor
                self._versions[slot] = tensor._version
        if slot >= self._stop_at:
            self._stop(given)
        elif tensor is given and is_saved and _may_be_filled(given):
            self._filling = node_count(), given.shape
        return tensor

    _torch.mark_as_torchs_own(pack)

    def _stop(self, given: Tensor) -> None:
        """No later slot is wanted. But an operator must still run that has yet to fill memory which
        it has saved before `given`, and for it: then both have one shape."""
        if not self._stopped:
            if self._passed > self._count and self.frame.complete:
                raise errors.too_many(self.frame, self._count, user_line())
            if given.requires_grad and self._filling == (node_count(), given.shape):
                return
        self._stopped = True
        raise Stop

    def announce(self, role: object, tensor: Tensor) -> None:
        self._role, self._is_watched = role, True

    def note_written(self, storages: Set[int]) -> None:
        """Copies made before show what is no longer there. (An operator that writes and then fails
        counts no version up.)"""
        self._copies.forget(storages)

    def replace(self, delivered: Tensor, copy: Tensor) -> None:
        """A region inside is about to write a delivered tensor: deliver a copy instead."""
        for slot, tensor in self.task.items():
            if tensor is delivered:
                self.task[slot] = copy
                self._versions[slot] = copy._version

    def _watch(self, slot: int, given: Tensor, tensor: Tensor) -> Tensor:
        """Compare roles, and copy an input of a region inside that this will write."""
        frame = self.frame
        if self._refused:
            self._look_below(given.grad_fn)
        if frame.devices:
            self._look_at_backward()
        role, self._role = self._role, None
        then, storage = frame.inner_inputs.get(slot, (None, None))
        if slot < self._count and role != then:
            raise errors.other_role(frame, slot, user_line())
        if storage in frame.written:
            return without_recording(_torch.unseen, self._copies.of, tensor)
        return tensor

    def _look_at_backward(self) -> None:
        """Raise if a backward in the function goes over nodes that another one in it has made: for
        an accelerator, autograd made these in a thread that numbers them by a count of its own, and
        visits larger numbers first. In the recompute, all nodes are made in that thread."""
        task, node = _torch.graph_task_id(), _torch.current_node()
        if task == self._around or node is None:
            return
        for other, (first, last) in self._backwards.items():
            if other != task and first <= node._sequence_nr() <= last:
                raise errors.gradients_of_gradients(self.frame)
        made = node_count() - 1
        first, _ = self._backwards.get(task, (made, made))
        self._backwards[task] = first, made

    def _look_below(self, node: Any) -> None:
        """Raise if a node of the autograd graph depends on a parameter that is refused."""
        for found in _torch.nodes_from([node], self._met):
            refused = self._refused.get(id(getattr(found, "variable", None)))
            if refused is not None:
                parameter, what = refused
                raise errors.changed(self.frame, what + self.frame.described(parameter))

    def _is_at_hand(self, holder: Holder, given: Tensor) -> bool:
        """Compare parameters. Returns whether the forward saved one as a whole."""
        saved = holder.saved
        whole = None if saved is None else whole_parameter(saved)
        if whole is given and given._version == saved[1] and given.requires_grad is saved[2]:
            return True
        found = parameter_in(given)
        if found != saved:
            self._compare_parameters(holder, found)
        return whole is not None

    def _compare_parameters(self, holder: Holder, found: Shown | None) -> None:
        """Where either run saves a parameter that trains, or a view of one, the other must save the
        same one, unwritten. Parameters that the function makes are new each time, and hooks may
        bring in frozen ones anew: those must have the same values."""
        frame, saved = self.frame, holder.saved
        (then, must_stay), (now, must_be) = map(self._described, (saved, found))
        if saved is not None and found is not None:
            if saved[0] == found[0]:
                # Without it, other tensors are saved around the parameter.
                what = "" if saved[2] is found[2] else "`requires_grad` of "
                raise errors.changed(frame, what + now)
            parameter, other = saved[-1](), found[-1]()
            if not (must_stay or must_be or is_another(parameter, other)):
                return
        raise errors.other_parameter(frame, holder.slot, user_line(), then, now)

    def _described(self, shown: Shown | None) -> tuple[str, bool]:
        """A parameter for messages, and whether it trains and existed before the region."""
        if shown is None:
            return "no parameter", False
        parameter = shown[-1]()
        if parameter is None:
            return "a parameter that is gone", False
        is_known = self.frame.name_of(parameter) is not None
        return self.frame.described(parameter), parameter.requires_grad and is_known

    def _check_outcome(self) -> None:
        """Raise if a tensor has been written since, or if the call has ended before the last slot
        that is wanted."""
        for slot, version in self._versions.items():
            tensor = self.task[slot]
            if tensor is None or tensor._version == version:
                continue
            if slot == self.holder.slot:
                raise errors.overwritten(self.frame)
            del self.task[slot]  # an error only if backward asks for it, as in plain code
        if self._stopped:
            return
        frame, last = self.frame, self.holder.slot
        if frame.early_stop or frame.complete:
            last = min(self._stop_at, self._count - 1)
        if self._passed <= last:
            raise errors.different_number(frame, last, reader(), self._count, self._passed)


def _may_be_filled(tensor: Tensor) -> bool:
    """Whether an operator may be about to fill a tensor that it has saved: the noise of RReLU."""
    if type(tensor) is not Tensor or tensor._version:
        return False
    return tensor.is_floating_point()  # neither indices nor a count


class Slots(Frame):
    """The forward: each saved tensor becomes a slot."""

    modules: tuple[nn.Module, ...]  # that were found before
    devices: frozenset[torch.device]  # of its inputs, the CPU aside
    hint = errors.CALLED_AGAIN
    # By slot: the roles of tensors that regions inside take as inputs, and their storages.
    inner_inputs: dict[int, tuple[object, int | None]]

    def pack(self, tensor: Tensor) -> Holder:
        holder = Holder()
        holder.frame = self
        holders, check = self.holders, self.check
        holder.slot = len(holders)
        holders.append(_ref(holder))  # the slot is taken even if the user's check fails below
        holder.saved = None
        if type(tensor) is not Tensor or tensor._base is not None:
            shown = holder.saved = parameter_in(tensor)
            if shown is not None and tensor.requires_grad and shown[3]:
                check = None  # it is compared by identity
        if check is not None:
            holder.metadata = check(tensor)
        if self.notes is not None:
            self.notes.add(holder, tensor)
        return holder

    _torch.mark_as_torchs_own(pack)

    def announce(self, role: object, tensor: Tensor) -> None:
        self.inner_inputs[len(self.holders)] = role, _torch.storage_of(tensor)

    def at_hand(self, holder: Holder) -> Tensor | None:
        """A parameter: it is referenced (rule 2)."""
        parameter = whole_parameter(holder.saved)
        if parameter is not None and parameter._version != holder.saved[1]:
            raise errors.changed(self, self.described(parameter))
        return parameter

    def name_of(self, parameter: Tensor) -> str | None:
        """A parameter of the modules that existed before the region, for messages."""
        for module in self.modules:
            for name, other in module.named_parameters():
                if other is parameter:
                    return f"the parameter {type(module).__name__}.{name}"
        return None

    def described(self, parameter: Tensor) -> str:
        return named(self.name_of(parameter) or "a parameter", parameter)


def whole_parameter(shown: Shown) -> Tensor | None:
    """The parameter itself, if all of it was saved, and it is still there."""
    *_, is_whole, parameter = shown
    return parameter() if is_whole else None


def parameter_in(tensor: Tensor) -> Shown | None:
    """The parameter that a tensor is, or is a view of."""
    root: Any = tensor._base if type(tensor) is Tensor else tensor
    if type(root) is Tensor or not isinstance(root, nn.Parameter):
        return None
    # One that trains lives as long as the graph, which ends in it. A frozen one may go.
    ref: _ref[Tensor] = _ref(root)
    return id(ref), tensor._version, root.requires_grad, root is tensor, ref


# The identity of a parameter, its version, whether it trains, whether it is all of it, and itself:
# last, so that no two parameters are compared.
Shown = tuple[int, int, bool, bool, _ref[Tensor]]
