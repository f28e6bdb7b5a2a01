"""The tokenizer of a directory: the same as AutoTokenizer's, without importing torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rstar2.agent.tokenizer import load_tokenizer
from rstar2.errors import UserError


@pytest.mark.slow
def test_a_plain_tokenizer_is_loaded_without_torch(tiny_dir: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from rstar2.agent.tokenizer import load_tokenizer\n"
        "from rstar2.agent.template import Template; from rstar2.config import TemplateConfig\n"
        f"Template(load_tokenizer(Path({str(tiny_dir)!r})), TemplateConfig())\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_it_is_the_tokenizer_that_transformers_finds(tiny_dir: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(tiny_dir), AutoTokenizer.from_pretrained(tiny_dir)
    assert type(ours) is type(theirs)
    text = "<|im_start|>user\nWhat is 30 choose 4?<|im_end|>\n<tool_call>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.chat_template == theirs.chat_template
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.init_kwargs.keys() == theirs.init_kwargs.keys()


def test_a_directory_without_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer there"):
        load_tokenizer(tmp_path)
