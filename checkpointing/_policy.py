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
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from . import _torch, errors
from ._offload import Destination
from ._record import NOWHERE, Answer, Placement, Places
from ._region import aside, thread
from ._tree import map_tensors

T = TypeVar("T")


@contextmanager
def opaque() -> Iterator[None]:
    """Tell the regions around that operators don't show all that happens in this block: a raw kernel, `ctypes` or
    NumPy writes the memory of tensors that torch has already written.

    What is read after the block is kept, and never computed again across it. What was read before it, and is no
    parameter, is copied, so that recompute finds it as it was (where plain code has saved the tensor itself, its
    backward finds what was written later). Operators in the block are not recorded: they run once. What autograd saves
    in the block and an operator writes there later is a `ChangedError` in backward. Outside of a scope or a replay
    function it does nothing.

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
        `x` itself. In a rerun, which calls the function again, the kept values are written into the recomputed tensors
        where these differ; so keep what the function computes, or a clone of what it finds elsewhere.

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


class Policy(NamedTuple):
    """What to keep, as a value: compares, hashes, prints, and combines with `|` (keep what either keeps)."""

    made_by: tuple[Any, ...]  # a function of this module and its arguments: those of equal policies are equal
    text: str
    on_op: Callable[[Any, Any, Any, Any], Answer] | None = None
    """What to do with what an operator has made, given (operator, args, kwargs, result). None: it never asks."""
    on_tag: Callable[[str], Answer] = lambda name: False
    """What to do with a value of this name."""
    placement: Placement | None = None
    """Whether, and within which bounds, the tape places checkpoints by itself."""
    places: Places = NOWHERE
    """Where things go about which it is not asked."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self.made_by == other.made_by

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.made_by)

    def __repr__(self) -> str:
        return self.text

    def __reduce__(self) -> Any:
        return self.made_by[0], self.made_by[1:]

    def __or__(self, other: Any) -> Policy:
        return _either(self, as_policy(other))

    def __ror__(self, other: Any) -> Policy:
        return _either(as_policy(other), self)


def _save_ops(ops: frozenset[Any]) -> Policy:
    text = f"save_ops({', '.join(sorted(map(str, ops)))})"
    return Policy((_save_ops, ops), text, on_op=lambda op, args, kwargs, result: op in ops)


def _save_tagged(names: frozenset[str]) -> Policy:
    text = f"save_tagged({', '.join(map(repr, sorted(names)))})"
    return Policy((_save_tagged, names), text, on_tag=lambda name: name in names)


def _asking(function: Callable[..., Any]) -> Policy:
    """A function as torch's selective checkpointing takes it."""

    def ask(op: Any, args: Any, kwargs: Any, result: Any) -> Answer:
        context = SelectiveCheckpointContext(is_recompute=False, op_output=result)
        try:
            answer = function(context, op, *args, **kwargs)
        except TypeError as error:
            raise errors.hidden(f"the policy, asked for {op},", error) from error
        if isinstance(answer, bool):
            return answer
        if not isinstance(answer, CheckpointPolicy):
            raise ValueError(f"a policy answers with a CheckpointPolicy or a bool, not {answer!r} (asked for {op})")
        return _ANSWERS[answer]

    return Policy((_asking, function), f"<policy {getattr(function, '__qualname__', function)}>", on_op=ask)


def _auto(budget: int | None) -> Policy:
    given = "" if budget is None else f"budget={budget}"
    return Policy((_auto, budget), f"auto({given})", placement=Placement(budget))


def _either(first: Policy | None, second: Policy | None) -> Policy:
    if first is None or second is None:
        raise TypeError("None is no policy to combine with: it keeps nothing")
    if first.placement is not None and second.placement is not None:
        raise TypeError(f"{first!r} and {second!r} can't both place checkpoints: give one auto(...) all it needs")
    ask, ask_too = first.on_op, second.on_op
    either = None if ask is None or ask_too is None else lambda *asked: ask(*asked) or ask_too(*asked)
    return Policy(
        (_either, first, second),
        f"{first!r} | {second!r}",
        either or ask or ask_too,
        lambda name: first.on_tag(name) or second.on_tag(name),
        first.placement or second.placement,
        Places(*(a or b for a, b in zip(first.places, second.places, strict=True))),
    )


