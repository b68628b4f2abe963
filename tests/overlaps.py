"""What stands over what in a figure, as matplotlib itself measures it."""

from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from g2d_jax.report.figures import Chart, styled


def overlaps(chart: Chart) -> list[str]:
    """Say which visible texts of a figure cover one another or leave it."""
    canvas = FigureCanvasAgg(chart.figure)
    with styled():
        canvas.draw()
    renderer = canvas.get_renderer()
    whole = chart.figure.bbox
    boxes: list[tuple[str, Bbox]] = []
    faults = []
    for text in chart.figure.findobj(Text):
        if not (text.get_visible() and text.get_text()):
            continue
        box = text.get_window_extent(renderer)
        boxes.append((text.get_text(), box))
        beside = box.x0 < whole.x0 or box.x1 > whole.x1
        if beside or box.y0 < whole.y0 or box.y1 > whole.y1:
            faults.append(f"{text.get_text()!r} leaves the figure")
    for (text, box), (other, over) in combinations(boxes, 2):
        if box.x0 < over.x1 and over.x0 < box.x1 and box.y0 < over.y1 and over.y0 < box.y1:
            faults.append(f"{text!r} over {other!r}")
    return faults


def charts(parts) -> list[Chart]:
    """The figures of a report's parts, folded ones too."""
    found = []
    for part in parts:
        if isinstance(part, Chart):
            found.append(part)
        found += charts(getattr(part, "parts", ()))
    return found
