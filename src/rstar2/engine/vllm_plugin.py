"""vLLM plugin for servers that serve a policy under training.

`register` is an entry point of the group `vllm.general_plugins`: vLLM calls it in every process
(API server, engine core, workers) before a model is built. It acts only if RSTAR2_ENGINE=1 is in
the environment, so other servers of the same installation are unaffected. It does three things:

- It makes weight updates correct on CPUs. vLLM packs the weights of linear layers when it builds
  them (oneDNN; on some CPUs kernels for small matrices), and `reload_weights` does not update the
  packed copies: the call succeeds, but the old weights keep serving. Without packing, layers
  compute from the reloaded tensors. RSTAR2_ENGINE_PACKED=1 leaves packing on, for the test that
  the probe detects this.
- It adds a method to vLLM's workers that returns checksums of the weights they compute with.
- It ends each process when its parent ends, however the parent ended.
"""

from __future__ import annotations

import os

from rstar2.child import die_with_parent

ENGINE = "RSTAR2_ENGINE"
PACKED = "RSTAR2_ENGINE_PACKED"
HELD_WEIGHTS = "rstar2_held_weights"
"""Name of the workers' method."""


def register() -> None:
    """Called by vLLM, possibly several times in one process."""
    if os.environ.get(ENGINE) != "1":
        return
    die_with_parent(os.getppid())
    if os.environ.get(PACKED) != "1":
        leave_linears_unpacked()
    report_weights()


def report_weights() -> None:
    """Let `/collective_rpc` call `vllm_weights.held_by_worker` in every worker."""
    from vllm.v1.worker.worker_base import WorkerBase

    from rstar2.engine.vllm_weights import held_by_worker

    setattr(WorkerBase, HELD_WEIGHTS, held_by_worker)


def leave_linears_unpacked() -> None:
    """Disable packing in linear layers that are built after this call."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils

    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = _never


def _never(n: int, k: int, dtype: object) -> bool:
    """Replaces vLLM's check for whether to pack small matrices."""
    return False
