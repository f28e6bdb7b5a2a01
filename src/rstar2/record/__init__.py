"""The run directory: all files that a run writes, append-only, in plain formats.

    runs/tiny-seed0/
      recipe.yaml            the resolved recipe (no secrets)
      environment.json       schema version, versions, machine, commit, seed, command
      metrics.jsonl          one line per (stage, step): {"stage", "step", "time", <metrics>}
      evaluations.jsonl      one types.Evaluation per (stage, mode)
      trajectories/          <stage>.jsonl, one line per group: the Group, exact to the token,
                             and its Selection (why each rollout was kept or not); packed
      index/                 <stage>.jsonl, one short line per group: its offset and figures
      tokens/                <stage>.jsonl, one line per step: the learner's logprob of each
                             trained token, before and during the update; packed
      events.jsonl           started, resumed, checkpoint, stopped, finished, ...
      filter-<stage>.jsonl   while a difficulty filter runs: how often each problem was solved
      filter-<stage>.json    its result: the problems that are kept, for weights of a version
      log.txt                warnings of the run's processes
      .lock                  held by the process that writes here

The stages of a run, in order, are `eval-base-greedy` and `eval-base-sampled` (the model before SFT,
with `evaluation.every`), `sft`, `eval-sft-greedy`, `eval-sft-sampled` (the policy that RL starts
from, also without SFT), then for each RL stage `filter-<stage>` (difficulty filter), `<stage>`,
`eval-<stage>-greedy`, `eval-<stage>-sampled`. Steps count from 1; an evaluation carries the last
step of its stage.

Packed lines are a fifth as long as their JSON text: token ids and their numbers are binary columns,
compressed with the rest of the line (`packed.py`). `rstar2.record.plain_line(LINE)` returns the
text. Runs of earlier versions have plain lines; a file may hold both.

`metric_names.py` describes every metric.

Invariants
- A line is complete or absent: opening the directory cuts off an incomplete last line.
- Each (stage, step) appears once in metrics.jsonl: writing it twice is an InvariantError, and
  `rewind` removes the steps that a resumed run will repeat.
- One writer: a second run in the same directory is refused while the first one is alive.
- The recipe of a directory never changes, except for settings that do not change results and for
  stages that `rstar2 extend` adds after the last one; each is recorded as an event `extended`.
"""

from rstar2.record.directory import (
    MODES,
    SCHEMA,
    RunDirectory,
    dump_recipe,
    evaluation_stage,
    filter_stage,
    flatten,
    stage_order,
)
from rstar2.record.packed import plain_line
from rstar2.record.read import (
    GroupLine,
    extension,
    is_finished,
    read_environment,
    read_evaluations,
    read_events,
    read_groups,
    read_metrics,
    read_recipe,
)

__all__ = [
    "MODES",
    "SCHEMA",
    "GroupLine",
    "RunDirectory",
    "dump_recipe",
    "evaluation_stage",
    "extension",
    "filter_stage",
    "flatten",
    "is_finished",
    "plain_line",
    "read_environment",
    "read_evaluations",
    "read_events",
    "read_groups",
    "read_metrics",
    "read_recipe",
    "stage_order",
]
