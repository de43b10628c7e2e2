"""The speed of one engine, learnt from its steps. Pure: the caller passes the durations.

Three numbers describe a worker well enough to place requests and to bound a stream's stall:

    step_s        seconds of a step in which one stream advances by one token and no prompt is computed; a step that
                  only computes prompts begins with them as well, for it reads the weights, too
    stream_s      seconds that each further stream adds to it
    prompt_rate   prompt tokens per second that a step adds to that
"""

from __future__ import annotations

from tandem.linear_fit import NEWEST_WEIGHT, LinearFit

LEAST_TOKENS = 8  # steps with fewer prompt tokens do not measure their rate
MANY = 8  # streams: a step with one more is attributed to step_s and stream_s equally
PROMPTS_S = 0.25  # the longest step without streams, in seconds: a prompt that arrives meanwhile waits this long
OUTLIER = 4.0  # a step counts as at most this many times its expected duration: its process may have been stopped
WORTHWHILE = 64  # minimum tokens of a step of prompts: with fewer, most of the step reads the weights


class StepTime:
    def __init__(self, step_s: float = 0.0, stream_s: float = 0.0, prompt_rate: float = 0.0) -> None:
        """0: not known yet."""
        self._steps = LinearFit(step_s, stream_s, scale=MANY)
        self.prompt_rate = prompt_rate

    @property
    def step_s(self) -> float:
        return self._steps.base

    @property
    def stream_s(self) -> float:
        return self._steps.each

    def learn(self, prompt_tokens: int, streams: int, seconds: float) -> None:
        """One step took `seconds` for these numbers of prompt tokens and streams."""
        if prompt_tokens == 0:
            usual = self._steps.at(streams - 1)
            self._steps.learn(streams - 1, min(seconds, OUTLIER * usual) if usual else seconds)
        elif prompt_tokens >= LEAST_TOKENS:
            own = seconds - self.without_prompts(max(1, streams))
            if own > 0:
                if self.prompt_rate:
                    expected = prompt_tokens / self.prompt_rate
                    own = min(max(own, expected / OUTLIER), OUTLIER * expected)
                rate = prompt_tokens / own
                weight = NEWEST_WEIGHT * prompt_tokens / (prompt_tokens + WORTHWHILE)
                self.prompt_rate += weight * (rate - self.prompt_rate) if self.prompt_rate else rate

    def without_prompts(self, streams: int) -> float:
        """Seconds of a step of this many streams without prompts."""
        return self._steps.at(streams - 1) if streams else 0.0

    def seconds(self, prompt_tokens: int, streams: int) -> float:
        """Expected seconds of a step of these streams and prompt tokens. Measured with short contexts."""
        return self.without_prompts(max(1, streams)) + (prompt_tokens / self.prompt_rate if self.prompt_rate else 0.0)

    def prompt_s(self, tokens: int) -> float:
        """Seconds that `tokens` prompt tokens take; an upper bound before a prompt has been measured."""
        return tokens / self.prompt_rate if self.prompt_rate else tokens / LEAST_TOKENS * self.step_s

    def prompt_tokens_beside(self, streams: int, stretch: float, beside_s: float = 0.0) -> int:
        """Prompt tokens with which a step of this many streams takes `stretch` times as long as a step of one stream,
        or `beside_s` seconds if that is longer; LEAST_TOKENS if the streams alone take that long."""
        left = max(stretch * self.step_s, beside_s) - self.without_prompts(streams)
        return max(LEAST_TOKENS, int(left * self.prompt_rate))

    def prompt_tokens_alone(self, seconds: float = PROMPTS_S) -> int | None:
        """Prompt tokens that a step without streams computes in `seconds`; None while the rate is unknown."""
        return max(WORTHWHILE, int(seconds * self.prompt_rate)) if self.prompt_rate else None
