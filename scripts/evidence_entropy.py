"""Write docs/evidence/entropy.md: the entropy of sampled tokens by class, from a claim's weights.

    python scripts/evidence_entropy.py [--runs runs/evidence] [--claim roc] [--seeds 8]

For every seed, the SFT weights and those of GRPO and RoC answer the same held-out problems of
level 2 once (`rstar2 entropy`). The figures are means over seeds with 95% intervals. The run
directories of the claim must be there: `rstar2 reproduce CLAIM` writes them, and keeps weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rstar2.evidence.claim import Cell, fingerprint, read_claim, sft_recipe
from rstar2.evidence.statistics import t_test
from rstar2.problems.load import load_problems

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/evidence/entropy.md"
COUNT = 64
MAX_LENGTH, MAX_TURNS = 500, 12
CLASSES = {
    "reasoning": "reasoning",
    "after_ok": "after a successful call",
    "after_error": "after a failed call",
    "code": "code",
    "answer": "answer",
    "format": "format",
}
ARMS = {"sft": "SFT", "grpo": "GRPO", "roc": "RoC"}


def analyse(model: Path, problems: Path) -> dict[str, Any]:
    """What `rstar2 entropy` says about one model."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "rstar2", "entropy", str(model), "--json", "--out", out]
        command += ["--problems", str(problems), "--count", str(COUNT)]
        command += ["--max-length", str(MAX_LENGTH), "--max-turns", str(MAX_TURNS)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    sample: dict[str, Any] = json.loads(done.stdout)["samples"][0]
    return sample


def cell(values: list[float | None]) -> str:
    """`.123 (.110 to .136)`, or a dash without any value."""
    known = [v for v in values if v is not None]
    if not known:
        return "–"
    test = t_test(known)
    if len(known) < 2:
        return f"{test.mean:.3f}"
    return f"{test.mean:.3f} ({test.low:.3f} to {test.high:.3f})"


def table(samples: dict[str, list[dict[str, Any]]], figure: str, *, percent: bool = False) -> str:
    """One row per arm, one column per class."""
    lines = [f"| | {' | '.join(CLASSES.values())} |", "|---|" + "---|" * len(CLASSES)]
    for arm, title in ARMS.items():
        row = []
        for name in CLASSES:
            found = [next(r for r in s["rows"] if r["name"] == name) for s in samples[arm]]
            values = [r[figure] for r in found]
            if percent:
                test = t_test([100 * v for v in values])
                row.append(f"{test.mean:.1f}% ({test.low:.1f} to {test.high:.1f})")
            else:
                row.append(cell(values))
        lines.append(f"| {title} | {' | '.join(row)} |")
    return "\n".join(lines)


def page(claim: str, seeds: int, samples: dict[str, list[dict[str, Any]]]) -> str:
    """The page, from the analyses of all models."""
    return f"""# Entropy by class of token, after SFT, GRPO and RoC

The weights of the claim [{claim}]({claim}.md) answer {COUNT} held-out problems of level 2 once. \
Figures are means over {seeds} seeds ({len(samples["sft"])} SFT checkpoints) with 95% intervals \
(Student's t), in nats. [Token entropy](../entropy.md) defines the classes.

<!-- not run: takes minutes, and needs the weights of all cells -->
```bash
rstar2 reproduce {claim}
python scripts/evidence_entropy.py --claim {claim} --seeds {seeds}
```

## Mean entropy

{table(samples, "entropy")}

## Share of the tokens

{table(samples, "share", percent=True)}

## Share of the 20% of tokens with the highest entropy

{table(samples, "top_share", percent=True)}

A class without tokens in a run has no mean there; the mean is then over the other seeds.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/evidence")
    parser.add_argument("--claim", default="roc")
    parser.add_argument("--seeds", type=int, default=8)
    args = parser.parse_args()
    claim = read_claim(ROOT / "experiments", args.claim)
    samples: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    known: set[Path] = set()
    with tempfile.TemporaryDirectory() as folder:
        problems = Path(folder) / "level2.jsonl"
        lines = [
            {"id": p.id, "prompt": p.prompt, "answer": p.answer, "grader": p.grader}
            for p in load_problems("arithmetic", "heldout", count=COUNT, level=2)
        ]
        problems.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        for seed in claim.all_seeds[: args.seeds]:
            before = sft_recipe(claim, Cell(claim.name, "roc", seed))
            assert before is not None, "the arms of this claim start from SFT weights"
            models = {"sft": args.runs / "sft" / fingerprint(before) / "exports/sft"}
            models |= {
                arm: args.runs / claim.name / f"{arm}-{seed}" / "exports/rl"
                for arm in ("grpo", "roc")
            }
            for arm, model in models.items():
                if model in known:  # seeds share SFT weights
                    continue
                known.add(model)
                samples[arm].append(analyse(model, problems))
                print(f"seed {seed} {arm}: {samples[arm][-1]['entropy']:.3f}", file=sys.stderr)
    PAGE.write_text(page(claim.name, args.seeds, samples))
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
