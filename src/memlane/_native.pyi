"""memlane's native core. Private: use memlane.core."""

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sequence, ValuesView
from collections.abc import Mapping as Mapping_
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import Buffer

from memlane.core.layout import Layout
from memlane.core.segment import Segment

PID_BITS: int
SIGNAL_BYTES: int
SIGNAL_OFFSETS: tuple[int, int]
SLICE_SECONDS: float

RING_CONTROL_BYTES: int
SLOT_HEAD_BYTES: int
WEIGHTS_CONTROL_BYTES: int
MAX_BUFFERS: int
REPLAY_CONTROL_BYTES: int
QUORUM_BYTES: int
COMMAND_STEP: int
COMMAND_SEND: int
COMMAND_MESSAGE: int
COMMAND_CLOSE: int
PROGRESS_CURRENT_ENV: int
PROGRESS_STEPS: int
PROGRESS_MESSAGES_SENT: int
PROGRESS_BUSY_NS: int
PROGRESS_FLOAT_INFOS: int
PROGRESS_FLOAT_FORMS: int
PROGRESS_COMMANDS_FINISHED: int

class _Watchable(Protocol):
    def fileno(self) -> int: ...
    def error(self, waiting: str, /) -> Exception: ...

class Mapping(Buffer):
    """A range of a file mapped into this process. Supports the buffer protocol."""

    def __init__(self, fd: int, offset: int, nbytes: int, writeable: bool) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None:
        """Refuse new operations. The memory is unmapped when the last object that uses it is gone."""
    def retire(self) -> None:
        """Close, and replace the shared pages by private ones with every bit set: stale views read NaN and -1."""

