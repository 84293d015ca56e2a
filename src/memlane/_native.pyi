"""memlane's native core. Private: use memlane.core."""

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Mapping as Mapping_
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

SIGNAL_BYTES: int
SIGNAL_OFFSETS: tuple[int, int]
SLICE_SECONDS: float

RING_CONTROL_BYTES: int
SLOT_HEAD_BYTES: int
WEIGHTS_CONTROL_BYTES: int
MOST_BUFFERS: int
REPLAY_CONTROL_BYTES: int
QUORUM_BYTES: int
COMMAND_STEP: int
COMMAND_SEND: int
COMMAND_MESSAGE: int
COMMAND_CLOSE: int
PROGRESS_CURRENT_ENV: int
PROGRESS_STEPS: int
PROGRESS_MESSAGES_SENT: int
PROGRESS_COMMANDS_FINISHED: int

class _Watchable(Protocol):
    def fileno(self) -> int: ...
    def error(self, waiting: str, /) -> Exception: ...

class Mapping(Buffer):
    """A range of a file mapped into this process; a buffer that numpy can view."""

    def __init__(self, fd: int, offset: int, nbytes: int, writeable: bool) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None:
        """Refuse new work. The memory goes when its last holder goes."""
    def retire(self) -> None:
        """Put poisoned private pages in the place of the shared ones."""

class Signal:
    """An atomic counter that one side advances and others wait for."""

    spin_limit_ns: int
    def __init__(self, mapping: Mapping, offset: int, label: str) -> None: ...
    @property
    def label(self) -> str: ...
    @property
    def value(self) -> int: ...
    def store(self, value: int) -> None:
        """Set the value and wake whoever waits for it."""
    def add(self, amount: int = 1) -> int:
        """Add, wake, and return the new value."""
    def compare_and_swap(self, expected: int, value: int) -> bool:
        """Set the value if it is `expected`; say whether it was."""
    def wait(self, until: int, timeout: float | None = None, peers: Iterable[_Watchable] = ()) -> int:
        """Wait until the value is at least `until` and return it. Ends with WaitTimeout after `timeout` seconds and
        with PeerDied soon after the death of one of `peers`."""

class Words:
    """A table of atomic 64-bit words."""

    def __init__(self, mapping: Mapping, offset: int, count: int, label: str) -> None: ...
    def __len__(self) -> int: ...
    @property
    def label(self) -> str: ...
    def load(self, index: int) -> int: ...
    def store(self, index: int, value: int) -> None: ...
    def add(self, index: int, amount: int) -> int:
        """Add and return the new value."""
    def sum(self, first: int, stride: int) -> int:
        """Of every `stride`-th word from `first` on."""
    def add_each(self, indices: NDArray[np.int64], amount: int) -> None: ...
    def compare_and_swap(self, index: int, expected: int, value: int) -> bool: ...
    def unchanged(self, index: int, seen: int) -> bool:
        """Whether the word still holds `seen`: what was copied since it was loaded is then whole."""
    def load_into(self, indices: NDArray[np.int64], out: NDArray[np.int64]) -> None: ...
    def changed(self, indices: NDArray[np.int64], seen: NDArray[np.int64]) -> list[int]:
        """The positions in `indices` whose word no longer holds what was seen there."""

class Rows:
    def __init__(self, count: int, fields: list[tuple[int, int, int]]) -> None: ...
    def gather(self, indices: NDArray[np.int64], out: Rows, threads: int) -> None: ...
    def scatter(self, indices: NDArray[np.int64], values: Rows, threads: int) -> None: ...

def tie_lifeline(pidfd: int, grace_ns: int) -> None:
    """End this process when the process behind `pidfd` dies: SIGTERM, then SIGKILL `grace_ns` later."""

