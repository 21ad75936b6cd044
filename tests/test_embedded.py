"""The embedded model: a small stock checkpoint that solves most of its held-out problems."""
import experiments
import pytest
import tasks
import torch
from evaluate import evaluate
from transformers import AutoModelForCausalLM

import dlm_spec
from dlm_spec import SAMPLERS


@pytest.fixture(scope="module")
def denoiser():
    return dlm_spec.load_denoiser(device="cpu")


def recorded(family, name, gen_length=64):
    """Which of the test split's problems a setting solved, [bool, ...]: the records behind the
    model card's and the README's tables."""
    return [mark == "1" for mark in experiments.read("test", family, gen_length)[name]["marks"]]


def test_the_checkpoint_is_a_small_stock_llama():
    """At most 8 MB of bf16 safetensors, opened without a network."""
    folder = dlm_spec.EMBEDDED_MODEL
    assert (folder / "model.safetensors").stat().st_size <= 8_000_000
    d = dlm_spec.load_denoiser(device="cpu", dtype=torch.bfloat16)
    assert type(d.model).__name__ == "LlamaForCausalLM" and d.model.dtype == torch.bfloat16
    assert d.mask_id == d.tokenizer.mask_token_id and d.eos_ids == (d.tokenizer.eos_token_id,)


def test_the_small_drafter_drafts_for_it(denoiser):
    """The same words, a quarter of the bytes; both together stay below 9 MB."""
    folder = dlm_spec.EMBEDDED_MODEL.parent / "small"
    sizes = [(f / "model.safetensors").stat().st_size for f in (dlm_spec.EMBEDDED_MODEL, folder)]
    assert sizes[1] < .3 * sizes[0] and sum(sizes) < 9_000_000
    small = dlm_spec.load_denoiser(folder, device="cpu")
    assert small.tokenizer.get_vocab() == denoiser.tokenizer.get_vocab()
    ids, _ = denoiser.encode(dlm_spec.EXAMPLE)
    out = dlm_spec.sample_dual_diffusion(denoiser, ids, drafter=small, gen_length=64)
    assert denoiser.decode(out.generated)[0].endswith("#### 28") and out.draft_nfe > 0


def test_a_stock_model_reads_it_right(denoiser):
    """Its config says that it is not causal, and how long its canvases were."""
    stock = AutoModelForCausalLM.from_pretrained(dlm_spec.EMBEDDED_MODEL, dtype=torch.float32)
    ids, _ = denoiser.encode(dlm_spec.EXAMPLE)
    with torch.no_grad():
        ours, theirs = (m(input_ids=ids, use_cache=False).logits
                        for m in (denoiser.model, stock.eval()))
    assert stock.config._attn_implementation != "dlm_spec"
    assert (ours - theirs).abs().max() < 1e-3
    assert denoiser.config.shift_logits is False and denoiser.config.trained_gen_length >= 64


@pytest.mark.parametrize("name, n", [("one-per-forward", 3), ("four-per-forward", 8)])
def test_the_recorded_marks_are_those_of_this_model_and_this_sampler(denoiser, name, n):
    """The first n problems of each family, one and four tokens per forward."""
    problems = [p for family in tasks.FAMILIES for p in tasks.problems(family, "test", n)]
    setting = experiments.settings()[name]
    found = experiments.decode_and_grade(denoiser, setting, problems, 64, 64)
    assert found["marks"] == [m for f in tasks.FAMILIES for m in recorded(f, name)[:n]]
    assert any(found["marks"])


NOT_REACHED = pytest.mark.xfail(strict=True, reason="see the model's card: MiniMath at 128 tokens "
                                "and exams; and at 128 and 256 fewer problems are recorded")


@pytest.mark.parametrize("gen_length", [64, pytest.param(128, marks=NOT_REACHED),
                                        pytest.param(256, marks=NOT_REACHED)])
@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_one_token_per_forward_solves_most_held_out_problems(family, gen_length):
    """On record: single problems on 64 and 128 tokens, exams of four on 256."""
    marks = recorded(family, "one-per-forward", gen_length)
    assert sum(marks) / len(marks) >= .9 and len(marks) >= 400


@pytest.mark.parametrize("gen_length, least, n", [(64, .9, 500), (128, .85, 50)])
@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_what_the_model_has_reached_is_kept(family, gen_length, least, n):
    """The same, as far as the shipped weights and their records go."""
    marks = recorded(family, "one-per-forward", gen_length)
    assert sum(marks) / len(marks) >= least and len(marks) >= n


def test_parallel_decoding_hurts_the_chains_of_arithmetic(denoiser):
    fast = evaluate(denoiser, dlm_spec.sample_llada, tasks.problems("math", "test", 40),
                    gen_length=64, steps=4)
    assert fast["accuracy"] < sum(recorded("math", "one-per-forward")[:40]) / 40 - .1


@pytest.mark.parametrize("family", ["math", "code"])
def test_four_tokens_per_forward_lose_ten_points(family):
    """On record: else there were nothing to show."""
    one, four = (recorded(family, f"{word}-per-forward") for word in ("one", "four"))
    assert sum(four) / len(four) < sum(one) / len(one) - .1


def test_batched_and_single_decoding_agree(denoiser):
    """CASES 2 on a trained model: prompts of different lengths."""
    prompts = [tasks.problems(family, "test", 1)[0].prompt for family in tasks.FAMILIES]
    ids, mask = denoiser.encode(prompts)
    both = dlm_spec.sample_llada(denoiser, ids, attention_mask=mask, gen_length=24, steps=12)
    for i, prompt in enumerate(prompts):
        one = dlm_spec.sample_llada(
            denoiser, denoiser.encode(prompt)[0], gen_length=24, steps=12
        )
        assert torch.equal(both.generated[i], one.generated[0])


@pytest.mark.parametrize("gen_length", [{"gen_length": 64}, {}], ids=["64 tokens", "default"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_each_sampler_solves_an_easy_problem_at_its_defaults(denoiser, name, gen_length):
    """CASES 44."""
    ids, _ = denoiser.encode("Mia has 12 shells. She finds 5 more shells. How many shells are "
                             "left?")
    out = SAMPLERS[name](denoiser, ids, **gen_length)
    assert denoiser.decode(out.generated)[0].endswith("#### 17")
