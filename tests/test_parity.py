"""The same tokens, committed and taken back in the same order, as the public samplers.

The files in `data/` were recorded by running public code, unchanged, on the embedded model in fp64
on a CPU, one prompt at a time, but for Dream at temperature 0:

    llada_traces.json      `generate` of ML-GSAI/LLaDA (generate.py, commit b7e6c35)
    fast_dllm_traces.json  `generate`, `generate_with_prefix_cache`, `generate_with_dual_cache` of
                           NVlabs/Fast-dLLM (llada/generate.py, commit 24cc59e), which run one
                           forward more for a block that is full after its first: `wasted`
    revocable_traces.json  `decoding_wino` of Feng-Hong/WINO-DLLM
                           (LLaDA/decoding.py, commit 9549a1d)
                           and `generate_with_saber` of zhaoyMa/Saber (decoding.py, commit 2f061e2)
    dkv_traces.json        `generate` of horseee/dKV-Cache (llada_dkv_cache_decode.py and its
                           LLaDA modelling code, commit 49a76fc) with enable_cache, on the embedded
                           model's weights under LLaDA's names, a bias of attn_out added;
                           `positions` are the tokens its forwards were given
    dream_traces.json      `_sample` of Dream's generation_utils.py as NVlabs/Fast-dLLM carries it
                           (dream/model/, commit 24cc59e), at temperature and top_p, with
                           eps=-.01, which makes it commit one token per forward, logits rolled by
                           one, which it shifts back, and Gumbel-max over our random numbers in
                           the place of torch's Categorical
    eos_traces.json        LLaDA's `generate` again with confidence_eos_eot_inf, its ids of EOS and
                           EOT set to the embedded model's end of text and padding

The model was wrapped so that its logits of M and of ids past the tokenizer are -inf (the public
samplers do not ban them) and so that every canvas it was given is kept; a trace holds the forward
at which each generated position stopped being M, or the tokens that became M again. In fp32 the
tokens are the same too, but ends of text whose confidences differ by 1e-6 change places.
"""
import json
import os
import sys
from pathlib import Path

os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1")
import pytest
import torch

import dlm_spec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "notebooks"))

DATA = Path(__file__).parent / "data"
TRACES, FAST, REVOCABLE, DKV, DREAM, EOS = (
    json.loads((DATA / f"{name}_traces.json").read_text())
    for name in ("llada", "fast_dllm", "revocable", "dkv", "dream", "eos"))


@pytest.fixture(scope="module")
def denoiser():
    return dlm_spec.load_denoiser(device="cpu", dtype=torch.float64)


@pytest.mark.parametrize("knobs", sorted({json.dumps(t["knobs"]) for t in TRACES}))
def test_tokens_and_commit_order_are_those_of_the_public_sampler(denoiser, knobs):
    for trace in TRACES:
        if json.dumps(trace["knobs"]) == knobs:
            out = dlm_spec.sample_llada(denoiser, [trace["prompt"]], **trace["knobs"])
            assert out.generated[0].tolist() == trace["tokens"]
            assert out.commit_step[0, out.prompt_length:].tolist() == trace["commit_step"]
            assert out.nfe.tolist() == [trace["nfe"]]


def test_postponing_differs_from_the_public_code_only_in_its_softmax_without_eos(
        denoiser, monkeypatch):
    """There `logits_with_noise` is `logits` itself at temperature 0, so that -inf for an end of
    text enters the confidence of all other tokens. With that done here the runs are the same."""
    ends, ours = torch.tensor([denoiser.eos_ids[0], denoiser.pad_id]), dlm_spec.confidence_of

    def without_eos(logits, *args):
        return ours(logits.index_fill(1, ends, -torch.inf), *args)

    def same(trace):
        out = dlm_spec.sample_llada(denoiser, [trace["prompt"]], postpone_eos=True,
                                    **trace["knobs"])
        return (out.generated[0].tolist() == trace["tokens"] and
                out.commit_step[0, out.prompt_length:].tolist() == trace["commit_step"])

    some = EOS[::3]
    assert not all(map(same, some))
    monkeypatch.setattr(dlm_spec, "confidence_of", without_eos)
    assert all(map(same, some))


def test_tokens_and_commit_order_at_a_temperature_are_those_of_dream_s_sampler(denoiser):
    """Temperature, then top_p, then the entropy (probability, margin) of what is left."""
    adapter = pytest.importorskip("lm_eval_dlm", reason="pip install lm-eval", exc_type=ImportError)
    for trace in DREAM[::2]:
        out = dlm_spec.sample_llada(
            denoiser, [trace["prompt"]], **trace["knobs"], tempered_confidence=True,
            logits_processor=adapter.warpers(trace["knobs"]["temperature"], top_p=trace["top_p"]),
            generator=torch.Generator().manual_seed(trace["seed"]))
        assert out.generated[0].tolist() == trace["tokens"]
        assert out.commit_step[0, out.prompt_length:].tolist() == trace["commit_step"]


@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
def test_tokens_and_forwards_are_those_of_the_public_cached_samplers(denoiser, cache):
    for trace in FAST:
        if trace["knobs"]["cache"] == cache:
            out = dlm_spec.sample_fast_dllm(denoiser, [trace["prompt"]], **trace["knobs"])
            assert out.generated[0].tolist() == trace["tokens"]
            assert int(out.nfe) == trace["nfe"] - trace["wasted"]


@pytest.mark.parametrize("refresh", [8, 4, 3])
def test_tokens_order_and_positions_are_those_of_the_public_delayed_cache(denoiser, refresh):
    for trace in DKV[::3]:      # all agree: it is a matter of time
        if trace["knobs"]["refresh"] == refresh:
            out = dlm_spec.sample_dkv(denoiser, [trace["prompt"]], **trace["knobs"])
            assert out.generated[0].tolist() == trace["tokens"]
            assert out.commit_step[0, out.prompt_length:].tolist() == trace["commit_step"]
            assert (out.nfe.tolist(), out.positions.tolist()) == (
                [trace["nfe"]], [trace["positions"]])


@pytest.mark.parametrize("sampler", ["wino", "saber"])
def test_tokens_and_revisions_are_those_of_the_public_sampler(denoiser, sampler):
    """A re-mask in a trace is a token that was shown to a forward and no longer to the next;
    what Saber takes back in the forward that committed it was never shown."""
    events = 0
    for trace in REVOCABLE:
        if trace["sampler"] == sampler:
            out = dlm_spec.SAMPLERS[sampler](denoiser, [trace["prompt"]], **trace["knobs"],
                                             history=True)
            assert out.generated[0].tolist() == trace["tokens"]
            assert out.nfe.tolist() == [trace["nfe"]]
            shown = [[r.forward, r.position, r.old] for r in out.revisions
                     if out.history[r.forward - 1][0, r.position] == r.old]
            assert sorted(shown) == sorted(trace["remasks"])
            events += len(shown)
    assert events > 10