class Lease(Mapping_[str, NDArray[Any]]):
    """Temporary zero-copy access to fields in a segment: a mapping from field name to array, until ``release``."""

    def __init__(
        self,
        segment: Segment,
        layout: Layout | None = None,
        offset: int = 0,
        *,
        writeable: bool = True,
        on_release: Callable[[], object] | None = None,
        debug: bool | None = None,
        label: str | None = None,
    ) -> None: ...
    @property
    def layout(self) -> Layout:
        """The fields of the lease."""
    @property
    def label(self) -> str:
        """The name of the lease in messages."""
    @property
    def released(self) -> bool:
        """Whether the lease has ended."""
    def release(self) -> None:
        """End the lease. Calling it again has no effect."""
    def views_in_use(self) -> list[str]:
        """The names of the arrays from this lease that are still referenced, directly or through a slice or tensor.
        In debug mode, each with the line that took it."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def __getitem__(self, name: str) -> NDArray[Any]: ...
    def __setitem__(self, name: str, value: ArrayLike) -> None: ...
    def __contains__(self, key: object) -> bool: ...
    def get(self, key: str, default: Any = None) -> Any:
        """The field as an array; `default` if there is no such field."""
    def keys(self) -> KeysView[str]:
        """The names of the fields."""
    def values(self) -> ValuesView[NDArray[Any]]:
        """The fields as arrays."""
    def items(self) -> ItemsView[str, NDArray[Any]]:
        """The names of the fields, with their arrays."""
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def __repr__(self) -> str: ...

class Signal:
    """An atomic counter in a segment that one side advances and others wait for.

    ``Segment.signal(name)`` returns one. Any process and thread that maps the segment may call any
    method. Stores into the segment before the signal are visible after the wait for it. When a process
    dies, the value stays; a wait that names the process in ``peers`` raises ``PeerDied``."""

    spin_limit_ns: int
    """The longest time that a wait of this object spins before it sleeps, in nanoseconds; 0: it never spins."""
    def __init__(self, mapping: Mapping, offset: int, label: str) -> None: ...
    @property
    def label(self) -> str:
        """The name of the signal in error messages."""
    @property
    def value(self) -> int:
        """The value now."""
    def store(self, value: int) -> None:
        """Set the value and wake all waiters."""
    def add(self, amount: int = 1) -> int:
        """Add to the value, wake all waiters, and return the new value."""
    def compare_and_swap(self, expected: int, value: int) -> bool:
        """Set the value if it is `expected` and wake all waiters. Return whether it was."""
    def wait(self, until: int, timeout: float | None = None, peers: Iterable[_Watchable] = ()) -> int:
        """Wait until the value is at least `until` and return it. Raises WaitTimeout after `timeout` seconds and
        PeerDied soon after the death of one of `peers`."""

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
        """Sum every `stride`-th word, beginning with `first`."""
    def add_each(self, indices: NDArray[np.int64], amount: int) -> None:
        """Add `amount` to each of these words."""
    def compare_and_swap(self, index: int, expected: int, value: int) -> bool: ...
    def unchanged(self, index: int, seen: int) -> bool:
        """Return whether the word still holds `seen`. If so, data copied since it was loaded is not torn."""
    def load_into(self, indices: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        """Load the words at `indices` into `out`."""
    def changed(self, indices: NDArray[np.int64], seen: NDArray[np.int64]) -> list[int]:
        """Return the positions i for which the word `indices[i]` no longer holds `seen[i]`."""

def uses_file(fd: int, process: int) -> bool:
    """Return whether the process with this identity in the life of a segment, whose file is open as `fd`, is alive and
    uses it. True if that cannot be found out."""

class Life:
    """Shows which processes use a segment and are alive, also those of other containers.

    ``Segment.life`` returns one. A process that holds something in a segment stores its identity there, the integer
    that ``process()`` returns; when it dies, calls exec or drops the segment, ``alive`` is False for it everywhere."""

    def __init__(self, mapping: Mapping, label: str) -> None: ...
    def process(self) -> int:
        """Return the identity of this process in the segment, above 0, and keep it alive from now on. The child of a
        fork has another."""
    def process_if_taken(self) -> int:
        """Return what `process` has returned in this process; 0 if it was not called."""
    def alive(self, process: int) -> bool:
        """Return whether the process with this identity is alive. True if that cannot be found out."""
    def check(self) -> None:
        """Raise SegmentError if processes cannot have an identity here: the file system has no locks, for example."""

class Rows:
    """Fields of equal length at fixed addresses, whose rows are copied by index."""

    def __init__(self, count: int, fields: list[tuple[int, int, int]]) -> None: ...
    def gather(self, indices: NDArray[np.int64], out: Rows, threads: int) -> None:
        """Copy row `indices[i]` of every field to row i of `out`."""
    def scatter(self, indices: NDArray[np.int64], values: Rows, threads: int) -> None:
        """Copy row i of every field of `values` to row `indices[i]`."""

def check_timeout(timeout: float | None) -> None:
    """Raise TypeError or ValueError unless `timeout` is None or a number of seconds, 0 or more."""

def fill_holes(fd: int, nbytes: int) -> int:
    """Allocate the holes of a file. Return 0, or errno."""

def this_process() -> int:
    """Pid and start time of this process in one integer, as `Peer.word` has them."""

def process_of(pid: int) -> int:
    """Pid and start time, in one integer, of the process that has this pid now; 0 if there is none."""

def process_state(pid: int, start: int) -> str:
    """The value of the `PeerState` of the process with this pid and start time."""

def tie_lifeline(pidfd: int, grace_ns: int) -> None:
    """End this process when the process behind `pidfd` dies: SIGTERM, then SIGKILL `grace_ns` later."""

def exit_with_parent() -> None:
    """Let this process exit when its parent dies, without a thread. Forked children do not inherit it."""

class SlotHead:
    """The metadata of a slot, as its writer left it."""

    def __init__(self) -> None: ...
    @property
    def sequence(self) -> int:
        """Number of the commit in the ring, counted from 1."""
    @property
    def policy_version(self) -> int:
        """Version of the weights that produced the content."""
    @property
    def writer(self) -> int:
        """Number that the writer was created with."""
    @property
    def process(self) -> int:
        """Process that wrote the slot, as Peer.word in its own pid namespace."""
    @property
    def claimed_ns(self) -> int:
        """Wall clock in nanoseconds when the slot was claimed."""
    @property
    def committed_ns(self) -> int:
        """Wall clock in nanoseconds when the slot was committed."""
    @property
    def rows(self) -> int:
        """Number of valid rows, if the writer sets it."""
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    def __getstate__(self) -> tuple[int, ...]: ...
    def __setstate__(self, state: tuple[int, ...]) -> None: ...

class Ring:
    """Slots that writers fill and readers take, each exactly once, oldest first."""

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
        layout: Layout,
        watch: Callable[[int, bool, str], object] | None,
    ) -> None: ...
    @property
    def label(self) -> str: ...
    def commit(self, slot: int, policy_version: int, writer: int, rows: int) -> None:
        """Make a claimed slot ready for readers."""
    def abandon(self, slot: int) -> None:
        """Give a claimed slot back without committing it."""
    def release(self, slot: int) -> None:
        """Free a slot that was taken."""
    def unread(self) -> int:
        """Return the number of unread slots."""
    def reap(self) -> int:
        """Reclaim the slots that dead processes hold and return their number."""
    def counters(self) -> dict[str, int]: ...

class RingWriter:
    """The native part of a ring's writer."""

    def __init__(self, ring: Ring, writer: int) -> None: ...
    @property
    def writer(self) -> int:
        """Number that its slots carry."""
    def claim(self, timeout: float | None = None, peers: Iterable[_Watchable] = ()) -> WriteSlot:
        """Return a free slot to fill in place, then ``commit``.

        Waits while no slot is free (with ``overflow="block"``, also while ``num_slots`` are unread): at most
        ``timeout`` seconds (``WaitTimeout``), and until one of ``peers`` dies (``PeerDied``).
        """
    def _put(
        self,
        parts: TensorParts | None,
        tensors: Mapping_[str, object],
        policy_version: int,
        rows: int,
        timeout: float | None,
        peers: Iterable[_Watchable],
    ) -> bool:
        """Claim a slot, copy the tensors into it and commit it. False if the tensors do not fit `parts`."""
    def _put_parts(
        self,
        parts: TensorParts,
        policy_version: int,
        rows: int,
        timeout: float | None,
        peers: Iterable[_Watchable],
    ) -> None:
        """Claim a slot, copy the tensors of `parts` into it and commit it."""

