# SPDX-License-Identifier: MIT
"""Section 2, Decode: prompts, blocks, ends of text, what is recorded and who is told. Shown
through sample_llada on tables whose order of commits is known; the mask id is 9, EOS 8."""
import inspect
import math

import numpy as np
import pytest
import torch
from helpers import Table, commit_order, random_ids, sharp_table, tiny_llama
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
)

from dlm_spec import (
    Decode,
    Denoiser,
    best,
    sample_dual_diffusion,
    sample_fast_dllm,
    sample_llada,
    verify_confidence,
    verify_kl,
)

M, V, EOS = 9, 10, 8


def table(*rows):
    """Logits from probabilities, one dict {id: p} per position;
    the rest is spread over ids 0..8."""
    out = torch.full((len(rows), V), -torch.inf)
    for i, row in enumerate(rows):
        rest = (1 - sum(row.values())) / (V - 1 - len(row))
        out[i] = torch.tensor([row.get(t, rest) for t in range(V)]).log()
        out[i, M] = -torch.inf
    return out


def denoiser_of(logits, **kw):
    return Denoiser(Table(logits), M, **kw)


ORDER = table({}, {3: .6, 4: .38}, {5: .5}, {2: .9}, {7: .7})    # position 0 is the prompt


# ---------------------------------------------------------------------------------------------
# Decode itself

@torch.no_grad()
def test_a_sampler_is_a_loop_over_blocks_and_forwards():
    """The example of Decode's docstring, with the best mask of each forward."""
    run = Decode(denoiser_of(ORDER), [[1]], gen_length=4, block_length=2)
    for block in run.blocks():
        while run.forward(block & run.masks):
            run.step(best(run.score, run.asked))
    out = run.output()
    assert commit_order(out) == [[0], [1], [2], [3]]
    assert out.sequences.tolist() == [[1, 3, 5, 2, 7]]
    assert (out.nfe.tolist(), out.positions.tolist(), out.calls) == ([4], [20], 4)


@torch.no_grad()
def test_only_rows_that_ask_are_forwarded_and_counted():
    """nfe and positions per row, real tokens only; nothing asked is no forward, and False."""
    model = Table(torch.zeros(6, V))
    run = Decode(Denoiser(model, M), [[1, 2, 3, 4], [1, 2], [1, 2, 3]], gen_length=2)
    ask = run.masks & torch.tensor([[True], [True], [False]])
    assert run.forward(ask) and model.rows == 2
    assert (run.nfe.tolist(), run.positions.tolist(), run.calls) == ([1, 1, 0], [6, 4, 0], 1)
    assert not run.forward(run.masks & False) and model.calls == 1
    assert run.logits.shape == (4, V) and torch.equal(run.asked, ask)
    assert torch.equal(run.tokens[~ask], run.x[~ask]) and (run.confidence[~ask] == 1).all()


def test_common_keywords_are_documented_once():
    """Each keyword that all samplers take, by its name, in the docstring of Decode."""
    keywords = {name for name, p in inspect.signature(Decode).parameters.items()
                if p.kind is p.KEYWORD_ONLY}
    documented = inspect.getdoc(Decode)
    assert len(keywords) > 9
    assert [k for k in keywords if f" {k}: " not in documented] == []


def test_an_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'treshold'"):
        Decode(denoiser_of(ORDER), [[1]], treshold=.5)


# ---------------------------------------------------------------------------------------------
# Prompts and blocks

@pytest.mark.parametrize("prompt", [
    [3, 4], [[3, 4]], (3, 4), torch.tensor([3, 4]), torch.tensor([[3, 4]], dtype=torch.int32),
    [torch.tensor([3, 4])], list(torch.tensor([3, 4])), np.array([3, 4]), [np.array([3, 4])],
    np.array([[3, 4]]), list(np.array([3, 4]))])
def test_prompts_come_in_many_forms(prompt):
    want = sample_llada(denoiser_of(ORDER), torch.tensor([[3, 4]]), gen_length=3).sequences
    assert torch.equal(sample_llada(denoiser_of(ORDER), prompt, gen_length=3).sequences, want)


def test_hidden_ids_never_reach_the_model():
    """Padding may hold anything, -100 included."""
    d = Denoiser(tiny_llama(1), 39)
    a, b = (sample_llada(d, torch.tensor([[pad, 3]]), attention_mask=[[0, 1]], gen_length=3)
            for pad in (-100, 7))
    assert torch.equal(a.generated, b.generated)


def test_blocks_are_filled_left_to_right():
    out = sample_llada(denoiser_of(ORDER), torch.tensor([[1]]), gen_length=4, block_length=2)
    assert commit_order(out) == [[0], [1], [2], [3]]


