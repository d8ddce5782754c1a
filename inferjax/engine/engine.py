"""The engine: as many requests at a time as the device can hold, one result whatever the load."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import tqdm

from inferjax.checkpoint.load import Model
from inferjax.config import Exec
from inferjax.engine.buckets import BucketPlan
from inferjax.engine.completion import Completion, Delta, Tokens
from inferjax.engine.config import EngineConfig
from inferjax.engine.core import Core
from inferjax.engine.dispatch import Programs
from inferjax.engine.programs import DevicePrograms
from inferjax.engine.request import Desk, Prompt, Request, check_labels, decide_seed
from inferjax.engine.sizes import make_scheduler, make_sizes
from inferjax.engine.stats import SequenceView, Stats
from inferjax.engine.track import failed_completion, last_delta, make_track, view_of
from inferjax.errors import EngineFull, InferjaxError, InvalidInput, InvalidSampling, ShapeError
from inferjax.models.decoder import check_head
from inferjax.params import Params
from inferjax.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class Engine:
    """Continuous batching over the pure functions, for one thread.

    A request's tokens and log-probabilities do not depend on what runs beside it: up to float32
    rounding, and bit for bit with `exec=Exec(exact=True)`. `programs` and `clock` are for tests.

    Raises: UnsupportedConfig; UnsupportedModel for a checkpoint that predicts no tokens; OutOfPages
      when the cache does not fit.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig = EngineConfig(),
        *,
        exec: Exec = Exec(),
        programs: Programs | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_head(model.config, "vocabulary")
        sizes = make_sizes(model, config, exec)
        self._model, self._config, self._exec = model, config, exec
        self._sizes, self._clock = sizes, clock
        self._desk = Desk(
            model_config=model.config,
            tokenizer=model.tokenizer,
            config=config,
            max_len=sizes.max_len,
            middle=sizes.middle,
        )
        self._core = Core(
            model_config=model.config,
            sizes=sizes,
            scheduler=make_scheduler(sizes, config),
            programs=programs or DevicePrograms(model, config, exec, sizes=sizes),
            overlap=config.overlap,
            clock=clock,
        )
        # Requests of `generate` and `stream`, which wait for their ends.
        self._awaited: set[str] = set()
        self._unclaimed: list[Delta] = []
        self._revision = 0

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams = GREEDY,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id; nothing runs before `step`.

        prompt: text, token ids, or a list of chat messages. priority: lower goes first.
        cache_salt: cached pages are shared only among requests of the same salt.

        Raises: InvalidInput, InvalidSampling, RequestTooLong, EngineFull.
        """
        check_labels(priority, cache_salt, request_id)
        ids = self._desk.prompt_ids(prompt)
        resolved = self._desk.sampling(sampling, len(ids))
        number = self._core.counters.requests
        name = self._free_name(number) if request_id is None else request_id
        self._check_room(name)
        request = Request(
            request_id=name,
            number=number,
            prompt_ids=ids,
            sampling=resolved,
            seed=decide_seed(resolved, self._config.seed, number),
            priority=priority,
            cache_salt=cache_salt or "",
            submitted=self._clock(),
        )
        self._core.enter(make_track(request, self._model.tokenizer, self._config, self._origin()))
        return name

    def step(self) -> list[Delta]:
        """Dispatch what can run, wait for the oldest dispatch, and return what it brought.

        After an exception the next step rebuilds the cache and computes again what was running;
        nothing that was returned comes twice.

        Raises: whatever the device raises.
        """
        deltas = self._core.step()
        if self._unclaimed:
            deltas, self._unclaimed = self._unclaimed + deltas, []
        return deltas

    def abort(self, request_id: str) -> Completion:
        """End a request at once and return what it has; others are not touched.

        No delta of it comes after that, but the `generate` or `stream` that it belongs to gets the
        completion too.

        Raises: InvalidInput for an id that is neither running nor waiting.
        """
        track = self._core.requests.get(request_id)
        if track is None:
            raise InvalidInput(
                f"no request {request_id!r} is running or waiting",
                why="it has ended, or was never submitted",
                fix="ids are what submit returned",
            )
        self._core.abort(track)
        completion = track.completion(self._clock())
        if request_id in self._awaited:
            self._unclaimed.append(last_delta(track, completion))
        else:
            self._silence({request_id})
        return completion

    @property
    def has_work(self) -> bool:
        """Whether a step could bring something."""
        return self._core.has_work or bool(self._unclaimed)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        progress: bool = False,
        on_completion: Callable[[int, Completion], object] | None = None,
    ) -> list[Completion]:
        """Run all prompts and return their completions in the same order.

        A prompt that is refused, or fails, has a completion with `error` set and the finish reason
        "error"; the others are not touched. `on_completion(index, completion)` is called as they
        end. An interrupt aborts what is left and leaves the engine usable. Prompts are submitted as
        earlier ones end, so that a long list is neither read nor kept in memory at once.

        Raises: InvalidInput for arguments that are not lists of the same length.
        """
        todo = collections.deque(enumerate(_pairs(prompts, sampling)))
        results: list[Completion | None] = [None] * len(prompts)
        mine: dict[str, int] = {}
        # As many as can run, and as many again to choose from.
        most = 2 * self._config.max_running

        def ended(index: int, completion: Completion) -> None:
            results[index] = completion
            bar.update()
            if on_completion is not None:
                on_completion(index, completion)

        try:
            with tqdm.tqdm(total=len(prompts), unit="request", disable=not progress) as bar:
                while todo or mine:
                    while todo and len(mine) < most and not self._full:
                        index, (prompt, one) = todo.popleft()
                        try:
                            name = self.submit(
                                prompt, one, priority=priority, cache_salt=cache_salt
                            )
                            mine[name] = index
                            self._awaited.add(name)
                        except InferjaxError as error:
                            ended(index, failed_completion(f"prompt-{index}", error))
                    for delta in self._own_deltas(mine):
                        if delta.completion is not None:
                            self._awaited.discard(delta.request_id)
                            ended(mine.pop(delta.request_id), delta.completion)
        finally:
            self._abandon(mine)
        return [completion for completion in results if completion is not None]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams = GREEDY,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Iterator[Delta]:
        """Yield the deltas of one request as they come; closing the iterator aborts it.

        The request is checked and queued at once.

        Raises: as `submit`; while running, the request's own error.
        """
        name = self.submit(prompt, sampling, priority=priority, cache_salt=cache_salt)
        deltas = self._stream(name)
        # A generator that has not begun could be closed without a word to the request.
        next(deltas)
        return deltas

    def warmup(self, *, progress: bool = False) -> None:
        """Compile all programs; later compilations are counted and logged with their cause."""
        if progress:
            tqdm.tqdm.write(self.buckets.describe())
        self._core.programs.warmup(progress=progress)

    def stats(self) -> Stats:
        """Return gauges and totals."""
        scheduler = self._core.scheduler
        pools = scheduler.pages.pools
        return Stats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            pages_live=tuple(pool.num_live for pool in pools),
            pages_cached=tuple(pool.num_cached for pool in pools),
            pages_free=tuple(pool.num_free for pool in pools),
            totals=dataclasses.replace(self._core.counters),
            **self._core.programs.facts(),
        )

    def sequences(self) -> list[SequenceView]:
        """Return the samples that wait or run, with their block tables, in order of submission.

        It costs time in proportion to the pages in use: for watching, not for every step.
        """
        return [
            view_of(sample)
            for request in self._core.requests.values()
            for sample in request.samples
            if sample.finish_reason is None
        ]

    def update_params(self, params: Params) -> None:
        """Take new weights of the same model, as after a training step; nothing is compiled.

        Cached prompts belong to the old weights and are not found any more.

        Raises: InvalidInput while requests run or wait; ShapeError for weights of another model.
        """
        _check_alike(params, self._core.programs.params)
        if self._core.requests:
            raise InvalidInput(
                f"{len(self._core.requests)} requests are running or waiting",
                why="their keys and values were computed with the old weights",
                fix="let them finish, or abort them first",
            )
        self._core.drain()
        self._core.programs.params = params
        self._revision += 1

    def __enter__(self) -> "Engine":
        """Return the engine; it is closed when the block ends."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the engine."""
        self.close()

    def close(self) -> None:
        """Stop listening to jax; the engine is not used afterwards."""
        self._core.programs.close()

    @property
    def buckets(self) -> BucketPlan:
        """The shapes that are compiled."""
        return self._sizes.buckets

    @property
    def max_len(self) -> int:
        """The tokens that a sequence may have, prompt included; at a time, if it may overflow."""
        return self._sizes.max_len

    def _origin(self) -> tuple[str, ...]:
        """Return what cached pages depend on beside their tokens and their salt."""
        adapter = ""  # none can be loaded yet
        layout = (self._exec.kv_dtype, self._exec.page_size, self._exec.exact)
        model = (self._model.path, self._revision, self._model.config.dtype, adapter)
        return tuple(str(part) for part in (*model, *layout))

    @property
    def _full(self) -> bool:
        return len(self._core.requests) >= self._config.max_waiting

    def _check_room(self, name: str) -> None:
        if self._full:
            raise EngineFull(
                f"{len(self._core.requests)} requests are running or waiting",
                why=f"max_waiting is {self._config.max_waiting}",
                fix="submit it again when others have ended",
            )
        if name in self._core.requests:
            raise InvalidInput(
                f"request id {name!r} is in use", why="ids name requests", fix="choose another"
            )

    def _free_name(self, number: int) -> str:
        """Return a name for a request, unless a user has taken it: then another one."""
        names = (f"request-{i}" for i in itertools.count(number))
        return next(name for name in names if name not in self._core.requests)

    def _own_deltas(self, names: Container[str]) -> list[Delta]:
        """Make a step; deltas of other requests wait for a step of their own."""
        own, others = [], []
        for delta in self.step():
            (own if delta.request_id in names else others).append(delta)
        self._unclaimed += others
        return own

    def _stream(self, name: str) -> Iterator[Delta]:
        """Yield nothing yet, then the deltas of a request."""
        mine = {name}
        self._awaited.add(name)
        try:
            yield Delta(request_id=name, index=0, text="", tokens=Tokens())
            while mine:
                for delta in self._own_deltas(mine):
                    if delta.completion is not None:
                        self._awaited.discard(name)
                        mine.clear()
                    if delta.error is not None:
                        raise delta.error
                    yield delta
        finally:
            self._abandon(mine)

    def _abandon(self, names: Collection[str]) -> None:
        """Abort what is left of requests that nobody waits for any more."""
        self._awaited.difference_update(names)
        for name in names:
            if name in self._core.requests:
                self.abort(name)
        self._silence(names)

    def _silence(self, names: Collection[str]) -> None:
        """Drop deltas that nobody is to see."""
        self._core.silence(names)
        self._unclaimed = [d for d in self._unclaimed if d.request_id not in names]


def _check_alike(new: Any, old: Any) -> None:
    if jax.tree.map(np.shape, new) != jax.tree.map(np.shape, old):
        raise ShapeError(
            f"these weights ({type(new).__name__}) are not those of the same model",
            why="the engine's programs were made for the names and shapes of its first weights",
            fix="give a tree like model.params, or make an engine for the other model",
        )


def _pairs(prompts: Any, sampling: Any) -> list[tuple[Prompt, SamplingParams]]:
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        raise InvalidInput(
            f"prompts is a {type(prompts).__name__}",
            why="generate takes a list of prompts and returns a list of completions",
            fix="write [prompt]",
        )
    if isinstance(sampling, SamplingParams):
        return [(prompt, sampling) for prompt in prompts]
    if not isinstance(sampling, list | tuple) or len(sampling) != len(prompts):
        raise InvalidSampling(
            f"sampling is a {type(sampling).__name__} for {len(prompts)} prompts",
            why="it is one SamplingParams for all, or a list with one for each",
            fix="give as many as there are prompts",
        )
    return list(zip(prompts, sampling, strict=True))
