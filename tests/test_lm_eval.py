"""The adapter for lm-evaluation-harness: offline, on the embedded model, a handful of
problems."""
import functools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1")
import pytest
import torch

import dlm_spec

pytest.importorskip("lm_eval", reason="pip install lm-eval")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "notebooks"))
import benchmarks
import evaluate
import lm_eval_dlm
import tasks
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

QUICK = dict(sampler="fast_dllm", gen_length=48, block_length=48, threshold=.5, batch_size=3)


@pytest.fixture(scope="module")
def denoiser():
    return dlm_spec.load_denoiser(device="cpu")


def requests(kind, *args):
    return [Instance(kind, {}, a, i) for i, a in enumerate(args)]


def prompts_of(lm, problems):
    return [lm.apply_chat_template([{"role": "user", "content": p.prompt}]) for p in problems]


@pytest.fixture(scope="module")
def harness(denoiser, tmp_path_factory):
    """Five problems of MiniMath in a file, and what the harness makes of them with QUICK:
    (problems, file, result, folder)."""
    folder = tmp_path_factory.mktemp("harness")
    problems = tasks.problems("math", "test", 5, seed=3)
    data = benchmarks.write_json(problems, folder / "problems")
    found = benchmarks.run(lm_eval_dlm.DlmSpecLM(denoiser, **QUICK), "mini_math", data,
                           cache_dir=str(folder))
    return problems, data, found, folder


def evaluated(denoiser, problems):
    """The same problems with the same decoder, without the harness."""
    knobs = {k: v for k, v in QUICK.items() if k not in ("sampler", "batch_size")}
    return evaluate.evaluate(denoiser, dlm_spec.sample_fast_dllm, problems, **knobs)


def test_the_harness_gives_the_accuracy_of_evaluate(denoiser, harness):
    problems, _, found, _ = harness
    want = evaluated(denoiser, problems)
    assert found["texts"] == want["texts"] and found["marks"] == want["marks"]
    assert found["accuracy"] == want["accuracy"] and found["interval"] == want["interval"]
    assert found["nfe"] == want["nfe"] and found["positions"] == want["positions"]
    assert 0 < found["tokens_per_forward"] <= 16


def test_the_harness_runs_programs_where_evaluate_runs_them(denoiser, tmp_path):
    problems = tasks.problems("code", "test", 4, seed=3)
    found = benchmarks.run(lm_eval_dlm.DlmSpecLM(denoiser, **QUICK), "mini_code",
                           benchmarks.write_json(problems, tmp_path / "p"),
                           cache_dir=str(tmp_path))
    want = evaluated(denoiser, problems)
    assert found["texts"] == want["texts"] and found["marks"] == want["marks"]


MINI_MATH = """
task: mini_math_yaml
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{cache}"}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{gold}}}}"
generation_kwargs: {{until: ["\\n\\n"], do_sample: false, temperature: 0.0}}
filter_list:
  - {{name: last, filter: [{{function: regex, group_select: -1,
                            regex_pattern: '####\\s*(-?\\d+)'}},
                           {{function: take_first}}]}}
metric_list: [{{metric: exact_match}}]
"""


def test_the_command_line_runs_a_task_and_writes_its_results(monkeypatch, tmp_path):
    """The harness's own regex and metric, its --batch_size default and its --device cuda:0,
    which means: where there is one."""
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")  # runs pip
    own_tasks_only = functools.partialmethod(TaskManager.__init__, include_defaults=False)
    monkeypatch.setattr(TaskManager, "__init__", own_tasks_only)    # else thousands of files
    problems = tasks.problems("math", "test", 4, seed=5)
    data = benchmarks.write_json(problems, tmp_path / "p.jsonl")
    (tmp_path / "t.yaml").write_text(MINI_MATH.format(data=data, cache=tmp_path))
    monkeypatch.setattr(sys, "argv", [
        "lm_eval_dlm.py", "--model", "dlm_spec", "--tasks", "mini_math_yaml", "--include_path",
        str(tmp_path), "--apply_chat_template", "--log_samples", "--output_path",
        str(tmp_path / "out"), "--model_args",
        "dtype=float32,sampler=cover,threshold=.5,gen_length=48,block_length=48,batch_size=4"])
    lm_eval_dlm.cli_evaluate()
    results, = (tmp_path / "out").rglob("results_*.json")
    samples, = (tmp_path / "out").rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    found = json.loads(results.read_text())
    marks = tasks.grade_all(problems, [r["resps"][0][0] for r in rows])
    assert [r["exact_match"] for r in rows] == marks and len(rows) == 4
    assert found["results"]["mini_math_yaml"]["exact_match,last"] == sum(marks) / 4
    assert found["config"]["sampler"] == "cover" and 1 < found["config"]["nfe"] < 48


