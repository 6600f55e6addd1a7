"""Whether a block of tensor data holds NaN or infinity, by its bits. Torch-free: the writer asks it about every block."""

from __future__ import annotations

import numpy as np

_MAGNITUDES: dict[str, tuple[type[np.unsignedinteger], int, int]] = {
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
    "float8_e5m2": (np.uint8, 0x7F, 0x7C),
    "float8_e4m3fn": (np.uint8, 0x7F, 0x7F),
}
"""Types that NumPy does not have: the bits without the sign, and the least of them that is not finite (e4m3fn has a NaN and no
infinity)."""

_NATIVE = {"float16": np.float16, "float32": np.float32, "float64": np.float64, "complex64": np.float32, "complex128": np.float64}


_REFUSED = " holds NaN or infinity: not published"


def is_finite(dtype: str, data: memoryview) -> bool:
    """False when any element is NaN or infinite. Types that cannot be are always finite.

    Args:
        dtype: torch's name of the type.
        data: Whole elements.
    """
    native = _NATIVE.get(dtype)
    if native is not None:
        return bool(np.isfinite(np.frombuffer(data, native)).all())
    if dtype not in _MAGNITUDES or not len(data):
        return True
    kind, mask, least = _MAGNITUDES[dtype]
    return bool((np.frombuffer(data, kind) & kind(mask)).max() < least)


def is_checked(name: str) -> bool:
    """Whether a tensor must be finite to be published: parameters and optimizer state; masks among buffers may be infinite."""
    return name.startswith(("model.", "optimizer."))


def refusal(name: str) -> str:
    """Why a snapshot with this tensor is not published."""
    return f"{name}{_REFUSED}"


def unpublished(reason: str) -> str:
    """The tensor that a `refusal` names, as a part of a longer reason too; empty: it is none."""
    before, found, _ = reason.partition(_REFUSED)
    return before.rpartition(" ")[2] if found else ""
