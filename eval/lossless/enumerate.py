"""The exact distribution of what a step commits: the decoder's own functions, run for every random outcome.
``EnumeratedRng`` replaces the random numbers. Every row of the batch is one sequence of choices with its probability:
which token is drawn, and whether a candidate is accepted. A row follows its script, the choices given in advance. After
the script's end it takes the likeliest option, and every other possible option becomes a new script. When no script is
left, every sequence of choices was visited once, whatever the functions under test draw and in whatever order. The
bonus token is not drawn: its whole distribution is added.
Example with one draft of two tokens: the empty script draws the likelier token and accepts it. It leaves two scripts,
"draw the other token" and "draw the likelier one, reject it". The first of them leaves one more.
Shape legend: B rows (scripts), C draws per row, V vocabulary."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafthead.eval.lossless.tabular_lm import ROOT_TOKEN, Draft, TabularLM
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.acceptance import greedy as accept_greedily
from drafthead.models.decoding.sampling import Contexts, Sampler
from drafthead.models.decoding.step import target_probs

ROWS = 1 << 15  # scripts per batch
MOST_CHOICES = 32  # in a script: all samples and acceptance tests of one step


class EnumeratedRng:
    """``RandomSource`` that follows each row's script of choices, then takes the likeliest options."""

    def __init__(self, choices: Tensor, lengths: Tensor) -> None:
        """Take the scripts: option indices [B, MOST_CHOICES] int8, of which a row's first ``lengths`` [B] are given."""
        self._choices, self._given = choices.clone(), lengths
        self._used = torch.zeros_like(lengths)
        self.weights = torch.ones(len(lengths), dtype=torch.float64)  # [B] probability of each row's choices so far
        self.others: list[tuple[Tensor, Tensor]] = []  # choices and lengths of the scripts that remain to be run
        self.drafting = True  # False while verifying: a draw without `offset` is then the bonus token
        self.bonus: Tensor | None = None  # [B, V] distribution of the bonus token, once it is drawn

    def bernoulli(self, p: Tensor, q: Tensor, active: Tensor) -> Tensor:
        """Return a decision per row [B]: true with probability ``min(1, p / q)``, always false in inactive rows."""
        # The test is u * q < p for a uniform u: p = 0 never passes, and q = 0 passes whenever p > 0.
        prob = torch.where(p > 0, p / q.clamp(min=torch.finfo(torch.float64).tiny), 0.0).clamp(max=1.0)
        return active & (self._choose(torch.stack([1 - prob, prob], -1), active) == 1)

    def categorical(self, probs: Tensor, offset: int | None = None) -> Tensor:
        """Return [B, C] int64 draws from ``probs`` [B, C, V], like ``RandomSource.categorical``. While verifying, a
        draw without ``offset`` is the bonus token: no choice is made, its distribution is stored. A draw with an
        ``offset`` (a later position of the answer) only decides how far drafts are accepted."""
        if not self.drafting and offset is None:
            self.bonus = probs[:, 0] / probs[:, 0].sum(-1, keepdim=True)
            return probs.argmax(-1)
        drawn = []
        for dist in probs.unbind(1):
            mass = dist.sum(-1, keepdim=True)
            # A row without mass draws any token, and this does not count as a choice.
            drawn.append(self._choose(dist / mass.clamp(min=torch.finfo(torch.float64).tiny), mass[:, 0] > 0))
        return torch.stack(drawn, 1)

    def _choose(self, probs: Tensor, active: Tensor) -> Tensor:
        """Choose an option of ``probs`` [B, options] in each row; only choices of ``active`` rows are recorded."""
        index = self._used[:, None]
        likeliest = probs.argmax(-1)
        given = active & (self._used < self._given)
        choice = torch.where(given, self._choices.gather(1, index)[:, 0].long(), likeliest)
        self._fork(probs, active & ~given, likeliest)
        self.weights = self.weights * torch.where(active, probs.gather(1, choice[:, None])[:, 0], 1.0)
        recorded = torch.where(active, choice.to(torch.int8), self._choices.gather(1, index)[:, 0])
        self._choices.scatter_(1, index, recorded[:, None])
        self._used = self._used + active
        return choice

    def _fork(self, probs: Tensor, rows: Tensor, taken: Tensor) -> None:
        """Add a script per option that ``taken`` [B] is not and whose ``probs`` > 0, in rows where ``rows`` is true."""
        possible = (probs > 0) & rows[:, None]
        row, option = possible.scatter(1, taken[:, None], False).nonzero(as_tuple=True)
        if len(row):
            choices = self._choices[row].scatter(1, self._used[row, None], option[:, None].to(torch.int8))
            self.others.append((choices, self._used[row] + 1))


