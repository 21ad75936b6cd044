# SPDX-License-Identifier: MIT
"""The drawings that several notebooks share, so that their cells show decoding."""
import io

import matplotlib.pyplot as plt
import torch
from IPython import get_ipython
from PIL import Image

import dlm_spec

COLOURS = {"LLaDA": "0.35", "threshold": "tab:blue", "dKV": "tab:cyan", "WINO": "tab:orange",
           "DualDiffusion": "tab:purple", "Saber": "tab:brown", "COVER": "tab:green",
           # variants that stand beside each other in one figure
           "COVER, few seeds": "yellowgreen", "COVER, all seeds, no override": "k",
           "DualDiffusion, trust": "0.6",
           "DualDiffusion, kl": "tab:pink", "DualDiffusion, confidence": "tab:red",
           "DualDiffusion, largest probability": "tab:olive",
           "DualDiffusion, probability of the token": "tab:cyan",
           "DualDiffusion, leave one out by COVER's view": "tab:green"}
COSTS = {"nfe": "forwards per problem", "positions": "positions per problem",
         "cpu": "seconds per problem"}


def style():
    """Figures without a frame at the top and the right."""
    plt.rcParams.update({"figure.dpi": 90, "axes.titlesize": 11, "axes.spines.top": False,
                         "axes.spines.right": False, "legend.frameon": False,
                         "legend.fontsize": 8, "figure.constrained_layout.use": True})


def timeline(ax, out, denoiser, row=0):
    """How a canvas fills, of a DecodeOutput with its history: time runs downwards, a line per
    forward; grey is a mask, white a token. Filled squares are tokens taken back for good, hollow
    ones came back: red where the place was masked again, green where it was replaced."""
    P, last = out.prompt_length, int(out.nfe[row])
    masked = torch.stack([x[row, P:] for x in out.history[:last + 1]]) == denoiser.mask_id
    ax.imshow(masked.cpu(), cmap="Greys", vmin=0, vmax=2.5, aspect="auto", interpolation="none")
    for r, same in zip(out.revisions, dlm_spec.flip_flops(out)):
        if r.row == row:
            colour = "tab:red" if r.kind == "remask" else "tab:green"
            ax.plot(r.position - P, r.forward, "s", ms=4, mec=colour,
                    mfc="none" if same else colour)
    ax.set(xlabel="position in the answer", ylabel="forward")


def filling(ax, out, denoiser, row=0):
    """When each position of a canvas was filled, and how surely: the tokens stand where they
    were committed, time runs downwards."""
    P = out.prompt_length
    steps, sure = out.commit_step[row, P:].cpu(), out.commit_confidence[row, P:].cpu()
    T, G = int(out.nfe[row]), len(steps)
    picture = torch.full((T, G), float("nan"))
    for i in range(G):
        picture[steps[i] - 1:, i] = sure[i]
    image = ax.imshow(picture, aspect="auto", cmap="viridis", vmin=0, vmax=1)
    ax.figure.colorbar(image, label="confidence when committed", pad=0.01)
    for i, t in enumerate(out.sequences[row, P:].tolist()):
        word = "·" if t in denoiser.eos_ids else denoiser.tokenizer.decode([t])
        ax.text(i, steps[i] - 1, word.replace("\n", "↵"), ha="center", va="center",
                fontsize=9 if len(word) < 4 else 6, color="white" if sure[i] < .7 else "black")
    ax.set(xlabel="position in the answer", ylabel="forward")


def curves(ax, records, cost, decoders, experiments):
    """Accuracy with 95 % intervals against a cost (see COSTS), a line per decoder, a point per
    setting. records: of experiments.read; decoders: their names in experiments.settings()."""
    known = experiments.settings()
    for decoder in decoders:
        names = sorted((n for n in records if known[n].decoder == decoder),
                       key=lambda n: records[n][cost])
        if not names:
            continue
        p, low, high = zip(*(experiments.accuracy(records[n]) for n in names))
        bars = [[a - b for a, b in zip(p, low)], [b - a for a, b in zip(p, high)]]
        cached = "cache" in decoder
        ax.errorbar([records[n][cost] for n in names], p, yerr=bars, ms=4, capsize=2, lw=1.2,
                    fmt="s--" if cached else "o-", alpha=.85, label=decoder,
                    color=COLOURS.get(decoder, COLOURS.get(decoder.split(",")[0])),
                    mfc="white" if cached else None)
    base = records.get("one-per-forward")
    if base is not None:
        ax.axhline(experiments.accuracy(base)[0], color="0.5", lw=1, ls=":",
                   label="one token per forward")
    ax.set(xlabel=COSTS[cost])


