"""What operators and their derivatives do, as far as a plan has to know: operations, and bytes.

Torch says neither which results a derivative needs, nor what its kernels allocate on the way. The
tables below were measured with the profiler, operator by operator, with torch 2.13 on a CPU.
"""

from typing import Any

import torch
from torch import Tensor

from .memory import memory_size

# ---- what is saved, and computed

_RECURRENT = ("cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer")

# Autograd saves what these return: their derivatives are formulas of it.
_SAVED = {
    "exp",
    "expm1",
    "log_softmax",
    "reciprocal",
    "relu",
    "rsqrt",
    "safe_softmax",
    "scaled_dot_product_cudnn_attention",
    "scaled_dot_product_efficient_attention",
    "scaled_dot_product_flash_attention",
    "scaled_dot_product_flash_attention_for_cpu",
    "sigmoid",
    "softmax",
    "sqrt",
    "tanh",
}


def saves_its_result(func: Any) -> bool:
    """Whether autograd saves the result of an operator for that operator's own backward."""
    return _name_of(func) in _SAVED


def _name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    return name.partition(".")[0].strip("_")


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """The floating-point operations of a call; 0 if torch does not count the operator, or does not
    know the shapes. Torch does not count recurrent layers."""
    if _name_of(func) in _RECURRENT:
        rows = args[0].numel() // max(1, args[0].shape[-1])
        weights = args[1] if isinstance(args[1], list | tuple) else args[1:3]
        return int(2 * rows * sum(weight.numel() for weight in weights))
    from torch.utils.flop_counter import flop_registry  # `import torch` does not import it

    formula = flop_registry.get(getattr(func, "overloadpacket", func))
    try:
        return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
    except (AssertionError, IndexError, TypeError, ValueError):
        return 0


# ---- what backward works with

_BATCH_NORM = torch.ops.aten.native_batch_norm.default
_CONVOLUTION = torch.ops.aten.convolution.default
_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
JOINS = ("cat", "stack")
# Derivatives that are several operators: what these make on the way, in sizes of what is read.
_DERIVATIVES = {
    "abs": 1,
    "amax": 1.25,
    "clamp": 0.5,
    "clamp_min": 0.25,
    "cos": 2,
    "cumsum": 2,
    "erf": 4,
    "linalg_vector_norm": 1,
    "log1p": 1,
    "logsumexp": 2,
    "pow": 2,
    "prelu_kernel": 1,
    "reciprocal": 2,
    "rsqrt": 2,
    "sin": 1,
    "sqrt": 1,
    "std": 1,
    "var": 1,
}
# What is summed up for the gradient of a smaller factor or divisor, in sizes of the result.
_BROADCASTING = {"div": 3, "mul": 1}
# Their gradient has the shape of what they read, also where that is expanded.
_PICKING = ("gather", "index", "index_select")
# Copies that the forward of a loss makes of the largest tensor that it reads.
LOSSES = {
    "binary_cross_entropy_with_logits": 2,
    "huber_loss": 1,
    "mse_loss": 1,
    "smooth_l1_loss": 1,
}


def scratch_of(func: Any, args: Any, result: Any) -> int:
    """The bytes that the backward of an operator allocates, beside gradients. For convolutions on a
    CPU, those of oneDNN with AVX-512."""
    if func is _CONVOLUTION:
        return _scratch_of_convolution(result, *args)
    if func is _BATCH_NORM and args[0].is_cpu:
        return int(args[0].nbytes)  # a second gradient of its input, which nothing reads
    if func is _LSTM:  # weights in another layout, and gradients of the gates
        return int(2 * (args[1].nbytes + args[2].nbytes) + 4 * result[0].nbytes)
    name = _name_of(func)
    if name in _PICKING and args[0].requires_grad:
        return max(0, int(args[0].nbytes) - memory_size(args[0]))
    read = [memory_size(a) for a in args if isinstance(a, Tensor) and a.requires_grad]
    if name in _BROADCASTING:
        made = memory_size(result)
        return _BROADCASTING[name] * made if min(read, default=made) < made else 0
    return int(_DERIVATIVES.get(name, 0) * sum(read))


def _scratch_of_convolution(
    result: Tensor, image: Tensor, weight: Tensor, _: Any, stride: Any, *others: Any
) -> int:
    """Copies, in another layout, of what it reads and makes."""
    *_, is_transposed, _, groups = others
    _, width, *kernel = weight.shape
    copies = image.nbytes + weight.nbytes + result.nbytes
    if not image.is_cpu:
        return copies
    is_short, is_last = image.itemsize < 4, image.stride(1) == 1  # the dimension of channels
    # For the gradient of the weight, in float32.
    padding = _padding(width) * _padding(len(weight) // groups)
    sums = int((3 if is_short else 1) * weight.nbytes * padding)
    if not (is_short or is_last):
        if max(kernel) > _WIDEST:  # each thread sums up for itself
            sums = 4 * weight.nbytes * torch.get_num_threads()
        elif width <= _COLOURS:  # they have a kernel of their own
            sums = weight.nbytes
    if image.is_contiguous():
        if max(*kernel, *stride) == 1 and not is_short:
            return result.nbytes  # a matrix product; the gradient may have another layout
        if groups == 1:
            copies = max(sums, _copies_in_order(result, image, weight, stride, is_transposed))
        return copies
    if len(kernel) == 1:
        return 4 * image.nbytes  # the input and the gradient are made contiguous before all else
    if is_last and len(kernel) == 2 and not is_short:
        return max(2 * weight.nbytes, sums if max(kernel) > 3 else 0)
    is_small = width == 1 and max(kernel) <= min(3, *image.shape[2:])
    return copies if groups > 1 and (is_small or not is_last) else max(sums, copies)


def _copies_in_order(
    result: Tensor, image: Tensor, weight: Tensor, stride: Any, is_transposed: bool
) -> int:
    """Those of a contiguous image, in one group."""
    copies = image.nbytes + weight.nbytes
    if image.itemsize < 4:
        copies += result.nbytes
        return max(copies + copies // 2, 2 * image.nbytes)
    if is_transposed:  # images in colour are not copied
        return copies + (result.nbytes if result.shape[1] > _COLOURS else 0)
    channels = image.shape[1]  # images in colour are copied only if they need a gradient
    copies = weight.nbytes + int(result.nbytes * _padding(result.shape[1]))
    if image.requires_grad or channels > _COLOURS:
        copies += int(image.nbytes * _padding(channels))
    if max(stride) > 1 and image.requires_grad:
        copies = max(copies, 2 * image.nbytes)
    return copies


_COLOURS = 3  # the channels of an image
_WIDEST = 14  # the kernels that oneDNN has code of its own for


def _padding(channels: int) -> float:
    """By which factor the number of channels grows where kernels pad it to blocks of 16."""
    return -(-channels // 16) * 16 / max(1, channels)
