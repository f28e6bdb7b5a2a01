"""The wire: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

import msgspec
import pytest

from rstar2.codeenv import wire
from rstar2.codeenv.protocol import RunRequest, VerifyRequest, VerifyResult
from rstar2.types import Limits, Outcome, ToolResult, Truncation

CAP = Limits(wall_s=60.0, memory_mb=4096)


def refusal(body: bytes, kind: type = wire.RunIn) -> wire.WireError:
    with pytest.raises(wire.Refusal) as caught:
        wire.read(body, kind)
    return caught.value.wire


def test_a_run_request_survives_the_wire() -> None:
    request = RunRequest("a", "print('ü')", "in\x00", Limits(wall_s=2.0, processes=3), "s", 9.0)
    batch = wire.read(wire.join_batch([wire.encode_call(request, 9.0)]), wire.BatchIn)
    call = batch.calls[0]
    assert isinstance(call, wire.RunIn)
    assert wire.to_run(call, CAP) == request


def test_a_verify_request_survives_the_wire() -> None:
    request = VerifyRequest("v", "math", {"a": [1, {"b": None}]}, 3.0)
    batch = wire.read(wire.join_batch([wire.encode_call(request, 3.0)]), wire.BatchIn)
    call = batch.calls[0]
    assert isinstance(call, wire.VerifyIn)
    assert wire.to_verify(call) == request


def test_replies_survive_the_wire() -> None:
    run = ToolResult(
        "a", Outcome.EXCEPTION, stdout="x", value="1", truncated=Truncation(stdout=3), signal=9
    )
    verify = VerifyResult("v", value={"equal": True}, wall_s=0.5)
    for reply in (wire.BatchLine("a", run=run), wire.BatchLine("v", verify=verify)):
        assert wire.read(wire.encode(reply), wire.BatchLine) == reply


def test_a_run_request_needs_no_kind() -> None:
    assert wire.read(b'{"id": "a", "code": "1"}', wire.RunIn).code == "1"


def test_not_json_is_named() -> None:
    error = refusal(b"code=1")
    assert error.code == "bad_json"
    assert "JSON" in error.message


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b'{"id": "a"}', "code"),
        (b'{"id": "a", "code": 1}', "$.code"),
        (b'{"id": "a", "code": "1", "limits": {"wall_s": "long"}}', "$.limits.wall_s"),
        (b'{"id": "a", "code": "1", "tmieout": 1}', "tmieout"),
        (b"[]", "object"),
    ],
)
def test_a_wrong_field_is_named(body: bytes, part: str) -> None:
    error = refusal(body)
    assert error.code == "invalid"
    assert part in error.message


def test_an_unknown_limit_is_refused_with_the_known_ones() -> None:
    error = refusal(b'{"id": "a", "code": "1", "limits": {"walls": 1}}')
    assert "walls" in error.message
    assert "wall_s" in error.message
    assert "output_chars" in error.message


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (wire.RunIn("", "1"), "id"),
        (wire.RunIn("x" * 300, "1"), "id"),
        (wire.RunIn("a", "1", deadline_s=0.0), "deadline_s"),
        (wire.RunIn("a", "1", session=""), "session"),
        (wire.RunIn("a", "1", limits=wire.LimitsIn(wall_s=-1.0)), "limits.wall_s"),
        (wire.RunIn("a", "1", limits=wire.LimitsIn(wall_s=61.0)), "limits.wall_s"),
        (wire.RunIn("a", "1", limits=wire.LimitsIn(memory_mb=5000)), "limits.memory_mb"),
    ],
)
def test_values_out_of_range_are_refused_by_field(call: wire.RunIn, field: str) -> None:
    with pytest.raises(wire.Refusal) as caught:
        wire.to_run(call, CAP)
    assert caught.value.wire.field == field
    assert field in caught.value.wire.message


def test_a_limit_above_the_cap_names_the_cap() -> None:
    with pytest.raises(wire.Refusal, match=r"cap of 60\.0"):
        wire.to_run(wire.RunIn("a", "1", limits=wire.LimitsIn(wall_s=61.0)), CAP)


@pytest.mark.parametrize(
    "text", ["x" * (wire.MAX_CODE_BYTES + 1), "€" * (wire.MAX_CODE_BYTES // 2)]
)
def test_code_is_bounded_in_bytes(text: str) -> None:
    with pytest.raises(wire.Refusal) as caught:
        wire.to_run(wire.RunIn("a", text), CAP)
    assert caught.value.wire.code == "too_large"


def test_text_without_utf8_form_is_replaced_in_results() -> None:
    reply = wire.BatchLine("a", run=ToolResult("a", Outcome.OK, stdout="ok \ud800"))
    back = wire.read(wire.encode(reply), wire.BatchLine)
    assert back.run is not None
    assert back.run.stdout == "ok ?"


def test_every_error_code_has_a_status() -> None:
    codes = msgspec.inspect.type_info(wire.ErrorCode)
    assert set(codes.values) == set(wire.STATUS)  # type: ignore[attr-defined]
