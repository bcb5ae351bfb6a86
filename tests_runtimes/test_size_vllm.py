"""What `size` counts for a GPU against the parameters that vLLM's own model has on a rank, to the byte."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sparse
import variants
from pairs import folded, planned

from phasefold.serving.deployment import Deployment
from phasefold.serving.size import Gpus, size
from phasefold.serving.survey import Survey, survey

WORKER = Path(__file__).with_name("count_vllm.py")
#: what vLLM keeps in another dtype than the checkpoint: compared by elements. Role(s) -> its names
_OTHER_DTYPE = {
    ("router",): r"\.mlp\.gate\.weight$",  # GLM-4.x: BF16 becomes F32
    ("indexer.norm",): r"\.indexer\.k_norm\.",  # F32
    ("indexer.wk", "indexer.weights_proj"): r"\.indexer\.wk_weights_proj\.weight$",  # FP8 becomes BF16
}
#: sizes of packed matrices, which vLLM keeps in a dtype of its own, and scales of a cache that nothing is loaded into
_LEFT_OUT = r"weight_shape$|\.attn\.[qkv]_(scale|zero_point)$"
#: what the draft model takes over from the main one after its load (llm_base_proposer.py: _maybe_share_*)
_SHARED = r"|embed_tokens|shared_head\.head"


def parameters(folder: Path, tp: int, ep: int, device: str, model: str) -> dict[str, list[int]]:
    command = [sys.executable, str(WORKER), str(folder), str(tp), str(ep), device, model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("ANSWER ")), None)
    assert line, done.stderr[-3000:]
    return {
        name: value
        for name, value in json.loads(line.removeprefix("ANSWER ")).items()
        if not re.search(_LEFT_OUT + _SHARED * (model == "draft"), name)
    }


def elements(seen: Survey, roles: tuple[str, ...], *, mtp: bool) -> int:
    """Of the matrices and vectors of roles that every GPU holds whole, without their scales."""
    parts = [entry.parts[0] for entry in seen.entries if entry.spec.role in roles and entry.spec.mtp == mtp]
    return sum(part.nbytes // {"F32": 4, "BF16": 2, "F8_E4M3": 1}[part.dtype] for part in parts)


def compare(folder: Path, tp: int, ep: int = 1, device: str = "meta", *, mtp: bool = False) -> None:
    """Of the main model, or of what the MTP layer adds."""
    seen = survey(folder)
    held = parameters(folder, tp, ep, device, "draft" if mtp else "main")
    a_gpu = {name: role.per_gpu for name, role in size(seen, Gpus(Deployment("vllm", tp, ep))).roles.items()}
    if mtp:
        both = size(seen, Gpus(Deployment("vllm", tp, ep, mtp=True)))
        a_gpu = {name: role.per_gpu - a_gpu[name] for name, role in both.roles.items()}
    ours = sum(a_gpu.values())
    for roles, names in _OTHER_DTYPE.items():
        theirs = {name: held.pop(name) for name in list(held) if re.search(names, name)}
        assert sum(count for count, _ in theirs.values()) == elements(seen, roles, mtp=mtp)
        ours -= sum(a_gpu.get(role, 0) for role in roles)
    sizes = [p.nbytes for e in seen.entries if e.spec.mtp == mtp for p in e.parts if p.suffix == ".weight_shape"]
    assert sum(count * width for count, width in held.values()) == ours - sum(sizes) // ep


@pytest.mark.parametrize(
    ("model", "tp"),
    [("zai-org/GLM-5.2-FP8", 8), ("moonshotai/Kimi-K2.6", 8), ("zai-org/GLM-4.7-FP8", 8), ("zai-org/GLM-4.5", 16),
     ("zai-org/GLM-4.7-Flash", 4), ("moonshotai/Moonlight-16B-A3B", 2)],
)  # fmt: skip
def test_published_models(tmp_path: Path, model: str, tp: int) -> None:
    sparse.write(model, tmp_path / "model")
    compare(tmp_path / "model", tp)


def test_a_planned_artifact(tmp_path: Path) -> None:
    sparse.write("zai-org/GLM-5.2-FP8", tmp_path / "source")
    artifact = planned(tmp_path / "source", "glm-decode-int4", tmp_path / "out")
    compare(artifact, 8)
    compare(artifact, 8, mtp=True)


def test_an_mtp_layer_in_fp8(tmp_path: Path) -> None:
    sparse.write("zai-org/GLM-5.2-FP8", tmp_path / "model")
    compare(tmp_path / "model", 8, mtp=True)


@pytest.mark.parametrize(
    ("base", "recipe"), [("tiny-kimi", "kimi-decode-int4"), ("tiny-glm4", None), ("tiny-glm5", None)]
)
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (4, 4)])
def test_experts_cut_and_whole(tmp_path: Path, base: str, recipe: str | None, tp: int, ep: int) -> None:
    folder = variants.EXAMPLES / base
    compare(folded(folder, recipe, tmp_path / "out") if recipe else folder, tp, ep, "cpu")
