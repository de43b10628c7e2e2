// Captured steps: the counterpart of CUDA graphs for a CPU.
//
//     step = CapturedStep()
//     step.begin()          records each operator that this thread calls from here on
//     out = run()
//     step.end([out])       intermediate tensors not in use at the same time share memory; views are dropped
//     step.replay()         runs the operators again; `out` has the new values
//
// Tensors from outside (weights, pages, inputs) keep their addresses, so a caller copies the next step's inputs into
// the tensors of the captured one. Refused, since a replay could not repeat them, are steps that read a number from a
// tensor, and operators whose results are random or have sizes that depend on values. Nobody may keep an intermediate
// tensor, since each replay changes it.
#include "capture.h"

#include "ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace tandem {
namespace {

using at::Tensor;
using torch::jit::Stack;

constexpr auto KEY = c10::DispatchKey::TESTING_ONLY_GenericMode;  // no other kernels are registered for it
constexpr int64_t ALIGNED = 64;

std::map<std::string, MakeReplay>& makers() {
  static std::map<std::string, MakeReplay> table;
  return table;
}

struct Call {
  c10::OperatorHandle op;
  Stack arguments, results;

  const std::string& name() const { return op.schema().name(); }
};

template <typename F>
void for_tensors(const Stack& values, const F& f) {
  for (const c10::IValue& value : values) {
    if (value.isTensor() && value.toTensor().defined()) f(value.toTensor());
    if (value.isTensorList())
      for (const Tensor& each : value.toTensorVector()) f(each);
    if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& each : value.toOptionalTensorVector())
        if (each.has_value() && each->defined()) f(*each);
  }
}

c10::StorageImpl* storage_of(const Tensor& t) { return t.storage().unsafeGetStorageImpl(); }

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

bool only_makes_room(const std::string& name) {
  static const std::set<std::string> names = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided",
                                              "aten::new_empty_strided"};
  return names.count(name) > 0;
}

bool asks_for_sizes(const std::string& name) {
  static const std::set<std::string> names = {"aten::size",   "aten::stride",  "aten::numel", "aten::dim",
                                              "aten::sym_size", "aten::sym_numel", "aten::sym_stride"};
  return names.count(name) > 0 || starts_with(name, "aten::is_");
}

// Whether the call has only side effects, as tandem::stepping has.
bool has_no_tensors(const Call& call) {
  bool none = true;
  for_tensors(call.arguments, [&](const Tensor&) { none = false; });
  for_tensors(call.results, [&](const Tensor&) { none = false; });
  return none;
}

// x[i, j] without a mask: only with a mask do the result's sizes depend on values.
bool indexes_by_number(const Call& call) {
  if (call.name() != "aten::index") return false;
  bool by_number = true;
  for_tensors({call.arguments[1]}, [&](const Tensor& t) {
    by_number = by_number && t.scalar_type() != at::kBool && t.scalar_type() != at::kByte;
  });
  return by_number;
}

// Why a replay of this call could be wrong; empty if it cannot.
std::string refusal(const Call& call) {
  if (has_no_tensors(call) || (asks_for_sizes(call.name()) && call.name() != "aten::is_nonzero") ||
      indexes_by_number(call))
    return "";
  if (call.name() == "aten::item" || call.name() == "aten::_local_scalar_dense") return "a number is taken out of a tensor";
  for (const at::Tag tag : {at::Tag::dynamic_output_shape, at::Tag::data_dependent_output, at::Tag::nondeterministic_seeded})
    if (call.op.hasTag(tag)) return call.name() + " has a result that depends on values, or on chance";
  for (const c10::IValue& value : call.results)
    if (!value.isTensor() && !value.isTensorList() && !value.isNone())
      return "a number is taken out of a tensor by " + call.name();
  return "";
}

// The operator that computes the same into tensors that are given, as aten::mul.out does for aten::mul.Tensor: a replay by
// it neither allocates nor copies. Only of those that invariant.cpp does not replace, directly or below them.
std::optional<c10::OperatorHandle> into_given(const Call& call) {
  static const std::set<std::string> names = {"aten::add", "aten::cat", "aten::div",     "aten::index", "aten::mean", "aten::mul",
                                              "aten::neg", "aten::pow", "aten::rsqrt", "aten::softmax", "aten::sub", "aten::sum"};
  if (names.count(call.name()) == 0) return {};
  static const auto overloads = [] {
    std::multimap<std::string, c10::OperatorName> all;
    for (const c10::OperatorName& each : c10::Dispatcher::singleton().getAllOpNames())
      if (names.count(each.name) > 0) all.emplace(each.name, each);
    return all;
  }();
  if (call.op.schema().is_mutable()) return {};
  const auto& own = call.op.schema().arguments();
  const auto [first, last] = overloads.equal_range(call.name());
  for (auto each = first; each != last; ++each) {
    const auto found = c10::Dispatcher::singleton().findSchema(each->second);
    if (!found || found->schema().arguments().size() != own.size() + call.results.size()) continue;
    const auto& theirs = found->schema().arguments();
    bool same = true;
    for (size_t i = 0; i < theirs.size(); ++i)
      same = same && (i < own.size() ? theirs[i].name() == own[i].name() && *theirs[i].type() == *own[i].type()
                                     : theirs[i].is_out());
    if (same) return found;
  }
  return {};
}

