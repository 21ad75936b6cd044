# SPDX-License-Identifier: MIT
"""The samplers of dlm_spec under EleutherAI's lm-evaluation-harness, as `--model dlm_spec`.

    python notebooks/lm_eval_dlm.py --model dlm_spec --tasks gsm8k --apply_chat_template \\
        --model_args pretrained=GSAI-ML/LLaDA-8B-Instruct,sampler=cover,threshold=.6,\\
    gen_length=256,block_length=128,batch_size=8,dtype=bfloat16

    accelerate launch notebooks/lm_eval_dlm.py ...                # a copy of the model per GPU
    torchrun --nproc-per-node 4 notebooks/lm_eval_dlm.py ... tp_plan=auto     # one on 4 GPUs

Every keyword of the sampler can stand in `model_args`; a name that nothing takes is a
ValueError. Needs `pip install lm-eval` (and `accelerate` for several GPUs or `device_map`).
"""
import dataclasses
import os
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import command_line
import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import simple_parse_args_string
from tqdm import tqdm
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

import dlm_spec

# Keywords for load_denoiser, or through it for from_pretrained; the first ones place the
# weights.
PLACING = ("device_map", "quantization_config", "tp_plan")
LOADING = (*PLACING, "device", "dtype", "mask_id", "shift", "revision", "cache_dir", "token",
           "subfolder", "local_files_only", "max_memory", "offload_folder", "tp_size")
SET_HERE = {"attention_mask", "gen_length", "temperature", "logits_processor", "generator",
            "callback", "history"}      # by this adapter, or by each request
COSTS = ("nfe", "positions", "tokens_per_forward")
REVISIONS = ("remasks", "effective_remasks", "replaces")


def warpers(temperature, top_k=None, top_p=None):
    """A LogitsProcessorList, or None, that drops what top_k, then top_p of softmax(logits /
    temperature) leave out (transformers' order; Dream has top_p first) and keeps the other
    logits as they are: the sampler itself divides by the temperature. At 0 nothing is
    dropped. Confidences are of what is left: where top_p leaves one token it is 1, and positions
    that are equally sure are filled from left to right."""
    def nucleus(x, logits):
        dropped = TopPLogitsWarper(top_p)(x, logits.float() / temperature).isneginf()
        return logits.masked_fill(dropped, -torch.inf)

    processors = [] if top_k is None else [TopKLogitsWarper(top_k)]
    processors += [] if top_p is None else [nucleus]
    return LogitsProcessorList(processors) if processors and temperature else None


def load(name, **loading):
    """load_denoiser with dtype as a str ("bfloat16")."""
    dtype = loading.pop("dtype", None)
    if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype is {dtype!r}, expected e.g. bfloat16 or float32")
    return dlm_spec.load_denoiser(
        name, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype, **loading)


def sampler_and_knobs(name, given):
    """A `sample_*` function of dlm_spec and the keywords to call it with.

    name: of dlm_spec.SAMPLERS, e.g. "cover". given: a dict of its knobs, in which rules and
    views are named (`verify=kl,tau=.5,view=cover`, see command_line.named_knobs); `drafter` is a
    checkpoint. Raises ValueError for anything that this sampler does not take.
    """
    if name not in dlm_spec.SAMPLERS:
        raise ValueError(f"sampler is {name!r}, expected one of {', '.join(dlm_spec.SAMPLERS)}")
    sampler = dlm_spec.SAMPLERS[name]
    if set_here := SET_HERE & given.keys():
        raise ValueError(f"model_args has {', '.join(sorted(set_here))}, which the harness sets")
    knobs = command_line.named_knobs(sampler, given)
    if isinstance(knobs.get("drafter"), str):
        knobs["drafter"] = load(knobs["drafter"])
    return sampler, knobs


