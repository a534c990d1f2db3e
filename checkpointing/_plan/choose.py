"""Which of the ways to cut a stretch is taken, and for which peak.

One rule. The target is the peak of a cut at every block that the program repeats, as users place
them by hand, or of two where that needs less; if more than these blocks would run again, such as
the head that makes logits, it is the peak of cuts at blocks and nowhere else. Where such blocks are
not most of the program, as in a pyramid of convolutions, or where that peak is over 1.5 times the
least one, the target is the least peak, with room for what parts without grad mode hand on, up to
1.5 times it, and for what frozen layers hand on, if that is little beside their work. Under it, the
least recompute is taken among a few ways to cut, each filled. In the end, cuts that make no
difference to the peak go. Where blocks wait for backward while others run, what they keep is there,
too: of a few ways, the one is taken whose peak and kept bytes, once for each of these blocks, are
the least in sum. Users who ask for a peak set the target themselves.

Rejected: spending a fixed part of the least peak on less recompute. Where logits are most of the
peak, a few percent of it are all the checkpoints of the model; where attention is, they are one of
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from .cuts import Cuts, Cutting
from .fill import Filling
from .stretch import Stretch


def choose(stretch: Stretch, parts: int = 0) -> Filling:
    """What to keep of a stretch. `parts` others wait for backward: what they keep is there, too."""
    if stretch.model.bytes_of(stretch.saved) < _LITTLE:
        return Filling(stretch, ())
    cutting, least, tight = _tightest(stretch)
    most = int(least * (1 + _MOST_SLACK))
    by_hand, cuts = _by_hand(stretch, tight, most)
    target = by_hand or least
    ways = []
    if handed_on := stretch.without_grad_mode | stretch.frozen(least):
        beside = _bare(stretch, tight)
        beside.keep(beside.kept | handed_on)
        # Not all that `beside` needs: these cuts may miss the least peak even without that.
        room = min(most, target + stretch.cost(handed_on))
        beside.most = target = max(target, min(room, beside.peak))
        ways = [beside]  # without it, all of such a part may run again
    best = min([_filled(cutting, cuts, target), *ways], key=Filling.key)
    if by_hand and best.work > _MORE_WORK * stretch.work_of_blocks:
        blocks = _bare(stretch, _at_blocks(stretch.alike, ()))
        if target < blocks.peak <= most:
            best = min(best, _filled(cutting, cuts, blocks.peak), key=attrgetter("work"))
    best.join()
    if parts:
        placed = tight, cuts, _at_blocks(stretch.blocks, cuts), ()
        found = [best, *[_bare(stretch, each) for each in placed]]
        best = min(found, key=lambda way: way.peak + parts * way.nbytes)
    return best


def choose_under(stretch: Stretch, peak: int) -> Filling:
    """What to keep of a stretch, under a peak; or under the least one, if that is larger."""
    best = _filled(*_cuts_for(stretch, peak))
    best.join()
    return best


def choose_within(stretch: Stretch, budget: int) -> Filling:
    """What to keep of a stretch, in a budget: under the largest of a few peaks for which it is
    enough, so that a smaller budget never means a larger peak."""
    cutting, cuts, least = _cuts_for(stretch, 0)
    best = _filled(cutting, cuts, least)
    if best.nbytes > budget:  # what it keeps beside its cuts may lower no peak
        best = min(_bare(stretch, best.cuts), best, key=_peak_of)
    ratio = max(1, Filling(stretch, ()).peak / least)
    low, high = 0, _MOST_PEAKS
    while best.nbytes <= budget and low < high:
        middle = (low + high + 1) // 2
        tried = _filled(cutting, cuts, round(least * ratio ** (middle / _MOST_PEAKS)))
        if tried.nbytes <= budget:
            low, best = middle, tried
        else:
            high = middle - 1
    best.join()
    return best


def choose_first(stretch: Stretch, budget: int) -> Filling:
    """What to keep in a budget that is too small for the least peak: windows of what lies between
    make that in pieces."""
    cutting = Cutting(stretch)
    least, cuts = cutting.least_peak(budget)
    most = int(least * (1 + _SLACK_OF_PARTS)) if stretch.model.is_part else least
    return _filled(cutting, cuts, most, budget)


def _cuts_for(stretch: Stretch, peak: int) -> tuple[Cutting, Cuts, int]:
    """The segments of a stretch, cuts for a peak, and that peak. If the least one is larger, that
    counts instead."""
    cutting, least, tight = _tightest(stretch)
    by_hand, cuts = _by_hand(stretch, tight, max(peak, least))
    return cutting, cuts, max(peak, min(least, by_hand or least))


def _bare(stretch: Stretch, cuts: Iterable[int]) -> Filling:
    """These cuts, with what they need and no more."""
    filling = Filling(stretch, sorted({*cuts} - {0, stretch.model.count}))
    filling.cut_and_drop()
    return filling


_peak_of = attrgetter("peak")


def _tightest(stretch: Stretch) -> tuple[Cutting, int, Cuts]:
    """The segments of a stretch that may be cut at blocks, too, and its least peak, with cuts."""
    stretch.allow_cuts_at_blocks()
    cutting = Cutting(stretch)
    return cutting, *_refined(stretch, *cutting.least_peak())


def _refined(stretch: Stretch, least: int, cuts: Cuts) -> tuple[int, Cuts]:
    """The least peak with cuts added, one at a time, beside large results where most is needed. The
    labels count what a segment keeps for a later one as if its own window made it, too: with a cut
    after the `log_softmax` of a loss, nothing has to make that again, nor the logits."""
    best = _bare(stretch, cuts)
    while True:
        part = best.peaks.index(max(best.peaks))
        inside = range(best.ends[part] + 1, best.ends[part + 1])
        large = _LARGE * best.peak
        is_large = [stretch.cost(made) >= large for made in stretch.model.made]
        beside = [at for at in stretch.positions if at in inside and any(is_large[at - 1 : at + 1])]
        ways = [_bare(stretch, [*best.cuts, at]) for at in beside]
        found = min(ways, key=_peak_of, default=best)
        if found.peak >= min(least, best.peak):
            return least, cuts
        least, cuts, best = found.peak, found.cuts, found


def _by_hand(stretch: Stretch, cuts: Cuts, most: int) -> tuple[int, Cuts]:
    """What users place by hand, and its peak: a checkpoint around each block that repeats, unless
    that needs more than `most`; elsewhere, these cuts, or all positions if that needs less, since
    autograd itself saves what a loss works with. What repeats may be two blocks, such as a layer
    and its loss: it is cut in two if that needs less. Where little repeats, nobody knows where
    users would begin their blocks."""
    peak, count = 0, stretch.model.count
    if sum([run[-1] - run[0] for run in stretch.alike]) < _MAIN_PART * count:
        return 0, cuts
    for run in stretch.alike:
        placed = _at_blocks([run], cuts)
        blocks = _bare(stretch, placed)
        if blocks.peak > most:
            continue
        parts = _bare(stretch, placed.union(stretch.middles(run)))
        best = min(blocks, parts, key=_peak_of)
        peak, cuts = best.peak, best.cuts
    everywhere = _bare(stretch, _at_blocks(stretch.alike, stretch.positions).union(cuts))
    if everywhere.peak < peak:
        peak, cuts = everywhere.peak, everywhere.cuts
    return peak, cuts


def _at_blocks(runs: Iterable[range], cuts: Cuts) -> set[int]:
    """Where the blocks of these runs begin; elsewhere, these cuts."""
    found = {*cuts}
    for run in runs:
        found = found.difference(range(run[0], run[-1] + 1)).union(run)
    return found


def _filled(cutting: Cutting, cuts: Cuts, peak: int, budget: int | None = None) -> Filling:
    """The least recompute under a peak, of a few ways to cut. Labels count less than windows need:
    where all of these miss the peak, those for the peak that they reach are tried, too."""

    def fill(ways: Iterable[Cuts]) -> list[Filling]:
        return [Filling(cutting.stretch, each, peak, budget) for each in ways]

    best = min(fill([*cutting.cuts(peak, budget), cuts]), key=Filling.key)
    more = fill(cutting.cuts(best.peak, budget)) if best.peak > peak else []
    return min([best, *more], key=Filling.key)


_LITTLE = 8 * 1024  # bytes that autograd saves: too few to be worth the time of a second window
_MOST_PEAKS = 16  # that are tried for a budget
_LARGE = 1 / 5  # of the peak: what may be worth another cut
_MAIN_PART = 2 / 3  # of the steps
_MORE_WORK = 1.05  # times that of all blocks: what users would not repeat
_MOST_SLACK = 1 / 2  # what may be spent on less recompute: a part of the least peak
# The same, within a window: what it keeps first is made by a replay, which should be short.
_SLACK_OF_PARTS = 1 / 8
