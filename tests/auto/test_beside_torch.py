"""Models in which `auto()` needs no more than torch's checkpoint around each layer."""

import contextlib
import copy
import functools
import itertools
import random

import oracle
import programs
import pytest
import torch
from oracle import NO_ROOM, bits, count, memory_of, through
from planned import bytes_of, close, perceptrons, scoped, units_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from checkpointing import auto, checkpoint_scope, clear_programs


def beside_torch(forward, **options):
    """A scope around all, its peak, and that with torch's checkpoint around each block. `forward`
    gets what calls a block."""
    theirs = bytes_of(lambda: forward(functools.partial(checkpoint, use_reentrant=False))).peak
    run = scoped(lambda: forward(lambda block, *inputs: block(*inputs)), **options)
    run().backward()
    return run, bytes_of(run).peak, theirs


def blocks(count):
    return nn.ModuleList(programs.Block(32, 2) for _ in range(count))


def each_called(call, blocks):
    return [functools.partial(call, block) for block in blocks]


def test_twelve_blocks_need_no_more_than_checkpoints_by_hand_from_the_first_step_on():
    """One scope around everything. While the program is not known, nothing is kept."""
    by_hand = bytes_of(programs.transformer(12, 64, 2, 64, by_hand=True))
    forward = programs.transformer(12, 64, 2, 64)
    forward().backward()
    run = scoped(forward)
    first = memory_of(run).peak
    assert run.scope.stats.replays >= 2
    have = bytes_of(run).peak
    assert have <= by_hand.peak
    assert first <= 1.1 * have
    assert abs(run.scope.stats.peak_predicted / have - 1) <= 0.05


@pytest.mark.parametrize("loss", [close, nn.functional.mse_loss, nn.functional.smooth_l1_loss])
def test_a_student_needs_no_more_than_with_a_checkpoint_around_each_layer(loss):
    """Its teacher runs in the scope, too, and the caller has the logits of both."""
    layers, student, x = blocks(4), nn.Linear(32, 500), torch.randn(8, 64, 32)
    teacher, labels = nn.Linear(32, 500).requires_grad_(False), torch.arange(512) % 500
    oracle.with_gradients([*student.parameters(), *layers.parameters()])
    seen = []

    def forward(call):
        with torch.no_grad():
            logits = teacher(through([torch.sigmoid] * 8, x))
        y = student(through(each_called(call, layers), x))
        seen.append((logits, y))
        return loss(y, logits) + nn.functional.cross_entropy(y.flatten(0, 1), labels)

    run, peak, theirs = beside_torch(forward)
    assert peak <= theirs
    assert run.scope.stats.peak_predicted == pytest.approx(peak, rel=0.03)
    assert "sigmoid" not in count(run().backward)


def loss_of(call, layers, x):
    return through(each_called(call, layers), x).square().mean()


