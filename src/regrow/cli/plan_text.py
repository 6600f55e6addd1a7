"""The planner's answer for people."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.table import Table

Document = dict[str, Any]
_MOST_ROWS = 40
"""Of the table of survivors that a person reads."""
_WIDTH = 130
"""Columns that the widest table takes: a narrow terminal folds its lines, cells are never cut."""


def show(document: Document) -> None:
    """Print best plan, alternatives and reasons."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    there, described = document["inventory"], document["model"]
    sizes = f" ({', '.join(map(str, there['uneven']))} GPUs)" if there["uneven"] else ""
    console.print(
        f"{_count(described['params'])} parameters on {there['gpus']} x {there['gpu_type']}"
        f" ({there['gpu_memory_bytes'] / 1e9:g} GB) in {many(there['nodes'], 'node')}{sizes}"
    )
    for note in document["notes"]:
        console.print(f"note: {note}")
    best = document["best"]
    if best is None:
        console.print("no legal plan:")
    else:
        _best(console, best)
        if len(document["plans"]) > 1:
            console.print(_table(document["plans"]))
    _rejected(console, document, most=12 if best is None else 5)
    for nearest in document.get("nearest", []):
        console.print(f"  would work: {name(nearest['mesh'])}, ZeRO-{nearest['zero_stage']}, step {nearest['step_seconds']:.4g} s")
    _extras(console, document)


def _count(params: float) -> str:
    return f"{params / 1e9:.4g}B" if params >= 1e8 else f"{params / 1e6:.4g}M"


def name(mesh: Document) -> str:
    """DP x TP x PP, with CP and EP where they are used."""
    text = f"DP {mesh['dp']} x TP {mesh['tp']} x PP {mesh['pp']}"
    text += f" x CP {mesh['cp']}" if mesh["cp"] > 1 else ""
    return text + (f", EP {mesh['ep']}" if mesh["ep"] > 1 else "")


def _best(console: Console, best: Document) -> None:
    console.print(f"\nbest: [bold]{name(best['mesh'])}[/bold], ZeRO-{best['zero_stage']}, micro-batch {best['micro_batch']}")
    console.print(f"  why       {best['reason']}")
    counts = best["micro_batches"]
    shown = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} or {counts[-1]}"
    console.print(f"  batch     {best['global_batch']} = {best['micro_batch']} x {sum(counts)} micro-batches, {shown} a replica")
    if best["layers_per_stage"]:
        console.print(f"  layers    {runs(best['layers_per_stage'])}")
    used = {key: value / 1e9 for key, value in best["memory_bytes"].items()}
    console.print(
        f"  memory    {used['total']:.1f} GB = weights {used['weights']:.1f} + gradients {used['gradients']:.1f}"
        f" + optimizer {used['optimizer']:.1f} + activations {used['activations']:.1f} + buffers {used['buffers']:.1f}"
        f" (recompute: {best['recompute']})"
    )
    moved = [f"{key} {value / 1e9:.3g}" for key, value in best["comm_bytes"].items() if value or key in ("dp", "tp", "pp")]
    console.print(f"  traffic   GB a GPU and step: {', '.join(moved)}")
    console.print(
        f"  bubble    {best['bubble_fraction']:.1%} of the step ({best['bubble_ratio']:.1%} of the ideal time), {best['schedule']}"
    )
    line = f"  step      {best['step_seconds']:.4g} s"
    if "mfu" in best:
        line += f", MFU {best['mfu']:.1%}, E {best['efficiency']:.0%}, {best['tokens_per_second']:.4g} tokens/s"
    console.print(line + f"; {best['gpus_used']} GPUs used, {best['gpus_idle']} idle")
    if "wall" in best:
        wall = best["wall"]
        console.print(f"  wall      {wall['binds']}: {wall['why']}. To move it: {wall['lift']}")


def _extras(console: Console, document: Document) -> None:
    equal = document.get("equal_replicas")
    if equal:
        console.print(f"equal replicas instead: {name(equal['mesh'])}, step {equal['slower_ratio']:+.1%}, {equal['gpus_idle']} GPUs idle")
    after = document.get("after_loss")
    if after:
        console.print(f"\nafter losing {many(after['lost_nodes'], 'node')}, repair in {after['repair_hours']:g} h:")
        for option in after["options"]:
            console.print(f"  {option['name']:<24} loses {option['lost_seconds']:6.0f} s  {option['reason']}")
        console.print(f"  {after['verdict']}")
    if "reliability" in document:
        found = document["reliability"]
        console.print(f"\nMTBF of the job {found['mtbf_hours']:.4g} h, {found['p_no_failure_24h']:.1%} of days without a failure")
    if "table" in document:
        console.print(_survivors(document["table"]["rows"]))
        console.print(document["table"]["verdict"])
        if "spares" in document["table"]:
            console.print(f"spares: {document['table']['spares']['reason']}")
    if "placement" in document:
        found = document["placement"]
        console.print(f"\nplacement, axes from the inside: {found['order']}")
        for node, ranks in list(found["ranks"].items())[:32]:
            console.print(f"  {node}: ranks {ranks[0]}..{ranks[-1]}, buddy {found['buddies'].get(node, 'none')}")
        for warning in found["warnings"]:
            console.print(f"  warning: {warning}")
    for line in document.get("advice", []):
        console.print(f"[bold]{line['topic']}[/bold]: {line['text']} ({line['source']})")
    if "calibration" in document:
        found = document["calibration"]
        console.print(f"calibrated: rank correlation {found['rank_correlation']:.3f}, worst error {found['worst_error']:.0%}")
        for each in found["meshes"]:
            behind = f", median of {each['steps']} steps" if "steps" in each else ""
            seconds = f"measured {each['measured_seconds']:.3g} s, predicted {each['predicted_seconds']:.3g} s"
            console.print(f"  {each['mesh']}: {seconds}{behind}")
        console.print("  a run on CPUs calibrates the ranking on CPUs, nothing about GPUs")


