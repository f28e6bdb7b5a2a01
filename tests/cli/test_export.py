"""`rstar2 export`: an export of an older version is completed, copied and uploaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rstar2.agent.template import CHAT_TEMPLATE
from rstar2.cli import main
from rstar2.learner.tiny import make_tiny
from rstar2.record import RunDirectory
from rstar2.report.model_card import base_model
from tests.cli.fake_hub import Hub, running_hub
from tests.e2e.miniature import miniature

STAGES = ("sft", "short", "hard")


@pytest.fixture(scope="module")
def old_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose exports have the plain chat template, as earlier versions wrote them."""
    root = tmp_path_factory.mktemp("old")
    with RunDirectory.create_or_resume(root / "run", miniature(root / "data")) as run:
        for number, stage in enumerate(STAGES[:2]):
            make_tiny(run.path / "exports" / stage, seed=number)
        return run.path


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        yield running


def push(run: Path, hub: Hub, token: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does; huggingface_hub reads the address when it is imported."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    command = [sys.executable, "-m", "rstar2", "export", str(run), *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_an_export_is_completed_and_uploaded(old_run: Path, hub: Hub, tmp_path: Path) -> None:
    target = tmp_path / "model"
    done = push(old_run, hub, hub.token, "--to", str(target), "--push", "me/model", "--private")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(f"{hub.url}/me/model/commit/")
    assert hub.created == {"me/model": True}
    assert hub.files == {file.name: file.read_bytes() for file in target.iterdir()}
    assert {"README.md", "model.safetensors", "chat_template.jinja"} <= hub.files.keys()
    source = old_run / "exports" / "short"  # the last stage that has an export
    assert hub.files["model.safetensors"] == (source / "model.safetensors").read_bytes()
    assert (source / "chat_template.jinja").read_text() == CHAT_TEMPLATE

    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    messages = [{"role": "user", "content": "coin 44"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\ncoin 44<|im_end|>\n<|im_start|>assistant\n<reason>"


@pytest.mark.slow
def test_a_refused_token_is_one_sentence(old_run: Path, hub: Hub) -> None:
    done = push(old_run, hub, "wrong", "--stage", "sft", "--push", "me/model")
    assert done.returncode == 2
    assert "the hub refused the token" in done.stderr
    assert "Traceback" not in done.stderr
    assert hub.files == {}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "needs --to DIR, --push OWNER/NAME"),
        (["--to", "{run}"], "already exists"),
        (["--push", "model"], "expected OWNER/NAME"),
        (["--to", "{run}/new", "--stage", "hard"], "it has sft, short"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    arguments: list[str], complaint: str, old_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(run=old_run) for word in arguments]
    with pytest.raises(SystemExit) as exit_:
        main(["export", str(old_run), *words])
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_licence_of_the_base_is_read_from_its_card(tmp_path: Path) -> None:
    assert base_model("tiny")[1] == "mit"
    assert base_model("Qwen/Qwen3-1.7B") == ("Qwen/Qwen3-1.7B", "")
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    assert base_model(str(tmp_path)) == (str(tmp_path), "apache-2.0")
    (tmp_path / "README.md").write_text("---\n: [\n---\n# A model\n")
    assert base_model(str(tmp_path)) == (str(tmp_path), "")
