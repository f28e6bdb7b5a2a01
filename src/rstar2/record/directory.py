"""The writer of a run directory (layout and invariants: rstar2.record)."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import msgspec
import yaml
from pydantic import ValidationError

from rstar2 import machine
from rstar2.config import Recipe
from rstar2.errors import InfrastructureError, InvariantError, RecipeError, UserError
from rstar2.files import write_file
from rstar2.record.files import JsonLines, RunLock, StepHead
from rstar2.record.index import group_entry
from rstar2.record.packed import pack
from rstar2.record.read import (
    GroupLine,
    RecordedGroup,
    TokenValuesLine,
    extension,
    is_finished,
    read_environment,
    read_evaluations,
    read_events,
    read_groups,
    read_lines,
    read_recipe,
)
from rstar2.track import Trackers
from rstar2.types import Evaluation, Group, Selection, TokenValues, encode

SCHEMA = 1
MODES = ("greedy", "sampled")

_MAY_CHANGE = (
    *(f"codeenv.{key}" for key in ("urls", "host", "port", "slots", "queue", "batch", "linger_s")),
    *("engine.urls", "engine.hang_s", "learner.threads", "learner.hang_s", "record.", "cluster"),
    *("environment.folder", "minutes"),
)
"""Settings that may differ when a run is resumed: where it runs, how long, what it records."""
_RETIRED = (("scheduler", "quantile"),)
"""Settings of earlier versions that decided nothing about the results of a run."""
_SECRETS = frozenset({"codeenv.token"})
_OWN_DATA = ("rl.problems", "evaluation.problems", "sft.data")
"""null means the environment's own data, which is `arithmetic` in all runs that named it."""


def evaluation_stage(stage: str, mode: str) -> str:
    """The name under which the trajectories of an evaluation are recorded."""
    return f"eval-{stage}-{mode}"


def filter_stage(stage: str) -> str:
    """The name under which the trajectories of a stage's difficulty filter are recorded."""
    return f"filter-{stage}"


def stage_order(rl_stages: Iterable[str]) -> tuple[str, ...]:
    """The stage names of a run with these RL stages, in the order in which they are run."""
    names: list[str] = []
    for name in ("base", "sft", *rl_stages):
        names += [filter_stage(name), name, *(evaluation_stage(name, mode) for mode in MODES)]
    return tuple(names)


class _IndexedGroup(msgspec.Struct, frozen=True):
    """The id of a group, in a line of index/<stage>.jsonl."""

    group: str


