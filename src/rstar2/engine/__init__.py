"""Engines: tokens in, tokens out, with logprobs and weight versions."""
