"""Every private name of torch that this library touches, one function each: why, and since when.

Nothing else in the package reaches into `torch._C`. All of these exist, unchanged, in torch 2.11 to 2.15
unless a line says otherwise.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

_C: Any = torch._C
_autograd: Any = torch._C._autograd

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

# ---- saved-tensors hooks. `torch.autograd.graph.saved_tensors_hooks` is the public form; a region pushes the
# pair itself because the context manager object would cost as much as the region.
push_hooks: Callable[[Callable[[Tensor], Any], Callable[[Any], Tensor]], None] = (
    _autograd._push_saved_tensors_default_hooks
)
pop_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
# torch.func transforms and some graph captures forbid hooks: a region is then a plain call.
hooks_are_enabled: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled


# The `torch.func` transform that runs in this thread, or None; torch has no public way to ask.
innermost_transform: Callable[[], object | None] = _C._functorch.peek_interpreter_stack


# The pair that autograd would use now, or None; there is no public way to read it.
enclosing_hooks: Callable[[], Hooks | None] = functools.partial(_autograd._top_saved_tensors_default_hooks, True)


def are_torchs_own(hooks: Hooks) -> bool:
    """Whether these are the hooks of `torch.utils.checkpoint` itself (which marks them since 2.14)."""
    pack = hooks[0]
    return getattr(pack, "__module__", None) == "torch.utils.checkpoint" and pack.__qualname__.endswith("pack_hook")


def is_rerun_of_torch(pack: Callable[[Tensor], Any]) -> bool:
    """Whether these are the hooks with which `torch.utils.checkpoint` collects what it computes again: they hold what
    they are given, and nobody looks whether it is written afterwards."""
    return getattr(pack, "__qualname__", "").startswith("_recomputation_hook.") and (
        pack.__module__ == "torch.utils.checkpoint"
    )


# ---- the running backward call. -1 outside of one; unique in the process.
graph_task_id: Callable[[], int] = _C._current_graph_task_id
current_node: Callable[[], Any] = _C._current_autograd_node
# `torch.utils.checkpoint.GraphExecGroup` that is entered in this thread, or None.
graph_exec_group: Callable[[], object | None] = _C._get_graph_exec_group


# Call something when the running backward call ends; a failing one only drops its reference to it.
at_graph_task_end: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


# The Python function that all backward calls go through: what the engine asks for comes from right below it, or from a
# thread of the engine, which has no Python frame at all.
run_backward_code: CodeType = torch.autograd.graph._engine_run_backward.__code__
# A custom `autograd.Function`, as a node: its backward may read a saved tensor twice.
PythonNode: type = _C._FunctionBase


def saver_of(node: Any, is_it: Callable[[object], bool]) -> str | None:
    """Which node, from `node` on towards the leaves, has saved what `is_it` recognises, and as what; for messages."""
    seen = {None}
    stack = [node]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        stack.extend(following for following, _ in node.next_functions)
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                try:
                    saved = getattr(node, name)
                    items = [item.data for item in (saved if isinstance(saved, tuple | list) else (saved,))]
                except (RuntimeError, AttributeError):  # freed, or None
                    continue
                if any(map(is_it, items)):
                    return f"{node.name()} has saved it as {name.removeprefix('_raw_saved_')!r}"
    return None


# ---- operators, as they are named in dispatch modes and policies
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator
FakeTensor = torch._subclasses.FakeTensor  # what tells shapes (to DTensor, for one) without computing anything


def quick_call(func: Any) -> Any:
    """What an `OpOverload` calls; other kinds of operators stay as they are."""
    return func._op if type(func) is OpOverload else func


# The dispatch modes of torch's selective checkpointing: other code asks whether a mode is one of them.
SelectiveForward: Any = torch.utils.checkpoint._CachingTorchDispatchMode
SelectiveRecompute: Any = torch.utils.checkpoint._CachedTorchDispatchMode


def mark_as_torchs_own(pack: Any, below: Hooks | None) -> None:
    """Since 2.14, torch's selective mode looks for hooks of the user below those that are marked like this."""
    pack._checkpoint_internal = True
    pack._user_hooks = below


tree_map: Callable[[Callable[[Any], Any], Any], Any] = torch.utils._pytree.tree_map
tree_leaves: Callable[[Any], list[Any]] = torch.utils._pytree.tree_leaves


