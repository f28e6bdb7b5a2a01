"""What runs inside the processes of a vLLM server that serves a policy under training.

`register` is an entry point of the group `vllm.general_plugins`: vLLM calls it in every process
(API server, engine core, workers) before a model is built. It acts only where RSTAR2_ENGINE=1 is
in the environment, so that other servers of the same installation stay as they are. It does two
things:

- Weight updates become right on CPUs. vLLM packs the weights of linear layers when it builds them
  (oneDNN; on some CPUs kernels for small matrices) and `reload_weights` leaves the packed copies as
  they were: the call succeeds and the old weights keep serving. Without packing, layers compute
  from the tensors that are reloaded. RSTAR2_ENGINE_PACKED=1 leaves packing on: for the test that
  shows that the probe catches it.
- No process outlives its parent, whatever killed that.
"""

from __future__ import annotations

import os

from rstar2.child import die_with_parent

ENGINE = "RSTAR2_ENGINE"
PACKED = "RSTAR2_ENGINE_PACKED"


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