def test_texts_end_before_the_first_stop_string_of_the_request(denoiser):
    lm = lm_eval_dlm.DlmSpecLM(denoiser, **QUICK)
    prompts = prompts_of(lm, tasks.problems("choice", "test", 2))
    whole = lm.generate_until(requests("generate_until", *((p, {}) for p in prompts)))
    stops = ["zzz", ":", "Answer"]
    cut = lm.generate_until(
        requests("generate_until", *((p, {"until": stops}) for p in prompts))
    )
    for w, c in zip(whole, cut):
        assert ":" in w and c == w.split("Answer")[0].split(":")[0]
    assert lm.generate_until(
        requests("generate_until", (prompts[0], {"until": "Answer"}))
    ) == [whole[0].split("Answer")[0]]


def test_batches_of_unequal_prompts_give_what_single_ones_give(denoiser):
    """In the order of the requests, although the longest are decoded first."""
    problems = [p for f in tasks.FAMILIES for p in tasks.problems(f, "test", 2)]
    alone = lm_eval_dlm.DlmSpecLM(denoiser, **{**QUICK, "batch_size": 1})
    batched = lm_eval_dlm.DlmSpecLM(denoiser, **{**QUICK, "batch_size": 4})
    asked = requests("generate_until", *((p, {}) for p in prompts_of(alone, problems)))
    assert len({len(r.args[0]) for r in asked}) == len(asked)
    assert batched.generate_until(asked) == alone.generate_until(asked)
    assert sorted(c["nfe"] for c in batched.costs) == sorted(c["nfe"] for c in alone.costs)


def test_revisions_are_counted_for_each_text(denoiser):
    """All rows together give what the whole batch has."""
    ids, mask = denoiser.encode([p.prompt for p in tasks.problems("math", "test", 6)])
    out = dlm_spec.sample_cover(denoiser, ids, attention_mask=mask, gen_length=32, threshold=.3,
                                block_length=32, tau_replace=.9)
    rows = [lm_eval_dlm.revisions_of_row(out, i) for i in range(6)]
    whole = dlm_spec.revision_statistics(out)
    assert whole["remasks"] > 0 < whole["replaces"]
    assert all(sum(row[k] for row in rows) == whole[k] for k in lm_eval_dlm.REVISIONS)


def test_the_task_s_length_and_temperature_hold_unless_model_args_set_them(denoiser):
    generation = lm_eval_dlm.generation
    assert generation({"max_gen_toks": 32, "until": "x"}, {}) == (["x"], (32, 0.0, None, None))
    assert generation({"max_gen_toks": 32}, {"gen_length": 64})[1][0] == 64
    assert generation({}, {})[1] == (256, 0.0, None, None)
    sampled = {"do_sample": True, "temperature": .2, "top_p": .95, "max_new_tokens": 8}
    assert generation(sampled, {})[1] == (8, .2, None, .95)
    assert generation({**sampled, "do_sample": False}, {})[1] == (8, 0.0, None, None)
    assert generation({**sampled, "temperature": 0.0}, {})[1] == (8, 0.0, None, None)
    assert generation({"temperature": .5}, {})[1] == (256, .5, None, None)
    assert generation({"do_sample": False}, {"temperature": .1, "top_p": .9})[1] == (
        256, .1, None, .9)
    with pytest.raises(ValueError, match="repetition_penalty"):
        generation({"repetition_penalty": 1.2}, {})
    lm = lm_eval_dlm.DlmSpecLM(denoiser, sampler="llada", temperature=1.0, top_k=40, steps=8)
    prompt, = prompts_of(lm, tasks.problems("math", "test", 1))
    some = requests("generate_until", *[(prompt, {"max_gen_toks": 24})] * 3)
    texts = lm.generate_until(some)
    assert (
        texts == lm.generate_until(some) and len(set(texts)) > 1
    )  # repeats differ, runs don't


