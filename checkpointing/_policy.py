"""What a region keeps.

Keeping a value *is* a checkpoint: recompute starts from it. In a scope (or a replay function) the tape holds the value
and cuts what made it; under rerun the value is pinned, so that a decision taken in the forward stands in the rerun.

A policy is a frozen value that answers for each operator, and for each tag, whether what is there is kept, dropped, or
kept elsewhere. Whatever a user may write for a policy becomes one of them in `as_policy`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from . import _torch, errors
from ._auto import Placement
from ._offload import Destination
from ._region import aside, thread
from ._tape import NOWHERE, Answer, Places
from ._tree import map_tensors

T = TypeVar("T")


@contextmanager
def opaque() -> Iterator[None]:
    """Tell the regions around that operators don't show all that happens in this block: a raw kernel, `ctypes` or
    NumPy writes the memory of tensors that torch has already written.

    What is read after the block is kept, and never computed again across it. What was read before it, and is no
    parameter, is copied, so that recompute finds it as it was (where plain code has saved the tensor itself, its
    backward finds what was written later). Operators in the block are not recorded: they run once. Outside of a scope
    or a replay function it does nothing.

    Without it, only memory that torch has allocated and not yet written may be filled unseen. Later writes are found
    by `determinism_check="values"`, which names what to put into such a block.

    >>> import torch
    >>> from checkpointing import checkpoint_scope, opaque
    >>> x = torch.ones(3, requires_grad=True)
    >>> with checkpoint_scope():
    ...     noise = torch.zeros(3)
    ...     with opaque():
    ...         noise.numpy()[:] = 2  # not a call of torch
    ...     y = x * noise
    >>> y.sum().backward()
    >>> x.grad
    tensor([2., 2., 2.])
    """
    region = thread.region
    if region is None:
        yield
        return
    region.look_away()
    try:
        with aside():
            yield
    finally:
        region.look_away()


def keep(x: T) -> T:
    """Keep `x` in the innermost region: its recompute starts from `x` and never computes it again.

    Args:
        x: a tensor (any shape, dtype and device) or any nesting of containers and dataclasses with tensors in it.

    Returns:
        `x` itself in the forward. In a rerun, which calls the function again, an equal structure with the kept
        values in place of the recomputed ones. Outside of a region, `x`.

    What is kept are the storages that the tensors lie on. They are saved by whatever encloses the region, so under
    `torch.autograd.graph.save_on_cpu` they are offloaded. Tensors from outside of the region are held anyway.

    >>> import torch
    >>> from checkpointing import checkpoint_scope, keep
    >>> layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
    >>> x = torch.randn(2, 8, requires_grad=True)
    >>> with checkpoint_scope() as scope:
    ...     y = x
    ...     for layer in layers:
    ...         y = keep(layer(y).relu())  # backward recomputes one layer at a time
    >>> y.sum().backward()
    >>> scope.stats.bytes_kept
    0

    Source of the method: `jax.ad_checkpoint.checkpoint_name` with the policy `save_only_these_names`.
    """
    region = thread.region
    if region is None:
        return x
    return cast(T, map_tensors(region.keep, x))


def tag(x: T, name: str) -> T:
    """Give `x` a name, which a policy may keep it by: `policy=save_tagged(name)`.

    Asked is the policy of the innermost region that has one; where none asks for the name, nothing happens.

    Args:
        x: a tensor (any shape, dtype and device) or any nesting of containers and dataclasses with tensors in it.
        name: any text; the same one may be given to many values.

    Returns:
        `x` itself, its gradient and its graph untouched.

    >>> import torch
    >>> from checkpointing import checkpoint_scope, save_tagged, tag
    >>> x = torch.ones(3, requires_grad=True)
    >>> with checkpoint_scope(policy=save_tagged("middle")) as scope:
    ...     y = tag(x.sin().exp(), "middle").cos().tanh()
    >>> scope.stats.bytes_kept
    12

    Source of the method: `jax.ad_checkpoint.checkpoint_name`.
    """
    if not isinstance(name, str):
        raise TypeError(f"a tag is a string, not {name!r}")
    region = thread.region
    if region is None:
        return x
    return cast(T, map_tensors(lambda tensor: region.tag(tensor, name), x))


# ---- policies


class Policy:
    """What to keep, as a value: compares, hashes, prints, and combines with `|` (keep what either keeps)."""

    __slots__ = ()

    @property
    def on_op(self) -> Callable[[Any, Any, Any, Any], Answer] | None:
        """What to do with what an operator has made, given (operator, args, kwargs, result). None: it never asks."""
        return None

    def on_tag(self, name: str) -> Answer:
        """What to do with a value of this name."""
        return False

    @property
    def placement(self) -> Placement | None:
        """Whether, and within which bounds, the tape places checkpoints by itself."""
        return None

    @property
    def places(self) -> Places:
        """Where things go about which it is not asked."""
        return NOWHERE

    def __or__(self, other: Any) -> Policy:
        return _either(self, other)

    def __ror__(self, other: Any) -> Policy:
        return _either(other, self)


@dataclass(frozen=True, slots=True, repr=False)
class _SaveOps(Policy):
    ops: frozenset[Any]

    @property
    def on_op(self) -> Callable[[Any, Any, Any, Any], Answer]:
        ops = self.ops
        return lambda op, args, kwargs, result: op in ops

    def __repr__(self) -> str:
        return f"save_ops({', '.join(sorted(map(str, self.ops)))})"


@dataclass(frozen=True, slots=True, repr=False)
class _SaveTagged(Policy):
    names: frozenset[str]

    def on_tag(self, name: str) -> Answer:
        return name in self.names

    def __repr__(self) -> str:
        return f"save_tagged({', '.join(map(repr, sorted(self.names)))})"


@dataclass(frozen=True, slots=True, repr=False)
class _Asking(Policy):
    """A function as torch's selective checkpointing takes it."""

    function: Callable[..., Any]

    @property
    def on_op(self) -> Callable[[Any, Any, Any, Any], Answer]:
        function = self.function

        def ask(op: Any, args: Any, kwargs: Any, result: Any) -> Answer:
            try:
                answer = function(selective_context(result), op, *args, **kwargs)
            except TypeError as error:
                raise errors.hidden(f"the policy, asked for {op},", error) from error
            if isinstance(answer, bool):
                return answer
            if not isinstance(answer, CheckpointPolicy):
                raise ValueError(f"a policy answers with a CheckpointPolicy or a bool, not {answer!r} (asked for {op})")
            return _ANSWERS[answer]

        return ask

    def __repr__(self) -> str:
        return f"<policy {getattr(self.function, '__qualname__', self.function)}>"