class CapturedStep;
thread_local CapturedStep* active = nullptr;  // the step that records this thread's operators

class CapturedStep : public torch::CustomClassHolder {
 public:
  ~CapturedStep() override {
    if (active == this) stop();
  }

  void begin() {
    TORCH_CHECK(active == nullptr && calls_.empty(), "tandem::CapturedStep: begun already");
    active = this;
    c10::impl::tls_set_dispatch_key_included(KEY, true);
  }

  void add(Call call) { calls_.push_back(std::move(call)); }

  // Ends the step; its results `outputs` are valid until the next replay. Replays it once, in its own memory.
  void end(const std::vector<Tensor>& outputs) {
    TORCH_CHECK(active == this, "tandem::CapturedStep: not begun");
    stop();
    outputs_ = outputs;
    for (const Call& call : calls_) {
      const std::string why = refusal(call);
      TORCH_CHECK(why.empty(), "tandem::CapturedStep: ", why);
    }
    check_sources();
    share_memory();
    for (const Call& call : calls_)
      if (computes(call)) replays_.push_back(replay_of(call));
    calls_.clear();
    replay();
  }

  void abandon() {
    if (active == this) stop();
    calls_.clear();
  }

  void replay() {
    for (const Replay& run : replays_) run();
  }

  // Bytes of the intermediate tensors and results.
  int64_t memory() const { return arena_.defined() ? arena_.nbytes() : 0; }

 private:
  void stop() {
    active = nullptr;
    c10::impl::tls_set_dispatch_key_included(KEY, false);
  }

  static bool writes(const Call& call) { return call.op.schema().is_mutable() && !call.op.hasTag(at::Tag::inplace_view); }

  // Results that do not share an argument's storage.
  static std::vector<Tensor> made_by(const Call& call) {
    std::set<c10::StorageImpl*> given;
    for_tensors(call.arguments, [&](const Tensor& t) { given.insert(storage_of(t)); });
    std::vector<Tensor> made;
    for_tensors(call.results, [&](const Tensor& t) {
      if (given.count(storage_of(t)) == 0) made.push_back(t);
    });
    return made;
  }

  static bool is_view(const Call& call) { return made_by(call).empty(); }

  static bool computes(const Call& call) {
    return writes(call) || has_no_tensors(call) || (!is_view(call) && !only_makes_room(call.name()));
  }

  // Checks that operators wrote every tensor that the step makes and reads: replays do not repeat writes by the host.
  void check_sources() const {
    std::set<c10::StorageImpl*> blank;
    for (const Call& call : calls_) {
      const auto& formal = call.op.schema().arguments();
      for (size_t i = 0; i < formal.size() && computes(call); ++i) {
        const bool written = formal[i].alias_info() != nullptr && formal[i].alias_info()->isWrite();
        for_tensors({call.arguments[i]}, [&](const Tensor& t) {
          if (written) blank.erase(storage_of(t));
          TORCH_CHECK(written || t.numel() == 0 || blank.count(storage_of(t)) == 0, "tandem::CapturedStep: ", call.name(),
                      " reads a tensor that the host has filled");
        });
      }
      if (only_makes_room(call.name())) for_tensors(call.results, [&](const Tensor& t) { blank.insert(storage_of(t)); });
    }
  }

