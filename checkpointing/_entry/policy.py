"""The values that a region keeps, and the policies that choose them.

Keeping a value *is* a checkpoint: recompute starts from it. A scope, or a replayed function, holds
the value. A rerun pins it, so that a decision of the forward stands in the rerun.

A policy is a frozen value. For each operator and each tag it answers whether to keep the result, to
recompute it, or to keep it elsewhere. `as_policy` turns everything that a user may give into one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from textwrap import shorten
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from .. import _torch, errors
from .._engine import Destination, aside, map_tensors, thread
from .._record import Answer, Placement, Places
from .sizes import bytes_of

T = TypeVar("T")


@contextmanager
def opaque() -> Iterator[None]:
    """Mark a block in which memory is written unseen: by a raw kernel, `ctypes` or NumPy.

    Values read after the block are kept, and never computed again across it. Values read before it,
    except parameters, are copied first, so that a recompute finds them as they were. (Where plain
    code has saved such a tensor, its backward finds the later values.) Operators in the block are
    not recorded and run once. A tensor that is saved in the block, and written there later, is a
    `ChangedError` in backward. Outside of a scope or a replayed function this does nothing.

    Without `opaque()`, only memory that torch has allocated and not yet written may be filled
    unseen. `determinism_check="values"` finds other writes, and names the tensors.

    Example:
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
    """Keep a value in the innermost region: recompute starts from it.

    Args:
        x: a tensor of any shape, dtype and device, or any nesting of containers and dataclasses of
            them.

    Returns:
        `x` itself. A rerun, which calls the function again, writes the kept values into the
        recomputed tensors where these differ. So keep values that the function computes, or a clone
        of others.

    The whole storages of the tensors are kept. The hooks around the region save them, so
    `torch.autograd.graph.save_on_cpu` offloads them. Tensors from outside of the region are held
    anyway.

    Example:
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

    Source of the method: `jax.ad_checkpoint.checkpoint_name` with the policy
    `save_only_these_names`.
    """
    region = thread.region
    if region is None:
        return x
    return map_tensors(region.keep, x)  # type: ignore[no-any-return]


def tag(x: T, name: str) -> T:
    """Name a value, for `policy=save_tagged(name)`.

    The innermost scope or replay with a policy decides. If it does not keep the name, nothing
    happens.

    Args:
        x: a tensor of any shape, dtype and device, or any nesting of containers and dataclasses of
            them.
        name: any text. Several values may have the same name.

    Returns:
        `x` itself, with its gradient and its graph.

    Raises:
        TypeError: for a name that is no string.

    Example:
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
        raise TypeError(f"a tag is a string, not {shorten(repr(name), 80)}: tag(x, name)")
    region = thread.region
    if region is None:
        return x
    return map_tensors(lambda tensor: region.tag(tensor, name), x)  # type: ignore[no-any-return]


# ---- policies

# Each: operators or names, or a function to ask about operators; and the answer for what is kept.
Choices = tuple[tuple[Any, Answer], ...]


@dataclass(frozen=True)
class Policy:
    """The values to keep. Policies compare, hash and print; `a | b` keeps the values of either."""

    text: str
    # The first choice that keeps a value decides.
    of_ops: Choices = ()
    of_tags: Choices = ()
    # Whether checkpoints are planned, and within which bounds.
    placement: Placement | None = None
    # The destinations of values about which it is not asked.
    places: Places = Places()  # noqa: RUF009  # it is immutable

    @property
    def on_op(self) -> Any:
        """Decides about the result of an operator. None: never asked."""
        return partial(_decide, self.of_ops) if self.of_ops else None

    def on_tag(self, name: str) -> Answer:
        """Decides about a value with this name."""
        return _decide(self.of_tags, name)

    def __repr__(self) -> str:
        return self.text

    def __or__(self, other: Any) -> "Policy":
        return _either(self, as_policy(other))

    def __ror__(self, other: Any) -> "Policy":
        return _either(as_policy(other), self)


class _Operators(frozenset[Any]):
    """Pickled by their names below `torch.ops`, since operators themselves can't be."""

    def __reduce__(self) -> Any:
        named = [
            str(op) if isinstance(op, _torch.OpOverload) else f"higher_order.{op}" for op in self
        ]
        return _operators_named, (*named,)


def _operators_named(*names: str) -> _Operators:
    return _Operators([attrgetter(name)(torch.ops) for name in names])


def _decide(choices: Choices, asked: Any, *about: Any) -> Answer:
    for chosen, answer in choices:
        found = asked in chosen if isinstance(chosen, frozenset) else _ask(chosen, asked, *about)
        if found:
            return answer if found is True else found
    return False


def _ask(function: Any, op: Any, args: Any, kwargs: Any, result: Any) -> Answer:
    """The answer of a function as torch's selective checkpointing takes it."""
    context = SelectiveCheckpointContext(is_recompute=False, op_output=result)
    try:
        answer = function(context, op, *args, **kwargs)
    except TypeError as error:
        raise errors.hidden(f"the policy, asked for {op},", error) from error
    if isinstance(answer, bool):
        return answer
    if not isinstance(answer, CheckpointPolicy):
        raise ValueError(
            f"a policy answers with a CheckpointPolicy or a bool, not {answer!r} (for {op})"
        )
    if "OFFLOAD" in answer.name:
        return Destination(torch.device("cpu"), pin_memory=True, min_bytes=0)
    return "SAVE" in answer.name


