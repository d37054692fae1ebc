"""A plan as one HTML file: the table, and a plot inlined as SVG."""

from __future__ import annotations

import html
import importlib.util
import io

from tpupipe.errors import UsageError
from tpupipe.preflight.plan import Plan, Row

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}th,td{border-bottom:1px solid #ddd;padding:.3rem .6rem;text-align:left}"
    "td.number{text-align:right}tr.no{color:#a00}svg{max-width:100%;height:auto}"
)


def check_plots() -> None:
    """Refuses early where matplotlib is missing.

    Raises:
        UsageError: It is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--html needs matplotlib, which is not installed.", hint="pip install 'tpupipe[plots]'")


def plan_html(plan: Plan, table: tuple[tuple[str, ...], list[tuple[str, ...]]], lines: list[str]) -> str:
    """The plan as a page that needs nothing else.

    Args:
        plan: The plan.
        table: Headings and rows as text.
        lines: What is said below.
    """
    headings, rows = table
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr{'' if row.fits else ' class=no'}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
        for row, cells in zip(plan.rows, rows, strict=True)
    )
    reasons = [f"{row.program.label} on {row.program.place}: {row.reason}" for row in plan.rows if row.reason]
    said = "".join(f"<li>{html.escape(line)}</li>" for line in (*reasons, *lines))
    title = html.escape(f"{plan.job}: plan")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>'
        f"<body><h1>{title}</h1><p>Times are bounds, not predictions.</p>{_plots(plan)}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><ul>{said}</ul></body></html>\n"
    )


def _plots(plan: Plan) -> str:
    return "".join(_plot(stage, [row for row in plan.of(stage) if row.fits]) for stage in plan.stages)


def _plot(stage: str, rows: list[Row]) -> str:
    """Price over speed: the best are at the lower right."""
    points = [(r.program.samples_per_s, r.usd_per_million, r) for r in rows]
    known = [(rate, usd, row) for rate, usd, row in points if rate is not None and usd is not None]
    if not known:
        return f"<p>{html.escape(stage)}: no row with a price and a time to plot.</p>"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for target in dict.fromkeys(str(row.program.spec) for _, _, row in known):
        mine = [(rate, usd, row) for rate, usd, row in known if str(row.program.spec) == target]
        axes.plot([rate for rate, _, _ in mine], [usd for _, usd, _ in mine], "o-", label=target)
        for rate, usd, row in mine:
            axes.annotate(str(row.program.batch), (rate, usd), textcoords="offset points", xytext=(5, 5), fontsize=8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="samples per second, at most",
        ylabel="USD per million samples, at least",
        title=f"{stage}: by slice and batch",
    )
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize=8, loc="upper right")  # "best" takes long
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
