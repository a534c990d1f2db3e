"""Type checkers see through the doors: `mypy` checks this file, and nothing runs it.

Wrong uses, at the end, are errors with these codes: an ignore that is not needed is one, too.
"""

from torch import Tensor, nn
from typing_extensions import assert_type

from checkpointing import Stats, checkpoint_scope, checkpointed, disabled, is_recomputing, keep
from checkpointing.torch_compat import checkpoint


@checkpointed
def bare(
    x: Tensor, n: int = 1, /, *rest: float, flag: bool = False, **others: str
) -> tuple[Tensor, int]:
    return x, n


@checkpointed(backend="replay", early_stop=False, name="block")
def with_options(x: Tensor, *, scale: float) -> dict[str, Tensor]:
    return {"x": x * scale}


def plain(x: Tensor) -> Tensor:
    return x


direct = checkpointed(plain, determinism_check="values")
check = checkpointed(plain, determinism_check=lambda t: t.sum())


class Owner:
    @checkpointed
    def method(self, x: Tensor, y: int) -> Tensor:
        return x * y

    static = staticmethod(checkpointed(plain))

    @classmethod
    @checkpointed
    def make(cls, x: Tensor) -> Tensor:
        return x


@checkpointed
class Block(nn.Module):
    width: int = 3

    def forward(self, x: Tensor, flip: bool = False) -> Tensor:
        return x


@checkpointed(early_stop=False)
class Other(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def right(x: Tensor) -> int:
    """Arguments, keyword arguments, defaults, results, methods and module classes."""
    assert_type(bare(x, 2, 1.0, flag=True, other="a"), tuple[Tensor, int])
    assert_type(bare(x), tuple[Tensor, int])
    assert_type(with_options(x, scale=2.0), dict[str, Tensor])
    assert_type(direct(x=x), Tensor)
    assert_type(check(x), Tensor)
    assert_type(Owner().method(x, 3), Tensor)
    assert_type(Owner.static(x), Tensor)
    assert_type(Owner.make(x), Tensor)
    assert_type(Block, type[Block])
    assert_type(Block(), Block)
    assert_type(Block().width, int)
    assert_type(Block().forward(x, flip=True), Tensor)
    assert_type(Other(), Other)
    assert_type(checkpoint(bare, x, 3, use_reentrant=False), tuple[Tensor, int])
    assert_type(keep(x), Tensor)
    assert_type(keep((x, [x])), tuple[Tensor, list[Tensor]])
    assert_type(is_recomputing(), bool)
    with checkpoint_scope(name="s", enabled=True) as scope, disabled():
        assert_type(scope, checkpoint_scope)
        assert_type(scope.stats, Stats)
        assert_type(scope.stats.bytes_kept, int)
        assert_type(scope.name, str)
    with checkpoint_scope():  # swallows no exception: this function returns
        return 1


def wrong(x: Tensor) -> None:
    """What would raise at run time is found before."""
    with_options(1, scale=2.0)  # type: ignore[arg-type]
    with_options(x)  # type: ignore[call-arg]
    bare(x=x)  # type: ignore[call-arg, arg-type]
    bare(x, flag=1)  # type: ignore[arg-type]
    checkpointed(plain, backend="eager")  # type: ignore[call-overload]
    checkpointed(plain, True)  # type: ignore[call-overload]
    checkpointed(determinism_check="value")  # type: ignore[call-overload]
    checkpointed(use_reentrant=False)  # type: ignore[call-overload]
    checkpoint_scope(backend="replay")  # type: ignore[call-arg]
    checkpoint_scope(None, True)  # type: ignore[call-arg]
    with checkpoint_scope() as scope:
        scope.stats = None  # type: ignore[misc, assignment]
        scope.stats.bytes_kept = 3  # type: ignore[misc]
