"""Streams: parts of a mixture, shards that share out every text, positions that go on to the text."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from drafthead.data.text.sources import SourceConfig
from drafthead.data.text.streaming import Mixture, SourceStream
from drafthead.data.utils.errors import UserError


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def hub(folder: Path, files: int, rows: int = 12, **settings: Any) -> SourceConfig:
    """A dataset of several files that ``datasets`` streams, with rows that are no texts among them."""
    folder.mkdir(parents=True, exist_ok=True)
    for f in range(files):
        texts = [f"{folder.name} {f} {i}" for i in range(rows)]
        texts[3], texts[5] = " ", None  # type: ignore[call-overload]
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / f"part-{f}.jsonl").write_text("\n".join(lines))
    return SourceConfig(kind="hf", name=str(folder), **settings)


def local(path: Path, rows: int = 40, **settings: Any) -> SourceConfig:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps({"text": f"{path.stem} {i}"}) for i in range(rows)))
    return SourceConfig(kind="jsonl", name=str(path), **settings)


def take(stream: Any, count: int) -> list[str]:
    return list(islice(iter(stream.__next__, None), count))


@pytest.mark.parametrize(("files", "shards"), [(5, 2), (5, 5), (2, 3), (1, 1)])
@pytest.mark.parametrize("kind", ["hf", "jsonl"])
def test_shards_share_out_every_text(tmp_path: Path, kind: str, files: int, shards: int) -> None:
    """By files where there are enough of them, else row by row; each text once an epoch."""
    source = hub(tmp_path / "set", files) if kind == "hf" else local(tmp_path / "set.jsonl", files * 10)
    found: list[str] = []
    for shard in range(shards):
        stream = SourceStream(source, shard, shards)
        epoch: list[str] = []
        while stream.state()["epoch"] == 0:
            epoch.append(next(stream))
        assert [*epoch[:-1]] and epoch[-1] == epoch[0], "the next epoch begins as this one did"
        found += epoch[:-1]
    assert len(found) == len(set(found)) == files * 10


@pytest.mark.parametrize(("files", "shards"), [(5, 2), (2, 3)])
def test_every_position_goes_on_to_the_text(tmp_path: Path, files: int, shards: int) -> None:
    """Positions travel as JSON, over the ends of files, rows and epochs, and through a position not yet used."""
    sources = [
        hub(tmp_path / "a", files, weight=2),
        local(tmp_path / "b.jsonl", weight=1),
        hub(tmp_path / "c", 9, weight=1),
    ]
    texts, states = [], []
    mixture = Mixture(sources, 1, shards)
    for _ in range(60):
        states.append(json.dumps(mixture.state()))
        texts.append(next(mixture))
    assert len(set(texts)) < len(texts), "no epoch ended"
    for start in (0, 1, 17, 58):
        other = Mixture(sources, 1, shards)
        other.load(json.loads(states[start]))
        assert json.loads(json.dumps(other.state())) == json.loads(states[start])
        assert take(other, 60 - start) == texts[start:]
    # Back and forth, in the same object.
    mixture.load(json.loads(states[30]))
    assert take(mixture, 5) == texts[30:35]


def test_a_position_spares_reading_what_is_before_it(tmp_path: Path) -> None:
    """Files that lie behind could not even be read. ``datasets`` opens the first one, for the columns' types, and the
    one before the position's, at its end."""
    source = hub(tmp_path / "set", 6, rows=30)
    stream = SourceStream(source, 0, 1)
    take(stream, 5 * 28 + 10)
    state = stream.state()
    wanted = next(stream)
    assert wanted.startswith("set 5 ")
    for f in (1, 2, 3):
        (tmp_path / "set" / f"part-{f}.jsonl").write_text("no JSON")
    again = SourceStream(source, 0, 1)
    again.load(state)
    assert next(again) == wanted
    with pytest.raises(UserError, match="could not be read"):
        take(SourceStream(source, 0, 1), 5 * 28)


def test_parts_of_the_characters(tmp_path: Path) -> None:
    short = local(tmp_path / "s.jsonl", 50, weight=3)
    long = local(tmp_path / "long-name-and-so-long-texts.jsonl", 50, weight=1)
    mixture = Mixture([short, long], 0, 1)
    given = {"s": 0, "long": 0}
    for n, text in enumerate(take(mixture, 400)):
        given["long" if text.startswith("long") else "s"] += len(text)
        total = sum(given.values())
        assert n < 5 or abs(given["s"] - 0.75 * total) <= 32, "no stretch may be off by more than a text"
    equal = Mixture([SourceConfig(kind="jsonl", name=short.name), SourceConfig(kind="jsonl", name=long.name)], 0, 1)
    texts = take(equal, 400)
    longer = sum(len(t) for t in texts if t.startswith("long"))
    assert abs(longer / sum(map(len, texts)) - 0.5) < 0.01


def test_a_limit_is_of_the_source_not_of_a_shard(tmp_path: Path) -> None:
    for source in (hub(tmp_path / "set", 5, limit=20), local(tmp_path / "x.jsonl", 50, limit=20)):
        found = set()
        for shard in range(2):
            found |= set(take(SourceStream(source, shard, 2), 60))
        assert len(found) == (16 if source.kind == "hf" else 20)  # rows without a text count as read


def test_bad_streams(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no text for shard 3 of 3; lower data.text.stream_shards"):
        take(SourceStream(local(tmp_path / "x.jsonl", 2), 2, 3), 1)
    with pytest.raises(UserError, match="no data source is given"):
        Mixture([], 0, 1)
    with pytest.raises(UserError, match=r"row 0 has no column 'body'; present: text"):
        take(SourceStream(hub(tmp_path / "a", 1, column="body"), 0, 1), 1)
    with pytest.raises(UserError, match=r"names a path where nothing is"):
        take(SourceStream(SourceConfig(kind="hf", name=str(tmp_path / "none")), 0, 1), 1)
    with pytest.raises(UserError, match="has no weight, but others have"):
        Mixture([hub(tmp_path / "b", 1, weight=1), hub(tmp_path / "c", 1)], 0, 1)


def test_the_hub_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never downloaded: what is streamed may be larger than the disk."""
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["a", "b"]}).to_iterable_dataset()
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **options: asked.append(options) or rows)
    assert take(SourceStream(SourceConfig(kind="hf", name="org/set"), 0, 1), 3) == ["a", "b", "a"]
    assert all(options["streaming"] for options in asked)
