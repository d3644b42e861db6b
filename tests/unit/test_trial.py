"""The trial border: whatever a node does, what comes out is a result, and the server is stopped."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from runner import trial
from runner.errors import Cancelled, EngineDead, EnvironmentFault, FailureKind, OutOfMemory, TrialFailure
from runner.schema.experiment import Deadlines, Engine, Protocol, Workload
from runner.schema.launch import Effective, LaunchConfig, StartReport, StopReport, TrialOrder
from runner.schema.trial import Measurement, Outcome

ORDER = TrialOrder(
    study="s", number=3, marker="m", engine=Engine(device="cpu"), model="x", config=LaunchConfig(model="x"),
    workload=Workload(), protocol=Protocol(), deadlines=Deadlines(), ladder=(1, 8), seed=1,
)  # fmt: skip
STARTED = StartReport(argv=(), env={}, durations_s={"process": 1.0}, effective=Effective())


@dataclass
class ScriptedNode:
    """A node that does what the test says: raise at a step, or measure."""

    at_start: BaseException | None = None
    at_level: dict[int, BaseException] = field(default_factory=dict)
    at_stop: BaseException | None = None
    invalid: frozenset[int] = frozenset()
    client_bound: frozenset[int] = frozenset()
    calls: list[str] = field(default_factory=list)

    def start(self, order: TrialOrder) -> StartReport:
        self.calls.append("start")
        if self.at_start:
            raise self.at_start
        return STARTED

    def measure(self, concurrency: int) -> tuple[Measurement, bytes]:
        self.calls.append(f"C={concurrency}")
        if concurrency in self.at_level:
            raise self.at_level[concurrency]
        valid = concurrency not in self.invalid | self.client_bound
        limit: Literal["client"] | None = "client" if concurrency in self.client_bound else None
        figure = 10.0 * concurrency if valid else None
        reason = None if valid else "because"
        name = f"samples-c{concurrency}.parquet"
        found = Measurement(
            concurrency=concurrency, valid=valid, output_tok_s=figure, reason=reason, limited_by=limit, samples=name
        )
        return found, b"raw"

    def stop(self) -> StopReport:
        self.calls.append("stop")
        if self.at_stop:
            raise self.at_stop
        return StopReport(durations_s={"term": 0.1}, files={"server.log": b"log"})


def run(node: ScriptedNode, twin: int | None = None) -> trial.TrialResult:
    """A trial on the node."""
    return trial.run(node, ORDER, on_measured=lambda _: None, twin_of=lambda _: twin)


def test_a_good_trial_measures_its_ladder_in_order_and_stops() -> None:
    """Start, each level once, stop; log and samples come along."""
    node = ScriptedNode()
    result = run(node)
    assert node.calls == ["start", "C=1", "C=8", "stop"]
    assert result.outcome is Outcome.COMPLETE
    assert [m.output_tok_s for m in result.measurements] == [10.0, 80.0]
    assert set(result.files) == {"server.log", "samples-c1.parquet", "samples-c8.parquet"}
    assert set(result.durations_s) == {"start", "C=1", "C=8", "stop"}


@pytest.mark.parametrize("failure", [OutOfMemory("no memory", line="oom"), EngineDead("dead"), Cancelled("ctrl-c")])
def test_a_failed_start_is_a_result_and_is_stopped(failure: TrialFailure) -> None:
    """The kind and the facts survive; the server is stopped all the same."""
    node = ScriptedNode(at_start=failure)
    result = run(node)
    assert node.calls == ["start", "stop"]
    assert result.failure is not None
    assert (result.failure.kind, result.failure.message) == (failure.kind, failure.message)
    assert result.files["server.log"] == b"log"


def test_what_was_measured_before_a_failure_is_kept() -> None:
    """A server that dies at the second level leaves the first level's number."""
    result = run(ScriptedNode(at_level={8: EngineDead("dead")}))
    assert [m.concurrency for m in result.measurements] == [1]
    assert result.failure is not None
    assert result.failure.kind is FailureKind.ENGINE_DEAD


def test_a_defect_of_the_runner_costs_one_trial() -> None:
    """An error nobody foresaw becomes an environment failure with its traceback, and the server is stopped."""
    node = ScriptedNode(at_level={1: ZeroDivisionError("oops")})
    result = run(node)
    assert node.calls[-1] == "stop"
    assert result.failure is not None
    assert result.failure.kind is FailureKind.ENVIRONMENT
    assert "ZeroDivisionError" in result.failure.evidence["traceback"]


def test_the_first_failure_speaks_when_the_stop_fails_too() -> None:
    """A failed stop does not hide why the trial failed."""
    node = ScriptedNode(at_start=OutOfMemory("no memory"), at_stop=EnvironmentFault("stuck"))
    result = run(node)
    assert result.failure is not None
    assert result.failure.kind is FailureKind.OUT_OF_MEMORY


