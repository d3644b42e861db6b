"""What a configuration is judged against besides itself: the model, the node, vLLM's version. Values only."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.space.model_facts import ModelFacts
from runner.space.settings import Target

Version = tuple[int, int, int]

COVERED_VERSIONS: tuple[Version, Version] = ((0, 24, 0), (0, 33, 0))
"""First and last version of vLLM that the rules of this package were written for; its patch releases count too."""

LAST_COVERED: Version = (*COVERED_VERSIONS[1][:2], 99)
"""Above every patch release of the last covered version."""

PROTECTIVE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Set by a host whose NVLink multicast must not be touched; a server started there always gets them."""


def parse_version(text: str | None) -> Version:
    """``0.32.0+cpu`` -> (0, 32, 0). None, or no version at all: the newest covered one."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text or "")
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else COVERED_VERSIONS[1]


@dataclass(frozen=True)
class Machine:
    """The node as far as a configuration depends on it. None: not known, and then nothing is ruled out by it.

    Attributes:
        cpus: CPUs the server's process may use.
        gpu_memory_gib: Memory of the smallest GPU.
        gpu_name: Its name.
        protected: Those of ``PROTECTIVE`` that the host sets, to that value.
        known_flags: Flags that the help of what will serve names, vLLM's or the simulator's; None: not asked.
    """

    cpus: tuple[int, ...] = ()
    gpu_memory_gib: float | None = None
    gpu_name: str | None = None
    protected: Mapping[str, str] = field(default_factory=dict)
    known_flags: frozenset[str] | None = None


def this_machine(env: Mapping[str, str]) -> Machine:
    """This process's CPUs and the protective variables of ``env``; GPUs are somebody else's to ask for."""
    return Machine(cpus=tuple(sorted(os.sched_getaffinity(0))), protected=protective_variables(env))


def protective_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The protective variables that ``env`` sets to their protective value."""
    return {name: value for name, value in PROTECTIVE.items() if env.get(name) == value}


@dataclass(frozen=True)
class Draft:
    """A draft model, as far as it is known.

    Attributes:
        model: Folder or hub name.
        missing: It is a folder, and it is not there.
        vocabulary: Size of its vocabulary; None: not known.
    """

    model: str
    missing: bool = False
    vocabulary: int | None = None


@dataclass(frozen=True)
class Surroundings:
    """Everything outside the configuration that a rule may look at.

    Attributes:
        device: ``gpu`` or ``cpu``.
        simulated: No real GPU is touched, so none needs protection.
        gpus: GPUs the study may use; None: not known.
        ladder: Concurrencies that are measured.
        drafts: Speculative method -> the draft that belongs to the model.
    """

    device: str
    version: Version
    machine: Machine
    simulated: bool = False
    gpus: int | None = None
    facts: ModelFacts | None = None
    ladder: tuple[int, ...] = ()
    drafts: Mapping[str, Draft] = field(default_factory=dict)


def whole_numbers(value: Any) -> list[int] | None:
    """A list of whole numbers, or one alone, as a list; None when it is anything else."""
    listed = [value] if isinstance(value, int) else value
    if not isinstance(listed, list | tuple) or not all(type(item) is int for item in listed):
        return None
    return list(listed)


class Reading:
    """A configuration under judgement. Remembers what was looked at: a verdict depends on nothing else.

    Args:
        state: Target -> value.
        around: What it is judged against.
    """

    def __init__(self, state: Mapping[Target, Any], around: Surroundings) -> None:
        self._state = state
        self.around = around
        self.read: set[Target] = set()

    def flag(self, name: str) -> Any:
        """Value of a plain flag; None when unset."""
        return self._get(("flag", name))

    def env(self, name: str) -> str | None:
        """Value of an environment variable that the configuration sets; None when it does not."""
        value = self._get(("env", name))
        return None if value is None else str(value)

    def field(self, flag: str, *keys: str) -> Any:
        """Value of a field inside a structured flag; None when unset."""
        return self._get(("json", flag, *keys))

    def _get(self, target: Target) -> Any:
        self.read.add(target)
        return self._state.get(target)

    def count(self, name: str, *keys: str) -> int | None:
        """Value of a plain flag, or of a field inside a structured one, as a whole number from 1.

        None when unset, or when it is no such number: a value that is kept to fail may be anything.
        """
        value = self.field(name, *keys) if keys else self.flag(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None

    def number(self, name: str) -> int | None:
        """Value of an environment variable as a whole number; None when unset or not one."""
        value = self.env(name)
        return int(value) if value is not None and re.fullmatch(r"-?\d+", value) else None

    def set_among(self, targets: Iterable[Target]) -> list[Target]:
        """Those of ``targets`` that the configuration sets."""
        return [target for target in targets if self._get(target) is not None]

    @property
    def tensor_parallel(self) -> int:
        return self.count("tensor-parallel-size") or 1

    @property
    def pipeline_parallel(self) -> int:
        return self.count("pipeline-parallel-size") or 1

    @property
    def world(self) -> int:
        """Processes with a device each: TP x PP x DP."""
        return self.tensor_parallel * self.pipeline_parallel * (self.count("data-parallel-size") or 1)

    @property
    def eager(self) -> bool:
        return self.flag("enforce-eager") is True

    @property
    def speculative_method(self) -> str | None:
        method = self.field("speculative-config", "method")
        return None if method is None else str(method)

    @property
    def draft_tokens(self) -> int:
        """Draft tokens a step, K; 0 without speculation. MTP takes the model's own number unless told."""
        if self.speculative_method is None:
            return 0
        asked = self.count("speculative-config", "num_speculative_tokens")
        if asked is not None:
            return asked
        if self.speculative_method == "suffix":
            return 24
        return (self.around.facts.mtp_layers if self.around.facts else 0) or 0

    @property
    def draft_tiers(self) -> list[tuple[int, int | None, int]]:
        """(first batch, last batch, draft tokens) of a step; one open tier unless the length goes by batch size."""
        schedule = self.field("speculative-config", "num_speculative_tokens_per_batch_size")
        if self.draft_tokens and isinstance(schedule, list):
            return [(first, last, min(tokens, self.draft_tokens)) for first, last, tokens in schedule]
        return [(1, None, self.draft_tokens)]

    @property
    def max_seqs(self) -> int | None:
        """``--max-num-seqs``, or what vLLM takes by the device; None when that is not known."""
        return self.count("max-num-seqs") or self._by_device(128, large=1024, small=256)

    @property
    def batched_tokens(self) -> int | None:
        """``--max-num-batched-tokens``, or what vLLM takes by the device; None when that is not known."""
        asked = self.count("max-num-batched-tokens")
        if asked is not None:
            return asked
        memory = self.around.machine.gpu_memory_gib or 0
        huge = memory >= 160 and self.around.version >= (0, 32, 0)
        return self._by_device(2048, large=16384 if huge else 8192, small=2048)

    def _by_device(self, per_cpu_worker: int, *, large: int, small: int) -> int | None:
        """Defaults of ``vllm serve`` by GPU memory; on a CPU by the number of workers; `throughput` doubles them.

        Source: EngineArgs.get_batch_defaults of vLLM 0.24 and 0.32.
        """
        memory = self.around.machine.gpu_memory_gib
        if self.around.device == "cpu":
            number = per_cpu_worker * self.tensor_parallel * self.pipeline_parallel
        elif memory is None:
            return None
        else:
            a100 = "a100" in (self.around.machine.gpu_name or "").lower()
            number = large if memory >= 160 or (memory >= 70 and not a100) else small
        return number * (2 if self.flag("performance-mode") == "throughput" else 1)
