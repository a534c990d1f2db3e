"""Every private name of torch that this library uses, one function each, with the reason.

Nothing else in the package reaches into `torch._C`. All of these names exist, unchanged, in torch
2.13 to 2.15.
"""

import contextlib
import operator
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch.utils.checkpoint
from torch import Tensor, default_generator, nn
from torch.nn.parameter import is_lazy as is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

_C: Any = torch._C
_autograd = _C._autograd

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

# ---- saved-tensors hooks

# `torch.autograd.graph.saved_tensors_hooks` is the public form, but its context manager costs as
# much as a region.
push_hooks = _autograd._push_saved_tensors_default_hooks
pop_hooks = _autograd._pop_saved_tensors_default_hooks
# torch.func transforms and some graph captures forbid hooks. A region is then a plain call.
hooks_are_enabled = _autograd._saved_tensors_hooks_is_enabled
# The pair of hooks that autograd would use now, or None.
enclosing_hooks: Callable[[], Hooks | None] = partial(
    _autograd._top_saved_tensors_default_hooks, True
)


def remove_hooks(pack: Any) -> None:
    """Pop the hooks with this `pack`, and put back those that were pushed after them. If they are
    gone by mistake, the outermost ones go, so that as many are popped as were pushed."""
    hooks = enclosing_hooks()
    pop_hooks()
    if hooks is None or hooks[0] == pack:
        return
    if enclosing_hooks() is not None:
        remove_hooks(pack)
        push_hooks(*hooks)


def are_of_checkpoint(hooks: Hooks) -> bool:
    """Whether these hooks are those of torch's checkpoint or its recompute, which count slots."""
    return getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


# Save a tensor as a node of autograd would: through the enclosing hooks, without a reference cycle,
# and unpacked with the same `grad_fn`.
save_input = _autograd._make_saved_tensor
SavedTensor = _autograd.SavedTensor  # the type of its result


def in_place_of(tensor: Tensor, data: Tensor) -> Tensor:
    """`data`, with the `grad_fn` of a tensor."""
    if not tensor.requires_grad:
        return data
    push_hooks(lambda _: data, lambda data: data)
    try:
        return save_input(tensor, False).unpack()  # type: ignore[no-any-return]
    finally:
        pop_hooks()


# The mode of torch's selective checkpointing around a forward.
SelectiveForward = torch.utils.checkpoint._CachingTorchDispatchMode


def mark_as_torchs_own(pack: Any, below: Hooks | None = None) -> None:
    """Since 2.14, torch's selective mode gives the tensors that it caches to the innermost pack
    hook, and a region would take them for slots. A marked hook names the user's hooks around it
    instead."""
    pack._checkpoint_internal = True
    pack._user_hooks = below


@contextlib.contextmanager
def shows_users_hooks(mode: Any) -> Iterator[None]:
    """Enter torch's selective mode in a region so that the mode finds the user's hooks around
    it."""
    theirs: Any = torch.utils.checkpoint  # mypy knows that of 2.13
    hooks = enclosing_hooks()
    assert hooks is not None  # of the region
    pack = partial(hooks[0])  # a method takes no attributes of its own
    pop_hooks()
    mark_as_torchs_own(pack, theirs._current_user_saved_tensors_hooks())
    push_hooks(pack, hooks[1])
    try:
        with mode:
            yield
    finally:
        pop_hooks()
        push_hooks(*hooks)
        pack.__dict__.clear()  # autograd holds it, unseen by the garbage collector


# ---- backward

NO_GRAPH_TASK = -1  # outside of backward; the others are unique in the process
graph_task_id = _C._current_graph_task_id
# Call a function when the running backward call ends. If that fails, the function is only dropped.
at_graph_task_end = torch.autograd.Variable._execution_engine.queue_callback
# `torch.utils.checkpoint.GraphExecGroup` that is entered in this thread, or None.
graph_exec_group = _C._get_graph_exec_group
# Whether the running backward has `retain_graph=True`.
keeps_graph = _autograd._get_current_graph_task_keep_graph
# Whether the running backward has no `inputs=` and is not `torch.autograd.grad`.
is_checkpoint_valid: Callable[[], bool] = torch.autograd._is_checkpoint_valid
# The Python function that all backward calls go through. The autograd engine calls hooks right
# below it, or in a thread of its own, without any Python frame.
run_backward_code = torch.autograd.graph._engine_run_backward.__code__
# A range in the output of a profiler, if one runs in this thread.
# `torch.profiler.record_function` would be an operator, which modes see.
profiled_range = _C._profiler._RecordFunctionFast

current_node = _C._current_autograd_node
# A custom `autograd.Function`, as a node: its backward may read a saved tensor twice.
PythonNode = _C._FunctionBase
# How many nodes this thread has made. One operator saves all of its tensors at the same count, some
# of them before its kernel runs.
node_count = _autograd._get_sequence_nr


