# SPDX-License-Identifier: MIT
"""Records decodes of the public samplers: the files `data/*_traces.json`.

    python tests/record_traces.py CLONES MODEL                  # minutes; replaces the files
    python tests/record_traces.py CLONES MODEL --out FOLDER     # leaves them as they are

MODEL is the folder of a stock Llama, as `load_denoiser` opens it. CLONES is a folder with
these repositories, cloned from github.com under their own names, each at this commit:

    ML-GSAI/LLaDA b7e6c35           NVlabs/Fast-dLLM 24cc59e    Feng-Hong/WINO-DLLM 9549a1d
    zhaoyMa/Saber 2f061e2           horseee/dKV-Cache 49a76fc

Prompts (as ids: the tokenizer must be the same), knobs and seeds are those of the files that
are there, and everything else is recorded anew; test_all_samplers.py says what it means. The
public code runs as it stands, on a CPU in fp64, one prompt at a time. What is adapted:

    the model   is wrapped: its logits of M and of ids past the tokenizer are -inf, and the ids
                that each forward is given are kept
    fast_dllm,  run on the LLaDA model of their own repository, with the weights under LLaDA's
    dkv         names, a bias of attn_out where there is one, and rotary embeddings without
                their "full precision", which is fp32; the others run on the stock Llama
    eos         the ids of EOS and EOT, which are numbers in the code, become the model's end
                of text and padding as the file is read
    dream       logits are rolled by one, which the code shifts back; with eps=-.01 one token
                is committed per forward; Gumbel-max takes the place of torch's Categorical
    imports     register nothing with the Auto classes of transformers, where two repositories
                want the same name, and compile nothing
"""
import argparse
import contextlib
import importlib.util
import io
import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from transformers import AutoConfig, AutoModel

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import dlm_spec  # noqa: E402

GIVEN = ("sampler", "prompt", "knobs", "seed", "top_p")     # of a trace; the rest is recorded


def public(root, file, ids=()):
    """The module in a file of a clone, which imports from the folder `root`. ids: pairs of
    an id that is a number in its text and the id to be there."""
    path, name = root / file, "_".join([root.name, *Path(file).with_suffix("").parts])
    text = path.read_text()
    for old, new in ids:
        assert str(old) in text, old
        text = text.replace(str(old), str(new))
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with (mock.patch.object(AutoConfig, "register"), mock.patch.object(AutoModel, "register"),
          mock.patch("torch.compile", lambda *_, **__: lambda f: f),
          mock.patch.object(sys, "path", [str(root), *sys.path])):
        exec(compile(text, str(path), "exec"), vars(module))
    return module


def llada_name(name):
    """LLaDA's name of a stock Llama's weight."""
    for theirs, ours in dlm_spec.LLADA_NAMES.items():
        if found := re.match(ours.replace(r"\1", r"(\d+)"), name):
            theirs = theirs.removeprefix("^").replace(r"(\d+)", r"\1").replace(r"\.", ".")
            return found.expand(theirs) + name[found.end():]
    raise KeyError(name)


def as_llada(cls, model):
    """A stock Llama as `cls`, a public LLaDAModelLM."""
    c = model.config
    assert c.head_dim * c.num_attention_heads == c.hidden_size and not c.mlp_bias
    no_ids = dict.fromkeys(("eos_token_id", "pad_token_id", "mask_token_id"))
    theirs = cls(cls.config_class(**dlm_spec.LLADA_MUST_BE | no_ids | dict(
        d_model=c.hidden_size, n_layers=c.num_hidden_layers, n_heads=c.num_attention_heads,
        n_kv_heads=c.num_key_value_heads, mlp_hidden_size=c.intermediate_size,
        vocab_size=c.vocab_size, embedding_size=c.vocab_size, rms_norm_eps=c.rms_norm_eps,
        rope_theta=c.rope_parameters["rope_theta"], rope_full_precision=False,
        max_sequence_length=c.max_position_embeddings, weight_tying=c.tie_word_embeddings,
        include_qkv_bias=c.attention_bias))).to(model.dtype).eval()
    if c.attention_bias:
        for block in theirs.model.transformer.blocks:
            bias = block.attn_out.weight.new_zeros(c.hidden_size)
            block.attn_out.bias = torch.nn.Parameter(bias)
    weights = model.state_dict()
    if c.tie_word_embeddings:
        del weights["lm_head.weight"]
    theirs.load_state_dict({llada_name(name): w for name, w in weights.items()})
    return theirs


