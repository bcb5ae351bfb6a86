"""The pair on the trained examples: handover, agreement with prefill alone and with the source, faults in its pages."""

import copy
import json

import pytest
import torch
import variants
from engines import (
    BASES,
    ORDER_OF_SUMS,
    artifact,
    by_transformers,
    continued,
    divergence,
    loaded,
    one_thread,  # noqa: F401  (autouse)
    run_batch,
    tokens,
)
from tokenizers import Tokenizer

from phasefold.errors import LoadError
from phasefold.formats.checkpoint import open_checkpoint
from phasefold.serving.paged.engine import Engine, Request
from phasefold.serving.paged.reference import generate
from phasefold.serving.paged.weights import Loaded, load_model
from phasefold.serving.pair import Agreement, Pair, agreement, hand_over, serve

# handover and the pair

LAYOUTS = [
    (base, kv)
    for base in BASES
    for kv in ("bf16", "fp8_e4m3", "fp8_ds_mla")
    if (base, kv) != ("tiny-glm4", "fp8_ds_mla")
]


def scales_of(model: Loaded, value: float) -> dict[int, dict[str, float]]:
    return {layer.layer: {part.name: value for part in layer.parts if part.name != "index_k"} for layer in model.cache}


@pytest.mark.parametrize(("base", "kv"), LAYOUTS)
def test_handover(base: str, kv: str) -> None:
    """Equal layouts: equal bytes. From BF16: the rows, encoded once."""
    prompt = tokens(base, 0, 75)
    prefill = Engine(loaded(base, "prefill"), page_size=16)
    decode = Engine(loaded(base, "decode"), kv=kv, page_size=16)
    for engine in (prefill, decode):  # page numbers of the two are not the same
        engine.pool.grow(engine.pool.open([]), 16 if engine is prefill else 48)
    lease, _ = prefill.prefill(prompt)
    taken = hand_over(prefill, decode, lease, [*prompt, 1])
    assert taken.length == 75 and taken.pages != lease.pages
    for index, rows in enumerate(decode.storage.layout.layers):
        for which, row in enumerate(rows):
            was = prefill.storage.tensors[index][which][lease.pages].flatten(0, 1)[:75]
            now = decode.storage.tensors[index][which][taken.pages].flatten(0, 1)[:75]
            if kv != "bf16":
                widths = [2 * part.heads * part.width for part in row.parts]
                values = [piece.contiguous().view(torch.bfloat16) for piece in was.split(widths, 1)]
                was = row.encode([v.unflatten(1, (p.heads, p.width)) for v, p in zip(values, row.parts, strict=True)])
            assert torch.equal(was, now)
    back = Engine(loaded(base, "prefill"), kv=kv, page_size=16)
    third = hand_over(decode, back, taken, [*prompt, 1])
    for ours, theirs in zip(decode.storage.tensors, back.storage.tensors, strict=True):
        assert all(torch.equal(a[taken.pages], b[third.pages]) for a, b in zip(ours, theirs, strict=True))
    fourth = hand_over(prefill, decode, lease, [*prompt, 1])
    assert fourth.pages[:4] == taken.pages[:4] and decode.pool.counters.reused == 4  # it has these pages already


def test_pairs_that_do_not_fit_are_refused() -> None:
    kimi, glm4 = loaded("tiny-kimi"), loaded("tiny-glm4")
    with pytest.raises(LoadError, match="different things of a token"):
        Pair(Engine(kimi), Engine(glm4))
    with pytest.raises(LoadError, match="pages of 64 and of 32 tokens"):
        Pair(Engine(kimi), Engine(kimi, page_size=32))
    fp8 = Engine(glm4, kv="fp8_e4m3")
    Pair(fp8, Engine(glm4, kv="fp8_e4m3", scales=scales_of(glm4, 1.0)))
    with pytest.raises(LoadError, match="layer 0: fp8_e4m3 rows cannot become fp8_e4m3 rows with other scales"):
        Pair(fp8, Engine(glm4, kv="fp8_e4m3", scales=scales_of(glm4, 0.5)))
    with pytest.raises(LoadError, match="fp8_e4m3 rows cannot become fp8_ds_mla rows"):
        Pair(Engine(kimi, kv="fp8_e4m3"), Engine(kimi, kv="fp8_ds_mla"))


