"""vLLM's and NCCL's own defaults that are the same for every model and machine, with the versions they hold for.

Read in the sources of vLLM 0.24 and 0.32 and, for 0.33, in its notes; where two differ, a version between them has no
known default here. Defaults that follow from the GPU are in ``surroundings``.
"""

import functools
from collections.abc import Mapping
from typing import Any

from runner.space.settings import Target
from runner.space.surroundings import Version

_ANY: tuple[Version, Version] = ((0, 24, 0), (0, 33, 99))
_OLD: tuple[Version, Version] = ((0, 24, 0), (0, 24, 99))
_NEW: tuple[Version, Version] = ((0, 32, 0), (0, 33, 99))

_DEFAULTS: tuple[tuple[Target, Any, tuple[Version, Version]], ...] = (
    (("flag", "tensor-parallel-size"), 1, _ANY),
    (("flag", "pipeline-parallel-size"), 1, _ANY),
    (("flag", "data-parallel-size"), 1, _ANY),
    (("flag", "decode-context-parallel-size"), 1, _ANY),
    (("flag", "optimization-level"), 2, _ANY),
    (("flag", "performance-mode"), "balanced", _ANY),
    (("flag", "gpu-memory-utilization"), 0.92, _ANY),
    (("flag", "stream-interval"), 1, _ANY),
    (("flag", "enforce-eager"), False, _ANY),
    (("flag", "disable-custom-all-reduce"), False, _ANY),
    (("flag", "enable-expert-parallel"), False, _ANY),
    (("flag", "dtype"), "auto", _ANY),
    (("env", "VLLM_ALLREDUCE_USE_SYMM_MEM"), "1", _ANY),
    (("env", "VLLM_ALLREDUCE_USE_FLASHINFER"), "0", _OLD),
    (("env", "VLLM_ALLREDUCE_USE_FLASHINFER"), "1", _NEW),
    (("env", "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC"), "0", _NEW),
    (("env", "VLLM_FLASHINFER_ALLREDUCE_BACKEND"), "auto", _ANY),
    (("env", "VLLM_USE_NCCL_SYMM_MEM"), "0", _ANY),
    (("env", "VLLM_BATCH_INVARIANT"), "0", _ANY),
    (("env", "VLLM_SKIP_P2P_CHECK"), "1", ((0, 24, 0), (0, 32, 99))),
    (("env", "VLLM_SKIP_P2P_CHECK"), "0", ((0, 33, 0), (0, 33, 99))),
    (("env", "NCCL_P2P_DISABLE"), "0", _ANY),
    (("env", "NCCL_SHM_DISABLE"), "0", _ANY),
    (("env", "NCCL_GRAPH_REGISTER"), "1", _ANY),
    (("env", "NCCL_GRAPH_MIXING_SUPPORT"), "1", _ANY),
    (("env", "NCCL_BUFFSIZE"), "4194304", _ANY),
)


@functools.cache
def defaults(version: Version) -> Mapping[Target, Any]:
    """Target -> what holds in vLLM ``version`` where nobody sets it."""
    return {target: value for target, value, (since, until) in _DEFAULTS if since <= version <= until}


def same_value(one: Any, other: Any) -> bool:
    """Equal and of one type: ``True`` is not 1, and 1 is not 1.0."""
    return type(one) is type(other) and bool(one == other)
