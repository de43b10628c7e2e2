// What the operators of recurrent layers share: the rows of states that a call reads and writes.
#pragma once

#include "ops.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <vector>

namespace tandem {

// Rows of one state (engine/kv/state_memory.py): sequence i goes on from row from[i], or from zeros if that is negative,
// and leaves its new state in row to[i], which may be the same.
template <typename T>
struct RowsOf {
  T* data;
  int64_t apart;  // elements from row to row
  at::IntArrayRef having, into;

  const T* from(int64_t i) const { return having[i] < 0 ? nullptr : data + having[i] * apart; }
  T* to(int64_t i) const { return data + into[i] * apart; }
};
using StateRows = RowsOf<float>;

// `states` [rows, *shape]: each row is contiguous, rows lie anywhere. `from` and `to` name rows for n sequences.
template <typename T = float>
RowsOf<T> rows_of_states(at::Tensor& states, const std::vector<int64_t>& shape, at::IntArrayRef from, at::IntArrayRef to,
                         int64_t n) {
  TORCH_CHECK(states.scalar_type() == c10::CppTypeToScalarType<T>::value, "tandem: states of another type");
  TORCH_CHECK(states.dim() == static_cast<int64_t>(shape.size()) + 1 && states.sizes().slice(1) == shape,
              "tandem: states of another shape");
  int64_t size = 1;
  for (int64_t d = states.dim() - 1; d > 0; size *= states.size(d), --d)
    TORCH_CHECK(states.stride(d) == size || states.size(d) == 1, "tandem: a row of states is contiguous");
  TORCH_CHECK(static_cast<int64_t>(from.size()) == n && static_cast<int64_t>(to.size()) == n, "tandem: one row each");
  for (int64_t i = 0; i < n; ++i)
    TORCH_CHECK(from[i] < states.size(0) && to[i] >= 0 && to[i] < states.size(0), "tandem: no such row of states");
  return {states.data_ptr<T>(), states.stride(0), from, to};
}

}  // namespace tandem
