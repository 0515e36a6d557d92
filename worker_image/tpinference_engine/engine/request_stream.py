"""The outputs of one request on their way to whoever reads them.

Outputs that arrive before they are read are merged, so a slow reader costs its own tokens and no
more. It knows neither the core nor the text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import TracebackType

from tpinference_engine.request import FinishReason, RequestOutput


class RequestStream(AsyncGenerator[RequestOutput, None]):
    """Ends after the output with a finish reason. Closed earlier, it aborts the request."""

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self._request_id = request_id
        self._abort = abort
        self._token_ids: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._error: str | None = None
        self._arrived = asyncio.Event()
        self._is_over = False

    def push(self, output: RequestOutput) -> None:
        self._token_ids += output.token_ids
        self._finish_reason = output.finish_reason
        self._error = output.error
        self._arrived.set()

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        await self._arrived.wait()
        self._arrived.clear()
        token_ids, self._token_ids = tuple(self._token_ids), []
        self._is_over = self._finish_reason is not None
        return RequestOutput(
            request_id=self._request_id,
            token_ids=token_ids,
            finish_reason=self._finish_reason,
            error=self._error,
        )

    async def aclose(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._abort(self._request_id)

    # The rest of the generator's interface; nobody sends anything into it.

    async def asend(self, value: None) -> RequestOutput:
        return await self.__anext__()

    async def athrow(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> RequestOutput:
        await self.aclose()
        raise typ