@dataclass(frozen=True, slots=True, repr=False)
class _Auto(Policy):
    budget: int | None
    segment: int | None

    @property
    def placement(self) -> Placement:
        return Placement(self.budget, self.segment)

    def __repr__(self) -> str:
        given = {"budget": self.budget, "segment": self.segment}
        return f"auto({', '.join(f'{name}={value}' for name, value in given.items() if value is not None)})"


@dataclass(frozen=True, slots=True, repr=False)
class _Either(Policy):
    first: Policy
    second: Policy

    @property
    def on_op(self) -> Callable[[Any, Any, Any, Any], Answer] | None:
        first, second = self.first.on_op, self.second.on_op
        if first is None or second is None:
            return first or second
        return lambda *asked: first(*asked) or second(*asked)

    def on_tag(self, name: str) -> Answer:
        return self.first.on_tag(name) or self.second.on_tag(name)

    @property
    def placement(self) -> Placement | None:
        return self.first.placement or self.second.placement

    @property
    def places(self) -> Places:
        first, second = self.first.places, self.second.places
        if first is NOWHERE or second is NOWHERE:
            return first if second is NOWHERE else second
        return Places(*(a or b for a, b in zip(first, second, strict=True)))

    def __repr__(self) -> str:
        return f"{self.first!r} | {self.second!r}"


@dataclass(frozen=True, slots=True, repr=False)
class _Offload(Policy):
    inner: Policy | None
    destination: Destination
    inputs: bool

    @property
    def on_op(self) -> Callable[[Any, Any, Any, Any], Answer] | None:
        ask, destination = None if self.inner is None else self.inner.on_op, self.destination
        if ask is None:
            return None
        return lambda *asked: _elsewhere(ask(*asked), destination)

    def on_tag(self, name: str) -> Answer:
        return self.inner is not None and _elsewhere(self.inner.on_tag(name), self.destination)

    @property
    def placement(self) -> Placement | None:
        placement = None if self.inner is None else self.inner.placement
        return None if placement is None else Placement(placement.budget, placement.segment, self.destination)

    @property
    def places(self) -> Places:
        there = self.destination
        return Places(there, there if self.inner is None else None, there if self.inputs else None)

    def __repr__(self) -> str:
        device, pin_memory, min_bytes = self.destination.device, self.destination.pin_memory, self.destination.min_bytes
        given = [] if self.inner is None else [repr(self.inner)]
        given += [f"device='{device}'"] * (device.type != "cpu")
        given += ["pin_memory=False"] * (not pin_memory)
        given += [f"min_bytes={min_bytes}"] * (min_bytes != _MIN_BYTES)
        given += ["inputs=True"] * self.inputs
        return f"offload({', '.join(given)})"


