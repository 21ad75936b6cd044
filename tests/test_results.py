"""Section 9: what a decode returns, what its revisions were worth, likelihood and loss."""
import itertools
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import M, Table, random_ids, tiny_llama, tiny_qwen2

import dlm_spec
from dlm_spec import (
    Denoiser,
    Revision,
    flip_flops,
    log_likelihood,
    mdlm_loss,
    revision_statistics,
    revisions_of,
    sample_cover,
    sample_llada,
    sample_saber,
    sample_wino,
)


@pytest.fixture(autouse=True)
def no_grad_but_where_enabled():
    with torch.no_grad():
        yield


# -------------------------------------------------- DecodeOutput

def test_an_output_says_what_was_filled_when_and_how_surely():
    """Logits that depend on the position only: 4, 3, 5, 2 for id 7 at the four masks, 0 for
    the other five ids that may be predicted. One token per forward, the surest first."""
    table = torch.zeros(6, 7)
    table[2:, 0] = torch.tensor([4.0, 3.0, 5.0, 2.0])
    out = sample_llada(Denoiser(Table(table), 6), [[1, 2]], gen_length=4, history=True)
    sure = table[:, 0].exp() / (table[:, 0].exp() + 5)
    assert out.generated.tolist() == [[0, 0, 0, 0]] and out.prompt_length == 2
    assert out.sequences.tolist() == [[1, 2, 0, 0, 0, 0]]
    assert out.commit_step.tolist() == [[0, 0, 2, 3, 1, 4]]
    assert torch.allclose(out.commit_confidence, torch.tensor([[1, 1, *sure[2:].tolist()]]))
    assert (out.nfe.tolist(), out.calls, out.positions.tolist()) == ([4], 4, [4 * 6])
    assert out.tokens_per_forward.tolist() == [1.0] and out.revisions == []
    assert [(x == 6).sum().item() for x in out.history] == [4, 3, 2, 1, 0]


def test_tokens_per_forward_counts_what_was_generated_before_the_end():
    """CASES 32: neither the prompt nor what stands behind the end of the text."""
    table = torch.zeros(8, 7)
    table[:, 3] = 5.0
    table[4, 5] = 9.0                                   # the end of the text, third of six
    d = Denoiser(Table(table), 6, eos_ids=(5,))
    out = sample_llada(d, [[1, 2]], gen_length=6, steps=3)
    assert out.generated.tolist() == [[3, 3, 5, 3, 3, 3]]
    assert out.tokens_per_forward.tolist() == pytest.approx([2 / 3])


# -------------------------------------------------- revisions

def test_revisions_of_a_log_worked_out_by_hand():
    """Two rows of three positions. Row 0 has its position 1 re-masked at forward 2 and filled
    with 9 at forward 3; row 1 has its position 2 replaced, 6 by 8, at forward 3."""
    def where(*pairs):
        flag = torch.zeros(2, 3, dtype=torch.bool)
        for pair in pairs:
            flag[pair] = True
        return flag
    nfe = torch.tensor([1, 1])
    first = torch.tensor([[1, 5, M], [1, 2, 6]])
    last = torch.tensor([[1, 9, 4], [1, 2, 8]])
    log = [("replace", nfe, first, None), ("commit", nfe, first, where((0, 1), (1, 2))),
           ("remask", nfe, first, None),
           ("remask", nfe + 1, first, where((0, 1))),
           ("replace", nfe + 2, first, where((1, 2))),
           ("commit", nfe + 2, last, where((0, 1), (0, 2), (1, 2)))]
    assert revisions_of(log) == [Revision(0, 2, 1, 5, "remask", 9),
                                 Revision(1, 3, 2, 6, "replace", 8)]


REVOCABLE = [sample_wino, sample_saber, sample_cover, partial(sample_cover, cache="prefix"),
             partial(sample_wino, threshold=.5, threshold_back=.99),
             partial(sample_cover, threshold=.5, tau_replace=.3, tau_remask=1.0),
             partial(dlm_spec.sample_dual_diffusion, threshold=.5)]


@pytest.mark.parametrize("sampler", REVOCABLE)
def test_the_revisions_retell_the_history(sampler):
    """Every change of a token that was shown is a revision, with the token that came next."""
    model = tiny_llama(3, seed=3)
    model.lm_head.weight.mul_(2.5)  # sure enough that thresholds let some tokens through
    out = sampler(Denoiser(model, M), [[1, 2, 3], [4, 5]], gen_length=32, block_length=32,
                  history=True)
    events = {}
    for r in out.revisions:
        events.setdefault((r.row, r.position), []).append(r)
    for (row, position), found in events.items():
        assert all(a.new == b.old for a, b in itertools.pairwise(found))
        assert found[-1].new == out.sequences[row, position]
    assert len(out.revisions) > 0
    if (out.nfe == out.calls).all():  # then forward t leads from history[t-1] to history[t]
        changes = sum(int(((a != M) & (a != b)).sum())
                      for a, b in itertools.pairwise(out.history))
        at_once = sum(int(out.history[r.forward - 1][r.row, r.position]) == M
                      for r in out.revisions)   # Saber: committed in that same forward
        assert changes == len(out.revisions) - at_once


