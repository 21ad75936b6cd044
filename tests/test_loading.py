"""Section 10: checkpoints are built here in their original names and files and opened by
load_denoiser; text becomes ids and ids become text. What the hub answers comes from a server
in this process, so that huggingface_hub raises what it raises in life."""
import http.server
import importlib.util
import json
import pickle
import re
import shutil
import socket
import sys
import threading
import warnings
from types import SimpleNamespace

import huggingface_hub.constants as hub
import jinja2
import pytest
import torch
from helpers import Table, copy_of_embedded
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import dlm_spec
from dlm_spec import (
    LLADA_NAMES,
    Denoiser,
    dream_config,
    llada_config,
    load_denoiser,
    pad_left,
    sample_llada,
)

LLADA = {   # the fields of LLaDA-8B's config.json, with small numbers
    "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"], "attention_dropout": 0.0, "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "auto_map": {"AutoConfig": "remote.Config", "AutoModel": "remote.Model",
                 "AutoModelForCausalLM": "remote.Model"},
    "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama", "d_model": 32,
    "embedding_dropout": 0.0, "embedding_size": 48, "eos_token_id": 1,
    "flash_attention": False, "include_bias": False, "include_qkv_bias": False,
    "init_cutoff_factor": None,
    "init_device": "meta", "init_fn": "mitchell", "init_std": 0.02, "input_emb_norm": False,
    "layer_norm_type": "rms", "layer_norm_with_affine": True, "mask_token_id": 2,
    "max_sequence_length": 64, "mlp_hidden_size": 56, "mlp_ratio": 4, "model_type": "llada",
    "multi_query_attention": None, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2,
    "pad_token_id": 1, "precision": "amp_bf16", "residual_dropout": 0.0, "rms_norm_eps": 1e-05,
    "rope": True, "rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False,
    "transformers_version": "4.46.3", "use_cache": False, "vocab_size": 40,
    "weight_tying": False,
}
DREAM = {
    "architectures": ["DreamModel"], "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "remote.Config", "AutoModel": "remote.Model"},
    "bos_token_id": 281, "eos_token_id": 281, "hidden_act": "silu", "hidden_size": 32,
    "initializer_range": 0.02, "intermediate_size": 56, "mask_token_id": 282,
    "max_position_embeddings": 64, "max_window_layers": 2, "model_type": "Dream",
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "pad_token_id": 281, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
    "use_sliding_window": False, "vocab_size": 300,
}
LLADA_ROLES = {     # what each tensor is for, in LLaDA's words
    "embed": "model.transformer.wte", "norm": "model.transformer.ln_f",
    "head": "model.transformer.ff_out", "layer": "model.transformer.blocks.{}.",
    "norm1": "attn_norm", "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "attn_out",
    "norm2": "ff_norm", "gate": "ff_proj", "up": "up_proj", "down": "ff_out",
}
DREAM_ROLES = {
    "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "layer": "model.layers.{}.", "norm1": "input_layernorm", "q": "self_attn.q_proj",
    "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "norm2": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def shapes(r, d, mlp, layers, heads, kv_heads, vocab, qkv_bias=False, tied=False):
    """Every tensor of a checkpoint: original name -> shape."""
    kv = d // heads * kv_heads
    block = {"norm1": (d,), "q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d),
             "norm2": (d,), "gate": (mlp, d), "up": (mlp, d), "down": (d, mlp)}
    out = {r["embed"] + ".weight": (vocab, d), r["norm"] + ".weight": (d,)}
    out |= {} if tied else {r["head"] + ".weight": (vocab, d)}
    for i in range(layers):
        out |= {
            f"{r['layer'].format(i)}{r[role]}.weight": shape for role, shape in block.items()
        }
        if qkv_bias:
            out |= {f"{r['layer'].format(i)}{r[role]}.bias": block[role][:1] for role in "qkv"}
    return out


def llada_shapes(c):
    return shapes(LLADA_ROLES, c["d_model"], c["mlp_hidden_size"], c["n_layers"], c["n_heads"],
                  c["n_kv_heads"], c["embedding_size"], tied=c["weight_tying"])


def dream_shapes(c):
    return shapes(DREAM_ROLES, c["hidden_size"], c["intermediate_size"],
                  c["num_hidden_layers"], c["num_attention_heads"], c["num_key_value_heads"],
                  c["vocab_size"], qkv_bias=True)


def random_weights(named_shapes, seed=0):
    """Large enough that every tensor matters to the logits: norms around 1, biases .5,
    matrices 1.5 / sqrt(fan in)."""
    generator = torch.Generator().manual_seed(seed)
    draw = {n: torch.randn(s, generator=generator) for n, s in named_shapes.items()}
    return {n: .5 * w if n.endswith("bias") else 1 + .2 * w if w.dim() == 1
            else w * 1.5 / w.shape[1] ** .5
            for n, w in draw.items()}


def write(folder, config, weights, shards=3):
    """config.json and sharded safetensors with their index, as on the hub.
    Neighbours land in different shards."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    where = {name: files[i % shards] for i, name in enumerate(weights)}
    for file in files:
        save_file({n: w.contiguous() for n, w in weights.items() if where[n] == file},
                  folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())},
             "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_tokenizer(folder, n=38):
    """A word-level tokenizer.json of n tokens: 0 unknown, 1 end of text, 2 the mask,
    3 end of turn, then words."""
    words = ["<unk>", "<|endoftext|>", "<|mdm_mask|>", "<|eot_id|>"] + [
        f"w{i}" for i in range(4, n)]
    backend = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>",
                                        eos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)


def write_dream_tokenizer(folder):
    """vocab.json, merges.txt and a tokenizer_config.json that names a remote class,
    as Dream ships them."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["he", "ll", "hell"]
    words += [f"unused{i}" for i in range(len(words), 281)]
    vocab = {word: i for i, word in enumerate(words)}
    special = {281: "<|endoftext|>", 282: "<|mask|>", 283: "<|im_end|>"}
    added = {str(i): {"content": s, "special": True, "lstrip": False, "rstrip": False,
                      "normalized": False, "single_word": False} for i, s in special.items()}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nl l\nhe ll\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["remote.Tokenizer", None]},
        "tokenizer_class": "DreamTokenizer", "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>", "mask_token": "<|mask|>", "model_max_length": 64,
        "clean_up_tokenization_spaces": False}))


