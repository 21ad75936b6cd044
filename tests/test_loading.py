"""Loading (section 3): checkpoints are built here in their original names and files,
and opened by load_denoiser."""
import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import dlm_spec
from dlm_spec import LLADA_NAMES, Denoiser, dream_config, llada_config, load_denoiser, sample_llada

LLADA = {   # the fields of LLaDA-8B's config.json, with small numbers
    "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"], "attention_dropout": 0.0, "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "auto_map": {"AutoConfig": "remote.Config", "AutoModel": "remote.Model",
                 "AutoModelForCausalLM": "remote.Model"},
    "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama", "d_model": 32,
    "embedding_dropout": 0.0, "embedding_size": 48, "eos_token_id": 1, "flash_attention": False,
    "include_bias": False, "include_qkv_bias": False, "init_cutoff_factor": None,
    "init_device": "meta", "init_fn": "mitchell", "init_std": 0.02, "input_emb_norm": False,
    "layer_norm_type": "rms", "layer_norm_with_affine": True, "mask_token_id": 2,
    "max_sequence_length": 64, "mlp_hidden_size": 56, "mlp_ratio": 4, "model_type": "llada",
    "multi_query_attention": None, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2, "pad_token_id": 1,
    "precision": "amp_bf16", "residual_dropout": 0.0, "rms_norm_eps": 1e-05,
    "rope": True, "rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False,
    "transformers_version": "4.46.3", "use_cache": False, "vocab_size": 40, "weight_tying": False,
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
        out |= {f"{r['layer'].format(i)}{r[role]}.weight": shape for role, shape in block.items()}
        if qkv_bias:
            out |= {f"{r['layer'].format(i)}{r[role]}.bias": block[role][:1] for role in "qkv"}
    return out


def llada_shapes(c):
    return shapes(LLADA_ROLES, c["d_model"], c["mlp_hidden_size"], c["n_layers"], c["n_heads"],
                  c["n_kv_heads"], c["embedding_size"], tied=c["weight_tying"])


