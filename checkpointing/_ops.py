"""The traits of an operator that recording needs: found once, mostly from its schema."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import _torch
from ._ambient import Generators, has_rng
from ._tree import ATOMS


class Info:
    """The traits of one operator."""

    custom: bool
    may_draw: bool

    def __init__(self, func: Any) -> None:
        full_name = func.name() if isinstance(func, _torch.OpOverload) else str(func)
        self.name: str = full_name.partition(".")[0]
        space, _, base = self.name.partition("::")
        self.space: str = space
        self.base: str = base
        self.func = func  # held, since INFOS finds it by its id
        self.run = _torch.quick_call(func)
        self.statistics = STATISTICS.get(self.name)
        self.communicates = self.space in COMMUNICATION
        self.gathers = self.space == "fsdp"  # parameters into memory that is given back
        # Custom operators may draw random numbers without torch's tag: compare the generators.
        self.custom = self.space not in ("aten", "prim", "prims")
        is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        self.may_draw = self.custom or is_random
        self._read(getattr(func, "_schema", _UNKNOWN))
        if self.statistics is not None and self.writes:  # with `out=`
            self.writes += self.statistics[0]
        self.targets: tuple[int | str, ...] = self.writes
        if self.communicates:  # its schema does not show its writes
            writes_first = self.base.endswith("_") and self.base != "monitored_barrier_"
            self.targets = (0, "out") if writes_first else ("out",)
        # It allocates memory without filling it.
        self.allocates = self.name == "aten::resize_" or self.name.startswith(_ALLOCATE)
        writes_out = all(type(place) is str for place in self.writes)
        self.overwrites = writes_out or self.base in OVERWRITES
        self.fills = self.overwrites or self.allocates  # memory that has only been allocated
        self.metadata_only = str(func) == "aten.bernoulli.p" or self._reads_only_metadata()
        INFOS[id(func)] = self  # last, since other threads look there

    def _read(self, schema: Any) -> None:
        """Find its writes and the kind of its results."""
        results = [result for result in schema.returns if "Tensor" in str(result.type)]
        self.writes: tuple[int | str, ...] = tuple(
            argument.name if argument.kwarg_only else place
            for place, argument in enumerate(schema.arguments)
            if _is_write(argument)
        )
        # Views share memory with an argument, by which they are found; results that are no tensors
        # were decided in the forward.
        is_view = not self.writes and all(result.alias_info is not None for result in results)
        if self.communicates or schema is _UNKNOWN:
            is_view = False
        self.ignored = is_view or self.base in IGNORED
        self.inplace = bool(self.writes) and all(map(_is_write, results))
        # Others belong to torch's profiler, or to other processes: they compute nothing.
        types = [str(each.type) for each in (*schema.arguments, *results)]
        lists = [kind for kind in types if "List[" in kind and "List[Tensor" not in kind]
        self.has_sizes = schema is not _UNKNOWN and all("List[int]" in kind for kind in lists)
        self.has_tensors = schema is _UNKNOWN or "Tensor" in " ".join(types)

    def updates_statistics(self, args: Any) -> bool:
        """Whether a call with these arguments updates the statistics that it takes."""
        if self.statistics is None:
            return False
        switch = self.statistics[1]
        return switch is None or bool(args[switch])

    def _reads_only_metadata(self) -> bool:
        """Whether the first argument only lends its metadata. Else a dropout mask would need the
        matrix product before it in every replay."""
        is_like = self.base.endswith("_like") or self.base.startswith("new_")
        return is_like and self.space == "aten"


def _is_write(of_schema: Any) -> bool:
    return of_schema.alias_info is not None and bool(of_schema.alias_info.is_write)


_UNKNOWN = SimpleNamespace(arguments=(), returns=())  # of operators without a schema
_ALLOCATE = ("aten::empty", "aten::new_empty")
# Operators that are not recorded. `set_` gives a tensor another storage and writes none; torch asks
# for the sizes of a nested tensor where an exception would end the process; efficient zeros are
# noticed when they are read.
IGNORED = frozenset({"set_", "_nested_tensor_size", "_efficientzerotensor"})
# In-place operators that do not read the memory that they write.
OVERWRITES = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"}
)
OVERWRITES |= {"log_normal_", "cauchy_", "geometric_"}
# Operators that update statistics, unseen by schema and version counter: the places of the
# statistics, and of the argument that turns updates on (None: they are always on). Updated
# statistics are not read.
STATISTICS: dict[str, tuple[tuple[int, ...], int | None]] = {
    **{f"aten::{library}_batch_norm": ((3, 4), 5) for library in ("native", "cudnn", "miopen")},
    **{f"aten::batch_norm_gather_stats{more}": ((3, 4), None) for more in ("", "_with_counts")},
    "aten::batch_norm_update_stats": ((1, 2), None),
}
# Operators that other processes take part in. Those of FSDP2 write to the memory of its parameters.
COMMUNICATION = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "fsdp"}
)

INFOS: dict[int, Info] = {}  # by id: an `OpOverload` is hashed by a Python function
NO_OPERATOR = Info(None)  # of what happens between two operators
NO_OPERATOR.custom = NO_OPERATOR.may_draw = False


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in an operator's argument or result, in order."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) is not tuple and type(value) is not list:
        return []
    found: list[Tensor] = []
    for part in value:
        if isinstance(part, Tensor):
            found.append(part)
        else:
            found += tensors_of(part)
    return found


def generators_of(args: Any, kwargs: dict[str, Any], python: bool) -> Generators:
    """The state of the generator that a random operator is about to draw from; with `python`, also
    those of Python and NumPy."""
    values = [value for value in (*args, *kwargs.values()) if type(value) not in ATOMS]
    generators = [value for value in values if type(value) is _Generator]
    if generators:
        return Generators(False, (), generators, python)
    devices = {tensor.device for tensor in tensors_of(values)}
    if kwargs.get("device") is not None:
        devices = {torch.device(kwargs["device"])}
    others = [device for device in devices if device.type != "cpu" and has_rng(device)]
    return Generators(not others, others, (), python)


_Generator = torch.Generator  # `isinstance` would call a Python function
