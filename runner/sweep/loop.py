"""The loop: ask, run, record, tell. The only place where all rooms meet; decides nothing they could decide.

Durations of a trial that are not its start, ladder or stop (nor an evidence start before it) are recorded as
``overhead``, so that the runner's own cost shows in every record.
"""

import json
import logging
import time
import uuid
from datetime import UTC, datetime

from runner import trial
from runner.cluster import Cluster, NodeHandle
from runner.errors import EnvironmentFault, Infeasible, TrialFailure, UsageError
from runner.records import StudyFiles
from runner.schema.launch import LaunchConfig, StartReport, TrialOrder
from runner.schema.study import Running
from runner.schema.trial import Outcome, Provenance, Role, TrialRecord
from runner.search import Proposal, Searcher
from runner.search.schedule import counted, repeats_owed
from runner.sweep.display import Display
from runner.sweep.interrupt import Interrupt
from runner.sweep.plan import Plan
from runner.tracking import Tracking
from runner.verdict import best_so_far, describe

log = logging.getLogger(__name__)

SEEDS_APART = 1_000_003
"""A prime above any number of trials: two studies' trials never share a seed."""


class Loop:
    """The trials of one study, one after another.

    Args:
        plan: What to do.
        study: Where records go.
        searcher: What to try.
        cluster: Where to run it.
        tracking: Makes the view of the records, in its own time.
        display: What people see.
        interrupt: Whether somebody asked to stop.
        evidence: Precede each distinct NCCL environment by a start that collects NCCL's own choices.
    """

    def __init__(
        self,
        plan: Plan,
        study: StudyFiles,
        searcher: Searcher,
        cluster: Cluster,
        tracking: Tracking,
        *,
        display: Display,
        interrupt: Interrupt,
        evidence: bool = False,
    ) -> None:
        self._plan = plan
        self._study = study
        self._searcher = searcher
        self._cluster = cluster
        self._tracking = tracking
        self._display = display
        self._interrupt = interrupt
        self._evidence = evidence
        self._known: dict[str, int] = {}
        self._twins: dict[str, int] = {}
        self._choices: dict[str, dict[str, str]] = {}
        for record in study.records():
            self._remember(record)
            if record.effective is not None and record.effective.nccl_choice:
                self._choices[_collectives(record.config)] = record.effective.nccl_choice
        self._node: NodeHandle | None = None
        self._provenance: Provenance | None = None
        self.quarantined: list[str] = []

    def run(self) -> None:
        """Runs trials until the budget, the space, the clock or the user ends the study."""
        self._show_standing()
        began = time.monotonic()
        budget_s = self._plan.experiment.budget.wall_s
        while not self._interrupt.asked:
            if self._cluster.lost is not None:
                self._give_up(self._cluster.lost)
            over = budget_s is not None and time.monotonic() - began > budget_s
            proposal = self._searcher.ask(closing=over)
            if proposal is None:
                break
            self._finish(proposal, *self._one(proposal))

    def _one(self, proposal: Proposal) -> tuple[TrialRecord, dict[str, bytes]]:
        started_at = datetime.now(UTC)
        title = f"trial {proposal.number}  {_purpose(proposal)}{describe(proposal.params)}"
        try:
            config = self._plan.space.resolve(proposal.params)
        except Infeasible as reason:
            self._display.say(title, style="bold")
            return self._ruled_out(proposal, reason, started_at), {}
        known = self._known.get(self._plan.space.key(config))
        if known is not None and proposal.role is Role.SEARCH and proposal.repeat_of is None:
            self._display.say(title, style="bold")
            return self._same_as(proposal, config, known, started_at), {}
        return self._launched(proposal, config, title, started_at)

    def _launched(
        self, proposal: Proposal, config: LaunchConfig, title: str, started_at: datetime
    ) -> tuple[TrialRecord, dict[str, bytes]]:
        began = time.monotonic()
        order = trial_order(self._plan, proposal.number, config)
        self._study.begin(
            Running(
                number=proposal.number,
                role=proposal.role,
                repeat_of=proposal.repeat_of,
                params=proposal.params,
                config=config,
                marker=order.marker,
                started_at=started_at,
            )
        )
        try:
            node = self._lease(config.gpus)
        except TrialFailure as failure:
            result = trial.TrialResult(failure=trial.failure_of(failure))
            return self._record(proposal, config, result, started_at, Provenance()), {}
        choice, evidence_s = self._nccl_choice(node, order) if self._evidence else (None, None)
        steps = ("start", *(f"C={concurrency}" for concurrency in order.ladder), "stop")
        with self._display.trial(title, steps, node.phase):
            result = trial.run(
                node, order, on_measured=self._display.measured, twin_of=lambda s: self._twin(proposal, config, s)
            )
        provenance = self._after(node, order, result)
        if result.twin is not None:
            return self._same_as(proposal, config, result.twin, started_at, result), result.files
        if choice is not None and result.started is not None:
            told = result.started.effective.model_copy(update={"nccl_choice": choice})
            result.started = result.started.model_copy(update={"effective": told})
        record = self._record(proposal, config, result, started_at, provenance)
        return _costed(record, time.monotonic() - began, evidence_s), result.files

    def _lease(self, gpus: int) -> NodeHandle:
        """A node, which looks around first when it is a new one: its machine need not be the one this runs on."""
        node = self._cluster.node(gpus)
        if node is not self._node:
            self._node, self._provenance = node, None
            for line in node.reap_leftovers():
                self._display.say(line)
        return node

    def _after(self, node: NodeHandle, order: TrialOrder, result: trial.TrialResult) -> Provenance:
        """Leaves the node clean for the next trial, or gives it up."""
        if result.stopped is not None and result.stopped.quarantined:
            self.quarantined += result.stopped.quarantined
            self._cluster.quarantine()
            return Provenance()
        try:
            if self._provenance is None:
                # Asked once per node: what is installed there does not change under a study.
                self._provenance = node.provenance()
            node.check()
            return self._provenance
        except EnvironmentFault as gone:
            log.warning("%s", gone.message)
        self._replace(order)
        return Provenance()

    def _replace(self, order: TrialOrder) -> None:
        """Another node for one that is lost, and an end to what that one left; without one the sweep ends."""
        self._cluster.drop()
        try:
            for line in self._lease(order.config.gpus).reap(order.marker):
                self._display.say(f"  left over by the lost actor, ended: {line}")
        except EnvironmentFault as none:
            self._give_up(none.message)

    def _give_up(self, why: str) -> None:
        """Ends the sweep before it charges what Ray did to one configuration after another."""
        self._searcher.stop(f"Ray is gone: {why}; the same command goes on")

    def _twin(self, proposal: Proposal, config: LaunchConfig, started: StartReport) -> int | None:
        """The trial that already measured what this server really runs; deliberate repeats have none."""
        if proposal.role is not Role.SEARCH or proposal.repeat_of is not None:
            return None
        return self._twins.get(trial.effective_key(config, started.effective) or "")

    def _nccl_choice(self, node: NodeHandle, order: TrialOrder) -> tuple[dict[str, str] | None, float]:
        """NCCL's own algorithm and protocol by size, from a start that is never timed; once per NCCL environment.

        Returns:
            What NCCL chose, None when it did not say; and the seconds this took.
        """
        began = time.monotonic()
        key = _collectives(order.config)
        if key not in self._choices:
            with self._display.trial("  evidence start (not timed)", ("start", "stop"), node.phase):
                asked = order.model_copy(update={"evidence": True, "marker": f"{order.marker}-evidence"})
                result = trial.run(node, asked, on_measured=lambda _: None, twin_of=lambda _: None)
            told = result.started.effective.nccl_choice if result.started is not None else None
            self._choices[key] = told or {}
        return self._choices[key] or None, time.monotonic() - began

    # Records

    def _record(
        self,
        proposal: Proposal,
        config: LaunchConfig,
        result: trial.TrialResult,
        started_at: datetime,
        provenance: Provenance,
    ) -> TrialRecord:
        started, stopped = result.started, result.stopped
        durations_s = {f"start: {phase}": spent for phase, spent in (started.durations_s if started else {}).items()}
        durations_s |= {f"stop: {phase}": spent for phase, spent in (stopped.durations_s if stopped else {}).items()}
        if not started or not durations_s:
            durations_s |= {step: spent for step, spent in result.durations_s.items() if step in ("start", "stop")}
        durations_s |= {step: spent for step, spent in result.durations_s.items() if step.startswith("C=")}
        return TrialRecord(
            study=self._plan.study,
            number=proposal.number,
            role=proposal.role,
            repeat_of=proposal.repeat_of,
            params=proposal.params,
            config=config,
            fingerprint=config.fingerprint,
            outcome=result.outcome,
            failure=result.failure,
            measurements=tuple(result.measurements),
            effective=started.effective if started else None,
            argv=started.argv if started else (),
            env=started.env if started else {},
            durations_s=durations_s,
            provenance=provenance,
            simulated=self._plan.experiment.engine.kind == "simulated",
            synthetic_acceptance=synthetic_acceptance(config),
            started_at=started_at,
            ended_at=datetime.now(UTC),
        )

    def _ruled_out(self, proposal: Proposal, reason: Infeasible, started_at: datetime) -> TrialRecord:
        config, _ = self._plan.space.judged(proposal.params)
        shown = config or LaunchConfig(model=self._plan.experiment.model)
        result = trial.TrialResult(failure=trial.failure_of(reason))
        record = self._record(proposal, shown, result, started_at, Provenance())
        return record.model_copy(update={"outcome": Outcome.PRUNED})

    def _same_as(
        self,
        proposal: Proposal,
        config: LaunchConfig,
        number: int,
        started_at: datetime,
        result: trial.TrialResult | None = None,
    ) -> TrialRecord:
        first = next(record for record in self._study.records() if record.number == number)
        record = self._record(proposal, config, result or trial.TrialResult(), started_at, first.provenance)
        return record.model_copy(update={"measurements": first.measurements, "duplicate_of": first.number})

    def _finish(self, proposal: Proposal, record: TrialRecord, files: dict[str, bytes]) -> None:
        """The record first: whatever fails after it can be rebuilt from it."""
        began = time.monotonic()
        record = self._study.finish(record, files | _told(record))
        self._remember(record)
        self._searcher.tell(record)
        self._tracking.log(record)
        self._show_standing()
        self._display.ended(record)
        log.debug("recording trial %d took %.3f s", record.number, time.monotonic() - began)

    def _remember(self, record: TrialRecord) -> None:
        """Keeps what later trials are compared with: the first complete trial of each configuration."""
        if record.outcome is not Outcome.COMPLETE or record.duplicate_of is not None:
            return
        self._known.setdefault(self._plan.space.key(record.config), record.number)
        effective = trial.effective_key(record.config, record.effective)
        if effective is not None:
            self._twins.setdefault(effective, record.number)

    def _show_standing(self) -> None:
        records = self._study.records()
        owed = repeats_owed(records, self._plan.experiment)
        self._display.stands(done=len(counted(records)), owed=owed, best=self._best())

    def _best(self) -> str:
        goal = self._plan.experiment.goal
        best = best_so_far(self._study.records(), self._plan.experiment)
        if best is None:
            return "none yet"
        unit = "simulated tok/s" if self._plan.experiment.engine.kind == "simulated" else "tok/s"
        share = 100 * best / goal.output_tok_s
        return f"{best:.1f} {unit} at C={goal.concurrency} ({share:.0f} % of {goal.output_tok_s:g})"


