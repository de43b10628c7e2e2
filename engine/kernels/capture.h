// A step that is repeated: what its operators did, with the same tensors, without the dispatcher, the allocations and the
// interpreter between them (capture.cpp). With one row these take 17 % of a step, for weights that are read at full rate
// leave none of their code and data in the caches.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <functional>

namespace tandem {

// Does an operator again, from the tensors that it had into those that it returned.
using Again = std::function<void()>;

// Makes one from an operator's arguments and results; null where these want the operator itself, which is slower.
using MakeAgain = Again (*)(const torch::jit::Stack& arguments, const torch::jit::Stack& results);

// Says how tandem::`name` is done again; to be called while the library is loaded.
bool is_repeated(const char* name, MakeAgain make);

}  // namespace tandem
