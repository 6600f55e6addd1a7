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
    height = top + len(shown) * (cell * 0.6 + gap) + 40
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
    svg.rect(x, y, cell - 2, cell * 0.6, PALETTE[at["pp"] % 6], title=f"rank {rank}: {at}")
    svg.text(x + cell / 2 - 1, y + cell * 0.38, f"d{at['dp']} p{at['pp']} t{at['tp']}", size=10, anchor="middle", fill="#ffffff")


def schedule_svg(schedule: str, pp: int, micro_batches: int) -> str:
    """One row a stage, time to the right; the title tells both bubbles. Interleaved schedules are drawn as their 1F1B base."""
    drawn = schedule if schedule in ("gpipe", "1f1b", "zb-h1") else "1f1b"
    slots = pipeline.timeline(drawn, pp, micro_batches)
    end = max(slot.end for slot in slots)
    unit = min(24.0, max(4.0, 1100.0 / end))
    left, top, row = 70.0, 60.0, 26.0
    fraction = pipeline.bubble_fraction(drawn, pp, micro_batches)
    ratio = pipeline.bubble_ratio(drawn, pp, micro_batches)
    title = f"{drawn}, P = {pp}, M = {micro_batches}: bubble {fraction:.1%} of the step, {ratio:.1%} of the ideal time"
    svg = Svg(left + end * unit + 20, top + pp * row + 40, title)
    svg.text(10, 24, title, size=15)
    names = {"F": "forward", "B": "backward" if drawn != "zb-h1" else "gradient of activations", "W": "gradient of weights"}
    colours = {"F": PALETTE[0], "B": PALETTE[2], "W": PALETTE[3]}
    kinds = ("F", "B", "W") if drawn == "zb-h1" else ("F", "B")
    for index, kind in enumerate(kinds):
        svg.rect(left + index * 190, 34, 12, 12, colours[kind])
        svg.text(left + 16 + index * 190, 44, names[kind], size=11)
    for stage in range(pp):
        svg.text(10, top + stage * row + 17, f"stage {stage}", size=12)
        svg.rect(left, top + stage * row, end * unit, row - 2, "#eeeeee")
    for slot in slots:
        x, width = left + slot.start * unit, (slot.end - slot.start) * unit
        label = f"{slot.kind}{slot.micro_batch}: {slot.start:g}-{slot.end:g}"
        svg.rect(x, top + slot.stage * row, width, row - 2, colours[slot.kind], title=label)
        if width >= 10:
            svg.text(x + width / 2, top + slot.stage * row + 16, str(slot.micro_batch), size=9, anchor="middle", fill="#ffffff")
    return svg.render()


def regime_svg(points: list[tuple[int, float, str]], chips: int, tokens: float) -> str:
    """Batch in tokens to the right, chips upwards, one box a point; the request's own point is framed."""
    all_chips = sorted({point[0] for point in points})
    all_tokens = sorted({point[1] for point in points})
    kinds = ("communication-bound", "FSDP + model parallel", "FSDP alone")
    cell, left, top = 34.0, 80.0, 70.0
    width, height = left + len(all_tokens) * cell + 30, top + len(all_chips) * cell + 60
    title = "what binds: batch x chips"
    svg = Svg(max(width, 620.0), height, title)
    svg.text(10, 24, title, size=15)
    for index, kind in enumerate(kinds):
        svg.rect(10 + index * 190, 36, 12, 12, PALETTE[(1, 3, 2)[index]])
        svg.text(26 + index * 190, 46, kind, size=11)
    nearest = (min(all_chips, key=lambda each: abs(each - chips)), min(all_tokens, key=lambda each: abs(each - tokens)))
    for number, size, kind in points:
        x = left + all_tokens.index(size) * cell
        y = top + (len(all_chips) - 1 - all_chips.index(number)) * cell
        here = (number, size) == nearest
        svg.rect(
            x,
            y,
            cell - 2,
            cell - 2,
            PALETTE[(1, 3, 2)[kinds.index(kind)]],
            title=f"{number} chips, {size:.3g} tokens: {kind}",
            stroke="#222222" if here else "#ffffff",
        )
        if here:
            svg.text(x + cell / 2 - 1, y + cell / 2 + 4, "you", size=11, anchor="middle")
    for index, number in enumerate(all_chips):
        svg.text(left - 8, top + (len(all_chips) - 1 - index) * cell + 20, str(number), size=11, anchor="end")
    for index, size in enumerate(all_tokens):
        if index % 2 == 0:
            svg.text(left + index * cell + cell / 2, top + len(all_chips) * cell + 16, f"{size:.1g}", size=10, anchor="middle")
    svg.text(left + len(all_tokens) * cell / 2, height - 14, "global batch in tokens", anchor="middle")
    return svg.render()