def identity_of_call(func: Any, args: Any) -> Any:
    """What tells the calls of an operator apart: the operator, and the compiled code that it runs, if it does that."""
    if isinstance(func, HigherOrderOperator) and func.name() == "inductor_compiled_code" and args:
        import torch._higher_order_ops.wrap as wrap

        resolve = getattr(wrap, "_resolve_inductor_callable", None)  # since 2.12
        if resolve is not None:
            return func, resolve(args[0]).idx
    return func


def is_mutable(func: Any) -> bool:
    """Whether an operator writes arguments, as its schema says."""
    return isinstance(func, OpOverload) and func._schema.is_mutable


@functools.cache
def writes_in_place(func: Any) -> bool:
    """Whether all that an operator does is to write its first argument, which it returns."""
    if not is_mutable(func) or torch.Tag.inplace_view in func.tags or len(func._schema.returns) != 1:
        return False
    first, result = func._schema.arguments[0].alias_info, func._schema.returns[0].alias_info
    return first is not None and first.is_write and result is not None and first.before_set == result.before_set


def has_ordered_effect(func: Any) -> bool:
    """Whether an operator has effects that must happen once and in order. Raw collectives are none of those: they
    return a handle, which can't be cached."""
    from torch._higher_order_ops.effects import has_effects  # heavy, and torch itself imports it late

    return has_effects(func) and func.namespace != "c10d"


def is_tracing() -> bool:
    """Whether AOTAutograd, export or `make_fx` is tracing."""
    return _C._get_dispatch_mode(_PROXY) is not None


_PROXY = _C._TorchDispatchModeKey.PROXY


# Whether the running backward has no `inputs=` and is not `torch.autograd.grad`.
is_checkpoint_valid: Callable[[], bool] = torch.autograd._is_checkpoint_valid


# The dictionaries of a module's children, parameters and buffers: without the names, sets and generators of the public
# iterators, and without the checks of `setattr`.
parts_of_module: Callable[[nn.Module], tuple[dict[str, nn.Module | None], dict[str, Any], dict[str, Tensor | None]]] = (
    operator.attrgetter("_modules", "_parameters", "_buffers")
)


# `get_state` makes a Python object while it holds the generator's mutex. Garbage collection may run then, and its
# callbacks may let go of the GIL: to a thread that waits for the mutex in `set_state`, and keeps the GIL (as of torch
# 2.15). A lock of Python's own, taken before, is waited for without the GIL.
_cpu_state_lock = threading.RLock()


def get_cpu_state() -> Tensor:
    """The state of the CPU's default random generator."""
    with _cpu_state_lock:
        return torch.default_generator.get_state()


def set_cpu_state(state: Tensor) -> None:
    """Put back what `get_cpu_state` has returned."""
    with _cpu_state_lock:
        torch.default_generator.set_state(state)


_accelerator = torch.accelerator.current_accelerator()  # what this build is made for; asks no driver
_device_module: Any = None if _accelerator is None else torch.get_device_module(_accelerator)


def accelerator_is_up() -> bool:
    """Whether the accelerator, if there is one, has been used in this process: before that its generators can't be
    asked for their state."""
    return _device_module is None or getattr(_device_module, "_initialized", True)


def streams_of(device: torch.device) -> Any:
    """The module with the streams of a device on which copies run beside the computation, or None."""
    return torch.get_device_module(device) if device.type in ("cuda", "xpu") else None


# ---- storages. The public way (`untyped_storage()`) builds a Python object per call.
storage_id: Callable[[Tensor], int] = _C._storage_id
id_of_storage: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")  # where it is at hand


# False for sparse, MKLDNN and other opaque layouts.
has_storage: Callable[[Tensor], bool] = _C._has_storage