def dream_shapes(c):
    return shapes(DREAM_ROLES, c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"],
                  c["num_attention_heads"], c["num_key_value_heads"], c["vocab_size"],
                  qkv_bias=True)


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
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
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
        "added_tokens_decoder": added, "auto_map": {"AutoTokenizer": ["remote.Tokenizer", None]},
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
        # channels i and i + d/2 are the two coordinates of a point, turned by position * frequency
        d = y.shape[-1]
        angle = torch.arange(L)[:, None] * theta ** (-torch.arange(0, d, 2) / d)
        a, b = y[..., :d // 2], y[..., d // 2:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def split(y, n):
        return y.view(B, L, n, -1).transpose(1, 2).repeat_interleave(heads // n, 1)

    h = w[r["embed"] + ".weight"][ids]
    for i in range(layers):
        at = {k: r["layer"].format(i) + v for k, v in r.items()}
        y = norm(h, at["norm1"])
        q, k, v = (split(linear(y, at[role]), heads if role == "q" else kv_heads) for role in "qkv")
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


# -------------------------------------------------- LLaDA

@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_llada_in_its_own_names_computes_what_its_architecture_says(tmp_path, kv_heads):
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
    """Both have the same shape, so the swap loads without a complaint; only the logits tell."""
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
    """The tokenizer has 38 tokens, vocab_size says 40, the embedding has 48 rows:
    ids from 38 on are padding."""
    folder, weights = llada
    weights["model.transformer.ff_out.weight"][38:] *= 50  # left alone, these would win everywhere
    write(folder, LLADA, weights)
    denoiser = load_denoiser(folder, device="cpu")
    assert denoiser.n_tokens == 38
    assert (llada_logits(weights, IDS).argmax(-1) >= 38).float().mean() > .5
    assert denoiser(IDS, torch.ones_like(IDS, dtype=torch.bool)).argmax(-1).max() < 38
    assert sample_llada(denoiser, IDS[:, :4], gen_length=8, steps=4).sequences.max() < 38


def test_without_a_tokenizer_vocab_size_bounds_the_ids_and_a_warning_says_so(tmp_path):
    folder = write(tmp_path / "llada", LLADA, random_weights(llada_shapes(LLADA)))
    with pytest.warns(UserWarning, match="no tokenizer could be opened"):
        denoiser = load_denoiser(folder, device="cpu")
    assert denoiser.tokenizer is None and denoiser.n_tokens == 40 and denoiser.mask_id == 2


def test_llada_with_tied_weights(tmp_path):
    c = LLADA | {"weight_tying": True}
    weights = random_weights(llada_shapes(c))
    folder = write(tmp_path / "llada", c, weights)
    write_tokenizer(folder)
    assert (full_logits(load_denoiser(folder, device="cpu"), IDS)
            - llada_logits(weights, IDS)).abs().max() < 1e-5


def test_llada_without_mlp_hidden_size_takes_mlp_ratio(tmp_path):
    weights = random_weights(llada_shapes(LLADA | {"mlp_hidden_size": 4 * 32}))
    folder = write(tmp_path / "llada", LLADA | {"mlp_hidden_size": None}, weights)
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


def test_dream_biases_matter(dream):
    """They are in the file, so strictness alone proves that they were read;
    this proves that they are used."""
    folder, weights = dream
    bare = {k: torch.zeros_like(v) if k.endswith("bias") else v for k, v in weights.items()}
    assert (full_logits(load_denoiser(folder, device="cpu"), IDS)
            - dream_logits(bare, IDS)).abs().max() > .1


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


def test_diffucoder_s_filler_after_a_text_ends_it(dream):
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
    """transformers 5 makes a tokenizer of one token from an empty folder:
    every id would count as padding."""
    folder, _ = dream
    for file in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (folder / file).unlink()
    denoiser = load_denoiser(folder, device="cpu")
    assert denoiser.tokenizer is None and denoiser.n_tokens == 300 and denoiser.mask_id == 282


# -------------------------------------------------- stock layouts, and saving in one

def tiny_stock(model_class, config_class, **kw):
    torch.manual_seed(0)
    return model_class(config_class(
        vocab_size=48, hidden_size=32, intermediate_size=56, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=.3,
        bos_token_id=None, eos_token_id=1, pad_token_id=1, **kw))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("classes", [(LlamaForCausalLM, LlamaConfig),
                                     (Qwen3ForCausalLM, Qwen3Config)],
                         ids=["llama", "qwen3"])
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
def test_saved_again_a_checkpoint_has_the_stock_layout_and_loads_the_same(kind, request, tmp_path):
    """A Dream that has become a qwen2 folder must still be read shifted."""
    first = load_denoiser(request.getfixturevalue(kind)[0], device="cpu")
    first.model.save_pretrained(tmp_path / "again")
    first.tokenizer.save_pretrained(tmp_path / "again")
    again = load_denoiser(tmp_path / "again", device="cpu")
    assert "model.embed_tokens.weight" in load_file(tmp_path / "again" / "model.safetensors")
    assert torch.equal(full_logits(first, IDS), full_logits(again, IDS))
    for field in ("mask_id", "eos_ids", "pad_id", "n_tokens", "shift"):
        assert getattr(first, field) == getattr(again, field), field


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
        ours = [re.sub(p, to, name) for p, to in LLADA_NAMES.items() if re.search(p, name)]
        assert len(ours) == 1 and ours[0] not in mapped, (name, ours)
        mapped[ours[0]] = shape
    assert mapped == stock and len(mapped) == 3 + 32 * 9


def test_every_tensor_of_dream_7b_has_its_place():
    c = DREAM | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                 "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
                 "max_position_embeddings": 131072}
    with torch.device("meta"):
        stock = {k: tuple(v.shape)
                 for k, v in Qwen2ForCausalLM(dream_config(c)).state_dict().items()}
    assert dream_shapes(c) == stock and len(stock) == 3 + 28 * 12


# -------------------------------------------------- no code of a checkpoint runs

@pytest.mark.parametrize("kind", ["llada", "dream", "stock"])
def test_no_code_of_the_folder_runs(kind, request, tmp_path, monkeypatch):
    """Neither the classes that auto_map names, nor custom_generate/generate.py,
    which transformers 4.57 would run."""
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
    with pytest.raises(ValueError, match="trust_remote_code=True was given, "
                                         "but no code of a checkpoint is ever run"):
        load_denoiser(llada[0], trust_remote_code=True)
    load_denoiser(llada[0], device="cpu", trust_remote_code=False)


# -------------------------------------------------- refusals

@pytest.mark.parametrize("field, value", [
    ("include_bias", True), ("include_qkv_bias", True), ("bias_for_layer_norm", True),
    ("attention_layer_norm", True), ("input_emb_norm", True), ("scale_logits", True),
    ("alibi", True), ("rope", False), ("block_type", "sequential"), ("block_group_size", 2),
    ("layer_norm_type", "gemma_rms"), ("layer_norm_with_affine", False),
    ("activation_type", "swiglu"), ("multi_query_attention", True)])
def test_a_llada_that_is_no_llama_is_refused_by_the_field_and_its_value(llada, field, value):
    change(llada[0], **{field: value})
    with pytest.raises(ValueError, match=re.escape(f"{field}={value!r}")):
        load_denoiser(llada[0], device="cpu")


@pytest.mark.parametrize("fields, message", [
    ({"use_sliding_window": True}, "use_sliding_window=True"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling=.*yarn"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling=.*dynamic"),
    ({"num_attention_heads": ...}, "lacks num_attention_heads")])
def test_a_dream_that_is_no_plain_qwen2_is_refused(dream, fields, message):
    change(dream[0], **fields)
    with pytest.raises(ValueError, match=message):
        load_denoiser(dream[0], device="cpu")


def test_a_config_that_lacks_a_size_names_it(llada):
    change(llada[0], d_model=..., n_layers=...)
    with pytest.raises(ValueError, match="lacks d_model, n_layers"):
        load_denoiser(llada[0], device="cpu")


DOWN = "model.transformer.blocks.1.ff_out.weight"


@pytest.mark.parametrize("edit, message", [
    (lambda w: w.pop(DOWN), "missing_keys.*layers.1.mlp.down_proj.weight"),
    (lambda w: w.pop("model.transformer.ff_out.weight"), "missing_keys.*lm_head.weight"),
    (lambda w: w.update({"model.transformer.wpe.weight": torch.ones(64, 32)}),
     "unexpected_keys.*wpe.weight"),
    (lambda w: w.update({DOWN.replace("weight", "bias"): torch.ones(32)}),
     "unexpected_keys.*down_proj.bias"),
    (lambda w: w.update({DOWN: torch.ones(32, 55)}),
     "mismatched_keys.*layers.1.mlp.down_proj.weight"),
], ids=["missing", "missing head", "unexpected", "unexpected bias", "wrong shape"])
def test_weights_that_do_not_fit_are_named(llada, edit, message):
    folder, weights = llada
    edit(weights)
    write(folder, LLADA, weights)
    with pytest.raises(ValueError, match=message):
        load_denoiser(folder, device="cpu")


def test_a_lost_or_truncated_shard_is_refused(llada):
    shard = llada[0] / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match="safetensors files are needed, all of them and whole"):
        load_denoiser(llada[0], device="cpu")
    shard.unlink()
    with pytest.raises(ValueError, match="safetensors files are needed, all of them and whole"):
        load_denoiser(llada[0], device="cpu")