def _elsewhere(answer: Answer, destination: Destination) -> Answer:
    return destination if answer is True else answer


def save_ops(*ops: Any) -> Policy:
    """A policy: keep what these operators make.

    Args:
        ops: `OpOverload`s, such as `torch.ops.aten.mm.default`: the operators that the dispatcher runs below autograd
            (`torch.nn.functional.linear` is `aten.addmm.default` there).

    Raises:
        ValueError: for anything else.

    >>> import torch
    >>> from checkpointing import checkpointed, save_ops, save_tagged
    >>> policy = save_ops(torch.ops.aten.mm.default) | save_tagged("attention")
    >>> policy
    save_ops(aten.mm.default) | save_tagged('attention')
    >>> @checkpointed(policy=policy)
    ... def mlp(x, up, down):
    ...     return torch.relu(x @ up) @ down  # backward repeats the relu alone

    Source of the method: `torch.utils.checkpoint.create_selective_checkpoint_contexts`.
    """
    for op in ops:
        if not isinstance(op, _torch.OpOverload | _torch.HigherOrderOperator):
            raise ValueError(
                f"a policy lists OpOverloads such as torch.ops.aten.mm.default, not {op!r}"
                + (" (name one of its overloads)" if isinstance(op, _torch.OpOverloadPacket) else "")
            )
    return _SaveOps(frozenset(ops))