def plain_logits(w, r, ids, *, layers, heads, kv_heads, theta, eps):
    """The original architecture, written out under the checkpoint's own names (roles `r`);
    everyone sees everyone."""
    B, L = ids.shape

    def linear(y, name):
        return y @ w[name + ".weight"].T + w.get(name + ".bias", 0)

    def norm(y, name):
        return y * (y.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * w[name + ".weight"]

    def rotate(y):
        # channels i and i + d/2 are the two coordinates of a point, turned by position *
        # frequency
        d = y.shape[-1]
        angle = torch.arange(L)[:, None] * theta ** (-torch.arange(0, d, 2) / d)
        a, b = y[..., :d // 2], y[..., d // 2:]
        return torch.cat(
            [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1
        )

    def split(y, n):
        return y.view(B, L, n, -1).transpose(1, 2).repeat_interleave(heads // n, 1)

    h = w[r["embed"] + ".weight"][ids]
    for i in range(layers):
        at = {k: r["layer"].format(i) + v for k, v in r.items()}
        y = norm(h, at["norm1"])
        q, k, v = (
            split(linear(y, at[role]), heads if role == "q" else kv_heads) for role in "qkv"
        )
        q, k = rotate(q), rotate(k)
        y = (q @ k.mT / q.shape[-1] ** .5).softmax(-1) @ v
        h = h + linear(y.transpose(1, 2).reshape(B, L, -1), at["o"])
        y = norm(h, at["norm2"])
        h = h + linear(torch.nn.functional.silu(linear(y, at["gate"])) * linear(y, at["up"]),
                       at["down"])
    head = r["head"] if r["head"] + ".weight" in w else r["embed"]
    return norm(h, r["norm"]) @ w[head + ".weight"].T


def llada_logits(w, ids, c=LLADA):
    return plain_logits(w, LLADA_ROLES, ids, layers=c["n_layers"], heads=c["n_heads"],
                        kv_heads=c["n_kv_heads"], theta=c["rope_theta"], eps=c["rms_norm_eps"])


def dream_logits(w, ids, c=DREAM):
    return plain_logits(w, DREAM_ROLES, ids, layers=c["num_hidden_layers"],
                        heads=c["num_attention_heads"], kv_heads=c["num_key_value_heads"],
                        theta=c["rope_theta"], eps=c["rms_norm_eps"])


def full_logits(denoiser, ids):
    """Every row of the model's logits, unshifted, nothing banned."""
    return denoiser.model(input_ids=ids, use_cache=False).logits


IDS = torch.tensor([[5, 9, 2, 30, 2, 2, 7, 11, 4], [8, 2, 2, 6, 37, 3, 2, 2, 1]])


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def llada(tmp_path):
    """A tiny LLaDA: its folder and its weights."""
    weights = random_weights(llada_shapes(LLADA))
    folder = write(tmp_path / "llada", LLADA, weights)
    write_tokenizer(folder)
    return folder, weights


@pytest.fixture
def dream(tmp_path):
    """A tiny Dream: its folder and its weights."""
    weights = random_weights(dream_shapes(DREAM))
    folder = write(tmp_path / "dream", DREAM, weights)
    write_dream_tokenizer(folder)
    return folder, weights


def change(folder, **fields):
    """Edit fields of a config.json; None leaves a null, `...` removes the field."""
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items()
                                                    if v is not ...}))


def cannot_be_read(name, **how):
    """Loading `name` is one ValueError that names it and says what to try; returns its
    text."""
    with pytest.raises(ValueError) as e:
        load_denoiser(name, **how)
    text = str(e.value)
    assert repr(str(name)) in text and e.value.__cause__ is not None
    assert all(word in text for word in ("safetensors", "licence", "hf auth login", "token=",
                                         "network", "folder")), text
    return text


# -------------------------------------------------- LLaDA

@pytest.mark.parametrize("kv_heads", [4, 2])
def test_llada_in_its_own_names_computes_what_its_architecture_says(tmp_path, kv_heads):
    """CASES 31."""
    c = LLADA | {"n_kv_heads": kv_heads}
    weights = random_weights(llada_shapes(c))
    folder = write(tmp_path / "llada", c, weights)
    write_tokenizer(folder)
    denoiser = load_denoiser(folder, device="cpu")
    assert type(denoiser.model) is LlamaForCausalLM
    want = llada_logits(weights, IDS, c)
    assert (full_logits(denoiser, IDS) - want).abs().max() < 1e-5
    assert want.std() > .5, "the weights are too small for this test to mean anything"


def test_a_swap_of_gate_and_up_would_be_caught(llada, monkeypatch):
    """Both have the same shape, so the swap loads without a complaint; only the logits
    tell."""
    folder, weights = llada
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    swapped = {k: re.sub("gate_proj|up_proj", lambda m: other[m[0]], v)
               for k, v in LLADA_NAMES.items()}
    monkeypatch.setattr(dlm_spec, "LLADA_NAMES", swapped)
    assert (full_logits(load_denoiser(folder, device="cpu"), IDS)
            - llada_logits(weights, IDS)).abs().max() > .1


def test_llada_ids_come_from_its_files_and_logits_are_not_shifted(llada):
    folder, weights = llada
    denoiser = load_denoiser(folder, device="cpu")
    assert (denoiser.mask_id, denoiser.eos_ids, denoiser.pad_id, denoiser.shift) == (
        2, (1, 3), 1, False)
    ask = torch.zeros_like(IDS, dtype=torch.bool)
    ask[0, 4] = ask[1, 0] = True
    want = llada_logits(weights, IDS)[ask]
    keep = [i for i in range(38) if i != 2]
    assert (denoiser(IDS, ask)[:, keep] - want[:, keep]).abs().max() < 1e-5


def test_padded_rows_of_the_vocabulary_are_never_predicted(llada):
    """CASES 9: the tokenizer has 38 tokens, vocab_size says 40, the embedding has 48 rows: ids
    from 38 on are padding."""
    folder, weights = llada
    weights["model.transformer.ff_out.weight"][38:] *= 50       # these would win everywhere
    write(folder, LLADA, weights)
    denoiser = load_denoiser(folder, device="cpu")
    assert denoiser.n_tokens == 38
    assert (llada_logits(weights, IDS).argmax(-1) >= 38).float().mean() > .5
    assert denoiser(IDS, torch.ones_like(IDS, dtype=torch.bool)).argmax(-1).max() < 38
    assert sample_llada(denoiser, IDS[:, :4], gen_length=8, steps=4).sequences.max() < 38


def test_without_a_tokenizer_vocab_size_bounds_the_ids_and_a_warning_says_so(tmp_path):
    folder = write(tmp_path / "llada", LLADA, random_weights(llada_shapes(LLADA)))
    with pytest.warns(UserWarning, match="no tokenizer"):
        denoiser = load_denoiser(folder, device="cpu")
    assert denoiser.tokenizer is None and denoiser.n_tokens == 40 and denoiser.mask_id == 2


@pytest.mark.parametrize("written, meant", [
    ({"weight_tying": True}, {"weight_tying": True}),
    ({"mlp_hidden_size": None}, {"mlp_hidden_size": 4 * 32})], ids=["tied", "mlp_ratio"])
def test_llada_with_tied_weights_or_with_mlp_ratio(tmp_path, written, meant):
    weights = random_weights(llada_shapes(LLADA | meant))
    folder = write(tmp_path / "llada", LLADA | written, weights)
    write_tokenizer(folder)
    assert (full_logits(load_denoiser(folder, device="cpu"), IDS)
            - llada_logits(weights, IDS)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"], ids=str)
def test_bfloat16_is_close_to_float32(llada, dtype):
    folder, weights = llada
    denoiser = load_denoiser(folder, device="cpu", dtype=dtype)
    assert {p.dtype for p in denoiser.model.parameters()} == {torch.bfloat16}
    assert (full_logits(denoiser, IDS) - llada_logits(weights, IDS)).abs().max() < .5


# -------------------------------------------------- Dream

def test_dream_in_its_own_names_computes_what_its_architecture_says(dream):
    folder, weights = dream
    denoiser = load_denoiser(folder, device="cpu")
    assert type(denoiser.model) is Qwen2ForCausalLM
    assert (full_logits(denoiser, IDS) - dream_logits(weights, IDS)).abs().max() < 1e-5
    bare = {k: torch.zeros_like(v) if k.endswith("bias") else v for k, v in weights.items()}
    assert (full_logits(denoiser, IDS) - dream_logits(bare, IDS)).abs().max() > .1, (
        "the biases were read but are not used")


def test_dream_logits_are_shifted_by_one_and_position_0_is_read_at_itself(dream):
    folder, weights = dream
    denoiser = load_denoiser(folder, device="cpu")
    assert denoiser.shift is True
    want = dream_logits(weights, IDS)
    want = torch.cat([want[:, :1], want[:, :-1]], 1).flatten(0, 1)
    got = denoiser(IDS, torch.ones_like(IDS, dtype=torch.bool))
    keep = got[0].isfinite()
    # 284 tokens without the mask; the embedding has 300 rows
    assert keep.sum() == 283 and not keep[282]
    assert (got[:, keep] - want[:, keep]).abs().max() < 1e-5
    assert load_denoiser(folder, device="cpu", shift=False).shift is False


def test_dream_opens_its_own_tokenizer_files_as_a_qwen2_tokenizer(dream):
    denoiser = load_denoiser(dream[0], device="cpu")
    assert (denoiser.mask_id, denoiser.eos_ids, denoiser.pad_id, denoiser.n_tokens) == (
        282, (281, 283), 281, 284)
    ids, mask = denoiser.encode("hello<|mask|>", chat=False)
    assert ids[0, -1] == 282 and mask.all() and denoiser.decode(ids[:, :-1]) == ["hello"]


def test_what_diffucoder_writes_behind_a_text_ends_it(dream):
    """DiffuCoder is a Dream whose instruct models write <|dlm_pad|> behind their answer."""
    path = dream[0] / "tokenizer_config.json"
    config = json.loads(path.read_text())
    added = config["added_tokens_decoder"]
    added["284"] = added["281"] | {"content": "<|dlm_pad|>", "special": False}
    path.write_text(json.dumps(config))
    denoiser = load_denoiser(dream[0], device="cpu")
    assert denoiser.eos_ids == (281, 283, 284)
    ids, _ = denoiser.encode("hello<|dlm_pad|>hello", chat=False)
    assert denoiser.decode(ids) == ["hello"]


@pytest.mark.filterwarnings("ignore:no tokenizer")
def test_dream_without_tokenizer_files_gets_none(dream):
    """transformers 5 makes a tokenizer of one token from an empty folder: every id would
    count as padding."""
    folder, _ = dream
    for file in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (folder / file).unlink()
    denoiser = load_denoiser(folder, device="cpu")
    assert denoiser.tokenizer is None and denoiser.n_tokens == 300 and denoiser.mask_id == 282


def test_a_sliding_window_that_is_switched_off_is_none():
    """Qwen2.5's configs, which Dream's continue, name a window and do not use it."""
    assert set(dream_config(DREAM | {"sliding_window": 131072}).layer_types) == {
        "full_attention"
    }


# -------------------------------------------------- stock layouts, and saving in one

def tiny_stock(model_class, config_class, **kw):
    """A random model of this class, with the ids of write_tokenizer."""
    torch.manual_seed(0)
    return model_class(config_class(
        vocab_size=48, hidden_size=32, intermediate_size=56, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=.3,
        bos_token_id=None, eos_token_id=1, pad_token_id=1, **kw))


@pytest.mark.parametrize("classes, tied", [
    ((LlamaForCausalLM, LlamaConfig), False), ((LlamaForCausalLM, LlamaConfig), True),
    ((Qwen3ForCausalLM, Qwen3Config), True)], ids=["llama", "llama, tied", "qwen3, tied"])
def test_a_stock_checkpoint_loads_and_sees_both_ways(tmp_path, classes, tied):
    model = tiny_stock(*classes, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    denoiser = load_denoiser(tmp_path, device="cpu")
    assert (denoiser.mask_id, denoiser.shift, denoiser.n_tokens) == (2, False, 38)
    assert torch.equal(full_logits(denoiser, IDS), full_logits(Denoiser(model, 2), IDS))
    other = IDS.clone()
    other[:, -1] = 12
    assert (full_logits(denoiser, IDS) - full_logits(denoiser, other))[:, 0].abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["llada", "dream"])
def test_a_saved_checkpoint_has_the_stock_layout_and_loads_the_same(kind, request, tmp_path):
    """A Dream that has become a qwen2 folder must still be read shifted."""
    original = load_denoiser(request.getfixturevalue(kind)[0], device="cpu")
    original.model.save_pretrained(tmp_path / "saved")
    original.tokenizer.save_pretrained(tmp_path / "saved")
    reloaded = load_denoiser(tmp_path / "saved", device="cpu")
    assert "model.embed_tokens.weight" in load_file(tmp_path / "saved" / "model.safetensors")
    assert torch.equal(full_logits(original, IDS), full_logits(reloaded, IDS))
    for field in ("mask_id", "eos_ids", "pad_id", "n_tokens", "shift"):
        assert getattr(original, field) == getattr(reloaded, field), field


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("kind", ["llada", "dream"])
def test_a_saved_checkpoint_is_bidirectional_for_transformers_too(kind, attention, request,
                                                                  tmp_path):
    """AutoModelForCausalLM gives the same logits, padded rows included; that they are shifted
    is in the config."""
    d = load_denoiser(request.getfixturevalue(kind)[0], device="cpu")
    d.model.save_pretrained(tmp_path / "saved")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32,
                                                 attn_implementation=attention).eval()
    for mask in (None, torch.tensor([[0] * 3 + [1] * 6, [1] * 9])):
        ours, theirs = (m(input_ids=IDS, attention_mask=mask, use_cache=False).logits
                        for m in (d.model, stock))
        shown = torch.ones_like(IDS, dtype=torch.bool) if mask is None else mask.bool()
        assert (ours - theirs)[shown].abs().max() < 1e-4
    assert stock.config.is_causal is False and stock.config.shift_logits is (kind == "dream")


# -------------------------------------------------- adapters

@pytest.fixture
def adapter(tmp_path, llada):
    """A PEFT adapter for the tiny LLaDA in its stock layout: its folder, and its logits."""
    peft = pytest.importorskip("peft", reason="pip install peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(load_denoiser(llada[0], device="cpu").model, config).eval()
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    return tmp_path / "adapter", model(input_ids=IDS, use_cache=False).logits


def test_an_adapter_is_loaded_on_top(llada, adapter):
    """The logits are those of peft's own model, and not those without the adapter."""
    with_it, without = (full_logits(load_denoiser(llada[0], device="cpu", adapter=a), IDS)
                        for a in (adapter[0], None))
    assert torch.equal(with_it, adapter[1]) and (with_it - without).abs().max() > .1


@pytest.mark.parametrize("edit, message", [
    (lambda w: {k.replace("layers", "blocks"): t for k, t in w.items()}, "missing_keys"),
    (lambda w: {k: t for k, t in w.items() if "0.self_attn.q_proj.lora_A" not in k},
     "missing_keys"),
    (lambda w: w | {"base_model.model.more.lora_A.weight": torch.zeros(2)}, "unexpected_keys"),
    (lambda w: {k: t[:1].clone() for k, t in w.items()}, "mismatched_keys")],
    ids=["names", "missing", "unexpected", "shape"])
def test_an_adapter_that_does_not_fit_is_refused(llada, adapter, edit, message):
    weights = adapter[0] / "adapter_model.safetensors"
    save_file(edit(load_file(weights)), weights)
    with pytest.raises(ValueError, match=rf"adapter' does not fit .*{message}"):
        load_denoiser(llada[0], device="cpu", adapter=adapter[0])


def test_an_adapter_s_pickle_is_not_opened(llada, adapter):
    (adapter[0] / "adapter_model.safetensors").rename(adapter[0] / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"not appear to have .* adapter_model\.safetensors"):
        load_denoiser(llada[0], device="cpu", adapter=adapter[0])


def test_without_peft_the_error_names_it(llada, tmp_path, monkeypatch):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="peft"):
        load_denoiser(llada[0], device="cpu", adapter=tmp_path)


# -------------------------------------------------- the full sizes, without their weights

def test_every_tensor_of_llada_8b_has_its_place():
    c = LLADA | {"d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32,
                 "mlp_hidden_size": 12288, "vocab_size": 126464, "embedding_size": 126464,
                 "max_sequence_length": 4096}
    with torch.device("meta"):
        stock = {k: tuple(v.shape)
                 for k, v in LlamaForCausalLM(llada_config(c)).state_dict().items()}
    mapped = {}
    for name, shape in llada_shapes(c).items():
        renamed = [re.sub(p, to, name) for p, to in LLADA_NAMES.items() if re.search(p, name)]
        assert len(renamed) == 1 and renamed[0] not in mapped, (name, renamed)
        mapped[renamed[0]] = shape
    assert mapped == stock and len(mapped) == 3 + 32 * 9


def test_every_tensor_of_dream_7b_has_its_place():
    c = DREAM | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                 "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
                 "max_position_embeddings": 131072}
    with torch.device("meta"):
        stock = {k: tuple(v.shape)
                 for k, v in Qwen2ForCausalLM(dream_config(c)).state_dict().items()}
    assert dream_shapes(c) == stock and len(stock) == 3 + 28 * 12