class Watched:
    """A model as public code calls it, which keeps what each forward was `given`, and its
    canvas."""

    def __init__(self, denoiser, model=None, roll=0):
        self.denoiser, self.model, self.roll = denoiser, model or denoiser.model, roll
        self.given, self.canvases, self.positions = [], [], None

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, ids, attention_mask=None, position_ids=None, **more):
        self.given.append(ids.clone())
        self.canvases.append(ids.clone() if self.positions is None else
                             self.canvases[-1].masked_scatter(self.positions, ids))
        self.positions = None
        if torch.is_tensor(attention_mask):         # Dream gives a word
            more["attention_mask"] = attention_mask
        if position_ids is not None:                # WINO gives a row
            more["position_ids"] = position_ids[None]
        out = self.model(ids, **dict(use_cache=False, return_dict=True) | more)
        out.logits[:, :, self.denoiser.n_tokens:] = -torch.inf
        out.logits[:, :, self.denoiser.mask_id] = -torch.inf
        out.logits = out.logits.roll(self.roll, 1)
        return out

    def get_pos_rotary_embedding_cache(self, positions):
        """Here dKV-Cache says at which positions the tokens of the next forward are; before
        other forwards it does not, and they are given the whole canvas."""
        self.positions = positions
        self.model.get_pos_rotary_embedding_cache(positions)

    def steps(self, x, prompt):
        """What was decoded, with the forward at which each position stopped being M."""
        masked = torch.cat(self.canvases)[:, prompt.shape[1]:] == self.denoiser.mask_id
        return dict(tokens=x[0, prompt.shape[1]:].tolist(), commit_step=masked.sum(0).tolist(),
                    nfe=len(self.canvases))


