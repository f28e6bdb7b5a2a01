"""Runs the cells of a claim: SFT weights once per seed, then RL, each an `rstar2 train` of its own,
then the claim's evaluations, each an `rstar2 eval`.

With AVX2 arithmetic every process gets one thread and AVX2 kernels, so that a cell gives the same
numbers on every CPU that has AVX2, alone or beside others.

A result is written when its cell or its evaluation is complete. What was stopped is resumed from
its run directory or evaluation directory.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from rstar2 import machine
from rstar2.child import Child
from rstar2.config import Recipe
from rstar2.errors import InfrastructureError, UserError
from rstar2.evidence.claim import (
    Cell,
    Claim,
    cell_recipe,
    cells_of,
    fingerprint,
    from_weights,
    read_claim,
    sft_recipe,
)
from rstar2.evidence.evaluations import eval_command, fits, read_evaluated, write_evaluation
from rstar2.evidence.results import (
    COLUMNS,
    CellNumbers,
    CellResult,
    read_numbers,
    read_result,
    write_result,
)
from rstar2.record import dump_recipe, is_finished
from rstar2.tasks import cancel_all, together

ARITHMETIC: dict[str, dict[str, str]] = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OMP_NUM_THREADS": "1",
    },
    "native": {},
}
"""Environment of every process of a claim: numbers depend on kernels and number of threads."""

STOP_DEADLINE_S = 60.0
PROGRESS_S = 30.0
"""Time between two looks at the log of a running cell."""
LOG_TAIL = 4096

Say = Callable[[str], None]
Environment = Mapping[str, str]
Execute = Callable[[Recipe, Path, Environment], Awaitable[float]]
"""Runs a recipe in a directory to its end, or resumes it; returns the core-seconds used."""
Evaluate = Callable[[Sequence[str], Path, Environment], Awaitable[float]]
"""The same for the arguments of an `rstar2 eval` into a directory."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where claims, their results and their run directories are."""

    claims: Path
    runs: Path

    @property
    def results(self) -> Path:
        return self.claims / "results"


def missing_cells(claim: Claim, places: Places) -> list[Cell]:
    """The cells that lack a result or an evaluation, in the order in which to run them."""
    return [
        cell
        for cell in dict.fromkeys(cells_of(claim))
        if recorded(places, claim, cell) is None or missing_evaluations(claim, places, cell)
    ]


def missing_evaluations(claim: Claim, places: Places, cell: Cell) -> list[str]:
    """The evaluations that a cell lacks, in the order in which to make them."""
    owner = owner_of(places, claim, cell)
    result = recorded(places, claim, cell)
    made = {} if result is None else result.evaluations
    return [name for name in owner.evaluations_of(cell.arm, cell.seed) if name not in made]


def owner_of(places: Places, claim: Claim, cell: Cell) -> Claim:
    """The claim that a cell belongs to: this one, or that of `same_as`."""
    return claim if cell.claim == claim.name else read_claim(places.claims, cell.claim)


def recorded(places: Places, claim: Claim, cell: Cell) -> CellResult | None:
    """The result of a cell; raises UserError if other settings made it."""
    result = read_result(places.results, cell)
    if result is None:
        return None
    owner = owner_of(places, claim, cell)
    settings = fingerprint(cell_recipe(owner, cell))
    made_with = [result.recipe, *(made.recipe for made in result.evaluations.values())]
    as_asked = all(
        fits(owner.evaluations[name], made)
        for name, made in result.evaluations.items()
        if name in owner.evaluations
    )
    if not as_asked or any(recipe != settings for recipe in made_with):
        raise UserError(
            f"{cell}: the recorded result has other settings than the claim has now; delete "
            f"{places.results / cell.claim / cell.name}.*json to run it again"
        )
    return result