def test_pickled_weights_are_not_opened(llada):
    folder, weights = llada
    for file in folder.glob("model*"):
        file.unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, can run code and are not opened"):
        load_denoiser(folder, device="cpu")


def test_without_a_mask_id_the_error_says_how_to_pass_one(dream):
    folder, _ = dream
    change(folder, mask_token_id=None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["mask_token"], config["added_tokens_decoder"]["282"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"mask_token_id": null, "eos_token_id": 281}')
    with pytest.raises(ValueError, match=r"mask_id is None.*mask_id="):
        load_denoiser(folder, device="cpu")
    assert load_denoiser(folder, device="cpu", mask_id=299).mask_id == 299


def test_a_mask_id_that_only_the_tokenizer_knows_is_found(llada):
    change(llada[0], mask_token_id=None)
    assert load_denoiser(llada[0], device="cpu").mask_id == 2


def test_a_mask_id_outside_the_embedding_is_refused(llada):
    with pytest.raises(ValueError, match=r"mask_id is 126336, but the model has 48 embeddings"):
        load_denoiser(llada[0], device="cpu", mask_id=126336)


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "a/b/c"])
def test_a_missing_folder_is_called_that(name):
    with pytest.raises(ValueError, match=f"no model folder '{re.escape(name)}'"):
        load_denoiser(name)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        load_denoiser(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json|JSON"):
        load_denoiser(tmp_path)


@pytest.mark.parametrize("name", ["GSAI-ML/LLaDA-8B-Instruct", "no-such-model", "not a name"])
def test_a_hub_id_that_cannot_be_reached_says_what_to_do(name, tmp_path):
    with pytest.raises(ValueError, match=f"no checkpoint at '{name}'.*without a network, "
                                         "download the checkpoint"):
        load_denoiser(name, local_files_only=True, cache_dir=tmp_path)


@pytest.mark.parametrize("kind", ["llada_moe", "bert_of_nowhere", ...], ids=str)
def test_an_unknown_architecture_is_refused_by_its_name(llada, kind):
    change(llada[0], model_type=kind)
    with pytest.raises(ValueError,
                       match=f"model_type {None if kind is ... else kind!r} .*never run"):
        load_denoiser(llada[0], device="cpu")


def test_a_stock_model_with_sliding_windows_is_refused(tmp_path):
    tiny_stock(Qwen3ForCausalLM, Qwen3Config, use_sliding_window=True, sliding_window=4,
               max_window_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="sliding_attention"):
        load_denoiser(tmp_path, device="cpu", mask_id=2)


# -------------------------------------------------- what is passed on to from_pretrained

@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None,
                    reason="device_map needs accelerate")