def test_top_p_counts_the_tempered_probabilities_and_leaves_the_logits_alone():
    """Logits [1, 0, -1], top_p .9: p is .665, .245, .090 at T = 1, which drops one, and at T
    = .4 .918, .075, .006, which drops two; at T = 4 .42, .33, .25, which drops none."""
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    for temperature, kept in ((1.0, 2), (.4, 1), (4.0, 3)):
        found = lm_eval_dlm.warpers(temperature, top_p=.9)(torch.zeros(1, 1).long(), logits)
        assert found.tolist()[0] == logits[0, :kept].tolist() + [-torch.inf] * (3 - kept)
    first = lm_eval_dlm.warpers(4.0, top_k=2, top_p=.9)(torch.zeros(1, 1).long(), logits)
    assert first.tolist()[0] == [1.0, 0.0, -torch.inf]
    assert lm_eval_dlm.warpers(0.0, 2, .9) is None and lm_eval_dlm.warpers(1.0) is None


def test_a_nucleus_of_one_token_fills_from_left_to_right():
    """All confidences are then 1, and of equals the first is filled; without top_p the surest,
    here the last, is."""
    logits = torch.tensor([[3.0, 0.0], [4.0, 0.0], [5.0, 0.0]])
    d = dlm_spec.Denoiser(lambda input_ids, **_: SimpleNamespace(logits=logits[None]), 2)
    for top_p, steps, sure in ((.5, [1, 2, 3], True), (None, [3, 2, 1], False)):
        out = dlm_spec.sample_llada(
            d, torch.zeros(1, 0).long(), gen_length=3, temperature=1.0,
            logits_processor=lm_eval_dlm.warpers(1.0, top_p=top_p),
            generator=torch.Generator().manual_seed(0))
        assert out.commit_step.tolist() == [steps]
        assert bool((out.commit_confidence == 1).all()) == sure


def test_likelihoods_are_those_of_log_likelihood(denoiser):
    """Each with the same seed, whatever came before it; greedy as one token per forward
    decodes."""
    lm = lm_eval_dlm.DlmSpecLM(denoiser, n_samples=16, batch_size=8, seed=7)
    problem = tasks.problems("choice", "test", 12)[1]
    prompt, = prompts_of(lm, [problem])
    ids, _ = denoiser.encode(problem.prompt)
    best = denoiser.decode(dlm_spec.sample_llada(denoiser, ids, gen_length=5).generated)[0]
    answers = [best, "Answer: A) dog", "Answer: B) dog"]
    found = lm.loglikelihood(requests("loglikelihood", *((prompt, a) for a in answers)))
    for answer, (value, _) in zip(answers, found):
        target = denoiser.tokenizer(answer, add_special_tokens=False)["input_ids"]
        want = dlm_spec.log_likelihood(denoiser, ids, [target], n_samples=16, batch_size=8,
                                       generator=torch.Generator().manual_seed(7))
        assert value == float(want) < 0
    n = len(denoiser.tokenizer(best, add_special_tokens=False)["input_ids"])
    greedy = denoiser.decode(dlm_spec.sample_llada(denoiser, ids, gen_length=n).generated)[0]
    assert [is_greedy for _, is_greedy in found] == [greedy == best, False, False]
    assert lm.loglikelihood(requests("loglikelihood", (prompt, answers[2])))[0] == found[2]
    assert lm.loglikelihood(requests("loglikelihood", (prompt, ""))) == [(0.0, True)]
    quick = lm_eval_dlm.DlmSpecLM(denoiser, n_samples=1, check_greedy=False)
    assert quick.loglikelihood(requests("loglikelihood", (prompt, best)))[0][1] is False


