"""Plain-text tables that fit a terminal, and numbers with units a person reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SCALES = {
    "s": ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "B": ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
}
SMALLEST = {"s": (1e-9, "ns"), "B": (1.0, "B")}
Row = Mapping[str, Any]


def quantity(value: Any, unit: str = "") -> str:
    """A number for people: three significant digits and a fitting unit; "-" for None and NaN.

    Args:
      unit: "s" and "B" are scaled (decimal), "%" multiplies a fraction by 100, any other text is
        appended. Examples: (0.0123, "s") -> "12.3 ms"; (0.3741, "%") -> "37.4 %";
        (15744.2, "tokens/s") -> "15,744 tokens/s".
    """
    if value is None or (isinstance(value, (float, np.floating)) and math.isnan(value)):
        return "-"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if unit == "%":
        return f"{digits(100 * float(value))} %"
    if unit in SCALES:
        # Compare after rounding, so that 0.9999 s reads "1 s" and not "1,000 ms".
        size = abs(float(f"{float(value):.3g}"))
        scale, name = next(
            ((scale, name) for scale, name in SCALES[unit] if size >= scale), SMALLEST[unit]
        )
        if size == 0:
            return f"0 {unit}"
        return f"{digits(value / scale)} {name}"
    return f"{digits(value)} {unit}".rstrip()


def digits(value: Any) -> str:
    """Three significant digits, thousands grouped, integers whole: 12,031; 3.14; 0.00012; 1e-09."""
    if isinstance(value, (int, np.integer)):
        return f"{int(value):,}"
    size = abs(float(value))
    if size == 0:
        return "0"
    if size >= 99.95:
        return f"{value:,.0f}"
    if size < 1e-4:
        return f"{value:.2e}"
    decimals = 2 - math.floor(math.log10(float(f"{size:.3g}")))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def cell(value: Any) -> str:
    """Text of one table cell: numbers through `quantity`, everything else through `str`."""
    if value is None or isinstance(value, (int, float, np.number, np.bool_)):
        return quantity(value)
    return " ".join(str(value).split())


def table(rows: Sequence[Row], *, title: str = "", width: int = 100) -> str:
    """Rows of equal keys as aligned text, no line longer than `width`.

    Numbers are right-aligned. Where the columns do not fit, the widest text is cut with an
    ellipsis, and if that is not enough the remaining columns continue below, under the first one.
    """
    if not rows:
        return f"{title}\n(no rows)".lstrip()
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [[cell(row.get(name)) for row in rows] for name in names]
    right = [
        all(row.get(name) is None or not isinstance(row.get(name), str) for row in rows)
        or all(text[:1].isdigit() or text[:1] in "-∞" for text in column)
        for name, column in zip(names, columns, strict=True)
    ]
    widths = [
        max(len(name), *map(len, column)) for name, column in zip(names, columns, strict=True)
    ]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        texts = [i for i in range(len(widths)) if not right[i] and widths[i] > 12]
        if not texts:
            break
        widths[max(texts, key=lambda i: widths[i])] -= 1
    lines = [title] if title else []
    for part in _parts(widths, width):
        lines.append(_line([names[i] for i in part], part, widths, right))
        lines.append("  ".join("-" * widths[i] for i in part))
        for row in range(len(rows)):
            lines.append(_line([columns[i][row] for i in part], part, widths, right))
        lines.append("")
    return "\n".join(lines[:-1])


def _line(
    texts: Sequence[str], part: Sequence[int], widths: Sequence[int], right: Sequence[bool]
) -> str:
    cells = []
    for text, i in zip(texts, part, strict=True):
        short = text if len(text) <= widths[i] else text[: widths[i] - 1] + "…"
        cells.append(short.rjust(widths[i]) if right[i] else short.ljust(widths[i]))
    return "  ".join(cells).rstrip()


def _parts(widths: list[int], width: int) -> list[list[int]]:
    """Column indices of each stacked piece; the first column leads every piece."""
    widths[0] = min(widths[0], width if len(widths) == 1 else width // 2)
    parts, used = [[0]], widths[0]
    for i in range(1, len(widths)):
        widths[i] = min(widths[i], max(width - widths[0] - 2, 1))
        if used + 2 + widths[i] > width and len(parts[-1]) > 1:
            parts.append([0])
            used = widths[0]
        parts[-1].append(i)
        used += 2 + widths[i]
    return parts


def latency_rows(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """The latency part of summary.json (`metrics.summarise`) as table rows, one per latency."""
    rows = []
    for key, name in (("ttft_seconds", "TTFT"), ("tpot_seconds", "TPOT"), ("e2e_seconds", "E2E")):
        one = summary[key]
        low, high = one["p99_interval"]
        bounds = [quantity(low, "s"), quantity(high, "s") if high is not None else "unbounded"]
        rows.append(
            {
                "latency": name,
                "count": quantity(one["count"]),
                **{p: quantity(one[p], "s") for p in ("mean", "p50", "p90", "p99")},
                "p99, 95 % interval": " to ".join(bounds) if one["count"] else "-",
            }
        )
    return rows


def summary_rows(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """Counts, rates and hit rates of summary.json as {what, value} rows."""
    rows = [
        ("requests", quantity(summary["requests"])),
        ("completed", quantity(summary["completed"])),
        *(
            (reason, quantity(n))
            for reason, n in {**summary["rejected"], **summary["lost"]}.items()
        ),
        ("preempted or rerouted", quantity(summary["preempted"])),
        (f"window: {summary['window']['rule']}", quantity(summary["window"]["seconds"], "s")),
        ("completed per second", quantity(summary["requests_per_second"], "/s")),
        ("input tokens per second", quantity(summary["input_tokens_per_second"], "/s")),
        ("output tokens per second", quantity(summary["output_tokens_per_second"], "/s")),
        ("requests with a prefix hit", quantity(summary["request_hit_fraction"], "%")),
        ("prompt blocks hit", quantity(summary["block_hit_fraction"], "%")),
        ("prompt tokens not recomputed", quantity(summary["token_hit_fraction"], "%")),
    ]
    if summary["slo_seconds"]:
        rate = quantity(summary["goodput_per_second"], "/s")
        rows.append(
            (f"goodput ({slo_text(summary)})", f"{rate}, {summary['goodput_requests']:,} met")
        )
    return [{"what": name, "value": value} for name, value in rows]


def slo_text(summary: Mapping[str, Any], joint: str = ", ") -> str:
    """The objectives of summary.json, "TTFT <= 4 s, TPOT <= 50 ms"."""
    terms = summary["slo_seconds"].items()
    return joint.join(f"{name.upper()} <= {quantity(value, 's')}" for name, value in terms)
