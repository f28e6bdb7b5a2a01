"""Runs of scheduling policies on real engines: kept in a file, compared, and predicted.

**File.** One line per run, in the order of time, so that a comparison can be made in parts. Runs
with other settings are ignored. A run of a rival counts once it stands between two runs of ours
that the same process made with the same rollouts; their mean is compared with it.

**Prediction.** `rstar2 simulate` runs the same rollouts, with the measured times between turns,
under the same policy. Its engine model is fitted to the load reports of the runs of ours next to
the predicted run, never to that run itself. So it includes what the driver, the servers' own HTTP
and the jails take from the cores, and how fast the machine was at that time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rstar2.config import SchedulerConfig
from rstar2.rollout.scheduler import Scheduler
from rstar2.rollout.simulate.compare import LEARNING
from rstar2.rollout.simulate.model import EngineFit, EngineModel, MeasuredStep, fit_engine
from rstar2.rollout.simulate.simulation import Simulation
from rstar2.rollout.simulate.workload import RolloutPlan, TurnPlan, Workload
from rstar2.rollout.thunder_agent import BUFFER, CHECK_S, ThunderAgent
from rstar2.types import EngineLoad, Trajectory

OURS = "reserve"
WARM_UP = -1
"""The repetition of runs from which policies learn; they are not compared."""
LOAD_POLL_S = 0.25
WINDOW_S = 1.0
"""Load reports are averaged over this time before a model is fitted to them."""
LEAST_ROWS = 8
"""Windows that a fit needs."""
SCALE = 16
"""Lengths are 1/16 of the paper's. So are ThunderAgent's interval and its tokens per rollout."""
ENGINES = 2


class Setting(msgspec.Struct, frozen=True):
    """What all runs that are compared have in common."""

    model: str
    kv: str
    kv_tokens: int
    """Of each engine, as requested."""
    rollouts: int
    seed: int
    max_length: int = 512
    max_turns: int = 10
    max_sequences: int = 64
    block_tokens: int = 32
    batch_tokens: int = 2048
    mean_turn: int = 48
    mean_wait_s: float = 0.2


class PolicyRun(msgspec.Struct, frozen=True):
    """One run of all rollouts under one policy."""

    setting: Setting
    process: int
    """Start of the process that made the run, in seconds since 1970."""
    kv_tokens: int
    """Of each engine, as it reports."""
    repetition: int
    policy: str
    """With `:FACTOR` for mean_cap."""
    wall_s: float
    preemptions: int
    idle_share: float
    """Mean share of the time in which an engine was idle."""
    moved: int
    rollouts: tuple[RolloutPlan, ...]
    """As measured: `tool_s` is the whole time between two turns."""
    steps: tuple[MeasuredStep, ...]
    """Mean steps of the engines, one per engine and second."""

    @property
    def tokens(self) -> int:
        """Tokens sampled."""
        return sum(turn.sampled for rollout in self.rollouts for turn in rollout.turns)

    def beside(self, other: PolicyRun) -> bool:
        """Whether the same process made both with the same rollouts."""
        return (self.process, self.repetition) == (other.process, other.repetition)


def learns(policy: str) -> bool:
    """Whether the policy keeps what it learnt in an earlier step."""
    return policy.partition(":")[0] in LEARNING


def make_scheduler(policy: str) -> Scheduler:
    """A scheduler with the named policy, in a first step."""
    name, _, factor = policy.partition(":")
    values: dict[str, object] = {"policy": name}
    if factor:
        values["cap_factor"] = float(factor)
    scheduler = Scheduler(SchedulerConfig.model_validate(values))
    if name == "thunder_agent":
        scheduler.policy = ThunderAgent(CHECK_S / SCALE, BUFFER // SCALE)
    return scheduler


# --------------------------------------------------------------------------- the file


def read_runs(file: Path, setting: Setting) -> list[PolicyRun]:
    """The runs in the file that have this setting."""
    if not file.exists():
        return []
    runs = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            run = msgspec.json.decode(line, type=PolicyRun)
        except msgspec.MsgspecError as error:
            raise SystemExit(f"{file}, line {number} is no run: {error}; remove it") from error
        if run.setting == setting:
            runs.append(run)
    return runs


def append_run(file: Path, run: PolicyRun) -> None:
    with file.open("ab") as output:
        output.write(msgspec.json.encode(run) + b"\n")


def measured_rollouts(made: Iterable[Trajectory], limit: int) -> tuple[RolloutPlan, ...]:
    """The rollouts as the simulator takes them, with the measured times between turns."""
    return tuple(
        RolloutPlan(
            rollout.id,
            rollout.group_id,
            len(rollout.prompt_ids),
            tuple(
                TurnPlan(
                    len(turn.sampled_ids),
                    0.0 if turn is rollout.turns[-1] else round(turn.tools_s, 4),
                    len(turn.response_ids),
                )
                for turn in rollout.turns
            ),
            limit,
            rollout.truncated,
        )
        for rollout in made
    )


def mean_steps(reports: Sequence[tuple[float, EngineLoad]]) -> list[MeasuredStep]:
    """Mean steps of one engine over windows of `WINDOW_S` in which every report shows it busy."""
    steps = []
    window: list[tuple[float, EngineLoad]] = []
    for report in reports:
        if not report[1].running:
            window = []
            continue
        window.append(report)
        (start, first), (end, last) = window[0], window[-1]
        if end - start < WINDOW_S:
            continue
        count = last.steps - first.steps
        if count > 0:
            steps.append(
                MeasuredStep(
                    batch=(last.decoded - first.decoded) / count,
                    context=statistics.mean(load.kv_used for _, load in window),
                    seconds=(end - start) / count,
                    prefill=(last.prefilled - first.prefilled) / count,
                )
            )
        window = [report]
    return steps


# --------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Comparison:
    """A run of a rival between two runs of ours."""

    before: PolicyRun
    run: PolicyRun
    after: PolicyRun

    @property
    def ratio(self) -> float:
        """Our speed relative to the rival's."""
        return self.run.wall_s / statistics.mean((self.before.wall_s, self.after.wall_s))


