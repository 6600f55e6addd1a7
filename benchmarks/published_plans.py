"""Published training runs: is their mesh accepted, what step does the model predict, and what would the planner choose?

    .venv/bin/python benchmarks/published_plans.py           # a Markdown table for docs/benchmarks.md
    .venv/bin/python benchmarks/published_plans.py --json

Sources: Megatron-LM (https://arxiv.org/abs/2104.04473, table 1), Llama 3 (https://arxiv.org/abs/2407.21783, table 4),
DeepSeek-V3 (https://arxiv.org/abs/2412.19437), MT-NLG (https://arxiv.org/abs/2201.11990), BLOOM
(https://arxiv.org/abs/2211.05100), OLMo (https://arxiv.org/abs/2402.00838), GPT-NeoX (https://arxiv.org/abs/2204.06745),
OPT (https://arxiv.org/abs/2205.01068), GLM-130B (https://arxiv.org/abs/2210.02414), Falcon
(https://arxiv.org/abs/2311.16867). Published utilisation counts recomputation where there was full recomputation, not for
Llama 3. The planner's own choice may use any schedule.
"""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

from regrow.parallel import cost, inventory, memory, planner, shape
from regrow.parallel.planner import Request

MEGATRON = (
    ("Megatron 1.7B", 24, 2304, 24, 1, 1, 32, 512, 0.44),
    ("Megatron 3.6B", 30, 3072, 32, 2, 1, 64, 512, 0.44),
    ("Megatron 7.5B", 36, 4096, 32, 4, 1, 128, 512, 0.46),
    ("Megatron 18.4B", 40, 6144, 48, 8, 1, 256, 1024, 0.43),
    ("Megatron 39.1B", 48, 8192, 64, 8, 2, 512, 1536, 0.44),
    ("Megatron 76.1B", 60, 10240, 80, 8, 4, 1024, 1792, 0.45),
    ("Megatron 145.6B", 80, 12288, 96, 8, 8, 1536, 2304, 0.47),
    ("Megatron 310B", 96, 16384, 128, 8, 16, 1920, 2160, 0.50),
    ("Megatron 529.6B", 105, 20480, 128, 8, 35, 2520, 2520, 0.52),
    ("Megatron 1T", 128, 25600, 160, 8, 64, 3072, 3072, 0.52),
)


