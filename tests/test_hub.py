"""Checkpoints as the hub hands them out: sharded, in bf16, under the published ids, from a local
cache without a network; and what is said when the hub gives nothing. Its answers come from a server
in this process, so huggingface_hub raises what it raises in life."""
import http.server
import shutil
import socket
import threading
from types import SimpleNamespace

import huggingface_hub.constants as hub
import pytest
import torch
from test_loading import (
    DREAM,
    DREAM_ROLES,
    IDS,
    LLADA,
    dream_logits,
    dream_shapes,
    full_logits,
    llada_logits,
    llada_shapes,
    random_weights,
    shapes,
    write,
    write_dream_tokenizer,
    write_tokenizer,
)
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from dlm_spec import Denoiser, dream_config, load_denoiser

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LLADAS = ("GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-1.5")
DREAMS = ("Dream-org/Dream-v0-Base-7B", "Dream-org/Dream-v0-Instruct-7B",
          "Dream-org/Dream-Coder-v0-Instruct-7B", "apple/DiffuCoder-7B-cpGRPO")


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def no_network(monkeypatch):
    """Whoever opens a connection fails the test."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was opened"))


def checkpoint(name, folder, dtype=torch.bfloat16):
    """A tiny checkpoint of the family that `name` belongs to, in its own layout; its weights."""
    c = LLADA if name in LLADAS else DREAM | {"sliding_window": 4}       # there, but not in use
    named = llada_shapes(c) if name in LLADAS else dream_shapes(c)
    weights = {k: w.to(dtype) for k, w in random_weights(named).items()}
    write(folder, c | {"torch_dtype": "bfloat16"}, weights)
    (write_tokenizer if name in LLADAS else write_dream_tokenizer)(folder)
    return weights


def cached(name, cache, **kw):
    """The same in a cache as huggingface_hub lays it out: blobs, and a snapshot that links to
    them."""
    repo = cache / ("models--" + name.replace("/", "--"))
    weights = checkpoint(name, cache / "made", **kw)
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
    size = dict(hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4)
    if name in LLADAS:
        weights = dict(zip(shapes(DREAM_ROLES, 32, 56, 2, 4, 4, 48), weights.values()))
        config = LlamaConfig(
            vocab_size=48, num_key_value_heads=4, rms_norm_eps=1e-5, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, **size)
    else:
        config = Qwen2Config(
            vocab_size=300, num_key_value_heads=2, rms_norm_eps=1e-6, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, **size)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(weights)
    return Denoiser(model, 2)


@pytest.mark.parametrize("name", LLADAS + DREAMS)
@pytest.mark.parametrize("source", ["folder", "cache", "revision"])
def test_a_sharded_bf16_checkpoint_gives_its_stock_models_logits(name, source, tmp_path,
                                                                 no_network):
    if source == "folder":
        weights, where = checkpoint(name, tmp_path / "it"), dict(name_or_path=tmp_path / "it")
    else:
        weights = cached(name, tmp_path)
        where = dict(name_or_path=name, cache_dir=tmp_path, local_files_only=True)
    if source == "revision":
        where["revision"] = COMMIT
    denoiser = load_denoiser(**where, device="cpu", dtype=torch.bfloat16)
    assert torch.equal(full_logits(denoiser, IDS), full_logits(stock(name, weights), IDS))
    assert denoiser.shift == (name in DREAMS)
    assert (denoiser.mask_id, denoiser.n_tokens) == ((2, 38) if name in LLADAS else (282, 284))


@pytest.mark.parametrize("name", [LLADAS[-1], DREAMS[-1]])
def test_bf16_files_are_computed_in_float32_where_nothing_is_said(name, tmp_path):
    weights = {k: w.float() for k, w in checkpoint(name, tmp_path).items()}
    denoiser = load_denoiser(tmp_path, device="cpu")
    want = (llada_logits if name in LLADAS else dream_logits)(weights, IDS)
    assert denoiser.model.dtype == torch.float32
    assert (full_logits(denoiser, IDS) - want).abs().max() < 1e-5


def test_offline_the_default_cache_is_enough(tmp_path, monkeypatch, no_network):
    """What HF_HOME=... HF_HUB_OFFLINE=1 set."""
    weights = cached(LLADAS[1], tmp_path)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    denoiser = load_denoiser(LLADAS[1], device="cpu", dtype="bfloat16")
    assert torch.equal(full_logits(denoiser, IDS), full_logits(stock(LLADAS[1], weights), IDS))
    assert denoiser.tokenizer is not None


@pytest.mark.parametrize("name", [LLADAS[1], DREAMS[1]])
def test_the_published_ids_fit_the_published_vocabulary(name, tmp_path, recwarn):
    """Full vocabulary, narrow model: M, the end of text and the padding are where the authors say;
    the ids beyond are never predicted."""
    if name in LLADAS:
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
        (126336, (126081,), 126081) if name in LLADAS else (151666, (151643,), 151643))
    ids = torch.tensor([[5, d.mask_id, d.mask_id]])
    assert d.n_embeddings == c["vocab_size"]
    assert d(ids, ids == d.mask_id).argmax(-1).ne(d.mask_id).all()


def test_a_sliding_window_that_is_switched_off_is_none():
    """Qwen2.5's configs, which Dream's continue, name a window and do not use it."""
    assert set(dream_config(DREAM | {"sliding_window": 131072}).layer_types) == {"full_attention"}


# -------------------------------------------------- when the hub gives nothing

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
def test_what_the_hub_refuses_names_the_model_and_the_remedies(status, code, cause, said, answer,
                                                               tmp_path):
    answer(status, code)
    with pytest.raises(ValueError, match="no checkpoint at 'GSAI-ML/LLaDA-8B-Instruct'") as e:
        load_denoiser("GSAI-ML/LLaDA-8B-Instruct", cache_dir=tmp_path)
    text = str(e.value)
    for remedy in ("check the name", "licence accepted on its page", "`hf auth login` or token=",
                   "download the checkpoint beforehand and give its folder", said):
        assert remedy in text
    assert type(e.value.__cause__.__cause__).__name__ == cause, "the stand-in is not the hub"


@pytest.mark.parametrize("how", ["local_files_only", "offline"])
def test_without_a_network_a_missing_checkpoint_is_to_be_downloaded(how, tmp_path, monkeypatch,
                                                                    no_network):
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", how == "offline")
    with pytest.raises(ValueError, match=r"no checkpoint at 'GSAI-ML/LLaDA-1\.5'.*without a "
                                         r"network, download the checkpoint beforehand") as e:
        load_denoiser("GSAI-ML/LLaDA-1.5", cache_dir=tmp_path,
                      **{"local_files_only": True} if how == "local_files_only" else {})
    assert type(e.value.__cause__.__cause__).__name__ == "LocalEntryNotFoundError"


@pytest.mark.parametrize("lost", ["model-00002-of-00003.safetensors",
                                  "model.safetensors.index.json"])
def test_a_half_downloaded_checkpoint_is_refused_by_its_name(lost, tmp_path, no_network):
    cached(LLADAS[0], tmp_path)
    next(tmp_path.glob(f"models--*/snapshots/*/{lost}")).unlink()
    with pytest.raises(ValueError, match=f"the weights of '{LLADAS[0]}' cannot be read: "
                                         "safetensors files are needed, all of them and whole"):
        load_denoiser(LLADAS[0], cache_dir=tmp_path, local_files_only=True)