def output(*revisions):
    """A result with ten committed tokens and these revisions: forward, position, old, kind,
    new."""
    events = [Revision(0, *r) for r in revisions]
    return SimpleNamespace(revisions=events, commit_step=torch.ones(1, 10, dtype=torch.long),
                           sequences=torch.zeros(1, 10), prompt_length=0)


def test_flip_flops_are_counted_by_what_comes_back():
    out = output((2, 1, 5, "remask", 5), (2, 2, 5, "remask", 6),        # A A; A B
                 (3, 3, 5, "replace", 6), (5, 3, 6, "remask", 5),       # A B A: both
                 (3, 4, 5, "replace", 6), (5, 4, 6, "replace", 7))      # A B C: neither
    assert flip_flops(out) == [True, False, True, True, False, False]
    stats = revision_statistics(out, torch.tensor([[0, 5, 6, 5, 7, 0, 0, 0, 0, 0]]))
    assert (stats["events"], stats["remasks"], stats["replaces"]) == (6, 3, 3)
    assert stats["commits"] == 16
    assert (stats["flip_flops"], stats["restored"], stats["effective_remasks"]) == (3, 1, 1)
    assert stats["effective_share"] == .5 and stats["wasted_share"] == 1 / 16
    assert stats["effective_share_remask"] == pytest.approx(1 / 3)
    assert (stats["became_right"], stats["became_wrong"]) == (3, 1)


def test_without_revisions_there_is_no_share_of_effective_ones():
    stats = revision_statistics(output())
    assert stats["effective_share"] is None is stats["effective_share_remask"]
    assert stats["events"] == stats["wasted_share"] == 0


def test_a_reference_may_be_of_the_generated_part_alone():
    """Revisions inside the prompt are then neither right nor wrong."""
    out = output((2, 1, 5, "remask", 6), (2, 8, 5, "remask", 6))
    whole = torch.tensor([[0, 6, 0, 0, 0, 0, 0, 0, 6, 0]])
    for reference, right in ((whole, 2), (whole[:, 4:], 1)):
        assert revision_statistics(out, reference)["became_right"] == right


# -------------------------------------------------- likelihood

@pytest.mark.parametrize("n_samples", [1, 3, 128])
def test_a_constant_cross_entropy_gives_its_sum_exactly(n_samples):
    """CASES 28: constant c over L tokens is -L c, whatever the sample count."""
    table = torch.zeros(20, 10)
    table[:, 9] = -torch.inf
    d = Denoiser(Table(table), 9)
    got = log_likelihood(d, [[1, 2], [3, 4, 5]], [[1, 2, 3, 4], [5]], n_samples=n_samples)
    assert torch.allclose(got, -torch.tensor([4.0, 1.0]) * torch.tensor(9.0).log())


def test_the_estimate_converges_to_the_enumeration_of_all_masks():
    """CASES 28: L=3, all 7 subsets: mean over l of mean over subsets of size l of
    (3 / l) sum log p."""
    d = Denoiser(tiny_llama(2), M)
    prompt, answer = [7, 3], torch.tensor([4, 5, 6])
    by_size = {1: [], 2: [], 3: []}
    for subset in product([False, True], repeat=3):
        if any(subset):
            masked = F.pad(torch.tensor([subset]), (2, 0), value=False)
            x = torch.cat([torch.tensor(prompt), answer])[None]
            logits = d(x.masked_fill(masked, M), masked)
            by_size[sum(subset)].append(
                3 / sum(subset) * logits.log_softmax(1)[range(sum(subset)), x[masked]].sum())
    exact = torch.stack([torch.stack(v).mean() for v in by_size.values()]).mean()
    got = log_likelihood(d, [prompt], [answer], n_samples=4000, batch_size=500,
                         generator=torch.Generator().manual_seed(0))
    assert abs(got[0] - exact) < .05 * abs(exact)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_left_padding_and_batches_do_not_change_the_likelihood():
    """CASES 1 and 2: a list of unequal rows, or padded ids with their mask."""
    d = Denoiser(tiny_llama(2), M)
    rows, answers = [[7, 3], [1, 2, 3, 4]], [[4, 5, 6]] * 2
    alone = log_likelihood(d, rows[:1], answers[:1], n_samples=1, generator=seeded(3))
    both = log_likelihood(d, rows, answers, n_samples=1, generator=seeded(3))
    padded = log_likelihood(d, [[9, 9, 7, 3]], answers[:1], attention_mask=[[0, 0, 1, 1]],
                            n_samples=1, generator=seeded(3))
    assert torch.allclose(both[0], alone[0], atol=1e-4)
    assert torch.allclose(padded[0], alone[0], atol=1e-4)


def test_a_padded_row_s_likelihood_with_guidance_is_that_of_the_row_alone():
    """CASES 3: guidance doubles the canvas, and its mask with it."""
    d = Denoiser(tiny_llama(2), M)
    alone, padded = (log_likelihood(d, prompt, [[4, 5]], n_samples=4, cfg_scale=1.0,
                                    attention_mask=mask, generator=seeded(0))
                     for prompt, mask in (([[7, 3]], None), ([[9, 9, 7, 3]], [[0, 0, 1, 1]])))
    assert torch.allclose(alone, padded, atol=1e-4)