def trial_order(plan: Plan, number: int, config: LaunchConfig) -> TrialOrder:
    """What the node is told to do for one trial."""
    experiment = plan.experiment
    return TrialOrder(
        study=plan.study,
        number=number,
        marker=f"{plan.study}/{number}/{uuid.uuid4().hex[:12]}",
        engine=experiment.engine,
        model=plan.model,
        config=config,
        workload=experiment.workload,
        protocol=experiment.protocol,
        deadlines=experiment.deadlines,
        ladder=experiment.ladder,
        # Fresh prompts in every trial, the same again when the trial is looked into.
        seed=experiment.search.seed * SEEDS_APART + number,
        allow_env=experiment.allow_env,
    )


def baseline_order(plan: Plan) -> TrialOrder:
    """The order of the baseline, for a look at it.

    Raises:
        UsageError: The experiment's own configuration cannot run.
    """
    try:
        return trial_order(plan, 0, plan.space.baseline())
    except Infeasible as reason:
        raise UsageError(f"the baseline cannot run: {reason.message}", remedy="change the experiment") from reason


def _collectives(config: LaunchConfig) -> str:
    """Equal for configurations whose collectives NCCL does alike: its environment and how many take part."""
    nccl = {name: value for name, value in sorted(config.env.items()) if name.startswith("NCCL_")}
    sizes = [config.flags.get(f"{kind}-parallel-size") for kind in ("tensor", "pipeline")]
    return f"{config.gpus} {sizes} {nccl}"


