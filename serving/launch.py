"""The exact command lines that serve a pair: one for each pool, and what stands before them.

Nothing is left to a default that depends on the card or on the number of GPUs, because the two pools would fill it in
each for itself. What the rules find against the pair is found here too, and then there are no command lines. Arguments
as in vLLM 0.32.0, SGLang 0.5.23 and sglang-router 0.3.2.
"""

from __future__ import annotations

import ipaddress
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ..errors import UsageError
from ..families import Model, identify
from ..formats.checkpoint import open_checkpoint, side_files
from .belong import belong
from .deployment import Deployment, Finding
from .judge import judge
from .kv_layout import PHASES, is_dsa, kv_layout
from .rules.rule import RUNTIME_NAMES
from .settle import settle

TRANSFERS = ("nixl", "mooncake")
_REFUSED = ("error", "silent")


@dataclass(frozen=True, slots=True)
class Where:
    """Places and names in the command lines.

    mount: the path under which each pool sees its own artifact. *_host: address under which the other machines reach
    that pool; *_port: its HTTP port. bootstrap_port: the one at which the decode pool finds the prefill pool (SGLang,
    Mooncake). side_port: NIXL's on vLLM, the decode pool's is one higher. transfer: "nixl" or "mooncake".
    served_name: what clients call the model. max_model_len: longest text in tokens; both None as the runtime has it.
    """

    mount: str = "/model"
    prefill_host: str = "127.0.0.1"
    decode_host: str = "127.0.0.1"
    prefill_port: int = 30000
    decode_port: int = 30001
    router_port: int = 8000
    bootstrap_port: int = 8998
    side_port: int = 5600
    transfer: str = "nixl"
    served_name: str | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        if self.transfer not in TRANSFERS:
            raise UsageError(f"transfer backend {self.transfer!r} is unknown; {' and '.join(TRANSFERS)} are known")
        if not re.fullmatch(r"/[^\s:]*", self.mount):
            raise UsageError(f"mount {self.mount!r} is no absolute path; both artifacts are mounted there, e.g. /model")
        for name, host in (("prefill", self.prefill_host), ("decode", self.decode_host)):
            if not _is_host(host):
                raise UsageError(f"{name} host {host!r} is no address; give a host's name or its IP address")