class RingReader:
    """The native part of a ring's reader."""

    def __init__(self, ring: Ring) -> None: ...
    def take(self, timeout: float | None = None, peers: Iterable[_Watchable] = ()) -> ReadSlot:
        """Take the oldest unread slot, to be read in place until it is released.

        Waits until there is one: at most ``timeout`` seconds (``WaitTimeout``), and until one of ``peers`` dies
        (``PeerDied``).
        """
    def _get(
        self,
        parts: TensorParts | None,
        tensors: Mapping_[str, object],
        timeout: float | None,
        peers: Iterable[_Watchable],
    ) -> SlotHead | None:
        """Take a slot, copy it into the tensors and release it. None if the tensors do not fit `parts`."""
    def _get_parts(self, parts: TensorParts, timeout: float | None, peers: Iterable[_Watchable]) -> SlotHead:
        """Take a slot, copy it into the tensors of `parts` and release it."""

class SlotLease(Lease):
    """A slot of a ring that this process may use until `release`."""

    def __init__(self) -> None: ...
    @property
    def index(self) -> int:
        """Number of the slot in the ring, from 0."""

class WriteSlot(SlotLease):
    """A claimed slot: a mapping of field names to writeable arrays.

    ``commit`` hands it to the readers. A release without commit, as by an exception in a ``with`` block, abandons it.
    """

    def __init__(self) -> None: ...
    @property
    def writer(self) -> int:
        """Number that the writer was created with."""
    def commit(self, *, policy_version: int = 0, rows: int = 0) -> None:
        """Hand the slot to the readers. Arrays taken from it must not be used afterwards."""

class ReadSlot(SlotLease):
    """A taken slot: a mapping of field names to read-only arrays, valid until ``release``."""

    def __init__(self) -> None: ...
    @property
    def head(self) -> SlotHead:
        """The metadata of the slot."""
    @property
    def sequence(self) -> int:
        """Number of this commit in the ring, counted from 1."""
    @property
    def policy_version(self) -> int:
        """Version of the weights that produced the content, as the writer gave it."""
    @property
    def writer(self) -> int:
        """Number of the writer."""
    @property
    def rows(self) -> int:
        """Number of valid rows, as the writer gave it."""

class TensorParts:
    """The addresses of some tensors and their offsets in a block."""

    def __init__(self, parts: Sequence[tuple[str, object, int, object, int, int]], writeable: bool) -> None: ...
    def same(self, tensors: Mapping_[str, object]) -> bool:
        """Return whether these are the same tensors as before, with the same dtypes, shapes and addresses."""
    def fits(self, tensors: Mapping_[str, object]) -> bool:
        """Return whether these tensors have the same names, dtypes and shapes and are contiguous; if so, use them from
        now on."""
    @property
    def version(self) -> int:
        """Version that the tensors were last read with; 0 if none, or if others were used since."""

