"""A program that works in its workspaces: it saves, checkpoints, appends, overwrites and lists, and judges every call.

One line of JSON each second: rounds, calls, failed, the last failures. Ends on SIGTERM with a last line. A life that follows another one
goes on with what that one has written, and judges it.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time

failures, ending = [], []
count = {"rounds": 0, "calls": 0, "failed": 0}
signal.signal(signal.SIGTERM, lambda *_: ending.append(True))


def judged(what, call):
    count["calls"] += 1
    try:
        wrong = call()
    except Exception as error:  # whatever it is, a program must not see it
        wrong = repr(error)
    if wrong:
        count["failed"] += 1
        failures.append(f"{what}: {wrong}")


def read(path):
    with open(path, "rb") as file:
        return file.read()


def sealed(data):
    return hashlib.sha256(data).hexdigest().encode() + data


def is_sealed(whole):
    return sealed(whole[64:]) == whole


class Workspace:
    """One directory of a volume that nobody else writes to."""

    def __init__(self, root):
        self.dir = os.path.join(root, "work")
        self.lines, self.table = 0, None
        judged(f"take over {self.dir}", self.take_over)

    def at(self, name):
        return os.path.join(self.dir, name)

    def take_over(self):
        os.makedirs(self.dir, exist_ok=True)
        names = set(os.listdir(self.dir))
        if "log" in names:
            lines = read(self.at("log")).split(b"\n")
            if lines != [b"%d" % n for n in range(len(lines) - 1)] + [b""]:
                return f"the log of the life before: {lines[-5:]}"
            self.lines = len(lines) - 1
        for name in names & {"saved", "checkpoint", "checkpoint.before"}:
            if not is_sealed(read(self.at(name))):
                return f"{name} of the life before"
        if "table" in names:
            self.table = bytearray(read(self.at("table")))

    def replace(self, name, data, step):
        """As editors and torch.save do it: never the old one and the new one in one file, and never neither."""
        with open(self.at(name + ".tmp"), "wb") as file:
            for begin in range(0, len(data), step):
                file.write(data[begin : begin + step])
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.at(name + ".tmp"), self.at(name))
        return None if read(self.at(name)) == data else f"{name} has other bytes"

    def save(self):
        return self.replace("saved", sealed(os.urandom(random.randrange(20_000))), 4096)

    def checkpoint(self):
        if os.path.exists(self.at("checkpoint")):
            os.replace(self.at("checkpoint"), self.at("checkpoint.before"))
        return self.replace("checkpoint", sealed(os.urandom(random.randrange(200_000, 2_000_000))), 65536)

    def append(self):
        with open(self.at("log"), "ab") as file:
            file.write(b"%d\n" % self.lines)
        self.lines += 1
        size, wanted = os.stat(self.at("log")).st_size, sum(len(str(n)) + 1 for n in range(self.lines))
        return None if size == wanted else f"{size} bytes of {wanted}"

    def overwrite(self):
        if self.table is None:
            self.table = bytearray(os.urandom(300_000))
            with open(self.at("table"), "wb") as file:
                file.write(self.table)
        begin, data = random.randrange(290_000), os.urandom(random.randrange(1, 9_000))
        with open(self.at("table"), "r+b") as file:
            file.seek(begin)
            file.write(data)
        self.table[begin : begin + len(data)] = data
        return None if read(self.at("table")) == self.table else "other bytes than were written"

    def list(self):
        os.mkdir(self.at("scratch"))
        found = set(os.listdir(self.dir))
        os.rmdir(self.at("scratch"))
        known = {"saved", "checkpoint", "checkpoint.before", "log", "table", "scratch"}
        return None if "scratch" in found and found <= known else f"listed {sorted(found)}"


def report():
    print(json.dumps({**count, "failures": failures[-5:]}), flush=True)


workspaces = [Workspace(root) for root in sys.argv[1:]]
said = time.monotonic()
while not ending:
    for workspace in workspaces:
        for act in (workspace.save, workspace.checkpoint, workspace.append, workspace.overwrite, workspace.list):
            judged(f"{act.__name__} {workspace.dir}", act)
    count["rounds"] += 1
    if time.monotonic() - said >= 1:
        report()
        said = time.monotonic()
report()
