"""Runs the cells of a claim: SFT weights once per seed, then RL, each an `rstar2 train` of its own.

Every process gets one thread and AVX2 kernels, so that a cell gives the same numbers on every CPU
that has AVX2, alone or beside others.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

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
from rstar2.evidence.results import CellResult, read_numbers, read_result, write_result
from rstar2.record import dump_recipe, is_finished
from rstar2.tasks import together

ARITHMETIC = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OMP_NUM_THREADS": "1",
}
"""Environment of every run: numbers depend on the kernels and on the number of threads."""

STOP_DEADLINE_S = 60.0

Say = Callable[[str], None]
Execute = Callable[[Recipe, Path], Awaitable[float]]
"""Runs a recipe in a directory to its end, or resumes it; returns the core-seconds used."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where claims, their results and their run directories are."""

    claims: Path
    runs: Path

    @property
    def results(self) -> Path:
        return self.claims / "results"


def missing_cells(claim: Claim, places: Places) -> list[Cell]:
    """The cells that have no result yet, in the order in which to run them."""
    return [
        cell for cell in dict.fromkeys(cells_of(claim)) if recorded(places, claim, cell) is None
    ]


def recorded(places: Places, claim: Claim, cell: Cell) -> CellResult | None:
    """The result of a cell; raises UserError if other settings made it."""
    result = read_result(places.results, cell)
    owner = claim if cell.claim == claim.name else read_claim(places.claims, cell.claim)
    if result is not None and result.recipe != fingerprint(cell_recipe(owner, cell)):
        raise UserError(
            f"{cell}: the recorded result has other settings than the claim has now; delete "
            f"{places.results / cell.claim / cell.name}.json to run it again"
        )
    return result


@dataclass(slots=True)
class CellRunner:
    """Runs cells; SFT weights are trained once and shared."""

    places: Places
    execute: Execute
    say: Say
    jobs: int = 1
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
                owner = (
                    claim
                    if cell.claim == claim.name
                    else read_claim(self.places.claims, cell.claim)
                )
                result = await self.run(owner, cell, self.places.runs / cell.claim / cell.name)
                write_result(self.places.results, result)
            done += 1
            left = (monotonic() - started) / done * (len(missing) - done) / 60
            self.say(
                f"{cell} done in {result.made['core_seconds']:.0f} core-seconds; "
                f"{total - len(missing) + done} of {total} cells, about {left:.0f} min left"
            )

        if missing:
            self.say(f"{len(missing)} of {total} cells to run{self._estimate(claim, len(missing))}")
        await together(one(cell) for cell in missing)

    def _estimate(self, claim: Claim, missing: int) -> str:
        """About how long the missing cells take, from those that are recorded."""
        results = (recorded(self.places, claim, cell) for cell in dict.fromkeys(cells_of(claim)))
        known = [result.made["core_seconds"] for result in results if result is not None]
        if not any(known):
            return ""
        return f", about {sum(known) / len(known) * missing / self.jobs / 60:.0f} min"

    async def run(self, claim: Claim, cell: Cell, path: Path) -> CellResult:
        """Run one cell in a directory and return its numbers."""
        recipe = cell_recipe(claim, cell)
        started_from = None
        runnable = recipe
        if (before := sft_recipe(claim, cell)) is not None:
            started_from = fingerprint(before)
            weights = await self._weights(before, started_from)
            runnable = from_weights(recipe, weights)
        if recipe.rl.staleness and not is_finished(path):  # resumed, it would have other numbers
            shutil.rmtree(path, ignore_errors=True)
        spent = None if is_finished(path) else await self.execute(runnable, path)
        about = machine.describe()
        return CellResult(
            claim=claim.name,
            arm=cell.arm,
            seed=cell.seed,
            recipe=fingerprint(recipe),
            sft=started_from,
            numbers=read_numbers(path),
            made={
                "core_seconds": spent if spent is not None else _cost(path),
                "arithmetic": ARITHMETIC,
                "cpu": about["cpu"],
                "commit": about["commit"],
                "torch": about["packages"].get("torch"),
            },
        )

    async def _weights(self, recipe: Recipe, name: str) -> Path:
        """The SFT weights of a recipe: trained by the first cell that needs them."""
        path = self.places.runs / "sft" / name
        async with self._sft.setdefault(name, asyncio.Lock()):
            if not is_finished(path):
                self.say(f"SFT weights {name} (seed {recipe.seed}): training")
                spent = await self.execute(recipe, path)
                self.say(f"SFT weights {name} done in {spent:.0f} core-seconds")
        return path / "exports" / "sft"


def _cost(path: Path) -> float:
    """The core-seconds of a run that had finished before its numbers were read."""
    return float(path.with_name(path.name + ".cost").read_text())


async def execute(recipe: Recipe, path: Path) -> float:
    """Run a recipe as a process with fixed arithmetic."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file, log, cost = (path.with_name(path.name + end) for end in (".yaml", ".log", ".cost"))
    file.write_text(dump_recipe(recipe))
    train = [sys.executable, "-m", "rstar2", "train", str(file), "--run", str(path)]
    child = Child(
        path.name,
        [sys.executable, "-m", "rstar2.evidence.timed", str(cost), *train],
        parent_death_signal=signal.SIGTERM,
        grace_s=STOP_DEADLINE_S,
        environment={**os.environ, **ARITHMETIC},
        log=log,
    )
    try:
        status = await child.wait()
    finally:  # when the claim is stopped, its runs stop gracefully
        await child.stop()
    if status != 0:
        raise InfrastructureError(f"{path.name}: {child.post_mortem()} (log: {log})")
    return float(cost.read_text())


async def repeat(runner: CellRunner, claim: Claim, cell: Cell) -> CellResult:
    """Run a cell again from its SFT weights, in a directory of its own."""
    path = runner.places.runs / "again" / cell.claim / cell.name
    shutil.rmtree(path, ignore_errors=True)
    return await runner.run(claim, cell, path)


def parse_cell(claim: Claim, text: str) -> Cell:
    """`ARM/SEED` of a claim."""
    arm, _, seed = text.partition("/")
    seeds = claim.all_seeds
    if arm not in claim.arms or not seed.isdigit() or int(seed) not in seeds:
        known: Sequence[str] = list(claim.arms)
        raise UserError(
            f"--cell {text}: write it as ARM/SEED; arms are {', '.join(known)}, seeds {seeds[0]} "
            f"to {seeds[-1]}"
        )
    if claim.arms[arm].same_as is not None:
        raise UserError(f"--cell {text}: these are the cells of {claim.arms[arm].same_as}")
    return Cell(claim.name, arm, int(seed))
