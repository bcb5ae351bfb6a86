"""Where a conversion's arithmetic is done: on the CPU, or on which NVIDIA cards.

Nothing of NVIDIA's Python is imported where there is no driver: such a machine has its answer at once.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any, NamedTuple

from ..errors import LoadError, UsageError
from .kernels.build import INSTALL_12, architecture, nvrtc_version

_FORMS = "auto, cpu, cuda, or cards by number: cuda:0,cuda:1"


class Devices(NamedTuple):
    """cards: by the driver's numbers; none: the CPU. name: "cuda:0 (NVIDIA H200)", or "cpu (no NVIDIA driver)"."""

    cards: tuple[int, ...]
    name: str


class _Found(NamedTuple):
    name: str
    capability: tuple[int, int]


def choose(text: str) -> Devices:
    """What `auto`, `cpu`, `cuda` or `cuda:0,cuda:1` stands for here.

    auto: the first card that can be used, or the CPU; cuda: the first card that can be used. Raises UsageError for
    another text, LoadError with the reason where a card that was asked for cannot be used.
    """
    if text == "cpu":
        return Devices((), "cpu")
    if text in ("auto", "cuda"):
        try:
            ordinal, name = _first(_cards())
        except LoadError as error:
            if text == "auto":
                return Devices((), f"cpu ({error})")
            raise LoadError(f"device {text}: {error}; --device cpu always works") from None
        return Devices((ordinal,), f"cuda:{ordinal} ({name})")
    ordinals = [int(part[1]) if part else -1 for part in (re.fullmatch(r"cuda:(\d{1,4})", t) for t in text.split(","))]
    if -1 in ordinals:
        raise UsageError(f"device {text!r}: no such device; give {_FORMS}")
    if len(set(ordinals)) < len(ordinals):
        raise UsageError(f"device {text}: names a card twice; give each once")
    try:
        found = _cards()
        for ordinal in ordinals:
            if ordinal >= len(found):
                have = f"{len(found)}, from cuda:0 on" if found else "none"
                raise LoadError(f"there is no card {ordinal}, the driver has {have}")
            architecture(found[ordinal].name, *found[ordinal].capability)
    except LoadError as error:
        raise LoadError(f"device {text}: {error}; --device cpu always works") from None
    return Devices(tuple(ordinals), ", ".join(f"cuda:{i} ({found[i].name})" for i in ordinals))


def _first(found: list[_Found]) -> tuple[int, str]:
    """Number and name of the first card that can be used. LoadError with the last one's reason where none can."""
    for ordinal, (name, capability) in enumerate(found):
        try:
            architecture(name, *capability)
        except LoadError:
            if ordinal == len(found) - 1:
                raise
        else:
            return ordinal, name
    raise LoadError("the NVIDIA driver has no card")


def _cards() -> list[_Found]:
    """All cards of this machine. LoadError where its driver and what is installed cannot be used."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise LoadError("no NVIDIA driver") from None
    major, minor = nvrtc_version()
    from cuda.bindings import driver

    try:
        _ask(driver.cuInit(0))
        version = _ask(driver.cuDriverGetVersion())
        if version // 1000 < major:  # within a major version, and on a newer driver, what NVRTC makes can be loaded
            raise LoadError(
                f"the NVIDIA driver knows CUDA {version // 1000}.{version % 1000 // 10}, NVRTC {major}.{minor} needs "
                f"one that knows {major}.0 or newer: {INSTALL_12}"
            )
        return [_card(ordinal) for ordinal in range(_ask(driver.cuDeviceGetCount()))]
    except RuntimeError:  # it lacks a function that the bindings call, as drivers before CUDA 12 do
        raise LoadError("the NVIDIA driver is too old, or not whole") from None


def _ask(answer: tuple[Any, ...]) -> Any:
    """What the driver has answered. LoadError with its error."""
    error, *value = answer
    if error.name in ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY"):  # or CUDA_VISIBLE_DEVICES hides all
        raise LoadError("the NVIDIA driver has no card")
    if error.name != "CUDA_SUCCESS":
        raise LoadError(f"the NVIDIA driver does not work ({error.name})")
    return value[0] if value else None


def _card(ordinal: int) -> _Found:
    from cuda.bindings import driver

    device, asked = _ask(driver.cuDeviceGet(ordinal)), driver.CUdevice_attribute
    major = _ask(driver.cuDeviceGetAttribute(asked.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
    minor = _ask(driver.cuDeviceGetAttribute(asked.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
    name = _ask(driver.cuDeviceGetName(256, device))
    return _Found(name.partition(b"\0")[0].decode(errors="replace"), (major, minor))
