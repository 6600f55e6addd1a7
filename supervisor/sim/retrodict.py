"""Validity: published results against the simulator, each with what is sourced and what is not."""

from __future__ import annotations

import random

import msgspec

from regrow.ids import MeshShape
from regrow.supervisor.sim import constants, faults, models
from regrow.supervisor.sim.faults import Fault
from regrow.supervisor.sim.servers import Fleet, Servers
from regrow.supervisor.sim.setup import Setup
from regrow.supervisor.sim.simulate import run_seed
from regrow.supervisor.sim.world import World, policy_of


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A published setting. Eight GPUs a node."""

    name: str
    gpus: int
    restart_seconds: float
    interval_seconds: float


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One published figure and ours."""

    name: str
    published: float
    simulated: float | None
    """None: it was not tried, see `why`."""
    reproduced: bool
    why: str


class Fleeting(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulated fleet did."""

    ettr: float
    failures: int
    shrunk: float
    """Share of the time lost because fewer nodes than wanted trained."""
    lost_work: float
    """Share of the time computed again; AIReSim has none."""


RSC1_RATE = 6.50e-3
RSC2_RATE = 2.34e-3
"""Failures a node-day of the two research clusters (arXiv:2410.21680, section III, as public notes on it quote it)."""
FT_PERIOD_SECONDS, FT_SYNCHRONOUS_SECONDS, FT_STALL_SECONDS = 18 * 60.0, 10 * 60.0, 3 * 60.0
"""A failure each 18 minutes at 100,000 GPUs; stalls of 10 and of 3 minutes (arXiv:2602.00277; the abstract has the stalls, the
period is from public notes on the text)."""
FT_REPLICAS, FT_REPLICA_GPUS, FT_RETURN_SECONDS = 12, 8192, 10 * 60.0
"""Replicas, GPUs of one, and from the fault until its replica is back (arXiv:2602.00277, as public notes on the text quote it: the
authors' own sum is (8 + 7 x 11/12) / 18 = 80 %: 3 minutes nothing, 7 minutes eleven of twelve replicas, 8 minutes all)."""
FT_REJOIN_SECONDS = 100.0
"""Stall that they measured when a replica returns (its first step), not in their sum."""


def first_order_ettr(failures_per_second: float, restart_seconds: float, interval_seconds: float, stall_seconds: float) -> float:
    """(1 - r (u + T / 2)) / (1 + s / T) for a job that restarts u seconds after each failure and saves every T seconds.

    The estimate of arXiv:2410.21680: its cluster's r is nodes times failures a node-day, its queue time is taken as nothing. The
    authors found it within 5 % of their own Monte Carlo runs at 8,000 GPUs.
    """
    return (1.0 - failures_per_second * (restart_seconds + interval_seconds / 2.0)) / (1.0 + stall_seconds / interval_seconds)


def rsc_mttf_hours(gpus: int, rate_per_node_day: float = RSC1_RATE) -> float:
    """Mean time to failure of a job on `gpus` GPUs, eight a node: 24 / (nodes x rate)."""
    return 24.0 / (gpus / 8.0 * rate_per_node_day)


def simulated_ettr(
    *,
    failures_per_day: float,
    restart_seconds: float,
    interval_seconds: float,
    stall_seconds: float,
    nodes: int = 16,
    days: float = 60.0,
    seed: int = 1,
    regular: bool = False,
) -> float:
    """ETTR of a fixed world whose only faults are crashes, with exactly this restart time.

    Args:
        regular: a crash at every multiple of the mean period, in place of a Poisson process.
    """
    quiet = dict.fromkeys(("silence", "exit_report", "message", "record", "commit", "stop", "rendezvous", "restore", "first_step"), 0.0)
    setup = Setup(
        constants=constants.load(None, **quiet, start_cold=restart_seconds, requeue=0.0),
        nodes=nodes,
        days=days,
        policy="fixed-world",
        step_seconds=1.0,
        save_seconds=0.0,
        stall_seconds=stall_seconds,
        interval_seconds=interval_seconds,
        max_interval_seconds=max(3600.0, interval_seconds),
        rate_per_gpu_hour=failures_per_day / 24.0 / (nodes * 8),
    )

    def crashes(rng: random.Random) -> tuple[Fault, ...]:
        found: list[Fault] = []
        rate = failures_per_day / 86_400.0

        def gap() -> float:
            return 1.0 / rate if regular else rng.expovariate(rate)

        at = gap()
        while at < setup.seconds:
            found.append(Fault(at=at, kind="program", nodes=(rng.randrange(nodes),), component="crash"))
            at += gap()
        return tuple(found)

    # their schedulers restart at once; the rules that stop a job are ours, and do not stop these
    prompt = msgspec.structs.replace(policy_of(setup), backoff_seconds=0.0, backoff_most_seconds=0.0)
    return run_seed(setup, models.build(setup), crashes, seed, policy=prompt).summary.ettr


def claims(*, seed: int = 1, nodes: int = 2048) -> list[Claim]:
    """All comparisons. Llama 3 at its own size takes half a minute."""
    setup = Setup(constants=constants.load(), nodes=nodes, policy="fixed-world")
    llama = run_seed(setup, models.build(setup), lambda rng: faults.llama3(setup, rng), seed).summary.ettr
    return [
        Claim(
            name="Llama 3 405B, more than 90 % effective training time",
            published=0.90,
            simulated=llama,
            reproduced=llama > 0.90,
            why="failure counts are sourced (arXiv:2407.21783); restart and save times are assumptions of constants.toml",
        ),
        *rsc_claims(),
        *ft_hsdp_claims(),
    ]


def rsc_claims() -> list[Claim]:
    """RSC: the estimate against the simulator at 8,000 and 12,000 GPUs, with the authors' rate, restart and interval."""
    found: list[Claim] = []
    hour = Scenario(
        name="RSC-1 rate, 8,000 GPUs, saves each hour, restart 5 min", gpus=8000, restart_seconds=300.0, interval_seconds=3600.0
    )
    best = Scenario(
        name="RSC-1 rate, 12,000 GPUs, 10 s saves at the best interval", gpus=12_000, restart_seconds=300.0, interval_seconds=421.0
    )
    for scenario, why in (
        (hour, "published is their own estimate, which they found within 5 % of their Monte Carlo runs"),
        (best, "the paper: 0.9 at 12,000 GPUs needs saves of about 10 s; published is their estimate at sqrt(2 w / r)"),
    ):
        per_day = scenario.gpus / 8.0 * RSC1_RATE
        stall = 10.0
        published = first_order_ettr(per_day / 86_400.0, scenario.restart_seconds, scenario.interval_seconds, stall)
        simulated = simulated_ettr(
            failures_per_day=per_day,
            restart_seconds=scenario.restart_seconds,
            interval_seconds=scenario.interval_seconds,
            stall_seconds=stall,
            nodes=4,
            days=30.0,
        )
        close = abs(simulated - published) <= 0.05 * published
        found.append(Claim(name=scenario.name, published=published, simulated=simulated, reproduced=close, why=why))
    return found


def ft_hsdp_goodput(*, rejoin_seconds: float = 0.0, days: float = 2.0, seed: int = 1) -> float:
    """Share of the reserved time at full pace when a lost replica is left out until it is back.

    A node stands for a replica. Their stall is one time limit of the all-reduce and what follows, so it lies before the decision
    here, and our own shorter limits for a hang are off. The job goes on from a checkpoint ten seconds old, where theirs has its state.

    Args:
        rejoin_seconds: stall of all when the replica returns; the first stall stays as published.
        days: simulated.
        seed: which replica is lost.
    """
    zero = dict.fromkeys(("exit_report", "verdict", "message", "record", "commit", "stop", "start", "restore", "first_step"), 0.0)
    before = FT_STALL_SECONDS - rejoin_seconds
    setup = Setup(
        constants=constants.load(None, **zero, silence=before, peer_error=before, lease=2 * before, rendezvous=rejoin_seconds),
        nodes=FT_REPLICAS,
        gpus_per_node=FT_REPLICA_GPUS,
        days=days,
        policy="dp-shrink",
        mesh=MeshShape(dp=FT_REPLICAS),
        sequences=FT_REPLICAS * (FT_REPLICAS - 1),
        step_seconds=1.0,
        save_seconds=0.0,
        stall_seconds=0.0,
        interval_seconds=10.0,
        rate_per_gpu_hour=3600.0 / FT_PERIOD_SECONDS / (FT_REPLICAS * FT_REPLICA_GPUS),
    )

    def losses(rng: random.Random) -> tuple[Fault, ...]:
        number = int(setup.seconds / FT_PERIOD_SECONDS)
        return tuple(
            Fault(
                at=FT_PERIOD_SECONDS * place, kind="host", nodes=(rng.randrange(FT_REPLICAS),), seconds=FT_RETURN_SECONDS, component="host"
            )
            for place in range(1, number + 1)
        )

    patient = msgspec.structs.replace(
        policy_of(setup), backoff_seconds=0.0, backoff_most_seconds=0.0, hang_floor_seconds=3600.0, hang_first_step_seconds=3600.0
    )
    return run_seed(setup, models.build(setup), losses, seed, policy=patient).summary.goodput


def ft_hsdp_claims() -> list[Claim]:
    """FT-HSDP: only stalls are lost (its recovery does not go back to a checkpoint), a failure at each multiple of its period."""
    synchronous = simulated_ettr(
        failures_per_day=86_400.0 / FT_PERIOD_SECONDS,
        restart_seconds=FT_SYNCHRONOUS_SECONDS,
        interval_seconds=10.0,
        stall_seconds=0.0,
        nodes=4,
        days=1.0,
        regular=True,
    )
    replicas = ft_hsdp_goodput()
    why = "every failure stops all for 10 min; periods of 18 min, not a Poisson process, give their figure"
    part = "stalls of 3 min, then eleven of twelve replicas for 7 min; twelve and ten minutes are from public notes on the text"
    return [
        Claim(
            name=f"FT-HSDP at 100,000 GPUs, {name}",
            published=published,
            simulated=simulated,
            reproduced=abs(simulated - published) <= 0.02,
            why=text,
        )
        for name, published, simulated, text in (
            ("10 min stalls of all", 0.44, synchronous, why),
            ("3 min stalls, one replica absent", 0.80, replicas, part),
        )
    ]


AIRESIM_RATIO = 0.6228
"""Share of computing time at their defaults: 4,096 servers, 256 days, 20 min each restart (docs/SIMULATION_REPORT.md of their program)."""
AIRESIM_RUN_SECONDS = 33.07 * 60.0
"""Mean time between failures in that report."""


def airesim_ettr(
    *, nodes: int, spares: int, days: float, restart_seconds: float, servers: Servers | None = None, seed: int = 1
) -> Fleeting:
    """The fleet of AIReSim under our rules: a lost server is replaced by a spare, and comes back from its repair as one.

    Args:
        nodes: that the job needs.
        spares: theirs are standbys, the rest of the pool, and servers preempted from other jobs; here all stand ready.
        days: simulated.
        restart_seconds: of each restart, nothing else costs time.
        servers: failures and repairs; default: their table 1.
        seed: of all draws.
    """
    zero = dict.fromkeys(
        ("silence", "peer_error", "exit_report", "message", "record", "commit", "stop", "start", "restore", "first_step"), 0.0
    )
    setup = Setup(
        constants=constants.load(None, **zero, lease=1.0, rendezvous=restart_seconds),
        nodes=nodes,
        days=days,
        policy=f"spares:{spares}",
        mesh=MeshShape(dp=nodes),
        step_seconds=1.0,
        save_seconds=0.0,
        stall_seconds=0.0,
        interval_seconds=10.0,
        rate_per_gpu_hour=0.0,
    )
    patient = msgspec.structs.replace(
        policy_of(setup),
        backoff_seconds=0.0,
        backoff_most_seconds=0.0,
        phase_seconds=4 * restart_seconds,
        start_seconds=8 * restart_seconds,
        hang_first_step_seconds=8 * restart_seconds,
    )
    fleets: list[Fleet] = []

    def prepare(world: World) -> None:
        fleets.append(Fleet(world, servers or Servers(), random.Random(f"{seed}/fleet")))  # noqa: S311  # to be repeated
        fleets[0].start()

    summary = run_seed(setup, models.build(setup), lambda _rng: (), seed, policy=patient, prepare=prepare).summary
    return Fleeting(
        ettr=summary.ettr,
        failures=fleets[0].num_failures,
        shrunk=summary.lost_seconds["shrunk"] / summary.wall_seconds,
        lost_work=summary.lost_seconds["lost_work"] / summary.wall_seconds,
    )
