# SPDX-License-Identifier: MIT
"""dlm_spec: decoding for masked-diffusion language models, one module to read and copy from.

A masked-diffusion model sees a *canvas*, a sequence in which some tokens are a mask M, and
gives for every mask a distribution over the token that belongs there. Text is made by filling
the G masks behind a prompt over several forward passes.

    denoiser = load_denoiser()                  # the embedded model; or LLaDA, Dream, a folder
    ids, mask = denoiser.encode(EXAMPLE)        # "Mia has 12 shells. She finds 5 more ..."
    out = sample_llada(denoiser, ids, attention_mask=mask, gen_length=64)
    print(denoiser.decode(out.generated)[0])  # 17 = 12 + 5; 17 - 3 = 14; 14 * 2 = 28; #### 28

Sections 1 to 4 are a whole sampler; each later one adds one idea. `python dlm_spec.py --copy
sample_cover` prints one sampler, with all that it needs, as a file that stands alone.

Papers and their public code
    [1] LLaDA, arXiv 2502.09992, ML-GSAI/LLaDA         [3] MDLM, arXiv 2406.07524
    [2] Dream, arXiv 2508.15487, DreamLM/Dream         [4] on Gumbel noise, arXiv 2409.02908
    [5] Fast-dLLM, arXiv 2505.22618, NVlabs/Fast-dLLM  [7] DualDiffusion, arXiv 2604.05250
    [6] dKV-Cache, arXiv 2505.15781, horseee/dKV-Cache [9] COVER, arXiv 2602.06161
    [8] WINO, arXiv 2507.18578, Feng-Hong/WINO-DLLM    [10] Saber, zhaoyMa/Saber

Glossary
    B, L, P, G, V    batch; canvas length L = P prompt + G generated; vocabulary size
    R                rows of the batch that take part in a forward
    x, M             (B, L) canvas of token ids; the mask id          x_t, [MASK] in [1]
    ask              (B, L) bool, where logits are read. What belongs there is flat, (N, ...),
                     row by row: v = `y[ask]`, put back by `y.masked_scatter(ask, v)`
    NFE              forward passes: how often a row's canvas went through the model
    K                drafter forwards between two verifications       K in [7]
    seeds            committed tokens that a forward checks again     S in [9]
    u, d_in, d_out   a seed's uncertainty; how much masks attend to it, it to new tokens
"""
import functools
import inspect
import itertools
import json
import math
import os
import re
import sys
import warnings
from collections import namedtuple
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import transformers
from einops import rearrange
from huggingface_hub import constants, get_session
from safetensors import SafetensorError
from torch import Tensor

# -------------------------------------------------------------------------------------------
# 1. The denoiser: canvas in, logits of the asked positions out.

def bidirectional_attention(module, q, k, v, attention_mask=None, scaling=None, dropout=0.0,
                            kv=None, softcap=None, s_aux=None, sliding_window=None, **_):
    """Attention for unedited models of transformers, whose causal mask padding_mask replaces.
    q: (R, H, n, d); k, v: (R, H_kv, n, d), after the rotary embedding. attention_mask: bool,
    True where a query may look, broadcastable to (R, H, n, columns); None: everywhere. kv: as
    given to `model(...)`, see KVCache. Returns (R, n, H, d) and None."""
    refuse((softcap, s_aux, sliding_window) != (None, None, None), f"{type(module).__name__} "
           "wants a soft cap, attention sinks or a sliding window: it has no full attention")
    if kv is None:
        return sdpa(q, k, v, attention_mask, scaling, dropout).transpose(1, 2), None
    out = kv.attend(module.layer_idx, q, k, v, attention_mask, scaling)
    return out.transpose(1, 2), None