class Weights:
    """The latest version of a block of bytes, published by writers and read by any process."""

    def __init__(
        self,
        mapping: Mapping,
        control: int,
        buffers: int,
        count: int,
        stride: int,
        label: str,
        if_full: str = "create it with more buffers",
        if_overtaken: str = "create it with more buffers, or publish less often",
    ) -> None: ...
    @property
    def label(self) -> str: ...
    def version(self) -> int:
        """Return the latest version; 0 before the first publication."""
    def publish(self, parts: TensorParts) -> int:
        """Publish a copy of the parts and return its version."""
    def publish_tensors(self, parts: TensorParts | None, tensors: Mapping_[str, object]) -> int:
        """Like `publish`, for these tensors; 0 if they do not fit `parts` or need staging copies."""
    def read_tensors(self, parts: TensorParts | None, tensors: Mapping_[str, object]) -> int:
        """Like `read`, for these tensors; -1 if they do not fit `parts` or need staging copies."""
    def read(self, parts: TensorParts) -> int:
        """Copy the latest version into the parts, unless they have it, and return it; 0 if there is none."""
    def wait_for(self, version: int, timeout: float | None = None, peers: Iterable[_Watchable] = ()) -> int:
        """Wait until this version or a later one is published and return the latest version."""
    def retries(self) -> int:
        """Return how many copies were overwritten while they were made, and repeated."""

def row_head_bytes(linked: bool) -> int:
    """Return the bytes before the fields of each row."""

def sum_tree_bytes(count: int) -> int:
    """Return the bytes of a sum tree for the priorities of `count` rows."""

class BlockPool:
    """Memory that is used again by later batches."""

    def __init__(self) -> None: ...

class Block(Buffer):
    """Uninitialised memory of a batch, as a buffer. It returns to its pool when nothing refers to it."""

    def __init__(self, pool: BlockPool, nbytes: int) -> None: ...

class Replay:
    """A replay buffer: rows that writers add into a circular table and samplers draw."""

    def __init__(
        self,
        mapping: Mapping,
        control: int,
        stored: int,
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
    def add_plain(self, rows: Mapping_[str, object], timeout: float | None) -> int:
        """Add rows without streams and return how many were added; -1 if the caller must use `add`."""
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
        """Add rows and return how many transitions were added; -1 if an argument is not accepted."""
    def set_priorities(self, keys: NDArray[np.int64], errors: NDArray[np.float64]) -> int:
        """Set the priorities of rows by their keys and return how many of the rows were still stored."""
    def init_priorities(self) -> None:
        """Set the priority of the first rows of a new replay."""
    def total_priority(self) -> float: ...
    def added(self) -> int:
        """Return the number of transitions added since the replay was created."""
    def last_sequence(self) -> int:
        """Return the last sequence number that was reserved; final observations have sequence numbers, too."""
    def size(self) -> int:
        """Return the number of stored transitions."""
    def counters(self) -> dict[str, int]: ...
    def save_into(self, copy: Replay) -> int:
        """Bring `copy` up to date and return how many rows had changed."""
    def counters_plausible(self) -> bool:
        """Return whether writers and samplers could have left these counters."""
    def first_implausible(self) -> int:
        """Return the first slot with contents that no writer leaves, or -1."""
    def refresh_priorities(self) -> None:
        """Recompute all sums of the priorities."""

class Sampler:
    """Draws rows of a replay into a block, in the calling thread or ahead of time in a background thread."""

    def __init__(
        self,
        replay: Replay,
        rng: int,
        seed: int | None,
        copies: Sequence[tuple[int, int, int, int, bool]],
        row_bytes: int,
        steps: int,
        gamma: float,
        length: int,
        offsets: Sequence[int],
    ) -> None: ...
    def sample(
        self,
        block: NDArray[np.uint8],
        beta: float,
        threads: int,
        timeout: float | None,
        peers: Iterable[_Watchable],
    ) -> None:
        """Draw as many rows as the block has."""
    def start(self, block: NDArray[np.uint8], beta: float, threads: int) -> None:
        """Begin to draw into the block in a background thread."""
    def started(self) -> int:
        """Return how many batches were started and not taken."""
    def ready(self) -> bool:
        """Return whether the batch that was started first is finished."""
    def take(self, timeout: float | None) -> bool:
        """Wait for the batch that was started first and remove it. False at the timeout, or after `stop`."""
    def stop(self) -> None:
        """End the background thread; batches that are not drawn yet stay undrawn."""

class Quorum:
    """A count that several processes advance and one waits for."""

    def __init__(self, mapping: Mapping, offset: int, label: str) -> None: ...
    spin_limit_ns: int
    """How long a wait spins at most before it sleeps."""
    @property
    def arrived(self) -> int: ...
    def arrive(self, count: int = 1) -> int:
        """Add to the count, wake the waiter if that completes what it waits for, and return the new count."""
    def wait(self, until: int, timeout: float | None = None, peers: Iterable[_Watchable] = ()) -> int: ...

def all_within(array: NDArray[Any], low: int, high: int) -> bool | None:
    """Whether all numbers of an int64 array lie within the bounds, both included; None if it is not an int64 array."""

def pack_floats(infos: list[tuple[int, dict[str, Any]]]) -> tuple[tuple[str, ...], str, int, bytes] | None:
    """Pack infos that all have the same keys and only floats: keys, types, first environment, floats; else None."""

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
    def issue_all(self, cell: int, command: int) -> bool:
        """Issue a command to all workers. True when the placement of the workers is to be looked at."""

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
        read_formatted: Callable[[int, int], Sequence[Any] | NDArray[Any]],
        action_formats: Words | None,
        envs: list[Any],
        first_env: int,
        autoreset: bool,
        wait_for_commands: bool,
    ) -> None: ...
    def next_command(self) -> int | None:
        """Wait for the next command that needs Python. None if there is none and the loop must not wait."""
    def start(self, actions: Sequence[Any] | NDArray[Any]) -> None:
        """Start a step of all environments; `next_exception` runs it."""
    def next_exception(self) -> ExceptionalStep | None:
        """Run the step up to the next exceptional one. None: all environments are stepped."""
    def complete_sent(self) -> None:
        """Mark the environment that `step_sent` stepped last as done."""
    def step_sent(self) -> bool:
        """Step the environments whose step was requested. False: Python has to finish the step of one of them."""
    def finish(self, arrivals: int) -> None:
        """Finish the command; this many environments arrive at the quorum."""
    def mark_running(self, index: int) -> None:
        """The episode continues: the next step steps the environment."""
    def mark_needs_reset(self, index: int) -> None:
        """The episode has ended: the next step is a reset with autoreset, otherwise exceptional."""
    def mark_pending_truncation(self, index: int) -> None:
        """The environment was restarted: its next step is exceptional."""
    def add_info(self, index: int, info: dict[str, Any]) -> None:
        """Add an environment's info to those of this command."""
    def take_infos(self) -> list[tuple[int, dict[str, Any]]]:
        """Hand over the infos of this command: pairs (index of the environment in the batch, info)."""

