"""Findings about the rows of users' data: errors, remarks, and counts of what is left out or not read."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from drafthead.errors import UserError, listed

UNITS = ("row", "turn", "token")


@dataclass
class Findings:
    """Errors of rows that cannot be used, and remarks about other rows, each with a count and its first row."""

    rejected: list[str] = field(default_factory=list)
    remarks: dict[str, tuple[int, str]] = field(default_factory=dict)
    unread: Counter[str] = field(default_factory=Counter)  # rows or messages per column or key that is not read
    # By reason: rows, turns and tokens that are not trained on, and the first row.
    left_out: dict[str, tuple[Counter[str], str]] = field(default_factory=dict)

    def reject(self, error: UserError) -> None:
        self.rejected.append(str(error))

    def remark(self, text: str, where: str) -> None:
        count, first = self.remarks.get(text, (0, where))
        self.remarks[text] = count + 1, first

    def leave_out(self, reason: str, where: str, **counts: int) -> None:
        """Count a ``row``, ``turn``s or ``token``s of the row named ``where`` that are not trained on."""
        if any(counts.values()):
            self.left_out.setdefault(reason, (Counter(), where))[0].update(counts)

    def ignore(self, kind: str, entries: Mapping[str, Any], known: Collection[str]) -> None:
        """Count names of ``entries`` that are not ``known`` and have a value; ``kind`` is "column" or "key"."""
        given = [name for name, value in entries.items() if value not in (None, "", [], {})]
        self.unread.update(f"{kind} {name!r}" for name in given if name not in known)

    def raise_rejected(self) -> None:
        if self.rejected:
            remedy = "repair them, or set data.bad_transcripts=skip"
            raise UserError(f"{len(self.rejected)} transcripts cannot be trained on: {listed(self.rejected)}; {remedy}")

    def lines(self) -> list[str]:
        found = [f"{count:,} {text} (first: {where})" for text, (count, where) in self.remarks.items()]
        if self.unread:
            found.append("not read: " + ", ".join(f"{name} ({count:,})" for name, count in self.unread.items()))
        reasons = dict(self.left_out)
        if self.rejected:
            reasons["cannot be trained on"] = Counter(row=len(self.rejected)), self.rejected[0]
        if reasons:
            total = sum((counts for counts, _ in reasons.values()), Counter[str]())
            each = [f"{_quantity(counts)} {reason} (first: {where})" for reason, (counts, where) in reasons.items()]
            found.append(f"left out: {_quantity(total)}: {'; '.join(each)}")
        return found


def _quantity(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[unit]:,} {unit}{'s' * (counts[unit] != 1)}" for unit in UNITS if counts[unit])
