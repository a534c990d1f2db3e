"""Gradients: what backward makes, and how long that is there.

One walk over the steps of a path, the last one first, as autograd takes them. A step uses up the
gradients of what it has made, and makes new ones of what it has read. Additions hand on the one
that they get, `cat` hands on views of it, and `sum` one number, expanded. Where a gradient is there
already, from a later step, the new one is added to it in place. It cannot be written where it has
other users, or comes through a view of the tensor at which both meet: then the sum is a third one.
A view that takes a part out of a tensor, or expands it, makes a gradient as large as that tensor.

Kernels copy gradients that are not in order: those of `x` in `x.t()`, and parts of one that `cat`
hands on. Pointwise operators make gradients in the order of those that they get.

Invariant: a gradient is there from the step that makes it down to the last one that uses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from .. import _torch
from .._record import Path, Step

Span = tuple[int, int, int]  # the first and the last position, and bytes


class Gradient:
    """One that backward has made at a step."""

    def __init__(self, nbytes: int, index: int) -> None:
        self.nbytes, self.index = nbytes, index
        self.users = 0  # tensors of which it is the gradient, or has that as a part


class Use(NamedTuple):
    """The backward of a step that reads a parameter."""

    step: int
    used: int  # bytes of the gradients that it uses up
    makes_view: bool  # of a new tensor, as for a transposed weight


class Gradients:
    """The gradients of what a path has made, and of parameters. The backward of a step is at the
    position after it."""

    def __init__(
        self,
        path: Path,
        sizes: Mapping[int, int],
        parameters: Mapping[int, int],
        ends: Set[int],
        scale: float,
    ) -> None:
        """`sizes` are bytes by memory that the path has made, and that can have a gradient, `scale`
        times those in the program; `parameters` are bytes by memory of those that train. Backward
        gets gradients of `ends`."""
        self._path, self._parameters, self._ends, self._scale = path, parameters, ends, scale
        self.spans: list[Span] = []  # of what backward makes, but for parameters
        self.memories: set[int] = set()  # that have a gradient
        # By memory of a parameter, the last step first.
        self._uses: dict[int, list[Use]] = defaultdict(list)
        self._there: dict[int, Gradient] = {}  # by extent
        self._met: dict[int, int] = {}  # by extent: the tensor whose gradient that is
        self._sizes = {**sizes}  # by extent
        # By step that is a view of parts of a tensor: the parts, and that tensor.
        self._parts: dict[int, tuple[Sequence[int], int]] = {}
        self._reordered: set[int] = set()  # cells in another order than what they show
        self._out_of_order: set[int] = set()  # extents whose gradients are not in order
        for step in path.steps:
            if step.is_alias and step.reads:
                self._find_parts(step)
                self._find_order(step)
        for step in reversed(path.steps):
            if step.index in self._parts:
                self._put_together(step)
            elif not step.is_alias:
                self._operate(step)

    def of_parameters(self, waiting: Set[int], retained: int) -> Iterator[Span]:
        """The gradients of parameters. Those `waiting` have none yet; from the position `retained`
        on, they get one from another backward before this one."""
        for number, uses in self._uses.items():
            nbytes = self._parameters[number]
            last, *others = uses
            if number in waiting:
                yield 0, last.step if last.step < retained else len(self._path.steps), nbytes
            elif others:  # the sum over all uses waits for the first one
                yield uses[-1].step + 1, last.step, nbytes
            for use in uses:
                yield use.step + 1, use.step + 1, nbytes
            # Autograd adds gradients to the one that it has, in place. Where that is a view, the
            # sum is a third tensor, beside both; what the step has used is free by then.
            if others and last.makes_view:
                at = others[0].step + 1
                yield at, at, max(0, nbytes - others[0].used)

    def _find_parts(self, step: Step) -> None:
        """Find the parts that a view takes out of a tensor, if it does, and their bytes."""
        extent = self._path.extent
        whole = extent[step.reads[0][0]]
        parts = [cell for cell, _ in step.memories if extent[cell] == cell]
        size = self._sizes.get(whole) or self._parameters.get(whole)
        if not parts or size is None:
            return
        self._parts[step.index] = parts, whole
        nbytes = size // len(parts)
        if step.takes_part:
            nbytes = int(step.scratch * self._scale)
        self._sizes.update(dict.fromkeys(parts, nbytes))

    def _find_order(self, step: Step) -> None:
        """Find whether a view shows a tensor in another order, as a transposed one does."""
        base = step.reads[0][0]
        if len(step.memories) == 1 and step.reorders != (base in self._reordered):
            self._reordered.add(step.memories[0][0])

    def _put_together(self, step: Step) -> None:
        """The gradients of parts become one of the whole."""
        parts, whole = self._parts[step.index]
        base = step.reads[0][0]
        used = [self._there.pop(part) for part in parts if part in self._there]
        if used and whole in self._parameters:
            self._add_use(whole, step, used, base in self._path.views)
        elif used:
            gradient = Gradient(self._sizes[whole], step.index)
            is_out = base in self._reordered
            self._give(whole, base, gradient, is_out, step.index, _freed(used))
        self._drop(used, step.index)

    def _operate(self, step: Step) -> None:
        """An operator uses up the gradients of its results, and makes those of what it has read."""
        is_out = not self._out_of_order.isdisjoint(dict(step.sizes))
        used = [*self._of_results(step)]
        written = {*step.writes, *[self._path.extent[cell] for cell in step.targets]}
        got = [*used, *[self._there[each] for each in written if each in self._there]]
        if not got:
            return
        size = max([self._sizes.get(number, 0) for number in (*dict(step.sizes), *written)])
        scratch = int(step.scratch * self._scale)
        is_expanded = max([gradient.nbytes for gradient in got]) < size  # as by `sum`
        if is_expanded and not step.info.is_pointwise:
            scratch += size  # a kernel copies it
        elif is_out and _torch.takes_in_order(step.func):
            scratch += size
        self.spans.append((step.index + 1, step.index + 1, scratch))
        free = scratch + _freed(used)
        followed = self._followed(step)
        read = [cell for cell, _ in step.reads if self._path.memory_of[cell] in followed]
        views = {self._path.extent[cell] for cell in read if cell in self._path.views}
        # An operator that is never replayed has no reads: all of each memory counts.
        reached = [(cell, self._path.extent[cell]) for cell in read]
        reached = reached or [(number, number) for number in followed]
        for number in self._parameters.keys() & {extent for _, extent in reached}:
            self._add_use(number, step, used, number in views)
        is_shown = step.info.base in _SHOWN
        makes_out = step.reorders if is_shown else is_out and step.info.is_pointwise
        for cell, extent in reached:
            if extent in self._sizes and extent not in written:
                nbytes = self._sizes[extent]
                is_same = step.info.base in _ADDITIONS and nbytes == size
                gradient = got[0] if is_same or is_shown else Gradient(nbytes, step.index)
                is_out_of_order = makes_out != (cell in self._reordered)
                self._give(extent, cell, gradient, is_out_of_order, step.index, free)
        self._drop(used, step.index)

    def _add_use(self, number: int, step: Step, used: Sequence[Gradient], makes_view: bool) -> None:
        """A step gives a gradient to all of a parameter."""
        nbytes = sum([gradient.nbytes for gradient in used])
        self._uses[number].append(Use(step.index, nbytes, makes_view))

    def _of_results(self, step: Step) -> Iterator[Gradient]:
        """The gradients of what a step has made: nobody needs them after it."""
        for number, _ in step.sizes:
            gradient = self._there.pop(number, None)
            if gradient is None and number in self._ends:
                gradient = Gradient(self._sizes[number], step.index)
                gradient.users = 1
            if gradient is not None:
                self.memories.add(number)
                yield gradient

    def _followed(self, step: Step) -> Set[int]:
        """The memories to which a step gives gradients. A custom autograd function runs its forward
        with grad mode off: what leads to its result counts, too, since its backward works with
        about as much."""
        if step.grad_mode:
            return {*step.differentiated}
        return {self._path.memory_of[cell] for cell, _ in step.reads}

    def _give(
        self, extent: int, cell: int, gradient: Gradient, is_out: bool, index: int, free: int
    ) -> None:
        """Add a gradient of a tensor, which may be out of order, to the one that is there. What the
        step has used, `free` bytes, is gone by then."""
        old, size = self._there.get(extent), self._sizes[extent]
        if old is None and is_out:
            self._out_of_order.add(extent)
        elif old is None:
            self._out_of_order.discard(extent)
        before = self._met[extent] if old else cell
        bases = {*self._path.bases_of(cell)}
        met = next(filter(bases.__contains__, self._path.bases_of(before)), cell)
        self._met[extent] = met
        if old and (old.users > 1 or old.nbytes != size or before != met):
            # The old one cannot be written, so the sum is a third tensor.
            other = 0 if gradient.users else gradient.nbytes
            self.spans.append((index + 1, index + 1, other - min(free, size)))
            gradient = Gradient(size, index)
        if old is None or not gradient.users:
            self._there[extent] = gradient
            gradient.users += 1
            self._drop([old] if old else [], index)

    def _drop(self, used: Sequence[Gradient], index: int) -> None:
        for gradient in used:
            gradient.users -= 1
            if not gradient.users:
                self.spans.append((index + 1, gradient.index + 1, gradient.nbytes))


def _freed(used: Sequence[Gradient]) -> int:
    """The bytes of these gradients that are free once a step has used them."""
    return sum([gradient.nbytes for gradient in used if gradient.users == 1])


_ADDITIONS = ("add", "add_", "clone")
_SHOWN = ("cat", "stack", "sum")  # what these hand on is a view of the gradient that they get
