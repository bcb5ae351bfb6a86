"""`load`: transformers takes our artifacts in a process of its own; that process may hang, crash or chatter."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
import variants
from transformers import AutoModelForCausalLM

from phasefold.errors import CheckpointError, LoadError, UsageError
from phasefold.formats.checkpoint import open_checkpoint
from phasefold.quantize.convert import convert
from phasefold.quantize.plan import make_plan
from phasefold.recipes import load as recipe
from phasefold.serving.runtimes import load as serving
from phasefold.serving.runtimes.versions import PROVEN, proven

PROMPT = "Return the sum of all elements along the given axis."


def made(source: Path, out: Path, name: str) -> Path:
    convert(make_plan(open_checkpoint(source), recipe(name)), out)
    return out


@pytest.mark.parametrize(
    ("base", "name"),
    [("tiny-kimi", "kimi-decode-int4"), ("tiny-glm4", "glm-prefill-fp8"), ("tiny-glm5", "glm-decode-int4")],
)
@pytest.mark.filterwarnings("ignore")  # of transformers, about itself
def test_transformers_generates_what_the_decoded_weights_do(tmp_path: Path, base: str, name: str) -> None:
    artifact = made(variants.EXAMPLES / base, tmp_path / "artifact", name)
    loaded = serving.load(artifact, "transformers", prompt=PROMPT, tokens=8)
    assert loaded.ok, loaded
    plain = made(artifact, tmp_path / "bf16", "bf16")
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16, attn_implementation="eager")
    out = model.generate(torch.tensor([loaded.prompt_ids]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert loaded.token_ids == out[0, len(loaded.prompt_ids) :].tolist()
    assert loaded.text and loaded.version and loaded.wall_seconds > 0
    assert loaded.proven == proven("transformers", loaded.version)


def test_kimi_k25_is_loaded_whole(tmp_path: Path) -> None:
    """text_config of model_type kimi_k2 (DeepSeek-V3's), a vision tower with the hub's own keys."""
    source = variants.save(tmp_path / "k25", *variants.as_k25(*variants.load(variants.EXAMPLES / "tiny-kimi")))
    whole = serving.load(made(source, tmp_path / "int4", "kimi-decode-int4"), "transformers", prompt=PROMPT, tokens=8)
    assert whole.ok, whole
    bare = made(variants.EXAMPLES / "tiny-kimi", tmp_path / "bare", "kimi-decode-int4")
    assert whole.token_ids == serving.load(bare, "transformers", prompt=PROMPT, tokens=8).token_ids


def test_an_mtp_layer_is_left_out_and_told(tmp_path: Path) -> None:
    source = variants.save(tmp_path / "mtp", *variants.with_mtp(*variants.load(variants.EXAMPLES / "tiny-glm5")))
    loaded = serving.load(source, "transformers", tokens=2)
    assert loaded.ok and "transformers has no MTP layer" in loaded.notes[0]


def test_ragged_fp8_blocks_are_a_gap_of_transformers(tmp_path: Path) -> None:
    """160 rows in two blocks: 5.24 decodes them as two blocks of 80, and does not say so. 576 in five: it refuses."""
    artifact = made(variants.EXAMPLES / "tiny-kimi", tmp_path / "fp8", "kimi-prefill-fp8")
    loaded = serving.load(artifact, "transformers", tokens=2)
    assert not loaded.ok and not loaded.missing and not loaded.unexpected
    assert "ragged edge" in loaded.gap and loaded.version in loaded.gap
    config = variants.load(variants.EXAMPLES / "tiny-kimi")[1] | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    config |= {"num_hidden_layers": 2, "head_dim": 64, "qk_head_dim": 96}
    wide = variants.save(tmp_path / "wide", variants.random_from(config), config)
    loaded = serving.load(made(wide, tmp_path / "wide8", "kimi-prefill-fp8"), "transformers", tokens=2)
    assert loaded.refused and "576 rows" in loaded.gap and not loaded.ok


def test_two_groups_are_a_gap_of_transformers(tmp_path: Path) -> None:
    artifact = made(variants.EXAMPLES / "tiny-glm4", tmp_path / "two", "glm-decode-int4-fp8")
    loaded = serving.load(artifact, "transformers", tokens=2)
    assert not loaded.ok and "several groups" in loaded.gap and loaded.refused


def test_a_missing_expert_is_no_gap(tmp_path: Path) -> None:
    artifact = made(variants.EXAMPLES / "tiny-kimi", tmp_path / "int4", "kimi-decode-int4")
    tensors, config = variants.load(artifact)
    lacking = {name: t for name, t in tensors.items() if "layers.2.mlp.experts.3.gate_proj" not in name}
    loaded = serving.load(variants.save(tmp_path / "lacking", lacking, config), "transformers", tokens=2)
    assert not loaded.ok and not loaded.gap
    assert loaded.missing == ["model.layers.2.mlp.experts.gate_up_proj"]
    assert any("MISSING" in line for line in loaded.log)


def test_a_missing_scale_is_told_though_transformers_does_not(tmp_path: Path) -> None:
    artifact = made(variants.EXAMPLES / "tiny-kimi", tmp_path / "fp8", "kimi-prefill-fp8")
    tensors, config = variants.load(artifact)
    del tensors["model.layers.1.self_attn.o_proj.weight_scale_inv"]
    loaded = serving.load(variants.save(tmp_path / "lacking", tensors, config), "transformers", tokens=2)
    assert not loaded.ok and "o_proj.weight: FP8 weight without its scale" in loaded.missing[0]


def test_no_such_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        serving.load(tmp_path / "nowhere", "transformers")


def script(folder: Path, text: str) -> Path:
    """An interpreter that runs `text` in the worker's place; `job` is what the worker is given."""
    path = folder / "python"
    path.write_text(
        f"#!{sys.executable}\nimport json, os, signal, subprocess, sys, time\njob = json.load(sys.stdin)\n{text}"
    )
    path.chmod(0o755)
    return path


ANSWER = 'answer = {"version": "9", "mode": "real", "text": "x", "wall_seconds": 1, "peak_rss_bytes": 1}\n'
WRITE = 'open(job["result"], "w").write(json.dumps(answer))\n'


def ended(pid: int) -> bool:
    """Whether a process is gone, or nobody has asked for its status yet, within a few seconds."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_a_worker_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    hang = f"""
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
print("still at it", flush=True)
time.sleep(600)
"""
    with pytest.raises(LoadError, match=r"not done after 2 s, so it was ended; its last lines: still at it"):
        serving.load(tmp_path, "vllm", python=script(tmp_path, hang), timeout=2)
    assert ended(int((tmp_path / "pid").read_text()))


def test_what_a_worker_leaves_behind_is_ended(tmp_path: Path) -> None:
    leave = f"""
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
"""
    loaded = serving.load(tmp_path, "vllm", python=script(tmp_path, leave + ANSWER + WRITE))
    assert loaded.ok and not loaded.proven
    assert ended(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL"])
def test_a_worker_that_is_killed_is_told_as_such(tmp_path: Path, name: str) -> None:
    die = f'print("loading shard 3", file=sys.stderr, flush=True)\nos.kill(os.getpid(), signal.{name})\n'
    with pytest.raises(LoadError) as caught:
        serving.load(tmp_path, "vllm", python=script(tmp_path, die))
    assert name in str(caught.value) and "last lines: loading shard 3" in str(caught.value)
    assert ("memory runs out" in str(caught.value)) == (name == "SIGKILL")


def test_a_worker_that_ends_without_an_answer(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="ended with status 7 and no answer"):
        serving.load(tmp_path, "vllm", python=script(tmp_path, "sys.exit(7)\n"))


def test_noise_on_stdout_does_not_matter_and_warnings_are_found(tmp_path: Path) -> None:
    noise = """
print('{"version": "no"}' * 20000)
print("WARNING 11-29 loader.py: Parameter layers.3.gate not found in params_dict")
print("WARNING 11-29 loader.py: Parameter layers.3.gate not found in params_dict")
print("WARNING 11-29 sampler.py: the sun is low")
"""
    loaded = serving.load(tmp_path, "vllm", python=script(tmp_path, noise + ANSWER + WRITE))
    assert (loaded.version, loaded.text) == ("9", "x")
    assert loaded.log == ["WARNING 11-29 loader.py: Parameter layers.3.gate not found in params_dict"]


def test_memory_of_a_worker_and_its_processes_is_seen(tmp_path: Path) -> None:
    hold = "held = bytearray(os.urandom(1 << 20)) * 120\nif os.fork() == 0:\n    held = held[:]\n    time.sleep(600)\n"
    wait = "time.sleep(1)\n"
    loaded = serving.load(tmp_path, "vllm", python=script(tmp_path, hold + wait + ANSWER + WRITE))
    assert 240 << 20 < loaded.peak_rss_bytes < 400 << 20


def test_a_runtime_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    with pytest.raises(LoadError, match="`make runtimes`"):
        serving.load(tmp_path, "sglang")
    beside = tmp_path / "venv-sglang" / "bin" / "python"
    beside.parent.mkdir(parents=True)
    beside.touch()
    assert serving.find_python("sglang") == beside
    with pytest.raises(LoadError, match="cannot be started"):
        serving.load(tmp_path, "sglang")


def test_what_is_asked_must_make_sense(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="is no runtime"):
        serving.load(tmp_path, "llama.cpp")
    with pytest.raises(UsageError, match="has no mode 'reference'"):
        serving.load(tmp_path, "sglang", mode="reference")
    assert all(version and text for table in PROVEN.values() for version, text in table.items())


def test_a_tokenizer_that_is_code_is_not_run(tmp_path: Path) -> None:
    """As Kimi publishes it: ids of our own are continued, and a prompt is refused by name."""
    source = Path(shutil.copytree(variants.EXAMPLES / "tiny-kimi", tmp_path / "source"))
    (source / "tokenizer.json").unlink()
    auto = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (source / "tokenizer_config.json").write_text(json.dumps(auto))
    assert serving.load(source, "reference", tokens=2).text.replace(" ", "").isdigit()
    with pytest.raises(LoadError, match="tokenizer is code"):
        serving.load(source, "reference", prompt="def", tokens=2)
