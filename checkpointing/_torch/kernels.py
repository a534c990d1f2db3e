"""What operators and their derivatives do, as far as a plan has to know: operations, and bytes.

Torch says neither which results a derivative needs, nor what its kernels allocate on the way. The
tables below were measured with the profiler, operator by operator, with torch 2.13 on a CPU.
"""

from operator import mul
from typing import Any

import torch
from torch import Tensor

from .memory import is_strided, memory_size
from .names import convolution_backend

# ---- what is saved, and computed

_RECURRENT = ("cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer")

# Autograd saves what these return: their derivatives are formulas of it.
_SAVED = {
    *_RECURRENT,
    "cdist_forward",
    "euclidean_dist",
    "exp",
    "exp2",
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
    "tan",
    "tanh",
}
_SAVED_IN_PLACE = (torch.ops.aten.elu_.default, torch.ops.aten.leaky_relu_.default)


def saves_its_result(func: Any) -> bool:
    """Whether autograd saves the result of an operator for that operator's own backward."""
    return func in _SAVED_IN_PLACE or _name_of(func) in _SAVED


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
# Derivatives that are several operators: what these make on the way, in sizes of what is read.
_DERIVATIVES = {
    "abs": 1,
    "acos": 5,
    "acosh": 3,
    "amax": 1.25,
    "asin": 4,
    "asinh": 3,
    "atan": 2,
    "atanh": 3,
    "clamp": 0.5,
    "clamp_min": 0.25,
    "cos": 2,
    "cosh": 1,
    "cumprod": 4.25,
    "cumsum": 2,
    "digamma": 1,
    "erf": 4,
    "exp2": 1,
    "expm1": 1,
    "fft_r2c": 3,
    "lgamma": 1,
    "linalg_vector_norm": 1,
    "log10": 1,
    "log1p": 1,
    "log2": 1,
    "logaddexp": 1.5,
    "logcumsumexp": 8,
    "logsumexp": 2,
    "masked_select": 0.5,
    "maximum": 0.75,
    "minimum": 0.75,
    "nan_to_num": 1.25,
    "pow": 2,
    "prelu_kernel": 1,
    "prod": 1.25,
    "reciprocal": 2,
    "rsqrt": 2,
    "sin": 1,
    "sinh": 1,
    "sqrt": 1,
    "std": 1,
    "std_mean": 1,
    "tan": 2,
    "var": 1,
    "var_mean": 1,
}
# The same, in sizes of the result and of each tensor among the arguments. (The derivative of
# `scatter_reduce` depends on how it reduces.)
_OF_SEVERAL = {
    "cdist_forward": (3,),
    "euclidean_dist": (1, 2, 2),
    "scatter_reduce, amax": (0, 3, 0, 4.5),
    "scatter_reduce, amin": (0, 3, 0, 4.5),
    "scatter_reduce, mean": (0, 3, 0, 2),
    "scatter_reduce, prod": (0, 3, 0, 7),
}
_HANDED_ON = ("add", "sub")  # their gradient is the one that they got
# What these make on the way for the gradient of their second argument, in sizes of the result.
_PRODUCTS = {"div": 2, "mul": 0}
# The derivatives of these conjugate what they read, if it is complex: a kernel copies it.
_CONJUGATING = ("bmm", "mm", "mul")
# How often the derivatives of these copy what the operators themselves copy.
_COPYING = {
    "fft_c2c": 0,
    "fft_c2r": 0,
    "fft_r2c": 2,
    "log_softmax": 0,
    "native_layer_norm": 1,
    "roll": 1,
    "softmax": 0,
}
# The derivatives of these copy a gradient that is not in order.
_TAKING_IN_ORDER = {
    "adaptive_avg_pool2d",
    "avg_pool2d",
    "convolution",
    "grid_sampler_2d",
    "im2col",
    "log_softmax",
    "max_pool2d_with_indices",
    "native_group_norm",
    "native_layer_norm",
    "softmax",
    "upsample_bilinear2d",
    "upsample_nearest2d",
}
_JOINING = (torch.ops.aten.cat.default, torch.ops.aten.stack.default)
# On a CPU, the kernels of these copy an argument of another type to the type of the result.
_PROMOTING = (*_HANDED_ON, *_PRODUCTS)
# Losses that sum up in place: their result, a number, has memory as large as what they read.
LARGE_NUMBERS = "mse_loss", "smooth_l1_loss"
# Views that show less than their base, or more.
_TAKING = ("expand", "select", "slice")
# Copies that the forward of a loss makes of the largest tensor that it reads.
_LOSSES = {
    "binary_cross_entropy_with_logits": 2,
    "huber_loss": 1,
    "mse_loss": 1,
    "smooth_l1_loss": 1,
}


