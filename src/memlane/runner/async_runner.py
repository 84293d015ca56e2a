"""AsyncRunner: the base class of algorithms whose collectors run beside the learner."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from memlane.core import Layout, SegmentClosed
from memlane.core.arguments import as_count, check_timeout
from memlane.core.fork_guard import ForkGuard
from memlane.core.layout import FieldSpec
from memlane.core.suggestions import describe_unknown, did_you_mean
from memlane.lanes.lane import as_layout
from memlane.lanes.ring import Ring
from memlane.lanes.tensors import layout_of
from memlane.lanes.weights import Weights
from memlane.runner.memory_budget import MemoryBudget
from memlane.runner.process_collectors import ProcessCollectors, RestartPolicy
from memlane.runner.protocols import Collect, Event, TakenSlot, Transport
from memlane.runner.thread_collectors import ThreadCollectors

SETTINGS: dict[str, type] = {
    "collectors": int, "rollouts_per_update": int, "max_lag": int, "deterministic": bool, "in_process": bool,
    "max_restarts": int, "restart_window": float, "min_collectors": int, "rollout_timeout": float,
}  # fmt: skip
"""Keys of ``rl_cfg`` that the runner reads, with their types; ``AsyncRunner`` explains them."""

SYNONYMS = {
    "num_collectors": "collectors", "n_collectors": "collectors", "num_workers": "collectors",
    "n_workers": "collectors", "num_actors": "collectors", "num_rollout_workers": "collectors",
    "num_env_runners": "collectors", "max_policy_lag": "max_lag", "max_staleness": "max_lag",
    "torch_deterministic": "deterministic", "threads": "in_process", "timeout": "rollout_timeout",
}  # fmt: skip
"""Names of other libraries for the runner's settings, for error messages."""

SIM_BACKENDS = ("native", "gymnasium", "mujoco")

_open: weakref.WeakSet[AsyncRunner] = weakref.WeakSet()


def check_settings(
    rl_cfg: Collection[str], algorithm_settings: Collection[str], synonyms: Mapping[str, str] | None = None
) -> None:
    """Raise ``TypeError`` if ``rl_cfg`` has keys that are neither the runner's nor among ``algorithm_settings``.

    ``synonyms`` maps names that users of other libraries type to settings of the algorithm.
    """
    known = {*SETTINGS, *algorithm_settings}
    all_synonyms = {**SYNONYMS, **(synonyms or {})}
    if unknown := set(rl_cfg) - known:
        raise TypeError(
            describe_unknown("rl_cfg keys", unknown, known, lambda name: did_you_mean(name, known, all_synonyms))
        )


def _warn_of_misspelt_settings(rl_cfg: Collection[str]) -> None:
    """Warn of keys that look like settings of the runner, where any key may be the algorithm's."""
    for name in rl_cfg:
        if name not in SETTINGS and difflib.get_close_matches(name, SETTINGS, 1, 0.8):
            warnings.warn(
                f"rl_cfg has {name!r}, which the runner does not read{did_you_mean(name, SETTINGS)} If it is a setting "
                "of the algorithm, name it in the class attribute algorithm_settings",
                stacklevel=3,
            )