def sdpa(q, k, v, mask=None, scaling=None, dropout=0.0):
    """softmax(q k^T scaling) v over the columns that `mask` allows."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and mask is not None and q.is_cuda:  # fused kernels take groups or a mask
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout,
                                          scale=scaling, enable_gqa=q.shape[1] != k.shape[1])

def padding_mask(*, attention_mask=None, **_):
    """Called by transformers in place of its causal mask: (R, n), 0 on padding, becomes bool
    (R, 1, 1, n), what is seen; None stays None: everything."""
    return None if attention_mask is None else attention_mask.bool()[:, None, None]

transformers.AttentionInterface.register("dlm_spec", bidirectional_attention)
transformers.AttentionMaskInterface.register("dlm_spec", padding_mask)

class Denoiser:
    """A masked-diffusion model as a function of the canvas.
    Args:
        model: a transformers causal LM (put into eval mode and the `dlm_spec` attention), or
            any callable `model(input_ids=, attention_mask=, position_ids=, use_cache=)` with a
            result that has `.logits` (R, n, V); with caches also `kv=`, to call `kv.attend`.
        mask_id: the id of M, never predicted; nor are ids >= n_tokens, which are mere padding.
        eos_ids: ids that end a text, the end-of-sequence token first.
        pad_id: filler of left-padded prompts (default: the first of eos_ids, else 0).
        shift: True for a *shifted* model, which predicts position i at the output of i-1 [2].
        tokenizer: for `encode` and `decode` alone, see section 10."""

    def __init__(self, model, mask_id, *, eos_ids=(), pad_id=None, n_tokens=None, shift=False,
                 tokenizer=None):
        if hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation("dlm_spec")
            model.eval()
        self.model, self.mask_id, self.shift = model, mask_id, shift
        self.eos_ids, self.n_tokens, self.tokenizer = tuple(eos_ids), n_tokens, tokenizer
        self.pad_id = pad_id if pad_id is not None else (*self.eos_ids, 0)[0]
        forward = getattr(model, "forward", model)
        self.picks_logits = "logits_to_keep" in inspect.signature(forward).parameters
        embeddings = getattr(model, "get_input_embeddings", lambda: None)()
        self.n_embeddings = None if embeddings is None else embeddings.weight.shape[0]
        self.config = getattr(model, "config", None)
        check_denoiser(self)
        self.passes_kv = passes_kv(self)

    @property
    def device(self):
        """Where the canvas has to be."""
        return next(iter(getattr(self.model, "parameters", tuple)()), torch.empty(0)).device

    def __call__(self, x, ask, attention_mask=None):
        """Logits (N, V) of the positions `ask` of canvases x, both (R, L), after `ban`.
        attention_mask: (R, L), 0 on padding; None: no padding."""
        _, look, position_ids, read_at = self.layout(x, attention_mask)
        row, column = ask.nonzero(as_tuple=True)
        return self.forward(x, position_ids, look, row, read_at[row, column])

    def layout(self, x, attention_mask):
        """For canvases x (R, L): `visible` (R, L), what is no padding; the same for the model,
        (R, 1, 1, L), or None, which is faster; position ids (R, L); `read_at` (R, L), the
        column where each is read: its own, if shifted the one before (but a row's first)."""
        none = attention_mask is None
        visible = torch.ones_like(x, dtype=torch.bool) if none else attention_mask.bool()
        position_ids = (visible.cumsum(1) - 1).clamp(min=0)
        column = torch.arange(x.shape[1], device=x.device)
        read_at = column - (position_ids > 0).long() * self.shift
        return visible, None if none else visible[:, None, None], position_ids, read_at

    def read_columns(self, positions, visible):
        """(R, L) bool: the columns where these `positions` (R, L) are read, as in layout."""
        if not self.shift:
            return positions
        first = visible & (visible.cumsum(1) == 1)
        return (F.pad(positions[:, 1:], (0, 1)) | (positions & first)) & visible

    def forward(self, tokens, position_ids, look, row, column, kv=None):
        """The only call of the model. tokens, position_ids: (R, n). look: bool, what each
        token sees, broadcastable to (R, 1, n, columns); None: all. row, column: (N,), where
        logits (N, V) are read; the vocabulary head runs on the columns that any row reads."""
        extra = {} if kv is None else {"kv": kv}
        if self.picks_logits:
            columns, column = column.unique(return_inverse=True)
            head = self.model.get_output_embeddings()
            extra["logits_to_keep"] = columns.to(head.weight.device)
        logits = self.model(input_ids=tokens, attention_mask=look, position_ids=position_ids,
                            use_cache=False, **extra).logits
        logits = logits[row.to(logits.device), column.to(logits.device)]
        return self.ban(logits.to(tokens.device))

    def ban(self, logits):
        """Logits (N, V), M and ids >= n_tokens at -inf. ValueError on NaN, +inf, all -inf."""
        logits[:, self.n_tokens or logits.shape[1]:] = -torch.inf
        logits[:, self.mask_id:self.mask_id + 1] = -torch.inf
        refuse(not logits.amax(1).isfinite().all(),
               "the logits cannot be used: a row holds NaN or +inf, or only -inf")
        return logits


# -------------------------------------------------------------------------------------------
# 2. Decoding: what all samplers share.

class Decode:
    """A batch of canvases being filled. Every sampler makes one from the keywords that all
    samplers take (their `**common`). For each of its `blocks` it repeats `forward` and a
    `step` with what it chooses to commit by `score`, and returns the `output`.
    Args:
        prompt: (B, P) or (P,) ids, or a list of rows, which are padded on the left. M inside
            is a hole, filled too. attention_mask: (B, P), 0 on left padding.
        gen_length: G, tokens to generate, any number; 0 only fills the holes of the prompt.
        block_length: blocks are filled in turn, prompt holes with the first. None: one block.
        temperature: 0 takes the argmax, else Gumbel-max sampling.
        suppress_eos: eos_ids[0] is never emitted (logit -inf).
        postpone_eos: eos_ids come last in a block (confidence -inf: by threshold one a forward).
        early_stop: after a block with an eos a row is finished; the rest becomes eos_ids[0].
        logits_processor: transformers' LogitsProcessor(List), called with the ids and logits
            (n, V) of one row at a time, without its padding.
        generator: a torch.Generator, or a list of one per row: equal draws in any batch.
        callback: called after every forward with a dict: x (the canvas, to read only),
            committed, confidence, nfe, calls, prompt_length. If it returns True (no tensor),
            all rows stop there, and what is not filled stays M. history: keep all canvases.
    Attributes, (B, L) each: x, the canvas; visible, what is no padding; masks, what is to
    fill. A forward leaves: asked, and the logits (N, V) there; checked, and the logits there,
    judged (C, V); tokens, the predictions, x where not asked; confidence in them, 1 where not
    asked; score, by which samplers choose: the confidence, but -inf for a postponed eos."""

    def __init__(self, denoiser, prompt, *, attention_mask=None, gen_length=128,
                 block_length=32, temperature=0.0, suppress_eos=False, postpone_eos=False,
                 early_stop=False, logits_processor=None, generator=None, callback=None,
                 history=False):
        check(gen_length=gen_length, block_length=block_length, temperature=temperature,
              suppress_eos=suppress_eos, postpone_eos=postpone_eos, early_stop=early_stop)
        refuse(len(denoiser.eos_ids) < suppress_eos + (postpone_eos or early_stop),
               "suppress_eos, postpone_eos and early_stop need a denoiser with eos_ids, "
               "and one that can still be emitted")
        start = start_canvas(denoiser, prompt, attention_mask, gen_length)
        self.x, self.visible, self.P = start
        (B, L), device = self.x.shape, self.x.device
        self.one_each = isinstance(generator, (list, tuple))  # a generator per row
        n = len(generator) if self.one_each else B
        refuse(n != B, f"generator is a list of {n}, the batch has {B} rows")
        step = block_length or max(gen_length, 1)
        self.ends = [min(s + step, L) for s in range(self.P, L, step)] or [L]  # or only holes
        self.attention_mask = None if self.visible.all() else self.visible
        self.column = torch.arange(L, device=device)
        self.denoiser, self.early_stop, self.stopped = denoiser, early_stop, False
        self.suppress_eos, self.postpone_eos = suppress_eos, postpone_eos
        self.logits_processor, self.callback = logits_processor, callback
        self.choice = dict(temperature=temperature, generator=generator)  # for predict
        self.calls, self.log, self.history = 0, [], [self.x] if history else None
        self.nfe = self.positions = torch.zeros(B, dtype=torch.long, device=device)
        self.commit_step = torch.zeros_like(self.x)
        self.commit_confidence = torch.ones(B, L, device=device)

    @property
    def masks(self):
        """(B, L) bool, what is still to fill."""
        return self.visible & (self.x == self.denoiser.mask_id)

    def blocks(self):
        """(B, L) bool of each block in turn, with the holes before it that are still open."""
        for start, end in zip([self.P, *self.ends], self.ends):
            inside = (self.masks.cumsum(1) > 0) | (self.column >= start)
            yield self.visible & (self.column < end) & inside
            if self.early_stop and not self.stopped:
                self.stop_at_eos(end)

    def forward(self, ask, form=None, checked=None, *, live=None, denoiser=None, forwards=1,
                **how):
        """One forward of the rows that ask or check anything; False if none does or a callback
        has stopped. checked: (B, L) bool, tokens to judge. form: a function that runs the
        model on R rows in another way, such as guided, windowed or shadowed: form(denoiser, x,
        ask, attention_mask, checked=, rows=, **how) -> logits (N, V) and (C, V), positions
        processed (R,), with the rows (R,) of each tensor. live: (B,) bool, the rows to forward
        instead. denoiser: instead of its own. forwards: counts as so many."""
        checked = torch.zeros_like(ask) if checked is None else checked
        live = (ask | checked).any(1) if live is None else live
        rows, denoiser = live.nonzero()[:, 0], denoiser or self.denoiser
        if len(rows) == 0 or self.stopped:
            return False
        inputs = [t if t is None else t[rows] for t in (self.x, ask, self.attention_mask)]
        if form is None:
            logits, cost = denoiser(*inputs), self.visible[rows].sum(1)
            judged = logits[:0]
        else:
            how = dict(how, checked=checked)
            how = {k: t[rows] if isinstance(t, Tensor) else t for k, t in how.items()}
            logits, judged, cost = form(denoiser, *inputs, rows=rows, **how)
        self.nfe = self.nfe.index_add(0, rows, torch.full_like(rows, forwards))
        self.positions = self.positions.index_add(0, rows, cost)
        self.calls += 1
        self.asked, self.logits = ask, self.allowed(ask, logits)
        self.checked, self.judged = checked, self.allowed(checked, judged)
        whose = ask.nonzero()[:, 0] if self.one_each else None
        x0, c = predict(self.logits, rows=whose, **self.choice)
        self.tokens = self.x.masked_scatter(ask, x0)
        self.confidence = self.score = self.spread(ask, c, 1.0)
        if self.postpone_eos:
            self.score = self.score.masked_fill(is_eos(self.tokens, denoiser), -torch.inf)
        return True

    def allowed(self, where, logits):
        """The logits (n, V) of the positions `where`, without what may not be emitted."""
        if self.suppress_eos:
            logits[:, self.denoiser.eos_ids[0]] = -torch.inf
        if self.logits_processor is None or len(logits) == 0:
            return logits
        rows = zip(self.x, self.visible, logits.split(where.sum(1).tolist()))
        return self.denoiser.ban(torch.cat([
            self.logits_processor(x[visible].expand(len(part), -1), part)
            for x, visible, part in rows if len(part)]))

    def spread(self, where, values, fill):
        """Values (n,) of the positions `where` as a (B, L), `fill` elsewhere."""
        return values.new_full(self.x.shape, fill).masked_scatter(where, values)

    def step(self, commit, remask=None, replace=None):
        """After a forward: put its tokens where `commit` or `replace` (B, L) is True and M
        where `remask` is; keep the record; call back."""
        filled = commit if replace is None else commit | replace
        before, self.x = self.x, torch.where(filled, self.tokens, self.x)
        self.log += [("replace", self.nfe, before, replace),
                     ("commit", self.nfe, self.x, filled),
                     ("remask", self.nfe, self.x, remask)]
        if remask is not None:
            self.x = self.x.masked_fill(remask, self.denoiser.mask_id)
        confidence = self.confidence.float()
        self.commit_step = torch.where(filled, self.nfe[:, None], self.commit_step)
        self.commit_confidence = torch.where(filled, confidence, self.commit_confidence)
        if self.history is not None:
            self.history.append(self.x)
        if self.callback is not None:
            self.stopped = self.callback(dict(
                x=self.x, committed=filled, confidence=self.confidence, nfe=self.nfe,
                calls=self.calls, prompt_length=self.P)) is True

    def stop_at_eos(self, end):
        """All behind a row's first eos before `end` becomes eos_ids[0] and counts as given."""
        eos = is_eos(self.x, self.denoiser) & (self.column >= self.P) & (self.column < end)
        behind = eos.cumsum(1) > eos
        self.commit_step = self.commit_step.masked_fill(behind, 0)
        self.commit_confidence = self.commit_confidence.masked_fill(behind, 1.0)
        self.x = self.x.masked_fill(behind, self.denoiser.eos_ids[0])
        if self.history is not None:
            self.history[-1] = self.x

    def output(self):
        """The DecodeOutput."""
        before_eos = is_eos(self.x[:, self.P:], self.denoiser).cumsum(1) == 0
        n = (before_eos & ~self.masks[:, self.P:]).sum(1)
        return DecodeOutput(
            self.x, self.P, self.nfe, self.positions, self.calls, n / self.nfe.clamp(min=1),
            self.commit_step, self.commit_confidence, revisions_of(self.log), self.history)


# -------------------------------------------------------------------------------------------
# 3. Choosing: which token, how sure, and which masks to commit.

def predict(logits, *, temperature=0.0, remasking="low_confidence", tempered_confidence=False,
            generator=None, rows=None):
    """Token x0 and confidence, (N,) each, by logits (N, V); confidence without temperature, as
    LLaDA [1]; `tempered_confidence`: with it, as Dream [2]. rows: see draw."""
    x0 = gumbel_argmax(logits, temperature, generator, rows)
    if tempered_confidence:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return x0, confidence_of(logits, x0, remasking, generator, rows)

def gumbel_argmax(logits, temperature, generator=None, rows=None):
    """(N,) samples of softmax(logits / temperature) by the Gumbel-max trick, at 0 argmax. In
    log space no logit overflows; in float64, as truncated noise lowers the temperature [4]."""
    if temperature == 0:
        return logits.max(-1).indices       # argmax, at a third of its time on a CPU
    u = draw(logits.shape, generator, rows, dtype=torch.float64, device=logits.device)
    noise = u.log_().neg_().log_().neg_()   # -log(-log u), in place: the one (N, V) in float64
    return noise.add_(logits, alpha=1 / temperature).max(-1).indices

def confidence_of(logits, x0, remasking="low_confidence", generator=None, rows=None):
    """How sure logits (N, V) are of x0: (N,), float32 or better: `low_confidence`, probability
    [1]; `margin`, largest - second; `entropy`, -entropy in nats [2]; `random`, uniform."""
    if remasking == "random":
        return draw(x0.shape, generator, rows, dtype=torch.float32, device=logits.device)
    if remasking == "low_confidence":
        return by_rows(lambda p, token: p.gather(1, token[:, None])[:, 0], logits, x0)
    if remasking == "margin":
        two = by_rows(lambda p: p.topk(min(2, p.shape[1]), dim=1).values, logits)
        return two[:, 0] - two[:, 1:].sum(1)
    return -by_rows(entropy_of, logits)

def top_k(score, ask, k):
    """(B, L) bool: each row's k (B,) best candidates `ask` by score (B, L), of equals the
    first; all of a row that has fewer, none for k <= 0."""
    order = score.masked_fill(~ask, -torch.inf).argsort(dim=1, descending=True, stable=True)
    # A candidate at -inf must not lose to a non-candidate: sort once more, candidates first.
    order = order.gather(1, ask.gather(1, order).to(torch.int8)
                         .argsort(dim=1, descending=True, stable=True))
    first = torch.arange(ask.shape[1], device=ask.device) < k[:, None]
    return torch.zeros_like(ask).scatter(1, order, first) & ask


# -------------------------------------------------------------------------------------------
# 4. The LLaDA sampler.

@torch.no_grad()
def sample_llada(denoiser, prompt, *, steps=None, block_length=None,
                 remasking="low_confidence", tempered_confidence=False, cfg_scale=0.0,
                 **common):
    """Fill the canvas block by block, a fixed quota of the surest tokens per forward (LLaDA
    [1]). Unlike the public code it takes unequal batches, a short last block and any number of
    steps, removes M and padded ids before the softmax, by which near-ties may fall otherwise
    (as in all samplers here), and postpones eos at any temperature with no effect on other
    confidences (there at 0 they lose EOS; above 0 nothing is done). At a temperature,
    low_confidence, like any threshold, does not sample from the model's distribution: it looks
    at the drawn tokens and prefers likely ones. The other orders do, one token per forward.
    Args:
        steps: forwards over all blocks (default: one token per forward).
        block_length: default: one block. tempered_confidence: see predict.
        remasking: which masks stay: low_confidence, small margin, high entropy or random.
        cfg_scale: classifier-free guidance, see guided.
        common: what all samplers take: gen_length, attention_mask, temperature...: see Decode.
    Returns a DecodeOutput; nfe <= steps, twice that with guidance."""
    check(remasking=remasking, cfg_scale=cfg_scale, steps=steps,
          tempered_confidence=tempered_confidence)
    run = Decode(denoiser, prompt, block_length=block_length, **common)
    refuse(tempered_confidence and (run.choice["temperature"] == 0 or remasking == "random"),
           "tempered_confidence changes nothing at temperature 0 or with remasking='random'")
    run.choice |= dict(remasking=remasking, tempered_confidence=tempered_confidence)
    guidance = {} if cfg_scale == 0 else dict(form=guided, forwards=2, scale=cfg_scale,
                                              given=run.visible & ~run.masks)
    for block, block_steps in zip(run.blocks(), steps_per_block(steps, run)):
        n = (block & run.masks).sum(1)
        for quota in quota_schedule(n, block_steps or max(int(n.max()), 1)).unbind(1):
            if not run.forward(block & run.masks, **guidance):
                break
            run.step(top_k(run.score, run.asked, quota))
    return run.output()

def quota_schedule(n, steps):
    """(B, steps): how many of n (B,) masks to commit per step: 10 over 4 -> 3 3 2 2 [1]."""
    step = torch.arange(steps, device=n.device)
    return n[:, None] // steps + (step < n[:, None] % steps)

def steps_per_block(steps, run):
    """`steps` over the blocks, the remainder one each to the first; None for each if None."""
    n = len(run.ends)
    if steps is None:
        return [None] * n
    refuse(steps < n, f"steps is {steps}, but there are {n} blocks, which need one each")
    if steps > (masks := int(run.masks.sum(1).max())):
        warnings.warn(f"steps is {steps}, but no row has more than {masks} masks, and each "
                      "forward fills at least one: the rest is not needed", stacklevel=2)
    return quota_schedule(torch.tensor([steps]), n)[0].tolist()

def guided(denoiser, x, ask, attention_mask=None, *, given, scale, checked=None, rows=None):
    """Classifier-free guidance [1]: u + (scale + 1)(c - u), c being the logits of x (R, L) and
    u those with the `given` (R, L) positions masked. A form for Decode.forward."""
    both = torch.cat([x, x.masked_fill(given, denoiser.mask_id)])
    mask = None if attention_mask is None else attention_mask.repeat(2, 1)
    c, u = denoiser(both, ask.repeat(2, 1), mask).chunk(2)
    cost = 2 * denoiser.layout(x, attention_mask)[0].sum(1)
    return denoiser.ban(u + (scale + 1) * (c - u)), c[:0], cost

def draw(shape, generator, rows, *, dtype, device):
    """Uniform numbers (N, ...) in [0, 1) by a torch.Generator, None, or a list of one for each
    row of the batch; rows (N,) then says which row each number is for."""
    if isinstance(generator, (list, tuple)):
        counts = torch.bincount(rows, minlength=len(generator)).tolist()
        return torch.cat([draw((n, *shape[1:]), g, None, dtype=dtype, device=device)
                          for n, g in zip(counts, generator)])
    where = device if generator is None else generator.device
    return torch.rand(shape, generator=generator, dtype=dtype, device=where).to(device)

def by_rows(f, logits, *more, size=32):
    """f(p, ...) of the softmax p of logits (N, V), float32 or better, and the rows of `more`,
    a few at a time: no second (N, V). (Near 1 exp(logit - logsumexp) is too coarse.)"""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    parts = zip(*(t.split(size) for t in (logits, *more)))
    return torch.cat([f(rows.to(dtype).softmax(1), *rest) for rows, *rest in parts])

def entropy_of(p):
    """Entropy in nats of probabilities (n, V): (n,). 0 log 0 is 0."""
    return -p.log().clamp_(min=-1e4).mul_(p).sum(1)  # half the time of torch.special.entr

def is_eos(x, denoiser):
    """(B, n) bool: True where ids x are eos ids."""
    return functools.reduce(torch.logical_or, [x == i for i in denoiser.eos_ids], x != x)


# -------------------------------------------------------------------------------------------
# 5. Caches: a forward of some columns, which reads the keys and values of the others.

class KVCache:
    """Keys and values of canvases like x (B, L). `k[layer]`, `v[layer]`: (B, H_kv, L, d),
    after the rotary embedding (never rotated again), on the layer's own device. shown: (B, L),
    the tokens that they were computed from, -1 for none."""

    def __init__(self, x):
        self.k, self.v, self.shown, self.filled = {}, {}, torch.full_like(x, -1), False

    def begin(self, rows, columns, tokens, hold=None):
        """The next forward stores what it computes for tokens (R, n) in the rows (R,) at
        `columns` (R, n; see columns_of; None: all L), but not for those to `hold` (R, n), nor
        for what the model gets behind them. Returns the tokens for the model."""
        self.rows = None if len(rows) == len(self.shown) else rows
        self.columns, self.n, self.hold, self.filled = columns, tokens.shape[1], hold, True
        at = rows if columns is None else (rows[:, None], columns)
        self.shown[at] = tokens if hold is None else torch.where(hold, self.shown[at], tokens)
        return tokens

    def attend(self, layer, q, k, v, look, scaling):
        """Called by the attention: stores k and v, then attends to the whole canvas."""
        k, v = self.store(self.k, layer, k), self.store(self.v, layer, v)
        return sdpa(q, k, v, look, scaling)

    def store(self, side, layer, fresh):
        """Put `fresh` (R, H_kv, n, d) into side[layer], side being self.k or self.v. Returns
        what is attended to: the rows' canvases (R, H_kv, L, d), and what stands behind."""
        fresh, behind = fresh[:, :, :self.n], fresh[:, :, self.n:]
        if layer not in side:
            B, L = self.shown.shape
            side[layer] = fresh.new_zeros(B, fresh.shape[1], L, fresh.shape[3])
        rows = slice(None) if self.rows is None else self.rows.to(fresh.device)
        whole, at = side[layer][rows], None  # of all rows: the tensor itself, no copy
        if self.columns is not None:
            at = self.columns.to(fresh.device)[:, None, :, None].expand_as(fresh)
        if self.hold is not None:
            stored = whole if at is None else whole.gather(2, at)
            fresh = torch.where(self.hold.to(fresh.device)[:, None, :, None], stored, fresh)
        whole = fresh if at is None else whole.scatter_(2, at, fresh)
        if self.rows is not None:
            side[layer][rows] = whole
        elif at is None:
            side[layer] = whole
        return torch.cat([whole, behind], 2) if behind.shape[2] else whole

def windowed(denoiser, x, ask, attention_mask=None, *, kv=None, window=None, checked=None,
             rows=None):
    """A forward of some columns; keys and values of all others come from the cache. x, ask,
    attention_mask: as in Denoiser.__call__. kv: a KVCache to read and fill, if any. window:
    (R, L) bool, the columns to recompute besides those where something is read; None: all.
    checked: (R, L) bool, more positions to read. rows: (R,), which rows of the batch these
    are; None: all. Returns logits (N, V) and (C, V) and the positions processed (R,)."""
    refuse(kv and not denoiser.passes_kv, f"{type(denoiser.model).__name__} does not pass `kv`"
           " on to its attention: only samplers without a cache can use it")
    refuse(window is not None and not (kv and kv.filled),
           "a window needs a kv that an earlier forward has filled")
    rows = torch.arange(len(x), device=x.device) if rows is None else rows
    visible, look, position_ids, read_at = denoiser.layout(x, attention_mask)
    checked = torch.zeros_like(ask) if checked is None else checked
    parts = ask.nonzero(), checked.nonzero()
    row, column = torch.cat(parts).T
    at, columns, cost = read_at[row, column], None, visible.sum(1)
    if window is not None:
        window = window | ask | checked
        window = (window | denoiser.read_columns(window, visible)) & visible
        columns, cost = columns_of(window)[0], window.sum(1)
        at = (window.cumsum(1) - 1)[row, at]  # canvas column -> token of this forward
        x, position_ids = x.gather(1, columns), position_ids.gather(1, columns)
    if kv is not None:
        x = kv.begin(rows, columns, x)
    logits = denoiser.forward(x, position_ids, look, row, at, kv)
    return *logits.split([*map(len, parts)]), cost

def columns_of(flag):
    """(R, L) bool -> (R, n): the columns of each row's True in order, n those of the fullest
    row, short rows padded by their first; and (R, n) bool, which are no padding."""
    n = int(flag.sum(1).max())
    columns = flag.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :n]
    real = torch.arange(n, device=flag.device) < flag.sum(1, keepdim=True)
    return torch.where(real, columns, columns[:, :1]), real

