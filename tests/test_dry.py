"""The accounting of a dry load: boxes against marked elements, and a small loader of every kind of write."""

import itertools
import random

import pytest
import torch
from torch import nn

from phasefold.serving.runtimes.boxes import boxes, geometry, volume
from phasefold.serving.runtimes.dry import Tracker, fill_with_sentinels, left_as_sentinels


def some_view(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """A view as loaders make them: cut, selected, transposed, flattened, split, stepped through."""
    view = tensor
    for _ in range(rng.randrange(4)):
        if view.dim() == 0 or view.numel() == 0:
            break
        axis = rng.randrange(view.dim())
        size = view.shape[axis]
        kind = rng.choice(["narrow", "select", "transpose", "flatten", "unflatten", "step"])
        if kind == "narrow":
            start = rng.randrange(size)
            view = view.narrow(axis, start, rng.randint(1, size - start))
        elif kind == "select":
            view = view.select(axis, rng.randrange(size))
        elif kind == "transpose":
            view = view.transpose(axis, rng.randrange(view.dim()))
        elif kind == "flatten" and view.is_contiguous():
            view = view.view(-1)
        elif kind == "unflatten" and size % 2 == 0:
            view = view.unflatten(axis, (2, -1))
        elif kind == "step":
            view = view[(slice(None),) * axis + (slice(rng.randrange(2), None, 2),)]
    return view


@pytest.mark.parametrize("seed", range(40))
def test_boxes_cover_what_a_view_covers(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        shape = [rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 4))]
        tensor = torch.zeros(shape, dtype=rng.choice([torch.int16, torch.int32]))
        if rng.random() < 0.3:
            tensor = tensor.permute(rng.sample(range(tensor.dim()), tensor.dim()))
        covered = []
        for _ in range(rng.randint(1, 4)):
            view = some_view(tensor, rng)
            view.fill_(1)  # torch's own idea of what the view covers
            covered += boxes(geometry(view), geometry(tensor))
        assert volume(covered) == int(tensor.sum()) * tensor.element_size(), (seed, shape)


EXPERTS, WIDTH, HIDDEN = 4, 6, 8


class Fused(nn.Module):
    """What serving runtimes hold: experts stacked, gate above up, a fused key, a padded vocabulary, a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH, HIDDEN), False)
        self.wk_weights_proj = nn.Parameter(torch.empty(5, HIDDEN), False)
        self.lm_head = nn.Linear(HIDDEN, 16, bias=False)
        self.k_scale = nn.Parameter(torch.empty(()), False)
        self.replaced = nn.Parameter(torch.empty(3), False)
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def load_weights(self, weights) -> None:
        late = {}
        for name, weight in weights:
            kind = name.split(".")[-1]
            if name.startswith("experts."):
                at = WIDTH if kind == "up" else 0
                self.w13_weight.data[int(name.split(".")[1])].narrow(0, at, weight.shape[0]).copy_(weight)
            elif name.startswith("wk"):
                late[name] = weight
                if {"wk.codes", "wk.scale"} <= late.keys():  # decoded only when both are there
                    decoded = late["wk.codes"].float() * late["wk.scale"].repeat_interleave(2, 0)
                    self.wk_weights_proj.data[:4].copy_(decoded)
            elif name == "weights_proj":
                self.wk_weights_proj.data.narrow(0, 4, 1).copy_(weight)
            elif name == "lm_head":
                self.lm_head.weight.data[: weight.shape[0]].copy_(weight)
                self.lm_head.weight.data[weight.shape[0] :].fill_(0)
            elif name == "k_scale":
                self.k_scale.data.copy_(weight.reshape(()))
            elif name == "replaced":
                self.replaced.data = weight.to(torch.float64)
            elif name == "bias":
                self.bias[:] = weight


def tensors(device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {f"experts.{e}.{kind}": (WIDTH, HIDDEN) for e in range(EXPERTS) for kind in ("gate", "up")}
    shapes |= {"wk.codes": (4, HIDDEN), "wk.scale": (2, 1), "weights_proj": (1, HIDDEN), "lm_head": (13, HIDDEN)}
    shapes |= {"k_scale": (1,), "replaced": (3,), "bias": (EXPERTS,)}
    return {name: torch.rand(shape, generator=generator).to(device) for name, shape in shapes.items()}


def load(given: dict[str, torch.Tensor], device: str) -> Tracker:
    with torch.device(device):
        model = Fused()
    if device == "cpu":
        fill_with_sentinels(model)
    tracker = Tracker(model)
    with tracker:
        model.load_weights(tracker.watch(given.items()))
    return tracker


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_whole_checkpoint_is_accounted_for(device: str) -> None:
    tracker = load(tensors(device), device)
    assert tracker.not_taken(whole=True) == []
    assert [str(item) for item in tracker.unwritten()] == ["lm_head.weight (24 of 128 elements)"]
    assert tracker.unwritten()[0].padding
    if device == "cpu":
        assert left_as_sentinels(tracker.model) == {}


LACKS = [
    ("experts.2.up", "w13_weight (48 of 384 elements)"),
    ("wk.scale", "wk_weights_proj (32 of 40 elements)"),
    ("weights_proj", "wk_weights_proj (8 of 40 elements)"),
    ("k_scale", "k_scale (1 of 1 elements)"),
]


@pytest.mark.parametrize(("lacking", "told"), LACKS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_missing_is_counted(device: str, lacking: str, told: str) -> None:
    given = tensors(device)
    del given[lacking]
    tracker = load(given, device)
    assert told in [str(item) for item in tracker.unwritten()]
    if device == "cpu":  # a second way to the same number: by value
        name, count = told.split()[0], int(told.split("(")[1].split()[0])
        assert left_as_sentinels(tracker.model)[name] == count


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_nobody_takes_is_named(device: str) -> None:
    given = tensors(device)
    given["stray"] = torch.rand(3, device=device)
    del given["wk.scale"]  # then its codes wait for it, and are never written
    assert load(given, device).not_taken(whole=True) == ["wk.codes", "stray"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_small_expert_leaves_a_hole(device: str) -> None:
    """Runtimes narrow the parameter to what comes, and say nothing."""
    given = tensors(device)
    given["experts.1.gate"] = given["experts.1.gate"][:4].clone()
    assert "w13_weight (16 of 384 elements)" in [str(item) for item in load(given, device).unwritten()]


def test_a_tensor_of_which_a_part_is_taken() -> None:
    given = tensors("cpu")

    class Narrow(Fused):
        def load_weights(self, weights) -> None:
            super().load_weights((name, w[:4] if name == "experts.0.up" else w) for name, w in weights)

    tracker = Tracker(Narrow())
    with tracker:
        tracker.model.load_weights(tracker.watch(given.items()))
    assert tracker.not_taken(whole=True) == ["experts.0.up (16 of 48 elements)"]
    assert tracker.not_taken(whole=False) == []


def test_overlapping_writes_count_once() -> None:
    grid = torch.zeros(7, 9)
    cuts = [grid[a:b, c:d] for a, b in ((0, 4), (2, 7)) for c, d in ((0, 5), (3, 9))]
    for cut in cuts:
        cut.fill_(1)
    covered = list(itertools.chain.from_iterable(boxes(geometry(cut), geometry(grid)) for cut in cuts))
    assert volume(covered) == int(grid.sum()) * 4
