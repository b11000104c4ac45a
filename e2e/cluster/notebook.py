"""A notebook that keeps reading: it lists, stats, reads and maps a data set in a loop and judges every call.

One line of JSON each second: rounds, calls, failed, the last failures. Ends on SIGTERM with a last line.
"""

import hashlib
import json
import mmap
import os
import random
import signal
import sys
import time

root, tree = sys.argv[1], json.load(open(sys.argv[2]))
sizes = {f["path"]: f["size"] for f in tree["files"]}
paths = sorted(sizes)
random.seed(1)
digests, failures, ending = {}, [], []
count = {"rounds": 0, "calls": 0, "failed": 0}
signal.signal(signal.SIGTERM, lambda *_: ending.append(True))


def judged(what, path, call):
    count["calls"] += 1
    try:
        wrong = call(os.path.join(root, path))
    except Exception as error:  # whatever it is, a reader must not see it
        wrong = repr(error)
    if wrong:
        count["failed"] += 1
        failures.append(f"{what} {path}: {wrong}")


def same(path, data):
    """The first reading decides; the oracle in the next container knows the right bytes."""
    digest = hashlib.sha256(data).hexdigest()
    return None if digests.setdefault(path, digest) == digest else "other bytes than before"


def read(path):
    def call(full):
        with open(full, "rb") as file:
            data = file.read()
        return same(path, data) if len(data) == sizes[path] else f"{len(data)} bytes of {sizes[path]}"

    judged("read", path, call)


def mapped(path):
    def call(full):
        with open(full, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            return same(path, view[:])

    judged("mmap", path, call)


def listed():
    def call(full):
        found = {os.path.relpath(os.path.join(d, f), full) for d, _, files in os.walk(full) for f in files}
        return None if found == set(paths) else f"{len(found)} names of {len(paths)}"

    judged("list", "", call)


def report():
    print(json.dumps({**count, "failures": failures[-5:]}), flush=True)


said = time.monotonic()
while not ending:
    for path in random.sample(paths, 8):
        read(path)
        mapped(path)
        judged("stat", path, lambda full, p=path: None if os.stat(full).st_size == sizes[p] else "size")
    listed()
    count["rounds"] += 1
    if time.monotonic() - said >= 1:
        report()
        said = time.monotonic()
report()
