"""Speculative samplers given as Python functions, enumerated through the command."""

import random
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafthead.eval.lossless import callables
from drafthead.eval.lossless.callables import constant, distances, sampler_distribution
from support import call, cases, refuses

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "rules.md"
NextToken = Callable[[Sequence[int]], Tensor]
Choose = Callable[[Sequence[float] | Tensor], int]
TARGET, DRAFT = (0.4, 0.35, 0.25), (0.6, 0.3, 0.1)


def leviathan(target: NextToken, draft: NextToken, choose: Choose, length: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(length):
        p, q = target(tokens), draft(tokens)
        token = choose(q)
        accepted = min(1.0, float(p[token] / q[token]))
        if not choose([1 - accepted, accepted]):
            residual = (p - q).clamp(min=0)
            return [*tokens, choose(residual / residual.sum())]
        tokens.append(token)
    return [*tokens, choose(target(tokens))]


def without_residual(target: NextToken, draft: NextToken, choose: Choose, length: int) -> list[int]:
    """Draw from the target, not from the residual, after a rejection."""
    token = choose(draft([]))
    p, q = target([]), draft([])
    accepted = min(1.0, float(p[token] / q[token]))
    return [token] if choose([1 - accepted, accepted]) else [choose(p)]


def test_samplers_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE.read_text()
    code = re.search(r"```python\n# stock.py\n(.*?)```", page, re.DOTALL)
    commands = re.findall(r"\$ drafthead (certify callable=.*)\n(.*)", page)
    assert code and len(commands) == 3
    (tmp_path / "stock.py").write_text(code[1])
    monkeypatch.chdir(tmp_path)
    for command, output in commands:
        try:
            call(*shlex.split(command))
        except SystemExit as exit:
            assert (exit.code == 1) is ("biased" in output)
        assert output in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("length", [1, 2])
def test_rules_without_torch(length: int) -> None:
    assert max(distances(leviathan, length)[0]) < 1e-12
    total, outcomes = distances(without_residual, length, probs=(TARGET, DRAFT))
    # a rejected draft (0.2) is replaced by (0.4, 0.35, 0.25) instead of (0, 0.25, 0.75)
    assert total == [pytest.approx(0.2 * 0.5)] and outcomes == 6


def test_the_distribution_of_a_published_biased_rule() -> None:
    def likeliest(target: NextToken, draft: NextToken, choose: Choose, length: int) -> list[int]:
        accepted = float(target([])[0] / draft([])[0])
        residual = (target([]) - draft([])).clamp(min=0)
        return [0, choose(target([0]))] if choose([1 - accepted, accepted]) else [choose(residual / residual.sum())]

    result = sampler_distribution(likeliest, constant(TARGET, 1), constant(DRAFT, 1), 1)
    first = result.by_length[0] + result.by_length[1].view(3, 3).sum(1)
    torch.testing.assert_close(first, torch.tensor([2 / 3, 1 / 12, 1 / 4], dtype=torch.float64))


def uniform_number(target: NextToken, draft: NextToken, choose: Choose, length: int) -> list[int]:
    """Draw by comparing one uniform number with all cumulative probabilities, in either direction."""
    number, cumulative = torch.rand(1), target([]).cumsum(0)
    below = (number >= cumulative[:-1]).sum()
    assert below == (cumulative[:-1] <= number[0]).sum()
    return [int(below)]


def test_one_uniform_number_is_compared_several_times() -> None:
    total, outcomes = distances(uniform_number, 1, vocabulary=4)
    assert max(total) < 1e-6 and outcomes == 16 * 4


@cases(
    "sampler, message",
    (lambda t, d, choose, n: [random.getrandbits(20) % 3], "outside torch"),
    (lambda t, d, choose, n: [int(3 * torch.rand(1))], "compare it with a probability"),
    (lambda t, d, choose, n: [int(torch.randint(3, (1,)))], "torch.randint cannot be enumerated"),
    (lambda t, d, choose, n: [0] * 9, "commits 1 to 3 tokens below 3, but the sampler returned"),
    (lambda t, d, choose, n: [choose([0.5, 0.6])], "probabilities that add up to 1, got"),
    (lambda t, d, choose, n: [choose(t([0, 1, 2]))], "reads a prefix of 3 tokens"),
    (lambda t, d, choose, n: [1 // 0], "the sampler failed: ZeroDivisionError"),
    (lambda t, d, choose, n: [choose([1 / 3] * 3) for _ in range(12)][:1], "more than 500 outcomes"),
)
def test_refused_samplers(sampler: Callable[..., list[int]], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callables, "MOST_OUTCOMES", 500)
    refuses(message, distances, sampler, 2, probs=(TARGET, DRAFT))


@cases(
    "arguments, message",
    (["callable=nothing:here"], "callable=nothing:here cannot be loaded (No module named 'nothing')"),
    (["callable=math:exp", "target=[0.5,0.5]"], "draft must be as many probabilities as target"),
    (["callable=math:exp", "target=[0.5,0.6]", "draft=[0.5,0.5]"], "target must be probabilities that add up to 1"),
)
def test_bad_settings(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        call("certify", *arguments)
