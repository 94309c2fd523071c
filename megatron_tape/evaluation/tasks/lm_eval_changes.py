"""What has changed between two results of the same tasks of lm-evaluation-harness."""

from __future__ import annotations

import math
from typing import Any

from megatron_tape.evaluation.statistics import NORMAL_QUANTILE, bootstrap_mean


def metric_name(key: str) -> str:
    """Return `acc` for the harness's `acc,none`, and `exact_match (strict-match)` for `exact_match,strict-match`."""
    metric, _, kind = key.partition(",")
    return metric if kind == "none" else f"{metric} ({kind})"


def changes(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return by how much each metric differs that both have, document by document where that is possible.

    A difference of documents is that over those that both have. Intervals are of 95 %: over resampled documents, or of
    the normal distribution from both standard errors.
    """
    rows = []
    for task in after:
        for key in after[task]["metrics"]:
            if task not in before or key not in before[task]["metrics"]:
                continue
            old, new = before[task]["metrics"][key], after[task]["metrics"][key]
            row = {"task": task, "metric": metric_name(key), "better": "higher" if new["higher_is_better"] else "lower"}
            pairs = _pairs(before[task], after[task], key)
            if pairs:
                low, high = bootstrap_mean([b - a for a, b in pairs])
                then, now = (sum(pair[side] for pair in pairs) / len(pairs) for side in (0, 1))
                row |= {"before": then, "after": now, "low": low, "high": high, "count": len(pairs), "paired": True}
            else:
                errors = old["error"], new["error"]
                spread = None if None in errors else NORMAL_QUANTILE * math.hypot(*errors)
                change = new["value"] - old["value"]
                low, high = (None, None) if spread is None else (change - spread, change + spread)
                row |= {"before": old["value"], "after": new["value"], "low": low, "high": high}
                row |= {"count": len(after[task]["documents"]) or None, "paired": False}
            rows.append(row | {"change": row["after"] - row["before"]})
    return rows


def _pairs(before: dict[str, Any], after: dict[str, Any], key: str) -> list[tuple[float, float]]:
    sides = []
    for outcome in (before, after):
        values = outcome["values"].get(key)
        if not values or not math.isclose(
            sum(values) / len(values), outcome["metrics"][key]["value"], rel_tol=1e-6, abs_tol=1e-9
        ):
            return []
        sides.append(dict(zip(outcome["documents"], values)))
    return [(sides[0][digest], value) for digest, value in sides[1].items() if digest in sides[0]]


def described(rows: list[dict[str, Any]], label: str) -> list[str]:
    """Return in sentences which metrics have become worse or better than chance explains."""
    notes = [
        f"Changes are those since the results of {label}, with 95 % intervals, of the same documents where their "
        "scores are known."
    ]
    for word, sign in (("worse", -1), ("better", 1)):
        moved = []
        for row in rows:
            direction = sign if row["better"] == "higher" else -sign
            if row["low"] is not None and (row["low"] > 0 if direction > 0 else row["high"] < 0):
                moved.append(f"{row['task']} {row['metric']} ({row['change']:+.3f})")
        if moved:
            notes.append(f"Clearly {word}: {', '.join(moved)}.")
    return notes if len(notes) > 1 or not rows else [*notes, "No change is clearly different from 0."]
