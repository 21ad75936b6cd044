# SPDX-License-Identifier: MIT
"""dlm_spec: decoding for masked-diffusion language models, in one module to read and copy from.

A masked-diffusion model sees a *canvas*, a sequence some of whose tokens are a mask M, and gives
for every masked position a distribution over the token that belongs there. Text is made by
starting from a prompt followed by G masks and filling them over several forward passes.

    denoiser = load_denoiser()                    # the embedded model; or LLaDA, Dream, a folder
    ids, mask = denoiser.encode(EXAMPLES[0])      # "Mia has 12 shells. She finds 5 more ..."
    out = sample_llada(denoiser, ids, attention_mask=mask, gen_length=64)
    print(denoiser.decode(out.generated)[0])      # 12 + 5 = 17; 14 = 17 - 3; * 2 -> 28, #### 28

This is no framework: every sampler is a plain function over a denoiser and a canvas. Copy what you
need: a sampler, the primitives above it and the denoiser stand on their own.

Papers
    [1] LLaDA  Nie et al. 2025, Large Language Diffusion Models, arXiv 2502.09992; ML-GSAI/LLaDA
    [2] Dream  Ye et al. 2025, Dream 7B, arXiv 2508.15487; DreamLM/Dream
    [3] MDLM   Sahoo et al. 2024, Simple and Effective Masked Diffusion LMs, arXiv 2406.07524
    [4]        Zheng et al. 2024, Masked Diffusion Models are Secretly Time-Agnostic...,
               arXiv 2409.02908
    [5] Fast-dLLM  Wu et al. 2025, Training-free Acceleration of Diffusion LLM by Enabling KV Cache
               and Parallel Decoding, arXiv 2505.22618; NVlabs/Fast-dLLM
    [6] dKV-Cache  Ma et al. 2025, The Cache for Diffusion Language Models, arXiv 2505.15781;
               horseee/dKV-Cache
    [7] DualDiffusion  A Speculative Decoding Strategy for Masked Diffusion Models
    [8] WINO       Hong et al. 2025, Wide-In, Narrow-Out, arXiv 2507.18578; Feng-Hong/WINO-DLLM
    [9] COVER      Stop the Flip-Flop: Context-Preserving Verification for Fast Revocable Diffusion
               Decoding
    [10] Saber     zhaoyMa/Saber

Glossary
    B, L, P, G, V     batch; canvas length L = P prompt + G generated; vocabulary size
    x                 (B, L) canvas of token ids                         x_t in [1], [3]
    M                 the mask id                                        [MASK], m
    t                 masking probability, the diffusion time in (0, 1]  t, and 1 - alpha_t in [3]
    ask               (B, L) bool, the positions whose logits are read; N = ask.sum().
                      Per-candidate tensors are flat, (N, ...) in row-major order, so that
                      `y[ask]` takes them from a canvas and
                      `y.masked_scatter(ask, v)` puts them back
    x0                (N,) the token predicted at each asked position    x_0 hat
    confidence        (N,) how sure the model is of x0                   c in [1]
    NFE               forward passes: how often a row's canvas went through the model
    q, k, v           (B, H, L, d) attention inputs after the rotary embedding; k, v may have
                      fewer heads
    D                 |D| positions are committed in a forward           D in [9]
    K                 drafter forwards between two verifications         K in [7]
    seeds             committed tokens that a forward checks again       S in [9]
    u, d_in, d_out    a seed's uncertainty; how much masks look at it, and it at new tokens
                                                                         u, d_in, d_out in [9]
"""
import argparse
import functools
import inspect
import itertools
import math
import os
import shutil
import sys
import textwrap
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2TokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

EMBEDDED_MODEL = Path(__file__).resolve().parent / "notebooks" / "mini" / "model"


# ---------------------------------------------------------------------------------------------
# 1. The hook: the one place where this module meets transformers.

def bidirectional_attention(module, q, k, v, attention_mask=None, scaling=None, dropout=0.0,
                            kv=None, softcap=None, s_aux=None, **_):
    """Attention without a causal mask, for any model that takes its attention from transformers'
    AttentionInterface (Llama, Qwen2, Qwen3, ...), unedited:
    `model.set_attn_implementation("dlm_spec")`.

    Args:
        q: (B, H, n, d) queries of the n tokens of this forward, after the rotary embedding.
        k, v: (B, H_kv, n, d) their keys and values; H_kv divides H.
        attention_mask: bool, True where a query may look, broadcastable to (B, H, n, columns);
            None: everywhere.
        kv: any keyword given to `model(...)` arrives here. An object with
            `attend(layer, q, k, v, attention_mask, scaling) -> (B, H, n, d)` takes over,
            see KVCache.
    Returns: (B, n, H, d) and None, as the interface wants it. ValueError on what only some models
    ask of their attention (Gemma 2's softcap, gpt-oss's sinks) and a fused kernel does not do.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError(f"{type(module).__name__} wants soft-capped attention or attention sinks, "
                         "which the dlm_spec attention does not do")
    if kv is not None:
        out = kv.attend(module.layer_idx, q, k, v, attention_mask, scaling)
    else:
        out = sdpa(q, k, v, attention_mask, scaling, dropout)
    return out.transpose(1, 2), None


def sdpa(q, k, v, mask=None, scaling=None, dropout=0.0):
    """softmax(q k^T scaling) v over the columns `mask` allows; k, v may have fewer heads than q."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and mask is not None and q.is_cuda:   # whose fused kernels take groups or a mask
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling,
                                          **grouped)


AttentionInterface.register("dlm_spec", bidirectional_attention)


class KVCache:
    """Keys and values of a canvas: a forward can recompute a window of it and read the rest.

    Layout: `k[layer]`, `v[layer]` are (B, H_kv, L, d), after the rotary embedding (never rotated
    again), heads unrepeated, on the layer's own device. Each forward says by `begin` which rows of
    the batch and which canvas columns its tokens are; it stores those and attends to all L columns.

    probe_layers: indices of the layers whose attention maps are looked at, see `begin`.
    """

    def __init__(self, probe_layers=()):
        self.k, self.v, self.probe_layers = {}, {}, tuple(probe_layers)
        self.begin(None)

    def begin(self, B, rows=None, positions=None, shadow=0, seeds=None, probe=None):
        """The next forward. rows: (R,) of the B rows, None: all. positions: (R, n) canvas columns
        of its tokens, None: all L; a row may name a column twice if both carry the same token.
        shadow: so many tokens behind the canvas are seen in this forward and not stored.
        seeds: the DualView of a COVER forward. probe: (R, m) which tokens' attention to keep, as
        `attention` (R, m, L), the mean over heads and probe layers.
        """
        self.B, self.rows, self.positions, self.shadow = B, rows, positions, shadow
        self.seeds, self.probe, self.attention = seeds, probe, 0.0

    def attend(self, layer, q, k, v, mask, scaling):
        """The hook's view: store this layer's k, v, then attend to the whole canvas."""
        new_k, new_v = k, v
        if self.positions is not None or self.seeds is not None:
            k, v = self._store(self.k, layer, k), self._store(self.v, layer, v)
        elif self.rows is None and not self.shadow:
            self.k[layer], self.v[layer] = k, v
        else:
            L = k.shape[2] - self.shadow
            self._store(self.k, layer, k[:, :, :L])
            self._store(self.v, layer, v[:, :, :L])
        out = sdpa(q, k, v, mask, scaling)
        if self.probe is not None and layer in self.probe_layers:
            maps = attention_map(take(q, self.probe), k, mask, scaling)
            self.attention = self.attention + maps.to(self.probe.device) / len(self.probe_layers)
        if self.seeds is None:
            return out
        return self.seeds.correct(out, q, new_k, new_v, k, v, scaling)

    def _store(self, canvas, layer, fresh):
        """Store `fresh` (R, H_kv, n, d), all but what seeds hold back; returns those rows' whole
        canvases (R, H_kv, L, d)."""
        rows = None if self.rows is None else self.rows.to(fresh.device)
        if layer not in canvas:
            canvas[layer] = fresh.new_zeros(self.B, *fresh.shape[1:])
        whole = canvas[layer] if rows is None else canvas[layer][rows]
        columns = (None if self.positions is None else
                   self.positions.to(fresh.device)[:, None, :, None].expand_as(fresh))
        if self.seeds is not None:
            old = whole if columns is None else whole.gather(2, columns)
            fresh = torch.where(self.seeds.hold.to(fresh.device)[:, None, :, None], old, fresh)
        whole = fresh if columns is None else whole.scatter_(2, columns, fresh)
        if rows is None:
            canvas[layer] = whole
        else:
            canvas[layer][rows] = whole
        return whole


@dataclass
class DualView:
    """COVER's two views in one forward [9]; only section 10 needs it. Indices are of the forward's
    n tokens.

    Everyone sees the seeds' stored keys and values; a seed is judged at a row that sees, in place
    of its own stored column, the fresh one of its mask token: the *diagonal correction*. Exact in
    any precision, because those few rows are simply computed once more: their own columns masked
    out, the fresh ones appended, one softmax. (Subtracting the own column from the finished output
    and adding the fresh one is right on paper and loses all digits when its weight nears 1.)

    hold: (R, n) bool, tokens whose stored keys and values stay as they are. read: (R, S) the rows
    where seeds are read. fresh: (R, F) the tokens that replace own columns, F = S, or 2 S in
    shifted models. look: (R, 1, S, L + F) bool, what the rows see. real: (R, 1, 1, 1) bool, False
    in batch rows without seeds.
    """
    hold: Tensor
    read: Tensor
    fresh: Tensor
    look: Tensor
    real: Tensor

    def correct(self, out, q, new_k, new_v, k, v, scaling):
        """out (R, H, n, d) with the rows of `read` as they are without themselves."""
        read, fresh, look, real = (t.to(out.device) for t in (self.read, self.fresh, self.look,
                                                              self.real))
        own = sdpa(take(q, read), torch.cat([k, take(new_k, fresh)], 2),
                   torch.cat([v, take(new_v, fresh)], 2), look, scaling)
        own = torch.where(real, own, take(out, read))
        return out.scatter(2, read[:, None, :, None].expand_as(own), own)


def take(t, index):
    """(R, H, n, d), (R, m) -> (R, H, m, d), those tokens of each row."""
    return t.gather(2, index.to(t.device)[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3]))


def attention_map(q, k, mask=None, scaling=None):
    """softmax(q k^T scaling) itself, in float32, averaged over heads: (R, m, columns)."""
    q = rearrange(q.float(), "r (h g) m d -> r h g m d", h=k.shape[1])
    scores = torch.einsum("rhgmd,rhnd->rhgmn", q, k.float()) * (scaling or q.shape[-1] ** -0.5)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None], -torch.inf)
    return scores.softmax(-1).mean((1, 2))


# ---------------------------------------------------------------------------------------------
# 2. The denoiser: canvas in, logits of the asked positions out.

@dataclass
class Work:
    """What a decode cost. `nfe`, `positions` (B,): forwards and token positions processed, per row,
    padding not counted; `calls`: calls of the model, whatever the batch. `sane`: whether the last
    call's logits could be used, a 0-d bool that the host reads along with the next call's sizes."""
    nfe: Tensor
    positions: Tensor
    calls: int = 0
    sane: Tensor | None = None

    def add(self, rows, positions, forwards=1):
        """A call of the model over `rows` (R,), None: all, of `positions` (R,) tokens each."""
        rows = slice(None) if rows is None else rows
        self.nfe[rows] += forwards
        self.positions[rows] += positions * forwards
        self.calls += 1


