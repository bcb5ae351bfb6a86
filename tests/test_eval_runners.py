"""Checkpoints as runners: in memory against transformers, layer by layer against in memory, to the bit."""

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import variants
from calibrated import by_transformers, random_variant
from engines import artifact, one_thread  # noqa: F401  (autouse)

from phasefold.errors import CheckpointError, EvalError, LoadError, PlanError, UsageError
from phasefold.evals.batches import PIECE, _pieces, make_batches
from phasefold.evals.layered import Layered, _Plan
from phasefold.evals.runner import Runner, Sampling, score
from phasefold.evals.whole import Whole, open_runner
from phasefold.formats.checkpoint import Reader

BASES = ("tiny-kimi", "tiny-glm4", "tiny-glm5")
LENGTHS = (2, 40, 62, 17, 5, 41, 3, 18, 30)
LONG = (*LENGTHS, 300, 290, 300)  # past the 256 tokens that an indexer chooses
SHARED = {"indexer_types": ["full", "shared", "shared", "full"], "index_topk": 24}


def made(lengths: Sequence[int], seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Texts of random tokens, and from where each is scored: their second token, or a later one."""
    chance = random.Random(seed)
    texts = [[chance.randrange(1024) for _ in range(length)] for length in lengths]
    return texts, [1 if length % 2 else chance.randrange(1, length) for length in lengths]


def answers(runner: Runner, lengths: Sequence[int] = LENGTHS, told: list[int] | None = None) -> list[torch.Tensor]:
    """Logits of made texts, in order."""
    texts, firsts = made(lengths)
    found = dict(runner.logits(texts, firsts, (told if told is not None else []).append))
    assert sorted(found) == list(range(len(texts)))
    for number, logits in found.items():
        assert logits.shape == (len(texts[number]) - firsts[number], 1024) and logits.dtype == torch.float32
    return [found[number] for number in range(len(texts))]


def same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], what: str) -> None:
    """To the bit; else where they differ first, and by how much at most."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        where = (one != other).nonzero()
        if len(where) or one.shape != other.shape:
            most = float((one - other).abs().max())
            pytest.fail(f"{what}: text {number}, first at {where[0].tolist()}, by {most} at most")


def plan_of(runner: Layered, lengths: Sequence[int] = LENGTHS) -> _Plan:
    """How these texts would be run."""
    return runner._plan(make_batches(*made(lengths), runner._batch, runner._source.config))


def with_least(folder: Path, lengths: Sequence[int] = LENGTHS, work: Path | None = None, **options: Any) -> Layered:
    """With the least memory in which it can run the texts: experts one by one, hidden states in files."""
    runner = Layered(folder, work=work, **options)
    low, high = 0, runner._memory
    while low < high:
        runner._memory = (low + high) // 2
        try:
            plan_of(runner, lengths)
            high = runner._memory
        except LoadError:
            low = runner._memory + 1
    runner._memory = low
    return runner


@pytest.fixture(scope="module")
def shared(module_path: Path) -> Path:
    """tiny-glm5 with layers that take over what an indexer before them found, the last but one at second hand."""
    return random_variant(module_path / "shared", "tiny-glm5", **SHARED)


def folder_of(kind: str, base: str) -> Path:
    return variants.EXAMPLES / base if kind == "bf16" else artifact(base, kind)


# the two ways


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["bf16", "decode"])
def test_layer_by_layer_is_in_memory_to_the_bit(tmp_path: Path, base: str, dtype: str, kind: str) -> None:
    folder = variants.EXAMPLES / base if kind == "bf16" else artifact(base, kind)
    lengths, options = LONG if base == "tiny-glm5" else LENGTHS, {"dtype": dtype, "batch": 4}
    expected = answers(Whole(folder, **options), lengths)
    together = Layered(folder, **options)
    assert all(plan_of(together, lengths).whole) and not plan_of(together, lengths).on_disk
    same(answers(together, lengths), expected, "layers")
    together.close()
    apart = with_least(folder, lengths, tmp_path, **options)
    plan = plan_of(apart, lengths)
    assert plan.whole == [True, False, False, False] and plan.on_disk
    same(answers(apart, lengths), expected, "experts one by one, rows in files")
    apart.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_indices_that_layers_share(shared: Path, tmp_path: Path, dtype: str) -> None:
    """Texts shorter than the indexer's choice hand on fewer indices than the others."""
    options = {"dtype": dtype, "batch": 3}
    expected = answers(Whole(shared, **options))
    runner = Layered(shared, **options)
    assert plan_of(runner).carried == 24 and min(LENGTHS) < 24 < max(LENGTHS)
    same(answers(runner), expected, "layers")
    same(answers(runner), expected, "once more")
    apart = with_least(shared, work=tmp_path, **options)
    assert plan_of(apart).on_disk
    same(answers(apart), expected, "experts one by one")
    model = by_transformers(shared, getattr(torch, dtype))
    texts, firsts = made(LENGTHS)
    for ours, text, first in zip(expected, texts, firsts, strict=True):
        near(ours, expected_of(model, text, first), dtype)


