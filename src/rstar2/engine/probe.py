"""Logprobs of given tokens by the weights that serve: what proves a weight update."""

from __future__ import annotations

import torch

from rstar2.engine.decoder import Decoder, PrefillSegment
from rstar2.engine.slabs import Slab
from rstar2.engine.slots import Ids


@torch.inference_mode()
def score(decoder: Decoder, ids: Ids, chunk: int) -> list[float]:
    """Logprob of each token after the first at temperature 1, `chunk` tokens at a time.

    Runs the forward pass that serves, in a row of its own outside the KV budget.
    """
    shape, device = decoder.shape, decoder.device
    slab = Slab(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        length=len(ids),
        head_dim=shape.head_dim,
        device=device,
        dtype=decoder.dtype,
    )
    row = slab.add(0)
    tokens = torch.from_numpy(ids).to(device)
    out: list[float] = []
    for start in range(0, len(ids) - 1, chunk):
        end = min(start + chunk, len(ids) - 1)
        segment = PrefillSegment(slab, 0, row, start, end - start)
        hidden = decoder.forward(
            tokens[start:end], torch.arange(start, end, device=device), [segment]
        )
        logp = torch.log_softmax(decoder.logits(hidden).float(), dim=-1)
        out += logp.gather(-1, tokens[start + 1 : end + 1, None]).squeeze(-1).tolist()
    return out