# -------------------------------------------------- as the hub hands them out

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LLADA_NAME, DREAM_NAME = "GSAI-ML/LLaDA-8B-Instruct", "apple/DiffuCoder-7B-cpGRPO"


@pytest.fixture
def no_network(monkeypatch):
    """Whoever opens a connection fails the test."""
    monkeypatch.setattr(
        socket.socket, "connect", lambda *_: pytest.fail("a connection was opened")
    )


def checkpoint(name, folder):
    """A tiny checkpoint in bf16 of the family that `name` belongs to; its weights."""
    c = LLADA if name == LLADA_NAME else DREAM | {"sliding_window": 4}  # there, but not in use
    named = llada_shapes(c) if name == LLADA_NAME else dream_shapes(c)
    weights = {k: w.bfloat16() for k, w in random_weights(named).items()}
    write(folder, c | {"torch_dtype": "bfloat16"}, weights)
    (write_tokenizer if name == LLADA_NAME else write_dream_tokenizer)(folder)
    return weights


def cached(name, cache):
    """The same in a cache as huggingface_hub lays it out: blobs, and a snapshot that links to
    them."""
    repo = cache / ("models--" + name.replace("/", "--"))
    weights = checkpoint(name, cache / "made")
    for folder in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (repo / folder).mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for i, file in enumerate(sorted((cache / "made").iterdir())):
        shutil.move(file, repo / "blobs" / str(i))
        (repo / "snapshots" / COMMIT / file.name).symlink_to(f"../../blobs/{i}")
    return weights