def window_of(cache, block, pending=None):
    """What a cache recomputes after a block's first forward: None, all; "dual", the block;
    "prefix", all from there on [5]; "dkv", `pending`: masks now or in the last input [6]."""
    return {None: None, "dual": block, "prefix": block.cumsum(1) > 0, "dkv": pending}[cache]

@torch.no_grad()
def sample_fast_dllm(denoiser, prompt, *, threshold=None, factor=None, cache=None, **common):
    """Commit all tokens the model is sure of; reuse keys and values elsewhere (Fast-dLLM [5]).
    Args:
        threshold: commit what has at least this confidence, always the best (default 0.9).
        factor: instead of a threshold, accept by rank, see by_factor.
        cache: None, "dual" or "prefix": what is recomputed, see window_of.
        common: what all samplers take: gen_length, block_length, temperature...: see Decode.
    Returns a DecodeOutput; nfe <= masks."""
    refuse(None not in (threshold, factor), "threshold and factor were given: pass one")
    check(threshold=threshold, factor=factor, cache=cache)
    run = Decode(denoiser, prompt, **common)
    for block in run.blocks():
        kv, window = KVCache(run.x) if cache else None, None
        while run.forward(block & run.masks, windowed, kv=kv, window=window):
            run.step(above_threshold(run.score, run.asked, threshold) if factor is None
                     else by_factor(run.score, run.asked, factor))
            window = window_of(cache, block)
    return run.output()

def above_threshold(score, ask, threshold=None):
    """Candidates with score >= threshold (0.9), and each row's best one (Fast-dLLM [5])."""
    return (ask & (score >= (0.9 if threshold is None else threshold))) | best(score, ask)

def best(score, ask):
    """(B, L) bool: the best candidate of each row that has any."""
    return top_k(score, ask, torch.ones_like(ask[:, 0]).long())

def by_factor(score, ask, factor):
    """The n surest candidates, c(i) >= 1 - factor / (i + 1) up to rank n, at least 1
    (Algorithm 1 of [5]; the public code also takes a last rank that fails). score: in 0..1."""
    ranked = score.masked_fill(~ask, -torch.inf).sort(dim=1, descending=True).values
    n = torch.arange(1, ask.shape[1] + 1, device=ask.device)
    holds = (ranked >= 1 - factor / (n + 1)).long().cumprod(1)
    return top_k(score, ask, holds.sum(1).clamp(min=1))

@torch.no_grad()
def sample_dkv(denoiser, prompt, *, steps=None, threshold=None, refresh=8, **common):
    """Keep the keys and values of decoded tokens, one step late (dKV-Cache [6], decode
    variant): a block's forwards 0, 1 and every `refresh`-th are full; the others recompute
    what was a mask one forward before: all masks of the canvas and the tokens just committed.
    Args:
        steps: forwards over all blocks, a quota each; or
        threshold: commit what has at least this confidence, always the best (default 0.9).
        refresh: a full forward every so many steps; 1 is the uncached sampler.
        common: what all samplers take: gen_length, block_length, temperature...: see Decode.
    Returns a DecodeOutput. A token is so computed once when visible, then left alone."""
    refuse(None not in (steps, threshold), "steps and threshold were given: pass one")
    check(refresh=refresh, threshold=threshold, steps=steps)
    run = Decode(denoiser, prompt, **common)
    for block, block_steps in zip(run.blocks(), steps_per_block(steps, run)):
        kv, masks_before = KVCache(run.x), None
        quota = quota_schedule((block & run.masks).sum(1), block_steps or 1)
        for step in itertools.count():
            masks = run.masks
            window = None if step < 2 or step % refresh == 0 else masks_before
            if not run.forward(block & masks, windowed, kv=kv, window=window):
                break
            run.step(above_threshold(run.score, run.asked, threshold) if steps is None
                     else top_k(run.score, run.asked, quota[:, step]))
            masks_before = masks
    return run.output()


# -------------------------------------------------------------------------------------------
# 6. DualDiffusion: a drafter guesses, a verifier looks again.