ENV_ABI: int
AUTORESET_NEXT_STEP: int
AUTORESET_SAME_STEP: int
AUTORESET_DISABLED: int
STEP_NEEDS_CONVERSION: int
STEP_NEEDS_RESET: int

def built_in_envs() -> dict[str, tuple[int, int, int]]:
    """The built-in environments by name: address of the spec, max_episode_steps, num_agents."""

def env_layout() -> tuple[int, int, int, int]:
    """The sizes in bytes of memlane_spec, memlane_field, memlane_setting and memlane_envs."""

class EnvHost:
    """Runs the environments of a C library on arrays that Python allocated. One thread at a time."""

    def __init__(
        self,
        spec: int,
        num_envs: int,
        autoreset_mode: int,
        max_episode_steps: int,
        settings: Sequence[float],
        arrays: dict[str, Any],
        num_threads: int,
        keep_alive: object,
    ) -> None: ...
    def init(self) -> str | None:
        """Call the environment's init; return its error message, or None."""
    def reset(self, mask: object = None) -> None:
        """Start new episodes where the mask is True, or everywhere."""
    def step(self, actions: object) -> int:
        """Step all environments; return how many episodes ended, or STEP_NEEDS_CONVERSION or STEP_NEEDS_RESET."""
    def step_stored(self) -> int:
        """Like step(), with the actions that are in the host's array."""
    def send(self, envs: Sequence[int]) -> None:
        """Start a step of these environments on background threads."""
    def receive(self, min_completed: int, timeout: float | None = None) -> list[int] | None:
        """The environments whose step is complete, at least min_completed of them; None after timeout seconds."""
    def render(self, index: int, image: object) -> None:
        """Draw an environment into an array of shape (height, width, 3)."""
    @property
    def threads(self) -> int:
        """The number of threads that the next step uses."""
    @property
    def step_ns(self) -> float:
        """Measured duration of a step of all environments on one thread, in ns."""
    def close(self) -> None:
        """Stop the background threads and call the environment's close."""