def test_a_failed_stop_alone_fails_the_trial() -> None:
    """A trial whose server could not be stopped is not complete."""
    result = run(ScriptedNode(at_stop=EnvironmentFault("stuck")))
    assert result.outcome is Outcome.FAILED


def test_a_ladder_without_one_valid_number_is_a_failure() -> None:
    """Nothing measured is load_failed with the reasons, never a slow trial."""
    result = run(ScriptedNode(invalid=frozenset({1, 8})))
    assert result.failure is not None
    assert result.failure.kind is FailureKind.LOAD_FAILED
    assert "because" in result.failure.message


@pytest.mark.parametrize(
    ("client_bound", "kind"),
    [({1, 8}, FailureKind.CLIENT_BOUND), ({8}, FailureKind.LOAD_FAILED), (set(), FailureKind.LOAD_FAILED)],
)
def test_a_ladder_that_only_the_client_limited_says_nothing_of_the_server(
    client_bound: set[int], kind: FailureKind
) -> None:
    """Every level void by the client is client_bound; one level void for another reason is the server's failure."""
    node = ScriptedNode(invalid=frozenset({1, 8}), client_bound=frozenset(client_bound))
    result = run(node)
    assert result.failure is not None
    assert result.failure.kind is kind


def test_a_level_that_the_client_limited_leaves_the_others() -> None:
    """As long as one level has a number, the trial is complete."""
    assert run(ScriptedNode(client_bound=frozenset({8}))).outcome is Outcome.COMPLETE


def test_a_twin_is_not_measured_again() -> None:
    """A server that really runs what was measured before is stopped right after its start."""
    node = ScriptedNode()
    result = run(node, twin=1)
    assert node.calls == ["start", "stop"]
    assert result.twin == 1


def test_effective_keys_tell_servers_apart_by_what_they_run() -> None:
    """Equal settings are equal whatever was asked; NCCL's environment counts as asked; silence is no key."""
    told = Effective(settings={"optimization_level": 2})
    plain, forced = LaunchConfig(model="x"), LaunchConfig(model="x", env={"NCCL_PROTO": "LL"})
    asked = LaunchConfig(model="x", flags={"optimization-level": 2})
    assert trial.effective_key(plain, told) == trial.effective_key(asked, told)
    assert trial.effective_key(plain, told) != trial.effective_key(forced, told)
    assert trial.effective_key(plain, Effective()) is None


def test_nccls_knobs_under_an_active_custom_all_reduce_are_inert() -> None:
    """The same server as without them; not where NCCL does the all-reduces, nor where a pipeline uses it as well."""
    custom = Effective(settings={"optimization_level": 2}, all_reduce=("CUSTOM", "PYNCCL"))
    nccl = custom.model_copy(update={"all_reduce": ("PYNCCL",)})
    plain, forced = LaunchConfig(model="x", gpus=2), LaunchConfig(model="x", gpus=2, env={"NCCL_PROTO": "LL"})
    assert trial.effective_key(plain, custom) == trial.effective_key(forced, custom)
    assert trial.effective_key(plain, nccl) != trial.effective_key(forced, nccl)
    pipeline = {"flags": {"tensor-parallel-size": 2, "pipeline-parallel-size": 2}}
    both = [config.model_copy(update=pipeline) for config in (plain, forced)]
    assert trial.effective_key(both[0], custom) != trial.effective_key(both[1], custom)
    moved = plain.model_copy(update={"env": {"NCCL_P2P_DISABLE": "1"}})
    assert trial.effective_key(plain, custom) != trial.effective_key(moved, custom)


def test_flags_that_settings_do_not_show_tell_servers_apart() -> None:
    """Four API servers are not one, though the engine's settings are the same (seen on vLLM 0.24)."""
    told = Effective(settings={"scheduler_config.max_num_seqs": 256})
    plain, seqs = LaunchConfig(model="x"), LaunchConfig(model="x", flags={"max-num-seqs": 256})
    wide = LaunchConfig(model="x", flags={"api-server-count": 4})
    assert trial.effective_key(plain, told) == trial.effective_key(seqs, told)
    assert trial.effective_key(plain, told) != trial.effective_key(wide, told)
    short = LaunchConfig(model="x", structured={"speculative-config": {"prompt_lookup_max": 3}})
    assert trial.effective_key(plain, told) != trial.effective_key(short, told)
    listed = Effective(settings={"speculative_config.prompt_lookup_max": 3})
    assert trial.effective_key(plain, listed) == trial.effective_key(short, listed)