def test_infilling_without_new_tokens_keeps_what_is_given():
    """CASES 14: [a, M, b, M] returns length 4, a and b kept."""
    out = sample_llada(Denoiser(tiny_llama(1), 39), torch.tensor([[5, 39, 7, 39]]),
                       gen_length=0)
    assert out.sequences.shape == (1, 4)
    assert out.sequences[0, [0, 2]].tolist() == [5, 7] and (out.sequences != 39).all()


def test_an_all_mask_canvas_is_legal_and_a_full_one_costs_nothing():
    d = Denoiser(tiny_llama(1), 39)
    assert (sample_llada(d, torch.full((1, 5), 39), gen_length=0).sequences != 39).all()
    full = sample_llada(d, torch.tensor([[5, 7]]), gen_length=0)
    assert (full.sequences.tolist() == [[5, 7]] and full.nfe.tolist() == [0]
            and full.tokens_per_forward.tolist() == [0])


def test_holes_of_the_prompt_belong_to_the_first_block():
    prompt = torch.tensor([[1, M]])
    out = sample_llada(denoiser_of(table({}, {3: .3}, {4: .9}, {5: .8})), prompt, gen_length=2,
                       block_length=1)
    assert out.commit_step.tolist() == [[0, 2, 1, 3]]


def test_shifted_decoding_reads_one_position_earlier():
    """CASES 19, uncached: position p says "token p+1"; shifted decoding gives the
    position index."""
    out = sample_llada(denoiser_of(sharp_table(range(1, 9), V), shift=True), [[0], [0, 1, 2]],
                       gen_length=4)
    assert out.generated.tolist() == [[1, 2, 3, 4], [3, 4, 5, 6]]


# ---------------------------------------------------------------------------------------------
# Sampling

def test_equal_seeds_reproduce_and_greedy_ignores_the_seed():
    d = Denoiser(tiny_llama(1), 39)

    def run(seed, temperature):
        return sample_llada(d, [[1, 2]], gen_length=12, temperature=temperature,
                            generator=torch.Generator().manual_seed(seed)).sequences
    assert torch.equal(run(0, 1.0), run(0, 1.0))
    assert not torch.equal(run(0, 1.0), run(1, 1.0))
    assert torch.equal(run(0, 0.0), run(1, 0.0))


def test_a_model_that_predicts_the_mask_or_a_padded_row_is_overruled():
    """CASES 9: bounded steps, no M, no id from n_tokens on."""
    logits = torch.zeros(6, V)
    logits[:, M], logits[:, 8] = 9.0, 5.0
    out = sample_llada(denoiser_of(logits, n_tokens=7), torch.tensor([[1, 2]]), gen_length=4)
    assert (out.generated < 7).all() and out.nfe.tolist() == [4]


# ---------------------------------------------------------------------------------------------
# Ends of text

def test_never_emit_and_only_postpone_are_two_switches():
    """CASES 17: suppressed, the eos is not in the text; postponed, it comes last."""
    t = table({}, {EOS: .9, 2: .05}, {3: .5}, {4: .6})
    d = denoiser_of(t, eos_ids=(EOS,))
    plain = sample_llada(d, torch.tensor([[1]]), gen_length=3)
    assert plain.generated.tolist() == [[EOS, 3, 4]] and commit_order(plain) == [[0], [2], [1]]
    postponed = sample_llada(d, torch.tensor([[1]]), gen_length=3, postpone_eos=True)
    assert postponed.generated.tolist() == [[EOS, 3, 4]]
    assert commit_order(postponed) == [[2], [1], [0]]
    suppressed = sample_llada(d, torch.tensor([[1]]), gen_length=3, suppress_eos=True)
    assert suppressed.generated.tolist() == [[2, 3, 4]]
    assert commit_order(suppressed) == [[2], [1], [0]]


def test_suppression_bans_the_first_eos_id_only():
    d = denoiser_of(table({}, {EOS: .6, 7: .3}, {7: .9}), eos_ids=(EOS, 7))
    assert sample_llada(d, torch.tensor([[1]]), gen_length=2,
                        suppress_eos=True).generated.tolist() == [[7, 7]]


def test_postponing_acts_after_sampling():
    """At T=0 and T=1e-3 the same commit order; all-eos blocks still finish."""
    d = denoiser_of(table({}, {EOS: .9}, {3: .5}, {EOS: .8}, {4: .6}), eos_ids=(EOS,))
    runs = [sample_llada(d, torch.tensor([[1]]), gen_length=4, postpone_eos=True,
                         temperature=T,
                         generator=torch.Generator().manual_seed(0)) for T in (0.0, 1e-3)]
    assert commit_order(runs[0]) == commit_order(runs[1]) == [[3], [1], [0], [2]]
    d = denoiser_of(table({}, {EOS: .9}, {EOS: .5}), eos_ids=(EOS,))
    out = sample_llada(d, torch.tensor([[1]]), gen_length=2, postpone_eos=True)
    assert commit_order(out) == [[0], [1]]