def shadowed(denoiser, x, ask, attention_mask=None, *, checked, shadow=None, kv=None,
             rows=None):
    """A full forward that also judges tokens without themselves, by a shadow block (WINO [8]):
    each has a second token, M, behind the canvas, at the same position.

                         sees:  canvas          shadow
        a canvas token          all             nothing
        the shadow of i         all but i       all

    In a shifted model the shadow of i is x[i-1] at position i-1, where i is read, and sees no
    other shadow that is x[i]. (From the second layer on, other positions' states tell it some
    of the token.) shadow: (R, L) bool; default: checked. Others: see windowed."""
    shadow = checked if shadow is None else shadow
    rows = torch.arange(len(x), device=x.device) if rows is None else rows
    visible, _, position_ids, read_at = denoiser.layout(x, attention_mask)
    at, real = columns_of(shadow)  # (R, S), S shadows
    (R, L), S = x.shape, at.shape[1]
    source = read_at.gather(1, at)
    token = torch.where(source == at, denoiser.mask_id, x.gather(1, source))
    look = F.pad(visible[:, None].expand(R, L + S, L), (0, S)).clone()  # (R, L + S, L + S)
    look[:, L:, :L] &= torch.arange(L, device=x.device) != at[..., None]
    look[:, L:, L:] = real[:, None] & (source[:, None] != at[..., None])
    look[:, L:, L:] |= torch.eye(S, dtype=torch.bool, device=x.device)  # itself, always
    if kv is not None:
        kv.begin(rows, None, x)
    (row, column), (c_row, c_column) = (part.nonzero(as_tuple=True) for part in (ask, checked))
    c_at = L - 1 + shadow.cumsum(1)[c_row, c_column]
    logits = denoiser.forward(
        torch.cat([x, token], 1), torch.cat([position_ids, position_ids.gather(1, source)], 1),
        look[:, None], torch.cat([row, c_row]), torch.cat([read_at[row, column], c_at]), kv)
    return *logits.split([len(row), len(c_row)]), visible.sum(1) + shadow.sum(1)

def view_leave_one_out(run, kv, ask, checked):
    """The verifier sees all but a checked token itself, by a shadow block. Returns what is
    checked now (B, L), a form for Decode.forward, and the form's keywords."""
    return checked, shadowed, dict(kv=kv)

def view_visible(run, kv, ask, checked):
    """The verifier sees the canvas as it is: each token vouches for itself. Or view_cover."""
    return checked, windowed, dict(kv=kv)

def verify_trust(judged, tokens):
    """Accept everything (DualDiffusion [7]); sample_dual_diffusion then runs no verifier."""
    return torch.zeros_like(tokens, dtype=torch.bool)

def verify_kl(judged, tokens, draft, *, tau=0.5):
    """Take back (True, (C,)) where KL(p_verifier || p_draft) > tau nats. judged, draft: (C, V)
    logits of the verifier and, at the commit, the drafter. tokens: (C,) drafted."""
    check(tau_kl=tau)
    p, q = judged.float().log_softmax(-1), draft.float().log_softmax(-1)
    return (p.exp() * (p - q)).nan_to_num(nan=0.0, neginf=0.0).sum(-1) > tau  # 0 where p is 0

def verify_confidence(judged, tokens, *, tau=0.5, of="token"):
    """Take back where the verifier's probability of the drafted token (of="token"), or its
    largest one (of="max", as [7] words it), is below tau. Arguments as in verify_kl."""
    check(tau=tau, of=of)
    p = judged.float().softmax(-1)
    return (p.gather(-1, tokens[..., None])[..., 0] if of == "token" else p.amax(-1)) < tau

@torch.no_grad()
def sample_dual_diffusion(denoiser, prompt, *, draft_steps=4, verify=verify_confidence,
                          view=view_leave_one_out, drafter=None, cache="dual", threshold=0.9,
                          max_revisions=2, max_rounds=None, adaptive=False, **common):
    """Draft several forwards with a cache, then verify the draft in one exact forward and take
    back what it distrusts (DualDiffusion [7]). The exact forward also refreshes the drafter's
    cache and drafts; the default view adds one position to it for each checked token.
    Args:
        draft_steps: K, drafter forwards between two verifications (fewer if a block is full).
        verify: verify_trust, verify_kl, verify_confidence, or any callable (judged (C, V),
            tokens (C,)) -> (C,) bool; a parameter `draft` gets the logits (C, V) that the
            tokens were drafted by. Options by functools.partial.
        view: what the verifier sees: view_leave_one_out, view_visible or view_cover.
        drafter: a second Denoiser with the same vocabulary; default: the same. A verification
            does not refresh a second one's cache: its own next forward is full.
        cache: "dual", "prefix", "dkv" or None: see window_of. threshold: the drafter's.
        max_revisions: how often one position may be taken back. adaptive: see Pace.
        max_rounds: verifications per row; after the last one the rest is filled unchecked.
        common: what all samplers take: gen_length, block_length, temperature...: see Decode.
    Returns a DecodeOutput. It ends: a round keeps at least one of a row's drafted tokens."""
    check(threshold=threshold, drafter_cache=cache, draft_steps=draft_steps,
          max_revisions=max_revisions, max_rounds=max_rounds, adaptive=adaptive)
    second = drafter or denoiser
    wants_draft = "draft" in inspect.signature(verify).parameters
    refuse((second.mask_id, second.n_embeddings) != (denoiser.mask_id, denoiser.n_embeddings),
           "the drafter and the verifier need the same vocabulary and mask_id")
    run = Decode(denoiser, prompt, **common)
    max_rounds = 0 if verify is verify_trust else max_rounds
    pace = Pace(run, draft_steps, max_rounds, max_revisions, adaptive)
    for block in run.blocks():
        kv, window, drafts = KVCache(run.x), None, []       # drafts: see distrusted
        verifier_kv = kv if drafter is None else KVCache(run.x)
        drafted = torch.zeros_like(block)                   # committed, and not yet verified
        pace.outdated = torch.zeros_like(block)
        while True:
            for step in itertools.count():                  # up to K cheap forwards
                masks = run.masks
                if not run.forward(block & masks & (step < pace.K)[:, None], windowed,
                                   denoiser=drafter, kv=kv, window=window):
                    break
                commit = above_threshold(run.score, run.asked, threshold)
                drafts += [(commit, logits_of(run, commit))] if wants_draft else []
                run.step(commit)
                pace.note_changes(commit)
                drafted, window = drafted | commit, window_of(cache, block, masks | run.masks)
            due, masks = drafted.any(1) & (pace.rounds < pace.max_rounds), run.masks
            ask, checked = block & masks & due[:, None], drafted | pace.recheck(block & ~masks)
            checked, form, how = view(run, verifier_kv, ask, checked & due[:, None])
            if not run.forward(ask, form, checked, live=due, **how):  # exact; it drafts too
                break
            remask = distrusted(run, verify, drafts, pace.revised < max_revisions, drafted)
            commit = above_threshold(run.score, run.asked, threshold)
            drafts += [(commit, logits_of(run, commit))] if wants_draft else []
            run.step(commit, remask)
            pace.verified(due, checked, remask, commit)
            drafted = (drafted & ~checked) | commit
            window = window_of(cache, block, masks | run.masks) if drafter is None else None
    out = run.output()
    out.verify_nfe, out.draft_nfe = pace.exact, out.nfe - pace.exact
    return out

def logits_of(run, commit):
    """The logits (n, V) by which the tokens of `commit` (B, L) were chosen."""
    return run.logits[run.asked.flatten().cumsum(0)[commit.flatten()] - 1]

def distrusted(run, verify, drafts, may_return, drafted):
    """(B, L) bool, what to take back after a verification: what the rule says, where a
    position `may_return`, and per row fewer than were drafted, the unlikeliest. drafts:
    [(committed (B, L), logits (n, V)), ...]; for each position the newest entry counts."""
    row, n = torch.zeros_like(run.x), 0     # of all these logits, which belongs to a position
    for committed, logits in drafts:
        index = committed.flatten().cumsum(0).view_as(committed) + (n - 1)
        row, n = torch.where(committed, index, row), n + len(logits)
    at, draft = run.checked.nonzero(as_tuple=True), {}
    tokens = run.x[at]
    if drafts:
        draft = {"draft": torch.cat([logits for _, logits in drafts])[row[at]]}
    bad = verify(run.judged, tokens, **draft)
    refuse(getattr(bad, "dtype", None) != torch.bool or bad.shape != tokens.shape,
           f"verify gave {bad!r:.80}, expected a bool tensor of shape {tuple(tokens.shape)}")
    logp = run.judged.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    bad = run.spread(run.checked, bad, False) & may_return
    return top_k(-run.spread(run.checked, logp, 0.0), bad, (drafted.sum(1) - 1).clamp(min=0))

