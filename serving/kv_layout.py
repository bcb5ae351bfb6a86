"""How each runtime will keep the KV cache of a model: dtype string, page, attention backend and bytes of a row.

Two pools can hand a cache over only where all of that is equal, and what the command line leaves open, a runtime fills
in by the card, the model and the number of GPUs. This simulates that choice from config.json and a `Deployment`, for
Hopper and Blackwell. Read from vLLM 0.32.0 and SGLang 0.5.23; each function says from where.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..families import CacheLayer, CachePart, Model
from .deployment import Deployment

PHASES = ("prefill", "decode")

_PLAIN = ("auto", "bfloat16")
_FP8 = ("fp8", "fp8_e4m3")
_MLA_HEADS = (320, 512, 576)  # vLLM's mla_attention.py: MLACommonBackend.get_supported_head_sizes
#: what SGLang calls the backends of sparse attention (arg_groups/fields/exec_.py), without those for other cards
DSA_BACKENDS = ("flashmla_sparse", "flashmla_sparse_q8", "flashmla_kv", "flashmla_auto", "fa3", "tilelang", "trtllm")
#: what SGLang's --attention-backend may be for dense attention on NVIDIA cards (arg_groups/choices.py)
_SGLANG_BACKENDS = frozenset(
    """triton torch_native flex_attention fa3 fa4 flashinfer flashmla trtllm_mla cutedsl_mla tokenspeed_mla trtllm_mha
    hpc_ops""".split()
)
#: architectures for which SGLang has defaults of its own (model_overrides/deepseek_v2.py: _deepseek_family_overrides)
_DEEPSEEK = ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "GlmMoeDsaForCausalLM")


class KVLayout(NamedTuple):
    """The KV cache of one pool.

    dtype: the string that the runtime compares (SGLang) or hashes (vLLM). page: tokens; None where it depends on the
    state of linear attention. backend: name of the attention backend, "" where that depends on it too; on SGLang with
    DSA that of the pool's phase.
    row: how one token of one layer lies; row_bytes: how long that is, over all ranks, without the indexer's keys.
    refusal: why the runtime does not start like this, or "".
    """

    dtype: str
    page: int | None
    backend: str
    row: str
    row_bytes: int
    refusal: str = ""

    @property
    def form(self) -> str:
        """The row in the words of `paged.rows`: bf16, fp8_e4m3, fp8_ds_mla (or fp8_e5m2, which is not there); or ""."""
        if "float32 scales" in self.row:
            return "fp8_ds_mla"
        return "bf16" if self.row.endswith("16-bit float") else self.row and f"fp8_{self.row.rpartition(' ')[2]}"


class _Shape(NamedTuple):
    """What the choice depends on. head: width of a row (MLA) or of a head; dsa: sparse attention with an indexer."""

    parts: tuple[CachePart, ...]
    mla: bool
    dsa: bool
    hybrid: bool
    head: int


class _Backend(NamedTuple):
    """One of vLLM's attention backends.

    majors: compute capabilities. dtypes: KV dtypes. pages: one of these divides the page. heads: widths, () for any.
    nope: `qk_nope_head_dim` that its kernel has, () for any.
    """

    majors: tuple[int, ...]
    dtypes: tuple[str, ...]
    pages: tuple[int, ...]
    heads: tuple[int, ...] = ()
    nope: tuple[int, ...] = ()


# vLLM: v1/attention/backends/mla/*.py, flash_attn.py, flashinfer.py and triton_attn.py: the classes' supported_* and
# supports_combination. TOKENSPEED_MLA is not here: it needs a package of its own and comes behind FLASHINFER_MLA.
_MLA = {
    "FLASH_ATTN_MLA": _Backend((9,), _PLAIN, (16,), _MLA_HEADS),
    "FLASHMLA": _Backend((9,), _PLAIN + _FP8, (64,), _MLA_HEADS),
    "FLASHINFER_MLA": _Backend((10,), _PLAIN + _FP8, (32, 64), _MLA_HEADS, (64, 128, 192)),
    "CUTLASS_MLA": _Backend((10,), _PLAIN + _FP8, (128,), _MLA_HEADS),
    "TRITON_MLA": _Backend((9, 10), _PLAIN + _FP8, (16,)),
}
_SPARSE = {
    "FLASH_ATTN_MLA_SPARSE": _Backend((9,), _PLAIN, (64,)),
    "FLASHMLA_SPARSE": _Backend((9, 10), (*_PLAIN, "fp8", "fp8_ds_mla"), (64,), (512, 576)),
    "FLASHINFER_MLA_SPARSE": _Backend((10,), _PLAIN + _FP8, (32,), (512, 576), (128, 192)),
    "FLASHINFER_MLA_SPARSE_SM90": _Backend((9,), _PLAIN + _FP8, (64,), (512, 576)),  # with FlashInfer 0.6.18 on
}
_GQA = {
    "FLASH_ATTN": _Backend((9, 10), _PLAIN + _FP8, (16,)),
    "FLASHINFER": _Backend((9, 10), (*_PLAIN, *_FP8, "fp8_e5m2"), (16, 32, 64), (64, 128, 256, 512)),
    "TRITON_ATTN": _Backend((9, 10), (*_PLAIN, *_FP8, "fp8_e5m2"), (16,)),
}


def kv_layout(model: Model, at: Deployment, phase: str) -> KVLayout:
    """The KV cache that `at.runtime` will build for this model. `phase`: "prefill" or "decode"."""
    shape = _shape(model.cache())
    if at.sm // 10 not in (9, 10):
        return KVLayout(at.kv_dtype, at.page_size, "", "", 0, f"sm {at.sm} is not known here; 90 and 100 to 103 are")
    return (_vllm if at.runtime == "vllm" else _sglang)(model, shape, at, phase)


def kv_scheme(model: Model) -> Mapping[str, Any] | None:
    """The `kv_cache_scheme` of the quantization config, which changes what "auto" means; None without one."""
    for part in (model.config, model.text):
        config = part.get("quantization_config") or part.get("compression_config")
        if isinstance(config, Mapping):
            scheme = config.get("kv_cache_scheme")
            if config.get("kv_cache_quant_algo") == "FP8":  # SGLang's fp8.py reads this one
                scheme = scheme or {"num_bits": 8, "type": "float", "strategy": "tensor"}
            return scheme if isinstance(scheme, Mapping) else None
    return None


def is_mla(model: Model) -> bool:
    """Latent attention, where one row serves as key and value."""
    return _shape(model.cache()).mla


def is_dsa(model: Model) -> bool:
    """Sparse attention: an indexer chooses the tokens."""
    return _shape(model.cache()).dsa


def _shape(layers: list[CacheLayer]) -> _Shape:
    parts = next((layer.parts for layer in layers if layer.parts), ())
    names = {part.name for layer in layers for part in layer.parts}
    main = tuple(part for part in parts if part.name != "index_k")
    mla = "kv_c" in names
    head = sum(part.width for part in main) if mla else main[0].width if main else 0
    return _Shape(main, mla, "index_k" in names, any(not layer.parts for layer in layers), head)


def _row(shape: _Shape, dtype: str, *, scaled: bool = False) -> tuple[str, int]:
    """Description and bytes of one token's row. scaled: DeepSeek's form, FP8 latent with scales, RoPE part in BF16."""
    sizes = [part.heads * part.width for part in shape.parts]
    if scaled:
        latent, rope = sizes
        total = latent + latent // 128 * 4 + rope * 2
        return f"{latent} e4m3, {latent // 128} float32 scales, {rope} bfloat16", total
    one_byte = dtype.startswith("fp8")
    kind = ("e5m2" if dtype == "fp8_e5m2" else "e4m3") if one_byte else "16-bit float"
    return f"{' + '.join(map(str, sizes))} {kind}", sum(sizes) * (1 if one_byte else 2)


def _vllm(model: Model, shape: _Shape, at: Deployment, phase: str) -> KVLayout:
    """vLLM: platforms/cuda.py _get_backend_priorities, AttentionBackend.validate_configuration.

    "auto": models/config.py GlmMoeDsaForCausalLM, attention.py Attention. Page: get_preferred_block_size.
    """
    major, dtype = at.sm // 10, at.kv_dtype
    if dtype == "auto" and model.architecture.name == "glm_moe_dsa" and major == 10:
        dtype = "fp8_e4m3"
    if dtype == "auto" and not shape.mla and kv_scheme(model):
        dtype = "fp8"
    table = _GQA if not shape.mla else _SPARSE if shape.dsa else _MLA
    nope = model.text.get("qk_nope_head_dim")
    name = at.attention_backend or next(
        (
            name
            for name in _vllm_order(table, shape, major, dtype, int(model.text["num_attention_heads"]) // at.tp)
            if not _vllm_reasons(name, table[name], shape, nope, major, dtype, at.page_size)
        ),
        "",
    )
    reasons = ["is no backend for this kind of attention"]
    if name in table:
        reasons = _vllm_reasons(name, table[name], shape, nope, major, dtype, at.page_size)
    refusal = f"vLLM's {name} {' and '.join(reasons)}" if reasons else ""
    if not name:
        refusal = (
            f"vLLM has no attention backend for KV dtype {dtype}, rows of {shape.head} and pages of "
            f"{at.page_size or 'any size'} on sm {at.sm}"
        )
    scaled = name == "FLASHMLA_SPARSE" and dtype not in _PLAIN  # mla_attention.py _canonicalize_sparse_mla_kv_...
    page = at.page_size
    if page is None and name in table and not shape.hybrid:
        bases = table[name].pages
        page = 16 if any(16 % base == 0 for base in bases) else min(bases)
    row, size = _row(shape, dtype, scaled=scaled and not refusal)
    return KVLayout("fp8_ds_mla" if scaled else dtype, page, name, row, size, refusal)


def _vllm_order(table: Mapping[str, _Backend], shape: _Shape, major: int, dtype: str, heads: int) -> list[str]:
    """The order in which vLLM tries them; `heads` are those of one rank."""
    if not shape.mla:
        return ["FLASHINFER", "FLASH_ATTN", "TRITON_ATTN"] if major == 10 else list(table)
    if not shape.dsa:
        return ["FLASHINFER_MLA", "CUTLASS_MLA", "TRITON_MLA"] if major == 10 else list(table)
    if major == 10:
        flashinfer_first = dtype not in _PLAIN or heads <= 16
        return ["FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE"][:: 1 if flashinfer_first else -1]
    return ["FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM90"]


def _vllm_reasons(
    name: str, backend: _Backend, shape: _Shape, nope: Any, major: int, dtype: str, page: int | None
) -> list[str]:
    """Why a backend does not take this, in words."""
    reasons = []
    if major not in backend.majors:
        reasons.append(f"does not run on sm {major}x")
    if dtype not in backend.dtypes:
        reasons.append(f"does not take KV dtype {dtype}")
    if page is not None and all(page % base for base in backend.pages):
        reasons.append(f"does not take pages of {page}")
    if backend.heads and shape.head not in backend.heads:
        reasons.append(f"does not take rows of {shape.head}")
    if backend.nope and nope not in backend.nope:
        reasons.append(f"does not take a qk_nope_head_dim of {nope}")
    if name == "FLASHINFER_MLA_SPARSE_SM90" and [part.width for part in shape.parts] != [512, 64]:
        reasons.append("takes rows of 512 + 64 only")
    return reasons


def _sglang(model: Model, shape: _Shape, at: Deployment, phase: str) -> KVLayout:
    """SGLang: arg_groups/overrides.py, model_override_base.py get_default_attn_backend, mem_cache/kv_cache_dtype.py."""
    if at.kv_dtype in ("fp8", "fp8_ds_mla"):
        refusal = f"SGLang has no --kv-cache-dtype {at.kv_dtype}; give fp8_e4m3"
        return KVLayout(at.kv_dtype, at.page_size, at.attention_backend or "", "", 0, refusal)
    if shape.dsa:
        return _sglang_dsa(shape, at, phase)
    blackwell = at.sm >= 100
    name = at.attention_backend
    if name is None and shape.hybrid:  # kimi_k3_hook.py and mamba_hook.py have rules of their own, by the state
        name = ""
    if name is None and blackwell and shape.mla and _architecture(model) in _DEEPSEEK:
        name = "trtllm_mla"
    if name is None:
        name = ("flashinfer" if shape.mla else "trtllm_mha") if blackwell else "fa3"
    refusal = ""
    if name and name not in _SGLANG_BACKENDS:
        refusal = f"SGLang has no attention backend {name} here; there are {', '.join(sorted(_SGLANG_BACKENDS))}"
    if name in ("trtllm_mla", "cutedsl_mla") and not blackwell:
        refusal = f"SGLang's {name} runs on Blackwell only"
    if name in ("trtllm_mla", "cutedsl_mla") and at.kv_dtype == "fp8_e5m2":
        refusal = f"SGLang's {name} does not take KV dtype fp8_e5m2"
    dtype = {"bfloat16": "bf16"}.get(at.kv_dtype, at.kv_dtype)  # trtllm_mla knows only the short spelling
    if name == "fa3" and dtype == "fp8_e5m2":  # _attention_backend_fa3_fp8_fallback
        name = "triton"
    if dtype == "auto" and _sglang_takes(kv_scheme(model)):
        dtype = "fp8_e4m3"
    page = at.page_size if shape.hybrid else _sglang_page(name, at.page_size, mla=shape.mla)
    return KVLayout(dtype, page, name, *_row(shape, dtype), refusal)


def _sglang_dsa(shape: _Shape, at: Deployment, phase: str) -> KVLayout:
    """_dsa_kv_cache_dtype_default, _dsa_split_backend_resolution and, for the row, calculate_mla_kv_cache_dim.

    Each pool takes the row of its own phase's backend, so that two pools may agree in every string and not in the row.
    """
    dtype = at.kv_dtype if at.kv_dtype != "auto" else "fp8_e4m3" if at.sm >= 100 else "bfloat16"
    refusal = f"SGLang's DSA does not take KV dtype {dtype}" if dtype == "fp8_e5m2" else ""
    name = at.attention_backend
    if name in (None, "dsa"):
        if dtype == "fp8_e4m3":
            name = "trtllm" if at.sm >= 100 else "flashmla_kv"
        else:
            name = "flashmla_sparse" if phase == "prefill" else "trtllm" if at.sm >= 100 else "fa3"
    elif name not in DSA_BACKENDS:
        refusal = f"SGLang has no DSA backend {name}; there are {', '.join(DSA_BACKENDS)}"
    if name == "trtllm" and at.sm < 100:
        refusal = "SGLang's trtllm kernels for DSA run on Blackwell only"
    if name == "flashmla_sparse_q8" and (phase == "decode" or at.sm >= 100):
        refusal = "SGLang's flashmla_sparse_q8 serves prefill on Hopper only"
    scaled = dtype == "fp8_e4m3" and name not in ("trtllm", "tilelang")
    return KVLayout(dtype, 64, str(name), *_row(shape, dtype, scaled=scaled), refusal)


def _sglang_page(name: str, page: int | None, *, mla: bool) -> int:
    """_mla_backend_page_constraints and _page_size_default: what a backend cannot take is changed to what it can."""
    allowed = {
        "flashmla": (64,),
        "trtllm_mla": (32, 64),
        "cutedsl_mla": (32, 64),
        "trtllm_mha": (16, 32, 64, 128),
        "hpc_ops": (64,),
        "fa4": () if mla else (128,),
    }.get(name, ())
    if allowed and page not in allowed:
        return 64 if 64 in allowed else allowed[0]
    return page or 1


def _sglang_takes(scheme: Mapping[str, Any] | None) -> bool:
    """compressed_tensors.py: CompressedTensorsKVCacheMethod.is_supported_scheme."""
    if scheme is None or scheme.get("dynamic"):
        return False
    kind = scheme.get("type"), scheme.get("num_bits"), scheme.get("strategy")
    return kind == ("float", 8, "tensor") and scheme.get("symmetric", True) is True


def _architecture(model: Model) -> str:
    names = model.config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""
