"""The page is whole and safe, its tables say what was measured, and the figures take what runs leave behind."""

import html
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from drafthead.data.prompts.prompt import EvalPrompt
from drafthead.errors import visible
from drafthead.eval.lossless.equality import Diagnosis, Equality
from drafthead.eval.report import plots, report, tables
from drafthead.eval.report.side_by_side import coloured, side_by_side
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.generate import stream
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.step import DecodeResult
from drafthead.models.drafters.combined import union
from drafthead.models.drafters.draft_model import ModelDrafter
from drafthead.models.token_tree import TokenTree
from drafthead.system.display import PlainConsole
from support import TinyBase, call, evaluation_of, small_head, step_record, summarised, task_results

TREE = TokenTree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
COSTS = {"1": 0.05, "4": 0.06, "16": 0.09}
MEASURED = {"loss_1": 2.9, "loss_2": math.nan, "accept_1": 0.2}
LOG: list[dict[str, Any]] = [
    {"phase": phase, "step": step, "total_step": start + step, **MEASURED}
    for phase, start in (("pretrain", 0), ("distill", 30))
    for step in (10, 20, 30)
] + [{"phase": "distill", "step": 30, "total_step": 60, "held_out_loss_1": 2.5, "held_out_accept_1": 0.3}]


def evaluation() -> dict[str, Any]:
    tasks = {"math": task_results(1.5), "<b>|odd": task_results(0.9), "failed": task_results(None, same=0)}
    return evaluation_of(task_results(1.4), **tasks)


def quiet(cores: float | None = 0.1, **changes: float) -> dict[str, Any]:
    """Return an evaluation during which other processes used ``cores``; ``changes`` are of the overall speedup."""
    found = evaluation()
    found["overall"]["hardware"]["other_processes_cores"] = cores
    found["overall"]["methods"]["speculative"]["speedup"] |= changes
    return found


def page_of(folder: Path, evaluation: dict[str, Any], figures: bool = False) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if not figures:  # they take a second
            patch.setattr(report, "draw_figures", lambda *_: ())
        report.write_report(folder / "t", evaluation)
    return (folder / "t" / "report.html").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "<script>alert(1)"
    tree = {"spec": "head", "nodes": len(TREE), "choices": [list(path) for path in TREE.paths[1:]]}
    report.write_report(folder, evaluation() | {"costs": {"verify": COSTS}, "tree": tree}, LOG)
    return folder


def test_the_page_needs_no_other_file_reads_on_a_phone_and_escapes_names(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]{0,40})', page)
    assert len(sources) == 6
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"url\(|@import|<link|<script|http", page)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "&lt;script&gt;alert(1)" in page
    assert "&lt;b&gt;|odd" in page and "<b>|odd" not in page
    drawn = {path.stem: path.read_bytes()[:4] for path in (folder / "plots").rglob("*.png")}
    names = {"speedup", "acceptance", "cost", "training_loss", "training_acceptance", "tree"}
    assert drawn == dict.fromkeys(names, b"\x89PNG"), "every figure is a file, too"
    assert "Some &lt;CPU&gt;" in page and "other processes used 0.9 of" in page and "not comparable" in page


def test_the_headline_is_against_the_faster_baseline(tmp_path: Path) -> None:
    page = page_of(tmp_path, quiet())
    assert "<b>1.40x</b><span>speedup, 95\u00a0% 1.30–1.50</span>" in page
    line = "14.0 tokens/s over 10.0 (our loop); other decoding without drafts: transformers over our modules 8.0"
    assert line in page
    assert "<b>3 of 3</b><span>outputs identical</span>" in page
    assert 'class="card warn"' not in page


def test_differences_and_failures_are_not_hidden(tmp_path: Path) -> None:
    changed = evaluation()
    outputs = changed["overall"]["identical_outputs"]
    changed["sampler"] = {"temperature": 0.0}
    outputs["same"] = 1
    outputs["near_ties"] = [{"prompt": 4, "position": 81, "tokens": [7, 9], "margin": 3e-5}]
    outputs["different"] = [{"prompt": 6, "position": 12, "tokens": None, "margin": None}]
    changed["failed"] = [{"prompt": 8, "task": "math", "message": "too <long>"}]
    changed["tasks"], changed["overall"]["acceptance_per_depth"] = {}, []
    page = page_of(tmp_path, changed)
    assert 'class="card warn"' in page
    assert "1 differing, 1 differing at a near-tie" in page
    assert "Near-tie: prompt 4 at answer token 81, tokens 7 and 9, logits 3.0e-05 apart" in page
    assert "Different: prompt 6 at answer token 12, where one answer ends" in page
    assert "Failed: prompt 8 (math): too &lt;long&gt;" in page