class Denoiser:
    """A masked-diffusion model as a function of the canvas.

    Args:
        model: a transformers causal LM (put into eval mode and the `dlm_spec` attention), or any
            callable `model(input_ids=, attention_mask=, position_ids=, use_cache=, **kw)` whose
            result has `.logits` (B, L, V). attention_mask is bool (B, 1, 1, L), or (B, 1, n, n) in
            leave_one_out, or None without padding. Caches and COVER also pass `kv=`, whose
            `attend` the model has to call for anything to be cached.
        mask_id: the id of M. Never predicted.
        eos_ids: ids that end a text, the end-of-sequence token first.
        pad_id: filler of left-padded prompts (default: the first of eos_ids, else 0).
        n_tokens: ids from here on are padding of the vocabulary. Never predicted.
        shift: True for models that predict position i at the output of i-1 (Dream [2]).
        tokenizer: only `encode` and `decode` need it.
    """

    def __init__(self, model, mask_id, *, eos_ids=(), pad_id=None, n_tokens=None, shift=False,
                 tokenizer=None):
        check_model(model, mask_id, eos_ids, pad_id, n_tokens)
        if hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation("dlm_spec")
            model.eval()
        self.model, self.mask_id, self.shift = model, int(mask_id), shift
        self.eos_ids = tuple(map(int, eos_ids))
        self.pad_id = pad_id if pad_id is not None else (self.eos_ids + (0,))[0]
        self.n_tokens, self.tokenizer = n_tokens, tokenizer
        self._head = (model.get_output_embeddings() if hasattr(model, "get_output_embeddings")
                      else None)

    @property
    def n_embeddings(self):
        """How many ids the model can take; None for a plain callable."""
        return embeddings_of(self.model)

    @property
    def device(self):
        """Where the canvas has to be."""
        if self.n_embeddings is not None:
            return self.model.get_input_embeddings().weight.device
        first = next(iter(getattr(self.model, "parameters", tuple)()), None)
        return getattr(self.model, "device", torch.device("cpu") if first is None else first.device)

    def __call__(self, x, ask, attention_mask=None, *, cfg_scale=0.0, given=None, work=None,
                 kv=None, window=None, seeds=None, probe=None):
        """Logits of the asked positions. Rows that ask for nothing are not forwarded.

        Args:
            x: (B, L) canvas. attention_mask: (B, L) bool, False on padding; None: no padding.
            ask: (B, L) bool; where it is False everywhere, no forward is made. Or a tuple of such,
                parts of what one forward is asked (a part that is all of it shares its memory).
            cfg_scale, given: classifier-free guidance [1]: u + (cfg_scale + 1)(c - u), where c
                are the logits of x and u those of x with the `given` (B, L) positions masked.
                Counts two forwards; takes no kv.
            work: a Work to add this forward to; ValueError when its last logits were no use.
            kv: a KVCache, filled by this forward. window: (B, L) bool, recompute these columns
                only and take the others' keys and values from kv; None: all. It must hold `ask`.
                Shifted models recompute one column more before each, where it is read.
            seeds: (B, L) bool, tokens to predict as if they were masked, while all others still
                see what kv holds of them (COVER [9], see DualView). Part of `ask` and `window`.
            probe: (B, L) bool, kv.attention (R, m, L) then holds these tokens' attention maps; R
                the rows that ask, m as in columns_of.
        Returns: (N, V), N = ask.sum(), with M and padded vocabulary rows at -inf; of a tuple a
        tuple. The host waits for the device once, to learn all sizes.
        """
        single, parts = not isinstance(ask, tuple), ask if isinstance(ask, tuple) else (ask,)
        check_forward(x, parts, cfg_scale, given, kv)
        ask = asked = functools.reduce(torch.logical_or, parts)
        visible, position_ids, late = self._layout(x, attention_mask)
        live, outside = ask.any(1), ask & False
        if window is not None:
            window = earlier_too(window & visible, self.shift) & visible
            outside = ask & ~window.gather(1, torch.arange(x.shape[1], device=x.device) - late)
        # how many are asked, in how many rows, and what the fullest row has of each
        N, R, padded, out, n_window, n_seeds, n_probe, *n_parts = to_host(
            ask.sum(), live.sum(), (~visible & live[:, None]).any(), outside.any(),
            widest(window, live), widest(seeds, live), widest(probe, live),
            *(part.sum() for part in parts), work=work)
        for name, value in (("a window", window is not None), ("seeds", n_seeds)):
            if value and (kv is None or not (kv.k or self._head is None)):
                raise ValueError(f"{name} needs a kv that an earlier forward has filled")
        if out:
            raise ValueError("ask holds positions that are read outside the window")
        if N == 0:
            nothing = torch.empty(0, self.n_embeddings or 0, device=x.device)
            return nothing if single else (nothing,) * len(parts)
        B, rows = len(x), rows_with(live, R)
        x, ask, visible, position_ids, late, given, window, seeds, probe = (
            t if t is None or rows is None else t[rows]
            for t in (x, ask, visible, position_ids, late, given, window, seeds, probe))
        row, column = places(ask, N)
        look = visible[:, None, None] if padded else None       # no mask: the faster kernels
        cost, positions, index = visible.sum(1), None, None
        if n_seeds:
            x = x.masked_fill(seeds, self.mask_id)
        column = column - late[row, column]     # shifted: i is read at i-1, the first at itself
        if window is not None:
            cost, positions = window.sum(1), columns_of(window, n_window)
            index = window.cumsum(1) - 1        # canvas column -> token of this forward
            column = index[row, column]
            x, position_ids = x.gather(1, positions), position_ids.gather(1, positions)
        if kv is not None:
            view = None
            if n_seeds:
                view = dual_view(seeds, late, visible, self.shift, positions, index, n_seeds)
            if probe is not None:
                probe = columns_of(probe, n_probe)
                probe = probe if index is None else index.gather(1, probe)
            kv.begin(B, rows, positions, seeds=view, probe=probe)
        if work is not None:
            work.add(rows, cost, 1 + bool(cfg_scale))
        logits = (self._guided(cfg_scale, given, x, row, column, look, position_ids) if cfg_scale
                  else self._forward(x, row, column, look, position_ids, kv))
        logits = self.ban(logits, work)
        return logits if single else tuple(logits if n == N else logits[among(part, asked, n)]
                                           for part, n in zip(parts, n_parts))

    def leave_one_out(self, x, ask, checked, attention_mask=None, *, shadow=None, work=None,
                      kv=None):
        """One full forward that also judges the `checked` (B, L) tokens without themselves.

        A shadow block (WINO [8]): each checked position (or, WINO's way, each of `shadow` (B, L),
        which holds them) has a second token, M, behind the canvas, with the same position id. It
        sees the canvas except its own position, and the other
        shadows; the canvas sees no shadow. In a shifted model the shadow of i is x[i-1] at i-1,
        where i is read, and sees no token that carries x[i]. Deeper than one layer a token still
        leaks into its shadow through the hidden states of others.

        Returns logits (N, V) of `ask` and (C, V) of `checked`; all else as in __call__.
        """
        B, shadow, live = len(x), checked if shadow is None else shadow, (ask | checked).any(1)
        N, C, R, S = to_host(ask.sum(), checked.sum(), live.sum(), widest(shadow, live), work=work)
        if N + C == 0:
            return (torch.empty(0, self.n_embeddings or 0, device=x.device),) * 2
        rows = rows_with(live, R)
        x, ask, checked, shadow, attention_mask = (
            t if t is None or rows is None else t[rows]
            for t in (x, ask, checked, shadow, attention_mask))
        visible, position_ids, late = self._layout(x, attention_mask)
        (R, L), (row, column) = x.shape, places(ask, N)
        at = columns_of(shadow, S)                          # (R, S) the columns with a shadow
        real = torch.arange(S, device=x.device) < shadow.sum(1)[:, None]
        source = at - late.gather(1, at)
        token = torch.where(late.gather(1, at) > 0, x.gather(1, source), self.mask_id)
        look = F.pad(visible[:, None].expand(R, L + S, L), (0, S)).clone()
        look[:, L:, :L] &= torch.arange(L, device=x.device) != at[..., None]
        look[:, L:, L:] = real[:, None]
        if self.shift:      # nor a shadow that carries x[i]; each sees itself
            look[:, L:, L:] &= source[:, None] != at[..., None]
            look[:, L:, L:] |= torch.eye(S, dtype=torch.bool, device=x.device)
        c_row, c_index = places(checked, C)
        c_index = (shadow.cumsum(1) - 1)[c_row, c_index]
        if kv is not None:
            kv.begin(B, rows, None, shadow=S)
        if work is not None:
            work.add(rows, visible.sum(1) + shadow.sum(1))
        logits = self.ban(self._forward(
            torch.cat([x, token], 1), torch.cat([row, c_row]),
            torch.cat([column - late[row, column], L + c_index]), look[:, None],
            torch.cat([position_ids, position_ids.gather(1, source)], 1), kv), work)
        return logits[:len(row)], logits[len(row):]

    def _layout(self, x, attention_mask):
        """Of canvases x (R, L): where they are no padding, their position ids, and how much earlier
        than at its own column each token is read."""
        visible = (torch.ones_like(x, dtype=torch.bool) if attention_mask is None
                   else attention_mask.bool())
        position_ids = (visible.cumsum(1) - 1).clamp(min=0)
        return visible, position_ids, self.shift * (position_ids > 0).long()

    def _forward(self, x, row, column, mask, position_ids, kv):
        """One call of the model; the vocabulary head runs on the (row, column) pairs alone."""
        extra = {} if kv is None else {"kv": kv}
        def pick(_, args):
            return (args[0][row.to(args[0].device), column.to(args[0].device)],)
        handle = self._head.register_forward_pre_hook(pick) if self._head is not None else None
        try:
            logits = self.model(input_ids=x, attention_mask=mask, position_ids=position_ids,
                                use_cache=False, **extra).logits
        finally:
            if handle is not None:
                handle.remove()
        return logits if self._head is not None else logits[row, column]

    def _guided(self, scale, given, x, row, column, mask, position_ids):
        """u + (scale + 1)(c - u): conditional and unconditional canvases in one batch."""
        both = torch.cat([x, x.masked_fill(given, self.mask_id)])
        c, u = self._forward(both, torch.cat([row, row + len(x)]), torch.cat([column, column]),
                             None if mask is None else torch.cat([mask, mask]),
                             torch.cat([position_ids, position_ids]), None).chunk(2)
        return u + (scale + 1) * (c - u)

    def ban(self, logits, work=None):
        """Logits (N, V) with M and the padded vocabulary rows at -inf, in place; and a note in
        `work` whether each row can be used: no NaN, no +inf, not -inf alone."""
        if self.n_tokens is not None:
            logits[:, self.n_tokens:] = -torch.inf
        if self.mask_id < logits.shape[1]:
            logits[:, self.mask_id] = -torch.inf
        logits = logits.to(self.device)
        if work is not None:
            work.sane = logits.amax(1).isfinite().all()
        return logits

    def compile(self, **options):
        """Make the model's layers faster. On one CUDA device and without options: by CUDA graphs,
        see CudaGraphs; the same numbers. Else by torch.compile with its `options`: every kind of
        forward is compiled when it first comes (up to a minute), for all sizes at once, but once
        more where a size (rows, seeds) is 1: a sampler that has met both compiles nothing more.
        Logits change by rounding. Raises torch's limit on graphs per function, for the process.
        (Its mode "reduce-overhead" does not go together with caches.)
        """
        if self._head is None:
            raise ValueError("the model is a plain callable: compile it yourself")
        layers, where = self.model.base_model, {p.device for p in self.model.parameters()}
        if options and isinstance(layers.forward, CudaGraphs):
            raise ValueError("the layers are CUDA graphs by now: load the model again")
        if not options and len(where) == 1 and self.device.type == "cuda":
            if not isinstance(layers.forward, CudaGraphs):
                layers.forward = CudaGraphs(layers.forward)
            return
        limit = torch._dynamo.config.recompile_limit        # 8: fewer than there are kinds
        torch._dynamo.config.recompile_limit = max(limit, 64)
        # the layers alone: the vocabulary head runs on other rows each time
        layers.compile(**{"dynamic": True} | options)

    def encode(self, text, *, chat=True, system=None):
        """Token ids of prompts, left-padded: (B, P) ids and (B, P) bool mask,
        on the model's device.

        text: a str, a list of chat messages ({"role", "content"}), or a list of either. With
        `chat` a str becomes a user message (after a `system` one) and goes through the
        tokenizer's chat template.
        """
        if self.tokenizer is None:
            raise ValueError("this denoiser has no tokenizer: pass one to "
                             "Denoiser(..., tokenizer=) or give token ids")
        if not isinstance(text, Sequence) or not text:
            raise ValueError(f"text is {text!r}, expected a str, a list of messages, "
                             "or a list of either")
        single = isinstance(text, str) or isinstance(text[0], dict)
        rows = []
        for item in [text] if single else text:
            if not (item.strip() if isinstance(item, str) else isinstance(item, Sequence) and item
                    and all(isinstance(m, dict) and m.keys() > {"role"} for m in item)):
                raise ValueError(f"prompt {len(rows)} is {item!r}, expected a text that is not "
                                 "empty, or a list of messages: {'role': ..., 'content': ...}")
            templated = isinstance(item, str) and chat and self.tokenizer.chat_template
            if system and not templated:
                raise ValueError("system needs a str prompt and a chat template: "
                                 "put it into the messages instead")
            if templated:
                item = ([{"role": "system", "content": system}] if system else []) + [
                    {"role": "user", "content": item}]
            if not isinstance(item, str):
                item = self.tokenizer.apply_chat_template(item, add_generation_prompt=True,
                                                          tokenize=False)
                rows.append(self.tokenizer(item, add_special_tokens=False)["input_ids"])
            else:
                rows.append(self.tokenizer(item)["input_ids"])
            unknown = self.tokenizer.unk_token_id
            if unknown is not None and unknown in rows[-1]:
                warnings.warn(f"prompt {len(rows) - 1} has words the tokenizer does not know; the "
                              f"model sees {self.tokenizer.decode(rows[-1])!r}", stacklevel=2)
        ids, mask = pad_left(rows, self.pad_id)
        return ids.to(self.device), mask.to(self.device)

    def decode(self, ids, *, trim=True):
        """Texts of (B, n) ids or a list of rows, as a list of str;
        with `trim` each ends before its first eos id (for whole sequences, whose padding and
        messages may hold eos ids: trim=False)."""
        if self.tokenizer is None:
            raise ValueError("this denoiser has no tokenizer: "
                             "pass one to Denoiser(..., tokenizer=)")
        rows = (ids.tolist() if hasattr(ids, "tolist")
                else [r.tolist() if hasattr(r, "tolist") else r for r in ids])
        rows = rows if rows and isinstance(rows[0], list) else [rows]
        if trim:
            rows = [r[:next((i for i, t in enumerate(r) if t in self.eos_ids), len(r))]
                    for r in rows]
        return [self.tokenizer.decode(r, skip_special_tokens=True) for r in rows]


def capture(forward, device, pool=None):
    """forward() as a CUDA graph: what it returned, a function that computes it anew into the same
    memory, and the memory pool, which other graphs may share."""
    now = torch.cuda.current_stream(device)         # where we are again even after a failure
    with torch.cuda.device(device), torch.cuda.stream(now):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=capture_stream(device)):
            out = forward()
    return out, graph.replay, graph.pool()


@functools.cache
def capture_stream(device):
    """One per device, since each costs its own workspaces."""
    return torch.cuda.Stream(device)


class InPlace(dict):
    """layer -> tensor; whatever is put where there is one is copied into its memory."""

    def __setitem__(self, layer, new):
        old = self.setdefault(layer, new)
        if old is not new:
            old.copy_(new)


class CudaGraphs:
    """The `forward` of a model's layers, replayed as CUDA graphs: the same kernels on the same
    numbers, without the Python and the launches between them, which outlast a small forward.

    A forward of a kind and of sizes that come for the second time on a canvas of B rows and L
    columns is captured, and from then on replayed. A graph reads and writes fixed memory: inputs
    are copied there; keys and values live in buffers, one set per canvas, that are lent to the
    KVCache at work (one that had them before and is still in use gets copies); what it returns
    holds until the next forward. Kept for the `canvases` used last, with `kinds` graphs each.
    Weights must stay where they are. What cannot be captured (layers that wait for the device)
    runs as it is, with a warning.
    """

    def __init__(self, forward, canvases=4, kinds=48):
        self.canvases, self.most, self.kinds, self.failed = {}, canvases, kinds, False
        layers = weakref.WeakMethod(forward)        # which hold this object: they die together
        self.forward = lambda **inputs: layers()(**inputs)

    def __call__(self, kv=None, **inputs):
        """As forward(kv=, **inputs); and just that with gradients, under autocast (which keeps cast
        weights of its own), or with a kv of another class."""
        ids = inputs.get("input_ids")
        if (torch.is_grad_enabled() or type(kv) not in (KVCache, type(None)) or ids is None
                or self.failed or torch.is_autocast_enabled(ids.device.type)):
            return self.forward(kv=kv, **inputs)
        size = (torch.is_inference_mode_enabled(),)
        if kv is not None:
            full = kv.positions is None
            size += kv.B, ids.shape[1] - kv.shadow if full else next(iter(kv.k.values())).shape[2]
        canvas = self.canvases[size] = self.canvases.pop(size, None) or SimpleNamespace(
            k=InPlace(), v=InPlace(), owner=None, pool=None, graphs={})
        for unused in [*self.canvases][:-self.most]:
            del self.canvases[unused]
        given = [inputs]
        if kv is not None:
            self.lend(canvas, kv, size[-2:])
            given += [vars(kv)] + ([vars(kv.seeds)] if kv.seeds is not None else [])
        kind = tuple((name, *((t.shape, t.dtype) if isinstance(t, Tensor) else (t,)))
                     for part in given for name, t in part.items()
                     if not isinstance(t, (InPlace, DualView)))
        if kind not in canvas.graphs:
            canvas.graphs[kind] = None
            for unused in [*canvas.graphs][:-self.kinds]:
                del canvas.graphs[unused]
            return self.forward(kv=kv, **inputs)
        if canvas.graphs[kind] is None:
            fixed, own = [{name: t.clone() if isinstance(t, Tensor) else t
                           for name, t in part.items()} for part in given], None
            if kv is not None:
                own = KVCache()
                vars(own).update(fixed[1], seeds=DualView(**fixed[2]) if fixed[2:] else None)
            try:
                out, replay, canvas.pool = capture(lambda: self.forward(kv=own, **fixed[0]),
                                                   ids.device, canvas.pool)
            except RuntimeError as e:
                self.failed = True
                warnings.warn(f"compile: these layers cannot be captured: {e}", stacklevel=2)
                return self.forward(kv=kv, **inputs)
            canvas.graphs[kind] = fixed, own, out, replay
        fixed, own, out, replay = canvas.graphs[kind]
        for to, part in zip(fixed, given):
            for name, t in part.items():
                if isinstance(t, Tensor):
                    to[name].copy_(t)
        replay()
        if kv is not None and kv.probe is not None:
            kv.attention = own.attention.clone()        # a sampler reads it after its callback
        return out

    @staticmethod
    def lend(canvas, kv, size):
        """Keys and values of kv move into the canvas's buffers; those of another size, which a full
        forward will replace, do not."""
        if kv.k is canvas.k:
            return
        last = canvas.owner and canvas.owner()
        if last is not None and last.k is canvas.k:
            last.k, last.v = ({layer: t.clone() for layer, t in side.items()}
                              for side in (canvas.k, canvas.v))
        for buffers, side in ((canvas.k, kv.k), (canvas.v, kv.v)):
            for layer, t in side.items():
                if (t.shape[0], t.shape[2]) == size:
                    buffers[layer] = t.clone()
        kv.k, kv.v, canvas.owner = canvas.k, canvas.v, weakref.ref(kv)


def embeddings_of(model):
    """How many ids a transformers model can take; None for a plain callable."""
    return (model.get_input_embeddings().weight.shape[0]
            if hasattr(model, "get_input_embeddings") else None)


def dual_view(seeds, late, visible, shift, positions=None, index=None, S=None):
    """The DualView of a forward. seeds, visible: (R, L) bool; late: (R, L), how much earlier a
    column is read; positions, index: the forward's window, see Denoiser.__call__; S: how many
    seeds the fullest row has, where that is known.

    In a shifted model a seed i is read at row i-1, which has seen x[i] in the forward before: so
    both columns come from the store for everyone else, and both are fresh for row i-1.
    """
    at = columns_of(seeds, S)
    R, S = at.shape
    read = at - late.gather(1, at)
    own = torch.zeros(R, S, seeds.shape[1], dtype=torch.bool, device=seeds.device)
    own = own.scatter(2, at[..., None], True).scatter(2, read[..., None], True)
    hold = own.any(1) & seeds.any(1)[:, None]
    eye = torch.eye(S, dtype=torch.bool, device=seeds.device).expand(R, S, S)
    fresh, look = at, torch.cat([visible[:, None] & ~own, eye], 2)
    if shift:
        fresh = torch.cat([at, read], 1)
        look = torch.cat([look, eye & (read != at)[..., None]], 2)
    if positions is not None:
        index = index.clamp(min=0)      # rows without seeds name column 0
        hold, read, fresh = hold.gather(1, positions), index.gather(1, read), index.gather(1, fresh)
    return DualView(hold, read, fresh, look[:, None], seeds.any(1)[:, None, None, None])