class Recorder:
    """For each file a method, which gives the recorded part of a trace."""

    def __init__(self, clones, folder):
        self.denoiser = d = dlm_spec.load_denoiser(folder, device="cpu", dtype=torch.float64)
        ends = [(126081, d.eos_ids[0]), (126348, d.pad_id)]
        self.llada_code = public(clones / "LLaDA", "generate.py")
        self.eos_code = public(clones / "LLaDA", "generate.py", ends)
        self.fast_code = public(clones / "Fast-dLLM" / "llada", "generate.py")
        self.dream_code = public(clones / "Fast-dLLM" / "dream", "model/generation_utils.py")
        self.dkv_code = public(clones / "dKV-Cache",
                               "generation_utils/llada_dkv_cache_decode.py")
        self.wino = public(clones / "WINO-DLLM" / "LLaDA", "decoding.py").decoding_wino
        self.saber = public(clones / "Saber", "decoding.py").generate_with_saber
        self.fast_model = as_llada(self.fast_code.LLaDAModelLM, d.model)
        self.dkv_model = as_llada(self.dkv_code.LLaDAModelLM, d.model)

    def llada(self, prompt, knobs, code=None):
        """LLaDA's `generate`."""
        model = Watched(self.denoiser)
        return model.steps((code or self.llada_code).generate(model, prompt, **knobs), prompt)

    def eos(self, prompt, knobs):
        """The same, with the confidence of ends of text at -inf."""
        return self.llada(prompt, knobs | dict(confidence_eos_eot_inf=True), self.eos_code)

    def fast_dllm(self, prompt, knobs):
        """One of three functions. wasted: forwards with a cache for a block without M."""
        model, cache = Watched(self.denoiser, self.fast_model), knobs.pop("cache")
        name = f"generate_with_{cache}_cache" if cache else "generate"
        x, nfe = getattr(self.fast_code, name)(model, prompt, **knobs)
        blocks = [ids[:, :knobs["block_length"]] for ids in model.given
                  if ids.shape[1] < x.shape[1]]
        return dict(tokens=x[0, prompt.shape[1]:].tolist(), nfe=nfe,
                    wasted=sum(knobs["mask_id"] not in block for block in blocks))

    def dkv(self, prompt, knobs):
        """dKV-Cache's `generate`. positions: tokens that its forwards were given."""
        model, refresh = Watched(self.denoiser, self.dkv_model), knobs.pop("refresh")
        x = self.dkv_code.generate(model, None, prompt, enable_cache=True,
                                   cache_reloading_step=refresh, **knobs)
        return model.steps(x, prompt) | dict(positions=sum(i.numel() for i in model.given))

    @torch.no_grad()
    def dream(self, prompt, knobs, seed, top_p):
        """Dream's `_sample`."""
        model, generator = Watched(self.denoiser, roll=-1), torch.Generator().manual_seed(seed)

        def categorical(probs):
            return SimpleNamespace(
                sample=lambda: dlm_spec.gumbel_argmax(probs.log(), 1.0, generator))

        alg = {"low_confidence": "maskgit_plus", "margin": "topk_margin", "entropy": "entropy"}
        config = SimpleNamespace(
            alg=alg[knobs["remasking"]], temperature=knobs["temperature"], top_p=top_p,
            steps=knobs["gen_length"], max_length=prompt.shape[1] + knobs["gen_length"],
            eps=-.01, mask_token_id=knobs["mask_id"], top_k=None, alg_temp=None,
            return_dict_in_generate=False, output_history=False)
        with (mock.patch.object(self.dream_code.dists, "Categorical", categorical),
              contextlib.redirect_stdout(io.StringIO())):       # it prints its seconds
            x = self.dream_code.DreamGenerationMixin._sample(
                model, prompt, None, config, lambda i, x, logits: x,
                lambda i, x, logits: logits)
        return model.steps(x, prompt)

    def revocable(self, prompt, knobs, sampler):
        """WINO or Saber. remasks: [forward, position, token] of what a forward was given and
        the next no longer."""
        model, M = Watched(self.denoiser), knobs["mask_id"]
        x, nfe = getattr(self, sampler)(model, prompt, **knobs)
        shown = torch.cat([*(c[:, :x.shape[1]] for c in model.canvases), x])
        gone = ((shown[:-1] != M) & (shown[1:] == M)).nonzero().tolist()
        return dict(tokens=x[0, prompt.shape[1]:].tolist(), nfe=nfe,
                    remasks=[[i + 1, at, int(shown[i, at])] for i, at in gone])


def main(argv=None):
    """The command line."""
    cli = argparse.ArgumentParser(description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("clones", type=Path)
    cli.add_argument("model", type=Path)
    cli.add_argument("--out", type=Path, default=HERE / "data")
    args = cli.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(args.clones, args.model)
    for path in sorted((HERE / "data").glob("*_traces.json")):
        start, before, after = time.perf_counter(), json.loads(path.read_text()), []
        record = getattr(recorder, path.stem.removesuffix("_traces"))
        for trace in before:
            given = {k: trace[k] for k in GIVEN if k in trace}
            found = record(**given | dict(
                prompt=torch.tensor([trace["prompt"]]),
                knobs=trace["knobs"] | dict(mask_id=recorder.denoiser.mask_id)))
            assert {*given, *found} == {*trace}, path.name
            after.append(trace | found)
        text = ",\n".join(map(json.dumps, after))
        (args.out / path.name).write_text(f"[\n{text}\n]\n")
        print(f"{path.name}: {len(after)} traces in {time.perf_counter() - start:.0f} s, "
              f"{sum(map(dict.__eq__, before, after))} as they were", flush=True)


if __name__ == "__main__":
    main()