class Pace:
    """How long DualDiffusion drafts, and what it checks again: K forwards between
    verifications, after `max_rounds` of these all that is left. adaptive: K halves when over a
    quarter of a round was taken back and doubles, up to 4 draft_steps, when nothing was; and a
    token is checked again, at most max_revisions times, after one within 4 positions has
    changed. ([7] calls this future work; the numbers are ours.) Without, it only counts."""

    def __init__(self, run, draft_steps, max_rounds, max_revisions, adaptive):
        self.max_rounds = math.inf if max_rounds is None else max_rounds
        self.most, self.max_revisions, self.adaptive = 4 * draft_steps, max_revisions, adaptive
        self.rounds = self.exact = torch.zeros_like(run.x[:, 0])    # exact: the forwards
        self.K = self.rounds + (draft_steps if self.max_rounds else 2 ** 30)    # no limit
        self.revised = self.checks = torch.zeros_like(run.x)
        self.outdated = torch.zeros_like(run.visible)  # a neighbour changed since the check

    def recheck(self, tokens):
        """Which of `tokens` (B, L) are to be checked once more."""
        return tokens & self.outdated & (self.checks <= self.max_revisions)

    def note_changes(self, where):
        """After a forward that changed these positions (B, L)."""
        if self.adaptive:
            near = F.max_pool1d(where[:, None].float(), 9, stride=1, padding=4)[:, 0] > 0
            self.outdated = self.outdated | (near & (self.checks > 0) & ~where)

    def verified(self, due, checked, remask, commit):
        """After an exact forward for the rows `due` (B,); what checked nothing is no round."""
        self.exact, due = self.exact + due, due & checked.any(1)
        self.rounds, self.checks = self.rounds + due, self.checks + checked
        self.revised, self.outdated = self.revised + remask, self.outdated & ~due[:, None]
        if self.adaptive:
            share = remask.sum(1) / checked.sum(1).clamp(min=1)
            self.K = torch.where(due & (share > .25), (self.K // 2).clamp(min=1), self.K)
            self.K = torch.where(due & (share == 0), (self.K * 2).clamp(max=self.most), self.K)
        self.K = self.K.masked_fill(self.rounds >= self.max_rounds, 2 ** 30)
        self.note_changes(commit | remask)


# -------------------------------------------------------------------------------------------
# 7. Revocable decoders: commit many, take back what looks wrong in the light of the rest.

@torch.no_grad()
def sample_wino(denoiser, prompt, *, threshold=0.6, threshold_back=0.9, block_length=128,
                **common):
    """Commit above a low threshold; re-mask what a shadow block finds unlikely (WINO [8]).
    Args:
        threshold: tau_1, masks above it are committed, always the best one, at most wino_cap.
        threshold_back: tau_2, a token of an earlier forward is re-masked when its shadow gives
            it less; only if more than one is committed, and fewer than in the forward before.
        common: what all samplers take: gen_length, temperature, callback...: see Decode.
    Returns a DecodeOutput; nfe <= block_length per block."""
    check(threshold=threshold, threshold_back=threshold_back)
    run = Decode(denoiser, prompt, block_length=block_length, **common)
    for block in run.blocks():
        generated, accepted_before = block & run.masks, torch.full_like(run.x[:, 0], 30)
        while True:
            ask = block & run.masks
            live = ask.any(1)
            earlier = generated & ~ask & live[:, None]
            if not run.forward(ask, shadowed, earlier, shadow=block):
                break
            commit = ask & (run.score > threshold) | best(run.score, ask)
            commit = top_k(run.score, commit, wino_cap(ask.sum(1)))
            p = run.spread(earlier, confidence_of(run.judged, run.x[earlier]), 1.0)
            accepted = commit.sum(1)
            remask = top_k(-p, earlier & (p < threshold_back), accepted_before - 1)
            run.step(commit, remask & (accepted > 1)[:, None])
            accepted_before = torch.where(live, accepted, accepted_before)
    return run.output()

def wino_cap(masks):
    """How many of a block's masks (B,) a forward may commit: 70 % within 5..20 (WINO [8])."""
    return (masks.float() * 0.7).long().clamp(5, 20)

@torch.no_grad()
def sample_saber(denoiser, prompt, *, n=2, block_length=128, **common):
    """Commit above the mean confidence of all commits so far, and re-mask the tokens whose
    positions lost most of their top-1 probability since the forward before (Saber [10]).
    Args:
        n: commit at least n tokens, or all masks (the public code then overwrites others), and
            re-mask max(n // 2, ceil(commits / 8)), fewer than the commits, of all generated.
        common: what all samplers take: gen_length, temperature, callback...: see Decode.
    Returns a DecodeOutput; nfe <= masks."""
    check(n=n)
    run = Decode(denoiser, prompt, block_length=block_length, **common)
    generated, ever = run.masks, torch.zeros_like(run.visible)
    latest = before = torch.zeros(run.x.shape, device=run.x.device)  # confidences
    for _, end in zip(run.blocks(), run.ends):
        while True:
            masks = run.masks & (run.column < end)
            live = masks.any(1)[:, None]
            if not run.forward(generated & (run.column < end) & live):
                break
            mean = (latest * ever).sum(1) / ever.sum(1)  # NaN before the first
            above = masks & (run.score > mean.nan_to_num(nan=1.0)[:, None])
            commit = torch.where((above.sum(1) >= n)[:, None], above,
                                 top_k(run.score, masks, torch.full_like(run.x[:, 0], n)))
            ever, latest = ever | commit, torch.where(commit, run.confidence, latest)
            n_commits, unfinished = commit.sum(1), (masks & ~commit).any(1)
            most = torch.minimum(((n_commits + 7) // 8).clamp(min=n // 2), n_commits - 1)
            fall = (run.confidence - before).masked_fill(~run.asked, torch.inf)
            filled = run.asked & (commit | ~run.masks) & (fall < torch.inf)
            remask = top_k(-fall, filled, torch.where(unfinished, most, 0))
            confidence = run.confidence.masked_fill(~run.asked, -torch.inf)
            before = torch.where(live, confidence, before)
            run.step(commit, remask)
    return run.output()


# -------------------------------------------------------------------------------------------
# 8. COVER: draft and re-check in one forward, without taking the context away.
#    Forward t commits a token, t + 1 shows it and stores its keys and values, in t + 2 it may
#    be a seed, M in the input, while all others see what is stored.

class DualView:
    """COVER's two views in one forward [9], in place of the KVCache `kv`, which it fills.

        keys and values seen by      at the seed     at other seeds          elsewhere
        row where a seed is read     fresh, of M     stored, of the token    as they are
        every other row              -               stored, of the token    as they are

    The first column is the *diagonal correction*: a seed never sees its own token. This is one
    attention over [stored, fresh] columns under a mask, computed once more for these few rows
    alone, so it is exact (subtracting the own column from the output loses all digits when its
    weight nears 1). A shifted model reads a seed i at row i-1, which saw x[i] before: this row
    sees both fresh, all others as stored.

    x, attention_mask: as in Denoiser.__call__. seeds: (B, L) bool. probe: (columns, real), see
    columns_of; the forward then leaves the `attention` (R, m, L) of these columns' tokens,
    averaged over heads and the middle and last layer (our choice), and `rows` (R,). override:
    False lets every row see the seeds as M."""

    def __init__(self, denoiser, x, attention_mask, kv, seeds, probe=None, override=True):
        self.kv, self.filled, self.seeds, self.probe = kv, kv.filled, seeds, probe
        self.override = override
        self.visible, _, _, self.read_at = denoiser.layout(x, attention_mask)
        self.mask_id, self.attention = denoiser.mask_id, torch.zeros((), device=x.device)
        n = getattr(denoiser.config, "num_hidden_layers", 0)
        self.layers = {n // 2, n - 1}

    def begin(self, rows, columns, tokens):
        """As in KVCache. S: the most seeds of any row."""
        seeds, visible, read_at = self.seeds[rows], self.visible[rows], self.read_at[rows]
        (R, L), device, self.rows = seeds.shape, seeds.device, rows
        here = column = torch.arange(L, device=device).expand(R, L)
        if columns is not None:  # canvas column -> its (first) token of this forward
            here = torch.zeros_like(here).scatter_reduce(
                1, columns, here[:, :columns.shape[1]], "amin", include_self=False)
        self.probed = None if self.probe is None else here.gather(1, self.probe[0][rows])
        at, real = columns_of(seeds)
        self.S = S = at.shape[1]
        if S == 0 or not self.override:
            self.S, seeds = 0, seeds if columns is None else seeds.gather(1, columns)
            return self.kv.begin(rows, columns, tokens.masked_fill(seeds, self.mask_id))
        refuse(not self.filled, "seeds need a kv that an earlier forward has filled")
        read, itself = read_at.gather(1, at), torch.eye(S, dtype=torch.bool, device=device)
        own = (column[:, None] == at[..., None]) | (column[:, None] == read[..., None])
        self.look = torch.cat([visible[:, None] & ~own, itself.expand(R, S, S),
                               itself & (read != at)[..., None]], 2)[:, None]
        self.read = here.gather(1, read)
        self.fresh = here.gather(1, torch.cat([at, read], 1))   # S only see these if shifted
        self.has_seeds = real.any(1)[:, None, None, None]
        hold = (own & real[..., None]).any(1)                   # these stay as they are stored
        if columns is not None:
            hold, seeds = hold.gather(1, columns), seeds.gather(1, columns)
        return self.kv.begin(rows, columns, tokens, hold).masked_fill(seeds, self.mask_id)

    def attend(self, layer, q, k, v, look, scaling):
        """As in KVCache; then the rows where seeds are read once more."""
        all_k, all_v = self.kv.store(self.kv.k, layer, k), self.kv.store(self.kv.v, layer, v)
        out = sdpa(q, all_k, all_v, look, scaling)
        if self.probe is not None and layer in self.layers:
            maps = attention_map(take(q, self.probed), all_k, look, scaling) / len(self.layers)
            self.attention = self.attention + maps.to(self.probed.device)
        return self.correct(out, q, k, v, all_k, all_v, scaling) if self.S else out

    def correct(self, out, q, k, v, all_k, all_v, scaling):
        """out (R, H, n, d), but the rows where seeds are read as they are without these."""
        read, look, real = (t.to(q.device) for t in (self.read, self.look, self.has_seeds))
        own = sdpa(take(q, read), torch.cat([all_k, take(k, self.fresh)], 2),
                   torch.cat([all_v, take(v, self.fresh)], 2), look, scaling)
        own = torch.where(real, own, take(out, read))
        return out.scatter(2, read[:, None, :, None].expand_as(own), own)

def take(t, index):
    """(R, H, n, d), (R, m) -> (R, H, m, d), those tokens of each row."""
    index = index.to(t.device)[:, None, :, None]
    return t.gather(2, index.expand(-1, t.shape[1], -1, t.shape[3]))

def attention_map(q, k, mask=None, scaling=None):
    """softmax(q k^T scaling) itself, in float32, averaged over heads: (R, m, columns)."""
    q = rearrange(q.float(), "r (h g) m d -> r h g m d", h=k.shape[1])
    scores = torch.einsum("rhgmd,rhnd->rhgmn", q, k.float()) * (scaling or q.shape[-1] ** -0.5)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None], -torch.inf)
    return scores.softmax(-1).mean((1, 2))

def dependence(view, read_columns, drafted, candidates):
    """COVER's d_in and d_out of candidates [9], (2, B, L): how much the masks that are left,
    read at `read_columns`, look at them, and they at what was just `drafted` (what is stored
    of these is outdated), each divided by the row's largest (ours). view: a used DualView."""
    maps = view.attention
    out = torch.zeros(2, *candidates.shape, device=maps.device)
    if maps.dim() == 0:  # a plain callable, which has no attention to look at
        return out
    rows, (columns, real) = view.rows, view.probe
    at = columns[rows]
    weight = (read_columns[rows].gather(1, at) & real[rows]).float()
    d_in = (weight[:, None] @ maps)[:, 0].float()       # autocast narrows products
    d_in = d_in / weight.sum(1, keepdim=True).clamp(min=1)
    d_out = (maps @ drafted[rows].float()[..., None])[..., 0].float()
    out[:, rows] = torch.stack([d_in, torch.zeros_like(d_in).scatter(1, at, d_out)])
    out = out.masked_fill(~candidates, 0.0)
    return out / out.amax(2, keepdim=True).clamp(min=torch.finfo(out.dtype).tiny)

def seed_score(u, d_in, d_out):
    """COVER's score of a candidate [9]: uncertain, looked at by many, stable. All (B, L)."""
    return u * (1 + d_in) / (1 + d_out)

def eligible(run, kv, tokens, masks):
    """Those of `tokens` (B, L) that can be seeds together: what is stored of them, and of the
    column where they are read, is of the tokens there now, and no mask (B, L) is read at
    either. Of neighbours in a shifted model the 1st, 3rd, 5th...: one is read at the other."""
    read_at = run.denoiser.layout(run.x, run.attention_mask)[3]
    fit = (kv.shown == run.x) & ~run.denoiser.read_columns(masks, run.visible)
    seeds = tokens & fit & fit.gather(1, read_at)
    if not run.denoiser.shift:
        return seeds
    # of each column the last before it that is no seed: so a seed's place in its run
    last = run.column.expand_as(seeds).masked_fill(seeds, -1).cummax(1).values
    return seeds & ((run.column - last) % 2 == 1)

def view_cover(run, kv, ask, checked):
    """DualDiffusion's verifier by COVER's dual view (see view_leave_one_out), with no more
    positions. Tokens that are not stored yet, and in shifted models neighbours, wait."""
    seeds = eligible(run, kv, checked, ask)
    view = DualView(run.denoiser, run.x, run.attention_mask, kv, seeds)
    return seeds, windowed, dict(kv=view)

@torch.no_grad()
def sample_cover(denoiser, prompt, *, threshold=0.7, tau_replace=None, tau_remask=0.5,
                 max_seeds=None, max_checks=4, commit_cap=True, override=True, cache=None,
                 refresh=None, **common):
    """Commit above a threshold; every forward also re-checks committed tokens, the *seeds*:
    they are M in its input, while all others keep seeing their stored keys and values (COVER
    [9]). If another token is predicted, a seed is replaced by it where it has probability >=
    tau_replace (None: never), else re-masked where its own is < tau_remask; else kept. The
    paper replaces, and checks few seeds, the best by score; its text gives no numbers: all
    here, and the probe, are our choice.
    Args:
        threshold: tau_draft, masks above it (as in WINO, not at it) are committed, always the
            best one.
        max_seeds: seeds per row and forward, the best by seed_score. None: all that can be.
        max_checks: checks of a position in all, so that a token comes back at most so often.
        commit_cap: commit no more than wino_cap (ours, after WINO).
        override: others see seeds as stored, one forward ago: with many, drafts may not fit what
            stands beside them. False: as M, too (ours; more accurate on the embedded model).
        cache: None, "prefix" or "dual", as in sample_fast_dllm.
        refresh: every so many forwards of a block one is full (default: the first alone).
        common: what all samplers take: gen_length, block_length, temperature...: see Decode.
    Returns a DecodeOutput; nfe <= masks + revisions. What the last two forwards of a block
    committed goes unchecked."""
    check(threshold=threshold, tau_replace=tau_replace, tau_remask=tau_remask,
          max_seeds=max_seeds, max_checks=max_checks, commit_cap=commit_cap, cache=cache,
          refresh=refresh, override=override)
    refuse(refresh and not cache, "refresh was given without a cache: every forward is full")
    run = Decode(denoiser, prompt, **common)
    checks, by_score = torch.zeros_like(run.x), max_seeds is not None
    for block in run.blocks():
        kv, window = KVCache(run.x), None
        generated, seeds = block & run.masks, torch.zeros_like(block)
        asked = denoiser.read_columns(block, run.visible)
        probe = columns_of(block | asked) if by_score else None
        for step in itertools.count(1):
            masks = block & run.masks
            tokens = generated & ~masks & (checks < max_checks) & masks.any(1, keepdim=True)
            view = DualView(denoiser, run.x, run.attention_mask, kv, seeds, probe, override)
            checked = seeds | tokens if by_score else seeds  # a score needs their entropy
            if not run.forward(masks, windowed, checked, kv=view, window=window):
                break
            commit = masks & (run.score > threshold) | best(run.score, masks)
            if commit_cap:
                commit = top_k(run.score, commit, wino_cap(masks.sum(1)))
            u, replace, remask = judge_seeds(run, seeds, tau_replace, tau_remask)
            run.step(commit, remask, replace)
            checks = checks + seeds
            # the next seeds: shown and stored by this forward, and not checked in it
            masks = block & run.masks
            seeds = eligible(run, kv, tokens & ~seeds & masks.any(1, keepdim=True), masks)
            if by_score:
                columns = denoiser.read_columns(masks, run.visible)
                worth = seed_score(u, *dependence(view, columns, commit, seeds))
                n_seeds = torch.full_like(run.nfe, max_seeds)
                seeds = top_k(worth, seeds & (worth > 0), n_seeds)
            window = None if refresh and step % refresh == 0 else window_of(cache, block)
    return run.output()

def judge_seeds(run, seeds, tau_replace, tau_remask):
    """COVER's outcomes [9] after a forward that checked; puts the seeds' predictions (without
    a temperature) into the run's tokens and confidence. Returns three (B, L): u, the entropy
    at all checked tokens; which seeds to replace; which to re-mask."""
    ids = torch.stack([run.judged.max(-1).indices, run.x[run.checked]], 1)  # predicted, now
    # (C, 3): the entropy, and the probabilities of these two
    weighed = by_rows(lambda p, ids: torch.cat([entropy_of(p)[:, None], p.gather(1, ids)], 1),
                      run.judged, ids)
    u, p, p_now = (run.spread(run.checked, values, 1.0) for values in weighed.unbind(1))
    run.tokens = torch.where(seeds, run.x.masked_scatter(run.checked, ids[:, 0]), run.tokens)
    run.confidence = torch.where(seeds, p, run.confidence)
    differs = seeds & (run.tokens != run.x)
    replace = differs & (p >= (math.inf if tau_replace is None else tau_replace))
    if run.postpone_eos:
        replace &= ~is_eos(run.tokens, run.denoiser)
    return u.float(), replace, differs & ~replace & (p_now < tau_remask)


# -------------------------------------------------------------------------------------------
# 9. What a decode returns, what its revisions were worth, likelihood and loss.

@dataclass
class DecodeOutput:
    """The result of a decode.

    sequences: (B, P + G) ids, prompt included, M only if a callback stopped. prompt_length: P.
    nfe, positions: (B,) forwards, positions (no padding) processed. calls: of the model.
    tokens_per_forward: (B,) generated tokens before the first eos, per forward.
    commit_step, commit_confidence: (B, L) by which of its row's forwards (from 1) a position
        was last filled and how surely, by default the token's probability at temperature 1;
        0 and 1 on given tokens and what early_stop fills.
    revisions: [Revision, ...], every token that was taken back, in order.
    history: with `history=True` the canvases, [(B, L), ...], the initial one first.
    draft_nfe, verify_nfe: (B,) forwards of sample_dual_diffusion's drafter and verifier."""
    sequences: Tensor
    prompt_length: int
    nfe: Tensor
    positions: Tensor
    calls: int
    tokens_per_forward: Tensor
    commit_step: Tensor
    commit_confidence: Tensor
    revisions: list
    history: list | None = None
    draft_nfe: Tensor | None = None
    verify_nfe: Tensor | None = None

    @property
    def generated(self):
        """(B, G), what came after the prompt."""
        return self.sequences[:, self.prompt_length:]

# One committed token taken back: its row, at which of the row's forwards, position, the token,
# the kind ("remask" or "replace"), and the token that was committed there next (none: -1).
Revision = namedtuple("Revision", "row forward position old kind new")

def revisions_of(log):
    """[Revision, ...] in order, from the log of a Decode: (kind, nfe (B,), canvas (B, L),
    where (B, L) bool or None) of all that was replaced, committed and re-masked."""
    log = [entry for entry in log if entry[3] is not None]
    if all(kind == "commit" for kind, *_ in log):
        return []
    kinds, nfe, x, where = zip(*log)        # read from the device at once
    nfe, x, where = torch.stack(nfe).tolist(), torch.stack(x), torch.stack(where)
    found, waiting = [], {}                 # waiting: (row, position) -> its place in found
    for (i, row, position), token in zip(where.nonzero().tolist(), x[where].tolist()):
        if kinds[i] != "commit":
            waiting[row, position] = len(found)
            found.append(Revision(row, nfe[i][row], position, token, kinds[i], -1))
        elif (row, position) in waiting:
            j = waiting.pop((row, position))
            found[j] = found[j]._replace(new=token)
    return found

def flip_flops(out):
    """A bool for each of out.revisions: whether the token that was taken back ever came back,
    or the new one had been taken back there before (A -> B -> A: both)."""
    first, last = {}, {}  # (row, position, token) -> event that first took / last put it
    for i, r in enumerate(out.revisions):
        first.setdefault((r.row, r.position, r.old), i)
        last[r.row, r.position, r.new] = i
    return [last.get((r.row, r.position, r.old), -1) >= i
            or first.get((r.row, r.position, r.new), i + 1) <= i
            for i, r in enumerate(out.revisions)]

def revision_statistics(out, reference=None):
    """What the revisions of a DecodeOutput were worth, as a dict. events, remasks, replaces,
    flip_flops: how many; effective_share: of events that are no flip-flop (None: no events);
    effective_remasks, effective_share_remask: of re-masks alone, as [9] counts (that a return
    by a detour is a flip-flop, too, is ours). commits: all
    tokens committed; restored, wasted_share: how many of them, and which share, only put a
    re-masked token back. With `reference`, (B, L) or (B, G) ids, became_right, became_wrong:
    events that changed another token into the reference's, and away from it. What a callback
    has left open by stopping is no event."""
    decided = [r for r in out.revisions if r.new >= 0]
    out = SimpleNamespace(**{**vars(out), "revisions": decided})
    same = flip_flops(out)
    remask = [not f for f, r in zip(same, out.revisions) if r.kind == "remask"]
    restored = sum(r.kind == "remask" and r.new == r.old for r in out.revisions)
    commits = int((out.commit_step > 0).sum()) + len(out.revisions)
    stats = dict(events=len(same), remasks=len(remask), replaces=len(same) - len(remask),
                 flip_flops=sum(same), effective_remasks=sum(remask), restored=restored,
                 commits=commits, wasted_share=restored / max(commits, 1),
                 effective_share=1 - sum(same) / len(same) if same else None,
                 effective_share_remask=sum(remask) / len(remask) if remask else None)
    if reference is not None:
        start = out.sequences.shape[1] - reference.shape[-1]
        want = [int(reference[r.row, r.position - start]) if r.position >= start else -1
                for r in out.revisions]
        stats["became_right"] = sum(r.new == w != r.old for r, w in zip(out.revisions, want))
        stats["became_wrong"] = sum(r.old == w != r.new for r, w in zip(out.revisions, want))
    return stats

@torch.no_grad()
def log_likelihood(denoiser, prompt, answer, *, attention_mask=None, n_samples=128,
                   batch_size=32, cfg_scale=0.0, generator=None):
    """Monte-Carlo lower bound of log p(answer | prompt) in nats, (B,) (LLaDA [1], Appendix B,
    eq. 6). Each sample masks l of the n answer tokens, l stratified over 1..n, and adds n / l
    times their log-probabilities, which varies less than masking each with probability t.
    prompt, attention_mask: as in Decode. answer: (B, n) ids, or a list of id lists.
    batch_size: samples per forward. cfg_scale: see guided."""
    check(n_samples=n_samples, batch_size=batch_size, cfg_scale=cfg_scale)
    answer = [check_ids(denoiser, a, "answer") for a in answer]
    x, visible, P = start_canvas(denoiser, prompt, attention_mask, max(map(len, answer)))
    refuse([a.dim() for a in answer if len(a)] != [1] * len(x),
           f"answer has {len(answer)} rows, expected {len(x)}, none of them empty")
    texts = [(torch.cat([row[:P], a]), shown[:P + len(a)], len(a))
             for row, shown, a in zip(x, visible, answer)]
    refuse(any(denoiser.mask_id in text[shown] for text, shown, _ in texts),
           "a prompt or an answer holds mask tokens: a likelihood needs whole texts")
    where, total = x.device if generator is None else generator.device, []
    spread = torch.arange(n_samples, device=where, dtype=torch.float64) / n_samples
    for text, shown, n in texts:
        estimates, given = [], shown & (torch.arange(P + n, device=x.device) < P)
        offset = torch.rand((), generator=generator, device=where, dtype=torch.float64)
        for l in (((offset + spread) % 1 * n).long() + 1).split(batch_size):  # l in 1..n
            order = torch.rand(len(l), n, generator=generator, device=where).argsort(1)
            masked = F.pad(order.argsort(1) < l[:, None], (P, 0), value=False).to(x.device)
            full = text.expand_as(masked)
            canvas = full.masked_fill(masked, denoiser.mask_id), masked, shown.expand_as(full)
            logits = denoiser(*canvas) if cfg_scale == 0 else guided(
                denoiser, *canvas, given=given.expand_as(full), scale=cfg_scale)[0]
            logp = -F.cross_entropy(logits.float(), full[masked], reduction="none")
            per_sample = logp.new_zeros(masked.shape).masked_scatter(masked, logp).sum(1)
            estimates.append(per_sample * n / l.to(x.device))
        total.append(torch.cat(estimates).mean())
    return torch.stack(total)

def mdlm_loss(model, x, answer, *, mask_id, attention_mask=None, weighted=True, shift=None,
              generator=None):
    """The training loss of a masked-diffusion model, in nats: cross-entropy of answer tokens,
    each masked with its row's probability t, stratified over the batch (antithetic [3]).
    `weighted`: a row's sum is divided by t and its answer length, which makes the mean a bound
    on -log p per token ([1] eq. 5, [3]); else the mean over masked tokens, no bound, but small
    models learn faster. model: a transformers causal LM with the `dlm_spec` attention. x: (B,
    L) ids. answer: (B, L) bool. attention_mask: (B, L), 0 on padding. shift: see Denoiser;
    default `shift_logits` of the model's config, else False."""
    refuse(getattr(model.config, "_attn_implementation", "dlm_spec") != "dlm_spec",
           "model has causal attention: call model.set_attn_implementation('dlm_spec') first")
    refuse(not answer.any(1).all(), "every row of answer needs an answer token")
    (B, L), uniform = x.shape, dict(dtype=torch.float32, device=x.device)
    t = draw((1,), generator, None, **uniform) + torch.arange(B, device=x.device) / B
    t = (t % 1).clamp(min=1e-3)
    masked = answer & (draw((B, L), generator, None, **uniform) < t[:, None])
    shift = getattr(model.config, "shift_logits", False) if shift is None else shift
    visible = torch.ones_like(masked) if attention_mask is None else attention_mask.bool()
    position_ids = (visible.cumsum(1) - 1).clamp(min=0)
    first = max(int(answer.any(0).int().argmax()) - shift, 0)  # the head runs from there on
    logits = model(input_ids=x.masked_fill(masked, mask_id), position_ids=position_ids,
                   attention_mask=padding_mask(attention_mask=attention_mask),
                   use_cache=False, logits_to_keep=L - first).logits
    row, column = masked.nonzero(as_tuple=True)
    read_at = column - (position_ids[row, column] > 0).long() * shift
    logits = logits[row, read_at - first].float()
    ce = F.cross_entropy(logits, x[row, column], reduction="none")
    if weighted:
        return (torch.zeros_like(t).index_add(0, row, ce) / t / answer.sum(1)).mean()
    return ce.sum() / max(len(ce), 1)


# -------------------------------------------------------------------------------------------
# 10. Loading into stock classes, by names alone, with no code of a checkpoint; and text.

EMBEDDED_MODEL = Path(__file__).resolve().parent / "notebooks" / "mini" / "model"
# one group per pattern and only \1: all that transformers 5 understands in a key_mapping
LLADA_NAMES = {rf"^model\.transformer\.{theirs}\.": rf"{ours}." for theirs, ours in {
    "wte": "model.embed_tokens", "ln_f": "model.norm",
    "ff_out": "lm_head",  # a block's own ff_out: down projection
    **{rf"blocks\.(\d+)\.{theirs}": rf"model.layers.\1.{ours}" for theirs, ours in {
        "attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm",
        "q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj",
        "v_proj": "self_attn.v_proj", "attn_out": "self_attn.o_proj",
        "ff_proj": "mlp.gate_proj",  # the one under the silu
        "up_proj": "mlp.up_proj", "ff_out": "mlp.down_proj"}.items()}}.items()}
LLADA_MUST_BE = dict(
    block_type="llama", block_group_size=1, activation_type="silu", rope=True, alibi=False,
    layer_norm_type="rms", layer_norm_with_affine=True, bias_for_layer_norm=False,
    attention_layer_norm=False, input_emb_norm=False, include_bias=False,
    include_qkv_bias=False, multi_query_attention=False, scale_logits=False)

def llada_config(c):
    """LLaDA's config (a dict) -> LlamaConfig. ValueError for what a Llama cannot express."""
    differ = {k: c[k] for k, want in LLADA_MUST_BE.items()
              if k in c and c[k] != want and not (c[k] is None and want is False)}
    refuse(differ, f"this LLaDA checkpoint has {differ}, which a stock Llama cannot express")
    return transformers.LlamaConfig(
        vocab_size=c.get("embedding_size") or c["vocab_size"], hidden_size=c["d_model"],
        intermediate_size=c.get("mlp_hidden_size") or c.get("mlp_ratio", 4) * c["d_model"],
        num_hidden_layers=c["n_layers"], max_position_embeddings=c["max_sequence_length"],
        num_attention_heads=c["n_heads"], rms_norm_eps=c.get("rms_norm_eps", 1e-5),
        num_key_value_heads=c.get("n_kv_heads") or c["n_heads"],
        tie_word_embeddings=bool(c.get("weight_tying")), **ids_and_rope(c))

def dream_config(c):
    """Dream's config (a dict) -> Qwen2Config. ValueError for what a Qwen2 cannot express."""
    refuse(c.get("use_sliding_window"), "this Dream checkpoint has use_sliding_window=True")
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
              "num_attention_heads")
    optional = ("hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
                "num_key_value_heads")
    same = {k: c[k] for k in (*needed, *optional) if k in needed or k in c}
    return transformers.Qwen2Config(shift_logits=True, **same, **ids_and_rope(c))

def ids_and_rope(c):
    """The rotary base and the special ids, absent ones too: stock classes have their own."""
    scaling = c.get("rope_scaling") or c.get("rope_parameters") or {}
    refuse(scaling.get("rope_type", scaling.get("type", "default")) != "default",
           f"rope_scaling is {scaling!r}, but only plain rotary embeddings are mapped")
    theta = float(c.get("rope_theta") or scaling.get("rope_theta") or 10000.0)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta},
            **{k + "_token_id": c.get(k + "_token_id") for k in ("mask", "bos", "eos", "pad")}}

