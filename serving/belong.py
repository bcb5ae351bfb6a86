"""Do two checkpoints belong together as the pools of one service? The KV cache of the one is read by the other.

The runtimes compare a few strings when the pools first meet, and nothing of the weights: a cache of another model, of
another RoPE or in rows of another form is taken as it is. These rules, D1 to D6, find that before. Read from SGLang
0.5.23 (disaggregation/common/conn.py) and vLLM 0.32.0 (kv_connector/v1/nixl and mooncake).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import VerifyError
from ..families import Model, identify
from ..formats.checkpoint import MANIFEST, Checkpoint, Place, open_checkpoint
from ..formats.manifest import Manifest, read_manifest
from ..quantize.fold import Folding, folding_of, undoing
from .deployment import Deployment, Finding
from .identity import Norms, differing_folds, differing_norms, differing_side_files, kv_scales
from .kv_layout import KVLayout, is_mla, kv_layout, kv_scheme
from .samples import ONE_MORE, compare_weights, fitted

# What config.json says of where it comes from, how it was trained or how it is stored, and nothing of the model.
_IRRELEVANT = frozenset(
    """
    architectures auto_map _name_or_path transformers_version quantization_config compression_config dtype torch_dtype
    use_cache initializer_range attention_dropout pretraining_tp ep_size output_router_logits aux_loss_alpha seq_aux
    router_aux_loss_coef text_config model_type num_nextn_predict_layers rope_theta rope_scaling rope_parameters
    """.split()
)
# Where a config lacks a key that the other has, these may not be taken for a default: they place or choose tokens.
_STRICT = ("index", "partial_rotary", "mlp_layer_types", "layer_types", "linear_attn", "scoring", "topk", "n_group")

# Relative distance of weights that no quantizer to four bits explains.
_UNLIKE = 0.35


class _Pool(NamedTuple):
    """One checkpoint and where it is to be served. trouble: why its manifest cannot be read, or ""."""

    phase: str
    checkpoint: Checkpoint
    model: Model
    manifest: Manifest | None
    trouble: str
    at: Deployment
    layout: KVLayout

    @property
    def folding(self) -> Folding:
        """What its manifest tells of; a checkpoint without one is taken for unfolded."""
        return folding_of(self.manifest) if self.manifest else {}


def belong(prefill: Path | Place, decode: Path | Place, prefill_at: Deployment, decode_at: Deployment) -> list[Finding]:
    """What stands against serving the two as a pair, by rule; [] where nothing does.

    Either may be an artifact or any other checkpoint of a known family, e.g. the FP8 release that an INT4 artifact was
    made from. Raises CheckpointError where one cannot be read at all.
    """
    first, second = _pool("prefill", prefill, prefill_at), _pool("decode", decode, decode_at)
    norms = differing_norms(first.checkpoint, second.checkpoint)
    return [
        *_d1_model(first, second),
        *_d2_layout(first, second),
        *_d3_handshake(first, second),
        *_d4_scales(first, second, norms),
        *_d5_identity(first, second, norms),
        *_d6_mtp(first, second),
    ]


def _pool(phase: str, where: Path | Place, at: Deployment) -> _Pool:
    checkpoint = open_checkpoint(where)
    folder, model = checkpoint.folder, identify(checkpoint.config)
    manifest, trouble = None, ""
    if (folder / MANIFEST).exists():
        try:
            manifest = read_manifest(folder)
        except VerifyError as error:
            trouble = str(error)
    return _Pool(phase, checkpoint, model, manifest, trouble, at, kv_layout(model, at, phase))


def _finding(rule: str, severity: str, pools: tuple[_Pool, _Pool], subject: str, message: str) -> Finding:
    runtimes = {pool.at.runtime for pool in pools}
    return Finding(rule, severity, runtimes.pop() if len(runtimes) == 1 else "both", subject, message)


def _d1_model(first: _Pool, second: _Pool) -> Iterator[Finding]:
    """One model, one tokenizer: nothing of that is compared when the pools meet."""
    pools = (first, second)
    ours, theirs = (_described(pool.model) for pool in pools)
    changed: list[str] = []
    doubtful: list[str] = []
    for key in sorted(ours.keys() | theirs.keys()):
        values = ours.get(key), theirs.get(key)
        if values[0] == values[1]:
            continue
        one_sided = None in values and not key.rpartition(".")[2].startswith(_STRICT) and not key.startswith("rope.")
        text = " / ".join("missing" if value is None else str(value)[:60] for value in values)
        (doubtful if one_sided or key.endswith("_token_id") else changed).append(f"{key} ({text})")
    if changed:
        message = "the pools run different models: the decode pool reads a cache that means something else to it"
        yield _finding(
            "D1", "silent", pools, "config.json", f"{', '.join(changed)}: {message}; convert both from one source"
        )
    if doubtful:
        message = "only one config has it, or they end texts differently; see which is right and write it into both"
        yield _finding("D1", "warning", pools, "config.json", f"{', '.join(doubtful)}: {message}")
    if not _same_cache(first, second) and not changed:
        message = "the layers do not keep the same of each token; convert both artifacts from one source"
        yield _finding("D1", "silent", pools, "config.json", message)
    for severity, name, message in differing_side_files(first.checkpoint, second.checkpoint):
        yield _finding("D1", severity, pools, name, message)


def _described(model: Model) -> dict[str, Any]:
    """What config.json says of the model itself, flat; RoPE in one form, however it is spelled."""
    found: dict[str, Any] = {"architectures": model.config.get("architectures") or model.architecture.name}
    parts: list[Mapping[str, Any]] = [model.text] if model.text is model.config else [model.config, model.text]
    for part in parts:
        prefix = "" if part is model.config else "text_config."
        found |= {f"{prefix}{key}": value for key, value in part.items() if key not in _IRRELEVANT}
    rope = {"rope_theta": model.text.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(section := model.text.get(key), Mapping):
            rope |= section
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    return found | {f"rope.{key.removeprefix('rope_')}": value for key, value in rope.items()}


def _same_cache(first: _Pool, second: _Pool) -> bool:
    kept = [[layer for layer in pool.model.cache() if not layer.mtp] for pool in (first, second)]
    return kept[0] == kept[1]


def _d2_layout(first: _Pool, second: _Pool) -> Iterator[Finding]:
    """KV dtype, page and row as each runtime will choose them."""
    pools = (first, second)
    for pool in pools:
        if pool.layout.refusal:
            message = f"the {pool.phase} pool does not start: {pool.layout.refusal}"
            yield _finding("D2", "error", (pool, pool), "kv cache", message)
    if first.layout.refusal or second.layout.refusal or first.at.runtime != second.at.runtime:
        return
    sglang, one, two = first.at.runtime == "sglang", first.layout, second.layout
    if one.dtype != two.dtype:
        message = (
            f"KV dtype is {one.dtype} for prefill and {two.dtype} for decode, which are compared as text: refused at "
            "the first request (not by vLLM's Mooncake with MLA: garbage); give both pools the same --kv-cache-dtype"
        )
        yield _finding("D2", "error", pools, "--kv-cache-dtype", message)
    elif one.row != two.row and _same_cache(first, second):
        message = (
            f"both pools say {one.dtype}, but prefill's {one.backend} writes rows of {one.row_bytes} bytes ({one.row}) "
            f"and decode's {two.backend} reads rows of {two.row_bytes} ({two.row})"
        )
        flag = "--dsa-prefill-backend and --dsa-decode-backend" if sglang else "--attention-backend"
        yield _finding("D2", "silent", pools, flag, f"{message}: the cache arrives garbled; give {flag} in both")
    if one.page != two.page:
        message = f"pages of {one.page} tokens for prefill and {two.page} for decode"
        flag = "--page-size" if sglang else "--block-size"
        effect = "refused at the first request" if sglang else "NIXL re-cuts them, other connectors do not"
        severity = "error" if sglang else "warning"
        yield _finding("D2", severity, pools, flag, f"{message}: {effect}; give both pools the same {flag}")
    schemes = [kv_scheme(pool.model) for pool in pools]
    if schemes[0] != schemes[1] and one.dtype == two.dtype:
        message = (
            "only one config declares a KV cache dtype, or they differ; it counts wherever --kv-cache-dtype is auto"
        )
        yield _finding("D2", "warning", pools, "kv_cache_scheme", f"{message}: keep --kv-cache-dtype explicit in both")


def _d3_handshake(first: _Pool, second: _Pool) -> Iterator[Finding]:
    """What vLLM's NIXL hashes (metadata.py, compute_nixl_compatibility_hash), and that the pools speak one protocol."""
    pools = (first, second)
    if first.at.runtime != second.at.runtime:
        message = "a cache goes from one pool to another of the same runtime and version only; choose one runtime"
        yield _finding("D3", "error", pools, "runtime", message)
        return
    if first.at.runtime != "vllm":
        return
    if first.layout.backend != second.layout.backend and not (first.layout.refusal or second.layout.refusal):
        message = (
            f"prefill chooses {first.layout.backend} and decode {second.layout.backend}: NIXL refuses the handshake; "
            "give both pools one --attention-backend"
        )
        yield _finding("D3", "error", pools, "--attention-backend", message)
    dtypes = [pool.model.text.get("dtype") or pool.model.text.get("torch_dtype") or "" for pool in pools]
    dtypes = [str(dtype or pool.model.config.get("dtype") or "") for dtype, pool in zip(dtypes, pools, strict=True)]
    if all(dtypes) and dtypes[0] != dtypes[1]:
        message = f"{dtypes[0]} for prefill and {dtypes[1]} for decode: NIXL refuses the handshake; give both --dtype"
        yield _finding("D3", "error", pools, "dtype", message)


