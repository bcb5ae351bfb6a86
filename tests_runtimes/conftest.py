"""Source checkpoints, artifacts, and the runtime of this environment to be asked for dry loads of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import variants
from faults import edit, vision_names

from phasefold.formats.checkpoint import open_checkpoint
from phasefold.quantize.convert import convert
from phasefold.quantize.plan import make_plan
from phasefold.recipes import load
from phasefold.serving.runtimes.dry import Dry

WORKER = Path(__file__).with_name("dry_worker.py")
RUNTIME = "vllm" if find_spec("vllm") else "sglang"


@pytest.fixture(scope="session")
def ask() -> Iterator[Callable[..., Dry]]:
    """Dry loads by one worker, on Hopper."""
    worker = subprocess.Popen(
        [sys.executable, str(WORKER), RUNTIME, "90"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def load_in_worker(folder: Path, **arguments: Any) -> Dry:
        print(json.dumps([str(folder), arguments]), file=worker.stdin, flush=True)
        for line in worker.stdout:
            assert not line.startswith("FAILED"), f"no answer for {folder}: see stderr"
            if line.startswith("ANSWER "):
                return Dry(**json.loads(line.removeprefix("ANSWER ")))
        raise AssertionError("the worker ended")

    with worker:
        yield load_in_worker
        worker.stdin.close()


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A source checkpoint; `lite` is GLM-4.7-Flash with random weights."""
    root = tmp_path_factory.mktemp("sources")

    def get(base: str, kind: str) -> Path:
        folder = root / f"{base}-{kind}"
        if folder.exists():
            return folder
        if base != "lite":
            variants.variant(kind, base, folder)
        else:
            tensors, config = variants.load(variants.EXAMPLES / "tiny-glm5")
            config = {key: value for key, value in config.items() if "index" not in key}
            config |= {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}
            tensors = variants.random_from(config)
            if kind == "fp8-block":
                tensors, config = variants.fp8_block(tensors, config)
            variants.save(folder, tensors, config)
        if "k25" in kind:
            edit(folder, vision_names)
        return folder

    return get


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory, source: Callable[[str, str], Path]) -> Callable[..., Path]:
    """What a recipe makes of a source. changes: of the recipe."""
    root = tmp_path_factory.mktemp("artifacts")

    def get(base: str, kind: str, recipe: str, **changes: Any) -> Path:
        folder = root / "-".join([base, kind, recipe, *map(str, changes.values())])
        if not folder.exists():
            convert(make_plan(open_checkpoint(source(base, kind)), replace(load(recipe), **changes)), folder)
        return folder

    return get
