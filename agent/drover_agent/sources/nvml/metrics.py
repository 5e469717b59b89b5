"""All values of one GPU with the fewest calls: what was refused is asked again in another way, or rarely."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import pynvml

from drover_agent.sources.nvml.calls import (
    Bare,
    Call,
    FieldBatch,
    Raw,
    Read,
)
from drover_agent.sources.nvml.errors import FOR_GOOD, DriverGoneError, LostError
from drover_agent.sources.nvml.fields import (
    BER_KEY,
    CALLS,
    FIELDS,
    PCIE_CALLS,
    STATE_KEY,
    UTILIZATION,
    UTILIZATION_KEY,
    Way,
    bit_error_rate,
)
from drover_agent.sources.nvml.found import (
    GPM_ALL,
    GPM_BUT_UTILIZATION,
    NVML_NAMES,
    TARGETS,
    Found,
    Target,
    Targets,
    Why,
)
from drover_agent.sources.nvml.gpm import Gpm
from drover_core.metrics.catalog import Absent

REFUSED_MS = 300_000  # what a GPU refused is asked again after this long: a driver or a mode may have changed

_Asked = tuple[Way, Read, tuple[Target, ...]]


@dataclass(slots=True, eq=False, repr=False)
class _Plan:
    """What is asked in a tick."""

    batch: FieldBatch | None
    fields: list[tuple[Way, int, Target]]  # of the batch, in its order, with the link's number
    of_gpu: int  # how many of these are of no link; they come first
    calls: list[_Asked]
    bare: list[Bare]  # all of these, to be called in a row; none where one of them is more than a function
    targets: Targets  # of the values that these bring: the batch's of no link, then the calls'
    answers: list[tuple[int, Raw]] | None = None  # of links, when they were last taken
    links: Found | None = None  # what that came to

    @property
    def ways(self) -> set[Way]:
        return {way for way, _, _ in self.fields} | {way for way, _, _ in self.calls}


class Metrics:
    """Asks one GPU. For one handle: after a loss or another session of NVML make a new one, as all may have changed."""

    def __init__(self, handle: Any, ids: Mapping[str, int], why: Why) -> None:
        """`ids`: the driver's number of each field it has. `why` may raise, which ends the read."""
        self._handle, self._ids, self._why = handle, ids, why
        self._counts: dict[str, dict[int, float]] = {}  # link field -> link -> its last count
        self._before: dict[str, float] = {}  # link field -> what links had counted that answered later than others
        self._gpm: Gpm | None = None
        self._gpm_why: Absent | None = None  # why GPM did not answer `ask`
        self._gpm_fails = False  # did not answer the last time; another program may hold its counters for long
        self._asked: _Plan | None = None  # by `ask`
        self._forget(0)

    def _forget(self, now_ms: int) -> None:
        """Ask everything again."""
        self._since_ms = now_ms
        self._refused: dict[Way, Absent] = {}
        self._plans: dict[int, _Plan] = {}  # by pace
        self._links = pynvml.NVML_NVLINK_MAX_LINKS
        self._no_gpm: Absent | None = None

    def forget(self) -> None:
        """Ask everything again at the next read: the GPU's mode has changed."""
        self._since_ms = -REFUSED_MS

    def read(self, found: Found, now_ms: int, *, pace_ms: int, profile: bool) -> None:
        """Put values and absences into `found`: of all that is asked as often as each `pace_ms`, 0 being each tick.

        Refused metrics are named in slower reads only.

        Without `profile`, what GPM would give is left alone: another reader has it.
        """
        if not 0 <= now_ms - self._since_ms < REFUSED_MS:
            self._forget(now_ms)
        self._ask(found, pace_ms)
        if profile:
            self._read_gpm(found)
        if pace_ms:
            self._report_refused(found, profile=profile)
        if profile:
            if self._no_gpm is not None and pace_ms:
                for name in GPM_BUT_UTILIZATION.names:
                    if name not in NVML_NAMES:
                        found.absent[name] = self._no_gpm
                self._ask_calls(found, self._made(way for way in PCIE_CALLS if way not in self._refused))
        elif self._gpm is not None:
            self._gpm.skip()

    # ---- a tick in which nothing is slow, refused or new: first all calls in a row, then what they brought

    def ask(self, now_ms: int, *, profile: bool) -> bool:
        """Make the calls of a tick, for `take`; False: `read` is needed, something was not answered or is to be
        planned."""
        plan = self._plans.get(0)
        if plan is None or not plan.bare or not 0 <= now_ms - self._since_ms < REFUSED_MS:
            return False
        gpm = self._gpm if profile else None
        if profile and self._no_gpm is None and (gpm is None or self._gpm_fails):
            return False
        if not self._ask_in_a_row(plan):
            return False
        self._gpm_why = None
        if gpm is None:
            if self._gpm is not None:
                self._gpm.skip()
        elif self._no_gpm is None and (code := gpm.ask()):
            self._gpm_fails = True
            try:
                self._gpm_why = self._why(code, "GPM")
            except (LostError, DriverGoneError):
                return False
        self._asked = plan
        return True

    def take(self, found: Found, *, profile: bool) -> None:
        """What `ask` brought. Makes no call: any thread may do it, also when NVML was closed meanwhile."""
        plan, gpm = self._asked, self._gpm
        assert plan is not None
        self._take_row(found, plan)
        if not profile or gpm is None or self._no_gpm is not None:
            return
        if self._gpm_why is not None:
            self._miss_gpm(found, self._gpm_why)
            return
        try:
            gpm.targets.put(found, gpm.answers(), self._why)
        except (LostError, DriverGoneError):  # the next tick's calls will say so too
            self._miss_gpm(found, Absent.ERROR)

    # ---- NVML

    def _ask_in_a_row(self, plan: _Plan) -> bool:
        """Make all calls of a plan, for `_take_row`. False: one of them failed or is more than a function, and all are
        to be asked one by one, until everything is asked again."""
        if not plan.bare:
            return False
        for function, arguments in plan.bare:
            if function(*arguments):
                plan.bare = []
                return False
        if plan.batch is not None and not plan.batch.good:
            plan.bare = []
            return False
        return True

    def _take_row(self, found: Found, plan: _Plan) -> None:
        raws = plan.batch.numbers() if plan.batch is not None else []
        for _, call, _ in plan.calls:
            raws += call.values()  # type: ignore[attr-defined]  # those of a bare plan are all of class Call
        found.put_all(plan.targets, raws)
        if plan.of_gpu < len(plan.fields):
            self._take_links(found, plan)

    def _ask(self, found: Found, pace_ms: int) -> None:
        plan = self._plans.get(pace_ms)
        if plan is None:
            plan = self._plans[pace_ms] = self._planned(pace_ms, frozenset())
        elif self._ask_in_a_row(plan):
            before = len(self._refused)
            self._take_row(found, plan)
            if len(self._refused) != before:  # no link answers any more
                self._plans.clear()
            return
        before = len(self._refused)
        self._ask_batch(found, plan)
        self._ask_calls(found, plan.calls)
        if len(self._refused) == before:
            return
        done: set[Way] = set()
        while len(self._refused) != before:
            before = len(self._refused)  # what was refused may be had in another way: ask those only
            done |= plan.ways
            self._plans.clear()
            plan = self._planned(pace_ms, done)
            self._ask_batch(found, plan)
            self._ask_calls(found, plan.calls)
        found.absent = {name: why for name, why in found.absent.items() if name not in found.values}

    def _planned(self, pace_ms: int, done: Set[Way]) -> _Plan:
        covered: set[str] = set()
        fields: list[tuple[Way, int, Target]] = []
        of_links: list[tuple[Way, int, Target]] = []
        calls: list[_Asked] = []
        for way in (*FIELDS, *CALLS):
            if way in self._refused or covered.issuperset(way.keys):
                continue
            if way.make is None and way.name not in self._ids:
                self._refused[way] = Absent.UNSUPPORTED
                continue
            if way in done or way.every_ms > pace_ms:
                covered.update(way.keys)
            elif way.make is None:
                covered.update(way.keys)
                target = TARGETS[way.keys[0]]
                if way.per_link:
                    of_links += [(way, link, target) for link in range(self._links)]
                else:
                    fields.append((way, 0, target))
            elif made := self._made([way]):
                covered.update(way.keys)
                calls += made
        of_gpu = len(fields)
        fields += of_links
        batch = FieldBatch([(self._ids[way.name], link) for way, link, _ in fields], of_gpu) if fields else None
        bare = [batch.bare(self._handle)] if batch else []
        bare += [read.bare(self._handle) for _, read, _ in calls if isinstance(read, Call)]
        whole = len(bare) == (batch is not None) + len(calls)
        targets = [*(target for _, _, target in fields[:of_gpu]), *(t for _, _, some in calls for t in some)]
        return _Plan(batch, fields, of_gpu, calls, bare if whole else [], Targets(targets))

    def _made(self, ways: Iterable[Way]) -> list[_Asked]:
        made = []
        for way in ways:
            try:
                if way.make is not None:
                    made.append((way, way.make(), tuple(TARGETS[key] for key in way.keys)))
            except pynvml.NVMLError as error:  # the library does not have it
                self._refused[way] = self._why(error.value, way.keys[0])
        return made

    def _ask_batch(self, found: Found, plan: _Plan) -> None:
        if plan.batch is None:
            return
        try:
            plan.batch.read(self._handle)
        except pynvml.NVMLError as error:
            why = self._why(error.value, "nvmlDeviceGetFieldValues")
            for way, _, _ in plan.fields:
                self._miss(found, way, why)
            return
        for (way, _, target), (code, value) in zip(plan.fields, plan.batch.values(), strict=False):
            if not code:
                found.put(target, value)
            elif code == pynvml.NVML_ERROR_INVALID_ARGUMENT:  # a field that came after this driver
                self._miss(found, way, Absent.UNSUPPORTED)
            else:
                self._miss(found, way, self._why(code, way.keys[0]))
        if plan.of_gpu < len(plan.fields):
            self._take_links(found, plan)

    def _take_links(self, found: Found, plan: _Plan) -> None:
        assert plan.batch is not None
        answers = plan.batch.link_values()
        if plan.links is None or answers is not plan.answers:
            plan.links, plan.answers = Found(), answers
            self._look_at_links(plan.links, plan, answers)
            if any(code and code != pynvml.NVML_ERROR_INVALID_ARGUMENT for code, _ in answers):
                plan.answers = None  # why they fail is to be looked at each time
        found.values |= plan.links.values
        found.absent |= plan.links.absent

    def _look_at_links(self, found: Found, plan: _Plan, answers: Sequence[tuple[int, Raw]]) -> None:
        links: dict[Way, dict[int, float]] = {}
        unlinked: dict[Way, dict[int, Absent]] = {}
        known_links = 0
        for (way, link, _), (code, value) in zip(plan.fields[plan.of_gpu :], answers, strict=True):
            key = way.keys[0]
            answered = links.setdefault(way, {})
            if code != pynvml.NVML_ERROR_INVALID_ARGUMENT:  # NVML's word for a link past the last
                known_links = max(known_links, link + 1)
                if code:
                    unlinked.setdefault(way, {})[link] = self._why(code, key)
                elif value is not None:
                    answered[link] = value
        for way, answered in links.items():
            self._put_links(found, way, answered, unlinked.get(way, {}))
        if 0 < known_links < self._links:
            self._links = known_links
            self._plans.clear()

    def _put_links(self, found: Found, way: Way, answered: Mapping[int, float], refused: Mapping[int, Absent]) -> None:
        """Counts are summed over links, the error rate is the worst of them.

        A link that stops answering keeps its last count in the sum: a dead link adds no errors, and a sum that fell
        would look like a reset of the counters. One that answers later than the others adds what it counts from then
        on, or its errors of long ago would look like new ones. Links that could not be asked just now are not down.
        """
        key = way.keys[0]
        unknown = [why for why in refused.values() if why is not Absent.UNSUPPORTED]
        if not answered or (unknown and key == STATE_KEY):
            self._miss(found, way, unknown[0] if unknown else Absent.UNSUPPORTED)
        elif key == BER_KEY:
            found.put(TARGETS[key], max(bit_error_rate(word) for word in answered.values()))
        elif key == STATE_KEY:
            found.put(TARGETS[key], sum(state == pynvml.NVML_FEATURE_ENABLED for state in answered.values()))
        else:
            counts = self._counts.setdefault(key, {})
            late = answered.keys() - counts.keys() if counts else ()
            self._before[key] = self._before.get(key, 0) + sum(answered[link] for link in late)
            counts.update(answered)
            found.put(TARGETS[key], sum(counts.values()) - self._before[key])

    def _ask_calls(self, found: Found, calls: Iterable[_Asked]) -> None:
        for way, read, targets in calls:
            try:
                values = read(self._handle)
            except pynvml.NVMLError as error:
                self._miss(found, way, self._why(error.value, way.keys[0]))
                continue
            for target, value in zip(targets, values, strict=True):
                found.put(target, value)

    def _miss(self, found: Found, way: Way, why: Absent) -> None:
        if why in FOR_GOOD:
            self._refused[way] = why
        for key in way.keys:
            if TARGETS[key].name not in found.values:
                found.absent[TARGETS[key].name] = why

    def _report_refused(self, found: Found, *, profile: bool) -> None:
        """Keys that no way is left for; `no-permission` says more than that an older way is not there either."""
        reasons: dict[str, Absent] = {}
        for way, why in self._refused.items():
            if way in PCIE_CALLS and not profile:
                continue
            for key in way.keys:
                if key == UTILIZATION_KEY and profile and self._gpm is not None and self._no_gpm is None:
                    continue  # GPM gives it, from its second sample on
                if reasons.get(key) is not Absent.NO_PERMISSION:
                    reasons[key] = why
        for key, why in reasons.items():
            name = TARGETS[key].name
            if name not in found.values:
                found.absent.setdefault(name, why)
                if found.absent[name] in FOR_GOOD:
                    found.absent[name] = why

    # ---- GPM

    def _read_gpm(self, found: Found) -> None:
        if self._no_gpm is not None:
            return
        try:
            targets = GPM_ALL if UTILIZATION in self._refused else GPM_BUT_UTILIZATION
            if self._gpm is None:
                self._gpm = Gpm(self._handle, targets)
            elif self._gpm.targets is not targets:
                self._gpm.choose(targets)
            answers = self._gpm.read()
        except pynvml.NVMLError as error:
            self._gpm_fails = True
            self._miss_gpm(found, self._why(error.value, "GPM"))
            return
        self._gpm_fails = False
        self._gpm.targets.put(found, answers, self._why)

    def _miss_gpm(self, found: Found, why: Absent) -> None:
        if why in FOR_GOOD:
            self._no_gpm = why
        else:
            found.rest((self._gpm.targets if self._gpm else GPM_BUT_UTILIZATION).names, why)

    def close(self) -> None:
        """Give back what GPM holds, while NVML is open."""
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None
