"""T: does every matrix divide by the number of ranks, and each rank's part by groups, blocks and kernel tiles?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..deployment import Deployment
from ..survey import Kind, Survey
from .int4 import int4_groups
from .rule import RUNTIME_NAMES, Fact, Rule, both, is_down

_ROWS = ("o_proj", "down_proj")  # row-parallel: their columns (inputs) are cut
_COLUMNS = ("q_proj", "q_b_proj", "kv_b_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "g_proj")
_BLOCKS = ("fp8-block", "fp8-block-ct")
_LOWER = "lower TP, or serve with experts whole on each rank (EP = TP)"
_SMALLEST = 32  # columns of the smallest group that Marlin takes


def _of(survey: Survey, at: Deployment, states: tuple[str, ...], *, experts: bool) -> Iterator[tuple[Kind, str, int]]:
    """Kinds of quantized matrices, name of the first, how many. states: the beginnings of their formats' names.

    Without those of which ranks cannot have equal parts: T8 tells of them.
    """
    for kind, (name, count) in survey.kinds.items():
        if (kind.state or "").startswith(states) and (kind.role == "routed_expert") == experts:
            if not _uneven(kind, survey, at):
                yield kind, name, count


def _uneven(kind: Kind, survey: Survey, at: Deployment) -> bool:
    """Whether the heads, or the width of an MLP or an expert, do not divide by the ranks."""
    if kind.role == "routed_expert":
        return bool(_integer(survey, "moe_intermediate_size") % at.expert_tp)
    if kind.leaf not in (*_ROWS, *_COLUMNS):
        return False  # whole on each rank
    if kind.role.startswith("attention"):
        return bool(_integer(survey, "num_attention_heads") % at.tp)
    return kind.role == "dense_mlp" and bool(_integer(survey, "intermediate_size") % at.tp)


def _smaller(kind: Kind, advice: str) -> str:
    """What else would help where a group is too large: nothing, where there is no smaller one."""
    return f", or {advice}" if _group(kind) > _SMALLEST else ""


def _tiles_of_experts(kind: Kind, at: Deployment) -> bool:
    """Whether SGLang's kernel takes the part of an expert's down_proj, of this kind, on a rank."""
    if at.sm >= 100 and _group(kind) != 64:  # Blackwell takes Triton for the other groups
        return True
    return kind.shape[0] % 128 == 0 and kind.shape[1] // at.expert_tp % 64 == 0


def _group(kind: Kind) -> int:
    return int((kind.state or "").removeprefix("int4-g"))


def _grouped(survey: Survey) -> bool:
    """False where the scales are those of whole channels, which fit any cut."""
    return not all(weights.get("strategy") == "channel" for _, weights in int4_groups(survey))


def _expert_groups(survey: Survey, at: Deployment) -> Iterator[Fact]:
    if not _grouped(survey):
        return
    for kind, name, count in _of(survey, at, ("int4",), experts=True):
        inner = kind.shape[1] // at.expert_tp
        if is_down(name) and inner % _group(kind):
            what, level = "gives each rank the scales of other weights: garbage", None
            if at.runtime == "vllm":
                what = "stops"
            elif not _tiles_of_experts(kind, at):
                what, level = "loads scales of other weights and stops at the first token", "error"
            message = f"has {inner} columns on a rank, not divisible by groups of {_group(kind)}: "
            cure = f"{_LOWER}{_smaller(kind, 'quantize with smaller groups')}"
            yield Fact(name, f"{message}{RUNTIME_NAMES[at.runtime]} {what}; {cure}", level, many=count)


def _linear_groups(survey: Survey, at: Deployment) -> Iterator[Fact]:
    if not _grouped(survey):
        return
    for kind, name, count in _of(survey, at, ("int4",), experts=False):
        inner = kind.shape[1] // at.tp
        if kind.leaf in _ROWS and inner % _group(kind):
            message = f"has {inner} columns on a rank, not divisible by groups of {_group(kind)}: it stops; lower TP"
            yield Fact(name, f"{message}{_smaller(kind, 'quantize with smaller groups')}", many=count)


def _permutation(survey: Survey, at: Deployment) -> Iterator[Fact]:
    for kind, name, count in _of(survey, at, ("int4",), experts=True):
        hidden, inner = kind.shape[0], kind.shape[1] // at.expert_tp
        if is_down(name) and inner == _group(kind) < hidden and _grouped(survey):
            message = (
                f"is one group of {inner} wide on a rank: vLLM's Marlin then permutes the scales of gate and up as"
            )
            cure = f"{_LOWER if at.expert_tp > 1 else 'serve it with SGLang'}{_smaller(kind, 'take smaller groups')}"
            yield Fact(name, f"{message} if they had one group too (vllm#50196): garbage; {cure}", many=count)


def _tiles(survey: Survey, at: Deployment) -> Iterator[Fact]:
    for kind, name, count in _of(survey, at, ("int4",), experts=True):
        hidden, inner = kind.shape[0], kind.shape[1] // at.expert_tp
        if not is_down(name) or (_grouped(survey) and inner % _group(kind)):  # T1 tells of those
            continue
        if at.runtime == "vllm":
            if hidden % 128:
                message = f"has {hidden} rows, no multiple of 128: vLLM falls back from Marlin to a slower kernel"
                yield Fact(name, message, "warning", many=count)
        elif not _tiles_of_experts(kind, at):
            message = f"is {hidden} x {inner} on a rank, and SGLang's Marlin experts want multiples of 128 x 64"
            yield Fact(name, f"{message}: it stops at the first token; {_LOWER}", many=count)
    if at.runtime == "vllm":  # pads
        return
    for kind, name, count in _of(survey, at, ("int4",), experts=False):
        rows, columns = _on_a_rank(kind, at, survey)
        if kind.leaf in _ROWS and _grouped(survey) and columns % _group(kind):  # T2 tells of those
            continue
        if rows % 64 or columns % 64 or (rows % 128 and columns % 128):
            message = f"is {rows} x {columns} on a rank: SGLang's Marlin wants multiples of 64, one of them of 128"
            yield Fact(name, f"{message}; lower TP or store it in BF16", many=count)


def _on_a_rank(kind: Kind, at: Deployment, survey: Survey) -> tuple[int, int]:
    """[out, in] of a Linear's part on one rank; key and value heads are repeated where there are fewer than ranks."""
    rows, columns = kind.shape
    if kind.leaf in ("k_proj", "v_proj"):
        return rows // min(at.tp, _integer(survey, "num_key_value_heads") or at.tp), columns
    if kind.leaf in _COLUMNS:
        return rows // at.tp, columns
    return (rows, columns // at.tp) if kind.leaf in _ROWS else (rows, columns)


def _linear_blocks(survey: Survey, at: Deployment) -> Iterator[Fact]:
    for kind, name, count in _of(survey, at, _BLOCKS, experts=False):
        rows, columns = _on_a_rank(kind, at, survey)
        merged = kind.leaf in ("gate_proj", "up_proj", "k_proj") or (
            kind.leaf == "q_proj" and kind.role == "attention.q" and survey.model.architecture.name == "glm4_moe"
        )
        if kind.leaf == "v_proj":  # the last part of a fused module may end in a part of a block on vLLM
            merged = at.runtime == "sglang"
        bad = 0
        if kind.leaf in _COLUMNS and (at.tp > 1 or merged) and rows % 128:
            bad = rows
        elif kind.leaf in _ROWS and at.tp > 1 and columns % 128:
            bad = columns
        if bad:
            what = "columns" if kind.leaf in _ROWS else "rows"
            message = f"has {bad} {what} on a rank, which 128x128 blocks do not divide: it stops; lower TP, or store it"
            yield Fact(name, f"{message} in BF16 or in FP8 by channel", many=count)


def _expert_blocks(survey: Survey, at: Deployment) -> Iterator[Fact]:
    for kind, name, count in _of(survey, at, _BLOCKS, experts=True):
        inner = kind.shape[1] // at.expert_tp
        if is_down(name) and inner % 128:
            falls = at.runtime == "vllm" and survey.method == "fp8"
            what = "vLLM falls back to a slower kernel" if falls else f"{RUNTIME_NAMES[at.runtime]} stops"
            message = f"has {inner} columns on a rank, which 128x128 blocks do not divide: {what}; {_LOWER}"
            yield Fact(name, message, "warning" if falls else None, many=count)


def _joined_blocks(survey: Survey, at: Deployment) -> Iterator[Fact]:
    latent = _integer(survey, "kv_lora_rank") + _integer(survey, "qk_rope_head_dim")
    for kind, name, count in _of(survey, at, _BLOCKS, experts=False):
        rank = kind.shape[0]
        if kind.role != "attention.q_a" or rank % 128 == 0:
            continue
        message = f"has {rank} rows, no multiple of 128, and is joined with kv_a_proj_with_mqa: "
        fits = -(-rank // 128) + -(-latent // 128) == -(-(rank + latent) // 128)
        silent = at.runtime == "sglang" and fits
        what = (
            "SGLang gives the rows behind it the scales of others" if silent else f"{RUNTIME_NAMES[at.runtime]} stops"
        )
        yield Fact(name, f"{message}{what}; store both in BF16", "silent" if silent else None, many=count)


def _ranks(survey: Survey, at: Deployment) -> Iterator[Fact]:
    text: Any = survey.model.text
    for key in ("num_attention_heads", "intermediate_size"):
        if (size := _integer(survey, key)) % at.tp:
            yield Fact(f"config.json: {key}", f"is {size}, not divisible by {at.tp} ranks: it stops; choose another TP")
    heads = _integer(survey, "num_key_value_heads")
    if survey.model.architecture.name == "glm4_moe" and heads % at.tp and at.tp % heads:
        message = f"is {heads}, which neither divides nor is divided by {at.tp} ranks: it stops; choose another TP"
        yield Fact("config.json: num_key_value_heads", message)
    linear = text.get("linear_attn_config")
    if isinstance(linear, dict) and (count := int(linear.get("num_heads", 0))) % at.tp:
        message = f"is {count}, not divisible by {at.tp} ranks: it stops; choose another TP"
        yield Fact("config.json: linear_attn_config.num_heads", message)
    inner = _integer(survey, "moe_intermediate_size")
    if inner % at.expert_tp:
        yield Fact("config.json: moe_intermediate_size", f"is {inner}, not divisible by {at.expert_tp} ranks; {_LOWER}")
    experts = _integer(survey, "n_routed_experts") or _integer(survey, "num_experts")
    if at.ep > 1 and experts % at.ep:
        yield Fact("config.json: n_routed_experts", f"is {experts}, not divisible by EP {at.ep}; choose another EP")


def _integer(survey: Survey, key: str) -> int:
    value = survey.model.text.get(key)
    return value if type(value) is int else 0


RULES = (
    Rule(
        "T1",
        "an expert's part on a rank divides into INT4 groups",
        {"vllm": "error", "sglang": "silent"},
        _expert_groups,
    ),
    Rule("T2", "the part of o_proj and down_proj on a rank divides into INT4 groups", both("error"), _linear_groups),
    Rule("T3", "an expert's part on a rank is wider than one INT4 group", {"vllm": "silent"}, _permutation),
    Rule("T4", "parts on a rank fit the tiles of the Marlin kernels", both("error"), _tiles),
    Rule("T5", "parts on a rank divide into FP8 blocks", both("error"), _linear_blocks),
    Rule("T6", "an expert's part on a rank divides into FP8 blocks", both("error"), _expert_blocks),
    Rule("T7", "q_a_proj in FP8 blocks has a multiple of 128 rows", both("error"), _joined_blocks),
    Rule("T8", "heads, widths and experts divide by the ranks", both("error"), _ranks),
)
