// A step that is repeated: what its operators did, with the same tensors, without the dispatcher, the allocations and the
// interpreter between them (capture.cpp). With one row these take 17 % of a step, for weights that are read at full rate
// leave none of their code and data in the caches.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <functional>

namespace tandem {

// Runs an operator with the tensors of its first run, and writes its results where that one wrote them.
using Replay = std::function<void()>;

// Makes one of an operator's arguments and results; null where it cannot, and the operator itself is called, which is slower.
using MakeReplay = Replay (*)(const torch::jit::Stack& arguments, const torch::jit::Stack& results);

// Registers how tandem::`name` is replayed, while the library is loaded. Returns whether the name was free.
bool register_replay(const char* name, MakeReplay make);

}  // namespace tandem