class SlotHead:
    """What stands at the head of a slot."""

    def __init__(self) -> None: ...
    @property
    def sequence(self) -> int:
        """Which commit of the ring this is, counted from 1."""
    @property
    def policy_version(self) -> int:
        """Of the weights that made the content."""
    @property
    def writer(self) -> int:
        """What the writer calls itself."""
    @property
    def process(self) -> int:
        """The process that wrote it, as Peer.word."""
    @property
    def claimed_ns(self) -> int:
        """Wall clock, when writing began."""
    @property
    def committed_ns(self) -> int:
        """Wall clock, when it ended."""
    @property
    def rows(self) -> int:
        """How many rows are valid, where the writer counts them."""
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    def __getstate__(self) -> tuple[int, ...]: ...
    def __setstate__(self, state: tuple[int, ...]) -> None: ...

class Ring:
    """Slots that writers fill and readers take, each once, oldest first."""

    def __init__(
        self,
        mapping: Mapping,
        control: int,
        slots: int,
        count: int,
        stride: int,
        unread_limit: int,
        block: bool,
        label: str,
    ) -> None: ...
    @property
    def label(self) -> str: ...
    def claim(self, timeout: float | None = None, peers: Iterable[_Watchable] = ()) -> int: ...
    def commit(self, slot: int, policy_version: int, writer: int, rows: int) -> None: ...
    def abandon(self, slot: int) -> None: ...
    def take(self, timeout: float | None = None, peers: Iterable[_Watchable] = ()) -> int: ...
    def release(self, slot: int) -> None: ...
    def put(
        self,
        parts: TensorParts | None,
        tensors: Mapping_[str, object] | None,
        policy_version: int,
        writer: int,
        rows: int,
        timeout: float | None,
        peers: Iterable[_Watchable],
    ) -> bool:
        """Claim a slot, copy into it, commit it; or False if the tensors are not what `parts` knows."""
    def get(
        self,
        parts: TensorParts | None,
        tensors: Mapping_[str, object] | None,
        timeout: float | None,
        peers: Iterable[_Watchable],
    ) -> SlotHead | None:
        """Take a slot, copy out of it, release it; or None if the tensors are not what `parts` knows."""
    def head(self, slot: int) -> SlotHead: ...
    def unread(self) -> int: ...
    def reap(self) -> int:
        """Put back what dead processes held; say how many slots that were."""
    def counters(self) -> dict[str, int]: ...

class TensorParts:
    def __init__(self, parts: Sequence[tuple[str, object, int, object, int, int]], writeable: bool) -> None: ...
    def same(self, tensors: Mapping_[str, object]) -> bool: ...
    def fits(self, tensors: Mapping_[str, object]) -> bool: ...

class Weights:
    """The latest version of a block of bytes."""

    def __init__(self, mapping: Mapping, control: int, buffers: int, count: int, stride: int, label: str) -> None: ...
    @property
    def label(self) -> str: ...
    def version(self) -> int: ...
    def publish(self, parts: TensorParts) -> int: ...
    def publish_these(self, parts: TensorParts | None, tensors: Mapping_[str, object]) -> int:
        """`publish`, or 0 if the tensors are not what `parts` knows."""
    def read_new(self, parts: TensorParts | None, tensors: Mapping_[str, object], known: int) -> int:
        """`read` unless it is the known version; -1 if the tensors are not what `parts` knows."""
    def read(self, parts: TensorParts) -> int: ...
    def wait_for(self, version: int, timeout: float | None = None, peers: Iterable[_Watchable] = ()) -> int: ...
    def retries(self) -> int: ...

def row_head_bytes(linked: bool) -> int:
    """What stands before the fields of each row."""

def sum_tree_bytes(count: int) -> int:
    """What the priorities of so many rows take."""