class Steps:
    """Each gives a model, and a step with what calls a block and what makes a scope."""

    def a_graph_that_is_retained_for_a_second_loss(first):
        """What is kept stays for the next backward. One for the table alone comes only to the
        end."""
        layers, table, x = blocks(4), nn.Linear(32, 8), torch.randn(8, 64, 32)

        def step(call, scope):
            with scope():
                y = through(each_called(call, layers), x)
                one, two = table(y).square().mean(), y.exp().mean()
            one.backward(retain_graph=True, inputs=[table.weight] if first == "table" else None)
            (one + two).backward()

        return nn.ModuleList([layers, table]), step

    def backwards_inside_a_scope(of_one_graph):
        """Of two losses, or of two batches."""
        layers, x = blocks(4), torch.randn(8, 64, 32)

        def step(call, scope):
            def losses():
                y = through(each_called(call, layers), x)
                return y.square().mean(), y.exp().mean()

            with scope():
                if of_one_graph:
                    one, two = losses()
                    one.backward(retain_graph=True)
                    two.backward()
                else:
                    sum(losses()).backward()
                    sum(losses()).backward()

        return layers, step

    def scopes_that_wait_together(each):
        """What one keeps is there while others run: layers, or an encoder and a decoder."""
        layers, x = blocks(6), torch.randn(8, 64, 32)

        def step(call, scope):
            y = x
            for start in range(0, 6, each):
                with scope():
                    y = through(each_called(call, layers[start : start + each]), y)
            y.square().mean().backward()

        return layers, step

    def micro_batches():
        layers, x = blocks(5), torch.randn(6, 64, 32)

        def step(call, scope):
            losses = []
            for part in x.chunk(3):
                with scope():
                    losses.append(loss_of(call, layers, part))
            for loss in losses:
                loss.backward()

        return layers, step

    def two_networks_in_turn(is_one):
        """In one scope, or in one of two for each of them: what a run holds is told by the plan
        that came next the last time."""
        one, other = blocks(3), blocks(3)
        x, real = torch.randn(8, 64, 32), torch.randn(8, 64, 32)

        def step(call, scope):
            inner = contextlib.nullcontext if is_one else scope
            with scope() if is_one else contextlib.nullcontext():
                with inner():
                    made = through(each_called(call, one), x)
                    loss = loss_of(call, other, real) - loss_of(call, other, made.detach())
                loss.backward()
                with torch.no_grad():
                    for weight in other.parameters():
                        weight.sub_(weight.grad)
                with inner():
                    loss = loss_of(call, other, made)
                loss.backward()

        return nn.ModuleList([one, other]), step

    def a_loss_whose_backward_comes_later(is_used):
        """Or never comes, as that of a metric. What it has saved is there meanwhile."""
        trunk, one, other, x = blocks(5), blocks(3), blocks(3), torch.randn(8, 64, 32)

        def step(call, scope):
            with scope():
                y = through(each_called(call, trunk), x)
                first, second = loss_of(call, one, y), loss_of(call, other, y.detach())
            first.backward()
            if is_used:
                second.backward()

        return nn.ModuleList([trunk, one, other]), step

    def stages_of_blocks():
        """Of those, there are three in each stage: what repeats more often are the stages."""
        widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64, 128, 128, 128]
        stages = nn.ModuleList(Residual(*each) for each in itertools.pairwise(widths))
        return stages, one_scope(stages, torch.randn(2, 16, 64, 64))

    def blocks_in_place():
        """What an addition has handed its gradient on to has none of its own."""
        layers = nn.ModuleList(Added(16) for _ in range(4))
        return layers, one_scope(layers, torch.randn(8, 16, 32, 32))


def one_scope(layers, x):
    def step(call, scope):
        with scope():
            loss = loss_of(call, layers, x)
        loss.backward()

    return step


class Residual(nn.Module):
    """Of a ResNet: normalisation and activation come first. The first one of a stage halves."""

    def __init__(self, inputs, outputs):
        super().__init__()
        stride = 1 + (inputs < outputs)
        self.before, self.after = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.one = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.two = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, 2) if stride == 2 else None

    def forward(self, x):
        y = self.before(x).relu()
        beside = x if self.shortcut is None else self.shortcut(y)
        return self.two(self.after(self.one(y)).relu()) + beside


class Added(nn.Module):
    """A block without norms: an addition in place, and an activation of that."""

    def __init__(self, width):
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, 1, 1) for _ in range(2))

    def forward(self, x):
        y = self.two(self.one(x).relu_())
        y += x
        return y.relu_()


def peaks_beside_torch(step, model, fresh=True):
    """Of a later step, with torch's checkpoint around each block, and ours, and our last scope.
    Gradients are None before it, or zeros."""
    nothing = torch.zeros((), requires_grad=True)

    def peak(call, scope, times=1):
        def run():
            step(call, scope)
            return nothing.exp()

        model.zero_grad()
        for _ in range(times):
            run()
            model.zero_grad(set_to_none=fresh)
        return memory_of(run).peak

    def entered():
        entered.last = checkpoint_scope(auto())
        return entered.last

    theirs = peak(functools.partial(checkpoint, use_reentrant=False), contextlib.nullcontext)
    return theirs, peak(lambda block, y: block(y), entered, 3), entered.last


STEPS = [  # with words for it, whether gradients are None before it, how far a plan may be off
    *((Steps.a_graph_that_is_retained_for_a_second_loss, "loss", fresh, 0.1) for fresh in (0, 1)),
    *((Steps.a_graph_that_is_retained_for_a_second_loss, "table", fresh, 0.1) for fresh in (0, 1)),
    *((Steps.backwards_inside_a_scope, of_one, True, 0.05) for of_one in (True, False)),
    *((Steps.scopes_that_wait_together, each, True, None) for each in (1, 3)),
    (Steps.micro_batches, None, True, None),
    *((Steps.two_networks_in_turn, is_one, True, None) for is_one in (True, False)),
    *((Steps.a_loss_whose_backward_comes_later, is_used, True, None) for is_used in (True, False)),
    (Steps.stages_of_blocks, None, True, None),
    (Steps.blocks_in_place, None, True, 0.05),
]