def storage_users(tensor: Tensor) -> int:
    """How many references the storage of `tensor` has; 0 if it has no storage."""
    return cast(int, _C._storage_Use_Count(storage_id(tensor))) if has_storage(tensor) else 0


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether `a` is still what it was when the alias `b` was made of it: the same storage in the same way."""
    if a is b:
        return True
    if a.requires_grad != b.requires_grad or version(a) != version(b):
        return False
    if type(a) is not Tensor:  # a subclass, of which detached ones share the insides
        return type(a) is type(b)
    if a.is_nested or not has_storage(a) or not has_storage(b) or storage_id(a) != storage_id(b):
        return False
    return (a.shape, a.stride(), a.storage_offset(), a.dtype) == (b.shape, b.stride(), b.storage_offset(), b.dtype)


# The same by the storage's id, which must still be valid.
storage_users_by_id: Callable[[int], int] = _C._storage_Use_Count


def _references_besides_tensors() -> int:
    tensor = torch.empty(1)
    tensor.untyped_storage()
    return storage_users_by_id(storage_id(tensor)) - 1


# Once Python has seen a storage, its Python object counts as one, in torch 2.11 to 2.15.
STORAGE_OBJECT = _references_besides_tensors()


@functools.cache
def flop_formula(func: Any) -> Callable[[Any, Any, Any], float] | None:
    """How many floating-point operations a call takes, given (args, kwargs, result); None for operators that torch
    does not count. (Imported when it is needed: `import torch` does not.)"""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(func, "overloadpacket", func))
    if formula is None:
        return None
    of_shapes = getattr(formula, "__wrapped__", None)  # without its walk through everything in the arguments

    def count(args: Any, kwargs: Any, result: Any) -> float:
        try:
            if of_shapes is not None and not kwargs and type(result) is Tensor:
                shapes = [arg.shape if isinstance(arg, Tensor) else arg for arg in args]
                return cast(float, of_shapes(*shapes, out_shape=result.shape))
            return cast(float, formula(*args, **kwargs, out_val=result))
        except (AssertionError, IndexError, TypeError, ValueError):  # shapes that it was not written for
            return 0.0

    return count


# A weak reference that keeps the storage's *address* from being reused; free it with `free_weak_storage`.
weak_storage: Callable[[Any], int] = cast("Any", torch.UntypedStorage._weak_ref)
free_weak_storage: Callable[[int], None] = torch.UntypedStorage._free_weak_ref


# ---- tensors
_adinplace_key = _C.DispatchKey.ADInplaceOrView
_is_excluded: Callable[[Any], bool] = _C._dispatch_tls_is_dispatch_key_excluded


def alias(tensor: Tensor) -> Tensor:
    """A detached alias that shares the version counter, also when called below autograd.

    Inside `__torch_dispatch__` the key that shares version counters between views is excluded; put it back. Inference
    tensors have no counter, and would have none for a region to look at: their alias is an ordinary tensor.
    """
    if tensor.is_inference() and has_storage(tensor):
        with torch.inference_mode(False), torch.no_grad():
            plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            bits = int(tensor.dtype.is_complex and tensor.is_conj()) + 2 * int(tensor.is_neg())
            plain.set_(tensor.untyped_storage())
            return lay(plain, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, bits)
    if _is_excluded(_adinplace_key):
        with _C._SetExcludeDispatchKeyGuard(_adinplace_key, False):
            return tensor.detach()
    if type(tensor) is not Tensor:
        return tensor.detach()
    with _C._DisableTorchDispatch():  # no mode need see it, least of all our own: it takes long
        return tensor.detach()


def version(tensor: Tensor) -> int:
    """The version counter; -1 for tensors that have none (inference tensors)."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def shape_of(tensor: Tensor) -> Any:
    """The shape; for strided nested tensors, which have none, the shapes of their parts."""
    try:
        return tensor.shape
    except RuntimeError:
        return tuple(map(tuple, tensor._nested_tensor_size().tolist()))


def unflatten(kind: Any, parts: dict[str, Any], context: Any, size: Any, stride: Any) -> Tensor:
    """The other way of `__tensor_flatten__`."""
    if kind.__module__ == "torch.nested._internal.nested_tensor":
        # A ragged size has a name, which torch finds by the very tensor of the offsets.
        source = parts.get("_lengths", parts["_offsets"])
        sys.modules[kind.__module__]._tensor_symint_registry[source] = size[context["ragged_idx"]]
    return cast(Tensor, kind.__tensor_unflatten__(parts, context, size, stride))