class RunDirectory:
    """The only writer of a run directory. Use as a context manager, or call `close`."""

    def __init__(self, path: Path, recipe: Recipe, lock: RunLock, *, resumed: bool) -> None:
        self.path = path
        self.recipe = recipe
        self.lock = lock
        self.resumed = resumed
        stages = stage_order(stage.name for stage in recipe.rl.stages)
        self._order = {name: index for index, name in enumerate(stages)}
        self._metrics = JsonLines(path / "metrics.jsonl")
        self._evaluations = JsonLines(path / "evaluations.jsonl")
        self._events = JsonLines(path / "events.jsonl")
        self._groups = _per_stage(path / "trajectories")
        self._index = _per_stage(path / "index")
        self._tokens = _per_stage(path / "tokens")
        self._last: dict[str, int] = {}
        self._load_last_steps()
        self._trackers = Trackers(recipe, path, self.event)

    @classmethod
    def create_or_resume(
        cls,
        path: Path | str,
        recipe: Recipe,
        *,
        fresh: bool = False,
        extend: bool = False,
        environment: Mapping[str, Any] | None = None,
    ) -> RunDirectory:
        """Open `path` for a run of `recipe`: a new run, or one that resumes an earlier one.

        `fresh` first removes the files of an earlier run. With `extend`, the recipe may have one
        more stage than the recorded one. `environment` identifies the environment of the run.
        Raises UserError if the directory is in use, is not a run directory, or belongs to a run of
        another recipe or environment.
        """
        path = Path(path).resolve()
        _refuse_foreign(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = RunLock(path / ".lock")
        except OSError as error:
            raise UserError(f"run directory {path} cannot be written: {error.strerror}") from error
        try:
            if fresh:
                _empty(path)
            resumed = (path / "recipe.yaml").exists()
            if resumed:
                _check_same_run(path, recipe, extend=extend)
                if environment is not None:
                    _check_same_environment(path, environment)
            else:
                about = {"schema": SCHEMA, "seed": recipe.seed, **machine.describe()}
                if environment is not None:
                    about["environment"] = dict(environment)
                write_file(path / "environment.json", msgspec.json.format(encode(about)))
            if not extend:
                write_file(path / "recipe.yaml", dump_recipe(recipe).encode())
            run = cls(path, recipe, lock, resumed=resumed)
            if extend:
                run._record_extension()
        except BaseException:
            lock.release()
            raise
        run.event("resumed" if resumed else "started", environment=machine.describe())
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Close. A recipe that was refused before its first step leaves no directory behind."""
        self.close()
        refused = isinstance(error, UserError) and not self.resumed and not self._last
        if refused and not (self.path / "checkpoints").exists():
            shutil.rmtree(self.path)

    def _record_extension(self) -> None:
        """Record the last stage as added, then the recipe: a kill between the two is harmless."""
        stage = self.recipe.rl.stages[-1]
        if extension(read_events(self.path)) is None:
            self.event("extended", stage=stage.model_dump(mode="json"))
        write_file(self.path / "recipe.yaml", dump_recipe(self.recipe).encode())

    # ----------------------------------------------------------------- writing

    def metrics(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """Record the metrics of a completed step and flush all files."""
        self._check_stage(stage)
        if reserved := {"stage", "step", "time"} & values.keys():
            raise InvariantError(f"metrics may not be named {sorted(reserved)}")
        if step <= self._last.get(stage, 0):
            raise InvariantError(
                f"step {step} of {stage} is already recorded (last: {self._last[stage]}); "
                "call rewind before running it again"
            )
        self._last[stage] = step
        self._metrics.append({"stage": stage, "step": step, "time": time.time(), **values})
        self.flush()
        self._trackers.step(stage, step, values)

    def trajectories(
        self, stage: str, step: int, group: Group, selection: Selection | None = None
    ) -> None:
        """Record a group and its selection. A group without one was not used for training.

        Evaluations and difficulty filters have no selection; all of their rollouts are recorded.
        """
        self._check_stage(stage)
        keep = self.recipe.record.trajectories
        if keep == "none":
            return
        if keep == "kept" and not stage.startswith(("eval-", "filter-")):
            if selection is None:
                return
            group = replace(
                group, trajectories=tuple(group.trajectories[i] for i in selection.kept)
            )
        line = GroupLine(stage, step, time.time(), group, selection)
        file = self._file_of(self._groups, "trajectories", stage)
        at, encoded = file.append_line(pack(line, stage, step, group.id))
        self._file_of(self._index, "index", stage).append(group_entry(line, at, len(encoded)))

    def tokens(self, stage: str, step: int, values: Sequence[TokenValues]) -> None:
        """Record the learner's logprobs of each token of a step's batch (if `record.tokens`)."""
        self._check_stage(stage)
        if values and self.recipe.record.tokens and self.recipe.record.trajectories != "none":
            line = TokenValuesLine(stage, step, tuple(values))
            self._file_of(self._tokens, "tokens", stage).append_line(pack(line, stage, step))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Record a complete evaluation, after its trajectories."""
        self._check_stage(evaluation_stage(evaluation.stage, evaluation.mode))
        if not math.isfinite(evaluation.accuracy.mean):
            raise InfrastructureError(
                f"{evaluation.mode} evaluation of {evaluation.stage}: no problem could be graded "
                "(log.txt in the run directory says why)"
            )
        self._evaluations.append(evaluation)
        self.flush()
        figures = {
            "accuracy": evaluation.accuracy.mean,
            "failing_calls_in_correct": evaluation.failing_calls_in_correct,
            "mean_length": evaluation.mean_length,
        }
        self._trackers.evaluation(evaluation.stage, evaluation.step, evaluation.mode, figures)

    def event(self, name: str, **fields: Any) -> None:
        """Record an event. `rewind` never removes events."""
        self._events.append({"time": time.time(), "event": name, **fields})
        self._events.flush()

    def flush(self) -> None:
        """Hand all data to the operating system: from here on it survives kill -9."""
        for file in self._files():
            file.flush()

    def sync(self) -> None:
        """Force all data onto the disk: from here on it survives a power cut."""
        for file in self._files():
            file.sync()

    def close(self) -> None:
        """Flush and close all files and release the lock; idempotent."""
        try:
            self._trackers.close()
            for file in self._files():
                file.close()
        finally:
            self.lock.release()

    # ----------------------------------------------------------------- resuming

    def rewind(self, stage: str, step: int, keep: Collection[str] = ()) -> int:
        """Go back to the end of `step` of `stage`; returns the number of lines removed.

        Removes every line of later steps and later stages. Of the evaluations of an earlier
        stage, complete ones stay and incomplete ones are removed. The groups of the stages in
        `keep` stay: their stage resumes in the middle.
        """
        self._check_stage(stage)
        here = self._order[stage]

        def later(name: str, number: int) -> bool:
            order = self._order.get(name, len(self._order))
            return order > here or (order == here and number > step)

        dropped = self._metrics.drop(lambda head: later(head.stage, head.step))
        dropped += self._evaluations.drop(lambda head: later(head.stage, head.step))
        complete = {evaluation_stage(e.stage, e.mode) for e in read_evaluations(self.path)}
        complete |= set(keep)
        for name, file in self._groups.items():
            if name not in complete:
                dropped += file.drop(lambda head: later(head.stage, head.step))
        for beside in (self._index, self._tokens):
            for name, file in beside.items():
                if name not in complete:
                    file.drop(lambda head: later(head.stage, head.step))
        self._load_last_steps()
        if dropped:
            self.event("rewound", stage=stage, step=step, lines=dropped)
        return dropped

    def keep_groups(self, stage: str, ids: Collection[str]) -> int:
        """Remove all recorded groups of a stage but these; returns the number of lines removed.

        Those removed must be the last ones of their file: the index has the places of the others.
        """
        if stage not in self._groups:
            return 0
        if stage in self._index:
            self._index[stage].drop(lambda head: head.group not in ids, _IndexedGroup)
        return self._groups[stage].drop(lambda head: head.group.id not in ids, RecordedGroup)

    def resume_groups(self, stage: str) -> Iterator[Group]:
        """The recorded groups of a stage that resumes in the middle."""
        file = self.path / "index" / f"{stage}.jsonl"
        self.keep_groups(stage, {entry.group for entry in read_lines(file, _IndexedGroup)})
        file = self.path / "trajectories" / f"{stage}.jsonl"
        recorded = {line.group.id for line in read_lines(file, RecordedGroup)}
        self.keep_groups(stage, recorded)  # kill -9 may leave one of the two lines
        return (line.group for line in read_groups(self.path, stage))

    def evaluated(self, stage: str, mode: str) -> Evaluation | None:
        """The recorded evaluation of a stage; None if it was not completed."""
        for evaluation in read_evaluations(self.path):
            if (evaluation.stage, evaluation.mode) == (stage, mode):
                return evaluation
        return None

    @property
    def finished(self) -> bool:
        """Whether the run in this directory has finished."""
        return is_finished(self.path)

    # ----------------------------------------------------------------- parts

    def _files(self) -> list[JsonLines]:
        beside = (*self._index.values(), *self._tokens.values())
        return [
            *self._groups.values(), *beside, self._metrics, self._evaluations, self._events
        ]  # fmt: skip

    def _file_of(self, files: dict[str, JsonLines], folder: str, stage: str) -> JsonLines:
        if stage not in files:
            files[stage] = JsonLines(self.path / folder / f"{stage}.jsonl")
        return files[stage]

    def _load_last_steps(self) -> None:
        self._last = {}
        for head in read_lines(self.path / "metrics.jsonl", StepHead):
            self._last[head.stage] = max(head.step, self._last.get(head.stage, 0))

    def _check_stage(self, stage: str) -> None:
        if stage not in self._order:
            known = ", ".join(self._order)
            raise InvariantError(f"no stage {stage!r} in this recipe; its stages are: {known}")


def _per_stage(folder: Path) -> dict[str, JsonLines]:
    return {file.stem: JsonLines(file) for file in sorted(folder.glob("*.jsonl"))}


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, without secrets."""
    values = recipe.model_dump(mode="json")
    for secret in _SECRETS:
        section, key = secret.split(".")
        values[section].pop(key, None)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _plain(recipe: Recipe) -> Any:
    """The values of a recipe as they are read back from its file."""
    return yaml.safe_load(dump_recipe(recipe))


def _with_defaults(values: Any) -> Any:
    """Recorded settings, with the default of every setting that was added since."""
    for section, key in _RETIRED:
        values.get(section, {}).pop(key, None)
    try:
        return _plain(Recipe.model_validate(values))
    except ValidationError:  # a setting was removed since: the caller lists it
        return values


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists as {dotted.path: leaf}."""
    if isinstance(values, Mapping) and values:
        pairs = [(str(key), value) for key, value in values.items()]
    elif isinstance(values, list | tuple) and values:
        pairs = [(str(index), value) for index, value in enumerate(values)]
    else:
        return {prefix: values}
    flat: dict[str, Any] = {}
    for key, value in pairs:
        flat |= flatten(value, f"{prefix}.{key}" if prefix else key)
    return flat


# --------------------------------------------------------------------------- opening


def _refuse_foreign(path: Path) -> None:
    """Refuse to write into a directory with files that no run wrote."""
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"run directory {path} is a file: choose another with --run")
    if (path / "recipe.yaml").exists() and (path / "environment.json").exists():
        return
    foreign = {p.name for p in path.iterdir()} - {".lock", "environment.json"}
    foreign = {name for name in foreign if not name.endswith(".new")}
    if foreign:
        raise UserError(
            f"{path} is not empty and not a run directory (it holds {sorted(foreign)[0]}): "
            "choose another with --run"
        )