def test_guidance_of_zero_is_no_guidance_and_of_one_is_another_value():
    d = Denoiser(tiny_llama(2), M)
    values = [
        log_likelihood(d, [[7, 3]], [[4, 5]], n_samples=8, cfg_scale=s, generator=seeded(0))
        for s in (0.0, 0.0, 1.0)
    ]
    assert torch.equal(values[0], values[1]) and not torch.allclose(values[0], values[2])


# -------------------------------------------------- the training loss

def hooked(model):
    """The model with our attention, as training takes it."""
    model.set_attn_implementation("dlm_spec")
    return model


def test_the_weighted_loss_estimates_the_bound_and_the_plain_one_the_mean():
    """A model with the same cross-entropy c everywhere: the plain loss is c exactly; the
    weighted one is c on average (a bound on -log p)."""
    model = hooked(tiny_llama(1))
    model.lm_head.weight.zero_()
    x, c, generator = random_ids(64, 12), torch.tensor(40.0).log(), seeded(0)
    answer = (torch.arange(12) >= 4).expand(64, 12)
    plain = mdlm_loss(model, x, answer, mask_id=M, weighted=False, generator=generator)
    assert torch.allclose(plain, c)
    weighted = torch.stack([mdlm_loss(model, x, answer, mask_id=M, generator=generator)
                            for _ in range(50)]).mean()
    assert abs(weighted - c) < .05 * c


def test_the_loss_trains_the_model():
    model = hooked(tiny_llama(2))
    answer = (torch.arange(10) >= 6).expand(2, 10)
    with torch.enable_grad():
        mdlm_loss(model, random_ids(2, 10), answer, mask_id=M, weighted=False,
                  generator=seeded(1)).backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.fixture
def everything_masked(monkeypatch):
    """Every uniform number is 0, so that every answer token is masked."""
    monkeypatch.setattr(torch, "rand", lambda *a, generator=None, **kw: torch.zeros(*a, **kw))


def test_left_padding_does_not_change_the_loss(everything_masked):
    """CASES 1: with the padding's mask; without it the loss is another."""
    model, x = hooked(tiny_llama(2)), random_ids(2, 10)
    answer = (torch.arange(10) >= 6).expand(2, 10)
    padded, real = F.pad(x, (3, 0)), F.pad(torch.ones_like(x), (3, 0))
    longer = F.pad(answer, (3, 0), value=False)
    want = mdlm_loss(model, x, answer, mask_id=M, weighted=False)
    got = mdlm_loss(model, padded, longer, mask_id=M, attention_mask=real, weighted=False)
    assert torch.allclose(want, got, atol=1e-4)
    seen = mdlm_loss(model, padded, longer, mask_id=M, weighted=False)
    assert not torch.allclose(want, seen, atol=1e-4)


class Knows(torch.nn.Module):
    """A shifted model that knows every token: its logits at i-1 say the token of i. Takes the
    keywords that a transformers model takes, and `shift_logits` in its config, as Dream has
    it."""

    def __init__(self, x, shift):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="dlm_spec", shift_logits=shift,
                                      max_position_embeddings=64)
        read_at = x.roll(-1, 1) if shift else x
        self.logits = 30.0 * F.one_hot(read_at, 40).float()

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=False,
                logits_to_keep=0, **_):
        keep = (
            slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        )
        return SimpleNamespace(logits=self.logits.expand(len(input_ids), -1, -1)[:, keep])

    def get_output_embeddings(self):
        return SimpleNamespace(weight=torch.zeros(1))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shift", [False, True])
def test_the_loss_of_a_shifted_model_reads_it_where_the_denoiser_does(shift, weighted):
    """A model that knows every token has loss 0 and likelihood 1, shifted or not."""
    x = random_ids(1, 10)
    answer = (torch.arange(10) >= 6)[None]
    model = Knows(x, shift)
    assert float(log_likelihood(Denoiser(model, M, shift=shift), x[:, :6], x[:, 6:],
                                n_samples=4)) == pytest.approx(0, abs=1e-5)
    assert float(mdlm_loss(model, x, answer, mask_id=M, weighted=weighted,
                           generator=seeded(0))) == pytest.approx(0, abs=1e-5)


def test_a_shifted_checkpoint_s_loss_is_read_one_position_earlier(everything_masked):
    """Qwen2 as Dream saves it: the masked answer at 6..9 is predicted at 5..8."""
    model = hooked(tiny_qwen2(2))
    model.config.shift_logits = True
    x = random_ids(1, 10)
    answer = (torch.arange(10) >= 6)[None]
    want = F.cross_entropy(model(x.masked_fill(answer, M)).logits[0, 5:9], x[answer])
    got = mdlm_loss(model, x, answer, mask_id=M, weighted=False)
    assert torch.allclose(got, want, atol=1e-5)
