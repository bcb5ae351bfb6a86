"""Make vLLM believe, in a process of its own, that it stands on a CUDA card, so that its GPU code decides how to load.

Everything that chooses (quantization config, method, kernel, attention backend, the model's class) is vLLM's own; what
would touch the card (streams, library probes, collectives) is replaced. To be called before anything else of vLLM is
imported but `vllm.platforms`; it cannot be undone, so only a worker that does nothing else may call it.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import MagicMock

#: compiled modules that only the CUDA build has
_COMPILED = ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface")
#: what the CUDA build says of itself on a Hopper or Blackwell card
_SUPPORTED = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
)


def pretend_cuda(sm: int) -> None:
    """Put a card of compute capability `sm` (90 for Hopper) in the place of vLLM's platform. Memory: 141 GB."""
    import torch
    import vllm.platforms

    for name in _COMPILED:
        module = MagicMock(name=name)
        module.__path__, module.__spec__ = [], None
        sys.modules[name] = module
    vllm.platforms._current_platform = _platform(sm)

    import vllm._custom_ops
    import vllm.utils.deep_gemm
    import vllm.utils.import_utils

    for name in _SUPPORTED:
        setattr(vllm._custom_ops, name, lambda *args, **kwargs: True)
    vllm.utils.deep_gemm.has_deep_gemm = lambda: True
    vllm.utils.import_utils.has_deep_gemm = lambda: True
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = MagicMock
    cuda.current_device = lambda: torch.device("cpu")
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.current_device_index = lambda: 0


def _platform(sm: int) -> Any:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    class PretendedCuda(NonNvmlCudaPlatform):  # type: ignore[misc]
        """CUDA in every decision; the tensors are the CPU's."""

        device_type = "cpu"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(sm // 10, sm % 10)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H200" if sm == 90 else f"sm_{sm}"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 141 * 10**9

        @classmethod
        def device_count(cls) -> int:
            return 64

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def import_kernels(cls) -> None:
            CpuPlatform.import_kernels()

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

        @classmethod
        def check_if_supports_dtype(cls, dtype: Any) -> None:
            pass

        @classmethod
        def manual_seed_all(cls, seed: int) -> None:
            pass

        @classmethod
        def set_device(cls, device: Any) -> None:
            pass

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

        @classmethod
        def get_mla_prefill_backend_cls(cls, config: Any) -> Any:
            """Prefill kernels refuse head sizes that only small models have; they hold no weights: take the first."""
            try:
                return super().get_mla_prefill_backend_cls(config)
            except ValueError:
                return MLAPrefillBackendEnum.FLASH_ATTN.get_class()

    return PretendedCuda()


def pretend_rank(config: Any, rank: int, tp: int) -> None:
    """Set up vLLM's process groups as one rank of `tp`, in one process: nothing is ever sent."""
    import torch
    import vllm.distributed.device_communicators.shm_broadcast as broadcast
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    else:
        new_group = torch.distributed.new_group
        torch.distributed.new_group = lambda *args, **kwargs: new_group(*args, **(kwargs | {"backend": "fake"}))
        parallel_state._node_count = lambda group: 1
        broadcast.MessageQueue.create_from_process_group = lambda *args, **kwargs: None
    torch.distributed.init_process_group(backend="fake", rank=rank, world_size=tp, store=FakeStore())
    with set_current_vllm_config(config):
        init_distributed_environment(tp, rank, "env://", rank, backend="fake")
        initialize_model_parallel(tp, 1)
