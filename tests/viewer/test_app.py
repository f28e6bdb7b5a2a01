"""The HTTP side: local, read-only, named errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from rstar2.cli import main
from rstar2.cli.view import run_directories
from rstar2.errors import UserError
from rstar2.viewer.run import ViewedRun, open_runs
from rstar2.viewer.server import POLICY, viewer_app
from tests.viewer.nasty import write_plain


@pytest.fixture
def run(tmp_path: Path, read_run: Callable[[Path], ViewedRun]) -> ViewedRun:
    return read_run(write_plain(tmp_path / "plain", steps=2))


async def ask(
    run: ViewedRun, path: str, method: str = "GET", host: str = "127.0.0.1:1"
) -> httpx.Response:
    transport = httpx.ASGITransport(app=viewer_app({run.name: run}))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
        return await client.request(method, path)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_it_only_reads(run: ViewedRun, method: str) -> None:
    assert (await ask(run, "/api/runs", method)).status_code == 405


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "localhost.evil:1"])
async def test_other_names_for_this_machine_are_refused(run: ViewedRun, host: str) -> None:
    assert (await ask(run, "/api/runs", host=host)).status_code == 403


@pytest.mark.parametrize("host", ["localhost:8765", "127.0.0.1", "[::1]:8765"])
async def test_loopback_names_are_answered(run: ViewedRun, host: str) -> None:
    answer = await ask(run, "/api/runs", host=host)
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/nothing/plain", 404, "no /api/nothing"),
        ("/api/run/other", 404, "there are: plain"),
        ("/api/group/plain?id=x/1/2", 404, "no group 'x/1/2'"),
        ("/api/rollout/plain?id=stage1/1/0/77", 404, "no rollout"),
        ("/api/step/plain?stage=stage1&step=x", 400, "whole number"),
        ("/api/step/plain?stage=stage1&step=9", 404, "no step 9"),
        ("/api/timeline/plain?stage=sft&step=1", 404, "no rollouts"),
        ("/api/rollouts/plain?stop=never", 400, "must be one of"),
        ("/static/../app.py", 404, ""),
        ("/static/%2e%2e/app.py", 404, ""),
    ],
)
async def test_errors_are_named(run: ViewedRun, path: str, status: int, words: str) -> None:
    answer = await ask(run, path)
    if path.startswith("/static/.."):  # the client itself resolves it to /app.py: the page
        assert "rstar2.viewer" not in answer.text
        return
    assert answer.status_code == status
    assert words in answer.json()["error"]


async def test_the_page_loads_nothing_from_elsewhere(run: ViewedRun) -> None:
    names = ["/", "/run/plain", "/static/app.js", "/static/style.css"]
    text = "".join([(await ask(run, name)).text for name in names])
    assert "https://" not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")


def test_no_script_writes_markup() -> None:
    static = Path(__file__).parents[2] / "src/rstar2/viewer/static"
    for file in static.glob("*.js"):
        text = file.read_text()
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in text, f"{file.name} uses {way}"


async def test_a_step_lists_groups_and_says_why_one_was_not_used(run: ViewedRun) -> None:
    step = (await ask(run, "/api/step/plain?stage=stage1&step=1")).json()
    assert [g["used"] for g in step["groups"]] == [True, False]
    assert step["groups"][1]["why"] == "the rollouts kept by resampling had equal rewards"
    assert step["following"] == 2
    assert step["previous"] is None


async def test_tokens_are_columns_of_equal_length(run: ViewedRun) -> None:
    columns = (await ask(run, "/api/tokens/plain?id=stage1/1/0/0")).json()
    sampled = columns["source"].count("s")
    assert len(columns["pieces"]) == len(columns["ids"]) == len(columns["source"]) == 9
    for name in ("logprob", "entropy", "kind", "version", "turn"):
        assert len(columns[name]) == sampled == 5
    assert columns["version"] == [1, 1, 1, 2, 2]
    assert columns["top"] == [1]
    assert columns["old"] is None


async def test_spans_of_the_timeline_add_up(run: ViewedRun) -> None:
    drawn = (await ask(run, "/api/timeline/plain?stage=stage1&step=1")).json()
    first = [s for s in drawn["spans"] if s[1] == 0]
    assert [(drawn["states"][s[2]], s[3], s[4]) for s in first] == [
        ("queued", 0.0, 100.0),
        ("generating", 100.0, 500.0),
        ("tool", 500.0, 700.0),
    ]


async def test_the_timeline_can_be_had_as_files(run: ViewedRun) -> None:
    trace = await ask(run, "/api/trace/plain?stage=stage1&step=1")
    assert 'filename="plain-stage1-1.trace.json"' in trace.headers["content-disposition"]
    events = [e for e in trace.json()["traceEvents"] if e["ph"] == "X"]
    assert {e["name"] for e in events} == {"queued", "generating", "tool"}
    picture = await ask(run, "/api/picture/plain?stage=stage1&step=1")
    assert picture.headers["content-type"] == "image/svg+xml"
    assert "engine-0" in picture.text


async def test_runs_of_equal_names_get_different_names(tmp_path: Path) -> None:
    paths = [write_plain(tmp_path / where / "same", steps=1) for where in ("a", "b")]
    assert list(open_runs(paths)) == ["same", "same-2"]


def test_a_directory_of_runs_is_all_of_them(tmp_path: Path) -> None:
    for name in ("x", "deep/y"):
        write_plain(tmp_path / "all" / name, steps=1)
    assert {p.name for p in run_directories(tmp_path / "all")} == {"x", "y"}
    with pytest.raises(UserError, match="no such run directory"):
        run_directories(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="not a run directory and has none"):
        run_directories(tmp_path / "empty")


def test_a_file_that_is_no_run_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    with pytest.raises(SystemExit) as end:
        main(["view", "--port", "0", str(tmp_path)])
    assert end.value.code == 2
    assert "not a run directory" in capsys.readouterr().err


def test_json_has_no_nan(run: ViewedRun) -> None:
    from rstar2.viewer import overview

    run.metrics.values.append({"stage": "stage1", "step": 3, "time": 0.0, "loss": float("nan")})
    text = json.dumps(overview.curves(run), allow_nan=False)
    assert "null" in text
