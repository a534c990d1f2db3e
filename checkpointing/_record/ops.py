"""The traits of an operator that recording needs: found once, mostly from its schema."""

import re
from copy import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._engine import CPU_RNG, Generators, rngs_of

# Objects of these types are the same if they are equal; so are floats other than nan and 0.
PLAIN = frozenset({int, float, bool, str, torch.dtype, torch.device})


class Info:
    """The traits of one operator."""

    communicates: bool
    gathers: bool
    custom: bool

    def __init__(self, func: Any) -> None:
        full_name: str = func.name() if isinstance(func, _torch.OpOverload) else str(func)
        name = full_name.partition(".")[0]
        space, _, self.base = name.partition("::")
        tags = getattr(func, "tags", ())
        self.func = func  # held, since INFOS finds it by its id
        self.run = _torch.quick_call(func)
        # In inference mode, one that consists of others comes whole. It may write, or show memory,
        # as no schema says. (`set_` would come back in its first form: see TAKE_STORAGE.)
        self.is_composite = self.base != "set_" and _torch.is_composite(func)
        self.statistics, self.switch = STATISTICS.get(name, ((), None))
        self.communicates = space in COMMUNICATION
        self.gathers = space == "fsdp"  # parameters into memory that is given back
        # Custom operators may draw random numbers without torch's tag: compare the generators.
        self.custom = space not in ("aten", "prim", "prims")
        # (`linalg_pinv` calls others, too, though it has kernels like any other.)
        if self.custom or self.is_composite or self.base == "linalg_pinv":
            self.run = _torch.with_others_inside(self.run)
        self.may_draw = self.custom or torch.Tag.nondeterministic_seeded in tags
        self.is_pointwise = torch.Tag.pointwise in tags or func is _torch.CAST
        self.sizes_depend_on_data = torch.Tag.dynamic_output_shape in tags
        self.pools = "_pool" in self.base  # its indices are for autograd alone
        # In a mode, torch does not count versions up for these: each block does.
        self.is_uncounted = self.base.startswith("_foreach_")
        # It allocates memory without filling it.
        self.allocates = _ALLOCATES.match(name) is not None
        # Its first argument only lends its metadata. Else a dropout mask would need the matrix
        # product before it in every replay.
        self.metadata_only = _READS_METADATA.match(full_name) is not None
        self._read(getattr(func, "_schema", _UNKNOWN))
        INFOS[id(func)] = self  # last, since other threads look there

    def _read(self, schema: Any) -> None:
        """Find its writes and the kind of its results."""
        results = [result for result in schema.returns if "Tensor" in str(result.type)]
        self.targets: tuple[int | str, ...] = tuple(
            argument.name if argument.kwarg_only else place
            for place, argument in enumerate(schema.arguments)
            if getattr(argument.alias_info, "is_write", False)
        )
        # It does not read the memory that it writes. (Custom operators may.)
        writes_out = not self.custom and all(type(place) is str for place in self.targets)
        self.overwrites = writes_out or self.base in OVERWRITES
        if self.communicates:  # its schema does not show its writes
            self.targets = (0, "out") if self.base.endswith("_") else ("out",)
        places = {argument.name: place for place, argument in enumerate(schema.arguments)}
        # The place of the rate at which attention drops, which draws nothing without one. (With
        # custom operators, generators are compared.)
        self.dropout = None if self.custom else places.get("dropout_p")
        # The place of an offset from the beginning of the storage.
        self.offset = places.get("storage_offset")
        # The place of a random state that is in no generator. cuDNN writes it, which its schema
        # does not show.
        self.random_state = places.get("dropout_state")
        # Views share memory with an argument, by which they are found; results that are no tensors
        # were decided in the forward.
        is_new = [result.alias_info is None for result in results]
        does_something = any([self.targets, *is_new])
        self.is_view = self.base == "set_" or not does_something
        types = " ".join([str(each.type) for each in (*schema.arguments, *results)])
        # Without tensors, they belong to torch's profiler, or to other processes.
        self.is_passed = self.base in PASSED or "Tensor" not in types
        self.plain = PLAIN if _OTHER_LISTS.search(types) else PLAIN | {list}

    def draws(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments may draw random numbers."""
        if self.dropout is None:
            return self.may_draw
        return bool(by_place(args, kwargs).get(self.dropout))

    def targets_of(self, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that a call with these arguments may write, statistics included."""
        given = by_place(args, kwargs)
        return tensors_of([given.get(place) for place in (*self.targets, *self.statistics)])


# The schema of operators without one: they take and return anything.
_ANYTHING = SimpleNamespace(type="List[Any], Tensor", alias_info=None)
_UNKNOWN = SimpleNamespace(arguments=(), returns=(_ANYTHING,))
_OTHER_LISTS = re.compile(r"List\[(?!Tensor|int\])")  # than those of tensors, or of sizes
_READS_METADATA = re.compile(r"aten::(new_|\w+_like\b|bernoulli\.p$)")
_ALLOCATES = re.compile(r"aten::(empty|new_empty|resize_$)")
# Operators that are not recorded: torch asks for the sizes of a nested tensor where an exception
# would end the process; efficient zeros are noticed when they are read. (`set_` gives a tensor
# another storage and writes none.)
PASSED = frozenset({"_nested_tensor_size", "_efficientzerotensor"})
# In-place operators that do not read the memory that they write.
OVERWRITES = frozenset(
    {
        "bernoulli_",
        "cauchy_",
        "copy_",
        "exponential_",
        "fill_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "uniform_",
        "zero_",
    }
)
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


def info_of(func: Any) -> Info:
    return INFOS.get(id(func)) or Info(func)


NO_OPERATOR = Info(None)  # of what happens between two operators
NO_OPERATOR.custom = False
GATHERING_COPY = copy(info_of(_torch.COPY))  # of FSDP2, for one process
GATHERING_COPY.communicates = GATHERING_COPY.gathers = True


def by_place(args: Any, kwargs: dict[str, Any]) -> dict[Any, Any]:
    """Arguments by their places and names."""
    return {**dict(enumerate(args)), **kwargs}


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in an operator's argument or result, in order."""
    found: list[Tensor] = []
    for part in value if type(value) in (tuple, list) else (value,):
        if isinstance(part, Tensor):
            found.append(part)
        elif type(part) in (tuple, list):
            found += tensors_of(part)
    return found


def generators_of(args: Any, kwargs: dict[str, Any], python: bool) -> Generators:
    """The state of the generator that a random operator is about to draw from; with `python`, also
    those of Python and NumPy."""
    values = (*args, *kwargs.values())
    generators = [value for value in values if type(value) is torch.Generator]
    devices = {tensor.device for tensor in tensors_of(values)}
    if kwargs.get("device") is not None:
        devices = {torch.device(kwargs["device"])}
    rngs = rngs_of(() if generators else devices, generators)
    return Generators(rngs or [CPU_RNG], python)
