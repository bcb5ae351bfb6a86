"""Which versions of the runtimes were proven, for what; and what a runtime's refusal means where it is its own gap.

The pages that ask a runtime depend on its inner parts. Another version than these is tried all the same, and said to be
unproven: what it then answers may be our mistake as well as its own.
"""

from __future__ import annotations

import re

#: runtime -> version -> what was proven with it, by our tests
PROVEN: dict[str, dict[str, str]] = {
    "transformers": {
        "5.24.0": "load and generate: BF16, INT4, FP8 in blocks and in channels; gaps told",
        "5.19.0": "load and generate: INT4 (FP8 in channels runs with quantized activations)",
    },
    "vllm": {
        "0.32.0": "dry load of every recipe's output, MTP layer and tensor-parallel ranks included; generation with "
        "decoded weights on a CPU. Not run on a GPU",
    },
    "sglang": {
        "0.5.23": "dry load of every recipe's output. Not run on a GPU",
    },
}

#: (runtime, what its refusal says, what that means): limits of the runtime that no artifact can mend
_GAPS = (
    (
        "transformers",
        r"not divisible by scale grid",
        "cannot decode FP8 blocks of 128 where a matrix's rows are no multiple of them, as the 576 rows of MLA's kv_a",
    ),
    ("transformers", r"does not recognize this architecture|Unrecognized (model|configuration)", "has no such model"),
    (
        "transformers",
        r"requires? (the )?.{0,3}(accelerate|compressed.tensors)",
        "needs a package that is not installed",
    ),
    ("vllm", r"[Ss]parse.{0,40}not supported|topk_indices_buffer", "has no sparse attention (DSA) on a CPU"),
    ("vllm", r"No WNA16 MoE backend supports|AMX", "has no kernel for these weights on this machine"),
    ("vllm", r"No valid attention backend|Head (dimension|size) \d+ is not supported", "has no such attention here"),
)


def proven(runtime: str, version: str) -> bool:
    """Was this version of a runtime proven? Local labels of a build (+cpu) do not matter."""
    return version.partition("+")[0] in PROVEN.get(runtime, {})


def gap_of(runtime: str, version: str, refusal: str) -> str:
    """What limit of the runtime a refusal comes from, in a sentence; "" where it is none that we know."""
    for name, pattern, meaning in _GAPS:
        if name == runtime and re.search(pattern, refusal):
            return f"{runtime} {version} {meaning}"
    return ""
