"""A person at a notebook, through the interfaces that JupyterLab uses: runs cells in a kernel, saves, checkpoints, goes back to a
checkpoint, renames, copies, deletes, and judges every answer. Arguments: address of the server, token.

One line of JSON for each round: rounds, calls, failed, the last failures. Ends after the round in which SIGTERM came.
"""

import json
import signal
import sys
import urllib.error
import urllib.parse
import urllib.request
import uuid

import websocket

address, token = sys.argv[1], sys.argv[2]
failures, ending = [], []
count = {"rounds": 0, "calls": 0, "failed": 0}
signal.signal(signal.SIGTERM, lambda *_: ending.append(True))
PATIENCE = 120

# What the notebook's cell does with the workspace, the kernel's directory.
CELL = """
import json, os
round = {round}
with open("log.txt", "a") as log:
    print(round, file=log)
with open("state.json.new", "w") as new:
    json.dump(list(range(round)), new)
    new.flush()
    os.fsync(new.fileno())
os.replace("state.json.new", "state.json")
with open("table.bin", "r+b" if os.path.exists("table.bin") else "w+b") as table:
    table.seek(round % 64 * 4096)
    table.write(bytes([round % 251]) * 4096)
    table.flush()
    table.seek(round % 64 * 4096)
    assert table.read(4096) == bytes([round % 251]) * 4096, "the page that was just written"
lines = open("log.txt").read().split()
assert lines == [str(n) for n in range(1, round + 1)], lines[-5:]
assert json.load(open("state.json")) == list(range(round))
print(sum(int(line) for line in lines))
"""


def ask(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{address}/api/{path}", data, method=method)
    request.add_header("Authorization", f"token {token}")
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code}: {error.read().decode()[:300]}") from error
    return json.loads(text) if text else None


class Kernel:
    def __init__(self):
        kernel = ask("POST", "kernels", {"name": "python3", "path": "work"})
        url = f"ws://{address}/api/kernels/{kernel['id']}/channels?token={token}"
        self.session, self.socket = uuid.uuid4().hex, websocket.create_connection(url, timeout=PATIENCE)

    def run(self, code):
        """What it printed. Raises what it raised."""
        id = uuid.uuid4().hex
        header = {"msg_id": id, "msg_type": "execute_request", "username": "", "session": self.session, "version": "5.3"}
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        self.socket.send(json.dumps(message))
        printed, reply, idle = "", None, False
        while reply is None or not idle:
            answer = json.loads(self.socket.recv())
            if answer["parent_header"].get("msg_id") != id:
                continue
            kind, content = answer["msg_type"], answer["content"]
            if kind == "stream":
                printed += content["text"]
            elif kind == "execute_reply":
                reply = content
            elif kind == "status":
                idle = content["execution_state"] == "idle"
        if reply["status"] != "ok":
            raise RuntimeError(f"{reply.get('ename')}: {reply.get('evalue')}")
        return printed


def judged(what, call):
    count["calls"] += 1
    try:
        wrong = call()
    except Exception as error:  # whatever it is, a person must not see it
        wrong = repr(error)
    if wrong:
        count["failed"] += 1
        failures.append(f"{what}: {wrong}")


def notebook(cells):
    made = [
        {
            "cell_type": "code",
            "id": f"cell{n}",
            "metadata": {},
            "source": f"# {n}\n" + CELL.format(round=n),
            "execution_count": n,
            "outputs": [{"output_type": "stream", "name": "stdout", "text": f"{n * (n + 1) // 2}\n"}],
        }
        for n in cells
    ]
    return {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def sources(path):
    content = ask("GET", f"contents/{path}?content=1")["content"]
    return [cell["source"] for cell in content["cells"]]


def save(path, cells):
    ask("PUT", f"contents/{path}", {"type": "notebook", "format": "json", "content": notebook(cells)})
    return None if sources(path) == [c["source"] for c in notebook(cells)["cells"]] else "what was saved reads otherwise"


def main():
    ask("PUT", "contents/work", {"type": "directory"})
    kernel = Kernel()
    path, n = "work/notebook.ipynb", 0

    def run():
        printed = kernel.run(CELL.format(round=n)).strip()
        return None if printed == str(n * (n + 1) // 2) else f"it printed {printed!r}"

    def checkpoint_and_back():
        made = ask("POST", f"contents/{path}/checkpoints")
        save(path, [n + 1000])
        ask("POST", f"contents/{path}/checkpoints/{made['id']}")
        return None if sources(path) == [c["source"] for c in notebook(cells)["cells"]] else "it is not as it was"

    def elsewhere():
        copy = ask("POST", "contents/work", {"copy_from": path})["path"]
        ask("PATCH", f"contents/{copy}", {"path": "work/kept.ipynb"})
        names = {entry["name"] for entry in ask("GET", "contents/work?content=1")["content"]}
        same = sources("work/kept.ipynb") == sources(path)
        ask("DELETE", "contents/work/kept.ipynb")
        after = {entry["name"] for entry in ask("GET", "contents/work?content=1")["content"]}
        wanted = {"notebook.ipynb", "log.txt", "state.json", "table.bin"}
        if not same or names - wanted != {"kept.ipynb"} or after != wanted:
            return f"names {names} and then {after}, same {same}"

    while not ending:
        n += 1
        cells = list(range(max(1, n - 20), n + 1))
        judged("run", run)
        judged("save", lambda: save(path, cells))
        judged("checkpoint", checkpoint_and_back)
        judged("copy, rename, list, delete", elsewhere)
        count["rounds"] = n
        print(json.dumps(dict(count, failures=failures[-5:])), flush=True)


main()
