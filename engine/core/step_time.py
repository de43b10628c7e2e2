"""The speed of one engine, learnt from its steps. Pure: the caller passes the durations.

Four numbers describe a worker well enough to place requests and to bound a stream's stall:

    step_s        seconds of a step in which one stream advances by one token and no prompt is computed; a step that
                  only computes prompts begins with them as well, for it reads the weights, too
    stream_s      seconds that each further stream adds to it
    prompts_s     seconds that prompts add to a step, however few their tokens are: on a GPU the host launches each
                  kernel of such a step, where a step of streams alone is captured
    prompt_rate   prompt tokens per second that a step adds to that
"""

from __future__ import annotations

from tandem.linear_fit import LinearFit

LEAST_TOKENS = 8  # steps with fewer prompt tokens do not measure their rate
MANY = 8  # streams: a step with one more is attributed to step_s and stream_s equally
PROMPTS_S = 0.25  # the longest step without streams, in seconds: a prompt that arrives meanwhile waits this long
OUTLIER = 4.0  # a step counts as at most this many times its expected duration: its process may have been stopped
# Minimum tokens of a step of prompts: with fewer, most of the step reads the weights. A step with as many is attributed
# to prompts_s and prompt_rate equally.
WORTHWHILE = 64
STRAY = 2.0  # prompts count as at most this many times their expected duration, and at least as its inverse


class StepTime:
    def __init__(self, step_s: float = 0.0, stream_s: float = 0.0, prompt_rate: float = 0.0) -> None:
        """0: not known yet."""
        self._steps = LinearFit(step_s, stream_s, scale=MANY)
        self._prompts = LinearFit(0.0, 1 / prompt_rate if prompt_rate else 0.0, scale=WORTHWHILE)
        self._odd = False  # whether an odd number of steps with prompts has been learnt

    @property
    def step_s(self) -> float:
        return self._steps.base

    @property
    def stream_s(self) -> float:
        return self._steps.each

    @property
    def prompts_s(self) -> float:
        return self._prompts.base

    @property
    def prompt_rate(self) -> float:
        return 1 / self._prompts.each if self._prompts.each else 0.0

    def learn(self, prompt_tokens: int, streams: int, seconds: float) -> None:
        """One step took `seconds` for these numbers of prompt tokens and streams."""
        if prompt_tokens == 0:
            usual = self._steps.at(streams - 1)
            self._steps.learn(streams - 1, min(seconds, OUTLIER * usual) if usual else seconds)
        elif prompt_tokens >= LEAST_TOKENS:
            own = seconds - self.without_prompts(max(1, streams))
            self._odd = not self._odd
            if own > 0 and self.prompt_rate:
                expected = self._prompts.at(prompt_tokens)
                self._prompts.learn(prompt_tokens, min(max(own, expected / STRAY), STRAY * expected))
            elif own > 0:
                self._prompts.each = own / prompt_tokens

    def captured(self, seconds: float) -> None:
        """From now on a step of one stream takes `seconds`. Those with prompts are not captured: what steps of streams
        no longer take is a fixed price of prompts."""
        self._prompts.base += max(0.0, self._steps.base - seconds)
        self._steps.base = min(self._steps.base, seconds)

    def without_prompts(self, streams: int) -> float:
        """Seconds of a step of this many streams without prompts."""
        return self._steps.at(streams - 1) if streams else 0.0

    def seconds(self, prompt_tokens: int, streams: int) -> float:
        """Expected seconds of a step of these streams and prompt tokens. Measured with short contexts."""
        return self.without_prompts(max(1, streams)) + (self._prompts.at(prompt_tokens) if prompt_tokens else 0.0)

    def prompt_s(self, tokens: int) -> float:
        """Seconds that `tokens` prompt tokens take; an upper bound before a prompt has been measured."""
        if not self.prompt_rate:
            return tokens / LEAST_TOKENS * self.step_s
        return self._prompts.at(tokens) if tokens else 0.0

    def prompt_tokens_beside(self, streams: int, stretch: float, beside_s: float = 0.0) -> int:
        """Prompt tokens with which a step of this many streams takes `stretch` times as long as a step of one stream,
        or `beside_s` seconds if that is longer; LEAST_TOKENS if the streams alone take that long.

        As many as take prompts_s at least, because with fewer, prompts would hardly advance, and streams would wait as
        often; every second time twice as many, because steps of one size do not show what they have in common."""
        left = max(stretch * self.step_s, beside_s) - self.without_prompts(streams) - self.prompts_s
        least = self.prompts_s * (2 if self._odd else 1)
        return max(LEAST_TOKENS, int(max(left, least) * self.prompt_rate))

    def prompt_tokens_alone(self, seconds: float = PROMPTS_S) -> int | None:
        """Prompt tokens that a step without streams computes in `seconds`; None while the rate is unknown."""
        if not self.prompt_rate:
            return None
        return max(WORTHWHILE, int(max(seconds - self.prompts_s, self.prompts_s) * self.prompt_rate))
