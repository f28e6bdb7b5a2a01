"""`rstar2 data problems`, `agree` and `difficulty` as they are called, kill -9 included."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from typer.testing import CliRunner

from rstar2.cli.data import app
from rstar2.cli.data_shared import named_source
from rstar2.errors import UserError
from tests.chat_server import chat_server

DEADLINE_S = 170


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows))
    return str(path)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)  # type: ignore[no-any-return]


# --------------------------------------------------------------------------- sources


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b/gsm8k.jsonl", ("gsm8k", "a/b/gsm8k.jsonl", None)),
        ("gsm8k/train.jsonl.gz", ("gsm8k-train", "gsm8k/train.jsonl.gz", None)),
        ("x=a.jsonl", ("x", "a.jsonl", None)),
        ("x=math:a=1/b.json", ("x", "a=1/b.json", "M")),
        ("/d=1/b.json", ("b", "/d=1/b.json", None)),
        ("hub:openai/gsm8k#main@v1:test", ("gsm8k", "hub:openai/gsm8k#main@v1:test", None)),
        ("math:hub:o/n:cot", ("n", "hub:o/n:cot", "M")),
    ],
)
def test_sources_have_names_readers_and_places(text: str, expected: tuple[Any, ...]) -> None:
    assert named_source(text, {"math": "M"}) == expected


def test_problems_of_chosen_kinds_are_kept_and_an_unknown_kind_is_an_error(tmp_path: Path) -> None:
    kinds = ("sum", "product", "sum", "share")
    rows = [{"input": f"Find the {kind} number {n}.", "target": n} for n, kind in enumerate(kinds)]
    source = write(
        tmp_path / "mawps.jsonl",
        *({**row, "type": kind} for row, kind in zip(rows, kinds, strict=True)),
    )
    words = ("problems", source, "--no-verify", "--kind", "sum", "--kind")
    run(*words, "share", "--out", str(tmp_path / "out"), "--grader", "number")
    kept = [(row["kind"], row["grader"]) for row in lines(tmp_path / "out" / "problems.jsonl")]
    assert kept == [("sum", "number"), ("sum", "number"), ("share", "number")]
    with pytest.raises(UserError, match="--grader nmber is unknown: the graders are choice, inte"):
        run(*words, "share", "--out", str(tmp_path / "third"), "--grader", "nmber")
    with pytest.raises(UserError, match=r"--kind shape: no .* kinds are product, share, sum"):
        run(*words, "shape", "--out", str(tmp_path / "other"))


EVAL = r"Let $ABC$ be a triangle with $\angle A = 60^\circ$ and $BC = \frac{7}{2}$. Find $AB + AC$."


def test_problems_are_cleaned_and_decontaminated(tmp_path: Path) -> None:
    planted = [
        EVAL,
        EVAL.upper().replace("$", " $ "),
        "let ABC be a triangle with angle A = 60 circ and BC = 7/2, find it",
        r"Let $ABC$ be a triangle with $\angle{A}=60^{\circ}$ and $BC=\dfrac{7}{2}$! Find $x$.",
    ]
    control = ["Let n be an integer with n > 5. Find n.", "How many triangles have an angle of 60?"]
    train = [{"question": text, "answer": "#### 7"} for text in [*planted, *control]]
    card = run(
        *("problems", write(tmp_path / "train.jsonl", *train), "--out", str(tmp_path / "out")),
        *("--against", write(tmp_path / "eval.jsonl", {"problem": EVAL, "answer": "7"})),
        "--no-verify",
    )
    kept = [row["prompt"] for row in lines(tmp_path / "out" / "problems.jsonl")]
    assert kept == control
    steps = {row["step"] for row in lines(tmp_path / "out" / "dropped.jsonl")}
    assert steps == {"no duplicates", "decontaminated"}
    assert (card["kept"], card["steps"][-1]["left"]) == (2, 2)


def test_a_field_map_is_for_sources_that_name_no_reader(tmp_path: Path) -> None:
    odd = write(tmp_path / "odd.jsonl", {"q": "How many eggs are there?", "gold": 4, "k": "eggs"})
    known = write(tmp_path / "known.jsonl", {"input": "How many hens are there?", "target": 5.0})
    card = run(
        *("problems", odd, f"mawps:{known}", "--out", str(tmp_path / "out"), "--no-verify"),
        *("--prompt-field", "q", "--answer-field", "gold", "--kind-field", "k"),
    )
    assert card["kept"] == 2
    assert [row["kind"] for row in lines(tmp_path / "out" / "problems.jsonl")] == ["eggs", ""]


def test_an_evaluation_set_that_cannot_be_read_protects_nothing_and_is_an_error(
    tmp_path: Path,
) -> None:
    source = write(tmp_path / "a.jsonl", {"input": "How many hens are there?", "target": 5.0})
    broken = write(tmp_path / "e.jsonl", {"problem": EVAL, "answer": "7"}, "{broken\n")
    with pytest.raises(UserError, match=r"evaluation set .*e\.jsonl:2: not JSON"):
        run("problems", source, "--out", str(tmp_path / "out"), "--against", broken)
    with pytest.raises(UserError, match="go together"):
        run("problems", source, "--out", str(tmp_path / "out"), "--prompt-field", "q")


# --------------------------------------------------------------------------- an endpoint


class Endpoint:
    """Plays a model that is right where the seed is even; may stop answering."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[str, int]] = Counter()
        self.answered: Counter[tuple[str, int]] = Counter()
        self.hang_after: int | None = None
        self.hanging = asyncio.Event()

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "m"}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        key = (body["messages"][-1]["content"].splitlines()[-1], body["seed"])
        self.asked[key] += 1
        if self.hang_after is not None and self.answered.total() >= self.hang_after:
            self.hanging.set()
            await asyncio.sleep(DEADLINE_S)
        self.answered[key] += 1
        text = f"<answer>\\boxed{{{1 + body['seed'] % 2}}}</answer>"
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop"}
        sent = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
        return StreamingResponse(iter([sent]), media_type="text/event-stream")

    def serve(self) -> AbstractAsyncContextManager[str]:
        return chat_server(self.models, self.complete)