def scratch_of(func: Any, args: Any, result: Any) -> int:
    """The bytes that the backward of an operator allocates, beside gradients. For convolutions on a
    CPU, those of oneDNN with AVX-512 or AVX2."""
    if func is _CONVOLUTION:
        return int(_scratch_of_convolution(result, *args))
    if func is _BATCH_NORM and args[0].is_cpu:
        return int(args[0].nbytes)  # a second gradient of its input, which nothing reads
    if func is _LSTM:  # weights in another layout, and gradients of the gates
        return int(2 * (args[1].nbytes + args[2].nbytes) + 4 * result[0].nbytes)
    name = _name_of(func)
    if name in _TAKING:
        return _size(result) if _shows_another_part(args[0], result) else 0
    if name == "scatter_reduce":
        name += f", {args[4]}"
    tensors = [each for each in args if isinstance(each, Tensor)]
    read = [tensor for tensor in tensors if tensor.requires_grad]
    copied = 0
    if name in _COPYING:
        copied = _COPYING[name] * _copies_on_the_way(name, *args)
    elif name in _CONJUGATING and result.is_complex():
        others = [each for each in tensors if any(each is not other for other in read)]
        copied = max(map(_size, others), default=0)
    if name in _PRODUCTS:
        # The gradient of a smaller argument is a sum over what it was multiplied with.
        smaller = [tensor for tensor in read if tensor.numel() < result.numel()]
        second = [tensor for tensor in read if tensor is args[1]]
        times = len(smaller) + _PRODUCTS[name] * len(second)
        return copied + _size(result) * times + _copies_in_type(args, result)
    several = map(mul, _OF_SEVERAL.get(name, ()), map(_size, [result, *tensors]))
    return int(copied + sum(several) + _DERIVATIVES.get(name, 0) * sum(map(_size, read)))


def scratch_of_forward(func: Any, args: Any, result: Any) -> int:
    """The bytes that an operator allocates, beside its results."""
    if func is _CONVOLUTION:
        return int(_scratch_of_convolution_forward(result, *args))
    name = _name_of(func)
    if name in _PROMOTING:
        return _copies_in_type(args, result)
    if name in _LOSSES:
        return _LOSSES[name] * max([_size(each) for each in args if isinstance(each, Tensor)])
    if name in _COPYING:
        return _copies_on_the_way(name, *args)
    return 0


def takes_in_order(func: Any) -> bool:
    """Whether the derivative of an operator copies a gradient that is not in order, as after a
    transposition."""
    return _name_of(func) in _TAKING_IN_ORDER


def reorders(func: Any, args: Any, result: Any) -> bool:
    """Whether a gradient in order is handed on in another one: by a view in another order, and by
    what joins tensors along another dimension than the first."""
    if func in _JOINING and is_strided(result):
        dim = args[1] if len(args) > 1 else 0
        return bool(result.shape[: dim % max(1, result.dim())].numel() > 1)
    tensors = args[0] if args else result, result
    if not all(isinstance(each, Tensor) and is_strided(each) for each in tensors):
        return False
    before, after = [each.is_contiguous() or _has_channels_last(each) for each in tensors]
    return before != after and tensors[0].numel() == result.numel()


def _copies_in_type(args: Any, result: Tensor) -> int:
    """The bytes of copies of arguments of another type, such as masks, in the type of a result."""
    read = [each for each in args if isinstance(each, Tensor) and each.is_cpu and each.dim()]
    return result.itemsize * sum([e.numel() for e in read if e.dtype != result.dtype])


