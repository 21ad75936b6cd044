"""The same tokens, committed in the same order, as LLaDA's public sampler.

`data/llada_traces.json` was recorded by running `generate` of ML-GSAI/LLaDA (generate.py, commit
b7e6c35, unchanged) on the embedded model in fp32 on a CPU, one prompt at a time at temperature 0.
The model was wrapped so that its logits of M and of ids past the tokenizer are -inf (the public
sampler does not ban them) and so that every canvas it was given is kept; the trace is the forward
at which each generated position stopped being M. Where several confidences are exactly 1.0 the
public sampler's order among them is torch.topk's, which promises none; ours is by index, so those
positions are compared by token only.
"""
import json
from pathlib import Path

import pytest
import torch

import dlm_spec

TRACES = json.loads((Path(__file__).parent / "data" / "llada_traces.json").read_text())


@pytest.fixture(scope="module")
def denoiser():
    return dlm_spec.load_denoiser(device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("knobs", sorted({json.dumps(t["knobs"]) for t in TRACES}))
def test_tokens_and_commit_order_are_those_of_the_public_sampler(denoiser, knobs):
    for trace in TRACES:
        if json.dumps(trace["knobs"]) == knobs:
            out = dlm_spec.sample_llada(denoiser, [trace["prompt"]], **trace["knobs"])
            assert out.generated[0].tolist() == trace["tokens"]
            sure = out.commit_confidence[0, out.prompt_length:] == 1
            assert sure.float().mean() < .9
            assert torch.equal(out.commit_step[0, out.prompt_length:][~sure],
                               torch.tensor(trace["commit_step"])[~sure])
            assert out.nfe.tolist() == [trace["nfe"]]
