"""`python -m lab.papers`: published results computed again, as tables that say how close."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from controller.core.cost.roofline import Overlap
from controller.core.training.stride_planner import STRIDES
from lab.papers.drafters import Envelope, crossover
from lab.papers.tide import ALPHAS, GAMMA, STATED_SPEEDUPS, TideReport
from lab.papers.tts import StrideReport
from simulator import published_qwen

_TIDE_NOTE = """\
The model of the second table is taken to be gpt-oss-120b: no other in Table 5 is fast enough.
Not comparable: Figures 4, 8 and 9 (drawn, without numbers), so neither the 3 % nor the 25 % error
of section 5.4; the trees of Table 4 (top-k 4), which Eq. 5 does not describe; absolute throughputs,
which are end to end in Table 4 (prompts, batches not always full) and of one step in Table 5."""

_DRAFTER_NOTE = """\
Not comparable: their runs include start and end (20 batches' worth of requests), the tokens that a
last step drafts past a request's end, and acceptance drawn round by round; the formula has none."""


_STRIDE_NOTE = """\
Tokens/s over those without updates; "over best" is over the best fixed stride in hindsight.
Step times are a + b / S, fitted to the tables; a sequence of 2000 steps begins with the unadapted
drafter, and its acceptance nears what its stride settles at over about a sixth of it.
Off is not the paper's: a step without updates takes a here, and longer in Table 3 (mean speed-up at
S = 5: 1.53 there, 1.17 here). The core's prior was fitted to Table 7, so streams 7 are no test of
it."""


def tables(report: TideReport | tuple[Envelope, ...] | StrideReport) -> Group:
    """Makes the tables for a `rich` console."""
    if isinstance(report, StrideReport):
        return Group(*_strides(report))
    if isinstance(report, TideReport):
        return Group(*_tide(report))
    return Group(*_drafters(report))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _strides(report: StrideReport) -> Iterator[RenderableType]:
    table = _table(
        "Online updates: the stride that the core chooses beside every fixed one",
        "stream", *("off" if s == 0 else f"S = {s}" for s in STRIDES),
        "chosen", "over best", "least",
    )  # fmt: skip
    table.columns[0].justify = "left"
    for runs in (report.single, report.mixes):
        for run in runs:
            cells = [
                f"[bold]{value:.3f}[/]" if stride == run.best else f"{value:.3f}"
                for stride, value in run.fixed.items()
            ]
            mean_chosen = sum(run.chosen_rates) / len(run.chosen_rates)
            ratio = sum(run.ratios) / len(run.ratios)
            table.add_row(
                run.name, *cells, f"{mean_chosen:.3f}", f"{ratio:.3f}", f"{min(run.ratios):.3f}"
            )
        table.add_section()
    yield table
    yield Text(_STRIDE_NOTE)


def _tide(report: TideReport) -> Iterator[RenderableType]:
    table = _table(
        f"TIDE, Eq. 5 from Table 5, gamma = {GAMMA}: when does speculation pay?",
        "B", "c(B)", "beta(B)", *(f"speedup at alpha {alpha}" for alpha in ALPHAS),
        "pays from length", "alpha",
    )  # fmt: skip
    model = ""
    for point in report.points:
        if point.model != model:
            model = point.model
            table.add_section()
            table.add_row(model)
        table.add_row(
            str(point.batch_size),
            f"{point.draft_ratio:.3f}",
            f"{point.verify_ratio:.3f}",
            *(f"{speedup:.2f}x" for speedup in point.speedups),
            f"{point.threshold_length:.2f}",
            "never" if point.threshold_alpha is None else f"{point.threshold_alpha:.2f}",
        )
    yield table
    table = _table(
        "TIDE, Table 4: Eq. 5 at the acceptance length that was measured",
        "B", "gamma", "acceptance length", "Eq. 5", "measured", "Eq. 5 is off by",
    )  # fmt: skip
    for item in report.measured:
        run = item.run
        table.add_row(
            str(run.batch_size),
            str(run.gamma),
            f"{run.acceptance_length:.2f}",
            f"{item.predicted:.2f}x",
            f"{run.speedup:.2f}x",
            f"{item.error:+.0%}",
        )
    yield table
    measured = [item.run.speedup for item in report.measured]
    yield Text(
        f"Speedups in the table: {min(measured):.2f} to {max(measured):.2f}; the text says "
        f"{STATED_SPEEDUPS[0]} to {STATED_SPEEDUPS[1]}.\n{_TIDE_NOTE}"
    )


def _drafters(envelopes: tuple[Envelope, ...]) -> Iterator[RenderableType]:
    for envelope in envelopes:
        yield _envelope(envelope)
        yield Text(_summary(envelope))
    yield Text(_DRAFTER_NOTE)


def _envelope(envelope: Envelope) -> Table:
    with_grid = envelope.errors is not None
    title = {
        Overlap.STEP: "a pass overlaps as a whole",
        Overlap.KERNELS: "kernels run one after the other",
    }[envelope.overlap]
    overheads = "with typical engine overheads" if envelope.overheads else "no engine overheads"
    table = _table(
        f"Qwen3.6-35B-A3B on a B200: {title}, {overheads}",
        "B", "winner", "published",
        *(f"{name} gamma (published)" for name in published_qwen.DRAFTERS),
        "tokens/s", *(("published", "of the best") if with_grid else ()),
    )  # fmt: skip
    for i, point in enumerate(envelope.points):
        cells = [str(point.concurrency), point.drafter, published_qwen.BEST_DRAFTER[i]]
        cells += [
            f"{point.best_gamma[n]} ({published_qwen.BEST_GAMMA[n][i]})"
            for n in published_qwen.DRAFTERS
        ]
        cells.append(f"{point.goodput:,.0f}")
        if point.published_goodput is not None and point.kept_share is not None:
            cells += [f"{point.published_goodput:,.0f}", f"{point.kept_share:.1%}"]
        table.add_row(*cells)
    return table


def _summary(envelope: Envelope) -> str:
    count = len(envelope.points)
    gammas = ", ".join(
        f"{name} gamma at {envelope.gammas_agreeing(name)}" for name in published_qwen.DRAFTERS
    )
    text = (
        f"As published: the winner at {envelope.winners_agreeing} of {count} concurrencies, "
        f"{gammas}; DFlash gives way to MTP between {_between(envelope.crossover)} "
        f"(published: {_between(crossover(published_qwen.BEST_DRAFTER))}).\n"
    )
    kept_shares = [point.kept_share for point in envelope.points if point.kept_share is not None]
    if envelope.errors is not None and kept_shares:
        text += (
            f"Goodput over all {envelope.errors.cells} cells is off by "
            f"{envelope.errors.median:.1%} (median), {envelope.errors.largest:.1%} at most; of the "
            f"published best, these choices keep {min(kept_shares):.1%} at least.\n"
        )
    return text


def _between(pair: tuple[int, int] | None) -> str:
    return "no two" if pair is None else f"{pair[0]} and {pair[1]}"