def load_denoiser(name_or_path=None, *, device=None, dtype=None, mask_id=None, shift=None,
                  adapter=None, **from_pretrained):
    """A Denoiser from a checkpoint folder or hub id; nothing given: the embedded model.
    LLaDA's layout becomes a LlamaForCausalLM, Dream's a Qwen2ForCausalLM, anything else is
    opened as a stock causal LM. `denoiser.model.save_pretrained(folder)` writes the stock
    layout, and in its config `shift_logits` and is_causal=False, by which transformers' own
    attention (eager, sdpa, flex) sees both ways too. ValueError when nothing is found there, a
    weight is missing, unexpected or of another shape, the architecture cannot be mapped, or no
    mask id is known.
    Args:
        device: default a CUDA device if there is one, else the CPU; not with `device_map`,
            `tp_plan` or `quantization_config`, which place the weights themselves.
        dtype: default bfloat16 on a CUDA device, else float32. mask_id: if no file names it.
        shift: see Denoiser; default `shift_logits` of config.json, else True for Dream alone.
        adapter: folder or hub id of a PEFT adapter for the stock layout; needs `peft`.
        from_pretrained: passed on: `quantization_config`, `revision`, `local_files_only`..."""
    name = os.path.expanduser(str(EMBEDDED_MODEL if name_or_path is None else name_or_path))
    refuse(from_pretrained.pop("trust_remote_code", False),
           "trust_remote_code=True was given, but no code of a checkpoint is ever run here")
    adapter = None if adapter is None else os.path.expanduser(str(adapter))
    hub = hub_options(from_pretrained, name, adapter or name)
    try:
        config, _ = transformers.PretrainedConfig.get_config_dict(name, **hub)
        refuse(not config, f"there is no config.json in {name!r}, or an empty one")
        device = device_for(device, config | from_pretrained)
        if dtype is None:
            place = str(device or from_pretrained.get("device_map"))
            on_gpu = torch.cuda.is_available() and not place.startswith("cpu")
            dtype = torch.bfloat16 if on_gpu else torch.float32
        kind = str(config.get("model_type")).lower()
        stock = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        refuse(kind not in ("llada", "dream", *stock),
               f"{name!r} has model_type {kind!r}, which is not supported: it is no LLaDA, no "
               "Dream and no causal LM of transformers; a checkpoint's own code is never run")
        cls, map_config = {
            "llada": (transformers.LlamaForCausalLM, llada_config),
            "dream": (transformers.Qwen2ForCausalLM, dream_config),
        }.get(kind, (transformers.AutoModelForCausalLM, lambda c: None))
        if kind == "llada":
            from_pretrained["key_mapping"] = LLADA_NAMES
        model, report = cls.from_pretrained(
            name, config=map_config(config), dtype=dtype,
            use_safetensors=True, trust_remote_code=False, output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are reported, and refused below
            generation_config=transformers.GenerationConfig(), **from_pretrained)
        check_report(name, model, report)
        vars(model).pop("_weight_conversions", None)  # else it is saved under LLaDA's names
        if adapter is not None:
            add_adapter(model, adapter, hub)
    except (OSError, KeyError, json.JSONDecodeError, SafetensorError) as e:
        raise ValueError(
            f"no whole checkpoint can be read at {name!r} ({type(e).__name__}: {e}). It needs "
            "safetensors weights (pickled ones can run code); if gated, its licence accepted "
            "and `hf auth login` or token=; without a network, a folder") from e
    tokenizer = load_tokenizer(kind, name, hub)
    shift = bool(config.get("shift_logits", kind == "dream") if shift is None else shift)
    model.config.is_causal, model.config.shift_logits = False, shift
    return Denoiser(model if device is None else model.to(device), shift=shift,
                    tokenizer=tokenizer, **special_ids(config, tokenizer, mask_id))

