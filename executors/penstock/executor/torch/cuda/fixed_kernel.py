"""Launches a Triton kernel with fixed constants, bypassing Triton's launcher.

Triton's launcher inspects every argument and option at each launch. This takes several times the
host time of a direct launch of the compiled kernel. A step that is not captured in a CUDA graph has
hundreds of launches.
"""

import logging
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any

from torch import Tensor
from triton.runtime import driver

logger = logging.getLogger(__name__)

_ALIGNMENT = 16
"""Pointer alignment, in bytes, that the compiled kernel requires."""
_POINTER = Tensor.data_ptr
_NO_HOOKS = (None, None, None)


class FixedKernel:
    """One kernel with fixed constants and options, always called with tensors of the same dtypes.

    Its parameters are tensors, then numbers, then the constants. Integer parameters must be marked
    `do_not_specialize`, because one compiled kernel is used for all their values; otherwise the
    first `launch` raises TypeError.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self._kernel = kernel
        self._constants = constants
        self._is_tried = False
        self._run: Callable[..., None] | None = None
        self._fixed: tuple[Any, ...] = ()
        self._values: tuple[Any, ...] = ()
        self._stream: Callable[[int], int] = int
        self._device = 0

    def launch(
        self, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], *numbers: float
    ) -> None:
        """Queue the kernel on the current CUDA stream. `tensors` and `numbers`: the arguments, in
        the order of the kernel's parameters.
        """
        run = self._run
        if run is not None:
            pointers = list(map(_POINTER, tensors))
            if not reduce(or_, pointers) % _ALIGNMENT:
                stream = self._stream(self._device)
                run(*grid, stream, *self._fixed, *pointers, *numbers, *self._values)
                return
        compiled = self._kernel[grid](*tensors, *numbers, **self._constants)
        if not self._is_tried:
            self._is_tried = True
            self._use_directly(compiled, tensors, numbers)

    def _use_directly(
        self, compiled: Any, tensors: tuple[Tensor, ...], numbers: tuple[float, ...]
    ) -> None:
        """Use `compiled` directly for later launches, if the tensors of this launch are aligned."""
        if compiled is None or any(tensor.data_ptr() % _ALIGNMENT for tensor in tensors):
            return  # interpreted, or compiled for unaligned pointers
        parameters = self._kernel.params
        of_numbers = parameters[len(tensors) : len(tensors) + len(numbers)]
        for parameter, number in zip(of_numbers, numbers, strict=True):
            if isinstance(number, int) and not parameter.do_not_specialize:
                raise TypeError(f"{parameter.name} must be do_not_specialize")
        self._device = driver.active.get_current_device()
        self._stream = driver.active.get_current_stream
        self._values = tuple(
            self._constants[parameter.name]
            for parameter in parameters[len(tensors) + len(numbers) :]
        )
        self._fixed = (compiled.function, compiled.packed_metadata, *_NO_HOOKS)
        pointers = map(_POINTER, tensors)
        try:
            # An empty grid launches nothing; the arguments are only inspected.
            stream = self._stream(self._device)
            compiled.run(0, 0, 0, stream, *self._fixed, *pointers, *numbers, *self._values)
        except TypeError as error:
            logger.warning("this version of Triton launches each kernel slowly: %s", error)
        else:
            self._run = compiled.run