def test_experts_one_by_one_with_their_rows_in_memory(monkeypatch: Any) -> None:
    apart = with_least(variants.EXAMPLES / "tiny-glm4", batch=4)
    plan = apart._plan

    def in_memory(batches: Any) -> _Plan:
        return plan(batches)._replace(on_disk=0)

    monkeypatch.setattr(apart, "_plan", in_memory)
    same(answers(apart), answers(Whole(variants.EXAMPLES / "tiny-glm4", batch=4)), "rows in memory")


# against transformers


def expected_of(model: Any, text: list[int], first: int) -> torch.Tensor:
    """transformers' own logits of one text alone."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([text[:-1]])).logits[0, first - 1 :].float()


def near(ours: torch.Tensor, theirs: torch.Tensor, dtype: str) -> None:
    """In float32 equal logits; in bfloat16 equal distributions, as its 8 bits have it: mean KL in nats."""
    if dtype == "float32":
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    else:
        p, q = theirs.log_softmax(-1), ours.log_softmax(-1)
        assert float((p.exp() * (p - q)).sum(-1).mean()) < 0.002


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_in_memory_is_transformers(base: str, dtype: str) -> None:
    """Padding and neighbours change the order of sums alone, also where an indexer leaves tokens out."""
    texts, firsts = made(LONG)
    model = by_transformers(variants.EXAMPLES / base, getattr(torch, dtype))
    found = answers(Whole(variants.EXAMPLES / base, dtype=dtype, batch=4), LONG)
    for ours, text, first in zip(found, texts, firsts, strict=True):
        near(ours, expected_of(model, text, first), dtype)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_batch_of_one_length_is_transformers_to_the_bit(base: str, dtype: str) -> None:
    texts, _ = made([49] * 4)
    found = dict(Whole(variants.EXAMPLES / base, dtype=dtype, batch=4).logits(texts, [1] * 4, lambda _: None))
    with torch.inference_mode():
        theirs = by_transformers(variants.EXAMPLES / base, getattr(torch, dtype))(
            input_ids=torch.tensor(texts)[:, :-1]
        ).logits.float()
    same([found[number] for number in range(4)], list(theirs), "transformers")


def test_an_indexer_chooses_in_texts_that_are_longer_than_its_choice(tmp_path: Path) -> None:
    """Were everything attended to, what stands behind the first 256 tokens would be told otherwise."""
    tensors, config = variants.load(variants.EXAMPLES / "tiny-glm5")
    dense = variants.save(tmp_path / "dense", tensors, config | {"index_topk": 2048})
    text, _ = made([700])
    chosen, every = (
        next(Whole(folder, dtype="float32").logits(text, [1], lambda _: None))[1]
        for folder in (variants.EXAMPLES / "tiny-glm5", dense)
    )
    torch.testing.assert_close(chosen[:256], every[:256], rtol=1e-4, atol=1e-4)
    assert float((chosen[256:] - every[256:]).abs().amax(-1).median()) > 1e-3
    layered = Layered(variants.EXAMPLES / "tiny-glm5", dtype="float32")
    same([next(layered.logits(text, [1], lambda _: None))[1]], [chosen], "layers")
    layered.close()
    theirs = expected_of(by_transformers(variants.EXAMPLES / "tiny-glm5"), text[0], 1)
    torch.testing.assert_close(chosen, theirs, rtol=1e-5, atol=1e-5)


def test_only_what_is_asked_for_is_multiplied_with_the_vocabulary() -> None:
    runner = Whole(variants.EXAMPLES / "tiny-kimi", batch=4)
    rows: list[int] = []
    runner._model.lm_head.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[:-1].numel()))
    wanted = sum(len(one) for one in answers(runner))
    assert sum(rows) == wanted and len(rows) == -(-len(LENGTHS) // 4)


def test_a_large_vocabulary_is_taken_in_pieces() -> None:
    texts, firsts = [[0] * 100] * 5, [50] * 5
    (batch,) = make_batches(texts, firsts, 8, SimpleNamespace(max_position_embeddings=100, vocab_size=1024))
    assert list(_pieces(batch, PIECE // 50)) == [[0], [1], [2], [3], [4]]
    assert list(_pieces(batch, PIECE // 100)) == [[0, 1], [2, 3], [4]]
    assert list(_pieces(batch, 1024)) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("way", ["memory", "layers"])
def test_scores_through_a_runner(way: str) -> None:
    """Continuations that differ in their last token come from one text, and no batch changes what they are worth."""
    folder = variants.EXAMPLES / "tiny-glm4"
    runner = open_runner(folder, dtype="float32", batch=3, memory=10**9, device="cpu", way=way)
    contexts, _ = made([9, 30, 64])
    requests = [(context, [*some, last]) for context in contexts for some in ([], [7, 8]) for last in (3, 4)]
    model, told = by_transformers(folder), list[int]()
    for (context, continuation), one in zip(requests, score(runner, requests, told.append), strict=True):
        logits = expected_of(model, [*context, *continuation], len(context))
        each = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])
        assert one.logprob == pytest.approx(float(each.sum()), abs=1e-5)
        assert one.greedy == (logits.argmax(-1).tolist() == continuation)
    assert sum(told) == len(requests)
    runner.close()


# generation


@pytest.mark.parametrize("base", BASES)
def test_scores_after_generation_are_what_they_were(base: str) -> None:
    runner = Whole(variants.EXAMPLES / base, batch=4)
    before = answers(runner)
    prompts, _ = made([5, 30, 9])
    told: list[int] = []
    made_twice = [
        runner.generate(prompts, 6, Sampling(), lambda number, tokens: number == 1 and len(tokens) == 2, told.append)
        for _ in range(2)
    ]
    assert [len(tokens) for tokens in made_twice[0]] == [6, 2, 6] and made_twice[0] == made_twice[1]
    assert sum(told) == 6
    same(answers(runner), before, "after generation")
    with pytest.raises(EvalError, match="token 1024, but the model has 1,024"):
        runner.generate([[1024]], 2, Sampling(), lambda *_: False, told.append)
    same(answers(runner), before, "after an error")
    for tokens, prompt in zip(made_twice[0], prompts, strict=True):
        told_by = expected_of(by_transformers(variants.EXAMPLES / base, torch.bfloat16), [*prompt, 0], len(prompt))
        assert tokens[0] == int(told_by.argmax())


def test_layer_by_layer_does_not_generate() -> None:
    runner = Layered(variants.EXAMPLES / "tiny-kimi")
    with pytest.raises(LoadError, match="tasks which generate cannot be run: give more --memory, or tasks of log"):
        runner.generate([[1]], 1, Sampling(), lambda *_: False, lambda _: None)


# which way


def test_the_way_is_chosen_by_memory(monkeypatch: Any) -> None:
    folder = variants.EXAMPLES / "tiny-kimi"

    def way(memory: int, **options: Any) -> Any:
        runner = open_runner(folder, **({"dtype": "bfloat16", "batch": 2, "device": "cpu"} | options), memory=memory)
        runner.close()
        return runner.about["way"]

    assert (way(10**9), way(300_000_000)) == ("in memory", "layer by layer")
    assert way(10**9, way="layers") == "layer by layer" and way(300_000_000, way="memory") == "in memory"
    assert way(500_000_000, batch=2) == "in memory" and way(500_000_000, batch=8) == "layer by layer"
    with pytest.raises(UsageError, match="way 'fast': a checkpoint is run by auto, memory or layers"):
        way(10**9, way="fast")
    for options, words in (({"dtype": "float8"}, "dtype 'float8': .* bfloat16 or float32"), ({"batch": 0}, "batch is")):
        for name in ("memory", "layers", "auto"):
            with pytest.raises(UsageError, match=words):
                way(10**9, way=name, **options)
    for name in ("memory", "layers"):
        with pytest.raises(LoadError, match="device 'cuda:77'"):
            way(10**9, way=name, device="cuda:77")


PEAK = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from phasefold.calib.budget import model_need
from phasefold.calib.model import Source
from phasefold.evals.layered import Layered
from phasefold.evals.whole import Whole
from phasefold.formats.checkpoint import open_checkpoint

def told(what):  # of this program; getrusage's peak is that of the one which started it, where that was larger
    return int(Path("/proc/self/status").read_text().split(what)[1].split()[0]) * 1024

large, small = map(Path, sys.argv[1:])
texts = [[(31 * a * b) % 1024 for a in range(1, 40)] for b in range(1, 9)]
options = {"batch": 2, "dtype": "float32"}  # for bfloat16 oneDNN keeps code for every shape, 80 MB in the end
runner = Layered(small, **options)  # what torch loads late is no memory of ours
list(runner.logits(texts[:2], [38] * 2, lambda _: None))
before = told("VmRSS:")
for memory in (24_000_000, 56_000_000, model_need(Source(open_checkpoint(large)), 4, 0)):
    runner = Layered(large, memory=memory, **options) if memory < 100e6 else Whole(large, **options)
    list(runner.logits(texts, [38] * 8, lambda _: None))
    print(memory, told("VmHWM:") - before)
"""


