"""What runs inside the processes of a vLLM server that serves a policy under training.

`register` is an entry point of the group `vllm.general_plugins`: vLLM calls it in every process
(API server, engine core, workers) before a model is built. It acts only where RSTAR2_ENGINE=1 is
in the environment, so that other servers of the same installation stay as they are. It does two
things:

- Weight updates become right on CPUs. vLLM packs the weights of linear layers when it builds them
  (oneDNN; on some CPUs kernels for small matrices) and `reload_weights` leaves the packed copies as
  they were: the call succeeds and the old weights go on serving. Without packing, layers compute
  from the tensors that are reloaded. RSTAR2_ENGINE_PACKED=1 leaves packing on: for the test that
  shows that the probe catches it.
- No process outlives its parent: kill -9 of the API server takes engine core and workers along.

`python -m rstar2.engine.vllm_plugin --parent PID [--cores 0,1] -- ARGUMENTS` becomes the API
server, tied to the life of PID.
"""

from __future__ import annotations

import argparse
import os
import sys

from rstar2.engine.worker import die_with_parent

ENGINE = "RSTAR2_ENGINE"
PACKED = "RSTAR2_ENGINE_PACKED"
SERVER = "vllm.entrypoints.openai.api_server"


def register() -> None:
    """Called by vLLM, possibly several times in one process."""
    if os.environ.get(ENGINE) != "1":
        return
    die_with_parent(os.getppid())
    if os.environ.get(PACKED) != "1":
        leave_linears_unpacked()


def leave_linears_unpacked() -> None:
    """Make linear layers that are built from now on compute from their own weight tensors."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils

    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = _never


def _never(n: int, k: int, dtype: object) -> bool:
    """Stands in for the question whether small matrices should be packed."""
    return False


def main() -> None:
    """Become the API server: the kernel's promise to kill us with our parent survives exec."""
    parser = argparse.ArgumentParser(prog="rstar2.engine.vllm_plugin")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--cores", default="")
    parser.add_argument("arguments", nargs="+")
    args = parser.parse_args()
    die_with_parent(args.parent)
    if args.cores:
        os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
    os.execv(sys.executable, [sys.executable, "-m", SERVER, *args.arguments])


if __name__ == "__main__":
    main()
