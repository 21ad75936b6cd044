"""The embedded model end to end: a newcomer's first command, and that it solves its problems."""
import re
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


@pytest.mark.parametrize("family, least", [("math", .78), ("choice", .9), ("code", .8)])
def test_one_token_per_forward_solves_most_held_out_problems(denoiser, family, least):
    """40 problems here, floors three standard errors below what the model card has on 1,000."""
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
    assert run.stdout.count("tokens per forward") == 3
    assert len(re.findall("(?m)^-> ", run.stdout)) == 3
    for answer in ("#### ", "Answer: ", "def solve(nums):"):
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
    (["hello", "--gen-length", "9999"], "the model takes"),
    (["hello", "--sampler", "dkv", "--factor", "1"], "--sampler dkv has no factor"),
    (["hello", "--sampler", "llada", "--tau", "1"], "--sampler llada has no tau"),
    (["hello", "--sampler", "dual_diffusion", "--verify", "trust", "--tau", "1"], "has no tau"),
    (["hello", "--sampler", "dual_diffusion", "--verify", "trust", "--view", "cover",
      "--draft-steps", "2", "--adaptive"], "it has no adaptive, draft_steps, view"),
    (["hello", "--sampler", "cover", "--refresh", "2"], "without a cache every forward is full"),
    (["hello", "--seed", "1"], "--seed changes nothing at temperature 0"),
    (["hello", "--compare", "--sampler", "wino"], "drop --sampler and --quiet"),
    pytest.param(["hello", "--device", "cuda"], "torch sees no CUDA device",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"))])
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


@pytest.mark.parametrize("argv", [
    ["--sampler", "fast_dllm", "--cache", "prefix", "--threshold", ".8", "--block-length", "16"],
    ["--sampler", "dkv", "--steps", "32", "--refresh", "4"],
    ["--sampler", "wino", "--threshold", ".7", "--threshold-back", ".8"],
    ["--sampler", "saber", "--n", "4", "--block-length", "32"],
    ["--sampler", "cover", "--threshold", ".7", "--max-seeds", "4", "--tau-replace", ".8",
     "--tau-remask", ".3", "--cache", "prefix"],
    ["--sampler", "dual_diffusion", "--view", "cover", "--draft-steps", "2"],
    ["--sampler", "dual_diffusion", "--verify", "kl", "--tau", ".2", "--adaptive", "--early-stop"]])
def test_every_sampler_has_its_knobs_on_the_command_line(argv, capsys):
    dlm_spec.main(["Ann has 5 pens. She buys 4 more. How many pens are left?", "--device", "cpu",
                   "--quiet", *argv])
    assert "forwards" in capsys.readouterr().out


def test_a_seed_on_the_command_line_is_the_seed(capsys):
    """The default is 0; with --remasking random it matters at temperature 0, too."""
    def answer(*argv):
        dlm_spec.main(["Ann has 5 pens. She buys 4 more. How many pens are left?", "--device",
                       "cpu", "--gen-length", "12", "--quiet", *argv])
        return capsys.readouterr().out.partition("forwards")[0]
    hot = ["--temperature", "3"]
    assert answer(*hot) == answer(*hot, "--seed", "0") != answer(*hot, "--seed", "1")
    random = ["--remasking", "random", "--steps", "3"]
    assert len({answer(*random, "--seed", s) for s in "0123"}) > 1


def test_the_command_line_compares_all_samplers(capsys):
    dlm_spec.main(["Ann has 5 pens. She buys 4 more. How many pens are left?", "--device", "cpu",
                   "--compare", "--gen-length", "24", "--threshold", ".8"])
    out = capsys.readouterr().out
    assert all(f"   {name} " in out for name in dlm_spec.SAMPLERS) and out.count("####") >= 3


def test_a_comparison_goes_on_after_a_sampler_that_refuses(capsys):
    """The options are for all samplers: one that cannot take them says why in its row."""
    dlm_spec.main(["Ann has 5 pens. How many?", "--device", "cpu", "--compare", "--gen-length",
                   "8", "--steps", "4", "--threshold", ".8", "--cache", "dkv"])
    out = capsys.readouterr().out
    assert "threshold and steps were given" in out and "cache is 'dkv'" in out
    assert re.search(r"saber +\d", out)
    with pytest.raises(SystemExit) as stop:     # but what all refuse is no table
        dlm_spec.main(["Ann has 5 pens.", "--device", "cpu", "--compare", "--gen-length", "-3"])
    assert stop.value.code == 2 and "gen_length is -3" in capsys.readouterr().err


def test_a_reader_that_leaves_ends_the_command_quietly():
    run = subprocess.run(f"{sys.executable} dlm_spec.py --device cpu | head -1", cwd=ROOT,
                         shell=True, text=True, capture_output=True, timeout=300)
    assert "Traceback" not in run.stderr and "Exception" not in run.stderr


def test_the_readme_s_ten_lines_run():
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True,
                         timeout=300)
    assert run.returncode == 0, run.stderr
    assert "#### 7" in run.stdout and "Answer: " in run.stdout


def test_the_copy_promise_of_the_readme_holds(tmp_path):
    """The imports and sections 1, 2, 4, 5, 13 and a sampler's own run in an empty file."""
    text = (ROOT / "dlm_spec.py").read_text()
    head = text[text.index("import argparse"):text.index("EMBEDDED_MODEL")]
    parts = re.split(r"(?m)^# -{80,}\n(?=# \d+\. )", text)
    sections = {int(p[2:p.index(".")]): p for p in parts if re.match(r"# \d+\. ", p)}
    for n, call in ((6, "sample_llada(d, [[1, 2]], steps=3"), (7, "sample_fast_dllm(d, [[1, 2]]"),
                    (7, "sample_dkv(d, [[1, 2]]"), (8, "sample_dual_diffusion(d, [[1, 2]]"),
                    (9, "sample_wino(d, [[1, 2]]"), (9, "sample_saber(d, [[1, 2]]"),
                    (10, "sample_cover(d, [[1, 2]]")):
        body = "".join(sections[i] for i in (1, 2, 4, 5, n, 13))
        (tmp_path / "copied.py").write_text(head + body + f"""
config = LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, intermediate_size=16,
                     num_attention_heads=2, num_key_value_heads=2)
d = Denoiser(LlamaForCausalLM(config), 39, eos_ids=(5,))
print({call}, gen_length=6, block_length=3, early_stop=True).sequences.shape)
""")
        run = subprocess.run([sys.executable, "copied.py"], cwd=tmp_path, text=True,
                             capture_output=True, timeout=120)
        assert "torch.Size([1, 8])" in run.stdout, run.stderr


def test_unknown_words_are_named(denoiser):
    with pytest.warns(UserWarning, match="does not know"):
        denoiser.encode("Zebulon has 5 xylophones.")
