"""Rows of every kind of file, whole and broken: each is read, or named with its number."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rstar2.errors import DataError, UserError
from rstar2.problems import rows
from rstar2.problems.rows import BadRow, DataRow, HubName, known_rows, parse_hub, read_rows


def fields(source: Path | str) -> list[Any]:
    return [row.fields for row in read_rows(str(source)) if isinstance(row, DataRow)]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# --------------------------------------------------------------------------- JSON lines


def test_bad_lines_carry_their_number_and_text(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", '{"a": 1}\n{broken\n[1, 2]\n\n{"a": 2}\n')
    listed = list(read_rows(str(source)))
    assert [type(row) for row in listed] == [DataRow, BadRow, BadRow, DataRow]
    assert isinstance(listed[1], BadRow)
    assert listed[1].where.endswith("a.jsonl:2")
    assert listed[1].text == "{broken"
    assert "list" in listed[2].reason  # type: ignore[union-attr]
    assert listed[3].number == 5


def test_bytes_that_are_no_text_are_one_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "\xff\xfe"}\n{"a": 2}\n')
    bad, good = read_rows(str(path))
    assert isinstance(bad, BadRow)
    assert "\\xff" in bad.text
    assert isinstance(good, DataRow)


def test_numbers_of_any_size_keep_their_digits(tmp_path: Path) -> None:
    big = 123456789012345678901234567890
    assert fields(write(tmp_path / "a.jsonl", f'{{"a": {big}}}\n')) == [{"a": big}]


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        list(read_rows(str(tmp_path / "none.jsonl")))
    with pytest.raises(DataError, match=r"not a \.jsonl"):
        list(read_rows(str(write(tmp_path / "a.txt", "x"))))


def test_gzip_is_read_and_a_torn_one_is_not_taken_for_a_short_one(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(b'{"a": %d}\n' % i for i in range(20_000)))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(whole)
    assert len(fields(path)) == 20_000
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"torn or not a gzip file after row \d{3,}"):
        fields(path)
    path.write_bytes(b"plain text")
    with pytest.raises(DataError, match="after row 0"):
        fields(path)


# --------------------------------------------------------------------------- JSON arrays


@pytest.mark.parametrize("piece", [1, 3, 7, 1 << 20])
def test_an_array_is_read_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(rows, "PIECE", piece)
    made = [{"a": "ü€𝄞 \\u00e9 ]},["}, {"b": [1, {"c": -12.5e3}]}, {}, {"d": None}]
    text = json.dumps(made, ensure_ascii=False, indent=1)
    assert fields(write(tmp_path / "a.json", f"  \n{text}\n ")) == made
    zipped = tmp_path / "b.json.gz"
    zipped.write_bytes(gzip.compress(text.encode()))
    assert fields(zipped) == made


def test_an_array_may_hold_what_is_no_object_and_says_so(tmp_path: Path) -> None:
    good, bad, last = read_rows(str(write(tmp_path / "a.json", '[{"a": 1}, 17, {"a": 2}]')))
    assert isinstance(bad, BadRow)
    assert (bad.number, bad.text) == (2, "17")
    assert isinstance(good, DataRow)
    assert isinstance(last, DataRow)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1}, {"a": ', r"a\.json:2: not JSON"),
        ('[{"a": 1}, {broken}]', r"a\.json:2: not JSON"),
        ('[{"a": NaN}]', r"a\.json:1: not JSON.*NaN"),
        ('[{"a": 1}', "expected ',' in the JSON array, found the end"),
        ('[{"a": 1} {"a": 2}]', "expected ','"),
        ('[{"a": 1}] {"a": 2}', "after the end of the array, after element 1"),
    ],
)
def test_a_torn_array_is_an_error_that_says_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fields(write(tmp_path / "a.json", text))


def test_json_without_an_array_is_json_lines(tmp_path: Path) -> None:
    assert fields(write(tmp_path / "a.json", '{"a": 1}\n{"a": 2}\n')) == [{"a": 1}, {"a": 2}]


# --------------------------------------------------------------------------- Parquet


def test_parquet_streams_nested_fields(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    made = [{"n": i, "prompt": [{"role": "user", "content": f"q{i}"}]} for i in range(3000)]
    pq.write_table(pa.Table.from_pylist(made), path, row_group_size=1000)
    listed = list(read_rows(str(path)))
    assert [row.fields for row in listed if isinstance(row, DataRow)] == made
    assert listed[2999].where.endswith("a.parquet:3000")


def test_a_torn_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": list(range(1000))}), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="torn or not a Parquet file after row 0"):
        fields(path)


# --------------------------------------------------------------------------- recognising


def test_broken_first_rows_are_kept_as_bad_ones_once_a_later_row_is_known(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", '{"x": 1}\n{broken\n{"q": 2}\n{"x": 3}\n')
    listed = list(known_rows(str(source), None, _knows_q))
    assert [r.number if isinstance(r, BadRow) else r[0].number for r in listed] == [2, 1, 3, 4]
    assert isinstance(listed[1], BadRow)
    assert "unknown fields" in listed[1].reason
    assert listed[2] == (DataRow(f"{source}:3", 3, {"q": 2}), "reader of q")


def test_a_file_that_nothing_knows_is_an_error_and_not_all_dropped(tmp_path: Path) -> None:
    for count in (1, 19, 20, 40):
        source = write(tmp_path / "a.jsonl", '{"x": 1}\n' * count)
        with pytest.raises(UserError, match=r"a\.jsonl:1: unknown fields"):
            list(known_rows(str(source), None, _knows_q))


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json"):
        for text in ("", "\n \n"):
            with pytest.raises(DataError, match="contains no row"):
                list(known_rows(str(write(tmp_path / name, text)), None, _knows_q))
    with pytest.raises(DataError, match="contains no row"):
        list(known_rows(str(write(tmp_path / "a.json", "[]")), None, _knows_q))


def _knows_q(fields: Any) -> str:
    if "q" in fields:
        return "reader of q"
    raise UserError("unknown fields")


# --------------------------------------------------------------------------- the hub


@pytest.mark.parametrize(
    ("text", "hub"),
    [
        ("hub:openai/gsm8k", HubName("openai/gsm8k", None, None, "train")),
        ("hub:openai/gsm8k#main:test", HubName("openai/gsm8k", "main", None, "test")),
        ("hub:o/n@abc123", HubName("o/n", None, "abc123", "train")),
        ("hub:o/n#SFT@v1:chat[:10]", HubName("o/n", "SFT", "v1", "chat[:10]")),
    ],
)
def test_names_on_the_hub_are_taken_apart(text: str, hub: HubName) -> None:
    assert parse_hub(text) == hub


def test_a_directory_is_loaded_by_datasets(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for split in ("train", "cot"):
        made = pa.Table.from_pylist([{"problem": f"{split} {i}"} for i in range(5)])
        pq.write_table(made, tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    assert fields(f"hub:{tmp_path}")[4] == {"problem": "train 4"}
    listed = list(read_rows(f"hub:{tmp_path}:cot"))
    assert [row.number for row in listed] == [1, 2, 3, 4, 5]
    assert isinstance(listed[0], DataRow)
    assert listed[0].fields == {"problem": "cot 0"}
    with pytest.raises(DataError, match="split nothing"):
        fields(f"hub:{tmp_path}:nothing")
    with pytest.raises(DataError, match="after row 0"):
        fields(f"hub:{tmp_path}/not-there")
