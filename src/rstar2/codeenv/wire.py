"""The HTTP protocol of the code environment: JSON bodies, their validation, and errors.

    POST /v1/run      {"id", "code", "stdin"?, "limits"?, "session"?, "deadline_s"?,
                       "files"?: {path: base64}, "collect"?: bool, "reuse"?: group} -> ToolResult
    POST /v1/verify   {"id", "function", "arguments"?, "deadline_s"?}              -> VerifyResult
    POST /v1/batch    {"calls": [{"kind": "run", ...} | {"kind": "verify", ...}]}  -> BatchLines
    POST /v1/sessions {"id"?, "ttl_s"?}                                            -> SessionInfo
    POST /v1/sessions/{id}/branch {"id"?}                                          -> SessionInfo
    errors            {"error": {"code", "message", "field"?, "retry_after_s"?}}

A batch is answered line by line in the order of completion; every line carries the id of its
call. A call that cannot be executed gets a line with `error`; the others are not affected.
Unknown fields are errors: a misspelt limit must never be ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, cast

import msgspec

from rstar2.codeenv.protocol import CallRequest, RunRequest, VerifyRequest, VerifyResult
from rstar2.codeenv.sizes import MAX_FILES, MAX_FILES_BYTES, MAX_PATH_BYTES, MAX_PATH_PARTS
from rstar2.errors import UserError
from rstar2.types import Limits, ToolResult

MAX_BODY_BYTES = 64 << 20
MAX_CODE_BYTES = 1 << 20
MAX_STDIN_BYTES = 8 << 20
MAX_ID_CHARS = 256
MAX_BATCH = 1024
MAX_VALUES = 1 << 18
"""Values in a body. A batch of code-judge with 16,384 programs has a third of that."""

ErrorCode = Literal[
    "bad_json",
    "invalid",
    "too_large",
    "bad_request",
    "unauthorized",
    "forbidden",
    "not_found",
    "method",
    "conflict",
    "queue_full",
    "shutting_down",
    "infrastructure",
]

STATUS: Mapping[ErrorCode, int] = {
    "bad_json": 400,
    "invalid": 422,
    "too_large": 413,
    "bad_request": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "method": 405,
    "conflict": 409,
    "queue_full": 429,
    "shutting_down": 503,
    "infrastructure": 503,
}


class WireError(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request or a call was refused; `field` names what to change."""

    code: ErrorCode
    message: str
    field: str | None = None
    retry_after_s: float | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every response with a status of 400 or more."""

    error: WireError


class Refusal(UserError):
    """A request that is answered with an error; carries the body of that answer."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.wire = WireError(code, message, field, retry_after_s)


class LimitsIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`types.Limits` as a caller writes it; unknown limits are refused."""

    wall_s: float | None = None
    cpu_s: float | None = None
    memory_mb: int | None = None
    processes: int | None = None
    file_mb: int | None = None
    scratch_mb: int | None = None
    output_chars: int | None = None


class RunIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="run"):
    """A run request as a caller writes it."""

    id: str
    code: str
    stdin: str = ""
    limits: LimitsIn = LimitsIn()
    session: str | None = None
    deadline_s: float | None = None
    files: dict[str, bytes] = {}
    collect: bool = False
    reuse: str | None = None


class VerifyIn(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="verify"
):
    """A verify request as a caller writes it."""

    id: str
    function: str
    arguments: dict[str, Any] = {}
    deadline_s: float | None = None


class BatchIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Up to MAX_BATCH calls, answered one by one."""

    calls: list[RunIn | VerifyIn]


class SessionIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A session to open; its id is chosen by the server when absent."""

    id: str | None = None
    ttl_s: float | None = None


class BranchIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A branch of a session; its id is chosen by the server when absent."""

    id: str | None = None


class BatchLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a batch: exactly one of `run`, `verify` and `error` is set."""

    id: str
    run: ToolResult | None = None
    verify: VerifyResult | None = None
    error: WireError | None = None


class Health(msgspec.Struct, frozen=True):
    """What a server reports about itself."""

    status: Literal["ok", "shutting_down"]
    server: str = ""
    version: str = ""
    isolation: str = ""
    slots: int = 0
    busy: int = 0
    queued: int = 0
    queue: int = 0
    sessions: int = 0
    restarts: int = 0
    warm: list[str] = []
    packages: list[str] = []
    completed: dict[str, int] = {}
    default: Limits = Limits()
    cap: Limits = Limits()


class ServerReady(msgspec.Struct, frozen=True, omit_defaults=True):
    """The one line an owned server prints: its URL, or why it could not start."""

    url: str = ""
    isolation: str = ""
    slots: int = 0
    error: str = ""
    message: str = ""


_SESSION_ID = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:-]{{0,{MAX_ID_CHARS - 1}}}")

S = TypeVar("S")

_encoder = msgspec.json.Encoder()
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


def read(body: bytes, kind: type[S]) -> S:
    """Decode a body; a Refusal names the field and what is accepted there."""
    _check_values(body)
    try:
        decoder = _decoders.get(kind)
        if decoder is None:
            decoder = _decoders[kind] = msgspec.json.Decoder(kind)
        return cast(S, decoder.decode(body))
    except msgspec.ValidationError as error:
        raise Refusal("invalid", _explain(str(error)), _path(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(
            "bad_json", f"the body is not JSON: {error}; send a JSON object in UTF-8"
        ) from error
    except RecursionError as error:
        raise Refusal("bad_json", "the body is nested too deeply; send a flat object") from error


_STRING_OR_COMMA = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|(,)', re.DOTALL)


def _check_values(body: bytes) -> None:
    """Refuse a body with very many values before it is decoded, which nothing can interrupt.

    Commas outside strings separate values. The search ends at the first comma too many.
    """
    if len(body) <= MAX_VALUES or body.count(b",") < MAX_VALUES:
        return
    commas = (match for match in _STRING_OR_COMMA.finditer(body) if match.lastindex)
    if next(itertools.islice(commas, MAX_VALUES - 1, None), None) is not None:
        raise Refusal("too_large", f"the body has over {MAX_VALUES} values; send smaller batches")


def _path(message: str) -> str | None:
    """`... - at `$.limits.wall_s`` -> limits.wall_s."""
    head, at, tail = message.rpartition(" - at `")
    return tail.rstrip("`").removeprefix("$").lstrip(".") or None if at and head else None


def _explain(message: str) -> str:
    """msgspec's message, which names the wrong field, and what is accepted instead."""
    if "unknown field" not in message:
        return message
    known = LimitsIn.__struct_fields__ if "limits" in (_path(message) or "") else ()
    hint = f"; known limits: {', '.join(known)}" if known else "; see docs/code-environment.md"
    return message + hint


# --------------------------------------------------------------------------- validation