@dataclass(slots=True)
class CellRunner:
    """Runs cells; SFT weights are trained once and shared."""

    places: Places
    execute: Execute
    evaluate: Evaluate
    say: Say
    jobs: int = 1
    only: Sequence[str] = ()
    """The evaluations to make; empty means all."""
    progress_s: float = PROGRESS_S
    _sft: dict[str, asyncio.Lock] = field(default_factory=dict)

    async def run_all(self, claim: Claim) -> None:
        """Run what is missing, at most `jobs` cells at once."""
        missing = missing_cells(claim, self.places)
        total = len(set(cells_of(claim)))
        free = asyncio.Semaphore(self.jobs)
        started, done = monotonic(), 0

        async def one(cell: Cell) -> None:
            nonlocal done
            async with free:
                await self.complete(owner_of(self.places, claim, cell), cell)
            done += 1
            left = (monotonic() - started) / done * (len(missing) - done) / 60
            self.say(
                f"{cell} done; {total - len(missing) + done} of {total} cells, about "
                f"{left:.0f} min left"
            )

        if missing:
            self.say(f"{len(missing)} of {total} cells to run{self._estimate(claim, len(missing))}")
        await together(one(cell) for cell in missing)

    def _estimate(self, claim: Claim, missing: int) -> str:
        """About how long the missing cells take, from those that are recorded."""
        results = (recorded(self.places, claim, cell) for cell in dict.fromkeys(cells_of(claim)))
        known = [result.made["core_seconds"] for result in results if result is not None]
        if not any(known) or claim.evaluations:
            return ""
        return f", about {sum(known) / len(known) * missing / self.jobs / 60:.0f} min"

    async def complete(self, claim: Claim, cell: Cell) -> None:
        """Run or resume a cell and its evaluations, whatever of them is not recorded."""
        path = self.places.runs / cell.claim / cell.name
        if recorded(self.places, claim, cell) is None:
            result = await self.run(claim, cell, path)
            write_result(self.places.results, result)
            if spent := result.made["core_seconds"]:
                self.say(f"{cell}: trained in {spent:.0f} core-seconds")
        for name in missing_evaluations(claim, self.places, cell):
            if not self.only or name in self.only:
                await self._evaluate(claim, cell, name, path)

    async def run(self, claim: Claim, cell: Cell, path: Path) -> CellResult:
        """Run one cell in a directory and return its numbers."""
        recipe = cell_recipe(claim, cell)
        started_from = None
        runnable = recipe
        if (before := sft_recipe(claim, cell)) is not None:
            started_from = fingerprint(before)
            runnable = from_weights(recipe, await self._weights(claim, before))
        if recipe.rl.staleness and not is_finished(path):  # resumed, it would have other numbers
            shutil.rmtree(path, ignore_errors=True)
        if not recipe.rl.stages:
            numbers, spent = CellNumbers({column: [] for column in COLUMNS}, {}), 0.0
        elif is_finished(path):
            numbers, spent = read_numbers(path), _cost(path)
        else:
            training = self.execute(runnable, path, ARITHMETIC[claim.arithmetic])
            spent = await self._with_progress(f"{cell}", path, training)
            numbers = read_numbers(path)
        return CellResult(
            claim=claim.name,
            arm=cell.arm,
            seed=cell.seed,
            recipe=fingerprint(recipe),
            sft=started_from,
            numbers=numbers,
            made=_made(claim, spent),
        )

    async def _weights(self, claim: Claim, recipe: Recipe) -> Path:
        """The SFT weights of a recipe: trained by the first cell that needs them."""
        name = fingerprint(recipe)
        path = self.places.runs / "sft" / name
        async with self._sft.setdefault(name, asyncio.Lock()):
            if not is_finished(path):
                self.say(f"SFT weights {name} (seed {recipe.seed}): training")
                training = self.execute(recipe, path, ARITHMETIC[claim.arithmetic])
                spent = await self._with_progress(f"SFT {name}", path, training)
                self.say(f"SFT weights {name} done in {spent:.0f} core-seconds")
        return path / "exports" / "sft"

    async def _evaluate(self, claim: Claim, cell: Cell, name: str, path: Path) -> None:
        """Make one evaluation of a cell's model, or resume it, and record it."""
        recipe = cell_recipe(claim, cell)
        model = await self._model(claim, cell, path)
        settings = path.with_name(f"{path.name}.eval.yaml")
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(dump_recipe(recipe))
        out = self.places.runs / "evaluations" / cell.claim / f"{cell.name}.{name}"
        words = eval_command(claim.evaluations[name], recipe.evaluation, settings, model, out)
        self.say(f"{cell}: {name}")
        evaluating = self.evaluate(words, out, ARITHMETIC[claim.arithmetic])
        spent = await self._with_progress(f"{cell}, {name}", out, evaluating)
        evaluated = read_evaluated(out, cell, name, fingerprint(recipe), _made(claim, spent))
        self.say(f"wrote {write_evaluation(self.places.results, evaluated)}")

    async def _with_progress(self, what: str, path: Path, work: Awaitable[float]) -> float:
        """Await a process that writes `path`; repeat the last line of its log when it changes."""
        log = log_of(path)
        shown = _last_line(log)  # of an earlier attempt
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=self.progress_s)
                if (line := _last_line(log)) not in ("", shown) and not task.done():
                    self.say(f"{what}: {line}")
                    shown = line
        finally:
            if not task.done():
                await cancel_all([task])
        return task.result()

    async def _model(self, claim: Claim, cell: Cell, path: Path) -> Path:
        """The model that a cell ends with."""
        recipe = cell_recipe(claim, cell)
        if recipe.rl.stages:
            model = path / "exports" / recipe.rl.stages[-1].name
            if not model.is_dir():
                raise UserError(
                    f"{cell}: its result is recorded, but its weights ({model}) are gone: delete "
                    f"{self.places.results / cell.claim / cell.name}.*json to train it again"
                )
            return model
        if (before := sft_recipe(claim, cell)) is not None:
            return await self._weights(claim, before)
        return _initial_model(recipe, path)