def _empty(path: Path) -> None:
    """Remove all files of an earlier run except the lock."""
    (path / "recipe.yaml").unlink(missing_ok=True)  # first: without it, what is left is no run
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        elif child.name != ".lock":
            child.unlink()


def _check_same_environment(path: Path, environment: Mapping[str, Any]) -> None:
    """Refuse to resume a run with another environment, or with one whose source has changed."""
    recorded = read_environment(path).get("environment")
    if recorded is None:  # version 0.2 had one environment
        return
    what = _changed(recorded, environment)
    if what is not None:
        raise RecipeError(
            f"{path} {what}: put the old one back to resume it, start again with --fresh "
            "(fresh=True in Python; it removes this run), or choose another run directory (--run)"
        )


def _changed(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What is different about an environment; what an older rstar2 did not record is skipped."""
    name = recorded["name"]
    if name != now["name"]:
        return f"used the environment {name!r}, now it is {now['name']!r}"
    if recorded["args"] != now["args"]:
        return f"used the environment {name!r} with {recorded['args']}, now with {now['args']}"
    if recorded["source"] and now["source"] and recorded["source"] != now["source"]:
        return f"used another version of the source of environment {name!r}"
    for key, text in (
        ("modules", "used another version of {}, which the source of environment {!r} imports"),
        ("scripts", "used another version of {}, which environment {!r} starts"),
        ("made_from", "used another {} of environment {!r}"),
        ("problems", "used other problems (split {}) of environment {!r}, or in another order"),
    ):
        old, new = recorded.get(key), now.get(key)
        if old is None or new is None:
            continue
        names = [part for part in sorted(old | new) if old.get(part) != new.get(part)]
        if names:
            return text.format(", ".join(names), name)
    return None


def _check_same_run(path: Path, recipe: Recipe, *, extend: bool = False) -> None:
    """Refuse to resume a run with another recipe; the error lists the settings that differ."""
    schema = read_environment(path).get("schema")
    if schema != SCHEMA:
        raise UserError(f"{path} was written in format {schema}, this rstar2 writes {SCHEMA}")
    recorded = _with_defaults(read_recipe(path))
    if extend and len(recorded["rl"]["stages"]) < len(recipe.rl.stages):
        rl = recipe.rl.model_copy(update={"stages": recipe.rl.stages[:-1]})
        recipe = recipe.model_copy(update={"rl": rl})
    old, new = flatten(recorded), flatten(_plain(recipe))
    for values in (old, new):
        values |= {key: None for key in _OWN_DATA if values.get(key) == "arithmetic"}
    absent = object()
    changed = [
        key
        for key in dict.fromkeys([*old, *new])
        if old.get(key, absent) != new.get(key, absent) and not key.startswith(_MAY_CHANGE)
    ]
    if changed:
        lines = [f"  {key}: {old.get(key, '-')} -> {new.get(key, '-')}" for key in changed[:8]]
        if len(changed) > 8:
            lines.append(f"  and {len(changed) - 8} more")
        raise RecipeError(
            f"{path} was started with another recipe:\n"
            + "\n".join(lines)
            + "\nput the old values back to resume it, start again with --fresh (fresh=True in"
            " Python; it removes this run), or choose another run directory (--run)"
        )