def _is_host(text: str) -> bool:
    """Whether it is the name or the IP address of a machine."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return all(re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?", label) for label in text.split("."))
    return True


class Note(NamedTuple):
    """Why a flag is there, or what has to be done beside the command lines. pool: "prefill", "decode" or "both"."""

    pool: str
    flag: str
    reason: str


@dataclass(frozen=True, slots=True)
class Launch:
    """The command lines, empty where `findings` holds an error or a silent fault.

    prefill, decode: one argument an item, as a shell would pass them. router: what stands before both; [] on vLLM,
    which has nothing of its own. at: the two deployments with every choice made.
    """

    prefill: list[str] = field(default_factory=list)
    decode: list[str] = field(default_factory=list)
    router: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    at: tuple[Deployment, Deployment] | None = None

    @property
    def ok(self) -> bool:
        """Nothing stands against the pair but warnings."""
        return not any(finding.severity in _REFUSED for finding in self.findings)


def launch(
    prefill: Path, decode: Path, prefill_at: Deployment, decode_at: Deployment, where: Where | None = None
) -> Launch:
    """Command lines for the pools of one runtime. What a deployment leaves open is chosen so that both agree.

    A KV dtype of "auto" becomes that of the other pool, and bfloat16 where both leave it open: it is right for every
    model without scales. Raises UsageError for what the runtime cannot have, CheckpointError where a checkpoint cannot
    be read.
    """
    where = where or Where()
    for at in (prefill_at, decode_at):
        if at.runtime == "vllm" and at.ep not in (1, at.tp):
            raise UsageError(
                f"ep {at.ep} with tp {at.tp}: vLLM spreads experts over all ranks or none; ep is 1 or {at.tp}"
            )
    folders = prefill, decode
    models = [identify(open_checkpoint(folder).config) for folder in folders]
    for phase, model in zip(PHASES, models, strict=True):
        if where.max_model_len and (longest := _longest(model)) and where.max_model_len > longest:
            raise UsageError(
                f"max model len {where.max_model_len:,}: the {phase} checkpoint has positions for {longest:,} tokens, "
                f"and {RUNTIME_NAMES[prefill_at.runtime]} does not start with more; give at most that"
            )
    pools = settle((models[0], models[1]), (prefill_at, decode_at))
    findings, pools = judge(folders, pools)
    findings = list(dict.fromkeys([*findings, *belong(*folders, *pools)]))
    if any(finding.severity in _REFUSED for finding in findings):
        return Launch(findings=findings, at=pools)
    write = _vllm if pools[0].runtime == "vllm" else _sglang
    notes: list[Note] = []
    code = any(name.endswith(".py") for folder in folders for name in side_files(folder))
    first, second = (
        write(phase, model, at, where, code, notes) for phase, model, at in zip(PHASES, models, pools, strict=True)
    )
    for phase, model, at, asked in zip(PHASES, models, pools, (prefill_at, decode_at), strict=True):
        notes += _spelling(phase, kv_layout(model, at, phase).dtype, asked)
    notes += _mounting(folders, where, pools[0].runtime)
    router: list[str] = []
    if pools[0].runtime == "sglang":
        router = _router(where)
        notes.append(Note("both", "router", "comes with the package sglang-router; clients talk to it alone"))
    else:
        notes.append(Note("both", "proxy", _PROXY[where.transfer]))
    return Launch(first, second, router, _merged(notes), findings, pools)


def _longest(model: Model) -> int:
    """The longest text in tokens that either runtime starts with, 0 where the config does not say."""
    longest = model.text.get("max_position_embeddings")
    if not isinstance(longest, int):
        return 0
    rope = model.text.get("rope_scaling") or model.text.get("rope_parameters") or {}
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings", longest)
    return max(longest, int(original * factor)) if isinstance(factor, int | float) else longest


_NO_ROUTER = "vLLM's package has no router for two pools: provide a proxy that sends each request to the prefill pool"
#: what that proxy must send along, by transfer: nixl's worker.py and mooncake_connector.py read it
_PROXY = {
    "nixl": f"{_NO_ROUTER} first, with kv_transfer_params {{do_remote_decode: true}} and max_tokens 1, and then to the "
    "decode pool, with the kv_transfer_params of that answer",
    "mooncake": f"{_NO_ROUTER} with kv_transfer_params {{do_remote_decode: true, transfer_id: ID}} and max_tokens 1, "
    "and to the decode pool with {do_remote_prefill: true, transfer_id: ID, remote_engine_id, remote_bootstrap_addr}: "
    "the same ID of its own making, and the prefill pool's engine id and bootstrap address",
}
_DTYPE = (
    "explicit, because auto depends on the config and the card, and the pools compare this as text; bfloat16 needs no "
    "scales, FP8 halves the cache and stores at scale 1.0 unless the artifact has scales that the runtime reads"
)
_BACKEND = "explicit, because it decides how a row lies, and the choice depends on card, TP and KV dtype"
_PAGE = "explicit, because backends change it each to their liking, and the pools must have the same"
#: why a KV dtype is given otherwise than it was asked for
_SPELLINGS = {
    "fp8_e4m3": "the name that both runtimes and all backends take, and that the pools compare",
    "fp8_ds_mla": "with sparse attention fp8 is rows of 656 bytes on one card and of 576 on another; this name is "
    "always the 656: e4m3 with a scale for each 128 values, the rotated part in bfloat16",
    "bf16": "the spelling that all of SGLang's backends take",
}
_FUSION = "shared and routed experts are stored in different formats; fused, the shared ones would be garbage"
_MTP = "the draft layer has a KV cache too: both pools or none"
_CODE = "the checkpoint's own .py files (tokenizer) are run: read them before you trust them"


def _vllm(phase: str, model: Model, at: Deployment, where: Where, code: bool, notes: list[Note]) -> list[str]:
    host, port = _address(phase, where)
    role = {"prefill": "kv_producer", "decode": "kv_consumer"}[phase]
    connector = {"nixl": "NixlConnector", "mooncake": "MooncakeConnector"}[where.transfer]
    command = ["env"]
    if where.transfer == "nixl":
        side = where.side_port + (phase == "decode")
        command += [f"VLLM_NIXL_SIDE_CHANNEL_HOST={host}", f"VLLM_NIXL_SIDE_CHANNEL_PORT={side}"]
        notes.append(Note(phase, "VLLM_NIXL_SIDE_CHANNEL_HOST", "the other pool connects here; default is localhost"))
    else:
        command.append(f"VLLM_MOONCAKE_BOOTSTRAP_PORT={where.bootstrap_port}")
    command += ["vllm", "serve", where.mount, "--host", "0.0.0.0", "--port", str(port)]
    command += ["--tensor-parallel-size", str(at.tp)]
    if at.ep > 1:
        command.append("--enable-expert-parallel")
        notes.append(Note(phase, "--enable-expert-parallel", "each rank holds whole experts, no scale group is cut"))
    _shared_choices(command, phase, model, at, notes, page="--block-size")
    if at.attention_backend:
        command += ["--attention-backend", at.attention_backend]
        notes.append(Note(phase, "--attention-backend", f"{_BACKEND}; NIXL compares its name"))
    command += ["--kv-transfer-config", json.dumps({"kv_connector": connector, "kv_role": role})]
    notes.append(Note(phase, "--kv-transfer-config", f"{connector}; prefill gives its KV cache away, decode takes it"))
    if at.mtp:
        command += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1})]
        notes.append(Note(phase, "--speculative-config", f"{_MTP}; NIXL compares it"))
    return command + _names(phase, where, code, notes, "--max-model-len")


def _sglang(phase: str, model: Model, at: Deployment, where: Where, code: bool, notes: list[Note]) -> list[str]:
    _, port = _address(phase, where)
    command = ["python", "-m", "sglang.launch_server", "--model-path", where.mount]
    command += ["--host", "0.0.0.0", "--port", str(port), "--tp-size", str(at.tp)]
    if at.ep > 1:
        command += ["--ep-size", str(at.ep)]
        notes.append(Note(phase, "--ep-size", "ranks hold whole experts, or larger parts of them"))
    command += ["--disaggregation-mode", phase, "--disaggregation-transfer-backend", where.transfer]
    command += ["--disaggregation-bootstrap-port", str(where.bootstrap_port)]
    notes.append(Note(phase, "--disaggregation-transfer-backend", "the same in both; on RDMA machines name the device"))
    _shared_choices(command, phase, model, at, notes, page="--page-size")
    if is_dsa(model):
        own, other = str(at.attention_backend), _other_backend(phase, model, at)
        command += ["--attention-backend", "dsa", "--dsa-prefill-backend", own if phase == "prefill" else other]
        command += ["--dsa-decode-backend", own if phase == "decode" else other]
        reason = "rows of FP8 are 656 bytes with flashmla, 576 with trtllm, and nothing compares that"
        notes.append(Note(phase, f"--dsa-{phase}-backend", f"{_BACKEND}; {reason}"))
    elif at.attention_backend:
        command += ["--attention-backend", at.attention_backend]
        notes.append(Note(phase, "--attention-backend", _BACKEND))
    if not at.shared_fusion:
        command.append("--disable-shared-experts-fusion")
        notes.append(Note(phase, "--disable-shared-experts-fusion", _FUSION))
    if at.mtp:
        command += ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1"]
        command += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"]
        notes.append(Note(phase, "--speculative-algorithm", f"{_MTP}; EAGLE is what serves the checkpoint's MTP layer"))
    return command + _names(phase, where, code, notes, "--context-length")


def _other_backend(phase: str, model: Model, at: Deployment) -> str:
    """The DSA backend of the phase that this pool does not serve; with FP8 one that reads the same rows."""
    if at.kv_dtype.startswith("fp8") and at.attention_backend in ("flashmla_kv", "trtllm", "tilelang"):
        return at.attention_backend
    other = "decode" if phase == "prefill" else "prefill"
    return kv_layout(model, replace(at, attention_backend=None), other).backend


def _shared_choices(
    command: list[str], phase: str, model: Model, at: Deployment, notes: list[Note], *, page: str
) -> None:
    command += ["--kv-cache-dtype", kv_layout(model, at, phase).dtype]
    notes.append(Note(phase, "--kv-cache-dtype", _DTYPE))
    if at.page_size:
        command += [page, str(at.page_size)]
        notes.append(Note(phase, page, _PAGE))


def _spelling(phase: str, given: str, asked: Deployment) -> list[Note]:
    """That a KV dtype is given under another name than was asked for."""
    if asked.kv_dtype in ("auto", given):
        return []
    return [Note(phase, "--kv-cache-dtype", f"{asked.kv_dtype} is given as {given}: {_SPELLINGS[given]}")]


def _names(phase: str, where: Where, code: bool, notes: list[Note], length: str) -> list[str]:
    command = []
    if where.served_name:
        command += ["--served-model-name", where.served_name]
    if where.max_model_len:
        command += [length, str(where.max_model_len)]
        notes.append(Note(phase, length, "the same in both: a text that one takes the other must take"))
    if code:
        command.append("--trust-remote-code")
        notes.append(Note(phase, "--trust-remote-code", _CODE))
    return command


def _address(phase: str, where: Where) -> tuple[str, int]:
    if phase == "prefill":
        return where.prefill_host, where.prefill_port
    return where.decode_host, where.decode_port


def _router(where: Where) -> list[str]:
    command = ["python", "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    hosts = [f"[{host}]" if ":" in host else host for host in (where.prefill_host, where.decode_host)]
    command += ["--prefill", f"http://{hosts[0]}:{where.prefill_port}", str(where.bootstrap_port)]
    command += ["--decode", f"http://{hosts[1]}:{where.decode_port}"]
    return [*command, "--host", "0.0.0.0", "--port", str(where.router_port)]


def _mounting(folders: tuple[Path, Path], where: Where, runtime: str) -> list[Note]:
    """One path in both pools: vLLM's NIXL compares the model's path as text, and names in logs and metrics agree."""
    reason = "so that both pools see their artifact under one path"
    reason += ", which NIXL compares as text" if runtime == "vllm" else ": then logs and metrics call it by one name"
    return [
        Note(
            phase,
            where.mount,
            f"mount {folder.resolve()} there (docker: -v {folder.resolve()}:{where.mount}:ro), {reason}",
        )
        for phase, folder in zip(PHASES, folders, strict=True)
    ]


def _merged(notes: list[Note]) -> list[Note]:
    """Notes that both pools have in common, once."""
    pools: dict[tuple[str, str], list[str]] = {}
    for note in notes:
        pools.setdefault((note.flag, note.reason), []).append(note.pool)
    return [Note(held[0] if len(held) == 1 else "both", *key) for key, held in pools.items()]
