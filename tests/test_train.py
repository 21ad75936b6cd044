"""The training run: what it writes is whole or not there, and it goes on where it stopped."""
import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import train
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import dlm_spec

TINY = ["--hidden", "48", "--layers", "2"]
SHORT = (train.Stage(64, mix=(1, 0, 0), whole=0, exams=0, canvas=40, long=.4, letters=0, options=0,
                     hide=(0, 0)),)
FULL = r"(?i)file too large|os error 27|unexpected pos"     # in python, rust and torch


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(dlm_spec.EMBEDDED_MODEL)


@pytest.fixture
def start(tokenizer, monkeypatch):
    """A function that runs train.main in a folder; returns its exit code."""
    monkeypatch.setattr(train, "build_tokenizer", lambda: tokenizer)
    monkeypatch.setattr(train, "CURRICULUM", SHORT)
    monkeypatch.setattr(train, "TOKENS", 160)

    def run(folder, *argv):
        monkeypatch.setattr(sys, "argv", ["train.py", *TINY, "--run", str(folder / "run"), "--out",
                                          str(folder / "out"), *argv])
        try:
            train.main()
        except SystemExit as e:
            return e.code
        return 0
    return run


def curve(folder):
    lines = (folder / "run" / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def interrupt_at(step, monkeypatch, then=lambda: None):
    """A Ctrl-C in the middle of this step."""
    count, loss = [0], train.mdlm_loss

    def counted(*a, **kw):
        count[0] += 1
        if count[0] == step:
            os.kill(os.getpid(), signal.SIGINT)
            then()
        return loss(*a, **kw)
    monkeypatch.setattr(train, "mdlm_loss", counted)


def test_an_interrupted_run_goes_on_to_the_same_curve_and_the_same_weights(start, tmp_path,
                                                                           monkeypatch):
    """SIGINT in the middle of steps 23 and 60 of 64: exit code 130, all saved; the three parts
    log what one uninterrupted run logs and end at the same weights, to the bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert start(whole, "--steps", "64") == 0
    for done, steps in ((0, 23), (23, 37)):
        with monkeypatch.context() as m:
            interrupt_at(steps, m)
            assert start(parts, "--steps", "64") == 130
        assert torch.load(parts / "run" / "last.pt", weights_only=True)["step"] == done + steps
        assert dlm_spec.load_denoiser(parts / "out", device="cpu").tokenizer is not None
    assert start(parts, "--steps", "64") == 0
    assert [line["step"] for line in curve(whole)] == [50]
    assert curve(parts) == curve(whole)
    a, b = (load_file(f / "out" / "model.safetensors") for f in (whole, parts))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interruption_ends_at_once(start, tmp_path, monkeypatch):
    interrupt_at(2, monkeypatch, then=lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, "--steps", "9")
    assert not (tmp_path / "run" / "last.pt").exists()


def test_lines_behind_the_saved_state_are_dropped_from_the_log(tmp_path):
    """A run that was killed has logged more than it saved, perhaps half a line."""
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 50}\n{"step": 100}\n{"step": 150}\n{"st')
    train.forget_after(log, 100)
    assert log.read_text() == '{"step": 50}\n{"step": 100}\n'
    train.forget_after(tmp_path / "none.jsonl", 100)
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


@contextlib.contextmanager
def largest_file(size):
    """Writes beyond `size` bytes fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def content(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def saved(tmp_path, tokenizer):
    """A model folder and new weights for it."""
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1,
                         num_attention_heads=1, num_key_value_heads=1, intermediate_size=16,
                         tie_word_embeddings=True, mask_token_id=tokenizer.mask_token_id,
                         eos_token_id=tokenizer.eos_token_id)
    model, folder = LlamaForCausalLM(config), tmp_path / "out"
    train.save_model(model, model.state_dict(), tokenizer, folder)
    return model, {k: v + 1 for k, v in model.state_dict().items()}, folder


@pytest.mark.parametrize("size", [0, 300, 5000, 20_000], ids="{} bytes".format)
def test_a_full_disk_leaves_the_old_model_folder_as_it_was(saved, tokenizer, size):
    """The limit hits config.json, tokenizer.json, and the weights: no file is replaced, none
    is left half written, and the folder still opens."""
    model, weights, folder = saved
    before = content(folder)
    with largest_file(size), pytest.raises(Exception, match=FULL):
        train.save_model(model, weights, tokenizer, folder)
    assert content(folder) == before and dlm_spec.load_denoiser(folder, device="cpu")
    train.save_model(model, weights, tokenizer, folder)
    assert content(folder) != before and content(folder).keys() == before.keys()


@pytest.mark.parametrize("name", ["config", "tokenizer", "save_file"])
def test_a_disk_that_fills_while_writing_leaves_the_old_files(saved, tokenizer, name, monkeypatch):
    """ENOSPC after half a file, from each of the three writers."""
    model, weights, folder = saved
    before = content(folder)

    def full(*a, **_):
        path = Path(next(p for p in a if isinstance(p, (str, Path))))
        (path / "config.json" if path.is_dir() else path).write_text('{"half": ')
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    owner, attribute = {"config": (model.config, "save_pretrained"), "tokenizer":
                        (tokenizer, "save_pretrained"), "save_file": (train, "save_file")}[name]
    with monkeypatch.context() as m, pytest.raises(OSError, match="No space left"):
        m.setattr(owner, attribute, full)
        train.save_model(model, weights, tokenizer, folder)
    assert content(folder) == before


def test_a_full_disk_leaves_the_old_state_of_the_run(start, tmp_path):
    """last.pt: a run that cannot save ends with an error, and goes on later from the old
    one."""
    assert start(tmp_path, "--steps", "3") == 0
    before = content(tmp_path)
    with largest_file(10_000), pytest.raises(Exception, match=FULL):
        start(tmp_path, "--steps", "5")
    after = content(tmp_path)
    assert after.keys() == before.keys() and all(after[k] == before[k] for k in before
                                                 if k.name != "log.jsonl")
    assert start(tmp_path, "--steps", "5") == 0
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["step"] == 5


def test_ctrl_c_from_outside_saves_and_says_so(tmp_path):
    """The command in a process of its own: exit code 130, a word, no traceback."""
    code = f"""
import train
train.CURRICULUM = (train.Stage(2000, mix=(1, 0, 0), whole=0, exams=0, canvas=40,
                                long=.4, letters=0, options=0, hide=(0, 0)),)
train.TOKENS = 160
train.build_tokenizer = lambda: train.PreTrainedTokenizerFast.from_pretrained(
    {str(dlm_spec.EMBEDDED_MODEL)!r})
train.main()"""
    log = tmp_path / "run" / "log.jsonl"
    child = subprocess.Popen(
        [sys.executable, "-c", code, *TINY, "--run", log.parent, "--out", tmp_path / "out"],
        cwd=Path(train.__file__).parent, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True)
    try:
        while child.poll() is None and not (log.exists() and log.stat().st_size):
            time.sleep(.05)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 130 and "interrupted and saved" in err and "Traceback" not in err
    assert torch.load(log.parent / "last.pt", weights_only=True)["step"] >= 50
    assert dlm_spec.load_denoiser(tmp_path / "out", device="cpu").tokenizer is not None


def test_a_width_that_makes_no_heads_is_refused(start, tmp_path, capsys):
    assert start(tmp_path, "--hidden", "100") == 2
    assert "--hidden is 100, expected a multiple of 16" in capsys.readouterr().err


def test_one_layer_makes_no_induction_head(start, tmp_path, capsys):
    assert start(tmp_path, "--layers", "1") == 2
    assert "--layers is 1, expected 2 or more" in capsys.readouterr().err


def test_untrained_induction_heads_find_the_letter_of_an_option(tokenizer):
    """Everything but the letter of questions is visible: four models that have learned nothing
    name two fifths of them together, where chance is a quarter."""
    letters = torch.tensor(tokenizer.convert_tokens_to_ids(list("ABCD")))
    batches = [b for b in (train.batch(tokenizer, step) for step in range(40)) if b[0] == "letter"]
    right = asked = 0
    for seed in range(4):
        torch.manual_seed(seed)
        model = train.build_model(tokenizer, 192, 2)
        denoiser = dlm_spec.Denoiser(model, mask_id=tokenizer.mask_token_id)
        for _, x, letter, real in batches:
            logits = denoiser(x.masked_fill(letter, tokenizer.mask_token_id), letter, real)
            guess = letters[logits[:, letters].argmax(-1)]
            right, asked = right + int((guess == x[letter]).sum()), asked + int(letter.sum())
    assert asked > 200 and right > .4 * asked, (right, asked)


def test_a_short_run_of_the_command_learns(tmp_path, monkeypatch):
    """Its own curriculum and tokenizer, a smaller model: after 200 steps the loss of every
    family has fallen by a third at least, and the folder opens."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--hidden", "96", "--layers", "3", "--steps",
                                      "200", "--run", str(tmp_path / "run"), "--out",
                                      str(tmp_path / "out")])
    train.main()
    first, *_, last = (line["loss"] for line in curve(tmp_path))
    assert first.keys() == last.keys() == {"math", "choice", "code", "letter", "option",
                                          "whole"}
    assert all(last[k] < first[k] * 2 / 3 for k in ("math", "choice", "code")), (first, last)
    assert dlm_spec.load_denoiser(tmp_path / "out", device="cpu").tokenizer is not None
    assert {"loss.png", "log.jsonl"} <= {path.name for path in (tmp_path / "out").iterdir()}
