"""Fixtures for all tests, and how tests are spread over the workers of pytest-xdist."""

from __future__ import annotations

import fcntl
import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests.attacks.attacker import VARIANTS
from tests.commands import codeenv_command

ROOT = Path(__file__).resolve().parents[1]

LONGEST_FIRST = (
    *("attacks", "e2e", "evaluate", "test_doc_commands.py", "learner", "viewer", "faults"),
    *("trainers", "engine", "codeenv"),
)
"""Folders and files that start first, so that no worker begins a long one when others finish."""

FIRST = "test_killed_again_and_again_it_ends_with_the_same_numbers"
"""The longest of all makes `finished`, for which the others would wait: they begin with attacks."""

SPREAD = ("e2e",)
"""Folders whose tests share no fixture but `finished`: each of them may run on any worker."""

SERVED = {
    *("codeenv/test_served_executor.py", "codeenv/test_release_format.py"),
    *("trainers/test_examples.py", "cli/test_chat.py"),
}
"""Files that share the server of `served_url`: all of them run on one worker."""

SLOW_FIXTURES = {"finished", "browser", "shared_cell", "installed"}
"""Fixtures that train a model, start a browser or an attack cell, or build a wheel."""

SLOW_FILES = {
    *("codeenv/test_cli.py", "codeenv/test_executor.py", "codeenv/test_executor_faults.py"),
    *("codeenv/test_serve.py", "codeenv/test_served_executor.py", "engine/test_embedded.py"),
    *("learner/test_checkpoint.py", "learner/test_ranks.py", "learner/test_tiny.py"),
    *("learner/test_fake_cuda.py", "learner/test_gradients.py", "learner/test_loading.py"),
    *("learner/test_lora.py", "engine/test_batcher.py", "agent/test_exported.py"),
    *("environments/test_identity.py", "reward/test_math_equal.py"),
    *("learner/test_gemma3.py", "learner/test_logprobs.py", "learner/test_sft.py"),
    *("learner/test_token_values.py", "learner/test_weights.py", "codeenv/test_mcp.py"),
    "entropy/test_run.py",
}
"""Files whose tests start servers, engines or learner ranks, train or compare whole models, or need
a package that takes long to import."""

ALL_SLOW = re.compile(r"^pytestmark = .*pytest\.mark\.slow\b", re.MULTILINE)
"""The line of a file whose tests are all slow."""

gc.disable()  # until all test files are imported, nothing of which is ever freed

# Settings of the person who runs the tests change no outcome: where a server is, colours, sizes.
for _name in (
    *("RSTAR2_CODEENV_URL", "RSTAR2_CODEENV_TOKEN", "RSTAR2_CODEENV_DEBUG", "RSTAR2_MCP_URL"),
    *("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "COLUMNS", "LINES"),
    *("HF_ENDPOINT", "HF_HUB_OFFLINE", "OPENAI_API_KEY", "OPENAI_BASE_URL"),
):
    os.environ.pop(_name, None)
_direct = ["127.0.0.1", "localhost", *filter(None, [os.environ.get("NO_PROXY")])]
os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(_direct)

# Hypothesis's own time limits measure the machine, not the code.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT / "tests").parts[0]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test-fast` does not even import files that have only slow tests."""
    if config.option.markexpr != "not slow" or not collection_path.name.startswith("test_"):
        return None
    file = str(collection_path.relative_to(ROOT / "tests"))
    listed = file in SLOW_FILES or file.startswith("attacks/")
    return listed or bool(ALL_SLOW.search(collection_path.read_text())) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests with slow fixtures as slow, and let the longest start first."""
    for item in items:
        assert isinstance(item, pytest.Function)
        file = str(item.path.relative_to(ROOT / "tests"))
        if file in SLOW_FILES or SLOW_FIXTURES & set(item.fixturenames):
            item.add_marker(pytest.mark.slow)
    rank = {name: number for number, name in enumerate(LONGEST_FIRST)}

    slow_files = {item.path for item in items if item.get_closest_marker("slow")}

    def order(item: pytest.Item) -> tuple[bool, bool, int]:
        """Files without slow tests come last and fill the workers until all of them end."""
        return (
            item.name != FIRST,
            item.path not in slow_files,
            rank.get(_folder(item), len(rank)),
        )

    items.sort(key=order)


def pytest_collection_finish() -> None:
    """Garbage collections leave out what was imported: more than a million objects."""
    gc.freeze()
    gc.enable()


class SharedFixtureScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Keeps tests that share a costly fixture on one worker: of a file, a server, an attack cell.

    xdist's own `--dist loadgroup` has no effect with pytest 9.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, name = nodeid.partition("::")
        folder = file.removeprefix("tests/").split("/")[0]
        if folder in SPREAD:
            return nodeid
        if file.removeprefix("tests/") in SERVED:
            return "served"
        if folder == "attacks":
            parameters = name.partition("[")[2]
            return max((v for v in VARIANTS if parameters.startswith(v)), key=len, default=file)
        return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharedFixtureScheduling | None:
    """Replace `--dist loadfile`."""
    return SharedFixtureScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A directory that `make` fills once for all workers; the others wait until it is complete."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # every worker has a base of its own below the session's
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path, complete = shared / name, shared / f"{name}.complete"
        if not complete.exists():
            path.mkdir()  # fails in other workers if `make` failed in the first one
            make(path)
            complete.touch()
    return path


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of the miniature recipe (tests/e2e). Tests must not change it."""
    from tests.e2e.driving import drive

    def run_miniature(root: Path) -> None:
        assert drive(root / "data", root / "run") == 0

    return once(tmp_path_factory, "miniature", run_miniature) / "run"


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with random weights, made once for all workers."""

    def make(path: Path) -> None:
        from rstar2.learner.tiny import make_tiny

        make_tiny(path, seed=0)

    return once(tmp_path_factory, "tiny", make)


@pytest.fixture(scope="session")
def served_url() -> Iterator[str]:
    """The URL of a code environment that was started by its command (see SERVED)."""
    with codeenv_command("serve", "--port", "0", "--slots", "2") as url:
        yield url


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data sets, which are not part of the repository. Tests skip without them."""
    path = Path(os.environ.get("RSTAR2_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no shared data at {path} (set RSTAR2_SHARED_DATA)")
    return path
