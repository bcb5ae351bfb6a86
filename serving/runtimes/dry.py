"""What a runtime's own loader does with a checkpoint, element by element: the part that vLLM and SGLang share.

A `Tracker` sits below the runtime's model code and sees every tensor operation. It knows which storages hold offered
checkpoint tensors and which hold parameters, follows the former through whatever is computed from them (a copy that is
dequantized, fused or transposed counts as taken), and notes as boxes which elements of which parameter were written.
So it works on tensors without data ("meta") as well as on real ones, and counts what the runtimes do not: they take a
parameter for loaded as soon as one expert of it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ...families import identify
from .boxes import Box, Geometry, boxes, geometry, volume

if TYPE_CHECKING:
    from ...formats.checkpoint import Checkpoint

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I16": torch.int16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "F32": torch.float32, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
#: by bytes an element, bit patterns that no sane weight has: NaN in every float format, absurd as packed codes
_SENTINELS = {1: (torch.uint8, 0x7F), 2: (torch.int16, -2), 4: (torch.int32, -2), 8: (torch.int64, -2)}
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")  # padded with rows of zeros


@dataclass(slots=True)
class Dry:
    """What came of a dry load.

    version, model_class: the runtime's, and the class that it chose. tensors: how many the checkpoint offered.
    not_taken: offered tensors of which nothing or, "(n of m elements)", not everything reached a parameter.
    unwritten: parameters that were not wholly written, as "name (n of m elements)". optional: those of them that do no
    harm, with the reason. methods: quantization method and kernel chosen -> modules. refused: the runtime's own
    exception, one line, or "". log: the runtime's warnings that concern weights.
    """

    version: str
    model_class: str
    tensors: int
    not_taken: list[str]
    unwritten: list[str]
    optional: list[str]
    methods: dict[str, int]
    refused: str
    log: list[str]


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A parameter of which `count` of `total` elements were not written. padding: they are padded vocabulary."""

    name: str
    count: int
    total: int
    padding: bool

    def __str__(self) -> str:
        return f"{self.name} ({self.count:,} of {self.total:,} elements)"