def stock(name, weights):
    """The stock model of these weights, put together here: its config written out, and every
    tensor renamed by its role."""
    size = dict(hidden_size=32, intermediate_size=56, num_hidden_layers=2,
                num_attention_heads=4, tie_word_embeddings=False)
    if name == LLADA_NAME:
        weights = dict(zip(shapes(DREAM_ROLES, 32, 56, 2, 4, 4, 48), weights.values()))
        config = LlamaConfig(
            vocab_size=48, num_key_value_heads=4, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, **size)
    else:
        config = Qwen2Config(
            vocab_size=300, num_key_value_heads=2, rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, **size)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(weights)
    return Denoiser(model, 2)


@pytest.mark.parametrize("name, source", [
    (LLADA_NAME, "folder"), (LLADA_NAME, "cache"), (LLADA_NAME, "offline"),
    (DREAM_NAME, "folder"), (DREAM_NAME, "revision")])
def test_a_sharded_bf16_checkpoint_gives_its_stock_model_s_logits(name, source, tmp_path,
                                                                  monkeypatch, no_network):
    """From a folder, from a local cache, at a revision, and from the default cache with
    HF_HUB_OFFLINE=1; without a network."""
    where = dict(name_or_path=name)
    if source == "folder":
        where = dict(name_or_path=tmp_path / "it")
        weights = checkpoint(name, tmp_path / "it")
    else:
        weights = cached(name, tmp_path)
    if source == "offline":
        monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    elif source != "folder":
        where |= dict(cache_dir=tmp_path, local_files_only=True)
    if source == "revision":
        where["revision"] = COMMIT
    denoiser = load_denoiser(**where, device="cpu", dtype=torch.bfloat16)
    assert torch.equal(full_logits(denoiser, IDS), full_logits(stock(name, weights), IDS))
    assert denoiser.shift == (name == DREAM_NAME) and denoiser.tokenizer is not None
    assert (denoiser.mask_id, denoiser.n_tokens) == (
        (2, 38) if name == LLADA_NAME else (282, 284)
    )