def nodes_from(nodes: list[Any], met: set[Any]) -> Iterator[Any]:
    """The nodes of the autograd graph behind these, each once. `met` has those to leave out, and
    gets the others."""
    while nodes:
        node = nodes.pop()
        if node not in met:
            met.add(node)
            yield node
            nodes += [other for other, _ in node.next_functions]


def saved_by(node: Any) -> list[Any]:
    """What autograd has stored in a node for the tensors that it saves, each a `SavedTensor`."""
    found: list[Any] = []
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            with contextlib.suppress(RuntimeError):  # a custom Function, after backward
                saved = getattr(node, name)
                found += saved if isinstance(saved, list | tuple) else [saved]
    return found


def is_cast_of_parameter(tensor: Tensor) -> bool:
    """Whether autocast may have made this from a parameter. Autocast caches such casts, so a region
    may find one in the forward and make it in a rerun: it counts as the parameter. (Below autocast,
    where this is asked, autocast says that it is off.)"""
    node: Any = tensor.grad_fn
    if type(node).__name__ != "ToCopyBackward0":
        return False
    return type(node.next_functions[0][0]).__name__ == "AccumulateGrad"


# Batched backward: `torch.autograd.grad(..., is_grads_batched=True)` runs unpack hooks inside of
# torch's older vmap, which refuses random operators. Recomputed tensors do not depend on it.
_vmap_key = _C._parse_dispatch_key("VmapMode")
_no_batch = contextlib.nullcontext()


def outside_of_batch() -> Any:
    """A context that leaves batched backward, if it runs. (To enter it for nothing takes long.)"""
    if not _C._dispatch_tls_is_dispatch_key_included(_vmap_key):
        return _no_batch
    return _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_vmap_key))


# ---- modes and transforms

# The `torch.func` transform that runs in this thread, or None.
innermost_transform = _C._functorch.peek_interpreter_stack
mode_count = _C._len_torch_dispatch_stack
_infra_mode, _keys = _C._get_dispatch_mode, _C._TorchDispatchModeKey


def is_tracing() -> bool:
    """Whether AOTAutograd, which begins with the second mode, export, which may enter none, or
    `make_fx` is tracing."""
    modes = _infra_mode(_keys.PROXY), _infra_mode(_keys.FUNCTIONAL)
    return any(modes) or torch.compiler.is_exporting()


# The mode under which tensors are made without memory now, or None. It runs below all modes of
# users, whenever it has been entered.
fake_mode = partial(_infra_mode, _keys.FAKE)


def remove_mode(mode: TorchDispatchMode) -> None:
    """Leave a dispatch mode, and enter again those that were entered after it."""
    top = _get_current_dispatch_mode()
    if top is not None:
        TorchDispatchMode.__exit__(top, None, None, None)
        if top is not mode:
            remove_mode(mode)
            TorchDispatchMode.__enter__(top)


# No mode sees what runs inside, least of all our own.
unseen_by_modes = _C._DisableTorchDispatch
function_mode_count = _C._len_torch_function_stack
# The function modes of this thread, such as `torch.device(...)` contexts, outermost first.
function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack


def set_function_modes(modes: Sequence[Any]) -> None:
    """Replace the function modes of this thread; torch only offers to push and pop at the top."""
    for _ in range(function_mode_count()):
        _C._pop_torch_function_stack()
    for mode in modes:
        _C._push_on_torch_function_stack(mode)


# ---- operators

OpOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator
CAST = torch.ops.aten._to_copy.default  # to another dtype or device
COPY = torch.ops.aten.copy_.default
_set = torch.ops.aten.set_
# Operators that take a storage, and the same with a tensor on it.
TAKE_STORAGE = {
    _set.source_Storage: _set.source_Tensor,
    _set.source_Storage_storage_offset: _set.source_Tensor_storage_offset,
}


def convolution_backend(*args: Any) -> str:
    """Which kernels a convolution with these arguments runs, such as `"Mkldnn"` or `"Slow2d"`."""
    return _C._select_conv_backend(*args, None).name  # type: ignore[no-any-return]


def quick_call(func: Any) -> Any:
    """The C++ function that an `OpOverload` calls; operators of other kinds stay as they are."""
    return func._op if type(func) is OpOverload else func


def with_others_inside(call: Callable[..., Any]) -> Callable[..., Any]:
    """Call an operator that calls others in its body, with these as in plain code. Inside a
    dispatch mode, they would not see that a complex tensor is conjugated lazily, or that an
    efficient zero has no memory, and transforms of `torch.func` would fail; inside a replay,
    `__torch_function__` is off."""

    def called(*args: Any, **kwargs: Any) -> Any:
        shown = _C._dispatch_tls_local_include_set()
        hidden = _C._dispatch_tls_local_exclude_set() - _NOT_HIDDEN
        with _C._ForceDispatchKeyGuard(shown, hidden), _C._EnableTorchFunction():
            return call(*args, **kwargs)

    return called


