"""A report as one HTML file: no script, no outside resource, readable in light and dark."""

from __future__ import annotations

import dataclasses
import html
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from deepinfer_jax.report import records, style
from deepinfer_jax.report.table import cell


@dataclasses.dataclass(frozen=True)
class Plot:
    """A figure with the sentence that says how to read it. `name` is also its file name."""

    name: str
    title: str
    caption: str
    figure: Figure


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of equal keys under a heading, with an optional note below."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Page:
    """Everything a report shows, in the order it is shown.

    `provenance` rows are {parameter, value, tag, source}; `environment` is
    `records.environment()`; `headline` a few {name: text} pairs set large at the top.
    """

    title: str
    subtitle: str = ""
    headline: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sentences: Sequence[str] = ()
    warnings: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    provenance: Sequence[Mapping[str, Any]] = ()
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)


TAGS = {
    "released": "seen in the released DeepInfer",
    "separate": "from another public project",
    "documented": "stated in the chapter's questions and answers",
    "inferred": "deduced, not stated anywhere",
    "assumed": "chosen for this experiment",
    "command line": "given by whoever ran this",
    "untagged": "its config names no source",
}


def render(page: Page) -> str:
    """The page as HTML5 text."""
    body = [f"<header><h1>{_t(page.title)}</h1>"]
    if page.subtitle:
        body.append(f'<p class="subtitle">{_t(page.subtitle)}</p>')
    body.append("</header>")
    if page.headline:
        tiles = "".join(
            f"<div><dt>{_t(k)}</dt><dd>{_t(v)}</dd></div>" for k, v in page.headline.items()
        )
        body.append(f'<dl class="tiles">{tiles}</dl>')
    if page.sentences:
        body += ["<section><h2>What this run says</h2>", _list(page.sentences), "</section>"]
    if page.warnings:
        body += ['<section class="warn"><h2>Before quoting it</h2>', _list(page.warnings)]
        body.append("</section>")
    for number, plot in enumerate(page.plots, start=1):
        drawing = style.svg(plot.figure, plot.name)
        body.append(
            f"<section><h2>{_t(plot.title)}</h2><figure>{drawing}<figcaption>"
            f"<b>Figure {number}.</b> {_t(plot.caption)}</figcaption></figure></section>"
        )
    for one in page.tables:
        note = f'<p class="note">{_t(one.note)}</p>' if one.note else ""
        body.append(f"<section><h2>{_t(one.title)}</h2>{_table(one.rows)}{note}</section>")
    if page.provenance:
        used = [tag for tag in TAGS if any(row.get("tag") == tag for row in page.provenance)]
        meanings = "; ".join(f"{tag}: {TAGS[tag]}" for tag in used)
        body.append(
            "<section><h2>Parameters and where they come from</h2><details open><summary>"
            f"{len(page.provenance)} parameters</summary>{_table(page.provenance)}</details>"
            f'<p class="note">{_t(meanings)}.</p></section>'
        )
    if page.environment:
        items = " · ".join(f"{_t(k)} {_t(cell(v))}" for k, v in page.environment.items())
        body.append(f"<footer>{items}</footer>")
    return TEMPLATE.format(title=_t(page.title), css=_css(), body="\n".join(body))


def write(path: pathlib.Path, page: Page) -> None:
    """Renders to `path`, atomically."""
    text = render(page)
    with records.atomic(path) as file:
        file.write(text.encode())


def _t(text: Any) -> str:
    return html.escape(str(text))


def _breakable(text: str) -> str:
    """The text, with places where a path or a dotted name may go on in the next line."""
    return re.sub(r"([/_.])(?=[A-Za-z])", r"\1<wbr>", _t(text))


def _list(sentences: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{_t(s)}</li>" for s in sentences) + "</ul>"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "<p>(no rows)</p>"
    names = list(dict.fromkeys(name for row in rows for name in row))
    numeric = {
        name
        for name in names
        if all(not isinstance(row.get(name), str) or _numeric(row[name]) for row in rows)
    }
    classes = {name: ' class="n"' if name in numeric else "" for name in names}
    head = "".join(f"<th{classes[name]}>{_t(name)}</th>" for name in names)
    lines = "".join(
        "<tr>"
        + "".join(f"<td{classes[n]}>{_breakable(cell(row.get(n)))}</td>" for n in names)
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
        "</div>"
    )


def _numeric(text: str) -> bool:
    return text == "-" or (text[:1].isdigit() and len(text) < 24)


def _css() -> str:
    light = "".join(f"--{n}:{c};" for n, c in zip(style.NAMES, style.LIGHT, strict=True))
    dark = "".join(f"--{n}:{c};" for n, c in zip(style.NAMES, style.DARK, strict=True))
    return CSS.replace("LIGHT", light).replace("DARK", dark)


TEMPLATE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{css}</style></head>
<body><main>
{body}
</main></body></html>
"""

CSS = """
:root{color-scheme:light dark;LIGHT}
@media (prefers-color-scheme:dark){:root{DARK}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif}
main{max-width:58rem;margin:0 auto;padding:3rem 1.5rem 4rem}
h1{font-size:1.75rem;line-height:1.2;margin:0;letter-spacing:-.01em}
h2{font-size:1.06rem;margin:2.6rem 0 .6rem;letter-spacing:-.003em}
.subtitle{margin:.4rem 0 0;color:var(--muted)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(8.2rem,1fr));gap:.6rem 1.4rem;
margin:1.8rem 0 0;padding:.8rem 0;border-top:1px solid var(--grid);border-bottom:1px solid var(--grid)}
dt{font-size:.78rem;color:var(--muted)}dd{margin:.1rem 0 0;font-size:1.18rem;white-space:nowrap;
font-variant-numeric:tabular-nums}
ul{margin:0;padding-left:1.1rem}li{margin:.35rem 0}li::marker{color:var(--muted)}
.warn{border-left:3px solid var(--s1);padding-left:1rem;margin-top:2.2rem}.warn h2{margin-top:0}
figure{margin:0}svg text{fill:var(--ink)}svg{display:block;width:100%;height:auto;overflow:visible}
figcaption,.note{font-size:.86rem;color:var(--muted);margin:.5rem 0 0;max-width:46rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;width:100%}
th{text-align:left;font-weight:600;color:var(--muted);border-bottom:1px solid var(--muted)}
th,td{padding:.34rem 1.1rem .34rem 0;vertical-align:top}td{border-bottom:1px solid var(--grid)}
.n{text-align:right}th:last-child,td:last-child{padding-right:0}
summary{cursor:pointer;color:var(--muted);font-size:.86rem;margin-bottom:.4rem}
footer{margin-top:3rem;padding-top:.8rem;border-top:1px solid var(--grid);font-size:.78rem;
color:var(--muted);overflow-wrap:anywhere}
@media print{main{padding:0;max-width:none}section{break-inside:avoid}}
"""
