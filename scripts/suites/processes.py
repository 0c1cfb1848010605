"""The processes of a run of scripts/run-suites.

All processes are started here. `stop` ends them with all their descendants, also those that
have left their process group or have lost their parent. Nothing starts after `stop`.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
# How long the processes have to end by themselves. Then they are killed.
TERM_TIMEOUT_S = 6
KILL_TIMEOUT_S = 2

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None)


class Stopped(Exception):
    """The run ends, so nothing starts any more."""


class Processes:
    def __init__(self):
        self.starting = threading.Lock()
        self.is_stopping = False
        self.parent = os.getppid()
        # Processes that lose their parent become children of this process, so that it finds them.
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
        # This process ends with its parent, and its children end with it.
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def start(self, command, prepare=None, **options):
        """Start a command in a session of its own; `prepare` is called in the new process.

        The process ends when the calling thread ends, so the thread must wait for the process.
        """
        def begin():
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if prepare:
                prepare()

        with self.starting:
            self.check()
            return subprocess.Popen(command, start_new_session=True, preexec_fn=begin, **options)

    def check(self):
        if self.is_stopping:
            raise Stopped

    def stop(self):
        """End all processes: SIGTERM to the group of each child, then SIGKILL to what is left."""
        with self.starting:
            self.is_stopping = True
        for _, group in descendants(only_children=True):
            send(os.killpg, group, signal.SIGTERM)
        deadline = time.monotonic() + TERM_TIMEOUT_S
        while descendants() and time.monotonic() < deadline:
            time.sleep(0.05)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while (left := descendants()) and time.monotonic() < deadline:
            for pid, _ in left:
                send(os.kill, pid, signal.SIGKILL)
            time.sleep(0.02)
        if left:
            pids = " ".join(str(pid) for pid, _ in left)
            print(f"run-suites: these processes were not killed in time: {pids}", file=sys.stderr)

    def parent_ends(self):
        """Return whether the parent has ended, or is a make that a signal has told to end.

        make forwards SIGTERM, but not SIGINT and SIGHUP: it waits for its children. While it waits, the
        signal is blocked, and has its default action.
        """
        if os.getppid() != self.parent:
            return True
        try:
            lines = Path(f"/proc/{self.parent}/status").read_text().splitlines()
        except OSError:
            return True
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if fields["Name"] not in ["make", "gmake"]:
            return False
        blocked, ignored, caught = (int(fields[name], 16) for name in ["SigBlk", "SigIgn", "SigCgt"])
        ending = blocked & ~ignored & ~caught
        return any(ending & 1 << number - 1 for number in SIGNALS)


def descendants(only_children=False):
    """The process id and the process group of each descendant that has not ended."""
    of_parent = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text(errors="replace")
            except OSError:
                continue  # it has just ended
            state, parent, group = stat.rsplit(")", 1)[1].split()[:3]
            if state not in "ZX":
                of_parent.setdefault(int(parent), []).append((int(entry), int(group)))
    found = of_parent.get(os.getpid(), [])
    if not only_children:
        for pid, _ in found:  # the list grows
            found.extend(of_parent.get(pid, []))
    return found


def send(kill, pid, number):
    try:
        kill(pid, number)
    except OSError:
        pass  # it has just ended
