"""Tiny models for the tests: random stock transformers models, a table as a model,
and a slow definition of both."""
from types import SimpleNamespace

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dlm_spec import EMBEDDED_MODEL

VOCAB, HEADS, HEAD_DIM = 40, 4, 8
M = VOCAB - 1               # the mask id the tests use


def _tiny(model_class, config_class, layers, seed, dtype, vocab, kv_heads):
    config = config_class(
        vocab_size=vocab, hidden_size=HEADS * HEAD_DIM, intermediate_size=48,
        num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        # transformers' own initialisation (0.02, zero biases, unit norms) hides faults:
        # nothing would matter
        noise = torch.randn(p.shape, generator=generator)
        if "norm" in name:
            p.data = 1 + .2 * noise
        elif name.endswith("bias"):
            p.data = .5 * noise
        else:
            p.data = noise if "embed" in name else noise * 1.5 / p.shape[1] ** .5
    return model.to(dtype)


def tiny_llama(layers, seed=0, dtype=torch.float32, vocab=VOCAB, kv_heads=HEADS):
    """A random stock Llama, hidden size 32, 4 heads (LLaDA's architecture)."""
    return _tiny(LlamaForCausalLM, LlamaConfig, layers, seed, dtype, vocab, kv_heads)


def tiny_qwen2(layers, seed=0, dtype=torch.float32, vocab=VOCAB, kv_heads=2):
    """A random stock Qwen2, with biases on q, k, v and grouped heads (Dream's
    architecture)."""
    return _tiny(Qwen2ForCausalLM, Qwen2Config, layers, seed, dtype, vocab, kv_heads)


def tiny_qwen3(layers, seed=0, dtype=torch.float32, vocab=VOCAB, kv_heads=2):
    """A random stock Qwen3: q and k are normalised per head."""
    return _tiny(Qwen3ForCausalLM, Qwen3Config, layers, seed, dtype, vocab, kv_heads)


def lively(make, layers, seed=0, dtype=torch.float32):
    """A tiny model sure enough of itself that thresholds let some tokens through, not all."""
    model = make(layers, seed=seed, dtype=dtype)
    model.lm_head.weight.data.mul_(2.5)
    return model


def sharp_table(tokens, vocab=VOCAB, logits=9.0, floor=-9.0):
    """(L, vocab) logits that want tokens[i] at position i. logits: one number, or (L,)."""
    at = torch.arange(len(tokens))
    table = torch.full((len(tokens), vocab), floor)
    table[at, torch.as_tensor(tokens)] = torch.as_tensor(logits).expand(len(tokens))
    return table


def commit_order(out):
    """Generated positions of the first row by the forward that filled them, [[...], ...]."""
    steps = out.commit_step[0, out.prompt_length:].tolist()
    return [[i for i, s in enumerate(steps) if s == n] for n in range(1, max(steps) + 1)]


def padded(rows, L, filler=7):
    """Rows of ids -> (B, L) left-padded ids and mask; padded with an ordinary token,
    so that seeing it matters."""
    ids = torch.stack([torch.cat([torch.full((L - len(r),), filler), r]) for r in rows])
    return ids, torch.stack([torch.arange(L) >= L - len(r) for r in rows])


def random_ids(B, L, seed=0, vocab=VOCAB):
    """(B, L) random ids, without the last id of the vocabulary (the mask)."""
    return torch.randint(0, vocab - 1, (B, L), generator=torch.Generator().manual_seed(seed))


class Table:
    """A model whose logits depend only on the position, so that every commit order can be
    worked out by hand.

    table: (L, V) logits, read at `position_ids`; or a function (input_ids, position_ids)
    -> (B, n, V). Counts `calls`, `rows` (canvases forwarded) and keeps the keywords of
    the `last` call.
    """

    def __init__(self, table):
        self.table, self.calls, self.rows, self.last = table, 0, 0, None

    def __call__(self, input_ids, attention_mask=None, position_ids=None, use_cache=False,
                 **kw):
        self.calls += 1
        self.rows += len(input_ids)
        self.last = dict(input_ids=input_ids, attention_mask=attention_mask,
                         position_ids=position_ids, **kw)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        logits = (self.table(input_ids, position_ids) if callable(self.table)
                  else self.table[position_ids])
        return SimpleNamespace(logits=logits)


def oracle(model, ids, mask=None, position_ids=None, stale=None, fresh=None):
    """What a tiny model must compute, written out: a transformer without a causal
    mask, in plain torch.

    Args:
        mask: (B, L) or (B, L, L) bool, True where a query may look.
        stale, fresh: keys and values of an earlier call and the (B, L) bool columns that are
            recomputed: in every layer the other columns keep their old ones. This is what a
            K/V cache is meant to do, the slow way. With fresh (B, L, L) each query has keys
            and values of its own: fresh ones in its row's columns, stale ones elsewhere.
    Returns (B, L, V) logits (meaningless outside `fresh`) and the keys and values,
    a (k, v) per layer, (B, L, H_kv, d).
    """
    w, c = model.state_dict(), model.config
    B, L = ids.shape
    if position_ids is None:
        position_ids = torch.arange(L).expand(B, L)
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None].expand(B, L, L)
    frequency = 10000. ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turn = torch.polar(torch.ones(()),
                       position_ids[:, :, None, None] * frequency)  # (B, L, 1, d/2)

    def norm(y, name):
        scale = (y.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps).sqrt()
        return y / scale * w[name + ".weight"]

    def rope(y):    # channels i and i + d/2: a complex number, turned by position x frequency
        y = torch.complex(*y.chunk(2, -1)) * turn
        return torch.cat([y.real, y.imag], -1)

    h, kept = w["model.embed_tokens.weight"][ids], []
    for layer in range(c.num_hidden_layers):
        at = f"model.layers.{layer}."

        def linear(y, name, at=at):
            return y @ w[at + name + ".weight"].T + w.get(at + name + ".bias", 0)

        a = norm(h, at + "input_layernorm")
        q, k, v = (linear(a, f"self_attn.{name}_proj").view(B, L, -1, HEAD_DIM)
                   for name in "qkv")
        if at + "self_attn.q_norm.weight" in w:
            q, k = norm(q, at + "self_attn.q_norm"), norm(k, at + "self_attn.k_norm")
        q, k = rope(q), rope(k)
        own = stale is not None and fresh.dim() == 3
        if stale is not None and not own:
            k = torch.where(fresh[:, :, None, None], k, stale[layer][0])
            v = torch.where(fresh[:, :, None, None], v, stale[layer][1])
        kept.append((k, v))
        heads = []
        for i in range(HEADS):
            g = i * k.shape[2] // HEADS                 # the k, v head that query head i reads
            K, V = k[:, None, :, g], v[:, None, :, g]        # (B, query or 1, column, d)
            if own:
                K = torch.where(fresh[..., None], K, stale[layer][0][:, None, :, g])
                V = torch.where(fresh[..., None], V, stale[layer][1][:, None, :, g])
            score = (q[:, :, None, i] @ K.mT)[:, :, 0] / HEAD_DIM ** .5
            if mask is not None:
                # finite: rows that see nothing stay numbers
                score = score.masked_fill(~mask, -1e30)
            heads.append((score.softmax(-1)[:, :, None] @ V)[:, :, 0])
        h = h + linear(torch.cat(heads, -1), "self_attn.o_proj")
        a = norm(h, at + "post_attention_layernorm")
        gate = linear(a, "mlp.gate_proj")
        h = h + linear(gate * gate.sigmoid() * linear(a, "mlp.up_proj"), "mlp.down_proj")
    return norm(h, "model.norm") @ w["lm_head.weight"].T, kept


def copy_of_embedded(tmp_path):
    """A folder with the files of the embedded model, to be spoilt."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in EMBEDDED_MODEL.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def no_mask(logits):
    """Logits as the denoiser gives them: M is never predicted."""
    return logits.index_fill(-1, torch.tensor([M]), -torch.inf)
