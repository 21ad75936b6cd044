"""sample_llada: orders worked out by hand on tables, then batches, masks, stops and errors."""
import math

import numpy as np
import pytest
import torch
from helpers import Table, random_ids, tiny_llama, tiny_qwen2
from transformers import LogitsProcessorList, TextDiffusionStreamer, TopKLogitsWarper

import dlm_spec
from dlm_spec import Denoiser, sample_llada

M, V = 9, 10        # the tables below: ten ids, the last is the mask


def table(*rows):
    """Logits from probabilities, one dict {id: p} per position;
    the rest is spread over ids 0..8."""
    out = torch.full((len(rows), V), -torch.inf)
    for i, row in enumerate(rows):
        rest = (1 - sum(row.values())) / (V - 1 - len(row))
        out[i] = torch.tensor([row.get(t, rest) for t in range(V)]).log()
        out[i, M] = -torch.inf
    return out


def denoiser_of(t, **kw):
    return Denoiser(Table(t), M, **kw)


def order(out):
    """Generated positions by the forward that filled them."""
    steps = out.commit_step[0, out.prompt_length:].tolist()
    return [[i for i, s in enumerate(steps) if s == n] for n in range(1, max(steps) + 1)]


ORDER = table({}, {3: .6, 4: .38}, {5: .5}, {2: .9}, {7: .7})    # position 0 is the prompt


@pytest.mark.parametrize("remasking, expected", [
    ("low_confidence", [[2], [3], [0], [1]]),     # .9 .7 .6 .5
    ("margin", [[2], [3], [1], [0]]),             # .8875 .6625 .4375 .22
    ("entropy", [[2], [0], [3], [1]]),            # position 1 has two likely tokens, little entropy
])
def test_the_surest_mask_is_filled_first(remasking, expected):
    out = sample_llada(denoiser_of(ORDER), torch.tensor([[1]]), gen_length=4, remasking=remasking)
    assert out.sequences.tolist() == [[1, 3, 5, 2, 7]]
    assert order(out) == expected
    assert out.nfe.tolist() == [4]


def test_blocks_are_filled_left_to_right():
    out = sample_llada(denoiser_of(ORDER), torch.tensor([[1]]), gen_length=4, block_length=2)
    assert order(out) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("n, steps, expected", [(4, 4, [1, 1, 1, 1]), (10, 4, [3, 3, 2, 2]),
                                                (2, 5, [1, 1, 0, 0, 0]), (0, 3, [0, 0, 0])])
def test_quotas_are_even_and_the_first_steps_take_the_remainder(n, steps, expected):
    """CASES 13: 4 tokens over 4 steps is [1, 1, 1, 1]."""
    assert dlm_spec.quota_schedule(torch.tensor([n]), steps).tolist() == [expected]


def test_short_last_block_and_too_many_steps():
    """CASES 12: exactly 6 new tokens from blocks of 4; steps > gen_length never costs more
    than gen_length."""
    d = Denoiser(tiny_llama(1), 39)
    out = sample_llada(d, random_ids(1, 3), gen_length=6, block_length=4)
    assert out.sequences.shape == (1, 9) and out.nfe.tolist() == [6]
    out = sample_llada(d, random_ids(1, 3), gen_length=6, block_length=4, steps=50)
    assert out.nfe.tolist() == [6] and (out.sequences != 39).all()
    assert sample_llada(d, random_ids(1, 3), gen_length=6, block_length=4,
                        steps=3).nfe.tolist() == [3]


def test_infilling_without_new_tokens_keeps_what_is_given():
    """CASES 14: [a, M, b, M] returns length 4, a and b kept."""
    out = sample_llada(Denoiser(tiny_llama(1), 39), torch.tensor([[5, 39, 7, 39]]), gen_length=0)
    assert out.sequences.shape == (1, 4)
    assert out.sequences[0, 0] == 5 and out.sequences[0, 2] == 7 and (out.sequences != 39).all()


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


ROWS = [[4, 8, 15], [16, 23, 7, 2, 9, 1], [3]]


@pytest.mark.parametrize("knobs", [
    dict(), dict(block_length=4, steps=5), dict(remasking="margin", steps=6),
    dict(remasking="entropy", cfg_scale=.7, block_length=8, steps=4)])
