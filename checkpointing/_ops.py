"""What recording needs to know of an operator: found once, mostly from its schema."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _torch
from ._ambient import Generators, has_rng
from ._tree import ATOMS


class Info:
    """What recording needs to know of an operator; found once."""

    def __init__(self, func: Any) -> None:
        name = (func.name() if isinstance(func, _torch.OpOverload) else str(func)).partition(".")[0]
        space, _, base = name.partition("::")
        schema = getattr(func, "_schema", None)
        tags = getattr(func, "tags", ())
        arguments = () if schema is None else schema.arguments
        aliases = (
            []
            if schema is None
            else [r.alias_info for r in schema.returns if "Tensor" in str(r.type)]
        )
        self.func, self.name, self.base = func, name, base
        self.run = _torch.quick_call(func)  # past one Python call, where there is one to pass
        self.writes = tuple(
            argument.name if argument.kwarg_only else i
            for i, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        self.statistics = STATISTICS.get(name)
        if self.writes and self.statistics is not None:  # with `out=`
            self.writes += self.statistics[0]
        self.communicates = space in COMMUNICATION
        self.gathers = (
            space == "fsdp"
        )  # parameters, whose memory is given back when their module has run
        self.targets = self.writes
        if self.communicates:  # it writes without a word in its schema
            self.targets = (
                (0, "out") if base.endswith("_") and base != "monitored_barrier_" else ("out",)
            )
        # Views share their storage with an argument, which is how values are found; other results that are no tensors
        # were decided in the forward.
        views = not self.writes and all(a is not None and not a.is_write for a in aliases)
        self.ignored = base in IGNORED or (schema is not None and views and not self.communicates)
        self.inplace = bool(self.writes) and all(a is not None and a.is_write for a in aliases)
        # Without filling.
        self.allocates = name == "aten::resize_" or name.startswith(
            ("aten::empty", "aten::new_empty")
        )
        # The first argument only lends its metadata. Without this a dropout mask would drag the matrix product before
        # it into every replay.
        is_like = space == "aten" and (base.endswith("_like") or base.startswith("new_"))
        self.metadata_only = is_like or str(func) == "aten.bernoulli.p"
        self.overwrites = base in OVERWRITES or all(type(place) is str for place in self.writes)
        # Custom operators may draw random numbers without torch's tag: look whether the generators have moved.
        self.custom = space not in ("aten", "prim", "prims")
        self.may_draw = self.custom or torch.Tag.nondeterministic_seeded in tags
        # Others are between torch and its profiler, or other processes: there is nothing to make again.
        self.has_tensors = schema is None or any(
            "Tensor" in str(a.type) for a in (*arguments, *schema.returns)
        )
        INFOS[id(func)] = (
            self  # last, for other threads; by id, as an `OpOverload` is hashed by a Python function
        )


# Operators that are not recorded: `set_` gives a tensor another storage and writes none; the sizes of a nested tensor
# are asked for where an exception would end the process; efficient zeros are noticed when they are read.
IGNORED = frozenset({"set_", "_nested_tensor_size", "_efficientzerotensor"})
# In-place operators that don't read what they overwrite.
OVERWRITES = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"}
)
OVERWRITES |= {"log_normal_", "cauchy_", "geometric_"}
# Operators that update statistics without saying so in their schema, and in no version counter: where they take them,
# and which argument says whether they update them (None: they do). Updated statistics are not read.
STATISTICS: dict[str, tuple[tuple[int, ...], int | None]] = {
    **{f"aten::{library}_batch_norm": ((3, 4), 5) for library in ("native", "cudnn", "miopen")},
    **{f"aten::batch_norm_gather_stats{more}": ((3, 4), None) for more in ("", "_with_counts")},
    "aten::batch_norm_update_stats": ((1, 2), None),
}
# Operators that other processes take part in; those of FSDP2 put what has come in where its parameters lie.
COMMUNICATION = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "fsdp"}
)

INFOS: dict[int, Info] = {}  # which refer to the operators, so that ids stay valid


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in an operator's argument or result, in order."""
    if isinstance(value, Tensor):
        return [value]
    parts = value if type(value) is tuple or type(value) is list else ()
    return [
        tensor
        for part in parts
        for tensor in ((part,) if isinstance(part, Tensor) else tensors_of(part))
    ]


def generators_of(args: Any, kwargs: dict[str, Any], python: bool) -> Generators:
    """The state of the generator that a random operator is about to draw from; with `python` also those of Python and
    NumPy."""
    generators: list[torch.Generator] = []
    devices: set[torch.device] = set()
    for arg in (*args, *kwargs.values()):
        kind = type(arg)
        if kind is Tensor:
            devices.add(arg.device)
        elif kind is _Generator:  # `isinstance` goes through a Python function
            generators.append(arg)
        elif kind not in ATOMS:
            devices.update([tensor.device for tensor in tensors_of(arg)])
    if generators:
        return Generators(False, (), generators, python)
    if kwargs.get("device") is not None:
        devices = {torch.device(kwargs["device"])}
    others = [device for device in devices if device.type != "cpu" and has_rng(device)]
    return Generators(not others, others, (), python)


_Generator = torch.Generator
