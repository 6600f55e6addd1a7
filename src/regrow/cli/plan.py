"""`regrow plan`: legal and best meshes for an inventory, judged meshes, and plans after losing nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from regrow.cli.output import Json, emit

_MODEL, _NODES, _FORCE, _ASK = "Model", "Inventory", "Force (default: the planner chooses)", "Answers"


def register(app: typer.Typer) -> None:
    """Add `plan`."""
    app.command("plan")(plan)


def plan(
    *,
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face config.json, Megatron arguments or torchtitan TOML.", rich_help_panel=_MODEL)
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Transformer layers.", rich_help_panel=_MODEL)] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size.", rich_help_panel=_MODEL)] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.", rich_help_panel=_MODEL)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads (default: heads).", rich_help_panel=_MODEL)] = None,
    head_dim: Annotated[int | None, typer.Option(help="Size of a head (default: hidden / heads).", rich_help_panel=_MODEL)] = None,
    ffn: Annotated[int | None, typer.Option(help="MLP width (default: 4 x hidden).", rich_help_panel=_MODEL)] = None,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary.", rich_help_panel=_MODEL)] = None,
    seq: Annotated[int | None, typer.Option(help="Sequence length in tokens.", rich_help_panel=_MODEL)] = None,
    params: Annotated[float | None, typer.Option(help="Parameters; alone enough for model-state memory.", rich_help_panel=_MODEL)] = None,
    experts: Annotated[int | None, typer.Option(help="Routed experts of a MoE layer.", rich_help_panel=_MODEL)] = None,
    experts_per_token: Annotated[int | None, typer.Option(help="Experts a token uses (default: 2).", rich_help_panel=_MODEL)] = None,
    expert_ffn: Annotated[int | None, typer.Option(help="MLP width of an expert.", rich_help_panel=_MODEL)] = None,
    shared_experts: Annotated[int | None, typer.Option(help="Experts that all tokens use.", rich_help_panel=_MODEL)] = None,
    dense_layers: Annotated[int | None, typer.Option(help="Leading layers without experts.", rich_help_panel=_MODEL)] = None,
    gated: Annotated[
        bool | None, typer.Option("--gated/--classic", help="SwiGLU block, or GPT block (default: guessed).", rich_help_panel=_MODEL)
    ] = None,
    tied: Annotated[bool | None, typer.Option("--tied/--untied", help="Head shares the embedding.", rich_help_panel=_MODEL)] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes.", rich_help_panel=_NODES)] = None,
    gpus_per_node: Annotated[
        str | None, typer.Option(help="GPUs a node: 8, or one number per node 8,8,7,6.", rich_help_panel=_NODES)
    ] = None,
    gpu_memory_gb: Annotated[float | None, typer.Option(help="Memory of a GPU in GB (1e9 bytes).", rich_help_panel=_NODES)] = None,
    gpu_type: Annotated[str | None, typer.Option(help="v100, a100, h100 (default), h800, h200, b200, cpu.", rich_help_panel=_NODES)] = None,
    peak_tflops: Annotated[float | None, typer.Option(help="Dense 16-bit peak of a GPU.", rich_help_panel=_NODES)] = None,
    nvlink_gpus: Annotated[int | None, typer.Option(help="GPUs of an NVLink domain (default: a node).", rich_help_panel=_NODES)] = None,
    inventory: Annotated[Path | None, typer.Option(help="JSON file: nodes, link classes, domains.", rich_help_panel=_NODES)] = None,
    global_batch: Annotated[int | None, typer.Option(help="Samples of one optimizer step, kept exactly.", rich_help_panel=_FORCE)] = None,
    micro_batch: Annotated[
        str | None, typer.Option(help="Samples of one pass; 4,8 lets the planner choose.", rich_help_panel=_FORCE)
    ] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel replicas.", rich_help_panel=_FORCE)] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel size.", rich_help_panel=_FORCE)] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.", rich_help_panel=_FORCE)] = None,
    cp: Annotated[int | None, typer.Option(help="Context-parallel size.", rich_help_panel=_FORCE)] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel size, folded into DP x CP x TP.", rich_help_panel=_FORCE)] = None,
    zero: Annotated[int | None, typer.Option(help="ZeRO stage 0..3.", rich_help_panel=_FORCE)] = None,
    hsdp_shard: Annotated[int | None, typer.Option(help="HSDP: ranks of one sharding group.", rich_help_panel=_FORCE)] = None,
    schedule: Annotated[
        str | None, typer.Option(help="gpipe, 1f1b (default), interleaved, zb-h1, zbv, dualpipe, auto.", rich_help_panel=_FORCE)
    ] = None,
    virtual: Annotated[
        int | None, typer.Option(help="Virtual stages of the interleaved schedule (default: 2).", rich_help_panel=_FORCE)
    ] = None,
    recompute: Annotated[str | None, typer.Option(help="none, flash, selective or full.", rich_help_panel=_FORCE)] = None,
    optimizer: Annotated[str, typer.Option(help="mixed, mixed-fp32-grad, fp32, 8bit, bf16, sgd.", rich_help_panel=_FORCE)] = "mixed",
    offload: Annotated[str, typer.Option(help="none, optimizer or all: to host memory.", rich_help_panel=_FORCE)] = "none",
    equal_replicas: Annotated[
        bool, typer.Option("--equal-replicas", help="Same micro-batch count on all replicas.", rich_help_panel=_FORCE)
    ] = False,
    sequence_parallel: Annotated[bool, typer.Option(help="Split norms and dropout along the sequence.", rich_help_panel=_FORCE)] = True,
    replicate_kv: Annotated[bool, typer.Option("--replicate-kv", help="Copy KV heads when TP is larger.", rich_help_panel=_FORCE)] = False,
    reserve_gb: Annotated[float, typer.Option(help="CUDA context and NCCL, GB a GPU.", rich_help_panel=_FORCE)] = 1.0,
    lose: Annotated[int | None, typer.Option(help="Plan for what is left after losing K nodes.", rich_help_panel=_ASK)] = None,
    table: Annotated[bool, typer.Option("--table", help="Best mesh for every number of survivors.", rich_help_panel=_ASK)] = False,
    advise: Annotated[bool, typer.Option("--advise", help="Which wall binds, what to try first.", rich_help_panel=_ASK)] = False,
    placement: Annotated[bool, typer.Option("--placement", help="Ranks on nodes, buddies.", rich_help_panel=_ASK)] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture of the best plan.", rich_help_panel=_ASK)] = None,
    picture: Annotated[str, typer.Option(help="mesh, schedule or regime (batch x chips).", rich_help_panel=_ASK)] = "mesh",
    calibrate: Annotated[
        Path | None, typer.Option(help="Run folder, or JSON of measured meshes: [{mesh, step_seconds}].", rich_help_panel=_ASK)
    ] = None,
    critical_batch: Annotated[int | None, typer.Option(help="Batch beyond which samples buy little.", rich_help_panel=_ASK)] = None,
    rate_per_gpu_hour: Annotated[float | None, typer.Option(help="Failures a GPU and hour: MTBF, spares.", rich_help_panel=_ASK)] = None,
    repair_hours: Annotated[float, typer.Option(help="Until a lost node is replaced.", rich_help_panel=_ASK)] = 1.0,
    reform_seconds: Annotated[float, typer.Option(help="Stop, start and first step of a new mesh.", rich_help_panel=_ASK)] = 10.0,
    restore_gb_per_second: Annotated[float, typer.Option(help="What one GPU reads of a checkpoint.", rich_help_panel=_ASK)] = 5.0,
    top: Annotated[int, typer.Option(help="Plans to show.", rich_help_panel=_ASK)] = 10,
    json: Json = False,
) -> None:
    """Legal and best meshes for an inventory, and after losing nodes. A forced mesh is judged."""
    flags: dict[str, Any] = dict(locals())
    from regrow.cli import plan_document, plan_extras, plan_inputs, plan_run, plan_text
    from regrow.parallel import planner

    run = plan_run.read(calibrate) if calibrate is not None and plan_run.is_run(calibrate) else None
    taken = [plan_run.fill(flags, run)] if run is not None else []
    whole, notes = plan_inputs.request(flags)
    fit: dict[str, Any] | None = None
    if calibrate is not None:
        whole, fit = plan_extras.calibrated(whole, calibrate, run)
    notes = [*taken, *notes]
    request = whole if lose is None else plan_inputs.lose(whole, lose)
    result = planner.plan(request, most=max(1, top))
    document = plan_document.document(request, result, notes)
    if fit is not None:
        document["calibration"] = fit
    if lose is not None:
        document |= plan_extras.before_and_after(whole, lose, flags)
    if result.best is None:
        plan_extras.explain_refusal(document, request)
    plan_extras.add(document, request, result, flags)
    if svg is not None:
        plan_extras.write_picture(request, result.best, picture, svg)
    emit(document, as_json=json, human=lambda: plan_text.show(document))
    if result.best is None:
        raise typer.Exit(1)
