"""vLLM's own argument parser and its choice of backends against what `launch` and `kv_layout` say of them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pairs import RECIPES, config_only, make_pair, planned_pair

from phasefold.families import Model, identify
from phasefold.serving.deployment import Deployment
from phasefold.serving.kv_layout import PHASES, is_dsa, is_mla, kv_layout
from phasefold.serving.launch import Launch, Where, launch

MODELS = ("moonshotai/Moonlight-16B-A3B", "zai-org/GLM-4.5", "zai-org/GLM-4.7-Flash", "zai-org/GLM-5.2")
WORKER = Path(__file__).with_name("ask_vllm.py")


def case(argv: list[str], model: Model) -> dict[str, Any]:
    parts = [part for part in model.cache()[0].parts if part.name != "index_k"]
    head = sum(part.width for part in parts) if is_mla(model) else parts[0].width
    return {"argv": argv, "head": head, "mla": is_mla(model), "dsa": is_dsa(model)}


def ask(cases: list[dict[str, Any]], sm: int) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(WORKER), str(sm)], input=json.dumps(cases), capture_output=True, text=True
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")), None)
    assert line, done.stderr[-3000:]
    return json.loads(line.removeprefix("ANSWERS "))


@pytest.mark.parametrize("sm", [90, 100])
def test_backend_page_and_dtype_are_vllms_own_choice(tmp_path: Path, sm: int) -> None:
    cases, layouts = [], []
    dtypes = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla", "fp8_e5m2")
    for name in MODELS:
        folder, config = config_only(name, tmp_path)
        model = identify(config)
        for tp, dtype, page in itertools.product((1, 4), dtypes, (None, 16, 64)):
            argv = [str(folder), "--kv-cache-dtype", dtype, "--tensor-parallel-size", str(tp)]
            argv += ["--max-model-len", "4096"] + (["--block-size", str(page)] if page else [])
            cases.append(case(argv, model))
            layouts.append(kv_layout(model, Deployment("vllm", tp=tp, sm=sm, kv_dtype=dtype, page_size=page), "decode"))
    refused = 0
    for asked, answer, layout in zip(cases, ask(cases, sm), layouts, strict=True):
        if "error" in answer:
            assert layout.refusal, (asked, answer["error"][-500:])
            refused += 1
        else:
            assert not layout.refusal, (asked, layout)
            assert (answer["chosen"], answer["page"]) == (layout.backend, layout.page), asked
            if layout.dtype != "fp8_ds_mla":  # vLLM gives it that name when it builds the layer
                assert answer["cache_dtype"] == layout.dtype, asked
    assert 0 < refused < len(cases) // 2


def refer(folders: tuple[Path, Path], found: Launch, seen: tuple[Path, Path]) -> list[dict[str, Any]]:
    """The two command lines as cases, with each pool's artifact at the path where this machine has it."""
    cases = []
    for folder, argv, path in zip(folders, (found.prefill, found.decode), seen, strict=True):
        start = argv.index("serve") + 1
        assert argv[0] == "env" and argv[start] == "/model"
        cases.append(case([str(path), *argv[start + 1 :]], identify(json.loads((folder / "config.json").read_text()))))
    return cases


@pytest.mark.parametrize("sm", [90, 100])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_our_arguments_mean_what_we_meant(tmp_path: Path, sm: int, kv_dtype: str) -> None:
    cases: list[dict[str, Any]] = []
    expected: list[tuple[Any, ...]] = []
    for base in RECIPES:
        for mtp in (False, True):
            folders = make_pair(base, tmp_path / f"{base}-{mtp}", "mtp" if mtp else "bf16")
            at = Deployment("vllm", sm=sm, kv_dtype=kv_dtype, mtp=mtp)
            where = Where(served_name="pair", max_model_len=1024, transfer="mooncake" if mtp else "nixl")
            found = launch(*folders, at, at, where)
            if base == "tiny-glm5" and (sm, kv_dtype) != (90, "auto"):
                assert not found.ok and found.prefill == []  # no other sparse kernel takes its narrow rows
                continue
            assert found.ok and found.at, found.findings
            cases += refer(folders, found, folders)
            for folder, phase, settled in zip(folders, PHASES, found.at, strict=True):
                model = identify(json.loads((folder / "config.json").read_text()))
                expected.append((folder, phase, mtp, kv_layout(model, settled, phase)))
    for (folder, phase, mtp, layout), answer in zip(expected, ask(cases, sm), strict=True):
        assert "error" not in answer, answer["error"][-800:]
        assert answer["model"] == str(folder) and answer["host"] == "0.0.0.0"
        assert answer["port"] == {"prefill": 30000, "decode": 30001}[phase]
        assert (answer["tp"], answer["ep"]) == (1, False)
        assert answer["kv_cache_dtype"] == layout.dtype == ("bfloat16" if kv_dtype == "auto" else "fp8_e4m3")
        assert answer["block_size"] == answer["page"] == layout.page
        assert answer["backend"] == answer["chosen"] == layout.backend
        assert answer["kv_connector"] == ("MooncakeConnector" if mtp else "NixlConnector")
        assert answer["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[phase]
        assert answer["speculative"] == ({"method": "mtp", "num_speculative_tokens": 1} if mtp else None)
        assert (answer["served_model_name"], answer["max_model_len"]) == (["pair"], 1024)


def test_a_published_pair_on_many_cards(tmp_path: Path) -> None:
    """Moonlight, FP8 over 2 with whole experts and INT4 on 1; and the hash that NIXL compares, of vLLM's own making."""
    folders = planned_pair("moonshotai/Moonlight-16B-A3B", tmp_path)
    found = launch(*folders, Deployment("vllm", tp=2, ep=2, sm=100), Deployment("vllm", sm=100))
    assert found.ok, found.findings
    mount = tmp_path / "model"
    hashes, ranks = [], []
    for folder, asked in zip(folders, refer(folders, found, (mount, mount)), strict=True):
        mount.unlink(missing_ok=True)
        mount.symlink_to(folder)
        (answer,) = ask([asked], 100)
        assert "error" not in answer, answer["error"][-800:]
        hashes.append(answer["hash"])
        ranks.append((answer["tp"], answer["ep"]))
    assert hashes[0] == hashes[1]
    assert ranks == [(2, True), (1, False)]
    wrong = [word if word != "bfloat16" else "fp8" for word in asked["argv"]]
    moved = [str(folders[1]), *asked["argv"][1:]]
    answers = ask([asked | {"argv": wrong}, asked | {"argv": moved}], 100)
    assert len({hashes[0], *(answer["hash"] for answer in answers)}) == 3


def test_published_models_on_both_cards_share_a_backend(tmp_path: Path) -> None:
    """GLM-5.2 with FP8 rows: one --attention-backend and one dtype that both generations take."""
    folder, config = config_only("zai-org/GLM-5.2", tmp_path)
    model = identify(config)
    argv = [str(folder), "--kv-cache-dtype", "fp8_ds_mla", "--attention-backend", "FLASHMLA_SPARSE"]
    for sm in (90, 100):
        (answer,) = ask([case([*argv, "--block-size", "64", "--tensor-parallel-size", "8"], model)], sm)
        assert (answer["chosen"], answer["page"]) == ("FLASHMLA_SPARSE", 64)
