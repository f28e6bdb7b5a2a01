"""`rstar2 data fetch` against a local fake of the hub's HTTP API: download, verify, convert."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rstar2.cli import main
from rstar2.cli.data_fetch import known_sets
from rstar2.problems.hub_files import HUB_SETS, SFT_SET
from rstar2.problems.load import read_jsonl
from rstar2.problems.sft.converters import CONVERTERS
from rstar2.problems.sources import READERS
from tests.problems.download_hub import COMMIT, DataSets, data_hub

DAPO = HUB_SETS["dapo-math-17k"].repository
FILE = HUB_SETS["dapo-math-17k"].files[0]


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": f"How many feet have {n} spiders, in all?"}],
            "reward_model": {"ground_truth": str(8 * n), "style": "rule"},
            "extra_info": {"index": str(n)},
        }
        for n in range(1, count + 1)
    ]


def parquet(values: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(values), buffer)
    return buffer.getvalue()


@pytest.fixture
def hub() -> Iterator[DataSets]:
    with data_hub() as served:
        served.files[DAPO] = {FILE: parquet([*rows(5), *rows(5)]), "README.md": b"about"}
        yield served


def fetch(hub_url: str, directory: Path, *words: str) -> tuple[int, str, str]:
    """The command in its own process: the hub's address is read when its package is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "rstar2", "data", "fetch", *words],
        cwd=directory, capture_output=True, text=True, timeout=300,
        env={**os.environ, "HF_ENDPOINT": hub_url, "HF_HOME": str(directory / "home")},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_data_set_is_downloaded_verified_and_converted(hub: DataSets, tmp_path: Path) -> None:
    code, _, err = fetch(hub.url, tmp_path, "dapo-math-17k")
    assert code == 0, err
    problems = list(read_jsonl(tmp_path / "data" / "dapo-math-17k" / "problems.jsonl"))
    assert [p.answer for p in problems] == ["8", "16", "24", "32", "40"]  # each row once
    assert "licence as the hub states it: apache-2.0" in err
    record = json.loads((tmp_path / "data" / "dapo-math-17k-raw" / "fetched.json").read_text())
    assert record["revision"] == COMMIT
    assert list(record["files"]) == [FILE]
    assert "README.md" not in " ".join(hub.requests)


@pytest.mark.slow
def test_a_file_that_changed_after_the_download_is_refused(hub: DataSets, tmp_path: Path) -> None:
    assert fetch(hub.url, tmp_path, "dapo-math-17k", "--out", "once")[0] == 0
    (tmp_path / "once-raw").rename(tmp_path / "twice-raw")
    asked = len(hub.requests)
    assert fetch(hub.url, tmp_path, "dapo-math-17k", "--out", "twice")[0] == 0
    assert len(hub.requests) == asked  # verified, not downloaded again
    (tmp_path / "twice-raw").rename(tmp_path / "third-raw")
    with (tmp_path / "third-raw" / FILE).open("ab") as file:
        file.write(b"x")
    code, _, err = fetch(hub.url, tmp_path, "dapo-math-17k", "--out", "third")
    assert (code, "is not the file that was fetched" in err) == (2, True)


@pytest.mark.slow
def test_a_file_with_another_hash_is_refused(hub: DataSets, tmp_path: Path) -> None:
    hub.declared[FILE] = parquet(rows(4))
    code, _, err = fetch(hub.url, tmp_path, "dapo-math-17k")
    assert (code, "the hub says" in err) == (2, True), err
    assert not (tmp_path / "data" / "dapo-math-17k").exists()


@pytest.mark.slow
def test_the_failures_of_a_hub_are_sentences(hub: DataSets, tmp_path: Path) -> None:
    hub.gated.add(DAPO)
    code, _, err = fetch(hub.url, tmp_path, "dapo-math-17k")
    assert (code, "accept its terms at" in err) == (2, True), err
    code, _, err = fetch("http://127.0.0.1:9", tmp_path, "dapo-math-17k")
    assert code == 2
    assert "the hub cannot be reached" in err
    assert f"open https://huggingface.co/datasets/{DAPO}\n  download {FILE}\n" in err
    assert "copy to data/dapo-math-17k-raw/data" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_files_that_were_put_there_are_converted_without_a_hub(tmp_path: Path) -> None:
    raw = tmp_path / "data" / "dapo-math-17k-raw" / FILE
    raw.parent.mkdir(parents=True)
    raw.write_bytes(parquet(rows(3)))
    code, _, err = fetch("http://127.0.0.1:9", tmp_path, "dapo-math-17k")
    assert code == 0, err
    assert json.loads((raw.parents[1] / "fetched.json").read_text())["revision"] is None


def test_the_list_names_hub_ids_and_licences(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["data", "fetch", "--list"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "dapo-math-17k" in out
    assert "BytedTsinghua-SIA/DAPO-Math-17k" in out
    assert max(map(len, out.splitlines())) <= 80


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["data", "fetch", "dapo"])
    assert ended.value.code == 2
    assert "choose one of dapo-math-17k" in capsys.readouterr().err


def test_every_set_has_a_reader() -> None:
    for name, one in known_sets().items():
        readers = CONVERTERS if one.content == SFT_SET else READERS
        assert one.reader in readers, name
        assert "/" in one.repository
