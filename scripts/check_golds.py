"""Check that our graders accept the golds of public problem sets and reject changed ones.

    python scripts/check_golds.py [DATA_DIRECTORY [SET ...]]

Every gold goes through math-verify in the code environment, as in training, without the
integer fast path: once as its own answer, once with one digit (or the sign) changed. Prints one
line per data set and lists the wrong verdicts. The exit code is 1 if fewer than 99% of a set are
accepted or if any changed answer is.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.protocol import VerifyRequest
from rstar2.config import CodeEnvConfig

SETS = {"math500": "math500.jsonl", "aime24": "aime24.jsonl", "gsm8k": "gsm8k/test.jsonl"}
DEADLINE_S = 600.0
SHARE = 0.99


def golds(path: Path) -> list[str]:
    """The published answers; GSM8K's follow ####."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [str(row["answer"]).rpartition("####")[2].strip() for row in rows]


def changed(gold: str) -> str:
    """Another value: the first digit that is no exponent raised by one, else the sign."""
    digits = [m for m in re.finditer("[0-9]", gold) if not gold[: m.start()].endswith(("^", "^{"))]
    if not digits:
        return f"-({gold})"
    digit = digits[0]
    return f"{gold[: digit.start()]}{(int(digit[0]) + 1) % 10}{gold[digit.end() :]}"


async def verdicts(client: CodeEnvClient, run: str, pairs: list[tuple[str, str]]) -> list[str]:
    """One word per (answer, truth): accepted, refused, or the name of the grader's failure."""

    async def one(index: int, answer: str, truth: str) -> str:
        arguments = {"answer": answer, "truth": truth}
        request = VerifyRequest(f"{run}/{index}", "math", arguments, DEADLINE_S)
        result = await client.verify(request)
        return result.error or ("accepted" if result.value else "refused")

    return await asyncio.gather(*(one(i, *pair) for i, pair in enumerate(pairs)))


async def check(data: Path, names: list[str]) -> bool:
    ok = True
    async with await CodeEnvClient.start(CodeEnvConfig()) as client:
        for name in names:
            truths = golds(data / SETS[name])
            own = await verdicts(client, f"{name}/own", [(t, t) for t in truths])
            pairs = [(changed(t), t) for t in truths]
            other = await verdicts(client, f"{name}/changed", pairs)
            accepted = own.count("accepted") / len(truths)
            wrong = other.count("accepted")
            ok &= accepted >= SHARE and not wrong
            print(
                f"{name}: {len(truths)} golds, {accepted:.2%} accepted as their own answer;", end=""
            )
            print(f" {wrong} of {len(pairs)} changed answers accepted")
            for truth, verdict in zip(truths, own, strict=True):
                if verdict != "accepted":
                    print(f"  {verdict}: {truth!r}")
            for (answer, truth), verdict in zip(pairs, other, strict=True):
                if verdict != "refused":
                    print(f"  {verdict}: {answer!r} for {truth!r}")
    return ok


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: check_golds.py DIRECTORY [{' | '.join(SETS)} ...]")
    directory = Path(sys.argv[1])
    sys.exit(0 if asyncio.run(check(directory, sys.argv[2:] or list(SETS))) else 1)