@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
def test_rows_of_a_batch_equal_single_runs(make, shift, knobs):
    """CASES 2: three prompts of different lengths, greedy, fp64: the same tokens,
    NFE and positions."""
    d = Denoiser(make(2, dtype=torch.float64), 39, shift=shift)
    out = sample_llada(d, ROWS, gen_length=10, **knobs)
    for i, row in enumerate(ROWS):
        one = sample_llada(d, [row], gen_length=10, **knobs)
        assert torch.equal(out.generated[i], one.generated[0])
        assert out.nfe[i] == one.nfe[0] and out.positions[i] == one.positions[0]
        assert torch.equal(out.commit_step[i, -10:], one.commit_step[0, -10:])


@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
def test_rows_equal_single_runs_at_a_temperature_with_a_generator_per_row(remasking):
    d = Denoiser(tiny_llama(2, dtype=torch.float64), 39)
    def seeds():
        return [torch.Generator().manual_seed(i) for i in range(3)]
    knobs = dict(gen_length=8, steps=4, temperature=.8, remasking=remasking)
    out = sample_llada(d, ROWS, generator=seeds(), **knobs)
    for i, row in enumerate(ROWS):
        assert torch.equal(out.generated[i], sample_llada(
            d, [row], generator=[seeds()[i]], **knobs).generated[0])


def test_equal_seeds_reproduce_and_greedy_ignores_the_seed():
    d = Denoiser(tiny_llama(1), 39)
    def run(seed, temperature):
        return sample_llada(d, [[1, 2]], gen_length=12, temperature=temperature,
                            generator=torch.Generator().manual_seed(seed)).sequences
    assert torch.equal(run(0, 1.0), run(0, 1.0))
    assert not torch.equal(run(0, 1.0), run(1, 1.0))
    assert torch.equal(run(0, 0.0), run(1, 0.0))


def test_every_row_is_sampled_at_a_temperature():
    """CASES 5: rows peaked on ids 3 and 7 give 3s and 7s."""
    def peaked(ids, position_ids):
        logits = torch.zeros(*ids.shape, V)
        logits[0, :, 3], logits[1, :, 7] = 50, 50
        return logits
    out = sample_llada(denoiser_of(peaked), torch.tensor([[1], [2]]), gen_length=4, temperature=1.0)
    assert out.generated.tolist() == [[3] * 4, [7] * 4]


def test_a_row_that_is_full_stays_as_it_is():
    """CASES 6: B=2, one row without masks."""
    d = Denoiser(tiny_llama(1), 39)
    out = sample_llada(d, torch.tensor([[5, 6, 7], [5, 39, 39]]), gen_length=0)
    assert out.sequences[0].tolist() == [5, 6, 7] and out.nfe.tolist() == [0, 2]
    assert (out.sequences != 39).all()


def test_a_model_that_predicts_the_mask_or_a_padded_row_is_overruled():
    """CASES 9: bounded steps, no M, no id from n_tokens on."""
    t = torch.zeros(6, V)
    t[:, M], t[:, 8] = 9.0, 5.0
    out = sample_llada(denoiser_of(t, n_tokens=7), torch.tensor([[1, 2]]), gen_length=4)
    assert (out.generated < 7).all() and out.nfe.tolist() == [4]


def test_nfe_is_the_number_of_calls_of_the_model():
    """CASES 15, first half: counted by a wrapper around the model,
    early rows and guidance included."""
    for knobs, per_call in ((dict(), 1), (dict(cfg_scale=1.0), 2), (dict(steps=3), 1)):
        model = Table(ORDER)
        out = sample_llada(Denoiser(model, M), torch.tensor([[1], [2]]), gen_length=4, **knobs)
        assert out.nfe.sum() == model.rows and out.calls == model.calls
        assert (out.nfe == per_call * model.calls).all()


def test_processed_positions_of_the_uncached_sampler():
    """CASES 22: prompt 6, G 16, block 8, 8 steps: 8 x 22 = 176 positions."""
    out = sample_llada(Denoiser(tiny_llama(1), 39), random_ids(1, 6), gen_length=16, block_length=8,
                       steps=8)
    assert out.positions.tolist() == [176]


