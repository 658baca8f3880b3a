"""A pipeline's timeline as an SVG picture, and as a trace for Chrome's tracing page or Perfetto."""

import json
from collections.abc import Sequence
from html import escape

from lanewise.simulator.events import Event, bubble, span

COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#eeca3b", "W": "#54a24b"}
NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
WIDTH, ROW, LEFT, TOP = 1200.0, 26.0, 60.0, 46.0


def svg(events: Sequence[Event], title: str) -> str:
    """One row a rank; a box an action, numbered by its microbatch; lighter in the later stages of a rank."""
    ranks = 1 + max(event.rank for event in events)
    length = span(events)
    scale = WIDTH / length
    mine = {rank: sorted({e.stage for e in events if e.rank == rank}) for rank in range(ranks)}
    height = TOP + ROW * ranks + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20:.0f}" height="{height:.0f}" '
        f'font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}: {length:.4g} s, bubble {bubble(events):.1%}</text>',
    ]
    for rank in range(ranks):
        y = TOP + ROW * rank
        parts.append(f'<text x="4" y="{y + 17:.1f}">rank {rank}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y:.1f}" width="{WIDTH}" height="{ROW - 3}" fill="#eeeeee"/>')
    for event in events:
        x, y = LEFT + event.start * scale, TOP + ROW * event.rank
        width = max((event.end - event.start) * scale, 0.3)
        fade = 1 - 0.45 * mine[event.rank].index(event.stage) / max(len(mine[event.rank]), 1)
        what = f"{NAMES[event.action]}, stage {event.stage}, microbatch {event.microbatch}"
        what += f": {event.start:.6g} to {event.end:.6g} s"
        parts.append(
            f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{ROW - 3}" fill="{COLOURS[event.action]}" '
            f'fill-opacity="{fade:.2f}" stroke="white" stroke-width="0.5"><title>{what}</title></rect>'
        )
        if width > 9:
            parts.append(
                f'<text x="{x + width / 2:.2f}" y="{y + 16:.1f}" text-anchor="middle" fill="white" '
                f'pointer-events="none">{event.microbatch}</text>'
            )
    for place, kind in enumerate(sorted({event.action for event in events}, key="FBIW".index)):
        x, y = LEFT + 190 * place, TOP + ROW * ranks + 12
        parts.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 17:.0f}" y="{y + 10:.0f}">{NAMES[kind]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def chrome_trace(events: Sequence[Event]) -> str:
    """JSON in Chrome's trace event format, in microseconds; a rank is a process."""
    made: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for rank in sorted({event.rank for event in events})
    ]
    made += [
        {
            "name": f"{event.action}{event.microbatch}",
            "cat": NAMES[event.action],
            "ph": "X",
            "pid": event.rank,
            "tid": 0,
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "args": {"stage": event.stage, "microbatch": event.microbatch},
        }
        for event in events
    ]
    return json.dumps({"traceEvents": made, "displayTimeUnit": "ms"})
