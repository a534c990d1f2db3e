"""History: whether the paths of one site come again.

Where they do, whole paths are planned. Where experts are chosen in each step, layers are dropped,
or a loop takes another number of turns, blocks are taken in pieces (`pieces.py`).
"""

import math
from collections.abc import Collection
from typing import Any


class History:
    """Which ways the last runs of a site have gone."""

    in_pieces = False  # whether blocks are taken in pieces
    nbytes = 0  # that the last whole block made, and autograd saved
    times = 1.0  # how large pieces are (`Sizes`)
    room = math.inf  # bytes for what is alive at the ends of all pieces
    # Whether blocks are never taken in pieces: the budget has no room for what pieces keep, or a
    # backward inside a block may bring back what only the same piece would know again.
    stays_whole = False
    # Whether a backward inside has brought values back into the last block. It brings back less
    # where more is held, so with each plan a block would go another way, and be planned anew. The
    # next block holds what a plan keeps from the next backward on, or from its end.
    brings_back = False
    # Roughly how many blocks of this site wait for backward while another block runs: micro-batches
    # of a pipeline, an encoder. Or how many parts of one, where backwards inside leave what came
    # before, such as those of a detached copy; 1 if backward begins before the end of a block.
    parts = 0
    # Of the last runs; another thread may be in one, too.
    _new: tuple[bool, ...] = ()
    _pieces: tuple[tuple[int, ...], ...] = ()

    def went(self, is_new: bool) -> bool:
        """A block as a whole went a new way, or a known one. Returns whether blocks are taken in
        pieces from the next run on."""
        self._new = new = (*self._new, is_new)[-_RUNS:]
        if sum(new) < _MOST_NEW or self.stays_whole:
            return False
        self._new, self.in_pieces = (), True
        return True

    def leaves(self, parts: int) -> None:
        """So many blocks, or parts of one, wait for backward while another one runs. What plans
        assume at least doubles each time, since a change means new plans."""
        if parts >= 2 * self.parts:
            self.parts = parts

    def stay_behind(self, blocks: Collection[Any]) -> None:
        """Another block has run after these, which may wait for backward."""
        if len(blocks) > self.parts:
            waiting = [block for block in blocks if next(block.wanted({}), None)]
            self.leaves(2 * len(waiting) - 1)  # what is less than twice as many is no change

    def came_in(self, pieces: tuple[int, ...], nbytes: int) -> bool:
        """A block, in which autograd saved so much, was taken in these pieces. Returns whether the
        next one is whole: for a plan, since few ways come again, or for another look."""
        self._pieces = ways = (*self._pieces, pieces)[-_RUNS:]
        has_grown = nbytes > _MOST_GROWTH * self.nbytes
        comes_again = len(ways) == _RUNS and len({*ways}) <= _FEW_WAYS
        if not (has_grown or comes_again or self.stays_whole):
            return False
        self._pieces, self.in_pieces = (), False
        self._new = (True,) * (_MOST_NEW - 1) if has_grown else ()
        return True


_RUNS = 6  # the last ones
_MOST_NEW = 4  # of them, before blocks are taken in pieces
_FEW_WAYS = 2  # of all of them, before they are not
_MOST_GROWTH = 2  # of the bytes that autograd saves, before the sizes of pieces are found anew
