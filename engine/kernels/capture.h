// Replays a step: its operators on the same tensors, without the dispatcher, the allocations and the interpreter
// between them (capture.cpp). With one row these take 17 % of a step, because weights that are read at full rate evict
// their code and data from the caches.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <functional>

namespace tandem {

// Runs an operator on the tensors of its first run, and writes its results into the same memory.
using Replay = std::function<void()>;

// Makes a Replay from an operator's arguments and results; if it returns null, the operator itself is called, which is
// slower.
using MakeReplay = Replay (*)(const torch::jit::Stack& arguments, const torch::jit::Stack& results);

// Registers how tandem::`name` is replayed, while the library is loaded. Returns whether the name was free.
bool register_replay(const char* name, MakeReplay make);

}  // namespace tandem
