"""Running a window.

Invariant: a window writes to no memory that it has been given or gives away. Tensors on memory that
it writes are copied when they are fetched. Before it writes, the targets that it has found and that
overlap with what is written are copied, by the geometry that both have in this very run.
"""

from collections import defaultdict
from typing import Any

from torch import Tensor

from .. import _torch, errors
from .._engine import Aliased, Frame, Moved, Task, Undo, described
from .._plan import Instruction, Window
from .._record import shapes_of, tensors_of


class Work(Task):
    """The tensors of a block in one graph task, computed by replays of windows."""

    undo: Undo  # of the present recompute

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[Any, Any] = {}  # tensors that have been fetched, and parts of stocks

    def fetch(self, held: Any, where: Frame) -> Any:
        """What a run holds."""
        if type(held) is Aliased:
            alias = held.fetch(where)
            if _torch.was_given_back(alias):
                raise errors.given_back(where, alias.shape)
            return alias
        if type(held) in _torch.UNWRAPPED:  # an earlier replay has made it
            return held
        tensor = self.memory.get(held)
        if tensor is None:
            tensor = held.fetch(where)
            if type(held) is not Moved:  # that can be fetched again
                self.memory[held] = tensor
        return tensor


class Execution:
    """One replay of a window."""

    def __init__(self, window: Window, stock: Any, frame: Frame, work: Work) -> None:
        """`stock` has what the run holds for the window."""
        self.window, self.stock, self.frame, self.undo = window, stock, frame, work.undo
        self.found: dict[int, Tensor] = {}  # by target
        # By part of a memory: targets that have been found, and not copied.
        self.exposed: dict[int, list[int]] = defaultdict(list)
        self.table = window.table.copy()
        # Before autograd is switched off: an enclosing region may have to rerun for them.
        for place, value, _ in window.starts:
            self.table[place] = work.fetch(stock.held[value], frame)

    def make(self) -> dict[int, Tensor]:
        """What the window makes, by target."""
        _torch.below_autograd(self._make)
        return self.found

    def _make(self) -> None:
        table, numbers = self.table, self.stock.numbers
        for place, _, is_written in self.window.starts:
            if is_written:
                table[place] = _torch.Copies().of(table[place])
        found, exposed = self.found, self.exposed
        for number, place, part in self.window.at_once:
            found[number] = table[place]
            exposed[part].append(number)
        for instruction in self.window.instructions:
            is_quick = instruction.is_quick
            if instruction.index in numbers:
                instruction.take(numbers[instruction.index], table)
                is_quick = is_quick and not instruction.kwargs  # which `call` has bound
            if is_quick:
                result = instruction.call(*[table[place] for place in instruction.args])
            else:
                result = self._call(instruction)
            if type(result) is Tensor:
                table[instruction.results[0]] = result
            else:
                self._take(instruction, result)
            result = None
            for number, place, part in instruction.wanted:
                found[number] = table[place]
                exposed[part].append(number)
            for place in instruction.dead:
                table[place] = None

    def _take(self, instruction: Instruction, result: Any) -> None:
        for place, tensor in zip(instruction.results, tensors_of(result), strict=True):
            self.table[place] = tensor

    def _call(self, instruction: Instruction) -> Any:
        """Run a step with all that may belong to it."""
        _torch.set_grad_enabled(instruction.step.grad_mode)
        for memory in instruction.writes:
            self._save_from(instruction, memory)
        state = self.stock.random.get(instruction.index)
        if state is not None:
            state.enter(self.undo)
        args = [self._look(place) for place in instruction.args]
        kwargs = {name: self._look(place) for name, place in instruction.kwargs.items()}
        result = instruction.run(*args, **kwargs)
        # An operator may depend on more than the shapes of its arguments.
        was, step = self.stock.shapes.get(instruction.index), instruction.step
        if was is not None and was != (now := shapes_of(result)):
            line = None if step.line is None else described(step.line)
            raise errors.other_shapes(self.frame, str(step.func), line, was, now)
        return result

    def _look(self, place: Any) -> Any:
        if type(place) is int:
            return self.table[place]
        kind, places = place
        return kind([self._look(part) for part in places])

    def _save_from(self, instruction: Instruction, memory: int) -> None:
        """Copy the targets that an instruction is about to write to. A region inside may take
        several tensors that share memory."""
        written = tensors_of([self._look(place) for place in instruction.targets])
        slots, exposed = self.window.targets, self.exposed[memory]
        hit = {n for n in exposed if any(_torch.overlap(self.found[n], t) for t in written)}
        if any(slots[number].is_read for number in hit):
            hit.update([number for number in exposed if slots[number].is_read])
        copies = _torch.Copies()
        for number in hit:
            copy = copies.of if slots[number].is_read else _torch.copy
            self.found[number] = copy(self.found[number])
        self.exposed[memory] = [number for number in exposed if number not in hit]