def _d4_scales(first: _Pool, second: _Pool, norms: Norms) -> Iterator[Finding]:
    """KV scales and foldings: what prefill stores divided, decode must multiply again."""
    pools = (first, second)
    scales = [kv_scales(pool.checkpoint) for pool in pools]
    runtime, mla = first.at.runtime, is_mla(first.model)
    fp8 = any(pool.layout.dtype.startswith("fp8") for pool in pools)
    if scales[0] != scales[1]:
        names = sorted(
            name for name in scales[0].keys() | scales[1].keys() if scales[0].get(name) != scales[1].get(name)
        )
        where = " and ".join(pool.phase for pool, held in zip(pools, scales, strict=True) if held)
        message = f"{len(names)} KV scales differ or stand in one artifact only ({where})"
        effect, severity = "what one pool stores the other one reads at another scale", "silent"
        if not fp8:
            effect, severity = "harmless while the KV cache is bfloat16, garbage once it is FP8", "warning"
        elif mla == (runtime == "vllm"):  # vLLM reads those of grouped-query attention, SGLang those of MLA
            effect, severity = f"{runtime} does not read them for this attention, other runtimes do", "warning"
        yield _finding("D4", severity, pools, names[0], f"{message}: {effect}; put the same scales into both, or none")
    elif scales[0] and runtime == "sglang" and not mla:
        message = (
            "SGLang does not read the KV scales of grouped-query attention and stores at scale 1.0; vLLM reads them"
        )
        yield _finding("D4", "warning", pools, min(scales[0]), message)
    if folds := differing_folds(first.folding, second.folding):
        layer, part, *powers = folds[0]
        told = " and ".join(
            f"{f'2^{power}' if power else 'not at all'} for {pool.phase}"
            + ("" if pool.manifest else f" (no {MANIFEST} there)")
            for power, pool in zip(powers, pools, strict=True)
        )
        message = f"the artifacts are folded differently in {len(folds)} places, here by {told}: their KV caches differ"
        cure = "by powers of two; fold both from one source with one kv_scales.json"
        yield _finding("D4", "silent", pools, f"layers.{layer}.{part}", f"{message} {cure}")
    elif norms.of_cache and not norms.others:
        message = (
            f"{len(norms.of_cache)} norms before the KV cache differ and no others do: one artifact is folded, its KV "
            "cache is by powers of two off for the other; fold both alike"
        )
        yield _finding("D4", "silent", pools, norms.of_cache[0], message)