def requests_of(base: str, *, budget: int = 40) -> list[Request]:
    lengths = (96, 130, 33, 150, 64, 48)
    return [
        Request(tokens(base, 60 * n, size), budget, tokens(base, 60 * n + size, budget))
        for n, size in enumerate(lengths)
    ]


@pytest.mark.parametrize("base", BASES)
def test_a_pair_of_one_model_is_that_model(base: str) -> None:
    """Both engines with the same weights and BF16 rows: greedy text is that of transformers alone."""
    prompt = tokens(base, 0, 70)
    request = Request(prompt, 40)
    Pair(Engine(loaded(base), page_size=16), Engine(loaded(base), page_size=16)).run([request])
    assert request.output == continued(loaded(base).model, prompt, 40)
    assert request.error is None and request.lease is None


# Measured mean KL in nats against the source: 0.0009 to 0.0013 with BF16 or fp8_ds_mla rows, up to 0.003 with e4m3 rows
BOUNDS = {"bf16": 0.003, "fp8_ds_mla": 0.003, "fp8_e4m3": 0.008}


@pytest.mark.parametrize(("base", "kv"), LAYOUTS)
def test_the_pair_is_near_prefill_alone_and_the_source(base: str, kv: str) -> None:
    prefill, source = Engine(loaded(base, "prefill")), Engine(loaded(base))
    decode = Engine(loaded(base, "decode"), kv=kv)
    requests = requests_of(base)
    Pair(prefill, decode, max_batch=4).run(requests)
    assert all(request.error is None and len(request.output) == 40 for request in requests)
    for engine in (prefill, source):
        found = agreement(requests, engine)
        assert found.tokens == 6 * 39
        assert 0 < found.mean_kl < BOUNDS[kv] and found.top1_agreement > 0.92
    for engine in (prefill, decode, source):
        assert len(engine.pool.free) == engine.pool.num_pages - 1 and engine.pool.counters.mismatches == 0
    if kv == "bf16":  # once more without our code: full forward passes by transformers, KL in float64
        theirs = by_transformers(variants.EXAMPLES / base)
        theirs.set_experts_implementation("eager")
        ours, reference = [], []
        for request in requests:
            with torch.inference_mode():
                logits = theirs(torch.tensor([[*request.prompt, *request.output[:-1]]])).logits[0].float()
            reference.append(logits[len(request.prompt) :])
            ours.append(torch.stack(request.logits[1:]))
        assert divergence(torch.cat(ours), torch.cat(reference)) == pytest.approx(found.mean_kl, rel=0.01)
        same = (torch.cat(ours).argmax(-1) == torch.cat(reference).argmax(-1)).float().mean().item()
        assert same == pytest.approx(found.top1_agreement, abs=0.01)


def test_requests_join_and_leave_and_wait_for_pages() -> None:
    """The same answers from a pool that holds all six requests and from one that holds two."""
    base, results = "tiny-glm4", []
    for pages in (100, 25):
        decode = Engine(loaded(base, "decode"), page_size=16, num_pages=pages)
        requests = requests_of(base)
        for number, request in enumerate(requests):
            request.budget = 10 + 7 * number
            request.forced = None
        Pair(Engine(loaded(base, "prefill"), page_size=16), decode, max_batch=5).run(requests)
        assert [len(request.output) for request in requests] == [10 + 7 * number for number in range(6)]
        assert all(request.error is None for request in requests) and len(decode.pool.free) == pages - 1
        results.append([request.output for request in requests])
    agree = [a == b for one, other in zip(*results, strict=True) for a, b in zip(one, other, strict=True)]
    assert sum(agree) / len(agree) > 0.9  # batches of other sizes: a near tie may fall the other way


def test_a_prompt_that_never_fits_is_its_own_error() -> None:
    engines = [Engine(loaded("tiny-glm4"), page_size=16, num_pages=8) for _ in range(2)]
    requests = [Request(tokens("tiny-glm4", size, size), 4) for size in (20, 200, 30)]
    Pair(*engines).run(requests)
    assert [request.error is None for request in requests] == [True, False, True]
    assert "13 pages wanted, 7 of 7 are free" in str(requests[1].error)
    grows, other = Request(tokens("tiny-glm4", 0, 100), 60), Request(tokens("tiny-glm4", 300, 8), 5)
    Pair(*engines).run([grows, other])
    assert "1 page wanted, 0 of 7 are free" in str(grows.error) and len(grows.output) == 13 and other.error is None


# faults


