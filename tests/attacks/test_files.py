"""Attacks on files: secrets, other calls' files, writing outside, filling disk and inodes."""

from __future__ import annotations

import pytest

from tests.attacks.attacker import Cell


def test_secret_file_cannot_be_read(cell: Cell) -> None:
    cell.gets_nothing("print('PWNED', open('<secret_file>').read())")


def test_password_file_of_the_host_cannot_be_read(cell: Cell) -> None:
    cell.gets_nothing("print('PWNED', open('/etc/shadow').read())")


def test_secret_cannot_be_read_through_a_symlink(cell: Cell) -> None:
    cell.gets_nothing(
        "import os\nos.symlink('<secret_file>', 'link')\nprint('PWNED', open('link').read())"
    )


def test_secret_cannot_be_hard_linked_into_scratch(cell: Cell) -> None:
    cell.gets_nothing(
        "import os\nos.link('<secret_file>', 'link')\nprint('PWNED', open('link').read())"
    )


def test_secret_cannot_be_reached_by_climbing_out(cell: Cell) -> None:
    cell.gets_nothing(
        "import os\nfd = os.open('.', os.O_RDONLY)\n"
        "os.chdir('../' * 20)\n"
        "print('PWNED', open('.' + '<secret_file>').read())"
    )


def test_runtime_directory_of_the_service_cannot_be_listed(cell: Cell) -> None:
    cell.gets_nothing("import os\nfound = os.listdir('/srv/cell/service')\nprint('PWNED', found)")


def test_nothing_is_written_to_a_directory_open_to_everybody(cell: Cell) -> None:
    cell.gets_nothing("open('<open_directory>/planted', 'w').write('x')\nprint('PWNED')")


def test_secret_file_cannot_be_overwritten(cell: Cell) -> None:
    cell.gets_nothing("open('<secret_file>', 'w').write('x')\nprint('PWNED')")


def test_secret_file_cannot_be_truncated(cell: Cell) -> None:
    cell.gets_nothing("import os\nos.truncate('<secret_file>', 0)\nprint('PWNED')")


def test_secret_file_cannot_be_removed_or_renamed(cell: Cell) -> None:
    cell.gets_nothing(
        "import os\n"
        "for action in (lambda: os.unlink('<secret_file>'),\n"
        "               lambda: os.rename('<secret_file>', '<secret_file>.old')):\n"
        "    try:\n        action()\n        print('PWNED')\n    except OSError as e:\n"
        "        print(e.errno)"
    )


def test_permissions_of_foreign_files_cannot_be_changed(cell: Cell) -> None:
    cell.gets_nothing("import os\nos.chmod('<secret_file>', 0o777)\nprint('PWNED')")


def test_interpreter_cannot_be_poisoned_for_the_next_call(cell: Cell) -> None:
    cell.gets_nothing(
        "import os, site, sys\n"
        "for place in (*site.getsitepackages(), os.path.dirname(os.__file__), sys.prefix):\n"
        "    try:\n        open(place + '/sitecustomize.py', 'w').write('x = 1')\n"
        "        print('PWNED')\n    except OSError as e:\n        print(e.errno)"
    )


LISTING = "import os\nprint(sorted(os.listdir('.')))"


def test_files_of_one_call_are_gone_in_the_next(cell: Cell) -> None:
    before = cell.run(LISTING)["stdout"]
    planted = cell.run(
        "import os\nopen('random.py', 'w').write('x')\nos.makedirs('a/b/c')\n"
        "open('a/b/c/.hidden', 'w').write('x')\nos.symlink('/', 'root')\n"
        "open('/dev/shm/x', 'w').write('x') if os.path.isdir('/dev/shm') else None\nprint('made')"
    )
    assert "made" in planted["stdout"] or cell.level == "portable"
    assert "random.py" not in before
    for _ in range(3):
        assert cell.run(LISTING)["stdout"] == before


def test_unremovable_files_do_not_reach_the_next_call(cell: Cell) -> None:
    before = cell.run(LISTING)["stdout"]
    cell.run(
        "import os\nos.mkdir('locked')\nopen('locked/file', 'w').write('x')\n"
        "deep = ''\n"
        "for i in range(300):\n    deep += 'd/'\n    os.mkdir(deep)\n"
        "try:\n    os.chmod('locked', 0)\nexcept OSError:\n    pass"
    )
    for _ in range(4):
        assert cell.run(LISTING)["stdout"] == before


def test_scratch_cannot_be_filled_beyond_its_limit(cell: Cell) -> None:
    result = cell.run(
        "data = bytes(1 << 20)\n"
        "for i in range(400):\n    open(f'f{i}', 'wb').write(data)\n"
        "import time; time.sleep(30); print('PWNED')",
        scratch_mb=16,
    )
    assert result["outcome"] in ("exception", "killed")
    assert "PWNED" not in result["stdout"]


def test_one_file_cannot_grow_beyond_the_file_limit(cell: Cell) -> None:
    result = cell.gets_nothing(
        "with open('big', 'wb') as f:\n    for _ in range(64):\n        f.write(bytes(1 << 20))\n"
        "print('PWNED')",
        file_mb=4,
    )
    assert result["outcome"] in ("exception", "killed")


def test_inodes_cannot_be_used_up(cell: Cell) -> None:
    result = cell.gets_nothing(
        "for i in range(300_000):\n    open(f'f{i}', 'w').close()\nprint('PWNED')", scratch_mb=16
    )
    assert result["outcome"] in ("exception", "killed", "timeout")


def test_holes_do_not_hide_a_full_disk(cell: Cell) -> None:
    result = cell.gets_nothing(
        "import os\n"
        "for i in range(64):\n    fd = os.open(f'f{i}', os.O_CREAT | os.O_RDWR)\n"
        "    os.posix_fallocate(fd, 0, 3 << 20)\n"
        "import time; time.sleep(30); print('PWNED')",
        scratch_mb=16,
    )
    assert result["outcome"] in ("exception", "killed")


@pytest.mark.parametrize("path", ["/proc/self/environ", "/proc/1/environ", "/sys/kernel/notes"])
def test_kernel_file_systems_cannot_be_read(cell: Cell, path: str) -> None:
    cell.gets_nothing(f"print('PWNED', open({path!r}, 'rb').read())")


def test_devices_cannot_be_opened(cell: Cell) -> None:
    cell.gets_nothing(
        "import os\nfor name in ('mem', 'kmsg', 'kvm', 'vda', 'sda', 'fuse', 'tty', 'ptmx'):\n"
        "    try:\n        os.open('/dev/' + name, os.O_RDWR)\n        print('PWNED', name)\n"
        "    except OSError:\n        pass"
    )


def test_device_nodes_cannot_be_made(cell: Cell) -> None:
    cell.gets_nothing(
        "import os, stat\nos.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(8, 0))\nprint('PWNED')"
    )


def test_temporary_files_work(cell: Cell) -> None:
    """The defence leaves programs a place to write to, also without namespaces."""
    result = cell.run(
        "import os, pathlib, tempfile\n"
        "with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryDirectory() as directory:\n"
        "    file.write(b'x')\n    pathlib.Path(directory, 'y').write_text('y')\n"
        "pathlib.Path('~/z').expanduser().write_text('z')\n"
        "print(os.path.samefile(tempfile.gettempdir(), '.'))"
    )
    assert result["stdout"] == "True\n", result
