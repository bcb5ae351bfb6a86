"""Numbers that remember the tensor they were read from: runtimes load scalars as `parameter.fill_(tensor.item())`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Number(float):
    """What `item` gave, and of which tensor."""

    tensor: torch.Tensor


class Numbers(TorchFunctionMode):
    """While active, `fill_` with a number that was read out of a tensor copies that tensor.

    So a tracker sees where the number came from, and a tensor without data ("meta") can be read: it gives NaN.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out `func`, unless it moves a number."""
        if func is torch.Tensor.item and args[0].is_floating_point():
            number = _Number(math.nan if args[0].is_meta else func(*args))
            number.tensor = args[0]
            return number
        if func is torch.Tensor.fill_ and isinstance(args[1], _Number):
            return args[0].copy_(args[1].tensor.reshape(()))
        return func(*args, **(kwargs or {}))
