# SPDX-License-Identifier: MIT
"""How true is a check? The measurements behind notebook 07.

    python notebooks/judges.py -n 14 --each 8     # -> results/leave_one_out.json

A committed token is to be judged without itself. The truth is a forward in which it alone is
masked; the judges below are cheaper. Each returns, for N tokens, log-probabilities (N, V) and the
hidden states (layers + 1, N, d) they came from. Results are sums per problem, so that the
intervals of `ratio` and `difference` know which tokens hang together; what is measured layer by
layer is a mean over all tokens.
"""
import argparse
import json
import sys
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE / "mini")]
import evaluate
import tasks
import torch
import torch.nn.functional as F

import dlm_spec
from dlm_spec import DualView, KVCache, columns_of, shadowed, windowed

RESULTS = HERE / "results" / "leave_one_out.json"
ALL = 999       # seeds at once: more than there are tokens


def rows(groups, x):
    """(R, L) bool, a row for each group of asked columns."""
    asked = torch.zeros(len(groups), x.shape[1], dtype=torch.bool, device=x.device)
    for row, group in zip(asked, groups):
        row[group] = True
    return asked


def copy_of(kv, n):
    """A KVCache of n rows with the keys and values of `kv`; or, of one row, n times the same."""
    new = KVCache(kv.shown.expand(n, -1))
    new.k, new.v = ({i: t.expand(n, -1, -1, -1).clone() for i, t in d.items()}
                    for d in (kv.k, kv.v))
    new.filled = True
    return new


class Without(DualView):
    """The rows that judge do not look at the columns `drop` (B, L)."""
    def begin(self, *args):
        """As in DualView."""
        tokens, more = super().begin(*args), self.look.shape[-1] - self.drop.shape[-1]
        self.look &= ~F.pad(self.drop, (0, more))[:, None, None]
        return tokens


class Late(DualView):
    """The override begins at layer `first`; below, everyone sees the seeds as masks."""
    first = 2

    def attend(self, layer, *args):
        """As in DualView."""
        S, hold = self.S, self.kv.hold
        if layer < self.first:
            self.S, self.kv.hold = 0, None
        out = super().attend(layer, *args)
        self.S, self.kv.hold = S, hold
        return out


class Old(DualView):
    """The rows that judge read `part` (B, L) of each column from the store `old`."""
    def attend(self, layer, *args):
        """As in DualView."""
        self.layer = layer
        return super().attend(layer, *args)

    def correct(self, out, q, new_k, new_v, k, v, scaling):
        """As in DualView."""
        part = self.part[:, None, :, None]
        k, v = k.lerp(self.old.k[self.layer], part), v.lerp(self.old.v[self.layer], part)
        return super().correct(out, q, new_k, new_v, k, v, scaling)


