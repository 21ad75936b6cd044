"""The judges of notebook 07: what holds of them by construction, and what the record says."""
import json

import judges
import pytest
import torch
from helpers import M, random_ids, tiny_llama

import dlm_spec


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def panel_and_canvas(layers):
    """Judges of a random model, a canvas without masks, and eight of its columns."""
    denoiser = dlm_spec.Denoiser(tiny_llama(layers, dtype=torch.float64), M)
    return judges.Judges(denoiser), random_ids(1, 20), torch.arange(6, 14)


def all_at_once(panel, now, tokens):
    """COVER's judgement of the tokens, all of them seeds, with a store of the same canvas."""
    return panel.cover(panel.store(now), now, judges.rows([tokens], now), 0 * tokens, tokens)[0]


def test_in_a_model_of_one_layer_cover_is_the_truth():
    panel, now, tokens = panel_and_canvas(1)
    truth = panel.truth(now, tokens)[0]
    assert judges.kl(truth, all_at_once(panel, now, tokens)).max() < 1e-6
    many = judges.rows([tokens], now)
    assert judges.kl(truth, panel.visible(now, many, 0 * tokens, tokens)[0]).min() > 1e-4


def test_with_a_store_of_the_same_canvas_the_number_of_seeds_does_not_matter():
    panel, now, tokens = panel_and_canvas(3)
    alone = panel.cover(panel.store(now), now, judges.rows(tokens.split(1), now),
                        torch.arange(len(tokens)), tokens)[0]
    assert torch.allclose(alone, all_at_once(panel, now, tokens), atol=1e-6)
    assert judges.kl(panel.truth(now, tokens)[0], alone).max() > 1e-5      # and yet it leaks


def test_an_override_that_begins_behind_the_last_layer_is_a_mask_for_everyone():
    panel, now, tokens = panel_and_canvas(3)
    seeds, kv = judges.rows([tokens], now), panel.store(now)
    late = panel.cover(kv, now, seeds, 0 * tokens, tokens, judges.Late, first=3)[0]
    masked = panel.denoiser(now.masked_fill(seeds, M), seeds).float().log_softmax(-1)
    assert torch.allclose(late, masked, atol=1e-6)


def test_closing_takes_the_hooks_off_the_model():
    panel, *_ = panel_and_canvas(2)
    panel.close()
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in panel.layers)


def test_a_ratio_and_its_interval_and_a_difference():
    """By hand: 6 of 8; the deviations from 3/4 per token are +1 and -1, so the error is
    sqrt(2) / 8."""
    sums = [dict(n=4, hits=4), dict(n=4, hits=2)]
    mean, low, high = judges.ratio(sums, "hits")
    assert mean == .75 and high - mean == pytest.approx(1.96 * 2 ** .5 / 8) == mean - low
    other = [dict(n=4, hits=3), dict(n=4, hits=1)]
    assert judges.difference(sums, other, "hits") == (.25, .25, .25)


def test_the_record_holds_all_that_the_notebook_reads():
    """Of the same problems for every judge, so that they can be compared in pairs."""
    found = json.loads(judges.RESULTS.read_text())
    for key in ("plain", "planted", "together", "drafts"):
        counts = {tuple(s["n"] for s in sums) for sums in found[key].values()}
        assert len(counts) == 1, key
    assert {f"plain, {name}" for name in found["plain"]} <= found["layers"].keys()
    for pair in found["decodes"].values():
        assert len({len(r["marks"]) for r in pair.values()} | {r["n"] for r in pair.values()}) == 1
