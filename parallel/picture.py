"""SVG pictures of plans: a mesh on its nodes, a pipeline schedule, the batch x chips diagram."""

from __future__ import annotations

from regrow.ids import MeshShape
from regrow.parallel import pipeline
from regrow.parallel.draw import PALETTE, Svg
from regrow.parallel.placement import Placement

_MOST_NODES = 64


def mesh_svg(placement: Placement, idle_colour: str = PALETTE[6]) -> str:
    """Nodes as boxes of GPUs; the colour is the pipeline stage, the label d (DP), p (PP), t (TP) of the rank."""
    mesh = placement.mesh
    names = list(dict.fromkeys(placement.nodes))
    names += [name for name in placement.idle if name not in names]
    shown = names[:_MOST_NODES]
    ranks: dict[str, dict[int, int]] = {name: {} for name in shown}
    for rank, (name, gpu) in enumerate(zip(placement.nodes, placement.gpus, strict=True)):
        if name in ranks:
            ranks[name][gpu] = rank
    slots = max(len(ranks[name]) + placement.idle.get(name, 0) for name in shown)
    cell, left, top, gap = 54.0, 110.0, 70.0, 10.0
    height = top + len(shown) * (cell * 0.6 + gap) + (30 if len(names) > len(shown) else 4)
    svg = Svg(left + slots * cell + 30, height, f"mesh {mesh} on {len(names)} nodes")
    svg.text(10, 24, f"mesh {mesh} on {len(names)} nodes, order {placement.order}", size=15)
    for stage in range(min(mesh.pp, 8)):
        svg.rect(10 + stage * 70, 36, 12, 12, PALETTE[stage % 6])
        svg.text(26 + stage * 70, 46, f"stage {stage}", size=11)
    for row, name in enumerate(shown):
        y = top + row * (cell * 0.6 + gap)
        svg.text(10, y + cell * 0.38, name, size=12)
        used = ranks[name]
        for gpu in range(len(used) + placement.idle.get(name, 0)):
            _gpu(svg, left + gpu * cell, y, cell, mesh, used.get(gpu), idle_colour)
    if len(names) > len(shown):
        svg.text(10, height - 14, f"and {len(names) - len(shown)} more nodes")
    return svg.render()


def _gpu(svg: Svg, x: float, y: float, cell: float, mesh: MeshShape, rank: int | None, idle_colour: str) -> None:
    if rank is None:
        svg.rect(x, y, cell - 2, cell * 0.6, idle_colour, title="idle")
        svg.text(x + cell / 2 - 1, y + cell * 0.38, "idle", size=10, anchor="middle")
        return
    at = mesh.coordinates(rank)
    colour = PALETTE[at["pp"] % 6]
    label = f"d{at['dp']} p{at['pp']} t{at['tp']}" + (f" c{at['cp']}" if mesh.cp > 1 else "")
    svg.rect(x, y, cell - 2, cell * 0.6, colour, title=f"rank {rank}: {at}")
    size = 10 if len(label) < 10 else 8
    svg.text(x + cell / 2 - 1, y + cell * 0.38, label, size=size, anchor="middle", fill=_INK_ON.get(colour, "#ffffff"))


_INK_ON = {PALETTE[3]: "#222222", PALETTE[4]: "#222222"}
"""Dark text on the light colours of the palette, white on the others."""


def schedule_svg(schedule: str, pp: int, micro_batches: int, virtual: int = 1) -> str:
    """One row a stage, time to the right; the title tells both bubbles.

    Raises:
        ConfigurationError: a schedule that is not drawn (`pipeline.DRAWN`).
    """
    slots = pipeline.timeline(schedule, pp, micro_batches, virtual)
    end = max(slot.end for slot in slots)
    unit = min(24.0, max(4.0, 1100.0 / end)) * (min(virtual, 2) if schedule == "interleaved" else 1)
    left, top, row = 70.0, 60.0, 26.0
    fraction = pipeline.bubble_fraction(schedule, pp, micro_batches, virtual)
    ratio = pipeline.bubble_ratio(schedule, pp, micro_batches, virtual)
    name = f"{schedule} x{virtual}" if schedule == "interleaved" else schedule
    title = f"{name}, P = {pp}, M = {micro_batches}: bubble {fraction:.1%} of the step, {ratio:.1%} of the ideal time"
    svg = Svg(max(left + end * unit + 20, 640.0), top + pp * row + 14, title)
    svg.text(10, 24, title, size=15)
    for index, (kind, colour, text) in enumerate(_legend(schedule, virtual)):
        svg.rect(left + index * 190, 34, 12, 12, colour)
        svg.text(left + 16 + index * 190, 44, f"{kind} {text}", size=11)
    colours = {(kind, chunk): colour for kind, chunk, colour in _colours(schedule, virtual)}
    for stage in range(pp):
        svg.text(10, top + stage * row + 17, f"stage {stage}", size=12)
        svg.rect(left, top + stage * row, end * unit, row - 2, "#eeeeee")
    for slot in slots:
        x, width = left + slot.start * unit, (slot.end - slot.start) * unit
        colour = colours[slot.kind, slot.chunk % 2]
        label = f"{slot.kind}{slot.micro_batch} of chunk {slot.chunk}: {slot.start:g}-{slot.end:g}"
        svg.rect(x, top + slot.stage * row, width, row - 2, colour, title=label)
        if width >= 10:
            ink = _INK_ON.get(colour, "#ffffff")
            svg.text(x + width / 2, top + slot.stage * row + 16, str(slot.micro_batch), size=9, anchor="middle", fill=ink)
    return svg.render()


