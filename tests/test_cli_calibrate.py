"""`phasefold calibrate` as others script against it: keys, exit codes, a sentence for what is refused, clean ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import variants
from engines import TEXT

import phasefold.cli.draw as draw
from phasefold.formats.statistics import open_statistics

TINY = str(variants.EXAMPLES / "tiny-glm5")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 40)
    return str(path)


def run(*words: str, code: int = 0) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "phasefold", "calibrate", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_what_others_rely_on(tmp_path: Path, text: str) -> None:
    words = (TINY, "--text", text, "--out", str(tmp_path / "stats"), "--tokens", "1300", "--length", "64")
    done = run(*words, "--hessians", "attention.o, routed_expert", "--json")
    told = json.loads(done.stdout)
    assert done.stderr == ""
    assert told["tokens"] == 1280 and told["layers"] == 4 and told["sequences"] == 20
    assert told["heldout_tokens"] == 128 and told["left_over_tokens"] == 20 and told["resumed_layers"] == 0
    assert told["experts_seen"].keys() == {"min", "median", "max", "unseen"}
    assert told["experts_seen"]["max"] <= 1152 and told["experts_seen"]["min"] <= told["experts_seen"]["median"]
    assert [layer["layer"] for layer in told["kv"]] == [0, 1, 2, 3]
    for layer in told["kv"]:
        assert layer["parts"].keys() == {"kv_c", "k_pe", "index_k"}
        part = layer["parts"]["kv_c"]
        assert part["tokens"] == 1280 and 0 < part["rms"] < part["p99_9"] <= part["p99_99"] <= part["amax"]
    found = open_statistics(tmp_path / "stats")
    assert told["digest"] == found.digest
    assert found.about["options"] == {
        "dtype": "bfloat16", "device": "cpu", "batch": 32, "memory": 16_000_000_000, "all_experts": False,
        "hessians": ["attention.o", "routed_expert"],
    }  # fmt: skip
    assert found.hessian("model.layers.0.self_attn.o_proj") is not None
    again = run(*words, "--hessians", "routed_expert,attention.o")
    assert "4 of 4 layers were done before" in again.stdout and "1,280 tokens in 20 sequences of 64" in again.stdout
    assert "20 tokens behind the last whole sequence left out" in again.stdout and "kv_c" in again.stdout
    other = run(*words, code=1)
    assert "holds statistics of another job (options.hessians differs)" in other.stderr


def test_what_is_refused(tmp_path: Path, text: str) -> None:
    out = ("--out", str(tmp_path / "stats"))
    cases = [
        (("--text", text, "--length", "4096"), 2, "--length 4,096: this model's longest sequence is 2,048"),
        (("--text", text, "--hessians", "router"), 2, "--hessians router: this model has no matrices of that role"),
        (
            ("--text", text, "--hessians", "routed_expert", "--tokens", "448", "--length", "64"), 2,
            "of 7 sequences none is held out, the first would be the eighth",
        ),
        (("--text", text, "--device", "meta"), 2, "device 'meta': this torch cannot use it"),
        (("--text", text, "--device", "cuda:99"), 2, "device 'cuda:99': this torch cannot use it"),
        (("--text", text, "--memory", "1MB", "--length", "64"), 1, "--memory allows 0.00 GB"),
        (("--text", text, "--memory", "much"), 2, "'much' is no size"),
        (("--text", str(tmp_path / "no.txt")), 1, "no such file or folder"),
        (("--text", text, "--tokens", "1000"), 1, "1,000 tokens, less than one block of 2,048: --tokens asks for no"),
    ]  # fmt: skip
    for words, code, sentence in cases:
        done = run(TINY, *words, *out, code=code)
        assert sentence in " ".join(done.stderr.replace("│", " ").split()), done.stderr
    assert not (tmp_path / "stats").exists()


def test_models_that_cannot_be_run_are_named(tmp_path: Path, text: str) -> None:
    config = {
        "model_type": "kimi_linear", "hidden_size": 128, "num_hidden_layers": 2, "first_k_dense_replace": 1,
        "intermediate_size": 128, "moe_intermediate_size": 128, "num_experts": 2, "num_shared_experts": 1,
        "num_attention_heads": 4, "q_lora_rank": None, "kv_lora_rank": 128, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32, "v_head_dim": 32, "vocab_size": 256, "tie_word_embeddings": False,
        "linear_attn_config": {"num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4,
                               "kda_layers": [1], "full_attn_layers": [2]},
    }  # fmt: skip
    folder = variants.save(tmp_path / "linear", variants.random_from(config), config)
    done = run(str(folder), "--text", text, "--out", str(tmp_path / "stats"), code=1)
    assert "kimi_linear has linear attention, which keeps a state and no rows" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_cleanly_and_goes_on(tmp_path: Path, text: str, number: signal.Signals) -> None:
    out = tmp_path / "stats"
    words = (TINY, "--text", text, "--out", str(out), "--length", "64", "--batch", "1")
    command = [sys.executable, "-m", "phasefold", "calibrate", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not (out / ".work" / "state.json").exists() and time.monotonic() < deadline and running.poll() is None:
            time.sleep(0.01)
        running.send_signal(number)
        _, errors = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130, errors
    assert "interrupted; finished layers are kept" in errors and "Traceback" not in errors
    told = json.loads(run(*words, "--json").stdout)
    assert 1 <= told["resumed_layers"] < 4 and told["layers"] == 4


def test_progress_tells_layers_speed_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(draw.time, "monotonic", lambda: now)
    with draw.passes("calibrating", 4, 6000, quiet=False) as advance:
        assert advance is not None
        advance(6000.0)  # a layer was done before
        for seconds in (30, 30, 30):
            now += seconds
            advance(3000.0)
    assert capsys.readouterr().err == "calibrating: layer 3/4, 25 tokens/s, 2 min left\n"
    with draw.passes("calibrating", 4, 6000, quiet=True) as advance:
        assert advance is None