def sees(ax, picture, colours, rows="query", columns="column", labels=None):
    """Who sees what: an (n, m) tensor of numbers 0, 1, ... as colours. colours: {meaning:
    colour} in the order of the numbers. labels: the names of rows and columns."""
    ax.imshow(picture, cmap=plt.matplotlib.colors.ListedColormap([*colours.values()]),
              vmin=-.5, vmax=len(colours) - .5)
    for meaning, colour in colours.items():
        ax.plot([], [], "s", color=colour, label=meaning)
    if labels is not None:
        ax.set_xticks(range(len(labels)), labels)
        ax.set_yticks(range(picture.shape[0]), labels[:picture.shape[0]])
    ax.set(xlabel=columns, ylabel=rows)
    ax.legend(bbox_to_anchor=(1.02, 1), loc="upper left")


def fronts(found, decoders, experiments):
    """`curves` of all that is in found, {family: records}: a row of panels per family, one per
    cost (on a logarithmic axis), with one legend."""
    fig, axes = plt.subplots(max(len(found), 1), len(COSTS), figsize=(12, 2.8 * len(found) + .8),
                             squeeze=False, sharey="row")
    for (family, records), row in zip(found.items(), axes):
        for ax, cost in zip(row, COSTS):
            curves(ax, records, cost, decoders, experiments)
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(plt.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
            ax.xaxis.set_major_formatter("{x:g}")
            ax.xaxis.set_minor_formatter("")
        row[0].set(ylabel=f"{family}, % right")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)


def canvases(ax, lines, colours):
    """Canvases under each other. lines: [(label, [(word, meaning), ...]), ...]. colours:
    {meaning: colour}, for the legend too."""
    for y, (_, words) in enumerate(lines):
        for x, (word, meaning) in enumerate(words):
            ax.add_patch(plt.Rectangle((x - .47, y - .4), .94, .8, color=colours[meaning]))
            ax.text(x, y, word, ha="center", va="center", fontsize=9 if len(word) < 4 else 6)
    for meaning, colour in colours.items():
        ax.plot([], [], "s", color=colour, ms=9, label=meaning)
    ax.set(xlim=(-.6, max(len(words) for _, words in lines) - .4), ylim=(len(lines) - .4, -.6))
    ax.set_xticks([])
    ax.set_yticks(range(len(lines)), [label for label, _ in lines])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    ax.legend(bbox_to_anchor=(1.02, 1), loc="upper left")


def revision_legend(ax):
    """What the squares of `timeline` mean, beside it."""
    for label, colour, fill in (("taken back for good", "tab:red", "tab:red"),
                                ("taken back, came again", "tab:red", "none"),
                                ("replaced in place", "tab:green", "tab:green")):
        ax.plot([], [], "s", ms=5, mec=colour, mfc=fill, label=label)
    ax.legend(bbox_to_anchor=(1.02, 1), loc="upper left")


def small_pictures(colours=128):
    """In a notebook: keep figures as PNGs of so few colours, a third of the bytes."""
    def png(fig):
        """The figure as bytes."""
        picture, out = io.BytesIO(), io.BytesIO()
        fig.savefig(picture, format="png", bbox_inches="tight")
        Image.open(picture).convert("RGB").quantize(colours, method=1).save(
            out, "PNG", optimize=True)  # method 1 keeps the colours that are rare
        return out.getvalue()

    plt.close(plt.figure())     # the notebook's own way is set up with the first figure
    get_ipython().display_formatter.formatters["image/png"].for_type(plt.Figure, png)


def windows(ax, computed, out, ends, row=0):
    """What a decode computed: `computed` (T, L) bool, time runs downwards. Light columns come
    from the cache; dots are where a token was committed. ends: the last columns of the prompt
    and of the blocks."""
    L = computed.shape[1]
    ax.imshow(computed, cmap="Blues", vmin=0, vmax=1.6, aspect="auto", interpolation="none")
    steps = out.commit_step[row].cpu()
    filled = (steps > 0).nonzero()[:, 0]
    ax.plot(filled, steps[filled] - 1, ".", ms=3, color="tab:orange")
    for end in ends:
        ax.axvline(end + .5, color="0.4", lw=.8)
    ax.set(xlabel="column of the canvas", ylabel="forward", xlim=(-.5, L - .5))
