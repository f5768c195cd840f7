"""Copies of precomputed answers. The package contains two sets of the embedded SmolLM2's answers."""

from pathlib import Path

from drafthead.data.answers.store import AnswerStore
from drafthead.errors import UserError
from drafthead.files.local import file_digest, read_manifest, same_base
from drafthead.models.base.base_model import BaseModel
from drafthead.system.display import Display
from drafthead.train.corpora.answers import TURN_STRIDE
from drafthead.train.corpora.built_in import agreement
from drafthead.train.corpora.corpus_config import AnswersConfig

FOLDERS = {
    f"embedded:{name}": Path(__file__).parents[2] / "data" / "embedded" / f"{name}_answers"
    for name in ("smollm2", "smollm2_large")
}
COMPARED = 4  # largest number of greedy answers that the base must repeat
MIN_MATCH_RATE = 0.98  # of the tokens of greedy answers; below 1, because another CPU may break near-ties differently


def copy_precomputed(base: BaseModel, config: AnswersConfig, folder: Path, display: Display) -> None:
    """Copy the answers that ``config.precomputed`` names to ``folder`` without hidden states, unless it has answers
    already. Raise a ``UserError`` for answers of another base or sampler, and for greedy answers that the base does not
    repeat (a few are checked)."""
    assert config.precomputed is not None
    source = FOLDERS.get(config.precomputed, Path(config.precomputed))
    made_by = read_manifest(source)
    remedy = "set data.answers.fresh=true to generate answers"
    answered_by = made_by.get("base", {})
    if not same_base(str(answered_by.get("fingerprint")), base.fingerprint):
        raise UserError(
            f"data.answers.precomputed={config.precomputed} holds answers of another base: "
            f"{answered_by.get('name') or 'one without a name'}, but this run trains on {base.name}; {remedy} with "
            "this base"
        )
    if "sampler" not in made_by:
        raise UserError(f"{source} is not a folder of answers; give the path of DATA_FOLDER/answers, or {remedy}")
    for key, value in made_by["sampler"].items():
        if (chosen_value := getattr(config.sampler, key, None)) != value:
            raise UserError(
                f"the answers in {source} were sampled with {key}={value}, but data.answers.sampler.{key} is "
                f"{chosen_value}; set data.answers.sampler.{key}={value}, or {remedy}"
            )
    count, longest = config.prompts + config.self_prompted, config.max_prompt_tokens
    files = {path.name: file_digest(path) for path in sorted(source.glob("shard-*.parquet"))}
    chosen = {"prompts": count, "max_prompt_tokens": longest, "precomputed": files}
    store = AnswerStore(folder, {**made_by, **chosen})
    if store.done:
        return
    answers = [
        answer
        for answer in AnswerStore(source).read(with_hidden_states=False)
        if answer.prompt_number % TURN_STRIDE < count and answer.boundary <= longest
    ]
    if not answers:
        raise UserError(
            f"none of the first {count} prompts in {source} has an answer and at most "
            f"data.answers.max_prompt_tokens={longest} tokens; raise max_prompt_tokens"
        )
    if made_by["sampler"]["temperature"] == 0:
        measured = agreement(base, answers[:COMPARED])
        share = f"{100 * measured.greedy:.1f} %"
        display.line(
            f"   {len(answers)} answers from {config.precomputed}; the base repeats {share} of the tokens of "
            f"{measured.answers}"
        )
        if measured.greedy < MIN_MATCH_RATE:
            raise UserError(
                f"the base chooses only {share} of the tokens of the answers in {source}, expected at least "
                f"{100 * MIN_MATCH_RATE:.0f} %: they were made with other weights or another dtype; {remedy}"
            )
    store.append_shard(answers)
