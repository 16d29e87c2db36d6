"""One look for all figures: colours, axes, and the way a figure becomes a PNG or page SVG."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib
from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#24292f", "#6b7280", "#e3e6ea", "#fffffe"
SERIES = (
    "#2f6f9f",
    "#d0782a",
    "#3f8f63",
    "#7b5ea7",
    "#b5485d",
    "#399b9b",
    "#a88d2a",
    "#7a828c",
)
# What the same colours become on a dark page, in the order INK, MUTED, GRID, PAPER, *SERIES.
DARK = (
    "#e4e7eb",
    "#9aa3ad",
    "#343a42",
    "#16191d",
    "#6fb1de",
    "#eba468",
    "#7cc79b",
    "#b39ddb",
    "#e08a9b",
    "#7ccfcf",
    "#d6c067",
    "#a9b1ba",
)
NAMES = ("ink", "muted", "grid", "paper", *(f"s{i}" for i in range(len(SERIES))))
LIGHT = (INK, MUTED, GRID, PAPER, *SERIES)
PIXELS_PER_INCH = 93  # 9.4 inches fill the page
RC: Any = {
    "font.size": 9,
    "font.family": ["DejaVu Sans"],
    "svg.fonttype": "none",
    "axes.unicode_minus": False,
}


def colour(index: int) -> str:
    """Series colour, repeating after eight."""
    return SERIES[index % len(SERIES)]


def figure(panels: int = 1, *, width: float = 8.0, height: float = 3.0) -> tuple[Figure, list[Any]]:
    """A figure of `panels` axes side by side, in inches, without any pyplot state."""
    with matplotlib.rc_context(RC):
        made = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
        axes = list(made.subplots(1, panels, squeeze=False)[0])
        for ax in axes:
            dress(ax)
    return made, axes


def grid(panels: int, *, width: float = 9.4, row: float = 2.6) -> tuple[Figure, list[Any]]:
    """A figure of `panels` axes, two in a row, each row `row` inches high; an odd one is left out."""
    rows = -(-panels // 2)
    with matplotlib.rc_context(RC):
        made = Figure(figsize=(width, row * rows), layout="constrained", facecolor=PAPER)
        axes = list(made.subplots(rows, 2, squeeze=False).flat)
        for ax in axes[panels:]:
            made.delaxes(ax)
        for ax in axes[:panels]:
            dress(ax)
    return made, axes[:panels]


def dress(ax: Any, grid: str = "both") -> None:
    """Quiet axes: no box, thin grid behind the data, muted ticks."""
    ax.set_facecolor(PAPER)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(MUTED)
    ax.tick_params(colors=MUTED, labelcolor=INK, length=3, width=0.6)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(which="minor", length=0)
    ax.set_axisbelow(True)
    ax.grid(False)
    ax.grid(True, axis=grid, color=GRID, linewidth=0.7)
    for label in (ax.xaxis.label, ax.yaxis.label):
        label.set_color(INK)


def title(ax: Any, text: str, **options: Any) -> None:
    """A small bold title above the left edge."""
    ax.set_title(text, loc="left", fontsize=10, fontweight="bold", color=INK, **options)


def legend(ax: Any, **options: Any) -> None:
    """A frameless legend, only if there is more than nothing to explain."""
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        ax.legend(handles, labels, frameon=False, labelcolor=INK, fontsize=8, **options)


def png(made: Figure, dpi: int = 144) -> bytes:
    """The figure as PNG bytes on the light background; equal figures give equal bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(RC):
        made.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def svg(made: Figure, name: str) -> str:
    """The figure as an <svg> element for an HTML page, in CSS variables, free of outside links.

    Args:
      name: unique on the page; it salts the ids inside, so that figures cannot clash.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({**RC, "svg.hashsalt": name}):
        made.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    used = set(re.findall(r"#([\w.-]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", text)
    text = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", text, count=1)
    # One scale for all figures of a page, so that their lettering has one size.
    limit = f'<svg style="max-width:{made.get_figwidth() * PIXELS_PER_INCH:.0f}px"'
    text = re.sub(r'<svg([^>]*?) height="[^"]*"', rf"{limit}\1", text, count=1)
    for value, variable in zip(LIGHT, NAMES, strict=True):
        text = text.replace(value, f"var(--{variable})")
    return text.strip()
