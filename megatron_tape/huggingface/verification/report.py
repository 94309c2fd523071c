"""The report of a verification: a table of errors by position, and sentences about them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """A row of the table: the errors of one way to compute the compared tokens."""

    name: str
    positions: list[int]
    errors: list[float]
    """By position; infinite for NaN."""
    allowed: list[float]
    """The largest errors that rounding explains, by position."""
    layer: int | None = None
    """The first layer (from 0) that differs, if layers were compared and one differs."""

    @property
    def is_equal(self) -> bool:
        """Whether no error exceeds what is allowed."""
        return not self.differences

    @property
    def differences(self) -> list[int]:
        """The positions whose errors exceed what is allowed."""
        rows = zip(self.positions, self.errors, self.allowed, strict=True)
        differences = []
        for position, error, allowed in rows:
            if error > allowed:
                differences.append(position)
        return differences


@dataclass(frozen=True)
class Report:
    """The result of a verification."""

    title: str
    """What was compared with what."""
    checks: list[Check]
    notes: list[str]
    """Sentences about what was not compared, and why."""
    problems: list[str]
    """Sentences about differences that are no errors at positions."""
    difference: str = ""
    """A sentence about the first layer and position that differ, if any does."""
    cause: str = ""
    """A sentence about the likely cause of the difference."""

    @property
    def is_equal(self) -> bool:
        """Whether all checks have passed, and there are no other problems."""
        return not self.problems and all(check.is_equal for check in self.checks)

    def text(self) -> str:
        """Return the report as lines of text, with a table."""
        lines = [self.title, *self._table(), *self.notes]
        if self.is_equal:
            lines.append("Equal: all differences are within what rounding explains.")
        lines += [f"DIFFERENT: {problem}" for problem in self.problems]
        if self.difference:
            lines += [f"DIFFERENT: {self.difference}", f"Likely cause: {self.cause}"]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        """Return the lines of the table. Its columns are positions."""
        positions = sorted({p for check in self.checks for p in check.positions})
        header = [f"{position:,}" for position in positions]
        rows = [["position", *header, "allowed", ""]]
        for check in self.checks:
            errors = dict(zip(check.positions, check.errors, strict=True))
            shown = []
            for position in positions:
                if position in errors:
                    shown.append(f"{errors[position]:.0e}")
                else:
                    shown.append("-")
            allowed = f"{max(check.allowed):.0e}"
            verdict = "DIFFERENT"
            if check.is_equal:
                verdict = "equal"
            rows.append([check.name, *shown, allowed, verdict])

        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for first, *others in rows:
            cells = [first.ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            lines.append("  ".join(cells).rstrip())
        return lines
