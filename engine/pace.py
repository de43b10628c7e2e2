"""How fast one engine computes, learnt from its own steps. Pure: whoever runs the steps tells how long they took.

Two numbers describe a worker well enough to place requests and to bound a stream's stall:

    step_s        seconds of a step in which streams advance by one token and no prompt is computed
    prompt_rate   prompt tokens per second that a step adds to that
"""

from __future__ import annotations

LEAST_TOKENS = 16  # a step with fewer prompt tokens says nothing about their rate
WEIGHT = 0.2  # of the newest step
PROMPTS_S = 0.25  # seconds of a step without streams: so long must wait who comes in the middle of it
WORTHWHILE = 64  # tokens that a step of prompts has at least: with fewer, reading the weights is most of its work


class Pace:
    def __init__(self, step_s: float = 0.0, prompt_rate: float = 0.0) -> None:
        """0: not known yet."""
        self.step_s = step_s
        self.prompt_rate = prompt_rate

    def learn(self, prompt_tokens: int, streams: int, seconds: float) -> None:
        """One step took `seconds` for so many tokens of prompts and so many streams."""
        if prompt_tokens == 0:
            self.step_s = _mean(self.step_s, seconds)
        elif prompt_tokens >= LEAST_TOKENS:
            own = seconds - (self.step_s if streams else 0.0)
            if own > 0:
                self.prompt_rate = _mean(self.prompt_rate, prompt_tokens / own)

    def prompt_tokens_within(self, stretch: float) -> int:
        """Prompt tokens that make a step with streams at most `stretch` times as long; at least LEAST_TOKENS."""
        return max(LEAST_TOKENS, int((stretch - 1.0) * self.step_s * self.prompt_rate))

    def prompt_tokens_alone(self) -> int | None:
        """Prompt tokens of a step without streams; None while nothing is known."""
        return max(WORTHWHILE, int(PROMPTS_S * self.prompt_rate)) if self.prompt_rate else None


def _mean(old: float, new: float) -> float:
    return new if old == 0.0 else old + WEIGHT * (new - old)
