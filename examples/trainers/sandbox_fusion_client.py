"""SandboxFusion: its own Python client (`pip install sandbox-fusion`) against this server.

    rstar2 codeenv serve
    SANDBOX_FUSION_ENDPOINT=http://127.0.0.1:8088 python examples/trainers/sandbox_fusion_client.py

Trainers that call SandboxFusion's /run_code need no change but the URL; for a server with a token
write it as http://token:TOKEN@host:8088.
"""

from __future__ import annotations

import os

from sandbox_fusion import RunCodeRequest, run_code


def score(code: str, stdin: str, expected: str, endpoint: str) -> float:
    """1 if the program prints what is expected."""
    request = RunCodeRequest(code=code, language="python", stdin=stdin, run_timeout=10)
    answer = run_code(request, endpoint=endpoint, max_attempts=3, client_timeout=60)
    return float(answer.run_result is not None and answer.run_result.stdout == expected)


if __name__ == "__main__":
    url = os.environ["SANDBOX_FUSION_ENDPOINT"]
    print(score("print(int(input()) * 7)", "6", "42\n", url))
