"""SGLang's own argument parser and resolution, and its router's, against what `launch` and `kv_layout` say of them."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pairs import RECIPES, config_only, make_pair, planned_pair

from phasefold.families import identify
from phasefold.serving.deployment import Deployment
from phasefold.serving.kv_layout import PHASES, is_dsa, kv_layout
from phasefold.serving.launch import Where, launch

MODELS = ("moonshotai/Moonlight-16B-A3B", "zai-org/GLM-4.5", "zai-org/GLM-4.7-Flash", "zai-org/GLM-5.2")
WORKER = Path(__file__).with_name("ask_sglang.py")


def ask(cases: list[list[str]], sm: int) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(WORKER), str(sm)], input=json.dumps(cases), capture_output=True, text=True
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")), None)
    assert line, done.stderr[-3000:]
    return json.loads(line.removeprefix("ANSWERS "))


@pytest.mark.parametrize("sm", [90, 100])
def test_dtype_page_backend_and_row_are_sglangs_own_choice(tmp_path: Path, sm: int) -> None:
    cases, layouts = [], []
    dtypes = ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2", "fp8")
    for name in MODELS:
        folder, config = config_only(name, tmp_path)
        model = identify(config)
        backends = (None, "flashmla_kv", "trtllm") if is_dsa(model) else (None, "triton", "trtllm_mla")
        for phase, dtype, page, backend in itertools.product(PHASES, dtypes, (None, 16, 64), backends):
            argv = ["--model-path", str(folder), "--tp-size", "4", "--skip-tokenizer-init"]
            argv += ["--disaggregation-mode", phase, "--kv-cache-dtype", {"bfloat16": "bf16"}.get(dtype, dtype)]
            argv += ["--page-size", str(page)] if page else []
            if backend:
                argv += [f"--dsa-{phase}-backend" if is_dsa(model) else "--attention-backend", backend]
            at = Deployment("sglang", tp=4, sm=sm, kv_dtype=dtype, page_size=page, attention_backend=backend)
            cases.append(argv)
            layouts.append((phase, is_dsa(model), kv_layout(model, at, phase)))
    refused = 0
    for argv, answer, (phase, dsa, layout) in zip(cases, ask(cases, sm), layouts, strict=True):
        if "error" in answer:
            assert layout.refusal, (argv, answer["error"][-500:])
            refused += 1
        elif "kernels for DSA run on Blackwell" not in layout.refusal:  # the kernel says so, not the arguments
            assert not layout.refusal, (argv, layout)
            backend = answer[f"dsa_{phase}_backend"] if dsa else answer["attention_backend"]
            assert (answer["kv_cache_dtype"], answer["page_size"]) == (layout.dtype, layout.page), argv
            assert backend == layout.backend, argv
            assert answer.get("row_bytes", layout.row_bytes) == layout.row_bytes, argv
    assert 0 < refused < len(cases) // 2


@pytest.mark.parametrize("sm", [90, 100])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_our_arguments_mean_what_we_meant(tmp_path: Path, sm: int, kv_dtype: str) -> None:
    cases, expected = [], []
    for base in RECIPES:
        for mtp in (False, True):
            folders = make_pair(base, tmp_path / f"{base}-{mtp}", "mtp" if mtp else "bf16")
            at = Deployment("sglang", sm=sm, kv_dtype=kv_dtype, mtp=mtp)
            where = Where(served_name="pair", max_model_len=1024, transfer="mooncake" if mtp else "nixl")
            found = launch(*folders, at, at, where)
            assert found.ok and found.at, found.findings
            for folder, argv, phase, settled in zip(
                folders, (found.prefill, found.decode), PHASES, found.at, strict=True
            ):
                assert argv[:3] == ["python", "-m", "sglang.launch_server"]
                model = identify(json.loads((folder / "config.json").read_text()))
                cases.append([str(folder) if word == "/model" else word for word in argv[3:]])
                expected.append((folder, phase, mtp, settled, kv_layout(model, settled, phase), is_dsa(model), where))
    for (folder, phase, mtp, settled, layout, dsa, where), answer in zip(expected, ask(cases, sm), strict=True):
        assert "error" not in answer, answer["error"][-800:]
        assert answer["model_path"] == str(folder) and answer["host"] == "0.0.0.0"
        assert answer["port"] == {"prefill": 30000, "decode": 30001}[phase]
        assert (answer["tp_size"], answer["ep_size"]) == (1, 1)
        assert (answer["kv_cache_dtype"], answer["page_size"]) == (layout.dtype, layout.page)
        assert answer["attention_backend"] == ("dsa" if dsa else layout.backend)
        if dsa:
            assert answer[f"dsa_{phase}_backend"] == layout.backend
            assert answer["row_bytes"] == layout.row_bytes
        assert answer["disaggregation_mode"] == phase
        assert answer["disaggregation_transfer_backend"] == where.transfer
        assert answer["disaggregation_bootstrap_port"] == 8998
        assert answer["disable_shared_experts_fusion"] or settled.shared_fusion
        steps = (answer["speculative_num_steps"], answer["speculative_eagle_topk"])
        assert (answer["speculative_algorithm"], *steps) == (("EAGLE", 1, 1) if mtp else (None, None, None))
        assert answer["speculative_num_draft_tokens"] == (2 if mtp else None)
        assert (answer["served_model_name"], answer["context_length"]) == ("pair", 1024)


def test_a_published_pair_on_many_cards(tmp_path: Path) -> None:
    """Moonlight, FP8 over 2 with whole experts and INT4 on 1."""
    folders = planned_pair("moonshotai/Moonlight-16B-A3B", tmp_path)
    found = launch(*folders, Deployment("sglang", tp=2, ep=2), Deployment("sglang", kv_dtype="fp8"))
    assert found.ok, found.findings
    lines = zip(folders, (found.prefill, found.decode), strict=True)
    answers = ask([[str(folder) if word == "/model" else word for word in argv[3:]] for folder, argv in lines], 90)
    assert [(answer["tp_size"], answer["ep_size"]) for answer in answers] == [(2, 2), (1, 1)]
    assert {answer["kv_cache_dtype"] for answer in answers} == {"fp8_e4m3"}


def test_the_router_takes_our_arguments(tmp_path: Path) -> None:
    from sglang_router.router_args import RouterArgs

    folders = make_pair("tiny-glm4", tmp_path)
    where = Where(prefill_host="10.0.0.1", decode_host="10.0.0.2", bootstrap_port=9001, router_port=9000)
    found = launch(*folders, Deployment("sglang"), Deployment("sglang"), where)
    assert found.router[:3] == ["python", "-m", "sglang_router.launch_router"]
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    args = RouterArgs.from_cli_args(parser.parse_args(found.router[3:]), use_router_prefix=False)
    assert args.pd_disaggregation and args.prefill_urls == [("http://10.0.0.1:30000", 9001)]
    assert args.decode_urls == ["http://10.0.0.2:30001"]
    assert (args.host, args.port) == ("0.0.0.0", 9000)