class Judges:
    """The judges of one model; hooks keep its hidden states until `close`. In all of them `now`
    is a canvas (1, L) or (R, L), `token` (N,) are the judged columns and `row` (N,) their rows."""

    def __init__(self, denoiser):
        self.denoiser, self.hidden = denoiser, []
        self.layers = denoiser.model.model.layers
        self.hooks = [self.layers[0].register_forward_pre_hook(self._first, with_kwargs=True),
                      *(layer.register_forward_hook(self._keep) for layer in self.layers)]

    def _first(self, _, args, keywords):
        self.hidden[:] = [args[0] if args else keywords["hidden_states"]]

    def _keep(self, _, args, out):
        self.hidden.append(out if torch.is_tensor(out) else out[0])

    def close(self):
        """Take the hooks off the model."""
        for hook in self.hooks:
            hook.remove()

    def judgement(self, logits, asked, row, token, column=None):
        """Of logits of the positions `asked` (R, L), those of the tokens; column: where they
        stand in what the model was given."""
        place = (asked.flatten().cumsum(0) - 1).view_as(asked)
        column = token if column is None else column
        return (logits[place[row, token]].float().log_softmax(-1).cpu(),
                torch.stack([h[row, column].float().cpu() for h in self.hidden]))

    def truth(self, now, token):
        """A forward for each token, in which it alone is masked."""
        alone = rows(token.split(1), now)
        masked = now.expand_as(alone).masked_fill(alone, self.denoiser.mask_id)
        return self.judgement(self.denoiser(masked, alone), alone, torch.arange(len(token)), token)

    def visible(self, now, asked, row, token):
        """The plain forward, which sees the token that it judges."""
        return self.judgement(self.denoiser(now, asked), asked, row, token)

    def shadow(self, now, asked, P, row, token):
        """WINO's: a second, masked token behind the canvas for each of the answer."""
        block = torch.arange(now.shape[1], device=now.device).expand_as(asked) >= P
        _, judged, _ = shadowed(self.denoiser, now, asked & False, checked=asked, shadow=block)
        return self.judgement(judged, asked, row, token, now.shape[1] + token - P)

    def store(self, canvas):
        """A KVCache that a forward of the canvas has filled."""
        kv = KVCache(canvas)
        windowed(self.denoiser, canvas, canvas == canvas, kv=kv)
        return kv

    def cover(self, kv, now, seeds, row, token, kind=DualView, **values):
        """COVER's, all `seeds` (R, L) at once; or, by another kind of view, a variant's."""
        now = now.expand_as(seeds)
        view = kind(self.denoiser, now, None, copy_of(kv, len(seeds)), seeds)
        vars(view).update(values)
        logits = windowed(self.denoiser, now, seeds, kv=view)[0]
        return self.judgement(logits, seeds, row, token)

    def readers(self, canvas, alone, n):
        """The n columns that look most at the token of each row, by all layers' attention."""
        view = DualView(self.denoiser, canvas, None, KVCache(canvas), alone & False,
                        columns_of(alone | True))
        view.layers = range(len(self.layers))
        windowed(self.denoiser, canvas, alone, kv=view)
        weight = view.attention.transpose(1, 2)[alone].masked_fill(alone, -1)
        return (alone & False).scatter(1, weight.topk(n, 1).indices, True)

    def again(self, kv, canvas, now, token, n):
        """The token is masked for everyone, and its n strongest readers are computed anew."""
        alone, row = rows(token.split(1), now), torch.arange(len(token))
        window = self.readers(canvas, alone, n) | alone
        masked = now.masked_fill(alone, self.denoiser.mask_id)
        logits = windowed(self.denoiser, masked, alone, kv=copy_of(kv, len(now)), window=window)[0]
        return self.judgement(logits, alone, row, token, (window.cumsum(1) - 1)[row, token])

    def all_of(self, before, now, some, tokens, old, P):
        """Every judge, and four ways to shrink the leak, of some[r] in row r of the canvases;
        `old` are those where it was last a mask. {name: judgement}."""
        i, alone = torch.arange(len(some)), rows(some.split(1), now)
        kept, kv = self.store(old), self.store(before)
        views = {"visible": self.visible(now, alone, i, some),
                 "shadow": self.shadow(now, alone, P, i, some)}
        for k in (1, 4, 8, 16):
            groups = [torch.cat([t[None], tokens[tokens != t][:k - 1]]) for t in some]
            views[f"COVER, {k} at once"] = self.cover(kv, now, rows(groups, now), i, some)
        near = rows([tokens[(tokens - t).abs().argsort()[:8]] for t in some], now)
        views["COVER, 8 nearest"] = self.cover(kv, now, near, i, some)
        same = (now == old).to(kept.k[0].dtype)
        eight = rows([torch.cat([t[None], tokens[tokens != t][:7]]) for t in some], now)
        variants = {"without 4 readers": (Without, dict(drop=self.readers(before, alone, 4))),
                    "override from layer 2": (Late, dict(first=2)),
                    "override from layer 4": (Late, dict(first=4)),
                    "half old": (Old, dict(old=kept, part=same / 2)),
                    "old store": (Old, dict(old=kept, part=same))}
        for name, (kind, values) in variants.items():
            views[name] = self.cover(kv, now, eight, i, some, kind, **values)
        return views | {"16 readers again": self.again(kv, before, now, some, 16)}


# ---------------------------------------------------------------------------------------------
# What is judged.

def cases_of(denoiser, problem, each, g, gen_length=64, threshold=.5):
    """Canvases of a threshold decode, the last with masks and the first full one: [(before
    (1, L), now (1, L), tokens, old (n, L), P)]. tokens: columns that `before` showed already, in
    random order, of which the first `each` are judged; old: the canvas where each of these was
    last a mask."""
    ids, _ = denoiser.encode(problem.prompt)
    out = dlm_spec.sample_fast_dllm(denoiser, ids, gen_length=gen_length, block_length=gen_length,
                                    threshold=threshold, history=True)
    canvases, P, found = torch.cat(out.history), ids.shape[1], []
    for at in range(max(1, len(canvases) - 2), len(canvases)):
        before, now = canvases[at - 1], canvases[at]
        there = (before == now) & (now != denoiser.mask_id) & ~dlm_spec.is_eos(now, denoiser)
        tokens = there[P:].nonzero()[:, 0] + P
        if len(tokens) >= 4:
            tokens = tokens[torch.randperm(len(tokens), generator=g).to(tokens.device)]
            last = (canvases[:at, tokens[:each]] == denoiser.mask_id).long().sum(0) - 1
            found.append((before[None], now[None], tokens, canvases[last], P))
    return found