class AsyncRunner(ABC):
    """Base class of asynchronous algorithms: collector processes fill rollouts while the learner trains.

    The runner checks the memory budget, creates the lanes, starts and supervises the collectors, bounds the policy lag,
    restarts collectors that die, raises the errors of collectors that raise, keeps counters, and stops everything in
    bounded time. A subclass implements ``learn`` with

    - ``open(make_env, collect, rollout=..., weights=...)``: start the collectors, once;
    - ``with rollouts() as slots``: the rollouts of one update;
    - ``publish(weights)``: new weights for the collectors, once per update;
    - ``lag_of(slot)``, ``counters()`` and ``events``: what to log.

    A complete example, in which the collectors write the weight that they read into every step of a rollout:

        >>> import gymnasium, numpy as np
        >>> class Example(AsyncRunner):
        ...     def learn(self, max_iterations, save_interval=50, log_dir="logs"):
        ...         weights = {"w": np.zeros(1, np.float32)}
        ...         self.open(make_env, collect, rollout={"x": ("float32", 8)}, weights=weights)
        ...         self.means = []
        ...         for iteration in range(max_iterations):
        ...             with self.rollouts() as slots:
        ...                 self.means.append(float(np.mean([slot["x"] for slot in slots])))
        ...             weights["w"] += 1
        ...             self.publish(weights)
        >>> def make_env(worker):
        ...     return gymnasium.make("CartPole-v1")
        >>> def collect(env, weights, sink, context):
        ...     local = {"w": np.zeros(1, np.float32)}
        ...     env.reset(seed=context.worker)
        ...     while True:
        ...         with sink.open() as slot:  # raises Stopped at the end of the run
        ...             version = weights.read(local)
        ...             for step in range(8):
        ...                 _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        ...                 if terminated or truncated:
        ...                     env.reset()
        ...                 slot["x"][step] = local["w"][0]
        ...             slot.commit(policy_version=version, rows=8)
        ...         context.report(steps=8)
        >>> with Example("CartPole-v1", None, {"collectors": 2, "max_lag": 0}, num_envs=1) as runner:
        ...     runner.learn(max_iterations=3)
        ...     runner.means, runner.counters()["restarts"]
        ([0.0, 1.0, 2.0], 0)

    Settings of the runner in ``rl_cfg``; other keys are the algorithm's:

    - ``collectors`` (1): number of collector processes.
    - ``rollouts_per_update`` (``collectors``): smallest number of rollouts per update; more when one would exceed
      ``max_lag`` at the next update.
    - ``max_lag`` (1): largest policy lag of a rollout, in weight versions; 0 is synchronous.
    - ``deterministic`` (False): synchronous, with the rollouts of an update in the order of the collectors.
    - ``in_process`` (False): run collectors as threads of this process, for tests and notebooks.
    - ``max_restarts`` (10), ``restart_window`` (60 s): restarts of dead collectors allowed within the window.
    - ``min_collectors`` (1): end the run with an error when fewer collectors are running.
    - ``rollout_timeout`` (600 s): ``WaitTimeout`` when the rollouts of an update take longer.

    All methods are for the learner's process, one thread at a time; ``close`` may also be called by a signal handler.
    In a forked child of that process, ``close`` does nothing, and other methods raise ``UsedAfterFork``.

    When a collector process dies, it is restarted and its unfinished rollout is lost; beyond ``max_restarts`` the
    others take over its rollouts, and below ``min_collectors`` ``rollouts`` raises ``CollectorDied``. When a collector
    raises, ``rollouts`` raises ``CollectorError`` with its traceback. When the learner dies, its collectors end with
    it.
    """

    algorithm_settings: ClassVar[Collection[str] | None] = None
    """Keys of ``rl_cfg`` that a subclass reads, besides the runner's; any other key is an error. None: any key is
    accepted."""

    def __init__(
        self,
        env_name: Any,
        env_cfg_overrides: Mapping[str, Any] | None,
        rl_cfg: Mapping[str, Any] | None,
        *,
        device: str | None = None,
        collector_device: str | None = None,
        sim_backend: str = "mujoco",
        num_envs: int = 4096,
    ) -> None:
        """Check the settings; nothing is started or allocated before ``open``.

        ``num_envs`` is the number of environments per collector. ``sim_backend`` is the kind of environments:
        ``"native"``, ``"gymnasium"`` or ``"mujoco"``. ``rl_cfg`` has the settings of the runner and of the algorithm.
        """
        if sim_backend not in SIM_BACKENDS:
            raise ValueError(
                f"sim_backend must be 'native', 'gymnasium' or 'mujoco', found {sim_backend!r}"
                f"{did_you_mean(str(sim_backend), SIM_BACKENDS, {'gym': 'gymnasium'})}"
            )
        as_count("num_envs", num_envs, 1)
        self.env_name = env_name
        self.env_cfg_overrides = dict(env_cfg_overrides or {})
        self.rl_cfg = dict(rl_cfg or {})
        if self.algorithm_settings is not None:
            check_settings(self.rl_cfg, self.algorithm_settings)
        else:
            _warn_of_misspelt_settings(self.rl_cfg)
        self.device = device or "cpu"
        self.collector_device = "cpu"
        self.sim_backend = sim_backend
        self.num_envs = num_envs
        if str(collector_device or "cpu") not in ("cpu", "cpu:0"):
            raise ValueError(
                f"collector_device must be 'cpu', because collectors act on the CPU, found {collector_device!r}"
            )
        self.num_collectors: int = self._setting("collectors", 1)
        if self.num_collectors < 1:
            raise ValueError(f"collectors must be at least 1, found {self.num_collectors}")
        self.min_collectors: int = self._setting("min_collectors", 1)
        if not 1 <= self.min_collectors <= self.num_collectors:
            raise ValueError(
                f"min_collectors must be from 1 to the number of collectors, {self.num_collectors}, found "
                f"{self.min_collectors}"
            )
        self.deterministic: bool = self._setting("deterministic", False)
        self.max_lag: int = 0 if self.deterministic else self._setting("max_lag", 1)
        self.rollouts_per_update: int = self._setting("rollouts_per_update", self.num_collectors)
        if self.max_lag < 0:
            raise ValueError(f"max_lag must be 0 (synchronous) or more, found {self.max_lag}")
        if self.rollouts_per_update < self.num_collectors:
            raise ValueError(
                f"rollouts_per_update must be at least the number of collectors, {self.num_collectors}, found "
                f"{self.rollouts_per_update}"
            )
        if self.deterministic and self.rollouts_per_update % self.num_collectors:
            raise ValueError(
                f"in deterministic mode rollouts_per_update must be a multiple of the number of collectors, "
                f"{self.num_collectors}, found {self.rollouts_per_update}"
            )
        self.rollout_timeout: float = self._setting("rollout_timeout", 600.0)
        self._restart_policy = RestartPolicy(
            self._setting("max_restarts", 10), self._setting("restart_window", 60.0), self.min_collectors
        )
        self._in_process: bool = self._setting("in_process", False)
        for name, value in (
            ("rollout_timeout", self.rollout_timeout),
            ("restart_window", self._restart_policy.window),
            ("max_restarts", self._restart_policy.max_restarts),
        ):
            if not value >= 0:
                raise ValueError(f"{name} must be 0 or more, found {value:g}")
        self.collectors: Transport | None = None
        """The running collectors; None before ``open``."""
        self.weights: Weights | None = None
        """The published weights; None before ``open``."""
        self.events: list[Event] = []
        """``CollectorJoined`` and ``CollectorLost``, oldest first. The subclass may remove what it has logged."""
        self._taken: list[TakenSlot] = []
        """Rollouts that a call of ``rollouts`` had taken before it timed out."""
        self._guard: ForkGuard | None = None
        """Set by ``open``."""
        self._closed = False
        _open.add(self)

    def _setting(self, name: str, default: Any) -> Any:
        """Return a setting of the runner from ``rl_cfg``, as its type in ``SETTINGS``."""
        value, kind = self.rl_cfg.get(name, default), SETTINGS[name]
        try:
            converted = kind(value)
        except (TypeError, ValueError, OverflowError):
            converted = None
        # int("2") is 2; but int(2.5) would lose digits, and bool("False") is True.
        if converted is None or (converted != value and not (isinstance(value, str) and kind is not bool)):
            expected = {int: "an integer", float: "a number", bool: "True or False"}[kind]
            raise TypeError(f"{name} must be {expected}, found {value!r} (a setting of the runner, in rl_cfg)")
        return converted

    @abstractmethod
    def learn(self, max_iterations: int, save_interval: int = 50, log_dir: str = "logs") -> None:
        """Train for ``max_iterations`` updates; save a checkpoint to ``log_dir`` every ``save_interval`` updates."""

    # ------------------------------------------------------------------------------------------------- for subclasses

    def open(
        self,
        make_env: Callable[[int], Any],
        collect: Collect,
        *,
        rollout: Layout | Mapping[str, FieldSpec],
        weights: Mapping[str, Any],
    ) -> None:
        """Create the lanes, publish the initial ``weights`` and start the collectors. Call it once.

        ``make_env(worker)`` and ``collect(env, weights, sink, context)`` run in the collectors; ``Collect`` has the
        contract. ``rollout`` has the fields of one rollout, ``{name: (dtype, shape)}``. ``weights`` are named numpy
        arrays or torch tensors, for example a state dict; later ones must have the same names, dtypes and shapes.
        ``BudgetError`` if the lanes do not fit into the free memory, before anything is allocated.
        """
        if self._guard is not None:
            self._guard.require()
        if self._closed:
            raise ValueError("the runner was closed; create another")
        if self.collectors is not None:
            raise ValueError("the runner is open already; create another for a second training")
        slot = as_layout(rollout)
        weights_layout = layout_of(weights)
        in_flight = self.rollouts_per_update * (self.max_lag + 1)
        budget = MemoryBudget()
        size = f"num_envs={self.num_envs}, the steps of a rollout, rollouts_per_update or max_lag={self.max_lag}"
        budget.add("rollouts", Ring.segment_layout(slot, in_flight, "block"), lower=size)
        budget.add("weights", Weights.segment_layout(weights_layout), lower="the size of the network")
        budget.check()
        self._guard = ForkGuard("the runner", "create another in this process")
        self.weights = Weights(weights_layout)
        self.weights.publish(weights)
        if self._in_process:
            self.collectors = ThreadCollectors(
                self.num_collectors, make_env, collect, slot=slot, weights=self.weights, in_flight=in_flight
            )
        else:
            self.collectors = ProcessCollectors(
                self.num_collectors, make_env, collect, slot=slot, weights=self.weights, in_flight=in_flight,
                restarts=self._restart_policy, on_event=self.events.append,
            )  # fmt: skip
        # atexit runs the last registered function first: the collectors must be stopped before the memory is released
        # and the fork server ends.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        self.collectors.start()

    @contextmanager
    def rollouts(self, timeout: float | None = None) -> Iterator[list[TakenSlot]]:
        """Take the rollouts of one update; they are released at the end of the ``with`` block.

        Takes at least ``rollouts_per_update``, and all that would exceed ``max_lag`` at the next update. In
        deterministic mode they are sorted by collector. ``WaitTimeout`` after ``timeout`` seconds (default:
        ``rollout_timeout``); the next call also returns the rollouts that were taken until then. ``CollectorError`` if
        a collector raised, ``CollectorDied`` if too many died.
        """
        check_timeout(timeout)
        collectors, weights = self._opened("rollouts")
        deadline = time.monotonic() + (self.rollout_timeout if timeout is None else timeout)
        too_old = weights.version - self.max_lag
        while len(self._taken) < self.rollouts_per_update or collectors.has_older_than(too_old):
            self._taken.append(collectors.take(max(deadline - time.monotonic(), 0)))
        taken, self._taken = self._taken, []
        if self.deterministic:
            taken.sort(key=lambda slot: slot.writer)
        try:
            yield taken
        finally:
            if self._owned:
                with contextlib.suppress(SegmentClosed):  # a signal handler may have closed the runner
                    for slot in taken:
                        slot.release()

    def publish(self, tensors: Mapping[str, Any]) -> int:
        """Publish new weights, let the collectors start one new rollout for each one taken, and return the version."""
        collectors, weights = self._opened("publish")
        version = weights.publish(tensors)
        collectors.return_credits()
        return version

    def lag_of(self, slot: TakenSlot) -> int:
        """Return the policy lag of a rollout: the latest weights version minus the one that collected it."""
        _, weights = self._opened("lag_of")
        return weights.version - slot.policy_version

    @property
    def _owned(self) -> bool:
        """False in a forked child of the process that has opened the runner."""
        return self._guard is None or self._guard.owned

    def _opened(self, caller: str) -> tuple[Transport, Weights]:
        if self.collectors is None or self.weights is None:
            raise ValueError(f"the runner is not open; call open() before {caller}()")
        if self._guard is not None:
            self._guard.require()
        return self.collectors, self.weights

    def counters(self) -> dict[str, int]:
        """Return counts since the start, summed over all collectors; empty before ``open``.

        ``steps``: environment steps. ``rollouts``: committed rollouts. ``wait_ns``, ``env_ns``, ``policy_ns``:
        nanoseconds that collectors waited for credits, and spent in environments and policies. ``restarts``: collectors
        restarted. ``collectors``: collectors running. ``unread``: rollouts that wait for the learner.
        """
        return {} if self.collectors is None else self.collectors.counters()

    # ---------------------------------------------------------------------------------------------------- shutdown

    def close(self) -> None:
        """Stop the collectors and release the memory, within 4 seconds.

        Calling it again has no effect, nor does calling it in a forked child. Also called by ``with``, at interpreter
        exit and by ``__del__``.
        """
        if self._closed or not self._owned:
            return
        with contextlib.suppress(SegmentClosed):  # at interpreter exit the memory may be released already
            while self._taken:
                self._taken.pop().release()
        if self.collectors is not None:
            self.collectors.close()
        if self.weights is not None:
            self.weights.close()
        self._closed = True  # only now: a close() that was interrupted can be repeated

    def __enter__(self) -> AsyncRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # during interpreter shutdown modules may be gone
            self.close()


def _close_all() -> None:
    for runner in list(_open):
        runner.close()
