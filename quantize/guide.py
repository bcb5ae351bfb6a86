"""What calibration statistics say of one matrix: weights of its columns, a Hessian, inputs to judge a result by.

Where few tokens, or none, have reached a routed expert, its layer's pool says what its hidden states are like: gate and
up projections of all experts read the same stream. Nothing stands for the inputs of a down projection but its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

from ..errors import CheckpointError, PlanError
from ..families import identify
from ..formats import Shape
from ..formats.checkpoint import Checkpoint, parse_header, read_header
from ..formats.statistics import Statistics, input_of, pool_of

if TYPE_CHECKING:
    from torch import Tensor

    from .gptq import Factors
    from .kernels import Matrix, Report, Target
    from .plan import Plan
    from .units import Unit

#: what a unit's codes come from in the end, as the manifest has it
METHODS = ("gptq", "gptq-pool", "imatrix", "imatrix-pool", "singular", "data-free")
#: second moments of a few tokens are noise: this many tokens' worth of the pool's, or of their mean, is mixed in
PRIOR_TOKENS = 16
#: of the mean: what a channel that never was active weighs. At zero its weights would be clipped at will
FLOOR = 0.01
Factored: TypeAlias = "tuple[Factors | None, bool] | None"
Key = TypeVar("Key")
Made = TypeVar("Made")


class Columns(NamedTuple):
    """Each column's share in the error, float32 [K] as bytes with a mean of about 1; pooled: no token of its own."""

    weights: bytes
    pooled: bool


def guided(unit: Unit) -> bool:
    """Whether a unit's numbers are chosen by statistics."""
    return unit.objective == "imatrix"


def notes(checkpoint: Checkpoint, recipe: str, units: list[Unit], statistics: Mapping[str, Any]) -> list[str]:
    """What a plan says of statistics (`Statistics.identity`). Raises PlanError where they are needed and lacking."""
    found = [unit for unit in units if guided(unit)]
    if not found:
        return ["the statistics are not used: nothing is quantized by them"] if statistics else []
    if not statistics:
        command = _command(checkpoint, sorted({unit.role for unit in found if unit.method == "gptq"}))
        raise PlanError(
            f"{recipe}: chooses {found[0].role} by calibration statistics, and there are none; make them with "
            f"`{command}`, then add --stats STATS"
        )
    if statistics["source"] == checkpoint.digest:
        return []
    return [
        "the statistics are of another checkpoint of this shape (another release of the model, another format): right "
        "for weights that differ by rounding only"
    ]


def _command(checkpoint: Checkpoint, roles: list[str]) -> str:
    hessians = f" --hessians {','.join(roles)}" if roles else ""
    return f"phasefold calibrate {checkpoint.label} --text TEXT --out STATS{hessians}"