def words_of_a_kind(tokenizer):
    """{id: other ids of its kind}: a number for a number, a name for a name."""
    words = [map(str, range(100)), "+-*/", tasks.NAMES, "ABCD", tasks.FUNCTIONS, tasks.TEMPS,
             sum(tasks.PAIRS, ()), sum(tasks.LISTS, ()), ["upper", "lower"],
             *tasks.KINDS.values(), *(f.values() for f in tasks.FACTS.values())]
    kin = {}
    for kind in words:
        ids = [tokenizer(w, add_special_tokens=False)["input_ids"] for w in kind]
        ids = sorted({i[0] for i in ids if len(i) == 1 and i[0] != tokenizer.unk_token_id})
        kin |= {i: [j for j in ids if j != i] for i in ids if i not in kin}
    return kin


def kl(p, q):
    """KL(p || q) in nats of log-probabilities (N, V): (N,)."""
    return (p.exp() * (p - q)).nan_to_num(0.0, neginf=0.0, posinf=0.0).sum(-1)


def doubts(p, token, tau_remask=.2):
    """(N,) bool: another token is the likeliest, or this one is unlikely."""
    return (p.argmax(-1) != token) | (p.gather(1, token[:, None])[:, 0].exp() < tau_remask)


# ---------------------------------------------------------------------------------------------
# The measurements: of one canvas, {judge: {what: sum or list of sums}}.

