"""How fast one engine computes, learnt from its own steps. Pure: whoever runs the steps tells how long they took.

Three numbers describe a worker well enough to place requests and to bound a stream's stall:

    step_s        seconds of a step in which one stream advances by one token and no prompt is computed
    stream_s      seconds that each further stream adds to it
    prompt_rate   prompt tokens per second that a step adds to that
"""

from __future__ import annotations

LEAST_TOKENS = 8  # a step with fewer prompt tokens says nothing about their rate, and moves no prompt
WEIGHT = 0.2  # of the newest step
MANY = 8  # streams: what a step says is shared out to the first two numbers equally when it had one more than that
PROMPTS_S = 0.25  # seconds of a step without streams: so long must wait who comes in the middle of it
WORTHWHILE = 64  # tokens that a step of prompts has at least: with fewer, reading the weights is most of its work


class Pace:
    def __init__(self, step_s: float = 0.0, stream_s: float = 0.0, prompt_rate: float = 0.0) -> None:
        """0: not known yet."""
        self.step_s = step_s
        self.stream_s = stream_s
        self.prompt_rate = prompt_rate

    def learn(self, prompt_tokens: int, streams: int, seconds: float) -> None:
        """One step took `seconds` for so many tokens of prompts and so many streams."""
        if prompt_tokens == 0:
            self._learn_streams(streams, seconds)
        elif prompt_tokens >= LEAST_TOKENS:
            own = seconds - self.without_prompts(streams)
            if own > 0:
                rate = prompt_tokens / own
                self.prompt_rate += WEIGHT * (rate - self.prompt_rate) if self.prompt_rate else rate

    def _learn_streams(self, streams: int, seconds: float) -> None:
        """Least mean squares, normalised: (1, further / MANY) times (step_s, MANY * stream_s) is to be `seconds`."""
        if not self.step_s:
            self.step_s = seconds / streams
        further = (streams - 1) / MANY
        error = WEIGHT * (seconds - self.without_prompts(streams)) / (1 + further**2)
        self.step_s = max(self.step_s + error, self.step_s / 2)  # positive, whatever one strange step says
        self.stream_s = max(self.stream_s + error * further / MANY, 0.0)

    def without_prompts(self, streams: int) -> float:
        """Seconds of a step of so many streams alone."""
        return self.step_s + self.stream_s * (streams - 1) if streams else 0.0

    def prompt_tokens_beside(self, streams: int, stretch: float) -> int:
        """Prompt tokens with which a step of so many streams takes `stretch` times as long as one of one stream alone;
        LEAST_TOKENS where the streams alone take so long."""
        left = stretch * self.step_s - self.without_prompts(streams)
        return max(LEAST_TOKENS, int(left * self.prompt_rate))

    def prompt_tokens_alone(self) -> int | None:
        """Prompt tokens of a step without streams; None while nothing is known."""
        return max(WORTHWHILE, int(PROMPTS_S * self.prompt_rate)) if self.prompt_rate else None