def to_run(call: RunIn, cap: Limits) -> RunRequest:
    """A checked RunRequest, or a Refusal that names the field and the fix."""
    _check_id(call.id)
    _check_size("code", call.code, MAX_CODE_BYTES)
    _check_size("stdin", call.stdin, MAX_STDIN_BYTES)
    _check_positive("deadline_s", call.deadline_s)
    if call.session is not None:
        check_session_id(call.session, "session")
    if call.files:
        check_files(call.files)
    if call.reuse is not None:
        _check_id(call.reuse, "reuse")
    limits = _to_limits(call.limits, cap)
    return RunRequest(
        call.id, call.code, call.stdin, limits, call.session, call.deadline_s, call.files,
        call.collect, call.reuse,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _to_limits(asked: LimitsIn, cap: Limits) -> Limits:
    """Checked limits, cached: callers use the same few again and again."""
    limits = Limits(*msgspec.structs.astuple(asked))
    check_limits(limits, cap)
    return limits


def to_verify(call: VerifyIn) -> VerifyRequest:
    """A checked VerifyRequest, or a Refusal."""
    _check_id(call.id)
    _check_positive("deadline_s", call.deadline_s)
    if not call.function:
        raise Refusal("invalid", "function: is empty; name one of verify.FUNCTIONS", "function")
    return VerifyRequest(call.id, call.function, call.arguments, call.deadline_s)


def check_limits(limits: Limits, cap: Limits) -> None:
    """Refuse limits that are not positive or that exceed the server's caps."""
    for field in dataclasses.fields(Limits):
        value, most = getattr(limits, field.name), getattr(cap, field.name)
        name = f"limits.{field.name}"
        _check_positive(name, value)
        if value is not None and most is not None and value > most:
            raise Refusal(
                "invalid",
                f"{name}: {value} is above this server's cap of {most}; "
                f"ask for at most {most}, or raise the cap where the server is started",
                name,
            )


def _check_id(value: str, field: str = "id") -> None:
    if not 0 < len(value) <= MAX_ID_CHARS:
        raise Refusal(
            "invalid", f"{field}: must have 1 to {MAX_ID_CHARS} characters, has {len(value)}", field
        )


def check_session_id(value: str, field: str = "id") -> None:
    """Refuse a session id that cannot be part of a URL."""
    if not _SESSION_ID.fullmatch(value):
        shown = value if len(value) <= 40 else f"{value[:40]}..."
        raise Refusal(
            "invalid",
            f"{field}: {shown!r} ({len(value)} characters): a session id has 1 to {MAX_ID_CHARS} "
            "letters, digits and . _ : - and starts with a letter or digit",
            field,
        )


def check_files(files: Mapping[str, bytes]) -> None:
    """Refuse files that are too many, too large, or not below the working directory."""
    if len(files) > MAX_FILES:
        raise Refusal("too_large", f"files: {len(files)} files; send at most {MAX_FILES}", "files")
    size = sum(map(len, files.values()))
    if size > MAX_FILES_BYTES:
        raise Refusal(
            "too_large", f"files: {size} bytes in all; send at most {MAX_FILES_BYTES}", "files"
        )
    for name in files:
        reason = _bad_path(name)
        if reason is None and any(name.startswith(f"{other}/") for other in files):
            reason = "is inside another file of this call"
        if reason is not None:
            raise Refusal("invalid", f"files: {name!r} {reason}", "files")


def _bad_path(name: str) -> str | None:
    """Why a path is refused; None if it is below the working directory and can be created."""
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        return "is not a relative path below the working directory, such as data/input.csv"
    if len(parts) > MAX_PATH_PARTS:
        return f"is more than {MAX_PATH_PARTS} directories deep"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "has no UTF-8 form"
    if size > MAX_PATH_BYTES:
        return f"has {size} bytes; use at most {MAX_PATH_BYTES}"
    return None


def _check_size(field: str, value: str, most: int) -> None:
    if len(value) > most or (len(value) * 4 > most and len(value.encode()) > most):
        raise Refusal(
            "too_large", f"{field}: {len(value)} characters are above the limit of {most} bytes",
            field,
        )  # fmt: skip


def _check_positive(field: str, value: float | int | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise Refusal("invalid", f"{field}: {value} must be above 0", field)


# --------------------------------------------------------------------------- encoding


def encode(value: Any) -> bytes:
    """JSON in UTF-8; text that has no UTF-8 form (lone surrogates) is replaced by `?`."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return _encoder.encode(_scrub(msgspec.to_builtins(value)))


def _scrub(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_scrub(k): _scrub(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_scrub(v) for v in value]
    return value


def encode_call(request: CallRequest, deadline_s: float) -> bytes:
    """One call of a batch, with the rest of the caller's budget as its deadline."""
    if isinstance(request, VerifyRequest):
        return _encoder.encode(
            VerifyIn(request.id, request.function, dict(request.arguments), deadline_s)
        )
    call = RunIn(
        request.id, request.code, request.stdin, _from_limits(request.limits), request.session,
        deadline_s, dict(request.files), request.collect, request.reuse,
    )  # fmt: skip
    return _encoder.encode(call)


@functools.lru_cache(maxsize=256)
def _from_limits(limits: Limits) -> LimitsIn:
    return LimitsIn(*(getattr(limits, name) for name in LimitsIn.__struct_fields__))


def join_batch(calls: list[bytes]) -> bytes:
    """The body of /v1/batch from encoded calls."""
    return b'{"calls":[' + b",".join(calls) + b"]}"
