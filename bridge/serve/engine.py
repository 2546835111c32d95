"""One thread that owns the model and makes all sequences together, and the asyncio side that waits for them.

That thread alone touches the `Batch`: what the event loop wants (a sequence more, one less) goes through a list that
the thread looks at between steps. What a step made goes back in one call of the loop. Requests are prepared in up to
two other threads. Nothing waits for a thread whose result nobody wants any more, the end of the process neither.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bridge.errors import BridgeError
from bridge.runtime.model import Model
from bridge.runtime.replies.batch import Generation, Reader
from bridge.runtime.replies.generation import ScoredToken
from bridge.runtime.sampling import Sampler

_PREPARED = 2  # requests at a time
_LAST_STEP = 2  # seconds that the end waits for the step that is being computed

T = TypeVar("T")


class Refused(Exception):
    """The engine takes no more sequences now; `stopping`: and will not again."""

    def __init__(self, message: str, stopping: bool = False):
        super().__init__(message)
        self.stopping = stopping


@dataclass(frozen=True)
class Update:
    """What came of a sequence: text, and the tokens it is of; how it ended, or an error with its status of HTTP."""

    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    finish: str | None = None
    error: str | None = None
    status: int = 400


@dataclass
class Job:
    """A sequence to make; see `Batch.add`."""

    sampler: Sampler
    prompt: list[int]
    max_tokens: int
    stop: list[str]
    conversation: bool = False
    reader: Reader | None = None
    shown: Collection[int] = ()


class Stream:
    """The updates of a sequence as they come; used by the event loop's thread, but for `generation`."""

    def __init__(self) -> None:
        self.generation: Generation | None = None
        self.begun = self.first = time.monotonic()  # of the request, and of the first update
        self.ended = False
        self.counted = 0  # tokens drawn that the engine has counted
        self._updates: asyncio.Queue[Update] = asyncio.Queue()

    def put(self, update: Update) -> None:
        """Hand in an update; none after the last."""
        if self._updates.empty() and self.first == self.begun:
            self.first = time.monotonic()
        if not self.ended:
            self.ended = update.finish is not None or update.error is not None
            self._updates.put_nowait(update)

    async def __aiter__(self) -> AsyncIterator[Update]:
        while True:
            update = await self._updates.get()
            yield update
            if update.finish is not None or update.error is not None:
                return


