"""`rstar2 reproduce` as a user calls it; nothing is trained here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rstar2 import cli
from rstar2.evidence.claim import claim_names

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(["reproduce", *words])
    return int(caught.value.code or 0)


@pytest.mark.slow
def test_every_claim_is_listed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list") == 0
    listed = capsys.readouterr().out
    for name in claim_names(checkout / "experiments"):
        assert name in listed
    assert not (checkout / "docs").exists()


def test_pages_are_those_of_the_repository(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The committed pages follow from the committed cells."""
    assert run("--pages") == 0
    capsys.readouterr()
    for page in (checkout / "docs" / "evidence").iterdir():
        committed = ROOT / "docs" / "evidence" / page.name
        assert page.read_text() == committed.read_text(), "run rstar2 reproduce --pages"


def test_mistakes_are_explained(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("rok") == 2
    assert "did you mean roc?" in capsys.readouterr().err
    assert run("roc", "--cell", "roc") == 2
    assert "write it as ARM/SEED" in capsys.readouterr().err
    assert run("smollm", "--pages") == 2
    assert "--pages is about all claims: leave out the name 'smollm'" in capsys.readouterr().err
    assert not (checkout / "docs").exists()
    assert run("--list", "--folder", str(tmp_path / "none")) == 2
    assert "run this in a checkout of rstar2" in capsys.readouterr().err
