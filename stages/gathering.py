"""Responses as they finish, gathered into the rows of whole groups."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import polars as pl

from stages import tables
from stages.engines import Decoding, Engine, Request, Response
from stages.errors import NonFinite
from stages.progress import report
from stages.shards import Shards

if TYPE_CHECKING:
    from stages.policy import Tokenizer

ATTEMPTS = 3  # at a request that the engine gives up
TELL_EVERY_S = 0.2
LOGPROBS = pl.List(pl.Float32)


class Gathering:
    """Gathers responses into groups as they finish.

    `requests` holds what is known of each row beforehand, group by group, `n` rows each.
    """

    def __init__(
        self, requests: pl.DataFrame, *, n: int, tokenizer: "Tokenizer", shards: Shards
    ) -> None:
        self.requests, self.n, self.tokenizer, self.shards = requests, n, tokenizer, shards
        self.responses: dict[int, Response] = {}  # of unfinished groups, by row
        self.done = 0
        self.complete: list[int] = []  # groups whose rows are not made yet
        self.missing = [n] * (len(requests) // n)
        self.tokens = self.groups = 0
        self.began = self.told = self.ended = time.monotonic()

    def generate(
        self,
        engine: Engine,
        asked: Sequence[Request],
        decoding: Decoding,
        *,
        time_limit_s: float | None = None,
    ) -> Iterator[pl.DataFrame]:
        """The rows of complete groups, written to the shards on the way.

        `asked`: a request for each row. What the engine gives up is asked again. Raises `NonFinite`
        for log-probs that are no numbers, `RuntimeError` if the engine keeps giving up.
        """
        self.began = time.monotonic()
        until = math.inf if time_limit_s is None else self.began + time_limit_s
        left = list(range(len(asked)))
        for _ in range(ATTEMPTS):
            again, aborted = [asked[row] for row in left], []
            with closing(engine.generate(again, decoding, until=until)) as finished:
                for index, response in finished:
                    if response.finish_reason == "abort":
                        aborted.append(left[index])
                    else:
                        self._take(left[index], response)
                    if self.complete and self.shards.due:
                        yield self._rows()
            left = aborted
        self.ended = time.monotonic()
        yield self._rows()
        if left and self.ended < until:
            raise RuntimeError(
                f"the engine gave up {len(left)} requests {ATTEMPTS} times, such as "
                f"{self.requests['response_id'][left[0]]}; its log says why"
            )

    def metrics(self) -> dict[str, float]:
        seconds = max(self.ended - self.began, 1e-9)
        return {
            "generated": self.groups * self.n,
            "tokens_per_second": round(self.tokens / seconds, 1),
        }

    def _take(self, row: int, response: Response) -> None:
        group = row // self.n
        self.responses[row] = response
        self.done += 1
        self.tokens += len(response.ids)
        self.missing[group] -= 1
        if not self.missing[group]:
            self.complete.append(group)
            self.groups += 1
        if time.monotonic() - self.told >= TELL_EVERY_S or self.done == len(self.requests):
            self._tell()

    def _tell(self) -> None:
        self.told = time.monotonic()
        done, total, seconds = self.done, len(self.requests), self.told - self.began
        report(
            done,
            total,
            f"{self.tokens / max(seconds, 1e-9):.0f} tok/s, {self.groups}/{len(self.missing)} "
            f"groups, {seconds * (total - done) / done:.0f} s left",
        )

    def _rows(self) -> pl.DataFrame:
        """The rows of the groups that are complete by now, and not yet made; on disk, too.

        Raises `NonFinite` that names the responses if a log-prob is no number; the groups that are
        sound are on disk by then.
        """
        if not self.complete:
            return pl.DataFrame(schema=tables.polars_schema("rollouts"))
        n = self.n
        picked = [row for group in self.complete for row in range(group * n, group * n + n)]
        self.complete = []
        responses = [self.responses.pop(row) for row in picked]
        ids = [response.ids for response in responses]
        rows = (
            self.requests[picked]
            .with_columns(
                response_ids=pl.Series(ids, dtype=pl.List(pl.Int32)),
                sampler_logprobs=pl.Series([r.logprobs for r in responses], dtype=LOGPROBS),
                text=pl.Series(
                    self.tokenizer.batch_decode(ids, skip_special_tokens=True), dtype=pl.String
                ),
                length=pl.Series([len(each) for each in ids], dtype=pl.Int32),
                finish_reason=pl.Series([r.finish_reason for r in responses], dtype=pl.String),
            )
            .select(tables.polars_schema("rollouts").names())
        )
        finite = pl.col("sampler_logprobs").list.eval(pl.element().is_finite()).list.all()
        bad = rows.filter(~finite)
        self.shards.write(rows.filter(finite.all().over("group_id")))
        if len(bad):
            raise NonFinite(
                f"the engine reports log-probs that are not finite numbers for {len(bad)} "
                f"responses, {', '.join(bad['response_id'].head(8))}: the policy or its precision "
                "has broken down; nothing was published"
            )
        return rows