def _survivors(rows: list[Document]) -> Table:
    """Rows where the mesh other than DP changes, and the ends."""
    table = Table(title="best mesh by surviving nodes (rows where more than DP changes)", title_justify="left", box=None, pad_edge=False)
    for column in ("nodes", "GPUs", "mesh", "ZeRO", "step s", "idle", "change", "GB a rank", "lost s"):
        table.add_column(column, justify="left" if column in ("mesh", "change") else "right", no_wrap=True)
    shown = _turning_points(rows)
    left_out = len(shown) - _MOST_ROWS
    for place, row in enumerate(shown):
        if left_out > 0 and _MOST_ROWS // 2 <= place < _MOST_ROWS // 2 + left_out:
            if place == _MOST_ROWS // 2:
                table.add_row("...", "", f"{left_out} more, see --json")
            continue
        mesh = row["mesh"]
        if mesh is None:
            table.add_row(str(row["nodes"]), str(row["gpus"]), "nothing fits")
            continue
        change = row["change"]
        told = change["kind"]
        if change["mesh"] != mesh:
            told = f"drop to DP {change['mesh']['dp']}, {change['step_seconds']:.4g} s"
        table.add_row(
            str(row["nodes"]),
            str(row["gpus"]),
            name(mesh),
            str(row["zero_stage"]),
            f"{row['step_seconds']:.4g}",
            str(row["gpus_idle"]),
            told,
            f"{change['moved_bytes_per_rank'] / 1e9:.3g}",
            f"{change['lost_seconds']:.0f}",
        )
    return table


def _turning_points(rows: list[Document]) -> list[Document]:
    """The first row of each stretch of equal TP, PP, CP, EP and ZeRO stage, and the last row."""
    found: list[Document] = []
    last: object = None
    for index, row in enumerate(rows):
        mesh = row["mesh"]
        kind = mesh and (mesh["tp"], mesh["pp"], mesh["cp"], mesh["ep"], row["zero_stage"])
        if kind != last or index == len(rows) - 1:
            found.append(row)
        last = kind
    return found


def runs(numbers: list[int]) -> str:
    """Equal neighbours folded: 7, 8 x14, 7."""
    parts: list[str] = []
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[start]:
            length = index - start
            parts.append(f"{numbers[start]} x{length}" if length > 1 else f"{numbers[start]}")
            start = index
    return ", ".join(parts)


def _table(plans: list[Document]) -> Table:
    table = Table(title="plans in order of step time", title_justify="left", box=None, pad_edge=False)
    for column in ("mesh", "ZeRO", "micro", "recompute", "GB", "bubble", "step s", "GPUs", "idle"):
        table.add_column(column, justify="left" if column == "mesh" else "right", no_wrap=True)
    for each in plans:
        table.add_row(
            name(each["mesh"]),
            str(each["zero_stage"]),
            str(each["micro_batch"]),
            each["recompute"],
            f"{each['memory_bytes']['total'] / 1e9:.1f}",
            f"{each['bubble_fraction']:.1%}",
            f"{each['step_seconds']:.4g}",
            str(each["gpus_used"]),
            str(each["gpus_idle"]),
        )
    return table


def many(number: int, word: str) -> str:
    """1 node, 2 nodes."""
    return f"{number} {word}" + ("" if number == 1 else "s")


def _rejected(console: Console, document: Document, *, most: int) -> None:
    """One line for each kind of reason: the mesh that comes nearest, and how many more are out for the like of it."""
    kinds: dict[str, list[Document]] = {}
    for each in document["rejected"]:
        kinds.setdefault(_NUMBER.sub("#", each["reason"]), []).append(each)
    for alike in list(kinds.values())[:most]:
        nearest = min(alike, key=_shortage)
        more = f" (and {len(alike) - 1} more like it)" if len(alike) > 1 else ""
        console.print(f"  out: {name(nearest['mesh'])}: {nearest['reason']}{more}")
    rest = document["rejected_count"] - sum(map(len, list(kinds.values())[:most]))
    if rest > 0:
        console.print(f"  and {rest} more")


_NUMBER = re.compile(r"\d+(\.\d+)?")


def _shortage(rejected: Document) -> float:
    """Memory that a mesh needs, where that is why it is out; else all are alike and the first is shown."""
    found = re.search(r"needs at least (\d+\.\d+) GB", rejected["reason"])
    return float(found[1]) if found else 0.0
