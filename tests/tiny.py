"""The tiny model's tokenizer, trained once per process: training it takes most of a second."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

from transformers import PreTrainedTokenizerFast

from rstar2.agent.template import Template
from rstar2.config import TemplateConfig
from rstar2.learner.tiny import make_tokenizer

trained = cache(make_tokenizer)


def tokenizer() -> PreTrainedTokenizerFast:
    """A copy: a template records its settings in its tokenizer."""
    return deepcopy(trained())


@cache
def tiny_template() -> Template:
    """The tiny model's template, without a system message and an instruction."""
    return Template(tokenizer(), TemplateConfig(system="none", instruction="none"))