def hub_options(given, *names):
    """What of the keywords `given` says how to ask the hub. If that is needed for one of the
    `names` and cannot be, only what was downloaded before is read: huggingface_hub would try
    for half a minute to reach the hub for each file that is missing."""
    if not given.get("local_files_only") and not all(map(os.path.exists, names)):
        try:
            get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except Exception:   # its classes differ between the versions of huggingface_hub
            given["local_files_only"] = True
    options = ("revision", "cache_dir", "token", "local_files_only", "subfolder")
    return {k: given[k] for k in options if k in given}

def add_adapter(model, adapter, hub):
    """Load a PEFT adapter, a folder or hub id, into a model. ValueError if it does not fit."""
    how = {k: hub[k] for k in ("cache_dir", "token", "local_files_only") if k in hub}
    for file in ("adapter_config.json", "adapter_model.safetensors"):   # and no pickle
        folder = Path(transformers.utils.cached_file(adapter, file, **how)).parent
    report = model.load_adapter(str(folder), ignore_mismatched_sizes=True)
    check_report(adapter, model, vars(report))

def check_report(name, model, report):
    """ValueError if weights are missing, unexpected or of another shape."""
    wrong = {k: sorted(map(str, report[k]))[:4] for k in (
        "missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs") if report.get(k)}
    refuse(wrong, f"{name!r} does not fit {type(model).__name__}: {wrong}")

def device_for(device, given):
    """Where to load, None if `given` decides. ValueError for both or an unusable device."""
    placing = [k for k in ("device_map", "tp_plan", "quantization_config") if given.get(k)]
    refuse(device is not None and placing, f"device={device!r} was given with {placing}")
    if device is None and not placing:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        raise ValueError(f"device is {str(device)!r}, which torch cannot use here: {e}") from e
    return device