def _d5_identity(first: _Pool, second: _Pool, norms: Norms) -> Iterator[Finding]:
    """Made from the same weights? Manifests name their source, norms must be equal, and weights but for rounding."""
    pools = (first, second)
    for pool in pools:
        if pool.trouble:
            yield _finding("D5", "error", (pool, pool), MANIFEST, f"{pool.trouble}; convert again or get a good copy")
        elif pool.manifest and pool.manifest.phase not in ("any", pool.phase):
            recipe = f" (recipe {name})" if (name := pool.manifest.recipe.get("name")) else ""
            message = (
                f"made for {pool.manifest.phase}{recipe}, but given to the {pool.phase} pool; swap the two folders"
            )
            yield _finding("D5", "warning", (pool, pool), MANIFEST, f"{message} if that was not meant")
    if norms.others:
        message = f"{len(norms.others)} tensors that both hold unquantized differ: the two come from different weights"
        yield _finding("D5", "silent", pools, norms.others[0], f"{message}; convert both artifacts from one source")
        return
    sources = [str(pool.manifest.source.get("digest")) if pool.manifest else "" for pool in pools]
    identities = [{pool.checkpoint.digest, source} - {""} for pool, source in zip(pools, sources, strict=True)]
    one_source = bool(identities[0] & identities[1])
    before = [set(pool.manifest.source.get("origins", ()) if pool.manifest else ()) for pool in pools]
    related = bool((identities[0] | before[0]) & (identities[1] | before[1]))
    if found := _other_weights(first, second, one_source, related):
        yield found
        return
    if related or first.trouble or second.trouble:
        return
    if all(sources):
        names = " and ".join(str(pool.manifest.source.get("name")) for pool in pools if pool.manifest)
        message = f"made from two sources ({names}), whose {norms.compared} norms and router biases are equal"
        effect = "one release in two formats can be served so, a fine-tuned model beside its base is garbage"
        yield _finding("D5", "warning" if norms.compared else "silent", pools, MANIFEST, f"{message}: {effect}")
        return
    without = " and ".join(pool.phase for pool in pools if pool.manifest is None)
    message = (
        f"cannot be shown to come from one source: no {MANIFEST} with {without}, and neither was made from the other"
    )
    yield _finding("D5", "warning", pools, MANIFEST, f"{message}; make sure that they are of one release")


