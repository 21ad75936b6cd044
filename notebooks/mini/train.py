# SPDX-License-Identifier: MIT
"""Train the embedded model: a masked-diffusion Llama on the three families of tasks.py.

    python notebooks/mini/train.py                  # from nothing, or on from the last checkpoint
    python notebooks/mini/train.py --hidden 96 --run run_small --out small    # the small drafter

What is learned in which step stands in CURRICULUM. A batch depends on the seed and the number
of its step alone, so a run that was stopped goes on as if it had not been.

Every few minutes, and on Ctrl-C, it writes the state of the run (run/last.pt; the log is
run/log.jsonl) and the model folder that `load_denoiser()` opens (config.json,
model.safetensors in bf16, tokenizer.json), with the running average of the weights. Files are
replaced when they are whole. At the end the log and a picture of it go there as well.
"""
import argparse
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
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


@dataclass(frozen=True)
class Stage:
    """A part of the training. Lengths are in tokens."""
    steps: int
    mix: tuple          # shares of the families among the batches, in the order of tasks.FAMILIES
    whole: float        # share of batches that hide tokens of the prompt, too
    exams: float        # share of batches whose prompts hold two to four problems
    canvas: int         # the longest canvas
    long: float         # share of batches with a canvas of any length up to that
    letters: float      # share of the batches of multiple choice that teach the letter alone
    options: float      # share of these that teach the option's text instead, or both
    hide: tuple         # the largest share of their other tokens that is hidden; first and last
    sums: float = 0     # share of the batches of MiniMath that are sums alone
    tails: float = 0    # share of batches that teach where the text ends, see batch


CURRICULUM = (
    # single problems on short canvases; of multiple choice at first often the letter or the option
    # alone, with nearly all else visible, until other layers make use of the induction heads
    Stage(1200, mix=(.35, .4, .25), whole=.2, exams=0, canvas=64, long=.1, letters=.5, options=.5,
          hide=(0, .3)),
    # with sums
    Stage(3300, mix=(.45, .4, .15), whole=.05, exams=0, canvas=64, long=.1, letters=.35, options=.6,
          hide=(.3, .8), sums=.3),
    # with a few exams
    Stage(3500, mix=(.45, .4, .15), whole=0, exams=.1, canvas=128, long=.2, letters=.35, options=.6,
          hide=(.8, 1), sums=.3),
    # up to four problems, any length
    Stage(5900, mix=(.4, .4, .2), whole=0, exams=.5, canvas=256, long=.2, letters=.35,
          options=.7, hide=(1, 1), sums=.15),
    # mostly single ones again, any length; and where the text ends on a canvas that is nearly empty
    Stage(3600, mix=(.45, .3, .25), whole=0, exams=.3, canvas=256, long=.3, letters=.35,
          options=.7, hide=(1, 1), sums=.1, tails=.25))
TOKENS = 3072           # the most tokens in a batch
PEAK_LR = 6e-4
TOTAL = sum(stage.steps for stage in CURRICULUM)
ONE_STEP = .2           # share of problems of one step among those of MiniMath


def stage_at(step):
    """The stage that a step belongs to, and how far the stage is: (Stage, 0 to 1)."""
    for stage in CURRICULUM:
        if step < stage.steps:
            return stage, step / stage.steps
        step -= stage.steps
    return stage, 1.0


def learning_rate(step):
    """It rises over 200 steps to PEAK_LR, falls in a straight line that would reach zero after
    20,000 steps, and in the last stage in a steeper one that does at its end."""
    last = CURRICULUM[-1].steps
    steeper = (TOTAL - step) / last * (1 - (TOTAL - last) / 20_000)
    return PEAK_LR * min((step + 1) / 200, 1 - step / 20_000, steeper)


def between(ends, share):
    """The number at a share of the way from the first to the second of two."""
    return ends[0] + (ends[1] - ends[0]) * share


