"""The study as one HTML page: tok/s at each concurrency per trial, and best so far against the goal."""

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from runner.schema.experiment import Experiment
from runner.schema.trial import Role, TrialRecord
from runner.verdict import best_so_far, output_tok_s


def page(records: tuple[TrialRecord, ...], experiment: Experiment, title: str) -> str:
    """A page that needs no network: plotly's script is inside it (some 5 MB)."""
    goal = experiment.goal
    figure = make_subplots(
        rows=2,
        cols=1,
        subplot_titles=(
            "Output tok/s at each concurrency, by trial",
            f"Best so far at C={goal.concurrency} against the goal of {goal.output_tok_s:g} tok/s",
        ),
    )
    numbers = [record.number for record in records]
    hover = [_hover(record) for record in records]
    for concurrency in experiment.ladder:
        figures = [output_tok_s(record, concurrency) for record in records]
        figure.add_trace(_dots(numbers, figures, f"C={concurrency}", hover), row=1, col=1)
    best = [best_so_far(records[: i + 1], experiment) for i in range(len(records))]
    figure.add_trace(go.Scatter(x=numbers, y=best, name="best so far", line={"shape": "hv"}), row=2, col=1)
    figure.add_hline(y=goal.output_tok_s, line_dash="dash", annotation_text="goal", row=2, col=1)
    figure.update_xaxes(title_text="trial")
    figure.update_yaxes(title_text="output tok/s", type="log", row=1, col=1)
    figure.update_yaxes(title_text="output tok/s", rangemode="tozero", row=2, col=1)
    figure.update_layout(title=title, height=900)
    text: str = figure.to_html(include_plotlyjs=True)
    return text


def _dots(numbers: list[int], figures: list[float | None], label: str, hover: list[str]) -> go.Scatter:
    return go.Scatter(x=numbers, y=figures, name=label, mode="lines+markers", text=hover, connectgaps=False)


def _hover(record: TrialRecord) -> str:
    name = "baseline" if record.role is Role.BASELINE else ", ".join(f"{k}={v}" for k, v in record.params.items())
    return f"{name} ({record.failure.kind})" if record.failure is not None else name
