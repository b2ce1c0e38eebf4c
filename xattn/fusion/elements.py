"""What a user function may do with single elements while it is traced: index by them, and make tensors of them.

torch does both on the host, where no value is to be had: here they stay tensor operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..errors import UnsupportedError

_MAKERS: dict[Callable[..., Any], tuple[str, ...]] = {  # the names of their positional arguments
    torch.tensor: ("data",),
    torch.as_tensor: ("data", "dtype", "device"),
    torch.asarray: ("obj",),
    Tensor.new_tensor: ("self", "data"),
}
_READERS = (Tensor.__format__, Tensor.__dlpack__, Tensor.data_ptr)
_EXACT = ("add", "radd", "sub", "rsub", "mul", "rmul", "neg")  # of whole numbers: the same as Python's
_OF_NUMBERS = {bool: torch.bool, int: torch.int64}
_AS_PYTHON = (torch.bool, torch.int64, torch.float32, torch.float64)  # a whole number beside them acts as Python's


class Elements(TorchFunctionMode):
    """Within it user functions are traced. ``numbers``: whole numbers of theirs, as 0-d tensors.

    Raises UnsupportedError where a value would be read, and where a number as a tensor is not what Python's would be.
    """

    def __init__(self, numbers: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.numbers = list(numbers)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            return _item(*args)
        if func in _MAKERS:
            given = dict(zip(_MAKERS[func], args, strict=False)) | kwargs
            data = given.pop("obj" if func is torch.asarray else "data", None)
            if isinstance(data, (list, tuple)) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(data)):
                return _made(func, data, **given)
        if func in _READERS:
            raise UnsupportedError(f"{func.__name__} reads the value of a tensor")
        result = func(*args, **kwargs)
        if self.numbers:
            self._check(func, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)], result)
        return result

    def _check(self, func: Callable[..., Any], tensors: list[Tensor], result: Any) -> None:
        others = [t for t in tensors if not any(t is n for n in self.numbers)]
        if len(others) == len(tensors):
            return
        name = getattr(func, "__name__", "").strip("_")
        if others:
            same = "pow" not in name and all(t.dtype in _AS_PYTHON for t in others)
        else:
            same = name in _EXACT and isinstance(result, Tensor) and result.dtype == torch.int64
            self.numbers.append(result)
        if not same:
            raise UnsupportedError(f"{name} of a whole number is another as a tensor")


def _made(func: Callable[..., Any], data: Sequence[Any], **given: Any) -> Tensor:
    """torch.tensor and its kin, of lists that hold tensors."""
    like = given.pop("self", None)
    dtype, device = given.pop("dtype", None), given.pop("device", None)
    if any(given.values()):
        raise UnsupportedError(f"{func.__name__} of elements: got {', '.join(given)}; allowed: dtype, device")
    if like is not None:
        dtype, device = dtype or like.dtype, device or like.device
    own = next(t.device for t in tree_leaves(data) if isinstance(t, Tensor))
    return _stacked(data, dtype or _dtype(data), own).to(device=device or own)


def _dtype(data: Any) -> torch.dtype:
    """What torch.tensor makes of it."""
    if isinstance(data, Tensor):
        return data.dtype
    if isinstance(data, (list, tuple)):
        return reduce(torch.promote_types, map(_dtype, data)) if data else torch.get_default_dtype()
    if type(data) is float:
        return torch.get_default_dtype()
    return _OF_NUMBERS.get(type(data)) or torch.as_tensor(data).dtype


def _stacked(data: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(data, Tensor):
        return data.detach().to(dtype)
    if isinstance(data, (list, tuple)):
        parts = [_stacked(part, dtype, device) for part in data]
        return torch.stack(parts) if parts else torch.zeros(0, dtype=dtype, device=device)
    if type(data) in (bool, int, float):  # torch.tensor would hold a tensor of its own
        return torch.full((), data, dtype=dtype, device=device)
    return torch.as_tensor(data, dtype=dtype, device=device)


def _item(x: Tensor, index: Any) -> Tensor:
    """x[index]: numbers, slices and new axes give a view; elements are gathered from it, all at once; then what lists
    and tensors with dimensions pick."""
    if isinstance(index, list) and len(index) < 32 and any(map(_is_of_many, index)):  # torch takes it for a tuple
        index = tuple(index)
    items = [_index(n, x.device) for n in (index if isinstance(index, tuple) else (index,))]
    if not any(isinstance(n, Tensor) for n in items):
        return x[tuple(items)]
    at = next((k for k, n in enumerate(items) if n is Ellipsis), None)
    if at is not None:
        items[at : at + 1] = [slice(None)] * (x.dim() - sum(map(_width, items)))
    view: list[Any] = []
    left: list[Any] = []  # what is still to be done with the view
    for n in items:
        if isinstance(n, bool):
            view.append(None)
            left.append(torch.zeros(int(n), dtype=torch.int64, device=x.device))
        elif isinstance(n, Tensor):
            view += [slice(None)] * _width(n)
            left.append(n)
        else:
            view.append(n)
            if n is None or isinstance(n, slice):
                left.append(slice(None))
    x = x[tuple(view)]
    elements = [isinstance(n, Tensor) and n.dim() == 0 for n in left]
    if any(elements):
        picks = [pick for n, e in zip(left, elements, strict=True) for pick in ([n] if e else [None] * _width(n))]
        x = torch.ops.aten.index.Tensor(x, picks)
    left = [n for n, e in zip(left, elements, strict=True) if not e]
    return x[tuple(left)] if any(isinstance(n, Tensor) for n in left) else x


def _is_of_many(n: Any) -> bool:
    return n is None or n is Ellipsis or isinstance(n, (Tensor, list, tuple, slice))


def _index(n: Any, device: torch.device) -> Any:
    """One of the indices, lists and arrays as tensors."""
    given = isinstance(n, Tensor)
    if isinstance(n, (list, tuple, range)):
        data = list(n)
        n = _stacked(data, _dtype(data) if data else torch.int64, device)
    elif not given and hasattr(n, "__len__"):
        n = torch.as_tensor(n, device=device)
    if not isinstance(n, Tensor):
        return n
    if n.dtype == torch.uint8 and (n.dim() == 0 or not given):
        raise UnsupportedError("it indexes by uint8, which torch takes for a mask; allowed: other integers (.long())")
    if n.dtype == torch.bool and n.dim() == 0:
        raise UnsupportedError("it indexes by a condition, so that a shape depends on values; use torch.where")
    if n.dtype == torch.uint8:
        return n.bool()
    return n.long() if n.dtype in (torch.int8, torch.int16) else n


def _width(n: Any) -> int:
    """How many dimensions of the indexed tensor an index stands for."""
    if n is None or n is Ellipsis or isinstance(n, bool):
        return 0
    return n.dim() if isinstance(n, Tensor) and n.dtype == torch.bool else 1
