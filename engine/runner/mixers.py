"""Recurrent layers in a packed step: each sequence's rows pass through the layer separately, with the state of its
slot.

A *mixer* is the module that calls the state interface of transformers' cache: a linear attention, a state space layer,
a short convolution. transformers' code supports neither packed sequences nor slots, so each mixer's forward is replaced
by one that separates the packed rows:

    rows   a2 a3 a4 b6 c9      a mixer sees  [[a2 a3 a4]] with the state of a's slot, then [[b6], [c9]] with both

Sequences with the same number of new tokens share a call. In place of transformers' cache the mixer gets a
`SlotStates`. A mixer that cannot continue several tokens from a state (engine.loading.state_probe) gets one token at a
time.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from engine.attention.forward_context import Batch, current_step, on_device
from engine.kv.kv_cache_spec import StateFacts
from engine.kv.state_memory import Key, StateMemory
from engine.runner.recurrences import Forward, SlotRows, State, asked_for

OUR_KEYWORDS = ("step",)  # for attention; a mixer would pass it on to functions that do not accept it


class SlotStates:
    """A mixer's cache: the states of the sequences of one call, with only the state interface."""

    def __init__(self, memory: StateMemory, slots: Sequence[int], previous: bool, takes: Collection[str] = ()) -> None:
        """`previous`: the sequences have earlier tokens. States of the kinds `takes` go to operators, which read and
        write them in place."""
        self._memory, self._slots, self._previous, self._takes = memory, slots, previous, takes

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._previous

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> State:
        return self._get((layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> State:
        state = self._get((layer_idx, "recurrent", state_idx))
        asked_for.set(state)
        return state

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """As transformers': `[n, channels, T]` with the columns before them; keeps the last ones."""
        key = (layer_idx, "conv", state_idx)
        width = self._memory.width(key)
        tokens = conv_states.transpose(1, 2)  # [n, T, channels], the order in which projections produce them
        if self._previous:
            tokens = torch.cat([self._memory.get(key, self._slots).transpose(1, 2), tokens], dim=1)
        else:
            tokens = nn.functional.pad(tokens, (0, 0, max(0, width - tokens.shape[1]), 0))
        columns = tokens.transpose(1, 2)
        self._memory.put(key, self._slots, columns[..., -width:])
        return columns

    def update_recurrent_state(self, recurrent_states: State, layer_idx: int, state_idx: int = 0) -> State:
        if isinstance(recurrent_states, torch.Tensor):  # otherwise an operator has already written it
            self._memory.put((layer_idx, "recurrent", state_idx), self._slots, recurrent_states)
        return recurrent_states

    def _get(self, key: Key) -> State:
        if not self._previous or key not in self._memory:
            return None
        return SlotRows(self._memory, key, self._slots) if self._taken(key) else self._memory.get(key, self._slots)

    def _taken(self, key: Key) -> bool:
        return key[1] in self._takes and (key[1] == "conv" or self._memory.dtype(key) == torch.float32)


class CapturedStates(SlotStates):
    """In a captured step, whose sequences are others at each replay: the rows of their states are in a tensor, and only
    operators can take them from there. StateMemory.step_rows assumes that each state is read and written once."""

    def __init__(self, memory: StateMemory, rows: torch.Tensor, takes: Collection[str]) -> None:
        super().__init__(memory, (), True, takes)
        self._rows = rows

    def update_conv_state(self, *_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("a convolution keeps its columns without an operator")

    def update_recurrent_state(self, recurrent_states: State, layer_idx: int, state_idx: int = 0) -> State:
        if isinstance(recurrent_states, torch.Tensor):
            raise RuntimeError(f"no operator writes the recurrent state of layer {layer_idx}")
        return recurrent_states

    def _get(self, key: Key) -> State:
        if key not in self._memory:
            return None
        if not self._taken(key):
            raise RuntimeError(f"no operator reads the {key[1]} state of layer {key[0]} where it is")
        return SlotRows(self._memory, key, (), self._rows)


def named(module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of a module's forward by name, without those that transformers passes on for Tandem."""
    kind: Any = type(module)  # mypy holds nn.Module's classes for unhashable
    signature = _signature(kind)
    given = dict(signature.bind(module, *args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
    given.pop(next(iter(signature.parameters)))  # self
    return {name: value for name, value in given.items() if name not in OUR_KEYWORDS}


@functools.cache
def _signature(kind: Any) -> inspect.Signature:
    return inspect.signature(kind.forward)


class PackedModule(ABC):
    """A module whose forward separates the rows of packed steps; `argument` is the one that carries the cache."""

    def __init__(self, name: str, module: nn.Module, argument: str) -> None:
        self.name, self.module, self.argument = name, module, argument

    def switch(self, on: bool) -> None:
        """Between packed steps and the module's own forward."""
        if on:
            self.module.__dict__["forward"] = self.packed
        else:
            self.module.__dict__.pop("forward", None)

    @abstractmethod
    def packed(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward for the rows of the current step."""


class Mixer(PackedModule):
    """One mixer; `layers` are those whose states it keeps in the cache."""

    def __init__(self, name: str, module: nn.Module, argument: str, layers: Collection[int] = ()) -> None:
        super().__init__(name, module, argument)
        self.layers = layers
        self.by_token = False  # set by engine.loading.state_probe, like the next ones
        self.same_bits = False  # what computes it gives the same bits at once, in pieces and in company
        self.one_function = False  # transformers computes single tokens by the formula of chunks
        self.forward: Forward = type(module).forward  # or the forward over Tandem's operators, with
        self.takes: frozenset[str] = frozenset()  # the kinds of states that these read and write in place

    @property
    def by_operators(self) -> bool:
        return self.forward is not type(self.module).forward

    @property
    def exact(self) -> bool:
        """Whether a token has the same bits in any chunk and batch."""
        return self.same_bits and self.one_function

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        step: Any = current_step()
        given = named(self.module, *args, **kwargs)
        memory = step.pages.states
        if step.state_rows is not None:
            return self._alone(given, CapturedStates(memory, step.state_rows, self.takes))
        batch: Batch = step.batch
        total = sum(batch.query_lens)
        if total == len(batch.slots) and min(batch.context_lens) > 1:
            return self._alone(given, SlotStates(memory, batch.slots, True, self.takes))
        out: list[Any] = []
        single = False
        for rows, slots, previous in _calls(batch, self.by_token, memory.buffer.device):
            part = {name: pick(value, rows, total) for name, value in given.items()}
            result = self._call(part, SlotStates(memory, slots, previous, self.takes))
            single = not isinstance(result, tuple)
            results = (result,) if single else result
            out = out or [_packed_like(each, total) for each in results]
            for whole, each in zip(out, results, strict=True):
                if isinstance(each, torch.Tensor):
                    whole[0, rows.flatten()] = each.flatten(0, 1)
        return out[0] if single else tuple(out)

    def _alone(self, given: dict[str, Any], states: SlotStates) -> Any:
        """Where each sequence adds one token to earlier ones, the step's rows are those of one call: views of them."""
        return _turned(self._call({name: _turned(value) for name, value in given.items()}, states))

    def _call(self, given: dict[str, Any], states: SlotStates) -> Any:
        try:
            return self.forward(self.module, **{**given, self.argument: states})
        finally:
            asked_for.set(None)


class Mixers:
    """All mixers of a model, in the order of its modules, and their states."""

    def __init__(self, each: list[Mixer], facts: StateFacts) -> None:
        self.each = each
        self.facts = facts

    def switch(self, on: bool) -> None:
        for mixer in self.each:
            mixer.switch(on)

    def facts_of(self, mixer: Mixer) -> StateFacts:
        """The states of one mixer."""
        return self.facts._replace(states=tuple(each for each in self.facts.states if each.key[0] in mixer.layers))

    @property
    def exact(self) -> bool:
        return all(mixer.exact for mixer in self.each)

    @property
    def by_operators(self) -> bool:
        """Whether Tandem's operators serve all of them."""
        return all(mixer.by_operators for mixer in self.each)

    def __str__(self) -> str:
        alone = sum(mixer.by_token for mixer in self.each)
        slow = f", {alone} of them one token at a time" if alone else ""
        ours = sum(mixer.by_operators for mixer in self.each)
        fast = f", {ours} of them by compiled operators" if ours else ""
        return f"{len(self.each)} recurrent layers with {len(self.facts.states)} states{slow}{fast}"


def _calls(batch: Batch, by_token: bool, device: torch.device) -> Iterator[tuple[torch.Tensor, list[int], bool]]:
    """Rows `[n, tokens]` on the device, slots and whether there are earlier tokens, for each call of a mixer."""
    groups: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)  # (tokens, earlier) -> (first row, slot)
    start = 0
    for query, context, slot in zip(batch.query_lens, batch.context_lens, batch.slots, strict=True):
        groups[query, context > query].append((start, slot))
        start += query
    for (query, previous), members in groups.items():
        starts = on_device([first for first, _ in members], torch.int64, device)
        rows = starts.unsqueeze(1) + torch.arange(query, device=device)
        slots = [slot for _, slot in members]
        if not by_token:
            yield rows, slots, previous
            continue
        for token in range(query):
            yield rows[:, token : token + 1], slots, previous or token > 0


def over_tensors(change: Callable[..., Any], value: Any, *others: Any) -> Any:
    """An argument with each of its tensors changed, those in tuples and lists too. `change` gets the tensor and what
    `others`, of the same form, have in its place."""
    if isinstance(value, torch.Tensor):
        return change(value, *others)
    if isinstance(value, (tuple, list)):
        return type(value)(over_tensors(change, *each) for each in zip(value, *others, strict=True))
    return value


def pick(value: Any, rows: torch.Tensor, total: int) -> Any:
    """The given rows of a value for each packed token: `[1, total, ...]` becomes `[n, tokens, ...]`."""

    def picked(each: torch.Tensor) -> torch.Tensor:
        assert each.shape[:2] == (1, total), f"an argument of shape {tuple(each.shape)} for {total} packed tokens"
        return each[0][rows.to(each.device)]

    return over_tensors(picked, value)


def _turned(value: Any) -> Any:
    """`[1, n, ...]` as `[n, 1, ...]`, and back: a view."""
    return over_tensors(lambda each: each.transpose(0, 1), value)


def _packed_like(value: Any, total: int) -> Any:
    return value.new_empty(1, total, *value.shape[2:]) if isinstance(value, torch.Tensor) else value
