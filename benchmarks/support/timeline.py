"""A run as a timeline in Chrome's trace format, which Perfetto and chrome://tracing open.

One track per replica (passes and holds, or draft steps), one per direction of the links, and one for the client.
Arrows lead from a draft step to the moment its nodes reach the target, and from a pass to the moment its commit
reaches the draft.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.support.actor_rig import Run
from benchmarks.support.timed_actors import Mark, ReplicaNotes

Event = dict[str, Any]

_OFFERS, _COMMITS, _CLIENT = 1, 2, 3
_REPLICAS = 10


def events(run: Run) -> list[Event]:
    """All events of `run`, in microseconds since its first request."""
    origin = min(answer.started for answer in run.answers)
    timeline = _Timeline(origin)
    found: list[Event] = [
        *timeline.names({_OFFERS: "offers: draft to target", _COMMITS: "commits: target to draft", _CLIENT: "client"})
    ]
    for track, replica in enumerate([*run.targets, *run.drafts], _REPLICAS):
        found += timeline.names({track: replica.name})
        found += timeline.passes(replica, track)
        found += timeline.steps(replica, track)
    tracks = {replica.name: track for track, replica in enumerate([*run.targets, *run.drafts], _REPLICAS)}
    offered = {mark: (at, r.name) for r in run.targets for mark, at in r.arrivals.items()}
    committed = {mark: (at, r.name) for r in run.drafts for mark, at in r.arrivals.items()}
    for replica in run.drafts:
        sent = [(note.mark, note.ended) for note in replica.steps if note.mark is not None]
        found += timeline.hops(sent, offered, _OFFERS, "offer", tracks)
    for replica in run.targets:
        sent = [(mark, note.ended) for note in replica.passes for mark in note.marks]
        found += timeline.hops(sent, committed, _COMMITS, "commit", tracks)
    found += timeline.client(run)
    return found


def write(run: Run, path: Path) -> None:
    """Write the timeline of `run` to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events(run), "displayTimeUnit": "ms"}), encoding="utf-8")


class _Timeline:
    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._arrow = 0

    def _at(self, seconds: float) -> float:
        return round((seconds - self._origin) * 1e6, 1)

    def _slice(self, track: int, name: str, started: float, ended: float, **args: Any) -> Event:
        duration = max(round((ended - started) * 1e6, 1), 0.1)
        return {
            "ph": "X",
            "pid": 1,
            "tid": track,
            "name": name,
            "ts": self._at(started),
            "dur": duration,
            "args": args,
        }

    def names(self, tracks: dict[int, str]) -> Iterator[Event]:
        for track, name in tracks.items():
            yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}}
            yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}

    def passes(self, replica: ReplicaNotes, track: int) -> Iterator[Event]:
        for number, note in enumerate(replica.passes):
            if note.held_s > 0:
                yield self._slice(track, "held for drafts", note.started - note.held_s, note.started)
            yield self._slice(
                track,
                f"pass: {note.accepted} of {note.proposed} accepted" if note.proposed else "pass: no drafts",
                note.started,
                note.ended,
                number=number,
                sequences=note.rows,
                tokens=note.tokens,
                committed=note.committed,
            )

    def steps(self, replica: ReplicaNotes, track: int) -> Iterator[Event]:
        for number, note in enumerate(replica.steps):
            yield self._slice(track, f"step: {note.rows} nodes", note.started, note.ended, number=number)

    def hops(
        self,
        sent: list[tuple[Mark, float]],
        arrived: dict[Mark, tuple[float, str]],
        track: int,
        name: str,
        tracks: dict[str, int],
    ) -> Iterator[Event]:
        for mark, left in sent:
            if mark not in arrived:
                continue
            at, receiver = arrived[mark]
            yield self._slice(track, name, left, at, position=mark[1])
            self._arrow += 1
            arrow = {"cat": name, "name": name, "pid": 1, "id": self._arrow}
            yield {"ph": "s", "tid": track, "ts": self._at(left), **arrow}
            yield {"ph": "f", "bp": "e", "tid": tracks[receiver], "ts": self._at(at), **arrow}

    def client(self, run: Run) -> Iterator[Event]:
        for answer in run.answers:
            for at, count in answer.arrivals:
                args = {"sequence": answer.id}
                yield {
                    "ph": "i",
                    "s": "t",
                    "pid": 1,
                    "tid": _CLIENT,
                    "name": f"{count} tokens",
                    "ts": self._at(at),
                    "args": args,
                }