def parts_of(tensor: Any) -> Sequence[Any] | None:
    """What a tensor without plain memory of its own consists of: tensors, and values with `==`. None for plain ones."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [getattr(tensor, name) for name in names]
    if tensor.is_meta or hasattr(tensor, "fake_mode"):
        return ()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    if tensor.is_mkldnn:
        return [tensor.to_dense()]
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.is_quantized:
        return tensor.int_repr(), str(tensor.qscheme())
    return None


def is_leaf(view: Tensor) -> bool:
    """Whether a view has no `grad_fn`; torch refuses to say while one that was made without gradients is written."""
    try:
        return view.is_leaf
    except RuntimeError:
        return False


def set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """For copies that stand for other tensors."""
    _autograd._unsafe_set_version_counter(tuple(tensors), tuple(max(version, 0) for version in versions))


def set_version(tensor: Tensor, version: int) -> None:
    set_versions((tensor,), (version,))


# How many nodes this thread has made: the same while one operator saves its tensors, some before its kernel runs.
node_count: Callable[[], int] = _autograd._get_sequence_nr


is_zeros: Callable[[Tensor], bool] = Tensor._is_zerotensor
_zeros_key = _C.DispatchKey.ZeroTensor


def with_zeros(run: Callable[..., Any]) -> Callable[..., Any]:
    """Run an operator from `__torch_dispatch__` although its arguments may be efficient zeros.

    Autograd makes such tensors, which have no memory, for gradients of gradients and in forward mode. Torch handles
    them by a dispatch key that is excluded in a dispatch mode: kernels would read memory that isn't there.
    """

    def guarded(*args: Any, **kwargs: Any) -> Any:
        with _C._SetExcludeDispatchKeyGuard(_zeros_key, False):
            return run(*args, **kwargs)

    return guarded


class SavedInput(Protocol):
    def unpack(self) -> Tensor: ...


class NotSaved:
    """A `SavedInput` that is the tensor itself."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def unpack(self) -> Tensor:
        return self._tensor


class _SaveInput(torch.autograd.Function):
    # For torch < 2.13, which lacks `_make_saved_tensor`: a node whose only work is to save its input.
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        with _C._DisableTorchDispatch():  # no mode need see it
            return torch.empty(0, dtype=tensor.dtype, device="cpu")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return torch.empty(0)  # never read; without it, no forward mode

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("this node is never part of a graph that runs")


class _SavedByNode:
    __slots__ = ("output",)

    def __init__(self, tensor: Tensor) -> None:
        # The output is held, not its node: torch 2.11 frees what a node has saved with the last of its outputs.
        self.output = _SaveInput.apply(tensor)  # type: ignore[no-untyped-call]

    def unpack(self) -> Tensor:
        return cast(Tensor, self.output.grad_fn.saved_tensors[0])


def _saved_by_node(tensor: Tensor, is_output: bool) -> SavedInput:
    return _SavedByNode(tensor)


# Save a tensor that requires grad as a node of autograd would: through the enclosing hooks, and brought back with the
# same `grad_fn`, without a reference cycle. torch has this since 2.13.
save_input: Callable[[Tensor, bool], SavedInput] = getattr(_autograd, "_make_saved_tensor", _saved_by_node)
# What it returns, where it takes any tensor.
SavedTensor: type | None = _autograd.SavedTensor if save_input is not _saved_by_node else None


def lay(base: Tensor, size: Any, stride: Any, offset: int, dtype: torch.dtype, bits: int) -> Tensor:
    """The tensor that lies like this on the storage of `base`; conj (1) and neg (2) bits. Not differentiable."""
    if base.dtype == dtype and not (base.is_neg() or (dtype.is_complex and base.is_conj())):
        tensor = base.as_strided(size, stride, offset)
    else:
        tensor = torch.empty(0, dtype=dtype, device=base.device)
        tensor.set_(base.untyped_storage(), offset, size, stride)
    if bits & 1:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if bits & 2 else tensor


def copy(tensor: Tensor) -> Tensor:
    """A copy that lies in memory as `tensor` does, gaps included, since kernels look at strides."""
    new = tensor.clone()
    if tensor.layout is torch.strided and new.stride() != tensor.stride():
        new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        new.copy_(tensor)
        set_version(new, 0)
    return new


