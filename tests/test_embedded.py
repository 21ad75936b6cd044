"""The embedded model end to end: a newcomer's first command, and that it solves its problems."""
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import tasks
import torch
from evaluate import evaluate

import dlm_spec

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def denoiser():
    return dlm_spec.load_denoiser(device="cpu")


def test_the_checkpoint_is_a_small_stock_llama():
    """At most 8 MB of bf16 safetensors, opened without a network."""
    folder = dlm_spec.EMBEDDED_MODEL
    assert (folder / "model.safetensors").stat().st_size <= 8_000_000
    d = dlm_spec.load_denoiser(device="cpu", dtype=torch.bfloat16)
    assert type(d.model).__name__ == "LlamaForCausalLM" and d.model.dtype == torch.bfloat16
    assert d.mask_id == d.tokenizer.mask_token_id and d.eos_ids == (d.tokenizer.eos_token_id,)


@pytest.mark.parametrize("family, least", [("math", .8), ("choice", .8), ("code", .8)])
def test_one_token_per_forward_solves_most_held_out_problems(denoiser, family, least):
    """40 problems here; 1,000 per family in the model card, where the bar is 90 %."""
    problems = tasks.problems(family, "test", 40)
    r = evaluate(denoiser, dlm_spec.sample_llada, problems, gen_length=64)
    assert r["accuracy"] >= least, r["texts"][:3]
    assert r["nfe"] == 64


def test_parallel_decoding_hurts_the_chains_of_arithmetic(denoiser):
    problems = tasks.problems("math", "test", 60)
    slow, fast = (evaluate(denoiser, dlm_spec.sample_llada, problems, gen_length=64, steps=s)
                  for s in (64, 4))
    assert fast["accuracy"] < slow["accuracy"] - .1


def test_batched_and_single_decoding_agree(denoiser):
    """CASES 2 on a trained model: prompts of different lengths."""
    prompts = [p.prompt for f in tasks.FAMILIES for p in tasks.problems(f, "test", 2)]
    ids, mask = denoiser.encode(prompts)
    both = dlm_spec.sample_llada(denoiser, ids, attention_mask=mask, gen_length=32, steps=16)
    for i, prompt in enumerate(prompts):
        one = dlm_spec.sample_llada(denoiser, denoiser.encode(prompt)[0], gen_length=32, steps=16)
        assert torch.equal(both.generated[i], one.generated[0])


def test_the_command_line_solves_its_built_in_problems():
    """One problem of each family: canvas, answer, NFE, seconds, tokens per forward."""
    run = subprocess.run([sys.executable, "dlm_spec.py", "--device", "cpu"], cwd=ROOT, text=True,
                         capture_output=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("tokens per forward") == 3 and run.stdout.count("-> ") == 3
    for answer in ("#### 28", "Answer: C", "def solve(nums):"):
        assert answer in run.stdout
    assert "░" in run.stdout and "\033" not in run.stdout       # not a terminal: plain lines


def test_the_command_line_takes_a_problem_and_knobs(capsys):
    problem = "Ann has 5 pens. She buys 4 more. She loses 2. How many pens are left?"
    dlm_spec.main([problem, "--steps", "16", "--gen-length", "32", "--quiet", "--device", "cpu"])
    out = capsys.readouterr().out
    assert problem in out and "16 forwards" in out and "░" not in out


@pytest.mark.parametrize("argv, message", [
    (["hello", "--steps", "0"], "steps is 0"), (["", "--device", "cpu"], "is ''"),
    (["hello", "--model", "/no/such/folder"], "no model folder '/no/such/folder'"),
    (["hello", "--gen-length", "9999"], "the model takes")])
def test_the_command_line_says_what_is_wrong(argv, message, capsys):
    with pytest.raises(SystemExit) as stop, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dlm_spec.main(argv)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_the_live_canvas_redraws_in_place_on_a_terminal(denoiser):
    """On a terminal the old canvas is erased before the new one is drawn."""
    class Terminal:
        text = ""

        def write(self, s):
            self.text += s

        def flush(self):
            pass

        def isatty(self):
            return True
    screen = Terminal()
    ids, _ = denoiser.encode("Ann has 5 pens. She buys 4 more. How many pens are left?")
    dlm_spec.sample_llada(denoiser, ids, gen_length=16, steps=4,
                          callback=dlm_spec.LiveCanvas(denoiser, screen))
    assert screen.text.count("[forward") == 4 and screen.text.count("\033[J") == 4
    assert "\033[2A" in screen.text


def test_unknown_words_are_named(denoiser):
    with pytest.warns(UserWarning, match="does not know"):
        denoiser.encode("Zebulon has 5 xylophones.")
