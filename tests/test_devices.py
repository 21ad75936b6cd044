# SPDX-License-Identifier: MIT
"""Everything stays on the model's device, shown without one (devices.py)."""
import io

import benchmark
import gpu_check
import graphs
import pytest
import tasks
import torch
from devices import CUDA, FakeCuda, Generator, OnCuda
from helpers import M, random_ids, tiny_llama, tiny_qwen2
from test_graphs import DECODES
from transformers import LogitsProcessorList, TopPLogitsWarper

import dlm_spec
from dlm_spec import CudaGraphs, Denoiser

ROWS = [[1, 2, 3, M, 4], [5]]
MORE = [("llada", dict(remasking=r)) for r in ("margin", "entropy", "random")] + [
    ("fast_dllm", dict(factor=1.0)), ("dkv", dict(steps=9)),
    ("dual_diffusion", dict(adaptive=True, cache="dkv", draft_steps=2)),
    ("dual_diffusion", dict(cache="prefix", verify=dlm_spec.verify_kl, threshold=.3)),
    ("cover", dict(uncertainty="commit", spacing=2, commit_cap=True, remask_limit=False))]


@pytest.fixture
def cuda():
    """The stand-in, in use."""
    with FakeCuda() as found:
        yield found


@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
@pytest.mark.parametrize("name, knobs", DECODES + MORE, ids=str)
def test_a_decode_stays_on_the_device(name, knobs, make, shift, cuda):
    d = Denoiser(cuda.move(make(1)), M, shift=shift, eos_ids=(1, 2))
    assert d.device == CUDA
    for generator in (torch.Generator().manual_seed(0),
                      [torch.Generator().manual_seed(i) for i in range(2)]):
        out = dlm_spec.SAMPLERS[name](
            d, ROWS, gen_length=9, block_length=6, temperature=.7 * isinstance(generator, list),
            generator=generator, postpone_eos=True, early_stop=True, history=True,
            logits_processor=LogitsProcessorList([TopPLogitsWarper(.9)]), **knobs)
        for t in (out.sequences, out.nfe, out.positions, out.tokens_per_forward, out.commit_step,
                  out.commit_confidence, *out.history):
            assert t.device == CUDA
        dlm_spec.revision_statistics(out, out.sequences)


@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
def test_same_tokens_there_and_here(make, shift, cuda):
    """Where keys have fewer heads (Qwen2's), a mask makes sdpa repeat them on a device."""
    for name, knobs in DECODES[4::3]:
        there, here = (Denoiser(model, M, shift=shift) for model in (cuda.move(make(2)), make(2)))
        a, b = (dlm_spec.SAMPLERS[name](d, ROWS, gen_length=8, block_length=6, **knobs)
                for d in (there, here))
        assert b.sequences.device.type == "cpu" and torch.equal(a.sequences.cpu(), b.sequences)


def test_likelihood_and_loss(cuda):
    model = cuda.move(tiny_llama(2))
    d, x = Denoiser(model, M), cuda.put(random_ids(3, 9))
    assert dlm_spec.log_likelihood(d, x, [[1, 2], [3], [4, 5, 6]], n_samples=4).device == CUDA
    loss = dlm_spec.mdlm_loss(model, x, x > 3, mask_id=M)
    assert loss.device == CUDA and loss.isfinite()


def test_a_prompt_and_a_mask_from_the_cpu_are_brought_there(cuda):
    d = Denoiser(cuda.move(tiny_llama(1)), M)
    ids, mask = random_ids(2, 5), torch.tensor([[0, 1, 1, 1, 1], [1] * 5])
    assert not isinstance(ids, OnCuda)
    out = dlm_spec.sample_llada(d, ids, attention_mask=mask, gen_length=4)
    assert out.sequences.device == CUDA


def test_text_in_and_text_out():
    here = dlm_spec.load_denoiser(device="cpu")
    texts = [p.prompt for p in tasks.problems("math", "validation", 2)]
    ids, mask = here.encode(texts)
    want = here.decode(dlm_spec.sample_cover(here, ids, attention_mask=mask, gen_length=64,
                                             block_length=64).generated)
    with FakeCuda() as cuda:        # the model is loaded before: it is not for filling weights
        d = Denoiser(cuda.move(here.model), here.mask_id, eos_ids=here.eos_ids,
                     n_tokens=here.n_tokens, tokenizer=here.tokenizer)
        ids, mask = d.encode(texts)
        out = dlm_spec.sample_cover(d, ids, attention_mask=mask, gen_length=64, block_length=64,
                                    callback=dlm_spec.LiveCanvas(d, io.StringIO()))
        assert ids.device == mask.device == CUDA
        assert d.decode(out.generated) == want


@pytest.mark.parametrize("label", ["no device", "a mask", "the generator", "an index"])
def test_what_a_device_refuses_is_refused(label, cuda):
    x = cuda.put(torch.randn(3, 4))
    wrong = {"no device": lambda: x + torch.ones(3, 4), "a mask": lambda: x[torch.ones(3) > 0],
             "the generator": lambda: torch.rand(3, generator=torch.Generator(), device=x.device),
             "an index": lambda: torch.ones(3, 4)[x.argmax(0)]}[label]
    with pytest.raises(RuntimeError, match=r"on the CPU|a generator on cpu"):
        wrong()
    assert (x + torch.tensor(1.0)).device == CUDA       # a number is no tensor to a device


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_check_runs_whole_as_on_a_device(cuda, monkeypatch, capsys):
    """Graphs included; memory and the driver's count of waits are made up."""
    for name, value in dict(is_available=True, get_device_name="none", synchronize=None,
                            reset_peak_memory_stats=None, max_memory_allocated=2 ** 30,
                            get_sync_debug_mode=0, set_sync_debug_mode=None).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    labels = ("llada", "fast_dllm, dual", "dual_diffusion", "cover")
    monkeypatch.setattr(benchmark, "SAMPLERS", {k: benchmark.SAMPLERS[k] for k in labels})
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(dlm_spec, "capture", graphs.capture)
    compiled = []
    monkeypatch.setattr(CudaGraphs, "__init__", lambda self, forward, init=CudaGraphs.__init__: (
        compiled.append(self), init(self, forward))[1])
    result = gpu_check.main(["--shape", "mini", "--gen-length", "8", "--compile",
                             "--dtype", "float32"])
    assert len(compiled) == 1 and len(compiled[0].canvases) >= 2
    fast = [r for r in result["rows"] if r["sampler"].endswith(", compiled")]
    assert len(fast) == 6 and all(r["same_tokens"] == 1 for r in fast)
    assert all(r["peak_gib"] == 1 for r in result["rows"])
