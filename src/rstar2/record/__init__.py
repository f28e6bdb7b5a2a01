"""The run directory: everything a run leaves behind, append-only, in plain files.

    runs/tiny-seed0/
      recipe.yaml            the resolved recipe (no secrets)
      environment.json       schema version, versions, machine, commit, seed, command
      metrics.jsonl          one line per (stage, step): {"stage", "step", "time", <metrics>}
      evaluations.jsonl      one types.Evaluation per (stage, mode)
      trajectories/          <stage>.jsonl, one line per group: the Group, exact to the token,
                             and its Selection (why each rollout was kept or not)
      index/                 <stage>.jsonl, one small line per group: where it is, what it came to
      tokens/                <stage>.jsonl, one line per step: logprobs of the learner for each
                             token it was trained on, before and during the update
      events.jsonl           started, resumed, checkpoint, stopped, finished, ...
      log.txt                warnings of the processes that worked on it
      .lock                  held by the process that writes here

Stages, in the order a run passes them, are `sft`, `eval-sft-greedy`, `eval-sft-sampled`, then for
each RL stage `filter-<stage>` (difficulty filter), `<stage>`, `eval-<stage>-greedy`,
`eval-<stage>-sampled`. Steps count from 1; an evaluation carries the last step of its stage.

Metrics that the live view and the report know by name (others are recorded and plotted alike):
  sft    loss, lr, time/step
  rl     reward, accuracy/<kind>, failing_calls_in_correct, tool_errors, response_length,
         truncated, no_answer, entropy, loss, lr, groups/used, groups/dropped, groups/refilled,
         rollouts/drawn, rollouts/lost, time/step, time/generate, time/tools, time/learn
         engine/<name>/{idle_share, kv_share, kv_peak, tokens}, codeenv/{calls_per_s, latency_s,
         latency_p50_s, latency_p95_s, run_s, queue_s}
         (shares are 0..1, lengths in tokens, times in seconds)

Invariants
- A line is whole or it is not there: a torn tail is cut off when the directory is opened.
- (stage, step) appears once in metrics.jsonl: writing it twice is an InvariantError, and `rewind`
  drops what a resumed run is going to do again.
- One writer: a second run in the same directory is refused while the first one lives.
- The recipe of a directory never changes, but for settings that say where and not what.
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
from rstar2.record.read import (
    GroupLine,
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
    "filter_stage",
    "flatten",
    "is_finished",
    "read_environment",
    "read_evaluations",
    "read_events",
    "read_groups",
    "read_metrics",
    "read_recipe",
    "stage_order",
]