@pytest.mark.parametrize("remasking", ["low_confidence", "margin", "entropy"])
def test_a_postponed_eos_is_last_whatever_the_confidence_is(remasking):
    """Position 2 is sure of eos, the others of nothing. Minus an entropy is never above 0: a
    postponed eos has to lose to that as well."""
    logits = torch.zeros(4, V)
    logits[2, EOS] = 30.0
    d = denoiser_of(logits, eos_ids=(EOS,))
    for postpone, order in ((True, [0, 1, 3, 2]), (False, [0, 2, 1, 3])):
        out = sample_llada(d, [[1]], gen_length=3, postpone_eos=postpone, remasking=remasking)
        assert out.commit_step[0].tolist() == order


def test_early_stop_costs_one_block_and_gives_the_trimmed_text():
    """CASES 16: an eos in block 1 of 4. Nothing but eos follows the first one."""
    t = table({}, *([{2: .9}, {EOS: .9}, {3: .8}] + [{4: .9}] * 9))
    d = denoiser_of(t, eos_ids=(EOS,))
    full = sample_llada(d, torch.tensor([[1]]), gen_length=12, block_length=3)
    out = sample_llada(d, torch.tensor([[1]]), gen_length=12, block_length=3, early_stop=True)
    assert full.nfe.tolist() == [12] and out.nfe.tolist() == [3]
    assert out.generated.tolist() == [[2] + [EOS] * 11] and full.generated[0, 2:].ne(EOS).all()
    assert torch.allclose(out.tokens_per_forward, torch.tensor(1 / 3))


def test_early_stop_leaves_the_other_rows_running():
    def logits(ids, position_ids):
        out = table({}, {2: .9}, {3: .9}, {4: .9}, {5: .9})[position_ids]
        out[ids[:, 0] == 1, 1] = table({EOS: .9})[0]
        return out
    out = sample_llada(denoiser_of(logits, eos_ids=(EOS,)), torch.tensor([[1], [2]]),
                       gen_length=4, block_length=2, early_stop=True)
    assert out.generated.tolist() == [[EOS] * 4, [2, 3, 4, 5]] and out.nfe.tolist() == [2, 4]


def test_early_stop_shows_in_the_history_and_counts_as_given():
    d = denoiser_of(table({}, {2: .9}, {EOS: .8}, {3: .7}, {4: .9}), eos_ids=(EOS,))
    out = sample_llada(d, [[1]], gen_length=4, block_length=3, early_stop=True, history=True)
    assert torch.equal(out.history[-1], out.sequences)
    assert out.commit_step.tolist() == [[0, 1, 2, 0, 0]]
    assert out.commit_confidence[0, 3:].tolist() == [1, 1]


def test_throughput_counts_generated_tokens_before_the_eos():
    """CASES 32: not the prompt, not the eos, not what follows it."""
    d = denoiser_of(table({}, {}, {}, {2: .9}, {3: .9}, {EOS: .9}, {4: .9}), eos_ids=(EOS,))
    out = sample_llada(d, torch.tensor([[1, 1, 1]]), gen_length=4, steps=2)
    assert out.tokens_per_forward.tolist() == [1.0]       # 2 tokens in 2 forwards


def test_suppressing_the_only_eos_contradicts_waiting_for_it():
    d = denoiser_of(torch.zeros(5, V), eos_ids=(EOS,))
    with pytest.raises(ValueError, match="can still be emitted"):
        sample_llada(d, torch.tensor([[1]]), gen_length=4, suppress_eos=True, early_stop=True)


# ---------------------------------------------------------------------------------------------
# Logits processors

def test_a_logits_processor_sees_each_row_without_its_padding():
    """CASES 38: EOS has logit 3, id 1 has 2.5, and EOS is the padding. A repetition penalty
    that saw the padding would forbid EOS in the short row of a batch from the start."""
    d = Denoiser(Table(torch.tensor([3.0, 2.5, 0, 0, 0, 0]).expand(20, 6)), 5, eos_ids=(0,),
                 pad_id=0)
    processor = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)])
    alone, batch = (sample_llada(d, rows, gen_length=4, logits_processor=processor)
                    for rows in ([[3, 3]], [[3, 3], [3, 3, 3, 3, 3]]))
    assert alone.generated.tolist() == [[0, 1, 0, 0]]
    assert batch.generated.tolist() == [[0, 1, 0, 0]] * 2


def test_a_logits_processor_is_given_one_row_at_a_time():
    """(n, ids) and (n, V): the row's visible canvas n times, and the logits of its n masks."""
    seen = []

    def processor(ids, logits):
        seen.append((ids.tolist(), logits.shape))
        return logits
    sample_llada(denoiser_of(ORDER), [[1], [2, 3, 4]], gen_length=2, steps=1,
                 logits_processor=processor)
    assert seen == [([[1, M, M]] * 2, (2, V)), ([[2, 3, 4, M, M]] * 2, (2, V))]