def synthetic_acceptance(config: LaunchConfig) -> float | None:
    """The acceptance length asked for when drafts are accepted at a set rate instead of by the text; else None."""
    speculation = config.structured.get("speculative-config", {})
    if speculation.get("rejection_sample_method") != "synthetic":
        return None
    length = speculation.get("synthetic_acceptance_length")
    rates = speculation.get("synthetic_acceptance_rates")
    return float(length) if length is not None else 1.0 + sum(rates or ())


def _costed(record: TrialRecord, spent_s: float, evidence_s: float | None) -> TrialRecord:
    """The record with what the trial took beyond its own phases."""
    spent = record.durations_s | ({} if evidence_s is None else {"evidence": round(evidence_s, 3)})
    overhead_s = max(spent_s - sum(spent.values()), 0.0)
    return record.model_copy(update={"durations_s": spent | {"overhead": round(overhead_s, 3)}})


def _told(record: TrialRecord) -> dict[str, bytes]:
    """What was asked and what really ran, as files beside the log; the record holds both too."""
    asked = {"argv": record.argv, "env": record.env, "params": record.params, **record.config.model_dump(by_alias=True)}
    files = {"asked.json": json.dumps(asked, indent=1, default=str).encode()}
    if record.effective is not None:
        files["effective.json"] = record.effective.model_dump_json(indent=1).encode()
    return files


def _purpose(proposal: Proposal) -> str:
    if proposal.role is Role.BASELINE:
        return "baseline: "
    if proposal.role is Role.FINALIST:
        return f"fresh start of trial {proposal.repeat_of}: "
    return "" if proposal.repeat_of is None else f"again, after trial {proposal.repeat_of}: "
