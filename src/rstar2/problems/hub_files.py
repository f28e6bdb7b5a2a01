"""Files of public data sets from the Hugging Face hub: which ones, downloaded, verified, recorded.

Every downloaded file is compared with the hash that the hub declares for it (SHA-256 of large
files, the git hash of small ones). `fetched.json` beside the files records revision, licence and
SHA-256 of each, and later uses verify them, so that a file cannot change unnoticed. Files that were
put there by hand are recorded in the same way.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rstar2 import extras
from rstar2.errors import DataError, InfrastructureError, UserError
from rstar2.files import write_file

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

RECORD = "fetched.json"
Content = Literal["RL problems", "SFT conversations", "evaluation"]
PROBLEM_SET: Content = "RL problems"
SFT_SET: Content = "SFT conversations"
EVALUATION_SET: Content = "evaluation"
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class HubSet:
    """A data set on the hub and what becomes of its rows."""

    repository: str
    files: tuple[str, ...]
    """Patterns of the files to download."""
    reader: str
    content: Content
    licence: str
    """As its publisher stated it when this table was written; `fetched.json` has the hub's word."""
    revision: str = "main"

    @property
    def page(self) -> str:
        return f"https://huggingface.co/datasets/{self.repository}"


_LISTED: tuple[tuple[str, str, str, str, Content, str], ...] = (
    # name, repository, file, reader, content, licence
        (
            "dapo-math-17k", "BytedTsinghua-SIA/DAPO-Math-17k", "data/dapo-math-17k.parquet",
            "dapo", PROBLEM_SET, "Apache-2.0",
        ),
        (
            "openmathreasoning", "nvidia/OpenMathReasoning", "data/cot-*.parquet",
            "openmathreasoning", PROBLEM_SET, "CC-BY-4.0",
        ),
        ("gsm8k", "openai/gsm8k", "main/train-*.parquet", "gsm8k", PROBLEM_SET, "MIT"),
        ("toolace", "Team-ACE/ToolACE", "data.json", "toolace", SFT_SET, "Apache-2.0"),
        (
            "apigen-mt", "Salesforce/APIGen-MT-5k", "apigen-mt_5k.json",
            "apigen", SFT_SET, "CC-BY-NC-4.0",
        ),
        (
            "glaive", "glaiveai/glaive-function-calling-v2", "glaive-function-calling-v2.json",
            "glaive", SFT_SET, "Apache-2.0",
        ),
        (
            "magicoder", "ise-uiuc/Magicoder-OSS-Instruct-75K",
            "data-oss_instruct-decontaminated.jsonl", "magicoder", SFT_SET, "MIT",
        ),
        (
            "tulu-3-if", "allenai/tulu-3-sft-personas-instruction-following",
            "data/train-*.parquet", "tulu", SFT_SET, "ODC-BY-1.0",
        ),
        (
            "nemotron-chat", "nvidia/Llama-Nemotron-Post-Training-Dataset",
            "SFT/chat/chat.jsonl", "nemotron", SFT_SET, "CC-BY-4.0",
        ),
)  # fmt: skip
HUB_SETS = {
    name: HubSet(repository, (file,), reader, content, licence)
    for name, repository, file, reader, content, licence in _LISTED
}
"""The paper's sources and GSM8K. Its 937 Project Euler problems are not published as a data set."""


def fetch_files(name: str, wanted: HubSet, folder: Path, note: Note) -> list[Path]:
    """The files of a data set in `folder`: those that are there, verified, or downloaded ones."""
    if (folder / RECORD).is_file():
        return _recorded(folder)
    present = sorted(p for pattern in wanted.files for p in folder.glob(pattern) if p.is_file())
    if present:
        note(f"{folder}: converting the files that are there")
        _record(folder, wanted, present, revision=None, licence=wanted.licence)
        return present
    return _download(name, wanted, folder, note)


def _recorded(folder: Path) -> list[Path]:
    """The recorded files, unchanged; a DataError names one that is not."""
    try:
        files: dict[str, Any] = json.loads((folder / RECORD).read_bytes())["files"]
    except (ValueError, KeyError) as error:
        raise DataError(f"{folder / RECORD} is damaged ({error}): delete it") from error
    for path, said in files.items():
        if not (folder / path).is_file() or sha256(folder / path) != said["sha256"]:
            raise DataError(
                f"{folder / path} is not the file that was fetched: delete {folder} to fetch it "
                "again"
            )
    return [folder / path for path in files]


