"""Section 12: a newcomer's first command, knobs by name, presets, the table of all
samplers."""
import functools
import io
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import command_line
import experiments
import pytest
import torch
from command_line import LiveCanvas, named_knobs

import dlm_spec
from dlm_spec import SAMPLERS

ROOT = Path(__file__).resolve().parents[1]
PROBLEM = "Ann has 5 pens. She buys 4 more. How many pens are left?"


@pytest.fixture(scope="module")
def denoiser():
    return dlm_spec.load_denoiser(device="cpu")


@pytest.fixture
def run(denoiser, monkeypatch, capsys):
    """A function that runs the command in this process, on the model that is loaded already,
    and returns what it prints."""
    monkeypatch.setattr(dlm_spec, "load_denoiser", lambda *_, **__: denoiser)

    def command(*argv):
        command_line.main([*argv])
        return capsys.readouterr().out
    return command


@pytest.fixture
def calls(monkeypatch):
    """The knobs that each sampler is called with, [(name, knobs), ...]."""
    found = []
    for name, sampler in SAMPLERS.items():
        @functools.wraps(sampler)
        def spy(denoiser, prompt, *, name=name, sampler=sampler, **knobs):
            found.append((name, {k: v for k, v in knobs.items() if k not in (
                "attention_mask", "callback", "generator")}))
            return sampler(denoiser, prompt, **knobs)
        monkeypatch.setitem(SAMPLERS, name, spy)
    return found


# -------------------------------------------------- the first run

def child(*argv, **how):
    return subprocess.run([sys.executable, *argv], cwd=ROOT, text=True, capture_output=True,
                          timeout=300, **how)


def test_the_first_run_shows_a_canvas_that_fills_and_all_samplers():
    """Without a terminal: at most 40 lines, no escape codes, nothing on stderr but
    warnings."""
    first = child("dlm_spec.py", "--device", "cpu")
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    assert len(lines) <= 40 and "\033" not in first.stdout and "Traceback" not in first.stderr
    assert dlm_spec.EXAMPLE in lines
    canvases = [line for line in lines if re.match(r" *\d+ \| ", line)]
    masks = [line.count("░") for line in canvases]
    assert len(canvases) > 3 and masks[0] > masks[-1] == 0
    answers = [line for line in lines if line.startswith("-> ")]
    assert len(answers) == 1 and "tokens per forward" in first.stdout
    for name in SAMPLERS:
        assert any(re.match(rf"{name} +\d+ +\d+ +[\d.]+ +\d+  \S", line) for line in lines), (
            name
        )


HEAVY = ["matplotlib", "lm_eval", "pandas", "sklearn", "datasets", "IPython", "hypothesis"]
COPY = f"""
import sys
sys.path.insert(0, "notebooks")
import command_line
print("imported:", [m for m in {HEAVY} if m in sys.modules], file=sys.stderr)
command_line.main(["--copy", "sample_cover"])"""


@pytest.fixture(scope="module")
def pipe():
    """A command whose reader leaves after the first line, and what it says on stderr."""
    return subprocess.run(f"{sys.executable} -c {shlex.quote(COPY)} | head -1", cwd=ROOT,
                          shell=True, text=True, capture_output=True, timeout=300)


def test_importing_the_module_imports_nothing_heavier_than_torch_and_transformers(pipe):
    assert "imported: []" in pipe.stderr


def test_a_reader_that_leaves_ends_the_command_quietly(pipe):
    """An error of the pipe would be a line on stderr."""
    assert pipe.stdout.startswith("# SPDX") and len(pipe.stderr.splitlines()) == 1


