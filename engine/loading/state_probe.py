"""Finds the recurrent states of a model, and proves that each recurrent layer can be served with them.

One forward over transformers' own cache shows which module calls the cache's state interface (the *mixer*), the shapes
and types of its states, and the argument that carries the cache. No names of classes or layer types are used.

Then each mixer runs alone, in float32, with random inputs: all tokens at once without a cache against the same tokens
in pieces, through the serving wrapper (engine.runner.mixers). Some mixers cannot continue several tokens from a state,
because transformers gives them single tokens after the first chunk; they get one token at a time. The model is refused
if a mixer is wrong even then, or keeps its state elsewhere.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from engine.attention.forward_context import Batch, running
from engine.core.kv_layout import KvLayout
from engine.kernels import exact
from engine.kv.kv_cache import layout_of
from engine.kv.kv_cache_spec import RecurrentState, StateFacts
from engine.kv.state_memory import Key, StateMemory
from engine.runner.mixers import Mixer, Mixers, named, over_tensors
from engine.runner.recurrences import one_formula, one_function, with_operators
from tandem.errors import CheckpointRefused

STATE_LAYERS = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
KNOWN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer, *STATE_LAYERS)  # a dummy one keeps nothing
# If installed, transformers uses these instead of its own code, with states that may differ in more than their shape.
KERNELS, PLAIN = ("causal_conv1d", "fla", "mamba_ssm"), "transformers"
PIECES = (5, 1, 9, 7, 1)  # tokens of each piece in the check
# Standard deviations of a mixer's output. A mixer that loses its state is off by 0.06 and more. The gap token by token,
# which is how transformers decodes, measures its rounding: pieces may be off by LIKE times as much, and operators by
# LIKE times as much as transformers in pieces.
ROUNDING, MOST_ROUNDING, LIKE = 1e-5, 1e-4, 3.0
ODD_ERRORS = (TypeError, AttributeError, RuntimeError, IndexError, KeyError, ValueError, AssertionError)


class Recorder(DynamicCache):
    """transformers' cache that records the module that requests a state."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.inside: list[nn.Module] = []  # the modules whose forward runs now, the innermost last
        self.owners: dict[int, nn.Module] = {}  # of each layer's states

    def note(self, name: str, layer: int) -> None:
        known = isinstance(layer, int) and layer < len(self.layers)
        if not known or not isinstance(self.layers[layer], STATE_LAYERS):
            raise CheckpointRefused(f"its layers call {name}")
        owner = self.owners.setdefault(layer, self.inside[-1])
        if owner is not self.inside[-1]:
            raise CheckpointRefused(f"two modules call {name} for layer {layer}")

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        self.note("get_conv_state", layer_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        self.note("get_recurrent_state", layer_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **more: Any) -> Any:
        self.note("update_conv_state", layer_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **more)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **more: Any
    ) -> Any:
        self.note("update_recurrent_state", layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **more)

    def update_indexer(self, *_: Any, **__: Any) -> Any:
        raise CheckpointRefused("its layers call update_indexer")

    def states(self) -> Iterator[tuple[Key, torch.Tensor]]:
        """All states, by layer, of one sequence."""
        for number, layer in enumerate(self.layers):
            if isinstance(layer, STATE_LAYERS):
                for kind, kept in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                    for index, state in kept.items():
                        if state is not None:
                            yield (number, kind, index), state[0]