def bytes_of(tensor: Tensor) -> Tensor:
    """All of the storage of `tensor`."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def clone_storage(tensor: Tensor) -> Tensor:
    """`tensor` on a copy of its whole storage, lying there as before."""
    with torch.no_grad():
        copy = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        copy.set_(tensor.untyped_storage().clone())
        bits = int(tensor.dtype.is_complex and tensor.is_conj()) + 2 * int(tensor.is_neg())
        offset = cast(int, tensor.storage_offset())
        return lay(copy, tensor.shape, tensor.stride(), offset, tensor.dtype, bits)


# ---- batched backward. `torch.autograd.grad(..., is_grads_batched=True)` runs the unpack hooks inside of torch's older
# vmap, which refuses random operators. What is recomputed does not depend on the batch.
_vmap_key = _C._parse_dispatch_key("VmapMode")
_is_included: Callable[[Any], bool] = _C._dispatch_tls_is_dispatch_key_included


in_batched_backward: Callable[[], bool] = functools.partial(_is_included, _vmap_key)


def outside_of_batch() -> AbstractContextManager[Any]:
    return cast("AbstractContextManager[Any]", _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_vmap_key)))


# ---- running recorded operators again
class below_autograd:
    """Recorded operators ran below autograd, autocast and function modes; run them at the same depth again.

    Grad mode is put back at the end, since operators are run in the one that they were recorded in.
    """

    __slots__ = ("_grad_mode", "_guards")

    def __enter__(self) -> None:
        self._grad_mode = torch.is_grad_enabled()
        set_grad_enabled(False)
        self._guards = (
            _C._AutoDispatchBelowADInplaceOrView(),
            _C.DisableTorchFunction(),
            _C._ExcludeDispatchKeyGuard(_autocast_keys),
        )
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *error: Any) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(*error)
        set_grad_enabled(self._grad_mode)


def _find_autocast_keys() -> Any:
    keys = _C.DispatchKeySet(_C.DispatchKey.AutocastCPU)
    for name in dir(_C.DispatchKey):
        if name.startswith("Autocast"):
            keys = keys | _C.DispatchKeySet(getattr(_C.DispatchKey, name))
    return keys


_autocast_keys = _find_autocast_keys()


# The context manager objects cost more than what they set.
set_grad_enabled: Callable[[bool], None] = _C._set_grad_enabled


def keep_dynamo_out(*modules: ModuleType) -> None:
    """Tell Dynamo not to compile the functions of these modules, nor what they call: compiled code (compiled autograd,
    too) calls the hooks while it runs, and a rerun must save what the forward saved."""
    for module in modules:
        codes = [code for value in vars(module).values() for code in _codes_of(value, module.__name__)]
        while codes:
            code = codes.pop()
            _skip_in_dynamo(code)
            codes.extend(const for const in code.co_consts if isinstance(const, CodeType))


def _skip_in_dynamo(code: CodeType) -> None:
    dynamo = _C._dynamo.eval_frame
    dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP))


def leave_eager(function: FunctionType) -> None:
    """`torch.compiler.disable`, without the import of all of Dynamo."""
    cast("Any", function)._torchdynamo_disable = True  # what Dynamo asks before it traces a call of it
    _skip_in_dynamo(function.__code__)


def _codes_of(value: Any, module: str) -> list[CodeType]:
    if getattr(value, "__module__", None) != module:
        return []
    if isinstance(value, type):
        value_of = [getattr(v, "fget", v) for v in vars(value).values()]
        return [v.__code__ for v in value_of if isinstance(v, FunctionType)]
    return [value.__code__] if isinstance(value, FunctionType) else []


# ---- ambient state without a public getter that is cheap enough, or without one at all
autocast_is_on_somewhere: Callable[[], bool] = _C._is_any_autocast_enabled
function_mode_count: Callable[[], int] = _C._len_torch_function_stack
_function_mode_at: Callable[[int], Any] = _C._get_function_stack_at


def function_modes() -> list[Any]:
    """The `TorchFunctionMode`s of this thread, outermost first (`torch.device(...)` contexts are some)."""
    return [_function_mode_at(i) for i in range(function_mode_count())]


def set_function_modes(modes: Sequence[Any]) -> None:
    """Replace the function modes of this thread; torch only offers to push and pop at the top."""
    for _ in range(function_mode_count()):
        _C._pop_torch_function_stack()
    for mode in modes:
        _C._push_on_torch_function_stack(mode)


_warns_only: Callable[[], bool] = _C._get_deterministic_algorithms_warn_only
_is_strict: Callable[[], bool] = _C._get_deterministic_algorithms


# What decides the precision of float32 products; special ones follow the more general ones before them, unless set.
_PRECISIONS = [("generic", "all")] + [(b, o) for b in ("cuda", "mkldnn") for o in ("all", "matmul", "conv", "rnn")]


def _get_matmul_precision() -> str | list[str]:
    """The legacy setting, which raises when parts of it were set by the newer `torch.backends.*.fp32_precision`."""
    try:
        return cast(str, _C._get_float32_matmul_precision())
    except RuntimeError:
        return [_C._get_fp32_precision_getter(*which) for which in _PRECISIONS]


def _set_matmul_precision(value: str | list[str]) -> None:
    if isinstance(value, str):
        if not isinstance(_get_matmul_precision(), str):
            _C._set_fp32_precision_setter(*_PRECISIONS[0], "none")
        if _get_matmul_precision() != value:
            _C._set_float32_matmul_precision(value)
        return
    for which, precision in zip(_PRECISIONS, value, strict=True):
        if _C._get_fp32_precision_getter(*which) != precision:
            _C._set_fp32_precision_setter(*which, precision)


def precisions() -> tuple[str, list[str]]:
    """All that has been set of these: the legacy setting, and what each has of its own, which the getters don't tell
    from what follows from a more general one."""
    own = []
    for which in _PRECISIONS:
        own.append(_C._get_fp32_precision_getter(*which))
        _C._set_fp32_precision_setter(*which, "none")
    state = _C._get_float32_matmul_precision(), own
    set_precisions(state)
    return state


def set_precisions(state: tuple[str, list[str]]) -> None:
    legacy, own = state
    _C._set_float32_matmul_precision(legacy)
    for which, precision in zip(_PRECISIONS, own, strict=True):
        _C._set_fp32_precision_setter(*which, precision)


# (getter, setter) of process-wide switches that change which kernel runs. Public ones are here too: one table. Every
# region reads it twice, so it has only what matters to this build.
SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_is_strict, lambda on: _C._set_deterministic_algorithms(on, warn_only=_warns_only())),
    (_warns_only, lambda on: _C._set_deterministic_algorithms(_is_strict(), warn_only=on)),
    (_get_matmul_precision, _set_matmul_precision),
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_math_sdp_allow_fp16_bf16_reduction, _C._set_math_sdp_allow_fp16_bf16_reduction),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
)
if torch.backends.nnpack.is_available():  # convolutions, where MKLDNN is off
    SWITCHES += ((_C._get_nnpack_enabled, _C._set_nnpack_enabled),)
if torch.backends.cuda.is_built():
    SWITCHES += (
        (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
        (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
        (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
        (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
        (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
        (_C._get_cublas_allow_fp16_accumulation, _C._set_cublas_allow_fp16_accumulation),
        (
            _C._get_cublas_allow_fp16_reduced_precision_reduction,  # and whether to split K
            lambda allowed: _C._set_cublas_allow_fp16_reduced_precision_reduction(*allowed),
        ),
        (
            _C._get_cublas_allow_bf16_reduced_precision_reduction,
            lambda allowed: _C._set_cublas_allow_bf16_reduced_precision_reduction(*allowed),
        ),
    )
# Without a Python function among them; may raise a RuntimeError.
QUICK_GETTERS: tuple[Callable[[], Any], ...] = tuple(
    _C._get_float32_matmul_precision if getter is _get_matmul_precision else getter for getter, _ in SWITCHES
)


def is_cast_of_parameter(tensor: Tensor) -> bool:
    """Whether autocast may have made this from a parameter. It caches such casts, so a region may find one in the
    forward and make it itself in a rerun: it counts as the parameter. (Where this is asked, below autocast, autocast
    says that it is off.)"""
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    source = node.next_functions[0][0]
    return source is not None and source.name() == "torch::autograd::AccumulateGrad"


def autocast_device_types() -> list[str]:
    """Every device type with an autocast of its own in this build."""
    types = ["cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "maia", "ipu"]
    types.append(_C._get_privateuse1_backend_name())
    return [t for t in types if torch.amp.is_autocast_available(t)]
