"""Rules: how each is checked. A check may cover several rules; it runs only if the rules that it depends on hold."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlane import _native
from memlane.native import Spec
from memlane.native.lowlevel import CSpec, Field, space_bounds
from memlane.testing.harness import FailureLog, GuardedBuffer, Harness, InitRejected, bits
from memlane.testing.report import Failure
from memlane.testing.trajectories import (
    NO_LIMIT,
    Actions,
    Difference,
    ReferenceRun,
    Trace,
    host_run,
    random_actions,
    rng_states,
)

ENVS = 8
_SHORT_LIMIT = 6  # a step limit with which episodes end often
_POISON = 0x5A


@dataclass(frozen=True)
class CheckContext:
    """The environment under test, and the size of the checks."""

    spec: Spec
    settings: list[float]
    seed: int
    steps: int
    failures: FailureLog

    @contextmanager
    def harness(self, num_envs: int = ENVS) -> Iterator[Harness]:
        """A harness after ``init``, closed at the end."""
        harness = self.raw_harness(num_envs)
        harness.init()
        try:
            yield harness
        finally:
            harness.close()

    def raw_harness(self, num_envs: int = ENVS) -> Harness:
        """A harness before ``init``, which the host calls."""
        return Harness(self.spec, num_envs, self.settings, self.failures)

    def actions(self, steps: int, num_envs: int = ENVS, seed: int = 0) -> Actions:
        return random_actions(self.spec, num_envs, steps, self.seed + seed)

    def rng_states(self, num_envs: int = ENVS, seed: int = 0) -> NDArray[np.uint64]:
        return rng_states(num_envs, self.seed + seed)

    def trace(self, random: NDArray[np.uint64], actions: Actions, limit: int | None = None) -> Trace:
        with self.harness(len(random)) as harness:
            return ReferenceRun(harness, actions, limit).run(random)

    def add_difference(self, rule: str, difference: Difference, expected: str, fix: str) -> None:
        """Add a failure; ``difference.here`` is the expected value."""
        self.failures.add(
            Failure(
                rule,
                f"{expected}: {difference.here}",
                difference.there,
                fix,
                f"{difference.kind}, event {difference.event} of this environment (resets and steps count)",
                difference.field,
                difference.env,
            )
        )


# ------------------------------------------------------------------------------------------------------ each call alone


def check_each_call(context: CheckContext) -> None:
    """Everything that can be checked after each single call."""
    try:
        with context.harness() as harness:
            run = ReferenceRun(harness, context.actions(context.steps))
            _add_checks(context, harness, run)
            run.run(context.rng_states())
            # Again, with many short episodes.
            run = ReferenceRun(harness, context.actions(min(context.steps, 60), seed=1), _SHORT_LIMIT)
            _add_checks(context, harness, run)
            run.run(context.rng_states(seed=1))
    except InitRejected as rejected:
        values = {setting.name: value for setting, value in zip(context.spec.settings, context.settings, strict=True)}
        context.failures.add(
            Failure(
                "init",
                f"NULL for the settings {values}",
                f"init returned: {rejected}",
                "let init accept at least the default values that the settings declare",
                f"init(0, {ENVS})",
            )
        )


def _add_checks(context: CheckContext, harness: Harness, run: ReferenceRun) -> None:
    """Check every call of ``run``."""
    spec, failures = context.spec, context.failures
    outputs = {name: harness.buffers[name].array for name in ("rewards", "terminated", "truncated")}
    before: dict[str, NDArray[Any]] = {}

    def before_reset() -> None:
        before.update({name: array.copy() for name, array in outputs.items()})

    def after_reset(begin: int, end: int) -> None:
        call = f"reset({begin}, {end})"
        for name, array in outputs.items():
            changed = np.flatnonzero((bits(array) != bits(before[name])).any(1))
            if len(changed):
                env = int(changed[0]) // harness.num_agents
                found = f"it changed from {before[name][changed[0]]} to {array[changed[0]]}"
                fix = "write it only in step: during reset it still has the result of the last step"
                failures.add(Failure("reset", "unchanged", found, fix, call, name, env, harness.step))
                array[...] = before[name]
        alive = harness.by_env(harness.alive)[begin:end]
        check_flags(call, "alive", harness.alive)
        if not alive.any(1).all():
            env = begin + int(np.flatnonzero(~alive.any(1))[0])
            fix = "clear `alive` only of agents that do not take part in the episode"
            failures.add(Failure("agents", "at least one agent alive", "none", fix, call, "alive", env, harness.step))
        rows = np.zeros(harness.num_envs, np.bool_)
        rows[begin:end] = True
        check_values(call, rows[:, None] & (harness.by_env(harness.alive) != 0))

    def after_step(alive: NDArray[np.bool_]) -> None:
        call = f"step(0, {harness.num_envs})"
        for name in ("terminated", "truncated"):
            check_flags(call, name, outputs[name])
        low, high = spec.reward_range
        rewards = harness.rewards
        wrong = np.flatnonzero(alive.ravel() & ~(np.isfinite(rewards) & (rewards >= low) & (rewards <= high)))
        if len(wrong):
            reward, env = rewards[wrong[0]], int(wrong[0]) // harness.num_agents
            fix = "correct the reward, or declare its range in reward_low and reward_high"
            expected = f"a number from {low} to {high}"
            failures.add(Failure("rewards", expected, str(reward), fix, call, "rewards", env, harness.step))
        check_values(call, alive)

    def check_flags(call: str, name: str, array: NDArray[Any]) -> None:
        wrong = np.flatnonzero(bits(array).max(1) > 1)
        if len(wrong):
            env, found = int(wrong[0]) // harness.num_agents, str(bits(array)[wrong[0]].max())
            fix = "write 0 or 1, for example with `x != 0`"
            failures.add(Failure("flags", "0 or 1", found, fix, call, name, env, harness.step))

    def check_values(call: str, alive: NDArray[np.bool_]) -> None:
        rows = np.flatnonzero(alive)
        for part, fields in (("observations", spec.observations), ("infos", spec.infos)):
            for name, field in zip(harness.names(part), fields, strict=True):
                array = harness.buffers[name].array
                if field.dtype == np.bool_:
                    check_flags(call, name, array)
                # Infos have no space in Gymnasium, so their bounds are not checked.
                wrong = _out_of_bounds(field, array[rows]) if part == "observations" else None
                if wrong is not None:
                    at, expected, found = wrong
                    env = int(rows[at]) // harness.num_agents
                    fix = "keep the value within its bounds, or declare wider ones; final observations count too"
                    failures.add(Failure("observations", expected, found, fix, call, name, env, harness.step))

    run.before_reset, run.after_reset, run.after_step = before_reset, after_reset, after_step


def _out_of_bounds(field: Field, rows: NDArray[Any]) -> tuple[int, str, str] | None:
    """The first row with an invalid value, a description of the valid values, and the invalid value."""
    if field.dtype == np.bool_:
        return None
    low, high = space_bounds(field.space)
    # "Not inside" rather than "outside": NaN is neither.
    wrong = ~((rows >= low) & (rows <= high))
    if field.dtype.kind == "f":
        wrong |= ~np.isfinite(rows)
    if not wrong.any():
        return None
    at = tuple(int(indices[0]) for indices in np.nonzero(wrong))
    element = f" at {list(at[1:])}" if len(at) > 1 else ""
    bounds = f"{np.broadcast_to(low, field.shape)[at[1:]]} to {np.broadcast_to(high, field.shape)[at[1:]]}"
    return at[0], f"a finite number from {bounds}{element}", str(rows[at])


# --------------------------------------------------------------------------------------------------------------- ranges


def check_ranges(context: CheckContext) -> None:
    """Calls for one environment and for a few in the middle, at several moments of a run."""
    with context.harness() as harness:
        owners = np.full(len(harness.state), -1)
        run = ReferenceRun(harness, context.actions(20))
        run.begin(context.rng_states())
        for moment in range(20):
            run.reset_ended()
            if moment in (0, 1, 2, 9, 19):
                for function in ("reset", "step"):
                    for begin, end in [*((env, env + 1) for env in range(ENVS)), (2, 5)]:
                        _call_alone(context, harness, run, function, begin, end, owners)
            run.step()


def _call_alone(
    context: CheckContext,
    harness: Harness,
    run: ReferenceRun,
    function: str,
    begin: int,
    end: int,
    owners: NDArray[np.int64],
) -> None:
    moment = harness.copy()
    call, mine = f"{function}({begin}, {end})", slice(begin, end)
    if function == "step":
        for array, actions in zip(harness.actions, run.actions, strict=True):
            array[:] = actions[harness.step + 1]
    else:
        harness.steps[mine] = 0
        harness.by_env(harness.alive)[mine] = 1
    # Outputs are filled with a value that the environment would not write.
    outputs = ["rewards", "terminated", "truncated", *harness.names("observations"), *harness.names("infos")]
    for name in outputs:
        array = harness.buffers[name].array
        kept = harness.by_env(array)[mine].copy()
        _fill(array)
        harness.by_env(array)[mine] = 0 if name in outputs[:3] else kept
    before = harness.copy()
    harness.call(function, begin, end)
    others = np.ones(harness.num_envs, np.bool_)
    others[mine] = False
    for name, array in harness.per_row().items():
        changed = (bits(harness.by_env(array)) != bits(harness.by_env(before[name]))).any(1) & others
        if changed.any():
            env = int(np.flatnonzero(changed)[0])
            fix = f"loop from begin to end - 1, and write only row i of {name} for environment i"
            found = f"the row of environment {env} was written"
            range_text = f"environments {begin} to {end - 1}" if end > begin + 1 else f"environment {begin}"
            expected = f"writes only to the rows of {range_text}"
            context.failures.add(Failure("ranges", expected, found, fix, call, name, env, harness.step))
    # Authors choose the layout of the state, but each byte must belong to one environment.
    changed_bytes = np.flatnonzero(harness.state != before["state"])
    owned = owners[changed_bytes]
    foreign = (owned >= 0) & ((owned < begin) | (owned >= end))
    if foreign.any():
        byte, env = int(changed_bytes[foreign][0]), int(owned[foreign][0])
        fix = "keep the data of environment i in its own part of the state, and share nothing between environments"
        found = f"byte {byte} changed, which calls for environment {env} alone change too"
        expected = "changes only in bytes of the state that belong to these environments"
        context.failures.add(Failure("ranges", expected, found, fix, call, "state", begin, harness.step))
    if end == begin + 1:
        owners[changed_bytes[owned < 0]] = begin
    harness.restore(moment)


# ------------------------------------------------------------------------------------------------------ reproducibility


def check_determinism(context: CheckContext) -> None:
    actions, random = context.actions(context.steps), context.rng_states()
    first = context.trace(random, actions)
    with context.harness() as harness, context.harness(3) as other_envs:
        other = ReferenceRun(other_envs, context.actions(context.steps, 3, seed=2), _SHORT_LIMIT)
        other.begin(context.rng_states(3, seed=2))

        def between() -> None:
            other.reset_ended()
            other.step()

        again = ReferenceRun(harness, actions).run(random, between)
    if (difference := first.difference(again)) is not None:
        fix = (
            "keep all data in `state`, none in static or global variables; draw random numbers from random[i] with "
            "memlane_random, not from rand(), the time or addresses; initialise every variable before it is read"
        )
        context.add_difference("determinism", difference, "the same as in the first run", fix)


def check_clean_reset(context: CheckContext) -> None:
    """After a reset in used buffers filled with garbage, episodes are the same as in new environments."""
    actions, random = context.actions(40), context.rng_states(seed=3)
    new = context.trace(random, actions)
    with context.harness() as harness:
        earlier = ReferenceRun(harness, context.actions(40, seed=4))
        earlier.begin(context.rng_states(seed=4))
        for _ in range(earlier.steps):
            earlier.reset_ended()
            earlier.step()
        _poison(harness)
        again = ReferenceRun(harness, actions).run(random)
    _compare_with_new(context, new, again, "clean_reset")


def _poison(harness: Harness) -> None:
    for array in (*harness.observations, *harness.infos):
        _fill(array)


def _fill(array: NDArray[Any]) -> None:
    array.reshape(-1).view(np.uint8)[...] = _POISON


def _compare_with_new(context: CheckContext, new: Trace, again: Trace, rule: str) -> None:
    is_info = {name for name in new.columns if name.startswith("infos[")}
    if (difference := new.difference(again, columns=lambda name: name not in is_info)) is not None:
        fix = "let reset write every part of the state that step reads, and the whole observation"
        context.add_difference(rule, difference, "the same as in new environments with the same RNG state", fix)
    elif (difference := new.difference(again, columns=lambda name: name in is_info)) is not None:
        fix = f"write {difference.field} in reset too"
        context.add_difference("infos", difference, "the same as in new environments", fix)


def check_random(context: CheckContext) -> None:
    actions, random = context.actions(12), context.rng_states()
    reference = context.trace(random, actions)
    for changed in range(ENVS):
        other = random.copy()
        other[changed] ^= np.uint64(0x0123456789ABCDEF)
        pairs = [(env, env) for env in range(ENVS) if env != changed]
        if (difference := reference.difference(context.trace(other, actions), pairs)) is not None:
            fix = f"draw from random[i] for environment i; here random[{changed}] was changed"
            context.add_difference("random", difference, f"no effect of a change of random[{changed}]", fix)
            return


def check_num_envs(context: CheckContext) -> None:
    envs, steps = 64, 25
    actions, random = context.actions(steps, envs), context.rng_states(envs)
    together = context.trace(random, actions, 10)
    agents = context.spec.num_agents
    for env in (0, 3, envs - 1):
        own = [values[:, env * agents : (env + 1) * agents] for values in actions]
        alone = context.trace(random[env : env + 1], own, 10)
        if (difference := alone.difference(together, [(0, env)])) is not None:
            fix = "use i and num_envs only to find rows, and no row of another environment"
            expected = f"the same among {envs} environments as alone"
            context.add_difference("num_envs", dataclasses.replace(difference, env=env), expected, fix)
            return


# ----------------------------------------------------------------------------------------------------------- the host


def check_autoreset(context: CheckContext) -> None:
    for limit, steps in ((_SHORT_LIMIT, 40), (context.spec.max_episode_steps or NO_LIMIT, min(context.steps, 200))):
        actions, random = context.actions(steps), context.rng_states()
        reference = context.trace(random, actions, limit)
        for name in ("DISABLED", "SAME_STEP", "NEXT_STEP"):
            mode = getattr(_native, f"AUTORESET_{name}")
            hosted = host_run(context.raw_harness(), actions, random, mode, limit)
            if (difference := reference.difference(hosted)) is None:
                continue
            fix = "let reset depend on the RNG state alone, and write only the rows of its environments"
            if CSpec.from_address(context.spec.address).steps_past_end:
                fix = (
                    "with steps_past_end = 1 an environment is stepped once more after its end, and a random number "
                    "that it draws there changes the next episode. Draw none after the end, or set steps_past_end = 0"
                )
            context.add_difference("autoreset", difference, f"the same episodes with AutoresetMode.{name}", fix)


def check_threads(context: CheckContext) -> None:
    envs, steps = 333, 20  # not a multiple of the block size, and more than a block for each thread
    actions, random = context.actions(steps, envs), context.rng_states(envs)
    mode = _native.AUTORESET_NEXT_STEP
    single = host_run(context.raw_harness(envs), actions, random, mode, 7, 1)
    for threads in (2, 3):
        several = host_run(context.raw_harness(envs), actions, random, mode, 7, threads)
        if (difference := single.difference(several)) is not None:
            fix = (
                "calls for other ranges run at the same time: use no static or global variables, no shared part of the "
                "state, and no function of the C library with hidden state (rand, strtok)"
            )
            context.add_difference("threads", difference, f"the same on {threads} threads as on 1", fix)
            return


# ------------------------------------------------------------------------------------------------------ optional parts


def check_past_end(context: CheckContext) -> None:
    """No environment is reset: steps after the end of some episodes must not affect the others."""
    steps = context.steps
    limit = min(context.spec.max_episode_steps or NO_LIMIT, max(steps // 2, 1))
    actions, random = context.actions(steps), context.rng_states()
    with context.harness() as harness:
        reference = ReferenceRun(harness, actions, limit)
        reference.begin(random)
        running = np.ones(ENVS, np.bool_)
        for _ in range(steps):
            if not running.any():
                break
            reference.step(running)
            running &= harness.ended == 0
    with context.harness() as harness:
        past = ReferenceRun(harness, actions, limit)
        past.begin(random)
        for _ in range(steps):
            past.step()
        if (difference := reference.trace.difference(past.trace)) is not None:
            fix = "a step after the end may write any values, but only into the rows of its own environment"
            context.add_difference("past_end", difference, "the same as without steps after the end", fix)
        _poison(harness)
        again = ReferenceRun(harness, actions).run(random)
    _compare_with_new(context, context.trace(random, actions), again, "past_end")


def check_render(context: CheckContext) -> None:
    assert context.spec.render_size is not None
    width, height = context.spec.render_size
    with context.harness() as harness:
        run = ReferenceRun(harness, context.actions(30), 10)
        run.begin(context.rng_states())
        for moment in range(30):
            if moment in (0, 1, 9, 10, 29):
                for env in (0, 3, ENVS - 1):
                    _check_image(context, harness, env, height, width)
            run.reset_ended()
            run.step()


def _check_image(context: CheckContext, harness: Harness, env: int, height: int, width: int) -> None:
    call = f"render({env})"
    before, images = harness.copy(), []

    def fail(field: str, expected: str, found: str, fix: str) -> None:
        context.failures.add(Failure("render", expected, found, fix, call, field, env, harness.step))

    for _ in range(2):
        image = GuardedBuffer(np.uint8, (height, width, 3), width * 3)
        rgb = ctypes.cast(image.array.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
        with harness.guarded(call):
            harness.raw.render(ctypes.byref(harness.envs), env, rgb)
        images.append(image.array)
        if (found := image.check_guards()) is not None:
            fix = f"the image has {height} rows of {width} pixels of 3 bytes; skip pixels outside of it"
            fail("the image", "no byte outside the image changed", found, fix)
    for name, buffer in harness.buffers.items():
        if buffer.array.tobytes() != before[name].tobytes():
            fail(name, "unchanged", "it was written", "write only the image; copy what you need to change")
            harness.restore(before)
    if not np.array_equal(images[0], images[1]):
        fail("the image", "the same image twice", "two different images", "let the image depend on the state alone")


def check_close(context: CheckContext) -> None:
    for used in (False, True, False):
        with context.harness() as harness:
            if used:
                ReferenceRun(harness, context.actions(5)).run(context.rng_states())
    actions, random = context.actions(20), context.rng_states()
    before = context.trace(random, actions)
    # Two sets of environments at once: closing one must not affect the other.
    with context.harness() as harness:
        with context.harness():
            pass
        after = ReferenceRun(harness, actions).run(random)
    if (difference := before.difference(after)) is not None:
        fix = "release in close only what init allocated for these environments"
        context.add_difference("close", difference, "the same as before other environments were closed", fix)


# ----------------------------------------------------------------------------------------------------------- all checks


@dataclass(frozen=True)
class Check:
    """A function that checks some rules."""

    rules: tuple[str, ...]
    run: Callable[[CheckContext], None]
    depends_on: tuple[str, ...] = ("init", "no_crash")
    """Rules whose violation would make this check report the same mistake again."""
    not_applicable: Callable[[Spec], str | None] = lambda _: None
    """Returns why the check does not apply to an environment, or None."""


def _no_render(spec: Spec) -> str | None:
    return None if spec.render_size else "because the environment has no render function"


def _no_steps_past_end(spec: Spec) -> str | None:
    declared = CSpec.from_address(spec.address).steps_past_end
    return None if declared else "because the environment does not declare steps_past_end"


_EACH_CALL = (
    *("init", "no_crash", "buffer_bounds", "read_only", "reset"),
    *("observations", "rewards", "flags", "agents"),
)
_DETERMINISTIC = ("init", "no_crash", "determinism")
CHECKS = (
    Check(_EACH_CALL, check_each_call, ()),
    Check(("ranges",), check_ranges),
    Check(("determinism",), check_determinism),
    Check(("clean_reset", "infos"), check_clean_reset, _DETERMINISTIC),
    Check(("random",), check_random, _DETERMINISTIC),
    Check(("num_envs",), check_num_envs, _DETERMINISTIC),
    Check(("autoreset",), check_autoreset, (*_DETERMINISTIC, "clean_reset", "infos", "reset")),
    Check(("threads",), check_threads, _DETERMINISTIC),
    Check(("past_end",), check_past_end, (*_DETERMINISTIC, "clean_reset", "infos"), _no_steps_past_end),
    Check(("render",), check_render, ("init", "no_crash"), _no_render),
    Check(("close",), check_close, _DETERMINISTIC),
)