class Replay:
    """Rows that writers add, over and over the same slots, and samplers draw."""

    def __init__(
        self,
        mapping: Mapping,
        control: int,
        rows: int,
        tree: int | None,
        streams: int,
        stream_count: int,
        capacity: int,
        stride: int,
        columns: Sequence[tuple[str, int, int, np.dtype[Any], Sequence[int]]],
        transition: tuple[int, int, int, bool],
        limit: tuple[float, int, float],
        alpha: float,
        label: str,
    ) -> None: ...
    @property
    def label(self) -> str: ...
    def add_plain(self, rows: Mapping_[str, object]) -> int:
        """The transitions added, or -1 if it must be the other way."""
    def add(
        self,
        rows: Mapping_[str, object],
        version: int,
        streams: NDArray[np.int64] | None,
        skip: NDArray[np.uint8] | None,
        finals: Mapping_[str, object] | None,
        has_final: NDArray[np.uint8] | None,
        timeout: float | None,
        peers: Iterable[_Watchable],
    ) -> int:
        """The transitions added, or -1 if an argument is not as it must be."""
    def set_priorities(self, keys: NDArray[np.int64], errors: NDArray[np.float64]) -> int:
        """How many of the rows were still there."""
    def begin_priorities(self) -> None: ...
    def total_priority(self) -> float: ...
    def added(self) -> int: ...
    def last_number(self) -> int:
        """Of the rows that were begun, final observations included."""
    def size(self) -> int: ...
    def counters(self) -> dict[str, int]: ...
    def save_into(self, copy: Replay) -> int:
        """How many rows had changed."""
    def counters_plausible(self) -> bool: ...
    def first_implausible(self) -> int: ...

class Sampler:
    """Draws rows of a replay into a block."""

    def __init__(
        self,
        replay: Replay,
        dice: int,
        seed: int | None,
        takes: Sequence[tuple[int, int, int, int, bool]],
        row_bytes: int,
        steps: int,
        gamma: float,
        length: int,
        places: Sequence[int],
    ) -> None: ...
    def sample(
        self,
        block: NDArray[np.uint8],
        beta: float,
        threads: int,
        timeout: float | None,
        peers: Iterable[_Watchable],
    ) -> None: ...
    def start(self, block: NDArray[np.uint8], beta: float, threads: int) -> None:
        """Draw into the block in a thread of its own."""
    def asked(self) -> int:
        """How many were started and not taken."""
    def ready(self) -> bool:
        """Whether the oldest that was started is drawn."""
    def take(self, timeout: float | None) -> bool:
        """Wait for the oldest that was started; False at the timeout."""
    def stop(self) -> None:
        """End the thread; what was started is not drawn any more."""

class Quorum:
    """A count that many advance and one waits for."""

    def __init__(self, mapping: Mapping, offset: int, label: str) -> None: ...
    @property
    def arrived(self) -> int: ...
    def arrive(self, count: int = 1) -> int: ...
    def wait(self, until: int, timeout: float | None = None, peers: Iterable[_Watchable] = ()) -> int: ...

def all_within(array: NDArray[Any], low: int, high: int) -> bool | None:
    """Whether all numbers of an int64 array lie within the bounds, both included; None if it is not an int64 array."""

def pack_floats(infos: list[tuple[int, dict[str, Any]]]) -> tuple[tuple[str, ...], str, int, bytes] | None:
    """Pack infos that all have the same keys and only floats: keys, dtypes, first environment, floats; else None."""

class ColumnWriter:
    """Stores values of a space into rows. Its owner keeps the arrays alive."""

    def __init__(self, description: tuple[Any, ...]) -> None: ...
    def store(self, value: object) -> bool:
        """Store a value in the first row if it has exactly the expected type, dtype and shape; otherwise False."""

class StepWriter:
    """Writes what a step of an environment returned into its rows."""

    def __init__(
        self,
        observations: tuple[Any, ...] | None,
        rewards: int,
        terminated: int,
        truncated: int,
        progress: int,
        num_envs: int,
        infos: list[tuple[str, tuple[Any, ...], int]],
    ) -> None: ...
    def write_step(
        self, index: int, observation: object, reward: object, terminated: object, truncated: object
    ) -> bool:
        """Write a step; False if a value must be converted or refused."""
    def write_observation(self, index: int, observation: object) -> bool:
        """Write an observation; False if it must be converted or refused."""

class CommandWord:
    """The command of one worker: the parent issues, the worker's StepLoop waits."""

    def __init__(self, go: Signal, mapping: Mapping, offset: int) -> None: ...
    @property
    def issued(self) -> int:
        """Commands issued so far, also to processes that this worker replaced."""
    def issue(self, cell: int, command: int) -> None:
        """Issue a command; the worker arrives in this cell of the quorum."""

