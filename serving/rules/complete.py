"""C: is everything there, once, under the names that the config calls for, and does one config speak of it?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ...formats.checkpoint import STRAY_CONFIG
from ..deployment import Deployment
from ..survey import ABSENT, KV_SCALE, Entry, Survey
from .matching import no_lists, unreadable
from .rule import RUNTIME_NAMES, Fact, Rule, both, shape_severity
from .states import flaws, unjudged

# What pydantic accepts in compressed-tensors 0.17.0, 0.18.0 and 0.20.1; it forbids anything else.
_ARGS = frozenset(
    """num_bits type symmetric group_size strategy block_structure dynamic actorder scale_dtype zp_dtype observer
    observer_kwargs""".split()
)
_SCHEME = frozenset(["targets", "weights", "input_activations", "output_activations", "format"])

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")
_EXPERT = re.compile(r".*\.experts\.\d+\.")
_G_IDX = (".weight_g_idx", ".g_idx")
_DEEPSEEK = ("kimi_k2", "kimi_k25", "deepseek_v3", "glm_moe_dsa")  # served by SGLang's DeepSeek classes
_NOT_READ = "rotary_emb.inv_freq"  # an old buffer that both runtimes skip


def _files(survey: Survey, at: Deployment) -> Iterator[Fact]:
    for fault in survey.faults:
        yield Fact(fault.subject, fault.message, fault.severity, fault.kind)


def _named(entry: Entry) -> str:
    """What a fault of a tensor is told under: a matrix by its module, under which its parts may have any names."""
    return entry.module if len(entry.spec.shape) == 2 else entry.spec.name


def _parts(survey: Survey, at: Deployment) -> Iterator[Fact]:
    runtime = RUNTIME_NAMES[at.runtime]
    stops = "error" if at.runtime == "vllm" else None
    for entry, flaw in flaws(survey, "C2"):
        severity = stops if flaw.kind == "surplus" else None
        if flaw.kind.startswith("shape") and flaw.part:
            spec = entry.spec
            severity = shape_severity(spec.role, entry.module, flaw.part.shape, spec.shape, at.runtime)
        yield Fact(_named(entry), flaw.message, severity, flaw.kind)
    if unjudged(survey):
        return
    for entry in survey.entries:
        for part in entry.companions:
            if part.suffix not in (*_G_IDX, ".weight_zero_point", ".input_scale"):
                yield _unknown(entry.module + part.suffix, runtime)
    for name in survey.extra:
        if not (_layer_of(name, survey) or _EXPERT.match(name) or name.endswith(_G_IDX) or KV_SCALE.match(name)):
            if _NOT_READ not in name:
                yield _unknown(name, runtime)


def _unknown(name: str, runtime: str) -> Fact:
    """A tensor that nothing takes."""
    what = "stops at it" if runtime == "vLLM" else "skips it with a warning"
    message = f"the config calls for no such tensor, and {runtime} {what}; delete it or mend the config"
    return Fact(name, message, "error" if runtime == "vLLM" else "warning")


def _layer_of(name: str, survey: Survey) -> bool:
    """Whether a tensor lies in a layer behind all that the config has."""
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) >= _layers(survey) and not name.startswith("vision_tower")


def _layers(survey: Survey) -> int:
    """Decoder layers, MTP ones included."""
    return len(survey.model.cache())


def _absent(survey: Survey) -> tuple[list[Entry], list[int]]:
    """What is missing, and the layers of which all is; their tensors are not in the list."""
    missing = [entry for entry in survey.entries if entry.state == ABSENT]
    if not missing:
        return [], []
    here = {entry.spec.layer for entry in survey.entries if entry.state != ABSENT}
    gone = {entry.spec.layer for entry in missing} - here - {None}
    return [entry for entry in missing if entry.spec.layer not in gone], sorted(
        layer for layer in gone if layer is not None
    )


def _experts(survey: Survey, at: Deployment) -> Iterator[Fact]:
    runtime = RUNTIME_NAMES[at.runtime]
    for entry in _absent(survey)[0]:
        if entry.spec.role == "routed_expert":
            message = f"is missing: {runtime} takes a layer's experts for loaded as soon as one is, and serves whatever"
            yield Fact(_named(entry), f"{message} was in the memory of this one; convert it anew")
    for name in survey.extra:
        if _EXPERT.match(name) and not _layer_of(name, survey):
            what = "stops at it" if at.runtime == "vllm" else "drops it in silence"
            message = f"is an expert that the config has not: {runtime} {what}; mend n_routed_experts or the layer"
            yield Fact(name, message, "error" if at.runtime == "vllm" else "warning")


def _modules(survey: Survey, at: Deployment) -> Iterator[Fact]:
    runtime = RUNTIME_NAMES[at.runtime]
    checked = at.runtime == "vllm" and not survey.method  # vLLM looks for unset parameters of unquantized models only
    missing, layers = _absent(survey)
    level, what = ("error", "stops") if checked else (None, "does not notice")
    for layer in layers:
        yield Fact(f"layer {layer}", f"is missing as a whole, and {runtime} {what}; convert it anew", level, "layers")
    for entry in missing:
        if entry.spec.role != "routed_expert":
            yield Fact(_named(entry), f"is missing, and {runtime} {what}; convert it anew", level, "missing")
    for name in survey.extra:
        if _layer_of(name, survey):
            what = "stops at it" if at.runtime == "vllm" else "skips it"
            message = f"lies in a layer that the config has not: {runtime} {what}; mend num_hidden_layers or"
            yield Fact(
                name, f"{message} num_nextn_predict_layers", "error" if at.runtime == "vllm" else "warning", "beyond"
            )
    claimed = survey.model.text.get("num_nextn_predict_layers") or 0
    if claimed and not survey.has_mtp:
        message = f"is {claimed}, but there is no MTP layer: a draft model would run on unset weights; set it to 0"
        yield Fact("config.json: num_nextn_predict_layers", message, "warning")
    elif claimed > 1 and at.runtime == "sglang":
        message = f"is {claimed}, and SGLang serves one MTP layer only: speculative decoding does not start"
        yield Fact("config.json: num_nextn_predict_layers", message, "error" if at.mtp else "warning")


def _order(survey: Survey, at: Deployment) -> Iterator[Fact]:
    names = [entry.module + part.suffix for entry in survey.entries for part in entry.companions]
    for name in (*names, *survey.extra):
        if name.endswith(_G_IDX):
            message = "vLLM stops at it" if at.runtime == "vllm" else "SGLang drops it and reads the columns unsorted"
            yield Fact(name, f"orders columns by activation: {message}; quantize without activation ordering")
    for name, group in survey.groups:
        weights = group.get("weights")
        order = weights.get("actorder") if isinstance(weights, Mapping) else None
        if order in (None, False):
            continue
        sorts = order not in ("static", "weight")
        if at.runtime == "vllm" and sorts:
            yield Fact(_group(name, "actorder"), f"is {order!r}, which vLLM refuses; set it to null")
        elif at.runtime == "sglang" and order != "static":
            cut = at.expert_tp > 1
            what = "does not cut the scales of down_proj over the ranks: wrong weights" if cut else "changes kernels"
            message = f"is {order!r}, with which SGLang {what}; set it to null"
            yield Fact(_group(name, "actorder"), message, None if cut or sorts else "warning")


def _one_config(survey: Survey, at: Deployment) -> Iterator[Fact]:
    for where, config in survey.declared[1:]:
        first, held = survey.declared[0]
        own = where == STRAY_CONFIG and survey.method.startswith("modelopt")  # its releases have both
        if config != held and not own:
            message = f"says something else than {first}; runtimes read one of them, not always the same; keep one"
            yield Fact(where, message)


def _keys(survey: Survey, at: Deployment) -> Iterator[Fact]:
    where, config = survey.declared[0] if survey.declared else ("", None)
    for what in unjudged(survey):
        if where != STRAY_CONFIG or len(survey.declared) == 1:
            yield Fact(where, f"{what} is not judged: no rule reads it, only names and files were checked", "warning")
    if no_lists(survey):
        return
    if survey.method == "?" or (not unjudged(survey) and unreadable(survey, at.runtime)):
        why = unreadable(survey, at.runtime) or "is no object with a quant_method"
        yield Fact(where, f"{why}; write it anew")
        return
    for name, group in survey.groups:
        for key in sorted(group.keys() - _SCHEME):
            yield _forbidden(name, key)
        for part in ("weights", "input_activations", "output_activations"):
            if isinstance(args := group.get(part), Mapping):
                for key in sorted(args.keys() - _ARGS):
                    yield _forbidden(name, f"{part}.{key}")
    sparse = config.get("sparsity_config") if isinstance(config, Mapping) else None
    if at.runtime == "vllm" and isinstance(sparse, Mapping) and sparse.get("targets"):
        yield Fact(f"{where}.sparsity_config", "has targets, and vLLM reads sparse weights no longer; delete it")


def _read_without_default(survey: Survey, at: Deployment) -> Iterator[Fact]:
    """SGLang: deepseek_v2.py, _is_layer_sparse; its kimi_k2 and kimi_k25 read the file into transformers' own class."""
    model, name = survey.model, survey.model.architecture.name
    own_code = name == "deepseek_v3" and model.config.get("auto_map")  # whose class may have a default
    if name in _DEEPSEEK and not own_code and model.text.get("moe_layer_freq") is None:
        where = "" if model.text is model.config else "text_config."
        message = "is missing, and SGLang's class reads it without a default: it stops with an AttributeError; write 1"
        yield Fact(f"config.json: {where}moe_layer_freq", message)


def _forbidden(name: str, key: str) -> Fact:
    return Fact(_group(name, key), "is a key that compressed-tensors forbids: the runtime stops; delete it")


def _group(name: str, key: str) -> str:
    return f"quantization_config.config_groups.{name}.{key}"


RULES = (
    Rule("C1", "index, shards and headers agree; every shard can be read", both("silent"), _files),
    Rule(
        "C2",
        "every matrix has all parts of one format, of the config's shape, and nothing else",
        both("silent"),
        _parts,
    ),
    Rule("C3", "every routed expert that the config calls for is there, and no other", both("silent"), _experts),
    Rule(
        "C4", "every layer and module that the config calls for is there, and no other layer", both("silent"), _modules
    ),
    Rule("C5", "no activation ordering", {"vllm": "error", "sglang": "silent"}, _order),
    Rule("C6", "one quantization config, or equal ones", both("silent"), _one_config),
    Rule("C7", "the quantization config is of a kind and has only keys that are read", both("error"), _keys),
    Rule("C8", "moe_layer_freq is there for SGLang's DeepSeek classes", {"sglang": "error"}, _read_without_default),
)