@pytest.mark.parametrize(
    "name, logits", [(LLADA_NAME, llada_logits), (DREAM_NAME, dream_logits)]
)
def test_bf16_files_are_computed_in_float32_where_nothing_is_said(name, logits, tmp_path):
    weights = {k: w.float() for k, w in checkpoint(name, tmp_path).items()}
    denoiser = load_denoiser(tmp_path, device="cpu")
    assert denoiser.model.dtype == torch.float32
    assert (full_logits(denoiser, IDS) - logits(weights, IDS)).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:no tokenizer")
@pytest.mark.parametrize("kind", ["llada", "dream"])
def test_the_published_ids_fit_the_published_vocabulary(kind, tmp_path):
    """Full vocabulary, narrow model: M, the end of text and the padding are where the authors
    say; M is never predicted."""
    if kind == "llada":
        c = LLADA | dict(d_model=8, n_layers=1, mlp_hidden_size=8, vocab_size=126464,
                         embedding_size=126464, mask_token_id=126336, eos_token_id=126081,
                         pad_token_id=126081)
        write(tmp_path, c, random_weights(llada_shapes(c)))
    else:
        c = DREAM | dict(hidden_size=8, num_hidden_layers=1, intermediate_size=8,
                         vocab_size=152064, mask_token_id=151666, eos_token_id=151643,
                         bos_token_id=151643, pad_token_id=151643)
        write(tmp_path, c, random_weights(dream_shapes(c)))
    d = load_denoiser(tmp_path, device="cpu")
    assert (d.mask_id, d.eos_ids, d.pad_id) == (
        (126336, (126081,), 126081) if kind == "llada" else (151666, (151643,), 151643))
    ids = torch.tensor([[5, d.mask_id, d.mask_id]])
    assert d.n_embeddings == c["vocab_size"]
    assert d(ids, ids == d.mask_id).argmax(-1).ne(d.mask_id).all()


# -------------------------------------------------- what is passed on to from_pretrained

needs_accelerate = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None,
                                      reason="device_map needs accelerate")


@needs_accelerate
@pytest.mark.parametrize("where", ["cpu", {"": "cpu"}, "auto"], ids=str)
def test_device_map_is_passed_on_with_the_renaming(llada, where):
    folder, weights = llada
    denoiser = load_denoiser(folder, device_map=where, dtype=torch.float32)
    ids = IDS.to(denoiser.device)
    assert (full_logits(denoiser, ids).cpu() - llada_logits(weights, IDS)).abs().max() < 1e-4


@needs_accelerate
def test_a_device_map_to_the_cpu_means_float32(llada):
    assert load_denoiser(llada[0], device_map="cpu").model.dtype == torch.float32


def test_a_subfolder_is_passed_on(llada):
    folder, weights = llada
    denoiser = load_denoiser(folder.parent, subfolder=folder.name, device="cpu")
    assert denoiser.n_tokens == 38
    assert (full_logits(denoiser, IDS) - llada_logits(weights, IDS)).abs().max() < 1e-5


