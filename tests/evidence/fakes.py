"""A claim, and what stands in for `rstar2 train` and `rstar2 eval`: they write the same files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rstar2.config import Recipe
from rstar2.evaluate.scores import AnswerSummary, score
from rstar2.evaluate.store import EvalResults, EvalSettings
from rstar2.evidence.run import CellRunner, Places, Say
from rstar2.types import Problem, StopReason, encode


def claim_file(**changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "title": "t",
        "question": "q",
        "why": "w",
        "seeds": 4,
        "sft_seeds": 2,
        "arms": {
            "grpo": {"title": "g", "set": ["rl.roc.variant=none", "rl.roc.drawn=6"]},
            "roc": {"title": "r"},
        },
        "metrics": {"reward": {"title": "reward", "column": "reward"}},
        "primary": [
            {
                "title": "better",
                "arms": {"roc": 1, "grpo": -1},
                "metric": "reward",
                "expect": "greater",
                "smallest": 0.02,
            }
        ],
        "power": {"effect": 0.05, "sd": 0.04, "source": "none"},
        "budget_core_minutes": 1,
    }
    return {**values, **changes}


class Trainer:
    """Writes the record of a run as `rstar2 train` would, with numbers from its recipe."""

    def __init__(self, reward: float = 0.5) -> None:
        self.done: list[tuple[str, str, int]] = []
        self.reward = reward

    async def __call__(self, recipe: Recipe, path: Path, environment: Mapping[str, str]) -> float:
        self.arithmetic = environment
        self.done.append((path.parent.name, recipe.name, recipe.seed))
        self.write(path)
        return 12.5

    def write(self, path: Path) -> None:
        path.mkdir(parents=True)
        lines = [{"stage": "rl", "step": s, "reward": self.reward + s / 10} for s in (1, 2)]
        (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (path / "events.jsonl").write_text('{"event": "finished", "time": 1.0}\n')
        for stage in ("sft", "rl"):
            (path / "exports" / stage).mkdir(parents=True)


class Evaluator:
    """Writes the results of an evaluation as `rstar2 eval` would: problem n has n right answers."""

    def __init__(self) -> None:
        self.done: list[Sequence[str]] = []

    async def __call__(
        self, words: Sequence[str], path: Path, environment: Mapping[str, str]
    ) -> float:
        self.done.append(words)
        self.write(words, path)
        return 7.0

    def write(self, words: Sequence[str], path: Path) -> None:
        samples = 1 if "--greedy" in words else int(words[words.index("--samples") + 1])
        problems = [Problem(f"p{n}", "?", "1", "integer") for n in range(samples + 1)]
        summaries = [
            AnswerSummary(p.id, i, i < n, "1", 10, 2, StopReason.ANSWERED, {}, float(i < n))
            for n, p in enumerate(problems)
            for i in range(samples)
        ]
        figures = score("bank", problems, summaries, samples=samples)
        settings = EvalSettings(
            "model", "w", "embedded", {"bank": "d"}, samples, 1.0, 1.0, 0, 512, 4, 0
        )
        path.mkdir(parents=True)
        results = EvalResults(settings, {"bank": figures}, complete=True)
        (path / "results.json").write_bytes(encode(results))


def runner(places: Places, trainer: Trainer, say: Say = print, jobs: int = 1) -> CellRunner:
    return CellRunner(places, trainer, Evaluator(), say, jobs)
