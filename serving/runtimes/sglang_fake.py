"""Make SGLang believe, in a process of its own, that it stands on a CUDA card: its GPU code then decides how to load.

Everything that chooses (server arguments, quantization config, method, runner, the model's class) is SGLang's own; what
only a CUDA installation has is replaced by stand-ins that can be imported and do nothing. To be called before anything
of SGLang is imported; it cannot be undone, so only a worker that does nothing else may call it.
"""

from __future__ import annotations

import concurrent.futures
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from importlib.abc import Loader, MetaPathFinder
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

#: compiled for CUDA: no CPU has them
_CUDA_ONLY = ("sgl_kernel", "deep_gemm", "flashinfer", "flash_attn", "flash_mla", "triton", "tvm_ffi")
#: of no use to weights, but imported on the way: the server's, the tokenizers', images'
_NOT_NEEDED = ("IPython", "partial_json_parser", "sentencepiece", "torchvision", "uvicorn")
#: operators without a result: they write into an argument
_KERNELS_OF_LOADING = ("per_tensor_quant_fp8",)
_libraries: list[torch.library.Library] = []
_MULTIPROCESSORS = 132  # of an H100 or H200
_MEMORY = 141 * 10**9


class _Inert:
    """What a stand-in module has: callable, has attributes, gives a function that it decorates back as it is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return _attribute(self._name, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], type | types.FunctionType):
            return args[0]
        return _Inert(f"{self._name}()")

    def __getitem__(self, key: Any) -> _Inert:
        return self

    def __or__(self, other: Any) -> Any:
        return object  # in annotations

    __ror__ = __or__


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _attribute(self.__name__, name)


class _Finder(MetaPathFinder, Loader):
    """Finds a stand-in for each of some packages and whatever is imported from within them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = frozenset(packages)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = fullname.split(".")[0] in self.packages
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        if spec.name == "deep_gemm":
            module.get_num_sms = lambda: _MULTIPROCESSORS  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to carry out."""


def _attribute(owner: str, name: str) -> Any:
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(f"{owner} has no {name}")
    if name[0].isupper() and not name.isupper():  # by its name a class: may be derived from and asked for
        return type(name, (), {})
    return _Inert(f"{owner}.{name}")


class _Card(NamedTuple):
    """What torch.cuda.get_device_properties tells."""

    name: str
    major: int
    minor: int
    total_memory: int = _MEMORY
    multi_processor_count: int = _MULTIPROCESSORS
    warp_size: int = 32


class _InPlace(Executor):
    """Carries out at once what it is given: the tracker of a load sees only the thread that it was started in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class OnCard(TorchFunctionMode):
    """While active, what is asked for on a CUDA device, or on none in particular, is made on `device` instead."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self._default = torch.device(device), torch.device(device)

    def __enter__(self) -> OnCard:
        self._default.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._default.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out `func` with the device replaced."""
        if func is torch.Tensor.cuda:
            return args[0].to(self.device)
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = kwargs | {"device": self.device}
        if func is torch.Tensor.to:
            args = tuple(self.device if _is_cuda(arg) else arg for arg in args)
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _uncompiled(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    return model if model is not None else (lambda function: function)


def pretend_cuda(sm: int, count: int) -> None:
    """Put `count` cards of compute capability `sm` (90: Hopper) in the place of CUDA, stand-ins in that of kernels."""
    import torch.utils._triton
    import torch.utils.flop_counter  # looks for triton when it is imported
    import transformers.utils.import_utils as installed

    installed.is_torchvision_available()  # these two remember that there is none: the stand-ins are not for them
    torch.utils._triton.has_triton_package()
    sys.meta_path.insert(0, _Finder((*_CUDA_ONLY, *_NOT_NEEDED)))
    card = _Card("NVIDIA H200" if sm == 90 else f"sm_{sm}", sm // 10, sm % 10)
    pretended = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (card.major, card.minor),
        "get_device_name": lambda device=None: card.name,
        "get_device_properties": lambda device=None: card,
        "mem_get_info": lambda device=None: (_MEMORY, _MEMORY),
        "set_device": lambda device: None,
        "Stream": _Inert("Stream"),
        "Event": _Inert("Event"),
        "current_stream": lambda device=None: _Inert("Stream"),
    }
    for name, value in pretended.items():
        setattr(torch.cuda, name, value)
    torch.version.cuda = "13.0"
    torch.compile = _uncompiled
    concurrent.futures.ThreadPoolExecutor = _InPlace  # type: ignore[misc,assignment]


def stand_in_kernels() -> None:
    """Let SGLang's own operators that it runs while it loads (on what it derives from weights) do nothing on a CPU."""
    library = torch.library.Library("sglang", "IMPL", "CPU")  # type: ignore[no-untyped-call]
    for name in _KERNELS_OF_LOADING:
        library.impl(name, lambda *args, **kwargs: None)  # type: ignore[no-untyped-call]
    _libraries.append(library)  # what it says is forgotten with it


def forget_ranks() -> None:
    """Undo `pretend_ranks`, and the configuration that SGLang keeps for a process, so that another rank can follow."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import reset_context

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    reset_context()


def pretend_ranks(rank: int, tp: int) -> None:
    """Set up SGLang's process groups as `rank` of `tp`, in one process: nothing is ever sent."""
    from sglang.srt.distributed import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Group(parallel_state.GroupCoordinator):  # type: ignore[misc]
        """Who is in a group, and who we are; no connections."""

        def __init__(self, group_ranks: list[list[int]], local_rank: int, *args: Any, **kwargs: Any) -> None:
            self.rank, self.local_rank = rank, local_rank
            self.unique_name = str(kwargs.get("group_name"))
            self.device, self.device_group, self.cpu_group = torch.device("cpu"), None, None
            self.ranks = next(ranks for ranks in group_ranks if rank in ranks)
            self.world_size, self.rank_in_group = len(self.ranks), self.ranks.index(rank)

        def destroy(self) -> None:
            """Nothing was set up."""

    parallel_state.GroupCoordinator = Group
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp)
    parallel_state.init_distributed_environment(backend="fake", world_size=tp, rank=rank, local_rank=0)
    parallel_state.initialize_model_parallel(backend="fake")