@pytest.mark.parametrize("option", ["device_map", "tp_plan", "quantization_config"])
def test_a_device_beside_what_places_the_weights_is_refused(llada, option):
    with pytest.raises(ValueError, match=f"device='cpu' .*{option}"):
        load_denoiser(llada[0], device="cpu", **{option: "auto"})


# -------------------------------------------------- no code of a checkpoint runs

@pytest.mark.parametrize("kind", ["llada", "dream", "stock"])
def test_no_code_of_the_folder_runs(kind, request, tmp_path, monkeypatch):
    """CASES 31: neither the classes that auto_map names, nor custom_generate/generate.py."""
    if kind == "stock":
        folder = tmp_path / "stock"
        tiny_stock(LlamaForCausalLM, LlamaConfig).save_pretrained(folder)
        write_tokenizer(folder)
        change(folder, auto_map=LLADA["auto_map"])
    else:
        folder, _ = request.getfixturevalue(kind)
    (folder / "custom_generate").mkdir()
    for file in ("remote.py", "custom_generate/generate.py"):
        (folder / file).write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
                                   "class Config: pass\nclass Model: pass\n"
                                   "class Tokenizer: pass\ndef generate(): pass\n")
    monkeypatch.setattr("builtins.input",
                        lambda *_: pytest.fail("asked whether to run remote code"))
    assert load_denoiser(folder, device="cpu").tokenizer is not None
    assert not (tmp_path / "ran").exists()


def test_trust_remote_code_is_refused(llada):
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_denoiser(llada[0], trust_remote_code=True)
    load_denoiser(llada[0], device="cpu", trust_remote_code=False)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.pt",
                                  "pytorch_model-00001-of-00001.bin", "consolidated.00.pth"])
def test_a_pickle_is_not_opened_under_any_name(tmp_path, name):
    """Not as the weights, and not beside them."""
    folder = copy_of_embedded(tmp_path)
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    weights.unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    if name.startswith("pytorch_model-"):
        index = {"metadata": {}, "weight_map": dict.fromkeys(["model.norm.weight"], name)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    cannot_be_read(folder, device="cpu")
    if name != "model.safetensors":
        weights.write_bytes(good)
        load_denoiser(folder, device="cpu")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_torch_archive_is_not_opened(llada, name):
    folder, weights = llada
    for file in folder.glob("model*"):
        file.unlink()
    torch.save(weights, folder / name)
    cannot_be_read(folder, device="cpu")


def test_a_chat_template_runs_in_a_sandbox(tmp_path):
    folder, ran = copy_of_embedded(tmp_path), tmp_path / "ran"
    template = "{{ cycler.__init__.__globals__.os.system('touch " + str(ran) + "') }}"
    for file in folder.glob("chat_template*"):
        file.write_text(template)
    d = load_denoiser(folder, device="cpu")
    assert "cycler" in d.tokenizer.chat_template
    with pytest.raises(jinja2.exceptions.SecurityError):
        d.encode("hi")
    assert not ran.exists()


# -------------------------------------------------- architectures that are refused

@pytest.mark.parametrize("field, value", [
    ("include_bias", True), ("include_qkv_bias", True), ("bias_for_layer_norm", True),
    ("attention_layer_norm", True), ("input_emb_norm", True), ("scale_logits", True),
    ("alibi", True), ("rope", False), ("block_type", "sequential"), ("block_group_size", 2),
    ("layer_norm_type", "gemma_rms"), ("layer_norm_with_affine", False),
    ("activation_type", "swiglu"), ("multi_query_attention", True)])
def test_a_llada_that_is_no_llama_is_refused_by_the_field_and_its_value(field, value):
    with pytest.raises(ValueError, match=f"{field}.*{value!r}"):
        llada_config(LLADA | {field: value})


@pytest.mark.parametrize("fields, message", [
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.*yarn"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.*dynamic"),
    ({"num_attention_heads": ...}, "num_attention_heads")])
def test_a_dream_that_is_no_plain_qwen2_is_refused(dream, fields, message):
    change(dream[0], **fields)
    with pytest.raises(ValueError, match=message):
        load_denoiser(dream[0], device="cpu")


def test_a_config_that_lacks_a_size_names_it(llada):
    change(llada[0], d_model=...)
    assert "d_model" in cannot_be_read(llada[0], device="cpu")


@pytest.mark.parametrize("kind", ["llada_moe", "sdar", "llada2_moe", "no_such_architecture"])
def test_an_unknown_architecture_is_refused_by_its_name(llada, kind):
    change(llada[0], model_type=kind)
    with pytest.raises(ValueError, match=kind):
        load_denoiser(llada[0], device="cpu")


def test_a_stock_model_with_sliding_windows_is_refused(tmp_path):
    tiny_stock(Qwen3ForCausalLM, Qwen3Config, use_sliding_window=True, sliding_window=4,
               max_window_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="sliding_attention"):
        load_denoiser(tmp_path, device="cpu", mask_id=2)


def test_a_stock_model_that_keeps_its_own_attention_is_refused(tmp_path):
    """Falcon does not take its attention from transformers' interface and would stay
    causal."""
    FalconForCausalLM(FalconConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        bos_token_id=None, eos_token_id=None)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"(?i)falcon.*attention|attention.*falcon"):
        load_denoiser(tmp_path, device="cpu", mask_id=2)


# -------------------------------------------------- weights and files that do not fit

DOWN = "model.transformer.blocks.1.ff_out.weight"


@pytest.mark.parametrize("edit, message", [
    (lambda w: w.pop(DOWN), "missing.*layers.1.mlp.down_proj.weight"),
    (lambda w: w.pop("model.transformer.ff_out.weight"), "missing.*lm_head.weight"),
    (lambda w: w.update({"model.transformer.wpe.weight": torch.ones(64, 32)}),
     "unexpected.*wpe.weight"),
    (lambda w: w.update({DOWN.replace("weight", "bias"): torch.ones(32)}),
     "unexpected.*down_proj.bias"),
    (lambda w: w.update({DOWN: torch.ones(32, 55)}),
     "mismatched.*layers.1.mlp.down_proj.weight"),
], ids=["missing", "missing head", "unexpected", "unexpected bias", "wrong shape"])
def test_weights_that_do_not_fit_are_named(llada, edit, message):
    folder, weights = llada
    edit(weights)
    write(folder, LLADA, weights)
    with pytest.raises(ValueError, match=message):
        load_denoiser(folder, device="cpu")