class CommandWords:
    """The commands of all workers, issued in one call."""

    def __init__(self, words: list[CommandWord], cores: list[int]) -> None: ...
    def issue(self, workers: list[int], cell: int, command: int) -> None:
        """Issue a command to these workers, a worker on this core last."""
    def issue_all(self, cell: int, command: int) -> None:
        """Issue a command to all workers."""

class ExceptionalStep:
    """A step that StepLoop leaves to Python."""

    def __init__(self) -> None: ...
    @property
    def index(self) -> int:
        """Index of the environment within its worker."""
    @property
    def returned(self) -> Any:
        """What the environment returned, or None."""
    @property
    def raised(self) -> Exception | None:
        """What the environment raised, or None."""
    @property
    def needs_reset(self) -> bool:
        """The episode had ended, so the environment was not stepped."""
    @property
    def pending_truncation(self) -> bool:
        """The environment was restarted and not stepped; its episode is to be truncated."""

class StepLoop:
    """A worker's side of a step. Owns the state of its environments and their infos."""

    def __init__(
        self,
        command: CommandWord,
        writer: StepWriter,
        quorums: list[Quorum],
        requested_step: Words,
        completed_step: Words,
        read_actions: Callable[[], Sequence[Any] | NDArray[Any]],
        read_action: Callable[[int], Any],
        envs: list[Any],
        first_env: int,
        autoreset: bool,
    ) -> None: ...
    def next_command(self) -> int:
        """Wait for the next command that needs Python, and return it."""
    def start(self, actions: Sequence[Any] | NDArray[Any]) -> None:
        """Start a step of all environments; `next_exception` runs it."""
    def next_exception(self) -> ExceptionalStep | None:
        """Run the step up to the next exceptional one. None: all environments are stepped."""
    def complete_sent(self) -> None:
        """The environment that `step_sent` stepped last is done."""
    def step_sent(self) -> bool:
        """Step the environments whose step was requested; False at one that Python has to finish."""
    def finish(self, arrivals: int) -> None:
        """Finish the command; so many environments arrive at the quorum."""
    def mark_running(self, index: int) -> None:
        """The environment's next step is a step."""
    def mark_needs_reset(self, index: int) -> None:
        """The episode has ended: the next step is a reset, or exceptional without autoreset."""
    def mark_pending_truncation(self, index: int) -> None:
        """The environment was restarted: its next step is exceptional."""
    def add_info(self, index: int, info: dict[str, Any]) -> None:
        """Add an environment's info to those of this command."""
    def take_infos(self) -> list[tuple[int, dict[str, Any]]]:
        """Hand over the infos of this command: pairs (index of the environment in the batch, info)."""

ENV_ABI: int

def built_in_envs() -> dict[str, tuple[int, int, int]]:
    """The environments in this module by name: where the spec is, the most steps of an episode, the count of agents."""

def env_layout() -> tuple[int, int, int, int]:
    """The bytes of a spec, a field, a setting and of what functions are given."""

class EnvHost:
    """Runs the environments of a C library over arrays that Python made."""

    def __init__(
        self,
        spec: int,
        num_envs: int,
        autoreset_mode: int,
        max_episode_steps: int,
        settings: Sequence[float],
        arrays: dict[str, Any],
        num_threads: int,
        keep: object,
    ) -> None: ...
    def init(self) -> str | None:
        """What is wrong, in the environment's words; None if nothing."""
    def reset(self, which: object = None) -> None: ...
    def step(self, actions: object) -> int:
        """How many ended. -1: these are not plainly actions; -2: some have ended and must be reset first."""
    def step_stored(self) -> int:
        """With the actions that lie in their array."""
    def send(self, envs: Sequence[int]) -> None: ...
    def receive(self, at_least: int, timeout: float | None = None) -> list[int] | None: ...
    def render(self, index: int, picture: object) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def step_ns(self) -> float: ...
    def close(self) -> None: ...