def _copies_on_the_way(name: str, tensor: Tensor, dims: Any = (), *_: Any) -> int:
    """The bytes that a Fourier transform copies: where other dimensions lie on both sides of those
    that it is taken over, and in an inverse one over several. Those of `roll`, which takes one
    dimension after the other. And those of what reads tensors in order, such as logits without the
    last ones."""
    if name in _TAKING_IN_ORDER:
        return 0 if tensor.is_contiguous() else _size(tensor)
    if name == "roll":
        return (len(dims) - 1) * _size(tensor)
    if name == "fft_c2r" and len(dims) > 1:
        return 2 * _size(tensor)
    count = tensor.dim()
    others = sorted({*range(count)} - {dim % count for dim in dims})
    return _size(tensor) if others and others[-1] - others[0] >= len(others) else 0


def _size(tensor: Tensor) -> int:
    """The bytes of a gradient of a tensor."""
    return int(tensor.nbytes) if is_strided(tensor) else 0


def _shows_another_part(base: Tensor, view: Tensor) -> bool:
    """Whether the gradient of a view is not handed on. (`expand` may leave the shape as it is.)"""
    return base.requires_grad and base.shape != view.shape


def scratch_in_place(func: Any, target: Tensor) -> int:
    """The bytes that the backward of an operator allocates for what it writes: another gradient,
    beside the one that it got. Where that is a view, it works on copies of the gradient of all of
    its base, and of its part of that."""
    if not (target.requires_grad and is_strided(target)):
        return 0
    found = 0 if _name_of(func) in _HANDED_ON else int(target.nbytes)
    if target._is_view():
        found += int(target.nbytes) + memory_size(target)
    return found


def _scratch_of_convolution(result: Tensor, *args: Any) -> Any:
    """The larger part of two: the gradients of its input and of its weight are computed one after
    the other."""
    image, weight, _, stride, _, dilation, is_transposed, _, groups = args
    if not image.is_cpu:
        return image.nbytes + weight.nbytes + result.nbytes
    backend = convolution_backend(*args)
    # Without AVX-512, oneDNN has no code of its own for these, unless each channel is by itself.
    is_dilated = max(dilation) > 1 and weight.shape[1] > 1 and not _HAS_AVX512
    if is_dilated or backend.startswith("Slow"):
        return _columns(backend, result, image, weight, max(stride))
    if weight.dim() == 3 and not image.is_contiguous():
        of_image, of_weight = 4 * image.nbytes, 0  # it and the gradient are made contiguous
    elif _has_channels_last(image):  # images are not copied
        of_image, of_weight = (4 if image.itemsize < 4 else 2) * weight.nbytes, 0
    else:
        makes_two = groups == 1 and (max(stride) > 1 or image.itemsize < 4)
        of_image, of_weight = _copies_in_order(result, image, weight, makes_two, is_transposed)
        if not image.is_contiguous():
            of_image, of_weight = of_image + image.nbytes, of_weight + image.nbytes
    sums = _sums(image, weight, groups)
    # One of the sums may be the gradient itself.
    beside = sums if image.itemsize < 4 else sums - weight.nbytes
    of_weight = max(of_weight + beside, sums)
    return max(image.requires_grad * of_image, weight.requires_grad * of_weight)


def _scratch_of_convolution_forward(result: Tensor, *args: Any) -> Any:
    """oneDNN copies an image in order, and the weight, into blocks of channels, and its result back
    from there; that of a transposed one, twice."""
    image, weight, _, stride, _, _, is_transposed, *_ = args
    if not image.is_cpu or _has_channels_last(image):
        return 0
    backend = convolution_backend(*args)
    if backend.startswith("Slow"):
        is_product = max(*stride, *weight.shape[2:]) == 1
        return 0 if is_product else _matrix(backend, result, image, weight)
    read = image.nbytes * _padding(image.shape[1]) + weight.nbytes
    if is_transposed:
        needed = max(read, 2 * result.nbytes)
    else:
        needed = max(read, result.nbytes) + result.nbytes * (_padding(result.shape[1]) - 1)
    return needed if image.is_contiguous() else needed + image.nbytes


def _widest(image: Tensor) -> int:
    """The widest kernel for which oneDNN has code of its own."""
    return int(min(_WIDEST, *image.shape[2:]))