@register_model("dlm_spec")
class DlmSpecLM(TemplateLM):
    """A masked-diffusion model and one decoder, as the harness sees a language model.

    Args (all of them can stand in --model_args):
        pretrained: folder, hub id or Denoiser; None: the embedded model. LOADING go along.
        sampler, knobs: see sampler_and_knobs.
        gen_length: G, the tokens of the canvas; default: the task's max_gen_toks, else 256.
        temperature, top_p, top_k: default: what the task asks for, greedy unless do_sample; what
            top_p does to the order: see warpers.
        batch_size: prompts per call of the sampler, and rows per forward of the likelihood.
        n_samples: Monte-Carlo samples of a likelihood. check_greedy: whether loglikelihood
            also decodes the answer greedily, for its second result (else False).
        seed: of request i: seed + i with a temperature; of every likelihood: seed, so that the
            options of a question are compared under the same masks.
    After a run `costs` holds, per generated text, a dict with nfe, positions,
    tokens_per_forward, remasks, effective_remasks (what did not come back) and replaces.
    """

    def __init__(self, pretrained=None, sampler="llada", *, gen_length=None, temperature=None,
                 top_p=None, top_k=None, batch_size=1, n_samples=128, check_greedy=True,
                 seed=0, max_batch_size=None, **knobs):
        super().__init__()
        loading = {k: knobs.pop(k) for k in LOADING if k in knobs}
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"batch_size is {batch_size!r}, expected a whole number from 1")
        if (top_p, top_k) != (None, None) and not temperature:
            raise ValueError("top_p and top_k change nothing without a temperature above 0")
        self.sampler, self.knobs = sampler_and_knobs(sampler, knobs)
        asked = dict(gen_length=gen_length, temperature=temperature, top_p=top_p, top_k=top_k)
        self.asked = {k: v for k, v in asked.items() if v is not None}
        self.batch_size, self.seed = int(batch_size), seed
        self.n_samples, self.check_greedy = n_samples, check_greedy
        self.costs, self.seconds, self.accelerator = [], 0.0, None
        self.about = {
            "sampler": sampler,
            **{k: str(v) for k, v in knobs.items()},
            **self.asked,
        }
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not loading.get("tp_plan"):
            loading["device"] = self._share(loading.get("device_map"))
        if not isinstance(pretrained, dlm_spec.Denoiser):
            pretrained = load(pretrained, **loading)
        elif loading and self.accelerator is None:
            raise ValueError(
                f"{', '.join(loading)} cannot change a model that is loaded already"
            )
        self.denoiser = pretrained
        self.tokenizer, self._device = self.denoiser.tokenizer, self.denoiser.device
        self.max_length = getattr(getattr(self.denoiser.model, "config", None),
                                  "max_position_embeddings", None) or 4096

    def _share(self, device_map):
        """One process of several, each with the whole model: the harness then gives it the
        requests rank, rank + world_size, ... and gathers the results on rank 0. Returns the
        device of this process."""
        if device_map is not None:
            raise ValueError(
                f"device_map spreads one model, but {os.environ['WORLD_SIZE']} "
                "processes were started, each for a whole one: drop one of the two"
            )
        from accelerate import Accelerator
        self.accelerator = Accelerator(cpu=not torch.accelerator.is_available())
        self._rank, self._world_size = (self.accelerator.process_index,
                                        self.accelerator.num_processes)
        return str(self.accelerator.device)

    @classmethod
    def create_from_arg_obj(cls, arg_dict, additional_config=None):
        """model_args win over the harness's --batch_size and --device. Its default device,
        cuda:0, means: wherever load_denoiser puts it."""
        more = {k: v for k, v in (additional_config or {}).items() if v is not None}
        if more.get("device") == "cuda:0" or any(k in arg_dict for k in PLACING):
            more.pop("device", None)
        return cls(**{**more, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string, additional_config=None):
        """create_from_arg_obj for a str like "pretrained=...,sampler=..."."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # How the harness exchanges results; called with several processes only.
    def all_gather(self, tensor):
        """(world_size,) of one number per process."""
        return self.accelerator.gather(tensor)

    def gather_object(self, obj, dst=0):
        """A list of every process's object on `dst`, None elsewhere."""
        out = [None] * self.world_size if self.rank == dst else None
        torch.distributed.gather_object(obj, out, dst=dst)
        return out

    def barrier(self):
        """Wait for all processes."""
        self.accelerator.wait_for_everyone()

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        """Messages ({"role", "content"}) -> the prompt as a str, for --apply_chat_template."""
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt)

    @property
    def tokenizer_name(self):
        """Names the harness's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    @property
    def eot_token_id(self):
        """The end of a text; None without one."""
        return (self.denoiser.eos_ids or (None,))[0]

    @property
    def prefix_token_id(self):
        """What stands before a text without a context: BOS, else the end of the text
        before."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def get_model_info(self):
        """What the results file says of this run, means per generated text (of this
        process)."""
        n = max(len(self.costs), 1)
        means = {k: sum(c[k] for c in self.costs) / n for k in COSTS + REVISIONS}
        return {**self.about, **means, "seconds": self.seconds / n}

    def tok_encode(self, string, add_special_tokens=None, **_):
        """Ids of a text, a list of int. By default a text that begins with the tokenizer's
        BOS, as a chat template's may, gets no second one."""
        bos = self.tokenizer.bos_token
        special = not (bos and string.startswith(bos))
        ids = self.tokenizer(string, add_special_tokens=special if add_special_tokens is None
                             else add_special_tokens)["input_ids"]
        if self.tokenizer.unk_token_id in ids:
            warnings.warn("a prompt has words the tokenizer does not know", stacklevel=2)
        return ids

    def generate_until(self, requests, disable_tqdm=False):
        """Texts for requests with args (prompt, gen_kwargs), a list of str, cut before the
        first of `until`. The canvas is filled whole before it is cut. ValueError for
        gen_kwargs that are not understood."""
        groups, texts = defaultdict(list), [None] * len(requests)
        for i, request in enumerate(requests):  # one canvas length and temperature per batch
            until, settings = generation(request.args[1], self.asked)
            ids = self.cut(self.tok_encode(request.args[0]), self.max_length - settings[0])
            groups[settings].append((len(ids), i, ids, until))
        bar = self._bar(disable_tqdm, total=len(requests), desc="decoding")
        for settings, jobs in groups.items():
            jobs.sort(key=lambda job: -job[0])  # little padding; what is too long fails first
            for at in range(0, len(jobs), self.batch_size):
                batch = jobs[at : at + self.batch_size]
                decoded = self._decode([ids for _, _, ids, _ in batch], settings,
                                       [i for _, i, _, _ in batch])
                for (_, i, _, until), text in zip(batch, decoded):
                    texts[i] = text[:min((text.find(s) for s in until if s and s in text),
                                         default=len(text))]
                    self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
                bar.update(len(batch))
        bar.close()
        return texts

    def _decode(self, prompts, settings, which):
        gen_length, temperature, *top = settings
        seeds = [self.seed + i * self.world_size + self.rank for i in which]
        start = time.perf_counter()
        out = self.sampler(
            self.denoiser, prompts, gen_length=gen_length, temperature=temperature,
            **self.knobs, logits_processor=warpers(temperature, *top),
            generator=[torch.Generator().manual_seed(s) for s in seeds])
        texts = self.denoiser.decode(out.generated)
        self.seconds += time.perf_counter() - start
        rows = zip(*(getattr(out, name).tolist() for name in COSTS))
        self.costs += [dict(zip(COSTS, row)) | revisions_of_row(out, i)
                       for i, row in enumerate(rows)]
        return texts

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        """[((context, continuation), ids, ids), ...] -> [(nats, greedy), ...]: the Monte-Carlo
        bound of dlm_spec.log_likelihood, and whether greedy decoding, one token per forward,
        writes the continuation (as in LLaDA's evaluation)."""
        results = []
        for texts, context, answer in self._bar(disable_tqdm, requests, desc="likelihood"):
            context = self.cut(context, self.max_length - len(answer))
            greedy = not answer
            if self.check_greedy and answer:
                out = dlm_spec.sample_llada(self.denoiser, [context], gen_length=len(answer),
                                            cfg_scale=self.knobs.get("cfg_scale", 0.0))
                greedy = out.generated[0].tolist() == answer
            results.append((self._bound(context, answer), greedy))
            self.cache_hook.add_partial("loglikelihood", texts, results[-1])
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """For requests with args (text,): the bound of log p(text) in nats, a list of float. A
        text beyond the model's length is cut by the chain rule: pieces of half that length,
        each given the one before it, which is still a lower bound under the model."""
        results, half = [], self.max_length // 2
        for request in self._bar(disable_tqdm, requests, desc="likelihood"):
            ids = [self.prefix_token_id] + self.tok_encode(request.args[0], False)
            step = half if len(ids) > self.max_length else len(ids)
            results.append(sum(self._bound(ids[max(at - half, 0) : at], ids[at : at + step])
                               for at in range(1, len(ids), step)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
        return results

    def _bound(self, context, answer):
        if not answer:
            return 0.0
        return float(dlm_spec.log_likelihood(
            self.denoiser, [context], [answer], n_samples=self.n_samples,
            batch_size=self.batch_size, cfg_scale=self.knobs.get("cfg_scale", 0.0),
            generator=torch.Generator().manual_seed(self.seed)))

    def _bar(self, quiet, *args, **kw):
        """One progress bar for all processes; TQDM_DISABLE=1 in the environment hides it
        too."""
        return tqdm(*args, **kw, **({"disable": True} if quiet or self.rank > 0 else {}))

    def cut(self, ids, room):
        """The last `room` ids, with a warning when there are more."""
        if len(ids) > room:
            warnings.warn(
                f"a prompt of {len(ids)} tokens was cut to its last {room}", stacklevel=2
            )
        return ids[-room:]


def revisions_of_row(out, row):
    """How many tokens of a row were taken back, by kind: a dict of REVISIONS."""
    own = dataclasses.replace(out, revisions=[r for r in out.revisions if r.row == row])
    found = dlm_spec.revision_statistics(own)
    return {k: found[k] for k in REVISIONS}


def generation(gen_kwargs, asked):
    """A request's gen_kwargs -> until (a list of str), (gen_length, temperature, top_k,
    top_p).

    `asked`, from model_args, goes first. Without do_sample the decoding is greedy, whatever
    the request's temperature. Raises ValueError on a keyword that would be ignored.
    """
    given = dict(gen_kwargs)
    until = given.pop("until", None) or []
    lengths = [given.pop(k, None) for k in ("max_gen_toks", "max_new_tokens", "max_tokens")]
    sampled = given.pop("do_sample", "temperature" in given) and given.get("temperature") != 0
    own = {k: given.pop(k, None) for k in ("temperature", "top_k", "top_p")}
    if extra := {k for k, v in given.items() if (k, v) != ("num_beams", 1)}:
        raise ValueError(f"gen_kwargs has {', '.join(sorted(extra))}, which no sampler takes")
    own = {k: v for k, v in own.items() if v is not None} if sampled else {}
    own = {"temperature": 1.0 if sampled else 0.0, **own, **asked}
    length = own.get("gen_length") or next((n for n in lengths if n is not None), 256)
    return ([until] if isinstance(until, str) else list(until),
            (int(length), float(own["temperature"]), own.get("top_k"), own.get("top_p")))


if __name__ == "__main__":
    cli_evaluate()
