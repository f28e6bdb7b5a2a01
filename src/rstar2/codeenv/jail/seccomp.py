"""The system calls that jailed code may make: an allow list, compiled to a BPF filter in Python.

Other calls fail with ENOSYS ("not implemented"), which programs can handle; calls of another
architecture or the x32 ABI kill the process. Some calls are allowed for some arguments only:
`clone` creates no namespaces and no child whose end sends another signal than SIGCHLD, `socket`
only Unix sockets, `prctl` changes only names, `prlimit64` acts only on the caller, and `fcntl`
cannot make the kernel send signals (owners, leases, directory notification).

`base_filter` is installed once per worker. A `CallFilter` is added per call if there is no PID
namespace or no control group: no new processes; without a PID namespace, signals only to the
process itself and no changes of file metadata, which Landlock does not cover.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import signal
import struct

from rstar2.codeenv.jail import syscalls
from rstar2.codeenv.jail.syscalls import words

_LD, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO, _NOTIFY = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_NR, _ARCH, _ARGS = 0, 4, 16

CLONE_NAMESPACES = 0x7E020000 | 0x80
CLONE_THREAD = 0x00010000
CLONE_PARENT = 0x00008000
_EXIT_SIGNAL = 0xFF
"""The part of clone's flags that is the signal to the parent at the child's end."""
COPY_FLAGS = CLONE_PARENT | 17
"""How a session process copies itself: the copy is a child of its worker and ends with SIGCHLD."""
_AF_UNIX = 1
_PR_ALLOWED = (15, 16, 3, 23, 39)
"""PR_SET_NAME, PR_GET_NAME, PR_GET_DUMPABLE, PR_CAPBSET_READ, PR_GET_NO_NEW_PRIVS."""
_PR_SET_PDEATHSIG = 1
_RLIMIT_NPROC = 6
NOTIFICATION_RECEIVE, NOTIFICATION_SEND = 0xC0502100, 0xC0182101
_IOCTL_ALLOWED = (
    0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, NOTIFICATION_RECEIVE, NOTIFICATION_SEND,
)  # fmt: skip
"""TCGETS (isatty), TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; session workers also receive
and answer notifications, on a descriptor that programs do not have."""
SIGNALS = words("kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo")
_NEW_LISTENER = 8
_F_SETFL, _O_ASYNC = 4, 0x2000
_FCNTL_ALLOWED = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1027, 1030, 1032, 1034)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_GETLK, F_SETLK, F_SETLKW, the same three for open file
descriptions, F_DUPFD_QUERY, F_DUPFD_CLOEXEC, F_GETPIPE_SZ, F_GET_SEALS. Not F_SETOWN, F_SETOWN_EX,
F_SETSIG, F_SETLEASE and F_NOTIFY, which send signals to any process of the user, nor F_SETPIPE_SZ,
which uses up memory that all processes of the user share."""
_SOCK_TYPE, _CONNECTED_TYPES = 0xF, (1, 5)
"""SOCK_STREAM and SOCK_SEQPACKET. A datagram socket of a pair can send to any address."""

_ALWAYS = words(
    """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat creat close
close_range stat fstat lstat newfstatat statx lseek mmap munmap mprotect mremap madvise msync
mincore brk membarrier rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait
rt_sigsuspend sigaltstack pause alarm setitimer getitimer timer_create timer_settime
timer_gettime timer_getoverrun timer_delete timerfd_create timerfd_settime timerfd_gettime
signalfd signalfd4 access faccessat faccessat2 pipe pipe2 select pselect6 poll ppoll
epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2
sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max
sched_get_priority_min sched_rr_get_interval getpriority dup dup2 dup3 nanosleep clock_nanosleep
clock_gettime clock_getres gettimeofday time times getrusage sysinfo uname getpid gettid getppid
getuid geteuid getgid getegid getresuid getresgid getgroups getpgid getpgrp setpgid getsid
setsid execve execveat exit exit_group wait4 waitid flock fsync fdatasync
ftruncate fallocate getdents getdents64 getcwd chdir fchdir rename renameat renameat2 mkdir
mkdirat rmdir link linkat unlink unlinkat symlink symlinkat readlink readlinkat umask statfs
fstatfs getrlimit setrlimit arch_prctl capget set_tid_address set_robust_list get_robust_list
futex futex_waitv rseq getrandom getcpu restart_syscall fadvise64 sendfile copy_file_range
sendto recvfrom sendmsg recvmsg shutdown getsockname getpeername setsockopt getsockopt sendmmsg
recvmmsg pidfd_open kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal fork
vfork
"""
)
_UNIX_SOCKETS = words("bind listen accept accept4 connect")
_METADATA = words("chmod fchmod fchmodat fchmodat2 utime utimes utimensat futimesat truncate")
"""Landlock does not cover these (truncate: before ABI 3). Without a mount namespace they would
change files of the host, so that only the worker itself may use them (it restores its scratch)."""
_LANDLOCK = words("landlock_create_ruleset landlock_add_rule landlock_restrict_self")
"""A session process confines itself further; a program can only do the same."""


