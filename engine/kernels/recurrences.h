// What the operators of recurrent layers share: the rows of states that a call reads and writes.
#pragma once

#include "ops.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <vector>

namespace tandem {

// Rows of one state (engine/kv/state_memory.py): sequence i goes on from row having[i], or from zeros if that is negative,
// and leaves its new state in row into[i], which may be the same.
template <typename T>
struct RowsOf {
  T* data;
  int64_t apart;  // elements from row to row
  at::IntArrayRef having, into;

  const T* from(int64_t i) const { return having[i] < 0 ? nullptr : data + having[i] * apart; }
  T* to(int64_t i) const { return data + into[i] * apart; }
};
using StateRows = RowsOf<float>;

// `states` [all rows, *shape]: each row is contiguous, rows lie anywhere. `rows` int64 [2, n] names those that n sequences
// read, and those that they write: a tensor, so that a captured step finds other numbers in it at each replay.
template <typename T = float>
RowsOf<T> rows_of_states(at::Tensor& states, const std::vector<int64_t>& shape, const at::Tensor& rows, int64_t n) {
  TORCH_CHECK(states.scalar_type() == c10::CppTypeToScalarType<T>::value, "tandem: states of another type");
  TORCH_CHECK(states.dim() == static_cast<int64_t>(shape.size()) + 1 && states.sizes().slice(1) == shape,
              "tandem: states of another shape");
  int64_t size = 1;
  for (int64_t d = states.dim() - 1; d > 0; size *= states.size(d), --d)
    TORCH_CHECK(states.stride(d) == size || states.size(d) == 1, "tandem: a row of states is contiguous");
  TORCH_CHECK(rows.scalar_type() == at::kLong && rows.is_contiguous() && rows.dim() == 2 && rows.size(0) == 2 &&
                  rows.size(1) == n,
              "tandem: one row each");
  const at::IntArrayRef having(rows.const_data_ptr<int64_t>(), n), into(rows.const_data_ptr<int64_t>() + n, n);
  for (int64_t i = 0; i < n; ++i)
    TORCH_CHECK(having[i] < states.size(0) && into[i] >= 0 && into[i] < states.size(0), "tandem: no such row of states");
  return {states.data_ptr<T>(), states.stride(0), having, into};
}

}  // namespace tandem
