"""The time that the targets may take, and whether the machine is quiet enough to judge it.

The head of tests/budgets.toml has the rules.
"""

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

FIRST_RUN = re.compile(r"^first run: ", re.MULTILINE)
# In a shorter stage, the hypervisor's share says little.
STAGE_MIN_TICKS = 1000


class Time(NamedTuple):
    wall_s: float
    cpu_s: float

    def percent_of(self, other):
        return Time(100 * self.wall_s / other.wall_s, 100 * self.cpu_s / other.cpu_s)


class Budgets:
    def __init__(self, file, host_speed):
        self.host_speed = host_speed
        table = tomllib.loads(file.read_text())
        self.limit_percent = table["limit_percent"]
        self.busy_percent = table["busy_percent"]
        self.stolen_percent = table["stolen_percent"]
        self.host = Time(**table["host"])
        self.targets = table["targets"]
        self.measured = []
        self.stolen = [0]
        self.ticks = ticks()

    def measure(self, processes):
        """Measure the speed of the host; no target runs. The first call is before the first stage."""
        now = ticks()
        used, stolen = (after - before for after, before in zip(now, self.ticks))
        if self.measured and used > STAGE_MIN_TICKS:
            self.stolen.append(100 * stolen / used)
        process = processes.start([self.host_speed], stdout=subprocess.PIPE)
        output = process.communicate()[0]
        processes.check()
        self.measured.append(Time(**json.loads(output)).percent_of(self.host))
        self.ticks = ticks()

    def is_busy(self):
        return max(map(max, self.measured)) > self.busy_percent or max(self.stolen) > self.stolen_percent

    def host_line(self):
        wall, cpu = (max(percents) for percents in zip(*self.measured))
        return (f"the host was {'busy' if self.is_busy() else 'quiet'}: fixed work took up to {wall:.0f} % of the time and "
                f"{cpu:.0f} % of the CPU time of the reference (busy: more than {self.busy_percent} %); the hypervisor "
                f"kept up to {max(self.stolen):.0f} % of the CPU time back (busy: more than {self.stolen_percent} %)")

    def of(self, suite):
        """The budget of a suite, or None."""
        budget = self.targets.get(suite.target)
        if budget and FIRST_RUN.search(suite.text()):
            budget = budget.get("first")
        return budget and Time(budget["wall_s"], budget["cpu_s"])

    def used_percent(self, suite):
        """How much of its budget a suite has used, or None if it has none."""
        budget = self.of(suite)
        return budget and Time(suite.took_s, suite.cpu_s).percent_of(budget)

    def overruns(self, suite):
        """One line for each limit that a suite has exceeded."""
        budget, percents = self.of(suite), self.used_percent(suite)
        used = Time(suite.took_s, suite.cpu_s)
        return [f"{suite.target}: {used_s:.0f} s of {kind}, {percent:.0f} % of its budget of {budget_s:.0f} s"
                for kind, used_s, percent, budget_s in zip(["time", "CPU time"], used, percents or [], budget or [])
                if percent > self.limit_percent]


def ticks():
    """The CPU time of all processors, and what of it the hypervisor has kept back."""
    line = Path("/proc/stat").read_text().splitlines()[0]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
    return user + nice + system + irq + softirq + steal, steal
