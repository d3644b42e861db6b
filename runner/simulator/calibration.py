"""How close the simulated nodes come to what was measured: a table of asked, got and error.

``python -m runner.simulator calibrate`` prints it; ``tests/unit/simulator/test_simulator_calibration.py`` holds it to
tolerances.

Sources: the story's figures (a 744B mixture of experts on eight PCIe GPUs) and runs of vLLM 0.24.0 on two H200 with an
8B dense model (128 tokens in and out, one server start a row; two starts of one row differ by 12 % at C=256).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from runner.schema.launch import LaunchConfig
from runner.schema.node import SimulatedModel, SimulatedNode
from runner.simulator.describe import load_model, load_node
from runner.simulator.expected import Figures, Load, expected

STORY_INPUT_TOKENS = 32
"""The story does not tell its prompts' length; short ones, since it speaks of decoding only."""
H200_REQUESTS = {1: 14, 10: 40, 64: 192, 256: 512}
"""Requests of each concurrency, as measured: naive protocol, whole wall time."""


@dataclass(frozen=True)
class Check:
    """One figure.

    Attributes:
        node: Simulated node.
        row: Configuration, and what of it.
        concurrency: Streams; 0 where the figure is not of one concurrency.
        tolerance: Largest relative error that passes.
    """

    node: str
    row: str
    concurrency: int
    asked: float
    got: float
    tolerance: float

    @property
    def error(self) -> float:
        """Relative error."""
        return self.got / self.asked - 1.0

    @property
    def passes(self) -> bool:
        """Whether it is within tolerance."""
        return abs(self.error) <= self.tolerance


@dataclass(frozen=True)
class Row:
    """A measured configuration on two H200: output tok/s at C = 1, 10, 64, 256."""

    name: str
    node: str
    config: LaunchConfig
    output_tok_s: tuple[float, float, float, float]


def _h200(
    flags: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    compilation: dict[str, Any] | None = None,
    speculative: dict[str, Any] | None = None,
) -> LaunchConfig:
    base = {
        "tensor-parallel-size": 2,
        "disable-custom-all-reduce": True,
        "max-model-len": 4096,
        "enable-prefix-caching": False,
    }
    structured = {"compilation-config": {"pass_config": {"fuse_allreduce_rms": False}, **(compilation or {})}}
    if speculative:
        structured["speculative-config"] = speculative
    return LaunchConfig(
        model="qwen3-8b", flags=base | (flags or {}), structured=structured, env={**(env or {})}, gpus=2
    )


NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 1,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_length": 2.5,
}
LL = {"NCCL_PROTO": "LL"}
OFF, ON = "2x-h200-p2p-off", "2x-h200-nvlink"
H200_ROWS = (
    Row("unset", OFF, _h200(), (229.2, 1697, 6220, 10363)),
    Row("LL", OFF, _h200(env=LL), (229.0, 1656, 4471, 5428)),
    Row("Simple", OFF, _h200(env={"NCCL_PROTO": "Simple"}), (175.3, 1448, 6186, 8849)),
    Row("min 16 channels", OFF, _h200(env={"NCCL_MIN_NCHANNELS": "16"}), (226.8, 1873, 6271, 10697)),
    Row("max 2 channels", OFF, _h200(env={"NCCL_MAX_NCHANNELS": "2"}), (228.5, 1521, 6036, 9328)),
    Row("eager", OFF, _h200({"enforce-eager": True}), (25.4, 318, 2004, 4876)),
    Row(
        "capture 1,2,4,8",
        OFF,
        _h200(compilation={"cudagraph_capture_sizes": [1, 2, 4, 8]}),
        (218.1, 297, 1781, 4609),
    ),
    Row(
        "PP=2",
        OFF,
        _h200({"tensor-parallel-size": 1, "pipeline-parallel-size": 2}),
        (196.9, 1423, 6625, 14524),
    ),
    Row("LL, n-gram K=3", OFF, _h200(env=LL, speculative=NGRAM), (319.7, 1907, 3645, 4110)),
    Row(
        "LL, V1, sync",
        OFF,
        _h200({"async-scheduling": False}, env={**LL, "VLLM_USE_V2_MODEL_RUNNER": "0"}),
        (172.6, 1254, 3565, 4514),
    ),
    Row("NCCL", ON, _h200(), (242.9, 2150, 9903, 12334)),
    Row("custom all-reduce", ON, _h200({"disable-custom-all-reduce": False}), (266.0, 2246, 11084, 10173)),
)
H200_TOLERANCE = 0.15
STORY_TOLERANCE = 0.08


