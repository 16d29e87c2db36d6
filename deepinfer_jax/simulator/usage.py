"""What a run used: time in steps, GPU-hours, running slots, bytes on links."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer_jax.cost.steps import TICKS_PER_SECOND
from deepinfer_jax.simulator.cluster import ClusterConfig, Mode
from deepinfer_jax.simulator.trajectory import Trajectory

IDLE, PREFILL, DECODE, MIXED = range(4)


OFF, STARTING, SERVING, LEAVING = range(4)


def _share(ticks: np.ndarray, of: np.ndarray) -> float | None:
    return float(ticks.sum() / of.sum()) if of.sum() else None


def serving_ticks(run: Trajectory, cluster: ClusterConfig) -> np.ndarray:
    """[M] ticks in which each engine served: the whole run, unless engines come and go."""
    if run.lives is None:
        return np.full(cluster.engines, int(run.end))
    return np.asarray(run.lives.life_ticks)[:, SERVING:].sum(axis=1)


def lives(run: Trajectory, cluster: ClusterConfig, gpus: int) -> dict[str, Any]:
    """Keys of a run in which engines come and go; none otherwise.

    gpu_hours_starting, _serving, _leaving; crashes: times that a crash hit a request;
    forwarded: requests that departing engines forwarded; blocks_lost with engines' own caches;
    unreadable_matches, unreadable_blocks: hits cut short because storage nodes were down.
    """
    if run.lives is None:
        return {}
    each = np.asarray(run.lives.life_ticks) * gpus / cluster.engines / TICKS_PER_SECOND / 3600
    names = {"starting": STARTING, "serving": SERVING, "leaving": LEAVING}
    hours = {f"gpu_hours_{name}": float(each[:, k].sum()) for name, k in names.items()}
    return hours | {
        "gpu_hours": sum(hours.values()),
        "crashes": int(np.sum(run.lives.crashes)),
        "forwarded": int(run.lives.forwards),
        "blocks_lost": int(run.lives.blocks_lost),
        "unreadable_matches": int(run.lives.unreadable_matches),
        "unreadable_blocks": int(run.lives.unreadable_blocks),
    }


def swept(run: Trajectory) -> dict[str, Any]:
    """Keys of a run whose caches are swept; none otherwise.

    sweeps; blocks_expired, blocks_reclaimed: deleted by age, and for the watermark;
    blocks_held: of all caches, the mean over the instants after a sweep.
    """
    if run.swept is None:
        return {}
    sweeps = int(run.swept.sweeps)
    return {
        "sweeps": sweeps,
        "blocks_expired": int(run.swept.expired),
        "blocks_reclaimed": int(run.swept.reclaimed),
        "blocks_held": int(run.swept.held_at_sweeps) / sweeps if sweeps else None,
    }


def stored(run: Trajectory) -> dict[str, Any]:
    """Keys of a run whose fetches wait for storage nodes; none otherwise.

    storage_reads; storage_read_seconds: mean from placement to the last stripe's tenth fragment;
    storage_bytes: of all fragments asked; storage_busy_fraction: of all nodes' time.
    """
    if run.stored is None:
        return {}
    reads, span = int(run.stored.reads), max(int(run.end), 1)
    return {
        "storage_reads": reads,
        "storage_read_seconds": float(run.stored.read_ticks) / max(reads, 1) / TICKS_PER_SECOND,
        "storage_bytes": int(run.stored.bytes),
        "storage_busy_fraction": float(np.mean(run.stored.node_busy) / span),
    }


def usage(run: Trajectory, cluster: ClusterConfig, gpus: int) -> dict[str, Any]:
    """Keys that summary.json holds besides `metrics.summarise`; the span is time zero to the end.

    `lives`, `swept` and `stored` add to them. Shares are of the time in which engines serve.

    simulated_seconds; gpus, gpu_hours; busy_fraction: time in any step over all engines;
    prefill_busy_fraction: prompt and mixed steps over the engines that take prompts;
    decode_busy_fraction: decode and mixed steps over the engines that decode (a mixed step counts
    in both); slot_fraction: running requests over the slots of the decoding engines;
    fetched_bytes, state_fetched_bytes, handed_off_bytes; blocks_published, blocks_evicted.
    """
    span, modes = int(run.end), np.asarray(cluster.modes)
    takes, decodes = modes != int(Mode.COMPLETION), modes != int(Mode.PROMPT)
    t = run.requests
    joined, first = np.asarray(t.decode_start), np.asarray(t.first_token)
    began = np.where(joined >= 0, joined, first)
    done = (np.asarray(t.finish) >= 0) & (began >= 0)
    running = np.sum((np.asarray(t.finish) - began)[done])
    serving = serving_ticks(run, cluster)
    slots = int(serving[decodes].sum()) * cluster.ranks * cluster.slots
    return {
        "simulated_seconds": span / TICKS_PER_SECOND,
        "gpus": gpus,
        "gpu_hours": gpus * span / TICKS_PER_SECOND / 3600,
        "busy_fraction": _share(run.busy, serving),
        "prefill_busy_fraction": _share(run.busy[takes][:, [PREFILL, MIXED]], serving[takes]),
        "decode_busy_fraction": _share(run.busy[decodes][:, [DECODE, MIXED]], serving[decodes]),
        "slot_fraction": float(running / slots) if slots else None,
        "fetched_bytes": int(run.fetched_bytes),
        "state_fetched_bytes": int(run.swa_bytes),
        "handed_off_bytes": int(run.handoff_bytes),
        "blocks_published": int(run.blocks_published),
        "blocks_evicted": int(run.blocks_evicted),
        **lives(run, cluster, gpus),
        **swept(run),
        **stored(run),
    }


def engine_rows(run: Trajectory, cluster: ClusterConfig) -> list[dict[str, Any]]:
    """One row per engine: its steps and the share of the span it spent in each kind of step."""
    span = max(int(run.end), 1)
    t = run.requests
    prompts = np.bincount(
        np.asarray(t.prefill_engine)[np.asarray(t.first_token) >= 0], minlength=cluster.engines
    )
    rows = []
    for engine, mode in enumerate(cluster.modes):
        row = {"engine": str(engine), "mode": Mode(mode).name.lower(), "prompts": prompts[engine]}
        row["steps"] = int(run.steps[engine, PREFILL:].sum())
        for name, kind in (("prefill", PREFILL), ("decode", DECODE), ("mixed", MIXED)):
            if run.busy[:, kind].any():
                row[f"in {name} steps"] = f"{100 * run.busy[engine, kind] / span:.1f} %"
        if run.lives is not None:
            held = np.asarray(run.lives.life_ticks)[engine] / span
            row |= {
                "serving": f"{100 * held[SERVING:].sum():.1f} %",
                "off": f"{100 * held[OFF]:.1f} %",
            }
        row["idle"] = f"{100 * (1 - run.busy[engine, PREFILL:].sum() / span):.1f} %"
        rows.append(row)
    return rows


def spread_back(ticks: np.ndarray, room: np.ndarray | float) -> np.ndarray:
    """Busy ticks [B, M] with what exceeds the room of a bin moved to the bins before it.

    The simulator books a step where it ends. An engine's steps do not overlap, so more than the time
    it served in a bin (`room`, [B, M] or one number) means that the work began in earlier bins.
    Totals are kept, except that the first bin keeps what no earlier one can take.
    """
    out = np.array(ticks, np.float64)
    room = np.broadcast_to(np.asarray(room, np.float64), out.shape)
    for b in range(len(out) - 1, 0, -1):
        over = np.maximum(out[b] - room[b], 0)
        out[b] -= over
        out[b - 1] += over
    return out


def _unfolded(series: np.ndarray, bins: int) -> np.ndarray:
    """[bins, M] of a series whose last bin holds all that came later, spread evenly."""
    out = np.zeros((bins, series.shape[1]))
    out[: len(series)] = series
    last = len(series) - 1
    out[last:] = out[last] / (bins - last)
    return out


def _served(run: Trajectory, cluster: ClusterConfig, bins: int) -> np.ndarray:
    """[B, M] ticks in which each engine served, in the bins up to the run's end."""
    width, end = int(run.bin_ticks), int(run.end)
    shown = max(1, -(-end // width))
    if run.lives is not None:
        return _unfolded(run.lives.served, bins)[:shown]
    return np.repeat(_covered(shown, width, end)[:, None], cluster.engines, axis=1)


def _covered(bins: int, width: int, end: int) -> np.ndarray:
    """[bins] ticks of each bin before the run's end."""
    return np.maximum(np.minimum(end - np.arange(bins) * width, width), 1)


def _bins(run: Trajectory) -> int:
    return max(len(run.busy_series), -(-int(run.end) // int(run.bin_ticks)))


def busy_over_time(
    run: Trajectory, cluster: ClusterConfig
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """({"prompt engines": share of the time served in steps [B], ...} by mode, bin edges [B + 1] in seconds).

    The last bin also holds everything that ends after the span of the series, so it is spread over
    the bins up to the end of the run first.
    """
    width, bins = int(run.bin_ticks), _bins(run)
    served = _served(run, cluster, bins)
    ticks = spread_back(_unfolded(run.busy_series, bins)[: len(served)], served)
    modes = np.asarray(cluster.modes)
    shares = {
        f"{mode.name.lower()} engines": ticks[:, modes == mode].sum(axis=1)
        / np.maximum(served[:, modes == mode].sum(axis=1), 1)
        for mode in Mode
        if np.any(modes == mode)
    }
    return shares, np.arange(len(ticks) + 1) * width / TICKS_PER_SECOND


def up_over_time(run: Trajectory, cluster: ClusterConfig) -> dict[str, np.ndarray]:
    """{"prompt engines": engines that serve, averaged over each bin of `busy_over_time` [B], ...}.

    Empty where engines do not come and go.
    """
    if run.lives is None:
        return {}
    served, modes = _served(run, cluster, _bins(run)), np.asarray(cluster.modes)
    each = served / _covered(len(served), int(run.bin_ticks), int(run.end))[:, None]
    return {
        f"{mode.name.lower()} engines": each[:, modes == mode].sum(axis=1)
        for mode in Mode
        if np.any(modes == mode)
    }


def scaling_rounds(run: Trajectory) -> dict[str, np.ndarray]:
    """{"prompt": [n, 4], "completion": [n, 4]} of the scaled pools: tick, engines, demand, engines wanted.

    Raises:
      ValueError: more rounds happened than are recorded.
    """
    if run.lives is None or run.lives.scale_log is None:
        return {}
    count, log = int(np.asarray(run.lives.scale_rounds)), np.asarray(run.lives.scale_log)
    if count > len(log):
        raise ValueError(
            f"{count} scaling rounds happened where {len(log)} are recorded: use longer rounds"
        )
    pools = {"prompt": log[:count, [0, 1, 2, 3]], "completion": log[:count, [0, 4, 5, 6]]}
    return {name: rows for name, rows in pools.items() if np.any(rows[:, 1] >= 0)}
