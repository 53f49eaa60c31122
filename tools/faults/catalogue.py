"""Every fault that is injected without an engine's model, and what is expected of it."""

from tools.faults import (
    kill_faults,
    link_faults,
    redis_faults,
    sidecar_faults,
    state_faults,
    version_faults,
)
from tools.faults.fault import Fault

_ALONE = "plan to its lease's end, grace, safe default; then steered under what was acknowledged"
_ON = "the plan goes on, no safe default"
_REDIS = f"{_ON}; new overrides refused with the reason, those acknowledged in force"


def linked_faults(kills: int, damages: int, full_disks: int) -> tuple[Fault, ...]:
    """At a real `controller serve` and a real agent; the engine's steps are made up."""
    return (
        Fault(
            "agent-killed",
            "SIGKILL to the agent",
            f"{_ON}; a new agent in a new session",
            link_faults.agent_killed,
        ),
        Fault(
            "agent-stopped",
            "SIGSTOP to the agent until the safe default runs, SIGCONT",
            _ALONE,
            link_faults.agent_stopped,
        ),
        Fault(
            "socket-buffers-full",
            "the agent is stopped and reads nothing; the engine steps as fast as it can",
            "reports are dropped and counted, no step waits",
            link_faults.buffers_full,
        ),
        Fault(
            "connections-reset",
            "a TCP proxy between agent and sidecar resets (RST) five times",
            f"{_ON}; a new session at once",
            link_faults.connections_reset,
            quick=True,
        ),
        Fault(
            "sidecar-slow",
            "a proxy between agent and sidecar: every byte to the agent 1 s late",
            "it introduces itself, and is steered all along",
            link_faults.sidecar_slow,
            quick=True,
        ),
        Fault(
            "socket-file-deleted",
            "rm of the sidecar's socket, then SIGKILL to the agent",
            "the open stream steers on; health says so; a new agent finds it after a restart",
            link_faults.socket_file_deleted,
        ),
        Fault(
            "sidecar-killed",
            "SIGKILL to the sidecar until the safe default runs, then started with the same state",
            _ALONE,
            sidecar_faults.killed,
        ),
        Fault(
            "sidecar-stopped",
            "SIGSTOP to the sidecar until the safe default runs, SIGCONT",
            _ALONE,
            sidecar_faults.stopped,
        ),
        Fault(
            "two-sidecars",
            "a second sidecar on the first one's socket, another on its state directory",
            f"both refuse to start with their exit code; {_ON}",
            sidecar_faults.two_at_one_place,
        ),
        Fault(
            "restart-storm",
            "the sidecar is killed and started 20 times in a row while the engine runs",
            f"{_ON}; steered after each; the agent keeps no descriptor",
            sidecar_faults.storm,
        ),
        Fault(
            "introducing-crowd",
            "the sidecar of 64 agents is killed and started",
            "all are steered again under what was acknowledged",
            sidecar_faults.crowd,
        ),
        Fault(
            "state-disk-full",
            "state and record directories on a tmpfs of 256 KiB that is filled",
            f"{_ON}; overrides refused; what was acknowledged is there after a restart",
            state_faults.disk_full,
            quick=True,
        ),
        Fault(
            "state-disk-full-at-random",
            f"a disk of 256 KiB that is full at some instant of a store's life, {full_disks} times",
            "what was acknowledged is there, and no more, also after a start on the full disk",
            state_faults.disk_full_at_random(full_disks),
            quick=True,
        ),
        Fault(
            "database-damaged",
            f"a bit, a sector, a page or the end of overrides.db changed, {damages} copies",
            "refused with its name, or all that was acknowledged is there",
            state_faults.damaged(damages),
            quick=True,
        ),
        Fault(
            "clock-set",
            "CLOCK_REALTIME of sidecar and agent a day ahead, two days back (libfaketime)",
            f"{_ON}; overrides end in their time",
            state_faults.clock_set,
        ),
        Fault(
            "half-a-profile",
            "half of a profile's file appears in the directory that is read",
            f"{_ON}; refused by name at SIGHUP and at a start, taken when it is whole",
            state_faults.half_a_profile,
        ),
        Fault(
            "redis-cut-off",
            "Redis in a network namespace, its link goes down (ip netns)",
            _REDIS,
            redis_faults.cut_off,
        ),
        Fault("redis-stopped", "SIGSTOP to Redis", _REDIS, redis_faults.stopped),
        Fault("redis-full", "CONFIG SET maxmemory 1", _REDIS, redis_faults.full),
        Fault(
            "redis-read-only",
            "REPLICAOF a server that is not there",
            _REDIS,
            redis_faults.read_only,
        ),
        Fault(
            "older-shim",
            "link and agent of the oldest commit that has them, at today's sidecar",
            "steered, reports taken, none refused",
            version_faults.old_shim,
            quick=True,
        ),
        Fault(
            "older-sidecar",
            "today's link and agent, with a lookup, at the sidecar of that commit",
            "steered, reports taken, none refused",
            version_faults.old_sidecar,
            quick=True,
        ),
        Fault(
            "killed-at-random",
            f"SIGKILL to a sidecar that writes overrides and profiles all the time, {kills} times",
            "the store is readable, what was acknowledged is there, nothing is left behind",
            kill_faults.killed_at_random(kills),
            quick=True,
        ),
    )