def cut_short(path, size):
    """Keep the first `size` bytes of a file; None: none of it, and no file."""
    if size is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("file", ["config.json", "model-00002-of-00003.safetensors",
                                  "model.safetensors.index.json"])
@pytest.mark.parametrize("size", [0, 7, None])
def test_a_file_that_is_cut_short_empty_or_missing_is_refused(llada, file, size):
    """What a killed download leaves."""
    cut_short(llada[0] / file, size)
    with pytest.raises(ValueError, match=re.escape(repr(str(llada[0])))):
        load_denoiser(llada[0], device="cpu")


def test_a_truncated_shard_is_refused(llada):
    shard = llada[0] / "model-00002-of-00003.safetensors"
    cut_short(shard, shard.stat().st_size - 100)
    cannot_be_read(llada[0], device="cpu")


@pytest.mark.parametrize("size", [0, 5000, None])
def test_half_a_tokenizer_is_a_warning(tmp_path, size):
    """Ids can still be decoded; texts cannot, and that error says so."""
    folder = copy_of_embedded(tmp_path)
    cut_short(folder / "tokenizer.json", size)
    with pytest.warns(UserWarning, match="no tokenizer"):
        d = load_denoiser(folder, device="cpu")
    assert sample_llada(d, IDS[:1, :2], gen_length=2).sequences.shape == (1, 4)
    for method, given in ((d.encode, "hi"), (d.decode, IDS)):
        with pytest.raises(ValueError, match="no tokenizer"):
            method(given)


def test_a_folder_that_cannot_be_written_is_read(tmp_path):
    folder = copy_of_embedded(tmp_path)
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path == folder else 0o444)
    before = sorted(p.name for p in folder.iterdir())
    assert load_denoiser(folder, device="cpu").tokenizer is not None
    assert sorted(p.name for p in folder.iterdir()) == before
    folder.chmod(0o755)


# -------------------------------------------------- the mask id

def test_without_a_mask_id_the_error_says_how_to_pass_one(dream):
    """CASES 32."""
    folder, _ = dream
    change(folder, mask_token_id=None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["mask_token"], config["added_tokens_decoder"]["282"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        '{"mask_token_id": null, "eos_token_id": 281}'
    )
    with pytest.raises(ValueError, match=r"mask_id is None.*mask_id="):
        load_denoiser(folder, device="cpu")
    assert load_denoiser(folder, device="cpu", mask_id=299).mask_id == 299


def test_a_mask_id_that_only_the_tokenizer_knows_is_found(llada):
    change(llada[0], mask_token_id=None)
    assert load_denoiser(llada[0], device="cpu").mask_id == 2


@pytest.mark.parametrize("mask_id", [126336, -1])
def test_a_mask_id_outside_the_embedding_is_refused(llada, mask_id):
    with pytest.raises(ValueError, match=rf"mask_id .*{mask_id}.* 48 embeddings"):
        load_denoiser(llada[0], device="cpu", mask_id=mask_id)


# -------------------------------------------------- when there is nothing to load

@pytest.mark.parametrize("name", ["/no/such/model", "a/b/c", "not a name", "",
                                  dlm_spec.__file__, "GSAI-ML/LLaDA-8B-Instruct"])
def test_a_name_where_nothing_is_says_what_to_do(name, tmp_path, no_network):
    cannot_be_read(name, local_files_only=True, cache_dir=tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        load_denoiser(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config" in cannot_be_read(tmp_path)


def test_the_embedded_model_is_missed_by_its_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(dlm_spec, "EMBEDDED_MODEL", tmp_path / "model")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "model"))):
        load_denoiser()


@pytest.mark.parametrize("device", [
    "mps", "gpu", pytest.param("cuda", marks=pytest.mark.skipif(
        torch.cuda.is_available(), reason="there is one"))])
def test_a_device_that_is_not_there_is_named(device):
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=f"device is '{device}'"):
        load_denoiser(device=device)


