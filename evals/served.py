"""A pair of artifacts as it is served: prompts by the one, the KV cache handed over, every further token by the other.

A text is scored by making the decode engine take its tokens one at a time, in a batch that texts join and leave: so the
distributions are those that a client of the pair would see. The token behind the prompt is the prefill engine's, as it
is in vLLM and SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..calib.model import check_device, version
from ..errors import EvalError, LoadError, UsageError
from ..families import identify
from ..formats.checkpoint import MANIFEST, open_checkpoint
from ..formats.manifest import read_manifest
from ..serving.belong import belong
from ..serving.deployment import Deployment, Finding
from ..serving.judge import judge
from ..serving.kv_given import held_scales, judge_scales, scales_for
from ..serving.kv_layout import kv_layout
from ..serving.paged.engine import Request
from ..serving.paged.rows import LAYOUTS, Scales, make_layout
from ..serving.paged.weights import Loaded, load_model
from .continuing import bounds, check_tokens, continue_prompts, make_pair
from .runner import Advance, Finished, Sampling

Folders = tuple[Path, Path]


class Suitable(NamedTuple):
    """A deployment that serves the pair with the rows that are asked for, and what is to be said of it (warnings)."""

    at: Deployment
    warnings: list[Finding]

    def __str__(self) -> str:
        return f"{self.at.runtime}, sm {self.at.sm}, KV dtype {self.at.kv_dtype}"


class Served:
    """The runner of a pair; both models in memory, decoded. Both pools keep the same rows.

    kv: their layout. scales: a KV-scale manifest for fp8_e4m3 rows; without one, those that the artifacts hold, else
    1.0. batch: how many texts or prompts decode at once; more than 16 gained nothing on the examples.

    Raises LoadError where the two do not belong together or nothing serves them so, before weights are read; and
    whatever `load_model` raises.
    """

    def __init__(
        self,
        prefill: Path,
        decode: Path,
        *,
        kv: str = "bf16",
        scales: Path | None = None,
        batch: int = 16,
        device: str = "cpu",
        page_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if batch < 1 or page_size < 1:
            raise UsageError(f"a batch of {batch}, pages of {page_size} tokens: give at least 1 of both")
        check_device(device)
        found, warnings, self._scales, taken_from = check_pair((prefill, decode), kv, scales)
        cache = [layer for layer in identify(open_checkpoint(decode).config).cache() if not layer.mtp]
        layout = make_layout(kv, cache, self._scales)
        first = load_model(prefill, dtype=dtype, device=device)
        second = first if prefill.resolve() == decode.resolve() else load_model(decode, dtype=dtype, device=device)
        self._models: tuple[Loaded, ...] = (first, second)
        self._kv, self._batch, self._page_size = kv, batch, page_size
        self.vocabulary, self.max_length = bounds(self._models)
        self.about: dict[str, Any] = {
            "runtime": version(),
            "way": "pair",
            "dtype": str(dtype).removeprefix("torch."),
            "batch": batch,
            "device": device,
            "page_size": page_size,
            "kv": {"prefill": kv, "decode": kv},
            "kv_scales": taken_from,
            "kv_bytes_per_token": {"prefill": layout.bytes_per_token, "decode": layout.bytes_per_token},
            "served_by": str(found),
            "warnings": [f"{each.rule} {each.subject}: {each.message}" for each in warnings],
        }

    def logits(
        self, texts: Sequence[Sequence[int]], firsts: Sequence[int], advance: Advance
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """As `Runner.logits`. The tokens before `first` are the prompt; equal prompts are computed once.

        EvalError where a text is none for the model, where its pages were found wrong, or logits are not finite.
        """
        requests = {}
        for number, (text, first) in enumerate(zip(texts, firsts, strict=True)):
            check_tokens(self._models, f"text {number + 1} of {len(texts)}", text)
            if not 1 <= first < len(text):
                raise EvalError(
                    f"text {number + 1} of {len(texts)}: token {first} of {len(text)} is to be scored first; at least "
                    "one token must stand before it, and it must be there"
                )
            requests[number] = Request(list(text[:first]), len(text) - first, list(text[first:]))
        if not requests:
            return
        numbers = {id(request): number for number, request in requests.items()}
        # neighbours have long beginnings in common, which are then computed once, and those of one prompt end together
        order = sorted(requests.values(), key=lambda request: (request.prompt, request.budget))
        prefill, decode = self._models
        pair = make_pair(
            prefill, decode, order, kv=self._kv, scales=self._scales, batch=self._batch, page_size=self._page_size
        )
        for request in pair.stream(order):
            number = numbers[id(request)]
            if request.error is not None:
                raise EvalError(f"text {number + 1} of {len(texts)}: {request.error}")
            found = torch.stack(request.logits).cpu()
            request.logits = []
            if not bool(torch.isfinite(found).all()):
                raise EvalError(
                    f"text {number + 1} of {len(texts)}: its logits are not all finite: `phasefold verify` both "
                    "artifacts, or calibrate their KV scales anew"
                )
            advance(1)
            yield number, found

    def generate(
        self, prompts: Sequence[Sequence[int]], limit: int, sampling: Sampling, finished: Finished, advance: Advance
    ) -> list[list[int]]:
        """As `Runner.generate`."""
        prefill, decode = self._models
        return continue_prompts(
            prefill,
            decode,
            prompts,
            limit,
            sampling,
            finished,
            kv=self._kv,
            scales=self._scales,
            batch=self._batch,
            advance=advance,
            page_size=self._page_size,
        )

    def close(self) -> None:
        """Let go of both models."""
        self._models = ()


class Checked(NamedTuple):
    """How a pair is served. scales: of its rows; taken_from: "file", "artifact" or None."""

    found: Suitable
    warnings: list[Finding]
    scales: Scales | None
    taken_from: str | None


def check_pair(folders: tuple[Path, ...], kv: str, scales: Path | None) -> Checked:
    """What `Served` refuses before it reads weights."""
    prefill, decode = folders
    for folder, other in ((prefill, "decode"), (decode, "prefill")):
        if (folder / MANIFEST).exists() and read_manifest(folder).phase == other:
            raise LoadError(f"{folder}: was made for {other}, by its manifest; a pair is PREFILL+DECODE, in this order")
    found = suitable((prefill, decode), kv)
    warnings = list(found.warnings)
    return Checked(found, warnings, *_scales((prefill, decode), kv, scales, found.at, warnings))


def suitable(folders: Folders, kv: str) -> Suitable:
    """The first deployment that `phasefold pair` would serve these folders in, with rows of this layout.

    Raises LoadError with what stands against the pair, if it is that, or where no runtime keeps such rows of it.
    """
    if kv not in LAYOUTS:
        raise LoadError(f"KV layout {kv!r} is unknown; known are {', '.join(LAYOUTS)}")
    name = f"{folders[0]} + {folders[1]}"
    model = identify(open_checkpoint(folders[1]).config)
    dtypes = ("bfloat16",) if kv == "bf16" else ("fp8_e4m3", "fp8_ds_mla")
    against: Finding | None = None
    for sm in (90, 100):
        for runtime in ("vllm", "sglang"):
            for dtype in dtypes:
                at = Deployment(runtime, sm=sm, kv_dtype=dtype)
                layout = kv_layout(model, at, "decode")
                if layout.refusal or layout.form != kv:
                    continue
                # K5 says of each pool what D2 says of both
                findings = [finding for finding in judge(folders, (at, at))[0] if finding.rule != "K5"]
                findings += belong(*folders, at, at)
                stops = [finding for finding in findings if finding.severity != "warning"]
                if not stops:
                    return Suitable(at, findings)
                against = against or stops[0]
    if against is not None:
        raise LoadError(f"{name}: not evaluated: {against.rule} {against.subject}: {against.message}")
    raise LoadError(
        f"{name}: neither vLLM nor SGLang keeps {kv} rows of this model; `phasefold pair` tells which it keeps"
    )


def _scales(
    folders: Folders, kv: str, path: Path | None, at: Deployment, warnings: list[Finding]
) -> tuple[Scales | None, str | None]:
    """The scales of the rows, and where they are from; adds what the runtime makes of a manifest to the warnings."""
    if kv != "fp8_e4m3":
        if path is not None:
            raise UsageError(f"{path}: {kv} rows are stored at no such scale; leave it out, or take fp8_e4m3 rows")
        return None, None
    if path is not None:
        manifest, scales = scales_for(folders, path)
        warnings += judge_scales(folders, (at, at), path, manifest)
        return scales, "file"
    held = held_scales(folders[0])  # that both hold the same, rule D4 has seen to
    return held, None if held is None else "artifact"