def learn(model: PreTrainedModel, compiled: bool = False) -> Mixers | None:
    """The mixers of a model, proved; None for one that keeps K and V alone. Leaves the model with its own forwards.
    `compiled`: with Tandem's operators for their recurrences where there are such. Raises CheckpointRefused with the
    reason for a model whose states cannot be served."""
    beside = "keeps state besides the K and V of its tokens, which KV pages do not hold"
    try:
        cache, arguments = _recorded(model, 5)
        longer, _ = _recorded(model, 7)
        if not cache.owners:
            return None
        kept = {key: (tuple(state.shape), state.dtype) for key, state in cache.states()}
        if kept != {key: (tuple(state.shape), state.dtype) for key, state in longer.states()}:
            raise CheckpointRefused("the shape of a state depends on the number of tokens")
        mixers = _mixers(model, cache, kept, arguments)
        _prove(model, mixers, compiled and mixers.facts.kernels == PLAIN)
    except CheckpointRefused as error:
        raise CheckpointRefused(f"{type(model).__name__} {beside}: {error.message}") from error
    except ODD_ERRORS as error:
        raise CheckpointRefused(
            f"{type(model).__name__} does not run over transformers' cache of K, V and states, so it may keep state"
            f" elsewhere: {error!r}"
        ) from error
    return mixers


def _recorded(model: PreTrainedModel, tokens: int) -> tuple[Recorder, dict[nn.Module, str]]:
    """The cache after a forward of `tokens` tokens, and the argument that carried it into each module."""
    cache = Recorder(model.config)
    check_layers(cache, KNOWN_LAYERS)
    ids, positions = inputs(model, tokens)
    given = "past_key_values" if "past_key_values" in inspect.signature(model.forward).parameters else "cache_params"
    with torch.inference_mode(), watched(model, cache) as arguments:
        model(input_ids=ids, position_ids=positions, **{given: cache}, use_cache=True)
    silent = [
        number
        for number, layer in enumerate(cache.layers)
        if isinstance(layer, STATE_LAYERS) and number not in cache.owners
    ]
    if silent:
        raise CheckpointRefused(f"layer {silent[0]} does not keep its state in the cache that it is given")
    return cache, arguments


def check_layers(cache: DynamicCache, known: tuple[type, ...]) -> None:
    """Raises CheckpointRefused for cache layers of unknown kinds."""
    others = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in known})
    if others:
        raise CheckpointRefused(f"transformers makes {', '.join(others)} for its cache")


@contextmanager
def watched(model: PreTrainedModel, cache: Recorder) -> Iterator[dict[nn.Module, str]]:
    """Inside, the cache knows which module's forward runs. Yields the argument that carried the cache into each
    module."""
    arguments: dict[nn.Module, str] = {}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache.inside.append(module)
        found = [name for name, value in kwargs.items() if value is cache]
        if any(value is cache for value in args):
            found = [name for name, value in named(module, *args, **kwargs).items() if value is cache]
        if found:
            arguments[module] = found[0]

    def leave(*_: Any) -> None:
        cache.inside.pop()

    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in model.modules()]
    hooks += [module.register_forward_hook(leave) for module in model.modules()]
    try:
        yield arguments
    finally:
        for hook in hooks:
            hook.remove()


def _mixers(model: PreTrainedModel, cache: Recorder, kept: dict[Key, Any], arguments: dict[nn.Module, str]) -> Mixers:
    own = next(model.parameters()).dtype
    found: list[Mixer] = []
    for name, module in model.named_modules():
        if module in cache.owners.values():
            if module not in arguments:
                raise CheckpointRefused(f"{name} does not get the cache as an argument")
            layers = frozenset(layer for layer, owner in cache.owners.items() if owner is module)
            found.append(Mixer(name, module, arguments[module], layers))
    states = [RecurrentState(key, shape, None if dtype == own else dtype) for key, (shape, dtype) in kept.items()]
    return Mixers(found, StateFacts(tuple(states), "+".join(filter(find_spec, KERNELS)) or PLAIN))


