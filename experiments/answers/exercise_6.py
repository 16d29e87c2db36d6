"""A service claim, where it is supported, and the observation that would test it in production.

The chapter's Table 11.1 has three columns: what the engine releases, what other projects release,
what is only described. Every config tags its values so, and the table is a query on those tags.
"""

from __future__ import annotations

import fnmatch
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from deepinfer_jax.cost.steps import FEMTOSECONDS_PER_SECOND, StepCost
from deepinfer_jax.report import style
from deepinfer_jax.report.page import Plot, Table
from deepinfer_jax.simulator.cluster import ClusterConfig, Mode
from deepinfer_jax.simulator.synthetic import ConstantLengths, PrefixGroups, synthetic
from deepinfer_jax.simulator.traces import Trace
from deepinfer_jax.simulator.workload import workload
from experiments import batch
from experiments.answers.answer import Answer, Exercise, Prediction
from experiments.settings import CONFIGS, TAGS, UserError, load, provenance

COLUMNS = {
    "released": "Released in DeepInfer",
    "separate": "Separately released",
    "documented": "Described service logic",
}
"""Table 11.1's headings by provenance tag."""
STORES = {"one shared store": "shared", "a cache per engine": "local"}


def tagged(paths: Iterable[pathlib.Path], records: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Every {config, parameter, value, tag, source} of config files and of runs' config.json.

    Raises:
      UserError: a record that is not a run's config.json.
    """
    rows = [{"config": path.stem, **row} for path in paths for row in provenance(load(str(path)))]
    for record in records:
        try:
            content = json.loads(pathlib.Path(record).read_text())
            rows += [{"config": record, **row} for row in content["provenance"]]
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                f"records has {record}, which is not a run's config.json: give paths of such files"
            ) from None
    return rows


def query(
    rows: Sequence[Mapping[str, Any]], tag: str = "*", parameter: str = "*", source: str = "*"
) -> list[Mapping[str, Any]]:
    """The rows whose tag, parameter and source fit the patterns (`fnmatch`)."""
    patterns = {"tag": tag, "parameter": parameter, "source": source}
    return [
        row
        for row in rows
        if all(fnmatch.fnmatchcase(str(row[name]), p) for name, p in patterns.items())
    ]


def support(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """{column of Table 11.1, source, parameters, configs}: one row per distinct source."""
    found: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
    for row in rows:
        if row["tag"] in COLUMNS:
            names, configs = found.setdefault((row["tag"], row["source"]), (set(), set()))
            names.add(row["parameter"])
            configs.add(row["config"])
    order = sorted(found, key=lambda key: (list(COLUMNS).index(key[0]), key[1]))
    return [
        {
            "column": COLUMNS[tag],
            "source": source,
            "parameters": ", ".join(sorted(found[tag, source][0])),
            "configs": ", ".join(sorted(found[tag, source][1])),
        }
        for tag, source in order
    ]


def requests(section: Mapping[str, Any], seed: int) -> Trace:
    """Conversations of a few groups, arriving evenly and so slowly that nobody waits."""
    return synthetic(
        "deterministic",
        requests=section["requests"],
        rate=1.0,
        lengths=ConstantLengths(section["own_tokens"], 1),
        seed=seed,
        prefixes=PrefixGroups(section["groups"], section["prefix_tokens"]),
    )


def cluster(section: Mapping[str, Any], scope: str) -> ClusterConfig:
    """Engines in turn; a prompt takes a fraction of a second, a fetch nothing."""
    token = round(
        0.1 * FEMTOSECONDS_PER_SECOND / (section["own_tokens"] + section["prefix_tokens"])
    )
    return ClusterConfig(
        modes=(Mode.NORMAL,) * section["engines"],
        cost=StepCost(0, token, 0, 0, 0, 0, [[1, 0, 0]], 0, 0),
        cache_scope=scope,
        prefill_policy="round_robin",
    )


def moved(group: np.ndarray, engine: np.ndarray) -> np.ndarray:
    """For each request: 1 if its group was last served by another engine, 0 if not, -1 at first."""
    last: dict[int, int] = {}
    found = np.full(len(group), -1)
    for i, (g, e) in enumerate(zip(group.tolist(), engine.tolist(), strict=True)):
        if g in last:
            found[i] = last[g] != e
        last[g] = e
    return found


def shares(hits: np.ndarray, where: np.ndarray, tokens: float) -> dict[str, float]:
    """Token hit shares of requests that stayed with their engine and of those that moved."""
    return {
        name: float(np.mean(hits[where == k]) / tokens) for k, name in ((0, "stayed"), (1, "moved"))
    }


def predict(section: Mapping[str, Any], seed: int) -> Prediction:
    made = requests(section, seed)
    group, engine = made.run_first, np.arange(len(made)) % section["engines"]
    length = section["own_tokens"] + section["prefix_tokens"]
    cached = 128 * (section["prefix_tokens"] // 128)  # whole blocks; the last 134 tokens never hit
    hit = min(cached, 128 * ((length - 134) // 128))
    values = {}
    for name, scope in STORES.items():
        seen: set[tuple[int, int]] = set()
        hits = np.zeros(len(made))
        for i, key in enumerate(zip(group.tolist(), engine.tolist(), strict=True)):
            known = key if scope == "local" else (key[0], -1)
            hits[i] = hit if known in seen else 0
            seen.add(known)
        values[name] = shares(hits, moved(group, engine), length)
    shared, local = values.values()
    return Prediction(
        "The claim is that with blocks in one shared store any prefill engine can hit any prefix, "
        "so that no affinity is needed. If it holds, the token hit share of requests whose "
        "conversation changed engines equals that of requests that stayed: "
        f"{shared['moved']:.3f} and {shared['stayed']:.3f} here. Were caches the engines' own, "
        f"routing in turn would give {local['moved']:.3f} and {local['stayed']:.3f}.",
        values,
    )


def answer(section: Mapping[str, Any], seed: int, prediction: Prediction) -> Answer:
    rows = tagged(sorted(CONFIGS.glob("*.py")), section["records"])
    claim = query(rows, section["tag"], section["parameter"], section["source"])
    made = requests(section, seed)
    cases = {name: (cluster(section, scope), workload(made)) for name, scope in STORES.items()}
    length = section["own_tokens"] + section["prefix_tokens"]
    values = {}
    for name, run in batch.run(cases).items():
        t = run.requests
        values[name] = shares(t.compute_hit_tokens, moved(made.run_first, t.prefill_engine), length)
    agree = all(
        np.isclose(values[name][k], prediction.values[name][k])
        for name in values
        for k in values[name]
    )
    shared, local = values.values()
    where = ", ".join(sorted({row["config"] for row in claim})) or "NO CONFIG"
    sources = "; ".join(sorted({row["source"] for row in claim})) or "nothing"
    counted = {tag: len(query(rows, tag)) for tag in TAGS}
    return Answer(
        f"Of {len(rows)} values in {len({row['config'] for row in rows})} configs and records, "
        + ", ".join(f"{n} are {tag}" for tag, n in counted.items())
        + f". The claim (shared block KV needs no prefix affinity) is {section['tag']} only: the "
        f"query for {section['parameter']} finds it in {where}, from {sources}. No released code "
        "contains the entrypoint that would do it. One observation tests it in production: log "
        "for each request its conversation, its prefill engine and the tokens not recomputed, and "
        "compare requests that changed engines with those that stayed. In the simulated service "
        f"the shares are {shared['moved']:.3f} and {shared['stayed']:.3f} with a shared store, "
        f"{local['moved']:.3f} and {local['stayed']:.3f} with a cache per engine, so a difference "
        "near zero supports the claim and one of that size refutes it. "
        + ("Every share is the predicted one." if agree else "THE PREDICTION FAILED."),
        [
            Table("The claim, by its tag", [dict(row) for row in claim]),
            Table("Table 11.1 as a query: sources of tagged values", support(rows)),
        ],
        [
            Plot(
                "exercise_6",
                "What would be observed",
                "Left: values of all configs by tag. Right: share of prompt tokens not recomputed.",
                figure(counted, values),
            )
        ],
        {"agrees": agree, "tags": counted, "claim": [dict(row) for row in claim], "hits": values},
    )


def figure(counted: Mapping[str, int], values: Mapping[str, Mapping[str, float]]) -> Figure:
    """Values by tag, and the observation that tells two stores apart."""
    made, (left, right) = style.figure(2, width=9.4, height=2.9)
    style.dress(left, "x")
    style.title(left, "Configured values by provenance", pad=18)
    left.barh(list(counted), list(counted.values()), color=style.colour(0), height=0.6)
    for row, n in enumerate(counted.values()):
        left.annotate(
            f"{n}", (n, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    left.invert_yaxis()
    style.dress(right, "y")
    style.title(right, "Prompt tokens not recomputed", pad=18)
    for index, name in enumerate(("stayed", "moved")):
        places = np.arange(len(values)) + 0.4 * index
        heights = [one[name] for one in values.values()]
        label = f"conversation {name}"
        right.bar(places, heights, width=0.36, color=style.colour(index), label=label)
    right.set_xticks(np.arange(len(values)) + 0.2, list(values))
    right.set_ylim(0, 1)
    style.legend(right, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, borderaxespad=0)
    return made


EXERCISE = Exercise(
    "Which passage supports a claim of Table 11.1, and what would have to be observed to test it "
    "in production?",
    predict,
    answer,
)