_NOT_HIDDEN = _C.DispatchKeySet(_C.DispatchKey.Conjugate)
for _key in (
    "Negative",
    "ZeroTensor",
    "FuncTorchBatched",
    "FuncTorchVmapMode",
    "FuncTorchGradWrapper",
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
):
    _NOT_HIDDEN = _NOT_HIDDEN.add(_C._parse_dispatch_key(_key))
_has_kernel = _C._dispatch_has_kernel_for_dispatch_key
_COMPOSITE = _C.DispatchKey.CompositeImplicitAutograd
_COMPOSITE_NESTED = _C.DispatchKey.CompositeImplicitAutogradNestedTensor


def is_composite(func: Any) -> bool:
    """Whether an operator consists of others where no backend has a kernel of its own."""
    # (Nested tensors are asked for their sizes by operators that the dispatcher does not know.)
    is_known = isinstance(func, OpOverload) and _C._dispatch_has_kernel(func.name())
    return is_known and _has_kernel(func.name(), _COMPOSITE)


def parts_of(func: Any, tensors: Sequence[Tensor]) -> Any:
    """How a composite operator runs on these tensors, so that modes see its parts; None if their
    backend has a kernel for it: `silu_backward` on a CPU, `matmul` of nested tensors."""
    name, key = func.name(), _COMPOSITE
    for tensor in tensors:
        backend = _C._dispatch_key_for_device(tensor.device.type)
        if tensor.is_nested:
            backend = f"NestedTensor{backend}"
            key = _COMPOSITE_NESTED if _has_kernel(name, _COMPOSITE_NESTED) else key
        if _has_kernel(name, backend):
            return None
    return with_others_inside(partial(func._op_dk, key))


# The context manager costs more than the setting.
set_grad_enabled = _C._set_grad_enabled
# Operators make no views inside, and count no versions up; quicker, too.
below_versions = _C._AutoDispatchBelowADInplaceOrView


def below_autograd(function: Callable[[], Any]) -> None:
    """Recorded operators ran below autograd, autocast and function modes. So do they in this
    function. They may set grad mode; it is put back at the end."""
    grad_mode = torch.is_grad_enabled()
    try:
        set_grad_enabled(False)
        with below_versions(), _C.DisableTorchFunction(), _C._DisableAutocast():
            function()
    finally:
        set_grad_enabled(grad_mode)


# An efficient zero has no memory. Autograd makes them for gradients of gradients and in forward
# mode.
is_zeros = Tensor._is_zerotensor


# ---- tensors

FakeTensor = torch._subclasses.FakeTensor  # infers shapes without computing, for DTensor for one
UNWRAPPED = (Tensor, FakeTensor)
# The public way to a storage (`untyped_storage()`) builds a Python object per call.
storage_id: Callable[[Tensor], int] = _C._storage_id
storage_uses = _C._storage_Use_Count  # how many tensors and storage objects use one
# As long as one lives, no other storage is made at the address of the one that it refers to.
StorageWeakRef = torch.multiprocessing.reductions.StorageWeakRef
has_storage = _C._has_storage  # False for sparse, MKLDNN and other opaque layouts


def is_whole_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, and no wrapper of one."""
    kind = type(tensor)
    return kind is nn.Parameter or (kind is FakeTensor and isinstance(tensor, nn.Parameter))


def version(tensor: Tensor) -> int:
    """The version counter; -1 for inference tensors, which have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


# Give tensors these versions, from which they count on.
set_versions = _autograd._unsafe_set_version_counter

# Operators inside count versions of views, also inside `__torch_dispatch__`, where the key that
# does so is excluded.
counting_versions = partial(_C._SetExcludeDispatchKeyGuard, _C.DispatchKey.ADInplaceOrView, False)


def shape_of(tensor: Tensor) -> Any:
    """The shape; for strided nested tensors the shapes of their parts."""
    try:
        return tensor.shape
    except RuntimeError:
        if is_lazy(tensor):
            return ("?",)
        return tuple(map(tuple, tensor._nested_tensor_size().tolist()))


def plain_parts(tensor: Any) -> list[Tensor]:
    """The plain tensors that a wrapper subclass consists of; or the tensor itself."""
    if type(tensor) is Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]
    # One may be a `DeviceMesh`.
    return [p for part in parts if isinstance(part, Tensor) for p in plain_parts(part)] or [tensor]


def unflatten(kind: Any, parts: dict[str, Any], context: Any, size: Any, stride: Any) -> Tensor:
    """The inverse of `__tensor_flatten__`."""
    if kind.__module__ == "torch.nested._internal.nested_tensor":
        # torch finds the symbol of a ragged size by the tensor of its offsets.
        source = parts.get("_lengths", parts["_offsets"])
        sys.modules[kind.__module__]._tensor_symint_registry[source] = size[context["ragged_idx"]]
    return kind.__tensor_unflatten__(parts, context, size, stride)  # type: ignore[no-any-return]