def _other_weights(first: _Pool, second: _Pool, one_source: bool, related: bool) -> Finding | None:
    """A source's digest knows headers and few weights, and of a stranger's checkpoint nothing is told: look at some.

    one_source: each was rounded once, from the same numbers. If not, one may be made of the other's FP8 release, or be
    related, by way of another artifact, and a stranger's INT4 may be rounded otherwise than to the nearest code (GPTQ,
    AWQ): then a warning, where it is near.
    """
    packed = [pool for pool in (first, second) if any(name.endswith("_packed") for name in pool.checkpoint.tensors)]
    folds = undoing(first.model, first.folding), undoing(second.model, second.folding)
    slack = 0.0 if one_source else ONE_MORE
    errors = fitted(first.manifest, second.manifest)
    sample = compare_weights(first.model, first.checkpoint, second.checkpoint, folds, slack, errors)
    if not sample.differing:
        return None
    near = not one_source and (related or any(pool.manifest is None for pool in packed)) and sample.distance < _UNLIKE
    message = (
        f"{len(sample.differing)} of {sample.compared} matrices that were sampled differ by more than rounding does "
        f"(up to {sample.distance:.0%}): the two come from different weights"
    )
    cure = "convert both artifacts from one source"
    if near:
        message, cure = (
            f"{message}, or one was rounded twice, or to fit calibration data",
            "make sure that they are of one release",
        )
    subject = f"{sample.differing[0]}.weight"
    return _finding("D5", "warning" if near else "silent", (first, second), subject, f"{message}; {cure}")


def _d6_mtp(first: _Pool, second: _Pool) -> Iterator[Finding]:
    """The draft layer has a KV cache too, and it is handed over as well."""
    pools = (first, second)
    if first.at.mtp != second.at.mtp:
        severity = "error" if first.at.runtime == "vllm" else "silent"
        message = "speculative decoding in one pool only: the draft layer's cache has no counterpart; use it in both"
        yield _finding("D6", severity, pools, "mtp", message)
    held = [_mtp_layers(pool) for pool in pools]
    asked = [int(pool.model.text.get("num_nextn_predict_layers") or 0) for pool in pools]
    used = first.at.mtp or second.at.mtp
    if held[0] != held[1] or asked[0] != asked[1]:
        message = f"MTP layers: prefill {asked[0]} ({held[0]} stored), decode {asked[1]} ({held[1]} stored)"
        effect = "the pools draft differently" if used else "speculative decoding can be turned on in one pool only"
        subject = "num_nextn_predict_layers"
        yield _finding("D6", "error" if used else "warning", pools, subject, f"{message}: {effect}; convert both alike")
    elif used and not held[0]:
        message = "speculative decoding is asked for, but neither checkpoint holds an MTP layer; serve without it"
        yield _finding("D6", "error", pools, "mtp", message)


def _mtp_layers(pool: _Pool) -> int:
    """How many MTP layers have tensors."""
    numbers = {f".layers.{layer.layer}." for layer in pool.model.cache() if layer.mtp}
    return sum(any(number in name for name in pool.checkpoint.tensors) for number in numbers)