def test_memory_is_what_was_allowed(tmp_path: Path) -> None:
    """What a process takes beyond what it took for a tiny model: by experts, by layers of 38 MB, all five of them."""
    changes = {"num_hidden_layers": 6, "n_routed_experts": 24, "moe_intermediate_size": 512}
    large = random_variant(tmp_path / "large", "tiny-kimi", **changes)
    asked = [sys.executable, "-c", PEAK, str(large), str(variants.EXAMPLES / "tiny-kimi")]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    took = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(took) == 3 and all(taken <= allowed for allowed, taken in took), took
    assert took[1][1] > 38e6 and took[2][1] > 2 * 5 * 38e6, took  # else nothing was measured


# what is refused


def test_a_layer_that_fits_no_way_is_refused_before_weights_are_read(monkeypatch: Any) -> None:
    folder = variants.EXAMPLES / "tiny-kimi"
    read: list[str] = []
    monkeypatch.setattr(Reader, "read", lambda self, name, *_: read.append(name))
    with pytest.raises(LoadError, match=r"layer 0 takes 0\.00 GB of memory, --memory allows 0\.00 GB: allow more, or "):
        Layered(folder, memory=1_000_000)
    runner = Layered(folder, memory=10_000_000)  # enough for a text of one token, of these it takes
    with pytest.raises(
        LoadError, match=r"layer \d takes 0\.0\d GB of memory, --memory allows 0\.01 GB.* a smaller --b"
    ):
        answers(runner, LONG)
    wide = Layered(folder, memory=5_500_000, batch=1)
    texts = [[0] * 300]
    plan_of(wide, (2,))
    with pytest.raises(LoadError, match=r"takes 0\.01 GB of memory"):
        wide.logits(texts, [1], lambda _: None)
    assert not read