@NO_ROOM
@pytest.mark.parametrize(("build", "how", "fresh", "off"), STEPS)
def test_a_step_needs_no_more_than_with_a_checkpoint_around_each_block(build, how, fresh, off):
    model, step = build() if how is None else build(how)
    theirs, ours, scope = peaks_beside_torch(step, model, fresh)
    assert ours <= theirs
    assert off is None or abs(scope.stats.peak_predicted / ours - 1) <= off


@NO_ROOM
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_in_hooks_of_a_backward_inside_a_scope_need_no_more_than_with_torchs(kind):
    """They write parameters that the scope holds while its backward runs."""
    layers, x = blocks(4), torch.randn(8, 64, 32)
    first = copy.deepcopy(layers.state_dict())
    optimizers = {weight: kind([weight], lr=0.1) for weight in layers.parameters()}

    def update(weight):
        optimizers[weight].step()
        weight.grad = None

    for weight in layers.parameters():
        weight.register_post_accumulate_grad_hook(update)

    def step(call, scope):
        with scope():
            loss_of(call, layers, x).backward()

    def trained(scope):
        layers.load_state_dict(first)
        for optimizer in optimizers.values():
            optimizer.state.clear()
        for _ in range(3):
            step(lambda block, y: block(y), scope)
        return [bits(weight) for weight in layers.parameters()]

    assert trained(lambda: checkpoint_scope(auto())) == trained(contextlib.nullcontext)
    theirs, ours, _ = peaks_beside_torch(step, layers)
    assert ours <= theirs


@pytest.mark.parametrize("shift", [None, 3.0])
def test_labels_made_first_do_not_bring_the_first_layers_back(shift):
    """The window of the loss makes them anew: they are quickly made, and the layers are not."""
    layers, x = blocks(4), torch.randn(8, 64, 32)

    def forward(made_first):
        labels = torch.ones(8, 64, dtype=torch.long) if made_first else ones
        if shift is not None:
            labels = labels.float().add(shift).long()
        return nn.functional.cross_entropy(through(layers, x).transpose(1, 2), labels)

    ones, peaks = torch.ones(8, 64, dtype=torch.long), []
    for made_first in (False, True):
        run = scoped(forward)
        run(made_first).backward()
        peaks.append(memory_of(lambda: run(made_first)).peak)  # noqa: B023
    assert peaks[1] <= 1.05 * peaks[0]


def test_a_path_needs_little_more_after_another_one():
    """What the plan of the last run keeps is let go where this run goes another way."""
    layers = nn.ModuleList(programs.Block(32, 4) for _ in range(9))
    oracle.with_gradients(layers.parameters())
    x = torch.randn(4, 64, 32)

    def forward(depth):
        with checkpoint_scope(auto()):
            return through(layers[:depth], x).square().mean()

    for depth in (3, 9, 6, 3, 9, 6):
        forward(depth).backward()
    peaks = {}
    for before, depth in ((9, 9), (3, 9), (6, 9), (6, 6), (3, 6), (9, 6), (3, 8)):
        forward(before).backward()
        peaks[before, depth] = memory_of(lambda: forward(depth)).peak  # noqa: B023
    for (before, depth), peak in peaks.items():
        assert peak <= 1.15 * peaks.get((depth, depth), peaks[9, 9]), (before, depth)


