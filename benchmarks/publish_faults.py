"""What an engine's or a rank's failure costs a weight update: healthy, dead and hung ones.

    python benchmarks/publish_faults.py [--engines 3] [--publishes 5] [--hang-s 10]

Real parts on this machine with the tiny model: engines in processes of their own, a learner in this
process, then two learner ranks. Engines are killed or stopped right before an update, so that the
update itself meets the failure.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rstar2.config import LearnerConfig, OptimizerConfig, load_recipe
from rstar2.environments.python_math import PythonMath
from rstar2.errors import RankError
from rstar2.learner.group import LearnerGroup
from rstar2.learner.tiny import make_tiny
from rstar2.pipeline.runtime import Runtime, open_runtime

BACK_S = 300.0
"""An engine that failed must serve again within this time."""
ROWS = [((1, 2, 3, 4), (0, 1, 0, 1)), ((5, 6, 7), (0, 0, 1))]


async def publishes(args: argparse.Namespace, directory: Path) -> None:
    """Seconds of updates with all engines, with a dead one and with a hung one."""
    changes = [f"engine.count={args.engines}", f"engine.hang_s={args.hang_s}"]
    recipe = load_recipe("tiny", changes).recipe
    lost: dict[str, float] = {}
    back: dict[str, float] = {}

    def notify(event: str, **facts: Any) -> None:
        if event in ("lost", "back"):
            (lost if event == "lost" else back)[str(facts["part"])] = time.monotonic()

    PythonMath.needs_sandbox = False  # no rollout is run
    async with open_runtime(recipe, directory, notify) as runtime:
        await runtime.publish(0)
        healthy = [await timed(runtime, version) for version in range(1, args.publishes + 1)]
        usual = statistics.median(healthy)
        print(f"all {args.engines} engines: {usual:.2f} s (median of {args.publishes})")
        for what, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            version = int(runtime.fleet.scheduler.version) + 1
            engine: Any = runtime.fleet.engines["embedded-1"]
            os.kill(engine.pid, number)
            injected = time.monotonic()
            lost.pop(engine.name, None)
            back.pop(engine.name, None)
            taken = await timed(runtime, version)
            try:
                async with asyncio.timeout(BACK_S):
                    while engine.name not in back:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
            except TimeoutError:
                raise SystemExit(
                    f"one engine {what}: not back within {BACK_S:g} s of the update"
                ) from None
            print(
                f"one engine {what}: {taken:.2f} s ({taken / usual:.2f} of the healthy), noticed "
                f"after {lost[engine.name] - injected:.1f} s, serves again after "
                f"{back[engine.name] - injected:.1f} s"
            )


async def timed(runtime: Runtime, version: int) -> float:
    started = time.monotonic()
    async with runtime.changing_weights():
        await runtime.publish(version)
    return time.monotonic() - started


def ranks(args: argparse.Namespace, directory: Path) -> None:
    """Seconds until a stopped rank is noticed, and until a new group has its weights."""
    make_tiny(directory / "model", seed=0)
    config = LearnerConfig(ranks=2, threads=1, hang_s=args.hang_s)

    def start() -> LearnerGroup:
        return LearnerGroup(directory / "model", config, OptimizerConfig(), total_steps=9, seed=0)

    group = start()
    group.sft_step(ROWS)
    group.save(directory / "checkpoint")
    processes = group._ranks._processes  # type: ignore[union-attr]
    os.kill(processes[1].pid, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        group.sft_step(ROWS)
    except RankError as error:
        noticed = time.monotonic() - stopped
        with start() as again:
            again.load(directory / "checkpoint")
            again.sft_step(ROWS)
        done = time.monotonic() - stopped
        print(f"learner rank stopped: noticed after {noticed:.1f} s, recovered after {done:.1f} s")
        print(f"  {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--publishes", type=int, default=5)
    parser.add_argument("--hang-s", type=float, default=10.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(publishes(args, Path(name) / "run"))
        ranks(args, Path(name))


if __name__ == "__main__":
    main()
