"""Writes that schemas hide, that go outside, that nobody sees; statistics; random operators."""

from functools import partial

import pytest
import torch
from oracle import NO_ROOM, REGIONS, REPLAY, Table, bits, leaves, noisy, python_calls
from torch import nn

from checkpointing import ChangedError, checkpoint_scope, checkpointed, keep

case = Table(leaves())
# Torch says these once in a process.
ONCE = "ignore:(The PyTorch API of nested tensors|torch.quantize_per_tensor)"
pytestmark = [NO_ROOM, pytest.mark.filterwarnings(ONCE)]


class Programs:
    @case(whole=True, doors=REPLAY)
    def lists_of_which_a_part_is_from_before(region, x, y):
        """And a sparse tensor."""
        before, mask = torch.ones(4, 6, dtype=x.dtype), torch.eye(4, dtype=x.dtype).to_sparse()

        def f(x):
            inside = before.exp()
            torch._foreach_mul_([before, inside], [2.0, 3.0])
            return (mask.detach().to_dense() @ (x * before.clone())).sin() * inside

        return region(f, x), region(f, y), before

    @case(whole=True, doors=REPLAY)
    def views_that_are_read_or_not_before_a_write_outside(region, x, y):
        before = torch.arange(24, dtype=x.dtype).view(6, 4).div_(8)

        def f(x):
            columns, unread = before.t(), before.detach()
            y = x * columns.clone()
            unread.mul_(0.5)
            return y.exp(), columns.sin() * x, before[:, 0].exp() * x

        return *region(f, x), *region(f, y), before

    @case(doors=REPLAY)
    def kept_values_on_memory_that_is_written(x, y):
        """They do not stand for what was there before; a view is read between two writes."""
        h, z = x.detach() * 2, (x.detach() * 1).exp()
        before, part = h.exp(), x[:2] + z[:2]
        h[:2].mul_(3)
        keep(h)
        z.mul_(2)
        keep(z)
        z.add_(1)
        return x * (before * h), (part + z[:2]).sin()

    @case(whole=True, doors=REPLAY)
    def writes_after_a_backward_inside(region, x, y):
        """Statistics, a buffer and a gradient, of which a graph needs what was there before."""
        m, total = nn.BatchNorm1d(6, dtype=x.dtype), torch.zeros(6, dtype=x.dtype)
        bias = nn.Parameter(torch.ones(6, dtype=x.dtype))
        bias.grad = torch.ones_like(bias)

        def f(x):
            h = (x - m.running_mean + total).sin()
            u = (x * bias + bias.grad).tanh()
            (g,) = torch.autograd.grad(h.sum(), x, retain_graph=True)
            with torch.no_grad():
                scaled = m(x * 2)
                total.add_(g.mean(0))
            torch.autograd.backward(u.sum(), inputs=[bias], retain_graph=True)
            return ((x + scaled) * g + total).sin(), (h * u).exp() * bias.grad.clone()

        return region(f, x), region(f, y), m.running_mean, total, bias.grad

    @case(whole=True, doors=REPLAY)
    def writes_in_a_region_inside_after_a_backward(region, x, y):
        total = torch.zeros(6, dtype=x.dtype)

        def inner(x, g):
            with torch.no_grad():
                before = total * 2 + 1
                total.add_(1)
            return ((x + before + total * 3).cos() * g).sin()

        def f(x):
            h = (x + total).sin()
            (g,) = torch.autograd.grad(h.sum(), x, retain_graph=True)
            return region(inner, x, g), (x + total).exp() * h

        return region(f, x), region(f, y), total

    @case(doors=REPLAY)
    def what_is_left_to_do_when_a_backward_inside_begins(x, y):
        """The last part of a memory has been filled, or a decision is to be held."""
        g, h, source = torch.ones_like(x), (x * 2).sin(), y.detach() * 2
        filled, index = torch.empty_like(x), torch.empty(4, dtype=torch.long)
        filled[1:].copy_(source[1:])
        row = filled[0]
        row.copy_(source[0])
        (first,) = torch.autograd.grad(h, x, g, retain_graph=True)
        torch.argmax(source, -1, out=index)
        (second,) = torch.autograd.grad(h, x, g, retain_graph=True)
        return ((row + y) * first).sin().exp(), (filled + x).cos() * index[:, None] * second

    @case(whole=True, doors=REPLAY)
    def written_in_inference_mode_and_read_again(region, x, y):
        """Copies that are made meanwhile are saved, and read by gradients of gradients."""
        scale = torch.ones(6, dtype=x.dtype)

        def f(x):
            h = (x + scale).sin()
            with torch.inference_mode():
                scale.mul_(2)
                mean = float((scale * 2).mean())
            return (x * scale).sin() * h * mean

        return region(f, x) * y, scale

    @case(doors=REPLAY, backwards=("first",))
    def nested_and_quantized_tensors_that_are_written(x, y):
        n = torch.nested.as_nested_tensor([x.detach() * 1, y.detach()[:2]])
        q = torch.quantize_per_tensor(y.detach().float(), 0.1, 0, torch.qint8)
        parts = [torch.zeros_like(n) + n, nn.functional.dropout(n, 0.5)]
        codes = torch.empty_like(q).copy_(q).dequantize()
        n.mul_(2)
        q.copy_(codes + 1)
        parts += [n * 2]
        padded = [torch.nested.to_padded_tensor(part, 0.0) for part in parts]
        return [(p[0] * x).sin() for p in padded], (x * codes * q.dequantize()).exp()

    @case(doors=REPLAY)
    def masks_and_their_rows_of_which_one_is_written(x, y):
        """They are decisions, and all of them are held; so are kept values, and views of these."""
        mask = x.detach() @ y.detach().t() > 0
        counts = [row.nonzero().numel() for row in mask.unbind()]
        total = mask.nonzero().numel() + sum(counts)
        mask[0].logical_not_()
        h = keep(y.detach().exp())
        row = keep(h[0])
        row.add_(1)
        return (x.t() @ mask.to(x.dtype)).sin() * total, x * h.sin()

    @case(doors=REPLAY)
    def two_versions_that_are_held(x, y):
        """Written through a view between; one window needs both."""
        h = keep(x.detach().exp())
        before = h * 1
        h[0].add_(1)
        keep(h)
        h.mul_(2)
        mask = x.detach() @ y.detach().t() > 0
        first, size = mask * 1, mask.nonzero().numel()
        mask[0].logical_not_()
        size += mask.nonzero().numel()
        mask[1].logical_not_()
        return x * (before * h), (x.t() @ (first + 2 * mask).to(x.dtype)) * size

    @case(whole=True, doors=REPLAY)
    def more_than_the_view_that_a_block_is_given(region, x, y):
        """`as_strided` shows it, and it is written later."""
        base = torch.ones(4, 6, dtype=x.dtype)

        def f(x, row):
            shown = row.as_strided((4, 6), (6, 1), 0) * 1
            base[1].add_(1)
            return x * shown

        return region(f, x, base[0])

    @case
    def empty_filled_by_numpy_in_two_steps(x, y):
        b = torch.empty(4, 6, dtype=x.dtype)
        b[:2].numpy()[...] = 1.0
        a = x[:2] * b[:2].clone()
        b[2:].numpy()[...] = 2.0
        return a.exp().sum() * (x * b)

    @case
    def two_parts_filled_by_one_operator(x, y):
        ends = torch.empty(2, 6, dtype=x.dtype)
        with torch.no_grad():
            torch.aminmax(x * y, dim=0, out=(ends[0], ends[1]))
        return (x * ends.sum(0)).sin() * y

    @case
    def untagged_custom_random_op(x, y):
        h = noisy(x.sin())
        return h * h.exp() * torch.rand_like(x)

    @case(whole=True, doors=REPLAY)
    def a_state_that_is_written_after_a_backward_inside(region, x, y):
        def f(x, state, create_graph):
            h = (x * 1 + state).square()
            (g,) = torch.autograd.grad(h.sum(), x, retain_graph=True, create_graph=create_graph)
            state.add_(1)
            return (h * g).square() + state

        return [region(f, x, torch.ones_like(x), create_graph) for create_graph in (False, True)]

    @case(whole=True, make=leaves(lambda: nn.BatchNorm1d(6)), doors=REPLAY)
    def statistics_read_inside(region, x, y, m):
        def f(x):
            before = m.running_mean.clone()
            h = m(x.sin())
            return h * m.running_mean.clone() * before.exp() * m.running_var.clone()

        return region(f, x), region(f, y)

    @case
    def statistics_that_the_block_has_made(x, y):
        mean, var = x.detach().mean(0), x.detach().var(0)
        h = nn.functional.batch_norm(x.sin(), mean, var, training=True)
        return (h * mean).exp() * y, h * var

    @case(doors=REPLAY)
    def statistics_that_the_block_has_written_and_reads_between_updates(x, y):
        mean, var = x.detach().mean(0), torch.ones(6, dtype=x.dtype)
        mean.mul_(2)
        read = mean * 1
        for _ in range(2):
            nn.functional.batch_norm(y.detach(), mean, var, training=True)
            read = read + mean.sin()
        return x * read

    @case(doors=REPLAY)
    def statistics_that_are_kept_before_their_update(x, y):
        mean = keep(x.sin().mean(0))
        a, var = mean.exp(), torch.ones_like(mean)
        h = nn.functional.batch_norm(y * 1, mean.detach(), var, training=True)
        return a.square() * h

    @case(whole=True, make=leaves(lambda: nn.BatchNorm1d(6)), doors=("scope", "replay", "planned"))
    def evaluation_before_training(region, x, y, m):
        def f(x, y):
            h = m.eval()(x.sin())
            m.train()(y.detach() * 3)
            return h

        return region(f, x, y)