def _prove(model: PreTrainedModel, mixers: Mixers, compiled: bool) -> None:
    """Decides how each mixer is served. Raises CheckpointRefused if one is wrong in every way."""
    calls = _arguments(model, mixers, sum(PIECES))
    same_bits: dict[Any, bool] = {}  # by the code and the shapes, which determine the bits
    for mixer in mixers.each:
        alone, facts = Mixer(mixer.name, copy.deepcopy(mixer.module).float(), mixer.argument), mixers.facts_of(mixer)
        in_pieces = _gap(alone, calls[mixer.name], facts)
        if compiled and _takes_operators(mixer, alone, calls[mixer.name], facts, in_pieces):
            alike = type(mixer.module), tuple(each.shape for each in mixer.module.parameters())
            if alike not in same_bits:
                with suppress(*ODD_ERRORS):
                    same_bits[alike] = _same_bits(mixer, calls[mixer.name], facts, next(model.parameters()).dtype)
            mixer.same_bits, mixer.one_function = same_bits.get(alike, False), one_function(mixer.module)
            continue
        if in_pieces <= ROUNDING:
            continue
        alone.by_token = True
        by_token = _gap(alone, calls[mixer.name], facts)
        if not by_token <= MOST_ROUNDING:
            raise CheckpointRefused(
                f"{mixer.name} ({type(mixer.module).__name__}) does not continue from its state: its output in pieces"
                f" is off by {in_pieces:.1g} standard deviations, token by token by {by_token:.1g}"
            )
        mixer.by_token = not in_pieces <= LIKE * by_token


def _takes_operators(mixer: Mixer, alone: Mixer, given: dict[str, Any], facts: StateFacts, in_pieces: float) -> bool:
    """Gives a mixer and its float32 copy `alone` the forward over Tandem's operators, unless there is none or its
    results differ. Whether it did."""
    ours = with_operators(type(mixer.module))
    if ours is None:
        return False
    theirs = alone.forward, alone.takes
    alone.forward, alone.takes = ours
    with suppress(*ODD_ERRORS):  # its functions take other arguments than the operators
        if _gap(alone, given, facts) <= min(max(ROUNDING, LIKE * in_pieces), MOST_ROUNDING):
            mixer.forward, mixer.takes = ours
            return True
    alone.forward, alone.takes = theirs
    return False


