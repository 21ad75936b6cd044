"""Ctrl-C: the command says `stopped` and gives 130; a sampler leaves its denoiser as it was.

In the seconds before, while python imports torch, Ctrl-C gives python's own traceback: to catch it
there, code would have to stand above the imports of a module that is meant to be read.
"""
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import M, random_ids, tiny_llama

import dlm_spec
from dlm_spec import SAMPLERS, Denoiser

ROOT = Path(__file__).resolve().parents[1]


def test_ctrl_c_during_decoding():
    """After the first forward was shown."""
    child = subprocess.Popen([sys.executable, "dlm_spec.py", "--device=cpu"], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while not child.stdout.readline().startswith("   1 |"):
            assert child.poll() is None
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 130 and err.strip() == "stopped"


def press(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("where", ["_read_config", "_load_strictly", "_tokenizer",
                                   "_special_ids"])
def test_ctrl_c_during_loading(where, monkeypatch, capsys):
    monkeypatch.setattr(dlm_spec, where, press)
    with pytest.raises(SystemExit) as stop:
        dlm_spec.main(["--device=cpu", "--quiet"])
    assert stop.value.code == 130 and capsys.readouterr().err.strip() == "stopped"


def hooks(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("where", ["callback", "forward"])
def test_an_interrupted_sampler_leaves_its_denoiser_as_it_was(name, where, monkeypatch):
    """Ctrl-C in the callback, or in the middle of a forward: no hook stays on the model, and the
    next decode is the same as before."""
    d = Denoiser(tiny_llama(2), M, eos_ids=(5,))
    knobs = dict(gen_length=8, block_length=4)
    before, calls = SAMPLERS[name](d, random_ids(2, 3), **knobs), [0]

    def third(*_, **__):
        calls[0] += 1
        if calls[0] == 3:
            press()

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        if where == "forward":
            m.setattr(d.model.model.layers[1].mlp.act_fn, "forward", third)
            calls[0] = 2
        SAMPLERS[name](d, random_ids(2, 3), callback=third, **knobs)
    assert hooks(d.model) == 0
    after = SAMPLERS[name](d, random_ids(2, 3), **knobs)
    assert torch.equal(before.sequences, after.sequences)
    assert torch.equal(before.nfe, after.nfe) and before.revisions == after.revisions
