"""Symbolic memory: which element lies where, and who read and wrote it when.

Bytes are kept as runs. What a run holds is a list of terms, each an element of a call's input, that were added in
order; ``None`` is what nobody wrote, ``()`` is zero. A run's terms name its first element; the following ones follow
the elements that come after.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tide_strategies.verify.violation import Violation

#: (kind, call, rank, parameter, element): where a value comes from.
Term = tuple[str, int, int, int, int]
Terms = tuple[Term, ...] | None


@dataclass(slots=True)
class Run:
    """``nbytes`` bytes of items of ``size`` bytes; ``skip`` bytes before them the terms' elements begin."""

    nbytes: int
    terms: Terms
    skip: int = 0
    size: int = 1

    def at(self, skipped: int, nbytes: int) -> Run:
        """A part of the run."""
        return Run(nbytes, self.terms, self.skip + skipped if self.terms else 0, self.size)

    def first(self) -> Terms:
        """Terms of the run's first element."""
        if not self.terms:
            return self.terms
        n = self.skip // self.size
        return self.terms if n == 0 else tuple((k, c, r, p, e + n) for k, c, r, p, e in self.terms)

    def follows(self, other: Run) -> bool:
        """Whether this run just goes on with ``other``."""
        if not self.terms or not other.terms:
            return self.terms == other.terms
        if self.size != other.size:
            return False
        if self.terms is other.terms or self.terms == other.terms:
            return self.skip == other.skip + other.nbytes
        return self.skip % self.size == 0 and other.at(other.nbytes, 0).first() == self.first()


@dataclass(slots=True)
class _Segment:
    run: Run
    writer: int
    written: int
    reads: dict[int, int]


class Actor:
    """Who accesses memory: a thread, what it knows of all threads, and its own time."""

    __slots__ = ("clock", "name", "number", "tick")

    def __init__(self, number: int, name: str, clock: list[int]) -> None:
        self.number, self.name, self.clock, self.tick = number, name, clock, 1

    def knows(self, thread: int, tick: int) -> bool:
        """Whether what ``thread`` did at ``tick`` happened before now."""
        return thread == self.number or self.clock[thread] >= tick


class Memory:
    """One region of one rank, ``nbytes`` long."""

    def __init__(self, name: str, nbytes: int, names: list[str]) -> None:
        self.name, self.nbytes, self._names = name, nbytes, names
        self._starts = [0]
        self._segments = [_Segment(Run(nbytes, None), -1, 0, {})]

    def read(self, actor: Actor, begin: int, nbytes: int) -> list[Run]:
        """What lies in ``nbytes`` bytes from ``begin``; runs that go on are joined."""
        out: list[Run] = []
        first, end = self._range(actor, begin, nbytes)
        for segment in self._segments[first:end]:
            if segment.writer >= 0 and not actor.knows(segment.writer, segment.written):
                self._conflict(actor, "reads", begin, "write", segment.writer)
            segment.reads[actor.number] = actor.tick
            run = segment.run
            if out and run.follows(out[-1]):
                last = out[-1]
                out[-1] = Run(last.nbytes + run.nbytes, last.terms, last.skip, last.size)
            else:
                out.append(run)
        return out

    def write(self, actor: Actor, begin: int, runs: Sequence[Run]) -> None:
        """Put runs one after another at ``begin``."""
        first, end = self._range(actor, begin, sum(run.nbytes for run in runs))
        for segment in self._segments[first:end]:
            if segment.writer >= 0 and not actor.knows(segment.writer, segment.written):
                self._conflict(actor, "writes", begin, "write", segment.writer)
            for reader, tick in segment.reads.items():
                if not actor.knows(reader, tick):
                    self._conflict(actor, "writes", begin, "read", reader)
        if len(runs) == 1 and end == first + 1:
            self._segments[first] = _Segment(runs[0], actor.number, actor.tick, {})
            return
        starts, segments, at = [], [], begin
        for run in runs:
            if run.nbytes:
                starts.append(at)
                segments.append(_Segment(run, actor.number, actor.tick, {}))
                at += run.nbytes
        self._starts[first:end] = starts
        self._segments[first:end] = segments

    def _conflict(self, actor: Actor, does: str, begin: int, what: str, other: int) -> None:
        message = f"{actor.name} {does} {self.name}+{begin}, unsynchronised with the {what} of {self._names[other]}"
        raise Violation("race", message)

    def _index(self, at: int) -> int:
        return bisect_right(self._starts, at) - 1

    def _range(self, actor: Actor, begin: int, nbytes: int) -> tuple[int, int]:
        """Numbers [first, end) of the segments that make up the bytes."""
        if begin < 0 or begin + nbytes > self.nbytes:
            raise Violation("bounds", f"{actor.name} uses {self.name} [{begin}, {begin + nbytes}) of {self.nbytes}")
        if not nbytes:
            return 0, 0
        i = bisect_right(self._starts, begin) - 1
        if self._starts[i] == begin and self._segments[i].run.nbytes == nbytes:
            return i, i + 1
        self._split(begin)
        self._split(begin + nbytes)
        return self._index(begin), self._index(begin + nbytes - 1) + 1

    def _split(self, at: int) -> None:
        if at >= self.nbytes:
            return
        i = self._index(at)
        start = self._starts[i]
        if start == at:
            return
        old = self._segments[i]
        head, tail = old.run.at(0, at - start), old.run.at(at - start, old.run.nbytes - (at - start))
        self._segments[i] = _Segment(head, old.writer, old.written, dict(old.reads))
        self._segments.insert(i + 1, _Segment(tail, old.writer, old.written, old.reads))
        self._starts.insert(i + 1, at)


def cast(run: Run, old: int, new: int) -> Run:
    """The run with items of ``new`` bytes instead of ``old``."""
    return Run(run.nbytes // old * new, run.terms, run.skip // old * new, new)


def added(thread: Actor, sources: list[list[Run]], sizes: list[int], items: int, dst_size: int) -> list[Run]:
    """Runs of the sums of several sources' runs."""
    out: list[Run] = []
    where = [[0, 0] for _ in sources]  # run, bytes of it that are used up
    done = 0
    while done < items:
        step = min((runs[i].nbytes - used) // size for runs, (i, used), size in zip(sources, where, sizes, strict=True))
        if step < 1:
            raise Violation("result", f"{thread.name} adds parts of elements")
        terms: list[Term] = []
        for n, (runs, size) in enumerate(zip(sources, sizes, strict=True)):
            i, used = where[n]
            part = runs[i].at(used, step * size)
            if part.terms is None:
                raise Violation("unwritten", f"{thread.name} adds what nobody wrote")
            if part.terms and (part.size != size or part.skip % size):
                raise Violation("result", f"{thread.name} adds items of {size} bytes that were written otherwise")
            terms += part.first() or ()
            where[n] = [i + 1, 0] if used + step * size == runs[i].nbytes else [i, used + step * size]
        out.append(Run(step * dst_size, tuple(terms), 0, dst_size))
        done += step
    return out