def test_two_stacks_that_drop_layers_need_about_what_a_checkpoint_around_each_layer_needs():
    """As with `layerdrop` of transformers. What is embedded stays alive as long as its stack runs,
    so that least is alive at the end of the first stack."""
    stacks = perceptrons(6), perceptrons(12)
    inside = nn.Linear(64, 64)
    oracle.with_gradients(nn.ModuleList([*stacks[0], *stacks[1], inside]).parameters())
    by_torch = functools.partial(checkpoint, use_reentrant=False)

    def stack(layers, x, draw, around):
        embedded = inside(x)
        x = embedded + 1
        for layer in layers:
            if draw.random() > 0.2:
                x = x + around(layer, x)
        return x

    def model(n, around):
        draw, x = random.Random(n), torch.randn(256, 64)
        for layers in stacks:
            x = stack(layers, x, draw, around)
        return x.square().mean()

    run = scoped(lambda n: model(n, lambda layer, x: layer(x)))
    for n in range(8):
        run(n).backward()
    for n in range(8, 14):
        ours = memory_of(lambda: run(n)).peak  # noqa: B023
        theirs = memory_of(lambda: model(n, by_torch)).peak  # noqa: B023
        assert ours <= 1.05 * theirs, n


def test_a_path_that_comes_again_gets_the_plan_of_a_fresh_site():
    """After many others at this site, so that its blocks were taken in pieces."""
    forward = programs.transformer(4, 32, 2, 32)

    def run(call):
        with checkpoint_scope(auto()) as run.scope:
            return call()

    x = torch.randn(64, 64, requires_grad=True)
    for n in range(1, 9):
        run(lambda: sum(x.sin().exp().sum() for _ in range(n))).backward()  # noqa: B023
    for _ in range(10):
        run(forward).backward()
    later = run.scope.stats
    clear_programs()
    for _ in range(3):
        run(forward).backward()
    assert later == run.scope.stats


def test_programs_by_turns_repeat_no_more_than_each_by_itself():
    """Two heads of one trunk. What a run holds is told by the plan that came next the last time."""
    trunk, x = perceptrons(8), torch.randn(256, 64)
    heads = perceptrons(3), perceptrons(6)
    oracle.with_gradients(nn.ModuleList([*trunk, *heads[0], *heads[1]]).parameters())

    def run(head):
        with checkpoint_scope(auto()) as scope:
            y = added_up(lambda layer, y: layer(y), [*trunk, *head], x)
            loss = y.square().mean()
        loss.backward()
        return scope.stats.ops_replayed

    alone = []
    for head in heads:
        clear_programs()
        alone.append([run(head) for _ in range(3)][-1])
    clear_programs()
    assert [run(head) for head in heads * 4][-2:] == alone


def test_steps_between_those_with_a_gradient_penalty_are_as_cheap_as_without_any():
    """A backward inside a block makes it keep its values later, if the last block had one, too."""
    layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(14))

    def run(has_penalty=False):
        x = torch.randn(64, 32, requires_grad=True)
        with checkpoint_scope(auto()) as scope:
            y = x
            for layer in layers:
                y = layer(y)
            loss = y.square().mean()
            if has_penalty:
                (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
                loss = loss + gradient.square().mean()
        loss.backward()
        return scope.stats.ops_replayed

    without = [run() for _ in range(3)][-1]
    later = [run(has_penalty=n % 4 == 0) for n in range(16)]
    assert later[2::4] == later[3::4] == [without] * 4
    assert len({*later[4::4]}) == 1


class Adapted(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, 4, bias=False)
        self.up = nn.Linear(4, outputs, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(nn.functional.dropout(x, 0.1)))


class Convolutions(nn.Module):
    """A residual block of a series."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.one = nn.Conv1d(inputs, outputs, 3, padding=1)
        self.two = nn.Conv1d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv1d(inputs, outputs, 1) if inputs < outputs else nn.Identity()

    def forward(self, x):
        return (self.two(self.one(x).relu()).relu() + self.skip(x)).relu()


class Scaled(torch.autograd.Function):
    """A normalisation with a weight of its own."""

    @staticmethod
    def forward(ctx, x, weight):
        scale = x.square().mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, scale, weight)
        return x * scale * weight

    @staticmethod
    def backward(ctx, gradient):
        x, scale, weight = ctx.saved_tensors
        of_weight = (gradient * x * scale).flatten(0, -2).sum(0)
        gradient = gradient * weight
        along = (gradient * x).mean(-1, keepdim=True)
        return scale * (gradient - x * along * scale.square()), of_weight


class Fused(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4 * width))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(Scaled.apply(self.up(x), self.weight))


class Strided(nn.Module):
    """Of the stem of a speech model: a convolution, and a norm of channels."""

    def __init__(self, inputs, stride):
        super().__init__()
        self.one, self.norm = nn.Conv1d(inputs, 64, 3, stride), nn.LayerNorm(64)

    def forward(self, x):
        return nn.functional.gelu(self.norm(self.one(x).mT).mT)


class Bottleneck(nn.Module):
    """Of a ResNet: convolutions with norms, and one beside them where sizes change."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.inner = nn.Sequential(
            convolution(inputs, width, 1),
            convolution(width, width, 3, stride),
            nn.Conv2d(width, 4 * width, 1),
            nn.BatchNorm2d(4 * width),
        )
        is_same = inputs == 4 * width
        self.short = nn.Identity() if is_same else nn.Conv2d(inputs, 4 * width, 1, stride)

    def forward(self, x):
        return (self.inner(x) + self.short(x)).relu_()


