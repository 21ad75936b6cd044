"""The training loss and the Monte-Carlo likelihood, against values worked out by hand."""
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from helpers import Table, random_ids, tiny_llama

from dlm_spec import Denoiser, log_likelihood, mdlm_loss


@pytest.mark.parametrize("n_samples", [1, 3, 128])
def test_a_constant_cross_entropy_gives_its_sum_exactly(n_samples):
    """CASES 28: constant c over L tokens is -L c, whatever the sample count."""
    t = torch.zeros(20, 10)
    t[:, 9] = -torch.inf
    d = Denoiser(Table(t), 9)
    got = log_likelihood(d, [[1, 2], [3, 4, 5]], [[1, 2, 3, 4], [5]], n_samples=n_samples)
    assert torch.allclose(got, -torch.tensor([4.0, 1.0]) * torch.tensor(9.0).log())


def test_the_estimate_converges_to_the_enumeration_of_all_masks():
    """CASES 28: L=3, all 7 subsets: mean over l of mean over subsets of size l of
    (3 / l) sum log p."""
    d = Denoiser(tiny_llama(2), 39)
    prompt, answer = [7, 3], torch.tensor([4, 5, 6])
    by_size = {1: [], 2: [], 3: []}
    for subset in product([False, True], repeat=3):
        if any(subset):
            masked = F.pad(torch.tensor([subset]), (2, 0), value=False)
            x = torch.cat([torch.tensor(prompt), answer])[None]
            logits = d(x.masked_fill(masked, 39), masked)
            by_size[sum(subset)].append(
                3 / sum(subset) * logits.log_softmax(1)[range(sum(subset)), x[masked]].sum())
    exact = torch.stack([torch.stack(v).mean() for v in by_size.values()]).mean()
    got = log_likelihood(d, [prompt], [answer], n_samples=4000, batch_size=500,
                         generator=torch.Generator().manual_seed(0))
    assert abs(got[0] - exact) < .05 * abs(exact)


def test_left_padding_and_batches_do_not_change_the_likelihood():
    d = Denoiser(tiny_llama(2), 39)
    rows, answers = [[7, 3], [1, 2, 3, 4]], [[4, 5, 6]] * 2
    both = log_likelihood(d, rows, answers, n_samples=1, generator=torch.Generator().manual_seed(3))
    one = log_likelihood(d, rows[:1], answers[:1], n_samples=1,
                         generator=torch.Generator().manual_seed(3))
    assert torch.allclose(both[0], one[0], atol=1e-4)


def test_guidance_of_zero_is_no_guidance_and_of_one_is_another_value():
    d = Denoiser(tiny_llama(2), 39)
    values = [log_likelihood(d, [[7, 3]], [[4, 5]], n_samples=8, cfg_scale=s,
                             generator=torch.Generator().manual_seed(0))
              for s in (0.0, 0.0, 1.0)]
    assert torch.equal(values[0], values[1]) and not torch.allclose(values[0], values[2])


def test_the_weighted_loss_estimates_the_bound_and_the_plain_one_the_mean():
    """A model with the same cross-entropy c everywhere: plain c exactly;
    weighted c on average (a bound on -log p)."""
    model = tiny_llama(1)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.set_attn_implementation("dlm_spec")
    x, c = random_ids(64, 12), torch.tensor(40.0).log()
    answer = (torch.arange(12) >= 4).expand(64, 12)
    g = torch.Generator().manual_seed(0)
    assert torch.allclose(mdlm_loss(model, x, answer, mask_id=39, weighted=False, generator=g), c)
    weighted = torch.stack([mdlm_loss(model, x, answer, mask_id=39, generator=g)
                            for _ in range(50)]).mean()
    assert abs(weighted - c) < .05 * c


def test_the_loss_masks_answers_only_and_reads_only_masks():
    """Gradients reach the model through masked answer tokens; padding changes nothing."""
    model = tiny_llama(2)
    model.set_attn_implementation("dlm_spec")
    x = random_ids(2, 10)
    answer = torch.zeros(2, 10, dtype=torch.bool)
    answer[:, 6:] = True
    loss = mdlm_loss(model, x, answer, mask_id=39, weighted=False,
                     generator=torch.Generator().manual_seed(1))
    loss.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0
    padded, real = F.pad(x, (3, 0)), F.pad(torch.ones_like(x), (3, 0))
    with pytest.raises(ValueError, match="every row needs"):
        mdlm_loss(model, x, torch.zeros_like(answer), mask_id=39)
    # the same masks on the shifted columns: rand is drawn per column,
    # so compare with everything masked
    full = [mdlm_loss(model, a, b, mask_id=39, attention_mask=m, weighted=False, generator=Always())
            for a, b, m in ((x, answer, None), (padded, F.pad(answer, (3, 0)), real))]
    assert torch.allclose(*full, atol=1e-4)


class Always(torch.Generator):
    """Not used for drawing: see the monkeypatched rand below."""


@pytest.fixture(autouse=True)
def _always_masked(monkeypatch):
    """With an `Always` generator every uniform number is 0: everything maskable is masked."""
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *a, generator=None, **kw: (
        torch.zeros(*a, **kw) if isinstance(generator, Always)
        else rand(*a, generator=generator, **kw)))
