"""System call numbers by name for x86_64 and aarch64, and raw calls through ctypes.

Pure Python: nothing is compiled, so the jail works wherever the interpreter does. `call` keeps the
GIL (PyDLL), which makes it safe to fork through it in a single-threaded process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform

from rstar2.errors import IsolationError

_TABLE = """
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69
pwritev:296:70 preadv2:327:286 pwritev2:328:287 open:2:- openat:257:56 openat2:437:437
creat:85:- close:3:57 close_range:436:436 stat:4:- fstat:5:80 lstat:6:- newfstatat:262:79
statx:332:291 lseek:8:62 mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216 madvise:28:233
msync:26:227 mincore:27:232 brk:12:214 mlock:149:228 munlock:150:229 mlock2:325:284
membarrier:324:283 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139
rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132
rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240 kill:62:129 tkill:200:130 tgkill:234:131
pause:34:- alarm:37:- setitimer:38:103 getitimer:36:102 timer_create:222:107
timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111
timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87 signalfd:282:-
signalfd4:289:74 ioctl:16:29 access:21:- faccessat:269:48 faccessat2:439:439 pipe:22:-
pipe2:293:59 select:23:- pselect6:270:72 poll:7:- ppoll:271:73 epoll_create:213:-
epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441
eventfd:284:- eventfd2:290:19 sched_yield:24:124 sched_getaffinity:204:123
sched_setaffinity:203:122 sched_getparam:143:121 sched_getscheduler:145:120
sched_get_priority_max:146:125 sched_get_priority_min:147:126 sched_rr_get_interval:148:127
getpriority:140:141 dup:32:23 dup2:33:- dup3:292:24 nanosleep:35:101 clock_nanosleep:230:115
clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201:- times:100:153
getrusage:98:165 sysinfo:99:179 uname:63:160 getpid:39:172 gettid:186:178 getppid:110:173
getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148
getresgid:120:150 getgroups:115:158 getpgid:121:155 getpgrp:111:- setpgid:109:154 getsid:124:156
setsid:112:157 fork:57:- vfork:58:- clone:56:220 clone3:435:435 execve:59:221 execveat:322:281
exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95 fcntl:72:25 flock:73:32 fsync:74:82
fdatasync:75:83 sync_file_range:277:84 truncate:76:45 ftruncate:77:46 fallocate:285:47
getdents:78:- getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:-
renameat:264:38 renameat2:316:276 mkdir:83:- mkdirat:258:34 rmdir:84:- link:86:- linkat:265:37
unlink:87:- unlinkat:263:35 symlink:88:- symlinkat:266:36 readlink:89:- readlinkat:267:78
chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 umask:95:166 utime:132:- utimes:235:-
utimensat:280:88 futimesat:261:- statfs:137:43 fstatfs:138:44 getrlimit:97:163 setrlimit:160:164
prlimit64:302:261 prctl:157:167 arch_prctl:158:- capget:125:90 set_tid_address:218:96
set_robust_list:273:99 get_robust_list:274:100 futex:202:98 futex_waitv:449:449 rseq:334:293
getrandom:318:278 getcpu:309:168 restart_syscall:219:128 fadvise64:221:223 readahead:187:213
sendfile:40:71 splice:275:76 tee:276:77 copy_file_range:326:285 socket:41:198 socketpair:53:199
sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212 shutdown:48:210 bind:49:200
listen:50:201 accept:43:202 accept4:288:242 connect:42:203 getsockname:51:204 getpeername:52:205
setsockopt:54:208 getsockopt:55:209 sendmmsg:307:269 recvmmsg:299:243 pidfd_open:434:434
pidfd_send_signal:424:424 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11
inotify_init1:294:26 inotify_add_watch:254:27 inotify_rm_watch:255:28
landlock_create_ruleset:444:444 landlock_add_rule:445:445 landlock_restrict_self:446:446
seccomp:317:277 mount_setattr:442:442 pivot_root:155:41 unshare:272:97 mount:165:40
umount2:166:39 capset:126:91
"""

_COLUMN = {"x86_64": 1, "aarch64": 2}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINE = platform.machine()

libc = ctypes.PyDLL(None, use_errno=True)


def words(text: str) -> list[str]:
    """Split a table that is easier to read as text."""
    return text.split()


@functools.cache
def numbers(machine: str = MACHINE) -> dict[str, int]:
    """System call numbers by name on `machine`, without those that it lacks."""
    if machine not in _COLUMN:
        raise IsolationError(
            f"no system call table for machine {machine!r}; supported: {sorted(_COLUMN)}"
        )
    rows = (entry.split(":") for entry in _TABLE.split())
    column = _COLUMN[machine]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def call(name: str, *arguments: object) -> int:
    """Make a raw system call; raises OSError naming it on failure."""
    result: int = libc.syscall(ctypes.c_long(numbers()[name]), *arguments)
    return checked(result, name)


def checked(result: int, what: str) -> int:
    """Turn a -1 of libc into an OSError that names the call."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
