"""Attacks with and on processes: bombs, signals, daemons that outlive the call."""

from __future__ import annotations

from tests.attacks.attacker import Cell

SPAWN = (
    "import os, sys\n"
    "try:\n    pid = os.fork()\nexcept OSError as error:\n    print('no fork', error.errno)\n"
    "    sys.exit(0)\n"
)


def test_fork_bomb_ends_with_its_call(cell: Cell) -> None:
    result = cell.run(
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        wall_s=1.0,
    )
    assert result["outcome"] == "timeout"


def test_fork_bomb_in_a_shell_is_contained(cell: Cell) -> None:
    cell.run("import os\nos.system(':(){ :|:& };:')\nimport time; time.sleep(0.5)", wall_s=2.0)


def test_process_count_is_limited(cell: Cell) -> None:
    result = cell.run(
        "import os, time\nn = 0\n"
        "try:\n"
        "    while n < 200:\n"
        "        if os.fork() == 0:\n            time.sleep(30); os._exit(0)\n        n += 1\n"
        "except OSError:\n    pass\nprint(n)",
        processes=16,
    )
    assert int(result["stdout"]) <= 16
    assert (int(result["stdout"]) > 0) == cell.forks


def test_thread_bomb_is_contained(cell: Cell) -> None:
    result = cell.run(
        "import threading, time\nthreading.stack_size(32768)\nn = 0\n"
        "try:\n"
        "    while n < 5000:\n"
        "        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()\n"
        "        n += 1\n"
        "except RuntimeError:\n    pass\nprint(n)",
        processes=16,
        wall_s=8.0,
    )
    assert result["outcome"] in ("ok", "timeout")
    if result["stdout"]:
        assert int(result["stdout"]) <= (16 if cell.level == "strict" else 1100)


def test_kill_minus_one_harms_nobody(cell: Cell) -> None:
    cell.run("import os, signal\nos.kill(-1, signal.SIGKILL)\nprint('sent')")


def test_victim_process_cannot_be_signalled(cell: Cell) -> None:
    cell.gets_nothing("import os\nos.kill(<victim>, 15)\nprint('sent')")


def test_service_cannot_be_signalled(cell: Cell) -> None:
    cell.gets_nothing("import os\nos.kill(<server>, 9)\nprint('sent')")


def test_service_cannot_be_signalled_through_a_pidfd(cell: Cell) -> None:
    cell.gets_nothing(
        "import os, signal\nfd = os.pidfd_open(<victim>)\nsignal.pidfd_send_signal(fd, 9)\n"
        "print('PWNED')"
    )


def test_process_group_cannot_be_signalled(cell: Cell) -> None:
    cell.run("import os\nos.killpg(os.getpgid(0), 9)")
    cell.run("import os\nos.kill(0, 9)")


def test_daemon_does_not_outlive_its_call(cell: Cell) -> None:
    result = cell.run(
        SPAWN + "if pid == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        import time\n        time.sleep(100)\n    os._exit(0)\nprint('started')"
    )
    assert result["outcome"] == "ok"


def test_daemon_that_ignores_signals_does_not_outlive_its_call(cell: Cell) -> None:
    cell.run(
        SPAWN + "if pid == 0:\n    import signal, time\n"
        "    for s in range(1, 32):\n        try:\n            signal.signal(s, signal.SIG_IGN)\n"
        "        except OSError:\n            pass\n"
        "    os.setsid()\n    while True:\n        time.sleep(1)\nprint('started')"
    )


def test_grandchild_that_holds_the_pipe_does_not_delay_the_answer(cell: Cell) -> None:
    result = cell.run(
        SPAWN + "if pid == 0:\n    import time\n    time.sleep(1000)\nprint('done')\n"
    )
    assert result["outcome"] == "ok"  # and not a timeout


def test_program_that_only_its_child_keeps_alive_ends(cell: Cell) -> None:
    result = cell.run(SPAWN + "if pid == 0:\n    import time\n    time.sleep(1000)\nos._exit(0)")
    assert result["outcome"] in ("ok", "no_output")


def test_double_fork_cannot_escape_by_reparenting(cell: Cell) -> None:
    cell.run(
        SPAWN + "if pid == 0:\n    for _ in range(3):\n        if os.fork():\n"
        "            os._exit(0)\n    import time\n    time.sleep(100)\n"
    )


def test_vfork_and_exec_are_contained(cell: Cell) -> None:
    cell.run("import subprocess\nsubprocess.Popen(['sleep', '100'])\nprint('started')")


def test_parent_death_signal_cannot_be_used_against_the_worker(cell: Cell) -> None:
    cell.run("import ctypes\nprint(ctypes.CDLL(None).prctl(1, 9, 0, 0, 0))")


def test_stopping_oneself_ends_at_the_deadline(cell: Cell) -> None:
    result = cell.run("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", wall_s=0.5)
    assert result["outcome"] == "timeout"


def test_own_threads_end_with_the_call(cell: Cell) -> None:
    result = cell.run(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint('x')"
    )
    assert (result["outcome"], result["stdout"]) == ("ok", "x\n")