def test_a_large_vocabulary_has_to_fit_too(tmp_path: Path) -> None:
    folder = random_variant(tmp_path / "source", "tiny-kimi", vocab_size=40_000, num_hidden_layers=2)
    with pytest.raises(LoadError, match=r"what makes logits takes 0\.08 GB of memory, --memory allows 0\.08 GB"):
        Layered(folder, memory=80_000_000)


@pytest.mark.parametrize("way", ["memory", "layers"])
def test_texts_that_are_none_are_refused(way: str) -> None:
    folder = variants.EXAMPLES / "tiny-kimi"
    runner = open_runner(folder, dtype="bfloat16", batch=2, memory=10**9, device="cpu", way=way)
    assert (runner.max_length, runner.vocabulary) == (2048, 1024)
    for text, first, words in (
        ([1, 2, 1024], 1, "text 2 of 2: token 1024, but the model has 1,024: another model's tokenizer"),
        ([1, -2, 3], 1, "token -2, but"),
        ([1] * 2050, 5, "2,050 tokens, but the model takes 2,048"),
        ([1, 2, 3], 3, "token 3 of 3 is to be scored first; at least one token must"),
        ([1, 2, 3], 0, "token 0 of 3"),
        ([], 0, "token 0 of 0"),
    ):
        with pytest.raises(EvalError, match=words):
            runner.logits([[1, 2], text], [1, first], lambda _: None)
    assert list(runner.logits([], [], lambda _: None)) == []
    assert [number for number, _ in runner.logits([[1] * 2049], [2047], lambda _: None)] == [0]
    runner.close()


