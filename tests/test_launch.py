"""Command lines for pairs: what is in them, what is refused, and that every choice is made for both pools alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sparse
from pairs import RECIPES, make_pair, planned_pair

from phasefold.errors import UsageError
from phasefold.families import Model, identify
from phasefold.serving.deployment import Deployment
from phasefold.serving.kv_layout import PHASES, kv_layout
from phasefold.serving.launch import Launch, Where, launch
from phasefold.serving.settle import settle

HOPPER = Deployment("sglang")
VLLM = Deployment("vllm")


@pytest.fixture(scope="module")
def pair(module_path: Path) -> Callable[..., tuple[Path, Path]]:
    """An FP8 and an INT4 artifact of a variant of an example, made once."""
    made = {}

    def get(base: str, kind: str = "bf16") -> tuple[Path, Path]:
        key = f"{base}-{kind}"
        if key not in made:
            made[key] = make_pair(base, module_path / key, kind)
        return made[key]

    return get


def options(argv: list[str]) -> dict[str, Any]:
    """Flag -> value, True for a flag without one."""
    found: dict[str, Any] = {}
    for word, after in zip(argv, [*argv[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = True if after.startswith("--") else after
    return found


def reasons(found: Launch) -> dict[str, str]:
    return {note.flag: note.reason for note in found.notes}


@pytest.mark.parametrize("base", RECIPES)
@pytest.mark.parametrize("at", [HOPPER, VLLM], ids=lambda at: at.runtime)
def test_everything_that_the_pools_must_share_is_said_and_equal(pair, base: str, at: Deployment) -> None:
    found = launch(*pair(base), at, at)
    assert found.ok and found.findings == []
    first, second = options(found.prefill), options(found.decode)
    page = "--page-size" if at.runtime == "sglang" else "--block-size"
    shared = ["--kv-cache-dtype", "--attention-backend", page]
    for flag in shared:
        assert first[flag] == second[flag]
        assert flag in reasons(found) or flag == "--attention-backend"
    assert first["--kv-cache-dtype"] in ("bf16", "bfloat16")
    different = {flag for flag in first if first[flag] != second.get(flag)}
    allowed = {"--port", "--disaggregation-mode", "--kv-transfer-config", "--disable-shared-experts-fusion"}
    assert different <= allowed
    assert first["--port"] != second["--port"]
    assert "/model" in found.prefill and "/model" in found.decode
    mounts = [note for note in found.notes if note.flag == "/model"]
    assert [note.pool for note in mounts] == ["prefill", "decode"]
    assert all(str(folder) in note.reason for folder, note in zip(pair(base), mounts, strict=True))


def test_every_flag_that_is_not_a_place_has_a_reason(pair) -> None:
    places = {"--host", "--port", "--model-path", "--tp-size", "--tensor-parallel-size", "--served-model-name",
              "--disaggregation-mode", "--disaggregation-bootstrap-port", "--speculative-num-steps",
              "--speculative-eagle-topk", "--speculative-num-draft-tokens"}  # fmt: skip
    for at in (HOPPER, VLLM):
        for base in RECIPES:
            at = replace(at, mtp=True)
            found = launch(*pair(base, "mtp"), at, at, Where(served_name="glm", max_model_len=2048))
            assert found.ok
            said = reasons(found)
            for argv in (found.prefill, found.decode):
                flags = {flag for flag in options(argv) if flag not in places}
                if "--dsa-prefill-backend" in flags:
                    flags -= {"--attention-backend"}
                assert flags <= said.keys(), flags - said.keys()


def test_sglang_serves_shared_experts_apart_where_formats_differ(pair) -> None:
    found = launch(*pair("tiny-glm4"), HOPPER, HOPPER)
    assert "--disable-shared-experts-fusion" not in found.prefill  # all FP8: fused is right
    assert "--disable-shared-experts-fusion" in found.decode  # INT4 experts, BF16 shared ones
    (note,) = [note for note in found.notes if note.flag == "--disable-shared-experts-fusion"]
    assert note.pool == "decode"
    assert "--disable-shared-experts-fusion" not in launch(*pair("tiny-kimi"), HOPPER, HOPPER).decode


def test_pools_of_vllm(pair) -> None:
    where = Where(prefill_host="10.0.0.1", decode_host="10.0.0.2", transfer="nixl", served_name="k", max_model_len=99)
    found = launch(*pair("tiny-kimi"), VLLM, VLLM, where)
    assert found.prefill[:6] == [
        "env", "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT=5600", "vllm", "serve", "/model"
    ]  # fmt: skip
    assert found.decode[1:3] == ["VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.2", "VLLM_NIXL_SIDE_CHANNEL_PORT=5601"]
    config = json.loads(options(found.prefill)["--kv-transfer-config"])
    assert config == {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    assert options(found.decode)["--max-model-len"] == "99"
    assert found.router == [] and "proxy" in reasons(found)
    found = launch(*pair("tiny-kimi"), VLLM, VLLM, Where(transfer="mooncake"))
    config = json.loads(options(found.decode)["--kv-transfer-config"])
    assert config == {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"}
    assert found.prefill[1] == "VLLM_MOONCAKE_BOOTSTRAP_PORT=8998"


def test_pools_of_sglang(pair) -> None:
    where = Where(prefill_host="10.0.0.1", decode_host="10.0.0.2", transfer="mooncake", bootstrap_port=9001)
    found = launch(*pair("tiny-glm5"), HOPPER, HOPPER, where)
    first, second = options(found.prefill), options(found.decode)
    assert (first["--disaggregation-mode"], second["--disaggregation-mode"]) == PHASES
    assert first["--disaggregation-transfer-backend"] == "mooncake"
    assert (first["--dsa-prefill-backend"], second["--dsa-decode-backend"]) == ("flashmla_sparse", "fa3")
    start = found.router.index("--prefill")
    assert found.router[start + 1 : start + 3] == ["http://10.0.0.1:30000", "9001"]
    assert options(found.router)["--decode"] == "http://10.0.0.2:30001"


def test_fp8_where_it_is_asked_for_in_one_pool_is_in_both(pair) -> None:
    found = launch(*pair("tiny-glm5"), HOPPER, replace(HOPPER, kv_dtype="fp8"))
    for argv in (found.prefill, found.decode):
        assert options(argv)["--kv-cache-dtype"] == "fp8_e4m3"
        assert options(argv)["--dsa-prefill-backend"] == options(argv)["--dsa-decode-backend"] == "flashmla_kv"
    assert [note.pool for note in found.notes if note.reason.startswith("fp8 is given as fp8_e4m3: ")] == ["decode"]


@pytest.mark.parametrize(
    ("base", "at", "asked", "said"),
    [
        ("tiny-kimi", VLLM, "fp8", "fp8 is given as fp8_e4m3: "),
        ("tiny-kimi", VLLM, "fp8_e4m3", ""),
        ("tiny-kimi", VLLM, "auto", ""),
        ("tiny-kimi", HOPPER, "bfloat16", "bfloat16 is given as bf16: "),
    ],
)
def test_a_kv_dtype_under_another_name_is_told(pair, base: str, at: Deployment, asked: str, said: str) -> None:
    found = launch(*pair(base), *[replace(at, kv_dtype=asked)] * 2)
    told = [note for note in found.notes if "is given as" in note.reason]
    assert [(note.pool, note.reason.startswith(said)) for note in told] == ([("both", True)] if said else [])


def test_fp8_of_sparse_attention_is_told_by_its_rows(tmp_path: Path) -> None:
    """On vLLM "fp8" is rows of 656 bytes or of 576, by the card."""
    found = launch(*planned_pair("zai-org/GLM-5.2", tmp_path), *[replace(VLLM, tp=8, kv_dtype="fp8")] * 2)
    assert options(found.decode)["--kv-cache-dtype"] == "fp8_ds_mla"
    (note,) = [note for note in found.notes if "is given as" in note.reason]
    assert "fp8 is given as fp8_ds_mla" in note.reason and "656" in note.reason


@pytest.mark.parametrize("at", [HOPPER, VLLM], ids=lambda at: at.runtime)
def test_notes_speak_of_the_runtime_that_is_started(pair, at: Deployment) -> None:
    words = " ".join(note.reason for note in launch(*pair("tiny-kimi"), at, at).notes)
    assert ("NIXL" in words) == (at.runtime == "vllm")
    assert ("vLLM" in words) <= (at.runtime == "vllm") and ("SGLang" in words) <= (at.runtime == "sglang")


def test_code_of_the_checkpoint_is_named(pair, tmp_path: Path) -> None:
    folders = tmp_path / "prefill", tmp_path / "decode"
    for made, folder in zip(pair("tiny-kimi"), folders, strict=True):
        shutil.copytree(made, folder)
        (folder / "tokenization_kimi.py").write_text("x = 1\n")
    for at in (HOPPER, VLLM):
        found = launch(*folders, at, at)
        assert "--trust-remote-code" in found.prefill and "--trust-remote-code" in found.decode
        assert "read them" in reasons(found)["--trust-remote-code"]
        assert "--trust-remote-code" not in launch(*pair("tiny-kimi"), at, at).prefill


REFUSED: dict[str, tuple[str, Deployment, Deployment, str]] = {
    "a rule about the artifact": ("tiny-glm5", replace(HOPPER, tp=8), HOPPER, "T"),
    "a rule about the pair": ("tiny-kimi", replace(HOPPER, kv_dtype="bfloat16"), replace(HOPPER, kv_dtype="fp8"), "D2"),
    "runtimes": ("tiny-kimi", HOPPER, VLLM, "D3"),
    "mtp without a layer": ("tiny-kimi", replace(VLLM, mtp=True), replace(VLLM, mtp=True), "D6"),
    "no kernel": ("tiny-glm5", replace(VLLM, sm=100), replace(VLLM, sm=100), "K5"),
    "a kernel of another card": ("tiny-kimi", replace(HOPPER, attention_backend="trtllm_mla"), HOPPER, "K5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_pair_with_a_fault_gets_no_command_line(pair, name: str) -> None:
    base, first, second, rule = REFUSED[name]
    found = launch(*pair(base), first, second)
    assert not found.ok and (found.prefill, found.decode, found.router, found.notes) == ([], [], [], [])
    assert any(finding.rule.startswith(rule) and finding.severity != "warning" for finding in found.findings)


def test_a_changed_artifact_gets_no_command_line(pair, tmp_path: Path) -> None:
    prefill, decode = pair("tiny-glm5")
    shutil.copytree(decode, tmp_path / "decode")
    config = json.loads((tmp_path / "decode" / "config.json").read_text())
    (tmp_path / "decode" / "config.json").write_text(json.dumps(config | {"index_topk": 64}))
    found = launch(prefill, tmp_path / "decode", HOPPER, HOPPER)
    assert not found.ok and found.prefill == [] and {finding.rule for finding in found.findings} == {"D1"}


def test_what_no_runtime_can_have(pair) -> None:
    with pytest.raises(UsageError, match="spreads experts over all ranks or none"):
        launch(*pair("tiny-kimi"), replace(VLLM, tp=4, ep=2), VLLM)
    with pytest.raises(UsageError, match="nixl and mooncake"):
        Where(transfer="carrier pigeon")
    for mount in ("model", "/mo del", "/a:ro", ""):
        with pytest.raises(UsageError, match="absolute path"):
            Where(mount=mount)
    with pytest.raises(UsageError, match="kv dtype 'fp7' is unknown"):
        Deployment("vllm", kv_dtype="fp7")


@pytest.mark.parametrize("host", ["a b;c", "", "-x", "http://a", "a:80", "a/b", "a..b", "$(id)"])
def test_hosts_that_are_none(host: str) -> None:
    with pytest.raises(UsageError, match=r"decode host .* is no address"):
        Where(decode_host=host)


def test_hosts_that_are(pair) -> None:
    Where(prefill_host="node-1.cluster.local", decode_host="pool_2")
    router = launch(*pair("tiny-kimi"), HOPPER, HOPPER, Where(prefill_host="fd00::1", decode_host="10.0.0.2")).router
    assert router[router.index("--prefill") + 1] == "http://[fd00::1]:30000"
    assert options(router)["--decode"] == "http://10.0.0.2:30001"


@pytest.mark.parametrize("at", [HOPPER, VLLM], ids=lambda at: at.runtime)
def test_a_text_longer_than_the_models_positions(pair, at: Deployment) -> None:
    assert launch(*pair("tiny-kimi"), at, at, Where(max_model_len=2048)).ok
    with pytest.raises(UsageError, match=r"2,049: the prefill checkpoint has positions for 2,048 tokens"):
        launch(*pair("tiny-kimi"), at, at, Where(max_model_len=2049))


def test_positions_that_rope_scaling_stretches(pair, tmp_path: Path) -> None:
    """YaRN as Kimi-K2 has it: what it stretches to, from the positions it was trained with."""
    folders = tmp_path / "prefill", tmp_path / "decode"
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    for made, folder in zip(pair("tiny-kimi"), folders, strict=True):
        shutil.copytree(made, folder)
        config = json.loads((folder / "config.json").read_text()) | {"rope_scaling": scaling, "rope_parameters": None}
        (folder / "config.json").write_text(json.dumps(config))
    assert launch(*folders, HOPPER, HOPPER, Where(max_model_len=8192)).ok
    with pytest.raises(UsageError, match="positions for 8,192 tokens"):
        launch(*folders, HOPPER, HOPPER, Where(max_model_len=8193))


def test_16_bits_have_two_names(pair) -> None:
    assert Deployment("sglang", kv_dtype="bf16") == Deployment("sglang", kv_dtype="bfloat16")


def test_findings_of_a_pool_say_which(pair, tmp_path: Path) -> None:
    prefill, decode = pair("tiny-kimi")
    shutil.copytree(decode, tmp_path / "decode")
    config = json.loads((tmp_path / "decode" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64
    (tmp_path / "decode" / "config.json").write_text(json.dumps(config))
    found = launch(prefill, tmp_path / "decode", HOPPER, HOPPER)
    assert {(f.rule, f.subject.partition(": ")[0]) for f in found.findings} == {("P2", "decode")}


def model(name: str) -> Model:
    return identify(sparse.config_of(name))


SETTLED: dict[str, tuple[str, Deployment, Deployment, tuple[str, str], tuple[str, str], int | None]] = {
    # model, pools as asked for -> backends, KV dtype strings, page of both
    "GLM-5.2, two cards, FP8, SGLang": (
        "zai-org/GLM-5.2",
        replace(HOPPER, kv_dtype="fp8", tp=8),
        replace(HOPPER, kv_dtype="fp8", tp=8, sm=100),
        ("flashmla_kv", "flashmla_kv"),
        ("fp8_e4m3", "fp8_e4m3"),
        64,
    ),
    "GLM-5.2, Blackwell, FP8, SGLang": (
        "zai-org/GLM-5.2",
        replace(HOPPER, kv_dtype="fp8", tp=8, sm=100),
        replace(HOPPER, kv_dtype="auto", tp=4, sm=100),
        ("trtllm", "trtllm"),
        ("fp8_e4m3", "fp8_e4m3"),
        64,
    ),
    "GLM-5.2, two cards, FP8, vLLM": (
        "zai-org/GLM-5.2",
        replace(VLLM, kv_dtype="fp8", tp=8),
        replace(VLLM, kv_dtype="fp8", tp=8, sm=100),
        ("FLASHMLA_SPARSE", "FLASHMLA_SPARSE"),
        ("fp8_ds_mla", "fp8_ds_mla"),
        64,
    ),
    "GLM-5.2, two cards, bfloat16, vLLM": (
        "zai-org/GLM-5.2",
        replace(VLLM, tp=8),
        replace(VLLM, tp=8, sm=100),
        ("FLASHMLA_SPARSE", "FLASHMLA_SPARSE"),
        ("bfloat16", "bfloat16"),
        64,
    ),
    "GLM-5.2, heads of a rank, vLLM": (
        "zai-org/GLM-5.2",
        replace(VLLM, tp=8, sm=100),
        replace(VLLM, tp=2, sm=100),
        ("FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE"),
        ("bfloat16", "bfloat16"),
        32,
    ),
    "Kimi, two cards, vLLM": (
        "moonshotai/Kimi-K2.5",
        replace(VLLM, tp=8),
        replace(VLLM, tp=8, sm=100),
        ("TRITON_MLA", "TRITON_MLA"),
        ("bfloat16", "bfloat16"),
        16,
    ),
    "Kimi, two cards, SGLang": (
        "moonshotai/Kimi-K2.5",
        replace(HOPPER, tp=8),
        replace(HOPPER, tp=8, sm=100),
        ("fa3", "trtllm_mla"),
        ("bf16", "bf16"),
        64,
    ),
    "GLM-4.7, two cards, vLLM": (
        "zai-org/GLM-4.7",
        replace(VLLM, tp=8, kv_dtype="fp8"),
        replace(VLLM, tp=4, sm=100),
        ("FLASH_ATTN", "FLASH_ATTN"),
        ("fp8_e4m3", "fp8_e4m3"),
        16,
    ),
    "a page that one pool wants": (
        "zai-org/GLM-4.7",
        replace(HOPPER, tp=8, page_size=32),
        replace(HOPPER, tp=8),
        ("fa3", "fa3"),
        ("bf16", "bf16"),
        32,
    ),
    "K3 keeps states too": (
        "moonshotai/Kimi-K3",
        replace(VLLM, tp=8),
        replace(VLLM, tp=8),
        ("FLASH_ATTN_MLA", "FLASH_ATTN_MLA"),
        ("bfloat16", "bfloat16"),
        None,
    ),
}


@pytest.mark.parametrize("name", SETTLED)
def test_choices_that_serve_both_pools(name: str) -> None:
    release, first, second, backends, dtypes, page = SETTLED[name]
    found = model(release)
    pools = settle((found, found), (first, second))
    layouts = [kv_layout(found, at, phase) for at, phase in zip(pools, PHASES, strict=True)]
    assert tuple(layout.backend for layout in layouts) == backends
    assert tuple(layout.dtype for layout in layouts) == dtypes
    assert [layout.page for layout in layouts] == [page, page] and [at.page_size for at in pools] == [page, page]
    assert [layout.refusal for layout in layouts] == ["", ""]
    assert layouts[0].row_bytes == layouts[1].row_bytes
