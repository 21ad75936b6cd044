# SPDX-License-Identifier: MIT
"""The figures of the README: `python notebooks/figures.py` draws them into notebooks/figures/ and
writes down what they show (shown.json), by which a test notices a figure that is out of date."""
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "mini"), str(HERE.parent)]
import matplotlib.pyplot as plt
import plots
import tasks
import torch

import dlm_spec

FIGURES = HERE / "figures"
RIVALS = {      # the decoders of the second figure
    "WINO": (dlm_spec.sample_wino, dict(threshold=.5)), "Saber": (dlm_spec.sample_saber, {}),
    "COVER": (dlm_spec.sample_cover, dict(threshold=.5))}


def decodes(denoiser):
    """{name: DecodeOutput} of what the figures show, on a CPU in float32."""
    problem = tasks.problems("math", "validation", 12, seed=5)[7]

    def decode(sampler, text, **knobs):
        ids, mask = denoiser.encode(text)
        return sampler(denoiser, ids, attention_mask=mask, history=True, **knobs)

    out = {"canvas": decode(dlm_spec.sample_llada, dlm_spec.EXAMPLE, gen_length=28)}
    for name, (sampler, knobs) in RIVALS.items():
        out[name] = decode(sampler, problem.prompt, gen_length=64, block_length=64, **knobs)
    return out


def shown(denoiser, found):
    """What the figures show, as it is written down: texts, forwards, revisions."""
    return {name: dict(text=denoiser.decode(out.generated)[0], forwards=int(out.nfe),
                       revisions=len(out.revisions)) for name, out in found.items()}


def draw(denoiser, found):
    """Draw both figures."""
    plots.style()
    fig, ax = plt.subplots(figsize=(9, 4))
    plots.filling(ax, found["canvas"], denoiser)
    fig.savefig(FIGURES / "canvas.png", dpi=80)
    fig, axes = plt.subplots(1, 3, figsize=(12, 4.2))
    for ax, name in zip(axes, RIVALS):
        out = found[name]
        plots.timeline(ax, out, denoiser)
        share = dlm_spec.revision_statistics(out)["effective_share_remask"]
        ax.set(title=f"{name}: {int(out.nfe)} forwards\n{len(out.revisions)} taken back"
               + ("" if share is None else f", {100 * share:.0f} % for good"))
    fig.savefig(FIGURES / "flip_flops.png", dpi=80)


def main():
    """The command."""
    FIGURES.mkdir(exist_ok=True)
    denoiser = dlm_spec.load_denoiser(device="cpu", dtype=torch.float32)
    found = decodes(denoiser)
    draw(denoiser, found)
    (FIGURES / "shown.json").write_text(json.dumps(shown(denoiser, found), indent=1) + "\n")


if __name__ == "__main__":
    main()
