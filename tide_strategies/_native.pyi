"""The native core: a shared-memory arena between processes of one host, and the replay of encoded schedules.

Linux only; links neither torch nor CUDA. Bad arguments raise ``ValueError``, refusals of the operating system
``OSError`` with its errno.
"""

import builtins
from collections.abc import Sequence
from typing import Any, Literal

Status = Literal["ok", "timeout", "peer_dead", "aborted", "mismatch"]

def advise_huge(address: int, bytes: int) -> None:
    """Ask for huge pages behind private memory that is about to be written. Advice: it never fails."""

def kernel_variants() -> list[str]:
    """The instruction-set variants of the arithmetic that this processor can run, best last; all give the same bits."""

def kernel_variant() -> str:
    """The variant in use."""

def use_kernel_variant(name: str) -> None:
    """Choose a variant for this process (for tests)."""

class Arena:
    """A sealed, private memory file with a control region (header, call tags, counter cells) at its front."""

    @staticmethod
    def create(ranks: int, rank: int, counters: int) -> Arena:
        """Create the file, with ``counters`` counters that have one cell per writer rank."""
    @staticmethod
    def attach(fd: int, ranks: int, rank: int, counters: int) -> Arena:
        """Attach to a file made by :meth:`create`; ``fd`` is duplicated. Anything that does not fit is refused."""
    @staticmethod
    def available_bytes(proc: str = "/proc") -> int:
        """How much may be reserved: the least of MemAvailable, the room in the memory cgroups, and RLIMIT_FSIZE."""
    @property
    def fd(self) -> int:
        """The file descriptor, owned by the arena."""
    @property
    def ranks(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def counters(self) -> int: ...
    @property
    def control_bytes(self) -> int:
        """Size of the control region: the first offset that is free for use."""
    @property
    def bytes(self) -> int:
        """Length of the file."""
    @property
    def allocated_bytes(self) -> int:
        """Memory that the file holds."""
    def reserve(self, offset: int, bytes: int) -> None:
        """Get memory for the range, widened to whole pages; ``OSError`` (ENOMEM, ENOSPC, EFBIG) if there is none.

        Any rank may call it, and repeating it is free. What a failed call got stays until :meth:`release`.
        """
    def release(self, offset: int, bytes: int) -> None:
        """Give the memory of the whole pages in the range back; it reads as zeros afterwards."""
    def watch(self, rank: int, pid: int) -> None:
        """Let waits on ``rank`` notice that process ``pid`` is dead; ``ProcessLookupError`` if it is already."""
    def lose(self, rank: int) -> None:
        """Let waits of this process on ``rank`` of another host end as for a dead peer, unless they are fulfilled."""
    def deliver(self, counter: int, writer: int, amount: int = 1, seq: int = 0, tag: int = 0) -> None:
        """Add to the cell of a ``writer`` whose notifications this process brings, and wake who waits.

        ``seq`` and ``tag`` tell of the writer's call (0: nothing to tell). One thread for each writer.
        """
    def abort(self, code: int, message: builtins.bytes, rank: int = -1) -> bool:
        """Record the abort (the first one wins, which the result tells) and end every wait of every rank.

        ``code`` fits 32 bits; 400 bytes of the message are kept; ``rank`` is who gives up (-1: this one).
        """
    def aborted(self) -> tuple[int, int, builtins.bytes] | None:
        """Rank, code and message of the abort, if there was one."""

class Mapping:
    """A shared mapping of a page-aligned, reserved range of the arena; unmapped when dropped."""

    def __init__(self, arena: Arena, offset: int, bytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def tensor(self, byte_offset: int, numel: int, dtype: str) -> Any:
        """See :meth:`Window.tensor`."""

class Window:
    """A range of virtual addresses whose contents can be exchanged. At first, any access faults."""

    def __init__(self, bytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def map(self, arena: Arena, offset: int) -> None:
        """Show the arena's range at ``offset`` (page-aligned, reserved). Addresses and tensors stay."""
    def poison(self) -> None:
        """Show private pages of 0xFF (NaN in every floating-point type); writes to them reach nobody."""
    def tensor(self, byte_offset: int, numel: int, dtype: str) -> Any:
        """A writable one-dimensional DLPack object over part of the window, for ``torch.from_dlpack``.

        ``dtype`` is a torch name without ``torch.``. The tensor made from it has its own storage, at offset zero,
        and keeps the window alive. Two threads must not remap and use it at once.
        """

class Outcome:
    """How a replay ended, and if not well, where."""

    @property
    def status(self) -> Status: ...
    @property
    def op(self) -> int:
        """Index of the op that failed; -1 if none did (also if the arena was aborted beforehand)."""
    @property
    def writer(self) -> int:
        """Rank that was awaited; -1 if none."""
    @property
    def counter(self) -> int:
        """Physical counter that was awaited; -1 if none."""
    @property
    def expected(self) -> int:
        """Value awaited, modulo 2**32."""
    @property
    def seen(self) -> int:
        """Value found, modulo 2**32."""
    @property
    def waited_s(self) -> float:
        """Seconds spent waiting, over all awaits."""
    @property
    def peer_seq(self) -> int:
        """The awaited rank's call with this call's number, or else its latest; -1 if it has begun none."""
    @property
    def peer_tag(self) -> int:
        """The tag of that call; -1 if none."""

class Call:
    """One use of a program. It keeps its counters' base values, so its streams may run at different times."""

    @property
    def seq(self) -> int:
        """Number of this call among all of this rank on the arena, from 1."""
    def run(self, stream: int, timeout_s: float) -> Outcome:
        """Run one stream without the GIL. All its waits together end within ``timeout_s`` seconds.

        A signal handler that raises (Ctrl-C) ends it too.
        """

class Program:
    """An encoded schedule. Malformed input raises ``ValueError`` naming the op and the word.

    Args:
        ops: little-endian int64, 12 words per op. Word 0 is the opcode, the rest:

            0 copy: src base, src offset, dst base, dst offset, rows, elements per row, src pitch, dst pitch,
            src dtype, dst dtype (0 fp32, 1 bf16, 2 raw bytes; offsets and pitches in bytes)

            1 sum: dst base, dst offset, elements, src dtype, dst dtype, number of sources, index of the first
            source, flags (1: add to what dst holds; 2: divide by the call's divisor before that). fp32, in source order

            2 zero: dst base, dst offset, bytes

            3 notify: counter, amount, reader rank (-2: every other rank; all the same here, where readers share cells)

            4 await: counter, writer rank, count (relative to the counter's total over all earlier calls)
        sources: pairs of little-endian int64: base, byte offset.
        streams: first op and number of ops per stream.
        n_bases: how many addresses a call brings.
        n_counters: how many counters a call brings.
        advance: counter, writer rank, amount: how far that writer's cell comes in one call.
    """

    def __init__(
        self,
        ops: bytes,
        sources: bytes,
        streams: Sequence[tuple[int, int]],
        n_bases: int,
        n_counters: int,
        advance: Sequence[tuple[int, int, int]],
    ) -> None: ...
    @property
    def n_ops(self) -> int: ...
    @property
    def n_streams(self) -> int: ...
    def begin(self, arena: Arena, bases: Sequence[int], counters: Sequence[int], tag: int, divisor: float) -> Call:
        """Begin a call: note the counters' bases, advance this rank's totals, publish the tag (32 bits).

        All ranks of the arena begin their calls in the same order. A refused call (``ValueError``) changes nothing.
        """
    def replay(
        self,
        arena: Arena,
        bases: Sequence[int],
        counters: Sequence[int],
        tag: int,
        divisor: float,
        timeout_s: float,
    ) -> Outcome:
        """:meth:`begin` and all streams in order, within ``timeout_s`` seconds of waiting altogether."""

# A submodule at run time; a class here, because one file describes it all.
class cuda:
    """The same over the GPUs of one host: memory that ranks share, and programs that streams run.

    The driver (``libcuda.so.1``, or what ``TIDE_LIBCUDA`` names) is loaded on first use, and everything happens in the
    devices' primary contexts, whatever context is current. What the driver refuses raises ``RuntimeError`` with the
    call and the driver's words, lack of memory ``OSError`` with ENOMEM, a wait beyond its bound ``TimeoutError``.
    """

    @staticmethod
    def probe() -> dict[str, Any]:
        """``available``, ``reason`` (why not), ``driver_version``, ``devices``. Never raises; makes no context."""
    @staticmethod
    def device_info(ordinal: int) -> dict[str, Any]:
        """What a device is and can do; makes no context.

        ``name``, ``compute_capability`` (two numbers), ``total_memory``, ``async_engines``, ``stream_mem_ops``,
        ``can_use_64_bit_stream_mem_ops``, ``posix_fd`` (memory can be shared by descriptor), ``multicast_supported``
        (by the hardware; whether it may be used: :meth:`multicast_refusal`), ``pci_bus_id``, ``uuid``,
        ``granularity`` (bytes that allocations are rounded up to).
        """
    @staticmethod
    def can_access_peer(a: int, b: int) -> bool:
        """Whether device ``a`` can address memory of device ``b``."""
    @staticmethod
    def order(from_stream: int, to_stream: int) -> None:
        """Let one stream continue only after what another holds now. Either may be a default stream."""
    @staticmethod
    def copy(target: int, source: int, bytes: int, stream: int) -> None:
        """Copy bytes from one device address to another, which may be a peer's, on a stream of one's own."""
    @staticmethod
    def be_patient(seconds: float) -> None:
        """Let the host wait for the device this long where it has to, if that is longer than what was set before."""
    @staticmethod
    def settle(device: int, seconds: float) -> bool:
        """Wait until the device is through with everything that it has been given; False if it takes longer."""

    class Allocation:
        """Physical memory of a device that other processes can map. ``OSError`` (ENOMEM) if there is not enough."""

        def __init__(self, device: int, bytes: int) -> None: ...
        @staticmethod
        def from_fd(fd: int, bytes: int, device: int) -> cuda.Allocation:
            """Memory that another process exported. ``device`` is the own one; ``fd`` stays the caller's to close."""
        def export_fd(self) -> int:
            """A new descriptor of the memory, the caller's to close."""
        @property
        def device(self) -> int: ...
        @property
        def bytes(self) -> int:
            """Bytes asked for, rounded up to the device's granularity."""

    class Mapping:
        """All of an allocation at an address of ``device``; it goes with the last reference and the last tensor.

        Memory is unmapped only when the device is through with what it was given before; if that takes more than two
        seconds (a peer is awaited that never comes), it stays mapped until the process ends.
        """

        def __init__(self, allocation: cuda.Allocation, device: int) -> None: ...
        @property
        def device(self) -> int: ...
        @property
        def address(self) -> int: ...
        @property
        def bytes(self) -> int: ...
        def tensor(self, byte_offset: int, numel: int, dtype: str) -> Any:
            """See :meth:`_native.Window.tensor`; the DLPack object is on the device."""

    class Window:
        """A range of device addresses whose contents can be exchanged. At first, any access faults."""

        def __init__(self, device: int, bytes: int) -> None: ...
        @property
        def device(self) -> int: ...
        @property
        def address(self) -> int: ...
        @property
        def bytes(self) -> int:
            """Bytes asked for, rounded up to the device's granularity."""
        def map(self, allocation: cuda.Allocation) -> None:
            """Show the first :attr:`bytes` of an allocation. Addresses and tensors stay.

            Waits for the device if another allocation was shown (``TimeoutError`` after the time of
            :meth:`be_patient`, a minute unless set, and nothing has changed); does nothing if it was this one.
            """
        def unmap(self) -> None:
            """Show nothing; waits like :meth:`map`."""
        def poison(self) -> None:
            """The same as :meth:`unmap`: any access faults, which ends the use of the device by this process."""
        def tensor(self, byte_offset: int, numel: int, dtype: str) -> Any:
            """See :meth:`_native.Window.tensor`; the DLPack object is on the device."""

    class Stream:
        """A non-blocking CUDA stream. Lower priorities are more urgent; what the device lacks is rounded."""

        def __init__(self, device: int, priority: int) -> None: ...
        @property
        def device(self) -> int: ...
        @property
        def handle(self) -> int:
            """For ``torch.cuda.ExternalStream``; valid while this object lives."""

    class HostMemory:
        """Pinned memory of the host that streams copy to and from, and words by which they tell how far they have come.

        Threads that send and receive its bytes need nothing of the driver. Device memory is given by address, streams
        by handle; everything that takes a stream returns at once. ``OSError`` (ENOMEM) if there is not enough.

        Args:
            bytes: how much.
            marks: how many words.
        """

        def __init__(self, device: int, bytes: int, marks: int = 0) -> None: ...
        @property
        def address(self) -> int:
            """Where it begins, for the host; valid while this object lives."""
        @property
        def bytes(self) -> int: ...
        @property
        def pinned_bytes(self) -> int:
            """All of it, words too."""
        def fetch(self, offset: int, source: int, bytes: int, stream: int) -> None:
            """Copy from device memory to byte ``offset``."""
        def store(self, target: int, offset: int, bytes: int, stream: int) -> None:
            """Copy from byte ``offset`` to device memory."""
        def mark(self, index: int, value: int, stream: int) -> None:
            """Set a word when the stream has come here, after everything that it did before."""
        def marked(self, index: int, value: int, seconds: float) -> bool:
            """Wait until a word has come to ``value``, of 32 bits and going round; False after so many seconds."""

    class Control:
        """Counter cells in device memory, and the record of the waits that the device was given.

        The cell of (counter, writer) is the 32-bit word at ``(counter * ranks + writer) * 16`` bytes of a rank's
        control memory. A notification stores the writer's new total there, in the memory of every reader.

        The own cells are zeroed: let all ranks meet afterwards, before any of them notifies.

        Args:
            own: this rank's control memory, at least :meth:`control_bytes`, mapped for ``device``.
            peers: every other rank's, mapped for ``device``; None where nothing is sent to, and for the own rank.
        """

        def __init__(
            self,
            device: int,
            ranks: int,
            rank: int,
            counters: int,
            own: cuda.Mapping,
            peers: Sequence[cuda.Mapping | None],
        ) -> None: ...
        @staticmethod
        def in_host_memory(device: int, ranks: int, rank: int, counters: int) -> cuda.Control:
            """One whose cells are in host memory, for waits alone: threads of this process :meth:`deliver`."""
        def deliver(self, counter: int, writer: int, total: int) -> None:
            """Let the writer's cell, in host memory, come to ``total``; nothing happens once it is released."""
        def delivered(self, counter: int, writer: int, total: int, seconds: float) -> bool:
            """Wait until the writer's cell, in host memory, has come to ``total``; False after so many seconds."""
        @staticmethod
        def control_bytes(ranks: int, counters: int) -> int:
            """Bytes of control memory that every rank needs."""
        @property
        def device(self) -> int: ...
        @property
        def ranks(self) -> int: ...
        @property
        def rank(self) -> int: ...
        @property
        def counters(self) -> int: ...
        @property
        def pinned_bytes(self) -> int:
            """Pinned host memory: the record, copies of the cells, and the cells themselves where they are there."""
        def outstanding(self) -> int:
            """Runs of waits that the device was given and has not finished."""
        def overdue(self, seconds: float) -> list[dict[str, Any]]:
            """Waits that have lasted ``seconds`` since this method first saw that the device has come to them.

            Each has ``k`` (number of the run of waits), ``seq`` and ``tag`` of the call, ``counter`` (physical),
            ``writer``, ``expected``, ``seen`` (None if the cells could not be read within a second) and ``blocked_s``.
            Of a run of waits only those are named whose cell falls short.
            """
        def release_after(self, seconds: float) -> None:
            """Do what :meth:`release` does once a wait has blocked its stream for so long, from a native thread.

            It works while the interpreter's lock is held by a call that waits for room in the driver. Called once.
            """
        def release(self) -> bool:
            """Fail-stop: let every present and future wait of this control pass. What is computed then is worthless.

            The own cells become 2**30 more than this rank expects them to be in the end, and streams enqueued from now
            on do not wait. A peer that goes on may store a smaller total over that: repeat until :meth:`outstanding` is
            0. False if the device did not take it within about three seconds.
            """
        @property
        def released(self) -> bool:
            """Whether :meth:`release` was called."""

    class Call:
        """One use of a program; its streams may be enqueued at different times, on different CUDA streams."""

        @property
        def seq(self) -> int:
            """Number of this call among all of this rank on the control, from 1."""
        def enqueue(self, stream_index: int, cuda_stream: int) -> None:
            """Give one stream of the program to a CUDA stream of the control's device, by handle. Returns at once.

            Default streams (handles 0, 1, 2) raise ``ValueError``. Calls that notify the same counter must reach the
            device in their order: it stores totals. Program, control, and the memory that is read and written must stay
            until the device is through.
            """
        def enqueue_lanes(self, cuda_streams: Sequence[int]) -> None:
            """Give all streams to the device, in order, each to the CUDA stream (by handle) of its lane."""

    class Program:
        """An encoded schedule, as :class:`_native.Program` has it, for the device.

        Differences: word 3 of a notification (reader rank, or -2 for every other rank) counts; copies do not cast, rows
        may not overlap, and copies in a row are given to the driver at once, in no order; a counter is notified by one
        stream only, by as much in all as ``advance`` says for this rank; no rank awaits itself.

        Args:
            readers: the ranks that "every other rank" stands for; all of the control's if there are none.
            lanes: a number for each stream: streams of one lane are parts of one, which
                :meth:`Call.enqueue_lanes` gives to the device in order. By default each is a lane of its own.
        """

        def __init__(
            self,
            ops: bytes,
            sources: bytes,
            streams: Sequence[tuple[int, int]],
            n_bases: int,
            n_counters: int,
            advance: Sequence[tuple[int, int, int]],
            readers: Sequence[int] = (),
            lanes: Sequence[int] = (),
        ) -> None: ...
        @property
        def n_ops(self) -> int: ...
        @property
        def n_streams(self) -> int: ...
        def segments(self, stream: int) -> list[tuple[str, int]]:
            """How a stream reaches the driver: ``copies``, ``clear``, ``signals``, ``sums``; how many."""
        @property
        def sum_kinds(self) -> list[tuple[bool, int, int, int, bool]]:
            """What kernels are needed: (lands, sources, dtype of these, dtype of the sum, accumulates) each."""
        @property
        def sum_launches(self) -> int:
            """Kernel launches of a call; 0 before :meth:`set_sum_kernel`."""
        @property
        def sum_tiles(self) -> int:
            """Rows of the tile table; 0 before :meth:`set_sum_kernel`."""
        def set_sum_kernel(
            self,
            function: int,
            threads: int,
            shared_bytes: int,
            ctas: int,
            max_pointers: int,
            tile: int,
            extra_null_pointers: int,
            device: int | None = None,
            kind: int = 0,
        ) -> None:
            """Set what adds the sums of a kind, a CUfunction as ``kernels.tiles`` describes; upload its table of tiles.

            Unless they land, sums have staged sources at a constant distance in one area, then one elsewhere, and do
            not accumulate: otherwise ``ValueError``. Sums of a kind in a row are one launch, unless the staging, the
            output or the scaling changes, there are more than ``max_pointers`` addresses, or one accumulates where
            another of them does.

            Args:
                threads, shared_bytes: of a thread block.
                ctas: thread blocks at most.
                max_pointers: gradient addresses that the kernel takes.
                tile: elements that a tile has at most.
                extra_null_pointers: null pointers that follow the arguments.
                device: where the function was loaded; by default the device of the current context.
                kind: number of the kind in :attr:`sum_kinds`.
            """
        def begin(
            self, control: cuda.Control, bases: Sequence[int], counters: Sequence[int], tag: int, divisor: float
        ) -> cuda.Call:
            """Begin a call: note the counters' bases, advance this rank's totals; see :meth:`_native.Program.begin`."""

    @staticmethod
    def multicast_switched_off() -> str:
        """Which variable of the environment forbids multicast, as ``NAME=value``; empty if none does."""
    @staticmethod
    def multicast_refusal(device: int) -> str:
        """Why multicast may not be used on a device, in words; empty if it may. Makes no context.

        The switches of the environment come first, then the driver, then the device.
        """

    class Multicast:
        """An object whose addresses stand for the memory of several devices at once.

        All ranks of a node make, add, bind and map it together, with a barrier after each step. Everything here raises
        ``RuntimeError`` with the words of :meth:`multicast_refusal`, before any other call, if there are any.
        """

        def __init__(self, device: int, devices: int, bytes: int) -> None:
            """Create one for ``devices`` devices; on one rank only."""
        @staticmethod
        def whole_bytes(device: int, devices: int, bytes: int) -> int:
            """``bytes`` widened to what an object needs; the memory to bind must have as many."""
        @staticmethod
        def from_fd(fd: int, device: int, devices: int, bytes: int) -> cuda.Multicast:
            """The object that another rank created. ``fd`` stays the caller's to close."""
        def export_fd(self) -> int:
            """A new descriptor of the object, the caller's to close."""
        def add_device(self) -> None:
            """Add this rank's device."""
        def bind(self, memory: cuda.Allocation) -> None:
            """Put this rank's memory behind the object, once all devices have been added."""
        def map(self) -> None:
            """Give it an address here. It goes with this object, when the device is through with its work."""
        @property
        def device(self) -> int: ...
        @property
        def address(self) -> int:
            """0 until :meth:`map`."""
        @property
        def bytes(self) -> int: ...

    class Kernel:
        """A kernel out of a compiled image (a cubin, or PTX), in the device's primary context."""

        def __init__(self, device: int, image: builtins.bytes, name: str) -> None: ...
        @property
        def function(self) -> int:
            """The driver's handle, for :meth:`Program.set_sum_kernel`; valid while this object lives."""
        @property
        def device(self) -> int: ...
        def launch(
            self,
            table: int,
            first: int,
            count: int,
            output: int,
            divisor: float,
            addresses: Sequence[int],
            ctas: int,
            threads: int,
            stream: int,
        ) -> None:
            """Run it over ``count`` rows, from ``first`` on, of a table in device memory, with ``ctas`` blocks at most.

            ``addresses`` must be as many as the kernel takes. What is not finite as ``divisor``, or zero, raises
            ``ValueError``.
            """

    @staticmethod
    def landing_source() -> str:
        """The text of the landing kernel (``csrc/cuda/multimem_landing.cu``), to be compiled for a device."""

# A submodule, too.
class nccl:
    """The NCCL that is in this process already (torch's), its windows and host RMA.

    No copy is ever loaded. What NCCL refuses raises ``RuntimeError`` with the call and NCCL's words, lack of memory
    ``OSError`` with ENOMEM, and what is not through within ``timeout_s`` seconds ``TimeoutError``: the communicator is
    aborted then. All communicators are non-blocking underneath.
    """

    NEEDED: str
    """The oldest version that serves."""

    @staticmethod
    def probe() -> dict[str, Any]:
        """``available``, ``reason`` (why not), ``version`` (None without a library), ``path``. Never raises."""
    @staticmethod
    def unique_id() -> bytes:
        """What the ranks of a new communicator have in common; made on one of them and sent to all."""

    class Communicator:
        """Ranks that NCCL connects, each with one device."""

        @staticmethod
        def join(
            device: int,
            id: bytes,
            ranks: int,
            rank: int,
            contexts: int,
            signals: int,
            channels: int,
            multicast: bool,
            timeout_s: float,
        ) -> nccl.Communicator:
            """Connect to all ranks that name the same ``id``. Collective.

            ``RuntimeError`` if multicast is not wanted, or switched off in the environment, but this NCCL could use it
            (``NCCL_NVLS_ENABLE=0`` keeps it from that).

            Args:
                contexts: RMA contexts, each a pair of queues to every rank; 0 for addresses only.
                signals: signals of a peer in a context.
                channels: cap of what NCCL's own collectives take up.
                multicast: whether NCCL may make multicast objects when memory is registered.
            """
        def split(
            self, color: int, key: int, contexts: int, signals: int, channels: int, timeout_s: float
        ) -> nccl.Communicator:
            """The ranks that name the same ``color``, in the order of their keys, for puts. Collective."""
        @property
        def in_call_s(self) -> float:
            """Seconds that a call which meets no peer has been in NCCL by now; 0 if there is none."""
        @property
        def device(self) -> int: ...
        @property
        def ranks(self) -> int: ...
        @property
        def rank(self) -> int: ...
        @property
        def contexts(self) -> int: ...
        @property
        def hosts(self) -> int:
            """In how many groups the ranks reach each other's memory directly."""
        @property
        def host_rma(self) -> bool: ...
        @property
        def multimem(self) -> bool:
            """Whether NCCL would use multicast."""
        @property
        def closed(self) -> bool: ...
        def close(self, timeout_s: float) -> None:
            """End it in order, when every rank does and all windows are closed; else abort it and raise."""
        def abort(self) -> None:
            """End it at once on this rank; from any thread."""

    class Memory:
        """Device memory that can be registered; a multiple of the device's granularity."""

        def __init__(self, device: int, bytes: int) -> None: ...
        @property
        def device(self) -> int: ...
        @property
        def address(self) -> int: ...
        @property
        def bytes(self) -> int: ...
        def tensor(self, byte_offset: int, numel: int, dtype: str) -> Any:
            """See :meth:`_native.Window.tensor`; the DLPack object is on the device."""

    class Window:
        """A memory registered with a communicator; all its ranks register one of the same size. Collective.

        A whole allocation: of NCCL's own, or a mapping of a ``cuda.Allocation``.
        """

        def __init__(self, comm: nccl.Communicator, memory: nccl.Memory | cuda.Mapping, timeout_s: float) -> None: ...
        @property
        def bytes(self) -> int: ...
        @property
        def address(self) -> int: ...
        def peer_address(self, peer: int) -> int:
            """Where this process sees the memory of a rank of the communicator; 0 if only puts reach it."""
        def close(self, timeout_s: float) -> None:
            """Take it back. Nothing may be under way in it."""

    class Rma:
        """Puts, signals and waits on CUDA streams, none of them a default stream. Peers are ranks of ``comm``."""

        def __init__(self, comm: nccl.Communicator, timeout_s: float) -> None:
            """``timeout_s`` bounds the host's part of every call."""
        def put(
            self,
            peer: int,
            source: int,
            bytes: int,
            source_window: nccl.Window,
            window: nccl.Window,
            offset: int,
            signal: int,
            context: int,
            stream: int,
        ) -> None:
            """Copy from the address ``source`` within ``source_window`` to ``offset`` of the peer's ``window``.

            Then its signal of this rank grows by 1. No bytes: only that.
            """
        def signal(self, peer: int, signal: int, context: int, stream: int) -> None:
            """Let the peer's signal of this rank grow by 1."""
        def wait(self, signals: Sequence[tuple[int, int, int, int]], tag: int, stream: int) -> None:
            """Let the stream go on when so many further signals have come: (peer, count, signal, context) each."""
        def overdue(self, seconds: float) -> list[dict[str, Any]]:
            """Waits that have blocked their stream for so long: ``tag``, ``signals``, ``blocked_s``.

            Time counts from the first call that sees a wait begun.
            """
        def outstanding(self) -> int:
            """Waits that are not over."""