def as_they_are(judges, case, each):
    """Tokens as decoding left them."""
    before, now, tokens, _, P = case
    some, kv = tokens[:each], judges.store(before)
    i, many = torch.arange(len(some)), rows([some], now)
    views = {"truth": judges.truth(now, some), "visible": judges.visible(now, many, 0 * i, some),
             "shadow": judges.shadow(now, many, P, 0 * i, some)}
    for k in (1, 2, 4, 8, 16, ALL):
        groups = some.split(k) if k <= each else [tokens[:k]]
        views[f"COVER, {'all' if k == ALL else k} at once"] = judges.cover(
            kv, now, rows(groups, now), i // k if k <= each else 0 * i, some)
    views["COVER, same canvas"] = judges.cover(judges.store(now), now, rows([tokens], now), 0 * i,
                                               some)
    token, (T, states) = now[0, some].cpu(), views["truth"]
    wrong = doubts(T, token)
    return {name: dict(
        n=len(some), kl=kl(T, p).sum(), same=(p.argmax(-1) == T.argmax(-1)).sum(),
        doubted=wrong.sum(), good=(~wrong).sum(), found=doubts(p, token)[wrong].sum(),
        alarms=doubts(p, token)[~wrong].sum(),
        apart=((h - states).norm(dim=-1) / states.norm(dim=-1)).sum(1))
        for name, (p, h) in views.items()}


def plant(canvas, some, other):
    """A row for each of `some` tokens, with `other` in its place."""
    out = canvas.repeat(len(some), 1)
    out[torch.arange(len(some)), some] = other
    return out


def planted(judges, case, each, kin, g):
    """Errors planted one at a time, and all at once: three dicts, the third of the drafts."""
    before, now, tokens, old, P = case
    mine = torch.tensor([t in kin for t in now[0, tokens[:each]].tolist()])
    some, old = tokens[:each][mine], old[mine]
    if not len(some):
        return {}, {}
    own = now[0, some]
    other = torch.tensor([kin[t][int(torch.randint(len(kin[t]), (), generator=g))]
                          for t in own.tolist()], device=now.device)
    plain, heard = (judges.all_of(*(plant(c, some, what) for c in (before, now)), some, tokens,
                                  old, P) for what in (own, other))
    own, put, T = own.cpu(), other.cpu(), judges.truth(now, some)[0]
    knows = (T.argmax(-1) == own) & ~doubts(T, own)
    one = {name: dict(
        n=len(some), kl_right=kl(T, plain[name][0]).sum(), kl_wrong=kl(T, q).sum(),
        leak=kl(plain[name][0], q).sum(), flips=(plain[name][0].argmax(-1) != q.argmax(-1)).sum(),
        known=knows.sum(), detected=doubts(q, put)[knows].sum(),
        named=(q.argmax(-1) == own)[knows].sum(),
        alarms=doubts(plain[name][0], own)[knows].sum(),
        moved=((h - plain[name][1]).norm(dim=-1) / plain[name][1].norm(dim=-1)).sum(1))
        for name, (q, h) in heard.items()}
    before, now, i = before.clone(), now.clone(), 0 * torch.arange(len(some))
    before[0, some] = now[0, some] = other
    asked, kv, T = rows([some], now), judges.store(before), judges.truth(now, some)[0]
    views = {"truth": T, "visible": judges.visible(now, asked, i, some)[0],
             "shadow": judges.shadow(now, asked, P, i, some)[0],
             "COVER": judges.cover(kv, now, asked, i, some)[0],
             "override from layer 2": judges.cover(kv, now, asked, i, some, Late)[0]}
    knew = T.argmax(-1) == own
    return one, {name: dict(
        n=len(some), kl=kl(T, p).sum(), known=knew.sum(), detected=doubts(p, put)[knew].sum(),
        named=(p.argmax(-1) == own)[knew].sum()) for name, p in views.items()}


def drafts(judges, case):
    """What seeds do to the predictions of masks: KL from a plain forward's."""
    before, now, tokens, *_ = case
    masks, seeds = now == judges.denoiser.mask_id, rows([tokens[:8]], now)
    if not masks.any():
        return {}
    want, found = judges.denoiser(now, masks).log_softmax(-1), {}
    for name, first in (("COVER", 0), ("override from layer 2", 2), ("override from layer 4", 4),
                        ("masked for everyone", len(judges.layers))):
        view = Late(judges.denoiser, now, None, judges.store(before), seeds)
        view.first = first
        got = windowed(judges.denoiser, now, masks, kv=view, checked=seeds)[0]
        found[name] = dict(n=len(want), kl=kl(want, got.log_softmax(-1)).sum())
    return found


def decodes(denoiser, n):
    """Marks of n problems a family with COVER, and with the override from layer 2 on."""
    found = {}
    for family in tasks.FAMILIES:
        some = tasks.problems(family, "validation", n, seed=4)
        for name, kind in (("COVER", DualView), ("override from layer 2", Late)):
            with mock.patch.object(dlm_spec, "DualView", kind):
                r = evaluate.evaluate(denoiser, dlm_spec.sample_cover, some, gen_length=64,
                                      block_length=64, threshold=.5)
            found.setdefault(family, {})[name] = dict(
                n=n, nfe=r["nfe"], marks="".join("01"[m] for m in r["marks"]),
                revisions=r["revisions"])
    return found


def measure(denoiser, n, each, n_decodes, progress=print):
    """Everything, of n problems of each family, as a dict that json can write."""
    g, judges = torch.Generator().manual_seed(0), Judges(denoiser)
    kin = words_of_a_kind(denoiser.tokenizer)
    found = {"n": n, "each": each, "layers": {}, "plain": {}, "planted": {}, "together": {},
             "drafts": {}}
    for family in tasks.FAMILIES:
        for problem in tasks.problems(family, "validation", n, seed=6):
            parts = [(as_they_are(judges, case, each), *planted(judges, case, each, kin, g),
                      drafts(judges, case)) for case in cases_of(denoiser, problem, each, g)]
            for key, of_cases in zip(("plain", "planted", "together", "drafts"), zip(*parts)):
                for name in {name: 0 for views in of_cases for name in views}:
                    some = [views[name] for views in of_cases if name in views]
                    sums = {k: sum(s[k] for s in some) for k in some[0]}
                    for what in sums.keys() & {"apart", "moved"}:       # a number per layer
                        layers = found["layers"].setdefault(f"{key}, {name}", {what: 0, "n": 0})
                        layers[what], layers["n"] = (layers[what] + sums.pop(what),
                                                     layers["n"] + sums["n"])
                    found[key].setdefault(name, []).append(
                        {k: round(float(v), 4) for k, v in sums.items()})
        progress(f"{family} is done", flush=True)
    judges.close()
    for name, s in found["layers"].items():
        found["layers"][name] = (s.get("apart", s.get("moved")) / s["n"]).tolist()
    return found | {"decodes": decodes(denoiser, n_decodes)}


# ---------------------------------------------------------------------------------------------
# What the sums say.

def ratio(sums, what, per="n"):
    """The sum of `what` per `per` over problems, and its 95 % interval."""
    n = sum(s[per] for s in sums)
    mean = sum(s[what] for s in sums) / max(n, 1)
    error = sum((s[what] - mean * s[per]) ** 2 for s in sums) ** .5 / max(n, 1)
    return mean, mean - 1.96 * error, mean + 1.96 * error


def difference(a, b, what, per="n"):
    """The ratio of sums a minus that of b, of the same problems, and its 95 % interval."""
    return ratio([{what: s[what] - t[what], per: s[per]} for s, t in zip(a, b)], what, per)


def main():
    """The command line."""
    cli = argparse.ArgumentParser(description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("-n", type=int, default=14, help="problems per family")
    cli.add_argument("--each", type=int, default=8, help="tokens to judge per canvas")
    cli.add_argument("--decodes", type=int, default=200, help="problems per family of decodes")
    args = cli.parse_args()
    torch.set_grad_enabled(False)
    found = measure(dlm_spec.load_denoiser(), args.n, args.each, args.decodes)
    RESULTS.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