@dataclass
class CommittedProbs:
    """Probabilities (masses) of the token sequences that a step commits."""

    vocabulary: int
    depth: int
    outcomes: int = 0  # visited sequences of choices
    # [V**n] for n = 1, 2, ...: committed sequences of exactly n tokens.
    by_length: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.by_length = [torch.zeros(self.vocabulary**n, dtype=torch.float64) for n in range(1, self.depth + 2)]

    def add(self, paths: Tensor, accepted: Tensor, bonus: Tensor, weights: Tensor) -> None:
        """Add rows of ``weights`` [B]: the first ``accepted`` of ``paths`` [B, depth], then ``bonus`` [B, V]."""
        self.outcomes += len(weights)
        sequence = torch.zeros_like(accepted)
        for length, masses in enumerate(self.by_length):
            ended = accepted == length
            masses.view(-1, self.vocabulary).index_add_(0, sequence[ended], (weights[:, None] * bonus)[ended])
            if length < self.depth:
                # Rows that have ended are not used again.
                sequence = (sequence * self.vocabulary + paths[:, length]) % self.by_length[length].numel()

    def completed(self, probs: Tensor) -> Tensor:
        """Extend shorter sequences to depth + 1 tokens by draws from the target's ``probs`` [prefixes, V]."""
        total = self.by_length[0]
        for n, masses in enumerate(self.by_length[1:], start=1):
            total = _extended(total, probs, n, self.vocabulary) + masses
        return total


def _extended(masses: Tensor, probs: Tensor, length: int, vocabulary: int) -> Tensor:
    """Extend the masses of all sequences of ``length`` tokens by a token drawn from ``probs`` [prefixes, V]."""
    first = sum(vocabulary**level for level in range(length))  # prefixes of one length are adjacent, in order
    return (masses[:, None] * probs[first : first + len(masses)]).flatten()


@torch.inference_mode()
def committed(
    draft: Draft, target: TabularLM, sampler: Sampler, rule: AcceptanceRule, depth: int, greedy: bool = False
) -> CommittedProbs:
    """Enumerate one step of decoding, with up to ``depth`` drafts on a path; return what it commits."""
    committed_probs = CommittedProbs(target.vocabulary, depth)
    waiting = [(torch.zeros(1, MOST_CHOICES, dtype=torch.int8), torch.zeros(1, dtype=torch.int64))]
    while waiting:
        choices, lengths = (torch.cat(parts) for parts in zip(*waiting, strict=True))
        waiting = []
        for some, given in zip(choices.split(ROWS), lengths.split(ROWS), strict=True):  # type: ignore[no-untyped-call]
            script = EnumeratedRng(some, given)
            proposal = draft(torch.full((len(some),), ROOT_TOKEN), script)
            logits = target.logits[target.of_nodes(proposal)]
            script.drafting = False
            if greedy:
                accepted = accept_greedily(proposal, logits.argmax(-1))
            else:
                contexts = None
                if sampler.reads_context:
                    roots = torch.full((len(some), 1), ROOT_TOKEN)
                    contexts = Contexts(roots, torch.ones_like(roots[:, 0]), list(range(len(some))))
                accepted = rule.verify(proposal, target_probs(logits, sampler, contexts, proposal), script)
            bonus = script.bonus
            if bonus is None:
                bonus = torch.nn.functional.one_hot(accepted.bonus, target.vocabulary).double()
            path = proposal.tokens.gather(1, accepted.nodes)[:, 1:]
            path = torch.nn.functional.pad(path, (0, depth - path.shape[1]))
            committed_probs.add(path, accepted.accepted, bonus, script.weights)
            waiting += script.others
    return committed_probs


def total_variation(
    committed_probs: CommittedProbs, probs: Tensor, length: int | None = None, law: Tensor | None = None
) -> float:
    """Return the total variation between the committed tokens' distribution and the target's, ``probs`` [prefixes, V],
    or the distribution ``law`` [prefixes, V]. Only the first ``length`` tokens are compared; None: depth + 1."""
    law = probs if law is None else law
    target_masses = law[0]
    for n in range(1, committed_probs.depth + 1):
        target_masses = _extended(target_masses, law, n, committed_probs.vocabulary)
    difference = committed_probs.completed(probs) - target_masses
    if length is not None:
        difference = difference.view(committed_probs.vocabulary**length, -1).sum(1)
    return float(difference.abs().sum() / 2)