def to_host(*values, work=None):
    """0-d tensors as ints, all at once: at each such call the host waits for the device. And in the
    same go whether the logits of work's last call were of use, a ValueError if not."""
    sane = [] if work is None or work.sane is None else [work.sane]
    numbers = torch.stack([v.long() for v in (*values, *sane)]).tolist()
    if sane and not numbers.pop():
        raise ValueError(f"the model's logits are not usable at forward {work.calls}: they hold "
                         "NaN or +inf, or every token is -inf")
    return numbers


def widest(flag, live):
    """How many True the fullest of the rows `live` (B,) of flag (B, L) has, 0-d; 0 for None."""
    return live.sum() * 0 if flag is None else (flag & live[:, None]).sum(1).max()


def places(flag, n):
    """The indices of the True of a bool tensor, of which there are exactly n, in row-major order:
    as nonzero gives them, which would have to ask the device for n."""
    return torch.nonzero_static(flag, size=n).unbind(1)


def among(part, ask, n):
    """(n,) which of the candidates of `ask` (B, L) those of `part` are, exactly n of them."""
    return (ask.flatten().cumsum(0) - 1)[places(part.flatten(), n)[0]]


def rows_with(live, R):
    """The R rows of live (B,) that are True; None: all of them, which need no copying."""
    return None if len(live) == R else places(live, R)[0]


def earlier_too(window, shift):
    """(B, L) bool, in shifted models with the column before each, where it is read."""
    return window | F.pad(window[:, 1:], (0, 1)) if shift else window


def stored(rows, window, seeds, shift):
    """The columns (B, L) whose keys and values a forward of `rows` (B, 1) stores: its window (None:
    all), but what it held back for the seeds."""
    fresh = rows & (True if window is None else earlier_too(window, shift))
    return fresh if seeds is None else fresh & ~earlier_too(seeds, shift)


def eligible(tokens, valid, masks, shift):
    """Those of `tokens` that can be seeds now: their stored keys and values are of themselves
    (`valid`), which a token's are one forward after its commit. In shifted models also those of the
    column before, where a token is read, which must not be where a mask is read. (B, L) bool."""
    tokens = tokens & valid
    if not shift:
        return tokens
    return tokens & F.pad(valid, (1, 0), value=True)[:, :-1] & ~F.pad(masks, (0, 1))[:, 1:]


def columns_of(window, n=None):
    """(B, L) bool -> (B, n) the columns of each row in order, n those of the fullest row; the other
    rows repeat their first one at the end."""
    n = int(window.sum(1).max()) if n is None else n
    columns = window.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :n]
    real = torch.arange(n, device=window.device) < window.sum(1, keepdim=True)
    return torch.where(real, columns, columns[:, :1])


def pad_left(rows, pad_id):
    """A list of id lists -> (B, P) ids padded on the left, (B, P) bool mask."""
    P = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (P - len(r)) + list(r) for r in rows], dtype=torch.long)
    return ids, torch.tensor([[False] * (P - len(r)) + [True] * len(r) for r in rows],
                             dtype=torch.bool).view(ids.shape)


# ---------------------------------------------------------------------------------------------
# 3. Loading: LLaDA is Llama and Dream is Qwen2, so their weights go into the stock classes by name.

# one group per pattern and only \1: all that transformers 5 understands in a key_mapping
LLADA_NAMES = {
    r"^model\.transformer\.wte\.": "model.embed_tokens.",
    r"^model\.transformer\.ln_f\.": "model.norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",       # a block's own ff_out: its down projection
    **{rf"^model\.transformer\.blocks\.(\d+)\.{theirs}\.": rf"model.layers.\1.{ours}."
       for theirs, ours in {
           "attn_norm": "input_layernorm", "q_proj": "self_attn.q_proj",
           "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj",
           "attn_out": "self_attn.o_proj", "ff_norm": "post_attention_layernorm",
           "ff_proj": "mlp.gate_proj",                  # the one under the silu
           "up_proj": "mlp.up_proj", "ff_out": "mlp.down_proj"}.items()},
}
LLADA_MUST_BE = {
    "block_type": "llama", "block_group_size": 1, "activation_type": "silu", "rope": True,
    "alibi": False, "layer_norm_type": "rms", "layer_norm_with_affine": True,
    "bias_for_layer_norm": False, "attention_layer_norm": False, "input_emb_norm": False,
    "include_bias": False, "include_qkv_bias": False, "multi_query_attention": False,
    "scale_logits": False,
}


def llada_config(c):
    """LLaDA's config fields (a dict) -> LlamaConfig. ValueError for what a Llama cannot express."""
    for name, want in LLADA_MUST_BE.items():
        if (got := c.get(name, want)) != want and not (got is None and want is False):
            raise ValueError(f"this LLaDA checkpoint has {name}={got!r}; "
                             f"only {name}={want!r} maps to a stock Llama")
    _need(c, "LLaDA", "d_model", "n_heads", "n_layers", "vocab_size", "max_sequence_length")
    return LlamaConfig(
        vocab_size=c.get("embedding_size") or c["vocab_size"], hidden_size=c["d_model"],
        num_hidden_layers=c["n_layers"], num_attention_heads=c["n_heads"],
        num_key_value_heads=c.get("n_kv_heads") or c["n_heads"],
        intermediate_size=c.get("mlp_hidden_size") or c.get("mlp_ratio", 4) * c["d_model"],
        max_position_embeddings=c["max_sequence_length"], rms_norm_eps=c.get("rms_norm_eps", 1e-5),
        tie_word_embeddings=bool(c.get("weight_tying", False)), **_ids_and_rope(c))


def dream_config(c):
    """Dream's config fields (a dict) -> Qwen2Config. ValueError for what a Qwen2 cannot express."""
    if c.get("use_sliding_window"):
        raise ValueError("this Dream checkpoint has use_sliding_window=True, which the "
                         "bidirectional hook does not do")
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads")
    _need(c, "Dream", *shape)
    same = shape + ("hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
    return Qwen2Config(num_key_value_heads=c.get("num_key_value_heads") or c["num_attention_heads"],
                       shift_logits=True, **{k: c[k] for k in same if k in c}, **_ids_and_rope(c))


def _need(c, kind, *fields):
    if missing := [k for k in fields if c.get(k) is None]:
        raise ValueError(f"the config.json of this {kind} checkpoint lacks {', '.join(missing)}")


def _ids_and_rope(c):
    """The special ids, absent ones too (the stock classes have defaults of their own), and the
    rotary base."""
    scaling = c.get("rope_scaling") or c.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise ValueError(f"this checkpoint has rope_scaling={scaling!r}; "
                         "only plain rotary embeddings are mapped")
    theta = float(c.get("rope_theta") or scaling.get("rope_theta") or 10000.0)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta},
            **{k + "_token_id": c.get(k + "_token_id") for k in ("mask", "bos", "eos", "pad")}}