def test_gumbel_noise_does_not_overflow_and_follows_the_softmax():
    """CASES 15, second half: logits 800 / 790 at T=1."""
    logits = torch.tensor([[800.0, 790.0]]).expand(1000, 2)
    assert (dlm_spec.gumbel_argmax(logits, 1.0, torch.Generator().manual_seed(0))
            == 0).float().mean() > .99
    logits = torch.tensor([[801.0, 800.0, -torch.inf]]).expand(20000, 3)
    share = (dlm_spec.gumbel_argmax(logits, 2.0, torch.Generator().manual_seed(0))
             == 0).double().mean()
    p = 1 / (1 + math.exp(-.5))
    assert abs(share - p) < 4 * (p * (1 - p) / 20000) ** .5


def test_confidence_at_a_temperature_by_both_rules():
    """CASES 29: logits [2, 1, 0], T=.5: .6652 untempered (LLaDA), .8668 tempered (Dream)."""
    logits = torch.tensor([[2.0, 1.0, 0.0]]).repeat(200, 1)
    for tempered, p in ((False, .6652), (True, .8668)):
        x0, c = dlm_spec.predict(logits, temperature=.5, tempered_confidence=tempered,
                                 generator=torch.Generator().manual_seed(0))
        assert torch.allclose(c[x0 == 0], torch.tensor(p), atol=1e-4)


def test_tempered_confidence_keeps_float64():
    """1e-9 apart, which float32 does not see at 1: the order of commits would be that of places."""
    logits = torch.tensor([[1.0, 0.0], [1.0 + 1e-9, 0.0]], dtype=torch.float64)
    _, c = dlm_spec.predict(logits, temperature=.5, remasking="entropy", tempered_confidence=True)
    assert c.dtype == torch.float64 and c[1] > c[0]


def test_the_largest_temporary_is_bounded_by_the_candidate_rows():
    """CASES 30: no tensor of a step holds more than N x V numbers, N the masks of the block."""
    from torch.utils._python_dispatch import TorchDispatchMode
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, (tuple, list)) else [out])
                         if isinstance(t, torch.Tensor) and "embedding" not in str(func))
            return out

    vocab = 4000
    d = Denoiser(tiny_llama(1, vocab=vocab), vocab - 1)
    for knobs in (dict(temperature=1.0), dict(remasking="entropy"), dict(remasking="margin")):
        sizes.clear()
        with Sizes():
            sample_llada(d, random_ids(1, 50), gen_length=16, block_length=4, steps=4, **knobs)
        weights = vocab * 32
        assert max(s for s in sizes if s != weights) <= 4 * vocab


EOS = 8


def test_never_emit_and_only_postpone_are_two_switches():
    """CASES 17: suppressed, the eos is not in the text; postponed, it comes last."""
    t = table({}, {EOS: .9, 2: .05}, {3: .5}, {4: .6})
    d = denoiser_of(t, eos_ids=(EOS,))
    plain = sample_llada(d, torch.tensor([[1]]), gen_length=3)
    assert plain.generated.tolist() == [[EOS, 3, 4]] and order(plain) == [[0], [2], [1]]
    postponed = sample_llada(d, torch.tensor([[1]]), gen_length=3, postpone_eos=True)
    assert postponed.generated.tolist() == [[EOS, 3, 4]] and order(postponed) == [[2], [1], [0]]
    suppressed = sample_llada(d, torch.tensor([[1]]), gen_length=3, suppress_eos=True)
    assert suppressed.generated.tolist() == [[2, 3, 4]] and order(suppressed) == [[2], [1], [0]]


def test_suppression_bans_the_first_eos_id_only():
    d = denoiser_of(table({}, {EOS: .6, 7: .3}, {7: .9}), eos_ids=(EOS, 7))
    assert sample_llada(d, torch.tensor([[1]]), gen_length=2,
                        suppress_eos=True).generated.tolist() == [[7, 7]]