def convolution(inputs, outputs, kernel, stride=1):
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


WIDTHS = (3, 16, 32, 64, 128)
STAGES = [(16, 8, 1), *[(32, 8, 1)] * 2, (32, 16, 2), *[(64, 16, 1)] * 3]
STAGES += [(64, 32, 2), *[(128, 32, 1)] * 5, (128, 64, 2), *[(256, 64, 1)] * 2]


def stack_of(layers, inputs, end=lambda y: y.square().mean()):
    return layers, lambda call: end(through(each_called(call, layers), inputs))


def added_up(call, layers, x):
    for layer in layers:
        x = x + call(layer, x)
    return x


class Stacks:
    """Each gives layers, and a forward that gets what calls one of them."""

    def adapters_beside_frozen_layers():
        """Both read the same: where their gradients meet, two are beside the sum."""
        made = lambda: (nn.LayerNorm(64), Adapted(64, 256), nn.SiLU(), Adapted(256, 64))
        layers, inputs = [nn.Sequential(*made()) for _ in range(6)], torch.randn(256, 64)
        return layers, lambda call: added_up(call, layers, inputs).square().mean()

    def layers_that_read_all_before_them():
        """A gradient of what `cat` has made goes where the next one before it is added."""
        made = lambda n: (nn.BatchNorm1d(n), nn.ReLU(), nn.Linear(n, 64), nn.Linear(64, 16))
        layers = [nn.Sequential(*made(16 * n)) for n in range(1, 9)]
        inputs = torch.randn(256, 16)

        def forward(call):
            found = [inputs.requires_grad_()]
            for layer in layers:
                found.append(call(lambda *found, layer=layer: layer(torch.cat(found, 1)), *found))
            return torch.cat(found, 1).square().mean()

        return layers, forward

    def layers_before_a_loss(count, layer, loss):
        """What a sum hands on is one number, expanded: only some kernels copy it. A layer may end
        with statistics that nothing reads, and what a loss saves need not be made again."""
        layers, x = [nn.Sequential(*layer()) for _ in range(count)], torch.randn(8, 32, 64)
        return layers, lambda call: loss(through(each_called(call, layers), x))

    def a_codebook_between_two_stacks():
        """What is read before it, and by a loss at the end, is held for long."""
        layers, codes = perceptrons(6), nn.Parameter(torch.randn(128, 64))
        called = [lambda y, layer=layer: y + layer(y) for layer in layers]

        def forward(call):
            x = torch.randn(256, 64, requires_grad=True)
            logits = through(each_called(call, called[:3]), x) @ codes.T
            y = nn.functional.gumbel_softmax(logits, hard=True) @ codes
            y = through(each_called(call, called[3:]), y)
            return nn.functional.mse_loss(y, x) + (logits.softmax(-1).mean(0) * 5).logsumexp(0)

        return layers, forward

    def a_loss_at_each_layer():
        """What repeats is a layer with its loss, which a checkpoint would bring back together."""
        layers, inputs = perceptrons(6), torch.randn(256, 64)
        heads = [nn.Linear(64, 256) for _ in layers]

        def forward(call):
            x, loss = inputs, torch.zeros(())
            for layer, head in zip(layers, heads, strict=True):
                x = x + call(layer, x)
                loss = loss + call(lambda x, head=head: head(x).logsumexp(-1).sum(), x)
            return loss

        return [*layers, *heads], forward

    def residual_convolutions():
        """A block ends after its last activation, which is saved anyway."""
        layers = [Convolutions(8 if n == 0 else 48, 48) for n in range(6)]
        last, inputs = nn.Conv1d(48, 8, 1), torch.randn(8, 8, 512)
        _, forward = stack_of(layers, inputs, lambda x: last(x).tanh().mean())
        return [*layers, last], forward

    def custom_functions():
        """They run with grad mode off, but are no frozen part."""
        return stack_of([Fused(64) for _ in range(6)], torch.randn(256, 64))

    def parts_that_wait_for_backward_together():
        """They keep little. Each iteration takes a gradient through a detached copy, as guided
        samplers and learned optimizers do, and the next one goes on with the graph of all."""
        wide = lambda: nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 32))
        layers, x = [wide() for _ in range(6)], torch.randn(256, 32)

        def forward(call):
            y = x
            for layer in layers:
                y = y + call(layer, y)
                copy = y.detach().requires_grad_()
                y = y - torch.autograd.grad(copy.square().mean(), copy)[0]
            return y.square().mean()

        return layers, forward

    def frozen_convolutions():
        """An image is trained, as to transfer a style: weights have no gradients."""
        widths = itertools.pairwise([3, 16, 16, 32, 32, 64, 64])
        layers = [nn.Conv2d(*pair, 3, padding=1).requires_grad_(False) for pair in widths]
        image = torch.randn(1, 3, 96, 96, requires_grad=True)
        image.grad = torch.zeros_like(image)

        def stage(one, other, x):
            return other(one(x).relu_()).relu_()

        def forward(call):
            x, loss = image, 0
            for one, other in zip(layers[::2], layers[1::2], strict=True):
                x = call(stage, one, other, x)
                rows = x[0].flatten(1)
                loss, x = loss + (rows @ rows.T).square().mean(), nn.functional.avg_pool2d(x, 2)
            return loss

        return [], forward

    def a_result_that_nothing_reads():
        """Blocks end where it is saved, as the indices of a pooling, which the next block does not
        need."""
        made = lambda: (nn.Linear(32, 32), nn.GELU(), nn.MaxPool2d(3, 1, 1))
        return stack_of([nn.Sequential(*made()) for _ in range(6)], torch.rand(4, 16, 32, 32))

    def convolutions_with_a_stride():
        """What was saved before one is not there in its backward: what that works with is most of
        the peak. With many steps after them, few cuts are tried among them."""
        layers, x = [Strided(1, 5), *(Strided(64, 2) for _ in range(5))], torch.randn(2, 1, 8000)
        return stack_of(layers, x, lambda y: units_of(y.mean(2), 400))

    def stem_of_convolutions(steps):
        """The second one works with most; its input is saved just before it, and the first one's
        result should not be there then. The step before works with more than half as many bytes."""
        made = lambda one, two: (nn.Conv2d(one, two, 3, 2, 1), nn.BatchNorm2d(two), nn.ReLU())
        layers = [nn.Sequential(*made(*pair)) for pair in ((3, 32), (32, 32), (32, 64))]
        x = torch.randn(2, 3, 128, 128)
        return stack_of(layers, x, lambda y: units_of(y.mean((2, 3)), steps))

    def pyramid(kind, layout):
        """Operators repeat, but not what they save."""
        x = torch.randn(2, 3, 64, 64).to(memory_format=layout)
        layers = nn.ModuleList(PYRAMIDS[kind]()).to(memory_format=layout)
        return stack_of([*layers], x, lambda y: y.mean((2, 3)).logsumexp(1).sum())

    def generator_of_images():
        """The gradient of an image in colour is not copied, unlike those of wider layers."""
        made = lambda one, two: (nn.ConvTranspose2d(one, two, 4, 2, 1), nn.BatchNorm2d(two))
        pairs = itertools.pairwise([256, 128, 64, 32, 16, 3])
        layers = [nn.Sequential(*made(*pair), nn.ReLU()) for pair in pairs]
        return stack_of(layers, torch.randn(4, 256, 4, 4), lambda y: y.tanh().mean())

    def readers_of_an_embedding():
        """What is made again for a reader behind a cut does not open the segment before: branches
        of a model of sentences."""
        embedding, tokens = nn.Embedding(1000, 64), torch.randint(1000, (32, 200))
        branches = [nn.Conv1d(64, 64, size, padding="same") for size in (3, 5, 7)]

        def forward(call):
            y = embedding(tokens).mT
            parts = [call(lambda y, layer=layer: layer(y).relu().amax(-1), y) for layer in branches]
            return torch.cat(parts).square().mean()

        return [embedding, *branches], forward

    def cells_of_a_convolutional_lstm():
        """A weight that is saved first holds nothing that a later window starts from: that of an
        operator right behind a cut, whose input is kept."""
        layer, x = nn.Conv2d(19, 64, 3, 1, 1), torch.randn(4, 3, 16, 16)

        def cell(h, c):
            i, f, g, o = layer(torch.cat([x, h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            return o.sigmoid() * c.tanh(), c

        def forward(call):
            h = c = torch.zeros(4, 16, 16, 16)
            for _ in range(10):
                h, c = call(cell, h, c)
            return h.square().mean()

        return [layer], forward

    def latents_that_read_one_array():
        """As in a perceiver: what all blocks read is held once, wherever these are cut in two."""
        norms, keys, queries, ups, downs = (
            nn.ModuleList(layer() for _ in range(6)) for layer in LATENT
        )
        first, x, latents = nn.Linear(32, 64), torch.randn(4, 800, 32), torch.randn(64, 64)

        def forward(call):
            read, z = first(x), latents.expand(4, -1, -1)
            for norm, both, query, up, down in zip(norms, keys, queries, ups, downs, strict=True):

                def across(z, read, norm=norm, both=both, query=query):
                    key, value = both(norm(read)).chunk(2, -1)
                    return z + (query(z) @ key.mT / 8).softmax(-1) @ value

                z = call(across, z, read)
                z = call(lambda z, up=up, down=down: z + down(up(z).relu()), z)
            return z.square().mean()

        return [first, norms, keys, queries, ups, downs], forward


LATENT = [
    lambda: nn.LayerNorm(64),
    lambda: nn.Linear(64, 128),
    lambda: nn.Linear(64, 64),
    lambda: nn.Linear(64, 256),
    lambda: nn.Linear(256, 64),
]
PYRAMIDS = {
    "strides": lambda: [convolution(*pair, 3, 2) for pair in itertools.pairwise(WIDTHS)],
    "poolings": lambda: [
        nn.Sequential(convolution(*pair, 3), nn.MaxPool2d(2)) for pair in itertools.pairwise(WIDTHS)
    ],
    "stages": lambda: [convolution(3, 16, 7, 2), *(Bottleneck(*stage) for stage in STAGES)],
}
SMALL_LAYERS = [
    lambda: (nn.Linear(64, 64), nn.Tanh()),
    lambda: (nn.Linear(64, 64), nn.ReLU()),
    lambda: (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)),
    lambda: (nn.Linear(64, 64, bias=False), nn.BatchNorm1d(32), nn.ReLU(inplace=True)),
]
LAST_OPERATORS = [
    torch.sum,
    lambda y: y.square().sum(),
    lambda y: y.square().mean(),
    lambda y: nn.functional.mse_loss(y, torch.zeros_like(y)),
    lambda y: nn.functional.l1_loss(y, torch.zeros_like(y)),
    lambda y: nn.functional.cross_entropy(y[0], torch.arange(32)),
    lambda y: nn.functional.cross_entropy(y.flatten(0, 1), torch.arange(256) % 64),
]
LAYOUTS = torch.contiguous_format, torch.channels_last
LEAST = {"peak": 1}
STACKS = [  # how much of torch's peak is needed at most, how far a plan may be off, words, options
    *((Stacks.adapters_beside_frozen_layers, 1.0, 0.05, (), how) for how in ({}, LEAST)),
    *((Stacks.layers_that_read_all_before_them, 1.01, 0.05, (), how) for how in ({}, LEAST)),
    *(
        (Stacks.layers_before_a_loss, 1.0, 0.05, words, {})
        for words in (
            *itertools.product([1], SMALL_LAYERS, LAST_OPERATORS),
            *zip([3] * 7, SMALL_LAYERS * 2, LAST_OPERATORS, strict=False),
        )
    ),
    *((Stacks.a_codebook_between_two_stacks, 1.0, 0.05, (), how) for how in ({}, LEAST)),
    *((Stacks.a_loss_at_each_layer, 1.0, 0.05, (), how) for how in ({}, LEAST)),
    *((Stacks.residual_convolutions, 1.0, 0.05, (), how) for how in ({}, LEAST)),
    # What a backward in Python allocates is not known: a plan assumes as much as its forward does.
    (Stacks.custom_functions, 1.0, 0.3, (), {}),
    (Stacks.parts_that_wait_for_backward_together, 1.2, None, (), {}),
    (Stacks.frozen_convolutions, 1.0, 0.05, (), {}),
    (Stacks.a_result_that_nothing_reads, 1.0, None, (), {}),
    (Stacks.convolutions_with_a_stride, 1.1, None, (), LEAST),
    *((Stacks.stem_of_convolutions, 1.0, 0.05, (steps,), {}) for steps in (50, 400)),
    *((Stacks.pyramid, 1.0, 0.05, ("strides", layout), {}) for layout in LAYOUTS),
    *((Stacks.pyramid, 1.0, 0.05, ("poolings", layout), {}) for layout in LAYOUTS),
    *((Stacks.pyramid, 0.8, 0.05, ("stages", layout), {}) for layout in LAYOUTS),
    (Stacks.generator_of_images, 1.0, 0.05, (), {}),
    (Stacks.readers_of_an_embedding, 1.02, None, (), {}),
    (Stacks.cells_of_a_convolutional_lstm, 1.0, 0.05, (), {}),
    (Stacks.latents_that_read_one_array, 1.0, 0.05, (), {}),
]


@NO_ROOM
@pytest.mark.parametrize(("build", "most", "off", "words", "options"), STACKS)
def test_a_stack_needs_no_more_than_with_a_checkpoint_around_each_layer(
    build, most, off, words, options
):
    layers, forward = build(*words)
    oracle.with_gradients(nn.ModuleList(layers).parameters())
    run, peak, theirs = beside_torch(forward, **options)
    assert peak <= most * theirs
    assert off is None or run.scope.stats.peak_predicted == pytest.approx(peak, rel=off)


@NO_ROOM
def test_logits_are_made_again_only_where_all_blocks_would_be_too():
    """Those with a soft limit are saved several times, so that the least peak makes them again."""
    table, head = nn.Embedding(512, 32), nn.Linear(32, 512)
    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(32, 128, False), nn.GELU(), nn.Linear(128, 32, False))
        for _ in range(6)
    )
    oracle.with_gradients(nn.ModuleList([table, head, layers]).parameters())
    ids = torch.arange(256) % 10

    def forward(call):
        y = table(ids)
        for layer in layers:
            y = y + call(layer, y)
        return nn.functional.cross_entropy((head(y) / 30).tanh() * 30, ids)

    run, peak, theirs = beside_torch(forward)
    assert peak <= theirs
    loss = run()
    assert "addmm" not in count(loss.backward), "that of the head"