def comparisons(runs: Sequence[PolicyRun]) -> dict[tuple[int, str], Comparison]:
    """All comparisons in runs of one setting, by repetition and rival; of several the first."""
    known: dict[tuple[int, str], Comparison] = {}
    for before, run, after in zip(runs, runs[1:], runs[2:], strict=False):
        between = before.policy == after.policy == OURS and run.policy != OURS
        if between and run.beside(before) and run.beside(after) and run.repetition != WARM_UP:
            known.setdefault((run.repetition, run.policy), Comparison(before, run, after))
    return known


# --------------------------------------------------------------------------- prediction


@dataclass(frozen=True)
class Prediction:
    """The simulator's figures for the rollouts of one run."""

    run: PolicyRun
    wall_s: float
    preemptions: int
    idle_share: float
    fit: EngineFit

    @property
    def ratio(self) -> float:
        """Predicted / measured makespan."""
        return self.wall_s / self.run.wall_s


def predictions(runs: Sequence[PolicyRun]) -> list[Prediction]:
    """Predict all runs of one setting that have runs of ours next to them."""
    warm_ups = {run.policy: run for run in runs if run.repetition == WARM_UP}
    predicted = []
    for index, run in enumerate(runs):
        near = [*runs[max(0, index - 2) : index], *runs[index + 1 : index + 3]]
        ours = [other for other in near if other.policy == OURS and run.beside(other)]
        rows = [step for other in ours for step in other.steps]
        if run.repetition != WARM_UP and len(rows) >= LEAST_ROWS:
            fit = fitted_model(run, rows)
            predicted.append(predict(run, warm_ups.get(run.policy), fit))
    return predicted


def fitted_model(run: PolicyRun, rows: Sequence[MeasuredStep]) -> EngineFit:
    """An engine of the run, as fast as in these steps."""
    setting = run.setting
    sizes = EngineModel(
        name=setting.model,
        kv_tokens=run.kv_tokens,
        block_tokens=setting.block_tokens,
        max_sequences=setting.max_sequences,
        batch_tokens=setting.batch_tokens,
    )
    return fit_engine(sizes, rows)


def predict(run: PolicyRun, before: PolicyRun | None, fit: EngineFit) -> Prediction:
    """Simulate the run, after the one from which the policy learnt."""
    engines = (fit.model,) * ENGINES
    scheduler = make_scheduler(run.policy)
    if before is not None:
        _simulate(Workload("before", before.rollouts, engines), scheduler)
    simulation = _simulate(Workload("measured", run.rollouts, engines), scheduler)
    wall = max(simulation.ends.values())
    tallies = [engine.tally for engine in simulation.engines]
    return Prediction(
        run=run,
        wall_s=wall,
        preemptions=sum(tally.preemptions for tally in tallies),
        idle_share=1.0 - statistics.mean(tally.busy_s for tally in tallies) / wall,
        fit=fit,
    )


def _simulate(workload: Workload, scheduler: Scheduler) -> Simulation:
    simulation = Simulation(workload, scheduler.config, scheduler=scheduler, report_s=LOAD_POLL_S)
    simulation.run()
    return simulation