def _has_channels_last(image: Tensor) -> bool:
    return image.dim() == 4 and image.stride(1) == 1 and not image.is_contiguous()


def _matrix(backend: str, result: Tensor, image: Tensor, weight: Tensor) -> int:
    """A matrix of what the kernel covers at each place of the result, or, if it is transposed, of
    the image; for a dilated one, of one image after the other."""
    places = image if "Transpose" in backend else result
    columns = places.nbytes // len(weight) * weight[0].numel()
    return columns // len(image) if "Dilated" in backend else columns


def _columns(backend: str, result: Tensor, image: Tensor, weight: Tensor, stride: int) -> int:
    """Such a matrix, as the backward needs it."""
    if max(stride, *weight.shape[2:]) == 1:
        return result.nbytes  # a matrix product; the gradient may have another layout
    columns = _matrix(backend, result, image, weight)
    if "Dilated" in backend:
        return columns
    if backend == "Mkldnn":
        # Of one image after the other, with what the gradient of the weight is summed up in.
        threads, places = torch.get_num_threads(), result[0, 0].numel()
        is_shared = len(image) > 1 and places < _FEW_PLACES * threads
        return (columns // len(image) + 4 * weight.nbytes) * (threads if is_shared else 1)
    return columns if weight.requires_grad or "3d" in backend else 0


def _sums(image: Tensor, weight: Tensor, groups: int) -> int:
    """What the gradient of a weight is summed up in."""
    outputs, width, *kernel = weight.shape
    is_short, is_last = image.itemsize < 4, _has_channels_last(image)
    padded, threads = weight.nbytes, torch.get_num_threads()
    if width != _COLOURS or groups > 1 or is_short:
        padded = int(padded * _padding(width) * _padding(outputs // groups))
    if width == 1 and groups > 1:  # each channel by itself
        if not is_last or max(kernel) <= min(3, *image.shape[2:]):
            return weight.nbytes
        # One image and its gradient, too, with as many channels.
        return 3 * padded + 32 * image.nbytes // max(1, len(image)) if is_short else padded
    if is_short:
        times = 2 if width > _COLOURS else 2 + 2.6 * threads
        return int(times * padded) + _BUFFER * threads
    if is_last:
        return (2 + (weight.stride(1) > 1)) * padded  # in another order, it is copied
    if max(kernel) > _widest(image):  # each thread sums up for itself
        return 4 * weight.nbytes * threads
    return padded


def _copies_in_order(
    result: Tensor, image: Tensor, weight: Tensor, makes_two: bool, is_transposed: bool
) -> tuple[int, int]:
    """Those of an image in order: for its gradient, of which some kernels make two, and for that of
    the weight."""
    read = int(image.nbytes * _padding(image.shape[1]))
    made = int(result.nbytes * _padding(result.shape[1]))
    if is_transposed:  # images in colour are not copied
        made = 0 if result.shape[1] == _COLOURS else made
        return max(read, made + weight.nbytes), read + made
    of_image, of_weight = max(read, read - image.nbytes + made + weight.nbytes), read + made
    if makes_two:
        of_image = max(2 * image.nbytes, made + max(image.nbytes, weight.nbytes))
    is_depthwise = weight.shape[1] == 1 < image.shape[1]
    if image.shape[1] == _COLOURS:
        of_weight = made
    elif max(weight.shape[2:]) > (3 if is_depthwise else _widest(image)):
        of_weight = 0
    return of_image, of_weight


_COLOURS = 3  # the channels of an image
_HAS_AVX512 = "512" in torch.backends.cpu.get_cpu_capability()
# Of oneDNN: the channels in a block of its layouts, and the widest kernels that it has code for.
_BLOCK, _WIDEST = (16, 14) if _HAS_AVX512 else (8, 13)
_BUFFER = 1 << 19  # bytes of each thread
_FEW_PLACES = 256  # of a result, for each thread: with fewer, each thread takes an image


def _padding(channels: int) -> float:
    """By which factor the number of channels grows where kernels pad it to whole blocks."""
    return -(-channels // _BLOCK) * _BLOCK / max(1, channels)
