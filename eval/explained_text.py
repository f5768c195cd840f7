"""An explained speedup in words: shared by the page and the terminal."""

from typing import Any

from drafthead.eval.tables import number


def formula(explained: dict[str, Any], baseline: str) -> str:
    """m x plain step / (draft + verify + loop), with the numbers, predicted and measured."""
    plain, method = explained["plain"], explained["method"]
    one = sum(plain[part] for part in ("draft_s", "verify_s", "loop_s"))
    text = (
        f"{method['tokens']:.2f} tokens a step × {_ms(one)} of a plain step ({baseline}) ÷ ({_ms(method['draft_s'])} "
        f"drafting + {_ms(method['verify_s'])} verifying {1 + method['drafts']:.1f} tokens + {_ms(method['loop_s'])} "
        f"loop) = {number(explained['predicted'], '{:.2f}x')} predicted; {number(explained['measured'], '{:.2f}x')} "
        f"measured, prefill included"
    )
    if explained["predicted_from_costs"] is not None:
        text += f"; {explained['predicted_from_costs']:.2f}x from step costs that were measured apart"
    return text + "."


def facts(explained: dict[str, Any]) -> dict[str, str]:
    """The closed form, and the best draft on this machine; what is not known is left out."""
    found = {}
    if form := explained["closed_form"]:
        found["closed form"] = (
            f"{form['alpha_is']} = {form['alpha']:.2f}, c = {form['draft_cost']:.3f} plain steps a draft: a chain of "
            f"{form['drafts']} commits {form['expected_tokens']:.2f} tokens and is {form['expected_speedup']:.2f}x "
            "as fast, if verifying more tokens cost nothing"
        )
        unless = "" if form["improves"] else "; no chain pays, as alpha is not above c"
        found["optimal lookahead"] = (
            f"{form['optimal_drafts']} drafts, {form['optimal_speedup']:.2f}x by that form{unless}"
        )
    for name in ("best_chain", "best_tree"):
        if (option := explained[name]) is not None:
            what = "drafts" if name == "best_chain" else "drafted nodes"
            found[f"{name.replace('_', ' ')} here"] = (
                f"{option['nodes'] - 1} {what}: {option['tokens']:.2f} tokens in {_ms(option['step_s'])}, "
                f"{option['speedup']:.2f}x expected"
            )
    return found


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
