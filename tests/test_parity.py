"""The same tokens, committed in the same order, as LLaDA's public sampler.

`data/llada_traces.json` was recorded by running `generate` of ML-GSAI/LLaDA (generate.py, commit
b7e6c35, unchanged) on the embedded model in fp64 on a CPU, one prompt at a time at temperature 0.
The model was wrapped so that its logits of M and of ids past the tokenizer are -inf (the public
sampler does not ban them) and so that every canvas it was given is kept; the trace is the forward
at which each generated position stopped being M. In fp32 the tokens are the same too, but ends of
text whose confidences differ by 1e-6 change places.
"""
import json
from pathlib import Path

import pytest
import torch

import dlm_spec

TRACES = json.loads((Path(__file__).parent / "data" / "llada_traces.json").read_text())


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