def test_a_whole_text_is_bounded_in_one_piece_or_by_the_chain_rule(denoiser):
    lm = lm_eval_dlm.DlmSpecLM(denoiser, n_samples=4, batch_size=4)
    text = tasks.problems("math", "test", 1)[0].answer
    ids = denoiser.tokenizer(text, add_special_tokens=False)["input_ids"]

    def bound(given, piece):
        return float(dlm_spec.log_likelihood(denoiser, [given], [piece], n_samples=4,
                                             batch_size=4,
                                             generator=torch.Generator().manual_seed(0)))
    eos = denoiser.eos_ids[0]
    asked = requests("loglikelihood_rolling", (text,))
    assert lm.loglikelihood_rolling(asked) == [bound([eos], ids)]
    lm.max_length, whole = 8, [eos, *ids]
    want = sum(
        bound(whole[max(a - 4, 0) : a], whole[a : a + 4]) for a in range(1, len(whole), 4)
    )
    assert len(ids) > 12 and lm.loglikelihood_rolling(asked) == [want]


def test_the_chat_template_gives_the_ids_of_encode(denoiser):
    lm = lm_eval_dlm.DlmSpecLM(denoiser)
    problem = tasks.problems("code", "test", 1)[0]
    text, = prompts_of(lm, [problem])
    assert lm.tok_encode(text) == denoiser.encode(problem.prompt)[0][0].tolist()
    begun = lm.apply_chat_template([{"role": "user", "content": "a"},
                                    {"role": "assistant", "content": "def"}], False)
    assert begun.endswith("<|assistant|>def") and "/" not in lm.tokenizer_name
    assert lm.chat_template(True) == denoiser.tokenizer.chat_template


def test_a_bos_in_the_template_is_not_doubled(denoiser):
    lm = lm_eval_dlm.DlmSpecLM(denoiser)
    seen = []
    lm.tokenizer = lambda text, add_special_tokens: seen.append(add_special_tokens) or {
        "input_ids": [1]}
    lm.tokenizer.bos_token, lm.tokenizer.unk_token_id = "<s>", None
    lm.tok_encode("<s>hello"), lm.tok_encode("hello"), lm.tok_encode("hello", False)
    assert seen == [False, True, False]


def test_long_prompts_lose_their_beginning_with_a_warning(denoiser):
    lm = lm_eval_dlm.DlmSpecLM(denoiser, **QUICK)
    lm.max_length = 60
    prompt, = prompts_of(lm, tasks.problems("math", "test", 1))
    with pytest.warns(UserWarning, match="cut to its last 12"):
        lm.generate_until(requests("generate_until", (prompt, {})))
    with pytest.warns(UserWarning, match="words the tokenizer does not know"):
        lm.tok_encode("Xylophone")


def test_model_args_reach_the_sampler():
    """As the harness parses them; they win over its --batch_size and --device."""
    made = get_model("dlm_spec").create_from_arg_string(
        "sampler=dual_diffusion,gen_length=32,block_length=16,threshold=.7,verify=kl,tau=.25,"
        "view=cover,cache=dual,batch_size=8,dtype=bfloat16,device=cpu,postpone_eos=True",
        {"batch_size": 1, "device": "cuda:0", "max_batch_size": None})
    assert made.sampler is dlm_spec.sample_dual_diffusion and made.batch_size == 8
    verify = made.knobs.pop("verify")
    assert isinstance(verify, functools.partial) and verify.func is dlm_spec.verify_kl
    assert verify.keywords == {"tau": .25} and made.asked == {"gen_length": 32}
    assert made.knobs == dict(block_length=16, threshold=.7, cache="dual", postpone_eos=True,
                              view=dlm_spec.view_cover)
    assert made.denoiser.model.dtype == torch.bfloat16 and made.device.type == "cpu"