def test_markdown_table() -> None:
    lines = tables.markdown_table(quiet()).splitlines()
    assert lines[:4] == [
        "Speculative against autoregressive decoding:",
        "",
        "| task | speedup | 95 % | tau | tok/s | AR tok/s | identical |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    assert lines[4] == "| math | 1.50x | 1.40–1.60 | 1.80 | 15.0 | 10.0 | 3 of 3 |"
    assert lines[5].startswith("| \\<b>\\|odd | 0.90x |")
    assert lines[6] == "| failed | – | – | – | – | – | 0 of 3 |"
    assert lines[7].startswith("| overall | 1.40x |")


def test_the_headline_of_a_busy_machine_is_marked(tmp_path: Path) -> None:
    busy, unknown = evaluation(), quiet(None)
    assert "| overall | 1.40x (busy machine) |" in tables.markdown_table(busy)
    assert re.search(r"overall .* 1\.40x .*\n.*\(busy machine\)", on_console(busy))
    assert "busy machine; 14.0 tokens/s over" in page_of(tmp_path, busy)
    assert "busy" not in tables.markdown_table(quiet()) + tables.markdown_table(unknown) + on_console(quiet())
    busy["rule"] |= {"lossless": False, "total_variation": 0.313}
    assert "1.40x (lossy, TV 0.313, busy machine)" in tables.markdown_table(busy)
    assert "TV 0.313" in on_console(busy)


HOSTILE = (
    "cost $\\frac$ or $5 and $6",
    "[/x] [bold]b :smile:",
    "<img src=x> ![i](u) & &amp;",
    "__a__ *b* `c` \\| ~~d~~",
    "one\n| two |\r\x1b[31mred\x07",
    "\u202ereversed",
)
"""Names of tasks with the markup of one of the places in which they are shown."""


@pytest.mark.parametrize("name", HOSTILE)
def test_names_with_markup_are_shown_as_they_are(name: str, tmp_path: Path) -> None:
    found, shown = evaluation_of(task_results(1.4), **{name: task_results(1.5)}), visible(name)
    assert shown.isprintable()
    assert f">{html.escape(shown)}</th>".replace("&#x27;", "&#39;") in page_of(tmp_path, found).replace("<wbr>", "")
    first_column = [line.split("│")[1] for line in on_console(found).splitlines() if line.startswith("│")]
    assert "".join(shown.split()) in "".join("".join(first_column).split())
    (bars,) = (figure for kind, figure in plots.draw_figures(found, []) if kind == "speedup")
    FigureCanvasAgg(bars).draw()
    assert shown in [text.get_text() for text in bars.findobj(Text)]
    rendered = MarkdownIt("gfm-like", {"linkify": False}).parse(tables.markdown_table(found))
    cells = [token.children for token in rendered if token.type == "inline" and token.children]
    assert [shown] in [[part.content for part in cell if part.type != "text_special"] for cell in cells]


@pytest.mark.parametrize(("speedup", "hinted"), [(1.1, False), (1.0, True), (0.85, True), (None, False)])
def test_a_head_that_is_not_faster_gets_a_hint(speedup: float, hinted: bool) -> None:
    lines = tables.console_lines(quiet(vs_autoregressive=speedup))
    assert any("docs/guides/not_faster.md" in line for line in lines) == hinted


def on_console(found: dict[str, Any]) -> str:
    console = PlainConsole(width=80, force_terminal=False)
    with console.capture() as captured:
        console.print(tables.console_table(found))
    assert "…" not in captured.get()
    return captured.get()


def test_phases_follow_one_another_although_steps_start_again() -> None:
    figure = plots.training(LOG, "loss_")
    drawn = figure.axes[0].get_lines()
    lines = [list(line.get_xdata()) for line in drawn if line.get_linestyle() == "-" and len(line.get_xdata())]
    assert lines == [[10, 20, 30], [40, 50, 60]], "one line a phase; nan is no point, so position 2 has none"
    dots = [line for line in drawn if line.get_marker() == "o" and len(line.get_xdata())]
    assert list(dots[0].get_xdata()) == [60] and list(dots[0].get_ydata()) == [2.5]
    assert [list(line.get_xdata()) for line in drawn if line.get_linestyle() == ":"] == [[30, 30]]
    assert [text.get_text() for text in figure.axes[0].texts] == ["pretrain", "distill"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["1", "2", "held out"]


@pytest.mark.filterwarnings("error")  # matplotlib warns when labels and the legend leave no room for the axes
def test_a_run_of_one_recorded_step_is_drawn(tmp_path: Path) -> None:
    plots.save_training_plots([{"phase": "distill", "total_step": 4, "accept_1": 0.2, "accept_2": 0.1}], tmp_path)
    assert (tmp_path / "training_acceptance.png").stat().st_size > 0


def test_the_line_over_depths_is_the_share_of_steps() -> None:
    """Half of the steps draft one token and accept it, the others draft four and accept none or all."""
    counts = [(1, 1), (1, 1), (4, 4), (0, 4)] * 6
    steps = [step_record(accepted, depth=depth, position=1 + n) for n, (accepted, depth) in enumerate(counts)]
    committed = sum(step.committed for step in steps)
    drafted = DecodeResult(tokens=[5] * (1 + committed), steps=steps, prefill_s=0.1, total_s=30.0)
    results = {"autoregressive": [answer(1, 0.01, 0)], "speculative": [drafted]}
    summary = summarised([EvalPrompt("math", 0, [])], results, {})
    figure = dict(plots.draw_figures(evaluation_of({}) | summary, []))["acceptance"]
    bars, (line,) = figure.axes[0].patches, figure.axes[0].get_lines()
    assert [bar.get_height() for bar in bars] == [0.75, 1, 1, 1]
    assert list(line.get_ydata()) == [0.75, 0.25, 0.25, 0.25], "not the product of the bars"


def test_drafters_of_one_tree_are_told_apart(compared: dict[str, Any], tmp_path: Path) -> None:
    """The header counts the head's own tree, figures mark the average step and colour each drafter."""
    head, lookup = [[0], [1], [0, 0]], [[0], [0, 0], [0, 0, 0]]
    parts = [
        {"drafter": "head", "nodes": 4, "choices": head},
        {"drafter": "prompt_lookup:3", "nodes": 4, "choices": lookup},
    ]
    choices = [
        list(path)
        for path in union([TokenTree.from_paths([tuple(p) for p in part]) for part in (head, lookup)]).paths[1:]
    ]
    tree = {"spec": "head", "nodes": 7, "choices": choices, "drafters": parts}
    evaluation = compared | {"tree": tree, "costs": {"verify": COSTS}}
    line = "tree: static, 4 nodes and up to 3 of prompt_lookup:3 (5.0 per step on average), draft sampling top_k"
    assert tables.rule_line(evaluation).endswith(line)
    figures = dict(plots.draw_figures(evaluation, []))
    (legend,) = figures["tree"].legends
    assert [text.get_text() for text in legend.get_texts()] == ["head", "prompt_lookup:3"]
    assert sorted(text.get_text() for text in figures["tree"].axes[0].texts) == ["", "1", "1", "1", "1", "1", "2"]
    colours = [dot.get_color() for dot in figures["tree"].axes[0].get_lines() if dot.get_marker() == "o"]
    assert len({str(colour) for colour in colours}) == 3, "the root and two drafters"


def test_trees_by_cost_are_drawn_by_their_sizes(compared: dict[str, Any]) -> None:
    tree = {"spec": "cost", "nodes": 32, "steps": {"1": 1, "5": 3}}
    evaluation = compared | {"tree": tree, "costs": {"verify": COSTS}}
    line = "tree: by cost, up to 32 nodes (5.0 per step on average), draft sampling top_k"
    assert tables.rule_line(evaluation).endswith(line)
    figures = dict(plots.draw_figures(evaluation, []))
    assert [bar.get_height() for bar in figures["tree_sizes"].axes[0].patches] == [0.25, 0.75]
    assert not [text for text in figures["cost"].axes[0].get_legend().get_texts() if "chosen" in text.get_text()]


def test_no_text_of_a_figure_is_cut_off(compared: dict[str, Any]) -> None:
    evaluation = compared | {"costs": {"verify": COSTS}}
    for name, figure in plots.draw_figures(evaluation, LOG):
        FigureCanvasAgg(figure).draw()
        (axes,) = figure.axes
        ticks = {*axes.get_xticklabels(), *axes.get_yticklabels()}  # some lie outside the axes and are not drawn
        for text in figure.findobj(Text):
            if text.get_text() and text not in ticks:
                box, page = text.get_window_extent(), figure.bbox
                inside = page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
                assert inside, f"{name}: {text.get_text()}"


def answer(committed: int, step_s: float, drafts: int) -> DecodeResult:
    how = {"depth": drafts, "total_s": step_s}
    count = 96 // committed
    steps = [step_record(committed - 1, position=1 + n * committed, entropy=0.1 * n, **how) for n in range(count)]
    return DecodeResult(tokens=[5] * 97, steps=steps, prefill_s=0.1, total_s=0.1 + step_s * len(steps))


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    """Return ``summarise`` of three methods, the headline's with a lossy rule."""
    results = {
        "transformers": [answer(1, 0.012, 0)] * 3,
        "autoregressive": [answer(1, 0.010, 0)] * 3,
        "speculative": [answer(2, 0.013, 4)] * 3,
        "prompt_lookup": [answer(1, 0.011, 2)] * 3,
    }
    fault = Equality(False, 12, (5, 91), 1.7, False, Diagnosis.CACHE)
    summary = summarised(
        [EvalPrompt("math", n, []) for n in range(3)],
        results,
        {"speculative": [Equality(True)] * 3, "prompt_lookup": [Equality(True), fault, Equality(True)]},
    )
    return evaluation_of({}) | summary | {"rule": {"name": "typical", "lossless": False, "total_variation": 0.3127}}


def test_several_methods_and_the_explained_speedup(compared: dict[str, Any], tmp_path: Path) -> None:
    page = page_of(tmp_path, compared, figures=True)
    for name in ("speculative", "prompt_<wbr>lookup", "autoregressive<small>our loop</small>"):
        assert f'<th scope="row">{name}</th>' in page
    assert "Mean accepted length 2.00 × 10.0 ms of an\nautoregressive step (our loop)" in page
    assert (
        "loop) =\n1.54x from this run's step times, without the prefill;\n1.46x measured, prefill included.</p>" in page
    )
    assert "The closed form (Leviathan et al., arXiv 2211.17192)" in page
    assert "closed form of a chain</th>" in page and "optimal lookahead</th>" in page
    assert "prompt 1 at answer token 12, tokens 5 and 91, the random number within 1.7e+00 of both: cache fault" in page
    names = {path.stem for path in (tmp_path / "t" / "plots").iterdir()}
    assert names == {"speedup", "methods", "waterfall", "acceptance"}


def test_a_lossy_rule_stands_beside_every_speedup_of_its_method(compared: dict[str, Any], tmp_path: Path) -> None:
    page = page_of(tmp_path, compared)
    assert "Rule: typical, lossy: total variation 0.31 on synthetic distributions" in page
    assert "sampler: temperature 1, top-p 0.9; tree: " in page, "what changes nothing is not named"
    assert page.count("<small>lossy, TV 0.313</small>") == 3  # the task, overall, the method
    assert "<b>1.46x</b>" in page and ">lossy, TV 0.313; " in page
    markdown = tables.markdown_table(compared)
    assert markdown.count("1.46x (lossy, TV 0.313)") == 3
    assert "| prompt_lookup | 0.92x | 0.92–0.92 |" in markdown
    lossless = compared | {"rule": {"name": "exact", "lossless": True}}
    page = page_of(tmp_path, lossless)
    assert "lossy" not in page
    assert tables.rule_line(lossless).startswith("rule: exact, lossless; sampler: temperature 1, top-p 0.9; ")


def test_accepted_drafts_are_coloured_beside_the_plain_answer(tiny_base: TinyBase) -> None:
    """Drafts of the base itself are all accepted: everything but a step's last token is coloured."""
    base = tiny_base()
    ids, drafter = [5, 9, 11], ModelDrafter(tiny_base(), base, num_tokens=5)
    drafted = decode(base, drafter, ids, max_new_tokens=24)
    text = coloured(stream(base, drafter, ids, max_new_tokens=24))
    assert text.plain == base.tokenizer.decode(drafted.tokens, skip_special_tokens=True)
    accepted = [n for step in drafted.steps for n in range(step.position, step.position + step.committed - 1)]
    assert len(accepted) > 12 and text.spans
    assert not coloured(stream(base, None, ids, max_new_tokens=24)).spans
    console = PlainConsole(width=100, file=(out := io.StringIO()))
    console.print(side_by_side(base, drafter, DraftConfig(tree=TokenTree.chain(drafter.depth)), ids, 24))
    shown = out.getvalue()
    assert f"{len(accepted)} of 24 tokens are accepted drafts" in shown and f"{1 + len(drafted.steps)} passes" in shown


@pytest.mark.slow
def test_an_evaluation_as_a_user_types_it(
    tiny_base: TinyBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    call("eval", f"head={small_head(tiny_base(), tmp_path / 'head')}", "suite=builtin", "limit=2", "max_new_tokens=8")
    assert "   base: random-llama\n" in capsys.readouterr().out
    folder = tmp_path / "eval-builtin"
    assert json.loads((folder / "eval.json").read_text())["overall"]["identical_outputs"]["same"] == 2
    assert all((folder / path).stat().st_size > 1000 for path in ("report.html", "plots/acceptance.png"))


@pytest.mark.slow
def test_an_evaluation_that_was_stopped_measures_step_costs_once(
    tiny_base: TinyBase, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = f"head={small_head(tiny_base(), tmp_path / 'head')}", "suite=builtin", "limit=1", "max_new_tokens=4"

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("drafthead.commands.eval.evaluate", stop)
        with pytest.raises(SystemExit):
            call("eval", *arguments)
    before, after = "== step costs on this machine\n", "== step costs on this machine, again\n"
    assert before in capsys.readouterr().out
    call("eval", *arguments)
    said = capsys.readouterr().out
    assert before not in said and after in said
    call("eval", *arguments, "resume=false")
    said = capsys.readouterr().out
    assert before in said and after in said
    call("eval", *arguments, "resume=false", "costs=false")
    said = capsys.readouterr().out
    assert "step costs" not in said and "forecast" not in said and "identical" in said


@pytest.mark.slow
def test_results_with_other_settings_are_kept(
    tiny_base: TinyBase, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "draw_figures", lambda *_: [("acceptance", Figure())])
    head, out = small_head(tiny_base(), tmp_path / "head"), tmp_path / "out"

    def evaluate(*settings: str) -> str:
        call(
            "eval", f"head={head}", "suite=builtin", "max_new_tokens=8", f"out={out}", "stock_baseline=false", *settings
        )
        return capsys.readouterr().out

    evaluate("limit=1")
    assert "1 of 1 answers were timed by an earlier run" in evaluate("limit=1")
    assert not (out / "earlier-1").exists(), "equal settings continue the evaluation"
    names = ("eval.json", "report.html", "results.md", "plots/acceptance.png")
    before = {name: (out / name).read_bytes() for name in names}
    text = evaluate("limit=2")
    assert f"they are now in {out / 'earlier-1'}" in text and "1 of 2 answers were timed by an earlier run" in text
    assert all((out / "earlier-1" / name).read_bytes() == content for name, content in before.items())
    assert (out / "eval.json").exists() and (out / "plots").exists()
    (out / "eval-settings.json").unlink()  # as version 0.3.0 left it
    evaluate("limit=2")
    assert (out / "earlier-2" / "eval.json").exists()


def test_acceptance_by_context_and_answers_that_repeat_themselves(tmp_path: Path) -> None:
    """On the page, on the card and, the warning only, on the terminal."""
    bins = [
        {"low": 0.0, "high": 256.0, "steps": 1200, "mean_accepted_length": 2.0},
        {"low": 2048.0, "high": 4096.0, "steps": 30, "mean_accepted_length": 1.25},
    ]
    loops = {"answers": 0, "of": 8, "prompts": [], "mean_accepted_length_without": 1.9}
    several = evaluation() | {
        "by_context_of": {"speculative": bins, "head": bins[:1]},
        "degenerate": {"speculative": loops | {"answers": 2, "prompts": [3, 5]}, "head": loops},
    }
    said = "answers that repeat themselves, which flatters acceptance: speculative 2 of 8, head 0 of 8; speculative has"
    page, card = page_of(tmp_path, several), tables.markdown_table(several)
    for text in (page, card, "\n".join(tables.console_lines(several))):
        assert f"{said} tau 1.90 without them" in text
    assert "By context length" in page and "2,048 to 4,095" in page and "| 0 to 255 | 2.00 (1,200 steps) |" in card
    assert "| 2,048 to 4,095 | 1.25 (30 steps) | – (0 steps) |" in card
    one = evaluation() | {"by_context_of": {"speculative": bins}, "degenerate": {"speculative": loops}}
    page, card = page_of(tmp_path, one), tables.markdown_table(one)
    assert "| 2,048 to 4,095 | 1.25 | 30 |" in card and "repeat themselves" not in page + card
