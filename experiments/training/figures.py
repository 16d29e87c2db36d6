"""The figures of a training: losses over steps beside what counts reach, and what drafts are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from deepinfer_jax.report import style


def losses(points: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Figure:
    """Nats per token of both phases, means between points; held-out losses as lines.

    Args:
      points: rows of results.jsonl.
      summary: what summary.json holds.
    """
    made, axes = style.figure(2, width=9.0, height=3.3)
    panels = zip(axes, ("backbone", "draft"), ("loss", "draft_loss"), strict=True)
    for index, (ax, phase, name) in enumerate(panels):
        rows = [p for p in points if p["phase"] == phase]
        steps, nats = [p["step"] for p in rows], [p[name] for p in rows]
        ax.plot(steps, nats, color=style.colour(index), linewidth=1.8)
        style.title(ax, f"{phase}: training loss" + (", held-out lines" if index == 0 else ""))
        ax.set_xlabel("steps")
    axes[0].set_ylabel("nats per token")
    held_out = {"model": summary["held_out"]["nats"], **summary["baselines"]}
    for name, value in held_out.items():
        axes[0].axhline(value, color=style.MUTED, linestyle=(0, (4, 3)), linewidth=1)
        axes[0].annotate(
            f"{name} {value:.2f}", (1, value), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=7.5, color=style.INK,
        )  # fmt: skip
    return made


def acceptance(speculation: Mapping[str, Any]) -> Figure:
    """Left: how far drafts survive, by position. Right: confidence against acceptance."""
    made, axes = style.figure(2, width=9.0, height=3.3)
    position = np.arange(1, len(speculation["survival"]) + 1)
    calibration = speculation["calibration"]
    confidence, accepted = (
        [row[name] for row in calibration["positions"]] for name in ("confidence", "accepted")
    )
    for index, (label, values, width) in enumerate(
        (
            ("this and all before accepted", speculation["survival"], -0.27),
            ("accepted, given all before", accepted, 0),
            ("confidence, given all before", confidence, 0.27),
        )
    ):
        axes[0].bar(position + width, values, 0.25, color=style.colour(index), label=label)
    style.title(axes[0], "acceptance by position")
    axes[0].set_xlabel("draft position")
    axes[0].set_ylim(0, 1)
    axes[0].legend(frameon=False, fontsize=7.5, labelcolor=style.INK)
    bins = calibration["bins"]
    axes[1].plot([0, 1], [0, 1], color=style.MUTED, linestyle=(0, (4, 3)), linewidth=1)
    axes[1].plot(
        [b["confidence"] for b in bins], [b["accepted"] for b in bins],
        "o-", color=style.colour(0), linewidth=1.8, markersize=5,
    )  # fmt: skip
    style.title(axes[1], f"calibration; mean gap {calibration['expected_error']:.3f}")
    axes[1].set_xlabel("confidence")
    axes[1].set_ylabel("share accepted")
    return made
