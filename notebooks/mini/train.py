# SPDX-License-Identifier: MIT
"""Train the embedded model: a masked-diffusion Llama on the three families of tasks.py.

    python notebooks/mini/train.py --minutes 110    # from scratch, or on from the last checkpoint
    python notebooks/mini/train.py --init notebooks/mini/model --lr 1e-3   # on from a model folder

Every few minutes, and on Ctrl-C, it writes the state of the run (run/last.pt; the log is
run/log.jsonl) and the model folder that `load_denoiser()` opens (config.json,
model.safetensors in bf16, tokenizer.json), with the running average of the weights. Files are
replaced when they are whole.
"""
import argparse
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import tasks

from dlm_spec import mdlm_loss

# A word, a number, a line break with its indentation, or one sign; white space else falls
# away.
PIECES = Regex(r'"[^"\n]*"|\n *|default=0|[A-Za-z_]+|\d+|####|->|==|\+=|-=|\*=|\.[a-z]+|\[::-1\]|'
               r'[^\sA-Za-z\d_]')
SPECIAL = ("<|pad|>", "<|eos|>", "<|mask|>", "<|unk|>", "<|user|>", "<|assistant|>")
TEMPLATE = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
            "{% if m['role'] == 'assistant' %}<|eos|>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def build_tokenizer():
    """A word-level tokenizer over everything tasks.py can say; decode(encode(text)) ==
    text."""
    pieces = pre_tokenizers.Split(PIECES, "removed", invert=True)
    words = {str(n) for n in range(100)}
    for family in tasks.FAMILIES:
        for p in tasks.problems(family, "train", 20_000, seed=1):
            words.update(w for text in (p.prompt, p.answer)
                         for w, _ in pieces.pre_tokenize_str(text))
    vocab = {w: i for i, w in enumerate(SPECIAL + tuple(sorted(words)))}
    tok = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    tok.add_special_tokens([AddedToken(s, normalized=False) for s in SPECIAL])
    tok.pre_tokenizer = pieces
    # Join with spaces, then take back the spaces that neither English nor Python writes.
    tok.decoder = decoders.Sequence([
        decoders.WordPiece(prefix="\0", cleanup=False), decoders.Fuse(),
        decoders.Replace(" \n", "\n"), decoders.Replace("\n ", "\n"),
        decoders.Replace(Regex(r" (?=[.,;?:)\]])"), ""),
        decoders.Replace(Regex(r"(?<=[(\[]) "), ""),
        decoders.Replace(Regex(r"(?<=[a-z])(?<!return) (?=\()"), ""),
        decoders.Replace(Regex(r" (?=\[(:|\d+ ?:))"), ""),
        decoders.Replace(Regex(r"(?<=:) (?=\d+\])"), "")])
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="<|pad|>", eos_token="<|eos|>",
                                   mask_token="<|mask|>", unk_token="<|unk|>",
                                   chat_template=TEMPLATE, padding_side="left",
                                   clean_up_tokenization_spaces=False)


def batches(tokenizer, size, seed, mix, skip=0, letters=0.5, hide=1.0, questions=""):
    """Endless training batches (x, answer, attention_mask), each (size, L), of one family
    each.

    Problems come in pools that are sorted by prompt length, so that little is padded: prompts
    on the left, and answers by EOS up to a canvas length drawn per batch (decoding must work
    on all). One family per batch, and in a share `letters` of the batches of multiple choice
    only the letter is to be learned (of the rest up to a share `hide` is hidden): in a loss
    averaged over tokens that one token drowns, and the model names the right option and a
    letter at random. `questions`: a regular expression, multiple choice is then limited to
    questions that begin like it.
    """
    pool_number, weights = 0, [mix[f] for f in tasks.FAMILIES]
    counts = [round(32 * w / sum(weights)) for w in weights]        # batches per pool
    user, assistant, eos, pad, said = (
        tokenizer.convert_tokens_to_ids(s)
        for s in ("<|user|>", "<|assistant|>", "<|eos|>", "<|pad|>", "Answer"))
    while True:
        rng = random.Random(f"{seed}/{pool_number}")
        pool_number += 1
        if skip >= sum(counts):        # resumed: these batches were seen
            skip -= sum(counts)
            continue
        chunks = []
        for family, n in zip(tasks.FAMILIES, counts):
            probs = tasks.problems(family, "train", n * size * (4 if questions else 1),
                                   seed=f"{seed}/{pool_number}")
            if family == "choice":
                probs = [p for p in probs if re.match(questions, p.prompt)][:n * size]
            prompts, answers = (tokenizer(texts, add_special_tokens=False)["input_ids"] if texts
                                else [] for texts in ([p.prompt for p in probs],
                                                      [p.answer for p in probs]))
            rows = [([user] + p + [assistant], a + [eos]) for p, a in zip(prompts, answers)]
            rng.shuffle(rows)
            rows.sort(key=lambda r: len(r[0]) // 8)
            chunks += [rows[i:i + size] for i in range(0, len(rows), size)]
        rng.shuffle(chunks)
        for i, chunk in enumerate(chunks):
            P, G = max(len(p) for p, _ in chunk), max(len(a) for _, a in chunk)
            coin = torch.Generator().manual_seed(rng.getrandbits(32))
            G = (G + rng.choice((0, 2, 4, 8)) if rng.random() < .75
                 else max(G, rng.choice((48, 64, 64))))
            if i < skip:
                continue
            x = torch.tensor([[pad] * (P - len(p)) + p + a + [eos] * (G - len(a))
                              for p, a in chunk])
            real = torch.tensor([[0] * (P - len(p)) + [1] * (len(p) + G) for p, _ in chunk])
            answer = (torch.arange(P + G) >= P).expand(x.shape)
            letter = F.pad(answer & (x == said), (2, 0))[:, :-2]
            if letter.any(1).all() and torch.rand((), generator=coin) < letters:
                t = hide * torch.rand(len(x), 1, generator=coin)
                hidden = answer & ~letter & (torch.rand(x.shape, generator=coin) < t)
                x, answer = x.masked_fill(hidden, tokenizer.mask_token_id), letter
            yield x, answer, real
        skip = 0


def save_atomically(write, path):
    """`write(tmp)`, then rename: a crash or a full disk never leaves half a file at `path`."""
    tmp = path.with_name(path.name + ".tmp")
    try:
        write(tmp)
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def save_model(model, weights, tokenizer, folder):
    """The folder `load_denoiser` opens; weights in bf16, the tied head left out."""
    tensors = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in weights.items()
               if k != "lm_head.weight"}
    model.config.dtype = "bfloat16"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as new:    # all are whole before one is replaced
        model.config.save_pretrained(new)
        tokenizer.save_pretrained(new)
        save_file(tensors, Path(new, "model.safetensors"), {"format": "pt"})
        for path in Path(new).iterdir():
            os.replace(path, folder / path.name)