@pytest.mark.parametrize("args, complaint", [
    (dict(sampler="beam"), "sampler is 'beam'"),
    (dict(sampler="cover", steps=8), "sample_cover has no steps"),
    (dict(sampler="cover", verify="kl"), "has no verify"),
    (dict(sampler="fast_dllm", thresold=.9), "has no thresold"),
    (dict(sampler="dual_diffusion", verify="trust", tau=.5), "has no tau"),
    (dict(sampler="dual_diffusion", verify="mood"), "verify is 'mood'"),
    (dict(sampler="dual_diffusion", view="mood"), "view is 'mood'"),
    (dict(callback=print), "has callback"),
    (dict(batch_size="auto"), "batch_size is 'auto'"),
    (dict(top_p=.9), "without a temperature"),
    (dict(dtype="bfloat17"), "dtype is 'bfloat17'"),
    (dict(trust_remote_code=True), "has no trust_remote_code"),
])
def test_a_model_arg_that_nothing_takes_is_an_error(args, complaint):
    with pytest.raises(ValueError, match=complaint):
        lm_eval_dlm.DlmSpecLM.create_from_arg_obj(args)


def test_a_loaded_model_takes_no_loading_keywords(denoiser):
    with pytest.raises(ValueError, match="dtype cannot change"):
        lm_eval_dlm.DlmSpecLM(denoiser, dtype="float32")


def test_loading_keywords_reach_load_denoiser(monkeypatch):
    """device_map and tp_plan place the weights: the harness's default device is dropped
    then."""
    seen = {}
    monkeypatch.setattr(dlm_spec, "load_denoiser", lambda name, **kw: (
        seen.update(kw, name=name) or SimpleNamespace(tokenizer=None, device="x", model=None)))
    make = lm_eval_dlm.DlmSpecLM.create_from_arg_string
    make("pretrained=a/b,device_map=auto,revision=main,mask_id=5", {"device": "cuda:1"})
    assert seen == dict(name="a/b", device_map="auto", revision="main", mask_id=5, dtype=None)
    seen.clear()
    monkeypatch.setenv("WORLD_SIZE", "4")       # torchrun: one model on four, each sees all
    lm = make("pretrained=a/b,tp_plan=auto,dtype=float16", {"device": "cuda:0"})
    assert seen == dict(name="a/b", tp_plan="auto", dtype=torch.float16)
    assert (lm.rank, lm.world_size) == (0, 1)
    with pytest.raises(ValueError, match="4 processes were started"):
        make("pretrained=a/b,device_map=auto")


def test_two_processes_share_the_problems_and_rank_0_has_all_results(monkeypatch, harness):
    """Simulated one after the other: what accelerate would exchange goes through a list. Rank
    1 has two of the five problems, and pads with its last to do as many calls as rank 0."""
    _, data, want, folder = harness
    sent, found, lengths = [], {}, {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (1, 0):
        accelerator = SimpleNamespace(
            process_index=rank, num_processes=2, device="cpu",
            gather=lambda count: torch.tensor([3, 2]), wait_for_everyone=lambda: None)

        def gather_object(obj, out, dst, rank=rank):
            if rank == dst:
                out[:] = obj, sent.pop(0)
            else:
                sent.append(obj)
        monkeypatch.setitem(sys.modules, "accelerate",
                            SimpleNamespace(Accelerator=lambda cpu, a=accelerator: a))
        monkeypatch.setattr(torch.distributed, "gather_object", gather_object)
        lm = lm_eval_dlm.DlmSpecLM(**QUICK)
        assert (lm.rank, lm.world_size) == (rank, 2)
        found[rank] = benchmarks.run(lm, "mini_math", data, cache_dir=str(folder))
        lengths[rank] = len(lm.costs)
    assert found[1] is None and not sent and lengths == {0: 3, 1: 3}
    assert found[0]["docs"] == want["docs"] and found[0]["texts"] == want["texts"]
    assert found[0]["accuracy"] == want["accuracy"]
