"""Values that arrive in blocks and become one array: of the smallest whole numbers that hold them,
or of floating-point ones, without ever being there twice. It refuses nothing.
"""

from __future__ import annotations

import numpy as np


class Growing:
    """Holds what has arrived."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._dtype: np.dtype | None = None

    @property
    def value_bytes(self) -> int:
        return 1 if self._dtype is None else self._dtype.itemsize

    def add(self, values: np.ndarray) -> None:
        """The next values: numbers or booleans."""
        if not len(values):
            return
        kind = values.dtype
        if kind.kind in "iu":
            kind = np.result_type(
                *(np.min_scalar_type(int(v)) for v in (values.min(), values.max()))
            )
        wider = kind if self._dtype is None else np.promote_types(self._dtype, kind)
        if self._dtype is not None and wider != self._dtype:
            self._bytes = bytearray(np.frombuffer(self._bytes, self._dtype).astype(wider))
        self._dtype = wider
        self._bytes += np.ascontiguousarray(values, dtype=wider).data.cast("B")

    def array(self) -> np.ndarray:
        """All that has arrived; nothing may be added after."""
        return np.frombuffer(self._bytes, self._dtype or np.float64)