def offered(checkpoint: Checkpoint, *, data: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a runtime reads (of the shards that the index names); without `data` as "meta" tensors.

    Within a shard in the order of the names, as the safetensors library lists them: loaders that put several tensors
    together count on that.
    """
    from safetensors import safe_open

    files: dict[str, list[str]] = {}
    for name, stored in checkpoint.tensors.items():
        if stored.file not in checkpoint.unindexed:
            files.setdefault(stored.file, []).append(name)
    for file, names in files.items():
        if not data:
            for name in sorted(names):
                stored = checkpoint.tensors[name]
                yield name, torch.empty(stored.shape, dtype=_DTYPES[stored.dtype], device="meta")
            continue
        with safe_open(checkpoint.folder / file, framework="pt") as shard:
            for name in sorted(names):
                yield name, shard.get_tensor(name)


def has_draft(checkpoint: Checkpoint) -> bool:
    """Does the checkpoint hold an MTP layer?"""
    mtp = [spec.name.removesuffix("weight") for spec in identify(checkpoint.config).tensors() if spec.mtp]
    return bool(mtp) and any(name.startswith(tuple(mtp)) for name in checkpoint.tensors)


def by_rank(unwritten: Mapping[str, list[int]], tp: int) -> list[str]:
    """What was left unwritten -> the ranks that left it, as lines; ranks are named where it was not all of them."""
    return [
        text if len(ranks) == tp else f"{text} on rank {', '.join(map(str, ranks))}"
        for text, ranks in unwritten.items()
    ]


def fill_with_sentinels(model: torch.nn.Module) -> None:
    """Fill every parameter with a bit pattern by which `left_as_sentinels` finds what was never written."""
    for parameter in model.parameters():
        as_integers(parameter).fill_(_SENTINELS[parameter.element_size()][1])


def left_as_sentinels(model: torch.nn.Module) -> dict[str, int]:
    """Parameter -> elements that still hold the sentinel; those without any are left out."""
    found = {
        name: int((as_integers(parameter) == _SENTINELS[parameter.element_size()][1]).sum())
        for name, parameter in model.named_parameters()
    }
    return {name: count for name, count in found.items() if count}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers of the same size, in the same memory."""
    return tensor.data.view(_SENTINELS[tensor.element_size()][0])


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is written into a model's parameters while it is active, and from which offered tensors.

    Use: `tracker = Tracker(model)`, then `with tracker: model.load_weights(tracker.watch(offered(...)))`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.elements: dict[str, int] = {}  # offered tensor -> its elements
        self._sizes: dict[str, int] = {}  # offered tensor -> bytes of an element
        self.taken: set[str] = set()  # offered tensors from which anything was written into a parameter or buffer
        self._computed: set[str] = set()  # those of which that was a computed value
        self._held: dict[int, StorageWeakRef] = {}  # while we hold this, no new storage gets the number of a dead one
        self._names: dict[int, frozenset[str]] = {}  # storage -> offered tensors that its values come from
        self._sources: dict[int, tuple[str, Geometry]] = {}  # storage -> the offered tensor that lies there
        self._homes: dict[int, Geometry] = {}  # storage -> the parameter or buffer that lies there
        self._written: dict[int, set[Box]] = {}
        self._filled: dict[int, set[Box]] = {}  # with values that come from no offered tensor
        self._copied: dict[str, set[Box]] = {}  # what was copied of an offered tensor
        self._laid: dict[str, Geometry] = {}  # of what the boxes in `_copied` are
        for tensor in (*model.parameters(), *model.buffers()):
            self._homes.setdefault(self._hold(tensor), geometry(tensor))

    def watch(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, each known to the tracker from now on."""
        for name, tensor in tensors:
            number = self._hold(tensor)
            self.elements[name], self._sizes[name] = tensor.numel(), tensor.element_size()
            self._names[number], self._sources[number] = frozenset([name]), (name, geometry(tensor))
            yield name, tensor

    def __exit__(self, *raised: Any) -> None:
        """At the end: what the loader put in a parameter's place, instead of writing into it, was taken as well."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for tensor in self.model.parameters():
            if (number := _number(tensor)) not in self._homes and number in self._names:
                self.taken |= self._names[number]
                self._computed |= self._names[number]

    def absorb(self, other: Tracker) -> None:
        """Take what another model's tracker saw (another rank's, the draft's) of the same checkpoint for seen here."""
        self.taken |= other.taken
        self._computed |= other._computed
        for name, found in other._copied.items():
            self._copy(name, other._laid[name], found)

    def not_taken(self, *, whole: bool) -> list[str]:
        """Offered tensors that reached no parameter; with `whole` also those that did so in part only."""
        found = []
        for name, total in self.elements.items():
            if name not in self.taken:
                found.append(name)
            elif whole and name not in self._computed:
                count = volume(self._copied[name]) // self._sizes[name]
                if count < total:
                    found.append(f"{name} ({total - count:,} of {total:,} elements)")
        return found

    def unwritten(self) -> list[Unwritten]:
        """Parameters that were not wholly written from offered tensors, in the order of the model."""
        found = []
        for name, parameter in self.model.named_parameters():
            number, total = _number(parameter), parameter.numel()
            if number not in self._homes:  # the loader gave it other memory: all of it, or nothing
                count = 0 if number in self._names else total
                filled = False
            else:
                written, fills = self._written.get(number, set()), self._filled.get(number, set())
                size = parameter.element_size()
                count = total - volume(written) // size
                filled = bool(count) and volume(written | fills) // size == total
            if count:
                found.append(Unwritten(name, count, total, filled and name.endswith(_VOCABULARY)))
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out an operation, then note where the values of offered tensors went."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        targets = _targets(func, args, kwargs)
        read = [names for t in tensors if (names := self._names.get(_number(t))) and all(t is not w for w in targets)]
        names = frozenset().union(*read) if len(read) != 1 else read[0]
        for target in targets:
            self._note(target, names, tensors)
        if names and not targets:
            if func is torch.ops.aten.clone.default:
                self._follow(args[0], result)
            for made in _tensors([result]):
                self._spread(made, names)
        return result

    def _hold(self, tensor: torch.Tensor) -> int:
        number = _number(tensor)
        if number not in self._held:
            self._held[number] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return number

    def _spread(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        number = _number(tensor)
        if number not in self._homes and self._names.get(number) != names:  # a view has its tensor's storage
            self._hold(tensor)
            self._names[number] = self._names.get(number, frozenset()) | names

    def _note(self, target: torch.Tensor, names: frozenset[str], tensors: list[torch.Tensor]) -> None:
        number = _number(target)
        if number not in self._homes:
            if names:
                self._spread(target, names)
            return
        found = boxes(geometry(target), self._homes[number])
        (self._written if names else self._filled).setdefault(number, set()).update(found)
        self.taken |= names
        direct = set()
        for tensor in tensors:
            if (known := self._sources.get(_number(tensor))) is not None and tensor is not target:
                direct.add(known[0])
                self._copy(*known, boxes(geometry(tensor), known[1]))
        self._computed |= names - direct

    def _copy(self, name: str, laid: Geometry, found: Iterable[Box]) -> None:
        if self._laid.setdefault(name, laid) == laid:
            self._copied.setdefault(name, set()).update(found)
        else:  # once as it is and once turned: boxes that cannot be added up
            self._computed.add(name)

    def _follow(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        """A copy of a whole offered tensor, be it turned, stands for it: SGLang turns experts, then cuts them."""
        known = self._sources.get(_number(source))
        if known is not None and geometry(source).nbytes == self.elements[known[0]] * source.element_size():
            self._sources[self._hold(copy)] = known[0], geometry(copy)


def _number(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments into which an operation writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple((n, a.name) for n, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return list(_tensors(args[n] if n < len(args) else kwargs.get(name) for n, name in _writes(func)))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments or results of an operation; no operation nests them deeper than one list."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, torch.Tensor))