def mined_at_once(y, alike):
    """In a mask that is larger than all that is saved."""
    near = torch.cdist(y, y)
    harder = near[:, None] < near[:, :, None]
    return (alike[:, :, None] & ~alike[:, None] & harder).nonzero().unbind(1)


def mined_in_pairs(y, alike):
    """As pytorch-metric-learning does: pairs are joined with gradients on."""
    with torch.no_grad():
        near = y @ y.t()
        first, one = (alike & (near < 0.9)).nonzero().unbind(1)
        second, other = (~alike & (near > -0.9)).nonzero().unbind(1)
    i, j = (first[:, None] == second).nonzero().unbind(1)
    return first[i], one[i], other[j]


@pytest.mark.parametrize(
    ("mine", "rows", "classes"), [(mined_at_once, 100, 50), (mined_in_pairs, 80, 10)]
)
def test_a_loss_of_triplets_needs_no_more_than_with_a_checkpoint_around_each_layer(
    mine, rows, classes
):
    layers = [
        nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        for _ in range(4)
    ]
    oracle.with_gradients(nn.ModuleList(layers).parameters())
    x, label = torch.randn(rows, 64), torch.arange(rows) % classes

    def forward(call):
        y = nn.functional.normalize(through(each_called(call, layers), x))
        first, one, other = mine(y.detach(), label[:, None] == label)
        far = torch.cdist(y, y)
        return (far[first, one] - far[first, other] + 0.1).relu().mean()

    run, ours, theirs = beside_torch(forward)
    assert ours <= theirs
    assert 0.95 * ours <= run.scope.stats.peak_predicted <= 1.05 * ours
