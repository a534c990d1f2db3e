"""An accelerator made of Python, with a random generator of its own: tests of devices where there
is none.

A tensor of the device `toy` is a wrapper around a CPU tensor that does the work. A device can't be
unregistered, so this is a program: it runs all `Cases` and prints one JSON object, kind and name
to traceback or null. `flat` tensors say how they are taken apart (`__tensor_flatten__`), `opaque`
ones don't.
"""

import dataclasses
import json
import multiprocessing
import traceback
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.nn.functional as F
from oracle import DOORS
from torch import nn
from torch.utils._pytree import tree_map

from checkpointing import checkpointed
from checkpointing.torch_compat import checkpoint


class Module:
    def __init__(self):
        self.generator = torch.Generator()
        self.asked = 0

    is_initialized = is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])

    def manual_seed_all(self, seed):
        self.generator.manual_seed(seed)

    def get_rng_state(self, device=None):
        self.asked += 1
        return self.generator.get_state()

    def set_rng_state(self, state, device=None):
        self.generator.set_state(state)


class Toy(torch.Tensor):
    """A tensor on the device; `inner` is where its numbers are."""

    @staticmethod
    def __new__(cls, inner):
        place = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        options = {"dtype": inner.dtype, "device": "toy:0", **place}
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), **options)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


class FlatToy(Toy):
    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        return FlatToy(parts["inner"])


Holder = dataclasses.make_dataclass("Holder", ["x"])
torch_toy = Module()
kind = Toy


def inner(value):
    return value.inner if isinstance(value, Toy) else value


def wrap(value):
    return kind(value) if isinstance(value, torch.Tensor) else value


def compute(func, args, kwargs):
    """Run an operator on the numbers inside; random ones draw from the device's generator."""
    cpu_args, cpu_kwargs = tree_map(inner, args), tree_map(inner, dict(kwargs))
    to_cpu = False
    if cpu_kwargs.get("device") is not None:
        to_cpu = torch.device(cpu_kwargs["device"]).type == "cpu"
        cpu_kwargs["device"] = "cpu"
    if torch.Tag.nondeterministic_seeded in func.tags:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(torch_toy.generator.get_state())
            result = func(*cpu_args, **cpu_kwargs)
            torch_toy.generator.set_state(torch.get_rng_state())
    else:
        result = func(*cpu_args, **cpu_kwargs)
    if func._schema.is_mutable:  # in-place
        return args[0]
    return result if to_cpu else tree_map(wrap, result)


def copy_between(source, target, non_blocking=False):
    inner(target).copy_(inner(source))
    return target


def register():
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("toy", backend_module=torch_toy)
    library = torch.library.Library("aten", "IMPL")
    for name in ("empty.memory_format", "empty_strided"):
        allocate = getattr(torch.ops.aten, name.partition(".")[0])

        def on_device(*args, allocate=allocate, device=None, pin_memory=None, **kwargs):
            return wrap(allocate(*args, device="cpu", **kwargs))

        library.impl(name, on_device, "PrivateUse1")
    library.impl("_copy_from", copy_between, "PrivateUse1")
    return library


BOTH = DOORS.values()


def observe(step):
    """The bits that a step leaves behind: its results and both random streams."""
    torch.manual_seed(0)
    torch_toy.generator.manual_seed(1)
    results = step()
    tensors = [*results, torch.get_rng_state(), torch_toy.generator.get_state()]
    return [inner(t).detach().view(torch.uint8).flatten().tolist() for t in tensors]


def check(doors, fn, call=lambda fn, *tensors: fn(*tensors), on=("toy",)):
    """`fn` in each door is as plain; `call` hands it its tensors, one for each device in `on`."""

    def step(fn):
        leaves = []
        for device in on:
            leaf = torch.linspace(0.1, 1, 50)
            leaves.append((wrap(leaf) if device == "toy" else leaf).requires_grad_())
        y = call(fn, *leaves)
        y.sum().backward()
        return [y, *(leaf.grad for leaf in leaves)]

    plain = observe(lambda: step(fn))
    for door in doors:
        have = observe(lambda door=door: step(door(fn)))
        parts = zip(["result", *on, "cpu stream", "toy stream"], have, plain, strict=True)
        assert [what for what, a, b in parts if a != b] == [], door


def body(x):
    return F.dropout(F.dropout(x.sin(), 0.5).exp(), 0.2).sin()