def test_what_is_asked_for_alone_is_made_as_with_all_others():
    """Beside `row` a kept `h` can't stand for its memory, so the block does not hold it."""
    x = torch.rand(2, 4, requires_grad=True)

    def f():
        h = x.exp().detach()
        row = h[0]
        h.mul_(2)
        keep(h)
        h.add_(1)
        return (x[0] * (row * 1)).sum(), (x * (h * 1)).sum()

    (want,) = torch.autograd.grad(f()[1], x)
    with checkpoint_scope():
        dropped, alone = f()
    del dropped
    assert bits(torch.autograd.grad(alone, x)[0]) == bits(want)


def test_statistics_of_an_evaluation_before_training_are_those_that_it_read():
    """A limit of a rerun: plain backward reads what the training has made of them since."""

    def gradient(door, training):
        def f(x):
            h = m.eval()(x.sin())
            return h if not training else h + 0 * m.train()(x.detach() * 3)

        m, x = nn.BatchNorm1d(4), torch.arange(24.0).view(6, 4).requires_grad_()
        return torch.autograd.grad(REGIONS[door](f, x).sum(), x)[0]

    assert torch.equal(gradient("rerun", training=True), gradient("plain", training=False))
    assert not torch.equal(gradient("plain", training=True), gradient("plain", training=False))