def forget_after(log, step):
    """Drop the lines of a log that were written after the state that a run goes on from."""
    if log.exists():
        kept = [line for line in log.read_text().splitlines(keepends=True)
                if line.endswith("\n") and json.loads(line)["step"] <= step]
        save_atomically(lambda tmp: tmp.write_text("".join(kept)), log)


def optimizers(model, lr):
    """Muon for the matrices of the layers (at 2 x lr), AdamW for the embedding and the norms.

    The weight decay matters: without it Muon lets the weights grow until attention saturates,
    and the model never learns to copy numbers out of the problem.
    """
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    return [torch.optim.Muon(matrices, lr=2 * lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=lr, weight_decay=0.0, betas=(0.9, 0.98))]


@torch.no_grad()
def start_as_neighbour_heads(layer, offsets=(-2, -1, 1, 2)):
    """Let the heads of a layer start out looking at the tokens at these offsets.

    Nothing in the loss asks a prompt token to know its neighbours, so a model this small does
    not find out which letter stands before an option in hours (it named the right option at
    100 % and its letter at chance). The biases of q and k do it: with the rotary embedding
    their score depends on the offset alone, and is largest at the wanted one.
    """
    attention, d = layer.self_attn, layer.self_attn.head_dim
    angle = 10_000.0 ** (-torch.arange(0, d, 2) / d)
    for name in ("q_proj", "k_proj"):
        getattr(attention, name).weight.mul_(0.1)
    for h, offset in enumerate(offsets[:attention.config.num_attention_heads]):
        turned = torch.cat([(angle * offset).cos(), (angle * offset).sin()])
        attention.k_proj.bias[h * d:(h + 1) * d] = 6 * torch.cat([torch.ones(d // 2),
                                                                  torch.zeros(d // 2)])
        attention.q_proj.bias[h * d:(h + 1) * d] = 6 * turned


def main():
    cli = argparse.ArgumentParser(description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--minutes", type=float, default=110,
                     help="training time in all, resumed runs included")
    cli.add_argument("--steps", type=int, help="steps in all, instead of --minutes")
    cli.add_argument("--batch", type=int, default=128)
    cli.add_argument("--lr", type=float, default=3e-3)
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--hidden", type=int, default=192)
    cli.add_argument("--layers", type=int, default=7)
    cli.add_argument("--mix", default="math=1,choice=1,code=.5",
                     help="share of each family among the batches")
    cli.add_argument("--letters", type=float, default=0.5,
                     help="share of the batches of multiple choice that teach the letter alone")
    cli.add_argument("--hide", type=float, default=1.0,
                     help="the largest share of the rest that these batches hide")
    cli.add_argument("--questions", default="",
                     help="multiple choice only with questions that begin like this regex")
    cli.add_argument("--run", type=Path, default=HERE / "run", help="state and log of the run")
    cli.add_argument("--out", type=Path, default=HERE / "model", help="the model folder to write")
    cli.add_argument("--init", type=Path, help="a model folder whose weights to start from")
    cli.add_argument("--save-every", type=float, default=5, help="minutes between checkpoints")
    args = cli.parse_args()
    if args.hidden < 48 or args.hidden % 48:
        cli.error(f"--hidden is {args.hidden}, expected a multiple of 48, a head's size")

    torch.manual_seed(args.seed)
    tokenizer = (build_tokenizer() if args.init is None
                 else PreTrainedTokenizerFast.from_pretrained(args.init))
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=args.hidden,
                         num_hidden_layers=args.layers, num_attention_heads=args.hidden // 48,
                         num_key_value_heads=args.hidden // 48,
                         intermediate_size=args.hidden * 8 // 3, max_position_embeddings=4096,
                         attention_bias=True, tie_word_embeddings=True,
                         mask_token_id=tokenizer.mask_token_id,
                         eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
                         bos_token_id=None, is_causal=False, shift_logits=False,
                         trained_gen_length=64)     # the longest canvas of `batches`
    model = LlamaForCausalLM(config)
    start_as_neighbour_heads(model.model.layers[0])
    model.set_attn_implementation("dlm_spec")
    if args.init is not None:
        given = load_file(args.init / "model.safetensors")
        model.load_state_dict({k: given.get(k, given["model.embed_tokens.weight"]).float()
                               for k in model.state_dict()})
    average = {k: v.clone() for k, v in model.state_dict().items()}
    opts = optimizers(model, args.lr)
    generator = torch.Generator().manual_seed(args.seed)
    step, spent, losses, state_file = 0, 0.0, [], args.run / "last.pt"
    args.run.mkdir(parents=True, exist_ok=True)
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        average, step, spent = state["average"], state["step"], state["spent"]
        losses = state.get("losses", [])
        generator.set_state(state["generator"])
        for opt, s in zip(opts, state["opts"]):
            opt.load_state_dict(s)
        print(f"resumed at step {step}, {spent / 60:.1f} minutes in")

    def save():
        save_atomically(lambda tmp: torch.save(dict(
            model=model.state_dict(), average=average, step=step, spent=spent, losses=losses,
            generator=generator.get_state(),
            opts=[opt.state_dict() for opt in opts]), tmp), state_file)
        save_model(model, average, tokenizer, args.out)

    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} words")
    mix = {k: float(v) for k, v in (item.split("=") for item in args.mix.split(","))}
    fast, total, saved = torch.compile(model, dynamic=True), args.minutes * 60, spent
    forget_after(args.run / "log.jsonl", step)
    interrupted = []                    # Ctrl-C ends the step and saves; a second one ends at once

    def interrupt(*_):
        interrupted.append(signal.signal(signal.SIGINT, before))
    before = signal.signal(signal.SIGINT, interrupt)
    bar = tqdm(total=None if args.steps else round(total), initial=round(spent), unit="s",
               mininterval=5)
    clock = time.monotonic()
    with open(args.run / "log.jsonl", "a") as log, sdpa_kernel(SDPBackend.MATH):
        for x, answer, real in batches(tokenizer, args.batch, args.seed, mix, step, args.letters,
                                       args.hide, args.questions):
            done = min(step / args.steps if args.steps else spent / total, 1.0)
            lr = (args.lr * min(1, (step + 1) / 200)
                  * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2))
            for opt, factor in zip(opts, (2, 1)):
                for group in opt.param_groups:
                    group["lr"] = lr * factor
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mdlm_loss(fast, x, answer, mask_id=tokenizer.mask_token_id,
                                 attention_mask=real, weighted=False, generator=generator)
            # Per token up to the first EOS: padding is soon learned, and its share must not
            # decide how much a batch counts.
            padding = ((x == tokenizer.eos_token_id) & answer).int().cumsum(1) > 1
            loss = loss * (answer.sum() / (answer & ~padding).sum())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=True)
            step += 1
            with torch.no_grad():
                keep = min(0.998, (step + 1) / (step + 10))
                for k, v in model.state_dict().items():
                    average[k].lerp_(v, 1 - keep)
            now = time.monotonic()
            bar.update(round(spent + now - clock) - bar.n)
            spent, clock = spent + now - clock, now
            losses.append(loss.item())
            if step % 50 == 0:
                mean, losses = sum(losses) / len(losses), []
                log.write(json.dumps({"step": step, "seconds": round(spent, 1),
                                      "loss": round(mean, 5), "lr": lr}) + "\n")
                log.flush()
                bar.set_postfix(step=step, loss=f"{mean:.4f}")
            end = step >= args.steps if args.steps else spent >= total
            if spent - saved > args.save_every * 60 or end or interrupted:
                saved = spent
                save()
            if end or interrupted:
                break
    bar.close()
    signal.signal(signal.SIGINT, before)
    if interrupted:
        cli.exit(130, f"interrupted and saved: {step} steps; the same command goes on\n")
    print(f"done: {step} steps, {spent / 60:.1f} minutes, model in {args.out}")


if __name__ == "__main__":
    main()
