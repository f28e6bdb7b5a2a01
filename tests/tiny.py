"""The tiny model's tokenizer, trained once per process: training it takes most of a second."""

from __future__ import annotations

from functools import cache

from rstar2.agent.template import Template
from rstar2.config import TemplateConfig
from rstar2.learner.tiny import make_tokenizer

tokenizer = cache(make_tokenizer)
"""Tests must not change it."""


@cache
def tiny_template() -> Template:
    """The tiny model's template, without a system message and an instruction."""
    return Template(tokenizer(), TemplateConfig(system="none", instruction="none"))
