"""What a checkpoint takes of each GPU: its weights as the runtimes cut or repeat them, and the tokens that then fit.

From headers and config.json alone, of a folder or of a plan. Counted are stored bytes. What is cut and what is held
whole was read from vLLM 0.32.0's model classes; docs/size.md says from which, and what SGLang does otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..calib.kv import bytes_per_token
from ..errors import CheckpointError, LoadError, UsageError
from ..families import CacheLayer, Model
from ..formats import Part
from .deployment import Deployment
from .rules.tensor_parallel import RULES
from .survey import ABSENT, LOST, Entry, Survey

COUNTS = ("runtime", "even")
LAYOUTS = ("bf16", "fp8_e4m3", "fp8_ds_mla")

# by the last name of a module: those of which each rank has some rows (outputs), and some columns (inputs)
_ROWS = frozenset(
    """q_proj q_b_proj kv_b_proj k_proj v_proj g_proj gate_proj up_proj w1 w3 wqkv fc0
    b_proj f_b_proj g_b_proj q_conv1d k_conv1d v_conv1d dt_bias""".split()
)
_COLUMNS = frozenset(("o_proj", "down_proj", "w2", "wo", "fc1"))
_VOCABULARY = ("embed", "lm_head")
_ATTENTION = ("attention", "linear_attention", "embed", "vision")
#: the MTP layer's copies of embedding and head give way to the model's own, and buffers are computed
_NOT_HELD = ("mtp.embed", "mtp.head", "buffer")
_VOCABULARY_STEP = 64  # DEFAULT_VOCAB_PADDING_SIZE of both runtimes
_INDEX_SCALE = 4  # bytes: an indexer's key is one e4m3 for each of its values and an F32 scale, whatever the KV dtype


@dataclass(frozen=True, slots=True)
class Gpus:
    """What serves, and how that is counted.

    at: tp counts all GPUs over which experts lie. dp: groups of them with attention and requests of their own.
    kv: how a row of the cache lies, one of LAYOUTS. count: "runtime", or "even": all loaded bytes divided by the GPUs.
    memory: bytes of one GPU, None where tokens are not asked for; fraction: share of it for weights and cache;
    reserve: bytes of that share which neither gets.
    """

    at: Deployment
    dp: int = 1
    kv: str = "bf16"
    count: str = "runtime"
    memory: int | None = None
    fraction: float = 0.9
    reserve: int = 4 << 30

    def __post_init__(self) -> None:
        if self.dp < 1 or self.at.tp % self.dp:
            raise UsageError(f"dp {self.dp} must divide tp {self.at.tp}, and be at least 1")
        if self.at.runtime == "vllm" and self.at.ep not in (1, self.at.tp):
            raise UsageError(
                f"ep {self.at.ep} with tp {self.at.tp}: vLLM spreads experts over all ranks or none; "
                f"ep is 1 or {self.at.tp}"
            )
        if self.kv not in LAYOUTS:
            raise UsageError(f"kv dtype {self.kv!r} is no layout of a cache; {', '.join(LAYOUTS)} are")
        if self.count not in COUNTS:
            raise UsageError(f"count {self.count!r} is unknown; {' and '.join(COUNTS)} are known")
        if not 0 < self.fraction <= 1:
            raise UsageError(f"memory fraction {self.fraction} is no share; give one above 0, up to 1")

    @property
    def attention_tp(self) -> int:
        """Over how many ranks heads are cut."""
        return self.at.tp // self.dp


@dataclass(slots=True)
class Role:
    """Bytes of one role.

    stored: in the checkpoint. loaded: of that, what a runtime holds. per_gpu: on the fullest GPU. whole: of what is
    loaded, that which each of several GPUs has.
    """

    stored: int = 0
    loaded: int = 0
    per_gpu: int = 0
    whole: int = 0


@dataclass(frozen=True, slots=True)
class Size:
    """What a checkpoint takes.

    total_bytes: of all its tensors, as an index's total_size. loaded_bytes: of those that a runtime holds.
    per_gpu_bytes: on the fullest GPU. replicated_bytes: of what each of several GPUs holds whole.
    roles: by role.
    kv_bytes_per_token: of one GPU that holds the token. kv_tokens: over all GPUs; None where no memory is given.
    """

    total_bytes: int
    loaded_bytes: int
    per_gpu_bytes: int
    replicated_bytes: int
    roles: Mapping[str, Role]
    kv_bytes_per_token: int
    kv_tokens: int | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits; None where there is none. total and per_gpu: bytes at most. kv_tokens: at least."""

    total: int | None = None
    per_gpu: int | None = None
    kv_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit held against what was found. name: of the option, e.g. "max-total"."""

    name: str
    limit: int
    found: int
    ok: bool


def size(survey: Survey, gpus: Gpus) -> Size:
    """What these tensors take. Raises CheckpointError for an incomplete checkpoint, LoadError for ranks that cannot be.

    The fullest GPU: where something does not divide, as a vocabulary may not, the last one holds less.
    """
    _refuse_incomplete(survey)
    _refuse_uneven(survey, gpus)
    roles: dict[str, Role] = {}
    for entry in survey.entries:
        spec, role = entry.spec, roles.setdefault(entry.spec.role, Role())
        stored = sum(part.nbytes for part in entry.parts)
        role.stored += stored
        if spec.role in _NOT_HELD or (spec.mtp and not gpus.at.mtp):
            continue
        role.loaded += stored
        ranks, axis = _cut(entry, survey.model, gpus)
        everywhere = gpus.at.tp > 1 and (spec.role != "routed_expert" or gpus.at.ep == 1)
        for part in entry.parts:
            held = _held(part, axis, ranks, vocabulary=spec.role in _VOCABULARY)
            role.per_gpu += held
            role.whole += held if everywhere and held == part.nbytes else 0
    if experts := roles.get("routed_expert"):  # counted so far: every expert, cut as its ranks cut it
        experts.per_gpu = -(-experts.per_gpu // gpus.at.ep)
    if survey.extra:
        roles["(unknown)"] = Role(stored=sum(part.nbytes for part in survey.extra.values()))
    loaded = sum(role.loaded for role in roles.values())
    if gpus.count == "even":
        for role in roles.values():
            role.per_gpu, role.whole = -(-role.loaded // gpus.at.tp), 0
        per_gpu = -(-loaded // gpus.at.tp)
    else:
        per_gpu = sum(role.per_gpu for role in roles.values())
    row = kv_bytes(survey.model, gpus, has_mtp=survey.has_mtp)
    return Size(
        sum(role.stored for role in roles.values()),
        loaded,
        per_gpu,
        sum(role.whole for role in roles.values()),
        roles,
        row,
        tokens_that_fit(per_gpu, row, gpus),
        tuple(_notes(survey, gpus)),
    )


def kv_bytes(model: Model, gpus: Gpus, *, has_mtp: bool = True) -> int:
    """Bytes that one token takes of a GPU which holds it. Raises LoadError for a layout that the model cannot have.

    A latent row is whole on every rank; of key-value heads a rank has its own, and at least one. MTP layers keep rows
    where they are loaded.
    """
    layers = [layer for layer in model.cache() if not layer.mtp or (gpus.at.mtp and has_mtp)]
    of_a_rank = [
        CacheLayer(
            layer.layer, layer.mtp, tuple(p._replace(heads=-(-p.heads // gpus.attention_tp)) for p in layer.parts)
        )
        for layer in layers
    ]
    sizes = bytes_per_token(of_a_rank)
    if gpus.kv not in sizes:
        raise LoadError(f"{model.architecture.name} has no {gpus.kv} rows; its cache is {' or '.join(sizes)}")
    keys = [part.width + _INDEX_SCALE for layer in layers for part in layer.parts if part.name == "index_k"]
    if keys and gpus.at.runtime == "sglang":  # a buffer in every layer, also where a layer shares another's choice
        keys = [keys[0]] * len(layers)
    return sizes[gpus.kv] + sum(keys)


def tokens_that_fit(per_gpu: int, row: int, gpus: Gpus) -> int | None:
    """Tokens of all requests together. per_gpu: bytes of weights; row: bytes of one token on a GPU."""
    if gpus.memory is None:
        return None
    return max(0, int(gpus.memory * gpus.fraction) - per_gpu - gpus.reserve) // row * gpus.dp


def judge_budgets(found: Size, budgets: Budgets) -> list[Budget]:
    """Each limit that is given, and whether it holds. Raises UsageError for one on tokens that were not counted."""
    judged = []
    for name, limit, value in (
        ("max-total", budgets.total, found.total_bytes),
        ("max-per-gpu", budgets.per_gpu, found.per_gpu_bytes),
    ):
        if limit is not None:
            judged.append(Budget(name, limit, value, value <= limit))
    if budgets.kv_tokens is not None:
        if found.kv_tokens is None:
            raise UsageError("min-kv-tokens: how many fit is known with --gpu-memory only; give that of one GPU")
        judged.append(Budget("min-kv-tokens", budgets.kv_tokens, found.kv_tokens, found.kv_tokens >= budgets.kv_tokens))
    return judged


def _cut(entry: Entry, model: Model, gpus: Gpus) -> tuple[int, int | None]:
    """Over how many ranks a tensor is cut, and along which dimension; (1, None) where every rank holds it whole."""
    role, top = entry.spec.role, entry.spec.role.partition(".")[0]
    of_attention = top in _ATTENTION or (gpus.at.runtime == "vllm" and role != "routed_expert")
    ranks = gpus.attention_tp if of_attention else gpus.at.tp
    module, _, leaf = entry.module.rpartition(".")
    biased = leaf == "bias"
    if biased:
        leaf = module.rpartition(".")[2]
    axis = 0 if leaf in _ROWS else 1 if leaf in _COLUMNS and not biased else None
    if role in _VOCABULARY:
        axis = 0
    elif role == "routed_expert":
        ranks = gpus.at.expert_tp
    elif leaf == "A_log":
        axis = max(range(len(entry.spec.shape)), key=lambda number: entry.spec.shape[number])
    elif leaf in ("k_proj", "v_proj") and top == "attention":
        ranks = min(ranks, int(model.text["num_key_value_heads"]))  # fewer heads than ranks: each is held by several
    elif role == "vision" and _vision_heads(model) % ranks:
        axis = None
    return (1, None) if axis is None or ranks == 1 else (ranks, axis)


def _held(part: Part, axis: int | None, ranks: int, *, vocabulary: bool) -> int:
    """Bytes of a part on the fullest of the ranks. Sizes, and scales that all ranks need, are not cut."""
    if axis is None or part.suffix == ".weight_shape" or len(part.shape) <= axis or part.shape[axis] == 1:
        return part.nbytes
    extent = part.shape[axis]
    padded = -(-extent // _VOCABULARY_STEP) * _VOCABULARY_STEP if vocabulary else extent
    return part.nbytes // extent * -(-padded // ranks)


def _vision_heads(model: Model) -> int:
    vision: Any = model.config.get("vision_config", {})
    heads = vision.get("vt_num_attention_heads", vision.get("num_attention_heads", 1))
    return heads if type(heads) is int else 1


def _refuse_incomplete(survey: Survey) -> None:
    """A size of what is not all there would be a smaller one than it has."""
    for fault in survey.faults:
        if fault.severity != "warning":
            raise CheckpointError(f"{fault.subject}: {fault.message}")
    missing = [entry for entry in survey.entries if entry.state in (ABSENT, LOST)]
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{missing[0].spec.name}{more} missing: the config calls for it, no shard has it")


def _refuse_uneven(survey: Survey, gpus: Gpus) -> None:
    """What T8 finds: heads in the group that shares attention, widths and experts over all."""
    (rule,) = (rule for rule in RULES if rule.number == "T8")
    group = Deployment(gpus.at.runtime, gpus.attention_tp)
    for at, heads in ((group, True), (gpus.at, False)):
        for fact in rule.check(survey, at):
            if fact.subject.endswith("_heads") == heads:
                raise LoadError(f"{fact.subject} {fact.message}")


def _notes(survey: Survey, gpus: Gpus) -> list[str]:
    notes = []
    if gpus.at.mtp and not survey.has_mtp:
        notes.append("no MTP layer is there to be loaded")
    if any(not layer.parts for layer in survey.model.cache()):
        notes.append(
            "the state of the linear-attention layers, which each request has beside its tokens, is not counted"
        )
    if survey.extra:
        name = next(iter(survey.extra))
        more = f" and {len(survey.extra) - 1:,} more" if len(survey.extra) > 1 else ""
        notes.append(f"{name}{more}: the config does not call for it; counted in the total, on no GPU")
    return notes