def save_tagged(*names: str) -> Policy:
    """A policy: keep the values that `tag` has given one of these names.

    Raises:
        TypeError: for names that are no strings.

    >>> from checkpointing import save_tagged
    >>> save_tagged("keys", "values") == save_tagged("values", "keys")
    True

    Source of the method: `jax.checkpoint_policies.save_only_these_names`.
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a tag is a string, not {name!r}")
    return _SaveTagged(frozenset(names))


def auto(*, budget: int | str | None = None, segment: int | str | None = None) -> Policy:
    """A policy: checkpoints that place themselves, while the block runs, at moments when little is alive.

    Nothing has to be marked, profiled or known beforehand; modules, loops, functions and inner regions are seen
    through. The same program makes the same checkpoints, in each step and on each rank. (A tensor in a reference
    cycle counts as alive until Python's garbage collector comes by.)

    Args:
        budget: at most how many bytes the block may keep for backward at any moment of the forward; its inputs and
            parameters are not counted. An int, or text such as `"1.5 GiB"` or `"200 MB"`. Room that the checkpoints
            leave is used to keep what is dear to recompute per byte: results of matrix products, convolutions and
            attention first. Where a stretch between two checkpoints saves more than the budget, backward makes
            checkpoints inside of it while it recomputes it, and again inside of those, so that it needs little more
            than the budget on each level: with the room of one checkpoint, memory grows like the logarithm of depth.
        segment: at most about how many bytes autograd saves between two checkpoints; int or text. None: the number
            of checkpoints grows like the square root of what the block saves, and so does the memory it needs.

    Raises:
        TypeError, ValueError: for what is no number of bytes.

    Warns:
        UserWarning: at the end of a block, if the budget has no room for a single checkpoint of it; it names the
            smallest budget that has.

    >>> import torch
    >>> from checkpointing import auto, checkpoint_scope
    >>> layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(100))
    >>> x = torch.randn(32, 64, requires_grad=True)
    >>> with checkpoint_scope(policy=auto()) as scope:
    ...     for layer in layers:
    ...         x = layer(x).relu()
    >>> scope.stats.bytes_saved // scope.stats.bytes_kept >= 4
    True

    Source of the method: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; online as in Kirisame et
    al. 2021, "Dynamic Tensor Rematerialization".
    """
    return _Auto(_bytes("budget", budget, 0), _bytes("segment", segment, 1))


_MIN_BYTES = 1024


def offload(
    policy: Any = None,
    *,
    device: str | torch.device = "cpu",
    pin_memory: bool = True,
    min_bytes: int | str = _MIN_BYTES,
    inputs: bool = False,
) -> Policy:
    """A policy: what `policy` keeps waits on the host, and comes back when recompute starts from it.

    Args:
        policy: what to keep there: `save_ops(...)`, `save_tagged(...)`, `auto(...)`, combinations of them, a list of
            operators or a function. None: all that autograd saves in the block, so that nothing is recomputed. What
            is given to `keep` in the block goes there, too. Parameters, other leaves that require grad, and views of
            them stay where they are.
        device: where it waits. A copy is made in any case, also of tensors that are on this device already.
        pin_memory: page-locked memory, without which copies do not run beside the computation.
        min_bytes: smaller storages stay where they are; int or text, as for `auto`.
        inputs: whether what the block reads from outside waits there, too, rather than being saved by what encloses
            the block.

    Raises:
        TypeError, ValueError: for what is no policy, no device that can hold data, or no number of bytes.

    On CUDA and XPU, copies run on streams of their own. What comes back is fetched ahead, in the order in which the
    replay of the block will need it; any other order gives the same bits, with more waiting. A budget of `auto` bounds
    what waits on the host, and room that it leaves is not used for more.

    >>> import torch
    >>> from checkpointing import checkpoint_scope, offload, save_tagged, tag
    >>> x = torch.randn(64, 64, requires_grad=True)
    >>> with checkpoint_scope(policy=offload(save_tagged("middle"))) as scope:
    ...     y = tag(x.sin().exp(), "middle").cos().tanh()
    >>> scope.stats.bytes_kept
    16384
    >>> offload(min_bytes="1 MiB") | save_tagged("middle")
    offload(min_bytes=1048576) | save_tagged('middle')

    Source of the method: `torch.autograd.graph.save_on_cpu`, and JAX's policy `save_and_offload_only_these_names`.
    """
    device = torch.device(device)
    if device.type == "meta":
        raise ValueError("nothing can wait on the device 'meta', which holds no data")
    least = _bytes("min_bytes", min_bytes, 0)
    if least is None:
        raise TypeError("min_bytes is a number of bytes, such as 10**6 or '1.5 MiB', not None")
    return _Offload(as_policy(policy), Destination(device, bool(pin_memory), least), bool(inputs))


def _bytes(name: str, given: Any, least: int) -> int | None:
    if given is None:
        return None
    if isinstance(given, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmgt]i?)?b?\s*", given.lower())
        if match is None:
            raise ValueError(f"{name} is a number of bytes, such as 10**9 or '1.5 GiB', not {given!r}")
        unit = match[2] or ""
        given = int(float(match[1]) * _UNITS[unit])
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(f"{name} is a number of bytes, such as 10**9 or '1.5 GiB', not {given!r}")
    nbytes = operator.index(given)
    if nbytes < least:
        raise ValueError(f"{name} is at least {least}, not {given}")
    return nbytes


_UNITS = {"": 1} | {f"{c}{i}": (1024 if i else 1000) ** n for n, c in enumerate("kmgt", 1) for i in ("", "i")}


def as_policy(policy: Any) -> Policy | None:
    """The policy that a user means by one of ours, a list of operators, or a function as torch's selective
    checkpointing takes it, `(ctx, op, *args, **kwargs) -> CheckpointPolicy | bool`.

    Raises:
        TypeError: for anything else. ValueError: for a list with something else than `OpOverload`s in it.
    """
    if policy is None or isinstance(policy, Policy):
        return policy
    if isinstance(policy, list | tuple | set | frozenset):
        return save_ops(*policy)
    if not callable(policy):
        raise TypeError(f"a policy is one of checkpointing's, a list of operators or a function, not {policy!r}")
    return _Asking(policy)


def _either(first: Any, second: Any) -> Policy:
    first, second = as_policy(first), as_policy(second)
    if first is None or second is None:
        raise TypeError("None is no policy to combine with: it keeps nothing")
    if first.placement is not None and second.placement is not None:
        raise TypeError(f"{first!r} and {second!r} can't both place checkpoints: give one auto(...) all it needs")
    return _Either(first, second)


def selective_context(result: Any) -> Any:
    return SelectiveCheckpointContext(is_recompute=False, op_output=result)


_HOST = Destination(torch.device("cpu"), pin_memory=True, min_bytes=0)
_ANSWERS: dict[CheckpointPolicy, Answer] = {
    CheckpointPolicy.MUST_SAVE: True,
    CheckpointPolicy.PREFER_SAVE: True,
    CheckpointPolicy.MUST_RECOMPUTE: False,
    CheckpointPolicy.PREFER_RECOMPUTE: False,
    CheckpointPolicy.MUST_CPU_OFFLOAD: _HOST,
    CheckpointPolicy.PREFER_CPU_OFFLOAD: _HOST,
}