class BpfProgram:
    """A BPF program that can be installed as a filter of the calling thread."""

    def __init__(self, code: bytes) -> None:
        self.code = code
        self._buffer = ctypes.create_string_buffer(code, len(code))
        self._fprog = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(self._buffer))

    def install(self) -> None:
        """Install on this thread, which needs no_new_privs. SECCOMP_SET_MODE_FILTER is 1."""
        syscalls.call("seccomp", 1, 0, self._fprog)

    def install_with_listener(self) -> int:
        """Install; returns the descriptor on which the notifications of the filter arrive."""
        return syscalls.call("seccomp", 1, _NEW_LISTENER, self._fprog)


def _op(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
    return struct.pack("HBBI", code, jt, jf, k)


def _refuse(number: int) -> bytes:
    return _op(_RET, _ERRNO | number)


def _argument(index: int) -> bytes:
    """Load the low word of an argument."""
    return _op(_LD, _ARGS + 8 * index)


def _prologue(machine: str) -> bytes:
    """Check the architecture, refuse x32, load the call number into the accumulator."""
    code = _op(_LD, _ARCH) + _op(_JEQ, syscalls.AUDIT_ARCH[machine], 1, 0) + _op(_RET, _KILL)
    code += _op(_LD, _NR)
    if machine == "x86_64":
        code += _op(_JGE, 0x40000000, 0, 1) + _op(_RET, _KILL)
    return code


def _when(number: int, body: bytes) -> bytes:
    """If the accumulator holds `number`, run `body` (which must return)."""
    return _op(_JEQ, number, 0, len(body) // 8) + body


def _only_if_equal(index: int, allowed: tuple[int, ...], error: int) -> bytes:
    """Allow when the low word of an argument is one of `allowed`."""
    code = _argument(index)
    for value in allowed:
        code += _op(_JEQ, value, 0, 1) + _op(_RET, _ALLOW)
    return code + _refuse(error)


def _fcntl() -> bytes:
    """The body of the rule for fcntl: allowed commands, and F_SETFL without O_ASYNC."""
    status_flags = (
        _argument(2) + _op(_JSET, _O_ASYNC, 0, 1) + _refuse(errno.EPERM) + _op(_RET, _ALLOW)
    )
    code = _argument(1) + _when(_F_SETFL, status_flags)
    return code + _only_if_equal(1, _FCNTL_ALLOWED, errno.EPERM)


def _death_signal() -> bytes:
    """The body of a rule for prctl: PR_SET_PDEATHSIG only with SIGKILL, other options as before."""
    other = _op(_JEQ, _PR_SET_PDEATHSIG, 1, 0) + _op(_RET, _ALLOW)
    return _argument(0) + other + _only_if_equal(1, (signal.SIGKILL,), errno.EPERM)


def _clone() -> bytes:
    """The body of the rule for clone; the end of a child must not kill its parent."""
    code = _argument(0) + _op(_JSET, CLONE_NAMESPACES, 0, 1) + _refuse(errno.EPERM)
    code += _op(_AND, _EXIT_SIGNAL)
    for number in (0, signal.SIGCHLD):
        code += _op(_JEQ, number, 0, 1) + _op(_RET, _ALLOW)
    return code + _refuse(errno.EPERM)


def _read_limit() -> bytes:
    """The body of a rule for prlimit64: a limit can be read, but not changed."""
    low_word = _argument(2) + _op(_JEQ, 0, 0, 2)  # of the pointer to a new limit
    high_word = _op(_LD, _ARGS + 8 * 2 + 4) + _op(_JEQ, 0, 1, 0)
    return low_word + high_word + _refuse(errno.EPERM) + _op(_RET, _ALLOW)


def _limits_of_others() -> bytes:
    """The body of a rule for prlimit64: limits of other processes can be read."""
    return _argument(0) + _op(_JEQ, 0, 0, 1) + _op(_RET, _ALLOW) + _read_limit()


def _keep_process_limit() -> bytes:
    """The body of a rule for prlimit64: own limits only, and RLIMIT_NPROC is not changed."""
    own = _argument(0) + _op(_JEQ, 0, 1, 0) + _refuse(errno.EPERM)
    other = _argument(1) + _op(_JEQ, _RLIMIT_NPROC, 1, 0) + _op(_RET, _ALLOW)
    return own + other + _read_limit()


def _connected_pair() -> bytes:
    """The body of the rule for socketpair without a mount namespace: only connected types."""
    code = _argument(1) + _op(_AND, _SOCK_TYPE)
    for value in _CONNECTED_TYPES:
        body = _only_if_equal(0, (_AF_UNIX,), errno.EACCES)
        code += _when(value, body)
    return code + _refuse(errno.EACCES)


@functools.cache
def base_filter(strict: bool, session: bool = False, machine: str = syscalls.MACHINE) -> BpfProgram:
    """The allow list of a worker. In `strict`, namespaces hide other files and processes.

    The worker of a session may read limits of other processes; `session_filter` takes that away.
    """
    nr = syscalls.numbers(machine)
    code = _prologue(machine)
    plain = [*_ALWAYS, *_METADATA, *(_UNIX_SOCKETS if strict else _LANDLOCK)]
    code += _when(nr["clone"], _clone())
    options = _PR_ALLOWED if strict else (*_PR_ALLOWED, _PR_SET_PDEATHSIG)
    families = (_AF_UNIX,) if strict else ()
    code += _when(nr["socket"], _only_if_equal(0, families, errno.EACCES))
    pair = _only_if_equal(0, (_AF_UNIX,), errno.EACCES) if strict else _connected_pair()
    code += _when(nr["socketpair"], pair)
    code += _when(nr["fcntl"], _fcntl())
    code += _when(nr["prctl"], _only_if_equal(0, options, errno.EPERM))
    own_limits = _limits_of_others() if session else _only_if_equal(0, (0,), errno.EPERM)
    code += _when(nr["prlimit64"], own_limits)
    code += _when(nr["ioctl"], _only_if_equal(1, _IOCTL_ALLOWED, errno.ENOTTY))
    code += _when(nr["seccomp"], _only_if_equal(1, (0, _NEW_LISTENER), errno.EPERM))
    for name in plain:
        if name in nr:
            code += _when(nr[name], _op(_RET, _ALLOW))
    return BpfProgram(code + _refuse(errno.ENOSYS))


@functools.cache
def session_filter(level: str, forks: bool) -> BpfProgram:
    """The filter of a session's processes, installed once and inherited by every copy.

    The worker decides about each signal, and about each copy if programs may not fork: those system
    calls wait for its answer. A session process asks for SIGKILL at the end of its worker; programs
    cannot take that back, nor change by a filter of their own what system calls return, nor lower
    the number of processes so that no copy can be made, nor let a timer of the kernel kill them
    between two calls (`timer_create` accepts SIGKILL).
    """
    nr = syscalls.numbers()
    code = _prologue(syscalls.MACHINE)
    for name in SIGNALS:
        code += _when(nr[name], _op(_RET, _NOTIFY))
    for name in ("pidfd_send_signal", "pidfd_open", "seccomp", "timer_create"):
        code += _when(nr[name], _refuse(errno.EPERM))
    code += _when(nr["prlimit64"], _keep_process_limit())
    refused = _argument(0) + _op(_JEQ, _RLIMIT_NPROC, 0, 1) + _refuse(errno.EPERM)
    code += _when(nr["setrlimit"], refused + _op(_RET, _ALLOW))
    if level != "strict":
        code += _when(nr["prctl"], _death_signal())
        for name in _METADATA:
            if name in nr:
                code += _when(nr[name], _refuse(errno.EPERM))
    if not forks:
        cloning = _argument(0) + _op(_JSET, CLONE_THREAD, 0, 1) + _op(_RET, _ALLOW)
        cloning += _op(_JEQ, COPY_FLAGS, 0, 1) + _op(_RET, _NOTIFY)
        code += _when(nr["clone"], cloning + _refuse(errno.EAGAIN))
        for name in ("fork", "vfork"):
            if name in nr:
                code += _when(nr[name], _refuse(errno.EAGAIN))
    return BpfProgram(code + _op(_RET, _ALLOW))


class CallFilter:
    """The per-call filter: no new processes; without a PID namespace, see the module docstring."""

    def __init__(self, level: str) -> None:
        nr = syscalls.numbers()
        threads_only = _argument(0) + _op(_JSET, CLONE_THREAD, 0, 1) + _op(_RET, _ALLOW)
        code = _prologue(syscalls.MACHINE) + _when(
            nr["clone"], threads_only + _refuse(errno.EAGAIN)
        )
        for name in ("fork", "vfork"):
            if name in nr:
                code += _when(nr[name], _refuse(errno.EAGAIN))
        self._pid_offsets: list[int] = []
        if level != "strict":
            for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
                self._pid_offsets.append(len(code) + 16 + 4)
                code += _when(nr[name], _only_if_equal(0, (0,), errno.EPERM))
            for name in ("tkill", "pidfd_send_signal", "pidfd_open", *_METADATA):
                if name in nr:
                    code += _when(nr[name], _refuse(errno.EPERM))
            pinned = _argument(0) + _op(_JEQ, _PR_SET_PDEATHSIG, 0, 1) + _refuse(errno.EPERM)
            code += _when(nr["prctl"], pinned + _op(_RET, _ALLOW))
        self._code = bytearray(code + _op(_RET, _ALLOW))

    def install(self, pid: int) -> None:
        """Install the filter on the calling thread; `pid` is the calling process."""
        for offset in self._pid_offsets:
            struct.pack_into("I", self._code, offset, pid)
        BpfProgram(bytes(self._code)).install()