def _colours(schedule: str, virtual: int) -> list[tuple[str, int, str]]:
    """Kind, chunk modulo 2, colour."""
    if schedule == "interleaved" and virtual > 1:
        return [("F", 0, PALETTE[0]), ("F", 1, PALETTE[4]), ("B", 0, PALETTE[2]), ("B", 1, PALETTE[3])]
    return [("F", 0, PALETTE[0]), ("B", 0, PALETTE[2]), ("W", 0, PALETTE[3])]


def _legend(schedule: str, virtual: int) -> list[tuple[str, str, str]]:
    backward = "gradient of activations" if schedule == "zb-h1" else "backward"
    words = {"F": "forward", "B": backward, "W": "gradient of weights"}
    found = [each for each in _colours(schedule, virtual) if each[0] != "W" or schedule == "zb-h1"]
    two = len({chunk for _, chunk, _ in found}) > 1
    parts = (", even chunks", ", odd chunks") if virtual > 2 else (", chunk 0", ", chunk 1")
    return [(kind, colour, words[kind] + (parts[chunk] if two else "")) for kind, chunk, colour in found]


_REGIMES = {"communication-bound": ("C", PALETTE[1]), "FSDP + model parallel": ("M", PALETTE[3]), "FSDP alone": ("F", PALETTE[2])}


def regime_svg(points: list[tuple[int, float, str]], chips: int, tokens: float) -> str:
    """Batch in tokens to the right, chips upwards, one box a point; the request's own point is framed."""
    all_chips = sorted({point[0] for point in points})
    all_tokens = sorted({point[1] for point in points})
    cell, left, top = 34.0, 80.0, 88.0
    width, height = left + len(all_tokens) * cell + 30, top + len(all_chips) * cell + 56
    title = "what binds: batch x chips"
    svg = Svg(max(width, 620.0), height, title)
    svg.text(10, 24, title, size=15)
    for index, (kind, (letter, colour)) in enumerate(_REGIMES.items()):
        svg.rect(10 + index * 190, 36, 12, 12, colour)
        svg.text(26 + index * 190, 46, f"{letter}  {kind}", size=11)
    svg.text(left - 8, top - 10, "chips", size=11, anchor="end")
    nearest = (min(all_chips, key=lambda each: abs(each - chips)), min(all_tokens, key=lambda each: abs(each - tokens)))
    for number, size, kind in points:
        letter, colour = _REGIMES[kind]
        x = left + all_tokens.index(size) * cell
        y = top + (len(all_chips) - 1 - all_chips.index(number)) * cell
        here = (number, size) == nearest
        tip = f"{number} chips, {size:.3g} tokens: {kind}"
        svg.rect(x, y, cell - 2, cell - 2, colour, title=tip, stroke="#222222" if here else "#ffffff")
        ink = _INK_ON.get(colour, "#ffffff")
        svg.text(x + cell / 2 - 1, y + cell / 2 + 4, "you" if here else letter, size=11, anchor="middle", fill="#222222" if here else ink)
    for index, number in enumerate(all_chips):
        svg.text(left - 8, top + (len(all_chips) - 1 - index) * cell + 20, f"{number:,}", size=11, anchor="end")
    for index, size in enumerate(all_tokens):
        if index % 2 == 0:
            svg.text(left + index * cell + cell / 2, top + len(all_chips) * cell + 16, _short(size), size=10, anchor="middle")
    svg.text(left + len(all_tokens) * cell / 2, height - 14, "global batch in tokens", anchor="middle")
    return svg.render()


def _short(tokens: float) -> str:
    """Powers of two as people write them: 16k, 1M."""
    for size, unit in ((2**30, "G"), (2**20, "M"), (2**10, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:g}"