def _offload(inner: Policy | None, there: Destination, inputs: bool) -> Policy:
    shown = [] if inner is None else [repr(inner)]
    shown += [f"device='{there.device}'"] * (there.device.type != "cpu")
    shown += ["pin_memory=False"] * (not there.pin_memory)
    shown += [f"min_bytes={there.min_bytes}"] * (there.min_bytes != _MIN_BYTES)
    shown += ["inputs=True"] * inputs
    made_by, text = (_offload, inner, there, inputs), f"offload({', '.join(shown)})"
    for_inputs = there if inputs else None
    if inner is None:
        return Policy(made_by, text, places=Places(there, there, for_inputs))

    def elsewhere(answer: Answer) -> Answer:
        return there if answer is True else answer

    ask = inner.on_op
    return Policy(
        made_by,
        text,
        None if ask is None else lambda *asked: elsewhere(ask(*asked)),
        lambda name: elsewhere(inner.on_tag(name)),
        inner.placement and inner.placement._replace(place=there),
        Places(there, None, for_inputs),
    )


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
    return _save_ops(frozenset(ops))


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
    return _save_tagged(frozenset(names))


def auto(*, budget: int | str | None = None) -> Policy:
    """A policy: checkpoints that place themselves, where they save the most memory.

    Nothing has to be marked or profiled: modules, loops, functions and inner regions are seen through. The first run
    of a block keeps nothing, and notes what it did. From that a plan is computed, once, by simulating the memory of
    forward and backward: the runs that follow keep what the plan says. A run that goes another way makes a plan of its
    own. The same program gives the same plan, in each step and on each rank.

    The plan is for a block that backward begins with: put one scope around the whole model and its loss.

    Args:
        budget: at most how many bytes the block keeps for backward, at any moment of the forward. An int, or text such
            as `"1.5 GiB"` or `"200 MB"`. Results that are most expensive to recompute per byte are kept first. None:
            the peak of the step is bounded instead: by the peak of a checkpoint around each block that the program
            repeats, and close to the least that checkpoints can have where more would save little recompute.

    A budget bounds what is kept, not the peak. Besides what is kept, a step needs its inputs, parameters and states of
    random generators; what the model itself holds; in backward, what autograd saves between two checkpoints, and
    gradients. The plan takes the least peak within the budget. Where a stretch between two checkpoints saves more than
    the budget, backward makes checkpoints inside of it while it recomputes it, and again inside of those: with the room
    of one checkpoint, memory grows like the logarithm of depth. `scope.stats.peak_predicted` is the peak of the plan.

    Gradients that do not exist yet are room: their bytes are needed when what later layers kept has gone. What is
    alive anyway, such as results that the caller collects, costs nothing.

    Raises:
        TypeError, ValueError: for what is no number of bytes.

    Warns:
        UserWarning: at the end of a block, if the budget has no room for a single checkpoint of it; it names the
            smallest budget that has.

    >>> import torch
    >>> from checkpointing import auto, checkpoint_scope
    >>> x = torch.randn(32, 64, requires_grad=True)
    >>> for step in range(2):
    ...     with checkpoint_scope(policy=auto()) as scope:
    ...         y = x
    ...         for layer in range(100):
    ...             y = torch.tanh(y)
    >>> scope.stats.bytes_saved // scope.stats.bytes_kept >= 4
    True

    Source of the method: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; what is kept beside the
    checkpoints as in Jain et al. 2020, "Checkmate", by a greedy rule.
    """
    return _auto(None if budget is None else _bytes("budget", budget, 0))


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
    there = Destination(device, bool(pin_memory), _bytes("min_bytes", min_bytes, 0))
    return _offload(as_policy(policy), there, bool(inputs))


def _bytes(name: str, given: Any, least: int) -> int:
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
    if not callable(policy) or policy in (auto, offload, save_ops, save_tagged):
        known = "one of checkpointing's, such as `auto()`, a list of operators, or a function"
        raise TypeError(f"a policy is {known}, not {policy!r}")
    return _asking(policy)


_HOST = Destination(torch.device("cpu"), pin_memory=True, min_bytes=0)
_ANSWERS: dict[CheckpointPolicy, Answer] = {
    CheckpointPolicy.MUST_SAVE: True,
    CheckpointPolicy.PREFER_SAVE: True,
    CheckpointPolicy.MUST_RECOMPUTE: False,
    CheckpointPolicy.PREFER_RECOMPUTE: False,
    CheckpointPolicy.MUST_CPU_OFFLOAD: _HOST,
    CheckpointPolicy.PREFER_CPU_OFFLOAD: _HOST,
}