@pytest.mark.slow
async def test_agreement_resumes_after_kill_9_and_asks_nothing_twice(tmp_path: Path) -> None:
    asked = [{"id": f"p{i}", "prompt": f"What is number {i}?", "answer": 1} for i in range(12)]
    path = write(tmp_path / "problems.jsonl", *(a | {"grader": "integer"} for a in asked))
    endpoint = Endpoint()
    async with endpoint.serve() as url, asyncio.timeout(DEADLINE_S):
        command = [
            *(sys.executable, "-m", "rstar2", "data", "agree", path, "--url", url, "--json"),
            *("--out", str(tmp_path / "out"), "--matches", "2", "--samples", "4"),
            *("--concurrency", "3"),
        ]
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        endpoint.hang_after = 13
        first = await asyncio.create_subprocess_exec(*command, **pipes)  # type: ignore[arg-type]
        await endpoint.hanging.wait()
        first.kill()
        await first.communicate()
        assert not (tmp_path / "out" / "problems.jsonl").exists()
        on_record = len(lines(tmp_path / "out" / "answers.jsonl"))
        endpoint.hang_after = None
        before = endpoint.answered.copy()
        second = await asyncio.create_subprocess_exec(*command, **pipes)  # type: ignore[arg-type]
        out, errors = await second.communicate()
    assert second.returncode == 0, errors.decode()
    assert 10 <= on_record <= 13
    twice = [key for key, count in endpoint.answered.items() if count > 1]
    assert len(twice) <= before.total() - on_record, "only what was not on record was asked again"
    answers = lines(tmp_path / "out" / "answers.jsonl")
    keys = Counter((line["id"], line["sample"]) for line in answers)
    assert max(keys.values()) == 1
    right = Counter(line["id"] for line in answers if line["correct"])
    kept = [row["id"] for row in lines(tmp_path / "out" / "problems.jsonl")]
    assert kept == [a["id"] for a in asked if right[a["id"]] >= 2]
    assert json.loads(out)["kept"] == len(kept)
    assert len(kept) + len(lines(tmp_path / "out" / "dropped.jsonl")) == 12


# --------------------------------------------------------------------------- a local model


@pytest.mark.slow
def test_difficulty_asks_a_local_model_by_the_agent_loop(tmp_path: Path, tiny_dir: Path) -> None:
    rows = [{"prompt": f"What is {i} + {i}?", "answer": 2 * i, "grader": "integer"} for i in (3, 4)]
    path = write(tmp_path / "problems.jsonl", *rows)
    card = run(
        *("difficulty", path, "--model", str(tiny_dir), "--out", str(tmp_path / "out")),
        *("--samples", "2", "--max-length", "160", "--max-turns", "1", "--no-tools"),
        "--all-samples",
    )
    assert card["kept"] == 2, "an untrained model solves nothing, and what is never solved stays"
    assert len(lines(tmp_path / "out" / "answers.jsonl")) == 4
    marks = [row["meta"]["solved"] for row in lines(tmp_path / "out" / "problems.jsonl")]
    assert marks == [{"correct": 0, "asked": 2}] * 2


def test_one_model_has_to_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "problems.jsonl", {"prompt": "What is it?", "answer": 1})
    out = ("--out", str(tmp_path / "out"))
    with pytest.raises(UserError, match="either --model DIR or --url URL"):
        run("agree", path, *out)
    with pytest.raises(UserError, match="--matches 3 is more than --samples 2"):
        run("agree", path, *out, "--matches", "3", "--samples", "2", "--url", "http://x")
