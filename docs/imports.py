"""Draw which package imports which, from the sources: python docs/imports.py docs/imports.svg."""

from __future__ import annotations

import ast
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIVIDED = {"operations": 4, "plan": 3}
"""Packages whose subjects are drawn, and how many side by side."""
WIDTH, MARGIN, GAP = 980, 20, 24
ROW_GAP = 56
"""Height of the space between two layers, where the arrows are."""
LINE, HEAD, PAD = 15, 20, 9
LETTER = 6.7
"""Width of a letter of 11 pixels, monospaced."""
STYLE = """
    .page { fill: #ffffff; }
    .ink { fill: #1f2328; font-weight: 600; font-size: 13px; }
    .soft { fill: #59636e; }
    .package { fill: #f6f8fa; stroke: #8c959f; }
    .subject { fill: #ffffff; stroke: #8c959f; }
    .arrow { stroke: #59636e; stroke-width: 1.4; fill: none; }
    .head { fill: #59636e; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117; }
      .ink { fill: #e6edf3; }
      .soft { fill: #9198a1; }
      .package { fill: #151b23; stroke: #656c76; }
      .subject { fill: #0d1117; stroke: #656c76; }
      .arrow { stroke: #9198a1; }
      .head { fill: #9198a1; }
    }
"""
LEGEND = (
    "Each arrow: the upper package imports the lower one; arrows that follow from others are left out.",
    "Text in a box: → hosts 3 means that three of its files import hosts; ↔ that both import each other.",
    "A larger space between rows of subjects separates layers; those of one layer may import each other.",
)


class Graph:
    """Groups of files, and for each group the files that import another one."""

    def __init__(self, sources: dict[Path, set[str]], prefix: tuple[str, ...]) -> None:
        """``prefix``: the package whose parts are the groups; empty for the packages themselves."""
        self.files: dict[str, int] = defaultdict(int)
        self.uses: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for path in sources:
            self.files[_group(path.relative_to(ROOT).with_suffix("").parts, prefix)] += 1
        self.files.pop("", None)
        for path, names in sources.items():
            group = _group(path.relative_to(ROOT).with_suffix("").parts, prefix)
            for other in {_group(tuple(name.split(".")), prefix) for name in names} & self.files.keys() - {group}:
                if group:
                    self.uses[group][other] += 1

    def drop(self, groups: Iterable[str]) -> None:
        """Leave groups out."""
        for group in groups:
            del self.files[group]
            self.uses.pop(group, None)
            for used in self.uses.values():
                used.pop(group, None)

    def reach(self, group: str) -> set[str]:
        """Return all groups that it imports directly or through others."""
        found: set[str] = set()
        left = [group]
        while left:
            new = self.uses[left.pop()].keys() - found
            found |= new
            left += new
        return found

    def layers(self) -> list[list[str]]:
        """Return the groups by layer: each below all that import it; those that import each other are in one."""
        reach = {group: self.reach(group) for group in self.files}

        @cache
        def depth(group: str) -> int:
            above = [other for other in reach if group in reach[other] and other not in reach[group]]
            return 1 + max((depth(other) for other in above), default=-1)

        rows: dict[int, list[str]] = defaultdict(list)
        for group in sorted(self.files):
            rows[depth(group)].append(group)
        return [rows[number] for number in sorted(rows)]

    def arrows(self) -> list[tuple[str, str]]:
        """Return the imports that do not follow from others."""
        return [
            (group, other)
            for group in sorted(self.files)
            for other in sorted(self.uses[group])
            if not any(other in self.reach(third) for third in self.uses[group] if third != other)
        ]

    def describe(self, group: str, width: float) -> list[str]:
        """Return what a group imports as lines of text."""
        imports = [
            f"{'↔' if group in self.uses[other] else ''}{other}\u00a0{count}"
            for other, count in sorted(self.uses[group].items())
        ]
        return textwrap.wrap("→\u00a0" + ", ".join(imports), int(width / LETTER)) if imports else []


