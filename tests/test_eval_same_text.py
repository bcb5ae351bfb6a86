"""Distributions of two models on one text: kept, compared, told; and what a target is, and who it was."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import variants
from pairs import folded

from phasefold.errors import EvalError, LoadError, PlanError, TextError, UsageError
from phasefold.evals.identity import check_unchanged, identity, kinship
from phasefold.evals.runner import score
from phasefold.evals.same_text import Kept, Texts, from_passages
from phasefold.evals.scores import Passage
from phasefold.evals.settings import Settings
from phasefold.evals.sides import check_sides
from phasefold.evals.target import parse_target

VOCABULARY = 50


class Made:
    """A runner whose distributions are a fixed function of the last two tokens, given in an order of its own."""

    max_length = 64

    def __init__(self, seed: int, vocabulary: int = VOCABULARY, shift: float = 0.0) -> None:
        self.vocabulary, self.about = vocabulary, {}
        made = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCABULARY, VOCABULARY, vocabulary, generator=made) * 2
        self.table += shift * torch.randn(self.table.shape, generator=made)

    def row(self, before: int, last: int) -> torch.Tensor:
        return self.table[before, last]

    def logits(self, texts: Sequence[Sequence[int]], firsts: Sequence[int], advance) -> Iterator:
        order = list(range(len(texts)))
        random.Random(1).shuffle(order)
        for number in order:
            text, first = texts[number], firsts[number]
            rows = [self.row(text[place - 2] if place > 1 else 0, text[place - 1]) for place in range(first, len(text))]
            yield number, torch.stack(rows)
            advance(1)


def made_texts(count: int = 40) -> Texts:
    rng = random.Random(0)
    texts = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(2, 40))] for _ in range(count)]
    return Texts(texts, [max(1, len(text) // 2) for text in texts], [str(n // 4) for n in range(count)], "made")


def test_kl_and_perplexity_are_those_of_torch() -> None:
    texts, before, after = made_texts(), Made(1), Made(1, shift=0.3)
    kept = Kept(before, texts, 1 << 30, None, lambda _: None)
    found = kept.compare(after, lambda _: None)
    kl, first, second, same = [], [], [], []
    for text, start in zip(texts.texts, texts.firsts, strict=True):
        for place in range(start, len(text)):
            a, b = (
                each.row(text[place - 2] if place > 1 else 0, text[place - 1]).double().log_softmax(-1)
                for each in (before, after)
            )
            kl.append(float(torch.nn.functional.kl_div(b, a, log_target=True, reduction="sum")))
            first.append(float(a[text[place]]))
            second.append(float(b[text[place]]))
            same.append(int(a.argmax()) == int(b.argmax()))
    assert found.tokens == len(kl) == texts.tokens and found.documents == 10
    assert found.mean_kl.mean == pytest.approx(np.mean(kl), abs=1e-6) and found.mean_kl.mean > 0.01
    assert found.max_kl == pytest.approx(max(kl), abs=1e-5)
    assert found.same_top.mean == pytest.approx(np.mean(same)) and 0 < found.same_top.mean < 1
    assert found.ratio.mean == pytest.approx(np.exp(np.mean(first) - np.mean(second)), rel=1e-6)


def test_a_file_holds_what_memory_would(tmp_path: Path) -> None:
    texts, after = made_texts(), Made(1, shift=0.3)
    in_memory = Kept(Made(1), texts, 1 << 30, None, lambda _: None)
    in_file = Kept(Made(1), texts, 1000, tmp_path, lambda _: None)
    assert len(list(tmp_path.iterdir())) == 1
    assert in_file.compare(after, lambda _: None) == in_memory.compare(after, lambda _: None)
    in_file.close()
    assert not list(tmp_path.iterdir())


def test_a_model_beside_itself_is_exactly_itself() -> None:
    texts = made_texts()
    kept = Kept(Made(2), texts, 1 << 30, None, lambda _: None)
    found = kept.compare(Made(2), lambda _: None)
    assert (found.mean_kl.mean, found.max_kl, found.same_top.mean, found.ratio.mean) == (0, 0, 1, 1)
    assert found.mean_kl.high > 0  # the text was only so long


def test_progress_counts_texts() -> None:
    texts, done = made_texts(), []
    kept = Kept(Made(2), texts, 1 << 30, None, done.append)
    kept.compare(Made(2), done.append)
    assert sum(done) == 2 * len(texts.texts)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    texts = made_texts()
    kept = Kept(Made(1), texts, 1000, tmp_path, lambda _: None)
    with pytest.raises(EvalError, match="the baseline has 50 tokens, the target 49"):
        kept.compare(Made(1, 49), lambda _: None)
    broken = Made(1)
    broken.table[3, 3, 7] = float("nan")
    broken.table[:, 5, 7] = float("inf")
    with pytest.raises(EvalError, match="the target: a logit is not finite"):
        kept.compare(broken, lambda _: None)
    kept.close()
    with pytest.raises(EvalError, match="the baseline: a logit is not finite"):
        Kept(broken, texts, 1000, tmp_path, lambda _: None)
    assert not list(tmp_path.iterdir())  # its file went with it


def test_passages_are_thinned_evenly_and_cut_from_the_left() -> None:
    passages = [Passage(tuple(range(n, n + 21)), f"doc{n}") for n in range(100)]
    whole = from_passages(passages, 10_000, 64)
    assert whole is not None and len(whole.texts) == 100 and whole.tokens == 100 * 11 and whole.firsts[0] == 10
    some = from_passages(passages, 300, 64)
    assert some is not None and [text[0] for text in some.texts] == list(range(0, 100, 4)) and some.tokens <= 300
    long = from_passages([Passage(tuple(range(5000)), "long")], 100_000, 10_000)
    assert long is not None and long.tokens == 1024 and long.firsts == [5000 - 1024]
    few = from_passages([Passage(tuple(range(5000)), "long"), Passage((1, 2, 3), "short")], 7, 10_000)
    assert few is not None and few.tokens == 7 and few.firsts == [4993]  # at most so many
    short = from_passages(passages, 10_000, 8)
    assert short is not None and short.texts[0] == list(range(13, 21)) and short.firsts[0] == 4
    assert from_passages([Passage((1,), "a")], 10, 64) is None and from_passages([], 10, 64) is None


def test_score_is_the_sum_of_log_probabilities() -> None:
    runner, rng = Made(3), random.Random(5)
    requests = [
        ([rng.randrange(50) for _ in range(5)], [rng.randrange(50) for _ in range(n % 3 + 1)]) for n in range(30)
    ]
    requests += [(requests[2][0], [*requests[2][1][:-1], last]) for last in range(50)]  # computed once
    seen = []
    for (context, continuation), found in zip(requests, score(runner, requests, seen.append), strict=True):
        text, total, greedy = [*context, *continuation], 0.0, True
        for place in range(len(context), len(text)):
            row = runner.row(text[place - 2], text[place - 1]).log_softmax(-1)
            total, greedy = total + float(row[text[place]]), greedy and int(row.argmax()) == text[place]
        assert found.logprob == pytest.approx(total, abs=1e-5) and found.greedy == greedy
    assert sum(seen) == len(requests) and sum(one.greedy for one in score(runner, requests[30:], seen.append)) <= 1


def test_targets(tmp_path: Path) -> None:
    first, second, odd = (tmp_path / name for name in ("a", "b", "c+d@e"))
    for folder in (first, second, odd):
        folder.mkdir()
    scales = tmp_path / "kv.json"
    scales.write_text("{}")
    assert parse_target(str(first)).folders == (first,) and parse_target(str(first)).home == first
    assert parse_target(str(odd)).folders == (odd,)
    pair = parse_target(f"{first}+{second}")
    assert pair.is_pair and pair.folders == (first, second) and pair.kv == "bf16" and pair.home == second
    assert parse_target(f"{first}+{odd}@fp8_e4m3").folders == (first, odd)
    with_scales = parse_target(f"{odd}+{second}@{scales}")
    assert (with_scales.folders, with_scales.kv, with_scales.scales) == ((odd, second), "fp8_e4m3", scales)
    server = parse_target("http://127.0.0.1:8000/v1/")
    assert server.url == "http://127.0.0.1:8000/v1" and server.home is None and not server.is_pair


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nowhere", "no such folder: nowhere"),
        ("{a}+nowhere", "no such folder: nowhere"),
        ("{a}@fp8_e4m3", "is for pairs"),
        ("{a}+{a}@fp9", "'fp9' is neither a KV-scale manifest nor one of bf16"),
        ("{a}+{a}@gone/kv.json", "no such file: gone/kv.json"),
        ("", "no such folder: nothing"),
        ("+{a}", "no such folder: nothing"),
    ],
)
def test_what_is_no_target(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse_target(text.format(a=tmp_path))


def test_identity_follows_weights_and_pairing(tmp_path: Path) -> None:
    source = variants.EXAMPLES / "tiny-glm4"
    other = tmp_path / "copy"
    shutil.copytree(source, other)
    found = [identity(parse_target(text)) for text in (str(source), str(other), f"{source}+{other}")]
    assert found[0]["digest"] == found[1]["digest"] != found[2]["digest"] and found[2]["kind"] == "pair"
    assert set(found[0]["parts"][0]["formats"]) == {"bf16", "f32"} and found[0]["parts"][0]["bytes"] > 10_000_000
    assert identity(parse_target(f"{source}+{other}@fp8_e4m3"))["digest"] != found[2]["digest"]
    shard = next(other.glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    half = len(raw) // 2
    raw[half:] = bytes(byte ^ 1 for byte in raw[half:])  # the digest sees samples of the weights, and no single bit
    shard.write_bytes(raw)
    assert identity(parse_target(str(other)))["digest"] != found[0]["digest"]
    check_unchanged(parse_target(str(source)), found[0])
    with pytest.raises(EvalError, match="has changed while it was evaluated"):
        check_unchanged(parse_target(str(other)), found[1])
    assert identity(parse_target("http://x/v1"))["digest"] is None


def test_what_was_not_made_from_the_baseline_is_told(tmp_path: Path) -> None:
    source, other = (parse_target(str(variants.EXAMPLES / name)) for name in ("tiny-glm4", "tiny-kimi"))
    made = parse_target(str(folded(source.folders[0], "glm-prefill-fp8", tmp_path / "fp8")))
    again = parse_target(str(folded(made.folders[0], "glm-decode-int4", tmp_path / "int4")))
    who = {one.text: identity(one) for one in (source, other, made, again)}
    for target, baseline in ((made, source), (again, source), (again, made), (made, again), (source, made)):
        assert kinship(who[target.text], who[baseline.text]) == []
    assert "fp8 was not made from the baseline" in kinship(who[made.text], who[other.text])[0]
    stranger = tmp_path / "stranger"
    shutil.copytree(source.folders[0], stranger)
    config = json.loads((stranger / "config.json").read_text())
    (stranger / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert "fp8 was not made from the baseline" in kinship(who[made.text], identity(parse_target(str(stranger))))[0]


def sides(*texts: object, generating: tuple[str, ...] = (), **more: object) -> None:
    check_sides([parse_target(str(text)) for text in texts], Settings(**more), generating)


def test_sides_are_checked_before_one_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    glm, kimi = (variants.EXAMPLES / name for name in ("tiny-glm4", "tiny-kimi"))
    fp8 = folded(glm, "glm-prefill-fp8", tmp_path / "fp8")
    int4 = folded(glm, "glm-decode-int4", tmp_path / "int4")

    def refuse(*args: object, **named: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("phasefold.evals.whole.Whole.__init__", refuse)
    sides(glm, fp8, int4, f"{fp8}+{int4}")
    with pytest.raises(EvalError, match=r"other architectures \(.*glm4_moe"):
        sides(kimi, int4)
    with pytest.raises(LoadError, match=r"int4: was made for decode, .* in this order"):
        sides(f"{int4}+{fp8}")
    with pytest.raises(UsageError, match="a pair is served from memory"):
        sides(f"{fp8}+{int4}", way="layers")
    with pytest.raises(LoadError, match=r"both models take .* allow more"):
        sides(f"{fp8}+{int4}", memory=1_000_000)
    with pytest.raises(EvalError, match=r"runs layer by layer, .* needle takes answers"):
        sides(glm, way="layers", generating=("needle",))
    with pytest.raises(LoadError, match=r"--memory allows"):
        sides(glm, memory=1_000_000)
    with pytest.raises(TextError, match="no chat template"):
        sides(glm, requests=tmp_path / "r.jsonl")
    other = tmp_path / "other"
    shutil.copytree(glm, other)
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    words["ing"], words["the"] = words["the"], words["ing"]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(EvalError, match="have other tokenizers: their answers are not paired"):
        sides(glm, other)
    (other / "tokenizer.json").unlink()
    with pytest.raises(TextError, match=r"has no tokenizer|cannot be loaded"):
        sides(glm, other)


def test_distributions_are_kept_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(Made(1), made_texts(), 1000, tmp_path / "new" / "folder", lambda _: None)
    assert kept.compare(Made(1), lambda _: None).mean_kl.mean == 0
    kept.close()
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1000, 1000, 0))
    with pytest.raises(PlanError, match="free"):
        Kept(Made(1), made_texts(), 1000, tmp_path, lambda _: None)


def test_of_one_document_nothing_is_known(tmp_path: Path) -> None:
    texts = made_texts()
    one = Texts(texts.texts, texts.firsts, ["same"] * len(texts.texts), "made")
    found = Kept(Made(1), one, 1 << 30, None, lambda _: None).compare(Made(1, shift=0.3), lambda _: None)
    for interval in (found.mean_kl, found.median_kl, found.p99_kl):
        assert interval.to_json()["high"] is None