def test_processors_of_transformers_are_taken():
    flat = denoiser_of(table({}, {3: .2}, {5: .2}))
    only_top = sample_llada(flat, torch.tensor([[1]]), gen_length=2, temperature=5.0,
                            logits_processor=LogitsProcessorList([TopKLogitsWarper(1)]))
    assert only_top.generated.tolist() == [[3, 5]]


@pytest.mark.parametrize("sampler", [sample_llada, sample_fast_dllm, sample_dual_diffusion])
def test_a_processor_that_lifts_the_mask_is_overruled(sampler):
    """M is never emitted, whatever a LogitsProcessor says."""
    out = sampler(Denoiser(tiny_llama(1), 39), [[3, 4]], gen_length=4, block_length=4,
                  logits_processor=lambda ids, z: z.index_fill(1, torch.tensor([39]), 99.0))
    assert (out.sequences != 39).all()


@pytest.mark.parametrize("knobs", [
    dict(suppress_eos=True, verify=verify_kl),
    dict(suppress_eos=True, verify=verify_confidence),
    dict(logits_processor=SuppressTokensLogitsProcessor([0]), verify=verify_kl),
    dict(logits_processor=SuppressTokensLogitsProcessor([0]), verify=verify_confidence)],
    ids=["suppress, kl", "suppress, confidence", "processor, kl", "processor, confidence"])
def test_what_is_judged_is_banned_as_what_is_drafted(knobs):
    """CASES 33: drafter and verifier are the same function of the position, so that nothing is
    taken back: two forwards for 16 tokens, of which id 1 has probability .54 without EOS,
    whose logit is the largest."""
    logits = torch.zeros(40, 6)
    logits[:, 0], logits[:, 1], logits[:, 5] = 3.0, 2.0, -9.0
    out = sample_dual_diffusion(Denoiser(Table(logits), 5, eos_ids=(0,)), [[3, 3]],
                                gen_length=16,
                                block_length=16, threshold=.2, cache=None, **knobs)
    assert out.revisions == [] and out.nfe.tolist() == [2] and (out.generated == 1).all()


# ---------------------------------------------------------------------------------------------
# Who is told

def test_callback_and_history_see_every_forward():
    steps = []
    out = sample_llada(denoiser_of(ORDER), torch.tensor([[1]]), gen_length=4, steps=2,
                       history=True, callback=steps.append)
    assert [(int(s["committed"].sum()), int(s["nfe"][0]), s["calls"], s["prompt_length"])
            for s in steps] == [(2, 1, 1, 1), (2, 2, 2, 1)]     # as when it was called
    assert torch.equal(steps[-1]["x"], out.sequences)
    assert ([int((x == M).sum()) for x in out.history] == [4, 2, 0]
            and torch.equal(out.history[-1], out.sequences))
    assert torch.allclose(out.commit_confidence, torch.tensor([[1, .6, .5, .9, .7]]))


def test_a_decode_that_is_stopped_is_not_filled_with_eos():
    """early_stop fills the rest of a row at the end of a block, not where a callback stops."""
    d = denoiser_of(table({}, {3: .5}, {EOS: .9}, {2: .4}), eos_ids=(EOS,))
    knobs = dict(gen_length=3, early_stop=True)
    assert sample_llada(d, [[1]], **knobs).generated.tolist() == [[3, EOS, EOS]]
    out = sample_llada(d, [[1]], **knobs, callback=lambda step: True)
    assert out.generated.tolist() == [[M, EOS, M]] and out.nfe.tolist() == [1]
    assert out.tokens_per_forward.tolist() == [0] and out.commit_step.tolist() == [[0, 0, 1, 0]]


@pytest.mark.parametrize("result", [None, False, 1, torch.ones(2, 3)], ids=repr)
def test_a_callback_that_returns_anything_else_lets_it_go_on(result):
    """What a lambda happens to return is no request to stop."""
    out = sample_llada(denoiser_of(ORDER), [[1]], gen_length=4, callback=lambda step: result)
    assert out.calls == 4 and (out.sequences != M).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_processor_that_breaks_the_logits_is_an_error(value):
    with pytest.raises(ValueError, match="logits cannot be used"):
        sample_llada(denoiser_of(ORDER), [[1]], gen_length=4,
                     logits_processor=lambda ids, logits: logits.index_fill(
                         1, torch.tensor([2]), value))


def test_a_result_can_be_used_in_training():
    """The ids are ordinary tensors, not inference-mode ones: autograd may save them."""
    model = tiny_llama(1)
    out = sample_llada(Denoiser(model, 39), random_ids(1, 2), gen_length=4)
    model(input_ids=out.sequences).logits.sum().backward()