@pytest.mark.parametrize("door", REPLAY)
@pytest.mark.parametrize("read", [lambda mean: mean, lambda mean: mean[None]], ids=["all", "view"])
def test_statistics_that_are_read_before_their_update_are_as_they_were(door, read):
    """Plain code's gradient of `w` meets what they are by then: a limit of replays."""

    def gradients(door, copied):
        def f(x, w):
            mean = m.running_mean.clone() if copied else m.running_mean
            return m((x + w * read(mean)).sin()).exp()

        m, x = nn.BatchNorm1d(4), torch.arange(24.0).view(6, 4).requires_grad_()
        m.running_mean.copy_(torch.arange(4.0))
        w = torch.full((4,), 2.0, requires_grad=True)
        return torch.autograd.grad(REGIONS[door](f, x, w).sum(), [x, w])

    for got, want in zip(gradients(door, False), gradients("plain", True), strict=True):
        assert torch.equal(got, want)


def test_a_view_that_a_region_inside_takes_is_as_it_was_though_the_block_writes_it():
    x, before = torch.rand(4, requires_grad=True), torch.ones(8)
    with checkpoint_scope():
        half = before[:4]
        y = checkpointed(lambda x, half: (x * half.clone()).sin())(x, half)
        before.mul_(3)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], x.cos())


test_writes, test_nothing_stays = case.tests()


def test_a_loop_that_writes_columns_in_turn_takes_no_longer_at_its_end():
    """What has been delivered of a memory is compared with later writes until it is copied."""

    def calls(times):
        x = torch.rand(8, 4, requires_grad=True)
        with checkpoint_scope():
            y = x * 1
            columns = [y[:, n : n + 1] for n in range(4)]
            for n in range(times):
                columns[n % 4].tanh_()
        return python_calls(y.sum().backward)

    assert calls(400) - calls(200) < 1.2 * (calls(300) - calls(100))


@pytest.fixture
def cudnn_on_the_cpu():
    """Stands in for cuDNN: its dropout draws from a state, an argument that it writes unseen."""

    def forward(x, weights, stride, buffer, hx, cx, *options):
        state = options[-1]
        mask = torch.ones_like(x) if state is None else (state[:1] % 3).expand(x.shape).to(x.dtype)
        if state is not None:
            state.data.add_(1)
        return x * weights[0] * mask, hx * 1, x.new_empty(0), mask, x.new_empty(0)

    def backward(x, weights, stride, buffer, hx, cx, out, g, gh, gc, *options):
        mask = options[-2]
        return g * weights[0] * mask, torch.zeros_like(hx), None, [g * x * mask]

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_cudnn_rnn", forward, "CPU")
        library.impl("_cudnn_rnn_backward", backward, "CPU")
        yield