def load_denoiser(name_or_path=None, *, device=None, dtype=None, mask_id=None, shift=None,
                  compile=False, **from_pretrained):
    """A Denoiser from a checkpoint folder or hub id; nothing given: the embedded model.

    LLaDA's layout is mapped to LlamaForCausalLM and Dream's to Qwen2ForCausalLM, strictly
    and without running any code of the checkpoint; anything else is opened as a stock causal
    LM of transformers. `denoiser.model.save_pretrained(folder)` writes the stock layout,
    which loads the same.

    Args:
        device: default a CUDA device when there is one, else the CPU. Not together with
            `device_map`, `tp_plan` or `quantization_config`, which place the weights themselves.
        dtype: default bfloat16 when there is a CUDA device and the model is not sent to the
            CPU, else float32.
        mask_id: needed when the checkpoint's files do not name it.
        shift: whether position i is read at i-1; default what config.json says (`shift_logits`),
            else True for Dream's layout and False for others.
        compile: True, or a dict of torch.compile's options: see Denoiser.compile.
        from_pretrained: passed on (`quantization_config`, `device_map`, `tp_plan`, `revision`,
            `local_files_only`, ...).
    Raises ValueError when nothing is found there, when a weight is missing, unexpected or of
    another shape, when the architecture cannot be mapped, and when no mask id is known.
    """
    name = os.path.expanduser(str(name_or_path if name_or_path is not None else EMBEDDED_MODEL))
    if not isinstance(compile, bool | dict):
        raise ValueError(f"compile is {compile!r}, expected True, False or torch.compile's options")
    try:
        device = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise ValueError(f"device is {device!r}, expected for example 'cpu' or 'cuda'") from e
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {str(device)!r}, but torch sees no CUDA device here")
    placed = [k for k in ("device_map", "tp_plan", "quantization_config")
              if from_pretrained.get(k) is not None]
    _refuse(from_pretrained, device, placed)
    hub = {k: from_pretrained[k]
           for k in ("revision", "cache_dir", "token", "local_files_only", "subfolder")
           if k in from_pretrained}
    config = _read_config(name, hub)
    kind = str(config.get("model_type")).lower()
    if device is None and not placed and not config.get("quantization_config"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype is None:
        on_cpu = (str(device or from_pretrained.get("device_map")).startswith("cpu")
                  or not torch.cuda.is_available())
        dtype = torch.float32 if on_cpu else torch.bfloat16
    if kind == "llada":
        cls, model_config = LlamaForCausalLM, llada_config(config)
        from_pretrained["key_mapping"] = LLADA_NAMES
    elif kind == "dream":
        cls, model_config = Qwen2ForCausalLM, dream_config(config)
    else:
        cls = AutoModelForCausalLM
        try:
            model_config = AutoConfig.from_pretrained(name, trust_remote_code=False, **hub)
        except (ValueError, KeyError) as e:
            raise ValueError(f"model_type {config.get('model_type')!r} of {name!r} is neither "
                             "LLaDA, nor Dream, nor known to this transformers; code of a "
                             "checkpoint is never run") from e
    model = _load_strictly(cls, name, config=model_config, dtype=dtype, **from_pretrained)
    model = model if device is None else model.to(device)
    tokenizer = _tokenizer(kind, name, hub)
    shift = config.get("shift_logits", kind == "dream") if shift is None else shift
    denoiser = Denoiser(model, shift=bool(shift), tokenizer=tokenizer,
                        **_special_ids(config, tokenizer, mask_id))
    if compile is not False:
        denoiser.compile(**(compile if isinstance(compile, dict) else {}))
    return denoiser


def _refuse(given, device, placed):
    """ValueErrors of load_denoiser's keywords."""
    if given.pop("trust_remote_code", False):
        raise ValueError("trust_remote_code=True was given, but no code of a checkpoint is ever "
                         "run here: drop it")
    if device is not None and placed:
        raise ValueError(f"device={str(device)!r} was given with {placed[0]}, "
                         "which places the weights itself: drop one")
    if "torch_dtype" in given:
        raise ValueError("torch_dtype was given: say dtype")
    if ours := {"attn_implementation", "config", "generation_config", "ignore_mismatched_sizes",
                "key_mapping", "output_loading_info", "use_safetensors"} & given.keys():
        raise ValueError(f"{', '.join(sorted(ours))} was given, which load_denoiser sets itself: "
                         "drop it")


def _read_config(name, hub):
    """config.json as a dict."""
    if name == str(EMBEDDED_MODEL) and not Path(name).is_dir():
        raise ValueError(f"the embedded model is missing from {name!r}: copy notebooks/mini along "
                         "with dlm_spec.py, or name a checkpoint")
    if not Path(name).is_dir() and (name[:1] in (".", "~", os.sep) or name.count("/") > 1
                                    or "\\" in name):
        raise ValueError(f"there is no model folder {name!r}")
    try:
        config, _ = PretrainedConfig.get_config_dict(name, **hub)
    except (OSError, ValueError) as e:
        raise ValueError(f"no checkpoint at {name!r}: it is neither a folder with a config.json "
                         "nor a hub id that can be reached: check the name; a gated or private one "
                         "wants its licence accepted on its page, then `hf auth login` or token=; "
                         "without a network, download the checkpoint beforehand and give its "
                         f"folder ({type(e).__name__}: {e})") from e
    if not config:
        raise ValueError(f"no config.json in {name!r}, or an empty one")
    return config


def _load_strictly(cls, name, **kw):
    """from_pretrained, with a ValueError unless every weight of the model and of the files
    finds its match."""
    try:
        model, report = cls.from_pretrained(
            name, attn_implementation="dlm_spec", use_safetensors=True, output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are reported; they are refused below
            trust_remote_code=False, generation_config=GenerationConfig(), **kw)
    except (OSError, SafetensorError) as e:
        raise ValueError(f"the weights of {name!r} cannot be read: safetensors files are needed, "
                         "all of them and whole (pickled ones, pytorch_model.bin, "
                         f"can run code and are not opened): {e}") from e
    wrong = [f"{k} {sorted(map(str, report[k]))[:4]}{' ...' if len(report[k]) > 4 else ''}"
             for k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
             if report.get(k)]
    if wrong:
        raise ValueError(f"{name!r} does not fit {type(model).__name__}: {'; '.join(wrong)}")
    vars(model).pop("_weight_conversions", None)    # else it is saved under LLaDA's names
    return model


def _special_ids(config, tokenizer, mask_id):
    """The id keywords of Denoiser, from config.json and the tokenizer."""
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    named = [vocabulary[s] for s in ("<|mask|>", "<|mdm_mask|>", "[MASK]") if s in vocabulary]
    known = (mask_id, config.get("mask_token_id"), *named,
             getattr(tokenizer, "mask_token_id", None))
    eos = config.get("eos_token_id")
    eos = [*eos] if isinstance(eos, (list, tuple)) else [eos]
    eos += [getattr(tokenizer, "eos_token_id", None)]
    eos += [vocabulary[s] for s in ("<|eot_id|>", "<|im_end|>", "<|dlm_pad|>") if s in vocabulary]
    pad_id = config.get("pad_token_id")
    return dict(mask_id=next((i for i in known if i is not None), None),
                eos_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
                pad_id=getattr(tokenizer, "pad_token_id", None) if pad_id is None else pad_id,
                n_tokens=max(vocabulary.values()) + 1 if vocabulary else config.get("vocab_size"))


def _tokenizer(kind, name, hub):
    """The checkpoint's tokenizer, or None with a warning. LLaDA's is a plain tokenizer.json,
    Dream's Qwen2's."""
    cls = {"llada": PreTrainedTokenizerFast, "dream": Qwen2TokenizerFast}.get(kind, AutoTokenizer)
    code = {"trust_remote_code": False} if cls is AutoTokenizer else {}
    try:
        tokenizer = cls.from_pretrained(name, **code, **hub)
        if not (set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
                - set(tokenizer.get_added_vocab())):
            raise ValueError("no vocabulary file: transformers 5 then makes a Qwen2 tokenizer of "
                             "one token")
        return tokenizer
    except (OSError, ValueError, TypeError, KeyError, ImportError) as e:
        warnings.warn(f"no tokenizer could be opened in {name!r} ({type(e).__name__}): "
                      "encode and decode will not work", stacklevel=3)
        return None


# ---------------------------------------------------------------------------------------------
# 4. Primitives. All are vectorised over rows; candidates are flat (N, ...), see the glossary.

REMASKING = ("low_confidence", "margin", "entropy", "random")


def draw(shape, generator, rows, *, dtype, device):
    """Uniform numbers (N, ...) in [0, 1) for candidates of canvas rows `rows` (N,).

    generator: None, a torch.Generator, or a list with one per row of the batch; with a list a row
    draws the same numbers in any batch.
    """
    def rand(size, g):      # drawn where the generator lives
        where = device if g is None else g.device
        return torch.rand(size, generator=g, dtype=dtype, device=where).to(device)

    if not isinstance(generator, (list, tuple)):
        return rand(shape, generator)
    counts = torch.bincount(rows, minlength=len(generator)).tolist()
    return torch.cat([rand((n, *shape[1:]), g) for n, g in zip(counts, generator)])


def gumbel_argmax(logits, temperature, generator=None, rows=None):
    """A sample of softmax(logits / temperature) per candidate by the Gumbel-max trick; argmax at 0.

    logits: (N, V). In log space, so that no logit overflows, and with float64 noise: in
    low precision the noise is truncated, which lowers the temperature and the
    quality [4]. Returns (N,).
    """
    if temperature == 0:
        return logits.max(-1).indices       # argmax, at a third of its time on a CPU
    u = draw(logits.shape, generator, rows, dtype=torch.float64, device=logits.device)
    noise = u.log_().neg_().log_().neg_()  # -log(-log u), in place: the one (N, V) float64 tensor
    return noise.add_(logits, alpha=1 / temperature).max(-1).indices


def confidence_of(logits, x0, remasking="low_confidence", generator=None, rows=None):
    """How sure the model is of each candidate, higher is surer. Computed in float32 or better.

    logits: (N, V), x0: (N,) predicted tokens. `low_confidence`: the probability of x0 [1];
    `margin`: largest minus second probability; `entropy`: minus the entropy in nats [2]; `random`:
    uniform. Returns (N,).
    """
    if remasking == "random":
        return draw(x0.shape, generator, rows, dtype=torch.float32, device=logits.device)
    if remasking == "low_confidence":
        return by_rows(lambda p, token: p.gather(1, token[:, None])[:, 0], logits, x0)
    if remasking == "margin":
        two = by_rows(lambda p: p.topk(min(2, p.shape[1]), dim=1).values, logits)
        return two[:, 0] - two[:, 1:].sum(1)
    assert remasking == "entropy", remasking
    return -by_rows(entropy_of, logits)


def entropy_of(p):
    """Entropy in nats of probabilities (n, V): (n,). (On a CPU torch.special.entr takes twice as
    long.)"""
    return -p.log().clamp_(min=-1e4).mul_(p).sum(1)         # 0 log 0 is 0


def by_rows(f, logits, *more, size=32):
    """f(p, ...) of the softmax p of logits (N, V), in float32 or better, and of the rows of `more`:
    a few rows at a time, so that no second (N, V) is ever there.

    (Softmax, not exp(logit - logsumexp): near 1 that loses the digits that order the commits.)
    """
    half = logits.dtype in (torch.float16, torch.bfloat16)
    return torch.cat([f((rows.float() if half else rows).softmax(1), *rest) for rows, *rest in
                      zip(*(t.split(size) for t in (logits, *more)))])


def predict(logits, *, temperature=0.0, remasking="low_confidence", tempered_confidence=False,
            generator=None, rows=None):
    """Token and confidence of each candidate: (N, V) logits -> x0 (N,), confidence (N,).

    The confidence is read off the untempered softmax, as LLaDA does [1]; with
    `tempered_confidence` off softmax(logits / temperature), as Dream does [2]. It is NaN where the
    logits hold NaN or +inf, or are all -inf; samplers then stop with a ValueError.
    """
    x0 = gumbel_argmax(logits, temperature, generator, rows)
    wide = torch.promote_types(logits.dtype, torch.float32)
    tempered = logits.to(wide) / temperature if tempered_confidence else logits
    confidence = confidence_of(tempered, x0, remasking, generator, rows)
    if remasking == "random":
        confidence = confidence.masked_fill(~logits.amax(1).isfinite(), torch.nan)
    return x0, confidence


def propose(denoiser, x, ask, logits, *, temperature=0.0, remasking="low_confidence",
            tempered_confidence=False, suppress_eos=False, postpone_eos=False,
            logits_processor=None, generator=None):
    """What the model would put on the asked positions: logits (N, V) -> three (B, L) canvases.

    Returns tokens (x where not asked), confidence (1 where not asked), and score, by which
    samplers choose: the confidence, but -inf for an eos that is postponed.
    """
    rows = None         # of each candidate
    if logits_processor is not None or isinstance(generator, (list, tuple)):
        rows = places(ask, len(logits))[0]
    if suppress_eos:
        logits[:, denoiser.eos_ids[0]] = -torch.inf
    if logits_processor is not None:
        logits = denoiser.ban(logits_processor(x[rows], logits))
    x0, c = predict(logits, temperature=temperature, remasking=remasking, generator=generator,
                    tempered_confidence=tempered_confidence, rows=rows)
    tokens = x.masked_scatter(ask, x0)
    confidence = c.new_ones(x.shape).masked_scatter(ask, c)
    if not postpone_eos:
        return tokens, confidence, confidence
    return tokens, confidence, confidence.masked_fill(is_eos(tokens, denoiser.eos_ids), -torch.inf)


def quota_schedule(n, steps):
    """How many of n (B,) masks to commit at each of `steps` steps: (B, steps), each row sums to n.

    n // steps each, the remainder one each to the first steps: 10 over 4 -> 3 3 2 2 [1].
    """
    return n[:, None] // steps + (torch.arange(steps, device=n.device) < n[:, None] % steps).long()


def steps_per_block(steps, blocks, block_length):
    """`steps` over the blocks, the remainder one each to the first; ValueError if some get none."""
    if steps is None:
        return None
    if not isinstance(steps, Integral) or isinstance(steps, bool) or steps < blocks:
        raise ValueError(f"steps is {steps!r}, expected a whole number from {blocks}: there "
                         f"{'is 1 block' if blocks == 1 else f'are {blocks} blocks'} of "
                         f"{block_length}, and each needs at least one")
    return quota_schedule(torch.tensor([steps]), blocks)[0].tolist()


def top_k(score, ask, k):
    """The k (B,) best candidates of each row: (B, L) bool. Ties go to the lowest index.

    score: (B, L), read where `ask` (B, L). Rows with fewer than k candidates give all they have.
    """
    order = score.masked_fill(~ask, -torch.inf).argsort(dim=1, descending=True, stable=True)
    # A candidate at -inf must not lose to a non-candidate: sort once more, candidates first.
    order = order.gather(1, ask.gather(1, order).to(torch.int8)
                         .argsort(dim=1, descending=True, stable=True))
    best = torch.arange(ask.shape[1], device=ask.device) < k[:, None]
    return torch.zeros_like(ask).scatter(1, order, best) & ask


def above_threshold(score, ask, threshold):
    """Candidates with score >= threshold, and always the best one of a row (Fast-dLLM [5])."""
    return (ask & (score >= threshold)) | top_k(score, ask, torch.ones_like(ask[:, 0]).long())


def by_factor(score, ask, factor):
    """The surest n candidates, n the last rank with c(n) >= 1 - factor / (n + 1) before the first
    rank that fails; rank 1 always (Fast-dLLM [5], Algorithm 1). score: (B, L) probabilities.

    The public code accepts one rank too many when the last one fails.
    """
    ranked = score.masked_fill(~ask, -torch.inf).sort(dim=1, descending=True).values
    n = torch.arange(1, ask.shape[1] + 1, device=ask.device)
    holds = (ranked >= 1 - factor / (n + 1)).long().cumprod(1)
    return top_k(score, ask, holds.sum(1).clamp(min=1))


def wino_cap(masks):
    """How many of a block's masks (B,) a forward may commit: 70 % within 5..20 (WINO [8])."""
    return (masks.float() * 0.7).long().clamp(5, 20)


def since_first(flag):
    """(B, L) bool -> True from each row's first True on."""
    return flag.cumsum(1) > 0


def block_bounds(P, gen_length, block_length):
    """[(start, end), ...] of the blocks after a prompt of P tokens; the last one may be short.

    Nothing to generate (pure infilling): one empty block, to which the prompt's holes belong.
    """
    return [(s, min(s + block_length, P + gen_length))
            for s in range(P, P + gen_length, block_length)] or [(P, P)]


# ---------------------------------------------------------------------------------------------
# 5. What every sampler takes and gives.

class Revision(NamedTuple):
    """One committed token taken back: at which of its row's forwards, of which kind ("remask" or
    "replace"), and the token that was committed there next."""
    row: int
    forward: int
    position: int
    old: int
    kind: str
    new: int


@dataclass
class DecodeOutput:
    """The result of a decode.

    sequences: (B, P + G) ids, prompt included, no M left. prompt_length: P.
    nfe: (B,) forwards per row. positions: (B,) token positions processed per row.
    calls: model calls.
    tokens_per_forward: (B,) generated tokens before the first eos, per forward.
    commit_step, commit_confidence: (B, L) at which of its row's forwards (from 1) a position was
        last filled and how sure the model was; 0 and 1 on given tokens and what early_stop fills.
    draft_nfe, verify_nfe: (B,) of sample_dual_diffusion: its drafter's and verifier's forwards.
    revisions: [Revision, ...], every token that was taken back, in order.
    history: with `history=True` the canvases, [(B, L), ...], the initial one first.
    """
    sequences: Tensor
    prompt_length: int
    nfe: Tensor
    positions: Tensor
    calls: int
    tokens_per_forward: Tensor
    commit_step: Tensor
    commit_confidence: Tensor
    revisions: list = field(default_factory=list)
    draft_nfe: Tensor | None = None
    verify_nfe: Tensor | None = None
    history: list | None = None

    @property
    def generated(self):
        """(B, G), what came after the prompt."""
        return self.sequences[:, self.prompt_length:]


def start_canvas(denoiser, prompt, attention_mask, gen_length):
    """Prompt + G masks: x (B, P + G), visible (B, P + G) bool, P.

    prompt: (B, P) or (P,) ids, or a list of id lists or 1-D tensors of different lengths
    (then padded on the left). M inside a prompt is a hole to fill. attention_mask: (B, P),
    0 on left padding.
    """
    prompt, visible = check_prompt(denoiser, prompt, attention_mask, gen_length)
    x = F.pad(prompt.masked_fill(~visible, denoiser.pad_id), (0, gen_length),
              value=denoiser.mask_id)
    return x, F.pad(visible, (0, gen_length), value=True), prompt.shape[1]


class Recorder:
    """Follows a decode: counts its work, remembers commits, feeds callback,
    history and streamer."""

    def __init__(self, x, visible, P, callback=None, history=False, streamer=None):
        check_has("__call__", "a callable", callback=callback)
        check_has("put", "an object with put and end", streamer=streamer)
        zeros = torch.zeros(len(x), dtype=torch.long, device=x.device)
        self.work, self.P, self.callback, self.streamer = (Work(zeros, zeros.clone()), P, callback,
                                                           streamer)
        self.history = [x.clone()] if history else None
        self.log = []       # (nfe, canvas, where, kind): revisions, and commits after the first
        self.commit_step = torch.zeros_like(x)
        self.commit_confidence = torch.ones(x.shape, device=x.device)
        if streamer is not None:
            streamer.put(x[:, :P].cpu())

    def revise(self, x, revised, kind):
        """Tokens of x (B, L) that are taken back in this forward, at `revised` (B, L) bool:
        a "remask" or, before the step that commits the new token, a "replace"."""
        self.log.append((self.work.nfe.clone(), x, revised, kind))

    def revisions(self):
        """The log as a list of Revision."""
        out, open_ = [], {}
        if not self.log:
            return out
        nfe, x, where, kinds = zip(*self.log)       # read from the device at once
        nfe, x, where = torch.stack(nfe).tolist(), torch.stack(x), torch.stack(where)
        for (i, row, position), token in zip(where.nonzero().tolist(), x[where].tolist()):
            if kinds[i] != "commit":
                open_[row, position] = len(out)
                out.append(Revision(row, nfe[i][row], position, token, kinds[i], -1))
            elif (row, position) in open_:
                j = open_.pop((row, position))
                out[j] = out[j]._replace(new=token)
        return out

    def step(self, x, committed, confidence, full=None):
        """After a forward: the canvas, the (B, L) bool that it filled, the (B, L) confidence (NaN
        where the logits were no use, which stops the decode at the next forward or at its end).
        full: the canvas with all that was filled, where some of it was taken back at once."""
        if self.log:
            self.log.append((self.work.nfe, x if full is None else full, committed, "commit"))
        self.work.sane &= confidence.isfinite().all()       # logits_processor may spoil them, too
        self.commit_step = torch.where(committed, self.work.nfe[:, None], self.commit_step)
        self.commit_confidence = torch.where(committed, confidence.float(), self.commit_confidence)
        if self.history is not None:
            self.history.append(x.clone())
        if self.callback is not None:
            self.callback({"x": x, "committed": committed, "confidence": confidence,
                           "nfe": self.work.nfe.clone(), "calls": self.work.calls,
                           "prompt_length": self.P})
        if hasattr(self.streamer, "put_draft"):
            self.streamer.put_draft(x[:, self.P:].cpu())

    def stop_at_eos(self, denoiser, x, end):
        """Early stop after a block that ends at `end`: behind a row's first eos all becomes
        eos_ids[0], which counts as given, not as committed."""
        open_ = before_eos(x[:, self.P:end], denoiser.eos_ids)
        after = ~F.pad(open_, (1, 0), value=True)[:, :-1]           # strictly behind the first eos
        rest = (~open_.all(1))[:, None].expand(-1, x.shape[1] - end)
        filled = torch.cat([F.pad(after, (self.P, 0), value=False), rest], dim=1)
        self.commit_step = self.commit_step.masked_fill(filled, 0)
        self.commit_confidence = self.commit_confidence.masked_fill(filled, 1.0)
        x = x.masked_fill(filled, denoiser.eos_ids[0])
        if self.history is not None:
            self.history[-1] = x.clone()
        return x

    def finish(self, denoiser, x):
        """The DecodeOutput."""
        to_host(self.work.nfe[0], work=self.work)       # a ValueError of the last forward
        if self.streamer is not None:
            self.streamer.put(x[:, self.P:].cpu())
            self.streamer.end()
        tokens = before_eos(x[:, self.P:], denoiser.eos_ids).sum(1)
        return DecodeOutput(x, self.P, self.work.nfe, self.work.positions, self.work.calls,
                            tokens / self.work.nfe.clamp(min=1), self.commit_step,
                            self.commit_confidence, self.revisions(), history=self.history)


def before_eos(x, eos_ids):
    """(B, n) bool: True before each row's first eos id."""
    return is_eos(x, eos_ids).cumsum(1) == 0


def is_eos(x, eos_ids):
    """(B, n) bool: True at eos ids. (torch.isin would have to bring them to the device first.)"""
    return functools.reduce(torch.logical_or, [x == i for i in eos_ids], x != x)


# ---------------------------------------------------------------------------------------------
# 6. The LLaDA sampler.

@torch.no_grad()
def sample_llada(denoiser, prompt, *, gen_length=128, block_length=None, steps=None,
                 attention_mask=None, temperature=0.0, remasking="low_confidence",
                 tempered_confidence=False, cfg_scale=0.0, suppress_eos=False, postpone_eos=False,
                 early_stop=False, logits_processor=None, generator=None, callback=None,
                 history=False, streamer=None):
    """Fill the canvas block by block, a fixed quota of the surest tokens per forward
    (LLaDA [1], `generate`).

    Args:
        prompt, attention_mask: (B, P) ids and 0/1 left padding, or a list of rows;
            see start_canvas.
        gen_length: tokens to generate; 0 fills the holes (M) of the prompt only.
        block_length: blocks are filled left to right (default: one block).
            Holes belong to the first.
        steps: forwards over all blocks (default: one token per forward).
        temperature: 0 takes the argmax, else Gumbel-max sampling.
        remasking: which masks stay: those of low_confidence, small margin,
            high entropy, or random ones.
        tempered_confidence: see predict. cfg_scale: see Denoiser.__call__.
        suppress_eos: eos_ids[0] is never emitted (logit -inf). postpone_eos: eos_ids are filled
            last in their block (confidence -inf, after sampling).
        early_stop: after a block with an eos the row is finished; the rest becomes eos_ids[0].
        logits_processor: transformers' LogitsProcessor(List),
            called on ((N, L) canvases, (N, V) logits).
        generator: a torch.Generator, or a list with one per row.
        callback: called after every forward with a dict: x (the canvas itself, to read only),
            committed, confidence, nfe, calls, prompt_length.
        streamer: an object with `put`, `end` and perhaps `put_draft` (transformers'
            TextDiffusionStreamer).
    Returns a DecodeOutput; nfe <= steps (twice that with guidance). Differs from the
    public code: works on unequal batches, a short last block, any number of steps,
    never emits M or a padded vocabulary id, and postpones eos at any temperature, the confidence
    of other tokens untouched (there at 0 their softmax loses EOS; above 0 EOS is not postponed).
    """
    x, visible, P = start_canvas(denoiser, prompt, attention_mask, gen_length)
    block_length = max(gen_length, 1) if block_length is None else block_length
    knobs = dict(temperature=temperature, remasking=remasking, generator=generator,
                 tempered_confidence=tempered_confidence, suppress_eos=suppress_eos,
                 postpone_eos=postpone_eos, logits_processor=logits_processor)
    check_knobs(denoiser, len(x), block_length, cfg_scale=cfg_scale, early_stop=early_stop, **knobs)
    bounds = block_bounds(P, gen_length, block_length)
    block_steps = steps_per_block(steps, len(bounds), block_length)
    column = torch.arange(x.shape[1], device=x.device)
    given = visible & (x != denoiser.mask_id)
    record = Recorder(x, visible, P, callback, history, streamer)
    for b, (_, end) in enumerate(bounds):
        masks = visible & (x == denoiser.mask_id) & (column < end)
        s = block_steps[b] if steps is not None else int(masks.sum(1).max())
        for quota in quota_schedule(masks.sum(1), max(s, 1)).unbind(1):
            ask = visible & (x == denoiser.mask_id) & (column < end)
            logits = denoiser(x, ask, visible, cfg_scale=cfg_scale, given=given, work=record.work)
            if len(logits) == 0:        # nothing was asked: there was no forward
                break
            tokens, confidence, score = propose(denoiser, x, ask, logits, **knobs)
            commit = top_k(score, ask, quota)
            x = torch.where(commit, tokens, x)
            record.step(x, commit, confidence)
        if early_stop:
            x = record.stop_at_eos(denoiser, x, end)
    return record.finish(denoiser, x)


# ---------------------------------------------------------------------------------------------
# 7. Approximate drafters: several tokens per forward, and forwards of a part of the canvas.

@torch.no_grad()
def sample_fast_dllm(denoiser, prompt, *, gen_length=128, block_length=32, threshold=None,
                     factor=None, cache=None, attention_mask=None, temperature=0.0,
                     suppress_eos=False, postpone_eos=False, early_stop=False,
                     logits_processor=None, generator=None, callback=None, history=False,
                     streamer=None):
    """Commit every token the model is sure of; reuse keys and values of the rest of the canvas
    (Fast-dLLM [5]).

    Args: as in sample_llada, and
        threshold: commit what has at least this confidence, always the best (default 0.9).
        factor: instead of a threshold, accept by rank, see by_factor.
        cache: None; "prefix": after a block's first forward, which is full, the later ones
            recompute the canvas from the block on; "dual": they recompute the block alone.
    Returns a DecodeOutput; nfe <= masks. With a cache, keys and values outside the window are those
    of the block's first forward. A block that is full after it costs no second one.
    """
    x, visible, P = start_canvas(denoiser, prompt, attention_mask, gen_length)
    knobs = dict(temperature=temperature, suppress_eos=suppress_eos, postpone_eos=postpone_eos,
                 logits_processor=logits_processor, generator=generator)
    check_knobs(denoiser, len(x), block_length, early_stop=early_stop, **knobs)
    threshold = check_rule(threshold, factor)
    check_one_of((None, "prefix", "dual"), cache=cache)
    column = torch.arange(x.shape[1], device=x.device)
    record = Recorder(x, visible, P, callback, history, streamer)
    for start, end in block_bounds(P, gen_length, block_length):
        kv, window = KVCache() if cache else None, None
        masks = visible & (x == denoiser.mask_id)           # a hole before the block belongs to it
        block = visible & (column < end) & (since_first(masks) | (column >= start))
        while True:
            ask = block & (x == denoiser.mask_id)
            logits = denoiser(x, ask, visible, work=record.work, kv=kv, window=window)
            if len(logits) == 0:        # nothing was asked: there was no forward
                break
            tokens, confidence, score = propose(denoiser, x, ask, logits, **knobs)
            commit = (by_factor(score, ask, factor) if factor is not None
                      else above_threshold(score, ask, threshold))
            x = torch.where(commit, tokens, x)
            record.step(x, commit, confidence)
            if cache:
                window = block if cache == "dual" else since_first(block) & visible
        if early_stop:
            x = record.stop_at_eos(denoiser, x, end)
    return record.finish(denoiser, x)


@torch.no_grad()
def sample_dkv(denoiser, prompt, *, gen_length=128, block_length=32, steps=None, threshold=None,
               refresh=8, attention_mask=None, temperature=0.0, suppress_eos=False,
               postpone_eos=False, early_stop=False, logits_processor=None, generator=None,
               callback=None, history=False, streamer=None):
    """Keep the keys and values of decoded tokens, one step late (dKV-Cache [6], decode variant).

    Within a block, forwards 0, 1 and every `refresh`-th are full. The others recompute what was
    still masked at the input of the forward before: all masks of the canvas, and the tokens
    committed one step ago, which are so computed once as visible tokens and only then left alone.

    Args: as in sample_llada, and
        steps: forwards over all blocks, a quota each; or
        threshold: commit what has at least this confidence, always the best (default 0.9).
        refresh: a full forward every so many steps; 1 is the uncached sampler.
    Returns a DecodeOutput.
    """
    x, visible, P = start_canvas(denoiser, prompt, attention_mask, gen_length)
    knobs = dict(temperature=temperature, suppress_eos=suppress_eos, postpone_eos=postpone_eos,
                 logits_processor=logits_processor, generator=generator)
    check_knobs(denoiser, len(x), block_length, early_stop=early_stop, **knobs)
    threshold = check_rule(threshold, steps=steps)
    check_whole(1, refresh=refresh)
    bounds = block_bounds(P, gen_length, block_length)
    block_steps = steps_per_block(steps, len(bounds), block_length)
    column = torch.arange(x.shape[1], device=x.device)
    record = Recorder(x, visible, P, callback, history, streamer)
    for b, (_, end) in enumerate(bounds):
        kv, step, masks = KVCache(), 0, visible & (x == denoiser.mask_id)
        if steps is not None:
            quota = quota_schedule((masks & (column < end)).sum(1), block_steps[b])
        while True:
            ask = visible & (x == denoiser.mask_id) & (column < end)
            full = step < 2 or step % refresh == 0
            logits = denoiser(x, ask, visible, work=record.work, kv=kv,
                              window=None if full else masks)
            if len(logits) == 0:        # nothing was asked: there was no forward
                break
            masks = visible & (x == denoiser.mask_id)        # at the input of this forward
            tokens, confidence, score = propose(denoiser, x, ask, logits, **knobs)
            commit = (above_threshold(score, ask, threshold) if steps is None
                      else top_k(score, ask, quota[:, step]))
            x = torch.where(commit, tokens, x)
            record.step(x, commit, confidence)
            step += 1
        if early_stop:
            x = record.stop_at_eos(denoiser, x, end)
    return record.finish(denoiser, x)


# ---------------------------------------------------------------------------------------------
# 8. DualDiffusion: a drafter guesses, a verifier looks again.

def verify_trust(judged, tokens, draft):
    """Accept everything (DualDiffusion [7]); sample_dual_diffusion then runs no verifier."""
    return torch.zeros_like(tokens, dtype=torch.bool)


def verify_kl(judged, tokens, draft, *, tau=0.5, stochastic=False, generator=None):
    """Re-mask where KL(p_verifier || p_draft) > tau nats; stochastic: with probability
    1 - exp(-KL / tau), a form of ours, the paper [7] gives none.

    judged, draft: (..., V) logits of verifier and drafter, the latter at the moment of commit.
    tokens: (...) drafted ids. Returns (...) bool, True: take it back.
    """
    if not isinstance(tau, Real) or not tau >= 0 or (stochastic and tau == 0):
        raise ValueError(f"tau is {tau!r}, expected nats from 0 (above 0 with stochastic)")
    p, q = judged.float().log_softmax(-1), draft.float().log_softmax(-1)
    kl = (p.exp() * (p - q)).nan_to_num(nan=0.0, neginf=0.0).sum(-1)      # 0 where p is 0
    if not stochastic:
        return kl > tau
    u = draw(kl.shape, generator, None, dtype=kl.dtype, device=kl.device)
    return u < -torch.expm1(-kl / tau)


def verify_confidence(judged, tokens, draft, *, tau=0.5, of="token"):
    """Re-mask where the verifier's probability of the drafted token (of="token"), or its largest
    one (of="max", as the paper [7] words it), is below tau. Arguments as in verify_kl.
    """
    check_one_of(("token", "max"), of=of)
    check_number(0, 1, tau=tau)
    p = judged.float().softmax(-1)
    p = p.gather(-1, tokens[..., None])[..., 0] if of == "token" else p.amax(-1)
    return p < tau


@torch.no_grad()
def sample_dual_diffusion(denoiser, prompt, *, gen_length=128, block_length=32, draft_steps=4,
                          verify=verify_confidence, view="leave_one_out", drafter=None,
                          cache="dual", threshold=None, factor=None, max_revisions=2,
                          max_rounds=None, adaptive=False, attention_mask=None, temperature=0.0,
                          suppress_eos=False, postpone_eos=False, early_stop=False,
                          logits_processor=None, generator=None, callback=None, history=False,
                          streamer=None):
    """Draft several forwards with a cache, then verify the draft in one exact forward and take back
    what it distrusts (DualDiffusion [7]).

    The verifier's forward is full, so it is the drafter's cache refresh as well, and it drafts: a
    round of draft_steps + 1 forwards costs what refreshing every draft_steps forwards costs.

    Args: as in sample_fast_dllm, and
        draft_steps: K, drafter forwards between two verifications (fewer when the block is full).
        verify: verify_trust, verify_kl, verify_confidence, or any callable
            (judged (C, V), tokens (C,), draft (C, V)) -> (C,) bool; options by functools.partial.
        view: what the verifier sees of a checked token: "leave_one_out" (everything but itself, by
            a shadow block), "cover" (the same by COVER's dual view, without more positions; a
            token whose keys and values are not stored yet waits for the next verification) or
            "visible" (the canvas as it is: the token vouches for itself).
        drafter: a second Denoiser with the same vocabulary; default: the same weights.
        cache: "dual", "prefix", "dkv" (delayed) or None, as in sample_fast_dllm and sample_dkv.
        max_revisions: how often one position may be taken back.
        max_rounds: verifications per row; after the last one the rest is filled unchecked.
        adaptive: K halves when more than a quarter of a round was taken back and doubles (up to
            4 draft_steps) when nothing was; and a token that was checked is checked again after a
            neighbour within 4 positions changed, at most max_revisions times.
    Returns a DecodeOutput with `revisions`, `draft_nfe` and `verify_nfe`. Every round keeps at
    least one of a row's drafted tokens, so it ends.
    """
    x, visible, P = start_canvas(denoiser, prompt, attention_mask, gen_length)
    knobs = dict(temperature=temperature, suppress_eos=suppress_eos, postpone_eos=postpone_eos,
                 logits_processor=logits_processor, generator=generator)
    check_knobs(denoiser, len(x), block_length, early_stop=early_stop, **knobs)
    threshold = check_rule(threshold, factor)
    check_dual(denoiser, drafter, draft_steps, verify, view, cache, max_revisions, max_rounds)
    check_flag(adaptive=adaptive)
    record = Recorder(x, visible, P, callback, history, streamer)
    column = torch.arange(x.shape[1], device=x.device)
    s = DualState(x, draft_steps, verify, max_revisions, max_rounds, adaptive, denoiser.shift)
    kv, verify_nfe = KVCache() if cache or view == "cover" else None, torch.zeros_like(x[:, 0])
    for start, end in block_bounds(P, gen_length, block_length):
        masks = visible & (x == denoiser.mask_id)           # a hole before the block belongs to it
        block = visible & (column < end) & (since_first(masks) | (column >= start))
        s.new_block()
        while True:
            masks = block & (x == denoiser.mask_id)
            due = s.due(masks.any(1))
            drafting = masks.any(1) & ~due
            parts = {"verify": due, "full": drafting & ~s.stored, "window": drafting & s.stored}
            some = to_host(*(rows.any() for rows in parts.values()), *s.to_file())
            s.file(some[len(parts):])
            if not any(some[:len(parts)]):
                break
            for kind, rows in itertools.compress(parts.items(), some):
                ask = masks & rows[:, None]
                if kind == "verify":
                    checked = s.to_check(rows, block & ~masks)
                    if view == "cover":
                        checked = eligible(checked, s.shown == x, ask, denoiser.shift)
                        checked = every_other(checked) if denoiser.shift else checked
                    s.show(rows, x, seeds=checked if view == "cover" else None)
                    logits, judged = look_again(denoiser, view, x, ask, checked, visible,
                                                kv if drafter is None else None, record, rows)
                    remask = s.judge(checked, judged, x)
                    record.revise(x, remask, "remask")
                else:
                    window = s.window(block, visible & (x == denoiser.mask_id), cache, kind)
                    s.show(rows, x, window)
                    logits = (drafter or denoiser)(x, ask, visible, kv=kv, window=window,
                                                   work=record.work)
                    checked = remask = torch.zeros_like(ask)
                verify_nfe = verify_nfe + (rows if kind == "verify" else 0)
                tokens, confidence, score = propose(denoiser, x, ask, logits, **knobs)
                commit = (by_factor(score, ask, factor) if factor is not None
                          else above_threshold(score, ask, threshold))
                s.after(kind, rows, x == denoiser.mask_id, commit, checked, remask,
                        (logits, ask), shared=drafter is None and cache is not None)
                x = torch.where(commit, tokens, x).masked_fill(remask, denoiser.mask_id)
                record.step(x, commit, confidence)
        if early_stop:
            x = record.stop_at_eos(denoiser, x, end)
    out = record.finish(denoiser, x)
    out.verify_nfe, out.draft_nfe = verify_nfe, out.nfe - verify_nfe
    return out


def look_again(denoiser, view, x, ask, checked, visible, kv, record, rows):
    """The verifier's forward of `rows` (B,): logits of `ask` (N, V), and of `checked` (C, V)."""
    if view == "leave_one_out":
        return denoiser.leave_one_out(x, ask, checked, visible, kv=kv, work=record.work)
    both = ask | checked
    # nothing to ask, when all tokens wait for their entries: the forward stores them all the same
    asked = both | (rows & ~both.any(1))[:, None] & visible & (visible.cumsum(1) == 1)
    return denoiser(x, (asked, ask, checked), visible, kv=kv, work=record.work,
                    seeds=checked if view == "cover" else None)[1:]


def every_other(tokens):
    """The 1st, 3rd, 5th... of each run of True in (B, L) bool."""
    index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    before = index.masked_fill(tokens, -1).cummax(1).values     # the run begins behind it
    return tokens & ((index - before) % 2 == 1)


class DualState:
    """What sample_dual_diffusion keeps per row (B,) and per position (B, L) between forwards."""

    def __init__(self, x, draft_steps, verify, max_revisions, max_rounds, adaptive, shift=False):
        rows, self.verify, self.adaptive = torch.zeros_like(x[:, 0]), verify, adaptive
        self.max_revisions, self.max_rounds = max_revisions, max_rounds
        self.K, self.most = rows + draft_steps, 4 * draft_steps
        self.since, self.rounds = rows.clone(), rows.clone()    # forwards since, verifications
        self.stored = rows > 0              # the cache holds this row, from its canvas or close to
        self.clean = rows > 0               # ... exactly from its canvas
        self.drafted = torch.zeros_like(x, dtype=torch.bool)    # committed, not verified since
        self.stale, self.masks = self.drafted, self.drafted     # to check again; M one forward ago
        self.revised, self.checks = torch.zeros_like(x), torch.zeros_like(x)
        self.where, self.logits = torch.zeros_like(x), None     # draft logits at the commit (n, V)
        self.unfiled = []                   # those of the last forwards: logits, ask, commit
        self.shown, self.shift = torch.full_like(x, -1), shift  # tokens the cache was made of

    def show(self, rows, x, window=None, seeds=None):
        """A forward of `rows` over canvas x stores keys and values of its window."""
        self.held = rows & False if seeds is None else seeds.any(1)
        self.shown = torch.where(stored(rows[:, None], window, seeds, self.shift), x, self.shown)

    def new_block(self):
        """Verified rows start a block with the verifier's keys and values, others afresh."""
        self.stored = self.stored & self.clean
        self.drafted, self.stale = (torch.zeros_like(self.drafted) for _ in range(2))
        self.since, self.logits = torch.zeros_like(self.since), None

    def to_file(self):
        """How many tokens each of the last forwards committed, 0-d."""
        return [commit.sum() for _, _, commit in self.unfiled]

    def file(self, counts):
        """Keep the logits that the tokens of the last forwards were committed by, `counts` tokens
        of each. (Put off until the host knows how many: it would have to wait for that.)"""
        for (logits, ask, commit), n in zip(self.unfiled, counts):
            start = 0 if self.logits is None else len(self.logits)
            self.where = self.where.masked_scatter(commit, torch.arange(start, start + n,
                                                                        device=commit.device))
            logits = logits[among(commit, ask, n)]
            self.logits = logits if self.logits is None else torch.cat([self.logits, logits])
        self.unfiled = []

    def due(self, open_):
        """Rows to verify now: K forwards since the last time, or nothing left to draft."""
        if self.verify is verify_trust:
            return torch.zeros_like(open_)
        due = self.drafted.any(1) & ((self.since >= self.K) | ~open_)
        return due if self.max_rounds is None else due & (self.rounds < self.max_rounds)

    def to_check(self, rows, tokens):
        """The drafted tokens of `rows`, and in adaptive mode those whose neighbourhood changed."""
        again = self.stale & (self.checks <= self.max_revisions) & tokens
        return (self.drafted | again) & rows[:, None] if self.adaptive else (
            self.drafted & rows[:, None])

    def judge(self, checked, judged, x):
        """(B, L) bool, what to take back: the rule's word, but never a position that was taken
        back max_revisions times, and per row fewer tokens than were drafted, the unlikeliest."""
        where = places(checked, len(judged))
        tokens, draft = x[where], self.logits[self.where[where]]
        bad = self.verify(judged, tokens, draft)
        if not isinstance(bad, Tensor) or bad.dtype != torch.bool or bad.shape != tokens.shape:
            raise ValueError(f"verify gave {getattr(bad, 'dtype', bad)} of shape "
                             f"{tuple(getattr(bad, 'shape', ()))}, expected bool, {tokens.shape}")
        bad = torch.zeros_like(checked).masked_scatter(checked, bad)
        bad &= self.revised < self.max_revisions
        p = judged.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        p = p.new_zeros(x.shape).masked_scatter(checked, p)
        return top_k(-p, bad, (self.drafted.sum(1) - 1).clamp(min=0))

    def window(self, block, masks, cache, kind):
        """The columns that a drafter's forward recomputes, None: all."""
        if cache is None or kind == "full":
            return None
        if cache == "dkv":      # what was masked one forward ago, and what is now
            return self.masks | masks
        return block if cache == "dual" else since_first(block)

    def after(self, kind, rows, masks, commit, checked, remask, draft, shared):
        """Bookkeeping after a forward of `rows`; draft: its logits and what they were asked for."""
        verified = kind == "verify"
        if verified:
            share = remask.sum(1) / checked.sum(1).clamp(min=1)
            self.rounds = self.rounds + rows
            self.checks = self.checks + checked
            self.stale = self.stale & ~rows[:, None]
            self.drafted = self.drafted & ~checked
            if self.adaptive:
                self.K = torch.where(rows & (share > .25), (self.K // 2).clamp(min=1), self.K)
                self.K = torch.where(rows & (share == 0), (self.K * 2).clamp(max=self.most), self.K)
        self.since = torch.where(rows, 0 if verified else self.since + 1, self.since)
        full = rows & (kind != "window")
        self.stored = torch.where(full, shared or not verified, self.stored)
        changed = commit | remask
        self.clean = torch.where(rows, full & ~changed.any(1) & ~self.held, self.clean)
        self.masks = torch.where(rows[:, None], masks, self.masks)
        near = F.max_pool1d(changed[:, None].float(), 9, stride=1, padding=4)[:, 0] > 0
        self.stale = self.stale | (near & (self.checks > 0) & ~changed)
        self.drafted = self.drafted | commit
        self.revised = self.revised + remask
        self.unfiled.append((*draft, commit))


# ---------------------------------------------------------------------------------------------
# 9. Revocable baselines: commit many, take back what looks wrong in the light of the rest.

@torch.no_grad()
def sample_wino(denoiser, prompt, *, gen_length=128, block_length=128, threshold=0.6,
                threshold_back=0.9, attention_mask=None, temperature=0.0, suppress_eos=False,
                postpone_eos=False, early_stop=False, logits_processor=None, generator=None,
                callback=None, history=False, streamer=None):
    """Wide in, narrow out (WINO [8]): commit above a low threshold, and re-mask what a shadow block
    finds unlikely (see Denoiser.leave_one_out).

    Args: as in sample_llada, and
        threshold: tau_1, masks above it are committed, always the best one, at most 70 % of the
            block's masks within 5..20. threshold_back: tau_2, a token committed in an earlier
            forward is re-masked when its shadow gives it less; only when more than one token
            was committed, and fewer than in the forward before.
    Returns a DecodeOutput with `revisions`; nfe <= block_length per block.
    """
    x, visible, P = start_canvas(denoiser, prompt, attention_mask, gen_length)
    knobs = dict(temperature=temperature, suppress_eos=suppress_eos, postpone_eos=postpone_eos,
                 logits_processor=logits_processor, generator=generator)
    check_knobs(denoiser, len(x), block_length, early_stop=early_stop, **knobs)
    check_number(0, 1, threshold=threshold, threshold_back=threshold_back)
    column = torch.arange(x.shape[1], device=x.device)
    record = Recorder(x, visible, P, callback, history, streamer)
    for start, end in block_bounds(P, gen_length, block_length):
        masks = visible & (x == denoiser.mask_id)           # a hole before the block belongs to it
        block = visible & (column < end) & (since_first(masks) | (column >= start))
        ours, last_accept = block & masks, torch.full_like(x[:, 0], 30)
        while True:
            ask = block & (x == denoiser.mask_id)
            earlier = ours & ~ask & ask.any(1)[:, None]
            logits, judged = denoiser.leave_one_out(x, ask, earlier, visible, work=record.work,
                                                    shadow=block & ask.any(1)[:, None])
            if len(logits) == 0:        # nothing was asked: there was no forward
                break
            tokens, confidence, score = propose(denoiser, x, ask, logits, **knobs)
            cap = wino_cap(ask.sum(1))
            best = top_k(score, ask, torch.ones_like(cap))
            commit = top_k(score, ask & (score > threshold) | best, cap)
            back = confidence_of(judged, x[places(earlier, len(judged))]).to(confidence.dtype)
            back = confidence.new_ones(x.shape).masked_scatter(earlier, back)
            accepted = commit.sum(1)
            remask = top_k(-back, earlier & (back < threshold_back), last_accept - 1)
            remask = remask & (accepted > 1)[:, None]
            last_accept = torch.where(ask.any(1), accepted, last_accept)
            record.revise(x, remask, "remask")
            x = torch.where(commit, tokens, x).masked_fill(remask, denoiser.mask_id)
            record.step(x, commit, confidence)
        if early_stop:
            x = record.stop_at_eos(denoiser, x, end)
    return record.finish(denoiser, x)


@torch.no_grad()
def sample_saber(denoiser, prompt, *, gen_length=128, block_length=128, n=2, attention_mask=None,
                 temperature=0.0, suppress_eos=False, postpone_eos=False, early_stop=False,
                 logits_processor=None, generator=None, callback=None, history=False,
                 streamer=None):
    """Commit above the mean confidence of all commits so far, and re-mask the tokens whose
    positions lost most of their top-1 probability since the forward before (Saber [10]).

    Args: as in sample_llada, and
        n: tokens to commit at least (fewer only when fewer masks are left; there the public code
            overwrites other positions). max(n // 2, ceil(commits / 8)) are re-masked, one fewer
            than the commits at most, wherever a token was generated: the forward's own commits
            and earlier blocks included.
    Returns a DecodeOutput with `revisions`; nfe <= masks.
    """
    x, visible, P = start_canvas(denoiser, prompt, attention_mask, gen_length)
    knobs = dict(temperature=temperature, suppress_eos=suppress_eos, postpone_eos=postpone_eos,
                 logits_processor=logits_processor, generator=generator)
    check_knobs(denoiser, len(x), block_length, early_stop=early_stop, **knobs)
    check_whole(1, n=n)
    column = torch.arange(x.shape[1], device=x.device)
    record = Recorder(x, visible, P, callback, history, streamer)
    generated, ever = visible & (x == denoiser.mask_id), torch.zeros_like(visible)
    latest = last = torch.zeros(x.shape, device=x.device)
    for _, end in block_bounds(P, gen_length, block_length):
        while True:
            masks = visible & (x == denoiser.mask_id) & (column < end)
            live = masks.any(1)[:, None]
            ask = generated & (column < end) & live
            logits = denoiser(x, ask, visible, work=record.work)
            if len(logits) == 0:        # nothing was asked: there was no forward
                break
            tokens, confidence, score = propose(denoiser, x, ask, logits, **knobs)
            latest, last = latest.to(confidence.dtype), last.to(confidence.dtype)
            mean = (latest * ever).sum(1) / ever.sum(1)         # NaN before the first commit
            above = masks & (score > mean.nan_to_num(nan=1.0)[:, None])
            commit = torch.where((above.sum(1) >= n)[:, None], above,
                                 top_k(score, masks, torch.full_like(x[:, 0], n)))
            ever, latest = ever | commit, torch.where(commit, confidence, latest)
            x = torch.where(commit, tokens, x)
            D, unfinished = commit.sum(1), (masks & ~commit).any(1)
            k = torch.minimum(((D + 7) // 8).clamp(min=n // 2), D - 1)
            fall = (confidence - last).masked_fill(~ask, torch.inf)
            remask = top_k(-fall, ask & (x != denoiser.mask_id) & (fall < torch.inf),
                           torch.where(unfinished, k, 0))
            last = torch.where(live, confidence.masked_fill(~ask, -torch.inf), last)
            full, x = x, x.masked_fill(remask, denoiser.mask_id)
            record.step(x, commit, confidence, full)
            record.revise(full, remask, "remask")
        if early_stop:
            x = record.stop_at_eos(denoiser, x, end)
    return record.finish(denoiser, x)


# ---------------------------------------------------------------------------------------------
# 10. COVER: draft and re-check in one forward, without taking the context away.

@torch.no_grad()
def sample_cover(denoiser, prompt, *, gen_length=128, block_length=32, threshold=0.7,
                 tau_replace=0.9, tau_remask=0.2, spacing=0, max_seeds=8, seed_share=0.25,
                 min_score=0.0, max_checks=2, closing=0, commit_cap=False, remask_limit=True,
                 uncertainty="entropy", score=None, probe_layers=None, cache=None, refresh=None,
                 attention_mask=None, temperature=0.0, suppress_eos=False, postpone_eos=False,
                 early_stop=False, logits_processor=None, generator=None, callback=None,
                 history=False, streamer=None):
    """Commit above a threshold; every forward also re-checks a few committed tokens, the *seeds*:
    they are M in its input, while all others keep seeing their stored keys and values (COVER [9]).

    A seed is kept when it is predicted again; replaced in place when another token is predicted
    with probability >= tau_replace; re-masked when neither and its own probability is < tau_remask;
    else kept.

    Args: as in sample_llada, and
        threshold: tau_draft, masks above it are committed, always the best one.
        spacing: of the seeds within so many positions of each other that are to be replaced, the
            surest one is; the others, judged in the belief that it stays, are checked again.
        max_seeds, seed_share, min_score: seeds per row and forward: at most max_seeds, that share
            of the candidates, one fewer than the last forward's commits; with a score above
            min_score.
        max_checks: how often a token's position is checked in all.
        closing: a block that is full may have so many forwards more in which all candidates are
            checked, whatever max_seeds, and re-masked without a limit per row, until none changes.
            (A token can first be checked two forwards after its commit, so that the last ones would
            go unchecked.)
        commit_cap: True: a forward commits at most 70 % of a row's masks within 5..20, as WINO.
        remask_limit: one fewer than the forward's commits are re-masked per row at most; False:
            all that are doubtful.
        uncertainty: u of the score: "entropy" of the prediction at the token now [9], or "commit",
            the entropy when it was committed.
        score: the score of candidates, see seed_score: (u, d_in, d_out) -> (B, L).
        probe_layers: whose attention d_in and d_out read (default: the middle and the last one).
        cache, refresh: None, "prefix" or "dual", as in sample_fast_dllm, but that every refresh-th
            forward of a block is full as well (default: the first one alone).
    The numbers, the outcomes' thresholds, the probe layers, `spacing`, `closing`, `commit_cap` and
    `remask_limit` are our choices where [9] gives none.
    Returns a DecodeOutput with `revisions`; nfe <= masks + revisions + closing per block.
    """
    x, visible, P = start_canvas(denoiser, prompt, attention_mask, gen_length)
    knobs = dict(temperature=temperature, suppress_eos=suppress_eos, postpone_eos=postpone_eos,
                 logits_processor=logits_processor, generator=generator)
    check_knobs(denoiser, len(x), block_length, early_stop=early_stop, **knobs)
    check_cover(threshold=threshold, tau_replace=tau_replace, tau_remask=tau_remask,
                seed_share=seed_share, min_score=min_score, spacing=spacing, max_seeds=max_seeds,
                max_checks=max_checks, closing=closing, uncertainty=uncertainty, score=score,
                cache=cache, refresh=refresh)
    check_flag(commit_cap=commit_cap, remask_limit=remask_limit)
    probe_layers, score = probed(denoiser, probe_layers), score or seed_score
    M, shift, L = denoiser.mask_id, denoiser.shift, x.shape[1]
    column = torch.arange(L, device=x.device)
    record = Recorder(x, visible, P, callback, history, streamer)
    kv, shown = KVCache(probe_layers), torch.full_like(x, -1)   # tokens its entries were made of
    checks, u = torch.zeros_like(x), torch.zeros(x.shape, device=x.device)
    for start, end in block_bounds(P, gen_length, block_length):
        masks = visible & (x == M)                          # a hole before the block belongs to it
        block = visible & (column < end) & (since_first(masks) | (column >= start))
        ours, window, step = block & masks, None, 0
        seeds = sure = torch.zeros_like(masks)
        left = torch.full_like(x[:, 0], closing)            # forwards for a full block
        while True:
            masks = block & (x == M)
            again = ours & ~masks & ~sure & (checks < max_checks)   # are seeds, or may be next time
            closed = ~masks.any(1) & again.any(1) & (left > 0)
            live = (masks.any(1) | closed)[:, None]
            again, probe = again & live, earlier_too(block & live, shift) & visible
            ask = masks | seeds | (again if uncertainty == "entropy" else again & closed[:, None])
            logits, drafts, checked = denoiser(x, (ask, masks, seeds), visible, work=record.work,
                                               kv=kv, window=window, seeds=seeds, probe=probe)
            if len(logits) == 0:        # nothing was asked: there was no forward
                break
            shown = torch.where(stored(live, window, seeds, shift), x, shown)
            entropy = by_rows(entropy_of, logits).float()
            u = torch.where(ask if uncertainty == "entropy" else masks,
                            u.masked_scatter(ask, entropy), u)
            tokens, confidence, surety = propose(denoiser, x, masks, drafts, **knobs)
            commit = masks & (surety > threshold) | top_k(surety, masks, live[:, 0].long())
            if commit_cap:
                commit = top_k(surety, commit, wino_cap(masks.sum(1)))
            drafted = commit.sum(1)
            replace, remask, wait, better, p = judge_seeds(
                denoiser, x, seeds, checked, knobs, tau_replace=tau_replace, tau_remask=tau_remask,
                spacing=spacing,
                most=torch.where(closed, L, drafted - 1 if remask_limit else L))
            record.revise(x, replace, "replace")
            record.revise(x, remask, "remask")
            x = torch.where(commit, tokens, x)
            x = torch.where(replace, better, x).masked_fill(remask, M)
            record.step(x, commit | replace, torch.where(seeds, p, confidence))
            checks, left, step = checks + (seeds & ~wait), left - closed.long(), step + 1
            changed = commit | replace | remask
            sure = (sure | seeds) & ~changed.any(1, keepdim=True)   # no token changed since
            masks = block & (x == M)
            candidates = eligible(again & ~seeds, shown == x, masks, shift)
            worth = score(u, *dependence(kv.attention, probe, masks, commit, candidates, shift))
            check_shape(x, score=worth)
            few = (seed_share * candidates.sum(1)).ceil().long().clamp(max=max_seeds)
            few = torch.where(masks.any(1), torch.minimum(few, drafted - 1),
                              torch.where(left > 0, L, 0))
            seeds = top_k(worth, apart(worth, candidates & (worth > min_score), int(shift)), few)
            if cache:
                window = (None if refresh is not None and step % refresh == 0 else
                          block if cache == "dual" else since_first(block) & visible)
        if early_stop:
            x = record.stop_at_eos(denoiser, x, end)
    return record.finish(denoiser, x)


def judge_seeds(denoiser, x, seeds, logits, knobs, *, tau_replace, tau_remask, spacing, most):
    """The outcomes of the seeds (B, L) with predictions logits (S, V): which to replace, to re-mask
    (`most` (B,) per row at most) and to check again, all (B, L) bool; the (B, L) canvas of
    predictions and their probabilities."""
    if len(logits) == 0:
        return seeds, seeds, seeds, x, torch.ones(x.shape, dtype=logits.dtype, device=x.device)
    tokens, p, _ = propose(denoiser, x, seeds, logits, **{**knobs, "temperature": 0.0})
    own = confidence_of(logits, x[places(seeds, len(logits))]).to(p.dtype)
    own = p.new_ones(x.shape).masked_scatter(seeds, own)
    differs = seeds & (tokens != x)
    better = differs & (p >= tau_replace)
    replace = apart(p - own, better, spacing)
    remask = top_k(-own, differs & ~better & (own < tau_remask), most)
    return replace, remask, better & ~replace, tokens, p


def dependence(maps, probe, masks, drafted, candidates, shift=False):
    """d_in, d_out (B, L) of COVER's candidates [9]: how much the masks that are left look at them,
    and how much they look at what was just drafted (their stored keys and values are then the
    likelier to be outdated). Each is divided by the row's largest one (ours).

    maps: (R, m, L) attention maps of the tokens `probe` (B, L) bool, R its rows with any.
    """
    if not isinstance(maps, Tensor):        # no attention to look at
        return torch.zeros(2, *masks.shape, device=masks.device)
    live = places(probe.any(1), len(maps))[0]
    at, n = columns_of(probe[live], maps.shape[1]), probe[live].sum(1, keepdim=True)
    readers = F.pad(masks[:, 1:], (0, 1)) if shift else masks       # the rows where masks are read
    weight = readers[live].gather(1, at) & (torch.arange(at.shape[1], device=at.device) < n)
    d_in = (weight.float()[:, None] @ maps)[:, 0] / weight.sum(1, keepdim=True).clamp(min=1)
    d_out = (maps @ drafted[live].float()[..., None])[..., 0]
    out = torch.zeros(2, *masks.shape, device=maps.device)
    d_out = torch.zeros_like(d_in).scatter(1, at, d_out)
    out[0, live], out[1, live] = d_in.to(out.dtype), d_out.to(out.dtype)    # autocast may narrow
    out = out.masked_fill(~candidates, 0.0)
    return out / out.amax(2, keepdim=True).clamp(min=torch.finfo(out.dtype).tiny)


def seed_score(u, d_in, d_out):
    """COVER's score of a candidate [9]: uncertain, looked at by many, stable. All (B, L)."""
    return u * (1 + d_in) / (1 + d_out)


def apart(score, candidates, spacing):
    """The candidates (B, L) that beat all others within `spacing` positions. (In shifted models
    neighbours are never seeds together: one would be read at a row that is masked for the other.)
    """
    if spacing == 0:
        return candidates
    score = score.masked_fill(~candidates, -torch.inf)
    order = score.argsort(dim=1, descending=True, stable=True)
    place = torch.arange(order.shape[1], 0, -1, device=order.device).expand_as(order)
    rank = torch.zeros_like(order).scatter(1, order, place).masked_fill(~candidates, 0).double()
    best = F.max_pool1d(rank[:, None], 2 * spacing + 1, stride=1, padding=spacing)[:, 0]
    return candidates & (rank == best)


def probed(denoiser, probe_layers):
    """COVER's probe layers: those given, by default the middle and the last one."""
    layers = getattr(getattr(denoiser.model, "config", None), "num_hidden_layers", None)
    if layers is None:          # a plain callable: it has no attention to look at
        return ()
    probe_layers = (layers // 2, layers - 1) if probe_layers is None else probe_layers
    if not isinstance(probe_layers, Sequence) or not probe_layers or not all(
            i in range(layers) for i in probe_layers):
        raise ValueError(f"probe_layers is {probe_layers}, expected layers out of 0..{layers - 1}")
    return tuple(dict.fromkeys(probe_layers))


# ---------------------------------------------------------------------------------------------
# 11. Likelihood and loss.

def mdlm_loss(model, x, answer, *, mask_id, attention_mask=None, weighted=True, generator=None):
    """The training loss of a masked-diffusion model: cross-entropy of masked answer tokens.

    Each row draws a masking probability t, stratified over the batch (antithetic [3]); each answer
    token is masked with probability t. `weighted`: every row's sum over its masked tokens is
    divided by t and by its answer length, which makes the mean a bound on -log p per token ([1]
    eq. 5 for answers, [3]); otherwise the plain mean over masked tokens, which learns faster in
    small models and is no bound.

    Args:
        model: a transformers causal LM with the `dlm_spec` attention (compiled or not).
        x: (B, L) ids. answer: (B, L) bool, the tokens to learn.
        attention_mask: (B, L), 0 on padding.
    Returns a scalar, in nats.
    """
    B, L = x.shape
    check_whole(0, mask_id=mask_id)
    if getattr(getattr(model, "config", None), "_attn_implementation", "dlm_spec") != "dlm_spec":
        raise ValueError("model has its own, causal attention: "
                         "model.set_attn_implementation('dlm_spec') first")
    if answer.shape != x.shape or not answer.any(1).all():
        raise ValueError(f"answer has shape {tuple(answer.shape)} and x {(B, L)}; "
                         "every row needs an answer token")
    u = draw((1,), generator, None, dtype=torch.float32, device=x.device)
    t = ((u + torch.arange(B, device=x.device) / B) % 1).clamp(min=1e-3)
    noise = draw((B, L), generator, None, dtype=torch.float32, device=x.device)
    masked = answer & (noise < t[:, None])
    first = int(answer.any(0).int().argmax())  # the head runs from the first answer column on
    columns = None if attention_mask is None else attention_mask.bool()[:, None, None]
    logits = model(input_ids=x.masked_fill(masked, mask_id), attention_mask=columns,
                   use_cache=False, logits_to_keep=L - first).logits
    ce = F.cross_entropy(rearrange(logits.float(), "b l v -> b v l"), x[:, first:],
                         reduction="none")
    ce = ce * masked[:, first:]
    if weighted:
        return (ce.sum(1) / t / answer.sum(1)).mean()
    return ce.sum() / masked.sum().clamp(min=1)


@torch.no_grad()
def log_likelihood(denoiser, prompt, answer, *, attention_mask=None, n_samples=128, batch_size=32,
                   cfg_scale=0.0, generator=None):
    """Monte-Carlo lower bound of log p(answer | prompt) in nats, (B,) (LLaDA [1],
    Appendix B, eq. 6).

    Each sample masks l of the n answer tokens, l stratified over 1..n, and adds n / l times their
    log-probabilities, which has far less variance than masking each with probability t.

    Args:
        prompt, attention_mask: as in samplers. answer: (B, n) ids,
            or a list of id lists (then one row at a time).
    """
    check_whole(1, n_samples=n_samples, batch_size=batch_size)
    check_number(0, math.inf, cfg_scale=cfg_scale)
    answer = [_ids_of(a, "answer") for a in answer]
    if any(a.ndim != 1 or len(a) == 0 for a in answer):
        raise ValueError("answer must be one list of ids per prompt, none of them empty")
    x, visible, P = start_canvas(denoiser, prompt, attention_mask, max(map(len, answer), default=0))
    x, visible, answer = x[:, :P], visible[:, :P], [a.to(x.device) for a in answer]
    if len(answer) != len(x):
        raise ValueError(f"{len(x)} prompts but {len(answer)} answers")
    if (visible & (x == denoiser.mask_id)).any() or any(denoiser.mask_id in a for a in answer):
        raise ValueError("a prompt or an answer holds mask tokens: a likelihood needs whole texts")
    where = x.device if generator is None else generator.device
    total = []
    for row, a in enumerate(answer):
        n = len(a)
        _check_ids(denoiser, a[None], torch.ones_like(a[None], dtype=torch.bool), "answer", row)
        full, shown = torch.cat([x[row], a]), F.pad(visible[row], (0, n), value=True)
        offset = torch.rand((), generator=generator, device=where, dtype=torch.float64)
        spread = torch.arange(n_samples, device=where, dtype=torch.float64) / n_samples
        counts = ((offset + spread) % 1 * n).long() + 1         # in 1..n
        estimates = []
        for l in counts.split(batch_size):
            rank = torch.rand(len(l), n, generator=generator, device=where).argsort(1).argsort(1)
            masked = F.pad(rank < l[:, None], (P, 0), value=False).to(x.device)
            logits = denoiser(full.masked_fill(masked, denoiser.mask_id), masked,
                              shown.expand_as(masked), cfg_scale=cfg_scale,
                              given=F.pad(visible[row], (0, n), value=False).expand_as(masked))
            logp = -F.cross_entropy(logits.float(), full.expand_as(masked)[masked],
                                    reduction="none")
            per_sample = logp.new_zeros(masked.shape).masked_scatter(masked, logp).sum(1)
            estimates.append(per_sample * n / l.to(x.device))
        total.append(torch.cat(estimates).mean())
    if torch.stack(total).isnan().any():
        raise ValueError("the model's logits are not usable: they hold NaN or +inf")
    return torch.stack(total)


# ---------------------------------------------------------------------------------------------
# 12. What revisions were worth: for the output of any sampler.

def flip_flops(out):
    """For each of out.revisions, whether it changed nothing in the end: the token that was taken
    back came back at its position (at once or later), or the new one had been taken back there
    before (A -> B -> A counts twice). A list of bool."""
    first, last = {}, {}        # (row, position, token) -> event that first took / last put it
    for i, r in enumerate(out.revisions):
        first.setdefault((r.row, r.position, r.old), i)
        last[r.row, r.position, r.new] = i
    return [last.get((r.row, r.position, r.old), -1) >= i
            or first.get((r.row, r.position, r.new), i + 1) <= i
            for i, r in enumerate(out.revisions)]


def revision_statistics(out, reference=None):
    """What the revisions of a DecodeOutput were worth, as a dict.

    events, remasks, replaces: how many. flip_flops: see above. effective_share: the share of events
    that are none, None without events; effective_remasks, effective_share_remask: of the re-masks
    alone (COVER [9] counts those). commits: all tokens committed; restored, wasted_share: those
    that only put a re-masked token back, and their share. With `reference`, (B, L) or (B, G) ids,
    also became_right and became_wrong: events that changed another token into the reference's,
    and away from it.
    """
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
        offset = out.sequences.shape[1] - reference.shape[-1]
        if len(reference) != len(out.sequences) or offset not in (0, out.prompt_length):
            raise ValueError(f"reference has shape {tuple(reference.shape)}, expected that of "
                             f"sequences, {tuple(out.sequences.shape)}, or of generated")
        want = [int(reference[r.row, r.position - offset]) if r.position >= offset else -1
                for r in out.revisions]
        stats["became_right"] = sum(r.new == w != r.old for r, w in zip(out.revisions, want))
        stats["became_wrong"] = sum(r.old == w != r.new for r, w in zip(out.revisions, want))
    return stats


# ---------------------------------------------------------------------------------------------
# 13. Bad input: what is refused, and in which words.

def check_prompt(denoiser, prompt, attention_mask, gen_length):
    """The prompt as start_canvas takes it -> (B, P) ids and (B, P) bool, False on padding."""
    check_has("mask_id", "a Denoiser", denoiser=denoiser)
    if isinstance(prompt, (list, tuple)):
        if not prompt:
            raise ValueError("prompt is an empty list, expected at least one row")
        if isinstance(prompt[-1], Tensor) and prompt[-1].dtype == torch.bool:
            raise ValueError("prompt is the pair that `encode` gives: ids, mask = encode(...), "
                             "then pass ids and attention_mask=mask")
        rows = [_ids_of(r) for r in prompt]
        rows = [torch.stack(rows)] if all(r.ndim == 0 for r in rows) else rows
        if any(r.ndim != 1 for r in rows):
            raise ValueError(f"prompt is a list of {[tuple(r.shape) for r in rows][:4]}, expected "
                             "rows of ids")
        if attention_mask is not None and len({len(r) for r in rows}) > 1:
            raise ValueError("prompt is a list of rows of different lengths, which makes its own "
                             "attention_mask: drop yours")
        prompt, own_mask = pad_left([r.tolist() for r in rows], denoiser.pad_id)
        attention_mask = own_mask if attention_mask is None else attention_mask
    prompt = _ids_of(prompt).to(denoiser.device).long()
    if prompt.ndim not in (1, 2):
        raise ValueError(f"prompt has shape {tuple(prompt.shape)}, expected (B, P)")
    prompt = prompt[None] if prompt.ndim == 1 else prompt
    B, P = prompt.shape
    if B == 0:
        raise ValueError(f"prompt has shape {(B, P)}: an empty batch")
    check_whole(0, gen_length=gen_length)
    if P + gen_length == 0:
        raise ValueError("gen_length is 0 and the prompt is empty: there is nothing to decode")
    visible = torch.ones_like(prompt, dtype=torch.bool)
    if attention_mask is not None:
        attention_mask = torch.as_tensor(attention_mask)
        if attention_mask.shape != prompt.shape and attention_mask.shape != prompt.shape[-1:]:
            raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}, "
                             f"the prompt {(B, P)}")
        visible = attention_mask.to(prompt.device).bool().expand(B, P)
        if (visible[:, :-1] & ~visible[:, 1:]).any():
            raise ValueError("attention_mask must be left padding: zeros, then ones, in every row")
        if gen_length == 0 and not visible.any(1).all():
            raise ValueError("attention_mask leaves nothing of row "
                             f"{int((~visible.any(1)).nonzero()[0])}")
    _check_ids(denoiser, prompt, visible)
    limit = getattr(getattr(denoiser.model, "config", None), "max_position_embeddings", None)
    if limit is not None and P + gen_length > limit:
        raise ValueError(f"prompt + gen_length is {P} + {gen_length} = {P + gen_length} tokens, "
                         f"the model takes {limit}")
    return prompt, visible


def _ids_of(value, name="prompt"):
    """A tensor of whole numbers, or a ValueError."""
    try:
        ids = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as e:
        raise ValueError(f"{name} is {type(value).__name__} {str(value)[:40]!r}, expected integer "
                         "ids of shape (B, P)") from e
    if ids.dtype not in (torch.int64, torch.int32) and (ids.numel() or isinstance(value, Tensor)):
        raise ValueError(f"{name} holds {ids.dtype}, expected integer ids")
    return ids.long()


def _check_ids(denoiser, ids, visible, name="prompt", first_row=0):
    V = denoiser.n_embeddings
    bad = visible & ((ids < 0) | (ids >= V if V is not None else False))
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        raise ValueError(f"{name}[{first_row + row}, {column}] is {ids[row, column]}, outside the "
                         f"vocabulary of {V or 'any'} ids")


def check_model(model, mask_id, eos_ids, pad_id, n_tokens):
    """The ValueErrors of Denoiser."""
    if not isinstance(mask_id, Integral) or isinstance(mask_id, bool) or mask_id < 0:
        raise ValueError(f"mask_id is {mask_id!r}, expected the id of the mask token: this "
                         "checkpoint's files do not name it, so pass it, e.g. "
                         "load_denoiser(..., mask_id=126336) for LLaDA, 151666 for Dream")
    if not callable(model):
        raise ValueError(f"model is {model!r}, expected a model or a callable like one; for a "
                         "checkpoint's name there is load_denoiser")
    if "sliding_attention" in (getattr(getattr(model, "config", None), "layer_types", None) or ()):
        raise ValueError(f"{type(model).__name__} has layers with sliding_attention, which the "
                         "bidirectional hook does not do")
    if isinstance(eos_ids, (Integral, str)):
        raise ValueError(f"eos_ids is {eos_ids!r}, expected a tuple of ids")
    check_whole(1, n_tokens=1 if n_tokens is None else n_tokens)
    V = embeddings_of(model)
    for name, i in (("mask_id", mask_id), *(("eos_ids", i) for i in eos_ids),
                    ("pad_id", 0 if pad_id is None else pad_id)):
        check_whole(0, **{name: i})
        if V is not None and i >= V:
            raise ValueError(f"{name} is {i}, but the model has {V} embeddings")
    if mask_id in eos_ids:
        raise ValueError(f"eos_ids is {tuple(eos_ids)} and holds the mask_id {mask_id}")


def check_forward(x, parts, cfg_scale, given, kv):
    """The ValueErrors of Denoiser.__call__ that need no word from the device."""
    if cfg_scale and (given is None or kv is not None):
        raise ValueError(f"cfg_scale is {cfg_scale}: guidance needs `given` (what to mask) "
                         "and takes no kv")
    if not parts:
        raise ValueError("ask is an empty tuple, expected bool canvases (B, L)")
    for part in parts:
        if part.dtype != torch.bool or part.shape != x.shape or x.ndim != 2:
            raise ValueError(f"ask is {part.dtype} of shape {tuple(part.shape)} and x has shape "
                             f"{tuple(x.shape)}, expected bool, both (B, L)")
    if len(x) == 0:
        raise ValueError("x has no rows: there is nothing to forward")


def check_knobs(denoiser, B, block_length, *, temperature, suppress_eos, postpone_eos,
                logits_processor, generator, early_stop, remasking="low_confidence",
                tempered_confidence=False, cfg_scale=0.0):
    """The ValueErrors that samplers share. The keywords are those of `propose`, and two more."""
    check_whole(1, block_length=block_length)
    check_flag(suppress_eos=suppress_eos, postpone_eos=postpone_eos, early_stop=early_stop,
               tempered_confidence=tempered_confidence)
    check_one_of(REMASKING, remasking=remasking)
    check_has("__call__", "a callable", logits_processor=logits_processor)
    check_number(0, math.inf, temperature=temperature, cfg_scale=cfg_scale)
    if tempered_confidence and (temperature == 0 or remasking == "random"):
        raise ValueError("tempered_confidence changes nothing at temperature 0 or with "
                         "remasking='random'")
    each = generator if isinstance(generator, (list, tuple)) else [generator]
    if not all(g is None or isinstance(g, torch.Generator) for g in each):
        raise ValueError(f"generator is {generator!r}, expected a torch.Generator or one per row")
    if isinstance(generator, (list, tuple)) and len(generator) != B:
        raise ValueError(f"generator is a list of {len(generator)}, the batch has {B} rows")
    if (suppress_eos or postpone_eos or early_stop) and not denoiser.eos_ids:
        raise ValueError("suppress_eos, postpone_eos and early_stop need a denoiser with eos_ids")
    if suppress_eos and len(denoiser.eos_ids) == 1 and (postpone_eos or early_stop):
        raise ValueError("with suppress_eos no eos is ever emitted: "
                         "postpone_eos and early_stop would do nothing")


def check_rule(threshold, factor=None, steps=None):
    """The commit rule's ValueErrors; returns the threshold in force, 0.9 when nothing is given."""
    given = {k: v for k, v in dict(threshold=threshold, factor=factor, steps=steps).items()
             if v is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} were given, each a rule of its own: pass one")
    check_number(0, 1, threshold=given.get("threshold", 0.9))
    check_number(0, math.inf, factor=given.get("factor", 1))
    return 0.9 if not given else threshold


def check_flag(**flags):
    """ValueError unless each named value is True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r:.40}, expected True or False")


def check_number(low, high, **numbers):
    """ValueError unless each named value is a finite number from low to high."""
    for name, value in numbers.items():
        if not isinstance(value, Real) or not (low <= value <= high and math.isfinite(value)):
            limits = f"from {low}" + (f" to {high}" if high < math.inf else "")
            kind = "number" if high < math.inf else "finite number"
            raise ValueError(f"{name} is {value!r}, expected a {kind} {limits}")


def check_whole(least, **numbers):
    """ValueError unless each named value is a whole number from `least`."""
    for name, value in numbers.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} is {value!r}, expected a whole number from {least}")


def check_shape(x, **values):
    """ValueError unless each named value is a tensor of the shape of x."""
    for name, value in values.items():
        if getattr(value, "shape", None) != x.shape:
            raise ValueError(f"{name} gave {tuple(getattr(value, 'shape', ())) or value!r}, "
                             f"expected a tensor of shape {tuple(x.shape)}")


def check_has(attribute, kind, **values):
    """ValueError unless each named value is None or has what its kind needs."""
    for name, value in values.items():
        if value is not None and not hasattr(value, attribute):
            raise ValueError(f"{name} is {value!r:.40}, expected {kind}")


def check_one_of(options, **values):
    """ValueError unless each named value is one of the options."""
    for name, value in values.items():
        if not isinstance(value, str | None) or value not in options:
            *most, last = map(repr, options)
            raise ValueError(f"{name} is {value!r}, expected {', '.join(most)} or {last}")


def check_cover(*, uncertainty, cache, score, refresh, min_score, spacing, max_seeds, max_checks,
                closing, **shares):
    """The ValueErrors of sample_cover's own knobs; shares: those from 0 to 1."""
    check_number(0, 1, **shares)
    check_number(-math.inf, math.inf, min_score=min_score)
    check_whole(0, spacing=spacing, max_seeds=max_seeds, max_checks=max_checks, closing=closing)
    check_one_of(("entropy", "commit"), uncertainty=uncertainty)
    check_one_of((None, "prefix", "dual"), cache=cache)
    check_has("__call__", "a callable", score=score)
    check_whole(1, refresh=1 if refresh is None else refresh)
    if refresh is not None and cache is None:
        raise ValueError(f"refresh is {refresh}, but without a cache every forward is full")
    if closing and not (max_seeds and max_checks):
        raise ValueError(f"closing is {closing}, but with max_seeds {max_seeds} and max_checks "
                         f"{max_checks} nothing is checked")


def check_dual(denoiser, drafter, draft_steps, verify, view, cache, max_revisions, max_rounds):
    """The ValueErrors of sample_dual_diffusion's own knobs."""
    check_whole(1, draft_steps=draft_steps)
    check_whole(0, max_revisions=max_revisions, max_rounds=0 if max_rounds is None else max_rounds)
    check_one_of(("visible", "leave_one_out", "cover"), view=view)
    check_one_of((None, "prefix", "dual", "dkv"), cache=cache)
    check_has("mask_id", "a Denoiser", drafter=drafter)
    if not callable(verify):
        raise ValueError(f"verify is {verify!r}, expected verify_trust, verify_kl, "
                         "verify_confidence or a callable like them")
    if view == "cover" and drafter is not None:
        raise ValueError("view='cover' needs the verifier's own keys and values of the drafted "
                         "tokens: it takes no second drafter")
    if drafter is not None and drafter.mask_id != denoiser.mask_id:
        raise ValueError(f"the drafter's mask_id is {drafter.mask_id}, the verifier's "
                         f"{denoiser.mask_id}: they need the same vocabulary")
    if drafter is not None and drafter.n_embeddings != denoiser.n_embeddings:
        raise ValueError(f"the drafter has {drafter.n_embeddings} embeddings, the verifier "
                         f"{denoiser.n_embeddings}: they need the same vocabulary")


# ---------------------------------------------------------------------------------------------
# 14. Command line.

EXAMPLES = (
    "Mia has 12 shells. She finds 5 more shells. Then she gives 3 shells to Ben. Now she has twice "
    "as many. How many shells are left?",
    "Ben is taller than Ann. Max is taller than Ben. Ann is taller than Zoe. Who is the tallest?\n"
    "A) Ann\nB) Max\nC) Zoe\nD) Ben\nGive a reason, then the letter.",
    "Write a function solve(nums) that takes the numbers in nums greater than 4, multiplies by 3 "
    "each and returns their sum.",
)
SAMPLERS = {"llada": sample_llada, "fast_dllm": sample_fast_dllm, "dkv": sample_dkv,
            "dual_diffusion": sample_dual_diffusion, "wino": sample_wino, "saber": sample_saber,
            "cover": sample_cover}
VERIFIERS = {"trust": verify_trust, "kl": verify_kl, "confidence": verify_confidence}
KNOBS = {       # of single samplers: name -> type or choices, help
    "block_length": (int, "default: llada one block, wino and saber 128, else 32"),
    "steps": (int, "llada, dkv: forwards in all (llada's default: one token per forward)"),
    "remasking": (REMASKING, "llada: which masks stay"),
    "cfg_scale": (float, "llada: classifier-free guidance"),
    "threshold": (float, "commit from this confidence; llada has none, dkv instead of steps"),
    "factor": (float, "fast_dllm, dual_diffusion: commit by rank instead"),
    "cache": (("prefix", "dual", "dkv"), "fast_dllm, cover, dual_diffusion: reuse keys, values"),
    "refresh": (int, "dkv, cover with a cache: a full forward every so many steps"),
    "draft_steps": (int, "dual_diffusion: K, forwards per verification"),
    "verify": (tuple(VERIFIERS), "dual_diffusion: the rule"),
    "tau": (float, "dual_diffusion: the rule's threshold"),
    "view": (("visible", "leave_one_out", "cover"), "dual_diffusion: what the verifier sees"),
    "threshold_back": (float, "wino: re-mask below this"),
    "n": (int, "saber: tokens to commit at least"),
    "max_seeds": (int, "cover: tokens to re-check per forward"),
    "tau_replace": (float, "cover: replace a token from this probability of another"),
    "tau_remask": (float, "cover: re-mask a token below this probability"),
    "spacing": (int, "cover: replacements of one forward are farther apart than this"),
    "closing": (int, "cover: forwards that may check a full block"),
    "max_checks": (int, "cover: how often a position is checked"),
}


class LiveCanvas:
    """A callback that shows the first row's canvas filling: redrawn in place on a terminal,
    else a line per forward."""

    def __init__(self, denoiser, out=None):
        denoiser.decode([])     # ValueError without a tokenizer
        out = out or sys.stdout
        self.denoiser, self.out, self.height, self.last = denoiser, out, 0, ""
        self.tty = out.isatty()

    def text(self, ids):
        """The canvas as text: ░ a mask, · an eos; what trails behind a complete text is cut."""
        d = self.denoiser
        end = next((i for i, t in enumerate(ids) if t in d.eos_ids), len(ids))
        ids = ids if d.mask_id in ids[:end] else ids[:end]
        kinds = ["░" if t == d.mask_id else "·" if t in d.eos_ids else "" for t in ids]
        runs = [(sign, [t for _, t in group])
                for sign, group in itertools.groupby(zip(kinds, ids), lambda z: z[0])]
        return " ".join(sign * len(run) if sign else d.tokenizer.decode(run) for sign, run in runs)

    def __call__(self, step):
        """Show one step."""
        text = self.text(step["x"][0, step["prompt_length"]:].tolist())
        nfe = int(step["nfe"][0])
        if not self.tty:
            if text != self.last:
                print(f"{nfe:4d} | {' / '.join(text.splitlines())}", file=self.out, flush=True)
            self.last = text
            return
        columns, rows = shutil.get_terminal_size()
        lines = [piece for line in text.splitlines() or [""] for piece in
                 textwrap.wrap(line, columns - 1, drop_whitespace=False) or [""]][2 - rows:]
        up = f"\033[{self.height}A\r" if self.height else ""
        print(f"{up}\033[J\033[33m" + "\n".join(lines) + f"\033[0m\n[forward {nfe}]", file=self.out,
              flush=True)
        self.height = len(lines) + 1


def main(argv=None):
    """`python dlm_spec.py [problem] [options]`."""
    cli = argparse.ArgumentParser(prog="dlm_spec.py",
                                  description="Decode with a masked-diffusion language model.")
    cli.add_argument("problem", nargs="?",
                     help="what to solve (default: a built-in problem of each family)")
    cli.add_argument("--sampler", choices=sorted(SAMPLERS), help="default: llada")
    cli.add_argument("--compare", action="store_true",
                     help="all samplers on each problem, as a table")
    cli.add_argument("--model", help="folder or hub id of LLaDA's, Dream's or a stock layout "
                                     "(default: the embedded model)")
    cli.add_argument("--mask-id", type=int,
                     help="the mask token's id, where the checkpoint does not name it")
    cli.add_argument("--device", help="default: cuda when there is one, else cpu")
    cli.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    cli.add_argument("--gen-length", type=int, default=64)
    cli.add_argument("--temperature", type=float, default=0.0)
    for name, (kind, text) in KNOBS.items():
        cli.add_argument("--" + name.replace("_", "-"), help=text,
                         **{"choices" if isinstance(kind, tuple) else "type": kind})
    cli.add_argument("--adaptive", action="store_true", default=None,
                     help="dual_diffusion: K follows the share taken back")
    cli.add_argument("--postpone-eos", action="store_true",
                     help="fill end-of-text tokens last in their block")
    cli.add_argument("--early-stop", action="store_true",
                     help="stop after a block with an end of text")
    cli.add_argument("--seed", type=int,
                     help="of a temperature above 0, or --remasking random (default 0)")
    cli.add_argument("--quiet", action="store_true", help="no canvas, the answer only")
    args = cli.parse_args(argv)
    if args.compare and (args.sampler or args.quiet):
        cli.error("--compare runs all samplers and shows no canvas: drop --sampler and --quiet")
    if args.seed is not None and args.temperature == 0 and args.remasking != "random":
        cli.error("--seed changes nothing at temperature 0")
    if not 0 <= (args.seed or 0) < 2 ** 63:
        cli.error(f"--seed is {args.seed}, expected a whole number from 0 of at most 63 bits")
    args.sampler = args.sampler or "llada"
    disable_progress_bar()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    try:
        denoiser = load_denoiser(args.model, device=args.device, mask_id=args.mask_id,
                                 dtype=getattr(torch, args.dtype) if args.dtype else None)
        for problem in [args.problem] if args.problem is not None else EXAMPLES:
            _solve(denoiser, problem, args)
    except ValueError as e:
        cli.exit(2, f"dlm_spec.py: {e}\n")
    except KeyboardInterrupt:
        cli.exit(130, "\nstopped\n")
    except BrokenPipeError:         # the reader of a pipe has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        cli.exit(141)
    except OSError as e:
        cli.exit(1, f"dlm_spec.py: {e}\n")


def _knobs(args, name):
    """The keywords that were given, for a sampler; ValueError for one it does not have."""
    takes = {*inspect.signature(SAMPLERS[name]).parameters}
    takes |= {"tau"} if "verify" in takes else set()
    knobs = {k: v for k in (*KNOBS, "adaptive") if (v := getattr(args, k)) is not None}
    if (extra := knobs.keys() - takes) and not args.compare:
        raise ValueError(f"--sampler {name} has no {', '.join(sorted(extra))}")
    knobs = {k: knobs[k] for k in knobs.keys() & takes}
    extra = {"tau", "draft_steps", "view", "adaptive"} & knobs.keys()
    if knobs.get("verify") == "trust" and extra:
        raise ValueError(f"--verify trust accepts everything: it has no {', '.join(sorted(extra))}")
    rule, tau = knobs.pop("verify", "confidence"), knobs.pop("tau", None)
    if "verify" in takes:
        knobs["verify"] = VERIFIERS[rule]
        if tau is not None:
            knobs["verify"] = functools.partial(VERIFIERS[rule], tau=tau)
            logits, token = torch.zeros(1, 2), torch.zeros(1, dtype=torch.long)
            knobs["verify"](logits, token, logits)          # ValueError of a bad tau
    return knobs


def _solve(denoiser, problem, args):
    print(f"\n\033[1m{problem}\033[0m" if sys.stdout.isatty() else f"\n{problem}")
    ids, mask = denoiser.encode(problem)
    if args.compare:
        print(f"   {'sampler':14s} {'forwards':>8s} {'positions':>9s} {'seconds':>7s} "
              f"{'revisions':>9s}  answer")
    refused = 0
    for name in SAMPLERS if args.compare else [args.sampler]:
        live = None if args.quiet or args.compare else LiveCanvas(denoiser)
        start = time.perf_counter()
        try:
            out = SAMPLERS[name](
                denoiser, ids, attention_mask=mask, gen_length=args.gen_length,
                temperature=args.temperature, postpone_eos=args.postpone_eos,
                early_stop=args.early_stop, callback=live, **_knobs(args, name),
                generator=torch.Generator(denoiser.device).manual_seed(args.seed or 0))
        except ValueError as e:
            refused += 1
            if not args.compare or refused == len(SAMPLERS):
                raise
            print(f"   {name:14s} {e}", flush=True)
            continue
        seconds, answer = time.perf_counter() - start, denoiser.decode(out.generated)[0]
        if args.compare:
            print(f"   {name:14s} {int(out.nfe[0]):8d} {int(out.positions[0]):9d} {seconds:7.2f} "
                  f"{len(out.revisions):9d}  {' / '.join(answer.splitlines())}", flush=True)
        else:
            print(f"-> {answer}\n   {int(out.nfe[0])} forwards, {seconds:.2f} s, "
                  f"{float(out.tokens_per_forward[0]):.2f} tokens per forward")


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_: f"dlm_spec.py: {message}\n"
    main()
