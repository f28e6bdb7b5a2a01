"""Attacks on the kernel's surface: calls that a program has no business making are refused."""

from __future__ import annotations

import pytest

from tests.attacks.attacker import LONG, Cell, Result

CALL = (
    "import ctypes, platform\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "number = {{'x86_64': {0}, 'aarch64': {1}}}[platform.machine()]\n"
    "result = libc.syscall(ctypes.c_long(number), {2})\n"
    "print('PWNED' if result >= 0 else 'refused', result, ctypes.get_errno())"
)

CALLS = {
    "mount": (165, 40, "b'none', b'/tmp', b'tmpfs', 0, None"),
    "umount2": (166, 39, "b'/', 2"),
    "pivot_root": (155, 41, "b'.', b'.'"),
    "chroot": (161, 51, "b'/tmp'"),
    "unshare_user": (272, 97, "0x10000000"),
    "unshare_mount": (272, 97, "0x20000"),
    "unshare_net": (272, 97, "0x40000000"),
    "setns": (308, 268, "0, 0"),
    "clone_user_namespace": (56, 220, "0x10000000 | 17, 0, 0, 0, 0"),
    "clone3": (435, 435, "ctypes.create_string_buffer(88), 88"),
    "setuid": (105, 146, "0"),
    "setgid": (106, 144, "0"),
    "setgroups": (116, 159, "0, None"),
    "setresuid": (117, 147, "0, 0, 0"),
    "keyctl": (250, 219, "0, -3, 1"),
    "add_key": (248, 217, "b'user', b'x', b'y', 1, -3"),
    "request_key": (249, 218, "b'user', b'x', None, -3"),
    "bpf": (321, 280, "5, ctypes.create_string_buffer(128), 128"),
    "io_uring_setup": (425, 425, "8, ctypes.create_string_buffer(256)"),
    "userfaultfd": (323, 282, "1"),
    "perf_event_open": (298, 241, "ctypes.create_string_buffer(128), 0, -1, -1, 0"),
    "kexec_load": (246, 104, "0, 0, None, 0"),
    "init_module": (175, 105, "b'', 0, b''"),
    "finit_module": (313, 273, "0, b'', 0"),
    "reboot": (169, 142, "0xfee1dead, 672274793, 0, None"),
    "swapon": (167, 224, "b'/tmp', 0"),
    "ptrace_traceme": (101, 117, "0, 0, 0, 0"),
    "process_vm_writev": (311, 271, "1, None, 0, None, 0, 0"),
    "kcmp": (312, 272, "1, 1, 0, 0, 0"),
    "pidfd_getfd": (438, 438, "0, 0, 0"),
    "open_by_handle_at": (304, 265, "-100, ctypes.create_string_buffer(64), 0"),
    "name_to_handle_at": (303, 264, "-100, b'/', ctypes.create_string_buffer(256), "
                          "ctypes.create_string_buffer(8), 0"),
    "fsopen": (430, 430, "b'tmpfs', 0"),
    "open_tree": (428, 428, "-100, b'/', 1"),
    "move_mount": (429, 429, "-100, b'/', -100, b'/tmp', 0"),
    "mount_setattr": (442, 442, "-100, b'/', 0, ctypes.create_string_buffer(32), 32"),
    "memfd_secret": (447, 447, "0"),
    "sethostname": (170, 161, "b'x', 1"),
    "settimeofday": (164, 170, "ctypes.create_string_buffer(16), None"),
    "clock_settime": (227, 112, "0, ctypes.create_string_buffer(16)"),
    "acct": (163, 89, "b'/tmp/x'"),
    "quotactl": (179, 60, "0, None, 0, None"),
    "fanotify_init": (300, 262, "0, 0"),
    "lookup_dcookie": (212, 18, "0, None, 0"),
    "personality": (135, 92, "0x0040000"),
    "setpriority": (141, 140, "0, 0, -20"),
    "sched_setscheduler": (144, 119, "0, 1, ctypes.create_string_buffer(b'\\x01' + bytes(3), 4)"),
    "ioprio_set": (251, 30, "1, 0, 8192"),
    "vmsplice": (278, 75, "1, None, 0, 0"),
    "mq_open": (240, 180, "b'x', 0o102, 0o600, None"),
    "shmget": (29, 194, "0, 4096, 0o1600"),
    "syslog": (103, 116, "3, ctypes.create_string_buffer(100), 100"),
    "capset": (126, 91, "ctypes.create_string_buffer(b'\\x22\\x05\\x08\\x20' + bytes(4), 8), "
               "ctypes.create_string_buffer(b'\\xff' * 24, 24)"),
    "prctl_dumpable": (157, 167, "4, 1, 0, 0, 0"),
    "prctl_no_seccomp": (157, 167, "22, 0, 0, 0, 0"),
    "io_uring_enter": (426, 426, "0, 0, 0, 0, None, 0"),
    "mq_notify": (244, 184, "0, None"),
    "semget": (64, 190, "0, 1, 0o1600"),
    "msgget": (68, 186, "0, 0o1600"),
    "memfd_create": (319, 279, "b'x', 0"),
    "inotify_init1": (294, 26, "0"),
    "fanotify_mark": (301, 263, "0, 1, 8, -100, b'/'"),
    "process_madvise": (440, 440, "0, None, 0, 4, 0"),
    "process_mrelease": (448, 448, "0, 0"),
    "sched_setaffinity": (203, 122, "0, 8, ctypes.create_string_buffer(b'\\x01' + bytes(7), 8)"),
    "sched_setattr": (314, 274, "0, ctypes.create_string_buffer(48), 0"),
    "sched_setparam": (142, 118, "0, ctypes.create_string_buffer(4)"),
    "setxattr": (188, 5, "b'.', b'user.x', b'y', 1, 0"),
    "removexattr": (197, 14, "b'.', b'user.x'"),
    "fchown": (93, 55, "1, 0, 0"),
    "fchownat": (260, 54, "-100, b'.', 0, 0, 0"),
    "mknodat": (259, 33, "-100, b'node', 0o20600, 0x103"),
    "swapoff": (168, 225, "b'/tmp'"),
    "delete_module": (176, 106, "b'x', 0"),
    "kexec_file_load": (320, 294, "0, 0, 0, None, 0"),
    "migrate_pages": (256, 238, "0, 0, None, None"),
    "move_pages": (279, 239, "0, 0, None, None, None, 0"),
    "mbind": (237, 235, "0, 0, 0, None, 0, 0"),
    "set_mempolicy": (238, 237, "0, None, 0"),
    "remap_file_pages": (216, 234, "0, 4096, 0, 0, 0"),
    "mlock": (149, 228, "0, 4096"),
    "mlock2": (325, 284, "0, 4096, 0"),
    "vhangup": (153, 58, ""),
    "syncfs": (306, 267, "0"),
    "sync": (162, 81, ""),
    "statmount": (457, 457, "None, None, 0, 0"),
    "listmount": (458, 458, "None, None, 0, 0"),
    "cachestat": (451, 451, "0, None, None, 0"),
    "quotactl_fd": (443, 443, "0, 0, 0, None"),
    "fspick": (433, 433, "-100, b'/', 0"),
    "fsmount": (432, 432, "0, 0, 0"),
    "setfsuid": (122, 151, "0"),
    "setregid": (114, 143, "0, 0"),
    "adjtimex": (159, 171, "ctypes.create_string_buffer(256)"),
    "setdomainname": (171, 162, "b'x', 1"),
    "tee": (276, 77, "0, 1, 1, 0"),
    "splice": (275, 76, "0, None, 1, None, 1, 0"),
    "prctl_pdeathsig": (157, 167, "1, 9, 0, 0, 0"),
    "prctl_subreaper": (157, 167, "36, 1, 0, 0, 0"),
    "prctl_ptracer": (157, 167, "0x59616d61, -1, 0, 0, 0"),
    "prctl_keepcaps": (157, 167, "8, 1, 0, 0, 0"),
    "prctl_mdwe": (157, 167, "65, 1, 0, 0, 0"),
    "seccomp_listener": (317, 277, "1, 8, ctypes.create_string_buffer(16)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def attempts(shared_cell: Cell) -> dict[str, Result]:
    """The result of each call, made by a program of its own; all run before the first test."""
    orders = [{"code": CALL.format(*call), "limits": LONG} for call in CALLS.values()]
    return dict(zip(CALLS, shared_cell.ask("runs", orders=orders), strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_system_call_is_refused(attempts: dict[str, Result], name: str) -> None:
    result = attempts[name]
    assert "PWNED" not in result["stdout"], result
    assert result["outcome"] in ("ok", "exception", "killed"), result


def test_refused_system_calls_did_no_harm(cell: Cell, attempts: dict[str, Result]) -> None:
    assert all(result["attempts"] == 1 for result in attempts.values())


def test_foreign_abi_kills_the_caller(cell: Cell) -> None:
    result = cell.gets_nothing(
        "import ctypes, platform, sys\n"
        "if platform.machine() != 'x86_64':\n    import os; os.kill(os.getpid(), 31)\n"
        "r = ctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 + 39))\n"
        "print('PWNED' if r > 0 else 'refused')"
    )
    assert result["outcome"] in ("killed", "ok")


def test_terminal_cannot_be_typed_into(cell: Cell) -> None:
    cell.gets_nothing(
        "import fcntl\nfor fd in range(3):\n"
        "    try:\n        fcntl.ioctl(fd, 0x5412, b'x')\n        print('PWNED')\n"
        "    except OSError:\n        pass"
    )


def test_setuid_programs_gain_nothing(cell: Cell) -> None:
    result = cell.run(
        "import subprocess\n"
        "print(subprocess.run(['su', '-c', 'id'], capture_output=True, text=True))"
    )
    assert "uid=0" not in result["stdout"]


def test_no_capability_is_left(cell: Cell) -> None:
    result = cell.run(
        "import ctypes, struct\nlibc = ctypes.CDLL(None)\n"
        "header = ctypes.create_string_buffer(struct.pack('Ii', 0x20080522, 0), 8)\n"
        "data = ctypes.create_string_buffer(24)\nlibc.capget(header, data)\n"
        "print(data.raw == bytes(24))"
    )
    assert result["stdout"] == "True\n"


def test_program_does_not_run_as_root_in_strict(cell: Cell) -> None:
    uid = int(cell.run("import os\nprint(os.getuid())")["stdout"])
    assert uid != 0 or cell.level == "portable"
