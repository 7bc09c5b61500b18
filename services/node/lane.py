"""Decode steps of the sessions on one route: a frame for as many at a time as keeps all stages at work."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.errors import HopFailure
from meshnet.routing import Route
from meshnet.wire import BYTES_PER_ELEMENT, FrameHeaders
from services.node.core.choices import Choice
from services.node.core.lanes import rows_for_next_frame, rows_of_equal_length, share_of_sessions
from services.node.core.sessions import Piece
from services.node.core.speculation import StepCost
from services.node.core.work import Buffer, PromptWork, Segment, SessionKey, rows_of
from services.node.drawing import Draws, draw
from services.node.forwarding import Forwarding

# A frame that is not back by then is stuck, and those in it are lost anyway.
GIVE_UP_SECONDS = 5.0
# What steps of a route cost is remembered of the routes that were used last.
ROUTES_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class Step:
    """What was drawn behind each token of a session, or why there is nothing. They went with those of others:
    `num_rows` sessions with `num_tokens` tokens, this one among them."""

    drawn: Sequence[Choice | BaseException]
    num_rows: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Row:
    """The token that a session has drawn last, drafts behind it, how to draw behind each, and who waits for that."""

    key: SessionKey
    tokens: tuple[int, ...]
    position: int
    draws: Draws
    step: asyncio.Future[Step]


class Lane:
    """`route` begins with this node. `cost` is what its sessions have learnt of its steps."""

    def __init__(self, model_id: str, route: Route, forwarding: Forwarding, cost: StepCost) -> None:
        self._model_id = model_id
        self._route = route
        self._forwarding = forwarding
        self._num_sessions = 0
        self._ready: deque[_Row] = deque()
        self._frames: set[asyncio.Task[None]] = set()
        self._chunks: deque[asyncio.Future[None]] = deque()
        self._is_due = False
        self.cost = cost

    @property
    def is_empty(self) -> bool:
        return not self._num_sessions

    @property
    def num_rows(self) -> int:
        """Sessions that travel together when all are busy."""
        return share_of_sessions(self._num_sessions, len(self._route))

    def join(self) -> None:
        """One more session decodes here."""
        self._num_sessions += 1

    def leave(self) -> None:
        self._num_sessions -= 1
        self._wake()

    async def step(self, key: SessionKey, tokens: tuple[int, ...], position: int, draws: Draws) -> Step:
        """Runs a few tokens of a session through the route and draws one behind each. Raises what the route failed
        with.

        A session that is cancelled meanwhile waits until its frame is back: freed on the way, it would take the others
        in the frame with it.
        """
        row = _Row(key, tokens, position, draws, asyncio.get_running_loop().create_future())
        # Nobody may be there any more to hear of an error.
        row.step.add_done_callback(lambda step: step.cancelled() or step.exception())
        self._ready.append(row)
        self._wake()
        try:
            return await asyncio.shield(row.step)
        except asyncio.CancelledError:
            await self._give_up(row)
            raise

    async def beside_frame(self) -> None:
        """Returns when a chunk of a prompt may leave: beside a frame, so that both are one step, or when there is none.
        Else those that decode would wait for a step with the frame and for one with the chunk, on every hop."""
        if not self._frames and not self._ready:
            return
        turn = asyncio.get_running_loop().create_future()
        self._chunks.append(turn)
        try:
            await turn
        finally:
            if turn in self._chunks:
                self._chunks.remove(turn)

    async def _give_up(self, row: _Row) -> None:
        if row in self._ready:
            self._ready.remove(row)
        elif not row.step.done():
            await asyncio.wait([row.step], timeout=GIVE_UP_SECONDS)

    def _wake(self) -> None:
        """Those whose tokens were drawn in the same step become ready one after the other, and leave together."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._send_ready)

    def _send_ready(self) -> None:
        self._is_due = False
        while count := rows_for_next_frame(len(self._ready), self._num_sessions, len(self._frames), len(self._route)):
            rows = [self._ready.popleft() for _ in range(count)]
            task = asyncio.create_task(self._run(rows))
            self._frames.add(task)
            task.add_done_callback(self._frame_is_back)
            # One; but where prompts crowd, those that decode wait for more.
            self._let_go(max(1, len(self._chunks) // 2))
        if not self._frames:
            self._let_go(len(self._chunks))

    def _let_go(self, num_chunks: int) -> None:
        for _ in range(min(num_chunks, len(self._chunks))):
            turn = self._chunks.popleft()
            if not turn.done():
                turn.set_result(None)

    def _frame_is_back(self, task: asyncio.Task[None]) -> None:
        self._frames.discard(task)
        self._wake()

    async def _run(self, rows: Sequence[_Row]) -> None:
        """Never raises: each row learns what became of it."""
        try:
            outputs = await self._forward(rows)
        except (HopFailure, asyncio.CancelledError) as error:
            _fail(rows, error)
        except Exception as error:
            if len(rows) == 1:
                _fail(rows, error)
            else:
                # One of them may be the reason. A step that is run again is cut back first, so it does no harm.
                await asyncio.gather(*(self._run([row]) for row in rows))
        else:
            await self._draw(rows, outputs)

    async def _draw(self, rows: Sequence[_Row], outputs: Sequence[Buffer]) -> None:
        """The frame counts as under way until tokens are drawn: then those in it are ready again, all at once, and
        leave with whoever waits. Were its place free before, others would leave alone, and never again meet these."""
        drawn = await draw(
            self._forwarding.runner,
            [
                work
                for row, hidden in zip(rows, outputs, strict=True)
                for work in row.draws.works(self._model_id, hidden)
            ],
        )
        begin = 0
        for row in rows:
            end = begin + len(row.tokens)
            if not row.step.done():
                row.step.set_result(Step(drawn[begin:end], len(rows), len(drawn)))
            begin = end

    async def _forward(self, rows: Sequence[_Row]) -> Sequence[Buffer]:
        forwarding = self._forwarding
        await forwarding.accept([Piece(row.key, row.position, len(row.tokens)) for row in rows], first_chunk=True)
        outputs = await forwarding.run_all([self._work(row) for row in rows])
        if len(self._route) == 1:
            return outputs
        groups = rows_of_equal_length([len(row.tokens) for row in rows])
        # All must be back before any is sent again: the frames of one session must not meet.
        sent = await asyncio.gather(
            *(self._send_on([rows[i] for i in group], [outputs[i] for i in group]) for group in groups),
            return_exceptions=True,
        )
        for group, answer in zip(groups, _unless_failed(sent), strict=True):
            for index, hidden in zip(group, answer, strict=True):
                outputs[index] = hidden
        return outputs

    def _work(self, row: _Row) -> PromptWork:
        num_tokens = len(row.tokens)
        segment = Segment(row.key, row.position, num_tokens, num_tokens)
        return PromptWork(self._model_id, row.key.layers, (segment,), row.tokens)

    async def _send_on(self, rows: Sequence[_Row], hidden: Sequence[Buffer]) -> list[Buffer]:
        """Through the stages behind, as one frame: the rows have one length."""
        num_tokens = len(rows[0].tokens)
        frame = FrameHeaders(
            rows=len(rows),
            positions=num_tokens,
            hidden=memoryview(hidden[0]).nbytes // num_tokens // BYTES_PER_ELEMENT,
            sessions=tuple(row.key.session for row in rows),
            model=self._model_id,
            cached=tuple(row.position for row in rows),
            returns=num_tokens,
            entry=self._route[0].node_id,
        )
        answer = await self._forwarding.send_and_return(frame, self._route[1:], b"".join(hidden))
        return rows_of(answer, len(rows))


class Lanes:
    """Those of one entry node, by model and route; they come and go with the sessions in them."""

    def __init__(self, forwarding: Forwarding) -> None:
        self._forwarding = forwarding
        self._lanes: dict[tuple[str, Route], Lane] = {}
        self._costs: OrderedDict[tuple[str, Route], StepCost] = OrderedDict()

    def are_busy(self, model_id: str) -> bool:
        """Whether sessions of the model decode here."""
        return any(model == model_id for model, _ in self._lanes)

    async def beside_frame(self, model_id: str) -> None:
        """As `Lane.beside_frame`, in the one of the model's lanes that most sessions share, if there is any."""
        lanes = [lane for (model, _), lane in self._lanes.items() if model == model_id]
        if lanes:
            await max(lanes, key=lambda lane: lane.num_rows).beside_frame()

    def join(self, model_id: str, route: Route) -> Lane:
        """The lane of a route, with one more session in it."""
        lane = self._lanes.get((model_id, route))
        if lane is None:
            cost = self._cost(model_id, route)
            lane = self._lanes[model_id, route] = Lane(model_id, route, self._forwarding, cost)
        lane.join()
        return lane

    def leave(self, model_id: str, route: Route) -> None:
        lane = self._lanes[model_id, route]
        lane.leave()
        if lane.is_empty:
            del self._lanes[model_id, route]

    def _cost(self, model_id: str, route: Route) -> StepCost:
        cost = self._costs.setdefault((model_id, route), StepCost())
        self._costs.move_to_end((model_id, route))
        if len(self._costs) > ROUTES_REMEMBERED:
            self._costs.popitem(last=False)
        return cost


def _fail(rows: Sequence[_Row], error: BaseException) -> None:
    for row in rows:
        if not row.step.done():
            row.step.set_exception(error)


def _unless_failed(answers: Sequence[list[Buffer] | BaseException]) -> list[list[Buffer]]:
    """Raises the first error among them, and before all others that of a hop: after it nothing is tried again."""
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if errors:
        raise next((error for error in errors if isinstance(error, HopFailure)), errors[0])
    return [answer for answer in answers if not isinstance(answer, BaseException)]