def both_in_turn(c, t):
    c, t = F.dropout(c.sin(), 0.5), F.dropout(t.sin(), 0.5)
    c = (c * torch.rand(50)).exp()
    return c + (t * torch.rand(50, device="toy")).sin().to("cpu")


def drop_in(use_reentrant):
    return lambda fn: lambda *args: checkpoint(fn, *args, use_reentrant=use_reentrant)


class Cases:
    def arguments():
        """Rerun forks the generator of a device that any argument is on, or a parameter of one."""
        check(BOTH, body)
        check(BOTH, lambda x: body(x), lambda fn, x: fn(x=x * 1.5))
        check(BOTH, lambda s: body(s["a"][0][1]), lambda fn, x: fn({"a": [(0, x)]}))
        check(BOTH, lambda s: body(s.x), lambda fn, x: fn(Holder(x)))
        data, module = wrap(torch.ones(50)), nn.Module()
        module.weight = nn.Parameter(wrap(torch.linspace(0, 1, 50)))
        for given, weight in ((data, lambda data: data), (module, lambda module: module.weight)):

            def fn(c, given, weight=weight):
                return body(c.to("toy") * weight(given)).to("cpu")

            check(BOTH, fn, lambda fn, c, given=given: fn(c, given), ["cpu"])

    def both_devices_in_turn():
        """Their streams are independent; also through the drop-in, at any depth, and its legacy."""
        check([*BOTH, drop_in(False), drop_in(True)], both_in_turn, on=["cpu", "toy"])
        check([drop_in(False)], lambda s: body(s[0]), lambda fn, x: fn([x]))

    def moved():
        """To the device and away, inside (where replay is exact) and by hooks around a region."""

        def fn(c):
            c = F.dropout(c, 0.5).sin()
            t = F.dropout(c.to("toy"), 0.5).exp()
            c = F.dropout(t.to("cpu"), 0.5).sin()
            return (c.to("toy") * torch.rand(50, device="toy")).exp().to("cpu").sin()

        def call(fn, x):
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: (t.device, t.to("cpu")), lambda p: p[1].to(p[0])
            ):
                return fn(x * 1.5)

        check([DOORS["replay"], DOORS["scope"]], fn, on=["cpu"])
        check(BOTH, body, call)

    def autocast():
        """Every type of device has an autocast of its own."""
        seen = []

        def fn(x):
            switches = map(torch.is_autocast_enabled, ("cpu", "toy"))
            seen.append([*switches, torch.get_autocast_dtype("toy")])
            return x.sin().exp()

        for door in (checkpointed, drop_in(False), drop_in(True)):
            seen.clear()
            x = torch.rand(3).requires_grad_()  # the device has no casts, but a switch
            with torch.autocast("toy", torch.bfloat16):
                y = door(fn)(x)
            y.sum().backward()
            assert seen == [[False, True, torch.bfloat16]] * 2, (door, seen)

    def no_argument_there_costs_nothing():
        """The device's generator is not asked when nothing lives there."""
        for options, x, asked in (
            ({}, torch.rand(3), False),
            ({"preserve_rng_state": False}, wrap(torch.rand(3)), False),
            ({"backend": "replay"}, torch.rand(3), False),
            ({"backend": "replay"}, wrap(torch.rand(3)), False),  # no random operator
            ({}, wrap(torch.rand(3)), True),
        ):
            torch_toy.asked = 0
            y = checkpointed(lambda x: x.sin().exp(), **options)(x.requires_grad_())
            assert (torch_toy.asked > 0) is asked, options
            y.sum().backward()


CASES = {name: case for name, case in vars(Cases).items() if not name.startswith("_")}
KINDS = {"flat": FlatToy, "opaque": Toy}


def outcome(kind_, case):
    """What became of a case: None, or what went wrong."""
    global kind
    kind = kind_
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        error = pool.submit(case).exception()
    return error and "".join(traceback.format_exception(error))


def main():
    library = register()
    torch.set_num_threads(1)
    with torch.no_grad():  # imports what torch imports at first use
        F.dropout(torch.rand(2, device="toy"), 0.5).to("cpu").sin()
    of = lambda kind: {case: outcome(kind, run) for case, run in CASES.items()}
    print(json.dumps({name: of(kind) for name, kind in KINDS.items()}))
    del library
