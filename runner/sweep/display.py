"""What a sweep shows while it runs: two progress bars on a terminal, plain lines elsewhere.

Knows records and phases, not how they come about.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from runner.errors import TrialFailure
from runner.load.table import level_line
from runner.schema.experiment import Budget
from runner.schema.launch import Phase
from runner.schema.trial import Measurement, Outcome, TrialRecord
from runner.space.asked import asked_and_effective

POLL_S = 0.5
"""How often the node is asked for its phase."""


def clock(seconds: float) -> str:
    """``75`` as ``1:15``, ``4000`` as ``1:06:40``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Display:
    """The terminal of one sweep; use as a context manager.

    Args:
        console: Where to.
        budget: When the study ends.
        simulated: Whether every number shown is simulated, and called so.
    """

    def __init__(self, console: Console, *, budget: Budget, simulated: bool) -> None:
        self._console = console
        self._trials = budget.trials
        self._wall_s = budget.wall_s
        self._simulated = simulated
        self._began = time.monotonic()
        self._spent_s: list[float] = []
        self._best = "none yet"
        self._done = 0
        self._owed = 0
        self._shown_phase = ""
        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
        self._progress = Progress(
            TextColumn("{task.description}"), *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._study_bar: TaskID | None = None
        self._trial_bar: TaskID | None = None

    def __enter__(self) -> "Display":
        self._progress.start()
        self._study_bar = self._progress.add_task("trials", total=self._trials, completed=self._done, note="")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str, style: str = "") -> None:
        """One line that stays."""
        self._console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def trial(self, title: str, steps: tuple[str, ...], phase: Callable[[], Phase]) -> Iterator[None]:
        """Shows a trial and follows its phase for as long as the block runs."""
        self.say(title, style="bold")
        self._shown_phase = ""
        self._trial_bar = self._progress.add_task("  this trial", total=len(steps), note="")
        over = threading.Event()
        follower = threading.Thread(target=self._follow, args=(over, steps, phase), daemon=True)
        follower.start()
        began = time.monotonic()
        try:
            yield
        finally:
            over.set()
            follower.join()
            self._spent_s.append(time.monotonic() - began)
            self._progress.remove_task(self._trial_bar)

    def measured(self, measurement: Measurement) -> None:
        """One level's line, in the manner people know."""
        self.say("  " + level_line(measurement) + ("  (simulated)" if self._simulated else ""))

    def stands(self, *, done: int, owed: int, best: str) -> None:
        """Where the study is.

        Args:
            done: Trials that count.
            owed: Repeats it still makes when it runs out of time.
            best: Highest figure so far, in words.
        """
        self._done, self._owed, self._best = done, owed, best
        if self._study_bar is not None:
            self._progress.update(self._study_bar, completed=done, note=self._study_note())

    def ended(self, record: TrialRecord) -> None:
        """A trial's last line; ``stands`` was told before."""
        if record.effective is not None:
            for line in (*asked_and_effective(record.config, record.effective), *record.effective.degraded):
                self.say(f"  {line}", style="yellow")
        if record.duplicate_of is not None:
            self.say(f"  same as trial {record.duplicate_of}: its ladder is taken over")
        elif record.failure is not None:
            word = "ruled out" if record.outcome is Outcome.PRUNED else "failed"
            self.say(f"  {word}: {record.failure.kind}: {record.failure.message}", style="yellow")
        if not self._console.is_terminal:
            self.say(f"  {self._done}/{self._trials} trials, {self._study_note()}")

    def _study_note(self) -> str:
        elapsed_s = time.monotonic() - self._began
        left_s = self._left_s(elapsed_s)
        eta = f", about {clock(left_s)} left" if left_s else ""
        return f"{clock(elapsed_s)} elapsed{eta}; best {self._best}"

    def _left_s(self, elapsed_s: float) -> float | None:
        """Seconds until the trials or the clock end the study, at the pace so far; None before there is one."""
        if not self._spent_s:
            return None
        mean_s = sum(self._spent_s) / len(self._spent_s)
        left_s = mean_s * max(self._trials - self._done, 0)
        if self._wall_s is None:
            return left_s
        return min(left_s, max(self._wall_s - elapsed_s, 0.0) + mean_s * self._owed)

    def _follow(self, over: threading.Event, steps: tuple[str, ...], phase: Callable[[], Phase]) -> None:
        while not over.wait(POLL_S):
            try:
                now = phase()
            except TrialFailure:
                # The trial itself will say what became of its node.
                return
            self._show(now, steps)

    def _show(self, phase: Phase, steps: tuple[str, ...]) -> None:
        name = phase.name.split(" ")[0]
        if self._study_bar is not None:
            self._progress.update(self._study_bar, note=self._study_note())
        if self._trial_bar is not None:
            done = steps.index(name) if name in steps else 0
            note = f"{phase.name} {clock(phase.elapsed_s)} {phase.detail}"
            self._progress.update(self._trial_bar, completed=done, note=note)
        if phase.name != self._shown_phase and not self._console.is_terminal:
            self.say(f"  {phase.name} {phase.detail}".rstrip())
        self._shown_phase = phase.name