def runs() -> list[tuple[str, Request, dict[str, Any], float | None]]:
    """(name, request without a forced mesh, the published settings, published utilisation)."""
    found: list[tuple[str, Request, dict[str, Any], float | None]] = []
    for name, layers, hidden, heads, tp, pp, gpus, total, peak in MEGATRON:
        model = shape.make(layers=layers, hidden=hidden, heads=heads, vocab=51200, seq=2048)
        there = inventory.uniform(gpus // 8, 8, device="a100")
        settings = {"tp": tp, "pp": pp, "recompute": "full", "sequence_parallel": False}
        found.append((name, Request(model=model, inventory=there, global_batch=total), settings, peak))
    llama = {"layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248, "vocab": 128256}
    for gpus, cp, seq, total, mfu in ((8192, 1, 8192, 2048, 0.43), (16384, 1, 8192, 2048, 0.41), (16384, 16, 131072, 128, 0.38)):
        there = inventory.uniform(gpus // 8, 8, device="h100")
        settings = {"tp": 8, "pp": 16, "cp": cp, "schedule": "interleaved", "virtual": 7}
        asked = Request(model=shape.make(**llama, seq=seq), inventory=there, global_batch=total)
        found.append((f"Llama 3 405B, {gpus} GPUs, {seq // 1024}k", asked, settings, mfu))
    deepseek = shape.make(
        layers=61, hidden=7168, heads=128, head_dim=128, ffn=18432, vocab=129280, seq=4096, experts=256, experts_per_token=8,
        expert_ffn=2048, shared_experts=1, dense_layers=3, attention_params=187_105_280, tied=False,
    )  # fmt: skip
    asked = Request(model=deepseek, inventory=inventory.uniform(256, 8, device="h800"), global_batch=15360)
    found.append(("DeepSeek-V3, 2048 GPUs", asked, {"tp": 1, "pp": 16, "ep": 64, "zero": 1, "schedule": "dualpipe"}, None))
    nlg = shape.make(layers=105, hidden=20480, heads=128, vocab=51200, seq=2048)
    asked = Request(model=nlg, inventory=inventory.uniform(280, 8, device="a100"), global_batch=1920)
    found.append(("MT-NLG 530B, 2240 GPUs", asked, {"tp": 8, "pp": 35, "recompute": "full", "sequence_parallel": False}, 0.36))
    bloom = shape.make(layers=70, hidden=14336, heads=112, vocab=250880, seq=2048)
    asked = Request(model=bloom, inventory=inventory.uniform(48, 8, device="a100"), global_batch=2048)
    found.append(("BLOOM 176B, 384 GPUs", asked, {"tp": 4, "pp": 12, "zero": 1, "recompute": "full", "sequence_parallel": False}, 0.50))
    olmo = shape.make(layers=32, hidden=4096, heads=32, ffn=11008, vocab=50304, seq=2048, gated=True)
    asked = Request(model=olmo, inventory=inventory.uniform(27, 8, device="a100"), global_batch=2160)
    found.append(("OLMo 7B, 216 GPUs", asked, {"tp": 1, "pp": 1, "zero": 3}, None))
    found += more_runs()
    gemma = shape.make(layers=46, hidden=4608, heads=32, kv_heads=16, head_dim=128, ffn=36864, vocab=256000, seq=8192, tied=True)
    asked = Request(model=gemma, inventory=inventory.uniform(64, 8), global_batch=1024)
    found.append(("Gemma 2 27B, 512 GPUs (its own run: TPU)", asked, {"zero": 3}, None))
    return found


def more_runs() -> list[tuple[str, Request, dict[str, Any], float | None]]:
    """Open models of 2022 and 2023 on A100, three of them with 40 GB."""
    small = {"device": "a100", "gpu_memory_gb": 40}
    neox = shape.make(layers=44, hidden=6144, heads=64, vocab=50432, seq=2048, tied=False)
    opt = shape.make(layers=96, hidden=12288, heads=96, vocab=50272, seq=2048)
    glm = shape.make(layers=70, hidden=12288, heads=96, ffn=32768, vocab=150528, seq=2048, gated=True, tied=True)
    falcon = shape.make(layers=80, hidden=14848, heads=232, kv_heads=8, ffn=59392, vocab=65024, seq=2048, gated=False, tied=True)
    plain = {"sequence_parallel": False, "recompute": "full"}
    return [
        (
            "GPT-NeoX 20B, 96 GPUs of 40 GB",
            Request(model=neox, inventory=inventory.uniform(12, 8, **small), global_batch=1536),
            {"tp": 2, "pp": 4, "zero": 1, "micro_batch": (4,), **plain},
            117 / 312,
        ),
        (
            "OPT 175B, 992 GPUs",
            Request(model=opt, inventory=inventory.uniform(124, 8, device="a100"), global_batch=992),
            {"tp": 8, "pp": 1, "zero": 3, **plain},
            147 / 312,
        ),
        (
            "GLM-130B, 768 GPUs of 40 GB",
            Request(model=glm, inventory=inventory.uniform(96, 8, **small), global_batch=4224),
            {"tp": 4, "pp": 8, "zero": 1, **plain},
            0.433,
        ),
        (
            "Falcon 180B, 4096 GPUs of 40 GB",
            Request(model=falcon, inventory=inventory.uniform(512, 8, **small), global_batch=2048),
            {"tp": 8, "pp": 8, "zero": 1},
            None,
        ),
    ]


def rows() -> list[dict[str, Any]]:
    """Published plan and own choice of every run."""
    import msgspec

    made: list[dict[str, Any]] = []
    for name, asked, settings, published in runs():
        theirs = planner.plan(msgspec.structs.replace(asked, **settings), most=1).best
        ours = planner.plan(msgspec.structs.replace(asked, schedule="auto"), most=1).best
        row: dict[str, Any] = {"run": name, "accepted": theirs is not None, "published_utilisation": published}
        for label, plan in (("theirs", theirs), ("ours", ours)):
            if plan is None or plan.times is None:
                continue
            repeats = 1.0 + cost.recompute_factor(asked.model, plan.setup.recompute) / 3.0
            row[label] = {
                "mesh": str(plan.mesh),
                "zero": plan.zero_stage,
                "schedule": plan.setup.schedule,
                "virtual": plan.setup.virtual,
                "recompute": plan.setup.recompute,
                "micro_batch": plan.micro_batch,
                "memory_gb": memory.usage(asked.model, plan.layers_per_stage, plan.setup).total / 1e9,
                "step_seconds": plan.step_seconds,
                "mfu": plan.times.mfu,
                "hardware_utilisation": plan.times.mfu * repeats,
            }
        made.append(row)
    return made


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    options = parser.parse_args()
    made = rows()
    known = [row for row in made if row["published_utilisation"]]
    errors = [_utilisation(row) / row["published_utilisation"] - 1.0 for row in known]
    figures = {"accepted": sum(row["accepted"] for row in made) / len(made), "worst_utilisation_error": max(map(abs, errors))}
    if options.json:
        machine = {"python": platform.python_version(), "platform": platform.platform()}
        print(
            json.dumps(
                {"figures": figures, "limits": {"accepted": 1.0, "worst_utilisation_error": 0.5}, "samples": made, "machine": machine}
            )
        )
        return
    print("| run | published mesh | GB | step s | predicted | published | planner's choice | GB | step s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in made:
        theirs, ours = row["theirs"], row["ours"]
        told = f"{row['published_utilisation']:.0%}" if row["published_utilisation"] else "-"
        print(
            f"| {row['run']} | {_name(theirs)} | {theirs['memory_gb']:.0f} | {theirs['step_seconds']:.3g} | {_utilisation(row):.0%} | {told} |"
            f" {_name(ours)} | {ours['memory_gb']:.0f} | {ours['step_seconds']:.3g} |"
        )


def _utilisation(row: dict[str, Any]) -> float:
    """As the source counts it: with recomputation for full recomputation, without for Llama 3."""
    theirs = row["theirs"]
    return theirs["hardware_utilisation"] if theirs["recompute"] == "full" and "Llama" not in row["run"] else theirs["mfu"]


def _name(plan: dict[str, Any]) -> str:
    schedule = plan["schedule"] + (f" x{plan['virtual']}" if plan["virtual"] > 1 else "")
    parts = [plan["mesh"].replace(",", " "), f"ZeRO-{plan['zero']}"]
    if "pp=1" not in plan["mesh"].split(","):
        parts.append(schedule)
    if plan["recompute"] != "flash":
        parts.append(plan["recompute"])
    return ", ".join(parts)


if __name__ == "__main__":
    main()