def _initial_model(recipe: Recipe, path: Path) -> Path:
    """The model before any training."""
    from rstar2.pipeline.model import find_model  # imports torch

    path.mkdir(parents=True, exist_ok=True)
    return Path(find_model(recipe, path))


def _made(claim: Claim, spent: float) -> dict[str, Any]:
    about = machine.describe()
    return {
        "core_seconds": spent,
        "arithmetic": ARITHMETIC[claim.arithmetic],
        "cpu": about["cpu"],
        "commit": about["commit"],
        "torch": about["packages"].get("torch"),
    }


def _cost(path: Path) -> float:
    """The core-seconds of a run that had finished before its numbers were read."""
    return float(path.with_name(path.name + ".cost").read_text())


def log_of(path: Path) -> Path:
    """The log of the process that writes a directory."""
    return path.with_name(path.name + ".log")


def _last_line(log: Path) -> str:
    """The last whole line of a log; "" if there is none."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL))
        whole, _, _ = file.read().decode(errors="replace").rpartition("\n")
    return whole.rpartition("\n")[2].strip()


async def execute(recipe: Recipe, path: Path, environment: Environment) -> float:
    """Run a recipe as a process of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_name(path.name + ".yaml")
    file.write_text(dump_recipe(recipe))
    return await run_rstar2(["train", str(file), "--run", str(path)], path, environment)


async def run_rstar2(words: Sequence[str], path: Path, environment: Environment) -> float:
    """Run a command of rstar2 that writes a directory; returns its core-seconds, with those of
    earlier calls that were stopped."""
    child, cost = _child(words, path, environment)
    try:
        status = await child.wait()
    finally:  # when the claim is stopped, its runs stop gracefully
        await child.stop()
    if status != 0:
        raise InfrastructureError(f"{path.name}: {child.post_mortem()} (log: {child.log})")
    return float(cost.read_text())


def _child(words: Sequence[str], path: Path, environment: Environment) -> tuple[Child, Path]:
    """The process of a command, and the file that its core-seconds are added to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log, cost = log_of(path), path.with_name(path.name + ".cost")
    if not path.exists():
        cost.unlink(missing_ok=True)
    timed = [sys.executable, "-m", "rstar2.evidence.timed", str(cost)]
    child = Child(
        path.name,
        [*timed, sys.executable, "-m", "rstar2", *words],
        parent_death_signal=signal.SIGTERM,
        grace_s=STOP_DEADLINE_S,
        environment={**os.environ, **environment},
        log=log,
    )
    return child, cost


async def repeat(runner: CellRunner, claim: Claim, cell: Cell) -> CellResult:
    """Run a cell again from its SFT weights, in a directory of its own."""
    path = runner.places.runs / "again" / cell.claim / cell.name
    shutil.rmtree(path, ignore_errors=True)
    return await runner.run(claim, cell, path)


def parse_cell(claim: Claim, text: str) -> Cell:
    """`ARM/SEED` of a claim."""
    arm, _, seed = text.partition("/")
    seeds = claim.seeds_of(arm) if arm in claim.arms else claim.all_seeds
    if arm not in claim.arms or not seed.isdigit() or int(seed) not in seeds:
        known: Sequence[str] = list(claim.arms)
        raise UserError(
            f"--cell {text}: write it as ARM/SEED; arms are {', '.join(known)}, seeds {seeds[0]} "
            f"to {seeds[-1]}"
        )
    if claim.arms[arm].same_as is not None:
        raise UserError(f"--cell {text}: these are the cells of {claim.arms[arm].same_as}")
    return Cell(claim.name, arm, int(seed))