def _either(first: Any, second: Any) -> Policy:
    if first is None or second is None:
        raise TypeError("None is no policy to combine with: it keeps nothing")
    if first.placement and second.placement:
        raise TypeError(
            f"{first!r} and {second!r} can't both place checkpoints: give one auto(...) all it "
            "needs"
        )
    return Policy(
        f"{first!r} | {second!r}",
        first.of_ops + second.of_ops,
        first.of_tags + second.of_tags,
        first.placement or second.placement,
        Places(*(a or b for a, b in zip(first.places, second.places, strict=True))),
    )


def save_ops(*ops: Any) -> Policy:
    """A policy: keep the results of these operators.

    Args:
        ops: `OpOverload`s, such as `torch.ops.aten.mm.default`: the operators that the dispatcher
            runs below autograd. `torch.nn.functional.linear` is `aten.addmm.default` there.

    Returns:
        A policy for `policy=`. Policies combine with `|`.

    Raises:
        ValueError: for anything else.

    Example:
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
                f"a policy lists OpOverloads such as torch.ops.aten.mm.default, not {op!r}. Of an "
                "operator such as torch.ops.aten.mm, name one of its overloads."
            )
    listed = _Operators(ops)
    text = ", ".join(sorted(map(str, listed)))
    return Policy(f"save_ops({text})", of_ops=((listed, True),))


def save_tagged(*names: str) -> Policy:
    """A policy: keep the values that have one of these names from `tag`.

    Args:
        names: the names, any text.

    Returns:
        A policy for `policy=`. Policies combine with `|`.

    Raises:
        TypeError: for names that are no strings.

    Example:
        >>> from checkpointing import save_tagged
        >>> save_tagged("keys", "values") == save_tagged("values", "keys")
        True

    Source of the method: `jax.checkpoint_policies.save_only_these_names`.
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a tag is a string, not {name!r}")
    listed = frozenset(names)
    text = ", ".join(map(repr, sorted(listed)))
    return Policy(f"save_tagged({text})", of_tags=((listed, True),))


def auto(*, budget: int | str | None = None, peak: int | str | None = None) -> Policy:
    """A policy: plan the checkpoints of a block, for little memory, within a budget, or for a peak.

    The first run of a block is recorded. At its end, a plan is computed, once, by simulating the
    memory of forward and backward. That run keeps the values of the plan that still exist, such as
    hidden states that a model returns; later runs keep all of them.
    A run that takes another path gets a plan of its own. The same program has the same plan in each
    step and on each rank. Modules, loops, functions and inner regions need no annotation.

    Where four of six runs take new paths (experts that are chosen, layers that are dropped), a
    block is not planned any more. It is cut while it runs, where little is alive of what it has
    made, and `scope.stats.cuts` says where. This ends when six runs have taken two ways at most.
    Such a block needs about as much memory as with a checkpoint around each layer, whatever `peak`
    or `budget` allows. If the budget has no room for that, and if the policy is given to `offload`,
    every new path is planned instead, which takes a second or more per 1,000 operators.

    A plan also serves smaller runs. It is replaced when a run saves more than 1.5 times the bytes,
    or so many more that `peak` or `budget` would be exceeded, when gradients exist that the plan
    assumed to be missing, or when more blocks wait for backward. The first larger run may still
    exceed `peak`: begin with the largest batch.

    The first plan assumes that backward begins at the end of the block: put one scope around the
    whole model and its loss. Later plans take into account that other blocks run in between, that
    some of what the block has saved waits for a later backward, and that a backward has
    `retain_graph=True`.

    Args:
        budget: the most bytes that the block keeps for backward, at any moment of the forward. An
            int, or text such as `"1.5 GiB"` or `"200 MB"`. The results that are most expensive to
            recompute per byte are kept first. Results that your code still holds when the block
            ends do not count. None: the plan bounds the peak of the step instead.
            The bound is the peak of a checkpoint around each block that the program repeats, or the
            least peak possible, if such checkpoints need over half more. A block for which
            autograd saves less than 8 KiB is recomputed as a whole.
        peak: the most bytes that forward and backward of the block may need, beside what is there
            when it begins: an int, or text as for `budget`, which it excludes. The plan is the one
            with the least recompute under this peak. Gradients that do not exist yet count.

    Returns:
        A policy for `policy=`. Policies combine with `|`.

    Raises:
        TypeError, ValueError: if `budget` or `peak` is no number of bytes, or both are given.

    Warns:
        UserWarning: at the end of a block, if the budget has no room for checkpoints that lower the
            peak, or if no plan stays under the peak. The warning names a budget that is enough, or
            the least peak, and the plan is the one with the least peak.

    A budget bounds the kept values, not the peak. A step also needs its inputs, parameters and
    states of random generators, the values that the model holds itself, and, in backward, the
    tensors saved between two checkpoints, and gradients. The plan takes the least peak within the
    budget, and `scope.stats.peak_predicted` is that peak. If the tensors saved between two
    checkpoints exceed the budget, backward makes checkpoints among them while it recomputes, and
    again among those. With room for one checkpoint, memory is O(log(depth)).

    Gradients that do not exist yet count as room: backward allocates them when the values kept for
    later layers have been freed. Values that are alive anyway, such as results that the caller
    collects, are kept for free.

    Example:
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

    Source of the method: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; values
    kept beside the checkpoints as in Jain et al. 2020, "Checkmate", by a greedy rule.
    """
    if budget is not None:
        if peak is not None:
            raise ValueError("auto() takes a budget or a peak, not both")
        nbytes = bytes_of("budget", budget)
        return Policy(f"auto(budget={nbytes})", placement=Placement(nbytes))
    if peak is not None:
        nbytes = bytes_of("peak", peak)
        return Policy(f"auto(peak={nbytes})", placement=Placement(None, peak=nbytes))
    return Policy("auto()", placement=Placement(None))