def test_ctrl_c_ends_the_command_with_130(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt
    monkeypatch.setattr(command_line, "solve", interrupted)
    with pytest.raises(SystemExit) as stop:
        command_line.main([PROBLEM])
    assert stop.value.code == 130 and "stopped" in capsys.readouterr().err


# -------------------------------------------------- knobs

def test_a_problem_and_knobs(run, calls):
    """Values are Python's, or words; one problem, of one sampler alone."""
    text = run(PROBLEM, "threshold=.6", "block_length=16", "cache=dual", "gen_length=32",
               "early_stop=True", "--sampler", "fast_dllm")
    assert calls == [
        (
            "fast_dllm",
            dict(gen_length=32, threshold=0.6, block_length=16, cache="dual", early_stop=True),
        )
    ]
    assert PROBLEM in text and text.count("-> ") >= 1 and "   fast_dllm: " in text
    assert not any(f"\n{name} " in text for name in SAMPLERS), "a table that nobody asked for"


@pytest.mark.parametrize("argv", [
    [PROBLEM, "--sampler", "llada", "steps=4", "gen_length=8"],
    ["--sampler", "llada", PROBLEM, "steps=4", "gen_length=8"],
    ["steps=4", "--sampler", "llada", "gen_length=8", PROBLEM]])
def test_words_and_options_may_stand_in_any_order(run, calls, argv):
    assert PROBLEM in run(*argv)
    assert calls == [("llada", dict(gen_length=8, steps=4))]


def test_the_default_is_cover_on_64_tokens(run, calls):
    run(PROBLEM)
    assert calls == [("cover", dict(gen_length=64))]


@pytest.mark.parametrize("words, rule, options, view", [
    (["verify=kl", "tau=.3", "view=cover"], dlm_spec.verify_kl, {"tau": .3},
     dlm_spec.view_cover),
    (["tau=.3", "of=max"], dlm_spec.verify_confidence, {"tau": .3, "of": "max"}, None),
    (["verify=trust", "view=visible"], dlm_spec.verify_trust, {}, dlm_spec.view_visible)])
def test_rules_and_views_are_understood_by_name(run, calls, words, rule, options, view):
    run(PROBLEM, "gen_length=8", *words, "--sampler", "dual_diffusion")
    (_, knobs), = calls
    assert knobs.get("view") is view
    verify = knobs["verify"]
    assert (verify.func, verify.keywords) == (rule, options) if options else verify is rule


def test_named_knobs_takes_functions_too_and_leaves_its_argument_alone():
    given = dict(verify=dlm_spec.verify_kl, view=dlm_spec.view_visible, draft_steps=2)
    assert named_knobs(dlm_spec.sample_dual_diffusion, given) == given
    given = dict(verify="kl", tau=.5)
    named_knobs(dlm_spec.sample_dual_diffusion, given)
    assert given == dict(verify="kl", tau=.5)


def test_a_seed_is_the_seed(run):
    """The default is 0; with remasking=random it matters at temperature 0, too."""
    def answer(*words):
        text = run(PROBLEM, "gen_length=12", *words, "--sampler", "llada")
        return text.partition(" forwards")[0]
    assert answer("temperature=3.") == answer("temperature=3.", "seed=0") != answer(
        "temperature=3.", "seed=1")
    assert len({answer("remasking=random", "steps=3", f"seed={s}") for s in range(4)}) > 1


@pytest.mark.parametrize("argv, message", [
    (["thresold=.9"], "sample_cover has no thresold"),
    (["tau=1", "--sampler", "llada"], "sample_llada has no tau"),
    (["factor=1", "--sampler", "dkv"], "sample_dkv has no factor"),
    (["verify=kl", "--sampler", "fast_dllm"], "sample_fast_dllm has no verify"),
    (["verify=trust", "tau=.5", "--sampler", "dual_diffusion"], "has no tau"),
    (["verify=kl", "of=max", "--sampler", "dual_diffusion"], "has no of"),
    (["threshold=.5", "--preset", "saber4"], "sample_saber has no threshold"),
    (["thresold=.9", "--compare"], "thresold"),
    (["--preset", "no-such-preset"], "wino.6"),
    (["--preset", "saber4", "--sampler", "wino"], "give one"),
    (["--compare", "--sampler", "wino"], "give one"),
    (["another problem"], "2 problems"),
])
def test_what_can_be_refused_is_refused_before_a_model_is_loaded(argv, message, monkeypatch,
                                                                 capsys):
    """CASES 45: by its name, with exit code 2 and no traceback."""
    monkeypatch.setattr(
        dlm_spec, "load_denoiser", lambda *_, **__: pytest.fail("it was loaded")
    )
    with pytest.raises(SystemExit) as stop:
        command_line.main([PROBLEM, *argv])
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("argv, message", [
    (["threshold=nan"], "threshold is 'nan'"), (["threshold=2"], "threshold is 2"),
    (["temperature=-1"], "temperature is -1"), (["block_length=0"], "block_length is 0"),
    (["gen_length=-1"], "gen_length is -1"), (["gen_length=four"], "gen_length is 'four'"),
    (["gen_length=9999"], "the model takes"),
    (["steps=0", "--sampler", "llada"], "steps is 0"),
    (["refresh=2"], "refresh"), (["tau=7", "--sampler", "dual_diffusion"], "tau is 7"),
    (["threshold=.5", "factor=1", "--sampler", "fast_dllm"], "threshold and factor"),
    (["cache=dkv", "--sampler", "fast_dllm"], "cache is 'dkv'"),
    (["--copy", "sample_beam"], "'sample_beam'"), (["--sampler", "beam"], "invalid choice"),
])
def test_the_command_line_says_which_knob_is_wrong(argv, message, run, capsys):
    with pytest.raises(SystemExit) as stop, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(PROBLEM, *argv)
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("argv, message", [
    (["--model", "/no/such/folder"], "'/no/such/folder'"),
    (["--model", "README.md"], "README.md"),
    pytest.param(["--device", "cuda"], "device is 'cuda', which torch cannot use",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"))])
def test_the_command_line_says_what_cannot_be_loaded(argv, message, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as stop:
        command_line.main([PROBLEM, *argv])
    assert stop.value.code == 2 and message in capsys.readouterr().err


# -------------------------------------------------- presets and the table

def test_presets_are_the_settings_of_the_experiments():
    """A number of tokens per forward becomes a number of steps."""
    assert command_line.preset("four-per-forward", 64) == ("llada", dict(steps=16))
    assert command_line.preset("wino.6", 64) == ("wino", dict(threshold=.6))
    assert len(experiments.settings()) > 40


def test_a_preset_decodes_as_it_was_measured(run, calls):
    """64 tokens in one block; knobs beside it go first."""
    text = run(PROBLEM, "--preset", "threshold.6-dual")
    run(PROBLEM, "gen_length=8", "threshold=.9", "--preset", "wino.4")
    assert calls == [
        ("fast_dllm", dict(gen_length=64, block_length=64, threshold=.6, cache="dual")),
        ("wino", dict(gen_length=8, block_length=64, threshold=.9))]
    assert "   fast_dllm: " in text


def test_the_comparison_is_a_table_of_all_samplers(run, calls):
    """Each gets those of the knobs that it has."""
    text = run(PROBLEM, "gen_length=16", "draft_steps=2", "steps=4", "seed=1", "--compare")
    assert [name for name, _ in calls] == [*SAMPLERS]
    knobs = dict(calls)
    assert knobs["llada"] == dict(gen_length=16, steps=4)
    assert knobs["cover"] == dict(gen_length=16)
    assert knobs["dual_diffusion"].items() >= dict(gen_length=16, draft_steps=2).items()
    table = text[text.index("\nsampler "):].splitlines()[2:]
    assert [line.split()[0] for line in table] == [*SAMPLERS]
    assert [int(line.split()[1]) for line in table if line.startswith("llada")] == [4]
    assert "░" not in text


# -------------------------------------------------- the canvas on a screen

class Terminal(io.StringIO):
    """A screen that keeps what is written."""

    def isatty(self):
        return True


def test_the_live_canvas_redraws_in_place_on_a_terminal(denoiser):
    """The old canvas is erased before the next one is drawn."""
    screen, (ids, _) = Terminal(), denoiser.encode(PROBLEM)
    dlm_spec.sample_llada(denoiser, ids, gen_length=16, steps=4,
                          callback=LiveCanvas(denoiser, screen))
    text = screen.getvalue()
    assert text.count("[forward") == 4 and text.count("\033[J") == 3 and "\033[2A" in text


def test_elsewhere_every_nth_forward_is_a_line(denoiser):
    file, (ids, _) = io.StringIO(), denoiser.encode(PROBLEM)
    dlm_spec.sample_llada(denoiser, ids, gen_length=16, steps=8,
                          callback=LiveCanvas(denoiser, file, every=4))
    assert [int(line.split("|")[0]) for line in file.getvalue().splitlines()] == [1, 4, 8]
    assert "\033" not in file.getvalue()


def test_a_canvas_as_text(denoiser):
    """░ a mask, · an end of text; behind a complete text nothing is shown."""
    words, live = denoiser.tokenizer("12 + 5")["input_ids"], LiveCanvas(denoiser)
    mask, (eos,) = denoiser.mask_id, denoiser.eos_ids
    assert live.text([mask, mask, *words, mask]) == "░░ 12 + 5 ░"
    assert live.text([*words, eos, eos, *words]) == "12 + 5"
    assert live.text([mask, *words, eos, eos]) == "░ 12 + 5 ··"


# -------------------------------------------------- README

def test_the_readme_s_first_lines_of_python_run(capsys):
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert "####" in capsys.readouterr().out
