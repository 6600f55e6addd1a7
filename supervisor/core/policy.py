"""The constants of deciding: every time limit, budget and factor of the core, with its unit and its reason."""

from __future__ import annotations

import msgspec


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. One instance per supervisor, filled from its configuration."""

    coalesce_seconds: float = 0.08
    """Symptoms that arrive within this time of the first one are one decision."""
    burst_seconds: float = 5.0
    """Nodes that are late when another falls silent are waited for, until so long after the first sign of the burst."""
    victim_seconds: float = 1.5
    """How long to wait for an explanation when all that is known are workers that lost a peer."""
    reconnect_seconds: float = 10.0
    """A closed connection means that an agent process died (a host that loses power closes nothing): time for a restarted one
    to adopt its workers, unless workers of other nodes fail meanwhile."""
    orphan_seconds: float = 30.0
    """Workers live this long without an agent (T_orphan of the shim)."""
    stopped_floor_seconds: float = 2.0
    """Progress counts as stopped after this time, or after `stopped_steps` median steps when that is longer."""
    stopped_steps: float = 3.0
    join_seconds: float = 3.0
    """First start: wait this long for more nodes once the least number is there."""
    takeover_seconds: float = 5.0
    """A new leader waits this long for agents to tell what they run."""
    record_seconds: float = 5.0
    """Deadline of the generation record's compare-and-swap."""
    start_seconds: float = 600.0
    """Deadline from the order to start to the first completed step."""
    phase_seconds: float = 90.0
    """Deadline between two phases of a start."""
    save_seconds: float = 60.0
    """Deadline of a save that an order waits for."""
    stop_grace_seconds: float = 5.0
    """SIGTERM to SIGKILL when an operator stops a job."""
    stop_seconds: float = 20.0
    """Deadline for the workers of a stopped job to be gone."""
    hang_floor_seconds: float = 30.0
    """The learned limit of a step without progress is max(floor, hang_factor x median step)."""
    hang_factor: float = 8.0
    hang_phase_factor: float = 4.0
    """The same for evaluations, saves and restores, of the longest that was seen."""
    hang_stopped_factor: float = 3.0
    """The factor when a worker's process is known not to run (SIGSTOP, ptrace, D state): that is evidence by itself."""
    hang_first_step_seconds: float = 120.0
    """Least limit before the first completed step of a generation (compilation, caches)."""
    end_linger_seconds: float = 30.0
    """Ranks that are left after the program's end and use no CPU time for so long are hung (0: never)."""
    non_finite_steps: int = 3
    """This many steps in a row with something NaN or infinite are no overflow that a loss scaler skips: roll back."""
    stacks_seconds: float = 1.0
    """How long to wait for the stacks of all ranks before a hung generation is replaced."""
    reach_seconds: float = 4.0
    """How long to wait for what members say of each other's reachability, when nobody is singled out. An agent gives a peer 2.5 s."""
    reach_again_seconds: float = 60.0
    """How often others try whether a host that was put out as cut off answers again; doubles with each strike. 0: never."""
    growth_cooldown_seconds: float = 30.0
    """No growth within this time of the last new generation."""
    growth_horizon_least_seconds: float = 600.0
    growth_horizon_seconds: float = 3600.0
    """The gain of a bigger mesh is counted over the expected time to the next failure, within these bounds: at the next
    failure growth costs nothing more, and a rate guessed from few incidents is no reason to leave nodes idle."""
    slow_ratio: float = 0.0
    """A rank whose own compute takes this share longer than it did, against the others, is moved to a spare. 0: never; 0.1 is a tenth."""
    slow_seconds: float = 60.0
    """It has to be slow for so long."""
    restart_seconds_prior: float = 10.0
    """From the decision to the first step of a new generation, before one was measured."""
    in_place_share: float = 0.5
    """Of a warm restart's time, expected where survivors keep their processes: no stop, no start, no imports of the script."""
    node_return_seconds_prior: float = 600.0
    """Expected time for a lost node to come back."""
    backoff_seconds: float = 1.0
    """First delay after a failure without progress; doubles each time."""
    backoff_most_seconds: float = 60.0
    no_progress_limit: int = 3
    """Generations in a row that the program failed without a step beyond the frontier: the job stops."""
    no_progress_unknown_limit: int = 6
    """The same for failures of unknown cause, such as signals."""
    no_progress_chance: float = 1e-6
    """Such a row stops the job when chance explains it with less than this probability, at the job's own earlier rate."""
    silent_progress_seconds: float = 60.0
    """A script that reports no steps has made progress when it ran this long."""
    unstarted_limit: int = 10
    """Generations in a row that could not be started (no charge): the job is parked and a person is called."""
    healthy_seconds: float = 1800.0
    """Budgets are restored after this time of progress without an incident."""
    account_seconds: float = 300.0
    """How often a job's account of goodput is written to the store: a new leader goes on from it."""
    budget_window_seconds: float = 86_400.0
    """Older charges do not count."""
    infrastructure_factor: int = 10
    """Infrastructure and preemption have this many times the job's max_restarts."""
    paid_share: float = 0.1
    """A restart by infrastructure or preemption is paid back when at least this share of the time until the next incident was
    progress: the budget counts restarts that bring nothing."""
    verdict_seconds: float = 1.0
    """Before a job ends as its program's fault, the health of the node has so long to say that it was the machine."""
    preemption: bool = False
    """A job that cannot form takes what it needs at least from jobs of lower priority. Off: a job keeps its nodes."""
    preempt_after_seconds: float = 30.0
    """It waits so long for nodes that come by themselves."""
    quarantine_seconds: float = 600.0
    """First cool-down; doubles with each strike."""
    quarantine_most_seconds: float = 86_400.0
    burn_in_seconds: float = 30.0
    """Healthy verdicts for this long end the burn-in."""
    probation_seconds: float = 3600.0
    suspect_seconds: float = 3600.0
    """A second soft sign within this time turns suspicion into quarantine; without one it fades."""
    breaker_nodes: int = 3
    """Automatic quarantine stops at max(this, breaker_share of the nodes) within breaker_window_seconds."""
    breaker_share: float = 0.2
    breaker_window_seconds: float = 3600.0
    evictions_per_hour: int = 8
    """At most so many nodes (or breaker_share of all, if that is more) are taken out of a job within an hour by automatic
    decisions on their health; then a person is called and the job keeps what it has."""
    observe_only: frozenset[str] = frozenset()
    """Kinds of automatic action that are only written down: quarantine, growth, drain, recovery."""