def special_ids(config, tokenizer, mask_id):
    """The id keywords of Denoiser, from config.json and the tokenizer."""
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()

    def known(field, *words):
        value = config.get(field)
        ids = [*value] if isinstance(value, (list, tuple)) else [value]
        ids += [getattr(tokenizer, field, None), *map(vocabulary.get, words)]
        return (*dict.fromkeys(i for i in ids if i is not None),)

    masks = known("mask_token_id", "<|mask|>", "<|mdm_mask|>", "[MASK]")
    n_tokens = max(vocabulary.values()) + 1 if vocabulary else config.get("vocab_size")
    return dict(mask_id=(*masks, None)[0] if mask_id is None else mask_id,
                eos_ids=known("eos_token_id", "<|eot_id|>", "<|im_end|>", "<|dlm_pad|>"),
                pad_id=(*known("pad_token_id"), None)[0], n_tokens=n_tokens)

def load_tokenizer(kind, name, hub):
    """The checkpoint's tokenizer, or None with a warning."""
    cls = {"llada": transformers.PreTrainedTokenizerFast,
           "dream": transformers.Qwen2TokenizerFast}.get(kind, transformers.AutoTokenizer)
    try:
        tokenizer = cls.from_pretrained(name, trust_remote_code=False, **hub)
        words = {*tokenizer.get_vocab()} - {*tokenizer.get_added_vocab()}
        refuse(not words - {*tokenizer.all_special_tokens}, "there is no vocabulary file")
        return tokenizer
    except (OSError, ValueError, TypeError, KeyError, ImportError) as e:
        warnings.warn(f"no tokenizer in {name!r}, so no encode and decode: {e}", stacklevel=3)

def encode(denoiser, text, *, chat=True, **template):
    """Token ids of prompts, left-padded, and their mask: (B, P) ids and bool, on the model's
    device. text: a str, a list of chat messages ({"role", "content"}), or a list of either.
    With `chat` a str becomes a user message and goes through the tokenizer's template, which
    is given the options `template`, for example enable_thinking=False."""
    refuse(not text or not all(text), f"text is {text!r}, expected prompts, none empty")
    refuse(denoiser.tokenizer is None, "this denoiser has no tokenizer: give token ids")
    tokenizer, rows = denoiser.tokenizer, []
    source = template.get("chat_template", tokenizer.chat_template)
    known = re.findall(r"\w+", f"{source} {inspect.signature(tokenizer.apply_chat_template)}")
    unknown = [name for name in template if not chat or name not in known]
    refuse(unknown, f"the chat template has no {', '.join(unknown)}, or is not used")
    for item in [text] if isinstance(text, str) or isinstance(text[0], dict) else text:
        if isinstance(item, str) and chat and tokenizer.chat_template:
            item = [{"role": "user", "content": item}]
        plain = isinstance(item, str)  # else the template writes special tokens
        if not plain:
            item = tokenizer.apply_chat_template(
                item, **{"add_generation_prompt": True, **template, "tokenize": False})
        rows.append(tokenizer(item, add_special_tokens=plain)["input_ids"])
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in rows[-1]:
            warnings.warn("a prompt has words that the tokenizer does not know; it becomes "
                          f"{tokenizer.decode(rows[-1])!r}", stacklevel=2)
    return tuple(t.to(denoiser.device) for t in pad_left(rows, denoiser.pad_id))

def decode(denoiser, ids):
    """A list of str, each ending before its first eos, of (B, n) ids or a list of rows."""
    refuse(denoiser.tokenizer is None, "this denoiser has no tokenizer")
    ends = denoiser.eos_ids
    rows = [itertools.takewhile(lambda i: i not in ends, map(int, row)) for row in ids]
    return [denoiser.tokenizer.decode([*row], skip_special_tokens=True) for row in rows]

# Methods, but written here: a sampler that is copied out does without text.
Denoiser.encode, Denoiser.decode = encode, decode

def pad_left(rows, pad_id):
    """A list of id lists -> (B, P) ids padded on the left, (B, P) bool mask."""
    P, n = max(map(len, rows)), torch.tensor([[len(r)] for r in rows])
    ids = torch.tensor([[pad_id] * (P - len(r)) + list(r) for r in rows], dtype=torch.long)
    return ids, torch.arange(P) >= P - n


# -------------------------------------------------------------------------------------------
# 11. What is refused: what would be wrong in silence. Torch and Python say the rest.

LIMITS = {  # name -> least and most of a number, whole if the least is; or what it can be
    **dict.fromkeys(("block_length", "steps", "refresh", "draft_steps", "n", "n_samples",
                     "batch_size"), (1, math.inf)),
    **dict.fromkeys(("gen_length", "max_revisions", "max_rounds", "max_seeds",
                     "max_checks"), (0, math.inf)),
    **dict.fromkeys(("temperature", "cfg_scale", "factor", "tau_kl"), (0.0, math.inf)),
    **dict.fromkeys(("threshold", "threshold_back", "tau", "tau_replace", "tau_remask"),
                    (0.0, 1.0)),
    **dict.fromkeys(("suppress_eos", "postpone_eos", "early_stop", "tempered_confidence",
                     "adaptive", "commit_cap", "override"), (False, True)),
    "remasking": ("low_confidence", "margin", "entropy", "random"), "of": ("token", "max"),
    "cache": (None, "prefix", "dual"), "drafter_cache": (None, "prefix", "dual", "dkv")}

def refuse(wrong, words):
    """ValueError(words) if something is wrong."""
    if wrong:
        raise ValueError(words)

def check(**given):
    """ValueError unless each value is within the LIMITS of its name. None: not given."""
    for name, value in given.items():
        low, high, *_ = limits = LIMITS[name]
        if isinstance(high, str | bool):
            fits = repr(value) in map(repr, limits)     # 1 is not True here
            refuse(not fits, f"{name} is {value!r}, expected one of {limits}")
        elif value is not None:
            fits = isinstance(value, Integral if isinstance(low, int) else Real)
            fits = fits and not isinstance(value, bool) and low <= value <= high
            refuse(not fits or value == math.inf, f"{name} is {value!r}, expected a "
                   f"{'whole ' * isinstance(low, int)}number from {low} to {high}")

def start_canvas(denoiser, prompt, attention_mask, gen_length):
    """Prompt + G masks: x (B, P + G), visible (B, P + G) bool, P. Arguments as in Decode."""
    if isinstance(prompt, (list, tuple)) and prompt and torch.as_tensor(prompt[0]).dim():
        rows = [check_ids(denoiser, row, "prompt").tolist() for row in prompt]
        refuse(attention_mask is not None and len({*map(len, rows)}) > 1,
               "prompt's rows differ in length, which makes an attention_mask: drop yours")
        prompt, own = pad_left(rows, denoiser.pad_id)
        attention_mask = own if attention_mask is None else attention_mask
    prompt = torch.atleast_2d(torch.as_tensor(prompt))
    (B, P), device = prompt.shape, denoiser.device
    refuse(B == 0 or P + gen_length == 0, f"prompt has shape {(B, P)}: nothing to decode")
    if attention_mask is None and (prompt[:, ::max(P - 1, 1)] == denoiser.pad_id).any():
        warnings.warn(f"prompt begins or ends with the padding id {denoiser.pad_id}, and "
                      "without an attention_mask that is text to the model", stacklevel=2)
    visible = torch.as_tensor(True if attention_mask is None else attention_mask)
    visible = visible.to(prompt.device).bool().expand(B, P)
    refuse((visible[:, :-1] & ~visible[:, 1:]).any(), "attention_mask must be left padding")
    prompt = check_ids(denoiser, prompt.masked_fill(~visible, denoiser.pad_id), "prompt")
    limit = getattr(denoiser.config, "max_position_embeddings", math.inf)
    refuse(P + gen_length > limit,
           f"prompt + gen_length is {P} + {gen_length} tokens, the model takes {limit}")
    if gen_length > (known := getattr(denoiser.config, "trained_gen_length", math.inf)):
        warnings.warn(f"gen_length is {gen_length}, but this model was trained to generate at "
                      f"most {known} tokens (trained_gen_length of its config)", stacklevel=2)
    x = F.pad(prompt, (0, gen_length), value=denoiser.mask_id)
    return x, F.pad(visible, (0, gen_length), value=True).to(device), P

def check_ids(denoiser, ids, name):
    """ids as a tensor on the model's device; ValueError for what the model does not have."""
    ids = torch.as_tensor(ids)
    refuse(ids.numel() and (ids.is_floating_point() or ids.dtype == torch.bool),
           f"{name} holds {ids.dtype}, expected ids (`encode` gives a pair, ids and mask)")
    V = denoiser.n_embeddings or math.inf
    bad = ids[(ids < 0) | (ids >= V)].tolist()
    refuse(bad, f"{name} holds {bad[:4]}, outside the vocabulary of {V} ids")
    return ids.long().to(denoiser.device)

def check_denoiser(d):
    """The ValueErrors of a Denoiser."""
    refuse(d.mask_id is None, "mask_id is None: this checkpoint's files do not name it, pass "
           "it, e.g. load_denoiser(..., mask_id=126336) for LLaDA, 151666 for Dream")
    for name, ids in dict(mask_id=[d.mask_id], pad_id=[d.pad_id], eos_ids=d.eos_ids).items():
        refuse(not all(0 <= i < (d.n_embeddings or math.inf) for i in ids),
               f"{name} is {ids}, but the model has {d.n_embeddings} embeddings")
    refuse(d.mask_id in d.eos_ids, f"eos_ids is {d.eos_ids} and holds the mask_id {d.mask_id}")

@torch.no_grad()
def passes_kv(d):
    """Whether a model gives `kv` to its attention (a plain callable may). ValueError unless a
    transformers model has full attention in all layers, and it is ours."""
    if not hasattr(d.model, "set_attn_implementation"):
        return True
    name, types = type(d.model).__name__, getattr(d.config, "layer_types", None) or ()
    refuse({*types} - {"full_attention"}, f"{name} has layers of {sorted({*types})}")
    refuse(d.config._attn_implementation != "dlm_spec", f"{name} keeps its own attention")
    layers, ids = set(), torch.tensor([[0, 0], [0, 1]], device=d.device)

    def attend(layer, *qkv_and_more):
        layers.add(layer)
        return sdpa(*qkv_and_more)

    logits = d.model(input_ids=ids, attention_mask=None, use_cache=False,
                     kv=SimpleNamespace(attend=attend)).logits
    refuse(torch.equal(*logits[:, 0]), f"{name} does not see what comes later")
    n = getattr(d.config, "num_hidden_layers", len(layers))
    refuse(layers and len(layers) < n, f"{len(layers)} of {n} layers of {name} are attention")
    return bool(layers)


# -------------------------------------------------------------------------------------------
# 12. Command line: notebooks/command_line.py, beside the embedded model that it shows at work.

EXAMPLE = ("Mia has 12 shells. She finds 5 more shells. Then she gives 3 shells to Ben. "
           "Now she has twice as many. How many shells are left?")
SAMPLERS = dict(llada=sample_llada, fast_dllm=sample_fast_dllm, dkv=sample_dkv,
                dual_diffusion=sample_dual_diffusion, wino=sample_wino, saber=sample_saber,
                cover=sample_cover)

if __name__ == "__main__":
    sys.path.insert(0, str(EMBEDDED_MODEL.parents[1]))
    import command_line
    command_line.main()