def sums(tokenizer, rng):
    """A batch of rows of steps as the answers of MiniMath write them, (x, results), (B, L) each:
    one step of a chain, at times two, then of another one, so that no result is written twice."""
    M, rows = tokenizer.mask_token, []
    for _ in range(TOKENS // 64):
        shown, asked = [], []
        for _ in range(9):
            steps = tasks._chain(rng, 5)[rng.randrange(4):]
            forms = [rng.choice((0, 2, 3)), 1]          # form 1 says no number that it starts from
            for (v, op, k, w), form in zip(steps[:1 + (rng.random() < .3)], forms):
                form = tasks.STEP_FORMS[form]
                shown.append(form.format(v=v, op=op, k=k, w=w))
                asked.append(form.format(v=v, op=op, k=k, w=M))
        rows.append([tokenizer("<|user|><|assistant|>" + " ".join(text),
                               add_special_tokens=False)["input_ids"][:64]
                     for text in (shown, asked)])
    n = min(len(shown) for shown, _ in rows)
    x, hidden = (torch.tensor([row[i][:n] for row in rows]) for i in (0, 1))
    return x, hidden == tokenizer.mask_token_id


def batch(tokenizer, step, seed=0):
    """The training batch of a step: (what, x, answer, attention_mask), the last three (B, L).

    what: the family, "letter", "option", "sums" or "whole". x: prompts, padded on the left, then
    answers, filled up by EOS to a canvas length drawn per batch (decoding must work on all).
    answer: the tokens that are to be learned, of which the loss hides a random share.

    All rows are of one family: in a loss averaged over tokens the letter of a multiple choice
    drowns, and the model names the right option and a letter at random. For the same reason
    some batches ask for the letter or the option alone, and some are sums alone: to add is the
    last thing that is learned in MiniMath. Of the others some hide tokens of the prompt, too, as
    in pretraining, by which the model learns sooner to look from one place for what stands at
    another; and a quarter is cut in three, as block by block decoding leaves a canvas: known, to
    be learned, and still all masks. Decoding by confidence fills EOS first, from the right to the
    left, while the text is still all masks, and a model that is seldom asked where the text ends
    then lets EOS creep into it. So some batches show all EOS but at most the first eleven, and
    ask for the eight tokens before these; everything before them is M.
    """
    stage, share = stage_at(step)
    rng = random.Random(f"{seed}/{step}")
    coin = torch.Generator().manual_seed(rng.getrandbits(32))
    family, = rng.choices(tasks.FAMILIES, stage.mix)
    if family == "math" and stage.sums and rng.random() < stage.sums:
        x, results = sums(tokenizer, rng)
        return "sums", x, results, torch.ones_like(x)
    size = rng.randint(2, 4) if rng.random() < stage.exams else 1
    # Of four times as many rows, sorted by the length of their prompts, a part: little padding.
    n = max(1, TOKENS // (70 * size))
    easy = round(ONE_STEP * 4 * n * size) if family == "math" else 0
    rows = (tasks.problems(family, "train", 4 * n * size - easy, seed=(seed, step))
            + tasks.problems("step", "train", easy, seed=(seed, step)))
    if size > 1:
        rows = tasks.in_exams(rng.sample(rows, len(rows)), size)
    rows.sort(key=lambda row: len(row.prompt))
    at = n * rng.randrange(4)
    rows = rng.sample(rows[at:at + n], n)
    prompts, answers = (tokenizer(texts, add_special_tokens=False)["input_ids"]
                        for texts in ([r.prompt for r in rows], [r.answer for r in rows]))
    user, assistant, eos, pad, said = (
        tokenizer.convert_tokens_to_ids(s)
        for s in ("<|user|>", "<|assistant|>", "<|eos|>", "<|pad|>", "Answer"))
    P, G = max(map(len, prompts)) + 2, max(map(len, answers)) + 1
    G = (rng.randint(G, max(G, stage.canvas)) if rng.random() < stage.long
         else G + rng.choice((0, 2, 4, 8)))
    n = max(1, TOKENS // (P + G))
    rows = [[pad] * (P - 2 - len(p)) + [user, *p, assistant, *a] + [eos] * (G - len(a))
            for p, a in zip(prompts[:n], answers)]
    x = torch.tensor(rows)                                                          # (B, L)
    real, place = (x != pad).long(), torch.arange(P + G) - P
    answer = (place >= 0).expand(x.shape)
    letter = F.pad(answer & (x == said), (2, 0))[:, :-2]
    if family == "choice" and rng.random() < stage.letters:
        what, asked = "letter", letter
        if rng.random() < stage.options:    # the word behind the letter, at times the letter, too
            what, asked = "option", F.pad(letter, (2, 0))[:, :-2]
            asked = asked | letter if rng.random() < .5 else asked
        hidden = between(stage.hide, share) * torch.rand(len(x), 1, generator=coin)
        hidden = answer & ~asked & (torch.rand(x.shape, generator=coin) < hidden)
        return what, x.masked_fill(hidden, tokenizer.mask_token_id), asked, real
    if rng.random() < stage.whole:
        return "whole", x, real.bool(), real
    length = torch.tensor([len(a) + 1 for a in answers[:n]])
    if stage.tails and rng.random() < stage.tails:
        behind = torch.rand(len(x), generator=coin) * (G - length + 2).clamp(max=12)
        start = length - 1 + behind.long()
        answer = answer & (place < start[:, None]) & (place >= start[:, None] - 8)
        x = x.masked_fill((place >= 0) & (place < start[:, None] - 8), tokenizer.mask_token_id)
    elif rng.random() < .25:
        block = rng.choice((8, 16, 32, 64))
        start = (torch.rand(len(x), generator=coin) * length).long()[:, None]
        answer = (place >= start) & (place < start + block)
        x = x.masked_fill(place >= start + block, tokenizer.mask_token_id)
    return family, x, answer, real


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


@torch.no_grad()
def start_numbers_on_circles(embedding, tokenizer, periods=(2, 5, 10, 20, 50, 100)):
    """Let the embeddings of the numbers 0 to 99 start out as points on circles, one for each
    period: numbers next to each other are alike, and adding is a turn, as in the arithmetic
    that such models come to by themselves after a long time (arXiv 2301.05217)."""
    size = embedding.std()
    for n in range(100):
        angle = 2 * torch.pi * n / torch.tensor(periods)
        at = torch.cat([angle.cos(), angle.sin()])
        embedding[tokenizer.convert_tokens_to_ids(str(n)), :len(at)] = 3 * size * at


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
def start_with_induction_heads(model, offsets=(-2, -1, 1, 2)):
    """Let the first two layers start out as four induction heads (arXiv 2209.11895).

    Head h of the first layer looks at the token at offsets[h]. Head h of the second looks for
    that same token elsewhere, and tells what stands as far away from there on the other side:
    for the masked letter of "Answer: [M]) plum" it finds the plum among the options and tells the
    letter before it. All that moves a token into an answer is of this kind, and a model this
    small does not find it in hours of training: it named the right option and a letter at random.

    At first the other layers add nothing, the embedding fills the lower half of a hidden state,
    and the upper half holds a compressed token for each offset. The biases of q and k make the
    first layer's heads: with the rotary embedding their score depends on the offset alone, and
    is largest at the wanted one. The second layer's use only the slow half of the frequencies.
    The embedding starts at about the size that training gives it, so that what these heads say
    neither drowns in it later nor is lost in the first steps.
    """
    layers, embedding = model.model.layers, model.model.embed_tokens.weight
    first, second = layers[0].self_attn, layers[1].self_attn
    d, half = first.head_dim, embedding.shape[1] // 2
    for layer in layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    embedding *= 5
    embedding[:, half:] = 0
    size, one = embedding[:, :half].std(), torch.eye(d // 2)
    compress = torch.linalg.qr(torch.randn(half, d // 2))[0].T                  # (d / 2, half)
    slow = torch.cat([torch.arange(d // 4, d // 2), torch.arange(3 * d // 4, d)])
    angle = 10_000.0 ** (-torch.arange(0, d, 2) / d)
    for projection in (first.q_proj, first.k_proj):
        projection.weight.mul_(0.1)
    for projection in (second.q_proj, second.k_proj):
        projection.weight.zero_()
    for h, offset in enumerate(offsets):
        head, front = slice(h * d, (h + 1) * d), slice(h * d, h * d + d // 2)
        at, opposite = (slice(half + i * d // 2, half + (i + 1) * d // 2)
                        for i in (h, offsets.index(-offset)))
        first.k_proj.bias[head] = 6 * torch.cat([torch.ones(d // 2), torch.zeros(d // 2)])
        first.q_proj.bias[head] = 6 * torch.cat([(angle * offset).cos(), (angle * offset).sin()])
        first.v_proj.weight[front] = F.pad(compress, (0, half))
        first.o_proj.weight[at, front] = size * one
        second.q_proj.weight[h * d + slow, at] = 2 * one
        second.k_proj.weight[h * d + slow, :half] = 2 * compress
        second.v_proj.weight[front] = 0
        second.v_proj.weight[front, opposite] = one
        second.o_proj.weight[:half, front] = size * compress.T


def build_model(tokenizer, hidden, layers):
    """A stock Llama with four heads, tied embeddings and attention biases."""
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=hidden, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=4,
                         intermediate_size=hidden * 8 // 3, max_position_embeddings=4096,
                         attention_bias=True, tie_word_embeddings=True,
                         mask_token_id=tokenizer.mask_token_id,
                         eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
                         bos_token_id=None, is_causal=False, shift_logits=False,
                         trained_gen_length=max(stage.canvas for stage in CURRICULUM))
    model = LlamaForCausalLM(config)
    start_numbers_on_circles(model.model.embed_tokens.weight, tokenizer)
    start_with_induction_heads(model)
    model.set_attn_implementation("dlm_spec")
    return model


def loss_of(model, x, answer, real, tokenizer, generator):
    """The loss of a batch per answer token up to the first EOS: what fills the canvas up is
    soon learned, and its share must not decide how much a batch counts.

    On a CPU, attention to these few tokens is faster in the plain form, with all scores at once.
    """
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)        # for the CPU, too
    with torch.autocast("cpu", dtype=torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        loss = mdlm_loss(model, x, answer, mask_id=tokenizer.mask_token_id, attention_mask=real,
                         weighted=False, generator=generator)
    filling = ((x == tokenizer.eos_token_id) & answer).int().cumsum(1) > 1
    return loss * (answer.sum() / (answer & ~filling).sum())


def draw_losses(log, path):
    """The curves of a log, as a picture: the mean loss of each kind of batch in nats."""
    import matplotlib.pyplot as plt
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    fig, ax = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for what in sorted(set().union(*(line["loss"] for line in lines))):
        points = [(line["step"], line["loss"][what]) for line in lines if what in line["loss"]]
        ax.plot(*zip(*points), lw=1, label=what)
    for end in itertools.accumulate(stage.steps for stage in CURRICULUM):
        ax.axvline(end, color="0.8", lw=.8, zorder=0)
    ax.set(xlabel="step (lines: stages)", ylabel="nats per token", yscale="log",
           xlim=(0, lines[-1]["step"]), ylim=(.02, None))
    ax.legend(frameon=False)
    fig.savefig(path, dpi=80)
    plt.close(fig)


def main():
    """The command line."""
    cli = argparse.ArgumentParser(description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--steps", type=int, help="stop after so many steps (default: all)")
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--hidden", type=int, default=192)
    cli.add_argument("--layers", type=int, default=7)
    cli.add_argument("--run", type=Path, default=HERE / "run", help="state and log of the run")
    cli.add_argument("--out", type=Path, default=HERE / "model", help="the model folder to write")
    cli.add_argument("--save-every", type=float, default=5, help="minutes between checkpoints")
    args = cli.parse_args()
    if args.hidden < 16 or args.hidden % 16:
        cli.error(f"--hidden is {args.hidden}, expected a multiple of 16: four heads of even size, "
                  "of which half can be left out")
    if args.layers < 2:
        cli.error(f"--layers is {args.layers}, expected 2 or more: the induction heads take two")

    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args.hidden, args.layers)
    average = {k: v.clone() for k, v in model.state_dict().items()}
    opts = optimizers(model, 1.0)
    generator = torch.Generator().manual_seed(args.seed)
    step, spent, losses, state_file = 0, 0.0, {}, args.run / "last.pt"
    args.run.mkdir(parents=True, exist_ok=True)
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        average, step, spent = state["average"], state["step"], state["spent"]
        losses = state["losses"]
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
    steps = args.steps or TOTAL
    forget_after(args.run / "log.jsonl", step)
    interrupted = []                    # Ctrl-C ends the step and saves; a second one ends at once

    def interrupt(*_):
        interrupted.append(signal.signal(signal.SIGINT, before))
    before = signal.signal(signal.SIGINT, interrupt)
    bar = tqdm(total=steps, initial=step, unit="step", mininterval=5)
    clock, saved = time.monotonic(), spent
    with open(args.run / "log.jsonl", "a") as log:
        while step < steps and not interrupted:
            lr = learning_rate(step)
            for opt, factor in zip(opts, (2, 1)):
                for group in opt.param_groups:
                    group["lr"] = lr * factor
            what, x, answer, real = batch(tokenizer, step, args.seed)
            loss = loss_of(model, x, answer, real, tokenizer, generator)
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
            spent, clock = spent + now - clock, now
            losses.setdefault(what, []).append(loss.item())
            bar.update()
            if step % 50 == 0:
                means = {k: round(sum(v) / len(v), 4) for k, v in sorted(losses.items())}
                losses = {}
                log.write(json.dumps({"step": step, "seconds": round(spent, 1), "lr": lr,
                                      "loss": means}) + "\n")
                log.flush()
                bar.set_postfix(means)
            if spent - saved > args.save_every * 60:
                saved = spent
                save()
    save()
    if step >= 50:
        shutil.copy(args.run / "log.jsonl", args.out / "log.jsonl")
        draw_losses(args.run / "log.jsonl", args.out / "loss.png")
    bar.close()
    signal.signal(signal.SIGINT, before)
    if interrupted:
        cli.exit(130, f"interrupted and saved: {step} steps; the same command goes on\n")
    print(f"done: {step} steps, {spent / 60:.1f} minutes, model in {args.out}")


if __name__ == "__main__":
    main()