def test_postponing_acts_after_sampling():
    """At T=0 and T=1e-3 the same commit order; all-eos blocks still finish."""
    d = denoiser_of(table({}, {EOS: .9}, {3: .5}, {EOS: .8}, {4: .6}), eos_ids=(EOS,))
    runs = [sample_llada(d, torch.tensor([[1]]), gen_length=4, postpone_eos=True, temperature=T,
                         generator=torch.Generator().manual_seed(0)) for T in (0.0, 1e-3)]
    assert order(runs[0]) == order(runs[1]) == [[3], [1], [0], [2]]
    d = denoiser_of(table({}, {EOS: .9}, {EOS: .5}), eos_ids=(EOS,))
    assert order(sample_llada(d, torch.tensor([[1]]), gen_length=2, postpone_eos=True)) == [
        [0], [1]]


def test_early_stop_costs_one_block_and_gives_the_trimmed_text():
    """CASES 16: an eos in block 1 of 4. Nothing but eos follows the first one."""
    t = table({}, *([{2: .9}, {EOS: .9}, {3: .8}] + [{4: .9}] * 9))
    d = denoiser_of(t, eos_ids=(EOS,))
    full = sample_llada(d, torch.tensor([[1]]), gen_length=12, block_length=3)
    out = sample_llada(d, torch.tensor([[1]]), gen_length=12, block_length=3, early_stop=True)
    assert full.nfe.tolist() == [12] and out.nfe.tolist() == [3]
    assert out.generated.tolist() == [[2] + [EOS] * 11] and full.generated[0, 2:].ne(EOS).all()
    assert dlm_spec.before_eos(full.generated, (EOS,)).sum() == 1


def test_early_stop_leaves_the_other_rows_running():
    def logits(ids, position_ids):
        out = table({}, {2: .9}, {3: .9}, {4: .9}, {5: .9})[position_ids]
        out[ids[:, 0] == 1, 1] = table({EOS: .9})[0]
        return out
    out = sample_llada(denoiser_of(logits, eos_ids=(EOS,)), torch.tensor([[1], [2]]), gen_length=4,
                       block_length=2, early_stop=True)
    assert out.generated.tolist() == [[EOS] * 4, [2, 3, 4, 5]] and out.nfe.tolist() == [2, 4]


def test_throughput_counts_generated_tokens_before_the_eos():
    """CASES 32: not the prompt, not the eos, not what follows it."""
    d = denoiser_of(table({}, {}, {}, {2: .9}, {3: .9}, {EOS: .9}, {4: .9}), eos_ids=(EOS,))
    out = sample_llada(d, torch.tensor([[1, 1, 1]]), gen_length=4, steps=2)
    assert out.tokens_per_forward.tolist() == [1.0]       # 2 tokens in 2 forwards


def test_shifted_decoding_reads_one_position_earlier():
    """CASES 19, uncached: position p says "token p+1"; shifted decoding gives the
    position index."""
    t = torch.full((8, V), -9.0)
    t[torch.arange(8), torch.arange(8) + 1] = 9.0
    out = sample_llada(denoiser_of(t, shift=True), [[0], [0, 1, 2]], gen_length=4)
    assert out.generated.tolist() == [[1, 2, 3, 4], [3, 4, 5, 6]]


def test_ties_go_to_the_lowest_index():
    assert order(sample_llada(denoiser_of(torch.zeros(5, V)), torch.tensor([[1]]),
                              gen_length=4)) == [[0], [1], [2], [3]]


def test_callback_history_and_streamer_see_every_forward():
    seen = []

    class Streamer:
        def put(self, value):
            seen.append(("put", value.shape[-1]))

        def put_draft(self, value):
            seen.append(("draft", int((value == M).sum())))

        def end(self):
            seen.append("end")
    steps = []
    out = sample_llada(denoiser_of(ORDER), torch.tensor([[1]]), gen_length=4, steps=2, history=True,
                       streamer=Streamer(),
                       callback=lambda s: steps.append((int(s["committed"].sum()),
                                                        int(s["nfe"][0]))))
    assert seen == [("put", 1), ("draft", 2), ("draft", 0), ("put", 4), "end"]
    assert steps == [(2, 1), (2, 2)]
    assert ([int((x == M).sum()) for x in out.history] == [4, 2, 0]
            and torch.equal(out.history[-1], out.sequences))
    assert torch.allclose(out.commit_confidence, torch.tensor([[1, .6, .5, .9, .7]]))


