"""What a capacity search found: the cheapest candidate, why cheaper ones fail, tables, figures, page."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from deepinfer_jax.cost.frontier import mean_interval
from deepinfer_jax.report import page, records, style, write
from deepinfer_jax.report.table import quantity


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A cluster that might be bought; `price` per hour."""

    prompt_hardware: str
    prompt_engines: int
    decode_hardware: str
    decode_engines: int
    prompt_gpus: int
    decode_gpus: int
    price: float

    @property
    def gpus(self) -> int:
        return self.prompt_gpus + self.decode_gpus

    @property
    def name(self) -> str:
        return (
            f"{self.prompt_gpus} {self.prompt_hardware} prefill + "
            f"{self.decode_gpus} {self.decode_hardware} decode"
        )


@dataclasses.dataclass(frozen=True)
class Findings:
    """Candidates by rising price, numbers [C, K] of each over draws, the config's parameters."""

    candidates: Sequence[Candidate]
    values: Mapping[str, np.ndarray]
    parameters: Mapping[str, Any]

    def within(self) -> tuple[np.ndarray, np.ndarray]:
        """(mean share within the objectives [C], its 95 % half-width over draws [C])."""
        pairs = np.asarray([mean_interval(list(row)) for row in self.values["within"]])
        return pairs[:, 0], pairs[:, 1]

    def meets(self) -> np.ndarray:
        """bool [C]: the lower end of the interval reaches the attainment."""
        mean, half = self.within()
        return mean - half >= self.parameters["attainment"]

    def winner(self) -> int | None:
        """The cheapest candidate that meets the objectives; the highest share on equal prices."""
        good, mean = np.flatnonzero(self.meets()).tolist(), self.within()[0]
        if not good:
            return None
        price = lambda i: self.candidates[i].price  # noqa: E731
        return min(good, key=lambda i: (price(i), -mean[i], self.candidates[i].name))

    def runner_up(self) -> int | None:
        """The closest failure: of the candidates cheaper than the winner, the best share."""
        best, mean = self.winner(), self.within()[0]
        limit = np.inf if best is None else self.candidates[best].price
        cheaper = [i for i, c in enumerate(self.candidates) if c.price < limit]
        return max(cheaper, key=lambda i: mean[i]) if cheaper else None

    def shown(self) -> list[int]:
        """The winner, its dearer rivals and the best cheaper failures, by price."""
        best, mean, meets = self.winner(), self.within()[0], self.meets()
        limit = np.inf if best is None else self.candidates[best].price
        failures = [i for i, c in enumerate(self.candidates) if c.price < limit]
        failures.sort(key=lambda i: -mean[i])
        rivals = [i for i in np.flatnonzero(meets).tolist() if i != best][:4]
        return sorted({*failures[:5], *rivals, *([] if best is None else [best])})

    def why(self, i: int) -> str:
        """Which objective a candidate misses, and how busy the engines behind it are."""
        mean = {name: float(x[i].mean()) for name, x in self.values.items()}
        if self.meets()[i]:
            best = self.winner()
            more = self.candidates[i].price - self.candidates[i if best is None else best].price
            return "cheapest" if i == best else f"{more:.2f} more per hour"
        late, slow = 1 - mean["within_ttft"], 1 - mean["within_tpot"]
        if late <= 0 and slow <= 0:
            return "meets it on average; the draws scatter"
        if late >= slow:
            busy = quantity(mean["prompt_busy"], "%")
            return f"{quantity(late, '%')} of first tokens late, prompt engines {busy} busy"
        busy = quantity(mean["decode_busy"], "%")
        return f"{quantity(slow, '%')} of answers slow, decode engines {busy} busy"

    def title(self) -> str:
        p = self.parameters
        slo = " and ".join(f"{k.upper()} <= {quantity(v, 's')}" for k, v in p["slo"].items())
        return (
            f"{quantity(p['attainment'], '%')} within {slo}: the cheapest, dearer ones, and the "
            "best that cost less"
        )

    def rows(self) -> list[dict[str, str]]:
        """One candidate each, by price."""
        mean, half = self.within()
        return [
            {
                "per hour": f"{self.candidates[i].price:.2f}",
                "prefill": f"{self.candidates[i].prompt_gpus} {self.candidates[i].prompt_hardware}",
                "decode": f"{self.candidates[i].decode_gpus} {self.candidates[i].decode_hardware}",
                "within": f"{100 * mean[i]:.1f} ± {100 * half[i]:.1f} %",
                "": "<" if i == self.winner() else "",
                "why": self.why(i),
            }
            for i in self.shown()
        ]

    def sentences(self) -> list[str]:
        best, second = self.winner(), self.runner_up()
        found = []
        if best is not None:
            one = self.candidates[best]
            tokens = float(self.values["good_tokens_per_second"][best].mean())
            found.append(
                f"Cheapest: {one.name} at {one.price:.2f} per hour, "
                f"{one.price / (tokens * 3600 / 1e6):.2f} per million output tokens within the "
                "objectives."
            )
        else:
            found.append("No candidate meets the objectives.")
        if second is not None:
            one, mean = self.candidates[second], float(self.within()[0][second])
            found.append(
                f"Of the cheaper ones {one.name} at {one.price:.2f} comes closest with "
                f"{quantity(mean, '%')} and loses because: {self.why(second)}."
            )
        mixed = [c.prompt_hardware != c.decode_hardware for c in self.candidates]
        pure = [i for i in np.flatnonzero(self.meets()).tolist() if not mixed[i]]
        if best is not None and pure and any(mixed):
            one = self.candidates[min(pure, key=lambda i: self.candidates[i].price)]
            found.append(
                f"The cheapest with one hardware for both roles is {one.name} at {one.price:.2f}."
            )
        return found

    def plane(self) -> tuple[str, str, np.ndarray]:
        """(prompt hardware, decode hardware, share within [decode, prompt]) of the winner's pair."""
        chosen = self.winner()
        one = self.candidates[self.runner_up() or 0 if chosen is None else chosen]
        mean = self.within()[0]
        search = self.parameters["search"]
        shares = np.full((search["decode_engines"], search["prompt_engines"]), np.nan)
        for i, c in enumerate(self.candidates):
            if (c.prompt_hardware, c.decode_hardware) == (one.prompt_hardware, one.decode_hardware):
                shares[c.decode_engines - 1, c.prompt_engines - 1] = mean[i]
        return one.prompt_hardware, one.decode_hardware, shares

    def prices(self) -> Figure:
        """Price against the share within, and the envelope of the best share for the money."""
        made, (ax,) = style.figure(width=7.2, height=3.8)
        mean, good = self.within()[0], self.meets()
        price = np.asarray([c.price for c in self.candidates])
        ax.plot(price[~good], mean[~good], "o", color=style.SERIES[7], alpha=0.35, markersize=3.5,
                markeredgewidth=0, label="fails")  # fmt: skip
        ax.plot(price[good], mean[good], "o", color=style.colour(0), alpha=0.6, markersize=3.5,
                markeredgewidth=0, label="meets the objectives")  # fmt: skip
        order = np.argsort(price, kind="stable")
        ax.step(price[order], np.maximum.accumulate(mean[order]), where="post",
                color=style.MUTED, linewidth=1, label="best for the money")  # fmt: skip
        best = self.winner()
        if best is not None:
            ax.plot(price[best], mean[best], "o", color=style.colour(1), markersize=8,
                    label="cheapest")  # fmt: skip
        ax.axhline(self.parameters["attainment"], color=style.INK, linewidth=0.8, linestyle=":")
        ax.set_xlabel("price per hour")
        ax.set_ylabel("share within the objectives")
        style.legend(ax, loc="lower right")
        return made

    def map(self) -> Figure:
        """Share within by engine counts of the winner's hardware pair, with its row of prices."""
        first, second, shares = self.plane()
        made, (ax,) = style.figure(width=7.2, height=4.0)
        ax.grid(False)
        shades = LinearSegmentedColormap.from_list("share", ["#f3f6f9", style.SERIES[0]])
        x, y = np.arange(shares.shape[1]) + 1, np.arange(shares.shape[0]) + 1
        image = ax.pcolormesh(x, y, shares, cmap=shades, vmin=0, vmax=1)
        for (row, column), share in np.ndenumerate(shares):
            ink = style.PAPER if share > 0.6 else style.INK
            ax.text(column + 1, row + 1, f"{100 * share:.0f}", color=ink, fontsize=7,
                    ha="center", va="center")  # fmt: skip
        best = self.winner()
        if best is not None:
            one = self.candidates[best]
            ax.plot(one.prompt_engines, one.decode_engines, "s", markersize=17, color=style.SERIES[1],
                    markerfacecolor="none", markeredgewidth=1.8)  # fmt: skip
        ranks = self.parameters["engines"]["ranks"]
        ax.set_xticks(x)
        ax.set_yticks(y)
        ax.set_xlabel(f"prompt engines of {ranks} {first}")
        ax.set_ylabel(f"decode engines of {ranks} {second}")
        bar = made.colorbar(image, ax=ax, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.tick_params(colors=style.MUTED, labelcolor=style.INK, length=0, labelsize=9)
        bar.set_label("share within the objectives", color=style.INK, fontsize=9)
        return made

    def write(self, workdir: pathlib.Path, provenance: Sequence[Any]) -> None:
        """points.jsonl (every candidate), summary.json, plots, report.html."""
        environment, sentences = records.environment(), self.sentences()
        half = self.within()[1]
        meets, best = self.meets(), self.winner()
        points = [
            {**dataclasses.asdict(c), "half_width": float(half[i]), "meets": bool(meets[i])}
            | {name: float(x[i].mean()) for name, x in self.values.items()}
            for i, c in enumerate(self.candidates)
        ]
        records.write_jsonl(workdir / "points.jsonl", points, len(points))
        told = {
            "candidates": len(points),
            "scenarios": int(self.values["within"].size),
            "meeting": int(meets.sum()),
            "winner": None if best is None else points[best],
            "claims": sentences,
        }
        records.write_json(workdir / "summary.json", {**environment, **told})
        drawn = [
            page.Plot(
                "prices",
                "What the money buys",
                "Every candidate: price per hour and the share of requests within the objectives; "
                "dotted: the share asked for.",
                self.prices(),
            ),
            page.Plot(
                "engines",
                "Around the cheapest",
                "Percent of requests within the objectives by engine counts, for the cheapest "
                "candidate's hardware; the square marks it.",
                self.map(),
            ),
        ]
        write.write_plots(workdir, drawn)
        page.write(
            workdir / "report.html",
            page.Page(
                self.parameters["title"],
                f"{told['scenarios']:,} scenarios of {len(points):,} candidates",
                sentences=sentences,
                warnings=[
                    "Prices are parameters; the answer changes with their ratio.",
                    "Step times are a roofline at one efficiency; engines run one program shape.",
                ],
                plots=drawn,
                tables=[page.Table(self.title(), self.rows())],
                provenance=provenance,
                environment=environment,
            ),
        )
