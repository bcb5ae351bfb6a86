"""What a checkpoint is to be served by, and what was found wrong with that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..errors import UsageError
from ..quantize.naming import RUNTIMES

#: what `--kv-dtype` may be, as the runtimes spell it; "auto" leaves it to the runtime, "bf16" is taken for "bfloat16"
KV_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")
SEVERITIES = ("error", "silent", "warning")


@dataclass(frozen=True, slots=True)
class Deployment:
    """One pool of one runtime.

    runtime: "vllm" or "sglang". tp: tensor-parallel size. ep: expert-parallel size; experts are cut over tp / ep ranks,
    so with ep == tp each rank holds whole experts. sm: compute capability, 90 for Hopper, 100 for Blackwell.
    kv_dtype: the string given to the runtime. page_size, attention_backend: as given, None where the runtime chooses.
    shared_fusion: SGLang may serve the shared expert as one more routed one (no --disable-shared-experts-fusion).
    mtp: speculative decoding with the MTP layer. kv_scales: file given to SGLang as --quantization-param-path.
    """

    runtime: str
    tp: int = 1
    ep: int = 1
    sm: int = 90
    kv_dtype: str = "auto"
    page_size: int | None = None
    attention_backend: str | None = None
    shared_fusion: bool = True
    mtp: bool = False
    kv_scales: str | None = None

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise UsageError(f"runtime {self.runtime!r} is unknown; {' and '.join(RUNTIMES)} are known")
        if min(self.tp, self.ep) < 1 or self.tp % self.ep:
            raise UsageError(f"ep {self.ep} must divide tp {self.tp}, and both be at least 1")
        object.__setattr__(self, "kv_dtype", kv_dtype(self.kv_dtype))

    @property
    def expert_tp(self) -> int:
        """Over how many ranks one expert's matrices are cut."""
        return self.tp // self.ep


def kv_dtype(text: str) -> str:
    """One of KV_DTYPES, however 16 bits are spelled. Raises UsageError."""
    found = {"bf16": "bfloat16"}.get(text, text)
    if found not in KV_DTYPES:
        raise UsageError(f"kv dtype {text!r} is unknown; known are {', '.join(KV_DTYPES)}")
    return found


class Finding(NamedTuple):
    """One thing that is wrong.

    rule: its number, e.g. "T1". severity: "error" (the runtime refuses), "silent" (it serves garbage) or "warning" (it
    degrades). runtime: "vllm", "sglang" or "both". subject: tensor, module or config key. message: what will happen,
    and what to change.
    """

    rule: str
    severity: str
    runtime: str
    subject: str
    message: str