def check_statistics(plan: Plan, statistics: Statistics) -> None:
    """Do the statistics fit the plan? Headers only. Raises PlanError: other statistics than planned, another model,
    no Hessians where GPTQ is asked for.
    """
    where = statistics.folder
    if plan.extras.statistics.get("digest") != statistics.digest:
        raise PlanError(f"{where}: not the statistics that this job was planned with; plan it again with these")
    if (theirs := statistics.about["architecture"]) != plan.architecture:
        raise PlanError(
            f"{where}: of another model: calibrated on {theirs}, {plan.checkpoint.label} is {plan.architecture}"
        )
    shapes: dict[str, Shape] = {}
    for file in sorted(set(statistics.files.values())):
        size, raw = read_header(where / file)
        shapes |= {name: stored.shape for name, stored in parse_header(raw, size, file, where / file)}
    held = plan.checkpoint.tensors
    for name in shapes:
        module = name.removesuffix(".tokens")
        if module != name and ".cache." not in name and ".experts.pool." not in name:
            if not any(f"{module}{suffix}" in held for suffix in (".weight", ".weight_packed")):
                raise PlanError(f"{where}: of another model: they know {module}, which {plan.checkpoint.label} lacks")
    mtp = {spec.name.removesuffix(".weight") for spec in identify(plan.checkpoint.config).tensors() if spec.mtp}
    hessians: dict[str, bool] = {}
    judged: dict[str, bool] = {}
    for unit in filter(guided, plan.units()):
        source, pool, columns = input_of(unit.module), pool_of(unit.module), unit.shape[1]
        if f"{unit.module}.tokens" not in shapes and unit.module not in mtp:
            raise PlanError(f"{where}: nothing about {unit.module} in it; calibrate {plan.checkpoint.label} itself")
        expected = {f"{unit.module}.second_moment": (columns,), f"{source}.hessian": (columns, columns)}
        for name, shape in expected.items():
            if shapes.get(name, shape) != shape:
                raise PlanError(
                    f"{where}: of another model: {name} is {list(shapes[name])}, its inputs have {columns} channels"
                )
        if unit.method == "gptq":
            there = f"{source}.hessian" in shapes or f"{pool}.hessian" in shapes
            hessians[unit.role] = hessians.get(unit.role, False) or there
            there = f"{source}.heldout" in shapes or f"{pool}.heldout" in shapes
            judged[unit.role] = judged.get(unit.role, False) or there
    if lacking := sorted(role for role, there in hessians.items() if not there):
        raise PlanError(
            f"{where}: no Hessians of {lacking[0]} in it, which GPTQ needs; make them with "
            f"`{_command(plan.checkpoint, lacking)}`"
        )
    if lacking := sorted(role for role, there in judged.items() if not there):
        raise PlanError(
            f"{where}: no held-out inputs of {lacking[0]} in it, without which no result of GPTQ is taken; calibrate "
            "on 8 sequences or more"
        )


def worker_bytes(plan: Plan) -> int:
    """What GPTQ holds at most in one worker: a matrix as float32 some times over, its input's Hessian and factors."""
    shapes = {unit.shape for unit in plan.units() if unit.method == "gptq"}
    return max((4 * (6 * columns * columns + 5 * rows * columns) for rows, columns in shapes), default=0)