@pytest.mark.parametrize("where", ["cpu", {"": "cpu"}, "auto"], ids=str)
def test_device_map_is_passed_on_with_the_renaming(llada, where):
    folder, weights = llada
    denoiser = load_denoiser(folder, device_map=where, dtype=torch.float32)
    ids = IDS.to(denoiser.device)
    assert (full_logits(denoiser, ids).cpu() - llada_logits(weights, IDS)).abs().max() < 1e-4


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None,
                    reason="device_map needs accelerate")
def test_a_device_map_to_the_cpu_means_float32(llada):
    assert load_denoiser(llada[0], device_map="cpu").model.dtype == torch.float32


def test_a_subfolder_is_passed_on(llada):
    folder, weights = llada
    denoiser = load_denoiser(folder.parent, subfolder=folder.name, device="cpu")
    assert denoiser.n_tokens == 38
    assert (full_logits(denoiser, IDS) - llada_logits(weights, IDS)).abs().max() < 1e-5


@pytest.mark.parametrize("given, message", [
    ({"device": "cpu", "device_map": "cpu"}, "device='cpu' was given with device_map"),
    ({"key_mapping": {}}, "key_mapping was given"),
    ({"use_safetensors": False}, "use_safetensors was given"),
    ({"torch_dtype": torch.bfloat16}, "say dtype")],
    ids=["two devices", "key_mapping", "pickle", "torch_dtype"])
def test_an_option_that_would_mean_nothing_is_refused(llada, given, message):
    with pytest.raises(ValueError, match=message):
        load_denoiser(llada[0], **given)


def test_the_embedded_model_is_missed_by_name(monkeypatch):
    monkeypatch.setattr(dlm_spec, "EMBEDDED_MODEL", Path("/no/such/model"))
    with pytest.raises(ValueError, match="the embedded model is missing from '/no/such/model'"):
        load_denoiser()