def test_transformers_own_streamer_and_logits_processors_are_taken(capsys):
    class Tokenizer:
        all_special_ids = ()
        def decode(self, ids, **_):
            return " ".join(map(str, torch.as_tensor(ids).tolist()))
    d = denoiser_of(ORDER)
    sample_llada(d, torch.tensor([[1]]), gen_length=4,
                 streamer=TextDiffusionStreamer(Tokenizer(), skip_prompt=True))
    assert "3 5 2 7" in capsys.readouterr().out
    flat = denoiser_of(table({}, {3: .2}, {5: .2}))
    only_top = sample_llada(flat, torch.tensor([[1]]), gen_length=2, temperature=5.0,
                            logits_processor=LogitsProcessorList([TopKLogitsWarper(1)]))
    assert only_top.generated.tolist() == [[3, 5]]


def test_guidance_moves_the_prediction_away_from_the_unconditional_one():
    def logits(ids, position_ids):
        out = torch.zeros(*ids.shape, V)
        out[..., 3], out[..., 4] = 1.0, 1.1
        seen = (ids != M).any(1)            # the prompt adds to 3
        out[seen, :, 3] += .05
        return out
    d = denoiser_of(logits)
    assert sample_llada(d, torch.tensor([[1]]), gen_length=1).generated.tolist() == [[4]]
    assert sample_llada(d, torch.tensor([[1]]), gen_length=1,
                        cfg_scale=2.0).generated.tolist() == [[3]]


def test_a_processor_that_lifts_the_mask_is_overruled():
    """M is never emitted, whatever a LogitsProcessor says."""
    for sampler in (sample_llada, dlm_spec.sample_fast_dllm, dlm_spec.sample_dual_diffusion):
        out = sampler(Denoiser(tiny_llama(1), 39), [[3, 4]], gen_length=4, block_length=4,
                      logits_processor=lambda ids, z: z.index_fill(1, torch.tensor([39]), 99.0))
        assert (out.sequences != 39).all()


def test_early_stop_shows_in_the_history_and_counts_as_given():
    d = denoiser_of(table({}, {2: .9}, {EOS: .8}, {3: .7}, {4: .9}), eos_ids=(EOS,))
    out = sample_llada(d, [[1]], gen_length=4, block_length=3, early_stop=True, history=True)
    assert torch.equal(out.history[-1], out.sequences)
    assert out.commit_step.tolist() == [[0, 1, 2, 0, 0]]
    assert out.commit_confidence[0, 3:].tolist() == [1, 1]


def test_what_the_callback_was_given_stays():
    steps = []
    sample_llada(denoiser_of(ORDER), [[1]], gen_length=4, callback=steps.append)
    assert [int(s["nfe"][0]) for s in steps] == [1, 2, 3, 4]


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


def test_a_cpu_generator_serves_any_device():
    """Numbers are drawn where the generator lives, then moved."""
    u = dlm_spec.draw((3, 2), torch.Generator().manual_seed(0), None, dtype=torch.float64,
                      device="meta")
    assert u.device.type == "meta" and u.shape == (3, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("remasking", dlm_spec.REMASKING)
def test_nan_logits_are_an_error(value, remasking):
    t = torch.zeros(5, V)
    t[3, 2] = value
    with pytest.raises(ValueError, match="not usable"):
        sample_llada(denoiser_of(t), torch.tensor([[1]]), gen_length=4, remasking=remasking)


def test_suppressing_the_only_eos_contradicts_waiting_for_it():
    d = denoiser_of(torch.zeros(5, V), eos_ids=(EOS,))
    with pytest.raises(ValueError, match="no eos is ever emitted"):
        sample_llada(d, torch.tensor([[1]]), gen_length=4, suppress_eos=True, early_stop=True)


def test_a_result_can_be_used_in_training():
    """The ids are ordinary tensors, not inference-mode ones: autograd may save them."""
    model = tiny_llama(1)
    out = sample_llada(Denoiser(model, 39), torch.tensor([[1, 2]]), gen_length=4)
    model(input_ids=out.sequences).logits.sum().backward()
