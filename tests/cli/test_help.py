"""The help of all commands: one style, `-h`, no Python types, suggestions, completion."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rstar2.cli import COMMANDS, load, main
from rstar2.cli.waiting import ERASE, waiting
from rstar2.config.codeenv import URL_VARIABLE

TYPES = re.compile(
    r"<[a-z\[\] ]+>|\b(TEXT|INTEGER|FLOAT|DIRECTORY|RANGE|str|bool|list\[)\b", re.ASCII
)


def rstar2(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def all_commands() -> Iterator[tuple[str, ...]]:
    yield ()
    for name in COMMANDS:
        yield (name,)
        yield from ((name, inner) for inner in getattr(load(name), "commands", {}))


def test_every_command_has_short_help_without_python_types(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in all_commands():
        code, out, _ = rstar2(capsys, *command, "-h")
        assert code == 0, command
        assert out.startswith("Usage: rstar2"), command
        assert "-h, --help" in out, command
        assert not (found := TYPES.findall(out)), (command, found)
        wide = [line for line in out.splitlines() if len(line) > 80]
        assert not [line for line in wide if line.startswith("  -")], command


def test_a_misspelt_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = rstar2(capsys, "chatt")
    assert code == 2
    assert "no command 'chatt'. Did you mean 'chat'?" in err
    assert "Did you mean 'run'?" in rstar2(capsys, "codeenv", "rum")[2]
    assert "--model" in rstar2(capsys, "chat", "--modle", "x")[2]


def test_the_list_of_environments_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rstar2(capsys, "env", "list")
    assert code == 0
    built_in = [line for line in out.splitlines() if "  built in " in line]
    assert len(built_in) >= 3
    assert all(len(line) <= 80 for line in built_in)


def test_the_shell_completes_commands_and_their_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def completed(words: str) -> str:
        monkeypatch.setenv("_RSTAR2_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
        monkeypatch.setattr(sys, "argv", ["rstar2"])
        return rstar2(capsys)[1]

    assert completed("rstar2 ch").split() == ["chat"]
    assert "--temperature" in completed("rstar2 chat --te")
    assert completed("rstar2 codeenv ser").split() == ["serve"]


def test_a_running_code_environment_is_used_by_its_variable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text("print(1)")
    monkeypatch.setenv(URL_VARIABLE, "not-a-url")
    code, out, err = rstar2(capsys, "codeenv", "run", str(tmp_path / "program.py"))
    assert (code, out) == (2, "")
    assert "not-a-url" in err


class Terminal(io.StringIO):
    """Text written to a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_wait_is_announced_on_a_terminal_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with waiting("loading a model with a long name"):
        while not terminal.getvalue():
            pass
    assert terminal.getvalue() == f"{ERASE}loading a model wit{ERASE}"
    with waiting("nothing", after_s=60.0):
        pass
    assert "nothing" not in terminal.getvalue()


def test_nothing_is_announced_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with waiting("loading"):
        pass
    assert pipe.getvalue() == ""
