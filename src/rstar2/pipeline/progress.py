"""Progress of a run in the terminal: a live panel, or plain lines where there is no terminal.

`ProgressView` is the interface that the controller calls. `LiveView` repaints a panel, at most four
times per second; `PlainView` prints at most one line every few seconds; `QuietView` shows nothing.
All write to stderr.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rstar2.config import Recipe
from rstar2.record import read_evaluations
from rstar2.report.table import accuracy_colour, bar, clock
from rstar2.types import Evaluation

Clock = Callable[[], float]

HISTORY = 16
PLAIN_EVERY_S = 5.0
BLOCKS = "▁▂▃▄▅▆▇█"


def make_view(stream: TextIO | None = None) -> ProgressView:
    """Make the view for a stream: a live panel on a terminal, plain lines elsewhere."""
    stream = stream or sys.stderr
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        return LiveView(Console(file=stream, highlight=False))
    return PlainView(stream)


# --------------------------------------------------------------------------- interface


class StageKind(StrEnum):
    """The kind of work of a stage; decides what a view shows of it."""

    SFT = "sft"
    RL = "rl"
    FILTER = "filter"
    EVALUATION = "evaluation"


class ProgressView(Protocol):
    """What the controller reports, in this order; `stage` to `note` repeat.

    Calls are cheap, never block and never fail a run. `record/__init__.py` lists the metrics.
    """

    def open(self, recipe: Recipe, run: Path) -> None:
        """The run starts or resumes."""
        ...

    def stage(self, name: str, kind: StageKind, total: int, done: int = 0) -> None:
        """A stage starts or resumes, with `done` of `total` steps (or problems) complete."""
        ...

    def progress(self, done: int, total: int, unit: str = "rollouts") -> None:
        """Within a step: `done` of `total` rollouts (groups, problems) are complete."""
        ...

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """A step is complete; `values` are its metrics."""
        ...

    def steps(self, total: int) -> None:
        """A time budget (`minutes`) leaves the stage this many steps."""
        ...

    def evaluation(self, evaluation: Evaluation) -> None:
        """An evaluation is complete."""
        ...

    def note(self, text: str) -> None:
        """An event worth one line: resumed, collapsed, stopping."""
        ...

    def close(self) -> None:
        """The run ended, with or without an error; the terminal is restored. Idempotent."""
        ...


class QuietView:
    """A view that shows nothing."""

    def open(self, recipe: Recipe, run: Path) -> None: ...

    def stage(self, name: str, kind: StageKind, total: int, done: int = 0) -> None: ...

    def progress(self, done: int, total: int, unit: str = "rollouts") -> None: ...

    def step(self, step: int, values: Mapping[str, Any]) -> None: ...

    def steps(self, total: int) -> None: ...

    def evaluation(self, evaluation: Evaluation) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


# --------------------------------------------------------------------------- formatting


def percent(value: Any) -> str:
    """A share as a percentage, another reward as a number; a dash if it is not known."""
    if value is None:
        return "–"
    return f"{100 * value:.1f}%" if 0 <= value <= 1 else f"{value:.3g}"


def sparkline(values: Iterable[float], low: float | None = None, high: float | None = None) -> str:
    """The values as a row of small bars between low and high.

    Without low and high their minimum and maximum are used. More than HISTORY values are averaged
    into that many bins, so that all steps are shown.
    """
    known = [v for v in values if v == v]
    if not known:
        return ""
    bins = min(len(known), HISTORY)
    cuts = [round(i * len(known) / bins) for i in range(bins + 1)]
    points = [sum(known[a:b]) / (b - a) for a, b in pairwise(cuts)]
    bottom = min(points) if low is None else low
    top = max(points) if high is None else high
    width = (top - bottom) or 1.0
    last = len(BLOCKS) - 1
    return "".join(BLOCKS[max(0, min(last, round((v - bottom) / width * last)))] for v in points)


def evaluation_line(evaluation: Evaluation) -> str:
    """One evaluation in one line."""
    a = evaluation.accuracy
    shares = a.low >= 0 and a.high <= 1
    bounds = f"{100 * a.low:.0f}–{100 * a.high:.0f}" if shares else f"{a.low:.3g} to {a.high:.3g}"
    return (
        f"{evaluation.stage}: {evaluation.mode} {percent(a.mean)} ({bounds}), "
        f"tool-error rate in correct rollouts "
        f"{percent(evaluation.failing_calls_in_correct)}, valid calls "
        f"{percent(evaluation.valid_calls)}, length {evaluation.mean_length:.0f}"
    )


# --------------------------------------------------------------------------- progress of a stage


@dataclass(slots=True)
class StageProgress:
    """Progress of the current stage; both views use it."""

    name: str = ""
    kind: StageKind = StageKind.RL
    total: int = 0
    done: int = 0
    inner: tuple[int, int, str] = (0, 0, "")
    values: dict[str, Any] = field(default_factory=dict)
    times: deque[float] = field(default_factory=lambda: deque(maxlen=10))
    step_started: float = 0.0
    history: dict[str, list[float]] = field(default_factory=dict)

    def advance(self, step: int, values: Mapping[str, Any], now: float) -> None:
        """A step is complete."""
        self.done, self.inner = step, (0, 0, "")
        self.times.append(now - self.step_started)
        self.step_started = now
        self.values.update(values)
        for name in ("reward", "failing_calls_in_correct", "response_length", "loss"):
            if values.get(name) is not None:
                self.history.setdefault(name, []).append(values[name])

    def count(self, name: str) -> str:
        """A metric as a whole number."""
        return f"{self.values.get(name) or 0:.0f}"

    def eta_s(self) -> float | None:
        """Seconds to the end of the stage, from the duration of its last steps."""
        if self.times:
            return (self.total - self.done) * sum(self.times) / len(self.times)
        return None

    @property
    def share(self) -> float:
        if self.kind in (StageKind.FILTER, StageKind.EVALUATION) and self.inner[1]:
            return self.inner[0] / self.inner[1]
        return self.done / self.total if self.total else 1.0


# --------------------------------------------------------------------------- live panel


def mismatch(values: Mapping[str, Any]) -> str:
    """Mean logprob difference of sampled tokens, engine against learner; a dash if unknown."""
    difference = values.get("mismatch/abs")
    return "–" if difference is None else f"{difference:.1e}"


class LiveView:
    """A panel that is repainted in place; finished evaluations and notes scroll above it."""

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._started = clock()
        self._recipe: Recipe | None = None
        self._run = Path()
        self._now = StageProgress()
        self._histories: dict[StageKind, dict[str, list[float]]] = {}
        self._after: dict[str, str] = {}

    def open(self, recipe: Recipe, run: Path) -> None:
        self._recipe, self._run, self._started = recipe, run, self._clock()
        for evaluation in read_evaluations(run):  # of a run that is resumed
            self._keep(evaluation)
        self._live = Live(
            self, console=self._console, refresh_per_second=4, transient=True, redirect_stdout=False
        )
        self._live.start()

    def stage(self, name: str, kind: StageKind, total: int, done: int = 0) -> None:
        history = self._histories.setdefault(kind, {})
        self._now = StageProgress(name, kind, total, done, history=history)
        self._now.step_started = self._clock()

    def progress(self, done: int, total: int, unit: str = "rollouts") -> None:
        self._now.inner = (done, total, unit)

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        self._now.advance(step, values, self._clock())

    def steps(self, total: int) -> None:
        self._now.total = total

    def evaluation(self, evaluation: Evaluation) -> None:
        self._keep(evaluation)
        self._print(Text().append("✓ ", style="green").append(evaluation_line(evaluation)))

    def _keep(self, evaluation: Evaluation) -> None:
        """Keep the accuracy after a stage for the heading."""
        if evaluation.mode == "greedy" or evaluation.stage not in self._after:
            self._after[evaluation.stage] = percent(evaluation.accuracy.mean)

    def note(self, text: str) -> None:
        self._print(Text(f"· {text}", style="dim"))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text()
        yield self._heading()
        yield self._bar(options.max_width)
        now = self._now
        if now.kind is StageKind.SFT and now.values:
            yield self._sft()
        elif now.values and now.kind is StageKind.RL:
            yield self._numbers()
            yield from self._kinds(options.max_width)
        yield Text()

    def _heading(self) -> Text:
        assert self._recipe is not None
        text = Text().append("★ ", style="yellow").append(self._recipe.name, style="bold")
        text.append(f" seed {self._recipe.seed}  ", style="dim")
        names = ["sft"] if self._recipe.sft else []
        for name in [*names, *(stage.name for stage in self._recipe.rl.stages)]:
            if name in self._after:
                text.append(f" ✓ {name} {self._after[name]} ", style="green")
            elif self._now.name.removeprefix("eval-").removeprefix("filter-") == name:
                text.append(f" ● {name} ", style="bold cyan")
            else:
                text.append(f" ○ {name} ", style="dim")
        return text.append(f"  {clock(self._clock() - self._started)}", style="dim")

    def _bar(self, width: int) -> Text:
        now = self._now
        if not now.name:
            return Text("  loading the model", style="dim")
        done, total, unit = now.inner
        text = Text(f"  {now.name:<12} ").append_text(bar(now.share, max(8, min(40, width - 50))))
        if now.kind in (StageKind.FILTER, StageKind.EVALUATION):
            return text.append(f"  {done}/{total or now.total} {unit or 'problems'}")
        text.append(f"  {now.done}/{now.total}")
        if (eta := now.eta_s()) is not None:
            text.append(f"  {clock(eta)} left", style="cyan")
            if later := self._later_s():
                text.append(f", {clock(eta + later)} in all", style="dim cyan")
        if total:
            text.append(f"  {unit} {done}/{total}", style="dim")
        return text

    def _later_s(self) -> float:
        """Seconds that the RL stages after this one will take at the current speed.

        With a time budget their number of steps is not known yet.
        """
        stages = self._recipe.rl.stages if self._recipe and not self._recipe.minutes else ()
        names = [stage.name for stage in stages]
        if self._now.name not in names or not self._now.times:
            return 0.0
        later = sum(stage.steps for stage in stages[names.index(self._now.name) + 1 :])
        return later * sum(self._now.times) / len(self._now.times)

    def _sft(self) -> Text:
        now = self._now
        text = Text().append("  loss         ", style="dim")
        text.append(f"{now.values.get('loss') or 0.0:.3f} ", style="bold")
        text.append(sparkline(now.history.get("loss", ())), style="magenta")
        if (lr := now.values.get("lr")) is not None:
            text.append(f"   learning rate {lr:.2g}", style="dim")
        return text

    def _numbers(self) -> Text:
        """Four lines of numbers, narrow enough for 80 columns."""
        v, past, count = self._now.values, self._now.history, self._now.count
        text = Text()

        def cell(name: str, value: str, marks: str = "", style: str = "") -> None:
            text.append(f"  {name}", style="dim").append(f"{value:>6} ", style="bold")
            text.append(f"{marks:<{HISTORY}}", style=style)

        cell("reward ", percent(v.get("reward")), sparkline(past.get("reward", ()), 0, 1), "green")
        failing = past.get("failing_calls_in_correct", ())
        value = percent(v.get("failing_calls_in_correct"))
        cell("tool errors in correct ", value, sparkline(failing, 0), "yellow")
        text.append("\n")
        cell(
            "length ", count("response_length"), sparkline(past.get("response_length", ())), "blue"
        )
        cell(
            "truncated              ",
            percent(v.get("truncated")),
            f" no answer {percent(v.get('no_answer'))}",
        )
        text.append("\n")
        dropped = f" {count('groups/dropped')} dropped, {count('groups/refilled')} refilled"
        cell("groups ", count("groups/used"), dropped)
        text.append("  mismatch", style="dim").append(mismatch(v).rjust(15), style="bold")
        text.append("\n")
        text.append("  step   ", style="dim")
        text.append(f"{v.get('time/step') or 0:.1f} s".rjust(6), style="bold")
        text.append_text(self._split())
        if lost := int(v.get("rollouts/lost") or 0):
            text.append(f"  {lost} rollouts lost", style="red")
        return text

    def _split(self) -> Text:
        """Shares of the last step's time."""
        v, text = self._now.values, Text()
        whole = v.get("time/step") or 1.0
        for name, style in (("generate", "blue"), ("tools", "yellow"), ("learn", "green")):
            share = (v.get(f"time/{name}") or 0.0) / whole
            text.append(" ■ ", style=style).append(f"{name} {100 * share:.0f}%", style="default")
        return text

    def _kinds(self, width: int) -> Iterable[Table]:
        """Accuracy per kind in this step's rollouts, as many per row as fit."""
        kinds = {
            name.removeprefix("accuracy/"): value
            for name, value in self._now.values.items()
            if name.startswith("accuracy/") and value is not None
        }
        if not kinds:
            return
        columns = max(1, min(4, (width + 1) // 25))
        table = Table.grid(padding=(0, 1))
        cells: list[Text] = []
        for kind, value in kinds.items():
            cell = Text().append(f"  {kind[:10]:<10} ", style="dim")
            cell.append_text(bar(value, 6, accuracy_colour(value)))
            cells.append(cell.append(f" {100 * value:3.0f}%"))
        for start in range(0, len(cells), columns):
            table.add_row(*cells[start : start + columns])
        yield table


# --------------------------------------------------------------------------- plain lines


class PlainView:
    """Prints one line per event, and one every few seconds of steps, for logs and pipes."""

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._now = StageProgress()
        self._started = self._printed = clock()

    def open(self, recipe: Recipe, run: Path) -> None:
        self._say(f"{recipe.name} seed {recipe.seed} in {run}")

    def stage(self, name: str, kind: StageKind, total: int, done: int = 0) -> None:
        self._now = StageProgress(name, kind, total, done)
        self._now.step_started = self._clock()
        behind = f", {done} of them done" if done else ""
        unit = "steps" if kind in (StageKind.SFT, StageKind.RL) else "problems"
        self._say(f"{name}: {total} {unit}{behind}")

    def progress(self, done: int, total: int, unit: str = "rollouts") -> None:
        if self._now.kind in (StageKind.FILTER, StageKind.EVALUATION) and self._due():
            self._say(f"{self._now.name}: {done}/{total} {unit}")

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        self._now.advance(step, values, self._clock())
        if self._due() or step == self._now.total:
            self._say(self._line())

    def steps(self, total: int) -> None:
        self._now.total = total

    def evaluation(self, evaluation: Evaluation) -> None:
        self._say(evaluation_line(evaluation))

    def note(self, text: str) -> None:
        self._say(text)

    def close(self) -> None:
        self._stream.flush()

    def _due(self) -> bool:
        return self._clock() - self._printed >= PLAIN_EVERY_S

    def _line(self) -> str:
        now, v = self._now, self._now.values
        head = f"{now.name} {now.done}/{now.total}"
        left = f", {clock(eta)} left" if (eta := now.eta_s()) else ""
        if now.kind is StageKind.SFT:
            return f"{head}: loss {v.get('loss') or 0.0:.3f}{left}"
        return (
            f"{head}: reward {percent(v.get('reward'))}, "
            f"tool-error rate in correct rollouts {percent(v.get('failing_calls_in_correct'))}, "
            f"length {now.count('response_length')}, truncated {percent(v.get('truncated'))}, "
            f"dropped {now.count('groups/dropped')}, refilled {now.count('groups/refilled')}, "
            f"mismatch {mismatch(v)}, "
            f"{v.get('time/step') or 0:.1f} s{left}"
        )

    def _say(self, line: str) -> None:
        self._printed = self._clock()
        self._stream.write(f"[{clock(self._printed - self._started)}] {line}\n")
        self._stream.flush()