def _arguments(model: PreTrainedModel, mixers: Mixers, tokens: int) -> dict[str, dict[str, Any]]:
    """The arguments of each mixer in a forward of `tokens` tokens; the last call counts."""
    calls: dict[str, dict[str, Any]] = {}
    hooks = [
        mixer.module.register_forward_pre_hook(
            lambda module, args, kwargs, name=mixer.name: calls.__setitem__(name, named(module, *args, **kwargs)),
            with_kwargs=True,
        )
        for mixer in mixers.each
    ]
    ids, positions = inputs(model, tokens)
    try:
        with torch.inference_mode():
            model(input_ids=ids, position_ids=positions, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _gap(mixer: Mixer, given: dict[str, Any], facts: StateFacts) -> float:
    """The gap, in standard deviations, between its output in consecutive PIECES and for all tokens at once."""
    given = {name: as_float(value) for name, value in given.items() if name != mixer.argument}
    with torch.inference_mode():
        whole = _flat(type(mixer.module).forward(mixer.module, **given, **{mixer.argument: None}))
    return float((_in_pieces(mixer, given, facts, PIECES, torch.float32) - whole).abs().max() / whole.std())


def _same_bits(mixer: Mixer, given: dict[str, Any], facts: StateFacts, dtype: torch.dtype) -> bool:
    """Whether its output has the same bits at once, in pieces, and next to another sequence, in the model's dtype.
    Without limits of time steps: `one_function` knows those."""
    given = {name: value for name, value in given.items() if name != mixer.argument}
    device = next(mixer.module.parameters()).device
    with exact(device), one_formula(mixer.module):
        cuts = (PIECES, [sum(PIECES)], [1, 1, sum(PIECES) - 2])
        ways = [_in_pieces(mixer, given, facts, cut, dtype) for cut in cuts]
        ways.append(_in_pieces(mixer, given, facts, PIECES, dtype, beside=True))
    return all(torch.equal(ways[0], way) for way in ways[1:])


def error_in_own_type(model: PreTrainedModel, mixers: Mixers) -> float:
    """How far the output of a mixer that is served in pieces is off that of its own forward in float32, relative to it:
    the most of all mixers. `learn` compares numbers in float32 alone, and a kernel is compiled for each type. Without
    limits of time steps, as in `_same_bits`."""
    calls, dtype = _arguments(model, mixers, sum(PIECES)), next(model.parameters()).dtype
    errors = []
    for mixer in mixers.each:
        given = {name: value for name, value in calls[mixer.name].items() if name != mixer.argument}
        wide = {name: as_float(value) for name, value in given.items()}
        with one_formula(mixer.module):
            alone = copy.deepcopy(mixer.module).float()
            with torch.inference_mode():
                whole = _flat(type(alone).forward(alone, **wide, **{mixer.argument: None}))
            found = _in_pieces(mixer, given, mixers.facts_of(mixer), PIECES, dtype)
        errors.append((found - whole).norm() / whole.norm())
    return float(torch.stack(errors).max())


def _in_pieces(
    mixer: Mixer,
    given: dict[str, Any],
    facts: StateFacts,
    pieces: Sequence[int],
    dtype: torch.dtype,
    beside: bool = False,
) -> torch.Tensor:
    """The output `[tokens, ...]` of consecutive pieces of these lengths, each continued from the state of the last one.
    `beside`: each step also has a token of another sequence."""
    memory = StateMemory(_layout(facts, dtype), 2, next(mixer.module.parameters()).device)
    with torch.inference_mode(), serving(mixer, memory) as step:
        parts, done = [], 0
        for turn, count in enumerate(pieces):
            part = {name: _rows(value, done, count) for name, value in given.items()}
            step.batch = Batch(query_lens=[count], context_lens=[done + count], slots=[1])
            if beside:
                part = {name: _after(part[name], _rows(value, turn, 1)) for name, value in given.items()}
                step.batch = Batch(query_lens=[count, 1], context_lens=[done + count, turn + 1], slots=[1, 0])
            memory.begin()
            parts.append(_flat(mixer.module(**part, **{mixer.argument: None}))[:count])
            memory.commit()
            done += count
    return torch.cat(parts)


@contextmanager
def serving(mixers: Mixer | Mixers, memory: StateMemory) -> Iterator[Any]:
    """Mixers as in a packed step over `memory`, outside of an engine: gives the step, whose `batch` is to be set."""
    step: Any = SimpleNamespace(batch=None, state_rows=None, pages=SimpleNamespace(states=memory))
    mixers.switch(True)
    try:
        with running(step):
            yield step
    finally:
        mixers.switch(False)


@contextmanager
def isolated(mixers: Mixers | None, tokens: int, like: torch.Tensor) -> Iterator[None]:
    """Inside, each of the forward's `tokens` tokens is a separate sequence. `like`: a parameter of the model."""
    if mixers is None:
        yield
        return
    with serving(mixers, StateMemory(_layout(mixers.facts, like.dtype), tokens, like.device)) as step:
        ones = [1] * tokens
        step.batch = Batch(query_lens=ones, context_lens=ones, slots=list(range(tokens)))
        yield


def _layout(facts: StateFacts, dtype: torch.dtype = torch.float32) -> KvLayout:
    return layout_of([], 1, dtype, "", states=facts)


def inputs(model: PreTrainedModel, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions of a prompt, `[1, tokens]`."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(tokens)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, tokens), generator=generator).to(device)
    return ids, torch.arange(tokens, device=device).unsqueeze(0)


def as_float(value: Any) -> Any:
    return over_tensors(lambda each: each.float() if each.is_floating_point() else each, value)


def _rows(value: Any, start: int, count: int) -> Any:
    return over_tensors(lambda each: each[:, start : start + count], value)


def _after(value: Any, more: Any) -> Any:
    return over_tensors(lambda *each: torch.cat(each, dim=1), value, more)


def _flat(result: Any) -> torch.Tensor:
    """All tensors that a mixer returns, as `[tokens, ...]`."""
    parts = result if isinstance(result, tuple) else (result,)
    return torch.cat([part.flatten(2) for part in parts if isinstance(part, torch.Tensor)], dim=-1)[0]