def _group(parts: Sequence[str], prefix: tuple[str, ...]) -> str:
    if not prefix and parts[0] == "analysis":
        return "analysis"
    whole = ("appliance", *prefix)
    name = parts[len(whole)] if tuple(parts[: len(whole)]) == whole and len(parts) > len(whole) else ""
    return "" if name.startswith("__") else name


def read_imports(path: Path) -> set[str]:
    """Return the names that a file imports when it runs, within functions, too."""
    names: set[str] = set()
    left: list[ast.AST] = [ast.parse(path.read_text(), str(path))]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            left += node.orelse
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        else:
            left += ast.iter_child_nodes(node)
    return names


@dataclass(eq=False)
class Box:
    """A box of the picture; without a name it is the bend of an arrow that passes a layer."""

    name: str = ""
    files: int = 0
    text: list[str] = field(default_factory=list)
    inside: list[Box] = field(default_factory=list)
    width: float = 0
    height: float = 0
    x: float = 0
    y: float = 0

    @property
    def middle(self) -> float:
        """Horizontal centre."""
        return self.x + self.width / 2

    def draw(self, kind: str, dx: float = 0, dy: float = 0) -> list[str]:
        """Return the elements of the box and of those inside."""
        x, y = self.x + dx, self.y + dy
        files = f"{self.files} file{'s' * (self.files != 1)}" if self.files else ""
        lines = [
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{self.width:g}" height="{self.height:g}" rx="7"/>',
            f'<text class="ink" x="{x + PAD:g}" y="{y + HEAD:g}">{self.name}</text>',
            f'<text class="soft" x="{x + self.width - PAD:g}" y="{y + HEAD:g}" text-anchor="end">{files}</text>',
        ]
        for number, text in enumerate(self.text, 1):
            lines.append(f'<text class="soft" x="{x + PAD:g}" y="{y + HEAD + number * LINE:g}">{text}</text>')
        return [*lines, *(line for box in self.inside for line in box.draw("subject", x, y))]


def make_box(graph: Graph, name: str, width: float, inside: Graph | None = None) -> Box:
    """Return the box of a group, with the groups inside it in layers."""
    text = graph.describe(name, width - 2 * PAD)
    box = Box(name, graph.files[name], text, width=width, height=HEAD + len(text) * LINE + PAD)
    if inside is None:
        return box
    columns, between = DIVIDED[name], 8
    each = (width - 2 * PAD - (columns - 1) * between) / columns
    for layer in inside.layers():
        for start in range(0, len(layer), columns):
            row = [make_box(inside, one, each) for one in layer[start : start + columns]]
            for number, one in enumerate(row):
                one.x, one.y = PAD + number * (each + between), box.height
                one.height = max(other.height for other in row)
            box.inside += row
            box.height += row[0].height + between
        box.height += 2 * between
    box.height -= 2 * between
    return box


def arrange(graph: Graph, boxes: dict[str, Box]) -> tuple[list[list[Box]], list[tuple[Box, Box]]]:
    """Place the boxes in layers; return these and the parts of the arrows, each from one layer to the next."""
    rows = [[boxes[name] for name in layer] for layer in graph.layers()]
    number_of = {id(box): number for number, row in enumerate(rows) for box in row}
    parts: list[tuple[Box, Box]] = []
    for group, other in graph.arrows():
        last, end = boxes[group], boxes[other]
        for number in range(number_of[id(last)] + 1, number_of[id(end)]):
            bend = Box(width=2)
            rows[number].append(bend)
            parts.append((last, bend))
            last = bend
        parts.append((last, end))
    for row in rows:
        spread(row)
    for _ in range(12):
        for row in (*rows, *reversed(rows)):
            near = {id(box): [b.middle if a is box else a.middle for a, b in parts if box in (a, b)] for box in row}
            wanted = {id(box): sum(near[id(box)]) / len(near[id(box)]) for box in row if near[id(box)]}
            row.sort(key=lambda box: wanted.get(id(box), box.middle))
            for box in row:
                box.x = wanted.get(id(box), box.middle) - box.width / 2
            spread(row)
    return rows, parts