def stale(engine: Engine, requests: list[Request]) -> None:
    requests[3].lease.table[3] = requests[0].lease.pages[2]


def swapped(engine: Engine, requests: list[Request]) -> None:
    """Two full pages of one request would do no harm: a step sees all of them, and keys know their positions."""
    table = requests[3].lease.table
    table[[3, 4]] = table[[4, 3]]


def swapped_between(engine: Engine, requests: list[Request]) -> None:
    one, other = requests[3].lease.table, requests[0].lease.table
    one[3], other[17] = int(other[17]), int(one[3])


def reused_early(engine: Engine, requests: list[Request]) -> None:
    page = requests[3].lease.pages[3]
    engine.pool.references[page] = 0
    engine.pool.free = {page: None} | engine.pool.free
    engine.prefill(tokens("tiny-kimi", 400, 20))


def freed_twice(engine: Engine, requests: list[Request]) -> None:
    lease = copy.deepcopy(requests[3].lease)
    engine.pool.release(lease)  # as if it had been cancelled, and goes on all the same
    engine.pool.free = dict(sorted(engine.pool.free.items(), key=lambda item: item[0] not in requests[3].lease.pages))
    engine.prefill(tokens("tiny-kimi", 400, 60))


FAULTS = [(stale, {3}), (swapped, {3}), (swapped_between, {0, 3}), (reused_early, {3}), (freed_twice, {3})]


@pytest.mark.parametrize(("fault", "victims"), FAULTS)
@pytest.mark.parametrize("base", BASES)
def test_a_fault_stops_one_request_and_leaves_the_others_their_bits(base: str, fault, victims: set[int]) -> None:
    def inject(engine: Engine, requests: list[Request], step: int) -> None:
        if step == 5:
            fault(engine, requests)

    clean = run_batch(Engine(loaded(base), page_size=16), base, budget=20)
    checked = Engine(loaded(base), page_size=16)
    found = run_batch(checked, base, budget=20, fault=inject)
    for place, (request, other) in enumerate(zip(found, clean, strict=True)):
        count = 6 if place in victims else 20  # one of prefill and five steps
        assert len(request.logits) == count and (request.error is not None) == (place in victims)
        assert all(torch.equal(a, b) for a, b in zip(request.logits, other.logits[:count], strict=True))
    for place in victims:
        words = str(found[place].error)
        assert "leads to page" in words and "expected tag" in words and "found tag" in words
    assert checked.pool.counters.mismatches >= len(victims)
    unchecked = run_batch(Engine(loaded(base), page_size=16, tracked=False), base, budget=20, fault=inject)
    for place, (request, other) in enumerate(zip(unchecked, clean, strict=True)):
        ours, theirs = torch.stack(request.logits), torch.stack(other.logits)
        assert request.error is None and torch.equal(ours[:6], theirs[:6])
        if place in victims:
            assert divergence(ours[6:], theirs[6:]) > ORDER_OF_SUMS
        else:
            assert torch.equal(ours, theirs)


class Faulty(Engine):
    """An engine whose page table goes wrong once."""

    def decode(self, requests) -> None:
        running = [request for request in requests if request.lease is not None]
        if self.pool.counters.mismatches == 0 and any(request.steps == 8 for request in running):
            running[1].lease.table[0] = running[0].lease.pages[0]
        super().decode(requests)


def test_a_stopped_request_is_run_again_from_its_prompt() -> None:
    base = "tiny-glm5"
    results = []
    for kind, retries in ((Engine, 0), (Faulty, 0), (Faulty, 1)):
        decode = kind(loaded(base, "decode"), kv="fp8_ds_mla", page_size=16)
        requests = requests_of(base, budget=20)
        Pair(Engine(loaded(base, "prefill"), page_size=16), decode).run(requests, retries=retries)
        results.append((requests, decode.pool.counters))
        assert len(decode.pool.free) == decode.pool.num_pages - 1
    (clean, _), (stopped, counters), (repeated, after) = results
    assert [request.error is not None for request in stopped] == [False, True, False, False, False, False]
    assert len(stopped[1].output) == 9 and (counters.mismatches, counters.retries) == (1, 0)
    assert all(request.error is None for request in repeated) and (after.mismatches, after.retries) == (1, 1)
    for place, (request, other) in enumerate(zip(repeated, clean, strict=True)):
        ours, theirs = torch.stack(request.logits), torch.stack(other.logits)
        assert torch.equal(ours, theirs) if place != 1 else divergence(ours, theirs) < ORDER_OF_SUMS


