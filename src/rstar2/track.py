"""Copy metrics to TensorBoard, trackio or wandb (extra `track`, all optional).

The run directory is the record; a tracker gets a copy. A tracker that fails is dropped with an
event and never ends a run. Names are `sft/<metric>`, `rl/<metric>` over all RL steps, and
`eval/<mode>/<metric>`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rstar2.config import Recipe
from rstar2.errors import RecipeError


class Tracker(Protocol):
    """A destination for scalar metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run directory, under `tensorboard/`."""

    def __init__(self, recipe: Recipe, run: Path) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(run / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Dashboard:
    """trackio and wandb, which share one interface; each kind of metric has its own step axis."""

    def __init__(self, module: str, recipe: Recipe, run: Path) -> None:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result
            self._module: Any = importlib.import_module(module)
            self._module.init(
                project="rstar2",
                name=run.name,
                config=recipe.model_dump(mode="json", exclude={"codeenv": {"token"}}),
                resume="allow",
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        kind = next(iter(values)).partition("/")[0]
        self._module.log({**values, f"{kind}/step": step})

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._module.finish()


def check_trackers(recipe: Recipe) -> None:
    """Raise RecipeError if a tracker that the recipe names is not installed."""
    for name in recipe.record.trackers:
        if importlib.util.find_spec(name) is None:
            raise RecipeError(
                f"record.trackers names {name}, which is not installed: "
                f"pip install 'rstar2[track]' or pip install {name}"
            )


class Trackers:
    """All trackers of a run."""

    def __init__(self, recipe: Recipe, run: Path, event: Callable[..., None]) -> None:
        self._event = event
        self._offsets = {"base": ("base", 0), "sft": ("sft", 0)}
        before = 0
        for stage in recipe.rl.stages:
            self._offsets[stage.name] = ("rl", before)
            before += stage.steps
        self._trackers: dict[str, Tracker] = {}
        for name in recipe.record.trackers:
            self._guard(name, self._open, name, recipe, run)

    def step(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """Copy the metrics of a step."""
        if stage in self._offsets:
            prefix, before = self._offsets[stage]
            self._log(before + step, {f"{prefix}/{k}": v for k, v in values.items()})

    def evaluation(self, stage: str, step: int, mode: str, values: Mapping[str, Any]) -> None:
        """Copy an evaluation at the RL step that it follows; `base` has names of its own."""
        prefix, before = self._offsets[stage]
        at = before + step if prefix == "rl" else 0
        name = "base" if prefix == "base" else "eval"
        self._log(at, {f"{name}/{mode}/{k}": v for k, v in values.items()})

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            self._guard(name, tracker.close)
        self._trackers.clear()

    def _open(self, name: str, recipe: Recipe, run: Path) -> None:
        made = TensorBoard(recipe, run) if name == "tensorboard" else Dashboard(name, recipe, run)
        self._trackers[name] = made

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        scalars = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        for name, tracker in list(self._trackers.items()):
            if scalars:
                self._guard(name, tracker.log, step, scalars)

    def _guard(self, name: str, action: Callable[..., None], *arguments: Any) -> None:
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001  third-party code, and only a copy is at stake
            self._trackers.pop(name, None)
            self._event("tracker_failed", tracker=name, error=repr(error))