@pytest.fixture
def answer(monkeypatch):
    """A hub that gives everyone the same answer: `answer(status, code)`."""
    reply = SimpleNamespace(status=500, code=None)

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(reply.status)
            for key, value in (("X-Error-Code", reply.code), ("Content-Length", "0")):
                if value is not None:
                    self.send_header(key, value)
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(hub, "ENDPOINT", url)
    monkeypatch.setattr(hub, "HUGGINGFACE_CO_URL_TEMPLATE",
                        url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    yield lambda status, code=None: vars(reply).update(status=status, code=code)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("status, code, cause, said", [
    (403, "GatedRepo", "GatedRepoError", "gated"),
    (401, "GatedRepo", "GatedRepoError", "gated"),
    (404, "RepoNotFound", "RepositoryNotFoundError", "not a valid model identifier"),
    (404, "RevisionNotFound", "RevisionNotFoundError", "not a valid git identifier"),
    (403, None, "LocalEntryNotFoundError", "couldn't connect")],
    ids=["gated", "gated, no token", "missing or private", "no such revision", "refused"])
def test_what_the_hub_refuses_names_the_model_and_the_remedies(
    status, code, cause, said, answer, tmp_path
):
    answer(status, code)
    assert said in cannot_be_read(LLADA_NAME, cache_dir=tmp_path)
    with pytest.raises(ValueError) as e:
        load_denoiser(LLADA_NAME, cache_dir=tmp_path)
    assert type(e.value.__cause__.__cause__).__name__ == cause, "the stand-in is not the hub"


@pytest.fixture
def unreachable(monkeypatch):
    """A hub that nobody answers for; waiting between attempts fails the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(hub, "ENDPOINT", url)
    monkeypatch.setattr(hub, "HUGGINGFACE_CO_URL_TEMPLATE",
                        url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s"))


def test_a_hub_that_cannot_be_reached_is_not_waited_for(unreachable, tmp_path):
    """huggingface_hub would try six times, for 23 seconds and more."""
    assert "couldn't connect" in cannot_be_read(LLADA_NAME, cache_dir=tmp_path)


def test_what_was_downloaded_before_needs_no_hub(unreachable, tmp_path):
    cached(LLADA_NAME, tmp_path)
    assert load_denoiser(LLADA_NAME, device="cpu", cache_dir=tmp_path).mask_id == 2


def test_an_adapter_of_an_unreachable_hub_is_not_waited_for_either(llada, unreachable, tmp_path):
    with pytest.raises(ValueError, match="couldn't connect"):
        load_denoiser(llada[0], device="cpu", adapter="some/adapter", cache_dir=tmp_path)


def test_offline_a_missing_checkpoint_is_to_be_downloaded(tmp_path, monkeypatch, no_network):
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    cannot_be_read(LLADA_NAME, cache_dir=tmp_path)


@pytest.mark.parametrize("lost", ["model-00002-of-00003.safetensors",
                                  "model.safetensors.index.json"])
def test_a_half_downloaded_checkpoint_is_refused_by_its_name(lost, tmp_path, no_network):
    cached(LLADA_NAME, tmp_path)
    next(tmp_path.glob(f"models--*/snapshots/*/{lost}")).unlink()
    cannot_be_read(LLADA_NAME, cache_dir=tmp_path, local_files_only=True)


# -------------------------------------------------- text to ids and back

WORDS = ["<unk>", "<eos>", "<user>", "<bot>", "<sys>", "how", "many", "apples", "two", "are",
         "left", "<pad>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<user>' if m.role == 'user' else '<sys>' if m.role == 'system' else '<bot>' }} "
    "{{ m.content }} {% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def talker(template=TEMPLATE):
    """A denoiser with a word-level tokenizer of twelve words."""
    tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tok = PreTrainedTokenizerFast(tokenizer_object=tok, unk_token="<unk>", eos_token="<eos>",
                                  pad_token="<pad>")
    tok.chat_template = template
    return Denoiser(Table(torch.zeros(1, 1)), 20, eos_ids=(1,), pad_id=11, tokenizer=tok)


def words(ids, mask):
    """Rows as words, and nothing but padding outside the mask."""
    assert mask.dtype == torch.bool and ids.dtype == torch.long and (ids[~mask] == 11).all()
    return [
        " ".join(WORDS[t] for t in row[m].tolist()) for row, m in zip(ids, mask, strict=True)
    ]


def test_encode_takes_text_messages_and_lists_of_them():
    """A str becomes a user message; messages go through the template as they are; lists give
    one row each."""
    d = talker()
    chat = [{"role": "user", "content": "how many"}, {"role": "assistant", "content": "two"},
            {"role": "user", "content": "apples"}]
    talk = "<user> how many <bot> two <user> apples <bot>"
    assert words(*d.encode("how many apples")) == ["<user> how many apples <bot>"]
    assert words(*d.encode([{"role": "system", "content": "two apples"}, chat[0]])) == [
        "<sys> two apples <user> how many <bot>"]
    assert words(*d.encode(chat)) == [talk]
    assert words(*d.encode(["apples", "how many"])) == [
        "<user> apples <bot>", "<user> how many <bot>"]
    assert words(*d.encode([chat, chat[:1], "left"])) == [
        talk, "<user> how many <bot>", "<user> left <bot>"]
    assert words(*d.encode("how many", chat=False)) == ["how many"]
    assert words(*talker(template=None).encode("how many")) == ["how many"]


def test_options_of_the_chat_template_are_passed_on():
    """Its own, such as enable_thinking, and apply_chat_template's; what it does not have, or
    without a template, is refused: it would change nothing."""
    d = talker(TEMPLATE + "{% if enable_thinking %} left{% endif %}")
    assert words(*d.encode("apples", enable_thinking=True)) == ["<user> apples <bot> left"]
    assert words(*d.encode("apples", enable_thinking=False)) == ["<user> apples <bot>"]
    assert words(*d.encode("apples", add_generation_prompt=False)) == ["<user> apples"]
    for given in (dict(enable_thinkin=True), dict(chat=False, enable_thinking=True)):
        with pytest.raises(ValueError, match="the chat template has no enable_thinkin"):
            d.encode("apples", **given)
    with pytest.raises(ValueError, match="the chat template has no enable_thinking"):
        talker(template=None).encode("apples", enable_thinking=True)


def test_encode_and_pad_left_pad_on_the_left():
    """Rows of 3 and 5 tokens end in the same column."""
    ids, mask = talker().encode(["apples", "how many are"])
    assert ids.shape == (2, 5) and mask.tolist() == [
        [False, False, True, True, True],
        [True] * 5,
    ]
    assert ids[:, -1].tolist() == [3, 3]
    ids, mask = pad_left([[1], [2, 3], []], 9)
    assert ids.tolist() == [[9, 1], [2, 3], [9, 9]]
    assert mask.tolist() == [[False, True], [True, True], [False, False]]


def test_encode_warns_of_unknown_words():
    """The words that the model will not see are worth a warning that shows them; known
    ones are not."""
    with pytest.warns(UserWarning, match="does not know.*<unk>"):
        talker().encode(["how many", "how many pears"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        talker().encode("how many apples")


def test_decode_stops_at_the_first_eos():
    """Whatever the form of the rows; special tokens are not text."""
    d = talker()
    assert d.decode(torch.tensor([[5, 6, 1, 7], [5, 11, 7, 8], [1, 5, 6, 7]])) == [
        "how many", "how apples two", ""]
    assert d.decode([[1, 1, 5, 6, 1]]) == [""]
    assert d.decode(torch.zeros(2, 0).long()) == ["", ""]
    assert d.decode([[5, 6], [7]]) == d.decode([torch.tensor([5, 6]), [7]]) == [
        "how many", "apples"]


@pytest.mark.parametrize("text", ["", [], ["apples", ""], [[]], None], ids=repr)
def test_empty_prompts_are_refused(text):
    """No text is an error, in a list too."""
    with pytest.raises(ValueError, match="empty"):
        talker().encode(text)