def offload(
    policy: Any = None,
    *,
    device: str | torch.device = "cpu",
    pin_memory: bool = True,
    min_bytes: int | str = 1024,
    inputs: bool = False,
) -> Policy:
    """A policy: hold the kept values on the host until recompute needs them.

    Args:
        policy: the values to keep: `save_ops(...)`, `save_tagged(...)`, `auto(...)`, combinations
            of them, a list of operators or a function. None: all tensors that autograd saves in the
            block, so that nothing is recomputed. Values given to `keep` are offloaded, too.
            Parameters, other leaves that require grad, and views of them stay on their device.
        device: the device that holds them. Tensors that are on it already are copied, too.
        pin_memory: use page-locked memory, without which copies do not overlap with the
            computation.
        min_bytes: smaller storages are not offloaded. An int, or text as for `auto`.
        inputs: offload the tensors that the block reads from outside, too, instead of saving them
            through the hooks around the block.

    Returns:
        A policy for `policy=`. Policies combine with `|`.

    Raises:
        TypeError, ValueError: for an argument of another kind, or a device that holds no data.
        RuntimeError: of `torch.device`, for one that it does not know.

    On CUDA and XPU, copies run on streams of their own. Tensors are prefetched in the order in
    which replays will need them; another order gives the same bits, with more waiting. A budget of
    `auto` bounds the offloaded bytes, and the rest of it is not used for more.

    Example:
        >>> import torch
        >>> from checkpointing import checkpoint_scope, offload, save_tagged, tag
        >>> x = torch.randn(64, 64, requires_grad=True)
        >>> with checkpoint_scope(policy=offload(save_tagged("middle"))) as scope:
        ...     y = tag(x.sin().exp(), "middle").cos().tanh()
        >>> scope.stats.bytes_kept
        16384
        >>> offload(min_bytes="1 MiB") | save_tagged("middle")
        offload(min_bytes=1048576) | save_tagged('middle')

    Source of the method: `torch.autograd.graph.save_on_cpu`, and JAX's policy
    `save_and_offload_only_these_names`.
    """
    device = torch.device(device)
    if device.type == "meta":
        raise ValueError("nothing can wait on the device 'meta', which holds no data")
    there = Destination(device, bool(pin_memory), bytes_of("min_bytes", min_bytes))
    inner = as_policy(policy) or Policy("")
    given = {**there._asdict(), "device": str(device), "inputs": inputs}
    defaults: Any = offload.__kwdefaults__
    others = [f"{name}={value!r}" for name, value in given.items() if value != defaults[name]]

    def elsewhere(choices: Choices) -> Choices:
        return tuple((chosen, there if answer is True else answer) for chosen, answer in choices)

    return Policy(
        f"offload({', '.join(filter(None, [inner.text, *others]))})",
        elsewhere(inner.of_ops),
        elsewhere(inner.of_tags),
        inner.placement and inner.placement._replace(place=there),
        Places(there, there if policy is None else None, there if inputs else None),
    )


def as_policy(policy: Any) -> Policy | None:
    """The policy for an argument of the user: a policy, a list of operators, or a function
    `(ctx, op, *args, **kwargs) -> CheckpointPolicy | bool`, as in torch's selective checkpointing.

    Raises:
        TypeError: for anything else.
        ValueError: for a list with something else than `OpOverload`s in it.
    """
    if isinstance(policy, Policy | None):
        return policy
    if isinstance(policy, list | tuple | set | frozenset):
        return save_ops(*policy)
    is_function = callable(policy) and not isinstance(policy, nn.Module)
    if not is_function or policy in (auto, offload, save_ops, save_tagged):
        raise TypeError(
            "a policy is one of checkpointing's, such as `auto()`, a list of operators, or a "
            f"function, not {shorten(repr(policy), 80)}"
        )
    text = f"<policy {getattr(policy, '__qualname__', policy)}>"
    return Policy(text, of_ops=((policy, True),))
