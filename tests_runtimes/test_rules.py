"""The static rules against the runtime itself: what each broken artifact does to its own loader, and what that misses.

A rule that says "error" must meet a refusal, one that says "silent" or "warning" none: then the runtime takes what
`check` refuses. Where something is lost, the account of the dry load shows it although the runtime says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import broken
import pytest
from broken import ERROR, MUTATIONS, SILENT, Mutation

from phasefold.serving.runtimes.dry import Dry

RUNTIME = "vllm" if find_spec("vllm") else "sglang"

#: what a dry load by SGLang cannot tell, and why
UNASKED = {
    "groups of 16": "a kernel would refuse",
    "file of KV scales": "it is read when the cache is made",
    "fp8_e5m2 for a latent": "the cache is not made",
    "a page that is changed": "the cache is not made",
    "a method that is not judged": "no rule says what happens",
    "vision that is not listed": "vision towers have fixed sizes there",
}
#: rules whose silent faults lose a tensor or leave a parameter unset
LOSING = ("C2", "C3", "C4", "P10", "F4", "S6", "T1")


def answer_of(mutation: Mutation) -> str | None:
    """What the runtime of this environment must do; None where a dry load cannot tell."""
    if RUNTIME == "vllm":
        return mutation.vllm
    if mutation.rule == "C1" or mutation.name in UNASKED:  # damaged files do not open as a checkpoint at all
        return None
    return "refuses" if mutation.expect.get("sglang") == ERROR else "accepts"


ASKED = [mutation for mutation in MUTATIONS if answer_of(mutation)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


@pytest.mark.parametrize("mutation", ASKED, ids=lambda mutation: f"{mutation.rule} {mutation.name}")
def test_the_runtime_does_what_the_rule_says(
    ask: Callable[..., Dry], bases: Path, tmp_path: Path, mutation: Mutation
) -> None:
    folder = broken.apply(mutation, broken.make_base(mutation.base, bases), tmp_path / "broken")
    arguments = {"tp": mutation.at.get("tp", 1)}
    if RUNTIME == "sglang":
        arguments["disable_shared_experts_fusion"] = not mutation.at.get("shared_fusion", False)
    dry = ask(folder, **arguments)
    assert ("refuses" if dry.refused else "accepts") == answer_of(mutation), dry
    if mutation.expect.get(RUNTIME) == SILENT and mutation.rule in LOSING:
        assert dry.not_taken or dry.unwritten


def test_nearly_all_are_asked() -> None:
    assert len(MUTATIONS) - len(ASKED) <= 16