# Containers that are registered with pytree, by type: how to flatten and unflatten them.
PYTREE_NODES = torch.utils._pytree.SUPPORTED_NODES

# ---- modules

# The dictionaries of a module's children, parameters and buffers. The public iterators make names
# and sets as well.
parts_of_module = operator.attrgetter("_modules", "_parameters", "_buffers")
# Its buffers by name, and which of the names are not persistent.
buffers_of_module = operator.attrgetter("_buffers", "_non_persistent_buffers_set")
# The Python function in whose frames a module's `forward` runs.
module_call_code = nn.Module._wrapped_call_impl.__code__
# Batch and instance normalisation. Their kernels update statistics without counting up versions.
Normalisation = torch.nn.modules.batchnorm._NormBase

# ---- generators, devices and switches

# `get_state` makes a Python object while it holds the generator's mutex (as of torch 2.15). Garbage
# collection may then hand the GIL to a thread that waits in `set_state` for the mutex and keeps the
# GIL: a deadlock. A Python lock, taken before the mutex, is waited for without the GIL.
_cpu_state_lock = threading.RLock()


def get_cpu_state() -> Tensor:
    """The state of the CPU's default random generator."""
    with _cpu_state_lock:
        return default_generator.get_state()


def set_cpu_state(state: Tensor) -> None:
    """Put back a state from `get_cpu_state`."""
    with _cpu_state_lock:
        default_generator.set_state(state)


_device_module = torch.get_device_module()  # of this build's accelerator; asks no driver


def accelerator_is_up() -> bool:
    """Whether the accelerator, if there is one, has been used in this process. Before that, its
    generators have no state."""
    return getattr(_device_module, "_initialized", True)


def streams_of(device: torch.device) -> Any:
    """The module with the streams of a device on which copies run beside the computation, or
    None."""
    return torch.get_device_module(device) if device.type in ("cuda", "xpu") else None


autocast_is_on_somewhere = _C._is_any_autocast_enabled


def autocast_device_types() -> list[str]:
    """The device types with an autocast of their own that this build may use."""
    other = torch.accelerator.current_accelerator() or torch.device("cuda")
    return [t for t in ("cpu", other.type) if torch.amp.is_autocast_available(t)]


def _matmul_precision() -> str | None:
    """The precision of float32 products; None where newer settings
    (`torch.backends.*.fp32_precision`) contradict the legacy one, which then raises."""
    try:
        return _C._get_float32_matmul_precision()  # type: ignore[no-any-return]
    except RuntimeError:
        return None


# Getters and setters of process-wide switches that select kernels, public ones among them. Every
# region reads all of them twice, so the table has only those that matter to this build.
SWITCHES: tuple[Any, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (_matmul_precision, lambda value: value and _C._set_float32_matmul_precision(value)),
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    # off in a backward that is called on a tensor of a subclass
    (_C._get_torch_function_state, _C._set_torch_function_state),
)
if torch.backends.cuda.is_built():
    SWITCHES += (
        (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
        (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
        (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
        (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
        (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    )

# ---- compiled code, and FSDP2

# With one process, it gathers parameters with an operator that others use, too.
FSDP_GATHERS = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def is_called_from(module: str) -> bool:
    """Whether code of a module, or of a package, is on the stack."""
    if module not in sys.modules:
        return False
    frames = traceback.walk_stack(sys._getframe(1))
    return any(frame.f_globals.get("__name__", "").startswith(module) for frame, _ in frames)


def keep_dynamo_out(owner: Any, module: str) -> None:
    """Tell Dynamo to run the functions of a module, or of a class in it, and all that they call, in
    eager mode. Compiled code calls hooks while it runs, and a rerun must save the same tensors as
    the forward."""
    for part in vars(owner).values():
        own = getattr(part, "fget", part)  # the function of a property
        if getattr(own, "__module__", None) != module:
            continue
        if isinstance(own, type):
            keep_dynamo_out(own, module)
        elif isinstance(own, FunctionType):
            _skip_in_dynamo(own.__code__)


def _skip_in_dynamo(code: CodeType) -> None:
    """Skip a function, and those that are defined in it."""
    dynamo = _C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, skip))
    for const in code.co_consts:
        if isinstance(const, CodeType):
            _skip_in_dynamo(const)


def leave_eager(function: Any, reason: str) -> None:
    """`torch.compiler.disable`, without the import of all of Dynamo."""
    function._torchdynamo_disable = True  # Dynamo looks at this before it traces a call
    function._torchdynamo_disable_msg = reason
    _skip_in_dynamo(function.__code__)