  // Moves the step's storages into one arena, where those not in use at the same time overlap.
  void share_memory() {
    struct Life {
      int64_t first, last, bytes, at = 0;
    };
    std::map<c10::StorageImpl*, Life> lives;
    std::vector<c10::StorageImpl*> made;  // in order of creation
    for (int64_t i = 0; i < static_cast<int64_t>(calls_.size()); ++i) {
      const Call& call = calls_[i];
      for (const Tensor& t : made_by(call))
        if (lives.try_emplace(storage_of(t), Life{i, i, static_cast<int64_t>(t.storage().nbytes())}).second)
          made.push_back(storage_of(t));
      if (!computes(call)) continue;
      const auto use = [&](const Tensor& t) {
        if (const auto life = lives.find(storage_of(t)); life != lives.end()) life->second.last = i;
      };
      for_tensors(call.arguments, use);
      for_tensors(call.results, use);
    }
    for (const Tensor& each : outputs_)
      if (const auto life = lives.find(storage_of(each)); life != lives.end())
        life->second.last = static_cast<int64_t>(calls_.size());
    int64_t total = 0;
    std::vector<Life*> placed;
    for (c10::StorageImpl* each : made) {
      Life& own = lives[each];
      std::vector<std::pair<int64_t, int64_t>> taken;  // [from, to) of those in use at the same time
      for (const Life* other : placed)
        if (other->last >= own.first && other->first <= own.last) taken.emplace_back(other->at, other->at + other->bytes);
      std::sort(taken.begin(), taken.end());
      for (const auto& [from, to] : taken) {
        if (own.at + own.bytes <= from) break;
        own.at = std::max(own.at, (to + ALIGNED - 1) / ALIGNED * ALIGNED);
      }
      total = std::max(total, own.at + own.bytes);
      placed.push_back(&own);
    }
    arena_ = at::empty({total + ALIGNED}, at::TensorOptions().dtype(at::kByte));
    auto* base = static_cast<uint8_t*>(arena_.data_ptr());
    base += (ALIGNED - reinterpret_cast<uintptr_t>(base) % ALIGNED) % ALIGNED;
    for (c10::StorageImpl* each : made)
      each->set_data_ptr_noswap(c10::DataPtr(base + lives[each].at, c10::Device(c10::kCPU)));
  }

  static Replay replay_of(const Call& call) {
    const auto maker = makers().find(call.name());
    if (maker != makers().end())
      if (Replay own = maker->second(call.arguments, call.results)) return own;
    if (!writes(call) && (call.name() == "aten::to" || call.name() == "aten::_to_copy" || call.name() == "aten::contiguous" ||
                          call.name() == "aten::clone"))
      return [from = call.arguments[0].toTensor(), to = call.results[0].toTensor()] { to.copy_(from); };
    if (const auto into = into_given(call))
      return [op = *into, arguments = [&] {
                Stack all = call.arguments;
                all.insert(all.end(), call.results.begin(), call.results.end());
                return all;
              }()] {
        Stack stack = arguments;
        op.callBoxed(stack);
      };
    std::set<c10::StorageImpl*> given;  // an argument that the operator writes to and returns is there already
    for_tensors(call.arguments, [&](const Tensor& t) { given.insert(storage_of(t)); });
    return [op = call.op, arguments = call.arguments, results = call.results, given] {
      Stack stack = arguments;
      op.callBoxed(stack);
      std::vector<Tensor> fresh, kept;
      for_tensors(stack, [&](const Tensor& t) { fresh.push_back(t); });
      for_tensors(results, [&](const Tensor& t) { kept.push_back(t); });
      TORCH_CHECK(fresh.size() == kept.size(), "tandem::CapturedStep: ", op.schema().name(), " returns another number of tensors");
      for (size_t i = 0; i < fresh.size(); ++i) {
        if (given.count(storage_of(kept[i])) > 0) continue;
        TORCH_CHECK(fresh[i].sizes() == kept[i].sizes(), "tandem::CapturedStep: ", op.schema().name(), " returns other sizes");
        kept[i].copy_(fresh[i]);
      }
    };
  }

  std::vector<Call> calls_;
  std::vector<Replay> replays_;
  std::vector<Tensor> outputs_;
  Tensor arena_;
};

// Calls an operator and adds it to the step, without the operators that it calls itself.
void intercept(const c10::OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(KEY);
  const size_t count = op.schema().arguments().size();
  Stack arguments(stack->end() - static_cast<int64_t>(count), stack->end());
  op.callBoxed(*stack);
  const size_t returned = op.schema().returns().size();
  if (active != nullptr)
    active->add({op, std::move(arguments), Stack(stack->end() - static_cast<int64_t>(returned), stack->end())});
}

}  // namespace

bool register_replay(const char* name, MakeReplay make) {
  return makers().emplace(std::string("tandem::") + name, make).second;
}

}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.class_<tandem::CapturedStep>("CapturedStep")
      .def(torch::init<>())
      .def("begin", &tandem::CapturedStep::begin)
      .def("end", &tandem::CapturedStep::end)
      .def("abandon", &tandem::CapturedStep::abandon)
      .def("replay", &tandem::CapturedStep::replay)
      .def("memory", &tandem::CapturedStep::memory);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&tandem::intercept>());
}
