"""Regions around whole modules of a model, in place and reversibly: `checkpoint_modules`.

The region becomes the `forward` in the module's `__dict__`, where `nn.Module.__call__` finds it.
Class, names, hooks and `state_dict` do not change. The region holds its module weakly (no cycle
keeps the parameters), is copied and pickled with it, and looks up the class's `forward` in every
call, since others exchange the class (FSDP2, parametrisations).

Rejected: wrapper modules (names change), a new class per module (breaks `type(module)` and
pickling), and a bound method as `forward` (a cycle; pickled by name, which finds the method of the
class).
"""

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Union
from weakref import ref

from torch import nn
from torch.compiler import is_dynamo_compiling
from typing_extensions import Self, Unpack

from .. import errors
from .api import (
    CheckpointedModule,
    CheckpointedObject,
    Given,
    Options,
    options_of,
    refuse_generators,
    run,
)

Select = Union[type, str, Callable[[str, nn.Module], bool], Sequence["Select"]]  # noqa: UP007


def checkpoint_modules(
    model: nn.Module, select: Select, /, **options: Unpack[Given]
) -> "CheckpointedModules":
    """Recompute the activations of selected modules of a model, in place.

    Each module runs in a region of its own. Names, `state_dict`, `isinstance`, hooks (which run
    outside the regions, once), `copy.deepcopy`, pickling, FSDP2, DDP and `torch.compile` work as
    before. Copies and unpickled models run in regions, too, with their own parameters; `del
    module.forward` removes the region of a copy.

    Args:
        model: any module.
        select: a class; a pattern of names as in `model.named_modules()`; a function of name and
            module that returns whether to select it; or a tuple or list of these, of which one must
            match. In a pattern, `*` matches one component or a part of it: `"model.layers.*"`
            selects `model.layers.0`, but not `model.layers.0.attn`. Modules that are never called
            (`nn.ModuleList`) are not selected; those with several names are selected once.
        options: as for `checkpointed`, for each region. `name` defaults to the name of the module.

    Returns:
        A handle with the `names` of the modules, in the order of `model.named_modules()`, and
        `remove()`, which restores their `forward`. As a context manager it does so at the end of
        the block.

    Raises:
        TypeError: if `model` is no module, `select` or an option is of an unknown kind, or a
            `forward` is a generator or async function.
        ValueError: if no module is selected (the message lists the classes in the model), a module
            is in a region already, or options contradict each other. The model is then unchanged.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from checkpointing import checkpoint_modules
        >>> layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
        >>> model = nn.Sequential(*layers)
        >>> handle = checkpoint_modules(model, "*")
        >>> handle.names
        ('0', '1', '2')
        >>> model(torch.randn(4, 8)).sum().backward()  # calls the three once more
        >>> handle.remove()

    Source of the method: `apply_activation_checkpointing` of torch, which wraps modules instead.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"checkpoint_modules takes a module, not {model!r}")
    picked: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if _is_called(module) and _picks(select, name, module):
            picked.setdefault(module, name)
    if not picked:
        raise ValueError(_nothing_picked(model, select))
    for module, name in picked.items():
        described = f"{name or 'the model itself'} ({type(module).__qualname__})"
        is_wrapped = isinstance(module, CheckpointedModule) and _is_region(module)
        if is_wrapped or _is_region(inspect.unwrap(module.forward, stop=_is_region)):
            raise ValueError(
                f"checkpoint_modules: {described} runs in a region already. Call remove() on the "
                "handle of the earlier call, remove `checkpointed` from its class or its forward, "
                "or select other modules."
            )
        if not inspect.isfunction(inspect.getattr_static(type(module), "forward")):
            raise TypeError(
                f"checkpoint_modules can't wrap {described}: it has no method `forward` in Python."
            )
        refuse_generators("checkpoint_modules", module)
    return CheckpointedModules(picked, options_of("checkpoint_modules", options))


def _is_region(callee: Any) -> bool:
    return getattr(callee, "_enters_region", False)


def _picks(select: Any, name: str, module: nn.Module) -> Any:
    if isinstance(select, type):
        return isinstance(module, select)
    if isinstance(select, str):
        # With as many dots as the name has, a `*` matches none of them.
        has_as_many = name.count(".") == select.count(".")
        return name != "" and has_as_many and fnmatchcase(name, select)
    if isinstance(select, tuple | list):
        return any(_picks(part, name, module) for part in select)
    if callable(select) and not isinstance(select, nn.Module):
        return select(name, module)
    raise TypeError(
        "checkpoint_modules: select is a class, a pattern of names, a function of name and module, "
        f"or a tuple or list of these, not {type(select).__qualname__}"
    )


def _is_called(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _nothing_picked(model: nn.Module, select: Select) -> str:
    """What there is: `3 Block 'layers.*', 3 Linear 'layers.*.inner'`."""
    number = r"\b\d+\b"
    found = Counter(
        f"{type(module).__qualname__} {re.sub(number, '*', name)!r}"
        for name, module in model.named_modules()
        if _is_called(module)
    )
    there = ", ".join(f"{count} {kind}" for kind, count in found.items())
    return (
        f"checkpoint_modules: {getattr(select, '__qualname__', select)} picks no module of this "
        f"{type(model).__qualname__}. There are {there}."
    )


class CheckpointedModules:
    """The handle that `checkpoint_modules` returns."""

    def __init__(self, picked: dict[nn.Module, str], options: Options) -> None:
        self.names = tuple(picked.values())
        self._forwards = {}
        for module, name in picked.items():
            self._forwards[module] = module.__dict__["forward"] = _Forward(module, name, options)

    def remove(self) -> None:
        """Restore the `forward` of the modules. Regions that wait for backward still recompute. A
        second call does nothing."""
        for module, forward in self._forwards.items():
            # A wrapper may still call it.
            forward.options = forward.options._replace(enabled=False)
            forward._enters_region = False
            if module.__dict__.get("forward") is forward:
                del module.forward
                if forward.own is not None:
                    module.__dict__["forward"] = forward.own
        self._forwards = {}

    def __enter__(self) -> Self:
        if not self._forwards:
            raise errors.CheckpointError(
                f"{self} has been removed: call checkpoint_modules once more."
            )
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.names}"


class _Forward(CheckpointedObject):
    """The `forward` of one module, in regions."""

    _enters_region = True

    def __init__(self, module: nn.Module, name: str, options: Options) -> None:
        self._module = ref(module)
        self.own = module.__dict__.get("forward")  # from accelerate's hooks, or a compiler
        self.options = options._replace(name=options.name or name or type(module).__qualname__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if not is_dynamo_compiling():
            caller = sys._getframe(1).f_locals.get("self")
            # A shallow copy (of `copy.copy`, or of the package `higher`) has this object, too.
            if getattr(caller, "__dict__", {}).get("forward") is self:
                module = caller
        return run(self.options, self._forward_of(module), args, kwargs, "")

    @property
    def __wrapped__(self) -> Any:
        return self._forward_of(self._module())

    @property
    def __code__(self) -> Any:  # which `torch.export` looks at
        return self.__wrapped__.__code__

    def _forward_of(self, module: Any) -> Any:
        if self.own is not None:
            return self.own
        return type(module).forward.__get__(module)

    def __getstate__(self) -> Any:
        return self._module(), self.own, self.options

    def __setstate__(self, state: Any) -> None:
        module, self.own, self.options = state
        self._module = ref(module)