@pytest.mark.parametrize("apart", [False, True])
def test_damage_is_named_and_leaves_no_files(tmp_path: Path, apart: bool) -> None:
    tensors, config = variants.load(variants.EXAMPLES / "tiny-kimi")
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    missing = {key: value for key, value in tensors.items() if "3.mlp.gate.weight" not in key}
    huge = tensors["model.layers.1.mlp.shared_experts.down_proj.weight"].float().mul(1e38).bfloat16()
    for kind, bad, words in (
        ("nan", tensors | {name: torch.full((128, 256), float("nan")).bfloat16()}, "experts.3.up_proj.weight: a value"),
        ("head", tensors | {"model.norm.weight": torch.full((256,), 3e38).bfloat16()}, "a logit is not finite"),
        ("inf", tensors | {"model.layers.1.mlp.shared_experts.down_proj.weight": huge}, "layer 1: a hidden state is"),
    ):
        folder = variants.save(tmp_path / kind, bad, config)
        runner = with_least(folder, work=tmp_path / "work", batch=4) if apart else Layered(folder, batch=4)
        with pytest.raises(CheckpointError, match=words):
            answers(runner)
        assert not apart or not list((tmp_path / "work").iterdir())
        with pytest.raises(CheckpointError, match=words if kind != "inf" else "a logit is not finite in bfloat16; try"):
            answers(Whole(folder, batch=4))
    folder = variants.save(tmp_path / "missing", missing, config)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.mlp\.gate\.weight"):
        Layered(folder)


def test_files_go_when_nobody_takes_all_logits(tmp_path: Path) -> None:
    runner = with_least(variants.EXAMPLES / "tiny-kimi", work=tmp_path / "deep" / "work", batch=4)
    some = runner.logits(*made(LENGTHS), lambda _: None)
    next(some)
    (folder,) = (tmp_path / "deep" / "work").iterdir()
    assert folder.name.startswith("phasefold-") and [path.name for path in folder.iterdir()] == ["hidden"]
    runner.close()
    assert not folder.exists()
    other = runner.logits(*made(LENGTHS), lambda _: None)
    next(other)
    assert list((tmp_path / "deep" / "work").iterdir())
    del other
    assert not list((tmp_path / "deep" / "work").iterdir())


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    runner = with_least(variants.EXAMPLES / "tiny-kimi", work=tmp_path / "work", batch=4)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(PlanError, match=r"work: needs \d MB more, the disk has 0 MB free"):
        answers(runner)


@pytest.mark.parametrize("apart", [False, True])
def test_it_is_told_how_far_it_is(apart: bool) -> None:
    folder, told = variants.EXAMPLES / "tiny-kimi", list[int]()
    runner = with_least(folder, batch=2) if apart else Layered(folder, batch=2)
    answers(runner, told=told)
    assert sum(told) == len(LENGTHS) and min(told) >= 0 and len([step for step in told if step]) == len(LENGTHS)
    told.clear()
    answers(Whole(folder, batch=2), told=told)
    assert told == [2, 2, 2, 2, 1]
