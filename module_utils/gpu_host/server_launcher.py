"""Becomes a recorded server: a small program of its own, run by systemd-run or detached by server_start.

What it needs (command line, environment, user) comes in a private file, never on a command line that everybody can
read, and needs no quoting. ``SOURCE`` uses the standard library alone and runs on the interpreter that runs us.
"""

from __future__ import annotations

SOURCE = r"""
import json, os, signal, sys, traceback

with open(sys.argv[1]) as file:
    plan = json.load(file)
os.umask(0o077)
os.unlink(sys.argv[1])
errors = os.open(plan['errors'], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

def open_log(path):
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY, 0o644)

def become():
    log = open_log(plan['log']) if plan['log_is_ours'] else None
    if plan['uid'] != os.geteuid():
        import pwd
        entry = pwd.getpwuid(plan['uid'])
        os.initgroups(entry.pw_name, entry.pw_gid)
        os.setgid(entry.pw_gid)
        os.setuid(plan['uid'])
    os.chdir(plan['cwd'])
    os.umask(0o022)
    if log is None:
        log = open_log(plan['log'])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, errors)
    os.closerange(errors + 1, 256)
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.execve(plan['program'], plan['argv'], plan['environment'])

if plan['detach']:
    # A child of pid 1 that leads a session of its own: its workers are told by that session should it die.
    pid = os.fork()
    if pid:
        with open(plan['pid_file'], 'w') as file:
            file.write('%d\n' % pid)
        print(pid, flush=True)
        os._exit(0)
    os.setsid()
try:
    become()
except BaseException as error:
    os.write(errors, ('%s' % error).encode())
    os._exit(70)
"""