def h200_figures(rows: Iterable[Row] = H200_ROWS) -> dict[tuple[str, int], Figures]:
    """Simulated figures of the measured rows, by row name and concurrency."""
    model = load_model("qwen3-8b")
    return {
        (row.name, concurrency): expected(row.config, load_node(row.node), model, concurrency, Load(requests=requests))
        for row in rows
        for concurrency, requests in H200_REQUESTS.items()
    }


def h200_checks(figures: dict[tuple[str, int], Figures]) -> list[Check]:
    """Asked and got of every measured row."""
    return [
        Check(row.node, row.name, concurrency, asked, figures[row.name, concurrency].output_tok_s, H200_TOLERANCE)
        for row in H200_ROWS
        for concurrency, asked in zip(H200_REQUESTS, row.output_tok_s, strict=True)
    ]


def story_config(*, eager: bool = False, env: dict[str, str] | None = None) -> LaunchConfig:
    """The story's launch on eight GPUs."""
    flags = {"tensor-parallel-size": 8, "max-num-seqs": 256, "max-model-len": 4096, "enforce-eager": eager}
    return LaunchConfig(model="glm5-744b-moe-4.5bit", flags=flags, env=env or {}, gpus=8)


def story_checks() -> list[Check]:
    """Asked and got of the story's figures."""
    node, model = load_node("8x-rtx-pro-6000"), load_model("glm5-744b-moe-4.5bit")

    def run(config: LaunchConfig, concurrency: int, requests: int) -> Figures:
        return _story(config, node, model, concurrency, requests)

    eager = run(story_config(eager=True), 1, 10)
    checks = [
        _check("eager", 1, 20.0, eager.output_tok_s),
        _check("eager, share of all-reduces", 1, 0.42, eager.all_reduce_share),
        _check("graphs", 1, 43.0, run(story_config(), 1, 10).output_tok_s),
        _check("graphs, LL", 1, 57.0, run(story_config(env=LL), 1, 10).output_tok_s),
        _check("graphs, LL", 2, 92.5, run(story_config(env=LL), 2, 10).output_tok_s),
        _check("graphs, LL", 10, 145.6, run(story_config(env=LL), 10, 30).output_tok_s),
    ]
    for concurrency in (256, 1024):
        plain = run(story_config(), concurrency, 2 * concurrency).output_tok_s
        forced = run(story_config(env=LL), concurrency, 2 * concurrency).output_tok_s
        checks += [
            _check("graphs", concurrency, 1065.0, plain),
            _check("graphs, LL", concurrency, 1008.0, forced),
            Check(node.name, "LL / no LL", concurrency, 0.95, forced / plain, 0.02 / 0.95),
        ]
    return checks


def _story(
    config: LaunchConfig, node: SimulatedNode, model: SimulatedModel, concurrency: int, requests: int
) -> Figures:
    return expected(config, node, model, concurrency, Load(input_tokens=STORY_INPUT_TOKENS, requests=requests))


def _check(row: str, concurrency: int, asked: float, got: float) -> Check:
    return Check("8x-rtx-pro-6000", row, concurrency, asked, got, STORY_TOLERANCE)


def table(checks: Iterable[Check]) -> str:
    """The checks as text."""
    head = f"{'simulated node':18} {'configuration':30} {'C':>5} {'asked':>9} {'got':>9} {'error':>7}  within"
    lines = [
        f"{check.node:18} {check.row:30} {check.concurrency:5} {check.asked:9.2f} {check.got:9.2f} "
        f"{100 * check.error:+6.1f}%  {'yes' if check.passes else 'NO'}"
        for check in checks
    ]
    return "\n".join([head, *lines])
