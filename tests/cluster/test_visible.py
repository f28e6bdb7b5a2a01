"""GPU numbers of the ledger become the node's own devices."""

from __future__ import annotations

import pytest

from rstar2.cluster.nodes import NodeError, visible


def test_gpu_numbers_index_the_list_of_the_node() -> None:
    assert visible((), {}) == {}
    assert visible((0, 2), {})["CUDA_VISIBLE_DEVICES"] == "0,2"
    listed = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert visible((1,), listed) == {"CUDA_VISIBLE_DEVICES": "5", "HIP_VISIBLE_DEVICES": "5"}
    assert visible((0, 1), {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"})["HIP_VISIBLE_DEVICES"] == (
        "GPU-a,GPU-b"
    )


def test_a_gpu_beyond_the_list_is_refused() -> None:
    with pytest.raises(NodeError, match="GPU 2 was assigned, but CUDA_VISIBLE_DEVICES lists"):
        visible((2,), {"CUDA_VISIBLE_DEVICES": "4,5"})