def _record(
    folder: Path, wanted: HubSet, files: Sequence[Path], *, revision: str | None, licence: str
) -> None:
    values = {
        "repository": wanted.repository,
        "revision": revision,
        "licence": licence,
        "files": {
            str(path.relative_to(folder)): {"sha256": sha256(path), "bytes": path.stat().st_size}
            for path in files
        },
    }
    write_file(folder / RECORD, json.dumps(values, indent=1).encode() + b"\n")


def _download(name: str, wanted: HubSet, folder: Path, note: Note) -> list[Path]:
    extras.need("huggingface_hub", feature="rstar2 data fetch")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
    from huggingface_hub.errors import HTTPError as ClientError  # type: ignore[attr-defined]

    api = HfApi()
    try:
        info = api.dataset_info(wanted.repository, revision=wanted.revision, files_metadata=True)
        chosen = _chosen(name, wanted, info.siblings or ())
        licence = str(getattr(info.card_data, "license", None) or "not stated")
        note(f"{wanted.repository} at {info.sha}, licence as the hub states it: {licence}")
        paths = []
        for number, file in enumerate(chosen, 1):
            note(f"[{number}/{len(chosen)}] {file.rfilename}, {(file.size or 0) / 1e6:,.1f} MB")
            api.hf_hub_download(
                wanted.repository,
                file.rfilename,
                repo_type="dataset",
                revision=info.sha,
                local_dir=folder,
            )
            paths.append(folder / file.rfilename)
            _check(paths[-1], file)
    except GatedRepoError as error:
        raise UserError(
            f"{name}: accept its terms at {wanted.page}, then log in with `hf auth login` or set "
            "HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise DataError(f"{name}: the hub has no data set {wanted.repository}") from error
    except HfHubHTTPError as error:
        raise InfrastructureError(f"{name}: the hub answered: {error}") from error
    except (ClientError, OSError) as error:
        raise UserError(by_hand(name, wanted, folder, error)) from error
    _record(folder, wanted, paths, revision=info.sha, licence=licence)
    return paths


def by_hand(name: str, wanted: HubSet, folder: Path, error: Exception) -> str:
    """What to do where the hub cannot be reached."""
    listed = ", ".join(wanted.files)
    return (
        f"{name}: the hub cannot be reached ({type(error).__name__}). On another machine:\n"
        f"  open {wanted.page}\n"
        f"  download {listed}\n"
        f"  copy to {folder / Path(wanted.files[0]).parent}\n"
        "  run this command again: it converts the files that are there"
    )


def _chosen(name: str, wanted: HubSet, siblings: Iterable[RepoSibling]) -> list[RepoSibling]:
    listed = sorted(siblings, key=lambda file: file.rfilename)
    chosen = [
        f for f in listed if any(fnmatch.fnmatch(f.rfilename, pattern) for pattern in wanted.files)
    ]
    if not chosen:
        names = ", ".join(file.rfilename for file in listed[:8]) or "no file"
        raise DataError(
            f"{name}: {wanted.repository} has no file like {', '.join(wanted.files)}; it has "
            f"{names}: name the right one with --file"
        )
    return chosen


def _check(path: Path, file: RepoSibling) -> None:
    """Compare a download with the hash that the hub declares; a wrong file is deleted."""
    expected: str | None
    if file.lfs is not None:
        expected, actual = file.lfs.sha256, sha256(path)
    else:
        content = path.read_bytes()
        header = f"blob {len(content)}\0".encode()
        expected, actual = file.blob_id, hashlib.sha1(header + content).hexdigest()
    if expected != actual:
        path.unlink()
        raise DataError(
            f"{path}: its hash is {actual}, the hub says {expected}: run the command again"
        )


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def with_files(wanted: HubSet, patterns: Sequence[str]) -> HubSet:
    """The same data set with other files."""
    return replace(wanted, files=tuple(patterns)) if patterns else wanted
