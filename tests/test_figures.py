"""The README's figures are current: what they show is what the code and the weights give."""
import json

import figures
import torch

import dlm_spec


def test_the_figures_show_what_is_decoded_today():
    """If this fails: `python notebooks/figures.py`, and look at them."""
    denoiser = dlm_spec.load_denoiser(device="cpu", dtype=torch.float32)
    written = json.loads((figures.FIGURES / "shown.json").read_text())
    assert figures.shown(denoiser, figures.decodes(denoiser)) == written
    for name in ("canvas.png", "flip_flops.png"):
        assert (figures.FIGURES / name).stat().st_size < 100_000


def test_the_first_figure_ends_with_a_right_answer():
    """The worked example of the module: 12 + 5 - 3, twice as many."""
    assert json.loads((figures.FIGURES / "shown.json").read_text())["canvas"]["text"].endswith(
        "#### 28")