@pytest.mark.parametrize("door", REPLAY)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_of_cudnn_draws_from_a_state_that_no_schema_shows(door, dropout, cudnn_on_the_cpu):
    def gradients(door):
        state = torch.full((8,), 5, dtype=torch.uint8) if dropout else None
        x, w = (torch.arange(1.0, 13).view(4, 3).requires_grad_() for _ in range(2))

        def rnn(x, w):
            sizes = (2, 3, 0, 1, False, dropout, True, False, [])
            return torch._cudnn_rnn(x, [w], 1, None, x[:1] * 1, None, *sizes, state)[0]

        def f(x, w):
            return (rnn(rnn(x.square(), w).sqrt() * 2, w) * x).square()

        seen = []
        for _ in range(3):
            seen += [torch.autograd.grad(REGIONS[door](f, x, w).sum(), [x, w]), state]
        return bits(seen)

    assert gradients(door) == gradients("plain")


@pytest.mark.parametrize("door", REPLAY)
@pytest.mark.parametrize("foreach", [False, True])
def test_what_an_optimizer_writes_after_a_backward_inside_is_seen(door, foreach):
    """In a dispatch mode, torch counts no versions for its operators over lists."""
    bias, x = nn.Parameter(torch.tensor([1.0, 2.0])), torch.tensor([0.3, 0.4], requires_grad=True)
    optimizer = torch.optim.SGD([bias], 0.5, foreach=foreach)
    before = (bias * x).sum()

    def step(x):
        y = (x + bias).sin()
        (bias * bias).sum().backward()
        optimizer.step()
        return y

    REGIONS[door](step, x).sum().backward()
    assert torch.equal(x.grad, (x + torch.tensor([1.0, 2.0])).cos())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


def test_a_foreach_write_in_a_scope_counts_for_the_rerun_around_it():
    """In a dispatch mode, torch itself does not count these up."""
    halve = partial(REGIONS["scope"], torch._foreach_mul_)
    x, c = torch.ones(3, requires_grad=True), torch.ones(3)
    y = checkpointed(lambda x, c: (halve([c], 0.5), x.logsumexp(0))[1])(x, c)
    with pytest.raises(ChangedError):
        y.backward()
    assert c.tolist() == [0.5] * 3


@pytest.mark.parametrize("is_replay", [False, True])
def test_memory_where_other_memory_was_before_is_told_from_that(is_replay):
    """Inside a rerun, whose hooks keep nothing alive: each assignment may free what came first."""
    net = nn.Linear(4, 4)

    def body(x):
        for n in range(5):
            other = torch.zeros(3, 4)
            for number in (0.5, 0.1, 0.2):
                other.data = torch.full((3, 4), number + n)
                x = net(x + other).tanh() if number != 0.1 else x
        return x

    def in_scope(x):
        with checkpoint_scope():
            return body(x)

    inside = checkpointed(body, backend="replay") if is_replay else in_scope
    x = torch.rand(3, 4)
    want = torch.autograd.grad(body(x).sum(), net.weight)[0]
    for _ in range(5):
        assert torch.equal(torch.autograd.grad(checkpointed(inside)(x).sum(), net.weight)[0], want)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_circular_padding_is_made_again(dims):
    """It copies within memory of which the corners are not filled yet."""
    kind, padding = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1], (2, 1, 1)[:dims]
    conv = kind(2, 2, 3, padding=padding, padding_mode="circular").double()
    x = torch.randn(1, 2, *[4] * dims, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        for tensor in (x, *conv.parameters()):
            tensor.mul_(4).round_()

    def gradients():
        return torch.autograd.grad(conv(x.abs()).square().sum(), [x, *conv.parameters()])

    with checkpoint_scope() as block:
        y = conv(x.abs()).square().sum()
    assert block.stats.bytes_held == 0
    assert bits(torch.autograd.grad(y, [x, *conv.parameters()])) == bits(gradients())


def other_columns(memory, x):
    for column in (1, 2, 3):
        memory[:, column] = x[:, column]
    memory[:, 5] = memory[:, 1]
    memory[:, 0] = x[:, 0]
    memory.numpy()[:, 4] = 7
    memory[:, 5] = x[:, 5]


def in_another_order(memory, x):
    memory.t()[:2].copy_(x.t()[:2])
    memory.numpy()[2:, 2:4] = 7
    memory[:2, 2:] = memory.t()[:2]
    memory[:, 4:] = x[:, 4:]


def as_another_type(memory, x):
    rows = memory.view(-1)
    rows.numpy()[2] = 7
    rows[4:6] = x[0, :2]
    rows[6:8].copy_(rows.view(torch.float32)[4:6])
    rows[:4] = x[0, :4]
    rows[8:] = x.flatten()[8:]


@pytest.mark.parametrize("fill", [other_columns, in_another_order, as_another_type])
def test_copies_within_memory_do_not_hide_what_is_written_unseen(fill):
    x = torch.rand(4, 6, dtype=torch.float64, requires_grad=True)
    with checkpoint_scope() as block:
        memory = torch.empty(4, 6, dtype=torch.float64)
        fill(memory, x.detach())
        y = (x * memory).exp()
    assert block.stats.bytes_held == memory.nbytes
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], memory * y)