def test_serve_and_generate() -> None:
    prefill, decode = artifact("tiny-kimi", "prefill"), artifact("tiny-kimi", "decode")
    prompts = ["Return a list of the", "If the file does not exist, "]
    found = serve(prefill, decode, prompts, tokens=24, kv="fp8_ds_mla", source=variants.EXAMPLES / "tiny-kimi")
    assert len(found["text"]) == 2 and all(found["text"]) and found["errors"] == [] and found["tokens"] == 46
    assert found["kv"] == {"prefill": "fp8_ds_mla", "decode": "fp8_ds_mla"}  # as `launch` starts both pools
    assert found["kv_bytes_per_token"] == {"prefill": 4 * 196, "decode": 4 * 196}
    for numbers in (found, found["source"]):
        assert 0 < numbers["mean_kl"] < 0.01 and numbers["top1_agreement"] > 0.9
    assert found["counters"]["checks"] > 0 and found["counters"]["mismatches"] == 0
    json.dumps(found)
    encoded = serve(prefill, decode, prompts, tokens=24, kv="fp8_ds_mla", prefill_kv="bf16")
    assert encoded["kv_bytes_per_token"] == {"prefill": 4 * 320, "decode": 4 * 196}
    with pytest.raises(LoadError, match="1 prompts, 1 tokens, pages of 64: a pair needs a prompt, two tokens"):
        serve(prefill, decode, ["x"], tokens=1)
    one = generate(decode, prompts[0], 12)
    tokenizer = Tokenizer.from_file(str(decode / "tokenizer.json"))
    theirs = continued(load_model(decode).model, tokenizer.encode(prompts[0]).ids, 12)
    assert one["text"] == tokenizer.decode(theirs)
    assert one["tensors"] == len(open_checkpoint(decode).tensors) and one["version"].startswith("transformers 5.")
    assert generate(decode, None, 3)["text"]


def test_served_rows_take_the_scales_in_both_pools() -> None:
    """Equal bytes are handed over only between rows of equal scales; and what is compared with has BF16 rows."""
    prefill, decode = artifact("tiny-glm4", "prefill"), artifact("tiny-glm4", "decode")
    asked = {"prompts": ["Return a list of the"], "tokens": 8, "kv": "fp8_e4m3"}
    coarse = serve(prefill, decode, **asked, scales=scales_of(loaded("tiny-glm4"), 1024.0))
    plain = serve(prefill, decode, **asked)
    assert coarse["kv"] == plain["kv"] == {"prefill": "fp8_e4m3", "decode": "fp8_e4m3"}
    assert coarse["mean_kl"] > 5 * plain["mean_kl"] > 0  # most values of the cache underflow


def test_nothing_to_compare_is_said() -> None:
    one = Request([1], 1, output=[2])
    assert agreement([one], Engine(loaded("tiny-glm4"))) == Agreement(None, None, 0)


REFUSED = {
    "no text": ({"prompts": [""]}, "the prompt is empty"),
    "longer than the model's positions": ({"prompts": ["Return the " * 2000]}, "2048 positions"),
    "a device that is none": ({"prompts": ["x"], "device": "nonsense"}, "device 'nonsense'"),
    "pages of nothing": ({"prompts": ["x"], "page_size": 0}, "pages of 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(name: str) -> None:
    asked, said = REFUSED[name]
    with pytest.raises(LoadError, match=said):
        serve(artifact("tiny-kimi", "prefill"), artifact("tiny-kimi", "decode"), **asked)


def test_requests_and_pairs_that_make_no_sense_are_refused() -> None:
    for request in (
        {"prompt": [], "budget": 3},
        {"prompt": [1], "budget": 0},
        {"prompt": [1], "budget": 3, "forced": [1]},
    ):
        with pytest.raises(LoadError, match="a request of"):
            Request(**request)
    with pytest.raises(LoadError, match="max_batch is 0"):
        Pair(Engine(loaded("tiny-kimi")), Engine(loaded("tiny-kimi")), max_batch=0)


def test_a_lease_that_was_given_back_reads_nothing() -> None:
    engine = Engine(loaded("tiny-kimi"), page_size=16)
    lease, _ = engine.prefill(tokens("tiny-kimi", 0, 40))
    engine.pool.release(lease)
    assert lease.length == 0 and not lease.pages and not lease.entries.any()
