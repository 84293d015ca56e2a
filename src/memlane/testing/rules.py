"""Rules: how each is checked. A check may look after several rules; it runs only if those that it builds on held."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from memlane.native import Spec
from memlane.native.spec import CSpec, FieldOf
from memlane.testing.bench import DISABLED, NEXT_STEP, SAME_STEP, Bench, Buffer, Findings, Refused, bits
from memlane.testing.report import Failure
from memlane.testing.walk import (
    NO_LIMIT,
    Difference,
    Trace,
    Walk,
    host_walk,
    make_tape,
    words,
)

ENVS = 8
_SOON = 6  # a limit of steps under which episodes end often
_POISON = 0x5A


@dataclass(frozen=True)
class Case:
    """What is checked, and how much."""

    spec: Spec
    settings: list[float]
    seed: int
    steps: int
    findings: Findings

    @contextmanager
    def bench(self, num_envs: int = ENVS) -> Iterator[Bench]:
        bench = Bench(self.spec, num_envs, self.settings, self.findings)
        bench.init()
        try:
            yield bench
        finally:
            bench.close()

    def raw_bench(self, num_envs: int = ENVS) -> Bench:
        """Without ``init``: it is for the host to call."""
        return Bench(self.spec, num_envs, self.settings, self.findings)

    def tape(self, steps: int, num_envs: int = ENVS, seed: int = 0) -> list[NDArray[Any]]:
        return make_tape(self.spec, num_envs, steps, self.seed + seed)

    def words(self, num_envs: int = ENVS, seed: int = 0) -> NDArray[np.uint64]:
        return words(num_envs, self.seed + seed)

    def trace(self, random: NDArray[np.uint64], tape: list[NDArray[Any]], limit: int | None = None) -> Trace:
        with self.bench(len(random)) as bench:
            return Walk(bench, tape, limit).run(random)

    def differ(self, rule: str, difference: Difference, expected: str, do: str) -> None:
        """``here`` is what was expected."""
        at = difference
        self.findings.add(
            Failure(
                rule,
                f"{expected}: {at.here}",
                at.there,
                do,
                f"its {at.kind}, event {at.event} of this environment (resets count too)",
                at.field,
                at.env,
            )
        )


# ---------------------------------------------------------------------------------------------------- one plain episode


def check_plainly(case: Case) -> None:
    """Everything that can be seen after each call."""
    try:
        with case.bench() as bench:
            _watched(case, bench, Walk(bench, case.tape(case.steps))).run(case.words())
            # Again, with many episodes.
            soon = _watched(case, bench, Walk(bench, case.tape(min(case.steps, 60), seed=1), _SOON))
            soon.run(case.words(seed=1))
    except Refused as refused:
        given = {setting.name: value for setting, value in zip(case.spec.settings, case.settings, strict=True)}
        case.findings.add(
            Failure(
                "init",
                f"NULL for the settings {given}",
                f"init says: {refused}",
                "let init accept the values that the settings declare as their own",
                f"init(0, {ENVS})",
            )
        )


def _watched(case: Case, bench: Bench, walk: Walk) -> Walk:
    spec, findings = case.spec, case.findings
    quiet = {name: bench.buffers[name].array for name in ("rewards", "terminated", "truncated")}
    before: dict[str, NDArray[Any]] = {}

    def before_reset() -> None:
        before.update({name: array.copy() for name, array in quiet.items()})

    def after_reset(begin: int, end: int) -> None:
        call = f"reset({begin}, {end})"
        for name, array in quiet.items():
            changed = np.flatnonzero((bits(array) != bits(before[name])).any(1))
            if len(changed):
                env = int(changed[0]) // bench.num_agents
                found = f"it was {before[name][changed[0]]} and is {array[changed[0]]}"
                cure = "leave it to step: here it is still what the last episode ended with"
                findings.add(Failure("reset", "unchanged", found, cure, call, name, env, bench.step))
                array[...] = before[name]
        alive = bench.by_env(bench.alive)[begin:end]
        look_at_flags(call, "alive", bench.alive)
        if not alive.any(1).all():
            env = begin + int(np.flatnonzero(~alive.any(1))[0])
            cure = "clear `alive` only of agents that do not take part"
            findings.add(Failure("agents", "somebody alive", "nobody", cure, call, "alive", env, bench.step))
        rows = np.zeros(bench.num_envs, np.bool_)
        rows[begin:end] = True
        look_at_values(call, rows[:, None] & (bench.by_env(bench.alive) != 0))

    def after_step(alive: NDArray[np.bool_]) -> None:
        call = f"step(0, {bench.num_envs})"
        for name in ("terminated", "truncated"):
            look_at_flags(call, name, quiet[name])
        low, high = spec.reward_range
        rows = alive.ravel()
        wrong = np.flatnonzero(rows & ~(np.isfinite(bench.rewards) & (bench.rewards >= low) & (bench.rewards <= high)))
        if len(wrong):
            reward, env = bench.rewards[wrong[0]], int(wrong[0]) // bench.num_agents
            cure = "declare the range that rewards have, or correct the reward"
            expected = f"a number from {low} to {high}"
            findings.add(Failure("rewards", expected, str(reward), cure, call, "rewards", env, bench.step))
        look_at_values(call, alive)

    def look_at_flags(call: str, name: str, array: NDArray[Any]) -> None:
        wrong = np.flatnonzero(bits(array).max(1) > 1)
        if len(wrong):
            env, found = int(wrong[0]) // bench.num_agents, str(bits(array)[wrong[0]].max())
            cure = "write 0 or 1: `x != 0` makes one of them"
            findings.add(Failure("flags", "0 or 1", found, cure, call, name, env, bench.step))

    def look_at_values(call: str, alive: NDArray[np.bool_]) -> None:
        rows = np.flatnonzero(alive)
        for part, fields in (("observations", spec.observations), ("infos", spec.infos)):
            for name, one in zip(bench.names(part), fields, strict=True):
                array = bench.buffers[name].array
                if one.dtype == np.bool_:
                    look_at_flags(call, name, array)
                # Infos have no space that anybody is shown, so their bounds are not asked for.
                wrong = _out_of_bounds(one, array[rows]) if part == "observations" else None
                if wrong is not None:
                    at, expected, found = wrong
                    env = int(rows[at]) // bench.num_agents
                    cure = "declare bounds that hold, or keep to them; the last one of an episode counts too"
                    findings.add(Failure("observations", expected, found, cure, call, name, env, bench.step))

    walk.before_reset, walk.after_reset, walk.after_step = before_reset, after_reset, after_step
    return walk


def _out_of_bounds(one: FieldOf, rows: NDArray[Any]) -> tuple[int, str, str] | None:
    """The first row with a number that must not be, what was expected and what it is."""
    if one.dtype == np.bool_:
        return None
    if isinstance(one.space, Box):
        low, high = one.space.low, one.space.high
    elif isinstance(one.space, Discrete):
        low, high = np.asarray(one.space.start), np.asarray(one.space.start + one.space.n - 1)
    else:
        low, high = one.space.start, one.space.start + one.space.nvec - 1  # type: ignore[attr-defined]
    # Not inside, rather than outside: NaN is neither.
    wrong = ~((rows >= low) & (rows <= high))
    if one.dtype.kind == "f":
        wrong |= ~np.isfinite(rows)
    if not wrong.any():
        return None
    at = tuple(int(found[0]) for found in np.nonzero(wrong))
    element = f" at {list(at[1:])}" if len(at) > 1 else ""
    bounds = f"{np.broadcast_to(low, one.shape)[at[1:]]} to {np.broadcast_to(high, one.shape)[at[1:]]}"
    return at[0], f"a finite number from {bounds}{element}", str(rows[at])


# --------------------------------------------------------------------------------------------------------------- ranges


def check_ranges(case: Case) -> None:
    """One environment alone, and a few in the middle, from several moments of a walk."""
    with case.bench() as bench:
        owners = np.full(len(bench.state), -1)
        walk = Walk(bench, case.tape(20))
        walk.begin(case.words())
        for moment in range(20):
            walk.reset_ended()
            if moment in (0, 1, 2, 9, 19):
                for function in ("reset", "step"):
                    for begin, end in [*((env, env + 1) for env in range(ENVS)), (2, 5)]:
                        _call_alone(case, bench, walk, function, begin, end, owners)
            walk.step()


def _call_alone(
    case: Case, bench: Bench, walk: Walk, function: str, begin: int, end: int, owners: NDArray[np.int64]
) -> None:
    moment = bench.copy()
    call, mine = f"{function}({begin}, {end})", slice(begin, end)
    if function == "step":
        for array, actions in zip(bench.actions, walk.tape, strict=True):
            array[:] = actions[bench.step + 1]
    else:
        bench.steps[mine] = 0
        bench.by_env(bench.alive)[mine] = 1
    # What the environment only writes is filled with something that it would not write.
    outputs = ["rewards", "terminated", "truncated", *bench.names("observations"), *bench.names("infos")]
    for name in outputs:
        array = bench.buffers[name].array
        kept = bench.by_env(array)[mine].copy()
        _fill(array)
        bench.by_env(array)[mine] = 0 if name in outputs[:3] else kept
    before = bench.copy()
    bench.call(function, begin, end)
    others = np.ones(bench.num_envs, np.bool_)
    others[mine] = False
    for name, array in bench.per_row().items():
        changed = (bits(bench.by_env(array)) != bits(bench.by_env(before[name]))).any(1) & others
        if changed.any():
            env = int(np.flatnonzero(changed)[0])
            cure = f"let the loop run from begin to end - 1, and write to row i of {name} only"
            found = f"row of environment {env} was written"
            expected = f"only environments {begin} to {end - 1} changed" if end > begin + 1 else f"only {begin} changed"
            case.findings.add(Failure("ranges", expected, found, cure, call, name, env, bench.step))
    # How the state is laid out is the author's affair; but a byte belongs to one environment.
    changed_bytes = np.flatnonzero(bench.state != before["state"])
    owned = owners[changed_bytes]
    foreign = (owned >= 0) & ((owned < begin) | (owned >= end))
    if foreign.any():
        byte, env = int(changed_bytes[foreign][0]), int(owned[foreign][0])
        cure = "keep what belongs to environment i in its own part of the state, and nothing shared"
        found = f"byte {byte} changed, which also changes in calls for environment {env} alone"
        expected = "bytes of the state that no other environment changes"
        case.findings.add(Failure("ranges", expected, found, cure, call, "state", begin, bench.step))
    if end == begin + 1:
        owners[changed_bytes[owned < 0]] = begin
    bench.restore(moment)


# -------------------------------------------------------------------------------------------------- the same once more


def check_determinism(case: Case) -> None:
    tape, random = case.tape(case.steps), case.words()
    once = case.trace(random, tape)
    with case.bench() as bench, case.bench(3) as distraction:
        other = Walk(distraction, case.tape(case.steps, 3, seed=2), _SOON)
        other.begin(case.words(3, seed=2))

        def between() -> None:
            other.reset_ended()
            other.step()

        again = Walk(bench, tape).run(random, between)
    if (difference := once.difference(again)) is not None:
        cure = (
            "keep everything in `state`, nothing in static or global variables; draw random numbers with "
            "memlane_random from random[i], not with rand(), time or addresses; set every variable before it is read"
        )
        case.differ("determinism", difference, "the same as the first time", cure)


def check_fresh(case: Case) -> None:
    """Episodes after a reset, in buffers that were used and filled with nonsense, are those of new environments."""
    tape, random = case.tape(40), case.words(seed=3)
    new = case.trace(random, tape)
    with case.bench() as bench:
        used = Walk(bench, case.tape(40, seed=4))
        used.begin(case.words(seed=4))
        for _ in range(used.steps):
            used.reset_ended()
            used.step()
        _poison(bench)
        again = Walk(bench, tape).run(random)
    _compare_with_fresh(case, new, again, "fresh")


def _poison(bench: Bench) -> None:
    for array in (*bench.observations, *bench.infos):
        _fill(array)


def _fill(array: NDArray[Any]) -> None:
    array.reshape(-1).view(np.uint8)[...] = _POISON


def _compare_with_fresh(case: Case, new: Trace, again: Trace, rule: str) -> None:
    is_info = {name for name in new.columns if name.startswith("infos[")}
    if (difference := new.difference(again, columns=lambda name: name not in is_info)) is not None:
        cure = "let reset write every number of the state that step reads, and every number of the observation"
        case.differ(rule, difference, "what new environments with the same random word show", cure)
    elif (difference := new.difference(again, columns=lambda name: name in is_info)) is not None:
        case.differ("infos", difference, "what new environments show", f"write {difference.field} in reset, too")


def check_random(case: Case) -> None:
    tape, random = case.tape(12), case.words()
    as_it_is = case.trace(random, tape)
    for special in range(ENVS):
        other = random.copy()
        other[special] ^= np.uint64(0x0123456789ABCDEF)
        pairs = [(env, env) for env in range(ENVS) if env != special]
        if (difference := as_it_is.difference(case.trace(other, tape), pairs)) is not None:
            cure = f"environment i draws from random[i]; here the word of environment {special} was another one"
            case.differ("random", difference, "the same as with the other word", cure)
            return


def check_num_envs(case: Case) -> None:
    many, steps = 64, 25
    tape, random = case.tape(steps, many), case.words(many)
    together = case.trace(random, tape, 10)
    agents = case.spec.num_agents
    for env in (0, 3, many - 1):
        own = [actions[:, env * agents : (env + 1) * agents] for actions in tape]
        alone = case.trace(random[env : env + 1], own, 10)
        if (difference := alone.difference(together, [(0, env)])) is not None:
            cure = "use neither i nor num_envs for anything but finding its rows, and no row of another environment"
            wrong = Difference(
                difference.event, env, difference.kind, difference.field, difference.here, difference.there
            )
            case.differ("num_envs", wrong, f"the same alone as among {many}", cure)
            return


# ----------------------------------------------------------------------------------------------------------- the host


def check_autoreset(case: Case) -> None:
    for limit, steps in ((_SOON, 40), (case.spec.max_episode_steps or NO_LIMIT, min(case.steps, 200))):
        tape, random = case.tape(steps), case.words()
        plain = case.trace(random, tape, limit)
        for mode, name in ((DISABLED, "DISABLED"), (SAME_STEP, "SAME_STEP"), (NEXT_STEP, "NEXT_STEP")):
            hosted = host_walk(case.raw_bench(), tape, random, mode, limit)
            if (difference := plain.difference(hosted)) is None:
                continue
            cure = "let reset depend on the random word alone, and leave alone what is not its own"
            if CSpec.from_address(case.spec.address).steps_past_end:
                cure = (
                    "with steps_past_end = 1 an environment is stepped once more after its end: a random number that "
                    "it draws there is missing later. Draw none after the end, or set steps_past_end = 0"
                )
            case.differ("autoreset", difference, f"with AutoresetMode.{name} the same episodes", cure)


def check_threads(case: Case) -> None:
    envs, steps = 333, 20  # no multiple of anything, and more than a block for each thread
    tape, random = case.tape(steps, envs), case.words(envs)
    alone = host_walk(case.raw_bench(envs), tape, random, NEXT_STEP, 7, 1)
    for threads in (2, 3):
        several = host_walk(case.raw_bench(envs), tape, random, NEXT_STEP, 7, threads)
        if (difference := alone.difference(several)) is not None:
            cure = (
                "calls for other ranges run at the same time: use no static or global variables, no shared part of the "
                "state, and no function of the C library that keeps something (rand, strtok)"
            )
            case.differ("threads", difference, f"the same on 1 thread as on {threads}", cure)
            return


# ----------------------------------------------------------------------------------------------- some have it, some not


def check_past_end(case: Case) -> None:
    """Nobody is reset. Who still runs is not to notice that others are stepped after their end."""
    steps = case.steps
    limit = min(case.spec.max_episode_steps or NO_LIMIT, max(steps // 2, 1))
    tape, random = case.tape(steps), case.words()
    with case.bench() as bench:
        apart = Walk(bench, tape, limit)
        apart.begin(random)
        running = np.ones(ENVS, np.bool_)
        for _ in range(steps):
            if not running.any():
                break
            apart.step(running)
            running &= bench.ended == 0
    with case.bench() as bench:
        past = Walk(bench, tape, limit)
        past.begin(random)
        for _ in range(steps):
            past.step()
        if (difference := apart.trace.difference(past.trace)) is not None:
            cure = "what is stepped after its end may write nonsense, but only into its own rows"
            case.differ("past_end", difference, "the same as when nobody is stepped after its end", cure)
        _poison(bench)
        again = Walk(bench, tape).run(random)
    _compare_with_fresh(case, case.trace(random, tape), again, "past_end")


def check_render(case: Case) -> None:
    assert case.spec.render_size is not None
    width, height = case.spec.render_size
    with case.bench() as bench:
        walk = Walk(bench, case.tape(30), 10)
        walk.begin(case.words())
        for moment in range(30):
            if moment in (0, 1, 9, 10, 29):
                for env in (0, 3, ENVS - 1):
                    _draw(case, bench, env, height, width)
            walk.reset_ended()
            walk.step()


def _draw(case: Case, bench: Bench, env: int, height: int, width: int) -> None:
    call = f"render({env})"
    before, pictures = bench.copy(), []
    for _ in range(2):
        picture = Buffer(np.uint8, (height, width, 3), width * 3)
        rgb = ctypes.cast(picture.array.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
        with bench.guarded(call):
            bench.raw.render(ctypes.byref(bench.envs), env, rgb)
        pictures.append(picture.array)
        if (harm := picture.harm()) is not None:
            cure = f"the picture has {height} rows of {width} points of 3 bytes; leave out what lies outside"
            expected = "no byte outside the picture changed"
            case.findings.add(Failure("render", expected, harm, cure, call, "the picture", env, bench.step))
    for name, buffer in bench.buffers.items():
        if buffer.array.tobytes() != before[name].tobytes():
            cure = "draw from copies of what is needed; nothing but the picture may change"
            case.findings.add(Failure("render", "unchanged", "it was written", cure, call, name, env, bench.step))
            bench.restore(before)
    if not np.array_equal(pictures[0], pictures[1]):
        cure = "a picture depends on the state and on nothing else"
        expected = "the same picture twice"
        case.findings.add(Failure("render", expected, "two pictures", cure, call, "the picture", env, bench.step))


def check_close(case: Case) -> None:
    for used in (False, True, False):
        with case.bench() as bench:
            if used:
                Walk(bench, case.tape(5)).run(case.words())
    tape, random = case.tape(20), case.words()
    before = case.trace(random, tape)
    # Two lots at once: the end of one must not be the end of the other.
    with case.bench() as bench:
        with case.bench():
            pass
        after = Walk(bench, tape).run(random)
    if (difference := before.difference(after)) is not None:
        cure = "close may give back only what init took for these environments"
        case.differ("close", difference, "the same as before others were closed", cure)


# ---------------------------------------------------------------------------------------------------------------- all


@dataclass(frozen=True)
class Check:
    rules: tuple[str, ...]
    run: Callable[[Case], None]
    needs: tuple[str, ...] = ("init", "runs")
    """Rules without which this one would only tell of the same mistake again."""
    pointless: Callable[[Spec], str | None] = lambda _: None
    """Why there is nothing to check."""


def _no_picture(spec: Spec) -> str | None:
    return None if spec.render_size else "it has no picture"


def _not_past_end(spec: Spec) -> str | None:
    return None if CSpec.from_address(spec.address).steps_past_end else "it does not declare steps_past_end"


_SAME = ("init", "runs", "determinism")
CHECKS = (
    Check(
        ("init", "runs", "guards", "given", "reset", "observations", "rewards", "flags", "agents"), check_plainly, ()
    ),
    Check(("ranges",), check_ranges),
    Check(("determinism",), check_determinism),
    Check(("fresh", "infos"), check_fresh, _SAME),
    Check(("random",), check_random, _SAME),
    Check(("num_envs",), check_num_envs, _SAME),
    Check(("autoreset",), check_autoreset, (*_SAME, "fresh", "infos", "reset")),
    Check(("threads",), check_threads, _SAME),
    Check(("past_end",), check_past_end, (*_SAME, "fresh", "infos"), _not_past_end),
    Check(("render",), check_render, ("init", "runs"), _no_picture),
    Check(("close",), check_close, _SAME),
)