class Guide:
    """Reads a statistics folder for all workers of a job. What is read depends on the matrix alone."""

    def __init__(self, statistics: Statistics, workers: int, devices: Iterable[str] = ("cpu",)) -> None:
        self.statistics = statistics
        # on each device, as torch names it; a graphics card has one matrix at a time, and workers may be in two layers
        self._factors = {name: _Latest[str, Factored](workers if name == "cpu" else 2) for name in devices}
        self._pooled = {name: _Latest[str, Factored](2) for name in devices}
        self._turns = {name: threading.Lock() if name != "cpu" else nullcontext() for name in devices}
        self._moments = _Latest[str, "Tensor | None"](2)
        self._whole = _Latest[str, None](1 << 16)  # files whose bytes were looked through

    def columns(self, module: str) -> Columns | None:
        """Weights for the search; None where no token has reached the module and nothing stands for it."""
        import torch

        own, tokens = self._read(f"{module}.second_moment", squares=True), self.statistics.tokens(module)
        name = pool_of(module) if _shares(module) else None
        pool = self._moments.get(name, lambda: self._pooled_moment(name)) if name else None
        if own is None or tokens == 0:
            if pool is None:
                return None
            mixed = pool
        else:
            prior = own.double().mean() if pool is None else pool
            mixed = (own.double() * tokens + prior * PRIOR_TOKENS) / (tokens + PRIOR_TOKENS)
        mean = mixed.mean()
        if mean == 0:  # nothing but zeros came in: all columns are alike
            return None
        weights = (mixed / mean).clamp(min=FLOOR).to(torch.float32)
        return Columns(weights.numpy().tobytes(), pooled=own is None or tokens == 0)

    def search(self, unit: Unit, target: Target) -> tuple[Target, str, bool]:
        """The search that a unit begins with, what to call it, and whether GPTQ goes on with its matrix as a whole.

        "imatrix"; "imatrix-pool" where no token but others' has reached the module; "data-free" where none has.
        """
        columns = self.columns(unit.module)
        if columns is None:
            return target._replace(method="search", objective="weighted"), "data-free", False
        target = target._replace(method="search", objective="mse", column_weights=columns.weights)
        return target, "imatrix-pool" if columns.pooled else "imatrix", unit.method == "gptq"

    def improve(
        self,
        unit: Unit,
        matrix: Matrix,
        report: Report,
        method: str | None,
        results: tuple[memoryview, Any],
        device: str = "cpu",
    ) -> tuple[Report, str | None]:
        """GPTQ after the search: see `whole.improve`. One matrix at a time on a graphics card."""
        from .whole import improve

        if report.fault is not None:
            return report, method
        with self._turns[device]:
            report, taken = improve(unit.module, matrix, report, *results, self, device)
        return report, taken or method

    @staticmethod
    def one_thread() -> AbstractContextManager[None]:
        """See `gptq.one_thread`."""
        from .gptq import one_thread

        return one_thread()

    def factors(self, module: str, device: str = "cpu") -> tuple[Factors | None, bool] | None:
        """The factored Hessian, on a device, and whether it is the pool's alone; None where this matrix has no Hessian.

        The factors are None where a Hessian has none.
        """
        if not _shares(module):
            return self._factor(module, device)
        source = input_of(module)
        if f"{source}.hessian" in self.statistics.files:
            return self._factors[device].get(source, lambda: self._factor(module, device))
        return self._pooled[device].get(str(pool_of(module)), lambda: self._factor(module, device))

    def _factor(self, module: str, device: str) -> tuple[Factors | None, bool] | None:
        from .gptq import factor, shrink

        own = self._read(f"{input_of(module)}.hessian")
        pool = self._read(f"{pool_of(module)}.hessian") if _shares(module) else None
        if own is not None:
            tokens = self.statistics.tokens(module)
            return factor(shrink(own, tokens, pool).to(device), tokens), False
        return (factor(pool.to(device), 0), True) if pool is not None else None

    def heldout(self, module: str) -> Tensor | None:
        """Inputs [m, K] that the statistics have not seen; the pool's for a gate or up projection without any."""
        own = self._read(f"{input_of(module)}.heldout")
        if (own is None or not len(own)) and _shares(module):
            own = self._read(f"{pool_of(module)}.heldout")
        return own if own is not None and len(own) else None

    def _pooled_moment(self, pool: str) -> Tensor | None:
        """Mean of x^2 over all tokens of all experts of the layer, float64; None where there were none."""
        if (hessian := self._read(f"{pool}.hessian")) is not None:
            return hessian.diagonal().double()
        stem, leaf = pool.removesuffix(pool[pool.rindex(".pool.") :]), pool.rpartition(".")[2]
        total, tokens, expert = None, 0, 0
        while (name := f"{stem}.{expert}.{leaf}") + ".tokens" in self.statistics.files:
            moment, count = self._read(f"{name}.second_moment", squares=True), self.statistics.tokens(name)
            if moment is not None and count:
                total = moment.double() * count + (0 if total is None else total)
                tokens += count
            expert += 1
        return None if total is None else total / tokens

    def _read(self, name: str, *, squares: bool = False) -> Tensor | None:
        """A tensor of the folder, looked through. Raises CheckpointError where it cannot be what its name says."""
        if (file := self.statistics.files.get(name)) is not None:
            self._whole.get(file, lambda: self.statistics.check_file(file))
        found = self.statistics.read(name)
        if found is not None and not (bool(found.isfinite().all()) and not (squares and bool((found < 0).any()))):
            what = "not finite" if not bool(found.isfinite().all()) else "negative"
            raise CheckpointError(f"{self.statistics.folder}: {name} is {what} somewhere; calibrate again")
        return found


def _shares(module: str) -> bool:
    """Whether a module is a gate or up projection of a routed expert, whose input all experts of its layer share."""
    return pool_of(module) is not None and input_of(module).endswith((".gate_proj", ".w1"))


class _Latest(Generic[Key, Made]):
    """Values of the last few keys. A thread that asks for one that another is making waits for it."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._held: OrderedDict[Key, Future[Made]] = OrderedDict()

    def get(self, key: Key, make: Callable[[], Made]) -> Made:
        with self._lock:
            future = self._held.get(key)
            mine = future is None
            if future is None:
                future = self._held[key] = Future()
                while len(self._held) > self._size:
                    self._held.popitem(last=False)
            self._held.move_to_end(key)
        if mine:
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
                raise
        return future.result()