def spread(row: list[Box]) -> None:
    """Move boxes aside until none overlaps another one or the margin."""
    least = float(MARGIN)
    for box in row:
        box.x = max(box.x, least)
        least = box.x + box.width + GAP
    most = float(WIDTH - MARGIN)
    for box in reversed(row):
        box.x = min(box.x, most - box.width)
        most = box.x - GAP


def draw_arrow(start: Box, end: Box, parts: list[tuple[Box, Box]]) -> list[str]:
    """Return a part of an arrow: its ends are spread over the sides of the boxes."""

    def port(box: Box, others: list[Box], other: Box) -> float:
        place = sorted(others, key=lambda one: one.middle).index(other) + 1
        return box.x + box.width * place / (len(others) + 1)

    x1 = port(start, [b for a, b in parts if a is start], end)
    x2 = port(end, [a for a, b in parts if b is end], start)
    y1, y2 = start.y + start.height, end.y - (8 if end.name else 0)
    bent = (y1 + y2) / 2
    lines = [f'<path class="arrow" d="M{x1:.1f} {y1:g} C{x1:.1f} {bent:g} {x2:.1f} {bent:g} {x2:.1f} {y2:g}"/>']
    if end.name:
        return [*lines, f'<path class="head" d="M{x2:.1f} {y2 + 8:g} l-4.5 -9 h9 z"/>']
    return [*lines, f'<path class="arrow" d="M{x2:.1f} {y2:g} V{y2 + end.height:g}"/>']


def picture() -> str:
    """Return the picture as SVG."""
    paths = [path for top in ("appliance", "analysis") for path in sorted((ROOT / top).rglob("*.py"))]
    sources = {path: read_imports(path) for path in paths}
    graph = Graph(sources, ())
    leaves = sorted(group for group in graph.files if (ROOT / "appliance" / f"{group}.py").is_file())
    graph.drop(leaves)
    widths = {"operations": 880, "plan": 500, "cli": 220}
    boxes = {
        name: make_box(graph, name, widths.get(name, 190), Graph(sources, (name,)) if name in DIVIDED else None)
        for name in graph.files
    }
    rows, parts = arrange(graph, boxes)
    top = float(MARGIN)
    for row in rows:
        height = max(box.height for box in row)
        for box in row:
            box.y = top
            box.height = box.height if box.name else height
        top += height + ROW_GAP
    # Below a box that is lower than others of its layer, arrows begin at its own end.
    drawn = [line for start, end in parts for line in draw_arrow(start, end, parts)]
    drawn += [line for row in rows for box in row if box.name for line in box.draw("package")]
    text = [f"any package may import: {', '.join(leaves)}"]
    strip = Box("leaves", text=text, width=WIDTH - 2 * MARGIN, height=HEAD + LINE + PAD, x=MARGIN, y=top - ROW_GAP + 20)
    drawn += strip.draw("package")
    top = strip.y + strip.height + 12
    for number, sentence in enumerate(LEGEND, 1):
        drawn.append(f'<text class="soft" x="{MARGIN + PAD}" y="{top + number * LINE:g}">{sentence}</text>')
    top += len(LEGEND) * LINE + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:g}" role="img" aria-labelledby="title" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" font-size="11">'
    )
    title = '<title id="title">Packages of sms and what they import</title>'
    page = f'<rect class="page" width="{WIDTH}" height="{top:g}" rx="8"/>'
    body = "\n".join(f"  {line}" for line in (title, f"<style>{STYLE}  </style>", page, *drawn))
    return f"{head}\n{body}\n</svg>\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture())