class Engine:
    """Runs sequences of a model until `stop`.

    sequences  made at the same time
    waiting    further ones that may wait
    draft      what guesses tokens, see `Model.batch`
    """

    def __init__(self, model: Model, sequences: int, waiting: int, draft: str | Path | None = None):
        self.model, self.draft = model, draft
        self.batch = model.batch(sequences, draft)
        self.most = sequences + waiting
        self.open: set[Stream] = set()
        self.stopping = False
        self.kept_tokens = 0  # of prompts
        self.generated_tokens = 0
        self.cancelled = 0
        self._wanted: list[Callable[[], None]] = []
        self._streams: dict[int, Stream] = {}  # by the id of the generation
        self._wake = threading.Condition()
        self._over = False
        self.loop: asyncio.AbstractEventLoop | None = None  # where streams are read
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._preparing: set[threading.Thread] = set()
        self._places = asyncio.Semaphore(_PREPARED)

    def start(self) -> None:
        """Begin; called in the event loop."""
        self.loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End what is left, and the thread, if it can end soon."""
        self.stopping = True
        self.end_all()
        with self._wake:
            self._over = True
            self._wake.notify()
        late = time.monotonic() + _LAST_STEP
        while self._thread.is_alive() and time.monotonic() < late:
            await asyncio.sleep(0.01)

    @property
    def computing(self) -> bool:
        """Whether a thread still runs, after `stop`."""
        return self._thread.is_alive() or bool(self._preparing)

    async def aside(self, work: Callable[[Callable[[], bool]], T]) -> T:
        """The result of `work` in a thread; it gets a function that says whether somebody still waits for the result.

        No more than two run at a time, counted until they end, whoever waits for them.
        """
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def report(put: Callable[[T], None] | Callable[[BaseException], None], outcome: Any) -> None:
            self._preparing.discard(thread)
            self._places.release()
            if not result.done():
                put(outcome)

        def run() -> None:
            try:
                outcome: Any = result.set_result, work(lambda: not result.cancelled())
            except BaseException as problem:
                outcome = result.set_exception, problem
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(report, *outcome)

        thread = threading.Thread(target=run, name="prepare", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the machine has no thread left
            self._places.release()
            raise
        self._preparing.add(thread)
        return await result

    def check_room(self, replies: int = 1) -> None:
        """Raise Refused where so many more replies cannot even wait."""
        if self.stopping:
            raise Refused("the server is stopping; ask another one, or later", stopping=True)
        if len(self.open) + replies > self.most:
            raise Refused(f"{len(self.open)} replies are being made or waited for; the most is {self.most}. Try later")

    def submit(self, jobs: list[Job]) -> list[Stream]:
        """Queue sequences; each stream must be given to `release`. Raises Refused where too many wait already."""
        self.check_room(len(jobs))
        streams = [Stream() for _ in jobs]
        self.open.update(streams)
        for stream, job in zip(streams, jobs, strict=True):
            self._want(partial(self._add, stream, job))
        return streams

    def release(self, streams: list[Stream]) -> None:
        """Nobody waits for these any more: those that are not finished are cancelled."""
        for stream in streams:
            if stream in self.open:
                self.open.remove(stream)
                if not stream.ended:
                    self.cancelled += 1
                    self._want(partial(self._cancel, stream))

    def end_all(self) -> None:
        """End all sequences with an error that says why."""
        for stream in list(self.open):
            stream.put(Update(error="the server was stopped before the reply was complete", status=503))
            self._want(partial(self._cancel, stream))

    # the thread

    def _want(self, action: Callable[[], None]) -> None:
        with self._wake:
            self._wanted.append(action)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._wanted or self._over or self.batch.busy()):
                    self._wake.wait()
                if self._over:
                    break
                wanted, self._wanted = self._wanted, []
            for action in wanted:
                action()
            self._advance()
        self.batch.close()

    def _add(self, stream: Stream, job: Job) -> None:
        try:
            stream.generation = self.batch.add_with(
                job.sampler, job.prompt, job.max_tokens, job.stop, job.conversation, job.reader, job.shown
            )
            self._streams[id(stream.generation)] = stream
        except BridgeError as problem:
            self._deliver([(stream, Update(error=str(problem)))])

    def _cancel(self, stream: Stream) -> None:
        if stream.generation is not None:
            self.batch.cancel(stream.generation)
            self._streams.pop(id(stream.generation), None)

    def _advance(self) -> None:
        try:
            changed = self.batch.advance()
        except Exception as problem:  # of the machine (no memory) or ours: these sequences are lost, the server is not
            failed = Update(error=f"the model failed: {problem!r}", status=500)
            self._deliver([(stream, failed) for stream in self._streams.values()])
            self._streams.clear()
            self.batch.close()
            return
        updates = []
        for generation in changed:
            stream = self._streams.get(id(generation))
            if stream is None:
                continue
            text, tokens = generation.take()
            error = None if generation.error is None else str(generation.error)
            self.generated_tokens += generation.drawn - stream.counted
            stream.counted = generation.drawn
            if generation.finish is not None:
                self.kept_tokens += generation.kept
                del self._streams[id(generation)]
            if text or tokens or generation.finish is not None or generation.drawn == 1:
                updates.append((stream, Update(text, tuple(tokens), generation.finish, error)))
        self._deliver(updates)

    def _deliver(self, updates: list[tuple[Stream, Update]]) -> None:
        def put() -> None:
            for stream, update in updates:
                stream.put(update)

        if updates and self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(put)
